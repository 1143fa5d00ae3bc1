/* quantization.h - how a checkpoint stores its matrices: quantization_config of its config.json.
 *
 * In one source file of a program (this also brings in the bodies of json.h and pattern.h):
 *
 *     #define QUANTIZATION_IMPLEMENTATION
 *     #include "quantization.h"
 *
 *     quantization q;
 *     if (!quantization_parse(&q, "config.json", text, length, e)) return false;
 *     const quantization_scheme *scheme = quantization_of(&q, "model.layers.3.self_attn.q_proj");
 *     quantization_free(&q);
 *
 * WHAT IS UNDERSTOOD
 *   quant_method "compressed-tensors", weights only, in the formats
 *     pack-quantized        integers of 4 or 8 bits in 32-bit words
 *     int-quantized         integers of 8 bits
 *     mxfp4-pack-quantized  E2M1 in groups of 32 with E8M0 scales
 *   with one scale for a group of inputs or for a whole output channel, with zero points or without.
 *   A module belongs to the first of config_groups of which a target is its name, or the class
 *   "Linear", or "re:" and an expression (pattern.h) that matches its name; unless `ignore` has such
 *   an entry for it. Everything else that the key can say is refused by name.
 *   Source: the compressed-tensors package, QuantizationConfig and its compressors.
 */
#ifndef QUANTIZATION_H
#define QUANTIZATION_H

#include "error.h"
#include "json.h"
#include "pattern.h"

#include <stdbool.h>
#include <stddef.h>

#define QUANTIZATION_MAX_GROUPS 16

typedef enum quantization_format {
    QUANTIZATION_PACKED = 1, /* pack-quantized */
    QUANTIZATION_INT8 = 2,   /* int-quantized */
    QUANTIZATION_MXFP4 = 3   /* mxfp4-pack-quantized */
} quantization_format;

typedef struct quantization_scheme {
    quantization_format format;
    size_t bits;       /* of a code: 4 or 8 */
    size_t group_size; /* inputs that share a scale; 0: all of an output */
    bool symmetric;    /* no zero points */
} quantization_scheme;

/* Names of modules: those that are listed, and those that an expression matches. */
typedef struct quantization_names {
    struct quantizationi_name *names;
    size_t n;
    bool all; /* "Linear" */
} quantization_names;

/* Read through the functions below. */
typedef struct quantization {
    json document; /* owns the names */
    size_t n_groups;
    quantization_scheme schemes[QUANTIZATION_MAX_GROUPS];
    quantization_names targets[QUANTIZATION_MAX_GROUPS];
    quantization_names ignored;
} quantization;

/* Reads the text of a config.json, in which the key may stand outside or inside of text_config;
 * `file` names it in messages. Without the key nothing is quantised. On failure `q` is empty:
 * freeing it is allowed, not needed. */
bool quantization_parse(quantization *q, const char *file, const char *text, size_t length,
                        error *e);
void quantization_free(quantization *q);

/* How the matrix of a module, "<name>.weight" in a plain checkpoint, is stored; null: plainly. */
const quantization_scheme *quantization_of(const quantization *q, const char *name);

#endif

#if defined(QUANTIZATION_IMPLEMENTATION) && !defined(QUANTIZATIONI_IMPLEMENTED)
#define QUANTIZATIONI_IMPLEMENTED

#if !defined(JSON_IMPLEMENTATION)
#define JSON_IMPLEMENTATION
#endif
#include "json.h"
#if !defined(PATTERN_IMPLEMENTATION)
#define PATTERN_IMPLEMENTATION
#endif
#include "pattern.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct quantizationi_name {
    const char *name;    /* the document's */
    pattern *expression; /* null: the name itself */
} quantizationi_name;

/* One object of the file, and what goes before its keys in messages. */
typedef struct quantizationi_reader {
    const json_value *object;
    const char *file;
    error *e;
    char path[120];
} quantizationi_reader;

static const char *const quantizationi_formats[] = {"", "pack-quantized", "int-quantized",
                                                    "mxfp4-pack-quantized"};

static bool quantizationi_expected(const quantizationi_reader *r, const char *key,
                                   const char *expected) {
    char found[JSON_SHOWN];
    return error_set(r->e, "%s: key %s%s: expected %s, found %s", r->file, r->path, key, expected,
                     json_show(json_member(r->object, key), found));
}

