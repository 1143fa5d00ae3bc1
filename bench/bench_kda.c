/* bench_kda.c - how fast kda.h is here, against what this machine allows, with the error beside it.
 *
 *     bench_kda [--quick] [--csv FILE] [--isa NAME] [--threads N] [--only SUBSTRING]
 *
 * 32 heads of 128 x 128, as Kimi Linear 48B has them. See README.md for how to read the rows.
 */
#include "bench.h"

#define KDA_IMPLEMENTATION
#include "../kda.h"

#include "../tests/reference.h"

enum {
    HEADS = 32,
    DIM = 128,         /* key and value channels of a head */
    ROW = HEADS * DIM, /* of q, k, v, gate, output */
    STATE = HEADS * DIM * DIM,
    CHECKED_HEADS = 2, /* the first and the last are compared with float64 */
    DECODE_CHECK = 16, /* tokens that the check of a single step takes */
    TRUTH = 512,       /* tokens at most whose outputs are compared with float64 */
    LAYER_CHECK = 64   /* the same for a layer */
};

static const size_t checked_head[CHECKED_HEADS] = {0, HEADS - 1};

/* The operator in float64 on the bench's inputs: outputs of all tokens so far, and the state after
 * each count of tokens that was asked for. */
typedef struct truth {
    size_t done;
    double *state; /* [CHECKED_HEADS][DIM][DIM], key channel first */
    double *o;     /* [tokens][CHECKED_HEADS][DIM] */
} truth;

typedef struct suite {
    bench *b;
    size_t capacity;             /* tokens of the inputs */
    float *q, *k, *v, *g, *beta; /* rows of tokens; g a log-decay, beta a logit */
    float *o;
    float *start; /* a state whose numbers f16 holds exactly */
    truth want;
} suite;

typedef struct group {
    bench_group is;
    size_t layers, batch, tokens;
    kda_type type; /* of the state (decode) or of the rows (layer) */
} group;

static kda_desc operator_desc(kda_type state_type) {
    kda_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.n_heads = HEADS;
    desc.dim_k = desc.dim_v = DIM;
    desc.gate = KDA_GATE_LOG_DECAY;
    desc.beta = KDA_BETA_LOGIT;
    desc.flags = KDA_L2_NORM_QK;
    desc.state_type = state_type;
    return desc;
}

static void must(kda_result result) {
    if (result != KDA_OK) bench_die(kda_result_text(result));
}

/* A run of that many threads of the bench's pool; scratch is for the caller to add. */
static kda_run run_with(suite *s, kda_isa isa, size_t threads, kda_algorithm algorithm) {
    kda_run run;
    memset(&run, 0, sizeof run);
    run.algorithm = algorithm;
    run.isa = isa;
    run.parallel_for = bench_parallel_for;
    run.user = &s->b->pool;
    run.n_threads = threads;
    return run;
}

static void run_take_scratch(kda_run *run, size_t bytes) {
    if (bytes == 0) bench_die("no scratch size");
    run->scratch_bytes = bytes;
    run->scratch = bench_alloc(bytes);
}

static bench_limit limit_of(suite *s, kda_isa isa, size_t threads, void *data, size_t bytes) {
    bench_limit limit;
    memset(&limit, 0, sizeof limit);
    limit.pool = &s->b->pool;
    limit.kernels = bench_kernels_of(kda_isa_name(isa));
    limit.threads = threads;
    limit.data = (unsigned char *)data;
    limit.bytes = bytes;
    return limit;
}

/* ==== Inputs and the truth ===================================================================== */

/* Inputs for at least that many tokens. More tokens begin with the same numbers. */
static void inputs_need(suite *s, size_t tokens) {
    if (tokens <= s->capacity) return;
    size_t n = tokens * ROW;
    free(s->q), free(s->k), free(s->v), free(s->g), free(s->beta), free(s->o);
    s->capacity = tokens;
    s->q = bench_floats(n), s->k = bench_floats(n), s->v = bench_floats(n);
    s->g = bench_floats(n), s->beta = bench_floats(tokens * HEADS), s->o = bench_floats(n);
    bench_fill(s->q, n, 1, -1.7f, 1.7f);
    bench_fill(s->k, n, 2, -1.7f, 1.7f);
    bench_fill(s->v, n, 3, -1.7f, 1.7f);
    bench_fill(s->g, n, 4, -6.9f, 2.0f); /* decays from 0.999 a token to 0.0006 */
    bench_fill(s->beta, tokens * HEADS, 5, -2, 2);
    for (size_t i = 0; i < n; i++) s->g[i] = -expf(s->g[i]);
    if (s->start) return;
    s->start = bench_floats(STATE);
    bench_fill(s->start, STATE, 6, -0.5f, 0.5f);
    for (size_t i = 0; i < STATE; i++) s->start[i] = kda_from_f16(kda_to_f16(s->start[i]));
}

/* The views of the inputs from token `first` on. */
static kda_args inputs_args(const suite *s, size_t first) {
    kda_args args;
    size_t at = first * ROW;
    memset(&args, 0, sizeof args);
    args.q = kda_in_f32(s->q + at, ROW, DIM);
    args.k = kda_in_f32(s->k + at, ROW, DIM);
    args.v = kda_in_f32(s->v + at, ROW, DIM);
    args.g = kda_in_f32(s->g + at, ROW, DIM);
    args.beta = kda_in_f32(s->beta + first * HEADS, HEADS, 1);
    args.o = kda_out_f32(s->o + at, ROW, DIM);
    return args;
}

