/* config.h - what a model is: its config.json, checked key by key.
 *
 * In one source file of a program (this also brings in the bodies of json.h):
 *
 *     #define HYBRID_CONFIG_IMPLEMENTATION
 *     #include "config.h"
 *
 * What the file asks for and this version lacks is refused by name. How the weights are stored, the
 * key quantization_config, is for quantization.h.
 */
#ifndef HYBRID_CONFIG_H
#define HYBRID_CONFIG_H

#include "../kda.h" /* KDA_CONV_MAX_WIDTH */
#include "error.h"
#include "json.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define HYBRID_MAX_LAYERS 1024
#define HYBRID_MAX_DIM ((size_t)1 << 24) /* of any dimension, derived ones included */

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
bool hybrid_config_parse(hybrid_config *config, const char *file, const char *text, size_t length,
                         error *e);

/* Has layer i (from 0) a mixture of experts? */
bool hybrid_is_moe(const hybrid_config *config, size_t i);

#endif

#if defined(HYBRID_CONFIG_IMPLEMENTATION) && !defined(HYBRIDI_CONFIG_IMPLEMENTED)
#define HYBRIDI_CONFIG_IMPLEMENTED

#if !defined(JSON_IMPLEMENTATION)
#define JSON_IMPLEMENTATION
#endif
#include "json.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- One key at a time ---- */

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

/* ---- The groups of keys ---- */

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
}

bool hybrid_config_parse(hybrid_config *config, const char *file, const char *text, size_t length,
                         error *e) {
    json document;
    memset(config, 0, sizeof *config);
    if (!json_parse(&document, file, text, length, e)) return false;
    hybridi_reader r = {json_root(&document), file, false, e, ""};
    if (json_kind_of(r.object) != JSON_OBJECT) {
        r.failed = true;
        error_set(e, "%s: expected an object, found %s", file, json_kind_name(r.object));
    } else if (json_kind_of(hybridi_key(&r, "text_config")) != JSON_NOTHING) {
        r = hybridi_inner(&r, "text_config");
    }
    if (!r.failed) hybridi_read_config(&r, config);
    json_free(&document);
    return !r.failed;
}

bool hybrid_is_moe(const hybrid_config *config, size_t i) {
    return config->num_experts > 0 && i >= config->first_k_dense_replace &&
           i % config->moe_layer_freq == 0;
}

#endif
