/* stack.h - layers of a decoding model, full attention and KDA, as decode_ratio times them.
 *
 * Include after bench.h, with the bodies of kda.h and mla.h.
 *
 * What is run of a layer is what depends on the sequence: of full attention mla_mix, from queries
 * that have been taken to the latents to mixes of latents; of KDA kda_layer, from projected rows to
 * the normed output (convolutions, gate, L2 norm, recurrence, gated norm). Projections are outside
 * of both, W_UK and W_UV of full attention among them. With weights (stack_options.weights) whole
 * layers are run: projections, feed-forward, norms, and the head.
 *
 * Inputs are seeded, the same for every layer and step. Caches hold rows of one seeded block of a
 * length that is no multiple of any tile, each cache from another row on.
 */
#ifndef STACK_H
#define STACK_H

#include "../tests/reference.h"
#include "roofline.h"

enum {
    STACK_BLOCK = 4099,    /* rows of the block that fills caches */
    STACK_CHECK_STEPS = 6, /* of KDA, from a fresh state */
    STACK_CHECK_KEYS =
        65536 /* up to there the first and the last head are compared, then the last */
};

typedef struct stack_options {
    const roofline_shape *shape;
    linear_type cache; /* of its elements: LINEAR_F32, LINEAR_F16, LINEAR_BF16 */
    kda_type state;    /* KDA_F32, KDA_F16 */
    kda_isa isa;
    parallel *pool;
    size_t context; /* tokens that a step's token sees, itself among them */
    size_t batch;
    size_t n_full, n_kda; /* layers that are held */
    int weights;          /* whole layers, with dense feed-forward in bf16 */
    int bf16_dots;        /* as in linear_run */
} stack_options;

/* Matrices of one layer; those of the other kind are absent. */
typedef struct stack_weights {
    mla_weights full;
    linear in;       /* q | k | v | beta | decay low | gate low, from hidden */
    linear decay_up; /* [row][rank] */
    linear gate_up;  /* [row][gate_rank] */
    linear out;      /* [hidden][row] */
    linear up, down; /* gate and up as one; feed-forward */
} stack_weights;

typedef struct stack {
    stack_options is;
    linear_run linear;
    kda_run run;
    mla_desc mla;
    kda_layer_desc kda;
    size_t row; /* heads * dim */
    unsigned char *caches;
    size_t cache_bytes; /* of one sequence and layer */
    mla_seq *full;      /* [n_full][batch] */
    unsigned char *states, *windows;
    kda_seq *recurrent;   /* [n_kda][batch] */
    float *queries, *mix; /* [batch][heads][mla_query_stride], [batch][heads][mla_mix_stride] */
    float *rows, *o;      /* [batch][5 row + heads], [batch][row] */
    float *small;         /* convolutions, A_log, dt_bias, norm */
    void *scratch, *kda_scratch; /* of mla.h, of kda.h */
    /* With weights. */
    stack_weights *weights; /* [n_full + n_kda]: those of full layers first */
    linear head;
    float *ones;           /* weights of norms */
    float *x, *y, *z;      /* [batch][hidden], the same, [batch][the widest] */
    float *start, *logits; /* [batch][hidden], [batch][vocab] */
} stack;

static inline void stack_must(kda_result result) {
    if (result != KDA_OK) bench_die(kda_result_text(result));
}

static inline size_t stack_element_bytes(linear_type type) {
    return type == LINEAR_F32 ? 4 : 2;
}

/* The number that element i of a cache holds. */
static inline double stack_element(linear_type type, const void *data, size_t i) {
    if (type == LINEAR_F32) return (double)((const float *)data)[i];
    uint16_t bits = ((const uint16_t *)data)[i];
    return (double)(type == LINEAR_F16 ? linear_from_f16(bits) : linear_from_bf16(bits));
}

/* ==== Opening ================================================================================== */