static bool quantizationi_is_absent(const quantizationi_reader *r, const char *key) {
    json_kind kind = json_kind_of(json_member(r->object, key));
    return kind == JSON_NOTHING || kind == JSON_NULL;
}

static quantizationi_reader quantizationi_inner(const quantizationi_reader *r, const char *key) {
    quantizationi_reader inner = *r;
    inner.object = json_member(r->object, key);
    snprintf(inner.path, sizeof inner.path, "%.70s%.40s.", r->path, key);
    return inner;
}

/* ---- Names ---- */

static bool quantizationi_read_name(const quantizationi_reader *r, const char *key,
                                    const char *text, size_t length, quantizationi_name *name) {
    size_t wrong;
    char expected[160];
    name->name = text;
    if (strncmp(text, "re:", 3) != 0) return true;
    name->expression = (pattern *)malloc(sizeof *name->expression);
    if (!name->expression) return error_set(r->e, "%s: out of memory", r->file);
    if (pattern_compile(name->expression, text + 3, length - 3, &wrong)) return true;
    snprintf(expected, sizeof expected,
             "an expression of those that pattern.h knows up to \"%.60s\"", text + 3 + wrong);
    return error_set(r->e, "%s: key %s%s: expected %s, found \"%.80s\"", r->file, r->path, key,
                     expected, text);
}

/* Is it a class, not the name of a module? Modules of the models have a point or an underscore. */
static bool quantizationi_is_class(const char *text) {
    return strncmp(text, "re:", 3) != 0 && !strchr(text, '.') && !strchr(text, '_');
}

/* An array of names. Other classes than Linear have no matrix here: as a target each is an error. */
static bool quantizationi_read_names(const quantizationi_reader *r, const char *key, bool targets,
                                     quantization_names *names) {
    const json_value *list = json_member(r->object, key);
    size_t count = json_count(list);
    if (!targets && quantizationi_is_absent(r, key)) return true;
    if (json_kind_of(list) != JSON_ARRAY || (targets && count == 0))
        return quantizationi_expected(r, key, "an array of names of modules");
    names->names = (quantizationi_name *)calloc(count + 1, sizeof *names->names);
    if (!names->names) return error_set(r->e, "%s: out of memory", r->file);
    for (size_t i = 0; i < count; i++) {
        size_t length;
        const char *text = json_string(json_item(list, i), &length);
        if (!text || memchr(text, '\0', length))
            return quantizationi_expected(r, key, "an array of names of modules");
        if (strcmp(text, "Linear") == 0) {
            names->all = true;
            continue;
        }
        if (targets && quantizationi_is_class(text))
            return error_set(r->e,
                             "%s: key %s%s: expected \"Linear\", a name or an expression, found "
                             "\"%.40s\"",
                             r->file, r->path, key, text);
        if (!quantizationi_read_name(r, key, text, length, &names->names[names->n])) {
            names->n++; /* it may hold memory */
            return false;
        }
        names->n++;
    }
    return true;
}

static bool quantizationi_has(const quantization_names *names, const char *name) {
    if (names->all) return true;
    for (size_t i = 0; i < names->n; i++) {
        const quantizationi_name *item = &names->names[i];
        if (item->expression ? pattern_matches(item->expression, name)
                             : strcmp(item->name, name) == 0)
            return true;
    }
    return false;
}

static void quantizationi_free_names(quantization_names *names) {
    for (size_t i = 0; i < names->n; i++) free(names->names[i].expression);
    free(names->names);
}

/* ---- Schemes ---- */

/* Only absent, null or false. */
static bool quantizationi_read_absent(const quantizationi_reader *r, const char *const *keys,
                                      size_t n) {
    for (size_t i = 0; i < n; i++) {
        bool value = false;
        if (quantizationi_is_absent(r, keys[i])) continue;
        if (!json_boolean(json_member(r->object, keys[i]), &value) || value)
            return quantizationi_expected(r, keys[i], "null");
    }
    return true;
}

