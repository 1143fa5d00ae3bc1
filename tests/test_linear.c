/* test_linear.c - the conversions, every bit pattern of them, and the products of linear.h. */
#include "../examples/linear.h"
#include "../examples/safetensors.h"

#include "test.h"

/* Equal as numbers, or NaN both. */
static int equal(float got, double want) {
    return isnan(want) ? isnan(got) : (double)got == want;
}

/* And with their sign. */
static int same(float got, double want) {
    return equal(got, want) && (isnan(want) || !signbit(got) == !signbit(want));
}

/* The value of a binary format of one sign bit, `exponent_bits` and `fraction_bits`, as IEEE 754
 * defines it and by no bit trick. */
static double ieee_value(unsigned bits, int exponent_bits, int fraction_bits) {
    unsigned fraction = bits & ((1u << fraction_bits) - 1);
    int exponent = (int)(bits >> fraction_bits & ((1u << exponent_bits) - 1));
    int bias = (1 << (exponent_bits - 1)) - 1;
    double sign = bits >> (exponent_bits + fraction_bits) ? -1.0 : 1.0;
    if (exponent == (1 << exponent_bits) - 1) return fraction ? (double)NAN : sign * HUGE_VAL;
    if (exponent == 0) return sign * ldexp((double)fraction, 1 - bias - fraction_bits);
    return sign * ldexp((double)(fraction | 1u << fraction_bits), exponent - bias - fraction_bits);
}

static void every_f16(void) {
    for (unsigned bits = 0; bits < 65536; bits++)
        CHECK_MSG(same(linear_from_f16((uint16_t)bits), ieee_value(bits, 5, 10)), "0x%04x: %g",
                  bits, (double)linear_from_f16((uint16_t)bits));
}

static void every_bf16(void) {
    for (unsigned bits = 0; bits < 65536; bits++)
        CHECK_MSG(same(linear_from_bf16((uint16_t)bits), ieee_value(bits, 8, 7)), "0x%04x: %g",
                  bits, (double)linear_from_bf16((uint16_t)bits));
}

/* E2M1 has bias 1 and neither infinity nor NaN; a product above float's range becomes infinite. */
static double mxfp4_value(unsigned code, unsigned exponent) {
    unsigned e = code >> 1 & 3u, fraction = code & 1u;
    double magnitude = e ? ldexp(1 + 0.5 * fraction, (int)e - 1) : 0.5 * fraction;
    if (exponent == 255) return (double)NAN;
    magnitude = ldexp(magnitude, (int)exponent - 127);
    if (magnitude >= ldexp(1, 128)) magnitude = HUGE_VAL;
    return code & 8u ? -magnitude : magnitude;
}

static void every_mxfp4(void) {
    for (unsigned code = 0; code < 16; code++)
        for (unsigned exponent = 0; exponent < 256; exponent++)
            CHECK_MSG(equal(linear_from_mxfp4(code, exponent), mxfp4_value(code, exponent)),
                      "code %u, exponent %u: %g", code, exponent,
                      (double)linear_from_mxfp4(code, exponent));
}

/* Element 2b lies in the low half of byte b; each group of 32 has its own scale. */
static void mxfp4_packing(void) {
    unsigned char data[2][32], scale[2][2] = {{127, 128}, {120, 130}};
    for (size_t i = 0; i < sizeof data; i++) data[i / 32][i % 32] = (unsigned char)(37 * i + 11);
    linear w = {LINEAR_MXFP4, 2, 64, data[0], scale[0], NULL, (linear_type)0, 0, 0};
    for (size_t row = 0; row < 2; row++) {
        float out[64];
        linear_expand(&w, row, 0, 64, out);
        for (size_t i = 0; i < 64; i++) {
            unsigned code = i % 2 ? data[row][i / 2] / 16u : data[row][i / 2] % 16u;
            CHECK((double)out[i] == mxfp4_value(code, scale[row][i / 32]));
        }
        linear_expand(&w, row, 32, 32, out);
        CHECK((double)out[0] == mxfp4_value(data[row][16] % 16u, scale[row][1]));
    }
}

/* Random numbers of one of the plain types. */
static void random_element(linear_type type, unsigned char *at) {
    float value = test_normal();
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (type == LINEAR_F16) bits = (uint32_t)(test_random_u64() & 0xbbffu) << 16; /* below 2 */
    for (int i = type == LINEAR_F32 ? 0 : 2; i < 4; i++) *at++ = (unsigned char)(bits >> 8 * i);
}

