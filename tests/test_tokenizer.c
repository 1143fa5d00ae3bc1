/* test_tokenizer.c - ids as tiktoken gives them, any bytes and back, streams, and files that lie.
 *
 * tests/golden/tokenizer holds a small vocabulary of the Kimi kind and two lists of texts with the
 * ids that tiktoken gives for them with the Kimi pattern: cases.json, written by hand, and
 * mixed.json, drawn from the vocabulary, the bounds of character classes, contractions and names of
 * special tokens. In mixed.json there are also the ids of another vocabulary, of all bytes and all
 * pairs of bytes, in whose ids the ends of pieces show.
 */
#include "test.h"

/* Allocations fail from the given one on; SIZE_MAX for never. Counts those that the tokenizer
 * makes. */
static size_t allocations, allocations_allowed = SIZE_MAX;
static void *test_malloc(size_t size) {
    return allocations++ < allocations_allowed ? malloc(size) : NULL;
}
static void *test_calloc(size_t count, size_t size) {
    return allocations++ < allocations_allowed ? calloc(count, size) : NULL;
}
static void *test_realloc(void *old, size_t size) {
    return allocations++ < allocations_allowed ? realloc(old, size) : NULL;
}
#define malloc test_malloc
#define calloc test_calloc
#define realloc test_realloc
#define SAFETENSORS_IMPLEMENTATION /* for program.h */
#include "../examples/safetensors.h"
#define PROGRAM "tokenize"
#include "program.h" /* before there is a type called arguments */
#include <unistd.h>
#define TOKENIZER_IMPLEMENTATION
#include "../examples/stop.h"
#include "../examples/tokenizer.h"
#undef malloc
#undef calloc
#undef realloc

#define GOLDEN "tests/golden/tokenizer"

static tokenizer t;     /* the golden one */
static tokenizer pairs; /* byte b is token b, bytes a b are token 256 + 256 a + b */

static uint64_t steps; /* of the latest encode */

static void free_ids(token_list *ids) {
    free(ids->ids);
}

static token_list encode(const tokenizer *with, const char *text, size_t length, unsigned flags) {
    token_list ids = {0};
    steps = 0;
    char *exact = (char *)test_alloc(length); /* so that a sanitizer sees a read past the end */
    error e;
    if (length) memcpy(exact, text, length);
    if (!tokenizer_encode(with, exact, length, flags, &ids, &steps, &e)) give_up(e.text);
    free(exact);
    return ids;
}

static bool same(const token_list *a, const token_list *b) {
    return a->n == b->n && (a->n == 0 || memcmp(a->ids, b->ids, a->n * sizeof *a->ids) == 0);
}

/* Do the tokens' bytes, one after another, make this text? */
static bool decodes_to(const tokenizer *with, const token_list *ids, const char *text,
                       size_t length) {
    size_t at = 0;
    for (size_t i = 0; i < ids->n; i++) {
        size_t n;
        const char *bytes = tokenizer_bytes(with, ids->ids[i], &n);
        if (!bytes || n == 0 || n > length - at || memcmp(bytes, text + at, n) != 0) return false;
        at += n;
    }
    return at == length;
}

static void check_round_trip(const char *text, size_t length) {
    for (unsigned flags = 0; flags <= TOKENIZER_SPECIAL; flags++) {
        token_list ids = encode(&t, text, length, flags);
        CHECK(decodes_to(&t, &ids, text, length));
        free_ids(&ids);
    }
}

static void check_ids(const tokenizer *with, const char *text, size_t length, unsigned flags,
                      const uint32_t *want, size_t n) {
    token_list ids = encode(with, text, length, flags);
    CHECK_MSG(ids.n == n, "%.60s: %zu ids, expected %zu", text, ids.n, n);
    for (size_t i = 0; i < n && i < ids.n; i++)
        CHECK_MSG(ids.ids[i] == want[i], "%.60s: id %zu is %u, expected %u", text, i,
                  (unsigned)ids.ids[i], (unsigned)want[i]);
    free_ids(&ids);
}

/* ---- Reference texts ---- */

typedef void text_check(const char *text, size_t length, unsigned flags, const json_value *item);

static void for_each_text(const char *file, size_t expected, text_check *check) {
    size_t size;
    char *bytes = read_file(GOLDEN, file, &size);
    json document;
    error e;
    if (!json_parse(&document, file, bytes, size, &e)) give_up(e.text);
    size_t n = json_count(json_root(&document));
    CHECK_MSG(n == expected, "%s: %zu texts", file, n);
    for (size_t i = 0; i < n; i++) {
        const json_value *item = json_item(json_root(&document), i);
        bool special = false;
        size_t length = 0;
        const char *text = json_string(json_member(item, "text"), &length);
        json_boolean(json_member(item, "special"), &special);
        check(text, length, special ? TOKENIZER_SPECIAL : 0, item);
    }
    json_free(&document);
    free(bytes);
}

