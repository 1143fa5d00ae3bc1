/* attnres.h: every instruction set that this machine has gives the bits of the plain C kernels, in
 * every call; 16-bit tensors are float32 ones, rounded; threads change nothing. Sets that did not
 * run are printed as skipped. */
#define ATTNRES_IMPLEMENTATION
#include "../attnres.h"
#include "hooks.h"
#include "test.h"

/* ==== 1. All calls at once ==================================================================== */

/* Sources whose values are exact in any type, and queries. */
typedef struct problem {
    size_t n, tokens, dim, n_queries;
    float *values;  /* [n][tokens][dim] */
    float *queries; /* [n_queries][dim] */
    float *norm;    /* [dim] */
} problem;

static problem problem_new(size_t n, size_t tokens, size_t dim, size_t n_queries) {
    problem p;
    p.n = n, p.tokens = tokens, p.dim = dim, p.n_queries = n_queries;
    p.values = test_floats(n * tokens * dim);
    p.queries = test_floats(n_queries * dim);
    p.norm = test_floats(dim);
    for (size_t i = 0; i < n * tokens * dim; i++)
        p.values[i] = (float)((int)(test_random_u64() % 255) - 127) / 64;
    test_fill_normal(p.queries, n_queries * dim);
    for (size_t q = 0; q < n_queries; q++) /* half of them small ones: see NUMERICS */
        for (size_t i = 0; i < dim && (q + dim + n) % 2; i++)
            p.queries[q * dim + i] /= sqrtf((float)dim);
    for (size_t i = 0; i < dim; i++) p.norm[i] = test_uniform_f32(0.5f, 1.5f);
    return p;
}

static void problem_free(problem *p) {
    free(p->values), free(p->queries), free(p->norm);
}

enum { LAYERS = 2, READS = 2 * LAYERS + 1 };

/* What all calls on a problem give: first the tensors that have the output's type, as floats. */
typedef struct results {
    size_t n_typed, n_floats, n_doubles;
    float *floats;
    double *doubles;
} results;

static results results_new(const problem *p) {
    results r;
    size_t rows = p->tokens * p->n_queries;
    r.n_typed = (3 + READS) * p->tokens * p->dim;
    r.n_floats = r.n_typed + p->tokens * p->n + rows * (1 + p->dim);
    r.n_doubles = p->tokens * p->n + rows;
    r.floats = test_floats(r.n_floats);
    r.doubles = (double *)test_alloc(r.n_doubles * sizeof(double));
    return r;
}

static void results_free(results *r) {
    free(r->floats), free(r->doubles);
}

static int same_number(double x, double y) {
    return x != x ? y != y : memcmp(&x, &y, sizeof x) == 0;
}

/* Bit for bit, but that a NaN is a NaN. */
static int results_equal(const results *a, const results *b) {
    for (size_t i = 0; i < a->n_floats; i++)
        if (!same_number((double)a->floats[i], (double)b->floats[i])) return 0;
    for (size_t i = 0; i < a->n_doubles; i++)
        if (!same_number(a->doubles[i], b->doubles[i])) return 0;
    return 1;
}

/* The problem's tensors in memory of one type, rows an odd number of elements apart and starting at
 * an odd one. */
typedef struct tensors {
    attnres_type in, out;
    size_t stride;
    unsigned char *values, *o;
    attnres_input *sources; /* [n] */
    const double **inv_rms; /* [n] */
} tensors;

static tensors tensors_new(const problem *p, attnres_type in, attnres_type out) {
    tensors x;
    x.in = in, x.out = out;
    x.stride = p->dim + 3 - p->dim % 2;
    size_t rows = p->n * p->tokens, size = attnresi_type_bytes(in);
    x.values = (unsigned char *)test_alloc((rows * x.stride + 1) * size);
    x.o = (unsigned char *)test_alloc((p->tokens * x.stride + 1) * attnresi_type_bytes(out));
    x.sources = (attnres_input *)test_alloc(p->n * sizeof *x.sources);
    x.inv_rms = (const double **)test_alloc(p->n * sizeof *x.inv_rms);
    for (size_t r = 0; r < rows; r++)
        attnresi_from_floats(p->values + r * p->dim, in, p->dim,
                             x.values + (1 + r * x.stride) * size);
    for (size_t j = 0; j < p->n; j++)
        x.sources[j] = attnres_in(x.values + (1 + j * p->tokens * x.stride) * size, in,
                                  (ptrdiff_t)x.stride);
    return x;
}

