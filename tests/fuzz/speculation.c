/* speculation.c - drafts that the input describes, and how many of each are accepted: kda_verify and
 * kda_commit on a batch of shapes, gates, types, strides, sequences and values.
 *
 * Every tensor, state and journal is a block of exactly its extent. On every instruction set and in
 * any host's threads a verify gives the outputs of single tokens and leaves states as they are; a
 * commit gives the states after the accepted ones, once; from there the rest of the tokens go as
 * they would have gone, by a forward or by a draft over the same journal. Where numbers are tame,
 * they are near the float64 recurrence. A call with one thing wrong says which and writes nothing.
 */
#define KDA_IMPLEMENTATION
#include "../../kda.h"

#include "call.h"

typedef struct draft {
    call c;
    manner how;
    bool apart;      /* each sequence is committed in a call of its own */
    bool scalar;     /* commits run in plain C, whatever verified */
    bool over_again; /* the rest of the tokens is another draft */
    size_t accepted[MOST_SEQS];
    size_t state_bytes, journal_bytes[MOST_SEQS];
    unsigned char *after[MOST_SEQS]; /* [length + 1]: the state after so many single tokens */
    unsigned char *journals[MOST_SEQS];
    results want; /* the outputs of single tokens, and the states before */
} draft;

static kda_result verify(const kda_desc *desc, const kda_args *args, const manner *how,
                         kda_isa isa) {
    kda_run run = run_as(how, KDA_AUTO, isa);
    give_scratch(&run, how, kda_verify_scratch_bytes(desc, args->n_seqs, &run));
    kda_result result = kda_verify(desc, args, &run);
    free_scratch(&run, how);
    return result;
}

static kda_result commit(const kda_desc *desc, const kda_seq *seqs, size_t n_seqs,
                         const manner *how, kda_isa isa) {
    kda_run run = run_as(how, KDA_AUTO, isa);
    give_scratch(&run, how, kda_scratch_bytes(desc, n_seqs, &run));
    kda_result result = kda_commit(desc, seqs, n_seqs, &run);
    free_scratch(&run, how);
    return result;
}

/* Each sequence token by token, in plain C. */
static void run_steps(draft *d) {
    static const manner plain = {NULL, 1, 1};
    call *c = &d->c;
    size_t bytes = d->state_bytes;
    reset(c);
    for (size_t i = 0, row = 0; i < c->n_seqs; row += c->lengths[i++]) {
        d->after[i] = (unsigned char *)fuzz_alloc((c->lengths[i] + 1) * bytes);
        memcpy(d->after[i], c->states[i], bytes);
        for (size_t t = 0; !is_padding(c, i) && t < c->lengths[i]; t++) {
            kda_seq seq = {1, d->after[i] + (t + 1) * bytes, NULL, NULL};
            memcpy(seq.state, d->after[i] + t * bytes, bytes);
            kda_args args = args_of(c, row + t, &seq, 1);
            FUZZ_CHECK(forward(&c->p.desc, &args, &plain, KDA_RECURRENT, KDA_ISA_SCALAR) == KDA_OK);
        }
    }
    d->want = results_of(c);
}

static draft take_draft(fuzz_input *in) {
    static const limits limit = {1024, 12, 4096};
    draft d;
    unsigned accepted[MOST_SEQS];
    memset(&d, 0, sizeof d);
    unsigned forms = take_u8(in), padding = forms & 16 ? take_u8(in) : 0;
    d.apart = forms & 1, d.scalar = forms & 2, d.over_again = forms & 4;
    d.how = take_manner(in);
    for (size_t i = 0; i < MOST_SEQS; i++) accepted[i] = take_u8(in);
    d.c = take_call(in, limit);
    d.c.padding = padding;
    if (forms & 8) output_over(&d.c, &d.c.v);
    d.state_bytes = kda_state_bytes(&d.c.p.desc);
    for (size_t i = 0; i < d.c.n_seqs; i++) {
        d.accepted[i] = accepted[i] % (d.c.lengths[i] + 1);
        d.journal_bytes[i] = kda_journal_bytes(&d.c.p.desc, d.c.lengths[i]);
        d.journals[i] = (unsigned char *)fuzz_alloc(d.journal_bytes[i]);
        memset(d.journals[i], FILLER, d.journal_bytes[i]);
    }
    run_steps(&d);
    return d;
}

static void free_draft(draft *d) {
    for (size_t i = 0; i < d->c.n_seqs; i++) free(d->after[i]), free(d->journals[i]);
    free_results(&d->want);
    free_call(&d->c);
}

static void list_drafts(const draft *d, const size_t *n_tokens, kda_seq *seqs) {
    list_seqs(&d->c, seqs);
    for (size_t i = 0; i < d->c.n_seqs; i++)
        seqs[i].n_tokens = n_tokens[i], seqs[i].journal = d->journals[i];
}

