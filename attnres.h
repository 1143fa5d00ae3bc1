/* attnres.h - v0.1.0 - Attention Residuals in one C header. SPDX-License-Identifier: MIT

INCLUDE IT

    In exactly one file:                  Everywhere else:
        #define ATTNRES_IMPLEMENTATION        #include "attnres.h"
        #include "attnres.h"

    C11 or C++11, libc and libm only (link with -lm). Define ATTNRES_STATIC as well to make every
    function static to that one file.

WHAT IT DOES

    A model with Attention Residuals has no residual stream to add to. Each sub-layer (attention or
    feed-forward) reads a mixture of what came before it - the embedding, finished blocks, the
    running sum of its own block - weighted by an attention over depth. This header holds that
    attention: in one call (attnres_mix), in two phases that read stored blocks once for many
    sub-layers (attnres_inter, attnres_merge), and as the bookkeeping of a whole forward pass
    (attnres_bank).

SMALLEST PROGRAM

    #define ATTNRES_IMPLEMENTATION
    #include "attnres.h"
    #include <stdio.h>

    int main(void) {
        attnres_desc desc = {0};
        desc.dim = 2, desc.eps = 1e-5f;
        float v0[2] = {1, 2}, v1[2] = {3, 6}, query[2] = {0, 0}, o[2];
        attnres_input sources[2];
        sources[0] = attnres_in_f32(v0, 2), sources[1] = attnres_in_f32(v1, 2);
        unsigned char scratch[16384];
        attnres_mix_args args = {0};
        args.n_tokens = 1, args.sources = sources, args.n_sources = 2;
        args.query = query, args.o = attnres_out_f32(o, 2);
        attnres_run run = {0};
        run.scratch = scratch, run.scratch_bytes = sizeof scratch;
        attnres_result result = attnres_mix(&desc, &args, &run);
        if (result != ATTNRES_OK) return puts(attnres_result_name(result)), 1;
        printf("%g %g\n", (double)o[0], (double)o[1]);
        return 0;
    }

    prints "2 4": a query of zeros, which is what training starts from, gives the mean.

THE MATHEMATICS

    For each token, from sources v_0 .. v_{n-1} and a learned query w with the weight g of its RMS
    norm, all of dim numbers:

        c   = g * w  (elementwise)                            folded once: attnres_fold_query
        r_j = 1 / sqrt(mean(v_j^2) + eps)                     the inverse RMS
        s_j = scale (c . v_j) r_j                             the score
        p   = softmax(s)                                      over the sources: the weights
        o   = sum over j of p_j v_j                           raw values, not normalised ones

    The query belongs to the reading sub-layer and does not depend on the token. The RMS norm that
    a sub-layer begins with can be fused: o / sqrt(mean(o^2) + eps') * weight.
    (Attention Residuals, section 3; Kimi K3, _apply_attn_res.)

    With one source its weight is 1, whatever the query, and o is that source; the fused norm still
    applies. The query is then not read and may be null.

    Two phases. Queries that read the same stored blocks are taken together: attnres_inter gives for
    each the maximum m1 = max(s), the sum l1 = sum(exp(s - m1)) and the unnormalised mixture
    x1 = sum(exp(s_j - m1) v_j). attnres_merge then adds one source p, the running sum, of score s2:

        m = max(m1, s2)     o = (exp(m1 - m) x1 + exp(s2 - m) p) / (exp(m1 - m) l1 + exp(s2 - m))

    or, where there is no such source (partial.data null), o = x1 / l1.

THE BANK

    Sub-layer outputs are summed in blocks; a finished block is stored and becomes a source. A model
    of n_layers layers has 2 n_layers sub-layers l = 0, 1, 2, ...: attention and feed-forward of
    layer 0, then of layer 1, and so on. The bank follows this rule:

        start            partial = the embedding; no block is stored
        read, each l     o = mix(stored blocks, partial), with the norm fused; then, if l starts a
                         block, the raw partial is stored as a block and the partial is empty
        add, each l      partial = partial + output of sub-layer l
        read, the last   o = mix(stored blocks, partial): the model's output, before its head

    l starts a block where          the choice of
        ATTNRES_LAYERS      l is the attention of a layer i with i % block_size == 0     Kimi K3
        ATTNRES_SUBLAYERS   l % block_size == 0                                          the paper

    So sub-layer 0 stores the embedding, which is a source of its own. ATTNRES_SUBLAYERS with
    block_size 1 stores every output: full Attention Residuals. There is no default unit.

        attnres_bank_start(&bank, n_tokens, embedding, &run);
        for (i = 0; i < n_layers; i++) {
            attnres_bank_read(&bank, attention_query[i], attention_norm[i], x, NULL, &run);
            attention(i, x, y);
            attnres_bank_add(&bank, y, &run);
            attnres_bank_read(&bank, feed_forward_query[i], feed_forward_norm[i], x, NULL, &run);
            feed_forward(i, x, y);
            attnres_bank_add(&bank, y, &run);
        }
        attnres_bank_read(&bank, output_query, output_norm, x, NULL, &run);

    Depth is not time: nothing is kept from one token to the next. Each piece of a prompt and each
    decoding step is a pass of its own, and the bank starts again for each.

LAYOUTS

    A view gives an element's place as data[token * token_stride + i], the stride in elements and of
    either sign: columns of a wider row are a normal case. The innermost dimension is contiguous.
    Sources need not be near each other. Each view has its own type: float32, f16 or bf16 (to 16
    bits: nearest, ties to even). Everything that is not a view is dense; queries, norms and weights
    are float32, and so is what the bank stores.

ALIASING

    Where a function writes to o, o may be exactly one of the views it reads (the same data, stride
    and type); attnres_merge's o may also be its mix (float32, stride dim). attnres_fold_query's
    result may be either of its inputs. Nothing else that is written may overlap anything else;
    this is not checked. The bank copies what it is given and never refers to a caller's tensor
    after a call: one buffer can serve as embedding, o and delta throughout. No tensor handed to a
    bank may lie in the bank's memory.

MEMORY

    The library never allocates. Scratch and the bank's memory are the caller's; size functions tell
    the bytes and return 0 for an invalid description or a size past what can be addressed. Both may
    have any alignment (64 bytes recommended). Scratch does not depend on the number of tokens, and
    its contents carry nothing from one call to the next. Other pointers need the alignment of their
    element type. A call uses less than 6 KiB of stack (unoptimised builds: 32 KiB).

    No mutable globals but the choice of kernels, made once: calls with different outputs, scratch
    and banks may run at once in any threads.

THREADS

    The library starts none. A call runs in the calling thread, or in the host's pool through
    run.parallel_for, or, compiled with OpenMP and without a hook, in OpenMP's threads. Work is
    claimed piece by piece (blocks of at most 8 tokens), so a pool that runs fewer workers than
    asked, one at a time, or none, still gets the whole result; a call from inside a parallel region
    is fine. Results never depend on who did what. A bank has scratch for the number of threads in
    its description and uses no more.

ERRORS

    An attnres_result for each kind of misuse, with a name (attnres_result_name). On any error
    nothing has been written, to a bank neither. The values of tensors are not errors: see NUMERICS.
    With n_tokens 0 the description and the counts are checked, no tensor is looked at, and the
    result is ATTNRES_OK.

INSTRUCTION SETS

    Kernels for AVX-512, AVX2 (with FMA and F16C) and NEON are in this file beside the plain C, and
    need no compiler flags. The best that processor and operating system offer is found at the first
    call; run.isa asks for one, and one that is not there is an error. What runs makes no difference
    to the bits. The compiler finds the file again by its name: it stays "attnres.h".

NUMERICS

    * Scores and inverse RMS are float64: a score of 80, rounded to float32, would move its weight
      by 4e-6. So are the sum of a source's squares and, of a large query, c . v. Of a small one
      (scale max|c| sqrt(dim) <= 16), c . v is summed in float32 by runs of 256 elements, and in
      float64 over the runs. That leaves an error of some 6e-8 sqrt(sum((scale c_i v_i r)^2)) in the
      score, which is 1e-7 where scores are spread by 2, and at most 1e-6 as long as the query is a
      small one. All else is IEEE float32 with fused multiply-add. exp is the header's own (at most
      2 ulp from the exact value); 1/sqrt(x) is a division by a correctly rounded square root.
    * A sum over the elements of a row has one fixed shape: 16 running lanes, element i goes to lane
      i % 16 by fused multiply-add in order of i, the last 16 padded with zeros; then lanes 8 apart
      are added, then 4, 2, 1. A run has 32 lanes, element i going to lane i % 32; at its end lanes
      8 apart are added, 0 to 7 with 8 to 15 and 16 to 23 with 24 to 31, and first the former 8 sums
      and then the latter are added to 8 running lanes of float64; at the end of the row those
      4 apart are added, then 2, 1. A sum over sources is taken in their order.
    * A token's results are the same bits whatever other tokens are in the call, however tokens are
      split into calls, however many threads run, and on every instruction set. A cached inverse RMS
      gives the same bits as none. Two phases differ from one pass by rounding only.
    * Sources of 16 bits give the bits of float32 sources of the same values; an output of 16 bits
      is the float32 output, rounded once.
    * The maximum is subtracted before exp, so scores of any finite size are safe. NaN and
      Inf in one token stay there; a score of NaN or +Inf makes that token's results NaN.
    * Squares of sources do not overflow, nor do scores with sources of up to 1e36 (past that a
      run of a small query may, which makes a score Inf or NaN). Of a fused norm, the sum of squares of the
      mixture must stay below 3.4e38 (elements of 1e17 at dim 10,000); past it the result is zeros.
    * -ffast-math breaks these promises, and so does arithmetic on floats in a wider type: x87 code
      on 32-bit x86 (build with -msse2 -mfpmath=sse), GCC on s390x with -std=c11 (add
      -fexcess-precision=fast). A build with either is refused unless ATTNRES_ALLOW_FAST_MATH is
      defined.

OPTIONS

    ATTNRES_STATIC              every function static
    ATTNRES_API                 or your own linkage
    ATTNRES_ALLOW_FAST_MATH     see NUMERICS
    ATTNRES_NO_SIMD             plain C only; so it is in a build without optimisation (GCC, Clang)
    ATTNRES_NO_AVX512           nothing beyond AVX2

LIMITS

    Any dim >= 1, any number of sources, queries, layers and tokens.
*/
#ifndef ATTNRES_H
#define ATTNRES_H

#include <stddef.h>
#include <stdint.h>

#define ATTNRES_VERSION_MAJOR 0
#define ATTNRES_VERSION_MINOR 1
#define ATTNRES_VERSION_PATCH 0

#ifndef ATTNRES_API
#ifdef ATTNRES_STATIC
#if defined(__GNUC__)
#define ATTNRES_API static __attribute__((unused))
#else
#define ATTNRES_API static
#endif
#else
#define ATTNRES_API extern
#endif
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ==== 1. Types ================================================================================ */

typedef enum attnres_result {
    ATTNRES_OK = 0,
    ATTNRES_ERR_NULL,    /* a pointer that the call needs is null */
    ATTNRES_ERR_DIMS,    /* a dimension or count is 0, or a pass exceeds its bank's n_tokens */
    ATTNRES_ERR_SIZE,    /* a size or an extent is more than ptrdiff_t can hold in bytes */
    ATTNRES_ERR_NUMBER,  /* eps is not finite and above 0, or scale is negative or not finite */
    ATTNRES_ERR_TYPE,    /* unknown element type */
    ATTNRES_ERR_ALIGN,   /* a pointer is not aligned to its element type */
    ATTNRES_ERR_STRIDE,  /* rows of an output overlap each other */
    ATTNRES_ERR_SCRATCH, /* scratch or bank memory is null or smaller than its size function says */
    ATTNRES_ERR_UNIT,    /* no block unit chosen, or an unknown one */
    ATTNRES_ERR_ORDER,   /* bank not started, or read and add out of turn */
    ATTNRES_ERR_THREADS, /* a parallel_for without a number of threads */
    ATTNRES_ERR_ISA      /* unknown instruction set, or not one that this machine and build have */
} attnres_result;

/* The spelling of a result, "ATTNRES_ERR_DIMS"; "ATTNRES_ERR_UNKNOWN" for a value that is none. */
ATTNRES_API const char *attnres_result_name(attnres_result result);
/* One sentence for a person. */
ATTNRES_API const char *attnres_result_text(attnres_result result);

typedef enum attnres_type { ATTNRES_F32 = 0, ATTNRES_F16 = 1, ATTNRES_BF16 = 2 } attnres_type;

/* Which kernels run. Those of ATTNRES_ISA_SCALAR are plain C and run everywhere. */
typedef enum attnres_isa {
    ATTNRES_ISA_AUTO = 0, /* the best of those that this processor and build have */
    ATTNRES_ISA_SCALAR = 1,
    ATTNRES_ISA_AVX2 = 2, /* with FMA and F16C */
    ATTNRES_ISA_AVX512 = 3,
    ATTNRES_ISA_NEON = 4
} attnres_isa;

/* What ATTNRES_ISA_AUTO means here; whether an ISA can be asked for here; its name, "avx2". */
ATTNRES_API attnres_isa attnres_isa_best(void);
ATTNRES_API int attnres_isa_is_available(attnres_isa isa);
ATTNRES_API const char *attnres_isa_name(attnres_isa isa);

/* A tensor to read: element i of token t is data[t * token_stride + i]. Stride in elements, of
 * either sign; 0 gives every token the same row. */
typedef struct attnres_input {
    const void *data;
    ptrdiff_t token_stride;
    attnres_type type;
} attnres_input;

/* A tensor to write, the same way; its rows must not overlap each other. */
typedef struct attnres_output {
    void *data;
    ptrdiff_t token_stride;
    attnres_type type;
} attnres_output;

static inline attnres_input attnres_in(const void *data, attnres_type type,
                                       ptrdiff_t token_stride) {
    attnres_input view;
    view.data = data;
    view.token_stride = token_stride;
    view.type = type;
    return view;
}

static inline attnres_output attnres_out(void *data, attnres_type type, ptrdiff_t token_stride) {
    attnres_output view;
    view.data = data;
    view.token_stride = token_stride;
    view.type = type;
    return view;
}

static inline attnres_input attnres_in_f32(const float *data, ptrdiff_t token_stride) {
    return attnres_in(data, ATTNRES_F32, token_stride);
}

static inline attnres_output attnres_out_f32(float *data, ptrdiff_t token_stride) {
    return attnres_out(data, ATTNRES_F32, token_stride);
}

/* The numbers that all mixes of a model share. */
typedef struct attnres_desc {
    size_t dim;
    float eps;   /* of the inverse RMS, > 0, no default; Kimi K3: 1e-5 */
    float scale; /* of the scores; 0 means 1, which is what models use */
} attnres_desc;

/* A host's thread pool. attnres_parallel_for calls task(context, index) for each index below n,
 * each once, in any order and in any threads, and returns when all those calls have returned.
 * Running only some of the indices, or none, costs speed and nothing else: work is claimed piece by
 * piece, and what is left is done by the calling thread. */
typedef void (*attnres_task)(void *context, size_t index);
typedef void (*attnres_parallel_for)(void *user, size_t n, attnres_task task, void *context);

/* How to run a call. Zeroed, but for scratch, is a good choice. */
typedef struct attnres_run {
    void *scratch; /* what the size function of the call says for this run; any alignment */
    size_t scratch_bytes;
    attnres_parallel_for parallel_for; /* null: OpenMP if compiled with it, else this thread */
    void *user;                        /* handed to parallel_for */
    size_t n_threads;                  /* with parallel_for: how many may run, >= 1; with OpenMP: 0
                                          means as many as it would take; otherwise not used */
    attnres_isa isa;
} attnres_run;

/* The RMS norm that follows a mix, fused into it; a null weight means none. */
typedef struct attnres_norm {
    const float *weight; /* [dim] */
    float eps;           /* > 0; not used without a weight */
} attnres_norm;

/* ==== 2. One pass ============================================================================= */

/* folded[i] = norm_weight[i] * query[i]: what every `query` below is. */
ATTNRES_API attnres_result attnres_fold_query(size_t dim, const float *norm_weight,
                                              const float *query, float *folded);

/* inv_rms[t] = 1 / sqrt(mean(source[t]^2) + eps), [n_tokens]: worth keeping for a source that is
 * read more than once. desc->scale is not used, nor is scratch: run may be null, which means the
 * best instruction set, in the calling thread or OpenMP's. Errors: ATTNRES_ERR_NULL to _ALIGN,
 * _THREADS, _ISA. */
ATTNRES_API attnres_result attnres_inverse_rms(const attnres_desc *desc, size_t n_tokens,
                                               attnres_input source, double *inv_rms,
                                               const attnres_run *run);

typedef struct attnres_mix_args {
    size_t n_tokens;
    const attnres_input *sources; /* [n_sources] views of [n_tokens][dim] */
    size_t n_sources;             /* >= 1 */
    const double *const *inv_rms; /* null, or [n_sources]: null or [n_tokens], from the same eps */
    const float *query;           /* [dim], folded; not read where n_sources is 1 */
    attnres_norm norm;
    attnres_output o;             /* [n_tokens][dim]; may be one of the sources itself (same data,
                                     stride, type) */
    float *weights;               /* null, or [n_tokens][n_sources]: receives the softmax weights */
} attnres_mix_args;

/* Bytes of scratch for an attnres_mix of at most n_sources sources, run that way (null: in the
 * calling thread, or in OpenMP's); 0 if something is invalid or the size overflows. */
ATTNRES_API size_t attnres_mix_scratch_bytes(const attnres_desc *desc, size_t n_sources,
                                             const attnres_run *run);

/* o = the mixture of the sources (see THE MATHEMATICS). Errors: any but ATTNRES_ERR_UNIT and
 * _ORDER. */
ATTNRES_API attnres_result attnres_mix(const attnres_desc *desc, const attnres_mix_args *args,
                                       const attnres_run *run);

/* ==== 3. Two phases =========================================================================== */

