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
 *       q           = W_q x                  or W_qb RMSNorm(W_qa x)
 *       c | k_r     = W_kva x                latent | dim_rope
 *       c           = RMSNorm(c)
 *       k_h | v_h   = W_kvb,h c              per head, dim_nope | dim_v
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
 *       q'_h        = [W_UK,h^T q_h,nope | q_h,rope] / sqrt(dim_nope + dim_rope)       absorbed
 *       score_h,j   = q'_h . [c_j | k_r,j]
 *       z_h         = sum over j of softmax(score_h)_j c_j
 *       out_h       = W_UV,h z_h
 *
 *   The scale stays that of the channels before absorption.
 *
 * THE ORDER OF SUMS
 *   Keys are taken in tiles of MLA_TILE, counted from the first token of the sequence, with an
 *   online softmax: a tile is summed before it joins the sum of its range, MLA_RANGE keys, and
 *   ranges are joined in their order, by whichever threads worked on them. A row, one head of one
 *   token, is summed by itself. So memory does not grow with the square of the tokens, and a token's
 *   bits depend neither on the threads nor on the split into calls nor on the other sequences.
 */
#ifndef MLA_H
#define MLA_H

#include "linear.h"

#include <stddef.h>

#define MLA_TILE 64
#define MLA_RANGE 4096