static void run_verify(draft *d, kda_isa isa) {
    kda_seq seqs[MOST_SEQS];
    reset(&d->c);
    list_drafts(d, d->c.lengths, seqs);
    kda_args args = args_of(&d->c, 0, seqs, d->c.n_seqs);
    FUZZ_CHECK(verify(&d->c.p.desc, &args, &d->how, isa) == KDA_OK);
}

static kda_result run_commit(const draft *d, kda_isa isa) {
    kda_seq seqs[MOST_SEQS];
    const kda_desc *desc = &d->c.p.desc;
    kda_result result = KDA_OK;
    list_drafts(d, d->accepted, seqs);
    if (!d->apart) return commit(desc, seqs, d->c.n_seqs, &d->how, isa);
    for (size_t i = d->c.n_seqs; i > 0; i--) {
        kda_result of_one = commit(desc, &seqs[i - 1], 1, &d->how, isa);
        if (of_one != KDA_OK) result = of_one;
    }
    return result;
}

/* ---- What a draft must be ---- */

static void check_verify(draft *d, kda_isa isa) {
    run_verify(d, isa);
    check_gaps(&d->c);
    check_same(&d->c, &d->want);
    for (size_t i = 0; i < d->c.n_seqs; i++)
        FUZZ_CHECK(memcmp(d->c.states[i], d->after[i], d->state_bytes) == 0);
}

/* Whether each state is what single tokens make of it; that of padding, what it was. */
static void check_states(const draft *d, const size_t *n_tokens) {
    for (size_t i = 0; i < d->c.n_seqs; i++) {
        size_t n = is_padding(&d->c, i) ? 0 : n_tokens[i];
        FUZZ_CHECK(are_same_states(&d->c, d->c.states[i], d->after[i] + n * d->state_bytes));
    }
}

/* What a commit may not write: outputs, journals of nothing accepted. And a journal serves once. */
static void check_commit(draft *d, kda_isa isa) {
    unsigned char *o = (unsigned char *)fuzz_copy(d->c.o.block, d->c.o.bytes);
    unsigned char *journals[MOST_SEQS];
    bool any = false;
    keep_blocks(d->journals, d->journal_bytes, d->c.n_seqs, journals);
    for (size_t i = 0; i < d->c.n_seqs; i++) any |= !is_padding(&d->c, i) && d->accepted[i] > 0;
    FUZZ_CHECK(run_commit(d, isa) == KDA_OK);
    check_states(d, d->accepted);
    FUZZ_CHECK(run_commit(d, isa) == (any ? KDA_ERR_JOURNAL : KDA_OK));
    check_states(d, d->accepted);
    FUZZ_CHECK(memcmp(o, d->c.o.block, d->c.o.bytes) == 0);
    for (size_t i = 0; i < d->c.n_seqs; i++) {
        if (is_padding(&d->c, i) || d->accepted[i] == 0)
            FUZZ_CHECK(memcmp(journals[i], d->journals[i], d->journal_bytes[i]) == 0);
        free(journals[i]);
    }
    free(o);
}

/* The tokens that were not accepted, from the committed states. */
static void check_going_on(draft *d, kda_isa isa) {
    call *c = &d->c;
    size_t width = c->o.heads * c->o.dim;
    memcpy(c->o.block, c->untouched, c->o.bytes);
    for (size_t i = 0, row = 0; i < c->n_seqs; row += c->lengths[i++]) {
        size_t m = d->accepted[i];
        kda_seq seq = {c->lengths[i] - m, c->states[i], NULL, d->journals[i]};
        kda_args args = args_of(c, row + m, &seq, 1);
        if (is_padding(c, i) || seq.n_tokens == 0) continue;
        if (d->over_again) {
            FUZZ_CHECK(verify(&c->p.desc, &args, &d->how, isa) == KDA_OK);
            FUZZ_CHECK(commit(&c->p.desc, &seq, 1, &d->how, isa) == KDA_OK);
        } else {
            FUZZ_CHECK(forward(&c->p.desc, &args, &d->how, KDA_RECURRENT, isa) == KDA_OK);
        }
        results got = results_of(c);
        FUZZ_CHECK(are_same(got.o + (row + m) * width, d->want.o + (row + m) * width,
                            seq.n_tokens * width));
        free_results(&got);
    }
    check_states(d, c->lengths);
}

static void check_float64(draft *d) {
    solution near = solve(&d->c, BOUND);
    reset(&d->c);
    for (size_t i = 0; i < d->c.n_seqs; i++)
        if (!is_padding(&d->c, i))
            memcpy(d->c.states[i], d->after[i] + d->c.lengths[i] * d->state_bytes, d->state_bytes);
    results end = results_of(&d->c);
    memcpy(end.o, d->want.o, end.n_o * sizeof *end.o);
    check_near(&d->c, &end, &near);
    free_results(&end);
    free_solution(&near);
}

/* ---- Calls with one thing wrong ---- */

enum { VERIFY = 1, COMMIT = 2, BOTH = 3 };

typedef struct attempt {
    kda_desc desc;
    kda_args args;
    kda_seq seqs[MOST_SEQS];
    kda_run run;
    size_t less_scratch;
    int calls; /* which of the two the fault is one for */
} attempt;

