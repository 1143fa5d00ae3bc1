/* attnres.c - a mixture that the input describes: number of sources, types, strides, norm, aliasing,
 * values.
 *
 * Every tensor is a block of exactly its extent. Every instruction set gives the same bits, in one
 * pass and in two phases; where numbers are tame, both are near float64. A call with one thing wrong
 * says which and writes nothing.
 */
#define ATTNRES_IMPLEMENTATION
#include "../../attnres.h"

#include "fuzz.h"

enum { MOST_SOURCES = 6, MOST_TOKENS = 11, FILLER = 0xA5 };

/* [tokens][dim] and the block that it lies in. */
typedef struct tensor {
    unsigned char *block, *data; /* data: of the view */
    size_t bytes;
    attnres_type type;
    ptrdiff_t stride;
} tensor;

typedef struct call {
    attnres_desc desc;
    bool tame, cached, aliased, two_phases;
    size_t tokens, n_sources;
    float *values; /* [sources][tokens][dim]: what the sources hold */
    float *query;  /* [dim] */
    float *weight; /* [dim] of the norm, or null */
    tensor sources[MOST_SOURCES], o;
    double *inv_rms; /* [sources][tokens] */
    float *weights;  /* [tokens][sources] */
} call;

static size_t type_bytes(attnres_type type) {
    return type == ATTNRES_F32 ? 4 : 2;
}

static unsigned char *row_of(const tensor *x, size_t t) {
    return x->data + (ptrdiff_t)t * x->stride * (ptrdiff_t)type_bytes(x->type);
}

static tensor take_tensor(fuzz_input *in, size_t tokens, size_t dim, bool written) {
    tensor x;
    unsigned layout = take_u8(in);
    size_t step = dim + (layout >> 1 & 7), last = tokens ? tokens - 1 : 0;
    if (!written && layout >> 4 == 15) step = 0; /* all tokens have the same row */
    x.type = (attnres_type)take_below(in, 3);
    x.bytes = (last * step + dim) * type_bytes(x.type);
    x.block = x.data = (unsigned char *)fuzz_alloc(x.bytes);
    x.stride = (ptrdiff_t)step;
    if (layout & 1) x.stride = -x.stride, x.data += last * step * type_bytes(x.type);
    memset(x.block, FILLER, x.bytes);
    return x;
}

/* Random numbers; of a wild call some are what the input says, whatever that is. */
static float *take_values(fuzz_input *in, bool tame, size_t n, float size) {
    float *x = (float *)fuzz_alloc(n * sizeof *x);
    uint32_t seed = take_u16(in);
    for (size_t i = 0; i < n; i++) x[i] = size * fuzz_random(&seed);
    for (size_t some = tame || n == 0 ? 0 : take_below(in, 8); some > 0; some--) {
        size_t at = take_below(in, n < 65536 ? n : 65536);
        x[at] = take_float(in);
    }
    return x;
}

static call take_call(fuzz_input *in) {
    call c;
    memset(&c, 0, sizeof c);
    unsigned forms = take_u8(in);
    c.tame = forms & 1, c.cached = forms & 2, c.aliased = forms & 4, c.two_phases = forms & 8;
    c.desc.dim = 1 + take_below(in, forms & 64 ? 40 : 600);
    c.desc.eps = 1e-5f * (float)(1 + take_below(in, 9));
    c.desc.scale = (float)take_below(in, 4) / 2;
    c.tokens = take_below(in, MOST_TOKENS + 1), c.n_sources = 1 + take_below(in, MOST_SOURCES);
    size_t dim = c.desc.dim;
    for (size_t j = 0; j < c.n_sources; j++)
        c.sources[j] = take_tensor(in, c.tokens, dim, c.aliased && j == 0);
    c.o = c.aliased ? c.sources[0] : take_tensor(in, c.tokens, dim, true);
    c.values = take_values(in, c.tame, c.n_sources * c.tokens * dim, 1);
    c.query = take_values(in, c.tame, dim, forms & 16 ? 1 / sqrtf((float)dim) : 2);
    if (forms & 32) c.weight = take_values(in, c.tame, dim, 2);
    c.inv_rms = (double *)fuzz_alloc(c.n_sources * c.tokens * sizeof *c.inv_rms);
    c.weights = (float *)fuzz_alloc(c.tokens * c.n_sources * sizeof *c.weights);
    return c;
}

