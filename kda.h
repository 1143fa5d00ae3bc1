/* kda.h - v0.1.0 - Kimi Delta Attention in one C header. SPDX-License-Identifier: MIT

INCLUDE IT

    In exactly one file:              Everywhere else:
        #define KDA_IMPLEMENTATION        #include "kda.h"
        #include "kda.h"

    C11 or C++11, libc and libm only (link with -lm). Define KDA_STATIC as well to make every
    function static to that one file.

WHAT IT DOES

    Everything that one KDA layer does apart from its dense projections: the short causal
    convolution, the decay gate, beta, the L2 norm of queries and keys, the recurrence for one
    token or many, and the gated output norm; for any number of sequences in one call. And the life
    of the state: clear, copy, save, load, run draft tokens and accept some of them.

WHICH CALL

    kda_layer        all of a layer between its projections: what most engines want, once a layer
    kda_forward      the operator alone (gate, beta and L2 norm included)
    kda_conv, kda_log_decay, kda_l2_norm, kda_gated_norm      the parts around it
    ..._verify, ..._commit      the same on draft tokens, and accepting the first m of them
    kda_save, kda_load          a sequence's state and window in one checked blob

    A layer's call reads the projected rows where the engine has them, prefill and decode alike:

        layer.op ...                            shape, gate, beta as in the program below
        layer.conv_width = 4, layer.conv_activation = KDA_ACTIVATION_SILU;
        layer.q_conv = ..., layer.A_log = ..., layer.norm_weight = ...;     once, at load
        args.q = kda_in(fused, KDA_BF16, row_width, 128);       columns of one fused row
        args.k = kda_in(fused + 4096, KDA_BF16, row_width, 128); ...
        args.seqs = seqs, args.n_seqs = n;      per sequence: tokens, state, window
        kda_layer(&layer, &args, &run);

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
        run.scratch = scratch, run.scratch_bytes = sizeof scratch, run.n_threads = 1;
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
      [0, 1]; nothing is divided by a decay and no matrix is inverted. See section 13 below.

LAYOUTS

    State, per sequence: [n_heads][dim_v][dim_k], a row per value channel, key channels contiguous;
    float32, or f16 by choice (arithmetic stays float32, and each token rounds).
    kda_state_import_kv and kda_state_export_kv convert the [n_heads][dim_k][dim_v] order of
    flash-linear-attention's default.

    Window of a convolution: float32 [width - 1][channels], oldest first. Of a layer: those of q, k
    and v, one after another.

    Tokens of a batch lie one after another: the rows of sequence 0, then those of sequence 1, ...
    A view gives an element's place as data[token * token_stride + head * head_stride + i], strides
    in elements: columns of a wider row are the normal case. The innermost dimension is contiguous.
    Each view has its own type: float32, f16 or bf16 (to 16 bits: nearest, ties to even).

    Which query/key head serves value head h, with n_qk_heads < n_heads:
        KDA_HEADS_GROUPED    h / (n_heads / n_qk_heads)       flash-linear-attention, vLLM
        KDA_HEADS_TILED      h % n_qk_heads                   ggml

MEMORY

    The library never allocates. States, windows, journals and scratch are the caller's; size
    functions tell the bytes and return 0 for an invalid description or a size past what can be
    addressed. Scratch and blobs may have any alignment (64 bytes recommended); scratch does not
    depend on the number of tokens, and carries nothing from one call to the next. Other pointers
    need the alignment of their element type. A call uses less than 4 KiB of stack.

    No mutable globals but the choice of kernels, made once: calls on different states and scratch
    may run at once in any threads.

THREADS

    The library starts none. A call runs in the calling thread, or in the host's pool through
    run.parallel_for, or, compiled with OpenMP and without a hook, in OpenMP's threads. Work is
    claimed piece by piece (a sequence, a head, a tile of its value channels), so a pool that runs
    fewer workers than asked, one at a time, or none, still gets the whole result; a call from
    inside a parallel region is fine. Results never depend on who did what. kda_layer has one
    such round for every 64 rows, of whole query/key heads, or, with more workers than those or
    with fewer than two of them (over all sequences) for each worker, three: convolutions,
    operator, norm. With OpenMP ask for the scratch size in the thread that
    calls, or set run.n_threads.

ERRORS

    A kda_result for each kind of misuse, with a name (kda_result_name). On any error nothing has
    been written. The values of tensors are not errors: see NUMERICS.

INSTRUCTION SETS

    Kernels for AVX-512, AVX2 (with FMA and F16C) and NEON are in this file beside the plain C, and
    need no compiler flags. The best that processor and operating system offer is found at the first
    call; run.isa asks for one, and one that is not there is an error. What runs makes no difference
    to the bits of the recurrent path (see NUMERICS). The compiler finds the file again by its name:
    it stays "kda.h".

NUMERICS

    * All arithmetic is IEEE float32 with fused multiply-add. exp, sigmoid and softplus are the
      header's own (at most 2 ulp from the exact value, exp(-inf) = 0); 1/sqrt(x) is a division by
      a correctly rounded square root.
    * On the recurrent path and in norms a sum over n elements has one fixed shape: 16 running
      lanes, element i goes to lane i % 16 by fused multiply-add in order of i, the last 16 padded
      with zeros; then lanes 8 apart are added, then 4, 2, 1.
    * The recurrent path gives the same bits however the tokens are split into calls, whatever else
      is in the batch, however many threads run, and on every instruction set. The chunked path does
      so across calls split at multiples of KDA_CHUNK, for one instruction set. The two differ from
      each other by rounding only.
    * Within the operator, subnormal numbers (below 1.2e-38) count as 0, as the processor has it: on
      x86-64 and 64-bit ARM, where some would make a step 50 times slower. The caller's
      floating-point environment is as it was when the call returns. The other functions keep
      subnormals.
    * verify and commit(m) give the bits of m single steps, of state, window and outputs.
    * kda_layer gives the bits of its parts called one by one.
    * Any gate value up to and including -inf is safe in both paths: no overflow, no division by a
      decay. NaN and Inf in one sequence or head stay there.
    * -ffast-math breaks these promises, and so does arithmetic on floats in a wider type: x87 code
      on 32-bit x86 (build with -msse2 -mfpmath=sse), GCC on s390x with -std=c11 (add
      -fexcess-precision=fast). A build with either is refused unless KDA_ALLOW_FAST_MATH is
      defined.

OPTIONS

    KDA_STATIC              every function static
    KDA_API                 or your own linkage
    KDA_ALLOW_FAST_MATH     see NUMERICS
    KDA_NO_SIMD             plain C only; so it is in a build without optimisation (GCC, Clang)
    KDA_NO_AVX512           nothing beyond AVX2

LIMITS

    Any dim_k, dim_v >= 1, any number of heads; convolution widths 1 to 64. A log-decay above 0
    reads as 0, an A_log above 88 as 88. States of bf16 are refused: they are 8 times less exact
    than f16.
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
    KDA_ERR_GATE,        /* no gate, an unknown one, or A_log/dt_bias with a ready log-decay */
    KDA_ERR_LOWER_BOUND, /* bounded gate: not finite and below 0; another gate: not 0 */
    KDA_ERR_BETA,        /* no beta form chosen, or an unknown one */
    KDA_ERR_HEAD_MAP,    /* unknown head map */
    KDA_ERR_FLAGS,       /* unknown flag bit */
    KDA_ERR_NUMBER,      /* scale or eps is negative or not finite */
    KDA_ERR_TYPE,        /* unknown element type, or one that a state cannot have */
    KDA_ERR_ALIGN,       /* a pointer is not aligned to its element type */
    KDA_ERR_STRIDE,      /* rows of an output overlap each other */
    KDA_ERR_ALIAS,       /* two sequences of a batch share a state, window or journal */
    KDA_ERR_ALGORITHM,   /* unknown algorithm, or one that the call cannot use */
    KDA_ERR_SCRATCH,     /* scratch is null or smaller than its size function says */
    KDA_ERR_WIDTH,       /* convolution width outside 1 .. KDA_CONV_MAX_WIDTH */
    KDA_ERR_ACTIVATION,  /* no activation chosen, or an unknown one */
    KDA_ERR_THREADS,     /* a parallel_for without a number of threads */
    KDA_ERR_JOURNAL,     /* not a journal that a verify of this description wrote, or used up */
    KDA_ERR_COUNT,       /* more tokens accepted than the journal holds */
    KDA_ERR_BLOB,        /* the buffer does not begin like a saved state */
    KDA_ERR_BLOB_VERSION,  /* saved by a version of the format that this one does not read */
    KDA_ERR_BLOB_SHORT,    /* the buffer is shorter than the saved state */
    KDA_ERR_BLOB_LONG,     /* the buffer is longer than the saved state */
    KDA_ERR_BLOB_ALTERED,  /* the checksum does not fit the contents */
    KDA_ERR_BLOB_MISMATCH, /* a sound saved state, but of another shape, type or window */
    KDA_ERR_ISA /* unknown instruction set, or not one that this machine and build have */
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

typedef enum kda_type { KDA_F32 = 0, KDA_F16 = 1, KDA_BF16 = 2 } kda_type;

typedef enum kda_algorithm {
    KDA_AUTO = 0, /* recurrent below 12 tokens of a sequence in the call, else chunked: where that
                     was the faster on every machine measured (bench_kda --only switch) */
    KDA_RECURRENT = 1,
    KDA_CHUNKED = 2
} kda_algorithm;

/* Which kernels run. Those of KDA_ISA_SCALAR are plain C and run everywhere. */
typedef enum kda_isa {
    KDA_ISA_AUTO = 0, /* the best of those that this processor and build have */
    KDA_ISA_SCALAR = 1,
    KDA_ISA_AVX2 = 2, /* with FMA and F16C */
    KDA_ISA_AVX512 = 3,
    KDA_ISA_NEON = 4
} kda_isa;

/* What KDA_ISA_AUTO means here; whether an ISA can be asked for here; its name, "avx2". */
KDA_API kda_isa kda_isa_best(void);
KDA_API int kda_isa_is_available(kda_isa isa);
KDA_API const char *kda_isa_name(kda_isa isa);

/* kda_desc.flags */
#define KDA_L2_NORM_QK 1u /* normalise queries and keys inside */

/* Tokens to a chunk of the chunked algorithm. */
#define KDA_CHUNK 8

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
    kda_type state_type;   /* KDA_F32, or KDA_F16 for half the memory; arithmetic is float32 */
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

static inline kda_input kda_in(const void *data, kda_type type, ptrdiff_t token_stride,
                               ptrdiff_t head_stride) {
    kda_input view;
    view.data = data;
    view.token_stride = token_stride;
    view.head_stride = head_stride;
    view.type = type;
    return view;
}

static inline kda_output kda_out(void *data, kda_type type, ptrdiff_t token_stride,
                                 ptrdiff_t head_stride) {
    kda_output view;
    view.data = data;
    view.token_stride = token_stride;
    view.head_stride = head_stride;
    view.type = type;
    return view;
}

static inline kda_input kda_in_f32(const float *data, ptrdiff_t token_stride,
                                   ptrdiff_t head_stride) {
    return kda_in(data, KDA_F32, token_stride, head_stride);
}

static inline kda_output kda_out_f32(float *data, ptrdiff_t token_stride, ptrdiff_t head_stride) {
    return kda_out(data, KDA_F32, token_stride, head_stride);
}

/* One sequence of a batch: its next n_tokens rows of every tensor, and what it owns. A sequence
 * with a null state (kda_forward, kda_layer) or window (kda_conv) is padding: its rows are skipped,
 * and nothing of it is written; its other pointers should be null as well, as kda_slot makes them.
 * Fields that a call does not use may be null. A journal is committed by the counterpart of the
 * function that wrote it. */
typedef struct kda_seq {
    size_t n_tokens; /* 0 leaves everything as it is */
    void *state;     /* kda_state_bytes(desc), [n_heads][dim_v][dim_k] of desc.state_type */
    void *window;    /* kda_conv_window_bytes(desc), float [width - 1][channels]; of a layer,
                        kda_layer_window_bytes(layer) */
    void *journal;   /* for the verify functions: kda_journal_bytes(desc, n_tokens), or that of the
                        convolution or layer */
} kda_seq;

/* The state, window or journal of a slot in a pool of equal pieces; null for a negative slot, which
 * makes its sequence padding. */
static inline void *kda_slot(void *pool, size_t piece_bytes, ptrdiff_t slot) {
    return slot < 0 ? NULL : (void *)((unsigned char *)pool + (size_t)slot * piece_bytes);
}

/* A host's thread pool. kda_parallel_for calls task(context, index) for each index below n, each
 * once, in any order and in any threads, and returns when all those calls have returned. Running
 * only some of the indices, or none, costs speed and nothing else: work is claimed piece by piece,
 * and what is left is done by the calling thread. */
typedef void (*kda_task)(void *context, size_t index);
typedef void (*kda_parallel_for)(void *user, size_t n, kda_task task, void *context);

/* How to run a call. Zeroed, but for scratch, is a good choice. */
typedef struct kda_run {
    kda_algorithm algorithm;
    void *scratch; /* what the size function of the call says for this run; any alignment */
    size_t scratch_bytes;
    kda_parallel_for parallel_for; /* null: OpenMP if compiled with it, else the calling thread */
    void *user;                    /* handed to parallel_for */
    size_t n_threads; /* with parallel_for: how many may run, >= 1; with OpenMP: 0 means
                                      as many as it would take; otherwise not used */
    kda_isa isa;
} kda_run;

/* ==== 2. The operator ========================================================================= */

typedef struct kda_args {
    kda_input q;          /* [tokens][n_qk_heads][dim_k] */
    kda_input k;          /* [tokens][n_qk_heads][dim_k] */
    kda_input v;          /* [tokens][n_heads][dim_v] */
    kda_input g;          /* [tokens][n_heads][dim_k], as desc.gate says */
    kda_input beta;       /* [tokens][n_heads][1], as desc.beta says */
    kda_output o;         /* [tokens][n_heads][dim_v]; may be v itself (same data, strides, type) */
    const float *A_log;   /* [n_heads]; softplus gate: needed; bounded gate: null means 0 */
    const float *dt_bias; /* [n_heads][dim_k]; null means 0 */
    const kda_seq *seqs;  /* [n_seqs] */
    size_t n_seqs;
} kda_args;

/* Bytes of one sequence's state, n_heads * dim_v * dim_k elements; 0 if the description is invalid
 * or the size overflows. */
KDA_API size_t kda_state_bytes(const kda_desc *desc);

/* Bytes of scratch for a kda_forward or kda_commit (for a kda_verify: the other function) of at
 * most n_seqs sequences, whatever their lengths, run that way (null: any algorithm, in the calling
 * thread, or in OpenMP's); 0 if something is invalid or the size overflows. */
KDA_API size_t kda_scratch_bytes(const kda_desc *desc, size_t n_seqs, const kda_run *run);
KDA_API size_t kda_verify_scratch_bytes(const kda_desc *desc, size_t n_seqs, const kda_run *run);

/* Runs every sequence of the batch through the recurrence (see THE MATHEMATICS): reads q, k, v, g,
 * beta, updates each state in place, writes o. Nothing but o = v may alias.
 * Errors: KDA_ERR_NULL to KDA_ERR_SCRATCH, KDA_ERR_THREADS, KDA_ERR_ISA. */
KDA_API kda_result kda_forward(const kda_desc *desc, const kda_args *args, const kda_run *run);

/* ==== 3. Speculation ==========================================================================
 *
 * kda_verify runs draft tokens and leaves every state as it is; kda_commit then applies the first m
 * of them and gives the very bits that m single steps give. The journal between them holds, per
 * token and head, the decay and the key (dim_k each) and the correction u (dim_v): a rank-1 update,
 * (2 dim_k + dim_v) * 4 bytes, where a copy of the state takes dim_k * dim_v * 4. */

/* Bytes of a journal for n_tokens draft tokens of one sequence; 0 if invalid or overflowing. */
KDA_API size_t kda_journal_bytes(const kda_desc *desc, size_t n_tokens);

/* As kda_forward the recurrent way (run->algorithm KDA_AUTO or KDA_RECURRENT), but states stay
 * untouched and each sequence's journal is written. Errors: as kda_forward. */
KDA_API kda_result kda_verify(const kda_desc *desc, const kda_args *args, const kda_run *run);

/* Applies the first seqs[i].n_tokens tokens of seqs[i].journal to seqs[i].state, which must be as
 * it was at the verify, and uses the journal up. 0 tokens write nothing, to neither, and the
 * journal may then be null. A null state is padding.
 * Errors: KDA_ERR_NULL to KDA_ERR_SCRATCH, KDA_ERR_THREADS, KDA_ERR_ISA, KDA_ERR_JOURNAL,
 * KDA_ERR_COUNT. */
KDA_API kda_result kda_commit(const kda_desc *desc, const kda_seq *seqs, size_t n_seqs,
                              const kda_run *run);

/* ==== 4. The state's life ===================================================================== */

/* Zeroes a state: stores zeros, so that nothing of an earlier owner (NaN included) survives. */
KDA_API kda_result kda_state_clear(const kda_desc *desc, void *state);

/* Copies a state. No overlap. */
KDA_API kda_result kda_state_copy(const kda_desc *desc, const void *from, void *to);

/* 1 if every element of the state is finite, 0 if not or if an argument is invalid: for a server to
 * ask before it keeps a state. */
KDA_API int kda_state_is_finite(const kda_desc *desc, const void *state);

/* state[h][v][k] = kv[h][k][v] and back: the [n_heads][dim_k][dim_v] order of
 * flash-linear-attention's default, ONNX and the 48B's own code, in float32. No aliasing. */
KDA_API kda_result kda_state_import_kv(const kda_desc *desc, const float *kv, void *state);
KDA_API kda_result kda_state_export_kv(const kda_desc *desc, const void *state, float *kv);

/* What a saved sequence consists of: the state, its convolution window (window_bytes 0 and null if
 * there is none) and how many tokens both have seen. A blob holds all three or nothing. */
typedef struct kda_saved {
    void *state;
    void *window;
    size_t window_bytes;
    uint64_t n_tokens;
} kda_saved;

/* Bytes of a blob; 0 if the description is invalid, window_bytes no whole number of floats, or the
 * size overflows. */
KDA_API size_t kda_save_bytes(const kda_desc *desc, size_t window_bytes);

/* Writes a blob of exactly kda_save_bytes: version, dimensions, order, type, token count, contents
 * and a checksum over all of it, little-endian on every machine. The blob may have any alignment.
 * Errors: KDA_ERR_NULL to KDA_ERR_ALIGN (KDA_ERR_SIZE also for a window_bytes that is no whole
 * number of floats), KDA_ERR_BLOB_SHORT, KDA_ERR_BLOB_LONG. */
KDA_API kda_result kda_save(const kda_desc *desc, const kda_saved *saved, void *blob,
                            size_t blob_bytes);

/* Reads a blob into saved->state and saved->window (sizes as given) and sets saved->n_tokens.
 * Writes nothing unless all of the blob is sound and fits; whether the count is the one that the
 * caller's prefix has is for him to see. Errors: as kda_save, and KDA_ERR_BLOB,
 * KDA_ERR_BLOB_VERSION, KDA_ERR_BLOB_ALTERED, KDA_ERR_BLOB_MISMATCH. */
KDA_API kda_result kda_load(const kda_desc *desc, kda_saved *saved, const void *blob,
                            size_t blob_bytes);

/* ==== 5. The parts around the operator ======================================================== */

/* exp(x), 1 / (1 + exp(-x)) and log(1 + exp(x)): at most 2 ulp from the exact value over all of
 * float, subnormal results included; NaN gives NaN. These very functions are used inside. */
KDA_API float kda_exp(float x);
KDA_API float kda_sigmoid(float x);
KDA_API float kda_softplus(float x);

/* The 16-bit types as bit patterns. To 16 bits: nearest, ties to even, overflow to infinity; from
 * 16 bits: exact. NaN stays NaN (quiet, its upper bits kept). */
KDA_API float kda_from_f16(uint16_t bits);
KDA_API uint16_t kda_to_f16(float x);
KDA_API float kda_from_bf16(uint16_t bits);
KDA_API uint16_t kda_to_bf16(float x);

/* The three functions that follow need no scratch; run says threads and instruction set, and null
 * means the calling thread and the best.
 *
 * Raw gate to log-decay, g = gate(raw) as desc.gate says (not KDA_GATE_LOG_DECAY). kda_forward
 * given this g (in float32) as KDA_GATE_LOG_DECAY gives the same bits as given the raw gate.
 * raw, g: [n_tokens][n_heads][dim_k]; g may be raw itself. A_log, dt_bias: as in kda_args. */
KDA_API kda_result kda_log_decay(const kda_desc *desc, size_t n_tokens, kda_input raw,
                                 const float *A_log, const float *dt_bias, kda_output g,
                                 const kda_run *run);

/* y = x / sqrt(sum(x^2) + eps) for each head of each token; eps 0 means 1e-6. x, y:
 * [n_tokens][n_heads][dim]; y may be x itself. (flash-linear-attention's l2norm.) */
KDA_API kda_result kda_l2_norm(size_t n_tokens, size_t n_heads, size_t dim, float eps, kda_input x,
                               kda_output y, const kda_run *run);

/* y = x / sqrt(mean(x^2) + eps) * weight * sigmoid(gate) for each head of each token: the norm
 * after the operator. x, gate, y: [n_tokens][n_heads][dim]; weight: [dim], shared by all heads; y
 * may be x or gate itself. eps is used as it is: 0 is 0. (flash-linear-attention's
 * FusedRMSNormGated with sigmoid.) */
KDA_API kda_result kda_gated_norm(size_t n_tokens, size_t n_heads, size_t dim, float eps,
                                  const float *weight, kda_input x, kda_input gate, kda_output y,
                                  const kda_run *run);

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
    kda_output y;        /* [tokens][channels]; may be x itself (same data, stride and type) */
    const float *weight; /* [channels][width], the last tap for the current token */
    const kda_seq *seqs; /* [n_seqs]; n_tokens and window are used, and journal by the verify */
    size_t n_seqs;
} kda_conv_args;

/* Bytes of one sequence's window, (width - 1) * channels floats: the last inputs, oldest first;
 * zeros before the first token. 0 if the description is invalid, or width is 1 (no window needed:
 * pass any pointer that is aligned and not null). */
KDA_API size_t kda_conv_window_bytes(const kda_conv_desc *desc);

/* Bytes of scratch for a kda_conv, kda_conv_verify or kda_conv_commit of at most n_seqs sequences,
 * run that way (null: as for kda_scratch_bytes); 0 as above. */
KDA_API size_t kda_conv_scratch_bytes(const kda_conv_desc *desc, size_t n_seqs, const kda_run *run);

/* The short causal convolution of each channel, and its activation:
 *     y[t][c] = act( sum over i < width of weight[c][i] x[t - width + 1 + i][c] )
 * with inputs before the call taken from the window, which then holds the last width - 1 inputs.
 * Any split of the tokens into calls gives the same bits.
 * Errors: KDA_ERR_NULL, _DIMS, _SIZE, _TYPE, _ALIGN, _STRIDE, _ALIAS, _ALGORITHM, _SCRATCH,
 * _WIDTH, _ACTIVATION, _THREADS, _ISA. */
KDA_API kda_result kda_conv(const kda_conv_desc *desc, const kda_conv_args *args,
                            const kda_run *run);

/* Speculation for the window, as for the state: verify leaves windows as they are and keeps the
 * inputs in journals; commit moves a window on by the first seqs[i].n_tokens of them and uses the
 * journal up, giving the bits of single steps. Errors of commit: as kda_commit. */
KDA_API size_t kda_conv_journal_bytes(const kda_conv_desc *desc, size_t n_tokens);
KDA_API kda_result kda_conv_verify(const kda_conv_desc *desc, const kda_conv_args *args,
                                   const kda_run *run);
KDA_API kda_result kda_conv_commit(const kda_conv_desc *desc, const kda_seq *seqs, size_t n_seqs,
                                   const kda_run *run);

/* ==== 6. A whole layer between its projections ================================================ */

/* One layer: its shape and its small weights. */
typedef struct kda_layer_desc {
    kda_desc op;
    size_t conv_width;
    kda_activation conv_activation; /* Kimi: KDA_ACTIVATION_SILU */
    const float *q_conv, *k_conv;   /* [n_qk_heads * dim_k][conv_width] */
    const float *v_conv;            /* [n_heads * dim_v][conv_width] */
    const float *A_log, *dt_bias;   /* as in kda_args */
    const float *norm_weight;       /* [dim_v] */
    float norm_eps;                 /* Kimi: the model's rms_norm_eps; used as it is */
} kda_layer_desc;

/* The projected rows of a layer. Channel c of a q or k convolution is element c % dim_k of head
 * c / dim_k, and likewise of v. */
typedef struct kda_layer_args {
    kda_input q, k;    /* [tokens][n_qk_heads][dim_k], before the convolution */
    kda_input v;       /* [tokens][n_heads][dim_v], before the convolution */
    kda_input g;       /* [tokens][n_heads][dim_k] */
    kda_input beta;    /* [tokens][n_heads][1] */
    kda_input gate;    /* [tokens][n_heads][dim_v], the output gate before its sigmoid */
    kda_output o;      /* [tokens][n_heads][dim_v]; may be v or gate itself */
    const kda_seq *seqs; /* [n_seqs]: n_tokens, state, window, and journal for the verify */
    size_t n_seqs;
} kda_layer_args;

/* Sizes look at a layer's shape and not at its weights, which may be null.
 * Bytes of one sequence's window: the windows of q, k and v, one after another. 0 if invalid, or if
 * conv_width is 1. */
KDA_API size_t kda_layer_window_bytes(const kda_layer_desc *layer);
/* Bytes of one sequence's journal for n_tokens draft tokens: of the state and the windows. */
KDA_API size_t kda_layer_journal_bytes(const kda_layer_desc *layer, size_t n_tokens);
/* Bytes of scratch for the three calls below; null run: as for kda_scratch_bytes. */
KDA_API size_t kda_layer_scratch_bytes(const kda_layer_desc *layer, size_t n_seqs,
                                       const kda_run *run);

/* Convolution and activation of q, k and v, gate, beta, L2 norm, operator and gated norm: the bits
 * of kda_conv (three times, to float32), kda_forward (to float32) and kda_gated_norm called one by
 * one. Errors: any of those calls'. */
KDA_API kda_result kda_layer(const kda_layer_desc *layer, const kda_layer_args *args,
                             const kda_run *run);

/* Speculation for state and windows together; rules as for kda_verify and kda_commit. */
KDA_API kda_result kda_layer_verify(const kda_layer_desc *layer, const kda_layer_args *args,
                                    const kda_run *run);
KDA_API kda_result kda_layer_commit(const kda_layer_desc *layer, const kda_seq *seqs, size_t n_seqs,
                                    const kda_run *run);

#ifdef __cplusplus
}
#endif
#endif /* KDA_H */

/* ==== end of the interface ==================================================================== */

#if defined(KDA_IMPLEMENTATION) && !defined(KDA_IMPLEMENTATION_DONE)
#define KDA_IMPLEMENTATION_DONE

#include <float.h>
#include <math.h>
#include <string.h>
#if defined(_OPENMP)
#include <omp.h>
#endif
#if defined(_MSC_VER)
#include <intrin.h>
#endif
#if defined(__x86_64__) || defined(_M_X64)
#include <xmmintrin.h>
#endif

