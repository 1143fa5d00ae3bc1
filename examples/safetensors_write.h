/* safetensors_write.h - writes a safetensors file as a stream: first what it holds, then the data.
 *
 *     st_writer w;
 *     size_t dims[2] = {rows, cols};
 *     bool ok = st_writer_open(&w, "model.safetensors", e) &&
 *               st_writer_add(&w, "a.weight", ST_F32, dims, 2, e) && ... every other tensor ... &&
 *               st_writer_floats(&w, a, rows * cols, e) && ... their data, in the same order ...;
 *     ok = st_writer_close(&w, ok, e);
 *
 * The file appears under its name when it is complete (output.h). What is held in memory is the
 * header. It begins with {"__metadata__":{"format":"pt"}, without which some readers refuse a
 * checkpoint, and is padded with spaces so that the data starts at a multiple of 8 bytes.
 *
 * Every function is static.
 */
#ifndef SAFETENSORS_WRITE_H
#define SAFETENSORS_WRITE_H

#include "output.h"
#include "safetensors.h"

#include <errno.h>
#include <stdlib.h>

typedef struct st_writer {
    output out;
    char *header; /* the JSON so far */
    size_t length, room;
    bool started;               /* the header is in the file */
    uint64_t declared, written; /* bytes of data */
} st_writer;

/* The path must live as long as the writer. Whatever this returns, st_writer_close ends it. */
static inline bool st_writer_open(st_writer *w, const char *path, error *e);

/* The next tensor, before any data. Its bytes must fit 64 bits, and a name occurs once: neither is
 * checked. A name is UTF-8. */
static inline bool st_writer_add(st_writer *w, const char *name, st_dtype dtype, const size_t *dims,
                                 size_t n_dims, error *e);

/* The next n bytes of data, across tensors as they come: little-endian elements. Floats are F32. */
static inline bool st_writer_bytes(st_writer *w, const void *bytes, size_t n, error *e);
static inline bool st_writer_floats(st_writer *w, const float *values, size_t n, error *e);

/* All data that is still to come is zeros, which take no room on a disk that can leave holes. */
static inline bool st_writer_zeros(st_writer *w, error *e);

/* Ends the file; `ok`: all went well so far. Data that is short of what was added is a failure, and
 * on failure nothing is left of the file. */
static inline bool st_writer_close(st_writer *w, bool ok, error *e);

/* Writes `text` as a JSON string, quotes included, into `out` of ST_QUOTED(strlen(text)) bytes;
 * returns its length. */
#define ST_QUOTED(length) (6 * (length) + 3)
static inline size_t st_quote(const char *text, char *out);

/* ---- Bodies ---- */

static inline size_t st_quote(const char *text, char *out) {
    size_t n = 0;
    out[n++] = '"';
    for (; *text; text++) {
        if ((unsigned char)*text < 0x20) {
            n += (size_t)sprintf(out + n, "\\u%04x", (unsigned)(unsigned char)*text);
            continue;
        }
        if (*text == '"' || *text == '\\') out[n++] = '\\';
        out[n++] = *text;
    }
    out[n++] = '"';
    out[n] = '\0';
    return n;
}

static bool sti_writer_reserve(st_writer *w, size_t more, error *e) {
    size_t room = w->room ? w->room : 4096;
    while (room - w->length < more && room <= SIZE_MAX / 2) room *= 2;
    char *header = room - w->length < more ? NULL : (char *)realloc(w->header, room);
    if (!header) return error_set(e, "%s: no memory for a header", w->out.path);
    w->header = header;
    w->room = room;
    return true;
}

static inline bool st_writer_open(st_writer *w, const char *path, error *e) {
    static const char start[] = "{\"__metadata__\":{\"format\":\"pt\"}";
    memset(w, 0, sizeof *w);
    if (!output_open(&w->out, path, e) || !sti_writer_reserve(w, sizeof start, e)) return false;
    memcpy(w->header, start, sizeof start - 1);
    w->length = sizeof start - 1;
    return true;
}

static inline bool st_writer_add(st_writer *w, const char *name, st_dtype dtype, const size_t *dims,
                                 size_t n_dims, error *e) {
    char shape[ST_SHAPE_TEXT];
    uint64_t bytes = st_dtype_size(dtype);
    size_t most = ST_QUOTED(strlen(name)) + ST_SHAPE_TEXT + 128;
    if (w->started)
        return error_set(e, "%s: tensor %.200s: expected before all data, found after some",
                         w->out.path, name);
    if (!sti_writer_reserve(w, most, e)) return false;
    for (size_t i = 0; i < n_dims; i++) bytes *= dims[i];
    unsigned long long begin = w->declared, end = begin + bytes; /* the type that printf knows */
    w->header[w->length++] = ',';
    w->length += st_quote(name, w->header + w->length);
    w->length += (size_t)snprintf(w->header + w->length, w->room - w->length,
                                  ":{\"dtype\":\"%s\",\"shape\":%s,\"data_offsets\":[%llu,%llu]}",
                                  st_dtype_name(dtype), st_shape(dims, n_dims, shape), begin, end);
    w->declared = end;
    return true;
}

static bool sti_writer_start(st_writer *w, error *e) {
    unsigned char prefix[8];
    if (w->started) return true;
    if (!sti_writer_reserve(w, 8, e)) return false;
    w->header[w->length++] = '}';
    while (w->length % 8 != 0) w->header[w->length++] = ' ';
    for (size_t b = 0; b < 8; b++) prefix[b] = (unsigned char)((uint64_t)w->length >> 8 * b);
    w->started = true;
    return output_bytes(&w->out, prefix, sizeof prefix, e) &&
           output_bytes(&w->out, w->header, w->length, e);
}

/* Room for n more bytes of data among those that were declared. */
static bool sti_writer_claim(st_writer *w, uint64_t n, error *e) {
    if (!sti_writer_start(w, e)) return false;
    if (n > w->declared - w->written)
        return error_set(e, "%s: more data than the %llu bytes of its tensors", w->out.path,
                         (unsigned long long)w->declared);
    w->written += n;
    return true;
}

static inline bool st_writer_bytes(st_writer *w, const void *bytes, size_t n, error *e) {
    return sti_writer_claim(w, n, e) && output_bytes(&w->out, bytes, n, e);
}

static inline bool st_writer_floats(st_writer *w, const float *values, size_t n, error *e) {
    return sti_writer_claim(w, 4 * (uint64_t)n, e) && output_floats(&w->out, values, n, e);
}

static inline bool st_writer_zeros(st_writer *w, error *e) {
    static const unsigned char zero = 0;
    uint64_t left = w->declared - w->written;
    if (!sti_writer_claim(w, left, e) || left == 0) return left == 0;
    for (uint64_t n = left - 1; n > 0;) {
        long step = n < 1L << 30 ? (long)n : 1L << 30;
        if (fseek(w->out.file, step, SEEK_CUR) != 0)
            return error_set(e, "%s: cannot be extended by %llu bytes: %s", w->out.part,
                             (unsigned long long)left, strerror(errno));
        n -= (uint64_t)step;
    }
    return output_bytes(&w->out, &zero, 1, e);
}

static inline bool st_writer_close(st_writer *w, bool ok, error *e) {
    ok = ok && sti_writer_start(w, e);
    if (ok && w->written != w->declared)
        ok = error_set(e, "%s: expected %llu bytes of data, found %llu", w->out.path,
                       (unsigned long long)w->declared, (unsigned long long)w->written);
    free(w->header);
    w->header = NULL;
    return output_close(&w->out, ok, e);
}

#endif
