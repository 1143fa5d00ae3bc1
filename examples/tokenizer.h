/* tokenizer.h - text to token ids and back, with the byte-pair vocabulary of a Kimi model.
 *
 * In one source file of a program (this also brings in the bodies of json.h):
 *
 *     #define TOKENIZER_IMPLEMENTATION
 *     #include "tokenizer.h"
 *
 *     tokenizer t;
 *     if (!tokenizer_open(&t, "path/to/directory", e)) return false;
 *     token_list prompt = {0};
 *     if (!tokenizer_encode(&t, text, length, TOKENIZER_SPECIAL, &prompt, NULL, e)) ...
 *     tokenizer_stream stream = {0};
 *     text = tokenizer_stream_push(&stream, &t, id, &length);
 *     free(prompt.ids);
 *     tokenizer_close(&t);
 *
 * THE VOCABULARY
 *   tiktoken.model: a line for each token, its bytes in base64, a space and its rank, which is also
 *   its id. After the n ranks follow TOKENIZER_SPECIALS special tokens. Their names are those that
 *   added_tokens_decoder in tokenizer_config.json gives; without that file, those that all Kimi
 *   models share: n [BOS], n+1 [EOS], n+9 [EOT], n+254 [UNK], n+255 [PAD]. The others are called
 *   <|reserved_token_ID|>.
 *
 * WHAT IS COMPUTED
 *   Text is cut into pieces, the leftmost match of these alternatives, the first that matches:
 *
 *     [\p{Han}]+
 *     [^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*
 *                       [\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?
 *     [^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+
 *                       [\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?
 *     \p{N}{1,3}
 *      ?[^\s\p{L}\p{N}]+[\r\n]*
 *     \s*[\r\n]+
 *     \s+(?!\S)
 *     \s+
 *
 *   A piece that is a token is that token. Any other starts as single bytes; of the neighbours that
 *   join into a token those of the lowest rank, the first of equals, are joined, until there are
 *   none.
 *   Before all that the text is cut where the vendor's code cuts it: every 400,000 characters, and
 *   where 25,000 characters in a row are white space or are not.
 *   Sources: Moonshot's tokenization_kimi.py; tiktoken, whose ids these are for all of UTF-8.
 *   What is not UTF-8 counts byte by byte as punctuation, so that any bytes come back when decoded.
 *
 * WHAT IS CHECKED
 *   Base64 is strict; n ranks are 0 to n - 1; no token, rank, special id or name occurs twice;
 *   every byte is a token, so that every text has ids; a token has at most TOKENIZER_MAX_TOKEN
 *   bytes.
 *
 * COST
 *   For a piece of n bytes O(n log n) steps, whatever the vocabulary. Encoding allocates its
 *   result, and 32 bytes for each byte of a piece that is longer than TOKENIZERI_SHORT.
 *
 * MEMORY
 *   Everything is the tokenizer's until tokenizer_close; it may be moved by assignment. Nothing
 *   changes after opening, so any number of threads may encode and decode.
 *
 * ERRORS
 *   One sentence in `error` that names the file and the line:
 *   "tiktoken.model: line 3, column 5: expected a base64 digit or a space, found byte 0x00".
 */
#ifndef TOKENIZER_H
#define TOKENIZER_H

#include "error.h"
#include "json.h"
#include "tokens.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define TOKENIZER_SPECIALS 256
#define TOKENIZER_MAX_TOKEN 4096 /* bytes */
#define TOKENIZER_MAX_RANKS ((size_t)1 << 20)

/* Read through the functions below. */
typedef struct tokenizer {
    char *bytes;                   /* of all tokens, in no order */
    struct tokenizeri_span *spans; /* [n_ranks + TOKENIZER_SPECIALS]: where each one's are */
    struct tokenizeri_slot *slots; /* hash table of the ranks */
    size_t mask;                   /* slots less one */
    size_t n_bytes;                /* allocated for tokens */
    size_t n_ranks;
    size_t longest;                       /* bytes of a rank's token */
    uint32_t byte_ids[256];               /* of the tokens of one byte */
    uint32_t by_name[TOKENIZER_SPECIALS]; /* special ids, in the order of their names' bytes */
    unsigned char special_starts[256];    /* does a special token's name start with this byte? */
    unsigned char ascii_kinds[128];
} tokenizer;

/* Opens the tokenizer of a model directory. On failure it is empty: closing it is allowed, not
 * needed. */
bool tokenizer_open(tokenizer *t, const char *directory, error *e);
void tokenizer_close(tokenizer *t);

/* Is there a tokenizer to open? */
bool tokenizer_is_in(const char *directory);

/* Bytes of memory that an open tokenizer holds beside itself. */
size_t tokenizer_memory(const tokenizer *t);

/* Ids are below this. */
size_t tokenizer_count(const tokenizer *t);

/* The id of a special token, such as "[EOS]"; false if no special token has this name. */
bool tokenizer_special(const tokenizer *t, const char *name, uint32_t *id);

/* ---- Text to ids ---- */

typedef enum tokenizer_flags {
    TOKENIZER_SPECIAL = 1 /* names of special tokens in the text are these, not text */
} tokenizer_flags;

/* Appends the ids of `length` bytes of text. Of special names that start at one place the longest
 * counts. Adds to *steps, unless `steps` is null, the steps that joining bytes has taken: a measure
 * of cost that no clock disturbs. Fails only for want of memory, and appends nothing then. */
bool tokenizer_encode(const tokenizer *t, const char *text, size_t length, unsigned flags,
                      token_list *ids, uint64_t *steps, error *e);

