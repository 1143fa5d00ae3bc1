/* test_chat.c - messages as ids, by the formats' definitions, and what $BUILD/chat (build/chat)
 * makes of a conversation: prefix reuse, interrupts, saved ones. From the repository root. */
#ifndef _XOPEN_SOURCE
#define _XOPEN_SOURCE 700 /* posix_openpt and what belongs to it */
#endif
#include <stdbool.h>
#include <stdlib.h>

static bool no_memory; /* for what grows */
static void *test_realloc(void *old, size_t size) {
    return no_memory ? NULL : realloc(old, size);
}
#define realloc test_realloc
#define SAFETENSORS_IMPLEMENTATION
#include "../examples/safetensors.h"
#define TOKENIZER_IMPLEMENTATION
#include "../examples/chat_format.h"
#include "../examples/tokenizer.h"
#undef realloc
#define OUTPUT_IMPLEMENTATION
#include "../examples/safetensors_write.h"

#define PROGRAM "chat"
#include "limits.h"
#include "program.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <unistd.h>

#define TURNS "WORK/../chat-turns "
#define TAGS "WORK/../chat-tags "
#define ENDLESS "WORK/../chat-endless "

/* ==== Models ==== */

/* Special tokens of both formats, from FIRST on, in models whose ids below are bytes. */
enum { FIRST = 256, END = 258, USER = 259, ASSISTANT = 260, SYSTEM = 266, MIDDLE = 273 };
enum { OPEN = 259, CLOSE = 260, SEP = 261 }; /* of the other format; END is the same */

#define NAMED "\"%d\": {\"content\": "
static const char turns_names[] =
    "{\"added_tokens_decoder\": {" NAMED "\"[BOS]\"}, " NAMED "\"[EOS]\"}, " NAMED
    "\"<|im_end|>\"}, " NAMED "\"<|im_user|>\"}, " NAMED "\"<|im_assistant|>\"}, " NAMED
    "\"<|im_system|>\"}, " NAMED "\"<|im_middle|>\"}}}";
static const char tags_names[] =
    "{\"added_tokens_decoder\": {" NAMED "\"[BOS]\"}, " NAMED "\"[EOS]\"}, " NAMED
    "\"<|end_of_msg|>\"}, " NAMED "\"<|open|>\"}, " NAMED "\"<|close|>\"}, " NAMED "\"<|sep|>\"}}}";

/* tokenizer_config.json for n ranks. */
static void write_names(const char *directory, bool tags, int n) {
    char text[1000];
    if (tags)
        snprintf(text, sizeof text, tags_names, n, n + 1, n + 2, n + 3, n + 4, n + 5);
    else
        snprintf(text, sizeof text, turns_names, n, n + 1, n + 2, n + 3, n + 4, n + 10, n + 17);
    write_file(directory, "tokenizer_config.json", text, strlen(text));
}

/* Byte b is token b. */
static void write_bytes(const char *directory) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    char model[256 * 16];
    size_t n = 0;
    for (unsigned b = 0; b < 256; b++)
        n += (size_t)snprintf(model + n, sizeof model - n, "%c%c== %u\n", digits[b >> 2],
                              digits[(b & 3) << 4], b);
    write_file(directory, "tiktoken.model", model, n);
}

/* A tensor of 256 rows with as many again below: copies, or zeros but for the end marker, which is a
 * little more than the row of a byte. So it comes where that byte would; never, if there is none. */
static unsigned char *double_rows(const st_tensor *t, bool is_head, int end_byte) {
    unsigned char *bytes = (unsigned char *)test_alloc(2 * t->bytes);
    size_t row = t->bytes / 256;
    memcpy(bytes, t->data, t->bytes);
    if (!is_head) memcpy(bytes + t->bytes, t->data, t->bytes);
    for (size_t i = 0; is_head && end_byte >= 0 && i < row; i += 2) {
        const unsigned char *from = t->data + (size_t)end_byte * row + i;
        uint32_t bits = (uint32_t)from[0] << 16 | (uint32_t)from[1] << 24; /* bf16 */
        float value;
        memcpy(&value, &bits, sizeof value);
        value *= 1.0625f;
        memcpy(&bits, &value, sizeof bits);
        bytes[END * row + i] = (unsigned char)(bits >> 16);
        bytes[END * row + i + 1] = (unsigned char)(bits >> 24);
    }
    return bytes;
}

/* The tiny model with a vocabulary of 512. */
static void write_weights(const char *directory, int end_byte) {
    st_checkpoint c;
    error e;
    if (!st_open(&c, MODELS "kimi-linear-tiny", &e)) give_up(e.text);
    char *file = (char *)test_alloc((size_t)1 << 23), shape[ST_SHAPE_TEXT];
    size_t n = 9, at = 0, start;
    memcpy(file + 8, "{", 1);
    for (size_t i = 0; i < st_count(&c); i++) {
        st_tensor t = *st_at(&c, i);
        if (t.n_dims == 2 && t.dims[0] == 256 && t.dims[1] == 64) t.dims[0] *= 2, t.bytes *= 2;
        n += (size_t)sprintf(file + n,
                             "%s\"%s\":{\"dtype\":\"%s\",\"shape\":%s,\"data_offsets\":[%zu,%zu]}",
                             i ? "," : "", t.name, st_dtype_name(t.dtype),
                             st_shape(t.dims, t.n_dims, shape), at, at + t.bytes);
        at += t.bytes;
    }
    file[n++] = '}';
    for (size_t b = 0; b < 8; b++) file[b] = (char)((n - 8) >> 8 * b);
    start = n;
    for (size_t i = 0; i < st_count(&c); i++) {
        const st_tensor *t = st_at(&c, i);
        bool is_head = strcmp(t->name, "lm_head.weight") == 0;
        if (is_head || strcmp(t->name, "model.embed_tokens.weight") == 0) {
            unsigned char *rows = double_rows(t, is_head, end_byte);
            memcpy(file + n, rows, 2 * t->bytes);
            n += 2 * t->bytes;
            free(rows);
        } else {
            memcpy(file + n, t->data, t->bytes);
            n += t->bytes;
        }
    }
    if (n - start != at) give_up("the tiny model has other tensors of that shape");
    write_file(directory, "model.safetensors", file, n);
    free(file);
    st_close(&c);
}

static void write_model(const char *name, bool tags, int end_byte) {
    char directory[300];
    size_t size;
    temporary(name, directory);
    char *config = read_file(MODELS "kimi-linear-tiny", "config.json", &size);
    char *edited = edit(config, "vocab_size", "512"), *stop = edit(edited, "eos_token_id", "258");
    write_file(directory, "config.json", stop, strlen(stop));
    write_bytes(directory);
    write_names(directory, tags, FIRST);
    write_weights(directory, end_byte);
    free(config), free(edited), free(stop);
}

/* ---- A model that says what it is made to say ---- */

/* Tokens of a vocabulary in which the names of two channels are tokens, by their places among the
 * channels of an embedding; the last one has no text. */
enum { HEARD, THOUGHT, CLOSING, THINK, BETWEEN, OPENING, RESPONSE, SAID, TEXTLESS, N_SAID };
enum { CHAIN_RANKS = 258, CHAIN_END = 260, CHAIN_VOCABULARY = 576, WIDTH = 64 };
static const unsigned said[N_SAID] = {263, 'Z', 262, 256, 'Y', 261, 257, 'W', 520};

/* What follows what, and how much it is wanted. What is heard last before an answer, <|sep|>, is
 * followed by the first of three that has not been said, if there is a penalty for that; and a tag
 * that opens is another response after a thought, another thought in a response. */
