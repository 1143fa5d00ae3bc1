/* test_stack.c - the layers that decode_ratio times compute what they should, and its counts of
 * bytes are those of the memory that is really held. */
#include "../bench/bench.h"

#include "../examples/mla.h"

#include "../bench/stack.h"

#include "test.h"

/* No two dimensions alike. */
static const roofline_shape small = {
    .name = "small",
    .layers = 5,
    .full = 2,
    .hidden = 48,
    .vocab = 37,
    .heads = 3,
    .dim = 16,
    .taps = 4,
    .rank = 5,
    .gate_rank = 7,
    .nope = 12,
    .rope = 8,
    .value = 20,
    .latent = 40,
    .dense_layers = 5,
    .dense_width = 33,
};

static parallel pool;

static stack_options options(linear_type cache, kda_type state, size_t context, size_t batch) {
    stack_options is = {&small, cache, state, kda_isa_best(), &pool, context, batch, 5, 3, 0, 0};
    return is;
}

/* Every cache type, contexts around the kernels' tiles, both state types, every instruction set. */
static void errors_are_small(void) {
    static const linear_type caches[] = {LINEAR_F32, LINEAR_F16, LINEAR_BF16};
    static const size_t contexts[] = {1, 2, 63, 64, 65, 128, 1000, 5000};
    for (size_t i = 0; i < 3; i++)
        for (size_t c = 0; c < sizeof contexts / sizeof *contexts; c++)
            for (int isa = KDA_ISA_SCALAR; isa < BENCH_ISAS; isa++) {
                if (!kda_isa_is_available((kda_isa)isa)) continue;
                kda_type state = c % 2 ? KDA_F16 : KDA_F32;
                stack_options is = options(caches[i], state, contexts[c], 1 + c % 3);
                is.isa = (kda_isa)isa;
                stack s;
                stack_open(&s, &is);
                CHECK_AT_MOST("full attention", stack_full_error(&s), 1e-6);
                CHECK_AT_MOST("KDA", stack_kda_error(&s), state == KDA_F32 ? 1e-6 : 5e-3);
                stack_close(&s);
            }
}

/* The error must be seen where there is one. */
static void an_error_is_found(void) {
    stack_options is = options(LINEAR_F32, KDA_F32, 100, 1);
    stack s;
    stack_open(&s, &is);
    s.queries[small.latent + 1] += 0.01f; /* what both sides see */
    CHECK_AT_MOST("full attention", stack_full_error(&s), 1e-6);
    s.full[0].n_past--; /* what only one side sees */
    CHECK(stack_full_error(&s) > 1e-3);
    s.kda.norm_eps = 0.5f;
    CHECK_AT_MOST("KDA", stack_kda_error(&s), 1e-6);
    s.kda.op.l2_eps = 0.5f;
    CHECK(stack_kda_error(&s) > 1e-3);
    stack_close(&s);
}

/* A step runs each of its layers once and no other. */
static void a_step_runs_its_layers(void) {
    stack_options is = options(LINEAR_BF16, KDA_F32, 70, 2);
    stack s;
    stack_open(&s, &is);
    size_t state = kda_state_bytes(&s.kda.op);
    unsigned char *before = (unsigned char *)test_alloc(3 * 2 * state);
    float *first = test_floats(small.heads * mla_mix_stride(&s.mla));
    memcpy(before, s.states, 3 * 2 * state);
    stack_step(&s, 0);
    CHECK(memcmp(before, s.states, 3 * 2 * state) == 0);
    stack_full_layer(&s, 4); /* the last of all layers */
    memcpy(first, s.mix, small.heads * mla_mix_stride(&s.mla) * sizeof *first);
    memset(s.mix, 0, small.heads * mla_mix_stride(&s.mla) * sizeof *first);
    stack_step(&s, 0);
    CHECK(memcmp(first, s.mix, small.heads * mla_mix_stride(&s.mla) * sizeof *first) == 0);
    stack_step(&s, 1);
    for (size_t i = 0; i < 3 * 2; i++)
        CHECK(memcmp(before + i * state, s.states + i * state, state) != 0);
    stack_full_layer(&s, 1); /* the last full one of the hybrid */
    memcpy(first, s.mix, small.heads * mla_mix_stride(&s.mla) * sizeof *first);
    memset(s.mix, 0, small.heads * mla_mix_stride(&s.mla) * sizeof *first);
    stack_step(&s, 1);
    CHECK(memcmp(first, s.mix, small.heads * mla_mix_stride(&s.mla) * sizeof *first) == 0);
    free(before), free(first);
    stack_close(&s);
}