static void tensors_free(tensors *x) {
    free(x->values), free(x->o), free(x->sources), free(x->inv_rms);
}

static attnres_output tensors_output(const tensors *x) {
    return attnres_out(x->o + attnresi_type_bytes(x->out), x->out, (ptrdiff_t)x->stride);
}

/* Appends o to the results. */
static float *keep(const problem *p, const tensors *x, float *to) {
    size_t size = attnresi_type_bytes(x->out);
    for (size_t t = 0; t < p->tokens; t++, to += p->dim)
        attnresi_to_floats(x->o + (1 + t * x->stride) * size, x->out, p->dim, to);
    return to;
}

static attnres_run with_scratch(const attnres_run *how, size_t bytes) {
    attnres_run run = *how;
    CHECK(bytes > 0);
    run.scratch = test_scratch(bytes + 1);
    run.scratch = (unsigned char *)run.scratch + 1;
    run.scratch_bytes = bytes;
    return run;
}

static void free_scratch(const attnres_run *run) {
    free((unsigned char *)run->scratch - 1);
}

static float *run_mixes(const problem *p, const tensors *x, const attnres_run *how,
                        const attnres_desc *desc, float *at, float *weights) {
    attnres_run run = with_scratch(how, attnres_mix_scratch_bytes(desc, p->n, how));
    attnres_mix_args args;
    memset(&args, 0, sizeof args);
    args.n_tokens = p->tokens;
    args.sources = x->sources, args.n_sources = p->n;
    args.query = p->queries;
    args.norm.weight = p->norm, args.norm.eps = 1e-6f;
    args.o = tensors_output(x);
    args.weights = weights;
    CHECK(attnres_mix(desc, &args, &run) == ATTNRES_OK);
    at = keep(p, x, at);
    args.norm.weight = NULL, args.weights = NULL; /* and once more with cached inverse RMS */
    args.inv_rms = (const double *const *)x->inv_rms;
    CHECK(attnres_mix(desc, &args, &run) == ATTNRES_OK);
    free_scratch(&run);
    return keep(p, x, at);
}

/* max, then sums, then mixtures; and the last source merged into those of the last query. */
static float *run_phases(const problem *p, const tensors *x, const attnres_run *how,
                         const attnres_desc *desc, float *at, double *max, float *sum, float *mix) {
    const float *queries[16];
    for (size_t q = 0; q < p->n_queries; q++) queries[q] = p->queries + q * p->dim;
    size_t last = (p->n_queries - 1) * p->tokens;
    attnres_run run = with_scratch(how, attnres_inter_scratch_bytes(desc, p->n, p->n_queries, how));
    attnres_inter_args first;
    memset(&first, 0, sizeof first);
    first.n_tokens = p->tokens;
    first.sources = x->sources, first.n_sources = p->n;
    first.queries = queries, first.n_queries = p->n_queries;
    first.max = max, first.sum = sum, first.mix = mix;
    CHECK(attnres_inter(desc, &first, &run) == ATTNRES_OK);
    free_scratch(&run);
    run = with_scratch(how, attnres_merge_scratch_bytes(desc, how));
    attnres_merge_args second;
    memset(&second, 0, sizeof second);
    second.n_tokens = p->tokens;
    second.max = max + last, second.sum = sum + last, second.mix = mix + last * p->dim;
    second.partial = x->sources[p->n - 1];
    second.query = queries[p->n_queries - 1];
    second.norm.weight = p->norm, second.norm.eps = 1e-6f;
    second.o = tensors_output(x);
    CHECK(attnres_merge(desc, &second, &run) == ATTNRES_OK);
    free_scratch(&run);
    return keep(p, x, at);
}

