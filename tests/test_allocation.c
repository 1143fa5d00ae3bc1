/* test_allocation.c - every allocation of the driver fails once, alone and with all that follow it:
 * the step says that memory is short, leaves nothing behind, and works when it is tried again. */
#include <stdint.h>
#include <stdlib.h>

/* From the allocation of this number on, counted from 0, so many fail. */
static size_t allocations, failing_from = SIZE_MAX, n_failing;
static long live; /* allocations that nobody has freed */

static int fails(void) {
    size_t i = allocations++;
    return i >= failing_from && i - failing_from < n_failing;
}
static void *test_malloc(size_t size) {
    void *memory = fails() ? NULL : malloc(size);
    live += memory != NULL;
    return memory;
}
static void *test_calloc(size_t count, size_t size) {
    void *memory = fails() ? NULL : calloc(count, size);
    live += memory != NULL;
    return memory;
}
static void *test_realloc(void *old, size_t size) {
    void *memory = fails() ? NULL : realloc(old, size);
    live += memory != NULL && old == NULL;
    return memory;
}
static void test_release(void *memory) {
    live -= memory != NULL;
    free(memory);
}
#define malloc test_malloc
#define calloc test_calloc
#define realloc test_realloc
#define free test_release
/* Which kernels run does not matter here, and plain C compiles in a fraction of the time. */
#define KDA_NO_SIMD
#define ATTNRES_NO_SIMD
#define HYBRID_SAVED_IMPLEMENTATION
#include "../examples/saved.h"
#define TOKENIZER_IMPLEMENTATION
#include "../examples/tokenizer.h"

#include "../examples/depth.h"
#include "../examples/sample.h"
#include "../examples/stop.h"
#define QUANTIZE_CONFIG_IMPLEMENTATION
#include "../examples/quantize_config.h"
#define main quantize_main
#include "../examples/quantize.c"
#undef main
#undef malloc
#undef calloc
#undef realloc
#undef free

#include "model.h"

static char directory[300];

static const char *path_of(const char *name) {
    static char path[400];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    return path;
}

/* ---- The steps: each opens, works, and closes what it opened, whether or not it succeeded ---- */

static bool open_a_model(const char *name, error *e) {
    hybrid_model model;
    if (!hybrid_open(&model, name, e)) return false;
    hybrid_close(&model);
    return true;
}

static bool plain_model(error *e) {
    return open_a_model(MODELS "kimi-linear-tiny", e);
}
static bool mxfp4_model(error *e) {
    return open_a_model(MODELS "kimi-k3-tiny", e);
}
static bool integer_model(error *e) {
    return open_a_model(MODELS "kimi-linear-tiny-int4-zp", e);
}

static bool tokens_and_text(error *e) {
    tokenizer t;
    token_list ids = {0};
    static const char text[] =
        "A text of some words, and a long one: "
        "abcdefghijklmnopqrstuvwxyzabcdefghijklmnopqrstuvwxyzabcdefghijklmn"
        "abcdefghijklmnopqrstuvwxyzabcdefghijklmnopqrstuvwxyzabcdefghijklmn"
        "abcdefghijklmnopqrstuvwxyzabcdefghijklmnopqrstuvwxyzabcdefghijklmn[EOS]";
    if (!tokenizer_open(&t, "tests/golden/tokenizer", e)) return false;
    bool ok = tokenizer_encode(&t, text, strlen(text), TOKENIZER_SPECIAL, &ids, NULL, e);
    CHECK(ok || ids.n == 0);
    test_release(ids.ids);
    tokenizer_close(&t);
    return ok;
}

/* The ids at which texts end, by the names of special tokens. */
static bool ends_of_text(error *e) {
    tokenizer t;
    token_list stops = {0};
    if (!tokenizer_open(&t, "tests/golden/tokenizer", e)) return false;
    bool ok = stop_read("tests/golden/tokenizer", &t, &stops, e);
    test_release(stops.ids);
    tokenizer_close(&t);
    return ok;
}

static bool open_sampler(error *e) {
    sampler s;
    sample_options choice = sample_defaults();
    choice.temperature = 1, choice.repetition_penalty = 2;
    if (!sampler_open(&s, &choice, 100, e)) return false;
    sampler_close(&s);
    return true;
}

