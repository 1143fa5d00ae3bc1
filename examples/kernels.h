/* kernels.h - the driver's inner loops, one set for each instruction set, chosen at run time.
 *
 * linear.h brings this in: its element types and scalar conversions are used here.
 *
 * The loops are written once, at the end of this file, in terms of a vector of the set's own width
 * and a dozen operations on it; the file includes itself once for each set. kda.h says which sets
 * the machine has (kda_isa_best), so that the driver and the two libraries agree.
 *
 * A SUM OVER k ELEMENTS has one shape in each set, whatever the other arguments are: it is cut into
 * spans; in a span, element i goes to lane i % lanes of one vector by a multiply-add (fused where the
 * set has it), elements past the end count as zero; lanes half the vector apart are added until one
 * is left; the spans are added in order.
 */
#if !defined(KERNELS_H)
#define KERNELS_H

#include "../kda.h" /* kda_isa */
#include "linear.h"

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* A matrix [rows][..] of some element type, or some rows and columns of a larger one. */
typedef struct kernels_matrix {
    linear_type type;
    const unsigned char *data; /* of the first row and column; little-endian, at any alignment */
    size_t row_bytes;          /* from row to row of data */

    /* Of quantised types, as linear.h lays them out for the whole matrix. */
    const unsigned char *scale, *zero; /* zero: null for none */
    linear_type scale_type;            /* not of MXFP4, whose scales are bytes */
    const signed char *table;          /* what the 16 codes of 4 bits stand for */
    unsigned char flip;                /* makes a code of 8 bits a signed byte by exclusive or */
    size_t group, groups;              /* elements of a group; groups of a row */
    size_t first_row, first_col;       /* of this part, in scale */
    size_t first_zero;                 /* the first row in zero */
} kernels_matrix;

/* One set. Every array of floats may have any alignment. */
typedef struct kernels {
    kda_isa isa;

    /* out[i] = element i of row 0, i < n. Of a quantised type groups and first_col are multiples of
     * LINEAR_BLOCK, or one group is a row: so in dots. */
    void (*expand)(const kernels_matrix *a, size_t n, float *out);

    /* c[i * c_i + j * c_j] = a_i . b_j over k elements, for rows i < m of a and j < n of b; `add`:
     * added to what is in c. b_j = b + j * b_stride. span: if quantised, of LINEAR_BLOCK,
     * and at most LINEAR_SPAN. */
    void (*dots)(const kernels_matrix *a, size_t m, const float *b, size_t b_stride, size_t n,
                 size_t k, size_t span, bool add, float *c, size_t c_i, size_t c_j);

    /* y_i = rescale[i] y_i + sum over j < n of p_i[j] v_j, for rows i < m; d channels, of which all
     * up to the next multiple of KERNELS_LANES_MOST are read and written. The sum runs in the order
     * of j and then joins y. rescale 0 forgets y, whatever it holds. */
    void (*mix)(const float *p, size_t p_stride, size_t m, const float *v, size_t v_stride,
                size_t n, size_t d, const float *rescale, float *y, size_t y_stride);

    /* One tile of an online softmax: scores become exp(score - max) and join max and sum. Returns
     * the factor that what was summed before takes, exp(old max - new max), 0 from a max of -inf on.
     * n >= 1; scores have room for a whole number of vectors. */
    float (*softmax)(float *scores, size_t n, float *max, float *sum);
} kernels;

/* Products of bf16 numbers in pairs, for processors that have them (AVX512-BF16): twice as fast as
 * float32, with the operands' rounding as the error. Lengths k and d are multiples of
 * LINEAR_BF16_STEP. */
typedef struct kernels_bf16 {
    /* c[i * c_i + j * c_j] = a_i . b_j for rows i < m of a, little-endian, and j < n of b. */
    void (*dots)(const unsigned char *a, size_t a_row_bytes, size_t m, const uint16_t *b,
                 size_t b_stride, size_t n, size_t k, float *c, size_t c_i, size_t c_j);
    /* Rows of v two by two: out[i / 2][channel][i % 2] = v_i[channel], for i < n; beside an odd last
     * row zeros. */
    void (*pair)(const unsigned char *v, size_t v_row_bytes, size_t n, size_t d, uint16_t *out);
    /* As mix of `kernels`, with v as pair leaves it and p rounded to bf16. */
    void (*mix)(const float *p, size_t p_stride, size_t m, const uint16_t *v, size_t n, size_t d,
                const float *rescale, float *y, size_t y_stride);
} kernels_bf16;

/* Null where `isa` or the processor has none. */
const kernels_bf16 *kernels_bf16_of(kda_isa isa);

#define KERNELS_LANES_MOST 16
#define KERNELS_TALL 4  /* rows of a register block */
#define KERNELS_LINE 64 /* bytes that memory hands over at a time */

/* The set of that name, or the best for KDA_ISA_AUTO and for one that is not there. */
static const kernels *kernels_of(kda_isa isa);

#define KERNELS_INLINE static inline __attribute__((always_inline))

KERNELS_INLINE kernels_matrix kernels_plain(linear_type type, const void *data, size_t row_bytes) {
    kernels_matrix a;
    memset(&a, 0, sizeof a);
    a.type = type, a.data = (const unsigned char *)data, a.row_bytes = row_bytes;
    return a;
}

/* Asks for a line of each of KERNELS_TALL rows, `ahead` bytes further on. With one column a matrix
 * comes from memory, and what a processor fetches by itself ends with a page, which is a row or two.
 * Addresses must be the matrix's own: looking for others costs a processor as much as reading. */
KERNELS_INLINE void kernelsi_fetch(const unsigned char *const *row, size_t ahead) {
    for (size_t r = 0; r < KERNELS_TALL; r++)
        __builtin_prefetch((const void *)((uintptr_t)row[r] + ahead), 0, 2);
}

/* How the codes of a quantised type become numbers. A constant where speed counts. */
typedef enum kernelsi_how {
    KERNELSI_HALVES, /* 4 bits, looked up in a table that knows of the zero */
    KERNELSI_INT8,   /* 8 bits, without zeros */
    KERNELSI_UINT8,
    KERNELSI_BYTES /* 8 bits, signed or not, with zeros or not */
} kernelsi_how;

/* Scales of a row of this part, of n groups of the whole matrix from `group` on, for codes as `table`
 * and `flip` read them. */
KERNELS_INLINE void kernelsi_scales(const kernels_matrix *a, size_t row, size_t group, size_t n,
                                    float *out) {
    size_t at = (a->first_row + row) * a->groups + group;
    const unsigned char *bytes = a->scale + at, *halves = a->scale + 2 * at;
    if (a->type == LINEAR_MXFP4)
        for (size_t i = 0; i < n; i++) out[i] = 0.5f * lineari_e8m0(bytes[i]);
    else if (a->scale_type == LINEAR_BF16)
        for (size_t i = 0; i < n; i++) out[i] = linear_from_bf16(st_load_u16(halves + 2 * i));
    else if (a->scale_type == LINEAR_F16)
        for (size_t i = 0; i < n; i++) out[i] = linear_from_f16(st_load_u16(halves + 2 * i));
    else
        for (size_t i = 0; i < n; i++) out[i] = st_load_f32(a->scale + 4 * (at + i));
}

/* And a zero. */
KERNELS_INLINE float kernelsi_zero(const kernels_matrix *a, size_t row, size_t group) {
    size_t at = a->first_zero + row;
    if (!a->zero) return 0;
    if (a->type == LINEAR_INT8) return (float)(signed char)a->zero[at * a->groups + group];
    if (a->type == LINEAR_UINT8)
        return (float)a->zero[4 * (at / 4 * a->groups + group) + at % 4] - 128.0f;
    unsigned both = a->zero[4 * (at / 8 * a->groups + group) + at % 8 / 2];
    return (float)(both >> 4 * (at % 2) & 15u) - 8.0f;
}

/* ---- Vectors of plain C: four floats, which compilers turn into what the target has ---- */

