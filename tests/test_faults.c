/* What breaks in software like this, kind by kind, each with the inputs that would show it here.
 *
 * Kinds that users of linear-attention kernels and engines have reported, and the test of each:
 *
 *   numbers in the chunked form
 *     inverse by a power series, equal keys, weak decay    power_series_for_the_inverse
 *     one anchor for a whole chunk of decays               one_anchor_per_chunk
 *     product of two exponentials, one overflowing         product_of_two_exponentials
 *     exponential taken before the mask                    exponential_before_the_mask
 *     temporaries that grow with the tokens                temporaries_that_grow_with_tokens
 *     clamps that bite at legal values                     clamps_at_legal_values
 *     keys without normalisation                           keys_without_normalisation
 *     wrong axis, unexpanded gate of shared heads          wrong_axis_or_unexpanded_gate
 *   edges
 *     final state from the chunk's last row                state_of_a_partial_chunk
 *     prompts shorter than a chunk, mixed batches          prompts_shorter_than_a_chunk
 *     empty sequences                                      empty_sequences
 *     initial state ignored                                initial_state_ignored
 *     padding bleeds through the convolution               padding_through_the_convolution
 *   state
 *     [K][V] read as [V][K]                                state_transposed
 *     state kept in the activation type                    state_in_the_activation_type
 *     stale state of the previous user                     stale_state
 *     two live sequences on one slot                       two_sequences_on_one_slot
 *     one NaN poisons the batch                            one_nan_poisons_the_batch
 *     dt_bias read per head                                dt_bias_per_head
 *     head dims off the vector width                       dims_off_the_vector_width
 *     strided views read as dense, writes outside          strided_views_read_as_dense
 *     head map and A_log conventions mixed up              head_map_and_A_log
 *     bounded gate built as a clamp                        bounded_gate_as_a_clamp
 *     softplus by log(1 + exp) and a select                softplus_by_a_select
 *     unknown option swallowed                             unknown_option_swallowed
 *   sizes
 *     strides past 2^31 elements                           token_strides_past_2_to_31,
 *                                                          head_strides_past_2_to_31
 *     counts whose products pass 2^31                      token_counts_past_2_to_31,
 *                                                          slots_past_2_to_31
 *     extents past the address space                       extents_past_the_address_space
 *   convolution, speculation, saving
 *     history shorter than the taps, in place              convolution_history
 *     rollback of the state without the window             rollback_of_half_a_sequence
 *     zero accepted tokens                                 zero_accepted_tokens
 *     saving while a speculation is pending                saving_while_speculating
 *     snapshots of another count, cut or altered           snapshots_cut_or_altered
 *     a field forgotten on reload                          field_forgotten_on_reload
 *
 * Key and value dimensions differ everywhere, both algorithms run, and the final state counts as
 * much as the output.
 */
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS, MAP_NORESERVE */
#endif
#include "../kda.h"
#include "operator.h"

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#include <unistd.h>
#define HAVE_MMAP 1
#else
#define HAVE_MMAP 0
#endif

static const kda_algorithm both[] = {KDA_RECURRENT, KDA_CHUNKED};
static const char *const both_names[] = {"recurrent", "chunked"};

static int same_bits(const float *a, const float *b, size_t n) {
    return memcmp(a, b, n * sizeof *a) == 0;
}

/* ---- Helpers ---- */

/* Solves p both ways; output and final state within 4 times a plain float32 recurrence's error. */
static void check_numbers(const problem *p, const char *what) {
    double *want_o = (double *)test_alloc(p->output_count * sizeof *want_o);
    double *want_state = (double *)test_alloc(p->state_count * sizeof *want_state);
    float *o = test_floats(p->output_count), *state = test_floats(p->state_count);
    double o_yardstick, state_yardstick;
    problem_reference(p, want_state, want_o);
    problem_f32_error(p, &o_yardstick, &state_yardstick);
    for (size_t a = 0; a < 2; a++) {
        problem_solve(p, both[a], state, o);
        double o_error = test_relative_l2(o, want_o, p->output_count);
        double state_error = test_relative_l2(state, want_state, p->state_count);
        CHECK_MSG(o_error <= 4 * o_yardstick + 1e-7, "%s, %s: output %.2e, float32's own %.2e",
                  what, both_names[a], o_error, o_yardstick);
        CHECK_MSG(state_error <= 4 * state_yardstick + 1e-7,
                  "%s, %s: state %.2e, float32's own %.2e", what, both_names[a], state_error,
                  state_yardstick);
    }
    free(want_o), free(want_state), free(o), free(state);
}

/* Tokens first .. first + n - 1 of p as a problem of their own, over the same arrays. */
static problem part_of(const problem *p, size_t first, size_t n) {
    problem part = *p;
    const kda_desc *d = &p->desc;
    part.tokens = n;
    part.q += first * problem_qk_heads(d) * d->dim_k;
    part.k += first * problem_qk_heads(d) * d->dim_k;
    part.v += first * d->n_heads * d->dim_v;
    part.g += first * d->n_heads * d->dim_k;
    part.beta += first * d->n_heads;
    part.output_count = n * d->n_heads * d->dim_v;
    return part;
}

static void fill_gates(problem *p, float g) {
    for (size_t i = 0; i < p->tokens * p->desc.n_heads * p->desc.dim_k; i++) p->g[i] = g;
}

/* kda_forward on any batch, with scratch of its own. */
static kda_result forward(const kda_desc *desc, kda_args *args, kda_algorithm algorithm,
                          const kda_seq *seqs, size_t n_seqs) {
    kda_run run;
    memset(&run, 0, sizeof run);
    run.algorithm = algorithm;
    run.scratch_bytes = kda_scratch_bytes(desc, n_seqs, &run);
    run.scratch = test_scratch(run.scratch_bytes);
    args->seqs = seqs, args->n_seqs = n_seqs;
    kda_result result = kda_forward(desc, args, &run);
    free(run.scratch);
    return result;
}

/* The rows of p as sequences of these lengths; states lie one after another. */
static kda_result forward_batch(const problem *p, kda_algorithm algorithm, const size_t *lengths,
                                size_t n_seqs, float *states, float *o) {
    kda_args args = problem_args(p, 0, o);
    kda_seq seqs[8];
    memset(seqs, 0, sizeof seqs);
    for (size_t i = 0; i < n_seqs; i++) {
        seqs[i].n_tokens = lengths[i];
        seqs[i].state = states + i * p->state_count;
    }
    return forward(&p->desc, &args, algorithm, seqs, n_seqs);
}

/* Each sequence of a batch against float64, every one from p's start. */
static void check_batch(const problem *p, const size_t *lengths, size_t n_seqs, const char *what) {
    double *want_o = (double *)test_alloc(p->output_count * sizeof *want_o);
    double *want_state = (double *)test_alloc(p->state_count * sizeof *want_state);
    float *o = test_floats(p->output_count), *states = test_floats(n_seqs * p->state_count);
    size_t row = p->desc.n_heads * p->desc.dim_v;
    for (int algorithm = KDA_AUTO; algorithm <= KDA_CHUNKED; algorithm++) {
        for (size_t i = 0; i < n_seqs; i++)
            memcpy(states + i * p->state_count, p->start, p->state_count * sizeof(float));
        CHECK(forward_batch(p, (kda_algorithm)algorithm, lengths, n_seqs, states, o) == KDA_OK);
        for (size_t i = 0, first = 0; i < n_seqs; first += lengths[i], i++) {
            problem part = part_of(p, first, lengths[i]);
            problem_reference(&part, want_state, want_o);
            double o_error = test_relative_l2(o + first * row, want_o, part.output_count);
            double state_error =
                test_relative_l2(states + i * p->state_count, want_state, p->state_count);
            CHECK_MSG(o_error <= 1e-6 && state_error <= 1e-6,
                      "%s, sequence %zu, algorithm %d: output %.2e, state %.2e", what, i, algorithm,
                      o_error, state_error);
        }
    }
    free(want_o), free(want_state), free(o), free(states);
}

/* ---- Numbers in the chunked form ---- */

static void power_series_for_the_inverse(void) {
    static const size_t lengths[] = {256, 16384 / TEST_ONE_IN(16)};
    kda_desc desc = problem_desc(1, 0, 16, 11);
    for (size_t l = 0; l < 2; l++) {
        test_seed(1);
        problem p = problem_new(&desc, lengths[l]);
        fill_gates(&p, -3e-5f);
        for (size_t t = 0; t < p.tokens; t++) {
            memmove(p.k + t * 16, p.k, 16 * sizeof(float));
            p.beta[t] = 9; /* the sigmoid of it: 0.99988 */
        }
        check_numbers(&p, l == 0 ? "256 times" : "many times");
        problem_free(&p);
    }
}

