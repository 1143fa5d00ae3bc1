/* Every instruction set that this machine has gives the bits of the plain C kernels in the
 * recurrent path, gates, norms and convolutions, and equals them up to rounding in the chunked
 * path. Sets that did not run are printed as skipped. */
#define KDA_IMPLEMENTATION
#include "../kda.h"
#include "operator.h"

/* One layer's call with everything random, in the memory of a case. */
typedef struct layer_case {
    kda_layer_desc layer;
    size_t tokens, row; /* floats of a row */
    float *rows;        /* [tokens][row]: q | k | v | g | beta | gate */
    float *weights;
    void *state;
    float *window;
    float *o;
    size_t state_bytes, window_bytes, o_count;
} layer_case;

static float *take(float **at, size_t n) {
    float *p = *at;
    *at += n;
    return p;
}

static layer_case layer_new(const kda_desc *op, size_t width, size_t tokens) {
    layer_case x;
    size_t qk = problem_qk_heads(op) * op->dim_k, v = op->n_heads * op->dim_v;
    size_t g = op->n_heads * op->dim_k;
    memset(&x, 0, sizeof x);
    x.tokens = tokens;
    x.row = 2 * qk + 2 * v + g + op->n_heads;
    x.rows = problem_normal(tokens * x.row);
    /* Keys that nothing normalises are short: a state stays of the size of its values. */
    for (size_t i = 0; !(op->flags & KDA_L2_NORM_QK) && i < tokens * x.row; i++)
        if (i % x.row < 2 * qk) x.rows[i] *= 0.25f / sqrtf((float)op->dim_k * (float)width);
    x.weights = problem_normal((2 * qk + v) * width + op->n_heads + g + op->dim_v);
    float *at = x.weights;
    x.layer.op = *op;
    x.layer.conv_width = width;
    x.layer.conv_activation = width % 2 ? KDA_ACTIVATION_NONE : KDA_ACTIVATION_SILU;
    x.layer.q_conv = take(&at, qk * width);
    x.layer.k_conv = take(&at, qk * width);
    x.layer.v_conv = take(&at, v * width);
    x.layer.norm_weight = take(&at, op->dim_v);
    x.layer.norm_eps = 1e-5f;
    if (op->gate != KDA_GATE_LOG_DECAY) {
        x.layer.A_log = take(&at, op->n_heads);
        x.layer.dt_bias = take(&at, g);
    }
    x.state_bytes = kda_state_bytes(op);
    x.window_bytes = kda_layer_window_bytes(&x.layer);
    x.o_count = tokens * v;
    x.state = test_alloc(x.state_bytes);
    x.window = test_floats(x.window_bytes / 4 + 1);
    x.o = test_floats(x.o_count);
    return x;
}

static void layer_free(layer_case *x) {
    free(x->rows);
    free(x->weights);
    free(x->state);
    free(x->window);
    free(x->o);
}

/* From zeros, in two calls so that windows and states are carried. */
static void layer_run(layer_case *x, kda_algorithm algorithm, kda_isa isa) {
    const kda_desc *op = &x->layer.op;
    size_t qk = problem_qk_heads(op) * op->dim_k, v = op->n_heads * op->dim_v;
    size_t first = x->tokens / 3;
    memset(x->state, 0, x->state_bytes);
    memset(x->window, 0, x->window_bytes);
    for (int part = 0; part < 2; part++) {
        size_t begin = part ? first : 0;
        const float *at = x->rows + begin * x->row;
        ptrdiff_t row = (ptrdiff_t)x->row, k = (ptrdiff_t)op->dim_k, w = (ptrdiff_t)op->dim_v;
        kda_seq seq;
        kda_layer_args args;
        kda_run run;
        memset(&seq, 0, sizeof seq), memset(&args, 0, sizeof args), memset(&run, 0, sizeof run);
        args.q = kda_in_f32(at, row, k), args.k = kda_in_f32(at + qk, row, k);
        args.v = kda_in_f32(at + 2 * qk, row, w), args.g = kda_in_f32(at + 2 * qk + v, row, k);
        at += 2 * qk + v + op->n_heads * op->dim_k;
        args.beta = kda_in_f32(at, row, 1), args.gate = kda_in_f32(at + op->n_heads, row, w);
        args.o = kda_out_f32(x->o + begin * v, (ptrdiff_t)v, w);
        seq.n_tokens = part ? x->tokens - first : first;
        seq.state = x->state, seq.window = x->window;
        args.seqs = &seq, args.n_seqs = 1;
        run.algorithm = algorithm, run.isa = isa;
        run.scratch_bytes = kda_layer_scratch_bytes(&x->layer, 1, &run);
        run.scratch = test_scratch(run.scratch_bytes);
        CHECK(kda_layer(&x->layer, &args, &run) == KDA_OK);
        free(run.scratch);
    }
}

