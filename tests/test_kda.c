/* kda_forward against the float64 recurrence, and its promises about splits, batches and views. */
#include "../kda.h"
#include "operator.h"

static const kda_algorithm both[] = {KDA_RECURRENT, KDA_CHUNKED};
static const char *const both_names[] = {"recurrent", "chunked"};

/* ---- Correct: every option against float64 ---- */

/* Solves p both ways and holds output and state to their bounds (relative L2). */
static void check_within(const problem *p, double o_bound, double state_bound, const char *what) {
    double *want_o = (double *)test_alloc(p->output_count * sizeof *want_o);
    double *want_state = (double *)test_alloc(p->state_count * sizeof *want_state);
    float *o = test_floats(p->output_count), *state = test_floats(p->state_count);
    problem_reference(p, want_state, want_o);
    for (size_t a = 0; a < 2; a++) {
        problem_solve(p, both[a], state, o);
        double o_error = test_relative_l2(o, want_o, p->output_count);
        double state_error = test_relative_l2(state, want_state, p->state_count);
        CHECK_MSG(o_error <= o_bound && state_error <= state_bound,
                  "%s, %s: output %.2e, state %.2e", what, both_names[a], o_error, state_error);
    }
    free(want_o);
    free(want_state);
    free(o);
    free(state);
}

static void check_against_reference(const problem *p, double bound, const char *what) {
    check_within(p, bound, bound, what);
}

/* Where the problem itself amplifies rounding: 4 times a plain float32 recurrence's error. */
static void check_against_f32(const problem *p, const char *what) {
    double o_error, state_error;
    problem_f32_error(p, &o_error, &state_error);
    check_within(p, 4 * o_error + 1e-7, 4 * state_error + 1e-7, what);
}

static void check_desc(const kda_desc *desc, size_t tokens, const char *what) {
    problem p = problem_new(desc, tokens);
    check_against_reference(&p, 5e-7, what);
    problem_free(&p);
}

/* Dimensions that are and are not multiples of any vector width, independent of each other. */
static void all_dimensions(void) {
    static const size_t dims[] = {1,  2,  3,  7,   15,  16,  17,  31,  32, 33,
                                  48, 60, 64, 100, 127, 128, 129, 192, 256};
    size_t n = sizeof dims / sizeof *dims;
    char what[64];
    test_seed(1);
    for (size_t i = 0; i < n; i += TEST_ONE_IN(4))
        for (size_t j = i % 3; j < n; j += 3) {
            kda_desc desc = problem_desc(2, 0, dims[i], dims[j]);
            snprintf(what, sizeof what, "dim_k %zu, dim_v %zu", dims[i], dims[j]);
            check_desc(&desc, 19, what);
        }
}

static void gates_and_betas(void) {
    static const kda_beta betas[] = {KDA_BETA_VALUE, KDA_BETA_LOGIT, KDA_BETA_LOGIT_DOUBLED};
    char what[64];
    test_seed(2);
    for (int gate = KDA_GATE_LOG_DECAY; gate <= KDA_GATE_BOUNDED; gate++)
        for (size_t b = 0; b < 3; b++) {
            kda_desc desc = problem_desc(3, 0, 20, 12);
            desc.gate = (kda_gate)gate;
            desc.beta = betas[b];
            desc.lower_bound = gate == KDA_GATE_BOUNDED ? -5.0f : 0.0f;
            snprintf(what, sizeof what, "gate %d, beta %d", gate, (int)betas[b]);
            check_desc(&desc, 50, what);
        }
}

/* Three heads share a query/key head: the two maps differ from the second head on. */
static void head_maps(void) {
    test_seed(3);
    for (int map = KDA_HEADS_GROUPED; map <= KDA_HEADS_TILED; map++) {
        kda_desc desc = problem_desc(6, 2, 8, 5);
        desc.head_map = (kda_head_map)map;
        check_desc(&desc, 40, map == KDA_HEADS_TILED ? "tiled" : "grouped");
    }
}

static void scale_and_eps(void) {
    test_seed(4);
    kda_desc desc = problem_desc(1, 0, 16, 16);
    desc.scale = 0.37f;
    desc.l2_eps = 0.5f;
    check_desc(&desc, 33, "scale and eps");
}

/* Keys as they come, of norm 1 to 4: with beta k.k above 2 each write overshoots, and the errors of
 * any float32 arithmetic grow with the values. */