static void one_anchor_per_chunk(void) {
    static const float gates[] = {-0.5f, -1,  -1.5f, -2,   -2.5f,  -3,       -3.5f, -4, -4.5f,
                                  -5,    -8,  -20,   -104, -1e4f, -INFINITY};
    kda_desc desc = problem_desc(1, 0, 12, 7);
    char what[32];
    test_seed(2);
    for (size_t i = 0; i < sizeof gates / sizeof *gates; i++) {
        problem p = problem_new(&desc, 129);
        fill_gates(&p, gates[i]);
        snprintf(what, sizeof what, "g = %g", (double)gates[i]);
        check_numbers(&p, what);
        problem_free(&p);
    }
}

static void product_of_two_exponentials(void) {
    static const float strong[] = {-100, -88, -INFINITY};
    kda_desc desc = problem_desc(1, 0, 6, 5);
    char what[64];
    test_seed(3);
    for (size_t s = 0; s < 3; s++)
        for (size_t place = 0; place < 48; place += 5)
            for (size_t wide = 0; wide < 2; wide++) { /* one channel, or all of one token */
                problem p = problem_new(&desc, 48);
                fill_gates(&p, 0);
                for (size_t i = 0; i < 6; i++)
                    if (wide || i == place % 6) p.g[place * 6 + i] = strong[s];
                snprintf(what, sizeof what, "%g at token %zu", (double)strong[s], place);
                check_numbers(&p, what);
                problem_free(&p);
            }
    problem p = problem_new(&desc, 48);
    fill_gates(&p, 0);
    for (size_t t = 0; t < 48; t++) p.g[t * 6 + 2] = -1e-12f;
    check_numbers(&p, "one channel at -1e-12");
    problem_free(&p);
}

static void exponential_before_the_mask(void) {
    kda_desc desc = problem_desc(2, 0, 9, 6);
    test_seed(4);
    problem p = problem_new(&desc, 129);
    fill_gates(&p, -50);
    check_numbers(&p, "g = -50");
    problem_free(&p);
}

/* The size functions know no number of tokens; what they say is enough for any, to the byte. */
static void temporaries_that_grow_with_tokens(void) {
    enum { T = 5000, BAND = 64 };
    kda_desc desc = problem_desc(1, 0, 3, 2);
    test_seed(5);
    problem p = problem_new(&desc, T);
    float *o = test_floats(p.output_count), *state = test_floats(p.state_count);
    for (size_t a = 0; a < 2; a++) {
        kda_args args = problem_args(&p, 0, o);
        kda_seq seq;
        kda_run run;
        memset(&seq, 0, sizeof seq), memset(&run, 0, sizeof run);
        seq.n_tokens = T, seq.state = state;
        args.seqs = &seq, args.n_seqs = 1;
        run.algorithm = both[a];
        run.scratch_bytes = kda_scratch_bytes(&desc, 1, &run);
        unsigned char *scratch = (unsigned char *)test_alloc(run.scratch_bytes + 2 * BAND);
        memset(scratch, 0xA5, run.scratch_bytes + 2 * BAND);
        run.scratch = scratch + BAND;
        CHECK(kda_forward(&desc, &args, &run) == KDA_OK);
        for (size_t i = 0; i < BAND; i++)
            CHECK(scratch[i] == 0xA5 && scratch[BAND + run.scratch_bytes + i] == 0xA5);
        free(scratch);
    }
    free(o), free(state);
    problem_free(&p);
}

static void clamps_at_legal_values(void) {
    static const float gates[] = {-0.5f, -5, -30, -60};
    static const size_t lengths[] = {129, 16, 2, 1};
    kda_desc desc = problem_desc(2, 0, 10, 7);
    test_seed(6);
    problem p = problem_new(&desc, 100);
    fill_gates(&p, 0); /* the plain delta rule */
    check_numbers(&p, "g = 0");
    problem_free(&p);
    desc.beta = KDA_BETA_VALUE;
    for (size_t i = 0; i < 4; i++) { /* nothing written: the state is what the decays leave, 1e-35 */
        p = problem_new(&desc, lengths[i]);
        fill_gates(&p, gates[i]);
        for (size_t j = 0; j < lengths[i] * 2; j++) p.beta[j] = 0;
        check_numbers(&p, "pure decay");
        problem_free(&p);
    }
}

static void keys_without_normalisation(void) {
    char what[32];
    test_seed(7);
    for (size_t norm = 1; norm <= 4; norm++) {
        kda_desc desc = problem_desc(1, 0, 16, 9);
        desc.flags = 0, desc.beta = KDA_BETA_VALUE;
        problem p = problem_new(&desc, 40);
        for (size_t t = 0; t < 40; t++) {
            float *k = p.k + t * 16, squares = 0;
            p.beta[t] = 0.9f;
            for (size_t i = 0; i < 16; i++) squares += k[i] * k[i];
            for (size_t i = 0; i < 16; i++) k[i] *= (float)norm / sqrtf(squares);
        }
        snprintf(what, sizeof what, "keys of norm %zu", norm);
        check_numbers(&p, what);
        problem_free(&p);
    }
}

/* Batch, heads and tokens are different primes; then two query/key heads for six value heads. */
static void wrong_axis_or_unexpanded_gate(void) {
    static const size_t prime_lengths[] = {7, 7, 7, 7, 7}, long_lengths[] = {19, 19};
    kda_desc desc = problem_desc(3, 0, 13, 11);
    test_seed(8);
    problem p = problem_new(&desc, 35);
    check_batch(&p, prime_lengths, 5, "B = 5, T = 7, H = 3");
    problem_free(&p);
    desc = problem_desc(6, 2, 13, 11);
    desc.gate = KDA_GATE_SOFTPLUS;
    p = problem_new(&desc, 38);
    check_batch(&p, long_lengths, 2, "B = 2, T = 19, H = 2, HV = 6");
    problem_free(&p);
}

/* ---- Edges ---- */

static void state_of_a_partial_chunk(void) {
    kda_desc desc = problem_desc(1, 0, 9, 4);
    char what[32];
    test_seed(9);
    for (size_t tokens = 1; tokens <= 130; tokens++) {
        problem p = problem_new(&desc, tokens);
        snprintf(what, sizeof what, "T = %zu", tokens);
        check_numbers(&p, what);
        problem_free(&p);
    }
}

static void prompts_shorter_than_a_chunk(void) {
    static const size_t mixed[] = {1, 1, 300, 1}, shorts[] = {1, 2, 3};
    kda_desc desc = problem_desc(2, 0, 8, 5);
    test_seed(10);
    problem p = problem_new(&desc, 303);
    check_batch(&p, mixed, 4, "{1, 1, 300, 1}");
    problem_free(&p);
    p = problem_new(&desc, 6);
    check_batch(&p, shorts, 3, "{1, 2, 3}");
    problem_free(&p);
}

static void empty_sequences(void) {
    static const size_t none[] = {0}, around[] = {5, 0, 7};
    kda_desc desc = problem_desc(2, 0, 6, 4);
    float states[3 * 48], before[48], o[12 * 8];
    test_seed(11);
    problem p = problem_new(&desc, 12);
    memset(p.start, 0, p.state_count * sizeof(float));
    for (size_t a = 0; a < 2; a++) {
        for (size_t i = 0; i < 3 * 48; i++) states[i] = NAN;
        memcpy(before, states, sizeof before);
        CHECK(forward_batch(&p, both[a], none, 1, states, o) == KDA_OK);
        CHECK(same_bits(states, before, 48)); /* 0 tokens leave a state as it is */
        for (size_t i = 0; i < 3; i++) CHECK(kda_state_clear(&desc, states + i * 48) == KDA_OK);
        CHECK(forward_batch(&p, both[a], around, 3, states, o) == KDA_OK);
        CHECK(same_bits(states + 48, p.start, 48));
        CHECK(kda_state_is_finite(&desc, states) && kda_state_is_finite(&desc, states + 2 * 48));
    }
    check_batch(&p, around, 3, "{5, 0, 7}");
    problem_free(&p);
}

/* Cut in two everywhere: the second call begins with what the first one left. */
static void initial_state_ignored(void) {
    enum { T = 200 };
    kda_desc desc = problem_desc(1, 0, 5, 3);
    test_seed(12);
    problem p = problem_new(&desc, T);
    float o[T * 3], want_o[T * 3], state[15], want_state[15];
    for (size_t a = 0; a < 2; a++) {
        problem_solve(&p, both[a], want_state, want_o);
        for (size_t split = 0; split <= T; split++) {
            memcpy(state, p.start, sizeof state);
            CHECK(problem_run(&p, both[a], 0, split, state, o) == KDA_OK);
            CHECK(problem_run(&p, both[a], split, T - split, state, o) == KDA_OK);
            CHECK_AT_MOST("output", test_relative_l2_f32(o, want_o, T * 3), 1e-6);
            CHECK_AT_MOST("state", test_relative_l2_f32(state, want_state, 15), 1e-6);
            if (both[a] == KDA_RECURRENT || split % KDA_CHUNK == 0)
                CHECK_MSG(same_bits(o, want_o, T * 3) && same_bits(state, want_state, 15),
                          "%s, split at %zu: other bits", both_names[a], split);
        }
    }
    problem_free(&p);
}

