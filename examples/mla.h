/* mla.h - multi-head latent attention without rotation, over a cache of latents.
 *
 * In one source file of a program (this also brings in the bodies of kda.h and linear.h):
 *
 *     #define MLA_IMPLEMENTATION
 *     #include "mla.h"
 *
 * THE MATHEMATICS
 *   Per token, from the normed input x (Kimi Linear; Kimi K3 adds the parts in brackets):
 *
 *       q           = W_q x                  or W_qb RMSNorm(W_qa x)     [n_heads][dim_nope |
 * dim_rope] c | k_r     = W_kva x                                            latent | dim_rope c =
 * RMSNorm(c) k_h | v_h   = W_kvb,h c              per head                    dim_nope | dim_v
 *       score_h,j   = (q_h,nope . k_h,j + q_h,rope . k_r,j) / sqrt(dim_nope + dim_rope)
 *       out_h       = sum over j of softmax(score_h)_j v_h,j             causal: j up to the token
 *       y           = W_o (out [* sigmoid(W_g x)])
 *
 *   The "rope" channels are plain ones: nothing is rotated.
 *
 *   k_h and v_h are never formed. W_kvb,h is W_UK over W_UV, and (W_UK c) . q = c . (W_UK^T q), so
 *   the query goes to the latents once and all heads share one key [c | k_r] of latent + dim_rope
 *   channels per token, which is all that the cache holds:
 *
 *       q'_h        = W_UK,h^T q_h,nope
 *       score_h,j   = ([q'_h | q_h,rope] . [c_j | k_r,j]) / sqrt(dim_nope + dim_rope)
 *       z_h         = sum over j of softmax(score_h)_j c_j
 *       out_h       = W_UV,h z_h
 *
 *   The scale stays that of the channels before absorption.
 *
 * The softmax is online over tiles of MLA_TILE keys, counted from the first token of the sequence:
 * memory does not grow with the number of keys, and a token's bits do not depend on how the tokens
 * were split into calls.
 *
 * Every function is static: this header is for programs of one source file.
 */
#ifndef MLA_H
#define MLA_H

#include "linear.h"

#include <stddef.h>

#define MLA_TILE 64

typedef struct mla_desc {
    size_t n_heads;
    size_t dim_nope; /* query and key channels of a head that come from the latent */
    size_t dim_rope; /* key channels that all heads share */
    size_t dim_v;
    size_t latent;   /* channels of the compressed key and value (kv_lora_rank) */
    size_t q_latent; /* channels of the compressed query (q_lora_rank); 0: not compressed */
    float norm_eps;  /* of the two inner norms */
} mla_desc;

typedef struct mla_weights {
    linear q;   /* [n_heads * (dim_nope + dim_rope)][hidden]; q_latent > 0: [..][q_latent] */
    linear q_a; /* [q_latent][hidden], where q_latent > 0 */
    const float *q_a_norm;  /* [q_latent] */
    linear kv_a;            /* [latent + dim_rope][hidden] */
    const float *kv_a_norm; /* [latent] */
    linear kv_b;            /* [n_heads * (dim_nope + dim_v)][latent] */
    linear g;               /* [n_heads * dim_v][hidden]; type 0: no output gate */
    linear o;               /* [hidden][n_heads * dim_v] */
} mla_weights;

/* Memory of the caller for calls of at most n tokens. */
typedef struct mla_scratch {
    float *q_low;    /* [n][q_latent] */
    float *q;        /* [n][n_heads][dim_nope + dim_rope] */
    float *absorbed; /* [n][n_heads][latent + dim_rope] */
    float *mix;      /* [n][n_heads][latent] */
    float *max;      /* [n][n_heads] */
    float *sum;      /* [n][n_heads] */
    float *out;      /* [n][n_heads][dim_v] */
    float *gate;     /* [n][n_heads][dim_v], with an output gate */
} mla_scratch;

/* Floats of one cached token: its latent after the norm, then the shared key channels. */
static inline size_t mla_cache_width(const mla_desc *desc) {
    return desc->latent + desc->dim_rope;
}

/* Attention alone. cache: [n_past + n][mla_cache_width], the call's own tokens already in it; token
 * t of the call sees rows 0 .. n_past + t. q and out as in mla_scratch, where the call uses
 * absorbed, mix, max and sum. */
