/* safetensors.c - any bytes as a safetensors file, and any text as the index of two sound shards. */
#define SAFETENSORS_IMPLEMENTATION
#include "../../examples/safetensors.h"

#include "fuzz.h"

#include <sys/stat.h>

static void check_tensor(const st_checkpoint *c, const st_tensor *t) {
    char shape[ST_SHAPE_TEXT];
    unsigned sum = 0;
    size_t elements = 1;
    FUZZ_CHECK(t->n_dims <= ST_MAX_DIMS);
    for (size_t i = 0; i < t->n_dims; i++) elements *= t->dims[i];
    FUZZ_CHECK(t->elements == elements && t->bytes == elements * st_dtype_size(t->dtype));
    for (size_t i = 0; i < t->bytes; i++) sum += t->data[i]; /* all of it can be read */
    FUZZ_CHECK(sum <= 255 * t->bytes);
    FUZZ_CHECK(strlen(st_shape(t->dims, t->n_dims, shape)) < ST_SHAPE_TEXT);
    FUZZ_CHECK(st_find(c, t->name) == t);
}

static void check_opened(bool ok, st_checkpoint *c, const error *e) {
    for (size_t i = 0; ok && i < st_count(c); i++) check_tensor(c, st_at(c, i));
    if (ok) FUZZ_CHECK(st_at(c, st_count(c)) == NULL && st_find(c, "__metadata__") == NULL);
    if (!ok) FUZZ_CHECK(c->count == 0 && strlen(e->text) > 10 && !strchr(e->text, '\n'));
    st_close(c);
}

static void write_shard(const char *directory, const char *name, const char *header, size_t data) {
    char path[300];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    FILE *file = fopen(path, "wb");
    if (!file) exit(2);
    for (size_t i = 0; i < 8; i++) putc(i == 0 ? (int)strlen(header) : 0, file);
    fputs(header, file);
    for (size_t i = 0; i < data; i++) putc((int)i, file);
    if (fclose(file) != 0) exit(2);
}

/* A directory with the shards a and b, made at the first call. */
static const char *shards(void) {
    static char directory[200];
    const char *build = getenv("BUILD");
    if (*directory) return directory;
    snprintf(directory, sizeof directory, "%.150s", build ? build : "build");
    mkdir(directory, 0777);
    strcat(directory, "/fuzz-shards");
    mkdir(directory, 0777);
    write_shard(directory, "a",
                "{\"x\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]},"
                "\"y\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[24,25]}}",
                25);
    write_shard(directory, "b", "{\"z\":{\"dtype\":\"BF16\",\"shape\":[0],\"data_offsets\":[0,0]}}",
                0);
    return directory;
}

static void fuzz_one(const uint8_t *bytes, size_t size) {
    st_checkpoint c;
    error e;
    check_opened(st_open_memory(&c, "t", bytes, size, &e), &c, &e);
    if (size == 0 || *bytes != '{') return;
    memset(&c, 0, sizeof c);
    bool ok = sti_open_shards(&c, shards(), "index", (const char *)bytes, size, &e);
    check_opened(sti_opened(&c, ok), &c, &e);
}