static bool quantizationi_read_format(const quantizationi_reader *r, quantization_format *format) {
    for (int i = QUANTIZATION_PACKED; i <= QUANTIZATION_MXFP4; i++)
        if (json_string_is(json_member(r->object, "format"), quantizationi_formats[i])) {
            *format = (quantization_format)i;
            return true;
        }
    return quantizationi_expected(
        r, "format", "\"pack-quantized\", \"int-quantized\" or \"mxfp4-pack-quantized\"");
}

/* group_size and strategy, of which each may be missing if the other tells it. */
static bool quantizationi_read_grouping(const quantizationi_reader *r, quantization_scheme *s) {
    const json_value *strategy = json_member(r->object, "strategy");
    const json_value *size = json_member(r->object, "group_size");
    bool stated = !quantizationi_is_absent(r, "strategy");
    int64_t group = -1;
    if (!quantizationi_is_absent(r, "group_size") &&
        (!json_integer(size, &group) || (group < 1 && group != -1) || group > 1 << 24))
        return quantizationi_expected(r, "group_size", "null or a number of inputs");
    if (stated && !json_string_is(strategy, "group") && !json_string_is(strategy, "channel"))
        return quantizationi_expected(r, "strategy", "\"group\" or \"channel\"");
    if (!stated && quantizationi_is_absent(r, "group_size"))
        return quantizationi_expected(r, "strategy", "\"group\" or \"channel\"");
    if (stated && json_string_is(strategy, "group") != (group > 0))
        return quantizationi_expected(
            r, "group_size", group > 0 ? "null with strategy \"channel\"" : "a number of inputs");
    s->group_size = group > 0 ? (size_t)group : 0;
    return true;
}

/* An order of inputs other than theirs would need g_idx tensors. */
static bool quantizationi_read_actorder(const quantizationi_reader *r) {
    static const char *const key[] = {"actorder"};
    const json_value *actorder = json_member(r->object, "actorder");
    if (json_string_is(actorder, "static") || json_string_is(actorder, "weight")) return true;
    return quantizationi_read_absent(r, key, 1);
}

static bool quantizationi_read_weights(const quantizationi_reader *r, quantization_scheme *s) {
    static const char *const absent[] = {"block_structure", "dynamic"};
    const char *type = s->format == QUANTIZATION_MXFP4 ? "float" : "int";
    char expected[40];
    uint64_t bits = 0;
    if (json_kind_of(r->object) != JSON_OBJECT)
        return error_set(r->e, "%s: key %.*s: expected an object, found %s", r->file,
                         (int)strlen(r->path) - 1, r->path, json_kind_name(r->object));
    if (!json_string_is(json_member(r->object, "type"), type)) {
        snprintf(expected, sizeof expected, "\"%s\"", type);
        return quantizationi_expected(r, "type", expected);
    }
    json_unsigned(json_member(r->object, "num_bits"), &bits); /* 0 if it is no such number */
    if (s->format == QUANTIZATION_PACKED && bits != 4 && bits != 8)
        return quantizationi_expected(r, "num_bits", "4 or 8");
    if (s->format == QUANTIZATION_INT8 && bits != 8)
        return quantizationi_expected(r, "num_bits", "8");
    if (s->format == QUANTIZATION_MXFP4 && bits != 4)
        return quantizationi_expected(r, "num_bits", "4");
    s->bits = (size_t)bits;
    s->symmetric = true;
    if (!quantizationi_is_absent(r, "symmetric") &&
        !json_boolean(json_member(r->object, "symmetric"), &s->symmetric))
        return quantizationi_expected(r, "symmetric", "true or false");
    if (!quantizationi_read_grouping(r, s) || !quantizationi_read_actorder(r) ||
        !quantizationi_read_absent(r, absent, sizeof absent / sizeof *absent))
        return false;
    if (s->format != QUANTIZATION_MXFP4) return true;
    if (s->group_size != 32) return quantizationi_expected(r, "group_size", "32");
    if (!s->symmetric) return quantizationi_expected(r, "symmetric", "true");
    return true;
}

