/* quantize_config.h - which matrices of a model are quantised, and how its config.json says so.
 *
 * In one source file of a program (this also brings in the bodies of quantize.h):
 *
 *     #define QUANTIZE_CONFIG_IMPLEMENTATION
 *     #include "quantize_config.h"
 *
 * quantization_config has the keys that compressed-tensors writes. Its group has the target
 * "Linear", and `ignore` names every other Linear: each tensor of two dimensions that ends in
 * ".weight", but for embeddings and convolutions.
 */
#ifndef QUANTIZE_CONFIG_H
#define QUANTIZE_CONFIG_H

#include "json.h"
#include "quantize.h"
#include "safetensors.h"
#include "safetensors_write.h"

/* Is the tensor of this name quantised? The experts, shared experts and dense MLPs, and the q, k, v
 * and o projections of attention; not the router, low-rank projections nor the rest. Such a name is
 * shorter than QUANTIZE_NAME / 2. */
#define QUANTIZE_NAME 192
#define QUANTIZE_EXAMPLE "model.layers.0.self_attn.o_proj.weight"
bool quantize_is_chosen(const char *name);

bool quantize_ends_with(const char *name, const char *end);

/* Is this the config.json of a model that is not quantised? `path` names it in messages. */
bool quantize_config_check(const char *path, const char *bytes, size_t length, error *e);

/* Makes the text of a quantised model's config.json, for the caller to free: that of `old`, which
 * quantize_config_check has passed, with one member more, the last of its text_config or, if it has
 * none, of the whole. `model` is the one before. *extended is there to be freed on failure too. */
bool quantize_config_extend(const quantize_format *f, const st_checkpoint *model, const char *path,
                            const char *old, char **extended, error *e);

#endif

#if defined(QUANTIZE_CONFIG_IMPLEMENTATION) && !defined(QUANTIZEI_CONFIG_IMPLEMENTED)
#define QUANTIZEI_CONFIG_IMPLEMENTED

#if !defined(QUANTIZE_IMPLEMENTATION)
#define QUANTIZE_IMPLEMENTATION
#endif
#include "quantize.h"

#include <ctype.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

/* ---- Names ---- */

/* What is quantised; # stands for a number. A model may have "language_model." before each. */
static const char *const quantizei_chosen[] = {
    "model.layers.#.self_attn.q_proj.weight",
    "model.layers.#.self_attn.k_proj.weight",
    "model.layers.#.self_attn.v_proj.weight",
    "model.layers.#.self_attn.o_proj.weight",
    "model.layers.#.mlp.gate_proj.weight",
    "model.layers.#.mlp.up_proj.weight",
    "model.layers.#.mlp.down_proj.weight",
    "model.layers.#.block_sparse_moe.experts.#.w1.weight",
    "model.layers.#.block_sparse_moe.experts.#.w2.weight",
    "model.layers.#.block_sparse_moe.experts.#.w3.weight",
    "model.layers.#.block_sparse_moe.shared_experts.gate_proj.weight",
    "model.layers.#.block_sparse_moe.shared_experts.up_proj.weight",
    "model.layers.#.block_sparse_moe.shared_experts.down_proj.weight"};

static bool quantizei_matches(const char *name, const char *form) {
    for (; *form; form++)
        if (*form == '#') {
            if (!isdigit((unsigned char)*name)) return false;
            while (isdigit((unsigned char)*name)) name++;
        } else if (*name++ != *form) {
            return false;
        }
    return *name == '\0';
}

bool quantize_ends_with(const char *name, const char *end) {
    size_t length = strlen(name), rest = strlen(end);
    return length >= rest && strcmp(name + length - rest, end) == 0;
}

bool quantize_is_chosen(const char *name) {
    static const char prefix[] = "language_model.";
    if (strncmp(name, prefix, sizeof prefix - 1) == 0) name += sizeof prefix - 1;
    for (size_t i = 0; i < sizeof quantizei_chosen / sizeof *quantizei_chosen; i++)
        if (quantizei_matches(name, quantizei_chosen[i])) return strlen(name) < QUANTIZE_NAME / 2;
    return false;
}

/* Is this the weight of another Linear? Those that readers could take for quantised are listed. */
static bool quantizei_is_ignored(const st_tensor *t) {
    return t->n_dims == 2 && quantize_ends_with(t->name, ".weight") &&
           !quantize_is_chosen(t->name) && !quantize_ends_with(t->name, "embed_tokens.weight") &&
           !quantize_ends_with(t->name, "_conv1d.weight");
}