typedef struct attnres_inter_args {
    size_t n_tokens;
    const attnres_input *sources; /* as in attnres_mix_args */
    size_t n_sources;
    const double *const *inv_rms;
    const float *const *queries; /* [n_queries] folded queries of [dim] */
    size_t n_queries;            /* >= 1 */
    double *max;                 /* [n_queries][n_tokens]: the largest score */
    float *sum;                  /* [n_queries][n_tokens]: of exp(score - max) */
    float *mix;                  /* [n_queries][n_tokens][dim]: of exp(score - max) times source */
} attnres_inter_args;

/* Bytes of scratch for an attnres_inter of at most that many sources and queries, run that way
 * (null: as above); 0 if something is invalid or the size overflows. */
ATTNRES_API size_t attnres_inter_scratch_bytes(const attnres_desc *desc, size_t n_sources,
                                               size_t n_queries, const attnres_run *run);

/* The first phase: all queries against the stored sources. Errors: any but ATTNRES_ERR_STRIDE,
 * _UNIT and _ORDER. */
ATTNRES_API attnres_result attnres_inter(const attnres_desc *desc, const attnres_inter_args *args,
                                         const attnres_run *run);

typedef struct attnres_merge_args {
    size_t n_tokens;
    const double *max;     /* [n_tokens]: the rows of one query, from attnres_inter */
    const float *sum;      /* [n_tokens] */
    const float *mix;      /* [n_tokens][dim] */
    attnres_input partial; /* [n_tokens][dim], the running sum; null data: there is none */
    const float *query;    /* [dim], folded: the same query; not read where there is no partial */
    attnres_norm norm;
    attnres_output o;      /* [n_tokens][dim]; may be partial itself, or mix */
} attnres_merge_args;

/* Bytes of scratch for an attnres_merge run that way (null: as above); 0 as above. */
ATTNRES_API size_t attnres_merge_scratch_bytes(const attnres_desc *desc, const attnres_run *run);

/* The second phase, for one query: adds the partial as one more, last source and normalises.
 * Errors: any but ATTNRES_ERR_UNIT and _ORDER. */
ATTNRES_API attnres_result attnres_merge(const attnres_desc *desc, const attnres_merge_args *args,
                                         const attnres_run *run);

/* ==== 4. The block bank ======================================================================= */

typedef enum attnres_unit { /* 0 is no unit: a description must choose */
    ATTNRES_LAYERS = 1,
    ATTNRES_SUBLAYERS = 2
} attnres_unit;

typedef struct attnres_bank_desc {
    size_t dim;
    size_t n_tokens;   /* tokens to a pass, at most */
    size_t n_layers;   /* of the model: two sub-layers (attention, feed-forward) each */
    size_t block_size; /* in units; may exceed the model */
    attnres_unit unit; /* what block_size counts and where blocks start; no default */
    float eps;         /* as in attnres_desc */
    float scale;
    size_t n_threads;  /* threads that its calls may use, which it has scratch for; 0 means 1 */
} attnres_bank_desc;

/* Over the caller's memory, in float32. Fields may be read, not written, by others: `sources`,
 * `n_blocks` and `cached` are attnres_inter's sources, n_sources and inv_rms for the stored blocks,
 * and sources[n_blocks] is the partial sum where there is one. */
typedef struct attnres_bank {
    attnres_bank_desc desc;
    size_t n_tokens;        /* of the present pass */
    size_t n_blocks;        /* stored so far */
    size_t sublayer;        /* the next to read; 2 * n_layers is the output, then one past it */
    int has_partial;        /* the partial sum is not empty */
    float *partial;         /* [n_tokens][dim]: the running sum, in the slot after the blocks */
    float *blocks;          /* [capacity + 1][n_tokens][dim] */
    double *inv_rms;        /* [capacity][n_tokens] */
    void *scratch;          /* of the mixes */
    size_t scratch_bytes;
    attnres_input *sources; /* [capacity + 1] views of the slots */
    const double **cached;  /* [capacity + 1]: the inverse RMS of stored blocks, null past them */
    int may_read;           /* an output was added since the last read, or the pass has begun */
} attnres_bank;

/* Stored blocks at most: one for each sub-layer that starts a block. 0: invalid. */
ATTNRES_API size_t attnres_bank_capacity(const attnres_bank_desc *desc);

/* Bytes of memory for a bank, the scratch of its mixes included; 0 if the description is invalid or
 * the size overflows. */
ATTNRES_API size_t attnres_bank_bytes(const attnres_bank_desc *desc);

/* Lays a bank out over `memory`, which it uses until it is no longer wanted: there is nothing to
 * free. Errors: ATTNRES_ERR_NULL, _DIMS, _SIZE, _NUMBER, _SCRATCH, _UNIT. */
ATTNRES_API attnres_result attnres_bank_init(attnres_bank *bank, const attnres_bank_desc *desc,
                                             void *memory, size_t bytes);

/* The three calls that follow use a run's threads, no more than desc.n_threads of them, and its
 * instruction set; its scratch is not used. Null means the best set and one thread.
 *
 * Starts a pass of n_tokens with the embedding, [n_tokens][dim], as the partial sum; whatever pass
 * was under way is dropped. Errors: ATTNRES_ERR_NULL, _DIMS (more than the bank's n_tokens), _SIZE,
 * _TYPE, _ALIGN, _ORDER (a zeroed bank without init), _THREADS, _ISA. */
ATTNRES_API attnres_result attnres_bank_start(attnres_bank *bank, size_t n_tokens,
                                              attnres_input embedding, const attnres_run *run);

/* The input of the next sub-layer, or after the last one the model's output: mixes the stored
 * blocks and the partial sum into o, with the norm fused; then, if that sub-layer starts a block,
 * stores the raw partial sum and empties it.
 * query: folded; not read before a block is stored, when the partial sum is the only source.
 * weights: null, or [n_tokens][n_blocks + 1] with n_blocks as before the call.
 * ATTNRES_ERR_ORDER without a start, before the last sub-layer's output was added, and after the
 * model's output. Other errors: those of attnres_mix but _DIMS and _SCRATCH. */
ATTNRES_API attnres_result attnres_bank_read(attnres_bank *bank, const float *query,
                                             attnres_norm norm, attnres_output o, float *weights,
                                             const attnres_run *run);

/* Adds the output of the sub-layer last read, [n_tokens][dim], to the partial sum, whole or in
 * several calls. ATTNRES_ERR_ORDER if none was read in this pass, and after the model's output.
 * Other errors: ATTNRES_ERR_NULL, _SIZE, _TYPE, _ALIGN, _THREADS, _ISA. */
ATTNRES_API attnres_result attnres_bank_add(attnres_bank *bank, attnres_input delta,
                                            const attnres_run *run);

#ifdef __cplusplus
}
#endif
#endif /* ATTNRES_H */

/* ==== end of the interface ==================================================================== */

#if defined(ATTNRES_IMPLEMENTATION) && !defined(ATTNRES_IMPLEMENTATION_DONE)
#define ATTNRES_IMPLEMENTATION_DONE

#include <float.h>
#include <math.h>
#include <string.h>
#if defined(_OPENMP)
#include <omp.h>
#endif
#if defined(_MSC_VER)
#include <intrin.h>
#endif

#if !defined(ATTNRES_ALLOW_FAST_MATH)
#if defined(__FAST_MATH__) || defined(_M_FP_FAST) ||                                               \
    (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)
#error "attnres.h: -ffast-math breaks NaN and exact bits; define ATTNRES_ALLOW_FAST_MATH to accept"
#endif
/* 16 widens _Float16 only. */
#if FLT_EVAL_METHOD != 0 && FLT_EVAL_METHOD != 16
#error "attnres.h: floats are computed wider than float; see NUMERICS"
#endif
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ==== 5. Elementary functions and sums ========================================================
 *
 * Every multiply-add below is an explicit fmaf and every other product feeds only products, fmaf or
 * divisions: a compiler that contracts a*b+c on its own then finds nothing to change, and each
 * result has the same bits whatever the flags. Constants are decimal, of the nine digits that tell
 * any two floats apart, because C++ before 17 knows no hexadecimal ones. */

/* ---- shared with kda.h, but for the prefix ---- */

/* x y + z, rounded once. Some fmaf round twice: those of MinGW and of WebAssembly's libraries. */
static float attnresi_fma(float x, float y, float z) {
#if (defined(__MINGW32__) && !defined(__FMA__)) || defined(__wasm__)
    /* The product is exact. To the sum, rounded to odd (its last bit set if it is not exact), the
     * rounding to float that follows does what it would do to the exact sum. */
    double product = (double)x * (double)y, addend = (double)z, sum = product + addend;
    double part = sum - product, rest = (product - (sum - part)) + (addend - part);
    uint64_t bits;
    if (!(fabs(sum) < (double)INFINITY) || (rest >= 0 && rest <= 0)) return (float)sum;
    memcpy(&bits, &sum, sizeof bits);
    if (bits % 2 == 0) bits += (rest > 0) == (sum > 0) ? 1u : UINT64_MAX;
    memcpy(&sum, &bits, sizeof sum);
    return (float)sum;
#else
    return fmaf(x, y, z);
#endif
}

/* 2^n for n in -126 .. 127. */
static float attnresi_power_of_2(int n) {
    uint32_t bits = (uint32_t)(n + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return power;
}

/* exp(x) = 2^n exp(r), n = round(x / ln 2), |r| <= ln(2)/2; polynomial of degree 6 (error 1e-8). */
static float attnresi_exp(float x) {
    if (!(x > -104.0f)) return x != x ? x : 0.0f; /* below half the least subnormal */
    if (x > 88.8f) return INFINITY;
    /* Adding 1.5 * 2^23 leaves no bits for a fraction: it rounds to an integer. */
    float shifted = attnresi_fma(x, 1.44269502f, 12582912.0f);
    float n = shifted - 12582912.0f;
    /* ln 2 in two parts keeps r exact to its last bit. */
    float r = attnresi_fma(n, -0.693147182f, x);
    r = attnresi_fma(n, 1.90465421e-9f, r);
    float p = 0.00139262504f;
    p = attnresi_fma(p, r, 0.00836323295f);
    p = attnresi_fma(p, r, 0.0416665524f);
    p = attnresi_fma(p, r, 0.166665763f);
    p = attnresi_fma(p, r, 0.5f);
    float y = attnresi_fma(p * r, r, r) + 1.0f;
    /* Two factors, each a normal number, so that a subnormal result rounds once. */
    int whole = (int)n, half = whole / 2;
    return y * attnresi_power_of_2(half) * attnresi_power_of_2(whole - half);
}

#define ATTNRESI_LANES ((size_t)16)

/* Adds the lanes of a sum in the one fixed order. */
static float attnresi_add_lanes(float *lane) {
    for (size_t apart = ATTNRESI_LANES / 2; apart >= 1; apart /= 2)
        for (size_t i = 0; i < apart; i++) lane[i] += lane[i + apart];
    return lane[0];
}

/* Adds the products of n elements to a sum's lanes, element i to lane i % ATTNRESI_LANES; a short
 * last block counts as padded with zeros, which turns a lane of -0 into +0. */
static void attnresi_dot_lanes(const float *x, const float *y, size_t n, float *lane) {
    for (size_t i = 0; i < n; i += ATTNRESI_LANES) {
        size_t some = n - i < ATTNRESI_LANES ? n - i : ATTNRESI_LANES;
        for (size_t l = 0; l < some; l++) lane[l] = attnresi_fma(x[i + l], y[i + l], lane[l]);
        for (size_t l = some; l < ATTNRESI_LANES; l++) lane[l] += 0.0f;
    }
}

/* ---- end of shared text ---- */

static void attnresi_clear_lanes(float *lane) {
    for (size_t l = 0; l < ATTNRESI_LANES; l++) lane[l] = 0.0f;
}

/* 1 / sqrt(mean + eps) of a mixed row, from its sum of squares. */
static float attnresi_inverse_rms(float sum_of_squares, size_t dim, float eps) {
    return 1.0f / sqrtf(sum_of_squares / (float)dim + eps);
}

/* Adds n lanes of float64, a power of 2, in the same order. */
static double attnresi_add_wide_lanes(double *lane, size_t n) {
    for (size_t apart = n / 2; apart >= 1; apart /= 2)
        for (size_t i = 0; i < apart; i++) lane[i] += lane[i + apart];
    return lane[0];
}

/* Elements that a score adds up in float32, in two wide values that take turns, and the lanes of
 * float64 that take such sums. */
#define ATTNRESI_RUN ((size_t)256)
#define ATTNRESI_PAIR (2 * ATTNRESI_LANES)
#define ATTNRESI_RUN_SUMS (ATTNRESI_LANES / 2)

/* A wide value of a run goes to the sums of a score. */
static void attnresi_add_run(double *sums, const float *lane) {
    for (size_t l = 0; l < ATTNRESI_RUN_SUMS; l++)
        sums[l] += (double)(lane[l] + lane[l + ATTNRESI_RUN_SUMS]);
}

static double attnresi_wide_inverse_rms(double sum_of_squares, size_t dim, float eps) {
    return 1.0 / sqrt(sum_of_squares / (double)dim + (double)eps);
}

static size_t attnresi_min(size_t a, size_t b) {
    return a < b ? a : b;
}

/* ==== 6. Element types ======================================================================== */

static uint32_t attnresi_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static float attnresi_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static float attnresi_from_f16(uint16_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x8000u) << 16, rest = bits & 0x7fffu;
    if (rest >= 0x7c00u) /* infinity, or NaN made quiet */
        return attnresi_float(sign | 0x7f800000u | rest << 13 | (rest > 0x7c00u ? 0x400000u : 0u));
    if (rest >= 0x0400u) return attnresi_float(sign | ((rest << 13) + (112u << 23)));
    /* subnormal: a normal float */
    return attnresi_float(sign | attnresi_bits((float)rest * (1.0f / 16777216.0f)));
}

static uint16_t attnresi_to_f16(float x) {
    uint32_t bits = attnresi_bits(x), sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
    if (rest > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | (rest >> 13 & 0x3ffu));
    if (rest >= 0x47800000u) return (uint16_t)(sign | 0x7c00u); /* 65536 and above */
    if (rest >= 0x38800000u) /* 2^-14 and above; a carry out of 65504 gives infinity */
        return (uint16_t)(sign | (rest + 0xfffu + (rest >> 13 & 1u) - (112u << 23)) >> 13);
    /* Subnormal: in units of 2^-24, adding 2^23 rounds to an integer. */
    float units = attnresi_fma(attnresi_float(rest), 16777216.0f, 8388608.0f);
    return (uint16_t)(sign | (attnresi_bits(units) - attnresi_bits(8388608.0f)));
}

static float attnresi_from_bf16(uint16_t bits) {
    uint32_t quiet = (bits & 0x7fffu) > 0x7f80u ? 0x400000u : 0u;
    return attnresi_float((uint32_t)bits << 16 | quiet);
}

