/* test_perplexity.c - the program against the reference's logits, against the definition of its
 * windows, and on the text model that the repository carries. */
#define SAFETENSORS_IMPLEMENTATION
#include "../examples/safetensors.h"

#define PROGRAM "perplexity"
#include "program.h"

#define LINEAR_TINY MODELS "kimi-linear-tiny"

/* What a run prints, or NaN; n: how many it says it scored. */
static double bits_printed(const char *arguments, size_t n) {
    outcome o = run_ok(arguments);
    double bits = 0;
    size_t scored = 0;
    int fields = sscanf(o.out, "%lf bits per %*[a-z]: %zu of", &bits, &scored);
    CHECK_MSG(fields == 2 && scored == n, "%s: %s", arguments, o.out);
    outcome_free(&o);
    return fields == 2 ? bits : (double)NAN;
}

static double bits_of(const double *logits, size_t vocab, uint32_t id) {
    double sum = 0;
    for (size_t i = 0; i < vocab; i++) sum += exp2((logits[i] - logits[id]) / log(2));
    return log2(sum);
}

/* One window over all of it: the mean over the reference's own logits. */
static void one_window_matches_the_reference(void) {
    golden g = golden_open(LINEAR_TINY);
    double sum = 0;
    for (size_t t = 0; t + 1 < g.n; t++)
        sum += bits_of(g.logits + t * g.vocab, g.vocab, g.ids[t + 1]);
    write_ids("ids", g.ids, g.n);
    double bits = bits_printed(LINEAR_TINY " WORK/ids --tokens --window 1000", g.n - 1);
    CHECK_AT_MOST("bits", fabs(bits - sum / (double)(g.n - 1)), 1e-4);
    golden_free(&g);
}

/* Bits of ids[t + 1], ids [n], given ids[start .. t], for the first `window` t from start on: by
 * `generate --logits`. */
static void bits_of_window(const uint32_t *ids, size_t n, size_t start, size_t window,
                           double *bits) {
    size_t count = n - start < window ? n - start : window;
    write_ids("window", ids + start, count);
    outcome o = run_program("generate", LINEAR_TINY " --tokens WORK/window --logits WORK/logits");
    CHECK(o.status == 0);
    outcome_free(&o);
    float *logits = read_floats("logits", count * 256);
    for (size_t t = 0; t < count && start + t + 1 < n; t++) {
        double row[256];
        for (size_t i = 0; i < 256; i++) row[i] = (double)logits[t * 256 + i];
        bits[t] = bits_of(row, 256, ids[start + t + 1]);
    }
    free(logits);
}

/* The definition of examples/train/text.py, in its order: windows first, then what each scores. */
static double bits_by_definition(const uint32_t *ids, size_t n, size_t window, size_t stride) {
    double total = 0;
    size_t scored = 0, start = 0;
    for (;; start += stride) {
        double bits[200];
        bits_of_window(ids, n, start, window, bits);
        for (size_t place = 1; place <= window; place++)
            if (start + place < n && (start == 0 || place > window - stride))
                total += bits[place - 1], scored++;
        if (start + window + 1 >= n) break;
    }
    CHECK(scored == n - 1);
    return total / (double)scored;
}

static void windows_are_those_of_training(void) {
    static const struct {
        size_t n, window, stride;
    } cases[] = {{110, 40, 16}, {110, 40, 40}, {97, 32, 16}, {98, 32, 16}, {110, 70, 7}};
    golden g = golden_open(LINEAR_TINY);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char arguments[300];
        size_t n = cases[i].n, window = cases[i].window, stride = cases[i].stride;
        write_ids("ids", g.ids, n);
        snprintf(arguments, sizeof arguments,
                 LINEAR_TINY " WORK/ids --tokens --window %zu --stride %zu", window, stride);
        double bits = bits_printed(arguments, n - 1);
        double want = bits_by_definition(g.ids, n, window, stride);
        CHECK_MSG(fabs(bits - want) <= 1e-4, "%s: %.5f, expected %.5f", arguments, bits, want);
    }
    golden_free(&g);
}

/* A part of a file is the same as a file of that part, bytes the same as their ids. */
static void parts_and_bytes(void) {
    uint32_t ids[200];
    char bytes[200];
    test_seed(6);
    for (size_t i = 0; i < 200; i++) ids[i] = (uint32_t)(test_uniform() * 256);
    for (size_t i = 0; i < 200; i++) bytes[i] = (char)(unsigned char)ids[i];
    write_ids("ids", ids + 30, 120);
    write_file(work, "bytes", bytes, 200);
    double want = bits_printed(LINEAR_TINY " WORK/ids --tokens --window 50", 119);
    double part = bits_printed(LINEAR_TINY " WORK/bytes --window 50 --from 30 --to 150", 119);
    double standard =
        bits_printed(LINEAR_TINY " - --window 50 --from 30 --to 150 <WORK/bytes", 119);
    double one = bits_printed(LINEAR_TINY " WORK/ids --tokens --window 50 --threads 1", 119);
    CHECK(part == want && standard == want && one == want);
    CHECK(bits_printed(LINEAR_TINY " WORK/bytes --window 50", 199) != want);
}

