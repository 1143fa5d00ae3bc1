/* quantize.h - a row of floats as codes of 4 or 8 bits with scales, as compressed-tensors lays out.
 *
 * In one source file of a program (this also brings in the bodies of linear.h):
 *
 *     #define QUANTIZE_IMPLEMENTATION
 *     #include "quantize.h"
 *
 * WHAT A CODE STANDS FOR
 *   QUANTIZE_INT8   q * s,       q from -128 to 127, s a bf16 number
 *   QUANTIZE_INT4   (q - z) * s, q from -8 to 7, s a bf16 number; z from -8 to 7, or always 0
 *   QUANTIZE_MXFP4  m * 2^x,     m one of 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives, x from
 *                                -127 to 127
 *
 * HOW THEY ARE CHOSEN
 *   q is (w / s) + z rounded to the nearest integer of its range, m is w / 2^x rounded to the
 *   nearest of its values; both the even one of two (of m: that of the even code). s is what the
 *   file will hold, already rounded to bf16. Of the candidates for s, z and x the one with the least
 *   sum of squared errors over the elements that share them is taken, the first of equals:
 *   symmetric   max|w| / d, where d is qmax + .5 (the rule of compressed-tensors), qmax, qmax + 1
 *               and (qmax + .5) times 1.05 to 1.4: where the largest is clipped, it may be for the
 *               good of the others
 *   asymmetric  those, with z = 0; and f (max - min) / 15, f from 1 to .7, where min <= 0 <= max,
 *               with z = -8 - f min / s rounded
 *   both        then the s that fits the codes so found best, sum(w q) / sum(q^2) where q is
 *               without z, if it is better after rounding
 *   MXFP4       floor(log2 max|w|) - 2 (the rule of the OCP Microscaling specification 1.0, 6.3,
 *               which clips what is above 6 * 2^x), one more, and one less
 *   Where all elements are zero s is 1, z is 0, x is 0. A candidate that rounds to zero is the least
 *   positive bf16 number instead.
 */
#ifndef QUANTIZE_H
#define QUANTIZE_H

#include "linear.h"

typedef enum quantize_kind {
    QUANTIZE_INT8 = 1,
    QUANTIZE_INT4 = 2,
    QUANTIZE_MXFP4 = 3
} quantize_kind;

typedef struct quantize_format {
    quantize_kind kind;
    size_t group;    /* elements of a row that share a scale; 0: all of them. MXFP4: 32 */
    bool asymmetric; /* INT4: with zero points */
} quantize_format;

/* Of a row of `cols` elements: scales, bytes of codes, and bytes of one scale. */
size_t quantize_groups(const quantize_format *f, size_t cols);
size_t quantize_row_bytes(const quantize_format *f, size_t cols);
size_t quantize_scale_bytes(const quantize_format *f);

/* Quantises w [cols], finite numbers; cols is a multiple of f->group, which is
 * even. Codes, quantize_row_bytes of
 * them: INT8 a byte each; else half a byte each, the first element in the low half of the first
 * byte, INT4 as q + 8 and MXFP4 as the sign and the place of |m| in the list above; what is left of
 * the last byte or word is 0. Scales, little-endian, one a group: bf16, or MXFP4 the byte x + 127.
 * Zeros, one a group, if f->asymmetric. Returns the sum of the squared errors. */
double quantize_row(const quantize_format *f, const float *w, size_t cols, unsigned char *codes,
                    unsigned char *scales, signed char *zeros);

/* Packs the zeros [rows][groups] of a matrix into words [ceil(rows / 8)][groups], little-endian:
 * row r is z + 8 in bits 4 (r % 8) to 4 (r % 8) + 3 of word r / 8. */
void quantize_pack_zeros(const signed char *zeros, size_t rows, size_t groups,
                         unsigned char *words);

#endif

#if defined(QUANTIZE_IMPLEMENTATION) && !defined(QUANTIZEI_IMPLEMENTED)
#define QUANTIZEI_IMPLEMENTED