static inline void stack_describe(stack *s) {
    const roofline_shape *shape = s->is.shape;
    s->row = shape->heads * shape->dim;
    s->linear.isa = s->is.isa, s->linear.pool = s->is.pool;
    s->linear.bf16_dots = s->is.bf16_dots != 0;
    s->run.isa = s->is.isa;
    s->run.parallel_for = parallel_for, s->run.user = s->is.pool;
    s->run.n_threads = parallel_threads(s->is.pool);
    s->mla.n_heads = shape->heads;
    s->mla.dim_nope = shape->nope, s->mla.dim_rope = shape->rope, s->mla.dim_v = shape->value;
    s->mla.latent = shape->latent, s->mla.q_latent = shape->q_latent;
    s->mla.norm_eps = 1e-6f;
    s->mla.cache = s->is.cache;
    s->kda.op.n_heads = shape->heads;
    s->kda.op.dim_k = s->kda.op.dim_v = shape->dim;
    s->kda.op.gate = KDA_GATE_SOFTPLUS, s->kda.op.beta = KDA_BETA_LOGIT;
    s->kda.op.flags = KDA_L2_NORM_QK;
    s->kda.op.state_type = s->is.state;
    s->kda.conv_width = shape->taps, s->kda.conv_activation = KDA_ACTIVATION_SILU;
    s->kda.norm_eps = 1e-5f;
}

static inline void stack_fill_caches(stack *s) {
    size_t row = mla_cache_row_bytes(&s->mla), n = roofline_row(s->is.shape) * STACK_BLOCK;
    size_t count = s->is.n_full * s->is.batch, block_bytes = row * STACK_BLOCK;
    float *values = bench_floats(n);
    unsigned char *block = (unsigned char *)bench_reserve(block_bytes);
    bench_fill(values, n, 21, -1.7f, 1.7f);
    linear_compress(s->is.cache, values, n, block);
    for (size_t i = 0; i < count; i++) {
        unsigned char *cache = (unsigned char *)s->full[i].cache;
        size_t from = i * 577 % STACK_BLOCK * row;
        for (size_t at = 0; at < s->cache_bytes;) {
            size_t left = s->cache_bytes - at, part = block_bytes - from;
            if (part > left) part = left;
            memcpy(cache + at, block + from, part);
            at += part, from = 0;
        }
    }
    free(values), free(block);
}

static inline void stack_open_full(stack *s) {
    const roofline_shape *shape = s->is.shape;
    size_t n = s->is.n_full * s->is.batch, heads = s->is.batch * shape->heads;
    size_t scratch = mla_scratch_bytes(&s->mla, s->is.batch, s->is.context, s->run.n_threads);
    if (scratch == 0) bench_die("no scratch size for full attention");
    s->cache_bytes = s->is.context * mla_cache_row_bytes(&s->mla);
    s->caches = (unsigned char *)bench_reserve(n * s->cache_bytes);
    s->full = (mla_seq *)bench_alloc(n * sizeof *s->full);
    s->queries = bench_floats(heads * mla_query_stride(&s->mla));
    s->mix = bench_floats(heads * mla_mix_stride(&s->mla));
    s->scratch = bench_alloc(scratch);
    for (size_t i = 0; i < n; i++) {
        s->full[i].cache = s->caches + i * s->cache_bytes;
        s->full[i].n_past = s->is.context - 1;
        s->full[i].n_tokens = 1;
    }
    /* Scores with a standard deviation near 2: some keys count, none alone. */
    float spread = 2 * 1.75f / sqrtf((float)roofline_row(shape));
    bench_fill(s->queries, heads * mla_query_stride(&s->mla), 22, -spread, spread);
    stack_fill_caches(s);
}

/* A state with numbers that f16 holds exactly, in key-major order of one head: element i. */
static inline float stack_start(size_t head, size_t i) {
    return 0x1p-9f * (float)((int)((head * 7919 + i * 104729) % 257) - 128);
}

/* Sets layer 0's first sequence back to its start. */
static inline void stack_restart(stack *s) {
    size_t dim = s->is.shape->dim, n = dim * dim;
    for (size_t h = 0; h < s->is.shape->heads; h++)
        for (size_t i = 0; i < n; i++) {
            float value = stack_start(h, i % dim * dim + i / dim); /* states are value-major */
            if (s->is.state == KDA_F32)
                ((float *)s->recurrent[0].state)[h * n + i] = value;
            else
                ((uint16_t *)s->recurrent[0].state)[h * n + i] = kda_to_f16(value);
        }
    memset(s->recurrent[0].window, 0, kda_layer_window_bytes(&s->kda));
}