/* ---- Text ---- */

typedef struct quantizei_text {
    char *bytes;
    size_t length, room;
    bool failed;                  /* no memory */
    const char *newline, *indent; /* before a line, and once more for each level */
} quantizei_text;

static void quantizei_add(quantizei_text *t, const char *bytes, size_t n) {
    if (t->failed) return;
    if (!t->bytes || n >= t->room - t->length) {
        size_t room = 2 * t->room + n + 4096;
        char *larger = (char *)realloc(t->bytes, room);
        if (!larger) {
            t->failed = true;
            return;
        }
        t->bytes = larger, t->room = room;
    }
    memcpy(t->bytes + t->length, bytes, n);
    t->length += n;
    t->bytes[t->length] = '\0';
}

/* A new line at a level of its own. */
#if defined(__GNUC__)
__attribute__((format(printf, 3, 4)))
#endif
static void
quantizei_line(quantizei_text *t, size_t level, const char *format, ...) {
    char bytes[200];
    va_list list;
    va_start(list, format);
    vsnprintf(bytes, sizeof bytes, format, list);
    va_end(list);
    quantizei_add(t, t->newline, strlen(t->newline));
    for (size_t i = 0; i < level; i++) quantizei_add(t, t->indent, strlen(t->indent));
    quantizei_add(t, bytes, strlen(bytes));
}

/* Past the string, array or object that begins at `at`, in text that is JSON. */
static const char *quantizei_past(const char *at) {
    size_t depth = 0;
    bool quoted = false;
    do {
        char c = *at++;
        if (quoted && c == '\\')
            at++;
        else if (c == '"')
            quoted = !quoted;
        else if (!quoted && (c == '{' || c == '['))
            depth++;
        else if (!quoted && (c == '}' || c == ']'))
            depth--;
    } while (depth > 0 || quoted);
    return at;
}

static const char *quantizei_past_space(const char *at) {
    return at + strspn(at, " \t\r\n");
}

/* The value of a member of the object that begins at `object`, or null. */
static const char *quantizei_find(const char *object, const char *quoted) {
    size_t length = strlen(quoted);
    for (const char *at = object + 1; *at != '}';) {
        if (!strchr("\"{[", *at)) {
            at++;
            continue;
        }
        const char *end = quantizei_past(at), *colon = quantizei_past_space(end);
        if (*colon == ':' && (size_t)(end - at) == length && memcmp(at, quoted, length) == 0)
            return quantizei_past_space(colon + 1);
        at = end;
    }
    return NULL;
}

/* The white space before the first member of an object, from the last line break on. */
static char *quantizei_line_start(const char *object) {
    const char *member = quantizei_past_space(object + 1), *from = member;
    while (from > object + 1 && *from != '\n') from--;
    if (*from != '\n') from = member;
    size_t length = (size_t)(member - from);
    char *start = (char *)malloc(length + 2);
    if (!start) return NULL;
    memcpy(start, from, length);
    if (length == 0) start[length++] = '\n'; /* a text of one line */
    start[length] = '\0';
    return start;
}

static void quantizei_describe_weights(quantizei_text *t, const quantize_format *f) {
    bool floats = f->kind == QUANTIZE_MXFP4;
    quantizei_line(t, 3, "\"weights\": {");
    quantizei_line(t, 4, "\"num_bits\": %d,", f->kind == QUANTIZE_INT8 ? 8 : 4);
    quantizei_line(t, 4, "\"type\": \"%s\",", floats ? "float" : "int");
    quantizei_line(t, 4, "\"symmetric\": %s,", f->asymmetric ? "false" : "true");
    if (f->group)
        quantizei_line(t, 4, "\"group_size\": %zu,", f->group);
    else
        quantizei_line(t, 4, "\"group_size\": null,");
    quantizei_line(t, 4, "\"strategy\": \"%s\",", f->group ? "group" : "channel");
    if (floats) quantizei_line(t, 4, "\"scale_dtype\": \"torch.uint8\",");
    quantizei_line(t, 4, "\"block_structure\": null,");
    quantizei_line(t, 4, "\"dynamic\": false,");
    quantizei_line(t, 4, "\"actorder\": null,");
    quantizei_line(t, 4, "\"observer\": \"mse\",");
    quantizei_line(t, 4, "\"observer_kwargs\": {}");
    quantizei_line(t, 3, "},");
}

