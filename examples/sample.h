/* sample.h - the next token, chosen by a model's logits.
 *
 *     sample_options options = sample_defaults();
 *     sampler s;
 *     if (!sampler_open(&s, &options, vocab_size, e)) ...
 *     sampler_read(&s, prompt, n);
 *     uint32_t id = sampler_next(&s, logits);
 *     sampler_close(&s);
 *
 * WHAT IS COMPUTED
 *   Of the logits l_i, in this order, which is that of Hugging Face's transformers:
 *
 *   1. Repetition penalty r, for each id that occurred in the context (sampler_read, and what
 *      sampler_next returned), once however often it did:
 *          l_i = l_i / r  for l_i > 0,  l_i r  otherwise
 *      Keskar et al. 2019, CTRL, section 4.1, which divides whatever the sign; by the sign as
 *      transformers does, so that r > 1 never makes an id more likely.
 *   2. Ids are ranked: the larger logit first, the lower id among equals. Temperature T = 0 takes
 *      the first and ends here. Otherwise each has the weight
 *          w_i = exp((l_i - max l) / T)
 *   3. top-k keeps the first k.
 *   4. top-p keeps the fewest first ones whose weights add up to p times the weight of all that
 *      top-k has kept.
 *   5. min-p keeps those with w_i >= m max w, which is to say whose probability is at least m times
 *      the largest.
 *   6. Of what is kept id i is drawn with probability w_i / sum w: of one number from the
 *      generator, times the sum, the ids' weights are taken away by rank until it is below 0.
 *
 *   NaN counts as -inf. Where the largest logit is not finite, the first by rank is taken. Every
 *   choice with T > 0 takes one number from the generator.
 *
 * COST
 *   O(n) for a vocabulary of n, and O(log n) for each rank that is looked at: k of top-k, what
 *   top-p keeps, and how far the draw goes.
 *
 * Every function is static.
 */
#ifndef SAMPLE_H
#define SAMPLE_H

#include "arguments.h"
#include "error.h"
#include "random.h"

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct sample_options {
    double temperature;        /* 0: the most likely */
    size_t top_k;              /* 0: all */
    double top_p, min_p;       /* 1 and 0: all */
    double repetition_penalty; /* 1: none */
    uint64_t seed;
} sample_options;

static inline sample_options sample_defaults(void) {
    sample_options options = {0, 0, 1, 0, 1, 1};
    return options;
}

/* Rows of a program's table of arguments: `type` is its options, which have sample_options as
 * `sampling`. Then the help text about them. */
#define SAMPLE_ARGUMENTS(type)                                                                     \
    {"--temperature", ARGUMENT_REAL, offsetof(type, sampling.temperature), 0, 1e6, NULL},          \
        {"--top-k", ARGUMENT_SIZE, offsetof(type, sampling.top_k), 0, 0, NULL},                    \
        {"--top-p", ARGUMENT_REAL, offsetof(type, sampling.top_p), 1e-9, 1, NULL},                 \
        {"--min-p", ARGUMENT_REAL, offsetof(type, sampling.min_p), 0, 1, NULL},                    \
        {"--repetition-penalty",                                                                   \
         ARGUMENT_REAL,                                                                            \
         offsetof(type, sampling.repetition_penalty),                                              \
         0.01,                                                                                     \
         100,                                                                                      \
         NULL},                                                                                    \
    {                                                                                              \
        "--seed", ARGUMENT_SEED, offsetof(type, sampling.seed), 0, 0, NULL                         \
    }

#define SAMPLE_HELP                                                                                \
    "  --temperature X     0 takes the most likely, the lower id among equals (default 0)\n"       \
    "  --top-k N           draw from the N most likely; 0 means all (default 0)\n"                 \
    "  --top-p X           draw from the most likely that hold X of the probability\n"             \
    "                      (default 1)\n"                                                          \
    "  --min-p X           draw from those at least X times as likely as the most likely\n"        \
    "                      (default 0)\n"                                                          \
    "  --repetition-penalty X\n"                                                                   \
    "                      divide the logits of tokens that occurred by X if they are\n"           \
    "                      positive, else multiply them (default 1)\n"                             \
    "  --seed N            of the draws (default 1)\n"

