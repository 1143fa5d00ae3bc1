/* hybrid.h - runs a KDA / full-attention hybrid from a checkpoint in its published layout.
 *
 * In one source file of a program (this also brings in the bodies of the headers below it):
 *
 *     #define HYBRID_IMPLEMENTATION
 *     #include "hybrid.h"
 *
 *     hybrid_model model;
 *     hybrid_workspace work;
 *     hybrid_session session;
 *     hybrid_session_options options = {0};
 *     hybrid_workspace_options how = {0};
 *     options.capacity = how.capacity = 4096;
 *     if (!hybrid_open(&model, "path/to/directory", e)) return false;
 *     if (!hybrid_workspace_open(&work, &model, &how, e)) ...
 *     if (!hybrid_session_open(&session, &model, &options, e)) ...
 *     hybrid_want want = {0};
 *     want.last_logits = logits;
 *     if (!hybrid_forward(&work, &session, ids, n, &want, e)) ...
 *     hybrid_session_close(&session);
 *     hybrid_workspace_close(&work);
 *     hybrid_close(&model);
 *
 * MODELS
 *   A directory with config.json and model.safetensors (or shards with an index), as published for
 *   Kimi-Linear-48B-A3B and for Kimi K3 (whose text part is used): any number of layers in any mix
 *   of KDA and MLA, any dimensions, with or without
 *       a mixture of experts (groups, shared experts, experts over a narrower latent),
 *       Attention Residuals in place of residual additions,
 *       an output gate on MLA, full-rank or low-rank gates on KDA, softplus or bounded decay.
 *   The configuration decides (config.h, weights.h).
 *
 *       x = embed(id)                                   one layer, without Attention Residuals:
 *       per layer: x += attention(norm(x))              attention is KDA or MLA
 *                  x += feed_forward(norm(x))           gated and dense, or a mixture of experts
 *       logits = head(norm(x))
 *
 * SESSIONS AND WORKSPACES
 *   A session is one sequence and owns what a sequence keeps: KDA states, convolution windows, a
 *   cache of latents for `capacity` tokens, its position. A workspace is what a call needs while it
 *   runs: the activations of a block of tokens, the bank of Attention Residuals, the thread pool to
 *   use. Neither grows with the number of tokens read. Any number of sessions share a workspace;
 *   both point to their model, which stays where it is. Calls with different workspaces and
 *   sessions may run at once; a workspace or a session serves one call at a time.
 *
 * BATCHES
 *   hybrid_forward_batch reads tokens of several sessions: their rows go through each matrix
 *   together, so that a weight is read once for all. A session's results are the same bits whatever
 *   else is in the call, for any block size and any number of threads. They depend on one choice
 *   only: kda.h runs the recurrent way a call of fewer than HYBRID_CHUNKED_FROM tokens of a
 *   session, the chunked way a longer one. Tokens that are split into other calls give the same
 *   bits if hybrid_piece would have split them so, and otherwise differ by rounding.
 *
 * DRAFTS
 *   hybrid_verify computes logits of draft tokens and leaves the session as it is; hybrid_commit
 *   then reads the first m of them without another pass through the model. Both give the bits of
 *   the same tokens one by one.
 *
 * ERRORS
 *   One sentence in `error`. A call that fails on its arguments has changed nothing.
 */
#ifndef HYBRID_H
#define HYBRID_H

#include "../attnres.h"
#include "../kda.h"
#include "config.h"
#include "error.h"
#include "linear.h"
#include "mla.h"
#include "parallel.h"
#include "random.h"
#include "weights.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define HYBRID_BLOCK 256       /* tokens that go through the model together by default */
#define HYBRID_MIN_BLOCK 32    /* of any workspace: hybrid_piece finds room in every empty block */
#define HYBRID_CHUNKED_FROM 12 /* tokens from which KDA_AUTO goes the chunked way */

/* The router's choice for one token. scores: [num_experts], after the sigmoid; bias:
 * [num_experts], which decides who is chosen and never enters a weight; chosen, weights:
 * [experts_per_token], best first, equal ones by lower number. scratch: [num_experts +
 * num_expert_group]. */
void hybrid_route(const hybrid_config *config, const float *scores, const float *bias,
                  uint32_t *chosen, float *weights, float *scratch);

/* gate[i] = activation(gate[i]) * up[i] for i < n: SiLU, or SiTU with its betas, which bounds up too. */
void hybrid_activate(const hybrid_config *config, size_t n, float *gate, const float *up);

/* ==== Session ==== */

typedef struct hybrid_session_options {
    size_t capacity;   /* tokens that the session can read in all */
    linear_type cache; /* elements of the latent cache: LINEAR_F32 (0 means that), LINEAR_F16 or
                          LINEAR_BF16 */
    size_t max_draft;  /* tokens of a hybrid_verify at most: what each layer's journal holds */
} hybrid_session_options;

/* What a layer keeps between calls. */
typedef struct hybrid_memory {
    void *state;   /* KDA: kda.h's state */
    void *window;  /* KDA: kda.h's window of a layer */
    void *journal; /* KDA: kda.h's journal of a layer; null without drafts */
    void *latents; /* MLA: [capacity] rows of mla_cache_row_bytes */
} hybrid_memory;

typedef struct hybrid_session {
    const hybrid_model *model;
    hybrid_session_options options;
    size_t n_tokens;       /* read so far */
    size_t n_draft;        /* verified after them and not committed */
    hybrid_memory *layers; /* [n_layers] */
    void *memory;          /* the one allocation */
    bool listed;           /* during a call's checks: the session was seen in its list */
} hybrid_session;

/* Bytes of a session; 0 if they are more than can be addressed. */
size_t hybrid_session_bytes(const hybrid_model *model, const hybrid_session_options *options);

bool hybrid_session_open(hybrid_session *session, const hybrid_model *model,
                         const hybrid_session_options *options, error *e);
void hybrid_session_close(hybrid_session *session);

/* Forgets all tokens. */
bool hybrid_session_reset(hybrid_session *session, error *e);

/* Makes the session one that has read n_tokens tokens, with states, windows and latents that a
 * seeded generator chose: to measure what a context of that length costs without reading one. */
bool hybrid_session_fill(hybrid_session *session, size_t n_tokens, uint64_t seed, error *e);

/* Bytes of the parts of a session's memory, for reports. */
typedef struct hybrid_sizes {
    double states, windows; /* whatever the number of tokens */
    double latents;         /* of the given number of tokens */
    double full_attention;  /* of the same tokens, were every layer full attention */
} hybrid_sizes;
hybrid_sizes hybrid_memory_sizes(const hybrid_model *model, size_t n_tokens, linear_type cache);

/* ==== Workspace ==== */

typedef struct hybrid_workspace_options {
    size_t block;    /* tokens that go through the model together; 0 means HYBRID_BLOCK */
    size_t capacity; /* of the largest session that uses the workspace */
    linear_run run;  /* instruction set and thread pool of all calls; zeroed: the best set, in the
                        calling thread. The pool stays where it is and serves one call at a time */
} hybrid_workspace_options;

/* Some tokens of one session in the present block. */
typedef struct hybrid_part {
    const struct hybrid_item *item;
    size_t first; /* of the item's tokens */
    size_t n, row;
} hybrid_part;

/* Scratch for one block. Attention, feed-forward and head take turns in the same memory. */
typedef struct hybrid_scratch {
    hybrid_part *parts; /* [block] */
    kda_seq *kda_seqs;  /* [block]: the parts, as each kind of layer wants them */
    mla_seq *mla_seqs;  /* [block] */
    float *x;           /* [block][hidden]: the residual stream, where there are plain residuals */
    float *in;          /* [block][hidden]: normed input of a sub-layer */
    float *out;         /* [block][hidden]: its output */
    struct {
        float *q, *k, *v; /* [block][channels]; v becomes the layer's output */
        float *decay;     /* [block][channels]: raw decay gate */
        float *gate;      /* [block][channels]: output gate */
        float *low;       /* [2][block][kda_head_dim]: between the halves of low-rank gates */
        float *beta;      /* [block][kda_heads] */
        kda_run run;      /* how kda.h runs, its scratch */
    } kda;
    void *mla; /* scratch of mla.h */
    struct {
        float *gate, *up; /* [block][widest of the gated units] */
        float *scores;    /* [block][num_experts] */
        float *selection; /* [block][num_experts + num_expert_group] */
        uint32_t *chosen; /* [block][experts_per_token] */
        float *weights;   /* [block][experts_per_token] */
        float *latent;    /* [block][routed width]: what the experts read */
        float *sum;       /* [block][routed width]: weighted sum of their outputs */
        float *rows;      /* [block][routed width]: the rows of some experts' tokens */
        float *expert;    /* [block][routed width]: their outputs */
        uint32_t *tokens; /* [block]: which tokens these are */
        float *shares;    /* [block]: and their weights */
        float *shared;    /* [block][hidden]: output of the shared experts */
    } ffn;
    float *logits; /* [block][HYBRIDI_HEAD_ROWS]: some of each row of logits */
    float *depth;  /* [block][hybrid_depth_sources]: weights of one mixture */
} hybrid_scratch;

