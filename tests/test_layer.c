/* A whole layer in one call: the bits of its parts called one by one, float64, splits, threads,
 * speculation of state and windows together, misuse. */
#include "../kda.h"
#include "hooks.h"
#include "reference.h"
#include "test.h"

static kda_run run_as(kda_algorithm algorithm) {
    kda_run run;
    memset(&run, 0, sizeof run);
    run.algorithm = algorithm;
    return run;
}

static void give_scratch(kda_run *run, size_t bytes) {
    CHECK(bytes > 0);
    run->scratch_bytes = bytes;
    run->scratch = test_scratch(bytes); /* to the byte, so that a sanitizer sees an overrun */
}

/* ---- A layer ---- */

static float *normal_floats(size_t n, float scale) {
    float *x = test_floats(n);
    test_fill_normal(x, n);
    for (size_t i = 0; i < n; i++) x[i] *= scale;
    return x;
}

/* The weights are the layer's own, to be freed by layer_free. */
static kda_layer_desc layer_new(size_t heads, size_t qk_heads, size_t K, size_t V, size_t width) {
    kda_layer_desc layer;
    memset(&layer, 0, sizeof layer);
    layer.op.n_heads = heads, layer.op.n_qk_heads = qk_heads;
    layer.op.dim_k = K, layer.op.dim_v = V;
    layer.op.gate = KDA_GATE_SOFTPLUS;
    layer.op.beta = KDA_BETA_LOGIT;
    layer.op.flags = KDA_L2_NORM_QK;
    layer.conv_width = width;
    layer.conv_activation = KDA_ACTIVATION_SILU;
    layer.q_conv = normal_floats(qk_heads * K * width, 0.5f);
    layer.k_conv = normal_floats(qk_heads * K * width, 0.5f);
    layer.v_conv = normal_floats(heads * V * width, 0.5f);
    layer.A_log = normal_floats(heads, 0.5f);
    layer.dt_bias = normal_floats(heads * K, 1.0f);
    layer.norm_weight = normal_floats(V, 1.0f);
    layer.norm_eps = 1e-5f;
    return layer;
}

static void free_weights(const float *x) {
    float *mine;
    memcpy(&mine, &x, sizeof mine); /* a cast would be told off for dropping const */
    free(mine);
}

static void layer_free(const kda_layer_desc *layer) {
    free_weights(layer->q_conv), free_weights(layer->k_conv), free_weights(layer->v_conv);
    free_weights(layer->A_log), free_weights(layer->dt_bias), free_weights(layer->norm_weight);
}

/* ---- A batch: every tensor a column slice of one wide row ---- */

enum { Q, K_, V_, G, BETA, GATE, O, TENSORS, MAX_SEQS = 8, GAP = 8 };

typedef struct tensor {
    kda_type type;
    size_t heads, dim, at; /* at: bytes from the start of a row */
} tensor;

/* Gaps between tensors and between heads, and padding rows, hold NaN of every type (all bits set):
 * a read of them poisons the result, a write shows in a comparison of all bytes. */
typedef struct batch {
    const kda_layer_desc *layer;
    size_t n_seqs, n[MAX_SEQS], first[MAX_SEQS], tokens;
    unsigned padding; /* a bit for each sequence that is padding */
    tensor t[TENSORS];
    size_t row_bytes, state_bytes, window_bytes;
    unsigned char *rows, *states, *windows; /* [tokens], [n_seqs], [n_seqs] */
} batch;

static size_t type_bytes(kda_type type) {
    return type == KDA_F32 ? 4 : 2;
}

/* From one head to the next, in elements: two more than a head has. */
static size_t head_step(const tensor *t) {
    return t->dim + 2;
}

static void put_element(unsigned char *at, kda_type type, float x) {
    uint16_t half = type == KDA_F16 ? kda_to_f16(x) : kda_to_bf16(x);
    memcpy(at, type == KDA_F32 ? (const void *)&x : (const void *)&half, type_bytes(type));
}

static float get_element(const unsigned char *at, kda_type type) {
    float x;
    uint16_t half;
    memcpy(&half, at, sizeof half);
    if (type != KDA_F32) return type == KDA_F16 ? kda_from_f16(half) : kda_from_bf16(half);
    memcpy(&x, at, sizeof x);
    return x;
}

static unsigned char *element(const batch *b, size_t which, size_t token, size_t head, size_t i) {
    const tensor *t = &b->t[which];
    return b->rows + token * b->row_bytes + t->at + (head * head_step(t) + i) * type_bytes(t->type);
}

static void batch_lay_out(batch *b, const kda_type *types, int alias) {
    const kda_desc *op = &b->layer->op;
    size_t qk = op->n_qk_heads, at = GAP;
    for (size_t i = 0; i < TENSORS; i++) {
        tensor *t = &b->t[i];
        t->type = types[i];
        t->heads = i == Q || i == K_ ? qk : op->n_heads;
        t->dim = i == BETA ? 1 : i == Q || i == K_ || i == G ? op->dim_k : op->dim_v;
        t->at = at;
        at += (t->heads * head_step(t) * type_bytes(t->type) + 3) / 4 * 4 + GAP;
    }
    if (alias >= 0) b->t[O] = b->t[alias]; /* the output over the values or the gate, exactly */
    b->row_bytes = at;
}

/* alias: V_ or GATE, or -1 for an output with columns of its own. */
static batch batch_new(const kda_layer_desc *layer, const size_t *n, size_t n_seqs,
                       unsigned padding, const kda_type *types, int alias) {
    static const kda_type all_f32[TENSORS] = {KDA_F32};
    batch b;
    memset(&b, 0, sizeof b);
    b.layer = layer, b.n_seqs = n_seqs, b.padding = padding;
    for (size_t i = 0; i < n_seqs; i++) b.n[i] = n[i], b.first[i] = b.tokens, b.tokens += n[i];
    batch_lay_out(&b, types ? types : all_f32, alias);
    b.state_bytes = kda_state_bytes(&layer->op);
    b.window_bytes = kda_layer_window_bytes(layer);
    b.rows = (unsigned char *)test_alloc(b.tokens * b.row_bytes);
    b.states = (unsigned char *)test_alloc(n_seqs * b.state_bytes);
    b.windows = (unsigned char *)test_alloc(n_seqs * b.window_bytes);
    memset(b.rows, 0xFF, b.tokens * b.row_bytes);
    for (size_t s = 0; s < n_seqs; s++)
        for (size_t t = b.first[s]; t < b.first[s] + n[s] && !(padding >> s & 1u); t++)
            for (size_t i = 0; i < O; i++)
                for (size_t h = 0; h < b.t[i].heads; h++)
                    for (size_t d = 0; d < b.t[i].dim; d++)
                        put_element(element(&b, i, t, h, d), b.t[i].type, test_normal());
    size_t size = type_bytes(layer->op.state_type);
    for (size_t i = 0; i < n_seqs * b.state_bytes; i += size)
        put_element(b.states + i, layer->op.state_type, test_normal());
    for (size_t i = 0; i < n_seqs * b.window_bytes; i += 4)
        put_element(b.windows + i, KDA_F32, test_normal());
    return b;
}

static unsigned char *copy_bytes(const unsigned char *from, size_t bytes) {
    unsigned char *to = (unsigned char *)test_alloc(bytes);
    memcpy(to, from, bytes);
    return to;
}

