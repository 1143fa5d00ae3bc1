/* Misuse: each kind gives its own result, and nothing is written. Sizes are 0 where they must. */
#include "../kda.h"
#include "operator.h"

/* A small valid call whose parts a case can spoil. Everything that a call may write is one block,
 * compared before and after. */
typedef struct call {
    kda_desc desc;
    kda_args args;
    kda_run run;
    kda_seq seqs[2];
    problem p;
    float *written; /* output and two states */
    size_t written_count;
} call;

enum { HEADS = 2, K = 4, V = 3, TOKENS = 5 };

static void call_init(call *c) {
    memset(c, 0, sizeof *c);
    c->desc = problem_desc(HEADS, 0, K, V);
    c->desc.gate = KDA_GATE_SOFTPLUS;
    test_seed(1);
    c->p = problem_new(&c->desc, TOKENS);
    c->written_count = c->p.output_count + 2 * c->p.state_count;
    c->written = problem_normal(c->written_count);
    c->args = problem_args(&c->p, 0, c->written);
    c->seqs[0].n_tokens = 2;
    c->seqs[0].state = c->written + c->p.output_count;
    c->seqs[1].n_tokens = 3;
    c->seqs[1].state = c->written + c->p.output_count + c->p.state_count;
    c->args.seqs = c->seqs;
    c->args.n_seqs = 2;
    c->run.scratch_bytes = kda_scratch_bytes(&c->desc, 2, NULL);
    c->run.scratch = test_scratch(c->run.scratch_bytes);
}

static void call_free(call *c) {
    free(c->run.scratch);
    free(c->written);
    problem_free(&c->p);
}

static void call_expect(call *c, kda_result want, const char *what) {
    float *before = test_floats(c->written_count);
    memcpy(before, c->written, c->written_count * sizeof(float));
    kda_result got = kda_forward(&c->desc, &c->args, &c->run);
    CHECK_MSG(got == want, "%s: %s, want %s", what, kda_result_name(got), kda_result_name(want));
    CHECK_MSG(memcmp(before, c->written, c->written_count * sizeof(float)) == 0, "%s: wrote", what);
    free(before);
}

