/* The parallel_for hook: same bits for any number of threads, any order and any shortfall of
 * workers; many host threads at once; calls from inside a parallel region. */
#include "../kda.h"
#include "hooks.h"
#include "operator.h"

/* ---- Hooks of every temper ---- */

static const kda_parallel_for hooks[] = {in_order, backwards, only_the_last, none_at_all,
                                         real_threads};
enum { HOOKS = 5 };

/* ---- The operator ---- */

/* A batch of three sequences, one of them short, run as `run` says; states and outputs appended. */
static void run_batch(const problem *p, kda_run *run, float *states, float *o) {
    static const size_t lengths[] = {33, 1, 20};
    kda_seq seqs[3];
    memset(seqs, 0, sizeof seqs);
    for (size_t i = 0; i < 3; i++) {
        seqs[i].n_tokens = lengths[i];
        seqs[i].state = states + i * p->state_count;
        memcpy(seqs[i].state, p->start, p->state_count * sizeof(float));
    }
    kda_args args = problem_args(p, 0, o);
    args.seqs = seqs, args.n_seqs = 3;
    run->scratch_bytes = kda_scratch_bytes(&p->desc, 3, run);
    CHECK(run->scratch_bytes > 0);
    run->scratch = test_scratch(run->scratch_bytes);
    CHECK(kda_forward(&p->desc, &args, run) == KDA_OK);
    free(run->scratch);
}

static void same_bits_for_any_threads_and_hook(void) {
    static const size_t threads[] = {1, 2, 3, 8};
    kda_desc desc = problem_desc(3, 0, 21, 37);
    test_seed(1);
    problem p = problem_new(&desc, 54);
    size_t states = 3 * p.state_count;
    float *want = test_floats(states), *want_o = test_floats(p.output_count);
    float *state = test_floats(states), *o = test_floats(p.output_count);
    for (int algorithm = KDA_AUTO; algorithm <= KDA_CHUNKED; algorithm++) {
        kda_run serial;
        memset(&serial, 0, sizeof serial);
        serial.algorithm = (kda_algorithm)algorithm;
        run_batch(&p, &serial, want, want_o);
        for (size_t h = 0; h < HOOKS; h++)
            for (size_t t = 0; t < 4; t++) {
                hook_counts counts = {0};
                kda_run run = serial;
                run.parallel_for = hooks[h], run.user = &counts, run.n_threads = threads[t];
                memset(o, 0, p.output_count * sizeof(float));
                run_batch(&p, &run, state, o);
                CHECK_MSG(memcmp(state, want, states * sizeof(float)) == 0 &&
                              memcmp(o, want_o, p.output_count * sizeof(float)) == 0,
                          "hook %zu, %zu threads, algorithm %d", h, threads[t], algorithm);
            }
    }
    free(want), free(want_o), free(state), free(o);
    problem_free(&p);
}

/* One token of one sequence of 4 heads: value tiles keep 8 threads busy. */
static void four_heads_use_eight_threads(void) {
    kda_desc desc = problem_desc(4, 0, 16, 64);
    test_seed(2);
    problem p = problem_new(&desc, 1);
    kda_seq seq;
    kda_run run;
    hook_counts counts = {0};
    float o[256];
    memset(&seq, 0, sizeof seq);
    memset(&run, 0, sizeof run);
    seq.n_tokens = 1, seq.state = p.start;
    kda_args args = problem_args(&p, 0, o);
    args.seqs = &seq, args.n_seqs = 1;
    run.parallel_for = in_order, run.user = &counts, run.n_threads = 8;
    run.scratch_bytes = kda_scratch_bytes(&desc, 1, &run);
    run.scratch = test_scratch(run.scratch_bytes);
    CHECK(kda_forward(&desc, &args, &run) == KDA_OK);
    CHECK_MSG(counts.asked == 8, "%zu workers were asked for", counts.asked);
    free(run.scratch);
    problem_free(&p);
}

/* Scratch grows with threads, and a call checks for that. */
static void scratch_is_per_thread(void) {
    kda_desc desc = problem_desc(2, 0, 8, 8);
    kda_run run;
    memset(&run, 0, sizeof run);
    run.parallel_for = in_order;
    CHECK(kda_scratch_bytes(&desc, 1, &run) == 0); /* no number of threads */
    run.n_threads = 1;
    size_t one = kda_scratch_bytes(&desc, 1, &run);
    run.n_threads = 4;
    size_t four = kda_scratch_bytes(&desc, 1, &run);
    CHECK(one > 0 && four > one && four < 4 * one + 4096);
    run.n_threads = SIZE_MAX / 2;
    CHECK(kda_scratch_bytes(&desc, 1, &run) == 0);
}