/* ---- Ids to text ---- */

/* The bytes of a token, for a special one its name; NULL for an id that there is not. They need be
 * no UTF-8 and may hold a NUL; none follows them. */
const char *tokenizer_bytes(const tokenizer *t, uint32_t id, size_t *length);

/* Text that comes token by token; starts as {0}. What push and flush return, one after another, is
 * what the tokens hold, never cut within a character: bytes that may yet become one wait. The text
 * is the stream's until the next call. */
typedef struct tokenizer_stream {
    char bytes[TOKENIZER_MAX_TOKEN + 4];
    size_t start, waiting; /* the bytes that wait are bytes[start] and on */
} tokenizer_stream;

/* NULL for an id that there is not; the stream is unchanged then. */
const char *tokenizer_stream_push(tokenizer_stream *stream, const tokenizer *t, uint32_t id,
                                  size_t *length);

/* What still waits at the end of the text, which is then no whole character. */
const char *tokenizer_stream_flush(tokenizer_stream *stream, size_t *length);

#endif

#if defined(TOKENIZER_IMPLEMENTATION) && !defined(TOKENIZERI_IMPLEMENTED)
#define TOKENIZERI_IMPLEMENTED

#if !defined(JSON_IMPLEMENTATION)
#define JSON_IMPLEMENTATION
#endif
#include "json.h"
#include "unicode.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#define TOKENIZERI_NONE UINT32_MAX
#define TOKENIZERI_FILE_LIMIT ((size_t)1 << 26)
#define TOKENIZERI_PATH 4096
#define TOKENIZERI_MAX_NAME 256 /* bytes of a special token's name */

typedef struct tokenizeri_span {
    uint32_t at, length; /* length 0: not yet read */
} tokenizeri_span;

typedef struct tokenizeri_slot {
    uint32_t hash, id; /* id TOKENIZERI_NONE: empty */
} tokenizeri_slot;

/* ---- Tokens by their bytes ---- */

/* FNV-1a, with the well-mixed high half folded into the low bits that select a slot. */
static uint32_t tokenizeri_hash(const char *bytes, size_t length) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < length; i++) hash = (hash ^ (unsigned char)bytes[i]) * 0x100000001b3u;
    return (uint32_t)(hash ^ hash >> 32);
}

/* The rank whose token has these bytes, or TOKENIZERI_NONE. */
static uint32_t tokenizeri_find(const tokenizer *t, const char *bytes, size_t length) {
    if (length > t->longest) return TOKENIZERI_NONE;
    uint32_t hash = tokenizeri_hash(bytes, length);
    for (size_t i = hash & t->mask;; i = (i + 1) & t->mask) {
        tokenizeri_slot slot = t->slots[i];
        if (slot.id == TOKENIZERI_NONE) return TOKENIZERI_NONE;
        if (slot.hash != hash) continue;
        tokenizeri_span span = t->spans[slot.id];
        if (span.length == length && memcmp(t->bytes + span.at, bytes, length) == 0) return slot.id;
    }
}

size_t tokenizer_count(const tokenizer *t) {
    return t->n_ranks + TOKENIZER_SPECIALS;
}

const char *tokenizer_bytes(const tokenizer *t, uint32_t id, size_t *length) {
    if (id >= tokenizer_count(t)) return NULL;
    *length = t->spans[id].length;
    return t->bytes + t->spans[id].at;
}

/* ---- Reading tiktoken.model ---- */

typedef struct tokenizeri_reader {
    tokenizer *t;
    const char *path, *text;
    size_t length, at;
    size_t line, line_start; /* counted from 1; where it starts */
    size_t used;             /* of the tokenizer's bytes */
    size_t steps;            /* that the hash table may still take */
    error *e;
} tokenizeri_reader;

#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
static bool
tokenizeri_fail(const tokenizeri_reader *r, const char *format, ...) {
    char message[256];
    va_list values;
    va_start(values, format);
    vsnprintf(message, sizeof message, format, values);
    va_end(values);
    return error_set(r->e, "%s: line %zu, %s", r->path, r->line, message);
}

/* The byte at r->at is not what belongs there. */
static bool tokenizeri_expected(const tokenizeri_reader *r, const char *expected) {
    char found[ERROR_FOUND];
    return tokenizeri_fail(r, "column %zu: expected %s, found %s", r->at - r->line_start + 1,
                           expected, error_found(r->text, r->length, r->at, found));
}

/* Value of a base64 digit, 64 for other bytes. */
static unsigned tokenizeri_digit(char c) {
    if (c >= 'A' && c <= 'Z') return (unsigned)(c - 'A');
    if (c >= 'a' && c <= 'z') return (unsigned)(c - 'a') + 26;
    if (c >= '0' && c <= '9') return (unsigned)(c - '0') + 52;
    return c == '+' ? 62 : c == '/' ? 63 : 64;
}

static bool tokenizeri_next_is(const tokenizeri_reader *r, char c) {
    return r->at < r->length && r->text[r->at] == c;
}

