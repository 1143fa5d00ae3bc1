/* Convolution, L2 norm and gated norm against float64, and what they promise about splits. */
#include "../kda.h"
#include "reference.h"
#include "test.h"

static int same_bits(const float *a, const float *b, size_t n) {
    return memcmp(a, b, n * sizeof *a) == 0;
}

/* ---- Convolution ---- */

typedef struct conv_problem {
    kda_conv_desc desc;
    size_t tokens, window_count;
    float *x, *weight, *window; /* [tokens][channels], [channels][width], [width - 1][channels] */
} conv_problem;

static conv_problem conv_new(size_t channels, size_t width, size_t tokens) {
    conv_problem p;
    memset(&p, 0, sizeof p);
    p.desc.channels = channels;
    p.desc.width = width;
    p.desc.activation = KDA_ACTIVATION_SILU;
    p.tokens = tokens;
    p.window_count = (width - 1) * channels;
    p.x = test_floats(tokens * channels);
    p.weight = test_floats(channels * width);
    p.window = test_floats(p.window_count);
    test_fill_normal(p.x, tokens * channels);
    test_fill_normal(p.weight, channels * width);
    test_fill_normal(p.window, p.window_count);
    return p;
}

static void conv_free(conv_problem *p) {
    free(p->x);
    free(p->weight);
    free(p->window);
}

/* Tokens first .. first + n - 1 of x into y, both whole tensors. */
static void conv_run(const conv_problem *p, const float *x, size_t first, size_t n, float *window,
                     float *y) {
    kda_seq seq;
    kda_conv_args args;
    kda_run run;
    ptrdiff_t row = (ptrdiff_t)p->desc.channels;
    memset(&seq, 0, sizeof seq);
    memset(&args, 0, sizeof args);
    memset(&run, 0, sizeof run);
    seq.n_tokens = n;
    seq.window = window;
    args.x = kda_in_f32(x + (ptrdiff_t)first * row, row, 0);
    args.y = kda_out_f32(y + (ptrdiff_t)first * row, row, 0);
    args.weight = p->weight;
    args.seqs = &seq;
    args.n_seqs = 1;
    run.scratch_bytes = kda_conv_scratch_bytes(&p->desc, 1, NULL);
    run.scratch = test_scratch(run.scratch_bytes);
    CHECK(kda_conv(&p->desc, &args, &run) == KDA_OK);
    free(run.scratch);
}

/* Input t of a channel, t counted from the first token: before it, the window. */
static double conv_input(const conv_problem *p, ptrdiff_t t, size_t c) {
    ptrdiff_t past = (ptrdiff_t)p->desc.width - 1, row = (ptrdiff_t)p->desc.channels;
    ptrdiff_t channel = (ptrdiff_t)c;
    return (double)(t >= 0 ? p->x[t * row + channel] : p->window[(past + t) * row + channel]);
}

static void check_conv(size_t channels, size_t width, size_t tokens) {
    conv_problem p = conv_new(channels, width, tokens);
    float *window = test_floats(p.window_count), *y = test_floats(tokens * channels);
    for (int activation = KDA_ACTIVATION_NONE; activation <= KDA_ACTIVATION_SILU; activation++) {
        p.desc.activation = (kda_activation)activation;
        memcpy(window, p.window, p.window_count * sizeof(float));
        conv_run(&p, p.x, 0, tokens, window, y);
        for (size_t t = 0; t < tokens; t++)
            for (size_t c = 0; c < channels; c++) {
                double sum = 0, size = 0;
                for (size_t i = 0; i < width; i++) {
                    double w = (double)p.weight[c * width + i];
                    double x =
                        conv_input(&p, (ptrdiff_t)t - (ptrdiff_t)width + 1 + (ptrdiff_t)i, c);
                    sum += w * x;
                    size += fabs(w * x);
                }
                double want =
                    activation == KDA_ACTIVATION_SILU ? sum * reference_sigmoid(sum) : sum;
                CHECK_AT_MOST("conv", fabs((double)y[t * channels + c] - want),
                              4e-7 * size + 1e-30);
            }
        for (size_t i = 0; i + 1 < width; i++)
            for (size_t c = 0; c < channels; c++) {
                ptrdiff_t t = (ptrdiff_t)(tokens + i) - (ptrdiff_t)width + 1;
                CHECK((double)window[i * channels + c] == conv_input(&p, t, c));
            }
    }
    free(window);
    free(y);
    conv_free(&p);
}

