/* chat_format.h - messages of a conversation as token ids, and a model's answer back into parts.
 *
 *     chat_format f;
 *     if (!chat_format_open(&f, &tokenizer, "MODEL_DIR", think, e)) return false;
 *     if (!chat_message(&f, CHAT_USER, text, length, &ids, e)) ...
 *     if (!chat_begin_answer(&f, &ids, e)) ...
 *     chat_answer answer;
 *     chat_answer_begin(&answer, &f);
 *     part = chat_answer_read(&answer, &f, id);      for each token of the answer
 *     if (!chat_answer_close(&answer, &f, &ids, e))  where it did not end by itself
 *
 * FORMATS
 *   Which one a model has is told by the names of its special tokens.
 *
 *   CHAT_TURNS, of Kimi-Linear-48B-A3B (and Kimi K2):
 *       message:            <|im_ROLE|>ROLE<|im_middle|>TEXT<|im_end|>
 *       an answer begins:   <|im_assistant|>assistant<|im_middle|>
 *   CHAT_TAGS, of Kimi K3:
 *       message:            <|open|>message role="ROLE"<|sep|>TEXT
 *                           <|close|>message<|sep|><|end_of_msg|>
 *       an answer begins:   <|open|>message role="assistant"<|sep|><|open|>CHANNEL<|sep|>
 *     where CHANNEL is think in thinking mode, else response. An answer's text is in channels: a
 *     thought (think), what is said (response), calls (tools), each closed as the message is.
 *
 *   ROLE is user, assistant or system. Names in <| |> are special tokens; everything else, the text
 *   of messages too, is encoded as ordinary text: a marker's name that a user types is no marker.
 *   Text is encoded segment by segment, so that no token reaches across. Segments are the text, the
 *   name of a tag and, of each attribute, ` key`, `="`, the value, `"`. In a value & and " are
 *   escaped, as &amp; and &quot;. No [BOS] comes first, no line break stands between.
 *   Sources: chat_template.jinja of Kimi-Linear-48B-A3B-Instruct; Kimi K3's renderer.
 *
 *   Not rendered: tools and their results, images, and the system message by which K3 is told an
 *   effort of thinking (low, medium, high, max), the wording of which is not known here.
 *
 * Every function is static.
 */
#ifndef CHAT_FORMAT_H
#define CHAT_FORMAT_H

#include "error.h"
#include "tokenizer.h"
#include "tokens.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef enum chat_kind { CHAT_TURNS = 1, CHAT_TAGS = 2 } chat_kind;
typedef enum chat_role { CHAT_USER, CHAT_ASSISTANT, CHAT_SYSTEM } chat_role;

typedef struct chat_format {
    const tokenizer *t;
    chat_kind kind;
    bool think;
    uint32_t end;              /* the special token behind every message */
    uint32_t roles[3], middle; /* of CHAT_TURNS */
    uint32_t open, close, sep; /* of CHAT_TAGS */
} chat_format;

/* `model` names the tokenizer in messages. Errors: the tokenizer has the special tokens of neither
 * format; thinking mode with one that has none. */
static inline bool chat_format_open(chat_format *f, const tokenizer *t, const char *model,
                                    bool think, error *e);

/* Appends a whole message. On failure, here and below only for want of memory, some of it may be
 * appended. */
static inline bool chat_message(const chat_format *f, chat_role role, const char *text,
                                size_t length, token_list *ids, error *e);

/* Appends what makes the model answer. */
static inline bool chat_begin_answer(const chat_format *f, token_list *ids, error *e);

/* ---- Answers ---- */

typedef enum chat_part {
    CHAT_MARKUP, /* a marker or a part of a tag */
    CHAT_SPOKEN, /* text of the answer */
    CHAT_UNSAID  /* text elsewhere: thoughts, calls */
} chat_part;

#define CHAT_DEPTH 8 /* open tags that are followed; deeper ones stay open */
#define CHAT_NAME 32 /* bytes of a tag's name with its NUL; a longer one is cut */

/* Which tags are open in an answer. */
typedef struct chat_answer {
    char open[CHAT_DEPTH][CHAT_NAME];
    size_t depth;
    bool in_tag, closing, named; /* between <|open|> or <|close|> and <|sep|>; past the name */
    char name[CHAT_NAME];        /* of that tag, as far as it goes */
} chat_answer;