static void keys_without_normalisation(void) {
    test_seed(21);
    for (size_t norm = 1; norm <= 4; norm++) {
        kda_desc desc = problem_desc(1, 0, 16, 16);
        desc.flags = 0;
        desc.beta = KDA_BETA_VALUE;
        problem p = problem_new(&desc, 40);
        for (size_t i = 0; i < 40; i++) p.beta[i] = 0.9f;
        for (size_t i = 0; i < 40 * 16; i++) p.k[i] *= 0.25f * (float)norm;
        check_against_f32(&p, "no norm");
        problem_free(&p);
    }
}

static void optional_gate_weights(void) {
    test_seed(5);
    kda_desc desc = problem_desc(2, 0, 8, 8);
    desc.gate = KDA_GATE_BOUNDED;
    desc.lower_bound = -5.0f;
    problem p = problem_new(&desc, 20);
    free(p.A_log);
    p.A_log = NULL;
    check_against_reference(&p, 5e-7, "no A_log");
    free(p.dt_bias);
    p.dt_bias = NULL;
    check_against_reference(&p, 5e-7, "neither");
    problem_free(&p);
}

/* A pencil-sized case: dim 2, two tokens, identity-like keys.
 *   g = ln(1/2) everywhere, beta = 1, scale = 1, S starts as zeros.
 *   token 1: k = (1, 0), v = (4, 8), q = (1, 0)   S = [4 8; 0 0]           o = (4, 8)
 *   token 2: k = (0, 1), v = (6, 2), q = (1, 1)   S = [2 4; 6 2]           o = (8, 6) */
static void by_hand(void) {
    kda_desc desc = problem_desc(1, 0, 2, 2);
    desc.beta = KDA_BETA_VALUE;
    desc.flags = 0;
    desc.scale = 1;
    float half = -0.693147181f;
    float q[] = {1, 0, 1, 1}, k[] = {1, 0, 0, 1}, v[] = {4, 8, 6, 2};
    float g[] = {half, half, half, half}, beta[] = {1, 1}, start[4] = {0};
    problem p;
    memset(&p, 0, sizeof p);
    p.desc = desc, p.tokens = 2, p.q = q, p.k = k, p.v = v, p.g = g, p.beta = beta, p.start = start;
    p.state_count = 4, p.output_count = 4;
    for (size_t a = 0; a < 2; a++) {
        static const float want_o[] = {4, 8, 8, 6}, want_state[] = {2, 6, 4, 2}; /* [V][K] */
        float o[4], state[4];
        problem_solve(&p, both[a], state, o);
        for (size_t i = 0; i < 4; i++) {
            CHECK_AT_MOST("o", (double)fabsf(o[i] - want_o[i]), 1e-6);
            CHECK_AT_MOST("state", (double)fabsf(state[i] - want_state[i]), 1e-6);
        }
    }
}

/* ---- Chunked against recurrent ---- */

/* The state at every length: a fault that uses the chunk's last row for a partial chunk leaves the
 * outputs right and the state wrong. */
static void chunked_equals_recurrent_for_every_length(void) {
    kda_desc desc = problem_desc(1, 0, 12, 7);
    test_seed(6);
    for (size_t tokens = 1; tokens <= 200; tokens++) {
        problem p = problem_new(&desc, tokens);
        float *o[2], *state[2];
        for (size_t a = 0; a < 2; a++) {
            o[a] = test_floats(p.output_count);
            state[a] = test_floats(p.state_count);
            problem_solve(&p, both[a], state[a], o[a]);
        }
        CHECK_AT_MOST("output", test_relative_l2_f32(o[1], o[0], p.output_count), 1e-6);
        CHECK_AT_MOST("state", test_relative_l2_f32(state[1], state[0], p.state_count), 1e-6);
        for (size_t a = 0; a < 2; a++) free(o[a]), free(state[a]);
        problem_free(&p);
    }
}