static const struct {
    int from;
    unsigned to;
    float logit;
} chain[] = {{HEARD, 'Z', 1},    {HEARD, 'Y', .875f}, {HEARD, 'W', .75f},
             {THOUGHT, 262, 1},  {CLOSING, 256, 1},   {THINK, 263, 1},
             {BETWEEN, 261, 1},  {OPENING, 257, 1},   {OPENING, 256, 1.5f},
             {RESPONSE, 263, 1}, {SAID, 520, 1},      {TEXTLESS, CHAIN_END, 1}};

static void put_bf16(unsigned char *rows, size_t row, size_t col, float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    rows[2 * (row * WIDTH + col)] = (unsigned char)(bits >> 16);
    rows[2 * (row * WIDTH + col) + 1] = (unsigned char)(bits >> 24);
}

/* Each token is a channel of its own, and all others are one together; the head reads the chain. */
static unsigned char *chain_rows(bool is_head) {
    unsigned char *rows = (unsigned char *)test_alloc((size_t)CHAIN_VOCABULARY * WIDTH * 2);
    for (size_t i = 0; is_head && i < sizeof chain / sizeof *chain; i++)
        put_bf16(rows, chain[i].to, (size_t)chain[i].from, chain[i].logit);
    for (size_t i = 0; !is_head && i < CHAIN_VOCABULARY; i++) {
        size_t place = 0;
        while (place < N_SAID && said[place] != i) place++;
        put_bf16(rows, i, place < N_SAID ? place : WIDTH - 1, 1);
    }
    return rows;
}

/* The data of the tiny model's tensor in the chain's: what layers add is nothing. */
static unsigned char *chain_data(st_tensor *t) {
    static const char *const outputs[] = {"o_proj.weight", "down_proj.weight", "w2.weight"};
    bool is_head = strcmp(t->name, "lm_head.weight") == 0;
    if (is_head || strcmp(t->name, "model.embed_tokens.weight") == 0) {
        t->dims[0] = CHAIN_VOCABULARY, t->bytes = (size_t)CHAIN_VOCABULARY * WIDTH * 2;
        return chain_rows(is_head);
    }
    unsigned char *bytes = (unsigned char *)test_alloc(t->bytes);
    for (size_t i = 0; i < 3; i++) {
        size_t n = strlen(t->name), end = strlen(outputs[i]);
        if (n > end && strcmp(t->name + n - end, outputs[i]) == 0) return bytes;
    }
    memcpy(bytes, t->data, t->bytes);
    return bytes;
}

static void write_chain_weights(const char *directory) {
    char path[400];
    st_checkpoint c;
    st_writer w;
    error e;
    snprintf(path, sizeof path, "%s/model.safetensors", directory);
    if (!st_open(&c, MODELS "kimi-linear-tiny", &e)) give_up(e.text);
    bool ok = st_writer_open(&w, path, &e);
    for (int data = 0; data < 2; data++)
        for (size_t i = 0; ok && i < st_count(&c); i++) {
            st_tensor t = *st_at(&c, i);
            unsigned char *bytes = chain_data(&t);
            ok = data ? st_writer_bytes(&w, bytes, t.bytes, &e)
                      : st_writer_add(&w, t.name, t.dtype, t.dims, t.n_dims, &e);
            free(bytes);
        }
    if (!st_writer_close(&w, ok, &e)) give_up(e.text);
    st_close(&c);
}

static void write_chain(const char *name) {
    char directory[300], text[20];
    size_t size;
    temporary(name, directory);
    char *config = read_file(MODELS "kimi-linear-tiny", "config.json", &size);
    snprintf(text, sizeof text, "%d", CHAIN_VOCABULARY);
    char *edited = edit(config, "vocab_size", text);
    snprintf(text, sizeof text, "%d", CHAIN_END);
    char *stop = edit(edited, "eos_token_id", text);
    write_file(directory, "config.json", stop, strlen(stop));
    free(config), free(edited), free(stop);
    write_bytes(directory);
    char *ranks = read_file(directory, "tiktoken.model", &size);
    ranks = (char *)realloc(ranks, size + 100);
    if (!ranks) give_up("no memory");
    size += (size_t)sprintf(ranks + size, "dGhpbms= 256\ncmVzcG9uc2U= 257\n");
    write_file(directory, "tiktoken.model", ranks, size);
    free(ranks);
    write_names(directory, true, CHAIN_RANKS);
    write_chain_weights(directory);
}

/* ==== Messages as ids ==== */

/* A format of the vocabulary of 2500 ranks, in which neighbours would join. */
static tokenizer open_format(chat_format *f, tokenizer *t, bool tags, bool think) {
    char directory[300];
    size_t size;
    error e;
    temporary("chat-names", directory);
    char *ranks = read_file("tests/golden/tokenizer", "tiktoken.model", &size);
    write_file(directory, "tiktoken.model", ranks, size);
    write_names(directory, tags, 2500);
    if (!tokenizer_open(t, directory, &e) || !chat_format_open(f, t, directory, think, &e))
        give_up(e.text);
    free(ranks);
    return *t;
}

/* Ids of segments, ended by null: special tokens in <| |>, and text. */
static token_list segments(const tokenizer *t, const char *const *list) {
    token_list ids = {NULL, 0, 0};
    error e;
    for (; *list; list++) {
        uint32_t id;
        bool ok = strncmp(*list, "<|", 2) == 0 && tokenizer_special(t, *list, &id)
                      ? tokens_append(&ids, id, &e)
                      : tokenizer_encode(t, *list, strlen(*list), 0, &ids, NULL, &e);
        if (!ok) give_up(e.text);
    }
    return ids;
}

static void check_ids(const token_list *got, const tokenizer *t, const char *const *list) {
    token_list want = segments(t, list);
    CHECK_MSG(got->n == want.n, "%zu ids, not %zu", got->n, want.n);
    for (size_t i = 0; i < got->n && i < want.n; i++)
        CHECK_MSG(got->ids[i] == want.ids[i], "id %zu: %u, not %u", i, (unsigned)got->ids[i],
                  (unsigned)want.ids[i]);
    free(want.ids);
}

static token_list render(const chat_format *f, const char *system, const char *user) {
    token_list ids = {NULL, 0, 0};
    error e;
    if (system) CHECK(chat_message(f, CHAT_SYSTEM, system, strlen(system), &ids, &e));
    CHECK(chat_message(f, CHAT_USER, user, strlen(user), &ids, &e));
    CHECK(chat_begin_answer(f, &ids, &e));
    return ids;
}

static void turns_by_hand(void) {
    static const char *const want[] = {
        "<|im_system|>",    "system",    "<|im_middle|>", "Be brief.", "<|im_end|>",
        "<|im_user|>",      "user",      "<|im_middle|>", "Hello",     "<|im_end|>",
        "<|im_assistant|>", "assistant", "<|im_middle|>", NULL};
    chat_format f;
    tokenizer t;
    open_format(&f, &t, false, false);
    token_list ids = render(&f, "Be brief.", "Hello");
    check_ids(&ids, &t, want);
    free(ids.ids);
    tokenizer_close(&t);
}

static void tags_by_hand(void) {
    static const char *const want[] = {
        "<|open|>", "message",   " role",     "=\"",     "system",    "\"",
        "<|sep|>",  "Be brief.", "<|close|>", "message", "<|sep|>",   "<|end_of_msg|>",
        "<|open|>", "message",   " role",     "=\"",     "user",      "\"",
        "<|sep|>",  "Hello",     "<|close|>", "message", "<|sep|>",   "<|end_of_msg|>",
        "<|open|>", "message",   " role",     "=\"",     "assistant", "\"",
        "<|sep|>",  "<|open|>",  "think",     "<|sep|>", NULL};
    static const char *spoken[sizeof want / sizeof *want];
    chat_format f;
    tokenizer t;
    memcpy(spoken, want, sizeof want);
    spoken[sizeof want / sizeof *want - 3] = "response";
    for (int think = 0; think < 2; think++) {
        open_format(&f, &t, true, think);
        token_list ids = render(&f, "Be brief.", "Hello");
        check_ids(&ids, &t, think ? want : spoken);
        free(ids.ids);
        tokenizer_close(&t);
    }
}