static uint16_t attnresi_to_bf16(float x) {
    uint32_t bits = attnresi_bits(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40u);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

static size_t attnresi_type_bytes(attnres_type type) {
    switch (type) {
    case ATTNRES_F32: return sizeof(float);
    case ATTNRES_F16:
    case ATTNRES_BF16: return sizeof(uint16_t);
    }
    return 0;
}

/* n contiguous elements of a type to floats and back; no aliasing but of float with itself. */
static void attnresi_to_floats(const void *from, attnres_type type, size_t n, float *to) {
    const uint16_t *half = (const uint16_t *)from;
    if (type == ATTNRES_F32)
        memmove(to, from, n * sizeof(float));
    else if (type == ATTNRES_F16)
        for (size_t i = 0; i < n; i++) to[i] = attnresi_from_f16(half[i]);
    else
        for (size_t i = 0; i < n; i++) to[i] = attnresi_from_bf16(half[i]);
}

static void attnresi_from_floats(const float *from, attnres_type type, size_t n, void *to) {
    uint16_t *half = (uint16_t *)to;
    if (type == ATTNRES_F32)
        memmove(to, from, n * sizeof(float));
    else if (type == ATTNRES_F16)
        for (size_t i = 0; i < n; i++) half[i] = attnresi_to_f16(from[i]);
    else
        for (size_t i = 0; i < n; i++) half[i] = attnresi_to_bf16(from[i]);
}

/* Element i of a row. */
static const void *attnresi_element(const void *row, attnres_type type, size_t i) {
    return (const unsigned char *)row + i * attnresi_type_bytes(type);
}

/* ==== 7. Checks =============================================================================== */

/* In the order of attnres_result. */
static const char *const attnresi_results[][2] = {
    {"ATTNRES_OK", "no error"},
    {"ATTNRES_ERR_NULL", "a pointer that the call needs is null"},
    {"ATTNRES_ERR_DIMS", "a dimension or count is 0, or a pass has more tokens than its bank"},
    {"ATTNRES_ERR_SIZE", "a size or an extent is more bytes than can be addressed"},
    {"ATTNRES_ERR_NUMBER", "eps must be finite and above 0, scale finite and not negative"},
    {"ATTNRES_ERR_TYPE", "an element type is unknown"},
    {"ATTNRES_ERR_ALIGN", "a pointer is not aligned to its element type"},
    {"ATTNRES_ERR_STRIDE", "rows of an output overlap each other"},
    {"ATTNRES_ERR_SCRATCH", "scratch or bank memory is null or less than its size function says"},
    {"ATTNRES_ERR_UNIT", "no block unit or an unknown one is chosen"},
    {"ATTNRES_ERR_ORDER", "the bank is not started, or read and add are out of turn"},
    {"ATTNRES_ERR_THREADS", "a parallel_for is given without a number of threads"},
    {"ATTNRES_ERR_ISA",
     "the instruction set is unknown, or not one that this machine and build have"},
};

static const char *attnresi_describe(attnres_result result, size_t column) {
    static const char *const unknown[2] = {"ATTNRES_ERR_UNKNOWN", "not a result of this library"};
    size_t n = sizeof attnresi_results / sizeof attnresi_results[0];
    return (size_t)result < n ? attnresi_results[(size_t)result][column] : unknown[column];
}

ATTNRES_API const char *attnres_result_name(attnres_result result) {
    return attnresi_describe(result, 0);
}

ATTNRES_API const char *attnres_result_text(attnres_result result) {
    return attnresi_describe(result, 1);
}

#define ATTNRESI_MAX_BYTES ((size_t)PTRDIFF_MAX)
#define ATTNRESI_SCRATCH_ALIGN ((size_t)64)

/* Products and sums of sizes: 0 when a term is 0 or the result passes ATTNRESI_MAX_BYTES, so that
 * one test at the end of a chain finds any overflow in it. */
static size_t attnresi_product(size_t a, size_t b) {
    if ((a | b) >> (sizeof(size_t) * 4 - 1) == 0) return a * b; /* without a division */
    if (b == 0 || a > ATTNRESI_MAX_BYTES / b) return 0;
    return a * b;
}
static size_t attnresi_sum(size_t a, size_t b) {
    if (a == 0 || b == 0 || a > ATTNRESI_MAX_BYTES || b > ATTNRESI_MAX_BYTES - a) return 0;
    return a + b;
}

static size_t attnresi_step(ptrdiff_t stride) {
    return stride < 0 ? (size_t)0 - (size_t)stride : (size_t)stride;
}

/* A dense array of rows of dim floats; neither is 0. */
static attnres_result attnresi_check_floats(const float *data, size_t rows, size_t dim) {
    if (!data) return ATTNRES_ERR_NULL;
    if ((uintptr_t)data % sizeof(float) != 0) return ATTNRES_ERR_ALIGN;
    size_t bytes = attnresi_product(attnresi_product(rows, dim), sizeof(float));
    return bytes ? ATTNRES_OK : ATTNRES_ERR_SIZE;
}

static attnres_result attnresi_check_doubles(const double *data, size_t n) {
    if (!data) return ATTNRES_ERR_NULL;
    if ((uintptr_t)data % sizeof(double) != 0) return ATTNRES_ERR_ALIGN;
    return attnresi_product(n, sizeof(double)) ? ATTNRES_OK : ATTNRES_ERR_SIZE;
}

/* A view of n_tokens rows, of a dim whose bytes are known to be addressable; neither is 0. */
static attnres_result attnresi_check_view(const void *data, ptrdiff_t token_stride,
                                          attnres_type type, size_t n_tokens, size_t dim) {
    size_t size = attnresi_type_bytes(type);
    if (size == 0) return ATTNRES_ERR_TYPE;
    size_t most = ATTNRESI_MAX_BYTES / size - dim;
    if (n_tokens > 1 && attnresi_step(token_stride) > most / (n_tokens - 1))
        return ATTNRES_ERR_SIZE;
    if (!data) return ATTNRES_ERR_NULL;
    return (uintptr_t)data % size != 0 ? ATTNRES_ERR_ALIGN : ATTNRES_OK;
}

static attnres_result attnresi_check_input(attnres_input x, size_t n_tokens, size_t dim) {
    return attnresi_check_view(x.data, x.token_stride, x.type, n_tokens, dim);
}

static attnres_result attnresi_check_output(attnres_output y, size_t n_tokens, size_t dim) {
    attnres_result result = attnresi_check_view(y.data, y.token_stride, y.type, n_tokens, dim);
    if (result != ATTNRES_OK) return result;
    return n_tokens > 1 && attnresi_step(y.token_stride) < dim ? ATTNRES_ERR_STRIDE : ATTNRES_OK;
}

static int attnresi_is_valid_eps(float eps) {
    return eps > 0.0f && eps < INFINITY;
}

static attnres_result attnresi_check_norm(attnres_norm norm, size_t dim) {
    if (!norm.weight) return ATTNRES_OK;
    if (!attnresi_is_valid_eps(norm.eps)) return ATTNRES_ERR_NUMBER;
    return attnresi_check_floats(norm.weight, 1, dim);
}

static attnres_result attnresi_check_desc(const attnres_desc *desc) {
    if (!desc) return ATTNRES_ERR_NULL;
    if (desc->dim == 0) return ATTNRES_ERR_DIMS;
    if (!attnresi_product(desc->dim, sizeof(float))) return ATTNRES_ERR_SIZE;
    if (!attnresi_is_valid_eps(desc->eps)) return ATTNRES_ERR_NUMBER;
    if (!(desc->scale >= 0.0f && desc->scale < INFINITY)) return ATTNRES_ERR_NUMBER;
    return ATTNRES_OK;
}

static attnres_result attnresi_check_run(const attnres_run *run) {
    if (!run) return ATTNRES_ERR_NULL;
    if (run->parallel_for && run->n_threads == 0) return ATTNRES_ERR_THREADS;
    return attnres_isa_is_available(run->isa) ? ATTNRES_OK : ATTNRES_ERR_ISA;
}

/* ==== 8. Scratch and threads ================================================================== */

/* Hands out aligned pieces of memory. With none it only counts: the size functions and the calls
 * run the same code. `used` starts at the room for aligning and is 0 for good on overflow. */
typedef struct attnresi_arena {
    unsigned char *aligned;
    size_t used;
} attnresi_arena;

static attnresi_arena attnresi_arena_on(void *memory) {
    attnresi_arena arena;
    size_t past = (uintptr_t)memory % ATTNRESI_SCRATCH_ALIGN;
    arena.aligned = (unsigned char *)memory;
    if (past != 0) arena.aligned += ATTNRESI_SCRATCH_ALIGN - past;
    arena.used = ATTNRESI_SCRATCH_ALIGN;
    return arena;
}

static void *attnresi_take(attnresi_arena *arena, size_t count, size_t size) {
    size_t start = arena->used - ATTNRESI_SCRATCH_ALIGN;
    size_t bytes = attnresi_sum(attnresi_product(count, size), ATTNRESI_SCRATCH_ALIGN - 1);
    arena->used =
        attnresi_sum(arena->used, bytes / ATTNRESI_SCRATCH_ALIGN * ATTNRESI_SCRATCH_ALIGN);
    return arena->aligned ? arena->aligned + start : NULL;
}

static float *attnresi_take_floats(attnresi_arena *arena, size_t count) {
    return (float *)attnresi_take(arena, count, sizeof(float));
}

static double *attnresi_take_doubles(attnresi_arena *arena, size_t count) {
    return (double *)attnresi_take(arena, count, sizeof(double));
}

/* How many workers may run at once; each has scratch of its own. */
static size_t attnresi_workers(const attnres_run *run) {
    if (run && run->parallel_for) return run->n_threads;
#if defined(_OPENMP)
    if (run && run->n_threads > 0) return run->n_threads;
    return (size_t)omp_get_max_threads();
#else
    return 1;
#endif
}

/* *counter++, by many threads at once. */
static size_t attnresi_claim(size_t *counter) {
#if defined(__GNUC__) || defined(__clang__)
    return __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED);
#elif defined(_MSC_VER) && defined(_WIN64)
    return (size_t)_InterlockedExchangeAdd64((volatile __int64 *)counter, 1);
#elif defined(_MSC_VER)
    return (size_t)_InterlockedExchangeAdd((volatile long *)counter, 1);
#else
#error "attnres.h: this compiler's atomic addition is not known"
#endif
}

/* Items 0 .. n_items - 1, each done by whichever worker claims it. Results never depend on who. */
typedef void (*attnresi_item)(void *call, size_t item, size_t worker);
typedef struct attnresi_work_list {
    attnresi_item item;
    void *call;
    size_t n_items;
    size_t next;
} attnresi_work_list;

static void attnresi_worker(void *context, size_t worker) {
    attnresi_work_list *list = (attnresi_work_list *)context;
    for (;;) {
        size_t item = attnresi_claim(&list->next);
        if (item >= list->n_items) return;
        list->item(list->call, item, worker);
    }
}

static void attnresi_parallel(const attnres_run *run, size_t n_items, attnresi_item item,
                              void *call) {
    attnresi_work_list list;
    size_t workers = attnresi_workers(run);
    list.item = item;
    list.call = call;
    list.n_items = n_items;
    list.next = 0;
    if (workers > n_items) workers = n_items;
    if (workers > 1) {
        if (run && run->parallel_for) {
            run->parallel_for(run->user, workers, attnresi_worker, &list);
        } else {
#if defined(_OPENMP)
            ptrdiff_t n = (ptrdiff_t)workers;
#pragma omp parallel for num_threads((int)n) schedule(static, 1)
            for (ptrdiff_t worker = 0; worker < n; worker++) attnresi_worker(&list, (size_t)worker);
#endif
        }
    }
    attnresi_worker(&list, 0); /* all of it, or what fewer workers than asked for left over */
}

/* ==== 9. Rows: what every call is made of =====================================================
 *
 * The plain kernels. Those of an instruction set, at the end of the file, compute the same bits. */

#define ATTNRESI_TOKENS ((size_t)8) /* to a block, at most */
#define ATTNRESI_ROWS ((size_t)8)   /* that meet many queries together */
#define ATTNRESI_NEAR ((size_t)128 * 1024) /* elements that a block's rows should not exceed */

/* One token's rows of all sources. */
typedef struct attnresi_rows {
    const attnres_input *sources; /* [n]: for their types */
    const void **at;              /* [n] */
    size_t n, dim;
} attnresi_rows;

/* A query and how its dot products are summed: see NUMERICS. The root of the sum of the squares of a
 * score's terms, of which float32 runs lose some 6e-8, is at most scale * max|c| * sqrt(dim); where
 * that is past ATTNRESI_LARGE, sums are float64 ones. */
#define ATTNRESI_LARGE 16.0
typedef struct attnresi_query {
    const float *c; /* [dim], folded */
    int is_large;
} attnresi_query;

/* One set of kernels. */
typedef struct attnresi_kernels {
    attnres_isa isa;
    void (*to_floats)(const void *from, attnres_type type, size_t n, float *to);
    void (*from_floats)(const float *from, attnres_type type, size_t n, void *to);
    void (*add)(const void *row, attnres_type type, size_t n, float *sum);
    void (*exp)(float *x, size_t n);
    float (*largest)(const float *x, size_t n);
    void (*score)(const void *row, attnres_type type, size_t dim, const void *ahead,
                  attnresi_query query, double *dot, double *squares);
    void (*dots)(const float *const *rows, size_t n_rows, const float *const *queries,
                 size_t n_queries, size_t dim, double *sums, double *dots);
    float (*mix)(const attnresi_rows *rows, const float *weights, float *to);
    void (*mixes)(const attnresi_rows *rows, const float *weights, size_t n_queries, float *to,
                  size_t to_stride);
    void (*normalise)(float inverse_rms, const float *weight, size_t n, float *x);
} attnresi_kernels;

/* Those of an ISA, ATTNRES_ISA_AUTO included; null if this machine or build lacks it. Defined
 * below, when all sets are. */
static const attnresi_kernels *attnresi_kernels_of(attnres_isa isa);

static const attnresi_kernels *attnresi_kernels_for(const attnres_run *run) {
    return attnresi_kernels_of(run ? run->isa : ATTNRES_ISA_AUTO);
}

/* sum += row. */
static void attnresi_add(const void *row, attnres_type type, size_t n, float *sum) {
    float x[ATTNRESI_LANES];
    for (size_t i = 0; i < n; i += ATTNRESI_LANES) {
        size_t some = attnresi_min(n - i, ATTNRESI_LANES);
        attnresi_to_floats(attnresi_element(row, type, i), type, some, x);
        for (size_t l = 0; l < some; l++) sum[i + l] += x[l];
    }
}

static void attnresi_exp_row(float *x, size_t n) {
    for (size_t i = 0; i < n; i++) x[i] = attnresi_exp(x[i]);
}

/* The largest magnitude; what NaN counts for does not matter. */
static float attnresi_largest(const float *x, size_t n) {
    float largest = 0.0f;
    for (size_t i = 0; i < n; i++)
        if (fabsf(x[i]) > largest) largest = fabsf(x[i]);
    return largest;
}

/* query . row, in float32 runs. */
static double attnresi_dot(const void *row, attnres_type type, size_t dim, const float *query) {
    double sums[ATTNRESI_RUN_SUMS] = {0};
    for (size_t i = 0; i < dim; i += ATTNRESI_RUN) {
        float run[2][ATTNRESI_LANES], x[ATTNRESI_LANES];
        attnresi_clear_lanes(run[0]);
        attnresi_clear_lanes(run[1]);
        for (size_t k = i; k < dim && k - i < ATTNRESI_RUN; k += ATTNRESI_LANES) {
            size_t some = attnresi_min(dim - k, ATTNRESI_LANES);
            attnresi_to_floats(attnresi_element(row, type, k), type, some, x);
            attnresi_dot_lanes(x, query + k, some, run[k / ATTNRESI_LANES % 2]);
        }
        attnresi_add_run(sums, run[0]);
        attnresi_add_run(sums, run[1]);
    }
    return attnresi_add_wide_lanes(sums, ATTNRESI_RUN_SUMS);
}

/* row . row, or query . row where there is a query, in float64. The products are exact, so nothing
 * depends on how they are added up but the order. Lanes begin at +0 and so are never -0: padding
 * with zeros leaves them as they are. */
static double attnresi_wide_dot(const void *row, attnres_type type, size_t dim,
                                const float *query) {
    double lanes[ATTNRESI_LANES] = {0};
    float x[ATTNRESI_LANES];
    for (size_t i = 0; i < dim; i += ATTNRESI_LANES) {
        size_t some = attnresi_min(dim - i, ATTNRESI_LANES);
        attnresi_to_floats(attnresi_element(row, type, i), type, some, x);
        const float *y = query ? query + i : x;
        for (size_t l = 0; l < some; l++) lanes[l] += (double)x[l] * (double)y[l];
    }
    return attnresi_add_wide_lanes(lanes, ATTNRESI_LANES);
}

/* query . row and row . row in one reading of the row; either may be left out with a null result.
 * `ahead` is a row that will be read soon, or this one: sets that can fetch memory ahead do. */
static void attnresi_score(const void *row, attnres_type type, size_t dim, const void *ahead,
                           attnresi_query query, double *dot, double *squares) {
    (void)ahead;
    if (dot)
        *dot = query.is_large ? attnresi_wide_dot(row, type, dim, query.c)
                              : attnresi_dot(row, type, dim, query.c);
    if (squares) *squares = attnresi_wide_dot(row, type, dim, NULL);
}

/* dots[r][q] = row r . query q in float32 runs, of at most ATTNRESI_ROWS float32 rows. `sums` is room for what the
 * other sets keep from run to run: see attnresi_sums_of. */
static void attnresi_dots(const float *const *rows, size_t n_rows, const float *const *queries,
                          size_t n_queries, size_t dim, double *sums, double *dots) {
    (void)sums;
    for (size_t r = 0; r < n_rows; r++)
        for (size_t q = 0; q < n_queries; q++)
            dots[r * n_queries + q] = attnresi_dot(rows[r], ATTNRES_F32, dim, queries[q]);
}

/* to = sum over j of weights[j] row_j; returns the sum of the squares of that. `to` may be one of
 * the rows: each block of all of them is read before that block is written, and not read again. */
static float attnresi_mix(const attnresi_rows *rows, const float *weights, float *to) {
    float x[ATTNRESI_LANES], mixed[ATTNRESI_LANES], squares[ATTNRESI_LANES];
    attnresi_clear_lanes(squares);
    for (size_t i = 0; i < rows->dim; i += ATTNRESI_LANES) {
        size_t some = attnresi_min(rows->dim - i, ATTNRESI_LANES);
        for (size_t j = 0; j < rows->n; j++) {
            attnres_type type = rows->sources[j].type;
            attnresi_to_floats(attnresi_element(rows->at[j], type, i), type, some, x);
            for (size_t l = 0; j == 0 && l < some; l++) mixed[l] = weights[j] * x[l];
            for (size_t l = 0; j > 0 && l < some; l++)
                mixed[l] = attnresi_fma(weights[j], x[l], mixed[l]);
        }
        attnresi_dot_lanes(mixed, mixed, some, squares);
        memcpy(to + i, mixed, some * sizeof(float));
    }
    return attnresi_add_lanes(squares);
}

/* The mixtures of several queries, with weights[q][j], to rows that are to_stride apart. */
static void attnresi_mixes(const attnresi_rows *rows, const float *weights, size_t n_queries,
                           float *to, size_t to_stride) {
    for (size_t q = 0; q < n_queries; q++)
        (void)attnresi_mix(rows, weights + q * rows->n, to + q * to_stride);
}

static void attnresi_normalise(float inverse_rms, const float *weight, size_t n, float *x) {
    for (size_t i = 0; i < n; i++) x[i] = x[i] * inverse_rms * weight[i];
}

/* ==== 10. A call and its scratch ============================================================== */

/* What one worker needs for a block of tokens. */
typedef struct attnresi_work {
    const void **rows; /* [n_sources] of one token */
    double *scores;    /* [ATTNRESI_TOKENS][n_queries][n_sources] */
    float *weights;    /* [n_queries][n_sources] of one token: exp(score - max), or over the sum */
    float *mixed;      /* [dim], for outputs that are not float32; not in the first phase */
    float *floats;     /* [ATTNRESI_ROWS][dim], sources that are not float32 (first phase) */
    double *sums;      /* [ATTNRESI_ROWS][attnresi_sums_of(n_queries)] (first phase) */
    double *dots;      /* [ATTNRESI_ROWS][n_queries] (first phase) */
} attnresi_work;

/* How a call's scratch is laid out. */
typedef struct attnresi_scratch {
    size_t dim, n_sources, n_queries;
    int first_phase;
    attnresi_query *queries; /* [n_queries] */
    unsigned char *memory; /* [workers][each] */
    size_t each;
} attnresi_scratch;

static attnresi_scratch attnresi_scratch_for(size_t dim, size_t n_sources, size_t n_queries,
                                             int first_phase) {
    attnresi_scratch scratch;
    memset(&scratch, 0, sizeof scratch);
    scratch.dim = dim;
    scratch.n_sources = n_sources;
    scratch.n_queries = n_queries;
    scratch.first_phase = first_phase;
    return scratch;
}

/* Sums of runs to a row: the queries are taken in threes, and the last three may be part of one. */
static size_t attnresi_sums_of(size_t n_queries) {
    return attnresi_product(attnresi_sum(n_queries, 2), ATTNRESI_RUN_SUMS);
}

