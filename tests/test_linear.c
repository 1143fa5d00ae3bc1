/* test_linear.c - the conversions, every bit pattern of them, and the products of linear.h. */
#define LINEAR_IMPLEMENTATION
#include "../examples/linear.h"

#include "test.h"

/* Equal as numbers with their sign, or NaN both. */
static int same(float got, double want) {
    if (isnan(want)) return isnan(got);
    return (double)got == want && !signbit(got) == !signbit(want);
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
            CHECK_MSG(same(linear_from_mxfp4(code, exponent), mxfp4_value(code, exponent)),
                      "code %u, exponent %u: %g", code, exponent,
                      (double)linear_from_mxfp4(code, exponent));
}

/* Element 2b lies in the low half of byte b; each group of 32 has its own scale. */
static void mxfp4_packing(void) {
    unsigned char data[2][32], scale[2][2] = {{127, 128}, {120, 130}};
    for (size_t i = 0; i < sizeof data; i++) data[i / 32][i % 32] = (unsigned char)(37 * i + 11);
    linear w = {LINEAR_MXFP4, 2, 64, data[0], scale[0]};
    for (size_t row = 0; row < 2; row++) {
        float out[64];
        linear_expand(&w, row, 0, 64, out);
        for (size_t i = 0; i < 64; i++) {
            unsigned code = i % 2 ? data[row][i / 2] / 16u : data[row][i / 2] % 16u;
            CHECK(same(out[i], mxfp4_value(code, scale[row][i / 32])));
        }
        linear_expand(&w, row, 32, 32, out);
        CHECK(same(out[0], mxfp4_value(data[row][16] % 16u, scale[row][1])));
    }
}

/* A matrix of one type over random bytes that are finite numbers, at an odd address. */
typedef struct matrix {
    linear w;
    unsigned char *bytes;
    double *values; /* [rows][cols] */
} matrix;

static void random_element(linear_type type, unsigned char *at) {
    float value = test_normal();
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (type == LINEAR_F16) bits = (uint32_t)(test_random_u64() & 0xbbffu) << 16; /* below 2 */
    for (int i = type == LINEAR_F32 ? 0 : 2; i < 4; i++) *at++ = (unsigned char)(bits >> 8 * i);
}

static matrix matrix_new(linear_type type, size_t rows, size_t cols) {
    matrix m;
    size_t row_bytes = linear_row_bytes(type, cols), groups = rows * cols / LINEAR_MXFP4_GROUP;
    m.bytes = (unsigned char *)test_alloc(1 + rows * row_bytes + groups);
    m.w.type = type, m.w.rows = rows, m.w.cols = cols;
    m.w.data = m.bytes + 1;
    m.w.scale = type == LINEAR_MXFP4 ? m.bytes + 1 + rows * row_bytes : NULL;
    size_t step = type == LINEAR_MXFP4 ? 1 : row_bytes / cols;
    for (size_t i = 1; i < 1 + rows * row_bytes; i += step)
        if (type == LINEAR_MXFP4)
            m.bytes[i] = (unsigned char)test_random_u64();
        else
            random_element(type, m.bytes + i);
    for (size_t i = 0; i < groups; i++)
        m.bytes[1 + rows * row_bytes + i] = (unsigned char)(120 + test_random_u64() % 8);
    float *row = test_floats(cols);
    m.values = (double *)test_alloc(rows * cols * sizeof(double));
    for (size_t r = 0; r < rows; r++) {
        linear_expand(&m.w, r, 0, cols, row);
        for (size_t c = 0; c < cols; c++) m.values[r * cols + c] = (double)row[c];
    }
    free(row);
    return m;
}

static void matrix_free(matrix *m) {
    free(m->bytes);
    free(m->values);
}

/* One matrix times vectors against float64, with rows of x and y wider than they need be. */
static void check_products(const linear_run *run, linear_type type, size_t rows, size_t cols,
                           size_t n) {
    matrix m = matrix_new(type, rows, cols);
    size_t stride = rows + cols + 3;
    float *x = test_floats(n * stride), *y = test_floats(n * stride);
    test_fill_normal(x, n * stride);
    for (size_t i = 0; i < n * stride; i++) y[i] = 77;
    linear_apply(run, &m.w, x, n, stride, y, stride);
    for (size_t t = 0; t < n; t++) {
        for (size_t r = 0; r < rows; r++) {
            double want = 0, size = 0; /* of the sum, and of its terms */
            for (size_t i = 0; i < cols; i++) {
                double term = (double)x[t * stride + i] * m.values[r * cols + i];
                want += term, size += fabs(term);
            }
            CHECK_AT_MOST("product", fabs((double)y[t * stride + r] - want), 5e-7 * size);
        }
        for (size_t i = rows; i < stride; i++) CHECK(y[t * stride + i] == 77);
    }
    free(x), free(y);
    matrix_free(&m);
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

/* A token's bits do not depend on how many others are in the call. */
static void tokens_are_independent(void) {
    matrix m = matrix_new(LINEAR_BF16, 9, 100);
    float *x = test_floats(70 * 100), *together = test_floats(70 * 9), alone[9];
    test_fill_normal(x, 70 * 100);
    linear_apply(NULL, &m.w, x, 70, 100, together, 9);
    for (size_t t = 0; t < 70; t++) {
        linear_apply(NULL, &m.w, x + t * 100, 1, 100, alone, 9);
        CHECK(memcmp(alone, together + t * 9, sizeof alone) == 0);
    }
    free(x), free(together);
    matrix_free(&m);
}

static void some_rows(void) {
    float x[64], whole[6], part[2];
    test_fill_normal(x, 64);
    for (int type = LINEAR_F32; type <= LINEAR_MXFP4; type++) {
        matrix m = matrix_new((linear_type)type, 6, 64);
        linear rows = linear_rows(&m.w, 3, 2);
        linear_apply(NULL, &m.w, x, 1, 64, whole, 6);
        linear_apply(NULL, &rows, x, 1, 64, part, 2);
        CHECK(part[0] == whole[3] && part[1] == whole[4]);
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
    for (int i = LINEAR_F32; i <= LINEAR_MXFP4; i++)
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
    TEST(tokens_are_independent);
    TEST(some_rows);
    TEST(rms_norm);
    return test_summary();
}
