/* hybrid.h - runs a KDA / full-attention hybrid from a checkpoint in its published layout.
 *
 * In one source file of a program (this also brings in the bodies of the headers below it):
 *
 *     #define HYBRID_IMPLEMENTATION
 *     #include "hybrid.h"
 *
 *     hybrid_model model;
 *     hybrid_session session;
 *     if (!hybrid_open(&model, "path/to/directory", e)) return false;
 *     if (!hybrid_session_open(&session, &model, 4096, 0, e)) ...
 *     hybrid_want want = {0};
 *     want.last_logits = logits;
 *     if (!hybrid_forward(&session, ids, n, &want, e)) ...
 *     hybrid_session_close(&session);
 *     hybrid_close(&model);
 *
 * MODELS
 *   A directory with config.json and model.safetensors (or shards with an index), as published for
 *   Kimi-Linear-48B-A3B and for Kimi K3 (whose text part is used): any number of layers in any mix
 *   of KDA and MLA, any dimensions, with or without
 *       a mixture of experts (groups, shared experts, experts over a narrower latent),
 *       Attention Residuals in place of residual additions,
 *       an output gate on MLA, full-rank or low-rank gates on KDA, softplus or bounded decay.
 *   The configuration decides; what it asks for and this version lacks is refused by name.
 *
 *       x = embed(id)                                   one layer, without Attention Residuals:
 *       per layer: x += attention(norm(x))              attention is KDA or MLA
 *                  x += feed_forward(norm(x))           gated and dense, or a mixture of experts
 *       logits = head(norm(x))
 *
 * WEIGHTS
 *   Matrices stay in the mapped file, in their type: F32, F16, BF16, or MXFP4 (`weight_packed` with
 *   `weight_scale` in place of `weight`). Vectors become float32 when the model is opened. Every
 *   tensor that the configuration calls for must be there in its type and shape; others are
 *   ignored.
 *
 * SESSIONS
 *   A session is one sequence: KDA states, convolution windows, a cache of latents for `capacity`
 *   tokens, and scratch for `block` tokens, in one allocation of hybrid_session_bytes. Longer calls
 *   go through the model block by block, so memory depends on the capacity only. A session points
 *   to its model, which stays where it is. Sessions of one model may run in different threads; one
 *   session is used by one thread at a time.
 *
 * ERRORS
 *   One sentence in `error`. A call that fails on its arguments has changed nothing.
 *
 * Every function is static: this header is for programs of one source file.
 */
#ifndef HYBRID_H
#define HYBRID_H

#include "../attnres.h"
#include "../kda.h"
#include "error.h"
#include "linear.h"
#include "mla.h"
#include "safetensors.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define HYBRID_API static __attribute__((unused)) /* a program need not call every function */
#else
#define HYBRID_API static
#endif

#define HYBRID_MAX_LAYERS 1024
#define HYBRID_MAX_DIM ((size_t)1 << 24) /* of any dimension, derived ones included */
#define HYBRID_BLOCK 64                  /* tokens that go through the model together */

/* ==== Configuration ==== */

typedef enum hybrid_activation { HYBRID_SILU = 1, HYBRID_SITU = 2 } hybrid_activation;

/* config.json; names in brackets where they differ from its keys. */
typedef struct hybrid_config {
    size_t vocab_size, hidden_size, intermediate_size;
    size_t n_layers;                /* [num_hidden_layers] */
    bool is_kda[HYBRID_MAX_LAYERS]; /* [linear_attn_config.kda_layers]; else full attention */
    hybrid_activation activation;   /* [hidden_act] */
    float situ_beta;                /* [activation_situ_beta] */
    float situ_linear_beta;         /* [activation_situ_linear_beta]; 0: the up part is as it is */
    float rms_norm_eps;
    float inner_norm_eps; /* of MLA's two inner norms: 1e-6 whatever rms_norm_eps is */
    bool tie_word_embeddings;
    size_t attn_res_block_size; /* 0: plain residuals */

    size_t n_heads;     /* [num_attention_heads] */
    size_t q_lora_rank; /* 0: queries are not compressed */
    size_t kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim;
    bool mla_use_output_gate;

    size_t kda_heads, kda_head_dim; /* [linear_attn_config.num_heads, .head_dim] */
    size_t conv_width;              /* [.short_conv_kernel_size] */
    bool use_full_rank_gate;
    float gate_lower_bound; /* 0: softplus gate */

    size_t num_experts;       /* 0: every layer is dense, what follows is unused */
    size_t experts_per_token; /* [num_experts_per_token] */
    size_t num_shared_experts, moe_intermediate_size;
    size_t routed_hidden_size; /* [routed_expert_hidden_size]; 0: experts are full width */
    size_t first_k_dense_replace, moe_layer_freq;
    size_t num_expert_group, topk_group;
    bool latent_moe_use_norm, moe_renormalize;
    float routed_scaling_factor;
} hybrid_config;

/* Reads the text of a config.json; `file` names it in messages. */
HYBRID_API bool hybrid_config_parse(hybrid_config *config, const char *file, const char *text,
                                    size_t length, error *e);

/* Has layer i (from 0) a mixture of experts? */
HYBRID_API bool hybrid_is_moe(const hybrid_config *config, size_t i);

/* The router's choice for one token. scores: [num_experts], after the sigmoid; bias:
 * [num_experts], which decides who is chosen and never enters a weight; chosen, weights:
 * [experts_per_token], best first, equal ones by lower number. scratch: [num_experts +
 * num_expert_group]. */
HYBRID_API void hybrid_route(const hybrid_config *config, const float *scores, const float *bias,
                             uint32_t *chosen, float *weights, float *scratch);

/* ==== Model ==== */

typedef struct hybrid_kda {
    linear q, k, v;                        /* [kda_heads * kda_head_dim][hidden] */
    const float *q_conv, *k_conv, *v_conv; /* [kda_heads * kda_head_dim][conv_width] */
    linear f_a, f_b;                       /* decay gate, [kda_head_dim][hidden] and back up */
    linear b;                              /* beta, [kda_heads][hidden] */
    linear g_a, g_b;                       /* output gate of low rank, shapes as f_a, f_b */
    linear g;                              /* or of full rank, [kda_heads * kda_head_dim][hidden] */
    linear o;                              /* [hidden][kda_heads * kda_head_dim] */
    const float *A_log;                    /* [kda_heads] */
    const float *dt_bias;                  /* [kda_heads * kda_head_dim] */
    const float *o_norm;                   /* [kda_head_dim] */
} hybrid_kda;

typedef struct hybrid_glu {
    linear gate, up; /* [width][inputs] */
    linear down;     /* [inputs][width] */
} hybrid_glu;

typedef struct hybrid_moe {
    linear router;                 /* [num_experts][hidden] */
    const float *bias;             /* [num_experts] */
    const hybrid_glu *experts;     /* [num_experts], over routed_hidden_size or hidden */
    linear latent_down, latent_up; /* [routed_hidden_size][hidden] and back, if experts use it */
    const float *latent_norm;      /* [routed_hidden_size] or null */
    hybrid_glu shared;             /* type 0: none */
} hybrid_moe;

typedef struct hybrid_layer {
    const float *attention_norm, *ffn_norm;   /* [hidden] */
    const float *attention_query, *ffn_query; /* [hidden], folded; null: plain residuals */
    hybrid_kda kda;                           /* one of these two */
    mla_weights mla;
    hybrid_moe moe; /* and one of these two */
    hybrid_glu dense;
} hybrid_layer;

typedef struct hybrid_model {
    hybrid_config config;
    st_checkpoint checkpoint;
    linear embed, head;        /* [vocab][hidden] */
    const float *norm;         /* [hidden] */
    const float *output_query; /* [hidden], folded; null: plain residuals */
    hybrid_layer *layers;      /* [n_layers] */
    hybrid_glu *experts;       /* of all layers */
    float *vectors;            /* all the float32 that layers point to */
} hybrid_model;

/* On failure the model is empty: closing it is allowed, not needed. */
HYBRID_API bool hybrid_open(hybrid_model *model, const char *directory, error *e);
HYBRID_API void hybrid_close(hybrid_model *model);

/* ==== Session ==== */

/* What a layer keeps between calls. */
typedef struct hybrid_memory {
    void *state;    /* KDA: kda.h's state */
    void *window;   /* KDA: kda.h's window of a layer */
    void *latents; /* MLA: [capacity][kv_lora_rank + qk_rope_head_dim] */
} hybrid_memory;

/* Scratch for one block. Attention and feed-forward take turns in the same memory. */
typedef struct hybrid_scratch {
    float *x;   /* [block][hidden]: the residual stream, where there are plain residuals */
    float *in;  /* [block][hidden]: normed input of a sub-layer */
    float *out; /* [block][hidden]: its output */
    struct {
        float *q, *k, *v; /* [block][channels]; v becomes the layer's output */
        float *decay;     /* [block][channels]: raw decay gate */
        float *gate;      /* [block][channels]: output gate */
        float *low;       /* [block][kda_head_dim]: between the halves of a low-rank gate */
        float *beta;      /* [block][kda_heads] */
        kda_run run;      /* scratch of kda.h */
    } kda;
    void *mla; /* scratch of mla.h */
    struct {
        float *gate, *up; /* [block][widest of the gated units] */
        float *scores;    /* [num_experts] */
        float *selection; /* [num_experts + num_expert_group] */
        uint32_t *chosen; /* [block][experts_per_token] */
        float *weights;   /* [block][experts_per_token] */
        float *latent;    /* [block][routed width]: what the experts read */
        float *sum;       /* [block][routed width]: weighted sum of their outputs */
        float *rows;      /* [block][routed width]: the rows of one expert's tokens */
        float *expert;    /* [block][routed width]: its output */
        uint32_t *tokens; /* [block]: which tokens these are */
        float *shares;    /* [block]: and their weights */
        float *shared;    /* [block][hidden]: output of the shared experts */
    } ffn;
} hybrid_scratch;

