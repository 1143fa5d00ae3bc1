/* bench_driver.c - how fast the example driver's dense parts are here: weights times vectors against
 * reading the weights once or against the multiply-adds, and attention over a latent cache against
 * the multiply-adds, with the error beside it.
 *
 *     bench_driver [--quick] [--csv FILE] [--isa NAME] [--threads N] [--only SUBSTRING]
 *
 * Shapes are those of Kimi Linear 48B. See README.md for how to read the rows.
 */
#include "bench.h"

#define MLA_IMPLEMENTATION
#include "../examples/mla.h"

enum { CHECKED = 16 /* outputs of each token that are compared with float64 */ };

typedef struct group {
    bench_group is;
    linear_type type;
    size_t rows, cols; /* mla: heads, keys */
    size_t tokens;
} group;

static bench_limit limit_of(bench *b, int isa, size_t threads, const void *data, size_t bytes) {
    bench_limit limit;
    memset(&limit, 0, sizeof limit);
    limit.pool = &b->pool;
    limit.kernels = bench_kernels_of(kda_isa_name((kda_isa)isa));
    limit.threads = threads;
    limit.data = (unsigned char *)(uintptr_t)data;
    limit.bytes = bytes;
    return limit;
}

static void open_pool(parallel *pool, size_t threads) {
    error e;

    if (!parallel_open(pool, threads, &e)) bench_die(e.text);
}

/* ==== Weights times vectors ==================================================================== */

typedef struct product {
    linear w;
    linear_run run;
    unsigned char *bytes;
    size_t n_bytes, n;
    float *x, *y; /* [n][cols], [n][rows] */
} product;

#define GROUP 64 /* elements of integer weights that share a scale */

/* Random bytes that are no infinity and no NaN in any type. */
static void fill_weights(product *p, linear_type type) {
    size_t elements = p->w.rows * p->w.cols, data = p->w.rows * linear_row_bytes(type, p->w.cols);
    float *x = bench_floats(4096);
    bench_fill(x, 4096, 5, -1, 1);
    p->w.scale_type = LINEAR_BF16, p->w.group = GROUP;
    p->n_bytes = linear_bytes(&p->w);
    p->bytes = (unsigned char *)bench_alloc(p->n_bytes);
    p->w.data = p->bytes;
    if (!linear_is_plain(type)) {
        p->w.scale = p->bytes + data; /* bf16 numbers of bytes 0x3c are 0.0115 */
        for (size_t i = 0; i < data; i++) p->bytes[i] = (unsigned char)(i * 2654435761u >> 13);
        memset(p->bytes + data, type == LINEAR_MXFP4 ? 120 : 0x3c, p->n_bytes - data);
    } else {
        for (size_t i = 0; i < elements; i += 4096) {
            size_t n = elements - i < 4096 ? elements - i : 4096;
            linear_compress(type, x, n, p->bytes + i * (data / elements));
            x[i / 4096 % 4096] = -x[i / 4096 % 4096]; /* no two rows alike */
        }
    }
    free(x);
}

static double product_error(const product *p) {
    float *row = bench_floats(p->w.cols);
    bench_error e = {0, 0};
    for (size_t i = 0; i < CHECKED; i++) {
        size_t r = i * (p->w.rows - 1) / (CHECKED - 1);
        linear_expand(&p->w, r, 0, p->w.cols, row);
        for (size_t t = 0; t < p->n; t++) {
            double want = 0;
            for (size_t c = 0; c < p->w.cols; c++)
                want += (double)row[c] * (double)p->x[t * p->w.cols + c];
            bench_error_add(&e, (double)p->y[t * p->w.rows + r], want);
        }
    }
    free(row);
    return bench_error_value(&e);
}

static void run_product(void *context) {
    const product *p = (const product *)context;
    linear_apply(&p->run, &p->w, p->x, p->n, p->w.cols, p->y, p->w.rows);
}

