/* bench.h - what the benches share: options, clock, threads, limits of the machine, the table.
 *
 * Include first. A bench measures contestants in interleaved rounds (A B A B ...), so that what
 * disturbs the machine disturbs all alike, and judges by ratios taken inside a round:
 *
 *     bench_entry entry[2] = {{call, &mine}, {bench_run_rmw, &limit}};
 *     bench_measure(b, entry, 2);
 *     fraction = bench_speed(&entry[0], &entry[1]);
 */
#ifndef BENCH_H
#define BENCH_H

#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE /* madvise, getloadavg */
#endif
#if defined(__APPLE__) && !defined(_DARWIN_C_SOURCE)
#define _DARWIN_C_SOURCE
#endif

#include "../examples/output.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__) || defined(__i386__)
#define BENCH_X86 1
#include <immintrin.h>
#elif defined(__aarch64__)
#define BENCH_NEON 1
#include <arm_neon.h>
#endif

enum { BENCH_MAX_THREADS = 256, BENCH_MAX_ROUNDS = 128, BENCH_PIECE = 65536 };

/* ==== Clock, memory, inputs ==================================================================== */

static inline double bench_now(void) { /* ns */
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e9 * (double)t.tv_sec + (double)t.tv_nsec;
}

static inline void bench_die(const char *what) {
    fprintf(stderr, "\nbench: %s\n", what);
    exit(2);
}

/* At a 64-byte boundary; large buffers on 2 MiB pages where the system has them. */
static inline void *bench_reserve(size_t bytes) {
    size_t page = (size_t)1 << 21;
    void *p = NULL;
    if (posix_memalign(&p, bytes >= page ? page : 64, bytes ? bytes : 1) != 0)
        bench_die("out of memory");
#ifdef MADV_HUGEPAGE
    if (bytes >= page) (void)madvise(p, bytes, MADV_HUGEPAGE);
#endif
    return p;
}

/* The same, zeroed. */
static inline void *bench_alloc(size_t bytes) {
    void *p = bench_reserve(bytes);
    memset(p, 0, bytes);
    return p;
}

static inline float *bench_floats(size_t n) {
    return (float *)bench_alloc(n * sizeof(float));
}

/* Uniform in [low, high). A longer buffer begins with the numbers of a shorter one of that seed. */
static inline void bench_fill(float *x, size_t n, uint64_t seed, float low, float high) {
    uint64_t state = seed * 0x9E3779B97F4A7C15u + 0xD1B54A32D192ED03u;
    float scale = (high - low) * 0x1p-24f;
    for (size_t i = 0; i < n; i++) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        x[i] = low + scale * (float)(uint32_t)(state >> 40);
    }
}

/* ||got - want|| / ||want||, gathered piece by piece; NaN where either holds one. */
typedef struct bench_error {
    double difference, norm;
} bench_error;

static inline void bench_error_add(bench_error *e, double got, double want) {
    e->difference += (got - want) * (got - want);
    e->norm += want * want;
}

static inline double bench_error_value(const bench_error *e) {
    return e->norm > 0 ? sqrt(e->difference / e->norm) : sqrt(e->difference);
}

/* ==== Threads ==================================================================================
 *
 * Workers that stay: they spin for the next job for a millisecond, so that a wake-up is not part of
 * a measurement, and then sleep, so that they do not disturb cases of one thread. Indices of a job
 * are claimed from one word that also names the job: a late worker cannot claim from the wrong one,
 * and a job never waits for a worker that has claimed nothing. */

typedef void (*bench_task)(void *context, size_t index);

typedef struct bench_pool {
    _Atomic uint64_t ticket; /* job << 32 | its indices << 16 | the next index */
    atomic_size_t done, asleep;
    atomic_int stop;
    bench_task task;
    void *context;
    size_t n_workers;
    pthread_t worker[BENCH_MAX_THREADS];
    pthread_mutex_t mutex;
    pthread_cond_t wake;
} bench_pool;

static inline void bench_pause(void) {
#if defined(BENCH_X86)
    _mm_pause();
#elif defined(BENCH_NEON)
    __asm__ volatile("yield");
#endif
}

static inline void bench_pool_work(bench_pool *pool) {
    for (;;) {
        uint64_t ticket = atomic_load(&pool->ticket);
        uint64_t index = ticket & 0xFFFF, n = ticket >> 16 & 0xFFFF;
        if (index >= n) return;
        if (!atomic_compare_exchange_weak(&pool->ticket, &ticket, ticket + 1)) continue;
        pool->task(pool->context, (size_t)index);
        atomic_fetch_add(&pool->done, 1);
    }
}

/* Returns when the job is no longer `job`. */
static inline void bench_pool_wait(bench_pool *pool, uint64_t job) {
    double start = bench_now();
    do {
        for (int i = 0; i < 64; i++) {
            if (atomic_load(&pool->ticket) >> 32 != job) return;
            bench_pause();
        }
    } while (bench_now() - start < 1e6);
    pthread_mutex_lock(&pool->mutex);
    atomic_fetch_add(&pool->asleep, 1);
    while (atomic_load(&pool->ticket) >> 32 == job) pthread_cond_wait(&pool->wake, &pool->mutex);
    atomic_fetch_sub(&pool->asleep, 1);
    pthread_mutex_unlock(&pool->mutex);
}

