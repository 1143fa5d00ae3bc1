/* test_mla.c - attention over the latent cache against expanded keys and values in float64. */
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
    for (size_t i = 0; i < n_q; i++) p.q[i] *= query_scale;
    p.kv_b.type = LINEAR_F32, p.kv_b.rows = rows, p.kv_b.cols = desc.latent;
    p.kv_b.data = (const unsigned char *)p.kv_b_values;
    p.scratch = test_scratch(mla_scratch_bytes(&desc, n, n, MOST_THREADS));
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
    double key[160], value[64];
    for (size_t j = 0; j < n_keys; j++) {
        expand(p, first, d->dim_nope, j, key);
        for (size_t i = 0; i < d->dim_rope; i++)
            key[d->dim_nope + i] = (double)p->cache[j * mla_cache_width(d) + d->latent + i];
        for (size_t i = 0; i < dim_q; i++) scores[j] += (double)q[i] * key[i];
        scores[j] /= sqrt((double)dim_q);
        if (scores[j] > top) top = scores[j];
    }
    memset(out, 0, d->dim_v * sizeof *out);
    for (size_t j = 0; j < n_keys; j++) {
        double weight = exp(scores[j] - top);
        expand(p, first + d->dim_nope, d->dim_v, j, value);
        for (size_t i = 0; i < d->dim_v; i++) out[i] += weight * value[i];
        sum += weight;
    }
    for (size_t i = 0; i < d->dim_v; i++) out[i] /= sum;
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

/* Published models have heads wider than a tile of rows: whole tiles and the rest of one. */
static void wide_heads(void) {
    static const size_t dims[] = {MLA_TILE, MLA_TILE + 1, 2 * MLA_TILE + 20};
    for (size_t i = 0; i < sizeof dims / sizeof *dims; i++) {
        mla_desc desc = small;
        desc.dim_nope = dims[i];
        problem p = problem_new(desc, 9, 0.3f);
        attend(&p, 0, p.n, p.out);
        check_against_expanded(&p, 2e-6);
        problem_free(&p);
    }
}

/* Null is a run of zeros: the best instruction set, in the calling thread. */
static void no_run(void) {
    problem p = problem_new(small, 20, 1);
    mla_seq seq = {p.cache, 0, p.n};
    size_t n_out = p.n * p.desc.n_heads * p.desc.dim_v;
    float *out = test_floats(n_out);
    attend(&p, 0, p.n, p.out);
    mla_attend(NULL, &p.desc, &p.kv_b, p.q, &seq, 1, out, p.scratch);
    CHECK(memcmp(out, p.out, n_out * sizeof *out) == 0);
    free(out);
    problem_free(&p);
}

