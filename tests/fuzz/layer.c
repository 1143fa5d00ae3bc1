/* layer.c - a layer between its projections that the input describes: kda_layer, kda_layer_verify and
 * kda_layer_commit on a batch of shapes, convolution widths, gates, types, strides, sequences, values.
 *
 * Every tensor, state, window, journal and scratch is a block of exactly its extent. On every
 * instruction set and in any host's threads the recurrent layer gives the bits of single tokens, and
 * with any algorithm those of kda_conv, kda_forward and kda_gated_norm; the chunked one also when cut
 * at multiples of a chunk. A verify gives the outputs of single tokens and leaves states and windows;
 * a commit moves both on, once. Where numbers are tame, all are near float64. A call with one thing
 * wrong says which and writes nothing.
 */
#define KDA_IMPLEMENTATION
#include "../../kda.h"

#include "call.h"

enum { Q, K, V, CONVS };

typedef struct layer_call {
    call c; /* what the rows hold is before the convolution */
    tensor gate;
    kda_layer_desc layer;
    manner how;
    kda_algorithm algorithm; /* of the comparison with the parts */
    unsigned skipped;        /* a bit for each instruction set that is left out */
    size_t cut;              /* tokens of a piece of a chunked sequence */
    float *gates;            /* [tokens][heads][dim_v] */
    float *taps[CONVS];      /* [channels][width] */
    float *norm_weight;      /* [dim_v] */
    float *history;          /* [n_seqs]: the windows before the first token */
    size_t channels[CONVS], window_at[CONVS];
    size_t window_count, state_bytes, journal_bytes[MOST_SEQS]; /* window_count: floats */
    size_t accepted[MOST_SEQS];
    float *windows[MOST_SEQS];
    unsigned char *journals[MOST_SEQS];
    unsigned char *states_after[MOST_SEQS]; /* [length + 1]: after so many single tokens */
    float *windows_after[MOST_SEQS];        /* likewise */
    results want;                           /* the outputs of single tokens */
} layer_call;

/* ---- The input ---- */

static size_t take_width(fuzz_input *in) {
    static const size_t widths[] = {4, 1, 2, 3, 5, 7, 16, 64};
    return widths[take_below(in, 8)];
}

static void take_layer(fuzz_input *in, layer_call *l, unsigned forms) {
    call *c = &l->c;
    const kda_desc *op = &c->p.desc;
    kda_layer_desc *layer = &l->layer;
    size_t width = take_width(in), heads = op->n_heads, at = 0;
    l->channels[Q] = l->channels[K] = problem_qk_heads(op) * op->dim_k;
    l->channels[V] = heads * op->dim_v;
    if ((2 * l->channels[Q] + l->channels[V]) * width > 4096) width = 4;
    for (size_t i = 0; i < CONVS; i++) {
        l->taps[i] = take_values(in, c->tame, l->channels[i] * width, -1, 1);
        l->window_at[i] = at, at += (width - 1) * l->channels[i];
    }
    l->window_count = at;
    l->history = take_values(in, c->tame, c->n_seqs * at, -1, 1);
    l->norm_weight = take_values(in, c->tame, op->dim_v, -2, 2);
    l->gate = take_tensor(in, c->p.tokens, heads, op->dim_v, take_type(in));
    l->gates = take_values(in, c->tame, c->p.tokens * l->channels[V], -2, 2);
    fill(&l->gate, c->p.tokens, l->gates);
    layer->op = *op, layer->conv_width = width;
    layer->conv_activation = forms & 1 ? KDA_ACTIVATION_NONE : KDA_ACTIVATION_SILU;
    layer->q_conv = l->taps[Q], layer->k_conv = l->taps[K], layer->v_conv = l->taps[V];
    layer->A_log = c->p.A_log, layer->dt_bias = c->p.dt_bias;
    layer->norm_weight = l->norm_weight;
    layer->norm_eps = 1e-5f * (float)(take_below(in, 9) + c->tame);
}