/* Reads base64 up to the space behind it, to the end of the tokenizer's bytes. */
static bool tokenizeri_read_token(tokenizeri_reader *r, size_t *length) {
    size_t start = r->at, digits, padding;
    char *out = r->t->bytes + r->used;
    uint32_t bits = 0;
    unsigned n_bits = 0;
    while (r->at < r->length && tokenizeri_digit(r->text[r->at]) < 64) r->at++;
    digits = r->at - start;
    while (digits && r->at - start - digits < 2 && tokenizeri_next_is(r, '=')) r->at++;
    padding = r->at - start - digits;
    if (!tokenizeri_next_is(r, ' '))
        return tokenizeri_expected(r, "a base64 digit or the space after a token");
    if (digits == 0 || (digits + padding) % 4)
        return tokenizeri_fail(
            r, "token: expected base64 in groups of 4, found %zu digits and %zu '='", digits,
            padding);
    *length = digits * 3 / 4;
    if (*length > TOKENIZER_MAX_TOKEN)
        return tokenizeri_fail(r, "token: expected at most %d bytes, found %zu",
                               TOKENIZER_MAX_TOKEN, *length);
    for (size_t i = 0; i < digits; i++) {
        bits = bits << 6 | tokenizeri_digit(r->text[start + i]);
        n_bits += 6;
        if (n_bits < 8) continue;
        n_bits -= 8;
        *out++ = (char)(unsigned char)(bits >> n_bits);
    }
    if (bits & ((1u << n_bits) - 1))
        return tokenizeri_fail(
            r, "token: expected a last base64 digit with no bits to spare, found '%c'",
            r->text[start + digits - 1]);
    return true;
}

static bool tokenizeri_read_rank(tokenizeri_reader *r, uint32_t *rank) {
    size_t start = r->at, value = 0;
    for (; r->at < r->length && r->text[r->at] >= '0' && r->text[r->at] <= '9'; r->at++)
        if (value <= TOKENIZER_MAX_RANKS) value = value * 10 + (size_t)(r->text[r->at] - '0');
    if (r->at == start) return tokenizeri_expected(r, "a rank");
    if (r->at < r->length && r->text[r->at] != '\n')
        return tokenizeri_expected(r, "a digit or the end of the line");
    if (value >= r->t->n_ranks)
        return tokenizeri_fail(r, "expected a rank below the %zu lines of the file, found %.*s",
                               r->t->n_ranks, r->at - start < 40 ? (int)(r->at - start) : 40,
                               r->text + start);
    *rank = (uint32_t)value;
    return true;
}

/* Tokens chosen so that all fall into the same slots would make this quadratic, so the steps are
 * counted: by chance there are fewer than two a token. */
static bool tokenizeri_insert(tokenizeri_reader *r, uint32_t rank, size_t length) {
    tokenizer *t = r->t;
    const char *bytes = t->bytes + r->used;
    uint32_t hash = tokenizeri_hash(bytes, length);
    size_t i = hash & t->mask;
    if (t->spans[rank].length) return tokenizeri_fail(r, "rank %u occurs twice", (unsigned)rank);
    for (; t->slots[i].id != TOKENIZERI_NONE; i = (i + 1) & t->mask) {
        tokenizeri_span other = t->spans[t->slots[i].id];
        if (other.length == length && memcmp(t->bytes + other.at, bytes, length) == 0)
            return tokenizeri_fail(r, "the token of rank %u occurs again",
                                   (unsigned)t->slots[i].id);
        if (r->steps-- == 0) return tokenizeri_fail(r, "too many tokens share a hash value");
    }
    t->slots[i].hash = hash, t->slots[i].id = rank;
    t->spans[rank].at = (uint32_t)r->used, t->spans[rank].length = (uint32_t)length;
    if (length == 1) t->byte_ids[(unsigned char)*bytes] = rank;
    if (length > t->longest) t->longest = length;
    r->used += length;
    return true;
}

static bool tokenizeri_read_lines(tokenizeri_reader *r) {
    for (r->line = 1; r->at < r->length; r->line++, r->at++) {
        uint32_t rank = 0;
        size_t length = 0;
        r->line_start = r->at;
        if (!tokenizeri_read_token(r, &length)) return false;
        r->at++;
        if (!tokenizeri_read_rank(r, &rank) || !tokenizeri_insert(r, rank, length)) return false;
    }
    return true;
}

static bool tokenizeri_out_of_memory(const char *path, error *e) {
    return error_set(e, "%s: not enough memory for the tokenizer", path);
}

/* Room for the tokens of a text of so many lines, and for the special tokens. */
static bool tokenizeri_allocate(tokenizeri_reader *r, size_t lines) {
    tokenizer *t = r->t;
    size_t slots = 1024;
    while (slots / 2 < lines) slots *= 2;
    t->n_ranks = lines;
    t->mask = slots - 1;
    t->n_bytes = r->length / 4 * 3 + TOKENIZER_SPECIALS * TOKENIZERI_MAX_NAME;
    t->bytes = (char *)malloc(t->n_bytes);
    t->spans = (tokenizeri_span *)calloc(tokenizer_count(t), sizeof *t->spans);
    t->slots = (tokenizeri_slot *)malloc(slots * sizeof *t->slots);
    if (!t->bytes || !t->spans || !t->slots) return tokenizeri_out_of_memory(r->path, r->e);
    memset(t->slots, 0xff, slots * sizeof *t->slots); /* ids of TOKENIZERI_NONE */
    memset(t->byte_ids, 0xff, sizeof t->byte_ids);
    r->steps = 8 * lines + 64;
    return true;
}

