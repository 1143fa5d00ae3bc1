/* output.h - files that appear under their name when they are complete.
 *
 *     output out;
 *     bool ok = output_open(&out, "logits.f32", e) && output_floats(&out, logits, n, e);
 *     ok = output_close(&out, ok, e);
 *
 * Until then a file is NAME.part. What is there and no regular file (a pipe, a device) is written
 * to directly.
 *
 * A program that ends otherwise than by output_close leaves NAME.part, but for what signals.h does.
 *
 * In one source file of a program: #define OUTPUT_IMPLEMENTATION before this is included.
 */
#ifndef OUTPUT_H
#define OUTPUT_H

#include "error.h"

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#if defined(__unix__) || defined(__APPLE__)
#define OUTPUT_POSIX 1
#else
#define OUTPUT_POSIX 0
#endif

#define OUTPUT_PATH 4096

typedef struct output {
    const char *path;
    char part[OUTPUT_PATH];
    FILE *file;
} output;

/* The path must live as long as the output. */
bool output_open(output *out, const char *path, error *e);

bool output_bytes(output *out, const void *bytes, size_t n, error *e);

/* Little-endian on every machine. */
bool output_floats(output *out, const float *values, size_t n, error *e);

/* What was written so far is with the system, which has room for it. */
bool output_flush(output *out, error *e);

/* Ends a file; `ok`: all of it has been written. On failure nothing is left of it. */
bool output_close(output *out, bool ok, error *e);

/* Removes all parts. For a signal handler: what it calls, POSIX allows there. */
void output_abandon(void);

/* All that was printed to standard output is with the system, which has room for it. */
static inline bool output_flush_standard(error *e) {
    return (fflush(stdout) == 0 && !ferror(stdout)) ||
           error_set(e, "standard output: cannot write: %s", strerror(errno));
}

#endif

#if defined(OUTPUT_IMPLEMENTATION) && !defined(OUTPUTI_IMPLEMENTED)
#define OUTPUTI_IMPLEMENTED

#include <signal.h>
#include <stdint.h>

#if OUTPUT_POSIX
#include <sys/stat.h>
#include <unistd.h>
#endif

/* Parts that are being written, for output_abandon, which may run at any moment: of one beyond
 * these it does not know. */
#define OUTPUT_PARTS 4
static struct outputi_part {
    volatile sig_atomic_t used;
    char path[OUTPUT_PATH];
} outputi_parts[OUTPUT_PARTS];

void output_abandon(void) {
#if OUTPUT_POSIX
    for (size_t i = 0; i < OUTPUT_PARTS; i++)
        if (outputi_parts[i].used) (void)unlink(outputi_parts[i].path);
#endif
}

static void outputi_remember(const char *part) {
    for (size_t i = 0; i < OUTPUT_PARTS; i++)
        if (!outputi_parts[i].used) {
            strcpy(outputi_parts[i].path, part);
            outputi_parts[i].used = 1;
            return;
        }
}

static void outputi_forget(const char *part) {
    for (size_t i = 0; i < OUTPUT_PARTS; i++)
        if (strcmp(outputi_parts[i].path, part) == 0) outputi_parts[i].used = 0;
}

static bool outputi_is_special(const char *path) {
#if OUTPUT_POSIX
    struct stat status;
    return stat(path, &status) == 0 && !S_ISREG(status.st_mode);
#else
    (void)path;
    return false;
#endif
}

bool output_open(output *out, const char *path, error *e) {
    const char *suffix = outputi_is_special(path) ? "" : ".part";
    out->path = path;
    out->file = NULL;
    if ((size_t)snprintf(out->part, sizeof out->part, "%s%s", path, suffix) >= sizeof out->part)
        return error_set(e, "%.60s...: expected a shorter path", path);
    if (*suffix) outputi_remember(out->part); /* before: a signal may come as soon as it is there */
    out->file = fopen(out->part, "wb");
    if (out->file) return true;
    error_set(e, "%s: cannot write: %s", out->part, strerror(errno));
    outputi_forget(out->part);
    return false;
}

bool output_flush(output *out, error *e) {
    return fflush(out->file) == 0 ||
           error_set(e, "%s: cannot write: %s", out->part, strerror(errno));
}

bool output_bytes(output *out, const void *bytes, size_t n, error *e) {
    return fwrite(bytes, 1, n, out->file) == n ||
           error_set(e, "%s: cannot write: %s", out->part, strerror(errno));
}

bool output_floats(output *out, const float *values, size_t n, error *e) {
    unsigned char bytes[4096];
    for (size_t first = 0, count; first < n; first += count) {
        count = n - first < sizeof bytes / 4 ? n - first : sizeof bytes / 4;
        for (size_t i = 0; i < count; i++) {
            uint32_t bits;
            memcpy(&bits, &values[first + i], sizeof bits);
            for (size_t b = 0; b < 4; b++) bytes[4 * i + b] = (unsigned char)(bits >> 8 * b);
        }
        if (!output_bytes(out, bytes, 4 * count, e)) return false;
    }
    return true;
}

bool output_close(output *out, bool ok, error *e) {
    bool whole = strcmp(out->part, out->path) == 0;
    if (!out->file) return ok;
    if (fclose(out->file) != 0 && ok)
        ok = error_set(e, "%s: cannot write: %s", out->part, strerror(errno));
    out->file = NULL;
    if (ok && !whole && rename(out->part, out->path) != 0)
        ok = error_set(e, "%s: cannot rename %s: %s", out->path, out->part, strerror(errno));
    if (!ok && !whole) remove(out->part);
    outputi_forget(out->part);
    return ok;
}

#endif
