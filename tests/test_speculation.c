/* Speculation: drafts leave everything as it is, and accepting m of them gives the bits of m single
 * steps. For the state (kda_verify, kda_commit) and for the convolution window. */
#include "../kda.h"
#include "hooks.h"
#include "operator.h"

enum { MAX_SEQS = 6, GUARD = 48, PADDING = 1, UNTOUCHED = 0xA5 };

/* 0 threads: no hook at all. */
static kda_run run_with(kda_parallel_for hook, size_t threads) {
    kda_run run;
    memset(&run, 0, sizeof run);
    run.algorithm = KDA_RECURRENT;
    if (threads > 0) run.parallel_for = hook, run.n_threads = threads;
    return run;
}

static void give_scratch(kda_run *run, size_t bytes) {
    CHECK(bytes > 0);
    run->scratch_bytes = bytes;
    run->scratch = test_scratch(bytes); /* to the byte, so that a sanitizer sees an overrun */
}

/* Memory with a margin that nobody may write. */
static unsigned char *guarded_new(size_t bytes) {
    unsigned char *memory = (unsigned char *)test_alloc(bytes + GUARD);
    memset(memory, UNTOUCHED, bytes + GUARD);
    return memory;
}

static int guard_is_whole(const unsigned char *memory, size_t bytes) {
    for (size_t i = 0; i < GUARD; i++)
        if (memory[bytes + i] != UNTOUCHED) return 0;
    return 1;
}

/* ---- Drafts of the operator ---- */

/* A batch of drafts, and what single steps make of each sequence. */
typedef struct draft {
    problem p;
    size_t n_seqs, state_bytes;
    size_t n[MAX_SEQS], first[MAX_SEQS]; /* tokens, and the first one's row */
    int padding[MAX_SEQS];
    unsigned char *after[MAX_SEQS]; /* [n + 1][state_bytes]: the state after so many single steps */
    float *want;                    /* their outputs; rows of padding hold what was there before */
    unsigned char *state[MAX_SEQS], *journal[MAX_SEQS], *journal_copy[MAX_SEQS];
    size_t journal_bytes[MAX_SEQS];
    float *o;
} draft;

static void fill_state(const draft *d, unsigned char *state) {
    const kda_desc *desc = &d->p.desc;
    size_t size = desc->state_type == KDA_F16 ? 2 : 4;
    for (size_t i = 0; i < d->p.state_count; i++) {
        float x = test_normal();
        uint16_t half = kda_to_f16(x);
        memcpy(state + i * size, size == 2 ? (const void *)&half : (const void *)&x, size);
    }
}

static void draft_step(const draft *d, size_t token, void *state, float *o) {
    CHECK(problem_run(&d->p, KDA_RECURRENT, token, 1, state, o) == KDA_OK);
}

static void draft_solve(draft *d, size_t seq) {
    size_t bytes = d->state_bytes;
    d->after[seq] = (unsigned char *)test_alloc((d->n[seq] + 1) * bytes);
    fill_state(d, d->after[seq]);
    for (size_t t = 0; t < d->n[seq]; t++) {
        memcpy(d->after[seq] + (t + 1) * bytes, d->after[seq] + t * bytes, bytes);
        draft_step(d, d->first[seq] + t, d->after[seq] + (t + 1) * bytes, d->want);
    }
}

/* padding: a bit for each sequence that is padding. One more token than the drafts is in the
 * problem, to go on with. */
static draft draft_new(const kda_desc *desc, const size_t *n, size_t n_seqs, unsigned padding) {
    draft d;
    size_t tokens = 0;
    memset(&d, 0, sizeof d);
    for (size_t i = 0; i < n_seqs; i++) d.n[i] = n[i], d.first[i] = tokens, tokens += n[i];
    d.p = problem_new(desc, tokens + 1);
    d.n_seqs = n_seqs;
    d.state_bytes = kda_state_bytes(desc);
    d.want = test_floats(d.p.output_count);
    d.o = test_floats(d.p.output_count);
    for (size_t i = 0; i < d.p.output_count; i++) d.want[i] = d.o[i] = -77.0f;
    for (size_t i = 0; i < n_seqs; i++) {
        d.padding[i] = (int)(padding >> i & 1u);
        if (d.padding[i]) continue;
        draft_solve(&d, i);
        d.state[i] = (unsigned char *)test_alloc(d.state_bytes);
        memcpy(d.state[i], d.after[i], d.state_bytes);
        d.journal_bytes[i] = kda_journal_bytes(desc, n[i]);
        d.journal[i] = guarded_new(d.journal_bytes[i]);
        d.journal_copy[i] = guarded_new(d.journal_bytes[i]);
    }
    return d;
}

static void draft_free(draft *d) {
    for (size_t i = 0; i < d->n_seqs; i++)
        free(d->after[i]), free(d->state[i]), free(d->journal[i]), free(d->journal_copy[i]);
    free(d->want), free(d->o);
    problem_free(&d->p);
}

static void draft_seqs(const draft *d, const size_t *n, kda_seq *seqs) {
    memset(seqs, 0, MAX_SEQS * sizeof *seqs);
    for (size_t i = 0; i < d->n_seqs; i++) {
        seqs[i].n_tokens = n[i];
        seqs[i].state = d->state[i];
        seqs[i].journal = d->journal[i];
    }
}

static kda_result draft_verify(draft *d, kda_run run) {
    kda_seq seqs[MAX_SEQS];
    kda_args args = problem_args(&d->p, 0, d->o);
    draft_seqs(d, d->n, seqs);
    args.seqs = seqs, args.n_seqs = d->n_seqs;
    give_scratch(&run, kda_verify_scratch_bytes(&d->p.desc, d->n_seqs, &run));
    kda_result result = kda_verify(&d->p.desc, &args, &run);
    free(run.scratch);
    return result;
}

static kda_result draft_commit(draft *d, const size_t *m, kda_run run) {
    kda_seq seqs[MAX_SEQS];
    draft_seqs(d, m, seqs);
    give_scratch(&run, kda_scratch_bytes(&d->p.desc, d->n_seqs, &run));
    kda_result result = kda_commit(&d->p.desc, seqs, d->n_seqs, &run);
    free(run.scratch);
    return result;
}

/* Whether every state is what m single steps make. */
static int draft_is_after(const draft *d, const size_t *m) {
    for (size_t i = 0; i < d->n_seqs; i++)
        if (!d->padding[i] &&
            memcmp(d->state[i], d->after[i] + m[i] * d->state_bytes, d->state_bytes) != 0)
            return 0;
    return 1;
}