/* With as many ranks as lines, each below their number and none twice, none is missing. */
static bool tokenizeri_read_model(tokenizeri_reader *r) {
    size_t lines = 0;
    for (size_t i = 0; i < r->length; i++) lines += r->text[i] == '\n';
    if (r->length && r->text[r->length - 1] != '\n') lines++;
    if (lines == 0 || lines > TOKENIZER_MAX_RANKS)
        return error_set(r->e, "%s: expected from 1 to %zu lines, found %zu", r->path,
                         TOKENIZER_MAX_RANKS, lines);
    if (!tokenizeri_allocate(r, lines) || !tokenizeri_read_lines(r)) return false;
    for (unsigned b = 0; b < 256; b++)
        if (r->t->byte_ids[b] == TOKENIZERI_NONE)
            return error_set(r->e,
                             "%s: expected every byte to be a token, found none for byte 0x%02x",
                             r->path, b);
    return true;
}

/* ---- Special tokens ---- */

typedef struct tokenizeri_name {
    const char *text;
    size_t length;
} tokenizeri_name;

static const struct tokenizeri_known {
    size_t place; /* after the ranks */
    tokenizeri_name name;
} tokenizeri_known[] = {{0, {"[BOS]", 5}},
                        {1, {"[EOS]", 5}},
                        {9, {"[EOT]", 5}},
                        {254, {"[UNK]", 5}},
                        {255, {"[PAD]", 5}}};

/* Fewer than zero, zero or more, as the name of special token `a` comes before that of `b`. */
static int tokenizeri_compare(const tokenizer *t, uint32_t a, uint32_t b) {
    tokenizeri_span x = t->spans[a], y = t->spans[b];
    int order = memcmp(t->bytes + x.at, t->bytes + y.at, x.length < y.length ? x.length : y.length);
    return order ? order : x.length < y.length ? -1 : x.length > y.length;
}

/* A name of at most TOKENIZERI_MAX_NAME bytes, at `place` after the ranks; `path` is where it
 * comes from. */
static bool tokenizeri_add_special(tokenizeri_reader *r, const char *path, uint32_t place,
                                   tokenizeri_name name) {
    tokenizer *t = r->t;
    uint32_t id = (uint32_t)t->n_ranks + place;
    size_t i = place;
    memcpy(t->bytes + r->used, name.text, name.length);
    t->spans[id].at = (uint32_t)r->used, t->spans[id].length = (uint32_t)name.length;
    r->used += name.length;
    t->special_starts[(unsigned char)*name.text] = 1;
    for (; i > 0; i--) {
        int order = tokenizeri_compare(t, id, t->by_name[i - 1]);
        if (order == 0)
            return error_set(r->e, "%s: the special tokens %u and %u have the same name, %.*s",
                             path, (unsigned)t->by_name[i - 1], (unsigned)id, (int)name.length,
                             name.text);
        if (order > 0) break;
        t->by_name[i] = t->by_name[i - 1];
    }
    t->by_name[i] = id;
    return true;
}

/* `names` [TOKENIZER_SPECIALS]: text null for a special token without a name. */
static bool tokenizeri_add_specials(tokenizeri_reader *r, const char *path,
                                    const tokenizeri_name *names) {
    for (uint32_t i = 0; i < TOKENIZER_SPECIALS; i++) {
        char reserved[40];
        tokenizeri_name name = names[i];
        if (!name.text) {
            name.length = (size_t)snprintf(reserved, sizeof reserved, "<|reserved_token_%zu|>",
                                           r->t->n_ranks + i);
            name.text = reserved;
        }
        if (!tokenizeri_add_special(r, path, i, name)) return false;
    }
    return true;
}

/* The special token that a member of added_tokens_decoder is about: its key in decimal, without
 * leading zeros, so that two keys are two tokens. */
static bool tokenizeri_read_place(const tokenizer *t, const char *path, const char *key,
                                  size_t *place, error *e) {
    size_t id = 0, last = tokenizer_count(t) - 1;
    const char *c = key;
    for (; *c >= '0' && *c <= '9' && id <= last; c++) id = id * 10 + (size_t)(*c - '0');
    if (*c || c == key || (*key == '0' && key[1]) || id < t->n_ranks || id > last)
        return error_set(e,
                         "%s: added_tokens_decoder: expected ids from %zu to %zu, found \"%.40s\"",
                         path, t->n_ranks, last, key);
    *place = id - t->n_ranks;
    return true;
}

static bool tokenizeri_read_names(const tokenizer *t, const char *path, const json_value *added,
                                  tokenizeri_name *names, error *e) {
    char shown[JSON_SHOWN];
    if (json_kind_of(added) != JSON_OBJECT)
        return error_set(e, "%s: added_tokens_decoder: expected an object, found %s", path,
                         json_show(added, shown));
    for (size_t i = 0; i < json_count(added); i++) {
        const char *key = json_member_name(added, i, NULL);
        const json_value *content = json_member(json_item(added, i), "content");
        size_t length = 0, place = 0;
        const char *text = json_string(content, &length);
        if (!tokenizeri_read_place(t, path, key ? key : "", &place, e)) return false;
        if (!text || length == 0 || length > TOKENIZERI_MAX_NAME)
            return error_set(e,
                             "%s: added_tokens_decoder: %s: content: expected a string of 1 to %d "
                             "bytes, found %s",
                             path, key, TOKENIZERI_MAX_NAME, json_show(content, shown));
        names[place].text = text, names[place].length = length;
    }
    return true;
}

