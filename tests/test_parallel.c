/* test_parallel.c - the driver's thread pool: each index once, whatever the numbers. */
#include "test.h"

#if defined(__unix__) || defined(__APPLE__)
#include <errno.h>
#include <pthread.h>

/* The system starts so many threads, and no more. */
static size_t startable = SIZE_MAX;
static int test_create(pthread_t *thread, const pthread_attr_t *how, void *(*run)(void *),
                       void *argument) {
    if (startable == 0) return EAGAIN;
    startable--;
    return pthread_create(thread, how, run, argument);
}
#define pthread_create test_create

/* The system says that it has so many processors. */
#include <unistd.h>
static long online; /* or 0: what there is */
static long test_sysconf(int what) {
    return online != 0 && what == _SC_NPROCESSORS_ONLN ? online : sysconf(what);
}
#define sysconf test_sysconf
#endif
#include "../examples/parallel.h"
#undef pthread_create
#undef sysconf

#define MOST 1000

static int calls[MOST];

static void count(void *context, size_t index) {
    __atomic_fetch_add(&((int *)context)[index], 1, __ATOMIC_RELAXED);
}

static void check_each_once(parallel *pool, size_t n) {
    memset(calls, 0, sizeof calls);
    parallel_for(pool, n, count, calls);
    for (size_t i = 0; i < MOST; i++) CHECK(calls[i] == (i < n));
}

/* More loops than threads, more threads than processors, fewer indices than threads. */
static void each_index_once(void) {
    static const size_t threads[] = {1, 2, 3, 8, 32}, sizes[] = {0, 1, 2, 7, 31, 1000};
    for (size_t i = 0; i < sizeof threads / sizeof *threads; i++) {
        parallel pool;
        error e;
        if (!PARALLEL_POSIX && threads[i] > 1) continue;
        CHECK(parallel_open(&pool, threads[i], &e));
        CHECK(parallel_threads(&pool) == threads[i]);
        for (size_t round = 0; round < 50; round++)
            for (size_t j = 0; j < sizeof sizes / sizeof *sizes; j++)
                check_each_once(&pool, sizes[j]);
        parallel_close(&pool);
    }
}

static void no_pool_is_the_calling_thread(void) {
    check_each_once(NULL, 10);
    CHECK(parallel_threads(NULL) == 1);
    CHECK(parallel_processors() >= 1);
}

/* What a task has written is seen after the loop, and what was written before it in the task. */
static size_t squares[MOST];

static void square(void *context, size_t index) {
    squares[index] = index * *(const size_t *)context;
}

static void results_are_visible(void) {
    parallel pool;
    error e;
    CHECK(parallel_open(&pool, PARALLEL_POSIX ? 3 : 1, &e));
    for (size_t factor = 1; factor < 200; factor++) {
        parallel_for(&pool, MOST, square, &factor);
        for (size_t i = 0; i < MOST; i++) CHECK(squares[i] == i * factor);
    }
    parallel_close(&pool);
}

static void refuses(void) {
    parallel pool;
    error e;
    CHECK(!parallel_open(&pool, 0, &e) && strstr(e.text, "found 0"));
    CHECK(!parallel_open(&pool, PARALLEL_MAX_THREADS + 1, &e) && strstr(e.text, "found 1025"));
    CHECK(PARALLEL_POSIX || !parallel_open(&pool, 2, &e));
}

/* Those that did start are ended, and a pool that is closed may be opened. */
static void threads_that_do_not_start(void) {
#if PARALLEL_POSIX
    for (size_t n = 0; n < 4; n++) {
        parallel pool;
        error e = {""};
        char expected[60];
        startable = n;
        CHECK(!parallel_open(&pool, 5, &e));
        startable = SIZE_MAX;
        snprintf(expected, sizeof expected, "thread %zu of 5: cannot start: ", n + 2);
        CHECK_MSG(strncmp(e.text, expected, strlen(expected)) == 0, "%s", e.text);
        CHECK(!pool.threads && pool.n_started == 0);
        CHECK(parallel_open(&pool, 5, &e));
        check_each_once(&pool, 100);
        parallel_close(&pool);
    }
#else
    test_skip("no threads in this build");
#endif
}

/* A thread for each processor, but one where the system does not say, and at most 32. */
static void threads_by_default(void) {
#if PARALLEL_POSIX
    static const struct {
        long said;
        size_t processors, threads;
    } cases[] = {{-1, 1, 1},   {1, 1, 1},        {31, 31, 31},
                 {33, 33, 32}, {1024, 1024, 32}, {5000, 1024, 32}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        online = cases[i].said;
        CHECK_MSG(parallel_processors() == cases[i].processors, "%ld", online);
        CHECK_MSG(parallel_default() == cases[i].threads, "%ld", online);
    }
    online = 0;
#else
    CHECK(parallel_default() == 1);
#endif
}

int main(void) {
    TEST(each_index_once);
    TEST(no_pool_is_the_calling_thread);
    TEST(results_are_visible);
    TEST(refuses);
    TEST(threads_that_do_not_start);
    TEST(threads_by_default);
    return test_summary();
}