static batch batch_copy(const batch *from) {
    batch b = *from;
    b.rows = copy_bytes(from->rows, b.tokens * b.row_bytes);
    b.states = copy_bytes(from->states, b.n_seqs * b.state_bytes);
    b.windows = copy_bytes(from->windows, b.n_seqs * b.window_bytes);
    return b;
}

static void batch_free(batch *b) {
    free(b->rows), free(b->states), free(b->windows);
}

static int batch_same(const batch *a, const batch *b) {
    return memcmp(a->rows, b->rows, a->tokens * a->row_bytes) == 0 &&
           memcmp(a->states, b->states, a->n_seqs * a->state_bytes) == 0 &&
           memcmp(a->windows, b->windows, a->n_seqs * a->window_bytes) == 0;
}

static kda_input input_at(const batch *b, size_t which, size_t token) {
    const tensor *t = &b->t[which];
    return kda_in(b->rows + token * b->row_bytes + t->at, t->type,
                  (ptrdiff_t)(b->row_bytes / type_bytes(t->type)), (ptrdiff_t)head_step(t));
}

static kda_output output_at(const batch *b, size_t token) {
    kda_input view = input_at(b, O, token);
    return kda_out(b->rows + token * b->row_bytes + b->t[O].at, view.type, view.token_stride,
                   view.head_stride);
}

static kda_layer_args batch_args(const batch *b, size_t token) {
    kda_layer_args args;
    memset(&args, 0, sizeof args);
    args.q = input_at(b, Q, token), args.k = input_at(b, K_, token),
    args.v = input_at(b, V_, token);
    args.g = input_at(b, G, token), args.beta = input_at(b, BETA, token);
    args.gate = input_at(b, GATE, token), args.o = output_at(b, token);
    return args;
}

static kda_seq batch_seq(const batch *b, size_t seq, size_t n) {
    kda_seq s;
    memset(&s, 0, sizeof s);
    s.n_tokens = n;
    if (b->padding >> seq & 1u) return s;
    s.state = b->states + seq * b->state_bytes;
    if (b->window_bytes > 0) s.window = b->windows + seq * b->window_bytes;
    return s;
}

static void batch_run(batch *b, kda_run run) {
    kda_seq seqs[MAX_SEQS];
    kda_layer_args args = batch_args(b, 0);
    for (size_t i = 0; i < b->n_seqs; i++) seqs[i] = batch_seq(b, i, b->n[i]);
    args.seqs = seqs, args.n_seqs = b->n_seqs;
    give_scratch(&run, kda_layer_scratch_bytes(b->layer, b->n_seqs, &run));
    CHECK(kda_layer(b->layer, &args, &run) == KDA_OK);
    free(run.scratch);
}

/* Rows first .. first + n - 1 of the batch as the next tokens of one sequence. */
static void batch_run_rows(batch *b, size_t seq, size_t first, size_t n, kda_algorithm algorithm) {
    kda_seq one = batch_seq(b, seq, n);
    kda_layer_args args = batch_args(b, first);
    kda_run run = run_as(algorithm);
    args.seqs = &one, args.n_seqs = 1;
    give_scratch(&run, kda_layer_scratch_bytes(b->layer, 1, &run));
    CHECK(kda_layer(b->layer, &args, &run) == KDA_OK);
    free(run.scratch);
}

/* ---- The parts, one by one ---- */

/* One sequence's q, k or v through kda_conv: gathered, for kda_conv knows no heads. */
static float *parts_convolve(batch *b, size_t seq, size_t which, const float *weight,
                             size_t window_at) {
    const tensor *t = &b->t[which];
    size_t channels = t->heads * t->dim, n = b->n[seq], size = type_bytes(t->type);
    unsigned char *x = (unsigned char *)test_alloc(n * channels * size), no_window[4];
    float *y = test_floats(n * channels);
    for (size_t i = 0; i < n * channels; i++) {
        size_t head = i % channels / t->dim;
        memcpy(x + i * size, element(b, which, b->first[seq] + i / channels, head, i % t->dim),
               size);
    }
    kda_conv_desc desc;
    kda_conv_args args;
    kda_run run = run_as(KDA_AUTO);
    kda_seq one = batch_seq(b, seq, n);
    memset(&desc, 0, sizeof desc), memset(&args, 0, sizeof args);
    desc.channels = channels, desc.width = b->layer->conv_width;
    desc.activation = b->layer->conv_activation;
    one.window = one.window ? (unsigned char *)one.window + window_at * sizeof(float) : no_window;
    if (desc.width == 1) one.window = y;
    args.x = kda_in(x, t->type, (ptrdiff_t)channels, 0);
    args.y = kda_out_f32(y, (ptrdiff_t)channels, 0);
    args.weight = weight, args.seqs = &one, args.n_seqs = 1;
    give_scratch(&run, kda_conv_scratch_bytes(&desc, 1, &run));
    CHECK(kda_conv(&desc, &args, &run) == KDA_OK);
    free(run.scratch), free(x);
    return y;
}

static void parts_run_sequence(batch *b, size_t seq, kda_algorithm algorithm) {
    const kda_layer_desc *layer = b->layer;
    const kda_desc *op = &layer->op;
    size_t n = b->n[seq], first = b->first[seq], past = layer->conv_width - 1;
    size_t qk = op->n_qk_heads * op->dim_k, vs = op->n_heads * op->dim_v;
    ptrdiff_t k = (ptrdiff_t)op->dim_k, v = (ptrdiff_t)op->dim_v;
    float *y[3], *o = test_floats(n * vs);
    y[0] = parts_convolve(b, seq, Q, layer->q_conv, 0);
    y[1] = parts_convolve(b, seq, K_, layer->k_conv, past * qk);
    y[2] = parts_convolve(b, seq, V_, layer->v_conv, past * 2 * qk);
    kda_args args;
    kda_run run = run_as(algorithm);
    kda_seq one = batch_seq(b, seq, n);
    memset(&args, 0, sizeof args);
    args.q = kda_in_f32(y[0], (ptrdiff_t)qk, k), args.k = kda_in_f32(y[1], (ptrdiff_t)qk, k);
    args.v = kda_in_f32(y[2], (ptrdiff_t)vs, v);
    args.g = input_at(b, G, first), args.beta = input_at(b, BETA, first);
    args.o = kda_out_f32(o, (ptrdiff_t)vs, v);
    args.A_log = layer->A_log, args.dt_bias = layer->dt_bias;
    args.seqs = &one, args.n_seqs = 1;
    give_scratch(&run, kda_scratch_bytes(op, 1, &run));
    CHECK(kda_forward(op, &args, &run) == KDA_OK);
    CHECK(kda_gated_norm(n, op->n_heads, op->dim_v, layer->norm_eps, layer->norm_weight,
                         kda_in_f32(o, (ptrdiff_t)vs, v), input_at(b, GATE, first),
                         output_at(b, first), NULL) == KDA_OK);
    free(run.scratch), free(o), free(y[0]), free(y[1]), free(y[2]);
}

static void parts_run(batch *b, kda_algorithm algorithm) {
    for (size_t i = 0; i < b->n_seqs; i++)
        if (b->n[i] > 0 && !(b->padding >> i & 1u)) parts_run_sequence(b, i, algorithm);
}