/* T = 130 cut in two everywhere, the chunked way, against one recurrent run. */
static void chunked_equals_recurrent_for_every_split(void) {
    kda_desc desc = problem_desc(2, 1, 10, 6);
    test_seed(7);
    problem p = problem_new(&desc, 130);
    float *o = test_floats(p.output_count), *state = test_floats(p.state_count);
    float *want_o = test_floats(p.output_count), *want_state = test_floats(p.state_count);
    problem_solve(&p, KDA_RECURRENT, want_state, want_o);
    for (size_t split = 0; split <= 130; split++) {
        memcpy(state, p.start, p.state_count * sizeof(float));
        CHECK(problem_run(&p, KDA_CHUNKED, 0, split, state, o) == KDA_OK);
        CHECK(problem_run(&p, KDA_CHUNKED, split, 130 - split, state, o) == KDA_OK);
        CHECK_AT_MOST("output", test_relative_l2_f32(o, want_o, p.output_count), 1e-6);
        CHECK_AT_MOST("state", test_relative_l2_f32(state, want_state, p.state_count), 1e-6);
    }
    free(o), free(state), free(want_o), free(want_state);
    problem_free(&p);
}

/* ---- Same bits ---- */

static int same_bits(const float *a, const float *b, size_t n) {
    return memcmp(a, b, n * sizeof *a) == 0;
}

/* Runs p in pieces of `piece` tokens and compares with the unsplit run, bit for bit. */
static void check_pieces(const problem *p, kda_algorithm algorithm, size_t piece,
                         const float *want_state, const float *want_o) {
    float *o = test_floats(p->output_count), *state = test_floats(p->state_count);
    memcpy(state, p->start, p->state_count * sizeof(float));
    for (size_t t = 0; t < p->tokens; t += piece) {
        size_t n = p->tokens - t < piece ? p->tokens - t : piece;
        CHECK(problem_run(p, algorithm, t, n, state, o) == KDA_OK);
    }
    CHECK_MSG(same_bits(o, want_o, p->output_count) && same_bits(state, want_state, p->state_count),
              "pieces of %zu tokens differ", piece);
    free(o);
    free(state);
}

static void check_splits(kda_algorithm algorithm, size_t step) {
    kda_desc desc = problem_desc(2, 0, 37, 5);
    problem p = problem_new(&desc, 200);
    float *o = test_floats(p.output_count), *state = test_floats(p.state_count);
    problem_solve(&p, algorithm, state, o);
    for (size_t piece = step; piece <= 200; piece += step)
        check_pieces(&p, algorithm, piece, state, o);
    free(o), free(state);
    problem_free(&p);
}

static void recurrent_bits_do_not_depend_on_splits(void) {
    test_seed(8);
    check_splits(KDA_RECURRENT, 1);
}

static void chunked_bits_do_not_depend_on_splits_at_chunks(void) {
    test_seed(9);
    check_splits(KDA_CHUNKED, KDA_CHUNK);
}

/* The gate computed beforehand gives the bits of the gate computed inside. */
static void log_decay_beforehand_gives_the_same_bits(void) {
    test_seed(10);
    for (int gate = KDA_GATE_SOFTPLUS; gate <= KDA_GATE_BOUNDED; gate++) {
        kda_desc desc = problem_desc(2, 0, 9, 6);
        desc.gate = (kda_gate)gate;
        desc.lower_bound = gate == KDA_GATE_BOUNDED ? -5.0f : 0.0f;
        problem p = problem_new(&desc, 40);
        float *o = test_floats(p.output_count), *state = test_floats(p.state_count);
        float *want_o = test_floats(p.output_count), *want_state = test_floats(p.state_count);
        problem_solve(&p, KDA_RECURRENT, want_state, want_o);
        CHECK(kda_log_decay(&desc, 40, kda_in_f32(p.g, 18, 9), p.A_log, p.dt_bias,
                            kda_out_f32(p.g, 18, 9), NULL) == KDA_OK);
        p.desc.gate = KDA_GATE_LOG_DECAY;
        p.desc.lower_bound = 0;
        free(p.A_log), free(p.dt_bias);
        p.A_log = p.dt_bias = NULL;
        problem_solve(&p, KDA_RECURRENT, state, o);
        CHECK(same_bits(o, want_o, p.output_count));
        CHECK(same_bits(state, want_state, p.state_count));
        free(o), free(state), free(want_o), free(want_state);
        problem_free(&p);
    }
}

/* ---- Batches ---- */