typedef struct sample_candidate {
    float logit;
    uint32_t id;
    double weight; /* w, in (0, 1] */
} sample_candidate;

/* What an option does not ask for is null. */
typedef struct sampler {
    sample_options options;
    size_t vocab;
    random_state random;
    sample_candidate *candidates; /* [vocab] with a temperature */
    float *logits;                /* [vocab] with a penalty: the logits after it */
    unsigned char *seen;          /* [vocab] with a penalty: did the id occur? */
} sampler;

/* Bytes that an open sampler holds beside itself. */
static inline size_t sampler_bytes(const sample_options *options, size_t vocab) {
    size_t bytes = 0;
    if (options->temperature > 0) bytes += sizeof(sample_candidate);
    if (options->repetition_penalty != 1) bytes += sizeof(float) + 1;
    return bytes * vocab;
}

static inline void sampler_close(sampler *s) {
    free(s->candidates), free(s->logits), free(s->seen);
    memset(s, 0, sizeof *s);
}

/* For vocab ids, at least 1. On failure it is empty: closing it is allowed, not needed. */
static inline bool sampler_open(sampler *s, const sample_options *options, size_t vocab, error *e) {
    bool draws = options->temperature > 0, penalises = options->repetition_penalty != 1;
    memset(s, 0, sizeof *s);
    if (vocab <= SIZE_MAX / sizeof *s->candidates) {
        if (draws) s->candidates = (sample_candidate *)malloc(vocab * sizeof *s->candidates);
        if (penalises) s->logits = (float *)malloc(vocab * sizeof *s->logits);
        if (penalises) s->seen = (unsigned char *)calloc(vocab, 1);
    }
    if ((draws && !s->candidates) || (penalises && (!s->logits || !s->seen))) {
        sampler_close(s);
        return error_set(e, "no memory to choose from %zu tokens", vocab);
    }
    s->options = *options;
    s->vocab = vocab;
    if (s->options.top_k >= vocab) s->options.top_k = 0;
    s->random = random_seed(options->seed);
    return true;
}

/* These ids are in the context; those that are not below vocab count for nothing. */
static inline void sampler_read(sampler *s, const uint32_t *ids, size_t n) {
    for (size_t i = 0; s->seen && i < n; i++)
        if (ids[i] < s->vocab) s->seen[ids[i]] = 1;
}

/* Nothing is in the context. */
static inline void sampler_forget(sampler *s) {
    if (s->seen) memset(s->seen, 0, s->vocab);
}

/* The first by rank; 0 where every logit is -inf or NaN. */
static inline uint32_t sample_most_likely(const float *logits, size_t vocab) {
    float largest = -HUGE_VALF;
    size_t best = 0;
    for (size_t i = 0; i < vocab; i++)
        /* A forward pass has written them; not seen so far away.
         * NOLINTNEXTLINE(clang-analyzer-core.UndefinedBinaryOperatorResult) */
        if (logits[i] > largest) largest = logits[i], best = i;
    return (uint32_t)best;
}

/* ---- Candidates by rank ---- */

/* A heap of the candidates that have no rank yet, list[0 .. left), whose first is at its top. Those
 * of rank 0, 1, ... are list[n - 1], list[n - 2], ... */
typedef struct samplei_ranking {
    sample_candidate *list;
    size_t n, left;
} samplei_ranking;

static bool samplei_before(const sample_candidate *a, const sample_candidate *b) {
    return a->logit != b->logit ? a->logit > b->logit : a->id < b->id;
}

/* Puts `c` where it belongs in the heap from place i on, which is free. */
static void samplei_sink(samplei_ranking *r, size_t i, sample_candidate c) {
    for (size_t child; (child = 2 * i + 1) < r->left; i = child) {
        if (child + 1 < r->left && samplei_before(&r->list[child + 1], &r->list[child])) child++;
        if (!samplei_before(&r->list[child], &c)) break;
        r->list[i] = r->list[child];
    }
    r->list[i] = c;
}

