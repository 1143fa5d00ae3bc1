/* roofline.h - what a decoded token costs by count: bytes that move, multiplications, and the time
 * that a machine of given figures needs for them.
 *
 * Two stacks of one shape are compared: full attention (multi-head latent attention) in every
 * layer, and the hybrid, where only `full` of the layers have it and the others are KDA. A step
 * makes one token for each sequence of a batch. Its time is a sum over parts that run one after
 * another, each bound by memory or by arithmetic:
 *
 *     step = fixed + sum over parts of max(bytes / bandwidth, operations / peak)
 *     parts: weights; latent caches (read once); KDA states and windows (read and written)
 *
 * Units are bytes, seconds and floating-point operations (a multiply-add is two).
 *
 * Without weights and fixed cost, and with states that are small against caches, the time of a step
 * goes with the number of full layers: at equal batch the ratio of the stacks then approaches
 * layers / full from below, whatever the machine. With more sequences in one stack than in the
 * other a throughput ratio lies between that and the ratio of the batches (roofline_bound).
 */
#ifndef ROOFLINE_H
#define ROOFLINE_H

#include <math.h>
#include <stddef.h>

typedef struct roofline_shape {
    const char *name;
    size_t layers, full; /* all layers; those of the hybrid with full attention */
    size_t hidden, vocab;
    /* KDA */
    size_t heads, dim; /* dim: key and value channels of a head */
    size_t taps;       /* of the short convolutions */
    size_t rank;       /* of the decay gate's projection */
    size_t gate_rank;  /* of the output gate's projection; 0: full rank */
    /* Full attention; it has as many heads */
    size_t nope, rope, value; /* channels of a head; rope: shared by all heads */
    size_t latent;
    size_t q_latent; /* 0: queries are not compressed */
    size_t gate;     /* 1: with an output gate */
    /* Feed-forward: gate, up and down matrices */
    size_t dense_layers, dense_width; /* layers without experts */
    size_t shared_width;              /* of an expert that every token uses */
    size_t experts, used, expert_width;
    size_t expert_hidden; /* channels that experts work on; 0: hidden, without projections to it */
} roofline_shape;

/* Kimi-Linear-48B-A3B, from its published configuration. */
static const roofline_shape roofline_48b = {
    .name = "48b",
    .layers = 27,
    .full = 7,
    .hidden = 2304,
    .vocab = 163840,
    .heads = 32,
    .dim = 128,
    .taps = 4,
    .rank = 128,
    .gate_rank = 128,
    .nope = 128,
    .rope = 64,
    .value = 128,
    .latent = 512,
    .dense_layers = 1,
    .dense_width = 9216,
    .shared_width = 1024,
    .experts = 256,
    .used = 8,
    .expert_width = 1024,
};

/* Four of Kimi K3's 93 layers, of its width, from its published configuration; without its first,
 * dense layer and its vocabulary. */
static const roofline_shape roofline_k3_slice = {
    .name = "k3-slice",
    .layers = 4,
    .full = 1,
    .hidden = 7168,
    .heads = 96,
    .dim = 128,
    .taps = 4,
    .rank = 128,
    .nope = 128,
    .rope = 64,
    .value = 128,
    .latent = 512,
    .q_latent = 1536,
    .gate = 1,
    .shared_width = 6144,
    .experts = 896,
    .used = 16,
    .expert_width = 3072,
    .expert_hidden = 3584,
};

/* Small enough that its dense weights are really held and multiplied. */
static const roofline_shape roofline_toy = {
    .name = "toy",
    .layers = 8,
    .full = 2,
    .hidden = 512,
    .vocab = 1024,
    .heads = 8,
    .dim = 64,
    .taps = 4,
    .rank = 64,
    .gate_rank = 64,
    .nope = 64,
    .rope = 32,
    .value = 64,
    .latent = 128,
    .dense_layers = 8,
    .dense_width = 1536,
};

static inline double roofline_product(size_t a, size_t b) {
    return (double)a * (double)b;
}

/* Layer i of the hybrid has full attention: evenly spread, the last one always (48B: 4, 8, ..., 24
 * and 27 of 27). */
