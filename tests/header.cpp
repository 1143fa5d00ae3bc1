// Both headers as C++, with the implementation, in one file; and the smallest program.
#define KDA_IMPLEMENTATION
#define ATTNRES_IMPLEMENTATION
#include "../kda.h"
#include "../attnres.h"

#include <cstdio>
#include <cstring>

int main() {
    kda_desc desc{};
    desc.n_heads = 1, desc.dim_k = 2, desc.dim_v = 2;
    desc.gate = KDA_GATE_LOG_DECAY, desc.beta = KDA_BETA_VALUE, desc.scale = 1;
    float q[2] = {1, 0}, k[2] = {1, 0}, v[2] = {3, 4}, g[2] = {-1, -1}, beta[1] = {0.5f};
    float o[2], state[4] = {};
    unsigned char scratch[16384];
    kda_seq seq{};
    seq.n_tokens = 1, seq.state = state;
    kda_args args{};
    args.q = kda_in_f32(q, 2, 2), args.k = kda_in_f32(k, 2, 2), args.v = kda_in_f32(v, 2, 2);
    args.g = kda_in_f32(g, 2, 2), args.beta = kda_in_f32(beta, 1, 1), args.o = kda_out_f32(o, 2, 2);
    args.seqs = &seq, args.n_seqs = 1;
    kda_run run{};
    run.scratch = scratch, run.scratch_bytes = sizeof scratch;
    bool right = kda_forward(&desc, &args, &run) == KDA_OK && o[0] == 1.5f && o[1] == 2.0f &&
                 std::strcmp(attnres_result_name(ATTNRES_OK), "ATTNRES_OK") == 0;
    std::printf("%d passed, %d failed, 0 skipped\n", right ? 1 : 0, right ? 0 : 1);
    return right ? 0 : 1;
}
