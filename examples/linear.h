/* linear.h - dense projections over weights in their file type, and the RMS norm before them.
 *
 * In one source file of a program (this also brings in the bodies of safetensors.h):
 *
 *     #define LINEAR_IMPLEMENTATION
 *     #include "linear.h"
 *
 * A `linear` is a view of a matrix [rows][cols] as a checkpoint stores it: little-endian, at any
 * alignment, usually in a mapped file. It is converted a few hundred elements at a time while it is
 * used and never as a whole. Conversions are exact, but for an MXFP4 value above what float holds,
 * which becomes infinite.
 *
 * A sum over n elements has one shape whatever the number of tokens in a call: LINEAR_LANES running
 * lanes, element i goes to lane i % LINEAR_LANES, then lanes half the number apart are added until
 * one is left. So a token's result does not depend on what else is in the call.
 *
 * Every function is static: this header is for programs of one source file.
 */
#ifndef LINEAR_H
#define LINEAR_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define LINEAR_API static __attribute__((unused)) /* a program need not call every function */
#else
#define LINEAR_API static
#endif

#define LINEAR_LANES 16

/* Elements that share one scale in MXFP4. */
#define LINEAR_MXFP4_GROUP 32

typedef enum linear_type { /* 0 is no type: an absent matrix */
                           LINEAR_F32 = 1,
                           LINEAR_F16 = 2,
                           LINEAR_BF16 = 3,
                           LINEAR_MXFP4 = 4
} linear_type;

typedef struct linear {
    linear_type type;
    size_t rows;                /* outputs */
    size_t cols;                /* inputs; MXFP4: a multiple of LINEAR_MXFP4_GROUP */
    const unsigned char *data;  /* [rows][cols]; MXFP4: [rows][cols / 2], element 2b in the low half
                                   of byte b and 2b + 1 in the high half */
    const unsigned char *scale; /* MXFP4: [rows][cols / 32] exponents; else null */
} linear;

/* Bytes of one row of `cols` elements in `data`; 0 for an unknown type. */
LINEAR_API size_t linear_row_bytes(linear_type type, size_t cols);

/* One number of each type. MXFP4 is E2M1 in the low four bits of `code`, with the E8M0 exponent
 * of its group: magnitude * 2^(exponent - 127); exponent 255 is NaN. */
LINEAR_API float linear_from_f16(uint16_t bits);
LINEAR_API float linear_from_bf16(uint16_t bits);
LINEAR_API float linear_from_mxfp4(unsigned code, unsigned exponent);

/* out[i] = w[row][col + i] for i < n. MXFP4: col and n are multiples of LINEAR_MXFP4_GROUP. */
LINEAR_API void linear_expand(const linear *w, size_t row, size_t col, size_t n, float *out);

/* The view of rows first .. first + n_rows - 1. */
LINEAR_API linear linear_rows(const linear *w, size_t first, size_t n_rows);

/* y[t] = W x[t] for n tokens; x[t] = x + t * x_stride, y[t] = y + t * y_stride. */
LINEAR_API void linear_apply(const linear *w, const float *x, size_t n, size_t x_stride, float *y,
                             size_t y_stride);

/* y[t] = W^T x[t]: x of `rows` elements, y of `cols`. */
LINEAR_API void linear_apply_transposed(const linear *w, const float *x, size_t n, size_t x_stride,
                                        float *y, size_t y_stride);

/* The sum of a[i] * b[i]. */
LINEAR_API float linear_dot(const float *a, const float *b, size_t n);

/* y[t] = x[t] / sqrt(mean(x[t]^2) + eps) * weight; y may be x itself. */
LINEAR_API void linear_rms_norm(const float *weight, float eps, size_t dim, const float *x,
                                size_t n, size_t x_stride, float *y, size_t y_stride);

#endif

#if defined(LINEAR_IMPLEMENTATION) && !defined(LINEARI_IMPLEMENTED)
#define LINEARI_IMPLEMENTED

#if !defined(SAFETENSORS_IMPLEMENTATION)
#define SAFETENSORS_IMPLEMENTATION
#endif
#include "safetensors.h" /* st_load_u16, st_load_f32 */