typedef struct kernels_vec_scalar {
    float x[4];
} kernels_vec_scalar;
#define KERNELS_EACH4 for (int i = 0; i < 4; i++)

KERNELS_INLINE kernels_vec_scalar kernels_set_scalar(float x) {
    kernels_vec_scalar y = {{x, x, x, x}};
    return y;
}
KERNELS_INLINE kernels_vec_scalar kernels_read_scalar(const float *x) {
    kernels_vec_scalar y;
    memcpy(&y, x, sizeof y);
    return y;
}
KERNELS_INLINE void kernels_write_scalar(float *to, kernels_vec_scalar x) {
    memcpy(to, &x, sizeof x);
}
KERNELS_INLINE kernels_vec_scalar kernels_add_scalar(kernels_vec_scalar x, kernels_vec_scalar y) {
    KERNELS_EACH4 x.x[i] += y.x[i];
    return x;
}
KERNELS_INLINE kernels_vec_scalar kernels_mul_scalar(kernels_vec_scalar x, kernels_vec_scalar y) {
    KERNELS_EACH4 x.x[i] *= y.x[i];
    return x;
}
KERNELS_INLINE kernels_vec_scalar kernels_fma_scalar(kernels_vec_scalar x, kernels_vec_scalar y,
                                                     kernels_vec_scalar z) {
    KERNELS_EACH4 z.x[i] += x.x[i] * y.x[i];
    return z;
}
KERNELS_INLINE float kernels_sum_scalar(kernels_vec_scalar x) {
    return (x.x[0] + x.x[2]) + (x.x[1] + x.x[3]);
}
KERNELS_INLINE void kernels_sum4_scalar(const kernels_vec_scalar x[4], float sums[4]) {
    KERNELS_EACH4 sums[i] = kernels_sum_scalar(x[i]);
}
KERNELS_INLINE kernels_vec_scalar kernels_max_scalar(kernels_vec_scalar x, kernels_vec_scalar y) {
    KERNELS_EACH4 y.x[i] = x.x[i] > y.x[i] ? x.x[i] : y.x[i];
    return y;
}
/* 2^n p for whole n from -126 to 127, p near 1. */
KERNELS_INLINE kernels_vec_scalar kernels_scale_scalar(kernels_vec_scalar p, kernels_vec_scalar n) {
    KERNELS_EACH4 p.x[i] = n.x[i] == n.x[i] ? ldexpf(p.x[i], (int)n.x[i]) : n.x[i];
    return p;
}
KERNELS_INLINE kernels_vec_scalar kernels_read_f32_scalar(const unsigned char *x) {
    kernels_vec_scalar y;
    KERNELS_EACH4 y.x[i] = st_load_f32(x + 4 * i);
    return y;
}
KERNELS_INLINE kernels_vec_scalar kernels_read_f16_scalar(const unsigned char *x) {
    kernels_vec_scalar y;
    KERNELS_EACH4 y.x[i] = linear_from_f16(st_load_u16(x + 2 * i));
    return y;
}
KERNELS_INLINE kernels_vec_scalar kernels_read_bf16_scalar(const unsigned char *x) {
    kernels_vec_scalar y;
    KERNELS_EACH4 y.x[i] = linear_from_bf16(st_load_u16(x + 2 * i));
    return y;
}
/* A table of bytes with a zero taken from each. */
KERNELS_INLINE void kernels_shift_table_scalar(const signed char *table, int zero,
                                               signed char *out) {
    for (int i = 0; i < 16; i++) out[i] = (signed char)(table[i] - zero);
}
/* The halves of a block of codes in order, looked up. */
KERNELS_INLINE void kernels_look_up_scalar(const signed char *table, const unsigned char *x,
                                           unsigned char *out) {
    for (size_t i = 0; i < LINEAR_BLOCK; i++)
        out[i] = (unsigned char)table[(unsigned)x[i / 2] >> 4 * (i % 2) & 15u];
}
/* A vector of signed bytes, which `flip` makes of x by exclusive or. */
KERNELS_INLINE kernels_vec_scalar kernels_read_bytes_scalar(unsigned char flip,
                                                            const unsigned char *x) {
    kernels_vec_scalar y;
    KERNELS_EACH4 y.x[i] = (float)(signed char)(x[i] ^ flip);
    return y;
}

/* ---- x86 ---- */

#if !defined(KDA_NO_SIMD) && defined(__x86_64__)
#define KERNELS_X86 1
#include <immintrin.h>

#define KERNELS_AVX2_TARGET __attribute__((target("avx2,fma,f16c")))
#define KERNELS_AVX2 KERNELS_INLINE KERNELS_AVX2_TARGET
typedef __m256 kernels_vec_avx2;

KERNELS_AVX2 __m256 kernels_set_avx2(float x) {
    return _mm256_set1_ps(x);
}
KERNELS_AVX2 __m256 kernels_read_avx2(const float *x) {
    return _mm256_loadu_ps(x);
}
KERNELS_AVX2 void kernels_write_avx2(float *to, __m256 x) {
    _mm256_storeu_ps(to, x);
}
KERNELS_AVX2 __m256 kernels_add_avx2(__m256 x, __m256 y) {
    return _mm256_add_ps(x, y);
}
KERNELS_AVX2 __m256 kernels_mul_avx2(__m256 x, __m256 y) {
    return _mm256_mul_ps(x, y);
}
KERNELS_AVX2 __m256 kernels_fma_avx2(__m256 x, __m256 y, __m256 z) {
    return _mm256_fmadd_ps(x, y, z);
}
KERNELS_AVX2 float kernels_sum_avx2(__m256 x) {
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}
/* The sums of four vectors. */
KERNELS_AVX2 void kernels_sum4_avx2(const __m256 x[4], float sums[4]) {
    __m256 ac_low = _mm256_permute2f128_ps(x[0], x[2], 0x20);
    __m256 ac = _mm256_add_ps(ac_low, _mm256_permute2f128_ps(x[0], x[2], 0x31));
    __m256 bd_low = _mm256_permute2f128_ps(x[1], x[3], 0x20);
    __m256 bd = _mm256_add_ps(bd_low, _mm256_permute2f128_ps(x[1], x[3], 0x31));
    /* Each half: lanes 0 and 1 of one vector, then of the other. */
    __m256 pairs = _mm256_add_ps(_mm256_shuffle_ps(ac, bd, 0x44), _mm256_shuffle_ps(ac, bd, 0xee));
    __m256 both = _mm256_add_ps(pairs, _mm256_movehdup_ps(pairs));
    __m128 ab = _mm256_castps256_ps128(both), cd = _mm256_extractf128_ps(both, 1);
    _mm_storeu_ps(sums, _mm_shuffle_ps(ab, cd, _MM_SHUFFLE(2, 0, 2, 0)));
}
KERNELS_AVX2 __m256 kernels_scale_avx2(__m256 p, __m256 n) {
    __m256i bits = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), bits));
}
KERNELS_AVX2 __m256 kernels_max_avx2(__m256 x, __m256 y) { /* y where either is NaN */
    return _mm256_max_ps(x, y);
}
KERNELS_AVX2 __m256 kernels_read_f32_avx2(const unsigned char *x) {
    return _mm256_loadu_ps((const float *)(const void *)x);
}
KERNELS_AVX2 __m256 kernels_read_f16_avx2(const unsigned char *x) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)x));
}
/* Each number goes to the upper half of its lane: one shuffle, where widening and shifting are two. */
KERNELS_AVX2 __m256 kernels_read_bf16_avx2(const unsigned char *x) {
    const __m256i to = _mm256_setr_epi8(-1, -1, 0, 1, -1, -1, 2, 3, -1, -1, 4, 5, -1, -1, 6, 7, -1,
                                        -1, 8, 9, -1, -1, 10, 11, -1, -1, 12, 13, -1, -1, 14, 15);
    __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)x));
    return _mm256_castsi256_ps(_mm256_shuffle_epi8(twice, to));
}
KERNELS_AVX2 __m128i kernelsi_read_16(const void *x) {
    return _mm_loadu_si128((const __m128i *)x);
}