#if !defined(LINEAR_IMPLEMENTATION)
#define LINEAR_IMPLEMENTATION
#endif
#include "linear.h"

#include <float.h>
#include <math.h>

/* ---- Sizes ---- */

size_t quantize_groups(const quantize_format *f, size_t cols) {
    return f->group ? cols / f->group : 1;
}

size_t quantize_row_bytes(const quantize_format *f, size_t cols) {
    switch (f->kind) {
    case QUANTIZE_INT8: return cols;
    case QUANTIZE_INT4: return cols / 8 * 4 + (cols % 8 ? 4 : 0);
    case QUANTIZE_MXFP4: break;
    }
    return cols / 2 + cols % 2;
}

size_t quantize_scale_bytes(const quantize_format *f) {
    return f->kind == QUANTIZE_MXFP4 ? 1 : 2;
}

/* ---- Rounding ---- */

/* The nearest multiple of a power of two, the even one of two; |x| < 2^22 step. */
static inline float quantizei_round(float x, float step) {
#if FLT_EVAL_METHOD == 0
    float magic = 0x1.8p23f * step; /* rounds in every instruction set, where rintf is a call */
    return (x + magic) - magic;
#else
    return rintf(x / step) * step;
#endif
}

static inline float quantizei_integer(float x, float low, float high) {
    float above = x < low ? low : x, clipped = above > high ? high : above;
    return quantizei_round(clipped, 1);
}

