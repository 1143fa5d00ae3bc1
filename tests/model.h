/* model.h - for tests of the driver: the reference checkpoints, and damaged copies of them. Include
 * it after hybrid.h or safetensors.h. */
#ifndef TEST_MODEL_H
#define TEST_MODEL_H

#include "test.h"

#include <sys/stat.h>

#define MODELS "tests/golden/models/"

/* What the vendor's code computed in float64 with a checkpoint's weights. */
typedef struct golden {
    size_t n, vocab;               /* tokens, ids */
    size_t layers, dumped, hidden; /* of hidden: with the embedding; tokens; channels */
    uint32_t *ids;                 /* [n] */
    double *logits;                /* [n][vocab] */
    double *sums;                  /* [layers][dumped][hidden]: the running sums, or null */
    double f32_error;              /* of the same code in float32, relative */
} golden;

static inline double *golden_f64(const st_tensor *tensor) {
    double *values = (double *)test_alloc(tensor->elements * sizeof(double));
    for (size_t i = 0; i < tensor->elements; i++) values[i] = st_load_f64(tensor->data + 8 * i);
    return values;
}

static inline void give_up(const char *why) {
    fprintf(stderr, "%s\n", why);
    exit(2);
}

static inline golden golden_open(const char *directory) {
    golden g;
    error e;
    st_checkpoint c;
    char path[300];
    snprintf(path, sizeof path, "%s/golden.safetensors", directory);
    if (!st_open_file(&c, path, &e)) give_up(e.text);
    const st_tensor *ids = st_find(&c, "input_ids"), *logits = st_find(&c, "logits_f64");
    const st_tensor *sums = st_find(&c, "hidden_f64");
    g.n = logits->dims[0], g.vocab = logits->dims[1];
    g.layers = g.dumped = g.hidden = 0, g.sums = NULL;
    if (sums) {
        g.layers = sums->dims[0], g.dumped = sums->dims[1], g.hidden = sums->dims[2];
        g.sums = golden_f64(sums);
    }
    g.ids = (uint32_t *)test_alloc(g.n * sizeof *g.ids);
    for (size_t i = 0; i < g.n; i++) g.ids[i] = (uint32_t)st_load_u64(ids->data + 8 * i);
    g.logits = golden_f64(logits);
    const st_tensor *f32 = st_find(&c, "logits_f32");
    float *rounded = (float *)test_alloc(f32->elements * sizeof *rounded);
    for (size_t i = 0; i < f32->elements; i++) rounded[i] = st_load_f32(f32->data + 4 * i);
    g.f32_error = test_relative_l2(rounded, g.logits, f32->elements);
    free(rounded);
    st_close(&c);
    return g;
}

static inline void golden_free(golden *g) {
    free(g->ids), free(g->logits), free(g->sums);
}

static inline size_t best_f32(const float *row, size_t n) {
    size_t best = 0;
    for (size_t i = 1; i < n; i++)
        if (row[i] > row[best]) best = i;
    return best;
}

/* The largest of a row, and by how much it leads the next. */
static inline size_t best_f64(const double *row, size_t n, double *margin) {
    size_t best = 0;
    double second = -HUGE_VAL;
    for (size_t i = 1; i < n; i++)
        if (row[i] > row[best]) best = i;
    for (size_t i = 0; i < n; i++)
        if (i != best && row[i] > second) second = row[i];
    *margin = row[best] - second;
    return best;
}

/* Logits of all tokens: near the reference, and the same token wherever it is sure of one. */
static inline void check_logits(const golden *g, const float *logits, double bound) {
    size_t sure = 0;
    CHECK_AT_MOST("logits", test_relative_l2(logits, g->logits, g->n * g->vocab), bound);
    for (size_t t = 0; t < g->n; t++) {
        double margin;
        size_t best = best_f64(g->logits + t * g->vocab, g->vocab, &margin);
        if (margin <= 1e-3) continue;
        sure++;
        CHECK_MSG(best_f32(logits + t * g->vocab, g->vocab) == best, "token %zu", t);
    }
    CHECK(sure > g->n / 2);
}