typedef struct hybrid_session {
    const hybrid_model *model;
    size_t capacity;       /* tokens that the latent cache holds */
    size_t block;          /* tokens that go through the model together */
    size_t n_tokens;       /* seen so far */
    hybrid_memory *layers; /* [n_layers] */
    attnres_bank bank;     /* unused where there are plain residuals */
    linear_run run;            /* how projections and MLA run */
    attnres_run depth;         /* how the bank's calls run */
    hybrid_scratch scratch;
    void *memory; /* the one allocation; bank_memory is in it */
    void *bank_memory;
    size_t bank_bytes;
} hybrid_session;

/* What a call is to give; null pointers mean "not wanted". */
typedef struct hybrid_want {
    float *logits;      /* [n][vocab]: for each token of the call */
    float *last_logits; /* [vocab]: for its last token */
    float *hidden;      /* the running sum after the embedding and after each layer: layer l of
                           token t of the call at hidden + l * hidden_stride + t * hidden_size */
    size_t hidden_stride;
} hybrid_want;

/* Bytes of a session; block 0 means HYBRID_BLOCK. 0 if they are more than can be addressed. */
HYBRID_API size_t hybrid_session_bytes(const hybrid_model *model, size_t capacity, size_t block);

HYBRID_API bool hybrid_session_open(hybrid_session *session, const hybrid_model *model,
                                    size_t capacity, size_t block, error *e);
HYBRID_API void hybrid_session_close(hybrid_session *session);

/* Which kernels kda.h and attnres.h use for this session, from the next call on; KDA_ISA_AUTO unless
 * said otherwise. One that is not there is an error and changes nothing. */
HYBRID_API bool hybrid_session_use(hybrid_session *session, kda_isa isa, error *e);

/* Forgets all tokens. */
HYBRID_API bool hybrid_session_reset(hybrid_session *session, error *e);

/* Would hybrid_forward take these tokens? Every id must be below vocab_size, and the cache must
 * have room for all. */
HYBRID_API bool hybrid_check_tokens(const hybrid_session *session, const uint32_t *ids, size_t n,
                                    error *e);

/* Reads the next n tokens, a whole prompt or one generated token alike. n may be 0: then nothing is
 * written. Logits of the same tokens differ by rounding only when they are split into other calls.
 * Tokens that hybrid_check_tokens refuses are an error before anything has changed. `want` is not
 * null. */
HYBRID_API bool hybrid_forward(hybrid_session *session, const uint32_t *ids, size_t n,
                               const hybrid_want *want, error *e);

/* Bytes of the parts of a session's memory, for reports. */
typedef struct hybrid_sizes {
    double states, windows; /* whatever the number of tokens */
    double latents;         /* of the given number of tokens */
    double full_attention;  /* of the same tokens, were every layer full attention */
} hybrid_sizes;
HYBRID_API hybrid_sizes hybrid_memory_sizes(const hybrid_model *model, size_t n_tokens);

#endif

#if defined(HYBRID_IMPLEMENTATION) && !defined(HYBRIDI_IMPLEMENTED)
#define HYBRIDI_IMPLEMENTED

#if !defined(ATTNRES_IMPLEMENTATION)
#define ATTNRES_IMPLEMENTATION
#endif
#include "../attnres.h"
#if !defined(KDA_IMPLEMENTATION)
#define KDA_IMPLEMENTATION
#endif
#include "../kda.h"
#if !defined(SAFETENSORS_IMPLEMENTATION)
#define SAFETENSORS_IMPLEMENTATION
#endif
#include "safetensors.h"
#if !defined(MLA_IMPLEMENTATION)
#define MLA_IMPLEMENTATION
#endif
#include "mla.h"

#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

/* ---- Configuration: one key at a time ---- */

/* Reads keys of one object. The first failure stays, and later reads return something harmless, so
 * that a list of keys reads as a list. */
typedef struct hybridi_reader {
    const json_value *object;
    const char *file;
    bool failed;
    error *e;
    char path[80]; /* of the object, "" or "linear_attn_config." */
} hybridi_reader;

static const json_value *hybridi_key(const hybridi_reader *r, const char *key) {
    return json_member(r->object, key);
}

/* A default stands in for a missing key and for null. */
static bool hybridi_absent(const hybridi_reader *r, const char *key) {
    json_kind kind = json_kind_of(hybridi_key(r, key));
    return kind == JSON_NOTHING || kind == JSON_NULL;
}

static void hybridi_expected(hybridi_reader *r, const char *key, const char *expected) {
    char found[JSON_SHOWN];
    if (r->failed) return;
    r->failed = true;
    error_set(r->e, "%s: key %s%s: expected %s, found %s", r->file, r->path, key, expected,
              json_show(hybridi_key(r, key), found));
}

static size_t hybridi_size(hybridi_reader *r, const char *key, size_t low, size_t high) {
    char expected[80];
    uint64_t value = 0;
    if (json_unsigned(hybridi_key(r, key), &value) && value >= low && value <= high)
        return (size_t)value;
    snprintf(expected, sizeof expected, "an integer from %zu to %zu", low, high);
    hybridi_expected(r, key, expected);
    return low;
}

static size_t hybridi_size_or(hybridi_reader *r, const char *key, size_t otherwise, size_t low,
                              size_t high) {
    return hybridi_absent(r, key) ? otherwise : hybridi_size(r, key, low, high);
}

/* For a key that must be there and may be null, which reads as 0. */
static size_t hybridi_size_or_null(hybridi_reader *r, const char *key, size_t low, size_t high) {
    return json_kind_of(hybridi_key(r, key)) == JSON_NULL ? 0 : hybridi_size(r, key, low, high);
}

static float hybridi_float(hybridi_reader *r, const char *key, double low, double high) {
    char expected[80];
    double value = 0;
    if (json_number(hybridi_key(r, key), &value) && value >= low && value <= high)
        return (float)value;
    snprintf(expected, sizeof expected, "a number from %g to %g", low, high);
    hybridi_expected(r, key, expected);
    return 0;
}

static float hybridi_float_or(hybridi_reader *r, const char *key, float otherwise, double low,
                              double high) {
    return hybridi_absent(r, key) ? otherwise : hybridi_float(r, key, low, high);
}

static bool hybridi_bool(hybridi_reader *r, const char *key) {
    bool value = false;
    if (!json_boolean(hybridi_key(r, key), &value)) hybridi_expected(r, key, "true or false");
    return value;
}

static bool hybridi_bool_or(hybridi_reader *r, const char *key, bool otherwise) {
    return hybridi_absent(r, key) ? otherwise : hybridi_bool(r, key);
}

/* For a key that can have one value only, or not be there. */
static void hybridi_only_text(hybridi_reader *r, const char *key, const char *text) {
    char expected[80];
    snprintf(expected, sizeof expected, "\"%s\"", text);
    if (!hybridi_absent(r, key) && !json_string_is(hybridi_key(r, key), text))
        hybridi_expected(r, key, expected);
}

/* The reader of an object inside this one. */
static hybridi_reader hybridi_inner(hybridi_reader *r, const char *key) {
    if (json_kind_of(hybridi_key(r, key)) != JSON_OBJECT) hybridi_expected(r, key, "an object");
    hybridi_reader inner = *r;
    inner.object = hybridi_key(r, key);
    snprintf(inner.path, sizeof inner.path, "%.40s%.38s.", r->path, key);
    return inner;
}

/* A contradiction between keys. */
#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
static void
hybridi_refuse(hybridi_reader *r, const char *format, ...) {
    char what[200];
    va_list arguments;
    if (r->failed) return;
    va_start(arguments, format);
    vsnprintf(what, sizeof what, format, arguments);
    va_end(arguments);
    r->failed = true;
    error_set(r->e, "%s: key %s%s", r->file, r->path, what);
}

/* ---- Configuration: the groups of keys ---- */

/* Marks the layers of one list, counted from 1; no layer may be marked twice. */
static void hybridi_mark_layers(hybridi_reader *r, const char *key, hybrid_config *c, bool kda,
                                bool *marked) {
    char found[JSON_SHOWN];
    const json_value *list = hybridi_key(r, key);
    if (json_kind_of(list) != JSON_ARRAY) hybridi_expected(r, key, "an array of layer numbers");
    for (size_t i = 0; i < json_count(list) && !r->failed; i++) {
        const json_value *item = json_item(list, i);
        uint64_t layer = 0;
        if (!json_unsigned(item, &layer) || layer < 1 || layer > c->n_layers)
            hybridi_refuse(r, "%s: expected layers from 1 to %zu, found %s", key, c->n_layers,
                           json_show(item, found));
        else if (marked[layer - 1])
            hybridi_refuse(r, "%s: layer %zu is listed twice, here or in the other list", key,
                           (size_t)layer);
        else
            marked[layer - 1] = true, c->is_kda[layer - 1] = kda;
    }
}