static void quantizei_list_ignored(quantizei_text *t, const st_checkpoint *model) {
    bool first = true;
    quantizei_line(t, 1, "\"ignore\": [");
    for (size_t i = 0; i < st_count(model) && !t->failed; i++) {
        const st_tensor *tensor = st_at(model, i);
        size_t length = strlen(tensor->name);
        if (!quantizei_is_ignored(tensor)) continue;
        char *quoted = (char *)malloc(ST_QUOTED(length));
        if (!quoted) {
            t->failed = true;
            break;
        }
        size_t n = st_quote(tensor->name, quoted) - strlen(".weight\"");
        if (!first) quantizei_add(t, ",", 1);
        quantizei_line(t, 2, "%s", "");
        quantizei_add(t, quoted, n);
        quantizei_add(t, "\"", 1);
        first = false;
        free(quoted);
    }
    quantizei_line(t, 1, "]");
}

static const char *const quantizei_published[] = {"", "int-quantized", "pack-quantized",
                                                  "mxfp4-pack-quantized"};

/* The member quantization_config. */
static void quantizei_describe(quantizei_text *t, const quantize_format *f,
                               const st_checkpoint *model) {
    quantizei_line(t, 0, "\"quantization_config\": {");
    quantizei_line(t, 1, "\"quant_method\": \"compressed-tensors\",");
    quantizei_line(t, 1, "\"format\": \"%s\",", quantizei_published[f->kind]);
    quantizei_line(t, 1, "\"quantization_status\": \"compressed\",");
    quantizei_line(t, 1, "\"global_compression_ratio\": null,");
    quantizei_line(t, 1, "\"kv_cache_scheme\": null,");
    quantizei_line(t, 1, "\"config_groups\": {");
    quantizei_line(t, 2, "\"group_0\": {");
    quantizei_line(t, 3, "\"targets\": [");
    quantizei_line(t, 4, "\"Linear\"");
    quantizei_line(t, 3, "],");
    quantizei_describe_weights(t, f);
    quantizei_line(t, 3, "\"input_activations\": null,");
    quantizei_line(t, 3, "\"output_activations\": null");
    quantizei_line(t, 2, "}");
    quantizei_line(t, 1, "},");
    quantizei_list_ignored(t, model);
    quantizei_line(t, 0, "}");
}

bool quantize_config_extend(const quantize_format *f, const st_checkpoint *model, const char *path,
                            const char *old, char **extended, error *e) {
    const char *root = quantizei_past_space(old), *nested = quantizei_find(root, "\"text_config\"");
    const char *object = nested ? nested : root, *end = quantizei_past(object) - 1;
    char *start = quantizei_line_start(object), *outer = quantizei_line_start(root);
    quantizei_text t = {NULL, 0, 0, !start || !outer, start, NULL};
    while (strchr(" \t\r\n", end[-1])) end--;
    if (!t.failed) {
        t.indent = outer[1] ? outer + 1 : " ";
        quantizei_add(&t, old, (size_t)(end - old));
        if (end[-1] != '{') quantizei_add(&t, ",", 1);
        quantizei_describe(&t, f, model);
        quantizei_add(&t, end, strlen(end));
    }
    free(start);
    free(outer);
    *extended = t.bytes;
    return !t.failed || error_set(e, "%s: no memory for its text", path);
}

/* A model that has not been quantised: its config.json says nothing of it. */
bool quantize_config_check(const char *path, const char *bytes, size_t length, error *e) {
    static const char key[] = "quantization_config";
    json document;
    if (!json_parse(&document, path, bytes, length, e)) return false;
    const json_value *root = json_root(&document), *nested = json_member(root, "text_config");
    json_kind kind = json_kind_of(nested);
    bool ok = json_kind_of(root) == JSON_OBJECT;
    if (!ok)
        error_set(e, "%s: expected an object, found %s", path, json_kind_name(root));
    else if (kind != JSON_OBJECT && kind != JSON_NOTHING)
        ok = error_set(e, "%s: key text_config: expected an object, found %s", path,
                       json_kind_name(nested));
    else if (json_member(root, key) || json_member(nested, key))
        ok = error_set(e, "%s: key %s: expected none, as of a model that is not quantised", path,
                       key);
    json_free(&document);
    return ok;
}

#endif
