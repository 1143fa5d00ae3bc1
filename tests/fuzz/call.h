/* call.h - a call of the operator that the input describes: shapes, gate, beta, types, strides,
 * sequences, values; what came out of it; and its float64 solution.
 *
 * Every tensor is a block of exactly its extent. Include after kda.h with KDA_IMPLEMENTATION.
 */
#ifndef CALL_H
#define CALL_H

#include "../hooks.h"
#include "../operator.h"
#include "fuzz.h"

enum { MOST_SEQS = 3, FILLER = 0xA5 };

/* What keeps a call short: elements of a state, tokens of a sequence, and the product of the two. */
typedef struct limits {
    size_t state, tokens, work;
} limits;

/* A view and the block that it lies in. */
typedef struct tensor {
    unsigned char *block, *data; /* data: of the view */
    size_t bytes;
    size_t heads, dim;
    kda_input view;
} tensor;

typedef struct call {
    problem p;          /* what the tensors hold, dense and in float32: of all sequences */
    bool tame, aliased; /* aliased: the output is over the values */
    tensor q, k, v, g, beta, o;
    unsigned char *untouched; /* the output's block before a call */
    size_t n_seqs, most_tokens, lengths[MOST_SEQS];
    unsigned padding; /* a bit for each sequence without a state */
    unsigned char *states[MOST_SEQS];
} call;

static inline bool is_padding(const call *c, size_t seq) {
    return c->padding >> seq & 1;
}

static inline size_t type_bytes(kda_type type) {
    return type == KDA_F32 ? 4 : 2;
}

/* Rounds x to a type; where `to` is not null, puts it there. */
static inline float put(float x, kda_type type, unsigned char *to) {
    uint16_t half = type == KDA_F16 ? kda_to_f16(x) : kda_to_bf16(x);
    if (to) memcpy(to, type == KDA_F32 ? (void *)&x : (void *)&half, type_bytes(type));
    return type == KDA_F32 ? x : type == KDA_F16 ? kda_from_f16(half) : kda_from_bf16(half);
}

static inline unsigned char *element(const tensor *x, size_t t, size_t h, size_t i) {
    ptrdiff_t at = (ptrdiff_t)t * x->view.token_stride + (ptrdiff_t)h * x->view.head_stride;
    return x->data + (at + (ptrdiff_t)i) * (ptrdiff_t)type_bytes(x->view.type);
}

/* Rows of a token or of a head together, with gaps, in either direction. */
static inline tensor take_tensor(fuzz_input *in, size_t tokens, size_t heads, size_t dim,
                                 kda_type type) {
    tensor x;
    unsigned layout = take_u8(in);
    size_t gap = layout >> 3 & 3, wide = layout >> 5 & 3;
    size_t head_step = dim + gap, token_step = heads * head_step + wide;
    if (layout & 1) token_step = dim + gap, head_step = (tokens ? tokens : 1) * token_step + wide;
    size_t extent = (tokens ? tokens - 1 : 0) * token_step + (heads - 1) * head_step + dim;
    x.heads = heads, x.dim = dim;
    x.bytes = extent * type_bytes(type);
    x.block = (unsigned char *)fuzz_alloc(x.bytes);
    memset(x.block, FILLER, x.bytes);
    size_t first = 0;
    x.view = kda_in(NULL, type, (ptrdiff_t)token_step, (ptrdiff_t)head_step);
    if (layout & 2) x.view.token_stride *= -1, first += (tokens ? tokens - 1 : 0) * token_step;
    if (layout & 4) x.view.head_stride *= -1, first += (heads - 1) * head_step;
    x.view.data = x.data = x.block + first * type_bytes(type);
    return x;
}

/* Dense values into the tensor, and what its type makes of them back. */
static inline void fill(tensor *x, size_t tokens, float *values) {
    for (size_t t = 0; t < tokens; t++)
        for (size_t h = 0; h < x->heads; h++)
            for (size_t i = 0; i < x->dim; i++, values++)
                *values = put(*values, x->view.type, element(x, t, h, i));
}

/* Random numbers of one size; of a wild call some are what the input says, whatever that is. */
static inline float *take_values(fuzz_input *in, bool tame, size_t n, float low, float high) {
    float *x = test_floats(n);
    uint32_t seed = take_u16(in);
    for (size_t i = 0; i < n; i++) x[i] = low + (high - low) * (fuzz_random(&seed) + 1) / 2;
    for (size_t some = tame || n == 0 ? 0 : take_below(in, 8); some > 0; some--) {
        size_t at = take_below(in, n < 65536 ? n : 65536);
        x[at] = take_float(in);
    }
    return x;
}

