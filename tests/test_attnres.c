/* attnres.h: values against float64 transcriptions of the definitions, the promises about bits, the
 * bank's rule, and every misuse. The golden files are golden/ops/attnres_*.safetensors. */
#if defined(__unix__) || defined(__APPLE__)
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS, MAP_NORESERVE */
#define _DARWIN_C_SOURCE
#include <sys/mman.h>
#define HAVE_MMAP 1
#else
#define HAVE_MMAP 0
#endif

#define ATTNRES_IMPLEMENTATION
#include "../attnres.h"
#include "test.h"
#define SAFETENSORS_IMPLEMENTATION
#include "../examples/safetensors.h"

/* ==== 1. The definitions in float64 =========================================================== */

/* Weights and mixture of one token; rows: [n] pointers to [dim]; c is norm weight times query. */
static void reference_mix(size_t n, size_t dim, double *const *rows, const float *c, double eps,
                          double scale, double *weights, double *o) {
    double max = -HUGE_VAL, sum = 0;
    for (size_t j = 0; j < n; j++) {
        double dot = 0, squares = 0;
        for (size_t i = 0; i < dim; i++) {
            dot += (double)c[i] * rows[j][i];
            squares += rows[j][i] * rows[j][i];
        }
        weights[j] = scale * dot / sqrt(squares / (double)dim + eps);
        if (weights[j] > max) max = weights[j];
    }
    for (size_t j = 0; j < n; j++) sum += weights[j] = exp(weights[j] - max);
    for (size_t i = 0; i < dim; i++) o[i] = 0;
    for (size_t j = 0; j < n; j++) {
        weights[j] /= sum;
        for (size_t i = 0; i < dim; i++) o[i] += weights[j] * rows[j][i];
    }
}

static void reference_norm(size_t dim, const float *weight, double eps, double *x) {
    double squares = 0;
    for (size_t i = 0; i < dim; i++) squares += x[i] * x[i];
    for (size_t i = 0; i < dim; i++) x[i] *= (double)weight[i] / sqrt(squares / (double)dim + eps);
}

/* ==== 2. A case: sources, a query, a norm, and ways to run them =============================== */

typedef struct mix_case {
    attnres_desc desc;
    size_t n, tokens;
    float *values; /* [n][tokens][dim] */
    attnres_input *sources;
    float *query;
    attnres_norm norm; /* owns its weight */
} mix_case;

static const attnres_norm no_norm = {NULL, 0};

/* Queries are scaled so that scores have the standard deviation `spread`. */
static mix_case case_make(size_t n, size_t tokens, size_t dim, float spread) {
    mix_case x;
    memset(&x, 0, sizeof x);
    test_seed(n * 1000003 + tokens * 1009 + dim);
    x.desc.dim = dim;
    x.desc.eps = 1e-5f;
    x.n = n;
    x.tokens = tokens;
    x.values = test_floats(n * tokens * dim);
    test_fill_normal(x.values, n * tokens * dim);
    x.sources = (attnres_input *)test_alloc(n * sizeof *x.sources);
    for (size_t j = 0; j < n; j++)
        x.sources[j] = attnres_in_f32(x.values + j * tokens * dim, (ptrdiff_t)dim);
    x.query = test_floats(dim);
    float *weight = test_floats(dim);
    for (size_t i = 0; i < dim; i++) {
        x.query[i] = spread * test_normal() / sqrtf((float)dim);
        weight[i] = test_uniform_f32(0.5f, 1.5f);
    }
    x.norm.weight = weight;
    x.norm.eps = 1e-6f;
    return x;
}

static void case_free(mix_case *x) {
    free(x->values);
    free(x->sources);
    free(x->query);
    free((void *)(uintptr_t)x->norm.weight);
}

static attnres_mix_args case_args(const mix_case *x, float *o) {
    attnres_mix_args args;
    memset(&args, 0, sizeof args);
    args.n_tokens = x->tokens;
    args.sources = x->sources;
    args.n_sources = x->n;
    args.query = x->query;
    args.norm = x->norm;
    args.o = attnres_out_f32(o, (ptrdiff_t)x->desc.dim);
    return args;
}

/* Scratch of just the size asked for, so that a sanitizer sees a byte too many. */
static attnres_run run_make(size_t bytes) {
    attnres_run run;
    memset(&run, 0, sizeof run);
    run.scratch = test_scratch(bytes);
    run.scratch_bytes = bytes;
    return run;
}

static attnres_result mix(const attnres_desc *desc, const attnres_mix_args *args) {
    attnres_run run = run_make(attnres_mix_scratch_bytes(desc, args->n_sources, NULL));
    attnres_result result = attnres_mix(desc, args, &run);
    free(run.scratch);
    return result;
}

static attnres_result inter(const attnres_desc *desc, const attnres_inter_args *args) {
    attnres_run run =
        run_make(attnres_inter_scratch_bytes(desc, args->n_sources, args->n_queries, NULL));
    attnres_result result = attnres_inter(desc, args, &run);
    free(run.scratch);
    return result;
}

static attnres_result merge(const attnres_desc *desc, const attnres_merge_args *args) {
    attnres_run run = run_make(attnres_merge_scratch_bytes(desc, NULL));
    attnres_result result = attnres_merge(desc, args, &run);
    free(run.scratch);
    return result;
}

/* What mixing the case should give; weights may be null. */
static void case_reference(const mix_case *x, const attnres_norm *norm, double *o,
                           double *weights) {
    size_t dim = x->desc.dim;
    double scale = x->desc.scale > 0 ? (double)x->desc.scale : 1;
    double **rows = (double **)test_alloc(x->n * sizeof *rows);
    double *p = (double *)test_alloc(x->n * sizeof *p);
    for (size_t j = 0; j < x->n; j++) rows[j] = (double *)test_alloc(dim * sizeof **rows);
    for (size_t t = 0; t < x->tokens; t++) {
        for (size_t j = 0; j < x->n; j++)
            for (size_t i = 0; i < dim; i++)
                rows[j][i] = (double)x->values[(j * x->tokens + t) * dim + i];
        reference_mix(x->n, dim, rows, x->query, (double)x->desc.eps, scale, p, o + t * dim);
        if (norm->weight) reference_norm(dim, norm->weight, (double)norm->eps, o + t * dim);
        if (weights) memcpy(weights + t * x->n, p, x->n * sizeof *p);
    }
    for (size_t j = 0; j < x->n; j++) free(rows[j]);
    free(rows);
    free(p);
}

static int same_bits(const float *a, const float *b, size_t n) {
    return memcmp(a, b, n * sizeof *a) == 0;
}

/* Both phases over the case, its last source as the partial if there are more than one; the
 * query is the second of three, so that rows of queries cannot be confused. */
static void two_phases(const mix_case *x, const attnres_norm *norm, float *o) {
    size_t dim = x->desc.dim, rows = 3 * x->tokens, stored = x->n > 1 ? x->n - 1 : 1;
    float *other = test_floats(dim);
    double *max = (double *)test_alloc(rows * sizeof *max);
    float *sum = test_floats(rows), *mixes = test_floats(rows * dim);
    const float *queries[3] = {other, x->query, other};
    attnres_inter_args first;
    attnres_merge_args second;
    test_fill_normal(other, dim);
    memset(&first, 0, sizeof first);
    first.n_tokens = x->tokens;
    first.sources = x->sources;
    first.n_sources = stored;
    first.queries = queries;
    first.n_queries = 3;
    first.max = max, first.sum = sum, first.mix = mixes;
    CHECK(inter(&x->desc, &first) == ATTNRES_OK);
    memset(&second, 0, sizeof second);
    second.n_tokens = x->tokens;
    second.max = max + x->tokens;
    second.sum = sum + x->tokens;
    second.mix = mixes + x->tokens * dim;
    if (x->n > 1) {
        second.partial = x->sources[stored];
        second.query = x->query;
    }
    second.norm = *norm;
    second.o = attnres_out_f32(o, (ptrdiff_t)dim);
    CHECK(merge(&x->desc, &second) == ATTNRES_OK);
    free(other);
    free(max);
    free(sum);
    free(mixes);
}

/* ==== 3. Golden files ========================================================================= */

static float *load(const st_checkpoint *file, const char *name) {
    const st_tensor *tensor = st_find(file, name);
    CHECK_MSG(tensor && tensor->dtype == ST_F32, "no float32 tensor %s", name);
    if (!tensor || tensor->dtype != ST_F32) return test_floats(1);
    float *x = test_floats(tensor->elements);
    for (size_t i = 0; i < tensor->elements; i++) x[i] = st_load_f32(tensor->data + 4 * i);
    return x;
}

static double *load_f64(const st_checkpoint *file, const char *name) {
    const st_tensor *tensor = st_find(file, name);
    CHECK_MSG(tensor && tensor->dtype == ST_F64, "no float64 tensor %s", name);
    if (!tensor || tensor->dtype != ST_F64) return (double *)test_alloc(sizeof(double));
    double *x = (double *)test_alloc(tensor->elements * sizeof *x);
    for (size_t i = 0; i < tensor->elements; i++) x[i] = st_load_f64(tensor->data + 8 * i);
    return x;
}

/* The file's inputs as a case, with the query folded. */
static mix_case golden_case(const st_checkpoint *file) {
    mix_case x;
    const st_tensor *sources = st_find(file, "sources");
    float *query = load(file, "query"), *key_norm = load(file, "key_norm_weight");
    float *eps = load(file, "eps");
    memset(&x, 0, sizeof x);
    x.n = sources->dims[0];
    x.tokens = sources->dims[1];
    x.desc.dim = sources->dims[2];
    x.desc.eps = x.norm.eps = eps[0];
    x.values = load(file, "sources");
    x.sources = (attnres_input *)test_alloc(x.n * sizeof *x.sources);
    for (size_t j = 0; j < x.n; j++)
        x.sources[j] = attnres_in_f32(x.values + j * x.tokens * x.desc.dim, (ptrdiff_t)x.desc.dim);
    x.query = test_floats(x.desc.dim);
    CHECK(attnres_fold_query(x.desc.dim, key_norm, query, x.query) == ATTNRES_OK);
    x.norm.weight = load(file, "output_norm_weight");
    free(query);
    free(key_norm);
    free(eps);
    return x;
}

/* The file has its weights as [n][tokens]. */
static void golden_check_weights(const mix_case *x, const float *weights, const double *want) {
    double *transposed = (double *)test_alloc(x->n * x->tokens * sizeof *transposed);
    for (size_t j = 0; j < x->n; j++)
        for (size_t t = 0; t < x->tokens; t++)
            transposed[t * x->n + j] = want[j * x->tokens + t];
    CHECK_AT_MOST("weights", test_relative_l2(weights, transposed, x->n * x->tokens), 1e-6);
    free(transposed);
}

static void golden_check(const mix_case *x, const double *o_want, const double *normed_want,
                         const double *weights_want) {
    size_t count = x->tokens * x->desc.dim;
    float *o = test_floats(count), *weights = test_floats(x->n * x->tokens);
    attnres_mix_args args = case_args(x, o);
    args.weights = weights;
    CHECK(mix(&x->desc, &args) == ATTNRES_OK);
    CHECK_AT_MOST("o_normed", test_relative_l2(o, normed_want, count), 1e-6);
    golden_check_weights(x, weights, weights_want);
    args.norm = no_norm;
    CHECK(mix(&x->desc, &args) == ATTNRES_OK);
    CHECK_AT_MOST("o", test_relative_l2(o, o_want, count), 1e-6);
    golden_check_weights(x, weights, weights_want);
    two_phases(x, &x->norm, o);
    CHECK_AT_MOST("o_normed in two phases", test_relative_l2(o, normed_want, count), 1e-6);
    free(o);
    free(weights);
}

static void golden_file(const char *path) {
    st_checkpoint file;
    error e;
    bool opened = st_open_file(&file, path, &e);
    CHECK_MSG(opened, "%s", e.text);
    if (!opened) return;
    mix_case x = golden_case(&file);
    double *o = load_f64(&file, "o_f64"), *normed = load_f64(&file, "o_normed_f64");
    double *weights = load_f64(&file, "weights_f64");
    golden_check(&x, o, normed, weights);
    free(o);
    free(normed);
    free(weights);
    case_free(&x);
    st_close(&file);
}