static inline int32_t quantizei_bits(float x) {
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float quantizei_from_bits(int32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Of a magnitude: two bits from the leading one on, and steps of .5 below 1. Positive floats are
 * compared as integers, which takes no branches. */
static inline float quantizei_e2m1(float x) {
    const int32_t one = 0x3f800000, six = 0x40c00000;
    int32_t bits = quantizei_bits(x);
    bits = bits < six ? bits : six;
    int32_t power = (bits > one ? bits : one) & 0x7f800000;
    return quantizei_round(quantizei_from_bits(bits), quantizei_from_bits(power) * 0.5f);
}

/* ---- One group ---- */

typedef struct quantizei_group {
    const float *w;
    size_t n;
    quantize_kind kind;
    float least, most;        /* codes, without their zero point: of integers */
    double low, high, larger; /* of w and 0: smallest, largest, largest magnitude */
} quantizei_group;

typedef struct quantizei_choice {
    float scale;
    int zero;
    double error; /* the sum of squares; negative: nothing chosen */
} quantizei_choice;

#define QUANTIZEI_LANES 8
#define QUANTIZEI_SPAN 512 /* products that are summed in float32 */

/* Sums a * b over a group, where x is an element divided by `scale` and q, a and b are expressions:
 * in lanes, so that compilers may use vector instructions, and in one order. */
#define QUANTIZEI_SUM(total, q_of_x, a, b)                                                         \
    for (size_t first = 0; first < g->n; first += QUANTIZEI_SPAN) {                                \
        float lanes[QUANTIZEI_LANES] = {0};                                                        \
        size_t left = g->n - first, count = left < QUANTIZEI_SPAN ? left : QUANTIZEI_SPAN, i = 0;  \
        for (; i + QUANTIZEI_LANES <= count; i += QUANTIZEI_LANES)                                 \
            for (size_t l = 0; l < QUANTIZEI_LANES; l++) {                                         \
                float x = g->w[first + i + l] / scale, q = (q_of_x);                               \
                lanes[l] += (a) * (b);                                                             \
            }                                                                                      \
        for (; i < count; i++) {                                                                   \
            float x = g->w[first + i] / scale, q = (q_of_x);                                       \
            lanes[i % QUANTIZEI_LANES] += (a) * (b);                                               \
        }                                                                                          \
        for (size_t l = 0; l < QUANTIZEI_LANES; l++) (total) += (double)lanes[l];                  \
    }

/* The sum of squared errors in units of scale^2. */
static double quantizei_integer_error(const quantizei_group *g, float scale, float least,
                                      float most) {
    double total = 0;
    QUANTIZEI_SUM(total, quantizei_integer(x, least, most), x - q, x - q)
    return total;
}

static double quantizei_e2m1_error(const quantizei_group *g, float scale) {
    double total = 0;
    QUANTIZEI_SUM(total, quantizei_e2m1(fabsf(x)), fabsf(x) - q, fabsf(x) - q)
    return total;
}

/* Takes a scale if it is better than what is chosen. */
static void quantizei_try(const quantizei_group *g, double scale, int zero,
                          quantizei_choice *best) {
    quantizei_choice new_one = {0, zero, 0};
    if (g->kind == QUANTIZE_MXFP4) {
        new_one.scale = (float)scale;
        new_one.error = quantizei_e2m1_error(g, new_one.scale);
    } else {
        new_one.scale = linear_from_bf16(linear_to_bf16((float)scale));
        if (!(new_one.scale > 0)) new_one.scale = linear_from_bf16(1);
        new_one.error = quantizei_integer_error(g, new_one.scale, g->least - (float)zero,
                                                g->most - (float)zero);
    }
    new_one.error *= (double)new_one.scale * (double)new_one.scale;
    if (best->error < 0 || new_one.error < best->error) *best = new_one;
}

/* The scale that fits the codes of the chosen one best. */
static void quantizei_refine(const quantizei_group *g, quantizei_choice *best) {
    float scale = best->scale, least = g->least - (float)best->zero;
    float most = g->most - (float)best->zero;
    double product = 0, square = 0;
    QUANTIZEI_SUM(product, quantizei_integer(x, least, most), x, q)
    QUANTIZEI_SUM(square, quantizei_integer(x, least, most), q, q)
    if (square > 0) /* and product: where q is not 0, it has the sign of x */
        quantizei_try(g, (double)scale * (product / square), best->zero, best);
}

static void quantizei_choose_integer(const quantizei_group *g, bool asymmetric,
                                     quantizei_choice *best) {
    static const double beyond[] = {1.05, 1.1, 1.15, 1.2, 1.3, 1.4};
    static const double parts[] = {1, .95, .9, .85, .8, .7};
    double middle = (double)g->most + 0.5;
    quantizei_try(g, g->larger / middle, 0, best);
    quantizei_try(g, g->larger / (middle - 0.5), 0, best);
    quantizei_try(g, g->larger / (middle + 0.5), 0, best);
    for (size_t i = 0; i < sizeof beyond / sizeof *beyond; i++)
        quantizei_try(g, g->larger / (middle * beyond[i]), 0, best);
    for (size_t i = 0; asymmetric && i < sizeof parts / sizeof *parts; i++) {
        double scale = (g->high - g->low) * parts[i] / (double)(g->most - g->least);
        double zero = rint((double)g->least - parts[i] * g->low / scale); /* at most g->most */
        quantizei_try(g, scale, (int)zero, best);
    }
    quantizei_refine(g, best);
}

static void quantizei_choose_exponent(const quantizei_group *g, quantizei_choice *best) {
    static const int offsets[] = {0, 1, -1};
    int exponent;
    /* The largest is at least 2^(exponent - 1) and below 2^exponent, which is at most 2^128. */
    frexp(g->larger, &exponent);
    for (size_t i = 0; i < sizeof offsets / sizeof *offsets; i++) {
        int x = exponent - 3 + offsets[i];
        quantizei_try(g, ldexp(1, x < -127 ? -127 : x), 0, best);
    }
}

static quantizei_choice quantizei_choose(const quantize_format *f, const float *w, size_t n) {
    quantizei_group g = {w, n, f->kind, -8, 7, 0, 0, 0};
    quantizei_choice best = {1, 0, -1};
    if (f->kind == QUANTIZE_INT8) g.least = -128, g.most = 127;
    float low = 0, high = 0;
    for (size_t i = 0; i < n; i++) {
        low = w[i] < low ? w[i] : low;
        high = w[i] > high ? w[i] : high;
    }
    g.low = (double)low, g.high = (double)high;
    g.larger = -g.low > g.high ? -g.low : g.high;
    if (!(g.larger > 0))
        best.error = 0;
    else if (f->kind == QUANTIZE_MXFP4)
        quantizei_choose_exponent(&g, &best);
    else
        quantizei_choose_integer(&g, f->asymmetric, &best);
    return best;
}

/* ---- A row ---- */

/* The codes of n numbers, a byte each. */
static void quantizei_codes(const quantize_format *f, const float *w, size_t n,
                            const quantizei_choice *c, unsigned char *codes) {
    float least = f->kind == QUANTIZE_INT8 ? -128.0f : -8.0f - (float)c->zero;
    float most = f->kind == QUANTIZE_INT8 ? 127.0f : 7.0f - (float)c->zero;
    float first = f->kind == QUANTIZE_INT8 ? 0 : least; /* what code 0 stands for */
    if (f->kind == QUANTIZE_MXFP4) {
        for (size_t i = 0; i < n; i++) {
            float m = quantizei_e2m1(fabsf(w[i] / c->scale));
            float place = m < 2 ? 2 * m : m < 4 ? m + 2 : m / 2 + 4;
            codes[i] = (unsigned char)((int)place | (signbit(w[i]) ? 8 : 0));
        }
    } else {
        for (size_t i = 0; i < n; i++)
            codes[i] =
                (unsigned char)(int)(quantizei_integer(w[i] / c->scale, least, most) - first);
    }
}

#define QUANTIZEI_CHUNK 64

/* Stores the codes of n numbers from place `at` of a row on, which is even but for INT8. */
static void quantizei_store_codes(const quantize_format *f, const float *w, size_t n,
                                  const quantizei_choice *c, unsigned char *row, size_t at) {
    unsigned char codes[QUANTIZEI_CHUNK + 1];
    for (size_t first = 0, count; first < n; first += count) {
        count = n - first < QUANTIZEI_CHUNK ? n - first : QUANTIZEI_CHUNK;
        quantizei_codes(f, w + first, count, c, codes);
        codes[count] = 0; /* the other half of the last byte */
        if (f->kind == QUANTIZE_INT8)
            memcpy(row + at + first, codes, count);
        else
            for (size_t i = 0; i < count; i += 2)
                row[(at + first + i) / 2] = (unsigned char)(codes[i] | codes[i + 1] << 4);
    }
}

static void quantizei_store_scale(const quantize_format *f, float scale, unsigned char *out) {
    if (f->kind == QUANTIZE_MXFP4) {
        int exponent;
        frexpf(scale, &exponent); /* a power of two is .5 times 2^exponent */
        out[0] = (unsigned char)(exponent - 1 + 127);
    } else {
        uint16_t bits = linear_to_bf16(scale);
        out[0] = (unsigned char)(bits & 0xff);
        out[1] = (unsigned char)(bits >> 8);
    }
}

double quantize_row(const quantize_format *f, const float *w, size_t cols, unsigned char *codes,
                    unsigned char *scales, signed char *zeros) {
    size_t groups = quantize_groups(f, cols), group = cols / groups;
    double squares = 0;
    memset(codes, 0, quantize_row_bytes(f, cols));
    for (size_t k = 0; k < groups; k++) {
        quantizei_choice c = quantizei_choose(f, w + k * group, group);
        quantizei_store_codes(f, w + k * group, group, &c, codes, k * group);
        quantizei_store_scale(f, c.scale, scales + k * quantize_scale_bytes(f));
        if (f->asymmetric) zeros[k] = (signed char)c.zero;
        squares += c.error;
    }
    return squares;
}

void quantize_pack_zeros(const signed char *zeros, size_t rows, size_t groups,
                         unsigned char *words) {
    memset(words, 0, (rows + 7) / 8 * groups * 4);
    for (size_t r = 0; r < rows; r++)
        for (size_t k = 0; k < groups; k++) {
            unsigned char *byte = words + (r / 8 * groups + k) * 4 + r % 8 / 2;
            unsigned code = (unsigned)(zeros[r * groups + k] + 8);
            *byte = (unsigned char)(*byte | code << 4 * (r % 2));
        }
}

#endif