/* A mixed batch {1, 0, 40, padding of 3, 17, 1} gives each sequence the bits of running alone. */
static void a_ragged_batch_equals_single_runs(void) {
    static const size_t lengths[] = {1, 0, 40, 3, 17, 1};
    enum { n_seqs = 6, padding = 3, total = 62 };
    kda_desc desc = problem_desc(2, 0, 16, 10);
    test_seed(12);
    problem p = problem_new(&desc, total);
    for (int algorithm = KDA_AUTO; algorithm <= KDA_CHUNKED; algorithm++) {
        kda_seq seqs[n_seqs];
        float *o = test_floats(p.output_count), *want_o = test_floats(p.output_count);
        float *states = test_floats(n_seqs * p.state_count), *want = test_floats(p.state_count);
        memset(seqs, 0, sizeof seqs);
        for (size_t i = 0; i < n_seqs; i++) {
            seqs[i].n_tokens = lengths[i];
            seqs[i].state = i == padding ? NULL : states + i * p.state_count;
            memcpy(states + i * p.state_count, p.start, p.state_count * sizeof(float));
        }
        for (size_t i = 0; i < p.output_count; i++) o[i] = want_o[i] = -77.0f;
        kda_args args = problem_args(&p, 0, o);
        args.seqs = seqs;
        args.n_seqs = n_seqs;
        kda_run run;
        memset(&run, 0, sizeof run);
        run.algorithm = (kda_algorithm)algorithm;
        run.scratch_bytes = kda_scratch_bytes(&desc, n_seqs, &run);
        run.scratch = test_scratch(run.scratch_bytes);
        CHECK(kda_forward(&desc, &args, &run) == KDA_OK);
        size_t token = 0;
        for (size_t i = 0; i < n_seqs; i++) {
            memcpy(want, p.start, p.state_count * sizeof(float));
            if (i != padding)
                problem_run(&p, run.algorithm, token, lengths[i], want, want_o);
            CHECK_MSG(same_bits(want, states + i * p.state_count, p.state_count), "state %zu", i);
            token += lengths[i];
        }
        CHECK(same_bits(o, want_o, p.output_count)); /* padding rows included: untouched */
        free(run.scratch), free(o), free(want_o), free(states), free(want);
    }
    problem_free(&p);
}

/* NaN in one sequence and Inf in one head leave all others bit for bit as they were. */
static void nan_and_inf_stay_where_they_are(void) {
    kda_desc desc = problem_desc(3, 0, 8, 6);
    test_seed(13);
    problem p = problem_new(&desc, 40);
    size_t row = 18;
    for (size_t a = 0; a < 2; a++) {
        float *o = test_floats(p.output_count), *state = test_floats(p.state_count);
        float *want_o = test_floats(p.output_count), *want_state = test_floats(p.state_count);
        problem_solve(&p, both[a], want_state, want_o);
        float saved_v = p.v[20 * row + 6 + 2], saved_q = p.q[30 * 24 + 16];
        p.v[20 * row + 6 + 2] = NAN;  /* token 20, head 1, value channel 2 */
        p.q[30 * 24 + 16] = INFINITY; /* token 30, head 2 */
        problem_solve(&p, both[a], state, o);
        for (size_t t = 0; t < 40; t++)
            for (size_t h = 0; h < 3; h++)
                for (size_t j = 0; j < 6; j++) {
                    size_t i = t * row + h * 6 + j;
                    int poisoned = (h == 1 && j == 2 && t >= 20) || (h == 2 && t == 30);
                    CHECK_MSG(poisoned ? !isfinite(o[i]) : same_bits(o + i, want_o + i, 1),
                              "%s: token %zu, head %zu, channel %zu", both_names[a], t, h, j);
                }
        for (size_t i = 0; i < p.state_count; i++) {
            int poisoned = i / 8 == 6 + 2;
            CHECK(poisoned ? isnan(state[i]) : same_bits(state + i, want_state + i, 1));
        }
        p.v[20 * row + 6 + 2] = saved_v, p.q[30 * 24 + 16] = saved_q;
        free(o), free(state), free(want_o), free(want_state);
    }
    problem_free(&p);
}

/* ---- Views ---- */

/* Every tensor a column slice of one wide row of floats, 4-byte aligned only, guards between: the
 * same bits as dense arrays, and not a byte written outside o. */