static kda_result convolve(const kda_conv_desc *desc, const float *weight, const float *x, float *y,
                           const kda_seq *seqs, size_t n_seqs) {
    kda_conv_args args;
    kda_run run;
    ptrdiff_t row = (ptrdiff_t)desc->channels;
    memset(&args, 0, sizeof args), memset(&run, 0, sizeof run);
    args.x = kda_in_f32(x, row, 0), args.y = kda_out_f32(y, row, 0);
    args.weight = weight, args.seqs = seqs, args.n_seqs = n_seqs;
    run.scratch_bytes = kda_conv_scratch_bytes(desc, n_seqs, &run);
    run.scratch = test_scratch(run.scratch_bytes);
    kda_result result = kda_conv(desc, &args, &run);
    free(run.scratch);
    return result;
}

/* A ragged batch with padding sequences, NaN in every padding row: sequences as if alone. */
static void padding_through_the_convolution(void) {
    enum { N = 6, C = 3, W = 4, ROWS = 12 };
    static const size_t lengths[N] = {2, 3, 1, 0, 2, 4};
    static const int padding[N] = {0, 1, 0, 0, 1, 0};
    kda_conv_desc desc;
    float x[ROWS * C], y[ROWS * C], alone[ROWS * C], weight[C * W], windows[N][(W - 1) * C];
    kda_seq seqs[N];
    memset(&desc, 0, sizeof desc), memset(seqs, 0, sizeof seqs), memset(windows, 0, sizeof windows);
    desc.channels = C, desc.width = W, desc.activation = KDA_ACTIVATION_SILU;
    test_seed(13);
    test_fill_normal(x, ROWS * C), test_fill_normal(weight, C * W);
    for (size_t i = 0; i < ROWS * C; i++) y[i] = alone[i] = -77;
    for (size_t i = 0, row = 0; i < N; row += lengths[i], i++) {
        for (size_t j = row * C; padding[i] && j < (row + lengths[i]) * C; j++) x[j] = NAN;
        seqs[i].n_tokens = lengths[i];
        seqs[i].window = padding[i] ? NULL : windows[i];
    }
    CHECK(convolve(&desc, weight, x, y, seqs, N) == KDA_OK);
    for (size_t i = 0, row = 0; i < N; row += lengths[i], i++) {
        float window[(W - 1) * C] = {0};
        kda_seq seq = seqs[i];
        seq.window = window;
        if (!padding[i])
            CHECK(convolve(&desc, weight, x + row * C, alone + row * C, &seq, 1) == KDA_OK);
        CHECK(same_bits(windows[i], window, (W - 1) * C));
    }
    CHECK(same_bits(y, alone, ROWS * C)); /* padding rows are not written either */
}

/* ---- State ---- */

/* The exported state against float64 in [heads][K][V]; imported again, it goes on with its bits. */
static void state_transposed(void) {
    kda_desc desc = problem_desc(2, 0, 5, 3);
    double want_o[20 * 6], want[30];
    float o[20 * 6], on[20 * 6], state[30], kv[30], back[30];
    test_seed(14);
    problem p = problem_new(&desc, 20);
    problem_reference(&p, want, want_o);
    for (size_t a = 0; a < 2; a++) {
        problem_solve(&p, both[a], state, o);
        CHECK(kda_state_export_kv(&desc, state, kv) == KDA_OK);
        for (size_t h = 0; h < 2; h++)
            for (size_t k = 0; k < 5; k++)
                for (size_t v = 0; v < 3; v++)
                    CHECK_AT_MOST("state",
                                  fabs((double)kv[(h * 5 + k) * 3 + v] - want[(h * 3 + v) * 5 + k]),
                                  2e-6);
        CHECK(kda_state_import_kv(&desc, kv, back) == KDA_OK);
        CHECK(problem_run(&p, both[a], 0, 20, state, o) == KDA_OK);
        CHECK(problem_run(&p, both[a], 0, 20, back, on) == KDA_OK);
        CHECK(same_bits(o, on, 20 * 6) && same_bits(state, back, 30));
    }
    problem_free(&p);
}

/* Rounds x to bfloat16 and returns it as such. */
static uint16_t *in_bf16(float *x, size_t n) {
    uint16_t *y = (uint16_t *)test_alloc(n * sizeof *y);
    for (size_t i = 0; i < n; i++) {
        y[i] = kda_to_bf16(x[i]);
        x[i] = kda_from_bf16(y[i]);
    }
    return y;
}

/* Activations in bfloat16, weak decay, 100,000 tokens a few at a time: were the state rounded to
 * the activations' type between calls, its error would be 1e-3 and more. */
static void state_in_the_activation_type(void) {
    enum { T = 100000 / TEST_ONE_IN(10), K = 8, V = 5 };
    static const size_t pieces[] = {1, 5 * KDA_CHUNK};
    kda_desc desc = problem_desc(1, 0, K, V);
    test_seed(15);
    problem p = problem_new(&desc, T);
    for (size_t i = 0; i < T * K; i++) p.g[i] *= 1e-3f;
    uint16_t *q = in_bf16(p.q, T * K), *k = in_bf16(p.k, T * K), *v = in_bf16(p.v, T * V);
    uint16_t *g = in_bf16(p.g, T * K), *beta = in_bf16(p.beta, T);
    float *o = test_floats(T * V), state[K * V];
    double *want_o = (double *)test_alloc(T * V * sizeof *want_o), want_state[K * V];
    double o_yardstick, state_yardstick;
    problem_f32_error(&p, &o_yardstick, &state_yardstick);
    problem_reference(&p, want_state, want_o);
    for (size_t a = 0; a < 2; a++) {
        memcpy(state, p.start, sizeof state);
        for (size_t t = 0; t < T; t += pieces[a]) {
            kda_seq seq;
            memset(&seq, 0, sizeof seq);
            seq.n_tokens = T - t < pieces[a] ? T - t : pieces[a], seq.state = state;
            kda_args args = problem_args(&p, t, o);
            args.q = kda_in(q + t * K, KDA_BF16, K, K), args.k = kda_in(k + t * K, KDA_BF16, K, K);
            args.v = kda_in(v + t * V, KDA_BF16, V, V), args.g = kda_in(g + t * K, KDA_BF16, K, K);
            args.beta = kda_in(beta + t, KDA_BF16, 1, 1);
            CHECK(forward(&desc, &args, both[a], &seq, 1) == KDA_OK);
        }
        CHECK_AT_MOST(both_names[a], test_relative_l2(o, want_o, T * V), 4 * o_yardstick + 1e-7);
        CHECK_AT_MOST(both_names[a], test_relative_l2(state, want_state, K * V),
                      4 * state_yardstick + 1e-7);
    }
    free(q), free(k), free(v), free(g), free(beta), free(o), free(want_o);
    problem_free(&p);
}

/* A slot of an earlier owner, NaN and infinity in it: cleared, it is a new one. */
static void stale_state(void) {
    kda_desc desc = problem_desc(2, 0, 7, 4);
    float fresh[56] = {0}, used[56], o[20 * 8], want_o[20 * 8];
    test_seed(16);
    problem p = problem_new(&desc, 20);
    for (size_t a = 0; a < 2; a++) {
        memset(fresh, 0, sizeof fresh);
        for (size_t i = 0; i < 56; i++) used[i] = i % 3 ? NAN : -INFINITY;
        CHECK(kda_state_clear(&desc, used) == KDA_OK);
        CHECK(problem_run(&p, both[a], 0, 20, fresh, want_o) == KDA_OK);
        CHECK(problem_run(&p, both[a], 0, 20, used, o) == KDA_OK);
        CHECK(same_bits(o, want_o, 20 * 8) && same_bits(used, fresh, 56));
    }
    problem_free(&p);
}