KERNELS_AVX2 void kernels_shift_table_avx2(const signed char *table, int zero, signed char *out) {
    __m128i shifted = _mm_sub_epi8(kernelsi_read_16(table), _mm_set1_epi8((char)zero));
    _mm_storeu_si128((__m128i *)(void *)out, shifted);
}
KERNELS_AVX2 void kernels_look_up_avx2(const signed char *table, const unsigned char *x,
                                       unsigned char *out) {
    __m128i pairs = kernelsi_read_16(x), mask = _mm_set1_epi8(15), of = kernelsi_read_16(table);
    __m128i even = _mm_shuffle_epi8(of, _mm_and_si128(pairs, mask));
    __m128i odd = _mm_shuffle_epi8(of, _mm_and_si128(_mm_srli_epi16(pairs, 4), mask));
    _mm_storeu_si128((__m128i *)(void *)out, _mm_unpacklo_epi8(even, odd));
    _mm_storeu_si128((__m128i *)(void *)(out + 16), _mm_unpackhi_epi8(even, odd));
    /* Widening from memory is one operation; compilers would keep the bytes and move them about. */
    __asm__("" : "+m"(*(unsigned char(*)[LINEAR_BLOCK])out));
}
KERNELS_AVX2 __m256 kernels_read_bytes_avx2(unsigned char flip, const unsigned char *x) {
    __m128i eight = _mm_loadl_epi64((const __m128i *)(const void *)x);
    eight = _mm_xor_si128(eight, _mm_set1_epi8((char)flip));
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight));
}
#else
#define KERNELS_X86 0
#endif

#if KERNELS_X86 && !defined(KDA_NO_AVX512)
#define KERNELS_HAVE_AVX512 1
#define KERNELS_AVX512_TARGET __attribute__((target("avx512f,avx2,fma,f16c")))
#define KERNELS_AVX512 KERNELS_INLINE KERNELS_AVX512_TARGET
typedef __m512 kernels_vec_avx512;

KERNELS_AVX512 __m512 kernels_set_avx512(float x) {
    return _mm512_set1_ps(x);
}
KERNELS_AVX512 __m512 kernels_read_avx512(const float *x) {
    return _mm512_loadu_ps(x);
}
KERNELS_AVX512 void kernels_write_avx512(float *to, __m512 x) {
    _mm512_storeu_ps(to, x);
}
KERNELS_AVX512 __m512 kernels_add_avx512(__m512 x, __m512 y) {
    return _mm512_add_ps(x, y);
}
KERNELS_AVX512 __m512 kernels_mul_avx512(__m512 x, __m512 y) {
    return _mm512_mul_ps(x, y);
}
KERNELS_AVX512 __m512 kernels_fma_avx512(__m512 x, __m512 y, __m512 z) {
    return _mm512_fmadd_ps(x, y, z);
}
KERNELS_AVX512 float kernels_sum_avx512(__m512 x) {
    __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1));
    return kernels_sum_avx2(_mm256_add_ps(_mm512_castps512_ps256(x), high));
}
KERNELS_AVX512 void kernels_sum4_avx512(const __m512 x[4], float sums[4]) {
    __m256 half[4];
    for (int i = 0; i < 4; i++)
        half[i] =
            _mm256_add_ps(_mm512_castps512_ps256(x[i]),
                          _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x[i]), 1)));
    kernels_sum4_avx2(half, sums);
}
KERNELS_AVX512 __m512 kernels_scale_avx512(__m512 p, __m512 n) {
    return _mm512_scalef_ps(p, n);
}
KERNELS_AVX512 __m512 kernels_max_avx512(__m512 x, __m512 y) {
    return _mm512_max_ps(x, y);
}
KERNELS_AVX512 __m512 kernels_read_f32_avx512(const unsigned char *x) {
    return _mm512_loadu_ps(x);
}
KERNELS_AVX512 __m512 kernels_read_f16_avx512(const unsigned char *x) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)x));
}
KERNELS_AVX512 __m512 kernels_read_bf16_avx512(const unsigned char *x) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)x));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
KERNELS_AVX512 __m512 kernels_read_bytes_avx512(unsigned char flip, const unsigned char *x) {
    __m128i bytes = _mm_xor_si128(kernelsi_read_16(x), _mm_set1_epi8((char)flip));
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}
/* Vector v of the halves of a block, looked up. */
KERNELS_AVX512 __m512 kernels_read_halves_avx512(__m512 table, const unsigned char *x, size_t v) {
    const __m512i from = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    const __m512i shift =
        _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    __m512i bytes = _mm512_broadcast_i32x4(kernelsi_read_16(x));
    bytes = _mm512_permutexvar_epi32(_mm512_add_epi32(from, _mm512_set1_epi32(2 * (int)v)), bytes);
    /* Of an index the lowest four bits count. */
    return _mm512_permutexvar_ps(_mm512_srlv_epi32(bytes, shift), table);
}
#else
#define KERNELS_HAVE_AVX512 0
#endif

/* ---- NEON ---- */

#if !defined(KDA_NO_SIMD) && defined(__aarch64__) && defined(__ARM_NEON)
#define KERNELS_NEON 1
#include <arm_neon.h>
typedef float32x4_t kernels_vec_neon;

KERNELS_INLINE float32x4_t kernels_set_neon(float x) {
    return vdupq_n_f32(x);
}
KERNELS_INLINE float32x4_t kernels_read_neon(const float *x) {
    return vld1q_f32(x);
}
KERNELS_INLINE void kernels_write_neon(float *to, float32x4_t x) {
    vst1q_f32(to, x);
}
KERNELS_INLINE float32x4_t kernels_add_neon(float32x4_t x, float32x4_t y) {
    return vaddq_f32(x, y);
}
KERNELS_INLINE float32x4_t kernels_mul_neon(float32x4_t x, float32x4_t y) {
    return vmulq_f32(x, y);
}
KERNELS_INLINE float32x4_t kernels_fma_neon(float32x4_t x, float32x4_t y, float32x4_t z) {
    return vfmaq_f32(z, x, y);
}
KERNELS_INLINE float kernels_sum_neon(float32x4_t x) {
    float32x2_t y = vadd_f32(vget_low_f32(x), vget_high_f32(x));
    return vget_lane_f32(vpadd_f32(y, y), 0);
}
KERNELS_INLINE void kernels_sum4_neon(const float32x4_t x[4], float sums[4]) {
    for (int i = 0; i < 4; i++) sums[i] = kernels_sum_neon(x[i]);
}
KERNELS_INLINE float32x4_t kernels_scale_neon(float32x4_t p, float32x4_t n) {
    int32x4_t bits = vshlq_n_s32(vcvtnq_s32_f32(n), 23);
    return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(p), bits));
}
KERNELS_INLINE float32x4_t kernels_max_neon(float32x4_t x, float32x4_t y) {
    return vmaxq_f32(x, y);
}
KERNELS_INLINE float32x4_t kernels_read_f32_neon(const unsigned char *x) {
    return vreinterpretq_f32_u8(vld1q_u8(x));
}
KERNELS_INLINE float32x4_t kernels_read_f16_neon(const unsigned char *x) {
    return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(x)));
}
KERNELS_INLINE float32x4_t kernels_read_bf16_neon(const unsigned char *x) {
    uint16x4_t half = vreinterpret_u16_u8(vld1_u8(x));
    return vreinterpretq_f32_u32(vshll_n_u16(half, 16));
}
KERNELS_INLINE void kernels_shift_table_neon(const signed char *table, int zero, signed char *out) {
    vst1q_s8(out, vsubq_s8(vld1q_s8(table), vdupq_n_s8((signed char)zero)));
}
KERNELS_INLINE void kernels_look_up_neon(const signed char *table, const unsigned char *x,
                                         unsigned char *out) {
    uint8x16_t pairs = vld1q_u8(x), of = vreinterpretq_u8_s8(vld1q_s8(table));
    uint8x16_t even = vqtbl1q_u8(of, vandq_u8(pairs, vdupq_n_u8(15)));
    uint8x16_t odd = vqtbl1q_u8(of, vshrq_n_u8(pairs, 4));
    vst1q_u8(out, vzip1q_u8(even, odd)), vst1q_u8(out + 16, vzip2q_u8(even, odd));
}
KERNELS_INLINE float32x4_t kernels_read_bytes_neon(unsigned char flip, const unsigned char *x) {
    uint32_t four;
    memcpy(&four, x, sizeof four);
    uint8x8_t bytes = veor_u8(vreinterpret_u8_u32(vdup_n_u32(four)), vdup_n_u8(flip));
    int16x8_t wide = vmovl_s8(vreinterpret_s8_u8(bytes));
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
}
#else
#define KERNELS_NEON 0
#endif