/* `text` is that of tokenizer_config.json; null: there is none. */
static bool tokenizeri_read_specials(tokenizeri_reader *r, const char *path, const char *text,
                                     size_t length) {
    tokenizeri_name names[TOKENIZER_SPECIALS];
    json config;
    memset(names, 0, sizeof names);
    if (!text) {
        for (size_t i = 0; i < sizeof tokenizeri_known / sizeof *tokenizeri_known; i++)
            names[tokenizeri_known[i].place] = tokenizeri_known[i].name;
        return tokenizeri_add_specials(r, r->path, names);
    }
    if (!json_parse(&config, path, text, length, r->e)) return false;
    const json_value *added = json_member(json_root(&config), "added_tokens_decoder");
    bool ok = tokenizeri_read_names(r->t, path, added, names, r->e) &&
              tokenizeri_add_specials(r, path, names);
    json_free(&config);
    return ok;
}

/* ---- Opening ---- */

static unsigned tokenizeri_kind_of(uint32_t code); /* below, with what it is for */

static bool tokenizeri_path(char *path, const char *directory, const char *name, error *e) {
    return (size_t)snprintf(path, TOKENIZERI_PATH, "%s/%s", directory, name) < TOKENIZERI_PATH ||
           error_set(e, "%.60s...: expected a shorter path", directory);
}

bool tokenizer_is_in(const char *directory) {
    char path[TOKENIZERI_PATH];
    error e;
    return tokenizeri_path(path, directory, "tiktoken.model", &e) && json_is_there(path);
}

/* A text and what messages call it. */
typedef struct tokenizeri_file {
    char path[TOKENIZERI_PATH];
    char *text; /* null: there is no such file */
    size_t length;
} tokenizeri_file;

static bool tokenizeri_read_file(tokenizeri_file *file, error *e) {
    return json_read_file(file->path, TOKENIZERI_FILE_LIMIT, &file->text, &file->length, e);
}

/* From the texts of tiktoken.model and of tokenizer_config.json. */
static bool tokenizeri_open(tokenizer *t, const tokenizeri_file *model,
                            const tokenizeri_file *config, error *e) {
    tokenizeri_reader r;
    memset(t, 0, sizeof *t);
    memset(&r, 0, sizeof r);
    r.t = t, r.path = model->path, r.text = model->text, r.length = model->length, r.e = e;
    bool ok = tokenizeri_read_model(&r) &&
              tokenizeri_read_specials(&r, config->path, config->text, config->length);
    for (uint32_t c = 0; c < 128; c++) t->ascii_kinds[c] = (unsigned char)tokenizeri_kind_of(c);
    if (!ok) tokenizer_close(t);
    return ok;
}

bool tokenizer_open(tokenizer *t, const char *directory, error *e) {
    tokenizeri_file model = {"", NULL, 0}, config = {"", NULL, 0};
    memset(t, 0, sizeof *t);
    bool ok = tokenizeri_path(model.path, directory, "tiktoken.model", e) &&
              tokenizeri_path(config.path, directory, "tokenizer_config.json", e) &&
              tokenizeri_read_file(&model, e) &&
              (!json_is_there(config.path) || tokenizeri_read_file(&config, e)) &&
              tokenizeri_open(t, &model, &config, e);
    free(model.text), free(config.text);
    return ok;
}

size_t tokenizer_memory(const tokenizer *t) {
    if (!t->bytes) return 0;
    return t->n_bytes + tokenizer_count(t) * sizeof *t->spans + (t->mask + 1) * sizeof *t->slots;
}

void tokenizer_close(tokenizer *t) {
    free(t->bytes), free(t->spans), free(t->slots);
    memset(t, 0, sizeof *t);
}

/* ---- Characters ---- */

/* What the alternatives ask of a character. */
enum {
    TOKENIZERI_HAN = 1,      /* \p{Han} */
    TOKENIZERI_LETTER = 2,   /* \p{L} */
    TOKENIZERI_NUMBER = 4,   /* \p{N} */
    TOKENIZERI_SPACE = 8,    /* \s */
    TOKENIZERI_UPPER = 16,   /* [\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]] */
    TOKENIZERI_LOWER = 32,   /* [\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]] */
    TOKENIZERI_NEWLINE = 64, /* [\r\n] */
    TOKENIZERI_END = 128     /* the end of the text */
};

static unsigned tokenizeri_kind_of(uint32_t code) {
    static const unsigned char kinds[] = {
        0, /* UNICODE_OTHER */
        TOKENIZERI_SPACE,
        TOKENIZERI_NUMBER,
        TOKENIZERI_LETTER | TOKENIZERI_UPPER,
        TOKENIZERI_LETTER | TOKENIZERI_LOWER,
        TOKENIZERI_LETTER | TOKENIZERI_UPPER | TOKENIZERI_LOWER,
        TOKENIZERI_UPPER | TOKENIZERI_LOWER, /* UNICODE_MARK */
        TOKENIZERI_HAN,
        TOKENIZERI_HAN | TOKENIZERI_NUMBER,
        TOKENIZERI_HAN | TOKENIZERI_LETTER,
    };
    if (code == '\r' || code == '\n') return TOKENIZERI_SPACE | TOKENIZERI_NEWLINE;
    return kinds[unicode_class_of(code)];
}

/* A text that is being cut into pieces. */
typedef struct tokenizeri_text {
    const tokenizer *t;
    const char *bytes;
    size_t length;
} tokenizeri_text;

/* The code point of a well-formed sequence. */
static uint32_t tokenizeri_code(const char *bytes, size_t length) {
    static const unsigned char payload[5] = {0, 0x7f, 0x1f, 0x0f, 0x07};
    uint32_t code = (unsigned char)bytes[0] & payload[length];
    for (size_t i = 1; i < length; i++) code = code << 6 | ((unsigned char)bytes[i] & 0x3f);
    return code;
}