/* Live sequences may not share a slot, nor overlap; any number of padding rows may have none. */
static void two_sequences_on_one_slot(void) {
    kda_desc desc = problem_desc(1, 0, 4, 3);
    float states[24], before[24], o[4 * 3];
    kda_seq seqs[4];
    test_seed(17);
    problem p = problem_new(&desc, 4);
    test_fill_normal(states, 24);
    memcpy(before, states, sizeof before);
    for (size_t i = 0; i < 12; i++) o[i] = -77;
    memset(seqs, 0, sizeof seqs);
    for (size_t i = 0; i < 4; i++) seqs[i].n_tokens = 1;
    for (size_t a = 0; a < 2; a++)
        for (ptrdiff_t apart = 0; apart < 12; apart++) {
            kda_args args = problem_args(&p, 0, o);
            seqs[0].state = kda_slot(states, 12 * sizeof(float), 0);
            seqs[1].state = kda_slot(states, 12 * sizeof(float), -1);
            seqs[2].state = kda_slot(states, 12 * sizeof(float), -1);
            seqs[3].state = states + apart;
            CHECK(forward(&desc, &args, both[a], seqs, 4) == KDA_ERR_ALIAS);
            CHECK(same_bits(states, before, 24) && o[0] == -77 && o[11] == -77);
        }
    kda_args args = problem_args(&p, 0, o);
    seqs[3].state = kda_slot(states, 12 * sizeof(float), 1);
    CHECK(forward(&desc, &args, KDA_AUTO, seqs, 4) == KDA_OK);
    CHECK(o[0] != -77 && o[3] == -77 && o[8] == -77 && o[11] != -77);
    problem_free(&p);
}

static void one_nan_poisons_the_batch(void) {
    static const size_t lengths[] = {20, 20, 20};
    kda_desc desc = problem_desc(2, 0, 6, 4);
    float want[3 * 48], states[3 * 48], want_o[60 * 8], o[60 * 8];
    test_seed(18);
    problem p = problem_new(&desc, 60);
    float *poisons[] = {p.q + 25 * 12, p.k + 25 * 12, p.v + 25 * 8, p.g + 25 * 12, p.beta + 25 * 2,
                        states + 48};
    for (size_t a = 0; a < 2; a++)
        for (size_t poison = 0; poison < 6; poison++) {
            for (size_t i = 0; i < 3; i++) {
                memcpy(want + i * 48, p.start, 48 * sizeof(float));
                memcpy(states + i * 48, p.start, 48 * sizeof(float));
            }
            CHECK(forward_batch(&p, both[a], lengths, 3, want, want_o) == KDA_OK);
            float saved = *poisons[poison];
            *poisons[poison] = NAN;
            CHECK(forward_batch(&p, both[a], lengths, 3, states, o) == KDA_OK);
            *poisons[poison] = saved;
            CHECK(same_bits(o, want_o, 160) && same_bits(o + 320, want_o + 320, 160));
            CHECK(same_bits(states, want, 48) && same_bits(states + 96, want + 96, 48));
            CHECK_MSG(!same_bits(o + 160, want_o + 160, 160), "tensor %zu is not read", poison);
        }
    problem_free(&p);
}

static void dt_bias_per_head(void) {
    test_seed(19);
    for (int gate = KDA_GATE_SOFTPLUS; gate <= KDA_GATE_BOUNDED; gate++) {
        kda_desc desc = problem_desc(3, 0, 8, 5);
        desc.gate = (kda_gate)gate;
        desc.lower_bound = gate == KDA_GATE_BOUNDED ? -5.0f : 0.0f;
        problem p = problem_new(&desc, 40);
        for (size_t i = 0; i < 24; i++) p.dt_bias[i] = -4 + (float)(i * 7 % 24) / 3;
        check_numbers(&p, "a dt_bias for each channel");
        problem_free(&p);
    }
}

/* What a change of the inputs changes, both ways, against what it changes in float64. */
static void check_change(const problem *p, const problem *changed, const char *what) {
    size_t n_o = p->output_count, n_state = p->state_count, n = n_o + n_state;
    double *want = (double *)test_alloc(2 * n * sizeof *want), *got = want + n;
    double *before = (double *)test_alloc(n * sizeof *before);
    float *x = test_floats(2 * n), *y = x + n;
    problem_reference(p, before + n_o, before);
    problem_reference(changed, want + n_o, want);
    for (size_t i = 0; i < n; i++) want[i] -= before[i];
    for (size_t a = 0; a < 2; a++) {
        problem_solve(p, both[a], x + n_o, x);
        problem_solve(changed, both[a], y + n_o, y);
        for (size_t i = 0; i < n; i++) got[i] = (double)y[i] - (double)x[i];
        double o_error = test_relative_l2_f64(got, want, n_o);
        double state_error = test_relative_l2_f64(got + n_o, want + n_o, n_state);
        CHECK_MSG(o_error <= 3e-5 && state_error <= 3e-5,
                  "%s, %s: changes are off by %.1e (output) and %.1e (state)", what, both_names[a],
                  o_error, state_error);
    }
    free(want), free(before), free(x);
}

/* Only the last channel changes: first of the keys, then of the values. */
static void dims_off_the_vector_width(void) {
    static const size_t dims[] = {1, 2, 3, 7, 15, 17, 31, 33, 48, 60, 100, 127, 129, 192, 256};
    enum { N = sizeof dims / sizeof *dims, T = 3 };
    char what[64];
    test_seed(20);
    for (size_t i = 0; i < N; i++)
        for (size_t j = i % 4; j < N; j += 4) {
            size_t K = dims[i], V = dims[j] + (dims[j] == K); /* never the same */
            kda_desc desc = problem_desc(1, 0, K, V);
            desc.flags = 0, desc.scale = 1, desc.beta = KDA_BETA_VALUE;
            problem p = problem_new(&desc, T), last = p;
            for (size_t x = 0; x < T * K; x++) p.k[x] /= sqrtf((float)K);
            last.k = test_floats(T * K), last.q = test_floats(T * K), last.v = test_floats(T * V);
            memcpy(last.k, p.k, T * K * sizeof(float));
            memcpy(last.q, p.q, T * K * sizeof(float));
            memcpy(last.v, p.v, T * V * sizeof(float));
            for (size_t t = 0; t < T; t++)
                last.k[t * K + K - 1] += 0.5f, last.q[t * K + K - 1] -= 2;
            snprintf(what, sizeof what, "key channel %zu of %zu, dim_v %zu", K - 1, K, V);
            check_change(&p, &last, what);
            memcpy(last.k, p.k, T * K * sizeof(float));
            memcpy(last.q, p.q, T * K * sizeof(float));
            for (size_t t = 0; t < T; t++) last.v[t * V + V - 1] += 2;
            snprintf(what, sizeof what, "value channel %zu of %zu, dim_k %zu", V - 1, V, K);
            check_change(&p, &last, what);
            free(last.k), free(last.q), free(last.v);
            problem_free(&p);
        }
}

/* Two tokens: with one, no map and no decay of the start shows in every head. */
static void head_map_and_A_log(void) {
    test_seed(27);
    for (int map = KDA_HEADS_GROUPED; map <= KDA_HEADS_TILED; map++) {
        kda_desc desc = problem_desc(6, 2, 7, 4);
        desc.head_map = (kda_head_map)map, desc.gate = KDA_GATE_SOFTPLUS;
        problem p = problem_new(&desc, 2);
        for (size_t h = 0; h < 6; h++) p.A_log[h] = -1.5f + 0.5f * (float)h;
        check_numbers(&p, map == KDA_HEADS_TILED ? "tiled" : "grouped");
        problem_free(&p);
    }
}

static void bounded_gate_as_a_clamp(void) {
    static const float raws[] = {-20, -2, 0, 2, 20}, logs[] = {-4, 0, 4};
    kda_desc desc = problem_desc(3, 0, 5, 4), soft = desc;
    float g[15], soft_g[15];
    desc.gate = KDA_GATE_BOUNDED, desc.lower_bound = -5;
    soft.gate = KDA_GATE_SOFTPLUS;
    test_seed(28);
    problem p = problem_new(&desc, 30);
    memcpy(p.A_log, logs, sizeof logs);
    memset(p.dt_bias, 0, 15 * sizeof(float));
    for (size_t i = 0; i < 30 * 15; i++) p.g[i] = raws[i % 5];
    check_numbers(&p, "raw gates from -20 to 20");
    kda_input raw = kda_in_f32(p.g, 15, 5);
    CHECK(kda_log_decay(&desc, 1, raw, p.A_log, NULL, kda_out_f32(g, 15, 5), NULL) == KDA_OK);
    CHECK(kda_log_decay(&soft, 1, raw, p.A_log, NULL, kda_out_f32(soft_g, 15, 5), NULL) == KDA_OK);
    for (size_t i = 0; i < 15; i++) {
        double want = -5 * reference_sigmoid(exp((double)logs[i / 5]) * (double)raws[i % 5]);
        double clamp = fmax(-5, (double)soft_g[i]);
        CHECK_AT_MOST("bounded gate", fabs((double)g[i] - want), 1e-6 * fabs(want) + 1e-44);
        if (fabs(want - clamp) > 0.1) CHECK(fabs((double)g[i] - clamp) > 0.05);
    }
    CHECK(g[5 + 2] == -2.5f); /* sigmoid(0) is a half; a clamped softplus would say -0.69 */
    problem_free(&p);
}