static inline void bench_pool_start_job(bench_pool *pool, uint64_t indices) {
    uint64_t job = ((atomic_load(&pool->ticket) >> 32) + 1) & 0xFFFFFFFF;
    atomic_store(&pool->ticket, job << 32 | indices << 16);
    if (atomic_load(&pool->asleep) == 0) return;
    pthread_mutex_lock(&pool->mutex);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->mutex);
}

static inline void *bench_pool_worker(void *argument) {
    bench_pool *pool = (bench_pool *)argument;
    for (;;) {
        /* Read before `stop`: the job that comes with a stop is then a new one to wait for. */
        uint64_t job = atomic_load(&pool->ticket) >> 32;
        if (atomic_load(&pool->stop)) return NULL;
        bench_pool_work(pool);
        bench_pool_wait(pool, job);
    }
}

static inline void bench_pool_start(bench_pool *pool, size_t n_threads) {
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->wake, NULL);
    pool->n_workers = n_threads - 1;
    for (size_t i = 0; i < pool->n_workers; i++)
        if (pthread_create(&pool->worker[i], NULL, bench_pool_worker, pool) != 0)
            bench_die("cannot start a thread");
}

static inline void bench_pool_stop(bench_pool *pool) {
    atomic_store(&pool->stop, 1);
    bench_pool_start_job(pool, 0);
    for (size_t i = 0; i < pool->n_workers; i++) pthread_join(pool->worker[i], NULL);
    pthread_mutex_destroy(&pool->mutex);
    pthread_cond_destroy(&pool->wake);
}

/* The hook of kda.h and attnres.h; user is the pool. */
static inline void bench_parallel_for(void *user, size_t n, bench_task task, void *context) {
    bench_pool *pool = (bench_pool *)user;
    if (n <= 1 || n > 0xFFFF || pool->n_workers == 0) {
        for (size_t i = 0; i < n; i++) task(context, i);
        return;
    }
    pool->task = task;
    pool->context = context;
    atomic_store(&pool->done, 0);
    bench_pool_start_job(pool, n);
    bench_pool_work(pool);
    while (atomic_load(&pool->done) < n) bench_pause();
}

/* ==== Limits: what the machine can do at best ==================================================
 *
 * For each instruction set: read every byte and write it back in place; read every byte; multiply
 * and add in registers alone. Sizes are multiples of 256 bytes. */

typedef struct bench_kernels {
    const char *isa;
    void (*rmw)(void *data, size_t bytes);
    void (*read)(const void *data, size_t bytes);
    void (*fma)(size_t steps);
    double flops_per_step;
} bench_kernels;

/* What the compiler may not foresee or drop. */
static volatile int bench_zero = 0;
static volatile _Atomic float bench_sink;

#define BENCH_8(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)
#define BENCH_10(X) BENCH_8(X) X(8) X(9)
#define BENCH_16(X) BENCH_10(X) X(10) X(11) X(12) X(13) X(14) X(15)

static void bench_rmw_plain(void *data, size_t bytes) {
    uint64_t *x = (uint64_t *)data, zero = (uint64_t)bench_zero;
    for (size_t i = 0; i < bytes / 8; i += 4)
        x[i] ^= zero, x[i + 1] ^= zero, x[i + 2] ^= zero, x[i + 3] ^= zero;
}

static void bench_read_plain(const void *data, size_t bytes) {
    const uint64_t *x = (const uint64_t *)data;
    uint64_t a = 0, b = 0, c = 0, d = 0;
    for (size_t i = 0; i < bytes / 8; i += 4)
        a |= x[i], b |= x[i + 1], c |= x[i + 2], d |= x[i + 3];
    bench_sink = (float)(a | b | c | d);
}

/* Without an instruction set to rely on fmaf may be a call, so: a product and a sum. */
static void bench_fma_plain(size_t steps) {
    float scale = 0.5f + (float)bench_zero, shift = 0.5f + (float)bench_zero, total = 0;
#define BENCH_START(i) float a##i = 1.0f + (float)i;
#define BENCH_STEP(i) a##i = a##i * scale + shift;
#define BENCH_SUM(i) total += a##i;
    BENCH_8(BENCH_START)
    for (size_t n = 0; n < steps; n++) {
        BENCH_8(BENCH_STEP)
    }
    BENCH_8(BENCH_SUM)
#undef BENCH_START
#undef BENCH_STEP
#undef BENCH_SUM
    bench_sink = total;
}

#if defined(BENCH_X86)

#define BENCH_AVX2 __attribute__((target("avx2,fma")))
#define BENCH_AVX512 __attribute__((target("avx512f")))

BENCH_AVX2 static void bench_rmw_avx2(void *data, size_t bytes) {
    __m256i *x = (__m256i *)data, zero = _mm256_set1_epi32(bench_zero);
    for (size_t i = 0; i < bytes / 32; i += 4) {
        __m256i a = _mm256_load_si256(x + i), b = _mm256_load_si256(x + i + 1);
        __m256i c = _mm256_load_si256(x + i + 2), d = _mm256_load_si256(x + i + 3);
        _mm256_store_si256(x + i, _mm256_xor_si256(a, zero));
        _mm256_store_si256(x + i + 1, _mm256_xor_si256(b, zero));
        _mm256_store_si256(x + i + 2, _mm256_xor_si256(c, zero));
        _mm256_store_si256(x + i + 3, _mm256_xor_si256(d, zero));
    }
}