static inline size_t take_dim(fuzz_input *in) {
    static const size_t usual[] = {1, 2, 4, 8, 15, 16, 17, 32, 33, 64, 96, 128};
    size_t dim = take_u8(in);
    return dim < 12 ? usual[dim] : 1 + dim % 40;
}

/* Halves the longer side until a state has at most so many elements. */
static inline void shrink(kda_desc *d, size_t most) {
    while (d->n_heads * d->dim_v * d->dim_k > most) {
        size_t *side = d->dim_v > d->dim_k ? &d->dim_v : &d->dim_k;
        *side = (*side + 1) / 2;
    }
}

static inline kda_desc take_desc(fuzz_input *in, bool tame) {
    static const size_t groups[] = {1, 2, 3};
    kda_desc d;
    memset(&d, 0, sizeof d);
    unsigned forms = take_u8(in);
    size_t qk_heads = 1 + take_below(in, 3);
    d.n_heads = qk_heads * groups[take_below(in, 3)];
    d.n_qk_heads = qk_heads == d.n_heads && forms & 64 ? 0 : qk_heads;
    d.dim_k = take_dim(in), d.dim_v = take_dim(in);
    d.gate = (kda_gate)(1 + forms % 3);
    d.beta = (kda_beta)(1 + forms / 3 % 3);
    d.head_map = forms & 32 ? KDA_HEADS_TILED : KDA_HEADS_GROUPED;
    d.flags = tame || forms & 128 ? KDA_L2_NORM_QK : 0;
    d.state_type = take_below(in, 3) == 1 ? KDA_F16 : KDA_F32;
    d.scale = (float)take_below(in, 4) / 2;
    d.l2_eps = (float)take_below(in, 3) * 1e-5f;
    if (d.gate == KDA_GATE_BOUNDED) d.lower_bound = -1.0f - (float)take_below(in, 200);
    return d;
}

static inline kda_type take_type(fuzz_input *in) {
    return (kda_type)take_below(in, 3);
}

static inline void take_weights(fuzz_input *in, call *c) {
    problem *p = &c->p;
    unsigned which = take_u8(in);
    if (p->desc.gate == KDA_GATE_LOG_DECAY) return;
    if (p->desc.gate == KDA_GATE_SOFTPLUS || which & 1)
        p->A_log = take_values(in, c->tame, p->desc.n_heads, -1, 2);
    if (which & 2) p->dt_bias = take_values(in, c->tame, p->desc.n_heads * p->desc.dim_k, -1, 1);
}

/* The tensors of p->tokens tokens and what they hold. */
static inline void take_tensors(fuzz_input *in, call *c) {
    problem *p = &c->p;
    const kda_desc *d = &p->desc;
    size_t n = p->tokens, qk = problem_qk_heads(d);
    c->q = take_tensor(in, n, qk, d->dim_k, take_type(in));
    c->k = take_tensor(in, n, qk, d->dim_k, take_type(in));
    c->v = take_tensor(in, n, d->n_heads, d->dim_v, take_type(in));
    c->g = take_tensor(in, n, d->n_heads, d->dim_k, take_type(in));
    c->beta = take_tensor(in, n, d->n_heads, 1, take_type(in));
    c->o = take_tensor(in, n, d->n_heads, d->dim_v, take_type(in));
    bool ready = d->gate == KDA_GATE_LOG_DECAY;
    p->q = take_values(in, c->tame, n * qk * d->dim_k, -1, 1);
    p->k = take_values(in, c->tame, n * qk * d->dim_k, -1, 1);
    p->v = take_values(in, c->tame, n * d->n_heads * d->dim_v, -1, 1);
    p->g = take_values(in, c->tame, n * d->n_heads * d->dim_k, ready ? -3 : -2, ready ? 0 : 2);
    p->beta = take_values(in, c->tame, n * d->n_heads, d->beta == KDA_BETA_VALUE ? 0 : -2,
                          d->beta == KDA_BETA_VALUE ? 1 : 2);
    fill(&c->q, n, p->q), fill(&c->k, n, p->k), fill(&c->v, n, p->v);
    fill(&c->g, n, p->g), fill(&c->beta, n, p->beta);
}

