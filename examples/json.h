/* json.h - a strict reader of JSON (RFC 8259) for configurations, shard indexes and tensor headers.
 *
 * In one source file of a program:
 *
 *     #define JSON_IMPLEMENTATION
 *     #include "json.h"
 *
 *     json document;
 *     if (!json_parse(&document, "config.json", text, length, e)) return false;
 *     const json_value *config = json_root(&document);
 *     int64_t layers;
 *     if (!json_integer(json_member(config, "num_hidden_layers"), &layers)) ...
 *     json_free(&document);
 *
 * WHAT IS ACCEPTED
 *   Exactly what the grammar says: no trailing commas, comments, NaN, leading zeros or byte order
 *   mark, nothing after the value. Strings must be valid UTF-8; control characters must be escaped;
 *   a \u surrogate must be half of a pair. Beyond the grammar, a name may occur once in an object,
 *   values nest at most JSON_DEPTH levels deep, and a text is shorter than 2^32 - 1 bytes.
 *
 * MEMORY
 *   A document owns everything reached through it and nothing of the text it was read from. It
 *   may be moved by assignment; what it owns stays where it is until json_free. Values never
 *   change, so any number of threads may read them.
 *
 * COST
 *   Linear in the text for any text, hostile ones included. Per value 32 bytes, plus the contents
 *   of strings; objects with more than a few members carry a hash table, so that looking a member
 *   up does not depend on their number.
 *
 * ERRORS
 *   One sentence in `error`, with the line and column (in bytes) where the text goes wrong:
 *   "config.json: line 3, column 14: expected a value, found '}'".
 */
#ifndef JSON_H
#define JSON_H

#include "error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* 1 where stat, open and mmap may be called: POSIX systems, unless the compiler was told to keep to
 * standard C, as by -std=c11 without -D_POSIX_C_SOURCE=200809L. That can be told only after a
 * system header: error.h brings one. */
#if !defined(_WIN32) && (defined(__APPLE__) || defined(_POSIX_C_SOURCE))
#define JSON_POSIX 1
#else
#define JSON_POSIX 0
#endif

#define JSON_DEPTH 64
#define JSON_NOT_FOUND SIZE_MAX

typedef enum json_kind {
    JSON_NOTHING, /* no value: the kind of NULL, which is what a missing member is */
    JSON_NULL,
    JSON_BOOLEAN,
    JSON_NUMBER,
    JSON_STRING,
    JSON_ARRAY,
    JSON_OBJECT
} json_kind;

/* Read values through the functions below. */
typedef struct json_value json_value;

typedef struct json {
    json_value *root;
    char *strings;              /* names, strings and numbers, each ended by a NUL */
    struct jsoni_block *blocks; /* items and members */
} json;

/* Reads `length` bytes of text. `what` names the text in messages, usually its file. On failure the
 * document is empty: freeing it is allowed, not needed. */
bool json_parse(json *document, const char *what, const char *text, size_t length, error *e);
void json_free(json *document);
const json_value *json_root(const json *document);

/* All of the following accept NULL for a value and treat it as a value of kind JSON_NOTHING, so
 * that lookups can be chained and a missing member is reported like one of the wrong kind. */

json_kind json_kind_of(const json_value *value);

/* The kind with its article, for messages: "an object", "a string", "true or false", "nothing". */
const char *json_kind_name(const json_value *value);

/* The value as a message would quote it: a number as it is written, a string in quotes, either cut
 * to fit; for other kinds the name of the kind. Returns `text`, which has JSON_SHOWN bytes. */
#define JSON_SHOWN 80
const char *json_show(const json_value *value, char *text);

/* Items of an array or members of an object; 0 for every other kind. */
size_t json_count(const json_value *value);

/* Item of an array, or value of a member of an object, in the order of the text; NULL past the
 * last. */
const json_value *json_item(const json_value *value, size_t index);

/* Name of a member. As everywhere, the name ends with a NUL that `length` does not count. Where
 * `length` is NULL the caller relies on that NUL, so a name that holds another gives NULL. */
const char *json_member_name(const json_value *object, size_t index, size_t *length);

/* The member with exactly this name: NULL or JSON_NOT_FOUND if there is none. */
const json_value *json_member(const json_value *object, const char *name);
size_t json_find(const json_value *object, const char *name, size_t length);

/* Contents of a string, NULL for every other kind; `length` as for json_member_name. */
const char *json_string(const json_value *value, size_t *length);

/* Is this a string with exactly these contents? */
bool json_string_is(const json_value *value, const char *text);