/* The layer with each algorithm against its parts. Consumes b. */
static void check_parts(batch b, const char *what) {
    for (int algorithm = KDA_AUTO; algorithm <= KDA_CHUNKED; algorithm++) {
        batch whole = batch_copy(&b), parts = batch_copy(&b);
        batch_run(&whole, run_as((kda_algorithm)algorithm));
        parts_run(&parts, (kda_algorithm)algorithm);
        CHECK_MSG(!batch_same(&b, &parts), "%s: the parts did nothing", what);
        CHECK_MSG(batch_same(&whole, &parts), "%s, algorithm %d", what, algorithm);
        batch_free(&whole), batch_free(&parts);
    }
    batch_free(&b);
}

/* Rows go through in blocks cut at multiples of a chunk: lengths around both. */
static void equal_to_the_parts_at_any_length(void) {
    static const size_t lengths[] = {1,  2,  15, 16, 17, 47, 48,  49,
                                     63, 64, 65, 79, 80, 81, 128, 200};
    test_seed(1);
    kda_layer_desc layer = layer_new(2, 1, 5, 7, 4);
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        char what[32];
        snprintf(what, sizeof what, "%zu tokens", lengths[i]);
        check_parts(batch_new(&layer, &lengths[i], 1, 0, NULL, -1), what);
    }
    layer_free(&layer);
}

/* Lengths of none, padding between sequences, starts at any place of a block. */
static void equal_to_the_parts_in_ragged_batches(void) {
    static const size_t batches[][6] = {
        {3, 0, 5, 70, 1, 2}, {0, 2, 63, 1, 1, 64},     {60, 7, 20, 0, 0, 33},   {1, 1, 1, 1, 1, 1},
        {0, 0, 0, 0, 0, 1},  {50, 100, 14, 16, 65, 3}, {16, 66, 16, 16, 16, 16}};
    test_seed(2);
    kda_layer_desc layer = layer_new(2, 2, 5, 7, 4);
    for (size_t i = 0; i < sizeof batches / sizeof *batches; i++) {
        char what[32];
        snprintf(what, sizeof what, "batch %zu", i);
        check_parts(batch_new(&layer, batches[i], 6, 0, NULL, -1), what);
        check_parts(batch_new(&layer, batches[i], 6, 1u << 1 | 1u << 4, NULL, -1), what);
    }
    layer_free(&layer);
}

/* Each tensor of each type, state in either, the output by itself or over values or gate. */
static void equal_to_the_parts_in_any_types(void) {
    static const size_t n[] = {5, 2, 70, 1};
    static const int aliases[] = {-1, V_, GATE};
    test_seed(3);
    kda_layer_desc layer = layer_new(4, 2, 6, 9, 4);
    for (size_t turn = 0; turn < 6; turn++)
        for (size_t a = 0; a < 3; a++) {
            kda_type types[TENSORS];
            char what[32];
            for (size_t i = 0; i < TENSORS; i++)
                types[i] = (kda_type)(turn < 3 ? turn : (turn + i) % 3);
            layer.op.state_type = turn % 2 ? KDA_F16 : KDA_F32;
            snprintf(what, sizeof what, "types %zu, alias %d", turn, aliases[a]);
            check_parts(batch_new(&layer, n, 4, 1u << 1, types, aliases[a]), what);
        }
    layer_free(&layer);
}

static void equal_to_the_parts_in_any_shape(void) {
    static const size_t shapes[][5] = {{6, 2, 8, 5, 4},   {6, 2, 3, 16, 3},  {1, 1, 1, 1, 2},
                                       {1, 1, 130, 3, 4}, {2, 1, 3, 131, 7}, {3, 3, 33, 40, 4}};
    static const size_t n[] = {18, 1};
    test_seed(4);
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int map = KDA_HEADS_GROUPED; map <= KDA_HEADS_TILED; map++) {
            const size_t *s = shapes[i];
            char what[32];
            kda_layer_desc layer = layer_new(s[0], s[1], s[2], s[3], s[4]);
            layer.op.head_map = (kda_head_map)map;
            snprintf(what, sizeof what, "shape %zu, map %d", i, map);
            check_parts(batch_new(&layer, n, 2, 0, NULL, -1), what);
            layer_free(&layer);
        }
}

static void equal_to_the_parts_with_any_gate(void) {
    static const size_t n[] = {17, 3};
    test_seed(5);
    for (int gate = KDA_GATE_LOG_DECAY; gate <= KDA_GATE_BOUNDED; gate++) {
        kda_layer_desc layer = layer_new(3, 1, 6, 4, 4);
        layer.op.gate = (kda_gate)gate;
        layer.op.lower_bound = gate == KDA_GATE_BOUNDED ? -5.0f : 0.0f;
        layer.op.beta = (kda_beta)gate;
        layer.op.flags = gate == KDA_GATE_LOG_DECAY ? KDA_L2_NORM_QK : 0;
        layer.op.scale = gate == KDA_GATE_BOUNDED ? 0.3f : 0.0f;
        layer.conv_activation =
            gate == KDA_GATE_BOUNDED ? KDA_ACTIVATION_NONE : KDA_ACTIVATION_SILU;
        if (gate == KDA_GATE_LOG_DECAY) {
            free_weights(layer.A_log), free_weights(layer.dt_bias);
            layer.A_log = layer.dt_bias = NULL;
        }
        check_parts(batch_new(&layer, n, 2, 0, NULL, -1), "gate");
        layer_free(&layer);
    }
}

/* A convolution of one tap has no history: no window, and none is asked for. */
static void width_1_needs_no_window(void) {
    static const size_t n[] = {17, 70};
    test_seed(6);
    kda_layer_desc layer = layer_new(2, 1, 5, 7, 1);
    CHECK(kda_layer_window_bytes(&layer) == 0);
    check_parts(batch_new(&layer, n, 2, 0, NULL, -1), "width 1");
    layer_free(&layer);
}

static void same_bits_for_any_threads(void) {
    static const kda_parallel_for hooks[] = {real_threads, backwards, only_the_last};
    static const size_t n[] = {3, 0, 5, 70, 1, 2};
    test_seed(7);
    for (int type = KDA_F32; type <= KDA_F16; type++) {
        kda_layer_desc layer = layer_new(4, 2, 5, 37, 4); /* whole heads for two, tiles for more */
        layer.op.state_type = (kda_type)type;
        layer.op.head_map = type == KDA_F16 ? KDA_HEADS_TILED : KDA_HEADS_GROUPED;
        batch b = batch_new(&layer, n, 6, 1u << 2, NULL, -1), want = batch_copy(&b);
        batch_run(&want, run_as(KDA_AUTO));
        for (size_t threads = 1; threads <= 8; threads++)
            for (size_t h = 0; h < 3; h++) {
                batch got = batch_copy(&b);
                kda_run run = run_as(KDA_AUTO);
                run.parallel_for = hooks[h], run.n_threads = threads;
                batch_run(&got, run);
                CHECK_MSG(batch_same(&got, &want), "%zu threads, hook %zu", threads, h);
                batch_free(&got);
            }
        batch_free(&b), batch_free(&want);
        layer_free(&layer);
    }
}

/* A parallel_for that counts its calls. */
static void counting(void *user, size_t n, kda_task task, void *context) {
    ++*(size_t *)user;
    for (size_t i = 0; i < n; i++) task(context, i);
}