static void golden_l1(void) {
    golden_file("tests/golden/ops/attnres_l1.safetensors");
}
static void golden_l9(void) {
    golden_file("tests/golden/ops/attnres_l9.safetensors");
}
static void golden_large_and_small(void) {
    golden_file("tests/golden/ops/attnres_large_and_small.safetensors");
}
static void golden_peaked(void) {
    golden_file("tests/golden/ops/attnres_peaked.safetensors");
}
static void golden_zero_query_is_mean(void) {
    golden_file("tests/golden/ops/attnres_zero_query_is_mean.safetensors");
}

/* ==== 4. Values =============================================================================== */

static const size_t all_dims[] = {1, 2, 3, 31, 32, 33, 64, 65, 100, 2304};
static const size_t all_counts[] = {1, 2, 3, 5, 9, 33, 187};
#define COUNT(array) (sizeof(array) / sizeof *(array))

/* Every 1009th float from the lowest result that is not 0 to the first that is infinite. */
static void exp_is_within_two_ulp(void) {
    for (uint32_t bits = 0; bits < 0x42d20000u; bits += 1009)
        for (uint32_t sign = 0; sign < 2; sign++) {
            uint32_t pattern = bits | sign << 31;
            float x;
            memcpy(&x, &pattern, sizeof x);
            double want = exp((double)x), got = (double)attnresi_exp(x);
            if (want > 0x1.fffffep127) {
                CHECK_MSG(x > 88.7f && (got > 0x1.fffffcp127), "exp(%a)", (double)x);
                continue;
            }
            int exponent;
            frexp(want, &exponent);
            double ulp = ldexp(1, exponent > -125 ? exponent - 24 : -149);
            CHECK_MSG(fabs(got - want) <= 2 * ulp, "exp(%a): %a", (double)x, got);
        }
    CHECK(attnresi_exp(0.0f) == 1 && attnresi_exp(-0.0f) == 1);
    CHECK(attnresi_exp(-HUGE_VALF) == 0 && attnresi_exp(-1e30f) == 0);
    CHECK(attnresi_exp(HUGE_VALF) == HUGE_VALF && attnresi_exp(89) == HUGE_VALF);
    CHECK(attnresi_exp(NAN) != attnresi_exp(NAN));
}

static void check_against_float64(size_t n, size_t dim, float scale) {
    mix_case x = case_make(n, 2, dim, 2);
    size_t count = x.tokens * dim;
    x.desc.scale = scale;
    float *o = test_floats(count), *weights = test_floats(n * x.tokens);
    double *want = (double *)test_alloc(count * sizeof *want);
    double *want_weights = (double *)test_alloc(n * x.tokens * sizeof *want_weights);
    attnres_mix_args args = case_args(&x, o);
    args.weights = weights;
    CHECK(mix(&x.desc, &args) == ATTNRES_OK);
    case_reference(&x, &x.norm, want, want_weights);
    CHECK_AT_MOST("normed", test_relative_l2(o, want, count), 1e-6);
    CHECK_AT_MOST("weights", test_relative_l2(weights, want_weights, n * x.tokens), 1e-6);
    args.norm = no_norm;
    CHECK(mix(&x.desc, &args) == ATTNRES_OK);
    case_reference(&x, &no_norm, want, NULL);
    CHECK_AT_MOST("raw", test_relative_l2(o, want, count), 1e-6);
    free(o);
    free(weights);
    free(want);
    free(want_weights);
    case_free(&x);
}

static void mix_matches_float64(void) {
    for (size_t a = 0; a < COUNT(all_counts); a++)
        for (size_t b = 0; b < COUNT(all_dims); b++)
            if (all_counts[a] * all_dims[b] < 100000)
                check_against_float64(all_counts[a], all_dims[b], 0);
    check_against_float64(2, 70000, 0); /* rows beyond what a block should hold */
}

/* The score of a lone source is attnres_inter's max. Its error against the root of the sum of the
 * squares of its terms; queries of a size that makes that about `spread`. */
static void check_scores(size_t dim, float spread, double bound) {
    mix_case x = case_make(1, 40, dim, spread);
    float *mixes = test_floats(x.tokens * dim), *sum = test_floats(x.tokens);
    double *max = (double *)test_alloc(x.tokens * sizeof *max);
    const float *queries[1] = {x.query};
    attnres_inter_args args;
    memset(&args, 0, sizeof args);
    args.n_tokens = x.tokens, args.sources = x.sources, args.n_sources = 1;
    args.queries = queries, args.n_queries = 1;
    args.max = max, args.sum = sum, args.mix = mixes;
    CHECK(inter(&x.desc, &args) == ATTNRES_OK);
    for (size_t t = 0; t < x.tokens; t++) {
        double dot = 0, terms = 0, squares = 0;
        for (size_t i = 0; i < dim; i++) {
            double v = (double)x.values[t * dim + i], term = (double)x.query[i] * v;
            dot += term, terms += term * term, squares += v * v;
        }
        double rms = sqrt(squares / (double)dim + (double)x.desc.eps);
        CHECK_AT_MOST("score", fabs(max[t] - dot / rms) / (sqrt(terms) / rms), bound);
    }
    free(mixes), free(sum), free(max);
    case_free(&x);
}

/* Those of a small query are near float64, those of a large one are float64. */
static void scores_are_near_float64(void) {
    for (size_t b = 0; b < COUNT(all_dims); b++) {
        check_scores(all_dims[b], 1, 4e-7);
        check_scores(all_dims[b], 400, 1e-13);
    }
    check_scores(7168, 2, 4e-7);
}

static void scale_multiplies_the_scores(void) {
    check_against_float64(5, 33, 0.25f);
    check_against_float64(5, 33, 1);
    check_against_float64(5, 33, 3);
}

static void last_element_counts(void) {
    for (size_t b = 1; b < COUNT(all_dims); b++) {
        mix_case x = case_make(3, 1, all_dims[b], 2);
        float *o = test_floats(all_dims[b]), before[3], after[3];
        attnres_mix_args args = case_args(&x, o);
        args.weights = before;
        CHECK(mix(&x.desc, &args) == ATTNRES_OK);
        x.values[all_dims[b] - 1] += 100;
        args.weights = after;
        CHECK(mix(&x.desc, &args) == ATTNRES_OK);
        CHECK(before[0] != after[0] && before[1] != after[1]);
        free(o);
        case_free(&x);
    }
}

static void two_phases_equal_one(void) {
    for (size_t a = 0; a < COUNT(all_counts); a++)
        for (size_t b = 0; b < COUNT(all_dims); b++) {
            if (all_counts[a] * all_dims[b] >= 100000) continue;
            mix_case x = case_make(all_counts[a], 3, all_dims[b], 2);
            size_t count = x.tokens * all_dims[b];
            float *one = test_floats(count), *two = test_floats(count);
            attnres_mix_args args = case_args(&x, one);
            CHECK(mix(&x.desc, &args) == ATTNRES_OK);
            two_phases(&x, &x.norm, two);
            CHECK_AT_MOST("normed", test_relative_l2_f32(two, one, count), 1e-6);
            args.norm = no_norm;
            CHECK(mix(&x.desc, &args) == ATTNRES_OK);
            two_phases(&x, &no_norm, two);
            CHECK_AT_MOST("raw", test_relative_l2_f32(two, one, count), 1e-6);
            free(one);
            free(two);
            case_free(&x);
        }
}

/* The first sub-layer of a paper's block: nothing but stored sources. */
static void check_merge_without_a_partial(int normed) {
    mix_case x = case_make(4, 3, 33, 2);
    size_t dim = x.desc.dim, count = x.tokens * dim;
    float *one = test_floats(count), *two = test_floats(count);
    double max[3];
    float sum[3];
    const float *queries[1] = {x.query};
    attnres_mix_args args = case_args(&x, one);
    if (!normed) args.norm = no_norm;
    CHECK(mix(&x.desc, &args) == ATTNRES_OK);
    attnres_inter_args first;
    memset(&first, 0, sizeof first);
    first.n_tokens = x.tokens, first.sources = x.sources, first.n_sources = x.n;
    first.queries = queries, first.n_queries = 1;
    first.max = max, first.sum = sum, first.mix = two;
    CHECK(inter(&x.desc, &first) == ATTNRES_OK);
    attnres_merge_args second;
    memset(&second, 0, sizeof second);
    second.n_tokens = x.tokens;
    second.max = max, second.sum = sum, second.mix = two;
    second.norm = args.norm;
    second.o = attnres_out_f32(two, (ptrdiff_t)dim); /* in place of mix */
    CHECK(merge(&x.desc, &second) == ATTNRES_OK);
    CHECK_AT_MOST("two phases", test_relative_l2_f32(two, one, count), 1e-6);
    free(one);
    free(two);
    case_free(&x);
}

static void merge_without_a_partial(void) {
    check_merge_without_a_partial(0);
    check_merge_without_a_partial(1);
}

static void single_source_keeps_the_norm(void) {
    for (size_t b = 0; b < COUNT(all_dims); b++) {
        mix_case x = case_make(1, 2, all_dims[b], 2);
        size_t count = x.tokens * all_dims[b];
        float *o = test_floats(count), weights[2] = {0, 0};
        double *want = (double *)test_alloc(count * sizeof *want);
        for (size_t i = 0; i < count; i++) want[i] = (double)x.values[i];
        for (size_t t = 0; t < x.tokens; t++)
            reference_norm(all_dims[b], x.norm.weight, 1e-6, want + t * all_dims[b]);
        attnres_mix_args args = case_args(&x, o);
        args.weights = weights;
        args.query = NULL;
        CHECK(mix(&x.desc, &args) == ATTNRES_OK);
        CHECK_AT_MOST("normed", test_relative_l2(o, want, count), 1e-6);
        CHECK(weights[0] == 1 && weights[1] == 1);
        two_phases(&x, &x.norm, o);
        CHECK_AT_MOST("two phases", test_relative_l2(o, want, count), 1e-6);
        args.norm = no_norm;
        CHECK(mix(&x.desc, &args) == ATTNRES_OK);
        CHECK(same_bits(o, x.values, count));
        free(o);
        free(want);
        case_free(&x);
    }
}

static void zero_query_is_the_mean(void) {
    mix_case x = case_make(4, 2, 33, 0); /* a power of two: the mean has few roundings */
    size_t count = x.tokens * x.desc.dim;
    float *o = test_floats(count), weights[8];
    double *want = (double *)test_alloc(count * sizeof *want);
    for (size_t i = 0; i < count; i++)
        for (size_t j = 0; j < x.n; j++) want[i] += (double)x.values[j * count + i] / 4;
    attnres_mix_args args = case_args(&x, o);
    args.norm = no_norm;
    args.weights = weights;
    CHECK(mix(&x.desc, &args) == ATTNRES_OK);
    for (size_t i = 0; i < 8; i++) CHECK(weights[i] == 0.25f);
    CHECK_AT_MOST("mean", test_relative_l2(o, want, count), 1e-7);
    free(o);
    free(want);
    case_free(&x);
}

/* Scores of +size, -size and 0, the source with +size at `place`: the last is the partial. */
static void check_scores_of(float size, size_t place) {
    mix_case x = case_make(3, 1, 4, 0);
    float *o = test_floats(4), weights[3];
    const size_t opposite = (place + 1) % 3, orthogonal = (place + 2) % 3;
    const size_t largest = size > 0 ? place : opposite;
    const float want = size > 0 ? 1.0f : -1.0f;
    for (size_t i = 0; i < 4; i++) {
        x.query[i] = size / 4;
        x.values[place * 4 + i] = 1;
        x.values[opposite * 4 + i] = -1;
        x.values[orthogonal * 4 + i] = i % 2 ? 1.0f : -1.0f;
    }
    attnres_mix_args args = case_args(&x, o);
    args.norm = no_norm;
    args.weights = weights;
    CHECK(mix(&x.desc, &args) == ATTNRES_OK);
    for (size_t j = 0; j < 3; j++)
        CHECK(j == largest ? weights[j] == 1 : weights[j] >= 0 && weights[j] < 1e-38f);
    for (size_t i = 0; i < 4; i++) CHECK(o[i] == want);
    two_phases(&x, &no_norm, o);
    for (size_t i = 0; i < 4; i++) CHECK_AT_MOST("two phases", (double)fabsf(o[i] - want), 2e-7);
    free(o);
    case_free(&x);
}