/* Verifies, and checks that the outputs are those of single steps and that nothing moved. */
static void check_verify(draft *d, kda_run run, const char *what) {
    static const size_t none[MAX_SEQS] = {0};
    for (size_t i = 0; i < d->p.output_count; i++) d->o[i] = -77.0f;
    kda_result result = draft_verify(d, run);
    CHECK_MSG(result == KDA_OK, "%s: %s", what, kda_result_name(result));
    CHECK_MSG(memcmp(d->o, d->want, d->p.output_count * sizeof(float)) == 0, "%s: output", what);
    CHECK_MSG(draft_is_after(d, none), "%s: verify wrote a state", what);
    for (size_t i = 0; i < d->n_seqs; i++)
        if (!d->padding[i]) {
            CHECK_MSG(guard_is_whole(d->journal[i], d->journal_bytes[i]), "%s: past a journal",
                      what);
            memcpy(d->journal_copy[i], d->journal[i], d->journal_bytes[i]);
        }
}

/* One more token for each sequence gives what it gives after single steps. */
static void check_going_on(draft *d, const size_t *m, const char *what) {
    size_t last = d->p.tokens - 1, row = d->p.desc.n_heads * d->p.desc.dim_v;
    unsigned char *state = (unsigned char *)test_alloc(d->state_bytes);
    float *o = test_floats(d->p.output_count), *want = test_floats(d->p.output_count);
    for (size_t i = 0; i < d->n_seqs; i++) {
        if (d->padding[i]) continue;
        memcpy(state, d->after[i] + m[i] * d->state_bytes, d->state_bytes);
        draft_step(d, last, state, want);
        draft_step(d, last, d->state[i], o);
        CHECK_MSG(memcmp(state, d->state[i], d->state_bytes) == 0 &&
                      memcmp(o + last * row, want + last * row, row * sizeof(float)) == 0,
                  "%s: going on", what);
    }
    free(state), free(o), free(want);
}

/* After a verify: from the same states and journals, accepts m[i] tokens of each sequence. */
static void check_commit(draft *d, const size_t *m, kda_run run, const char *what) {
    int any = 0;
    for (size_t i = 0; i < d->n_seqs; i++) {
        if (d->padding[i]) continue;
        memcpy(d->state[i], d->after[i], d->state_bytes);
        memcpy(d->journal[i], d->journal_copy[i], d->journal_bytes[i]);
        any |= m[i] > 0;
    }
    kda_result result = draft_commit(d, m, run);
    CHECK_MSG(result == KDA_OK, "%s: commit: %s", what, kda_result_name(result));
    CHECK_MSG(draft_is_after(d, m), "%s: not the bits of single steps", what);
    for (size_t i = 0; i < d->n_seqs; i++)
        if (!d->padding[i])
            CHECK_MSG(m[i] > 0 ||
                          memcmp(d->journal[i], d->journal_copy[i], d->journal_bytes[i]) == 0,
                      "%s: commit(0) wrote a journal", what);
    if (any) { /* one that has been used up stops the whole batch, and nothing is written */
        result = draft_commit(d, m, run);
        CHECK_MSG(result == KDA_ERR_JOURNAL, "%s: twice: %s", what, kda_result_name(result));
        CHECK_MSG(draft_is_after(d, m), "%s: the second commit wrote", what);
    }
}

/* One sequence, every n up to most and every m. */
static void check_all_counts(const kda_desc *desc, size_t most, kda_run run, const char *what) {
    for (size_t n = 1; n <= most; n++) {
        draft d = draft_new(desc, &n, 1, 0);
        check_verify(&d, run, what);
        for (size_t m = 0; m <= n; m++) {
            check_commit(&d, &m, run, what);
            check_going_on(&d, &m, what);
        }
        draft_free(&d);
    }
}

/* Grouped query/key heads, K and V apart, V not of any tile. */
static kda_desc draft_desc(void) {
    kda_desc desc = problem_desc(6, 2, 5, 11);
    return desc;
}

static void every_count_gate_and_state_type(void) {
    test_seed(1);
    for (int gate = KDA_GATE_LOG_DECAY; gate <= KDA_GATE_BOUNDED; gate++)
        for (int type = KDA_F32; type <= KDA_F16; type++) {
            kda_desc desc = draft_desc();
            char what[64];
            desc.gate = (kda_gate)gate;
            desc.lower_bound = gate == KDA_GATE_BOUNDED ? -5.0f : 0.0f;
            desc.state_type = (kda_type)type;
            snprintf(what, sizeof what, "gate %d, state type %d", gate, type);
            check_all_counts(&desc, 8, run_with(NULL, 0), what);
        }
}

static void both_head_maps_and_raw_keys(void) {
    test_seed(2);
    for (int map = KDA_HEADS_GROUPED; map <= KDA_HEADS_TILED; map++) {
        kda_desc desc = draft_desc();
        desc.head_map = (kda_head_map)map;
        desc.flags = 0;
        desc.beta = KDA_BETA_LOGIT_DOUBLED;
        check_all_counts(&desc, 8, run_with(NULL, 0), map ? "tiled" : "grouped");
    }
}

/* Values wider than a tile of either kind, and than one register of lanes. */
static void wide_and_narrow_heads(void) {
    static const size_t dims[][2] = {{1, 1}, {1, 40}, {33, 1}, {40, 37}, {16, 64}};
    test_seed(3);
    for (size_t i = 0; i < sizeof dims / sizeof *dims; i++) {
        kda_desc desc = problem_desc(2, 0, dims[i][0], dims[i][1]);
        check_all_counts(&desc, 4, run_with(NULL, 0), "dimensions");
        check_all_counts(&desc, 4, run_with(real_threads, 3), "dimensions, threads");
    }
}

static void any_number_of_threads(void) {
    static const size_t threads[] = {1, 2, 3, 8};
    test_seed(4);
    for (int type = KDA_F32; type <= KDA_F16; type++)
        for (size_t t = 0; t < 4; t++) {
            static const size_t n[] = {3, 5};
            static const size_t accepted[][2] = {{2, 5}, {0, 1}, {3, 0}};
            kda_desc desc = problem_desc(2, 0, 7, 37); /* several tiles to a head */
            desc.state_type = (kda_type)type;
            draft d = draft_new(&desc, n, 2, 0);
            for (size_t hook = 0; hook < 2; hook++) {
                kda_run run = run_with(hook ? backwards : real_threads, threads[t]);
                char what[64];
                snprintf(what, sizeof what, "%zu threads, hook %zu, type %d", threads[t], hook,
                         type);
                for (size_t i = 0; i < 2; i++) memcpy(d.state[i], d.after[i], d.state_bytes);
                check_verify(&d, run, what);
                for (size_t a = 0; a < 3; a++) check_commit(&d, accepted[a], run, what);
            }
            draft_free(&d);
        }
}

