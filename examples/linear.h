/* linear.h - dense projections over weights in their file type, and the RMS norm before them.
 *
 * In one source file of a program (this also brings in the bodies of kda.h and safetensors.h):
 *
 *     #define LINEAR_IMPLEMENTATION
 *     #include "linear.h"
 *
 * A `linear` is a view of a matrix [rows][cols] as a checkpoint stores it: little-endian, at any
 * alignment, usually in a mapped file. It is converted a few hundred elements at a time while it is
 * used and never as a whole. Conversions are exact, but for an MXFP4 value above what float holds,
 * which becomes infinite.
 *
 * A row times a vector is summed in spans of LINEAR_SPAN elements, each in the shape that kernels.h
 * describes: a token's result does not depend on what else is in the call nor on the threads. Sets
 * of instructions differ in rounding.
 */
#ifndef LINEAR_H
#define LINEAR_H

#include "../kda.h" /* kda_isa */
#include "parallel.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Elements of a span: a multiple of LINEAR_BLOCK. */
#define LINEAR_SPAN 512

/* Elements that share one scale in MXFP4. */
#define LINEAR_MXFP4_GROUP 32

/* Elements of a quantised matrix that are converted together. */
#define LINEAR_BLOCK 32

/* Products in bf16 are of whole steps of elements. */
#define LINEAR_BF16_STEP 32

/* The first three are numbers. In the others, which are quantised, an element is
 *     (code - zero) * scale
 * of its row's group. Codes of MXFP4 and UINT4 are halves of a byte: element 2b of a row is the low
 * half of its byte b, and 2b + 1 the high half. */
typedef enum linear_type { /* 0 is no type: an absent matrix */
                           LINEAR_F32 = 1,
                           LINEAR_F16 = 2,
                           LINEAR_BF16 = 3,
                           LINEAR_MXFP4 = 4, /* E2M1 in groups of 32; scales E8M0; no zeros */
                           LINEAR_INT8 = 5,  /* a signed byte */
                           LINEAR_UINT8 = 6, /* a byte, which is the code + 128 */
                           LINEAR_UINT4 = 7  /* a half, which is the code + 8 */
} linear_type;

typedef struct linear {
    linear_type type;
    size_t rows;               /* outputs */
    size_t cols;               /* inputs; MXFP4: a multiple of LINEAR_MXFP4_GROUP */
    const unsigned char *data; /* [rows][linear_row_bytes(type, cols)] */

    /* Of a quantised matrix; else null. */
    const unsigned char *scale; /* [rows][groups]; of scale_type, MXFP4: a byte */
    const unsigned char *zero;  /* null: all are 0. INT8: signed bytes [rows][groups]. UINT8, UINT4:
                                   32-bit words [..][groups], in which lie the codes of 4 or 8 rows,
                                   the lowest bits for the first */
    linear_type scale_type;     /* F32, F16 or BF16 */
    size_t group;               /* elements of a row that share scale and zero; MXFP4: ignored */
    size_t first_row;           /* where in `zero` this matrix begins */
} linear;

/* How a call runs. Zero, or null in its place: the best instruction set, in the calling thread. */
typedef struct linear_run {
    kda_isa isa;
    parallel *pool;
    bool bf16_dots; /* let attention over a bf16 cache round its queries and weights to bf16 too */
} linear_run;

/* "f32", "f16", "bf16", "mxfp4", "int8", "uint8", "uint4"; "unknown" for a value that is no type.
 * And back: false for a text that is none of these. */
const char *linear_type_name(linear_type type);
bool linear_type_of(const char *name, linear_type *type);

/* Is it F32, F16 or BF16? */
bool linear_is_plain(linear_type type);

/* Bytes of one row of `cols` elements in `data`; 0 for an unknown type. Rows of UINT8 and UINT4 are
 * whole 32-bit words. */
size_t linear_row_bytes(linear_type type, size_t cols);

/* Of a quantised matrix: elements that share a scale, and how many such groups a row has. */
size_t linear_group(const linear *w);
size_t linear_groups(const linear *w);

/* Bytes of the whole matrix: codes or numbers, scales and zeros. */
size_t linear_bytes(const linear *w);

/* One number of each type. MXFP4 is E2M1 in the low four bits of `code`, with the E8M0 exponent
 * of its group: magnitude * 2^(exponent - 127); exponent 255 is NaN. */