/* The same case through an ISA and through plain C: recurrent to the bit, chunked to 1e-6. */
static void check_case(const kda_desc *op, size_t width, size_t tokens, kda_isa isa) {
    layer_case x = layer_new(op, width, tokens);
    float *want = test_floats(x.o_count);
    void *want_state = test_alloc(x.state_bytes);
    for (int algorithm = KDA_RECURRENT; algorithm <= KDA_CHUNKED; algorithm++) {
        layer_run(&x, (kda_algorithm)algorithm, KDA_ISA_SCALAR);
        memcpy(want, x.o, x.o_count * sizeof(float));
        memcpy(want_state, x.state, x.state_bytes);
        layer_run(&x, (kda_algorithm)algorithm, isa);
        if (algorithm == KDA_RECURRENT) {
            CHECK_MSG(memcmp(want, x.o, x.o_count * sizeof(float)) == 0 &&
                          memcmp(want_state, x.state, x.state_bytes) == 0,
                      "%s: %zu x %zu, width %zu, gate %d", kda_isa_name(isa), op->dim_k, op->dim_v,
                      width, (int)op->gate);
        } else {
            double bound = op->state_type == KDA_F16 ? 2e-3 : 2e-6;
            CHECK_AT_MOST("chunked", test_relative_l2_f32(x.o, want, x.o_count), bound);
        }
    }
    free(want), free(want_state);
    layer_free(&x);
}

static void check_isa(kda_isa isa) {
    static const size_t dims[] = {1,  2,  3,  7,  15,  16,  17,  31,  32,
                                  33, 48, 60, 64, 100, 127, 128, 129, 192};
    size_t n = sizeof dims / sizeof *dims;
    if (!kda_isa_is_available(isa)) {
        char why[64];
        snprintf(why, sizeof why, "%s: not on this machine or in this build", kda_isa_name(isa));
        test_skip(why);
        return;
    }
    printf("  ran %s\n", kda_isa_name(isa));
    test_seed(1);
    for (size_t i = 0; i < n; i++) {
        kda_desc op = problem_desc(2, 1, dims[i], dims[(i * 7 + 3) % n]);
        op.gate = (kda_gate)(1 + i % 3);
        op.lower_bound = op.gate == KDA_GATE_BOUNDED ? -5.0f : 0.0f;
        op.beta = (kda_beta)(1 + i / 3 % 3);
        op.state_type = i % 4 == 3 ? KDA_F16 : KDA_F32;
        op.flags = i % 7 < 5 ? KDA_L2_NORM_QK : 0;
        check_case(&op, 1 + i % 5, 40, isa);
    }
}

static void avx2_equals_scalar(void) {
    check_isa(KDA_ISA_AVX2);
}
static void avx512_equals_scalar(void) {
    check_isa(KDA_ISA_AVX512);
}
static void neon_equals_scalar(void) {
    check_isa(KDA_ISA_NEON);
}