static void check_list(const tokenizer *with, const char *text, size_t length, unsigned flags,
                       const json_value *ids) {
    size_t n = json_count(ids);
    uint32_t *want = (uint32_t *)test_alloc(n * sizeof *want);
    for (size_t i = 0; i < n; i++) {
        uint64_t id = UINT64_MAX;
        CHECK(json_unsigned(json_item(ids, i), &id));
        want[i] = (uint32_t)id;
    }
    check_ids(with, text, length, flags, want, n);
    free(want);
}

static void check_reference(const char *text, size_t length, unsigned flags,
                            const json_value *item) {
    const json_value *pair_ids = json_member(item, "pair_ids");
    check_list(&t, text, length, flags, json_member(item, "ids"));
    if (pair_ids) check_list(&pairs, text, length, flags, pair_ids);
    check_round_trip(text, length);
}

static void gives_tiktokens_ids(void) {
    for_each_text("cases.json", 43, check_reference);
    for_each_text("mixed.json", 36, check_reference);
}

/* What DerivedGeneralCategory.txt and Scripts.txt of Unicode 16.0.0 give as totals. */
static void knows_every_character(void) {
    static const struct {
        unsigned kind;
        size_t count;
    } totals[] = {{TOKENIZERI_HAN, 99030},
                  {TOKENIZERI_LETTER, 1858 + 2258 + 31 + 404 + 136477},
                  {TOKENIZERI_NUMBER, 1911},
                  {TOKENIZERI_SPACE, 25},
                  {TOKENIZERI_NEWLINE, 2}};
    CHECK(strcmp(UNICODE_VERSION, "16.0.0") == 0);
    for (size_t i = 0; i < sizeof totals / sizeof *totals; i++) {
        size_t count = 0;
        for (uint32_t code = 0; code < UNICODE_END; code++)
            count += (tokenizeri_kind_of(code) & totals[i].kind) != 0;
        CHECK_MSG(count == totals[i].count, "kind %u: %zu characters, expected %zu", totals[i].kind,
                  count, totals[i].count);
    }
    /* Cased letters, and marks: only those are both upper and lower and no letters. */
    size_t upper = 0, lower = 0, marks = 0;
    for (uint32_t code = 0; code < UNICODE_END; code++) {
        unsigned kind = tokenizeri_kind_of(code);
        bool is_upper = kind & TOKENIZERI_UPPER, is_lower = kind & TOKENIZERI_LOWER;
        upper += is_upper && !is_lower;
        lower += is_lower && !is_upper;
        marks += is_upper && is_lower && !(kind & TOKENIZERI_LETTER);
    }
    CHECK(upper == 1858 + 31 && lower == 2258);
    CHECK(marks == 2501 - 2); /* U+16FF0 and U+16FF1 are Han */
}

/* Ends of the pieces that a text is cut into, `n` of them. */
static void check_pieces(const char *text, const size_t *ends, size_t n) {
    tokenizeri_text s = {&t, text, strlen(text)};
    size_t at = 0;
    for (size_t i = 0; i < n && at < s.length; i++) {
        at = tokenizeri_piece(&s, at);
        CHECK_MSG(at == ends[i], "piece %zu of \"%s\" ends at %zu", i, text, at);
    }
    CHECK(at == s.length);
}

/* Where a word ends that begins with letters that are upper and lower case in one, U+00AA: before
 * capitals that no small letter follows. */
static void cuts_words(void) {
    check_pieces("\xc2\xaa"
                 "AB c",
                 (const size_t[]){2, 4, 6}, 3);
    check_pieces("\xc2\xaa"
                 "ABc",
                 (const size_t[]){5}, 1);
    check_pieces("A\xc2\xaa"
                 "B1",
                 (const size_t[]){3, 4, 5}, 3);
    check_pieces("-ABc'S-", (const size_t[]){6, 7}, 2);
    check_pieces("ABc'\xc5\xbf-", (const size_t[]){6, 7}, 2);
    check_pieces("a'REb'vec'Ll-", (const size_t[]){4, 8, 12, 13}, 4);
    check_pieces("a'rxb'vlc'lx-", (const size_t[]){1, 5, 9, 12, 13}, 5); /* no contractions */
    check_pieces("a'r", (const size_t[]){1, 3}, 2);
}

/* ---- Special tokens ---- */

static void knows_special_tokens(void) {
    static const struct {
        const char *name;
        uint32_t id;
    } names[] = {{"[BOS]", 2500},         {"<|im_end|>", 2502},
                 {"<|im_middle|>", 2517}, {"<|reserved_token_2505|>", 2505},
                 {"[UNK]", 2754},         {"[PAD]", 2755}};
    uint32_t id = 7;
    CHECK(tokenizer_count(&t) == 2756);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        size_t length = 0;
        const char *bytes = tokenizer_bytes(&t, names[i].id, &length);
        CHECK(tokenizer_special(&t, names[i].name, &id) && id == names[i].id);
        CHECK(length == strlen(names[i].name) && memcmp(bytes, names[i].name, length) == 0);
        check_ids(&t, names[i].name, length, TOKENIZER_SPECIAL, &names[i].id, 1);
        token_list ids = encode(&t, names[i].name, length, 0);
        for (size_t k = 0; k < ids.n; k++) CHECK(ids.ids[k] < 2500);
        free_ids(&ids);
    }
    id = 7;
    CHECK(!tokenizer_special(&t, "", &id) && !tokenizer_special(&t, "[BO", &id));
    CHECK(!tokenizer_special(&t, "[BOS]x", &id) && !tokenizer_special(&t, "a", &id) && id == 7);
    size_t length;
    CHECK(!tokenizer_bytes(&t, 2756, &length) && !tokenizer_bytes(&t, UINT32_MAX, &length));
}

