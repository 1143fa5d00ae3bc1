/* stop.h - the ids at which a model's text ends.
 *
 * They are eos_token_id, an id or an array of ids, of generation_config.json; without that file or
 * key, of config.json, or of text_config in it; without that either, the special tokens that have
 * one of the names that Kimi models give to such: [EOS], <|im_end|>, <|end_of_msg|>.
 *
 * Every function is static.
 */
#ifndef STOP_H
#define STOP_H

#include "error.h"
#include "json.h"
#include "tokenizer.h"
#include "tokens.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define STOPI_FILE_LIMIT ((size_t)1 << 26)

static inline bool stop_has(const token_list *stops, uint32_t id) {
    for (size_t i = 0; i < stops->n; i++)
        if (stops->ids[i] == id) return true;
    return false;
}

static bool stopi_add(const char *path, const json_value *id, token_list *stops, error *e) {
    char found[JSON_SHOWN];
    uint64_t value;
    if (!json_unsigned(id, &value) || value > UINT32_MAX)
        return error_set(e, "%s: key eos_token_id: expected an id or an array of ids, found %s",
                         path, json_show(id, found));
    return stop_has(stops, (uint32_t)value) || tokens_append(stops, (uint32_t)value, e);
}

/* What the key says, in one object; nothing where it is absent or null. */
static bool stopi_read_key(const char *path, const json_value *object, token_list *stops,
                           error *e) {
    const json_value *value = json_member(object, "eos_token_id");
    json_kind kind = json_kind_of(value);
    if (kind == JSON_NOTHING || kind == JSON_NULL) return true;
    if (kind != JSON_ARRAY) return stopi_add(path, value, stops, e);
    for (size_t i = 0; i < json_count(value); i++)
        if (!stopi_add(path, json_item(value, i), stops, e)) return false;
    return true;
}

/* A file that need not be there. */
static bool stopi_read_file(const char *directory, const char *name, token_list *stops, error *e) {
    char path[4096], *text;
    size_t length;
    json document;
    int n = snprintf(path, sizeof path, "%s/%s", directory, name);
    if ((size_t)n >= sizeof path)
        return error_set(e, "%.60s...: expected a shorter path", directory);
    if (!json_is_there(path)) return true;
    if (!json_read_file(path, STOPI_FILE_LIMIT, &text, &length, e)) return false;
    bool ok = json_parse(&document, path, text, length, e);
    free(text);
    if (!ok) return false;
    const json_value *root = json_root(&document);
    ok = stopi_read_key(path, root, stops, e);
    if (ok && stops->n == 0) ok = stopi_read_key(path, json_member(root, "text_config"), stops, e);
    json_free(&document);
    return ok;
}

/* Appends to `stops`, which is empty, those of a model directory; none is no error. `t` is its
 * tokenizer, closed if it has none. */
static inline bool stop_read(const char *directory, const tokenizer *t, token_list *stops,
                             error *e) {
    static const char *const names[] = {"[EOS]", "<|im_end|>", "<|end_of_msg|>"};
    if (!stopi_read_file(directory, "generation_config.json", stops, e)) return false;
    if (stops->n == 0 && !stopi_read_file(directory, "config.json", stops, e)) return false;
    bool by_name = stops->n == 0 && tokenizer_memory(t) > 0;
    for (size_t i = 0; by_name && i < sizeof names / sizeof *names; i++) {
        uint32_t id;
        if (tokenizer_special(t, names[i], &id) && !tokens_append(stops, id, e)) return false;
    }
    return true;
}

#endif