/* The two lists must share out the layers. */
static void hybridi_read_layer_lists(hybridi_reader *r, hybrid_config *c) {
    bool marked[HYBRID_MAX_LAYERS] = {false};
    hybridi_mark_layers(r, "kda_layers", c, true, marked);
    hybridi_mark_layers(r, "full_attn_layers", c, false, marked);
    for (size_t i = 0; i < c->n_layers; i++)
        if (!marked[i])
            hybridi_refuse(r, "kda_layers: layer %zu is neither here nor in full_attn_layers",
                           i + 1);
}

static void hybridi_read_kda(hybridi_reader *outer, hybrid_config *c) {
    hybridi_reader r = hybridi_inner(outer, "linear_attn_config");
    hybridi_read_layer_lists(&r, c);
    c->kda_heads = hybridi_size(&r, "num_heads", 1, HYBRID_MAX_DIM);
    c->kda_head_dim = hybridi_size(&r, "head_dim", 1, HYBRID_MAX_DIM / c->kda_heads);
    c->conv_width = hybridi_size(&r, "short_conv_kernel_size", 1, KDA_CONV_MAX_WIDTH);
    c->use_full_rank_gate = hybridi_bool_or(&r, "use_full_rank_gate", false);
    c->gate_lower_bound = hybridi_float_or(&r, "gate_lower_bound", 0, -1000, -1e-6);
    outer->failed = r.failed;
}

static void hybridi_read_mla(hybridi_reader *r, hybrid_config *c) {
    size_t most = HYBRID_MAX_DIM / c->n_heads; /* channels of a head */
    size_t kv_heads = hybridi_size_or(r, "num_key_value_heads", c->n_heads, 1, HYBRID_MAX_DIM);
    if (kv_heads != c->n_heads)
        hybridi_refuse(r, "num_key_value_heads: expected num_attention_heads, %zu, found %zu",
                       c->n_heads, kv_heads);
    c->q_lora_rank = hybridi_size_or_null(r, "q_lora_rank", 1, HYBRID_MAX_DIM);
    c->kv_lora_rank = hybridi_size(r, "kv_lora_rank", 1, HYBRID_MAX_DIM / 2);
    c->qk_nope_head_dim = hybridi_size(r, "qk_nope_head_dim", 1, most / 2);
    c->qk_rope_head_dim = hybridi_size(r, "qk_rope_head_dim", 0, most / 2);
    c->v_head_dim = hybridi_size(r, "v_head_dim", 1, most / 2);
    c->mla_use_output_gate = hybridi_bool_or(r, "mla_use_output_gate", false);
    if (!hybridi_bool(r, "mla_use_nope"))
        hybridi_refuse(r, "mla_use_nope: expected true (rotary positions are not supported), "
                          "found false");
}

static void hybridi_read_groups(hybridi_reader *r, hybrid_config *c) {
    c->num_expert_group = hybridi_size_or(r, "num_expert_group", 1, 1, c->num_experts);
    c->topk_group = hybridi_size_or(r, "topk_group", 1, 1, c->num_expert_group);
    if (c->num_expert_group == 1) return;
    size_t members = c->num_experts / c->num_expert_group;
    if (!hybridi_bool_or(r, "use_grouped_topk", true))
        hybridi_refuse(r, "use_grouped_topk: expected true with %zu groups, found false",
                       c->num_expert_group);
    if (c->num_experts % c->num_expert_group != 0 || members < 2)
        hybridi_refuse(r, "num_expert_group: %zu experts do not make %zu groups of two or more",
                       c->num_experts, c->num_expert_group);
    if (c->topk_group * members < c->experts_per_token)
        hybridi_refuse(r,
                       "topk_group: %zu groups of %zu experts have fewer than the %zu of "
                       "num_experts_per_token",
                       c->topk_group, members, c->experts_per_token);
}

static void hybridi_read_moe(hybridi_reader *r, hybrid_config *c) {
    c->num_experts = hybridi_size_or_null(r, "num_experts", 0, HYBRID_MAX_DIM);
    if (c->num_experts == 0) return;
    c->experts_per_token = hybridi_size(r, "num_experts_per_token", 1, c->num_experts);
    c->moe_intermediate_size = hybridi_size(r, "moe_intermediate_size", 1, HYBRID_MAX_DIM);
    c->num_shared_experts =
        hybridi_size_or(r, "num_shared_experts", 0, 0, HYBRID_MAX_DIM / c->moe_intermediate_size);
    c->routed_hidden_size = hybridi_size_or(r, "routed_expert_hidden_size", 0, 1, HYBRID_MAX_DIM);
    c->latent_moe_use_norm = hybridi_bool_or(r, "latent_moe_use_norm", false);
    c->first_k_dense_replace = hybridi_size_or(r, "first_k_dense_replace", 0, 0, HYBRID_MAX_LAYERS);
    c->moe_layer_freq = hybridi_size(r, "moe_layer_freq", 1, HYBRID_MAX_LAYERS);
    c->moe_renormalize = hybridi_bool_or(r, "moe_renormalize", true);
    c->routed_scaling_factor = hybridi_float_or(r, "routed_scaling_factor", 1, 1e-6, 1e6);
    hybridi_only_text(r, "moe_router_activation_func", "sigmoid");
    hybridi_only_text(r, "topk_method", "noaux_tc");
    hybridi_read_groups(r, c);
}

static void hybridi_read_activation(hybridi_reader *r, hybrid_config *c) {
    if (json_string_is(hybridi_key(r, "hidden_act"), "silu")) {
        c->activation = HYBRID_SILU;
    } else if (json_string_is(hybridi_key(r, "hidden_act"), "situ")) {
        c->activation = HYBRID_SITU;
        c->situ_beta = hybridi_float(r, "activation_situ_beta", 1e-6, 1e6);
        c->situ_linear_beta = hybridi_float_or(r, "activation_situ_linear_beta", 0, 1e-6, 1e6);
    } else {
        hybridi_expected(r, "hidden_act", "\"silu\" or \"situ\"");
    }
}

static void hybridi_read_quantization(hybridi_reader *outer) {
    if (hybridi_absent(outer, "quantization_config")) return;
    hybridi_reader r = hybridi_inner(outer, "quantization_config");
    if (!json_string_is(hybridi_key(&r, "quant_method"), "compressed-tensors"))
        hybridi_expected(&r, "quant_method", "\"compressed-tensors\"");
    if (!json_string_is(hybridi_key(&r, "format"), "mxfp4-pack-quantized"))
        hybridi_expected(&r, "format", "\"mxfp4-pack-quantized\"");
    outer->failed = r.failed;
}

static void hybridi_read_config(hybridi_reader *r, hybrid_config *c) {
    c->vocab_size = hybridi_size(r, "vocab_size", 1, HYBRID_MAX_DIM);
    c->hidden_size = hybridi_size(r, "hidden_size", 1, HYBRID_MAX_DIM);
    c->intermediate_size = hybridi_size(r, "intermediate_size", 1, HYBRID_MAX_DIM);
    c->n_layers = hybridi_size(r, "num_hidden_layers", 1, HYBRID_MAX_LAYERS);
    c->n_heads = hybridi_size(r, "num_attention_heads", 1, HYBRID_MAX_DIM / 2);
    c->rms_norm_eps = hybridi_float_or(r, "rms_norm_eps", 1e-6f, 1e-30, 1);
    c->inner_norm_eps = 1e-6f;
    c->tie_word_embeddings = hybridi_bool(r, "tie_word_embeddings");
    c->attn_res_block_size = hybridi_size_or(r, "attn_res_block_size", 0, 1, HYBRID_MAX_DIM);
    if (hybridi_size_or(r, "num_nextn_predict_layers", 0, 0, HYBRID_MAX_DIM) != 0)
        hybridi_expected(r, "num_nextn_predict_layers", "0");
    hybridi_read_activation(r, c);
    hybridi_read_mla(r, c);
    hybridi_read_kda(r, c);
    hybridi_read_moe(r, c);
    hybridi_read_quantization(r);
}

HYBRID_API bool hybrid_config_parse(hybrid_config *config, const char *file, const char *text,
                                    size_t length, error *e) {
    json document;
    memset(config, 0, sizeof *config);
    if (!json_parse(&document, file, text, length, e)) return false;
    hybridi_reader r = {json_root(&document), file, false, e, ""};
    if (json_kind_of(r.object) != JSON_OBJECT) {
        r.failed = true;
        error_set(e, "%s: expected an object, found %s", file, json_kind_name(r.object));
    } else if (json_kind_of(hybridi_key(&r, "text_config")) != JSON_NOTHING) {
        hybridi_read_quantization(&r); /* some releases state it outside */
        r = hybridi_inner(&r, "text_config");
    }
    if (!r.failed) hybridi_read_config(&r, config);
    json_free(&document);
    return !r.failed;
}

HYBRID_API bool hybrid_is_moe(const hybrid_config *config, size_t i) {
    return config->num_experts > 0 && i >= config->first_k_dense_replace &&
           i % config->moe_layer_freq == 0;
}

/* ---- Model: from names to weights ---- */

/* Finds tensors and checks them. Runs over the model twice: first with the pools null, to check
 * everything and to count what the pools must hold, then to fill them. The first failure stays. */
