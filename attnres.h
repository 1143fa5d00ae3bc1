/* attnres.h - v0.1.0 - Attention Residuals in one C header. SPDX-License-Identifier: MIT

INCLUDE IT

    In exactly one file:                  Everywhere else:
        #define ATTNRES_IMPLEMENTATION        #include "attnres.h"
        #include "attnres.h"

    C11 or C++17, libc and libm only (link with -lm). Define ATTNRES_STATIC as well to make every
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
        unsigned char scratch[1024];
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

        attnres_bank_start(&bank, n_tokens, embedding);
        for (i = 0; i < n_layers; i++) {
            attnres_bank_read(&bank, attention_query[i], attention_norm[i], x, NULL);
            attention(i, x, y);
            attnres_bank_add(&bank, y);
            attnres_bank_read(&bank, feed_forward_query[i], feed_forward_norm[i], x, NULL);
            feed_forward(i, x, y);
            attnres_bank_add(&bank, y);
        }
        attnres_bank_read(&bank, output_query, output_norm, x, NULL);

    Depth is not time: nothing is kept from one token to the next. Each piece of a prompt and each
    decoding step is a pass of its own, and the bank starts again for each.

LAYOUTS

    A view gives an element's place as data[token * token_stride + i], the stride in elements and of
    either sign: columns of a wider row are a normal case. The innermost dimension is contiguous.
    Sources need not be near each other. Everything that is not a view is dense.

ALIASING

    Where a function writes to o, o may be exactly one of the views it reads (the same data and the
    same stride); attnres_merge's o may also be its mix (with stride dim). attnres_fold_query's
    result may be either of its inputs. Nothing else that is written may overlap anything else;
    this is not checked. The bank copies what it is given and never refers to a caller's tensor
    after a call: one buffer can serve as embedding, o and delta throughout. No tensor handed to a
    bank may lie in the bank's memory.

MEMORY

    The library never allocates. Scratch and the bank's memory are the caller's; size functions tell
    the bytes and return 0 for an invalid description or a size past what can be addressed. Both may
    have any alignment (64 bytes recommended). Scratch does not depend on the number of tokens, and
    its contents carry nothing from one call to the next. Other pointers need the alignment of their
    element type. A call uses less than 2 KiB of stack.

    No mutable globals: calls with different outputs, scratch and banks may run at once in any
    threads.

ERRORS

    An attnres_result for each kind of misuse, with a name (attnres_result_name). On any error
    nothing has been written, to a bank neither. The values of tensors are not errors: see NUMERICS.
    With n_tokens 0 the description and the counts are checked, no tensor is looked at, and the
    result is ATTNRES_OK.

NUMERICS

    * Scores and inverse RMS are float64: a score of 80, rounded to float32, would move its weight by
      4e-6. All else is IEEE float32 with fused multiply-add. exp is the header's own (at most 2 ulp
      from the exact value); 1/sqrt(x) is a division by a correctly rounded square root.
    * A sum over the elements of a row has one fixed shape: 16 running lanes, element i goes to lane
      i % 16 by fused multiply-add in order of i, the last 16 padded with zeros; then lanes 8 apart
      are added, then 4, 2, 1. A sum over sources is taken in their order.
    * A token's results are the same bits whatever other tokens are in the call and however tokens
      are split into calls. A cached inverse RMS gives the same bits as none. Two phases differ from
      one pass by rounding only.
    * The maximum is subtracted before exp, so scores of any finite size are safe. NaN and
      Inf in one token stay there; a score of NaN or +Inf makes that token's results NaN.
    * Squares of sources do not overflow. Of a fused norm, the sum of squares of the
      mixture must stay below 3.4e38 (elements of 1e17 at dim 10,000); past it the result is zeros.
    * -ffast-math breaks these promises; a build with it is refused unless ATTNRES_ALLOW_FAST_MATH
      is defined.

LIMITS

    float32 tensors. Any dim >= 1, any number of sources, queries, layers and tokens.
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
    ATTNRES_ERR_ORDER    /* bank not started, or read and add out of turn */
} attnres_result;

/* The spelling of a result, "ATTNRES_ERR_DIMS"; "ATTNRES_ERR_UNKNOWN" for a value that is none. */
ATTNRES_API const char *attnres_result_name(attnres_result result);
/* One sentence for a person. */
ATTNRES_API const char *attnres_result_text(attnres_result result);

