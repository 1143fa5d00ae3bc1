/* bench_attnres.c - how fast attnres.h is here, against reading its sources once, with the error
 * beside it.
 *
 *     bench_attnres [--quick] [--csv FILE] [--isa NAME] [--threads N] [--only SUBSTRING]
 *
 * 8 stored blocks and the running sum, of dim 2304 (Kimi Linear 48B) or 7168 (Kimi K3). See
 * README.md for how to read the rows.
 */
#include "bench.h"

#define ATTNRES_IMPLEMENTATION
#include "../attnres.h"

enum {
    BLOCKS = 8,
    SOURCES = BLOCKS + 1,
    QUERIES = 24, /* sub-layers that read the same blocks: 12 layers */
    CHECKED = 3   /* tokens compared with float64: first, middle, last */
};

typedef struct group {
    bench_group is;
    size_t dim, tokens;
    attnres_type type; /* of the sources */
} group;

/* What a mix reads and writes. */
typedef struct data {
    size_t tokens;
    attnres_type type;
    attnres_desc desc;
    attnres_run run;
    unsigned char *values; /* [SOURCES][tokens][dim] of type */
    size_t bytes;          /* of values */
    attnres_input source[SOURCES];
    double *inv_rms; /* [SOURCES][tokens] */
    const double *cached[SOURCES];
    float *queries; /* [QUERIES][dim], folded */
    float *norm_weight;
    float *o; /* [tokens][dim] */
} data;

static void must(attnres_result result) {
    if (result != ATTNRES_OK) bench_die(attnres_result_text(result));
}

static size_t type_bytes(attnres_type type) {
    return type == ATTNRES_F32 ? 4 : 2;
}

static const float *query_of(const data *d, size_t i) {
    return d->queries + i * d->desc.dim;
}

/* bf16 by cutting off the lower half: the bench needs numbers, not the nearest ones. */
static void fill_values(data *d) {
    size_t n = SOURCES * d->tokens * d->desc.dim;
    float *x = bench_floats(n);
    bench_fill(x, n, 1, -1.7f, 1.7f);
    d->values = (unsigned char *)x;
    if (d->type == ATTNRES_F32) return;
    uint16_t *bf16 = (uint16_t *)bench_alloc(n * sizeof *bf16);
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &x[i], sizeof bits);
        bf16[i] = (uint16_t)(bits >> 16);
    }
    free(x);
    d->values = (unsigned char *)bf16;
}

/* Element i of token t of a source. */
static double value(const data *d, size_t source, size_t t, size_t i) {
    size_t at = (source * d->tokens + t) * d->desc.dim + i;
    float x;
    if (d->type == ATTNRES_F32) {
        x = ((const float *)(const void *)d->values)[at];
    } else {
        uint32_t bits = (uint32_t)((const uint16_t *)(const void *)d->values)[at] << 16;
        memcpy(&x, &bits, sizeof x);
    }
    return (double)x;
}

/* Inputs of a group, and a run with scratch enough for all of its calls. */
static data data_new(bench *b, const group *g, attnres_isa isa, size_t threads) {
    data d;
    size_t row = g->tokens * g->dim;
    memset(&d, 0, sizeof d);
    d.tokens = g->tokens, d.type = g->type;
    d.desc.dim = g->dim, d.desc.eps = 1e-5f;
    d.bytes = SOURCES * row * type_bytes(d.type);
    d.run.parallel_for = bench_parallel_for, d.run.user = &b->pool, d.run.n_threads = threads;
    d.run.isa = isa;
    size_t mix = attnres_mix_scratch_bytes(&d.desc, SOURCES, &d.run);
    size_t inter = attnres_inter_scratch_bytes(&d.desc, BLOCKS, QUERIES, &d.run);
    size_t merge = attnres_merge_scratch_bytes(&d.desc, &d.run);
    if (!mix || !inter || !merge) bench_die("no scratch size");
    d.run.scratch_bytes = mix > inter ? mix : inter;
    if (merge > d.run.scratch_bytes) d.run.scratch_bytes = merge;
    d.run.scratch = bench_alloc(d.run.scratch_bytes);
    fill_values(&d);
    d.inv_rms = (double *)bench_alloc(SOURCES * d.tokens * sizeof(double));
    d.queries = bench_floats(QUERIES * g->dim);
    d.norm_weight = bench_floats(g->dim);
    d.o = bench_floats(row);
    /* Scores with a standard deviation near 2: some sources count, none alone. */
    float spread = 2 * 1.7f / sqrtf((float)g->dim);
    bench_fill(d.queries, QUERIES * g->dim, 2, -spread, spread);
    bench_fill(d.norm_weight, g->dim, 3, 0.5f, 1.5f);
    for (size_t j = 0; j < SOURCES; j++) {
        d.source[j].data = d.values + j * row * type_bytes(d.type);
        d.source[j].token_stride = (ptrdiff_t)g->dim;
        d.source[j].type = d.type;
        must(attnres_inverse_rms(&d.desc, d.tokens, d.source[j], d.inv_rms + j * d.tokens, &d.run));
        d.cached[j] = d.inv_rms + j * d.tokens;
    }
    return d;
}

