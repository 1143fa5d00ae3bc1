/* operator.c - a call of kda_forward that the input describes: shapes, gate, beta, types, strides,
 * sequences, values.
 *
 * Every tensor is a block of exactly its extent. The recurrent path gives the same bits on every
 * instruction set and for tokens taken one call at a time; where numbers are tame, it and the
 * chunked path are near the float64 recurrence; a call with one thing wrong says which and writes
 * nothing.
 */
#define KDA_IMPLEMENTATION
#include "../../kda.h"

#include "../operator.h"
#include "fuzz.h"

enum { MOST_SEQS = 3, MOST_TOKENS = 20, FILLER = 0xA5 };

/* A view and the block that it lies in. */
typedef struct tensor {
    unsigned char *block, *data; /* data: of the view */
    size_t bytes;
    size_t heads, dim;
    kda_input view;
} tensor;

typedef struct call {
    problem p; /* what the tensors hold, dense and in float32: of all sequences */
    bool tame;
    tensor q, k, v, g, beta, o;
    size_t n_seqs, lengths[MOST_SEQS];
    unsigned char *states[MOST_SEQS];
} call;

static size_t type_bytes(kda_type type) {
    return type == KDA_F32 ? 4 : 2;
}

/* Rounds x to a type; where `to` is not null, puts it there. */
static float put(float x, kda_type type, unsigned char *to) {
    uint16_t half = type == KDA_F16 ? kda_to_f16(x) : kda_to_bf16(x);
    if (to) memcpy(to, type == KDA_F32 ? (void *)&x : (void *)&half, type_bytes(type));
    return type == KDA_F32 ? x : type == KDA_F16 ? kda_from_f16(half) : kda_from_bf16(half);
}

static unsigned char *element(const tensor *x, size_t t, size_t h, size_t i) {
    ptrdiff_t at = (ptrdiff_t)t * x->view.token_stride + (ptrdiff_t)h * x->view.head_stride;
    return x->data + (at + (ptrdiff_t)i) * (ptrdiff_t)type_bytes(x->view.type);
}

