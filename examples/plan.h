/* plan.h - what a model needs, by count: bytes of its weights, bytes that a token touches,
 * and the longest context that a machine's memory holds. No weight's contents are read.
 *
 * Every function is static.
 */
#ifndef PLAN_H
#define PLAN_H

#include "hybrid.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

/* Types of matrices, by linear_type. */
#define PLAN_TYPES (LINEAR_UINT4 + 1)

typedef struct plan_weights {
    double matrices[PLAN_TYPES]; /* bytes in the files, by linear_type */
    double vectors;              /* bytes in the files of what is no matrix */
    double kept;                 /* bytes of the float32 that these become when a model is opened */
} plan_weights;

/* What one generated token reads, or reads and writes, once each, in bytes. Activations are not
 * counted: they stay in a processor's caches. */
typedef struct plan_token {
    double dense;     /* matrices that every token uses, but for the head */
    double experts;   /* matrices of the experts that it chooses, of middling size */
    double head;      /* the head */
    double embedding; /* one row */
    double vectors;   /* norms, decays, biases, convolutions: float32 */
    double states;    /* KDA states and convolution windows, read and written */
    double latents;   /* the latent cache of the tokens before it, and its own row */
    double total;
} plan_token;

static inline plan_weights plan_weights_of(const hybrid_model *model);

/* Of a session that has read n_tokens tokens, whose cache has that type. */
static inline plan_token plan_token_of(const hybrid_model *model, size_t n_tokens,
                                       linear_type cache);

/* Bytes of memory that a program may still ask for without others having to give way; 0 where the
 * system does not say. */
static inline double plan_available_memory(void);

/* The largest capacity with which a session and a workspace fit into `bytes`; 0 if none does.
 * `session` and `workspace` say how they are made, but for their capacity. */
static inline size_t plan_largest_context(const hybrid_model *model, hybrid_session_options session,
                                          hybrid_workspace_options workspace, double bytes);

/* Prints all of it, for a session and a workspace of that capacity, on this machine. The
 * stream remembers whether it could be written. */
static inline void plan_print(const hybrid_model *model, const hybrid_session_options *session,
                              const hybrid_workspace_options *workspace, FILE *out);

/* ---- Weights ---- */

typedef void (*plani_visit)(void *context, const linear *w);

static void plani_each_in_unit(const hybrid_glu *unit, plani_visit visit, void *context) {
    visit(context, &unit->gate), visit(context, &unit->up), visit(context, &unit->down);
}

/* The matrices of a layer but its routed experts; some are absent. */
static void plani_each_dense(const hybrid_layer *layer, plani_visit visit, void *context) {
    const hybrid_kda *kda = &layer->kda;
    const mla_weights *mla = &layer->mla;
    const hybrid_moe *moe = &layer->moe;
    const linear *matrices[] = {
        &kda->q,   &kda->k, &kda->v,      &kda->f_a,         &kda->f_b,      &kda->b,    &kda->g_a,
        &kda->g_b, &kda->g, &kda->o,      &mla->q_a,         &mla->q,        &mla->kv_a, &mla->kv_b,
        &mla->g,   &mla->o, &moe->router, &moe->latent_down, &moe->latent_up};
    for (size_t i = 0; i < sizeof matrices / sizeof *matrices; i++) visit(context, matrices[i]);
    plani_each_in_unit(&moe->shared, visit, context);
    plani_each_in_unit(&layer->dense, visit, context);
}

static void plani_each_expert(const hybrid_model *model, size_t layer, plani_visit visit,
                              void *context) {
    if (!hybrid_is_moe(&model->config, layer)) return;
    for (size_t i = 0; i < model->config.num_experts; i++)
        plani_each_in_unit(&model->layers[layer].moe.experts[i], visit, context);
}

static void plani_add_type(void *context, const linear *w) {
    plan_weights *weights = (plan_weights *)context;
    weights->matrices[w->type] += (double)linear_bytes(w);
}

static void plani_add_bytes(void *context, const linear *w) {
    *(double *)context += (double)linear_bytes(w);
}

/* Is the head the embedding? */
static bool plani_is_tied(const hybrid_model *model) {
    return model->head.data == model->embed.data;
}

static inline plan_weights plan_weights_of(const hybrid_model *model) {
    plan_weights weights;
    memset(&weights, 0, sizeof weights);
    plani_add_type(&weights, &model->embed);
    if (!plani_is_tied(model)) plani_add_type(&weights, &model->head);
    for (size_t i = 0; i < model->config.n_layers; i++) {
        plani_each_dense(&model->layers[i], plani_add_type, &weights);
        plani_each_expert(model, i, plani_add_type, &weights);
    }
    weights.vectors = (double)model->mapped_bytes;
    for (size_t i = 0; i < PLAN_TYPES; i++) weights.vectors -= weights.matrices[i];
    weights.kept = (double)(model->n_vectors * sizeof(float));
    return weights;
}

/* ---- A token ---- */