static size_t attnresi_carve_work(const attnresi_scratch *scratch, void *memory,
                                  attnresi_work *work) {
    attnresi_arena arena = attnresi_arena_on(memory);
    size_t n_scores = attnresi_product(scratch->n_queries, scratch->n_sources);
    memset(work, 0, sizeof *work);
    work->rows = (const void **)attnresi_take(&arena, scratch->n_sources, sizeof(const void *));
    work->scores = attnresi_take_doubles(&arena, attnresi_product(ATTNRESI_TOKENS, n_scores));
    work->weights = attnresi_take_floats(&arena, n_scores);
    if (scratch->first_phase) {
        size_t n_dots = attnresi_product(ATTNRESI_ROWS, scratch->n_queries);
        size_t n_sums = attnresi_product(ATTNRESI_ROWS, attnresi_sums_of(scratch->n_queries));
        work->floats = attnresi_take_floats(&arena, attnresi_product(ATTNRESI_ROWS, scratch->dim));
        work->sums = attnresi_take_doubles(&arena, n_sums);
        work->dots = attnresi_take_doubles(&arena, n_dots);
    } else {
        work->mixed = attnresi_take_floats(&arena, scratch->dim);
    }
    return arena.used;
}

static size_t attnresi_carve(attnresi_scratch *scratch, size_t workers, void *memory) {
    attnresi_work work;
    attnresi_arena arena = attnresi_arena_on(memory);
    scratch->each = attnresi_carve_work(scratch, NULL, &work);
    scratch->queries =
        (attnresi_query *)attnresi_take(&arena, scratch->n_queries, sizeof(attnresi_query));
    scratch->memory = (unsigned char *)attnresi_take(&arena, workers, scratch->each);
    return arena.used;
}

static size_t attnresi_scratch_bytes(const attnres_desc *desc, size_t n_sources, size_t n_queries,
                                     int first_phase, const attnres_run *run) {
    if (attnresi_check_desc(desc) != ATTNRES_OK) return 0;
    if (run && attnresi_check_run(run) != ATTNRES_OK) return 0;
    attnresi_scratch scratch = attnresi_scratch_for(desc->dim, n_sources, n_queries, first_phase);
    return attnresi_carve(&scratch, attnresi_workers(run), NULL);
}

static attnres_result attnresi_check_scratch(const attnres_desc *desc, size_t n_sources,
                                             size_t n_queries, int first_phase,
                                             const attnres_run *run) {
    attnres_result result = attnresi_check_run(run);
    if (result != ATTNRES_OK) return result;
    size_t needed = attnresi_scratch_bytes(desc, n_sources, n_queries, first_phase, run);
    if (needed == 0) return ATTNRES_ERR_SIZE;
    return !run->scratch || run->scratch_bytes < needed ? ATTNRES_ERR_SCRATCH : ATTNRES_OK;
}

/* What scores are made from, in one pass as in two phases. */
typedef struct attnresi_scoring {
    const attnres_input *sources; /* [n_sources] */
    size_t n_sources;
    const double *const *inv_rms; /* null, or [n_sources]: null or [n_tokens] */
    const float *const *queries;  /* [n_queries] */
    size_t n_queries;
} attnresi_scoring;

static const double *attnresi_cached(const attnresi_scoring *in, size_t source) {
    return in->inv_rms ? in->inv_rms[source] : NULL;
}

static attnres_result attnresi_check_scoring(const attnresi_scoring *in, size_t n_tokens,
                                             size_t dim) {
    attnres_result result = in->sources ? ATTNRES_OK : ATTNRES_ERR_NULL;
    for (size_t j = 0; result == ATTNRES_OK && j < in->n_sources; j++) {
        const double *cached = attnresi_cached(in, j);
        result = attnresi_check_input(in->sources[j], n_tokens, dim);
        if (result == ATTNRES_OK && cached) result = attnresi_check_doubles(cached, n_tokens);
    }
    if (result == ATTNRES_OK && !in->queries) result = ATTNRES_ERR_NULL;
    for (size_t q = 0; result == ATTNRES_OK && q < in->n_queries; q++)
        result = attnresi_check_floats(in->queries[q], 1, dim);
    return result;
}

/* One call on all its tokens, taken in blocks. */
typedef struct attnresi_call {
    const attnresi_kernels *kernels;
    const attnres_desc *desc;
    attnresi_scoring in;
    attnresi_scratch scratch;
    size_t n_tokens, block; /* in all, and to an item of work */
    attnres_norm norm;      /* of one pass and of a merge */
    attnres_output o;
    float *weights;                  /* of one pass */
    const attnres_inter_args *inter; /* of two phases */
    const attnres_merge_args *merge;
} attnresi_call;

/* Tokens to an item: as many as leave their rows in a second-level cache from their scores to their
 * mixture, and no worker idle. */
static size_t attnresi_tokens_each(size_t n_tokens, size_t n_sources, size_t dim,
                                   const attnres_run *run) {
    size_t workers = attnresi_workers(run), fit = ATTNRESI_NEAR / dim / n_sources;
    size_t even = n_tokens / workers + (n_tokens % workers != 0);
    return attnresi_min(attnresi_min(even, ATTNRESI_TOKENS), fit ? fit : 1);
}

static double attnresi_scale(const attnres_desc *desc) {
    return desc->scale > 0.0f ? (double)desc->scale : 1.0;
}

static attnresi_query attnresi_query_of(const attnresi_kernels *kernels, const attnres_desc *desc,
                                        const float *c) {
    attnresi_query query;
    double largest = (double)kernels->largest(c, desc->dim);
    query.c = c;
    query.is_large = attnresi_scale(desc) * largest * sqrt((double)desc->dim) > ATTNRESI_LARGE;
    return query;
}

/* Runs item for each block of tokens. */
static attnres_result attnresi_run_call(attnresi_call *call, const attnres_run *run,
                                        attnresi_item item) {
    call->kernels = attnresi_kernels_for(run);
    call->block =
        attnresi_tokens_each(call->n_tokens, call->scratch.n_sources, call->desc->dim, run);
    attnresi_carve(&call->scratch, attnresi_workers(run), run->scratch);
    for (size_t q = 0; q < call->in.n_queries; q++)
        call->scratch.queries[q] =
            attnresi_query_of(call->kernels, call->desc, call->in.queries[q]);
    size_t blocks = call->n_tokens / call->block + (call->n_tokens % call->block != 0);
    attnresi_parallel(run, blocks, item, call);
    return ATTNRES_OK;
}

/* An item's tokens, and its worker's scratch. Returns how many tokens. */
static size_t attnresi_begin_item(const attnresi_call *call, size_t item, size_t worker,
                                  size_t *first, attnresi_work *work) {
    *first = item * call->block;
    attnresi_carve_work(&call->scratch, call->scratch.memory + worker * call->scratch.each, work);
    return attnresi_min(call->n_tokens - *first, call->block);
}

static const void *attnresi_row(attnres_input x, size_t token) {
    ptrdiff_t at = (ptrdiff_t)token * x.token_stride;
    return (const unsigned char *)x.data + at * (ptrdiff_t)attnresi_type_bytes(x.type);
}

static void *attnresi_output_row(attnres_output y, size_t token) {
    ptrdiff_t at = (ptrdiff_t)token * y.token_stride;
    return (unsigned char *)y.data + at * (ptrdiff_t)attnresi_type_bytes(y.type);
}

static attnresi_rows attnresi_rows_of(const attnres_input *sources, size_t n, size_t token,
                                      size_t dim, const void **at) {
    attnresi_rows rows;
    rows.sources = sources;
    rows.at = at;
    rows.n = n;
    rows.dim = dim;
    for (size_t j = 0; j < n; j++) at[j] = attnresi_row(sources[j], token);
    return rows;
}

static double attnresi_score_of(const attnres_desc *desc, double dot, double inv_rms) {
    /* Volatile: not to be contracted with the subtraction of the maximum that follows. */
    volatile double score = attnresi_scale(desc) * dot * inv_rms;
    return score;
}

/* The score of one row against one query; inv_rms null: not known yet. */
static double attnresi_score_row(const attnresi_kernels *kernels, const attnres_desc *desc,
                                 attnres_input x, size_t token, const void *ahead,
                                 attnresi_query query, const double *inv_rms) {
    double dot, squares;
    kernels->score(attnresi_row(x, token), x.type, desc->dim, ahead, query, &dot,
                   inv_rms ? NULL : &squares);
    return attnresi_score_of(
        desc, dot, inv_rms ? *inv_rms : attnresi_wide_inverse_rms(squares, desc->dim, desc->eps));
}

/* exp(score - max) of one query's scores; gives the maximum and returns the sum. A NaN among the
 * scores is passed over in the maximum and comes out in the sum. */
static float attnresi_exponentials(const attnresi_kernels *kernels, const double *scores, size_t n,
                                   float *weights, double *max) {
    double largest = scores[0];
    float sum = 0.0f;
    for (size_t j = 1; j < n; j++)
        if (scores[j] > largest) largest = scores[j];
    for (size_t j = 0; j < n; j++) weights[j] = (float)(scores[j] - largest);
    kernels->exp(weights, n);
    /* exp ends in a product, but by a power of two: it rounds only subnormal results, which vanish
     * beside the largest score's 1. Contracted or not, the sum is the same. */
    for (size_t j = 0; j < n; j++) sum += weights[j];
    *max = largest;
    return sum;
}

/* Mixes one token into o, then applies the norm. */
static void attnresi_mix_token(const attnresi_call *call, const attnresi_rows *rows,
                               const float *weights, size_t token, float *mixed) {
    void *o = attnresi_output_row(call->o, token);
    float *to = call->o.type == ATTNRES_F32 ? (float *)o : mixed;
    float squares = call->kernels->mix(rows, weights, to);
    if (call->norm.weight) {
        float inv_rms = attnresi_inverse_rms(squares, rows->dim, call->norm.eps);
        call->kernels->normalise(inv_rms, call->norm.weight, rows->dim, to);
    }
    if (call->o.type != ATTNRES_F32) call->kernels->from_floats(to, call->o.type, rows->dim, o);
}

/* ==== 11. One pass ============================================================================ */

ATTNRES_API attnres_result attnres_fold_query(size_t dim, const float *norm_weight,
                                              const float *query, float *folded) {
    if (dim == 0) return ATTNRES_ERR_DIMS;
    attnres_result result = attnresi_check_floats(norm_weight, 1, dim);
    if (result == ATTNRES_OK) result = attnresi_check_floats(query, 1, dim);
    if (result == ATTNRES_OK) result = attnresi_check_floats(folded, 1, dim);
    if (result != ATTNRES_OK) return result;
    for (size_t i = 0; i < dim; i++) folded[i] = norm_weight[i] * query[i];
    return ATTNRES_OK;
}

/* A call that goes through the rows of one tensor. */
typedef struct attnresi_rows_call {
    const attnresi_kernels *kernels;
    attnres_input x;
    size_t n_tokens, block, dim;
    float eps;
    double *inv_rms; /* [n_tokens] */
    float *sum;      /* [n_tokens][dim] */
} attnresi_rows_call;

/* At least one token. */
static void attnresi_run_rows_call(attnresi_rows_call *call, const attnres_run *run,
                                   attnresi_item item) {
    call->kernels = attnresi_kernels_for(run);
    call->block = attnresi_tokens_each(call->n_tokens, 1, call->dim, run);
    size_t blocks = call->n_tokens / call->block + (call->n_tokens % call->block != 0);
    attnresi_parallel(run, blocks, item, call);
}

static void attnresi_inverse_rms_item(void *context, size_t item, size_t worker) {
    const attnresi_rows_call *call = (const attnresi_rows_call *)context;
    size_t first = item * call->block;
    const attnresi_query no_query = {NULL, 0};
    (void)worker;
    for (size_t t = first; t < call->n_tokens && t - first < call->block; t++) {
        const void *row = attnresi_row(call->x, t);
        double squares;
        call->kernels->score(row, call->x.type, call->dim, row, no_query, NULL, &squares);
        call->inv_rms[t] = attnresi_wide_inverse_rms(squares, call->dim, call->eps);
    }
}

static void attnresi_inverse_rms_of_rows(attnres_input x, size_t n_tokens, size_t dim, float eps,
                                         double *inv_rms, const attnres_run *run) {
    attnresi_rows_call call;
    memset(&call, 0, sizeof call);
    call.x = x;
    call.n_tokens = n_tokens, call.dim = dim, call.eps = eps;
    call.inv_rms = inv_rms;
    attnresi_run_rows_call(&call, run, attnresi_inverse_rms_item);
}

ATTNRES_API attnres_result attnres_inverse_rms(const attnres_desc *desc, size_t n_tokens,
                                               attnres_input source, double *inv_rms,
                                               const attnres_run *run) {
    attnres_result result = attnresi_check_desc(desc);
    if (result != ATTNRES_OK || n_tokens == 0) return result;
    if (run) result = attnresi_check_run(run);
    if (result == ATTNRES_OK) result = attnresi_check_input(source, n_tokens, desc->dim);
    if (result == ATTNRES_OK) result = attnresi_check_doubles(inv_rms, n_tokens);
    if (result != ATTNRES_OK) return result;
    attnresi_inverse_rms_of_rows(source, n_tokens, desc->dim, desc->eps, inv_rms, run);
    return ATTNRES_OK;
}

ATTNRES_API size_t attnres_mix_scratch_bytes(const attnres_desc *desc, size_t n_sources,
                                             const attnres_run *run) {
    return attnresi_scratch_bytes(desc, n_sources, 1, 0, run);
}

/* A single source has the weight 1, of whatever score: a model's first layer holds a query that
 * means nothing. */
static attnresi_scoring attnresi_scoring_of_mix(const attnres_mix_args *args) {
    attnresi_scoring scoring;
    scoring.sources = args->sources;
    scoring.n_sources = args->n_sources;
    scoring.inv_rms = args->inv_rms;
    scoring.queries = &args->query;
    scoring.n_queries = args->n_sources > 1 ? 1 : 0;
    return scoring;
}

/* On ATTNRES_OK there may be no tokens, and then nothing else was looked at. */
static attnres_result attnresi_check_mix(const attnres_desc *desc, const attnres_mix_args *args,
                                         const attnres_run *run) {
    attnres_result result = attnresi_check_desc(desc);
    if (result != ATTNRES_OK) return result;
    if (!args) return ATTNRES_ERR_NULL;
    if (args->n_sources == 0) return ATTNRES_ERR_DIMS;
    if (args->n_tokens == 0) return ATTNRES_OK;
    attnresi_scoring scoring = attnresi_scoring_of_mix(args);
    result = attnresi_check_scratch(desc, args->n_sources, 1, 0, run);
    if (result == ATTNRES_OK) result = attnresi_check_scoring(&scoring, args->n_tokens, desc->dim);
    if (result == ATTNRES_OK) result = attnresi_check_norm(args->norm, desc->dim);
    if (result == ATTNRES_OK) result = attnresi_check_output(args->o, args->n_tokens, desc->dim);
    if (result == ATTNRES_OK && args->weights)
        result = attnresi_check_floats(args->weights, args->n_tokens, args->n_sources);
    return result;
}

/* The row that follows row (token, source) of an item's tokens first .. end - 1: the rows of each
 * source one after another, as they mostly lie in memory. The last is followed by itself. */
static const void *attnresi_row_after(const attnresi_call *call, size_t first, size_t end,
                                      size_t token, size_t source) {
    if (token + 1 < end)
        token++;
    else if (source + 1 < call->in.n_sources)
        token = first, source++;
    return attnresi_row(call->in.sources[source], token);
}

/* The scores of a block of tokens, [n_tokens][n_sources]. */
static void attnresi_score_block(const attnresi_call *call, size_t first, size_t n_tokens,
                                 double *scores) {
    for (size_t j = 0; j < call->in.n_sources; j++) {
        const double *cached = attnresi_cached(&call->in, j);
        for (size_t t = first; t < first + n_tokens; t++) {
            const void *ahead = attnresi_row_after(call, first, first + n_tokens, t, j);
            scores[(t - first) * call->in.n_sources + j] =
                attnresi_score_row(call->kernels, call->desc, call->in.sources[j], t, ahead,
                                   call->scratch.queries[0], cached ? cached + t : NULL);
        }
    }
}

static void attnresi_mix_item(void *context, size_t item, size_t worker) {
    const attnresi_call *call = (const attnresi_call *)context;
    attnresi_work work;
    size_t first, n = call->in.n_sources;
    size_t n_tokens = attnresi_begin_item(call, item, worker, &first, &work);
    if (n > 1) attnresi_score_block(call, first, n_tokens, work.scores);
    for (size_t t = 0; t < n_tokens; t++) {
        attnresi_rows rows =
            attnresi_rows_of(call->in.sources, n, first + t, call->desc->dim, work.rows);
        work.weights[0] = 1.0f;
        if (n > 1) {
            double max;
            float sum = attnresi_exponentials(call->kernels, work.scores + t * n, n, work.weights,
                                              &max);
            for (size_t j = 0; j < n; j++) work.weights[j] /= sum;
        }
        if (call->weights)
            memcpy(call->weights + (first + t) * n, work.weights, n * sizeof(float));
        attnresi_mix_token(call, &rows, work.weights, first + t, work.mixed);
    }
}

ATTNRES_API attnres_result attnres_mix(const attnres_desc *desc, const attnres_mix_args *args,
                                       const attnres_run *run) {
    attnresi_call call;
    attnres_result result = attnresi_check_mix(desc, args, run);
    if (result != ATTNRES_OK || args->n_tokens == 0) return result;
    memset(&call, 0, sizeof call);
    call.desc = desc;
    call.in = attnresi_scoring_of_mix(args);
    call.scratch = attnresi_scratch_for(desc->dim, args->n_sources, 1, 0);
    call.n_tokens = args->n_tokens;
    call.norm = args->norm, call.o = args->o, call.weights = args->weights;
    return attnresi_run_call(&call, run, attnresi_mix_item);
}

/* ==== 12. Two phases ========================================================================== */

ATTNRES_API size_t attnres_inter_scratch_bytes(const attnres_desc *desc, size_t n_sources,
                                               size_t n_queries, const attnres_run *run) {
    return attnresi_scratch_bytes(desc, n_sources, n_queries, 1, run);
}