static void data_free(data *d) {
    free(d->values), free(d->inv_rms), free(d->queries), free(d->norm_weight), free(d->o);
    free(d->run.scratch);
}

/* ==== The truth ================================================================================ */

/* The mix of all sources for one token in float64, with the norm if there is a weight. */
static void true_mix(const data *d, const float *query, size_t t, const float *weight, double *o) {
    size_t dim = d->desc.dim;
    double score[SOURCES], max = -HUGE_VAL, sum = 0, squares_of_o = 0;
    for (size_t j = 0; j < SOURCES; j++) {
        double dot = 0, squares = 0;
        for (size_t i = 0; i < dim; i++) {
            double x = value(d, j, t, i);
            dot += (double)query[i] * x;
            squares += x * x;
        }
        score[j] = dot / sqrt(squares / (double)dim + (double)d->desc.eps);
        if (score[j] > max) max = score[j];
    }
    for (size_t j = 0; j < SOURCES; j++) sum += score[j] = exp(score[j] - max);
    for (size_t i = 0; i < dim; i++) {
        o[i] = 0;
        for (size_t j = 0; j < SOURCES; j++) o[i] += score[j] / sum * value(d, j, t, i);
        squares_of_o += o[i] * o[i];
    }
    if (!weight) return;
    double scale = 1 / sqrt(squares_of_o / (double)dim + (double)d->desc.eps);
    for (size_t i = 0; i < dim; i++) o[i] *= scale * (double)weight[i];
}

/* Relative error of what lies in d->o. */
static double mix_error(const data *d, const float *query, const float *weight) {
    size_t dim = d->desc.dim;
    double *want = (double *)bench_alloc(dim * sizeof *want);
    bench_error e = {0, 0};
    for (size_t n = 0; n < CHECKED; n++) {
        size_t t = n * (d->tokens - 1) / (CHECKED - 1);
        true_mix(d, query, t, weight, want);
        for (size_t i = 0; i < dim; i++) bench_error_add(&e, (double)d->o[t * dim + i], want[i]);
    }
    free(want);
    return bench_error_value(&e);
}

/* ==== Limits =================================================================================== */

/* Reads every byte of the sources and writes every byte of the outputs, in step. */
static void read_and_write(void *context, size_t index) {
    bench_limit *limit = (bench_limit *)context;
    (void)index;
    for (size_t n, at = bench_limit_claim(limit, &n); n; at = bench_limit_claim(limit, &n)) {
        size_t from = at * limit->copy_bytes / limit->bytes;
        size_t to = (at + n) * limit->copy_bytes / limit->bytes;
        limit->kernels->read(limit->data + at, n);
        memset(limit->copy + from, 0, to - from);
    }
}

static void run_read_and_write(void *limit) {
    bench_limit_run((bench_limit *)limit, read_and_write);
}