/* n states that begin as the start state does. */
static void *states_new(const suite *s, kda_type type, size_t n) {
    size_t bytes = STATE * (type == KDA_F32 ? 4 : 2);
    unsigned char *states = (unsigned char *)bench_alloc(n * bytes);
    uint16_t *f16 = (uint16_t *)(void *)states;
    if (type == KDA_F32) memcpy(states, s->start, bytes);
    for (size_t i = 0; type == KDA_F16 && i < STATE; i++) f16[i] = kda_to_f16(s->start[i]);
    for (size_t i = 1; i < n; i++) memcpy(states + i * bytes, states, bytes);
    return states;
}

/* One token of one head in float64: q and k normalised, q scaled. */
static void truth_token(double *q, double *k, const double *v, const double *g, double beta_logit,
                        double *state, double *o) {
    reference_l2_norm(DIM, 1e-6, q);
    reference_l2_norm(DIM, 1e-6, k);
    for (size_t i = 0; i < DIM; i++) q[i] /= sqrt((double)DIM);
    reference_step(DIM, DIM, q, k, v, g, reference_sigmoid(beta_logit), state, o);
}

/* float64 outputs of the first `tokens` tokens at least; the state is that after exactly as many. */
static const truth *truth_need(suite *s, size_t tokens) {
    truth *t = &s->want;
    double row[4][DIM];
    size_t all = CHECKED_HEADS * DIM;
    if (t->o && t->done == tokens) return t;
    if (!t->o || t->done > tokens) {
        free(t->state), free(t->o);
        t->state = (double *)bench_alloc(all * DIM * sizeof(double));
        t->o = NULL;
        t->done = 0;
        for (size_t h = 0; h < CHECKED_HEADS; h++)
            for (size_t i = 0; i < DIM * DIM; i++)
                t->state[h * DIM * DIM + i % DIM * DIM + i / DIM] =
                    (double)s->start[checked_head[h] * DIM * DIM + i];
    }
    double *o = (double *)bench_alloc(tokens * all * sizeof(double));
    if (t->o) memcpy(o, t->o, t->done * all * sizeof(double));
    free(t->o);
    t->o = o;
    for (; t->done < tokens; t->done++)
        for (size_t h = 0; h < CHECKED_HEADS; h++) {
            size_t head = t->done * HEADS + checked_head[h], at = head * DIM;
            for (size_t i = 0; i < DIM; i++) {
                row[0][i] = (double)s->q[at + i], row[1][i] = (double)s->k[at + i];
                row[2][i] = (double)s->v[at + i], row[3][i] = (double)s->g[at + i];
            }
            truth_token(row[0], row[1], row[2], row[3], (double)s->beta[head],
                        t->state + h * DIM * DIM, o + (t->done * CHECKED_HEADS + h) * DIM);
        }
    return t;
}

/* ==== Calls of the operator ==================================================================== */

typedef enum call_kind { FORWARD, VERIFY } call_kind;

/* What is timed: `steps` passes over `layers` layers, each a call with `batch` sequences of `tokens`
 * tokens. Every pass takes the next rows of the inputs, all layers the same rows. */
typedef struct call {
    suite *s;
    kda_desc desc;
    kda_run run;
    call_kind kind;
    size_t layers, batch, tokens, steps;
    kda_seq *seqs; /* [layers][batch] */
    unsigned char *states, *journals;
} call;

static void run_call(void *context) {
    const call *c = (const call *)context;
    for (size_t step = 0; step < c->steps; step++) {
        kda_args args = inputs_args(c->s, step * c->tokens);
        args.n_seqs = c->batch;
        for (size_t layer = 0; layer < c->layers; layer++) {
            args.seqs = c->seqs + layer * c->batch;
            if (c->kind == VERIFY)
                must(kda_verify(&c->desc, &args, &c->run));
            else
                must(kda_forward(&c->desc, &args, &c->run));
        }
    }
}

/* Gives a call its states, journals and scratch; the numbers are set. */
static void call_open(call *c) {
    size_t n = c->layers * c->batch, bytes = kda_state_bytes(&c->desc);
    size_t journal = c->kind == VERIFY ? kda_journal_bytes(&c->desc, c->tokens) : 0;
    size_t scratch = c->kind == VERIFY ? kda_verify_scratch_bytes(&c->desc, c->batch, &c->run)
                                       : kda_scratch_bytes(&c->desc, c->batch, &c->run);
    inputs_need(c->s, c->batch * c->tokens + c->steps - 1);
    run_take_scratch(&c->run, scratch);
    c->states = (unsigned char *)states_new(c->s, c->desc.state_type, n);
    c->journals = (unsigned char *)bench_alloc(n * journal);
    c->seqs = (kda_seq *)bench_alloc(n * sizeof *c->seqs);
    for (size_t i = 0; i < n; i++) {
        c->seqs[i].n_tokens = c->tokens;
        c->seqs[i].state = c->states + i * bytes;
        if (journal) c->seqs[i].journal = c->journals + i * journal;
    }
}

static void call_close(call *c) {
    free(c->states), free(c->journals), free(c->seqs), free(c->run.scratch);
}

static call call_new(suite *s, kda_isa isa, size_t threads, const group *g) {
    call c;
    memset(&c, 0, sizeof c);
    c.s = s;
    c.desc = operator_desc(KDA_F32);
    c.run = run_with(s, isa, threads, KDA_AUTO);
    c.layers = g->layers, c.batch = g->batch, c.tokens = g->tokens, c.steps = 1;
    return c;
}

static size_t call_state_bytes(const call *c) {
    return c->layers * c->batch * kda_state_bytes(&c->desc);
}