static void extreme_scores_are_safe(void) {
    const float sizes[] = {200, -200, 1e4f, -1e4f, 1e30f, -1e30f};
    for (size_t i = 0; i < COUNT(sizes); i++)
        for (size_t place = 0; place < 3; place++) check_scores_of(sizes[i], place);
}

static void weights_sum_to_one(void) {
    for (size_t a = 0; a < COUNT(all_counts); a++) {
        mix_case x = case_make(all_counts[a], 5, 48, 4);
        float *o = test_floats(x.tokens * 48), *weights = test_floats(x.n * x.tokens);
        attnres_mix_args args = case_args(&x, o);
        args.weights = weights;
        CHECK(mix(&x.desc, &args) == ATTNRES_OK);
        for (size_t t = 0; t < x.tokens; t++) {
            double sum = 0;
            for (size_t j = 0; j < x.n; j++) {
                CHECK(weights[t * x.n + j] >= 0);
                sum += (double)weights[t * x.n + j];
            }
            CHECK_AT_MOST("1 - sum", fabs(1 - sum), 1e-6);
        }
        free(o);
        free(weights);
        case_free(&x);
    }
}

/* Squares past what float32 can hold: scores are right, and the fused norm gives its documented
 * zeros. Both sources point the query's way, one with 1e20 and one with 1: equal scores. */
static void squares_beyond_float32(void) {
    mix_case x = case_make(2, 1, 32, 1);
    float *o = test_floats(32), weights[2];
    x.desc.eps = 1e-30f;
    for (size_t i = 0; i < 32; i++) x.values[i] = 1e20f, x.values[32 + i] = 1, x.query[i] = 1;
    attnres_mix_args args = case_args(&x, o);
    args.weights = weights;
    args.norm.weight = NULL;
    CHECK(mix(&x.desc, &args) == ATTNRES_OK);
    CHECK(weights[0] == 0.5f && weights[1] == 0.5f);
    for (size_t i = 0; i < 32; i++) CHECK(o[i] == 0.5e20f);
    args.norm.weight = x.query, args.norm.eps = 1e-5f;
    CHECK(mix(&x.desc, &args) == ATTNRES_OK);
    for (size_t i = 0; i < 32; i++) CHECK(o[i] == 0);
    free(o);
    case_free(&x);
}

static void fold_multiplies_and_may_be_in_place(void) {
    float weight[3] = {2, 3, 4}, query[3] = {5, 6, 7}, folded[3];
    CHECK(attnres_fold_query(3, weight, query, folded) == ATTNRES_OK);
    CHECK(folded[0] == 10 && folded[1] == 18 && folded[2] == 28);
    CHECK(attnres_fold_query(3, weight, query, query) == ATTNRES_OK);
    CHECK(same_bits(query, folded, 3));
    CHECK(attnres_fold_query(3, weight, weight, weight) == ATTNRES_OK);
    CHECK(weight[0] == 4 && weight[1] == 9 && weight[2] == 16);
}

/* ==== 5. Same bits ============================================================================ */

static void cached_inverse_rms_same_bits(void) {
    for (size_t b = 0; b < COUNT(all_dims); b++) {
        mix_case x = case_make(3, 4, all_dims[b], 2);
        size_t count = x.tokens * all_dims[b];
        float *plain = test_floats(count), *cached = test_floats(count);
        double inv_rms[2][4];
        const double *const list[3] = {inv_rms[0], NULL, inv_rms[1]};
        attnres_mix_args args = case_args(&x, plain);
        CHECK(mix(&x.desc, &args) == ATTNRES_OK);
        CHECK(attnres_inverse_rms(&x.desc, 4, x.sources[0], inv_rms[0], NULL) == ATTNRES_OK);
        CHECK(attnres_inverse_rms(&x.desc, 4, x.sources[2], inv_rms[1], NULL) == ATTNRES_OK);
        args = case_args(&x, cached);
        args.inv_rms = list;
        CHECK(mix(&x.desc, &args) == ATTNRES_OK);
        CHECK(same_bits(plain, cached, count));
        inv_rms[1][3] *= 2; /* it is used, and per token */
        CHECK(mix(&x.desc, &args) == ATTNRES_OK);
        CHECK(same_bits(plain, cached, 3 * all_dims[b]));
        CHECK(!same_bits(plain, cached, count));
        free(plain);
        free(cached);
        case_free(&x);
    }
}

static void inverse_rms_is_right(void) {
    mix_case x = case_make(1, 3, 100, 1);
    double inv_rms[3];
    CHECK(attnres_inverse_rms(&x.desc, 3, x.sources[0], inv_rms, NULL) == ATTNRES_OK);
    for (size_t t = 0; t < 3; t++) {
        double squares = 0;
        for (size_t i = 0; i < 100; i++)
            squares += (double)x.values[t * 100 + i] * (double)x.values[t * 100 + i];
        double want = 1 / sqrt(squares / 100 + (double)x.desc.eps);
        CHECK_AT_MOST("inverse RMS", fabs(inv_rms[t] / want - 1), 1e-14);
    }
    case_free(&x);
}

/* The case's tokens first .. first + n - 1 by themselves. */
static void mix_part(const mix_case *x, size_t first, size_t n, float *o) {
    attnres_input *sources = (attnres_input *)test_alloc(x->n * sizeof *sources);
    for (size_t j = 0; j < x->n; j++)
        sources[j] = attnres_in_f32(x->values + (j * x->tokens + first) * x->desc.dim,
                                    (ptrdiff_t)x->desc.dim);
    attnres_mix_args args = case_args(x, o + first * x->desc.dim);
    args.n_tokens = n;
    args.sources = sources;
    CHECK(mix(&x->desc, &args) == ATTNRES_OK);
    free(sources);
}

static void token_splits_same_bits(void) {
    mix_case x = case_make(6, 7, 45, 2);
    size_t count = x.tokens * 45;
    float *whole = test_floats(count), *parts = test_floats(count);
    mix_part(&x, 0, 7, whole);
    for (size_t split = 0; split <= 7; split++) {
        memset(parts, 0, count * sizeof *parts);
        mix_part(&x, 0, split, parts);
        mix_part(&x, split, 7 - split, parts);
        CHECK(same_bits(whole, parts, count));
    }
    memset(parts, 0, count * sizeof *parts);
    for (size_t t = 0; t < 7; t++) mix_part(&x, t, 1, parts);
    CHECK(same_bits(whole, parts, count));
    free(whole);
    free(parts);
    case_free(&x);
}

/* Poison in one element of one source of token 2 spoils that token, in both ways, and no other. */
static void check_poison(float poison) {
    const size_t dim = 40;
    mix_case x = case_make(3, 5, dim, 2);
    size_t count = x.tokens * dim;
    float *one = test_floats(count), *two = test_floats(count), *o = test_floats(count);
    mix_part(&x, 0, 5, one);
    two_phases(&x, &x.norm, two);
    for (size_t j = 0; j < 3; j++) {
        float *element = x.values + (j * 5 + 2) * dim + 17, kept = *element;
        *element = poison;
        for (int phases = 1; phases <= 2; phases++) {
            const float *clean = phases == 1 ? one : two;
            if (phases == 1)
                mix_part(&x, 0, 5, o);
            else
                two_phases(&x, &x.norm, o);
            CHECK(same_bits(o, clean, 2 * dim));
            CHECK(same_bits(o + 3 * dim, clean + 3 * dim, 2 * dim));
            for (size_t i = 0; i < dim; i++) CHECK(isnan(o[2 * dim + i]));
        }
        *element = kept;
    }
    free(one);
    free(two);
    free(o);
    case_free(&x);
}

static void nan_stays_in_its_token(void) {
    check_poison(NAN);
    check_poison(HUGE_VALF);
    check_poison(-HUGE_VALF);
}

/* All floats 4 bytes past a multiple of 64, scratch 1 byte past: as if nowhere in particular. */
static void misaligned_buffers_same_bits(void) {
    const size_t dim = 33, tokens = 2, n = 3, count = tokens * dim;
    mix_case x = case_make(n, tokens, dim, 2);
    float *o = test_floats(count), *aligned = test_floats(count);
    float *room = test_floats(n * count + 3 * dim + count + 64);
    float *base = room + (64 - (uintptr_t)room % 64) / 4 % 16 + 1;
    attnres_input sources[3];
    attnres_mix_args args = case_args(&x, aligned);
    CHECK(mix(&x.desc, &args) == ATTNRES_OK);
    memcpy(base, x.values, n * count * sizeof *base);
    memcpy(base + n * count, x.query, dim * sizeof *base);
    memcpy(base + n * count + dim, x.norm.weight, dim * sizeof *base);
    for (size_t j = 0; j < n; j++) sources[j] = attnres_in_f32(base + j * count, (ptrdiff_t)dim);
    args.sources = sources;
    args.query = base + n * count;
    args.norm.weight = base + n * count + dim;
    args.o = attnres_out_f32(base + n * count + 3 * dim, (ptrdiff_t)dim);
    for (size_t past = 0; past < 64; past++) {
        attnres_run run;
        size_t bytes = attnres_mix_scratch_bytes(&x.desc, n, NULL);
        memset(&run, 0, sizeof run);
        unsigned char *scratch = (unsigned char *)test_scratch(bytes + past);
        run.scratch = scratch + past;
        run.scratch_bytes = bytes;
        CHECK(attnres_mix(&x.desc, &args, &run) == ATTNRES_OK);
        CHECK(same_bits(base + n * count + 3 * dim, aligned, count));
        free(scratch);
    }
    free(o);
    free(aligned);
    free(room);
    case_free(&x);
}

/* ==== 6. Views and aliasing =================================================================== */

/* Every tensor is some columns of a wider row, tokens run backwards in one source and in o, and a
 * source of stride 0 gives all tokens one row. What surrounds o must stay. */
static void strided_views_and_guard_bands(void) {
    const size_t dim = 37, tokens = 3, wide = 101, offset = 29;
    mix_case x = case_make(3, tokens, dim, 2);
    float *rows = test_floats(3 * tokens * wide), *out = test_floats((tokens + 2) * wide);
    float *dense = test_floats(tokens * dim);
    attnres_input sources[3];
    for (size_t t = 1; t < tokens; t++) /* source 2: one row for all */
        memcpy(x.values + (2 * tokens + t) * dim, x.values + 2 * tokens * dim, dim * sizeof *rows);
    attnres_mix_args args = case_args(&x, dense);
    CHECK(mix(&x.desc, &args) == ATTNRES_OK);

    for (size_t i = 0; i < 3 * tokens * wide; i++) rows[i] = NAN;
    for (size_t i = 0; i < (tokens + 2) * wide; i++) out[i] = 12345;
    for (size_t j = 0; j < 3; j++)
        for (size_t t = 0; t < tokens; t++) {
            size_t place = j == 1 ? tokens - 1 - t : t;
            memcpy(rows + (j * tokens + place) * wide + offset, x.values + (j * tokens + t) * dim,
                   dim * sizeof *rows);
        }
    sources[0] = attnres_in_f32(rows + offset, (ptrdiff_t)wide);
    sources[1] = attnres_in_f32(rows + (2 * tokens - 1) * wide + offset, -(ptrdiff_t)wide);
    sources[2] = attnres_in_f32(rows + 2 * tokens * wide + offset, 0);
    args.sources = sources;
    args.o = attnres_out_f32(out + tokens * wide + offset, -(ptrdiff_t)wide);
    CHECK(mix(&x.desc, &args) == ATTNRES_OK);
    for (size_t t = 0; t < tokens + 2; t++)
        for (size_t i = 0; i < wide; i++) {
            int inside = t >= 1 && t <= tokens && i >= offset && i < offset + dim;
            float want = inside ? dense[(tokens - t) * dim + i - offset] : 12345;
            CHECK(out[t * wide + i] == want);
        }
    free(rows);
    free(out);
    free(dense);
    case_free(&x);
}