static layer_call take_layer_call(fuzz_input *in) {
    static const limits limit = {512, 80, 2048};
    layer_call l;
    unsigned accepted[MOST_SEQS];
    memset(&l, 0, sizeof l);
    unsigned forms = take_u8(in), padding = forms & 8 ? take_u8(in) : 0;
    l.skipped = take_u8(in), l.how = take_manner(in);
    l.algorithm = (kda_algorithm)take_below(in, 3), l.cut = KDA_CHUNK * (1 + take_below(in, 5));
    for (size_t i = 0; i < MOST_SEQS; i++) accepted[i] = take_u8(in);
    l.c = take_call(in, limit);
    l.c.padding = padding;
    take_layer(in, &l, forms);
    if (forms & 2) output_over(&l.c, forms & 4 ? &l.gate : &l.c.v);
    l.state_bytes = kda_state_bytes(&l.c.p.desc);
    FUZZ_CHECK(kda_layer_window_bytes(&l.layer) == l.window_count * sizeof(float));
    for (size_t i = 0; i < l.c.n_seqs; i++) {
        l.accepted[i] = accepted[i] % (l.c.lengths[i] + 1);
        l.windows[i] = (float *)fuzz_alloc(l.window_count * sizeof(float));
        l.journal_bytes[i] = kda_layer_journal_bytes(&l.layer, l.c.lengths[i]);
        l.journals[i] = (unsigned char *)fuzz_alloc(l.journal_bytes[i]);
        memset(l.journals[i], FILLER, l.journal_bytes[i]);
    }
    return l;
}

static void free_layer_call(layer_call *l) {
    for (size_t i = 0; i < l->c.n_seqs; i++) {
        free(l->windows[i]), free(l->journals[i]);
        free(l->states_after[i]), free(l->windows_after[i]);
    }
    for (size_t i = 0; i < CONVS; i++) free(l->taps[i]);
    free(l->history), free(l->norm_weight), free(l->gates), free(l->gate.block);
    free_results(&l->want);
    free_call(&l->c);
}

/* ---- Calls ---- */

static void reset_layer(layer_call *l) {
    size_t n = l->window_count;
    reset(&l->c);
    for (size_t i = 0; i < l->c.n_seqs; i++)
        memcpy(l->windows[i], l->history + i * n, n * sizeof(float));
}

static void list_layer_seqs(const layer_call *l, const size_t *n_tokens, kda_seq *seqs) {
    list_seqs(&l->c, seqs);
    for (size_t i = 0; i < l->c.n_seqs; i++) {
        seqs[i].n_tokens = n_tokens[i];
        if (is_padding(&l->c, i)) continue;
        seqs[i].journal = l->journals[i];
        if (l->window_count > 0) seqs[i].window = l->windows[i];
    }
}

static kda_layer_args layer_args_of(const layer_call *l, size_t row, const kda_seq *seqs,
                                    size_t n_seqs) {
    kda_args op = args_of(&l->c, row, seqs, n_seqs);
    kda_layer_args args;
    args.q = op.q, args.k = op.k, args.v = op.v, args.g = op.g, args.beta = op.beta, args.o = op.o;
    args.gate = from_row(&l->gate, row);
    args.seqs = seqs, args.n_seqs = n_seqs;
    return args;
}

enum { FORWARD = 1, VERIFY = 2, COMMIT = 4 };

/* Rows from `row` on; of a commit, seqs only. */
static kda_result run_rows(const layer_call *l, int which, size_t row, const kda_seq *seqs,
                           size_t n_seqs, kda_algorithm algorithm, kda_isa isa) {
    kda_layer_args args = layer_args_of(l, row, seqs, n_seqs);
    kda_run run = run_as(&l->how, algorithm, isa);
    give_scratch(&run, &l->how, kda_layer_scratch_bytes(&l->layer, n_seqs, &run));
    kda_result result = which == FORWARD  ? kda_layer(&l->layer, &args, &run)
                        : which == VERIFY ? kda_layer_verify(&l->layer, &args, &run)
                                          : kda_layer_commit(&l->layer, seqs, n_seqs, &run);
    free_scratch(&run, &l->how);
    return result;
}

