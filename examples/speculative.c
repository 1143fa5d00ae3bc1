/* speculative.c - speculative decoding of one KDA layer: drafts of 4 tokens are verified against a
 * state that stays as it is, and the accepted ones are committed from a journal.
 *
 *     make && build/speculative
 *
 * The inputs stand for what a model's projections would give; which drafts are accepted is drawn by
 * lot. At the end, state and window must equal those of a serial run over the accepted tokens, bit
 * for bit (exit status 1 if not), whatever was rejected on the way.
 */
#define KDA_IMPLEMENTATION
#include "../kda.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HEADS = 4, K = 128, V = 128, DRAFT = 4, STEPS = 12, TAPS = 4 };
enum { ROW = HEADS * (3 * K + 2 * V + 1) }; /* q | k | g | v | gate | beta of all heads */

static void *owned[16 + STEPS]; /* all memory of the program, freed at its end */
static size_t n_owned;

static void *zeroed(size_t bytes) {
    void *p = owned[n_owned++] = bytes > 0 ? calloc(bytes, 1) : NULL; /* 0: of what is invalid */
    if (p) return p;
    fprintf(stderr, "speculative: no memory for %zu bytes\n", bytes);
    exit(1);
}

static uint64_t lot = 2510;
static uint32_t draw(void) { /* splitmix64 */
    uint64_t z = lot += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    return (uint32_t)((z ^ z >> 27) >> 32);
}

static float *random_floats(size_t n, float size) {
    float *x = (float *)zeroed(n * sizeof(float));
    for (size_t i = 0; i < n; i++) x[i] = size * ((float)(draw() >> 8) * 0x1p-23f - 1);
    return x;
}

static kda_layer_desc new_layer(void) {
    kda_layer_desc layer;
    memset(&layer, 0, sizeof layer);
    layer.op.n_heads = HEADS, layer.op.dim_k = K, layer.op.dim_v = V;
    layer.op.gate = KDA_GATE_SOFTPLUS, layer.op.beta = KDA_BETA_LOGIT;
    layer.op.flags = KDA_L2_NORM_QK;
    layer.conv_width = TAPS, layer.conv_activation = KDA_ACTIVATION_SILU;
    layer.q_conv = random_floats(HEADS * K * TAPS, 1),
    layer.k_conv = random_floats(HEADS * K * TAPS, 1);
    layer.v_conv = random_floats(HEADS * V * TAPS, 1);
    layer.A_log = random_floats(HEADS, 2), layer.dt_bias = random_floats(HEADS * K, 3);
    layer.norm_weight = random_floats(V, 1), layer.norm_eps = 1e-5f;
    return layer;
}

/* The views of rows of projections; o: [rows][HEADS][V]. */
static kda_layer_args views(const float *rows, float *o, const kda_seq *seq) {
    kda_layer_args args;
    memset(&args, 0, sizeof args);
    args.q = kda_in_f32(rows, ROW, K);
    args.k = kda_in_f32(rows + HEADS * K, ROW, K);
    args.g = kda_in_f32(rows + 2 * HEADS * K, ROW, K);
    args.v = kda_in_f32(rows + 3 * HEADS * K, ROW, V);
    args.gate = kda_in_f32(rows + HEADS * (3 * K + V), ROW, V);
    args.beta = kda_in_f32(rows + HEADS * (3 * K + 2 * V), ROW, 1);
    args.o = kda_out_f32(o, HEADS * V, V);
    args.seqs = seq, args.n_seqs = 1;
    return args;
}

static void must(kda_result result) {
    if (result == KDA_OK) return;
    fprintf(stderr, "%s: %s\n", kda_result_name(result), kda_result_text(result));
    exit(1);
}

int main(void) {
    kda_layer_desc layer = new_layer();
    size_t state_bytes = kda_state_bytes(&layer.op), window_bytes = kda_layer_window_bytes(&layer);
    kda_seq fast, serial; /* the speculative run and the one to compare with */
    kda_run run;
    float o[DRAFT * HEADS * V], want[HEADS * V];
    int same = 1;
    memset(&fast, 0, sizeof fast), memset(&run, 0, sizeof run);
    fast.state = zeroed(state_bytes), fast.window = zeroed(window_bytes);
    fast.journal = zeroed(kda_layer_journal_bytes(&layer, DRAFT));
    serial = fast;
    serial.state = zeroed(state_bytes), serial.window = zeroed(window_bytes);
    run.algorithm = KDA_RECURRENT;
    run.scratch_bytes = kda_layer_scratch_bytes(&layer, 1, &run);
    run.scratch = zeroed(run.scratch_bytes);

    puts("step  drafted  accepted  tokens");
    size_t tokens = 0;
    for (int step = 1; step <= STEPS; step++) {
        /* 1. The draft model proposes tokens; projections of all of them at once. */
        float *rows = random_floats(DRAFT * ROW, 1);
        kda_layer_args args = views(rows, o, &fast);
        /* 2. Outputs for all of them. State and window stay; the journal has the updates. */
        fast.n_tokens = DRAFT;
        must(kda_layer_verify(&layer, &args, &run));
        /* 3. The sampler accepts a prefix, perhaps nothing. */
        size_t accepted = draw() % (DRAFT + 1);
        /* 4. State and window move on by just that. */
        fast.n_tokens = accepted;
        must(kda_layer_commit(&layer, &fast, 1, &run));
        for (size_t t = 0; t < accepted; t++) { /* the same tokens one by one */
            args = views(rows + t * ROW, want, &serial);
            serial.n_tokens = 1;
            must(kda_layer(&layer, &args, &run));
            same &= memcmp(want, o + t * HEADS * V, sizeof want) == 0;
        }
        tokens += accepted;
        printf("%4d  %7d  %8zu  %6zu\n", step, DRAFT, accepted, tokens);
    }

    size_t per_token = kda_journal_bytes(&layer.op, 2) - kda_journal_bytes(&layer.op, 1);
    printf("\nto undo a token, per head:   journal %zu bytes,   copy of the state %zu bytes\n",
           per_token / HEADS, state_bytes / HEADS);
    same &= memcmp(fast.state, serial.state, state_bytes) == 0;
    same &= memcmp(fast.window, serial.window, window_bytes) == 0;
    puts(same ? "outputs, state and window equal the serial run's, bit for bit"
              : "outputs, state or window DIFFER from the serial run's");
    while (n_owned > 0) free(owned[--n_owned]);
    return !same;
}
