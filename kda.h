/* kda.h - v0.1.0 - Kimi Delta Attention in one C header. SPDX-License-Identifier: MIT

INCLUDE IT

    In exactly one file:              Everywhere else:
        #define KDA_IMPLEMENTATION        #include "kda.h"
        #include "kda.h"

    C11 or C++17, libc and libm only (link with -lm). Define KDA_STATIC as well to make every
    function static to that one file.

WHAT IT DOES

    Everything that one KDA layer does apart from its dense projections: the short causal
    convolution, the decay gate, beta, the L2 norm of queries and keys, the recurrence for one
    token or many, and the gated output norm.

SMALLEST PROGRAM

    #define KDA_IMPLEMENTATION
    #include "kda.h"
    #include <stdio.h>

    int main(void) {
        kda_desc desc = {0};
        desc.n_heads = 1, desc.dim_k = 2, desc.dim_v = 2;
        desc.gate = KDA_GATE_LOG_DECAY, desc.beta = KDA_BETA_VALUE;
        desc.scale = 1;
        float q[2] = {1, 0}, k[2] = {1, 0}, v[2] = {3, 4}, g[2] = {-1, -1}, beta[1] = {0.5f}, o[2];
        float state[4] = {0};
        unsigned char scratch[16384];
        kda_seq seq = {0};
        seq.n_tokens = 1, seq.state = state;
        kda_args args = {0};
        args.q = kda_in_f32(q, 2, 2), args.k = kda_in_f32(k, 2, 2), args.v = kda_in_f32(v, 2, 2);
        args.g = kda_in_f32(g, 2, 2), args.beta = kda_in_f32(beta, 1, 1);
        args.o = kda_out_f32(o, 2, 2);
        args.seqs = &seq, args.n_seqs = 1;
        kda_run run = {0};
        run.scratch = scratch, run.scratch_bytes = sizeof scratch;
        kda_result result = kda_forward(&desc, &args, &run);
        if (result != KDA_OK) return puts(kda_result_name(result)), 1;
        printf("%g %g\n", (double)o[0], (double)o[1]);
        return 0;
    }

    prints "1.5 2": half of the value was written for the key (beta = 0.5) and read back.

THE MATHEMATICS

    Per value head one state S, a matrix of dim_k x dim_v numbers. Token t brings a query q, a key
    k (dim_k each), a value v (dim_v), a log-decay g <= 0 for each key channel, and a scalar beta:

        S'  = Diag(exp(g)) S             each key channel decays at its own rate
        u   = beta (v - S'^T k)          the correction: what is stored for k is replaced
        S   = S' + k u^T                 a rank-1 write
        o   = S^T (scale q)              read from the updated state

    (Kimi Linear, arXiv 2510.26692, eq. 1; flash-linear-attention's naive_recurrent_kda.)

    Gate, from the raw gate x of a key channel, with one A_log per value head and one dt_bias per
    value head and channel, z = x + dt_bias:

        KDA_GATE_LOG_DECAY   g = x                                       ready; above 0 reads as 0
        KDA_GATE_SOFTPLUS    g = -exp(A_log) softplus(z)                 Kimi Linear 48B
        KDA_GATE_BOUNDED     g = lower_bound sigmoid(exp(A_log) z)       Kimi K3, lower_bound = -5

    The bounded gate is a function of its own and not a clamp of the other.

    Beta, from x: x itself, sigmoid(x), or 2 sigmoid(x) (which allows negative eigenvalues).
    L2 norm (flag KDA_L2_NORM_QK): x / sqrt(sum(x^2) + eps), on the sum, before the scale.

    Two algorithms compute the same function:

    * Recurrent. Each value channel is a row of the state, independent of the others. With e =
      exp(g), and rows s of length dim_k:
          a = s . (e k)    b = s . (e q)    u = beta (v - a)    o = b + (k . q) u    s = e s + u k
    * Chunked, KDA_CHUNK tokens at a time. Decays enter only as running products of factors in
      [0, 1]; nothing is divided by a decay and no matrix is inverted. See kdai_chunk_rows.

LAYOUTS

    State, per sequence: float [n_heads][dim_v][dim_k], a row per value channel, key channels
    contiguous. kda_state_import_kv and kda_state_export_kv convert the [n_heads][dim_k][dim_v]
    order of flash-linear-attention's default.

    Tokens of a batch lie one after another: the rows of sequence 0, then those of sequence 1, ...
    A view gives an element's place as data[token * token_stride + head * head_stride + i], strides
    in elements: columns of a wider row are the normal case. The innermost dimension is contiguous.

    Which query/key head serves value head h, with n_qk_heads < n_heads:
        KDA_HEADS_GROUPED    h / (n_heads / n_qk_heads)       flash-linear-attention, vLLM
        KDA_HEADS_TILED      h % n_qk_heads                   ggml

MEMORY

    The library never allocates. States, windows and scratch are the caller's; size functions tell
    the bytes and return 0 for an invalid description or a size past what can be addressed. Scratch
    may have any alignment (64 bytes recommended) and its size does not depend on the number of
    tokens; its contents carry nothing from one call to the next. Other pointers need the alignment
    of their element type. A call uses less than 4 KiB of stack.

    No mutable globals: calls on different states and scratch may run at once in any threads.

ERRORS

    A kda_result for each kind of misuse, with a name (kda_result_name). On any error nothing has
    been written. The values of tensors are not errors: see NUMERICS.

NUMERICS

    * All arithmetic is IEEE float32 with fused multiply-add. exp, sigmoid and softplus are the
      header's own (at most 2 ulp from the exact value, exp(-inf) = 0); 1/sqrt(x) is a division by
      a correctly rounded square root.
    * A sum over n elements has one fixed shape: 16 running lanes, element i goes to lane i % 16 by
      fused multiply-add in order of i, the last 16 padded with zeros; then lanes 8 apart are
      added, then 4, 2, 1.
    * The recurrent path gives the same bits however the tokens are split into calls and whatever
      else is in the batch. The chunked path does so across calls split at multiples of KDA_CHUNK.
      The two paths differ from each other by rounding only.
    * Any gate value up to and including -inf is safe in both paths: no overflow, no division by a
      decay. NaN and Inf in one sequence or head stay there.
    * -ffast-math breaks these promises; a build with it is refused unless KDA_ALLOW_FAST_MATH is
      defined.

LIMITS

    float32 tensors. Any dim_k, dim_v >= 1, any number of heads; convolution widths 1 to 64.
*/
#ifndef KDA_H
#define KDA_H

#include <stddef.h>
#include <stdint.h>

#define KDA_VERSION_MAJOR 0
#define KDA_VERSION_MINOR 1
#define KDA_VERSION_PATCH 0

#ifndef KDA_API
#ifdef KDA_STATIC
#if defined(__GNUC__)
#define KDA_API static __attribute__((unused))
#else
#define KDA_API static
#endif
#else
#define KDA_API extern
#endif
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ==== 1. Types ================================================================================ */

typedef enum kda_result {
    KDA_OK = 0,
    KDA_ERR_NULL,        /* a pointer that the call needs is null */
    KDA_ERR_DIMS,        /* a dimension or head count is 0, or n_qk_heads does not divide n_heads */
    KDA_ERR_SIZE,        /* a size or an extent is more than ptrdiff_t can hold in bytes */
    KDA_ERR_GATE,        /* no gate chosen, an unknown one, or A_log/dt_bias with a ready log-decay */
    KDA_ERR_LOWER_BOUND, /* bounded gate: not finite and below 0; another gate: not 0 */
    KDA_ERR_BETA,        /* no beta form chosen, or an unknown one */
    KDA_ERR_HEAD_MAP,    /* unknown head map */
    KDA_ERR_FLAGS,       /* unknown flag bit */
    KDA_ERR_NUMBER,      /* scale or eps is negative or not finite */
    KDA_ERR_TYPE,        /* unknown element type */
    KDA_ERR_ALIGN,       /* a pointer is not aligned to its element type */
    KDA_ERR_STRIDE,      /* rows of an output overlap each other */
    KDA_ERR_ALIAS,       /* two sequences of a batch share a state or a window */
    KDA_ERR_ALGORITHM,   /* unknown algorithm */
    KDA_ERR_SCRATCH,     /* scratch is smaller than the size function says */
    KDA_ERR_WIDTH,       /* convolution width outside 1 .. KDA_CONV_MAX_WIDTH */
    KDA_ERR_ACTIVATION   /* no activation chosen, or an unknown one */
} kda_result;