/* ---- The sets ---- */

#define KERNELS_PASS scalar
#define KERNELS_UNROLL _Pragma("GCC unroll 1")
#define KERNELS_ISA KDA_ISA_SCALAR
#define KERNELS_LANES 4
#define KERNELS_KERNEL static
#define KERNELS_KERNEL_INLINE KERNELS_INLINE
#define KERNELS_WIDE 2
#include "kernels.h"
#if KERNELS_X86
#define KERNELS_PASS avx2
#define KERNELS_UNROLL _Pragma("GCC unroll 8")
#define KERNELS_ISA KDA_ISA_AVX2
#define KERNELS_LANES 8
#define KERNELS_KERNEL static KERNELS_AVX2_TARGET
#define KERNELS_KERNEL_INLINE KERNELS_AVX2
#define KERNELS_WIDE 3
#include "kernels.h"
#endif
#if KERNELS_HAVE_AVX512
#define KERNELS_PASS avx512
#define KERNELS_UNROLL _Pragma("GCC unroll 8")
#define KERNELS_ISA KDA_ISA_AVX512
#define KERNELS_LANES 16
#define KERNELS_HAS_TABLES
#define KERNELS_KERNEL static KERNELS_AVX512_TARGET
#define KERNELS_KERNEL_INLINE KERNELS_AVX512
#define KERNELS_WIDE 6
#include "kernels.h"
#endif
#if KERNELS_NEON
#define KERNELS_PASS neon
#define KERNELS_UNROLL _Pragma("GCC unroll 8")
#define KERNELS_ISA KDA_ISA_NEON
#define KERNELS_LANES 4
#define KERNELS_KERNEL static
#define KERNELS_KERNEL_INLINE KERNELS_INLINE
#define KERNELS_WIDE 6
#include "kernels.h"
#endif

static const kernels *kernels_of(kda_isa isa) {
    if (isa == KDA_ISA_AUTO || !kda_isa_is_available(isa)) isa = kda_isa_best();
    (void)isa; /* with none but plain C */
#if KERNELS_HAVE_AVX512
    if (isa == KDA_ISA_AVX512) return &kernels_set_of_avx512;
#endif
#if KERNELS_X86
    if (isa == KDA_ISA_AVX2) return &kernels_set_of_avx2;
#endif
#if KERNELS_NEON
    if (isa == KDA_ISA_NEON) return &kernels_set_of_neon;
#endif
    return &kernels_set_of_scalar;
}

/* ---- Pairs of bf16 ---- */

#if KERNELS_HAVE_AVX512 && (defined(__clang__) || __GNUC__ >= 11)
#define KERNELS_BF16_TARGET __attribute__((target("avx512f,avx512bw,avx512bf16,avx2,fma,f16c")))
#define KERNELS_BF16 KERNELS_INLINE KERNELS_BF16_TARGET

KERNELS_BF16 __m512bh kernelsi_bf16_read(const void *x) {
    return (__m512bh)_mm512_loadu_si512(x);
}

/* KERNELS_TALL rows against `wide` columns, a constant of at most 6. */
KERNELS_BF16 void kernelsi_bf16_dots_block(const unsigned char *const *row, const uint16_t *b,
                                           size_t b_stride, size_t wide, size_t k,
                                           float sum[6][KERNELS_TALL]) {
    __m512 acc[6][KERNELS_TALL];
    __m512bh column[6];
#pragma GCC unroll 8
    for (size_t j = 0; j < wide; j++)
#pragma GCC unroll 8
        for (size_t r = 0; r < KERNELS_TALL; r++) acc[j][r] = _mm512_setzero_ps();
    for (size_t i = 0; i < k; i += LINEAR_BF16_STEP) {
#pragma GCC unroll 8
        for (size_t j = 0; j < wide; j++) column[j] = kernelsi_bf16_read(b + j * b_stride + i);
#pragma GCC unroll 8
        for (size_t r = 0; r < KERNELS_TALL; r++) {
            __m512bh a = kernelsi_bf16_read(row[r] + 2 * i);
#pragma GCC unroll 8
            for (size_t j = 0; j < wide; j++) acc[j][r] = _mm512_dpbf16_ps(acc[j][r], a, column[j]);
        }
    }
#pragma GCC unroll 8
    for (size_t j = 0; j < wide; j++) kernels_sum4_avx512(acc[j], sum[j]);
}

KERNELS_BF16 void kernelsi_bf16_dots_columns(const unsigned char *a, size_t a_row_bytes, size_t m,
                                             const uint16_t *b, size_t b_stride, size_t wide,
                                             size_t k, float *c, size_t c_i, size_t c_j) {
    for (size_t first = 0; first < m; first += KERNELS_TALL) {
        const unsigned char *row[KERNELS_TALL];
        float sum[6][KERNELS_TALL];
        size_t count = m - first < KERNELS_TALL ? m - first : KERNELS_TALL;
        for (size_t r = 0; r < KERNELS_TALL; r++)
            row[r] = a + (first + (r < count ? r : count - 1)) * a_row_bytes;
        kernelsi_bf16_dots_block(row, b, b_stride, wide, k, sum);
        for (size_t j = 0; j < wide; j++)
            for (size_t r = 0; r < count; r++) c[(first + r) * c_i + j * c_j] = sum[j][r];
    }
}

static KERNELS_BF16_TARGET void kernelsi_bf16_dots(const unsigned char *a, size_t a_row_bytes,
                                                   size_t m, const uint16_t *b, size_t b_stride,
                                                   size_t n, size_t k, float *c, size_t c_i,
                                                   size_t c_j) {
    size_t j = 0;
    for (; j + 6 <= n; j += 6)
        kernelsi_bf16_dots_columns(a, a_row_bytes, m, b + j * b_stride, b_stride, 6, k, c + j * c_j,
                                   c_i, c_j);
    for (; j + 2 <= n; j += 2)
        kernelsi_bf16_dots_columns(a, a_row_bytes, m, b + j * b_stride, b_stride, 2, k, c + j * c_j,
                                   c_i, c_j);
    if (j < n)
        kernelsi_bf16_dots_columns(a, a_row_bytes, m, b + j * b_stride, b_stride, 1, k, c + j * c_j,
                                   c_i, c_j);
}

static KERNELS_BF16_TARGET void kernelsi_bf16_pair(const unsigned char *v, size_t v_row_bytes,
                                                   size_t n, size_t d, uint16_t *out) {
    uint16_t low[32];
    for (size_t i = 0; i < 32; i++) low[i] = (uint16_t)(i / 2 + i % 2 * 32);
    __m512i first = _mm512_loadu_si512(low);
    __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
    for (size_t i = 0; i < n; i += 2)
        for (size_t c = 0; c < d; c += LINEAR_BF16_STEP, out += 2 * LINEAR_BF16_STEP) {
            const unsigned char *at = v + i * v_row_bytes + 2 * c;
            __m512i x = _mm512_loadu_si512(at), y = _mm512_setzero_si512();
            if (i + 1 < n) y = _mm512_loadu_si512(at + v_row_bytes);
            _mm512_storeu_si512(out, _mm512_permutex2var_epi16(x, first, y));
            _mm512_storeu_si512(out + LINEAR_BF16_STEP, _mm512_permutex2var_epi16(x, second, y));
        }
}