/* The trained model knows English of its kind from other bytes. */
static void text_model_foresees_text(void) {
    static const char verse[] =
        "And the king said unto them, Go ye up into the mountain, and bring "
        "the people of the land unto me, that I may speak with them.";
    char reversed[sizeof verse];
    for (size_t i = 0; i + 1 < sizeof verse; i++) reversed[i] = verse[sizeof verse - 2 - i];
    write_file(work, "verse", verse, sizeof verse - 1);
    write_file(work, "reversed", reversed, sizeof verse - 1);
    double forward = bits_printed("examples/models/text-attnres WORK/verse", sizeof verse - 2);
    double backward = bits_printed("examples/models/text-attnres WORK/reversed", sizeof verse - 2);
    printf("a sentence %.3f bits per byte, reversed %.3f\n", forward, backward);
    CHECK_AT_MOST("a sentence", forward, 2);
    CHECK(backward > 3);
}

/* One number of the head that is none: its row's logit is none for every token. */
static void spoil_one(const st_tensor *tensor, unsigned char *data) {
    CHECK(tensor->dtype == ST_BF16);
    data[0] = 0xc0, data[1] = 0x7f;
}

static void numbers_that_are_none_are_told(void) {
    char directory[300];
    write_spoilt(LINEAR_TINY, "lm_head.weight", spoil_one, temporary("perplexity-nan", directory));
    write_file(work, "bytes", "abcdef", 6);
    check_refused("WORK/../perplexity-nan WORK/bytes --from 2", 1,
                  "perplexity-nan: the model's logits for token 3 of ");
}

static void refusals(void) {
    write_file(work, "bytes", "abcdef", 6);
    write_file(work, "ids", "1 2 256 3", 9);
    check_refused("", 2, "MODEL_DIR and FILE");
    check_refused(LINEAR_TINY, 2, "MODEL_DIR and FILE");
    check_refused(LINEAR_TINY " WORK/bytes more", 2, "\"more\"");
    check_refused(LINEAR_TINY " WORK/bytes --window 0", 2, "--window");
    check_refused(LINEAR_TINY " WORK/bytes --stride 0", 2, "--stride");
    check_refused(LINEAR_TINY " WORK/bytes --window 10 --stride 11", 2, "--stride");
    check_refused(LINEAR_TINY " WORK/bytes --from", 2, "--from");
    check_refused(LINEAR_TINY " WORK/bytes --depth 3", 2, "\"--depth\"");
    check_refused(LINEAR_TINY " WORK/no-such-file", 1, "no-such-file");
    check_refused(LINEAR_TINY " WORK", 1, "cannot read");
    check_refused(LINEAR_TINY " WORK/bytes --from 5", 1, "found 1");
    check_refused(LINEAR_TINY " WORK/bytes --from 9", 1, "found 0");
    check_refused(LINEAR_TINY " WORK/bytes --from 4 --to 2", 1, "found 0");
    check_refused(LINEAR_TINY " WORK/ids --tokens", 1, "found 256");
    check_refused(LINEAR_TINY " WORK/ids --tokens --to 1", 1,
                  "expected 2 tokens or more from 0 on, found 1");
    check_refused("no/such/model WORK/bytes", 1, "no/such/model");
    check_refused("tests/golden/tokenizer WORK/bytes", 1,
                  "tiktoken.model: expected no tokenizer with a file of text");
    check_refused("examples/models/recall-kda WORK/bytes", 1, "expected vocab_size 256");
    check_refused("examples/models/recall-kda WORK/bytes", 1, "found 512");
}

static void help_is_not_an_error(void) {
    outcome o = run_ok("--help");
    CHECK(o.n_err == 0 && strstr(o.out, "usage: perplexity MODEL_DIR FILE"));
    outcome_free(&o);
}

int main(void) {
    temporary(PROGRAM, work);
    TEST(one_window_matches_the_reference);
    TEST(windows_are_those_of_training);
    TEST(parts_and_bytes);
    TEST(text_model_foresees_text);
    TEST(numbers_that_are_none_are_told);
    TEST(refusals);
    TEST(help_is_not_an_error);
    return test_summary();
}