/* The limit of reading `bytes` bytes of the sources and writing `copy_bytes` bytes to `copy`. */
static bench_limit limit_of(bench *b, const data *d, size_t bytes, void *copy, size_t copy_bytes) {
    bench_limit limit;
    memset(&limit, 0, sizeof limit);
    limit.pool = &b->pool;
    limit.kernels = bench_kernels_of(attnres_isa_name(d->run.isa));
    limit.threads = d->run.n_threads;
    limit.data = d->values;
    limit.bytes = bytes;
    limit.copy = (unsigned char *)copy;
    limit.copy_bytes = copy_bytes;
    return limit;
}

static bench_row row_of(const data *d, const bench_entry *entry, const group *g, const char *suffix,
                        size_t calls, size_t sources) {
    bench_row row = bench_row_of(entry, calls, g->is.name, suffix);
    row.isa = attnres_isa_name(d->run.isa);
    row.count = sources;
    row.dims = g->dim == 2304 ? "2304" : "7168";
    row.tokens = d->tokens;
    row.threads = d->run.n_threads;
    return row;
}

/* ==== Groups =================================================================================== */

/* A mix of all sources; cached: with the inverse RMS of each; weight: with the norm fused. */
typedef struct mix_call {
    const data *d;
    int cached;
    const float *weight;
} mix_call;

static void mix_query(const mix_call *c, size_t query) {
    const data *d = c->d;
    attnres_mix_args args;
    memset(&args, 0, sizeof args);
    args.n_tokens = d->tokens;
    args.sources = d->source, args.n_sources = SOURCES;
    if (c->cached) args.inv_rms = d->cached;
    args.query = query_of(d, query);
    args.norm.weight = c->weight, args.norm.eps = d->desc.eps;
    args.o = attnres_out_f32(d->o, (ptrdiff_t)d->desc.dim);
    must(attnres_mix(&d->desc, &args, &d->run));
}

static void run_mix(void *context) {
    mix_query((const mix_call *)context, 0);
}

/* One mix: plain, with cached inverse RMS, and with the norm fused as well; beside a copy of the
 * sources, and the limit. */
static void mix(void *bench_, const void *group_, int isa_, size_t threads) {
    static const char *const suffix[] = {"", "-cached", "-cached-norm", "-limit", "-copy"};
    bench *b = (bench *)bench_;
    const group *g = (const group *)group_;
    data d = data_new(b, g, (attnres_isa)isa_, threads);
    size_t o_bytes = g->tokens * g->dim * sizeof(float);
    void *copy = bench_alloc(d.bytes);
    mix_call c[3] = {{&d, 0, NULL}, {&d, 1, NULL}, {&d, 1, d.norm_weight}};
    bench_limit limit[2] = {limit_of(b, &d, d.bytes, d.o, o_bytes),
                            limit_of(b, &d, d.bytes, copy, d.bytes)};
    bench_entry entry[5];
    for (size_t i = 0; i < 3; i++) entry[i] = bench_contestant(run_mix, &c[i]);
    entry[3] = bench_contestant(run_read_and_write, &limit[0]);
    entry[4] = bench_contestant(bench_run_copy, &limit[1]);
    bench_measure(b, entry, 5);
    for (size_t i = 0; i < 5; i++) {
        bench_row row = row_of(&d, &entry[i], g, suffix[i], 1, SOURCES);
        row.bytes = (double)(d.bytes + (i == 4 ? d.bytes : o_bytes));
        if (i < 3) {
            run_mix(&c[i]);
            row.error = mix_error(&d, query_of(&d, 0), c[i].weight);
            row.bound = 1e-6;
            /* Per element: a multiply-add for the score, one for the sum, one for the squares. */
            row.flops = (double)(SOURCES * g->tokens * g->dim) * (c[i].cached ? 4 : 6);
            row.limit = "read";
            row.fraction = bench_speed(&entry[i], &entry[3]);
            row.compared = "time/copy";
            row.ratio = bench_speed(&entry[4], &entry[i]);
        }
        bench_print_row(b, &row);
    }
    free(copy);
    data_free(&d);
}

/* The sub-layers that read the same blocks: all their queries in one pass, and a merge of each. */
typedef struct two_phases {
    const data *d;
    double *max;
    float *sum, *mix; /* [QUERIES][tokens], and of [dim] */
} two_phases;