static attnresi_scoring attnresi_scoring_of_inter(const attnres_inter_args *args) {
    attnresi_scoring scoring;
    scoring.sources = args->sources;
    scoring.n_sources = args->n_sources;
    scoring.inv_rms = args->inv_rms;
    scoring.queries = args->queries;
    scoring.n_queries = args->n_queries;
    return scoring;
}

static attnres_result attnresi_check_inter(const attnres_desc *desc, const attnres_inter_args *args,
                                           const attnres_run *run) {
    attnres_result result = attnresi_check_desc(desc);
    if (result != ATTNRES_OK) return result;
    if (!args) return ATTNRES_ERR_NULL;
    if (args->n_sources == 0 || args->n_queries == 0) return ATTNRES_ERR_DIMS;
    if (args->n_tokens == 0) return ATTNRES_OK;
    attnresi_scoring scoring = attnresi_scoring_of_inter(args);
    size_t rows = attnresi_product(args->n_queries, args->n_tokens);
    result = attnresi_check_scratch(desc, args->n_sources, args->n_queries, 1, run);
    if (result == ATTNRES_OK) result = attnresi_check_scoring(&scoring, args->n_tokens, desc->dim);
    if (result == ATTNRES_OK) result = attnresi_check_doubles(args->max, rows);
    if (result == ATTNRES_OK) result = attnresi_check_floats(args->sum, rows, 1);
    if (result == ATTNRES_OK) result = attnresi_check_floats(args->mix, rows, desc->dim);
    return result;
}

/* One row for dots: as it is, or made float32 at `to`. */
static const float *attnresi_float_row(const attnresi_kernels *kernels, attnres_input x,
                                       size_t token, size_t dim, float *to) {
    const void *row = attnresi_row(x, token);
    if (x.type == ATTNRES_F32) return (const float *)row;
    kernels->to_floats(row, x.type, dim, to);
    return to;
}

static double attnresi_row_inverse_rms(const attnresi_call *call, const float *row) {
    const attnresi_query no_query = {NULL, 0};
    size_t dim = call->desc->dim;
    double squares;
    call->kernels->score(row, ATTNRES_F32, dim, row, no_query, NULL, &squares);
    return attnresi_wide_inverse_rms(squares, dim, call->desc->eps);
}

/* Dot products of rows with all queries: together, and then the large ones by themselves. */
static void attnresi_dot_all(const attnresi_call *call, const float *const *rows, size_t n_rows,
                             const attnresi_work *work) {
    size_t dim = call->desc->dim, n_queries = call->in.n_queries;
    call->kernels->dots(rows, n_rows, call->in.queries, n_queries, dim, work->sums, work->dots);
    for (size_t q = 0; q < n_queries; q++)
        for (size_t r = 0; call->scratch.queries[q].is_large && r < n_rows; r++)
            call->kernels->score(rows[r], ATTNRES_F32, dim, rows[r], call->scratch.queries[q],
                                 &work->dots[r * n_queries + q], NULL);
}

/* The scores of a block of tokens, [n_tokens][n_queries][n_sources]: ATTNRESI_ROWS rows at a time,
 * of one token or several, meet all queries. */
static void attnresi_score_queries(const attnresi_call *call, size_t first, size_t n_tokens,
                                   const attnresi_work *work) {
    const attnresi_kernels *kernels = call->kernels;
    size_t dim = call->desc->dim, n_sources = call->in.n_sources, n_queries = call->in.n_queries;
    size_t n_rows = n_tokens * n_sources;
    for (size_t begin = 0; begin < n_rows; begin += ATTNRESI_ROWS) {
        size_t some = attnresi_min(n_rows - begin, ATTNRESI_ROWS);
        const float *rows[ATTNRESI_ROWS];
        double inv_rms[ATTNRESI_ROWS];
        for (size_t r = 0; r < some; r++) {
            size_t j = (begin + r) % n_sources, t = first + (begin + r) / n_sources;
            const double *cached = attnresi_cached(&call->in, j);
            rows[r] =
                attnresi_float_row(kernels, call->in.sources[j], t, dim, work->floats + r * dim);
            inv_rms[r] = cached ? cached[t] : attnresi_row_inverse_rms(call, rows[r]);
        }
        attnresi_dot_all(call, rows, some, work);
        for (size_t i = 0; i < some * n_queries; i++) {
            size_t r = i / n_queries, j = (begin + r) % n_sources, t = (begin + r) / n_sources;
            work->scores[(t * n_queries + i % n_queries) * n_sources + j] =
                attnresi_score_of(call->desc, work->dots[i], inv_rms[r]);
        }
    }
}

static void attnresi_inter_item(void *context, size_t item, size_t worker) {
    const attnresi_call *call = (const attnresi_call *)context;
    const attnres_inter_args *args = call->inter;
    attnresi_work work;
    size_t first, dim = call->desc->dim, n = args->n_sources;
    size_t n_tokens = attnresi_begin_item(call, item, worker, &first, &work);
    attnresi_score_queries(call, first, n_tokens, &work);
    for (size_t t = first; t < first + n_tokens; t++) {
        const double *scores = work.scores + (t - first) * args->n_queries * n;
        attnresi_rows rows = attnresi_rows_of(args->sources, n, t, dim, work.rows);
        for (size_t q = 0; q < args->n_queries; q++) {
            size_t row = q * args->n_tokens + t;
            args->sum[row] = attnresi_exponentials(call->kernels, scores + q * n, n,
                                                   work.weights + q * n, &args->max[row]);
        }
        call->kernels->mixes(&rows, work.weights, args->n_queries, args->mix + t * dim,
                             args->n_tokens * dim);
    }
}

ATTNRES_API attnres_result attnres_inter(const attnres_desc *desc, const attnres_inter_args *args,
                                         const attnres_run *run) {
    attnresi_call call;
    attnres_result result = attnresi_check_inter(desc, args, run);
    if (result != ATTNRES_OK || args->n_tokens == 0) return result;
    memset(&call, 0, sizeof call);
    call.desc = desc;
    call.in = attnresi_scoring_of_inter(args);
    call.scratch = attnresi_scratch_for(desc->dim, args->n_sources, args->n_queries, 1);
    call.n_tokens = args->n_tokens;
    call.inter = args;
    return attnresi_run_call(&call, run, attnresi_inter_item);
}

ATTNRES_API size_t attnres_merge_scratch_bytes(const attnres_desc *desc, const attnres_run *run) {
    return attnresi_scratch_bytes(desc, 2, 1, 0, run);
}

static attnres_result attnresi_check_merge(const attnres_desc *desc, const attnres_merge_args *args,
                                           const attnres_run *run) {
    attnres_result result = attnresi_check_desc(desc);
    if (result != ATTNRES_OK) return result;
    if (!args) return ATTNRES_ERR_NULL;
    if (args->n_tokens == 0) return ATTNRES_OK;
    result = attnresi_check_scratch(desc, 2, 1, 0, run);
    if (result == ATTNRES_OK) result = attnresi_check_doubles(args->max, args->n_tokens);
    if (result == ATTNRES_OK) result = attnresi_check_floats(args->sum, args->n_tokens, 1);
    if (result == ATTNRES_OK) result = attnresi_check_floats(args->mix, args->n_tokens, desc->dim);
    if (result == ATTNRES_OK && args->partial.data) {
        result = attnresi_check_input(args->partial, args->n_tokens, desc->dim);
        if (result == ATTNRES_OK) result = attnresi_check_floats(args->query, 1, desc->dim);
    }
    if (result == ATTNRES_OK) result = attnresi_check_norm(args->norm, desc->dim);
    if (result == ATTNRES_OK) result = attnresi_check_output(args->o, args->n_tokens, desc->dim);
    return result;
}

/* What the unnormalised mixture and the partial count for in one token's result. */
static void attnresi_merge_weights(const attnresi_call *call, size_t token, float weights[2]) {
    const attnres_merge_args *args = call->merge;
    if (!args->partial.data) {
        weights[0] = 1.0f / args->sum[token];
        return;
    }
    double score =
        attnresi_score_row(call->kernels, call->desc, args->partial, token,
                           attnresi_row(args->partial, token), call->scratch.queries[0], NULL);
    double stored = args->max[token], max = score > stored ? score : stored;
    weights[0] = (float)(stored - max);
    weights[1] = (float)(score - max);
    call->kernels->exp(weights, 2);
    float sum = attnresi_fma(weights[0], args->sum[token], weights[1]);
    weights[0] /= sum;
    weights[1] /= sum;
}

static void attnresi_merge_item(void *context, size_t item, size_t worker) {
    const attnresi_call *call = (const attnresi_call *)context;
    size_t first, dim = call->desc->dim;
    attnresi_work work;
    size_t n_tokens = attnresi_begin_item(call, item, worker, &first, &work);
    attnres_input sources[2];
    sources[0] = attnres_in_f32(call->merge->mix, (ptrdiff_t)dim);
    sources[1] = call->merge->partial;
    for (size_t t = first; t < first + n_tokens; t++) {
        attnresi_rows rows =
            attnresi_rows_of(sources, call->merge->partial.data ? 2 : 1, t, dim, work.rows);
        attnresi_merge_weights(call, t, work.weights);
        attnresi_mix_token(call, &rows, work.weights, t, work.mixed);
    }
}

ATTNRES_API attnres_result attnres_merge(const attnres_desc *desc, const attnres_merge_args *args,
                                         const attnres_run *run) {
    attnresi_call call;
    attnres_result result = attnresi_check_merge(desc, args, run);
    if (result != ATTNRES_OK || args->n_tokens == 0) return result;
    memset(&call, 0, sizeof call);
    call.desc = desc;
    call.in.queries = &args->query;
    call.in.n_queries = args->partial.data ? 1 : 0;
    call.scratch = attnresi_scratch_for(desc->dim, 2, 1, 0);
    call.n_tokens = args->n_tokens;
    call.norm = args->norm, call.o = args->o;
    call.merge = args;
    return attnresi_run_call(&call, run, attnresi_merge_item);
}

/* ==== 13. The block bank ====================================================================== */

static attnres_desc attnresi_desc_of_bank(const attnres_bank_desc *bank) {
    attnres_desc desc;
    desc.dim = bank->dim;
    desc.eps = bank->eps;
    desc.scale = bank->scale;
    return desc;
}

static attnres_result attnresi_check_bank(const attnres_bank_desc *bank) {
    if (!bank) return ATTNRES_ERR_NULL;
    if (bank->n_tokens == 0 || bank->n_layers == 0 || bank->block_size == 0)
        return ATTNRES_ERR_DIMS;
    if (bank->unit != ATTNRES_LAYERS && bank->unit != ATTNRES_SUBLAYERS) return ATTNRES_ERR_UNIT;
    if (!attnresi_product(bank->n_layers, 2)) return ATTNRES_ERR_SIZE;
    attnres_desc desc = attnresi_desc_of_bank(bank);
    return attnresi_check_desc(&desc);
}

ATTNRES_API size_t attnres_bank_capacity(const attnres_bank_desc *desc) {
    if (attnresi_check_bank(desc) != ATTNRES_OK) return 0;
    size_t units = desc->unit == ATTNRES_LAYERS ? desc->n_layers : 2 * desc->n_layers;
    return units / desc->block_size + (units % desc->block_size != 0);
}

static int attnresi_starts_block(const attnres_bank_desc *desc, size_t sublayer) {
    if (sublayer == 2 * desc->n_layers) return 0; /* the model's output */
    if (desc->unit == ATTNRES_SUBLAYERS) return sublayer % desc->block_size == 0;
    return sublayer % 2 == 0 && sublayer / 2 % desc->block_size == 0;
}

static size_t attnresi_bank_workers(const attnres_bank_desc *desc) {
    return desc->n_threads ? desc->n_threads : 1;
}

/* The partial sum has a slot of its own after the blocks, so that it can become one in place. */
static size_t attnresi_carve_bank(const attnres_bank_desc *desc, void *memory, attnres_bank *bank) {
    attnresi_arena arena = attnresi_arena_on(memory);
    size_t capacity = attnres_bank_capacity(desc), slots = capacity + 1;
    size_t slot = attnresi_product(desc->n_tokens, desc->dim);
    attnresi_scratch scratch = attnresi_scratch_for(desc->dim, slots, 1, 0);
    bank->scratch_bytes = attnresi_carve(&scratch, attnresi_bank_workers(desc), NULL);
    bank->sources = (attnres_input *)attnresi_take(&arena, slots, sizeof(attnres_input));
    bank->cached = (const double **)attnresi_take(&arena, slots, sizeof(const double *));
    bank->blocks = attnresi_take_floats(&arena, attnresi_product(slots, slot));
    bank->inv_rms = attnresi_take_doubles(&arena, attnresi_product(capacity, desc->n_tokens));
    bank->scratch = attnresi_take(&arena, bank->scratch_bytes, 1);
    return arena.used;
}

ATTNRES_API size_t attnres_bank_bytes(const attnres_bank_desc *desc) {
    attnres_bank bank;
    return attnresi_check_bank(desc) == ATTNRES_OK ? attnresi_carve_bank(desc, NULL, &bank) : 0;
}

ATTNRES_API attnres_result attnres_bank_init(attnres_bank *bank, const attnres_bank_desc *desc,
                                             void *memory, size_t bytes) {
    attnres_result result = attnresi_check_bank(desc);
    if (result != ATTNRES_OK) return result;
    if (!bank) return ATTNRES_ERR_NULL;
    size_t needed = attnres_bank_bytes(desc);
    if (needed == 0) return ATTNRES_ERR_SIZE;
    if (!memory || bytes < needed) return ATTNRES_ERR_SCRATCH;
    attnres_bank_desc copy = *desc; /* which may be the bank's own */
    memset(bank, 0, sizeof *bank);
    bank->desc = copy;
    attnresi_carve_bank(&copy, memory, bank);
    return ATTNRES_OK;
}

/* The caller's way to run, with the bank's scratch and no more workers than that is for. */
static attnres_run attnresi_bank_run(const attnres_bank *bank, const attnres_run *run) {
    attnres_run own;
    memset(&own, 0, sizeof own);
    if (run) own = *run;
    own.scratch = bank->scratch;
    own.scratch_bytes = bank->scratch_bytes;
    own.n_threads = attnresi_min(attnresi_workers(run), attnresi_bank_workers(&bank->desc));
    return own;
}

static void attnresi_bank_set_item(void *context, size_t item, size_t worker) {
    const attnresi_rows_call *call = (const attnresi_rows_call *)context;
    size_t first = item * call->block, dim = call->dim;
    (void)worker;
    for (size_t t = first; t < call->n_tokens && t - first < call->block; t++)
        call->kernels->to_floats(attnresi_row(call->x, t), call->x.type, dim, call->sum + t * dim);
}

static void attnresi_bank_add_item(void *context, size_t item, size_t worker) {
    const attnresi_rows_call *call = (const attnresi_rows_call *)context;
    size_t first = item * call->block, dim = call->dim;
    (void)worker;
    for (size_t t = first; t < call->n_tokens && t - first < call->block; t++)
        call->kernels->add(attnresi_row(call->x, t), call->x.type, dim, call->sum + t * dim);
}

/* x is added to the partial sum, or becomes it where that is empty. */
static void attnresi_bank_accumulate(attnres_bank *bank, attnres_input x, const attnres_run *run) {
    attnres_run own = attnresi_bank_run(bank, run);
    attnresi_rows_call call;
    memset(&call, 0, sizeof call);
    call.x = x;
    call.n_tokens = bank->n_tokens, call.dim = bank->desc.dim;
    call.sum = bank->partial;
    if (bank->n_tokens > 0)
        attnresi_run_rows_call(&call, &own,
                               bank->has_partial ? attnresi_bank_add_item : attnresi_bank_set_item);
    bank->has_partial = 1;
}

/* A tensor to put into the bank, and how. */
static attnres_result attnresi_check_bank_input(const attnres_bank *bank, size_t n_tokens,
                                                attnres_input x, const attnres_run *run) {
    attnres_result result = run ? attnresi_check_run(run) : ATTNRES_OK;
    if (result != ATTNRES_OK || n_tokens == 0) return result;
    return attnresi_check_input(x, n_tokens, bank->desc.dim);
}

ATTNRES_API attnres_result attnres_bank_start(attnres_bank *bank, size_t n_tokens,
                                              attnres_input embedding, const attnres_run *run) {
    if (!bank) return ATTNRES_ERR_NULL;
    if (!bank->blocks) return ATTNRES_ERR_ORDER;
    if (n_tokens > bank->desc.n_tokens) return ATTNRES_ERR_DIMS;
    size_t dim = bank->desc.dim, slots = attnres_bank_capacity(&bank->desc) + 1;
    attnres_result result = attnresi_check_bank_input(bank, n_tokens, embedding, run);
    if (result != ATTNRES_OK) return result;
    for (size_t j = 0; j < slots; j++) {
        bank->sources[j] = attnres_in_f32(bank->blocks + j * n_tokens * dim, (ptrdiff_t)dim);
        bank->cached[j] = NULL;
    }
    bank->n_tokens = n_tokens;
    bank->n_blocks = 0;
    bank->sublayer = 0;
    bank->partial = bank->blocks;
    bank->has_partial = 0;
    bank->may_read = 1;
    attnresi_bank_accumulate(bank, embedding, run);
    return ATTNRES_OK;
}

/* The partial sum becomes a block where it lies, and the next slot is to take the next sum. What
 * that slot holds does not matter: the first output is copied there, not added. */
static void attnresi_bank_store(attnres_bank *bank, const attnres_run *run) {
    double *inv_rms = bank->inv_rms + bank->n_blocks * bank->n_tokens;
    if (bank->n_tokens > 0)
        attnresi_inverse_rms_of_rows(bank->sources[bank->n_blocks], bank->n_tokens, bank->desc.dim,
                                     bank->desc.eps, inv_rms, run);
    bank->cached[bank->n_blocks] = inv_rms;
    bank->partial += bank->n_tokens * bank->desc.dim;
    bank->n_blocks++;
    bank->has_partial = 0;
}