/* Each is false, and leaves *out alone, when the value is of another kind or cannot be represented.
 * The integer functions are exact: 3, 3.0, 30e-1 and 3e0 are three, 1.5 and 1e400 are refused.
 * json_number rounds to nearest and refuses what would be infinite. */
bool json_boolean(const json_value *value, bool *out);
bool json_integer(const json_value *value, int64_t *out);
bool json_unsigned(const json_value *value, uint64_t *out);
bool json_number(const json_value *value, double *out);

/* Length of the well-formed UTF-8 sequence that a text begins with; 0 if there is none. */
size_t json_utf8_length(const char *text, size_t length);

/* Files */

/* Whether `path` names a file or directory; true too where that cannot be found out, so that reading
 * says why. */
bool json_is_there(const char *path);

/* False, with a sentence, unless `path` names a regular file: directories, pipes and devices are
 * refused. Where JSON_POSIX is 0 this cannot be told and is always true. */
bool json_check_file(const char *path, error *e);

/* Reads a whole regular file of at most `limit` bytes. The caller frees *bytes, which has a NUL
 * after its end. */
bool json_read_file(const char *path, size_t limit, char **bytes, size_t *length, error *e);

#endif

#if defined(JSON_IMPLEMENTATION) && !defined(JSONI_IMPLEMENTED)
#define JSONI_IMPLEMENTED

#include <errno.h>
#include <float.h>
#include <stdlib.h>
#include <string.h>
#if JSON_POSIX
#include <sys/stat.h>
#endif

/* Lengths have 32 bits, so that a value has 32 bytes and an index of half a million tensors stays
 * small. */
struct json_value {
    const char *name; /* of a member; NULL for other values */
    union {
        const char *text;        /* string, number */
        const json_value *items; /* array, object; an object's hash table follows its members */
    } of;
    uint32_t name_length;
    uint32_t length; /* bytes of text, number of items, or the boolean */
    uint32_t at;     /* where the value, or the member's name, starts in the text */
    json_kind kind;
};

/* ---- Memory of a document ---- */

typedef struct jsoni_block {
    struct jsoni_block *next;
    size_t used, size; /* in bytes, of what follows this head */
} jsoni_block;

/* Memory that lives as long as the document, aligned for pointers; NULL when there is none. */
static void *jsoni_allocate(json *document, size_t bytes) {
    const size_t usual = 16384;
    jsoni_block *block = document->blocks;
    size_t padded = bytes + (sizeof(void *) - bytes % sizeof(void *)) % sizeof(void *);
    if (padded < bytes || padded > SIZE_MAX - sizeof(jsoni_block)) return NULL;
    if (!block || padded > block->size - block->used) {
        size_t size = padded > usual ? padded : usual;
        block = (jsoni_block *)malloc(sizeof(jsoni_block) + size);
        if (!block) return NULL;
        block->next = document->blocks;
        block->used = 0;
        block->size = size;
        document->blocks = block;
    }
    void *memory = (char *)(block + 1) + block->used;
    block->used += padded;
    return memory;
}

void json_free(json *document) {
    while (document->blocks) {
        jsoni_block *next = document->blocks->next;
        free(document->blocks);
        document->blocks = next;
    }
    free(document->strings);
    document->strings = NULL;
    document->root = NULL;
}

/* ---- Where the parser is, and what it says ---- */

typedef struct jsoni_parser {
    json *document;
    const char *what;
    const char *text;
    size_t length, at; /* at <= length */
    size_t depth;
    char *out; /* next free byte of the document's strings; see json_parse for why they fit */
    /* Items of the containers that are still open, outermost first. */
    json_value *stack;
    size_t top, room;
    error *e;
} jsoni_parser;

/* "what: line 1, column 2: " goes before a message about the byte at `at`. */
typedef struct jsoni_place {
    size_t line, column;
} jsoni_place;

static jsoni_place jsoni_locate(const jsoni_parser *p, size_t at) {
    jsoni_place place = {1, 1};
    for (size_t i = 0; i < at; i++) {
        place.column++;
        if (p->text[i] == '\n') {
            place.line++;
            place.column = 1;
        }
    }
    return place;
}

static bool jsoni_fail(const jsoni_parser *p, size_t at, const char *message) {
    jsoni_place place = jsoni_locate(p, at);
    return error_set(p->e, "%s: line %zu, column %zu: %s", p->what, place.line, place.column,
                     message);
}

