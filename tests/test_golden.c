/* Every KDA file of tests/golden/ops through both algorithms: output and final state. */
#include "../kda.h"
#define SAFETENSORS_IMPLEMENTATION
#include "../examples/safetensors.h"
#include "test.h"

/* A float32 copy of a tensor, or null if the file has none of that name. */
static float *load(const st_checkpoint *file, const char *name) {
    const st_tensor *tensor = st_find(file, name);
    if (!tensor || tensor->dtype != ST_F32) return NULL;
    float *x = test_floats(tensor->elements);
    for (size_t i = 0; i < tensor->elements; i++) x[i] = st_load_f32(tensor->data + 4 * i);
    return x;
}

static double *load_f64(const st_checkpoint *file, const char *name) {
    const st_tensor *tensor = st_find(file, name);
    if (!tensor || tensor->dtype != ST_F64) return NULL;
    double *x = (double *)test_alloc(tensor->elements * sizeof *x);
    for (size_t i = 0; i < tensor->elements; i++) x[i] = st_load_f64(tensor->data + 8 * i);
    return x;
}

/* One file: the inputs, what is expected, and the error that is allowed. */
typedef struct golden {
    kda_desc desc;
    size_t batch, tokens; /* tokens of each sequence */
    float *q, *k, *v, *g, *beta, *A_log, *dt_bias, *start;
    double *o, *state;
    double o_bound, state_bound;
} golden;

static void golden_free(golden *x) {
    float *floats[] = {x->q, x->k, x->v, x->g, x->beta, x->A_log, x->dt_bias, x->start};
    for (size_t i = 0; i < sizeof floats / sizeof *floats; i++) free(floats[i]);
    free(x->o);
    free(x->state);
}

static void golden_shape(golden *x, const st_checkpoint *file) {
    const st_tensor *q = st_find(file, "q"), *v = st_find(file, "v");
    x->batch = q->dims[0];
    x->tokens = q->dims[1];
    x->desc.n_heads = v->dims[2];
    x->desc.n_qk_heads = q->dims[2];
    x->desc.dim_k = q->dims[3];
    x->desc.dim_v = v->dims[3];
}

/* "At most 4 times the error of the float32 reference plus 1e-7"; 1e-6 where the file has none. */
static double golden_bound(const st_checkpoint *file, const char *name, const double *want) {
    const st_tensor *tensor = st_find(file, name);
    float *reference = load(file, name);
    if (!reference) return 1e-6;
    double bound = 4 * test_relative_l2(reference, want, tensor->elements) + 1e-7;
    free(reference);
    return bound;
}

static bool golden_load(golden *x, const char *path) {
    st_checkpoint file;
    error e;
    memset(x, 0, sizeof *x);
    bool opened = st_open_file(&file, path, &e);
    CHECK_MSG(opened, "%s", e.text);
    if (!opened) return false;
    golden_shape(x, &file);
    x->q = load(&file, "q");
    x->k = load(&file, "k");
    x->v = load(&file, "v");
    x->start = load(&file, "initial_state");
    x->o = load_f64(&file, "o_f64");
    x->state = load_f64(&file, "final_state_f64");
    x->o_bound = golden_bound(&file, "o_f32", x->o);
    x->state_bound = golden_bound(&file, "final_state_f32", x->state);
    float *scale = load(&file, "scale"), *lower_bound = load(&file, "lower_bound");
    x->desc.scale = scale[0];
    if (lower_bound) { /* raw inputs */
        x->g = load(&file, "raw_gate");
        x->beta = load(&file, "beta_logit");
        x->A_log = load(&file, "A_log");
        x->dt_bias = load(&file, "dt_bias");
        x->desc.gate = lower_bound[0] < 0 ? KDA_GATE_BOUNDED : KDA_GATE_SOFTPLUS;
        x->desc.lower_bound = lower_bound[0];
        x->desc.beta = KDA_BETA_LOGIT;
        x->desc.flags = KDA_L2_NORM_QK;
    } else {
        x->g = load(&file, "g");
        x->beta = load(&file, "beta");
        x->desc.gate = KDA_GATE_LOG_DECAY;
        x->desc.beta = KDA_BETA_VALUE;
    }
    free(scale);
    free(lower_bound);
    st_close(&file);
    return true;
}

static kda_args golden_args(const golden *x, float *o) {
    kda_args args;
    ptrdiff_t K = (ptrdiff_t)x->desc.dim_k, V = (ptrdiff_t)x->desc.dim_v;
    ptrdiff_t H = (ptrdiff_t)x->desc.n_qk_heads, HV = (ptrdiff_t)x->desc.n_heads;
    memset(&args, 0, sizeof args);
    args.q = kda_in_f32(x->q, H * K, K);
    args.k = kda_in_f32(x->k, H * K, K);
    args.v = kda_in_f32(x->v, HV * V, V);
    args.g = kda_in_f32(x->g, HV * K, K);
    args.beta = kda_in_f32(x->beta, HV, 1);
    args.o = kda_out_f32(o, HV * V, V);
    args.A_log = x->A_log;
    args.dt_bias = x->dt_bias;
    return args;
}

