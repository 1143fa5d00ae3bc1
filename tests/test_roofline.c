/* test_roofline.c - the cost model against counts made by hand and the published figures. */
#include "../bench/roofline.h"

#include "test.h"

static const double million = 1048576;

static roofline_model model(const roofline_shape *shape, int hybrid, double weight) {
    roofline_model m = {shape, hybrid, 2, 4, weight};
    return m;
}

static void check_near(const char *what, double got, double want, double relative) {
    CHECK_MSG(fabs(got - want) <= relative * fabs(want), "%s: %.10g, expected %.10g", what, got,
              want);
}

/* Numbers of a size at which a person can count. */
static const roofline_shape small = {
    .name = "small",
    .layers = 5,
    .full = 2,
    .hidden = 10,
    .vocab = 7,
    .heads = 2,
    .dim = 3,
    .taps = 4,
    .rank = 2,
    .gate_rank = 4,
    .nope = 3,
    .rope = 1,
    .value = 2,
    .latent = 6,
    .dense_layers = 1,
    .dense_width = 8,
    .shared_width = 2,
    .experts = 4,
    .used = 2,
    .expert_width = 3,
};

static void counts_by_hand(void) {
    roofline_model full = model(&small, 0, 1), hybrid = model(&small, 1, 1);
    /* q 8 x 10, c and k_r 7 x 10, kv_b 10 x 6, o 4 x 10 */
    CHECK(roofline_full_weights(&small) == 80 + 70 + 60 + 40);
    /* q, k, v, o 6 x 10; decay 2 x 10 and 6 x 2; gate 4 x 10 and 6 x 4; beta 2 x 10; taps 18 x 4 */
    CHECK(roofline_kda_weights(&small) == 4 * 60 + 32 + 64 + 20 + 72);
    CHECK(roofline_one_expert(&small) == 90);
    /* dense 3 x 8 x 10; four times router 40, shared 60 and two experts; vocabulary 7 x 10 */
    CHECK(roofline_weights(&full, 2) == 5 * 250 + 240 + 4 * (40 + 60 + 180) + 70);
    CHECK(roofline_weights(&hybrid, 2) == 2 * 250 + 3 * 428 + 240 + 4 * (40 + 60 + 180) + 70);
    CHECK(roofline_resident_bytes(&full) == roofline_weights(&full, 4) + 70);
    /* caches: 2 layers of 100 tokens of 7 bf16; states: 3 of 2 x 3 x 3 and 3 windows of 18 x 3 */
    CHECK(roofline_sequence_bytes(&full, 100) == 5 * 100 * 7 * 2);
    CHECK(roofline_sequence_bytes(&hybrid, 100) == 2 * 100 * 7 * 2 + 3 * (18 * 4 + 54 * 4));
    CHECK(roofline_key_operations(&small) == 2 * 2 * (7 + 6));
    CHECK(roofline_experts_read(&small, 1) == 2);
    CHECK(roofline_experts_read(&small, 2) == 3);
}

static void compressed_queries_gates_and_expert_projections(void) {
    roofline_shape s = small;
    s.q_latent = 5, s.gate = 1, s.gate_rank = 0, s.expert_hidden = 4;
    CHECK(roofline_full_weights(&s) == 5 * (10 + 8) + 70 + 60 + 2 * 40);
    CHECK(roofline_kda_weights(&s) == 4 * 60 + 32 + 60 + 20 + 72);
    roofline_model m = model(&s, 0, 1);
    CHECK(roofline_weights(&m, 1) - roofline_weights(&m, 0) == 4 * 3 * 3 * 4);
    CHECK(roofline_weights(&m, 0) == 5 * roofline_full_weights(&s) + 240 + 4 * (40 + 80 + 60) + 70);
}

/* Each part is bound by what takes longer. */
static void a_step_by_hand(void) {
    roofline_model full = model(&small, 0, 1), hybrid = model(&small, 1, 1);
    roofline_machine m = {.bandwidth = 10, .memory = 1e4, .peak = 1e9, .fixed = 3};
    double weights = roofline_weights(&full, 2);
    check_near("memory bound", roofline_step(&m, &full, 100, 1), 3 + weights / 10 + 7000 / 10.0,
               1e-12);
    check_near("batch of 2", roofline_step(&m, &full, 100, 2),
               3 + roofline_weights(&full, 3) / 10 + 2 * 7000 / 10.0, 1e-12);
    /* states are read and written */
    check_near("hybrid", roofline_step(&m, &hybrid, 100, 1),
               3 + roofline_weights(&hybrid, 2) / 10 + (2800 + 2 * 864) / 10.0, 1e-12);
    m.bandwidth = 1e9, m.peak = 10;
    check_near("arithmetic bound", roofline_step(&m, &full, 100, 1),
               3 + 2 * weights / 10 + 5 * 100 * 52 / 10.0, 1e-12);
    CHECK(roofline_largest_batch(&m, &full, 100) ==
          floor((1e4 - roofline_resident_bytes(&full)) / 7000));
    m.memory = 100;
    CHECK(roofline_largest_batch(&m, &full, 100) == 0);
}