static inline void stack_open_kda(stack *s) {
    const roofline_shape *shape = s->is.shape;
    size_t n = s->is.n_kda * s->is.batch, row = s->row, taps = shape->taps;
    size_t state = kda_state_bytes(&s->kda.op), window = kda_layer_window_bytes(&s->kda);
    size_t n_small = 3 * row * taps + shape->heads + row + shape->dim;
    size_t n_rows = s->is.batch * (5 * row + shape->heads);
    float *at = s->small = bench_floats(n_small);
    bench_fill(at, n_small, 23, -0.7f, 0.7f);
    s->kda.q_conv = at, at += row * taps;
    s->kda.k_conv = at, at += row * taps;
    s->kda.v_conv = at, at += row * taps;
    s->kda.A_log = at, at += shape->heads;
    s->kda.dt_bias = at, at += row;
    s->kda.norm_weight = at;
    s->run.scratch_bytes = kda_layer_scratch_bytes(&s->kda, s->is.batch, &s->run);
    if (state == 0 || window == 0 || s->run.scratch_bytes == 0) bench_die("no size of a KDA layer");
    s->kda_scratch = s->run.scratch = bench_alloc(s->run.scratch_bytes);
    s->states = (unsigned char *)bench_alloc(n * state);
    s->windows = (unsigned char *)bench_alloc(n * window);
    s->recurrent = (kda_seq *)bench_alloc(n * sizeof *s->recurrent);
    s->rows = bench_floats(n_rows);
    s->o = bench_floats(s->is.batch * row);
    bench_fill(s->rows, n_rows, 24, -1.7f, 1.7f);
    for (size_t i = 0; i < n; i++) {
        s->recurrent[i].n_tokens = 1;
        s->recurrent[i].state = s->states + i * state;
        s->recurrent[i].window = s->windows + i * window;
    }
    stack_restart(s);
    for (size_t i = 1; i < n; i++) memcpy(s->states + i * state, s->states, state);
}

/* ---- Weights ---- */

static inline linear stack_matrix(size_t rows, size_t cols) {
    linear w;
    size_t n = rows * cols;
    memset(&w, 0, sizeof w);
    float *values = bench_floats(n), spread = 1.7f / sqrtf((float)cols);
    unsigned char *bits = (unsigned char *)bench_reserve(n * 2);
    bench_fill(values, n, rows * 31 + cols, -spread, spread);
    linear_compress(LINEAR_BF16, values, n, bits);
    free(values);
    w.type = LINEAR_BF16, w.rows = rows, w.cols = cols;
    w.data = bits;
    return w;
}

/* Channels that a KDA layer's first matrix gives. */
static inline size_t stack_in_rows(const stack *s) {
    const roofline_shape *shape = s->is.shape;
    return 3 * s->row + shape->heads + shape->rank + shape->gate_rank;
}

static inline void stack_open_weights(stack *s) {
    const roofline_shape *shape = s->is.shape;
    size_t hidden = shape->hidden, queries = shape->heads * (shape->nope + shape->rope);
    size_t values = shape->heads * shape->value, n = s->is.n_full + s->is.n_kda;
    size_t widest =
        stack_in_rows(s) > 2 * shape->dense_width ? stack_in_rows(s) : 2 * shape->dense_width;
    s->ones = bench_floats(hidden > shape->latent ? hidden : shape->latent);
    bench_fill(s->ones, hidden > shape->latent ? hidden : shape->latent, 25, 0.9f, 1.1f);
    s->weights = (stack_weights *)bench_alloc(n * sizeof *s->weights);
    for (size_t i = 0; i < n; i++) {
        stack_weights *w = &s->weights[i];
        w->up = stack_matrix(2 * shape->dense_width, hidden);
        w->down = stack_matrix(hidden, shape->dense_width);
        if (i < s->is.n_full) {
            w->full.q = stack_matrix(queries, hidden);
            w->full.kv_a = stack_matrix(roofline_row(shape), hidden);
            w->full.kv_a_norm = s->ones;
            w->full.kv_b = stack_matrix(shape->heads * (shape->nope + shape->value), shape->latent);
            w->full.o = stack_matrix(hidden, values);
        } else {
            w->in = stack_matrix(stack_in_rows(s), hidden);
            w->decay_up = stack_matrix(s->row, shape->rank);
            w->gate_up = stack_matrix(s->row, shape->gate_rank);
            w->out = stack_matrix(hidden, s->row);
        }
    }
    s->head = stack_matrix(shape->vocab, hidden);
    s->start = bench_floats(s->is.batch * hidden);
    s->x = bench_floats(s->is.batch * hidden), s->y = bench_floats(s->is.batch * hidden);
    s->z = bench_floats(s->is.batch * widest);
    s->logits = bench_floats(s->is.batch * shape->vocab);
    bench_fill(s->start, s->is.batch * hidden, 26, -1, 1);
}