static float *run_bank(const problem *p, const tensors *x, const attnres_run *how, float *at) {
    attnres_bank_desc desc;
    attnres_bank bank;
    attnres_norm norm = {p->norm, 1e-6f};
    memset(&desc, 0, sizeof desc);
    desc.dim = p->dim, desc.n_tokens = p->tokens, desc.eps = 1e-5f;
    desc.n_layers = LAYERS, desc.block_size = 1, desc.unit = ATTNRES_LAYERS;
    desc.n_threads = how->n_threads;
    size_t bytes = attnres_bank_bytes(&desc);
    void *memory = test_alloc(bytes);
    CHECK(attnres_bank_init(&bank, &desc, memory, bytes) == ATTNRES_OK);
    CHECK(attnres_bank_start(&bank, p->tokens, x->sources[0], how) == ATTNRES_OK);
    for (size_t l = 0; l < READS; l++) {
        attnres_output o = tensors_output(x);
        CHECK(attnres_bank_read(&bank, p->queries, norm, o, NULL, how) == ATTNRES_OK);
        at = keep(p, x, at);
        if (l + 1 == READS) break;
        CHECK(attnres_bank_add(&bank, x->sources[l % p->n], how) == ATTNRES_OK);
        CHECK(attnres_bank_add(&bank, x->sources[(l + 1) % p->n], how) == ATTNRES_OK);
    }
    free(memory);
    return at;
}

/* All calls, on sources and outputs of those types. */
static void run_all(const problem *p, attnres_type in, attnres_type out, const attnres_run *how,
                    results *r) {
    attnres_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.dim = p->dim, desc.eps = 1e-5f;
    size_t rows = p->tokens * p->n_queries;
    tensors x = tensors_new(p, in, out);
    float *at = r->floats, *weights = r->floats + r->n_typed, *sum = weights + p->tokens * p->n;
    double *inv_rms = r->doubles;
    for (size_t j = 0; j < p->n; j++, inv_rms += p->tokens) {
        CHECK(attnres_inverse_rms(&desc, p->tokens, x.sources[j], inv_rms, how) == ATTNRES_OK);
        x.inv_rms[j] = j % 2 ? inv_rms : NULL;
    }
    at = run_mixes(p, &x, how, &desc, at, weights);
    at = run_phases(p, &x, how, &desc, at, inv_rms, sum, sum + rows);
    at = run_bank(p, &x, how, at);
    CHECK(at == r->floats + r->n_typed);
    tensors_free(&x);
}

static attnres_run run_on(attnres_isa isa) {
    attnres_run run;
    memset(&run, 0, sizeof run);
    run.isa = isa;
    return run;
}

/* ==== 2. Instruction sets ===================================================================== */

static const size_t dims[] = {1,  2,  3,  7,  15, 16,  17,  31,  32,  33,  47,
                              48, 63, 64, 65, 80, 100, 127, 128, 129, 200, 2304};
enum { DIMS = sizeof dims / sizeof *dims };

static void check_isa(attnres_isa isa) {
    const char *name = attnres_isa_name(isa);
    if (!attnres_isa_is_available(isa)) {
        char why[64];
        snprintf(why, sizeof why, "%s: not on this machine or in this build", name);
        test_skip(why);
        return;
    }
    printf("  ran %s\n", name);
    test_seed(1);
    attnres_run plain = run_on(ATTNRES_ISA_SCALAR), run = run_on(isa);
    for (size_t i = 0; i < DIMS; i++)
        for (size_t k = 0; k < 3; k++) {
            problem p = problem_new(1 + (i + k) % 9, 1 + (3 * i + 5 * k) % 19, dims[i],
                                    1 + (i + 2 * k) % 8);
            results want = results_new(&p), got = results_new(&p);
            attnres_type in = (attnres_type)(k % 3), out = (attnres_type)((i + k) % 3);
            run_all(&p, in, out, &plain, &want);
            run_all(&p, in, out, &run, &got);
            CHECK_MSG(results_equal(&want, &got), "%s: %zu sources of %zu tokens, %zu, types %d %d",
                      name, p.n, p.tokens, p.dim, (int)in, (int)out);
            results_free(&want), results_free(&got);
            problem_free(&p);
        }
}

