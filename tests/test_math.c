/* The header's own exp, sigmoid and softplus against libm's double functions. */
#define KDA_IMPLEMENTATION
#include "../kda.h"
#include "reference.h"
#include "test.h"

static float from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* |got - want| in units of the last place of a float next to `want`. */
static double ulps(float got, double want) {
    int exponent;
    if (isnan(got)) return HUGE_VAL;
    if (want > (double)FLT_MAX) return isinf(got) ? 0 : HUGE_VAL;
    frexp(want, &exponent);
    if (exponent < -125) exponent = -125; /* subnormal: fixed spacing */
    return fabs((double)got - want) / ldexp(1, exponent - 24);
}

static double exact_exp(double x) {
    return exp(x);
}

/* The worst error over floats of both signs, about 4 million of them evenly over the bit patterns,
 * offset by a prime so that all exponents and many mantissas are met. */
static void check_function(const char *name, float (*function)(float), double (*exact)(double)) {
    double worst = 0;
    float at = 0;
    for (uint32_t bits = 0; bits < 0xFF800000u - 1021u; bits += 1021u * TEST_ONE_IN(31)) {
        float x = from_bits(bits);
        if (isnan(x)) continue;
        double error = ulps(function(x), exact((double)x));
        if (!(error <= worst)) worst = error, at = x;
    }
    printf("  %s: worst %.3f ulp, at %.9g\n", name, worst, (double)at);
    CHECK_AT_MOST(name, worst, 2.0);
}

static void exp_within_2_ulp(void) {
    check_function("exp", kda_exp, exact_exp);
}
static void sigmoid_within_2_ulp(void) {
    check_function("sigmoid", kda_sigmoid, reference_sigmoid);
}
static void softplus_within_2_ulp(void) {
    check_function("softplus", kda_softplus, reference_softplus);
}

static void values_at_the_ends(void) {
    CHECK(kda_exp(-INFINITY) == 0.0f && !signbit(kda_exp(-INFINITY)));
    CHECK(kda_exp(INFINITY) == INFINITY);
    CHECK(kda_exp(0.0f) == 1.0f && kda_exp(-0.0f) == 1.0f);
    CHECK(kda_exp(-1000.0f) == 0.0f);
    CHECK(kda_exp(-103.9f) == 0x1p-149f); /* the least subnormal: not flushed */
    CHECK(isnan(kda_exp(NAN)));
    CHECK(kda_sigmoid(-INFINITY) == 0.0f && kda_sigmoid(INFINITY) == 1.0f);
    CHECK(kda_sigmoid(0.0f) == 0.5f && isnan(kda_sigmoid(NAN)));
    CHECK(kda_softplus(-INFINITY) == 0.0f && kda_softplus(INFINITY) == INFINITY);
    CHECK(kda_softplus(1e4f) == 1e4f && kda_softplus(-1e4f) == 0.0f);
    CHECK(isnan(kda_softplus(NAN)));
}

/* Products that fall between two floats, and a third number far below, or none: what is right is
 * plain from the digits, and an fmaf that rounds to double or wider first gets it wrong. */
static void multiply_add_rounds_once(void) {
    const float x = 1 + 0x1p-12f, up = 1 + 0x1p-11f + 0x1p-23f, down = 1 + 0x1p-11f;
    for (int power = -140; power < -30; power++) {
        float far = ldexpf(1, power);
        CHECK(kdai_fma(x, x, far) == up && kdai_fma(x, x, -far) == down);
        CHECK(kdai_fma(-x, x, far) == -down && kdai_fma(-x, x, -far) == -up);
    }
    CHECK(kdai_fma(x, x, 0) == down); /* a tie: to even */
    CHECK(kdai_fma(x, x, -1) == 0x1p-11f + 0x1p-24f);
    /* among the subnormals: 1.5 * 2^-150, half of that and a little more, signs of zero */
    CHECK(kdai_fma(0x1p-75f, 0x1.8p-75f, 0) == 0x1p-149f);
    CHECK(kdai_fma(0x1p-75f, 0x1p-75f, 0) == 0.0f);
    CHECK(kdai_fma(0x1p-75f, 0x1p-75f, 0x1p-149f) == 0x1p-148f);
    CHECK(kdai_fma(0x1.000002p-75f, 0x1p-75f, 0) == 0x1p-149f);
    CHECK(signbit(kdai_fma(-0.0f, 1, -0.0f)) && !signbit(kdai_fma(-0.0f, 1, 0.0f)));
    CHECK(kdai_fma(FLT_MAX, 2, -FLT_MAX) == FLT_MAX && isinf(kdai_fma(FLT_MAX, 2, 0)));
    CHECK(isinf(kdai_fma(INFINITY, 1, 1)) && isnan(kdai_fma(INFINITY, 0, 1)));
    CHECK(isnan(kdai_fma(NAN, 1, 1)) && isnan(kdai_fma(INFINITY, 1, -INFINITY)));
}

/* The fixed shape of a sum, written out a second time from the manual. */
static float sum_by_the_manual(const float *x, const float *y, size_t n) {
    float lane[16] = {0};
    for (size_t i = 0; i < (n + 15) / 16 * 16; i++)
        lane[i % 16] = kdai_fma(i < n ? x[i] : 0.0f, i < n ? y[i] : 0.0f, lane[i % 16]);
    for (size_t i = 0; i < 8; i++) lane[i] += lane[i + 8];
    for (size_t i = 0; i < 4; i++) lane[i] += lane[i + 4];
    return (lane[0] + lane[2]) + (lane[1] + lane[3]);
}

static void sums_have_the_documented_shape(void) {
    float x[300] = {0}, y[300] = {0};
    test_seed(11);
    for (size_t n = 0; n <= 300; n++) {
        test_fill_normal(x, n);
        test_fill_normal(y, n);
        float got = kdai_dot(x, y, n), want = sum_by_the_manual(x, y, n);
        CHECK_MSG(memcmp(&got, &want, sizeof got) == 0, "n = %zu: %a, want %a", n, (double)got,
                  (double)want);
    }
}

int main(void) {
    TEST(exp_within_2_ulp);
    TEST(sigmoid_within_2_ulp);
    TEST(softplus_within_2_ulp);
    TEST(values_at_the_ends);
    TEST(multiply_add_rounds_once);
    TEST(sums_have_the_documented_shape);
    return test_summary();
}
