/* arguments.h - a program's command line, read by a table that says where each value goes.
 *
 *     typedef struct options { const char *out; size_t rows; } options;
 *     static const argument list[] = {
 *         {"--out", ARGUMENT_TEXT, offsetof(options, out), 0, 0, NULL},
 *         {"--rows", ARGUMENT_SIZE, offsetof(options, rows), 1, 100, NULL}};
 *     static const arguments table = {list, 2, "MODEL_DIR", 1};
 *     if (!arguments_parse(&table, &o, models, &n_models, &help, argc, argv, e)) ...
 *
 * Every function is static.
 */
#ifndef ARGUMENTS_H
#define ARGUMENTS_H

#include "error.h"
#include "output.h"

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef enum argument_kind {
    ARGUMENT_FLAG, /* bool: given or not, no value follows */
    ARGUMENT_TEXT, /* const char *: the text itself */
    ARGUMENT_SIZE, /* size_t, from low to high; high 0 means SIZE_MAX / 2 */
    ARGUMENT_SEED, /* uint64_t */
    ARGUMENT_REAL, /* double, from low to high */
    ARGUMENT_OTHER /* what the table's own function reads */
} argument_kind;

/* Reads `text`, the value of `name`, to `place`. */
typedef bool (*argument_read)(const char *name, const char *text, void *place, error *e);

typedef struct argument {
    const char *name;
    argument_kind kind;
    size_t place; /* in the program's options */
    double low, high;
    argument_read read; /* of ARGUMENT_OTHER */
} argument;

typedef struct arguments {
    const argument *list; /* [n] */
    size_t n;
    const char *positional; /* what those that begin with no -, or are -, are called */
    size_t most;            /* of them */
} arguments;

/* Reads a command line into `options`, whose defaults are there before, and positional ones into
 * others [table->most]. "--help" ends it: then *help is true, and the rest was not looked at. */
static inline bool arguments_parse(const arguments *table, void *options, const char **others,
                                   size_t *n_others, bool *help, int argc, char **argv, error *e);

/* What a program does that was asked for its help: prints it, and returns the exit status. */
static inline int arguments_help(const char *program, const char *text) {
    error e;
    fputs(text, stdout);
    if (output_flush_standard(&e)) return 0;
    fprintf(stderr, "%s: %s\n", program, e.text);
    return 1;
}

/* An integer of decimal digits alone, from low to high. */
static inline bool arguments_integer(const char *name, const char *text, uint64_t low,
                                     uint64_t high, uint64_t *value, error *e) {
    char *end = NULL;
    errno = 0;
    unsigned long long number = strtoull(text, &end, 10);
    if (text[0] < '0' || text[0] > '9' || *end || errno || number < low || number > high)
        return error_set(e, "%s: expected an integer from %llu to %llu, found \"%.40s\"", name,
                         (unsigned long long)low, (unsigned long long)high, text);
    *value = number;
    return true;
}

static bool argumentsi_size(const argument *a, const char *text, size_t *value, error *e) {
    uint64_t number = 0, most = a->high > 0 ? (uint64_t)a->high : SIZE_MAX / 2;
    bool ok = arguments_integer(a->name, text, (uint64_t)a->low, most, &number, e);
    *value = (size_t)number;
    return ok;
}

static bool argumentsi_real(const argument *a, const char *text, double *value, error *e) {
    char *end = NULL;
    *value = strtod(text, &end);
    if (end != text && *end == '\0' && *value >= a->low && *value <= a->high) return true;
    return error_set(e, "%s: expected a number from %g to %g, found \"%.40s\"", a->name, a->low,
                     a->high, text);
}

static bool argumentsi_value(const argument *a, void *options, const char *text, error *e) {
    void *place = (char *)options + a->place;
    switch (a->kind) {
    case ARGUMENT_FLAG: break;
    case ARGUMENT_TEXT: *(const char **)place = text; return true;
    case ARGUMENT_SIZE: return argumentsi_size(a, text, (size_t *)place, e);
    case ARGUMENT_SEED:
        return arguments_integer(a->name, text, 0, UINT64_MAX, (uint64_t *)place, e);
    case ARGUMENT_REAL: return argumentsi_real(a, text, (double *)place, e);
    case ARGUMENT_OTHER: return a->read(a->name, text, place, e);
    }
    return false;
}

static const argument *argumentsi_find(const arguments *table, const char *name) {
    for (size_t i = 0; i < table->n; i++)
        if (strcmp(name, table->list[i].name) == 0) return &table->list[i];
    return NULL;
}

static inline bool arguments_parse(const arguments *table, void *options, const char **others,
                                   size_t *n_others, bool *help, int argc, char **argv, error *e) {
    *n_others = 0;
    for (int i = 1; i < argc; i++) {
        const char *text = argv[i];
        const argument *a = argumentsi_find(table, text);
        if (strcmp(text, "--help") == 0) return *help = true;
        if (text[0] != '-' || text[1] == '\0') { /* - often stands for standard input */
            if (*n_others == table->most)
                return error_set(e, "expected %s, found \"%.80s\" too", table->positional, text);
            others[(*n_others)++] = text;
        } else if (!a) {
            return error_set(e, "unknown option \"%.80s\"", text);
        } else if (a->kind == ARGUMENT_FLAG) {
            *(bool *)((char *)options + a->place) = true;
        } else if (i + 1 == argc) {
            return error_set(e, "%s: expected a value after it", text);
        } else if (!argumentsi_value(a, options, argv[++i], e)) {
            return false;
        }
    }
    return true;
}

#endif