/* Unequal drafts, one of none, and padding with rows of its own. */
static void batches(void) {
    static const size_t n[] = {3, 2, 0, 8, 1};
    static const size_t accepted[][5] = {
        {2, 2, 0, 8, 0}, {3, 1, 0, 5, 1}, {0, 0, 0, 0, 0}, {1, 9, 0, 0, 1}, {0, 2, 0, 7, 0}};
    test_seed(5);
    for (int type = KDA_F32; type <= KDA_F16; type++)
        for (size_t threads = 0; threads <= 3; threads += 3) {
            kda_desc desc = draft_desc();
            desc.state_type = (kda_type)type;
            draft d = draft_new(&desc, n, 5, 1u << PADDING);
            kda_run run = run_with(real_threads, threads);
            check_verify(&d, run, "batch");
            for (size_t a = 0; a < 5; a++) {
                check_commit(&d, accepted[a], run, "batch");
                check_going_on(&d, accepted[a], "batch");
            }
            draft_free(&d);
        }
}

/* Verified together, accepted one after another, in another order. */
static void sequences_can_be_committed_apart(void) {
    static const size_t n[] = {3, 5, 1, 8}, order[] = {2, 0, 3, 1};
    size_t m[MAX_SEQS] = {0};
    test_seed(13);
    kda_desc desc = draft_desc();
    draft d = draft_new(&desc, n, 4, 0);
    check_verify(&d, run_with(NULL, 0), "apart");
    for (size_t i = 0; i < 4; i++) {
        size_t which = order[i];
        kda_run run = run_with(NULL, 0);
        kda_seq seqs[MAX_SEQS];
        m[which] = n[which] - which / 2;
        draft_seqs(&d, m, seqs);
        give_scratch(&run, kda_scratch_bytes(&desc, 1, &run));
        CHECK(kda_commit(&desc, &seqs[which], 1, &run) == KDA_OK);
        CHECK(draft_is_after(&d, m));
        free(run.scratch);
    }
    draft_free(&d);
}

/* More than a block of tokens: the journal's rows must follow on. */
static void long_drafts(void) {
    static const size_t lengths[] = {20, 40};
    test_seed(6);
    for (size_t i = 0; i < 2; i++) {
        size_t n = lengths[i];
        kda_desc desc = problem_desc(2, 1, 5, 9);
        desc.state_type = i ? KDA_F16 : KDA_F32;
        draft d = draft_new(&desc, &n, 1, 0);
        check_verify(&d, run_with(NULL, 0), "long");
        for (size_t m = 0; m <= n; m++) check_commit(&d, &m, run_with(NULL, 0), "long");
        draft_free(&d);
    }
}

static void automatic_is_recurrent_however_long(void) {
    size_t n = 20, m = 20;
    test_seed(7);
    kda_desc desc = draft_desc();
    draft d = draft_new(&desc, &n, 1, 0);
    kda_run run = run_with(NULL, 0);
    run.algorithm = KDA_AUTO;
    check_verify(&d, run, "auto");
    check_commit(&d, &m, run, "auto");
    draft_free(&d);
}

/* commit(0) of a journal, then of more of it; a rejected draft leaves nothing behind. */
static void zero_accepted_leaves_the_journal_usable(void) {
    static const size_t zero = 0, two = 2;
    size_t n = 4;
    test_seed(8);
    kda_desc desc = draft_desc();
    draft d = draft_new(&desc, &n, 1, 0);
    kda_run run = run_with(NULL, 0);
    check_verify(&d, run, "zero");
    for (int times = 0; times < 3; times++) {
        CHECK(draft_commit(&d, &zero, run) == KDA_OK);
        CHECK(draft_is_after(&d, &zero));
        CHECK(memcmp(d.journal[0], d.journal_copy[0], d.journal_bytes[0]) == 0);
    }
    CHECK(draft_commit(&d, &two, run) == KDA_OK);
    CHECK(draft_is_after(&d, &two));
    CHECK(draft_commit(&d, &zero, run) == KDA_OK); /* nothing to use of one used up */
    CHECK(draft_is_after(&d, &two));
    draft_free(&d);
}

/* Drafts 5 tokens, rejects them, drafts others over the same journal: shorter, longer, after a
 * commit too. */
static void journals_can_be_written_again(void) {
    static const size_t longest = 8, lengths[] = {5, 3, 8, 1, 6};
    test_seed(9);
    kda_desc desc = draft_desc();
    draft d = draft_new(&desc, &longest, 1, 0);
    kda_run run = run_with(NULL, 0);
    size_t now = 0;
    for (size_t i = 0; i < 5; i++) {
        static const size_t accepted[] = {0, 2, 0, 1, 5};
        size_t row = desc.n_heads * desc.dim_v, offset = now, n = lengths[i];
        if (offset + n > longest) n = longest - offset;
        kda_seq seq;
        kda_args args = problem_args(&d.p, offset, d.o);
        memset(&seq, 0, sizeof seq);
        seq.n_tokens = n, seq.state = d.state[0], seq.journal = d.journal[0];
        args.seqs = &seq, args.n_seqs = 1;
        give_scratch(&run, kda_verify_scratch_bytes(&desc, 1, &run));
        CHECK(kda_verify(&desc, &args, &run) == KDA_OK);
        CHECK(memcmp(d.o + offset * row, d.want + offset * row, n * row * sizeof(float)) == 0);
        free(run.scratch);
        CHECK(draft_is_after(&d, &now));
        CHECK(draft_commit(&d, &accepted[i], run) == KDA_OK);
        now += accepted[i];
        CHECK(draft_is_after(&d, &now));
    }
    CHECK(now == longest);
    draft_free(&d);
}

static void output_over_the_values(void) {
    size_t n = 6, m = 4;
    test_seed(10);
    kda_desc desc = draft_desc();
    draft d = draft_new(&desc, &n, 1, 0);
    size_t bytes = n * desc.n_heads * desc.dim_v * sizeof(float);
    float *o = d.o;
    d.o = d.p.v;
    CHECK(draft_verify(&d, run_with(real_threads, 3)) == KDA_OK);
    CHECK(memcmp(d.p.v, d.want, bytes) == 0);
    CHECK(draft_commit(&d, &m, run_with(NULL, 0)) == KDA_OK);
    CHECK(draft_is_after(&d, &m));
    d.o = o;
    draft_free(&d);
}

