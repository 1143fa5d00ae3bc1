/* fuzz.h - what fuzz targets share: an input taken apart byte by byte, and checks that end the run.
 *
 * A target is a file of its own that defines fuzz_one. clang -fsanitize=fuzzer gives it inputs
 * without end; with replay.c it runs on those of its corpus under any compiler.
 */
#ifndef FUZZ_H
#define FUZZ_H

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void fuzz_one(const uint8_t *bytes, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    fuzz_one(bytes, size);
    return 0;
}

/* A promise that did not hold: the input is kept. */
#define FUZZ_CHECK(condition)                                                                      \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: promised: %s\n", __FILE__, __LINE__, #condition);              \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

/* Exactly so many bytes, so that AddressSanitizer sees any beyond; never null. To be freed. */
static inline void *fuzz_alloc(size_t bytes) {
    void *p = malloc(bytes ? bytes : 1);
    if (!p) exit(2);
    return p;
}

static inline void *fuzz_copy(const void *bytes, size_t size) {
    void *copy = fuzz_alloc(size);
    if (size) memcpy(copy, bytes, size);
    return copy;
}

/* ---- The input, from its beginning; past its end there are zeros ---- */

typedef struct fuzz_input {
    const uint8_t *at, *end;
} fuzz_input;

static inline fuzz_input fuzz_from(const uint8_t *bytes, size_t size) {
    fuzz_input in;
    in.at = bytes, in.end = bytes + size;
    return in;
}

static inline unsigned take_u8(fuzz_input *in) {
    return in->at < in->end ? *in->at++ : 0;
}

static inline unsigned take_u16(fuzz_input *in) {
    unsigned low = take_u8(in);
    return low | take_u8(in) << 8;
}

/* Below n, which is from 1 to 65536. */
static inline size_t take_below(fuzz_input *in, size_t n) {
    return (n <= 256 ? take_u8(in) : take_u16(in)) % n;
}

/* A float of 16 bits' precision, any at all: NaN, infinite, subnormal. */
static inline float take_float(fuzz_input *in) {
    uint32_t bits = (uint32_t)take_u16(in) << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* The bytes up to a NUL, which is stepped over, or to the end. */
static inline const char *take_text(fuzz_input *in, size_t *length) {
    const uint8_t *text = in->at;
    while (in->at < in->end && *in->at) in->at++;
    *length = (size_t)(in->at - text);
    if (in->at < in->end) in->at++;
    return (const char *)text;
}

static inline size_t fuzz_left(const fuzz_input *in) {
    return (size_t)(in->end - in->at);
}

/* ---- Numbers from a seed: the same everywhere ---- */

/* Uniform in [-1, 1), a multiple of 2^-7, which all types hold exactly. */
static inline float fuzz_random(uint32_t *state) {
    *state = *state * 1664525u + 1013904223u;
    return (float)((int)(*state >> 24) - 128) / 128;
}

#endif