/* Rows of a token or of a head together, with gaps, in either direction. */
static tensor take_tensor(fuzz_input *in, size_t tokens, size_t heads, size_t dim, kda_type type) {
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
static void fill(tensor *x, size_t tokens, float *values) {
    for (size_t t = 0; t < tokens; t++)
        for (size_t h = 0; h < x->heads; h++)
            for (size_t i = 0; i < x->dim; i++, values++)
                *values = put(*values, x->view.type, element(x, t, h, i));
}

/* Random numbers of one size; of a wild call some are what the input says, whatever that is. */
static float *take_values(fuzz_input *in, bool tame, size_t n, float low, float high) {
    float *x = test_floats(n);
    uint32_t seed = take_u16(in);
    for (size_t i = 0; i < n; i++) x[i] = low + (high - low) * (fuzz_random(&seed) + 1) / 2;
    for (size_t some = tame || n == 0 ? 0 : take_below(in, 8); some > 0; some--) {
        size_t at = take_below(in, n < 65536 ? n : 65536);
        x[at] = take_float(in);
    }
    return x;
}

static size_t take_dim(fuzz_input *in) {
    static const size_t usual[] = {1, 2, 4, 8, 15, 16, 17, 32, 33, 64, 96, 128};
    size_t dim = take_u8(in);
    return dim < 12 ? usual[dim] : 1 + dim % 40;
}

static kda_desc take_desc(fuzz_input *in, bool tame) {
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

static kda_type take_type(fuzz_input *in) {
    return (kda_type)take_below(in, 3);
}

static void take_weights(fuzz_input *in, call *c) {
    problem *p = &c->p;
    unsigned which = take_u8(in);
    if (p->desc.gate == KDA_GATE_LOG_DECAY) return;
    if (p->desc.gate == KDA_GATE_SOFTPLUS || which & 1)
        p->A_log = take_values(in, c->tame, p->desc.n_heads, -1, 2);
    if (which & 2) p->dt_bias = take_values(in, c->tame, p->desc.n_heads * p->desc.dim_k, -1, 1);
}

/* The tensors of p->tokens tokens and what they hold. */
static void take_tensors(fuzz_input *in, call *c) {
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

static call take_call(fuzz_input *in) {
    call c;
    memset(&c, 0, sizeof c);
    c.tame = take_u8(in) & 1;
    c.p.desc = take_desc(in, c.tame);
    c.n_seqs = take_below(in, MOST_SEQS + 1);
    c.p.state_count = c.p.desc.n_heads * c.p.desc.dim_v * c.p.desc.dim_k;
    size_t room = ((size_t)1 << 14) / c.p.state_count; /* so that a call takes some 10 ms */
    size_t most = room < 3 ? 3 : room < MOST_TOKENS ? room : MOST_TOKENS;
    for (size_t i = 0; i < c.n_seqs; i++) c.p.tokens += c.lengths[i] = take_below(in, most + 1);
    take_weights(in, &c);
    take_tensors(in, &c);
    c.p.start = take_values(in, c.tame, c.p.state_count * c.n_seqs, -1, 1);
    for (size_t i = 0; i < c.p.state_count * c.n_seqs; i++)
        c.p.start[i] = put(c.p.start[i], c.p.desc.state_type, NULL);
    for (size_t i = 0; i < c.n_seqs; i++)
        c.states[i] = (unsigned char *)fuzz_alloc(kda_state_bytes(&c.p.desc));
    return c;
}

static void free_call(call *c) {
    tensor *tensors[] = {&c->q, &c->k, &c->v, &c->g, &c->beta, &c->o};
    for (size_t i = 0; i < 6; i++) free(tensors[i]->block);
    for (size_t i = 0; i < c->n_seqs; i++) free(c->states[i]);
    problem_free(&c->p);
}

/* States as at the start, outputs of nothing. */
static void reset(call *c) {
    size_t size = type_bytes(c->p.desc.state_type);
    memset(c->o.block, FILLER, c->o.bytes);
    for (size_t i = 0; i < c->n_seqs; i++)
        for (size_t j = 0; j < c->p.state_count; j++)
            put(c->p.start[i * c->p.state_count + j], c->p.desc.state_type,
                c->states[i] + j * size);
}

static kda_input from_row(const tensor *x, size_t row) {
    kda_input view = x->view;
    view.data = element(x, row, 0, 0);
    return view;
}

static kda_args args_of(const call *c, size_t row, const kda_seq *seqs, size_t n_seqs) {
    kda_args args;
    args.q = from_row(&c->q, row), args.k = from_row(&c->k, row), args.v = from_row(&c->v, row);
    args.g = from_row(&c->g, row), args.beta = from_row(&c->beta, row);
    args.o = kda_out(element(&c->o, row, 0, 0), c->o.view.type, c->o.view.token_stride,
                     c->o.view.head_stride);
    args.A_log = c->p.A_log, args.dt_bias = c->p.dt_bias;
    args.seqs = seqs, args.n_seqs = n_seqs;
    return args;
}

static kda_result run(const kda_desc *desc, const kda_args *args, kda_algorithm algorithm,
                      kda_isa isa) {
    kda_run how;
    memset(&how, 0, sizeof how);
    how.algorithm = algorithm, how.isa = isa;
    how.scratch_bytes = kda_scratch_bytes(desc, args->n_seqs, &how);
    unsigned char *scratch = (unsigned char *)fuzz_alloc(how.scratch_bytes + 1);
    how.scratch = scratch + 1;
    kda_result result = kda_forward(desc, args, &how);
    free(scratch);
    return result;
}

static void list_seqs(const call *c, kda_seq *seqs) {
    memset(seqs, 0, MOST_SEQS * sizeof *seqs);
    for (size_t i = 0; i < c->n_seqs; i++)
        seqs[i].n_tokens = c->lengths[i], seqs[i].state = c->states[i];
}

static void run_batch(call *c, kda_algorithm algorithm, kda_isa isa) {
    kda_seq seqs[MOST_SEQS];
    list_seqs(c, seqs);
    reset(c);
    kda_args args = args_of(c, 0, seqs, c->n_seqs);
    FUZZ_CHECK(run(&c->p.desc, &args, algorithm, isa) == KDA_OK);
}

/* Each sequence by itself, a piece of its tokens at a time. */
static void run_split(call *c, size_t piece) {
    size_t row = 0;
    reset(c);
    for (size_t i = 0; i < c->n_seqs; i++)
        for (size_t done = 0, n; done < c->lengths[i]; done += n, row += n) {
            kda_seq seq = {0, NULL, NULL, NULL};
            n = c->lengths[i] - done < piece ? c->lengths[i] - done : piece;
            seq.n_tokens = n, seq.state = c->states[i];
            kda_args args = args_of(c, row, &seq, 1);
            FUZZ_CHECK(run(&c->p.desc, &args, KDA_RECURRENT, KDA_ISA_AUTO) == KDA_OK);
        }
}

/* ---- What came out, as numbers ---- */

typedef struct results {
    size_t n_o, n_states;
    float *o, *states;
    unsigned char *block; /* of o: the gaps too */
} results;

static float get(const unsigned char *at, kda_type type) {
    float x;
    uint16_t half;
    if (type == KDA_F32) return memcpy(&x, at, 4), x;
    memcpy(&half, at, 2);
    return type == KDA_F16 ? kda_from_f16(half) : kda_from_bf16(half);
}

static results results_of(const call *c) {
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

static void free_results(results *r) {
    free(r->o), free(r->states), free(r->block);
}

/* Bit for bit, but that a NaN is a NaN. */
static bool are_same(const float *x, const float *y, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (x[i] == x[i] || y[i] == y[i])
            if (memcmp(x + i, y + i, sizeof *x) != 0) return false;
    return true;
}

static void check_same(const call *c, const results *want) {
    results got = results_of(c);
    FUZZ_CHECK(are_same(got.o, want->o, got.n_o));
    FUZZ_CHECK(are_same(got.states, want->states, got.n_states));
    free_results(&got);
}

/* Of the output's block the elements are written and nothing between them. */
static void check_gaps(const call *c) {
    unsigned char *covered = (unsigned char *)test_alloc(c->o.bytes);
    for (size_t t = 0; t < c->p.tokens; t++)
        for (size_t h = 0; h < c->o.heads; h++)
            memset(covered + (element(&c->o, t, h, 0) - c->o.block), 1,
                   c->o.dim * type_bytes(c->o.view.type));
    for (size_t i = 0; i < c->o.bytes; i++) FUZZ_CHECK(covered[i] || c->o.block[i] == FILLER);
    free(covered);
}

/* ---- Against float64 ---- */

/* With keys of length 1, decays of at most 1 and beta of at most 2 no token makes a row of the state
 * longer, and each adds at most 2 |v|: a row's length is below sqrt(dim_k) + 2 per token, which
 * bounds the numbers that are rounded on the way. Errors are within BOUND of that, to which types of
 * 16 bits add their own: half a unit in the last place of 11 or 8 bits, of a state at each token. */
#define BOUND 2e-6

static double error_of_type(kda_type type) {
    return type == KDA_F16 ? 0x1p-11 : type == KDA_BF16 ? 0x1p-8 : 0;
}

/* The solution of a batch. */
typedef struct solution {
    double *o, *states;
} solution;

static solution solve(const call *c) {
    solution want;
    const kda_desc *d = &c->p.desc;
    size_t qk = problem_qk_heads(d), width = d->n_heads * d->dim_v, row = 0;
    want.o = (double *)test_alloc(c->p.tokens * width * sizeof(double));
    want.states = (double *)test_alloc(c->n_seqs * c->p.state_count * sizeof(double));
    for (size_t i = 0; c->tame && i < c->n_seqs; row += c->lengths[i++]) {
        problem p = c->p; /* a view of that sequence's rows */
        p.tokens = c->lengths[i];
        p.q += row * qk * d->dim_k, p.k += row * qk * d->dim_k, p.v += row * width;
        p.g += row * d->n_heads * d->dim_k, p.beta += row * d->n_heads;
        p.start += i * p.state_count;
        problem_reference(&p, want.states + i * p.state_count, want.o + row * width);
    }
    return want;
}

static void check_near(const call *c, const results *got, const solution *want) {
    const kda_desc *d = &c->p.desc;
    if (!c->tame) return;
    double length = sqrt((double)d->dim_k) + 2 * MOST_TOKENS;
    double step = BOUND + error_of_type(d->state_type) * (MOST_TOKENS + 1);
    double scale = d->scale > 0 ? (double)d->scale : 1 / sqrt((double)d->dim_k);
    for (size_t i = 0; i < got->n_states; i++)
        FUZZ_CHECK(fabs((double)got->states[i] - want->states[i]) <= length * step);
    for (size_t i = 0; i < got->n_o; i++)
        FUZZ_CHECK(fabs((double)got->o[i] - want->o[i]) <=
                   scale * length * step + error_of_type(c->o.view.type) * fabs(want->o[i]) + 1e-6);
}

/* ---- Calls with one thing wrong ---- */

enum { N_FAULTS = 17 };

/* Damages a sound call of some tokens; what it must then say. */
static kda_result damage(size_t fault, kda_desc *d, kda_args *args, kda_seq *seqs) {
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

static void check_fault(call *c, size_t fault) {
    kda_seq seqs[MOST_SEQS];
    kda_desc desc = c->p.desc;
    list_seqs(c, seqs);
    kda_args args = args_of(c, 0, seqs, c->n_seqs);
    if (c->n_seqs < 2 || c->p.tokens < 2) return;
    run_batch(c, KDA_RECURRENT, KDA_ISA_AUTO);
    results before = results_of(c);
    kda_result want = damage(fault, &desc, &args, seqs);
    FUZZ_CHECK(run(&desc, &args, KDA_AUTO, KDA_ISA_AUTO) == want);
    FUZZ_CHECK(memcmp(before.block, c->o.block, c->o.bytes) == 0);
    check_same(c, &before);
    free_results(&before);
}

static void fuzz_one(const uint8_t *bytes, size_t size) {
    fuzz_input in = fuzz_from(bytes, size);
    size_t fault = take_u8(&in), piece = 1 + take_below(&in, 9);
    call c = take_call(&in);
    run_batch(&c, KDA_RECURRENT, KDA_ISA_SCALAR);
    check_gaps(&c);
    results want = results_of(&c);
    solution near = solve(&c);
    for (int isa = KDA_ISA_SCALAR; isa <= KDA_ISA_NEON; isa++) {
        if (!kda_isa_is_available((kda_isa)isa)) continue;
        if (isa != KDA_ISA_SCALAR) {
            run_batch(&c, KDA_RECURRENT, (kda_isa)isa);
            check_same(&c, &want);
        }
        run_batch(&c, KDA_CHUNKED, (kda_isa)isa);
        check_gaps(&c);
        results chunked = results_of(&c);
        check_near(&c, &chunked, &near);
        free_results(&chunked);
    }
    run_split(&c, piece);
    check_same(&c, &want);
    check_near(&c, &want, &near);
    if (fault < N_FAULTS) check_fault(&c, fault);
    free(near.o), free(near.states);
    free_results(&want);
    free_call(&c);
}