static void counted_bytes_are_held_bytes(void) {
    stack_options is = options(LINEAR_F16, KDA_F16, 300, 1);
    stack s;
    stack_open(&s, &is);
    roofline_model full = {&small, 0, 2, 2, 0}, hybrid = {&small, 1, 2, 2, 0};
    double state = (double)kda_state_bytes(&s.kda.op),
           window = (double)kda_layer_window_bytes(&s.kda);
    CHECK(roofline_sequence_bytes(&full, 300) == 5 * (double)s.cache_bytes);
    CHECK(roofline_sequence_bytes(&hybrid, 300) ==
          2 * (double)s.cache_bytes + 3 * (state + window));
    CHECK(stack_cache_bytes(&is) == 5 * (double)s.cache_bytes);
    CHECK(stack_bytes(&is) == 5 * (double)s.cache_bytes + 3 * (state + window));
    stack_close(&s);
}

/* With weights: finite logits, that depend on the kind of the layers and not on the batch. */
static void whole_layers(void) {
    stack_options is = options(LINEAR_BF16, KDA_F32, 50, 1);
    stack one, two;
    is.weights = 1;
    CHECK(stack_can_hold_weights(&small));
    CHECK(!stack_can_hold_weights(&roofline_48b) && stack_can_hold_weights(&roofline_toy));
    stack_open(&one, &is);
    is.batch = 2;
    stack_open(&two, &is);
    for (int hybrid = 0; hybrid < 2; hybrid++) {
        double norm = 0;
        for (size_t i = 0; i < small.layers;
             i++) /* both stacks' first sequences: the same caches */
            memcpy(one.full[i].cache, two.full[2 * i].cache, one.cache_bytes);
        stack_step(&one, hybrid);
        stack_step(&two, hybrid);
        for (size_t i = 0; i < small.vocab; i++) {
            norm += (double)one.logits[i] * (double)one.logits[i];
            CHECK(one.logits[i] == two.logits[i]);
        }
        CHECK(norm > 1 && norm < 1e6);
    }
    float hybrid = one.logits[0];
    stack_step(&one, 0);
    CHECK(one.logits[0] != hybrid);
    /* The weights that are held are those that the cost model counts. */
    roofline_model m = {&small, 1, 2, 4, 2};
    double elements = roofline_product(one.head.rows, one.head.cols);
    for (size_t i = 0; i < small.layers; i++) {
        size_t at = i < 2 ? i : 3 + i; /* two full layers, and the three after all five */
        const stack_weights *w = &one.weights[at];
        const linear *all[] = {&w->full.q,   &w->full.kv_a, &w->full.kv_b, &w->full.o, &w->in,
                               &w->decay_up, &w->gate_up,   &w->out,       &w->up,     &w->down};
        for (size_t k = 0; k < sizeof all / sizeof *all; k++)
            elements += roofline_product(all[k]->rows, all[k]->cols);
    }
    elements += 3 * 3 * roofline_product(48, 4); /* convolutions */
    CHECK(elements == roofline_weights(&m, 0));
    stack_close(&one), stack_close(&two);
}

int main(void) {
    error e;
    if (!parallel_open(&pool, 2, &e)) {
        fprintf(stderr, "%s\n", e.text);
        return 2;
    }
    TEST(errors_are_small);
    TEST(an_error_is_found);
    TEST(a_step_runs_its_layers);
    TEST(counted_bytes_are_held_bytes);
    TEST(whole_layers);
    int status = test_summary();
    parallel_close(&pool);
    return status;
}