/* One element of a state, whatever its type. */
static double state_at(const call *c, size_t i) {
    if (c->desc.state_type == KDA_F32) return (double)((const float *)(const void *)c->states)[i];
    return (double)kda_from_f16(((const uint16_t *)(const void *)c->states)[i]);
}

/* The same call on one layer from the start state, against float64: the worse of the outputs' and
 * the state's relative error, over the checked heads of the first sequence. A call of one token is
 * made 16 times. NaN if the timed states are not finite. */
static double call_error(const call *timed) {
    call c = *timed;
    bench_error o = {0, 0}, state = {0, 0};
    size_t last = timed->layers * timed->batch - 1;
    if (!kda_state_is_finite(&c.desc, timed->seqs[last].state)) return (double)NAN;
    c.layers = 1;
    if (c.tokens == 1 && c.steps == 1) c.steps = DECODE_CHECK;
    call_open(&c);
    run_call(&c);
    size_t tokens = c.tokens * c.steps, some = tokens < TRUTH ? tokens : TRUTH;
    const truth *want = truth_need(c.s, some);
    for (size_t t = 0; t < some; t++)
        for (size_t h = 0; h < CHECKED_HEADS; h++)
            for (size_t j = 0; j < DIM; j++)
                bench_error_add(&o, (double)c.s->o[t * ROW + checked_head[h] * DIM + j],
                                want->o[(t * CHECKED_HEADS + h) * DIM + j]);
    if (c.kind == FORWARD && some == tokens)
        for (size_t h = 0; h < CHECKED_HEADS; h++)
            for (size_t i = 0; i < DIM * DIM; i++)
                bench_error_add(&state, state_at(&c, checked_head[h] * DIM * DIM + i),
                                want->state[h * DIM * DIM + i % DIM * DIM + i / DIM]);
    call_close(&c);
    double a = bench_error_value(&o), b = bench_error_value(&state);
    return b > a ? b : a;
}

static double type_bound(kda_type type) {
    return type == KDA_F32 ? 1e-6 : 5e-3;
}

/* A row of an entry that is such a call; the limit and comparisons are for the caller to add. */
static bench_row call_row(const bench_entry *entry, const char *op, const char *suffix) {
    const call *c = (const call *)entry->context;
    bench_row row = bench_row_of(entry, c->layers, op, suffix);
    row.isa = kda_isa_name(c->run.isa);
    row.count = HEADS;
    row.dims = "128x128";
    row.tokens = c->batch * c->tokens * c->steps;
    row.threads = c->run.n_threads;
    row.flops = 6.0 * DIM * DIM * HEADS * (double)row.tokens;
    row.error = call_error(c);
    row.bound = type_bound(c->desc.state_type);
    return row;
}

static void set_limit(bench_row *row, const char *limit, double fraction) {
    row->limit = limit;
    row->fraction = fraction;
}

static void compare(bench_row *row, const char *compared, double ratio) {
    row->compared = compared;
    row->ratio = ratio;
}

/* A row of a limit itself, over `calls` layers. */
static void print_limit(suite *s, const bench_entry *entry, const char *op, const char *suffix,
                        size_t calls, double bytes, double flops) {
    const bench_limit *limit = (const bench_limit *)entry->context;
    bench_row row = bench_row_of(entry, calls, op, suffix);
    row.isa = limit->kernels->isa;
    row.threads = limit->threads;
    row.bytes = bytes;
    row.flops = flops;
    bench_print_row(s->b, &row);
}

/* ==== Groups: the operator ===================================================================== */

/* A step of every sequence through every layer: the state is read and written once. */
static void decode(void *suite_, const void *group_, int isa_, size_t threads) {
    suite *s = (suite *)suite_;
    const group *g = (const group *)group_;
    kda_isa isa = (kda_isa)isa_;
    call c[2] = {call_new(s, isa, threads, g), call_new(s, isa, threads, g)};
    size_t n = g->type == KDA_F16 ? 2 : 1; /* with f16 states: both types in the same rounds */
    bench_limit limit[2];
    bench_entry entry[4];
    c[1].desc.state_type = KDA_F16;
    for (size_t i = 0; i < n; i++) {
        call_open(&c[i]);
        limit[i] = limit_of(s, isa, threads, c[i].states, call_state_bytes(&c[i]));
        entry[2 * i] = bench_contestant(run_call, &c[i]);
        entry[2 * i + 1] = bench_contestant(bench_run_rmw, &limit[i]);
    }
    bench_measure(s->b, entry, 2 * n);
    for (size_t i = 0; i < n; i++) {
        double bytes = 2.0 * (double)call_state_bytes(&c[i]) / (double)g->layers;
        bench_row row = call_row(&entry[2 * i], g->is.name, i ? "-f16" : "");
        row.bytes = bytes;
        set_limit(&row, "rmw", bench_speed(&entry[2 * i], &entry[2 * i + 1]));
        if (i) compare(&row, "speed/f32", bench_speed(&entry[2], &entry[0]));
        bench_print_row(s->b, &row);
        print_limit(s, &entry[2 * i + 1], g->is.name, i ? "-f16-rmw" : "-rmw", g->layers, bytes, 0);
        call_close(&c[i]);
    }
}