static void run_inter(void *context) {
    const two_phases *p = (const two_phases *)context;
    const data *d = p->d;
    const float *query[QUERIES];
    attnres_inter_args args;
    memset(&args, 0, sizeof args);
    for (size_t i = 0; i < QUERIES; i++) query[i] = query_of(d, i);
    args.n_tokens = d->tokens;
    args.sources = d->source, args.n_sources = BLOCKS;
    args.inv_rms = d->cached;
    args.queries = query, args.n_queries = QUERIES;
    args.max = p->max, args.sum = p->sum, args.mix = p->mix;
    must(attnres_inter(&d->desc, &args, &d->run));
}

static void run_merges(void *context) {
    const two_phases *p = (const two_phases *)context;
    const data *d = p->d;
    attnres_merge_args args;
    memset(&args, 0, sizeof args);
    args.n_tokens = d->tokens;
    args.partial = d->source[BLOCKS];
    args.norm.weight = d->norm_weight, args.norm.eps = d->desc.eps;
    args.o = attnres_out_f32(d->o, (ptrdiff_t)d->desc.dim);
    for (size_t i = 0; i < QUERIES; i++) {
        args.max = p->max + i * d->tokens;
        args.sum = p->sum + i * d->tokens;
        args.mix = p->mix + i * d->tokens * d->desc.dim;
        args.query = query_of(d, i);
        must(attnres_merge(&d->desc, &args, &d->run));
    }
}

static void run_both(void *context) {
    run_inter(context);
    run_merges(context);
}

static void run_mixes(void *context) {
    for (size_t i = 0; i < QUERIES; i++) mix_query((const mix_call *)context, i);
}

/* Both phases against a mix for every query, all with the norm fused. */
static void two_phase(void *bench_, const void *group_, int isa_, size_t threads) {
    static const char *const suffix[] = {"", "-inter", "-merges", "-mixes", "-inter-limit"};
    bench *b = (bench *)bench_;
    const group *g = (const group *)group_;
    data d = data_new(b, g, (attnres_isa)isa_, threads);
    size_t row_floats = g->tokens * g->dim, mix_bytes = QUERIES * row_floats * sizeof(float);
    size_t block_bytes = BLOCKS * row_floats * type_bytes(d.type);
    two_phases p = {&d, NULL, NULL, NULL};
    mix_call c = {&d, 1, d.norm_weight};
    p.max = (double *)bench_alloc(QUERIES * g->tokens * sizeof(double));
    p.sum = bench_floats(QUERIES * g->tokens);
    p.mix = (float *)bench_alloc(mix_bytes);
    void *written = bench_alloc(mix_bytes); /* the limit must not destroy what merges read */
    bench_limit limit = limit_of(b, &d, block_bytes, written, mix_bytes);
    bench_entry entry[5] = {bench_contestant(run_both, &p), bench_contestant(run_inter, &p),
                            bench_contestant(run_merges, &p), bench_contestant(run_mixes, &c),
                            bench_contestant(run_read_and_write, &limit)};
    bench_measure(b, entry, 5);
    for (size_t i = 0; i < 5; i++) {
        bench_row row = row_of(&d, &entry[i], g, suffix[i], 1, i == 1 || i == 4 ? BLOCKS : SOURCES);
        if (i == 0 || i == 2 || i == 3) {
            entry[i].run(entry[i].context);
            row.error = mix_error(&d, query_of(&d, QUERIES - 1), d.norm_weight);
            row.bound = 1e-6;
        }
        if (i == 0) row.compared = "speed/mixes", row.ratio = bench_speed(&entry[0], &entry[3]);
        if (i == 1) row.limit = "read", row.fraction = bench_speed(&entry[1], &entry[4]);
        if (i == 1 || i == 4) row.bytes = (double)(block_bytes + mix_bytes);
        bench_print_row(b, &row);
    }
    free(p.max), free(p.sum), free(p.mix), free(written);
    data_free(&d);
}