/* An answer that chat_begin_answer has begun. */
static inline void chat_answer_begin(chat_answer *a, const chat_format *f);

/* Takes the next token of it. */
static inline chat_part chat_answer_read(chat_answer *a, const chat_format *f, uint32_t id);

/* Appends what ends the message where it is: a tag that is being written, the tags that are open,
 * the end marker. */
static inline bool chat_answer_close(const chat_answer *a, const chat_format *f, token_list *ids,
                                     error *e);

/* No more tokens than these are needed to close, after one more token of the answer. */
static inline size_t chat_answer_reserve(const chat_answer *a, const chat_format *f);

/* ==== Bodies ==== */

static const char *const chati_roles[3] = {"user", "assistant", "system"};

typedef struct chati_marker {
    const char *name;
    uint32_t *id;
} chati_marker;

static bool chati_find(const tokenizer *t, const chati_marker *markers, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (!tokenizer_special(t, markers[i].name, markers[i].id)) return false;
    return true;
}

static inline bool chat_format_open(chat_format *f, const tokenizer *t, const char *model,
                                    bool think, error *e) {
    memset(f, 0, sizeof *f);
    const chati_marker turns[] = {{"<|im_user|>", &f->roles[CHAT_USER]},
                                  {"<|im_assistant|>", &f->roles[CHAT_ASSISTANT]},
                                  {"<|im_system|>", &f->roles[CHAT_SYSTEM]},
                                  {"<|im_middle|>", &f->middle},
                                  {"<|im_end|>", &f->end}};
    const chati_marker tags[] = {{"<|open|>", &f->open},
                                 {"<|close|>", &f->close},
                                 {"<|sep|>", &f->sep},
                                 {"<|end_of_msg|>", &f->end}};
    f->t = t;
    f->think = think;
    if (chati_find(t, tags, sizeof tags / sizeof *tags))
        f->kind = CHAT_TAGS;
    else if (chati_find(t, turns, sizeof turns / sizeof *turns))
        f->kind = CHAT_TURNS;
    else
        return error_set(e,
                         "%s: expected special tokens of a chat, <|im_user|> and its like or "
                         "<|open|> and its like, found neither",
                         model);
    return !think || f->kind == CHAT_TAGS ||
           error_set(e, "%s: expected no thinking mode, which its messages do not have", model);
}

static bool chati_text(const chat_format *f, const char *text, size_t length, token_list *ids,
                       error *e) {
    return tokenizer_encode(f->t, text, length, 0, ids, NULL, e);
}

static bool chati_word(const chat_format *f, const char *word, token_list *ids, error *e) {
    return chati_text(f, word, strlen(word), ids, e);
}

/* <|open|>NAME, or <|close|>NAME. */
static bool chati_tag(const chat_format *f, uint32_t marker, const char *name, token_list *ids,
                      error *e) {
    return tokens_append(ids, marker, e) && chati_word(f, name, ids, e);
}

/* A value with escapes, as one segment: it is put together first. */
static bool chati_value(const chat_format *f, const char *value, token_list *ids, error *e) {
    char text[6 * 64];
    size_t n = 0;
    for (; *value; value++) {
        const char *escape = *value == '&' ? "&amp;" : *value == '"' ? "&quot;" : NULL;
        size_t length = escape ? strlen(escape) : 1;
        if (n + length > sizeof text)
            return error_set(e, "an attribute: expected a value of at most 64 bytes");
        memcpy(text + n, escape ? escape : value, length);
        n += length;
    }
    return chati_text(f, text, n, ids, e);
}

/* ` key="value"`; `key` begins with the space. A value has at most 64 bytes. */
static inline bool chat_attribute(const chat_format *f, const char *key, const char *value,
                                  token_list *ids, error *e) {
    return chati_word(f, key, ids, e) && chati_word(f, "=\"", ids, e) &&
           chati_value(f, value, ids, e) && chati_word(f, "\"", ids, e);
}

static bool chati_open_message(const chat_format *f, chat_role role, token_list *ids, error *e) {
    const char *name = chati_roles[role];
    if (f->kind == CHAT_TURNS)
        return chati_tag(f, f->roles[role], name, ids, e) && tokens_append(ids, f->middle, e);
    return chati_tag(f, f->open, "message", ids, e) && chat_attribute(f, " role", name, ids, e) &&
           tokens_append(ids, f->sep, e);
}