/* How a matrix of integers is quantised. */
typedef struct scheme {
    size_t group; /* 0: a row */
    linear_type scale_type;
    bool zeros;
} scheme;
static const scheme by_32 = {32, LINEAR_BF16, false};

/* A matrix of one type over random bytes that are finite numbers, at an odd address. */
typedef struct matrix {
    linear w;
    unsigned char *bytes;
    double *values; /* [rows][cols], by their definition */
} matrix;

/* The zero of a row and group: the definition, from 32-bit words. */
static int zero_of(const linear *w, size_t row, size_t group) {
    size_t groups = linear_groups(w), bits = w->type == LINEAR_UINT4 ? 4 : 8, at = row * bits;
    if (w->type == LINEAR_INT8) return (signed char)w->zero[row * groups + group];
    uint32_t word = st_load_u32(w->zero + 4 * (at / 32 * groups + group));
    return (int)(word >> at % 32 & ((1u << bits) - 1)) - (1 << (bits - 1));
}

static double scale_of(const linear *w, size_t at) {
    if (w->scale_type == LINEAR_F32) return (double)st_load_f32(w->scale + 4 * at);
    return ieee_value(st_load_u16(w->scale + 2 * at), w->scale_type == LINEAR_F16 ? 5 : 8,
                      w->scale_type == LINEAR_F16 ? 10 : 7);
}

/* An element, by its definition in the published layouts. */
static double value_of(const linear *w, size_t row, size_t col) {
    const unsigned char *at = w->data + row * linear_row_bytes(w->type, w->cols);
    if (w->type == LINEAR_F32) return (double)st_load_f32(at + 4 * col);
    if (w->type == LINEAR_F16) return ieee_value(st_load_u16(at + 2 * col), 5, 10);
    if (w->type == LINEAR_BF16) return ieee_value(st_load_u16(at + 2 * col), 8, 7);
    unsigned half = col % 2 ? at[col / 2] / 16u : at[col / 2] % 16u;
    size_t group = col / linear_group(w), scale = row * linear_groups(w) + group;
    if (w->type == LINEAR_MXFP4) return mxfp4_value(half, w->scale[scale]);
    int code = w->type == LINEAR_INT8    ? (signed char)at[col]
               : w->type == LINEAR_UINT8 ? (int)at[col] - 128
                                         : (int)half - 8;
    if (w->zero) code -= zero_of(w, row, group);
    return code * scale_of(w, scale);
}

static matrix matrix_quantised(linear_type type, size_t rows, size_t cols, scheme how) {
    matrix m;
    memset(&m.w, 0, sizeof m.w);
    m.w.type = type, m.w.rows = rows, m.w.cols = cols;
    m.w.scale_type = how.scale_type, m.w.group = how.group ? how.group : cols;
    bool zeros = how.zeros && type != LINEAR_MXFP4;
    m.w.zero = zeros ? (const unsigned char *)&m : NULL; /* counts in linear_bytes */
    size_t row_bytes = linear_row_bytes(type, cols), plain = linear_is_plain(type);
    size_t scales = plain ? 0 : rows * linear_groups(&m.w), bytes = linear_bytes(&m.w);
    size_t scale_bytes = type == LINEAR_MXFP4 ? 1 : linear_row_bytes(how.scale_type, 1);
    m.bytes = (unsigned char *)test_alloc(1 + bytes);
    m.w.data = m.bytes + 1;
    for (size_t i = 1; i <= bytes; i++) m.bytes[i] = (unsigned char)test_random_u64();
    for (size_t i = 0; plain && i < rows * cols; i++)
        random_element(type, m.bytes + 1 + i * (row_bytes / cols));
    unsigned char *scale = m.bytes + 1 + rows * row_bytes;
    if (!plain) m.w.scale = scale;
    for (size_t i = 0; i < scales; i++)
        if (type == LINEAR_MXFP4)
            scale[i] = (unsigned char)(120 + test_random_u64() % 8);
        else
            random_element(how.scale_type, scale + i * scale_bytes);
    if (zeros) m.w.zero = scale + scales * scale_bytes;
    m.values = (double *)test_alloc(rows * cols * sizeof(double));
    for (size_t i = 0; i < rows * cols; i++) m.values[i] = value_of(&m.w, i / cols, i % cols);
    return m;
}

static matrix matrix_new(linear_type type, size_t rows, size_t cols) {
    return matrix_quantised(type, rows, cols, by_32);
}

static void matrix_free(matrix *m) {
    free(m->bytes);
    free(m->values);
}