/* Shorter than the history, as long as it, longer; a warm window throughout. */
static void conv_against_float64(void) {
    static const size_t widths[] = {1, 2, 3, 4, 7, 64};
    test_seed(1);
    for (size_t w = 0; w < sizeof widths / sizeof *widths; w++)
        for (size_t tokens = 0; tokens <= 9; tokens++) check_conv(5, widths[w], tokens);
}

static void conv_cold_window_is_zero_padding(void) {
    test_seed(2);
    conv_problem p = conv_new(3, 4, 1);
    float window[9] = {0}, y[3];
    p.desc.activation = KDA_ACTIVATION_NONE;
    conv_run(&p, p.x, 0, 1, window, y);
    for (size_t c = 0; c < 3; c++) CHECK(y[c] == p.weight[c * 4 + 3] * p.x[c]);
    conv_free(&p);
}

static void conv_bits_do_not_depend_on_splits_or_place(void) {
    test_seed(3);
    for (size_t width = 1; width <= 4; width++) {
        conv_problem p = conv_new(6, width, 4);
        float want_window[18], window[18], want[24], y[24];
        memcpy(want_window, p.window, p.window_count * sizeof(float));
        conv_run(&p, p.x, 0, 4, want_window, want);
        for (unsigned cuts = 0; cuts < 8; cuts++) { /* bit t: a call ends after token t */
            size_t first = 0;
            memcpy(window, p.window, p.window_count * sizeof(float));
            memcpy(y, p.x, sizeof y); /* in place */
            for (size_t t = 0; t < 4; t++)
                if (t == 3 || (cuts >> t & 1u)) {
                    conv_run(&p, y, first, t + 1 - first, window, y);
                    first = t + 1;
                }
            CHECK(same_bits(y, want, 24));
            CHECK(same_bits(window, want_window, p.window_count));
        }
        conv_free(&p);
    }
}

/* Lengths {2, 0, padding of 1, 3}: each sequence with its own window; padding is not written. */
static void conv_of_a_ragged_batch(void) {
    static const size_t lengths[] = {2, 0, 1, 3};
    test_seed(4);
    conv_problem p = conv_new(4, 3, 6);
    float windows[4][8], want[8], y[24], want_y[24];
    kda_seq seqs[4];
    memset(seqs, 0, sizeof seqs);
    for (size_t i = 0; i < 24; i++) y[i] = want_y[i] = -77.0f;
    for (size_t i = 0; i < 4; i++) {
        memcpy(windows[i], p.window, sizeof windows[i]);
        seqs[i].n_tokens = lengths[i];
        seqs[i].window = i == 2 ? NULL : windows[i];
    }
    kda_conv_args args;
    memset(&args, 0, sizeof args);
    args.x = kda_in_f32(p.x, 4, 0);
    args.y = kda_out_f32(y, 4, 0);
    args.weight = p.weight;
    args.seqs = seqs;
    args.n_seqs = 4;
    kda_run run;
    memset(&run, 0, sizeof run);
    run.scratch_bytes = kda_conv_scratch_bytes(&p.desc, 4, NULL);
    run.scratch = test_scratch(run.scratch_bytes);
    CHECK(kda_conv(&p.desc, &args, &run) == KDA_OK);
    free(run.scratch);
    size_t token = 0;
    for (size_t i = 0; i < 4; i++) {
        memcpy(want, p.window, sizeof want);
        if (i != 2) conv_run(&p, p.x, token, lengths[i], want, want_y);
        CHECK(same_bits(windows[i], want, 8));
        token += lengths[i];
    }
    CHECK(same_bits(y, want_y, 24));
    conv_free(&p);
}

/* ---- Norms ---- */