static void free_call(call *c) {
    for (size_t j = 0; j < c->n_sources; j++) free(c->sources[j].block);
    if (!c->aliased) free(c->o.block);
    free(c->values), free(c->query), free(c->weight), free(c->inv_rms), free(c->weights);
}

/* Sources hold their values, which become what their types make of them; the output nothing. */
static void reset(call *c) {
    size_t dim = c->desc.dim;
    memset(c->o.block, FILLER, c->o.bytes);
    for (size_t j = 0; j < c->n_sources; j++)
        for (size_t t = 0; t < c->tokens; t++)
            attnresi_from_floats(c->values + (j * c->tokens + t) * dim, c->sources[j].type, dim,
                                 row_of(&c->sources[j], t));
    for (size_t j = 0; j < c->n_sources; j++)
        for (size_t t = 0; t < c->tokens; t++)
            attnresi_to_floats(row_of(&c->sources[j], t), c->sources[j].type, dim,
                               c->values + (j * c->tokens + t) * dim);
}

/* What a call reads and writes; args point into it. */
typedef struct views {
    attnres_input sources[MOST_SOURCES];
    const double *cached[MOST_SOURCES];
    attnres_mix_args mix;
} views;

static void list_views(const call *c, views *v) {
    memset(v, 0, sizeof *v);
    for (size_t j = 0; j < c->n_sources; j++) {
        v->sources[j] = attnres_in(c->sources[j].data, c->sources[j].type, c->sources[j].stride);
        v->cached[j] = j % 2 ? NULL : c->inv_rms + j * c->tokens;
    }
    v->mix.n_tokens = c->tokens, v->mix.sources = v->sources, v->mix.n_sources = c->n_sources;
    v->mix.query = c->query;
    v->mix.norm.weight = c->weight, v->mix.norm.eps = 1e-5f;
    v->mix.o = attnres_out(c->o.data, c->o.type, c->o.stride);
    v->mix.weights = c->weights;
}

static attnres_run run_with(attnres_isa isa, size_t scratch_bytes) {
    attnres_run run;
    memset(&run, 0, sizeof run);
    run.isa = isa;
    run.scratch_bytes = scratch_bytes;
    run.scratch = memset(fuzz_alloc(scratch_bytes), 0xFF, scratch_bytes);
    return run;
}

static attnres_result mix(const attnres_desc *desc, const attnres_mix_args *args, attnres_isa isa) {
    attnres_run run = run_with(isa, 0);
    run.scratch_bytes = attnres_mix_scratch_bytes(desc, args->n_sources, &run);
    free(run.scratch);
    run = run_with(isa, run.scratch_bytes);
    attnres_result result = attnres_mix(desc, args, &run);
    free(run.scratch);
    return result;
}

static void run_mix(call *c, attnres_isa isa) {
    views v;
    attnres_run run;
    memset(&run, 0, sizeof run);
    run.isa = isa;
    reset(c);
    list_views(c, &v);
    for (size_t j = 0; c->cached && j < c->n_sources; j++)
        FUZZ_CHECK(attnres_inverse_rms(&c->desc, c->tokens, v.sources[j],
                                       c->inv_rms + j * c->tokens, &run) == ATTNRES_OK);
    if (c->cached) v.mix.inv_rms = v.cached;
    FUZZ_CHECK(mix(&c->desc, &v.mix, isa) == ATTNRES_OK);
}