/* A decay of 0 forgets; NaN in one draft stays in its sequence and head. */
static void extreme_values_too(void) {
    static const size_t n[] = {3, 3}, m[] = {2, 3};
    test_seed(11);
    kda_desc desc = problem_desc(2, 0, 5, 9);
    draft d = draft_new(&desc, n, 2, 0);
    for (size_t i = 0; i < 5; i++) d.p.g[(1 * 2 + 1) * 5 + i] = -INFINITY;
    d.p.v[(4 * 2 + 0) * 9 + 3] = NAN;
    for (size_t i = 0; i < 2; i++) free(d.after[i]), draft_solve(&d, i);
    for (size_t i = 0; i < 2; i++) memcpy(d.state[i], d.after[i], d.state_bytes);
    check_verify(&d, run_with(NULL, 0), "extremes");
    check_commit(&d, m, run_with(NULL, 0), "extremes");
    CHECK(kda_state_is_finite(&desc, d.state[0]) && !kda_state_is_finite(&desc, d.state[1]));
    draft_free(&d);
}

/* A prefix cache that saves in the middle of a speculation saves the state before the drafts. */
static void saving_while_a_speculation_is_pending(void) {
    size_t n = 5, m = 3;
    test_seed(12);
    kda_desc desc = draft_desc();
    draft d = draft_new(&desc, &n, 1, 0);
    size_t bytes = kda_save_bytes(&desc, 0);
    unsigned char *blob = (unsigned char *)test_alloc(bytes);
    unsigned char *state = (unsigned char *)test_alloc(d.state_bytes);
    kda_saved saved;
    memset(&saved, 0, sizeof saved);
    saved.state = d.state[0], saved.n_tokens = 100;
    check_verify(&d, run_with(NULL, 0), "pending");
    CHECK(kda_save(&desc, &saved, blob, bytes) == KDA_OK);
    CHECK(draft_commit(&d, &m, run_with(NULL, 0)) == KDA_OK); /* the save has disturbed nothing */
    CHECK(draft_is_after(&d, &m));
    memset(state, 0xFF, d.state_bytes);
    saved.state = state, saved.n_tokens = 0;
    CHECK(kda_load(&desc, &saved, blob, bytes) == KDA_OK);
    CHECK(saved.n_tokens == 100 && memcmp(state, d.after[0], d.state_bytes) == 0);
    free(blob), free(state);
    draft_free(&d);
}

/* ---- Drafts of a convolution ---- */

/* A batch of drafts for a convolution, and what single tokens make of each sequence. */
typedef struct conv_draft {
    kda_conv_desc desc;
    size_t n_seqs, tokens, window_bytes;
    size_t n[MAX_SEQS], first[MAX_SEQS];
    float *x, *weight, *want, *y;
    unsigned char *after[MAX_SEQS]; /* [n + 1][window_bytes] */
    float *window[MAX_SEQS];
    unsigned char *journal[MAX_SEQS], *journal_copy[MAX_SEQS];
    size_t journal_bytes[MAX_SEQS];
} conv_draft;

static kda_conv_args conv_args(const conv_draft *d, size_t first, const float *x, float *y) {
    kda_conv_args args;
    ptrdiff_t row = (ptrdiff_t)d->desc.channels, at = (ptrdiff_t)first * row;
    memset(&args, 0, sizeof args);
    args.x = kda_in_f32(x + at, row, 0);
    args.y = kda_out_f32(y + at, row, 0);
    args.weight = d->weight;
    return args;
}

static void conv_step(const conv_draft *d, size_t token, float *window, float *y) {
    kda_conv_args args = conv_args(d, token, d->x, y);
    kda_run run = run_with(NULL, 0);
    kda_seq seq;
    memset(&seq, 0, sizeof seq);
    seq.n_tokens = 1, seq.window = window;
    args.seqs = &seq, args.n_seqs = 1;
    give_scratch(&run, kda_conv_scratch_bytes(&d->desc, 1, &run));
    CHECK(kda_conv(&d->desc, &args, &run) == KDA_OK);
    free(run.scratch);
}

static void conv_solve(conv_draft *d, size_t seq) {
    size_t bytes = d->window_bytes, floats = bytes / sizeof(float);
    float *window = d->window[seq];
    d->after[seq] = (unsigned char *)test_alloc((d->n[seq] + 1) * bytes);
    test_fill_normal(window, floats);
    memcpy(d->after[seq], window, bytes);
    for (size_t t = 0; t < d->n[seq]; t++) {
        conv_step(d, d->first[seq] + t, window, d->want);
        memcpy(d->after[seq] + (t + 1) * bytes, window, bytes);
    }
    memcpy(window, d->after[seq], bytes);
}

static conv_draft conv_draft_new(size_t channels, size_t width, const size_t *n, size_t n_seqs,
                                 unsigned padding) {
    conv_draft d;
    memset(&d, 0, sizeof d);
    d.desc.channels = channels, d.desc.width = width, d.desc.activation = KDA_ACTIVATION_SILU;
    d.n_seqs = n_seqs;
    d.window_bytes = (width - 1) * channels * sizeof(float);
    for (size_t i = 0; i < n_seqs; i++) d.n[i] = n[i], d.first[i] = d.tokens, d.tokens += n[i];
    d.x = problem_normal(d.tokens * channels);
    d.weight = problem_normal(channels * width);
    d.want = test_floats(d.tokens * channels);
    d.y = test_floats(d.tokens * channels);
    for (size_t i = 0; i < d.tokens * channels; i++) d.want[i] = -77.0f;
    for (size_t i = 0; i < n_seqs; i++) {
        if (padding >> i & 1u) continue;
        d.window[i] = test_floats((width - 1) * channels);
        conv_solve(&d, i);
        d.journal_bytes[i] = kda_conv_journal_bytes(&d.desc, n[i]);
        d.journal[i] = guarded_new(d.journal_bytes[i]);
        d.journal_copy[i] = guarded_new(d.journal_bytes[i]);
    }
    return d;
}

static void conv_draft_free(conv_draft *d) {
    for (size_t i = 0; i < d->n_seqs; i++)
        free(d->after[i]), free(d->window[i]), free(d->journal[i]), free(d->journal_copy[i]);
    free(d->x), free(d->weight), free(d->want), free(d->y);
}

static void conv_seqs(const conv_draft *d, const size_t *n, kda_seq *seqs) {
    memset(seqs, 0, MAX_SEQS * sizeof *seqs);
    for (size_t i = 0; i < d->n_seqs; i++) {
        seqs[i].n_tokens = n[i];
        seqs[i].window = d->window[i];
        seqs[i].journal = d->journal[i];
    }
}

