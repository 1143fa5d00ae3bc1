/* short_memory.c - put before a program's allocator by LD_PRELOAD: an allocation of it fails.
 *
 * FAIL_ALLOCATION=N: the one of number N, counted from 0; with FAIL_ALL_AFTER set those that follow it
 * too. COUNT_ALLOCATIONS=FILE: how many there were is written there when the program exits. For
 * glibc, whose own calls come here as well: of stdio's buffers, directories and threads. With another C
 * library there is nothing here, and the test says so.
 */
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>

#ifdef __GLIBC__
extern void *__libc_malloc(size_t size);
extern void *__libc_calloc(size_t count, size_t size);
extern void *__libc_realloc(void *old, size_t size);
void *malloc(size_t size);
void *calloc(size_t count, size_t size);
void *realloc(void *old, size_t size);

static long allocations, failing = LONG_MAX, failing_to = LONG_MAX;

static int fails(void) {
    long i = __atomic_fetch_add(&allocations, 1, __ATOMIC_RELAXED);
    if (i < failing || i >= failing_to) return 0;
    errno = ENOMEM;
    return 1;
}

void *malloc(size_t size) {
    return fails() ? NULL : __libc_malloc(size);
}
void *calloc(size_t count, size_t size) {
    return fails() ? NULL : __libc_calloc(count, size);
}
void *realloc(void *old, size_t size) {
    return fails() ? NULL : __libc_realloc(old, size);
}

/* Counted from the program's own first allocation on, not the loader's. */
__attribute__((constructor)) static void begin(void) {
    const char *number = getenv("FAIL_ALLOCATION");
    if (number) failing = strtol(number, NULL, 10);
    if (number && !getenv("FAIL_ALL_AFTER")) failing_to = failing + 1;
    allocations = 0;
}

__attribute__((destructor)) static void end(void) {
    const char *path = getenv("COUNT_ALLOCATIONS");
    long n = allocations;
    failing = LONG_MAX;
    FILE *file = path ? fopen(path, "w") : NULL;
    if (!file) return;
    fprintf(file, "%ld", n);
    fclose(file);
}
#endif