typedef struct hybrid_workspace {
    const hybrid_model *model;
    hybrid_workspace_options options;
    attnres_bank bank; /* unused where there are plain residuals */
    attnres_run depth; /* how the bank's calls run */
    hybrid_scratch scratch;
    void *memory; /* the one allocation; bank_memory is in it */
    void *bank_memory;
    size_t bank_bytes;
} hybrid_workspace;

/* Whether a run with bf16_dots gets them over a cache of this type. */
bool hybrid_has_bf16_dots(const hybrid_model *model, linear_type cache, const linear_run *run);

/* Bytes of a workspace; 0 if they are more than can be addressed, or the block is less than
 * HYBRID_MIN_BLOCK. */
size_t hybrid_workspace_bytes(const hybrid_model *model, const hybrid_workspace_options *options);

/* Errors: a block below HYBRID_MIN_BLOCK, an instruction set that this machine and build have not,
 * no memory. */
bool hybrid_workspace_open(hybrid_workspace *work, const hybrid_model *model,
                           const hybrid_workspace_options *options, error *e);
void hybrid_workspace_close(hybrid_workspace *work);

/* ==== Forward ==== */

/* What a call is to give of a session's tokens; null pointers mean "not wanted". */
typedef struct hybrid_want {
    float *logits;      /* [n][vocab]: for each token of the call */
    float *last_logits; /* [vocab]: for its last token */
    float *hidden;      /* the running sum after the embedding and after each layer: layer l of
                           token t of the call at hidden + l * hidden_stride + t * hidden_size */
    size_t hidden_stride;
    float *depth; /* with Attention Residuals: the weights of each mixture, r = 0, 1, ... for
                     attention and feed-forward of each layer and at last the output: that of
                     source j for token t of the call at depth + r * depth_stride + t * sources + j,
                     sources = hybrid_depth_sources. Source 0 is the embedding, j the sum of block
                     j, as far as it goes for the last of a mixture; 0 for sources still to come */
    size_t depth_stride;
} hybrid_want;

/* The most that a mixture of Attention Residuals reads; 0 with plain residuals. */
size_t hybrid_depth_sources(const hybrid_config *config);

/* The next n tokens of one session. */
typedef struct hybrid_item {
    hybrid_session *session;
    const uint32_t *ids; /* [n] */
    size_t n;            /* may be 0: then nothing is read or written */
    hybrid_want want;
} hybrid_item;

/* Would a session take these tokens? Every id must be below vocab_size, and the cache must have
 * room for all. */
bool hybrid_check_tokens(const hybrid_session *session, const uint32_t *ids, size_t n, error *e);

/* Reads the next tokens of each item's session, prompts and generated tokens alike. Sessions are of
 * the workspace's model, of its capacity at most, of one cache type, and each listed once. What
 * this or hybrid_check_tokens refuses is an error before anything has changed. A draft that waits
 * for its commit is dropped. */
bool hybrid_forward_batch(hybrid_workspace *work, const hybrid_item *items, size_t n_items,
                          error *e);

/* The same for one session. */
bool hybrid_forward(hybrid_workspace *work, hybrid_session *session, const uint32_t *ids, size_t n,
                    const hybrid_want *want, error *e);

/* How many of the `left` tokens of a call go into `room` rows: all, or a number that leaves the
 * bits as they are when the rest follows in later rows or in a call of its own; 0 if the room is
 * too small for that, which HYBRID_MIN_BLOCK never is. */
size_t hybrid_piece(size_t left, size_t room);

/* As hybrid_forward_batch on draft tokens, at most max_draft and a workspace's block of each
 * session: gives what is wanted, and leaves the sessions as if nothing had been read but for
 * n_draft. The bits are those of the tokens read one by one. */
bool hybrid_verify_batch(hybrid_workspace *work, const hybrid_item *items, size_t n_items,
                         error *e);
bool hybrid_verify(hybrid_workspace *work, hybrid_session *session, const uint32_t *ids, size_t n,
                   const hybrid_want *want, error *e);

/* Makes the first m <= n_draft tokens of the last hybrid_verify read ones; the rest is dropped. */
bool hybrid_commit(hybrid_workspace *work, hybrid_session *session, size_t m, error *e);

#endif

#if defined(HYBRID_IMPLEMENTATION) && !defined(HYBRIDI_IMPLEMENTED)
#define HYBRIDI_IMPLEMENTED

#if !defined(HYBRID_WEIGHTS_IMPLEMENTATION)
#define HYBRID_WEIGHTS_IMPLEMENTATION
#endif
#include "weights.h"
#if !defined(KDA_IMPLEMENTATION)
#define KDA_IMPLEMENTATION
#endif
#include "../kda.h"
#include "arena.h"
#if !defined(MLA_IMPLEMENTATION)
#define MLA_IMPLEMENTATION
#endif
#include "mla.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Rows of the head that are applied at once: bounds the memory for logits on their way. */
#define HYBRIDI_HEAD_ROWS 4096

static bool hybridi_kda_ok(kda_result result, const char *call, error *e) {
    return result == KDA_OK || error_set(e, "%s: %s", call, kda_result_text(result));
}

static bool hybridi_attnres_ok(attnres_result result, const char *call, error *e) {
    return result == ATTNRES_OK || error_set(e, "%s: %s", call, attnres_result_text(result));
}

/* ---- Descriptions for the libraries ---- */

/* The shape of every KDA layer; weights null: the shape alone. */
static kda_layer_desc hybridi_kda_desc(const hybrid_config *c, const hybrid_kda *weights) {
    kda_layer_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.op.n_heads = c->kda_heads;
    desc.op.dim_k = desc.op.dim_v = c->kda_head_dim;
    desc.op.gate = c->gate_lower_bound < 0 ? KDA_GATE_BOUNDED : KDA_GATE_SOFTPLUS;
    desc.op.lower_bound = c->gate_lower_bound;
    desc.op.beta = KDA_BETA_LOGIT;
    desc.op.flags = KDA_L2_NORM_QK;
    desc.conv_width = c->conv_width;
    desc.conv_activation = KDA_ACTIVATION_SILU;
    desc.norm_eps = c->rms_norm_eps;
    if (!weights) return desc;
    desc.q_conv = weights->q_conv, desc.k_conv = weights->k_conv, desc.v_conv = weights->v_conv;
    desc.A_log = weights->A_log, desc.dt_bias = weights->dt_bias;
    desc.norm_weight = weights->o_norm;
    return desc;
}

static mla_desc hybridi_mla_desc(const hybrid_config *c, linear_type cache) {
    mla_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.n_heads = c->n_heads;
    desc.dim_nope = c->qk_nope_head_dim;
    desc.dim_rope = c->qk_rope_head_dim;
    desc.dim_v = c->v_head_dim;
    desc.latent = c->kv_lora_rank;
    desc.q_latent = c->q_lora_rank;
    desc.norm_eps = c->inner_norm_eps;
    desc.cache = cache ? cache : LINEAR_F32;
    return desc;
}

static attnres_bank_desc hybridi_bank_desc(const hybrid_config *c,
                                           const hybrid_workspace_options *options) {
    attnres_bank_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.dim = c->hidden_size;
    desc.n_tokens = options->block;
    desc.n_layers = c->n_layers;
    desc.block_size = c->attn_res_block_size;
    desc.unit = ATTNRES_LAYERS;
    desc.eps = c->rms_norm_eps;
    desc.n_threads = parallel_threads(options->run.pool);
    return desc;
}

