/* test_mla.c - attention over the latent cache against expanded keys and values in float64. */
#define MLA_IMPLEMENTATION
#include "../examples/mla.h"

#include "test.h"

#define MOST_THREADS 8

/* No two dimensions alike; the latent is wider than the lanes and no multiple of them. */
static const mla_desc small = {3, 13, 5, 11, 37, 0, 1e-6f, LINEAR_F32};

typedef struct problem {
    mla_desc desc;
    size_t n;
    float *kv_b_values; /* [n_heads * (dim_nope + dim_v)][latent] */
    linear kv_b;
    float *q;     /* [n][n_heads][dim_nope + dim_rope] */
    float *cache; /* [n][latent + dim_rope] */
    float *out;   /* [n][n_heads][dim_v] */
    linear_run run;
    void *scratch;
} problem;

static problem problem_new(mla_desc desc, size_t n, float query_scale) {
    problem p = {0};
    size_t width = mla_cache_width(&desc), heads = n * desc.n_heads;
    size_t rows = desc.n_heads * (desc.dim_nope + desc.dim_v);
    size_t n_q = heads * (desc.dim_nope + desc.dim_rope);
    p.desc = desc, p.n = n;
    p.kv_b_values = test_floats(rows * desc.latent);
    p.q = test_floats(n_q), p.cache = test_floats(n * width);
    p.out = test_floats(heads * desc.dim_v);
    test_fill_normal(p.kv_b_values, rows * desc.latent);
    test_fill_normal(p.q, n_q);
    test_fill_normal(p.cache, n * width);
    for (size_t i = 0; i < n_q; i++)
        p.q[i] *= query_scale;
    p.kv_b.type = LINEAR_F32, p.kv_b.rows = rows, p.kv_b.cols = desc.latent;
    p.kv_b.data = (const unsigned char *)p.kv_b_values;
    p.scratch = test_alloc(mla_scratch_bytes(&desc, n, n, MOST_THREADS));
    return p;
}

static void problem_free(problem *p) {
    free(p->kv_b_values), free(p->q), free(p->cache), free(p->out);
    free(p->scratch);
}

/* Tokens first .. first + n - 1, after those before them. */
static void attend(const problem *p, size_t first, size_t n, float *out) {
    const mla_desc *d = &p->desc;
    mla_seq seq = {p->cache, first, n};
    mla_attend(&p->run, d, &p->kv_b, p->q + first * d->n_heads * (d->dim_nope + d->dim_rope), &seq,
               1, out + first * d->n_heads * d->dim_v, p->scratch);
}

/* y = rows first .. first + n_rows - 1 of kv_b, times a latent: part of an expanded key or value */
static void expand(const problem *p, size_t first, size_t n_rows, size_t token, double *y) {
    const float *c = p->cache + token * mla_cache_width(&p->desc);
    for (size_t r = 0; r < n_rows; r++) {
        y[r] = 0;
        for (size_t i = 0; i < p->desc.latent; i++)
            y[r] += (double)p->kv_b_values[(first + r) * p->desc.latent + i] * (double)c[i];
    }
}

/* The definition: every key and value expanded, plain softmax over n_keys. */
static double expanded(const problem *p, size_t token, size_t head, size_t n_keys, double *out) {
    const mla_desc *d = &p->desc;
    size_t dim_q = d->dim_nope + d->dim_rope, first = head * (d->dim_nope + d->dim_v);
    const float *q = p->q + (token * d->n_heads + head) * dim_q;
    double *scores = (double *)test_alloc(n_keys * sizeof(double)), top = -HUGE_VAL, sum = 0;
    double key[64], value[64];
    for (size_t j = 0; j < n_keys; j++) {
        expand(p, first, d->dim_nope, j, key);
        for (size_t i = 0; i < d->dim_rope; i++)
            key[d->dim_nope + i] = (double)p->cache[j * mla_cache_width(d) + d->latent + i];
        for (size_t i = 0; i < dim_q; i++)
            scores[j] += (double)q[i] * key[i];
        scores[j] /= sqrt((double)dim_q);
        if (scores[j] > top) top = scores[j];
    }
    memset(out, 0, d->dim_v * sizeof *out);
    for (size_t j = 0; j < n_keys; j++) {
        double weight = exp(scores[j] - top);
        expand(p, first + d->dim_nope, d->dim_v, j, value);
        for (size_t i = 0; i < d->dim_v; i++)
            out[i] += weight * value[i];
        sum += weight;
    }
    for (size_t i = 0; i < d->dim_v; i++)
        out[i] /= sum;
    free(scores);
    return top;
}

static void check_against_expanded(const problem *p, double bound) {
    const mla_desc *d = &p->desc;
    double want[64];
    for (size_t t = 0; t < p->n; t++)
        for (size_t h = 0; h < d->n_heads; h++) {
            expanded(p, t, h, t + 1, want);
            CHECK_AT_MOST(
                "attention",
                test_relative_l2(p->out + (t * d->n_heads + h) * d->dim_v, want, d->dim_v), bound);
        }
}

/* Token t sees t + 1 keys: each number of keys from 1 to 300, in one call. */
static void every_length_at_once(void) {
    problem p = problem_new(small, 300, 0.3f);
    attend(&p, 0, p.n, p.out);
    check_against_expanded(&p, 2e-6);
    problem_free(&p);
}

/* Any split into calls gives the same bits, the cache beyond the call untouched. */
static void any_split(void) {
    problem p = problem_new(small, 300, 1);
    size_t n_out = p.desc.n_heads * p.desc.dim_v;
    float *out = test_floats(300 * n_out);
    attend(&p, 0, p.n, p.out);
    for (size_t step = 1; step < 200; step += 31) {
        for (size_t t = 0; t < 300; t += step)
            attend(&p, t, 300 - t < step ? 300 - t : step, out);
        CHECK(memcmp(out, p.out, 300 * n_out * sizeof *out) == 0);
    }
    free(out);
    problem_free(&p);
}

/* Scores of +-200 and beyond: one key takes nearly all. float32 scores of that size are themselves
 * uncertain by some 1e-5, which the weights inherit. */
static void large_scores(void) {
    problem p = problem_new(small, 70, 12);
    double out[64], top = 0;
    for (size_t t = 0; t < p.n; t++) {
        double score = expanded(&p, t, 0, t + 1, out);
        if (score > top) top = score;
    }
    CHECK(top > 200);
    attend(&p, 0, p.n, p.out);
    check_against_expanded(&p, 2e-4);
    problem_free(&p);
}

/* With one key its value comes out whatever its score, -200 included. */
static void one_key(void) {
    for (int sign = -1; sign <= 1; sign++) {
        problem p = problem_new(small, 1, 30.0f * (float)sign);
        attend(&p, 0, 1, p.out);
        check_against_expanded(&p, 1e-6);
        problem_free(&p);
    }
}

/* A NaN in the cache reaches the tokens that see it and no earlier one. */
static void nan_stays_causal(void) {
    problem p = problem_new(small, 20, 1);
    size_t n_out = p.desc.n_heads * p.desc.dim_v;
    p.cache[10 * mla_cache_width(&p.desc) + 3] = NAN;
    attend(&p, 0, p.n, p.out);
    for (size_t i = 0; i < 20 * n_out; i++)
        CHECK(!isnan(p.out[i]) == (i < 10 * n_out));
    problem_free(&p);
}

int main(void) {
    TEST(every_length_at_once);
    TEST(any_split);
    TEST(large_scores);
    TEST(one_key);
    TEST(nan_stays_causal);
    return test_summary();
}