/* The text at p->at is not what the grammar wants there. */
static bool jsoni_expected(const jsoni_parser *p, const char *expected) {
    char message[128], found[ERROR_FOUND];
    snprintf(message, sizeof message, "expected %s, found %s", expected,
             error_found(p->text, p->length, p->at, found));
    return jsoni_fail(p, p->at, message);
}

static bool jsoni_out_of_memory(const jsoni_parser *p) {
    return error_set(p->e, "%s: not enough memory to read %zu bytes of JSON", p->what, p->length);
}

/* The next byte, or 0 at the end: a NUL is legal nowhere, so it needs no telling apart. */
static unsigned char jsoni_peek(const jsoni_parser *p) {
    return p->at < p->length ? (unsigned char)p->text[p->at] : 0;
}

/* Steps over `c` if it is next. */
static bool jsoni_take(jsoni_parser *p, char c) {
    if (p->at == p->length || p->text[p->at] != c) return false;
    p->at++;
    return true;
}

static void jsoni_skip_space(jsoni_parser *p) {
    while (p->at < p->length) {
        char c = p->text[p->at];
        if (c != ' ' && c != '\n' && c != '\r' && c != '\t') break;
        p->at++;
    }
}

/* ---- Strings ---- */

static bool jsoni_is_continuation(char byte) {
    return ((unsigned char)byte & 0xc0) == 0x80;
}

/* The second byte's range excludes overlong forms, surrogates and what is past U+10FFFF. */
size_t json_utf8_length(const char *text, size_t length) {
    unsigned first = length ? (unsigned char)text[0] : 0xff;
    if (first < 0x80) return 1;
    if (first < 0xc2 || first > 0xf4 || length < 2 || !jsoni_is_continuation(text[1])) return 0;
    if (first < 0xe0) return 2;
    unsigned second = (unsigned char)text[1];
    if ((first == 0xe0 && second < 0xa0) || (first == 0xed && second > 0x9f) ||
        (first == 0xf0 && second < 0x90) || (first == 0xf4 && second > 0x8f) || length < 3 ||
        !jsoni_is_continuation(text[2]))
        return 0;
    if (first < 0xf0) return 3;
    return length > 3 && jsoni_is_continuation(text[3]) ? 4 : 0;
}

static bool jsoni_copy_utf8(jsoni_parser *p) {
    size_t length = json_utf8_length(p->text + p->at, p->length - p->at);
    if (length == 0) {
        char message[64];
        snprintf(message, sizeof message, "invalid UTF-8 in a string (byte 0x%02x)",
                 (unsigned)jsoni_peek(p));
        return jsoni_fail(p, p->at, message);
    }
    memcpy(p->out, p->text + p->at, length);
    p->out += length;
    p->at += length;
    return true;
}

static void jsoni_put_utf8(jsoni_parser *p, uint32_t code) {
    unsigned char bytes[4];
    size_t n = code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    static const unsigned char lead[5] = {0, 0, 0xc0, 0xe0, 0xf0};
    for (size_t i = n; i-- > 1; code >>= 6)
        bytes[i] = (unsigned char)(0x80 | (code & 0x3f));
    bytes[0] = (unsigned char)(lead[n] | code);
    memcpy(p->out, bytes, n);
    p->out += n;
}

/* Four hexadecimal digits. */
static bool jsoni_hex(jsoni_parser *p, uint32_t *code) {
    *code = 0;
    for (int i = 0; i < 4; i++) {
        unsigned c = jsoni_peek(p), lower = c | 0x20;
        if (c >= '0' && c <= '9')
            *code = *code << 4 | (c - '0');
        else if (lower >= 'a' && lower <= 'f')
            *code = *code << 4 | (lower - 'a' + 10);
        else
            return jsoni_expected(p, "four hexadecimal digits after \\u");
        p->at++;
    }
    return true;
}

/* What follows \u: one code unit, or a surrogate pair. `start` is the place of the backslash. */
static bool jsoni_unicode_escape(jsoni_parser *p, size_t start) {
    uint32_t code, low;
    if (!jsoni_hex(p, &code)) return false;
    if (code >= 0xdc00 && code <= 0xdfff)
        return jsoni_fail(p, start, "a low surrogate without a high one before it");
    if (code >= 0xd800 && code <= 0xdbff) {
        if (!jsoni_take(p, '\\') || !jsoni_take(p, 'u'))
            return jsoni_fail(p, start, "a high surrogate without a low one after it");
        if (!jsoni_hex(p, &low)) return false;
        if (low < 0xdc00 || low > 0xdfff)
            return jsoni_fail(p, start, "a high surrogate without a low one after it");
        code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    }
    jsoni_put_utf8(p, code);
    return true;
}