static void views_into_wider_rows(void) {
    enum { T = 37, H = 2, HV = 4, K = 7, V = 5, WIDTH = 200 };
    kda_desc desc = problem_desc(HV, H, K, V);
    test_seed(14);
    problem p = problem_new(&desc, T);
    float *wide = test_floats(T * WIDTH + 1), *before = test_floats(T * WIDTH + 1);
    size_t q_at = 3, k_at = 30, v_at = 60, g_at = 90, beta_at = 125, o_at = 140; /* columns */
    ptrdiff_t qk_head = K + 2, g_head = K + 1, v_head = V + 1, beta_head = 3, o_head = V + 4;
    for (size_t i = 0; i < T * WIDTH + 1; i++) wide[i] = NAN; /* whatever is read must be ours */
    for (size_t t = 0; t < T; t++) {
        float *row = wide + 1 + t * WIDTH;
        for (size_t h = 0; h < H; h++)
            for (size_t i = 0; i < K; i++) {
                row[q_at + h * (size_t)qk_head + i] = p.q[(t * H + h) * K + i];
                row[k_at + h * (size_t)qk_head + i] = p.k[(t * H + h) * K + i];
            }
        for (size_t h = 0; h < HV; h++) {
            memcpy(row + g_at + h * (size_t)g_head, p.g + (t * HV + h) * K, K * sizeof(float));
            memcpy(row + v_at + h * (size_t)v_head, p.v + (t * HV + h) * V, V * sizeof(float));
            row[beta_at + h * (size_t)beta_head] = p.beta[t * HV + h];
        }
    }
    float *want_o = test_floats(p.output_count), *want_state = test_floats(p.state_count);
    float *state = test_floats(p.state_count);
    for (size_t a = 0; a < 2; a++) {
        memcpy(before, wide, (T * WIDTH + 1) * sizeof(float));
        problem_solve(&p, both[a], want_state, want_o);
        memcpy(state, p.start, p.state_count * sizeof(float));
        kda_seq seq;
        memset(&seq, 0, sizeof seq);
        seq.n_tokens = T, seq.state = state;
        kda_args args;
        memset(&args, 0, sizeof args);
        args.q = kda_in_f32(wide + 1 + q_at, WIDTH, qk_head);
        args.k = kda_in_f32(wide + 1 + k_at, WIDTH, qk_head);
        args.v = kda_in_f32(wide + 1 + v_at, WIDTH, v_head);
        args.g = kda_in_f32(wide + 1 + g_at, WIDTH, g_head);
        args.beta = kda_in_f32(wide + 1 + beta_at, WIDTH, beta_head);
        args.o = kda_out_f32(wide + 1 + o_at, WIDTH, o_head);
        args.seqs = &seq, args.n_seqs = 1;
        kda_run run;
        memset(&run, 0, sizeof run);
        run.algorithm = both[a];
        run.scratch_bytes = kda_scratch_bytes(&desc, 1, &run);
        unsigned char *scratch = (unsigned char *)test_scratch(run.scratch_bytes + 1);
        run.scratch = scratch + 1; /* any alignment */
        CHECK(kda_forward(&desc, &args, &run) == KDA_OK);
        CHECK(same_bits(state, want_state, p.state_count));
        for (size_t t = 0; t < T; t++)
            for (size_t h = 0; h < HV; h++) {
                size_t at = 1 + t * WIDTH + o_at + h * (size_t)o_head;
                CHECK(same_bits(wide + at, want_o + (t * HV + h) * V, V));
                memcpy(before + at, wide + at, V * sizeof(float));
            }
        CHECK(memcmp(before, wide, (T * WIDTH + 1) * sizeof(float)) == 0);
        free(scratch);
    }
    free(wide), free(before), free(want_o), free(want_state), free(state);
    problem_free(&p);
}

static void output_may_be_the_value(void) {
    kda_desc desc = problem_desc(2, 0, 8, 40); /* more columns than one piece of them */
    test_seed(15);
    problem p = problem_new(&desc, 50);
    for (size_t a = 0; a < 2; a++) {
        float *want_o = test_floats(p.output_count), *want_state = test_floats(p.state_count);
        float *state = test_floats(p.state_count), *v = p.v;
        problem_solve(&p, both[a], want_state, want_o);
        p.v = test_floats(p.output_count);
        memcpy(p.v, v, p.output_count * sizeof(float));
        problem_solve(&p, both[a], state, p.v);
        CHECK(same_bits(p.v, want_o, p.output_count));
        CHECK(same_bits(state, want_state, p.state_count));
        free(p.v);
        p.v = v;
        free(want_o), free(want_state), free(state);
    }
    problem_free(&p);
}

/* ---- Gates at the edges, any value of which is safe ---- */