static attnres_result attnresi_bank_mix(attnres_bank *bank, const float *query, attnres_norm norm,
                                        attnres_output o, float *weights, const attnres_run *run) {
    attnres_desc desc = attnresi_desc_of_bank(&bank->desc);
    attnres_mix_args args;
    args.n_tokens = bank->n_tokens;
    args.sources = bank->sources;
    args.n_sources = bank->n_blocks + 1;
    args.inv_rms = (const double *const *)bank->cached;
    args.query = query;
    args.norm = norm;
    args.o = o;
    args.weights = weights;
    return attnres_mix(&desc, &args, run);
}

ATTNRES_API attnres_result attnres_bank_read(attnres_bank *bank, const float *query,
                                             attnres_norm norm, attnres_output o, float *weights,
                                             const attnres_run *run) {
    if (!bank) return ATTNRES_ERR_NULL;
    if (!bank->may_read) return ATTNRES_ERR_ORDER;
    attnres_result result = run ? attnresi_check_run(run) : ATTNRES_OK;
    if (result != ATTNRES_OK) return result;
    attnres_run own = attnresi_bank_run(bank, run);
    result = attnresi_bank_mix(bank, query, norm, o, weights, &own);
    if (result != ATTNRES_OK) return result;
    if (attnresi_starts_block(&bank->desc, bank->sublayer)) attnresi_bank_store(bank, &own);
    bank->sublayer++;
    bank->may_read = 0;
    return ATTNRES_OK;
}

ATTNRES_API attnres_result attnres_bank_add(attnres_bank *bank, attnres_input delta,
                                            const attnres_run *run) {
    if (!bank) return ATTNRES_ERR_NULL;
    if (bank->sublayer == 0 || bank->sublayer > 2 * bank->desc.n_layers) return ATTNRES_ERR_ORDER;
    attnres_result result = attnresi_check_bank_input(bank, bank->n_tokens, delta, run);
    if (result != ATTNRES_OK) return result;
    attnresi_bank_accumulate(bank, delta, run);
    bank->may_read = 1;
    return ATTNRES_OK;
}

/* ==== 14. Instruction sets ====================================================================
 *
 * Kernels are written once, below, in terms of wide values of ATTNRESI_LANES floats: one register
 * of AVX-512, two of AVX2, four of NEON; and of parts, a register of float64 each. This section
 * spells the operations on them for each set; the file then includes itself once for each, and the
 * last section becomes that set's kernels. */

/* Without optimisation each wide value lives on the stack, and a kernel takes 100 KiB of it. */
#if defined(__GNUC__) && !defined(__OPTIMIZE__) && !defined(ATTNRES_NO_SIMD)
#define ATTNRES_NO_SIMD
#endif
#if !defined(ATTNRES_NO_SIMD) && defined(__GNUC__) && defined(__x86_64__)
#define ATTNRESI_X86 1
#elif !defined(ATTNRES_NO_SIMD) && defined(_MSC_VER) && defined(_M_X64)
#define ATTNRESI_X86 1
#else
#define ATTNRESI_X86 0
#endif
#if !defined(ATTNRES_NO_SIMD) && defined(__aarch64__) && defined(__ARM_NEON)
#define ATTNRESI_NEON 1
#else
#define ATTNRESI_NEON 0
#endif

#if defined(_MSC_VER) && !defined(__clang__)
#define ATTNRESI_INLINE static __forceinline
#define ATTNRESI_TARGET(features)
#else
#define ATTNRESI_INLINE static inline __attribute__((always_inline))
#define ATTNRESI_TARGET(features) __attribute__((target(features)))
#endif

/* GCC's headers for AVX-512 begin with values that are set to themselves, and in C++ GCC warns of
 * that wherever they are inlined (GCC bug 105593). */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

/* Asks for memory that will be read soon, by an address that need not be valid. */
#if defined(__GNUC__)
#define ATTNRESI_FETCH(address) __builtin_prefetch((const void *)(address), 0, 3)
#elif ATTNRESI_X86
#define ATTNRESI_FETCH(address) _mm_prefetch((const char *)(address), _MM_HINT_T0)
#else
#define ATTNRESI_FETCH(address) ((void)(address))
#endif

#if ATTNRESI_X86
#include <immintrin.h>
#if defined(_MSC_VER) && defined(__clang__)
/* clang-cl's <immintrin.h> leaves out the sets that the command line does not name. */
#include <smmintrin.h>

#include <avxintrin.h>

#include <avx2intrin.h>
#include <avx512fintrin.h>
#include <f16cintrin.h>
#include <fmaintrin.h>
#endif
#if defined(__GNUC__)
#include <cpuid.h>
#endif

/* What a set needs of the processor: the one list that both its target attribute and its test at
 * run time come from. */
#define ATTNRESI_AVX2_NEEDS(first, next) first(avx2) next(fma) next(f16c)
#define ATTNRESI_AVX512_NEEDS(first, next) first(avx512f) next(avx2) next(fma) next(f16c)
#define ATTNRESI_FIRST_NAME(feature) #feature
#define ATTNRESI_NEXT_NAME(feature) "," #feature
#define ATTNRESI_FIRST_BIT(feature) ATTNRESI_CPU_##feature
#define ATTNRESI_NEXT_BIT(feature) | ATTNRESI_CPU_##feature
enum {
    ATTNRESI_CPU_avx2 = 1,
    ATTNRESI_CPU_fma = 2,
    ATTNRESI_CPU_f16c = 4,
    ATTNRESI_CPU_avx512f = 8
};

static void attnresi_cpuid(unsigned leaf, unsigned out[4]) {
#if defined(__GNUC__)
    out[0] = out[1] = out[2] = out[3] = 0;
    __get_cpuid_count(leaf, 0, &out[0], &out[1], &out[2], &out[3]);
#else
    int registers[4] = {0, 0, 0, 0};
    __cpuid(registers, 0);
    if ((unsigned)registers[0] >= leaf) __cpuidex(registers, (int)leaf, 0);
    memcpy(out, registers, sizeof registers);
#endif
}

/* Which registers the operating system saves. Only valid if CPUID says OSXSAVE. */
static unsigned attnresi_xgetbv(void) {
#if defined(__GNUC__)
    unsigned low, high;
    __asm__ volatile(".byte 0x0f, 0x01, 0xd0" : "=a"(low), "=d"(high) : "c"(0));
    return low;
#else
    return (unsigned)_xgetbv(0);
#endif
}

static unsigned attnresi_cpu_features(void) {
    unsigned one[4], seven[4], features = 0;
    attnresi_cpuid(1, one);
    attnresi_cpuid(7, seven);
    unsigned saved = one[2] >> 27 & 1u ? attnresi_xgetbv() : 0;
    if ((saved & 0x6u) == 0x6u) {
        features |= one[2] >> 12 & 1u ? ATTNRESI_CPU_fma : 0;
        features |= one[2] >> 29 & 1u ? ATTNRESI_CPU_f16c : 0;
        features |= seven[1] >> 5 & 1u ? ATTNRESI_CPU_avx2 : 0;
    }
    if ((saved & 0xe6u) == 0xe6u) features |= seven[1] >> 16 & 1u ? ATTNRESI_CPU_avx512f : 0;
    return features;
}

/* ---- AVX2 with FMA and F16C ---- */

#define ATTNRESI_AVX2                                                                              \
    ATTNRESI_INLINE ATTNRESI_TARGET(ATTNRESI_AVX2_NEEDS(ATTNRESI_FIRST_NAME, ATTNRESI_NEXT_NAME))
typedef struct attnresi_wide_avx2 {
    __m256 a, b;
} attnresi_wide_avx2;

#define ATTNRESI_AVX2_OF_2(name, intrinsic)                                                        \
    ATTNRESI_AVX2 attnresi_wide_avx2 attnresi_##name##_avx2(attnresi_wide_avx2 x,                  \
                                                            attnresi_wide_avx2 y) {                \
        x.a = intrinsic(x.a, y.a);                                                                 \
        x.b = intrinsic(x.b, y.b);                                                                 \
        return x;                                                                                  \
    }
ATTNRESI_AVX2_OF_2(add, _mm256_add_ps)
ATTNRESI_AVX2_OF_2(sub, _mm256_sub_ps)
ATTNRESI_AVX2_OF_2(mul, _mm256_mul_ps)
ATTNRESI_AVX2_OF_2(min, _mm256_min_ps) /* of these two, y where either is NaN */
ATTNRESI_AVX2_OF_2(max, _mm256_max_ps)

ATTNRESI_AVX2 attnresi_wide_avx2 attnresi_set_avx2(float x) {
    attnresi_wide_avx2 y;
    y.a = y.b = _mm256_set1_ps(x);
    return y;
}
ATTNRESI_AVX2 attnresi_wide_avx2 attnresi_read_avx2(const float *x) {
    attnresi_wide_avx2 y;
    y.a = _mm256_loadu_ps(x);
    y.b = _mm256_loadu_ps(x + 8);
    return y;
}
ATTNRESI_AVX2 void attnresi_write_avx2(float *to, attnresi_wide_avx2 x) {
    _mm256_storeu_ps(to, x.a);
    _mm256_storeu_ps(to + 8, x.b);
}
/* x y + z, rounded once. */
ATTNRESI_AVX2 attnresi_wide_avx2 attnresi_fma_avx2(attnresi_wide_avx2 x, attnresi_wide_avx2 y,
                                                   attnresi_wide_avx2 z) {
    z.a = _mm256_fmadd_ps(x.a, y.a, z.a);
    z.b = _mm256_fmadd_ps(x.b, y.b, z.b);
    return z;
}
ATTNRESI_AVX2 __m256 attnresi_half_scale_avx2(__m256 y, __m256 n) {
    __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1);
    __m256i rest = _mm256_sub_epi32(whole, half), bias = _mm256_set1_epi32(127);
    y = _mm256_mul_ps(y, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23)));
    return _mm256_mul_ps(y,
                         _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23)));
}
/* y 2^n for whole n, in two factors as attnresi_exp has it. */
ATTNRESI_AVX2 attnresi_wide_avx2 attnresi_scale_avx2(attnresi_wide_avx2 y, attnresi_wide_avx2 n) {
    y.a = attnresi_half_scale_avx2(y.a, n.a);
    y.b = attnresi_half_scale_avx2(y.b, n.b);
    return y;
}
ATTNRESI_AVX2 attnresi_wide_avx2 attnresi_read_f16_avx2(const uint16_t *x) {
    attnresi_wide_avx2 y;
    y.a = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)x));
    y.b = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(x + 8)));
    return y;
}
ATTNRESI_AVX2 void attnresi_write_f16_avx2(uint16_t *to, attnresi_wide_avx2 x) {
    _mm_storeu_si128((__m128i *)(void *)to, _mm256_cvtps_ph(x.a, 0));
    _mm_storeu_si128((__m128i *)(void *)(to + 8), _mm256_cvtps_ph(x.b, 0));
}
ATTNRESI_AVX2 attnresi_wide_avx2 attnresi_read_bf16_avx2(const uint16_t *x) {
    attnresi_wide_avx2 y;
    __m128i a = _mm_loadu_si128((const __m128i *)(const void *)x);
    __m128i b = _mm_loadu_si128((const __m128i *)(const void *)(x + 8));
    y.a = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(a), 16));
    y.b = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(b), 16));
    return y;
}
ATTNRESI_AVX2 __m256i attnresi_bf16_bits_avx2(__m256 x) {
    __m256i bits = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    __m256 is_nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    rounded = _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(is_nan));
    return _mm256_srli_epi32(rounded, 16);
}
ATTNRESI_AVX2 void attnresi_write_bf16_avx2(uint16_t *to, attnresi_wide_avx2 x) {
    __m256i both = _mm256_packus_epi32(attnresi_bf16_bits_avx2(x.a), attnresi_bf16_bits_avx2(x.b));
    _mm256_storeu_si256((__m256i *)(void *)to, _mm256_permute4x64_epi64(both, 0xd8));
}

typedef __m256d attnresi_part_avx2;

ATTNRESI_AVX2 __m256d attnresi_zero_part_avx2(void) {
    return _mm256_setzero_pd();
}
ATTNRESI_AVX2 void attnresi_write_part_avx2(double *to, __m256d x) {
    _mm256_storeu_pd(to, x);
}
ATTNRESI_AVX2 __m256d attnresi_fma_part_avx2(__m256d x, __m256d y, __m256d z) {
    return _mm256_fmadd_pd(x, y, z);
}
ATTNRESI_AVX2 __m256d attnresi_part_of_avx2(attnresi_wide_avx2 x, int part) {
    __m256 half = part < 2 ? x.a : x.b;
    return _mm256_cvtps_pd(part % 2 ? _mm256_extractf128_ps(half, 1)
                                    : _mm256_castps256_ps128(half));
}

/* attnresi_add_run. */
ATTNRESI_AVX2 void attnresi_add_run_avx2(double *sums, attnresi_wide_avx2 x) {
    __m256 both = _mm256_add_ps(x.a, x.b);
    __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(both));
    __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(both, 1));
    _mm256_storeu_pd(sums, _mm256_add_pd(_mm256_loadu_pd(sums), low));
    _mm256_storeu_pd(sums + 4, _mm256_add_pd(_mm256_loadu_pd(sums + 4), high));
}

/* ---- AVX-512 ---- */

#define ATTNRESI_AVX512                                                                            \
    ATTNRESI_INLINE ATTNRESI_TARGET(ATTNRESI_AVX512_NEEDS(ATTNRESI_FIRST_NAME, ATTNRESI_NEXT_NAME))
typedef __m512 attnresi_wide_avx512;

ATTNRESI_AVX512 __m512 attnresi_set_avx512(float x) {
    return _mm512_set1_ps(x);
}
ATTNRESI_AVX512 __m512 attnresi_read_avx512(const float *x) {
    return _mm512_loadu_ps(x);
}
ATTNRESI_AVX512 void attnresi_write_avx512(float *to, __m512 x) {
    _mm512_storeu_ps(to, x);
}
ATTNRESI_AVX512 __m512 attnresi_add_avx512(__m512 x, __m512 y) {
    return _mm512_add_ps(x, y);
}
ATTNRESI_AVX512 __m512 attnresi_sub_avx512(__m512 x, __m512 y) {
    return _mm512_sub_ps(x, y);
}
ATTNRESI_AVX512 __m512 attnresi_mul_avx512(__m512 x, __m512 y) {
    return _mm512_mul_ps(x, y);
}
ATTNRESI_AVX512 __m512 attnresi_min_avx512(__m512 x, __m512 y) {
    return _mm512_min_ps(x, y);
}
ATTNRESI_AVX512 __m512 attnresi_max_avx512(__m512 x, __m512 y) {
    return _mm512_max_ps(x, y);
}
ATTNRESI_AVX512 __m512 attnresi_fma_avx512(__m512 x, __m512 y, __m512 z) {
    return _mm512_fmadd_ps(x, y, z);
}
ATTNRESI_AVX512 __m512 attnresi_scale_avx512(__m512 y, __m512 n) {
    __m512i whole = _mm512_cvtps_epi32(n), half = _mm512_srai_epi32(whole, 1);
    __m512i rest = _mm512_sub_epi32(whole, half), bias = _mm512_set1_epi32(127);
    y = _mm512_mul_ps(y, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(half, bias), 23)));
    return _mm512_mul_ps(y,
                         _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(rest, bias), 23)));
}
ATTNRESI_AVX512 __m512 attnresi_read_f16_avx512(const uint16_t *x) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)x));
}
ATTNRESI_AVX512 void attnresi_write_f16_avx512(uint16_t *to, __m512 x) {
    _mm256_storeu_si256((__m256i *)(void *)to, _mm512_maskz_cvtps_ph((__mmask16)0xffff, x, 0));
}
ATTNRESI_AVX512 __m512 attnresi_read_bf16_avx512(const uint16_t *x) {
    __m256i half = _mm256_loadu_si256((const __m256i *)(const void *)x);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
ATTNRESI_AVX512 void attnresi_write_bf16_avx512(uint16_t *to, __m512 x) {
    __m512i bits = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x400000));
    _mm256_storeu_si256((__m256i *)(void *)to,
                        _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}

typedef __m512d attnresi_part_avx512;

ATTNRESI_AVX512 __m512d attnresi_zero_part_avx512(void) {
    return _mm512_setzero_pd();
}
ATTNRESI_AVX512 void attnresi_write_part_avx512(double *to, __m512d x) {
    _mm512_storeu_pd(to, x);
}
ATTNRESI_AVX512 __m512d attnresi_fma_part_avx512(__m512d x, __m512d y, __m512d z) {
    return _mm512_fmadd_pd(x, y, z);
}
ATTNRESI_AVX512 __m512d attnresi_part_of_avx512(__m512 x, int part) {
    __m512d wide = _mm512_castps_pd(x); /* whose upper half F alone can take out */
    return _mm512_cvtps_pd(part ? _mm256_castpd_ps(_mm512_extractf64x4_pd(wide, 1))
                                : _mm512_castps512_ps256(x));
}
ATTNRESI_AVX512 void attnresi_add_run_avx512(double *sums, __m512 x) {
    __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1));
    __m256 both = _mm256_add_ps(_mm512_castps512_ps256(x), high);
    _mm512_storeu_pd(sums, _mm512_add_pd(_mm512_loadu_pd(sums), _mm512_cvtps_pd(both)));
}
#endif /* ATTNRESI_X86 */

#if ATTNRESI_NEON
#include <arm_neon.h>

/* ---- NEON: every 64-bit ARM has it ---- */

typedef float32x4x4_t attnresi_wide_neon;
#define ATTNRESI_EACH4 for (int i = 0; i < 4; i++)

#define ATTNRESI_NEON_OF_2(name, intrinsic)                                                        \
    ATTNRESI_INLINE attnresi_wide_neon attnresi_##name##_neon(attnresi_wide_neon x,                \
                                                              attnresi_wide_neon y) {              \
        ATTNRESI_EACH4 x.val[i] = intrinsic(x.val[i], y.val[i]);                                   \
        return x;                                                                                  \
    }