typedef enum attnres_type { ATTNRES_F32 = 0 } attnres_type;

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

static inline attnres_input attnres_in_f32(const float *data, ptrdiff_t token_stride) {
    attnres_input view;
    view.data = data;
    view.token_stride = token_stride;
    view.type = ATTNRES_F32;
    return view;
}

static inline attnres_output attnres_out_f32(float *data, ptrdiff_t token_stride) {
    attnres_output view;
    view.data = data;
    view.token_stride = token_stride;
    view.type = ATTNRES_F32;
    return view;
}

/* The numbers that all mixes of a model share. */
typedef struct attnres_desc {
    size_t dim;
    float eps;   /* of the inverse RMS, > 0, no default; Kimi K3: 1e-5 */
    float scale; /* of the scores; 0 means 1, which is what models use */
} attnres_desc;

typedef struct attnres_run {
    void *scratch; /* any alignment */
    size_t scratch_bytes;
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
 * read more than once. desc->scale is not used. */
ATTNRES_API attnres_result attnres_inverse_rms(const attnres_desc *desc, size_t n_tokens,
                                               attnres_input source, double *inv_rms);

typedef struct attnres_mix_args {
    size_t n_tokens;
    const attnres_input *sources; /* [n_sources] views of [n_tokens][dim] */
    size_t n_sources;             /* >= 1 */
    const double *const *inv_rms; /* null, or [n_sources]: null or [n_tokens], from the same eps */
    const float *query;           /* [dim], folded; not read where n_sources is 1 */
    attnres_norm norm;
    attnres_output o;             /* [n_tokens][dim]; may be one of the sources itself */
    float *weights;               /* null, or [n_tokens][n_sources]: receives the softmax weights */
} attnres_mix_args;

/* Bytes of scratch for an attnres_mix of at most n_sources sources; 0 if something is invalid or
 * the size overflows. */
ATTNRES_API size_t attnres_mix_scratch_bytes(const attnres_desc *desc, size_t n_sources);

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

/* Bytes of scratch for an attnres_inter of at most that many sources and queries; 0 if something
 * is invalid or the size overflows. */
ATTNRES_API size_t attnres_inter_scratch_bytes(const attnres_desc *desc, size_t n_sources,
                                               size_t n_queries);

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

/* The second phase, for one query: adds the partial as one more, last source and normalises.
 * Errors: any but ATTNRES_ERR_SCRATCH, _UNIT and _ORDER. */
ATTNRES_API attnres_result attnres_merge(const attnres_desc *desc, const attnres_merge_args *args);

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
} attnres_bank_desc;

/* Over the caller's memory. Fields may be read, not written, by others: `sources`, `n_blocks` and
 * `cached` are attnres_inter's sources, n_sources and inv_rms for the stored blocks, and
 * sources[n_blocks] is the partial sum where there is one. */
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

/* Starts a pass of n_tokens with the embedding, [n_tokens][dim], as the partial sum; whatever pass
 * was under way is dropped. Errors: ATTNRES_ERR_NULL, _DIMS (more than the bank's n_tokens), _SIZE,
 * _TYPE, _ALIGN, _ORDER (a zeroed bank without init). */
ATTNRES_API attnres_result attnres_bank_start(attnres_bank *bank, size_t n_tokens,
                                              attnres_input embedding);

/* The input of the next sub-layer, or after the last one the model's output: mixes the stored
 * blocks and the partial sum into o, with the norm fused; then, if that sub-layer starts a block,
 * stores the raw partial sum and empties it.
 * query: folded; not read before a block is stored, when the partial sum is the only source.
 * weights: null, or [n_tokens][n_blocks + 1] with n_blocks as before the call.
 * ATTNRES_ERR_ORDER without a start, before the last sub-layer's output was added, and after the
 * model's output. Other errors: those of attnres_mix but _DIMS and _SCRATCH. */
ATTNRES_API attnres_result attnres_bank_read(attnres_bank *bank, const float *query,
                                             attnres_norm norm, attnres_output o, float *weights);

/* Adds the output of the sub-layer last read, [n_tokens][dim], to the partial sum, whole or in
 * several calls. ATTNRES_ERR_ORDER if none was read in this pass, and after the model's output.
 * Other errors: ATTNRES_ERR_NULL, _SIZE, _TYPE, _ALIGN. */