BENCH_AVX2 static void bench_read_avx2(const void *data, size_t bytes) {
    const __m256i *x = (const __m256i *)data;
    __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
    for (size_t i = 0; i < bytes / 32; i += 4) {
        a = _mm256_or_si256(a, _mm256_load_si256(x + i));
        b = _mm256_or_si256(b, _mm256_load_si256(x + i + 1));
        c = _mm256_or_si256(c, _mm256_load_si256(x + i + 2));
        d = _mm256_or_si256(d, _mm256_load_si256(x + i + 3));
    }
    a = _mm256_or_si256(_mm256_or_si256(a, b), _mm256_or_si256(c, d));
    bench_sink = (float)_mm256_movemask_epi8(a);
}

BENCH_AVX2 static void bench_fma_avx2(size_t steps) {
    __m256 scale = _mm256_set1_ps(0.5f + (float)bench_zero), shift = scale;
    __m256 total = _mm256_setzero_ps();
#define BENCH_START(i) __m256 a##i = _mm256_set1_ps(1.0f + (float)i);
#define BENCH_STEP(i) a##i = _mm256_fmadd_ps(a##i, scale, shift);
#define BENCH_SUM(i) total = _mm256_add_ps(total, a##i);
    BENCH_10(BENCH_START)
    for (size_t n = 0; n < steps; n++) {
        BENCH_10(BENCH_STEP)
    }
    BENCH_10(BENCH_SUM)
#undef BENCH_START
#undef BENCH_STEP
#undef BENCH_SUM
    bench_sink = (float)_mm256_movemask_ps(total);
}

BENCH_AVX512 static void bench_rmw_avx512(void *data, size_t bytes) {
    __m512i *x = (__m512i *)data, zero = _mm512_set1_epi32(bench_zero);
    for (size_t i = 0; i < bytes / 64; i += 4) {
        __m512i a = _mm512_load_si512(x + i), b = _mm512_load_si512(x + i + 1);
        __m512i c = _mm512_load_si512(x + i + 2), d = _mm512_load_si512(x + i + 3);
        _mm512_store_si512(x + i, _mm512_xor_si512(a, zero));
        _mm512_store_si512(x + i + 1, _mm512_xor_si512(b, zero));
        _mm512_store_si512(x + i + 2, _mm512_xor_si512(c, zero));
        _mm512_store_si512(x + i + 3, _mm512_xor_si512(d, zero));
    }
}

BENCH_AVX512 static void bench_read_avx512(const void *data, size_t bytes) {
    const __m512i *x = (const __m512i *)data;
    __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
    for (size_t i = 0; i < bytes / 64; i += 4) {
        a = _mm512_or_si512(a, _mm512_load_si512(x + i));
        b = _mm512_or_si512(b, _mm512_load_si512(x + i + 1));
        c = _mm512_or_si512(c, _mm512_load_si512(x + i + 2));
        d = _mm512_or_si512(d, _mm512_load_si512(x + i + 3));
    }
    a = _mm512_or_si512(_mm512_or_si512(a, b), _mm512_or_si512(c, d));
    bench_sink = (float)_mm512_test_epi32_mask(a, a);
}

BENCH_AVX512 static void bench_fma_avx512(size_t steps) {
    __m512 scale = _mm512_set1_ps(0.5f + (float)bench_zero), shift = scale;
    __m512 total = _mm512_setzero_ps();
#define BENCH_START(i) __m512 a##i = _mm512_set1_ps(1.0f + (float)i);
#define BENCH_STEP(i) a##i = _mm512_fmadd_ps(a##i, scale, shift);
#define BENCH_SUM(i) total = _mm512_add_ps(total, a##i);
    BENCH_10(BENCH_START)
    for (size_t n = 0; n < steps; n++) {
        BENCH_10(BENCH_STEP)
    }
    BENCH_10(BENCH_SUM)
#undef BENCH_START
#undef BENCH_STEP
#undef BENCH_SUM
    bench_sink = (float)_mm512_cmp_ps_mask(total, shift, _CMP_GT_OQ);
}

#elif defined(BENCH_NEON)

static void bench_rmw_neon(void *data, size_t bytes) {
    uint32_t *x = (uint32_t *)data;
    uint32x4_t zero = vdupq_n_u32((uint32_t)bench_zero);
    for (size_t i = 0; i < bytes / 4; i += 16) {
        uint32x4_t a = vld1q_u32(x + i), b = vld1q_u32(x + i + 4);
        uint32x4_t c = vld1q_u32(x + i + 8), d = vld1q_u32(x + i + 12);
        vst1q_u32(x + i, veorq_u32(a, zero));
        vst1q_u32(x + i + 4, veorq_u32(b, zero));
        vst1q_u32(x + i + 8, veorq_u32(c, zero));
        vst1q_u32(x + i + 12, veorq_u32(d, zero));
    }
}