/* The spelling of a result, "KDA_ERR_DIMS"; "KDA_ERR_UNKNOWN" for a value that is none. */
KDA_API const char *kda_result_name(kda_result result);
/* One sentence for a person. */
KDA_API const char *kda_result_text(kda_result result);

typedef enum kda_gate { /* 0 is no gate: a description must choose */
    KDA_GATE_LOG_DECAY = 1,
    KDA_GATE_SOFTPLUS = 2,
    KDA_GATE_BOUNDED = 3
} kda_gate;

typedef enum kda_beta { /* 0 is no form: a description must choose */
    KDA_BETA_VALUE = 1,
    KDA_BETA_LOGIT = 2,
    KDA_BETA_LOGIT_DOUBLED = 3
} kda_beta;

typedef enum kda_head_map { KDA_HEADS_GROUPED = 0, KDA_HEADS_TILED = 1 } kda_head_map;

typedef enum kda_type { KDA_F32 = 0 } kda_type;

typedef enum kda_algorithm {
    KDA_AUTO = 0,      /* recurrent below KDA_CHUNK tokens of a sequence in the call, else chunked */
    KDA_RECURRENT = 1,
    KDA_CHUNKED = 2
} kda_algorithm;

/* kda_desc.flags */
#define KDA_L2_NORM_QK 1u /* normalise queries and keys inside */

/* Tokens to a chunk of the chunked algorithm. */
#define KDA_CHUNK 16

/* The shape of a layer's operator: the same for all layers of a model. */
typedef struct kda_desc {
    size_t n_heads;        /* value heads: one state each */
    size_t n_qk_heads;     /* query/key heads, a divisor of n_heads; 0 means n_heads */
    size_t dim_k;          /* query and key channels of a head */
    size_t dim_v;          /* value channels of a head */
    kda_gate gate;         /* what args.g holds; no default */
    kda_beta beta;         /* what args.beta holds; no default */
    kda_head_map head_map; /* which query/key head serves a value head */
    uint32_t flags;        /* KDA_L2_NORM_QK */
    float scale;           /* of the query; 0 means 1 / sqrt(dim_k) */
    float lower_bound;     /* bounded gate: the lowest log-decay, < 0; other gates: 0 */
    float l2_eps;          /* added to the sum of squares; 0 means 1e-6 */
} kda_desc;

/* A tensor to read: element i of head h of token t is data[t*token_stride + h*head_stride + i].
 * Strides in elements, of either sign. */
typedef struct kda_input {
    const void *data;
    ptrdiff_t token_stride;
    ptrdiff_t head_stride;
    kda_type type;
} kda_input;

/* A tensor to write, the same way; its rows must not overlap each other. */
typedef struct kda_output {
    void *data;
    ptrdiff_t token_stride;
    ptrdiff_t head_stride;
    kda_type type;
} kda_output;

static inline kda_input kda_in_f32(const float *data, ptrdiff_t token_stride, ptrdiff_t head_stride) {
    kda_input view;
    view.data = data;
    view.token_stride = token_stride;
    view.head_stride = head_stride;
    view.type = KDA_F32;
    return view;
}

static inline kda_output kda_out_f32(float *data, ptrdiff_t token_stride, ptrdiff_t head_stride) {
    kda_output view;
    view.data = data;
    view.token_stride = token_stride;
    view.head_stride = head_stride;
    view.type = KDA_F32;
    return view;
}

/* One sequence of a batch: its next n_tokens rows of every tensor, and what it owns. A null state
 * (kda_forward) or window (kda_conv) marks padding: its rows are skipped and not written. */
typedef struct kda_seq {
    size_t n_tokens; /* 0 leaves state and window as they are */
    void *state;     /* kda_state_bytes(desc), float [n_heads][dim_v][dim_k] */
    void *window;    /* kda_conv_window_bytes(desc), float [width - 1][channels] */
} kda_seq;

/* How to run a call. Zeroed, but for scratch, is a good choice. */
typedef struct kda_run {
    kda_algorithm algorithm;
    void *scratch; /* kda_scratch_bytes(desc, n_seqs, run) bytes, any alignment */
    size_t scratch_bytes;
} kda_run;

/* ==== 2. The operator ========================================================================= */

typedef struct kda_args {
    kda_input q;           /* [tokens][n_qk_heads][dim_k] */
    kda_input k;           /* [tokens][n_qk_heads][dim_k] */
    kda_input v;           /* [tokens][n_heads][dim_v] */
    kda_input g;           /* [tokens][n_heads][dim_k], as desc.gate says */
    kda_input beta;        /* [tokens][n_heads][1], as desc.beta says */
    kda_output o;          /* [tokens][n_heads][dim_v]; may be v itself (same data and strides) */
    const float *A_log;    /* [n_heads]; softplus gate: needed; bounded gate: null means 0 */
    const float *dt_bias;  /* [n_heads][dim_k]; null means 0 */
    const kda_seq *seqs;   /* [n_seqs] */
    size_t n_seqs;
} kda_args;

/* Bytes of one sequence's state, n_heads * dim_v * dim_k floats; 0 if the description is invalid or
 * the size overflows. */
KDA_API size_t kda_state_bytes(const kda_desc *desc);

/* Bytes of scratch for a kda_forward of at most n_seqs sequences, whatever their lengths, run that
 * way (null: in any way of this version); 0 if something is invalid or the size overflows. */
KDA_API size_t kda_scratch_bytes(const kda_desc *desc, size_t n_seqs, const kda_run *run);

/* Runs every sequence of the batch through the recurrence (see THE MATHEMATICS): reads q, k, v, g,
 * beta, updates each state in place, writes o. Nothing but o = v may alias.
 * Errors: any of KDA_ERR_NULL .. KDA_ERR_SCRATCH but KDA_ERR_WIDTH and KDA_ERR_ACTIVATION. */
KDA_API kda_result kda_forward(const kda_desc *desc, const kda_args *args, const kda_run *run);

/* ==== 3. The state's life ===================================================================== */

/* Zeroes a state: stores zeros, so that nothing of an earlier owner (NaN included) survives. */
KDA_API kda_result kda_state_clear(const kda_desc *desc, void *state);

/* state[h][v][k] = kv[h][k][v] and back: the [n_heads][dim_k][dim_v] order of
 * flash-linear-attention's default, ONNX and the 48B's own code. No aliasing. */
KDA_API kda_result kda_state_import_kv(const kda_desc *desc, const float *kv, void *state);
KDA_API kda_result kda_state_export_kv(const kda_desc *desc, const void *state, float *kv);

/* ==== 4. The parts around it ================================================================== */

/* exp(x), 1 / (1 + exp(-x)) and log(1 + exp(x)): at most 2 ulp from the exact value over all of
 * float, subnormal results included; NaN gives NaN. These very functions are used inside. */
KDA_API float kda_exp(float x);
KDA_API float kda_sigmoid(float x);
KDA_API float kda_softplus(float x);