ATTNRES_API attnres_result attnres_bank_add(attnres_bank *bank, attnres_input delta);

#ifdef __cplusplus
}
#endif
#endif /* ATTNRES_H */

/* ==== end of the interface ==================================================================== */

#if defined(ATTNRES_IMPLEMENTATION) && !defined(ATTNRES_IMPLEMENTATION_DONE)
#define ATTNRES_IMPLEMENTATION_DONE

#if defined(__FAST_MATH__) && !defined(ATTNRES_ALLOW_FAST_MATH)
#error "attnres.h: -ffast-math breaks NaN and exact bits; define ATTNRES_ALLOW_FAST_MATH to accept"
#endif

#include <math.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ==== 5. Elementary functions and sums ========================================================
 *
 * Every multiply-add below is an explicit fmaf and every other product feeds only products, fmaf or
 * divisions: a compiler that contracts a*b+c on its own then finds nothing to change, and each
 * result has the same bits whatever the flags. */

/* ---- shared with kda.h, but for the prefix ---- */

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
    float shifted = fmaf(x, 0x1.715476p+0f, 0x1.8p23f);
    float n = shifted - 0x1.8p23f;
    /* ln 2 in two parts keeps r exact to its last bit. */
    float r = fmaf(n, -0x1.62e43p-1f, x);
    r = fmaf(n, 0x1.05c61p-29f, r);
    float p = 0x1.6d117cp-10f;
    p = fmaf(p, r, 0x1.120be2p-7f);
    p = fmaf(p, r, 0x1.555518p-5f);
    p = fmaf(p, r, 0x1.5554dcp-3f);
    p = fmaf(p, r, 0.5f);
    float y = fmaf(p * r, r, r) + 1.0f;
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

/* Adds the products of n elements to a sum's lanes, element i to lane i % ATTNRESI_LANES; a last block that
 * is short counts as padded with zeros, which turns a lane of -0 into +0. */
static void attnresi_dot_lanes(const float *x, const float *y, size_t n, float *lane) {
    for (size_t i = 0; i < n; i += ATTNRESI_LANES) {
        size_t some = n - i < ATTNRESI_LANES ? n - i : ATTNRESI_LANES;
        for (size_t l = 0; l < some; l++) lane[l] = fmaf(x[i + l], y[i + l], lane[l]);
        for (size_t l = some; l < ATTNRESI_LANES; l++) lane[l] += 0.0f;
    }
}

/* ---- end of shared text ---- */

static void attnresi_clear_lanes(float *lane) {
    for (size_t l = 0; l < ATTNRESI_LANES; l++) lane[l] = 0.0f;
}

/* Elements of a row that are in the block beginning at i. */
static size_t attnresi_block(size_t dim, size_t i) {
    return dim - i < ATTNRESI_LANES ? dim - i : ATTNRESI_LANES;
}

/* 1 / sqrt(mean + eps) of a mixed row, from its sum of squares. */
static float attnresi_inverse_rms(float sum_of_squares, size_t dim, float eps) {
    return 1.0f / sqrtf(sum_of_squares / (float)dim + eps);
}

/* The same shape of sum in float64, for scores: see NUMERICS. Products of two floats are exact. */
static void attnresi_wide_lanes(const float *x, const float *y, size_t n, double *lane) {
    for (size_t l = 0; l < n; l++) lane[l] += (double)x[l] * (double)y[l];
}

static double attnresi_add_wide_lanes(double *lane) {
    for (size_t apart = ATTNRESI_LANES / 2; apart >= 1; apart /= 2)
        for (size_t i = 0; i < apart; i++) lane[i] += lane[i + apart];
    return lane[0];
}

static double attnresi_wide_inverse_rms(double sum_of_squares, size_t dim, float eps) {
    return 1.0 / sqrt(sum_of_squares / (double)dim + (double)eps);
}

/* ==== 6. Checks =============================================================================== */

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
    if (a == 0 || b == 0 || a > ATTNRESI_MAX_BYTES / b) return 0;
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
    size_t most = ATTNRESI_MAX_BYTES / sizeof(float) - dim;
    if (type != ATTNRES_F32) return ATTNRES_ERR_TYPE;
    if (n_tokens > 1 && attnresi_step(token_stride) > most / (n_tokens - 1))
        return ATTNRES_ERR_SIZE;
    return attnresi_check_floats((const float *)data, 1, dim);
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