/* A conversation whose answer stops within a tag. */
static bool converse(const chat_format *f, token_list *ids, error *e) {
    chat_answer answer;
    chat_answer_begin(&answer, f);
    if (f->kind == CHAT_TAGS) (void)chat_answer_read(&answer, f, f->open);
    return chat_message(f, CHAT_SYSTEM, "Be brief.", 9, ids, e) &&
           chat_message(f, CHAT_USER, "Hello", 5, ids, e) && chat_begin_answer(f, ids, e) &&
           chat_answer_close(&answer, f, ids, e);
}

/* A list that has room for the first ids of a conversation cannot grow, whatever comes next. */
static void messages_without_memory(void) {
    for (int tags = 0; tags < 2; tags++) {
        chat_format f;
        tokenizer t;
        token_list whole = {NULL, 0, 0};
        error e = {""};
        open_format(&f, &t, tags, false);
        CHECK(converse(&f, &whole, &e));
        for (size_t n = 1; n <= whole.n; n++) {
            token_list ids = {(uint32_t *)test_alloc(n * sizeof(uint32_t)), 0, n};
            no_memory = true;
            bool ok = converse(&f, &ids, &e);
            no_memory = false;
            CHECK(ok == (n == whole.n) && (ok ? ids.n == n : ids.n <= n));
            CHECK(memcmp(ids.ids, whole.ids, ids.n * sizeof *ids.ids) == 0);
            CHECK(ok || strstr(e.text, "no memory for "));
            free(ids.ids);
        }
        free(whole.ids);
        tokenizer_close(&t);
    }
}

/* Four segments, the value with escapes. In one piece the same text has other ids. */
static void attributes_are_four_segments(void) {
    static const char *const want[] = {" tool", "=\"", "&quot;a&amp;b&quot;(", "\"", NULL};
    static const char whole[] = " tool=\"&quot;a&amp;b&quot;(\"";
    token_list ids = {NULL, 0, 0}, joined = {NULL, 0, 0};
    chat_format f;
    tokenizer t;
    error e;
    char longer[400];
    open_format(&f, &t, true, false);
    CHECK(chat_attribute(&f, " tool", "\"a&b\"(", &ids, &e));
    check_ids(&ids, &t, want);
    CHECK(tokenizer_encode(&t, whole, strlen(whole), 0, &joined, NULL, &e));
    CHECK(joined.n != ids.n || memcmp(joined.ids, ids.ids, ids.n * sizeof *ids.ids) != 0);
    memset(longer, 'x', sizeof longer - 1), longer[sizeof longer - 1] = '\0';
    CHECK(!chat_attribute(&f, " tool", longer, &ids, &e));
    free(ids.ids), free(joined.ids);
    tokenizer_close(&t);
}

/* All markers of both formats in a message: no special token but those that frame it. */
static void typed_markers_are_text(void) {
    static const char text[] =
        "a<|im_end|>b<|im_user|><|open|><|close|>message<|sep|><|end_of_msg|>"
        "[EOS][BOS]<|reserved_token_2600|>";
    for (int tags = 0; tags < 2; tags++) {
        chat_format f;
        tokenizer t;
        open_format(&f, &t, tags, false);
        token_list ids = render(&f, NULL, text);
        size_t special = 0;
        for (size_t i = 0; i < ids.n; i++) special += ids.ids[i] >= 2500;
        CHECK_MSG(special == (tags ? 9 : 5), "%zu", special);
        free(ids.ids);
        tokenizer_close(&t);
    }
}

/* The ids that close an answer, no more than are reserved for that. */
static void check_rest(const chat_answer *a, const chat_format *f, const char *const *want) {
    token_list ids = {NULL, 0, 0};
    error e;
    CHECK(chat_answer_close(a, f, &ids, &e) && ids.n <= chat_answer_reserve(a, f));
    check_ids(&ids, f->t, want);
    free(ids.ids);
}

/* Reads an answer from segments; the text of each part. */
static chat_answer read_answer(const chat_format *f, const tokenizer *t, const char *const *list,
                               char *spoken, char *unsaid) {
    token_list ids = segments(t, list);
    chat_answer a;
    chat_answer_begin(&a, f);
    *spoken = *unsaid = '\0';
    for (size_t i = 0; i < ids.n; i++) {
        size_t length = 0, reserve = chat_answer_reserve(&a, f);
        token_list rest = {NULL, 0, 0};
        error e;
        const char *bytes = tokenizer_bytes(t, ids.ids[i], &length);
        chat_part part = chat_answer_read(&a, f, ids.ids[i]);
        if (part != CHAT_MARKUP) strncat(part == CHAT_SPOKEN ? spoken : unsaid, bytes, length);
        CHECK(chat_answer_close(&a, f, &rest, &e) && rest.n <= reserve);
        free(rest.ids);
    }
    free(ids.ids);
    return a;
}

static void answers_have_parts(void) {
    static const char *const whole[] = {
        "I wonder", "<|close|>", "think",     "<|sep|>",  "<|open|>", "response",
        "<|sep|>",  "It is so.", "<|close|>", "response", "<|sep|>",  "<|open|>",
        "tools",    "<|sep|>",   "<|open|>",  "call",     " tool",    "=\"",
        "f",        "\"",        "<|sep|>",   "x",        NULL};
    static const char *const rest[] = {"<|close|>", "call",           "<|sep|>",   "<|close|>",
                                       "tools",     "<|sep|>",        "<|close|>", "message",
                                       "<|sep|>",   "<|end_of_msg|>", NULL};
    static const char *const cut[] = {"no",       "<|close|>", "think", "<|sep|>",
                                      "<|open|>", "resp",      NULL};
    static const char *const cut_rest[] = {"<|sep|>", "<|close|>",      "resp",
                                           "<|sep|>", "<|close|>",      "message",
                                           "<|sep|>", "<|end_of_msg|>", NULL};
    static const char *const wild[] = {
        "<|close|>", "other",   "<|sep|>", "<|sep|>", "<|open|>",       "<|open|>", "think",
        "<|close|>", "message", "<|sep|>", "z",       "<|end_of_msg|>", NULL};
    static const char *const only_end[] = {"<|end_of_msg|>", NULL};
    char spoken[200], unsaid[200];
    chat_format f;
    tokenizer t;
    open_format(&f, &t, true, true);
    chat_answer a = read_answer(&f, &t, whole, spoken, unsaid);
    CHECK_MSG(strcmp(spoken, "It is so.") == 0 && strcmp(unsaid, "I wonderx") == 0, "%s|%s", spoken,
              unsaid);
    check_rest(&a, &f, rest);
    a = read_answer(&f, &t, cut, spoken, unsaid);
    check_rest(&a, &f, cut_rest);
    a = read_answer(&f, &t, wild, spoken, unsaid);
    CHECK(strcmp(unsaid, "z") == 0 && spoken[0] == '\0');
    check_rest(&a, &f, only_end);
    tokenizer_close(&t);
}

/* A name may be long, and tags may be many: one that is cut is closed as it is kept, one too deep is
 * not followed. What has no text, or is NUL, is no part of a name. */
