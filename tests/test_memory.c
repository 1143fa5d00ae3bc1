/* test_memory.c - the program's tables against what theory says of each rule, and its picture.
 *
 * In linear attention what is read of a key is the sum of all its values, and of every other write
 * (k . k')^2, 1 / dim in the mean, of another value: errors add as squares. */
#define SAFETENSORS_IMPLEMENTATION
#include "../examples/safetensors.h"

#define PROGRAM "memory"
#include "program.h"

/* Row `point` of the table that begins with `title`; returns how many numbers are behind it. */
static size_t row_of(const char *text, const char *title, int point, double values[6]) {
    char start[40], line[300];
    const char *at = strstr(text, title);
    snprintf(start, sizeof start, "\n%11d  ", point);
    at = at ? strstr(at, start) : NULL;
    CHECK_MSG(at, "no row %d under \"%s\" in: %s", point, title, text);
    if (!at) return 0;
    snprintf(line, sizeof line, "%.*s", (int)strcspn(at + strlen(start), "\n"), at + strlen(start));
    int n = sscanf(line, "%lf %lf %lf %lf %lf %lf", &values[0], &values[1], &values[2], &values[3],
                   &values[4], &values[5]);
    return n > 0 ? (size_t)n : 0;
}

static outcome tables; /* of a run with no options */

static void check_near(const char *what, double value, double want) {
    CHECK_MSG(fabs(value - want) <= 0.1 * want, "%s: %.3f, expected %.3f", what, value, want);
}

static void overwriting(void) {
    static const int times[] = {0, 1, 2, 4, 8, 16};
    double v[6]; /* quiet and busy items of linear attention, scalar gate, delta rule */
    for (size_t i = 0; i < 6; i++) {
        double r = times[i];
        if (row_of(tables.out, "Overwrites", times[i], v) != 6) continue;
        check_near("linear, quiet", v[0], sqrt((7 + 8 * (r + 1)) / 64));
        check_near("linear, busy", v[1], sqrt(r + (8 + 7 * (r + 1)) / 64));
        /* The gate's best is at least as good as not closing it. */
        CHECK(v[2] * v[2] + v[3] * v[3] <= v[0] * v[0] + v[1] * v[1] + 1e-9);
        CHECK(v[4] < 0.5 && v[5] < 0.4); /* whatever the number */
        if (r >= 2) CHECK(v[2] > 0.9);   /* has forgotten the quiet ones */
        if (r >= 4) CHECK(v[1] > 6 * v[5]);
    }
}

static void distractors(void) {
    static const int numbers[] = {0, 8, 16, 32, 64, 128, 256};
    double v[6];
    for (size_t i = 0; i < 7; i++) {
        if (row_of(tables.out, "Distractors", numbers[i], v) != 2) continue;
        check_near("linear", v[0], sqrt((7 + (double)numbers[i]) / 64));
        CHECK_AT_MOST("delta rule", v[1], 1.1 * sqrt(2));
    }
    check_near("delta rule, full", v[1], sqrt(2));
}

static void topics(void) {
    static const int numbers[] = {2, 4, 8, 16, 32};
    enum { LINEAR, GATED, DELTA, GATED_DELTA, KDA };
    double lasting[6], current[6], before[6];
    for (size_t i = 0; i < 5; i++) {
        if (row_of(tables.out, "Topics: the lasting", numbers[i], lasting) != 5) continue;
        if (row_of(tables.out, "Topics: the topic at hand", numbers[i], current) != 5) continue;
        if (row_of(tables.out, "Topics: the topic before", numbers[i], before) != 5) continue;
        double kept = pow(0.05, numbers[i] - 1);
        CHECK_AT_MOST("lasting, scalar gate", fabs(lasting[GATED] - (1 - kept)), 1e-3);
        CHECK_AT_MOST("lasting, gated delta", fabs(lasting[GATED_DELTA] - (1 - kept)), 1e-3);
        CHECK_AT_MOST("lasting, delta", lasting[DELTA], 5e-4);
        CHECK_AT_MOST("lasting, KDA", lasting[KDA], 5e-4);
        check_near("current, linear", current[LINEAR], sqrt((numbers[i] - 1) * 8 / 32.0));
        CHECK_AT_MOST("current, delta", current[DELTA], 5e-4);
        CHECK_AT_MOST("current, KDA", current[KDA], 5e-4);
        /* 8 of the 32 directions were written anew. */
        check_near("before, linear", before[LINEAR], 1);
        check_near("before, delta", before[DELTA], 0.75);
        CHECK_AT_MOST("before, scalar gate", before[GATED], 0.07);
        CHECK_AT_MOST("before, KDA", before[KDA], 0.07);
    }
}

static void picture(void) {
    size_t size, charts = 0;
    outcome o = run_ok("--trials 1 --svg WORK/memory.svg"), plain = run_ok("--trials 1");
    CHECK(strcmp(o.out, plain.out) == 0);
    char *text = read_file(work, "memory.svg", &size);
    static const char *const titles[] = {"Overwrites: ", "Distractors: ", "Topics: the lasting",
                                         "Topics: the topic at hand", "Topics: the topic before"};
    for (size_t i = 0; i < 5; i++) charts += strstr(text, titles[i]) != NULL;
    CHECK(charts == 5 && strncmp(text, "<svg ", 5) == 0 && strstr(text, "</svg>"));
    free(text);
    outcome_free(&o), outcome_free(&plain);
}

static void refusals(void) {
    outcome o = run("--trials 1 --svg WORK/no/such/file");
    CHECK(o.status == 1 && strstr(o.err, "memory: ") == o.err && strstr(o.err, "no/such/file"));
    outcome_free(&o);
    check_refused("file", 2, "\"file\"");
    check_refused("--svg", 2, "--svg");
    check_refused("--trials 0", 2, "--trials");
    o = run_ok("--help");
    CHECK(o.n_err == 0 && strstr(o.out, "usage: memory"));
    outcome_free(&o);
}

int main(void) {
    temporary(PROGRAM, work);
    tables = run_ok("");
    TEST(overwriting);
    TEST(distractors);
    TEST(topics);
    TEST(picture);
    TEST(refusals);
    outcome_free(&tables);
    return test_summary();
}
