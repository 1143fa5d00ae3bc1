/* output.h - files that appear under their name when they are complete.
 *
 *     output out;
 *     bool ok = output_open(&out, "logits.f32", e) && output_floats(&out, logits, n, e);
 *     ok = output_close(&out, ok, e);
 *
 * Until then a file is NAME.part. What is there and no regular file (a pipe, a device) is written
 * to directly.
 *
 * Every function is static: this header is for programs of one source file.
 */
#ifndef OUTPUT_H
#define OUTPUT_H

#include "error.h"

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#if defined(__unix__) || defined(__APPLE__)
#define OUTPUT_POSIX 1
#include <sys/stat.h>
#else
#define OUTPUT_POSIX 0
#endif

#if defined(__GNUC__)
#define OUTPUT_API static __attribute__((unused)) /* a program need not call every function */
#else
#define OUTPUT_API static
#endif

typedef struct output {
    const char *path;
    char part[4096];
    FILE *file;
} output;

static bool outputi_is_special(const char *path) {
#if OUTPUT_POSIX
    struct stat status;
    return stat(path, &status) == 0 && !S_ISREG(status.st_mode);
#else
    (void)path;
    return false;
#endif
}

/* The path must live as long as the output. */
OUTPUT_API bool output_open(output *out, const char *path, error *e) {
    const char *suffix = outputi_is_special(path) ? "" : ".part";
    out->path = path;
    out->file = NULL;
    int n = snprintf(out->part, sizeof out->part, "%s%s", path, suffix);
    if (n < 0 || (size_t)n >= sizeof out->part)
        return error_set(e, "%.60s...: expected a shorter path", path);
    out->file = fopen(out->part, "wb");
    return out->file || error_set(e, "%s: cannot write: %s", out->part, strerror(errno));
}

OUTPUT_API bool output_bytes(output *out, const void *bytes, size_t n, error *e) {
    return fwrite(bytes, 1, n, out->file) == n ||
           error_set(e, "%s: cannot write: %s", out->part, strerror(errno));
}

/* Little-endian on every machine. */
OUTPUT_API bool output_floats(output *out, const float *values, size_t n, error *e) {
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

/* Ends a file; `ok`: all of it has been written. On failure nothing is left of it. */
OUTPUT_API bool output_close(output *out, bool ok, error *e) {
    bool whole = strcmp(out->part, out->path) == 0;
    if (!out->file) return ok;
    if (fclose(out->file) != 0 && ok)
        ok = error_set(e, "%s: cannot write: %s", out->part, strerror(errno));
    out->file = NULL;
    if (ok && !whole && rename(out->part, out->path) != 0)
        ok = error_set(e, "%s: cannot rename %s: %s", out->path, out->part, strerror(errno));
    if (!ok && !whole) remove(out->part);
    return ok;
}

#endif