static void tags_beyond_what_is_kept(void) {
    static const char name[] = "a-name-of-thirty-one-bytes-4567";
    static const char *const cut[] = {"no",      "<|close|>", "think",     "<|sep|>",  "<|open|>",
                                      name,      "and more",  "<|sep|>",   "<|open|>", "response",
                                      "<|sep|>", "said",      "<|close|>", name,       "and other",
                                      "<|sep|>", "unsaid",    NULL};
    static const char *const cut_rest[] = {"<|close|>", "message", "<|sep|>", "<|end_of_msg|>",
                                           NULL};
    static const char *const deep_rest[] = {
        "<|close|>",      "d",     "<|sep|>", "<|close|>", "d",       "<|sep|>",
        "<|close|>",      "d",     "<|sep|>", "<|close|>", "d",       "<|sep|>",
        "<|close|>",      "d",     "<|sep|>", "<|close|>", "d",       "<|sep|>",
        "<|close|>",      "think", "<|sep|>", "<|close|>", "message", "<|sep|>",
        "<|end_of_msg|>", NULL};
    char spoken[200], unsaid[200];
    token_list ids = {NULL, 0, 0};
    chat_format f;
    tokenizer t;
    error e;
    open_format(&f, &t, true, true);
    chat_answer a = read_answer(&f, &t, cut, spoken, unsaid);
    CHECK_MSG(strcmp(spoken, "said") == 0 && strcmp(unsaid, "nounsaid") == 0, "%s|%s", spoken,
              unsaid);
    check_rest(&a, &f, cut_rest);
    chat_answer_begin(&a, &f);
    for (size_t i = 0; i < CHAT_DEPTH; i++) { /* two more than there is room for */
        CHECK(chat_answer_read(&a, &f, f.open) == CHAT_MARKUP);
        CHECK(tokenizer_encode(&t, "\0d", 2, 0, &ids, NULL, &e));
        for (size_t k = 0; k < ids.n; k++)
            CHECK(chat_answer_read(&a, &f, ids.ids[k]) == CHAT_MARKUP);
        CHECK(chat_answer_read(&a, &f, 1 << 20) == CHAT_MARKUP); /* of no text */
        CHECK(chat_answer_read(&a, &f, f.sep) == CHAT_MARKUP);
        ids.n = 0;
    }
    check_rest(&a, &f, deep_rest);
    free(ids.ids);
    tokenizer_close(&t);
}

/* ==== Conversations ==== */

/* The ids of a saved conversation. */
static token_list saved_ids(const char *name) {
    token_list ids = {NULL, 0, 0};
    char path[400];
    error e;
    snprintf(path, sizeof path, "%s/%s.tokens", work, name);
    if (!tokens_read(path, false, &ids, &e)) CHECK_MSG(false, "%s", e.text);
    return ids;
}

/* Removes what an earlier run may have left. */
static void remove_saved(const char *name) {
    char path[400];
    snprintf(path, sizeof path, "%s/%s", work, name);
    remove(path);
    snprintf(path, sizeof path, "%s/%s.tokens", work, name);
    remove(path);
}

/* Runs a conversation of lines. */
static outcome talk(const char *words, const char *lines) {
    char command[600];
    write_file(work, "lines", lines, strlen(lines));
    snprintf(command, sizeof command, "%s <WORK/lines", words);
    return run(command);
}

static outcome talk_ok(const char *words, const char *lines) {
    outcome o = talk(words, lines);
    CHECK_MSG(o.status == 0, "%s: status %d: %s", words, o.status, o.err);
    return o;
}

/* "/save PATH", where PATH is in the work directory. */
static const char *command_line(char *line, const char *before, const char *command,
                                const char *name, const char *after) {
    sprintf(line, "%s%s %s/%s\n%s", before, command, work, name, after);
    return line;
}

/* Are the next ids these: numbers, ended by -1, or the bytes of a text? Moves on behind them. */
static void expect(const token_list *ids, size_t *at, const int *numbers, const char *text) {
    for (; numbers && *numbers >= 0; numbers++, ++*at)
        CHECK_MSG(*at < ids->n && ids->ids[*at] == (uint32_t)*numbers, "token %zu: no %d", *at,
                  *numbers);
    for (; text && *text; text++, ++*at)
        CHECK_MSG(*at < ids->n && ids->ids[*at] == (unsigned char)*text, "token %zu: no '%c'", *at,
                  *text);
}

static void expect_turn(const token_list *ids, size_t *at, int role, const char *name,
                        const char *text) {
    const int begin[] = {role, -1}, middle[] = {MIDDLE, -1}, end[] = {END, -1};
    expect(ids, at, begin, name);
    expect(ids, at, middle, text);
    if (text) expect(ids, at, end, NULL);
}

/* The answer that stands at `at` is what the model says to a fresh reading of all before it: n ids,
 * of which generate is asked. */
static void check_answer(const char *model, const token_list *ids, size_t at, size_t n) {
    char words[300];
    write_ids("fresh", ids->ids, at);
    snprintf(words, sizeof words, "%s --tokens WORK/fresh --generate %zu", model, n);
    outcome o = run_program("generate", words);
    const char *text = o.out;
    for (size_t i = 0; i < n; i++) {
        char *end;
        unsigned long id = strtoul(text, &end, 10);
        CHECK_MSG(end > text && at + i < ids->n && id == ids->ids[at + i], "answer, token %zu", i);
        text = end;
    }
    outcome_free(&o);
}

/* Tokens of the answer at `at`; what is printed at *printed is their bytes and a line end. */
static size_t check_printed(const token_list *ids, size_t at, const char **printed) {
    size_t n = 0;
    for (; at + n < ids->n && ids->ids[at + n] < FIRST; n++)
        CHECK((unsigned char)*(*printed)++ == ids->ids[at + n]);
    CHECK(*(*printed)++ == '\n');
    return n;
}

/* Both answers are those to a fresh rendering of the whole, whether the model ends them or
 * --generate does. */
static void turns_go_on(void) {
    static const char first[] = "Hello <|im_end|> you", second[] = "/and then?";
    static const char *const limits[] = {"--generate 2", "--generate 300"};
    char lines[900], before[200];
    snprintf(before, sizeof before, "%s\n\r\n/%s\r\n", first, second);
    for (size_t i = 0; i < 2; i++) {
        char words[200];
        size_t at = 0, n;
        snprintf(words, sizeof words, TURNS "--system 'Say little.' %s", limits[i]);
        outcome o = talk_ok(words, command_line(lines, before, "/save", "turns", ""));
        token_list ids = saved_ids("turns");
        const char *printed = o.out;
        const int end[] = {END, -1};
        expect_turn(&ids, &at, SYSTEM, "system", "Say little.");
        for (size_t turn = 0; turn < 2; turn++) {
            expect_turn(&ids, &at, USER, "user", turn ? second : first);
            expect_turn(&ids, &at, ASSISTANT, "assistant", NULL);
            n = check_printed(&ids, at, &printed);
            CHECK_MSG(i == 0 ? n == 2 : n > 2 && n < 300, "%zu tokens", n);
            check_answer(TURNS, &ids, at, n + (i == 1)); /* with the end marker, if it is said */
            at += n;
            expect(&ids, &at, end, NULL);
        }
        CHECK(at == ids.n && printed == o.out + o.n_out);
        free(ids.ids);
        outcome_free(&o);
    }
}

static void expect_tags(const token_list *ids, size_t *at, const char *role, const char *text) {
    const int open[] = {OPEN, -1}, close[] = {CLOSE, -1}, sep[] = {SEP, -1}, end[] = {END, -1};
    expect(ids, at, open, "message role=\""), expect(ids, at, NULL, role);
    expect(ids, at, NULL, "\""), expect(ids, at, sep, text);
    if (!text) return;
    expect(ids, at, close, "message"), expect(ids, at, sep, NULL), expect(ids, at, end, NULL);
}