#if !defined(KDA_ALLOW_FAST_MATH)
#if defined(__FAST_MATH__) || defined(_M_FP_FAST) ||                                               \
    (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)
#error "kda.h: -ffast-math breaks -inf, NaN and bit-exactness; define KDA_ALLOW_FAST_MATH to accept"
#endif
/* 16 widens _Float16 only. */
#if FLT_EVAL_METHOD != 0 && FLT_EVAL_METHOD != 16
#error "kda.h: floats are computed wider than float; see NUMERICS"
#endif
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ==== 7. Elementary functions and sums ========================================================
 *
 * Every multiply-add below is an explicit fmaf and every other product feeds only products, fmaf or
 * divisions: a compiler that contracts a*b+c on its own then finds nothing to change, and each
 * result has the same bits whatever the flags. Constants are decimal, of the nine digits that tell
 * any two floats apart, because C++ before 17 knows no hexadecimal ones. */

/* ---- shared with attnres.h, but for the prefix ---- */

/* x y + z, rounded once. Some fmaf round twice: those of MinGW and of WebAssembly's libraries. */
static float kdai_fma(float x, float y, float z) {
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
    float shifted = kdai_fma(x, 1.44269502f, 12582912.0f);
    float n = shifted - 12582912.0f;
    /* ln 2 in two parts keeps r exact to its last bit. */
    float r = kdai_fma(n, -0.693147182f, x);
    r = kdai_fma(n, 1.90465421e-9f, r);
    float p = 0.00139262504f;
    p = kdai_fma(p, r, 0.00836323295f);
    p = kdai_fma(p, r, 0.0416665524f);
    p = kdai_fma(p, r, 0.166665763f);
    p = kdai_fma(p, r, 0.5f);
    float y = kdai_fma(p * r, r, r) + 1.0f;
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

/* Adds the products of n elements to a sum's lanes, element i to lane i % KDAI_LANES; a short last
 * block counts as padded with zeros, which turns a lane of -0 into +0. */
static void kdai_dot_lanes(const float *x, const float *y, size_t n, float *lane) {
    for (size_t i = 0; i < n; i += KDAI_LANES) {
        size_t some = n - i < KDAI_LANES ? n - i : KDAI_LANES;
        for (size_t l = 0; l < some; l++) lane[l] = kdai_fma(x[i + l], y[i + l], lane[l]);
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

/* With z = exp(-|x|), so that there is no exponential of a positive number, and q = z / (1 + z):
 * 1 - q for x >= 0, and z - z q, which is q, below: there the errors of sum and quotient count z
 * times only, where q itself has them whole. */
KDA_API float kda_sigmoid(float x) {
    float z = kdai_exp(-fabsf(x)), q = z / (1.0f + z), most = x >= 0.0f ? 1.0f : z;
    return kdai_fma(-most, q, most);
}

/* max(x, 0) + log1p(z), z = exp(-|x|); log1p(z) = z + z^2 P(z) on [0, 1], P of degree 8 (error
 * 5e-9). */
KDA_API float kda_softplus(float x) {
    float z = kdai_exp(-fabsf(x)), p = -0.00329044065f;
    p = kdai_fma(p, z, 0.020086173f);
    p = kdai_fma(p, z, -0.0574571751f);
    p = kdai_fma(p, z, 0.106611267f);
    p = kdai_fma(p, z, -0.153448805f);
    p = kdai_fma(p, z, 0.196921021f);
    p = kdai_fma(p, z, -0.24958019f);
    p = kdai_fma(p, z, 0.333304644f);
    p = kdai_fma(p, z, -0.499999315f);
    return (x > 0.0f ? x : 0.0f) + kdai_fma(p * z, z, z);
}

/* ==== 8. Element types ======================================================================== */

static uint32_t kdai_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static float kdai_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

KDA_API float kda_from_f16(uint16_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x8000u) << 16, rest = bits & 0x7fffu;
    if (rest >= 0x7c00u) /* infinity, or NaN made quiet */
        return kdai_float(sign | 0x7f800000u | rest << 13 | (rest > 0x7c00u ? 0x400000u : 0u));
    if (rest >= 0x0400u) return kdai_float(sign | ((rest << 13) + (112u << 23)));
    /* Subnormal, in units of 2^-24: a normal float. */
    return kdai_float(sign | kdai_bits((float)rest * (1.0f / 16777216.0f)));
}

KDA_API uint16_t kda_to_f16(float x) {
    uint32_t bits = kdai_bits(x), sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
    if (rest > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | (rest >> 13 & 0x3ffu));
    if (rest >= 0x47800000u) return (uint16_t)(sign | 0x7c00u); /* 65536 and above */
    if (rest >= 0x38800000u) /* 2^-14 and above; a carry out of 65504 gives infinity */
        return (uint16_t)(sign | (rest + 0xfffu + (rest >> 13 & 1u) - (112u << 23)) >> 13);
    /* Subnormal: in units of 2^-24, adding 2^23 rounds to an integer. */
    float units = kdai_fma(kdai_float(rest), 16777216.0f, 8388608.0f);
    return (uint16_t)(sign | (kdai_bits(units) - kdai_bits(8388608.0f)));
}

KDA_API float kda_from_bf16(uint16_t bits) {
    uint32_t quiet = (bits & 0x7fffu) > 0x7f80u ? 0x400000u : 0u;
    return kdai_float((uint32_t)bits << 16 | quiet);
}

KDA_API uint16_t kda_to_bf16(float x) {
    uint32_t bits = kdai_bits(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40u);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

static size_t kdai_type_bytes(kda_type type) {
    switch (type) {
    case KDA_F32: return sizeof(float);
    case KDA_F16:
    case KDA_BF16: return sizeof(uint16_t);
    }
    return 0;
}

/* Element i of an array of a type. */
static float kdai_element(const void *from, kda_type type, size_t i) {
    switch (type) {
    case KDA_F16: return kda_from_f16(((const uint16_t *)from)[i]);
    case KDA_BF16: return kda_from_bf16(((const uint16_t *)from)[i]);
    case KDA_F32: break;
    }
    return ((const float *)from)[i];
}

static void kdai_set_element(void *to, kda_type type, size_t i, float x) {
    switch (type) {
    case KDA_F16: ((uint16_t *)to)[i] = kda_to_f16(x); return;
    case KDA_BF16: ((uint16_t *)to)[i] = kda_to_bf16(x); return;
    case KDA_F32: ((float *)to)[i] = x; return;
    }
}

/* n contiguous elements of a type to floats and back; no aliasing but of float with itself. */
static void kdai_to_floats(const void *from, kda_type type, size_t n, float *to) {
    const uint16_t *half = (const uint16_t *)from;
    if (type == KDA_F32)
        memmove(to, from, n * sizeof(float));
    else if (type == KDA_F16)
        for (size_t i = 0; i < n; i++) to[i] = kda_from_f16(half[i]);
    else
        for (size_t i = 0; i < n; i++) to[i] = kda_from_bf16(half[i]);
}

static void kdai_from_floats(const float *from, kda_type type, size_t n, void *to) {
    uint16_t *half = (uint16_t *)to;
    if (type == KDA_F32)
        memmove(to, from, n * sizeof(float));
    else if (type == KDA_F16)
        for (size_t i = 0; i < n; i++) half[i] = kda_to_f16(from[i]);
    else
        for (size_t i = 0; i < n; i++) half[i] = kda_to_bf16(from[i]);
}

/* ==== 9. Checks =============================================================================== */

/* In the order of kda_result. */
static const char *const kdai_results[][2] = {
    {"KDA_OK", "no error"},
    {"KDA_ERR_NULL", "a pointer that the call needs is null"},
    {"KDA_ERR_DIMS", "a dimension or head count is 0, or n_qk_heads does not divide n_heads"},
    {"KDA_ERR_SIZE", "a size or an extent is more bytes than can be addressed"},
    {"KDA_ERR_GATE", "no gate or an unknown one, or A_log or dt_bias with a ready log-decay"},
    {"KDA_ERR_LOWER_BOUND",
     "lower_bound must be finite and below 0 if the gate is bounded, else 0"},
    {"KDA_ERR_BETA", "no beta form or an unknown one is chosen"},
    {"KDA_ERR_HEAD_MAP", "the head map is unknown"},
    {"KDA_ERR_FLAGS", "an unknown flag bit is set"},
    {"KDA_ERR_NUMBER", "scale or eps is negative or not finite"},
    {"KDA_ERR_TYPE", "an element type is unknown, or not one that a state can have"},
    {"KDA_ERR_ALIGN", "a pointer is not aligned to its element type"},
    {"KDA_ERR_STRIDE", "rows of an output overlap each other"},
    {"KDA_ERR_ALIAS", "two sequences of the batch share memory of a state, window or journal"},
    {"KDA_ERR_ALGORITHM", "the algorithm is unknown or not one that the call can use"},
    {"KDA_ERR_SCRATCH", "scratch is null or smaller than its size function says"},
    {"KDA_ERR_WIDTH", "the convolution width is not between 1 and KDA_CONV_MAX_WIDTH"},
    {"KDA_ERR_ACTIVATION", "no activation or an unknown one is chosen"},
    {"KDA_ERR_THREADS", "a parallel_for is given without a number of threads"},
    {"KDA_ERR_JOURNAL", "not a journal that a verify of this description wrote, or used up"},
    {"KDA_ERR_COUNT", "more tokens are accepted than the journal holds"},
    {"KDA_ERR_BLOB", "the buffer does not begin like a saved state"},
    {"KDA_ERR_BLOB_VERSION", "the state was saved by a version of the format that is not known"},
    {"KDA_ERR_BLOB_SHORT", "the buffer is shorter than the saved state"},
    {"KDA_ERR_BLOB_LONG", "the buffer is longer than the saved state"},
    {"KDA_ERR_BLOB_ALTERED", "the checksum does not fit the contents of the buffer"},
    {"KDA_ERR_BLOB_MISMATCH", "the saved state has another shape, type or window"},
    {"KDA_ERR_ISA", "the instruction set is unknown, or not one that this machine and build have"},
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
    if (b == 0 || a > KDAI_MAX_BYTES / b) return 0;
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
    if (desc->state_type != KDA_F32 && desc->state_type != KDA_F16) return KDA_ERR_TYPE;
    size_t elements = kdai_product(kdai_product(desc->n_heads, desc->dim_v), desc->dim_k);
    return kdai_product(elements, kdai_type_bytes(desc->state_type)) ? KDA_OK : KDA_ERR_SIZE;
}

/* The weights that go with a gate. */
static kda_result kdai_check_gate(const kda_desc *desc, const float *A_log, const float *dt_bias) {
    if (desc->gate == KDA_GATE_LOG_DECAY) return A_log || dt_bias ? KDA_ERR_GATE : KDA_OK;
    if (desc->gate == KDA_GATE_SOFTPLUS && !A_log) return KDA_ERR_NULL;
    if (kdai_is_misaligned(A_log, sizeof(float)) || kdai_is_misaligned(dt_bias, sizeof(float)))
        return KDA_ERR_ALIGN;
    return KDA_OK;
}

static kda_result kdai_check_run(const kda_run *run) {
    if (!run) return KDA_ERR_NULL;
    if (run->algorithm != KDA_AUTO && run->algorithm != KDA_RECURRENT &&
        run->algorithm != KDA_CHUNKED)
        return KDA_ERR_ALGORITHM;
    if (run->parallel_for && run->n_threads == 0) return KDA_ERR_THREADS;
    return kda_isa_is_available(run->isa) ? KDA_OK : KDA_ERR_ISA;
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

/* Which of a sequence's pointers a check is about. */
typedef enum kdai_owned { KDAI_STATE, KDAI_WINDOW, KDAI_JOURNAL } kdai_owned;

static const void *kdai_owned_of(const kda_seq *seq, kdai_owned which) {
    return which == KDAI_STATE ? seq->state : which == KDAI_WINDOW ? seq->window : seq->journal;
}

/* No two sequences own memory that overlaps: pieces of `bytes` each, elements of `size`. `sorted`
 * is scratch for n_seqs addresses. */
static kda_result kdai_check_owned(const kda_seq *seqs, size_t n_seqs, kdai_owned which,
                                   size_t bytes, size_t size, uintptr_t *sorted) {
    size_t owners = 0;
    for (size_t i = 0; i < n_seqs; i++) {
        const void *owned = kdai_owned_of(&seqs[i], which);
        if (!owned) continue;
        if (kdai_is_misaligned(owned, size)) return KDA_ERR_ALIGN;
        sorted[owners++] = (uintptr_t)owned;
    }
    kdai_sort(sorted, owners);
    for (size_t i = 1; i < owners; i++)
        if (sorted[i] - sorted[i - 1] < bytes) return KDA_ERR_ALIAS;
    return KDA_OK;
}

static kda_result kdai_count_tokens(const kda_seq *seqs, size_t n_seqs, size_t *n_tokens) {
    *n_tokens = 0;
    if (!seqs && n_seqs > 0) return KDA_ERR_NULL;
    for (size_t i = 0; i < n_seqs; i++) {
        if (seqs[i].n_tokens > KDAI_MAX_BYTES - *n_tokens) return KDA_ERR_SIZE;
        *n_tokens += seqs[i].n_tokens;
    }
    return KDA_OK;
}

/* ==== 10. Scratch and threads ================================================================= */

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

/* A stretch of one sequence's tokens in a call. */
typedef struct kdai_span {
    const kda_seq *seq;
    size_t token;    /* its first row in the call's tensors */
    size_t n_tokens; /* > 0 */
    size_t done;     /* tokens of the sequence before it, run by the same call */
    int chunked;
} kdai_span;

/* What every call on a batch takes from scratch first. */
typedef struct kdai_batch {
    uintptr_t *sorted; /* [n_seqs] */
    kdai_span *spans;  /* [n_seqs] */
    unsigned char *memory; /* [workers][each] */
    size_t each;
} kdai_batch;

static void kdai_take_batch(kdai_arena *arena, size_t n_seqs, size_t workers, size_t each,
                            kdai_batch *batch) {
    size_t count = n_seqs ? n_seqs : 1;
    batch->sorted = (uintptr_t *)kdai_take(arena, count, sizeof(uintptr_t));
    batch->spans = (kdai_span *)kdai_take(arena, count, sizeof(kdai_span));
    batch->memory = (unsigned char *)kdai_take(arena, workers, each);
    batch->each = each;
}

/* Tokens from which KDA_AUTO goes the chunked way. */
#define KDAI_AUTO_CHUNKED 12

/* The sequences that are not padding and not empty, as spans. */
static size_t kdai_list_spans(const kda_seq *seqs, size_t n_seqs, kdai_owned owner,
                              kda_algorithm algorithm, kdai_span *spans) {
    size_t n = 0, token = 0;
    for (size_t i = 0; i < n_seqs; i++) {
        size_t n_tokens = seqs[i].n_tokens;
        if (n_tokens > 0 && kdai_owned_of(&seqs[i], owner)) {
            spans[n].seq = &seqs[i];
            spans[n].token = token;
            spans[n].n_tokens = n_tokens;
            spans[n].done = 0;
            /* Depends on nothing but the sequence's own length: bits do not depend on the batch. */
            spans[n].chunked = algorithm == KDA_CHUNKED ||
                               (algorithm == KDA_AUTO && n_tokens >= KDAI_AUTO_CHUNKED);
            n++;
        }
        token += n_tokens;
    }
    return n;
}

/* How many workers may run at once; each has scratch of its own. */
static size_t kdai_workers(const kda_run *run) {
    if (run && run->parallel_for) return run->n_threads;
#if defined(_OPENMP)
    if (run && run->n_threads > 0) return run->n_threads;
    return (size_t)omp_get_max_threads();
#else
    return 1;
#endif
}

/* *counter++, by many threads at once. */
static size_t kdai_claim(size_t *counter) {
#if defined(__GNUC__) || defined(__clang__)
    return __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED);
#elif defined(_MSC_VER) && defined(_WIN64)
    return (size_t)_InterlockedExchangeAdd64((volatile __int64 *)counter, 1);
#elif defined(_MSC_VER)
    return (size_t)_InterlockedExchangeAdd((volatile long *)counter, 1);
#else
#error "kda.h: this compiler's atomic addition is not known"
#endif
}

/* Items 0 .. n_items - 1, each done by whichever worker claims it. Results never depend on who. */
typedef void (*kdai_item)(void *call, size_t item, size_t worker);
typedef struct kdai_work_list {
    kdai_item item;
    void *call;
    size_t n_items;
    size_t next;
} kdai_work_list;

static void kdai_worker(void *context, size_t worker) {
    kdai_work_list *list = (kdai_work_list *)context;
    for (;;) {
        size_t item = kdai_claim(&list->next);
        if (item >= list->n_items) return;
        list->item(list->call, item, worker);
    }
}

static void kdai_parallel(const kda_run *run, size_t n_items, kdai_item item, void *call) {
    kdai_work_list list;
    size_t workers = kdai_workers(run);
    list.item = item;
    list.call = call;
    list.n_items = n_items;
    list.next = 0;
    if (workers > n_items) workers = n_items;
    if (workers > 1) {
        if (run && run->parallel_for) {
            run->parallel_for(run->user, workers, kdai_worker, &list);
        } else {
#if defined(_OPENMP)
            ptrdiff_t n = (ptrdiff_t)workers;
#pragma omp parallel for num_threads((int)n) schedule(static, 1)
            for (ptrdiff_t worker = 0; worker < n; worker++) kdai_worker(&list, (size_t)worker);
#endif
        }
    }
    kdai_worker(&list, 0); /* all of it, or what fewer workers than asked for left over */
}

/* ==== 11. A block of tokens of one head: what both algorithms start from ====================== */

/* Scratch of one worker for a block of at most KDA_CHUNK tokens of one head: rows of dim_k for each
 * token, padded with zeros to `stride`; columns of KDAI_ROWS value channels for each token. */
#define KDAI_ROWS ((size_t)32)
typedef struct kdai_work {
    size_t dim, stride; /* dim_k, and that in whole lanes */
    float *q, *k;       /* [KDA_CHUNK][stride] normalised, q scaled */
    float *decay;       /* [KDA_CHUNK][stride] exp(g) */
    float *k_seen;      /* [KDA_CHUNK][stride] k as the state before sees it: see each algorithm */
    float *q_seen;      /* [KDA_CHUNK][stride] */
    float *bias;        /* [stride] dt_bias of the head, or zeros */
    float *beta;        /* [KDA_CHUNK] */
    float *kq;          /* [KDA_CHUNK] k . q of each token (recurrent) */
    const float *v; /* values and outputs of the columns at hand, a row for each token: in the */
    float *o;           /* tensors themselves, or in the blocks below if those are not float32 */
    ptrdiff_t v_stride, o_stride;
    float *u;                /* [KDA_CHUNK][KDAI_ROWS] corrections of the same columns */
    float *v_block, *o_block; /* [KDA_CHUNK][KDAI_ROWS] */
    float *rows;        /* [4][stride] state rows in float32, where they cannot be used in place */
    float *k_left;      /* [KDA_CHUNK][stride] k as the state after the chunk sees it (chunked) */
    float *total;       /* [stride] decay over the whole chunk (chunked) */
    float *A, *P;       /* [KDA_CHUNK][KDA_CHUNK] (chunked) */
    float *panels;      /* [panels of dim_v][stride][panel] (chunked, by kernels that use them) */
    void *copy;         /* [dim_v][dim_k] of the state's type (verify) */
} kdai_work;

static size_t kdai_padded(size_t n) {
    return kdai_sum(n, KDAI_LANES - 1) / KDAI_LANES * KDAI_LANES;
}

static size_t kdai_carve_work(const kda_desc *desc, size_t panel, int chunked, int verify,
                              void *memory, kdai_work *work) {
    kdai_arena arena = kdai_arena_on(memory);
    size_t stride = kdai_padded(desc->dim_k), block = kdai_product(KDA_CHUNK, stride);
    memset(work, 0, sizeof *work);
    work->dim = desc->dim_k;
    work->stride = stride;
    work->q = kdai_take_floats(&arena, block);
    work->k = kdai_take_floats(&arena, block);
    work->decay = kdai_take_floats(&arena, block);
    work->k_seen = kdai_take_floats(&arena, block);
    work->q_seen = kdai_take_floats(&arena, block);
    work->bias = kdai_take_floats(&arena, stride);
    work->beta = kdai_take_floats(&arena, KDA_CHUNK);
    work->kq = kdai_take_floats(&arena, KDA_CHUNK);
    work->u = kdai_take_floats(&arena, KDA_CHUNK * KDAI_ROWS);
    work->v_block = kdai_take_floats(&arena, KDA_CHUNK * KDAI_ROWS);
    work->o_block = kdai_take_floats(&arena, KDA_CHUNK * KDAI_ROWS);
    work->rows = kdai_take_floats(&arena, kdai_product(4, stride));
    if (chunked) {
        work->k_left = kdai_take_floats(&arena, block);
        work->total = kdai_take_floats(&arena, stride);
        work->A = kdai_take_floats(&arena, KDA_CHUNK * KDA_CHUNK);
        work->P = kdai_take_floats(&arena, KDA_CHUNK * KDA_CHUNK);
        size_t columns = panel ? kdai_sum(desc->dim_v, panel - 1) / panel * panel : 0;
        if (panel) work->panels = kdai_take_floats(&arena, kdai_product(columns, stride));
    }
    if (verify)
        work->copy = kdai_take(&arena, kdai_product(desc->dim_v, desc->dim_k),
                               kdai_type_bytes(desc->state_type));
    return arena.used;
}

/* One token of one head on its way into a block: rows of dim_k floats, padded. */
typedef struct kdai_token {
    const kda_desc *desc;
    const float *q, *k, *g; /* as the tensors have them */
    float scale;            /* of the query */
    float a;                /* exp(A_log) */
} kdai_token;

/* Rows of n elements of one head on their way through a gate or a norm, from tensor to tensor: one
 * for each token, a step in bytes apart. */
#define KDAI_ROW_TOKENS ((size_t)4)
typedef struct kdai_rows {
    size_t n, n_rows;              /* n_rows: at most KDAI_ROW_TOKENS */
    const unsigned char *x, *gate; /* gate: of a gated norm */
    unsigned char *y;              /* may be x or gate */
    ptrdiff_t x_step, gate_step, y_step;
    kda_type x_type, gate_type, y_type;
} kdai_rows;

/* Tokens that pass through a block of channels of a convolution at once. */
#define KDAI_CONV_TOKENS ((size_t)8)

/* Channels first .. first + n - 1 of a head while tokens pass: whole lanes, whatever n is. */
typedef struct kdai_conv_block {
    size_t head, first, n, padded;
    size_t width;
    int silu;
    float *taps; /* [width][padded] */
    float *rows; /* [width - 1 + KDAI_CONV_TOKENS][padded]: inputs of the past, then at hand */
    float *sums; /* [KDAI_CONV_TOKENS][padded] */
    const unsigned char *x; /* the tokens at hand in the tensors, a step in bytes apart */
    unsigned char *y;
    ptrdiff_t x_step, y_step;
    kda_type x_type, y_type;
} kdai_conv_block;

/* One set of kernels. Rows of scratch are padded with zeros to whole lanes, n is their padded
 * length. */
typedef struct kdai_kernels {
    kda_isa isa;
    size_t panel; /* value channels that the chunked algorithm takes side by side; 0: row by row */
    void (*to_floats)(const void *from, kda_type type, size_t n, float *to);
    void (*from_floats)(const float *from, kda_type type, size_t n, void *to);
    void (*token)(const kdai_token *in, kdai_work *work, size_t i);
    void (*log_decay)(const kda_desc *desc, float a, const float *bias, const kdai_rows *rows);
    void (*l2_norm)(float eps, const kdai_rows *rows);
    void (*gated_norm)(const float *weight, float eps, const kdai_rows *rows);
    void (*conv)(const kdai_conv_block *block, size_t n_tokens);
    void (*update)(const float *decay, const float *k, float u, size_t n, int in_f16, float *s);
    void (*recurrent)(const kdai_work *work, size_t n_tokens, int in_f16, void *s, size_t s_stride,
                      size_t rows);
    void (*chunk_prepare)(kdai_work *work, size_t n_tokens);
    void (*chunk)(const kdai_work *work, size_t n_tokens, int in_f16, float *s);
} kdai_kernels;

/* Those of an ISA, KDA_ISA_AUTO included; null if this machine or build lacks it. Defined below,
 * when all sets are. */
static const kdai_kernels *kdai_kernels_of(kda_isa isa);

/* Four rows of n floats (a multiple of 4) to n rows of four. Defined with the instruction sets. */
static void kdai_transpose4(const float *from, size_t from_stride, size_t n, float *to,
                            size_t to_stride);

static const kdai_kernels *kdai_kernels_for(const kda_run *run) {
    return kdai_kernels_of(run ? run->isa : KDA_ISA_AUTO);
}

/* A head of a token. */
static const unsigned char *kdai_input_row(kda_input x, size_t token, size_t head) {
    ptrdiff_t at = (ptrdiff_t)token * x.token_stride + (ptrdiff_t)head * x.head_stride;
    return (const unsigned char *)x.data + at * (ptrdiff_t)kdai_type_bytes(x.type);
}

static unsigned char *kdai_result_row(kda_output y, size_t token, size_t head) {
    ptrdiff_t at = (ptrdiff_t)token * y.token_stride + (ptrdiff_t)head * y.head_stride;
    return (unsigned char *)y.data + at * (ptrdiff_t)kdai_type_bytes(y.type);
}

/* Elements first .. first + n - 1 of a head of a token. */
static void kdai_load(const kdai_kernels *kernels, kda_input x, size_t token, size_t head,
                      size_t first, size_t n, float *to) {
    const unsigned char *row = kdai_input_row(x, token, head);
    kernels->to_floats(row + first * kdai_type_bytes(x.type), x.type, n, to);
}

static void kdai_store(const kdai_kernels *kernels, kda_output y, size_t token, size_t head,
                       size_t first, size_t n, const float *from) {
    unsigned char *row = kdai_result_row(y, token, head);
    kernels->from_floats(from, y.type, n, row + first * kdai_type_bytes(y.type));
}

/* Zeros from element n of a row up to whole lanes. */
static void kdai_pad(float *row, size_t n) {
    for (size_t i = n; i % KDAI_LANES != 0; i++) row[i] = 0.0f;
}

/* 1 / |x| from the sum of squares; eps 0 means 1e-6. */
static float kdai_inverse_norm(float squares, float eps) {
    return 1.0f / sqrtf(squares + (eps == 0.0f ? 1e-6f : eps));
}

/* The log-decay of one key channel from its raw gate; `a` is exp(A_log) of the head. Never above
 * 0, so that its exponential is a factor in [0, 1]; NaN stays NaN. */
static float kdai_gate(const kda_desc *desc, float a, float bias, float raw) {
    if (desc->gate == KDA_GATE_LOG_DECAY) return raw > 0.0f ? 0.0f : raw;
    float z = raw + bias;
    if (desc->gate == KDA_GATE_SOFTPLUS) return -(a * kda_softplus(z));
    return desc->lower_bound * kda_sigmoid(a * z);
}

/* exp(A_log) of a head, kept finite: infinity times a gate of 0 would be NaN. */
static float kdai_rate(const float *A_log, size_t head) {
    if (!A_log) return 1.0f;
    return kdai_exp(A_log[head] > 88.0f ? 88.0f : A_log[head]);
}

/* A token's q and k normalised, its decay, and what the recurrent algorithm wants beside them:
 * k_seen = e k and q_seen = e q, what the state before the token is read with, and k . q. */
static void kdai_prepare_token(const kdai_token *in, kdai_work *work, size_t i) {
    size_t n = work->stride, at = i * n;
    float *q = work->q + at, *k = work->k + at, *decay = work->decay + at;
    float q_factor = 1.0f, k_factor = 1.0f;
    if (in->desc->flags & KDA_L2_NORM_QK) {
        q_factor = kdai_inverse_norm(kdai_dot(in->q, in->q, n), in->desc->l2_eps);
        k_factor = kdai_inverse_norm(kdai_dot(in->k, in->k, n), in->desc->l2_eps);
    }
    for (size_t d = 0; d < n; d++) {
        q[d] = in->q[d] * q_factor * in->scale;
        k[d] = in->k[d] * k_factor;
        decay[d] = kdai_exp(kdai_gate(in->desc, in->a, work->bias[d], in->g[d]));
        work->k_seen[at + d] = decay[d] * k[d];
        work->q_seen[at + d] = decay[d] * q[d];
    }
    work->kq[i] = kdai_dot(k, q, n);
}

static float kdai_beta(const kda_desc *desc, float x) {
    if (desc->beta == KDA_BETA_VALUE) return x;
    return kda_sigmoid(x) * (desc->beta == KDA_BETA_LOGIT_DOUBLED ? 2.0f : 1.0f);
}

static size_t kdai_qk_head(const kda_desc *desc, size_t head) {
    size_t n = kdai_qk_heads(desc);
    return desc->head_map == KDA_HEADS_TILED ? head % n : head / (desc->n_heads / n);
}

/* A row of a tensor as padded floats: where it is, if it is so already, else copied to `spare`. */
static const float *kdai_padded_row(const kdai_kernels *kernels, kda_input x, size_t token,
                                    size_t head, size_t dim, float *spare) {
    if (x.type == KDA_F32 && dim % KDAI_LANES == 0)
        return (const float *)x.data + (ptrdiff_t)token * x.token_stride +
               (ptrdiff_t)head * x.head_stride;
    kdai_load(kernels, x, token, head, 0, dim, spare);
    kdai_pad(spare, dim);
    return spare;
}

/* Fills all of `work` but the values for n tokens of a head, as the recurrent algorithm wants. */
static void kdai_prepare(const kdai_kernels *kernels, const kda_desc *desc, const kda_args *args,
                         size_t head, size_t token, size_t n, kdai_work *work) {
    size_t dim = desc->dim_k, stride = work->stride, qk_head = kdai_qk_head(desc, head);
    kdai_token in;
    in.desc = desc;
    in.scale = desc->scale == 0.0f ? 1.0f / sqrtf((float)dim) : desc->scale;
    in.a = kdai_rate(args->A_log, head);
    memset(work->bias, 0, stride * sizeof(float));
    if (args->dt_bias) memcpy(work->bias, args->dt_bias + head * dim, dim * sizeof(float));
    for (size_t i = 0; i < n; i++) {
        float *spare = work->rows;
        in.q = kdai_padded_row(kernels, args->q, token + i, qk_head, dim, spare);
        in.k = kdai_padded_row(kernels, args->k, token + i, qk_head, dim, spare + stride);
        in.g = kdai_padded_row(kernels, args->g, token + i, head, dim, spare + 2 * stride);
        kernels->token(&in, work, i);
        kdai_load(kernels, args->beta, token + i, head, 0, 1, &work->beta[i]);
        work->beta[i] = kdai_beta(desc, work->beta[i]);
    }
}

/* ==== 12. The recurrent algorithm ============================================================= */

/* One token's write to a state row: s = e s + u k. A state kept in f16 rounds after each token, so
 * that its bits do not depend on how tokens are split into calls either. */
static void kdai_update_row(const float *decay, const float *k, float u, size_t n, int in_f16,
                            float *s) {
    for (size_t d = 0; d < n; d++) s[d] = kdai_fma(k[d], u, s[d] * decay[d]);
    for (size_t d = 0; in_f16 && d < n; d++) s[d] = kda_from_f16(kda_to_f16(s[d]));
}

static const float *kdai_value_row(const kdai_work *work, size_t i) {
    return work->v + (ptrdiff_t)i * work->v_stride;
}

static float *kdai_output_row(const kdai_work *work, size_t i) {
    return work->o + (ptrdiff_t)i * work->o_stride;
}

/* One state row through n tokens of a prepared block, with column r of values and outputs. */
static void kdai_recurrent_row(const kdai_work *work, size_t n_tokens, int in_f16, float *s,
                               size_t r) {
    size_t dim = work->dim;
    for (size_t i = 0; i < n_tokens; i++) {
        size_t row = i * work->stride;
        float a = kdai_dot(s, work->k_seen + row, dim);
        float b = kdai_dot(s, work->q_seen + row, dim);
        float u = work->beta[i] * (kdai_value_row(work, i)[r] - a);
        work->u[i * KDAI_ROWS + r] = u;
        kdai_output_row(work, i)[r] = kdai_fma(work->kq[i], u, b);
        kdai_update_row(work->decay + row, work->k + row, u, dim, in_f16, s);
    }
}

/* State rows s of float or f16, s_stride elements apart, row r with column r.
 * Rows do not depend on each other, so walking a row through all tokens gives the bits of walking
 * all rows through each token, while the row stays in the cache. */
static void kdai_recurrent(const kdai_work *work, size_t n_tokens, int in_f16, void *s,
                           size_t s_stride, size_t rows) {
    for (size_t r = 0; r < rows; r++) {
        uint16_t *half = (uint16_t *)s + r * s_stride;
        float *row = in_f16 ? work->rows : (float *)s + r * s_stride;
        if (in_f16) kdai_to_floats(half, KDA_F16, work->dim, row);
        kdai_recurrent_row(work, n_tokens, in_f16, row, r);
        if (in_f16) kdai_from_floats(row, KDA_F16, work->dim, half);
    }
}

/* ==== 13. The chunked algorithm ===============================================================
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

static void kdai_chunk_prepare(kdai_work *work, size_t n) {
    size_t dim = work->stride;
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

/* One value channel through a chunk of n tokens: its state row, column 0 of v, u and o. */
static void kdai_chunk_row(const kdai_work *work, size_t n, int in_f16, float *s) {
    size_t dim = work->dim;
    float *u = work->u;
    for (size_t i = 0; i < n; i++) {
        float read = kdai_dot(s, work->k_seen + i * work->stride, dim);
        float sum = work->beta[i] * (*kdai_value_row(work, i) - read);
        for (size_t j = 0; j < i; j++)
            sum = kdai_fma(-work->A[i * KDA_CHUNK + j], u[j * KDAI_ROWS], sum);
        u[i * KDAI_ROWS] = sum;
    }
    for (size_t i = 0; i < n; i++) {
        float sum = kdai_dot(s, work->q_seen + i * work->stride, dim);
        for (size_t j = 0; j <= i; j++)
            sum = kdai_fma(work->P[i * KDA_CHUNK + j], u[j * KDAI_ROWS], sum);
        *kdai_output_row(work, i) = sum;
    }
    for (size_t d = 0; d < dim; d++) s[d] *= work->total[d];
    for (size_t j = 0; j < n; j++)
        for (size_t d = 0; d < dim; d++)
            s[d] = kdai_fma(work->k_left[j * work->stride + d], u[j * KDAI_ROWS], s[d]);
    for (size_t d = 0; in_f16 && d < dim; d++) s[d] = kda_from_f16(kda_to_f16(s[d]));
}

/* ==== 14. Journals ============================================================================ */

/* A journal begins with what it was written for; then, for each head, decays and keys [capacity]
 * [dim_k] and corrections [capacity][dim_v] (of a convolution: inputs [capacity][channels]). */
typedef struct kdai_journal {
    uint64_t magic;    /* KDAI_JOURNAL_OF_STATE, _OF_LAYER or _OF_WINDOW; 0 once used up */
    uint64_t capacity; /* tokens */
    uint64_t shape[4]; /* heads, dim_k, dim_v, type of the state; or channels, width, 0, 0 */
} kdai_journal;

#define KDAI_JOURNAL_OF_STATE 0x6b64612e75000001u
#define KDAI_JOURNAL_OF_LAYER 0x6b64612e6c000001u /* of a state, those of three windows after it */
#define KDAI_JOURNAL_OF_WINDOW 0x6b64612e78000001u
#define KDAI_JOURNAL_HEADER ((size_t)64)

static kdai_journal kdai_journal_for(const kda_desc *desc, uint64_t magic, size_t capacity) {
    kdai_journal journal;
    journal.magic = magic;
    journal.capacity = capacity;
    journal.shape[0] = desc->n_heads;
    journal.shape[1] = desc->dim_k;
    journal.shape[2] = desc->dim_v;
    journal.shape[3] = (uint64_t)desc->state_type;
    return journal;
}

static kdai_journal kdai_conv_journal_for(const kda_conv_desc *desc, size_t capacity) {
    kdai_journal journal;
    journal.magic = KDAI_JOURNAL_OF_WINDOW;
    journal.capacity = capacity;
    journal.shape[0] = desc->channels;
    journal.shape[1] = desc->width;
    journal.shape[2] = journal.shape[3] = 0;
    return journal;
}

/* Whether `bytes` begin with a journal like `like`, of any capacity, and which. */
static int kdai_journal_read(const void *bytes, kdai_journal like, size_t *capacity) {
    kdai_journal found;
    memcpy(&found, bytes, sizeof found);
    *capacity = (size_t)found.capacity;
    like.capacity = found.capacity;
    return memcmp(&found, &like, sizeof found) == 0;
}

/* A commit of more than nothing must fit what a verify wrote. */
static kda_result kdai_check_journal(const void *bytes, kdai_journal like, size_t accepted) {
    size_t capacity;
    if (accepted == 0) return KDA_OK;
    if (!bytes) return KDA_ERR_NULL;
    if (!kdai_journal_read(bytes, like, &capacity)) return KDA_ERR_JOURNAL;
    return accepted > capacity ? KDA_ERR_COUNT : KDA_OK;
}

static size_t kdai_journal_bytes(size_t n_tokens, size_t floats_per_token) {
    size_t bytes = kdai_product(kdai_product(n_tokens, floats_per_token), sizeof(float));
    return n_tokens == 0 ? KDAI_JOURNAL_HEADER : kdai_sum(bytes, KDAI_JOURNAL_HEADER);
}

KDA_API size_t kda_journal_bytes(const kda_desc *desc, size_t n_tokens) {
    if (kdai_check_desc(desc) != KDA_OK) return 0;
    size_t row = kdai_sum(kdai_product(2, desc->dim_k), desc->dim_v);
    return kdai_journal_bytes(n_tokens, kdai_product(desc->n_heads, row));
}

/* The parts of one head in a journal. */
typedef struct kdai_journal_head {
    float *decay, *k; /* [capacity][dim_k] */
    float *u;         /* [capacity][dim_v] */
} kdai_journal_head;

static kdai_journal_head kdai_journal_of_head(const kda_desc *desc, void *bytes, size_t head) {
    kdai_journal_head parts;
    kdai_journal header;
    memcpy(&header, bytes, sizeof header);
    size_t keys = (size_t)header.capacity * desc->dim_k,
           values = (size_t)header.capacity * desc->dim_v;
    parts.decay = (float *)(void *)((unsigned char *)bytes + KDAI_JOURNAL_HEADER) +
                  head * (2 * keys + values);
    parts.k = parts.decay + keys;
    parts.u = parts.k + keys;
    return parts;
}

/* ==== 15. The operator ======================================================================== */

/* A call on a batch. One item of work is a tile of value channels of a head of a span. */
typedef struct kdai_operator {
    const kdai_kernels *kernels;
    const kda_desc *desc;
    const kda_args *args;
    const kdai_span *spans;
    size_t n_spans;
    kdai_batch batch;
    size_t tiles, tile_rows; /* of each head */
    int chunked, verify;     /* whether workers have the scratch for it */
} kdai_operator;

/* Rows first .. first + n - 1 of one head's state in one item's hands. */
typedef struct kdai_tile {
    size_t head, first, n;
    unsigned char *state; /* its first row */
} kdai_tile;

static kdai_tile kdai_tile_of(const kdai_operator *op, const kdai_span *span, size_t index) {
    const kda_desc *desc = op->desc;
    kdai_tile tile;
    tile.head = index / op->tiles;
    tile.first = index % op->tiles * op->tile_rows;
    tile.n = desc->dim_v - tile.first < op->tile_rows ? desc->dim_v - tile.first : op->tile_rows;
    tile.state = (unsigned char *)span->seq->state + (tile.head * desc->dim_v + tile.first) *
                     desc->dim_k * kdai_type_bytes(desc->state_type);
    return tile;
}

static size_t kdai_row_bytes(const kda_desc *desc) {
    return desc->dim_k * kdai_type_bytes(desc->state_type);
}

/* State rows are used where they are if they are whole lanes, or lanes do not matter. */
static int kdai_rows_in_place(const kdai_operator *op, const kdai_work *work) {
    return work->dim == work->stride || op->kernels->isa == KDA_ISA_SCALAR;
}

/* Up to four rows of a tile as they are, padded, to work->rows, or back to the tile. */
static void kdai_borrow_rows(const kdai_operator *op, const kdai_tile *tile, size_t first, size_t n,
                             const kdai_work *work, int back) {
    size_t size = kdai_type_bytes(op->desc->state_type), bytes = kdai_row_bytes(op->desc);
    for (size_t r = 0; r < n; r++) {
        unsigned char *padded = (unsigned char *)work->rows + r * work->stride * size;
        unsigned char *row = tile->state + (first + r) * bytes;
        if (back)
            memcpy(row, padded, bytes);
        else
            memcpy(padded, row, bytes);
        if (!back) memset(padded + bytes, 0, work->stride * size - bytes);
    }
}

/* Rows first .. first + n - 1 of a tile as floats, padded, and back. */
static void kdai_open_rows(const kdai_operator *op, const kdai_tile *tile, size_t first, size_t n,
                           const kdai_work *work) {
    for (size_t r = 0; r < n; r++) {
        float *row = work->rows + r * work->stride;
        op->kernels->to_floats(tile->state + (first + r) * kdai_row_bytes(op->desc),
                               op->desc->state_type, work->dim, row);
        kdai_pad(row, work->dim);
    }
}

static void kdai_close_rows(const kdai_operator *op, const kdai_tile *tile, size_t first, size_t n,
                            const kdai_work *work) {
    for (size_t r = 0; r < n; r++)
        op->kernels->from_floats(work->rows + r * work->stride, op->desc->state_type, work->dim,
                                 tile->state + (first + r) * kdai_row_bytes(op->desc));
}

/* Applies n tokens to a tile: decays and keys from `work`, corrections u [n][dim_v]. */
static void kdai_apply(const kdai_operator *op, const kdai_work *work, size_t n, const float *u,
                       const kdai_tile *tile) {
    int in_f16 = op->desc->state_type == KDA_F16;
    for (size_t row = 0; row < tile->n; row++) {
        float *s = work->rows;
        kdai_open_rows(op, tile, row, 1, work);
        for (size_t i = 0; i < n; i++)
            op->kernels->update(work->decay + i * work->stride, work->k + i * work->stride,
                                u[i * op->desc->dim_v + tile->first + row], work->stride, in_f16,
                                s);
        kdai_close_rows(op, tile, row, 1, work);
    }
}

/* Applies tokens 0 .. n - 1 of a journal to a tile. */
static void kdai_replay(const kdai_operator *op, void *journal, size_t n, const kdai_tile *tile,
                        const kdai_work *work) {
    kdai_journal_head parts = kdai_journal_of_head(op->desc, journal, tile->head);
    for (size_t done = 0; done < n; done += KDA_CHUNK) {
        size_t some = n - done < KDA_CHUNK ? n - done : KDA_CHUNK;
        for (size_t i = 0; i < some; i++) {
            float *decay = work->decay + i * work->stride, *k = work->k + i * work->stride;
            memcpy(decay, parts.decay + (done + i) * work->dim, work->dim * sizeof(float));
            memcpy(k, parts.k + (done + i) * work->dim, work->dim * sizeof(float));
            kdai_pad(decay, work->dim);
            kdai_pad(k, work->dim);
        }
        kdai_apply(op, work, some, parts.u + done * op->desc->dim_v, tile);
    }
}

/* Puts a block's n tokens into a journal at token `at`: corrections of rows first .. of the tile,
 * and, for one tile of a head only, decays and keys. */
static void kdai_record(const kda_desc *desc, const kdai_work *work, void *journal, size_t at,
                        size_t n, const kdai_tile *tile, size_t first, size_t rows) {
    kdai_journal_head parts = kdai_journal_of_head(desc, journal, tile->head);
    size_t dim = work->dim, bytes = dim * sizeof(float);
    for (size_t i = 0; i < n; i++) {
        memcpy(parts.u + (at + i) * desc->dim_v + tile->first + first, work->u + i * KDAI_ROWS,
               rows * sizeof(float));
        if (tile->first != 0 || first != 0) continue;
        memcpy(parts.decay + (at + i) * dim, work->decay + i * work->stride, bytes);
        memcpy(parts.k + (at + i) * dim, work->k + i * work->stride, bytes);
    }
}

/* `work` with columns of v, u and o counted from `column`. */
static kdai_work kdai_from_column(const kdai_work *work, size_t column) {
    kdai_work part = *work;
    part.v += column;
    part.u += column;
    part.o += column;
    return part;
}

/* Rows first .. first + rows - 1 of a tile through a prepared block of n tokens. */
static void kdai_run_recurrent(const kdai_operator *op, const kdai_work *work, size_t n,
                               const kdai_tile *tile, size_t first, size_t rows) {
    int in_place = kdai_rows_in_place(op, work), in_f16 = op->desc->state_type == KDA_F16;
    size_t step = in_place ? rows : 4;
    for (size_t r = 0; r < rows; r += step) {
        size_t some = rows - r < step ? rows - r : step;
        kdai_work part = kdai_from_column(work, r);
        void *s = tile->state + (first + r) * kdai_row_bytes(op->desc);
        if (!in_place) kdai_borrow_rows(op, tile, first + r, some, work, 0);
        op->kernels->recurrent(&part, n, in_f16, in_place ? s : work->rows,
                               in_place ? work->dim : work->stride, some);
        if (!in_place) kdai_borrow_rows(op, tile, first + r, some, work, 1);
    }
}

/* The same through a prepared chunk, by kernels that take it row by row. */
static void kdai_run_chunk_rows(const kdai_operator *op, const kdai_work *work, size_t n,
                                const kdai_tile *tile, size_t first, size_t rows) {
    for (size_t r = 0; r < rows; r++) {
        kdai_work part = kdai_from_column(work, r);
        kdai_open_rows(op, tile, first + r, 1, work);
        op->kernels->chunk(&part, n, op->desc->state_type == KDA_F16, work->rows);
        kdai_close_rows(op, tile, first + r, 1, work);
    }
}

/* Points work->v and o at value channels first .. first + rows - 1 of a tile, for n tokens of the
 * call: in the tensors if they are float32 and `rows` are as many as the kernel takes at once, else
 * in blocks of scratch, to which values are copied and from which kdai_store_outputs copies. */
static void kdai_point_at(const kdai_operator *op, const kdai_tile *tile, size_t token, size_t n,
                          size_t first, size_t rows, int in_place, kdai_work *work) {
    kda_input v = op->args->v;
    kda_output o = op->args->o;
    ptrdiff_t t = (ptrdiff_t)token, h = (ptrdiff_t)tile->head;
    ptrdiff_t column = (ptrdiff_t)(tile->first + first);
    work->v = work->v_block;
    work->o = work->o_block;
    work->v_stride = work->o_stride = (ptrdiff_t)KDAI_ROWS;
    if (in_place && v.type == KDA_F32) {
        work->v = (const float *)v.data + t * v.token_stride + h * v.head_stride + column;
        work->v_stride = v.token_stride;
    } else {
        for (size_t i = 0; i < n; i++)
            kdai_load(op->kernels, v, token + i, tile->head, (size_t)column, rows,
                      work->v_block + i * KDAI_ROWS);
    }
    if (in_place && o.type == KDA_F32) {
        work->o = (float *)o.data + t * o.token_stride + h * o.head_stride + column;
        work->o_stride = o.token_stride;
    }
}

static void kdai_store_outputs(const kdai_operator *op, const kdai_tile *tile, size_t token,
                               size_t n, size_t first, size_t rows, const kdai_work *work) {
    for (size_t i = 0; work->o == work->o_block && i < n; i++)
        kdai_store(op->kernels, op->args->o, token + i, tile->head, tile->first + first, rows,
                   work->o_block + i * KDAI_ROWS);
}

/* Four columns of a panel (to), padded rows of dim_k, and the rows themselves (work->rows). */
static void kdai_rows_to_columns(const kdai_work *work, size_t panel, float *to) {
    kdai_transpose4(work->rows, work->stride, work->stride, to, panel);
}

/* The same back: n rows of four floats to four rows of n. */
static void kdai_columns_to_rows(const kdai_work *work, size_t panel, const float *from) {
    for (size_t d = 0; d < work->stride; d += 4)
        kdai_transpose4(from + d * panel, panel, 4, work->rows + d, work->stride);
}

/* The tile's rows as panels [dim_k][panel] of value channels, or back. Channels past the tile's
 * last, and key channels past dim_k, are zeros. */
static void kdai_move_panels(const kdai_operator *op, const kdai_tile *tile, kdai_work *work,
                             int back) {
    size_t panel = op->kernels->panel, size = work->stride * panel;
    size_t padded = (tile->n + panel - 1) / panel * panel;
    for (size_t row = 0; row < padded; row += 4) {
        float *columns = work->panels + row / panel * size + row % panel;
        size_t rows = row >= tile->n ? 0 : tile->n - row < 4 ? tile->n - row : 4;
        if (back) {
            kdai_columns_to_rows(work, panel, columns);
            kdai_close_rows(op, tile, row, rows, work);
        } else {
            if (rows < 4) memset(work->rows, 0, 4 * work->stride * sizeof(float));
            kdai_open_rows(op, tile, row, rows, work);
            kdai_rows_to_columns(work, panel, columns);
        }
    }
}

/* Asks for one head's row of a token, which lies too far from the last for hardware to foresee. */
static void kdai_prefetch_row(kda_input x, size_t token, size_t head, size_t first, size_t n) {
#if defined(__GNUC__)
    ptrdiff_t size = (ptrdiff_t)kdai_type_bytes(x.type);
    ptrdiff_t at = (ptrdiff_t)token * x.token_stride + (ptrdiff_t)head * x.head_stride;
    const unsigned char *row = (const unsigned char *)x.data + (at + (ptrdiff_t)first) * size;
    for (size_t byte = 0; byte < n * (size_t)size; byte += 64) __builtin_prefetch(row + byte);
#else
    (void)x, (void)token, (void)head, (void)first, (void)n;
#endif
}

static void kdai_prefetch_tokens(const kdai_operator *op, const kdai_tile *tile, size_t token,
                                 size_t n) {
    size_t qk_head = kdai_qk_head(op->desc, tile->head), dim = op->desc->dim_k;
    for (size_t i = 0; i < n; i++) {
        kdai_prefetch_row(op->args->q, token + i, qk_head, 0, dim);
        kdai_prefetch_row(op->args->k, token + i, qk_head, 0, dim);
        kdai_prefetch_row(op->args->g, token + i, tile->head, 0, dim);
        kdai_prefetch_row(op->args->v, token + i, tile->head, tile->first, tile->n);
    }
}

/* A tile through all tokens of a span, by panels. */
static void kdai_run_panels(const kdai_operator *op, const kdai_span *span, const kdai_tile *tile,
                            kdai_work *work) {
    size_t panel = op->kernels->panel;
    kdai_move_panels(op, tile, work, 0);
    for (size_t done = 0; done < span->n_tokens; done += KDA_CHUNK) {
        size_t n = span->n_tokens - done < KDA_CHUNK ? span->n_tokens - done : KDA_CHUNK;
        size_t token = span->token + done;
        kdai_prepare(op->kernels, op->desc, op->args, tile->head, token, n, work);
        op->kernels->chunk_prepare(work, n);
        size_t left = span->n_tokens - done - n;
        kdai_prefetch_tokens(op, tile, token + n, left < KDA_CHUNK ? left : KDA_CHUNK);
        for (size_t first = 0; first < tile->n; first += panel) {
            size_t rows = tile->n - first < panel ? tile->n - first : panel;
            kdai_point_at(op, tile, token, n, first, rows, rows == panel, work);
            op->kernels->chunk(work, n, op->desc->state_type == KDA_F16,
                               work->panels + first * work->stride);
            kdai_store_outputs(op, tile, token, n, first, rows, work);
        }
    }
    kdai_move_panels(op, tile, work, 1);
}

/* A tile through all tokens of a span, row by row. */
static void kdai_run_tile(const kdai_operator *op, const kdai_span *span, const kdai_tile *tile,
                          kdai_work *work) {
    for (size_t done = 0; done < span->n_tokens; done += KDA_CHUNK) {
        size_t n = span->n_tokens - done < KDA_CHUNK ? span->n_tokens - done : KDA_CHUNK;
        size_t token = span->token + done;
        kdai_prepare(op->kernels, op->desc, op->args, tile->head, token, n, work);
        if (span->chunked) op->kernels->chunk_prepare(work, n);
        for (size_t first = 0; first < tile->n; first += KDAI_ROWS) {
            size_t rows = tile->n - first < KDAI_ROWS ? tile->n - first : KDAI_ROWS;
            kdai_point_at(op, tile, token, n, first, rows, 1, work);
            if (span->chunked)
                kdai_run_chunk_rows(op, work, n, tile, first, rows);
            else
                kdai_run_recurrent(op, work, n, tile, first, rows);
            kdai_store_outputs(op, tile, token, n, first, rows, work);
            if (op->verify)
                kdai_record(op->desc, work, span->seq->journal, span->done + done, n, tile, first,
                            rows);
        }
    }
}

/* While a tile is worked on, subnormal numbers count as 0: a state that has all but decayed would
 * make a step 50 times slower on some processors. Returns the floating-point environment to put
 * back. */
static uint64_t kdai_flush_subnormals(void) {
#if defined(__x86_64__) || defined(_M_X64)
    unsigned saved = _mm_getcsr();
    _mm_setcsr(saved | 0x8040u); /* flush results to zero, take operands as zero */
    return saved;
#elif defined(__aarch64__) && defined(__GNUC__)
    uint64_t saved;
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved));
    __asm__ volatile("msr fpcr, %0" : : "r"(saved | (uint64_t)1 << 24));
    return saved;
#else
    return 0;
#endif
}

static void kdai_restore_environment(uint64_t saved) {
#if defined(__x86_64__) || defined(_M_X64)
    _mm_setcsr((unsigned)saved);
#elif defined(__aarch64__) && defined(__GNUC__)
    __asm__ volatile("msr fpcr, %0" : : "r"(saved));
#else
    (void)saved;
#endif
}

static void kdai_operator_item(void *call, size_t item, size_t worker) {
    const kdai_operator *op = (const kdai_operator *)call;
    size_t items_per_span = op->desc->n_heads * op->tiles;
    const kdai_span *span = &op->spans[item / items_per_span];
    kdai_tile tile = kdai_tile_of(op, span, item % items_per_span);
    kdai_work work;
    kdai_carve_work(op->desc, op->kernels->panel, op->chunked, op->verify,
                    op->batch.memory + worker * op->batch.each, &work);
    uint64_t environment = kdai_flush_subnormals();
    if (op->verify) { /* on a copy, moved on to where an earlier span of the sequence ended */
        size_t bytes = tile.n * op->desc->dim_k * kdai_type_bytes(op->desc->state_type);
        memcpy(work.copy, tile.state, bytes);
        tile.state = (unsigned char *)work.copy;
        kdai_replay(op, span->seq->journal, span->done, &tile, &work);
    }
    if (span->chunked && op->kernels->panel)
        kdai_run_panels(op, span, &tile, &work);
    else
        kdai_run_tile(op, span, &tile, &work);
    kdai_restore_environment(environment);
}

static void kdai_commit_item(void *call, size_t item, size_t worker) {
    const kdai_operator *op = (const kdai_operator *)call;
    size_t items_per_span = op->desc->n_heads * op->tiles;
    const kdai_span *span = &op->spans[item / items_per_span];
    kdai_tile tile = kdai_tile_of(op, span, item % items_per_span);
    kdai_work work;
    kdai_carve_work(op->desc, op->kernels->panel, op->chunked, op->verify,
                    op->batch.memory + worker * op->batch.each, &work);
    uint64_t environment = kdai_flush_subnormals();
    kdai_replay(op, span->seq->journal, span->n_tokens, &tile, &work);
    kdai_restore_environment(environment);
}

/* Splits heads into tiles of value channels until there are a few items for each worker. Preparing
 * a block is repeated for each tile, so that a tile is about 8 channels or more. */
static void kdai_run_operator(kdai_operator *op, const kda_run *run, kdai_item item) {
    size_t heads = op->n_spans * op->desc->n_heads, wanted = 2 * kdai_workers(run);
    size_t most = (op->desc->dim_v + 7) / 8;
    op->tiles = 1;
    while (kdai_workers(run) > 1 && op->tiles < most && heads * op->tiles < wanted) op->tiles++;
    op->tile_rows = (op->desc->dim_v + op->tiles - 1) / op->tiles;
    op->tiles = (op->desc->dim_v + op->tile_rows - 1) / op->tile_rows;
    kdai_parallel(run, heads * op->tiles, item, op);
}

static size_t kdai_carve_operator(const kda_desc *desc, size_t n_seqs, const kda_run *run,
                                  int verify, void *memory, kdai_operator *op) {
    kdai_arena arena = kdai_arena_on(memory);
    kdai_work work;
    memset(op, 0, sizeof *op);
    op->kernels = kdai_kernels_for(run);
    op->desc = desc;
    op->verify = verify;
    op->chunked = !verify && (!run || run->algorithm != KDA_RECURRENT);
    size_t each = kdai_carve_work(desc, op->kernels->panel, op->chunked, verify, NULL, &work);
    kdai_take_batch(&arena, n_seqs, kdai_workers(run), each, &op->batch);
    op->spans = op->batch.spans;
    return arena.used;
}

static size_t kdai_operator_bytes(const kda_desc *desc, size_t n_seqs, const kda_run *run,
                                  int verify) {
    kdai_operator op;
    if (kdai_check_desc(desc) != KDA_OK || (run && kdai_check_run(run) != KDA_OK)) return 0;
    return kdai_carve_operator(desc, n_seqs, run, verify, NULL, &op);
}

KDA_API size_t kda_scratch_bytes(const kda_desc *desc, size_t n_seqs, const kda_run *run) {
    return kdai_operator_bytes(desc, n_seqs, run, 0);
}

KDA_API size_t kda_verify_scratch_bytes(const kda_desc *desc, size_t n_seqs, const kda_run *run) {
    return kdai_operator_bytes(desc, n_seqs, run, 1);
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

static kda_result kdai_check_states(const kda_desc *desc, const kda_seq *seqs, size_t n_seqs,
                                    uintptr_t *sorted) {
    return kdai_check_owned(seqs, n_seqs, KDAI_STATE, kda_state_bytes(desc),
                            kdai_type_bytes(desc->state_type), sorted);
}

/* From `at` to the next of n sorted addresses above it; SIZE_MAX if there is none. */
static size_t kdai_room(const uintptr_t *sorted, size_t n, uintptr_t at) {
    size_t low = 0, high = n;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (sorted[middle] > at)
            high = middle;
        else
            low = middle + 1;
    }
    return low < n ? (size_t)(sorted[low] - at) : SIZE_MAX;
}

/* Every sequence that is not padding and not empty has a journal, and none reaches into another's;
 * `none` and `one` are the bytes of a journal for 0 tokens and for 1. */
static kda_result kdai_check_journals(const kda_seq *seqs, size_t n_seqs, kdai_owned owner,
                                      size_t none, size_t one, uintptr_t *sorted) {
    if (one == 0) return KDA_ERR_SIZE;
    kda_result result = kdai_check_owned(seqs, n_seqs, KDAI_JOURNAL, none, sizeof(float), sorted);
    size_t journals = 0;
    for (size_t i = 0; i < n_seqs; i++) journals += seqs[i].journal != NULL;
    for (size_t i = 0; result == KDA_OK && i < n_seqs; i++) {
        if (seqs[i].n_tokens == 0 || !kdai_owned_of(&seqs[i], owner)) continue;
        if (!seqs[i].journal) return KDA_ERR_NULL;
        size_t room = kdai_room(sorted, journals, (uintptr_t)seqs[i].journal);
        if ((room - none) / (one - none) < seqs[i].n_tokens) result = KDA_ERR_ALIAS;
    }
    return result;
}

/* All checks of a forward or verify, and its scratch handed out. */
static kda_result kdai_open_operator(const kda_desc *desc, const kda_args *args, const kda_run *run,
                                     int verify, kdai_operator *op) {
    size_t n_tokens;
    kda_result result = kdai_check_desc(desc);
    if (result == KDA_OK && !args) result = KDA_ERR_NULL;
    if (result == KDA_OK) result = kdai_check_run(run);
    if (result == KDA_OK) result = kdai_count_tokens(args->seqs, args->n_seqs, &n_tokens);
    if (result == KDA_OK) result = kdai_check_tensors(desc, args, n_tokens);
    if (result != KDA_OK) return result;
    if (verify && run->algorithm == KDA_CHUNKED) return KDA_ERR_ALGORITHM;
    size_t needed = kdai_operator_bytes(desc, args->n_seqs, run, verify);
    if (needed == 0) return KDA_ERR_SIZE;
    if (!run->scratch || run->scratch_bytes < needed) return KDA_ERR_SCRATCH;
    kdai_carve_operator(desc, args->n_seqs, run, verify, run->scratch, op);
    op->args = args;
    result = kdai_check_states(desc, args->seqs, args->n_seqs, op->batch.sorted);
    if (result == KDA_OK && verify)
        result =
            kdai_check_journals(args->seqs, args->n_seqs, KDAI_STATE, kda_journal_bytes(desc, 0),
                                kda_journal_bytes(desc, 1), op->batch.sorted);
    return result;
}

KDA_API kda_result kda_forward(const kda_desc *desc, const kda_args *args, const kda_run *run) {
    kdai_operator op;
    kda_result result = kdai_open_operator(desc, args, run, 0, &op);
    if (result != KDA_OK) return result;
    op.n_spans = kdai_list_spans(args->seqs, args->n_seqs, KDAI_STATE, run->algorithm,
                                 op.batch.spans);
    kdai_run_operator(&op, run, kdai_operator_item);
    return KDA_OK;
}

static void kdai_begin_journals(const kda_desc *desc, uint64_t magic, const kdai_span *spans,
                                size_t n_spans) {
    for (size_t i = 0; i < n_spans; i++) {
        kdai_journal header = kdai_journal_for(desc, magic, spans[i].seq->n_tokens);
        memcpy(spans[i].seq->journal, &header, sizeof header);
    }
}

KDA_API kda_result kda_verify(const kda_desc *desc, const kda_args *args, const kda_run *run) {
    kdai_operator op;
    kda_result result = kdai_open_operator(desc, args, run, 1, &op);
    if (result != KDA_OK) return result;
    op.n_spans = kdai_list_spans(args->seqs, args->n_seqs, KDAI_STATE, KDA_RECURRENT,
                                 op.batch.spans);
    kdai_begin_journals(desc, KDAI_JOURNAL_OF_STATE, op.spans, op.n_spans);
    kdai_run_operator(&op, run, kdai_operator_item);
    return KDA_OK;
}

/* Writes 0 to the magic of each span's journal at `offset`: it cannot be committed twice. */
static void kdai_use_up_journals(const kdai_span *spans, size_t n_spans, size_t offset) {
    uint64_t used_up = 0;
    for (size_t i = 0; i < n_spans; i++)
        memcpy((unsigned char *)spans[i].seq->journal + offset, &used_up, sizeof used_up);
}

KDA_API kda_result kda_commit(const kda_desc *desc, const kda_seq *seqs, size_t n_seqs,
                              const kda_run *run) {
    kdai_operator op;
    size_t n_tokens;
    kda_result result = kdai_check_desc(desc);
    if (result == KDA_OK) result = kdai_check_run(run);
    if (result == KDA_OK) result = kdai_count_tokens(seqs, n_seqs, &n_tokens);
    if (result != KDA_OK) return result;
    size_t needed = kda_scratch_bytes(desc, n_seqs, run);
    if (needed == 0) return KDA_ERR_SIZE;
    if (!run->scratch || run->scratch_bytes < needed) return KDA_ERR_SCRATCH;
    kdai_carve_operator(desc, n_seqs, run, 0, run->scratch, &op);
    kdai_journal like = kdai_journal_for(desc, KDAI_JOURNAL_OF_STATE, 0);
    result = kdai_check_states(desc, seqs, n_seqs, op.batch.sorted);
    if (result == KDA_OK)
        result = kdai_check_owned(seqs, n_seqs, KDAI_JOURNAL, kda_journal_bytes(desc, 0),
                                  sizeof(float), op.batch.sorted);
    for (size_t i = 0; result == KDA_OK && i < n_seqs; i++)
        if (seqs[i].state)
            result = kdai_check_journal(seqs[i].journal, like, seqs[i].n_tokens);
    if (result != KDA_OK) return result;
    op.n_spans = kdai_list_spans(seqs, n_seqs, KDAI_STATE, KDA_RECURRENT, op.batch.spans);
    kdai_run_operator(&op, run, kdai_commit_item);
    kdai_use_up_journals(op.spans, op.n_spans, 0);
    return KDA_OK;
}

/* ==== 16. The state's life ==================================================================== */

KDA_API size_t kda_state_bytes(const kda_desc *desc) {
    if (kdai_check_desc(desc) != KDA_OK) return 0;
    return desc->n_heads * desc->dim_v * desc->dim_k * kdai_type_bytes(desc->state_type);
}

static kda_result kdai_check_state(const kda_desc *desc, const void *state) {
    kda_result result = kdai_check_desc(desc);
    if (result != KDA_OK) return result;
    if (!state) return KDA_ERR_NULL;
    return kdai_is_misaligned(state, kdai_type_bytes(desc->state_type)) ? KDA_ERR_ALIGN : KDA_OK;
}

KDA_API kda_result kda_state_clear(const kda_desc *desc, void *state) {
    if (!state) return KDA_ERR_NULL;
    kda_result result = kdai_check_state(desc, state);
    if (result != KDA_OK) return result;
    memset(state, 0, kda_state_bytes(desc));
    return KDA_OK;
}

KDA_API kda_result kda_state_copy(const kda_desc *desc, const void *from, void *to) {
    if (!from || !to) return KDA_ERR_NULL;
    kda_result result = kdai_check_state(desc, from);
    if (result == KDA_OK) result = kdai_check_state(desc, to);
    if (result != KDA_OK) return result;
    memcpy(to, from, kda_state_bytes(desc));
    return KDA_OK;
}

KDA_API int kda_state_is_finite(const kda_desc *desc, const void *state) {
    if (kdai_check_state(desc, state) != KDA_OK) return 0;
    size_t n = desc->n_heads * desc->dim_v * desc->dim_k;
    for (size_t i = 0; i < n; i++)
        if (!(fabsf(kdai_element(state, desc->state_type, i)) < INFINITY)) return 0;
    return 1;
}

static kda_result kdai_check_kv(const kda_desc *desc, const void *state, const float *kv) {
    kda_result result = kdai_check_state(desc, state);
    if (result == KDA_OK && !kv) result = KDA_ERR_NULL;
    if (result == KDA_OK && kdai_is_misaligned(kv, sizeof(float))) result = KDA_ERR_ALIGN;
    return result;
}

/* The place in [heads][dim_k][dim_v] order of element i of a state. */
static size_t kdai_kv_place(const kda_desc *desc, size_t i) {
    size_t k = i % desc->dim_k, v = i / desc->dim_k % desc->dim_v;
    size_t head = i / desc->dim_k / desc->dim_v;
    return (head * desc->dim_k + k) * desc->dim_v + v;
}

KDA_API kda_result kda_state_import_kv(const kda_desc *desc, const float *kv, void *state) {
    kda_result result = kdai_check_kv(desc, state, kv);
    if (result != KDA_OK) return result;
    size_t n = desc->n_heads * desc->dim_v * desc->dim_k, size = kdai_type_bytes(desc->state_type);
    for (size_t i = 0; i < n; i++)
        kdai_from_floats(kv + kdai_kv_place(desc, i), desc->state_type, 1,
                         (unsigned char *)state + i * size);
    return KDA_OK;
}

KDA_API kda_result kda_state_export_kv(const kda_desc *desc, const void *state, float *kv) {
    kda_result result = kdai_check_kv(desc, state, kv);
    if (result != KDA_OK) return result;
    size_t n = desc->n_heads * desc->dim_v * desc->dim_k;
    for (size_t i = 0; i < n; i++)
        kv[kdai_kv_place(desc, i)] = kdai_element(state, desc->state_type, i);
    return KDA_OK;
}

/* ==== 17. Saved states ========================================================================
 *
 * A blob, all numbers little-endian:
 *
 *      0  "KDASTATE"
 *      8  u32 version (1)        12  u32 bytes of this header (80)
 *     16  u64 bytes of the blob
 *     24  u64 n_heads            32  u64 dim_k           40  u64 dim_v
 *     48  u64 bytes of the window
 *     56  u32 element type of the state (kda_type)       60  u32 order (1: [head][dim_v][dim_k])
 *     64  u64 tokens seen
 *     72  u64 checksum
 *     80  the state, then the window (float32)
 *
 * The checksum begins as the bytes of the blob and takes in the words of 8 bytes from 0 to 71 and
 * from 80 on, the last filled up with zeros: sum = (sum ^ word) * 0x9e3779b97f4a7c15, then
 * sum ^= sum >> 32. */

#define KDAI_BLOB_HEADER ((size_t)80)
#define KDAI_BLOB_VERSION 1u
#define KDAI_BLOB_ORDER 1u
static const char kdai_blob_magic[8] = {'K', 'D', 'A', 'S', 'T', 'A', 'T', 'E'};

static void kdai_put(unsigned char *at, uint64_t value, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) at[i] = (unsigned char)(value >> 8 * i);
}