static kda_result conv_verify(conv_draft *d, int in_place, kda_run run) {
    kda_seq seqs[MAX_SEQS];
    size_t count = d->tokens * d->desc.channels;
    for (size_t i = 0; i < count; i++) d->y[i] = in_place ? d->x[i] : -77.0f;
    kda_conv_args args = conv_args(d, 0, in_place ? d->y : d->x, d->y);
    conv_seqs(d, d->n, seqs);
    args.seqs = seqs, args.n_seqs = d->n_seqs;
    give_scratch(&run, kda_conv_scratch_bytes(&d->desc, d->n_seqs, &run));
    kda_result result = kda_conv_verify(&d->desc, &args, &run);
    free(run.scratch);
    return result;
}

static kda_result conv_commit(conv_draft *d, const size_t *m, kda_run run) {
    kda_seq seqs[MAX_SEQS];
    conv_seqs(d, m, seqs);
    give_scratch(&run, kda_conv_scratch_bytes(&d->desc, d->n_seqs, &run));
    kda_result result = kda_conv_commit(&d->desc, seqs, d->n_seqs, &run);
    free(run.scratch);
    return result;
}

static int conv_is_after(const conv_draft *d, const size_t *m) {
    for (size_t i = 0; i < d->n_seqs; i++)
        if (d->window[i] &&
            memcmp(d->window[i], d->after[i] + m[i] * d->window_bytes, d->window_bytes) != 0)
            return 0;
    return 1;
}

static void check_conv_verify(conv_draft *d, int in_place, kda_run run, const char *what) {
    static const size_t none[MAX_SEQS] = {0};
    kda_result result = conv_verify(d, in_place, run);
    CHECK_MSG(result == KDA_OK, "%s: %s", what, kda_result_name(result));
    CHECK_MSG(conv_is_after(d, none), "%s: verify wrote a window", what);
    for (size_t i = 0; i < d->n_seqs; i++) {
        size_t row = d->desc.channels, at = d->first[i] * row, count = d->n[i] * row;
        const float *want = d->window[i] || !in_place ? d->want : d->x; /* padding stays */
        CHECK_MSG(memcmp(d->y + at, want + at, count * sizeof(float)) == 0, "%s: output", what);
        if (!d->window[i]) continue;
        CHECK_MSG(guard_is_whole(d->journal[i], d->journal_bytes[i]), "%s: past a journal", what);
        memcpy(d->journal_copy[i], d->journal[i], d->journal_bytes[i]);
    }
}

static void check_conv_commit(conv_draft *d, const size_t *m, kda_run run, const char *what) {
    int any = 0;
    for (size_t i = 0; i < d->n_seqs; i++) {
        if (!d->window[i]) continue;
        memcpy(d->window[i], d->after[i], d->window_bytes);
        memcpy(d->journal[i], d->journal_copy[i], d->journal_bytes[i]);
        any |= m[i] > 0;
    }
    kda_result result = conv_commit(d, m, run);
    CHECK_MSG(result == KDA_OK, "%s: commit: %s", what, kda_result_name(result));
    CHECK_MSG(conv_is_after(d, m), "%s: not the window of single steps", what);
    for (size_t i = 0; i < d->n_seqs; i++)
        if (d->window[i] && m[i] == 0)
            CHECK_MSG(memcmp(d->journal[i], d->journal_copy[i], d->journal_bytes[i]) == 0,
                      "%s: commit(0) wrote a journal", what);
    if (any) {
        CHECK_MSG(conv_commit(d, m, run) == KDA_ERR_JOURNAL, "%s: committed twice", what);
        CHECK_MSG(conv_is_after(d, m), "%s: the second commit wrote", what);
    }
}

/* Drafts shorter than the history, as long as it, longer; channels in one block and in two. */
static void convolution_every_count_and_width(void) {
    static const size_t widths[] = {1, 2, 3, 4, 7}, channels[] = {5, 131};
    test_seed(20);
    for (size_t w = 0; w < 5; w++)
        for (size_t n = 1; n <= 8; n++)
            for (size_t c = 0; c < 2; c++) {
                char what[64];
                snprintf(what, sizeof what, "width %zu, n %zu", widths[w], n);
                conv_draft d = conv_draft_new(channels[c], widths[w], &n, 1, 0);
                for (int in_place = 0; in_place <= 1; in_place++) {
                    memcpy(d.window[0], d.after[0], d.window_bytes);
                    check_conv_verify(&d, in_place, run_with(NULL, 0), what);
                    for (size_t m = 0; m <= n; m++)
                        check_conv_commit(&d, &m, run_with(NULL, 0), what);
                }
                conv_draft_free(&d);
            }
}

static void convolution_batches_and_threads(void) {
    static const size_t n[] = {3, 2, 0, 8, 1}, threads[] = {0, 1, 2, 3, 8};
    static const size_t accepted[][5] = {
        {2, 2, 0, 8, 0}, {3, 1, 0, 5, 1}, {0, 0, 0, 0, 0}, {1, 9, 0, 0, 1}};
    test_seed(21);
    for (size_t width = 1; width <= 4; width++)
        for (size_t t = 0; t < 5; t++) {
            kda_run run = run_with(t == 3 ? backwards : real_threads, threads[t]);
            conv_draft d = conv_draft_new(300, width, n, 5, 1u << PADDING);
            check_conv_verify(&d, (int)(t % 2), run, "convolution batch");
            for (size_t a = 0; a < 4; a++)
                check_conv_commit(&d, accepted[a], run, "convolution batch");
            conv_draft_free(&d);
        }
}

/* Journals of one pool, each of just the bytes that its own tokens take. */
static void journals_side_by_side(void) {
    static const size_t n[] = {3, 0, 0, 5, 1};
    test_seed(14);
    kda_desc desc = draft_desc();
    draft d = draft_new(&desc, n, 5, 0);
    conv_draft c = conv_draft_new(5, 4, n, 5, 0);
    unsigned char *pool = (unsigned char *)test_alloc(1 << 15), *at = pool;
    unsigned char *of_state[5], *of_window[5];
    for (size_t i = 0; i < 5; i++) {
        of_state[i] = d.journal[i], of_window[i] = c.journal[i];
        d.journal[i] = at, at += d.journal_bytes[i];
    }
    for (size_t i = 0; i < 5; i++) c.journal[i] = at, at += c.journal_bytes[i];
    CHECK(draft_verify(&d, run_with(real_threads, 2)) == KDA_OK);
    CHECK(conv_verify(&c, 0, run_with(real_threads, 2)) == KDA_OK);
    CHECK(draft_commit(&d, n, run_with(NULL, 0)) == KDA_OK);
    CHECK(conv_commit(&c, n, run_with(NULL, 0)) == KDA_OK);
    CHECK(draft_is_after(&d, n) && conv_is_after(&c, n));
    for (size_t i = 0; i < 5; i++) d.journal[i] = of_state[i], c.journal[i] = of_window[i];
    free(pool);
    draft_free(&d);
    conv_draft_free(&c);
}