size_t hybrid_depth_sources(const hybrid_config *config) {
    size_t layers = config->n_layers, block = config->attn_res_block_size;
    return block ? layers / block + (layers % block != 0) + 1 : 0;
}

/* Without a pool one thread, also where the libraries are built with OpenMP. */
static kda_run hybridi_kda_run(const linear_run *how) {
    kda_run run;
    memset(&run, 0, sizeof run);
    run.isa = how->isa;
    run.parallel_for = parallel_for;
    run.user = how->pool;
    run.n_threads = parallel_threads(how->pool);
    return run;
}

/* The two libraries number instruction sets alike. */
static attnres_run hybridi_attnres_run(const linear_run *how) {
    attnres_run run;
    memset(&run, 0, sizeof run);
    run.isa = (attnres_isa)how->isa;
    run.parallel_for = parallel_for;
    run.user = how->pool;
    run.n_threads = parallel_threads(how->pool);
    return run;
}

/* ---- Memory ---- */

/* What a size function of a library says, where 0 means that there is no such size. */
static void *hybridi_take_sized(memory_arena *arena, size_t bytes) {
    if (bytes == 0) arena->overflow = true;
    return arena_take(arena, bytes);
}

/* `bytes` of memory aligned to 64 bytes, as many as an arena counted: whole blocks, so that 63 more
 * can be addressed too. `memory` is what to free. */
static void *hybridi_allocate(size_t bytes, void **memory) {
    *memory = malloc(bytes + 63);
    return *memory ? (unsigned char *)*memory + (64 - (uintptr_t)*memory % 64) % 64 : NULL;
}

/* ---- Session ---- */

static hybrid_memory hybridi_place_layer(const hybrid_config *c, bool is_kda,
                                         const hybrid_session_options *options,
                                         memory_arena *arena) {
    hybrid_memory memory;
    memset(&memory, 0, sizeof memory);
    if (is_kda) {
        kda_layer_desc desc = hybridi_kda_desc(c, NULL);
        memory.state = hybridi_take_sized(arena, kda_state_bytes(&desc.op));
        memory.window = arena_take(arena, kda_layer_window_bytes(&desc)); /* 0 bytes: width 1 */
        if (options->max_draft > 0)
            memory.journal =
                hybridi_take_sized(arena, kda_layer_journal_bytes(&desc, options->max_draft));
    } else {
        mla_desc desc = hybridi_mla_desc(c, options->cache);
        memory.latents = arena_array(arena, mla_cache_row_bytes(&desc), options->capacity, 1, 1);
    }
    return memory;
}

/* Lays the session out; with a counting arena, finds the size. */
static void hybridi_place_session(hybrid_session *s, memory_arena *arena) {
    const hybrid_config *c = &s->model->config;
    s->layers = (hybrid_memory *)arena_take(arena, c->n_layers * sizeof *s->layers);
    for (size_t i = 0; i < c->n_layers; i++) {
        hybrid_memory memory = hybridi_place_layer(c, c->is_kda[i], &s->options, arena);
        if (s->layers) s->layers[i] = memory;
    }
}

static hybrid_session hybridi_new_session(const hybrid_model *model,
                                          const hybrid_session_options *options) {
    hybrid_session session;
    memset(&session, 0, sizeof session);
    session.model = model;
    session.options = *options;
    if (!session.options.cache) session.options.cache = LINEAR_F32;
    return session;
}

size_t hybrid_session_bytes(const hybrid_model *model, const hybrid_session_options *options) {
    hybrid_session session = hybridi_new_session(model, options);
    memory_arena counting = {NULL, 0, false};
    hybridi_place_session(&session, &counting);
    return counting.overflow ? 0 : counting.used;
}

bool hybrid_session_reset(hybrid_session *session, error *e) {
    const hybrid_config *c = &session->model->config;
    kda_layer_desc desc = hybridi_kda_desc(c, NULL);
    for (size_t i = 0; i < c->n_layers; i++) {
        if (!c->is_kda[i]) continue;
        hybrid_memory *memory = &session->layers[i];
        if (!hybridi_kda_ok(kda_state_clear(&desc.op, memory->state), "kda_state_clear", e))
            return false;
        memset(memory->window, 0, kda_layer_window_bytes(&desc));
    }
    session->n_tokens = session->n_draft = 0;
    return true;
}

bool hybrid_session_open(hybrid_session *session, const hybrid_model *model,
                         const hybrid_session_options *options, error *e) {
    size_t bytes = hybrid_session_bytes(model, options);
    linear_type cache = options->cache;
    memset(session, 0, sizeof *session);
    if (cache && cache != LINEAR_F32 && cache != LINEAR_F16 && cache != LINEAR_BF16)
        return error_set(e, "a session's cache: expected F32, F16 or BF16, found type %d",
                         (int)cache);
    if (bytes == 0)
        return error_set(e, "a session of %zu tokens: more bytes than can be addressed",
                         options->capacity);
    hybrid_session opened = hybridi_new_session(model, options);
    memory_arena arena = {NULL, 0, false};
    arena.base = (unsigned char *)hybridi_allocate(bytes, &opened.memory);
    if (!arena.base)
        return error_set(e, "a session of %zu tokens: no memory for %zu bytes", options->capacity,
                         bytes);
    hybridi_place_session(&opened, &arena);
    *session = opened;
    if (hybrid_session_reset(session, e)) return true;
    hybrid_session_close(session);
    return false;
}

void hybrid_session_close(hybrid_session *session) {
    free(session->memory);
    memset(session, 0, sizeof *session);
}

/* Uniform in [-size, size). */
static void hybridi_random(random_state *random, double size, size_t n, float *out) {
    for (size_t i = 0; i < n; i++) out[i] = (float)(size * (2 * random_uniform(random) - 1));
}

static void hybridi_fill_layer(const hybrid_config *c, bool is_kda, linear_type cache,
                               const hybrid_memory *memory, size_t n_tokens, random_state *random) {
    if (is_kda) {
        kda_layer_desc desc = hybridi_kda_desc(c, NULL);
        hybridi_random(random, 0.1, kda_state_bytes(&desc.op) / sizeof(float),
                       (float *)memory->state);
        hybridi_random(random, 1, kda_layer_window_bytes(&desc) / sizeof(float),
                       (float *)memory->window);
        return;
    }
    mla_desc desc = hybridi_mla_desc(c, cache);
    size_t width = mla_cache_width(&desc), row_bytes = mla_cache_row_bytes(&desc), n;
    unsigned char *row = (unsigned char *)memory->latents;
    for (size_t t = 0; t < n_tokens; t++, row += row_bytes)
        for (size_t i = 0; i < width; i += n) { /* a latent has the size that its norm gives it */
            float some[64];
            n = width - i < 64 ? width - i : 64;
            hybridi_random(random, 1.7, n, some);
            linear_compress(desc.cache, some, n, row + i * (row_bytes / width));
        }
}

bool hybrid_session_fill(hybrid_session *session, size_t n_tokens, uint64_t seed, error *e) {
    const hybrid_config *c = &session->model->config;
    random_state random = random_seed(seed);
    if (n_tokens > session->options.capacity)
        return error_set(e,
                         "a session of %zu tokens: expected at most so many to fill it with, "
                         "found %zu",
                         session->options.capacity, n_tokens);
    for (size_t i = 0; i < c->n_layers; i++)
        hybridi_fill_layer(c, c->is_kda[i], session->options.cache, &session->layers[i], n_tokens,
                           &random);
    session->n_tokens = n_tokens;
    session->n_draft = 0;
    return true;
}

hybrid_sizes hybrid_memory_sizes(const hybrid_model *model, size_t n_tokens, linear_type cache) {
    const hybrid_config *c = &model->config;
    hybrid_sizes sizes = {0, 0, 0, 0};
    kda_layer_desc desc = hybridi_kda_desc(c, NULL);
    mla_desc mla = hybridi_mla_desc(c, cache);
    double latents = (double)n_tokens * (double)mla_cache_row_bytes(&mla);
    for (size_t i = 0; i < c->n_layers; i++) {
        if (c->is_kda[i]) {
            sizes.states += (double)kda_state_bytes(&desc.op);
            sizes.windows += (double)kda_layer_window_bytes(&desc);
        } else {
            sizes.latents += latents;
        }
        sizes.full_attention += latents;
    }
    return sizes;
}