/* The last source, if there are two or more, as the partial sum; c->weights stay as they are. */
static void run_phases(call *c, attnres_isa isa) {
    views v;
    attnres_inter_args inter;
    attnres_merge_args merge;
    const float *queries[1] = {c->query};
    size_t stored = c->n_sources > 1 ? c->n_sources - 1 : 1, rows = c->tokens;
    double *max = (double *)fuzz_alloc(rows * sizeof *max);
    float *sum = (float *)fuzz_alloc(rows * sizeof *sum);
    float *mixed = (float *)fuzz_alloc(rows * c->desc.dim * sizeof *mixed);
    reset(c);
    list_views(c, &v);
    memset(&inter, 0, sizeof inter), memset(&merge, 0, sizeof merge);
    inter.n_tokens = rows, inter.sources = v.sources, inter.n_sources = stored;
    inter.queries = queries, inter.n_queries = 1;
    inter.max = max, inter.sum = sum, inter.mix = mixed;
    attnres_run run = run_with(isa, attnres_inter_scratch_bytes(&c->desc, stored, 1, NULL));
    FUZZ_CHECK(attnres_inter(&c->desc, &inter, &run) == ATTNRES_OK);
    free(run.scratch);
    merge.n_tokens = rows, merge.max = max, merge.sum = sum, merge.mix = mixed;
    if (stored < c->n_sources) merge.partial = v.sources[stored];
    merge.query = c->query, merge.norm = v.mix.norm, merge.o = v.mix.o;
    run = run_with(isa, attnres_merge_scratch_bytes(&c->desc, NULL));
    FUZZ_CHECK(attnres_merge(&c->desc, &merge, &run) == ATTNRES_OK);
    free(run.scratch), free(max), free(sum), free(mixed);
}

/* ---- What came out ---- */

static float *output_of(const call *c) {
    float *o = (float *)fuzz_alloc(c->tokens * c->desc.dim * sizeof *o);
    for (size_t t = 0; t < c->tokens; t++)
        attnresi_to_floats(row_of(&c->o, t), c->o.type, c->desc.dim, o + t * c->desc.dim);
    return o;
}

/* Bit for bit, but that a NaN is a NaN. */
static bool are_same(const float *x, const float *y, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (x[i] == x[i] || y[i] == y[i])
            if (memcmp(x + i, y + i, sizeof *x) != 0) return false;
    return true;
}

static void check_same(const call *c, const float *want) {
    float *got = output_of(c);
    FUZZ_CHECK(are_same(got, want, c->tokens * c->desc.dim));
    free(got);
}

/* Between the rows of the output nothing is written. */
static void check_gaps(const call *c) {
    size_t row = c->desc.dim * type_bytes(c->o.type), end = 0;
    for (size_t i = 0; i < c->tokens; i++) {
        size_t t = c->o.stride < 0 ? c->tokens - 1 - i : i;
        size_t begin = (size_t)(row_of(&c->o, t) - c->o.block);
        for (; end < begin; end++) FUZZ_CHECK(c->o.block[end] == FILLER);
        end = begin + row;
    }
}

/* One token in float64: weights [sources], o [dim] before the norm. */
static void reference(const call *c, size_t t, double *p, double *o) {
    size_t dim = c->desc.dim;
    double scale = c->desc.scale > 0 ? (double)c->desc.scale : 1, most = -HUGE_VAL, sum = 0;
    for (size_t j = 0; j < c->n_sources; j++) {
        const float *v = c->values + (j * c->tokens + t) * dim;
        double squares = 0, dot = 0;
        for (size_t i = 0; i < dim; i++) {
            squares += (double)v[i] * (double)v[i];
            dot += (double)c->query[i] * (double)v[i];
        }
        p[j] = scale * dot / sqrt(squares / (double)dim + (double)c->desc.eps);
        if (p[j] > most) most = p[j];
    }
    for (size_t j = 0; j < c->n_sources; j++) sum += p[j] = exp(p[j] - most);
    for (size_t i = 0; i < dim; i++) o[i] = 0;
    for (size_t j = 0; j < c->n_sources; j++) {
        p[j] /= sum;
        for (size_t i = 0; i < dim; i++)
            o[i] += p[j] * (double)c->values[(j * c->tokens + t) * dim + i];
    }
}

/* Sources are below 1, so a mixture has the error of its weights: that of scores, at most 1e-6 and
 * twice over, and of roundings. The norm divides it by the mixture's RMS. */