/* ---- Texts of all kinds ---- */

static void takes_any_bytes(void) {
    char text[512];
    token_list none = encode(&t, NULL, 0, TOKENIZER_SPECIAL);
    CHECK(none.n == 0);
    for (unsigned b = 0; b < 256; b++) { /* the vocabulary has them as its first 256 tokens */
        uint32_t want = b;
        text[0] = (char)(unsigned char)b;
        check_ids(&t, text, 1, 0, &want, 1);
    }
    for (int round = 0; round < 3000; round++) {
        size_t length = (size_t)(test_uniform() * sizeof text);
        for (size_t i = 0; i < length; i++) { /* half of them bytes that UTF-8 is made of */
            unsigned byte = (unsigned)(test_uniform() * 256);
            if (test_uniform() < 0.5) byte = (byte & 0x0f) | (byte & 0x10 ? 0xe0 : 0x80);
            text[i] = (char)(unsigned char)byte;
        }
        check_round_trip(text, length);
    }
}

/* Bytes that are not UTF-8 are punctuation: they end a word, follow a space, and take line ends. */
static void takes_what_is_not_utf8(void) {
    static const char *const texts[] = {"\xc0\xaf", "\xed\xa0\x80", "\xf4\x90\x80\x80",
                                        "\xf5\x80", "\xe6\xbc",     "\xf0\x9f\x99",
                                        "\x80\x80", "\xff\xfe\xfd", "\xe2\x80\xe2"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        char text[32];
        size_t ends[3] = {5, 8 + strlen(texts[i]), 13 + strlen(texts[i])};
        snprintf(text, sizeof text, "hello %s\r\nworld", texts[i]);
        check_pieces(text, ends, 3);
        check_round_trip(text, strlen(text));
    }
    check_pieces("\xe6\xe6\xbc\xa2", (const size_t[]){1, 4}, 2);
    check_pieces("a\xff"
                 "b",
                 (const size_t[]){1, 3}, 2);
}

/* One character, a million times: cut at every 25,000th, and joined in n log n steps. */
static void takes_a_million_of_one_character(void) {
    static const char *const characters[] = {"a", " ", "!", "\n", "0", "\xe6\xbc\xa2", "\xff"};
    for (size_t i = 0; i < sizeof characters / sizeof *characters; i++) {
        size_t width = strlen(characters[i]), count = 1000000 / width / 25000 * 25000;
        size_t length = count * width;
        char *text = (char *)test_alloc(length);
        for (size_t k = 0; k < length; k++) text[k] = characters[i][k % width];
        token_list ids = encode(&t, text, length, TOKENIZER_SPECIAL), cut = {0};
        uint64_t taken = steps;
        error e;
        CHECK(decodes_to(&t, &ids, text, length));
        for (size_t k = 0; k < count; k += 25000)
            CHECK(tokenizer_encode(&t, text + k * width, 25000 * width, 0, &cut, NULL, &e));
        CHECK(same(&ids, &cut));
        /* Each byte is pushed, popped and considered three times or fewer, at log2(150,000). */
        CHECK_MSG(taken < 100 * length, "%g steps a byte", (double)taken / (double)length);
        free_ids(&ids);
        free_ids(&cut);
        free(text);
    }
}

/* Is a text, of `length` bytes, encoded as its first `cut` bytes and then the rest? */
static void check_cut(const char *text, size_t length, size_t cut) {
    token_list all = encode(&pairs, text, length, 0), parts = {0};
    error e;
    CHECK(tokenizer_encode(&pairs, text, cut, 0, &parts, NULL, &e));
    CHECK(tokenizer_encode(&pairs, text + cut, length - cut, 0, &parts, NULL, &e));
    CHECK(same(&all, &parts) && decodes_to(&pairs, &all, text, length));
    free_ids(&all);
    free_ids(&parts);
}

/* The 400,000th of these characters is within a word, and its pairs differ where it is cut. What
 * Python takes for white space but no alternative does, U+001C, counts to a run of it. */
static void cuts_long_texts(void) {
    static const char word[] = "zyxwvutsrqpon ";
    size_t length = 400000 + 5000;
    char *text = (char *)test_alloc(length);
    for (size_t i = 0; i < length; i++) text[i] = word[i % 14];
    CHECK(text[399999] == 'u' && text[400000] == 't');
    check_cut(text, length, 400000);
    memset(text, ' ', 20001);
    memset(text + 20001, 0x1c, 20000);
    check_cut(text, 40001, 25000);
    free(text);
}