/* ---- Workspace ---- */

static void hybridi_place_kda(hybrid_scratch *scratch, const hybrid_config *c, size_t block,
                              const linear_run *how, memory_arena *arena) {
    kda_layer_desc desc = hybridi_kda_desc(c, NULL);
    kda_run *run = &scratch->kda.run;
    *run = hybridi_kda_run(how);
    scratch->kda.q = arena_floats(arena, block, c->kda_heads, c->kda_head_dim);
    scratch->kda.k = arena_floats(arena, block, c->kda_heads, c->kda_head_dim);
    scratch->kda.v = arena_floats(arena, block, c->kda_heads, c->kda_head_dim);
    scratch->kda.decay = arena_floats(arena, block, c->kda_heads, c->kda_head_dim);
    scratch->kda.gate = arena_floats(arena, block, c->kda_heads, c->kda_head_dim);
    scratch->kda.low = arena_floats(arena, 2, block, c->kda_head_dim);
    scratch->kda.beta = arena_floats(arena, block, c->kda_heads, 1);
    run->scratch_bytes = kda_layer_scratch_bytes(&desc, block, run);
    run->scratch = hybridi_take_sized(arena, run->scratch_bytes);
}

static size_t hybridi_routed_width(const hybrid_config *c) {
    return c->routed_hidden_size ? c->routed_hidden_size : c->hidden_size;
}

static void hybridi_place_ffn(hybrid_scratch *scratch, const hybrid_config *c, size_t block,
                              memory_arena *arena) {
    size_t experts = c->num_experts, routed = hybridi_routed_width(c), width = c->intermediate_size;
    size_t shared = c->num_shared_experts * c->moe_intermediate_size;
    if (width < shared) width = shared;
    if (width < c->moe_intermediate_size) width = c->moe_intermediate_size;
    scratch->ffn.gate = arena_floats(arena, block, width, 1);
    scratch->ffn.up = arena_floats(arena, block, width, 1);
    if (experts == 0) return;
    scratch->ffn.scores = arena_floats(arena, block, experts, 1);
    scratch->ffn.selection = arena_floats(arena, block, experts + c->num_expert_group, 1);
    scratch->ffn.chosen =
        (uint32_t *)arena_array(arena, sizeof(uint32_t), block, c->experts_per_token, 1);
    scratch->ffn.weights = arena_floats(arena, block, c->experts_per_token, 1);
    scratch->ffn.latent = arena_floats(arena, block, routed, 1);
    scratch->ffn.sum = arena_floats(arena, block, routed, 1);
    scratch->ffn.rows = arena_floats(arena, block, routed, 1);
    scratch->ffn.expert = arena_floats(arena, block, routed, 1);
    scratch->ffn.tokens = (uint32_t *)arena_array(arena, sizeof(uint32_t), block, 1, 1);
    scratch->ffn.shares = arena_floats(arena, block, 1, 1);
    scratch->ffn.shared = arena_floats(arena, block, c->hidden_size, 1);
}

static size_t hybridi_mla_scratch_bytes(const hybrid_config *c,
                                        const hybrid_workspace_options *options) {
    static const linear_type caches[] = {LINEAR_F32, LINEAR_F16, LINEAR_BF16};
    size_t most = 0;
    for (size_t i = 0; i < sizeof caches / sizeof *caches; i++) {
        mla_desc desc = hybridi_mla_desc(c, caches[i]);
        size_t bytes = mla_scratch_bytes(&desc, options->block, options->capacity,
                                         parallel_threads(options->run.pool));
        if (bytes == 0) return 0;
        if (most < bytes) most = bytes;
    }
    return most;
}

/* KDA, MLA, feed-forward and head scratch lie over one another: a sub-layer keeps nothing in it. */
static void hybridi_place_scratch(hybrid_scratch *scratch, const hybrid_config *c,
                                  const hybrid_workspace_options *options, memory_arena *arena) {
    size_t block = options->block, vocab = c->vocab_size;
    scratch->parts = (hybrid_part *)arena_array(arena, sizeof *scratch->parts, block, 1, 1);
    scratch->kda_seqs = (kda_seq *)arena_array(arena, sizeof *scratch->kda_seqs, block, 1, 1);
    scratch->mla_seqs = (mla_seq *)arena_array(arena, sizeof *scratch->mla_seqs, block, 1, 1);
    scratch->x = arena_floats(arena, block, c->hidden_size, 1);
    scratch->in = arena_floats(arena, block, c->hidden_size, 1);
    scratch->out = arena_floats(arena, block, c->hidden_size, 1);
    scratch->depth = arena_floats(arena, block, hybrid_depth_sources(c), 1);
    memory_arena kda = *arena, mla = *arena, head = *arena;
    hybridi_place_kda(scratch, c, block, &options->run, &kda);
    scratch->mla = hybridi_take_sized(&mla, hybridi_mla_scratch_bytes(c, options));
    scratch->logits =
        arena_floats(&head, block, vocab < HYBRIDI_HEAD_ROWS ? vocab : HYBRIDI_HEAD_ROWS, 1);
    hybridi_place_ffn(scratch, c, block, arena);
    if (arena->used < kda.used) arena->used = kda.used;
    if (arena->used < mla.used) arena->used = mla.used;
    if (arena->used < head.used) arena->used = head.used;
    arena->overflow = arena->overflow || kda.overflow || mla.overflow || head.overflow;
}

/* Lays the workspace out; with a counting arena, finds the size. */
static void hybridi_place_workspace(hybrid_workspace *work, memory_arena *arena) {
    const hybrid_config *c = &work->model->config;
    if (c->attn_res_block_size > 0) {
        attnres_bank_desc desc = hybridi_bank_desc(c, &work->options);
        work->bank_bytes = attnres_bank_bytes(&desc);
        work->bank_memory = hybridi_take_sized(arena, work->bank_bytes);
    }
    hybridi_place_scratch(&work->scratch, c, &work->options, arena);
}

static hybrid_workspace hybridi_new_workspace(const hybrid_model *model,
                                              const hybrid_workspace_options *options) {
    hybrid_workspace work;
    memset(&work, 0, sizeof work);
    work.model = model;
    work.options = *options;
    if (!work.options.block) work.options.block = HYBRID_BLOCK;
    work.depth = hybridi_attnres_run(&options->run);
    return work;
}

bool hybrid_has_bf16_dots(const hybrid_model *model, linear_type cache, const linear_run *run) {
    mla_desc desc = hybridi_mla_desc(&model->config, cache);
    return mla_has_bf16_dots(run, &desc);
}

size_t hybrid_workspace_bytes(const hybrid_model *model, const hybrid_workspace_options *options) {
    hybrid_workspace work = hybridi_new_workspace(model, options);
    memory_arena counting = {NULL, 0, false};
    if (work.options.block < HYBRID_MIN_BLOCK) return 0;
    hybridi_place_workspace(&work, &counting);
    return counting.overflow ? 0 : counting.used;
}

/* What can be said before any memory is asked for. */
static bool hybridi_check_workspace(const hybrid_workspace_options *options, error *e) {
    kda_isa isa = options->run.isa;
    if (options->block > 0 && options->block < HYBRID_MIN_BLOCK)
        return error_set(e, "a workspace's block: expected %d tokens or more, found %zu",
                         HYBRID_MIN_BLOCK, options->block);
    if (!kda_isa_is_available(isa) || !attnres_isa_is_available((attnres_isa)isa))
        return error_set(e, "instruction set %s: not in this machine and build, whose best is %s",
                         kda_isa_name(isa), kda_isa_name(kda_isa_best()));
    return true;
}