static inline call take_call(fuzz_input *in, limits limit) {
    call c;
    memset(&c, 0, sizeof c);
    c.tame = take_u8(in) & 1;
    c.p.desc = take_desc(in, c.tame);
    shrink(&c.p.desc, limit.state);
    c.n_seqs = take_below(in, MOST_SEQS + 1);
    c.p.state_count = c.p.desc.n_heads * c.p.desc.dim_v * c.p.desc.dim_k;
    size_t room = limit.work / c.p.state_count;
    c.most_tokens = room < 3 ? 3 : room < limit.tokens ? room : limit.tokens;
    for (size_t i = 0; i < c.n_seqs; i++)
        c.p.tokens += c.lengths[i] = take_below(in, c.most_tokens + 1);
    take_weights(in, &c);
    take_tensors(in, &c);
    c.p.start = take_values(in, c.tame, c.p.state_count * c.n_seqs, -1, 1);
    for (size_t i = 0; i < c.p.state_count * c.n_seqs; i++)
        c.p.start[i] = put(c.p.start[i], c.p.desc.state_type, NULL);
    for (size_t i = 0; i < c.n_seqs; i++)
        c.states[i] = (unsigned char *)fuzz_alloc(kda_state_bytes(&c.p.desc));
    c.untouched = (unsigned char *)fuzz_copy(c.o.block, c.o.bytes);
    return c;
}

/* The output is a tensor's that has its shape. */
static inline void output_over(call *c, const tensor *x) {
    free(c->o.block), free(c->untouched);
    c->o = *x;
    c->aliased = true;
    c->untouched = (unsigned char *)fuzz_copy(c->o.block, c->o.bytes);
}

static inline void free_call(call *c) {
    tensor *tensors[] = {&c->q, &c->k, &c->v, &c->g, &c->beta, &c->o};
    for (size_t i = 0; i < (c->aliased ? 5 : 6); i++) free(tensors[i]->block);
    free(c->untouched);
    for (size_t i = 0; i < c->n_seqs; i++) free(c->states[i]);
    problem_free(&c->p);
}

/* States and the output's block as at the start. */
static inline void reset(call *c) {
    size_t size = type_bytes(c->p.desc.state_type);
    memcpy(c->o.block, c->untouched, c->o.bytes);
    for (size_t i = 0; i < c->n_seqs; i++)
        for (size_t j = 0; j < c->p.state_count; j++)
            put(c->p.start[i * c->p.state_count + j], c->p.desc.state_type,
                c->states[i] + j * size);
}

static inline kda_input from_row(const tensor *x, size_t row) {
    kda_input view = x->view;
    view.data = element(x, row, 0, 0);
    return view;
}

static inline kda_args args_of(const call *c, size_t row, const kda_seq *seqs, size_t n_seqs) {
    kda_args args;
    args.q = from_row(&c->q, row), args.k = from_row(&c->k, row), args.v = from_row(&c->v, row);
    args.g = from_row(&c->g, row), args.beta = from_row(&c->beta, row);
    args.o = kda_out(element(&c->o, row, 0, 0), c->o.view.type, c->o.view.token_stride,
                     c->o.view.head_stride);
    args.A_log = c->p.A_log, args.dt_bias = c->p.dt_bias;
    args.seqs = seqs, args.n_seqs = n_seqs;
    return args;
}

static inline void list_seqs(const call *c, kda_seq *seqs) {
    memset(seqs, 0, MOST_SEQS * sizeof *seqs);
    for (size_t i = 0; i < c->n_seqs; i++)
        seqs[i].n_tokens = c->lengths[i], seqs[i].state = is_padding(c, i) ? NULL : c->states[i];
}

/* ---- What came out, as numbers ---- */

typedef struct results {
    size_t n_o, n_states;
    float *o, *states;
    unsigned char *block; /* of o: the gaps too */
} results;

static inline float get(const unsigned char *at, kda_type type) {
    float x;
    uint16_t half;
    if (type == KDA_F32) return memcpy(&x, at, 4), x;
    memcpy(&half, at, 2);
    return type == KDA_F16 ? kda_from_f16(half) : kda_from_bf16(half);
}

static inline results results_of(const call *c) {
    results r;
    size_t size = type_bytes(c->p.desc.state_type), at = 0;
    r.n_o = c->p.tokens * c->o.heads * c->o.dim, r.n_states = c->n_seqs * c->p.state_count;
    r.o = test_floats(r.n_o), r.states = test_floats(r.n_states);
    for (size_t t = 0; t < c->p.tokens; t++)
        for (size_t h = 0; h < c->o.heads; h++)
            for (size_t i = 0; i < c->o.dim; i++)
                r.o[at++] = get(element(&c->o, t, h, i), c->o.view.type);
    for (size_t i = 0; i < r.n_states; i++)
        r.states[i] = get(c->states[i / c->p.state_count] + i % c->p.state_count * size,
                          c->p.desc.state_type);
    r.block = (unsigned char *)fuzz_copy(c->o.block, c->o.bytes);
    return r;
}

