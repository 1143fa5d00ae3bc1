/* conv.c - a convolution that the input describes: kda_conv, kda_conv_verify and kda_conv_commit on a
 * batch of channels, widths, types, strides, sequences and values.
 *
 * Every tensor, window, journal and scratch is a block of exactly its extent. On every instruction
 * set and in any host's threads a call and a verify give the outputs of single tokens; a call leaves
 * their windows, a verify leaves windows as they are, and a commit moves them on, once. Where numbers
 * are tame, outputs are near float64. A call with one thing wrong says which and writes nothing.
 */
#define KDA_IMPLEMENTATION
#include "../../kda.h"

#include "call.h"

typedef struct conv_call {
    call c; /* x is its v, y its o; of one head, without states */
    kda_conv_desc desc;
    manner how;
    size_t cut; /* tokens of a piece */
    float *weight;
    float *history; /* [n_seqs]: the windows before the first token */
    size_t window_count, journal_bytes[MOST_SEQS];
    size_t accepted[MOST_SEQS];
    float *windows[MOST_SEQS], *after[MOST_SEQS]; /* after: [length + 1], of single tokens */
    unsigned char *journals[MOST_SEQS];
    results want; /* the outputs of single tokens */
} conv_call;

/* ---- The input ---- */

static kda_conv_desc take_conv_desc(fuzz_input *in, unsigned forms) {
    static const size_t widths[] = {4, 1, 2, 3, 5, 7, 16, 64};
    static const size_t usual[] = {1, 4, 15, 16, 17, 33, 127, 128, 129, 260};
    kda_conv_desc desc;
    size_t channels = take_u8(in);
    desc.channels = channels < 10 ? usual[channels] : 1 + channels % 40;
    desc.width = widths[take_below(in, 8)];
    desc.activation = forms & 1 ? KDA_ACTIVATION_NONE : KDA_ACTIVATION_SILU;
    return desc;
}

static void take_tensors_of(fuzz_input *in, call *c, size_t channels) {
    c->v = take_tensor(in, c->p.tokens, 1, channels, take_type(in));
    c->o = take_tensor(in, c->p.tokens, 1, channels, take_type(in));
    c->p.v = take_values(in, c->tame, c->p.tokens * channels, -1, 1);
    fill(&c->v, c->p.tokens, c->p.v);
    c->untouched = (unsigned char *)fuzz_copy(c->o.block, c->o.bytes);
}

static conv_call take_conv_call(fuzz_input *in) {
    conv_call v;
    call *c = &v.c;
    unsigned accepted[MOST_SEQS];
    memset(&v, 0, sizeof v);
    unsigned forms = take_u8(in);
    c->padding = forms & 4 ? take_u8(in) : 0, c->tame = take_u8(in) & 1;
    v.how = take_manner(in), v.cut = 1 + take_below(in, 40);
    v.desc = take_conv_desc(in, forms);
    c->n_seqs = take_below(in, MOST_SEQS + 1);
    c->most_tokens = 4096 / v.desc.channels < 40 ? 4096 / v.desc.channels : 40;
    for (size_t i = 0; i < MOST_SEQS; i++) accepted[i] = take_u8(in);
    for (size_t i = 0; i < c->n_seqs; i++)
        c->p.tokens += c->lengths[i] = take_below(in, c->most_tokens + 1);
    take_tensors_of(in, c, v.desc.channels);
    if (forms & 2) output_over(c, &c->v);
    v.weight = take_values(in, c->tame, v.desc.channels * v.desc.width, -1, 1);
    v.window_count = v.desc.channels * (v.desc.width - 1);
    v.history = take_values(in, c->tame, c->n_seqs * v.window_count, -1, 1);
    FUZZ_CHECK(kda_conv_window_bytes(&v.desc) == v.window_count * sizeof(float));
    for (size_t i = 0; i < c->n_seqs; i++) {
        v.accepted[i] = accepted[i] % (c->lengths[i] + 1);
        v.windows[i] = (float *)fuzz_alloc(v.window_count * sizeof(float));
        v.journal_bytes[i] = kda_conv_journal_bytes(&v.desc, c->lengths[i]);
        v.journals[i] = (unsigned char *)fuzz_alloc(v.journal_bytes[i]);
        memset(v.journals[i], FILLER, v.journal_bytes[i]);
    }
    return v;
}