static uint64_t kdai_get(const unsigned char *at, size_t bytes) {
    uint64_t value = 0;
    for (size_t i = 0; i < bytes; i++) value |= (uint64_t)at[i] << 8 * i;
    return value;
}

/* Numbers of `size` bytes in memory to little-endian bytes, and back. */
static void kdai_put_all(unsigned char *to, const void *from, size_t count, size_t size) {
    for (size_t i = 0; i < count; i++) {
        uint16_t half;
        uint32_t word;
        memcpy(&half, (const unsigned char *)from + i * size, sizeof half);
        if (size == sizeof word) memcpy(&word, (const unsigned char *)from + i * size, sizeof word);
        kdai_put(to + i * size, size == sizeof word ? word : half, size);
    }
}

static void kdai_get_all(void *to, const unsigned char *from, size_t count, size_t size) {
    for (size_t i = 0; i < count; i++) {
        uint32_t word = (uint32_t)kdai_get(from + i * size, size);
        uint16_t half = (uint16_t)word;
        memcpy((unsigned char *)to + i * size, size == sizeof word ? (void *)&word : (void *)&half,
               size);
    }
}

/* Adds bytes to a checksum, 8 at a time. Each step is one-to-one in the sum and in the 8 bytes, so
 * any change within one such word changes the result. */