static inline void free_results(results *r) {
    free(r->o), free(r->states), free(r->block);
}

/* Bit for bit, but that a NaN is a NaN. */
static inline bool are_same(const float *x, const float *y, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (x[i] == x[i] || y[i] == y[i])
            if (memcmp(x + i, y + i, sizeof *x) != 0) return false;
    return true;
}

static inline bool are_same_states(const call *c, const unsigned char *x, const unsigned char *y) {
    kda_type type = c->p.desc.state_type;
    for (size_t i = 0; i < c->p.state_count; i++) {
        float of_x = get(x + i * type_bytes(type), type),
              of_y = get(y + i * type_bytes(type), type);
        if (!are_same(&of_x, &of_y, 1)) return false;
    }
    return true;
}

static inline void check_same(const call *c, const results *want) {
    results got = results_of(c);
    FUZZ_CHECK(are_same(got.o, want->o, got.n_o));
    FUZZ_CHECK(are_same(got.states, want->states, got.n_states));
    free_results(&got);
}

/* Of the output's block the elements of sequences with a state are written, and nothing else. */
static inline void check_gaps(const call *c) {
    unsigned char *covered = (unsigned char *)test_alloc(c->o.bytes);
    for (size_t i = 0, row = 0; i < c->n_seqs; row += c->lengths[i++])
        for (size_t t = row; !is_padding(c, i) && t < row + c->lengths[i]; t++)
            for (size_t h = 0; h < c->o.heads; h++)
                memset(covered + (element(&c->o, t, h, 0) - c->o.block), 1,
                       c->o.dim * type_bytes(c->o.view.type));
    for (size_t i = 0; i < c->o.bytes; i++)
        FUZZ_CHECK(covered[i] || c->o.block[i] == c->untouched[i]);
    free(covered);
}

/* ---- Against float64 ---- */

/* With keys of length 1, decays of at most 1 and beta of at most 2 no token makes a row of the state
 * longer, and each adds at most 2 |v|: a row's length is below sqrt(dim_k) + 2 |v| per token, which
 * bounds the numbers that are rounded on the way. Errors are within BOUND of that, to which types of
 * 16 bits add their own: half a unit in the last place of 11 or 8 bits, of a state at each token. */
#define BOUND 2e-6

static inline double error_of_type(kda_type type) {
    return type == KDA_F16 ? 0x1p-11 : type == KDA_BF16 ? 0x1p-8 : 0;
}

/* The solution of a batch; those of padding, and all of a wild call, are zeros. */
typedef struct solution {
    double *o, *states;
    double state_bound, o_bound; /* the largest error of a state's element and of an output's */
} solution;

static inline void free_solution(solution *s) {
    free(s->o), free(s->states);
}

static inline solution solve(const call *c, double bound) {
    solution want;
    const kda_desc *d = &c->p.desc;
    size_t qk = problem_qk_heads(d), width = d->n_heads * d->dim_v, row = 0;
    double most = 1, scale = d->scale > 0 ? (double)d->scale : 1 / sqrt((double)d->dim_k);
    want.o = (double *)test_alloc(c->p.tokens * width * sizeof(double));
    want.states = (double *)test_alloc(c->n_seqs * c->p.state_count * sizeof(double));
    for (size_t i = 0; c->tame && i < c->n_seqs; row += c->lengths[i++]) {
        problem p = c->p; /* a view of that sequence's rows */
        if (is_padding(c, i)) continue;
        p.tokens = c->lengths[i];
        p.q += row * qk * d->dim_k, p.k += row * qk * d->dim_k, p.v += row * width;
        p.g += row * d->n_heads * d->dim_k, p.beta += row * d->n_heads;
        p.start += i * p.state_count;
        problem_reference(&p, want.states + i * p.state_count, want.o + row * width);
    }
    for (size_t i = 0; i < c->p.tokens * width; i++) most = fmax(most, fabs((double)c->p.v[i]));
    double length = sqrt((double)d->dim_k) + 2 * most * (double)c->most_tokens;
    want.state_bound =
        length * (bound + error_of_type(d->state_type) * (double)(c->most_tokens + 1));
    want.o_bound = scale * want.state_bound + 1e-6;
    return want;
}

static inline void check_states_near(const call *c, const results *got, const solution *want) {
    for (size_t i = 0; c->tame && i < got->n_states; i++)
        if (!is_padding(c, i / c->p.state_count))
            FUZZ_CHECK(fabs((double)got->states[i] - want->states[i]) <= want->state_bound);
}

