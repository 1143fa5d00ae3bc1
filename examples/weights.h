/* weights.h - a model's tensors, found by name and checked against its configuration.
 *
 * In one source file of a program (this also brings in the bodies of the headers below it):
 *
 *     #define HYBRID_WEIGHTS_IMPLEMENTATION
 *     #include "weights.h"
 *
 * Matrices stay in the mapped file, in their type: F32, F16, BF16, or quantised as the configuration
 * says (quantization.h). A module that it calls quantised may be stored plainly, as K3's router is;
 * the other way round is an error. Vectors become float32 when the model is opened. Every tensor
 * that the configuration calls for must be there in its type and shape; others are ignored. With tied
 * embeddings the head is the embedding, unless one is stored.
 *
 * QUANTISED, in place of "<module>.weight" [rows][cols]:
 *     weight_packed      pack-quantized: I32 [rows][ceil(cols * bits / 32)], element i of a row at bit
 *                        i * bits. mxfp4-pack-quantized: U8 [rows][cols / 2], the low half first
 *     weight             int-quantized: I8 [rows][cols]
 *     weight_scale       F32, F16 or BF16 [rows][groups]; MXFP4: U8, exponents
 *     weight_zero_point  pack-quantized: I32 [ceil(rows * bits / 32)][groups], packed along the rows.
 *                        int-quantized: I8 [rows][groups]
 *     weight_shape       pack-quantized: I64 [2], rows and cols
 * Source: compressed-tensors, as Kimi-K3 and quantised releases of Kimi-Linear use it.
 */
#ifndef HYBRID_WEIGHTS_H
#define HYBRID_WEIGHTS_H

#include "../attnres.h"
#include "config.h"
#include "error.h"
#include "linear.h"
#include "mla.h"
#include "quantization.h"
#include "safetensors.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

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
    size_t n_vectors;          /* how many numbers these are */
    uint64_t mapped_bytes;     /* of all tensors that are used, as the files hold them */
} hybrid_model;

/* On failure the model is empty: closing it is allowed, not needed. */
bool hybrid_open(hybrid_model *model, const char *directory, error *e);
void hybrid_close(hybrid_model *model);

#endif

#if defined(HYBRID_WEIGHTS_IMPLEMENTATION) && !defined(HYBRIDI_WEIGHTS_IMPLEMENTED)
#define HYBRIDI_WEIGHTS_IMPLEMENTED

#if !defined(HYBRID_CONFIG_IMPLEMENTATION)
#define HYBRID_CONFIG_IMPLEMENTATION
#endif
#include "config.h"
#if !defined(ATTNRES_IMPLEMENTATION)
#define ATTNRES_IMPLEMENTATION
#endif
#include "../attnres.h" /* attnres_fold_query */
#if !defined(LINEAR_IMPLEMENTATION)
#define LINEAR_IMPLEMENTATION
#endif
#include "linear.h"
#if !defined(QUANTIZATION_IMPLEMENTATION)
#define QUANTIZATION_IMPLEMENTATION
#endif
#include "quantization.h"
#if !defined(SAFETENSORS_IMPLEMENTATION)
#define SAFETENSORS_IMPLEMENTATION
#endif
#include "safetensors.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- From names to weights ---- */

/* Finds tensors and checks them. Runs over the model twice: first with the pools null, to check
 * everything and to count what the pools must hold, then to fill them. The first failure stays. */