static void bench_read_neon(const void *data, size_t bytes) {
    const uint32_t *x = (const uint32_t *)data;
    uint32x4_t a = vdupq_n_u32(0), b = a, c = a, d = a;
    for (size_t i = 0; i < bytes / 4; i += 16) {
        a = vorrq_u32(a, vld1q_u32(x + i));
        b = vorrq_u32(b, vld1q_u32(x + i + 4));
        c = vorrq_u32(c, vld1q_u32(x + i + 8));
        d = vorrq_u32(d, vld1q_u32(x + i + 12));
    }
    a = vorrq_u32(vorrq_u32(a, b), vorrq_u32(c, d));
    bench_sink = (float)vmaxvq_u32(a);
}

/* Four pipes of four cycles, as large cores have, need 16 running sums. */
static void bench_fma_neon(size_t steps) {
    float32x4_t scale = vdupq_n_f32(0.5f + (float)bench_zero), shift = scale;
    float32x4_t total = vdupq_n_f32(0);
#define BENCH_START(i) float32x4_t a##i = vdupq_n_f32(1.0f + (float)i);
#define BENCH_STEP(i) a##i = vfmaq_f32(shift, a##i, scale);
#define BENCH_SUM(i) total = vaddq_f32(total, a##i);
    BENCH_16(BENCH_START)
    for (size_t n = 0; n < steps; n++) {
        BENCH_16(BENCH_STEP)
    }
    BENCH_16(BENCH_SUM)
#undef BENCH_START
#undef BENCH_STEP
#undef BENCH_SUM
    bench_sink = vaddvq_f32(total);
}

#endif

static const bench_kernels bench_all_kernels[] = {
#if defined(BENCH_X86)
    {"avx512", bench_rmw_avx512, bench_read_avx512, bench_fma_avx512, 10 * 16 * 2},
    {"avx2", bench_rmw_avx2, bench_read_avx2, bench_fma_avx2, 10 * 8 * 2},
#elif defined(BENCH_NEON)
    {"neon", bench_rmw_neon, bench_read_neon, bench_fma_neon, 16 * 4 * 2},
#endif
    {"scalar", bench_rmw_plain, bench_read_plain, bench_fma_plain, 8 * 2},
};

/* Those of an instruction set; the plain ones for a name that is not known. */
static inline const bench_kernels *bench_kernels_of(const char *isa) {
    size_t last = sizeof bench_all_kernels / sizeof *bench_all_kernels - 1;
    for (size_t i = 0; i < last; i++)
        if (strcmp(bench_all_kernels[i].isa, isa) == 0) return &bench_all_kernels[i];
    return &bench_all_kernels[last];
}

/* A limit as a contestant: over `data`, in pieces that threads claim in order. */
typedef struct bench_limit {
    bench_pool *pool;
    const bench_kernels *kernels;
    size_t threads;
    unsigned char *data; /* what is read */
    size_t bytes;
    unsigned char *copy; /* what is written, if not data itself */
    size_t copy_bytes;
    atomic_size_t next;
} bench_limit;

/* Of multiply-adds: steps of a run for each thread, and of a piece of it (20 us). */
enum { BENCH_FMA_STEPS = 100000, BENCH_FMA_PIECE = 5000 };

/* The next piece: its first byte, and in *bytes its length; past the end, a length of 0. */
static inline size_t bench_limit_claim(bench_limit *limit, size_t *bytes) {
    size_t first = atomic_fetch_add(&limit->next, BENCH_PIECE);
    size_t left = first < limit->bytes ? limit->bytes - first : 0;
    *bytes = left < BENCH_PIECE ? left : BENCH_PIECE;
    return first;
}

static inline void bench_task_rmw(void *context, size_t index) {
    bench_limit *limit = (bench_limit *)context;
    (void)index;
    for (size_t n, at = bench_limit_claim(limit, &n); n; at = bench_limit_claim(limit, &n))
        limit->kernels->rmw(limit->data + at, n);
}

static inline void bench_task_copy(void *context, size_t index) {
    bench_limit *limit = (bench_limit *)context;
    (void)index;
    for (size_t n, at = bench_limit_claim(limit, &n); n; at = bench_limit_claim(limit, &n))
        memcpy(limit->copy + at, limit->data + at, n);
}

static inline void bench_task_read(void *context, size_t index) {
    bench_limit *limit = (bench_limit *)context;
    (void)index;
    for (size_t n, at = bench_limit_claim(limit, &n); n; at = bench_limit_claim(limit, &n))
        limit->kernels->read(limit->data + at, n);
}

static inline void bench_task_fma(void *context, size_t index) {
    bench_limit *limit = (bench_limit *)context;
    (void)index;
    while (atomic_fetch_add(&limit->next, BENCH_FMA_PIECE) < limit->threads * BENCH_FMA_STEPS)
        limit->kernels->fma(BENCH_FMA_PIECE);
}

static inline void bench_limit_run(bench_limit *limit, bench_task task) {
    atomic_store(&limit->next, 0);
    bench_parallel_for(limit->pool, limit->threads, task, limit);
}

