/* model.c - a config.json, a NUL, and the headers of a checkpoint: whatever matrices both agree on,
 * quantised ones too, can be run.
 *
 * A line for each tensor: its name, its type, its dimensions, and perhaps "=" and the integers that
 * it holds. Of that a safetensors file is made with sound offsets, which what mutates bytes would
 * hardly find. Other data is a pattern.
 */
#define HYBRID_IMPLEMENTATION
#include "../../examples/hybrid.h"

#include "fuzz.h"

enum { MOST_DATA = 1 << 16, MOST_NAME = 120, LINE_HEADER = MOST_NAME + 250 };

typedef struct builder {
    fuzz_input in;
    char *header; /* of the file */
    size_t used;
    unsigned char *data; /* [MOST_DATA] */
    size_t n_data;
} builder;

/* A word of the line, cut to fit; empty at the line's end. */
static void take_word(fuzz_input *in, char *word, size_t room) {
    size_t n = 0;
    while (in->at < in->end && *in->at == ' ') in->at++;
    for (; in->at<in->end && * in->at> ' '; in->at++)
        if (n + 1 < room && *in->at != '"' && *in->at != '\\') word[n++] = (char)*in->at;
    word[n] = '\0';
}

static void end_line(fuzz_input *in) {
    while (in->at < in->end && *in->at++ != '\n') continue;
}

/* Bytes of a dtype; 0 for a name that is none. */
static size_t size_of_type(const char *name) {
    for (int i = 0; i <= ST_F8_E8M0; i++)
        if (strcmp(name, st_dtype_name((st_dtype)i)) == 0) return st_dtype_size((st_dtype)i);
    return 0;
}

/* One tensor into the header and the data; a line that is none is left out. */
static void add_tensor(builder *b) {
    char name[MOST_NAME], type[12], word[12], shape[ST_MAX_DIMS * 13 + 1] = "";
    take_word(&b->in, name, sizeof name);
    take_word(&b->in, type, sizeof type);
    size_t bytes = size_of_type(type), at = 0, first = b->n_data;
    take_word(&b->in, word, sizeof word);
    for (int i = 0; i < ST_MAX_DIMS && *word >= '0' && *word <= '9'; i++) {
        unsigned long dim = strtoul(word, NULL, 10);
        at += (size_t)snprintf(shape + at, sizeof shape - at, "%s%lu", i ? "," : "", dim);
        bytes = dim && bytes > MOST_DATA / dim ? MOST_DATA + 1 : bytes * dim;
        take_word(&b->in, word, sizeof word);
    }
    if (size_of_type(type) == 0 || bytes > MOST_DATA - b->n_data) return;
    for (size_t i = 0; i < bytes; i++) b->data[first + i] = (unsigned char)(17 * i + 40);
    for (size_t i = 0; *word == '=' && i + 8 <= bytes; i += 8) {
        char number[12];
        take_word(&b->in, number, sizeof number);
        uint64_t value = strtoul(number, NULL, 10);
        for (size_t k = 0; k < 8; k++) b->data[first + i + k] = (unsigned char)(value >> 8 * k);
    }
    b->n_data += bytes;
    b->used +=
        (size_t)snprintf(b->header + b->used, LINE_HEADER,
                         "%c\"%s\":{\"dtype\":\"%s\",\"shape\":[%s],\"data_offsets\":[%zu,%zu]}",
                         b->used > 8 ? ',' : '{', name, type, shape, first, b->n_data);
}

/* The safetensors file that the lines describe, in memory of its size. */
static unsigned char *build(fuzz_input in, size_t *size) {
    size_t lines = 1;
    for (const uint8_t *at = in.at; at < in.end; at++) lines += *at == '\n';
    builder b = {in, (char *)fuzz_alloc(8 + lines * LINE_HEADER + 2), 8,
                 (unsigned char *)fuzz_alloc(MOST_DATA), 0};
    for (; b.in.at < b.in.end; end_line(&b.in)) add_tensor(&b);
    if (b.used == 8) b.header[b.used++] = '{';
    b.header[b.used++] = '}';
    for (size_t i = 0; i < 8; i++) b.header[i] = (char)(unsigned char)((b.used - 8) >> 8 * i);
    *size = b.used + b.n_data;
    unsigned char *file = (unsigned char *)fuzz_alloc(*size);
    memcpy(file, b.header, b.used);
    memcpy(file + b.used, b.data, b.n_data);
    free(b.header), free(b.data);
    return file;
}

/* Three tokens, as prompt and as one more; every matrix is read. */
static void run_model(const hybrid_model *model) {
    hybrid_session session;
    hybrid_workspace work;
    hybrid_want want;
    error e;
    hybrid_session_options options = {3, LINEAR_F32, 0};
    hybrid_workspace_options how;
    const uint32_t last = (uint32_t)model->config.vocab_size - 1, ids[3] = {0, last, last / 2};
    memset(&how, 0, sizeof how), memset(&want, 0, sizeof want);
    how.block = HYBRID_MIN_BLOCK, how.capacity = 3;
    FUZZ_CHECK(hybrid_session_open(&session, model, &options, &e));
    FUZZ_CHECK(hybrid_workspace_open(&work, model, &how, &e));
    want.last_logits = (float *)fuzz_alloc(model->config.vocab_size * sizeof(float));
    FUZZ_CHECK(hybrid_forward(&work, &session, ids, 2, &want, &e));
    FUZZ_CHECK(hybrid_forward(&work, &session, ids + 2, 1, &want, &e));
    FUZZ_CHECK(session.n_tokens == 3);
    free(want.last_logits);
    hybrid_workspace_close(&work);
    hybrid_session_close(&session);
}

static void fuzz_one(const uint8_t *bytes, size_t size) {
    static hybrid_model model;
    quantization quantized;
    error e;
    fuzz_input in = fuzz_from(bytes, size);
    size_t length, file_size;
    const char *config = take_text(&in, &length);
    memset(&model, 0, sizeof model);
    if (!hybrid_config_parse(&model.config, "config.json", config, length, &e) ||
        !quantization_parse(&quantized, "config.json", config, length, &e))
        return;
    unsigned char *file = build(in, &file_size);
    bool ok = st_open_memory(&model.checkpoint, "m", file, file_size, &e) &&
              hybridi_bind(&model, &quantized, "d", &e);
    if (ok) {
        run_model(&model);
        hybrid_close(&model);
    } else {
        FUZZ_CHECK(strlen(e.text) > 5 && !strchr(e.text, '\n'));
    }
    quantization_free(&quantized);
    free(file);
}