static void norms_against_float64(void) {
    static const size_t dims[] = {1, 2, 3, 16, 31, 33, 100, 128, 300};
    test_seed(5);
    for (size_t d = 0; d < sizeof dims / sizeof *dims; d++) {
        size_t dim = dims[d], rows = 3 * 2, n = rows * dim;
        float *x = test_floats(n), *gate = test_floats(n), *weight = test_floats(dim);
        float *unit = test_floats(n), *gated = test_floats(n);
        ptrdiff_t head = (ptrdiff_t)dim;
        test_fill_normal(x, n);
        test_fill_normal(gate, n);
        test_fill_normal(weight, dim);
        for (size_t i = 0; i < dim; i++) x[i] *= 1e-3f; /* a row where eps counts */
        CHECK(kda_l2_norm(3, 2, dim, 0, kda_in_f32(x, 2 * head, head),
                          kda_out_f32(unit, 2 * head, head), NULL) == KDA_OK);
        CHECK(kda_gated_norm(3, 2, dim, 1e-5f, weight, kda_in_f32(x, 2 * head, head),
                             kda_in_f32(gate, 2 * head, head),
                             kda_out_f32(gated, 2 * head, head), NULL) == KDA_OK);
        for (size_t r = 0; r < rows; r++) {
            double sum = 0;
            for (size_t i = 0; i < dim; i++) sum += pow((double)x[r * dim + i], 2);
            for (size_t i = 0; i < dim; i++) {
                double value = (double)x[r * dim + i];
                double want = value / sqrt(sum + 1e-6);
                CHECK_AT_MOST("l2", fabs((double)unit[r * dim + i] - want), 4e-7 * fabs(want));
                want = value / sqrt(sum / (double)dim + 1e-5) * (double)weight[i] *
                       reference_sigmoid((double)gate[r * dim + i]);
                CHECK_AT_MOST("gated", fabs((double)gated[r * dim + i] - want), 6e-7 * fabs(want));
            }
        }
        free(x), free(gate), free(weight), free(unit), free(gated);
    }
}

static void norms_in_place_and_strided(void) {
    float wide[2 * 40], copy[2 * 40], y[2 * 2 * 5], weight[5];
    test_seed(6);
    test_fill_normal(wide, 80);
    test_fill_normal(weight, 5);
    memcpy(copy, wide, sizeof wide);
    /* heads at columns 3 and 10 of rows of 40; gate at columns 20 and 27 */
    CHECK(kda_gated_norm(2, 2, 5, 1e-5f, weight, kda_in_f32(wide + 3, 40, 7),
                         kda_in_f32(wide + 20, 40, 7), kda_out_f32(y, 10, 5), NULL) == KDA_OK);
    CHECK(kda_gated_norm(2, 2, 5, 1e-5f, weight, kda_in_f32(wide + 3, 40, 7),
                         kda_in_f32(wide + 20, 40, 7), kda_out_f32(wide + 3, 40, 7),
                         NULL) == KDA_OK);
    for (size_t t = 0; t < 2; t++)
        for (size_t h = 0; h < 2; h++) {
            float *row = wide + t * 40 + 3 + h * 7;
            CHECK(same_bits(row, y + (t * 2 + h) * 5, 5));
            memcpy(copy + t * 40 + 3 + h * 7, row, 5 * sizeof(float));
        }
    CHECK(same_bits(wide, copy, 80)); /* nothing else was written */
    CHECK(kda_l2_norm(2, 2, 5, 0, kda_in_f32(copy + 3, 40, 7), kda_out_f32(y, 10, 5), NULL) ==
          KDA_OK);
    CHECK(kda_l2_norm(2, 2, 5, 0, kda_in_f32(copy + 3, 40, 7), kda_out_f32(copy + 3, 40, 7),
                      NULL) == KDA_OK);
    for (size_t t = 0; t < 2; t++)
        for (size_t h = 0; h < 2; h++)
            CHECK(same_bits(copy + t * 40 + 3 + h * 7, y + (t * 2 + h) * 5, 5));
}

int main(void) {
    TEST(conv_against_float64);
    TEST(conv_cold_window_is_zero_padding);
    TEST(conv_bits_do_not_depend_on_splits_or_place);
    TEST(conv_of_a_ragged_batch);
    TEST(norms_against_float64);
    TEST(norms_in_place_and_strided);
    return test_summary();
}