/* Few vectors against reading the weights, many against the multiply-adds. */
static void dense(void *bench_, const void *group_, int isa, size_t threads) {
    bench *b = (bench *)bench_;
    const group *g = (const group *)group_;
    parallel pool;
    product p;
    char dims[32];
    memset(&p, 0, sizeof p);
    open_pool(&pool, threads);
    p.run.isa = (kda_isa)isa, p.run.pool = &pool;
    p.w.type = g->type, p.w.rows = g->rows, p.w.cols = g->cols, p.n = g->tokens;
    fill_weights(&p, g->type);
    p.x = bench_floats(p.n * g->cols), p.y = bench_floats(p.n * g->rows);
    bench_fill(p.x, p.n * g->cols, 1, -1, 1);
    bench_limit limit = limit_of(b, isa, threads, p.bytes, p.n_bytes);
    bench_entry entry[2] = {bench_contestant(run_product, &p),
                            bench_contestant(p.n == 1 ? bench_run_read : bench_run_fma, &limit)};
    bench_measure(b, entry, 2);
    run_product(&p);
    snprintf(dims, sizeof dims, "%zux%zu", g->rows, g->cols);
    bench_row row = bench_row_of(&entry[0], 1, g->is.name, "");
    row.isa = kda_isa_name((kda_isa)isa), row.dims = dims;
    row.tokens = p.n, row.threads = threads;
    row.bytes = (double)p.n_bytes;
    row.flops = 2.0 * (double)(g->rows * g->cols * p.n);
    row.error = product_error(&p), row.bound = 1e-6;
    row.limit = p.n == 1 ? "read" : "fma";
    row.fraction = bench_speed(&entry[0], &entry[1]);
    if (p.n > 1) row.fraction *= row.flops / bench_fma_flops(&limit);
    bench_print_row(b, &row);
    free(p.bytes), free(p.x), free(p.y);
    parallel_close(&pool);
}

/* ==== Attention over a latent cache ============================================================ */

typedef struct attention {
    mla_desc desc;
    linear_run run;
    mla_seq seq;
    float *absorbed, *mix;
    void *scratch;
} attention;

static void run_attention(void *context) {
    const attention *a = (const attention *)context;
    mla_mix(&a->run, &a->desc, a->absorbed, &a->seq, 1, a->mix, a->scratch);
}

/* The last token's first and last head. */
static double attention_error(const attention *a) {
    const mla_desc *d = &a->desc;
    size_t width = mla_cache_width(d), n_keys = a->seq.n_past + a->seq.n_tokens;
    double *score = (double *)bench_alloc(n_keys * sizeof *score);
    double *want = (double *)bench_alloc(d->latent * sizeof *want);
    float *key = bench_floats(width);
    bench_error e = {0, 0};
    for (size_t end = 0; end < 2; end++) {
        size_t row = (a->seq.n_tokens - 1) * d->n_heads + end * (d->n_heads - 1);
        const float *q = a->absorbed + row * mla_query_stride(d);
        double max = -HUGE_VAL, sum = 0;
        for (size_t pass = 0; pass < 2; pass++) {
            for (size_t j = 0; j < n_keys; j++) {
                linear cached = linear_plain(d->cache, n_keys, width, a->seq.cache);
                linear_expand(&cached, j, 0, width, key);
                if (pass == 0) {
                    for (size_t i = 0; i < width; i++) score[j] += (double)q[i] * (double)key[i];
                    if (score[j] > max) max = score[j];
                } else {
                    double weight = exp(score[j] - max);
                    sum += weight;
                    for (size_t i = 0; i < d->latent; i++) want[i] += weight * (double)key[i];
                }
            }
        }
        for (size_t i = 0; i < d->latent; i++)
            bench_error_add(&e, (double)a->mix[row * mla_mix_stride(d) + i], want[i] / sum);
        memset(score, 0, n_keys * sizeof *score), memset(want, 0, d->latent * sizeof *want);
    }
    free(score), free(want), free(key);
    return bench_error_value(&e);
}

