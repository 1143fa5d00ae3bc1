/* program.h - for tests that run a program of $BUILD (build), from the repository root. Include it
 * after safetensors.h; the test defines PROGRAM, the name. */
#ifndef TEST_PROGRAM_H
#define TEST_PROGRAM_H

#include "model.h"

#include <sys/wait.h>

static char work[300]; /* directory of what the tests write: temporary(PROGRAM, work) */

/* What a run of the program left. */
typedef struct outcome {
    int status; /* of the exit; -1: it ended otherwise */
    char *out, *err;
    size_t n_out, n_err;
} outcome;

/* Runs a program with variables and arguments as a shell reads them. WORK in the arguments stands
 * for the work directory. */
static inline outcome run_program_with(const char *variables, const char *program,
                                       const char *words) {
    char command[4096], expanded[3000];
    const char *mark;
    size_t n = 0;
    for (; (mark = strstr(words, "WORK")) != NULL; words = mark + 4)
        n += (size_t)sprintf(expanded + n, "%.*s%s", (int)(mark - words), words, work);
    sprintf(expanded + n, "%s", words);
    int length = snprintf(command, sizeof command, "%s %s/%s %s >%s/out 2>%s/err", variables,
                          build_directory(), program, expanded, work, work);
    if ((size_t)length >= sizeof command) give_up(words);
    outcome o;
    int status = system(command);
    o.status = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    o.out = read_file(work, "out", &o.n_out);
    o.err = read_file(work, "err", &o.n_err);
    return o;
}

static inline outcome run_program(const char *program, const char *words) {
    return run_program_with("", program, words);
}

static inline outcome run(const char *words) {
    return run_program(PROGRAM, words);
}

static inline void outcome_free(outcome *o) {
    free(o->out), free(o->err);
}

/* A run with variables that must be refused: that status, nothing on standard output, one line on
 * standard error that begins with the program's name and contains `part`. */
static inline void check_refused_with(const char *variables, const char *words, int status,
                                      const char *part) {
    outcome o = run_program_with(variables, PROGRAM, words);
    CHECK_MSG(o.status == status, "%s: status %d: %s", words, o.status, o.err);
    CHECK_MSG(o.n_out == 0, "%s: printed \"%s\"", words, o.out);
    CHECK_MSG(strncmp(o.err, PROGRAM ": ", strlen(PROGRAM ": ")) == 0, "%s: %s", words, o.err);
    CHECK_MSG(strchr(o.err, '\n') == o.err + o.n_err - 1, "%s: not one line: %s", words, o.err);
    CHECK_MSG(strstr(o.err, part), "%s: no \"%s\" in: %s", words, part, o.err);
    outcome_free(&o);
}

static inline void check_refused(const char *words, int status, const char *part) {
    check_refused_with("", words, status, part);
}

/* The environment's instruction set must be one that there is, and that runs here. */
static inline void check_instruction_sets(const char *words) {
    check_refused_with("KDA_ISA=sse", words, 2,
                       "KDA_ISA: expected auto, scalar, avx2, avx512 or neon, found \"sse\"");
#if defined(__x86_64__)
    check_refused_with("KDA_ISA=neon", words, 1,
                       "instruction set neon: not in this machine and build");
#endif
}

/* A run that must succeed. */
static inline outcome run_ok(const char *words) {
    outcome o = run(words);
    CHECK_MSG(o.status == 0, "%s: status %d: %s", words, o.status, o.err);
    return o;
}

static inline void write_ids(const char *name, const uint32_t *ids, size_t n) {
    char *text = (char *)test_alloc(12 * n + 1);
    size_t length = 0;
    for (size_t i = 0; i < n; i++)
        length +=
            (size_t)sprintf(text + length, "%lu%c", (unsigned long)ids[i], i % 9 ? ' ' : '\n');
    write_file(work, name, text, length);
    free(text);
}

static inline bool exists(const char *name) {
    char path[400];
    snprintf(path, sizeof path, "%s/%s", work, name);
    FILE *file = fopen(path, "rb");
    if (file) fclose(file);
    return file != NULL;
}

static inline float *read_floats(const char *name, size_t n) {
    size_t size;
    char *bytes = read_file(work, name, &size);
    float *values = test_floats(n);
    CHECK_MSG(size == n * 4, "%s: %zu bytes", name, size);
    for (size_t i = 0; i < n && 4 * i + 4 <= size; i++) values[i] = st_load_f32(bytes + 4 * i);
    free(bytes);
    return values;
}

#endif