/* Whether a shape has what stack_open_weights makes: dense layers, compressed gates. */
static inline int stack_can_hold_weights(const roofline_shape *shape) {
    return shape->experts == 0 && shape->dense_layers == shape->layers && shape->dense_width > 0 &&
           shape->vocab > 0 && shape->gate_rank > 0 && shape->q_latent == 0 && shape->gate == 0;
}

/* Bytes that a stack's caches take. */
static inline double stack_cache_bytes(const stack_options *is) {
    return roofline_product(is->n_full * is->batch, is->context) *
           (double)(roofline_row(is->shape) * stack_element_bytes(is->cache));
}

/* Bytes that a stack's caches, states and windows take. */
static inline double stack_bytes(const stack_options *is) {
    double state = roofline_state(is->shape) * (is->state == KDA_F32 ? 4 : 2);
    return stack_cache_bytes(is) +
           roofline_product(is->n_kda, is->batch) * (state + roofline_window(is->shape) * 4);
}

/* Allocates and fills; ends the program where the system has no memory. */
static inline void stack_open(stack *s, const stack_options *is) {
    memset(s, 0, sizeof *s);
    s->is = *is;
    stack_describe(s);
    if (is->n_full) stack_open_full(s);
    if (is->n_kda) stack_open_kda(s);
    if (is->weights) stack_open_weights(s);
}

static inline void stack_free_matrix(linear *w) {
    free((void *)(uintptr_t)w->data);
}

static inline void stack_close(stack *s) {
    for (size_t i = 0; s->weights && i < s->is.n_full + s->is.n_kda; i++) {
        stack_weights *w = &s->weights[i];
        stack_free_matrix(&w->full.q), stack_free_matrix(&w->full.kv_a);
        stack_free_matrix(&w->full.kv_b), stack_free_matrix(&w->full.o);
        stack_free_matrix(&w->in), stack_free_matrix(&w->decay_up);
        stack_free_matrix(&w->gate_up), stack_free_matrix(&w->out);
        stack_free_matrix(&w->up), stack_free_matrix(&w->down);
    }
    stack_free_matrix(&s->head);
    free(s->caches), free(s->full), free(s->queries), free(s->mix), free(s->scratch);
    free(s->states), free(s->windows), free(s->recurrent), free(s->rows), free(s->o);
    free(s->small), free(s->kda_scratch), free(s->weights), free(s->ones), free(s->x);
    free(s->y), free(s->z), free(s->start), free(s->logits);
    memset(s, 0, sizeof *s);
}

/* ==== One token of each sequence =============================================================== */

static inline void stack_full_layer(stack *s, size_t i) {
    mla_mix(&s->linear, &s->mla, s->queries, s->full + i * s->is.batch, s->is.batch, s->mix,
            s->scratch);
}

static inline void stack_kda_layer(stack *s, size_t i) {
    ptrdiff_t stride = (ptrdiff_t)(5 * s->row + s->is.shape->heads);
    ptrdiff_t dim = (ptrdiff_t)s->is.shape->dim;
    kda_layer_args args;
    memset(&args, 0, sizeof args);
    args.q = kda_in_f32(s->rows, stride, dim);
    args.k = kda_in_f32(s->rows + s->row, stride, dim);
    args.v = kda_in_f32(s->rows + 2 * s->row, stride, dim);
    args.g = kda_in_f32(s->rows + 3 * s->row, stride, dim);
    args.gate = kda_in_f32(s->rows + 4 * s->row, stride, dim);
    args.beta = kda_in_f32(s->rows + 5 * s->row, stride, 1);
    args.o = kda_out_f32(s->o, (ptrdiff_t)s->row, dim);
    args.seqs = s->recurrent + i * s->is.batch, args.n_seqs = s->is.batch;
    stack_must(kda_layer(&s->kda, &args, &s->run));
}

