/* test.h - the test harness: counts cases, compares numbers so that NaN fails, seeds a generator.
 *
 *     static void adds(void) { CHECK(1 + 1 == 2); }
 *     int main(void) { TEST(adds); return test_summary(); }
 *
 * A case fails when any CHECK in it fails; it goes on after a failure, so that one run shows all.
 */
#ifndef TEST_H
#define TEST_H

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static size_t test_passed, test_failed, test_skipped;
static size_t test_case_failures; /* failed checks in the running case */
static int test_case_skipped;
static const char *test_case_name = "";

/* Called before each report; a case that fails in a loop prints its first few failures only. */
static inline int test_report(const char *file, int line) {
    test_case_failures++;
    if (test_case_failures > 10) return 0;
    printf("FAIL %s (%s:%d): ", test_case_name, file, line);
    return 1;
}

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition) && test_report(__FILE__, __LINE__)) printf("%s\n", #condition);           \
    } while (0)

/* A check that explains itself with printf arguments. */
#define CHECK_MSG(condition, ...)                                                                  \
    do {                                                                                           \
        if (!(condition) && test_report(__FILE__, __LINE__)) {                                     \
            printf(__VA_ARGS__);                                                                   \
            printf("\n");                                                                          \
        }                                                                                          \
    } while (0)

static inline void test_run(const char *name, void (*function)(void)) {
    test_case_name = name;
    test_case_failures = 0;
    test_case_skipped = 0;
    function();
    if (test_case_failures > 10) printf("FAIL %s: %zu checks in all\n", name, test_case_failures);
    if (test_case_failures)
        test_failed++;
    else if (test_case_skipped)
        test_skipped++;
    else
        test_passed++;
    fflush(stdout);
}
#define TEST(function) test_run(#function, function)

static inline void test_skip(const char *why) {
    test_case_skipped = 1;
    printf("SKIP %s: %s\n", test_case_name, why);
}

/* Whether there is a device that is always full; a test that has none says so. */
static inline int test_has_full_device(void) {
    FILE *device = fopen("/dev/full", "wb");
    if (device)
        fclose(device);
    else
        test_skip("no /dev/full here");
    return device != NULL;
}

/* Prints the closing line; the exit status of the program. */
static inline int test_summary(void) {
    printf("%zu passed, %zu failed, %zu skipped\n", test_passed, test_failed, test_skipped);
    return test_failed != 0 || test_passed == 0;
}

/* ||got - want||_2 / ||want||_2 (absolute where want is all zero); NaN when either holds one. */
static inline double test_relative(double difference, double norm) {
    return norm > 0 ? sqrt(difference / norm) : sqrt(difference);
}
#define TEST_RELATIVE_L2(name, got_type, want_type)                                                \
    static inline double name(const got_type *got, const want_type *want, size_t n) {              \
        double difference = 0, norm = 0;                                                           \
        for (size_t i = 0; i < n; i++) {                                                           \
            double d = (double)got[i] - (double)want[i];                                           \
            difference += d * d;                                                                   \
            norm += (double)want[i] * (double)want[i];                                             \
        }                                                                                          \
        return test_relative(difference, norm);                                                    \
    }
TEST_RELATIVE_L2(test_relative_l2, float, double)
TEST_RELATIVE_L2(test_relative_l2_f32, float, float)
TEST_RELATIVE_L2(test_relative_l2_f64, double, double)

/* `value <= bound`, written so that NaN fails, with both printed. */
#define CHECK_AT_MOST(what, value, bound)                                                          \
    do {                                                                                           \
        double test_value_ = (value), test_bound_ = (bound);                                       \
        if (!(test_value_ <= test_bound_) && test_report(__FILE__, __LINE__))                      \
            printf("%s: %.3e, at most %.3e allowed\n", (what), test_value_, test_bound_);          \
    } while (0)

/* xorshift64*: the same numbers everywhere, from a printed or fixed seed. */
static uint64_t test_random_state = 0x9E3779B97F4A7C15u;
static inline void test_seed(uint64_t seed) {
    test_random_state = seed * 0x9E3779B97F4A7C15u + 0xD1B54A32D192ED03u;
}
static inline uint64_t test_random_u64(void) {
    uint64_t x = test_random_state;
    x ^= x >> 12;
    x ^= x << 25;
    x ^= x >> 27;
    test_random_state = x;
    return x * 0x2545F4914F6CDD1Du;
}
/* Uniform in [0, 1). */
static inline double test_uniform(void) {
    return (double)(test_random_u64() >> 11) * 0x1p-53;
}
static inline float test_uniform_f32(float low, float high) {
    return (float)((double)low + ((double)high - (double)low) * test_uniform());
}
/* Standard normal (sum of twelve uniforms: ample for inputs). */
static inline float test_normal(void) {
    double sum = -6;
    for (int i = 0; i < 12; i++) sum += test_uniform();
    return (float)sum;
}
static inline void test_fill_normal(float *x, size_t n) {
    for (size_t i = 0; i < n; i++) x[i] = test_normal();
}

/* Emulated processors are tens of times slower: for them, with TEST_BRIEF defined, loops whose length
 * is for thoroughness take one case in n. */
#ifdef TEST_BRIEF
#define TEST_ONE_IN(n) (n)
#else
#define TEST_ONE_IN(n) 1
#endif

/* FNV-1a of the bits of numbers, word by word: the same on machines of either byte order. */
#define TEST_HASH_START 0xcbf29ce484222325u
static inline uint64_t test_hash_f32(uint64_t hash, const float *x, size_t n) {
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        hash = (hash ^ bits) * 0x100000001b3u;
    }
    return hash;
}
static inline uint64_t test_hash_f64(uint64_t hash, const double *x, size_t n) {
    for (size_t i = 0; i < n; i++) {
        uint64_t bits;
        memcpy(&bits, x + i, sizeof bits);
        hash = (hash ^ bits) * 0x100000001b3u;
    }
    return hash;
}

/* Zeroed memory, or the end of the run: a test cannot go on without. */
static inline void *test_alloc(size_t bytes) {
    void *p = calloc(bytes ? bytes : 1, 1);
    if (!p) {
        fprintf(stderr, "out of memory: %zu bytes\n", bytes);
        exit(2);
    }
    return p;
}
static inline float *test_floats(size_t n) {
    return (float *)test_alloc(n * sizeof(float));
}
/* Memory that nobody has prepared: NaN as float32 or f16, and no address. */
static inline void *test_scratch(size_t bytes) {
    return memset(test_alloc(bytes), 0xFF, bytes);
}

#endif