typedef struct hybridi_binder {
    const hybrid_config *config;
    const quantization *quantized;
    const st_checkpoint *checkpoint;
    const char *directory;
    const char *prefix; /* of every name: "" or "language_model." */
    char stem[64];      /* goes before the name of a tensor: prefix, "model.", the layer */
    float *vectors;     /* pool; null while counting */
    size_t n_vectors;
    hybrid_glu *experts; /* pool */
    size_t n_experts;
    uint64_t bytes; /* of the tensors found */
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
    if (tensor) {
        b->bytes += tensor->bytes;
        return tensor;
    }
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

static bool hybridi_check_dtype(hybridi_binder *b, const st_tensor *tensor, st_dtype dtype) {
    if (tensor->dtype == dtype) return true;
    hybridi_wrong(b, tensor, st_dtype_name(dtype), st_dtype_name(tensor->dtype));
    return false;
}

static void hybridi_bind_mxfp4(hybridi_binder *b, const char *path, const st_tensor *packed,
                               linear *w) {
    const st_tensor *scale = hybridi_require(b, path, ".weight_scale");
    if (!scale) return;
    if (w->cols % LINEAR_MXFP4_GROUP != 0) {
        char found[32];
        snprintf(found, sizeof found, "rows of %zu", w->cols);
        hybridi_wrong(b, packed, "rows of whole groups of 32 by the configuration", found);
        return;
    }
    if (!hybridi_check_dtype(b, packed, ST_U8) || !hybridi_check_dtype(b, scale, ST_U8) ||
        !hybridi_check_matrix(b, packed, w->rows, w->cols / 2) ||
        !hybridi_check_matrix(b, scale, w->rows, w->cols / LINEAR_MXFP4_GROUP))
        return;
    w->type = LINEAR_MXFP4;
    w->data = packed->data;
    w->scale = scale->data;
}

/* Scales and zero points of integers, whose type and shape `w` has. */
static void hybridi_bind_scales(hybridi_binder *b, const char *path,
                                const quantization_scheme *scheme, linear *w) {
    char name[HYBRIDI_NAME];
    const st_tensor *scale = hybridi_require(b, path, ".weight_scale"), *zero;
    w->group = scheme->group_size ? scheme->group_size : w->cols;
    size_t groups = linear_groups(w), in_word = 32 / scheme->bits;
    if (!scale || !hybridi_check_matrix(b, scale, w->rows, groups)) return;
    w->scale_type = hybridi_check_type(b, scale);
    w->scale = scale->data;
    if (hybridi_lookup(b, path, ".weight_g_idx", name)) {
        hybridi_wrong(b, hybridi_lookup(b, path, ".weight_g_idx", name), "inputs in their order",
                      "another order");
        return;
    }
    if (scheme->symmetric && !hybridi_lookup(b, path, ".weight_zero_point", name)) return;
    zero = hybridi_require(b, path, ".weight_zero_point");
    if (!zero) return;
    bool packed = w->type != LINEAR_INT8;
    if (!hybridi_check_dtype(b, zero, packed ? ST_I32 : ST_I8) ||
        !hybridi_check_matrix(b, zero, packed ? (w->rows + in_word - 1) / in_word : w->rows,
                              groups))
        return;
    w->zero = zero->data;
}

static void hybridi_bind_packed(hybridi_binder *b, const char *path,
                                const quantization_scheme *scheme, const st_tensor *packed,
                                linear *w) {
    const st_tensor *shape = hybridi_require(b, path, ".weight_shape");
    size_t two = 2, in_word = 32 / scheme->bits;
    if (!shape || !hybridi_check_dtype(b, packed, ST_I32) ||
        !hybridi_check_matrix(b, packed, w->rows, (w->cols + in_word - 1) / in_word) ||
        !hybridi_check_dtype(b, shape, ST_I64) || !hybridi_check_shape(b, shape, &two, 1))
        return;
    uint64_t rows = st_load_u64(shape->data), cols = st_load_u64(shape->data + 8);
    if (rows != w->rows || cols != w->cols) {
        char expected[64], found[64];
        snprintf(expected, sizeof expected, "%zu and %zu", w->rows, w->cols);
        snprintf(found, sizeof found, "%llu and %llu", (unsigned long long)rows,
                 (unsigned long long)cols);
        hybridi_wrong(b, shape, expected, found);
        return;
    }
    w->type = scheme->bits == 4 ? LINEAR_UINT4 : LINEAR_UINT8;
    w->data = packed->data;
    hybridi_bind_scales(b, path, scheme, w);
}

/* "<path>.weight", plain or of bytes. */
static void hybridi_bind_weight(hybridi_binder *b, const char *path,
                                const quantization_scheme *scheme, linear *w) {
    const st_tensor *tensor = hybridi_require(b, path, ".weight");
    if (!tensor || !hybridi_check_matrix(b, tensor, w->rows, w->cols)) return;
    bool bytes = scheme && scheme->format == QUANTIZATION_INT8 && tensor->dtype == ST_I8;
    w->type = bytes ? LINEAR_INT8 : hybridi_check_type(b, tensor);
    w->data = tensor->data;
    if (bytes) hybridi_bind_scales(b, path, scheme, w);
}

/* The matrix of a module: what there is must be what the configuration says, or plain. */
static void hybridi_bind_linear(hybridi_binder *b, const char *path, size_t rows, size_t cols,
                                linear *w) {
    char name[HYBRIDI_NAME], packed_name[HYBRIDI_NAME];
    if (b->failed) return;
    memset(w, 0, sizeof *w);
    w->rows = rows;
    w->cols = cols;
    hybridi_lookup(b, path, "", name);
    const quantization_scheme *scheme = quantization_of(b->quantized, name);
    const st_tensor *packed = hybridi_lookup(b, path, ".weight_packed", packed_name);
    if (!packed) {
        hybridi_bind_weight(b, path, scheme, w);
        return;
    }
    b->bytes += packed->bytes;
    if (!scheme || scheme->format == QUANTIZATION_INT8)
        hybridi_wrong(b, packed, "weight, by quantization_config", "weight_packed");
    else if (scheme->format == QUANTIZATION_MXFP4)
        hybridi_bind_mxfp4(b, path, packed, w);
    else
        hybridi_bind_packed(b, path, scheme, packed, w);
}

/* The first n numbers of a tensor, as float32. */
static void hybridi_expand(const st_tensor *tensor, linear_type type, size_t n, float *out) {
    linear row = linear_plain(type, 1, n, tensor->data);
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
    if (!norm || !query || !hybridi_check_shape(b, norm, &hidden, 1) ||
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

/* ---- The parts of a layer ---- */

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
    b->bytes = 0;
    snprintf(b->stem, sizeof b->stem, "%smodel.", b->prefix);
    hybridi_bind_linear(b, "embed_tokens", c->vocab_size, c->hidden_size, &m->embed);
    m->norm = hybridi_bind_vector(b, "norm.weight", c->hidden_size);
    if (c->attn_res_block_size > 0) m->output_query = hybridi_bind_query(b, "output_attn_res");
    for (size_t i = 0; i < c->n_layers && !b->failed; i++)
        hybridi_bind_layer(b, i, &m->layers[i]);
    snprintf(b->stem, sizeof b->stem, "%s", b->prefix);
    if (c->tie_word_embeddings && !hybridi_lookup(b, "lm_head", ".weight", name) &&
        !hybridi_lookup(b, "lm_head", ".weight_packed", name))
        m->head = m->embed;
    else
        hybridi_bind_linear(b, "lm_head", c->vocab_size, c->hidden_size, &m->head);
    return !b->failed;
}

/* ---- Opening ---- */

static bool hybridi_read_config_file(hybrid_config *config, quantization *quantized,
                                     const char *directory, error *e) {
    char path[4096], *text;
    size_t length;
    int n = snprintf(path, sizeof path, "%s/config.json", directory);
    if ((size_t)n >= sizeof path)
        return error_set(e, "%.60s...: expected a path of less than %zu bytes", directory,
                         sizeof path);
    if (!json_read_file(path, (size_t)1 << 24, &text, &length, e)) return false;
    bool ok = hybrid_config_parse(config, path, text, length, e) &&
              quantization_parse(quantized, path, text, length, e);
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
    m->n_vectors = b->n_vectors;
    m->mapped_bytes = b->bytes;
    return hybridi_bind_model(b, m);
}

/* The rest of hybrid_open, with configuration and checkpoint in the model; `directory` names these
 * in messages. */
static bool hybridi_bind(hybrid_model *model, const quantization *quantized, const char *directory,
                         error *e) {
    hybridi_binder b;
    memset(&b, 0, sizeof b);
    b.config = &model->config;
    b.quantized = quantized;
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

bool hybrid_open(hybrid_model *model, const char *directory, error *e) {
    quantization quantized;
    memset(model, 0, sizeof *model);
    if (!hybridi_read_config_file(&model->config, &quantized, directory, e)) return false;
    bool ok = st_open(&model->checkpoint, directory, e) &&
              hybridi_bind(model, &quantized, directory, e);
    quantization_free(&quantized);
    return ok;
}

void hybrid_close(hybrid_model *model) {
    free(model->layers);
    free(model->experts);
    free(model->vectors);
    st_close(&model->checkpoint);
    memset(model, 0, sizeof *model);
}

#endif