bool hybrid_workspace_open(hybrid_workspace *work, const hybrid_model *model,
                           const hybrid_workspace_options *options, error *e) {
    memset(work, 0, sizeof *work);
    if (!hybridi_check_workspace(options, e)) return false;
    hybrid_workspace opened = hybridi_new_workspace(model, options);
    size_t bytes = hybrid_workspace_bytes(model, options);
    if (bytes == 0)
        return error_set(e, "a workspace of %zu tokens: more bytes than can be addressed",
                         opened.options.block);
    memory_arena arena = {NULL, 0, false};
    arena.base = (unsigned char *)hybridi_allocate(bytes, &opened.memory);
    if (!arena.base)
        return error_set(e, "a workspace of %zu tokens: no memory for %zu bytes",
                         opened.options.block, bytes);
    hybridi_place_workspace(&opened, &arena);
    *work = opened;
    if (!work->bank_memory) return true;
    attnres_bank_desc desc = hybridi_bank_desc(&model->config, &work->options);
    bool ok = hybridi_attnres_ok(
        attnres_bank_init(&work->bank, &desc, work->bank_memory, work->bank_bytes),
        "attnres_bank_init", e);
    if (!ok) hybrid_workspace_close(work);
    return ok;
}

void hybrid_workspace_close(hybrid_workspace *work) {
    free(work->memory);
    memset(work, 0, sizeof *work);
}

/* ---- Forward: a block ---- */

/* A call, cut into blocks: pieces of its items, one after another. */
typedef struct hybridi_block {
    hybrid_workspace *work;
    const hybrid_item *items;
    size_t n_items;
    bool verify;
    size_t item, first; /* the next piece starts with that token of that item */
    size_t n, n_parts;  /* of this block: rows, work->scratch.parts */
} hybridi_block;

size_t hybrid_piece(size_t left, size_t room) {
    if (left <= room) return left;
    if (left < HYBRID_CHUNKED_FROM) return room; /* recurrent: any split gives the same bits */
    /* Whole chunks, and neither they nor what is left so few that they would be recurrent. */
    size_t n = room / KDA_CHUNK * KDA_CHUNK;
    while (n > 0 && left - n < HYBRID_CHUNKED_FROM) n -= KDA_CHUNK;
    return n >= HYBRID_CHUNKED_FROM ? n : 0;
}

/* Fills the next block; false if nothing is left. */
static bool hybridi_fill(hybridi_block *b) {
    b->n = b->n_parts = 0;
    for (; b->item < b->n_items; b->item++, b->first = 0) {
        const hybrid_item *item = &b->items[b->item];
        size_t left = item->n - b->first, room = b->work->options.block - b->n;
        size_t n = hybrid_piece(left, room);
        if (b->verify && n < left) n = 0; /* a draft goes in whole: its session stays behind it */
        if (n > 0) {
            hybrid_part part = {item, b->first, n, b->n};
            /* An open workspace has them. NOLINTNEXTLINE(clang-analyzer-core.NullDereference) */
            b->work->scratch.parts[b->n_parts++] = part;
            b->n += n;
        }
        b->first += n;
        if (n < left) break;
    }
    return b->n > 0;
}

/* ---- Forward: the residual stream ---- */

/* Starts a block. */
static bool hybridi_embed(const hybridi_block *b, error *e) {
    hybrid_workspace *work = b->work;
    const linear *embed = &work->model->embed;
    size_t hidden = work->model->config.hidden_size;
    float *x = work->scratch.x;
    for (size_t i = 0; i < b->n_parts; i++) {
        const hybrid_part *part = &work->scratch.parts[i];
        for (size_t t = 0; t < part->n; t++)
            linear_expand(embed, part->item->ids[part->first + t], 0, hidden,
                          x + (part->row + t) * hidden);
    }
    if (!work->bank_memory) return true;
    attnres_input embedding = attnres_in_f32(x, (ptrdiff_t)hidden);
    return hybridi_attnres_ok(attnres_bank_start(&work->bank, b->n, embedding, &work->depth),
                              "attnres_bank_start", e);
}

static bool hybridi_depth_is_wanted(const hybridi_block *b) {
    for (size_t i = 0; i < b->n_parts; i++)
        if (b->work->scratch.parts[i].item->want.depth) return true;
    return false;
}

/* Hands out the weights of mixture `read`, scratch.depth [tokens][n]. */
static void hybridi_scatter_depth(const hybridi_block *b, size_t read, size_t n) {
    size_t sources = hybrid_depth_sources(&b->work->model->config);
    for (size_t i = 0; i < b->n_parts; i++) {
        const hybrid_part *part = &b->work->scratch.parts[i];
        const hybrid_want *want = &part->item->want;
        for (size_t t = 0; want->depth && t < part->n; t++) {
            float *to = want->depth + read * want->depth_stride + (part->first + t) * sources;
            memset(to, 0, sources * sizeof *to);
            memcpy(to, b->work->scratch.depth + (part->row + t) * n, n * sizeof *to);
        }
    }
}

/* The normed input of the next sub-layer, or of the head, into scratch.in. */
static bool hybridi_read(const hybridi_block *b, const float *query, const float *norm, error *e) {
    hybrid_workspace *work = b->work;
    const hybrid_config *c = &work->model->config;
    size_t hidden = c->hidden_size;
    float *x = work->scratch.x, *in = work->scratch.in;
    if (!work->bank_memory) {
        linear_rms_norm(norm, c->rms_norm_eps, hidden, x, b->n, hidden, in, hidden);
        return true;
    }
    attnres_norm fused = {norm, c->rms_norm_eps};
    attnres_output to = attnres_out_f32(in, (ptrdiff_t)hidden);
    float *weights = hybridi_depth_is_wanted(b) ? work->scratch.depth : NULL;
    size_t read = work->bank.sublayer, n_sources = work->bank.n_blocks + 1;
    attnres_result result = attnres_bank_read(&work->bank, query, fused, to, weights, &work->depth);
    if (!hybridi_attnres_ok(result, "attnres_bank_read", e)) return false;
    if (weights) hybridi_scatter_depth(b, read, n_sources);
    return true;
}

/* Adds a sub-layer's output, scratch.out. */
static bool hybridi_add(hybrid_workspace *work, size_t n, error *e) {
    size_t hidden = work->model->config.hidden_size;
    if (work->bank_memory) {
        attnres_input out = attnres_in_f32(work->scratch.out, (ptrdiff_t)hidden);
        return hybridi_attnres_ok(attnres_bank_add(&work->bank, out, &work->depth),
                                  "attnres_bank_add", e);
    }
    for (size_t i = 0; i < n * hidden; i++) work->scratch.x[i] += work->scratch.out[i];
    return true;
}

/* ---- Forward: attention ---- */

/* All that a KDA layer does between its projections: q, k, v and the gates to v. */
static bool hybridi_kda_layer(const hybridi_block *b, size_t layer, error *e) {
    const hybrid_scratch *scratch = &b->work->scratch;
    const hybrid_model *m = b->work->model;
    kda_layer_desc desc = hybridi_kda_desc(&m->config, &m->layers[layer].kda);
    ptrdiff_t dim = (ptrdiff_t)desc.op.dim_k, heads = (ptrdiff_t)desc.op.n_heads;
    ptrdiff_t row = heads * dim;
    kda_layer_args args;
    memset(&args, 0, sizeof args);
    for (size_t i = 0; i < b->n_parts; i++) {
        const hybrid_memory *memory = &scratch->parts[i].item->session->layers[layer];
        kda_seq seq = {scratch->parts[i].n, memory->state, memory->window, memory->journal};
        scratch->kda_seqs[i] = seq;
    }
    args.q = kda_in_f32(scratch->kda.q, row, dim);
    args.k = kda_in_f32(scratch->kda.k, row, dim);
    args.v = kda_in_f32(scratch->kda.v, row, dim);
    args.g = kda_in_f32(scratch->kda.decay, row, dim);
    args.beta = kda_in_f32(scratch->kda.beta, heads, 1);
    args.gate = kda_in_f32(scratch->kda.gate, row, dim);
    args.o = kda_out_f32(scratch->kda.v, row, dim);
    args.seqs = scratch->kda_seqs;
    args.n_seqs = b->n_parts;
    if (b->verify)
        return hybridi_kda_ok(kda_layer_verify(&desc, &args, &scratch->kda.run), "kda_layer_verify",
                              e);
    return hybridi_kda_ok(kda_layer(&desc, &args, &scratch->kda.run), "kda_layer", e);
}

/* The product of a block's rows x with w, rows of both as wide as the matrix. */
static linear_product hybridi_product(const linear *w, const float *x, size_t n, float *y) {
    linear_product product = {w, x, n, w->cols, y, w->rows};
    return product;
}