static inline void bench_run_rmw(void *limit) {
    bench_limit_run((bench_limit *)limit, bench_task_rmw);
}
static inline void bench_run_copy(void *limit) {
    bench_limit_run((bench_limit *)limit, bench_task_copy);
}
static inline void bench_run_read(void *limit) {
    bench_limit_run((bench_limit *)limit, bench_task_read);
}
static inline void bench_run_fma(void *limit) {
    bench_limit_run((bench_limit *)limit, bench_task_fma);
}

static inline double bench_fma_flops(const bench_limit *limit) {
    return (double)limit->threads * BENCH_FMA_STEPS * limit->kernels->flops_per_step;
}

/* ==== Options ================================================================================== */

/* Cases that are set up together. A program's own struct of a group begins with this one. */
typedef struct bench_group {
    const char *name;
    void (*run)(void *suite, const void *group, int isa, size_t threads);
    size_t measures; /* how often it calls bench_measure */
    unsigned flags;
} bench_group;

/* bench_group.flags: what is left out. */
enum {
    BENCH_ONE_THREAD = 1,        /* more threads */
    BENCH_BEST_ONLY = 2,         /* other instruction sets than the best, or the one asked for */
    BENCH_NO_SCALAR = 4,         /* plain C: it would take minutes */
    BENCH_NOT_QUICK = 8,         /* quick runs */
    BENCH_QUICK_ONE_THREAD = 16, /* more threads in quick runs */
    BENCH_QUICK_BEST = 32        /* other instruction sets than the best in quick runs */
};

typedef struct bench {
    /* What a program brings. */
    const char *name;
    const char *counted; /* the title of the column before dims: "heads", "sources" */
    const void *groups;  /* [n_groups] of group_bytes each */
    size_t n_groups, group_bytes;
    void *suite;  /* handed to a group's run */
    int best_isa; /* 1 is plain C, as in both headers */
    const char *(*isa_name)(int isa);
    int (*isa_is_available)(int isa);
    double quick_seconds; /* what a quick run aims at */
    /* Further options; both may be null. Takes an option and the word after it (null at the end),
     * and returns how many words it has used: 0 for an option that is not its own. */
    int (*option)(struct bench *b, const char *option, const char *value);
    const char *option_help;
    /* Options. */
    int quick;
    const char *csv_name, *isa, *only;
    size_t max_threads;
    /* The run. */
    int isas[2]; /* which are run */
    size_t n_isas;
    FILE *csv; /* null: none */
    int table; /* whether stdout gets the table */
    bench_pool pool;
    double deadline; /* of a quick run, ns */
    size_t measures; /* still to come: they share the time that is left */
    size_t rows, failed;
} bench;

enum { BENCH_SCALAR = 1, BENCH_ISAS = 8 }; /* values of an instruction set: 1 .. BENCH_ISAS - 1 */

static inline const bench_group *bench_group_at(const bench *b, size_t i) {
    return (const bench_group *)(const void *)((const char *)b->groups + i * b->group_bytes);
}

/* Ends the program. */
static inline void bench_help(const bench *b) {
    printf("usage: %s [options]\n"
           "  --quick            seconds instead of minutes: fewer rounds, fewer cases\n"
           "  --csv FILE         write the rows there as well; - for stdout in place of the table\n"
           "  --isa NAME         only this instruction set (also: environment KDA_ISA)\n"
           "  --threads N        1, 2, 4, ... up to N threads (2 if the machine has them)\n",
           b->name);
    if (b->option_help) fputs(b->option_help, stdout);
    if (b->n_groups) printf("  --only SUBSTRING   only groups of cases with this in their name:\n");
    for (size_t i = 0; i < b->n_groups; i++) printf("%24s %s\n", "", bench_group_at(b, i)->name);
    printf("Exit status: 0, 1 if a row's error is over its bound, 2 for a wrong option.\n");
    error e;
    if (output_flush_standard(&e)) exit(0);
    fprintf(stderr, "%s: %s\n", b->name, e.text);
    exit(1);
}

static inline void bench_usage_error(const bench *b, const char *what, const char *which) {
    fprintf(stderr, "%s: %s '%s' (see --help)\n", b->name, what, which);
    exit(2);
}

static inline size_t bench_cores(void) {
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n < 1 ? 1 : (size_t)n;
}

static inline size_t bench_parse_threads(const bench *b, const char *text) {
    char *end;
    unsigned long n = strtoul(text, &end, 10);
    if (*text < '0' || *text > '9' || *end || n < 1 || n > BENCH_MAX_THREADS)
        bench_usage_error(b, "not a number of threads:", text);
    return (size_t)n;
}

static inline void bench_parse(bench *b, int argc, char **argv) {
    const char *environment = getenv("KDA_ISA");
    b->isa = environment && *environment ? environment : NULL;
    b->only = "";
    b->max_threads = bench_cores() < 2 ? 1 : 2;
    for (int i = 1; i < argc; i++) {
        const char *option = argv[i], *value = argv[i + 1];
        if (strcmp(option, "--help") == 0) bench_help(b);
        if (strcmp(option, "--quick") == 0) {
            b->quick = 1;
            continue;
        }
        int used = b->option ? b->option(b, option, value) : 0;
        if (used) {
            i += used - 1;
            continue;
        }
        if (strcmp(option, "--csv") != 0 && strcmp(option, "--isa") != 0 &&
            strcmp(option, "--threads") != 0 && (strcmp(option, "--only") != 0 || b->n_groups == 0))
            bench_usage_error(b, "unknown option", option);
        if (!value) bench_usage_error(b, "no value after", option);
        if (option[2] == 'c') b->csv_name = value;
        if (option[2] == 'i') b->isa = value;
        if (option[2] == 't') b->max_threads = bench_parse_threads(b, value);
        if (option[2] == 'o') b->only = value;
        i++;
    }
}

