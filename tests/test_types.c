/* The 16-bit element types: conversions over all patterns, tensors of each type, the f16 state. */
#include "../kda.h"
#include "operator.h"

static const kda_type types[] = {KDA_F32, KDA_F16, KDA_BF16};

/* ---- Conversions, against a second definition by ldexp ---- */

static double value_of(unsigned bits, int exponent_bits, int fraction_bits) {
    unsigned fraction = bits & ((1u << fraction_bits) - 1u);
    unsigned exponent = bits >> fraction_bits & ((1u << exponent_bits) - 1u);
    int bias = (1 << (exponent_bits - 1)) - 1;
    double sign = bits >> 15 ? -1 : 1;
    if (exponent == (1u << exponent_bits) - 1u)
        return fraction ? (double)NAN : sign * (double)INFINITY;
    if (exponent == 0) return sign * ldexp(fraction, 1 - bias - fraction_bits);
    return sign * ldexp(fraction + (1u << fraction_bits), (int)exponent - bias - fraction_bits);
}

static int same_value(float got, double want) {
    return isnan(want) ? isnan(got) : (double)got == want && !signbit(got) == !signbit(want);
}

static void every_16_bit_pattern_to_float_and_back(void) {
    for (unsigned bits = 0; bits < 65536; bits++) {
        float f16 = kda_from_f16((uint16_t)bits), bf16 = kda_from_bf16((uint16_t)bits);
        CHECK_MSG(same_value(f16, value_of(bits, 5, 10)), "f16 %04x: %a", bits, (double)f16);
        CHECK_MSG(same_value(bf16, value_of(bits, 8, 7)), "bf16 %04x: %a", bits, (double)bf16);
        unsigned quiet_f16 = isnan(f16) ? bits | 0x200u : bits;
        unsigned quiet_bf16 = isnan(bf16) ? bits | 0x40u : bits;
        CHECK_MSG(kda_to_f16(f16) == quiet_f16, "f16 %04x comes back as %04x", bits,
                  kda_to_f16(f16));
        CHECK_MSG(kda_to_bf16(bf16) == quiet_bf16, "bf16 %04x comes back", bits);
    }
}

/* Between each pair of neighbours: just below the middle, the middle (ties to even), just above. */
static void check_rounding(uint16_t (*to)(float), float (*from)(uint16_t), unsigned largest) {
    for (unsigned bits = 0; bits < largest; bits++) {
        float low = from((uint16_t)bits), high = from((uint16_t)(bits + 1));
        float middle = (float)(((double)low + (double)high) / 2); /* exact: one more bit */
        unsigned even = bits & 1u ? bits + 1 : bits;
        CHECK_MSG(to(middle) == even, "%04x: a tie goes to %04x", bits, to(middle));
        CHECK(to(nextafterf(middle, 0)) == bits && to(nextafterf(middle, INFINITY)) == bits + 1);
        CHECK(to(-middle) == (even | 0x8000u));
    }
}

static void rounding_is_to_nearest_even(void) {
    check_rounding(kda_to_f16, kda_from_f16, 0x7bff);
    check_rounding(kda_to_bf16, kda_from_bf16, 0x7f7f);
    CHECK(kda_to_f16(65519.99f) == 0x7bff && kda_to_f16(65520) == 0x7c00);
    CHECK(kda_to_f16(FLT_MAX) == 0x7c00 && kda_to_f16(-INFINITY) == 0xfc00);
    CHECK(kda_to_bf16(FLT_MAX) == 0x7f80 && kda_to_bf16(INFINITY) == 0x7f80);
    CHECK(kda_to_f16(0x1p-25f) == 0 && kda_to_f16(0x1.000002p-25f) == 1);
    CHECK(kda_to_bf16(0x1p-134f) == 0 && kda_to_bf16(0x1.8p-134f) == 1);
    CHECK(isnan(kda_from_f16(kda_to_f16(NAN))) && isnan(kda_from_bf16(kda_to_bf16(NAN))));
}

/* ---- Tensors ---- */

static size_t type_bytes(kda_type type) {
    return type == KDA_F32 ? 4 : 2;
}