LINEAR_API void mla_attend(const mla_desc *desc, const linear *kv_b, const float *q, size_t n,
                           const float *cache, size_t n_past, float *out,
                           const mla_scratch *scratch);

/* The layer: x [n][hidden] to y [n][hidden], appending n rows to a cache that holds n_past. */
LINEAR_API void mla_forward(const mla_desc *desc, const mla_weights *w, const float *x, size_t n,
                            float *cache, size_t n_past, float *y, const mla_scratch *scratch);

#endif

#if defined(MLA_IMPLEMENTATION) && !defined(MLAI_IMPLEMENTED)
#define MLAI_IMPLEMENTED

#if !defined(LINEAR_IMPLEMENTATION)
#define LINEAR_IMPLEMENTATION
#endif
#include "linear.h"
#if !defined(KDA_IMPLEMENTATION)
#define KDA_IMPLEMENTATION
#endif
#include "../kda.h" /* kda_exp, kda_sigmoid */

#include <math.h>
#include <string.h>

/* ---- Attention over the cache ---- */

/* One head of one token, while keys go by. */
typedef struct mlai_query {
    const float *q; /* [latent + dim_rope], scaled */
    float *mix;     /* [latent]: sum of exp(score - max) c */
    float *max;
    float *sum; /* of exp(score - max) */
} mlai_query;

static mlai_query mlai_query_at(const mla_desc *desc, const mla_scratch *scratch, size_t index) {
    mlai_query query;
    query.q = scratch->absorbed + index * mla_cache_width(desc);
    query.mix = scratch->mix + index * desc->latent;
    query.max = scratch->max + index;
    query.sum = scratch->sum + index;
    return query;
}

/* Absorbs and scales the queries, and empties the mixes. */
static void mlai_begin(const mla_desc *desc, const linear *kv_b, const float *q, size_t n,
                       const mla_scratch *scratch) {
    size_t dim_q = desc->dim_nope + desc->dim_rope, width = mla_cache_width(desc);
    float scale = 1.0f / sqrtf((float)dim_q);
    for (size_t h = 0; h < desc->n_heads; h++) {
        linear up = linear_rows(kv_b, h * (desc->dim_nope + desc->dim_v), desc->dim_nope);
        linear_apply_transposed(&up, q + h * dim_q, n, desc->n_heads * dim_q,
                                scratch->absorbed + h * width, desc->n_heads * width);
    }
    for (size_t i = 0; i < n * desc->n_heads; i++) {
        float *absorbed = scratch->absorbed + i * width;
        memcpy(absorbed + desc->latent, q + i * dim_q + desc->dim_nope, desc->dim_rope * sizeof *q);
        for (size_t d = 0; d < width; d++)
            absorbed[d] *= scale;
        memset(scratch->mix + i * desc->latent, 0, desc->latent * sizeof *q);
        scratch->max[i] = -HUGE_VALF;
        scratch->sum[i] = 0;
    }
}

/* mix = mix * rescale + sum over j of weights[j] keys[j]. A tile is summed before it joins the mix:
 * the error then grows with the number of tiles and not of keys. */
static void mlai_mix(const float *weights, const float *keys, size_t n_keys, size_t stride,
                     size_t dim, float rescale, float *mix) {
    size_t d = 0;
    for (; d + LINEAR_LANES <= dim; d += LINEAR_LANES) {
        float sum[LINEAR_LANES] = {0};
        for (size_t j = 0; j < n_keys; j++)
            for (size_t lane = 0; lane < LINEAR_LANES; lane++)
                sum[lane] += weights[j] * keys[j * stride + d + lane];
        for (size_t lane = 0; lane < LINEAR_LANES; lane++)
            mix[d + lane] = mix[d + lane] * rescale + sum[lane];
    }
    for (; d < dim; d++) {
        float sum = 0;
        for (size_t j = 0; j < n_keys; j++)
            sum += weights[j] * keys[j * stride + d];
        mix[d] = mix[d] * rescale + sum;
    }
}