static bool chati_close_tag(const chat_format *f, const char *name, token_list *ids, error *e) {
    return chati_tag(f, f->close, name, ids, e) && tokens_append(ids, f->sep, e);
}

static inline bool chat_message(const chat_format *f, chat_role role, const char *text,
                                size_t length, token_list *ids, error *e) {
    return chati_open_message(f, role, ids, e) && chati_text(f, text, length, ids, e) &&
           (f->kind == CHAT_TURNS || chati_close_tag(f, "message", ids, e)) &&
           tokens_append(ids, f->end, e);
}

static const char *chati_channel(const chat_format *f) {
    return f->think ? "think" : "response";
}

static inline bool chat_begin_answer(const chat_format *f, token_list *ids, error *e) {
    if (!chati_open_message(f, CHAT_ASSISTANT, ids, e)) return false;
    return f->kind == CHAT_TURNS ||
           (chati_tag(f, f->open, chati_channel(f), ids, e) && tokens_append(ids, f->sep, e));
}

static void chati_push(chat_answer *a, const char *name) {
    if (a->depth < CHAT_DEPTH) strcpy(a->open[a->depth++], name);
}

static inline void chat_answer_begin(chat_answer *a, const chat_format *f) {
    memset(a, 0, sizeof *a);
    if (f->kind == CHAT_TURNS) return;
    chati_push(a, "message");
    chati_push(a, chati_channel(f));
}

/* The tag in a->name is complete. One that closes what is not open changes nothing; what was opened
 * inside of one that closes is over too. */
static void chati_end_tag(chat_answer *a) {
    a->in_tag = false;
    if (!a->closing) {
        chati_push(a, a->name);
        return;
    }
    for (size_t i = a->depth; i-- > 0;)
        if (strcmp(a->open[i], a->name) == 0) {
            a->depth = i;
            return;
        }
}

/* The name of a tag goes to its first space: attributes follow there. */
static void chati_name(chat_answer *a, const char *bytes, size_t length) {
    size_t n = strlen(a->name);
    for (size_t i = 0; i < length && !a->named; i++) {
        a->named = bytes[i] == ' ';
        if (!a->named && bytes[i] && n + 1 < CHAT_NAME) a->name[n++] = bytes[i];
    }
    a->name[n] = '\0';
}

static inline chat_part chat_answer_read(chat_answer *a, const chat_format *f, uint32_t id) {
    size_t length = 0;
    const char *bytes = tokenizer_bytes(f->t, id, &length);
    if (id == f->end) return CHAT_MARKUP;
    if (f->kind == CHAT_TURNS) return CHAT_SPOKEN;
    if (id == f->open || id == f->close) {
        a->in_tag = true;
        a->closing = id == f->close;
        a->named = false;
        a->name[0] = '\0';
        return CHAT_MARKUP;
    }
    if (id == f->sep) {
        if (a->in_tag) chati_end_tag(a);
        return CHAT_MARKUP;
    }
    if (a->in_tag) {
        if (bytes) chati_name(a, bytes, length);
        return CHAT_MARKUP;
    }
    bool spoken = a->depth > 0 && strcmp(a->open[a->depth - 1], "response") == 0;
    return spoken ? CHAT_SPOKEN : CHAT_UNSAID;
}

static inline bool chat_answer_close(const chat_answer *a, const chat_format *f, token_list *ids,
                                     error *e) {
    chat_answer rest = *a;
    if (rest.in_tag) {
        if (!tokens_append(ids, f->sep, e)) return false;
        chati_end_tag(&rest);
    }
    for (size_t i = rest.depth; i-- > 0;)
        if (!chati_close_tag(f, rest.open[i], ids, e)) return false;
    return tokens_append(ids, f->end, e);
}

/* A token is a byte at least; the one token more may open a tag, or be a part of its name. */
static inline size_t chat_answer_reserve(const chat_answer *a, const chat_format *f) {
    size_t n = 1;
    if (f->kind == CHAT_TURNS) return n;
    for (size_t i = 0; i < a->depth; i++) n += 2 + strlen(a->open[i]);
    return n + 1 + 2 + CHAT_NAME;
}

#endif