/* One round for a block of rows while there are two heads for each worker, else three. */
static void rounds_are_as_few_as_the_manual_says(void) {
    static const size_t n = 65;
    test_seed(31);
    for (size_t threads = 2; threads <= 3; threads++) {
        kda_layer_desc layer = layer_new(4, 4, 5, 37, 4);
        batch b = batch_new(&layer, &n, 1, 0, NULL, -1);
        kda_run run = run_as(KDA_AUTO);
        size_t rounds = 0;
        run.parallel_for = counting, run.user = &rounds, run.n_threads = threads;
        batch_run(&b, run);
        CHECK_MSG(rounds == (threads == 2 ? 2 : 6), "%zu rounds of %zu threads", rounds, threads);
        batch_free(&b);
        layer_free(&layer);
    }
}

/* ---- Float64 ---- */

static double value_of(const batch *b, size_t which, size_t token, size_t head, size_t i) {
    return (double)get_element(element(b, which, token, head, i), b->t[which].type);
}

/* Input t of a channel of q, k or v of the (one) sequence, t < 0 being its history. */
static double past_value(const batch *b, size_t which, ptrdiff_t t, size_t channel) {
    const kda_desc *op = &b->layer->op;
    size_t qk = op->n_qk_heads * op->dim_k, past = b->layer->conv_width - 1;
    size_t channels = which == V_ ? op->n_heads * op->dim_v : qk, dim = b->t[which].dim;
    if (t >= 0) return value_of(b, which, (size_t)t, channel / dim, channel % dim);
    size_t at = which == Q ? 0 : which == K_ ? past * qk : 2 * past * qk;
    size_t row = (size_t)((ptrdiff_t)past + t);
    return (double)get_element(b->windows + (at + row * channels + channel) * sizeof(float),
                               KDA_F32);
}

static double convolved(const batch *b, size_t which, size_t token, size_t channel) {
    const kda_layer_desc *layer = b->layer;
    const float *weight = which == Q ? layer->q_conv : which == K_ ? layer->k_conv : layer->v_conv;
    size_t width = layer->conv_width;
    double sum = 0;
    for (size_t i = 0; i < width; i++)
        sum +=
            (double)weight[channel * width + i] *
            past_value(b, which, (ptrdiff_t)token - (ptrdiff_t)width + 1 + (ptrdiff_t)i, channel);
    return sum * reference_sigmoid(sum);
}

/* One head of one token: S [K][V] moves on, o [V] is the layer's output. */
static void reference_layer_token(const batch *b, size_t t, size_t h, double *S, double *o) {
    const kda_layer_desc *layer = b->layer;
    const kda_desc *op = &layer->op;
    size_t K = op->dim_k, V = op->dim_v, qk_head = h / (op->n_heads / op->n_qk_heads);
    double q[16], k[16], v[16], g[16], squares = 0;
    for (size_t i = 0; i < K; i++) {
        q[i] = convolved(b, Q, t, qk_head * K + i);
        k[i] = convolved(b, K_, t, qk_head * K + i);
        double z = value_of(b, G, t, h, i) + (double)layer->dt_bias[h * K + i];
        g[i] = -exp((double)layer->A_log[h]) * reference_softplus(z);
    }
    reference_l2_norm(K, 1e-6, q);
    reference_l2_norm(K, 1e-6, k);
    for (size_t i = 0; i < K; i++) q[i] /= sqrt((double)K);
    for (size_t j = 0; j < V; j++) v[j] = convolved(b, V_, t, h * V + j);
    reference_step(K, V, q, k, v, g, reference_sigmoid(value_of(b, BETA, t, h, 0)), S, o);
    for (size_t j = 0; j < V; j++) squares += o[j] * o[j];
    double inverse = 1 / sqrt(squares / (double)V + (double)layer->norm_eps);
    for (size_t j = 0; j < V; j++)
        o[j] *=
            inverse * (double)layer->norm_weight[j] * reference_sigmoid(value_of(b, GATE, t, h, j));
}

/* One sequence from a warm state and window, the recurrent and the chunked way. */
static void check_float64(size_t heads, size_t qk_heads, size_t K, size_t V) {
    static const size_t T = 70;
    kda_layer_desc layer = layer_new(heads, qk_heads, K, V, 4);
    batch b = batch_new(&layer, &T, 1, 0, NULL, -1);
    size_t count = T * heads * V, states = heads * V * K;
    double *want = (double *)test_alloc(count * sizeof *want);
    double *want_state = (double *)test_alloc(states * sizeof *want_state);
    float *got = test_floats(count), *got_state = test_floats(states);
    for (size_t h = 0; h < heads; h++) {
        double S[16 * 16];
        for (size_t i = 0; i < K * V; i++) /* [V][K] to [K][V] */
            S[i % K * V + i / K] = (double)get_element(b.states + (h * V * K + i) * 4, KDA_F32);
        for (size_t t = 0; t < T; t++)
            reference_layer_token(&b, t, h, S, want + (t * heads + h) * V);
        for (size_t i = 0; i < K * V; i++) want_state[h * V * K + i] = S[i % K * V + i / K];
    }
    for (int algorithm = KDA_RECURRENT; algorithm <= KDA_CHUNKED; algorithm++) {
        batch run = batch_copy(&b);
        batch_run(&run, run_as((kda_algorithm)algorithm));
        for (size_t i = 0; i < count; i++)
            got[i] = get_element(element(&run, O, i / V / heads, i / V % heads, i % V), KDA_F32);
        memcpy(got_state, run.states, states * sizeof(float));
        CHECK_AT_MOST("output", test_relative_l2(got, want, count), 1e-6);
        CHECK_AT_MOST("state", test_relative_l2(got_state, want_state, states), 1e-6);
        batch_free(&run);
    }
    free(want), free(want_state), free(got), free(got_state);
    batch_free(&b);
    layer_free(&layer);
}

static void against_float64(void) {
    test_seed(8);
    check_float64(1, 1, 16, 16);
    check_float64(6, 2, 8, 5);
    check_float64(2, 2, 5, 16);
}

/* ---- Splits ---- */

static void any_split_gives_the_same_bits(void) {
    static const size_t T = 40, long_T = 160;
    test_seed(9);
    kda_layer_desc layer = layer_new(2, 1, 5, 7, 4);
    batch b = batch_new(&layer, &T, 1, 0, NULL, -1), want = batch_copy(&b);
    batch_run(&want, run_as(KDA_RECURRENT));
    for (size_t cut = 0; cut <= T; cut++) {
        batch got = batch_copy(&b);
        batch_run_rows(&got, 0, 0, cut, KDA_RECURRENT);
        batch_run_rows(&got, 0, cut, T - cut, KDA_RECURRENT);
        CHECK_MSG(batch_same(&got, &want), "recurrent, cut at %zu", cut);
        batch_free(&got);
    }
    batch_free(&b), batch_free(&want);
    b = batch_new(&layer, &long_T, 1, 0, NULL, -1), want = batch_copy(&b);
    batch_run(&want, run_as(KDA_CHUNKED));
    for (size_t cut = 0; cut <= long_T; cut += KDA_CHUNK) {
        batch got = batch_copy(&b);
        batch_run_rows(&got, 0, 0, cut, KDA_CHUNKED);
        batch_run_rows(&got, 0, cut, long_T - cut, KDA_CHUNKED);
        CHECK_MSG(batch_same(&got, &want), "chunked, cut at %zu", cut);
        batch_free(&got);
    }
    batch_free(&b), batch_free(&want);
    layer_free(&layer);
}

/* ---- Speculation ---- */

/* What single tokens make of each sequence: states and windows after 0 .. n of them. */
typedef struct serial {
    batch end;
    unsigned char *states[MAX_SEQS], *windows[MAX_SEQS]; /* [n + 1] */
} serial;