/* Projects x to the rows of stack_kda_layer, runs it, and projects its output to y. */
static inline void stack_kda_whole(stack *s, size_t i, const stack_weights *w) {
    const roofline_shape *shape = s->is.shape;
    size_t in = stack_in_rows(s), stride = 5 * s->row + shape->heads,
           low = 3 * s->row + shape->heads;
    linear_apply(&s->linear, &w->in, s->x, s->is.batch, shape->hidden, s->z, in);
    for (size_t t = 0; t < s->is.batch; t++) {
        memcpy(s->rows + t * stride, s->z + t * in, 3 * s->row * sizeof(float));
        memcpy(s->rows + t * stride + 5 * s->row, s->z + t * in + 3 * s->row,
               shape->heads * sizeof(float));
    }
    linear_apply(&s->linear, &w->decay_up, s->z + low, s->is.batch, in, s->rows + 3 * s->row,
                 stride);
    linear_apply(&s->linear, &w->gate_up, s->z + low + shape->rank, s->is.batch, in,
                 s->rows + 4 * s->row, stride);
    stack_kda_layer(s, i);
    linear_apply(&s->linear, &w->out, s->o, s->is.batch, s->row, s->y, shape->hidden);
}

/* sum += y, and x the norm of it. */
static inline void stack_add_and_norm(stack *s, float *sum) {
    size_t hidden = s->is.shape->hidden;
    for (size_t i = 0; i < s->is.batch * hidden; i++) sum[i] += s->y[i];
    linear_rms_norm(s->ones, 1e-5f, hidden, sum, s->is.batch, hidden, s->x, hidden);
}

static inline void stack_feed_forward(stack *s, const stack_weights *w) {
    size_t width = s->is.shape->dense_width, hidden = s->is.shape->hidden;
    linear_apply(&s->linear, &w->up, s->x, s->is.batch, hidden, s->z, 2 * width);
    for (size_t t = 0; t < s->is.batch; t++)
        for (size_t i = 0; i < width; i++) {
            float *z = s->z + t * 2 * width + i;
            *z *= kda_sigmoid(*z) * z[width];
        }
    linear_apply(&s->linear, &w->down, s->z, s->is.batch, 2 * width, s->y, hidden);
}

/* A step of the hybrid, or of the stack with full attention in every layer. */
static inline void stack_step(stack *s, int hybrid) {
    const roofline_shape *shape = s->is.shape;
    size_t full = 0, kda = 0, hidden = shape->hidden;
    float *sum = NULL;
    if (s->weights) {
        sum = bench_floats(s->is.batch * hidden);
        memcpy(s->y, s->start, s->is.batch * hidden * sizeof *sum);
        stack_add_and_norm(s, sum);
    }
    for (size_t i = 0; i < shape->layers; i++) {
        int is_full = !hybrid || roofline_is_full(shape, i);
        const stack_weights *w = s->weights + (is_full ? full : s->is.n_full + kda);
        if (is_full && !s->weights) stack_full_layer(s, full);
        if (!is_full && !s->weights) stack_kda_layer(s, kda);
        if (is_full && s->weights)
            mla_forward(&s->linear, &s->mla, &w->full, s->x, s->full + full * s->is.batch,
                        s->is.batch, s->y, s->scratch);
        if (!is_full && s->weights) stack_kda_whole(s, kda, w);
        if (s->weights) {
            stack_add_and_norm(s, sum);
            stack_feed_forward(s, w);
            stack_add_and_norm(s, sum);
        }
        full += is_full != 0, kda += is_full == 0;
    }
    if (s->weights)
        linear_apply(&s->linear, &s->head, s->x, s->is.batch, hidden, s->logits, shape->vocab);
    free(sum);
}

/* ==== The truth ================================================================================ */

/* One head of layer 0's first sequence in float64. */
static inline void stack_true_mix(const stack *s, size_t head, double *mix) {
    const roofline_shape *shape = s->is.shape;
    size_t width = roofline_row(shape), n = s->is.context;
    const float *q = s->queries + head * mla_query_stride(&s->mla);
    double *score = (double *)bench_alloc(n * sizeof *score), max = -HUGE_VAL, sum = 0;
    for (size_t j = 0; j < n; j++) {
        for (size_t i = 0; i < width; i++)
            score[j] += (double)q[i] * stack_element(s->is.cache, s->full[0].cache, j * width + i);
        if (score[j] > max) max = score[j];
    }
    memset(mix, 0, shape->latent * sizeof *mix);
    for (size_t j = 0; j < n; j++) {
        double weight = exp(score[j] - max);
        sum += weight;
        for (size_t i = 0; i < shape->latent; i++)
            mix[i] += weight * stack_element(s->is.cache, s->full[0].cache, j * width + i);
    }
    for (size_t i = 0; i < shape->latent; i++) mix[i] /= sum;
    free(score);
}