/* Raw gate to log-decay, g = gate(raw) as desc.gate says (not KDA_GATE_LOG_DECAY). kda_forward
 * given this g as KDA_GATE_LOG_DECAY gives the same bits as given the raw gate.
 * raw, g: [n_tokens][n_heads][dim_k]; g may be raw itself. A_log, dt_bias: as in kda_args. */
KDA_API kda_result kda_log_decay(const kda_desc *desc, size_t n_tokens, kda_input raw,
                                 const float *A_log, const float *dt_bias, kda_output g);

/* y = x / sqrt(sum(x^2) + eps) for each head of each token; eps 0 means 1e-6. x, y:
 * [n_tokens][n_heads][dim]; y may be x itself. (flash-linear-attention's l2norm.) */
KDA_API kda_result kda_l2_norm(size_t n_tokens, size_t n_heads, size_t dim, float eps, kda_input x,
                               kda_output y);

/* y = x / sqrt(mean(x^2) + eps) * weight * sigmoid(gate) for each head of each token: the norm
 * after the operator. x, gate, y: [n_tokens][n_heads][dim]; weight: [dim], shared by all heads; y
 * may be x or gate itself. (flash-linear-attention's FusedRMSNormGated with sigmoid.) */
KDA_API kda_result kda_gated_norm(size_t n_tokens, size_t n_heads, size_t dim, float eps,
                                  const float *weight, kda_input x, kda_input gate, kda_output y);

#define KDA_CONV_MAX_WIDTH 64

typedef enum kda_activation { /* 0 is none chosen: a description must choose */
    KDA_ACTIVATION_NONE = 1,
    KDA_ACTIVATION_SILU = 2
} kda_activation;

typedef struct kda_conv_desc {
    size_t channels;
    size_t width; /* taps, 1 .. KDA_CONV_MAX_WIDTH; Kimi: 4 */
    kda_activation activation;
} kda_conv_desc;

typedef struct kda_conv_args {
    kda_input x;         /* [tokens][channels]; head_stride is not used */
    kda_output y;        /* [tokens][channels]; may be x itself */
    const float *weight; /* [channels][width], the last tap for the current token */
    const kda_seq *seqs; /* [n_seqs]; n_tokens and window are used */
    size_t n_seqs;
} kda_conv_args;

/* Bytes of one sequence's window, (width - 1) * channels floats: the last inputs, oldest first;
 * zeros before the first token. 0 if the description is invalid, or width is 1 (no window needed:
 * pass any non-null pointer). */
KDA_API size_t kda_conv_window_bytes(const kda_conv_desc *desc);

/* Bytes of scratch for a kda_conv of at most n_seqs sequences; 0 as above. */
KDA_API size_t kda_conv_scratch_bytes(const kda_conv_desc *desc, size_t n_seqs);

/* The short causal convolution of each channel, and its activation:
 *     y[t][c] = act( sum over i < width of weight[c][i] x[t - width + 1 + i][c] )
 * with inputs before the call taken from the window, which then holds the last width - 1 inputs.
 * Any split of the tokens into calls gives the same bits.
 * Errors: KDA_ERR_NULL, _DIMS, _SIZE, _TYPE, _ALIGN, _STRIDE, _ALIAS, _SCRATCH, _WIDTH,
 * _ACTIVATION. */
KDA_API kda_result kda_conv(const kda_conv_desc *desc, const kda_conv_args *args,
                            const kda_run *run);

#ifdef __cplusplus
}
#endif
#endif /* KDA_H */

/* ==== end of the interface ==================================================================== */

#if defined(KDA_IMPLEMENTATION) && !defined(KDA_IMPLEMENTATION_DONE)
#define KDA_IMPLEMENTATION_DONE

#if defined(__FAST_MATH__) && !defined(KDA_ALLOW_FAST_MATH)
#error "kda.h: -ffast-math breaks -inf, NaN and bit-exactness; define KDA_ALLOW_FAST_MATH to accept"
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

/* ---- shared with attnres.h, but for the prefix ---- */