/* Kind of the character at `at`, and where the next one starts. A byte that is not UTF-8 is a
 * character that is none of all this, as punctuation is. */
static unsigned tokenizeri_kind(const tokenizeri_text *s, size_t at, size_t *next) {
    *next = at;
    if (at == s->length) return TOKENIZERI_END;
    unsigned byte = (unsigned char)s->bytes[at];
    *next = at + 1;
    if (byte < 0x80) return s->t->ascii_kinds[byte];
    size_t length = json_utf8_length(s->bytes + at, s->length - at);
    if (length == 0) return 0;
    *next = at + length;
    return tokenizeri_kind_of(tokenizeri_code(s->bytes + at, length));
}

/* The end of the run of characters of which `mask` leaves `wanted`. */
static size_t tokenizeri_run(const tokenizeri_text *s, size_t at, unsigned mask, unsigned wanted) {
    size_t next;
    while ((tokenizeri_kind(s, at, &next) & mask) == wanted) at = next;
    return at;
}

/* ---- Pieces ---- */

/* The end of (?i:'s|'t|'re|'ve|'m|'ll|'d)?. Beside S, U+017F is an s in another case. */
static size_t tokenizeri_contraction(const tokenizeri_text *s, size_t at) {
    const char *c = s->bytes + at;
    size_t left = s->length - at;
    if (left < 2 || *c != '\'') return at;
    int first = c[1] | 0x20, second = left > 2 ? c[2] | 0x20 : 0;
    if (first == 's' || first == 't' || first == 'm' || first == 'd') return at + 2;
    if ((first == 'r' && second == 'e') || (first == 'v' && second == 'e') ||
        (first == 'l' && second == 'l'))
        return at + 3;
    return left > 2 && memcmp(c + 1, "\xc5\xbf", 2) == 0 ? at + 3 : at;
}

/* The end of upper* lower+, or 0. Where nothing lower follows the longest run of upper, its last
 * character that is both is the one of lower+. */
static size_t tokenizeri_lower_word(const tokenizeri_text *s, size_t at) {
    size_t next, both = 0;
    unsigned kind;
    while ((kind = tokenizeri_kind(s, at, &next)) & TOKENIZERI_UPPER) {
        if (kind & TOKENIZERI_LOWER) both = next;
        at = next;
    }
    if (kind & TOKENIZERI_LOWER) return tokenizeri_run(s, next, TOKENIZERI_LOWER, TOKENIZERI_LOWER);
    return both;
}

/* The end of upper+ lower*, or 0. */
static size_t tokenizeri_upper_word(const tokenizeri_text *s, size_t at) {
    size_t end = tokenizeri_run(s, at, TOKENIZERI_UPPER, TOKENIZERI_UPPER);
    return end == at ? 0 : tokenizeri_run(s, end, TOKENIZERI_LOWER, TOKENIZERI_LOWER);
}

/* The end of a match of the second or third alternative, or 0. */
static size_t tokenizeri_word(const tokenizeri_text *s, size_t at) {
    const unsigned not_before = TOKENIZERI_LETTER | TOKENIZERI_NUMBER | TOKENIZERI_NEWLINE;
    size_t next, end = 0;
    bool before = !(tokenizeri_kind(s, at, &next) & not_before);
    if (before) end = tokenizeri_lower_word(s, next);
    if (!end) end = tokenizeri_lower_word(s, at);
    if (!end && before) end = tokenizeri_upper_word(s, next);
    if (!end) end = tokenizeri_upper_word(s, at);
    return end ? tokenizeri_contraction(s, end) : 0;
}

/* The end of \p{N}{1,3}, or 0. */
static size_t tokenizeri_number(const tokenizeri_text *s, size_t at) {
    size_t start = at, next;
    for (int i = 0; i < 3 && tokenizeri_kind(s, at, &next) & TOKENIZERI_NUMBER; i++) at = next;
    return at == start ? 0 : at;
}

/* The end of " ?[^\s\p{L}\p{N}]+[\r\n]*", or 0. */
static size_t tokenizeri_punctuation(const tokenizeri_text *s, size_t at) {
    const unsigned not_this =
        TOKENIZERI_LETTER | TOKENIZERI_NUMBER | TOKENIZERI_SPACE | TOKENIZERI_END;
    size_t start = at + (s->bytes[at] == ' ');
    size_t end = tokenizeri_run(s, start, not_this, 0);
    return end == start ? 0 : tokenizeri_run(s, end, TOKENIZERI_NEWLINE, TOKENIZERI_NEWLINE);
}

/* The end of a match of the last three alternatives: up to the last line end of white space, else
 * all of it but what its last character is to the text behind it. */
static size_t tokenizeri_space(const tokenizeri_text *s, size_t at) {
    size_t start = at, last = at, line_end = 0, next;
    unsigned kind;
    while ((kind = tokenizeri_kind(s, at, &next)) & TOKENIZERI_SPACE) {
        if (kind & TOKENIZERI_NEWLINE) line_end = next;
        last = at;
        at = next;
    }
    if (line_end) return line_end;
    return at == s->length || last == start ? at : last;
}

/* The end of the piece that starts at `at`, which is not the end of the text. */
static size_t tokenizeri_piece(const tokenizeri_text *s, size_t at) {
    size_t end = tokenizeri_run(s, at, TOKENIZERI_HAN, TOKENIZERI_HAN);
    if (end > at) return end;
    end = tokenizeri_word(s, at);
    if (!end) end = tokenizeri_number(s, at);
    if (!end) end = tokenizeri_punctuation(s, at);
    return end ? end : tokenizeri_space(s, at);
}