static void avx2_equals_scalar(void) {
    check_isa(ATTNRES_ISA_AVX2);
}
static void avx512_equals_scalar(void) {
    check_isa(ATTNRES_ISA_AVX512);
}
static void neon_equals_scalar(void) {
    check_isa(ATTNRES_ISA_NEON);
}

/* Subnormal, huge, signed zeros, infinite and NaN, in every type. */
static void extremes_have_the_same_bits(void) {
    static const float odd[] = {0.0f,  -0.0f, 0x1p-149f, -0x1p-126f, 0x1p-24f,  1e-30f,   -1e20f,
                                1e38f, 3e38f, -65504.0f, 65520.0f,   HUGE_VALF, -HUGE_VALF, NAN};
    size_t n_odd = sizeof odd / sizeof *odd;
    test_seed(2);
    for (int isa = ATTNRES_ISA_AVX2; isa <= ATTNRES_ISA_NEON; isa++)
        for (size_t round = 0; round < 60; round++) {
            if (!attnres_isa_is_available((attnres_isa)isa)) continue;
            attnres_run plain = run_on(ATTNRES_ISA_SCALAR), run = run_on((attnres_isa)isa);
            problem p = problem_new(4, 9, 70, 4);
            results want = results_new(&p), got = results_new(&p);
            size_t usual = round % 2 ? n_odd : n_odd - 3; /* every other round, numbers only */
            for (size_t i = 0; i < 4 * 9 * 70; i += 1 + (size_t)(test_random_u64() % 50))
                p.values[i] = odd[test_random_u64() % usual];
            for (size_t i = 0; i < p.dim; i += 1 + (size_t)(test_random_u64() % 20))
                p.queries[i] = odd[test_random_u64() % (n_odd - 3)];
            attnres_type in = (attnres_type)(round % 3), out = (attnres_type)(round / 3 % 3);
            run_all(&p, in, out, &plain, &want);
            run_all(&p, in, out, &run, &got);
            CHECK_MSG(results_equal(&want, &got), "%s, round %zu", attnres_isa_name(run.isa),
                      round);
            results_free(&want), results_free(&got);
            problem_free(&p);
        }
}

/* The kernels' exp over a spread of all floats, in lengths that are not whole lanes. */
static void exp_has_the_same_bits(void) {
    enum { N = 1021 };
    static float x[N];
    for (int isa = ATTNRES_ISA_AVX2; isa <= ATTNRES_ISA_NEON; isa++) {
        const attnresi_kernels *kernels = attnresi_kernels_of((attnres_isa)isa);
        for (uint32_t start = 0; kernels && start < 800; start++) {
            for (uint32_t i = 0; i < N; i++) {
                uint32_t bits = (start * N + i) * 5237u;
                memcpy(&x[i], &bits, sizeof bits);
            }
            kernels->exp(x, N);
            for (uint32_t i = 0; i < N; i++) {
                uint32_t bits = (start * N + i) * 5237u;
                float from;
                memcpy(&from, &bits, sizeof bits);
                CHECK_MSG(same_number((double)attnresi_exp(from), (double)x[i]), "exp(%a): %a",
                          (double)from, (double)x[i]);
            }
        }
    }
}

static void names_and_refusals(void) {
    CHECK(strcmp(attnres_isa_name(ATTNRES_ISA_AUTO), "auto") == 0);
    CHECK(strcmp(attnres_isa_name(ATTNRES_ISA_AVX512), "avx512") == 0);
    CHECK(strcmp(attnres_isa_name((attnres_isa)9), "unknown") == 0);
    CHECK(attnres_isa_is_available(ATTNRES_ISA_AUTO));
    CHECK(attnres_isa_is_available(ATTNRES_ISA_SCALAR));
    CHECK(attnres_isa_is_available(attnres_isa_best()) && attnres_isa_best() != ATTNRES_ISA_AUTO);
    CHECK(!attnres_isa_is_available((attnres_isa)9));
    CHECK(!attnres_isa_is_available(ATTNRES_ISA_NEON) ||
          !attnres_isa_is_available(ATTNRES_ISA_AVX2));
}

