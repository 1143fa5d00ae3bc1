/* parallel.h - a pool of threads that run the pieces of one loop at a time.
 *
 *     parallel pool;
 *     if (!parallel_open(&pool, 4, e)) ...
 *     parallel_for(&pool, n, task, context);
 *     parallel_close(&pool);
 *
 * Where the system has no POSIX threads a pool has one thread, the caller's.
 *
 * Every function is static.
 */
#ifndef PARALLEL_H
#define PARALLEL_H

#include "error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#if defined(__unix__) || defined(__APPLE__)
#define PARALLEL_POSIX 1
#include <pthread.h>
#include <unistd.h>
#else
#define PARALLEL_POSIX 0
#endif

#define PARALLEL_MAX_THREADS 1024

typedef void (*parallel_task)(void *context, size_t index);

typedef struct parallel {
    size_t n_threads; /* the caller's included */
#if PARALLEL_POSIX
    pthread_t *threads; /* [n_threads - 1] */
    size_t n_started;
    pthread_mutex_t mutex;
    pthread_cond_t start, end;
    parallel_task task; /* of the loop that runs */
    void *context;
    size_t n, next; /* its indices, and the first that nobody has claimed */
    size_t n_busy;  /* threads of the pool that have not left it */
    size_t round;   /* loops begun: a change wakes the threads */
    bool quit;
#endif
} parallel;

/* 1 <= n_threads <= PARALLEL_MAX_THREADS. A pool does not move while it is open. */
static inline bool parallel_open(parallel *pool, size_t n_threads, error *e);
static inline void parallel_close(parallel *pool);

/* Calls task(context, i) once for each i < n, in any order and in any thread of the pool, and
 * returns when all have returned. `pool` is a parallel *, or null for the calling thread alone: so
 * that this is also the parallel_for hook of kda.h and attnres.h. One loop at a time: a task starts
 * no loop on the same pool. */
static inline void parallel_for(void *pool, size_t n, parallel_task task, void *context);

/* Threads of a pool that may be null. */
static inline size_t parallel_threads(const parallel *pool) {
    return pool ? pool->n_threads : 1;
}

/* Processors that this process may expect to use; 1 if the system does not say. */
static inline size_t parallel_processors(void);

/* Threads of a program that was told no number: one a processor, and at most 32, as beyond some
 * number memory is what a token waits for. */
static inline size_t parallel_default(void) {
    size_t processors = parallel_processors();
    return processors < 32 ? processors : 32;
}

/* *counter++ by several tasks at once: for tasks that share out work by themselves. */
static inline size_t parallel_claim(size_t *counter) {
#if PARALLEL_POSIX
    return __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED);
#else
    return (*counter)++;
#endif
}

#if PARALLEL_POSIX

/* Runs what is left of the pool's loop. */
static void paralleli_work(parallel *pool) {
    for (;;) {
        size_t index = parallel_claim(&pool->next);
        if (index >= pool->n) return;
        pool->task(pool->context, index);
    }
}

/* Loops of a decoded token follow one another within microseconds: a thread looks for the next one
 * for about that long before it sleeps. */
#define PARALLELI_SPINS 2000

static void paralleli_wait_for_round(parallel *pool, size_t last) {
    for (size_t i = 0; i < PARALLELI_SPINS; i++)
        if (__atomic_load_n(&pool->round, __ATOMIC_ACQUIRE) != last) break;
    pthread_mutex_lock(&pool->mutex);
    while (pool->round == last && !pool->quit) pthread_cond_wait(&pool->start, &pool->mutex);
}

static void *paralleli_thread(void *context) {
    parallel *pool = (parallel *)context;
    for (size_t round = 0;; round++) {
        paralleli_wait_for_round(pool, round); /* leaves the mutex locked */
        bool quit = pool->quit;
        pthread_mutex_unlock(&pool->mutex);
        if (quit) return NULL;
        paralleli_work(pool);
        pthread_mutex_lock(&pool->mutex);
        if (--pool->n_busy == 0) pthread_cond_signal(&pool->end);
        pthread_mutex_unlock(&pool->mutex);
    }
}

static inline void parallel_for(void *pool, size_t n, parallel_task task, void *context) {
    parallel *p = (parallel *)pool;
    if (!p || p->n_started == 0 || n < 2) {
        for (size_t i = 0; i < n; i++) task(context, i);
        return;
    }
    pthread_mutex_lock(&p->mutex);
    p->task = task, p->context = context;
    p->n = n, p->next = 0;
    p->n_busy = p->n_started;
    __atomic_store_n(&p->round, p->round + 1, __ATOMIC_RELEASE);
    pthread_cond_broadcast(&p->start);
    pthread_mutex_unlock(&p->mutex);
    paralleli_work(p);
    pthread_mutex_lock(&p->mutex);
    while (p->n_busy > 0) pthread_cond_wait(&p->end, &p->mutex);
    pthread_mutex_unlock(&p->mutex);
}

static inline bool parallel_open(parallel *pool, size_t n_threads, error *e) {
    memset(pool, 0, sizeof *pool);
    if (n_threads < 1 || n_threads > PARALLEL_MAX_THREADS)
        return error_set(e, "threads: expected from 1 to %d, found %zu", PARALLEL_MAX_THREADS,
                         n_threads);
    pool->n_threads = n_threads;
    if (n_threads == 1) return true;
    pool->threads = (pthread_t *)malloc((n_threads - 1) * sizeof *pool->threads);
    if (!pool->threads) return error_set(e, "no memory for %zu threads", n_threads);
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->start, NULL);
    pthread_cond_init(&pool->end, NULL);
    for (size_t i = 0; i + 1 < n_threads; i++) {
        int failure = pthread_create(&pool->threads[i], NULL, paralleli_thread, pool);
        if (failure != 0) {
            error_set(e, "thread %zu of %zu: cannot start: %s", i + 2, n_threads,
                      strerror(failure));
            parallel_close(pool);
            return false;
        }
        pool->n_started++;
    }
    return true;
}

static inline void parallel_close(parallel *pool) {
    if (pool->threads) {
        pthread_mutex_lock(&pool->mutex);
        pool->quit = true;
        pthread_cond_broadcast(&pool->start);
        pthread_mutex_unlock(&pool->mutex);
        for (size_t i = 0; i < pool->n_started; i++) pthread_join(pool->threads[i], NULL);
        pthread_cond_destroy(&pool->end);
        pthread_cond_destroy(&pool->start);
        pthread_mutex_destroy(&pool->mutex);
        free(pool->threads);
    }
    memset(pool, 0, sizeof *pool);
}

static inline size_t parallel_processors(void) {
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n < 1 ? 1 : n > PARALLEL_MAX_THREADS ? PARALLEL_MAX_THREADS : (size_t)n;
}

#else

static inline void parallel_for(void *pool, size_t n, parallel_task task, void *context) {
    (void)pool;
    for (size_t i = 0; i < n; i++) task(context, i);
}

static inline bool parallel_open(parallel *pool, size_t n_threads, error *e) {
    memset(pool, 0, sizeof *pool);
    if (n_threads != 1)
        return error_set(e, "threads: expected 1 on this system, found %zu", n_threads);
    pool->n_threads = 1;
    return true;
}

static inline void parallel_close(parallel *pool) {
    memset(pool, 0, sizeof *pool);
}

static inline size_t parallel_processors(void) {
    return 1;
}

#endif
#endif