/* One matrix times vectors against float64, with rows of x and y wider than they need be. */
static void check_product(const linear_run *run, matrix *m, size_t n) {
    size_t rows = m->w.rows, cols = m->w.cols;
    size_t stride = rows + cols + 3;
    float *x = test_floats(n * stride), *y = test_floats(n * stride);
    test_fill_normal(x, n * stride);
    for (size_t i = 0; i < n * stride; i++) y[i] = 77;
    linear_apply(run, &m->w, x, n, stride, y, stride);
    for (size_t t = 0; t < n; t++) {
        for (size_t r = 0; r < rows; r++) {
            double want = 0, size = 0; /* of the sum, and of its terms */
            for (size_t i = 0; i < cols; i++) {
                double term = (double)x[t * stride + i] * m->values[r * cols + i];
                want += term, size += fabs(term);
            }
            CHECK_AT_MOST("product", fabs((double)y[t * stride + r] - want), 5e-7 * size);
        }
        for (size_t i = rows; i < stride; i++) CHECK(y[t * stride + i] == 77);
    }
    free(x), free(y);
    matrix_free(m);
}

static void check_products(const linear_run *run, linear_type type, size_t rows, size_t cols,
                           size_t n) {
    matrix m = matrix_new(type, rows, cols);
    check_product(run, &m, n);
}

/* Groups that are blocks, several, no whole number of them, a row; scales of each type; zeros. */
static const scheme schemes[] = {{32, LINEAR_BF16, false}, {128, LINEAR_F16, true},
                                 {0, LINEAR_BF16, true},   {0, LINEAR_F32, false},
                                 {48, LINEAR_F32, true},   {7, LINEAR_BF16, true}};
#define N_SCHEMES (sizeof schemes / sizeof *schemes)

static void check_quantised_products(const linear_run *run) {
    static const size_t cols[] = {1, 31, 33, 256, 512, 1100};
    for (int type = LINEAR_INT8; type <= LINEAR_UINT4; type++)
        for (size_t i = 0; i < sizeof cols / sizeof *cols; i++)
            for (size_t k = 0; k < N_SCHEMES; k++)
                for (size_t n = 1; n <= 8; n += n == 4 ? 3 : 1) {
                    matrix m = matrix_quantised((linear_type)type, 11, cols[i], schemes[k]);
                    check_product(run, &m, n);
                }
}

static void check_all_products(const linear_run *run) {
    static const size_t cols[] = {1, 2, 15, 16, 17, 33, 64, 511, 512, 513, 1100};
    for (int type = LINEAR_F32; type <= LINEAR_BF16; type++)
        for (size_t i = 0; i < sizeof cols / sizeof *cols; i++)
            for (size_t n = 1; n <= 8; n++) check_products(run, (linear_type)type, 7, cols[i], n);
    for (size_t n = 1; n <= 8; n++) {
        check_products(run, LINEAR_MXFP4, 5, 32, n);
        check_products(run, LINEAR_MXFP4, 5, 1056, n);
    }
    check_products(run, LINEAR_BF16, 70, 70, 131);
    check_quantised_products(run);
}

static void products_with(kda_isa isa) {
    linear_run run = {isa, NULL, false};
    if (kda_isa_is_available(isa))
        check_all_products(&run);
    else
        test_skip("not in this machine and build");
}

static void products_scalar(void) {
    products_with(KDA_ISA_SCALAR);
}
static void products_avx2(void) {
    products_with(KDA_ISA_AVX2);
}
static void products_avx512(void) {
    products_with(KDA_ISA_AVX512);
}
static void products_neon(void) {
    products_with(KDA_ISA_NEON);
}

/* The same bits in any number of threads. */
static void threads(void) {
    matrix m = matrix_new(LINEAR_BF16, 3001, 100);
    float *x = test_floats(70 * 100), *want = test_floats(70 * 3001), *got = test_floats(70 * 3001);
    error e;
    test_fill_normal(x, 70 * 100);
    for (size_t n = 1; n <= 70; n += 69) {
        linear_apply(NULL, &m.w, x, n, 100, want, 3001);
        for (size_t n_threads = 1; n_threads <= 8; n_threads += n_threads == 3 ? 5 : 1) {
            parallel pool;
            linear_run run = {KDA_ISA_AUTO, &pool, false};
            CHECK(parallel_open(&pool, n_threads, &e));
            memset(got, 0, 70 * 3001 * sizeof *got);
            linear_apply(&run, &m.w, x, n, 100, got, 3001);
            CHECK(memcmp(got, want, n * 3001 * sizeof *got) == 0);
            parallel_close(&pool);
        }
    }
    free(x), free(want), free(got);
    matrix_free(&m);
}