/* ==== 3. Element types ======================================================================== */

/* Every pattern in; roundings out, of a spread of floats. */
static void conversions_have_the_same_bits(void) {
    enum { N = 65536 };
    static uint16_t bits[N], out_plain[N], out[N];
    static float x[N], y[N];
    for (int isa = ATTNRES_ISA_AVX2; isa <= ATTNRES_ISA_NEON; isa++)
        for (int type = ATTNRES_F16; type <= ATTNRES_BF16; type++) {
            const attnresi_kernels *kernels = attnresi_kernels_of((attnres_isa)isa);
            if (!kernels) continue;
            for (size_t i = 0; i < N; i++) bits[i] = (uint16_t)i;
            attnresi_to_floats(bits, (attnres_type)type, N, x);
            kernels->to_floats(bits, (attnres_type)type, N, y);
            for (size_t i = 0; i < N; i++) CHECK(same_number((double)x[i], (double)y[i]));
            for (uint32_t shift = 0; shift < 64; shift++) {
                for (uint32_t i = 0; i < N; i++) {
                    uint32_t pattern = (i << 16) + shift * 1024 + (i * 40503u >> 22);
                    memcpy(&x[i], &pattern, 4);
                }
                attnresi_from_floats(x, (attnres_type)type, N, out_plain);
                kernels->from_floats(x, (attnres_type)type, N, out);
                for (size_t i = 0; i < N; i++) CHECK(out[i] == out_plain[i] || isnan(x[i]));
            }
        }
}

/* Known values, so that the plain conversions are not only compared with themselves. */
static void conversions_are_right(void) {
    static const struct {
        float x;
        uint16_t f16, bf16;
    } known[] = {
        {1.0f, 0x3c00, 0x3f80},       {-2.0f, 0xc000, 0xc000},      {0.0f, 0x0000, 0x0000},
        {-0.0f, 0x8000, 0x8000},      {65504.0f, 0x7bff, 0x4780},   {65519.0f, 0x7bff, 0x4780},
        {65520.0f, 0x7c00, 0x4780},   {0x1p-24f, 0x0001, 0x3380},   {0x1p-25f, 0x0000, 0x3300},
        {0x1.8p-24f, 0x0002, 0x33c0}, {0x1.002p0f, 0x3c00, 0x3f80}, {0x1.006p0f, 0x3c02, 0x3f80},
        {0x1.01p0f, 0x3c04, 0x3f80},  {0x1.03p0f, 0x3c0c, 0x3f82},  {HUGE_VALF, 0x7c00, 0x7f80},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        CHECK_MSG(attnresi_to_f16(known[i].x) == known[i].f16, "f16 of %a", (double)known[i].x);
        CHECK_MSG(attnresi_to_bf16(known[i].x) == known[i].bf16, "bf16 of %a", (double)known[i].x);
    }
    for (uint32_t i = 0; i < 65536; i++) { /* there and back */
        float half = attnresi_from_f16((uint16_t)i), brain = attnresi_from_bf16((uint16_t)i);
        CHECK(isnan(half) || attnresi_to_f16(half) == i);
        CHECK(isnan(brain) || attnresi_to_bf16(brain) == i);
    }
}

/* Values that all types hold give the same results from all types; outputs of 16 bits are those of
 * float32, rounded. */