/* Four rows of weights, in pairs as bits, by 64 channels. */
KERNELS_BF16 void kernelsi_bf16_mix_block(const uint32_t (*p)[KERNELS_TALL], size_t count,
                                          const uint16_t *v, size_t n_pairs, size_t d, size_t wide,
                                          const float *rescale, float *y, size_t y_stride) {
    __m512 acc[KERNELS_TALL][4];
    __m512bh value[4];
#pragma GCC unroll 8
    for (size_t r = 0; r < KERNELS_TALL; r++)
#pragma GCC unroll 8
        for (size_t j = 0; j < wide; j++) acc[r][j] = _mm512_setzero_ps();
    for (size_t i = 0; i < n_pairs; i++, v += 2 * d) {
#pragma GCC unroll 8
        for (size_t j = 0; j < wide; j++) value[j] = kernelsi_bf16_read(v + j * LINEAR_BF16_STEP);
#pragma GCC unroll 8
        for (size_t r = 0; r < KERNELS_TALL; r++) {
            __m512bh weight = (__m512bh)_mm512_set1_epi32((int)p[i][r]);
#pragma GCC unroll 8
            for (size_t j = 0; j < wide; j++)
                acc[r][j] = _mm512_dpbf16_ps(acc[r][j], weight, value[j]);
        }
    }
    for (size_t r = 0; r < count; r++, y += y_stride)
        for (size_t j = 0; j < wide; j++) {
            __m512 sum = acc[r][j];
            if (rescale[r] != 0)
                sum = _mm512_fmadd_ps(_mm512_set1_ps(rescale[r]), _mm512_loadu_ps(y + j * 16), sum);
            _mm512_storeu_ps(y + j * 16, sum);
        }
}

#define KERNELSI_BF16_KEYS 64 /* of a call of mix */

static KERNELS_BF16_TARGET void kernelsi_bf16_mix(const float *p, size_t p_stride, size_t m,
                                                  const uint16_t *v, size_t n, size_t d,
                                                  const float *rescale, float *y, size_t y_stride) {
    uint32_t pairs[KERNELSI_BF16_KEYS / 2][KERNELS_TALL];
    size_t n_pairs = (n + 1) / 2;
    for (size_t first = 0; first < m; first += KERNELS_TALL) {
        size_t count = m - first < KERNELS_TALL ? m - first : KERNELS_TALL, c = 0;
        for (size_t r = 0; r < KERNELS_TALL; r++) {
            const float *row = p + (first + (r < count ? r : count - 1)) * p_stride;
            for (size_t i = 0; i < n; i += 2)
                pairs[i / 2][r] = linear_to_bf16(row[i]) |
                                  (i + 1 < n ? (uint32_t)linear_to_bf16(row[i + 1]) << 16 : 0);
        }
        for (; c + 64 <= d; c += 64)
            kernelsi_bf16_mix_block((const uint32_t(*)[KERNELS_TALL])pairs, count, v + 2 * c,
                                    n_pairs, d, 4, rescale + first, y + first * y_stride + c,
                                    y_stride);
        for (; c < d; c += 16)
            kernelsi_bf16_mix_block((const uint32_t(*)[KERNELS_TALL])pairs, count, v + 2 * c,
                                    n_pairs, d, 1, rescale + first, y + first * y_stride + c,
                                    y_stride);
    }
}

const kernels_bf16 *kernels_bf16_of(kda_isa isa) {
    static const kernels_bf16 set = {kernelsi_bf16_dots, kernelsi_bf16_pair, kernelsi_bf16_mix};
    if (kernels_of(isa)->isa != KDA_ISA_AVX512) return NULL;
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") ? &set : NULL;
}
#else
const kernels_bf16 *kernels_bf16_of(kda_isa isa) {
    (void)isa;
    return NULL;
}
#endif

#endif /* KERNELS_H */

/* ==== The loops ===============================================================================
 *
 * Compiled once for each set, from within the header above, with
 *     KERNELS_PASS          the suffix of its names
 *     KERNELS_LANES         floats of a vector
 *     KERNELS_HAS_TABLES    if a vector is a table that codes of 4 bits can index (read_halves)
 *     KERNELS_UNROLL        whether loops over codes are unrolled: of plain C they take compilers
 *                           longer than all else here
 *     KERNELS_WIDE          columns of a register block, beside KERNELS_TALL rows: as many as let
 *                           the sums, a column's operands and one more stay in registers */
#if defined(KERNELS_PASS)

#define KERNELS_JOIN_(a, b) kernels_##a##_##b
#define KERNELS_JOIN(a, b) KERNELS_JOIN_(a, b)
#define KERNELS_(name) KERNELS_JOIN(name, KERNELS_PASS)
#define KERNELS_VEC KERNELS_(vec)

/* One vector of a row of plain numbers, from element i on. */
KERNELS_KERNEL_INLINE KERNELS_VEC KERNELS_(load)(linear_type type, const unsigned char *row,
                                                 size_t i) {
    if (type == LINEAR_F32) return KERNELS_(read_f32)(row + 4 * i);
    if (type == LINEAR_F16) return KERNELS_(read_f16)(row + 2 * i);
    return KERNELS_(read_bf16)(row + 2 * i);
}

/* The same where fewer than a vector are left: zeros behind them. */
KERNELS_KERNEL_INLINE KERNELS_VEC KERNELS_(load_some)(linear_type type, const unsigned char *row,
                                                      size_t i, size_t n) {
    unsigned char padded[4 * KERNELS_LANES] = {0};
    size_t bytes = type == LINEAR_F32 ? 4 : 2;
    memcpy(padded, row + bytes * i, bytes * n);
    return KERNELS_(load)(type, padded, 0);
}

/* Vectors of a block of a quantised type. */
#define KERNELS_BLOCK (LINEAR_BLOCK / KERNELS_LANES)

/* What turns the codes of a row's group into numbers. */
typedef struct KERNELS_(group) {
    KERNELS_VEC scale, minus_zero;
#if defined(KERNELS_HAS_TABLES)
    KERNELS_VEC table; /* of numbers */
#else
    const signed char *table;
    signed char shifted[16]; /* which table points to if there is a zero */
#endif
} KERNELS_(group);
#define KERNELS_GROUP KERNELS_(group)

KERNELS_KERNEL_INLINE void KERNELS_(load_group)(KERNELS_GROUP *g, const kernels_matrix *a,
                                                kernelsi_how how, size_t row, size_t group,
                                                float scale) {
    g->scale = KERNELS_(set)(scale);
    if (how == KERNELSI_BYTES) g->minus_zero = KERNELS_(set)(-kernelsi_zero(a, row, group));
    if (how != KERNELSI_HALVES) return;
#if defined(KERNELS_HAS_TABLES)
    g->table = KERNELS_(read_bytes)(0, (const unsigned char *)a->table);
    if (a->zero) g->table = KERNELS_(add)(g->table, KERNELS_(set)(-kernelsi_zero(a, row, group)));
    g->table = KERNELS_(mul)(g->table, g->scale);
#else
    g->table = a->table;
    if (!a->zero) return;
    KERNELS_(shift_table)(a->table, (int)kernelsi_zero(a, row, group), g->shifted);
    g->table = g->shifted;
#endif
}

/* A block of codes where load_codes reads it: x, or what is made of it in `bytes`. */
KERNELS_KERNEL_INLINE const unsigned char *KERNELS_(ready)(kernelsi_how how, const KERNELS_GROUP *g,
                                                           const unsigned char *x,
                                                           unsigned char *bytes) {
#if !defined(KERNELS_HAS_TABLES)
    if (how == KERNELSI_HALVES) {
        KERNELS_(look_up)(g->table, x, bytes);
        return bytes;
    }
#endif
    (void)how, (void)g, (void)bytes;
    return x;
}