/* More products than a round has room for, some of no tokens and some of more than go through
 * together: the bits of each alone. */
static void many_products(void) {
    enum { PRODUCTS = 70, ROWS = 5, COLS = 40, TOKENS = 130 };
    linear_product products[PRODUCTS];
    matrix m = matrix_new(LINEAR_BF16, ROWS, COLS);
    float *x = test_floats(TOKENS * COLS), *got = test_floats(PRODUCTS * TOKENS * ROWS);
    float *want = test_floats(TOKENS * ROWS);
    test_fill_normal(x, TOKENS * COLS);
    for (size_t i = 0; i < PRODUCTS; i++) {
        linear_product product = {&m.w, x, 0, COLS, got + i * TOKENS * ROWS, ROWS};
        product.n = i % 4 ? i % 4 : i % 8 ? 0 : TOKENS;
        products[i] = product;
    }
    linear_apply_all(NULL, products, PRODUCTS);
    for (size_t i = 0; i < PRODUCTS; i++) {
        memset(want, 0, TOKENS * ROWS * sizeof *want);
        linear_apply(NULL, &m.w, x, products[i].n, COLS, want, ROWS);
        CHECK(memcmp(products[i].y, want, TOKENS * ROWS * sizeof *want) == 0);
    }
    linear_apply_all(NULL, products, 0);
    free(x), free(got), free(want);
    matrix_free(&m);
}

/* A set that this machine has not is the best that it has. */
static void absent_instruction_sets(void) {
    float x[100], want[9], got[9];
    matrix m = matrix_new(LINEAR_F16, 9, 100);
    test_fill_normal(x, 100);
    linear_apply(NULL, &m.w, x, 1, 100, want, 9);
    for (int isa = KDA_ISA_SCALAR; isa <= KDA_ISA_NEON; isa++) {
        linear_run run = {(kda_isa)isa, NULL, false};
        if (kda_isa_is_available((kda_isa)isa)) continue;
        linear_apply(&run, &m.w, x, 1, 100, got, 9);
        CHECK(memcmp(got, want, sizeof got) == 0);
    }
    matrix_free(&m);
}

/* Each 16-bit number is what it is rounded to; what lies between goes to the nearer, or to even. */
static void rounding(void) {
    for (unsigned bits = 0; bits < 0x7c00; bits++) {
        float low = linear_from_f16((uint16_t)bits), high = linear_from_f16((uint16_t)(bits + 1));
        if (bits == 0x7bff) high = 65536;
        float middle = low + (high - low) / 2;
        CHECK(linear_to_f16(low) == bits && linear_to_f16(-low) == (bits | 0x8000u));
        CHECK(linear_to_f16(middle) == bits + bits % 2);
        CHECK(linear_to_f16(nextafterf(middle, 0)) == bits);
        CHECK(linear_to_f16(nextafterf(middle, HUGE_VALF)) == bits + 1);
    }
    for (unsigned bits = 0; bits < 0x7f80; bits++) {
        float low = linear_from_bf16((uint16_t)bits);
        uint32_t middle_bits = (uint32_t)bits << 16 | 0x8000u;
        float middle;
        memcpy(&middle, &middle_bits, sizeof middle);
        CHECK(linear_to_bf16(low) == bits && linear_to_bf16(-low) == (bits | 0x8000u));
        CHECK(linear_to_bf16(middle) == bits + bits % 2);
        CHECK(linear_to_bf16(nextafterf(middle, 0)) == bits);
        CHECK(linear_to_bf16(nextafterf(middle, HUGE_VALF)) == bits + 1);
    }
    CHECK(linear_to_f16(HUGE_VALF) == 0x7c00 && linear_to_bf16(HUGE_VALF) == 0x7f80);
    CHECK(isnan(linear_from_f16(linear_to_f16(NAN))) &&
          isnan(linear_from_bf16(linear_to_bf16(NAN))));
}

/* A token's bits do not depend on how many others are in the call, in any type. */
static void tokens_are_independent(void) {
    float *x = test_floats(70 * 100), *together = test_floats(70 * 9), alone[9];
    test_fill_normal(x, 70 * 100);
    for (int type = LINEAR_F32; type <= LINEAR_UINT4; type++)
        for (size_t k = 0; k < N_SCHEMES; k++) {
            size_t cols = type == LINEAR_MXFP4 ? 96 : 100;
            matrix m = matrix_quantised((linear_type)type, 9, cols, schemes[k]);
            linear_apply(NULL, &m.w, x, 70, 100, together, 9);
            for (size_t t = 0; t < 70; t++) {
                linear_apply(NULL, &m.w, x + t * 100, 1, 100, alone, 9);
                CHECK(memcmp(alone, together + t * 9, sizeof alone) == 0);
            }
            matrix_free(&m);
        }
    free(x), free(together);
}