/* 1, 2, 4, ... and the largest itself. */
static inline size_t bench_next_threads(const bench *b, size_t threads) {
    if (threads == b->max_threads) return b->max_threads + 1;
    return threads * 2 < b->max_threads ? threads * 2 : b->max_threads;
}

/* ==== Measurement ============================================================================== */

typedef struct bench_entry {
    void (*run)(void *context);
    void *context;
    size_t repeats, rounds;
    double ns[BENCH_MAX_ROUNDS]; /* of one run, in each round */
    double ns_min, ns_med;
} bench_entry;

static inline bench_entry bench_contestant(void (*run)(void *context), void *context) {
    bench_entry entry;
    memset(&entry, 0, sizeof entry);
    entry.run = run;
    entry.context = context;
    return entry;
}

static inline int bench_compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static inline double bench_median(const double *x, size_t n) {
    double sorted[BENCH_MAX_ROUNDS];
    memcpy(sorted, x, n * sizeof *x);
    qsort(sorted, n, sizeof *sorted, bench_compare);
    return n % 2 ? sorted[n / 2] : (sorted[n / 2 - 1] + sorted[n / 2]) / 2;
}

static inline double bench_time(const bench_entry *entry, size_t repeats) {
    double start = bench_now();
    for (size_t i = 0; i < repeats; i++) entry->run(entry->context);
    return (bench_now() - start) / (double)repeats;
}

/* Interleaved rounds of all entries: at least 5 (3 in quick runs, and where a round takes seconds),
 * and then for as long as the time of this measurement allows. In a quick run that is an even share
 * of what is left of the whole. */
static inline void bench_measure(bench *b, bench_entry *entry, size_t n) {
    double start = bench_now(), budget = 6e8;
    size_t least = b->quick ? 3 : 5, round = 0;
    double all_once = 0;
    if (b->quick) budget = (b->deadline - start) / (double)(b->measures ? b->measures : 1);
    if (budget > 6e8) budget = 6e8;
    if (budget < 1e8) budget = 1e8;
    if (b->measures) b->measures--;
    double sample = budget / (double)(n * least * 3);
    if (sample > 2e7) sample = 2e7;
    for (size_t e = 0; e < n; e++) {
        double once = bench_time(&entry[e], 1);
        if (once < sample) once = bench_time(&entry[e], 1); /* the first one found cold caches */
        entry[e].repeats = once < sample ? (size_t)(sample / (once > 1 ? once : 1)) : 1;
        all_once += once;
    }
    if (all_once > 2e9) least = 3;
    for (; round < BENCH_MAX_ROUNDS; round++) {
        if (round >= least && bench_now() - start >= budget) break;
        for (size_t e = 0; e < n; e++) entry[e].ns[round] = bench_time(&entry[e], entry[e].repeats);
    }
    for (size_t e = 0; e < n; e++) {
        entry[e].rounds = round;
        entry[e].ns_med = bench_median(entry[e].ns, round);
        entry[e].ns_min = entry[e].ns[0];
        for (size_t i = 1; i < round; i++)
            if (entry[e].ns[i] < entry[e].ns_min) entry[e].ns_min = entry[e].ns[i];
    }
}

/* How many times as fast as `other` an entry is: the median of the ratios within each round. */
static inline double bench_speed(const bench_entry *entry, const bench_entry *other) {
    double ratio[BENCH_MAX_ROUNDS];
    for (size_t i = 0; i < entry->rounds; i++) ratio[i] = other->ns[i] / entry->ns[i];
    return bench_median(ratio, entry->rounds);
}

/* ==== Rows ===================================================================================== */

typedef struct bench_row {
    char op[40];
    const char *isa;
    size_t count; /* heads, sources; 0: none */
    const char *dims;
    size_t tokens, threads;
    double ns_min, ns_med;
    double bytes, flops;  /* of one call; 0: not counted */
    const char *limit;    /* null: none */
    double fraction;      /* of the limit's speed that is reached */
    const char *compared; /* null, "speed/X": X's time by ours, "time/X": ours by X's */
    double ratio;
    double error, bound; /* bound 0: nothing to check */
} bench_row;

/* A row of an entry whose run is `calls` calls. */
static inline bench_row bench_row_of(const bench_entry *entry, size_t calls, const char *op,
                                     const char *suffix) {
    bench_row row;
    memset(&row, 0, sizeof row);
    snprintf(row.op, sizeof row.op, "%s%s", op, suffix);
    row.isa = row.dims = "";
    row.ns_min = entry->ns_min / (double)calls;
    row.ns_med = entry->ns_med / (double)calls;
    return row;
}

/* A number, or nothing. */
static inline void bench_field(char *text, size_t n, int present, int digits, double value) {
    text[0] = 0;
    if (present) snprintf(text, n, "%.*f", digits, value);
}

