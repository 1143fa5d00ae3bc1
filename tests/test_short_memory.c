/* test_short_memory.c - programs of $BUILD (build) of which each allocation fails once, the C
 * library's own too, alone and with all that follow it. A program prints and writes what it does with
 * memory enough; or its last line says that memory is short or a thread cannot start, and any file
 * that it made is whole. From the repository root. */
#define SAFETENSORS_IMPLEMENTATION
#include "../examples/safetensors.h"

#define PROGRAM "short-memory"
#define CHAT "WORK/../short-memory-chat "
#include "program.h"

#include <dirent.h>
#include <limits.h>

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

/* One run. What it printed is the beginning of what it prints with memory enough, perhaps with the end
 * of its line; but what a plan says of the system's memory changes. */
static void check_short(const char *program, const char *words, const outcome *whole,
                        size_t n_files, const char *variables) {
    char what[200];
    bool varies = strstr(words, "--plan") != NULL;
    outcome o = run_short(program, words, variables);
    const char *said = last_line(&o);
    snprintf(what, sizeof what, "%s %s", variables, program);
    CHECK_MSG(o.status == 0 || o.status == 1, "%s: status %d: %s", what, o.status, o.err);
    size_t same = o.n_out > 0 && o.out[o.n_out - 1] == '\n' ? o.n_out - 1 : o.n_out;
    CHECK_MSG(varies || (same <= whole->n_out && memcmp(o.out, whole->out, same) == 0),
              "%s: printed: %s", what, o.out);
    size_t n = check_files("made", what);
    if (o.status == 0)
        CHECK_MSG((varies || o.n_out == whole->n_out) && n == n_files, "%s: did less", what);
    else
        CHECK_MSG(strncmp(said, program, strlen(program)) == 0 &&
                      (strstr(said, "memory") || strstr(said, "cannot start")),
                  "%s: said: %s", what, o.err);
    outcome_free(&o);
}

/* Of as many allocations as that, those that the program makes last. */
static void check_last(const char *program, const char *words, long most) {
    outcome whole;
    long n = count_allocations(program, words, &whole);
    if (n == 0) {
        test_skip("nothing can be put before the allocator of these programs");
        outcome_free(&whole);
        return;
    }
    size_t n_files = check_files("whole", program);
    printf("%s: %ld allocations\n", program, n);
    for (long i = n > most ? n - most : 0; i < n; i++) {
        char variables[100];
        snprintf(variables, sizeof variables, "FAIL_ALLOCATION=%ld", i);
        check_short(program, words, &whole, n_files, variables);
        strcat(variables, " FAIL_ALL_AFTER=1");
        check_short(program, words, &whole, n_files, variables);
    }
    outcome_free(&whole);
}

static void check_each(const char *program, const char *words) {
    check_last(program, words, LONG_MAX);
}

/* ---- Programs ---- */

/* Whether or not anything can be put before their allocator: models and programs are sound. */
static void with_memory_enough(void) {
    outcome o = run_program("generate", CHAT "--prompt 'some words' --generate 3");
    CHECK_MSG(o.status == 0 && o.n_out > 0, "status %d: %s", o.status, o.err);
    outcome_free(&o);
}

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

static void generate_from_ids(void) {
    uint32_t ids[5] = {1, 2, 3, 4, 5};
    write_ids("ids", ids, 5);
    check_each("generate", MODELS "kimi-linear-tiny --tokens WORK/ids --generate 3 --threads 1");
}

static void generate_by_lot(void) {
    check_each("generate", CHAT "--prompt 'some words' --generate 3 --temperature 1 --top-k 5 "
                                "--repetition-penalty 2 --threads 1");
}

static void plan(void) {
    check_each("generate", MODELS "kimi-linear-tiny --plan");
}

/* n bytes of a text that repeats, in the work directory. */
static void write_line(const char *part, size_t n) {
    size_t length = strlen(part);
    char *text = (char *)test_alloc(n + 1);
    for (size_t i = 0; i < n; i++) text[i] = part[i % length];
    text[n] = '\n';
    write_file(work, "line", text, n + 1);
    free(text);
}

/* Lists of ids grow at 256: here for the first of those that a pass adds, or for one that was drafted,
 * as what goes on in the same way is. */
static void generate_beyond_a_list(void) {
    for (size_t n = 247; n <= 255; n += 2) {
        write_line("The LORD hath said unto me, ", n);
        check_last("generate",
                   "examples/models/text-attnres --prompt \"$(cat WORK/line)\" "
                   "--generate 12 --draft 4 --threads 1",
                   5);
    }
}

static void talk(void) {
    char lines[500];
    int n = snprintf(lines, sizeof lines, "hello\n/save %s/made/talk\nonce more\n", work);
    write_file(work, "lines", lines, (size_t)n);
    check_each("chat", CHAT "--generate 5 --system abc --threads 2 --temperature 1 "
                            "--repetition-penalty 2 <WORK/lines");
}

/* Lists of ids grow at 256: in a message, in its answer or at that one's end. And so do lines. */
static void talk_beyond_a_list(void) {
    for (size_t n = 240; n <= 256; n += 2) {
        write_line("1a", n); /* an id for each byte */
        check_last("chat", CHAT "--generate 3 --threads 1 <WORK/line", 8);
    }
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
    check_last("quantize", "WORK/../short-memory-shards WORK/made --format int8 --threads 1", 40);
}

static void guess(void) {
    check_each("speculative", "");
}

static void remember(void) {
    check_each("memory", "--trials 1 --svg WORK/made/memory.svg");
}

/* Models of the tokenizer's vocabulary, which has the markers of a chat; and of several files. */
static void write_models(void) {
    char chat[300], shards[300], command[2000];
    temporary("short-memory-chat", chat), temporary("short-memory-shards", shards);
    snprintf(command, sizeof command,
             "rm -f '%s'/* '%s'/* && make='%s/make_checkpoint " MODELS
             "kimi-linear-tiny/config.json' && $make '%s' --set vocab_size=2816 && "
             "$make '%s' --shard-bytes 1000000 && cp tests/golden/tokenizer/tiktoken.model "
             "tests/golden/tokenizer/tokenizer_config.json '%s'",
             chat, shards, build_directory(), chat, shards, chat);
    if (system(command) != 0) give_up(command);
}

int main(void) {
    temporary(PROGRAM, work);
    write_models();
    TEST(with_memory_enough);
    TEST(generate_text);
    TEST(generate_pictures);
    TEST(generate_files);
    TEST(generate_from_ids);
    TEST(generate_by_lot);
    TEST(generate_beyond_a_list);
    TEST(plan);
    TEST(talk);
    TEST(talk_beyond_a_list);
    TEST(score);
    TEST(ask);
    TEST(encode);
    TEST(quantise);
    TEST(guess);
    TEST(remember);
    return test_summary();
}