/* Vector v of a block that is ready: (code - zero) * scale. */
KERNELS_KERNEL_INLINE KERNELS_VEC KERNELS_(load_codes)(const kernels_matrix *a, kernelsi_how how,
                                                       const KERNELS_GROUP *g,
                                                       const unsigned char *x, size_t v) {
#if defined(KERNELS_HAS_TABLES)
    if (how == KERNELSI_HALVES) return KERNELS_(read_halves)(g->table, x, v);
#endif
    unsigned char flip = how == KERNELSI_BYTES ? a->flip : how == KERNELSI_UINT8 ? 0x80 : 0;
    KERNELS_VEC y = KERNELS_(read_bytes)(flip, x + v * KERNELS_LANES);
    if (how == KERNELSI_BYTES) y = KERNELS_(add)(y, g->minus_zero);
    return KERNELS_(mul)(y, g->scale);
}

/* Where the group of this column of `a` ends, at most n. */
KERNELS_KERNEL_INLINE size_t KERNELS_(group_end)(const kernels_matrix *a, size_t group, size_t n) {
    size_t end = (group + 1) * a->group - a->first_col;
    return end < n ? end : n;
}

KERNELS_KERNEL_INLINE KERNELS_VEC KERNELS_(read_some)(const float *x, size_t n) {
    float padded[KERNELS_LANES] = {0};
    memcpy(padded, x, n * sizeof *x);
    return KERNELS_(read)(padded);
}

/* ---- expand ---- */

KERNELS_KERNEL_INLINE void KERNELS_(expand_type)(linear_type type, const kernels_matrix *a,
                                                 size_t n, float *out) {
    size_t i = 0;
    for (; i + KERNELS_LANES <= n; i += KERNELS_LANES)
        KERNELS_(write)(out + i, KERNELS_(load)(type, a->data, i));
    if (i < n) {
        float rest[KERNELS_LANES];
        KERNELS_(write)(rest, KERNELS_(load_some)(type, a->data, i, n - i));
        memcpy(out + i, rest, (n - i) * sizeof *out);
    }
}

KERNELS_KERNEL_INLINE void KERNELS_(expand_codes)(const kernels_matrix *a, kernelsi_how how,
                                                  size_t n, float *out) {
    const unsigned bits = how == KERNELSI_HALVES ? 4 : 8;
    size_t group = a->first_col / a->group;
    for (size_t i = 0; i < n; group++) {
        KERNELS_GROUP g;
        float scale;
        kernelsi_scales(a, 0, group, 1, &scale);
        KERNELS_(load_group)(&g, a, how, 0, group, scale);
        size_t end = KERNELS_(group_end)(a, group, n);
        for (; i < end; i += LINEAR_BLOCK) {
            unsigned char codes[LINEAR_BLOCK] = {0}, bytes[LINEAR_BLOCK];
            float rest[LINEAR_BLOCK], *to = end - i < LINEAR_BLOCK ? rest : out + i;
            const unsigned char *x = a->data + i * bits / 8;
            if (to == rest) x = (unsigned char *)memcpy(codes, x, ((end - i) * bits + 7) / 8);
            x = KERNELS_(ready)(how, &g, x, bytes);
#pragma GCC unroll 8
            for (size_t v = 0; v < KERNELS_BLOCK; v++)
                KERNELS_(write)(to + v * KERNELS_LANES, KERNELS_(load_codes)(a, how, &g, x, v));
            if (to == rest) memcpy(out + i, rest, (end - i) * sizeof *out);
        }
        i = end;
    }
}

KERNELS_KERNEL void KERNELS_(expand)(const kernels_matrix *a, size_t n, float *out) {
    switch (a->type) {
    case LINEAR_F32: KERNELS_(expand_type)(LINEAR_F32, a, n, out); break;
    case LINEAR_F16: KERNELS_(expand_type)(LINEAR_F16, a, n, out); break;
    case LINEAR_BF16: KERNELS_(expand_type)(LINEAR_BF16, a, n, out); break;
    case LINEAR_MXFP4:
    case LINEAR_UINT4: KERNELS_(expand_codes)(a, KERNELSI_HALVES, n, out); break;
    case LINEAR_INT8:
    case LINEAR_UINT8: KERNELS_(expand_codes)(a, KERNELSI_BYTES, n, out); break;
    }
}

/* ---- dots ---- */

/* KERNELS_TALL rows against `wide` columns, at b + j * b_stride, over k elements. type and wide are
 * constants where this is inlined. sum[j][r] is the sum of row r and column j. ahead: bytes from a
 * row to the one that is next in its place. */
KERNELS_KERNEL_INLINE void KERNELS_(dots_block)(linear_type type, const unsigned char *const *row,
                                                size_t ahead, const float *b, size_t b_stride,
                                                size_t wide, size_t k,
                                                float sum[KERNELS_WIDE][KERNELS_TALL]) {
    const size_t line = type == LINEAR_F32 ? KERNELS_LINE / 4 : KERNELS_LINE / 2; /* elements */
    KERNELS_VEC acc[KERNELS_WIDE][KERNELS_TALL], column[KERNELS_WIDE];
    size_t i = 0;
#pragma GCC unroll 8
    for (size_t j = 0; j < wide; j++)
#pragma GCC unroll 8
        for (size_t r = 0; r < KERNELS_TALL; r++) acc[j][r] = KERNELS_(set)(0);
    for (; i + KERNELS_LANES <= k; i += KERNELS_LANES) {
#pragma GCC unroll 8
        for (size_t j = 0; j < wide; j++) column[j] = KERNELS_(read)(b + j * b_stride + i);
        if (wide == 1 && i % line == 0) kernelsi_fetch(row, i / line * KERNELS_LINE + ahead);
#pragma GCC unroll 8
        for (size_t r = 0; r < KERNELS_TALL; r++) {
            KERNELS_VEC a = KERNELS_(load)(type, row[r], i);
#pragma GCC unroll 8
            for (size_t j = 0; j < wide; j++) acc[j][r] = KERNELS_(fma)(a, column[j], acc[j][r]);
        }
    }
    if (i < k) {
#pragma GCC unroll 8
        for (size_t j = 0; j < wide; j++)
            column[j] = KERNELS_(read_some)(b + j * b_stride + i, k - i);
#pragma GCC unroll 8
        for (size_t r = 0; r < KERNELS_TALL; r++) {
            KERNELS_VEC a = KERNELS_(load_some)(type, row[r], i, k - i);
#pragma GCC unroll 8
            for (size_t j = 0; j < wide; j++) acc[j][r] = KERNELS_(fma)(a, column[j], acc[j][r]);
        }
    }
#pragma GCC unroll 8
    for (size_t j = 0; j < wide; j++) KERNELS_(sum4)(acc[j], sum[j]);
}

/* One block of codes of KERNELS_TALL rows times one of b joins the sums. Rows take turns, so that an
 * addition need not wait for the one before. */
KERNELS_KERNEL_INLINE void KERNELS_(codes_block)(const kernels_matrix *a, kernelsi_how how,
                                                 const unsigned char *const *row, size_t at,
                                                 const KERNELS_GROUP *g, const float *b,
                                                 KERNELS_VEC acc[KERNELS_TALL]) {
    unsigned char bytes[KERNELS_TALL][LINEAR_BLOCK];
    const unsigned char *x[KERNELS_TALL];
    KERNELS_UNROLL
    for (size_t r = 0; r < KERNELS_TALL; r++)
        x[r] = KERNELS_(ready)(how, &g[r], row[r] + at, bytes[r]);
    KERNELS_UNROLL
    for (size_t v = 0; v < KERNELS_BLOCK; v++) {
        KERNELS_VEC column = KERNELS_(read)(b + v * KERNELS_LANES);
        KERNELS_UNROLL
        for (size_t r = 0; r < KERNELS_TALL; r++)
            acc[r] = KERNELS_(fma)(KERNELS_(load_codes)(a, how, &g[r], x[r], v), column, acc[r]);
    }
}