typedef struct mla_desc {
    size_t n_heads;
    size_t dim_nope; /* query and key channels of a head that come from the latent */
    size_t dim_rope; /* key channels that all heads share */
    size_t dim_v;
    size_t latent;     /* channels of the compressed key and value (kv_lora_rank) */
    size_t q_latent;   /* channels of the compressed query (q_lora_rank); 0: not compressed */
    float norm_eps;    /* of the two inner norms */
    linear_type cache; /* of the cache's elements: LINEAR_F32, LINEAR_F16 or LINEAR_BF16 */
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

/* One sequence of a call. Its tokens' rows follow those of the sequence before it. */
typedef struct mla_seq {
    void *cache; /* [n_past + n_tokens][latent + dim_rope] of desc->cache, little-endian */
    size_t n_past, n_tokens;
} mla_seq;

/* Channels and bytes of one cached token: its latent after the norm, then the shared key channels. */
static inline size_t mla_cache_width(const mla_desc *desc) {
    return desc->latent + desc->dim_rope;
}
static inline size_t mla_cache_row_bytes(const mla_desc *desc) {
    return mla_cache_width(desc) * (desc->cache == LINEAR_F32 ? 4 : 2);
}

/* Floats from row to row of absorbed queries and of mixes: their channels, up to whole vectors. */
size_t mla_query_stride(const mla_desc *desc);
size_t mla_mix_stride(const mla_desc *desc);

/* Bytes of scratch, aligned to 64, for calls of at most n_tokens tokens in all, of sequences of at
 * most `capacity` keys, in n_threads threads. 0 if they are more than can be addressed. */
size_t mla_scratch_bytes(const mla_desc *desc, size_t n_tokens, size_t capacity, size_t n_threads);

/* Whether a run with bf16_dots gets them: a bf16 cache, a processor that has them, and dimensions in
 * whole steps. Otherwise such a run is as any other. */
bool mla_has_bf16_dots(const linear_run *run, const mla_desc *desc);

/* The softmax over the cache alone. absorbed: [tokens][n_heads][mla_query_stride], of which the
 * first latent + dim_rope count; mix, z above: [tokens][n_heads][mla_mix_stride], the first latent
 * of each row. The call's own tokens are in the cache already; token t of a sequence sees rows
 * 0 .. n_past + t. */
void mla_mix(const linear_run *run, const mla_desc *desc, const float *absorbed,
             const mla_seq *seqs, size_t n_seqs, float *mix, void *scratch);

/* Attention from queries, [tokens][n_heads][dim_nope + dim_rope], to values,
 * [tokens][n_heads][dim_v]. */
void mla_attend(const linear_run *run, const mla_desc *desc, const linear *kv_b, const float *q,
                const mla_seq *seqs, size_t n_seqs, float *out, void *scratch);

/* The layer: x [tokens][hidden] to y [tokens][hidden], appending n_tokens rows to each sequence's
 * cache. */
void mla_forward(const linear_run *run, const mla_desc *desc, const mla_weights *w, const float *x,
                 const mla_seq *seqs, size_t n_seqs, float *y, void *scratch);

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
#include "arena.h"

#include <math.h>
#include <string.h>

/* ---- Scratch ---- */

/* Rows of queries that go over the keys together, unless one token has more heads. */
#define MLAI_ROWS 64

/* What a thread works in. */
typedef struct mlai_worker {
    float *tile;                /* [MLA_TILE][mlai_tile_stride] */
    float *scores;              /* [rows][MLA_TILE] */
    float *mix;                 /* [rows][mla_mix_stride]: of one range */
    float *max, *sum, *rescale; /* [rows] */
} mlai_worker;

typedef struct mlai_scratch {
    float *q_low;                 /* [n][q_latent] */
    float *q;                     /* [n][n_heads][dim_nope + dim_rope] */
    float *kv;                    /* [n][latent + dim_rope] */
    float *absorbed;              /* [n][n_heads][mla_query_stride] */
    float *mix;                   /* [n][n_heads][mla_mix_stride] */
    float *out;                   /* [n][n_heads][dim_v] */
    float *gate;                  /* [n][n_heads][dim_v] */
    uint16_t *absorbed_bf16;      /* as absorbed */
    float *zeros, *ones;          /* [n] */
    float *max, *sum;             /* [n][n_heads] */
    float *range_mix;             /* [ranges][n_heads][mla_mix_stride]: of one token */
    float *range_max, *range_sum; /* [ranges][n_heads] */
    unsigned char *workers;       /* [n_threads][worker_bytes] */
    size_t worker_bytes;
} mlai_scratch;

static size_t mlai_padded(size_t channels) {
    return (channels + KERNELS_LANES_MOST - 1) / KERNELS_LANES_MOST * KERNELS_LANES_MOST;
}

size_t mla_query_stride(const mla_desc *desc) {
    return mlai_padded(mla_cache_width(desc));
}

size_t mla_mix_stride(const mla_desc *desc) {
    return mlai_padded(desc->latent);
}

/* An odd number of cache lines, so that a column of the tile is spread over the cache's sets. */
static size_t mlai_tile_stride(const mla_desc *desc) {
    size_t lines = mla_query_stride(desc) / 16;
    return (lines + (lines % 2 == 0)) * 16;
}

static size_t mlai_rows(const mla_desc *desc) {
    return desc->n_heads > MLAI_ROWS ? desc->n_heads : MLAI_ROWS;
}

static mlai_worker mlai_place_worker(const mla_desc *desc, memory_arena *arena) {
    mlai_worker worker;
    size_t rows = mlai_rows(desc);
    worker.tile = arena_floats(arena, MLA_TILE, mlai_tile_stride(desc), 1);
    worker.scores = arena_floats(arena, rows, MLA_TILE, 1);
    worker.mix = arena_floats(arena, rows, mla_mix_stride(desc), 1);
    worker.max = arena_floats(arena, rows, 1, 1);
    worker.sum = arena_floats(arena, rows, 1, 1);
    worker.rescale = arena_floats(arena, rows, 1, 1);
    return worker;
}

static size_t mlai_ranges(size_t n_keys) {
    return n_keys / MLA_RANGE + (n_keys % MLA_RANGE != 0);
}

static mlai_scratch mlai_place(const mla_desc *desc, size_t n, size_t capacity, size_t n_threads,
                               memory_arena *arena) {
    mlai_scratch s;
    size_t heads = desc->n_heads, ranges = capacity > MLA_RANGE ? mlai_ranges(capacity) : 0;
    memory_arena counting = {NULL, 0, false};
    mlai_place_worker(desc, &counting);
    arena->overflow = counting.overflow;
    s.worker_bytes = counting.used;
    s.workers = (unsigned char *)arena_array(arena, 1, n_threads, s.worker_bytes, 1);
    s.range_mix = arena_floats(arena, ranges, heads, mla_mix_stride(desc));
    s.range_max = arena_floats(arena, ranges, heads, 1);
    s.range_sum = arena_floats(arena, ranges, heads, 1);
    s.max = arena_floats(arena, n, heads, 1);
    s.sum = arena_floats(arena, n, heads, 1);
    s.absorbed_bf16 =
        (uint16_t *)arena_array(arena, sizeof(uint16_t), n, heads, mla_query_stride(desc));
    s.zeros = arena_floats(arena, n, 1, 1);
    s.ones = arena_floats(arena, n, 1, 1);
    s.q_low = arena_floats(arena, n, desc->q_latent, 1);
    s.q = arena_floats(arena, n, heads, desc->dim_nope + desc->dim_rope);
    s.kv = arena_floats(arena, n, mla_cache_width(desc), 1);
    s.absorbed = arena_floats(arena, n, heads, mla_query_stride(desc));
    s.mix = arena_floats(arena, n, heads, mla_mix_stride(desc));
    s.out = arena_floats(arena, n, heads, desc->dim_v);
    s.gate = arena_floats(arena, n, heads, desc->dim_v);
    return s;
}

size_t mla_scratch_bytes(const mla_desc *desc, size_t n_tokens, size_t capacity, size_t n_threads) {
    memory_arena counting = {NULL, 0, false};
    mlai_place(desc, n_tokens, capacity, n_threads, &counting);
    return counting.overflow ? 0 : counting.used;
}

/* ---- One tile of keys ---- */

/* Rows of a sequence, row t * n_heads + h is head h of its token t. */
typedef struct mlai_rows_of {
    const mla_seq *seq;
    const float *absorbed;         /* of `first` */
    const uint16_t *absorbed_bf16; /* the same, or null: float32 is used */
    size_t first, count;
} mlai_rows_of;

/* An online softmax of some rows. */
typedef struct mlai_sums {
    float *mix; /* [rows][mla_mix_stride]: sum of exp(score - max) c */
    float *max;
    float *sum; /* of exp(score - max); 0: no key was seen */
} mlai_sums;

/* Keys that a row sees. */
static size_t mlai_seen(const mla_desc *desc, const mlai_rows_of *rows, size_t row) {
    return rows->seq->n_past + (rows->first + row) / desc->n_heads + 1;
}

static const unsigned char *mlai_key(const mla_desc *desc, const mla_seq *seq, size_t key) {
    return (const unsigned char *)seq->cache + key * mla_cache_row_bytes(desc);
}

/* Scores of n keys, in a tile as float32 that the mix will use too, or as they are. */
static void mlai_score(const mla_desc *desc, const kernels *k, const mlai_worker *worker,
                       const mlai_rows_of *rows, size_t first, size_t n) {
    size_t width = mla_cache_width(desc), stride = mlai_tile_stride(desc);
    if (rows->absorbed_bf16) {
        kernels_bf16_of(k->isa)->dots(mlai_key(desc, rows->seq, first), mla_cache_row_bytes(desc),
                                      n, rows->absorbed_bf16, mla_query_stride(desc), rows->count,
                                      width, worker->scores, 1, MLA_TILE);
        return;
    }
    kernels_matrix row = kernels_plain(desc->cache, NULL, 0);
    kernels_matrix tile = kernels_plain(LINEAR_F32, worker->tile, stride * sizeof(float));
    for (size_t j = 0; j < n; j++) {
        row.data = mlai_key(desc, rows->seq, first + j);
        k->expand(&row, width, worker->tile + j * stride);
        memset(worker->tile + j * stride + width, 0, (stride - width) * sizeof(float));
    }
    k->dots(&tile, n, rows->absorbed, mla_query_stride(desc), rows->count, width,
            mla_query_stride(desc), false, worker->scores, 1, MLA_TILE);
}

/* Mixes the first n_keys of the tile into rows r .. r + run - 1. */
static void mlai_mix_tile(const mla_desc *desc, const kernels *k, const mlai_worker *worker,
                          const mlai_rows_of *rows, size_t first, size_t n_keys, size_t r,
                          size_t run, float *mix) {
    const float *weights = worker->scores + r * MLA_TILE;
    if (!rows->absorbed_bf16) {
        k->mix(weights, MLA_TILE, run, worker->tile, mlai_tile_stride(desc), n_keys, desc->latent,
               worker->rescale + r, mix, mla_mix_stride(desc));
        return;
    }
    const kernels_bf16 *bf16 = kernels_bf16_of(k->isa);
    uint16_t *pairs = (uint16_t *)(void *)worker->tile;
    bf16->pair(mlai_key(desc, rows->seq, first), mla_cache_row_bytes(desc), n_keys, desc->latent,
               pairs);
    bf16->mix(weights, MLA_TILE, run, pairs, n_keys, desc->latent, worker->rescale + r, mix,
              mla_mix_stride(desc));
}

/* Shows keys first .. first + MLA_TILE - 1, as far as they are seen, to the rows. */
static void mlai_tile(const mla_desc *desc, const kernels *k, const mlai_worker *worker,
                      const mlai_rows_of *rows, size_t first, const mlai_sums *sums) {
    size_t n = mlai_seen(desc, rows, rows->count - 1) - first, run;
    if (n > MLA_TILE) n = MLA_TILE;
    mlai_score(desc, k, worker, rows, first, n);
    /* The rows of one token see the same keys. A key that is not seen takes no part at all, so that
     * a NaN in it stays with those who see it. */
    for (size_t r = 0; r < rows->count; r += run) {
        size_t seen = mlai_seen(desc, rows, r), head = (rows->first + r) % desc->n_heads;
        run = desc->n_heads - head < rows->count - r ? desc->n_heads - head : rows->count - r;
        if (seen <= first) continue;
        size_t n_keys = seen - first < n ? seen - first : n;
        if (n_keys == n) run = rows->count - r; /* and so do all that follow */
        for (size_t i = r; i < r + run; i++)
            worker->rescale[i] =
                k->softmax(worker->scores + i * MLA_TILE, n_keys, &sums->max[i], &sums->sum[i]);
        mlai_mix_tile(desc, k, worker, rows, first, n_keys, r, run,
                      sums->mix + r * mla_mix_stride(desc));
    }
}

/* ---- Ranges ---- */

static void mlai_range(const mla_desc *desc, const kernels *k, const mlai_worker *worker,
                       const mlai_rows_of *rows, size_t range, const mlai_sums *sums) {
    size_t first = range * MLA_RANGE, end = first + MLA_RANGE;
    size_t seen = mlai_seen(desc, rows, rows->count - 1);
    for (size_t r = 0; r < rows->count; r++) {
        sums->max[r] = -HUGE_VALF;
        sums->sum[r] = 0;
    }
    for (size_t key = first; key < end && key < seen; key += MLA_TILE)
        mlai_tile(desc, k, worker, rows, key, sums);
}

/* Joins the sums of the next range to those of all before it. */
static void mlai_join(const mla_desc *desc, const kernels *k, size_t count, const mlai_sums *next,
                      const mlai_sums *all) {
    size_t stride = mla_mix_stride(desc);
    for (size_t r = 0; r < count; r++) {
        if (next->sum[r] == 0) continue;
        float top = next->max[r] > all->max[r] ? next->max[r] : all->max[r];
        float keep = kda_exp(all->max[r] - top), take = kda_exp(next->max[r] - top);
        k->mix(&take, 0, 1, next->mix + r * stride, 0, 1, desc->latent, &keep,
               all->mix + r * stride, stride);
        all->sum[r] = all->sum[r] * keep + next->sum[r] * take;
        all->max[r] = top;
    }
}

static void mlai_divide(const mla_desc *desc, size_t count, const mlai_sums *sums) {
    for (size_t r = 0; r < count; r++)
        for (size_t d = 0; d < desc->latent; d++)
            sums->mix[r * mla_mix_stride(desc) + d] /= sums->sum[r];
}

/* ---- Work for threads ---- */

/* Items are groups of rows, over all their keys; or, for one token of many keys, groups of its rows
 * times ranges. */
typedef struct mlai_call {
    const mla_desc *desc;
    const kernels *set;
    mlai_scratch scratch;
    const float *absorbed;
    float *mix;
    const mla_seq *seqs;
    size_t n_seqs;
    size_t first_row;  /* of seqs[0], among all rows of absorbed and mix */
    size_t group_rows; /* at most mlai_rows */
    bool bf16_dots, by_range;
    size_t n_items, next;
} mlai_call;

static mlai_worker mlai_worker_at(const mla_desc *desc, const mlai_scratch *scratch, size_t index) {
    memory_arena arena = {scratch->workers + index * scratch->worker_bytes, 0, false};
    return mlai_place_worker(desc, &arena);
}

static size_t mlai_groups(const mlai_call *call, const mla_seq *seq) {
    size_t rows = seq->n_tokens * call->desc->n_heads;
    return (rows + call->group_rows - 1) / call->group_rows;
}

/* Group `group` of a sequence whose first row is `base`. */
static mlai_rows_of mlai_group(const mlai_call *call, const mla_seq *seq, size_t base,
                               size_t group) {
    mlai_rows_of rows;
    size_t left = seq->n_tokens * call->desc->n_heads - group * call->group_rows;
    rows.seq = seq;
    rows.first = group * call->group_rows;
    rows.count = left < call->group_rows ? left : call->group_rows;
    size_t at = (base + rows.first) * mla_query_stride(call->desc);
    rows.absorbed = call->absorbed + at;
    rows.absorbed_bf16 = call->bf16_dots ? call->scratch.absorbed_bf16 + at : NULL;
    return rows;
}

static mlai_sums mlai_sums_at(float *mix, float *max, float *sum, size_t row, size_t stride) {
    mlai_sums sums = {mix + row * stride, max + row, sum + row};
    return sums;
}

/* A group of rows over all their keys. */
static void mlai_do_group(const mlai_call *call, const mlai_worker *worker, size_t item) {
    const mla_desc *desc = call->desc;
    const mla_seq *seq = call->seqs;
    size_t base = call->first_row;
    for (; item >= mlai_groups(call, seq); seq++) {
        item -= mlai_groups(call, seq);
        base += seq->n_tokens * desc->n_heads;
    }
    mlai_rows_of rows = mlai_group(call, seq, base, item);
    mlai_sums all = mlai_sums_at(call->mix, call->scratch.max, call->scratch.sum, base + rows.first,
                                 mla_mix_stride(desc));
    mlai_sums next = {worker->mix, worker->max, worker->sum};
    size_t ranges = mlai_ranges(mlai_seen(desc, &rows, rows.count - 1));
    mlai_range(desc, call->set, worker, &rows, 0, &all);
    for (size_t range = 1; range < ranges; range++) {
        mlai_range(desc, call->set, worker, &rows, range, &next);
        mlai_join(desc, call->set, rows.count, &next, &all);
    }
    mlai_divide(desc, rows.count, &all);
}

/* A group of rows over one range: left in scratch. */
static void mlai_do_range(const mlai_call *call, const mlai_worker *worker, size_t item) {
    const mla_desc *desc = call->desc;
    size_t groups = mlai_groups(call, call->seqs), range = item / groups;
    mlai_rows_of rows = mlai_group(call, call->seqs, call->first_row, item % groups);
    mlai_sums sums =
        mlai_sums_at(call->scratch.range_mix, call->scratch.range_max, call->scratch.range_sum,
                     range * desc->n_heads + rows.first, mla_mix_stride(desc));
    mlai_range(desc, call->set, worker, &rows, range, &sums);
}

static void mlai_work(void *context, size_t index) {
    mlai_call *call = (mlai_call *)context;
    mlai_worker worker = mlai_worker_at(call->desc, &call->scratch, index);
    for (;;) {
        size_t item = parallel_claim(&call->next);
        if (item >= call->n_items) return;
        if (call->by_range)
            mlai_do_range(call, &worker, item);
        else
            mlai_do_group(call, &worker, item);
    }
}

static size_t mlai_tokens(const mla_seq *seqs, size_t n_seqs) {
    size_t n = 0;
    for (size_t i = 0; i < n_seqs; i++) n += seqs[i].n_tokens;
    return n;
}

static void mlai_run(const linear_run *run, mlai_call *call) {
    parallel *pool = run ? run->pool : NULL;
    size_t threads = parallel_threads(pool);
    call->next = 0;
    parallel_for(pool, threads < call->n_items ? threads : call->n_items, mlai_work, call);
}

/* Joins what mlai_do_range left, for one head. */
static void mlai_join_ranges(void *context, size_t head) {
    const mlai_call *call = (const mlai_call *)context;
    const mla_desc *desc = call->desc;
    const mlai_scratch *s = &call->scratch;
    size_t stride = mla_mix_stride(desc), ranges = mlai_ranges(call->seqs->n_past + 1);
    mlai_sums all = mlai_sums_at(s->range_mix, s->range_max, s->range_sum, head, stride);
    for (size_t range = 1; range < ranges; range++) {
        mlai_sums next = mlai_sums_at(s->range_mix, s->range_max, s->range_sum,
                                      range * desc->n_heads + head, stride);
        mlai_join(desc, call->set, 1, &next, &all);
    }
    mlai_divide(desc, 1, &all);
    memcpy(call->mix + (call->first_row + head) * stride, all.mix, stride * sizeof(float));
}

/* Rows of a group: as many as given, or fewer where that gives idle threads work. */
static size_t mlai_group_rows(size_t rows, size_t items, size_t threads) {
    while (items < 2 * threads && rows > KERNELS_TALL) {
        rows = (rows / 2 + KERNELS_TALL - 1) / KERNELS_TALL * KERNELS_TALL;
        items *= 2;
    }
    return rows;
}

/* One token of more than one range. */
static void mlai_mix_token(const linear_run *run, mlai_call *call) {
    size_t ranges = mlai_ranges(call->seqs->n_past + 1);
    call->by_range = true;
    call->group_rows =
        mlai_group_rows(call->desc->n_heads, ranges, parallel_threads(run ? run->pool : NULL));
    call->n_items = ranges * mlai_groups(call, call->seqs);
    mlai_run(run, call);
    parallel_for(run ? run->pool : NULL, call->desc->n_heads, mlai_join_ranges, call);
}

/* Any sequences. */
static void mlai_mix_groups(const linear_run *run, mlai_call *call) {
    size_t heads = call->desc->n_heads, n_tokens = mlai_tokens(call->seqs, call->n_seqs);
    size_t rows = n_tokens > call->n_seqs && heads < MLAI_ROWS ? MLAI_ROWS / heads * heads : heads;
    call->by_range = false;
    call->group_rows = mlai_group_rows(rows, n_tokens * heads / rows + 1,
                                       parallel_threads(run ? run->pool : NULL));
    call->n_items = 0;
    for (size_t i = 0; i < call->n_seqs; i++) call->n_items += mlai_groups(call, &call->seqs[i]);
    mlai_run(run, call);
}

static bool mlai_is_long_token(const mla_seq *seq) {
    return seq->n_tokens == 1 && seq->n_past + 1 > MLA_RANGE;
}

static mlai_scratch mlai_place_call(const linear_run *run, const mla_desc *desc,
                                    const mla_seq *seqs, size_t n_seqs, void *scratch) {
    memory_arena arena = {(unsigned char *)scratch, 0, false};
    size_t longest = 0;
    for (size_t i = 0; i < n_seqs; i++)
        if (seqs[i].n_past + seqs[i].n_tokens > longest)
            longest = seqs[i].n_past + seqs[i].n_tokens;
    return mlai_place(desc, mlai_tokens(seqs, n_seqs), longest,
                      parallel_threads(run ? run->pool : NULL), &arena);
}

bool mla_has_bf16_dots(const linear_run *run, const mla_desc *desc) {
    return desc->cache == LINEAR_BF16 && kernels_bf16_of(run ? run->isa : KDA_ISA_AUTO) &&
           mla_cache_width(desc) % LINEAR_BF16_STEP == 0 && desc->latent % LINEAR_BF16_STEP == 0;
}

static void mlai_round_queries(mlai_call *call, size_t n_tokens) {
    size_t n = n_tokens * call->desc->n_heads * mla_query_stride(call->desc);
    for (size_t i = 0; i < n; i++)
        call->scratch.absorbed_bf16[i] = linear_to_bf16(call->absorbed[i]);
}

void mla_mix(const linear_run *run, const mla_desc *desc, const float *absorbed,
             const mla_seq *seqs, size_t n_seqs, float *mix, void *scratch) {
    mlai_call call;
    memset(&call, 0, sizeof call);
    call.desc = desc, call.absorbed = absorbed, call.mix = mix;
    call.set = kernels_of(run ? run->isa : KDA_ISA_AUTO);
    call.scratch = mlai_place_call(run, desc, seqs, n_seqs, scratch);
    call.bf16_dots = run && run->bf16_dots && mla_has_bf16_dots(run, desc);
    if (call.bf16_dots) mlai_round_queries(&call, mlai_tokens(seqs, n_seqs));
    for (size_t first = 0, end; first < n_seqs; first = end) {
        call.seqs = seqs + first;
        end = first + 1;
        if (mlai_is_long_token(&seqs[first])) {
            mlai_mix_token(run, &call);
        } else {
            while (end < n_seqs && !mlai_is_long_token(&seqs[end])) end++;
            call.n_seqs = end - first;
            mlai_mix_groups(run, &call);
        }
        for (; call.seqs < seqs + end; call.seqs++)
            call.first_row += call.seqs->n_tokens * desc->n_heads;
    }
}

/* ---- Into the latents and out of them ---- */

typedef struct mlai_heads {
    const mla_desc *desc;
    const kernels *set;
    const linear *kv_b;
    mlai_scratch scratch;
    const float *q;
    float *absorbed, *out;
    const float *mix;
    size_t n, next;
} mlai_heads;

/* Queries of one head times W_UK, through a tile of its rows at a time. */
static void mlai_absorb_head(const mlai_heads *call, const mlai_worker *worker, size_t head) {
    const mla_desc *desc = call->desc;
    size_t heads = desc->n_heads, dim_q = desc->dim_nope + desc->dim_rope, count;
    size_t stride = mla_query_stride(desc), tile_stride = mlai_tile_stride(desc);
    float scale = 1.0f / sqrtf((float)dim_q), *to = call->absorbed + head * stride;
    const float *q = call->q + head * dim_q;
    for (size_t row = 0; row < desc->dim_nope; row += count) {
        count = desc->dim_nope - row < MLA_TILE ? desc->dim_nope - row : MLA_TILE;
        for (size_t r = 0; r < count; r++)
            linear_expand(call->kv_b, head * (desc->dim_nope + desc->dim_v) + row + r, 0,
                          desc->latent, worker->tile + r * tile_stride);
        call->set->mix(q + row, heads * dim_q, call->n, worker->tile, tile_stride, count,
                       desc->latent, row == 0 ? call->scratch.zeros : call->scratch.ones, to,
                       heads * stride);
    }
    for (size_t t = 0; t < call->n; t++, to += heads * stride, q += heads * dim_q) {
        memcpy(to + desc->latent, q + desc->dim_nope, desc->dim_rope * sizeof *q);
        for (size_t d = 0; d < mla_cache_width(desc); d++) to[d] *= scale;
    }
}

static void mlai_absorb_work(void *context, size_t index) {
    mlai_heads *call = (mlai_heads *)context;
    mlai_worker worker = mlai_worker_at(call->desc, &call->scratch, index);
    for (;;) {
        size_t head = parallel_claim(&call->next);
        if (head >= call->desc->n_heads) return;
        mlai_absorb_head(call, &worker, head);
    }
}

static void mlai_values_head(void *context, size_t head) {
    const mlai_heads *call = (const mlai_heads *)context;
    const mla_desc *desc = call->desc;
    linear_run alone = {call->set->isa, NULL, false};
    size_t first = head * (desc->dim_nope + desc->dim_v) + desc->dim_nope;
    linear up = linear_rows(call->kv_b, first, desc->dim_v);
    linear_apply(&alone, &up, call->mix + head * mla_mix_stride(desc), call->n,
                 desc->n_heads * mla_mix_stride(desc), call->out + head * desc->dim_v,
                 desc->n_heads * desc->dim_v);
}

void mla_attend(const linear_run *run, const mla_desc *desc, const linear *kv_b, const float *q,
                const mla_seq *seqs, size_t n_seqs, float *out, void *scratch) {
    parallel *pool = run ? run->pool : NULL;
    mlai_heads call;
    memset(&call, 0, sizeof call);
    call.desc = desc, call.kv_b = kv_b, call.q = q, call.out = out;
    call.set = kernels_of(run ? run->isa : KDA_ISA_AUTO);
    call.scratch = mlai_place_call(run, desc, seqs, n_seqs, scratch);
    call.absorbed = call.scratch.absorbed, call.mix = call.scratch.mix;
    call.n = mlai_tokens(seqs, n_seqs);
    for (size_t t = 0; t < call.n; t++) call.scratch.zeros[t] = 0, call.scratch.ones[t] = 1;
    parallel_for(pool, parallel_threads(pool), mlai_absorb_work, &call);
    mla_mix(run, desc, call.absorbed, seqs, n_seqs, call.scratch.mix, scratch);
    parallel_for(pool, desc->n_heads, mlai_values_head, &call);
}

/* ---- The layer ---- */

/* x to queries, [n][n_heads][dim_nope + dim_rope]. */
static void mlai_queries(const linear_run *run, const mla_desc *desc, const mla_weights *w,
                         const float *x, size_t n, const mlai_scratch *s) {
    size_t low = desc->q_latent;
    if (low == 0) {
        linear_apply(run, &w->q, x, n, w->q.cols, s->q, w->q.rows);
        return;
    }
    linear_apply(run, &w->q_a, x, n, w->q_a.cols, s->q_low, low);
    linear_rms_norm(w->q_a_norm, desc->norm_eps, low, s->q_low, n, low, s->q_low, low);
    linear_apply(run, &w->q, s->q_low, n, low, s->q, w->q.rows);
}

/* Appends rows of float32 to the caches. */
static void mlai_append(const mla_desc *desc, const mla_seq *seqs, size_t n_seqs, const float *kv) {
    size_t width = mla_cache_width(desc), row_bytes = mla_cache_row_bytes(desc);
    for (size_t i = 0; i < n_seqs; i++) {
        unsigned char *row = (unsigned char *)seqs[i].cache + seqs[i].n_past * row_bytes;
        for (size_t t = 0; t < seqs[i].n_tokens; t++, row += row_bytes, kv += width)
            linear_compress(desc->cache, kv, width, row);
    }
}

void mla_forward(const linear_run *run, const mla_desc *desc, const mla_weights *w, const float *x,
                 const mla_seq *seqs, size_t n_seqs, float *y, void *scratch) {
    size_t width = mla_cache_width(desc), hidden = w->kv_a.cols, values = w->o.cols;
    size_t n = mlai_tokens(seqs, n_seqs);
    mlai_scratch s = mlai_place_call(run, desc, seqs, n_seqs, scratch);
    mlai_queries(run, desc, w, x, n, &s);
    linear_apply(run, &w->kv_a, x, n, hidden, s.kv, width);
    linear_rms_norm(w->kv_a_norm, desc->norm_eps, desc->latent, s.kv, n, width, s.kv, width);
    mlai_append(desc, seqs, n_seqs, s.kv);
    mla_attend(run, desc, &w->kv_b, s.q, seqs, n_seqs, s.out, scratch);
    if (w->g.type) {
        linear_apply(run, &w->g, x, n, hidden, s.gate, values);
        for (size_t i = 0; i < n * values; i++) s.out[i] *= kda_sigmoid(s.gate[i]);
    }
    linear_apply(run, &w->o, s.out, n, values, y, hidden);
}

#endif