static kda_result run_batch(const layer_call *l, int which, const size_t *n_tokens,
                            kda_algorithm algorithm, kda_isa isa) {
    kda_seq seqs[MOST_SEQS];
    list_layer_seqs(l, n_tokens, seqs);
    return run_rows(l, which, 0, seqs, l->c.n_seqs, algorithm, isa);
}

/* Each sequence by itself from its token first[i] on, in pieces; first null: from the beginning. */
static void run_pieces(layer_call *l, const size_t *first, size_t piece, kda_algorithm algorithm,
                       kda_isa isa) {
    const call *c = &l->c;
    kda_seq seqs[MOST_SEQS];
    list_layer_seqs(l, c->lengths, seqs);
    for (size_t i = 0, row = 0; i < c->n_seqs; row += c->lengths[i++])
        for (size_t t = first ? first[i] : 0, n; t < c->lengths[i]; t += n) {
            n = c->lengths[i] - t < piece ? c->lengths[i] - t : piece;
            seqs[i].n_tokens = n;
            FUZZ_CHECK(run_rows(l, FORWARD, row + t, &seqs[i], 1, algorithm, isa) == KDA_OK);
        }
}

/* Each sequence token by token, in plain C, and what that leaves after each. */
static void run_steps(layer_call *l) {
    call *c = &l->c;
    size_t bytes = l->state_bytes, floats = l->window_count;
    reset_layer(l);
    for (size_t i = 0, row = 0; i < c->n_seqs; row += c->lengths[i++]) {
        kda_seq seqs[MOST_SEQS];
        list_layer_seqs(l, c->lengths, seqs);
        seqs[i].n_tokens = 1;
        l->states_after[i] = (unsigned char *)fuzz_alloc((c->lengths[i] + 1) * bytes);
        l->windows_after[i] = (float *)fuzz_alloc((c->lengths[i] + 1) * floats * sizeof(float));
        for (size_t t = 0; t <= c->lengths[i]; t++) {
            memcpy(l->states_after[i] + t * bytes, c->states[i], bytes);
            memcpy(l->windows_after[i] + t * floats, l->windows[i], floats * sizeof(float));
            if (t < c->lengths[i])
                FUZZ_CHECK(run_rows(l, FORWARD, row + t, &seqs[i], 1, KDA_RECURRENT,
                                    KDA_ISA_SCALAR) == KDA_OK);
        }
    }
    l->want = results_of(c);
}

/* ---- The parts, one by one ---- */

/* q, k or v of the batch through kda_conv; to be freed. */
static float *convolve(layer_call *l, size_t which, const float *x, kda_isa isa) {
    float *y = test_floats(l->c.p.tokens * l->channels[which]);
    ptrdiff_t row = (ptrdiff_t)l->channels[which];
    kda_conv_desc desc = {l->channels[which], l->layer.conv_width, l->layer.conv_activation};
    kda_conv_args args;
    kda_seq seqs[MOST_SEQS];
    kda_run run = run_as(&l->how, KDA_AUTO, isa);
    list_layer_seqs(l, l->c.lengths, seqs);
    for (size_t i = 0; i < l->c.n_seqs; i++) /* of width 1: any pointer */
        if (!is_padding(&l->c, i))
            seqs[i].window = desc.width > 1 ? l->windows[i] + l->window_at[which] : l->taps[which];
    args.x = kda_in_f32(x, row, 0), args.y = kda_out_f32(y, row, 0);
    args.weight = l->taps[which], args.seqs = seqs, args.n_seqs = l->c.n_seqs;
    give_scratch(&run, &l->how, kda_conv_scratch_bytes(&desc, l->c.n_seqs, &run));
    FUZZ_CHECK(kda_conv(&desc, &args, &run) == KDA_OK);
    free_scratch(&run, &l->how);
    return y;
}