static void samplei_begin(samplei_ranking *r) {
    r->left = r->n;
    for (size_t i = r->n / 2; i-- > 0;) samplei_sink(r, i, r->list[i]);
}

/* The candidate of a rank below n. */
static const sample_candidate *samplei_rank(samplei_ranking *r, size_t rank) {
    while (r->n - r->left <= rank) {
        sample_candidate first = r->list[0], last = r->list[--r->left];
        if (r->left > 0) samplei_sink(r, 0, last);
        r->list[r->left] = first;
    }
    return &r->list[r->n - 1 - rank];
}

/* ---- Choosing ---- */

static const float *samplei_penalise(sampler *s, const float *logits) {
    double penalty = s->options.repetition_penalty;
    for (size_t i = 0; i < s->vocab; i++) {
        double logit = (double)logits[i];
        if (s->seen[i]) logit = logit > 0 ? logit / penalty : logit * penalty;
        s->logits[i] = (float)logit;
    }
    return s->logits;
}

/* All candidates of a weight that can be drawn, in any order; *total is the weight of all ids.
 * Without top-k those that min-p will not keep are left out at once: they are the last by rank and
 * count for the total only. */
static samplei_ranking samplei_gather(sampler *s, const float *logits, float largest,
                                      double *total) {
    samplei_ranking r = {s->candidates, 0, 0};
    double least = s->options.top_k > 0 ? 0 : s->options.min_p;
    *total = 0;
    for (size_t i = 0; i < s->vocab; i++) {
        double weight = exp(((double)logits[i] - (double)largest) / s->options.temperature);
        if (!(weight > 0)) continue; /* NaN too */
        *total += weight;
        if (weight < least) continue;
        sample_candidate c = {logits[i], (uint32_t)i, weight};
        r.list[r.n++] = c;
    }
    return r;
}

/* How many of the first are kept; *held is their weight. */
static size_t samplei_keep(const sample_options *o, samplei_ranking *r, double total,
                           double *held) {
    size_t most = o->top_k > 0 && o->top_k < r->n ? o->top_k : r->n, kept = 0;
    if (most < r->n) {
        total = 0;
        for (size_t i = 0; i < most; i++) total += samplei_rank(r, i)->weight;
    }
    *held = 0;
    if (o->top_k == 0 && o->top_p >= 1) { /* all, and which is the first does not matter */
        for (size_t i = 0; i < r->n; i++) *held += r->list[i].weight;
        return r->n;
    }
    for (; kept < most && (o->top_p >= 1 || *held < o->top_p * total); kept++) {
        double weight = samplei_rank(r, kept)->weight;
        if (weight < o->min_p) break;
        *held += weight;
    }
    return kept;
}

static uint32_t samplei_draw(sampler *s, const float *logits) {
    double uniform = random_uniform(&s->random), total, held;
    uint32_t best = sample_most_likely(logits, s->vocab);
    if (!isfinite(logits[best])) return best;
    samplei_ranking r = samplei_gather(s, logits, logits[best], &total);
    samplei_begin(&r);
    size_t kept = samplei_keep(&s->options, &r, total, &held);
    double left = uniform * held;
    for (size_t i = 0; i < kept; i++) {
        const sample_candidate *c = samplei_rank(&r, i);
        left -= c->weight;
        if (left < 0) return c->id;
    }
    return samplei_rank(&r, kept - 1)->id; /* rounding */
}

/* The next token by logits [vocab], which is in the context from then on. */
static inline uint32_t sampler_next(sampler *s, const float *logits) {
    if (s->seen) logits = samplei_penalise(s, logits);
    uint32_t id = s->candidates ? samplei_draw(s, logits) : sample_most_likely(logits, s->vocab);
    sampler_read(s, &id, 1);
    return id;
}

#endif