/* What a row, or a part of one, holds, exactly: a code and a scale have few bits. */
static void expansion(void) {
    for (int type = LINEAR_F32; type <= LINEAR_UINT4; type++)
        for (size_t k = 0; k < N_SCHEMES; k++) {
            if (linear_is_plain((linear_type)type) && k > 0) break;
            size_t cols = type == LINEAR_MXFP4 ? 96 : 100;
            matrix m = matrix_quantised((linear_type)type, 9, cols, schemes[k]);
            bool rounds = type > LINEAR_MXFP4 && schemes[k].scale_type == LINEAR_F32;
            for (size_t row = 0; row < 9; row++)
                for (size_t col = 0; col < cols; col += 32)
                    for (size_t n = 1; n <= cols - col; n += 13) {
                        float out[101];
                        out[n] = 77;
                        linear_expand(&m.w, row, col, n, out);
                        for (size_t i = 0; i < n; i++) {
                            double want = m.values[row * cols + col + i];
                            CHECK_MSG(rounds ? out[i] == (float)want : (double)out[i] == want,
                                      "%s, scheme %zu: %.9g, not %.17g",
                                      linear_type_name((linear_type)type), k, (double)out[i], want);
                        }
                        CHECK(out[n] == 77);
                    }
            matrix_free(&m);
        }
}

/* Rows of a matrix have the bits that they have in it, for few tokens and for many. */
static void some_rows(void) {
    float x[7 * 96], whole[7 * 19], part[7 * 6];
    test_fill_normal(x, 7 * 96);
    for (int type = LINEAR_F32; type <= LINEAR_UINT4; type++)
        for (size_t k = 0; k < N_SCHEMES; k++)
            for (size_t n = 1; n <= 7; n += 6) {
                matrix m = matrix_quantised((linear_type)type, 19, 96, schemes[k]);
                linear middle = linear_rows(&m.w, 2, 17), rows = linear_rows(&middle, 9, 6);
                linear_apply(NULL, &m.w, x, n, 96, whole, 19);
                linear_apply(NULL, &rows, x, n, 96, part, 6);
                for (size_t t = 0; t < n; t++)
                    CHECK(memcmp(part + 6 * t, whole + 19 * t + 11, 6 * sizeof *part) == 0);
                matrix_free(&m);
            }
}

static void rms_norm(void) {
    float x[2 * 37], y[2 * 37], weight[37];
    double want[37];
    test_fill_normal(x, 74);
    test_fill_normal(weight, 37);
    linear_rms_norm(weight, 1e-5f, 37, x, 2, 37, y, 37);
    for (size_t t = 0; t < 2; t++) {
        double squares = 0;
        for (size_t i = 0; i < 37; i++) squares += (double)x[t * 37 + i] * (double)x[t * 37 + i];
        for (size_t i = 0; i < 37; i++)
            want[i] = (double)x[t * 37 + i] / sqrt(squares / 37 + 1e-5) * (double)weight[i];
        CHECK_AT_MOST("norm", test_relative_l2(y + t * 37, want, 37), 3e-7);
    }
    linear_rms_norm(weight, 1e-5f, 37, x, 2, 37, x, 37);
    CHECK(memcmp(x, y, sizeof x) == 0);
}

static void names(void) {
    linear_type type = LINEAR_F16;
    for (int i = LINEAR_F32; i <= LINEAR_UINT4; i++)
        CHECK(linear_type_of(linear_type_name((linear_type)i), &type) && (int)type == i);
    CHECK(!linear_type_of("f64", &type) && !linear_type_of("unknown", &type));
    CHECK(strcmp(linear_type_name((linear_type)0), linear_type_name((linear_type)9)) == 0);
}

int main(void) {
    TEST(names);
    TEST(every_f16);
    TEST(every_bf16);
    TEST(every_mxfp4);
    TEST(mxfp4_packing);
    TEST(rounding);
    TEST(products_scalar);
    TEST(products_avx2);
    TEST(products_avx512);
    TEST(products_neon);
    TEST(threads);
    TEST(many_products);
    TEST(absent_instruction_sets);
    TEST(tokens_are_independent);
    TEST(expansion);
    TEST(some_rows);
    TEST(rms_norm);
    return test_summary();
}