static void run_parts(layer_call *l, kda_algorithm algorithm, kda_isa isa) {
    const call *c = &l->c;
    const kda_desc *d = &c->p.desc;
    size_t width = l->channels[V];
    ptrdiff_t k = (ptrdiff_t)d->dim_k, v = (ptrdiff_t)d->dim_v;
    kda_seq seqs[MOST_SEQS];
    reset_layer(l);
    list_seqs(c, seqs);
    float *q_rows = convolve(l, Q, c->p.q, isa), *k_rows = convolve(l, K, c->p.k, isa);
    float *v_rows = convolve(l, V, c->p.v, isa), *o = test_floats(c->p.tokens * width);
    kda_args args = args_of(c, 0, seqs, c->n_seqs);
    args.q = kda_in_f32(q_rows, (ptrdiff_t)l->channels[Q], k);
    args.k = kda_in_f32(k_rows, (ptrdiff_t)l->channels[K], k);
    args.v = kda_in_f32(v_rows, (ptrdiff_t)width, v);
    args.o = kda_out_f32(o, (ptrdiff_t)width, v);
    FUZZ_CHECK(forward(d, &args, &l->how, algorithm, isa) == KDA_OK);
    kda_run run = run_as(&l->how, algorithm, isa);
    for (size_t i = 0, row = 0; i < c->n_seqs; row += c->lengths[i++]) {
        kda_output to = args_of(c, row, seqs, c->n_seqs).o;
        if (is_padding(c, i)) continue;
        FUZZ_CHECK(kda_gated_norm(c->lengths[i], d->n_heads, d->dim_v, l->layer.norm_eps,
                                  l->norm_weight, kda_in_f32(o + row * width, (ptrdiff_t)width, v),
                                  from_row(&l->gate, row), to, &run) == KDA_OK);
    }
    free(q_rows), free(k_rows), free(v_rows), free(o);
}

/* ---- Float64 ---- */

/* q, k or v after the convolution, in float64 and rounded. Of tame numbers the sums are exact, and
 * so as good as the header's. To be freed. */
static float *convolved(const layer_call *l, size_t which, const float *x) {
    size_t channels = l->channels[which], width = l->layer.conv_width, past = width - 1;
    float *y = test_floats(l->c.p.tokens * channels);
    for (size_t i = 0, row = 0; i < l->c.n_seqs; row += l->c.lengths[i++]) {
        const float *window = l->history + i * l->window_count + l->window_at[which];
        for (size_t t = 0; t < l->c.lengths[i]; t++)
            for (size_t ch = 0; ch < channels; ch++) {
                double sum = 0;
                for (size_t w = 0; w < width; w++) {
                    const float *from = t + w < past ? window + (t + w) * channels
                                                     : x + (row + t + w - past) * channels;
                    sum += (double)l->taps[which][ch * width + w] * (double)from[ch];
                }
                if (l->layer.conv_activation == KDA_ACTIVATION_SILU) sum *= reference_sigmoid(sum);
                y[(row + t) * channels + ch] = (float)sum;
            }
    }
    return y;
}

/* The operator's part of it: states, and outputs before the norm. */
static solution solve_layer(const layer_call *l) {
    call inner = l->c;
    inner.p.q = convolved(l, Q, l->c.p.q), inner.p.k = convolved(l, K, l->c.p.k);
    inner.p.v = convolved(l, V, l->c.p.v);
    solution s = solve(&inner, 2 * BOUND);
    free(inner.p.q), free(inner.p.k), free(inner.p.v);
    return s;
}

/* One row of one head: an error of the operator's output counts by itself and through the norm. */
static void check_row(const layer_call *l, size_t at, const float *got, const solution *near) {
    size_t n = l->c.o.dim;
    const double *o = near->o + at;
    double squares = 0, of_type = error_of_type(l->c.o.view.type) + 1e-6;
    for (size_t i = 0; i < n; i++) squares += o[i] * o[i];
    double rms = sqrt(squares / (double)n + (double)l->layer.norm_eps);
    if (near->o_bound > rms / 2) return; /* an output that is all error: anything of its size */
    for (size_t i = 0; i < n; i++) {
        double weight = (double)l->norm_weight[i];
        double want = o[i] / rms * weight * reference_sigmoid((double)l->gates[at + i]);
        double bound = 2 * near->o_bound * (fabs(weight) + fabs(want)) / rms;
        FUZZ_CHECK(fabs((double)got[at + i] - want) <= bound + of_type * fabs(want) + 1e-6);
    }
}