/* Adversarial numbers: subnormal, huge, signed zeros, -inf gates, through every set. */
static void extremes_have_the_same_bits(void) {
    static const float odd[] = {0.0f,     -0.0f,    0x1p-149f, -0x1p-149f, 0x1p-126f, 1e-30f,
                                -1e-20f,  1e10f,    -1e15f,    87.0f,      -88.0f,    -104.0f,
                                88.73f,   -17.3f,   20.0f,     -1e4f,      3e-39f,    1.0f};
    size_t n_odd = sizeof odd / sizeof *odd;
    test_seed(2);
    for (int isa = KDA_ISA_AVX2; isa <= KDA_ISA_NEON; isa++)
        for (int gate = KDA_GATE_LOG_DECAY; isa != 0 && gate <= KDA_GATE_BOUNDED; gate++) {
            if (!kda_isa_is_available((kda_isa)isa)) continue;
            kda_desc op = problem_desc(2, 0, 40, 24);
            op.gate = (kda_gate)gate;
            op.lower_bound = gate == KDA_GATE_BOUNDED ? -5.0f : 0.0f;
            layer_case x = layer_new(&op, 4, 30);
            for (size_t i = 0; i < x.tokens * x.row; i += 1 + (size_t)(test_random_u64() % 7))
                x.rows[i] = odd[test_random_u64() % n_odd];
            float *want = test_floats(x.o_count);
            void *want_state = test_alloc(x.state_bytes);
            layer_run(&x, KDA_RECURRENT, KDA_ISA_SCALAR);
            memcpy(want, x.o, x.o_count * sizeof(float));
            memcpy(want_state, x.state, x.state_bytes);
            layer_run(&x, KDA_RECURRENT, (kda_isa)isa);
            for (size_t i = 0; i < x.o_count; i++)
                CHECK(isnan(want[i]) ? isnan(x.o[i]) : memcmp(want + i, x.o + i, 4) == 0);
            for (size_t i = 0; i < x.state_bytes / 4; i++) {
                float a = ((float *)want_state)[i], b = ((float *)x.state)[i];
                CHECK(isnan(a) ? isnan(b) : memcmp(&a, &b, 4) == 0);
            }
            free(want), free(want_state);
            layer_free(&x);
        }
}

/* An infinite correction leaves the padding of rows alone: with all keys and queries above 0 and
 * beta below, what follows stays infinite and is no NaN. */
static void infinities_stay_in_their_channels(void) {
    enum { K = 5, V = 3, TOKENS = 4 };
    for (int isa = KDA_ISA_SCALAR; isa <= KDA_ISA_NEON; isa++) {
        float state[K * V] = {0}, o[TOKENS * V];
        kda_run run;
        kda_seq seq;
        memset(&run, 0, sizeof run), memset(&seq, 0, sizeof seq);
        run.algorithm = KDA_RECURRENT, run.isa = (kda_isa)isa;
        if (!kda_isa_is_available(run.isa)) continue;
        float rows[TOKENS * K], v[TOKENS * V], g[TOKENS * K], beta[TOKENS];
        for (size_t i = 0; i < TOKENS * K; i++) rows[i] = 0.25f, g[i] = -0.5f;
        for (size_t i = 0; i < TOKENS * V; i++) v[i] = i < V ? HUGE_VALF : 1.0f;
        for (size_t i = 0; i < TOKENS; i++) beta[i] = i == 0 ? 1.0f : -1.0f;
        kda_args args;
        memset(&args, 0, sizeof args);
        args.q = args.k = kda_in_f32(rows, K, K), args.v = kda_in_f32(v, V, V);
        args.g = kda_in_f32(g, K, K), args.beta = kda_in_f32(beta, 1, 1);
        args.o = kda_out_f32(o, V, V);
        seq.n_tokens = TOKENS, seq.state = state;
        args.seqs = &seq, args.n_seqs = 1;
        kda_desc desc = problem_desc(1, 0, K, V);
        desc.beta = KDA_BETA_VALUE;
        run.scratch_bytes = kda_scratch_bytes(&desc, 1, &run);
        run.scratch = test_scratch(run.scratch_bytes);
        CHECK(kda_forward(&desc, &args, &run) == KDA_OK);
        for (size_t i = 0; i < TOKENS * V; i++)
            CHECK_MSG(o[i] == HUGE_VALF, "%s: output %zu is %g", kda_isa_name(run.isa), i,
                      (double)o[i]);
        free(run.scratch);
    }
}