typedef struct hybridi_binder {
    const hybrid_config *config;
    const st_checkpoint *checkpoint;
    const char *directory;
    const char *prefix; /* of every name: "" or "language_model." */
    char stem[64];      /* goes before the name of a tensor: prefix, "model.", the layer */
    float *vectors;     /* pool; null while counting */
    size_t n_vectors;
    hybrid_glu *experts; /* pool */
    size_t n_experts;
    float *fold; /* [2][hidden], of no use after a fold */
    bool failed;
    error *e;
} hybridi_binder;

#define HYBRIDI_NAME 192

static const st_tensor *hybridi_lookup(const hybridi_binder *b, const char *path,
                                       const char *suffix, char *name) {
    snprintf(name, HYBRIDI_NAME, "%s%s%s", b->stem, path, suffix);
    return st_find(b->checkpoint, name);
}

/* The tensor of that name: a failure if there is none. */
static const st_tensor *hybridi_require(hybridi_binder *b, const char *path, const char *suffix) {
    char name[HYBRIDI_NAME];
    if (b->failed) return NULL;
    const st_tensor *tensor = hybridi_lookup(b, path, suffix, name);
    if (tensor) return tensor;
    b->failed = true;
    error_set(b->e, "%s: tensor %s: expected by the configuration, not in the checkpoint",
              b->directory, name);
    return NULL;
}

static void hybridi_wrong(hybridi_binder *b, const st_tensor *tensor, const char *expected,
                          const char *found) {
    b->failed = true;
    error_set(b->e, "%s: tensor %s: expected %s, found %s", tensor->file, tensor->name, expected,
              found);
}

static bool hybridi_has_shape(const st_tensor *tensor, const size_t *dims, size_t n_dims) {
    return tensor->n_dims == n_dims && memcmp(tensor->dims, dims, n_dims * sizeof *dims) == 0;
}

static bool hybridi_check_shape(hybridi_binder *b, const st_tensor *tensor, const size_t *dims,
                                size_t n_dims) {
    char expected[ST_SHAPE_TEXT], found[ST_SHAPE_TEXT];
    if (hybridi_has_shape(tensor, dims, n_dims)) return true;
    hybridi_wrong(b, tensor, st_shape(dims, n_dims, expected),
                  st_shape(tensor->dims, tensor->n_dims, found));
    return false;
}

static bool hybridi_check_matrix(hybridi_binder *b, const st_tensor *tensor, size_t rows,
                                 size_t cols) {
    size_t dims[2];
    dims[0] = rows, dims[1] = cols;
    return hybridi_check_shape(b, tensor, dims, 2);
}

/* The type of a tensor of plain numbers; a failure for others. */
static linear_type hybridi_check_type(hybridi_binder *b, const st_tensor *tensor) {
    if (tensor->dtype == ST_F32) return LINEAR_F32;
    if (tensor->dtype == ST_F16) return LINEAR_F16;
    if (tensor->dtype == ST_BF16) return LINEAR_BF16;
    hybridi_wrong(b, tensor, "F32, F16 or BF16", st_dtype_name(tensor->dtype));
    return LINEAR_F32;
}

static bool hybridi_check_u8(hybridi_binder *b, const st_tensor *tensor) {
    if (tensor->dtype == ST_U8) return true;
    hybridi_wrong(b, tensor, "U8", st_dtype_name(tensor->dtype));
    return false;
}

static void hybridi_bind_mxfp4(hybridi_binder *b, const char *path, linear *w) {
    const st_tensor *packed = hybridi_require(b, path, ".weight_packed");
    const st_tensor *scale = hybridi_require(b, path, ".weight_scale");
    if (b->failed) return;
    if (w->cols % LINEAR_MXFP4_GROUP != 0) {
        char found[32];
        snprintf(found, sizeof found, "rows of %zu", w->cols);
        hybridi_wrong(b, packed, "rows of whole groups of 32 by the configuration", found);
        return;
    }
    if (!hybridi_check_u8(b, packed) || !hybridi_check_u8(b, scale) ||
        !hybridi_check_matrix(b, packed, w->rows, w->cols / 2) ||
        !hybridi_check_matrix(b, scale, w->rows, w->cols / LINEAR_MXFP4_GROUP))
        return;
    w->type = LINEAR_MXFP4;
    w->data = packed->data;
    w->scale = scale->data;
}

/* A matrix, "<path>.weight" or packed: which one is decided by what there is. */
static void hybridi_bind_linear(hybridi_binder *b, const char *path, size_t rows, size_t cols,
                                linear *w) {
    char name[HYBRIDI_NAME];
    if (b->failed) return;
    memset(w, 0, sizeof *w);
    w->rows = rows;
    w->cols = cols;
    if (hybridi_lookup(b, path, ".weight_packed", name)) {
        hybridi_bind_mxfp4(b, path, w);
        return;
    }
    const st_tensor *tensor = hybridi_require(b, path, ".weight");
    if (!tensor || !hybridi_check_matrix(b, tensor, rows, cols)) return;
    w->type = hybridi_check_type(b, tensor);
    w->data = tensor->data;
}

/* The first n numbers of a tensor, as float32. */
static void hybridi_expand(const st_tensor *tensor, linear_type type, size_t n, float *out) {
    linear row = {type, 1, n, tensor->data, NULL};
    linear_expand(&row, 0, 0, n, out);
}

/* A checked tensor's first n numbers in the pool of vectors; null while counting. */
static const float *hybridi_keep(hybridi_binder *b, const st_tensor *tensor, size_t n) {
    float *kept = b->vectors ? b->vectors + b->n_vectors : NULL;
    linear_type type = hybridi_check_type(b, tensor);
    if (b->failed) return NULL;
    if (kept) hybridi_expand(tensor, type, n, kept);
    b->n_vectors += n;
    return kept;
}

static const float *hybridi_bind_vector(hybridi_binder *b, const char *path, size_t n) {
    const st_tensor *tensor = hybridi_require(b, path, "");
    if (!tensor || !hybridi_check_shape(b, tensor, &n, 1)) return NULL;
    return hybridi_keep(b, tensor, n);
}

/* [channels][1][width], or the same without the 1. */
static const float *hybridi_bind_conv(hybridi_binder *b, const char *path, size_t channels) {
    size_t dims[3], flat[2];
    const st_tensor *tensor = hybridi_require(b, path, ".weight");
    dims[0] = flat[0] = channels;
    dims[1] = 1;
    dims[2] = flat[1] = b->config->conv_width;
    if (!tensor) return NULL;
    if (!hybridi_has_shape(tensor, flat, 2) && !hybridi_check_shape(b, tensor, dims, 3))
        return NULL;
    return hybridi_keep(b, tensor, channels * b->config->conv_width);
}

/* A_log has any shape and may be longer than the number of heads: K3 pads it with zeros. */
static const float *hybridi_bind_A_log(hybridi_binder *b, const char *path) {
    char expected[64], found[ST_SHAPE_TEXT];
    const st_tensor *tensor = hybridi_require(b, path, "");
    if (!tensor) return NULL;
    if (tensor->elements < b->config->kda_heads) {
        snprintf(expected, sizeof expected, "%zu numbers or more", b->config->kda_heads);
        hybridi_wrong(b, tensor, expected, st_shape(tensor->dims, tensor->n_dims, found));
        return NULL;
    }
    return hybridi_keep(b, tensor, b->config->kda_heads);
}

/* A pseudo-query of Attention Residuals, "<path>_norm" and "<path>_proj" folded into one. */
static const float *hybridi_bind_query(hybridi_binder *b, const char *path) {
    size_t hidden = b->config->hidden_size;
    float *folded = b->vectors ? b->vectors + b->n_vectors : NULL;
    const st_tensor *norm = hybridi_require(b, path, "_norm.weight");
    const st_tensor *query = hybridi_require(b, path, "_proj.weight");
    if (b->failed || !hybridi_check_shape(b, norm, &hidden, 1) ||
        !hybridi_check_matrix(b, query, 1, hidden))
        return NULL;
    linear_type norm_type = hybridi_check_type(b, norm), query_type = hybridi_check_type(b, query);
    b->n_vectors += hidden;
    if (b->failed || !folded) return NULL;
    hybridi_expand(norm, norm_type, hidden, b->fold);
    hybridi_expand(query, query_type, hidden, b->fold + hidden);
    attnres_fold_query(hidden, b->fold, b->fold + hidden, folded);
    return folded;
}

/* ---- Model: the parts of a layer ---- */

static void hybridi_bind_kda(hybridi_binder *b, hybrid_kda *kda) {
    const hybrid_config *c = b->config;
    size_t hidden = c->hidden_size, low = c->kda_head_dim, channels = c->kda_heads * low;
    hybridi_bind_linear(b, "self_attn.q_proj", channels, hidden, &kda->q);
    hybridi_bind_linear(b, "self_attn.k_proj", channels, hidden, &kda->k);
    hybridi_bind_linear(b, "self_attn.v_proj", channels, hidden, &kda->v);
    kda->q_conv = hybridi_bind_conv(b, "self_attn.q_conv1d", channels);
    kda->k_conv = hybridi_bind_conv(b, "self_attn.k_conv1d", channels);
    kda->v_conv = hybridi_bind_conv(b, "self_attn.v_conv1d", channels);
    hybridi_bind_linear(b, "self_attn.f_a_proj", low, hidden, &kda->f_a);
    hybridi_bind_linear(b, "self_attn.f_b_proj", channels, low, &kda->f_b);
    hybridi_bind_linear(b, "self_attn.b_proj", c->kda_heads, hidden, &kda->b);
    if (c->use_full_rank_gate) {
        hybridi_bind_linear(b, "self_attn.g_proj", channels, hidden, &kda->g);
    } else {
        hybridi_bind_linear(b, "self_attn.g_a_proj", low, hidden, &kda->g_a);
        hybridi_bind_linear(b, "self_attn.g_b_proj", channels, low, &kda->g_b);
    }
    hybridi_bind_linear(b, "self_attn.o_proj", hidden, channels, &kda->o);
    kda->A_log = hybridi_bind_A_log(b, "self_attn.A_log");
    kda->dt_bias = hybridi_bind_vector(b, "self_attn.dt_bias", channels);
    kda->o_norm = hybridi_bind_vector(b, "self_attn.o_norm.weight", low);
}