static void output_may_be_a_source(void) {
    for (size_t j = 0; j < 3; j++)
        for (int normed = 0; normed < 2; normed++) {
            mix_case x = case_make(3, 4, 70, 2);
            size_t count = x.tokens * 70;
            float *apart = test_floats(count);
            attnres_mix_args args = case_args(&x, apart);
            if (!normed) args.norm = no_norm;
            CHECK(mix(&x.desc, &args) == ATTNRES_OK);
            args.o = attnres_out_f32(x.values + j * count, 70);
            CHECK(mix(&x.desc, &args) == ATTNRES_OK);
            CHECK(same_bits(x.values + j * count, apart, count));
            free(apart);
            case_free(&x);
        }
}

static void merge_output_may_be_its_input(void) {
    mix_case x = case_make(2, 2, 40, 2); /* source 0 serves as the unnormalised mixture */
    double max[2] = {0.5, -1};
    float apart[80], sum[2] = {1, 3};
    attnres_merge_args args;
    memset(&args, 0, sizeof args);
    args.n_tokens = 2;
    args.max = max, args.sum = sum, args.mix = x.values;
    args.partial = x.sources[1];
    args.query = x.query;
    args.norm = x.norm;
    args.o = attnres_out_f32(apart, 40);
    CHECK(merge(&x.desc, &args) == ATTNRES_OK);
    float *in_place = test_floats(2 * 80);
    for (size_t which = 0; which < 2; which++) {
        memcpy(in_place, x.values, 2 * 80 * sizeof *in_place);
        args.mix = in_place;
        args.partial.data = in_place + 80;
        args.o.data = in_place + 80 * which;
        CHECK(merge(&x.desc, &args) == ATTNRES_OK);
        CHECK(same_bits(in_place + 80 * which, apart, 80));
    }
    free(in_place);
    case_free(&x);
}

/* Tokens more than 2^32 bytes and 2^31 elements apart, in address space that is never filled. */
static void strides_past_2_to_the_31(void) {
#if HAVE_MMAP && SIZE_MAX > 0xffffffffu
    const size_t far = ((size_t)1 << 31) + 12345, bytes = (far + 4096) * sizeof(float);
    void *map = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED) {
        test_skip("no address space");
        return;
    }
    float *room = (float *)map;
    mix_case x = case_make(2, 2, 40, 2);
    float *dense = test_floats(80);
    attnres_mix_args args = case_args(&x, dense);
    CHECK(mix(&x.desc, &args) == ATTNRES_OK);
    for (size_t t = 0; t < 2; t++)
        memcpy(room + t * far, x.values + t * 40, 40 * sizeof *room);
    x.sources[0] = attnres_in_f32(room, (ptrdiff_t)far);
    args.o = attnres_out_f32(room + far + 1000, -(ptrdiff_t)far);
    CHECK(mix(&x.desc, &args) == ATTNRES_OK);
    CHECK(same_bits(room + far + 1000, dense, 40));
    CHECK(same_bits(room + 1000, dense + 40, 40));
    free(dense);
    case_free(&x);
    munmap(map, bytes);
#else
    test_skip("needs mmap and 64 bits");
#endif
}

/* ==== 7. The bank ============================================================================= */

/* Sub-layer l of a made-up model: smooth, and different for each l. */
static double sublayer_element(size_t l, size_t dim, size_t i, double here, double next) {
    double phase = 0.37 * (double)l + 2.1 * (double)i / (double)dim;
    return sin(1.3 * here + phase) + 0.5 * next * cos(phase);
}

typedef struct toy_model {
    attnres_bank_desc desc;
    float *queries;   /* [2 * n_layers + 1][dim], folded */
    float *norms;     /* [2 * n_layers + 1][dim] */
    float *embedding; /* [n_tokens][dim] */
} toy_model;

static attnres_bank_desc bank_desc(size_t n_tokens, size_t n_layers, size_t block_size,
                                   attnres_unit unit) {
    attnres_bank_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.dim = 19;
    desc.n_tokens = n_tokens;
    desc.n_layers = n_layers;
    desc.block_size = block_size;
    desc.unit = unit;
    desc.eps = 1e-5f;
    return desc;
}

static toy_model model_make(size_t n_tokens, size_t n_layers, size_t block_size,
                            attnres_unit unit) {
    toy_model m;
    m.desc = bank_desc(n_tokens, n_layers, block_size, unit);
    size_t dim = m.desc.dim, reads = 2 * n_layers + 1;
    test_seed(n_layers * 131 + block_size * 7 + (size_t)unit);
    m.queries = test_floats(reads * dim);
    m.norms = test_floats(reads * dim);
    m.embedding = test_floats(n_tokens * dim);
    for (size_t i = 0; i < reads * dim; i++) {
        m.queries[i] = test_normal() / 3;
        m.norms[i] = test_uniform_f32(0.5f, 1.5f);
    }
    test_fill_normal(m.embedding, n_tokens * dim);
    return m;
}

static void model_free(toy_model *m) {
    free(m->queries);
    free(m->norms);
    free(m->embedding);
}

static attnres_norm model_norm(const toy_model *m, size_t l) {
    attnres_norm norm;
    norm.weight = m->norms + l * m->desc.dim;
    norm.eps = 1e-6f;
    return norm;
}

/* One token's way through the model in float64: a growing list of vectors, and every read. */
typedef struct depth {
    const toy_model *m;
    double *sources[64];
    size_t n;
    double *reads; /* [2 * n_layers + 1][dim] */
} depth;

static double *vector(size_t dim) {
    return (double *)test_alloc(dim * sizeof(double));
}

/* Read l from the listed sources, and `extra` after them unless it is null. */
static void depth_mix(depth *d, size_t l, double *extra) {
    size_t dim = d->m->desc.dim, n = d->n;
    double weights[65], *rows[65];
    memcpy(rows, d->sources, n * sizeof *rows);
    if (extra) rows[n++] = extra;
    reference_mix(n, dim, rows, d->m->queries + l * dim, (double)d->m->desc.eps, 1, weights,
                  d->reads + l * dim);
    reference_norm(dim, d->m->norms + l * dim, 1e-6, d->reads + l * dim);
}

/* f_l of read l is added to sum. */
static void depth_apply(const depth *d, size_t l, double *sum) {
    size_t dim = d->m->desc.dim;
    const double *h = d->reads + l * dim;
    for (size_t i = 0; i < dim; i++)
        sum[i] += sublayer_element(l, dim, i, h[i], h[(i + 1) % dim]);
}

static double *embedding_of(const toy_model *m, size_t token) {
    double *v = vector(m->desc.dim);
    for (size_t i = 0; i < m->desc.dim; i++)
        v[i] = (double)m->embedding[token * m->desc.dim + i];
    return v;
}

/* The paper's full form: h_l mixes v_0 = embedding and v_i = f_i(h_i), i < l. */
static void full_definition(depth *d, size_t token) {
    size_t sublayers = 2 * d->m->desc.n_layers;
    d->sources[d->n++] = embedding_of(d->m, token);
    for (size_t l = 0; l < sublayers; l++) {
        depth_mix(d, l, NULL);
        d->sources[d->n] = vector(d->m->desc.dim);
        depth_apply(d, l, d->sources[d->n++]);
    }
    depth_mix(d, sublayers, NULL);
}

/* The paper's block form: the i-th sub-layer of block n reads b_0 .. b_{n-1} and, unless it is the
 * first, the sum of the block so far; the output mixes all block sums. */
static void block_definition(depth *d, size_t token) {
    size_t sublayers = 2 * d->m->desc.n_layers, size = d->m->desc.block_size;
    d->sources[d->n++] = embedding_of(d->m, token);
    for (size_t begin = 0; begin < sublayers; begin += size) {
        double *sum = vector(d->m->desc.dim);
        for (size_t l = begin; l < begin + size && l < sublayers; l++) {
            depth_mix(d, l, l == begin ? NULL : sum);
            depth_apply(d, l, sum);
        }
        d->sources[d->n++] = sum;
    }
    depth_mix(d, sublayers, NULL);
}

/* Kimi K3's forward, line by line: `prefix` is the running sum, null when it is none. */
static void k3_definition(depth *d, size_t token) {
    size_t n_layers = d->m->desc.n_layers, dim = d->m->desc.dim;
    double *prefix = embedding_of(d->m, token);
    for (size_t i = 0; i < n_layers; i++) {
        depth_mix(d, 2 * i, prefix); /* with no blocks: the prefix alone */
        if (i % d->m->desc.block_size == 0) {
            d->sources[d->n++] = prefix;
            prefix = NULL;
        }
        if (!prefix) prefix = vector(dim);
        depth_apply(d, 2 * i, prefix);
        depth_mix(d, 2 * i + 1, prefix);
        depth_apply(d, 2 * i + 1, prefix);
    }
    depth_mix(d, 2 * n_layers, prefix);
    d->sources[d->n++] = prefix; /* to be freed */
}

/* All reads of one token by a definition: [2 * n_layers + 1][dim]. */
static double *reads_by(void (*definition)(depth *, size_t), const toy_model *m, size_t token) {
    depth d;
    memset(&d, 0, sizeof d);
    d.m = m;
    d.reads = vector((2 * m->desc.n_layers + 1) * m->desc.dim);
    definition(&d, token);
    for (size_t j = 0; j < d.n; j++) free(d.sources[j]);
    return d.reads;
}

static void sublayer(const toy_model *m, size_t l, size_t n_tokens, const float *x, float *y) {
    size_t dim = m->desc.dim;
    for (size_t t = 0; t < n_tokens; t++)
        for (size_t i = 0; i < dim; i++)
            y[t * dim + i] =
                (float)sublayer_element(l, dim, i, (double)x[t * dim + i],
                                        (double)x[t * dim + (i + 1) % dim]);
}

/* A bank in memory of exactly its size, at an odd address, holding NaN. */
static void *bank_open(attnres_bank *bank, const attnres_bank_desc *desc) {
    size_t bytes = attnres_bank_bytes(desc);
    unsigned char *memory = (unsigned char *)test_alloc(bytes + 1);
    memset(memory, 0xff, bytes + 1);
    CHECK(bytes > 0);
    CHECK(attnres_bank_init(bank, desc, memory + 1, bytes) == ATTNRES_OK);
    return memory;
}

/* One pass over the first n_tokens; reads: [2 * n_layers + 1][n_tokens][dim]. One buffer serves as
 * embedding, as every o and as every delta. */
static void bank_pass(attnres_bank *bank, const toy_model *m, size_t n_tokens, float *reads) {
    size_t dim = m->desc.dim, count = n_tokens * dim;
    float *x = test_floats(count), *y = test_floats(count);
    memcpy(x, m->embedding, count * sizeof *x);
    attnres_input in = attnres_in_f32(x, (ptrdiff_t)dim);
    CHECK(attnres_bank_start(bank, n_tokens, in, NULL) == ATTNRES_OK);
    for (size_t l = 0; l <= 2 * m->desc.n_layers; l++) {
        attnres_result result =
            attnres_bank_read(bank, bank->n_blocks ? m->queries + l * dim : NULL,
                              model_norm(m, l), attnres_out_f32(x, (ptrdiff_t)dim), NULL, NULL);
        CHECK_MSG(result == ATTNRES_OK, "read %zu: %s", l, attnres_result_name(result));
        memcpy(reads + l * count, x, count * sizeof *x);
        if (l == 2 * m->desc.n_layers) break;
        sublayer(m, l, n_tokens, x, y);
        memcpy(x, y, count * sizeof *x);
        CHECK(attnres_bank_add(bank, in, NULL) == ATTNRES_OK);
    }
    free(x);
    free(y);
}

/* Every read of every token of a bank's pass against a definition. */
static void check_bank(void (*definition)(depth *, size_t), size_t n_layers, size_t block_size,
                       attnres_unit unit) {
    const size_t n_tokens = 2;
    toy_model m = model_make(n_tokens, n_layers, block_size, unit);
    size_t dim = m.desc.dim, n_reads = 2 * n_layers + 1;
    float *reads = test_floats(n_reads * n_tokens * dim);
    attnres_bank bank;
    void *memory = bank_open(&bank, &m.desc);
    bank_pass(&bank, &m, n_tokens, reads);
    CHECK(bank.n_blocks == attnres_bank_capacity(&m.desc));
    for (size_t t = 0; t < n_tokens; t++) {
        double *want = reads_by(definition, &m, t);
        for (size_t l = 0; l < n_reads; l++) {
            double off = test_relative_l2(reads + (l * n_tokens + t) * dim, want + l * dim, dim);
            /* Sub-layers round to float32, and each softmax over depth amplifies that. */
            CHECK_MSG(off <= 2e-5, "%zu layers, block %zu, read %zu: %.2e", n_layers, block_size, l,
                      off);
        }
        free(want);
    }
    free(reads);
    free(memory);
    model_free(&m);
}