/* The other format: what is cut off is closed tag by tag. Thoughts are not among the answers. */
static void tags_go_on(void) {
    const int open[] = {OPEN, -1}, close[] = {CLOSE, -1}, sep[] = {SEP, -1}, end[] = {END, -1};
    char lines[900];
    for (int think = 0; think < 2; think++) {
        const char *channel = think ? "think" : "response", *printed;
        size_t at = 0;
        outcome o = talk_ok(think ? TAGS "--think --generate 3" : TAGS "--generate 3",
                            command_line(lines, "Well?\nYes?\n", "/save", "tags", ""));
        token_list ids = saved_ids("tags");
        printed = o.out;
        for (size_t turn = 0; turn < 2; turn++) {
            expect_tags(&ids, &at, "user", turn ? "Yes?" : "Well?");
            expect_tags(&ids, &at, "assistant", NULL);
            expect(&ids, &at, open, channel), expect(&ids, &at, sep, NULL);
            check_answer(TAGS, &ids, at, 3);
            if (!think) CHECK(check_printed(&ids, at, &printed) == 3);
            at += 3;
            expect(&ids, &at, close, channel), expect(&ids, &at, sep, NULL);
            expect(&ids, &at, close, "message"), expect(&ids, &at, sep, NULL);
            expect(&ids, &at, end, NULL);
        }
        CHECK(at == ids.n && (!think || (o.n_out == 2 && strcmp(o.out, "\n\n") == 0)));
        free(ids.ids);
        outcome_free(&o);
    }
}

/* A conversation that is saved, and loaded by another run, answers as one that went on; and the
 * penalty looks at what was said before. */
static void saved_ones_go_on(void) {
    static const char *const options[] = {TURNS "--generate 20", TURNS
                                          "--generate 20 --cache f16 --repetition-penalty 1.5"};
    char lines[900];
    for (size_t i = 0; i < 2; i++) {
        outcome whole = talk_ok(options[i], "One\nTwo\n");
        outcome first = talk_ok(options[i], command_line(lines, "One\n", "/save", "session", ""));
        outcome second = talk_ok(
            options[i], command_line(lines, "Other\n/reset\nSome\n", "/load", "session", "Two\n"));
        CHECK(whole.n_out > first.n_out && memcmp(whole.out, first.out, first.n_out) == 0);
        size_t n = whole.n_out - first.n_out;
        CHECK(second.n_out > n &&
              memcmp(second.out + second.n_out - n, whole.out + first.n_out, n) == 0);
        outcome_free(&whole), outcome_free(&first), outcome_free(&second);
    }
    outcome fresh = talk_ok(TURNS "--system x --generate 9", "One\n");
    outcome again = talk_ok(TURNS "--system x --generate 9", "Some\n/reset\nOne\n");
    CHECK(again.n_out > fresh.n_out &&
          memcmp(again.out + again.n_out - fresh.n_out, fresh.out, fresh.n_out) == 0);
    outcome_free(&fresh), outcome_free(&again);
}

/* The last line may lack its end, an empty one is no message, and a conversation that has not begun
 * can be saved and gone on with. */
static void lines_of_any_form(void) {
    static const char *const forms[] = {"One\nTwo", "\nOne\n\n\r\nTwo\r\n"};
    char lines[900], more[500];
    outcome want = talk_ok(TURNS "--generate 9", "One\nTwo\n");
    for (size_t i = 0; i < 2; i++) {
        outcome o = talk_ok(TURNS "--generate 9", forms[i]);
        CHECK_MSG(o.n_out == want.n_out && memcmp(o.out, want.out, o.n_out) == 0, "form %zu", i);
        outcome_free(&o);
    }
    command_line(more, "", "/load", "empty", "One\nTwo\n");
    outcome o = talk_ok(TURNS "--generate 9", command_line(lines, "", "/save", "empty", more));
    CHECK(o.n_out == want.n_out && memcmp(o.out, want.out, o.n_out) == 0);
    outcome_free(&o), outcome_free(&want);
}

/* A copy of a model, without `but`. */
static void copy_model(const char *from, const char *to, const char *but) {
    static const char *const names[] = {"config.json", "model.safetensors", "tiktoken.model",
                                        "tokenizer_config.json"};
    char source[300], directory[300];
    size_t size;
    temporary(from, source), temporary(to, directory);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (strcmp(names[i], but) == 0) continue;
        char *bytes = read_file(source, names[i], &size);
        write_file(directory, names[i], bytes, size);
        free(bytes);
    }
}

/* What ends a text ends an answer: there it is closed as a message is, and nothing cuts it off. */
static void ends_of_text_end_answers(void) {
    char directory[300], text[100], lines[900];
    outcome whole = talk_ok(ENDLESS "--generate 30", "Go\n");
    CHECK(whole.n_out == 31);
    unsigned end = (unsigned char)whole.out[20];
    size_t n = (size_t)((const char *)memchr(whole.out, (int)end, 31) - whole.out);
    copy_model("chat-endless", "chat-stopping", "");
    snprintf(text, sizeof text, "{\"eos_token_id\": [%u, %d]}", end, END);
    write_file(temporary("chat-stopping", directory), "generation_config.json", text, strlen(text));
    outcome o = talk_ok("WORK/../chat-stopping --generate 30",
                        command_line(lines, "Go\n", "/save", "stopped", ""));
    CHECK(o.n_out == n + 1 && memcmp(o.out, whole.out, n) == 0 && o.out[n] == '\n');
    CHECK(!strstr(o.err, "cut off"));
    token_list ids = saved_ids("stopped");
    size_t at = 0;
    expect_turn(&ids, &at, USER, "user", "Go");
    expect_turn(&ids, &at, ASSISTANT, "assistant", NULL);
    CHECK(ids.n == at + n + 1 && ids.ids[at + n] == END);
    free(ids.ids);
    outcome_free(&o), outcome_free(&whole);
}

static void sampling_options(void) {
    outcome a = talk_ok(TURNS "--generate 30 --temperature 1 --seed 3", "One\n");
    outcome b = talk_ok(TURNS "--generate 30 --temperature 1 --seed 4", "One\n");
    outcome c = talk_ok(TURNS "--generate 30", "One\n");
    outcome d = talk_ok(TURNS "--generate 30 --temperature 1 --min-p 1", "One\n");
    CHECK(strcmp(a.out, b.out) != 0 && strcmp(c.out, d.out) == 0);
    outcome_free(&a), outcome_free(&b), outcome_free(&c), outcome_free(&d);
}

/* A thought, something outside of any channel, and what is said, with a token of no text: each goes
 * where it belongs, and what is unsaid ends in a line. */
static void parts_go_their_ways(void) {
    outcome o = talk_ok("WORK/../chat-chain --think --repetition-penalty 2", "Go\n");
    CHECK_MSG(strcmp(o.out, "W<520>\n") == 0, "%s", o.out);
    CHECK_MSG(strstr(o.err, "\nZY\n"), "%s", o.err);
    outcome_free(&o);
    o = talk_ok("WORK/../chat-chain --repetition-penalty 2", "Go\n"); /* says, and thinks then */
    CHECK_MSG(strcmp(o.out, "ZY\n") == 0, "%s", o.out);
    CHECK_MSG(strstr(o.err, "\nW<520>"), "%s", o.err);
    outcome_free(&o);
    o = run_program("generate", "WORK/../chat-chain --prompt W --generate 1");
    CHECK_MSG(o.status == 0 && strcmp(o.out, "<520>") == 0, "%s", o.out);
    outcome_free(&o);
}

static void nobody_hears(void) {
    char command[1200];
    size_t n;
    if (!test_has_full_device()) return;
    write_file(work, "lines", "Go\nOn\n", 6);
    snprintf(command, sizeof command,
             "%s/chat %s/../chat-turns --generate 4 <%s/lines >/dev/full 2>%s/err",
             build_directory(), work, work, work);
    int status = system(command);
    char *text = read_file(work, "err", &n);
    CHECK_MSG(WIFEXITED(status) && WEXITSTATUS(status) == 1 &&
                  strstr(text, "\nchat: standard output: cannot write: "),
              "%s", text);
    free(text);
}