/* One sequence of many tokens through one layer, by both algorithms. */
static void prefill(void *suite_, const void *group_, int isa_, size_t threads) {
    suite *s = (suite *)suite_;
    const group *g = (const group *)group_;
    kda_isa isa = (kda_isa)isa_;
    call c[2] = {call_new(s, isa, threads, g), call_new(s, isa, threads, g)};
    size_t n = g->tokens <= TRUTH ? 2 : 1;
    bench_limit limit = limit_of(s, isa, threads, NULL, 0);
    bench_entry entry[3];
    double peak = bench_fma_flops(&limit);
    c[1].run.algorithm = KDA_RECURRENT;
    entry[0] = bench_contestant(bench_run_fma, &limit);
    for (size_t i = 0; i < n; i++) {
        call_open(&c[i]);
        entry[1 + i] = bench_contestant(run_call, &c[i]);
    }
    bench_measure(s->b, entry, 1 + n);
    for (size_t i = 0; i < n; i++) {
        bench_row row = call_row(&entry[1 + i], g->is.name, i ? "-recurrent" : "");
        set_limit(&row, "fma", bench_speed(&entry[1 + i], &entry[0]) * row.flops / peak);
        if (!i && n > 1) compare(&row, "speed/recurrent", bench_speed(&entry[1], &entry[2]));
        bench_print_row(s->b, &row);
    }
    print_limit(s, &entry[0], g->is.name, "-fma", 1, 0, peak);
    for (size_t i = 0; i < n; i++) call_close(&c[i]);
}

static const size_t switch_tokens[] = {1, 2, 4, 8, 12, 16, 20, 24, 32, 48, 64};
enum { SWITCHES = sizeof switch_tokens / sizeof *switch_tokens };

/* Where KDA_AUTO should change over: recurrent against chunked for short calls. */
static void switch_point(void *suite_, const void *group_, int isa_, size_t threads) {
    suite *s = (suite *)suite_;
    const group *g = (const group *)group_;
    kda_isa isa = (kda_isa)isa_;
    char text[160];
    double speed[SWITCHES];
    for (size_t i = 0; i < SWITCHES; i++) {
        group at = *g;
        at.tokens = switch_tokens[i];
        call c[2] = {call_new(s, isa, threads, &at), call_new(s, isa, threads, &at)};
        bench_entry entry[2];
        for (size_t k = 0; k < 2; k++) {
            c[k].run.algorithm = k ? KDA_CHUNKED : KDA_RECURRENT;
            call_open(&c[k]);
            entry[k] = bench_contestant(run_call, &c[k]);
        }
        bench_measure(s->b, entry, 2);
        speed[i] = bench_speed(&entry[1], &entry[0]);
        for (size_t k = 0; k < 2; k++) {
            bench_row row = call_row(&entry[k], g->is.name, k ? "-chunked" : "-recurrent");
            if (k) compare(&row, "speed/recurrent", speed[i]);
            bench_print_row(s->b, &row);
        }
        call_close(&c[0]), call_close(&c[1]);
    }
    snprintf(text, sizeof text, "%s, %s, %zu thread(s): chunked is as fast as recurrent at",
             g->is.name, kda_isa_name(isa), threads);
    for (size_t i = 0, n; i < SWITCHES; i++)
        if (speed[i] >= 1 && (n = strlen(text)) < sizeof text - 8)
            snprintf(text + n, sizeof text - n, " %zu", switch_tokens[i]);
    bench_note(s->b, text);
}

/* T tokens in one call of each layer, where a state is read from memory once, against T passes. */
static void drafts(void *suite_, const void *group_, int isa_, size_t threads) {
    suite *s = (suite *)suite_;
    const group *g = (const group *)group_;
    kda_isa isa = (kda_isa)isa_;
    static const char *const suffix[3] = {"-steps", "-recurrent", "-verify"};
    call c[3];
    bench_entry entry[3];
    for (size_t k = 0; k < 3; k++) {
        c[k] = call_new(s, isa, threads, g);
        c[k].run.algorithm = KDA_RECURRENT;
        c[k].kind = k == 2 ? VERIFY : FORWARD;
        c[k].tokens = k ? g->tokens : 1;
        c[k].steps = k ? 1 : g->tokens;
        call_open(&c[k]);
        entry[k] = bench_contestant(run_call, &c[k]);
    }
    bench_measure(s->b, entry, 3);
    for (size_t k = 0; k < 3; k++) {
        bench_row row = call_row(&entry[k], g->is.name, suffix[k]);
        if (k) compare(&row, "speed/steps", bench_speed(&entry[k], &entry[0]));
        bench_print_row(s->b, &row);
        call_close(&c[k]);
    }
}

/* A state full of subnormal numbers that stay: no decay (g = 0) and nothing written (beta = 0). */
static void denormal(void *suite_, const void *group_, int isa_, size_t threads) {
    suite *s = (suite *)suite_;
    const group *g = (const group *)group_;
    kda_isa isa = (kda_isa)isa_;
    call c[2] = {call_new(s, isa, threads, g), call_new(s, isa, threads, g)};
    suite still = *s; /* with inputs of its own; errors are taken on the usual ones */
    bench_entry entry[2];
    for (size_t i = 0; i < 2; i++) call_open(&c[i]);
    still.q = s->q, still.k = s->k, still.v = s->v, still.o = s->o;
    still.g = bench_floats(ROW), still.beta = bench_floats(HEADS);
    for (size_t i = 0; i < 2; i++) {
        c[i].s = &still;
        c[i].desc.beta = KDA_BETA_VALUE;
        entry[i] = bench_contestant(run_call, &c[i]);
    }
    float *state = (float *)(void *)c[1].states;
    for (size_t i = 0; i < STATE; i++) state[i] = s->start[i] * 0x1p-130f;
    bench_measure(s->b, entry, 2);
    for (size_t i = 0; i < 2; i++) {
        c[i].s = s;
        c[i].desc.beta = KDA_BETA_LOGIT;
        bench_row row = call_row(&entry[i], g->is.name, i ? "" : "-normal");
        if (i) compare(&row, "time/normal", bench_speed(&entry[0], &entry[1]));
        bench_print_row(s->b, &row);
        call_close(&c[i]);
    }
    free(still.g), free(still.beta);
}