ATTNRESI_NEON_OF_2(add, vaddq_f32)
ATTNRESI_NEON_OF_2(sub, vsubq_f32)
ATTNRESI_NEON_OF_2(mul, vmulq_f32)
ATTNRESI_NEON_OF_2(min, vminq_f32) /* of these two, NaN where either is */
ATTNRESI_NEON_OF_2(max, vmaxq_f32)

ATTNRESI_INLINE attnresi_wide_neon attnresi_set_neon(float x) {
    attnresi_wide_neon y;
    ATTNRESI_EACH4 y.val[i] = vdupq_n_f32(x);
    return y;
}
ATTNRESI_INLINE attnresi_wide_neon attnresi_read_neon(const float *x) {
    attnresi_wide_neon y;
    ATTNRESI_EACH4 y.val[i] = vld1q_f32(x + 4 * i);
    return y;
}
ATTNRESI_INLINE void attnresi_write_neon(float *to, attnresi_wide_neon x) {
    ATTNRESI_EACH4 vst1q_f32(to + 4 * i, x.val[i]);
}
ATTNRESI_INLINE attnresi_wide_neon attnresi_fma_neon(attnresi_wide_neon x, attnresi_wide_neon y,
                                                     attnresi_wide_neon z) {
    ATTNRESI_EACH4 z.val[i] = vfmaq_f32(z.val[i], x.val[i], y.val[i]);
    return z;
}
ATTNRESI_INLINE attnresi_wide_neon attnresi_scale_neon(attnresi_wide_neon y, attnresi_wide_neon n) {
    ATTNRESI_EACH4 {
        int32x4_t whole = vcvtnq_s32_f32(n.val[i]), half = vshrq_n_s32(whole, 1);
        int32x4_t rest = vsubq_s32(whole, half), bias = vdupq_n_s32(127);
        int32x4_t first = vshlq_n_s32(vaddq_s32(half, bias), 23);
        int32x4_t second = vshlq_n_s32(vaddq_s32(rest, bias), 23);
        y.val[i] = vmulq_f32(y.val[i], vreinterpretq_f32_s32(first));
        y.val[i] = vmulq_f32(y.val[i], vreinterpretq_f32_s32(second));
    }
    return y;
}
ATTNRESI_INLINE attnresi_wide_neon attnresi_read_f16_neon(const uint16_t *x) {
    attnresi_wide_neon y;
    ATTNRESI_EACH4 y.val[i] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(x + 4 * i)));
    return y;
}
ATTNRESI_INLINE void attnresi_write_f16_neon(uint16_t *to, attnresi_wide_neon x) {
    ATTNRESI_EACH4 vst1_u16(to + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(x.val[i])));
}
ATTNRESI_INLINE attnresi_wide_neon attnresi_read_bf16_neon(const uint16_t *x) {
    attnresi_wide_neon y;
    ATTNRESI_EACH4 y.val[i] =
        vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vld1_u16(x + 4 * i)), 16));
    return y;
}
ATTNRESI_INLINE void attnresi_write_bf16_neon(uint16_t *to, attnresi_wide_neon x) {
    ATTNRESI_EACH4 {
        uint32x4_t bits = vreinterpretq_u32_f32(x.val[i]);
        uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
        uint32x4_t rounded = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
        uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
        rounded = vbslq_u32(vceqq_f32(x.val[i], x.val[i]), rounded, quiet);
        vst1_u16(to + 4 * i, vshrn_n_u32(rounded, 16));
    }
}

typedef float64x2_t attnresi_part_neon;

ATTNRESI_INLINE float64x2_t attnresi_zero_part_neon(void) {
    return vdupq_n_f64(0);
}
ATTNRESI_INLINE void attnresi_write_part_neon(double *to, float64x2_t x) {
    vst1q_f64(to, x);
}
ATTNRESI_INLINE float64x2_t attnresi_fma_part_neon(float64x2_t x, float64x2_t y, float64x2_t z) {
    return vfmaq_f64(z, x, y);
}
ATTNRESI_INLINE float64x2_t attnresi_part_of_neon(attnresi_wide_neon x, int part) {
    float32x4_t pair = x.val[part / 2];
    return part % 2 ? vcvt_high_f64_f32(pair) : vcvt_f64_f32(vget_low_f32(pair));
}
ATTNRESI_INLINE void attnresi_add_run_neon(double *sums, attnresi_wide_neon x) {
    for (int i = 0; i < 2; i++) {
        float32x4_t both = vaddq_f32(x.val[i], x.val[i + 2]);
        double *to = sums + 4 * i;
        vst1q_f64(to, vaddq_f64(vld1q_f64(to), vcvt_f64_f32(vget_low_f32(both))));
        vst1q_f64(to + 2, vaddq_f64(vld1q_f64(to + 2), vcvt_high_f64_f32(both)));
    }
}
#endif /* ATTNRESI_NEON */

/* ==== 15. Dispatch ============================================================================ */

/* The file includes itself by its own name, from its own directory. */
#if ATTNRESI_X86
#define ATTNRESI_PASS avx2
#define ATTNRESI_ISA ATTNRES_ISA_AVX2
#define ATTNRESI_KERNEL                                                                            \
    static ATTNRESI_TARGET(ATTNRESI_AVX2_NEEDS(ATTNRESI_FIRST_NAME, ATTNRESI_NEXT_NAME))
#define ATTNRESI_KERNEL_INLINE ATTNRESI_AVX2
#define ATTNRESI_TALL 2
#define ATTNRESI_PARTS 4
#include "attnres.h"
#undef ATTNRESI_PASS
#undef ATTNRESI_ISA
#undef ATTNRESI_KERNEL
#undef ATTNRESI_KERNEL_INLINE
#undef ATTNRESI_TALL
#undef ATTNRESI_PARTS
#if !defined(ATTNRES_NO_AVX512)
#define ATTNRESI_PASS avx512
#define ATTNRESI_ISA ATTNRES_ISA_AVX512
#define ATTNRESI_KERNEL                                                                            \
    static ATTNRESI_TARGET(ATTNRESI_AVX512_NEEDS(ATTNRESI_FIRST_NAME, ATTNRESI_NEXT_NAME))
#define ATTNRESI_KERNEL_INLINE ATTNRESI_AVX512
#define ATTNRESI_TALL 8
#define ATTNRESI_PARTS 2
#include "attnres.h"
#undef ATTNRESI_PASS
#undef ATTNRESI_ISA
#undef ATTNRESI_KERNEL
#undef ATTNRESI_KERNEL_INLINE
#undef ATTNRESI_TALL
#undef ATTNRESI_PARTS
#endif
#elif ATTNRESI_NEON
#define ATTNRESI_PASS neon
#define ATTNRESI_ISA ATTNRES_ISA_NEON
#define ATTNRESI_KERNEL static
#define ATTNRESI_KERNEL_INLINE ATTNRESI_INLINE
#define ATTNRESI_TALL 2
#define ATTNRESI_PARTS 8
#include "attnres.h"
#undef ATTNRESI_PASS
#undef ATTNRESI_ISA
#undef ATTNRESI_KERNEL
#undef ATTNRESI_KERNEL_INLINE
#undef ATTNRESI_TALL
#undef ATTNRESI_PARTS
#endif

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

static const attnresi_kernels attnresi_kernels_scalar = {
    ATTNRES_ISA_SCALAR, attnresi_to_floats, attnresi_from_floats, attnresi_add,
    attnresi_exp_row,   attnresi_largest,   attnresi_score,       attnresi_dots,
    attnresi_mix,       attnresi_mixes,     attnresi_normalise,
};

/* The sets that this machine has, best first. */
static const attnresi_kernels *attnresi_find_best(void) {
#if ATTNRESI_X86
    unsigned features = attnresi_cpu_features();
    unsigned avx2 = ATTNRESI_AVX2_NEEDS(ATTNRESI_FIRST_BIT, ATTNRESI_NEXT_BIT);
#if !defined(ATTNRES_NO_AVX512)
    unsigned avx512 = ATTNRESI_AVX512_NEEDS(ATTNRESI_FIRST_BIT, ATTNRESI_NEXT_BIT);
    if ((features & avx512) == avx512) return &attnresi_kernels_avx512;
#endif
    if ((features & avx2) == avx2) return &attnresi_kernels_avx2;
#elif ATTNRESI_NEON
    return &attnresi_kernels_neon;
#endif
    return &attnresi_kernels_scalar;
}

/* Found once. Two threads that come first at the same time find the same. */
static const attnresi_kernels *attnresi_best(void) {
    static const attnresi_kernels *best;
#if defined(__GNUC__) || defined(__clang__)
    const attnresi_kernels *found = __atomic_load_n(&best, __ATOMIC_RELAXED);
    if (found) return found;
    found = attnresi_find_best();
    __atomic_store_n(&best, found, __ATOMIC_RELAXED);
    return found;
#else
    const attnresi_kernels *volatile *place = (const attnresi_kernels *volatile *)&best;
    if (!*place) *place = attnresi_find_best();
    return *place;
#endif
}

static const attnresi_kernels *attnresi_kernels_of(attnres_isa isa) {
    const attnresi_kernels *best = attnresi_best();
    if (isa == ATTNRES_ISA_AUTO || isa == best->isa) return best;
    if (isa == ATTNRES_ISA_SCALAR) return &attnresi_kernels_scalar;
#if ATTNRESI_X86
    if (isa == ATTNRES_ISA_AVX2 && best->isa == ATTNRES_ISA_AVX512) return &attnresi_kernels_avx2;
#endif
    return NULL;
}

ATTNRES_API attnres_isa attnres_isa_best(void) {
    return attnresi_best()->isa;
}

ATTNRES_API int attnres_isa_is_available(attnres_isa isa) {
    return attnresi_kernels_of(isa) != NULL;
}

ATTNRES_API const char *attnres_isa_name(attnres_isa isa) {
    static const char *const names[] = {"auto", "scalar", "avx2", "avx512", "neon"};
    return (size_t)isa < sizeof names / sizeof names[0] ? names[(size_t)isa] : "unknown";
}

#ifdef __cplusplus
}
#endif
#endif /* ATTNRES_IMPLEMENTATION */

/* ==== 16. Kernels =============================================================================
 *
 * Compiled once for each instruction set, from within the implementation above, with
 *     ATTNRESI_PASS     the suffix of the set's names: avx2, avx512, neon
 *     ATTNRESI_KERNEL   linkage and target of its functions
 *     ATTNRESI_TALL     rows of a register block of dot products, with 3 queries: 2 or 8
 *     ATTNRESI_PARTS    registers that 16 lanes of float64 take: 2, 4 or 8
 * Each function computes what the plain one of its name does, to the last bit. */
#ifdef ATTNRESI_PASS

#define ATTNRESI_JOIN_(a, b) a##_##b
#define ATTNRESI_JOIN(a, b) ATTNRESI_JOIN_(a, b)
#define ATTNRESI_(name) ATTNRESI_JOIN(attnresi_##name, ATTNRESI_PASS)
#define ATTNRESI_WIDE ATTNRESI_(wide)
#define ATTNRESI_PART ATTNRESI_(part)
#define ATTNRESI_PART_LANES (ATTNRESI_LANES / ATTNRESI_PARTS)

#if ATTNRESI_PARTS == 2
#define ATTNRESI_EACH_PART(X) X(0) X(1)
#elif ATTNRESI_PARTS == 4
#define ATTNRESI_EACH_PART(X) X(0) X(1) X(2) X(3)
#else
#define ATTNRESI_EACH_PART(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)
#endif

/* Elements i .. i + 15 of a row, or the last n with zeros after them. */
ATTNRESI_KERNEL_INLINE ATTNRESI_WIDE ATTNRESI_(read_as)(const void *row, attnres_type type,
                                                        size_t i) {
    if (type == ATTNRES_F32) return ATTNRESI_(read)((const float *)row + i);
    if (type == ATTNRES_F16) return ATTNRESI_(read_f16)((const uint16_t *)row + i);
    return ATTNRESI_(read_bf16)((const uint16_t *)row + i);
}
ATTNRESI_KERNEL_INLINE ATTNRESI_WIDE ATTNRESI_(read_some)(const void *row, attnres_type type,
                                                          size_t i, size_t n) {
    float last[ATTNRESI_LANES];
    if (n >= ATTNRESI_LANES) return ATTNRESI_(read_as)(row, type, i);
    attnresi_clear_lanes(last);
    attnresi_to_floats(attnresi_element(row, type, i), type, n, last);
    return ATTNRESI_(read)(last);
}
ATTNRESI_KERNEL_INLINE void ATTNRESI_(write_some)(float *to, ATTNRESI_WIDE x, size_t n) {
    float last[ATTNRESI_LANES];
    if (n >= ATTNRESI_LANES) {
        ATTNRESI_(write)(to, x);
        return;
    }
    ATTNRESI_(write)(last, x);
    memcpy(to, last, n * sizeof(float));
}
ATTNRESI_KERNEL_INLINE float ATTNRESI_(sum)(ATTNRESI_WIDE x) {
    float lane[ATTNRESI_LANES];
    ATTNRESI_(write)(lane, x);
    return attnresi_add_lanes(lane);
}

ATTNRESI_KERNEL void ATTNRESI_(to_floats)(const void *from, attnres_type type, size_t n,
                                          float *to) {
    const uint16_t *half = (const uint16_t *)from;
    size_t i = 0;
    if (type == ATTNRES_F16)
        for (; n - i >= ATTNRESI_LANES; i += ATTNRESI_LANES)
            ATTNRESI_(write)(to + i, ATTNRESI_(read_f16)(half + i));
    else if (type == ATTNRES_BF16)
        for (; n - i >= ATTNRESI_LANES; i += ATTNRESI_LANES)
            ATTNRESI_(write)(to + i, ATTNRESI_(read_bf16)(half + i));
    attnresi_to_floats(attnresi_element(from, type, i), type, n - i, to + i);
}

ATTNRESI_KERNEL void ATTNRESI_(from_floats)(const float *from, attnres_type type, size_t n,
                                            void *to) {
    uint16_t *half = (uint16_t *)to;
    size_t i = 0;
    if (type == ATTNRES_F16)
        for (; n - i >= ATTNRESI_LANES; i += ATTNRESI_LANES)
            ATTNRESI_(write_f16)(half + i, ATTNRESI_(read)(from + i));
    else
        for (; n - i >= ATTNRESI_LANES; i += ATTNRESI_LANES)
            ATTNRESI_(write_bf16)(half + i, ATTNRESI_(read)(from + i));
    attnresi_from_floats(from + i, type, n - i,
                         (unsigned char *)to + i * attnresi_type_bytes(type));
}

ATTNRESI_KERNEL void ATTNRESI_(add_row)(const void *row, attnres_type type, size_t n, float *sum) {
    for (size_t i = 0; i < n; i += ATTNRESI_LANES) {
        ATTNRESI_WIDE x = ATTNRESI_(read_some)(row, type, i, n - i);
        ATTNRESI_WIDE y = ATTNRESI_(read_some)(sum, ATTNRES_F32, i, n - i);
        ATTNRESI_(write_some)(sum + i, ATTNRESI_(add)(y, x), n - i);
    }
}

/* attnresi_exp. The bounds only keep the exponent in range: both ends come out as 0 and infinity.
 */
ATTNRESI_KERNEL_INLINE ATTNRESI_WIDE ATTNRESI_(exp)(ATTNRESI_WIDE x) {
    x = ATTNRESI_(min)(ATTNRESI_(set)(88.8f), ATTNRESI_(max)(ATTNRESI_(set)(-104.0f), x));
    ATTNRESI_WIDE magic = ATTNRESI_(set)(12582912.0f);
    ATTNRESI_WIDE n = ATTNRESI_(sub)(ATTNRESI_(fma)(x, ATTNRESI_(set)(1.44269502f), magic), magic);
    ATTNRESI_WIDE r = ATTNRESI_(fma)(n, ATTNRESI_(set)(-0.693147182f), x);
    r = ATTNRESI_(fma)(n, ATTNRESI_(set)(1.90465421e-9f), r);
    ATTNRESI_WIDE p = ATTNRESI_(set)(0.00139262504f);
    p = ATTNRESI_(fma)(p, r, ATTNRESI_(set)(0.00836323295f));
    p = ATTNRESI_(fma)(p, r, ATTNRESI_(set)(0.0416665524f));
    p = ATTNRESI_(fma)(p, r, ATTNRESI_(set)(0.166665763f));
    p = ATTNRESI_(fma)(p, r, ATTNRESI_(set)(0.5f));
    return ATTNRESI_(scale)(
        ATTNRESI_(add)(ATTNRESI_(fma)(ATTNRESI_(mul)(p, r), r, r), ATTNRESI_(set)(1.0f)), n);
}

ATTNRESI_KERNEL void ATTNRESI_(exp_row)(float *x, size_t n) {
    for (size_t i = 0; i < n; i += ATTNRESI_LANES)
        ATTNRESI_(write_some)(
            x + i, ATTNRESI_(exp)(ATTNRESI_(read_some)(x, ATTNRES_F32, i, n - i)), n - i);
}

/* ---- Scores ---- */

/* The largest lane, by two wide values that take turns. */
ATTNRESI_KERNEL float ATTNRESI_(largest)(const float *x, size_t n) {
    ATTNRESI_WIDE zero = ATTNRESI_(set)(0.0f), a = zero, b = zero;
    float lane[ATTNRESI_LANES], largest = 0.0f;
    size_t i = 0;
    for (; n - i >= ATTNRESI_PAIR; i += ATTNRESI_PAIR) {
        ATTNRESI_WIDE y = ATTNRESI_(read)(x + i), z = ATTNRESI_(read)(x + i + ATTNRESI_LANES);
        a = ATTNRESI_(max)(a, ATTNRESI_(max)(y, ATTNRESI_(sub)(zero, y)));
        b = ATTNRESI_(max)(b, ATTNRESI_(max)(z, ATTNRESI_(sub)(zero, z)));
    }
    ATTNRESI_(write)(lane, ATTNRESI_(max)(a, b));
    for (size_t l = 0; l < ATTNRESI_LANES; l++)
        if (lane[l] > largest) largest = lane[l];
    float rest = attnresi_largest(x + i, n - i);
    return rest > largest ? rest : largest;
}

