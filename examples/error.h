/* error.h - one sentence about what went wrong, carried up from where it was seen.
 *
 * Every function of the driver that can fail returns bool and takes an `error *`; only programs
 * print it. A sentence names the file, the thing, what was expected and what was found:
 *
 *     if (rank != 2) return error_set(e, "%s: tensor %s: expected 2 dimensions, found %zu", ...);
 */
#ifndef ERROR_H
#define ERROR_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

typedef struct error {
    char text[1024];
} error;

#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
static inline bool
error_set(error *e, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(e->text, sizeof e->text, format, arguments);
    va_end(arguments);
    /* One line, whatever a hostile file put into a name. */
    for (char *c = e->text; *c; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7f) *c = '?';
    return false;
}

#ifdef __clang_analyzer__ /* it does not look into functions of variable arguments */
#define error_set(...) ((void)error_set(__VA_ARGS__), false)
#endif

/* What a message says is at text[at], where something else was expected. Returns `found`. */
#define ERROR_FOUND 32
static inline const char *error_found(const char *text, size_t length, size_t at, char *found) {
    unsigned c = at < length ? (unsigned char)text[at] : 0;
    if (at == length)
        snprintf(found, ERROR_FOUND, "the end of the text");
    else if (c > 0x20 && c < 0x7f)
        snprintf(found, ERROR_FOUND, "'%c'", (int)c);
    else
        snprintf(found, ERROR_FOUND, "byte 0x%02x", c);
    return found;
}

#endif