static serial serial_new(const batch *b) {
    serial s;
    memset(&s, 0, sizeof s);
    s.end = batch_copy(b);
    for (size_t i = 0; i < b->n_seqs; i++) {
        size_t state = b->state_bytes, window = b->window_bytes;
        if (b->padding >> i & 1u) continue;
        s.states[i] = (unsigned char *)test_alloc((b->n[i] + 1) * state);
        s.windows[i] = (unsigned char *)test_alloc((b->n[i] + 1) * window);
        for (size_t t = 0; t <= b->n[i]; t++) {
            memcpy(s.states[i] + t * state, s.end.states + i * state, state);
            memcpy(s.windows[i] + t * window, s.end.windows + i * window, window);
            if (t < b->n[i]) batch_run_rows(&s.end, i, b->first[i] + t, 1, KDA_RECURRENT);
        }
    }
    return s;
}

static void serial_free(serial *s) {
    for (size_t i = 0; i < s->end.n_seqs; i++) free(s->states[i]), free(s->windows[i]);
    batch_free(&s->end);
}

static int is_after(const batch *b, const serial *s, const size_t *m) {
    for (size_t i = 0; i < b->n_seqs; i++) {
        size_t state = b->state_bytes, window = b->window_bytes;
        if (b->padding >> i & 1u) continue;
        if (memcmp(b->states + i * state, s->states[i] + m[i] * state, state) != 0 ||
            memcmp(b->windows + i * window, s->windows[i] + m[i] * window, window) != 0)
            return 0;
    }
    return 1;
}

/* A batch with a journal for each sequence, each alone in its memory. */
typedef struct drafts {
    batch b;
    unsigned char *journal[MAX_SEQS], *written[MAX_SEQS];
    size_t bytes[MAX_SEQS];
} drafts;

static drafts drafts_new(const batch *b) {
    drafts d;
    memset(&d, 0, sizeof d);
    d.b = batch_copy(b);
    for (size_t i = 0; i < b->n_seqs; i++) {
        d.bytes[i] = kda_layer_journal_bytes(b->layer, b->n[i]);
        CHECK(d.bytes[i] > 0);
        d.journal[i] = (unsigned char *)test_alloc(d.bytes[i]);
        d.written[i] = (unsigned char *)test_alloc(d.bytes[i]);
    }
    return d;
}

static void drafts_free(drafts *d) {
    for (size_t i = 0; i < d->b.n_seqs; i++) free(d->journal[i]), free(d->written[i]);
    batch_free(&d->b);
}

static void drafts_seqs(const drafts *d, const size_t *n, kda_seq *seqs) {
    for (size_t i = 0; i < d->b.n_seqs; i++) {
        seqs[i] = batch_seq(&d->b, i, n[i]);
        seqs[i].journal = d->journal[i];
    }
}

static void drafts_verify(drafts *d, kda_run run) {
    kda_seq seqs[MAX_SEQS];
    kda_layer_args args = batch_args(&d->b, 0);
    drafts_seqs(d, d->b.n, seqs);
    args.seqs = seqs, args.n_seqs = d->b.n_seqs;
    give_scratch(&run, kda_layer_scratch_bytes(d->b.layer, d->b.n_seqs, &run));
    CHECK(kda_layer_verify(d->b.layer, &args, &run) == KDA_OK);
    for (size_t i = 0; i < d->b.n_seqs; i++) memcpy(d->written[i], d->journal[i], d->bytes[i]);
    free(run.scratch);
}

static kda_result drafts_commit(drafts *d, const size_t *m, kda_run run) {
    kda_seq seqs[MAX_SEQS];
    drafts_seqs(d, m, seqs);
    give_scratch(&run, kda_layer_scratch_bytes(d->b.layer, d->b.n_seqs, &run));
    kda_result result = kda_layer_commit(d->b.layer, seqs, d->b.n_seqs, &run);
    free(run.scratch);
    return result;
}

/* Verifies b once and, from there, accepts each of n_accepted rows of m. */
static void check_speculation(const batch *b, const size_t (*m)[MAX_SEQS], size_t n_accepted,
                              kda_run run, const char *what) {
    static const size_t none[MAX_SEQS] = {0};
    serial s = serial_new(b);
    drafts d = drafts_new(b);
    drafts_verify(&d, run);
    CHECK_MSG(memcmp(d.b.rows, s.end.rows, b->tokens * b->row_bytes) == 0, "%s: output", what);
    CHECK_MSG(is_after(&d.b, &s, none), "%s: verify wrote a state or window", what);
    for (size_t a = 0; a < n_accepted; a++) {
        int any = 0;
        memcpy(d.b.states, b->states, b->n_seqs * b->state_bytes);
        memcpy(d.b.windows, b->windows, b->n_seqs * b->window_bytes);
        for (size_t i = 0; i < b->n_seqs; i++) {
            memcpy(d.journal[i], d.written[i], d.bytes[i]);
            any |= m[a][i] > 0 && !(b->padding >> i & 1u);
        }
        CHECK_MSG(drafts_commit(&d, m[a], run) == KDA_OK, "%s: commit", what);
        CHECK_MSG(is_after(&d.b, &s, m[a]), "%s, %zu: not the bits of single tokens", what,
                  m[a][0]);
        for (size_t i = 0; i < b->n_seqs; i++)
            CHECK_MSG(m[a][i] > 0 || memcmp(d.journal[i], d.written[i], d.bytes[i]) == 0,
                      "%s: commit(0) wrote a journal", what);
        if (!any) continue;
        CHECK_MSG(drafts_commit(&d, m[a], run) == KDA_ERR_JOURNAL, "%s: committed twice", what);
        CHECK_MSG(is_after(&d.b, &s, m[a]), "%s: the second commit wrote", what);
    }
    drafts_free(&d);
    serial_free(&s);
}

static void speculation_of_every_count(void) {
    test_seed(10);
    for (size_t width = 1; width <= 4; width++)
        for (size_t n = 1; n <= 8; n++) {
            size_t m[9][MAX_SEQS] = {{0}};
            char what[48];
            kda_layer_desc layer = layer_new(6, 2, 4, 9, width);
            layer.op.head_map = n % 2 ? KDA_HEADS_TILED : KDA_HEADS_GROUPED;
            layer.op.state_type = n % 3 ? KDA_F32 : KDA_F16;
            for (size_t i = 0; i <= n; i++) m[i][0] = i;
            snprintf(what, sizeof what, "width %zu, %zu drafts", width, n);
            batch b = batch_new(&layer, &n, 1, 0, NULL, -1);
            check_speculation(&b, (const size_t(*)[MAX_SEQS])m, n + 1, run_as(KDA_AUTO), what);
            batch_free(&b);
            layer_free(&layer);
        }
}

/* Journals of unequal capacity, padding, none, several blocks of rows, threads. */
static void speculation_in_batches(void) {
    static const size_t n[] = {3, 2, 0, 70, 1, 8};
    static const size_t m[][MAX_SEQS] = {
        {2, 2, 0, 70, 0, 8}, {3, 0, 0, 5, 1, 0}, {0, 0, 0, 0, 0, 0}, {0, 2, 0, 66, 1, 7}};
    static const kda_type half[TENSORS] = {KDA_F16,  KDA_BF16, KDA_F16, KDA_F32,
                                           KDA_BF16, KDA_F16,  KDA_BF16};
    test_seed(11);
    for (size_t threads = 0; threads <= 3; threads++)
        for (int type = KDA_F32; type <= KDA_F16; type++) {
            kda_layer_desc layer = layer_new(4, 2, 5, 9, 4);
            kda_run run = run_as(KDA_RECURRENT);
            layer.op.state_type = (kda_type)type;
            if (threads > 0) run.parallel_for = real_threads, run.n_threads = threads;
            batch b = batch_new(&layer, n, 6, 1u << 1, type == KDA_F16 ? half : NULL, -1);
            check_speculation(&b, m, 4, run, "batch");
            batch_free(&b);
            layer_free(&layer);
        }
}