#define BOUND 4e-6

static void check_near(const call *c, const float *got, bool weights) {
    size_t dim = c->desc.dim;
    double *o = (double *)fuzz_alloc(dim * sizeof *o), p[MOST_SOURCES];
    double of_type = c->o.type == ATTNRES_F16 ? 0x1p-11 : c->o.type == ATTNRES_BF16 ? 0x1p-8 : 0;
    for (size_t t = 0; t < c->tokens; t++) {
        double squares = 0;
        reference(c, t, p, o);
        for (size_t j = 0; weights && j < c->n_sources; j++)
            FUZZ_CHECK(fabs((double)c->weights[t * c->n_sources + j] - p[j]) <= BOUND);
        for (size_t i = 0; i < dim; i++) squares += o[i] * o[i];
        double rms = c->weight ? sqrt(squares / (double)dim + 1e-5) : 1;
        for (size_t i = 0; i < dim; i++) {
            double size = c->weight ? fabs((double)c->weight[i]) : 1;
            double want = c->weight ? o[i] / rms * (double)c->weight[i] : o[i];
            /* an error of the RMS counts with the element's own size */
            double bound = BOUND * (size + fabs(want)) / rms + of_type * fabs(want) + 1e-7;
            FUZZ_CHECK(fabs((double)got[t * dim + i] - want) <= bound);
        }
    }
    free(o);
}

/* ---- Calls with one thing wrong ---- */

enum { N_FAULTS = 9 };

static attnres_result damage(size_t fault, attnres_desc *d, views *v) {
    switch (fault) {
    case 0: return d->dim = 0, ATTNRES_ERR_DIMS;
    case 1: return d->eps = 0, ATTNRES_ERR_NUMBER;
    case 2: return d->scale = NAN, ATTNRES_ERR_NUMBER;
    case 3: return v->mix.n_sources = 0, ATTNRES_ERR_DIMS;
    case 4: return v->sources[0].type = (attnres_type)3, ATTNRES_ERR_TYPE;
    case 5: return v->sources[0].data = NULL, ATTNRES_ERR_NULL;
    case 6: return v->sources[0].token_stride = PTRDIFF_MIN, ATTNRES_ERR_SIZE;
    case 7: return v->mix.o.data = (char *)v->mix.o.data + 1, ATTNRES_ERR_ALIGN;
    default: return v->mix.o.token_stride = 0, ATTNRES_ERR_STRIDE;
    }
}

static void check_fault(call *c, size_t fault) {
    views v;
    attnres_desc desc = c->desc;
    if (c->tokens < 2) return;
    reset(c);
    list_views(c, &v);
    attnres_result want = damage(fault, &desc, &v);
    unsigned char *before = (unsigned char *)fuzz_copy(c->o.block, c->o.bytes);
    FUZZ_CHECK(mix(&desc, &v.mix, ATTNRES_ISA_AUTO) == want);
    FUZZ_CHECK(memcmp(before, c->o.block, c->o.bytes) == 0);
    free(before);
}

static void fuzz_one(const uint8_t *bytes, size_t size) {
    fuzz_input in = fuzz_from(bytes, size);
    size_t fault = take_u8(&in);
    call c = take_call(&in);
    float *want = NULL, *want_phases = NULL;
    for (int isa = ATTNRES_ISA_SCALAR; isa <= ATTNRES_ISA_NEON; isa++) {
        if (!attnres_isa_is_available((attnres_isa)isa)) continue;
        run_mix(&c, (attnres_isa)isa);
        if (!c.aliased) check_gaps(&c);
        if (!want) want = output_of(&c);
        check_same(&c, want);
        if (c.tame) check_near(&c, want, true);
        if (!c.two_phases) continue;
        run_phases(&c, (attnres_isa)isa);
        if (!want_phases) want_phases = output_of(&c);
        check_same(&c, want_phases);
        if (c.tame) check_near(&c, want_phases, false);
    }
    if (fault < N_FAULTS) check_fault(&c, fault);
    free(want), free(want_phases);
    free_call(&c);
}