/* Shows one tile of keys to one query. */
static void mlai_tile(const mla_desc *desc, const mlai_query *query, const float *keys,
                      size_t n_keys) {
    size_t width = mla_cache_width(desc);
    float weights[MLA_TILE], max = *query->max, sum = 0;
    for (size_t j = 0; j < n_keys; j++) {
        weights[j] = linear_dot(query->q, keys + j * width, width);
        if (weights[j] > max) max = weights[j];
    }
    for (size_t j = 0; j < n_keys; j++) {
        weights[j] = kda_exp(weights[j] - max);
        sum += weights[j];
    }
    float rescale = kda_exp(*query->max - max);
    mlai_mix(weights, keys, n_keys, width, desc->latent, rescale, query->mix);
    *query->sum = *query->sum * rescale + sum;
    *query->max = max;
}

/* Divides by the sums and takes the mixes to values. */
static void mlai_end(const mla_desc *desc, const linear *kv_b, size_t n, float *out,
                     const mla_scratch *scratch) {
    for (size_t i = 0; i < n * desc->n_heads; i++)
        for (size_t d = 0; d < desc->latent; d++)
            scratch->mix[i * desc->latent + d] /= scratch->sum[i];
    for (size_t h = 0; h < desc->n_heads; h++) {
        size_t first = h * (desc->dim_nope + desc->dim_v) + desc->dim_nope;
        linear up = linear_rows(kv_b, first, desc->dim_v);
        linear_apply(&up, scratch->mix + h * desc->latent, n, desc->n_heads * desc->latent,
                     out + h * desc->dim_v, desc->n_heads * desc->dim_v);
    }
}

LINEAR_API void mla_attend(const mla_desc *desc, const linear *kv_b, const float *q, size_t n,
                           const float *cache, size_t n_past, float *out,
                           const mla_scratch *scratch) {
    mlai_begin(desc, kv_b, q, n, scratch);
    /* Tiles outermost: one tile of keys serves every head of every token while it is in cache. */
    for (size_t first = 0; first < n_past + n; first += MLA_TILE) {
        const float *keys = cache + first * mla_cache_width(desc);
        for (size_t t = first > n_past ? first - n_past : 0; t < n; t++) {
            size_t seen = n_past + t + 1 - first;
            for (size_t h = 0; h < desc->n_heads; h++) {
                mlai_query query = mlai_query_at(desc, scratch, t * desc->n_heads + h);
                mlai_tile(desc, &query, keys, seen < MLA_TILE ? seen : MLA_TILE);
            }
        }
    }
    mlai_end(desc, kv_b, n, out, scratch);
}

/* ---- The layer ---- */

/* x to queries, [n][n_heads][dim_nope + dim_rope]. */
static void mlai_queries(const mla_desc *desc, const mla_weights *w, const float *x, size_t n,
                         const mla_scratch *scratch) {
    size_t low = desc->q_latent;
    if (low == 0) {
        linear_apply(&w->q, x, n, w->q.cols, scratch->q, w->q.rows);
        return;
    }
    linear_apply(&w->q_a, x, n, w->q_a.cols, scratch->q_low, low);
    linear_rms_norm(w->q_a_norm, desc->norm_eps, low, scratch->q_low, n, low, scratch->q_low, low);
    linear_apply(&w->q, scratch->q_low, n, low, scratch->q, w->q.rows);
}

LINEAR_API void mla_forward(const mla_desc *desc, const mla_weights *w, const float *x, size_t n,
                            float *cache, size_t n_past, float *y, const mla_scratch *scratch) {
    size_t width = mla_cache_width(desc), hidden = w->kv_a.cols, values = w->o.cols;
    float *rows = cache + n_past * width;
    mlai_queries(desc, w, x, n, scratch);
    linear_apply(&w->kv_a, x, n, hidden, rows, width);
    linear_rms_norm(w->kv_a_norm, desc->norm_eps, desc->latent, rows, n, width, rows, width);
    mla_attend(desc, &w->kv_b, scratch->q, n, cache, n_past, scratch->out, scratch);
    if (w->g.type) {
        linear_apply(&w->g, x, n, hidden, scratch->gate, values);
        for (size_t i = 0; i < n * values; i++)
            scratch->out[i] *= kda_sigmoid(scratch->gate[i]);
    }
    linear_apply(&w->o, scratch->out, n, values, y, hidden);
}

#endif