/* ==== At a terminal ==== */

typedef struct terminal {
    pid_t child;
    int master, output; /* what it is typed into, and all that the program prints */
    char seen[1 << 16];
    size_t n;
} terminal;

static bool open_terminal(terminal *t, const char *model) {
    int ends[2];
    const char *name;
    char path[400], directory[400];
    memset(t, 0, sizeof *t);
    t->master = posix_openpt(O_RDWR | O_NOCTTY);
    if (t->master < 0 || grantpt(t->master) != 0 || unlockpt(t->master) != 0) return false;
    name = ptsname(t->master);
    snprintf(path, sizeof path, "%s/chat", build_directory());
    snprintf(directory, sizeof directory, "%s/../%s", work, model);
    if (!name || pipe(ends) != 0) return false;
    t->child = fork();
    if (t->child == 0) {
        setsid(); /* so that the terminal that is opened next is its own, and Ctrl-C reaches it */
        int slave = open(name, O_RDWR);
        dup2(slave, 0), dup2(ends[1], 1), dup2(ends[1], 2);
        close(ends[0]), close(ends[1]), close(t->master);
        execl(path, "chat", directory, "--generate", "1000000", "--capacity", "200000",
              (char *)NULL);
        _exit(127);
    }
    close(ends[1]);
    t->output = ends[0];
    return t->child > 0;
}

static bool has_seen(const terminal *t, const char *text) {
    size_t n = strlen(text);
    for (size_t i = 0; i + n <= t->n; i++)
        if (memcmp(t->seen + i, text, n) == 0) return true;
    return false;
}

/* Reads what is printed until `text` is there, or so many bytes; false after 20 seconds without a
 * byte, or at the end. Only the last part is kept. */
static bool wait_for(terminal *t, const char *text, size_t bytes) {
    for (size_t got = 0;;) {
        struct pollfd ready = {t->output, POLLIN, 0};
        if (t->n > sizeof t->seen / 2) {
            memmove(t->seen, t->seen + t->n / 2, t->n - t->n / 2);
            t->n -= t->n / 2;
        }
        if (poll(&ready, 1, 20000) != 1) return false;
        ssize_t n = read(t->output, t->seen + t->n, sizeof t->seen - t->n);
        if (n <= 0) return false;
        t->n += (size_t)n, got += (size_t)n;
        if (text ? !has_seen(t, text) : got < bytes) continue;
        t->n = 0;
        return true;
    }
}

static void type(const terminal *t, const char *text) {
    CHECK(write(t->master, text, strlen(text)) == (ssize_t)strlen(text));
}

/* Ctrl-C ends an answer that would go on for minutes, as a whole message; the next line is taken,
 * and two more at the prompt leave. */