static uint64_t kdai_checksum(uint64_t sum, const unsigned char *bytes, size_t n) {
    for (size_t i = 0; i < n; i += 8) {
        size_t some = n - i < 8 ? n - i : 8;
        sum = (sum ^ kdai_get(bytes + i, some)) * 0x9e3779b97f4a7c15u;
        sum ^= sum >> 32;
    }
    return sum;
}

static uint64_t kdai_blob_checksum(const unsigned char *blob, size_t bytes) {
    uint64_t sum = kdai_checksum(bytes, blob, 72);
    return kdai_checksum(sum, blob + KDAI_BLOB_HEADER, bytes - KDAI_BLOB_HEADER);
}

KDA_API size_t kda_save_bytes(const kda_desc *desc, size_t window_bytes) {
    if (kdai_check_desc(desc) != KDA_OK || window_bytes % sizeof(float) != 0) return 0;
    size_t bytes = kdai_sum(kda_state_bytes(desc), KDAI_BLOB_HEADER);
    return window_bytes == 0 ? bytes : kdai_sum(bytes, window_bytes);
}

static kda_result kdai_check_saved(const kda_desc *desc, const kda_saved *saved, const void *blob) {
    if (!saved || !blob) return KDA_ERR_NULL;
    kda_result result = kdai_check_state(desc, saved->state);
    if (result != KDA_OK) return result;
    if (saved->window_bytes > 0 && !saved->window) return KDA_ERR_NULL;
    if (kdai_is_misaligned(saved->window, sizeof(float))) return KDA_ERR_ALIGN;
    return kda_save_bytes(desc, saved->window_bytes) ? KDA_OK : KDA_ERR_SIZE;
}

static void kdai_put_header(const kda_desc *desc, const kda_saved *saved, unsigned char *blob) {
    memcpy(blob, kdai_blob_magic, sizeof kdai_blob_magic);
    kdai_put(blob + 8, KDAI_BLOB_VERSION, 4);
    kdai_put(blob + 12, KDAI_BLOB_HEADER, 4);
    kdai_put(blob + 16, kda_save_bytes(desc, saved->window_bytes), 8);
    kdai_put(blob + 24, desc->n_heads, 8);
    kdai_put(blob + 32, desc->dim_k, 8);
    kdai_put(blob + 40, desc->dim_v, 8);
    kdai_put(blob + 48, saved->window_bytes, 8);
    kdai_put(blob + 56, (uint64_t)desc->state_type, 4);
    kdai_put(blob + 60, KDAI_BLOB_ORDER, 4);
    kdai_put(blob + 64, saved->n_tokens, 8);
}

KDA_API kda_result kda_save(const kda_desc *desc, const kda_saved *saved, void *blob,
                            size_t blob_bytes) {
    kda_result result = kdai_check_saved(desc, saved, blob);
    if (result != KDA_OK) return result;
    size_t bytes = kda_save_bytes(desc, saved->window_bytes),
           size = kdai_type_bytes(desc->state_type);
    if (blob_bytes < bytes) return KDA_ERR_BLOB_SHORT;
    if (blob_bytes > bytes) return KDA_ERR_BLOB_LONG;
    unsigned char *to = (unsigned char *)blob, *contents = to + KDAI_BLOB_HEADER;
    kdai_put_header(desc, saved, to);
    kdai_put_all(contents, saved->state, kda_state_bytes(desc) / size, size);
    kdai_put_all(contents + kda_state_bytes(desc), saved->window,
                 saved->window_bytes / sizeof(float), sizeof(float));
    kdai_put(to + 72, kdai_blob_checksum(to, bytes), 8);
    return KDA_OK;
}

/* Whether a buffer is one whole, unaltered blob, whatever is in it. */
static kda_result kdai_check_blob(const unsigned char *blob, size_t bytes) {
    if (bytes < KDAI_BLOB_HEADER) return KDA_ERR_BLOB_SHORT;
    if (memcmp(blob, kdai_blob_magic, sizeof kdai_blob_magic) != 0) return KDA_ERR_BLOB;
    if (kdai_get(blob + 8, 4) != KDAI_BLOB_VERSION) return KDA_ERR_BLOB_VERSION;
    uint64_t total = kdai_get(blob + 16, 8);
    if (bytes < total) return KDA_ERR_BLOB_SHORT;
    if (bytes > total) return KDA_ERR_BLOB_LONG;
    return kdai_get(blob + 72, 8) == kdai_blob_checksum(blob, bytes) ? KDA_OK
                                                                     : KDA_ERR_BLOB_ALTERED;
}

KDA_API kda_result kda_load(const kda_desc *desc, kda_saved *saved, const void *blob,
                            size_t blob_bytes) {
    const unsigned char *from = (const unsigned char *)blob;
    unsigned char expected[80];
    kda_saved found;
    kda_result result = kdai_check_saved(desc, saved, blob);
    if (result == KDA_OK) result = kdai_check_blob(from, blob_bytes);
    if (result != KDA_OK) return result;
    found = *saved;
    found.n_tokens = kdai_get(from + 64, 8);
    kdai_put_header(desc, &found, expected);
    if (memcmp(from, expected, 72) != 0) return KDA_ERR_BLOB_MISMATCH;
    size_t state_bytes = kda_state_bytes(desc), size = kdai_type_bytes(desc->state_type);
    kdai_get_all(saved->state, from + KDAI_BLOB_HEADER, state_bytes / size, size);
    kdai_get_all(saved->window, from + KDAI_BLOB_HEADER + state_bytes,
                 saved->window_bytes / sizeof(float), sizeof(float));
    saved->n_tokens = found.n_tokens;
    return KDA_OK;
}

/* ==== 18. The parts around the operator ======================================================= */

/* A call on rows that do not depend on each other. One item of work is a head of KDAI_ROW_TOKENS
 * tokens, so that what depends on the head only is worked out once for them. */

typedef struct kdai_rows_call {
    const kdai_kernels *kernels;
    const kda_desc *desc; /* of a gate */
    const float *A_log, *dt_bias;
    const float *weight; /* of a gated norm */
    size_t n_tokens, n_heads, dim;
    float eps;
    kda_input x, gate;
    kda_output y;
} kdai_rows_call;

/* n_rows tokens of one head; x may be at other tokens than gate and y. */
static kdai_rows kdai_rows_of(const kdai_rows_call *call, size_t head, size_t x_token, size_t token,
                              size_t n_rows) {
    kdai_rows rows;
    memset(&rows, 0, sizeof rows);
    rows.n = call->dim, rows.n_rows = n_rows;
    rows.x = kdai_input_row(call->x, x_token, head);
    rows.x_type = call->x.type;
    rows.x_step = call->x.token_stride * (ptrdiff_t)kdai_type_bytes(call->x.type);
    rows.y = kdai_result_row(call->y, token, head);
    rows.y_type = call->y.type;
    rows.y_step = call->y.token_stride * (ptrdiff_t)kdai_type_bytes(call->y.type);
    if (!call->weight) return rows;
    rows.gate = kdai_input_row(call->gate, token, head);
    rows.gate_type = call->gate.type;
    rows.gate_step = call->gate.token_stride * (ptrdiff_t)kdai_type_bytes(call->gate.type);
    return rows;
}

static kda_result kdai_run_rows_call(kdai_rows_call *call, size_t n_tokens, const kda_run *run,
                                     kdai_item item) {
    call->kernels = kdai_kernels_for(run);
    call->n_tokens = n_tokens;
    size_t blocks = n_tokens / KDAI_ROW_TOKENS + (n_tokens % KDAI_ROW_TOKENS != 0);
    kdai_parallel(run, blocks * call->n_heads, item, call);
    return KDA_OK;
}

/* The rows of an item, and its head. */
static kdai_rows kdai_rows_of_item(const kdai_rows_call *call, size_t item, size_t *head) {
    size_t first = item / call->n_heads * KDAI_ROW_TOKENS, left = call->n_tokens - first;
    *head = item % call->n_heads;
    return kdai_rows_of(call, *head, first, first, left < KDAI_ROW_TOKENS ? left : KDAI_ROW_TOKENS);
}

static float kdai_row_element(const unsigned char *x, ptrdiff_t step, kda_type type, size_t row,
                              size_t i) {
    return kdai_element(x + (ptrdiff_t)row * step, type, i);
}

static void kdai_set_row_element(const kdai_rows *rows, size_t row, size_t i, float y) {
    kdai_set_element(rows->y + (ptrdiff_t)row * rows->y_step, rows->y_type, i, y);
}

/* Raw gates to log-decays; a null bias is 0. */
static void kdai_log_decay_rows(const kda_desc *desc, float a, const float *bias,
                                const kdai_rows *rows) {
    for (size_t r = 0; r < rows->n_rows; r++)
        for (size_t i = 0; i < rows->n; i++) {
            float raw = kdai_row_element(rows->x, rows->x_step, rows->x_type, r, i);
            kdai_set_row_element(rows, r, i, kdai_gate(desc, a, bias ? bias[i] : 0.0f, raw));
        }
}

static void kdai_log_decay_item(void *context, size_t item, size_t worker) {
    const kdai_rows_call *call = (const kdai_rows_call *)context;
    size_t head;
    kdai_rows rows = kdai_rows_of_item(call, item, &head);
    (void)worker;
    call->kernels->log_decay(call->desc, kdai_rate(call->A_log, head),
                             call->dt_bias ? call->dt_bias + head * call->dim : NULL, &rows);
}

KDA_API kda_result kda_log_decay(const kda_desc *desc, size_t n_tokens, kda_input raw,
                                 const float *A_log, const float *dt_bias, kda_output g,
                                 const kda_run *run) {
    kdai_rows_call call;
    kda_result result = kdai_check_desc(desc);
    if (result == KDA_OK && desc->gate == KDA_GATE_LOG_DECAY) result = KDA_ERR_GATE;
    if (result == KDA_OK && run) result = kdai_check_run(run);
    if (result == KDA_OK) result = kdai_check_gate(desc, A_log, dt_bias);
    if (result == KDA_OK) result = kdai_check_input(raw, n_tokens, desc->n_heads, desc->dim_k);
    if (result == KDA_OK) result = kdai_check_output(g, n_tokens, desc->n_heads, desc->dim_k);
    if (result != KDA_OK) return result;
    memset(&call, 0, sizeof call);
    call.desc = desc, call.A_log = A_log, call.dt_bias = dt_bias;
    call.n_heads = desc->n_heads, call.dim = desc->dim_k;
    call.x = raw, call.y = g;
    return kdai_run_rows_call(&call, n_tokens, run, kdai_log_decay_item);
}

static kda_result kdai_check_norm(size_t n_tokens, size_t n_heads, size_t dim, float eps,
                                  kda_input x, kda_output y, const kda_run *run) {
    if (n_heads == 0 || dim == 0) return KDA_ERR_DIMS;
    if (kdai_is_negative_or_not_finite(eps)) return KDA_ERR_NUMBER;
    kda_result result = run ? kdai_check_run(run) : KDA_OK;
    if (result == KDA_OK) result = kdai_check_input(x, n_tokens, n_heads, dim);
    return result == KDA_OK ? kdai_check_output(y, n_tokens, n_heads, dim) : result;
}