/* The last block of rows, of n elements: zeros stand behind those of b. */
KERNELS_KERNEL_INLINE void KERNELS_(codes_rest)(const kernels_matrix *a, kernelsi_how how,
                                                const unsigned char *const *row, size_t at,
                                                const KERNELS_GROUP *g, const float *b, size_t n,
                                                KERNELS_VEC acc[KERNELS_TALL]) {
    unsigned char codes[KERNELS_TALL][LINEAR_BLOCK] = {{0}};
    float column[LINEAR_BLOCK] = {0};
    const unsigned char *padded[KERNELS_TALL];
    for (size_t r = 0; r < KERNELS_TALL; r++) {
        memcpy(codes[r], row[r] + at, how == KERNELSI_HALVES ? (n + 1) / 2 : n);
        padded[r] = codes[r];
    }
    memcpy(column, b, n * sizeof *b);
    KERNELS_(codes_block)(a, how, padded, 0, g, column, acc);
}

/* dots_block for a quantised type and one column: the rows at row[r], of index[r] in `a`, from
 * column col on. */
KERNELS_KERNEL_INLINE void KERNELS_(dots_codes)(const kernels_matrix *a, kernelsi_how how,
                                                const unsigned char *const *row,
                                                const size_t *index, size_t ahead, size_t col,
                                                const float *b, size_t k, float sum[KERNELS_TALL]) {
    KERNELS_VEC acc[KERNELS_TALL];
    KERNELS_GROUP g[KERNELS_TALL];
    const unsigned bits = how == KERNELSI_HALVES ? 4 : 8;
    float scales[KERNELS_TALL][LINEAR_SPAN / LINEAR_BLOCK + 1], *scale = scales[0];
    size_t group = (a->first_col + col) / a->group;
    size_t n_groups = (a->first_col + col + k - 1) / a->group + 1 - group;
    KERNELS_UNROLL
    for (size_t r = 0; r < KERNELS_TALL; r++) {
        acc[r] = KERNELS_(set)(0);
        kernelsi_scales(a, index[r], group, n_groups, scales[r]);
    }
    for (size_t i = 0; i < k; group++, scale++) {
        size_t end = KERNELS_(group_end)(a, group, col + k) - col;
        KERNELS_UNROLL
        for (size_t r = 0; r < KERNELS_TALL; r++) KERNELS_(load_group)
        (&g[r], a, how, index[r], group, scale[r * (sizeof scales[0] / sizeof *scale)]);
        for (; i + LINEAR_BLOCK <= end; i += LINEAR_BLOCK) {
            size_t at = i * bits / 8;
            if (at % KERNELS_LINE == 0) kernelsi_fetch(row, at + ahead);
            KERNELS_(codes_block)(a, how, row, at, g, b + i, acc);
        }
        if (i < end) KERNELS_(codes_rest)(a, how, row, i * bits / 8, g, b + i, end - i, acc);
        i = end;
    }
    KERNELS_(sum4)(acc, sum);
}

/* `count` rows of a from `first` on, at most KERNELS_TALL, against `wide` columns, a constant. Where
 * rows are missing the last one is repeated, and the sums of the repetitions are left. */
KERNELS_KERNEL_INLINE void KERNELS_(dots_spans)(const kernels_matrix *a, linear_type type,
                                                size_t first, size_t count, size_t ahead,
                                                const float *b, size_t b_stride, size_t wide,
                                                size_t k, size_t span, bool add, float *c,
                                                size_t c_i, size_t c_j) {
    float sum[KERNELS_WIDE][KERNELS_TALL];
    for (size_t col = 0; col < k; col += span, add = true) {
        const unsigned char *row[KERNELS_TALL];
        size_t index[KERNELS_TALL], width = k - col < span ? k - col : span;
        for (size_t r = 0; r < KERNELS_TALL; r++) {
            index[r] = first + (r < count ? r : count - 1);
            row[r] = a->data + index[r] * a->row_bytes + linear_row_bytes(type, col);
        }
#define KERNELS_CODES(how)                                                                         \
    KERNELS_(dots_codes)(a, how, row, index, ahead, col, b + col, width, sum[0])
        if (linear_is_plain(type)) {
            KERNELS_(dots_block)
            (type, row, ahead, b + col, b_stride, wide, width, sum);
        } else if (type == LINEAR_UINT4) {
            KERNELS_CODES(KERNELSI_HALVES);
        } else if (a->zero) {
            KERNELS_CODES(KERNELSI_BYTES);
        } else if (a->flip) {
            KERNELS_CODES(KERNELSI_UINT8);
        } else {
            KERNELS_CODES(KERNELSI_INT8);
        }
#undef KERNELS_CODES
        for (size_t j = 0; j < wide; j++)
            for (size_t r = 0; r < count; r++) {
                float *to = c + (first + r) * c_i + j * c_j;
                *to = add ? *to + sum[j][r] : sum[j][r];
            }
    }
}

/* The same for any number of columns. */
KERNELS_KERNEL_INLINE void KERNELS_(dots_columns)(const kernels_matrix *a, linear_type type,
                                                  size_t first, size_t count, size_t ahead,
                                                  const float *b, size_t b_stride, size_t n,
                                                  size_t k, size_t span, bool add, float *c,
                                                  size_t c_i, size_t c_j) {
    size_t j = 0;
#define KERNELS_COLUMNS(wide)                                                                      \
    KERNELS_(dots_spans)                                                                           \
    (a, type, first, count, ahead, b + j * b_stride, b_stride, wide, k, span, add, c + j * c_j,    \
     c_i, c_j)
    /* Codes take one at a time: linear.h has more than one from a tile of floats. */
    const size_t most = linear_is_plain(type) ? n : 0;
    for (; j + KERNELS_WIDE <= most; j += KERNELS_WIDE) KERNELS_COLUMNS(KERNELS_WIDE);
#if KERNELS_WIDE > 3
    for (; j + 2 <= most; j += 2) KERNELS_COLUMNS(2);
#endif
    for (; j < n; j++) KERNELS_COLUMNS(1);
#undef KERNELS_COLUMNS
}

/* Some blocks of columns stay in the first cache while all rows go by. */
KERNELS_KERNEL_INLINE void KERNELS_(dots_type)(const kernels_matrix *a, linear_type type, size_t m,
                                               const float *b, size_t b_stride, size_t n, size_t k,
                                               size_t span, bool add, float *c, size_t c_i,
                                               size_t c_j) {
    const size_t most = 2 * KERNELS_WIDE;
    for (size_t j = 0; j < n; j += most)
        for (size_t first = 0; first < m; first += KERNELS_TALL) {
            size_t left = m - first, count = left < KERNELS_TALL ? left : KERNELS_TALL;
            size_t ahead = left >= 2 * KERNELS_TALL ? KERNELS_TALL * a->row_bytes : 0;
            KERNELS_(dots_columns)
            (a, type, first, count, ahead, b + j * b_stride, b_stride, n - j < most ? n - j : most,
             k, span, add, c + j * c_j, c_i, c_j);
        }
}

KERNELS_KERNEL void KERNELS_(dots)(const kernels_matrix *a, size_t m, const float *b,
                                   size_t b_stride, size_t n, size_t k, size_t span, bool add,
                                   float *c, size_t c_i, size_t c_j) {
    switch (a->type) {
    case LINEAR_F32:
        KERNELS_(dots_type)(a, LINEAR_F32, m, b, b_stride, n, k, span, add, c, c_i, c_j);
        break;
    case LINEAR_F16:
        KERNELS_(dots_type)(a, LINEAR_F16, m, b, b_stride, n, k, span, add, c, c_i, c_j);
        break;
    case LINEAR_BF16:
        KERNELS_(dots_type)(a, LINEAR_BF16, m, b, b_stride, n, k, span, add, c, c_i, c_j);
        break;
    case LINEAR_MXFP4: /* UINT4 and INT8 stand for their widths */
    case LINEAR_UINT4:
        KERNELS_(dots_type)(a, LINEAR_UINT4, m, b, b_stride, n, k, span, add, c, c_i, c_j);
        break;
    case LINEAR_INT8:
    case LINEAR_UINT8:
        KERNELS_(dots_type)(a, LINEAR_INT8, m, b, b_stride, n, k, span, add, c, c_i, c_j);
        break;
    }
}