/* What a KDA layer reads, from scratch.in. The gates of low rank, W_b (W_a x), take two rounds. */
static void hybridi_kda_project(const hybrid_workspace *work, const hybrid_kda *w, size_t n) {
    const linear_run *run = &work->options.run;
    const hybrid_scratch *scratch = &work->scratch;
    bool full_rank = work->model->config.use_full_rank_gate;
    float *in = scratch->in, *low = scratch->kda.low, *gate_low = low + n * w->f_a.rows;
    linear_product first[] = {hybridi_product(&w->f_a, in, n, low),
                              full_rank ? hybridi_product(&w->g, in, n, scratch->kda.gate)
                                        : hybridi_product(&w->g_a, in, n, gate_low),
                              hybridi_product(&w->b, in, n, scratch->kda.beta),
                              hybridi_product(&w->q, in, n, scratch->kda.q),
                              hybridi_product(&w->k, in, n, scratch->kda.k),
                              hybridi_product(&w->v, in, n, scratch->kda.v)};
    linear_product second[] = {hybridi_product(&w->f_b, low, n, scratch->kda.decay),
                               hybridi_product(&w->g_b, gate_low, n, scratch->kda.gate)};
    linear_apply_all(run, first, sizeof first / sizeof *first);
    linear_apply_all(run, second, full_rank ? 1 : 2);
}

static bool hybridi_kda_forward(const hybridi_block *b, size_t layer, error *e) {
    hybrid_workspace *work = b->work;
    const hybrid_kda *w = &work->model->layers[layer].kda;
    const hybrid_scratch *scratch = &work->scratch;
    hybridi_kda_project(work, w, b->n);
    if (!hybridi_kda_layer(b, layer, e)) return false;
    linear_apply(&work->options.run, &w->o, scratch->kda.v, b->n, w->o.cols, scratch->out,
                 w->o.rows);
    return true;
}

static void hybridi_mla_forward(const hybridi_block *b, size_t layer) {
    const hybrid_scratch *scratch = &b->work->scratch;
    const hybrid_model *m = b->work->model;
    mla_desc desc = hybridi_mla_desc(&m->config, b->items[0].session->options.cache);
    for (size_t i = 0; i < b->n_parts; i++) {
        const hybrid_session *session = scratch->parts[i].item->session;
        mla_seq seq = {session->layers[layer].latents, session->n_tokens, scratch->parts[i].n};
        scratch->mla_seqs[i] = seq;
    }
    mla_forward(&b->work->options.run, &desc, &m->layers[layer].mla, scratch->in, scratch->mla_seqs,
                b->n_parts, scratch->out, scratch->mla);
}

/* ---- Forward: feed-forward ---- */

void hybrid_activate(const hybrid_config *config, size_t n, float *gate, const float *up) {
    float beta = config->situ_beta, linear_beta = config->situ_linear_beta;
    if (config->activation == HYBRID_SILU) {
        for (size_t i = 0; i < n; i++) gate[i] *= kda_sigmoid(gate[i]) * up[i];
        return;
    }
    for (size_t i = 0; i < n; i++) {
        float value = beta * tanhf(gate[i] / beta) * kda_sigmoid(gate[i]);
        gate[i] = value * (linear_beta > 0 ? linear_beta * tanhf(up[i] / linear_beta) : up[i]);
    }
}

/* Elements of a task of hybridi_activate_all: worth waking a thread for. */
#define HYBRIDI_ACTIVATED ((size_t)2048)

typedef struct hybridi_activating {
    const hybrid_config *config;
    size_t n;
    float *gate;
    const float *up;
} hybridi_activating;

static void hybridi_activate_task(void *context, size_t index) {
    const hybridi_activating *all = (const hybridi_activating *)context;
    size_t first = index * HYBRIDI_ACTIVATED, n = all->n - first;
    if (n > HYBRIDI_ACTIVATED) n = HYBRIDI_ACTIVATED;
    hybrid_activate(all->config, n, all->gate + first, all->up + first);
}

static void hybridi_activate_all(const hybrid_workspace *work, size_t n, float *gate,
                                 const float *up) {
    hybridi_activating all = {&work->model->config, n, gate, up};
    size_t tasks = (n + HYBRIDI_ACTIVATED - 1) / HYBRIDI_ACTIVATED;
    parallel_for(work->options.run.pool, tasks, hybridi_activate_task, &all);
}

/* y = W_down (activation(W_gate x) * (W_up x)), rows of x and y as wide as the unit's inputs. */
static void hybridi_glu(const hybrid_workspace *work, const hybrid_glu *w, const float *x, size_t n,
                        float *y) {
    float *gate = work->scratch.ffn.gate, *up = work->scratch.ffn.up;
    size_t inputs = w->gate.cols, width = w->gate.rows;
    const linear_run *run = &work->options.run;
    linear_product both[] = {hybridi_product(&w->gate, x, n, gate),
                             hybridi_product(&w->up, x, n, up)};
    linear_apply_all(run, both, 2);
    hybridi_activate_all(work, n * width, gate, up);
    linear_apply(run, &w->down, gate, n, width, y, inputs);
}

/* The place of the largest, the first of equals, which is struck out. */
static size_t hybridi_take_best(float *values, size_t n) {
    size_t best = 0;
    for (size_t i = 1; i < n; i++)
        if (values[i] > values[best]) best = i;
    values[best] = -HUGE_VALF;
    return best;
}

/* The sum of the best two of a group's selection scores. */
static float hybridi_group_score(const float *scores, const float *bias, size_t first, size_t n) {
    float best = -HUGE_VALF, second = -HUGE_VALF;
    for (size_t i = first; i < first + n; i++) {
        float score = scores[i] + bias[i];
        if (score > best) {
            second = best;
            best = score;
        } else if (score > second) {
            second = score;
        }
    }
    return best + second;
}

/* Selection scores of all experts in the best groups, -inf for the others. */
static void hybridi_select(const hybrid_config *c, const float *scores, const float *bias,
                           float *selection, float *groups) {
    size_t members = c->num_experts / c->num_expert_group;
    for (size_t i = 0; i < c->num_experts; i++) selection[i] = -HUGE_VALF;
    for (size_t i = 0; i < c->num_expert_group; i++)
        groups[i] =
            c->num_expert_group > 1 ? hybridi_group_score(scores, bias, i * members, members) : 0;
    for (size_t taken = 0; taken < c->topk_group; taken++) {
        size_t first = hybridi_take_best(groups, c->num_expert_group) * members;
        for (size_t i = first; i < first + members; i++) selection[i] = scores[i] + bias[i];
    }
}

void hybrid_route(const hybrid_config *config, const float *scores, const float *bias,
                  uint32_t *chosen, float *weights, float *scratch) {
    float *selection = scratch, *groups = scratch + config->num_experts, sum = 0;
    hybridi_select(config, scores, bias, selection, groups);
    for (size_t i = 0; i < config->experts_per_token; i++) {
        size_t best = hybridi_take_best(selection, config->num_experts);
        chosen[i] = (uint32_t)best;
        weights[i] = scores[best];
        sum += weights[i];
    }
    bool renormalize = config->moe_renormalize && config->experts_per_token > 1;
    for (size_t i = 0; i < config->experts_per_token; i++) {
        if (renormalize) weights[i] /= sum + 1e-20f;
        weights[i] *= config->routed_scaling_factor;
    }
}

/* A block's tokens, as the router's tasks want them. */
typedef struct hybridi_routing {
    const hybrid_workspace *work;
    const float *bias;
} hybridi_routing;

/* Chooses the experts of one token. */
static void hybridi_route_token(void *context, size_t t) {
    const hybridi_routing *routing = (const hybridi_routing *)context;
    const hybrid_config *c = &routing->work->model->config;
    const hybrid_scratch *scratch = &routing->work->scratch;
    float *scores = scratch->ffn.scores + t * c->num_experts;
    for (size_t i = 0; i < c->num_experts; i++) scores[i] = kda_sigmoid(scores[i]);
    hybrid_route(c, scores, routing->bias, scratch->ffn.chosen + t * c->experts_per_token,
                 scratch->ffn.weights + t * c->experts_per_token,
                 scratch->ffn.selection + t * (c->num_experts + c->num_expert_group));
}