/* What a run of the whole batch has left. */
static void check_float64(const layer_call *l, const solution *near) {
    results got = results_of(&l->c);
    size_t width = l->channels[V];
    check_states_near(&l->c, &got, near);
    for (size_t i = 0, row = 0; l->c.tame && i < l->c.n_seqs; row += l->c.lengths[i++])
        for (size_t t = row; !is_padding(&l->c, i) && t < row + l->c.lengths[i]; t++)
            for (size_t h = 0; h < l->c.o.heads; h++)
                check_row(l, t * width + h * l->c.o.dim, got.o, near);
    free_results(&got);
}

/* ---- What a layer must be ---- */

/* States and windows are what so many single tokens make of them, and those of padding as before. */
static void check_after(const layer_call *l, const size_t *n_tokens) {
    size_t floats = l->window_count;
    for (size_t i = 0; i < l->c.n_seqs; i++) {
        size_t n = is_padding(&l->c, i) ? 0 : n_tokens[i];
        FUZZ_CHECK(are_same_states(&l->c, l->c.states[i], l->states_after[i] + n * l->state_bytes));
        FUZZ_CHECK(are_same(l->windows[i], l->windows_after[i] + n * floats, floats));
    }
}

/* The outputs of each sequence from token first[i] on are those of single tokens. */
static void check_outputs(const layer_call *l, const size_t *first) {
    results got = results_of(&l->c);
    size_t width = l->channels[V];
    for (size_t i = 0, row = 0; i < l->c.n_seqs; row += l->c.lengths[i++]) {
        size_t m = first ? first[i] : 0, at = (row + m) * width;
        if (!is_padding(&l->c, i))
            FUZZ_CHECK(are_same(got.o + at, l->want.o + at, (l->c.lengths[i] - m) * width));
    }
    free_results(&got);
}

static void check_recurrent(layer_call *l, kda_isa isa) {
    reset_layer(l);
    FUZZ_CHECK(run_batch(l, FORWARD, l->c.lengths, KDA_RECURRENT, isa) == KDA_OK);
    check_gaps(&l->c);
    check_outputs(l, NULL);
    check_after(l, l->c.lengths);
}

/* The bits of `want`, and of windows that the recurrent way leaves too. */
static void check_bits(const layer_call *l, const results *want) {
    check_gaps(&l->c);
    check_same(&l->c, want);
    for (size_t i = 0; i < l->c.n_seqs; i++) {
        size_t n = is_padding(&l->c, i) ? 0 : l->c.lengths[i];
        FUZZ_CHECK(
            are_same(l->windows[i], l->windows_after[i] + n * l->window_count, l->window_count));
    }
}

static void check_parts(layer_call *l, const solution *near, kda_isa isa) {
    reset_layer(l);
    FUZZ_CHECK(run_batch(l, FORWARD, l->c.lengths, l->algorithm, isa) == KDA_OK);
    check_float64(l, near);
    results whole = results_of(&l->c);
    check_bits(l, &whole);
    run_parts(l, l->algorithm, isa);
    check_bits(l, &whole);
    if (l->algorithm == KDA_CHUNKED) {
        reset_layer(l);
        run_pieces(l, NULL, l->cut, KDA_CHUNKED, isa);
        check_bits(l, &whole);
    }
    free_results(&whole);
}