/* The elementary functions inside the kernels, over a spread of all floats. */
static void functions_have_the_same_bits(void) {
    enum { N = 4096 };
    static float raw[N], want[N], got[N];
    float A_log = 0.3f;
    for (int isa = KDA_ISA_AVX2; isa <= KDA_ISA_NEON; isa++)
        for (int gate = KDA_GATE_SOFTPLUS; gate <= KDA_GATE_BOUNDED; gate++)
            for (uint32_t start = 0; start < 200; start++) {
                kda_run run, plain;
                kda_desc op = problem_desc(1, 0, N, 1);
                memset(&run, 0, sizeof run), memset(&plain, 0, sizeof plain);
                run.isa = (kda_isa)isa, plain.isa = KDA_ISA_SCALAR;
                if (!kda_isa_is_available(run.isa)) continue;
                op.gate = (kda_gate)gate;
                op.lower_bound = gate == KDA_GATE_BOUNDED ? -5.0f : 0.0f;
                for (uint32_t i = 0; i < N; i++) {
                    uint32_t bits = (start * N + i) * 5237u;
                    memcpy(&raw[i], &bits, sizeof bits);
                }
                raw[0] = 0x1.81fffep-24f, raw[1] = 0x1.1104eep+0f; /* told of contraction once */
                CHECK(kda_log_decay(&op, 1, kda_in_f32(raw, N, N), &A_log, NULL,
                                    kda_out_f32(want, N, N), &plain) == KDA_OK);
                CHECK(kda_log_decay(&op, 1, kda_in_f32(raw, N, N), &A_log, NULL,
                                    kda_out_f32(got, N, N), &run) == KDA_OK);
                for (size_t i = 0; i < N; i++)
                    CHECK_MSG(isnan(want[i]) ? isnan(got[i]) : memcmp(want + i, got + i, 4) == 0,
                              "%s, gate %d of %a: %a, want %a", kda_isa_name(run.isa), gate,
                              (double)raw[i], (double)got[i], (double)want[i]);
            }
}

/* All 16-bit patterns in, and roundings out. */
static void conversions_have_the_same_bits(void) {
    enum { N = 65536 };
    static uint16_t bits[N], out_plain[N], out[N];
    static float x[N], y[N];
    for (int isa = KDA_ISA_AVX2; isa <= KDA_ISA_NEON; isa++)
        for (int type = KDA_F16; type <= KDA_BF16; type++) {
            const kdai_kernels *kernels = kdai_kernels_of((kda_isa)isa);
            if (!kernels) continue;
            for (size_t i = 0; i < N; i++) bits[i] = (uint16_t)i;
            kdai_to_floats(bits, (kda_type)type, N, x);
            kernels->to_floats(bits, (kda_type)type, N, y);
            for (size_t i = 0; i < N; i++)
                CHECK(isnan(x[i]) ? isnan(y[i]) : memcmp(x + i, y + i, 4) == 0);
            for (uint32_t shift = 0; shift < 64; shift++) {
                for (uint32_t i = 0; i < N; i++) {
                    uint32_t pattern = (i << 16) + shift * 1024 + (i * 40503u >> 22);
                    memcpy(&x[i], &pattern, 4);
                }
                kdai_from_floats(x, (kda_type)type, N, out_plain);
                kernels->from_floats(x, (kda_type)type, N, out);
                for (size_t i = 0; i < N; i++)
                    CHECK_MSG(out[i] == out_plain[i] || isnan(x[i]), "%s: %a to type %d",
                              kda_isa_name((kda_isa)isa), (double)x[i], type);
            }
        }
}