/* Running sums, hidden [layers][n][hidden], each layer near the reference. */
static inline void check_sums(const golden *g, const float *hidden, double bound) {
    for (size_t l = 0; l < g->layers; l++)
        CHECK_AT_MOST("running sum",
                      test_relative_l2(hidden + l * g->n * g->hidden,
                                       g->sums + l * g->dumped * g->hidden, g->dumped * g->hidden),
                      bound);
}

static inline const char *build_directory(void) {
    const char *build = getenv("BUILD");
    return build ? build : "build";
}

/* "<build>/tmp/<name>", made a directory. `path` has 300 bytes. */
static inline const char *temporary(const char *name, char *path) {
    const char *build = build_directory();
    mkdir(build, 0777);
    snprintf(path, 300, "%s/tmp", build);
    mkdir(path, 0777);
    snprintf(path, 300, "%s/tmp/%s", build, name);
    mkdir(path, 0777);
    return path;
}

static inline void write_file(const char *directory, const char *name, const void *bytes,
                              size_t size) {
    char path[400];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    FILE *file = fopen(path, "wb");
    if (!file || fwrite(bytes, 1, size, file) != size || fclose(file) != 0) give_up(path);
}

static inline char *read_file(const char *directory, const char *name, size_t *size) {
    char path[400], *bytes = NULL;
    error e;
    snprintf(path, sizeof path, "%s/%s", directory, name);
    if (!json_read_file(path, (size_t)1 << 28, &bytes, size, &e)) give_up(e.text);
    return bytes;
}

/* Writes a copy of a model of one file, but for what `spoil` makes of one tensor's data. */
static inline void write_spoilt(const char *from, const char *name,
                                void (*spoil)(const st_tensor *tensor, unsigned char *data),
                                const char *directory) {
    char path[400];
    size_t size, n_config, at = 0;
    error e;
    st_checkpoint c;
    snprintf(path, sizeof path, "%s/model.safetensors", from);
    if (!st_open_file(&c, path, &e)) give_up(e.text);
    const st_tensor *tensor = st_find(&c, name);
    if (!tensor || !st_file_at(&c, tensor->data, &at)) give_up(name);
    char *bytes = read_file(from, "model.safetensors", &size);
    char *config = read_file(from, "config.json", &n_config);
    spoil(tensor, (unsigned char *)bytes + at);
    write_file(directory, "model.safetensors", bytes, size);
    write_file(directory, "config.json", config, n_config);
    free(bytes), free(config);
    st_close(&c);
}

/* Past a JSON value that starts at `at`: strings hold neither brackets nor escapes here. */
static inline const char *past_value(const char *at) {
    int depth = 0;
    for (; *at; at++) {
        if (*at == '[' || *at == '{') depth++;
        if (depth == 0 && (*at == ',' || *at == '\n' || *at == '}')) return at;
        if (*at == ']' || *at == '}') depth--;
    }
    return at;
}

/* A copy of a config.json in which a key, "a" or "a.b", has another value, or is missing where
 * `value` is null; a key that is not there is added to the object it belongs to. The text is the
 * caller's to free. */
static inline char *edit(const char *text, const char *key, const char *value) {
    char name[100];
    const char *dot = strchr(key, '.'), *from = text;
    char *edited = (char *)test_alloc(strlen(text) + 1000);
    if (dot) {
        snprintf(name, sizeof name, "\"%.*s\": {", (int)(dot - key), key);
        from = strstr(text, name);
        if (!from) give_up(key);
        from += strlen(name);
        key = dot + 1;
    }
    snprintf(name, sizeof name, "\"%s\":", key);
    const char *at = strstr(from, name);
    if (!at && !value) give_up(key);
    if (!at) {
        at = dot ? from : strchr(text, '{') + 1;
        sprintf(edited, "%.*s\"%s\": %s,%s", (int)(at - text), text, key, value, at);
        return edited;
    }
    const char *end = past_value(at + strlen(name));
    if (value) {
        sprintf(edited, "%.*s%s %s%s", (int)(at - text), text, name, value, end);
        return edited;
    }
    if (*end == ',') { /* the comma after it goes too, or else the one before */
        end++;
    } else {
        while (*at != ',') at--;
    }
    sprintf(edited, "%.*s%s", (int)(at - text), text, end);
    return edited;
}

#endif