/* Any split into calls gives the same bits, the cache beyond the call untouched. */
static void any_split(void) {
    problem p = problem_new(small, 300, 1);
    size_t n_out = p.desc.n_heads * p.desc.dim_v;
    float *out = test_floats(300 * n_out);
    attend(&p, 0, p.n, p.out);
    for (size_t step = 1; step < 200; step += 31) {
        for (size_t t = 0; t < 300; t += step) attend(&p, t, 300 - t < step ? 300 - t : step, out);
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

/* A NaN in the cache, in the latent or in the shared key channels alone, reaches the tokens that see it
 * and no earlier one. */
static void nan_stays_causal_with(kda_isa isa) {
    const size_t channels[] = {3, small.latent + 1};
    if (!kda_isa_is_available(isa)) {
        test_skip("not in this machine and build");
        return;
    }
    for (size_t c = 0; c < sizeof channels / sizeof *channels; c++) {
        problem p = problem_new(small, 20, 1);
        size_t n_out = p.desc.n_heads * p.desc.dim_v;
        p.run.isa = isa;
        p.cache[10 * mla_cache_width(&p.desc) + channels[c]] = NAN;
        attend(&p, 0, p.n, p.out);
        for (size_t i = 0; i < 20 * n_out; i++) CHECK(!isnan(p.out[i]) == (i < 10 * n_out));
        problem_free(&p);
    }
}

static void nan_stays_causal_scalar(void) {
    nan_stays_causal_with(KDA_ISA_SCALAR);
}
static void nan_stays_causal_avx2(void) {
    nan_stays_causal_with(KDA_ISA_AVX2);
}
static void nan_stays_causal_avx512(void) {
    nan_stays_causal_with(KDA_ISA_AVX512);
}
static void nan_stays_causal_neon(void) {
    nan_stays_causal_with(KDA_ISA_NEON);
}

/* ---- Long caches, types, threads: against float64 over the cache as it is ---- */

/* A cache of any type and absorbed queries for it: what mla_mix takes. */
typedef struct mix_problem {
    mla_desc desc;
    mla_seq seq;
    float *absorbed, *mix;
    void *scratch;
} mix_problem;

static mix_problem mix_new_of(const mla_desc *desc, size_t n_keys, size_t n_tokens) {
    mix_problem p;
    memset(&p, 0, sizeof p);
    p.desc = *desc;
    linear_type type = desc->cache;
    size_t n_heads = desc->n_heads;
    size_t width = mla_cache_width(&p.desc), rows = n_tokens * n_heads;
    p.seq.n_past = n_keys - n_tokens, p.seq.n_tokens = n_tokens;
    p.seq.cache = test_alloc(n_keys * mla_cache_row_bytes(&p.desc));
    p.absorbed = test_floats(rows * mla_query_stride(&p.desc));
    p.mix = test_floats(rows * mla_mix_stride(&p.desc));
    p.scratch = test_scratch(mla_scratch_bytes(&p.desc, n_tokens, n_keys, MOST_THREADS));
    float *key = test_floats(width);
    for (size_t j = 0; j < n_keys; j++) {
        test_fill_normal(key, width);
        linear_compress(type, key, width,
                        (unsigned char *)p.seq.cache + j * mla_cache_row_bytes(&p.desc));
    }
    free(key);
    test_fill_normal(p.absorbed, rows * mla_query_stride(&p.desc));
    for (size_t i = 0; i < rows * mla_query_stride(&p.desc); i++) p.absorbed[i] *= 0.4f;
    return p;
}

static mix_problem mix_new(size_t n_heads, linear_type type, size_t n_keys, size_t n_tokens) {
    mla_desc desc = small;
    desc.n_heads = n_heads, desc.cache = type;
    return mix_new_of(&desc, n_keys, n_tokens);
}

static void mix_free(mix_problem *p) {
    free(p->seq.cache), free(p->absorbed), free(p->mix), free(p->scratch);
}

static void mix_true(const mix_problem *p, size_t token, size_t head, double *want) {
    const mla_desc *d = &p->desc;
    size_t width = mla_cache_width(d), n_keys = p->seq.n_past + token + 1;
    const float *q = p->absorbed + (token * d->n_heads + head) * mla_query_stride(d);
    linear cached = linear_plain(d->cache, n_keys, width, p->seq.cache);
    float key[128];
    double top = -HUGE_VAL, sum = 0, *score = (double *)test_alloc(n_keys * sizeof *score);
    for (size_t j = 0; j < n_keys; j++) {
        linear_expand(&cached, j, 0, width, key);
        for (size_t i = 0; i < width; i++) score[j] += (double)q[i] * (double)key[i];
        if (score[j] > top) top = score[j];
    }
    memset(want, 0, d->latent * sizeof *want);
    for (size_t j = 0; j < n_keys; j++) {
        linear_expand(&cached, j, 0, width, key);
        sum += exp(score[j] - top);
        for (size_t i = 0; i < d->latent; i++) want[i] += exp(score[j] - top) * (double)key[i];
    }
    for (size_t i = 0; i < d->latent; i++) want[i] /= sum;
    free(score);
}

static void check_mix(const mix_problem *p, size_t token, size_t head, double bound) {
    double want[96];
    mix_true(p, token, head, want);
    const float *got = p->mix + (token * p->desc.n_heads + head) * mla_mix_stride(&p->desc);
    CHECK_AT_MOST("mix", test_relative_l2(got, want, p->desc.latent), bound);
}

/* Each number of threads gives the first one's bits. */
static void check_threads(mix_problem *p, kda_isa isa) {
    size_t n = p->seq.n_tokens * p->desc.n_heads * mla_mix_stride(&p->desc);
    float *first = test_floats(n);
    for (size_t threads = 1; threads <= MOST_THREADS; threads += threads == 3 ? 5 : 1) {
        parallel pool;
        error e;
        linear_run run = {isa, &pool, false};
        CHECK(parallel_open(&pool, threads, &e));
        memset(p->mix, 0xff, n * sizeof *p->mix);
        mla_mix(&run, &p->desc, p->absorbed, &p->seq, 1, p->mix, p->scratch);
        parallel_close(&pool);
        if (threads == 1) memcpy(first, p->mix, n * sizeof *first);
        for (size_t row = 0; row < p->seq.n_tokens * p->desc.n_heads; row++) {
            size_t at = row * mla_mix_stride(&p->desc);
            CHECK(memcmp(first + at, p->mix + at, p->desc.latent * sizeof *first) == 0);
        }
    }
    free(first);
}

/* Around the ends of tiles and ranges, one token and several, few heads and more than a group. */
static void long_caches_with(kda_isa isa) {
    static const size_t keys[] = {1, 63, 64, 65, MLA_RANGE, MLA_RANGE + 1, 2 * MLA_RANGE + 70};
    if (!kda_isa_is_available(isa)) {
        test_skip("not in this machine and build");
        return;
    }
    for (int type = LINEAR_F32; type <= LINEAR_BF16; type++)
        for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
            size_t most = keys[i] < MLA_RANGE ? 23 : type == LINEAR_BF16 ? 12 : 1; /* takes long */
            for (size_t n_tokens = 1; n_tokens <= keys[i] && n_tokens <= most; n_tokens += 11) {
                mix_problem p = mix_new(i % 2 ? 3 : 7, (linear_type)type, keys[i], n_tokens);
                check_threads(&p, isa);
                check_mix(&p, 0, 0, 3e-6);
                check_mix(&p, n_tokens - 1, p.desc.n_heads - 1, 3e-6);
                mix_free(&p);
            }
        }
    mix_problem many = mix_new(70, LINEAR_BF16, 200, 3);
    check_threads(&many, isa);
    check_mix(&many, 1, 69, 3e-6);
    mix_free(&many);
}

static void long_caches_scalar(void) {
    long_caches_with(KDA_ISA_SCALAR);
}
static void long_caches_avx2(void) {
    long_caches_with(KDA_ISA_AVX2);
}
static void long_caches_avx512(void) {
    long_caches_with(KDA_ISA_AVX512);
}
static void long_caches_neon(void) {
    long_caches_with(KDA_ISA_NEON);
}

/* Sequences of a call, short ones, long ones and an empty one, give the bits that each gives alone. */
static void sequences_are_independent(void) {
    static const size_t keys[] = {5, MLA_RANGE + 9, 70, 1, 2 * MLA_RANGE};
    static const size_t tokens[] = {1, 1, 4, 1, 1};
    enum { N = 5, ROWS = 8 };
    mix_problem alone[N];
    mla_seq seqs[N + 1];
    size_t heads = 3, stride = mla_query_stride(&small), mix_stride = mla_mix_stride(&small);
    float *absorbed = test_floats(ROWS * heads * stride), *q = absorbed;
    float *mix = test_floats(ROWS * heads * mix_stride);
    void *scratch = test_scratch(mla_scratch_bytes(&small, ROWS, 2 * MLA_RANGE, 2));
    parallel pool;
    error e;
    CHECK(parallel_open(&pool, 2, &e));
    linear_run run = {KDA_ISA_AUTO, &pool, false};
    for (size_t i = 0; i < N; i++) {
        alone[i] = mix_new(heads, LINEAR_F32, keys[i], tokens[i]);
        mla_mix(NULL, &small, alone[i].absorbed, &alone[i].seq, 1, alone[i].mix, alone[i].scratch);
        memcpy(q, alone[i].absorbed, tokens[i] * heads * stride * sizeof *q);
        q += tokens[i] * heads * stride;
        seqs[i + (i >= 3)] = alone[i].seq;
    }
    seqs[3].cache = seqs[0].cache, seqs[3].n_past = 5, seqs[3].n_tokens = 0;
    mla_mix(&run, &small, absorbed, seqs, N + 1, mix, scratch);
    const float *got = mix;
    for (size_t i = 0; i < N; i++)
        for (size_t row = 0; row < tokens[i] * heads; row++, got += mix_stride)
            CHECK(memcmp(got, alone[i].mix + row * mix_stride, small.latent * sizeof *got) == 0);
    for (size_t i = 0; i < N; i++) mix_free(&alone[i]);
    parallel_close(&pool);
    free(absorbed), free(mix), free(scratch);
}

/* Keys of 3 .. 200 and a few tokens, with products of bf16 pairs: operands of 8 bits give scores of size
 * 5 an error near 1e-2, which the weights inherit. A NaN stays with those who see it. */
static void check_bf16_dots(const linear_run *run, const mla_desc *desc) {
    for (size_t n_keys = 3; n_keys < 200; n_keys += 31)
        for (size_t n_tokens = 1; n_tokens <= 3; n_tokens += 2) {
            mix_problem p = mix_new_of(desc, n_keys, n_tokens);
            mla_mix(run, &p.desc, p.absorbed, &p.seq, 1, p.mix, p.scratch);
            check_mix(&p, 0, 0, 2e-2);
            check_mix(&p, n_tokens - 1, desc->n_heads - 1, 2e-2);
            unsigned char *last =
                (unsigned char *)p.seq.cache + (n_keys - 1) * mla_cache_row_bytes(desc);
            memset(last, 0xff, mla_cache_row_bytes(desc));
            mla_mix(run, &p.desc, p.absorbed, &p.seq, 1, p.mix, p.scratch);
            for (size_t row = 0; row < n_tokens * desc->n_heads; row++)
                CHECK(!isnan(p.mix[row * mla_mix_stride(desc)]) ==
                      (row < (n_tokens - 1) * desc->n_heads));
            mix_free(&p);
        }
}

static const mla_desc of_pairs = {5, 1, 32, 1, 96, 0, 1e-6f, LINEAR_BF16};

/* One head, several by twos, and an odd number of them. */
static void bf16_dots(void) {
    static const size_t heads[] = {1, 5, 6, 8, 14};
    linear_run run = {KDA_ISA_AUTO, NULL, true};
    mla_desc desc = of_pairs;
    if (!mla_has_bf16_dots(&run, &desc)) {
        test_skip("not in this machine and build");
        return;
    }
    for (size_t i = 0; i < sizeof heads / sizeof *heads; i++) {
        desc.n_heads = heads[i];
        check_bf16_dots(&run, &desc);
    }
}

/* Where there are none, a run that allows them has the bits of any other. */
static void runs_without_bf16_dots(void) {
    static const struct {
        kda_isa isa;
        size_t dim_rope, latent;
        linear_type cache;
    } cases[] = {{KDA_ISA_SCALAR, 32, 96, LINEAR_BF16},
                 {KDA_ISA_AUTO, 32, 96, LINEAR_F16},
                 {KDA_ISA_AUTO, 31, 96, LINEAR_BF16},
                 {KDA_ISA_AUTO, 16, 80, LINEAR_BF16}};
    linear_run best = {KDA_ISA_AUTO, NULL, true};
    CHECK(mla_has_bf16_dots(NULL, &of_pairs) == mla_has_bf16_dots(&best, &of_pairs));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        linear_run plain = {cases[i].isa, NULL, false}, allowing = {cases[i].isa, NULL, true};
        mla_desc desc = of_pairs;
        desc.dim_rope = cases[i].dim_rope, desc.latent = cases[i].latent;
        desc.cache = cases[i].cache;
        CHECK_MSG(!mla_has_bf16_dots(&allowing, &desc), "case %zu", i);
        mix_problem p = mix_new_of(&desc, 70, 2);
        size_t n = 2 * desc.n_heads * mla_mix_stride(&desc);
        float *want = test_floats(n);
        mla_mix(&plain, &desc, p.absorbed, &p.seq, 1, p.mix, p.scratch);
        memcpy(want, p.mix, n * sizeof *want);
        mla_mix(&allowing, &desc, p.absorbed, &p.seq, 1, p.mix, p.scratch);
        for (size_t row = 0; row < n; row += mla_mix_stride(&desc))
            CHECK_MSG(memcmp(want + row, p.mix + row, desc.latent * sizeof *want) == 0, "case %zu",
                      i);
        free(want);
        mix_free(&p);
    }
}

static void sizes(void) {
    mla_desc huge = small;
    huge.n_heads = (size_t)1 << 40, huge.latent = (size_t)1 << 20;
    CHECK(mla_scratch_bytes(&small, 1, 1000, 1) > 0);
    CHECK(mla_scratch_bytes(&huge, 64, 1000, 1) == 0);
    CHECK(mla_scratch_bytes(&small, PTRDIFF_MAX, 1000, 1) == 0);
}

int main(void) {
    TEST(every_length_at_once);
    TEST(wide_heads);
    TEST(no_run);
    TEST(any_split);
    TEST(large_scores);
    TEST(one_key);
    TEST(nan_stays_causal_scalar);
    TEST(nan_stays_causal_avx2);
    TEST(nan_stays_causal_avx512);
    TEST(nan_stays_causal_neon);
    TEST(long_caches_scalar);
    TEST(long_caches_avx2);
    TEST(long_caches_avx512);
    TEST(long_caches_neon);
    TEST(sequences_are_independent);
    TEST(bf16_dots);
    TEST(runs_without_bf16_dots);
    TEST(sizes);
    return test_summary();
}