static void speculation_over_several_blocks(void) {
    static const size_t n = 150;
    static const size_t m[][MAX_SEQS] = {{0}, {1}, {63}, {64}, {65}, {149}, {150}};
    test_seed(12);
    kda_layer_desc layer = layer_new(2, 1, 5, 7, 4);
    batch b = batch_new(&layer, &n, 1, 0, NULL, -1);
    check_speculation(&b, m, 7, run_as(KDA_AUTO), "150 drafts");
    batch_free(&b);
    b = batch_new(&layer, &n, 1, 0, NULL, GATE); /* the output over the gate */
    check_speculation(&b, m, 7, run_as(KDA_AUTO), "150 drafts in place");
    batch_free(&b);
    layer_free(&layer);
}

/* Rejecting all of a draft restores state and window alike; others can be drafted over it, and
 * decoding goes on as if nothing had been. */
static void rollback_restores_state_and_window(void) {
    static const size_t n = 9, zero = 0, none[MAX_SEQS] = {0}, three[MAX_SEQS] = {3};
    test_seed(13);
    kda_layer_desc layer = layer_new(2, 1, 5, 7, 4);
    batch b = batch_new(&layer, &n, 1, 0, NULL, -1);
    serial s = serial_new(&b);
    drafts d = drafts_new(&b);
    for (int times = 0; times < 3; times++) {
        drafts_verify(&d, run_as(KDA_AUTO));
        CHECK(drafts_commit(&d, &zero, run_as(KDA_AUTO)) == KDA_OK);
        CHECK(is_after(&d.b, &s, none));
    }
    CHECK(drafts_commit(&d, three, run_as(KDA_AUTO)) == KDA_OK);
    CHECK(is_after(&d.b, &s, three));
    batch_run_rows(&d.b, 0, 3, n - 3, KDA_RECURRENT);
    CHECK(batch_same(&d.b, &s.end));
    drafts_free(&d);
    serial_free(&s);
    batch_free(&b);
    layer_free(&layer);
}

/* Journals of one pool, each of just the bytes that its own tokens take. */
static void journals_side_by_side(void) {
    static const size_t n[] = {3, 0, 0, 5, 1};
    test_seed(14);
    kda_layer_desc layer = layer_new(2, 1, 5, 7, 4);
    batch b = batch_new(&layer, n, 5, 0, NULL, -1);
    serial s = serial_new(&b);
    drafts d = drafts_new(&b);
    kda_seq seqs[MAX_SEQS];
    kda_layer_args args = batch_args(&d.b, 0);
    kda_run run = run_as(KDA_AUTO);
    unsigned char *pool = (unsigned char *)test_alloc(1 << 15), *at = pool;
    drafts_seqs(&d, n, seqs);
    for (size_t i = 0; i < 5; i++) seqs[i].journal = at, at += d.bytes[i];
    args.seqs = seqs, args.n_seqs = 5;
    give_scratch(&run, kda_layer_scratch_bytes(&layer, 5, &run));
    CHECK(kda_layer_verify(&layer, &args, &run) == KDA_OK);
    CHECK(kda_layer_commit(&layer, seqs, 5, &run) == KDA_OK);
    CHECK(is_after(&d.b, &s, n));
    free(pool), free(run.scratch);
    drafts_free(&d);
    serial_free(&s);
    batch_free(&b);
    layer_free(&layer);
}

/* ---- Misuse ---- */

/* A batch of two with journals that a verify wrote: everything that a call may write is compared
 * before and after. */
typedef struct spoiled {
    kda_layer_desc good, layer;
    drafts d;
    kda_seq seqs[2];
    kda_layer_args args;
    kda_run run;
} spoiled;

enum { FORWARD, VERIFY, COMMIT };

static void spoiled_init(spoiled *s) {
    static const size_t n[] = {3, 3};
    memset(s, 0, sizeof *s);
    test_seed(30);
    s->good = layer_new(2, 2, 6, 4, 4);
    s->layer = s->good;
    batch b = batch_new(&s->good, n, 2, 0, NULL, -1);
    s->d = drafts_new(&b);
    batch_free(&b);
    drafts_verify(&s->d, run_as(KDA_AUTO));
    drafts_seqs(&s->d, s->d.b.n, s->seqs);
    s->args = batch_args(&s->d.b, 0);
    s->args.seqs = s->seqs, s->args.n_seqs = 2;
    s->run.scratch_bytes = 1 << 18;
    s->run.scratch = test_scratch(s->run.scratch_bytes);
}

static void spoiled_free(spoiled *s) {
    drafts_free(&s->d);
    layer_free(&s->good);
    free(s->run.scratch);
}

static kda_result spoiled_call(const spoiled *s, int which) {
    if (which == FORWARD) return kda_layer(&s->layer, &s->args, &s->run);
    if (which == VERIFY) return kda_layer_verify(&s->layer, &s->args, &s->run);
    return kda_layer_commit(&s->layer, s->seqs, s->args.n_seqs, &s->run);
}

static void spoiled_expect(spoiled *s, int first, int last, kda_result want, const char *what) {
    batch before = batch_copy(&s->d.b);
    for (size_t i = 0; i < 2; i++) memcpy(s->d.written[i], s->d.journal[i], s->d.bytes[i]);
    for (int which = first; which <= last; which++) {
        kda_result got = spoiled_call(s, which);
        CHECK_MSG(got == want, "%s, call %d: %s, want %s", what, which, kda_result_name(got),
                  kda_result_name(want));
        CHECK_MSG(batch_same(&before, &s->d.b), "%s, call %d: wrote", what, which);
        for (size_t i = 0; i < 2; i++)
            CHECK_MSG(memcmp(s->d.written[i], s->d.journal[i], s->d.bytes[i]) == 0,
                      "%s, call %d: wrote a journal", what, which);
    }
    batch_free(&before);
}