static inline void bench_print_row(bench *b, const bench_row *row) {
    char count[32], tokens[32], gb[32], gflop[32], fraction[32], ratio[32], found[32] = "";
    const char *verdict = row->bound <= 0 ? "-" : row->error <= row->bound ? "ok" : "FAIL";
    b->rows++;
    b->failed += verdict[0] == 'F';
    bench_field(count, sizeof count, row->count > 0, 0, (double)row->count);
    bench_field(tokens, sizeof tokens, row->tokens > 0, 0, (double)row->tokens);
    bench_field(gb, sizeof gb, row->bytes > 0, 2, row->bytes / row->ns_med);
    bench_field(gflop, sizeof gflop, row->flops > 0, 2, row->flops / row->ns_med);
    bench_field(fraction, sizeof fraction, row->limit != NULL, 3, row->fraction);
    bench_field(ratio, sizeof ratio, row->compared != NULL, 3, row->ratio);
    if (row->bound > 0) snprintf(found, sizeof found, "%.1e", row->error);
    if (b->table) {
        if (isatty(2)) fprintf(stderr, "\r\033[K");
        printf("%-30s %-6s %7s %-8s %6s %3zu %12.0f %7s %8s  %-5s %6s  %-16s %6s  %-8s %s\n",
               row->op, row->isa, count, row->dims, tokens, row->threads, row->ns_med, gb, gflop,
               row->limit ? row->limit : "", fraction, row->compared ? row->compared : "", ratio,
               found, verdict);
        fflush(stdout);
    }
    if (b->csv) {
        fprintf(b->csv, "%s,%s,%s,%s,%s,%zu,%.1f,%.1f,%s,%s,%s,%s,%s,%s,%s,", row->op, row->isa,
                count, row->dims, tokens, row->threads, row->ns_min, row->ns_med, gb, gflop,
                row->limit ? row->limit : "", fraction, row->compared ? row->compared : "", ratio,
                found);
        if (row->bound > 0) fprintf(b->csv, "%.0e", row->bound);
        fprintf(b->csv, ",%s\n", verdict);
        fflush(b->csv);
    }
}

/* A line for a person, and a comment in the CSV. */
static inline void bench_note(bench *b, const char *text) {
    if (b->table) printf("# %s\n", text);
    if (b->csv) fprintf(b->csv, "# %s\n", text);
    fflush(stdout);
}

/* ==== A run ==================================================================================== */

/* The instruction sets to run: the one asked for, or the best, and AVX2 beside AVX-512. */
static inline void bench_choose_isas(bench *b) {
    for (int isa = 1; isa < BENCH_ISAS; isa++) {
        if (!b->isa_is_available(isa)) continue;
        int second = strcmp(b->isa_name(isa), "avx2") == 0 &&
                     strcmp(b->isa_name(b->best_isa), "avx512") == 0;
        if (b->isa ? strcmp(b->isa_name(isa), b->isa) == 0 : second) b->isas[b->n_isas++] = isa;
    }
    if (!b->isa) b->isas[b->n_isas++] = b->best_isa;
    if (b->n_isas == 0) bench_usage_error(b, "not an instruction set of this machine:", b->isa);
}

static inline void bench_cpu_name(char *name, size_t n) {
    char line[256];
    FILE *f = fopen("/proc/cpuinfo", "r");
    snprintf(name, n, "unknown");
    while (f && fgets(line, sizeof line, f)) {
        char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) != 0 || !colon) continue;
        line[strcspn(line, "\n")] = 0;
        snprintf(name, n, "%.200s", colon + 1 + strspn(colon + 1, " "));
        break;
    }
    if (f) fclose(f);
}

static inline void bench_preamble(bench *b) {
    char text[640], cpu[208];
    size_t at = 0;
    struct utsname os;
    double load = 0;
    bench_cpu_name(cpu, sizeof cpu);
    memset(&os, 0, sizeof os);
    (void)uname(&os);
    if (getloadavg(&load, 1) != 1) load = 0;
    snprintf(text, sizeof text, "%s%s: %s, %zu cores, load %.2f", b->name,
             b->quick ? " --quick" : "", cpu, bench_cores(), load);
    bench_note(b, text);
    snprintf(text, sizeof text, "system: %.60s %.60s %.60s", os.sysname, os.release, os.machine);
    bench_note(b, text);
#ifndef BENCH_FLAGS /* the build can tell: -DBENCH_FLAGS='"-O2"' */
#define BENCH_FLAGS "flags not told"
#endif
#if defined(__clang__)
    snprintf(text, sizeof text, "compiler: %.200s, %.200s", __VERSION__, BENCH_FLAGS);
#else
    snprintf(text, sizeof text, "compiler: gcc %.200s, %.200s", __VERSION__, BENCH_FLAGS);
#endif
    bench_note(b, text);
    at = (size_t)snprintf(text, sizeof text,
                          "threads: up to %zu; instruction sets here:", b->max_threads);
    for (int isa = 1; isa < BENCH_ISAS; isa++)
        if (b->isa_is_available(isa))
            at += (size_t)snprintf(text + at, sizeof text - at, " %s", b->isa_name(isa));
    at += (size_t)snprintf(text + at, sizeof text - at, "; run:");
    for (size_t k = b->n_isas; k > 0; k--)
        at += (size_t)snprintf(text + at, sizeof text - at, " %s", b->isa_name(b->isas[k - 1]));
    bench_note(b, text);
    bench_note(b,
               "buffers at 64 bytes, 2 MiB pages asked for; ns is the median of interleaved rounds,"
               " of one call");
#if defined(__AVX__)
    bench_note(b,
               "built for AVX or more (-march?): plain C is no baseline here, so no speed-up over"
               " it is shown");
#endif
}