enum { N_DRAFT_FAULTS = 12 };

static unsigned char *journal_of(const attempt *a, size_t seq) {
    return (unsigned char *)a->seqs[seq].journal;
}

/* Damages sound calls of two or more drafts; what they must then say. */
static kda_result spoil(size_t fault, const draft *d, attempt *a) {
    a->calls = fault >= N_FAULTS || fault < 11 || fault == 16 ? BOTH : VERIFY;
    if (fault < N_FAULTS) return damage(fault, &a->desc, &a->args, a->seqs);
    switch (fault - N_FAULTS) {
    case 0: return a->seqs[0].journal = NULL, KDA_ERR_NULL;
    case 1: return a->seqs[1].journal = journal_of(a, 1) + 1, KDA_ERR_ALIGN;
    case 2: return a->seqs[1].journal = journal_of(a, 0), KDA_ERR_ALIAS;
    case 3: return a->less_scratch = 1, KDA_ERR_SCRATCH;
    case 4: return a->run.isa = (kda_isa)9, KDA_ERR_ISA;
    case 5: return a->run.parallel_for = backwards, a->run.n_threads = 0, KDA_ERR_THREADS;
    case 6: return a->run.algorithm = (kda_algorithm)3, KDA_ERR_ALGORITHM;
    case 7: return a->calls = VERIFY, a->run.algorithm = KDA_CHUNKED, KDA_ERR_ALGORITHM;
    case 8: /* the second begins inside the first */
        a->calls = VERIFY;
        return a->seqs[1].journal = journal_of(a, 0) + d->journal_bytes[0] - 4, KDA_ERR_ALIAS;
    case 9: return a->calls = COMMIT, a->seqs[1].n_tokens = d->c.lengths[1] + 1, KDA_ERR_COUNT;
    case 10: /* of a smaller state, so that no two overlap */
        a->calls = a->desc.state_type == KDA_F32 ? COMMIT : 0;
        return a->desc.state_type = KDA_F16, KDA_ERR_JOURNAL;
    default:
        a->calls = a->desc.dim_k > 1 ? COMMIT : 0;
        return a->desc.dim_k -= a->desc.dim_k > 1, KDA_ERR_JOURNAL;
    }
}

static kda_result try_call(attempt *a, const draft *d, int which) {
    size_t n = d->c.n_seqs;
    give_scratch(&a->run, &d->how,
                 which == VERIFY ? kda_verify_scratch_bytes(&a->desc, n, &a->run)
                                 : kda_scratch_bytes(&a->desc, n, &a->run));
    a->run.scratch_bytes -= a->less_scratch;
    kda_result result = which == VERIFY ? kda_verify(&a->desc, &a->args, &a->run)
                                        : kda_commit(&a->desc, a->seqs, n, &a->run);
    free_scratch(&a->run, &d->how);
    return result;
}

static void check_fault(draft *d, size_t fault) {
    const call *c = &d->c;
    attempt a;
    if (c->n_seqs < 2 || c->lengths[0] == 0 || c->lengths[1] == 0 || c->padding & 3) return;
    run_verify(d, KDA_ISA_AUTO);
    for (int which = VERIFY; which <= COMMIT; which++) {
        unsigned char *journals[MOST_SEQS];
        memset(&a, 0, sizeof a);
        a.desc = c->p.desc, a.run = run_as(&d->how, KDA_AUTO, KDA_ISA_AUTO);
        list_drafts(d, c->lengths, a.seqs);
        a.args = args_of(c, 0, a.seqs, c->n_seqs);
        kda_result want = spoil(fault, d, &a);
        if (!(a.calls & which)) continue;
        results before = results_of(c);
        keep_blocks(d->journals, d->journal_bytes, c->n_seqs, journals);
        FUZZ_CHECK(try_call(&a, d, which) == want);
        FUZZ_CHECK(memcmp(before.block, c->o.block, c->o.bytes) == 0);
        for (size_t i = 0; i < c->n_seqs; i++)
            FUZZ_CHECK(memcmp(c->states[i], d->after[i], d->state_bytes) == 0);
        check_kept(d->journals, d->journal_bytes, c->n_seqs, journals);
        free_results(&before);
    }
}

static void fuzz_one(const uint8_t *bytes, size_t size) {
    fuzz_input in = fuzz_from(bytes, size);
    size_t fault = take_below(&in, N_FAULTS + N_DRAFT_FAULTS);
    draft d = take_draft(&in);
    check_float64(&d);
    for (int isa = KDA_ISA_SCALAR; isa <= KDA_ISA_NEON; isa++) {
        if (!kda_isa_is_available((kda_isa)isa)) continue;
        check_verify(&d, (kda_isa)isa);
        check_commit(&d, d.scalar ? KDA_ISA_SCALAR : (kda_isa)isa);
        check_going_on(&d, (kda_isa)isa);
    }
    check_fault(&d, fault);
    free_draft(&d);
}