static void types_are_float32_rounded(void) {
    test_seed(3);
    for (int isa = ATTNRES_ISA_SCALAR; isa <= ATTNRES_ISA_NEON; isa++)
        for (size_t i = 0; i < DIMS; i++) {
            if (!attnres_isa_is_available((attnres_isa)isa)) continue;
            attnres_run run = run_on((attnres_isa)isa);
            problem p = problem_new(1 + i % 5, 1 + i % 10, dims[i], 1 + i % 4);
            results want = results_new(&p), got = results_new(&p);
            run_all(&p, ATTNRES_F32, ATTNRES_F32, &run, &want);
            for (int type = ATTNRES_F16; type <= ATTNRES_BF16; type++) {
                run_all(&p, (attnres_type)type, ATTNRES_F32, &run, &got);
                CHECK_MSG(results_equal(&want, &got), "sources of type %d, dim %zu", type, dims[i]);
            }
            for (int type = ATTNRES_F16; type <= ATTNRES_BF16; type++) {
                run_all(&p, ATTNRES_F32, (attnres_type)type, &run, &got);
                for (size_t k = 0; k < want.n_typed; k++) {
                    float x = want.floats[k];
                    float rounded = type == ATTNRES_F16 ? attnresi_from_f16(attnresi_to_f16(x))
                                                        : attnresi_from_bf16(attnresi_to_bf16(x));
                    CHECK_MSG(same_number((double)rounded, (double)got.floats[k]),
                              "output of type %d, dim %zu: %a, want %a", type, dims[i],
                              (double)got.floats[k], (double)rounded);
                }
            }
            results_free(&want), results_free(&got);
            problem_free(&p);
        }
}

/* Sources of three types in one call, and an output of 16 bits that is one of them. */
static void mixed_types_and_output_in_place(void) {
    enum { T = 11, D = 83 };
    test_seed(4);
    problem p = problem_new(3, T, D, 1);
    attnres_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.dim = D, desc.eps = 1e-5f;
    static uint16_t half[T * D], brain[T * D], want[T * D];
    attnresi_from_floats(p.values, ATTNRES_F16, T * D, half);
    attnresi_from_floats(p.values + T * D, ATTNRES_BF16, T * D, brain);
    attnres_input sources[3], plain[3];
    for (size_t j = 0; j < 3; j++) plain[j] = attnres_in_f32(p.values + j * T * D, D);
    sources[0] = attnres_in(half, ATTNRES_F16, D);
    sources[1] = attnres_in(brain, ATTNRES_BF16, D);
    sources[2] = plain[2];
    attnres_run how = run_on(ATTNRES_ISA_AUTO);
    attnres_run run = with_scratch(&how, attnres_mix_scratch_bytes(&desc, 3, &how));
    attnres_mix_args args;
    memset(&args, 0, sizeof args);
    args.n_tokens = T, args.n_sources = 3, args.sources = plain;
    args.query = p.queries;
    args.norm.weight = p.norm, args.norm.eps = 1e-6f;
    args.o = attnres_out(want, ATTNRES_BF16, D);
    CHECK(attnres_mix(&desc, &args, &run) == ATTNRES_OK);
    args.sources = sources;
    args.o = attnres_out(brain, ATTNRES_BF16, D);
    CHECK(attnres_mix(&desc, &args, &run) == ATTNRES_OK);
    CHECK(memcmp(brain, want, sizeof want) == 0);
    free_scratch(&run);
    problem_free(&p);
}

/* ==== 4. Threads ============================================================================== */

static const attnres_parallel_for hooks[] = {in_order, backwards, only_the_last, none_at_all,
                                             real_threads};
enum { HOOKS = 5 };