static bool jsoni_escape(jsoni_parser *p) {
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    size_t start = p->at++;
    if (jsoni_take(p, 'u')) return jsoni_unicode_escape(p, start);
    unsigned char c = jsoni_peek(p);
    const char *found = c ? strchr(from, c) : NULL;
    if (!found) return jsoni_expected(p, "one of \"\\/bfnrtu after a backslash");
    *p->out++ = to[found - from];
    p->at++;
    return true;
}

/* The string at p->at, which is at its opening quote, into the document's strings. */
static bool jsoni_string(jsoni_parser *p, const char **text, uint32_t *length) {
    char *start = p->out;
    p->at++;
    while (!jsoni_take(p, '"')) {
        unsigned char c = jsoni_peek(p);
        if (p->at == p->length) return jsoni_expected(p, "'\"' to close a string");
        if (c < 0x20) return jsoni_expected(p, "control characters in a string to be escaped");
        if (c == '\\') {
            if (!jsoni_escape(p)) return false;
        } else if (c >= 0x80) {
            if (!jsoni_copy_utf8(p)) return false;
        } else {
            *p->out++ = (char)c;
            p->at++;
        }
    }
    *text = start;
    *length = (uint32_t)(p->out - start);
    *p->out++ = '\0';
    return true;
}

/* ---- Numbers and words ---- */

static bool jsoni_digits(jsoni_parser *p) {
    size_t start = p->at;
    while (jsoni_peek(p) >= '0' && jsoni_peek(p) <= '9')
        p->at++;
    return p->at > start || jsoni_expected(p, "a digit");
}

/* Checks a number against the grammar and keeps its text: the caller decides later, by the function
 * it calls, what kind of number it should have been. */
static bool jsoni_number(jsoni_parser *p, json_value *value) {
    size_t start = p->at;
    jsoni_take(p, '-');
    if (!jsoni_take(p, '0') && !jsoni_digits(p)) return false;
    if (jsoni_take(p, '.') && !jsoni_digits(p)) return false;
    if (jsoni_take(p, 'e') || jsoni_take(p, 'E')) {
        if (!jsoni_take(p, '+')) jsoni_take(p, '-');
        if (!jsoni_digits(p)) return false;
    }
    value->kind = JSON_NUMBER;
    value->of.text = p->out;
    value->length = (uint32_t)(p->at - start);
    memcpy(p->out, p->text + start, value->length);
    p->out += value->length;
    *p->out++ = '\0';
    return true;
}

static bool jsoni_word(jsoni_parser *p, const char *word, json_kind kind, uint32_t content,
                       json_value *value) {
    for (const char *c = word; *c; c++)
        if (!jsoni_take(p, *c)) return jsoni_expected(p, word);
    value->kind = kind;
    value->length = content;
    return true;
}

/* ---- Names of an object ---- */

/* Up to this many members a search in turn is as fast as a hash table. */
#define JSONI_FEW 8

/* Slots of the hash table after `count` members: a power of two, at most half of it used. A slot
 * holds a member's place plus one; 0 is an empty slot. */
static size_t jsoni_slots(size_t count) {
    size_t slots = 4 * JSONI_FEW;
    if (count <= JSONI_FEW) return 0;
    while (slots / 2 < count)
        slots *= 2;
    return slots;
}

/* FNV-1a, with the well-mixed high half folded into the low bits that select a slot. */
static size_t jsoni_hash(const char *name, size_t length) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < length; i++)
        hash = (hash ^ (unsigned char)name[i]) * 0x100000001b3u;
    return (size_t)(hash ^ hash >> 32);
}

static bool jsoni_has_name(const json_value *member, const char *name, size_t length) {
    return member->name_length == length && memcmp(member->name, name, length) == 0;
}

static uint32_t *jsoni_table(json_value *members, size_t count) {
    return (uint32_t *)(void *)(members + count);
}

static bool jsoni_duplicate(const jsoni_parser *p, const json_value *member) {
    jsoni_place place = jsoni_locate(p, member->at);
    return error_set(p->e,
                     "%s: line %zu, column %zu: the name \"%.200s\" occurs twice in one object",
                     p->what, place.line, place.column, member->name);
}

static bool jsoni_check_few(const jsoni_parser *p, const json_value *members, size_t count) {
    for (size_t i = 1; i < count; i++)
        for (size_t j = 0; j < i; j++)
            if (jsoni_has_name(&members[j], members[i].name, members[i].name_length))
                return jsoni_duplicate(p, &members[i]);
    return true;
}