/* ---- Joining the bytes of a piece ---- */

/* A run of the piece's bytes that is a token. Runs are known by where they start. */
typedef struct tokenizeri_part {
    uint32_t next, before; /* where the neighbours start; next: the piece's end for the last */
    uint32_t id;
    uint32_t joined; /* rank of this and the next as one; TOKENIZERI_NONE: no token, or no part */
} tokenizeri_part;

/* A heap of pairs that may be joined: rank in the high half, start of the first in the low half. A
 * pair stays in the heap when one of the two has been joined to something else; it is known then
 * by its rank, which is not that of the part. */
typedef struct tokenizeri_joiner {
    const tokenizer *t;
    const char *bytes;
    uint32_t length;
    tokenizeri_part *parts; /* [length] */
    uint64_t *heap;         /* [2 * length] */
    size_t n;
    uint64_t steps;
} tokenizeri_joiner;

static void tokenizeri_push(tokenizeri_joiner *j, uint64_t pair) {
    size_t i = j->n++;
    for (; i > 0 && j->heap[(i - 1) / 2] > pair; i = (i - 1) / 2, j->steps++)
        j->heap[i] = j->heap[(i - 1) / 2];
    j->heap[i] = pair;
}

static uint64_t tokenizeri_pop(tokenizeri_joiner *j) {
    uint64_t least = j->heap[0], pair = j->heap[--j->n];
    size_t i = 0;
    for (size_t child = 1; child < j->n; child = 2 * i + 1, j->steps++) {
        if (child + 1 < j->n && j->heap[child + 1] < j->heap[child]) child++;
        if (j->heap[child] >= pair) break;
        j->heap[i] = j->heap[child];
        i = child;
    }
    j->heap[i] = pair;
    return least;
}

/* Looks up what the part at `at` and the next would be, and remembers it. */
static void tokenizeri_consider(tokenizeri_joiner *j, uint32_t at) {
    tokenizeri_part *part = &j->parts[at];
    part->joined = TOKENIZERI_NONE;
    j->steps++;
    if (part->next == j->length) return;
    part->joined = tokenizeri_find(j->t, j->bytes + at, j->parts[part->next].next - at);
    if (part->joined != TOKENIZERI_NONE) tokenizeri_push(j, (uint64_t)part->joined << 32 | at);
}

static void tokenizeri_join(tokenizeri_joiner *j) {
    tokenizeri_part *parts = j->parts;
    for (uint32_t i = 0; i < j->length; i++) {
        parts[i].next = i + 1, parts[i].before = i ? i - 1 : 0;
        parts[i].id = j->t->byte_ids[(unsigned char)j->bytes[i]];
    }
    for (uint32_t i = 0; i < j->length; i++) tokenizeri_consider(j, i);
    while (j->n > 0) {
        uint64_t pair = tokenizeri_pop(j);
        uint32_t at = (uint32_t)pair, gone = parts[at].next;
        if (parts[at].joined != pair >> 32) continue;
        parts[at].id = parts[at].joined;
        parts[at].next = parts[gone].next;
        parts[gone].joined = TOKENIZERI_NONE;
        if (parts[at].next < j->length) parts[parts[at].next].before = at;
        tokenizeri_consider(j, at);
        if (at > 0) tokenizeri_consider(j, parts[at].before);
    }
}

#define TOKENIZERI_SHORT 128 /* bytes of a piece that is joined without an allocation */

/* Where ids go. */
typedef struct tokenizeri_encoder {
    const tokenizer *t;
    token_list *ids;
    uint64_t steps;
    error *e;
} tokenizeri_encoder;

static bool tokenizeri_encode_piece(tokenizeri_encoder *to, const char *bytes, size_t length) {
    const tokenizer *t = to->t;
    tokenizeri_part parts[TOKENIZERI_SHORT];
    uint64_t heap[2 * TOKENIZERI_SHORT];
    tokenizeri_joiner j = {t, bytes, (uint32_t)length, parts, heap, 0, 0};
    uint32_t whole = tokenizeri_find(t, bytes, length);
    if (whole != TOKENIZERI_NONE) return tokens_append(to->ids, whole, to->e);
    if (length > TOKENIZERI_SHORT) {
        j.parts = (tokenizeri_part *)malloc(length * sizeof *j.parts);
        j.heap = (uint64_t *)malloc(2 * length * sizeof *j.heap);
    }
    bool ok = j.parts && j.heap;
    if (!ok) error_set(to->e, "not enough memory for the tokens of %zu bytes of text", length);
    if (ok) tokenizeri_join(&j);
    for (uint32_t i = 0; ok && i < length; i = j.parts[i].next)
        ok = tokens_append(to->ids, j.parts[i].id, to->e);
    to->steps += j.steps;
    if (j.parts != parts) free(j.parts);
    if (j.heap != heap) free(j.heap);
    return ok;
}

/* Text without special tokens. */
static bool tokenizeri_encode_ordinary(tokenizeri_encoder *to, const char *text, size_t length) {
    tokenizeri_text s = {to->t, text, length};
    for (size_t at = 0, end; at < length; at = end) {
        end = tokenizeri_piece(&s, at);
        if (!tokenizeri_encode_piece(to, text + at, end - at)) return false;
    }
    return true;
}

/* ---- Special tokens in a text ---- */

/* The first of by_name[low, high) whose name has a byte of at least `byte` at `depth`, where all
 * names there agree before it. A name that ends there comes first. */