static void softplus_by_a_select(void) {
    static const float raws[] = {1e4f, -1e4f, 100, -100, 88.7f, 89, -89, INFINITY, -INFINITY};
    static const float logs[] = {-20, -4, 0, 4, 20};
    enum { N = sizeof raws / sizeof *raws };
    kda_desc desc = problem_desc(1, 0, N, 4);
    desc.gate = KDA_GATE_SOFTPLUS;
    test_seed(29);
    for (size_t a = 0; a < 5; a++) {
        problem p = problem_new(&desc, 20);
        float g[N];
        p.A_log[0] = logs[a];
        memset(p.dt_bias, 0, N * sizeof(float));
        for (size_t i = 0; i < 20 * N; i++) p.g[i] = raws[i % N];
        CHECK(kda_log_decay(&desc, 1, kda_in_f32(p.g, N, N), p.A_log, NULL, kda_out_f32(g, N, N),
                            NULL) == KDA_OK);
        for (size_t i = 0; i < N; i++) {
            double A = exp((double)logs[a]), want = -A * reference_softplus((double)raws[i]);
            /* softplus(-100) is subnormal in float32, to 2 units of 2^-149; and so may g be */
            double bound = 1e-6 * fabs(want) + (1 + A) * 0x1p-148;
            CHECK_MSG(isinf(want) ? (double)g[i] == want : fabs((double)g[i] - want) <= bound,
                      "raw %g, A_log %g: %g, want %g", (double)raws[i], (double)logs[a],
                      (double)g[i], want);
        }
        check_numbers(&p, "extreme raw gates");
        problem_free(&p);
    }
}

static void expect_refused(const kda_desc *desc, kda_result want, const char *what) {
    float x[4] = {0}, o[4] = {-77}, state[4] = {5, 5, 5, 5};
    kda_seq seq;
    kda_args args;
    kda_run run;
    unsigned char scratch[32768];
    memset(&seq, 0, sizeof seq), memset(&args, 0, sizeof args), memset(&run, 0, sizeof run);
    seq.n_tokens = 1, seq.state = state;
    args.q = args.k = args.v = args.g = args.beta = kda_in_f32(x, 2, 2);
    args.o = kda_out_f32(o, 2, 2), args.seqs = &seq, args.n_seqs = 1;
    run.scratch = scratch, run.scratch_bytes = sizeof scratch;
    CHECK_MSG(kda_forward(desc, &args, &run) == want, "%s", what);
    CHECK_MSG(kda_state_bytes(desc) == 0 && kda_scratch_bytes(desc, 1, NULL) == 0, "%s: size",
              what);
    CHECK_MSG(kda_state_clear(desc, state) == want, "%s: clear", what);
    CHECK_MSG(o[0] == -77 && state[0] == 5, "%s: written", what);
}

static void unknown_option_swallowed(void) {
    kda_desc good = problem_desc(1, 0, 2, 2), desc;
    kda_conv_desc conv;
    memset(&desc, 0, sizeof desc), memset(&conv, 0, sizeof conv);
    expect_refused(&desc, KDA_ERR_DIMS, "all zero");
    desc.n_heads = 1, desc.dim_k = desc.dim_v = 2;
    expect_refused(&desc, KDA_ERR_GATE, "all zero but dimensions");
    for (int value = -1; value <= 5; value++) {
        desc = good, desc.gate = (kda_gate)value;
        if (value < 1 || value > 3) expect_refused(&desc, KDA_ERR_GATE, "gate");
        desc = good, desc.beta = (kda_beta)value;
        if (value < 1 || value > 3) expect_refused(&desc, KDA_ERR_BETA, "beta");
        desc = good, desc.head_map = (kda_head_map)value;
        if (value < 0 || value > 1) expect_refused(&desc, KDA_ERR_HEAD_MAP, "head map");
        desc = good, desc.state_type = (kda_type)value;
        if (value < 0 || value > 1) expect_refused(&desc, KDA_ERR_TYPE, "state type");
        conv.channels = 4, conv.width = 4, conv.activation = (kda_activation)value;
        CHECK((kda_conv_window_bytes(&conv) != 0) == (value == 1 || value == 2));
    }
    for (unsigned bit = 1; bit < 32; bit++) {
        desc = good, desc.flags |= (uint32_t)1 << bit;
        expect_refused(&desc, KDA_ERR_FLAGS, "flag");
    }
}

/* ---- Views: strided ones, and strides and counts past 2^31 elements ----
 *
 * A cell holds everything of one head of one token: q | k | v | g | beta | o, one float of gap
 * after each. All tensors are views into cells that lie token_stride and head_stride apart. */

typedef struct cells {
    float *base;
    ptrdiff_t token_stride, head_stride;
} cells;

enum { CELL_K = 3, CELL_V = 2, CELL_Q_AT = 1, CELL_K_AT = 5, CELL_V_AT = 9, CELL_G_AT = 12,
       CELL_BETA_AT = 16, CELL_O_AT = 18, CELL = 21 };

static float *cell_of(const cells *c, size_t token, size_t head) {
    return c->base + (ptrdiff_t)token * c->token_stride + (ptrdiff_t)head * c->head_stride;
}

static kda_args cell_args(const cells *c, const problem *p) {
    kda_args args = problem_args(p, 0, c->base);
    args.q = kda_in_f32(c->base + CELL_Q_AT, c->token_stride, c->head_stride);
    args.k = kda_in_f32(c->base + CELL_K_AT, c->token_stride, c->head_stride);
    args.v = kda_in_f32(c->base + CELL_V_AT, c->token_stride, c->head_stride);
    args.g = kda_in_f32(c->base + CELL_G_AT, c->token_stride, c->head_stride);
    args.beta = kda_in_f32(c->base + CELL_BETA_AT, c->token_stride, c->head_stride);
    args.o = kda_out_f32(c->base + CELL_O_AT, c->token_stride, c->head_stride);
    return args;
}

/* What a cell holds before a call: the inputs, NaN everywhere between. */
static void cell_fill(float *cell, const problem *p, size_t t, size_t h) {
    size_t row = t * p->desc.n_heads + h, qk_row = t * problem_qk_heads(&p->desc) + h;
    for (size_t i = 0; i < CELL; i++) cell[i] = NAN;
    if (h < problem_qk_heads(&p->desc)) {
        memcpy(cell + CELL_Q_AT, p->q + qk_row * CELL_K, CELL_K * sizeof(float));
        memcpy(cell + CELL_K_AT, p->k + qk_row * CELL_K, CELL_K * sizeof(float));
    }
    memcpy(cell + CELL_V_AT, p->v + row * CELL_V, CELL_V * sizeof(float));
    memcpy(cell + CELL_G_AT, p->g + row * CELL_K, CELL_K * sizeof(float));
    cell[CELL_BETA_AT] = p->beta[row];
}

/* Runs p dense and in cells, after a padding sequence of `padding` tokens: the same bits, and
 * nothing but o written. */
static void check_cells(const cells *c, const problem *p, size_t padding, const char *what) {
    size_t heads = p->desc.n_heads;
    float *want_o = test_floats(p->output_count), *want = test_floats(p->state_count);
    float *state = test_floats(p->state_count), expected[CELL];
    for (size_t a = 0; a < 2; a++) {
        kda_args args = cell_args(c, p);
        kda_seq seqs[2];
        memset(seqs, 0, sizeof seqs);
        seqs[0].n_tokens = padding;
        seqs[1].n_tokens = p->tokens, seqs[1].state = state;
        problem_solve(p, both[a], want, want_o);
        memcpy(state, p->start, p->state_count * sizeof(float));
        for (size_t t = 0; t < p->tokens; t++)
            for (size_t h = 0; h < heads; h++) cell_fill(cell_of(c, padding + t, h), p, t, h);
        kda_result result = forward(&p->desc, &args, both[a], seqs, 2);
        CHECK_MSG(result == KDA_OK, "%s: %s", what, kda_result_name(result));
        CHECK_MSG(same_bits(state, want, p->state_count), "%s, %s: state", what, both_names[a]);
        for (size_t t = 0; t < p->tokens; t++)
            for (size_t h = 0; h < heads; h++) {
                cell_fill(expected, p, t, h);
                memcpy(expected + CELL_O_AT, want_o + (t * heads + h) * CELL_V,
                       CELL_V * sizeof(float));
                CHECK_MSG(same_bits(cell_of(c, padding + t, h), expected, CELL),
                          "%s, %s: token %zu, head %zu", what, both_names[a], t, h);
            }
    }
    free(want_o), free(want), free(state);
}

