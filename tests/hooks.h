/* Hosts of every temper for the parallel_for hook of either header, whose types are these. */
#ifndef HOOKS_H
#define HOOKS_H

#include <stddef.h>
#include <stdlib.h>
#if !defined(__wasi__)
#include <pthread.h>

/* A thread with a stack of 64 KiB, or the least that the system allows; sanitizers need more. */
static inline void start_thread(pthread_t *thread, void *(*run)(void *), void *argument) {
    pthread_attr_t how;
    if (pthread_attr_init(&how) != 0) exit(2);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    for (size_t bytes = 65536; pthread_attr_setstacksize(&how, bytes) != 0; bytes *= 2)
        if (bytes > 1 << 20) exit(2);
#endif
    if (pthread_create(thread, &how, run, argument) != 0) exit(2);
    pthread_attr_destroy(&how);
}
#else
/* WASI has no threads: one that is started runs at once, to its end. */
typedef int pthread_t;
static inline void start_thread(pthread_t *thread, void *(*run)(void *), void *argument) {
    *thread = run(argument) != NULL;
}
static inline void pthread_join(pthread_t thread, void **result) {
    (void)thread, (void)result;
}
#endif

typedef void (*host_task)(void *context, size_t index);

/* What in_order counts; its user points to one. */
typedef struct hook_counts {
    size_t asked; /* the largest n asked for */
} hook_counts;

static inline void in_order(void *user, size_t n, host_task task, void *context) {
    hook_counts *counts = (hook_counts *)user;
    if (n > counts->asked) counts->asked = n;
    for (size_t i = 0; i < n; i++) task(context, i);
}

static inline void backwards(void *user, size_t n, host_task task, void *context) {
    (void)user;
    for (size_t i = n; i > 0; i--) task(context, i - 1);
}

static inline void only_the_last(void *user, size_t n, host_task task, void *context) {
    (void)user;
    task(context, n - 1);
}

static inline void none_at_all(void *user, size_t n, host_task task, void *context) {
    (void)user, (void)n, (void)task, (void)context;
}

typedef struct job {
    host_task task;
    void *context;
    size_t index;
} job;

static inline void *run_job(void *argument) {
    job *j = (job *)argument;
    j->task(j->context, j->index);
    return NULL;
}

static inline void real_threads(void *user, size_t n, host_task task, void *context) {
    pthread_t thread[16];
    job jobs[16];
    (void)user;
    for (size_t i = 0; i < n; i++) {
        jobs[i].task = task, jobs[i].context = context, jobs[i].index = i;
        start_thread(&thread[i], run_job, &jobs[i]);
    }
    for (size_t i = 0; i < n; i++) pthread_join(thread[i], NULL);
}

#endif