/* 2^n for n in -126 .. 127. */
static float kdai_power_of_2(int n) {
    uint32_t bits = (uint32_t)(n + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return power;
}

/* exp(x) = 2^n exp(r), n = round(x / ln 2), |r| <= ln(2)/2; polynomial of degree 6 (error 1e-8). */
static float kdai_exp(float x) {
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
    return y * kdai_power_of_2(half) * kdai_power_of_2(whole - half);
}

#define KDAI_LANES ((size_t)16)

/* Adds the lanes of a sum in the one fixed order. */
static float kdai_add_lanes(float *lane) {
    for (size_t apart = KDAI_LANES / 2; apart >= 1; apart /= 2)
        for (size_t i = 0; i < apart; i++) lane[i] += lane[i + apart];
    return lane[0];
}

/* Adds the products of n elements to a sum's lanes, element i to lane i % KDAI_LANES; a last block that
 * is short counts as padded with zeros, which turns a lane of -0 into +0. */
static void kdai_dot_lanes(const float *x, const float *y, size_t n, float *lane) {
    for (size_t i = 0; i < n; i += KDAI_LANES) {
        size_t some = n - i < KDAI_LANES ? n - i : KDAI_LANES;
        for (size_t l = 0; l < some; l++) lane[l] = fmaf(x[i + l], y[i + l], lane[l]);
        for (size_t l = some; l < KDAI_LANES; l++) lane[l] += 0.0f;
    }
}

/* ---- end of shared text ---- */

/* x . y in the fixed shape described under NUMERICS. */
static float kdai_dot(const float *x, const float *y, size_t n) {
    float lane[KDAI_LANES] = {0};
    kdai_dot_lanes(x, y, n, lane);
    return kdai_add_lanes(lane);
}

KDA_API float kda_exp(float x) {
    return kdai_exp(x);
}

/* numerator / (base + z) for 0 <= z <= 1 and base 1 or 2: the rounding errors of the sum and of
 * the quotient are worked out and added back, `inverse` being 1 / (base + z) to one digit. */
static float kdai_exact_quotient(float numerator, float base, float z, float inverse, float *rest) {
    float sum = base + z;
    float sum_error = z - (sum - base);
    float quotient = numerator / sum;
    float remainder = fmaf(-quotient, sum, numerator);
    remainder = fmaf(-quotient, sum_error, remainder);
    *rest = remainder * inverse;
    return quotient;
}

/* 1/(1+z) or z/(1+z) with z = exp(-|x|): no exponential of a positive number. */
KDA_API float kda_sigmoid(float x) {
    float z = kdai_exp(-fabsf(x)), rest;
    float quotient = kdai_exact_quotient(x >= 0.0f ? 1.0f : z, 1.0f, z, fmaf(-0.5f, z, 1.0f), &rest);
    return quotient + rest;
}

/* max(x, 0) + log1p(z), z = exp(-|x|); log1p(z) = 2 atanh(s), s = z / (2 + z) <= 1/3, and
 * atanh(s) = s + s^3 P(s^2), P of degree 4 (error 1e-9). */
KDA_API float kda_softplus(float x) {
    float z = kdai_exp(-fabsf(x)), rest;
    float s = kdai_exact_quotient(z, 2.0f, z, fmaf(-0.16f, z, 0.5f), &rest);
    float square = s * s;
    float p = 0x1.dba26p-4f;
    p = fmaf(p, square, 0x1.bc8cf8p-4f);
    p = fmaf(p, square, 0x1.24c926p-3f);
    p = fmaf(p, square, 0x1.9998d4p-3f);
    p = fmaf(p, square, 0x1.555556p-2f);
    float log1p_z = 2.0f * s;
    log1p_z = fmaf(2.0f, fmaf(s * square, p, rest), log1p_z);
    return x > 0.0f ? x + log1p_z : x != x ? x : log1p_z;
}

/* ==== 6. Checks =============================================================================== */

/* In the order of kda_result. */
static const char *const kdai_results[][2] = {
    {"KDA_OK", "no error"},
    {"KDA_ERR_NULL", "a pointer that the call needs is null"},
    {"KDA_ERR_DIMS", "a dimension or head count is 0, or n_qk_heads does not divide n_heads"},
    {"KDA_ERR_SIZE", "a size or an extent is more bytes than can be addressed"},
    {"KDA_ERR_GATE", "no gate or an unknown one, or A_log or dt_bias with a ready log-decay"},
    {"KDA_ERR_LOWER_BOUND", "lower_bound must be finite and below 0 if the gate is bounded, else 0"},
    {"KDA_ERR_BETA", "no beta form or an unknown one is chosen"},
    {"KDA_ERR_HEAD_MAP", "the head map is unknown"},
    {"KDA_ERR_FLAGS", "an unknown flag bit is set"},
    {"KDA_ERR_NUMBER", "scale or eps is negative or not finite"},
    {"KDA_ERR_TYPE", "an element type is unknown"},
    {"KDA_ERR_ALIGN", "a pointer is not aligned to its element type"},
    {"KDA_ERR_STRIDE", "rows of an output overlap each other"},
    {"KDA_ERR_ALIAS", "two sequences of the batch share memory of a state or window"},
    {"KDA_ERR_ALGORITHM", "the algorithm is unknown"},
    {"KDA_ERR_SCRATCH", "scratch is null or smaller than its size function says"},
    {"KDA_ERR_WIDTH", "the convolution width is not between 1 and KDA_CONV_MAX_WIDTH"},
    {"KDA_ERR_ACTIVATION", "no activation or an unknown one is chosen"},
};

static const char *kdai_describe(kda_result result, size_t column) {
    static const char *const unknown[2] = {"KDA_ERR_UNKNOWN", "not a result of this library"};
    size_t n = sizeof kdai_results / sizeof kdai_results[0];
    return (size_t)result < n ? kdai_results[(size_t)result][column] : unknown[column];
}

KDA_API const char *kda_result_name(kda_result result) {
    return kdai_describe(result, 0);
}

KDA_API const char *kda_result_text(kda_result result) {
    return kdai_describe(result, 1);
}

#define KDAI_MAX_BYTES ((size_t)PTRDIFF_MAX)
#define KDAI_SCRATCH_ALIGN ((size_t)64)

/* Products and sums of sizes: 0 when a factor is 0 or the result passes KDAI_MAX_BYTES, so that one
 * test at the end of a chain finds any overflow in it. */
static size_t kdai_product(size_t a, size_t b) {
    if (a == 0 || b == 0 || a > KDAI_MAX_BYTES / b) return 0;
    return a * b;
}
static size_t kdai_sum(size_t a, size_t b) {
    if (a == 0 || b == 0 || a > KDAI_MAX_BYTES || b > KDAI_MAX_BYTES - a) return 0;
    return a + b;
}

static int kdai_is_negative_or_not_finite(float x) {
    return !(x >= 0.0f && x < INFINITY);
}

static int kdai_is_misaligned(const void *pointer, size_t size) {
    return (uintptr_t)pointer % size != 0;
}

static size_t kdai_type_bytes(kda_type type) {
    return type == KDA_F32 ? sizeof(float) : 0;
}

static size_t kdai_step(ptrdiff_t stride) {
    return stride < 0 ? (size_t)0 - (size_t)stride : (size_t)stride;
}

/* The farthest a stride leads in count rows, in elements. Returns 0 if it overflows. */
static int kdai_reach(ptrdiff_t stride, size_t count, size_t *reach) {
    size_t step = kdai_step(stride);
    if (count > 1 && step > KDAI_MAX_BYTES / (count - 1)) return 0;
    *reach = count > 1 ? step * (count - 1) : 0;
    return 1;
}

static kda_result kdai_check_view(const void *data, ptrdiff_t token_stride, ptrdiff_t head_stride,
                                  kda_type type, size_t tokens, size_t heads, size_t dim) {
    size_t size = kdai_type_bytes(type), by_token, by_head;
    if (size == 0) return KDA_ERR_TYPE;
    if (tokens == 0) return KDA_OK;
    if (!data) return KDA_ERR_NULL;
    if (kdai_is_misaligned(data, size)) return KDA_ERR_ALIGN;
    if (!kdai_reach(token_stride, tokens, &by_token) || !kdai_reach(head_stride, heads, &by_head))
        return KDA_ERR_SIZE;
    size_t most = KDAI_MAX_BYTES / size; /* three terms of at most this do not wrap a size_t */
    if (by_token > most || by_head > most - by_token || dim > most - by_token - by_head)
        return KDA_ERR_SIZE;
    return KDA_OK;
}

static kda_result kdai_check_input(kda_input x, size_t tokens, size_t heads, size_t dim) {
    return kdai_check_view(x.data, x.token_stride, x.head_stride, x.type, tokens, heads, dim);
}

/* Rows of dim elements are apart when the nearer of the two strides clears a row and the farther
 * one clears all rows of the nearer. */
static kda_result kdai_check_output(kda_output y, size_t tokens, size_t heads, size_t dim) {
    kda_result result =
        kdai_check_view(y.data, y.token_stride, y.head_stride, y.type, tokens, heads, dim);
    if (result != KDA_OK || tokens == 0) return result;
    size_t near_step = kdai_step(y.head_stride), near_count = heads;
    size_t far_step = kdai_step(y.token_stride), far_count = tokens;
    if (near_count > 1 && far_count > 1 && far_step < near_step) {
        size_t step = near_step, count = near_count;
        near_step = far_step, near_count = far_count;
        far_step = step, far_count = count;
    }
    if (near_count > 1 && near_step < dim) return KDA_ERR_STRIDE;
    size_t span = near_count > 1 ? near_step * (near_count - 1) + dim : dim;
    return far_count > 1 && far_step < span ? KDA_ERR_STRIDE : KDA_OK;
}

static size_t kdai_qk_heads(const kda_desc *desc) {
    return desc->n_qk_heads ? desc->n_qk_heads : desc->n_heads;
}

static kda_result kdai_check_desc(const kda_desc *desc) {
    if (!desc) return KDA_ERR_NULL;
    if (desc->n_heads == 0 || desc->dim_k == 0 || desc->dim_v == 0) return KDA_ERR_DIMS;
    if (desc->n_heads % kdai_qk_heads(desc) != 0) return KDA_ERR_DIMS;
    if (desc->gate != KDA_GATE_LOG_DECAY && desc->gate != KDA_GATE_SOFTPLUS &&
        desc->gate != KDA_GATE_BOUNDED)
        return KDA_ERR_GATE;
    if (desc->gate == KDA_GATE_BOUNDED
            ? !(desc->lower_bound < 0.0f && desc->lower_bound > -INFINITY)
            : desc->lower_bound != 0.0f)
        return KDA_ERR_LOWER_BOUND;
    if (desc->beta != KDA_BETA_VALUE && desc->beta != KDA_BETA_LOGIT &&
        desc->beta != KDA_BETA_LOGIT_DOUBLED)
        return KDA_ERR_BETA;
    if (desc->head_map != KDA_HEADS_GROUPED && desc->head_map != KDA_HEADS_TILED)
        return KDA_ERR_HEAD_MAP;
    if (desc->flags & ~KDA_L2_NORM_QK) return KDA_ERR_FLAGS;
    if (kdai_is_negative_or_not_finite(desc->scale) || kdai_is_negative_or_not_finite(desc->l2_eps))
        return KDA_ERR_NUMBER;
    size_t floats = kdai_product(kdai_product(desc->n_heads, desc->dim_v), desc->dim_k);
    return kdai_product(floats, sizeof(float)) ? KDA_OK : KDA_ERR_SIZE;
}

/* The weights that go with a gate. */
static kda_result kdai_check_gate(const kda_desc *desc, const float *A_log, const float *dt_bias) {
    if (desc->gate == KDA_GATE_LOG_DECAY) return A_log || dt_bias ? KDA_ERR_GATE : KDA_OK;
    if (desc->gate == KDA_GATE_SOFTPLUS && !A_log) return KDA_ERR_NULL;
    if (kdai_is_misaligned(A_log, sizeof(float)) || kdai_is_misaligned(dt_bias, sizeof(float)))
        return KDA_ERR_ALIGN;
    return KDA_OK;
}

/* Shell sort: in place, no worst case that a batch could hit, short. */
static void kdai_sort(uintptr_t *x, size_t n) {
    for (size_t gap = n / 2; gap > 0; gap /= 2)
        for (size_t i = gap; i < n; i++) {
            uintptr_t moved = x[i];
            size_t j = i;
            for (; j >= gap && x[j - gap] > moved; j -= gap) x[j] = x[j - gap];
            x[j] = moved;
        }
}

/* The batch: lengths add up, and no two sequences own overlapping memory. Which pointer of a
 * sequence counts is `window`'s choice; `sorted` is scratch for n_seqs addresses. */
static kda_result kdai_check_seqs(const kda_seq *seqs, size_t n_seqs, int window, size_t bytes,
                                  uintptr_t *sorted, size_t *n_tokens) {
    size_t owners = 0;
    *n_tokens = 0;
    for (size_t i = 0; i < n_seqs; i++) {
        const void *owned = window ? seqs[i].window : seqs[i].state;
        if (seqs[i].n_tokens > KDAI_MAX_BYTES - *n_tokens) return KDA_ERR_SIZE;
        *n_tokens += seqs[i].n_tokens;
        if (!owned) continue;
        if (kdai_is_misaligned(owned, sizeof(float))) return KDA_ERR_ALIGN;
        sorted[owners++] = (uintptr_t)owned;
    }
    kdai_sort(sorted, owners);
    for (size_t i = 1; i < owners; i++)
        if (sorted[i] - sorted[i - 1] < bytes) return KDA_ERR_ALIAS;
    return KDA_OK;
}

/* ==== 7. Scratch ============================================================================== */

/* Hands out aligned pieces of scratch. With no memory it only counts: the size functions and the
 * calls run the same code. `used` starts at the room for aligning and is 0 for good on overflow. */
typedef struct kdai_arena {
    unsigned char *aligned;
    size_t used;
} kdai_arena;

static kdai_arena kdai_arena_on(void *memory) {
    kdai_arena arena;
    size_t past = (uintptr_t)memory % KDAI_SCRATCH_ALIGN;
    arena.aligned = (unsigned char *)memory;
    if (past != 0) arena.aligned += KDAI_SCRATCH_ALIGN - past;
    arena.used = KDAI_SCRATCH_ALIGN;
    return arena;
}

static void *kdai_take(kdai_arena *arena, size_t count, size_t size) {
    size_t start = arena->used - KDAI_SCRATCH_ALIGN;
    size_t bytes = kdai_sum(kdai_product(count, size), KDAI_SCRATCH_ALIGN - 1);
    arena->used = kdai_sum(arena->used, bytes / KDAI_SCRATCH_ALIGN * KDAI_SCRATCH_ALIGN);
    return arena->aligned ? arena->aligned + start : NULL;
}

static float *kdai_take_floats(kdai_arena *arena, size_t count) {
    return (float *)kdai_take(arena, count, sizeof(float));
}

/* What a block of at most KDA_CHUNK tokens of one head needs: rows of dim_k for each token,
 * columns of KDAI_ROWS value channels for each token. */
#define KDAI_ROWS ((size_t)32)
typedef struct kdai_work {
    float *q, *k;   /* [KDA_CHUNK][dim_k] normalised, q scaled */
    float *decay;   /* [KDA_CHUNK][dim_k] exp(g) */
    float *k_seen;  /* [KDA_CHUNK][dim_k] k as the state before sees it: see each algorithm */
    float *q_seen;  /* [KDA_CHUNK][dim_k] */
    float *beta;    /* [KDA_CHUNK] */
    float *kq;      /* [KDA_CHUNK] k . q of each token (recurrent) */
    float *k_left;  /* [KDA_CHUNK][dim_k] k as the state after the chunk sees it (chunked) */
    float *total;   /* [dim_k] decay over the whole chunk (chunked) */
    float *A, *P;   /* [KDA_CHUNK][KDA_CHUNK] (chunked) */
    float *u;       /* [KDA_CHUNK] corrections of one value channel (chunked) */
    float *v, *o;   /* [KDA_CHUNK][KDAI_ROWS] */
    uintptr_t *owned; /* [n_seqs] addresses, for the check of the batch */
} kdai_work;

static size_t kdai_carve(const kda_desc *desc, size_t n_seqs, int chunked, void *memory,
                         kdai_work *work) {
    kdai_arena arena = kdai_arena_on(memory);
    size_t block = kdai_product(KDA_CHUNK, desc->dim_k);
    memset(work, 0, sizeof *work);
    work->q = kdai_take_floats(&arena, block);
    work->k = kdai_take_floats(&arena, block);
    work->decay = kdai_take_floats(&arena, block);
    work->k_seen = kdai_take_floats(&arena, block);
    work->q_seen = kdai_take_floats(&arena, block);
    work->beta = kdai_take_floats(&arena, KDA_CHUNK);
    work->kq = kdai_take_floats(&arena, KDA_CHUNK);
    work->v = kdai_take_floats(&arena, KDA_CHUNK * KDAI_ROWS);
    work->o = kdai_take_floats(&arena, KDA_CHUNK * KDAI_ROWS);
    work->owned = (uintptr_t *)kdai_take(&arena, n_seqs ? n_seqs : 1, sizeof(uintptr_t));
    if (chunked) {
        work->k_left = kdai_take_floats(&arena, block);
        work->total = kdai_take_floats(&arena, desc->dim_k);
        work->A = kdai_take_floats(&arena, KDA_CHUNK * KDA_CHUNK);
        work->P = kdai_take_floats(&arena, KDA_CHUNK * KDA_CHUNK);
        work->u = kdai_take_floats(&arena, KDA_CHUNK);
    }
    return arena.used;
}

KDA_API size_t kda_state_bytes(const kda_desc *desc) {
    if (kdai_check_desc(desc) != KDA_OK) return 0;
    return desc->n_heads * desc->dim_v * desc->dim_k * sizeof(float);
}

KDA_API size_t kda_scratch_bytes(const kda_desc *desc, size_t n_seqs, const kda_run *run) {
    kdai_work work;
    if (kdai_check_desc(desc) != KDA_OK) return 0;
    return kdai_carve(desc, n_seqs, !run || run->algorithm != KDA_RECURRENT, NULL, &work);
}

/* ==== 8. A block of tokens of one head: what both algorithms start from ======================= */

static const float *kdai_row(kda_input x, size_t token, size_t head) {
    return (const float *)x.data + (ptrdiff_t)token * x.token_stride +
           (ptrdiff_t)head * x.head_stride;
}

static float *kdai_output_row(kda_output y, size_t token, size_t head) {
    return (float *)y.data + (ptrdiff_t)token * y.token_stride + (ptrdiff_t)head * y.head_stride;
}

/* y = x * factor; y may be x. */
static void kdai_scale(const float *x, float factor, size_t n, float *y) {
    for (size_t i = 0; i < n; i++) y[i] = x[i] * factor;
}

static float kdai_inverse_norm(const float *x, size_t n, float eps) {
    return 1.0f / sqrtf(kdai_dot(x, x, n) + eps);
}

static float kdai_eps(float eps) {
    return eps == 0.0f ? 1e-6f : eps;
}

/* The log-decay of one key channel from its raw gate; `a` is exp(A_log) of the head. Never above
 * 0, so that its exponential is a factor in [0, 1]; NaN stays NaN. */
static float kdai_gate(const kda_desc *desc, float a, float bias, float raw) {
    if (desc->gate == KDA_GATE_LOG_DECAY) return raw > 0.0f ? 0.0f : raw;
    float z = raw + bias;
    if (desc->gate == KDA_GATE_SOFTPLUS) return -(a * kda_softplus(z));
    return desc->lower_bound * kda_sigmoid(a * z);
}

static void kdai_gate_row(const kda_desc *desc, const float *A_log, const float *dt_bias,
                          size_t head, const float *raw, float *g) {
    float a = A_log ? kdai_exp(A_log[head]) : 1.0f;
    const float *bias = dt_bias ? dt_bias + head * desc->dim_k : NULL;
    for (size_t i = 0; i < desc->dim_k; i++) g[i] = kdai_gate(desc, a, bias ? bias[i] : 0.0f, raw[i]);
}

static float kdai_beta(const kda_desc *desc, float x) {
    if (desc->beta == KDA_BETA_VALUE) return x;
    return kda_sigmoid(x) * (desc->beta == KDA_BETA_LOGIT_DOUBLED ? 2.0f : 1.0f);
}

static size_t kdai_qk_head(const kda_desc *desc, size_t head) {
    size_t n = kdai_qk_heads(desc);
    return desc->head_map == KDA_HEADS_TILED ? head % n : head / (desc->n_heads / n);
}

/* Fills q, k, decay and beta of `work` for n tokens of a head. */
static void kdai_prepare(const kda_desc *desc, const kda_args *args, size_t head, size_t token,
                         size_t n, kdai_work *work) {
    size_t dim = desc->dim_k, qk_head = kdai_qk_head(desc, head);
    float scale = desc->scale == 0.0f ? 1.0f / sqrtf((float)dim) : desc->scale;
    for (size_t i = 0; i < n; i++) {
        const float *q = kdai_row(args->q, token + i, qk_head);
        const float *k = kdai_row(args->k, token + i, qk_head);
        float q_factor = 1.0f, k_factor = 1.0f;
        if (desc->flags & KDA_L2_NORM_QK) {
            q_factor = kdai_inverse_norm(q, dim, kdai_eps(desc->l2_eps));
            k_factor = kdai_inverse_norm(k, dim, kdai_eps(desc->l2_eps));
        }
        kdai_scale(q, q_factor, dim, work->q + i * dim);
        kdai_scale(work->q + i * dim, scale, dim, work->q + i * dim);
        kdai_scale(k, k_factor, dim, work->k + i * dim);
        float *decay = work->decay + i * dim;
        kdai_gate_row(desc, args->A_log, args->dt_bias, head, kdai_row(args->g, token + i, head),
                      decay);
        for (size_t d = 0; d < dim; d++) decay[d] = kdai_exp(decay[d]);
        work->beta[i] = kdai_beta(desc, *kdai_row(args->beta, token + i, head));
    }
}

/* Columns first .. first + rows of v into the work block, and of the work block into o. */
static void kdai_load_values(const kda_args *args, size_t head, size_t token, size_t n,
                             size_t first, size_t rows, kdai_work *work) {
    for (size_t i = 0; i < n; i++)
        memcpy(work->v + i * KDAI_ROWS, kdai_row(args->v, token + i, head) + first,
               rows * sizeof(float));
}

static void kdai_store_outputs(const kda_args *args, size_t head, size_t token, size_t n,
                               size_t first, size_t rows, const kdai_work *work) {
    for (size_t i = 0; i < n; i++)
        memcpy(kdai_output_row(args->o, token + i, head) + first, work->o + i * KDAI_ROWS,
               rows * sizeof(float));
}

/* ==== 9. The recurrent algorithm ============================================================== */

/* k_seen = e k and q_seen = e q: what the state before a token is read with. */
static void kdai_recurrent_prepare(size_t dim, size_t n, kdai_work *work) {
    for (size_t i = 0; i < n * dim; i++) {
        work->k_seen[i] = work->decay[i] * work->k[i];
        work->q_seen[i] = work->decay[i] * work->q[i];
    }
    for (size_t i = 0; i < n; i++)
        work->kq[i] = kdai_dot(work->k + i * dim, work->q + i * dim, dim);
}

/* One value channel: its state row s [dim] through n tokens, v and o at stride KDAI_ROWS.
 * Rows do not depend on each other, so walking a row through all tokens gives the bits of walking
 * all rows through each token, while the row stays in the cache. */
static void kdai_recurrent_row(const kdai_work *work, size_t dim, size_t n, float *s,
                               const float *v, float *o) {
    for (size_t i = 0; i < n; i++) {
        const float *decay = work->decay + i * dim, *k = work->k + i * dim;
        float a = kdai_dot(s, work->k_seen + i * dim, dim);
        float b = kdai_dot(s, work->q_seen + i * dim, dim);
        float u = work->beta[i] * (v[i * KDAI_ROWS] - a);
        o[i * KDAI_ROWS] = fmaf(work->kq[i], u, b);
        for (size_t d = 0; d < dim; d++) s[d] = fmaf(k[d], u, s[d] * decay[d]);
    }
}

/* ==== 10. The chunked algorithm ===============================================================
 *
 * With D(j, i) the product of the decays of tokens j+1 .. i of the chunk (per key channel), tokens
 * counted from 0 and S the state before the chunk:
 *
 *     A[i][j] = beta_i k_i . D(j, i) k_j    j < i       k_seen_i = D(-1, i) k_i
 *     P[i][j] =        q_i . D(j, i) k_j    j <= i      q_seen_i = D(-1, i) q_i
 *                                                       k_left_j = D(j, n-1) k_j
 *     u_i = beta_i (v_i - S^T k_seen_i) - sum over j < i of A[i][j] u_j
 *     o_i = S^T q_seen_i + sum over j <= i of P[i][j] u_j
 *     S  <- Diag(D(-1, n-1)) S + sum over j of k_left_j u_j^T
 *
 * (Kimi Linear, eqs. 6 to 9, solved against the right-hand side.) Every D is a running product of
 * factors in [0, 1]: it can only shrink, to 0 if need be, which is its limit. The triangular system
 * is solved by forward substitution, which needs no bound on A. */

static void kdai_chunk_prepare(size_t dim, size_t n, kdai_work *work) {
    for (size_t j = 0; j < n; j++) {
        float *left = work->k_left + j * dim; /* D(j, i) k_j, while i runs on */
        memcpy(left, work->k + j * dim, dim * sizeof(float));
        work->P[j * KDA_CHUNK + j] = kdai_dot(work->q + j * dim, left, dim);
        for (size_t i = j + 1; i < n; i++) {
            for (size_t d = 0; d < dim; d++) left[d] *= work->decay[i * dim + d];
            work->A[i * KDA_CHUNK + j] = work->beta[i] * kdai_dot(work->k + i * dim, left, dim);
            work->P[i * KDA_CHUNK + j] = kdai_dot(work->q + i * dim, left, dim);
        }
    }
    for (size_t d = 0; d < dim; d++) work->total[d] = 1.0f;
    for (size_t i = 0; i < n; i++)
        for (size_t d = 0; d < dim; d++) {
            work->total[d] *= work->decay[i * dim + d];
            work->k_seen[i * dim + d] = work->total[d] * work->k[i * dim + d];
            work->q_seen[i * dim + d] = work->total[d] * work->q[i * dim + d];
        }
}

/* One value channel through a chunk of n tokens; arguments as kdai_recurrent_row. */
static void kdai_chunk_row(const kdai_work *work, size_t dim, size_t n, float *s, const float *v,
                           float *o) {
    float *u = work->u;
    for (size_t i = 0; i < n; i++) {
        float read = kdai_dot(s, work->k_seen + i * dim, dim);
        u[i] = work->beta[i] * (v[i * KDAI_ROWS] - read);
        for (size_t j = 0; j < i; j++) u[i] = fmaf(-work->A[i * KDA_CHUNK + j], u[j], u[i]);
    }
    for (size_t i = 0; i < n; i++) {
        float sum = kdai_dot(s, work->q_seen + i * dim, dim);
        for (size_t j = 0; j <= i; j++) sum = fmaf(work->P[i * KDA_CHUNK + j], u[j], sum);
        o[i * KDAI_ROWS] = sum;
    }
    for (size_t d = 0; d < dim; d++) s[d] *= work->total[d];
    for (size_t j = 0; j < n; j++)
        for (size_t d = 0; d < dim; d++) s[d] = fmaf(work->k_left[j * dim + d], u[j], s[d]);
}

/* ==== 11. The operator ======================================================================== */

/* n tokens of one head of one sequence; `state` is that head's [dim_v][dim_k]. */
static void kdai_run_head(const kda_desc *desc, const kda_args *args, int chunked, size_t head,
                          size_t token, size_t n_tokens, float *state, kdai_work *work) {
    size_t dim = desc->dim_k;
    for (size_t done = 0; done < n_tokens; done += KDA_CHUNK) {
        size_t n = n_tokens - done < KDA_CHUNK ? n_tokens - done : KDA_CHUNK;
        kdai_prepare(desc, args, head, token + done, n, work);
        if (chunked)
            kdai_chunk_prepare(dim, n, work);
        else
            kdai_recurrent_prepare(dim, n, work);
        for (size_t first = 0; first < desc->dim_v; first += KDAI_ROWS) {
            size_t rows = desc->dim_v - first < KDAI_ROWS ? desc->dim_v - first : KDAI_ROWS;
            kdai_load_values(args, head, token + done, n, first, rows, work);
            for (size_t r = 0; r < rows; r++) {
                float *s = state + (first + r) * dim;
                if (chunked)
                    kdai_chunk_row(work, dim, n, s, work->v + r, work->o + r);
                else
                    kdai_recurrent_row(work, dim, n, s, work->v + r, work->o + r);
            }
            kdai_store_outputs(args, head, token + done, n, first, rows, work);
        }
    }
}

/* Whether a sequence of n_tokens in this call goes the chunked way; it depends on nothing else. */
static int kdai_is_chunked(kda_algorithm algorithm, size_t n_tokens) {
    return algorithm == KDA_CHUNKED || (algorithm == KDA_AUTO && n_tokens >= KDA_CHUNK);
}

static kda_result kdai_check_tensors(const kda_desc *desc, const kda_args *args, size_t tokens) {
    size_t heads = desc->n_heads, qk_heads = kdai_qk_heads(desc);
    kda_result result = kdai_check_gate(desc, args->A_log, args->dt_bias);
    if (result == KDA_OK) result = kdai_check_input(args->q, tokens, qk_heads, desc->dim_k);
    if (result == KDA_OK) result = kdai_check_input(args->k, tokens, qk_heads, desc->dim_k);
    if (result == KDA_OK) result = kdai_check_input(args->v, tokens, heads, desc->dim_v);
    if (result == KDA_OK) result = kdai_check_input(args->g, tokens, heads, desc->dim_k);
    if (result == KDA_OK) result = kdai_check_input(args->beta, tokens, heads, 1);
    if (result == KDA_OK) result = kdai_check_output(args->o, tokens, heads, desc->dim_v);
    return result;
}

static kda_result kdai_check_forward(const kda_desc *desc, const kda_args *args,
                                     const kda_run *run, kdai_work *work) {
    size_t n_tokens;
    kda_result result = kdai_check_desc(desc);
    if (result != KDA_OK) return result;
    if (!args || !run || (!args->seqs && args->n_seqs > 0)) return KDA_ERR_NULL;
    if (run->algorithm != KDA_AUTO && run->algorithm != KDA_RECURRENT &&
        run->algorithm != KDA_CHUNKED)
        return KDA_ERR_ALGORITHM;
    size_t needed = kda_scratch_bytes(desc, args->n_seqs, run);
    if (needed == 0) return KDA_ERR_SIZE;
    if (!run->scratch || run->scratch_bytes < needed) return KDA_ERR_SCRATCH;
    kdai_carve(desc, args->n_seqs, run->algorithm != KDA_RECURRENT, run->scratch, work);
    result = kdai_check_seqs(args->seqs, args->n_seqs, 0, kda_state_bytes(desc), work->owned,
                             &n_tokens);
    return result == KDA_OK ? kdai_check_tensors(desc, args, n_tokens) : result;
}

KDA_API kda_result kda_forward(const kda_desc *desc, const kda_args *args, const kda_run *run) {
    kdai_work work;
    kda_result result = kdai_check_forward(desc, args, run, &work);
    if (result != KDA_OK) return result;
    size_t token = 0;
    for (size_t i = 0; i < args->n_seqs; i++) {
        const kda_seq *seq = &args->seqs[i];
        int chunked = kdai_is_chunked(run->algorithm, seq->n_tokens);
        for (size_t head = 0; seq->state && head < desc->n_heads; head++)
            kdai_run_head(desc, args, chunked, head, token, seq->n_tokens,
                          (float *)seq->state + head * desc->dim_v * desc->dim_k, &work);
        token += seq->n_tokens;
    }
    return KDA_OK;
}

/* ==== 12. The state's life ==================================================================== */

static kda_result kdai_check_state(const kda_desc *desc, const void *state, const void *other) {
    kda_result result = kdai_check_desc(desc);
    if (result != KDA_OK) return result;
    if (!state || !other) return KDA_ERR_NULL;
    if (kdai_is_misaligned(state, sizeof(float)) || kdai_is_misaligned(other, sizeof(float)))
        return KDA_ERR_ALIGN;
    return KDA_OK;
}

KDA_API kda_result kda_state_clear(const kda_desc *desc, void *state) {
    if (!state) return KDA_ERR_NULL;
    kda_result result = kdai_check_state(desc, state, state);
    if (result != KDA_OK) return result;
    memset(state, 0, kda_state_bytes(desc));
    return KDA_OK;
}

/* to[c][r] = from[r][c], for each head. */
static void kdai_transpose_heads(size_t heads, size_t rows, size_t columns, const float *from,
                                 float *to) {
    for (size_t h = 0; h < heads; h++)
        for (size_t r = 0; r < rows; r++)
            for (size_t c = 0; c < columns; c++)
                to[(h * columns + c) * rows + r] = from[(h * rows + r) * columns + c];
}

KDA_API kda_result kda_state_import_kv(const kda_desc *desc, const float *kv, void *state) {
    kda_result result = kdai_check_state(desc, state, kv);
    if (result != KDA_OK) return result;
    kdai_transpose_heads(desc->n_heads, desc->dim_k, desc->dim_v, kv, (float *)state);
    return KDA_OK;
}

KDA_API kda_result kda_state_export_kv(const kda_desc *desc, const void *state, float *kv) {
    kda_result result = kdai_check_state(desc, state, kv);
    if (result != KDA_OK) return result;
    kdai_transpose_heads(desc->n_heads, desc->dim_v, desc->dim_k, (const float *)state, kv);
    return KDA_OK;
}

/* ==== 13. The parts around it ================================================================= */

KDA_API kda_result kda_log_decay(const kda_desc *desc, size_t n_tokens, kda_input raw,
                                 const float *A_log, const float *dt_bias, kda_output g) {
    kda_result result = kdai_check_desc(desc);
    if (result == KDA_OK && desc->gate == KDA_GATE_LOG_DECAY) result = KDA_ERR_GATE;
    if (result == KDA_OK) result = kdai_check_gate(desc, A_log, dt_bias);
    if (result == KDA_OK) result = kdai_check_input(raw, n_tokens, desc->n_heads, desc->dim_k);
    if (result == KDA_OK) result = kdai_check_output(g, n_tokens, desc->n_heads, desc->dim_k);
    if (result != KDA_OK) return result;
    for (size_t t = 0; t < n_tokens; t++)
        for (size_t h = 0; h < desc->n_heads; h++)
            kdai_gate_row(desc, A_log, dt_bias, h, kdai_row(raw, t, h), kdai_output_row(g, t, h));
    return KDA_OK;
}

static kda_result kdai_check_norm(size_t n_tokens, size_t n_heads, size_t dim, float eps,
                                  kda_input x, kda_output y) {
    if (n_heads == 0 || dim == 0) return KDA_ERR_DIMS;
    if (kdai_is_negative_or_not_finite(eps)) return KDA_ERR_NUMBER;
    kda_result result = kdai_check_input(x, n_tokens, n_heads, dim);
    return result == KDA_OK ? kdai_check_output(y, n_tokens, n_heads, dim) : result;
}

KDA_API kda_result kda_l2_norm(size_t n_tokens, size_t n_heads, size_t dim, float eps, kda_input x,
                               kda_output y) {
    kda_result result = kdai_check_norm(n_tokens, n_heads, dim, eps, x, y);
    if (result != KDA_OK) return result;
    for (size_t t = 0; t < n_tokens; t++)
        for (size_t h = 0; h < n_heads; h++) {
            const float *row = kdai_row(x, t, h);
            kdai_scale(row, kdai_inverse_norm(row, dim, kdai_eps(eps)), dim,
                       kdai_output_row(y, t, h));
        }
    return KDA_OK;
}

static void kdai_gated_norm_row(const float *x, const float *gate, const float *weight, size_t dim,
                                float eps, float *y) {
    float inverse = 1.0f / sqrtf(kdai_dot(x, x, dim) / (float)dim + eps);
    for (size_t i = 0; i < dim; i++) y[i] = x[i] * inverse * weight[i] * kda_sigmoid(gate[i]);
}

KDA_API kda_result kda_gated_norm(size_t n_tokens, size_t n_heads, size_t dim, float eps,
                                  const float *weight, kda_input x, kda_input gate, kda_output y) {
    kda_result result = kdai_check_norm(n_tokens, n_heads, dim, eps, x, y);
    if (result == KDA_OK) result = kdai_check_input(gate, n_tokens, n_heads, dim);
    if (result == KDA_OK && !weight) result = KDA_ERR_NULL;
    if (result == KDA_OK && kdai_is_misaligned(weight, sizeof(float))) result = KDA_ERR_ALIGN;
    if (result != KDA_OK) return result;
    for (size_t t = 0; t < n_tokens; t++)
        for (size_t h = 0; h < n_heads; h++)
            kdai_gated_norm_row(kdai_row(x, t, h), kdai_row(gate, t, h), weight, dim, eps,
                                kdai_output_row(y, t, h));
    return KDA_OK;
}

static kda_result kdai_check_conv_desc(const kda_conv_desc *desc) {
    if (!desc) return KDA_ERR_NULL;
    if (desc->channels == 0) return KDA_ERR_DIMS;
    if (desc->width == 0 || desc->width > KDA_CONV_MAX_WIDTH) return KDA_ERR_WIDTH;
    if (desc->activation != KDA_ACTIVATION_NONE && desc->activation != KDA_ACTIVATION_SILU)
        return KDA_ERR_ACTIVATION;
    size_t taps = kdai_product(desc->channels, desc->width);
    return kdai_product(taps, sizeof(float)) ? KDA_OK : KDA_ERR_SIZE;
}

KDA_API size_t kda_conv_window_bytes(const kda_conv_desc *desc) {
    if (kdai_check_conv_desc(desc) != KDA_OK) return 0;
    return (desc->width - 1) * desc->channels * sizeof(float);
}

static uintptr_t *kdai_carve_conv(size_t n_seqs, void *memory, size_t *bytes) {
    kdai_arena arena = kdai_arena_on(memory);
    void *owned = kdai_take(&arena, n_seqs ? n_seqs : 1, sizeof(uintptr_t));
    *bytes = arena.used;
    return (uintptr_t *)owned;
}

KDA_API size_t kda_conv_scratch_bytes(const kda_conv_desc *desc, size_t n_seqs) {
    size_t bytes;
    if (kdai_check_conv_desc(desc) != KDA_OK) return 0;
    kdai_carve_conv(n_seqs, NULL, &bytes);
    return bytes;
}

/* One channel of one token: taps over window and x, then the window moves up by one. */
static float kdai_conv_channel(const kda_conv_desc *desc, const float *weight, float x,
                               float *window) {
    size_t past = desc->width - 1, stride = desc->channels;
    float sum = 0.0f;
    for (size_t i = 0; i < past; i++) sum = fmaf(weight[i], window[i * stride], sum);
    sum = fmaf(weight[past], x, sum);
    for (size_t i = 0; i + 1 < past; i++) window[i * stride] = window[(i + 1) * stride];
    if (past > 0) window[(past - 1) * stride] = x;
    return desc->activation == KDA_ACTIVATION_SILU ? sum * kda_sigmoid(sum) : sum;
}

static kda_result kdai_check_conv(const kda_conv_desc *desc, const kda_conv_args *args,
                                  const kda_run *run) {
    size_t n_tokens, needed;
    kda_result result = kdai_check_conv_desc(desc);
    if (result != KDA_OK) return result;
    if (!args || !run || !args->weight || (!args->seqs && args->n_seqs > 0)) return KDA_ERR_NULL;
    if (kdai_is_misaligned(args->weight, sizeof(float))) return KDA_ERR_ALIGN;
    kdai_carve_conv(args->n_seqs, NULL, &needed);
    if (needed == 0) return KDA_ERR_SIZE;
    if (!run->scratch || run->scratch_bytes < needed) return KDA_ERR_SCRATCH;
    uintptr_t *owned = kdai_carve_conv(args->n_seqs, run->scratch, &needed);
    result = kdai_check_seqs(args->seqs, args->n_seqs, 1, kda_conv_window_bytes(desc), owned,
                             &n_tokens);
    if (result == KDA_OK) result = kdai_check_input(args->x, n_tokens, 1, desc->channels);
    if (result == KDA_OK) result = kdai_check_output(args->y, n_tokens, 1, desc->channels);
    return result;
}

KDA_API kda_result kda_conv(const kda_conv_desc *desc, const kda_conv_args *args,
                            const kda_run *run) {
    kda_result result = kdai_check_conv(desc, args, run);
    if (result != KDA_OK) return result;
    size_t token = 0;
    for (size_t i = 0; i < args->n_seqs; i++) {
        float *window = (float *)args->seqs[i].window;
        for (size_t t = 0; window && t < args->seqs[i].n_tokens; t++) {
            const float *x = kdai_row(args->x, token + t, 0);
            float *y = kdai_output_row(args->y, token + t, 0);
            for (size_t c = 0; c < desc->channels; c++)
                y[c] = kdai_conv_channel(desc, args->weight + c * desc->width, x[c], window + c);
        }
        token += args->seqs[i].n_tokens;
    }
    return KDA_OK;
}

#ifdef __cplusplus
}
#endif
#endif /* KDA_IMPLEMENTATION */