/* ==== 7. Scratch ============================================================================== */

/* Hands out aligned pieces of memory. With no memory it only counts: the size functions and the
 * calls run the same code. `used` starts at the room for aligning and is 0 for good on overflow. */
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
    bytes = bytes / ATTNRESI_SCRATCH_ALIGN * ATTNRESI_SCRATCH_ALIGN;
    arena->used = attnresi_sum(arena->used, bytes);
    return arena->aligned ? arena->aligned + start : NULL;
}

static float *attnresi_take_floats(attnresi_arena *arena, size_t count) {
    return (float *)attnresi_take(arena, count, sizeof(float));
}

/* What the scores of one token need. */
typedef struct attnresi_work {
    double *lanes;  /* [n_queries][ATTNRESI_LANES] */
    double *scores; /* [n_queries][n_sources] */
    float *weights; /* [n_queries][n_sources] exp(score - max), or that over the sum */
} attnresi_work;

static size_t attnresi_carve(size_t n_sources, size_t n_queries, void *memory,
                             attnresi_work *work) {
    attnresi_arena arena = attnresi_arena_on(memory);
    size_t lanes = attnresi_product(n_queries, ATTNRESI_LANES);
    size_t scores = attnresi_product(n_queries, n_sources);
    work->lanes = (double *)attnresi_take(&arena, lanes, sizeof(double));
    work->scores = (double *)attnresi_take(&arena, scores, sizeof(double));
    work->weights = attnresi_take_floats(&arena, scores);
    return arena.used;
}

static size_t attnresi_work_bytes(size_t n_sources, size_t n_queries) {
    attnresi_work work;
    return attnresi_carve(n_sources, n_queries, NULL, &work);
}

static attnres_result attnresi_check_run(const attnres_run *run, size_t n_sources,
                                         size_t n_queries) {
    size_t needed = attnresi_work_bytes(n_sources, n_queries);
    if (!run) return ATTNRES_ERR_NULL;
    if (needed == 0) return ATTNRES_ERR_SIZE;
    return !run->scratch || run->scratch_bytes < needed ? ATTNRES_ERR_SCRATCH : ATTNRES_OK;
}

/* ==== 8. One token ============================================================================ */