/* Plain C beside the best instruction set. */
static void scalar(void *suite_, const void *group_, int isa_, size_t threads) {
    suite *s = (suite *)suite_;
    const group *g = (const group *)group_;
    kda_isa isa = (kda_isa)isa_;
    call c[2] = {call_new(s, KDA_ISA_SCALAR, threads, g), call_new(s, isa, threads, g)};
    bench_entry entry[2];
    for (size_t i = 0; i < 2; i++) {
        call_open(&c[i]);
        entry[i] = bench_contestant(run_call, &c[i]);
    }
    bench_measure(s->b, entry, 2);
    for (size_t i = 0; i < 2; i++) {
        bench_row row = call_row(&entry[i], g->is.name, "");
#ifndef __AVX__ /* else the plain C is not plain */
        if (i) compare(&row, "speed/scalar", bench_speed(&entry[1], &entry[0]));
#endif
        bench_print_row(s->b, &row);
        call_close(&c[i]);
    }
}

/* ==== A whole layer ============================================================================
 *
 * Rows as a projection leaves them: q | k | v | gate of the decay | output gate | beta, one row to a
 * token, of float32 or bf16; unbounded gate, L2 norm, convolutions of 4 taps with SiLU. */

enum { TAPS = 4, FUSED = 5 * ROW + HEADS };
enum { COLUMN_Q = 0, COLUMN_K = ROW, COLUMN_V = 2 * ROW, COLUMN_G = 3 * ROW };
enum { COLUMN_GATE = 4 * ROW, COLUMN_BETA = 5 * ROW };

typedef struct layer_call {
    suite *s;
    kda_layer_desc desc;
    kda_run run;
    kda_type type;
    size_t layers, tokens;
    unsigned char *rows; /* [tokens][FUSED] of type */
    float *weights;      /* convolutions, A_log, dt_bias, norm */
    unsigned char *states;
    float *windows;
    kda_seq *seqs;    /* [layers] */
    unsigned char *o; /* [tokens][ROW] of type */
    float *x, *y;     /* [tokens][ROW]: results of the parts */
    kda_conv_desc conv;
} layer_call;

static size_t type_bytes(kda_type type) {
    return type == KDA_F32 ? 4 : 2;
}

static double element(const void *data, kda_type type, size_t i) {
    if (type == KDA_F32) return (double)((const float *)data)[i];
    return (double)kda_from_bf16(((const uint16_t *)data)[i]);
}

static kda_input fused(const layer_call *c, size_t column, ptrdiff_t head_stride) {
    return kda_in(c->rows + column * type_bytes(c->type), c->type, FUSED, head_stride);
}

static void layer_weights(layer_call *c) {
    size_t n = 3 * ROW * TAPS + HEADS + ROW + DIM;
    float *at = c->weights = bench_floats(n);
    bench_fill(at, n, 11, -0.7f, 0.7f);
    c->desc.q_conv = at, at += ROW * TAPS;
    c->desc.k_conv = at, at += ROW * TAPS;
    c->desc.v_conv = at, at += ROW * TAPS;
    c->desc.A_log = at, at += HEADS;
    c->desc.dt_bias = at, at += ROW;
    c->desc.norm_weight = at;
}

static void layer_rows(layer_call *c) {
    size_t n = c->tokens * FUSED;
    float *x = bench_floats(n);
    bench_fill(x, n, 12, -1.7f, 1.7f);
    c->rows = (unsigned char *)x;
    if (c->type == KDA_F32) return;
    uint16_t *rows = (uint16_t *)bench_alloc(n * sizeof *rows);
    for (size_t i = 0; i < n; i++) rows[i] = kda_to_bf16(x[i]);
    free(x);
    c->rows = (unsigned char *)rows;
}

/* Gives a call its memory; desc, type, tokens, layers and run are set. */
static void layer_open(layer_call *c) {
    size_t state = kda_state_bytes(&c->desc.op), window = kda_layer_window_bytes(&c->desc);
    layer_weights(c);
    layer_rows(c);
    run_take_scratch(&c->run, kda_layer_scratch_bytes(&c->desc, 1, &c->run));
    c->states = (unsigned char *)states_new(c->s, KDA_F32, c->layers);
    c->windows = (float *)bench_alloc(c->layers * window);
    c->seqs = (kda_seq *)bench_alloc(c->layers * sizeof *c->seqs);
    c->o = (unsigned char *)bench_alloc(c->tokens * ROW * sizeof(float));
    c->x = bench_floats(c->tokens * ROW);
    c->y = bench_floats(c->tokens * ROW);
    for (size_t i = 0; i < c->layers; i++) {
        c->seqs[i].n_tokens = c->tokens;
        c->seqs[i].state = c->states + i * state;
        c->seqs[i].window = c->windows + i * (window / sizeof(float));
    }
}

static void layer_close(layer_call *c) {
    free(c->rows), free(c->weights), free(c->states), free(c->windows), free(c->seqs);
    free(c->o), free(c->x), free(c->y), free(c->run.scratch);
}