/* ---- Streams ---- */

/* A push returns whole characters: of a text that is UTF-8, nothing else. */
static bool is_utf8(const char *text, size_t length) {
    for (size_t at = 0, n; at < length; at += n) {
        n = json_utf8_length(text + at, length - at);
        if (n == 0) return false;
    }
    return true;
}

/* Feeds ids and collects what comes out; `whole`: the text is UTF-8. */
static void check_stream(const uint32_t *ids, size_t n, const char *text, size_t length,
                         bool whole) {
    tokenizer_stream stream = {0};
    char *out = (char *)test_alloc(length);
    size_t used = 0, pushed = 0, came;
    for (size_t i = 0; i <= n; i++) {
        size_t bytes = 0;
        const char *part = i < n ? tokenizer_stream_push(&stream, &t, ids[i], &came)
                                 : tokenizer_stream_flush(&stream, &came);
        if (i < n) tokenizer_bytes(&t, ids[i], &bytes);
        pushed += bytes;
        CHECK(part && came <= length - used);
        if (!part || came > length - used) break;
        if (whole) CHECK(is_utf8(part, came));
        memcpy(out + used, part, came);
        used += came;
        CHECK(pushed - used < 4);
        bool between = whole && (pushed == length || ((unsigned char)text[pushed] & 0xc0) != 0x80);
        if (i == n || between) CHECK(used == pushed);
    }
    CHECK(used == length && (length == 0 || memcmp(out, text, length) == 0));
    free(out);
}

static void check_text_stream(const char *text, size_t length, unsigned flags,
                              const json_value *item) {
    token_list ids = encode(&t, text, length, flags);
    uint32_t *bytes = (uint32_t *)test_alloc(length * sizeof *bytes);
    size_t most = length < 60 ? length : 60;
    (void)item;
    check_stream(ids.ids, ids.n, text, length, true);
    for (size_t i = 0; i < length; i++) bytes[i] = (unsigned char)text[i];
    check_stream(bytes, length, text, length, true);
    for (size_t i = 0; i <= most; i++) check_stream(bytes, i, text, i, is_utf8(text, i));
    free(bytes);
    free_ids(&ids);
}

static void streams_whole_characters(void) {
    for_each_text("cases.json", 43, check_text_stream);
    for_each_text("mixed.json", 36, check_text_stream);
    for (int round = 0; round < 2000; round++) {
        uint32_t ids[40];
        char text[40];
        for (size_t i = 0; i < 40; i++) {
            unsigned byte = (unsigned)(test_uniform() * 256);
            if (test_uniform() < 0.6) byte |= 0x80;
            text[i] = (char)(unsigned char)byte;
            ids[i] = byte;
        }
        check_stream(ids, 40, text, 40, false);
    }
    tokenizer_stream stream = {0};
    size_t length = 9;
    tokenizer_stream_push(&stream, &t, 0xe6, &length);
    CHECK(length == 0);
    CHECK(!tokenizer_stream_push(&stream, &t, 2756, &length));
    tokenizer_stream_push(&stream, &t, 0xbc, &length);
    CHECK(length == 0);
    const char *text = tokenizer_stream_push(&stream, &t, 0xa2, &length);
    CHECK(length == 3 && memcmp(text, "\xe6\xbc\xa2", 3) == 0);
}

/* ---- Files ---- */

static char directory[300];

/* Refused with one sentence that names the file and says this. */
static void check_open_refused(const char *file, const char *message) {
    tokenizer bad;
    error e;
    char want[1500];
    snprintf(want, sizeof want, "%s/%s: %s", directory, file, message);
    memset(&e, 0, sizeof e);
    bool ok = tokenizer_open(&bad, directory, &e);
    CHECK_MSG(!ok && strcmp(e.text, want) == 0, "gives: %s\n  wants: %s", ok ? "no error" : e.text,
              want);
    if (!ok) CHECK(!bad.bytes && !bad.spans && !bad.slots && bad.n_ranks == 0);
    tokenizer_close(&bad);
}

/* The golden tiktoken.model with `length` other bytes for a line, counted from 1. */
static void replace_line(size_t line, const char *bytes, size_t length) {
    size_t size, at = 0, end;
    char *model = read_file(GOLDEN, "tiktoken.model", &size);
    char *edited = (char *)test_alloc(size + length);
    for (size_t i = 1; i < line; i++) at += strcspn(model + at, "\n") + 1;
    end = at + strcspn(model + at, "\n");
    memcpy(edited, model, at);
    memcpy(edited + at, bytes, length);
    memcpy(edited + at + length, model + end, size - end);
    write_file(directory, "tiktoken.model", edited, at + length + size - end);
    free(edited);
    free(model);
}

static void restore(const char *file) {
    size_t size;
    char *bytes = read_file(GOLDEN, file, &size);
    write_file(directory, file, bytes, size);
    free(bytes);
}