static void strided_views_read_as_dense(void) {
    enum { T = 37, HEADS = 4, N = (T * HEADS + 2) * (CELL + 4) };
    static float memory[N], before[CELL];
    kda_desc desc = problem_desc(HEADS, 2, CELL_K, CELL_V);
    cells c;
    test_seed(21);
    problem p = problem_new(&desc, T);
    for (size_t i = 0; i < CELL; i++) before[i] = NAN;
    for (size_t i = 0; i < N; i++) memory[i] = NAN;
    c.base = memory + CELL, c.head_stride = CELL + 4, c.token_stride = HEADS * (CELL + 4);
    check_cells(&c, &p, 0, "tokens of heads");
    CHECK(same_bits(memory, before, CELL) && same_bits(memory + N - CELL, before, CELL));
    c.head_stride = T * (CELL + 4), c.token_stride = CELL + 4;
    check_cells(&c, &p, 0, "heads of tokens");
    c.base = memory + N - 2 * CELL - 4; /* backwards */
    c.head_stride = -c.head_stride, c.token_stride = -c.token_stride;
    check_cells(&c, &p, 0, "negative strides");
    problem_free(&p);
}

#if HAVE_MMAP && SIZE_MAX > 0xffffffffu

/* Address space without memory, of which only the pages of the cells in use can be touched at all;
 * null, with the case skipped, if the system refuses. */
static unsigned char *reserve(size_t bytes) {
    void *p = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p != MAP_FAILED) return (unsigned char *)p;
    test_skip("the system does not reserve this much address space");
    return NULL;
}

static int open_pages(const void *at, size_t bytes) {
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), start = (uintptr_t)at / page * page;
    size_t whole = (size_t)((uintptr_t)at + bytes - start + page - 1) / page * page;
    unsigned char *first = (unsigned char *)(uintptr_t)at - ((uintptr_t)at - start);
    if (mprotect(first, whole, PROT_READ | PROT_WRITE) == 0) return 1;
    test_skip("the system does not make pages of a reservation accessible");
    return 0;
}

/* A problem in cells that far apart, after that many tokens of padding. */
static void check_far_cells(size_t heads, size_t tokens, ptrdiff_t token_stride,
                            ptrdiff_t head_stride, size_t padding, const char *what) {
    kda_desc desc = problem_desc(heads, 0, CELL_K, CELL_V);
    size_t reach = (padding + tokens) * (size_t)token_stride + heads * (size_t)head_stride;
    unsigned char *memory = reserve(reach * sizeof(float));
    if (!memory) return;
    cells c;
    int open = 1;
    c.base = (float *)(void *)memory, c.token_stride = token_stride, c.head_stride = head_stride;
    for (size_t t = padding; t < padding + tokens; t++)
        for (size_t h = 0; h < heads && open; h++)
            open = open_pages(cell_of(&c, t, h), CELL * sizeof(float));
    if (open) {
        problem p = problem_new(&desc, tokens);
        check_cells(&c, &p, padding, what);
        problem_free(&p);
    }
    munmap(memory, reach * sizeof(float));
}

static void token_strides_past_2_to_31(void) {
    test_seed(22);
    check_far_cells(2, 3, ((ptrdiff_t)1 << 31) + 5, CELL, 0, "token stride");
    check_far_cells(2, 19, ((ptrdiff_t)1 << 28) + 5, CELL, 0, "token stride times token");
}

static void head_strides_past_2_to_31(void) {
    test_seed(23);
    check_far_cells(3, 3, CELL, ((ptrdiff_t)1 << 31) + 7, 0, "head stride");
    check_far_cells(17, 2, CELL, ((ptrdiff_t)1 << 28) + 7, 0, "head stride times head");
}

/* More tokens of padding than an int counts, in front of a sequence. */
static void token_counts_past_2_to_31(void) {
    test_seed(24);
    check_far_cells(1, 3, CELL, CELL, ((size_t)1 << 31) + 3, "tokens");
    check_far_cells(1, 3, CELL, CELL, ((size_t)1 << 32) + 3, "tokens, and an unsigned one too");
}

/* States that lie 2^30 floats apart in a pool. */
static void slots_past_2_to_31(void) {
    enum { SLOTS = 5 };
    size_t piece = ((size_t)1 << 32) + 4096;
    kda_desc desc = problem_desc(2, 0, 5, 3);
    unsigned char *pool = reserve(SLOTS * piece);
    float want[30], o[20 * 6], want_o[20 * 6];
    if (!pool) return;
    test_seed(25);
    problem p = problem_new(&desc, 20);
    for (ptrdiff_t slot = 0; slot < SLOTS; slot++) {
        void *state = kda_slot(pool, piece, slot);
        if (!open_pages(state, sizeof want)) break;
        CHECK((uintptr_t)state - (uintptr_t)pool == (size_t)slot * piece);
        problem_solve(&p, KDA_RECURRENT, want, want_o);
        memcpy(state, p.start, sizeof want);
        CHECK(problem_run(&p, KDA_RECURRENT, 0, 20, state, o) == KDA_OK);
        CHECK(memcmp(state, want, sizeof want) == 0 && same_bits(o, want_o, 20 * 6));
    }
    problem_free(&p);
    munmap(pool, SLOTS * piece);
}

#else /* 32 bits cannot even write such strides: extents_past_the_address_space is their row */

static void token_strides_past_2_to_31(void) { test_skip("needs mmap and 64 bits"); }
static void head_strides_past_2_to_31(void) { test_skip("needs mmap and 64 bits"); }
static void token_counts_past_2_to_31(void) { test_skip("needs mmap and 64 bits"); }
static void slots_past_2_to_31(void) { test_skip("needs mmap and 64 bits"); }

#endif

/* Whatever the width of an address: an error, not a wrapped product. */
static void extents_past_the_address_space(void) {
    kda_desc desc = problem_desc(2, 0, CELL_K, CELL_V), huge = desc;
    float memory[4 * CELL], state[2 * CELL_K * CELL_V];
    kda_seq seq;
    cells c;
    test_seed(26);
    problem p = problem_new(&desc, 2);
    memset(&seq, 0, sizeof seq);
    seq.n_tokens = 2, seq.state = state;
    for (ptrdiff_t by = 2; by <= 4; by *= 2) {
        c.base = memory, c.head_stride = CELL, c.token_stride = PTRDIFF_MAX / by;
        kda_args args = cell_args(&c, &p);
        CHECK(forward(&desc, &args, KDA_AUTO, &seq, 1) == KDA_ERR_SIZE);
        c.token_stride = PTRDIFF_MIN / by;
        args = cell_args(&c, &p);
        CHECK(forward(&desc, &args, KDA_AUTO, &seq, 1) == KDA_ERR_SIZE);
        c.token_stride = 2 * CELL, c.head_stride = PTRDIFF_MAX / by;
        args = cell_args(&c, &p);
        CHECK(forward(&desc, &args, KDA_AUTO, &seq, 1) == KDA_ERR_SIZE);
        huge.n_heads = (size_t)PTRDIFF_MAX / (size_t)by;
        CHECK(kda_state_bytes(&huge) == 0 && kda_scratch_bytes(&huge, 1, NULL) == 0);
        CHECK(kda_journal_bytes(&desc, huge.n_heads) == 0);
    }
    problem_free(&p);
}

/* ---- Convolution, speculation, saving ---- */

/* Widths 1 to 4, prompts of 0 to 4 tokens cut in every way, in place and not, window cold and warm,
 * against float64 and bit for bit against each other. */
static void check_history(size_t width, size_t tokens, int warm) {
    enum { C = 3, T = 4 };
    kda_conv_desc desc;
    float x[T * C], weight[C * T], start[3 * C] = {0}, window[3 * C], want[T * C], y[T * C];
    float want_window[3 * C], all[(3 + T) * C] = {0};
    size_t past = width - 1;
    kda_seq seq;
    memset(&desc, 0, sizeof desc), memset(&seq, 0, sizeof seq);
    desc.channels = C, desc.width = width, desc.activation = KDA_ACTIVATION_NONE;
    test_fill_normal(x, T * C), test_fill_normal(weight, C * T);
    if (warm) test_fill_normal(start, 3 * C);
    memcpy(all, start, past * C * sizeof(float));
    memcpy(all + past * C, x, tokens * C * sizeof(float));
    memcpy(want_window, start, sizeof start);
    seq.n_tokens = tokens, seq.window = want_window;
    CHECK(convolve(&desc, weight, x, want, &seq, 1) == KDA_OK);
    CHECK(same_bits(want_window, all + tokens * C, past * C)); /* the last inputs, oldest first */
    for (size_t t = 0; t < tokens; t++)
        for (size_t c = 0; c < C; c++) {
            double sum = 0;
            for (size_t i = 0; i < width; i++)
                sum += (double)weight[c * width + i] * (double)all[(t + i) * C + c];
            CHECK_AT_MOST("convolution", fabs((double)want[t * C + c] - sum), 2e-6);
        }
    for (unsigned cuts = 0; cuts < 8; cuts++) /* bit t: a call ends after token t */
        for (int in_place = 0; in_place < 2; in_place++) {
            memcpy(window, start, sizeof start);
            memcpy(y, x, sizeof x);
            seq.window = window;
            for (size_t t = 0, first = 0; t < tokens; t++) {
                if (t + 1 < tokens && !(cuts >> t & 1u)) continue;
                seq.n_tokens = t + 1 - first;
                CHECK(convolve(&desc, weight, (in_place ? y : x) + first * C, y + first * C, &seq,
                               1) == KDA_OK);
                first = t + 1;
            }
            CHECK_MSG(same_bits(y, want, tokens * C) && same_bits(window, want_window, past * C),
                      "width %zu, %zu tokens, cuts %x, %s", width, tokens, cuts,
                      in_place ? "in place" : "not in place");
        }
}