/* Sum of squares of a row, in the fixed shape. */
static float kdai_squares(const kdai_rows *rows, size_t row) {
    float lane[KDAI_LANES] = {0};
    for (size_t i = 0; i < rows->n; i++) {
        float x = kdai_row_element(rows->x, rows->x_step, rows->x_type, row, i);
        lane[i % KDAI_LANES] = kdai_fma(x, x, lane[i % KDAI_LANES]);
    }
    return kdai_add_lanes(lane);
}

static void kdai_l2_norm_rows(float eps, const kdai_rows *rows) {
    for (size_t r = 0; r < rows->n_rows; r++) {
        float inverse = kdai_inverse_norm(kdai_squares(rows, r), eps);
        for (size_t i = 0; i < rows->n; i++) {
            float x = kdai_row_element(rows->x, rows->x_step, rows->x_type, r, i);
            kdai_set_row_element(rows, r, i, x * inverse);
        }
    }
}

static void kdai_l2_norm_item(void *context, size_t item, size_t worker) {
    const kdai_rows_call *call = (const kdai_rows_call *)context;
    size_t head;
    kdai_rows rows = kdai_rows_of_item(call, item, &head);
    (void)worker;
    call->kernels->l2_norm(call->eps, &rows);
}

KDA_API kda_result kda_l2_norm(size_t n_tokens, size_t n_heads, size_t dim, float eps, kda_input x,
                               kda_output y, const kda_run *run) {
    kdai_rows_call call;
    kda_result result = kdai_check_norm(n_tokens, n_heads, dim, eps, x, y, run);
    if (result != KDA_OK) return result;
    memset(&call, 0, sizeof call);
    call.n_heads = n_heads, call.dim = dim, call.eps = eps;
    call.x = x, call.y = y;
    return kdai_run_rows_call(&call, n_tokens, run, kdai_l2_norm_item);
}

/* 1 / sqrt(mean(x^2) + eps). */
static float kdai_inverse_rms(float squares, size_t n, float eps) {
    return 1.0f / sqrtf(squares / (float)n + eps);
}

static void kdai_gated_norm_rows(const float *weight, float eps, const kdai_rows *rows) {
    for (size_t r = 0; r < rows->n_rows; r++) {
        float inverse = kdai_inverse_rms(kdai_squares(rows, r), rows->n, eps);
        for (size_t i = 0; i < rows->n; i++) {
            float x = kdai_row_element(rows->x, rows->x_step, rows->x_type, r, i);
            float gate = kdai_row_element(rows->gate, rows->gate_step, rows->gate_type, r, i);
            kdai_set_row_element(rows, r, i, x * inverse * weight[i] * kda_sigmoid(gate));
        }
    }
}

static void kdai_gated_norm_item(void *context, size_t item, size_t worker) {
    const kdai_rows_call *call = (const kdai_rows_call *)context;
    size_t head;
    kdai_rows rows = kdai_rows_of_item(call, item, &head);
    (void)worker;
    call->kernels->gated_norm(call->weight, call->eps, &rows);
}

static kda_result kdai_check_floats(const float *x) {
    if (!x) return KDA_ERR_NULL;
    return kdai_is_misaligned(x, sizeof(float)) ? KDA_ERR_ALIGN : KDA_OK;
}

KDA_API kda_result kda_gated_norm(size_t n_tokens, size_t n_heads, size_t dim, float eps,
                                  const float *weight, kda_input x, kda_input gate, kda_output y,
                                  const kda_run *run) {
    kdai_rows_call call;
    kda_result result = kdai_check_norm(n_tokens, n_heads, dim, eps, x, y, run);
    if (result == KDA_OK) result = kdai_check_input(gate, n_tokens, n_heads, dim);
    if (result == KDA_OK) result = kdai_check_floats(weight);
    if (result != KDA_OK) return result;
    memset(&call, 0, sizeof call);
    call.weight = weight, call.n_heads = n_heads, call.dim = dim, call.eps = eps;
    call.x = x, call.gate = gate, call.y = y;
    return kdai_run_rows_call(&call, n_tokens, run, kdai_gated_norm_item);
}

/* ==== 19. Convolution ========================================================================= */

/* A call on a batch. One item of work is a block of channels of a span. The channels of a layer's
 * tensor come in heads of `dim`; those of kda_conv in one. */
typedef struct kdai_conv_call {
    const kdai_kernels *kernels;
    const kda_conv_desc *desc;
    const float *weight;
    size_t dim;
    kda_input x;
    kda_output y;
    const kdai_span *spans;
    size_t n_spans;
    kdai_batch batch;
    size_t window_at;  /* where this convolution's window begins in a sequence's, floats */
    size_t journal_at; /* where its journal begins in a sequence's, bytes */
    int verify;
} kdai_conv_call;

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

KDA_API size_t kda_conv_journal_bytes(const kda_conv_desc *desc, size_t n_tokens) {
    if (kdai_check_conv_desc(desc) != KDA_OK) return 0;
    return kdai_journal_bytes(n_tokens, desc->channels);
}

/* The next n tokens of a block: inputs into its rows, and outputs. */
static void kdai_conv_rows(const kdai_conv_block *block, size_t n_tokens) {
    size_t stride = block->padded;
    for (size_t t = 0; t < n_tokens; t++) {
        float *last = block->rows + (block->width - 1 + t) * stride;
        const float *rows = block->rows + t * stride;
        kdai_to_floats(block->x + (ptrdiff_t)t * block->x_step, block->x_type, block->n, last);
        for (size_t c = 0; c < block->n; c++) {
            float sum = 0.0f;
            for (size_t i = 0; i < block->width; i++)
                sum = kdai_fma(block->taps[i * stride + c], rows[i * stride + c], sum);
            kdai_set_element(block->y + (ptrdiff_t)t * block->y_step, block->y_type, c,
                             block->silu ? sum * kda_sigmoid(sum) : sum);
        }
    }
}

/* Channel `channel` of a span's window; null if there is none, as with a width of 1. */
static float *kdai_conv_window(const kdai_conv_call *conv, const kdai_span *span, size_t channel) {
    float *window = (float *)span->seq->window;
    return conv->desc->width > 1 ? window + conv->window_at + channel : NULL;
}

/* The inputs in a span's journal, [capacity][channels]. */
static float *kdai_conv_journal(const kdai_conv_call *conv, const kdai_span *span) {
    unsigned char *journal = (unsigned char *)span->seq->journal + conv->journal_at;
    return (float *)(void *)(journal + KDAI_JOURNAL_HEADER);
}

/* A window (rows of `stride`) moved on by `tokens` journalled inputs: row i of `to` becomes row
 * i + tokens of the window followed by the inputs. In place it reads ahead of what it writes. */
static void kdai_conv_move_on(const kda_conv_desc *desc, const float *window, size_t stride,
                              const float *inputs, size_t tokens, size_t n, float *to,
                              size_t to_stride) {
    size_t past = desc->width - 1;
    for (size_t i = 0; i < past; i++) {
        size_t from = i + tokens;
        const float *row = from < past ? window + from * stride
                                       : inputs + (from - past) * desc->channels;
        memmove(to + i * to_stride, row, n * sizeof(float));
    }
}

/* Channels of a block. */
#define KDAI_CONV_CHANNELS ((size_t)128)

static size_t kdai_conv_blocks(const kdai_conv_call *conv) {
    size_t blocks_per_head = (conv->dim + KDAI_CONV_CHANNELS - 1) / KDAI_CONV_CHANNELS;
    return conv->desc->channels / conv->dim * blocks_per_head;
}

/* Scratch of one worker: taps, rows and sums of a block. */
static size_t kdai_conv_each(size_t width) {
    return (2 * width - 1 + 2 * KDAI_CONV_TOKENS) * KDAI_CONV_CHANNELS * sizeof(float);
}

static void kdai_conv_open(const kdai_conv_call *call, size_t index, size_t worker,
                           kdai_conv_block *block) {
    size_t per_head = (call->dim + KDAI_CONV_CHANNELS - 1) / KDAI_CONV_CHANNELS;
    size_t width = call->desc->width, c = 0;
    block->head = index / per_head;
    block->first = index % per_head * KDAI_CONV_CHANNELS;
    block->n = call->dim - block->first;
    if (block->n > KDAI_CONV_CHANNELS) block->n = KDAI_CONV_CHANNELS;
    block->padded = kdai_padded(block->n);
    block->width = width;
    block->silu = call->desc->activation == KDA_ACTIVATION_SILU;
    block->x_type = call->x.type, block->y_type = call->y.type;
    block->x_step = call->x.token_stride * (ptrdiff_t)kdai_type_bytes(call->x.type);
    block->y_step = call->y.token_stride * (ptrdiff_t)kdai_type_bytes(call->y.type);
    block->taps = (float *)(void *)(call->batch.memory + worker * call->batch.each);
    block->rows = block->taps + width * block->padded;
    block->sums = block->rows + (width - 1 + KDAI_CONV_TOKENS) * block->padded;
    if (block->n != block->padded) /* padding of what is read */
        memset(block->taps, 0, (2 * width - 1 + KDAI_CONV_TOKENS) * block->padded * sizeof(float));
    const float *weight = call->weight + (block->head * call->dim + block->first) * width;
    for (; width == 4 && block->n - c >= 4; c += 4)
        kdai_transpose4(weight + c * 4, 4, 4, block->taps + c, block->padded);
    for (; c < block->n; c++)
        for (size_t i = 0; i < width; i++)
            block->taps[i * block->padded + c] = weight[c * width + i];
}

/* The next n tokens, from the call's row `token` on, and the rows on by as many. */
static void kdai_conv_pass(const kdai_conv_call *call, kdai_conv_block *block, size_t token,
                           size_t n, float *journal) {
    size_t past = block->width - 1, stride = block->padded;
    block->x =
        kdai_input_row(call->x, token, block->head) + block->first * kdai_type_bytes(block->x_type);
    block->y = kdai_result_row(call->y, token, block->head) +
               block->first * kdai_type_bytes(block->y_type);
    call->kernels->conv(block, n);
    for (size_t t = 0; journal && t < n; t++)
        memcpy(journal + t * call->desc->channels, block->rows + (past + t) * stride,
               block->n * sizeof(float));
    memmove(block->rows, block->rows + n * stride, past * stride * sizeof(float));
}

static void kdai_conv_item(void *context, size_t item, size_t worker) {
    const kdai_conv_call *call = (const kdai_conv_call *)context;
    const kda_conv_desc *desc = call->desc;
    size_t blocks = kdai_conv_blocks(call), past = desc->width - 1, n = KDAI_CONV_TOKENS;
    const kdai_span *span = &call->spans[item / blocks];
    kdai_conv_block block;
    kdai_conv_open(call, item % blocks, worker, &block);
    size_t channel = block.head * call->dim + block.first;
    float *window = kdai_conv_window(call, span, channel);
    float *inputs = call->verify ? kdai_conv_journal(call, span) + channel : NULL;
    /* On a copy, moved on to where an earlier span of the sequence ended. */
    kdai_conv_move_on(desc, window, desc->channels, inputs, call->verify ? span->done : 0, block.n,
                      block.rows, block.padded);
    for (size_t t = 0; t < span->n_tokens; t += n) {
        if (n > span->n_tokens - t) n = span->n_tokens - t;
        kdai_conv_pass(call, &block, span->token + t, n,
                       inputs ? inputs + (span->done + t) * desc->channels : NULL);
    }
    for (size_t i = 0; !call->verify && i < past; i++)
        memcpy(window + i * desc->channels, block.rows + i * block.padded, block.n * sizeof(float));
}

static size_t kdai_carve_conv(const kda_conv_desc *desc, size_t n_seqs, const kda_run *run,
                              void *memory, kdai_conv_call *conv) {
    kdai_arena arena = kdai_arena_on(memory);
    memset(conv, 0, sizeof *conv);
    conv->kernels = kdai_kernels_for(run);
    conv->desc = desc;
    conv->dim = desc->channels;
    kdai_take_batch(&arena, n_seqs, kdai_workers(run), kdai_conv_each(desc->width), &conv->batch);
    conv->spans = conv->batch.spans;
    return arena.used;
}

KDA_API size_t kda_conv_scratch_bytes(const kda_conv_desc *desc, size_t n_seqs,
                                      const kda_run *run) {
    kdai_conv_call conv;
    if (kdai_check_conv_desc(desc) != KDA_OK || (run && kdai_check_run(run) != KDA_OK)) return 0;
    return kdai_carve_conv(desc, n_seqs, run, NULL, &conv);
}

/* What forward, verify and commit check alike, and scratch handed out. */
static kda_result kdai_open_conv(const kda_conv_desc *desc, const kda_seq *seqs, size_t n_seqs,
                                 const kda_run *run, kdai_conv_call *conv) {
    size_t n_tokens;
    kda_result result = kdai_check_conv_desc(desc);
    if (result == KDA_OK) result = kdai_check_run(run);
    if (result == KDA_OK) result = kdai_count_tokens(seqs, n_seqs, &n_tokens);
    if (result != KDA_OK) return result;
    size_t needed = kda_conv_scratch_bytes(desc, n_seqs, run);
    if (needed == 0) return KDA_ERR_SIZE;
    if (!run->scratch || run->scratch_bytes < needed) return KDA_ERR_SCRATCH;
    kdai_carve_conv(desc, n_seqs, run, run->scratch, conv);
    return kdai_check_owned(seqs, n_seqs, KDAI_WINDOW, kda_conv_window_bytes(desc), sizeof(float),
                            conv->batch.sorted);
}

static kda_result kdai_run_conv(const kda_conv_desc *desc, const kda_conv_args *args,
                                const kda_run *run, int verify) {
    kdai_conv_call conv;
    size_t n_tokens;
    kda_result result = args ? KDA_OK : KDA_ERR_NULL;
    if (result == KDA_OK) result = kdai_open_conv(desc, args->seqs, args->n_seqs, run, &conv);
    if (result == KDA_OK) result = kdai_check_floats(args->weight);
    if (result == KDA_OK) result = kdai_count_tokens(args->seqs, args->n_seqs, &n_tokens);
    if (result == KDA_OK) result = kdai_check_input(args->x, n_tokens, 1, desc->channels);
    if (result == KDA_OK) result = kdai_check_output(args->y, n_tokens, 1, desc->channels);
    if (result == KDA_OK && verify)
        result = kdai_check_journals(args->seqs, args->n_seqs, KDAI_WINDOW,
                                     kda_conv_journal_bytes(desc, 0),
                                     kda_conv_journal_bytes(desc, 1), conv.batch.sorted);
    if (result != KDA_OK) return result;
    conv.weight = args->weight;
    conv.x = args->x;
    conv.y = args->y;
    conv.verify = verify;
    conv.n_spans = kdai_list_spans(args->seqs, args->n_seqs, KDAI_WINDOW, KDA_RECURRENT,
                                   conv.batch.spans);
    for (size_t i = 0; verify && i < conv.n_spans; i++) {
        kdai_journal header = kdai_conv_journal_for(desc, conv.spans[i].n_tokens);
        memcpy(conv.spans[i].seq->journal, &header, sizeof header);
    }
    kdai_parallel(run, conv.n_spans * kdai_conv_blocks(&conv), kdai_conv_item, &conv);
    return KDA_OK;
}

KDA_API kda_result kda_conv(const kda_conv_desc *desc, const kda_conv_args *args,
                            const kda_run *run) {
    return kdai_run_conv(desc, args, run, 0);
}

KDA_API kda_result kda_conv_verify(const kda_conv_desc *desc, const kda_conv_args *args,
                                   const kda_run *run) {
    return kdai_run_conv(desc, args, run, 1);
}

/* Moves each span's window on by its accepted inputs and uses the journal up. */
static void kdai_conv_accept(const kdai_conv_call *conv) {
    for (size_t i = 0; i < conv->n_spans; i++) {
        float *window = kdai_conv_window(conv, &conv->spans[i], 0);
        size_t channels = conv->desc->channels;
        kdai_conv_move_on(conv->desc, window, channels, kdai_conv_journal(conv, &conv->spans[i]),
                          conv->spans[i].n_tokens, channels, window, channels);
    }
    kdai_use_up_journals(conv->spans, conv->n_spans, conv->journal_at);
}

KDA_API kda_result kda_conv_commit(const kda_conv_desc *desc, const kda_seq *seqs, size_t n_seqs,
                                   const kda_run *run) {
    kdai_conv_call conv;
    kda_result result = kdai_open_conv(desc, seqs, n_seqs, run, &conv);
    if (result == KDA_OK)
        result = kdai_check_owned(seqs, n_seqs, KDAI_JOURNAL, kda_conv_journal_bytes(desc, 0),
                                  sizeof(float), conv.batch.sorted);
    for (size_t i = 0; result == KDA_OK && i < n_seqs; i++)
        if (seqs[i].window)
            result = kdai_check_journal(seqs[i].journal, kdai_conv_journal_for(desc, 0),
                                        seqs[i].n_tokens);
    if (result != KDA_OK) return result;
    conv.n_spans = kdai_list_spans(seqs, n_seqs, KDAI_WINDOW, KDA_RECURRENT, conv.batch.spans);
    kdai_conv_accept(&conv);
    return KDA_OK;
}

/* ==== 20. A whole layer =======================================================================
 *
 * Rows pass through in blocks of KDAI_LAYER_ROWS, head by head: convolutions into float32 scratch,
 * operator in place there, gated norm out. Long sequences are cut at multiples of KDA_CHUNK only, so
 * that every part gives the bits it would give on the whole. */

#define KDAI_LAYER_ROWS ((size_t)64)
enum { KDAI_Q, KDAI_K, KDAI_V, KDAI_CONVS };

typedef struct kdai_layer_call {
    const kdai_kernels *kernels;
    const kda_layer_desc *layer;
    const kda_layer_args *args;
    int verify;
    kda_conv_desc conv[KDAI_CONVS];
    size_t window_at[KDAI_CONVS];  /* floats */
    size_t journal_at[KDAI_CONVS]; /* bytes */
    float *rows[KDAI_CONVS];       /* [heads][KDAI_LAYER_ROWS][dim] each; outputs replace values */
    int by_head;                   /* each worker uses the rows of one head for whichever it has */
    kdai_batch batch;
    kdai_span *pieces; /* [KDAI_LAYER_ROWS]: what is in the present block */
    size_t n_pieces;
    size_t first; /* the block's first row in the call's tensors */
} kdai_layer_call;

static kda_conv_desc kdai_layer_conv(const kda_layer_desc *layer, int which) {
    kda_conv_desc desc;
    size_t qk = kdai_product(kdai_qk_heads(&layer->op), layer->op.dim_k);
    desc.channels = which == KDAI_V ? kdai_product(layer->op.n_heads, layer->op.dim_v) : qk;
    desc.width = layer->conv_width;
    desc.activation = layer->conv_activation;
    return desc;
}

static const float *kdai_layer_taps(const kda_layer_desc *layer, int which) {
    return which == KDAI_Q ? layer->q_conv : which == KDAI_K ? layer->k_conv : layer->v_conv;
}

static kda_result kdai_check_layer_shape(const kda_layer_desc *layer) {
    kda_result result = layer ? kdai_check_desc(&layer->op) : KDA_ERR_NULL;
    for (int i = 0; result == KDA_OK && i < KDAI_CONVS; i++) {
        kda_conv_desc conv = kdai_layer_conv(layer, i);
        result = kdai_check_conv_desc(&conv);
    }
    return result;
}

static kda_result kdai_check_layer(const kda_layer_desc *layer) {
    kda_result result = kdai_check_layer_shape(layer);
    for (int i = 0; result == KDA_OK && i < KDAI_CONVS; i++)
        result = kdai_check_floats(kdai_layer_taps(layer, i));
    if (result == KDA_OK) result = kdai_check_gate(&layer->op, layer->A_log, layer->dt_bias);
    if (result == KDA_OK) result = kdai_check_floats(layer->norm_weight);
    if (result == KDA_OK && kdai_is_negative_or_not_finite(layer->norm_eps))
        result = KDA_ERR_NUMBER;
    return result;
}

KDA_API size_t kda_layer_window_bytes(const kda_layer_desc *layer) {
    if (kdai_check_layer_shape(layer) != KDA_OK) return 0;
    size_t q = kdai_layer_conv(layer, KDAI_Q).channels, v = kdai_layer_conv(layer, KDAI_V).channels;
    size_t channels = kdai_sum(kdai_product(2, q), v);
    return kdai_product(kdai_product(channels, layer->conv_width - 1), sizeof(float));
}

KDA_API size_t kda_layer_journal_bytes(const kda_layer_desc *layer, size_t n_tokens) {
    if (kdai_check_layer_shape(layer) != KDA_OK) return 0;
    size_t bytes = kda_journal_bytes(&layer->op, n_tokens);
    for (int i = 0; i < KDAI_CONVS; i++) {
        kda_conv_desc conv = kdai_layer_conv(layer, i);
        bytes = kdai_sum(bytes, kda_conv_journal_bytes(&conv, n_tokens));
    }
    return bytes;
}

/* Where the parts of a journal for `capacity` tokens begin. */
static void kdai_place_journals(kdai_layer_call *call, size_t capacity) {
    size_t at = kda_journal_bytes(&call->layer->op, capacity);
    for (int i = 0; i < KDAI_CONVS; i++) {
        call->journal_at[i] = at;
        at += kda_conv_journal_bytes(&call->conv[i], capacity);
    }
}

static size_t kdai_carve_layer(const kda_layer_desc *layer, size_t n_seqs, const kda_run *run,
                               void *memory, kdai_layer_call *call) {
    kdai_arena arena = kdai_arena_on(memory);
    kdai_work work;
    const kdai_kernels *kernels = kdai_kernels_for(run);
    size_t at = 0, each = kdai_carve_work(&layer->op, kernels->panel, 1, 1, NULL, &work);
    memset(call, 0, sizeof *call);
    call->kernels = kernels;
    call->layer = layer;
    for (int i = 0; i < KDAI_CONVS; i++) {
        call->conv[i] = kdai_layer_conv(layer, i);
        call->window_at[i] = at;
        at += kda_conv_window_bytes(&call->conv[i]) / sizeof(float);
        call->rows[i] =
            kdai_take_floats(&arena, kdai_product(KDAI_LAYER_ROWS, call->conv[i].channels));
    }
    call->pieces = (kdai_span *)kdai_take(&arena, KDAI_LAYER_ROWS, sizeof(kdai_span));
    if (each != 0 && each < kdai_conv_each(layer->conv_width))
        each = kdai_conv_each(layer->conv_width);
    kdai_take_batch(&arena, n_seqs, kdai_workers(run), each, &call->batch);
    return arena.used;
}

KDA_API size_t kda_layer_scratch_bytes(const kda_layer_desc *layer, size_t n_seqs,
                                       const kda_run *run) {
    kdai_layer_call call;
    if (kdai_check_layer_shape(layer) != KDA_OK || (run && kdai_check_run(run) != KDA_OK)) return 0;
    return kdai_carve_layer(layer, n_seqs, run, NULL, &call);
}

static kda_input kdai_input_at(kda_input x, size_t token) {
    ptrdiff_t bytes = (ptrdiff_t)token * x.token_stride * (ptrdiff_t)kdai_type_bytes(x.type);
    x.data = (const unsigned char *)x.data + bytes;
    return x;
}

/* The scratch rows of q, k or v of the present block. */
static kda_output kdai_layer_rows(const kdai_layer_call *call, int which, size_t worker) {
    const kda_desc *op = &call->layer->op;
    size_t dim = which == KDAI_V ? op->dim_v : op->dim_k, head = KDAI_LAYER_ROWS * dim;
    float *rows = call->rows[which] + (call->by_head ? worker * head : 0);
    return kda_out_f32(rows, (ptrdiff_t)dim, call->by_head ? 0 : (ptrdiff_t)head);
}

static kda_input kdai_reading(kda_output y) {
    return kda_in(y.data, y.type, y.token_stride, y.head_stride);
}

/* Convolution of one head of a piece into scratch rows. */
static void kdai_layer_convolve(const kdai_layer_call *call, const kdai_span *piece, int which,
                                size_t head, size_t worker) {
    const kda_layer_args *args = call->args;
    kdai_conv_call conv;
    memset(&conv, 0, sizeof conv);
    conv.kernels = call->kernels;
    conv.desc = &call->conv[which];
    conv.weight = kdai_layer_taps(call->layer, which);
    conv.dim = which == KDAI_V ? call->layer->op.dim_v : call->layer->op.dim_k;
    conv.x = kdai_input_at(which == KDAI_Q ? args->q : which == KDAI_K ? args->k : args->v,
                           call->first);
    conv.y = kdai_layer_rows(call, which, worker);
    conv.spans = piece;
    conv.batch = call->batch;
    conv.window_at = call->window_at[which];
    conv.verify = call->verify;
    if (call->verify) { /* journals of unequal capacity begin their parts at unequal places */
        kdai_layer_call placed = *call;
        kdai_place_journals(&placed, piece->seq->n_tokens);
        conv.journal_at = placed.journal_at[which];
    }
    size_t blocks = (conv.dim + KDAI_CONV_CHANNELS - 1) / KDAI_CONV_CHANNELS;
    for (size_t i = 0; i < blocks; i++) kdai_conv_item(&conv, head * blocks + i, worker);
}

/* The operator on some pieces, in scratch rows. */
static void kdai_layer_operator(const kdai_layer_call *call, const kdai_span *pieces,
                                size_t n_pieces, size_t worker, kda_args *args, kdai_operator *op) {
    memset(args, 0, sizeof *args);
    memset(op, 0, sizeof *op);
    args->q = kdai_reading(kdai_layer_rows(call, KDAI_Q, worker));
    args->k = kdai_reading(kdai_layer_rows(call, KDAI_K, worker));
    args->v = kdai_reading(kdai_layer_rows(call, KDAI_V, worker));
    args->o = kdai_layer_rows(call, KDAI_V, worker);
    args->g = kdai_input_at(call->args->g, call->first);
    args->beta = kdai_input_at(call->args->beta, call->first);
    args->A_log = call->layer->A_log;
    args->dt_bias = call->layer->dt_bias;
    op->kernels = call->kernels;
    op->desc = &call->layer->op;
    op->args = args;
    op->spans = pieces;
    op->n_spans = n_pieces;
    op->batch = call->batch;
    op->chunked = 1;
    op->verify = call->verify;
    op->tiles = 1;
    op->tile_rows = op->desc->dim_v;
}

/* Gated norm of one head of a piece, from scratch rows. */
static void kdai_layer_norm(const kdai_layer_call *call, const kdai_span *piece, size_t head,
                            size_t worker) {
    const kda_desc *op = &call->layer->op;
    kdai_rows_call norm;
    memset(&norm, 0, sizeof norm);
    norm.weight = call->layer->norm_weight;
    norm.dim = op->dim_v;
    norm.x = kdai_reading(kdai_layer_rows(call, KDAI_V, worker));
    norm.gate = call->args->gate, norm.y = call->args->o;
    for (size_t t = 0; t < piece->n_tokens; t += KDAI_ROW_TOKENS) {
        size_t left = piece->n_tokens - t, n = left < KDAI_ROW_TOKENS ? left : KDAI_ROW_TOKENS;
        kdai_rows rows =
            kdai_rows_of(&norm, head, piece->token + t, call->first + piece->token + t, n);
        call->kernels->gated_norm(norm.weight, call->layer->norm_eps, &rows);
    }
}