#include <math.h>
#include <string.h>

/* Elements converted at once (a multiple of LINEAR_LANES and of the MXFP4 group), and tokens that
 * share one conversion: together 6 KiB of stack. */
#define LINEARI_TILE 512
#define LINEARI_TOKENS 64

/* ---- One number ---- */

static float lineari_from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

LINEAR_API float linear_from_bf16(uint16_t bits) {
    return lineari_from_bits((uint32_t)bits << 16);
}

/* Without branches, so that compilers can convert several at once. */
LINEAR_API float linear_from_f16(uint16_t bits) {
    uint32_t magnitude = bits & 0x7fffu, sign = (uint32_t)(bits & 0x8000u) << 16;
    uint32_t normal = (magnitude << 13) + (112u << 23);     /* the exponent's bias: 127, not 15 */
    uint32_t special = magnitude << 13 | 0x7f800000u;       /* infinity and NaN */
    float subnormal = (float)(int32_t)magnitude * 0x1p-24f; /* zero too; normal as a float */
    uint32_t small;
    memcpy(&small, &subnormal, sizeof small);
    return lineari_from_bits(sign | (magnitude < 0x400u    ? small
                                     : magnitude < 0x7c00u ? normal
                                                           : special));
}

static float lineari_e8m0(unsigned exponent) {
    if (exponent == 0) return 0x1p-127f; /* subnormal as a float */
    if (exponent == 255) return lineari_from_bits(0x7fc00000u);
    return lineari_from_bits((uint32_t)exponent << 23);
}

