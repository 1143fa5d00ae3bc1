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

#include "call.h"

static const manner plain = {NULL, 1, 1};

static void run_batch(call *c, kda_algorithm algorithm, kda_isa isa) {
    kda_seq seqs[MOST_SEQS];
    list_seqs(c, seqs);
    reset(c);
    kda_args args = args_of(c, 0, seqs, c->n_seqs);
    FUZZ_CHECK(forward(&c->p.desc, &args, &plain, algorithm, isa) == KDA_OK);
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
            FUZZ_CHECK(forward(&c->p.desc, &args, &plain, KDA_RECURRENT, KDA_ISA_AUTO) == KDA_OK);
        }
}

/* ---- Calls with one thing wrong ---- */

static void check_fault(call *c, size_t fault) {
    kda_seq seqs[MOST_SEQS];
    kda_desc desc = c->p.desc;
    list_seqs(c, seqs);
    kda_args args = args_of(c, 0, seqs, c->n_seqs);
    if (c->n_seqs < 2 || c->p.tokens < 2) return;
    run_batch(c, KDA_RECURRENT, KDA_ISA_AUTO);
    results before = results_of(c);
    kda_result want = damage(fault, &desc, &args, seqs);
    FUZZ_CHECK(forward(&desc, &args, &plain, KDA_AUTO, KDA_ISA_AUTO) == want);
    FUZZ_CHECK(memcmp(before.block, c->o.block, c->o.bytes) == 0);
    check_same(c, &before);
    free_results(&before);
}

static void fuzz_one(const uint8_t *bytes, size_t size) {
    static const limits limit = {SIZE_MAX, 20, (size_t)1 << 14}; /* some 10 ms */
    fuzz_input in = fuzz_from(bytes, size);
    size_t fault = take_u8(&in), piece = 1 + take_below(&in, 9);
    call c = take_call(&in, limit);
    run_batch(&c, KDA_RECURRENT, KDA_ISA_SCALAR);
    check_gaps(&c);
    results want = results_of(&c);
    solution near = solve(&c, BOUND);
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
    free_solution(&near);
    free_results(&want);
    free_call(&c);
}
