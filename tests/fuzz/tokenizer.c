/* tokenizer.c - a byte, then tiktoken.model, tokenizer_config.json and a text, each ended by a NUL:
 * files of any bytes, and whatever tokenizer they make gives back any text. With an odd first byte
 * the model begins with a line for each byte, so that the input need not hold these; from 2 on
 * there is no tokenizer_config.json. */
#define TOKENIZER_IMPLEMENTATION
#include "../../examples/tokenizer.h"

#include "fuzz.h"

/* Ranks 0 to 255: the bytes. */
static char *with_bytes(const char *text, size_t length, size_t *whole) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    char *model = (char *)fuzz_alloc(256 * 16 + length);
    *whole = 0;
    for (unsigned b = 0; b < 256; b++)
        *whole +=
            (size_t)sprintf(model + *whole, "%c%c== %u\n", digits[b >> 2], digits[(b & 3) << 4], b);
    if (length) memcpy(model + *whole, text, length);
    *whole += length;
    return model;
}

/* The text that ids stand for is `text`, at once and as a stream. */
static void check_ids(const tokenizer *t, const token_list *ids, const char *text, size_t length) {
    tokenizer_stream stream = {{0}, 0, 0};
    size_t at = 0, streamed = 0, n;
    for (size_t i = 0; i < ids->n; i++) {
        const char *bytes = tokenizer_bytes(t, ids->ids[i], &n);
        FUZZ_CHECK(bytes && n <= length - at && memcmp(bytes, text + at, n) == 0);
        at += n;
        bytes = tokenizer_stream_push(&stream, t, ids->ids[i], &n);
        FUZZ_CHECK(bytes && n <= length - streamed && memcmp(bytes, text + streamed, n) == 0);
        streamed += n;
    }
    const char *rest = tokenizer_stream_flush(&stream, &n);
    FUZZ_CHECK(n < 4 && n == length - streamed);
    if (n) FUZZ_CHECK(memcmp(rest, text + streamed, n) == 0);
    FUZZ_CHECK(at == length);
}

static void check_text(const tokenizer *t, const char *text, size_t length) {
    for (unsigned flags = 0; flags < 2; flags++) {
        token_list ids = {NULL, 0, 0};
        error e;
        FUZZ_CHECK(tokenizer_encode(t, text, length, flags, &ids, NULL, &e));
        for (size_t i = 0; i < ids.n; i++) FUZZ_CHECK(ids.ids[i] < tokenizer_count(t));
        if (length) check_ids(t, &ids, text, length);
        free(ids.ids);
    }
}

static void fuzz_one(const uint8_t *bytes, size_t size) {
    fuzz_input in = fuzz_from(bytes, size);
    unsigned kind = take_u8(&in);
    static tokenizeri_file model = {"m", NULL, 0}, config = {"c", NULL, 0};
    tokenizer t;
    error e;
    size_t length;
    const char *text = take_text(&in, &length), *names;
    if (kind & 1) {
        model.text = with_bytes(text, length, &model.length);
    } else {
        model.text = (char *)fuzz_copy(text, length), model.length = length;
    }
    names = take_text(&in, &config.length);
    config.text = kind & 2 ? NULL : (char *)fuzz_copy(names, config.length);
    bool ok = tokenizeri_open(&t, &model, &config, &e);
    free(model.text), free(config.text);
    if (ok)
        check_text(&t, (const char *)in.at, fuzz_left(&in));
    else
        FUZZ_CHECK(t.bytes == NULL && strlen(e.text) > 5 && !strchr(e.text, '\n'));
    tokenizer_close(&t);
}