static void constant_gates_from_weak_to_minus_infinity(void) {
    static const float gates[] = {0,   -1e-12f, -3e-5f, -0.5f, -1,    -2,    -3,  -4,
                                  -5,  -8,      -20,    -50,   -88,   -100,  -104, -1000,
                                  -1e4f, -INFINITY};
    kda_desc desc = problem_desc(1, 0, 16, 16);
    char what[32];
    test_seed(16);
    for (size_t i = 0; i < sizeof gates / sizeof *gates; i++) {
        problem p = problem_new(&desc, 129);
        for (size_t j = 0; j < 129 * 16; j++) p.g[j] = gates[i];
        snprintf(what, sizeof what, "g = %g", (double)gates[i]);
        check_against_reference(&p, 1e-6, what);
        problem_free(&p);
    }
}

/* One strong value inside a chunk of zeros, at each place of it. */
static void one_spike_at_each_place(void) {
    static const float spikes[] = {-100, -88, -1000, -INFINITY};
    kda_desc desc = problem_desc(1, 0, 6, 6);
    test_seed(17);
    for (size_t place = 0; place < 40; place++) {
        problem p = problem_new(&desc, 40);
        for (size_t j = 0; j < 40 * 6; j++) p.g[j] = 0;
        p.g[place * 6 + place % 6] = spikes[place % 4];
        check_against_reference(&p, 1e-6, "spike");
        problem_free(&p);
    }
}

/* One key again and again, beta near 1, weak decay: what a power series for the inverse dies of. */
static void one_key_repeated(void) {
    kda_desc desc = problem_desc(1, 0, 16, 16);
    test_seed(18);
    problem p = problem_new(&desc, 2048);
    for (size_t t = 0; t < 2048; t++) {
        memcpy(p.k + t * 16, p.k, 16 * sizeof(float));
        for (size_t i = 0; i < 16; i++) p.g[t * 16 + i] = -3e-5f;
        p.beta[t] = 9; /* sigmoid: 0.9999 */
    }
    check_against_f32(&p, "one key");
    problem_free(&p);
}

static void raw_gates_at_the_edges(void) {
    static const float raws[] = {-1e4f, -100, -20, -2, 0, 2, 20, 88.7f, 89, 100, 1e4f, -INFINITY};
    static const float logs[] = {-4, 0, 4, 20, 100};
    size_t n = sizeof raws / sizeof *raws;
    for (int gate = KDA_GATE_SOFTPLUS; gate <= KDA_GATE_BOUNDED; gate++)
        for (size_t a = 0; a < 5; a++) {
            kda_desc desc = problem_desc(1, 0, n, 1);
            desc.gate = (kda_gate)gate;
            desc.lower_bound = gate == KDA_GATE_BOUNDED ? -5.0f : 0.0f;
            float g[sizeof raws / sizeof *raws];
            CHECK(kda_log_decay(&desc, 1, kda_in_f32(raws, (ptrdiff_t)n, 0), &logs[a], NULL,
                                kda_out_f32(g, (ptrdiff_t)n, 0), NULL) == KDA_OK);
            for (size_t i = 0; i < n; i++) {
                double x = (double)raws[i], A = exp(fmin(88, (double)logs[a])); /* kept finite */
                double want = gate == KDA_GATE_SOFTPLUS ? -A * reference_softplus(x)
                                                        : -5 * reference_sigmoid(A * x);
                /* A x rounds to float32: that moves the exponent of a far tail. */
                double bound = fabs(want) * (1e-6 + 1e-7 * (isinf(x) ? 0 : fabs(A * x))) + 1e-37;
                if (want < -(double)FLT_MAX) want = -HUGE_VAL; /* what float32 makes of it */
                CHECK_MSG((double)g[i] == want || fabs((double)g[i] - want) <= bound,
                          "gate %d, raw %g, A_log %g: %g, want %g", gate, x, (double)logs[a],
                          (double)g[i], want);
                CHECK(g[i] <= 0.0f);
            }
        }
}