static inline int roofline_is_full(const roofline_shape *s, size_t i) {
    return (i + 1) * s->full / s->layers > i * s->full / s->layers;
}

/* ---- Counts of a layer ---- */

/* Elements of a cached token in one full layer. */
static inline size_t roofline_row(const roofline_shape *s) {
    return s->latent + s->rope;
}

/* Elements of one sequence's state, and of its convolution windows, in one KDA layer. */
static inline double roofline_state(const roofline_shape *s) {
    return roofline_product(s->heads * s->dim, s->dim);
}
static inline double roofline_window(const roofline_shape *s) {
    return roofline_product(3 * s->heads * s->dim, s->taps - 1);
}

/* Operations on one cached token: a dot product of each head with the row, and a sum of latents. */
static inline double roofline_key_operations(const roofline_shape *s) {
    return 2 * roofline_product(s->heads, roofline_row(s) + s->latent);
}

/* The recurrence of one token: decay, two products with the state, and a rank-1 update. */
static inline double roofline_state_operations(const roofline_shape *s) {
    return 7 * roofline_state(s);
}

/* Weights of the projections around full attention, and around KDA. */
static inline double roofline_full_weights(const roofline_shape *s) {
    size_t queries = s->heads * (s->nope + s->rope), values = s->heads * s->value;
    double q = s->q_latent ? roofline_product(s->q_latent, s->hidden + queries)
                           : roofline_product(s->hidden, queries);
    return q + roofline_product(roofline_row(s), s->hidden) +
           roofline_product(s->heads * (s->nope + s->value), s->latent) +
           roofline_product(values, s->hidden) * (double)(1 + s->gate);
}

static inline double roofline_kda_weights(const roofline_shape *s) {
    size_t row = s->heads * s->dim;
    double gate = s->gate_rank ? roofline_product(s->gate_rank, s->hidden + row)
                               : roofline_product(s->hidden, row);
    return 4 * roofline_product(s->hidden, row) + roofline_product(s->rank, s->hidden + row) +
           gate + roofline_product(s->heads, s->hidden) + 3 * roofline_product(row, s->taps);
}

static inline double roofline_one_expert(const roofline_shape *s) {
    return 3 * roofline_product(s->expert_width, s->expert_hidden ? s->expert_hidden : s->hidden);
}

/* ---- A stack ---- */

typedef struct roofline_model {
    const roofline_shape *shape;
    int hybrid;           /* 0: full attention in every layer */
    double cache_element; /* bytes: 2 for bf16 */
    double state_element; /* bytes of a state's; windows have 4 */
    double weight;        /* bytes of one; 0: the attention stack alone, no weights at all */
} roofline_model;

static inline double roofline_n_full(const roofline_model *m) {
    return (double)(m->hybrid ? m->shape->full : m->shape->layers);
}

/* Bytes that one sequence holds: caches of `context` tokens, states, windows. */
static inline double roofline_sequence_bytes(const roofline_model *m, double context) {
    const roofline_shape *s = m->shape;
    double kda = (double)s->layers - roofline_n_full(m);
    return roofline_n_full(m) * context * (double)roofline_row(s) * m->cache_element +
           kda * (roofline_state(s) * m->state_element + roofline_window(s) * 4);
}

/* Weights that are used when n experts of each layer are: all but the table of input vectors. */
static inline double roofline_weights(const roofline_model *m, double n) {
    const roofline_shape *s = m->shape;
    double kda = (double)s->layers - roofline_n_full(m);
    double sparse = s->experts ? (double)(s->layers - s->dense_layers) : 0;
    double projections = s->expert_hidden ? 2 * roofline_product(s->hidden, s->expert_hidden) : 0;
    double layer = roofline_product(s->experts, s->hidden) + projections +
                   3 * roofline_product(s->shared_width, s->hidden) + n * roofline_one_expert(s);
    return roofline_n_full(m) * roofline_full_weights(s) + kda * roofline_kda_weights(s) +
           (double)s->dense_layers * 3 * roofline_product(s->dense_width, s->hidden) +
           sparse * layer + roofline_product(s->vocab, s->hidden);
}