/* Fills the hash table after the members. Names chosen so that all fall into the same slots would
 * make this quadratic, so the steps are counted: by chance there are fewer than two a name. */
static bool jsoni_index_names(const jsoni_parser *p, json_value *members, size_t count) {
    size_t mask = jsoni_slots(count) - 1, steps = 8 * count + 64;
    uint32_t *table = jsoni_table(members, count);
    memset(table, 0, (mask + 1) * sizeof *table);
    for (size_t i = 0; i < count; i++) {
        const json_value *member = &members[i];
        size_t slot = jsoni_hash(member->name, member->name_length) & mask;
        for (; table[slot]; slot = (slot + 1) & mask) {
            if (jsoni_has_name(&members[table[slot] - 1], member->name, member->name_length))
                return jsoni_duplicate(p, member);
            if (steps-- == 0)
                return jsoni_fail(p, member->at, "too many names of one object share a hash value");
        }
        table[slot] = (uint32_t)(i + 1);
    }
    return true;
}

/* ---- Containers ---- */

static bool jsoni_push(jsoni_parser *p, const json_value *value) {
    if (p->top == p->room) {
        size_t room = p->room ? p->room * 2 : 256;
        json_value *stack = NULL;
        if (room <= SIZE_MAX / sizeof *stack)
            stack = (json_value *)realloc(p->stack, room * sizeof *stack);
        if (!stack) return jsoni_out_of_memory(p);
        p->stack = stack;
        p->room = room;
    }
    p->stack[p->top++] = *value;
    return true;
}

/* Steps over the opening bracket. */
static bool jsoni_open(jsoni_parser *p) {
    if (p->depth == JSON_DEPTH) {
        char message[64];
        snprintf(message, sizeof message, "nested deeper than %d levels", JSON_DEPTH);
        return jsoni_fail(p, p->at, message);
    }
    p->depth++;
    p->at++;
    jsoni_skip_space(p);
    return true;
}

/* Moves the items from `first` up from the stack into the document, as the contents of `value`. */
static bool jsoni_close(jsoni_parser *p, size_t first, json_kind kind, json_value *value) {
    size_t count = p->top - first;
    size_t slots = kind == JSON_OBJECT ? jsoni_slots(count) : 0;
    p->depth--;
    p->top = first;
    value->kind = kind;
    value->length = (uint32_t)count;
    if (count == 0) return true;
    if (slots > (SIZE_MAX - count * sizeof *value) / sizeof(uint32_t))
        return jsoni_out_of_memory(p);
    json_value *items =
        (json_value *)jsoni_allocate(p->document, count * sizeof *value + slots * sizeof(uint32_t));
    if (!items) return jsoni_out_of_memory(p);
    memcpy(items, p->stack + first, count * sizeof *value);
    value->of.items = items;
    if (kind == JSON_ARRAY) return true;
    return slots ? jsoni_index_names(p, items, count) : jsoni_check_few(p, items, count);
}

static bool jsoni_value(jsoni_parser *p, json_value *value);

static bool jsoni_array(jsoni_parser *p, json_value *value) {
    size_t first = p->top;
    if (!jsoni_open(p)) return false;
    if (!jsoni_take(p, ']')) {
        do {
            json_value item;
            if (!jsoni_value(p, &item) || !jsoni_push(p, &item)) return false;
            jsoni_skip_space(p);
        } while (jsoni_take(p, ','));
        if (!jsoni_take(p, ']')) return jsoni_expected(p, "',' or ']'");
    }
    return jsoni_close(p, first, JSON_ARRAY, value);
}

static bool jsoni_member(jsoni_parser *p) {
    json_value member;
    const char *name;
    uint32_t name_length;
    jsoni_skip_space(p);
    size_t at = p->at;
    if (jsoni_peek(p) != '"') return jsoni_expected(p, "'\"' to start a name");
    if (!jsoni_string(p, &name, &name_length)) return false;
    jsoni_skip_space(p);
    if (!jsoni_take(p, ':')) return jsoni_expected(p, "':' after a name");
    if (!jsoni_value(p, &member)) return false;
    member.name = name;
    member.name_length = name_length;
    member.at = (uint32_t)at;
    return jsoni_push(p, &member);
}