static void refuses_bad_lines(void) {
    static const struct {
        const char *line, *message;
    } cases[] = {
        {"", "line 300, column 1: expected a base64 digit or the space after a token, found byte "
             "0x0a"},
        {"IGA=", "line 300, column 5: expected a base64 digit or the space after a token, found "
                 "byte 0x0a"},
        {"IGA=\t299", "line 300, column 5: expected a base64 digit or the space after a token, "
                      "found byte 0x09"},
        {"I$A= 299", "line 300, column 2: expected a base64 digit or the space after a token, "
                     "found '$'"},
        {"I{A= 299", "line 300, column 2: expected a base64 digit or the space after a token, "
                     "found '{'"},
        {"I\xff", "line 300, column 2: expected a base64 digit or the space after a token, found "
                  "byte 0xff"},
        {"IAAAA=== 299", "line 300, column 8: expected a base64 digit or the space after a token, "
                         "found '='"},
        {"IAAAA 299", "line 300, token: expected base64 in groups of 4, found 5 digits and 0 '='"},
        {"IGA=== 299", "line 300, column 6: expected a base64 digit or the space after a token, "
                       "found '='"},
        {"IGA=A 299", "line 300, column 5: expected a base64 digit or the space after a token, "
                      "found 'A'"},
        {" 299", "line 300, token: expected base64 in groups of 4, found 0 digits and 0 '='"},
        {"IGA 299", "line 300, token: expected base64 in groups of 4, found 3 digits and 0 '='"},
        {"IGAAA=== 299", "line 300, column 8: expected a base64 digit or the space after a token, "
                         "found '='"},
        {"IGB= 299", "line 300, token: expected a last base64 digit with no bits to spare, found "
                     "'B'"},
        {"qqqq", "line 300, column 5: expected a base64 digit or the space after a token, found "
                 "byte 0x0a"},
        {"qqqq ", "line 300, column 6: expected a rank, found byte 0x0a"},
        {"qqqq -1", "line 300, column 6: expected a rank, found '-'"},
        {"qqqq 299 ", "line 300, column 9: expected a digit or the end of the line, found byte "
                      "0x20"},
        {"qqqq 299\r", "line 300, column 9: expected a digit or the end of the line, found byte "
                       "0x0d"},
        {"qqqq 2:9", "line 300, column 7: expected a digit or the end of the line, found ':'"},
        {"qqqq 2.9", "line 300, column 7: expected a digit or the end of the line, found '.'"},
        {"qqqq 298", "line 300, rank 298 occurs twice"},
        {"qqqq 2500", "line 300, expected a rank below the 2500 lines of the file, found 2500"},
        {"qqqq 4294967595",
         "line 300, expected a rank below the 2500 lines of the file, found 4294967595"},
        {"qqqq 18446744073709551915", "line 300, expected a rank below the 2500 lines of the "
                                      "file, found 18446744073709551915"},
        {"qqqq 1234567890123456789012345678901234567890123", /* the first 40 digits are shown */
         "line 300, expected a rank below the 2500 lines of the file, found "
         "1234567890123456789012345678901234567890"},
        {"AA== 299", "line 300, the token of rank 0 occurs again"}};
    restore("tokenizer_config.json");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        replace_line(300, cases[i].line, strlen(cases[i].line));
        check_open_refused("tiktoken.model", cases[i].message);
    }
    replace_line(300, "qq\0q 299", 8);
    check_open_refused("tiktoken.model", "line 300, column 3: expected a base64 digit or the space "
                                         "after a token, found byte 0x00");
    replace_line(300, "qqqq 2\0009", 8);
    check_open_refused(
        "tiktoken.model",
        "line 300, column 7: expected a digit or the end of the line, found byte 0x00");
    replace_line(66, "qqqq 65", 7);
    check_open_refused("tiktoken.model",
                       "expected every byte to be a token, found none for byte 0x41");
}

/* Lines and files that are long, short or none. */
static void refuses_bad_sizes(void) {
    enum { longest = TOKENIZER_MAX_TOKEN / 3 * 4 + 2 }; /* digits of the longest token */
    size_t huge = 2000000;
    char *line = (char *)test_alloc(huge);
    memset(line, 'A', huge);
    memcpy(line + huge - 4, " 299", 4);
    replace_line(300, line, huge);
    check_open_refused("tiktoken.model",
                       "line 300, token: expected at most 4096 bytes, found 1499997");
    memcpy(line + longest, "== 299", 6);
    replace_line(300, line, longest + 6);
    tokenizer with_long;
    error e;
    CHECK_MSG(tokenizer_open(&with_long, directory, &e), "%s", e.text);
    tokenizer_close(&with_long);
    free(line);
    write_file(directory, "tiktoken.model", "", 0);
    check_open_refused("tiktoken.model", "expected from 1 to 1048576 lines, found 0");
    line = (char *)test_alloc(TOKENIZER_MAX_RANKS + 1);
    memset(line, '\n', TOKENIZER_MAX_RANKS + 1);
    write_file(directory, "tiktoken.model", line, TOKENIZER_MAX_RANKS + 1);
    check_open_refused("tiktoken.model", "expected from 1 to 1048576 lines, found 1048577");
    free(line);
    char path[400];
    snprintf(path, sizeof path, "%s/tiktoken.model", directory);
    remove(path);
    check_open_refused("tiktoken.model", "file not found");
    CHECK(!tokenizer_is_in(directory) && tokenizer_is_in(GOLDEN));
}