static void check_speculation(layer_call *l, kda_isa isa) {
    static const size_t none[MOST_SEQS] = {0};
    bool any = false;
    for (size_t i = 0; i < l->c.n_seqs; i++) any |= !is_padding(&l->c, i) && l->accepted[i] > 0;
    reset_layer(l);
    FUZZ_CHECK(run_batch(l, VERIFY, l->c.lengths, KDA_AUTO, isa) == KDA_OK);
    check_gaps(&l->c);
    check_outputs(l, NULL);
    check_after(l, none);
    unsigned char *o = (unsigned char *)fuzz_copy(l->c.o.block, l->c.o.bytes);
    FUZZ_CHECK(run_batch(l, COMMIT, l->accepted, KDA_AUTO, isa) == KDA_OK);
    check_after(l, l->accepted);
    FUZZ_CHECK(run_batch(l, COMMIT, l->accepted, KDA_AUTO, isa) ==
               (any ? KDA_ERR_JOURNAL : KDA_OK));
    check_after(l, l->accepted);
    FUZZ_CHECK(memcmp(o, l->c.o.block, l->c.o.bytes) == 0);
    free(o);
    memcpy(l->c.o.block, l->c.untouched, l->c.o.bytes);
    run_pieces(l, l->accepted, l->cut, KDA_RECURRENT, isa);
    check_outputs(l, l->accepted);
    check_after(l, l->c.lengths);
}

/* ---- Calls with one thing wrong ---- */

typedef struct attempt {
    kda_layer_desc layer;
    kda_layer_args args;
    kda_seq seqs[MOST_SEQS];
    kda_run run;
    size_t less_scratch;
    int calls; /* those that the fault is one for */
} attempt;

enum { N_LAYER_FAULTS = 24, ALL = FORWARD | VERIFY | COMMIT, RUNS = FORWARD | VERIFY };

/* Of a layer with two or more sequences of some tokens: a fault of the operator. */
static kda_result damage_operator(size_t fault, attempt *a) {
    kda_args op;
    memset(&op, 0, sizeof op);
    op.q = a->args.q, op.k = a->args.k, op.v = a->args.v, op.g = a->args.g, op.o = a->args.o;
    kda_result want = damage(fault, &a->layer.op, &op, a->seqs);
    a->args.q = op.q, a->args.k = op.k, a->args.v = op.v, a->args.g = op.g, a->args.o = op.o;
    a->calls = fault < 11 || fault == 16 ? ALL : RUNS;
    return want;
}

static kda_result damage_layer(size_t fault, attempt *a) {
    kda_seq *seqs = a->seqs;
    bool wide = a->layer.conv_width > 1;
    a->calls = ALL;
    switch (fault) {
    case 0: return a->layer.q_conv = NULL, KDA_ERR_NULL;
    case 1: return a->layer.k_conv = NULL, KDA_ERR_NULL;
    case 2: return a->layer.v_conv = NULL, KDA_ERR_NULL;
    case 3: return a->layer.norm_weight = NULL, KDA_ERR_NULL;
    case 4: return a->layer.norm_eps = NAN, KDA_ERR_NUMBER;
    case 5: return a->layer.conv_width = 0, KDA_ERR_WIDTH;
    case 6: return a->layer.conv_width = KDA_CONV_MAX_WIDTH + 1, KDA_ERR_WIDTH;
    case 7: return a->layer.conv_activation = (kda_activation)0, KDA_ERR_ACTIVATION;
    case 8: return a->run.isa = (kda_isa)9, KDA_ERR_ISA;
    case 9: return a->run.parallel_for = backwards, a->run.n_threads = 0, KDA_ERR_THREADS;
    case 10: return a->run.algorithm = (kda_algorithm)3, KDA_ERR_ALGORITHM;
    case 11: return a->less_scratch = 1, KDA_ERR_SCRATCH;
    case 12: return a->calls = wide ? ALL : 0, seqs[0].window = NULL, KDA_ERR_NULL;
    case 13: return a->calls = wide ? ALL : 0, seqs[1].window = seqs[0].window, KDA_ERR_ALIAS;
    case 14:
        a->calls = wide ? ALL : 0;
        return seqs[0].window = wide ? (char *)seqs[0].window + 2 : NULL, KDA_ERR_ALIGN;
    case 15: return a->calls = VERIFY | COMMIT, seqs[0].journal = NULL, KDA_ERR_NULL;
    case 16: return a->calls = VERIFY | COMMIT, seqs[0].journal = seqs[1].journal, KDA_ERR_ALIAS;
    case 17:
        a->calls = VERIFY | COMMIT;
        return seqs[0].journal = (unsigned char *)seqs[0].journal + 1, KDA_ERR_ALIGN;
    case 18: return a->calls = VERIFY, a->run.algorithm = KDA_CHUNKED, KDA_ERR_ALGORITHM;
    case 19: return a->calls = COMMIT, seqs[0].n_tokens += 1, KDA_ERR_COUNT;
    case 20: a->calls = wide ? COMMIT : 0; return a->layer.conv_width -= wide, KDA_ERR_JOURNAL;
    case 21:
        a->calls = a->layer.op.dim_v > 1 ? COMMIT : 0;
        return a->layer.op.dim_v -= a->layer.op.dim_v > 1, KDA_ERR_JOURNAL;
    case 22: return a->calls = RUNS, a->args.gate.data = NULL, KDA_ERR_NULL;
    default: return a->calls = RUNS, a->args.gate.type = (kda_type)3, KDA_ERR_TYPE;
    }
}