/* A state that has decayed to subnormals is zeros to a step, and the caller's own arithmetic keeps
 * its subnormals afterwards. */
static void subnormals_count_as_zero_within_a_call_only(void) {
#if defined(__x86_64__) || defined(__aarch64__)
    kda_desc op = problem_desc(1, 0, 16, 4);
    test_seed(3);
    problem p = problem_new(&op, 1);
    float o[4], state[64], zeros[64] = {0}, want[4];
    volatile float least = 0x1p-126f, half = 0.5f;
    for (size_t i = 0; i < 64; i++) state[i] = 0x1p-140f * (float)(i + 1);
    CHECK(problem_run(&p, KDA_RECURRENT, 0, 1, state, o) == KDA_OK);
    CHECK(problem_run(&p, KDA_RECURRENT, 0, 1, zeros, want) == KDA_OK);
    CHECK(memcmp(o, want, sizeof o) == 0 && memcmp(state, zeros, sizeof state) == 0);
    CHECK(least * half > 0.0f);
    problem_free(&p);
#else
    test_skip("nothing is flushed on this processor");
#endif
}

/* The bits themselves: the number was found on one machine, and every other, with whatever compiler
 * and instruction set, must find it too. */
static void every_machine_has_the_same_bits(void) {
    uint64_t hash = TEST_HASH_START;
    test_seed(4);
    for (int gate = KDA_GATE_LOG_DECAY; gate <= KDA_GATE_BOUNDED; gate++) {
        kda_desc op = problem_desc(4, 2, 40, 24);
        op.gate = (kda_gate)gate;
        op.lower_bound = gate == KDA_GATE_BOUNDED ? -5.0f : 0.0f;
        layer_case x = layer_new(&op, 4, 30);
        layer_run(&x, KDA_RECURRENT, KDA_ISA_AUTO);
        hash = test_hash_f32(hash, x.o, x.o_count);
        hash = test_hash_f32(hash, (const float *)x.state, x.state_bytes / sizeof(float));
        hash = test_hash_f32(hash, x.window, x.window_bytes / sizeof(float));
        layer_free(&x);
    }
    CHECK_MSG(hash == 0x601d3332ebc76dddu, "0x%08lx%08lx", (unsigned long)(hash >> 32),
              (unsigned long)(hash & 0xffffffffu));
}

static void names_and_refusals(void) {
    kda_desc op = problem_desc(1, 0, 4, 4);
    kda_run run;
    memset(&run, 0, sizeof run);
    CHECK(strcmp(kda_isa_name(KDA_ISA_AVX512), "avx512") == 0);
    CHECK(strcmp(kda_isa_name((kda_isa)9), "unknown") == 0);
    CHECK(kda_isa_is_available(KDA_ISA_AUTO) && kda_isa_is_available(KDA_ISA_SCALAR));
    CHECK(kda_isa_is_available(kda_isa_best()) && kda_isa_best() != KDA_ISA_AUTO);
    CHECK(!kda_isa_is_available((kda_isa)9));
    run.isa = (kda_isa)9;
    CHECK(kda_scratch_bytes(&op, 1, &run) == 0);
    run.isa = kda_isa_is_available(KDA_ISA_NEON) ? KDA_ISA_AVX2 : KDA_ISA_NEON;
    problem p = problem_new(&op, 1);
    float o[4];
    kda_args args = problem_args(&p, 0, o);
    CHECK(kda_forward(&op, &args, &run) == KDA_ERR_ISA);
    problem_free(&p);
}

int main(void) {
    TEST(avx2_equals_scalar);
    TEST(avx512_equals_scalar);
    TEST(neon_equals_scalar);
    TEST(extremes_have_the_same_bits);
    TEST(infinities_stay_in_their_channels);
    TEST(functions_have_the_same_bits);
    TEST(conversions_have_the_same_bits);
    TEST(subnormals_count_as_zero_within_a_call_only);
    TEST(every_machine_has_the_same_bits);
    TEST(names_and_refusals);
    return test_summary();
}