static void the_48b(void) {
    roofline_model full = model(&roofline_48b, 0, 2), hybrid = model(&roofline_48b, 1, 2);
    check_near("active, without the input table", roofline_weights(&hybrid, 8), 3.11e9, 2e-3);
    check_near("all", roofline_resident_bytes(&hybrid) / 2, 49.12e9, 1e-3);
    CHECK(roofline_sequence_bytes(&full, 1) == 27 * 1152);
    CHECK(roofline_sequence_bytes(&hybrid, 1) - roofline_sequence_bytes(&hybrid, 0) == 8064);
    CHECK(20 * 4 * roofline_state(&roofline_48b) == 40 * million);
    for (size_t i = 0, n = 0; i < 27; i++) {
        static const size_t layers[] = {4, 8, 12, 16, 20, 24, 27}; /* counted from 1 */
        int expected = n < 7 && layers[n] == i + 1;
        CHECK(roofline_is_full(&roofline_48b, i) == expected);
        n += (size_t)expected;
    }
    /* Bytes saved, states (42 MB) and windows (3 MB) counted; without them 20 / 27 = 74.07 %. */
    static const struct {
        double context, saving;
    } savings[] = {{65536, 0.7187}, {131072, 0.7297}, {262144, 0.7352}, {1048576, 0.7394}};
    for (size_t i = 0; i < 4; i++)
        check_near("saving",
                   1 - roofline_sequence_bytes(&hybrid, savings[i].context) /
                           roofline_sequence_bytes(&full, savings[i].context),
                   savings[i].saving, 1e-4);
}

/* Without weights and fixed cost the ratio grows with the context and stays below layers / full, on
 * a machine of any figures. */
static void limit_at_equal_batch(void) {
    static const roofline_shape *const shapes[] = {&small, &roofline_48b, &roofline_k3_slice,
                                                   &roofline_toy};
    static const roofline_machine machines[] = {{1e11, 1e12, 1e10, 0}, {1e10, 1e12, 1e13, 0}};
    for (size_t i = 0; i < 4; i++)
        for (size_t k = 0; k < 2; k++) {
            const roofline_shape *s = shapes[i];
            roofline_model full = model(s, 0, 0), hybrid = model(s, 1, 0);
            double limit = (double)s->layers / (double)s->full, before = 0;
            for (double context = 1024; context <= 1e9; context *= 4) {
                double ratio = roofline_step(&machines[k], &full, context, 3) /
                               roofline_step(&machines[k], &hybrid, context, 3);
                CHECK(ratio > before && ratio < limit);
                before = ratio;
            }
            check_near("limit", before, limit, 1e-3);
        }
}

static double throughput_ratio(const roofline_machine *machine, double context, double a,
                               double b) {
    roofline_model full = model(&roofline_48b, 0, 2), hybrid = model(&roofline_48b, 1, 2);
    return b / a * roofline_step(machine, &full, context, a) /
           roofline_step(machine, &hybrid, context, b);
}

/* Weights of both stacks nearly equal: nothing gets past the larger of the two limits. */
static void bound_of_unequal_batches(void) {
    for (double fixed = 0; fixed <= 10; fixed = fixed * 10 + 1e-5)
        for (double bandwidth = 1e10; bandwidth < 1e15; bandwidth *= 10)
            for (double b = 1; b <= 32; b *= 2) {
                roofline_machine m = {bandwidth, 1e15, 1e18, fixed};
                double ratio = throughput_ratio(&m, million, 1, b);
                CHECK(ratio <= roofline_bound(&roofline_48b, 1, b) * 1.0001);
            }
}

static void published_figures(void) {
    roofline_model full = model(&roofline_48b, 0, 2), hybrid = model(&roofline_48b, 1, 2);
    const roofline_machine *one = &roofline_published_batch_1, *most = &roofline_published_largest;
    check_near("batch 1, 512K", throughput_ratio(one, million / 2, 1, 1), 1.8, 0.03);
    check_near("batch 1, 1M", throughput_ratio(one, million, 1, 1), 2.25, 0.03);
    CHECK(roofline_largest_batch(most, &full, million) == 1);
    CHECK(roofline_largest_batch(most, &hybrid, million) == 7);
    check_near("full, ms", 1e3 * roofline_step(most, &full, million, 1), 11.48, 0.01);
    check_near("hybrid, ms", 1e3 * roofline_step(most, &hybrid, million, 7) / 7, 1.84, 0.01);
    check_near("largest batches", throughput_ratio(most, million, 1, 7), 6.3, 0.02);
}

/* Whatever bandwidth, fixed cost and memory: where batch 1 gains as much as was published, the
 * largest batches do not. */
static void no_one_machine_gives_both(void) {
    size_t both = 0, one = 0, most = 0;
    for (double bandwidth = 1e11; bandwidth < 1e15; bandwidth *= 1.3)
        for (double fixed = 1e-5; fixed < 1; fixed *= 1.3)
            for (double batches = 1; batches <= 8; batches++)
                for (double part = 0; part < 1; part += 0.25) {
                    roofline_machine m = {bandwidth, 0, 1e18, fixed};
                    double bytes = (batches + part) * 32614907904.0; /* of caches: 27 x 1152 x 1M */
                    double b = floor(bytes / 8500606976.0);
                    int large = throughput_ratio(&m, million, batches, b) > 5.7;
                    int small_gain = throughput_ratio(&m, million, 1, 1) > 2.1;
                    both += (size_t)(large && small_gain), one += (size_t)small_gain;
                    most += (size_t)large;
                }
    CHECK(both == 0 && one > 0 && most > 0);
}

int main(void) {
    TEST(counts_by_hand);
    TEST(compressed_queries_gates_and_expert_projections);
    TEST(a_step_by_hand);
    TEST(the_48b);
    TEST(limit_at_equal_batch);
    TEST(bound_of_unequal_batches);
    TEST(published_figures);
    TEST(no_one_machine_gives_both);
    return test_summary();
}