/* A member of config_groups; its own format counts before that of all. */
static bool quantizationi_read_group(const quantizationi_reader *outer,
                                     const quantizationi_reader *r, quantization *q) {
    static const char *const absent[] = {"input_activations", "output_activations"};
    size_t i = q->n_groups++;
    quantization_scheme *s = &q->schemes[i];
    if (json_kind_of(r->object) != JSON_OBJECT)
        return error_set(r->e, "%s: key %.*s: expected an object, found %s", r->file,
                         (int)strlen(r->path) - 1, r->path, json_kind_name(r->object));
    const quantizationi_reader *of = quantizationi_is_absent(r, "format") ? outer : r;
    quantizationi_reader weights = quantizationi_inner(r, "weights");
    return quantizationi_read_format(of, &s->format) && quantizationi_read_weights(&weights, s) &&
           quantizationi_read_absent(r, absent, sizeof absent / sizeof *absent) &&
           quantizationi_read_names(r, "targets", true, &q->targets[i]);
}

static bool quantizationi_read(const quantizationi_reader *r, quantization *q) {
    static const char *const absent[] = {"kv_cache_scheme"};
    char expected[60];
    if (json_kind_of(r->object) != JSON_OBJECT)
        return error_set(r->e, "%s: key quantization_config: expected an object, found %s", r->file,
                         json_kind_name(r->object));
    if (!json_string_is(json_member(r->object, "quant_method"), "compressed-tensors"))
        return quantizationi_expected(r, "quant_method", "\"compressed-tensors\"");
    if (!quantizationi_is_absent(r, "quantization_status") &&
        !json_string_is(json_member(r->object, "quantization_status"), "compressed"))
        return quantizationi_expected(r, "quantization_status", "\"compressed\"");
    if (!quantizationi_read_absent(r, absent, 1)) return false;
    static const char *const empty[] = {"sparsity_config", "transform_config"};
    for (size_t i = 0; i < 2; i++)
        if (!quantizationi_is_absent(r, empty[i]) &&
            (json_kind_of(json_member(r->object, empty[i])) != JSON_OBJECT ||
             json_count(json_member(r->object, empty[i])) > 0))
            return quantizationi_expected(r, empty[i], "an empty object");
    const json_value *groups = json_member(r->object, "config_groups");
    size_t n = json_count(groups);
    if (json_kind_of(groups) != JSON_OBJECT || n == 0 || n > QUANTIZATION_MAX_GROUPS) {
        snprintf(expected, sizeof expected, "an object of 1 to %d groups", QUANTIZATION_MAX_GROUPS);
        return quantizationi_expected(r, "config_groups", expected);
    }
    quantizationi_reader all = quantizationi_inner(r, "config_groups");
    for (size_t i = 0; i < n; i++) {
        size_t length;
        quantizationi_reader group =
            quantizationi_inner(&all, json_member_name(groups, i, &length));
        group.object = json_item(groups, i);
        if (!quantizationi_read_group(r, &group, q)) return false;
    }
    return quantizationi_read_names(r, "ignore", false, &q->ignored);
}

bool quantization_parse(quantization *q, const char *file, const char *text, size_t length,
                        error *e) {
    memset(q, 0, sizeof *q);
    if (!json_parse(&q->document, file, text, length, e)) return false;
    quantizationi_reader outer = {json_root(&q->document), file, e, ""};
    quantizationi_reader inner = quantizationi_inner(&outer, "text_config"), *of = &outer;
    bool ok = true;
    if (!quantizationi_is_absent(&inner, "quantization_config")) of = &inner;
    if (of == &inner && !quantizationi_is_absent(&outer, "quantization_config"))
        ok = quantizationi_expected(&outer, "quantization_config",
                                    "nothing beside text_config.quantization_config");
    if (ok && !quantizationi_is_absent(of, "quantization_config")) {
        quantizationi_reader r = quantizationi_inner(of, "quantization_config");
        ok = quantizationi_read(&r, q);
    }
    if (!ok) quantization_free(q);
    return ok;
}

void quantization_free(quantization *q) {
    for (size_t i = 0; i < q->n_groups; i++) quantizationi_free_names(&q->targets[i]);
    quantizationi_free_names(&q->ignored);
    json_free(&q->document);
    memset(q, 0, sizeof *q);
}

const quantization_scheme *quantization_of(const quantization *q, const char *name) {
    for (size_t i = 0; i < q->n_groups; i++)
        if (quantizationi_has(&q->targets[i], name))
            return quantizationi_has(&q->ignored, name) ? NULL : &q->schemes[i];
    return NULL;
}

#endif