static void same_bits_for_any_threads_and_hook(void) {
    static const size_t threads[] = {1, 2, 3, 8};
    test_seed(5);
    for (size_t tokens = 1; tokens <= 70; tokens += 23) {
        problem p = problem_new(5, tokens, 75, 4);
        results want = results_new(&p), got = results_new(&p);
        attnres_run run = run_on(ATTNRES_ISA_AUTO);
        run.n_threads = 1; /* with OpenMP */
        run_all(&p, ATTNRES_BF16, ATTNRES_F32, &run, &want);
        for (size_t h = 0; h < HOOKS; h++)
            for (size_t t = 0; t < 4; t++) {
                hook_counts counts = {0};
                run.parallel_for = hooks[h], run.user = &counts, run.n_threads = threads[t];
                run_all(&p, ATTNRES_BF16, ATTNRES_F32, &run, &got);
                CHECK_MSG(results_equal(&want, &got), "hook %zu, %zu threads, %zu tokens", h,
                          threads[t], tokens);
            }
        run = run_on(ATTNRES_ISA_AUTO); /* OpenMP's own number, where there is OpenMP */
        run_all(&p, ATTNRES_BF16, ATTNRES_F32, &run, &got);
        CHECK(results_equal(&want, &got));
        results_free(&want), results_free(&got);
        problem_free(&p);
    }
}

/* Enough work that threads meet: each must have its own scratch. */
static void threads_at_work_together(void) {
    test_seed(8);
    problem p = problem_new(4, 300, 400, 2);
    results want = results_new(&p), got = results_new(&p);
    attnres_run run = run_on(ATTNRES_ISA_AUTO);
    run.n_threads = 1;
    run_all(&p, ATTNRES_F16, ATTNRES_F16, &run, &want);
    run.parallel_for = real_threads, run.n_threads = 8;
    for (int times = 0; times < 5; times++) {
        run_all(&p, ATTNRES_F16, ATTNRES_F16, &run, &got);
        CHECK(results_equal(&want, &got));
    }
    results_free(&want), results_free(&got);
    problem_free(&p);
}

/* Five and nine tokens go to five workers, one or two each; one token needs no hook. */
static void tokens_are_spread(void) {
    test_seed(6);
    for (size_t tokens = 1; tokens <= 9; tokens += 4) {
        problem p = problem_new(3, tokens, 20, 1);
        results r = results_new(&p);
        hook_counts counts = {0};
        attnres_run run = run_on(ATTNRES_ISA_AUTO);
        run.parallel_for = in_order, run.user = &counts, run.n_threads = 8;
        run_all(&p, ATTNRES_F32, ATTNRES_F32, &run, &r);
        CHECK_MSG(counts.asked == (tokens == 1 ? 0 : 5), "%zu workers for %zu tokens", counts.asked,
                  tokens);
        results_free(&r);
        problem_free(&p);
    }
}

/* Scratch grows with threads, and a bank uses no more of them than it was made for. */
static void scratch_is_per_thread(void) {
    attnres_desc desc;
    attnres_run run = run_on(ATTNRES_ISA_AUTO);
    memset(&desc, 0, sizeof desc);
    desc.dim = 100, desc.eps = 1e-5f;
    run.parallel_for = in_order;
    CHECK(attnres_mix_scratch_bytes(&desc, 9, &run) == 0); /* no number of threads */
    run.n_threads = 1;
    size_t one = attnres_mix_scratch_bytes(&desc, 9, &run);
    run.n_threads = 4;
    size_t four = attnres_mix_scratch_bytes(&desc, 9, &run);
    CHECK(one > 0 && four > one && four < 4 * one);
    run.n_threads = SIZE_MAX / 2;
    CHECK(attnres_mix_scratch_bytes(&desc, 9, &run) == 0);

    enum { T = 64 };
    static float x[T * 100];
    hook_counts counts = {0};
    attnres_bank bank;
    attnres_bank_desc small;
    attnres_norm no_norm = {NULL, 0};
    memset(&small, 0, sizeof small);
    small.dim = 100, small.n_tokens = T, small.n_layers = 1, small.block_size = 1;
    small.unit = ATTNRES_LAYERS, small.eps = 1e-5f, small.n_threads = 3;
    size_t bytes = attnres_bank_bytes(&small);
    void *memory = test_alloc(bytes);
    run.user = &counts, run.n_threads = 8;
    attnres_input in = attnres_in_f32(x, 100);
    CHECK(attnres_bank_init(&bank, &small, memory, bytes) == ATTNRES_OK);
    CHECK(attnres_bank_start(&bank, T, in, &run) == ATTNRES_OK && counts.asked == 3);
    counts.asked = 0;
    CHECK(attnres_bank_read(&bank, NULL, no_norm, attnres_out_f32(x, 100), NULL, &run) ==
              ATTNRES_OK &&
          counts.asked == 3);
    counts.asked = 0;
    CHECK(attnres_bank_add(&bank, in, &run) == ATTNRES_OK && counts.asked == 3);
    free(memory);
}