static layer_call layer_new(suite *s, kda_isa isa, size_t threads, const group *g) {
    layer_call c;
    memset(&c, 0, sizeof c);
    inputs_need(s, DECODE_CHECK);
    c.s = s;
    c.desc.op = operator_desc(KDA_F32);
    c.desc.op.gate = KDA_GATE_SOFTPLUS;
    c.desc.conv_width = TAPS;
    c.desc.conv_activation = KDA_ACTIVATION_SILU;
    c.desc.norm_eps = 1e-5f;
    c.run = run_with(s, isa, threads, KDA_AUTO);
    c.type = g->type;
    c.layers = g->layers, c.tokens = g->tokens;
    c.conv.channels = ROW, c.conv.width = TAPS, c.conv.activation = KDA_ACTIVATION_SILU;
    return c;
}

static void run_layer(void *context) {
    const layer_call *c = (const layer_call *)context;
    kda_layer_args args;
    memset(&args, 0, sizeof args);
    args.q = fused(c, COLUMN_Q, DIM), args.k = fused(c, COLUMN_K, DIM);
    args.v = fused(c, COLUMN_V, DIM), args.g = fused(c, COLUMN_G, DIM);
    args.beta = fused(c, COLUMN_BETA, 1), args.gate = fused(c, COLUMN_GATE, DIM);
    args.o = kda_out(c->o, c->type, ROW, DIM);
    args.n_seqs = 1;
    for (size_t i = 0; i < c->layers; i++) {
        args.seqs = &c->seqs[i];
        must(kda_layer(&c->desc, &args, &c->run));
    }
}

/* ---- The parts, as the layer would call them ---- */

static void run_log_decay(void *context) {
    const layer_call *c = (const layer_call *)context;
    must(kda_log_decay(&c->desc.op, c->tokens, fused(c, COLUMN_G, DIM), c->desc.A_log,
                       c->desc.dt_bias, kda_out_f32(c->y, ROW, DIM), &c->run));
}

static void run_l2_norm(void *context) {
    const layer_call *c = (const layer_call *)context;
    must(kda_l2_norm(c->tokens, HEADS, DIM, 0, fused(c, COLUMN_Q, DIM), kda_out_f32(c->y, ROW, DIM),
                     &c->run));
    must(kda_l2_norm(c->tokens, HEADS, DIM, 0, fused(c, COLUMN_K, DIM), kda_out_f32(c->y, ROW, DIM),
                     &c->run));
}

static void run_conv(void *context) {
    const layer_call *c = (const layer_call *)context;
    static const size_t column[3] = {COLUMN_Q, COLUMN_K, COLUMN_V};
    const float *weight[3] = {c->desc.q_conv, c->desc.k_conv, c->desc.v_conv};
    kda_conv_args args;
    kda_seq seq = c->seqs[0];
    memset(&args, 0, sizeof args);
    args.y = kda_out_f32(c->y, ROW, 0);
    args.seqs = &seq, args.n_seqs = 1;
    for (size_t i = 0; i < 3; i++) {
        seq.window = c->windows + i * (TAPS - 1) * ROW;
        args.x = fused(c, column[i], 0);
        args.weight = weight[i];
        must(kda_conv(&c->conv, &args, &c->run));
    }
}

static void run_gated_norm(void *context) {
    const layer_call *c = (const layer_call *)context;
    must(kda_gated_norm(c->tokens, HEADS, DIM, c->desc.norm_eps, c->desc.norm_weight,
                        kda_in_f32(c->x, ROW, DIM), fused(c, COLUMN_GATE, DIM),
                        kda_out(c->o, c->type, ROW, DIM), &c->run));
}

/* ---- Their truth: channel i of a head of token t, from the rows ---- */

static double true_raw(const layer_call *c, size_t t, size_t column, size_t i) {
    return element(c->rows, c->type, t * FUSED + column + i);
}

static double true_silu(double x) {
    return x * reference_sigmoid(x);
}

/* As the first call of a sequence: zeros before token 0. */
static double true_conv(const layer_call *c, const float *weight, size_t t, size_t column,
                        size_t i) {
    double sum = 0;
    for (size_t tap = 0; tap < TAPS && tap <= t; tap++)
        sum += (double)weight[i * TAPS + TAPS - 1 - tap] * true_raw(c, t - tap, column, i);
    return true_silu(sum);
}

static double true_log_decay(const layer_call *c, size_t t, size_t head, size_t i) {
    double z = true_raw(c, t, COLUMN_G, head * DIM + i) + (double)c->desc.dt_bias[head * DIM + i];
    return -exp((double)c->desc.A_log[head]) * reference_softplus(z);
}

/* x becomes the gated norm of x. */
static void true_gated_norm(const layer_call *c, size_t t, size_t head, double *x) {
    double sum = 0;
    for (size_t i = 0; i < DIM; i++) sum += x[i] * x[i];
    double scale = 1 / sqrt(sum / DIM + (double)c->desc.norm_eps);
    for (size_t i = 0; i < DIM; i++)
        x[i] *= scale * (double)c->desc.norm_weight[i] *
                reference_sigmoid(true_raw(c, t, COLUMN_GATE, head * DIM + i));
}

/* Token t of a layer for one head; state is [DIM][DIM], key channel first. */
static void true_layer_token(const layer_call *c, size_t t, size_t head, double *state, double *o) {
    double q[DIM], k[DIM], v[DIM], g[DIM];
    for (size_t i = 0; i < DIM; i++) {
        q[i] = true_conv(c, c->desc.q_conv, t, COLUMN_Q, head * DIM + i);
        k[i] = true_conv(c, c->desc.k_conv, t, COLUMN_K, head * DIM + i);
        v[i] = true_conv(c, c->desc.v_conv, t, COLUMN_V, head * DIM + i);
        g[i] = true_log_decay(c, t, head, i);
    }
    truth_token(q, k, v, g, true_raw(c, t, COLUMN_BETA, head), state, o);
    true_gated_norm(c, t, head, o);
}