static void free_conv_call(conv_call *v) {
    for (size_t i = 0; i < v->c.n_seqs; i++)
        free(v->windows[i]), free(v->after[i]), free(v->journals[i]);
    free(v->weight), free(v->history);
    free_results(&v->want);
    free_call(&v->c);
}

/* ---- Calls ---- */

static void reset_conv(conv_call *v) {
    size_t n = v->window_count;
    reset(&v->c);
    for (size_t i = 0; i < v->c.n_seqs; i++)
        memcpy(v->windows[i], v->history + i * n, n * sizeof(float));
}

static void list_conv_seqs(const conv_call *v, const size_t *n_tokens, kda_seq *seqs) {
    memset(seqs, 0, MOST_SEQS * sizeof *seqs);
    for (size_t i = 0; i < v->c.n_seqs; i++) {
        seqs[i].n_tokens = n_tokens[i];
        if (is_padding(&v->c, i)) continue;
        seqs[i].window = v->windows[i], seqs[i].journal = v->journals[i];
    }
}

static kda_conv_args conv_args_of(const conv_call *v, size_t row, const kda_seq *seqs,
                                  size_t n_seqs) {
    const tensor *y = &v->c.o;
    kda_conv_args args;
    args.x = from_row(&v->c.v, row);
    args.y = kda_out(element(y, row, 0, 0), y->view.type, y->view.token_stride, 0);
    args.weight = v->weight, args.seqs = seqs, args.n_seqs = n_seqs;
    return args;
}

enum { FORWARD = 1, VERIFY = 2, COMMIT = 4, RUNS = FORWARD | VERIFY, ALL = RUNS | COMMIT };

/* With so many bytes of scratch less than the call needs. */
static kda_result run_conv(const kda_conv_desc *desc, int which, const kda_conv_args *args,
                           const manner *how, kda_run run, size_t less) {
    give_scratch(&run, how, kda_conv_scratch_bytes(desc, args->n_seqs, &run));
    run.scratch_bytes -= less;
    kda_result result = which == FORWARD  ? kda_conv(desc, args, &run)
                        : which == VERIFY ? kda_conv_verify(desc, args, &run)
                                          : kda_conv_commit(desc, args->seqs, args->n_seqs, &run);
    free_scratch(&run, how);
    return result;
}

static kda_result run_batch(const conv_call *v, int which, const size_t *n_tokens, kda_isa isa) {
    kda_seq seqs[MOST_SEQS];
    list_conv_seqs(v, n_tokens, seqs);
    kda_conv_args args = conv_args_of(v, 0, seqs, v->c.n_seqs);
    return run_conv(&v->desc, which, &args, &v->how, run_as(&v->how, KDA_AUTO, isa), 0);
}

/* Tokens of one sequence, whose first row in the tensors is `row`. */
static void run_tokens(const conv_call *v, size_t seq, size_t row, size_t n, kda_isa isa) {
    kda_seq seqs[MOST_SEQS];
    list_conv_seqs(v, v->c.lengths, seqs);
    seqs[seq].n_tokens = n;
    kda_conv_args args = conv_args_of(v, row, &seqs[seq], 1);
    FUZZ_CHECK(run_conv(&v->desc, FORWARD, &args, &v->how, run_as(&v->how, KDA_AUTO, isa), 0) ==
               KDA_OK);
}

/* Each sequence from its token first[i] on, in pieces; first null: from the beginning. */
static void run_pieces(const conv_call *v, const size_t *first, kda_isa isa) {
    const call *c = &v->c;
    for (size_t i = 0, row = 0; i < c->n_seqs; row += c->lengths[i++])
        for (size_t t = first ? first[i] : 0, n; t < c->lengths[i]; t += n) {
            n = c->lengths[i] - t < v->cut ? c->lengths[i] - t : v->cut;
            run_tokens(v, i, row + t, n, isa);
        }
}

/* Each sequence token by token, in plain C, and the window after each. */
static void run_steps(conv_call *v) {
    call *c = &v->c;
    size_t floats = v->window_count;
    reset_conv(v);
    for (size_t i = 0, row = 0; i < c->n_seqs; row += c->lengths[i++]) {
        v->after[i] = (float *)fuzz_alloc((c->lengths[i] + 1) * floats * sizeof(float));
        for (size_t t = 0; t <= c->lengths[i]; t++) {
            memcpy(v->after[i] + t * floats, v->windows[i], floats * sizeof(float));
            if (t < c->lengths[i]) run_tokens(v, i, row + t, 1, KDA_ISA_SCALAR);
        }
    }
    v->want = results_of(c);
}