/* The file's batch in one call; the final states come back in the file's [K][V] order. */
static void golden_run(const golden *x, kda_algorithm algorithm, float *o, float *final_state) {
    size_t count = x->desc.n_heads * x->desc.dim_v * x->desc.dim_k;
    float *states = test_floats(x->batch * count);
    kda_seq *seqs = (kda_seq *)test_alloc(x->batch * sizeof *seqs);
    for (size_t b = 0; b < x->batch; b++) {
        seqs[b].n_tokens = x->tokens;
        seqs[b].state = states + b * count;
        if (x->start) kda_state_import_kv(&x->desc, x->start + b * count, seqs[b].state);
    }
    kda_args args = golden_args(x, o);
    args.seqs = seqs;
    args.n_seqs = x->batch;
    kda_run run;
    memset(&run, 0, sizeof run);
    run.algorithm = algorithm;
    run.scratch_bytes = kda_scratch_bytes(&x->desc, x->batch, &run);
    run.scratch = test_scratch(run.scratch_bytes);
    CHECK(kda_forward(&x->desc, &args, &run) == KDA_OK);
    for (size_t b = 0; b < x->batch; b++)
        kda_state_export_kv(&x->desc, states + b * count, final_state + b * count);
    free(run.scratch);
    free(seqs);
    free(states);
}

static void check_file(const char *name) {
    static const char *const labels[] = {"", "recurrent", "chunked"};
    char path[256];
    golden x;
    snprintf(path, sizeof path, "tests/golden/ops/%s.safetensors", name);
    if (!golden_load(&x, path)) return;
    size_t outputs = x.batch * x.tokens * x.desc.n_heads * x.desc.dim_v;
    size_t states = x.batch * x.desc.n_heads * x.desc.dim_v * x.desc.dim_k;
    float *o = test_floats(outputs), *state = test_floats(states);
    for (int algorithm = KDA_RECURRENT; algorithm <= KDA_CHUNKED; algorithm++) {
        golden_run(&x, (kda_algorithm)algorithm, o, state);
        double o_error = test_relative_l2(o, x.o, outputs);
        double state_error = test_relative_l2(state, x.state, states);
        printf("  %-24s %-9s output %.2e of %.2e, state %.2e of %.2e\n", name, labels[algorithm],
               o_error, x.o_bound, state_error, x.state_bound);
        CHECK_AT_MOST("output", o_error, x.o_bound);
        CHECK_AT_MOST("final state", state_error, x.state_bound);
    }
    free(o);
    free(state);
    golden_free(&x);
}

/* The gate alone against the file's float64 values. Rounding raw + dt_bias to float32 moves an
 * exponent of magnitude 16 by up to 1e-6, which is then the relative error of the gate. */
static void check_gate(const char *name) {
    char path[256];
    golden x;
    st_checkpoint file;
    error e;
    snprintf(path, sizeof path, "tests/golden/ops/%s.safetensors", name);
    if (!golden_load(&x, path) || !st_open_file(&file, path, &e)) return;
    size_t count = x.tokens * x.desc.n_heads * x.desc.dim_k;
    ptrdiff_t K = (ptrdiff_t)x.desc.dim_k, row = (ptrdiff_t)x.desc.n_heads * K;
    double *want = load_f64(&file, "g_f64");
    float *g = test_floats(count);
    CHECK(kda_log_decay(&x.desc, x.tokens, kda_in_f32(x.g, row, K), x.A_log, x.dt_bias,
                        kda_out_f32(g, row, K), NULL) == KDA_OK);
    for (size_t i = 0; i < count; i++)
        CHECK_AT_MOST("log-decay", fabs((double)g[i] - want[i]), 2e-6 * fabs(want[i]) + 1e-38);
    free(g);
    free(want);
    st_close(&file);
    golden_free(&x);
}

#define GOLDEN(name)                                                                               \
    static void golden_##name(void) {                                                              \
        check_file(#name);                                                                         \
    }
GOLDEN(plain_t1)
GOLDEN(ragged_k_ne_v)
GOLDEN(gva3)
GOLDEN(head128)
GOLDEN(bound_minus5)
GOLDEN(masked_minus_1000)
GOLDEN(minus_inf)
GOLDEN(no_decay_is_delta_rule)
GOLDEN(same_key_weak_decay)
GOLDEN(spike_inside_chunk)
GOLDEN(strong_then_weak_t513)
GOLDEN(beta_0_and_1)
GOLDEN(zero_keys)
GOLDEN(raw_softplus_gate)
GOLDEN(raw_bounded_gate)
static void golden_one_channel_1e_minus_12(void) {
    check_file("one_channel_1e-12");
}
static void gates_of_the_raw_files(void) {
    check_gate("raw_softplus_gate");
    check_gate("raw_bounded_gate");
}

int main(void) {
    TEST(golden_plain_t1);
    TEST(golden_ragged_k_ne_v);
    TEST(golden_gva3);
    TEST(golden_head128);
    TEST(golden_bound_minus5);
    TEST(golden_masked_minus_1000);
    TEST(golden_minus_inf);
    TEST(golden_no_decay_is_delta_rule);
    TEST(golden_same_key_weak_decay);
    TEST(golden_spike_inside_chunk);
    TEST(golden_strong_then_weak_t513);
    TEST(golden_one_channel_1e_minus_12);
    TEST(golden_beta_0_and_1);
    TEST(golden_zero_keys);
    TEST(golden_raw_softplus_gate);
    TEST(golden_raw_bounded_gate);
    TEST(gates_of_the_raw_files);
    return test_summary();
}
