/* test_short_memory.c - programs of $BUILD (build) of which each allocation fails once, the C
 * library's own too, alone and with all that follow it. A program prints and writes what it does with
 * memory enough; or its last line says that memory is short or a thread cannot start, and any file
 * that it made is whole. From the repository root. */
#define SAFETENSORS_IMPLEMENTATION
#include "../examples/safetensors.h"

#define PROGRAM "short-memory"
#include "program.h"

#include <dirent.h>

/* ---- What a run makes: in WORK/made, and without failures in WORK/whole ---- */

static void start_with_empty(const char *name) {
    char command[700];
    snprintf(command, sizeof command, "rm -rf '%s/%s' && mkdir '%s/%s'", work, name, work, name);
    if (system(command) != 0) give_up(command);
}

static void keep_what_was_made(void) {
    char from[400], to[400];
    start_with_empty("whole");
    snprintf(from, sizeof from, "%s/made", work);
    snprintf(to, sizeof to, "%s/whole", work);
    if (rmdir(to) != 0 || rename(from, to) != 0) give_up(to);
}

static bool is_as_kept(const char *directory, const char *name) {
    char made[100], whole[100];
    size_t n_made, n_whole;
    snprintf(made, sizeof made, "%.10s/%.80s", directory, name);
    snprintf(whole, sizeof whole, "whole/%.80s", name);
    if (!exists(whole)) return false;
    char *a = read_file(work, made, &n_made), *b = read_file(work, whole, &n_whole);
    bool same = n_made == n_whole && memcmp(a, b, n_made) == 0;
    free(a), free(b);
    return same;
}

/* The files that there are, each one whole; their number, which after success is that of all. */
static size_t check_files(const char *name, const char *what) {
    char path[400];
    size_t n = 0;
    snprintf(path, sizeof path, "%s/%s", work, name);
    DIR *directory = opendir(path);
    if (!directory) give_up(path);
    for (struct dirent *entry; (entry = readdir(directory)) != NULL;) {
        if (entry->d_name[0] == '.') continue;
        CHECK_MSG(is_as_kept(name, entry->d_name), "%s: %s is not whole", what, entry->d_name);
        n++;
    }
    closedir(directory);
    return n;
}

/* ---- Runs ---- */

static outcome run_short(const char *program, const char *words, const char *variables) {
    char all[1000];
    start_with_empty("made");
    snprintf(all, sizeof all, "LD_PRELOAD=%s/tests/short_memory.so %s", build_directory(),
             variables);
    return run_program_with(all, program, words);
}

/* How many a run without failures makes; 0 where nothing can be put before the allocator. */
static long count_allocations(const char *program, const char *words, outcome *whole) {
    char variables[400];
    size_t size;
    start_with_empty("count");
    snprintf(variables, sizeof variables, "COUNT_ALLOCATIONS=%s/count/n", work);
    *whole = run_short(program, words, variables);
    keep_what_was_made();
    if (!exists("count/n")) return 0;
    CHECK_MSG(whole->status == 0, "%s: status %d: %s", program, whole->status, whole->err);
    char *text = read_file(work, "count/n", &size);
    long n = strtol(text, NULL, 10);
    free(text);
    return n;
}

static const char *last_line(const outcome *o) {
    const char *at = o->err + o->n_err;
    if (at > o->err) at--;
    while (at > o->err && at[-1] != '\n') at--;
    return at;
}

/* One run. What it printed is the beginning of what it prints with memory enough. */
static void check_short(const char *program, const char *words, const outcome *whole,
                        size_t n_files, const char *variables) {
    char what[200];
    outcome o = run_short(program, words, variables);
    const char *said = last_line(&o);
    snprintf(what, sizeof what, "%s %s", variables, program);
    CHECK_MSG(o.status == 0 || o.status == 1, "%s: status %d: %s", what, o.status, o.err);
    CHECK_MSG(o.n_out <= whole->n_out && memcmp(o.out, whole->out, o.n_out) == 0, "%s: printed: %s",
              what, o.out);
    size_t n = check_files("made", what);
    if (o.status == 0)
        CHECK_MSG(o.n_out == whole->n_out && n == n_files, "%s: printed or wrote less", what);
    else
        CHECK_MSG(strncmp(said, program, strlen(program)) == 0 &&
                      (strstr(said, "memory") || strstr(said, "cannot start")),
                  "%s: said: %s", what, o.err);
    outcome_free(&o);
}

static void check_each(const char *program, const char *words) {
    outcome whole;
    long n = count_allocations(program, words, &whole);
    if (n == 0) {
        test_skip("nothing can be put before the allocator of these programs");
        outcome_free(&whole);
        return;
    }
    size_t n_files = check_files("whole", program);
    printf("%s: %ld allocations\n", program, n);
    for (long i = 0; i < n; i++) {
        char variables[100];
        snprintf(variables, sizeof variables, "FAIL_ALLOCATION=%ld", i);
        check_short(program, words, &whole, n_files, variables);
        strcat(variables, " FAIL_ALL_AFTER=1");
        check_short(program, words, &whole, n_files, variables);
    }
    outcome_free(&whole);
}

/* ---- Programs ---- */

static void generate_text(void) {
    check_each("generate", "examples/models/text-attnres --prompt abcabc --generate 5 --draft 2 "
                           "--threads 2 --save-session WORK/made/session");
}

static void generate_pictures(void) {
    check_each("generate", MODELS "kimi-k3-tiny --prompt abc --depth-svg WORK/made/depth.svg "
                                  "--threads 1");
}

static void generate_files(void) {
    check_each("generate", MODELS "kimi-k3-tiny --prompt abc --dump-layers WORK/made/layers "
                                  "--logits WORK/made/logits --threads 1");
}

static void talk(void) {
    char lines[500];
    int n = snprintf(lines, sizeof lines, "hello\n/save %s/made/talk\nonce more\n", work);
    write_file(work, "lines", lines, (size_t)n);
    check_each("chat",
               "WORK/../short-memory-chat --generate 5 --system abc --threads 1 <WORK/lines");
}

static void score(void) {
    check_each("perplexity", "examples/models/text-attnres README.md --to 20 --threads 2");
}

static void ask(void) {
    check_each("recall", "examples/models/recall-kda --pairs 2 --queries 2 --threads 2");
}

static void encode(void) {
    check_each("tokenize", "tests/golden/tokenizer LICENSE --special");
}

static void quantise(void) {
    check_each("quantize", "examples/models/recall-kda WORK/made --format int8 --threads 2");
}

static void guess(void) {
    check_each("speculative", "");
}

static void remember(void) {
    check_each("memory", "--trials 1 --svg WORK/made/memory.svg");
}

/* A model of the tokenizer's vocabulary, which has the markers of a chat. */
static void write_chat_model(void) {
    char directory[300], command[1200];
    temporary("short-memory-chat", directory);
    snprintf(command, sizeof command,
             "rm -f '%s'/* && %s/make_checkpoint " MODELS "kimi-linear-tiny/config.json '%s' "
             "--set vocab_size=2816 && cp tests/golden/tokenizer/tiktoken.model "
             "tests/golden/tokenizer/tokenizer_config.json '%s'",
             directory, build_directory(), directory, directory);
    if (system(command) != 0) give_up(command);
}

int main(void) {
    temporary(PROGRAM, work);
    write_chat_model();
    TEST(generate_text);
    TEST(generate_pictures);
    TEST(generate_files);
    TEST(talk);
    TEST(score);
    TEST(ask);
    TEST(encode);
    TEST(quantise);
    TEST(guess);
    TEST(remember);
    return test_summary();
}