float linear_from_f16(uint16_t bits);
float linear_from_bf16(uint16_t bits);
float linear_from_mxfp4(unsigned code, unsigned exponent);

/* The nearest number of each type, the even one of two; NaN stays NaN. */
uint16_t linear_to_f16(float x);
uint16_t linear_to_bf16(float x);

/* out[i] = w[row][col + i] for i < n. Quantised: col is a multiple of LINEAR_BLOCK. */
void linear_expand(const linear *w, size_t row, size_t col, size_t n, float *out);

/* The reverse, of a row of n elements: F32, F16 or BF16. */
void linear_compress(linear_type type, const float *x, size_t n, unsigned char *out);

/* A matrix of plain numbers. */
linear linear_plain(linear_type type, size_t rows, size_t cols, const void *data);

/* The view of rows first .. first + n_rows - 1. */
linear linear_rows(const linear *w, size_t first, size_t n_rows);

/* y[t] = W x[t] for n tokens; x[t] = x + t * x_stride, y[t] = y + t * y_stride. */
void linear_apply(const linear_run *run, const linear *w, const float *x, size_t n, size_t x_stride,
                  float *y, size_t y_stride);

/* Several of these, which may run at once: no y is another's x or y. Threads go from one matrix to
 * the next without waiting for one another, which small matrices gain by. The same bits. */
typedef struct linear_product {
    const linear *w;
    const float *x;
    size_t n, x_stride;
    float *y;
    size_t y_stride;
} linear_product;
void linear_apply_all(const linear_run *run, const linear_product *products, size_t n_products);

/* The sum of a[i] * b[i]. */
float linear_dot(const float *a, const float *b, size_t n);

/* y[t] = x[t] / sqrt(mean(x[t]^2) + eps) * weight; y may be x itself. */
void linear_rms_norm(const float *weight, float eps, size_t dim, const float *x, size_t n,
                     size_t x_stride, float *y, size_t y_stride);

#endif

#if defined(LINEAR_IMPLEMENTATION) && !defined(LINEARI_IMPLEMENTED)
#define LINEARI_IMPLEMENTED

#if !defined(SAFETENSORS_IMPLEMENTATION)
#define SAFETENSORS_IMPLEMENTATION
#endif
#include "safetensors.h" /* st_load_u16, st_load_f32 */
#if !defined(KDA_IMPLEMENTATION)
#define KDA_IMPLEMENTATION
#endif
#include "../kda.h"

#include <math.h>
#include <string.h>

/* ---- Names ---- */

static const char *const lineari_names[] = {"unknown", "f32",  "f16",   "bf16",
                                            "mxfp4",   "int8", "uint8", "uint4"};

const char *linear_type_name(linear_type type) {
    size_t known = sizeof lineari_names / sizeof *lineari_names;
    return lineari_names[(size_t)type < known ? (size_t)type : 0];
}

bool linear_type_of(const char *name, linear_type *type) {
    for (int i = LINEAR_F32; i <= LINEAR_UINT4; i++)
        if (strcmp(name, lineari_names[i]) == 0) {
            *type = (linear_type)i;
            return true;
        }
    return false;
}

/* ---- One number ---- */

static float lineari_from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

float linear_from_bf16(uint16_t bits) {
    return lineari_from_bits((uint32_t)bits << 16);
}

