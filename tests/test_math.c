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
    for (uint32_t bits = 0; bits < 0xFF800000u - 1021u; bits += 1021u) {
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

/* The fixed shape of a sum, written out a second time from the manual. */
static float sum_by_the_manual(const float *x, const float *y, size_t n) {
    float lane[16] = {0};
    for (size_t i = 0; i < (n + 15) / 16 * 16; i++)
        lane[i % 16] = fmaf(i < n ? x[i] : 0.0f, i < n ? y[i] : 0.0f, lane[i % 16]);
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
    TEST(sums_have_the_documented_shape);
    return test_summary();
}
