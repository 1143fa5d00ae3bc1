/* test_recall.c - the program on the models that the repository carries, on a spoilt one, and on
 * those that it is not for. */
#define SAFETENSORS_IMPLEMENTATION
#include "../examples/safetensors.h"

#define PROGRAM "recall"
#include "program.h"

#define HYBRID "examples/models/recall-hybrid"
#define KDA "examples/models/recall-kda"

/* The numbers behind pairs and tokens in the table whose heading begins with `heading`, in the row
 * of that many pairs. */
static size_t row_of(const char *text, const char *heading, size_t pairs, double values[4]) {
    char start[40];
    const char *at = strstr(text, heading);
    snprintf(start, sizeof start, "\n%5zu  %6zu  ", pairs, 4 * pairs + 1);
    at = at ? strstr(at, start) : NULL;
    CHECK_MSG(at, "no row of %zu pairs under \"%s\" in: %s", pairs, heading, text);
    if (!at) return 0;
    char line[200];
    snprintf(line, sizeof line, "%.*s", (int)strcspn(at + strlen(start), "\n"), at + strlen(start));
    int n = sscanf(line, "%lf %lf %lf %lf", &values[0], &values[1], &values[2], &values[3]);
    return n > 0 ? (size_t)n : 0;
}

/* At 128 pairs the hybrid still answers, and KDA alone, at this size and budget, often does not. */
static void shipped_models(void) {
    double accuracy[4] = {0, 0, 0, 0}, bytes[4] = {0, 0, 0, 0};
    outcome o = run_ok("--pairs 128 --queries 1024");
    CHECK(row_of(o.out, "Accuracy", 128, accuracy) == 3);
    CHECK(row_of(o.out, "Bytes", 128, bytes) == 3);
    double harmonic = 0;
    for (int i = 1; i <= 128; i++) harmonic += 1.0 / i;
    /* The pair that is asked for, or another of the same of 128 values. */
    CHECK_AT_MOST("chance", fabs(accuracy[0] - (harmonic / 128 * 127 / 128 + 1.0 / 128)), 5e-4);
    CHECK(accuracy[1] >= 0.99 && accuracy[1] <= 1);
    CHECK(accuracy[2] >= 0.5 && accuracy[2] <= 0.9);
    /* A KDA layer: 4 states of 16 x 16, and 3 tokens of 3 x 64 channels. MLA: 48 for a token. */
    double kda = 4.0 * (4 * 16 * 16 + 3 * 3 * 64), mla = 4.0 * 513 * 48;
    CHECK(bytes[0] == 3 * kda + mla && bytes[1] == 4 * kda && bytes[2] == 4 * mla);
    outcome_free(&o);
}

static void few_pairs_are_easy(void) {
    double accuracy[4] = {0, 0, 0, 0};
    outcome o = run_ok("--pairs 8 --queries 1024");
    CHECK(row_of(o.out, "Accuracy", 8, accuracy) == 3);
    CHECK(accuracy[1] >= 0.99 && accuracy[2] >= 0.99);
    outcome_free(&o);
}

static void longer_than_trained(void) {
    double accuracy[4] = {0, 0, 0, 0};
    outcome o = run_ok(HYBRID " --pairs 382 --queries 1");
    CHECK(row_of(o.out, "Accuracy", 382, accuracy) == 2);
    CHECK(accuracy[1] >= 0.9);
    outcome_free(&o);
}

/* Without --pairs all seven rows are there. */
static void all_rows(void) {
    static const size_t counts[] = {8, 16, 32, 64, 128, 256, 381};
    double values[4];
    outcome o = run_ok(KDA " --queries 1");
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        CHECK(row_of(o.out, "Accuracy", counts[i], values) == 2);
        CHECK(row_of(o.out, "Bytes", counts[i], values) == 2);
    }
    outcome_free(&o);
}

/* Tables name a model by the last part of its path, however that is written. */
static void names_are_last_parts(void) {
    static const char *const paths[] = {"examples//models//recall-kda//", "./" KDA "/"};
    for (size_t i = 0; i < 2; i++) {
        char arguments[200];
        snprintf(arguments, sizeof arguments, "%s --pairs 8 --queries 1", paths[i]);
        outcome o = run_ok(arguments);
        CHECK_MSG(strstr(o.out, "chance       recall-kda"), "%s", o.out);
        CHECK_MSG(strstr(o.out, "every layer of recall-kda"), "%s", o.out);
        outcome_free(&o);
    }
}

static void seeds(void) {
    double values[4][4];
    static const char *const runs[] = {"--seed 3", "--seed 3 --threads 1", "--seed 4", ""};
    memset(values, 0, sizeof values);
    for (size_t i = 0; i < 4; i++) {
        char arguments[200];
        snprintf(arguments, sizeof arguments, KDA " --pairs 128 --queries 512 %s", runs[i]);
        outcome o = run_ok(arguments);
        CHECK(row_of(o.out, "Accuracy", 128, values[i]) == 2);
        outcome_free(&o);
    }
    CHECK(values[0][1] == values[1][1]);
    CHECK(values[0][1] != values[2][1] || values[0][1] != values[3][1]);
}

/* f16 of +-0.25 to +-0.5. */
static void spoil_all(const st_tensor *tensor, unsigned char *data) {
    CHECK(tensor->dtype == ST_F16);
    test_seed(5);
    for (size_t i = 0; i < tensor->elements; i++) {
        uint64_t r = test_random_u64();
        data[2 * i] = (unsigned char)(r & 255);
        data[2 * i + 1] = (unsigned char)(0x34 | (r >> 8 & 0x83));
    }
}

/* A model of random embeddings knows no key from another, and no key from a value. */
static void a_spoilt_model_is_near_chance(void) {
    char directory[300];
    double accuracy[4] = {0, 1, 0, 0};
    write_spoilt(HYBRID, "model.embed_tokens.weight", spoil_all,
                 temporary("recall-spoilt", directory));
    outcome o = run_ok("WORK/../recall-spoilt --pairs 64 --queries 1024");
    CHECK(row_of(o.out, "Accuracy", 64, accuracy) == 2);
    CHECK_AT_MOST("a spoilt model", accuracy[1], 0.081);
    outcome_free(&o);
}

static void refusals(void) {
    check_refused("examples/models/text-plain", 1,
                  "examples/models/text-plain: expected vocab_size 512");
    check_refused("examples/models/text-plain", 1, "found 256");
    check_refused(KDA " no/such/model --pairs 1 --queries 1", 1, "no/such/model");
    check_refused("no/such/model " KDA " --pairs 1 --queries 1", 1, "no/such/model");
    check_refused("a b c d e f g h i", 2, "\"i\"");
    check_refused("--pairs 0", 2, "--pairs");
    check_refused("--pairs 383", 2, "--pairs");
    check_refused("--queries 0", 2, "--queries");
    check_refused("--threads 0", 2, "--threads");
    check_refused("--seed x", 2, "--seed");
    check_refused("--nothing", 2, "\"--nothing\"");
}

static void help_is_not_an_error(void) {
    outcome o = run_ok("--help");
    CHECK(o.n_err == 0 && strstr(o.out, "usage: recall [MODEL_DIR ...]"));
    outcome_free(&o);
}

int main(void) {
    temporary(PROGRAM, work);
    TEST(shipped_models);
    TEST(few_pairs_are_easy);
    TEST(longer_than_trained);
    TEST(all_rows);
    TEST(names_are_last_parts);
    TEST(seeds);
    TEST(a_spoilt_model_is_near_chance);
    TEST(refusals);
    TEST(help_is_not_an_error);
    return test_summary();
}
