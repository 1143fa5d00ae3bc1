/* tokens.h - lists of token ids: out of a file of numbers, or a text's bytes.
 *
 * Every function is static.
 */
#ifndef TOKENS_H
#define TOKENS_H

#include "arguments.h"
#include "error.h"

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Zeroed it is empty. */
typedef struct token_list {
    uint32_t *ids; /* to be freed by the owner */
    size_t n, room;
} token_list;

static inline bool tokens_append(token_list *list, uint32_t id, error *e) {
    if (list->n == list->room) {
        size_t room = list->room ? 2 * list->room : 256;
        /* Twice what was allocated before is still a size_t. */
        uint32_t *ids = (uint32_t *)realloc(list->ids, room * sizeof *ids);
        if (!ids) return error_set(e, "no memory for %zu tokens", room);
        list->ids = ids;
        list->room = room;
    }
    list->ids[list->n++] = id;
    return true;
}

/* Reads up to the end of a word; 0 at the end of the file. Of one that is too long the last byte
 * kept is '?', so that it is no number whatever follows. */
static size_t tokensi_word(FILE *file, char *word, size_t size) {
    size_t n = 0;
    int c = getc(file);
    while (c == ' ' || (c >= '\t' && c <= '\r')) c = getc(file);
    for (; c != EOF && c != ' ' && !(c >= '\t' && c <= '\r'); c = getc(file))
        if (n + 1 < size)
            word[n++] = (char)(c ? c : '?');
        else
            word[n - 1] = '?';
    word[n] = '\0';
    return n;
}

static bool tokensi_ids(FILE *file, const char *path, token_list *list, error *e) {
    char word[32], what[300];
    while (tokensi_word(file, word, sizeof word) > 0) {
        uint64_t id = 0;
        snprintf(what, sizeof what, "%.250s: token %zu", path, list->n + 1);
        if (!arguments_integer(what, word, 0, UINT32_MAX, &id, e) ||
            !tokens_append(list, (uint32_t)id, e))
            return false;
    }
    return true;
}

static bool tokensi_bytes(FILE *file, token_list *list, error *e) {
    for (int c = getc(file); c != EOF; c = getc(file))
        if (!tokens_append(list, (uint32_t)c, e)) return false;
    return true;
}

/* Appends what a file holds: ids separated by white space, or bytes, each the id of its value. "-"
 * is standard input. */
static inline bool tokens_read(const char *path, bool bytes, token_list *list, error *e) {
    bool standard = strcmp(path, "-") == 0;
    const char *name = standard ? "standard input" : path;
    FILE *file = standard ? stdin : fopen(path, "rb");
    if (!file) return error_set(e, "%s: cannot open: %s", name, strerror(errno));
    bool ok = bytes ? tokensi_bytes(file, list, e) : tokensi_ids(file, name, list, e);
    if (ok && ferror(file)) ok = error_set(e, "%s: cannot read: %s", name, strerror(errno));
    if (!standard) fclose(file);
    return ok;
}

/* Is a model one whose ids can be bytes? One that brings a tokenizer would not understand them.
 * `what` is what gives the bytes, `instead` what would give ids. */
static inline bool tokens_are_bytes(const char *model, const char *what, const char *instead,
                                    error *e) {
    char path[4096];
    snprintf(path, sizeof path, "%s/tiktoken.model", model);
    FILE *tokenizer = fopen(path, "rb");
    if (!tokenizer) return true;
    fclose(tokenizer);
    return error_set(e,
                     "%s: expected no tokenizer with %s, which this version turns into bytes; give "
                     "ids with %s",
                     path, what, instead);
}

#endif