static kda_result try_call(attempt *a, const layer_call *l, int which) {
    size_t n = l->c.n_seqs;
    a->args.seqs = a->seqs;
    give_scratch(&a->run, &l->how, kda_layer_scratch_bytes(&a->layer, n, &a->run));
    a->run.scratch_bytes -= a->less_scratch;
    kda_result result = which == FORWARD  ? kda_layer(&a->layer, &a->args, &a->run)
                        : which == VERIFY ? kda_layer_verify(&a->layer, &a->args, &a->run)
                                          : kda_layer_commit(&a->layer, a->seqs, n, &a->run);
    free_scratch(&a->run, &l->how);
    return result;
}

static void check_fault(layer_call *l, size_t fault) {
    static const size_t none[MOST_SEQS] = {0};
    const call *c = &l->c;
    if (c->n_seqs < 2 || c->lengths[0] == 0 || c->lengths[1] == 0 || c->padding & 3) return;
    reset_layer(l);
    FUZZ_CHECK(run_batch(l, VERIFY, c->lengths, KDA_AUTO, KDA_ISA_AUTO) == KDA_OK);
    results before = results_of(c);
    for (int which = FORWARD; which <= COMMIT; which *= 2) {
        attempt a;
        unsigned char *journals[MOST_SEQS];
        memset(&a, 0, sizeof a);
        a.layer = l->layer, a.run = run_as(&l->how, KDA_AUTO, KDA_ISA_AUTO);
        list_layer_seqs(l, c->lengths, a.seqs);
        a.args = layer_args_of(l, 0, a.seqs, c->n_seqs);
        kda_result want =
            fault < N_FAULTS ? damage_operator(fault, &a) : damage_layer(fault - N_FAULTS, &a);
        if (!(a.calls & which)) continue;
        keep_blocks(l->journals, l->journal_bytes, c->n_seqs, journals);
        FUZZ_CHECK(try_call(&a, l, which) == want);
        FUZZ_CHECK(memcmp(before.block, c->o.block, c->o.bytes) == 0);
        check_after(l, none);
        check_kept(l->journals, l->journal_bytes, c->n_seqs, journals);
    }
    free_results(&before);
}

static void fuzz_one(const uint8_t *bytes, size_t size) {
    fuzz_input in = fuzz_from(bytes, size);
    size_t fault = take_below(&in, N_FAULTS + N_LAYER_FAULTS);
    layer_call l = take_layer_call(&in);
    run_steps(&l);
    solution near = solve_layer(&l);
    for (int isa = KDA_ISA_SCALAR; isa <= KDA_ISA_NEON; isa++) {
        if (!kda_isa_is_available((kda_isa)isa) || l.skipped >> isa & 1) continue;
        check_recurrent(&l, (kda_isa)isa);
        check_float64(&l, &near);
        check_parts(&l, &near, (kda_isa)isa);
        check_speculation(&l, (kda_isa)isa);
    }
    check_fault(&l, fault);
    free_solution(&near);
    free_layer_call(&l);
}