/* Chooses the experts of n tokens. */
static void hybridi_route_block(const hybrid_workspace *work, const hybrid_moe *w, size_t n) {
    hybridi_routing routing = {work, w->bias};
    linear_apply(&work->options.run, &w->router, work->scratch.in, n, w->router.cols,
                 work->scratch.ffn.scores, w->router.rows);
    parallel_for(work->options.run.pool, n, hybridi_route_token, &routing);
}

/* Experts that run at once, and the rows of the block's scratch that they use: tokens, shares,
 * rows, gate, up, expert. Of few tokens these are all that they chose, of many some experts. */
#define HYBRIDI_EXPERTS 32

typedef struct hybridi_expert_group {
    size_t n, n_rows;
    const hybrid_glu *experts[HYBRIDI_EXPERTS];
    size_t ends[HYBRIDI_EXPERTS]; /* rows of this expert and of those before it */
} hybridi_expert_group;

/* How many of n tokens chose an expert. */
static size_t hybridi_count(const hybrid_workspace *work, uint32_t expert, size_t n) {
    size_t per_token = work->model->config.experts_per_token, count = 0;
    for (size_t i = 0; i < n * per_token; i++) count += work->scratch.ffn.chosen[i] == expert;
    return count;
}

/* Appends the tokens that chose an expert: their numbers, weights and rows. */
static void hybridi_gather(const hybrid_workspace *work, hybridi_expert_group *group,
                           uint32_t expert, size_t n, const float *x) {
    const hybrid_config *c = &work->model->config;
    size_t per_token = c->experts_per_token, width = hybridi_routed_width(c);
    for (size_t t = 0; t < n; t++) {
        const uint32_t *chosen = work->scratch.ffn.chosen + t * per_token;
        size_t i = 0, row = group->n_rows;
        while (i < per_token && chosen[i] != expert) i++;
        if (i == per_token) continue;
        work->scratch.ffn.tokens[row] = (uint32_t)t;
        work->scratch.ffn.shares[row] = work->scratch.ffn.weights[t * per_token + i];
        memcpy(work->scratch.ffn.rows + row * width, x + t * width, width * sizeof *x);
        group->n_rows++;
    }
}

/* sum[t] += share * expert's output, for the tokens that were gathered. */
static void hybridi_scatter(const hybrid_workspace *work, size_t n_rows) {
    size_t width = hybridi_routed_width(&work->model->config);
    for (size_t i = 0; i < n_rows; i++) {
        const float *in = work->scratch.ffn.expert + i * width;
        float *sum = work->scratch.ffn.sum + work->scratch.ffn.tokens[i] * width;
        for (size_t d = 0; d < width; d++) sum[d] += work->scratch.ffn.shares[i] * in[d];
    }
}

/* Runs the experts of a group and adds their outputs; empties it. */
static void hybridi_run_group(const hybrid_workspace *work, hybridi_expert_group *group) {
    const linear_run *run = &work->options.run;
    float *gate = work->scratch.ffn.gate, *up = work->scratch.ffn.up;
    linear_product in[2 * HYBRIDI_EXPERTS], out[HYBRIDI_EXPERTS];
    for (size_t i = 0; i < group->n; i++) {
        const hybrid_glu *w = group->experts[i];
        size_t first = i > 0 ? group->ends[i - 1] : 0, n = group->ends[i] - first;
        const float *x = work->scratch.ffn.rows + first * w->gate.cols;
        float *hidden = gate + first * w->gate.rows;
        in[2 * i] = hybridi_product(&w->gate, x, n, hidden);
        in[2 * i + 1] = hybridi_product(&w->up, x, n, up + first * w->gate.rows);
        out[i] =
            hybridi_product(&w->down, hidden, n, work->scratch.ffn.expert + first * w->gate.cols);
    }
    linear_apply_all(run, in, 2 * group->n);
    hybridi_activate_all(work, group->n_rows * work->model->config.moe_intermediate_size, gate, up);
    linear_apply_all(run, out, group->n);
    hybridi_scatter(work, group->n_rows);
    group->n = group->n_rows = 0;
}

/* The routed experts over x, [n][routed width], into scratch.ffn.sum. Expert by expert, so that its
 * weights are read once for all tokens that chose it; a token's sum runs in the order of the
 * experts' numbers, whatever else is in the block. */
static void hybridi_experts(const hybrid_workspace *work, const hybrid_moe *w, const float *x,
                            size_t n) {
    const hybrid_config *c = &work->model->config;
    hybridi_expert_group group;
    group.n = group.n_rows = 0;
    memset(work->scratch.ffn.sum, 0, n * hybridi_routed_width(c) * sizeof *x);
    for (size_t i = 0; i < c->num_experts; i++) {
        size_t count = hybridi_count(work, (uint32_t)i, n);
        if (count == 0) continue;
        if (group.n == HYBRIDI_EXPERTS || group.n_rows + count > work->options.block)
            hybridi_run_group(work, &group);
        hybridi_gather(work, &group, (uint32_t)i, n, x);
        group.experts[group.n] = &w->experts[i];
        group.ends[group.n++] = group.n_rows;
    }
    hybridi_run_group(work, &group);
}

/* The routed experts' part of the output, over a narrower latent where the model has one. */
static void hybridi_routed(const hybrid_workspace *work, const hybrid_moe *w, size_t n, float *y) {
    const hybrid_config *c = &work->model->config;
    float *latent = work->scratch.ffn.latent, *sum = work->scratch.ffn.sum;
    size_t hidden = c->hidden_size, width = c->routed_hidden_size;
    if (width == 0) {
        hybridi_experts(work, w, work->scratch.in, n);
        memcpy(y, sum, n * hidden * sizeof *y);
        return;
    }
    linear_apply(&work->options.run, &w->latent_down, work->scratch.in, n, hidden, latent, width);
    hybridi_experts(work, w, latent, n);
    if (w->latent_norm)
        linear_rms_norm(w->latent_norm, c->rms_norm_eps, width, sum, n, width, sum, width);
    linear_apply(&work->options.run, &w->latent_up, sum, n, width, y, hidden);
}

static void hybridi_moe_forward(const hybrid_workspace *work, const hybrid_moe *w, size_t n) {
    hybridi_route_block(work, w, n);
    hybridi_routed(work, w, n, work->scratch.out);
    if (!w->shared.gate.type) return;
    size_t hidden = work->model->config.hidden_size;
    float *shared = work->scratch.ffn.shared;
    hybridi_glu(work, &w->shared, work->scratch.in, n, shared);
    for (size_t i = 0; i < n * hidden; i++) work->scratch.out[i] += shared[i];
}

/* ---- Forward: the model ---- */

static bool hybridi_layer_forward(const hybridi_block *b, size_t i, error *e) {
    hybrid_workspace *work = b->work;
    const hybrid_config *c = &work->model->config;
    const hybrid_layer *layer = &work->model->layers[i];

    if (!hybridi_read(b, layer->attention_query, layer->attention_norm, e)) return false;
    if (!c->is_kda[i])
        hybridi_mla_forward(b, i);
    else if (!hybridi_kda_forward(b, i, e))
        return false;
    if (!hybridi_add(work, b->n, e)) return false;

    if (!hybridi_read(b, layer->ffn_query, layer->ffn_norm, e)) return false;
    if (hybrid_is_moe(c, i))
        hybridi_moe_forward(work, &layer->moe, b->n);
    else
        hybridi_glu(work, &layer->dense, work->scratch.in, b->n, work->scratch.out);
    return hybridi_add(work, b->n, e);
}

/* Copies the running sums of a block for those who want them. */
static void hybridi_dump(const hybridi_block *b, size_t layer) {
    const hybrid_workspace *work = b->work;
    size_t hidden = work->model->config.hidden_size;
    const float *sum = work->bank_memory ? work->bank.partial : work->scratch.x;
    for (size_t i = 0; i < b->n_parts; i++) {
        const hybrid_part *part = &work->scratch.parts[i];
        const hybrid_want *want = &part->item->want;
        if (want->hidden)
            memcpy(want->hidden + layer * want->hidden_stride + part->first * hidden,
                   sum + part->row * hidden, part->n * hidden * sizeof *sum);
    }
}