/* Experts of a layer that a step reads: tokens choose independently and evenly. */
static inline double roofline_experts_read(const roofline_shape *s, double batch) {
    if (s->experts == 0) return 0;
    double all = (double)s->experts;
    return all * (1 - pow(1 - (double)s->used / all, batch));
}

/* Bytes of all weights, the table of input vectors included. */
static inline double roofline_resident_bytes(const roofline_model *m) {
    const roofline_shape *s = m->shape;
    return m->weight *
           (roofline_weights(m, (double)s->experts) + roofline_product(s->vocab, s->hidden));
}

/* ---- A machine ---- */

typedef struct roofline_machine {
    double bandwidth; /* bytes a second */
    double memory;    /* bytes, for weights, caches and states */
    double peak;      /* operations a second */
    double fixed;     /* seconds of a step that nothing shortens: launches, synchronisation */
} roofline_machine;

static inline double roofline_part(const roofline_machine *machine, double bytes,
                                   double operations) {
    return fmax(bytes / machine->bandwidth, operations / machine->peak);
}

/* Seconds of the attention stack's step for each sequence. */
static inline double roofline_attention(const roofline_machine *machine, const roofline_model *m,
                                        double context) {
    const roofline_shape *s = m->shape;
    double full = roofline_n_full(m), kda = (double)s->layers - full;
    double state = roofline_state(s) * m->state_element + roofline_window(s) * 4;
    return full * roofline_part(machine, context * (double)roofline_row(s) * m->cache_element,
                                context * roofline_key_operations(s)) +
           kda * roofline_part(machine, 2 * state, roofline_state_operations(s));
}

/* Seconds of the weights' part of a step. */
static inline double roofline_weights_time(const roofline_machine *machine, const roofline_model *m,
                                           double batch) {
    if (!(m->weight > 0)) return 0;
    double read = roofline_weights(m, roofline_experts_read(m->shape, batch));
    double used = roofline_weights(m, (double)m->shape->used);
    return roofline_part(machine, read * m->weight, 2 * batch * used);
}

/* Seconds of a step; of one token it is that divided by the batch. */
static inline double roofline_step(const roofline_machine *machine, const roofline_model *m,
                                   double context, double batch) {
    return machine->fixed + roofline_weights_time(machine, m, batch) +
           batch * roofline_attention(machine, m, context);
}

/* Sequences that fit beside the weights. */
static inline double roofline_largest_batch(const roofline_machine *machine,
                                            const roofline_model *m, double context) {
    double left = machine->memory - roofline_resident_bytes(m);
    return left > 0 ? floor(left / roofline_sequence_bytes(m, context)) : 0;
}

/* The most that the throughput of b sequences in the hybrid can be of that of a in the full stack,
 * if a step of both has the same part r that does not grow with the batch, and c is the time of a
 * sequence's caches: (r / a + c) / (r / b + c full / layers) lies between layers / full and b / a.
 */
static inline double roofline_bound(const roofline_shape *s, double a, double b) {
    return fmax((double)s->layers / (double)s->full, b / a);
}

/* ---- The published figures ----
 *
 * Kimi Linear's report gives ratios and times and not the machine. Batch 1 (its figure 7b): 1.8 at
 * 512K and 2.2 at 1M, 2.3 in its text. With the largest batches (figure 1b): 11.48 ms a token
 * against 1.84 ms at 1M, which its text calls theoretical. The machines below are figures of ours
 * with which the model gives those of the report, for 16-bit weights and caches. */

/* One accelerator of 3.35 TB/s whose memory holds everything; fixed is solved for. */
static const roofline_machine roofline_published_batch_1 = {
    .bandwidth = 3.35e12, .memory = 160e9, .peak = 990e12, .fixed = 1.3e-3};

/* 160 GB hold the weights and 1 sequence of 1M tokens with full attention, or 7 of the hybrid;
 * bandwidth and fixed are solved for. */
static const roofline_machine roofline_published_largest = {
    .bandwidth = 31e12, .memory = 160e9, .peak = 8e15, .fixed = 10.25e-3};

#endif