typedef struct host {
    const problem *p;
    results r;
    int inside; /* its own calls are parallel too */
} host;

static void *run_host(void *argument) {
    host *x = (host *)argument;
    attnres_run run = run_on(ATTNRES_ISA_AUTO);
    run.n_threads = 1;
    if (x->inside) run.parallel_for = real_threads, run.n_threads = 2;
    for (int times = 0; times < 3; times++)
        run_all(x->p, ATTNRES_F16, ATTNRES_BF16, &run, &x->r);
    return NULL;
}

/* The bits themselves: the number was found on one machine, and every other, with whatever compiler
 * and instruction set, must find it too. */
static void every_machine_has_the_same_bits(void) {
    static const size_t widths[] = {40, 300, 1030};
    uint64_t hash = TEST_HASH_START;
    test_seed(8);
    for (size_t i = 0; i < 3; i++) {
        problem p = problem_new(4 + i, 3, widths[i], 3);
        results r = results_new(&p);
        attnres_run run = run_on(ATTNRES_ISA_AUTO);
        run_all(&p, ATTNRES_F32, ATTNRES_F32, &run, &r);
        hash = test_hash_f32(hash, r.floats, r.n_floats);
        hash = test_hash_f64(hash, r.doubles, r.n_doubles);
        results_free(&r);
        problem_free(&p);
    }
    CHECK_MSG(hash == 0x07a3c45120a3b28eu, "0x%08lx%08lx", (unsigned long)(hash >> 32),
              (unsigned long)(hash & 0xffffffffu));
}

static void many_host_threads_at_once(void) {
    enum { N = 8 };
    pthread_t thread[N];
    host hosts[N];
    test_seed(7);
    problem p = problem_new(4, 21, 50, 3);
    for (size_t i = 0; i < N; i++) {
        hosts[i].p = &p;
        hosts[i].r = results_new(&p);
        hosts[i].inside = i % 2 == 0;
        start_thread(&thread[i], run_host, &hosts[i]);
    }
    results want = results_new(&p);
    attnres_run run = run_on(ATTNRES_ISA_AUTO);
    for (size_t i = 0; i < N; i++) pthread_join(thread[i], NULL);
    run_all(&p, ATTNRES_F16, ATTNRES_BF16, &run, &want);
    for (size_t i = 0; i < N; i++) {
        CHECK(results_equal(&want, &hosts[i].r));
        results_free(&hosts[i].r);
    }
    results_free(&want);
    problem_free(&p);
}

static void find_best(void *context, size_t index) {
    ((attnres_isa *)context)[index] = attnres_isa_best();
}

/* The first calls of the process find out at the same time which set is the best. */
static void first_calls_at_once(void) {
    attnres_isa found[8];
    real_threads(NULL, 8, find_best, found);
    for (size_t i = 0; i < 8; i++) CHECK(found[i] == attnres_isa_best());
}

int main(void) {
    TEST(first_calls_at_once); /* first */
    TEST(avx2_equals_scalar);
    TEST(avx512_equals_scalar);
    TEST(neon_equals_scalar);
    TEST(extremes_have_the_same_bits);
    TEST(exp_has_the_same_bits);
    TEST(names_and_refusals);
    TEST(conversions_have_the_same_bits);
    TEST(conversions_are_right);
    TEST(types_are_float32_rounded);
    TEST(mixed_types_and_output_in_place);
    TEST(same_bits_for_any_threads_and_hook);
    TEST(threads_at_work_together);
    TEST(tokens_are_spread);
    TEST(scratch_is_per_thread);
    TEST(many_host_threads_at_once);
    TEST(every_machine_has_the_same_bits);
    return test_summary();
}