static void hybridi_bind_mla(hybridi_binder *b, mla_weights *mla) {
    const hybrid_config *c = b->config;
    size_t hidden = c->hidden_size, low = c->q_lora_rank, values = c->n_heads * c->v_head_dim;
    size_t queries = c->n_heads * (c->qk_nope_head_dim + c->qk_rope_head_dim);
    if (low > 0) {
        hybridi_bind_linear(b, "self_attn.q_a_proj", low, hidden, &mla->q_a);
        mla->q_a_norm = hybridi_bind_vector(b, "self_attn.q_a_layernorm.weight", low);
        hybridi_bind_linear(b, "self_attn.q_b_proj", queries, low, &mla->q);
    } else {
        hybridi_bind_linear(b, "self_attn.q_proj", queries, hidden, &mla->q);
    }
    hybridi_bind_linear(b, "self_attn.kv_a_proj_with_mqa", c->kv_lora_rank + c->qk_rope_head_dim,
                        hidden, &mla->kv_a);
    mla->kv_a_norm = hybridi_bind_vector(b, "self_attn.kv_a_layernorm.weight", c->kv_lora_rank);
    hybridi_bind_linear(b, "self_attn.kv_b_proj",
                        c->n_heads * (c->qk_nope_head_dim + c->v_head_dim), c->kv_lora_rank,
                        &mla->kv_b);
    if (c->mla_use_output_gate) hybridi_bind_linear(b, "self_attn.g_proj", values, hidden, &mla->g);
    hybridi_bind_linear(b, "self_attn.o_proj", hidden, values, &mla->o);
}

/* A gated unit whose three matrices are "<path>.<names[i]>": gate, up, down. */
static void hybridi_bind_glu(hybridi_binder *b, const char *path, const char *const *names,
                             size_t inputs, size_t width, hybrid_glu *glu) {
    char name[96];
    snprintf(name, sizeof name, "%s.%s", path, names[0]);
    hybridi_bind_linear(b, name, width, inputs, &glu->gate);
    snprintf(name, sizeof name, "%s.%s", path, names[1]);
    hybridi_bind_linear(b, name, width, inputs, &glu->up);
    snprintf(name, sizeof name, "%s.%s", path, names[2]);
    hybridi_bind_linear(b, name, inputs, width, &glu->down);
}

static const char *const hybridi_glu_names[3] = {"gate_proj", "up_proj", "down_proj"};
static const char *const hybridi_expert_names[3] = {"w1", "w3", "w2"};

static const hybrid_glu *hybridi_bind_experts(hybridi_binder *b, size_t inputs) {
    const hybrid_config *c = b->config;
    hybrid_glu *experts = b->experts ? b->experts + b->n_experts : NULL;
    hybrid_glu unused; /* takes what is bound while counting */
    for (size_t i = 0; i < c->num_experts && !b->failed; i++) {
        char path[64];
        snprintf(path, sizeof path, "block_sparse_moe.experts.%zu", i);
        hybridi_bind_glu(b, path, hybridi_expert_names, inputs, c->moe_intermediate_size,
                         experts ? &experts[i] : &unused);
    }
    b->n_experts += c->num_experts;
    return experts;
}

static void hybridi_bind_moe(hybridi_binder *b, hybrid_moe *moe) {
    const hybrid_config *c = b->config;
    size_t hidden = c->hidden_size, latent = c->routed_hidden_size;
    hybridi_bind_linear(b, "block_sparse_moe.gate", c->num_experts, hidden, &moe->router);
    moe->bias =
        hybridi_bind_vector(b, "block_sparse_moe.gate.e_score_correction_bias", c->num_experts);
    moe->experts = hybridi_bind_experts(b, latent ? latent : hidden);
    if (latent > 0) {
        hybridi_bind_linear(b, "block_sparse_moe.routed_expert_down_proj", latent, hidden,
                            &moe->latent_down);
        hybridi_bind_linear(b, "block_sparse_moe.routed_expert_up_proj", hidden, latent,
                            &moe->latent_up);
        if (c->latent_moe_use_norm)
            moe->latent_norm =
                hybridi_bind_vector(b, "block_sparse_moe.routed_expert_norm.weight", latent);
    }
    if (c->num_shared_experts > 0)
        hybridi_bind_glu(b, "block_sparse_moe.shared_experts", hybridi_glu_names, hidden,
                         c->num_shared_experts * c->moe_intermediate_size, &moe->shared);
}

static void hybridi_bind_layer(hybridi_binder *b, size_t i, hybrid_layer *layer) {
    const hybrid_config *c = b->config;
    snprintf(b->stem, sizeof b->stem, "%smodel.layers.%zu.", b->prefix, i);
    layer->attention_norm = hybridi_bind_vector(b, "input_layernorm.weight", c->hidden_size);
    layer->ffn_norm = hybridi_bind_vector(b, "post_attention_layernorm.weight", c->hidden_size);
    if (c->attn_res_block_size > 0) {
        layer->attention_query = hybridi_bind_query(b, "self_attention_res");
        layer->ffn_query = hybridi_bind_query(b, "mlp_res");
    }
    if (c->is_kda[i])
        hybridi_bind_kda(b, &layer->kda);
    else
        hybridi_bind_mla(b, &layer->mla);
    if (hybrid_is_moe(c, i))
        hybridi_bind_moe(b, &layer->moe);
    else
        hybridi_bind_glu(b, "mlp", hybridi_glu_names, c->hidden_size, c->intermediate_size,
                         &layer->dense);
}

static bool hybridi_bind_model(hybridi_binder *b, hybrid_model *m) {
    const hybrid_config *c = b->config;
    char name[HYBRIDI_NAME];
    b->n_vectors = b->n_experts = 0;
    snprintf(b->stem, sizeof b->stem, "%smodel.", b->prefix);
    hybridi_bind_linear(b, "embed_tokens", c->vocab_size, c->hidden_size, &m->embed);
    m->norm = hybridi_bind_vector(b, "norm.weight", c->hidden_size);
    if (c->attn_res_block_size > 0) m->output_query = hybridi_bind_query(b, "output_attn_res");
    for (size_t i = 0; i < c->n_layers && !b->failed; i++)
        hybridi_bind_layer(b, i, &m->layers[i]);
    snprintf(b->stem, sizeof b->stem, "%s", b->prefix);
    if (c->tie_word_embeddings && !hybridi_lookup(b, "lm_head", ".weight", name))
        m->head = m->embed;
    else
        hybridi_bind_linear(b, "lm_head", c->vocab_size, c->hidden_size, &m->head);
    return !b->failed;
}

/* ---- Model: opening ---- */

static bool hybridi_read_config_file(hybrid_config *config, const char *directory, error *e) {
    char path[4096], *text;
    size_t length;
    int n = snprintf(path, sizeof path, "%s/config.json", directory);
    if (n < 0 || (size_t)n >= sizeof path)
        return error_set(e, "%.60s...: expected a path of less than %zu bytes", directory,
                         sizeof path);
    if (!json_read_file(path, (size_t)1 << 24, &text, &length, e)) return false;
    bool ok = hybrid_config_parse(config, path, text, length, e);
    free(text);
    return ok;
}

/* Binds twice: to count, then into memory of the right size. */
static bool hybridi_bind_all(hybrid_model *m, hybridi_binder *b) {
    size_t hidden = m->config.hidden_size;
    b->fold = (float *)malloc(2 * hidden * sizeof(float));
    m->layers = (hybrid_layer *)calloc(m->config.n_layers, sizeof *m->layers);
    if (!b->fold || !m->layers) return error_set(b->e, "%s: out of memory", b->directory);
    if (!hybridi_bind_model(b, m)) return false;
    m->vectors = b->vectors = (float *)calloc(b->n_vectors, sizeof(float));
    m->experts = b->experts = (hybrid_glu *)calloc(b->n_experts + 1, sizeof *m->experts);
    if (!m->vectors || !m->experts) return error_set(b->e, "%s: out of memory", b->directory);
    return hybridi_bind_model(b, m);
}

HYBRID_API bool hybrid_open(hybrid_model *model, const char *directory, error *e) {
    memset(model, 0, sizeof *model);
    if (!hybridi_read_config_file(&model->config, directory, e) ||
        !st_open(&model->checkpoint, directory, e))
        return false;
    hybridi_binder b;
    memset(&b, 0, sizeof b);
    b.config = &model->config;
    b.checkpoint = &model->checkpoint;
    b.directory = directory;
    b.e = e;
    /* Which spelling is told by the embedding, which every model has. */
    b.prefix = st_find(&model->checkpoint, "language_model.model.embed_tokens.weight")
                   ? "language_model."
                   : "";
    bool ok = hybridi_bind_all(model, &b);
    free(b.fold);
    if (!ok) hybrid_close(model);
    return ok;
}