static bool jsoni_object(jsoni_parser *p, json_value *value) {
    size_t first = p->top;
    if (!jsoni_open(p)) return false;
    if (!jsoni_take(p, '}')) {
        do {
            if (!jsoni_member(p)) return false;
            jsoni_skip_space(p);
        } while (jsoni_take(p, ','));
        if (!jsoni_take(p, '}')) return jsoni_expected(p, "',' or '}'");
    }
    return jsoni_close(p, first, JSON_OBJECT, value);
}

/* Any value, with space before it. Calls itself through containers, at most JSON_DEPTH deep. */
static bool jsoni_value(jsoni_parser *p, json_value *value) {
    memset(value, 0, sizeof *value);
    jsoni_skip_space(p);
    value->at = (uint32_t)p->at;
    unsigned char c = jsoni_peek(p);
    if (c == '{') return jsoni_object(p, value);
    if (c == '[') return jsoni_array(p, value);
    if (c == '-' || (c >= '0' && c <= '9')) return jsoni_number(p, value);
    if (c == 'n') return jsoni_word(p, "null", JSON_NULL, 0, value);
    if (c == 't') return jsoni_word(p, "true", JSON_BOOLEAN, 1, value);
    if (c == 'f') return jsoni_word(p, "false", JSON_BOOLEAN, 0, value);
    if (c != '"') return jsoni_expected(p, "a value");
    value->kind = JSON_STRING;
    return jsoni_string(p, &value->of.text, &value->length);
}

static bool jsoni_document(jsoni_parser *p) {
    json *document = p->document;
    json_value value;
    if (p->length >= 3 && memcmp(p->text, "\xef\xbb\xbf", 3) == 0)
        return jsoni_fail(p, 0, "the text starts with a byte order mark");
    if (!jsoni_value(p, &value)) return false;
    jsoni_skip_space(p);
    if (p->at < p->length) return jsoni_expected(p, "the end of the text");
    document->root = (json_value *)jsoni_allocate(document, sizeof value);
    if (!document->root) return jsoni_out_of_memory(p);
    *document->root = value;
    return true;
}

bool json_parse(json *document, const char *what, const char *text, size_t length, error *e) {
    jsoni_parser p;
    memset(&p, 0, sizeof p);
    memset(document, 0, sizeof *document);
    p.document = document;
    p.what = what;
    p.text = text;
    p.length = length;
    p.e = e;
    if (length >= UINT32_MAX)
        return error_set(e, "%s: expected less than %lu bytes of JSON, found %zu", what,
                         (unsigned long)UINT32_MAX, length);
    /* No string grows when its escapes are resolved, and its NUL has the place of a quote; a
     * number's NUL has the place of the character after it, or of the one more byte here at the
     * end. */
    document->strings = (char *)malloc(length + 1);
    if (!document->strings) return jsoni_out_of_memory(&p);
    p.out = document->strings;
    bool parsed = jsoni_document(&p);
    free(p.stack);
    if (!parsed) json_free(document);
    return parsed;
}

/* ---- Reading values ---- */

const json_value *json_root(const json *document) {
    return document->root;
}

json_kind json_kind_of(const json_value *value) {
    return value ? value->kind : JSON_NOTHING;
}

const char *json_kind_name(const json_value *value) {
    static const char *const names[] = {"nothing",  "null",     "true or false", "a number",
                                        "a string", "an array", "an object"};
    return names[json_kind_of(value)];
}

const char *json_show(const json_value *value, char *text) {
    json_kind kind = json_kind_of(value);
    if (kind == JSON_STRING)
        snprintf(text, JSON_SHOWN, "\"%.*s\"", JSON_SHOWN - 3, value->of.text);
    else
        snprintf(text, JSON_SHOWN, "%s",
                 kind == JSON_NUMBER ? value->of.text : json_kind_name(value));
    return text;
}

size_t json_count(const json_value *value) {
    json_kind kind = json_kind_of(value);
    return kind == JSON_ARRAY || kind == JSON_OBJECT ? value->length : 0;
}

const json_value *json_item(const json_value *value, size_t index) {
    return index < json_count(value) ? &value->of.items[index] : NULL;
}

/* Hands out text with its length, or, to a caller that takes no length, text without inner NULs. */
static const char *jsoni_text(const char *text, size_t text_length, size_t *length) {
    if (length)
        *length = text_length;
    else if (memchr(text, '\0', text_length))
        return NULL;
    return text;
}

const char *json_member_name(const json_value *object, size_t index, size_t *length) {
    if (json_kind_of(object) != JSON_OBJECT || index >= object->length) return NULL;
    const json_value *member = &object->of.items[index];
    return jsoni_text(member->name, member->name_length, length);
}