/* A dense tensor in a type; rounds `x` itself to what the type holds. */
static void *typed(float *x, size_t n, kda_type type) {
    void *y = test_alloc(n * 4);
    for (size_t i = 0; i < n; i++) {
        uint16_t bits = type == KDA_F16 ? kda_to_f16(x[i]) : kda_to_bf16(x[i]);
        if (type == KDA_F32) {
            ((float *)y)[i] = x[i];
            continue;
        }
        ((uint16_t *)y)[i] = bits;
        x[i] = type == KDA_F16 ? kda_from_f16(bits) : kda_from_bf16(bits);
    }
    return y;
}

/* Each tensor in a type of its own gives the bits of float32 tensors holding the same values, and
 * outputs are those of the float32 run, rounded. */
static void check_every_type(size_t dim_v) {
    kda_desc desc = problem_desc(2, 1, 9, dim_v);
    size_t width = 2 * dim_v, n_o = 20 * width;
    desc.gate = KDA_GATE_SOFTPLUS;
    for (size_t shift = 0; shift < 3; shift++) {
        problem p = problem_new(&desc, 20);
        kda_type type[6];
        for (size_t i = 0; i < 6; i++) type[i] = types[(i + shift) % 3];
        void *q = typed(p.q, 180, type[0]), *k = typed(p.k, 180, type[1]);
        void *v = typed(p.v, n_o, type[2]), *g = typed(p.g, 360, type[3]);
        void *beta = typed(p.beta, 40, type[4]);
        float *want_o = test_floats(n_o), *want_state = test_floats(p.state_count);
        float *state = test_floats(p.state_count);
        for (int algorithm = KDA_RECURRENT; algorithm <= KDA_CHUNKED; algorithm++) {
            unsigned char *o = (unsigned char *)test_alloc(n_o * 4);
            kda_seq seq;
            kda_run run;
            problem_solve(&p, (kda_algorithm)algorithm, want_state, want_o);
            memcpy(state, p.start, p.state_count * sizeof(float));
            memset(&seq, 0, sizeof seq);
            memset(&run, 0, sizeof run);
            seq.n_tokens = 20, seq.state = state;
            kda_args args = problem_args(&p, 0, want_o);
            args.q = kda_in(q, type[0], 9, 9), args.k = kda_in(k, type[1], 9, 9);
            args.v = kda_in(v, type[2], (ptrdiff_t)width, (ptrdiff_t)dim_v), args.g = kda_in(g, type[3], 18, 9);
            args.beta = kda_in(beta, type[4], 2, 1), args.o = kda_out(o, type[5], (ptrdiff_t)width, (ptrdiff_t)dim_v);
            args.seqs = &seq, args.n_seqs = 1;
            run.algorithm = (kda_algorithm)algorithm;
            run.scratch_bytes = kda_scratch_bytes(&desc, 1, &run);
            run.scratch = test_scratch(run.scratch_bytes);
            CHECK(kda_forward(&desc, &args, &run) == KDA_OK);
            CHECK(memcmp(state, want_state, p.state_count * sizeof(float)) == 0);
            void *want = typed(want_o, n_o, type[5]);
            CHECK(memcmp(o, want, n_o * type_bytes(type[5])) == 0);
            free(want), free(run.scratch), free(o);
        }
        free(q), free(k), free(v), free(g), free(beta);
        free(want_o), free(want_state), free(state);
        problem_free(&p);
    }
}

/* Values and outputs of less than a block of scratch, and of two and a part. */
static void every_tensor_in_every_type(void) {
    test_seed(1);
    check_every_type(6);
    check_every_type(75);
}