static void bank_of_single_sublayers_is_full_attention(void) {
    for (size_t n_layers = 1; n_layers <= 8; n_layers++)
        check_bank(full_definition, n_layers, 1, ATTNRES_SUBLAYERS);
}

static void bank_in_sublayers_is_the_papers(void) {
    for (size_t n_layers = 1; n_layers <= 7; n_layers++)
        for (size_t block = 1; block <= 2 * n_layers + 2; block++)
            check_bank(block_definition, n_layers, block, ATTNRES_SUBLAYERS);
}

/* Blocks that divide the layers, that do not, and that exceed them. */
static void bank_in_layers_is_k3s(void) {
    for (size_t n_layers = 1; n_layers <= 9; n_layers++)
        for (size_t block = 1; block <= n_layers + 2; block++)
            check_bank(k3_definition, n_layers, block, ATTNRES_LAYERS);
    check_bank(k3_definition, 13, 4, ATTNRES_LAYERS); /* kimi-k3-tiny */
}

/* Kimi K3: 93 layers in blocks of 12: 8 stored, the last 9 layers in the partial sum, 9 sources. */
static void bank_counts_k3s_blocks(void) {
    toy_model m = model_make(1, 93, 12, ATTNRES_LAYERS);
    attnres_bank bank;
    void *memory = bank_open(&bank, &m.desc);
    float x[19], weights[9];
    attnres_input in = attnres_in_f32(x, 19);
    size_t sources_read = 0, mixes = 0;
    memcpy(x, m.embedding, sizeof x);
    CHECK(attnres_bank_capacity(&m.desc) == 8);
    CHECK(attnres_bank_start(&bank, 1, in, NULL) == ATTNRES_OK);
    for (size_t l = 0; l <= 186; l++) {
        if (bank.n_blocks) sources_read += bank.n_blocks, mixes++;
        if (l == 24) CHECK(bank.n_blocks == 1);
        if (l == 25) CHECK(bank.n_blocks == 2);
        CHECK(attnres_bank_read(&bank, m.queries, no_norm, attnres_out_f32(x, 19),
                                l == 186 ? weights : NULL, NULL) == ATTNRES_OK);
        if (l < 186) CHECK(attnres_bank_add(&bank, in, NULL) == ATTNRES_OK);
    }
    CHECK(bank.n_blocks == 8 && mixes == 186 && sources_read == 816);
    double sum = 0;
    for (size_t j = 0; j < 9; j++) sum += (double)weights[j];
    CHECK_AT_MOST("1 - sum of 9 weights", fabs(1 - sum), 1e-6);
    free(memory);
    model_free(&m);
}

static void bank_capacities(void) {
    attnres_bank_desc desc = bank_desc(1, 7, 3, ATTNRES_LAYERS);
    CHECK(attnres_bank_capacity(&desc) == 3);
    desc.unit = ATTNRES_SUBLAYERS;
    CHECK(attnres_bank_capacity(&desc) == 5);
    desc.block_size = SIZE_MAX;
    CHECK(attnres_bank_capacity(&desc) == 1);
    desc.block_size = 1;
    CHECK(attnres_bank_capacity(&desc) == 14);
}

/* Passes of other lengths, a broken-off one among them, leave nothing behind; a token's bits do
 * not depend on the tokens beside it. */
static void bank_starts_again(void) {
    toy_model m = model_make(5, 5, 2, ATTNRES_LAYERS);
    size_t dim = m.desc.dim, n_reads = 11;
    float *five = test_floats(n_reads * 5 * dim), *other = test_floats(n_reads * 5 * dim);
    attnres_bank bank;
    void *memory = bank_open(&bank, &m.desc);
    bank_pass(&bank, &m, 5, five);
    for (size_t n = 1; n <= 5; n++) {
        float *nothing = test_floats(dim);
        CHECK(attnres_bank_start(&bank, 1, attnres_in_f32(nothing, 0), NULL) == ATTNRES_OK);
        CHECK(attnres_bank_read(&bank, NULL, no_norm, attnres_out_f32(nothing, 0), NULL, NULL) ==
              ATTNRES_OK);
        free(nothing);
        bank_pass(&bank, &m, n, other);
        for (size_t l = 0; l < n_reads; l++)
            CHECK(same_bits(other + l * n * dim, five + l * 5 * dim, n * dim));
    }
    CHECK(attnres_bank_init(&bank, &bank.desc, (unsigned char *)memory + 1,
                            attnres_bank_bytes(&m.desc)) == ATTNRES_OK);
    bank_pass(&bank, &m, 5, other);
    CHECK(same_bits(other, five, n_reads * 5 * dim));
    free(five);
    free(other);
    free(memory);
    model_free(&m);
}

/* The bank's fields are what attnres_inter takes, and the merge of the partial is its next read. */
static void bank_serves_two_phases(void) {
    toy_model m = model_make(3, 4, 2, ATTNRES_LAYERS);
    size_t dim = m.desc.dim, count = 3 * dim;
    attnres_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.dim = dim, desc.eps = m.desc.eps;
    float *x = test_floats(count), *o = test_floats(count), *mixed = test_floats(count);
    double max[3];
    float sum[3];
    attnres_bank bank;
    void *memory = bank_open(&bank, &m.desc);
    attnres_input in = attnres_in_f32(x, (ptrdiff_t)dim);
    memcpy(x, m.embedding, count * sizeof *x);
    CHECK(attnres_bank_start(&bank, 3, in, NULL) == ATTNRES_OK);
    for (size_t l = 0; l <= 8; l++) {
        const float *query = m.queries + l * dim;
        size_t n_blocks = bank.n_blocks;
        if (n_blocks) {
            attnres_inter_args first;
            memset(&first, 0, sizeof first);
            first.n_tokens = 3;
            first.sources = bank.sources, first.n_sources = bank.n_blocks;
            first.inv_rms = (const double *const *)bank.cached;
            first.queries = &query, first.n_queries = 1;
            first.max = max, first.sum = sum, first.mix = mixed;
            CHECK(inter(&desc, &first) == ATTNRES_OK);
            attnres_merge_args second;
            memset(&second, 0, sizeof second);
            second.n_tokens = 3;
            second.max = max, second.sum = sum, second.mix = mixed;
            second.partial = bank.sources[bank.n_blocks];
            second.query = query;
            second.norm = model_norm(&m, l);
            second.o = attnres_out_f32(o, (ptrdiff_t)dim);
            CHECK(merge(&desc, &second) == ATTNRES_OK);
        }
        CHECK(attnres_bank_read(&bank, query, model_norm(&m, l),
                                attnres_out_f32(x, (ptrdiff_t)dim), NULL, NULL) == ATTNRES_OK);
        if (n_blocks) CHECK_AT_MOST("two phases", test_relative_l2_f32(o, x, count), 1e-6);
        if (l < 8) CHECK(attnres_bank_add(&bank, in, NULL) == ATTNRES_OK);
    }
    free(x);
    free(o);
    free(mixed);
    free(memory);
    model_free(&m);
}

/* A sub-layer's output may come in parts. */
static void bank_adds_parts(void) {
    attnres_bank_desc desc = bank_desc(1, 1, 1, ATTNRES_LAYERS);
    desc.dim = 2;
    attnres_bank bank;
    void *memory = bank_open(&bank, &desc);
    float x[2] = {1, 2}, o[2];
    attnres_input in = attnres_in_f32(x, 2);
    CHECK(attnres_bank_start(&bank, 1, in, NULL) == ATTNRES_OK);
    CHECK(attnres_bank_read(&bank, NULL, no_norm, attnres_out_f32(o, 2), NULL, NULL) == ATTNRES_OK);
    CHECK(bank.n_blocks == 1 && !bank.has_partial);
    CHECK(attnres_bank_add(&bank, in, NULL) == ATTNRES_OK && bank.has_partial);
    CHECK(attnres_bank_add(&bank, in, NULL) == ATTNRES_OK);
    CHECK(bank.partial[0] == 2 && bank.partial[1] == 4);
    CHECK(bank.blocks[0] == 1 && bank.blocks[1] == 2);
    free(memory);
}

/* ==== 8. Misuse =============================================================================== */

static void results_have_names_and_texts(void) {
#define NAMED(result) {result, #result}
    static const struct {
        attnres_result result;
        const char *name;
    } all[] = {NAMED(ATTNRES_OK),         NAMED(ATTNRES_ERR_NULL),  NAMED(ATTNRES_ERR_DIMS),
               NAMED(ATTNRES_ERR_SIZE),   NAMED(ATTNRES_ERR_NUMBER), NAMED(ATTNRES_ERR_TYPE),
               NAMED(ATTNRES_ERR_ALIGN),  NAMED(ATTNRES_ERR_STRIDE), NAMED(ATTNRES_ERR_SCRATCH),
               NAMED(ATTNRES_ERR_UNIT),   NAMED(ATTNRES_ERR_ORDER),  NAMED(ATTNRES_ERR_THREADS),
               NAMED(ATTNRES_ERR_ISA)};
#undef NAMED
    const char *unknown = attnres_result_text((attnres_result)COUNT(all));
    for (size_t i = 0; i < COUNT(all); i++) {
        const char *text = attnres_result_text(all[i].result);
        CHECK(strcmp(attnres_result_name(all[i].result), all[i].name) == 0);
        CHECK(strlen(text) > 0 && strcmp(text, unknown) != 0);
        for (size_t k = 0; k < i; k++)
            CHECK(strcmp(text, attnres_result_text(all[k].result)) != 0);
    }
    CHECK(strcmp(attnres_result_name((attnres_result)COUNT(all)), "ATTNRES_ERR_UNKNOWN") == 0);
    CHECK(strcmp(attnres_result_name((attnres_result)-1), "ATTNRES_ERR_UNKNOWN") == 0);
}

/* A float pointer that is not aligned to a float. */
static float *off_by_one(float *p) {
    return (float *)((uintptr_t)p + 1);
}

/* Everything that the misused calls might write, and its state before. */
#define MISUSE_DIM 4
#define MISUSE_TOKENS 2
typedef struct written {
    double inv_rms[8];
    double max[8];
    float o[16], weights[8], sum[8], mix[32], folded[8];
    attnres_bank bank;
    unsigned char scratch[1 << 20]; /* whatever number of threads OpenMP has */
} written;
static written misuse_out, misuse_before;

static void misuse_begin(void) {
    memset(&misuse_out, 0xA5, sizeof misuse_out);
    memset(&misuse_before, 0xA5, sizeof misuse_before);
}