HYBRID_API void hybrid_close(hybrid_model *model) {
    free(model->layers);
    free(model->experts);
    free(model->vectors);
    st_close(&model->checkpoint);
    memset(model, 0, sizeof *model);
}

/* ---- Session: descriptions for the libraries ---- */

/* The shape of every KDA layer; a layer's own weights are put in where it runs. */
static kda_layer_desc hybridi_kda_desc(const hybrid_config *c) {
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
    return desc;
}

static mla_desc hybridi_mla_desc(const hybrid_config *c) {
    mla_desc desc;
    desc.n_heads = c->n_heads;
    desc.dim_nope = c->qk_nope_head_dim;
    desc.dim_rope = c->qk_rope_head_dim;
    desc.dim_v = c->v_head_dim;
    desc.latent = c->kv_lora_rank;
    desc.q_latent = c->q_lora_rank;
    desc.norm_eps = c->inner_norm_eps;
    desc.cache = LINEAR_F32;
    return desc;
}

static attnres_bank_desc hybridi_bank_desc(const hybrid_config *c, size_t block) {
    attnres_bank_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.dim = c->hidden_size;
    desc.n_tokens = block;
    desc.n_layers = c->n_layers;
    desc.block_size = c->attn_res_block_size;
    desc.unit = ATTNRES_LAYERS;
    desc.eps = c->rms_norm_eps;
    return desc;
}

/* ---- Session: memory ---- */

/* Hands out parts of one allocation, or without one counts what they need. */
typedef struct hybridi_arena {
    unsigned char *base; /* null: count only */
    size_t used;
    bool overflow;
} hybridi_arena;

static void *hybridi_take(hybridi_arena *arena, size_t bytes) {
    void *part = arena->base ? arena->base + arena->used : NULL;
    size_t room = PTRDIFF_MAX - arena->used;
    if (bytes > room || room - bytes < 64) {
        arena->overflow = true;
        return NULL;
    }
    arena->used += (bytes + 63) / 64 * 64;
    return part;
}

/* An array [a][b][c] of elements of four bytes. */
static void *hybridi_words(hybridi_arena *arena, size_t a, size_t b, size_t c) {
    size_t most = PTRDIFF_MAX / 4;
    if (a == 0 || b == 0 || c == 0) return hybridi_take(arena, 0);
    if (a > most / b || a * b > most / c) {
        arena->overflow = true;
        return NULL;
    }
    return hybridi_take(arena, a * b * c * 4);
}

static float *hybridi_floats(hybridi_arena *arena, size_t a, size_t b, size_t c) {
    return (float *)hybridi_words(arena, a, b, c);
}

/* What a size function of a library says, where 0 means that there is no such size. */
static void *hybridi_take_sized(hybridi_arena *arena, size_t bytes) {
    if (bytes == 0) arena->overflow = true;
    return hybridi_take(arena, bytes);
}

static hybrid_memory hybridi_place_layer(const hybrid_config *c, bool is_kda, size_t capacity,
                                         hybridi_arena *arena) {
    hybrid_memory memory;
    memset(&memory, 0, sizeof memory);
    if (is_kda) {
        kda_layer_desc desc = hybridi_kda_desc(c);
        memory.state = hybridi_take_sized(arena, kda_state_bytes(&desc.op));
        memory.window = hybridi_take(arena, kda_layer_window_bytes(&desc)); /* 0 bytes: width 1 */
    } else {
        mla_desc desc = hybridi_mla_desc(c);
        memory.latents = hybridi_floats(arena, capacity, mla_cache_width(&desc), 1);
    }
    return memory;
}

static void hybridi_place_kda(hybrid_scratch *scratch, const hybrid_config *c, size_t block,
                              hybridi_arena *arena) {
    kda_layer_desc desc = hybridi_kda_desc(c);
    size_t bytes = kda_layer_scratch_bytes(&desc, 1, NULL);
    scratch->kda.q = hybridi_floats(arena, block, c->kda_heads, c->kda_head_dim);
    scratch->kda.k = hybridi_floats(arena, block, c->kda_heads, c->kda_head_dim);
    scratch->kda.v = hybridi_floats(arena, block, c->kda_heads, c->kda_head_dim);
    scratch->kda.decay = hybridi_floats(arena, block, c->kda_heads, c->kda_head_dim);
    scratch->kda.gate = hybridi_floats(arena, block, c->kda_heads, c->kda_head_dim);
    scratch->kda.low = hybridi_floats(arena, block, c->kda_head_dim, 1);
    scratch->kda.beta = hybridi_floats(arena, block, c->kda_heads, 1);
    scratch->kda.run.scratch = hybridi_take_sized(arena, bytes);
    scratch->kda.run.scratch_bytes = bytes;
}

static size_t hybridi_routed_width(const hybrid_config *c) {
    return c->routed_hidden_size ? c->routed_hidden_size : c->hidden_size;
}

static void hybridi_place_ffn(hybrid_scratch *scratch, const hybrid_config *c, size_t block,
                              hybridi_arena *arena) {
    size_t experts = c->num_experts, routed = hybridi_routed_width(c), width = c->intermediate_size;
    size_t shared = c->num_shared_experts * c->moe_intermediate_size;
    if (width < shared) width = shared;
    if (width < c->moe_intermediate_size) width = c->moe_intermediate_size;
    scratch->ffn.gate = hybridi_floats(arena, block, width, 1);
    scratch->ffn.up = hybridi_floats(arena, block, width, 1);
    if (experts == 0) return;
    scratch->ffn.scores = hybridi_floats(arena, experts, 1, 1);
    scratch->ffn.selection = hybridi_floats(arena, experts + c->num_expert_group, 1, 1);
    scratch->ffn.chosen = (uint32_t *)hybridi_words(arena, block, c->experts_per_token, 1);
    scratch->ffn.weights = hybridi_floats(arena, block, c->experts_per_token, 1);
    scratch->ffn.latent = hybridi_floats(arena, block, routed, 1);
    scratch->ffn.sum = hybridi_floats(arena, block, routed, 1);
    scratch->ffn.rows = hybridi_floats(arena, block, routed, 1);
    scratch->ffn.expert = hybridi_floats(arena, block, routed, 1);
    scratch->ffn.tokens = (uint32_t *)hybridi_words(arena, block, 1, 1);
    scratch->ffn.shares = hybridi_floats(arena, block, 1, 1);
    scratch->ffn.shared = hybridi_floats(arena, block, c->hidden_size, 1);
}

/* KDA, MLA and feed-forward scratch lie over one another: a sub-layer keeps nothing in it. */
static void hybridi_place_scratch(hybrid_scratch *scratch, const hybrid_config *c, size_t block,
                                  size_t capacity, hybridi_arena *arena) {
    mla_desc desc = hybridi_mla_desc(c);
    scratch->x = hybridi_floats(arena, block, c->hidden_size, 1);
    scratch->in = hybridi_floats(arena, block, c->hidden_size, 1);
    scratch->out = hybridi_floats(arena, block, c->hidden_size, 1);
    hybridi_arena kda = *arena, mla = *arena;
    hybridi_place_kda(scratch, c, block, &kda);
    scratch->mla = hybridi_take_sized(&mla, mla_scratch_bytes(&desc, block, capacity, 1));
    hybridi_place_ffn(scratch, c, block, arena);
    if (arena->used < kda.used) arena->used = kda.used;
    if (arena->used < mla.used) arena->used = mla.used;
    arena->overflow = arena->overflow || kda.overflow || mla.overflow;
}

/* Lays the session out; with a counting arena, finds the size. */
static void hybridi_place(hybrid_session *s, hybridi_arena *arena) {
    const hybrid_config *c = &s->model->config;
    s->layers = (hybrid_memory *)hybridi_take(arena, c->n_layers * sizeof *s->layers);
    for (size_t i = 0; i < c->n_layers; i++) {
        hybrid_memory memory = hybridi_place_layer(c, c->is_kda[i], s->capacity, arena);
        if (s->layers) s->layers[i] = memory;
    }
    if (c->attn_res_block_size > 0) {
        attnres_bank_desc desc = hybridi_bank_desc(c, s->block);
        s->bank_bytes = attnres_bank_bytes(&desc);
        s->bank_memory = hybridi_take_sized(arena, s->bank_bytes);
    }
    hybridi_place_scratch(&s->scratch, c, s->block, s->capacity, arena);
}

HYBRID_API size_t hybrid_session_bytes(const hybrid_model *model, size_t capacity, size_t block) {
    hybrid_session session;
    memset(&session, 0, sizeof session);
    hybridi_arena counting = {NULL, 0, false};
    session.model = model;
    session.capacity = capacity;
    session.block = block ? block : HYBRID_BLOCK;
    hybridi_place(&session, &counting);
    return counting.overflow ? 0 : counting.used;
}

static bool hybridi_kda_ok(kda_result result, const char *call, error *e) {
    return result == KDA_OK || error_set(e, "%s: %s", call, kda_result_text(result));
}