/* The program, whose OUT_DIR must be empty. */
static bool quantise_a_model(error *e) {
    static char program[] = "quantize", in[] = MODELS "kimi-linear-tiny", out[400];
    static char format[] = "--format", int4[] = "int4", group[] = "--group", of_32[] = "32";
    static char asymmetric[] = "--asymmetric";
    char *words[] = {program, in, out, format, int4, group, of_32, asymmetric, NULL};
    options o;
    run r;
    snprintf(out, sizeof out, "%s/quantised", directory);
    for (size_t i = 0; i < 3; i++) {
        static const char *const left[] = {"quantised/model.safetensors", "quantised/config.json",
                                           "quantised"};
        remove(path_of(left[i]));
    }
    if (!parse_arguments(&o, 8, words, e)) return false;
    memset(&r, 0, sizeof r);
    r.o = &o;
    bool ok = run_all(&r, e);
    close_all(&r);
    CHECK(ok || fopen(path_of("quantised/config.json"), "rb") == NULL);
    return ok;
}

/* A model that is open while the steps below run; their sessions are of it. */
static hybrid_model model;

typedef struct reading {
    parallel pool;
    hybrid_workspace work;
    hybrid_session session;
} reading;

static void end_reading(reading *r) {
    hybrid_session_close(&r->session);
    hybrid_workspace_close(&r->work);
    parallel_close(&r->pool);
}

static bool begin_reading(reading *r, error *e) {
    memset(r, 0, sizeof *r);
    hybrid_session_options session = {40, LINEAR_BF16, 4};
    hybrid_workspace_options work = {0, 40, {KDA_ISA_AUTO, &r->pool, false}};
    if (parallel_open(&r->pool, 2, e) && hybrid_workspace_open(&r->work, &model, &work, e) &&
        hybrid_session_open(&r->session, &model, &session, e))
        return true;
    end_reading(r);
    return false;
}

/* Reading itself allocates nothing: a promise of hybrid.h. */
static bool forward(reading *r, error *e) {
    static const uint32_t ids[20] = {1, 2, 3, 4, 5, 6, 7, 8, 9};
    size_t before = allocations;
    hybrid_want want = {0};
    bool ok = hybrid_forward(&r->work, &r->session, ids, 20, &want, e);
    CHECK(allocations == before);
    return ok;
}

static bool read_and_save(error *e) {
    reading r;
    if (!begin_reading(&r, e)) return false;
    bool ok = forward(&r, e) && hybrid_session_save(&r.session, path_of("saved"), e);
    end_reading(&r);
    return ok;
}

static bool load_and_read(error *e) {
    reading r;
    size_t n_tokens = 0;
    if (!begin_reading(&r, e)) return false;
    bool ok = hybrid_saved_tokens(path_of("saved"), &n_tokens, e) && n_tokens == 20 &&
              hybrid_session_load(&r.session, path_of("saved"), e) && forward(&r, e);
    end_reading(&r);
    return ok;
}

/* ---- Failing ---- */

/* Once without failure, which counts the allocations; then each of them fails, for `n` of them. */
static void fail_each(const char *name, bool (*step)(error *e), size_t n) {
    error e = {""};
    long before = live;
    failing_from = SIZE_MAX, allocations = 0;
    CHECK_MSG(step(&e), "%s: %s", name, e.text);
    CHECK(live == before);
    size_t needed = allocations;
    for (size_t i = 0; i < needed; i++) {
        e.text[0] = '\0';
        failing_from = i, n_failing = n, allocations = 0;
        bool ok = step(&e);
        failing_from = SIZE_MAX;
        CHECK_MSG(!ok && strstr(e.text, "memory"), "%s, allocation %zu: %d, \"%s\"", name, i, ok,
                  e.text);
        CHECK_MSG(live == before, "%s, allocation %zu: %ld more live", name, i, live - before);
    }
    CHECK_MSG(step(&e), "%s, again: %s", name, e.text);
    printf("%s: %zu allocations\n", name, needed);
    CHECK(needed > 0);
}

static void each_fails(const char *name, bool (*step)(error *e)) {
    fail_each(name, step, 1);
    fail_each(name, step, SIZE_MAX);
}

static void models(void) {
    each_fails("a plain model", plain_model);
    each_fails("a model with MXFP4 experts", mxfp4_model);
    each_fails("a model of integers", integer_model);
}

static void tokenizers(void) {
    each_fails("a tokenizer", tokens_and_text);
    each_fails("ends of a text", ends_of_text);
    each_fails("a sampler", open_sampler);
}

static void sessions(void) {
    error e;
    if (!hybrid_open(&model, MODELS "kimi-k3-tiny", &e)) give_up(e.text);
    each_fails("a session that is saved", read_and_save);
    each_fails("a session that goes on", load_and_read);
    hybrid_close(&model);
    CHECK(live == 0);
}

/* Half a model costs what a whole one does: not all that follow fail too. */
static void quantising(void) {
    fail_each("a model that is quantised", quantise_a_model, 1);
}

int main(void) {
    temporary("allocation", directory);
    TEST(models);
    TEST(tokenizers);
    TEST(sessions);
    TEST(quantising);
    return test_summary();
}