static inline void check_near(const call *c, const results *got, const solution *want) {
    size_t width = c->o.heads * c->o.dim;
    check_states_near(c, got, want);
    for (size_t i = 0, row = 0; c->tame && i < c->n_seqs; row += c->lengths[i++])
        for (size_t j = row * width; !is_padding(c, i) && j < (row + c->lengths[i]) * width; j++)
            FUZZ_CHECK(fabs((double)got->o[j] - want->o[j]) <=
                       want->o_bound + error_of_type(c->o.view.type) * fabs(want->o[j]));
}

/* ---- How calls run ---- */

/* The host's threads, and where scratch begins in a block that ends with it. */
typedef struct manner {
    kda_parallel_for hook;
    size_t threads, offset;
} manner;

static inline manner take_manner(fuzz_input *in) {
    static const kda_parallel_for hooks[] = {NULL, backwards, only_the_last, none_at_all};
    manner how;
    how.hook = hooks[take_below(in, 4)], how.threads = 1 + take_below(in, 5);
    how.offset = take_below(in, 64);
    return how;
}

static inline kda_run run_as(const manner *how, kda_algorithm algorithm, kda_isa isa) {
    kda_run run;
    memset(&run, 0, sizeof run);
    run.algorithm = algorithm, run.isa = isa;
    run.parallel_for = how->hook, run.n_threads = how->threads;
    return run;
}

static inline void give_scratch(kda_run *run, const manner *how, size_t bytes) {
    unsigned char *block = (unsigned char *)fuzz_alloc(bytes + how->offset);
    memset(block, 0xFF, bytes + how->offset);
    run->scratch = block + how->offset, run->scratch_bytes = bytes;
}

static inline void free_scratch(kda_run *run, const manner *how) {
    free((unsigned char *)run->scratch - how->offset);
}

static inline kda_result forward(const kda_desc *desc, const kda_args *args, const manner *how,
                                 kda_algorithm algorithm, kda_isa isa) {
    kda_run run = run_as(how, algorithm, isa);
    give_scratch(&run, how, kda_scratch_bytes(desc, args->n_seqs, &run));
    kda_result result = kda_forward(desc, args, &run);
    free_scratch(&run, how);
    return result;
}

/* ---- Blocks that a call may not write ---- */

static inline void keep_blocks(unsigned char *const *blocks, const size_t *bytes, size_t n,
                               unsigned char **kept) {
    for (size_t i = 0; i < n; i++) kept[i] = (unsigned char *)fuzz_copy(blocks[i], bytes[i]);
}

static inline void check_kept(unsigned char *const *blocks, const size_t *bytes, size_t n,
                              unsigned char **kept) {
    for (size_t i = 0; i < n; i++) {
        FUZZ_CHECK(memcmp(kept[i], blocks[i], bytes[i]) == 0);
        free(kept[i]);
    }
}

/* ---- Calls with one thing wrong ---- */

enum { N_FAULTS = 17 };

/* Damages a sound call of some tokens; what it must then say. */
static inline kda_result damage(size_t fault, kda_desc *d, kda_args *args, kda_seq *seqs) {
    switch (fault) {
    case 0: return d->n_heads = 0, KDA_ERR_DIMS;
    case 1: return d->n_qk_heads = d->n_heads + 1, KDA_ERR_DIMS;
    case 2: return d->dim_k = 0, KDA_ERR_DIMS;
    case 3: return d->dim_v = SIZE_MAX / 2, KDA_ERR_SIZE;
    case 4: return d->gate = (kda_gate)0, KDA_ERR_GATE;
    case 5: return d->lower_bound = d->gate == KDA_GATE_BOUNDED ? 0 : -1, KDA_ERR_LOWER_BOUND;
    case 6: return d->beta = (kda_beta)4, KDA_ERR_BETA;
    case 7: return d->head_map = (kda_head_map)2, KDA_ERR_HEAD_MAP;
    case 8: return d->flags |= 2, KDA_ERR_FLAGS;
    case 9: return d->scale = NAN, KDA_ERR_NUMBER;
    case 10: return d->state_type = KDA_BF16, KDA_ERR_TYPE;
    case 11: return args->k.type = (kda_type)3, KDA_ERR_TYPE;
    case 12: return args->g.data = NULL, KDA_ERR_NULL;
    case 13: return args->q.token_stride = PTRDIFF_MIN, KDA_ERR_SIZE;
    case 14: return args->v.data = (const char *)args->v.data + 1, KDA_ERR_ALIGN;
    case 15: return args->o.token_stride = 0, KDA_ERR_STRIDE;
    default: return seqs[0].state = seqs[1].state, KDA_ERR_ALIAS;
    }
}

#endif