/* Opens files, starts threads, prints what the run is and what it runs on. */
static inline void bench_open(bench *b) {
    b->deadline = bench_now() + b->quick_seconds * 1e9;
    b->table = 1;
    if (b->csv_name && strcmp(b->csv_name, "-") == 0) {
        b->csv = stdout;
        b->table = 0;
    } else if (b->csv_name) {
        b->csv = fopen(b->csv_name, "w");
        if (!b->csv) bench_usage_error(b, "cannot write", b->csv_name);
    }
    bench_pool_start(&b->pool, b->max_threads);
    bench_preamble(b);
}

/* The same for a program whose rows are bench_rows. */
static inline void bench_begin(bench *b) {
    bench_open(b);
    if (b->csv)
        fprintf(b->csv,
                "op,isa,%s,dims,tokens,threads,ns_min,ns_med,GB/s,GFLOP/s,limit,fraction,"
                "compared,ratio,error,bound,verdict\n",
                b->counted);
    if (b->table)
        printf("%-30s %-6s %7s %-8s %6s %3s %12s %7s %8s  %-5s %6s  %-16s %6s  %-8s %s\n", "op",
               "isa", b->counted, "dims", "tokens", "thr", "ns", "GB/s", "GFLOP/s", "limit",
               "of it", "compared", "ratio", "error", "verdict");
}

/* Whether a group is to be run that way: what the options and the kind of run leave. */
static inline int bench_chosen(const bench *b, const bench_group *g, int isa, size_t threads) {
    int best = isa == b->best_isa || b->isa != NULL;
    if (!strstr(g->name, b->only)) return 0;
    if ((g->flags & BENCH_NO_SCALAR) && isa == BENCH_SCALAR) return 0;
    if ((g->flags & BENCH_ONE_THREAD) && threads > 1) return 0;
    if ((g->flags & BENCH_BEST_ONLY) && !best) return 0;
    if ((g->flags & BENCH_NOT_QUICK) && b->quick) return 0;
    if ((g->flags & BENCH_QUICK_ONE_THREAD) && b->quick && threads > 1) return 0;
    if ((g->flags & BENCH_QUICK_BEST) && b->quick && !best) return 0;
    return 1;
}

/* Tells on stderr where a run is: on a terminal in one line that is written over. */
static inline void bench_tell(const bench *b, const char *text) {
    int terminal = isatty(2);
    fprintf(stderr, "%s%s: %s%s", terminal ? "\r\033[K" : "", b->name, text, terminal ? "" : "\n");
    fflush(stderr);
}

/* Tells that a group begins. */
static inline void bench_progress(const bench *b, size_t done, size_t all, const bench_group *g,
                                  int isa, size_t threads) {
    char text[128];
    snprintf(text, sizeof text, "%zu/%zu %.60s, %s, %zu thread%s", done, all, g->name,
             b->isa_name(isa), threads, threads == 1 ? "" : "s");
    bench_tell(b, text);
}

/* Runs what is chosen, or, with all = 0, only counts it and its measures. Returns the count. */
static inline size_t bench_groups(bench *b, size_t all) {
    size_t done = 0;
    for (size_t i = 0; i < b->n_groups; i++)
        for (size_t k = b->n_isas; k > 0; k--)
            for (size_t threads = 1; threads <= b->max_threads;
                 threads = bench_next_threads(b, threads)) {
                const bench_group *g = bench_group_at(b, i);
                if (!bench_chosen(b, g, b->isas[k - 1], threads)) continue;
                done++;
                if (all == 0) {
                    b->measures += g->measures;
                    continue;
                }
                bench_progress(b, done, all, g, b->isas[k - 1], threads);
                g->run(b->suite, g, b->isas[k - 1], threads);
            }
    return done;
}

/* Closes everything; the exit status. */
static inline int bench_end(bench *b) {
    char text[160];
    if (isatty(2)) fprintf(stderr, "\r\033[K");
    snprintf(text, sizeof text, "%zu rows, %zu FAIL", b->rows, b->failed);
    bench_note(b, text);
    bench_pool_stop(&b->pool);
    if (b->csv && b->csv != stdout && fclose(b->csv) != 0)
        bench_usage_error(b, "cannot write", b->csv_name);
    return b->failed != 0;
}

/* All of a program but its groups; the exit status. */
static inline int bench_main(bench *b, int argc, char **argv) {
    bench_parse(b, argc, argv);
    bench_choose_isas(b);
    size_t all = bench_groups(b, 0);
    if (all == 0) bench_usage_error(b, "no group to run with this in its name:", b->only);
    bench_begin(b);
    bench_groups(b, all);
    return bench_end(b);
}

#endif