/* Plain C beside the best instruction set. */
static void scalar(void *bench_, const void *group_, int isa_, size_t threads) {
    bench *b = (bench *)bench_;
    const group *g = (const group *)group_;
    data d[2] = {data_new(b, g, ATTNRES_ISA_SCALAR, threads),
                 data_new(b, g, (attnres_isa)isa_, threads)};
    mix_call c[2] = {{&d[0], 1, NULL}, {&d[1], 1, NULL}};
    bench_entry entry[2] = {bench_contestant(run_mix, &c[0]), bench_contestant(run_mix, &c[1])};
    bench_measure(b, entry, 2);
    for (size_t i = 0; i < 2; i++) {
        bench_row row = row_of(&d[i], &entry[i], g, "", 1, SOURCES);
        row.error = mix_error(&d[i], query_of(&d[i], 0), NULL);
        row.bound = 1e-6;
#ifndef __AVX__ /* else the plain C is not plain */
        if (i) row.compared = "speed/scalar", row.ratio = bench_speed(&entry[1], &entry[0]);
#endif
        bench_print_row(b, &row);
        data_free(&d[i]);
    }
}

/* ==== The run ================================================================================== */

/* bench_group.flags that go together. */
enum {
    FULL_RUNS = BENCH_NO_SCALAR | BENCH_NOT_QUICK,
    QUICK_LESS = BENCH_NO_SCALAR | BENCH_QUICK_BEST,
    BESIDE_SCALAR = BENCH_NO_SCALAR | BENCH_ONE_THREAD | BENCH_BEST_ONLY
};

static const group groups[] = {
    /* name, function, measures, left out; dim, tokens, type */
    {{"mix-2304-1", mix, 1, 0}, 2304, 1, ATTNRES_F32},
    {{"mix-2304-64", mix, 1, 0}, 2304, 64, ATTNRES_F32},
    {{"mix-2304-512", mix, 1, BENCH_QUICK_BEST}, 2304, 512, ATTNRES_F32},
    {{"mix-2304-2048", mix, 1, BENCH_QUICK_BEST}, 2304, 2048, ATTNRES_F32},
    {{"mix-bf16-2304-512", mix, 1, BENCH_QUICK_BEST}, 2304, 512, ATTNRES_BF16},
    {{"mix-7168-1", mix, 1, 0}, 7168, 1, ATTNRES_F32},
    {{"mix-7168-64", mix, 1, BENCH_NOT_QUICK}, 7168, 64, ATTNRES_F32},
    {{"mix-7168-512", mix, 1, BENCH_QUICK_BEST}, 7168, 512, ATTNRES_F32},
    {{"mix-7168-2048", mix, 1, FULL_RUNS}, 7168, 2048, ATTNRES_F32},
    {{"mix-bf16-7168-512", mix, 1, BENCH_NOT_QUICK}, 7168, 512, ATTNRES_BF16},
    {{"scalar-2304-64", scalar, 1, BESIDE_SCALAR}, 2304, 64, ATTNRES_F32},
    {{"two-phase-2304-1", two_phase, 1, 0}, 2304, 1, ATTNRES_F32},
    {{"two-phase-2304-64", two_phase, 1, BENCH_QUICK_BEST}, 2304, 64, ATTNRES_F32},
    {{"two-phase-2304-512", two_phase, 1, FULL_RUNS}, 2304, 512, ATTNRES_F32},
    {{"two-phase-7168-1", two_phase, 1, BENCH_NOT_QUICK}, 7168, 1, ATTNRES_F32},
    {{"two-phase-7168-64", two_phase, 1, QUICK_LESS}, 7168, 64, ATTNRES_F32},
};

static const char *isa_name(int isa) {
    return attnres_isa_name((attnres_isa)isa);
}

static int isa_is_available(int isa) {
    return attnres_isa_is_available((attnres_isa)isa);
}

int main(int argc, char **argv) {
    static bench b;
    b.name = "bench_attnres", b.counted = "sources";
    b.groups = groups, b.n_groups = sizeof groups / sizeof *groups, b.group_bytes = sizeof *groups;
    b.suite = &b;
    b.best_isa = (int)attnres_isa_best();
    b.isa_name = isa_name, b.isa_is_available = isa_is_available;
    b.quick_seconds = 12;
    return bench_main(&b, argc, argv);
}