/* Are logits wanted of token t of a part, counted from the part's first? */
static bool hybridi_is_wanted(const hybrid_part *part, size_t t) {
    const hybrid_want *want = &part->item->want;
    return want->logits || (want->last_logits && part->first + t + 1 == part->item->n);
}

/* Moves the rows of scratch.in whose logits are wanted to its start; returns how many. */
static size_t hybridi_gather_wanted(const hybridi_block *b) {
    size_t hidden = b->work->model->config.hidden_size, count = 0;
    float *in = b->work->scratch.in;
    for (size_t i = 0; i < b->n_parts; i++) {
        const hybrid_part *part = &b->work->scratch.parts[i];
        for (size_t t = 0; t < part->n; t++)
            if (hybridi_is_wanted(part, t))
                memmove(in + count++ * hidden, in + (part->row + t) * hidden, hidden * sizeof *in);
    }
    return count;
}

/* Hands out logits from, [wanted rows][n]: numbers first .. first + n - 1 of each row. */
static void hybridi_scatter_wanted(const hybridi_block *b, size_t first, size_t n,
                                   const float *from) {
    size_t vocab = b->work->model->config.vocab_size;
    for (size_t i = 0; i < b->n_parts; i++) {
        const hybrid_part *part = &b->work->scratch.parts[i];
        const hybrid_want *want = &part->item->want;
        for (size_t t = 0; t < part->n; t++) {
            if (!hybridi_is_wanted(part, t)) continue;
            if (want->logits)
                memcpy(want->logits + (part->first + t) * vocab + first, from, n * sizeof *from);
            if (want->last_logits && part->first + t + 1 == part->item->n)
                memcpy(want->last_logits + first, from, n * sizeof *from);
            from += n;
        }
    }
}

/* Logits, some rows of the head at a time, which so is read once for all tokens. */
static bool hybridi_logits(const hybridi_block *b, error *e) {
    hybrid_workspace *work = b->work;
    const hybrid_model *m = work->model;
    size_t vocab = m->config.vocab_size, hidden = m->config.hidden_size;
    bool wanted = hybridi_depth_is_wanted(b);
    for (size_t i = 0; i < b->n_parts; i++)
        wanted = wanted || hybridi_is_wanted(&work->scratch.parts[i], work->scratch.parts[i].n - 1);
    if (!wanted) return true;
    if (!hybridi_read(b, m->output_query, m->norm, e)) return false;
    size_t count = hybridi_gather_wanted(b);
    for (size_t first = 0, n; count > 0 && first < vocab; first += n) {
        n = vocab - first < HYBRIDI_HEAD_ROWS ? vocab - first : HYBRIDI_HEAD_ROWS;
        linear rows = linear_rows(&m->head, first, n);
        linear_apply(&work->options.run, &rows, work->scratch.in, count, hidden,
                     work->scratch.logits, n);
        hybridi_scatter_wanted(b, first, n, work->scratch.logits);
    }
    return true;
}

static bool hybridi_block_forward(const hybridi_block *b, error *e) {
    if (!hybridi_embed(b, e)) return false;
    hybridi_dump(b, 0);
    for (size_t i = 0; i < b->work->model->config.n_layers; i++) {
        if (!hybridi_layer_forward(b, i, e)) return false;
        hybridi_dump(b, i + 1);
    }
    for (size_t i = 0; i < b->n_parts; i++) {
        hybrid_session *session = b->work->scratch.parts[i].item->session;
        if (b->verify)
            session->n_draft = b->work->scratch.parts[i].n;
        else
            session->n_tokens += b->work->scratch.parts[i].n;
    }
    return hybridi_logits(b, e);
}

/* ---- Forward: calls ---- */

bool hybrid_check_tokens(const hybrid_session *session, const uint32_t *ids, size_t n, error *e) {
    size_t vocab = session->model->config.vocab_size, capacity = session->options.capacity;
    size_t room = capacity - session->n_tokens;
    for (size_t t = 0; t < n; t++)
        if (ids[t] >= vocab)
            return error_set(e,
                             "token %zu of the input: expected an id below vocab_size %zu, "
                             "found %lu",
                             t + 1, vocab, (unsigned long)ids[t]);
    if (n > room)
        return error_set(e,
                         "the session has room for %zu tokens and has read %zu: expected at most "
                         "%zu more, found %zu",
                         capacity, session->n_tokens, room, n);
    return true;
}

static bool hybridi_check_item(const hybridi_block *b, const hybrid_item *item, error *e) {
    const hybrid_session *session = item->session;
    const hybrid_workspace_options *options = &b->work->options;
    size_t most = session->options.max_draft;
    if (most > options->block) most = options->block;
    if (session->model != b->work->model)
        return error_set(e, "session and workspace: expected one model, found two");
    if (session->options.capacity > options->capacity)
        return error_set(e, "the workspace is for sessions of %zu tokens, found one of %zu",
                         options->capacity, session->options.capacity);
    if (session->options.cache != b->items[0].session->options.cache)
        return error_set(e, "sessions of one call: expected one type of cache, found two");
    if (b->verify && item->n > most)
        return error_set(e, "a draft: expected at most %zu tokens, found %zu", most, item->n);
    return hybrid_check_tokens(session, item->ids, item->n, e);
}

/* Is a session listed twice? */
static bool hybridi_has_twice(const hybrid_item *items, size_t n_items) {
    bool twice = false;
    for (size_t i = 0; i < n_items; i++) {
        twice = twice || items[i].session->listed;
        items[i].session->listed = true;
    }
    for (size_t i = 0; i < n_items; i++) items[i].session->listed = false;
    return twice;
}

static bool hybridi_call(hybridi_block *b, error *e) {
    for (size_t i = 0; i < b->n_items; i++)
        if (!hybridi_check_item(b, &b->items[i], e)) return false;
    if (hybridi_has_twice(b->items, b->n_items))
        return error_set(e, "sessions of one call: expected different ones, found one twice");
    for (size_t i = 0; i < b->n_items; i++)
        if (b->items[i].n > 0) b->items[i].session->n_draft = 0;
    while (hybridi_fill(b))
        if (!hybridi_block_forward(b, e)) return false;
    return true;
}

bool hybrid_forward_batch(hybrid_workspace *work, const hybrid_item *items, size_t n_items,
                          error *e) {
    hybridi_block b = {work, items, n_items, false, 0, 0, 0, 0};
    return hybridi_call(&b, e);
}

bool hybrid_verify_batch(hybrid_workspace *work, const hybrid_item *items, size_t n_items,
                         error *e) {
    hybridi_block b = {work, items, n_items, true, 0, 0, 0, 0};
    return hybridi_call(&b, e);
}

bool hybrid_forward(hybrid_workspace *work, hybrid_session *session, const uint32_t *ids, size_t n,
                    const hybrid_want *want, error *e) {
    hybrid_item item = {session, ids, n, *want};
    return hybrid_forward_batch(work, &item, 1, e);
}

bool hybrid_verify(hybrid_workspace *work, hybrid_session *session, const uint32_t *ids, size_t n,
                   const hybrid_want *want, error *e) {
    hybrid_item item = {session, ids, n, *want};
    return hybrid_verify_batch(work, &item, 1, e);
}

bool hybrid_commit(hybrid_workspace *work, hybrid_session *session, size_t m, error *e) {
    const hybrid_model *model = work->model;
    if (session->model != model)
        return error_set(e, "session and workspace: expected one model, found two");
    if (m > session->n_draft)
        return error_set(e, "the draft has %zu tokens: expected at most that many, found %zu",
                         session->n_draft, m);
    for (size_t i = 0; i < model->config.n_layers; i++) {
        if (!model->config.is_kda[i]) continue;
        const hybrid_memory *memory = &session->layers[i];
        kda_layer_desc desc = hybridi_kda_desc(&model->config, &model->layers[i].kda);
        kda_seq seq = {m, memory->state, memory->window, memory->journal};
        if (!hybridi_kda_ok(kda_layer_commit(&desc, &seq, 1, &work->scratch.kda.run),
                            "kda_layer_commit", e))
            return false;
    }
    session->n_tokens += m; /* the latents are there: hybrid_verify put them after the read ones */
    session->n_draft = 0;
    return true;
}

#endif