static double layer_error(const layer_call *timed) {
    layer_call c = *timed;
    bench_error e = {0, 0};
    double o[DIM], *state = (double *)bench_alloc(DIM * DIM * sizeof *state);
    c.layers = 1;
    layer_open(&c);
    run_layer(&c);
    for (size_t h = 0; h < CHECKED_HEADS; h++) {
        size_t head = checked_head[h];
        for (size_t i = 0; i < DIM * DIM; i++)
            state[i % DIM * DIM + i / DIM] = (double)c.s->start[head * DIM * DIM + i];
        for (size_t t = 0; t < c.tokens && t < LAYER_CHECK; t++) {
            true_layer_token(&c, t, head, state, o);
            for (size_t j = 0; j < DIM; j++)
                bench_error_add(&e, element(c.o, c.type, t * ROW + head * DIM + j), o[j]);
        }
    }
    free(state);
    layer_close(&c);
    return bench_error_value(&e);
}

/* Error of a part that has just run as run_... does, over the checked heads of the first tokens. */
static double part_error(layer_call *c, void (*run)(void *context)) {
    bench_error e = {0, 0};
    double want[DIM];
    memset(c->windows, 0, kda_layer_window_bytes(&c->desc));
    run(c);
    for (size_t t = 0; t < c->tokens && t < LAYER_CHECK; t++)
        for (size_t h = 0; h < CHECKED_HEADS; h++) {
            size_t head = checked_head[h], at = t * ROW + head * DIM;
            for (size_t i = 0; i < DIM; i++) {
                if (run == run_log_decay) want[i] = true_log_decay(c, t, head, i);
                if (run == run_l2_norm) want[i] = true_raw(c, t, COLUMN_K, head * DIM + i);
                if (run == run_gated_norm) want[i] = (double)c->x[at + i];
                if (run == run_conv)
                    want[i] = true_conv(c, c->desc.v_conv, t, COLUMN_V, head * DIM + i);
            }
            if (run == run_l2_norm) reference_l2_norm(DIM, 1e-6, want);
            if (run == run_gated_norm) true_gated_norm(c, t, head, want);
            for (size_t i = 0; i < DIM; i++) {
                double y = (double)c->y[at + i];
                if (run == run_gated_norm) y = element(c->o, c->type, at + i);
                bench_error_add(&e, y, want[i]);
            }
        }
    return bench_error_value(&e);
}

static bench_row layer_row(const bench_entry *entry, const layer_call *c, const char *op,
                           const char *suffix) {
    bench_row row = bench_row_of(entry, c->layers, op, suffix);
    row.isa = kda_isa_name(c->run.isa);
    row.count = HEADS;
    row.dims = "128x128";
    row.tokens = c->tokens;
    row.threads = c->run.n_threads;
    return row;
}

/* kda_layer beside the operator alone (on ready float32 rows) and the limit: of a single token the
 * state's read and write, of many the multiplications. */
static void layer(void *suite_, const void *group_, int isa_, size_t threads) {
    suite *s = (suite *)suite_;
    const group *g = (const group *)group_;
    kda_isa isa = (kda_isa)isa_;
    call operator_alone = call_new(s, isa, threads, g);
    layer_call c = layer_new(s, isa, threads, g);
    bench_entry entry[3];
    int step = g->tokens == 1;
    call_open(&operator_alone);
    layer_open(&c);
    bench_limit limit = limit_of(s, isa, threads, c.states, c.layers * kda_state_bytes(&c.desc.op));
    entry[0] = bench_contestant(run_layer, &c);
    entry[1] = bench_contestant(run_call, &operator_alone);
    entry[2] = bench_contestant(step ? bench_run_rmw : bench_run_fma, &limit);
    bench_measure(s->b, entry, 3);
    bench_row row = layer_row(&entry[0], &c, g->is.name, "");
    double speed = bench_speed(&entry[0], &entry[2]);
    row.flops = 6.0 * DIM * DIM * HEADS * (double)c.tokens;
    if (step) row.bytes = 2.0 * (double)kda_state_bytes(&c.desc.op);
    if (step)
        set_limit(&row, "rmw", speed);
    else
        set_limit(&row, "fma", speed * row.flops / bench_fma_flops(&limit));
    compare(&row, "time/operator", bench_speed(&entry[1], &entry[0]));
    row.error = layer_error(&c);
    row.bound = c.type == KDA_F32 ? 1e-6 : 5e-3;
    bench_print_row(s->b, &row);
    layer_close(&c);
    call_close(&operator_alone);
}

static const struct part {
    const char *suffix;
    void (*run)(void *context);
    size_t reads, writes; /* of [tokens][ROW]: of the rows' type, of float32 */
} parts_of_layer[] = {
    {"-log-decay", run_log_decay, 1, 1},
    {"-l2-norm-qk", run_l2_norm, 2, 2},
    {"-conv-qkv", run_conv, 3, 3},
    {"-gated-norm", run_gated_norm, 2, 1}, /* reads a gate, writes the type; reads float32 */
};
enum { PARTS = sizeof parts_of_layer / sizeof *parts_of_layer };