/* A log-decay above 0 is no decay: it reads as 0, so factors never pass 1. NaN stays NaN. */
static void log_decay_above_zero_reads_as_zero(void) {
    kda_desc desc = problem_desc(1, 0, 4, 4);
    test_seed(19);
    problem p = problem_new(&desc, 20);
    float *o[2], *state[2];
    for (size_t a = 0; a < 2; a++) {
        o[a] = test_floats(p.output_count);
        state[a] = test_floats(p.state_count);
        for (size_t i = 0; i < 80; i++) p.g[i] = a == 0 ? 0.0f : 3.0f;
        problem_solve(&p, KDA_RECURRENT, state[a], o[a]);
    }
    CHECK(same_bits(o[0], o[1], p.output_count) && same_bits(state[0], state[1], p.state_count));
    p.g[7] = NAN;
    problem_solve(&p, KDA_RECURRENT, state[0], o[0]);
    CHECK(isnan(o[0][p.output_count - 1]));
    for (size_t a = 0; a < 2; a++) free(o[a]), free(state[a]);
    problem_free(&p);
}

/* ---- The state ---- */

static void clear_over_nan(void) {
    kda_desc desc = problem_desc(2, 0, 5, 3);
    float state[31];
    for (size_t i = 0; i < 31; i++) state[i] = NAN;
    CHECK(kda_state_bytes(&desc) == 30 * sizeof(float));
    CHECK(kda_state_clear(&desc, state) == KDA_OK);
    for (size_t i = 0; i < 30; i++) CHECK(state[i] == 0.0f && !signbit(state[i]));
    CHECK(isnan(state[30]));
}

static void key_value_order_goes_in_and_out(void) {
    kda_desc desc = problem_desc(2, 0, 5, 3);
    float kv[30], state[30], back[30];
    for (size_t i = 0; i < 30; i++) kv[i] = (float)i;
    CHECK(kda_state_import_kv(&desc, kv, state) == KDA_OK);
    for (size_t h = 0; h < 2; h++)
        for (size_t k = 0; k < 5; k++)
            for (size_t v = 0; v < 3; v++)
                CHECK(state[(h * 3 + v) * 5 + k] == kv[(h * 5 + k) * 3 + v]);
    CHECK(kda_state_export_kv(&desc, state, back) == KDA_OK);
    CHECK(same_bits(kv, back, 30));
}

static void scratch_does_not_depend_on_tokens_or_contents(void) {
    kda_desc desc = problem_desc(1, 0, 8, 8);
    test_seed(20);
    problem p = problem_new(&desc, 40);
    float *o[2], *state[2];
    for (size_t a = 0; a < 2; a++) {
        kda_args args;
        kda_seq seq;
        kda_run run;
        o[a] = test_floats(p.output_count);
        state[a] = test_floats(p.state_count);
        args = problem_args(&p, 0, o[a]);
        memset(&seq, 0, sizeof seq);
        memset(&run, 0, sizeof run);
        seq.n_tokens = 40, seq.state = state[a];
        args.seqs = &seq, args.n_seqs = 1;
        run.scratch_bytes = kda_scratch_bytes(&desc, 1, NULL);
        run.scratch = test_scratch(run.scratch_bytes);
        memset(run.scratch, a ? 0xFF : 0, run.scratch_bytes); /* NaN everywhere, or zeros */
        CHECK(kda_forward(&desc, &args, &run) == KDA_OK);
        free(run.scratch);
    }
    CHECK(same_bits(o[0], o[1], p.output_count) && same_bits(state[0], state[1], p.state_count));
    for (size_t a = 0; a < 2; a++) free(o[a]), free(state[a]);
    problem_free(&p);
}

int main(void) {
    TEST(all_dimensions);
    TEST(gates_and_betas);
    TEST(head_maps);
    TEST(scale_and_eps);
    TEST(keys_without_normalisation);
    TEST(optional_gate_weights);
    TEST(by_hand);
    TEST(chunked_equals_recurrent_for_every_length);
    TEST(chunked_equals_recurrent_for_every_split);
    TEST(recurrent_bits_do_not_depend_on_splits);
    TEST(chunked_bits_do_not_depend_on_splits_at_chunks);
    TEST(log_decay_beforehand_gives_the_same_bits);
    TEST(a_ragged_batch_equals_single_runs);
    TEST(nan_and_inf_stay_where_they_are);
    TEST(views_into_wider_rows);
    TEST(output_may_be_the_value);
    TEST(constant_gates_from_weak_to_minus_infinity);
    TEST(one_spike_at_each_place);
    TEST(one_key_repeated);
    TEST(raw_gates_at_the_edges);
    TEST(log_decay_above_zero_reads_as_zero);
    TEST(clear_over_nan);
    TEST(key_value_order_goes_in_and_out);
    TEST(scratch_does_not_depend_on_tokens_or_contents);
    return test_summary();
}