/* Every cut but that of the last line end loses a token or changes a rank. */
static void refuses_cut_files(void) {
    size_t size;
    char *model = read_file(GOLDEN, "tiktoken.model", &size);
    for (size_t cut = 1; cut < size; cut += cut < 40 ? 1 : 83) {
        tokenizer bad;
        error e;
        write_file(directory, "tiktoken.model", model, size - cut);
        bool ok = tokenizer_open(&bad, directory, &e);
        CHECK_MSG(ok == (cut == 1), "cut by %zu: %s", cut, ok ? "no error" : e.text);
        tokenizer_close(&bad);
    }
    free(model);
}

static void refuses_bad_special_tokens(void) {
#define ADDED "added_tokens_decoder: "
    static const struct {
        const char *text, *message;
    } cases[] = {
        {"{}", ADDED "expected an object, found nothing"},
        {"[", "line 1, column 2: expected a value, found the end of the text"},
        {"{\"added_tokens_decoder\": 3}", ADDED "expected an object, found 3"},
        {"{\"added_tokens_decoder\": {\"2499\": {\"content\": \"x\"}}}",
         ADDED "expected ids from 2500 to 2755, found \"2499\""},
        {"{\"added_tokens_decoder\": {\"2756\": {\"content\": \"x\"}}}",
         ADDED "expected ids from 2500 to 2755, found \"2756\""},
        {"{\"added_tokens_decoder\": {\"99999999999999999999999\": {\"content\": \"x\"}}}",
         ADDED "expected ids from 2500 to 2755, found \"99999999999999999999999\""},
        {"{\"added_tokens_decoder\": {\"02500\": {\"content\": \"x\"}}}",
         ADDED "expected ids from 2500 to 2755, found \"02500\""},
        {"{\"added_tokens_decoder\": {\"0\": {\"content\": \"x\"}}}",
         ADDED "expected ids from 2500 to 2755, found \"0\""},
        {"{\"added_tokens_decoder\": {\"2500x\": {\"content\": \"x\"}}}",
         ADDED "expected ids from 2500 to 2755, found \"2500x\""},
        {"{\"added_tokens_decoder\": {\"\": {\"content\": \"x\"}}}",
         ADDED "expected ids from 2500 to 2755, found \"\""},
        {"{\"added_tokens_decoder\": {\"2500\\u0000\": {\"content\": \"x\"}}}",
         ADDED "expected ids from 2500 to 2755, found \"\""},
        {"{\"added_tokens_decoder\": {\"2500\": \"x\"}}",
         ADDED "2500: content: expected a string of 1 to 256 bytes, found nothing"},
        {"{\"added_tokens_decoder\": {\"2500\": {\"content\": \"\"}}}",
         ADDED "2500: content: expected a string of 1 to 256 bytes, found \"\""},
        {"{\"added_tokens_decoder\": {\"2501\": {\"content\": \"x\"}, \"2500\": {\"content\": "
         "\"x\"}}}",
         "the special tokens 2500 and 2501 have the same name, x"},
        {"{\"added_tokens_decoder\": {\"2500\": {\"content\": \"<|reserved_token_2600|>\"}}}",
         "the special tokens 2500 and 2600 have the same name, <|reserved_token_2600|>"}};
    restore("tiktoken.model");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        write_file(directory, "tokenizer_config.json", cases[i].text, strlen(cases[i].text));
        check_open_refused("tokenizer_config.json", cases[i].message);
    }
    char text[400], message[200]; /* a name one byte too long, of which a message shows the first */
    snprintf(text, sizeof text, "{\"added_tokens_decoder\": {\"2500\": {\"content\": \"%0257d\"}}}",
             0);
    snprintf(message, sizeof message,
             ADDED "2500: content: expected a string of 1 to 256 bytes, found \"%077d\"", 0);
    write_file(directory, "tokenizer_config.json", text, strlen(text));
    check_open_refused("tokenizer_config.json", message);
}

/* What is there and cannot be opened, as a link to itself, is not as if it were not there. */
static void refuses_special_tokens_that_do_not_open(void) {
    char path[400];
    tokenizer bad;
    error e;
    restore("tiktoken.model");
    snprintf(path, sizeof path, "%s/tokenizer_config.json", directory);
    remove(path);
    CHECK(symlink("tokenizer_config.json", path) == 0);
    CHECK(!tokenizer_open(&bad, directory, &e) && strncmp(e.text, path, strlen(path)) == 0);
    remove(path);
}