/* ---- mix ---- */

/* KERNELS_TALL rows of p, at p[r], by `wide` vectors of channels; the first `count` are stored. */
KERNELS_KERNEL_INLINE void KERNELS_(mix_block)(const float *const *p, size_t count, const float *v,
                                               size_t v_stride, size_t n, size_t wide,
                                               const float *rescale, float *y, size_t y_stride) {
    KERNELS_VEC acc[KERNELS_TALL][KERNELS_WIDE], value[KERNELS_WIDE];
#pragma GCC unroll 8
    for (size_t r = 0; r < KERNELS_TALL; r++)
#pragma GCC unroll 8
        for (size_t j = 0; j < wide; j++) acc[r][j] = KERNELS_(set)(0);
    for (size_t i = 0; i < n; i++) {
#pragma GCC unroll 8
        for (size_t j = 0; j < wide; j++)
            value[j] = KERNELS_(read)(v + i * v_stride + j * KERNELS_LANES);
#pragma GCC unroll 8
        for (size_t r = 0; r < KERNELS_TALL; r++) {
            KERNELS_VEC weight = KERNELS_(set)(p[r][i]);
#pragma GCC unroll 8
            for (size_t j = 0; j < wide; j++)
                acc[r][j] = KERNELS_(fma)(weight, value[j], acc[r][j]);
        }
    }
    for (size_t r = 0; r < count; r++, y += y_stride)
        for (size_t j = 0; j < wide; j++) {
            float *to = y + j * KERNELS_LANES;
            KERNELS_VEC sum = acc[r][j];
            if (rescale[r] != 0)
                sum = KERNELS_(fma)(KERNELS_(set)(rescale[r]), KERNELS_(read)(to), sum);
            KERNELS_(write)(to, sum);
        }
}

KERNELS_KERNEL_INLINE void KERNELS_(mix_columns)(const float *p, size_t p_stride, size_t m,
                                                 const float *v, size_t v_stride, size_t n,
                                                 size_t wide, const float *rescale, float *y,
                                                 size_t y_stride) {
    for (size_t first = 0; first < m; first += KERNELS_TALL) {
        const float *row[KERNELS_TALL];
        size_t count = m - first < KERNELS_TALL ? m - first : KERNELS_TALL;
        for (size_t r = 0; r < KERNELS_TALL; r++)
            row[r] = p + (first + (r < count ? r : count - 1)) * p_stride;
        KERNELS_(mix_block)
        (row, count, v, v_stride, n, wide, rescale + first, y + first * y_stride, y_stride);
    }
}

KERNELS_KERNEL void KERNELS_(mix)(const float *p, size_t p_stride, size_t m, const float *v,
                                  size_t v_stride, size_t n, size_t d, const float *rescale,
                                  float *y, size_t y_stride) {
    size_t vectors =
        (d + KERNELS_LANES_MOST - 1) / KERNELS_LANES_MOST * (KERNELS_LANES_MOST / KERNELS_LANES);
    for (; vectors >= KERNELS_WIDE; vectors -= KERNELS_WIDE) {
        KERNELS_(mix_columns)(p, p_stride, m, v, v_stride, n, KERNELS_WIDE, rescale, y, y_stride);
        v += KERNELS_WIDE * KERNELS_LANES, y += KERNELS_WIDE * KERNELS_LANES;
    }
    for (; vectors > 0; vectors--, v += KERNELS_LANES, y += KERNELS_LANES)
        KERNELS_(mix_columns)(p, p_stride, m, v, v_stride, n, 1, rescale, y, y_stride);
}

/* ---- softmax ---- */

/* exp(x) for x <= 0 in the way of kda_exp, but that below -87 (1.6e-38) it stays what it is there:
 * beside the row's largest weight so far, which is 1, nothing. NaN stays NaN. */
KERNELS_KERNEL_INLINE KERNELS_VEC KERNELS_(exp)(KERNELS_VEC x) {
    KERNELS_VEC magic = KERNELS_(set)(0x1.8p23f); /* leaves no bits for a fraction */
    x = KERNELS_(max)(KERNELS_(set)(-87.0f), x);
    KERNELS_VEC n = KERNELS_(fma)(x, KERNELS_(set)(0x1.715476p+0f), magic);
    n = KERNELS_(add)(n, KERNELS_(set)(-0x1.8p23f));
    KERNELS_VEC r = KERNELS_(fma)(n, KERNELS_(set)(-0x1.62e4p-1f), x);
    r = KERNELS_(fma)(n, KERNELS_(set)(-0x1.7f7d1cp-20f), r);
    KERNELS_VEC p = KERNELS_(set)(0x1.6d117cp-10f);
    p = KERNELS_(fma)(p, r, KERNELS_(set)(0x1.120be2p-7f));
    p = KERNELS_(fma)(p, r, KERNELS_(set)(0x1.555518p-5f));
    p = KERNELS_(fma)(p, r, KERNELS_(set)(0x1.5554dcp-3f));
    p = KERNELS_(fma)(p, r, KERNELS_(set)(0.5f));
    p = KERNELS_(fma)(KERNELS_(mul)(p, r), r, r);
    return KERNELS_(scale)(KERNELS_(add)(p, KERNELS_(set)(1.0f)), n);
}

KERNELS_KERNEL float KERNELS_(softmax)(float *scores, size_t n, float *max, float *sum) {
    KERNELS_VEC top = KERNELS_(set)(*max), total = KERNELS_(set)(0);
    size_t padded = (n + KERNELS_LANES - 1) / KERNELS_LANES * KERNELS_LANES;
    float lane[KERNELS_LANES], most = *max;
    for (size_t i = n; i < padded; i++) scores[i] = -HUGE_VALF;
    for (size_t i = 0; i < padded; i += KERNELS_LANES)
        top = KERNELS_(max)(KERNELS_(read)(scores + i), top);
    KERNELS_(write)(lane, top);
    for (size_t i = 0; i < KERNELS_LANES; i++)
        if (lane[i] > most) most = lane[i];
    for (size_t i = 0; i < padded; i += KERNELS_LANES) {
        KERNELS_VEC x = KERNELS_(add)(KERNELS_(read)(scores + i), KERNELS_(set)(-most));
        x = KERNELS_(exp)(x);
        total = KERNELS_(add)(total, x);
        KERNELS_(write)(scores + i, x);
    }
    KERNELS_(write)(lane, KERNELS_(exp)(KERNELS_(set)(*max - most)));
    float rescale = *max == -HUGE_VALF ? 0.0f : lane[0];
    *sum = *sum * rescale + KERNELS_(sum)(total);
    *max = most;
    return rescale;
}

static const kernels KERNELS_(set_of) = {
    KERNELS_ISA, KERNELS_(expand), KERNELS_(dots), KERNELS_(mix), KERNELS_(softmax),
};

#undef KERNELS_PASS
#undef KERNELS_ISA
#undef KERNELS_LANES
#undef KERNELS_HAS_TABLES
#undef KERNELS_KERNEL
#undef KERNELS_KERNEL_INLINE
#undef KERNELS_WIDE
#undef KERNELS_UNROLL
#undef KERNELS_JOIN_
#undef KERNELS_JOIN
#undef KERNELS_
#undef KERNELS_VEC
#undef KERNELS_BLOCK
#undef KERNELS_GROUP
#endif