static inline plan_token plan_token_of(const hybrid_model *model, size_t n_tokens,
                                       linear_type cache) {
    const hybrid_config *c = &model->config;
    plan_token token;
    double experts = 0;
    memset(&token, 0, sizeof token);
    for (size_t i = 0; i < c->n_layers; i++) {
        plani_each_dense(&model->layers[i], plani_add_bytes, &token.dense);
        plani_each_expert(model, i, plani_add_bytes, &experts);
    }
    if (c->num_experts > 0)
        token.experts = experts * (double)c->experts_per_token / (double)c->num_experts;
    token.head = (double)linear_bytes(&model->head);
    token.embedding = (double)linear_bytes(&model->embed) / (double)c->vocab_size;
    token.vectors = (double)(model->n_vectors * sizeof(float));
    hybrid_sizes sizes = hybrid_memory_sizes(model, n_tokens + 1, cache);
    token.states = 2 * (sizes.states + sizes.windows);
    token.latents = sizes.latents;
    token.total = token.dense + token.experts + token.head + token.embedding + token.vectors +
                  token.states + token.latents;
    return token;
}

/* ---- A machine ---- */

static inline double plan_available_memory(void) {
    double kilobytes = 0;
    char line[200];
    FILE *file = fopen("/proc/meminfo", "r"); /* Linux */
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "MemAvailable: %lf kB", &kilobytes) == 1) break; /* NOLINT(cert-err34-c) */
    if (file) fclose(file);
    if (kilobytes > 0) return kilobytes * 1024;
#if PARALLEL_POSIX && defined(_SC_PHYS_PAGES)
    double pages = (double)sysconf(_SC_PHYS_PAGES), page = (double)sysconf(_SC_PAGESIZE);
    if (pages > 0) return pages * page;
#endif
    return 0;
}

static bool plani_fits(const hybrid_model *model, hybrid_session_options *session,
                       hybrid_workspace_options *workspace, size_t capacity, double bytes) {
    session->capacity = workspace->capacity = capacity;
    size_t a = hybrid_session_bytes(model, session), b = hybrid_workspace_bytes(model, workspace);
    return a > 0 && b > 0 && (double)a + (double)b <= bytes;
}

static inline size_t plan_largest_context(const hybrid_model *model, hybrid_session_options session,
                                          hybrid_workspace_options workspace, double bytes) {
    size_t fits = 0, too_many = SIZE_MAX / 4;
    if (!plani_fits(model, &session, &workspace, 1, bytes)) return 0;
    while (too_many - fits > 1) {
        size_t middle = fits + (too_many - fits) / 2;
        if (plani_fits(model, &session, &workspace, middle, bytes))
            fits = middle;
        else
            too_many = middle;
    }
    return fits;
}

/* ---- The report ---- */

static void plani_print_context(const hybrid_model *model, const hybrid_session_options *session,
                                const hybrid_workspace_options *workspace, FILE *out) {
    double memory = plan_available_memory(), kept = plan_weights_of(model).kept;
    double weights = (double)model->mapped_bytes;
    if (memory <= 0) {
        fprintf(out, "memory: unknown, so is the largest context\n");
        return;
    }
    fprintf(out, "memory: %.0f bytes available\n", memory);
    fprintf(out, "largest context: ");
    size_t n = plan_largest_context(model, *session, *workspace, memory - kept - weights);
    if (n > 0) {
        fprintf(out, "%zu tokens with all weights in memory\n", n);
        return;
    }
    fprintf(out,
            "none with all weights in memory, %zu tokens if weights are read from disk again "
            "and again\n",
            plan_largest_context(model, *session, *workspace, memory - kept));
}

static inline void plan_print(const hybrid_model *model, const hybrid_session_options *session,
                              const hybrid_workspace_options *workspace, FILE *out) {
    const hybrid_config *c = &model->config;
    plan_weights weights = plan_weights_of(model);
    plan_token none = plan_token_of(model, 0, session->cache);
    plan_token some = plan_token_of(model, 1000, session->cache);
    hybrid_sizes sizes = hybrid_memory_sizes(model, 1000, session->cache);
    hybrid_session_options empty = *session;
    empty.capacity = 0;
    fprintf(out, "weights: %.0f bytes mapped: ", (double)model->mapped_bytes);
    for (size_t i = 1; i < PLAN_TYPES; i++)
        if (weights.matrices[i] > 0)
            fprintf(out, "%s matrices %.0f, ", linear_type_name((linear_type)i),
                    weights.matrices[i]);
    fprintf(out, "others %.0f; kept as float32 %.0f bytes\n", weights.vectors, weights.kept);
    fprintf(out,
            "a token: %.0f bytes touched: dense matrices %.0f, %zu of %zu experts %.0f, head %.0f, "
            "embedding %.0f, vectors %.0f, states %.0f, latents %.0f; after each 1000 tokens "
            "%.0f more\n",
            none.total, none.dense, c->num_experts ? c->experts_per_token : 0, c->num_experts,
            none.experts, none.head, none.embedding, none.vectors, none.states, none.latents,
            some.total - none.total);
    fprintf(out, "session: %zu bytes, for each 1000 tokens %.0f more\n",
            hybrid_session_bytes(model, &empty), sizes.latents);
    fprintf(out, "workspace: %zu bytes for %zu tokens at a time and a context of %zu\n",
            hybrid_workspace_bytes(model, workspace),
            workspace->block ? workspace->block : HYBRID_BLOCK, workspace->capacity);
    plani_print_context(model, session, workspace, out);
}

#endif