static void interrupts_stop_answers(void) {
    static terminal t;
    char line[400], lines[800];
    int status = -1;
    if (!open_terminal(&t, "chat-endless")) {
        test_skip("no pseudo-terminal");
        return;
    }
    CHECK(wait_for(&t, "commands\n> ", 0));
    type(&t, "Go\n");
    CHECK(wait_for(&t, NULL, 40));
    type(&t, "\003");
    CHECK(wait_for(&t, "\n> ", 0));
    type(&t, command_line(line, "", "/save", "interrupted", "/none\n"));
    CHECK(wait_for(&t, "\"/none\"\n> ", 0));
    type(&t, "\003");
    CHECK(wait_for(&t, "Ctrl-C again leaves", 0));
    type(&t, "\003");
    while (wait_for(&t, NULL, 1)) continue;
    kill(t.child, SIGTERM); /* if it is still there */
    CHECK(waitpid(t.child, &status, 0) == t.child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    close(t.master), close(t.output);

    token_list ids = saved_ids("interrupted");
    size_t at = 0, n = ids.n;
    expect_turn(&ids, &at, USER, "user", "Go");
    expect_turn(&ids, &at, ASSISTANT, "assistant", NULL);
    CHECK_MSG(n > at + 30 && n < 150000 && ids.ids[n - 1] == END, "%zu tokens", n);
    check_answer(ENDLESS, &ids, at, 30);
    free(ids.ids);
    command_line(line, "", "/load", "interrupted", "On\n");
    outcome o = talk_ok(ENDLESS "--generate 5 --capacity 200000",
                        command_line(lines, line, "/save", "after", ""));
    ids = saved_ids("after");
    at = n;
    expect_turn(&ids, &at, USER, "user", "On");
    expect_turn(&ids, &at, ASSISTANT, "assistant", NULL);
    CHECK(ids.n == at + 6 && o.n_out == 6);
    check_answer(ENDLESS, &ids, at, 5);
    free(ids.ids);
    outcome_free(&o);
}

/* ==== Signals without a terminal ==== */

/* A conversation whose lines come from a pipe; it prints to the files "out" and "err". */
typedef struct piped {
    pid_t child;
    int input;
} piped;

static piped open_piped(const char *model) {
    piped p;
    int ends[2];
    char path[400], directory[400], out[400], err[400];
    snprintf(path, sizeof path, "%s/chat", build_directory());
    snprintf(directory, sizeof directory, "%s/../%s", work, model);
    snprintf(out, sizeof out, "%s/out", work), snprintf(err, sizeof err, "%s/err", work);
    if (pipe(ends) != 0) give_up("no pipe");
    fflush(stdout);
    p.child = fork();
    if (p.child == 0) {
        dup2(ends[0], 0);
        dup2(open(out, O_WRONLY | O_CREAT | O_TRUNC, 0666), 1);
        dup2(open(err, O_WRONLY | O_CREAT | O_TRUNC, 0666), 2);
        close(ends[0]), close(ends[1]);
        execl(path, "chat", directory, "--generate", "40", "--capacity", "200000", (char *)NULL);
        _exit(127);
    }
    if (p.child < 0) give_up("cannot fork");
    close(ends[0]);
    p.input = ends[1];
    return p;
}

static void rest(void) {
    poll(NULL, 0, 1);
}

/* Has the child ended? Its status stays to be asked for. */
static bool has_ended(const piped *p) {
    siginfo_t ended;
    memset(&ended, 0, sizeof ended);
    return waitid(P_PID, (id_t)p->child, &ended, WEXITED | WNOHANG | WNOWAIT) != 0 || ended.si_pid;
}

/* Writes a line, and returns when the program has taken all of it, for 20 seconds at most. */
static void put_line(const piped *p, const char *line) {
    int left = 1;
    CHECK(write(p->input, line, strlen(line)) == (ssize_t)strlen(line));
    for (size_t i = 0; i < 20000 && left > 0 && !has_ended(p); i++) {
        if (ioctl(p->input, FIONREAD, &left) != 0) give_up("FIONREAD");
        if (left > 0 && i > 100) rest();
    }
    CHECK_MSG(left == 0, "%d bytes are not read", left);
}

/* The status of the child's end, and what it has printed. */
static outcome end_piped(piped *p) {
    outcome o;
    int status = 0;
    close(p->input);
    for (size_t i = 0; i < 20000 && !has_ended(p); i++) rest();
    if (!has_ended(p)) kill(p->child, SIGKILL);
    if (waitpid(p->child, &status, 0) != p->child) give_up("cannot wait");
    o.status = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    o.out = read_file(work, "out", &o.n_out);
    o.err = read_file(work, "err", &o.n_err);
    return o;
}

/* A message that takes a while to read. */
enum { LONG_MESSAGE = 1500 };
static char *long_message(void) {
    char *text = (char *)test_alloc(LONG_MESSAGE + 2);
    for (size_t i = 0; i < LONG_MESSAGE; i++) text[i] = (char)('a' + i * i % 26);
    text[LONG_MESSAGE] = '\n';
    return text;
}

/* Interrupts while each of two long messages is read, and while a save reads the rest. */
static outcome interrupt_reading(const char *text) {
    char line[400];
    remove_saved("unread");
    piped p = open_piped("chat-endless");
    put_line(&p, text);
    kill(p.child, SIGINT);
    put_line(&p, "On\n");
    put_line(&p, command_line(line, "", "/save", "read", ""));
    put_line(&p, text);
    kill(p.child, SIGINT);
    put_line(&p, command_line(line, "", "/save", "unread", ""));
    kill(p.child, SIGINT);
    return end_piped(&p);
}

/* An interrupt while a message is read leaves it without an answer; the rest of it is read with the
 * next message, whose answer is as to a fresh reading of all. And a save stops too. On a machine that
 * lets this process wait, an interrupt may come late, in an answer: then once more. */
static void interrupts_stop_reading(void) {
    enum { PRINTED = 1 + 41 + 1 };
    char line[400], *text = long_message();
    size_t at = 0;
    outcome o = interrupt_reading(text);
    for (int more = 4; more > 0 && (o.status != 1 || o.n_out != PRINTED); more--) {
        outcome_free(&o);
        o = interrupt_reading(text);
    }
    snprintf(line, sizeof line, "chat: %s/unread: interrupted\n", work);
    CHECK_MSG(o.status == 1 && strstr(o.err, line), "%d: %s", o.status, o.err);
    CHECK(!exists("unread") && !exists("unread.tokens") && !exists("unread.tokens.part"));
    CHECK_MSG(o.n_out == PRINTED && o.out[0] == '\n', "%zu bytes", o.n_out);
    token_list ids = saved_ids("read");
    const int end[] = {END, -1};
    text[LONG_MESSAGE] = '\0';
    expect_turn(&ids, &at, USER, "user", text);
    expect_turn(&ids, &at, ASSISTANT, "assistant", "");
    expect_turn(&ids, &at, USER, "user", "On");
    expect_turn(&ids, &at, ASSISTANT, "assistant", NULL);
    if (at <= ids.n) check_answer(ENDLESS, &ids, at, 40);
    at += 40;
    expect(&ids, &at, end, NULL);
    CHECK(at == ids.n);
    free(ids.ids), free(text);
    outcome_free(&o);
}

/* One interrupt instead of a line leaves, where there is no terminal to tell of a second. */
static void an_interrupt_leaves(void) {
    piped p = open_piped("chat-endless");
    put_line(&p, "/help\n");
    for (size_t i = 0; i < 20000 && !has_ended(&p); i++) {
        kill(p.child, SIGINT);
        rest();
    }
    CHECK(has_ended(&p));
    outcome o = end_piped(&p);
    CHECK_MSG(o.status == 0 && o.n_out == 0 && strstr(o.err, "/load FILE"), "%d: %s", o.status,
              o.err);
    outcome_free(&o);
}

/* A file that cannot be written is told, and the conversation goes on and can be saved elsewhere. */
static void failed_saves_end_nothing(void) {
    static terminal t;
    char line[400];
    int status = -1;
    if (!open_terminal(&t, "chat-turns")) {
        test_skip("no pseudo-terminal");
        return;
    }
    write_file(work, "file", "", 0);
    CHECK(wait_for(&t, "commands\n> ", 0));
    type(&t, "One\n");
    CHECK(wait_for(&t, "\n> ", 0));
    type(&t, command_line(line, "", "/save", "file/none", ""));
    CHECK(wait_for(&t, "/file/none.tokens.part: cannot write: ", 0));
    type(&t, "Two\n");
    CHECK(wait_for(&t, "\n> ", 0));
    type(&t, command_line(line, "", "/save", "elsewhere", "/quit\n"));
    while (wait_for(&t, NULL, 1)) continue;
    kill(t.child, SIGTERM); /* if it is still there */
    CHECK(waitpid(t.child, &status, 0) == t.child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    close(t.master), close(t.output);
    token_list ids = saved_ids("elsewhere");
    size_t messages = 0;
    for (size_t i = 0; i < ids.n; i++) messages += ids.ids[i] == USER;
    CHECK(messages == 2 && ids.ids[ids.n - 1] == END);
    free(ids.ids);
}

/* ==== Refusals ==== */

static void check_line_refused(const char *options, const char *lines, const char *part) {
    outcome o = talk(options, lines);
    const char *line = strstr(o.err, "chat: ");
    CHECK_MSG(o.status == 1 && line && strchr(line, '\n') == o.err + o.n_err - 1, "%d: %s",
              o.status, o.err);
    CHECK_MSG(strstr(o.err, part), "no \"%s\" in: %s", part, o.err);
    outcome_free(&o);
}

/* What does not fit is refused before anything is read; an answer ends where it can still be
 * closed. */
static void capacity_is_kept(void) {
    char lines[600];
    check_line_refused(TURNS "--capacity 20", "A message that is too long for this\n", "/reset");
    outcome o = talk_ok(ENDLESS "--capacity 60", command_line(lines, "Go\n", "/save", "full", ""));
    token_list ids = saved_ids("full");
    CHECK_MSG(ids.n == 60 && ids.ids[59] == END, "%zu", ids.n);
    CHECK(strstr(o.err, "cut off"));
    free(ids.ids);
    outcome_free(&o);
    o = talk_ok(TAGS "--capacity 150", command_line(lines, "Go\n", "/save", "full", ""));
    ids = saved_ids("full");
    CHECK_MSG(ids.n <= 150 && ids.n > 100 && ids.ids[ids.n - 1] == END, "%zu", ids.n);
    free(ids.ids);
    outcome_free(&o);
    check_line_refused(TURNS "--capacity 9", command_line(lines, "", "/load", "full", ""),
                       "at most the session's 9");
}

static void bad_sessions(void) {
    char lines[5000], path[400];
    size_t size;
    outcome o = talk_ok(TURNS "--generate 4", command_line(lines, "Go\n", "/save", "bad", ""));
    char *tokens = read_file(work, "bad.tokens", &size);
    command_line(lines, "", "/load", "bad", "");
    write_file(work, "bad.tokens", tokens, size - 4); /* "258\n" */
    check_line_refused(TURNS, lines, "bad.tokens: expected the");
    tokens[size - 2] = '7';
    write_file(work, "bad.tokens", tokens, size);
    check_line_refused(TURNS, lines, "expected the end of a message, 258, as the last token");
    memcpy(tokens, "512", 3); /* for "259" */
    tokens[size - 2] = '8';
    write_file(work, "bad.tokens", tokens, size);
    check_line_refused(TURNS, lines,
                       "bad.tokens: token 1: expected an id below vocab_size 512, found 512");
    snprintf(path, sizeof path, "%s/bad", work);
    remove(path);
    check_line_refused(TURNS, lines, "/bad: cannot open");
    snprintf(path, sizeof path, "%s/bad.tokens", work);
    remove(path);
    check_line_refused(TURNS, lines, "bad.tokens: cannot open");
    check_line_refused(TURNS, command_line(lines, "", "/load", "none", ""), "none");
    check_line_refused(TURNS, command_line(lines, "Go\n", "/save", "no/such", ""), "no/such");
    for (size_t i = 0; i < 2; i++) {
        memset(lines, 'x', sizeof lines);
        memcpy(lines, i ? "/load " : "/save ", 6), strcpy(lines + 4096, "\n");
        check_line_refused(TURNS, lines, "xxx...: expected a shorter path");
    }
    free(tokens);
    outcome_free(&o);
}

/* What was saved under that name before is as it was, and no part is left. */
static void check_kept(const char *name, const char *before, size_t n) {
    char part[60];
    size_t size;
    char *now = read_file(work, name, &size);
    CHECK_MSG(size == n && memcmp(now, before, n) == 0, "%s: %zu bytes, not as before", name, size);
    free(now);
    snprintf(part, sizeof part, "%s.part", name);
    CHECK_MSG(!exists(part), "%s is left", part);
}

/* Without a terminal a save that fails ends the program, after the first answer: no more lines are
 * taken. */
static void check_save_fails(const char *message, const char *name, const char *part) {
    char lines[3000];
    command_line(lines, message, "/save", name, "More\n");
    outcome o = talk(TURNS "--generate 4", lines);
    const char *line = strstr(o.err, "\nchat: ");
    CHECK_MSG(o.status == 1 && o.n_out == 5 && line, "%d: %s", o.status, o.err);
    CHECK_MSG(line && strstr(line, part), "no \"%s\" in: %s", part, o.err);
    outcome_free(&o);
}

/* The disk is full as a file may not grow further, and as a device is. */
static void saves_without_room(void) {
    static char longer[1202]; /* more ids than wait to be written */
    const char *const links[][3] = {{"device", "device", "Other words\n"},
                                    {"short", "short.tokens", "Other words\n"},
                                    {"long", "long.tokens", longer}};
    char lines[900], path[400];
    size_t size, n_tokens;
    outcome o = talk_ok(TURNS "--generate 4", command_line(lines, "Go\n", "/save", "kept", ""));
    outcome_free(&o);
    char *session = read_file(work, "kept", &size);
    char *tokens = read_file(work, "kept.tokens", &n_tokens);
    signal(SIGXFSZ, SIG_IGN);
    setenv("GCOV_PREFIX", "/dev/null", 1); /* a file of make coverage's counts is not to be cut */
    rlim_t before = set_limit(RLIMIT_FSIZE, 8192);
    check_save_fails("Other words\n", "kept", "/kept.part: cannot write: ");
    set_limit(RLIMIT_FSIZE, before);
    unsetenv("GCOV_PREFIX");
    check_kept("kept", session, size), check_kept("kept.tokens", tokens, n_tokens);
    free(session), free(tokens);

    if (!test_has_full_device()) return;
    memset(longer, 'x', sizeof longer - 2), longer[sizeof longer - 2] = '\n';
    for (size_t i = 0; i < 3; i++) {
        remove_saved(links[i][0]);
        snprintf(path, sizeof path, "%s/%s", work, links[i][1]);
        CHECK(symlink("/dev/full", path) == 0);
        snprintf(lines, sizeof lines, "/%s: cannot write: ", links[i][1]);
        check_save_fails(links[i][2], links[i][0], lines);
        remove(path);
    }
    CHECK(!exists("device.tokens") && !exists("device.tokens.part"));
    CHECK(!exists("short") && !exists("short.part") && !exists("long") && !exists("long.part"));
}

/* A tokenizer of more tokens than the model knows. */
static void vocabularies_that_differ(void) {
    char directory[300];
    size_t size;
    copy_model("chat-turns", "chat-larger", "");
    char *ranks = read_file("tests/golden/tokenizer", "tiktoken.model", &size);
    write_file(temporary("chat-larger", directory), "tiktoken.model", ranks, size);
    free(ranks);
    write_names(directory, false, 2500);
    check_refused("WORK/../chat-larger </dev/null", 1,
                  "expected at most vocab_size, 512, tokens in tiktoken.model and special ones, "
                  "found 2756");
}

/* Input that is closed, and a directory. */
static void input_that_cannot_be_read(void) {
    static const char *const inputs[] = {TURNS "<&-", TURNS "<WORK"};
    for (size_t i = 0; i < 2; i++) {
        outcome o = run(inputs[i]);
        CHECK_MSG(o.status == 1 && o.n_out == 0 &&
                      strstr(o.err, "\nchat: standard input: cannot read: "),
                  "%s: %d: %s", inputs[i], o.status, o.err);
        outcome_free(&o);
    }
}

/* Models that lack something of theirs, or have it wrong. */
static void bad_models(void) {
    char directory[300];
    check_refused("no/such/model", 1, "no/such/model/config.json");
    check_refused(MODELS "kimi-linear-tiny", 1, "expected a tokenizer");
    copy_model("chat-turns", "chat-neither", "tokenizer_config.json");
    check_refused("WORK/../chat-neither", 1, "found neither");
    write_file(temporary("chat-neither", directory), "tiktoken.model", "AA== 1\n", 7);
    check_refused("WORK/../chat-neither", 1, "chat-neither/tiktoken.model: ");
    copy_model("chat-turns", "chat-wrong", "");
    write_file(temporary("chat-wrong", directory), "generation_config.json",
               "{\"eos_token_id\": -1}", 20);
    check_refused("WORK/../chat-wrong", 1,
                  "generation_config.json: key eos_token_id: expected an id or an array of ids, "
                  "found -1");
}

static void instruction_sets(void) {
    check_instruction_sets(TURNS);
    write_file(work, "lines", "Go\n", 3);
    outcome o = run_program_with("KDA_ISA=scalar", PROGRAM, TURNS "--generate 3 <WORK/lines");
    CHECK_MSG(o.status == 0 && o.n_out == 4, "%d: %s", o.status, o.err);
    outcome_free(&o);
}

static void bad_usage(void) {
    check_refused("", 2, "MODEL_DIR");
    check_refused(TURNS "--min-p 2", 2, "--min-p");
    check_refused(TURNS "--repetition-penalty 0", 2, "--repetition-penalty");
    check_refused(TURNS "--generate 0", 2, "--generate");
    check_refused(TURNS "--think </dev/null", 1, "thinking mode");
    check_refused(TURNS "--bf16-dots </dev/null", 1, "--bf16-dots: expected --cache bf16");
    check_refused(TURNS "--capacity 4611686018427387904", 1, "a session of 4611686018427387904");
    check_line_refused(TURNS, "/frob\n", "\"/frob\"");
    check_line_refused(TURNS, "/save\n", "\"/save\"");
    check_line_refused(TURNS, "/save  \n", "\"/save  \"");
    outcome o = run_ok("--help");
    CHECK(o.n_err == 0 && strstr(o.out, "--min-p") && strstr(o.out, "--isa"));
    outcome_free(&o);
    o = talk_ok(TURNS, "/help\n/quit\nnot read\n");
    CHECK(o.n_out == 0 && strstr(o.err, "/load FILE"));
    outcome_free(&o);
}

int main(void) {
    temporary(PROGRAM, work);
    write_model("chat-turns", false, 0x84);
    write_model("chat-tags", true, -1);
    write_model("chat-endless", false, -1);
    write_chain("chat-chain");
    TEST(turns_by_hand);
    TEST(tags_by_hand);
    TEST(messages_without_memory);
    TEST(attributes_are_four_segments);
    TEST(typed_markers_are_text);
    TEST(answers_have_parts);
    TEST(tags_beyond_what_is_kept);
    TEST(turns_go_on);
    TEST(tags_go_on);
    TEST(saved_ones_go_on);
    TEST(lines_of_any_form);
    TEST(ends_of_text_end_answers);
    TEST(sampling_options);
    TEST(parts_go_their_ways);
    TEST(nobody_hears);
    TEST(interrupts_stop_answers);
    TEST(failed_saves_end_nothing);
    TEST(interrupts_stop_reading);
    TEST(an_interrupt_leaves);
    TEST(capacity_is_kept);
    TEST(bad_sessions);
    TEST(saves_without_room);
    TEST(vocabularies_that_differ);
    TEST(input_that_cannot_be_read);
    TEST(bad_models);
    TEST(instruction_sets);
    TEST(bad_usage);
    return test_summary();
}