/* The value heads that a query/key head serves, i of n_heads / n_qk_heads. */
static size_t kdai_served_head(const kda_desc *desc, size_t qk_head, size_t i) {
    size_t n = kdai_qk_heads(desc);
    return desc->head_map == KDA_HEADS_TILED ? i * n + qk_head : qk_head * (desc->n_heads / n) + i;
}

/* Everything for a query/key head of a piece and the value heads that it serves: what one part
 * leaves in the cache the next one finds there. */
static void kdai_layer_head_item(void *context, size_t item, size_t worker) {
    const kdai_layer_call *call = (const kdai_layer_call *)context;
    const kda_desc *desc = &call->layer->op;
    size_t n = kdai_qk_heads(desc), qk_head = item % n;
    const kdai_span *piece = &call->pieces[item / n];
    kda_args args;
    kdai_operator op;
    kdai_layer_operator(call, piece, 1, worker, &args, &op);
    kdai_layer_convolve(call, piece, KDAI_Q, qk_head, worker);
    kdai_layer_convolve(call, piece, KDAI_K, qk_head, worker);
    for (size_t i = 0; i < desc->n_heads / n; i++) {
        size_t head = kdai_served_head(desc, qk_head, i);
        kdai_layer_convolve(call, piece, KDAI_V, head, worker);
        kdai_operator_item(&op, head, worker);
        kdai_layer_norm(call, piece, head, worker);
    }
}

static void kdai_layer_conv_item(void *context, size_t item, size_t worker) {
    const kdai_layer_call *call = (const kdai_layer_call *)context;
    size_t qk = kdai_qk_heads(&call->layer->op), all = 2 * qk + call->layer->op.n_heads;
    size_t head = item % all;
    int which = head < qk ? KDAI_Q : head < 2 * qk ? KDAI_K : KDAI_V;
    head -= which == KDAI_Q ? 0 : which == KDAI_K ? qk : 2 * qk;
    kdai_layer_convolve(call, &call->pieces[item / all], which, head, worker);
}

static void kdai_layer_norm_item(void *context, size_t item, size_t worker) {
    const kdai_layer_call *call = (const kdai_layer_call *)context;
    size_t n_heads = call->layer->op.n_heads;
    kdai_layer_norm(call, &call->pieces[item / n_heads], item % n_heads, worker);
}

/* The present block: in one round of whole heads if there are enough of them for the workers, else
 * in three, of which the operator's divides heads. */
static void kdai_run_block(kdai_layer_call *call, const kda_run *run) {
    const kda_desc *desc = &call->layer->op;
    size_t qk = kdai_qk_heads(desc), workers = kdai_workers(run);
    kda_args args;
    kdai_operator op;
    call->by_head = workers == 1 || (workers <= qk && call->n_pieces * qk >= 2 * workers);
    if (call->by_head) {
        kdai_parallel(run, call->n_pieces * qk, kdai_layer_head_item, call);
        return;
    }
    kdai_parallel(run, call->n_pieces * (2 * qk + desc->n_heads), kdai_layer_conv_item, call);
    kdai_layer_operator(call, call->pieces, call->n_pieces, 0, &args, &op);
    kdai_run_operator(&op, run, kdai_operator_item);
    kdai_parallel(run, call->n_pieces * desc->n_heads, kdai_layer_norm_item, call);
}

/* Where in the list of spans the next block begins. */
typedef struct kdai_cursor {
    const kdai_span *spans;
    size_t n_spans, span, done;
} kdai_cursor;

/* Fills `pieces` with what the next block of rows holds; 0 when there is none left. */
static int kdai_next_block(kdai_layer_call *call, kdai_cursor *cursor) {
    call->n_pieces = 0;
    if (cursor->span == cursor->n_spans) return 0;
    call->first = cursor->spans[cursor->span].token + cursor->done;
    while (cursor->span < cursor->n_spans) {
        kdai_span piece = cursor->spans[cursor->span];
        size_t left = piece.n_tokens - cursor->done;
        piece.token = piece.token + cursor->done - call->first;
        if (piece.token >= KDAI_LAYER_ROWS) break;
        size_t room = KDAI_LAYER_ROWS - piece.token;
        piece.n_tokens = left <= room ? left : room / KDA_CHUNK * KDA_CHUNK;
        if (piece.n_tokens == 0) break;
        piece.done = cursor->done;
        call->pieces[call->n_pieces++] = piece;
        cursor->done += piece.n_tokens;
        if (piece.n_tokens < left) break;
        cursor->span++;
        cursor->done = 0;
    }
    return 1;
}

static kda_result kdai_check_layer_tensors(const kda_layer_desc *layer, const kda_layer_args *args,
                                           size_t tokens) {
    kda_args op;
    memset(&op, 0, sizeof op);
    op.q = args->q, op.k = args->k, op.v = args->v, op.g = args->g, op.beta = args->beta;
    op.o = args->o, op.A_log = layer->A_log, op.dt_bias = layer->dt_bias;
    kda_result result = kdai_check_tensors(&layer->op, &op, tokens);
    if (result != KDA_OK) return result;
    return kdai_check_input(args->gate, tokens, layer->op.n_heads, layer->op.dim_v);
}

/* What forward, verify and commit check of a batch, and scratch handed out. */
static kda_result kdai_open_layer(const kda_layer_desc *layer, const kda_seq *seqs, size_t n_seqs,
                                  const kda_run *run, kdai_layer_call *call) {
    size_t n_tokens;
    kda_result result = kdai_check_layer(layer);
    if (result == KDA_OK) result = kdai_check_run(run);
    if (result == KDA_OK) result = kdai_count_tokens(seqs, n_seqs, &n_tokens);
    if (result != KDA_OK) return result;
    size_t needed = kda_layer_scratch_bytes(layer, n_seqs, run);
    if (needed == 0) return KDA_ERR_SIZE;
    if (!run->scratch || run->scratch_bytes < needed) return KDA_ERR_SCRATCH;
    kdai_carve_layer(layer, n_seqs, run, run->scratch, call);
    for (size_t i = 0; i < n_seqs; i++)
        if (seqs[i].state && !seqs[i].window && layer->conv_width > 1) return KDA_ERR_NULL;
    result = kdai_check_states(&layer->op, seqs, n_seqs, call->batch.sorted);
    if (result == KDA_OK)
        result = kdai_check_owned(seqs, n_seqs, KDAI_WINDOW, kda_layer_window_bytes(layer),
                                  sizeof(float), call->batch.sorted);
    return result;
}

static void kdai_begin_layer_journals(kdai_layer_call *call, const kdai_span *spans,
                                      size_t n_spans) {
    kdai_begin_journals(&call->layer->op, KDAI_JOURNAL_OF_LAYER, spans, n_spans);
    for (size_t s = 0; s < n_spans; s++) {
        kdai_place_journals(call, spans[s].n_tokens);
        for (int i = 0; i < KDAI_CONVS; i++) {
            kdai_journal header = kdai_conv_journal_for(&call->conv[i], spans[s].n_tokens);
            memcpy((unsigned char *)spans[s].seq->journal + call->journal_at[i], &header,
                   sizeof header);
        }
    }
}

static kda_result kdai_run_layer(const kda_layer_desc *layer, const kda_layer_args *args,
                                 const kda_run *run, int verify) {
    kdai_layer_call call;
    kdai_cursor cursor;
    size_t n_tokens;
    kda_result result = args ? KDA_OK : KDA_ERR_NULL;
    if (result == KDA_OK) result = kdai_open_layer(layer, args->seqs, args->n_seqs, run, &call);
    if (result == KDA_OK && verify && run->algorithm == KDA_CHUNKED) result = KDA_ERR_ALGORITHM;
    if (result == KDA_OK) result = kdai_count_tokens(args->seqs, args->n_seqs, &n_tokens);
    if (result == KDA_OK) result = kdai_check_layer_tensors(layer, args, n_tokens);
    if (result == KDA_OK && verify)
        result = kdai_check_journals(args->seqs, args->n_seqs, KDAI_STATE,
                                     kda_layer_journal_bytes(layer, 0),
                                     kda_layer_journal_bytes(layer, 1), call.batch.sorted);
    if (result != KDA_OK) return result;
    call.args = args;
    call.verify = verify;
    memset(&cursor, 0, sizeof cursor);
    cursor.spans = call.batch.spans;
    cursor.n_spans = kdai_list_spans(args->seqs, args->n_seqs, KDAI_STATE,
                                     verify ? KDA_RECURRENT : run->algorithm, call.batch.spans);
    if (verify) kdai_begin_layer_journals(&call, cursor.spans, cursor.n_spans);
    while (kdai_next_block(&call, &cursor)) kdai_run_block(&call, run);
    return KDA_OK;
}

KDA_API kda_result kda_layer(const kda_layer_desc *layer, const kda_layer_args *args,
                             const kda_run *run) {
    return kdai_run_layer(layer, args, run, 0);
}

KDA_API kda_result kda_layer_verify(const kda_layer_desc *layer, const kda_layer_args *args,
                                    const kda_run *run) {
    return kdai_run_layer(layer, args, run, 1);
}

/* The four parts of one sequence's journal fit this layer and hold enough. */
static kda_result kdai_check_layer_journal(kdai_layer_call *call, const kda_seq *seq) {
    size_t capacity;
    kdai_journal of_layer = kdai_journal_for(&call->layer->op, KDAI_JOURNAL_OF_LAYER, 0);
    kda_result result = kdai_check_journal(seq->journal, of_layer, seq->n_tokens);
    if (result != KDA_OK || seq->n_tokens == 0) return result;
    kdai_journal_read(seq->journal, of_layer, &capacity);
    kdai_place_journals(call, capacity);
    for (int i = 0; result == KDA_OK && i < KDAI_CONVS; i++)
        result = kdai_check_journal((const unsigned char *)seq->journal + call->journal_at[i],
                                    kdai_conv_journal_for(&call->conv[i], 0), seq->n_tokens);
    return result;
}

KDA_API kda_result kda_layer_commit(const kda_layer_desc *layer, const kda_seq *seqs, size_t n_seqs,
                                    const kda_run *run) {
    kdai_layer_call call;
    kdai_operator op;
    kda_result result = kdai_open_layer(layer, seqs, n_seqs, run, &call);
    if (result == KDA_OK)
        result = kdai_check_owned(seqs, n_seqs, KDAI_JOURNAL, kda_layer_journal_bytes(layer, 0),
                                  sizeof(float), call.batch.sorted);
    for (size_t i = 0; result == KDA_OK && i < n_seqs; i++)
        if (seqs[i].state) result = kdai_check_layer_journal(&call, &seqs[i]);
    if (result != KDA_OK) return result;
    memset(&op, 0, sizeof op);
    op.kernels = call.kernels;
    op.desc = &layer->op;
    op.spans = call.batch.spans;
    op.n_spans = kdai_list_spans(seqs, n_seqs, KDAI_STATE, KDA_RECURRENT, call.batch.spans);
    op.batch = call.batch;
    op.chunked = op.verify = 1;
    kdai_run_operator(&op, run, kdai_commit_item);
    for (size_t s = 0; s < op.n_spans; s++) {
        size_t capacity;
        kdai_journal_read(op.spans[s].seq->journal,
                          kdai_journal_for(&layer->op, KDAI_JOURNAL_OF_LAYER, 0), &capacity);
        kdai_place_journals(&call, capacity);
        for (int i = 0; i < KDAI_CONVS; i++) {
            kdai_conv_call conv;
            memset(&conv, 0, sizeof conv);
            conv.desc = &call.conv[i];
            conv.spans = &op.spans[s];
            conv.n_spans = 1;
            conv.window_at = call.window_at[i];
            conv.journal_at = call.journal_at[i];
            kdai_conv_accept(&conv);
        }
    }
    kdai_use_up_journals(op.spans, op.n_spans, 0);
    return KDA_OK;
}

/* ==== 21. Instruction sets ====================================================================
 *
 * Kernels are written once, below, in terms of wide values of KDAI_LANES floats: one register of
 * AVX-512, two of AVX2, four of NEON. This section spells the operations on them for each set; the
 * file then includes itself once for each, and the last section becomes that set's kernels. */

/* Without optimisation each wide value lives on the stack, and a kernel takes 100 KiB of it. */
#if defined(__GNUC__) && !defined(__OPTIMIZE__) && !defined(KDA_NO_SIMD)
#define KDA_NO_SIMD
#endif
#if !defined(KDA_NO_SIMD) && defined(__GNUC__) && defined(__x86_64__)
#define KDAI_X86 1
#elif !defined(KDA_NO_SIMD) && defined(_MSC_VER) && defined(_M_X64)
#define KDAI_X86 1
#else
#define KDAI_X86 0
#endif
#if !defined(KDA_NO_SIMD) && defined(__aarch64__) && defined(__ARM_NEON)
#define KDAI_NEON 1
#else
#define KDAI_NEON 0
#endif

#if defined(_MSC_VER) && !defined(__clang__)
#define KDAI_INLINE static __forceinline
#define KDAI_TARGET(features)
#else
#define KDAI_INLINE static inline __attribute__((always_inline))
#define KDAI_TARGET(features) __attribute__((target(features)))
#endif

/* GCC's headers for AVX-512 begin with values that are set to themselves, and in C++ GCC warns of
 * that wherever they are inlined (GCC bug 105593). */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

/* Added to a whole number n of -150 .. 0 it leaves n + 192 in the low bits of the sum, which moved
 * up to the exponent's place make 2^(n + 65): a normal number, so that a product with it is exact,
 * and one with 2^-65 after it rounds once even if the result is subnormal. */
#define KDAI_EXPONENTS (12582912.0f + 192.0f)

#if KDAI_X86
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
#define KDAI_AVX2_NEEDS(first, next) first(avx2) next(fma) next(f16c)
#define KDAI_AVX512_NEEDS(first, next) first(avx512f) next(avx2) next(fma) next(f16c)
#define KDAI_FIRST_NAME(feature) #feature
#define KDAI_NEXT_NAME(feature) "," #feature
#define KDAI_FIRST_BIT(feature) KDAI_CPU_##feature
#define KDAI_NEXT_BIT(feature) | KDAI_CPU_##feature
enum { KDAI_CPU_avx2 = 1, KDAI_CPU_fma = 2, KDAI_CPU_f16c = 4, KDAI_CPU_avx512f = 8 };

static void kdai_cpuid(unsigned leaf, unsigned out[4]) {
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
static unsigned kdai_xgetbv(void) {
#if defined(__GNUC__)
    unsigned low, high;
    __asm__ volatile(".byte 0x0f, 0x01, 0xd0" : "=a"(low), "=d"(high) : "c"(0));
    return low;
#else
    return (unsigned)_xgetbv(0);
#endif
}

static unsigned kdai_cpu_features(void) {
    unsigned one[4], seven[4], features = 0;
    kdai_cpuid(1, one);
    kdai_cpuid(7, seven);
    unsigned saved = one[2] >> 27 & 1u ? kdai_xgetbv() : 0;
    if ((saved & 0x6u) == 0x6u) {
        features |= one[2] >> 12 & 1u ? KDAI_CPU_fma : 0;
        features |= one[2] >> 29 & 1u ? KDAI_CPU_f16c : 0;
        features |= seven[1] >> 5 & 1u ? KDAI_CPU_avx2 : 0;
    }
    if ((saved & 0xe6u) == 0xe6u) features |= seven[1] >> 16 & 1u ? KDAI_CPU_avx512f : 0;
    return features;
}

/* With what every x86-64 has. */
static void kdai_transpose4(const float *from, size_t from_stride, size_t n, float *to,
                            size_t to_stride) {
    for (size_t i = 0; i < n; i += 4, from += 4, to += 4 * to_stride) {
        __m128 a = _mm_loadu_ps(from), b = _mm_loadu_ps(from + from_stride);
        __m128 c = _mm_loadu_ps(from + 2 * from_stride), d = _mm_loadu_ps(from + 3 * from_stride);
        __m128 ab_low = _mm_unpacklo_ps(a, b), ab_high = _mm_unpackhi_ps(a, b);
        __m128 cd_low = _mm_unpacklo_ps(c, d), cd_high = _mm_unpackhi_ps(c, d);
        _mm_storeu_ps(to, _mm_movelh_ps(ab_low, cd_low));
        _mm_storeu_ps(to + to_stride, _mm_movehl_ps(cd_low, ab_low));
        _mm_storeu_ps(to + 2 * to_stride, _mm_movelh_ps(ab_high, cd_high));
        _mm_storeu_ps(to + 3 * to_stride, _mm_movehl_ps(cd_high, ab_high));
    }
}

/* ---- AVX2 with FMA and F16C ---- */

#define KDAI_AVX2 KDAI_INLINE KDAI_TARGET(KDAI_AVX2_NEEDS(KDAI_FIRST_NAME, KDAI_NEXT_NAME))
typedef struct kdai_wide_avx2 {
    __m256 a, b;
} kdai_wide_avx2;

#define KDAI_AVX2_OF_2(name, intrinsic)                                                            \
    KDAI_AVX2 kdai_wide_avx2 kdai_##name##_avx2(kdai_wide_avx2 x, kdai_wide_avx2 y) {              \
        x.a = intrinsic(x.a, y.a);                                                                 \
        x.b = intrinsic(x.b, y.b);                                                                 \
        return x;                                                                                  \
    }
KDAI_AVX2_OF_2(add, _mm256_add_ps)
KDAI_AVX2_OF_2(sub, _mm256_sub_ps)
KDAI_AVX2_OF_2(mul, _mm256_mul_ps)
KDAI_AVX2_OF_2(div, _mm256_div_ps)
KDAI_AVX2_OF_2(min, _mm256_min_ps) /* of these two, y where either is NaN */
KDAI_AVX2_OF_2(max, _mm256_max_ps)

KDAI_AVX2 kdai_wide_avx2 kdai_set_avx2(float x) {
    kdai_wide_avx2 y;
    y.a = y.b = _mm256_set1_ps(x);
    return y;
}
KDAI_AVX2 kdai_wide_avx2 kdai_read_avx2(const float *x) {
    kdai_wide_avx2 y;
    y.a = _mm256_loadu_ps(x);
    y.b = _mm256_loadu_ps(x + 8);
    return y;
}
/* Keeps x in registers: compilers would rather read memory again, and loads are what runs out. */
KDAI_AVX2 kdai_wide_avx2 kdai_hold_avx2(kdai_wide_avx2 x) {
#if defined(__GNUC__)
    __asm__("" : "+x"(x.a), "+x"(x.b));
#endif
    return x;
}
KDAI_AVX2 void kdai_write_avx2(float *to, kdai_wide_avx2 x) {
    _mm256_storeu_ps(to, x.a);
    _mm256_storeu_ps(to + 8, x.b);
}
/* x y + z and z - x y, rounded once. */
KDAI_AVX2 kdai_wide_avx2 kdai_fma_avx2(kdai_wide_avx2 x, kdai_wide_avx2 y, kdai_wide_avx2 z) {
    z.a = _mm256_fmadd_ps(x.a, y.a, z.a);
    z.b = _mm256_fmadd_ps(x.b, y.b, z.b);
    return z;
}
KDAI_AVX2 kdai_wide_avx2 kdai_nfma_avx2(kdai_wide_avx2 x, kdai_wide_avx2 y, kdai_wide_avx2 z) {
    z.a = _mm256_fnmadd_ps(x.a, y.a, z.a);
    z.b = _mm256_fnmadd_ps(x.b, y.b, z.b);
    return z;
}
KDAI_AVX2 kdai_wide_avx2 kdai_minus_magnitude_avx2(kdai_wide_avx2 x) { /* -|x| */
    x.a = _mm256_or_ps(x.a, _mm256_set1_ps(-0.0f));
    x.b = _mm256_or_ps(x.b, _mm256_set1_ps(-0.0f));
    return x;
}
/* By the sign of x: y where it is clear, z where it is set. */
KDAI_AVX2 kdai_wide_avx2 kdai_by_sign_avx2(kdai_wide_avx2 x, kdai_wide_avx2 y, kdai_wide_avx2 z) {
    z.a = _mm256_blendv_ps(y.a, z.a, x.a);
    z.b = _mm256_blendv_ps(y.b, z.b, x.b);
    return z;
}
/* 2^(n + 65) from KDAI_EXPONENTS + n. */
KDAI_AVX2 kdai_wide_avx2 kdai_power_avx2(kdai_wide_avx2 x) {
    x.a = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(x.a), 23));
    x.b = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(x.b), 23));
    return x;
}
KDAI_AVX2 __m128 kdai_quarter_sum_avx2(__m256 x) { /* lanes 4 apart */
    return _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
}
/* Sums of four wide values that are 8 lanes each, in the order of kdai_add_lanes. */
KDAI_AVX2 void kdai_sum8_avx2(__m256 w, __m256 x, __m256 y, __m256 z, float sums[4]) {
    __m128 p = kdai_quarter_sum_avx2(w), q = kdai_quarter_sum_avx2(x);
    __m128 r = kdai_quarter_sum_avx2(y), s = kdai_quarter_sum_avx2(z);
    __m128 pq = _mm_add_ps(_mm_movelh_ps(p, q), _mm_movehl_ps(q, p));
    __m128 rs = _mm_add_ps(_mm_movelh_ps(r, s), _mm_movehl_ps(s, r));
    _mm_storeu_ps(sums, _mm_add_ps(_mm_shuffle_ps(pq, rs, _MM_SHUFFLE(2, 0, 2, 0)),
                                   _mm_shuffle_ps(pq, rs, _MM_SHUFFLE(3, 1, 3, 1))));
}
KDAI_AVX2 void kdai_sum4_avx2(kdai_wide_avx2 w, kdai_wide_avx2 x, kdai_wide_avx2 y,
                              kdai_wide_avx2 z, float sums[4]) {
    kdai_sum8_avx2(_mm256_add_ps(w.a, w.b), _mm256_add_ps(x.a, x.b), _mm256_add_ps(y.a, y.b),
                   _mm256_add_ps(z.a, z.b), sums);
}
KDAI_AVX2 kdai_wide_avx2 kdai_read_f16_avx2(const uint16_t *x) {
    kdai_wide_avx2 y;
    y.a = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)x));
    y.b = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(x + 8)));
    return y;
}
KDAI_AVX2 void kdai_write_f16_avx2(uint16_t *to, kdai_wide_avx2 x) {
    _mm_storeu_si128((__m128i *)(void *)to, _mm256_cvtps_ph(x.a, 0));
    _mm_storeu_si128((__m128i *)(void *)(to + 8), _mm256_cvtps_ph(x.b, 0));
}
KDAI_AVX2 kdai_wide_avx2 kdai_round_f16_avx2(kdai_wide_avx2 x) {
    x.a = _mm256_cvtph_ps(_mm256_cvtps_ph(x.a, 0));
    x.b = _mm256_cvtph_ps(_mm256_cvtps_ph(x.b, 0));
    return x;
}
KDAI_AVX2 kdai_wide_avx2 kdai_read_bf16_avx2(const uint16_t *x) {
    kdai_wide_avx2 y;
    __m128i a = _mm_loadu_si128((const __m128i *)(const void *)x);
    __m128i b = _mm_loadu_si128((const __m128i *)(const void *)(x + 8));
    y.a = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(a), 16));
    y.b = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(b), 16));
    return y;
}
KDAI_AVX2 __m256i kdai_bf16_bits_avx2(__m256 x) {
    __m256i bits = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    __m256 is_nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    rounded = _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(is_nan));
    return _mm256_srli_epi32(rounded, 16);
}
KDAI_AVX2 void kdai_write_bf16_avx2(uint16_t *to, kdai_wide_avx2 x) {
    __m256i both = _mm256_packus_epi32(kdai_bf16_bits_avx2(x.a), kdai_bf16_bits_avx2(x.b));
    _mm256_storeu_si256((__m256i *)(void *)to, _mm256_permute4x64_epi64(both, 0xd8));
}

/* ---- AVX-512 ---- */

#define KDAI_AVX512 KDAI_INLINE KDAI_TARGET(KDAI_AVX512_NEEDS(KDAI_FIRST_NAME, KDAI_NEXT_NAME))
typedef __m512 kdai_wide_avx512;

KDAI_AVX512 __m512 kdai_set_avx512(float x) {
    return _mm512_set1_ps(x);
}
KDAI_AVX512 __m512 kdai_read_avx512(const float *x) {
    return _mm512_loadu_ps(x);
}
KDAI_AVX512 __m512 kdai_hold_avx512(__m512 x) {
#if defined(__GNUC__)
    __asm__("" : "+v"(x));
#endif
    return x;
}
KDAI_AVX512 void kdai_write_avx512(float *to, __m512 x) {
    _mm512_storeu_ps(to, x);
}
KDAI_AVX512 __m512 kdai_add_avx512(__m512 x, __m512 y) {
    return _mm512_add_ps(x, y);
}
KDAI_AVX512 __m512 kdai_sub_avx512(__m512 x, __m512 y) {
    return _mm512_sub_ps(x, y);
}
KDAI_AVX512 __m512 kdai_mul_avx512(__m512 x, __m512 y) {
    return _mm512_mul_ps(x, y);
}
KDAI_AVX512 __m512 kdai_div_avx512(__m512 x, __m512 y) {
    return _mm512_div_ps(x, y);
}
KDAI_AVX512 __m512 kdai_min_avx512(__m512 x, __m512 y) {
    return _mm512_min_ps(x, y);
}
KDAI_AVX512 __m512 kdai_max_avx512(__m512 x, __m512 y) {
    return _mm512_max_ps(x, y);
}
KDAI_AVX512 __m512 kdai_fma_avx512(__m512 x, __m512 y, __m512 z) {
    return _mm512_fmadd_ps(x, y, z);
}
KDAI_AVX512 __m512 kdai_nfma_avx512(__m512 x, __m512 y, __m512 z) {
    return _mm512_fnmadd_ps(x, y, z);
}
KDAI_AVX512 __m512 kdai_minus_magnitude_avx512(__m512 x) {
    __m512i sign = _mm512_set1_epi32((int)0x80000000u);
    return _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(x), sign));
}
KDAI_AVX512 __m512 kdai_by_sign_avx512(__m512 x, __m512 y, __m512 z) {
    __m512i sign = _mm512_set1_epi32((int)0x80000000u);
    return _mm512_mask_blend_ps(_mm512_test_epi32_mask(_mm512_castps_si512(x), sign), y, z);
}
KDAI_AVX512 __m512 kdai_power_avx512(__m512 x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(x), 23));
}
KDAI_AVX512 __m256 kdai_half_sum_avx512(__m512 x) { /* lanes 8 apart */
    __m512d wide = _mm512_castps_pd(x);
    return _mm256_add_ps(_mm512_castps512_ps256(x),
                         _mm256_castpd_ps(_mm512_extractf64x4_pd(wide, 1)));
}
KDAI_AVX512 void kdai_sum4_avx512(__m512 w, __m512 x, __m512 y, __m512 z, float sums[4]) {
    kdai_sum8_avx2(kdai_half_sum_avx512(w), kdai_half_sum_avx512(x), kdai_half_sum_avx512(y),
                   kdai_half_sum_avx512(z), sums);
}
KDAI_AVX512 __m512 kdai_read_f16_avx512(const uint16_t *x) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)x));
}
KDAI_AVX512 void kdai_write_f16_avx512(uint16_t *to, __m512 x) {
    _mm256_storeu_si256((__m256i *)(void *)to, _mm512_maskz_cvtps_ph((__mmask16)0xffff, x, 0));
}
KDAI_AVX512 __m512 kdai_round_f16_avx512(__m512 x) {
    return _mm512_cvtph_ps(_mm512_maskz_cvtps_ph((__mmask16)0xffff, x, 0));
}
KDAI_AVX512 __m512 kdai_read_bf16_avx512(const uint16_t *x) {
    __m256i half = _mm256_loadu_si256((const __m256i *)(const void *)x);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
KDAI_AVX512 void kdai_write_bf16_avx512(uint16_t *to, __m512 x) {
    __m512i bits = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x400000));
    _mm256_storeu_si256((__m256i *)(void *)to,
                        _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}