static void convolution_history(void) {
    test_seed(30);
    for (size_t width = 1; width <= 4; width++)
        for (size_t tokens = 0; tokens <= 4; tokens++)
            for (int warm = 0; warm < 2; warm++) check_history(width, tokens, warm);
}

/* A layer on random rows, each row q | k | v | g | beta | gate of all heads. */
enum { L_HEADS = 4, L_QK = 2, L_K = 5, L_V = 3, L_W = 4, L_DRAFT = 4,
       L_KEYS = L_QK * L_K, L_GATES = L_HEADS * L_K, L_VALUES = L_HEADS * L_V,
       L_ROW = 2 * L_KEYS + L_GATES + 2 * L_VALUES + L_HEADS,
       L_STATE = L_HEADS * L_V * L_K, L_WINDOW = (L_W - 1) * (2 * L_KEYS + L_VALUES) };

typedef struct layer {
    kda_layer_desc desc;
    float q_conv[L_KEYS * L_W], k_conv[L_KEYS * L_W], v_conv[L_VALUES * L_W];
    float A_log[L_HEADS], dt_bias[L_GATES], norm[L_V];
    float rows[12 * L_ROW], o[12 * L_VALUES];
    float state[L_STATE], window[L_WINDOW]; /* what every case starts from */
} layer;

static void layer_init(layer *l, uint64_t seed) {
    memset(l, 0, sizeof *l);
    test_seed(seed);
    l->desc.op = problem_desc(L_HEADS, L_QK, L_K, L_V);
    l->desc.op.gate = KDA_GATE_SOFTPLUS;
    l->desc.conv_width = L_W, l->desc.conv_activation = KDA_ACTIVATION_SILU;
    l->desc.q_conv = l->q_conv, l->desc.k_conv = l->k_conv, l->desc.v_conv = l->v_conv;
    l->desc.A_log = l->A_log, l->desc.dt_bias = l->dt_bias;
    l->desc.norm_weight = l->norm, l->desc.norm_eps = 1e-5f;
    test_fill_normal(l->q_conv, L_KEYS * L_W), test_fill_normal(l->k_conv, L_KEYS * L_W);
    test_fill_normal(l->v_conv, L_VALUES * L_W), test_fill_normal(l->norm, L_V);
    test_fill_normal(l->dt_bias, L_GATES), test_fill_normal(l->rows, 12 * L_ROW);
    test_fill_normal(l->state, L_STATE), test_fill_normal(l->window, L_WINDOW);
    CHECK(kda_state_bytes(&l->desc.op) == sizeof l->state);
    CHECK(kda_layer_window_bytes(&l->desc) == sizeof l->window);
}

typedef kda_result (*layer_call)(const kda_layer_desc *, const kda_layer_args *, const kda_run *);

/* kda_layer or kda_layer_verify on tokens first .. first + n - 1. */
static void layer_run(layer *l, layer_call call, size_t first, size_t n, float *state,
                      float *window, void *journal) {
    const float *row = l->rows + first * L_ROW;
    kda_layer_args args;
    kda_seq seq;
    kda_run run;
    memset(&args, 0, sizeof args), memset(&seq, 0, sizeof seq), memset(&run, 0, sizeof run);
    seq.n_tokens = n, seq.state = state, seq.window = window, seq.journal = journal;
    args.q = kda_in_f32(row, L_ROW, L_K), args.k = kda_in_f32(row + L_KEYS, L_ROW, L_K);
    args.v = kda_in_f32(row + 2 * L_KEYS, L_ROW, L_V);
    args.g = kda_in_f32(row + 2 * L_KEYS + L_VALUES, L_ROW, L_K);
    args.beta = kda_in_f32(row + L_ROW - L_VALUES - L_HEADS, L_ROW, 1);
    args.gate = kda_in_f32(row + L_ROW - L_VALUES, L_ROW, L_V);
    args.o = kda_out_f32(l->o + first * L_VALUES, L_VALUES, L_V);
    args.seqs = &seq, args.n_seqs = 1;
    run.algorithm = KDA_RECURRENT;
    run.scratch_bytes = kda_layer_scratch_bytes(&l->desc, 1, &run);
    run.scratch = test_scratch(run.scratch_bytes);
    CHECK(call(&l->desc, &args, &run) == KDA_OK);
    free(run.scratch);
}

static kda_result layer_commit(const layer *l, size_t n, float *state, float *window,
                               void *journal) {
    kda_seq seq;
    kda_run run;
    memset(&seq, 0, sizeof seq), memset(&run, 0, sizeof run);
    seq.n_tokens = n, seq.state = state, seq.window = window, seq.journal = journal;
    run.scratch_bytes = kda_layer_scratch_bytes(&l->desc, 1, &run);
    run.scratch = test_scratch(run.scratch_bytes);
    kda_result result = kda_layer_commit(&l->desc, &seq, 1, &run);
    free(run.scratch);
    return result;
}

/* m of 4 draft tokens accepted: state and window are both those of m plain steps. */
static void rollback_of_half_a_sequence(void) {
    layer l;
    layer_init(&l, 31);
    void *journal = test_alloc(kda_layer_journal_bytes(&l.desc, L_DRAFT));
    for (size_t m = 0; m <= L_DRAFT; m++) {
        float state[L_STATE], window[L_WINDOW], want[L_STATE], want_window[L_WINDOW];
        memcpy(state, l.state, sizeof state), memcpy(want, l.state, sizeof want);
        memcpy(window, l.window, sizeof window), memcpy(want_window, l.window, sizeof window);
        for (size_t t = 0; t < m; t++) layer_run(&l, kda_layer, t, 1, want, want_window, NULL);
        layer_run(&l, kda_layer_verify, 0, L_DRAFT, state, window, journal);
        CHECK(same_bits(state, l.state, L_STATE) && same_bits(window, l.window, L_WINDOW));
        CHECK(layer_commit(&l, m, state, window, journal) == KDA_OK);
        CHECK_MSG(same_bits(state, want, L_STATE), "%zu accepted: state", m);
        CHECK_MSG(same_bits(window, want_window, L_WINDOW), "%zu accepted: window", m);
        CHECK(m == 0 || layer_commit(&l, 1, state, window, journal) == KDA_ERR_JOURNAL);
    }
    free(journal);
}

/* Nothing accepted leaves every byte, of the journal too: a later commit of it is still right. */
static void zero_accepted_tokens(void) {
    layer l;
    layer_init(&l, 32);
    size_t bytes = kda_layer_journal_bytes(&l.desc, L_DRAFT);
    unsigned char *journal = (unsigned char *)test_alloc(2 * bytes), *before = journal + bytes;
    float state[L_STATE], window[L_WINDOW], want[L_STATE], want_window[L_WINDOW];
    memcpy(state, l.state, sizeof state), memcpy(want, l.state, sizeof want);
    memcpy(window, l.window, sizeof window), memcpy(want_window, l.window, sizeof window);
    layer_run(&l, kda_layer_verify, 0, L_DRAFT, state, window, journal);
    memcpy(before, journal, bytes);
    CHECK(layer_commit(&l, 0, state, window, journal) == KDA_OK);
    CHECK(memcmp(journal, before, bytes) == 0);
    CHECK(same_bits(state, l.state, L_STATE) && same_bits(window, l.window, L_WINDOW));
    CHECK(layer_commit(&l, 0, state, window, NULL) == KDA_OK);
    CHECK(layer_commit(&l, L_DRAFT + 1, state, window, journal) == KDA_ERR_COUNT);
    CHECK(same_bits(state, l.state, L_STATE) && same_bits(window, l.window, L_WINDOW));
    CHECK(layer_commit(&l, 2, state, window, journal) == KDA_OK);
    layer_run(&l, kda_layer, 0, 2, want, want_window, NULL);
    CHECK(same_bits(state, want, L_STATE) && same_bits(window, want_window, L_WINDOW));
    free(journal);
}