static bool hybridi_attnres_ok(attnres_result result, const char *call, error *e) {
    return result == ATTNRES_OK || error_set(e, "%s: %s", call, attnres_result_text(result));
}

HYBRID_API bool hybrid_session_reset(hybrid_session *session, error *e) {
    const hybrid_config *c = &session->model->config;
    kda_layer_desc desc = hybridi_kda_desc(c);
    for (size_t i = 0; i < c->n_layers; i++) {
        if (!c->is_kda[i]) continue;
        hybrid_memory *memory = &session->layers[i];
        if (!hybridi_kda_ok(kda_state_clear(&desc.op, memory->state), "kda_state_clear", e))
            return false;
        memset(memory->window, 0, kda_layer_window_bytes(&desc));
    }
    session->n_tokens = 0;
    return true;
}

HYBRID_API bool hybrid_session_open(hybrid_session *session, const hybrid_model *model,
                                    size_t capacity, size_t block, error *e) {
    size_t bytes = hybrid_session_bytes(model, capacity, block);
    memset(session, 0, sizeof *session);
    if (bytes == 0)
        return error_set(e, "a session of %zu tokens: more bytes than can be addressed", capacity);
    session->model = model;
    session->capacity = capacity;
    session->block = block ? block : HYBRID_BLOCK;
    session->memory = malloc(bytes);
    if (!session->memory)
        return error_set(e, "a session of %zu tokens: no memory for %zu bytes", capacity, bytes);
    hybridi_arena arena = {(unsigned char *)session->memory, 0, false};
    hybridi_place(session, &arena);
    bool ok = hybrid_session_reset(session, e);
    if (ok && session->bank_memory) {
        attnres_bank_desc desc = hybridi_bank_desc(&model->config, session->block);
        ok = hybridi_attnres_ok(
            attnres_bank_init(&session->bank, &desc, session->bank_memory, session->bank_bytes),
            "attnres_bank_init", e);
    }
    if (!ok) hybrid_session_close(session);
    return ok;
}

HYBRID_API bool hybrid_session_use(hybrid_session *session, kda_isa isa, error *e) {
    /* The two libraries number instruction sets alike. */
    if (!kda_isa_is_available(isa) || !attnres_isa_is_available((attnres_isa)isa))
        return error_set(e, "instruction set %s: not in this machine and build, whose best is %s",
                         kda_isa_name(isa), kda_isa_name(kda_isa_best()));
    session->scratch.kda.run.isa = isa;
    session->run.isa = isa;
    session->depth.isa = (attnres_isa)isa;
    return true;
}

HYBRID_API void hybrid_session_close(hybrid_session *session) {
    free(session->memory);
    memset(session, 0, sizeof *session);
}