size_t json_find(const json_value *object, const char *name, size_t length) {
    if (json_kind_of(object) != JSON_OBJECT) return JSON_NOT_FOUND;
    const json_value *members = object->of.items;
    size_t count = object->length, slots = jsoni_slots(count);
    if (slots == 0) {
        for (size_t i = 0; i < count; i++)
            if (jsoni_has_name(&members[i], name, length)) return i;
        return JSON_NOT_FOUND;
    }
    const uint32_t *table = (const uint32_t *)(const void *)(members + count);
    size_t slot = jsoni_hash(name, length) & (slots - 1);
    for (; table[slot]; slot = (slot + 1) & (slots - 1))
        if (jsoni_has_name(&members[table[slot] - 1], name, length)) return table[slot] - 1;
    return JSON_NOT_FOUND;
}

const json_value *json_member(const json_value *object, const char *name) {
    return json_item(object, json_find(object, name, strlen(name)));
}

const char *json_string(const json_value *value, size_t *length) {
    if (json_kind_of(value) != JSON_STRING) return NULL;
    return jsoni_text(value->of.text, value->length, length);
}

bool json_string_is(const json_value *value, const char *text) {
    size_t length = 0;
    const char *string = json_string(value, &length);
    return string && length == strlen(text) && memcmp(string, text, length) == 0;
}

bool json_boolean(const json_value *value, bool *out) {
    if (json_kind_of(value) != JSON_BOOLEAN) return false;
    *out = value->length != 0;
    return true;
}

/* A number as digits * 10^exponent. Between neighbouring doubles the midpoints have at most 767
 * digits, so past JSONI_DIGITS it only matters whether some digit is not zero. */
#define JSONI_DIGITS 800
typedef struct jsoni_decimal {
    bool negative;
    char digits[JSONI_DIGITS + 1]; /* none for zero, else the first and last are not '0' */
    size_t count;
    int64_t exponent;
} jsoni_decimal;

/* Puts `zeros` zeros and a digit at the end; what does not fit is counted by the exponent. */
static void jsoni_append(jsoni_decimal *d, int64_t zeros, char digit) {
    while (zeros > 0 && d->count < JSONI_DIGITS) {
        d->digits[d->count++] = '0';
        zeros--;
    }
    if (d->count < JSONI_DIGITS) {
        d->digits[d->count++] = digit;
        return;
    }
    d->digits[JSONI_DIGITS - 1] |= 1; /* '0' becomes '1'; others stay nonzero */
    d->exponent += zeros + 1;
}

static int64_t jsoni_exponent(const char *text) {
    const int64_t enough = (int64_t)1 << 50; /* far more than a text has digits */
    int64_t exponent = 0;
    bool negative = *text == '-';
    if (*text == '-' || *text == '+') text++;
    for (; *text; text++)
        if (exponent < enough) exponent = 10 * exponent + (*text - '0');
    return negative ? -exponent : exponent;
}

/* `text` follows the grammar of a number. */
static void jsoni_decompose(const char *text, jsoni_decimal *d) {
    bool after_point = false;
    int64_t zeros = 0; /* since the last digit kept */
    memset(d, 0, sizeof *d);
    d->negative = *text == '-';
    if (d->negative) text++;
    for (; *text && *text != 'e' && *text != 'E'; text++) {
        if (*text == '.') {
            after_point = true;
            continue;
        }
        if (after_point) d->exponent--;
        if (*text != '0') {
            jsoni_append(d, zeros, *text);
            zeros = 0;
        } else if (d->count) {
            zeros++;
        }
    }
    d->exponent += zeros;
    if (*text) d->exponent += jsoni_exponent(text + 1);
}

/* The magnitude of a number that is an integer below 2^64. */
static bool jsoni_magnitude(const json_value *value, bool *negative, uint64_t *magnitude) {
    if (json_kind_of(value) != JSON_NUMBER) return false;
    jsoni_decimal d;
    jsoni_decompose(value->of.text, &d);
    *negative = d.negative;
    *magnitude = 0;
    if (d.count == 0) return true;
    if (d.exponent < 0 || d.exponent > 20) return false;
    size_t places = d.count + (size_t)d.exponent;
    for (size_t i = 0; i < places; i++) {
        unsigned digit = i < d.count ? (unsigned)(d.digits[i] - '0') : 0;
        if (*magnitude > (UINT64_MAX - digit) / 10) return false;
        *magnitude = *magnitude * 10 + digit;
    }
    return true;
}