/* What scores are made from, in one pass as in two phases. */
typedef struct attnresi_scoring {
    const attnres_input *sources; /* [n_sources] */
    size_t n_sources;
    const double *const *inv_rms; /* null, or [n_sources]: null or [n_tokens] */
    const float *const *queries; /* [n_queries] */
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

static const float *attnresi_row(attnres_input x, size_t token) {
    return (const float *)x.data + (ptrdiff_t)token * x.token_stride;
}

static float *attnresi_output_row(attnres_output y, size_t token) {
    return (float *)y.data + (ptrdiff_t)token * y.token_stride;
}

/* The lanes of query . row for each query and, unless squares is null, those of row . row: the row
 * is gone through once. */
static void attnresi_row_lanes(const attnresi_scoring *in, size_t dim, const float *row,
                               double *lanes, double *squares) {
    for (size_t l = 0; l < in->n_queries * ATTNRESI_LANES; l++) lanes[l] = 0.0;
    for (size_t l = 0; squares && l < ATTNRESI_LANES; l++) squares[l] = 0.0;
    for (size_t i = 0; i < dim; i += ATTNRESI_LANES) {
        size_t n = attnresi_block(dim, i);
        if (squares) attnresi_wide_lanes(row + i, row + i, n, squares);
        for (size_t q = 0; q < in->n_queries; q++)
            attnresi_wide_lanes(in->queries[q] + i, row + i, n, lanes + q * ATTNRESI_LANES);
    }
}

/* work->scores[q][j] of one token. */
static void attnresi_score(const attnres_desc *desc, const attnresi_scoring *in, size_t token,
                           const attnresi_work *work) {
    double scale = desc->scale > 0.0f ? (double)desc->scale : 1.0;
    for (size_t j = 0; j < in->n_sources; j++) {
        const double *cached = attnresi_cached(in, j);
        double squares[ATTNRESI_LANES];
        attnresi_row_lanes(in, desc->dim, attnresi_row(in->sources[j], token), work->lanes,
                           cached ? NULL : squares);
        double inv_rms = cached ? cached[token]
                                : attnresi_wide_inverse_rms(attnresi_add_wide_lanes(squares),
                                                            desc->dim, desc->eps);
        for (size_t q = 0; q < in->n_queries; q++) {
            double dot = attnresi_add_wide_lanes(work->lanes + q * ATTNRESI_LANES);
            /* The addition of 0 keeps this product from being contracted with the subtraction of
             * the maximum that follows. */
            work->scores[q * in->n_sources + j] = fma(scale * dot, inv_rms, 0.0);
        }
    }
}

/* exp(score - max) of one query's scores; gives the maximum and returns the sum. A NaN among the
 * scores is passed over in the maximum and comes out in the sum. */
static float attnresi_exponentials(const double *scores, size_t n, float *weights, double *max) {
    double largest = scores[0];
    float sum = 0.0f;
    for (size_t j = 1; j < n; j++)
        if (scores[j] > largest) largest = scores[j];
    for (size_t j = 0; j < n; j++) {
        weights[j] = attnresi_exp((float)(scores[j] - largest));
        /* exp ends in a product, but by a power of two: it rounds only subnormal results, which
         * vanish beside the largest score's 1. Contracted or not, the sum is the same. */
        sum += weights[j];
    }
    *max = largest;
    return sum;
}

/* The softmax of one token's scores, in work->weights. A single source has the weight 1, of whatever
 * score: a model's first layer holds a query that means nothing. */
static void attnresi_weigh(const attnres_desc *desc, const attnresi_scoring *in, size_t token,
                           const attnresi_work *work) {
    if (in->n_sources == 1) {
        work->weights[0] = 1.0f;
        return;
    }
    attnresi_score(desc, in, token, work);
    double max;
    float sum = attnresi_exponentials(work->scores, in->n_sources, work->weights, &max);
    for (size_t j = 0; j < in->n_sources; j++) work->weights[j] /= sum;
}

/* mixed[l] = sum over j of weights[j] source_j[first + l], for n elements of one token. */
static void attnresi_mix_block(const attnres_input *sources, size_t n_sources, const float *weights,
                               size_t token, size_t first, size_t n, float *mixed) {
    const float *row = attnresi_row(sources[0], token) + first;
    for (size_t l = 0; l < n; l++) mixed[l] = weights[0] * row[l];
    for (size_t j = 1; j < n_sources; j++) {
        row = attnresi_row(sources[j], token) + first;
        for (size_t l = 0; l < n; l++) mixed[l] = fmaf(weights[j], row[l], mixed[l]);
    }
}

/* Mixes one token into o, then applies the norm there. o may be one of the rows it is mixed from:
 * each block of all of them is read before that block of o is written, and not read again. */
static void attnresi_mix_row(const attnres_input *sources, size_t n_sources, const float *weights,
                             size_t token, size_t dim, attnres_norm norm, float *o) {
    float mixed[ATTNRESI_LANES], squares[ATTNRESI_LANES];
    attnresi_clear_lanes(squares);
    for (size_t i = 0; i < dim; i += ATTNRESI_LANES) {
        size_t n = attnresi_block(dim, i);
        attnresi_mix_block(sources, n_sources, weights, token, i, n, mixed);
        if (norm.weight) attnresi_dot_lanes(mixed, mixed, n, squares);
        memcpy(o + i, mixed, n * sizeof(float));
    }
    if (!norm.weight) return;
    float inv_rms = attnresi_inverse_rms(attnresi_add_lanes(squares), dim, norm.eps);
    for (size_t i = 0; i < dim; i++) o[i] = o[i] * inv_rms * norm.weight[i];
}

/* ==== 9. One pass ============================================================================= */

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

/* The same bits as attnresi_score finds beside its dot products. */
static void attnresi_inverse_rms_of_rows(attnres_input x, size_t n_tokens, size_t dim, float eps,
                                         double *inv_rms) {
    for (size_t t = 0; t < n_tokens; t++) {
        const float *row = attnresi_row(x, t);
        double lanes[ATTNRESI_LANES] = {0};
        for (size_t i = 0; i < dim; i += ATTNRESI_LANES)
            attnresi_wide_lanes(row + i, row + i, attnresi_block(dim, i), lanes);
        inv_rms[t] = attnresi_wide_inverse_rms(attnresi_add_wide_lanes(lanes), dim, eps);
    }
}

ATTNRES_API attnres_result attnres_inverse_rms(const attnres_desc *desc, size_t n_tokens,
                                               attnres_input source, double *inv_rms) {
    attnres_result result = attnresi_check_desc(desc);
    if (result != ATTNRES_OK || n_tokens == 0) return result;
    result = attnresi_check_input(source, n_tokens, desc->dim);
    if (result == ATTNRES_OK) result = attnresi_check_doubles(inv_rms, n_tokens);
    if (result != ATTNRES_OK) return result;
    attnresi_inverse_rms_of_rows(source, n_tokens, desc->dim, desc->eps, inv_rms);
    return ATTNRES_OK;
}

ATTNRES_API size_t attnres_mix_scratch_bytes(const attnres_desc *desc, size_t n_sources) {
    return attnresi_check_desc(desc) == ATTNRES_OK ? attnresi_work_bytes(n_sources, 1) : 0;
}

static attnresi_scoring attnresi_scoring_of_mix(const attnres_mix_args *args) {
    attnresi_scoring scoring;
    scoring.sources = args->sources;
    scoring.n_sources = args->n_sources;
    scoring.inv_rms = args->inv_rms;
    scoring.queries = &args->query;
    scoring.n_queries = args->n_sources > 1 ? 1 : 0; /* see attnresi_weigh */
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
    result = attnresi_check_run(run, args->n_sources, 1);
    if (result == ATTNRES_OK) result = attnresi_check_scoring(&scoring, args->n_tokens, desc->dim);
    if (result == ATTNRES_OK) result = attnresi_check_norm(args->norm, desc->dim);
    if (result == ATTNRES_OK) result = attnresi_check_output(args->o, args->n_tokens, desc->dim);
    if (result == ATTNRES_OK && args->weights)
        result = attnresi_check_floats(args->weights, args->n_tokens, args->n_sources);
    return result;
}

ATTNRES_API attnres_result attnres_mix(const attnres_desc *desc, const attnres_mix_args *args,
                                       const attnres_run *run) {
    attnres_result result = attnresi_check_mix(desc, args, run);
    if (result != ATTNRES_OK || args->n_tokens == 0) return result;
    attnresi_scoring scoring = attnresi_scoring_of_mix(args);
    size_t n = args->n_sources;
    attnresi_work work;
    attnresi_carve(n, 1, run->scratch, &work);
    for (size_t t = 0; t < args->n_tokens; t++) {
        attnresi_weigh(desc, &scoring, t, &work);
        if (args->weights) memcpy(args->weights + t * n, work.weights, n * sizeof(float));
        attnresi_mix_row(args->sources, n, work.weights, t, desc->dim, args->norm,
                         attnresi_output_row(args->o, t));
    }
    return ATTNRES_OK;
}

/* ==== 10. Two phases ========================================================================== */

ATTNRES_API size_t attnres_inter_scratch_bytes(const attnres_desc *desc, size_t n_sources,
                                               size_t n_queries) {
    return attnresi_check_desc(desc) == ATTNRES_OK ? attnresi_work_bytes(n_sources, n_queries) : 0;
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
    result = attnresi_check_run(run, args->n_sources, args->n_queries);
    if (result == ATTNRES_OK) result = attnresi_check_scoring(&scoring, args->n_tokens, desc->dim);
    if (result == ATTNRES_OK) result = attnresi_check_doubles(args->max, rows);
    if (result == ATTNRES_OK) result = attnresi_check_floats(args->sum, rows, 1);
    if (result == ATTNRES_OK) result = attnresi_check_floats(args->mix, rows, desc->dim);
    return result;
}

ATTNRES_API attnres_result attnres_inter(const attnres_desc *desc, const attnres_inter_args *args,
                                         const attnres_run *run) {
    attnres_result result = attnresi_check_inter(desc, args, run);
    if (result != ATTNRES_OK || args->n_tokens == 0) return result;
    attnresi_scoring scoring = attnresi_scoring_of_inter(args);
    attnres_norm no_norm = {NULL, 0.0f};
    attnresi_work work;
    attnresi_carve(args->n_sources, args->n_queries, run->scratch, &work);
    for (size_t t = 0; t < args->n_tokens; t++) {
        attnresi_score(desc, &scoring, t, &work);
        for (size_t q = 0; q < args->n_queries; q++) {
            float *weights = work.weights + q * args->n_sources;
            size_t row = q * args->n_tokens + t;
            args->sum[row] = attnresi_exponentials(work.scores + q * args->n_sources,
                                                   args->n_sources, weights, &args->max[row]);
            attnresi_mix_row(args->sources, args->n_sources, weights, t, desc->dim, no_norm,
                             args->mix + row * desc->dim);
        }
    }
    return ATTNRES_OK;
}

static attnres_result attnresi_check_merge(const attnres_desc *desc,
                                           const attnres_merge_args *args) {
    attnres_result result = attnresi_check_desc(desc);
    if (result != ATTNRES_OK) return result;
    if (!args) return ATTNRES_ERR_NULL;
    if (args->n_tokens == 0) return ATTNRES_OK;
    result = attnresi_check_doubles(args->max, args->n_tokens);
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

static double attnresi_partial_score(const attnres_desc *desc, const attnres_merge_args *args,
                                     size_t token) {
    attnresi_scoring scoring;
    scoring.sources = &args->partial;
    scoring.n_sources = 1;
    scoring.inv_rms = NULL;
    scoring.queries = &args->query;
    scoring.n_queries = 1;
    double lanes[ATTNRESI_LANES], score;
    attnresi_work work;
    work.lanes = lanes;
    work.scores = &score;
    work.weights = NULL;
    attnresi_score(desc, &scoring, token, &work);
    return score;
}

/* What the unnormalised mixture and the partial count for in one token's result. */
static void attnresi_merge_weights(const attnres_desc *desc, const attnres_merge_args *args,
                                   size_t token, float weights[2]) {
    if (!args->partial.data) {
        weights[0] = 1.0f / args->sum[token];
        return;
    }
    double score = attnresi_partial_score(desc, args, token), stored = args->max[token];
    double max = score > stored ? score : stored;
    float of_stored = attnresi_exp((float)(stored - max));
    float of_partial = attnresi_exp((float)(score - max));
    float sum = fmaf(of_stored, args->sum[token], of_partial);
    weights[0] = of_stored / sum;
    weights[1] = of_partial / sum;
}

ATTNRES_API attnres_result attnres_merge(const attnres_desc *desc, const attnres_merge_args *args) {
    attnres_result result = attnresi_check_merge(desc, args);
    if (result != ATTNRES_OK || args->n_tokens == 0) return result;
    attnres_input sources[2];
    sources[0] = attnres_in_f32(args->mix, (ptrdiff_t)desc->dim);
    sources[1] = args->partial;
    for (size_t t = 0; t < args->n_tokens; t++) {
        float weights[2];
        attnresi_merge_weights(desc, args, t, weights);
        attnresi_mix_row(sources, args->partial.data ? 2 : 1, weights, t, desc->dim, args->norm,
                         attnresi_output_row(args->o, t));
    }
    return ATTNRES_OK;
}

/* ==== 11. The block bank ====================================================================== */

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

/* The partial sum has a slot of its own after the blocks, so that it can become one in place. */
static size_t attnresi_carve_bank(const attnres_bank_desc *desc, void *memory, attnres_bank *bank) {
    attnresi_arena arena = attnresi_arena_on(memory);
    size_t capacity = attnres_bank_capacity(desc), slots = capacity + 1;
    size_t slot = attnresi_product(desc->n_tokens, desc->dim);
    bank->sources = (attnres_input *)attnresi_take(&arena, slots, sizeof(attnres_input));
    bank->cached = (const double **)attnresi_take(&arena, slots, sizeof(const double *));
    bank->blocks = attnresi_take_floats(&arena, attnresi_product(slots, slot));
    bank->inv_rms = (double *)attnresi_take(&arena, attnresi_product(capacity, desc->n_tokens),
                                            sizeof(double));
    bank->scratch = attnresi_take(&arena, attnresi_work_bytes(slots, 1), 1);
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

/* The partial sum becomes a copy of x. */
static void attnresi_bank_set(attnres_bank *bank, attnres_input x) {
    size_t dim = bank->desc.dim;
    for (size_t t = 0; t < bank->n_tokens; t++)
        memcpy(bank->partial + t * dim, attnresi_row(x, t), dim * sizeof(float));
    bank->has_partial = 1;
}

ATTNRES_API attnres_result attnres_bank_start(attnres_bank *bank, size_t n_tokens,
                                              attnres_input embedding) {
    if (!bank) return ATTNRES_ERR_NULL;
    if (!bank->blocks) return ATTNRES_ERR_ORDER;
    if (n_tokens > bank->desc.n_tokens) return ATTNRES_ERR_DIMS;
    size_t dim = bank->desc.dim, slots = attnres_bank_capacity(&bank->desc) + 1;
    attnres_result result =
        n_tokens ? attnresi_check_input(embedding, n_tokens, dim) : ATTNRES_OK;
    if (result != ATTNRES_OK) return result;
    for (size_t j = 0; j < slots; j++) {
        bank->sources[j] = attnres_in_f32(bank->blocks + j * n_tokens * dim, (ptrdiff_t)dim);
        bank->cached[j] = NULL;
    }
    bank->n_tokens = n_tokens;
    bank->n_blocks = 0;
    bank->sublayer = 0;
    bank->partial = bank->blocks;
    bank->may_read = 1;
    attnresi_bank_set(bank, embedding);
    return ATTNRES_OK;
}

/* The partial sum becomes a block where it lies, and the next slot is to take the next sum. What
 * that slot holds does not matter: the first output is copied there, not added. */
static void attnresi_bank_store(attnres_bank *bank) {
    double *inv_rms = bank->inv_rms + bank->n_blocks * bank->n_tokens;
    attnresi_inverse_rms_of_rows(bank->sources[bank->n_blocks], bank->n_tokens, bank->desc.dim,
                                 bank->desc.eps, inv_rms);
    bank->cached[bank->n_blocks] = inv_rms;
    bank->partial += bank->n_tokens * bank->desc.dim;
    bank->n_blocks++;
    bank->has_partial = 0;
}

static attnres_result attnresi_bank_mix(attnres_bank *bank, const float *query, attnres_norm norm,
                                        attnres_output o, float *weights) {
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
    attnres_run run;
    run.scratch = bank->scratch;
    run.scratch_bytes = attnresi_work_bytes(args.n_sources, 1);
    return attnres_mix(&desc, &args, &run);
}

ATTNRES_API attnres_result attnres_bank_read(attnres_bank *bank, const float *query,
                                             attnres_norm norm, attnres_output o, float *weights) {
    if (!bank) return ATTNRES_ERR_NULL;
    if (!bank->may_read) return ATTNRES_ERR_ORDER;
    attnres_result result = attnresi_bank_mix(bank, query, norm, o, weights);
    if (result != ATTNRES_OK) return result;
    if (attnresi_starts_block(&bank->desc, bank->sublayer)) attnresi_bank_store(bank);
    bank->sublayer++;
    bank->may_read = 0;
    return ATTNRES_OK;
}

static void attnresi_bank_accumulate(attnres_bank *bank, attnres_input x) {
    size_t dim = bank->desc.dim;
    for (size_t t = 0; t < bank->n_tokens; t++) {
        const float *row = attnresi_row(x, t);
        float *sum = bank->partial + t * dim;
        for (size_t i = 0; i < dim; i++) sum[i] += row[i];
    }
}

ATTNRES_API attnres_result attnres_bank_add(attnres_bank *bank, attnres_input delta) {
    if (!bank) return ATTNRES_ERR_NULL;
    if (bank->sublayer == 0 || bank->sublayer > 2 * bank->desc.n_layers) return ATTNRES_ERR_ORDER;
    attnres_result result = ATTNRES_OK;
    if (bank->n_tokens) result = attnresi_check_input(delta, bank->n_tokens, bank->desc.dim);
    if (result != ATTNRES_OK) return result;
    if (bank->has_partial)
        attnresi_bank_accumulate(bank, delta);
    else
        attnresi_bank_set(bank, delta);
    bank->may_read = 1;
    return ATTNRES_OK;
}

#ifdef __cplusplus
}
#endif
#endif /* ATTNRES_IMPLEMENTATION */