/* Relative error of full attention as it is timed. */
static inline double stack_full_error(stack *s) {
    size_t latent = s->is.shape->latent, heads = s->is.shape->heads;
    double *want = (double *)bench_alloc(latent * sizeof *want);
    bench_error e = {0, 0};
    stack_full_layer(s, 0);
    for (size_t h = 0; h < heads; h++) {
        if (h != heads - 1 && (h != 0 || s->is.context > STACK_CHECK_KEYS)) continue;
        stack_true_mix(s, h, want);
        for (size_t i = 0; i < latent; i++)
            bench_error_add(&e, (double)s->mix[h * mla_mix_stride(&s->mla) + i], want[i]);
    }
    free(want);
    return bench_error_value(&e);
}

/* A convolution's channel at step t, where every step so far has had the same row. */
static inline double stack_true_conv(const stack *s, const float *weight, size_t t, double raw,
                                     size_t channel) {
    double sum = 0;
    size_t taps = s->is.shape->taps;
    for (size_t tap = 0; tap < taps && tap <= t; tap++)
        sum += (double)weight[channel * taps + taps - 1 - tap] * raw;
    return sum * reference_sigmoid(sum);
}

/* One step of one head of the first sequence, its output into o; the other rows are working space.
 * state: [dim][dim], key-major. */
static inline void stack_true_step(const stack *s, size_t t, size_t head, double *state, double *q,
                                   double *k, double *v, double *g, double *o) {
    size_t dim = s->is.shape->dim, first = head * dim;
    const float *raw = s->rows;
    double squares = 0;
    for (size_t i = 0; i < dim; i++) {
        size_t at = first + i;
        q[i] = stack_true_conv(s, s->kda.q_conv, t, (double)raw[at], at);
        k[i] = stack_true_conv(s, s->kda.k_conv, t, (double)raw[s->row + at], at);
        v[i] = stack_true_conv(s, s->kda.v_conv, t, (double)raw[2 * s->row + at], at);
        g[i] = -exp((double)s->kda.A_log[head]) *
               reference_softplus((double)raw[3 * s->row + at] + (double)s->kda.dt_bias[at]);
    }
    reference_l2_norm(dim, 1e-6, q);
    reference_l2_norm(dim, 1e-6, k);
    for (size_t i = 0; i < dim; i++) q[i] /= sqrt((double)dim);
    reference_step(dim, dim, q, k, v, g, reference_sigmoid((double)raw[5 * s->row + head]), state,
                   o);
    for (size_t i = 0; i < dim; i++) squares += o[i] * o[i];
    for (size_t i = 0; i < dim; i++)
        o[i] *= (double)s->kda.norm_weight[i] *
                reference_sigmoid((double)raw[4 * s->row + first + i]) /
                sqrt(squares / (double)dim + (double)s->kda.norm_eps);
}

/* Relative error of a KDA layer as it is timed, over a few steps of layer 0's first sequence. */
static inline double stack_kda_error(stack *s) {
    size_t dim = s->is.shape->dim, heads = s->is.shape->heads;
    double *state = (double *)bench_alloc(heads * dim * dim * sizeof *state);
    double *row = (double *)bench_alloc(5 * dim * sizeof *row), *o = row + 4 * dim;
    bench_error e = {0, 0};
    stack_restart(s);
    for (size_t i = 0; i < heads * dim * dim; i++)
        state[i] = (double)stack_start(i / (dim * dim), i % (dim * dim));
    for (size_t t = 0; t < STACK_CHECK_STEPS; t++) {
        stack_kda_layer(s, 0);
        for (size_t h = 0; h<heads; h += heads> 1 ? heads - 1 : 1) {
            stack_true_step(s, t, h, state + h * dim * dim, row, row + dim, row + 2 * dim,
                            row + 3 * dim, o);
            for (size_t i = 0; i < dim; i++) bench_error_add(&e, (double)s->o[h * dim + i], o[i]);
        }
    }
    free(state), free(row);
    return bench_error_value(&e);
}

#endif