bool json_unsigned(const json_value *value, uint64_t *out) {
    bool negative;
    uint64_t magnitude;
    if (!jsoni_magnitude(value, &negative, &magnitude)) return false;
    if (negative && magnitude) return false;
    *out = magnitude;
    return true;
}

bool json_integer(const json_value *value, int64_t *out) {
    bool negative;
    uint64_t magnitude;
    if (!jsoni_magnitude(value, &negative, &magnitude)) return false;
    if (negative && magnitude) {
        if (magnitude - 1 > (uint64_t)INT64_MAX) return false;
        *out = -(int64_t)(magnitude - 1) - 1;
        return true;
    }
    if (magnitude > (uint64_t)INT64_MAX) return false;
    *out = (int64_t)magnitude;
    return true;
}

bool json_number(const json_value *value, double *out) {
    if (json_kind_of(value) != JSON_NUMBER) return false;
    jsoni_decimal d;
    char text[JSONI_DIGITS + 16];
    jsoni_decompose(value->of.text, &d);
    /* Beyond these bounds every number of so many digits is infinite or zero. */
    if (d.exponent > 9999) d.exponent = 9999;
    if (d.exponent < -9999) d.exponent = -9999;
    /* Without a point, because strtod expects the one of the current locale. */
    snprintf(text, sizeof text, "%s%s%se%d", d.negative ? "-" : "", d.count ? "" : "0", d.digits,
             (int)d.exponent);
    double number = strtod(text, NULL);
    if (!(number >= -DBL_MAX && number <= DBL_MAX)) return false;
    *out = number;
    return true;
}

/* ---- Files ---- */

#if JSON_POSIX
bool json_is_there(const char *path) {
    struct stat status;
    return stat(path, &status) == 0 || (errno != ENOENT && errno != ENOTDIR);
}

bool json_check_file(const char *path, error *e) {
    struct stat status;
    if (stat(path, &status) != 0) {
        if (errno == ENOENT || errno == ENOTDIR) return error_set(e, "%s: file not found", path);
        return error_set(e, "%s: cannot be examined: %s", path, strerror(errno));
    }
    if (S_ISDIR(status.st_mode)) return error_set(e, "%s: is a directory, not a file", path);
    if (!S_ISREG(status.st_mode)) return error_set(e, "%s: is not a regular file", path);
    return true;
}
#else
bool json_is_there(const char *path) {
    errno = 0;
    FILE *file = fopen(path, "rb");
    if (file) fclose(file);
#ifdef ENOTDIR /* which C alone does not name */
    if (errno == ENOTDIR) return false;
#endif
    return file || errno != ENOENT;
}

bool json_check_file(const char *path, error *e) {
    (void)path;
    (void)e;
    return true;
}
#endif

/* Reads to the end of the file, or one byte more than the limit; false when memory runs out. */
static bool jsoni_read_stream(FILE *file, size_t limit, char **bytes, size_t *length) {
    size_t room = 0, want, got;
    do {
        if (room - *length < 2) {
            size_t more = room ? room : 65536;
            room = room > SIZE_MAX - more ? SIZE_MAX : room + more;
            char *larger = (char *)realloc(*bytes, room);
            if (!larger) return false;
            *bytes = larger;
        }
        want = room - *length - 1;
        if (want > limit - *length) want = limit - *length + 1;
        got = fread(*bytes + *length, 1, want, file);
        *length += got;
    } while (got > 0 && *length <= limit);
    (*bytes)[*length] = '\0';
    return true;
}

bool json_read_file(const char *path, size_t limit, char **bytes, size_t *length, error *e) {
    *bytes = NULL;
    *length = 0;
    if (!json_check_file(path, e)) return false;
    errno = 0;
    FILE *file = fopen(path, "rb");
    if (!file) {
        if (errno == ENOENT) return error_set(e, "%s: file not found", path);
        return error_set(e, "%s: cannot be opened: %s", path, strerror(errno));
    }
    bool ok = jsoni_read_stream(file, limit, bytes, length);
    if (!ok)
        error_set(e, "%s: not enough memory to read the file", path);
    else if (ferror(file))
        ok = error_set(e, "%s: cannot be read: %s", path, strerror(errno));
    else if (*length > limit)
        ok = error_set(e, "%s: larger than the %zu bytes allowed", path, limit);
    fclose(file);
    if (!ok) {
        free(*bytes);
        *bytes = NULL;
        *length = 0;
    }
    return ok;
}

#endif