/* Names of which one begins another, the longest allowed among them; and names without a file. */
static void takes_other_special_tokens(void) {
    char text[1000], name[257], path[400];
    tokenizer other;
    error e;
    uint32_t id;
    memset(name, 'x', 256);
    name[256] = '\0';
    snprintf(text, sizeof text,
             "{\"added_tokens_decoder\": {\"2510\": {\"content\": \"<a\"}, \"2511\": {\"content\": "
             "\"<a>\"}, \"2512\": {\"content\": \"%s\"}, \"2513\": {\"content\": \"<\"}}}",
             name);
    write_file(directory, "tokenizer_config.json", text, strlen(text));
    if (!tokenizer_open(&other, directory, &e)) give_up(e.text);
    token_list ids = encode(&other, "<a><a<<a>", 9, TOKENIZER_SPECIAL);
    CHECK(ids.n == 4 && ids.ids[0] == 2511 && ids.ids[1] == 2510);
    CHECK(ids.n == 4 && ids.ids[2] == 2513 && ids.ids[3] == 2511);
    CHECK(tokenizer_special(&other, name, &id) && id == 2512);
    free_ids(&ids);
    tokenizer_close(&other);
    snprintf(path, sizeof path, "%s/tokenizer_config.json", directory);
    remove(path);
    if (!tokenizer_open(&other, directory, &e)) give_up(e.text);
    CHECK(tokenizer_special(&other, "[BOS]", &id) && id == 2500);
    CHECK(tokenizer_special(&other, "[EOT]", &id) && id == 2509);
    CHECK(tokenizer_special(&other, "[PAD]", &id) && id == 2755);
    CHECK(tokenizer_special(&other, "<|reserved_token_2502|>", &id) && id == 2502);
    tokenizer_close(&other);
}

/* The ranks count, not the lines' order. */
static void takes_lines_in_any_order(void) {
    static const char text[] = "The lines' order says nothing: 123 漢字 Привет";
    size_t size, out = 0;
    char *model = read_file(GOLDEN, "tiktoken.model", &size);
    char *reversed = (char *)test_alloc(size);
    for (size_t end = size - 1, start; out < size; end = start - 1) { /* the place of a line end */
        for (start = end; start > 0 && model[start - 1] != '\n'; start--) {
        }
        memcpy(reversed + out, model + start, end + 1 - start);
        out += end + 1 - start;
    }
    write_file(directory, "tiktoken.model", reversed, size);
    tokenizer other;
    error e;
    if (!tokenizer_open(&other, directory, &e)) give_up(e.text);
    token_list a = encode(&t, text, strlen(text), 0), b = encode(&other, text, strlen(text), 0);
    CHECK(same(&a, &b));
    free_ids(&a);
    free_ids(&b);
    tokenizer_close(&other);
    free(reversed);
    free(model);
}

static void survives_without_memory(void) {
    char text[3000]; /* one piece that allocates, and more ids than the first allocation holds */
    size_t needed = 0;
    for (size_t i = 0; i < sizeof text; i++) text[i] = "!?#"[i % 3];
    memcpy(text, "[BOS]", 5);
    for (bool done = false; !done; needed++) {
        tokenizer other;
        token_list ids = {0};
        error e;
        memset(&e, 0, sizeof e);
        allocations = 0, allocations_allowed = needed;
        bool opened = tokenizer_open(&other, GOLDEN, &e);
        bool encoded = opened && tokenizer_encode(&other, text, sizeof text, TOKENIZER_SPECIAL,
                                                  &ids, NULL, &e);
        allocations_allowed = SIZE_MAX;
        CHECK(encoded || strstr(e.text, "memory"));
        CHECK(encoded || ids.n == 0);
        if (!opened) CHECK(!other.bytes && !other.spans && !other.slots);
        done = encoded;
        free_ids(&ids);
        tokenizer_close(&other);
    }
    CHECK(needed > 10);
}

static void base64_line(FILE *file, const unsigned char *bytes, size_t n, uint32_t rank) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    unsigned bits = (unsigned)bytes[0] << 16 | (n > 1 ? (unsigned)bytes[1] << 8 : 0) |
                    (n > 2 ? (unsigned)bytes[2] : 0);
    fprintf(file, "%c%c%c%c %u\n", digits[bits >> 18], digits[bits >> 12 & 63],
            n > 1 ? digits[bits >> 6 & 63] : '=', n > 2 ? digits[bits & 63] : '=', (unsigned)rank);
}

/* 250 tokens for which a table of 506 would be searched from one place: with each as many more are
 * met as there are. */
static void refuses_tokens_of_one_place(void) {
    char path[400];
    tokenizer bad;
    error e = {""};
    uint32_t rank = 0;
    snprintf(path, sizeof path, "%s/tiktoken.model", directory);
    FILE *file = fopen(path, "wb");
    if (!file) give_up(path);
    for (; rank < 256; rank++) base64_line(file, &(unsigned char){(unsigned char)rank}, 1, rank);
    for (uint32_t i = 0; rank < 506; i++) {
        unsigned char bytes[3] = {(unsigned char)i, (unsigned char)(i >> 8),
                                  (unsigned char)(i >> 16)};
        if (tokenizeri_hash((const char *)bytes, 3) % 1024 == 7)
            base64_line(file, bytes, 3, rank++);
    }
    if (fclose(file) != 0) give_up(path);
    snprintf(path, sizeof path, "%s/tiktoken.model: line ", directory);
    CHECK(!tokenizer_open(&bad, directory, &e) && strncmp(e.text, path, strlen(path)) == 0);
    CHECK_MSG(strstr(e.text, ", too many tokens share a hash value"), "%s", e.text);
    restore("tiktoken.model");
}