HYBRID_API hybrid_sizes hybrid_memory_sizes(const hybrid_model *model, size_t n_tokens) {
    const hybrid_config *c = &model->config;
    hybrid_sizes sizes = {0, 0, 0, 0};
    kda_layer_desc desc = hybridi_kda_desc(c);
    mla_desc mla = hybridi_mla_desc(c);
    double latents = (double)n_tokens * (double)(mla_cache_width(&mla) * sizeof(float));
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

/* ---- Forward: the residual stream ---- */

/* Starts a block of n tokens. */
static bool hybridi_embed(hybrid_session *s, const uint32_t *ids, size_t n, error *e) {
    const hybrid_model *m = s->model;
    size_t hidden = m->config.hidden_size;
    float *x = s->scratch.x;
    for (size_t t = 0; t < n; t++)
        linear_expand(&m->embed, ids[t], 0, hidden, x + t * hidden);
    if (!s->bank_memory) return true;
    attnres_input embedding = attnres_in_f32(x, (ptrdiff_t)hidden);
    return hybridi_attnres_ok(attnres_bank_start(&s->bank, n, embedding, &s->depth),
                              "attnres_bank_start", e);
}

/* The normed input of the next sub-layer, or of the head, into scratch.in. */
static bool hybridi_read(hybrid_session *s, const float *query, const float *norm, size_t n,
                         error *e) {
    const hybrid_config *c = &s->model->config;
    size_t hidden = c->hidden_size;
    if (!s->bank_memory) {
        linear_rms_norm(norm, c->rms_norm_eps, hidden, s->scratch.x, n, hidden, s->scratch.in,
                        hidden);
        return true;
    }
    attnres_norm fused = {norm, c->rms_norm_eps};
    attnres_output in = attnres_out_f32(s->scratch.in, (ptrdiff_t)hidden);
    return hybridi_attnres_ok(attnres_bank_read(&s->bank, query, fused, in, NULL, &s->depth),
                              "attnres_bank_read", e);
}

/* Adds a sub-layer's output, scratch.out. */
static bool hybridi_add(hybrid_session *s, size_t n, error *e) {
    size_t hidden = s->model->config.hidden_size;
    if (s->bank_memory) {
        attnres_input out = attnres_in_f32(s->scratch.out, (ptrdiff_t)hidden);
        return hybridi_attnres_ok(attnres_bank_add(&s->bank, out, &s->depth), "attnres_bank_add", e);
    }
    for (size_t i = 0; i < n * hidden; i++)
        s->scratch.x[i] += s->scratch.out[i];
    return true;
}

/* ---- Forward: KDA ---- */

/* y = W_b (W_a x): a gate of low rank. */
static void hybridi_low_rank(const hybrid_session *s, const linear *a, const linear *b, size_t n,
                             float *y) {
    const hybrid_scratch *scratch = &s->scratch;
    linear_apply(&s->run, a, scratch->in, n, a->cols, scratch->kda.low, a->rows);
    linear_apply(&s->run, b, scratch->kda.low, n, b->cols, y, b->rows);
}

/* All that a KDA layer does between its projections: q, k, v and the gates to v. */
static bool hybridi_kda_layer(hybrid_session *s, const hybrid_kda *w, const hybrid_memory *memory,
                              size_t n, error *e) {
    const hybrid_scratch *scratch = &s->scratch;
    kda_layer_desc desc = hybridi_kda_desc(&s->model->config);
    ptrdiff_t dim = (ptrdiff_t)desc.op.dim_k, heads = (ptrdiff_t)desc.op.n_heads;
    ptrdiff_t row = heads * dim;
    kda_seq seq;
    kda_layer_args args;
    memset(&seq, 0, sizeof seq);
    memset(&args, 0, sizeof args);
    desc.q_conv = w->q_conv, desc.k_conv = w->k_conv, desc.v_conv = w->v_conv;
    desc.A_log = w->A_log, desc.dt_bias = w->dt_bias, desc.norm_weight = w->o_norm;
    seq.n_tokens = n, seq.state = memory->state, seq.window = memory->window;
    args.q = kda_in_f32(scratch->kda.q, row, dim);
    args.k = kda_in_f32(scratch->kda.k, row, dim);
    args.v = kda_in_f32(scratch->kda.v, row, dim);
    args.g = kda_in_f32(scratch->kda.decay, row, dim);
    args.beta = kda_in_f32(scratch->kda.beta, heads, 1);
    args.gate = kda_in_f32(scratch->kda.gate, row, dim);
    args.o = kda_out_f32(scratch->kda.v, row, dim);
    args.seqs = &seq;
    args.n_seqs = 1;
    return hybridi_kda_ok(kda_layer(&desc, &args, &scratch->kda.run), "kda_layer", e);
}

static bool hybridi_kda_forward(hybrid_session *s, const hybrid_kda *w, const hybrid_memory *memory,
                                size_t n, error *e) {
    const hybrid_scratch *scratch = &s->scratch;
    linear_apply(&s->run, &w->q, scratch->in, n, w->q.cols, scratch->kda.q, w->q.rows);
    linear_apply(&s->run, &w->k, scratch->in, n, w->k.cols, scratch->kda.k, w->k.rows);
    linear_apply(&s->run, &w->v, scratch->in, n, w->v.cols, scratch->kda.v, w->v.rows);
    linear_apply(&s->run, &w->b, scratch->in, n, w->b.cols, scratch->kda.beta, w->b.rows);
    hybridi_low_rank(s, &w->f_a, &w->f_b, n, scratch->kda.decay);
    if (s->model->config.use_full_rank_gate)
        linear_apply(&s->run, &w->g, scratch->in, n, w->g.cols, scratch->kda.gate, w->g.rows);
    else
        hybridi_low_rank(s, &w->g_a, &w->g_b, n, scratch->kda.gate);
    if (!hybridi_kda_layer(s, w, memory, n, e)) return false;
    linear_apply(&s->run, &w->o, scratch->kda.v, n, w->o.cols, scratch->out, w->o.rows);
    return true;
}

/* ---- Forward: feed-forward ---- */

/* gate = activation(gate) * up */
static void hybridi_activate(const hybrid_config *c, size_t n, float *gate, const float *up) {
    float beta = c->situ_beta, linear_beta = c->situ_linear_beta;
    if (c->activation == HYBRID_SILU) {
        for (size_t i = 0; i < n; i++)
            gate[i] *= kda_sigmoid(gate[i]) * up[i];
        return;
    }
    for (size_t i = 0; i < n; i++) {
        float value = beta * tanhf(gate[i] / beta) * kda_sigmoid(gate[i]);
        gate[i] = value * (linear_beta > 0 ? linear_beta * tanhf(up[i] / linear_beta) : up[i]);
    }
}

/* y = W_down (activation(W_gate x) * (W_up x)), rows of x and y as wide as the unit's inputs. */
static void hybridi_glu(const hybrid_session *s, const hybrid_glu *w, const float *x, size_t n,
                        float *y) {
    float *gate = s->scratch.ffn.gate, *up = s->scratch.ffn.up;
    size_t inputs = w->gate.cols, width = w->gate.rows;
    linear_apply(&s->run, &w->gate, x, n, inputs, gate, width);
    linear_apply(&s->run, &w->up, x, n, inputs, up, width);
    hybridi_activate(&s->model->config, n * width, gate, up);
    linear_apply(&s->run, &w->down, gate, n, width, y, inputs);
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
    for (size_t i = 0; i < c->num_experts; i++)
        selection[i] = -HUGE_VALF;
    for (size_t i = 0; i < c->num_expert_group; i++)
        groups[i] =
            c->num_expert_group > 1 ? hybridi_group_score(scores, bias, i * members, members) : 0;
    for (size_t taken = 0; taken < c->topk_group; taken++) {
        size_t first = hybridi_take_best(groups, c->num_expert_group) * members;
        for (size_t i = first; i < first + members; i++)
            selection[i] = scores[i] + bias[i];
    }
}

HYBRID_API void hybrid_route(const hybrid_config *config, const float *scores, const float *bias,
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

/* Chooses the experts of n tokens. */
static void hybridi_route_block(const hybrid_session *s, const hybrid_moe *w, size_t n) {
    const hybrid_config *c = &s->model->config;
    float *scores = s->scratch.ffn.scores;
    for (size_t t = 0; t < n; t++) {
        linear_apply(&s->run, &w->router, s->scratch.in + t * c->hidden_size, 1, c->hidden_size, scores,
                     c->num_experts);
        for (size_t i = 0; i < c->num_experts; i++)
            scores[i] = kda_sigmoid(scores[i]);
        hybrid_route(c, scores, w->bias, s->scratch.ffn.chosen + t * c->experts_per_token,
                     s->scratch.ffn.weights + t * c->experts_per_token, s->scratch.ffn.selection);
    }
}

/* Collects the tokens that chose an expert: their numbers, weights and rows. Returns how many. */
static size_t hybridi_gather(const hybrid_session *s, uint32_t expert, size_t n, const float *x) {
    const hybrid_config *c = &s->model->config;
    size_t per_token = c->experts_per_token, width = hybridi_routed_width(c), count = 0;
    for (size_t t = 0; t < n; t++) {
        const uint32_t *chosen = s->scratch.ffn.chosen + t * per_token;
        size_t i = 0;
        while (i < per_token && chosen[i] != expert)
            i++;
        if (i == per_token) continue;
        s->scratch.ffn.tokens[count] = (uint32_t)t;
        s->scratch.ffn.shares[count] = s->scratch.ffn.weights[t * per_token + i];
        memcpy(s->scratch.ffn.rows + count * width, x + t * width, width * sizeof *x);
        count++;
    }
    return count;
}

/* sum[t] += share * expert's output, for the tokens that were gathered. */
static void hybridi_scatter(const hybrid_session *s, size_t count) {
    size_t width = hybridi_routed_width(&s->model->config);
    for (size_t i = 0; i < count; i++) {
        const float *in = s->scratch.ffn.expert + i * width;
        float *sum = s->scratch.ffn.sum + s->scratch.ffn.tokens[i] * width;
        for (size_t d = 0; d < width; d++)
            sum[d] += s->scratch.ffn.shares[i] * in[d];
    }
}

/* The routed experts over x, [n][routed width], into scratch.ffn.sum. Expert by expert, so that its
 * weights are read once for all tokens that chose it; a token's sum runs in the order of the
 * experts' numbers, whatever else is in the block. */
static void hybridi_experts(const hybrid_session *s, const hybrid_moe *w, const float *x,
                            size_t n) {
    const hybrid_config *c = &s->model->config;
    memset(s->scratch.ffn.sum, 0, n * hybridi_routed_width(c) * sizeof *x);
    for (size_t i = 0; i < c->num_experts; i++) {
        size_t count = hybridi_gather(s, (uint32_t)i, n, x);
        if (count == 0) continue;
        hybridi_glu(s, &w->experts[i], s->scratch.ffn.rows, count, s->scratch.ffn.expert);
        hybridi_scatter(s, count);
    }
}

/* The routed experts' part of the output, over a narrower latent where the model has one. */
static void hybridi_routed(const hybrid_session *s, const hybrid_moe *w, size_t n, float *y) {
    const hybrid_config *c = &s->model->config;
    float *latent = s->scratch.ffn.latent, *sum = s->scratch.ffn.sum;
    size_t hidden = c->hidden_size, width = c->routed_hidden_size;
    if (width == 0) {
        hybridi_experts(s, w, s->scratch.in, n);
        memcpy(y, sum, n * hidden * sizeof *y);
        return;
    }
    linear_apply(&s->run, &w->latent_down, s->scratch.in, n, hidden, latent, width);
    hybridi_experts(s, w, latent, n);
    if (w->latent_norm)
        linear_rms_norm(w->latent_norm, c->rms_norm_eps, width, sum, n, width, sum, width);
    linear_apply(&s->run, &w->latent_up, sum, n, width, y, hidden);
}

static void hybridi_moe_forward(const hybrid_session *s, const hybrid_moe *w, size_t n) {
    hybridi_route_block(s, w, n);
    hybridi_routed(s, w, n, s->scratch.out);
    if (!w->shared.gate.type) return;
    size_t hidden = s->model->config.hidden_size;
    float *shared = s->scratch.ffn.shared;
    hybridi_glu(s, &w->shared, s->scratch.in, n, shared);
    for (size_t i = 0; i < n * hidden; i++)
        s->scratch.out[i] += shared[i];
}

/* ---- Forward: the model ---- */

static bool hybridi_layer_forward(hybrid_session *s, size_t i, size_t n, error *e) {
    const hybrid_config *c = &s->model->config;
    const hybrid_layer *layer = &s->model->layers[i];
    const hybrid_memory *memory = &s->layers[i];

    if (!hybridi_read(s, layer->attention_query, layer->attention_norm, n, e)) return false;
    if (c->is_kda[i]) {
        if (!hybridi_kda_forward(s, &layer->kda, memory, n, e)) return false;
    } else {
        mla_desc desc = hybridi_mla_desc(c);
        mla_seq seq = {memory->latents, s->n_tokens, n};
        mla_forward(&s->run, &desc, &layer->mla, s->scratch.in, &seq, 1, s->scratch.out,
                    s->scratch.mla);
    }
    if (!hybridi_add(s, n, e)) return false;

    if (!hybridi_read(s, layer->ffn_query, layer->ffn_norm, n, e)) return false;
    if (hybrid_is_moe(c, i))
        hybridi_moe_forward(s, &layer->moe, n);
    else
        hybridi_glu(s, &layer->dense, s->scratch.in, n, s->scratch.out);
    return hybridi_add(s, n, e);
}

/* Copies the running sum of a block, whose first token is `first` of the call. */
static void hybridi_dump(const hybrid_session *s, const hybrid_want *want, size_t layer,
                         size_t first, size_t n) {
    size_t hidden = s->model->config.hidden_size;
    const float *sum = s->bank_memory ? s->bank.partial : s->scratch.x;
    if (want->hidden)
        memcpy(want->hidden + layer * want->hidden_stride + first * hidden, sum,
               n * hidden * sizeof *sum);
}

/* Logits of the block's tokens; `last`: the call's last token is in it. */
static bool hybridi_logits(hybrid_session *s, const hybrid_want *want, size_t first, size_t n,
                           bool last, error *e) {
    const hybrid_model *m = s->model;
    size_t vocab = m->config.vocab_size, hidden = m->config.hidden_size;
    if (!want->logits && !(want->last_logits && last)) return true;
    if (!hybridi_read(s, m->output_query, m->norm, n, e)) return false;
    if (want->logits)
        linear_apply(&s->run, &m->head, s->scratch.in, n, hidden, want->logits + first * vocab, vocab);
    if (want->last_logits && last)
        linear_apply(&s->run, &m->head, s->scratch.in + (n - 1) * hidden, 1, hidden, want->last_logits,
                     vocab);
    return true;
}

HYBRID_API bool hybrid_check_tokens(const hybrid_session *session, const uint32_t *ids, size_t n,
                                    error *e) {
    size_t vocab = session->model->config.vocab_size;
    size_t room = session->capacity - session->n_tokens;
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
                         session->capacity, session->n_tokens, room, n);
    return true;
}

HYBRID_API bool hybrid_forward(hybrid_session *session, const uint32_t *ids, size_t n,
                               const hybrid_want *want, error *e) {
    if (!hybrid_check_tokens(session, ids, n, e)) return false;
    for (size_t first = 0, count; first < n; first += count) {
        count = n - first < session->block ? n - first : session->block;
        if (!hybridi_embed(session, ids + first, count, e)) return false;
        hybridi_dump(session, want, 0, first, count);
        for (size_t i = 0; i < session->model->config.n_layers; i++) {
            if (!hybridi_layer_forward(session, i, count, e)) return false;
            hybridi_dump(session, want, i + 1, first, count);
        }
        session->n_tokens += count;
        if (!hybridi_logits(session, want, first, count, first + count == n, e)) return false;
    }
    return true;
}

#endif