/* Scores with a standard deviation near 2. */
static attention attention_new(const group *g, int isa, parallel *pool) {
    attention a;
    memset(&a, 0, sizeof a);
    a.desc.n_heads = g->rows, a.desc.dim_nope = 128, a.desc.dim_rope = 64, a.desc.dim_v = 128;
    a.desc.latent = 512, a.desc.norm_eps = 1e-6f, a.desc.cache = g->type;
    a.run.isa = (kda_isa)isa, a.run.pool = pool;
    a.seq.n_tokens = g->tokens, a.seq.n_past = g->cols - g->tokens;
    size_t width = mla_cache_width(&a.desc), rows = g->tokens * g->rows;
    size_t n_q = rows * mla_query_stride(&a.desc);
    a.absorbed = bench_floats(n_q);
    a.mix = bench_floats(rows * mla_mix_stride(&a.desc));
    bench_fill(a.absorbed, n_q, 2, -0.25f, 0.25f);
    a.scratch = bench_alloc(mla_scratch_bytes(&a.desc, g->tokens, g->cols, pool->n_threads));
    a.seq.cache = bench_alloc(g->cols * mla_cache_row_bytes(&a.desc));
    float *key = bench_floats(width);
    for (size_t j = 0; j < g->cols; j++) {
        bench_fill(key, width, j + 10, -1, 1);
        linear_compress(a.desc.cache, key, width,
                        (unsigned char *)a.seq.cache + j * mla_cache_row_bytes(&a.desc));
    }
    free(key);
    return a;
}

/* Multiply-adds of a score over all channels and of the mix over the latent, for each key seen. */
static double attention_flops(const attention *a) {
    double seen = 0;
    for (size_t t = 0; t < a->seq.n_tokens; t++) seen += (double)(a->seq.n_past + t + 1);
    return 2.0 * seen * (double)a->desc.n_heads *
           (double)(mla_cache_width(&a->desc) + a->desc.latent);
}

/* Peak of products of bf16 in pairs: registers only, as the benches' multiply-adds. */
#if KERNELS_HAVE_AVX512 && (defined(__clang__) || __GNUC__ >= 11)
static KERNELS_BF16_TARGET void bf16_steps(size_t steps) {
    __m512 acc[16];
    __m512bh x = (__m512bh)_mm512_set1_epi32(bench_zero);
#pragma GCC unroll 16
    for (size_t i = 0; i < 16; i++) acc[i] = _mm512_set1_ps((float)i); /* no two sums alike */
    for (; steps > 0; steps--) {
#pragma GCC unroll 16
        for (size_t i = 0; i < 16; i++) acc[i] = _mm512_dpbf16_ps(acc[i], x, x);
    }
    for (size_t i = 1; i < 16; i++) acc[0] = _mm512_add_ps(acc[0], acc[i]);
    bench_sink = _mm512_reduce_add_ps(acc[0]);
}
static const double bf16_flops_per_step = 16 * 64;
#else
static void bf16_steps(size_t steps) {
    (void)steps;
}
static const double bf16_flops_per_step = 1;
#endif

static void attend(bench *b, const group *g, int isa, size_t threads, bool bf16_dots) {
    parallel pool;
    open_pool(&pool, threads);
    attention a = attention_new(g, isa, &pool);
    bench_kernels peak = *bench_kernels_of(kda_isa_name((kda_isa)isa));
    bench_limit limit = limit_of(b, isa, threads, NULL, 0);
    a.run.bf16_dots = bf16_dots;
    if (!bf16_dots || mla_has_bf16_dots(&a.run, &a.desc)) {
        if (bf16_dots) peak.fma = bf16_steps, peak.flops_per_step = bf16_flops_per_step;
        limit.kernels = &peak;
        bench_entry entry[2] = {bench_contestant(run_attention, &a),
                                bench_contestant(bench_run_fma, &limit)};
        bench_measure(b, entry, 2);
        bench_row row = bench_row_of(&entry[0], 1, g->is.name, "");
        row.isa = kda_isa_name((kda_isa)isa), row.count = g->rows, row.dims = "512+64";
        row.tokens = g->tokens, row.threads = threads;
        row.bytes = (double)(g->cols * mla_cache_row_bytes(&a.desc));
        row.flops = attention_flops(&a);
        row.error = attention_error(&a), row.bound = bf16_dots ? 1e-2 : 2e-6;
        row.limit = bf16_dots ? "bf16" : "fma";
        row.fraction = bench_speed(&entry[0], &entry[1]) * row.flops / bench_fma_flops(&limit);
        bench_print_row(b, &row);
    }
    free(a.absorbed), free(a.mix), free(a.scratch), free(a.seq.cache);
    parallel_close(&pool);
}