/* ---- What a convolution must be ---- */

static void check_windows(const conv_call *v, const size_t *n_tokens) {
    for (size_t i = 0; i < v->c.n_seqs; i++) {
        size_t n = is_padding(&v->c, i) ? 0 : n_tokens[i];
        FUZZ_CHECK(are_same(v->windows[i], v->after[i] + n * v->window_count, v->window_count));
    }
}

/* The outputs of single tokens, and windows after so many of them. */
static void check_run(const conv_call *v, const size_t *n_tokens) {
    check_gaps(&v->c);
    check_same(&v->c, &v->want);
    check_windows(v, n_tokens);
}

/* Of tame numbers the sums are exact. */
static void check_float64(const conv_call *v) {
    size_t channels = v->desc.channels, width = v->desc.width, past = width - 1;
    double relative = 1e-6 + error_of_type(v->c.o.view.type);
    for (size_t i = 0, row = 0; v->c.tame && i < v->c.n_seqs; row += v->c.lengths[i++])
        for (size_t at = 0; !is_padding(&v->c, i) && at < v->c.lengths[i] * channels; at++) {
            size_t t = at / channels, ch = at % channels;
            double want = 0;
            for (size_t w = 0; w < width; w++) {
                const float *from = t + w < past
                                        ? v->history + i * v->window_count + (t + w) * channels
                                        : v->c.p.v + (row + t + w - past) * channels;
                want += (double)v->weight[ch * width + w] * (double)from[ch];
            }
            if (v->desc.activation == KDA_ACTIVATION_SILU) want *= reference_sigmoid(want);
            double got = (double)v->want.o[row * channels + at];
            FUZZ_CHECK(fabs(got - want) <= relative * fabs(want) + 1e-7);
        }
}

static void check_speculation(conv_call *v, kda_isa isa) {
    static const size_t none[MOST_SEQS] = {0};
    const call *c = &v->c;
    size_t channels = v->desc.channels;
    bool any = false;
    for (size_t i = 0; i < c->n_seqs; i++) any |= !is_padding(c, i) && v->accepted[i] > 0;
    reset_conv(v);
    FUZZ_CHECK(run_batch(v, VERIFY, c->lengths, isa) == KDA_OK);
    check_run(v, none);
    FUZZ_CHECK(run_batch(v, COMMIT, v->accepted, isa) == KDA_OK);
    check_run(v, v->accepted);
    FUZZ_CHECK(run_batch(v, COMMIT, v->accepted, isa) == (any ? KDA_ERR_JOURNAL : KDA_OK));
    check_run(v, v->accepted);
    memcpy(c->o.block, c->untouched, c->o.bytes);
    run_pieces(v, v->accepted, isa);
    results got = results_of(c);
    for (size_t i = 0, row = 0; i < c->n_seqs; row += c->lengths[i++]) {
        size_t at = (row + v->accepted[i]) * channels;
        FUZZ_CHECK(
            are_same(got.o + at, v->want.o + at, (c->lengths[i] - v->accepted[i]) * channels));
    }
    free_results(&got);
    check_windows(v, c->lengths);
}

/* ---- Calls with one thing wrong ---- */

typedef struct attempt {
    kda_conv_desc desc;
    kda_conv_args args;
    kda_seq seqs[MOST_SEQS];
    kda_run run;
    size_t less_scratch;
    int calls; /* those that the fault is one for */
} attempt;

enum { N_CONV_FAULTS = 22 };

static void *moved(void *pointer, size_t bytes) {
    return (unsigned char *)pointer + bytes;
}