static size_t tokenizeri_bound(const tokenizer *t, size_t low, size_t high, size_t depth,
                               unsigned byte) {
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        tokenizeri_span span = t->spans[t->by_name[middle]];
        if (span.length <= depth || (unsigned char)t->bytes[span.at + depth] < byte)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Length of the longest special name that a text begins with, and its id; 0 if there is none. */
static size_t tokenizeri_match_special(const tokenizer *t, const char *text, size_t length,
                                       uint32_t *id) {
    size_t low = 0, high = TOKENIZER_SPECIALS, found = 0;
    for (size_t depth = 0; depth < length && low < high; depth++) {
        unsigned byte = (unsigned char)text[depth];
        low = tokenizeri_bound(t, low, high, depth, byte);
        high = tokenizeri_bound(t, low, high, depth, byte + 1);
        if (low < high && t->spans[t->by_name[low]].length == depth + 1) {
            found = depth + 1;
            *id = t->by_name[low];
        }
    }
    return found;
}

bool tokenizer_special(const tokenizer *t, const char *name, uint32_t *id) {
    size_t length = strlen(name);
    uint32_t found;
    if (length == 0 || tokenizeri_match_special(t, name, length, &found) != length) return false;
    *id = found;
    return true;
}

static bool tokenizeri_encode_segment(tokenizeri_encoder *to, const char *text, size_t length,
                                      unsigned flags) {
    const tokenizer *t = to->t;
    size_t start = 0; /* of the text since the last special token */
    for (size_t at = 0; flags & TOKENIZER_SPECIAL && at < length;) {
        uint32_t id = 0;
        size_t found = 0;
        if (t->special_starts[(unsigned char)text[at]])
            found = tokenizeri_match_special(t, text + at, length - at, &id);
        at += found ? found : 1;
        if (!found) continue;
        if (!tokenizeri_encode_ordinary(to, text + start, at - found - start) ||
            !tokens_append(to->ids, id, to->e))
            return false;
        start = at;
    }
    return tokenizeri_encode_ordinary(to, text + start, length - start);
}

/* ---- Segments ---- */

#define TOKENIZERI_CHARACTERS 400000 /* of a text that is cut into pieces at once */
#define TOKENIZERI_RUN 25000         /* characters in a row that are white space, or are not */

/* The end of the segment that starts at `at`. *left, of the characters before the next cut of the
 * first kind, is 0 where that cut begins anew. White space is what Python takes for it: also
 * U+001C to U+001F. */
static size_t tokenizeri_segment(const tokenizeri_text *s, size_t at, size_t *left) {
    size_t run = 0, next;
    bool run_is_space = false;
    if (*left == 0) *left = TOKENIZERI_CHARACTERS;
    for (; at<s->length && * left> 0; at = next, --*left) {
        unsigned byte = (unsigned char)s->bytes[at];
        bool is_space =
            tokenizeri_kind(s, at, &next) & TOKENIZERI_SPACE || (byte >= 0x1c && byte <= 0x1f);
        run = is_space == run_is_space ? run + 1 : 1;
        run_is_space = is_space;
        if (run > TOKENIZERI_RUN) return at;
    }
    return at;
}

bool tokenizer_encode(const tokenizer *t, const char *text, size_t length, unsigned flags,
                      token_list *ids, uint64_t *steps, error *e) {
    tokenizeri_text s = {t, text, length};
    tokenizeri_encoder to = {t, ids, 0, e};
    size_t n = ids->n, left = 0;
    bool ok = true;
    for (size_t at = 0, end; ok && at < length; at = end) {
        end = tokenizeri_segment(&s, at, &left);
        ok = tokenizeri_encode_segment(&to, text + at, end - at, flags);
    }
    if (!ok) ids->n = n;
    if (steps) *steps += to.steps;
    return ok;
}

/* ---- Text from ids ---- */

/* Can these one to three bytes, which are no whole character, be the start of one? */
static bool tokenizeri_can_go_on(const char *bytes, size_t n) {
    char low[4] = {'\x80', '\x80', '\x80', '\x80'}, high[4] = {'\xbf', '\xbf', '\xbf', '\xbf'};
    memcpy(low, bytes, n);
    memcpy(high, bytes, n);
    return json_utf8_length(low, 4) > n || json_utf8_length(high, 4) > n;
}

/* How many of the last bytes are the start of a character. */
static size_t tokenizeri_unfinished(const char *bytes, size_t n) {
    for (size_t tail = 1; tail < 4 && tail <= n; tail++) {
        unsigned byte = (unsigned char)bytes[n - tail];
        if (byte < 0x80) return 0;
        if (byte >= 0xc0) return tokenizeri_can_go_on(bytes + n - tail, tail) ? tail : 0;
    }
    return 0;
}

const char *tokenizer_stream_push(tokenizer_stream *stream, const tokenizer *t, uint32_t id,
                                  size_t *length) {
    size_t added, n = stream->waiting;
    const char *bytes = tokenizer_bytes(t, id, &added);
    if (!bytes) return NULL;
    memmove(stream->bytes, stream->bytes + stream->start, n);
    memcpy(stream->bytes + n, bytes, added);
    n += added;
    stream->waiting = tokenizeri_unfinished(stream->bytes, n);
    stream->start = *length = n - stream->waiting;
    return stream->bytes;
}

const char *tokenizer_stream_flush(tokenizer_stream *stream, size_t *length) {
    const char *rest = stream->bytes + stream->start;
    *length = stream->waiting;
    stream->waiting = 0;
    return rest;
}

#endif