/* The call gives that result and has written nothing. */
#define REFUSED(result, call)                                                                      \
    do {                                                                                           \
        attnres_result refused_ = (call);                                                          \
        CHECK_MSG(refused_ == (result), "%s gives %s", #call, attnres_result_name(refused_));      \
        CHECK_MSG(memcmp(&misuse_out, &misuse_before, sizeof misuse_out) == 0, "%s writes", #call);\
        memcpy(&misuse_out, &misuse_before, sizeof misuse_out); /* padding, too */                 \
    } while (0)

/* Runs one call with one field of a good copy of desc, args or run spoiled. */
#define SPOILED_MIX(result, spoil)                                                                 \
    do {                                                                                           \
        attnres_desc desc = good_desc;                                                             \
        attnres_mix_args args = good_args;                                                         \
        attnres_run run = good_run;                                                                \
        spoil;                                                                                     \
        REFUSED(result, attnres_mix(&desc, &args, &run));                                          \
    } while (0)

static float misuse_values[3][8] = {
    {1, 2, 3, 4, 5, 6, 7, 8}, {2, 3, 4, 5, 6, 7, 8, 9}, {3, 4, 5, 6, 7, 8, 9, 9}};
static float misuse_query[4] = {1, 2, 3, 4};

static attnres_desc misuse_desc(void) {
    attnres_desc desc;
    desc.dim = MISUSE_DIM;
    desc.eps = 1e-5f;
    desc.scale = 0;
    return desc;
}

static attnres_run misuse_run(void) {
    attnres_run run;
    memset(&run, 0, sizeof run);
    run.scratch = misuse_out.scratch;
    run.scratch_bytes = sizeof misuse_out.scratch;
    return run;
}

static void misuse_sources(attnres_input sources[2]) {
    for (size_t j = 0; j < 2; j++) sources[j] = attnres_in_f32(misuse_values[j], MISUSE_DIM);
}

static attnres_norm misuse_norm(void) {
    attnres_norm norm;
    norm.weight = misuse_query;
    norm.eps = 1e-6f;
    return norm;
}

static attnres_mix_args misuse_mix_args(const attnres_input *sources) {
    attnres_mix_args args;
    memset(&args, 0, sizeof args);
    args.n_tokens = MISUSE_TOKENS;
    args.sources = sources;
    args.n_sources = 2;
    args.query = misuse_query;
    args.norm = misuse_norm();
    args.o = attnres_out_f32(misuse_out.o, 8);
    args.weights = misuse_out.weights;
    return args;
}

static void never_called(void *user, size_t n, attnres_task task, void *context) {
    (void)user, (void)n, (void)task, (void)context;
    CHECK(0);
}

static void mix_refuses_misuse(void) {
    attnres_input sources[2], bad[2];
    double inv_rms[2] = {1, 1};
    const double *cached[2] = {inv_rms, (const double *)off_by_one((float *)inv_rms)};
    misuse_begin();
    misuse_sources(sources);
    const attnres_desc good_desc = misuse_desc();
    const attnres_run good_run = misuse_run();
    const attnres_mix_args good_args = misuse_mix_args(sources);
    REFUSED(ATTNRES_ERR_NULL, attnres_mix(NULL, &good_args, &good_run));
    REFUSED(ATTNRES_ERR_NULL, attnres_mix(&good_desc, NULL, &good_run));
    REFUSED(ATTNRES_ERR_NULL, attnres_mix(&good_desc, &good_args, NULL));
    SPOILED_MIX(ATTNRES_ERR_NULL, args.sources = NULL);
    SPOILED_MIX(ATTNRES_ERR_NULL, args.query = NULL);
    SPOILED_MIX(ATTNRES_ERR_NULL, args.o.data = NULL);
    SPOILED_MIX(ATTNRES_ERR_SCRATCH, run.scratch = NULL);
    SPOILED_MIX(ATTNRES_ERR_SCRATCH,
                run.scratch_bytes = attnres_mix_scratch_bytes(&good_desc, 2, NULL) - 1);
    SPOILED_MIX(ATTNRES_ERR_SCRATCH, run.parallel_for = never_called; run.n_threads = 1 << 16);
    SPOILED_MIX(ATTNRES_ERR_SIZE, run.parallel_for = never_called; run.n_threads = SIZE_MAX / 2);
    SPOILED_MIX(ATTNRES_ERR_THREADS, run.parallel_for = never_called);
    SPOILED_MIX(ATTNRES_ERR_ISA, run.isa = (attnres_isa)9);
    SPOILED_MIX(ATTNRES_ERR_ISA, run.isa = (attnres_isa)-1);
    SPOILED_MIX(ATTNRES_ERR_DIMS, desc.dim = 0);
    SPOILED_MIX(ATTNRES_ERR_DIMS, args.n_sources = 0);
    SPOILED_MIX(ATTNRES_ERR_NUMBER, desc.eps = 0);
    SPOILED_MIX(ATTNRES_ERR_NUMBER, desc.eps = -1e-5f);
    SPOILED_MIX(ATTNRES_ERR_NUMBER, desc.eps = NAN);
    SPOILED_MIX(ATTNRES_ERR_NUMBER, desc.eps = HUGE_VALF);
    SPOILED_MIX(ATTNRES_ERR_NUMBER, desc.scale = -1);
    SPOILED_MIX(ATTNRES_ERR_NUMBER, desc.scale = NAN);
    SPOILED_MIX(ATTNRES_ERR_NUMBER, desc.scale = HUGE_VALF);
    SPOILED_MIX(ATTNRES_ERR_NUMBER, args.norm.eps = 0);
    SPOILED_MIX(ATTNRES_ERR_NUMBER, args.norm.eps = NAN);
    SPOILED_MIX(ATTNRES_ERR_NUMBER, args.norm.eps = HUGE_VALF);
    SPOILED_MIX(ATTNRES_ERR_TYPE, args.o.type = (attnres_type)7);
    SPOILED_MIX(ATTNRES_ERR_ALIGN, args.query = off_by_one(misuse_query));
    SPOILED_MIX(ATTNRES_ERR_ALIGN, args.norm.weight = off_by_one(misuse_query));
    SPOILED_MIX(ATTNRES_ERR_ALIGN, args.o.data = off_by_one(misuse_out.o));
    SPOILED_MIX(ATTNRES_ERR_ALIGN, args.o = attnres_out((char *)misuse_out.o + 1, ATTNRES_F16, 8));
    SPOILED_MIX(ATTNRES_ERR_STRIDE, args.o = attnres_out(misuse_out.o, ATTNRES_F16, 3));
    SPOILED_MIX(ATTNRES_ERR_ALIGN, args.weights = off_by_one(misuse_out.weights));
    SPOILED_MIX(ATTNRES_ERR_ALIGN, args.inv_rms = cached);
    SPOILED_MIX(ATTNRES_ERR_STRIDE, args.o.token_stride = 0);
    SPOILED_MIX(ATTNRES_ERR_STRIDE, args.o.token_stride = 3);
    SPOILED_MIX(ATTNRES_ERR_STRIDE, args.o.token_stride = -3);
    SPOILED_MIX(ATTNRES_ERR_SIZE, args.o.token_stride = PTRDIFF_MAX);
    SPOILED_MIX(ATTNRES_ERR_SIZE, args.o.token_stride = PTRDIFF_MIN);
    SPOILED_MIX(ATTNRES_ERR_SIZE, args.n_tokens = SIZE_MAX);
    SPOILED_MIX(ATTNRES_ERR_SIZE, args.n_sources = SIZE_MAX);
    SPOILED_MIX(ATTNRES_ERR_SIZE, args.n_sources = SIZE_MAX / 4);
    SPOILED_MIX(ATTNRES_ERR_SIZE, desc.dim = SIZE_MAX);
    SPOILED_MIX(ATTNRES_ERR_SIZE, desc.dim = (size_t)PTRDIFF_MAX / 4 + 1);
    for (size_t j = 0; j < 2; j++) {
        memcpy(bad, sources, sizeof bad);
        bad[j].data = NULL;
        SPOILED_MIX(ATTNRES_ERR_NULL, args.sources = bad);
        bad[j].data = off_by_one(misuse_values[j]);
        SPOILED_MIX(ATTNRES_ERR_ALIGN, args.sources = bad);
        bad[j] = sources[j];
        bad[j].type = (attnres_type)3;
        SPOILED_MIX(ATTNRES_ERR_TYPE, args.sources = bad);
        bad[j] = attnres_in((char *)misuse_values[j] + 1, ATTNRES_BF16, MISUSE_DIM);
        SPOILED_MIX(ATTNRES_ERR_ALIGN, args.sources = bad);
        bad[j] = sources[j];
        bad[j].token_stride = PTRDIFF_MAX / 4;
        SPOILED_MIX(ATTNRES_ERR_SIZE, args.sources = bad);
        bad[j].token_stride = PTRDIFF_MIN;
        SPOILED_MIX(ATTNRES_ERR_SIZE, args.sources = bad);
    }
    CHECK(attnres_mix(&good_desc, &good_args, &good_run) == ATTNRES_OK);
    CHECK(memcmp(&misuse_out, &misuse_before, sizeof misuse_out) != 0);
}

/* A single row has no stride to be wrong. */
static void one_token_ignores_strides(void) {
    attnres_input sources[2];
    misuse_begin();
    misuse_sources(sources);
    sources[0].token_stride = PTRDIFF_MIN;
    attnres_desc desc = misuse_desc();
    attnres_run run = misuse_run();
    attnres_mix_args args = misuse_mix_args(sources);
    args.n_tokens = 1;
    args.o.token_stride = 0;
    CHECK(attnres_mix(&desc, &args, &run) == ATTNRES_OK);
}

#define SPOILED_INTER(result, spoil)                                                               \
    do {                                                                                           \
        attnres_desc desc = good_desc;                                                             \
        attnres_inter_args args = good_args;                                                       \
        attnres_run run = good_run;                                                                \
        spoil;                                                                                     \
        REFUSED(result, attnres_inter(&desc, &args, &run));                                        \
    } while (0)

static void inter_refuses_misuse(void) {
    attnres_input sources[2];
    const float *queries[2] = {misuse_query, misuse_query};
    const float *bad[2] = {misuse_query, NULL};
    misuse_begin();
    misuse_sources(sources);
    const attnres_desc good_desc = misuse_desc();
    const attnres_run good_run = misuse_run();
    attnres_inter_args good_args;
    memset(&good_args, 0, sizeof good_args);
    good_args.n_tokens = MISUSE_TOKENS;
    good_args.sources = sources, good_args.n_sources = 2;
    good_args.queries = queries, good_args.n_queries = 2;
    good_args.max = misuse_out.max, good_args.sum = misuse_out.sum, good_args.mix = misuse_out.mix;
    REFUSED(ATTNRES_ERR_NULL, attnres_inter(NULL, &good_args, &good_run));
    REFUSED(ATTNRES_ERR_NULL, attnres_inter(&good_desc, NULL, &good_run));
    REFUSED(ATTNRES_ERR_NULL, attnres_inter(&good_desc, &good_args, NULL));
    SPOILED_INTER(ATTNRES_ERR_NULL, args.sources = NULL);
    SPOILED_INTER(ATTNRES_ERR_NULL, args.queries = NULL);
    SPOILED_INTER(ATTNRES_ERR_NULL, args.queries = bad);
    SPOILED_INTER(ATTNRES_ERR_NULL, args.max = NULL);
    SPOILED_INTER(ATTNRES_ERR_NULL, args.sum = NULL);
    SPOILED_INTER(ATTNRES_ERR_NULL, args.mix = NULL);
    SPOILED_INTER(ATTNRES_ERR_ALIGN, args.max = (double *)off_by_one((float *)args.max));
    SPOILED_INTER(ATTNRES_ERR_ALIGN, args.sum = off_by_one(args.sum));
    SPOILED_INTER(ATTNRES_ERR_ALIGN, args.mix = off_by_one(args.mix));
    SPOILED_INTER(ATTNRES_ERR_ALIGN, bad[1] = off_by_one(misuse_query); args.queries = bad);
    SPOILED_INTER(ATTNRES_ERR_TYPE, sources[1].type = (attnres_type)3);
    misuse_sources(sources);
    SPOILED_INTER(ATTNRES_ERR_THREADS, run.parallel_for = never_called);
    SPOILED_INTER(ATTNRES_ERR_ISA, run.isa = (attnres_isa)9);
    SPOILED_INTER(ATTNRES_ERR_DIMS, desc.dim = 0);
    SPOILED_INTER(ATTNRES_ERR_DIMS, args.n_sources = 0);
    SPOILED_INTER(ATTNRES_ERR_DIMS, args.n_queries = 0);
    SPOILED_INTER(ATTNRES_ERR_NUMBER, desc.eps = 0);
    SPOILED_INTER(ATTNRES_ERR_SIZE, args.n_tokens = SIZE_MAX / 2);
    SPOILED_INTER(ATTNRES_ERR_SIZE, args.n_queries = SIZE_MAX / 8);
    SPOILED_INTER(ATTNRES_ERR_SIZE, args.n_sources = SIZE_MAX / 8);
    SPOILED_INTER(ATTNRES_ERR_SCRATCH, run.scratch = NULL);
    SPOILED_INTER(ATTNRES_ERR_SCRATCH,
                  run.scratch_bytes = attnres_inter_scratch_bytes(&good_desc, 2, 2, NULL) - 1);
    CHECK(attnres_inter(&good_desc, &good_args, &good_run) == ATTNRES_OK);
}

#define SPOILED_MERGE(result, spoil)                                                               \
    do {                                                                                           \
        attnres_desc desc = good_desc;                                                             \
        attnres_merge_args args = good_args;                                                       \
        attnres_run run = good_run;                                                                \
        spoil;                                                                                     \
        REFUSED(result, attnres_merge(&desc, &args, &run));                                        \
    } while (0)

static void merge_refuses_misuse(void) {
    double max[2] = {0, 0};
    float sum[2] = {1, 1};
    misuse_begin();
    const attnres_desc good_desc = misuse_desc();
    const attnres_run good_run = misuse_run();
    attnres_merge_args good_args;
    memset(&good_args, 0, sizeof good_args);
    good_args.n_tokens = MISUSE_TOKENS;
    good_args.max = max, good_args.sum = sum, good_args.mix = misuse_values[0];
    good_args.partial = attnres_in_f32(misuse_values[1], MISUSE_DIM);
    good_args.query = misuse_query;
    good_args.norm = misuse_norm();
    good_args.o = attnres_out_f32(misuse_out.o, 8);
    REFUSED(ATTNRES_ERR_NULL, attnres_merge(NULL, &good_args, &good_run));
    REFUSED(ATTNRES_ERR_NULL, attnres_merge(&good_desc, NULL, &good_run));
    REFUSED(ATTNRES_ERR_NULL, attnres_merge(&good_desc, &good_args, NULL));
    SPOILED_MERGE(ATTNRES_ERR_SCRATCH, run.scratch = NULL);
    SPOILED_MERGE(ATTNRES_ERR_SCRATCH,
                  run.scratch_bytes = attnres_merge_scratch_bytes(&good_desc, NULL) - 1);
    SPOILED_MERGE(ATTNRES_ERR_THREADS, run.parallel_for = never_called);
    SPOILED_MERGE(ATTNRES_ERR_ISA, run.isa = (attnres_isa)9);
    SPOILED_MERGE(ATTNRES_ERR_NULL, args.max = NULL);
    SPOILED_MERGE(ATTNRES_ERR_NULL, args.sum = NULL);
    SPOILED_MERGE(ATTNRES_ERR_NULL, args.mix = NULL);
    SPOILED_MERGE(ATTNRES_ERR_NULL, args.query = NULL);
    SPOILED_MERGE(ATTNRES_ERR_NULL, args.o.data = NULL);
    SPOILED_MERGE(ATTNRES_ERR_ALIGN, args.max = (const double *)off_by_one((float *)max));
    SPOILED_MERGE(ATTNRES_ERR_ALIGN, args.sum = off_by_one(sum));
    SPOILED_MERGE(ATTNRES_ERR_ALIGN, args.mix = off_by_one(misuse_values[0]));
    SPOILED_MERGE(ATTNRES_ERR_ALIGN, args.query = off_by_one(misuse_query));
    SPOILED_MERGE(ATTNRES_ERR_ALIGN, args.partial.data = off_by_one(misuse_values[1]));
    SPOILED_MERGE(ATTNRES_ERR_ALIGN, args.o.data = off_by_one(misuse_out.o));
    SPOILED_MERGE(ATTNRES_ERR_ALIGN, args.norm.weight = off_by_one(misuse_query));
    SPOILED_MERGE(ATTNRES_ERR_TYPE, args.partial.type = (attnres_type)9);
    SPOILED_MERGE(ATTNRES_ERR_TYPE, args.o.type = (attnres_type)9);
    SPOILED_MERGE(ATTNRES_ERR_STRIDE, args.o.token_stride = 1);
    SPOILED_MERGE(ATTNRES_ERR_SIZE, args.o.token_stride = PTRDIFF_MIN);
    SPOILED_MERGE(ATTNRES_ERR_SIZE, args.partial.token_stride = PTRDIFF_MAX);
    SPOILED_MERGE(ATTNRES_ERR_SIZE, args.n_tokens = SIZE_MAX / 2);
    SPOILED_MERGE(ATTNRES_ERR_DIMS, desc.dim = 0);
    SPOILED_MERGE(ATTNRES_ERR_NUMBER, desc.scale = -1);
    SPOILED_MERGE(ATTNRES_ERR_NUMBER, args.norm.eps = -1);
    CHECK(attnres_merge(&good_desc, &good_args, &good_run) == ATTNRES_OK);
}

static void fold_and_inverse_rms_refuse_misuse(void) {
    float *out = misuse_out.folded, *q = misuse_query;
    double *inv = misuse_out.inv_rms;
    misuse_begin();
    REFUSED(ATTNRES_ERR_DIMS, attnres_fold_query(0, q, q, out));
    REFUSED(ATTNRES_ERR_NULL, attnres_fold_query(4, NULL, q, out));
    REFUSED(ATTNRES_ERR_NULL, attnres_fold_query(4, q, NULL, out));
    REFUSED(ATTNRES_ERR_NULL, attnres_fold_query(4, q, q, NULL));
    REFUSED(ATTNRES_ERR_ALIGN, attnres_fold_query(4, off_by_one(q), q, out));
    REFUSED(ATTNRES_ERR_ALIGN, attnres_fold_query(4, q, off_by_one(q), out));
    REFUSED(ATTNRES_ERR_ALIGN, attnres_fold_query(4, q, q, off_by_one(out)));
    REFUSED(ATTNRES_ERR_SIZE, attnres_fold_query(SIZE_MAX, q, q, out));
    attnres_desc desc = misuse_desc(), bad = desc;
    attnres_input in = attnres_in_f32(misuse_values[0], MISUSE_DIM), wrong = in;
    wrong.type = (attnres_type)3;
    bad.eps = 0;
    REFUSED(ATTNRES_ERR_NULL, attnres_inverse_rms(NULL, 2, in, inv, NULL));
    REFUSED(ATTNRES_ERR_NULL, attnres_inverse_rms(&desc, 2, in, NULL, NULL));
    REFUSED(ATTNRES_ERR_ALIGN,
            attnres_inverse_rms(&desc, 2, in, (double *)(void *)((char *)inv + 4), NULL));
    REFUSED(ATTNRES_ERR_NUMBER, attnres_inverse_rms(&bad, 2, in, inv, NULL));
    REFUSED(ATTNRES_ERR_TYPE, attnres_inverse_rms(&desc, 2, wrong, inv, NULL));
    REFUSED(ATTNRES_ERR_SIZE, attnres_inverse_rms(&desc, SIZE_MAX / 2, in, inv, NULL));
    wrong = attnres_in_f32(NULL, MISUSE_DIM);
    REFUSED(ATTNRES_ERR_NULL, attnres_inverse_rms(&desc, 2, wrong, inv, NULL));
    attnres_run run;
    memset(&run, 0, sizeof run);
    run.isa = (attnres_isa)9;
    REFUSED(ATTNRES_ERR_ISA, attnres_inverse_rms(&desc, 2, in, inv, &run));
    run.isa = ATTNRES_ISA_AUTO;
    run.parallel_for = never_called;
    REFUSED(ATTNRES_ERR_THREADS, attnres_inverse_rms(&desc, 2, in, inv, &run));
}

#define SPOILED_BANK(result, spoil)                                                                \
    do {                                                                                           \
        attnres_bank_desc desc = good_desc;                                                        \
        spoil;                                                                                     \
        REFUSED(result, attnres_bank_init(&misuse_out.bank, &desc, memory, bytes));                \
        CHECK_MSG(attnres_bank_bytes(&desc) == 0, "bytes with %s", #spoil);                        \
    } while (0)

static void bank_init_refuses_misuse(void) {
    attnres_bank_desc good_desc = bank_desc(2, 3, 2, ATTNRES_LAYERS);
    size_t bytes = attnres_bank_bytes(&good_desc);
    void *memory = test_alloc(bytes);
    misuse_begin();
    REFUSED(ATTNRES_ERR_NULL, attnres_bank_init(NULL, &good_desc, memory, bytes));
    REFUSED(ATTNRES_ERR_NULL, attnres_bank_init(&misuse_out.bank, NULL, memory, bytes));
    REFUSED(ATTNRES_ERR_SCRATCH, attnres_bank_init(&misuse_out.bank, &good_desc, NULL, bytes));
    REFUSED(ATTNRES_ERR_SCRATCH,
            attnres_bank_init(&misuse_out.bank, &good_desc, memory, bytes - 1));
    SPOILED_BANK(ATTNRES_ERR_UNIT, desc.unit = (attnres_unit)0);
    SPOILED_BANK(ATTNRES_ERR_UNIT, desc.unit = (attnres_unit)3);
    SPOILED_BANK(ATTNRES_ERR_DIMS, desc.dim = 0);
    SPOILED_BANK(ATTNRES_ERR_DIMS, desc.n_tokens = 0);
    SPOILED_BANK(ATTNRES_ERR_DIMS, desc.n_layers = 0);
    SPOILED_BANK(ATTNRES_ERR_DIMS, desc.block_size = 0);
    SPOILED_BANK(ATTNRES_ERR_NUMBER, desc.eps = 0);
    SPOILED_BANK(ATTNRES_ERR_NUMBER, desc.scale = -2);
    SPOILED_BANK(ATTNRES_ERR_SIZE, desc.n_threads = SIZE_MAX / 2);
    SPOILED_BANK(ATTNRES_ERR_SIZE, desc.n_layers = SIZE_MAX);
    SPOILED_BANK(ATTNRES_ERR_SIZE, desc.n_layers = SIZE_MAX / 2 + 2);
    SPOILED_BANK(ATTNRES_ERR_SIZE, desc.n_layers = SIZE_MAX / 4);
    SPOILED_BANK(ATTNRES_ERR_SIZE, desc.n_tokens = SIZE_MAX / 8);
    SPOILED_BANK(ATTNRES_ERR_SIZE, desc.dim = SIZE_MAX / 16);
    SPOILED_BANK(ATTNRES_ERR_SIZE, desc.dim = SIZE_MAX);
    free(memory);
}

/* Nothing but the struct and the memory can change, and they do not. */
#define BANK_REFUSES(result, call)                                                                 \
    do {                                                                                           \
        attnres_bank before_;                                                                      \
        memcpy(&before_, &bank, sizeof bank); /* padding, too */                                   \
        memcpy(copy, memory, bytes);                                                               \
        attnres_result refused_ = (call);                                                          \
        CHECK_MSG(refused_ == (result), "%s gives %s", #call, attnres_result_name(refused_));      \
        CHECK_MSG(memcmp(&before_, &bank, sizeof bank) == 0, "%s changes the bank", #call);        \
        CHECK_MSG(memcmp(copy, memory, bytes) == 0, "%s changes the memory", #call);               \
        for (size_t i_ = 0; i_ < COUNT(o); i_++) CHECK(o[i_] == 12345);                            \
    } while (0)

static void bank_refuses_misuse(void) {
    toy_model m = model_make(2, 2, 1, ATTNRES_LAYERS);
    size_t bytes = attnres_bank_bytes(&m.desc);
    unsigned char *memory = (unsigned char *)test_alloc(bytes);
    unsigned char *copy = (unsigned char *)test_alloc(bytes);
    float o[2 * 19], kept[2 * 19];
    attnres_bank bank;
    attnres_norm norm = model_norm(&m, 0), bad_norm = {m.norms, 0};
    attnres_input in = attnres_in_f32(m.embedding, 19), bad = in;
    attnres_output out = attnres_out_f32(o, 19), bad_out = out;
    for (size_t i = 0; i < COUNT(o); i++) o[i] = 12345;

    memset(&bank, 0, sizeof bank); /* never initialised */
    BANK_REFUSES(ATTNRES_ERR_ORDER, attnres_bank_start(&bank, 2, in, NULL));
    BANK_REFUSES(ATTNRES_ERR_ORDER, attnres_bank_read(&bank, m.queries, norm, out, NULL, NULL));
    BANK_REFUSES(ATTNRES_ERR_ORDER, attnres_bank_add(&bank, in, NULL));
    CHECK(attnres_bank_init(&bank, &m.desc, memory, bytes) == ATTNRES_OK); /* not started */
    BANK_REFUSES(ATTNRES_ERR_ORDER, attnres_bank_read(&bank, m.queries, norm, out, NULL, NULL));
    BANK_REFUSES(ATTNRES_ERR_ORDER, attnres_bank_add(&bank, in, NULL));
    BANK_REFUSES(ATTNRES_ERR_NULL, attnres_bank_start(NULL, 2, in, NULL));
    BANK_REFUSES(ATTNRES_ERR_NULL, attnres_bank_start(&bank, 2, attnres_in_f32(NULL, 19), NULL));
    BANK_REFUSES(ATTNRES_ERR_DIMS, attnres_bank_start(&bank, 3, in, NULL));
    bad.type = (attnres_type)5;
    BANK_REFUSES(ATTNRES_ERR_TYPE, attnres_bank_start(&bank, 2, bad, NULL));
    bad = attnres_in_f32(off_by_one(m.embedding), 19);
    BANK_REFUSES(ATTNRES_ERR_ALIGN, attnres_bank_start(&bank, 2, bad, NULL));
    BANK_REFUSES(ATTNRES_ERR_SIZE,
                 attnres_bank_start(&bank, 2, attnres_in_f32(m.embedding, PTRDIFF_MAX), NULL));

    attnres_run no_isa, no_threads;
    memset(&no_isa, 0, sizeof no_isa), memset(&no_threads, 0, sizeof no_threads);
    no_isa.isa = (attnres_isa)9, no_threads.parallel_for = never_called;
    BANK_REFUSES(ATTNRES_ERR_ISA, attnres_bank_start(&bank, 2, in, &no_isa));
    BANK_REFUSES(ATTNRES_ERR_THREADS, attnres_bank_start(&bank, 2, in, &no_threads));

    CHECK(attnres_bank_start(&bank, 2, in, NULL) == ATTNRES_OK);
    BANK_REFUSES(ATTNRES_ERR_ISA, attnres_bank_read(&bank, m.queries, norm, out, NULL, &no_isa));
    BANK_REFUSES(ATTNRES_ERR_THREADS,
                 attnres_bank_read(&bank, m.queries, norm, out, NULL, &no_threads));
    BANK_REFUSES(ATTNRES_ERR_ORDER, attnres_bank_add(&bank, in, NULL)); /* nothing was read */
    BANK_REFUSES(ATTNRES_ERR_NULL, attnres_bank_read(NULL, m.queries, norm, out, NULL, NULL));
    BANK_REFUSES(ATTNRES_ERR_NUMBER,
                 attnres_bank_read(&bank, m.queries, bad_norm, out, NULL, NULL));
    bad_out.data = NULL;
    BANK_REFUSES(ATTNRES_ERR_NULL, attnres_bank_read(&bank, m.queries, norm, bad_out, NULL, NULL));
    bad_out = attnres_out_f32(o, 18);
    BANK_REFUSES(ATTNRES_ERR_STRIDE,
                 attnres_bank_read(&bank, m.queries, norm, bad_out, NULL, NULL));
    bad_out = attnres_out_f32(off_by_one(o), 19);
    BANK_REFUSES(ATTNRES_ERR_ALIGN, attnres_bank_read(&bank, m.queries, norm, bad_out, NULL, NULL));
    for (size_t l = 0; l < 4; l++) {
        attnres_output keep = attnres_out_f32(kept, 19);
        if (l)
            BANK_REFUSES(ATTNRES_ERR_NULL, attnres_bank_read(&bank, NULL, norm, out, NULL, NULL));
        CHECK(attnres_bank_read(&bank, m.queries, norm, keep, NULL, NULL) == ATTNRES_OK);
        BANK_REFUSES(ATTNRES_ERR_ORDER, attnres_bank_read(&bank, m.queries, norm, out, NULL, NULL));
        BANK_REFUSES(ATTNRES_ERR_ALIGN, attnres_bank_add(&bank, bad, NULL));
        BANK_REFUSES(ATTNRES_ERR_NULL, attnres_bank_add(NULL, in, NULL));
        BANK_REFUSES(ATTNRES_ERR_ISA, attnres_bank_add(&bank, in, &no_isa));
        BANK_REFUSES(ATTNRES_ERR_THREADS, attnres_bank_add(&bank, in, &no_threads));
        BANK_REFUSES(ATTNRES_ERR_NULL, attnres_bank_add(&bank, attnres_in_f32(NULL, 19), NULL));
        BANK_REFUSES(ATTNRES_ERR_ORDER, attnres_bank_read(&bank, m.queries, norm, out, NULL, NULL));
        CHECK(attnres_bank_add(&bank, in, NULL) == ATTNRES_OK);
    }
    attnres_output last = attnres_out_f32(kept, 19);
    CHECK(attnres_bank_read(&bank, m.queries, norm, last, NULL, NULL) == ATTNRES_OK);
    BANK_REFUSES(ATTNRES_ERR_ORDER, attnres_bank_read(&bank, m.queries, norm, out, NULL, NULL));
    BANK_REFUSES(ATTNRES_ERR_ORDER, attnres_bank_add(&bank, in, NULL));
    free(memory);
    free(copy);
    model_free(&m);
}

static void zero_tokens_touch_nothing(void) {
    attnres_desc desc = misuse_desc();
    attnres_mix_args mix_args;
    attnres_inter_args inter_args;
    attnres_merge_args merge_args;
    misuse_begin();
    memset(&mix_args, 0, sizeof mix_args);
    memset(&inter_args, 0, sizeof inter_args);
    memset(&merge_args, 0, sizeof merge_args);
    mix_args.n_sources = inter_args.n_sources = inter_args.n_queries = 1;
    mix_args.o.data = misuse_out.o;
    inter_args.mix = misuse_out.mix;
    merge_args.o.data = misuse_out.o;
    REFUSED(ATTNRES_OK, attnres_mix(&desc, &mix_args, NULL));
    REFUSED(ATTNRES_OK, attnres_inter(&desc, &inter_args, NULL));
    REFUSED(ATTNRES_OK, attnres_merge(&desc, &merge_args, NULL));
    attnres_input nothing = attnres_in_f32(NULL, 0);
    REFUSED(ATTNRES_OK, attnres_inverse_rms(&desc, 0, nothing, misuse_out.inv_rms, NULL));
    desc.eps = 0;
    REFUSED(ATTNRES_ERR_NUMBER, attnres_mix(&desc, &mix_args, NULL));
}

static void bank_passes_of_zero_tokens(void) {
    toy_model m = model_make(2, 3, 2, ATTNRES_SUBLAYERS);
    attnres_bank bank;
    void *memory = bank_open(&bank, &m.desc);
    attnres_input nothing = attnres_in_f32(NULL, 0);
    CHECK(attnres_bank_start(&bank, 0, nothing, NULL) == ATTNRES_OK);
    for (size_t l = 0; l <= 6; l++) {
        CHECK(attnres_bank_read(&bank, NULL, no_norm, attnres_out_f32(NULL, 0), NULL, NULL) ==
              ATTNRES_OK);
        if (l < 6) CHECK(attnres_bank_add(&bank, nothing, NULL) == ATTNRES_OK);
    }
    CHECK(bank.n_blocks == 3);
    free(memory);
    model_free(&m);
}

static void sizes_are_zero_when_invalid(void) {
    attnres_desc desc = misuse_desc();
    CHECK(attnres_mix_scratch_bytes(&desc, 1, NULL) > 0);
    CHECK(attnres_inter_scratch_bytes(&desc, 1, 1, NULL) > 0);
    CHECK(attnres_merge_scratch_bytes(&desc, NULL) > 0);
    CHECK(attnres_merge_scratch_bytes(NULL, NULL) == 0);
    attnres_run run;
    memset(&run, 0, sizeof run);
    run.isa = (attnres_isa)9;
    CHECK(attnres_mix_scratch_bytes(&desc, 1, &run) == 0);
    CHECK(attnres_inter_scratch_bytes(&desc, 1, 1, &run) == 0);
    CHECK(attnres_merge_scratch_bytes(&desc, &run) == 0);
    run.isa = ATTNRES_ISA_AUTO;
    run.parallel_for = never_called;
    CHECK(attnres_mix_scratch_bytes(&desc, 1, &run) == 0);
    CHECK(attnres_mix_scratch_bytes(NULL, 1, NULL) == 0);
    CHECK(attnres_mix_scratch_bytes(&desc, 0, NULL) == 0);
    CHECK(attnres_inter_scratch_bytes(&desc, 0, 1, NULL) == 0);
    CHECK(attnres_inter_scratch_bytes(&desc, 1, 0, NULL) == 0);
    CHECK(attnres_inter_scratch_bytes(NULL, 1, 1, NULL) == 0);
    const size_t huge[] = {SIZE_MAX, SIZE_MAX - 63, SIZE_MAX / 2, SIZE_MAX / 4 + 1, SIZE_MAX / 8};
    for (size_t i = 0; i < COUNT(huge); i++) {
        CHECK(attnres_mix_scratch_bytes(&desc, huge[i], NULL) == 0);
        CHECK(attnres_inter_scratch_bytes(&desc, huge[i], 1, NULL) == 0);
        CHECK(attnres_inter_scratch_bytes(&desc, 1, huge[i], NULL) == 0);
        CHECK(attnres_inter_scratch_bytes(&desc, huge[i], huge[i], NULL) == 0);
    }
    desc.dim = SIZE_MAX;
    CHECK(attnres_mix_scratch_bytes(&desc, 1, NULL) == 0);
    CHECK(attnres_bank_bytes(NULL) == 0 && attnres_bank_capacity(NULL) == 0);
    attnres_bank_desc zero;
    memset(&zero, 0, sizeof zero);
    CHECK(attnres_bank_bytes(&zero) == 0 && attnres_bank_capacity(&zero) == 0);
    attnres_bank_desc many = bank_desc(1, SIZE_MAX / 8, 1, ATTNRES_LAYERS); /* rows and blocks */
    many.dim = SIZE_MAX / 64, many.n_tokens = SIZE_MAX / 64;
    CHECK(attnres_bank_bytes(&many) == 0);
}

/* Scratch is independent of tokens by signature; a bank grows by its rows and little more. */
static void bank_bytes_are_what_the_manual_says(void) {
    attnres_bank_desc desc = bank_desc(1, 93, 12, ATTNRES_LAYERS);
    desc.dim = 7168;
    desc.n_tokens = 16;
    size_t rows = 16 * 7168 * sizeof(float) * 9, scratch = 7168 * (sizeof(double) + sizeof(float));
    CHECK(attnres_bank_bytes(&desc) >= rows && attnres_bank_bytes(&desc) < rows + scratch + 8192);
}

int main(void) {
    TEST(golden_l1);
    TEST(golden_l9);
    TEST(golden_large_and_small);
    TEST(golden_peaked);
    TEST(golden_zero_query_is_mean);
    TEST(exp_is_within_two_ulp);
    TEST(mix_matches_float64);
    TEST(scores_are_near_float64);
    TEST(scale_multiplies_the_scores);
    TEST(last_element_counts);
    TEST(two_phases_equal_one);
    TEST(merge_without_a_partial);
    TEST(single_source_keeps_the_norm);
    TEST(zero_query_is_the_mean);
    TEST(extreme_scores_are_safe);
    TEST(weights_sum_to_one);
    TEST(squares_beyond_float32);
    TEST(fold_multiplies_and_may_be_in_place);
    TEST(cached_inverse_rms_same_bits);
    TEST(inverse_rms_is_right);
    TEST(token_splits_same_bits);
    TEST(nan_stays_in_its_token);
    TEST(misaligned_buffers_same_bits);
    TEST(strided_views_and_guard_bands);
    TEST(output_may_be_a_source);
    TEST(merge_output_may_be_its_input);
    TEST(strides_past_2_to_the_31);
    TEST(bank_of_single_sublayers_is_full_attention);
    TEST(bank_in_sublayers_is_the_papers);
    TEST(bank_in_layers_is_k3s);
    TEST(bank_counts_k3s_blocks);
    TEST(bank_capacities);
    TEST(bank_starts_again);
    TEST(bank_serves_two_phases);
    TEST(bank_adds_parts);
    TEST(results_have_names_and_texts);
    TEST(mix_refuses_misuse);
    TEST(one_token_ignores_strides);
    TEST(inter_refuses_misuse);
    TEST(merge_refuses_misuse);
    TEST(fold_and_inverse_rms_refuse_misuse);
    TEST(bank_init_refuses_misuse);
    TEST(bank_refuses_misuse);
    TEST(zero_tokens_touch_nothing);
    TEST(bank_passes_of_zero_tokens);
    TEST(sizes_are_zero_when_invalid);
    TEST(bank_bytes_are_what_the_manual_says);
    return test_summary();
}