#endif /* KDAI_X86 */

#if KDAI_NEON
#include <arm_neon.h>

static void kdai_transpose4(const float *from, size_t from_stride, size_t n, float *to,
                            size_t to_stride) {
    for (size_t i = 0; i < n; i += 4, from += 4, to += 4 * to_stride) {
        const float *c = from + 2 * from_stride;
        float32x4x2_t ab = vtrnq_f32(vld1q_f32(from), vld1q_f32(from + from_stride));
        float32x4x2_t cd = vtrnq_f32(vld1q_f32(c), vld1q_f32(c + from_stride));
        for (size_t odd = 0; odd < 2; odd++) {
            float32x4_t x = ab.val[odd], y = cd.val[odd];
            vst1q_f32(to + odd * to_stride, vcombine_f32(vget_low_f32(x), vget_low_f32(y)));
            vst1q_f32(to + (2 + odd) * to_stride, vcombine_f32(vget_high_f32(x), vget_high_f32(y)));
        }
    }
}

/* ---- NEON: every 64-bit ARM has it ---- */

typedef float32x4x4_t kdai_wide_neon;
#define KDAI_EACH4 for (int i = 0; i < 4; i++)

#define KDAI_NEON_OF_2(name, intrinsic)                                                            \
    KDAI_INLINE kdai_wide_neon kdai_##name##_neon(kdai_wide_neon x, kdai_wide_neon y) {            \
        KDAI_EACH4 x.val[i] = intrinsic(x.val[i], y.val[i]);                                       \
        return x;                                                                                  \
    }
KDAI_NEON_OF_2(add, vaddq_f32)
KDAI_NEON_OF_2(sub, vsubq_f32)
KDAI_NEON_OF_2(mul, vmulq_f32)
KDAI_NEON_OF_2(div, vdivq_f32)
KDAI_NEON_OF_2(min, vminq_f32) /* of these two, NaN where either is */
KDAI_NEON_OF_2(max, vmaxq_f32)

KDAI_INLINE kdai_wide_neon kdai_set_neon(float x) {
    kdai_wide_neon y;
    KDAI_EACH4 y.val[i] = vdupq_n_f32(x);
    return y;
}
KDAI_INLINE kdai_wide_neon kdai_read_neon(const float *x) {
    kdai_wide_neon y;
    KDAI_EACH4 y.val[i] = vld1q_f32(x + 4 * i);
    return y;
}
KDAI_INLINE kdai_wide_neon kdai_hold_neon(kdai_wide_neon x) {
    return x; /* a load-store machine does so by itself */
}
KDAI_INLINE void kdai_write_neon(float *to, kdai_wide_neon x) {
    KDAI_EACH4 vst1q_f32(to + 4 * i, x.val[i]);
}
KDAI_INLINE kdai_wide_neon kdai_fma_neon(kdai_wide_neon x, kdai_wide_neon y, kdai_wide_neon z) {
    KDAI_EACH4 z.val[i] = vfmaq_f32(z.val[i], x.val[i], y.val[i]);
    return z;
}
KDAI_INLINE kdai_wide_neon kdai_nfma_neon(kdai_wide_neon x, kdai_wide_neon y, kdai_wide_neon z) {
    KDAI_EACH4 z.val[i] = vfmsq_f32(z.val[i], x.val[i], y.val[i]);
    return z;
}
KDAI_INLINE kdai_wide_neon kdai_minus_magnitude_neon(kdai_wide_neon x) {
    KDAI_EACH4 x.val[i] = vnegq_f32(vabsq_f32(x.val[i]));
    return x;
}
KDAI_INLINE kdai_wide_neon kdai_by_sign_neon(kdai_wide_neon x, kdai_wide_neon y, kdai_wide_neon z) {
    KDAI_EACH4 {
        uint32x4_t is_set = vcltzq_s32(vreinterpretq_s32_f32(x.val[i]));
        z.val[i] = vbslq_f32(is_set, z.val[i], y.val[i]);
    }
    return z;
}
KDAI_INLINE kdai_wide_neon kdai_power_neon(kdai_wide_neon x) {
    KDAI_EACH4 {
        int32x4_t bits = vreinterpretq_s32_f32(x.val[i]);
        x.val[i] = vreinterpretq_f32_s32(vshlq_n_s32(bits, 23));
    }
    return x;
}
KDAI_INLINE float kdai_sum_neon(kdai_wide_neon x) {
    float32x4_t quarter = vaddq_f32(vaddq_f32(x.val[0], x.val[2]), vaddq_f32(x.val[1], x.val[3]));
    float32x2_t pair = vadd_f32(vget_low_f32(quarter), vget_high_f32(quarter));
    return vget_lane_f32(vpadd_f32(pair, pair), 0);
}
KDAI_INLINE void kdai_sum4_neon(kdai_wide_neon w, kdai_wide_neon x, kdai_wide_neon y,
                                kdai_wide_neon z, float sums[4]) {
    sums[0] = kdai_sum_neon(w);
    sums[1] = kdai_sum_neon(x);
    sums[2] = kdai_sum_neon(y);
    sums[3] = kdai_sum_neon(z);
}
KDAI_INLINE kdai_wide_neon kdai_read_f16_neon(const uint16_t *x) {
    kdai_wide_neon y;
    KDAI_EACH4 y.val[i] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(x + 4 * i)));
    return y;
}
KDAI_INLINE void kdai_write_f16_neon(uint16_t *to, kdai_wide_neon x) {
    KDAI_EACH4 vst1_u16(to + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(x.val[i])));
}
KDAI_INLINE kdai_wide_neon kdai_round_f16_neon(kdai_wide_neon x) {
    KDAI_EACH4 x.val[i] = vcvt_f32_f16(vcvt_f16_f32(x.val[i]));
    return x;
}
KDAI_INLINE kdai_wide_neon kdai_read_bf16_neon(const uint16_t *x) {
    kdai_wide_neon y;
    KDAI_EACH4 y.val[i] = vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vld1_u16(x + 4 * i)), 16));
    return y;
}
KDAI_INLINE void kdai_write_bf16_neon(uint16_t *to, kdai_wide_neon x) {
    KDAI_EACH4 {
        uint32x4_t bits = vreinterpretq_u32_f32(x.val[i]);
        uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
        uint32x4_t rounded = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
        uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
        rounded = vbslq_u32(vceqq_f32(x.val[i], x.val[i]), rounded, quiet);
        vst1_u16(to + 4 * i, vshrn_n_u32(rounded, 16));
    }
}
#endif /* KDAI_NEON */

#if !KDAI_X86 && !KDAI_NEON
static void kdai_transpose4(const float *from, size_t from_stride, size_t n, float *to,
                            size_t to_stride) {
    for (size_t j = 0; j < n; j++)
        for (size_t i = 0; i < 4; i++) to[j * to_stride + i] = from[i * from_stride + j];
}
#endif

/* ==== 22. Dispatch ============================================================================ */

/* The file includes itself by its own name, from its own directory. */
#if KDAI_X86
#define KDAI_PASS avx2
#define KDAI_ISA KDA_ISA_AVX2
#define KDAI_KERNEL static KDAI_TARGET(KDAI_AVX2_NEEDS(KDAI_FIRST_NAME, KDAI_NEXT_NAME))
#define KDAI_KERNEL_INLINE KDAI_AVX2
#define KDAI_TALL 4
#define KDAI_BROAD 1
#include "kda.h"
#undef KDAI_PASS
#undef KDAI_ISA
#undef KDAI_KERNEL
#undef KDAI_KERNEL_INLINE
#undef KDAI_TALL
#undef KDAI_BROAD
#if !defined(KDA_NO_AVX512)
#define KDAI_PASS avx512
#define KDAI_ISA KDA_ISA_AVX512
#define KDAI_KERNEL static KDAI_TARGET(KDAI_AVX512_NEEDS(KDAI_FIRST_NAME, KDAI_NEXT_NAME))
#define KDAI_KERNEL_INLINE KDAI_AVX512
#define KDAI_TALL 8
#define KDAI_BROAD 2
#include "kda.h"
#undef KDAI_PASS
#undef KDAI_ISA
#undef KDAI_KERNEL
#undef KDAI_KERNEL_INLINE
#undef KDAI_TALL
#undef KDAI_BROAD
#endif
#elif KDAI_NEON
#define KDAI_PASS neon
#define KDAI_ISA KDA_ISA_NEON
#define KDAI_KERNEL static
#define KDAI_KERNEL_INLINE KDAI_INLINE
#define KDAI_TALL 4
#define KDAI_BROAD 1
#include "kda.h"
#undef KDAI_PASS
#undef KDAI_ISA
#undef KDAI_KERNEL
#undef KDAI_KERNEL_INLINE
#undef KDAI_TALL
#undef KDAI_BROAD
#endif

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

static const kdai_kernels kdai_kernels_scalar = {
    KDA_ISA_SCALAR,     0,
    kdai_to_floats,     kdai_from_floats,
    kdai_prepare_token, kdai_log_decay_rows,
    kdai_l2_norm_rows,  kdai_gated_norm_rows,
    kdai_conv_rows,     kdai_update_row,
    kdai_recurrent,     kdai_chunk_prepare,
    kdai_chunk_row,
};

/* The sets that this machine has, best first. */
static const kdai_kernels *kdai_find_best(void) {
#if KDAI_X86
    unsigned features = kdai_cpu_features();
    unsigned avx2 = KDAI_AVX2_NEEDS(KDAI_FIRST_BIT, KDAI_NEXT_BIT);
#if !defined(KDA_NO_AVX512)
    unsigned avx512 = KDAI_AVX512_NEEDS(KDAI_FIRST_BIT, KDAI_NEXT_BIT);
    if ((features & avx512) == avx512) return &kdai_kernels_avx512;
#endif
    if ((features & avx2) == avx2) return &kdai_kernels_avx2;
#elif KDAI_NEON
    return &kdai_kernels_neon;
#endif
    return &kdai_kernels_scalar;
}

/* Found once. Two threads that come first at the same time find the same. */
static const kdai_kernels *kdai_best(void) {
    static const kdai_kernels *best;
#if defined(__GNUC__) || defined(__clang__)
    const kdai_kernels *found = __atomic_load_n(&best, __ATOMIC_RELAXED);
    if (found) return found;
    found = kdai_find_best();
    __atomic_store_n(&best, found, __ATOMIC_RELAXED);
    return found;
#else
    const kdai_kernels *volatile *place = (const kdai_kernels *volatile *)&best;
    if (!*place) *place = kdai_find_best();
    return *place;
#endif
}

static const kdai_kernels *kdai_kernels_of(kda_isa isa) {
    const kdai_kernels *best = kdai_best();
    if (isa == KDA_ISA_AUTO || isa == best->isa) return best;
    if (isa == KDA_ISA_SCALAR) return &kdai_kernels_scalar;
#if KDAI_X86
    if (isa == KDA_ISA_AVX2 && best->isa == KDA_ISA_AVX512) return &kdai_kernels_avx2;
#endif
    return NULL;
}

KDA_API kda_isa kda_isa_best(void) {
    return kdai_best()->isa;
}

KDA_API int kda_isa_is_available(kda_isa isa) {
    return kdai_kernels_of(isa) != NULL;
}

KDA_API const char *kda_isa_name(kda_isa isa) {
    static const char *const names[] = {"auto", "scalar", "avx2", "avx512", "neon"};
    return (size_t)isa < sizeof names / sizeof names[0] ? names[(size_t)isa] : "unknown";
}

#ifdef __cplusplus
}
#endif
#endif /* KDA_IMPLEMENTATION */

/* ==== 23. Kernels =============================================================================
 *
 * Compiled once for each instruction set, from within the implementation above, with
 *     KDAI_PASS     the suffix of the set's names: avx2, avx512, neon
 *     KDAI_KERNEL   linkage and target of its functions
 *     KDAI_TALL     rows of a register block: as many as leave registers for the rest
 *     KDAI_BROAD    wide values side by side in a register block, 1 or 2
 * Lengths here are multiples of KDAI_LANES: rows of scratch are padded with zeros to work->stride,
 * and a state row that is not a whole number of lanes long passes through scratch. Each function
 * computes what the plain one of its name does; recurrent, gates, norms and convolution to the
 * last bit, the chunked ones up to rounding. */
#ifdef KDAI_PASS

#define KDAI_JOIN_(a, b) a##_##b
#define KDAI_JOIN(a, b) KDAI_JOIN_(a, b)
#define KDAI_(name) KDAI_JOIN(kdai_##name, KDAI_PASS)
#define KDAI_WIDE KDAI_(wide)

/* Two wide values side by side. The elementary functions are chains of some 20 operations, each of
 * which waits for the last: two chains fill each other's waiting. */
typedef struct KDAI_(two) {
    KDAI_WIDE a, b;
} KDAI_(two);
#define KDAI_TWO KDAI_(two)
#define KDAI_TWO_OF_1(name)                                                                        \
    KDAI_KERNEL_INLINE KDAI_TWO KDAI_(two_##name)(KDAI_TWO x) {                                    \
        x.a = KDAI_(name)(x.a);                                                                    \
        x.b = KDAI_(name)(x.b);                                                                    \
        return x;                                                                                  \
    }
#define KDAI_TWO_OF_2(name)                                                                        \
    KDAI_KERNEL_INLINE KDAI_TWO KDAI_(two_##name)(KDAI_TWO x, KDAI_TWO y) {                        \
        x.a = KDAI_(name)(x.a, y.a);                                                               \
        x.b = KDAI_(name)(x.b, y.b);                                                               \
        return x;                                                                                  \
    }
#define KDAI_TWO_OF_3(name)                                                                        \
    KDAI_KERNEL_INLINE KDAI_TWO KDAI_(two_##name)(KDAI_TWO x, KDAI_TWO y, KDAI_TWO z) {            \
        x.a = KDAI_(name)(x.a, y.a, z.a);                                                          \
        x.b = KDAI_(name)(x.b, y.b, z.b);                                                          \
        return x;                                                                                  \
    }
KDAI_TWO_OF_1(minus_magnitude)
KDAI_TWO_OF_1(power)
KDAI_TWO_OF_2(add)
KDAI_TWO_OF_2(sub)
KDAI_TWO_OF_2(mul)
KDAI_TWO_OF_2(div)
KDAI_TWO_OF_2(min)
KDAI_TWO_OF_2(max)
KDAI_TWO_OF_3(fma)
KDAI_TWO_OF_3(nfma)
KDAI_TWO_OF_3(by_sign)

KDAI_KERNEL_INLINE KDAI_TWO KDAI_(two_set)(float x) {
    KDAI_TWO y;
    y.a = y.b = KDAI_(set)(x);
    return y;
}

/* Elements i .. i + 2 KDAI_LANES - 1 of a row of n floats, n whole lanes; past its end zeros are
 * read and nothing is written. */
KDAI_KERNEL_INLINE KDAI_TWO KDAI_(two_read)(const float *from, size_t i, size_t n) {
    KDAI_TWO x;
    x.a = KDAI_(read)(from + i);
    x.b = n - i > KDAI_LANES ? KDAI_(read)(from + i + KDAI_LANES) : KDAI_(set)(0.0f);
    return x;
}

KDAI_KERNEL_INLINE void KDAI_(two_write)(float *to, size_t i, size_t n, KDAI_TWO x) {
    KDAI_(write)(to + i, x.a);
    if (n - i > KDAI_LANES) KDAI_(write)(to + i + KDAI_LANES, x.b);
}

/* p x + c: a step of a polynomial. */
KDAI_KERNEL_INLINE KDAI_TWO KDAI_(step)(KDAI_TWO p, KDAI_TWO x, float c) {
    return KDAI_(two_fma)(p, x, KDAI_(two_set)(c));
}

/* kdai_exp for x <= 0. The bound only keeps the exponent in range: below it comes out as 0. */
KDAI_KERNEL_INLINE KDAI_TWO KDAI_(exp)(KDAI_TWO x) {
    x = KDAI_(two_max)(KDAI_(two_set)(-104.0f), x);
    KDAI_TWO magic = KDAI_(two_set)(KDAI_EXPONENTS);
    KDAI_TWO shifted = KDAI_(two_fma)(x, KDAI_(two_set)(1.44269502f), magic);
    KDAI_TWO n = KDAI_(two_sub)(shifted, magic);
    KDAI_TWO r = KDAI_(two_fma)(n, KDAI_(two_set)(-0.693147182f), x);
    r = KDAI_(two_fma)(n, KDAI_(two_set)(1.90465421e-9f), r);
    KDAI_TWO p = KDAI_(step)(KDAI_(two_set)(0.00139262504f), r, 0.00836323295f);
    p = KDAI_(step)(p, r, 0.0416665524f);
    p = KDAI_(step)(p, r, 0.166665763f);
    p = KDAI_(step)(p, r, 0.5f);
    p = KDAI_(two_fma)(KDAI_(two_mul)(p, r), r, r);
    KDAI_TWO y = KDAI_(two_add)(p, KDAI_(two_set)(1.0f));
    return KDAI_(two_mul)(KDAI_(two_mul)(y, KDAI_(two_power)(shifted)),
                          KDAI_(two_set)(2.71050543e-20f)); /* 2^-65 */
}

/* kda_sigmoid. At x = -0 z is 1. */
KDAI_KERNEL_INLINE KDAI_TWO KDAI_(sigmoid)(KDAI_TWO x) {
    KDAI_TWO z = KDAI_(exp)(KDAI_(two_minus_magnitude)(x)), one = KDAI_(two_set)(1.0f);
    KDAI_TWO q = KDAI_(two_div)(z, KDAI_(two_add)(one, z)), most = KDAI_(two_by_sign)(x, one, z);
    return KDAI_(two_nfma)(most, q, most);
}

/* kda_softplus. */
KDAI_KERNEL_INLINE KDAI_TWO KDAI_(softplus)(KDAI_TWO x) {
    KDAI_TWO z = KDAI_(exp)(KDAI_(two_minus_magnitude)(x));
    KDAI_TWO p = KDAI_(step)(KDAI_(two_set)(-0.00329044065f), z, 0.020086173f);
    p = KDAI_(step)(p, z, -0.0574571751f);
    p = KDAI_(step)(p, z, 0.106611267f);
    p = KDAI_(step)(p, z, -0.153448805f);
    p = KDAI_(step)(p, z, 0.196921021f);
    p = KDAI_(step)(p, z, -0.24958019f);
    p = KDAI_(step)(p, z, 0.333304644f);
    p = KDAI_(step)(p, z, -0.499999315f);
    KDAI_TWO log1p_z = KDAI_(two_fma)(KDAI_(two_mul)(p, z), z, z);
    return KDAI_(two_add)(KDAI_(two_max)(x, KDAI_(two_set)(0.0f)), log1p_z);
}

KDAI_KERNEL void KDAI_(to_floats)(const void *from, kda_type type, size_t n, float *to) {
    const uint16_t *half = (const uint16_t *)from;
    size_t i = 0;
    if (type == KDA_F16)
        for (; n - i >= KDAI_LANES; i += KDAI_LANES)
            KDAI_(write)(to + i, KDAI_(read_f16)(half + i));
    else if (type == KDA_BF16)
        for (; n - i >= KDAI_LANES; i += KDAI_LANES)
            KDAI_(write)(to + i, KDAI_(read_bf16)(half + i));
    kdai_to_floats((const unsigned char *)from + i * kdai_type_bytes(type), type, n - i, to + i);
}

KDAI_KERNEL void KDAI_(from_floats)(const float *from, kda_type type, size_t n, void *to) {
    uint16_t *half = (uint16_t *)to;
    size_t i = 0;
    if (type == KDA_F16)
        for (; n - i >= KDAI_LANES; i += KDAI_LANES)
            KDAI_(write_f16)(half + i, KDAI_(read)(from + i));
    else if (type == KDA_BF16)
        for (; n - i >= KDAI_LANES; i += KDAI_LANES)
            KDAI_(write_bf16)(half + i, KDAI_(read)(from + i));
    kdai_from_floats(from + i, type, n - i, (unsigned char *)to + i * kdai_type_bytes(type));
}

KDAI_KERNEL float KDAI_(dot)(const float *x, const float *y, size_t n) {
    KDAI_WIDE sum = KDAI_(set)(0.0f);
    float sums[4];
    for (size_t i = 0; i < n; i += KDAI_LANES)
        sum = KDAI_(fma)(KDAI_(read)(x + i), KDAI_(read)(y + i), sum);
    KDAI_(sum4)(sum, sum, sum, sum, sums);
    return sums[0];
}

/* Elements i .. i + KDAI_LANES - 1 of a row of n of any type; past its end zeros are read and
 * nothing is written. */
KDAI_KERNEL_INLINE KDAI_WIDE KDAI_(load)(const void *from, kda_type type, size_t i, size_t n) {
    if (i + KDAI_LANES > n) {
        float some[KDAI_LANES] = {0};
        for (size_t l = 0; i + l < n; l++) some[l] = kdai_element(from, type, i + l);
        return KDAI_(read)(some);
    }
    if (type == KDA_F32) return KDAI_(read)((const float *)from + i);
    if (type == KDA_F16) return KDAI_(read_f16)((const uint16_t *)from + i);
    return KDAI_(read_bf16)((const uint16_t *)from + i);
}

KDAI_KERNEL_INLINE void KDAI_(store)(void *to, kda_type type, size_t i, size_t n, KDAI_WIDE x) {
    if (i + KDAI_LANES > n) {
        float some[KDAI_LANES];
        KDAI_(write)(some, x);
        for (size_t l = 0; i + l < n; l++) kdai_set_element(to, type, i + l, some[l]);
    } else if (type == KDA_F32) {
        KDAI_(write)((float *)to + i, x);
    } else if (type == KDA_F16) {
        KDAI_(write_f16)((uint16_t *)to + i, x);
    } else {
        KDAI_(write_bf16)((uint16_t *)to + i, x);
    }
}

/* Two such, one after the other. */
KDAI_KERNEL_INLINE KDAI_TWO KDAI_(two_load)(const void *from, kda_type type, size_t i, size_t n) {
    KDAI_TWO x;
    x.a = KDAI_(load)(from, type, i, n);
    x.b = KDAI_(load)(from, type, i + KDAI_LANES, n);
    return x;
}

KDAI_KERNEL_INLINE void KDAI_(two_store)(void *to, kda_type type, size_t i, size_t n, KDAI_TWO x) {
    KDAI_(store)(to, type, i, n, x.a);
    KDAI_(store)(to, type, i + KDAI_LANES, n, x.b);
}

/* kdai_gate. */
KDAI_KERNEL_INLINE KDAI_TWO KDAI_(gate)(const kda_desc *desc, KDAI_TWO a, KDAI_TWO bias,
                                        KDAI_TWO x) {
    if (desc->gate == KDA_GATE_LOG_DECAY) return KDAI_(two_min)(KDAI_(two_set)(0.0f), x);
    x = KDAI_(two_add)(x, bias);
    if (desc->gate == KDA_GATE_SOFTPLUS) /* -(a softplus) */
        return KDAI_(two_nfma)(a, KDAI_(softplus)(x), KDAI_(two_set)(-0.0f));
    return KDAI_(two_mul)(KDAI_(two_set)(desc->lower_bound), KDAI_(sigmoid)(KDAI_(two_mul)(a, x)));
}

KDAI_KERNEL void KDAI_(log_decay_rows)(const kda_desc *desc, float a, const float *bias,
                                       const kdai_rows *rows) {
    KDAI_TWO wide = KDAI_(two_set)(a), b = KDAI_(two_set)(0.0f);
    size_t n = rows->n;
    const unsigned char *x = rows->x;
    unsigned char *y = rows->y;
    for (size_t r = 0; r < rows->n_rows; r++, x += rows->x_step, y += rows->y_step)
        for (size_t i = 0; i < n; i += 2 * KDAI_LANES) {
            KDAI_TWO raw = KDAI_(two_load)(x, rows->x_type, i, n);
            if (bias) b = KDAI_(two_load)(bias, KDA_F32, i, n);
            KDAI_(two_store)(y, rows->y_type, i, n, KDAI_(gate)(desc, wide, b, raw));
        }
}

/* kdai_squares of each row, two rows side by side; a last one goes with itself. */
KDAI_KERNEL_INLINE void KDAI_(squares)(const kdai_rows *rows, float squares[KDAI_ROW_TOKENS]) {
    for (size_t r = 0; r < rows->n_rows; r += 2) {
        size_t next = r + 1 < rows->n_rows ? r + 1 : r;
        const unsigned char *x = rows->x + (ptrdiff_t)r * rows->x_step;
        const unsigned char *y = rows->x + (ptrdiff_t)next * rows->x_step;
        KDAI_TWO sum = KDAI_(two_set)(0.0f), both;
        float sums[4];
        for (size_t i = 0; i < rows->n; i += KDAI_LANES) {
            both.a = KDAI_(load)(x, rows->x_type, i, rows->n);
            both.b = KDAI_(load)(y, rows->x_type, i, rows->n);
            sum = KDAI_(two_fma)(both, both, sum);
        }
        KDAI_(sum4)(sum.a, sum.b, sum.a, sum.b, sums);
        squares[r] = sums[0], squares[next] = sums[1];
    }
}

KDAI_KERNEL void KDAI_(l2_norm_rows)(float eps, const kdai_rows *rows) {
    float inverse[KDAI_ROW_TOKENS];
    const unsigned char *x = rows->x;
    unsigned char *y = rows->y;
    KDAI_(squares)(rows, inverse);
    for (size_t r = 0; r < rows->n_rows; r++) inverse[r] = kdai_inverse_norm(inverse[r], eps);
    for (size_t r = 0; r < rows->n_rows; r++, x += rows->x_step, y += rows->y_step) {
        KDAI_TWO factor = KDAI_(two_set)(inverse[r]);
        for (size_t i = 0; i < rows->n; i += 2 * KDAI_LANES) {
            KDAI_TWO wide = KDAI_(two_load)(x, rows->x_type, i, rows->n);
            KDAI_(two_store)(y, rows->y_type, i, rows->n, KDAI_(two_mul)(wide, factor));
        }
    }
}

KDAI_KERNEL void KDAI_(gated_norm_rows)(const float *weight, float eps, const kdai_rows *rows) {
    float inverse[KDAI_ROW_TOKENS];
    size_t n = rows->n;
    const unsigned char *x = rows->x, *gate = rows->gate;
    unsigned char *y = rows->y;
    KDAI_(squares)(rows, inverse);
    for (size_t r = 0; r < rows->n_rows; r++) inverse[r] = kdai_inverse_rms(inverse[r], n, eps);
    for (size_t r = 0; r < rows->n_rows; r++) {
        KDAI_TWO factor = KDAI_(two_set)(inverse[r]);
        for (size_t i = 0; i < n; i += 2 * KDAI_LANES) {
            KDAI_TWO open = KDAI_(sigmoid)(KDAI_(two_load)(gate, rows->gate_type, i, n));
            KDAI_TWO wide = KDAI_(two_mul)(KDAI_(two_load)(x, rows->x_type, i, n), factor);
            wide = KDAI_(two_mul)(wide, KDAI_(two_load)(weight, KDA_F32, i, n));
            KDAI_(two_store)(y, rows->y_type, i, n, KDAI_(two_mul)(wide, open));
        }
        x += rows->x_step, gate += rows->gate_step, y += rows->y_step;
    }
}