/* Damages sound calls of two or more sequences with tokens; what they must then say. */
static kda_result spoil(size_t fault, attempt *a) {
    kda_seq *s = a->seqs;
    int wide = a->desc.width > 1, split = a->desc.channels > 1;
    a->calls = fault < 10 ? ALL : fault < 16 ? RUNS : VERIFY | COMMIT;
    switch (fault) {
    case 0: return a->desc.channels = 0, KDA_ERR_DIMS;
    case 1: return a->desc.width = 0, KDA_ERR_WIDTH;
    case 2: return a->desc.width = KDA_CONV_MAX_WIDTH + 1, KDA_ERR_WIDTH;
    case 3: return a->desc.activation = (kda_activation)3, KDA_ERR_ACTIVATION;
    case 4: return a->desc.channels = SIZE_MAX / 2, KDA_ERR_SIZE;
    case 5: return a->run.isa = (kda_isa)9, KDA_ERR_ISA;
    case 6: return a->run.parallel_for = backwards, a->run.n_threads = 0, KDA_ERR_THREADS;
    case 7: return a->less_scratch = 1, KDA_ERR_SCRATCH;
    case 8: return s[0].window = moved(s[0].window, 2), KDA_ERR_ALIGN;
    case 9: return a->calls *= wide, s[0].window = s[1].window, KDA_ERR_ALIAS;
    case 10: return a->args.x.data = NULL, KDA_ERR_NULL;
    case 11: return a->args.weight = NULL, KDA_ERR_NULL;
    case 12: return a->args.x.type = (kda_type)3, KDA_ERR_TYPE;
    case 13: return a->args.x.token_stride = PTRDIFF_MIN, KDA_ERR_SIZE;
    case 14: return a->args.y.token_stride = 0, KDA_ERR_STRIDE;
    case 15: return a->args.y.data = moved(a->args.y.data, 1), KDA_ERR_ALIGN;
    case 16: return s[0].journal = NULL, KDA_ERR_NULL;
    case 17: return s[0].journal = s[1].journal, KDA_ERR_ALIAS;
    case 18: return s[0].journal = moved(s[0].journal, 2), KDA_ERR_ALIGN;
    case 19: return a->calls = COMMIT, s[0].n_tokens += 1, KDA_ERR_COUNT;
    case 20: return a->calls = wide * COMMIT, a->desc.width -= (size_t)wide, KDA_ERR_JOURNAL;
    default: return a->calls = split * COMMIT, a->desc.channels -= (size_t)split, KDA_ERR_JOURNAL;
    }
}

static void check_fault(conv_call *v, size_t fault) {
    static const size_t none[MOST_SEQS] = {0};
    const call *c = &v->c;
    if (c->n_seqs < 2 || c->lengths[0] == 0 || c->lengths[1] == 0 || c->padding & 3) return;
    reset_conv(v);
    FUZZ_CHECK(run_batch(v, VERIFY, c->lengths, KDA_ISA_AUTO) == KDA_OK);
    for (int which = FORWARD; which <= COMMIT; which *= 2) {
        attempt a;
        unsigned char *journals[MOST_SEQS];
        memset(&a, 0, sizeof a);
        a.desc = v->desc, a.run = run_as(&v->how, KDA_AUTO, KDA_ISA_AUTO);
        list_conv_seqs(v, c->lengths, a.seqs);
        a.args = conv_args_of(v, 0, a.seqs, c->n_seqs);
        kda_result want = spoil(fault, &a);
        if (!(a.calls & which)) continue;
        keep_blocks(v->journals, v->journal_bytes, c->n_seqs, journals);
        FUZZ_CHECK(run_conv(&a.desc, which, &a.args, &v->how, a.run, a.less_scratch) == want);
        check_run(v, none);
        check_kept(v->journals, v->journal_bytes, c->n_seqs, journals);
    }
}

static void fuzz_one(const uint8_t *bytes, size_t size) {
    fuzz_input in = fuzz_from(bytes, size);
    size_t fault = take_below(&in, N_CONV_FAULTS);
    conv_call v = take_conv_call(&in);
    run_steps(&v);
    check_float64(&v);
    for (int isa = KDA_ISA_SCALAR; isa <= KDA_ISA_NEON; isa++) {
        if (!kda_isa_is_available((kda_isa)isa)) continue;
        reset_conv(&v);
        FUZZ_CHECK(run_batch(&v, FORWARD, v.c.lengths, (kda_isa)isa) == KDA_OK);
        check_run(&v, v.c.lengths);
        reset_conv(&v);
        run_pieces(&v, NULL, (kda_isa)isa);
        check_run(&v, v.c.lengths);
        check_speculation(&v, (kda_isa)isa);
    }
    check_fault(&v, fault);
    free_conv_call(&v);
}