static float lineari_e2m1(unsigned code) {
    static const float values[16] = {0,     0.5f,  1,     1.5f,  2,     3,     4,     6,
                                     -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
    return values[code & 15u];
}

LINEAR_API float linear_from_mxfp4(unsigned code, unsigned exponent) {
    return lineari_e2m1(code) * lineari_e8m0(exponent);
}

/* ---- Part of a row ---- */

static void lineari_expand_mxfp4(const unsigned char *codes, const unsigned char *scale,
                                 size_t groups, float *out) {
    for (size_t g = 0; g < groups; g++) {
        float factor = lineari_e8m0(scale[g]);
        for (size_t b = 0; b < LINEAR_MXFP4_GROUP / 2; b++, codes++) {
            *out++ = lineari_e2m1(*codes & 15u) * factor;
            *out++ = lineari_e2m1(*codes >> 4) * factor;
        }
    }
}

LINEAR_API size_t linear_row_bytes(linear_type type, size_t cols) {
    switch (type) {
    case LINEAR_F32:
        return cols * 4;
    case LINEAR_F16:
        return cols * 2;
    case LINEAR_BF16:
        return cols * 2;
    case LINEAR_MXFP4:
        return cols / 2;
    }
    return 0;
}

LINEAR_API void linear_expand(const linear *w, size_t row, size_t col, size_t n, float *out) {
    const unsigned char *p =
        w->data + row * linear_row_bytes(w->type, w->cols) + linear_row_bytes(w->type, col);
    switch (w->type) {
    case LINEAR_F32:
        for (size_t i = 0; i < n; i++)
            out[i] = st_load_f32(p + 4 * i);
        break;
    case LINEAR_F16:
        for (size_t i = 0; i < n; i++)
            out[i] = linear_from_f16(st_load_u16(p + 2 * i));
        break;
    case LINEAR_BF16:
        for (size_t i = 0; i < n; i++)
            out[i] = linear_from_bf16(st_load_u16(p + 2 * i));
        break;
    case LINEAR_MXFP4:
        lineari_expand_mxfp4(p, w->scale + (row * w->cols + col) / LINEAR_MXFP4_GROUP,
                             n / LINEAR_MXFP4_GROUP, out);
        break;
    }
}

LINEAR_API linear linear_rows(const linear *w, size_t first, size_t n_rows) {
    linear part = *w;
    part.rows = n_rows;
    part.data += first * linear_row_bytes(w->type, w->cols);
    if (part.scale) part.scale += first * (w->cols / LINEAR_MXFP4_GROUP);
    return part;
}

/* ---- Sums ---- */

/* lanes[i % LINEAR_LANES] += a[i] * b[i]. The running lanes are a local copy so that the compiler
 * sees that they overlap neither input. */
static void lineari_accumulate(float *lanes, const float *a, const float *b, size_t n) {
    float sum[LINEAR_LANES];
    size_t whole = n - n % LINEAR_LANES;
    memcpy(sum, lanes, sizeof sum);
    for (size_t i = 0; i < whole; i += LINEAR_LANES)
        for (size_t lane = 0; lane < LINEAR_LANES; lane++)
            sum[lane] += a[i + lane] * b[i + lane];
    for (size_t i = whole; i < n; i++)
        sum[i - whole] += a[i] * b[i];
    memcpy(lanes, sum, sizeof sum);
}

static float lineari_total(float *lanes) {
    for (size_t half = LINEAR_LANES / 2; half > 0; half /= 2)
        for (size_t lane = 0; lane < half; lane++)
            lanes[lane] += lanes[lane + half];
    return lanes[0];
}

LINEAR_API float linear_dot(const float *a, const float *b, size_t n) {
    float lanes[LINEAR_LANES] = {0};
    lineari_accumulate(lanes, a, b, n);
    return lineari_total(lanes);
}

/* One row against n <= LINEARI_TOKENS tokens: y[t * y_stride] = row . x[t]. */
static void lineari_apply_row(const linear *w, size_t row, const float *x, size_t n,
                              size_t x_stride, float *y, size_t y_stride) {
    float tile[LINEARI_TILE];
    float lanes[LINEARI_TOKENS][LINEAR_LANES];
    memset(lanes, 0, n * sizeof lanes[0]);
    for (size_t col = 0; col < w->cols; col += LINEARI_TILE) {
        size_t width = w->cols - col < LINEARI_TILE ? w->cols - col : LINEARI_TILE;
        linear_expand(w, row, col, width, tile);
        for (size_t t = 0; t < n; t++)
            lineari_accumulate(lanes[t], tile, x + t * x_stride + col, width);
    }
    for (size_t t = 0; t < n; t++)
        y[t * y_stride] = lineari_total(lanes[t]);
}

LINEAR_API void linear_apply(const linear *w, const float *x, size_t n, size_t x_stride, float *y,
                             size_t y_stride) {
    for (size_t first = 0; first < n; first += LINEARI_TOKENS) {
        size_t count = n - first < LINEARI_TOKENS ? n - first : LINEARI_TOKENS;
        for (size_t row = 0; row < w->rows; row++)
            lineari_apply_row(w, row, x + first * x_stride, count, x_stride,
                              y + first * y_stride + row, y_stride);
    }
}

LINEAR_API void linear_apply_transposed(const linear *w, const float *x, size_t n, size_t x_stride,
                                        float *y, size_t y_stride) {
    float tile[LINEARI_TILE];
    for (size_t t = 0; t < n; t++)
        memset(y + t * y_stride, 0, w->cols * sizeof *y);
    for (size_t row = 0; row < w->rows; row++)
        for (size_t col = 0; col < w->cols; col += LINEARI_TILE) {
            size_t width = w->cols - col < LINEARI_TILE ? w->cols - col : LINEARI_TILE;
            linear_expand(w, row, col, width, tile);
            for (size_t t = 0; t < n; t++) {
                float *out = y + t * y_stride + col;
                float factor = x[t * x_stride + row];
                for (size_t i = 0; i < width; i++)
                    out[i] += factor * tile[i];
            }
        }
}

LINEAR_API void linear_rms_norm(const float *weight, float eps, size_t dim, const float *x,
                                size_t n, size_t x_stride, float *y, size_t y_stride) {
    for (size_t t = 0; t < n; t++) {
        const float *in = x + t * x_stride;
        float *out = y + t * y_stride;
        float inverse = 1.0f / sqrtf(linear_dot(in, in, dim) / (float)dim + eps);
        for (size_t i = 0; i < dim; i++)
            out[i] = in[i] * inverse * weight[i];
    }
}

#endif