/* What surrounds the recurrence, each part as a share of the time of the operator alone. */
static void parts(void *suite_, const void *group_, int isa_, size_t threads) {
    suite *s = (suite *)suite_;
    const group *g = (const group *)group_;
    kda_isa isa = (kda_isa)isa_;
    call operator_alone = call_new(s, isa, threads, g);
    layer_call c = layer_new(s, isa, threads, g);
    bench_entry entry[PARTS + 1];
    double share = 0, ns = 0;
    operator_alone.desc.flags = 0; /* the norm counts as a part */
    call_open(&operator_alone);
    layer_open(&c);
    bench_fill(c.x, c.tokens * ROW, 13, -1, 1);
    for (size_t i = 0; i < PARTS; i++) entry[i] = bench_contestant(parts_of_layer[i].run, &c);
    entry[PARTS] = bench_contestant(run_call, &operator_alone);
    bench_measure(s->b, entry, PARTS + 1);
    for (size_t i = 0; i < PARTS; i++) {
        const struct part *part = &parts_of_layer[i];
        bench_row row = layer_row(&entry[i], &c, g->is.name, part->suffix);
        row.bytes = (double)(c.tokens * ROW) *
                    (double)(part->reads * type_bytes(c.type) + part->writes * 4);
        compare(&row, "time/operator", bench_speed(&entry[PARTS], &entry[i]));
        share += row.ratio;
        ns += row.ns_med;
        row.error = part_error(&c, part->run);
        row.bound = c.type == KDA_BF16 && part->run == run_gated_norm ? 5e-3 : 1e-6;
        bench_print_row(s->b, &row);
    }
    bench_row all = layer_row(&entry[PARTS], &c, g->is.name, "-together");
    all.ns_min = all.ns_med = ns;
    compare(&all, "time/operator", share);
    bench_print_row(s->b, &all);
    layer_close(&c);
    call_close(&operator_alone);
}

/* ==== The run ================================================================================== */

/* bench_group.flags that go together. */
enum {
    FULL_RUNS = BENCH_NO_SCALAR | BENCH_NOT_QUICK,
    QUICK_LESS = BENCH_NO_SCALAR | BENCH_QUICK_BEST,
    QUICK_LEAST = QUICK_LESS | BENCH_QUICK_ONE_THREAD,
    BESIDE_SCALAR = BENCH_NO_SCALAR | BENCH_ONE_THREAD | BENCH_BEST_ONLY
};

static const group groups[] = {
    /* name, function, measures, left out; layers, batch, tokens, type */
    {{"decode-1-layer", decode, 1, 0}, 1, 1, 1, KDA_F32},
    {{"decode-20-layers", decode, 1, 0}, 20, 1, 1, KDA_F16},
    {{"decode-batch-8", decode, 1, QUICK_LESS}, 20, 8, 1, KDA_F16},
    {{"denormal", denormal, 1, BENCH_ONE_THREAD}, 1, 1, 1, KDA_F32},
    {{"scalar-decode", scalar, 1, BESIDE_SCALAR}, 1, 1, 1, KDA_F32},
    {{"scalar-prefill", scalar, 1, BESIDE_SCALAR}, 1, 1, 16, KDA_F32},
    {{"prefill-16", prefill, 1, 0}, 1, 1, 16, KDA_F32},
    {{"prefill-64", prefill, 1, 0}, 1, 1, 64, KDA_F32},
    {{"prefill-128", prefill, 1, FULL_RUNS}, 1, 1, 128, KDA_F32},
    {{"prefill-512", prefill, 1, BENCH_NO_SCALAR}, 1, 1, 512, KDA_F32},
    {{"prefill-4096", prefill, 1, FULL_RUNS}, 1, 1, 4096, KDA_F32},
    {{"switch", switch_point, SWITCHES, QUICK_LEAST}, 1, 1, 0, KDA_F32},
    {{"drafts-2", drafts, 1, FULL_RUNS}, 20, 1, 2, KDA_F32},
    {{"drafts-4", drafts, 1, QUICK_LESS}, 20, 1, 4, KDA_F32},
    {{"drafts-8", drafts, 1, FULL_RUNS}, 20, 1, 8, KDA_F32},
    {{"drafts-16", drafts, 1, FULL_RUNS}, 20, 1, 16, KDA_F32},
    {{"layer-decode-1-f32", layer, 1, BENCH_QUICK_BEST}, 1, 1, 1, KDA_F32},
    {{"layer-decode-20-f32", layer, 1, FULL_RUNS}, 20, 1, 1, KDA_F32},
    {{"layer-decode-20-bf16", layer, 1, QUICK_LESS}, 20, 1, 1, KDA_BF16},
    {{"layer-prefill-512-f32", layer, 1, FULL_RUNS}, 1, 1, 512, KDA_F32},
    {{"layer-prefill-512-bf16", layer, 1, QUICK_LESS}, 1, 1, 512, KDA_BF16},
    {{"parts-f32", parts, 1, QUICK_LEAST}, 1, 1, 512, KDA_F32},
    {{"parts-bf16", parts, 1, QUICK_LEAST}, 1, 1, 512, KDA_BF16},
};

static const char *isa_name(int isa) {
    return kda_isa_name((kda_isa)isa);
}

static int isa_is_available(int isa) {
    return kda_isa_is_available((kda_isa)isa);
}

int main(int argc, char **argv) {
    static bench b;
    static suite s;
    b.name = "bench_kda", b.counted = "heads";
    b.groups = groups, b.n_groups = sizeof groups / sizeof *groups, b.group_bytes = sizeof *groups;
    b.suite = &s;
    b.best_isa = (int)kda_isa_best(), b.isa_name = isa_name, b.isa_is_available = isa_is_available;
    b.quick_seconds = 17;
    s.b = &b;
    int status = bench_main(&b, argc, argv);
    free(s.q), free(s.k), free(s.v), free(s.g), free(s.beta), free(s.o), free(s.start);
    free(s.want.state), free(s.want.o);
    return status;
}