/* Without branches, so that compilers can convert several at once. */
float linear_from_f16(uint16_t bits) {
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

/* 2^(exponent - 127), subnormal for 0, NaN for 255: those two have a bit of the fraction set. From
 * a table, since a vector of elements needs one each few instructions. */
static float lineari_e8m0(unsigned exponent) {
#define LINEARI_1(n) ((uint32_t)(n) << 23 | (uint32_t)((n) == 0 || (n) == 255) << 22)
#define LINEARI_4(n) LINEARI_1(n), LINEARI_1((n) + 1), LINEARI_1((n) + 2), LINEARI_1((n) + 3)
#define LINEARI_16(n) LINEARI_4(n), LINEARI_4((n) + 4), LINEARI_4((n) + 8), LINEARI_4((n) + 12)
#define LINEARI_64(n)                                                                              \
    LINEARI_16(n), LINEARI_16((n) + 16), LINEARI_16((n) + 32), LINEARI_16((n) + 48)
    static const uint32_t bits[256] = {LINEARI_64(0), LINEARI_64(64), LINEARI_64(128),
                                       LINEARI_64(192)};
#undef LINEARI_1
#undef LINEARI_4
#undef LINEARI_16
#undef LINEARI_64
    return lineari_from_bits(bits[exponent]);
}

/* What the codes of four bits stand for; of E2M1 twice its values, so that these are whole. */
static const signed char lineari_e2m1_twice[16] = {0, 1,  2,  3,  4,  6,  8,  12,
                                                   0, -1, -2, -3, -4, -6, -8, -12};
static const signed char lineari_int4[16] = {-8, -7, -6, -5, -4, -3, -2, -1,
                                             0,  1,  2,  3,  4,  5,  6,  7};

float linear_from_mxfp4(unsigned code, unsigned exponent) {
    return (float)lineari_e2m1_twice[code & 15u] * (0.5f * lineari_e8m0(exponent));
}

uint16_t linear_to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (x != x) return (uint16_t)(bits >> 16 | 0x40u);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

uint16_t linear_to_f16(float x) {
    uint32_t bits, sign;
    memcpy(&bits, &x, sizeof bits);
    sign = bits >> 16 & 0x8000u;
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
    if (bits >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* 65520: rounds to infinity */
    if (bits >= 0x38800000u)
        return (uint16_t)(sign | (bits - (112u << 23) + 0xfffu + (bits >> 13 & 1u)) >> 13);
    /* Subnormal: adding 0.5 leaves as many bits of a fraction as a subnormal has. */
    float magnitude = fabsf(x) + 0.5f;
    memcpy(&bits, &magnitude, sizeof bits);
    return (uint16_t)(sign | (bits - 0x3f000000u));
}

/* ---- Rows ---- */

/* Its loops use the types and the scalar conversions above. */
#include "kernels.h"

size_t linear_row_bytes(linear_type type, size_t cols) {
    switch (type) {
    case LINEAR_F32: return cols * 4;
    case LINEAR_F16:
    case LINEAR_BF16: return cols * 2;
    case LINEAR_MXFP4: return cols / 2;
    case LINEAR_INT8: return cols;
    case LINEAR_UINT8: return (cols + 3) / 4 * 4;
    case LINEAR_UINT4: return (cols + 7) / 8 * 4;
    }
    return 0;
}

bool linear_is_plain(linear_type type) {
    return type == LINEAR_F32 || type == LINEAR_F16 || type == LINEAR_BF16;
}

size_t linear_group(const linear *w) {
    return w->type == LINEAR_MXFP4 ? LINEAR_MXFP4_GROUP : w->group;
}

size_t linear_groups(const linear *w) {
    return (w->cols + linear_group(w) - 1) / linear_group(w);
}

size_t linear_bytes(const linear *w) {
    size_t bytes = w->rows * linear_row_bytes(w->type, w->cols);
    if (linear_is_plain(w->type) || bytes == 0) return bytes;
    size_t scales = w->rows * linear_groups(w);
    bytes += w->type == LINEAR_MXFP4 ? scales : scales * linear_row_bytes(w->scale_type, 1);
    if (!w->zero || w->type == LINEAR_INT8) return bytes + (w->zero ? scales : 0);
    size_t in_word = w->type == LINEAR_UINT4 ? 8 : 4;
    return bytes + (w->rows + in_word - 1) / in_word * 4 * linear_groups(w);
}

/* Rows from `row` on, columns from `col` on. */
static kernels_matrix lineari_part(const linear *w, size_t row, size_t col) {
    kernels_matrix part;
    memset(&part, 0, sizeof part);
    part.type = w->type;
    part.row_bytes = linear_row_bytes(w->type, w->cols);
    part.data = w->data + row * part.row_bytes + linear_row_bytes(w->type, col);
    if (linear_is_plain(w->type)) return part;
    part.table = w->type == LINEAR_MXFP4 ? lineari_e2m1_twice : lineari_int4;
    part.flip = w->type == LINEAR_UINT8 ? 0x80 : 0;
    part.scale = w->scale, part.zero = w->zero;
    part.scale_type = w->scale_type;
    part.group = linear_group(w), part.groups = linear_groups(w);
    part.first_row = row, part.first_zero = w->first_row + row, part.first_col = col;
    return part;
}

/* Do groups end where blocks do? */
static bool lineari_is_in_blocks(const linear *w) {
    return linear_is_plain(w->type) || linear_group(w) % LINEAR_BLOCK == 0 ||
           linear_group(w) >= w->cols;
}

/* A row of a quantised matrix, element by element: for groups of any size. */
static void lineari_expand_each(const linear *w, size_t row, size_t col, size_t n, float *out) {
    kernels_matrix part = lineari_part(w, row, 0);
    for (size_t i = 0; i < n; i++) {
        /* Only plain types have no groups. NOLINTNEXTLINE(clang-analyzer-core.DivideZero) */
        size_t at = col + i, group = at / part.group;
        float code = w->type == LINEAR_UINT4
                         ? (float)part.table[(unsigned)part.data[at / 2] >> 4 * (at % 2) & 15u]
                         : (float)(signed char)(part.data[at] ^ part.flip);
        float scale;
        kernelsi_scales(&part, 0, group, 1, &scale);
        out[i] = (code - kernelsi_zero(&part, 0, group)) * scale;
    }
}

static void lineari_expand(const kernels *set, const linear *w, size_t row, size_t col, size_t n,
                           float *out) {
    kernels_matrix part = lineari_part(w, row, col);
    if (lineari_is_in_blocks(w))
        set->expand(&part, n, out);
    else
        lineari_expand_each(w, row, col, n, out);
}

void linear_expand(const linear *w, size_t row, size_t col, size_t n, float *out) {
    lineari_expand(kernels_of(KDA_ISA_AUTO), w, row, col, n, out);
}

void linear_compress(linear_type type, const float *x, size_t n, unsigned char *out) {
    size_t bytes = type == LINEAR_F32 ? 4 : 2;
    for (size_t i = 0; i < n; i++, out += bytes) {
        uint32_t bits;
        memcpy(&bits, &x[i], sizeof bits);
        if (type == LINEAR_F16) bits = linear_to_f16(x[i]);
        if (type == LINEAR_BF16) bits = linear_to_bf16(x[i]);
        for (size_t b = 0; b < bytes; b++) out[b] = (unsigned char)(bits >> 8 * b);
    }
}

linear linear_plain(linear_type type, size_t rows, size_t cols, const void *data) {
    linear w;
    memset(&w, 0, sizeof w);
    w.type = type, w.rows = rows, w.cols = cols, w.data = (const unsigned char *)data;
    return w;
}

linear linear_rows(const linear *w, size_t first, size_t n_rows) {
    linear part = *w;
    part.rows = n_rows;
    part.data += first * linear_row_bytes(w->type, w->cols);
    if (linear_is_plain(w->type)) return part;
    part.first_row += first;
    part.scale += first * linear_groups(w) *
                  (w->type == LINEAR_MXFP4 ? 1 : linear_row_bytes(w->scale_type, 1));
    return part;
}

/* ---- Products ---- */

/* One call of linear_apply, and how its rows are cut into items for threads. */
typedef struct lineari_call {
    const kernels *set;
    const linear *w;
    const float *x;
    float *y;
    size_t n, x_stride, y_stride;
    size_t item_rows;
} lineari_call;

/* A matrix is converted where it is used if few tokens use it, codes if one does, else once for all.
 * The sums are the same. */
#define LINEARI_FEW 6
#define LINEARI_TILE_ROWS 16 /* with LINEAR_SPAN 32 KiB of stack */

/* Rows first .. first + count - 1 for few tokens: the weights go by once, row after row. */
static void lineari_rows_direct(const lineari_call *call, size_t first, size_t count) {
    kernels_matrix part = lineari_part(call->w, first, 0);
    call->set->dots(&part, count, call->x, call->x_stride, call->n, call->w->cols, LINEAR_SPAN,
                    false, call->y + first, 1, call->y_stride);
}

static void lineari_rows_tiled(const lineari_call *call, size_t first, size_t count) {
    float tile[LINEARI_TILE_ROWS][LINEAR_SPAN];
    kernels_matrix floats = kernels_plain(LINEAR_F32, tile, sizeof tile[0]);
    for (size_t col = 0; col < call->w->cols; col += LINEAR_SPAN) {
        size_t width = call->w->cols - col < LINEAR_SPAN ? call->w->cols - col : LINEAR_SPAN;
        for (size_t r = 0; r < count; r++)
            lineari_expand(call->set, call->w, first + r, col, width, tile[r]);
        call->set->dots(&floats, count, call->x + col, call->x_stride, call->n, width, width,
                        col > 0, call->y + first, 1, call->y_stride);
    }
}

static void lineari_item(void *context, size_t item) {
    const lineari_call *call = (const lineari_call *)context;
    size_t first = item * call->item_rows, left = call->w->rows - first;
    size_t count = left < call->item_rows ? left : call->item_rows;
    size_t few = linear_is_plain(call->w->type) ? LINEARI_FEW : 1;
    if (call->n <= few && lineari_is_in_blocks(call->w)) {
        lineari_rows_direct(call, first, count);
        return;
    }
    for (size_t r = 0; r < count; r += LINEARI_TILE_ROWS)
        lineari_rows_tiled(call, first + r,
                           count - r < LINEARI_TILE_ROWS ? count - r : LINEARI_TILE_ROWS);
}

/* Bytes of weights, times tokens, that are worth handing to a thread. */
#define LINEARI_ITEM_BYTES 65536

/* Tokens whose span of x stays in a core's cache while rows go by. */
#define LINEARI_TOKENS 128

/* Calls whose items threads take from one list, call after call. */
#define LINEARI_MOST_CALLS 64

typedef struct lineari_round {
    size_t n;
    size_t ends[LINEARI_MOST_CALLS]; /* items of this call and of those before it */
    lineari_call calls[LINEARI_MOST_CALLS];
} lineari_round;

static void lineari_round_item(void *context, size_t item) {
    lineari_round *round = (lineari_round *)context;
    size_t i = 0;
    while (item >= round->ends[i]) i++;
    lineari_item(&round->calls[i], item - (i > 0 ? round->ends[i - 1] : 0));
}

static void lineari_run_round(const linear_run *run, lineari_round *round) {
    if (round->n > 0)
        parallel_for(run ? run->pool : NULL, round->ends[round->n - 1], lineari_round_item, round);
    round->n = 0;
}

/* One product of at most LINEARI_TOKENS tokens. */
static void lineari_add_call(const linear_run *run, lineari_round *round, const linear *w,
                             const lineari_call *call) {
    if (round->n == LINEARI_MOST_CALLS) lineari_run_round(run, round);
    size_t row_work = linear_row_bytes(w->type, w->cols) * call->n + 1;
    size_t item_rows = LINEARI_ITEM_BYTES / row_work / LINEARI_TILE_ROWS * LINEARI_TILE_ROWS;
    if (item_rows == 0) item_rows = LINEARI_TILE_ROWS;
    size_t before = round->n > 0 ? round->ends[round->n - 1] : 0;
    round->calls[round->n] = *call;
    round->calls[round->n].item_rows = item_rows;
    round->ends[round->n++] = before + (w->rows + item_rows - 1) / item_rows;
}

void linear_apply_all(const linear_run *run, const linear_product *products, size_t n_products) {
    lineari_round round;
    lineari_call call;
    memset(&call, 0, sizeof call);
    call.set = kernels_of(run ? run->isa : KDA_ISA_AUTO);
    round.n = 0;
    for (size_t i = 0; i < n_products; i++) {
        const linear_product *p = &products[i];
        call.w = p->w, call.x_stride = p->x_stride, call.y_stride = p->y_stride;
        for (size_t first = 0; first < p->n; first += LINEARI_TOKENS) {
            call.x = p->x + first * p->x_stride, call.y = p->y + first * p->y_stride;
            call.n = p->n - first < LINEARI_TOKENS ? p->n - first : LINEARI_TOKENS;
            lineari_add_call(run, &round, p->w, &call);
        }
    }
    lineari_run_round(run, &round);
}

void linear_apply(const linear_run *run, const linear *w, const float *x, size_t n, size_t x_stride,
                  float *y, size_t y_stride) {
    linear_product product = {w, x, n, x_stride, y, y_stride};
    linear_apply_all(run, &product, 1);
}

float linear_dot(const float *a, const float *b, size_t n) {
    float sum = 0;
    kernels_matrix row = kernels_plain(LINEAR_F32, a, 0);
    kernels_of(KDA_ISA_AUTO)->dots(&row, 1, b, 0, 1, n, LINEAR_SPAN, true, &sum, 0, 0);
    return sum;
}

void linear_rms_norm(const float *weight, float eps, size_t dim, const float *x, size_t n,
                     size_t x_stride, float *y, size_t y_stride) {
    for (size_t t = 0; t < n; t++) {
        const float *in = x + t * x_stride;
        float *out = y + t * y_stride;
        float inverse = 1.0f / sqrtf(linear_dot(in, in, dim) / (float)dim + eps);
        for (size_t i = 0; i < dim; i++) out[i] = in[i] * inverse * weight[i];
    }
}

#endif