/* ---- Misuse ---- */

/* A batch of two with a verified journal each, for an operator and for a convolution. Everything
 * that a call may write is one block, compared before and after. */
enum { SPOIL_TOKENS = 3, SPOIL_CHANNELS = 6, SPOIL_WIDTH = 3 };

typedef struct spoiled {
    kda_desc desc;
    kda_conv_desc conv;
    problem p;
    kda_args args;
    kda_conv_args conv_args;
    kda_run run;
    kda_seq seqs[2]; /* state and journal */
    kda_seq conv_seqs[2];
    unsigned char *written;
    size_t written_bytes, journal_bytes, conv_journal_bytes;
} spoiled;

static unsigned char *cut(unsigned char **at, size_t bytes) {
    unsigned char *piece = *at;
    *at += bytes + 64; /* room to move a pointer within the block */
    return piece;
}

static void spoiled_views(spoiled *s, unsigned char *at) {
    size_t window = kda_conv_window_bytes(&s->conv);
    s->args = problem_args(&s->p, 0, (float *)(void *)cut(&at, s->p.output_count * sizeof(float)));
    s->conv_args.x = kda_in_f32(s->p.q, SPOIL_CHANNELS, 0);
    s->conv_args.y =
        kda_out_f32((float *)(void *)cut(&at, 2 * SPOIL_TOKENS * SPOIL_CHANNELS * sizeof(float)),
                    SPOIL_CHANNELS, 0);
    s->conv_args.weight = s->p.v;
    for (size_t i = 0; i < 2; i++) {
        s->seqs[i].n_tokens = s->conv_seqs[i].n_tokens = SPOIL_TOKENS;
        s->seqs[i].state = cut(&at, s->p.state_count * sizeof(float));
        s->conv_seqs[i].window = cut(&at, window);
        s->seqs[i].journal = cut(&at, s->journal_bytes);
        s->conv_seqs[i].journal = cut(&at, s->conv_journal_bytes);
        memcpy(s->seqs[i].state, s->p.start, s->p.state_count * sizeof(float));
    }
    s->args.seqs = s->seqs, s->conv_args.seqs = s->conv_seqs;
    s->args.n_seqs = s->conv_args.n_seqs = 2;
}

static void spoiled_init(spoiled *s) {
    memset(s, 0, sizeof *s);
    test_seed(30);
    s->desc = problem_desc(2, 0, 4, 6);
    s->conv.channels = SPOIL_CHANNELS, s->conv.width = SPOIL_WIDTH;
    s->conv.activation = KDA_ACTIVATION_SILU;
    s->p = problem_new(&s->desc, 2 * SPOIL_TOKENS);
    s->journal_bytes = kda_journal_bytes(&s->desc, SPOIL_TOKENS);
    s->conv_journal_bytes = kda_conv_journal_bytes(&s->conv, SPOIL_TOKENS);
    s->written_bytes = 1 << 14;
    s->written = (unsigned char *)test_alloc(s->written_bytes);
    spoiled_views(s, s->written);
    s->run.scratch_bytes = 1 << 16;
    s->run.scratch = test_scratch(s->run.scratch_bytes);
    CHECK(kda_verify(&s->desc, &s->args, &s->run) == KDA_OK);
    CHECK(kda_conv_verify(&s->conv, &s->conv_args, &s->run) == KDA_OK);
}

static void spoiled_free(spoiled *s) {
    free(s->run.scratch), free(s->written);
    problem_free(&s->p);
}

enum { VERIFY, COMMIT, CONV_VERIFY, CONV_COMMIT };

static kda_result spoiled_call(const spoiled *s, int which) {
    if (which == VERIFY) return kda_verify(&s->desc, &s->args, &s->run);
    if (which == COMMIT) return kda_commit(&s->desc, s->seqs, s->args.n_seqs, &s->run);
    if (which == CONV_VERIFY) return kda_conv_verify(&s->conv, &s->conv_args, &s->run);
    return kda_conv_commit(&s->conv, s->conv_seqs, s->conv_args.n_seqs, &s->run);
}

static void spoiled_expect(spoiled *s, int which, kda_result want, const char *what) {
    unsigned char *before = (unsigned char *)test_alloc(s->written_bytes);
    memcpy(before, s->written, s->written_bytes);
    kda_result got = spoiled_call(s, which);
    CHECK_MSG(got == want, "%s: %s, want %s", what, kda_result_name(got), kda_result_name(want));
    CHECK_MSG(memcmp(before, s->written, s->written_bytes) == 0, "%s: wrote", what);
    free(before);
}