/* Spoils one thing of fresh valid calls and expects the result of the calls first .. last. */
#define SPOIL_CALLS(first, last, statement, want)                                                  \
    do {                                                                                           \
        spoiled s;                                                                                 \
        spoiled_init(&s);                                                                          \
        statement;                                                                                 \
        spoiled_expect(&s, first, last, want, #statement);                                         \
        spoiled_free(&s);                                                                          \
    } while (0)
#define SPOIL(statement, want) SPOIL_CALLS(FORWARD, COMMIT, statement, want)
#define SPOIL_RUN(statement, want) SPOIL_CALLS(FORWARD, VERIFY, statement, want)
#define SPOIL_COMMIT(statement, want) SPOIL_CALLS(COMMIT, COMMIT, statement, want)

static void *moved(void *pointer, size_t bytes) {
    return (unsigned char *)pointer + bytes;
}

static void the_unspoiled_calls_are_valid(void) {
    for (int which = FORWARD; which <= COMMIT; which++) {
        spoiled s;
        spoiled_init(&s);
        CHECK(spoiled_call(&s, which) == KDA_OK);
        spoiled_free(&s);
    }
}

static void weights_misused(void) {
    SPOIL(s.layer.q_conv = NULL, KDA_ERR_NULL);
    SPOIL(s.layer.k_conv = NULL, KDA_ERR_NULL);
    SPOIL(s.layer.v_conv = NULL, KDA_ERR_NULL);
    SPOIL(s.layer.A_log = NULL, KDA_ERR_NULL);
    SPOIL(s.layer.norm_weight = NULL, KDA_ERR_NULL);
    SPOIL(s.layer.op.gate = KDA_GATE_LOG_DECAY, KDA_ERR_GATE); /* A_log would be swallowed */
    SPOIL(s.layer.norm_eps = NAN, KDA_ERR_NUMBER);
    SPOIL(s.layer.norm_eps = -1e-5f, KDA_ERR_NUMBER);
    SPOIL(s.layer.norm_eps = INFINITY, KDA_ERR_NUMBER);
    SPOIL(s.layer.conv_width = 0, KDA_ERR_WIDTH);
    SPOIL(s.layer.conv_width = KDA_CONV_MAX_WIDTH + 1, KDA_ERR_WIDTH);
    SPOIL(s.layer.conv_activation = (kda_activation)0, KDA_ERR_ACTIVATION);
    SPOIL(s.layer.conv_activation = (kda_activation)3, KDA_ERR_ACTIVATION);
    SPOIL(memset(&s.layer, 0, sizeof s.layer), KDA_ERR_DIMS);
    SPOIL(s.layer.op.dim_v = SIZE_MAX / 4, KDA_ERR_SIZE);
}

static void sequences_misused(void) {
    SPOIL(s.seqs[1].window = NULL, KDA_ERR_NULL);
    SPOIL(s.seqs[1].window = s.seqs[0].window, KDA_ERR_ALIAS);
    SPOIL(s.seqs[1].window = moved(s.seqs[0].window, 4), KDA_ERR_ALIAS); /* they overlap */
    SPOIL(s.seqs[1].window = moved(s.seqs[0].window, 2), KDA_ERR_ALIGN);
    SPOIL(s.seqs[1].state = s.seqs[0].state, KDA_ERR_ALIAS);
    SPOIL(s.seqs[1].state = moved(s.seqs[0].state, 1), KDA_ERR_ALIGN);
    SPOIL(s.seqs[0].n_tokens = s.seqs[1].n_tokens = SIZE_MAX / 2, KDA_ERR_SIZE);
    SPOIL_RUN(s.args.seqs = NULL, KDA_ERR_NULL);
    SPOIL_CALLS(VERIFY, COMMIT, s.seqs[0].journal = NULL, KDA_ERR_NULL);
    SPOIL_CALLS(VERIFY, VERIFY, s.seqs[0].journal = s.seqs[1].journal, KDA_ERR_ALIAS);
    SPOIL_CALLS(VERIFY, VERIFY, s.seqs[0].journal = moved(s.seqs[0].journal, 1), KDA_ERR_ALIGN);
}

static void running_misused(void) {
    SPOIL(s.run.scratch_bytes = kda_layer_scratch_bytes(&s.layer, 2, NULL) - 1, KDA_ERR_SCRATCH);
    SPOIL(s.run.scratch = (free(s.run.scratch), NULL), KDA_ERR_SCRATCH);
    SPOIL(s.run.algorithm = (kda_algorithm)3, KDA_ERR_ALGORITHM);
    SPOIL(s.run.parallel_for = backwards, KDA_ERR_THREADS);
    SPOIL((s.run.parallel_for = backwards, s.run.n_threads = SIZE_MAX / 2), KDA_ERR_SIZE);
    SPOIL_CALLS(VERIFY, VERIFY, s.run.algorithm = KDA_CHUNKED, KDA_ERR_ALGORITHM);
    spoiled s;
    spoiled_init(&s);
    CHECK(kda_layer(NULL, &s.args, &s.run) == KDA_ERR_NULL);
    CHECK(kda_layer(&s.layer, NULL, &s.run) == KDA_ERR_NULL);
    CHECK(kda_layer(&s.layer, &s.args, NULL) == KDA_ERR_NULL);
    CHECK(kda_layer_verify(&s.layer, NULL, &s.run) == KDA_ERR_NULL);
    CHECK(kda_layer_commit(&s.layer, NULL, 2, &s.run) == KDA_ERR_NULL);
    CHECK(kda_layer_commit(&s.layer, NULL, 0, &s.run) == KDA_OK);
    spoiled_free(&s);
}

static void tensors_misused(void) {
    SPOIL_RUN(s.args.q.data = NULL, KDA_ERR_NULL);
    SPOIL_RUN(s.args.k.data = NULL, KDA_ERR_NULL);
    SPOIL_RUN(s.args.v.data = NULL, KDA_ERR_NULL);
    SPOIL_RUN(s.args.g.data = NULL, KDA_ERR_NULL);
    SPOIL_RUN(s.args.beta.data = NULL, KDA_ERR_NULL);
    SPOIL_RUN(s.args.gate.data = NULL, KDA_ERR_NULL);
    SPOIL_RUN(s.args.o.data = NULL, KDA_ERR_NULL);
    SPOIL_RUN(s.args.gate.type = (kda_type)7, KDA_ERR_TYPE);
    SPOIL_RUN(s.args.v.type = (kda_type)7, KDA_ERR_TYPE);
    SPOIL_RUN(s.args.gate.data = moved(s.d.b.rows, 1), KDA_ERR_ALIGN);
    SPOIL_RUN(s.args.gate.token_stride = PTRDIFF_MAX / 4, KDA_ERR_SIZE);
    SPOIL_RUN(s.args.o.token_stride = 1, KDA_ERR_STRIDE);
    SPOIL_RUN(s.args.o.head_stride = 3, KDA_ERR_STRIDE);
}

static void commit_of_a_wrong_journal(void) {
    SPOIL_COMMIT(s.seqs[1].n_tokens = 4, KDA_ERR_COUNT);
    SPOIL_COMMIT(memset(s.seqs[1].journal, 0, s.d.bytes[1]), KDA_ERR_JOURNAL);
    SPOIL_COMMIT(memset(s.seqs[1].journal, 0xA7, s.d.bytes[1]), KDA_ERR_JOURNAL);
    SPOIL_COMMIT(s.layer.conv_width = 3, KDA_ERR_JOURNAL);
    SPOIL_COMMIT((s.layer.op.dim_k = 4, s.layer.op.dim_v = 6), KDA_ERR_JOURNAL);
    SPOIL_COMMIT(s.layer.op.n_qk_heads = 1, KDA_ERR_JOURNAL); /* other windows, the same state */
    SPOIL_COMMIT(s.layer.op.n_heads = s.layer.op.n_qk_heads = 1, KDA_ERR_JOURNAL);
}

/* A journal of the state alone holds no inputs: its windows could not be moved on. Neither where
 * memory ends with it, nor where inputs of an earlier draft of the layer lie behind it. */
static void commit_of_an_operators_journal(void) {
    for (int over_a_layers = 0; over_a_layers <= 1; over_a_layers++) {
        spoiled s;
        kda_args args;
        spoiled_init(&s);
        unsigned char *alone = (unsigned char *)test_alloc(kda_journal_bytes(&s.layer.op, 3));
        memset(&args, 0, sizeof args);
        args.q = s.args.q, args.k = s.args.k, args.v = s.args.v, args.g = s.args.g;
        args.beta = s.args.beta, args.o = s.args.o;
        args.A_log = s.layer.A_log, args.dt_bias = s.layer.dt_bias;
        args.seqs = s.seqs, args.n_seqs = 1;
        if (!over_a_layers) s.seqs[0].journal = alone;
        CHECK(kda_verify(&s.layer.op, &args, &s.run) == KDA_OK);
        spoiled_expect(&s, COMMIT, COMMIT, KDA_ERR_JOURNAL, "kda_verify's journal");
        free(alone);
        spoiled_free(&s);
    }
}

/* And a layer's journal is none of an operator or a convolution: a commit that moved the state and
 * left the window, or the other way round, would tear the two apart. */
static void a_layers_journal_is_for_the_layer_only(void) {
    spoiled s;
    kda_conv_desc conv;
    spoiled_init(&s);
    batch before = batch_copy(&s.d.b);
    memset(&conv, 0, sizeof conv);
    conv.channels = 4, conv.width = 4, conv.activation = KDA_ACTIVATION_SILU;
    CHECK(kda_commit(&s.layer.op, s.seqs, 2, &s.run) == KDA_ERR_JOURNAL);
    CHECK(kda_conv_commit(&conv, s.seqs, 2, &s.run) == KDA_ERR_JOURNAL);
    CHECK(batch_same(&before, &s.d.b));
    CHECK(spoiled_call(&s, COMMIT) == KDA_OK);
    batch_free(&before);
    spoiled_free(&s);
}

static void commit_of_one_journal_by_two_sequences(void) {
    SPOIL_COMMIT(s.seqs[0].journal = s.seqs[1].journal, KDA_ERR_ALIAS);
}

/* The second begins inside the first: not at the same place, but in the same memory. */
static void journals_that_overlap(void) {
    spoiled s;
    spoiled_init(&s);
    size_t bytes = kda_layer_journal_bytes(&s.layer, 3);
    unsigned char *pool = (unsigned char *)test_alloc(2 * bytes);
    unsigned char *zeros = (unsigned char *)test_alloc(2 * bytes);
    for (size_t first = 0; first < 2; first++) {
        s.seqs[first].journal = pool;
        s.seqs[1 - first].journal = pool + bytes - 4;
        spoiled_expect(&s, VERIFY, VERIFY, KDA_ERR_ALIAS, "overlap");
        CHECK(memcmp(pool, zeros, 2 * bytes) == 0);
        memset(pool, 0, 2 * bytes);
    }
    free(pool), free(zeros);
    spoiled_free(&s);
}

static void nothing_to_do_is_no_error(void) {
    spoiled s;
    spoiled_init(&s);
    s.seqs[0].n_tokens = s.seqs[1].n_tokens = 0;
    s.seqs[0].journal = s.seqs[1].journal = NULL;
    memset(&s.args, 0, sizeof s.args); /* no tokens, no tensors */
    s.args.seqs = s.seqs, s.args.n_seqs = 2;
    spoiled_expect(&s, FORWARD, COMMIT, KDA_OK, "no tokens");
    s.args.n_seqs = 0, s.args.seqs = NULL;
    spoiled_expect(&s, FORWARD, VERIFY, KDA_OK, "no sequences");
    spoiled_free(&s);
}

static void sizes(void) {
    kda_layer_desc layer = layer_new(6, 2, 8, 5, 4), bad = layer;
    CHECK(kda_layer_window_bytes(&layer) == 3 * (2 * 2 * 8 + 6 * 5) * 4);
    size_t per_token = 6 * (2 * 8 + 5) + 2 * 2 * 8 + 6 * 5; /* floats: state, then windows */
    CHECK(kda_layer_journal_bytes(&layer, 9) - kda_layer_journal_bytes(&layer, 1) ==
          8 * per_token * 4);
    CHECK(kda_layer_journal_bytes(&layer, SIZE_MAX / 2) == 0);
    CHECK(kda_layer_journal_bytes(&layer, SIZE_MAX) == 0);
    CHECK(kda_layer_journal_bytes(&layer, (size_t)PTRDIFF_MAX / (6 * 21 * 4) - 9) == 0);
    CHECK(kda_layer_scratch_bytes(&layer, SIZE_MAX / 2, NULL) == 0);
    CHECK(kda_layer_scratch_bytes(&layer, 0, NULL) > 0);
    CHECK(kda_layer_window_bytes(NULL) == 0 && kda_layer_journal_bytes(NULL, 1) == 0 &&
          kda_layer_scratch_bytes(NULL, 1, NULL) == 0);
    kda_run run = run_as(KDA_AUTO);
    run.parallel_for = backwards;
    CHECK(kda_layer_scratch_bytes(&layer, 1, &run) == 0); /* no number of threads */
    run.n_threads = SIZE_MAX / 2;
    CHECK(kda_layer_scratch_bytes(&layer, 1, &run) == 0);
    bad.op.dim_v = (size_t)PTRDIFF_MAX / 6 / 8 / 4; /* a state that fits, rows that do not */
    CHECK(kda_state_bytes(&bad.op) > 0 && kda_layer_scratch_bytes(&bad, 1, NULL) == 0);
    bad.op.n_heads = bad.op.n_qk_heads = bad.op.dim_v = bad.conv_width = 1;
    bad.op.dim_k = (size_t)1 << (sizeof(size_t) * 8 - 4); /* nor what a worker keeps of a token */
    CHECK(kda_state_bytes(&bad.op) > 0 && kda_layer_scratch_bytes(&bad, 1, NULL) == 0);
    bad = layer, bad.norm_weight = bad.q_conv = NULL; /* sizes are a matter of shape */
    CHECK(kda_layer_window_bytes(&bad) == kda_layer_window_bytes(&layer));
    CHECK(kda_layer_scratch_bytes(&bad, 1, NULL) == kda_layer_scratch_bytes(&layer, 1, NULL));
    bad = layer, bad.conv_width = 0;
    CHECK(kda_layer_window_bytes(&bad) == 0 && kda_layer_journal_bytes(&bad, 1) == 0);
    layer_free(&layer);
}

int main(void) {
    TEST(equal_to_the_parts_at_any_length);
    TEST(equal_to_the_parts_in_ragged_batches);
    TEST(equal_to_the_parts_in_any_types);
    TEST(equal_to_the_parts_in_any_shape);
    TEST(equal_to_the_parts_with_any_gate);
    TEST(width_1_needs_no_window);
    TEST(same_bits_for_any_threads);
    TEST(rounds_are_as_few_as_the_manual_says);
    TEST(against_float64);
    TEST(any_split_gives_the_same_bits);
    TEST(speculation_of_every_count);
    TEST(speculation_in_batches);
    TEST(speculation_over_several_blocks);
    TEST(rollback_restores_state_and_window);
    TEST(journals_side_by_side);
    TEST(the_unspoiled_calls_are_valid);
    TEST(weights_misused);
    TEST(sequences_misused);
    TEST(running_misused);
    TEST(tensors_misused);
    TEST(commit_of_a_wrong_journal);
    TEST(commit_of_an_operators_journal);
    TEST(a_layers_journal_is_for_the_layer_only);
    TEST(commit_of_one_journal_by_two_sequences);
    TEST(journals_that_overlap);
    TEST(nothing_to_do_is_no_error);
    TEST(sizes);
    return test_summary();
}