static void parts_in_16_bits(void) {
    float x[2 * 3 * 5], gate[30], weight[5], want[30];
    uint16_t y[30];
    test_seed(2);
    test_fill_normal(x, 30), test_fill_normal(gate, 30), test_fill_normal(weight, 5);
    uint16_t *x16 = (uint16_t *)typed(x, 30, KDA_F16),
             *gate16 = (uint16_t *)typed(gate, 30, KDA_BF16);
    CHECK(kda_gated_norm(2, 3, 5, 1e-5f, weight, kda_in(x16, KDA_F16, 15, 5),
                         kda_in(gate16, KDA_BF16, 15, 5), kda_out(y, KDA_BF16, 15, 5),
                         NULL) == KDA_OK);
    CHECK(kda_gated_norm(2, 3, 5, 1e-5f, weight, kda_in_f32(x, 15, 5), kda_in_f32(gate, 15, 5),
                         kda_out_f32(want, 15, 5), NULL) == KDA_OK);
    for (size_t i = 0; i < 30; i++) CHECK(y[i] == kda_to_bf16(want[i]));
    CHECK(kda_l2_norm(2, 3, 5, 0, kda_in(x16, KDA_F16, 15, 5), kda_out(x16, KDA_F16, 15, 5),
                      NULL) == KDA_OK);
    CHECK(kda_l2_norm(2, 3, 5, 0, kda_in_f32(x, 15, 5), kda_out_f32(want, 15, 5), NULL) == KDA_OK);
    for (size_t i = 0; i < 30; i++) CHECK(x16[i] == kda_to_f16(want[i]));
    free(x16), free(gate16);
}

static void a_16_bit_tensor_at_an_odd_address_is_refused(void) {
    uint16_t x[4] = {0}, y[4] = {0};
    CHECK(kda_l2_norm(1, 1, 2, 0, kda_in((const char *)x + 1, KDA_F16, 2, 2),
                      kda_out(y, KDA_F16, 2, 2), NULL) == KDA_ERR_ALIGN);
}

/* ---- The f16 state ---- */

/* The same bits for every split, as a float32 state promises; an error that f16 explains. */
static void f16_state_splits_and_error(void) {
    kda_desc desc = problem_desc(2, 0, 24, 10), half = desc;
    half.state_type = KDA_F16;
    CHECK(kda_state_bytes(&half) == kda_state_bytes(&desc) / 2);
    test_seed(3);
    problem p = problem_new(&desc, 96);
    problem p16 = p;
    p16.desc = half;
    size_t n = p.state_count;
    uint16_t *start = (uint16_t *)typed(p.start, n, KDA_F16);
    uint16_t *want = (uint16_t *)test_alloc(n * 2), *state = (uint16_t *)test_alloc(n * 2);
    float *o32 = test_floats(p.output_count), *s32 = test_floats(n);
    float *want_o = test_floats(p.output_count), *o = test_floats(p.output_count);
    for (int algorithm = KDA_RECURRENT; algorithm <= KDA_CHUNKED; algorithm++) {
        size_t step = algorithm == KDA_CHUNKED ? KDA_CHUNK : 1;
        memcpy(want, start, n * 2);
        CHECK(problem_run(&p16, (kda_algorithm)algorithm, 0, 96, want, want_o) == KDA_OK);
        for (size_t piece = step; piece < 96; piece += step * 5) {
            memcpy(state, start, n * 2);
            for (size_t t = 0; t < 96; t += piece) {
                size_t some = 96 - t < piece ? 96 - t : piece;
                CHECK(problem_run(&p16, (kda_algorithm)algorithm, t, some, state, o) == KDA_OK);
            }
            CHECK(memcmp(state, want, n * 2) == 0 && memcmp(o, want_o, p.output_count * 4) == 0);
        }
        problem_solve(&p, (kda_algorithm)algorithm, s32, o32);
        CHECK_AT_MOST("f16 state", test_relative_l2_f32(want_o, o32, p.output_count), 2e-3);
        CHECK(memcmp(want_o, o32, p.output_count * 4) != 0);
    }
    free(start), free(want), free(state), free(o32), free(s32), free(want_o), free(o);
    problem_free(&p);
}

/* The first n tokens from a state of that type; what it is then, in float32. */
static void state_after(const problem *p, kda_isa isa, kda_algorithm algorithm, size_t n,
                        kda_type type, const float *start, float *end) {
    problem typed_problem = *p;
    float *o = test_floats(p->output_count);
    kda_seq seq;
    kda_run run;
    typed_problem.desc.state_type = type;
    kda_args args = problem_args(&typed_problem, 0, o);
    memcpy(end, start, p->state_count * sizeof(float));
    memset(&seq, 0, sizeof seq), memset(&run, 0, sizeof run);
    seq.n_tokens = n, seq.state = typed(end, p->state_count, type);
    args.seqs = &seq, args.n_seqs = 1;
    run.isa = isa, run.algorithm = algorithm;
    run.scratch_bytes = kda_scratch_bytes(&typed_problem.desc, 1, &run);
    run.scratch = test_scratch(run.scratch_bytes);
    CHECK(kda_forward(&typed_problem.desc, &args, &run) == KDA_OK);
    for (size_t i = 0; i < p->state_count; i++)
        end[i] = type == KDA_F32 ? ((float *)seq.state)[i] : kda_from_f16(((uint16_t *)seq.state)[i]);
    free(run.scratch), free(seq.state), free(o);
}