/* Spoils one thing of a fresh valid call and expects the result. */
#define SPOIL(statement, want)                                                                     \
    do {                                                                                           \
        call c;                                                                                    \
        call_init(&c);                                                                             \
        statement;                                                                                 \
        call_expect(&c, want, #statement);                                                         \
        call_free(&c);                                                                             \
    } while (0)

static void the_unspoiled_call_is_valid(void) {
    call c;
    call_init(&c);
    CHECK(kda_forward(&c.desc, &c.args, &c.run) == KDA_OK);
    call_free(&c);
}

static void description(void) {
    SPOIL(memset(&c.desc, 0, sizeof c.desc), KDA_ERR_DIMS);
    SPOIL(c.desc.n_heads = 0, KDA_ERR_DIMS);
    SPOIL(c.desc.dim_k = 0, KDA_ERR_DIMS);
    SPOIL(c.desc.dim_v = 0, KDA_ERR_DIMS);
    SPOIL(c.desc.n_qk_heads = 3, KDA_ERR_DIMS);
    SPOIL(c.desc.n_qk_heads = 4, KDA_ERR_DIMS);
    SPOIL(c.desc.gate = (kda_gate)0, KDA_ERR_GATE);
    SPOIL(c.desc.gate = (kda_gate)4, KDA_ERR_GATE);
    SPOIL(c.desc.beta = (kda_beta)0, KDA_ERR_BETA);
    SPOIL(c.desc.beta = (kda_beta)4, KDA_ERR_BETA);
    SPOIL(c.desc.head_map = (kda_head_map)2, KDA_ERR_HEAD_MAP);
    SPOIL(c.desc.flags = 2, KDA_ERR_FLAGS);
    SPOIL(c.desc.flags = 0x80000001u, KDA_ERR_FLAGS);
    SPOIL(c.desc.scale = NAN, KDA_ERR_NUMBER);
    SPOIL(c.desc.scale = -1, KDA_ERR_NUMBER);
    SPOIL(c.desc.scale = INFINITY, KDA_ERR_NUMBER);
    SPOIL(c.desc.l2_eps = -1e-6f, KDA_ERR_NUMBER);
    SPOIL(c.desc.l2_eps = NAN, KDA_ERR_NUMBER);
    SPOIL(c.desc.state_type = KDA_BF16, KDA_ERR_TYPE);
    SPOIL(c.desc.state_type = (kda_type)3, KDA_ERR_TYPE);
    SPOIL(c.desc.lower_bound = -5, KDA_ERR_LOWER_BOUND); /* the 48B has none */
    SPOIL(c.desc.gate = KDA_GATE_BOUNDED, KDA_ERR_LOWER_BOUND);
    SPOIL((c.desc.gate = KDA_GATE_BOUNDED, c.desc.lower_bound = 1), KDA_ERR_LOWER_BOUND);
    SPOIL((c.desc.gate = KDA_GATE_BOUNDED, c.desc.lower_bound = NAN), KDA_ERR_LOWER_BOUND);
    SPOIL((c.desc.gate = KDA_GATE_BOUNDED, c.desc.lower_bound = -INFINITY), KDA_ERR_LOWER_BOUND);
    SPOIL(c.desc.gate = KDA_GATE_LOG_DECAY, KDA_ERR_GATE); /* A_log would be swallowed */
    SPOIL((c.desc.gate = KDA_GATE_LOG_DECAY, c.args.dt_bias = c.args.A_log, c.args.A_log = NULL),
          KDA_ERR_GATE);
    SPOIL(c.args.A_log = NULL, KDA_ERR_NULL);
    SPOIL(c.desc.dim_k = SIZE_MAX / 8, KDA_ERR_SIZE);
    SPOIL(c.desc.n_heads = SIZE_MAX, KDA_ERR_SIZE);
}

static void pointers(void) {
    SPOIL(c.args.q.data = NULL, KDA_ERR_NULL);
    SPOIL(c.args.k.data = NULL, KDA_ERR_NULL);
    SPOIL(c.args.v.data = NULL, KDA_ERR_NULL);
    SPOIL(c.args.g.data = NULL, KDA_ERR_NULL);
    SPOIL(c.args.beta.data = NULL, KDA_ERR_NULL);
    SPOIL(c.args.o.data = NULL, KDA_ERR_NULL);
    SPOIL(c.args.seqs = NULL, KDA_ERR_NULL);
    SPOIL(c.args.q.data = (const char *)c.args.q.data + 1, KDA_ERR_ALIGN);
    SPOIL(c.args.o.data = (char *)c.args.o.data + 2, KDA_ERR_ALIGN);
    SPOIL(c.seqs[0].state = (char *)c.seqs[0].state + 2, KDA_ERR_ALIGN);
    SPOIL(c.args.A_log = (const float *)(const void *)((const char *)c.args.A_log + 1),
          KDA_ERR_ALIGN);
    SPOIL(c.args.dt_bias = (const float *)(const void *)((const char *)c.p.dt_bias + 1),
          KDA_ERR_ALIGN);
    SPOIL(c.args.v.type = (kda_type)77, KDA_ERR_TYPE);
    SPOIL(c.args.o.type = (kda_type)-1, KDA_ERR_TYPE);
    call c;
    call_init(&c);
    CHECK(kda_forward(NULL, &c.args, &c.run) == KDA_ERR_NULL);
    CHECK(kda_forward(&c.desc, NULL, &c.run) == KDA_ERR_NULL);
    CHECK(kda_forward(&c.desc, &c.args, NULL) == KDA_ERR_NULL);
    call_free(&c);
}

static void strides(void) {
    SPOIL(c.args.o.token_stride = 0, KDA_ERR_STRIDE);
    SPOIL(c.args.o.head_stride = 0, KDA_ERR_STRIDE);
    SPOIL(c.args.o.head_stride = V - 1, KDA_ERR_STRIDE);
    SPOIL(c.args.o.token_stride = HEADS * V - 1, KDA_ERR_STRIDE);
    SPOIL(c.args.o.token_stride = -(HEADS * V - 1), KDA_ERR_STRIDE);
    SPOIL((c.args.o.token_stride = V, c.args.o.head_stride = TOKENS * V - 1), KDA_ERR_STRIDE);
    SPOIL(c.args.q.token_stride = PTRDIFF_MAX / 4, KDA_ERR_SIZE);
    SPOIL(c.args.q.token_stride = PTRDIFF_MIN, KDA_ERR_SIZE);
    SPOIL(c.args.q.head_stride = PTRDIFF_MIN, KDA_ERR_SIZE);
    SPOIL(c.args.o.head_stride = PTRDIFF_MAX / 2, KDA_ERR_SIZE);
    /* The last token's row begins within what can be addressed and ends beyond it. */
    SPOIL((c.args.q.token_stride = PTRDIFF_MAX / 4 / (TOKENS - 1), c.args.q.head_stride = 0),
          KDA_ERR_SIZE);
    SPOIL(c.seqs[0].n_tokens = SIZE_MAX, KDA_ERR_SIZE);
    SPOIL((c.seqs[0].n_tokens = SIZE_MAX / 2 - 1, c.args.q.token_stride = 1), KDA_ERR_SIZE);
}

static void never_called(void *user, size_t n, kda_task task, void *context) {
    (void)user, (void)n, (void)task, (void)context;
    CHECK_MSG(0, "the hook was called");
}

static void running(void) {
    SPOIL(c.run.scratch = (free(c.run.scratch), NULL), KDA_ERR_SCRATCH);
    SPOIL(c.run.scratch_bytes = kda_scratch_bytes(&c.desc, 2, NULL) - 1, KDA_ERR_SCRATCH);
    SPOIL(c.run.algorithm = (kda_algorithm)3, KDA_ERR_ALGORITHM);
    SPOIL(c.run.algorithm = (kda_algorithm)-1, KDA_ERR_ALGORITHM);
    SPOIL(c.run.parallel_for = never_called, KDA_ERR_THREADS);
    SPOIL((c.run.parallel_for = never_called, c.run.n_threads = SIZE_MAX / 2), KDA_ERR_SIZE);
    SPOIL(c.seqs[1].state = c.seqs[0].state, KDA_ERR_ALIAS);
    SPOIL(c.seqs[1].state = (float *)c.seqs[0].state + 1, KDA_ERR_ALIAS); /* they overlap */
    SPOIL((c.seqs[1].state = c.seqs[0].state, c.seqs[1].n_tokens = 0), KDA_ERR_ALIAS);
}

/* Many sequences, two of them with one state, whatever their places. */
static void duplicates_are_found_anywhere(void) {
    enum { N = 37 };
    kda_desc desc = problem_desc(1, 0, 1, 1);
    static float states[N + 1], token[N], o[N];
    kda_seq seqs[N];
    kda_args args;
    kda_run run;
    unsigned char scratch[32768];
    memset(&args, 0, sizeof args);
    memset(&run, 0, sizeof run);
    args.q = args.k = args.v = args.g = args.beta = kda_in_f32(token, 1, 1);
    args.o = kda_out_f32(o, 1, 1);
    args.seqs = seqs, args.n_seqs = N;
    run.scratch = scratch, run.scratch_bytes = sizeof scratch;
    CHECK(kda_scratch_bytes(&desc, N, NULL) <= sizeof scratch);
    for (size_t a = 0; a < N; a++)
        for (size_t b = 0; b < a; b++) {
            memset(seqs, 0, sizeof seqs);
            for (size_t i = 0; i < N; i++) {
                seqs[i].n_tokens = 1;
                seqs[i].state = &states[(i * 11) % N]; /* each once, out of order */
            }
            CHECK(kda_forward(&desc, &args, &run) == KDA_OK);
            seqs[a].state = seqs[b].state;
            CHECK(kda_forward(&desc, &args, &run) == KDA_ERR_ALIAS);
        }
}

static void nothing_to_do_is_no_error(void) {
    call c;
    call_init(&c);
    c.args.n_seqs = 0;
    c.args.seqs = NULL;
    call_expect(&c, KDA_OK, "no sequences");
    c.args.seqs = c.seqs;
    c.args.n_seqs = 2;
    c.seqs[0].n_tokens = c.seqs[1].n_tokens = 0;
    c.args.q.data = c.args.k.data = c.args.v.data = c.args.g.data = c.args.beta.data = NULL;
    c.args.o.data = NULL;
    call_expect(&c, KDA_OK, "no tokens, no tensors");
    call_free(&c);
}

static void sizes(void) {
    kda_desc desc = problem_desc(3, 0, 5, 7);
    CHECK(kda_state_bytes(&desc) == 3 * 5 * 7 * 4);
    CHECK(kda_scratch_bytes(&desc, 0, NULL) > 0);
    CHECK(kda_scratch_bytes(&desc, SIZE_MAX / 2, NULL) == 0);
    kda_run recurrent;
    memset(&recurrent, 0, sizeof recurrent);
    recurrent.algorithm = KDA_RECURRENT;
    CHECK(kda_scratch_bytes(&desc, 1, &recurrent) < kda_scratch_bytes(&desc, 1, NULL));
    desc.dim_k = (size_t)1 << (sizeof(size_t) * 8 - 4);
    desc.dim_v = 1, desc.n_heads = 1;
    CHECK(kda_scratch_bytes(&desc, 1, NULL) == 0); /* the state would fit, 16 rows do not */
    desc.dim_v = 16;
    CHECK(kda_state_bytes(&desc) == 0 && kda_scratch_bytes(&desc, 1, NULL) == 0);
    desc.n_heads = 1, desc.dim_k = desc.dim_v = 65536; /* 2^34 bytes: wraps to 0 in 32 bits */
    CHECK(kda_state_bytes(&desc) == (size_t)(sizeof(size_t) > 4 ? (uint64_t)1 << 34 : 0));
    desc.dim_k = 4, desc.dim_v = 3, desc.n_heads = 0x55555556u; /* 2^36 + 32: wraps to 32 */
    CHECK((kda_state_bytes(&desc) == 0) == (sizeof(size_t) == 4));
    CHECK((kda_journal_bytes(&desc, 1) == 0) == (sizeof(size_t) == 4));
    memset(&desc, 0, sizeof desc);
    CHECK(kda_state_bytes(&desc) == 0 && kda_scratch_bytes(&desc, 1, NULL) == 0);
    CHECK(kda_state_bytes(NULL) == 0 && kda_scratch_bytes(NULL, 1, NULL) == 0);
}

static float *misaligned(float *x) {
    return (float *)(void *)((char *)x + 2);
}

static void state_functions(void) {
    kda_desc desc = problem_desc(1, 0, 2, 2), zero;
    float kv[4] = {1, 2, 3, 4}, state[4] = {5, 6, 7, 8};
    memset(&zero, 0, sizeof zero);
    CHECK(kda_state_clear(&zero, state) == KDA_ERR_DIMS);
    CHECK(kda_state_clear(&desc, NULL) == KDA_ERR_NULL);
    CHECK(kda_state_clear(&desc, (char *)state + 1) == KDA_ERR_ALIGN);
    CHECK(kda_state_copy(&zero, state, kv) == KDA_ERR_DIMS);
    CHECK(kda_state_copy(&desc, NULL, kv) == KDA_ERR_NULL);
    CHECK(kda_state_copy(&desc, state, NULL) == KDA_ERR_NULL);
    CHECK(kda_state_copy(&desc, (char *)state + 1, kv) == KDA_ERR_ALIGN);
    CHECK(kda_state_copy(&desc, state, (char *)kv + 1) == KDA_ERR_ALIGN);
    CHECK(kda_state_import_kv(&desc, NULL, state) == KDA_ERR_NULL);
    CHECK(kda_state_export_kv(&desc, NULL, kv) == KDA_ERR_NULL);
    CHECK(kda_state_export_kv(&desc, state, misaligned(kv)) == KDA_ERR_ALIGN);
    CHECK(kda_state_import_kv(&desc, misaligned(kv), state) == KDA_ERR_ALIGN);
    CHECK(state[0] == 5 && kv[0] == 1);
}

static void convolution(void) {
    float x[8] = {0}, y[8] = {0}, weight[8] = {0}, window[8] = {0};
    unsigned char scratch[32768];
    kda_conv_desc good, desc;
    kda_seq seqs[2];
    kda_conv_args args;
    kda_run run;
    memset(&good, 0, sizeof good);
    memset(seqs, 0, sizeof seqs);
    memset(&args, 0, sizeof args);
    memset(&run, 0, sizeof run);
    good.channels = 4, good.width = 2, good.activation = KDA_ACTIVATION_SILU;
    seqs[0].n_tokens = seqs[1].n_tokens = 1;
    seqs[0].window = window, seqs[1].window = window + 4;
    args.x = kda_in_f32(x, 4, 0), args.y = kda_out_f32(y, 4, 0), args.weight = weight;
    args.seqs = seqs, args.n_seqs = 2;
    run.scratch = scratch, run.scratch_bytes = sizeof scratch;
    CHECK(kda_conv_scratch_bytes(&good, 2, NULL) <= sizeof scratch);
    CHECK(kda_conv_window_bytes(&good) == 4 * sizeof(float));
    CHECK(kda_conv(&good, &args, &run) == KDA_OK);
    desc = good, desc.channels = 0;
    CHECK(kda_conv(&desc, &args, &run) == KDA_ERR_DIMS && kda_conv_window_bytes(&desc) == 0);
    desc = good, desc.width = 0;
    CHECK(kda_conv(&desc, &args, &run) == KDA_ERR_WIDTH);
    desc.width = KDA_CONV_MAX_WIDTH + 1;
    CHECK(kda_conv(&desc, &args, &run) == KDA_ERR_WIDTH);
    desc = good, desc.activation = (kda_activation)0;
    CHECK(kda_conv(&desc, &args, &run) == KDA_ERR_ACTIVATION);
    desc = good, desc.channels = SIZE_MAX / 4;
    CHECK(kda_conv(&desc, &args, &run) == KDA_ERR_SIZE);
    CHECK(kda_conv_window_bytes(&desc) == 0 && kda_conv_scratch_bytes(&desc, 1, NULL) == 0);
    CHECK(kda_conv(NULL, &args, &run) == KDA_ERR_NULL);
    CHECK(kda_conv(&good, NULL, &run) == KDA_ERR_NULL);
    CHECK(kda_conv(&good, &args, NULL) == KDA_ERR_NULL);
    run.scratch_bytes = 1;
    CHECK(kda_conv(&good, &args, &run) == KDA_ERR_SCRATCH);
    run.scratch_bytes = sizeof scratch, run.scratch = NULL;
    CHECK(kda_conv(&good, &args, &run) == KDA_ERR_SCRATCH);
    run.scratch = scratch, run.parallel_for = never_called;
    CHECK(kda_conv(&good, &args, &run) == KDA_ERR_THREADS);
    CHECK(kda_conv_scratch_bytes(&good, 2, &run) == 0);
    run.n_threads = SIZE_MAX / 2;
    CHECK(kda_conv(&good, &args, &run) == KDA_ERR_SIZE);
    run.parallel_for = NULL, run.n_threads = 0;
    seqs[1].window = window + 1;
    CHECK(kda_conv(&good, &args, &run) == KDA_ERR_ALIAS);
    seqs[1].window = (char *)(window + 4) + 1;
    CHECK(kda_conv(&good, &args, &run) == KDA_ERR_ALIGN);
    seqs[1].window = window + 4;
    args.y.token_stride = 3;
    CHECK(kda_conv(&good, &args, &run) == KDA_ERR_STRIDE);
    args.y.token_stride = 4;
    args.weight = NULL;
    CHECK(kda_conv(&good, &args, &run) == KDA_ERR_NULL);
    args.weight = misaligned(weight);
    CHECK(kda_conv(&good, &args, &run) == KDA_ERR_ALIGN);
    for (size_t i = 0; i < 8; i++) CHECK(y[i] == 0 && window[i] == 0);
}

static void norms_and_gate(void) {
    float x[4] = {1, 2, 3, 4}, y[4] = {9, 9, 9, 9}, weight[4] = {1, 1, 1, 1};
    kda_input in = kda_in_f32(x, 4, 4), none = kda_in_f32(NULL, 4, 4);
    kda_output out = kda_out_f32(y, 4, 4);
    CHECK(kda_l2_norm(1, 0, 4, 0, in, out, NULL) == KDA_ERR_DIMS);
    CHECK(kda_l2_norm(1, 1, 0, 0, in, out, NULL) == KDA_ERR_DIMS);
    CHECK(kda_l2_norm(1, 1, 4, -1, in, out, NULL) == KDA_ERR_NUMBER);
    CHECK(kda_l2_norm(1, 1, 4, 0, none, out, NULL) == KDA_ERR_NULL);
    CHECK(kda_l2_norm(2, 1, 4, 0, in, kda_out_f32(y, 3, 4), NULL) == KDA_ERR_STRIDE);
    CHECK(kda_l2_norm(0, 1, 4, 0, none, kda_out_f32(NULL, 0, 0), NULL) == KDA_OK);
    CHECK(kda_gated_norm(1, 1, 4, 1e-5f, NULL, in, in, out, NULL) == KDA_ERR_NULL);
    CHECK(kda_gated_norm(1, 1, 4, 1e-5f, weight, in, none, out, NULL) == KDA_ERR_NULL);
    CHECK(kda_gated_norm(1, 1, 4, NAN, weight, in, in, out, NULL) == KDA_ERR_NUMBER);
    kda_run run;
    memset(&run, 0, sizeof run);
    run.isa = (kda_isa)9;
    CHECK(kda_l2_norm(1, 1, 4, 0, in, out, &run) == KDA_ERR_ISA);
    kda_desc desc = problem_desc(1, 0, 4, 0);
    CHECK(kda_log_decay(&desc, 1, in, NULL, NULL, out, NULL) == KDA_ERR_DIMS);
    desc.dim_v = 4;
    CHECK(kda_log_decay(&desc, 1, in, NULL, NULL, out, NULL) == KDA_ERR_GATE);
    desc.gate = KDA_GATE_SOFTPLUS;
    CHECK(kda_log_decay(&desc, 1, in, NULL, NULL, out, NULL) == KDA_ERR_NULL);
    CHECK(kda_log_decay(&desc, 1, none, weight, NULL, out, NULL) == KDA_ERR_NULL);
    for (size_t i = 0; i < 4; i++) CHECK(y[i] == 9);
}

static void every_result_has_its_name_and_text(void) {
#define NAMED(result) CHECK(strcmp(kda_result_name(result), #result) == 0)
    NAMED(KDA_OK);
    NAMED(KDA_ERR_NULL);
    NAMED(KDA_ERR_DIMS);
    NAMED(KDA_ERR_SIZE);
    NAMED(KDA_ERR_GATE);
    NAMED(KDA_ERR_LOWER_BOUND);
    NAMED(KDA_ERR_BETA);
    NAMED(KDA_ERR_HEAD_MAP);
    NAMED(KDA_ERR_FLAGS);
    NAMED(KDA_ERR_NUMBER);
    NAMED(KDA_ERR_TYPE);
    NAMED(KDA_ERR_ALIGN);
    NAMED(KDA_ERR_STRIDE);
    NAMED(KDA_ERR_ALIAS);
    NAMED(KDA_ERR_ALGORITHM);
    NAMED(KDA_ERR_SCRATCH);
    NAMED(KDA_ERR_WIDTH);
    NAMED(KDA_ERR_ACTIVATION);
    NAMED(KDA_ERR_THREADS);
    NAMED(KDA_ERR_JOURNAL);
    NAMED(KDA_ERR_COUNT);
    NAMED(KDA_ERR_BLOB);
    NAMED(KDA_ERR_BLOB_VERSION);
    NAMED(KDA_ERR_BLOB_SHORT);
    NAMED(KDA_ERR_BLOB_LONG);
    NAMED(KDA_ERR_BLOB_ALTERED);
    NAMED(KDA_ERR_BLOB_MISMATCH);
    NAMED(KDA_ERR_ISA);
    for (int r = KDA_OK; r <= KDA_ERR_ISA; r++)
        CHECK(strlen(kda_result_text((kda_result)r)) >= 8);
    CHECK(strcmp(kda_result_name((kda_result)(KDA_ERR_ISA + 1)), "KDA_ERR_UNKNOWN") == 0);
    CHECK(strcmp(kda_result_name((kda_result)-1), "KDA_ERR_UNKNOWN") == 0);
}

int main(void) {
    TEST(the_unspoiled_call_is_valid);
    TEST(description);
    TEST(pointers);
    TEST(strides);
    TEST(running);
    TEST(duplicates_are_found_anywhere);
    TEST(nothing_to_do_is_no_error);
    TEST(sizes);
    TEST(state_functions);
    TEST(convolution);
    TEST(norms_and_gate);
    TEST(every_result_has_its_name_and_text);
    return test_summary();
}