/* kdai_prepare_token. */
KDAI_KERNEL void KDAI_(token)(const kdai_token *in, kdai_work *work, size_t i) {
    size_t n = work->stride, at = i * n;
    KDAI_TWO q_factor = KDAI_(two_set)(1.0f), k_factor = q_factor;
    KDAI_WIDE kq = KDAI_(set)(0.0f);
    KDAI_TWO scale = KDAI_(two_set)(in->scale), a = KDAI_(two_set)(in->a);
    float sums[4];
    if (in->desc->flags & KDA_L2_NORM_QK) {
        KDAI_WIDE qq = kq, kk = kq;
        for (size_t d = 0; d < n; d += KDAI_LANES) {
            KDAI_WIDE q = KDAI_(read)(in->q + d), k = KDAI_(read)(in->k + d);
            qq = KDAI_(fma)(q, q, qq);
            kk = KDAI_(fma)(k, k, kk);
        }
        KDAI_(sum4)(qq, kk, qq, kk, sums);
        q_factor = KDAI_(two_set)(kdai_inverse_norm(sums[0], in->desc->l2_eps));
        k_factor = KDAI_(two_set)(kdai_inverse_norm(sums[1], in->desc->l2_eps));
    }
    for (size_t d = 0; d < n; d += 2 * KDAI_LANES) {
        KDAI_TWO q = KDAI_(two_mul)(KDAI_(two_mul)(KDAI_(two_read)(in->q, d, n), q_factor), scale);
        KDAI_TWO k = KDAI_(two_mul)(KDAI_(two_read)(in->k, d, n), k_factor);
        KDAI_TWO g = KDAI_(gate)(in->desc, a, KDAI_(two_read)(work->bias, d, n),
                                 KDAI_(two_read)(in->g, d, n));
        KDAI_TWO e = KDAI_(exp)(g);
        KDAI_(two_write)(work->q + at, d, n, q);
        KDAI_(two_write)(work->k + at, d, n, k);
        KDAI_(two_write)(work->decay + at, d, n, e);
        KDAI_(two_write)(work->k_seen + at, d, n, KDAI_(two_mul)(e, k));
        KDAI_(two_write)(work->q_seen + at, d, n, KDAI_(two_mul)(e, q));
        kq = KDAI_(fma)(k.a, q.a, kq);
        if (n - d > KDAI_LANES) kq = KDAI_(fma)(k.b, q.b, kq); /* else it might turn -0 to 0 */
    }
    KDAI_(sum4)(kq, kq, kq, kq, sums);
    work->kq[i] = sums[0];
}

/* Inputs into a block's rows, and sums, for KDAI_LANES channels from c on. Four taps, the usual
 * number, stay in registers. An input goes into the sums of four tokens, each of which has a chain
 * of its own: sum1 is that of the next token to come, sum3 of the third. */
KDAI_KERNEL_INLINE void KDAI_(conv_sums_of_4)(const kdai_conv_block *block, size_t c,
                                              size_t n_tokens) {
    size_t stride = block->padded;
    const float *taps = block->taps + c;
    const unsigned char *from = block->x;
    float *rows = block->rows + c, *sums = block->sums + c;
    KDAI_WIDE tap0 = KDAI_(hold)(KDAI_(read)(taps));
    KDAI_WIDE tap1 = KDAI_(hold)(KDAI_(read)(taps + stride));
    KDAI_WIDE tap2 = KDAI_(hold)(KDAI_(read)(taps + 2 * stride));
    KDAI_WIDE tap3 = KDAI_(hold)(KDAI_(read)(taps + 3 * stride));
    KDAI_WIDE zero = KDAI_(set)(0.0f), x = KDAI_(read)(rows);
    KDAI_WIDE sum1 = KDAI_(fma)(tap0, x, zero), sum2, sum3;
    x = KDAI_(read)(rows + stride);
    sum1 = KDAI_(fma)(tap1, x, sum1), sum2 = KDAI_(fma)(tap0, x, zero);
    x = KDAI_(read)(rows + 2 * stride);
    sum1 = KDAI_(fma)(tap2, x, sum1), sum2 = KDAI_(fma)(tap1, x, sum2);
    sum3 = KDAI_(fma)(tap0, x, zero);
    rows += 3 * stride;
    for (size_t t = 0; t < n_tokens; t++, rows += stride, sums += stride, from += block->x_step) {
        x = KDAI_(load)(from, block->x_type, c, block->n);
        KDAI_(write)(rows, x);
        KDAI_(write)(sums, KDAI_(fma)(tap3, x, sum1));
        sum1 = KDAI_(fma)(tap2, x, sum2);
        sum2 = KDAI_(fma)(tap1, x, sum3);
        sum3 = KDAI_(fma)(tap0, x, KDAI_(set)(0.0f));
    }
}

/* The same for any number of taps. */
KDAI_KERNEL_INLINE void KDAI_(conv_sums)(const kdai_conv_block *block, size_t c, size_t n_tokens) {
    size_t width = block->width, stride = block->padded;
    const float *taps = block->taps + c;
    const unsigned char *from = block->x;
    float *rows = block->rows + c, *sums = block->sums + c;
    for (size_t t = 0; t < n_tokens; t++, rows += stride, sums += stride, from += block->x_step) {
        KDAI_WIDE sum = KDAI_(set)(0.0f);
        KDAI_(write)(rows + (width - 1) * stride, KDAI_(load)(from, block->x_type, c, block->n));
        for (size_t i = 0; i < width; i++)
            sum = KDAI_(fma)(KDAI_(read)(taps + i * stride), KDAI_(read)(rows + i * stride), sum);
        KDAI_(write)(sums, sum);
    }
}

/* kdai_conv_rows: sums of all tokens, then their activation. */
KDAI_KERNEL void KDAI_(conv_rows)(const kdai_conv_block *block, size_t n_tokens) {
    size_t n = block->n, stride = block->padded;
    int silu = block->silu;
    kda_type type = block->y_type;
    const float *sums = block->sums;
    unsigned char *y = block->y;
    for (size_t c = 0; c < n; c += KDAI_LANES)
        if (block->width == 4)
            KDAI_(conv_sums_of_4)(block, c, n_tokens);
        else
            KDAI_(conv_sums)(block, c, n_tokens);
    for (size_t t = 0; t < n_tokens; t++, sums += stride, y += block->y_step)
        for (size_t c = 0; c < n; c += 2 * KDAI_LANES) {
            KDAI_TWO sum = KDAI_(two_read)(sums, c, stride);
            if (silu) sum = KDAI_(two_mul)(sum, KDAI_(sigmoid)(sum));
            KDAI_(two_store)(y, type, c, n, sum);
        }
}

/* A wide value of a state row of float or f16. in_f16 is a constant wherever these are inlined. */
KDAI_KERNEL_INLINE KDAI_WIDE KDAI_(read_state)(const void *s, size_t d, int in_f16) {
    return in_f16 ? KDAI_(read_f16)((const uint16_t *)s + d) : KDAI_(read)((const float *)s + d);
}

KDAI_KERNEL_INLINE void KDAI_(write_state)(void *s, size_t d, int in_f16, KDAI_WIDE x) {
    if (in_f16)
        KDAI_(write_f16)((uint16_t *)s + d, x);
    else
        KDAI_(write)((float *)s + d, x);
}

/* The lanes of s . k_seen and s . q_seen of a state row. */
KDAI_KERNEL_INLINE void KDAI_(read_row)(const float *k_seen, const float *q_seen, size_t n,
                                        int in_f16, const void *s, KDAI_WIDE *a, KDAI_WIDE *b) {
    KDAI_WIDE a0 = KDAI_(set)(0.0f), b0 = a0;
    for (size_t d = 0; d < n; d += KDAI_LANES) {
        KDAI_WIDE x = KDAI_(read_state)(s, d, in_f16);
        a0 = KDAI_(fma)(x, KDAI_(read)(k_seen + d), a0);
        b0 = KDAI_(fma)(x, KDAI_(read)(q_seen + d), b0);
    }
    *a = a0, *b = b0;
}

/* The same of two rows side by side, which shares the loads of k_seen and q_seen. */
KDAI_KERNEL_INLINE void KDAI_(read_pair)(const float *k_seen, const float *q_seen, size_t n,
                                         int in_f16, void *const s[2], KDAI_WIDE a[2],
                                         KDAI_WIDE b[2]) {
    KDAI_WIDE a0 = KDAI_(set)(0.0f), a1 = a0, b0 = a0, b1 = a0;
    for (size_t d = 0; d < n; d += KDAI_LANES) {
        KDAI_WIDE k = KDAI_(hold)(KDAI_(read)(k_seen + d));
        KDAI_WIDE q = KDAI_(hold)(KDAI_(read)(q_seen + d));
        KDAI_WIDE x0 = KDAI_(read_state)(s[0], d, in_f16), x1 = KDAI_(read_state)(s[1], d, in_f16);
        a0 = KDAI_(fma)(x0, k, a0);
        a1 = KDAI_(fma)(x1, k, a1);
        b0 = KDAI_(fma)(x0, q, b0);
        b1 = KDAI_(fma)(x1, q, b1);
    }
    a[0] = a0, a[1] = a1, b[0] = b0, b[1] = b1;
}

/* s . k_seen of four rows, then s . q_seen. The first token to read rows has them come from memory:
 * row after row, the one stream in order that prefetchers follow best; later ones find them in the
 * cache. */
KDAI_KERNEL_INLINE void KDAI_(read_rows)(const float *k_seen, const float *q_seen, size_t n,
                                         int in_f16, int first, void *const s[4], float sums[8]) {
    KDAI_WIDE a[4], b[4];
    if (first) {
        KDAI_(read_row)(k_seen, q_seen, n, in_f16, s[0], &a[0], &b[0]);
        KDAI_(read_row)(k_seen, q_seen, n, in_f16, s[1], &a[1], &b[1]);
        KDAI_(read_row)(k_seen, q_seen, n, in_f16, s[2], &a[2], &b[2]);
        KDAI_(read_row)(k_seen, q_seen, n, in_f16, s[3], &a[3], &b[3]);
    } else {
        KDAI_(read_pair)(k_seen, q_seen, n, in_f16, s, a, b);
        KDAI_(read_pair)(k_seen, q_seen, n, in_f16, s + 2, a + 2, b + 2);
    }
    KDAI_(sum4)(a[0], a[1], a[2], a[3], sums);
    KDAI_(sum4)(b[0], b[1], b[2], b[3], sums + 4);
}

/* kdai_update_row of four rows, some of which may be one and the same. */
KDAI_KERNEL_INLINE void KDAI_(update_rows)(const float *decay, const float *k, size_t n, int in_f16,
                                           const float u[4], void *const s[4]) {
    KDAI_WIDE u0 = KDAI_(set)(u[0]), u1 = KDAI_(set)(u[1]);
    KDAI_WIDE u2 = KDAI_(set)(u[2]), u3 = KDAI_(set)(u[3]);
    void *s0 = s[0], *s1 = s[1], *s2 = s[2], *s3 = s[3];
    for (size_t d = 0; d < n; d += KDAI_LANES) {
        KDAI_WIDE e = KDAI_(hold)(KDAI_(read)(decay + d)), key = KDAI_(hold)(KDAI_(read)(k + d));
        KDAI_WIDE x0 = KDAI_(fma)(key, u0, KDAI_(mul)(KDAI_(read_state)(s0, d, in_f16), e));
        KDAI_WIDE x1 = KDAI_(fma)(key, u1, KDAI_(mul)(KDAI_(read_state)(s1, d, in_f16), e));
        KDAI_WIDE x2 = KDAI_(fma)(key, u2, KDAI_(mul)(KDAI_(read_state)(s2, d, in_f16), e));
        KDAI_WIDE x3 = KDAI_(fma)(key, u3, KDAI_(mul)(KDAI_(read_state)(s3, d, in_f16), e));
        KDAI_(write_state)(s0, d, in_f16, x0);
        KDAI_(write_state)(s1, d, in_f16, x1);
        KDAI_(write_state)(s2, d, in_f16, x2);
        KDAI_(write_state)(s3, d, in_f16, x3);
    }
}

/* On a row of floats, rounded as an f16 state would be. */
KDAI_KERNEL void KDAI_(update)(const float *decay, const float *k, float u, size_t n, int in_f16,
                               float *s) {
    KDAI_WIDE wide = KDAI_(set)(u);
    for (size_t d = 0; d < n; d += KDAI_LANES) {
        KDAI_WIDE x = KDAI_(mul)(KDAI_(read)(s + d), KDAI_(read)(decay + d));
        x = KDAI_(fma)(KDAI_(read)(k + d), wide, x);
        KDAI_(write)(s + d, in_f16 ? KDAI_(round_f16)(x) : x);
    }
}

/* kdai_recurrent, four rows at a time, each token through them in turn. */
KDAI_KERNEL_INLINE void KDAI_(recurrent_rows)(const kdai_work *work, size_t n_tokens, int in_f16,
                                              unsigned char *s, size_t row_bytes, size_t rows) {
    size_t n = work->stride;
    for (size_t first = 0; first < rows; first += 4) {
        size_t row[4];
        void *at[4];
        for (size_t r = 0; r < 4; r++) { /* past the last row: that row again, to the same effect */
            row[r] = first + r < rows ? first + r : rows - 1;
            at[r] = s + row[r] * row_bytes;
        }
        for (size_t i = 0; i < n_tokens; i++) {
            const float *v = kdai_value_row(work, i);
            float *u = work->u + i * KDAI_ROWS, *o = kdai_output_row(work, i), sums[8], write[4];
            KDAI_(read_rows)(work->k_seen + i * n, work->q_seen + i * n, n, in_f16, i == 0, at,
                             sums);
            for (size_t r = 0; r < 4; r++) write[r] = work->beta[i] * (v[row[r]] - sums[r]);
            for (size_t r = 0; r < 4; r++) {
                u[row[r]] = write[r];
                o[row[r]] = kdai_fma(work->kq[i], write[r], sums[4 + r]);
            }
            KDAI_(update_rows)(work->decay + i * n, work->k + i * n, n, in_f16, write, at);
            /* 0 times an infinite correction: padding that is there stays 0. */
            size_t size = in_f16 ? sizeof(uint16_t) : sizeof(float);
            for (size_t r = 0; work->dim != n && r < 4; r++)
                memset((unsigned char *)at[r] + work->dim * size, 0, (n - work->dim) * size);
        }
    }
}

KDAI_KERNEL void KDAI_(recurrent)(const kdai_work *work, size_t n_tokens, int in_f16, void *s,
                                  size_t s_stride, size_t rows) {
    unsigned char *bytes = (unsigned char *)s;
    if (in_f16)
        KDAI_(recurrent_rows)(work, n_tokens, 1, bytes, s_stride * sizeof(uint16_t), rows);
    else
        KDAI_(recurrent_rows)(work, n_tokens, 0, bytes, s_stride * sizeof(float), rows);
}

/* Rows j of A and P below the diagonal, two at a time, while left = D(j, i) k_j runs on. */
KDAI_KERNEL void KDAI_(chunk_scores)(kdai_work *work, size_t j, size_t n_tokens, float *left) {
    size_t n = work->stride;
    for (size_t i = j + 1; i < n_tokens; i += 2) {
        size_t next =
            i + 1 < n_tokens ? i + 1 : i; /* a last one goes with itself, not decayed on */
        const float *decay0 = work->decay + i * n, *decay1 = work->decay + next * n;
        const float *k0 = work->k + i * n, *k1 = work->k + next * n;
        const float *q0 = work->q + i * n, *q1 = work->q + next * n;
        KDAI_WIDE a0 = KDAI_(set)(0.0f), p0 = a0, a1 = a0, p1 = a0;
        float sums[4];
        for (size_t d = 0; d < n; d += KDAI_LANES) {
            KDAI_WIDE x = KDAI_(mul)(KDAI_(read)(left + d), KDAI_(read)(decay0 + d));
            a0 = KDAI_(fma)(KDAI_(read)(k0 + d), x, a0);
            p0 = KDAI_(fma)(KDAI_(read)(q0 + d), x, p0);
            if (next != i) x = KDAI_(mul)(x, KDAI_(read)(decay1 + d));
            a1 = KDAI_(fma)(KDAI_(read)(k1 + d), x, a1);
            p1 = KDAI_(fma)(KDAI_(read)(q1 + d), x, p1);
            KDAI_(write)(left + d, x);
        }
        KDAI_(sum4)(a0, p0, a1, p1, sums);
        work->A[i * KDA_CHUNK + j] = work->beta[i] * sums[0];
        work->P[i * KDA_CHUNK + j] = sums[1];
        work->A[next * KDA_CHUNK + j] = work->beta[next] * sums[2];
        work->P[next * KDA_CHUNK + j] = sums[3];
    }
}

KDAI_KERNEL void KDAI_(chunk_prepare)(kdai_work *work, size_t n_tokens) {
    size_t n = work->stride;
    for (size_t j = 0; j < n_tokens; j++) {
        memcpy(work->k_left + j * n, work->k + j * n, n * sizeof(float));
        work->P[j * KDA_CHUNK + j] = KDAI_(dot)(work->q + j * n, work->k + j * n, n);
        KDAI_(chunk_scores)(work, j, n_tokens, work->k_left + j * n);
    }
    for (size_t d = 0; d < n; d += KDAI_LANES) {
        KDAI_WIDE total = KDAI_(set)(1.0f);
        for (size_t i = 0; i < n_tokens; i++) {
            total = KDAI_(mul)(total, KDAI_(read)(work->decay + i * n + d));
            KDAI_(write)
            (work->k_seen + i * n + d, KDAI_(mul)(total, KDAI_(read)(work->k + i * n + d)));
            KDAI_(write)
            (work->q_seen + i * n + d, KDAI_(mul)(total, KDAI_(read)(work->q + i * n + d)));
        }
        KDAI_(write)(work->total + d, total);
    }
}

/* ---- Panels: the state of KDAI_BROAD * KDAI_LANES value channels as [dim_k][channels] ---- */

#define KDAI_PANEL (KDAI_BROAD * KDAI_LANES)
#if KDAI_BROAD == 2
#define KDAI_BOTH(x) x
#else
#define KDAI_BOTH(x)
#endif
#if KDAI_TALL == 8
#define KDAI_TALL_OF(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)
#else
#define KDAI_TALL_OF(X) X(0) X(1) X(2) X(3)
#endif
/* Per row r of a register block: two accumulators, or one; all of what follows is unrolled. */
#define KDAI_ZERO(r)                                                                               \
    KDAI_WIDE x##r = KDAI_(set)(0.0f);                                                             \
    KDAI_BOTH(KDAI_WIDE y##r = x##r;)
#define KDAI_MULTIPLY_ADD(r)                                                                       \
    factor = KDAI_(set)(at[(r) * step]);                                                           \
    x##r = KDAI_(fma)(factor, x, x##r);                                                            \
    KDAI_BOTH(y##r = KDAI_(fma)(factor, y, y##r);)
#define KDAI_PUT(r)                                                                                \
    KDAI_(write)(to + (r) * to_stride, x##r);                                                      \
    KDAI_BOTH(KDAI_(write)(to + (r) * to_stride + KDAI_LANES, y##r);)
#define KDAI_SCALED(r)                                                                             \
    factor = KDAI_(set)(total[r]);                                                                 \
    KDAI_WIDE x##r = KDAI_(mul)(factor, KDAI_(read)(to + (r) * to_stride));                        \
    KDAI_BOTH(KDAI_WIDE y##r = KDAI_(mul)(factor, KDAI_(read)(to + (r) * to_stride + KDAI_LANES));)
#define KDAI_ROUND(r)                                                                              \
    x##r = KDAI_(round_f16)(x##r);                                                                 \
    KDAI_BOTH(y##r = KDAI_(round_f16)(y##r);)

/* to[i] = sum over d of rows[i][d] panel[d], for whole register blocks of rows: rows past n_tokens
 * are scratch and come out as scratch. */
KDAI_KERNEL void KDAI_(panel_read)(const float *rows, size_t n_tokens, size_t dim, size_t step,
                                   const float *panel, float *to) {
    const size_t to_stride = KDAI_ROWS;
    for (size_t i = 0; i < n_tokens;
         i += KDAI_TALL, rows += KDAI_TALL * step, to += KDAI_TALL * to_stride) {
        KDAI_WIDE factor;
        KDAI_TALL_OF(KDAI_ZERO)
        for (size_t d = 0; d < dim; d++) {
            const float *at = rows + d;
            KDAI_WIDE x = KDAI_(read)(panel + d * KDAI_PANEL);
            KDAI_BOTH(KDAI_WIDE y = KDAI_(read)(panel + d * KDAI_PANEL + KDAI_LANES);)
            KDAI_TALL_OF(KDAI_MULTIPLY_ADD)
        }
        KDAI_TALL_OF(KDAI_PUT)
    }
}

/* Forward substitution: work->u holds S^T k_seen and becomes u. */
KDAI_KERNEL void KDAI_(panel_solve)(const kdai_work *work, size_t n_tokens) {
    for (size_t i = 0; i < n_tokens; i++) {
        float *u = work->u + i * KDAI_ROWS;
        const float *v = kdai_value_row(work, i), *A = work->A + i * KDA_CHUNK;
        KDAI_WIDE beta = KDAI_(set)(work->beta[i]), factor;
        KDAI_WIDE x = KDAI_(mul)(beta, KDAI_(sub)(KDAI_(read)(v), KDAI_(read)(u)));
        KDAI_BOTH(KDAI_WIDE y = KDAI_(mul)(beta, KDAI_(sub)(KDAI_(read)(v + KDAI_LANES),
                                                            KDAI_(read)(u + KDAI_LANES)));)
        KDAI_WIDE odd_x = KDAI_(set)(0.0f);
        KDAI_BOTH(KDAI_WIDE odd_y = odd_x;)
        for (size_t j = 0; j + 1 < i; j += 2) { /* two chains: each link waits for the one before */
            const float *past = work->u + j * KDAI_ROWS;
            factor = KDAI_(set)(A[j]);
            x = KDAI_(nfma)(factor, KDAI_(read)(past), x);
            KDAI_BOTH(y = KDAI_(nfma)(factor, KDAI_(read)(past + KDAI_LANES), y);)
            factor = KDAI_(set)(A[j + 1]);
            past += KDAI_ROWS;
            odd_x = KDAI_(nfma)(factor, KDAI_(read)(past), odd_x);
            KDAI_BOTH(odd_y = KDAI_(nfma)(factor, KDAI_(read)(past + KDAI_LANES), odd_y);)
        }
        if (i % 2 == 1) {
            const float *past = work->u + (i - 1) * KDAI_ROWS;
            factor = KDAI_(set)(A[i - 1]);
            odd_x = KDAI_(nfma)(factor, KDAI_(read)(past), odd_x);
            KDAI_BOTH(odd_y = KDAI_(nfma)(factor, KDAI_(read)(past + KDAI_LANES), odd_y);)
        }
        x = KDAI_(add)(x, odd_x);
        KDAI_BOTH(y = KDAI_(add)(y, odd_y);)
        KDAI_(write)(u, x);
        KDAI_BOTH(KDAI_(write)(u + KDAI_LANES, y);)
    }
}

/* o = S^T q_seen (in o_block) + P u. Row i reads u_j for j <= i only: what a later token holds, NaN
 * say, stays with it. */
KDAI_KERNEL void KDAI_(panel_output)(const kdai_work *work, size_t n_tokens) {
    for (size_t i = 0; i < n_tokens; i++) {
        const float *read = work->o_block + i * KDAI_ROWS, *P = work->P + i * KDA_CHUNK;
        float *o = kdai_output_row(work, i);
        KDAI_WIDE x = KDAI_(read)(read), factor;
        KDAI_BOTH(KDAI_WIDE y = KDAI_(read)(read + KDAI_LANES);)
        for (size_t j = 0; j <= i; j++) {
            const float *u = work->u + j * KDAI_ROWS;
            factor = KDAI_(set)(P[j]);
            x = KDAI_(fma)(factor, KDAI_(read)(u), x);
            KDAI_BOTH(y = KDAI_(fma)(factor, KDAI_(read)(u + KDAI_LANES), y);)
        }
        KDAI_(write)(o, x);
        KDAI_BOTH(KDAI_(write)(o + KDAI_LANES, y);)
    }
}

/* panel[d] = total[d] panel[d] + sum over j of k_left[j][d] u[j], by register blocks of d. */
KDAI_KERNEL void KDAI_(panel_write)(const kdai_work *work, size_t n_tokens, int in_f16,
                                    float *panel) {
    const size_t to_stride = KDAI_PANEL, step = 1;
    for (size_t d = 0; d < work->stride; d += KDAI_TALL) {
        float *to = panel + d * to_stride;
        const float *total = work->total + d;
        KDAI_WIDE factor;
        KDAI_TALL_OF(KDAI_SCALED)
        for (size_t j = 0; j < n_tokens; j++) {
            const float *at = work->k_left + j * work->stride + d, *u = work->u + j * KDAI_ROWS;
            KDAI_WIDE x = KDAI_(read)(u);
            KDAI_BOTH(KDAI_WIDE y = KDAI_(read)(u + KDAI_LANES);)
            KDAI_TALL_OF(KDAI_MULTIPLY_ADD)
        }
        if (in_f16) {
            KDAI_TALL_OF(KDAI_ROUND)
        }
        KDAI_TALL_OF(KDAI_PUT)
    }
}

KDAI_KERNEL void KDAI_(panel)(const kdai_work *work, size_t n_tokens, int in_f16, float *panel) {
    KDAI_(panel_read)(work->k_seen, n_tokens, work->stride, work->stride, panel, work->u);
    KDAI_(panel_read)(work->q_seen, n_tokens, work->stride, work->stride, panel, work->o_block);
    KDAI_(panel_solve)(work, n_tokens);
    KDAI_(panel_output)(work, n_tokens);
    KDAI_(panel_write)(work, n_tokens, in_f16, panel);
    memset(panel + work->dim * KDAI_PANEL, 0, /* as in recurrent_rows */
           (work->stride - work->dim) * KDAI_PANEL * sizeof(float));
}

static const kdai_kernels KDAI_(kernels) = {
    KDAI_ISA,
    KDAI_PANEL,
    KDAI_(to_floats),
    KDAI_(from_floats),
    KDAI_(token),
    KDAI_(log_decay_rows),
    KDAI_(l2_norm_rows),
    KDAI_(gated_norm_rows),
    KDAI_(conv_rows),
    KDAI_(update),
    KDAI_(recurrent),
    KDAI_(chunk_prepare),
    KDAI_(panel),
};

#undef KDAI_JOIN_
#undef KDAI_JOIN
#undef KDAI_
#undef KDAI_WIDE
#undef KDAI_TWO
#undef KDAI_TWO_OF_1
#undef KDAI_TWO_OF_2
#undef KDAI_TWO_OF_3
#undef KDAI_PANEL
#undef KDAI_BOTH
#undef KDAI_TALL_OF
#undef KDAI_ZERO
#undef KDAI_MULTIPLY_ADD
#undef KDAI_PUT
#undef KDAI_SCALED
#undef KDAI_ROUND
#endif /* KDAI_PASS */