/* Spoils one thing of fresh valid calls and expects the result. */
#define SPOIL(which, statement, want)                                                              \
    do {                                                                                           \
        spoiled s;                                                                                 \
        spoiled_init(&s);                                                                          \
        statement;                                                                                 \
        spoiled_expect(&s, which, want, #which ": " #statement);                                   \
        spoiled_free(&s);                                                                          \
    } while (0)

static void *moved(void *pointer, size_t bytes) {
    return (unsigned char *)pointer + bytes;
}

static void the_unspoiled_calls_are_valid(void) {
    spoiled s;
    spoiled_init(&s);
    for (int which = VERIFY; which <= CONV_COMMIT; which++)
        CHECK(spoiled_call(&s, which) == KDA_OK);
    spoiled_free(&s);
}

/* States that can be addressed, of so many heads that a journal for one token cannot; nothing to do
 * for any. */
static void widen(spoiled *s) {
    s->desc.n_heads = SIZE_MAX / 16 + 1, s->desc.n_qk_heads = 0;
    s->desc.dim_k = s->desc.dim_v = 1;
    for (size_t i = 0; i < 2; i++) s->seqs[i].n_tokens = 0, s->seqs[i].state = NULL;
}

static void verify_misused(void) {
    SPOIL(VERIFY, s.seqs[1].journal = NULL, KDA_ERR_NULL);
    SPOIL(VERIFY, s.seqs[0].journal = moved(s.seqs[0].journal, 1), KDA_ERR_ALIGN);
    SPOIL(VERIFY, s.seqs[0].journal = moved(s.seqs[0].journal, 2), KDA_ERR_ALIGN);
    SPOIL(VERIFY, s.seqs[1].journal = s.seqs[0].journal, KDA_ERR_ALIAS);
    SPOIL(VERIFY, s.seqs[1].state = s.seqs[0].state, KDA_ERR_ALIAS);
    SPOIL(VERIFY, s.run.algorithm = KDA_CHUNKED, KDA_ERR_ALGORITHM);
    SPOIL(VERIFY, s.run.algorithm = (kda_algorithm)9, KDA_ERR_ALGORITHM);
    SPOIL(VERIFY, s.run.scratch_bytes = kda_verify_scratch_bytes(&s.desc, 2, NULL) - 1,
          KDA_ERR_SCRATCH);
    SPOIL(VERIFY, s.run.scratch = (free(s.run.scratch), NULL), KDA_ERR_SCRATCH);
    SPOIL(VERIFY, s.run.parallel_for = backwards, KDA_ERR_THREADS);
    SPOIL(VERIFY, s.args.o.data = NULL, KDA_ERR_NULL);
    SPOIL(VERIFY, widen(&s), KDA_ERR_SIZE);
}

static void fill(void *memory, int byte, size_t bytes) {
    memset(memory, byte, bytes);
}

/* Any journal but the one that a verify of this description wrote. */
static void commit_of_a_wrong_journal(void) {
    SPOIL(COMMIT, s.seqs[1].journal = NULL, KDA_ERR_NULL);
    SPOIL(COMMIT, fill(s.seqs[1].journal, 0, s.journal_bytes), KDA_ERR_JOURNAL);
    SPOIL(COMMIT, fill(s.seqs[1].journal, 0xA7, s.journal_bytes), KDA_ERR_JOURNAL);
    SPOIL(COMMIT, s.seqs[1].journal = s.conv_seqs[1].journal, KDA_ERR_JOURNAL);
    SPOIL(COMMIT, (s.desc.dim_k = 6, s.desc.dim_v = 4), KDA_ERR_JOURNAL); /* a state as large */
    SPOIL(COMMIT, (s.desc.dim_k = 3), KDA_ERR_JOURNAL);
    SPOIL(COMMIT, (s.desc.dim_v = 5), KDA_ERR_JOURNAL);
    SPOIL(COMMIT, (s.desc.n_heads = 1), KDA_ERR_JOURNAL);
    SPOIL(COMMIT, s.seqs[0].n_tokens = SPOIL_TOKENS + 1, KDA_ERR_COUNT);
    SPOIL(COMMIT, s.seqs[1].n_tokens = SIZE_MAX / 4, KDA_ERR_COUNT);
}

static void commit_misused(void) {
    SPOIL(COMMIT, s.seqs[1].state = s.seqs[0].state, KDA_ERR_ALIAS);
    SPOIL(COMMIT, s.seqs[1].state = moved(s.seqs[1].state, 2), KDA_ERR_ALIGN);
    SPOIL(COMMIT, s.run.scratch_bytes = kda_scratch_bytes(&s.desc, 2, NULL) - 1, KDA_ERR_SCRATCH);
    SPOIL(COMMIT, s.run.scratch = (free(s.run.scratch), NULL), KDA_ERR_SCRATCH);
    SPOIL(COMMIT, (s.run.parallel_for = backwards, s.run.n_threads = SIZE_MAX / 2), KDA_ERR_SIZE);
    SPOIL(COMMIT, s.seqs[0].n_tokens = s.seqs[1].n_tokens = SIZE_MAX / 2, KDA_ERR_SIZE);
    SPOIL(COMMIT, s.desc.dim_k = 0, KDA_ERR_DIMS);
    spoiled s;
    spoiled_init(&s);
    CHECK(kda_commit(&s.desc, NULL, 2, &s.run) == KDA_ERR_NULL);
    CHECK(kda_commit(NULL, s.seqs, 2, &s.run) == KDA_ERR_NULL);
    CHECK(kda_commit(&s.desc, s.seqs, 2, NULL) == KDA_ERR_NULL);
    CHECK(kda_commit(&s.desc, NULL, 0, &s.run) == KDA_OK);
    spoiled_free(&s);
}

/* Two states moved on by one journal: one of them was not what the journal was written for. */
static void commit_of_one_journal_by_two_sequences(void) {
    SPOIL(COMMIT, s.seqs[1].journal = s.seqs[0].journal, KDA_ERR_ALIAS);
    SPOIL(CONV_COMMIT, s.conv_seqs[1].journal = s.conv_seqs[0].journal, KDA_ERR_ALIAS);
}

/* A journal copied to where its floats are not aligned. */
static void commit_of_a_misaligned_journal(void) {
    SPOIL(COMMIT,
          s.seqs[0].journal =
              memmove(moved(s.seqs[0].journal, 1), s.seqs[0].journal, s.journal_bytes),
          KDA_ERR_ALIGN);
    SPOIL(CONV_COMMIT,
          s.conv_seqs[0].journal = memmove(moved(s.conv_seqs[0].journal, 2), s.conv_seqs[0].journal,
                                           s.conv_journal_bytes),
          KDA_ERR_ALIGN);
}

/* The second begins inside the first: not at the same place, but in the same memory. */
static void journals_that_overlap(void) {
    SPOIL(VERIFY, s.seqs[1].journal = moved(s.seqs[0].journal, s.journal_bytes - 4), KDA_ERR_ALIAS);
    SPOIL(VERIFY, s.seqs[0].journal = moved(s.seqs[1].journal, s.journal_bytes - 4), KDA_ERR_ALIAS);
    SPOIL(CONV_VERIFY,
          s.conv_seqs[1].journal = moved(s.conv_seqs[0].journal, s.conv_journal_bytes - 4),
          KDA_ERR_ALIAS);
}

/* The state of the verify was float32: the same bytes are no float16 state. */
static void commit_to_a_state_of_another_type(void) {
    SPOIL(COMMIT, s.desc.state_type = KDA_F16, KDA_ERR_JOURNAL);
}

static void convolution_misused(void) {
    SPOIL(CONV_VERIFY, s.conv_seqs[1].journal = NULL, KDA_ERR_NULL);
    SPOIL(CONV_VERIFY, s.conv_seqs[0].journal = moved(s.conv_seqs[0].journal, 1), KDA_ERR_ALIGN);
    SPOIL(CONV_VERIFY, s.conv_seqs[1].journal = s.conv_seqs[0].journal, KDA_ERR_ALIAS);
    SPOIL(CONV_VERIFY, s.conv_seqs[1].window = s.conv_seqs[0].window, KDA_ERR_ALIAS);
    SPOIL(CONV_VERIFY, s.run.scratch_bytes = kda_conv_scratch_bytes(&s.conv, 2, NULL) - 1,
          KDA_ERR_SCRATCH);
    SPOIL(CONV_VERIFY, s.conv_args.y.token_stride = SPOIL_CHANNELS - 1, KDA_ERR_STRIDE);
    SPOIL(CONV_COMMIT, s.conv_seqs[1].journal = NULL, KDA_ERR_NULL);
    SPOIL(CONV_COMMIT, fill(s.conv_seqs[1].journal, 0, s.conv_journal_bytes), KDA_ERR_JOURNAL);
    SPOIL(CONV_COMMIT, fill(s.conv_seqs[1].journal, 0xA7, s.conv_journal_bytes), KDA_ERR_JOURNAL);
    SPOIL(CONV_COMMIT, s.conv_seqs[1].journal = s.seqs[1].journal, KDA_ERR_JOURNAL);
    SPOIL(CONV_COMMIT, (s.conv.channels = 4, s.conv.width = 4), KDA_ERR_JOURNAL); /* as large */
    SPOIL(CONV_COMMIT, s.conv.width = 2, KDA_ERR_JOURNAL);
    SPOIL(CONV_COMMIT, s.conv.channels = 5, KDA_ERR_JOURNAL);
    SPOIL(CONV_COMMIT, s.conv_seqs[0].n_tokens = SPOIL_TOKENS + 1, KDA_ERR_COUNT);
    SPOIL(CONV_COMMIT, s.conv_seqs[1].window = s.conv_seqs[0].window, KDA_ERR_ALIAS);
    SPOIL(CONV_COMMIT, s.run.scratch_bytes = kda_conv_scratch_bytes(&s.conv, 2, NULL) - 1,
          KDA_ERR_SCRATCH);
    SPOIL(CONV_COMMIT, s.conv_seqs[0].n_tokens = s.conv_seqs[1].n_tokens = SIZE_MAX / 2,
          KDA_ERR_SIZE);
    spoiled s;
    spoiled_init(&s);
    CHECK(kda_conv_commit(&s.conv, NULL, 2, &s.run) == KDA_ERR_NULL);
    CHECK(kda_conv_commit(NULL, s.conv_seqs, 2, &s.run) == KDA_ERR_NULL);
    CHECK(kda_conv_commit(&s.conv, s.conv_seqs, 2, NULL) == KDA_ERR_NULL);
    CHECK(kda_conv_commit(&s.conv, NULL, 0, &s.run) == KDA_OK);
    spoiled_free(&s);
}

/* ---- Sizes ---- */

/* Per token and head: a decay and a key of dim_k each and a correction of dim_v, in float32. */
static void journals_are_as_small_as_promised(void) {
    kda_desc desc = problem_desc(3, 0, 128, 128);
    size_t state = kda_state_bytes(&desc) / 3;
    CHECK(state == 64 * 1024);
    for (size_t n = 1; n <= 40; n++) {
        size_t bytes = kda_journal_bytes(&desc, n) - kda_journal_bytes(&desc, 0);
        CHECK(bytes == n * 3 * 1536);
    }
    CHECK(kda_journal_bytes(&desc, 0) < 128);
    desc = problem_desc(6, 2, 5, 11); /* decays are the value heads' own, so keys are kept there */
    desc.state_type = KDA_F16;
    CHECK(kda_journal_bytes(&desc, 7) - kda_journal_bytes(&desc, 0) == 7 * 6 * (2 * 5 + 11) * 4);
    kda_conv_desc conv;
    memset(&conv, 0, sizeof conv);
    conv.channels = 13, conv.width = 4, conv.activation = KDA_ACTIVATION_NONE;
    CHECK(kda_conv_journal_bytes(&conv, 7) - kda_conv_journal_bytes(&conv, 0) == 7 * 13 * 4);
}

static void journal_sizes_of_the_impossible_are_zero(void) {
    kda_desc desc = problem_desc(3, 0, 128, 128), zero;
    kda_conv_desc conv;
    memset(&zero, 0, sizeof zero), memset(&conv, 0, sizeof conv);
    CHECK(kda_journal_bytes(&zero, 1) == 0 && kda_journal_bytes(NULL, 1) == 0);
    CHECK(kda_conv_journal_bytes(&conv, 1) == 0 && kda_conv_journal_bytes(NULL, 1) == 0);
    conv.channels = 8, conv.width = 4, conv.activation = KDA_ACTIVATION_SILU;
    size_t most = (size_t)PTRDIFF_MAX;
    CHECK(kda_journal_bytes(&desc, SIZE_MAX) == 0 && kda_journal_bytes(&desc, SIZE_MAX / 2) == 0);
    CHECK(kda_journal_bytes(&desc, most / (3 * 1536) + 1) == 0);
    CHECK(kda_journal_bytes(&desc, most / (3 * 1536) - 1) > 0);
    CHECK(kda_journal_bytes(&desc, SIZE_MAX / (3 * 1536) + 2) == 0); /* wraps to a small number */
    CHECK(kda_conv_journal_bytes(&conv, SIZE_MAX / 32 + 2) == 0);
    CHECK(kda_conv_journal_bytes(&conv, most / 32 + 1) == 0);
    CHECK(kda_verify_scratch_bytes(&zero, 1, NULL) == 0);
    CHECK(kda_verify_scratch_bytes(&desc, SIZE_MAX / 2, NULL) == 0);
}

int main(void) {
    TEST(every_count_gate_and_state_type);
    TEST(both_head_maps_and_raw_keys);
    TEST(wide_and_narrow_heads);
    TEST(any_number_of_threads);
    TEST(batches);
    TEST(sequences_can_be_committed_apart);
    TEST(long_drafts);
    TEST(automatic_is_recurrent_however_long);
    TEST(zero_accepted_leaves_the_journal_usable);
    TEST(journals_can_be_written_again);
    TEST(output_over_the_values);
    TEST(extreme_values_too);
    TEST(saving_while_a_speculation_is_pending);
    TEST(convolution_every_count_and_width);
    TEST(convolution_batches_and_threads);
    TEST(journals_side_by_side);
    TEST(the_unspoiled_calls_are_valid);
    TEST(verify_misused);
    TEST(commit_of_a_wrong_journal);
    TEST(commit_misused);
    TEST(commit_of_one_journal_by_two_sequences);
    TEST(commit_of_a_misaligned_journal);
    TEST(journals_that_overlap);
    TEST(commit_to_a_state_of_another_type);
    TEST(convolution_misused);
    TEST(journals_are_as_small_as_promised);
    TEST(journal_sizes_of_the_impossible_are_zero);
    return test_summary();
}
