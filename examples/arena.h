/* arena.h - hands out parts of one allocation, each at a multiple of 64 bytes from its beginning; or,
 * without memory, counts what they need. The same calls do both, so that sizes and places agree:
 *
 *     memory_arena arena = {NULL, 0, false};
 *     place(&arena);                  takes parts, which are null
 *     if (arena.overflow) ...         no size_t holds arena.used
 *     arena.base = memory of arena.used bytes, arena.used = 0;
 *     place(&arena);
 *
 * Every function is static.
 */
#ifndef ARENA_H
#define ARENA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct memory_arena {
    unsigned char *base; /* null: count only */
    size_t used;         /* bytes, a multiple of 64 */
    bool overflow;       /* a part, or all together, would pass PTRDIFF_MAX bytes */
} memory_arena;

static inline void *arena_take(memory_arena *arena, size_t bytes) {
    void *part = arena->base ? arena->base + arena->used : NULL;
    size_t blocks = bytes / 64 + (bytes % 64 != 0);
    if (blocks > (PTRDIFF_MAX - arena->used) / 64) {
        arena->overflow = true;
        return NULL;
    }
    arena->used += 64 * blocks;
    return part;
}

/* An array [a][b][c] of elements of `size` bytes. */
static inline void *arena_array(memory_arena *arena, size_t size, size_t a, size_t b, size_t c) {
    size_t dims[3], bytes = size;
    dims[0] = a, dims[1] = b, dims[2] = c;
    for (size_t i = 0; i < 3; i++) {
        if (dims[i] > 0 && bytes > PTRDIFF_MAX / dims[i]) {
            arena->overflow = true;
            return NULL;
        }
        bytes *= dims[i];
    }
    return arena_take(arena, bytes);
}

static inline float *arena_floats(memory_arena *arena, size_t a, size_t b, size_t c) {
    return (float *)arena_array(arena, sizeof(float), a, b, c);
}

#endif