static void open_pairs(void) {
    char path[400];
    error e;
    snprintf(path, sizeof path, "%s/tiktoken.model", directory);
    FILE *file = fopen(path, "wb");
    if (!file) give_up(path);
    for (uint32_t i = 0; i < 256 + 65536; i++) {
        unsigned char bytes[2] = {(unsigned char)i, 0};
        if (i >= 256) bytes[0] = (unsigned char)((i - 256) >> 8), bytes[1] = (unsigned char)i;
        base64_line(file, bytes, i < 256 ? 1 : 2, i);
    }
    snprintf(path, sizeof path, "%s/tokenizer_config.json", directory);
    remove(path);
    if (fclose(file) != 0) give_up(path);
    if (!tokenizer_open(&pairs, directory, &e)) give_up(e.text);
}

/* ---- The program ---- */

static void prints_ids(void) {
    write_file(work, "text", "[BOS] \xff\n", 8);
    outcome o = run_ok(GOLDEN " WORK/text --special --repeat 2");
    CHECK_MSG(strcmp(o.out, "2500 32 255 10\n") == 0, "%s", o.out);
    outcome_free(&o);
    write_file(work, "text", "", 0);
    o = run_ok(GOLDEN " WORK/text");
    CHECK(o.n_out == 0);
    outcome_free(&o);
    check_refused("no/such/directory WORK/text", 1, "no/such/directory/tiktoken.model: file not");
    o = run(GOLDEN " WORK/none");
    CHECK_MSG(o.status == 1 && o.n_out == 0 && strstr(o.err, "/none: file not found\n"), "%s",
              o.err);
    outcome_free(&o);
    check_refused(GOLDEN, 2, "expected MODEL_DIR and FILE, found 1");
    check_refused(GOLDEN " WORK/text --repeat 0", 2, "--repeat");
}

/* Without eos_token_id in any file: the special tokens that have one of the names. */
static void ends_of_text_by_name(void) {
    token_list stops = {NULL, 0, 0};
    error e = {""};
    uint32_t eos = 0, end = 0;
    CHECK_MSG(stop_read(GOLDEN, &t, &stops, &e), "%s", e.text);
    CHECK(tokenizer_special(&t, "[EOS]", &eos) && tokenizer_special(&t, "<|im_end|>", &end));
    CHECK(stops.n == 2 && stop_has(&stops, eos) && stop_has(&stops, end));
    stops.n = 0;
    tokenizer none;
    memset(&none, 0, sizeof none);
    CHECK(stop_read(GOLDEN, &none, &stops, &e) && stops.n == 0);
    free(stops.ids);
}

static void paths_that_are_too_long(void) {
    static char longer[5000];
    token_list stops = {NULL, 0, 0};
    tokenizer other;
    error e = {""};
    memset(longer, 'x', sizeof longer - 1);
    CHECK(!tokenizer_open(&other, longer, &e) && strstr(e.text, "xxx...: expected a shorter path"));
    CHECK(tokenizer_memory(&other) == 0 && !tokenizer_is_in(longer));
    longer[4095 - strlen("/tiktoken.model")] =
        '\0'; /* of which tokenizer_config.json is too long */
    CHECK(!tokenizer_open(&other, longer, &e) && strstr(e.text, "xxx...: expected a shorter path"));
    memset(longer, 'x', sizeof longer - 1);
    e.text[0] = '\0';
    CHECK(!stop_read(longer, &t, &stops, &e) && strstr(e.text, "xxx...: expected a shorter path"));
    CHECK(stops.n == 0);
}

int main(void) {
    error e;
    if (!tokenizer_open(&t, GOLDEN, &e)) give_up(e.text);
    temporary("tokenizer", directory);
    temporary(PROGRAM, work);
    open_pairs();
    TEST(gives_tiktokens_ids);
    TEST(knows_every_character);
    TEST(cuts_words);
    TEST(knows_special_tokens);
    TEST(takes_any_bytes);
    TEST(takes_what_is_not_utf8);
    TEST(takes_a_million_of_one_character);
    TEST(cuts_long_texts);
    TEST(streams_whole_characters);
    TEST(refuses_bad_lines);
    TEST(refuses_bad_sizes);
    TEST(refuses_cut_files);
    TEST(refuses_bad_special_tokens);
    TEST(refuses_special_tokens_that_do_not_open);
    TEST(refuses_tokens_of_one_place);
    TEST(takes_other_special_tokens);
    TEST(takes_lines_in_any_order);
    TEST(ends_of_text_by_name);
    TEST(paths_that_are_too_long);
    TEST(survives_without_memory);
    TEST(prints_ids);
    tokenizer_close(&pairs);
    tokenizer_close(&t);
    return test_summary();
}