static kda_saved saved_of(float *state, float *window, uint64_t n_tokens) {
    kda_saved saved;
    saved.state = state, saved.window = window;
    saved.window_bytes = L_WINDOW * sizeof(float);
    saved.n_tokens = n_tokens;
    return saved;
}

/* A save between verify and commit is the sequence before the drafts; it goes on as ever. */
static void saving_while_speculating(void) {
    layer l;
    layer_init(&l, 33);
    size_t bytes = kda_save_bytes(&l.desc.op, L_WINDOW * sizeof(float));
    unsigned char *blobs = (unsigned char *)test_alloc(2 * bytes);
    void *journal = test_alloc(kda_layer_journal_bytes(&l.desc, L_DRAFT));
    float state[L_STATE], window[L_WINDOW], other[L_STATE], other_window[L_WINDOW];
    memcpy(state, l.state, sizeof state), memcpy(window, l.window, sizeof window);
    kda_saved saved = saved_of(state, window, 7), loaded = saved_of(other, other_window, 0);
    CHECK(kda_save(&l.desc.op, &saved, blobs, bytes) == KDA_OK);
    layer_run(&l, kda_layer_verify, 0, L_DRAFT, state, window, journal);
    CHECK(kda_save(&l.desc.op, &saved, blobs + bytes, bytes) == KDA_OK);
    CHECK(memcmp(blobs, blobs + bytes, bytes) == 0);
    CHECK(layer_commit(&l, 3, state, window, journal) == KDA_OK);
    CHECK(kda_load(&l.desc.op, &loaded, blobs + bytes, bytes) == KDA_OK && loaded.n_tokens == 7);
    layer_run(&l, kda_layer, 0, 3, other, other_window, NULL);
    CHECK(same_bits(state, other, L_STATE) && same_bits(window, other_window, L_WINDOW));
    free(journal), free(blobs);
}

/* Refused, by whatever name, and nothing written. */
static void expect_no_load(const kda_desc *desc, const unsigned char *blob, size_t bytes,
                           kda_result want, const char *what) {
    float state[L_STATE], window[L_WINDOW];
    for (size_t i = 0; i < L_STATE; i++) state[i] = -77;
    for (size_t i = 0; i < L_WINDOW; i++) window[i] = -77;
    kda_saved saved = saved_of(state, window, 99);
    kda_result result = kda_load(desc, &saved, blob, bytes);
    CHECK_MSG(want == KDA_OK ? result != KDA_OK : result == want, "%s: %s", what,
              kda_result_name(result));
    for (size_t i = 0; i < L_STATE; i++) CHECK_MSG(state[i] == -77, "%s: state written", what);
    for (size_t i = 0; i < L_WINDOW; i++) CHECK_MSG(window[i] == -77, "%s: window written", what);
    CHECK_MSG(saved.n_tokens == 99, "%s: token count written", what);
}

/* The count that a snapshot was made at comes back with it, so that one under another key shows;
 * cut at every byte, longer by one, every bit flipped, counts of 2^63: all refused. */
static void snapshots_cut_or_altered(void) {
    static const uint64_t counts[] = {0, 1, 41, 42, 43, (uint64_t)1 << 63, UINT64_MAX};
    layer l;
    layer_init(&l, 34);
    const kda_desc *desc = &l.desc.op;
    size_t bytes = kda_save_bytes(desc, L_WINDOW * sizeof(float));
    unsigned char *blob = (unsigned char *)test_alloc(bytes + 1);
    float state[L_STATE], window[L_WINDOW];
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        kda_saved saved = saved_of(l.state, l.window, counts[i]),
                  loaded = saved_of(state, window, 5);
        CHECK(kda_save(desc, &saved, blob, bytes) == KDA_OK);
        CHECK(kda_load(desc, &loaded, blob, bytes) == KDA_OK && loaded.n_tokens == counts[i]);
        CHECK(same_bits(state, l.state, L_STATE) && same_bits(window, l.window, L_WINDOW));
    }
    for (size_t n = 0; n < bytes; n++) expect_no_load(desc, blob, n, KDA_ERR_BLOB_SHORT, "cut");
    expect_no_load(desc, blob, bytes + 1, KDA_ERR_BLOB_LONG, "one byte more");
    for (size_t bit = 0; bit < 8 * bytes; bit++) {
        blob[bit / 8] ^= (unsigned char)(1u << bit % 8);
        expect_no_load(desc, blob, bytes, KDA_OK, "a flipped bit");
        blob[bit / 8] ^= (unsigned char)(1u << bit % 8);
    }
    for (size_t at = 16; at < 72; at += 8) { /* each 64-bit field in turn */
        unsigned char field[8];
        memcpy(field, blob + at, 8);
        memset(blob + at, 0, 7), blob[at + 7] = 0x80;
        expect_no_load(desc, blob, bytes, KDA_OK, "a count of 2^63");
        memcpy(blob + at, field, 8);
    }
    free(blob);
}

/* Every field that a blob has away from its default, and a load under any other field refused. */
static void field_forgotten_on_reload(void) {
    layer l;
    layer_init(&l, 35);
    kda_desc desc = l.desc.op, other;
    uint16_t state[L_STATE], back[L_STATE];
    float window[L_WINDOW];
    desc.head_map = KDA_HEADS_TILED, desc.state_type = KDA_F16, desc.beta = KDA_BETA_LOGIT_DOUBLED;
    for (size_t i = 0; i < L_STATE; i++) state[i] = kda_to_f16(l.state[i]);
    size_t bytes = kda_save_bytes(&desc, L_WINDOW * sizeof(float));
    unsigned char *blob = (unsigned char *)test_alloc(bytes);
    kda_saved saved = saved_of(NULL, l.window, 0x123456789abcdefu),
              loaded = saved_of(NULL, window, 0);
    saved.state = state, loaded.state = back;
    CHECK(kda_save(&desc, &saved, blob, bytes) == KDA_OK);
    CHECK(kda_load(&desc, &loaded, blob, bytes) == KDA_OK);
    CHECK(memcmp(state, back, sizeof state) == 0 && same_bits(window, l.window, L_WINDOW));
    CHECK(loaded.n_tokens == 0x123456789abcdefu);
    other = desc, other.n_heads = 2;
    expect_no_load(&other, blob, bytes, KDA_ERR_BLOB_MISMATCH, "other heads");
    other = desc, other.dim_k = L_V, other.dim_v = L_K;
    expect_no_load(&other, blob, bytes, KDA_ERR_BLOB_MISMATCH, "dimensions the other way round");
    other = desc, other.state_type = KDA_F32;
    expect_no_load(&other, blob, bytes, KDA_ERR_BLOB_MISMATCH, "another state type");
    loaded.window_bytes -= sizeof(float);
    CHECK(kda_load(&desc, &loaded, blob, bytes) == KDA_ERR_BLOB_MISMATCH);
    loaded.window_bytes = 0, loaded.window = NULL; /* half a sequence cannot be restored */
    CHECK(kda_load(&desc, &loaded, blob, bytes) == KDA_ERR_BLOB_MISMATCH);
    free(blob);
}

int main(void) {
    TEST(power_series_for_the_inverse);
    TEST(one_anchor_per_chunk);
    TEST(product_of_two_exponentials);
    TEST(exponential_before_the_mask);
    TEST(temporaries_that_grow_with_tokens);
    TEST(clamps_at_legal_values);
    TEST(keys_without_normalisation);
    TEST(wrong_axis_or_unexpanded_gate);
    TEST(state_of_a_partial_chunk);
    TEST(prompts_shorter_than_a_chunk);
    TEST(empty_sequences);
    TEST(initial_state_ignored);
    TEST(padding_through_the_convolution);
    TEST(state_transposed);
    TEST(state_in_the_activation_type);
    TEST(stale_state);
    TEST(two_sequences_on_one_slot);
    TEST(one_nan_poisons_the_batch);
    TEST(dt_bias_per_head);
    TEST(dims_off_the_vector_width);
    TEST(strided_views_read_as_dense);
    TEST(head_map_and_A_log);
    TEST(bounded_gate_as_a_clamp);
    TEST(softplus_by_a_select);
    TEST(unknown_option_swallowed);
    TEST(token_strides_past_2_to_31);
    TEST(head_strides_past_2_to_31);
    TEST(token_counts_past_2_to_31);
    TEST(slots_past_2_to_31);
    TEST(extents_past_the_address_space);
    TEST(convolution_history);
    TEST(rollback_of_half_a_sequence);
    TEST(zero_accepted_tokens);
    TEST(saving_while_speculating);
    TEST(snapshots_cut_or_altered);
    TEST(field_forgotten_on_reload);
    return test_summary();
}