/* ---- Many hosts at once ---- */

typedef struct host {
    const problem *p;
    float *state, *o;
    int inside; /* its own calls are parallel too */
} host;

static void *run_host(void *argument) {
    host *x = (host *)argument;
    kda_seq seq;
    kda_run run;
    memset(&seq, 0, sizeof seq);
    memset(&run, 0, sizeof run);
    kda_args args = problem_args(x->p, 0, x->o);
    seq.n_tokens = x->p->tokens, seq.state = x->state;
    args.seqs = &seq, args.n_seqs = 1;
    if (x->inside) run.parallel_for = real_threads, run.n_threads = 2;
    run.scratch_bytes = kda_scratch_bytes(&x->p->desc, 1, &run);
    run.scratch = test_scratch(run.scratch_bytes);
    for (int times = 0; times < 5; times++) {
        memcpy(x->state, x->p->start, x->p->state_count * sizeof(float));
        if (!run.scratch || kda_forward(&x->p->desc, &args, &run) != KDA_OK) x->o[0] = NAN;
    }
    free(run.scratch);
    return NULL;
}

/* The first calls of the process: which instruction set there is, they find out at the same time. */
static void many_host_threads_at_once(void) {
    enum { N = 8 };
    kda_desc desc = problem_desc(2, 0, 16, 12);
    test_seed(3);
    problem p = problem_new(&desc, 40);
    float *want = test_floats(p.state_count), *want_o = test_floats(p.output_count);
    pthread_t thread[N];
    host hosts[N];
    for (size_t i = 0; i < N; i++) {
        hosts[i].p = &p;
        hosts[i].state = test_floats(p.state_count);
        hosts[i].o = test_floats(p.output_count);
        hosts[i].inside = i % 2 == 0;
        start_thread(&thread[i], run_host, &hosts[i]);
    }
    for (size_t i = 0; i < N; i++) pthread_join(thread[i], NULL);
    problem_solve(&p, KDA_AUTO, want, want_o);
    for (size_t i = 0; i < N; i++) {
        CHECK(memcmp(hosts[i].state, want, p.state_count * sizeof(float)) == 0);
        CHECK(memcmp(hosts[i].o, want_o, p.output_count * sizeof(float)) == 0);
        free(hosts[i].state), free(hosts[i].o);
    }
    free(want), free(want_o);
    problem_free(&p);
}

/* ---- The convolution ---- */

static void convolution_has_the_same_bits_too(void) {
    enum { CHANNELS = 300, T = 9, W = 4 };
    kda_conv_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.channels = CHANNELS, desc.width = W, desc.activation = KDA_ACTIVATION_SILU;
    test_seed(4);
    float *x = test_floats(T * CHANNELS), *weight = test_floats(CHANNELS * W);
    float *y = test_floats(T * CHANNELS), *want = test_floats(T * CHANNELS);
    float *window = test_floats(3 * CHANNELS), *want_window = test_floats(3 * CHANNELS);
    test_fill_normal(x, T * CHANNELS), test_fill_normal(weight, CHANNELS * W);
    for (size_t h = 0; h <= HOOKS; h++) {
        kda_seq seq;
        kda_conv_args args;
        kda_run run;
        hook_counts counts = {0};
        memset(&seq, 0, sizeof seq), memset(&args, 0, sizeof args), memset(&run, 0, sizeof run);
        memset(window, 0, 3 * CHANNELS * sizeof(float));
        seq.n_tokens = T, seq.window = h == 0 ? want_window : window;
        args.x = kda_in_f32(x, CHANNELS, 0);
        args.y = kda_out_f32(h == 0 ? want : y, CHANNELS, 0);
        args.weight = weight, args.seqs = &seq, args.n_seqs = 1;
        if (h > 0) run.parallel_for = hooks[h - 1], run.user = &counts, run.n_threads = 3;
        run.scratch_bytes = kda_conv_scratch_bytes(&desc, 1, &run);
        run.scratch = test_scratch(run.scratch_bytes);
        CHECK(kda_conv(&desc, &args, &run) == KDA_OK);
        if (h > 0) CHECK(memcmp(y, want, T * CHANNELS * sizeof(float)) == 0);
        if (h > 0) CHECK(memcmp(window, want_window, 3 * CHANNELS * sizeof(float)) == 0);
        free(run.scratch);
    }
    free(x), free(weight), free(y), free(want), free(window), free(want_window);
}

int main(void) {
    TEST(many_host_threads_at_once); /* first */
    TEST(same_bits_for_any_threads_and_hook);
    TEST(four_heads_use_eight_threads);
    TEST(scratch_is_per_thread);
    TEST(convolution_has_the_same_bits_too);
    return test_summary();
}