/* What is rounded at once, a token or a chunk, is the float32 state to nearest, on every set. */
static void f16_state_is_the_nearest(void) {
    static const size_t dims[][2] = {{24, 10}, {37, 45}, {64, 32}, {16, 128}};
    test_seed(4);
    for (size_t i = 0; i < sizeof dims / sizeof *dims; i++) {
        kda_desc desc = problem_desc(2, 0, dims[i][0], dims[i][1]);
        problem p = problem_new(&desc, KDA_CHUNK);
        size_t n = p.state_count;
        float *exact = test_floats(n), *half = test_floats(n);
        free(typed(p.start, n, KDA_F16));
        for (int isa = KDA_ISA_SCALAR; isa <= KDA_ISA_NEON; isa++)
            for (int chunked = 0; kda_isa_is_available((kda_isa)isa) && chunked < 2; chunked++) {
                kda_algorithm algorithm = chunked ? KDA_CHUNKED : KDA_RECURRENT;
                size_t tokens = chunked ? KDA_CHUNK : 1;
                state_after(&p, (kda_isa)isa, algorithm, tokens, KDA_F32, p.start, exact);
                state_after(&p, (kda_isa)isa, algorithm, tokens, KDA_F16, p.start, half);
                free(typed(exact, n, KDA_F16));
                CHECK_MSG(memcmp(exact, half, n * sizeof(float)) == 0, "%s, %s, %zu x %zu",
                          kda_isa_name((kda_isa)isa), chunked ? "chunked" : "recurrent", dims[i][0],
                          dims[i][1]);
            }
        free(exact), free(half);
        problem_free(&p);
    }
}

static void f16_state_in_and_out(void) {
    kda_desc desc = problem_desc(2, 0, 5, 3);
    desc.state_type = KDA_F16;
    float kv[30], back[30];
    uint16_t state[30], copy[30];
    for (size_t i = 0; i < 30; i++) kv[i] = 0.5f * (float)i;
    CHECK(kda_state_import_kv(&desc, kv, state) == KDA_OK);
    CHECK(kda_from_f16(state[(1 * 3 + 2) * 5 + 4]) == kv[(1 * 5 + 4) * 3 + 2]);
    CHECK(kda_state_export_kv(&desc, state, back) == KDA_OK);
    CHECK(memcmp(kv, back, sizeof kv) == 0);
    CHECK(kda_state_copy(&desc, state, copy) == KDA_OK && memcmp(state, copy, sizeof copy) == 0);
    CHECK(kda_state_is_finite(&desc, state));
    state[17] = 0x7c00;
    CHECK(!kda_state_is_finite(&desc, state));
    CHECK(kda_state_clear(&desc, state) == KDA_OK && state[17] == 0);
}

static void finite_or_not(void) {
    kda_desc desc = problem_desc(1, 0, 2, 2);
    float state[4] = {1, -FLT_MAX, 0x1p-149f, 0};
    CHECK(kda_state_is_finite(&desc, state));
    state[3] = NAN;
    CHECK(!kda_state_is_finite(&desc, state));
    state[3] = -INFINITY;
    CHECK(!kda_state_is_finite(&desc, state));
    CHECK(!kda_state_is_finite(&desc, NULL));
}

int main(void) {
    TEST(every_16_bit_pattern_to_float_and_back);
    TEST(rounding_is_to_nearest_even);
    TEST(every_tensor_in_every_type);
    TEST(parts_in_16_bits);
    TEST(a_16_bit_tensor_at_an_odd_address_is_refused);
    TEST(f16_state_splits_and_error);
    TEST(f16_state_is_the_nearest);
    TEST(f16_state_in_and_out);
    TEST(finite_or_not);
    return test_summary();
}