static void mla(void *bench_, const void *group_, int isa, size_t threads) {
    attend((bench *)bench_, (const group *)group_, isa, threads, false);
}

/* No row where the processor has no such products. */
static void mla_dots(void *bench_, const void *group_, int isa, size_t threads) {
    attend((bench *)bench_, (const group *)group_, isa, threads, true);
}

/* ==== The run ================================================================================== */

enum {
    FULL_RUNS = BENCH_NO_SCALAR | BENCH_NOT_QUICK,
    ONE_QUICK = BENCH_NO_SCALAR | BENCH_QUICK_BEST
};

static const group groups[] = {
    /* name, function, measures, left out; type, rows, cols, tokens */
    {{"linear-bf16-1", dense, 1, ONE_QUICK}, LINEAR_BF16, 18432, 2304, 1},
    {{"linear-f16-1", dense, 1, FULL_RUNS}, LINEAR_F16, 18432, 2304, 1},
    {{"linear-f32-1", dense, 1, FULL_RUNS}, LINEAR_F32, 18432, 2304, 1},
    {{"linear-mxfp4-1", dense, 1, ONE_QUICK}, LINEAR_MXFP4, 36864, 2304, 1},
    {{"linear-int8-1", dense, 1, ONE_QUICK}, LINEAR_INT8, 36864, 2304, 1},
    {{"linear-uint4-1", dense, 1, ONE_QUICK}, LINEAR_UINT4, 73728, 2304, 1},
    {{"linear-bf16-4", dense, 1, FULL_RUNS}, LINEAR_BF16, 4096, 2304, 4},
    {{"linear-bf16-16", dense, 1, FULL_RUNS}, LINEAR_BF16, 4096, 2304, 16},
    {{"linear-bf16-128", dense, 1, ONE_QUICK}, LINEAR_BF16, 4096, 2304, 128},
    {{"linear-bf16-512", dense, 1, FULL_RUNS}, LINEAR_BF16, 4096, 2304, 512},
    {{"linear-mxfp4-128", dense, 1, FULL_RUNS}, LINEAR_MXFP4, 4096, 2304, 128},
    {{"linear-uint4-128", dense, 1, FULL_RUNS}, LINEAR_UINT4, 4096, 2304, 128},
    /* of mla: cache type, heads, keys, tokens; -dots: with products of bf16 */
    {{"mla-bf16-4096", mla, 1, FULL_RUNS}, LINEAR_BF16, 32, 4096, 1},
    {{"mla-bf16-32768", mla, 1, ONE_QUICK}, LINEAR_BF16, 32, 32768, 1},
    {{"mla-bf16-32768-dots", mla_dots, 1, FULL_RUNS}, LINEAR_BF16, 32, 32768, 1},
    {{"mla-f16-32768", mla, 1, FULL_RUNS}, LINEAR_F16, 32, 32768, 1},
    {{"mla-f32-32768", mla, 1, FULL_RUNS}, LINEAR_F32, 32, 32768, 1},
    {{"mla-bf16-prefill-64", mla, 1, FULL_RUNS}, LINEAR_BF16, 32, 4096, 64},
};

static const char *isa_name(int isa) {
    return kda_isa_name((kda_isa)isa);
}

static int isa_is_available(int isa) {
    return kda_isa_is_available((kda_isa)isa);
}

int main(int argc, char **argv) {
    static bench b;
    b.name = "bench_driver", b.counted = "heads";
    b.groups = groups, b.n_groups = sizeof groups / sizeof *groups, b.group_bytes = sizeof *groups;
    b.suite = &b;
    b.best_isa = (int)kda_isa_best();
    b.isa_name = isa_name, b.isa_is_available = isa_is_available;
    b.quick_seconds = 6;
    return bench_main(&b, argc, argv);
}