#define ATTNRESI_ZERO(p) ATTNRESI_PART dot##p = ATTNRESI_(zero_part)(), own##p = dot##p;
#define ATTNRESI_PART_SCORE(p)                                                                     \
    {                                                                                              \
        ATTNRESI_PART v = ATTNRESI_(part_of)(x, p);                                                \
        if (wide) dot##p = ATTNRESI_(fma_part)(v, ATTNRESI_(part_of)(c, p), dot##p);               \
        if (squares) own##p = ATTNRESI_(fma_part)(v, v, own##p);                                   \
    }
#define ATTNRESI_PUT_DOT(p) ATTNRESI_(write_part)(lanes + (p) * ATTNRESI_PART_LANES, dot##p);
#define ATTNRESI_PUT_OWN(p) ATTNRESI_(write_part)(lanes + (p) * ATTNRESI_PART_LANES, own##p);

/* The next wide values of the row and of the query, at i, to the sums. */
#define ATTNRESI_SCORE(row_, query_, run)                                                          \
    {                                                                                              \
        ATTNRESI_WIDE x = row_, c = dot ? query_ : x;                                              \
        ATTNRESI_FETCH((uintptr_t)ahead + i * size);                                               \
        if (dot && !wide) run = ATTNRESI_(fma)(x, c, run);                                         \
        if (wide || squares) {                                                                     \
            ATTNRESI_EACH_PART(ATTNRESI_PART_SCORE)                                                \
        }                                                                                          \
        i += ATTNRESI_LANES;                                                                       \
    }
#define ATTNRESI_SCORE_FULL(run)                                                                   \
    ATTNRESI_SCORE(ATTNRESI_(read_as)(row, type, i), ATTNRESI_(read)(query + i), run)
#define ATTNRESI_SCORE_SOME(run)                                                                   \
    if (i < end)                                                                                   \
    ATTNRESI_SCORE(ATTNRESI_(read_some)(row, type, i, end - i),                                    \
                   ATTNRESI_(read_some)(query, ATTNRES_F32, i, end - i), run)

/* wide: the dot product is summed in float64. That, and what is null, is known where this is
 * inlined. */
ATTNRESI_KERNEL_INLINE void ATTNRESI_(score_with)(const void *row, attnres_type type, size_t dim,
                                                  const void *ahead, const float *query, int wide,
                                                  double *dot, double *squares) {
    size_t size = attnresi_type_bytes(type);
    double sums[ATTNRESI_RUN_SUMS] = {0}, lanes[ATTNRESI_LANES];
    ATTNRESI_EACH_PART(ATTNRESI_ZERO)
    for (size_t i = 0; i < dim;) {
        ATTNRESI_WIDE run0 = ATTNRESI_(set)(0.0f), run1 = run0;
        size_t end = i + attnresi_min(dim - i, ATTNRESI_RUN);
        while (end - i >= ATTNRESI_PAIR) {
            ATTNRESI_SCORE_FULL(run0)
            ATTNRESI_SCORE_FULL(run1)
        }
        ATTNRESI_SCORE_SOME(run0)
        ATTNRESI_SCORE_SOME(run1)
        if (dot && !wide) {
            ATTNRESI_(add_run)(sums, run0);
            ATTNRESI_(add_run)(sums, run1);
        }
    }
    if (dot && !wide) *dot = attnresi_add_wide_lanes(sums, ATTNRESI_RUN_SUMS);
    if (wide) {
        ATTNRESI_EACH_PART(ATTNRESI_PUT_DOT)
        *dot = attnresi_add_wide_lanes(lanes, ATTNRESI_LANES);
    }
    if (squares) {
        ATTNRESI_EACH_PART(ATTNRESI_PUT_OWN)
        *squares = attnresi_add_wide_lanes(lanes, ATTNRESI_LANES);
    }
}

/* With a type that is known where this is inlined. */
ATTNRESI_KERNEL_INLINE void ATTNRESI_(score_as)(const void *row, attnres_type type, size_t dim,
                                                const void *ahead, attnresi_query query,
                                                double *dot, double *squares) {
    double one, other; /* whose addresses stay here, so that the compiler knows them not null */
    if (dot && squares) {
        if (query.is_large)
            ATTNRESI_(score_with)(row, type, dim, ahead, query.c, 1, &one, &other);
        else
            ATTNRESI_(score_with)(row, type, dim, ahead, query.c, 0, &one, &other);
        *dot = one, *squares = other;
    } else if (dot) {
        if (query.is_large)
            ATTNRESI_(score_with)(row, type, dim, ahead, query.c, 1, &one, NULL);
        else
            ATTNRESI_(score_with)(row, type, dim, ahead, query.c, 0, &one, NULL);
        *dot = one;
    } else {
        ATTNRESI_(score_with)(row, type, dim, ahead, NULL, 0, NULL, &other);
        *squares = other;
    }
}

ATTNRESI_KERNEL void ATTNRESI_(score)(const void *row, attnres_type type, size_t dim,
                                      const void *ahead, attnresi_query query, double *dot,
                                      double *squares) {
    if (type == ATTNRES_F32)
        ATTNRESI_(score_as)(row, ATTNRES_F32, dim, ahead, query, dot, squares);
    else if (type == ATTNRES_F16)
        ATTNRESI_(score_as)(row, ATTNRES_F16, dim, ahead, query, dot, squares);
    else
        ATTNRESI_(score_as)(row, ATTNRES_BF16, dim, ahead, query, dot, squares);
}

/* Per row r of a register block: its dot products with three queries, over one run. */
#define ATTNRESI_ZERO3(r) ATTNRESI_WIDE a##r = ATTNRESI_(set)(0.0f), b##r = a##r, c##r = a##r;
#define ATTNRESI_DOT3(r)                                                                           \
    x = ATTNRESI_(read)(rows[r] + i);                                                              \
    a##r = ATTNRESI_(fma)(x, u, a##r);                                                             \
    b##r = ATTNRESI_(fma)(x, v, b##r);                                                             \
    c##r = ATTNRESI_(fma)(x, w, c##r);
#define ATTNRESI_LAST3(r)                                                                          \
    x = ATTNRESI_(read_some)(rows[r], ATTNRES_F32, i, end - i);                                    \
    a##r = ATTNRESI_(fma)(x, u, a##r);                                                             \
    b##r = ATTNRESI_(fma)(x, v, b##r);                                                             \
    c##r = ATTNRESI_(fma)(x, w, c##r);
#define ATTNRESI_PUT3(r)                                                                           \
    ATTNRESI_(add_run)(sums + sums_of * (r), a##r);                                                \
    ATTNRESI_(add_run)(sums + sums_of * (r) + ATTNRESI_RUN_SUMS, b##r);                            \
    ATTNRESI_(add_run)(sums + sums_of * (r) + 2 * ATTNRESI_RUN_SUMS, c##r);
#define ATTNRESI_ONE_ROW(X) X(0)
#if ATTNRESI_TALL == 8
#define ATTNRESI_TALL_ROWS(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)
#else
#define ATTNRESI_TALL_ROWS(X) X(0) X(1)
#endif

/* One of the two wide values of the run that ends at `end`, for a register block: rows[0] and on
 * with queries y[0] .. y[2]. The value begins at i, and the other has its turn in between. */
#define ATTNRESI_DEFINE_DOTS(name, ROWS)                                                           \
    ATTNRESI_KERNEL void ATTNRESI_(name)(const float *const *rows, const float *const y[3],        \
                                         size_t i, size_t end, double *sums, size_t sums_of) {     \
        const float *y0 = y[0], *y1 = y[1], *y2 = y[2];                                            \
        ATTNRESI_WIDE u, v, w, x;                                                                  \
        ROWS(ATTNRESI_ZERO3)                                                                       \
        for (; end > i && end - i >= ATTNRESI_LANES; i += ATTNRESI_PAIR) {                         \
            u = ATTNRESI_(read)(y0 + i);                                                           \
            v = ATTNRESI_(read)(y1 + i);                                                           \
            w = ATTNRESI_(read)(y2 + i);                                                           \
            ROWS(ATTNRESI_DOT3)                                                                    \
        }                                                                                          \
        if (i < end) {                                                                             \
            u = ATTNRESI_(read_some)(y0, ATTNRES_F32, i, end - i);                                 \
            v = ATTNRESI_(read_some)(y1, ATTNRES_F32, i, end - i);                                 \
            w = ATTNRESI_(read_some)(y2, ATTNRES_F32, i, end - i);                                 \
            ROWS(ATTNRESI_LAST3)                                                                   \
        }                                                                                          \
        ROWS(ATTNRESI_PUT3)                                                                        \
    }
ATTNRESI_DEFINE_DOTS(dots_tall, ATTNRESI_TALL_ROWS)
ATTNRESI_DEFINE_DOTS(dots_one, ATTNRESI_ONE_ROW)

/* Run by run, so that a run of all rows stays in the first-level cache while the queries pass. */
ATTNRESI_KERNEL void ATTNRESI_(dots)(const float *const *rows, size_t n_rows,
                                     const float *const *queries, size_t n_queries, size_t dim,
                                     double *sums, double *dots) {
    size_t sums_of = attnresi_sums_of(n_queries);
    memset(sums, 0, n_rows * sums_of * sizeof(double));
    for (size_t i = 0; i < dim; i += ATTNRESI_RUN) {
        size_t end = i + attnresi_min(dim - i, ATTNRESI_RUN);
        for (size_t q = 0; q < n_queries; q += 3) {
            const float *y[3]; /* the last query fills up the three */
            for (size_t k = 0; k < 3; k++) y[k] = queries[attnresi_min(q + k, n_queries - 1)];
            double *to = sums + q * ATTNRESI_RUN_SUMS;
            size_t r = 0;
            for (; n_rows - r >= ATTNRESI_TALL; r += ATTNRESI_TALL)
                for (size_t at = i; at < i + ATTNRESI_PAIR; at += ATTNRESI_LANES)
                    ATTNRESI_(dots_tall)(rows + r, y, at, end, to + r * sums_of, sums_of);
            for (; r < n_rows; r++)
                for (size_t at = i; at < i + ATTNRESI_PAIR; at += ATTNRESI_LANES)
                    ATTNRESI_(dots_one)(rows + r, y, at, end, to + r * sums_of, sums_of);
        }
    }
    for (size_t r = 0; r < n_rows; r++)
        for (size_t q = 0; q < n_queries; q++)
            dots[r * n_queries + q] = attnresi_add_wide_lanes(
                sums + r * sums_of + q * ATTNRESI_RUN_SUMS, ATTNRESI_RUN_SUMS);
}

/* ---- Mixtures ---- */

/* Four wide values of one mixture side by side. */
#define ATTNRESI_FOUR_OF(X) X(0) X(1) X(2) X(3)
#define ATTNRESI_MIX_FIRST(k)                                                                      \
    ATTNRESI_WIDE x##k = ATTNRESI_(mul)(w, ATTNRESI_(read_as)(row, type, i + (k) * ATTNRESI_LANES));
#define ATTNRESI_MIX_NEXT(k)                                                                       \
    x##k = ATTNRESI_(fma)(w, ATTNRESI_(read_as)(row, type, i + (k) * ATTNRESI_LANES), x##k);
#define ATTNRESI_MIX_PUT(k)                                                                        \
    squares = ATTNRESI_(fma)(x##k, x##k, squares);                                                 \
    ATTNRESI_(write)(to + i + (k) * ATTNRESI_LANES, x##k);

ATTNRESI_KERNEL float ATTNRESI_(mix)(const attnresi_rows *rows, const float *weights, float *to) {
    ATTNRESI_WIDE squares = ATTNRESI_(set)(0.0f);
    size_t i = 0;
    for (; rows->dim - i >= 4 * ATTNRESI_LANES; i += 4 * ATTNRESI_LANES) {
        const void *row = rows->at[0];
        attnres_type type = rows->sources[0].type;
        ATTNRESI_WIDE w = ATTNRESI_(set)(weights[0]);
        ATTNRESI_FOUR_OF(ATTNRESI_MIX_FIRST)
        for (size_t j = 1; j < rows->n; j++) {
            row = rows->at[j];
            type = rows->sources[j].type;
            w = ATTNRESI_(set)(weights[j]);
            ATTNRESI_FOUR_OF(ATTNRESI_MIX_NEXT)
        }
        ATTNRESI_FOUR_OF(ATTNRESI_MIX_PUT)
    }
    for (; i < rows->dim; i += ATTNRESI_LANES) {
        size_t n = rows->dim - i;
        ATTNRESI_WIDE x = ATTNRESI_(mul)(
            ATTNRESI_(set)(weights[0]),
            ATTNRESI_(read_some)(rows->at[0], rows->sources[0].type, i, n));
        for (size_t j = 1; j < rows->n; j++)
            x = ATTNRESI_(fma)(ATTNRESI_(set)(weights[j]),
                               ATTNRESI_(read_some)(rows->at[j], rows->sources[j].type, i, n), x);
        squares = ATTNRESI_(fma)(x, x, squares);
        ATTNRESI_(write_some)(to + i, x, n);
    }
    return ATTNRESI_(sum)(squares);
}

/* One wide value of a row in several mixtures, MANY of them. */
#if ATTNRESI_TALL == 8
#define ATTNRESI_MANY ((size_t)12)
#define ATTNRESI_MANY_OF(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)
#else
#define ATTNRESI_MANY ((size_t)6)
#define ATTNRESI_MANY_OF(X) X(0) X(1) X(2) X(3) X(4) X(5)
#endif
#define ATTNRESI_MIXES_FIRST(q)                                                                    \
    ATTNRESI_WIDE x##q = ATTNRESI_(mul)(ATTNRESI_(set)(w[q][0]), row);
#define ATTNRESI_MIXES_NEXT(q) x##q = ATTNRESI_(fma)(ATTNRESI_(set)(w[q][j]), row, x##q);
#define ATTNRESI_MIXES_PUT(q) ATTNRESI_(write_some)(o[q] + i, x##q, end - i);

/* Elements i .. end - 1 of MANY mixtures. */
ATTNRESI_KERNEL void ATTNRESI_(mix_many)(const attnresi_rows *rows, const float *const *w,
                                         float *const *o, size_t i, size_t end) {
    for (; i < end; i += ATTNRESI_LANES) {
        ATTNRESI_WIDE row = ATTNRESI_(read_some)(rows->at[0], rows->sources[0].type, i, end - i);
        ATTNRESI_MANY_OF(ATTNRESI_MIXES_FIRST)
        for (size_t j = 1; j < rows->n; j++) {
            row = ATTNRESI_(read_some)(rows->at[j], rows->sources[j].type, i, end - i);
            ATTNRESI_MANY_OF(ATTNRESI_MIXES_NEXT)
        }
        ATTNRESI_MANY_OF(ATTNRESI_MIXES_PUT)
    }
}

/* Run by run, so that a run of all rows stays in the first-level cache for all mixtures. */
ATTNRESI_KERNEL void ATTNRESI_(mixes)(const attnresi_rows *rows, const float *weights,
                                      size_t n_queries, float *to, size_t to_stride) {
    for (size_t i = 0; i < rows->dim; i += ATTNRESI_RUN) {
        size_t end = i + attnresi_min(rows->dim - i, ATTNRESI_RUN);
        for (size_t first = 0; first < n_queries; first += ATTNRESI_MANY) {
            const float *w[ATTNRESI_MANY];
            float *o[ATTNRESI_MANY];
            for (size_t k = 0; k < ATTNRESI_MANY; k++) { /* the last query fills them up */
                size_t q = attnresi_min(first + k, n_queries - 1);
                w[k] = weights + q * rows->n;
                o[k] = to + q * to_stride;
            }
            ATTNRESI_(mix_many)(rows, w, o, i, end);
        }
    }
}

ATTNRESI_KERNEL void ATTNRESI_(normalise)(float inverse_rms, const float *weight, size_t n,
                                          float *x) {
    ATTNRESI_WIDE inverse = ATTNRESI_(set)(inverse_rms);
    for (size_t i = 0; i < n; i += ATTNRESI_LANES) {
        ATTNRESI_WIDE y =
            ATTNRESI_(mul)(ATTNRESI_(read_some)(x, ATTNRES_F32, i, n - i), inverse);
        ATTNRESI_WIDE w = ATTNRESI_(read_some)(weight, ATTNRES_F32, i, n - i);
        ATTNRESI_(write_some)(x + i, ATTNRESI_(mul)(y, w), n - i);
    }
}

static const attnresi_kernels ATTNRESI_(kernels) = {
    ATTNRESI_ISA,       ATTNRESI_(to_floats), ATTNRESI_(from_floats), ATTNRESI_(add_row),
    ATTNRESI_(exp_row), ATTNRESI_(largest),   ATTNRESI_(score),       ATTNRESI_(dots),
    ATTNRESI_(mix),     ATTNRESI_(mixes),     ATTNRESI_(normalise),
};

#undef ATTNRESI_JOIN_
#undef ATTNRESI_JOIN
#undef ATTNRESI_
#undef ATTNRESI_WIDE
#undef ATTNRESI_PART
#undef ATTNRESI_PART_LANES
#undef ATTNRESI_EACH_PART
#undef ATTNRESI_ZERO
#undef ATTNRESI_PART_SCORE
#undef ATTNRESI_PUT_DOT
#undef ATTNRESI_PUT_OWN
#undef ATTNRESI_SCORE
#undef ATTNRESI_SCORE_FULL
#undef ATTNRESI_SCORE_SOME
#undef ATTNRESI_FOUR_OF
#undef ATTNRESI_ZERO3
#undef ATTNRESI_DOT3
#undef ATTNRESI_LAST3
#undef ATTNRESI_PUT3
#undef ATTNRESI_ONE_ROW
#undef ATTNRESI_TALL_ROWS
#undef ATTNRESI_DEFINE_DOTS
#undef ATTNRESI_MIX_FIRST
#undef ATTNRESI_MIX_NEXT
#undef ATTNRESI_MIX_PUT
#undef ATTNRESI_MANY
#undef ATTNRESI_MANY_OF
#undef ATTNRESI_MIXES_FIRST
#undef ATTNRESI_MIXES_NEXT
#undef ATTNRESI_MIXES_PUT
#endif /* ATTNRESI_PASS */
