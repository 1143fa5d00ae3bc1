/* safetensors.h - opens the tensors of a model: one safetensors file, or shards with an index.
 *
 * In one source file of a program (this also brings in the bodies of json.h):
 *
 *     #define SAFETENSORS_IMPLEMENTATION
 *     #include "safetensors.h"
 *
 *     st_checkpoint model;
 *     if (!st_open(&model, "path/to/directory", e)) return false;
 *     const st_tensor *embedding = st_find(&model, "model.embed_tokens.weight");
 *     ... embedding->data ...
 *     st_close(&model);
 *
 * THE FORMAT
 *   8 bytes: length of the header, little-endian. The header: a JSON object from tensor names to
 *   {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, offsets counted from the
 *   header's end; and "__metadata__", an object of strings, which is checked and then ignored. Then
 *   the data, little-endian.
 *
 * WHAT IS CHECKED
 *   Everything, before a tensor can be seen. The rules are those of the reference implementation:
 *   the header is at most 100,000,000 bytes, starts with '{' and is strict JSON; element types are
 *   known; shape, type and offsets agree; the tensors cover the data exactly, without overlap, gap
 *   or rest. Beyond it, a name occurs once, holds no NUL, and a shape has at most ST_MAX_DIMS
 *   dimensions. Further members of a tensor's entry are ignored. The data itself is not looked at:
 *   a BOOL may hold any byte.
 *
 * SHARDS
 *   The index's weight_map says which file of the same directory holds which tensor, and is
 *   believed: each tensor must be in the file it names, and tensors of a file that it does not
 *   place there are checked but not part of the model. Each file is opened once. The index's other
 *   members are ignored.
 *
 * MEMORY
 *   Files are mapped, read-only, where JSON_POSIX is 1 and ST_NO_MMAP is not defined, else read
 *   into memory. Tensors are used in place: their data may have any alignment, so read elements
 *   with the st_load functions or memcpy. The system is given no advice on how a mapping will be
 *   read: it reads ahead of page faults, and cold matrices come in as fast as when it is told that
 *   reads are sequential, but several times slower when it is told that they are random, which of
 *   a model's experts they are only from matrix to matrix. st_prefault and st_lock are for a
 *   program that would rather wait at its start. Names, tensors and data live until st_close, and a
 *   checkpoint may be moved by assignment. Nothing changes after opening, so any number of threads
 *   may read. Where a file was shortened while it is mapped, or its disk fails, a read ends in
 *   SIGBUS: st_file_at tells a program's handler which file it was.
 *
 * ERRORS
 *   One sentence in `error` that names the file and the tensor.
 */
#ifndef SAFETENSORS_H
#define SAFETENSORS_H

#include "error.h"
#include "json.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define ST_MAX_DIMS 8

/* Named as in the files. */
typedef enum st_dtype {
    ST_F64,
    ST_F32,
    ST_F16,
    ST_BF16,
    ST_I64,
    ST_I32,
    ST_I16,
    ST_I8,
    ST_U64,
    ST_U32,
    ST_U16,
    ST_U8,
    ST_BOOL,
    ST_F8_E4M3,
    ST_F8_E5M2,
    ST_F8_E8M0
} st_dtype;

typedef struct st_tensor {
    const char *name;
    st_dtype dtype;
    size_t n_dims; /* 0 for a scalar */
    size_t dims[ST_MAX_DIMS];
    size_t elements;           /* product of dims; may be 0 */
    size_t bytes;              /* elements times the size of one */
    const unsigned char *data; /* little-endian, any alignment */
    const char *file;          /* path, for messages */
} st_tensor;

/* Read through the functions below. */
typedef struct st_checkpoint {
    st_tensor *tensors;
    size_t count;
    struct sti_file *files;
    size_t n_files;
    json document;           /* the header, or the index: owns the names */
    const json_value *names; /* its object whose members are the tensors */
    size_t metadata;         /* place of the one member that is not; SIZE_MAX if there is none */
} st_checkpoint;

/* Opens a directory's model.safetensors or, if that is not there, the files that its
 * model.safetensors.index.json lists. On failure, of this as of the next two, the checkpoint is
 * empty: closing it is allowed, not needed. */
bool st_open(st_checkpoint *c, const char *directory, error *e);

/* Opens one file. */
bool st_open_file(st_checkpoint *c, const char *path, error *e);

/* Opens the contents of a file. The bytes stay the caller's and must outlive the checkpoint; `name`
 * stands for the path in messages. */
bool st_open_memory(st_checkpoint *c, const char *name, const void *bytes, size_t size, error *e);

void st_close(st_checkpoint *c);

/* Reads all of the files into memory, as far as it has room, so that no later use of a tensor waits
 * for the disk. Nothing where files are not mapped: they are in memory. A caller's bytes are the
 * caller's matter, here and in st_lock. */
void st_prefault(const st_checkpoint *c);

/* The same, and keeps them there until st_close: the system may not take a page of them for other
 * uses. An error where it does not allow that much, with the limit it names; some files may then be
 * locked, which does no harm. */
bool st_lock(const st_checkpoint *c, error *e);

/* Which file holds this address, and at which byte; NULL if none does. For a signal handler: it reads
 * the checkpoint, which may be one that is being opened, and calls nothing. */
const char *st_file_at(const st_checkpoint *c, const void *address, size_t *offset);

/* The tensor with exactly this name, or NULL. Does not depend on how many there are. */
const st_tensor *st_find(const st_checkpoint *c, const char *name);

/* All tensors, in the order of the header or the index; NULL past the last. */
size_t st_count(const st_checkpoint *c);
const st_tensor *st_at(const st_checkpoint *c, size_t index);

/* Name and bytes per element of a type. */
const char *st_dtype_name(st_dtype dtype);
size_t st_dtype_size(st_dtype dtype);

/* Writes a shape for messages, "[128, 64]", into `text` of ST_SHAPE_TEXT bytes, and returns it.
 * n_dims is at most ST_MAX_DIMS. */
#define ST_SHAPE_TEXT 192
const char *st_shape(const size_t *dims, size_t n_dims, char *text);

/* Elements of tensor data: any alignment, any byte order of the machine. */
static inline uint16_t st_load_u16(const void *at) {
    const unsigned char *b = (const unsigned char *)at;
    return (uint16_t)(b[0] | b[1] << 8);
}
static inline uint32_t st_load_u32(const void *at) {
    const unsigned char *b = (const unsigned char *)at;
    return (uint32_t)b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24;
}
static inline uint64_t st_load_u64(const void *at) {
    const unsigned char *b = (const unsigned char *)at;
    return (uint64_t)st_load_u32(b) | (uint64_t)st_load_u32(b + 4) << 32;
}
static inline float st_load_f32(const void *at) {
    uint32_t bits = st_load_u32(at);
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
static inline double st_load_f64(const void *at) {
    uint64_t bits = st_load_u64(at);
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

#endif

#if defined(SAFETENSORS_IMPLEMENTATION) && !defined(STI_IMPLEMENTED)
#define STI_IMPLEMENTED

#if !defined(JSON_IMPLEMENTATION)
#define JSON_IMPLEMENTATION
#endif
#include "json.h"

#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>

#if JSON_POSIX && !defined(ST_NO_MMAP)
#define STI_MMAP 1
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#else
#define STI_MMAP 0
#endif

#define STI_HEADER_LIMIT 100000000 /* the format's own */
#define STI_INDEX_LIMIT ((size_t)1 << 30)
#define STI_METADATA "__metadata__"

typedef struct sti_file {
    char *path;
    const unsigned char *bytes;
    size_t size; /* 0 as long as there are no bytes */
    void *owned; /* the same bytes, if they are to be released; NULL if they are a caller's */
} sti_file;

/* ---- Element types and shapes ---- */

static const struct sti_type {
    const char *name;
    size_t size;
} sti_types[] = {{"F64", 8},  {"F32", 4},     {"F16", 2},     {"BF16", 2},   {"I64", 8}, {"I32", 4},
                 {"I16", 2},  {"I8", 1},      {"U64", 8},     {"U32", 4},    {"U16", 2}, {"U8", 1},
                 {"BOOL", 1}, {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"F8_E8M0", 1}};

const char *st_dtype_name(st_dtype dtype) {
    return sti_types[dtype].name;
}

size_t st_dtype_size(st_dtype dtype) {
    return sti_types[dtype].size;
}

const char *st_shape(const size_t *dims, size_t n_dims, char *text) {
    size_t used = 0;
    text[used++] = '[';
    for (size_t i = 0; i < n_dims; i++)
        used +=
            (size_t)snprintf(text + used, ST_SHAPE_TEXT - used, "%s%zu", i ? ", " : "", dims[i]);
    text[used++] = ']';
    text[used] = '\0';
    return text;
}

/* ---- Files ---- */

#if STI_MMAP

static bool sti_map(sti_file *file, int descriptor, error *e) {
    struct stat status;
    if (fstat(descriptor, &status) != 0)
        return error_set(e, "%s: cannot be examined: %s", file->path, strerror(errno));
    size_t size = (size_t)status.st_size;
    if (status.st_size < 0 || (uintmax_t)status.st_size != size)
        return error_set(e, "%s: larger than this build can address", file->path);
    if (size == 0) return true; /* cannot be mapped; is refused later, as too short */
    void *bytes = mmap(NULL, size, PROT_READ, MAP_PRIVATE, descriptor, 0);
    if (bytes == MAP_FAILED)
        return error_set(e, "%s: cannot be mapped: %s", file->path, strerror(errno));
    file->owned = bytes;
    file->bytes = (const unsigned char *)bytes;
    file->size = size;
    return true;
}

static bool sti_load(sti_file *file, error *e) {
    if (!json_check_file(file->path, e)) return false;
    int descriptor = open(file->path, O_RDONLY);
    if (descriptor < 0)
        return error_set(e, "%s: cannot be opened: %s", file->path, strerror(errno));
    bool mapped = sti_map(file, descriptor, e);
    close(descriptor);
    return mapped;
}

static void sti_unload(sti_file *file) {
    if (file->owned) munmap(file->owned, file->size);
}

/* Asks for all of the file before it waits for its first page: the disk then reads ahead. */
static void sti_prefault(const sti_file *file) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    if (!file->owned) return;
    (void)posix_madvise(file->owned, file->size, POSIX_MADV_WILLNEED);
    for (size_t at = 0; at < file->size; at += page)
        (void)*(const volatile unsigned char *)(file->bytes + at);
}

static bool sti_lock(const sti_file *file, error *e) {
    char limit[80] = "";
    if (!file->owned || mlock(file->owned, file->size) == 0) return true;
    int failure = errno;
#ifdef RLIMIT_MEMLOCK
    struct rlimit most;
    if (getrlimit(RLIMIT_MEMLOCK, &most) == 0 && most.rlim_cur != RLIM_INFINITY)
        snprintf(limit, sizeof limit, "; the limit is %llu bytes in all (ulimit -l)",
                 (unsigned long long)most.rlim_cur);
#endif
    return error_set(e, "%s: %zu bytes cannot be locked in memory: %s%s", file->path, file->size,
                     strerror(failure), limit);
}

#else

static bool sti_load(sti_file *file, error *e) {
    char *bytes;
    if (!json_read_file(file->path, SIZE_MAX, &bytes, &file->size, e)) return false;
    file->owned = bytes;
    file->bytes = (const unsigned char *)bytes;
    return true;
}

static void sti_unload(sti_file *file) {
    free(file->owned);
}

static void sti_prefault(const sti_file *file) {
    (void)file;
}

static bool sti_lock(const sti_file *file, error *e) {
    return error_set(e, "%s: cannot be locked in memory: not mapped by this build", file->path);
}

#endif

static char *sti_copy(const char *text) {
    size_t size = strlen(text) + 1;
    char *copy = (char *)malloc(size);
    if (copy) memcpy(copy, text, size);
    return copy;
}

static char *sti_join(const char *directory, const char *name) {
    size_t size = strlen(directory) + 1 + strlen(name) + 1;
    char *path = (char *)malloc(size);
    if (path) snprintf(path, size, "%s/%s", directory, name);
    return path;
}

static bool sti_out_of_memory(const char *path, error *e) {
    return error_set(e, "%s: not enough memory to open the model", path);
}

/* A new last file of the checkpoint, without contents yet; it is released with the others. */
static sti_file *sti_new_file(st_checkpoint *c, const char *path, error *e) {
    sti_file *files = (sti_file *)realloc(c->files, (c->n_files + 1) * sizeof *files);
    if (files) {
        sti_file *file = &files[c->n_files];
        c->files = files;
        memset(file, 0, sizeof *file);
        file->path = sti_copy(path);
        if (file->path) {
            c->n_files++;
            return file;
        }
    }
    sti_out_of_memory(path, e);
    return NULL;
}

/* ---- One tensor of a header ---- */

typedef struct sti_reader {
    const char *path;
    const unsigned char *data; /* after the header */
    size_t data_size;
    const char *name; /* of the tensor being read */
    error *e;
} sti_reader;

/* Where a tensor's data lies, and which member of the header it is. */
typedef struct sti_span {
    size_t begin, end, member;
} sti_span;

#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
static bool
sti_fail(const sti_reader *r, const char *format, ...) {
    char message[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    return error_set(r->e, "%s: tensor %.200s: %s", r->path, r->name, message);
}

static bool sti_read_dtype(const sti_reader *r, const json_value *entry, st_tensor *t) {
    const json_value *dtype = json_member(entry, "dtype");
    char shown[JSON_SHOWN];
    for (size_t i = 0; i < sizeof sti_types / sizeof sti_types[0]; i++)
        if (json_string_is(dtype, sti_types[i].name)) {
            t->dtype = (st_dtype)i;
            return true;
        }
    return sti_fail(r, "expected a known dtype, found %s", json_show(dtype, shown));
}

static bool sti_read_shape(const sti_reader *r, const json_value *entry, st_tensor *t) {
    const json_value *shape = json_member(entry, "shape");
    char shown[JSON_SHOWN];
    if (json_kind_of(shape) != JSON_ARRAY)
        return sti_fail(r, "shape: expected an array, found %s", json_show(shape, shown));
    t->n_dims = json_count(shape);
    if (t->n_dims > ST_MAX_DIMS)
        return sti_fail(r, "shape: expected at most %d dimensions, found %zu", ST_MAX_DIMS,
                        t->n_dims);
    for (size_t i = 0; i < t->n_dims; i++) {
        const json_value *item = json_item(shape, i);
        uint64_t dim;
        if (!json_unsigned(item, &dim) || (size_t)dim != dim)
            return sti_fail(r, "shape: expected integers from 0 to %zu, found %s", (size_t)SIZE_MAX,
                            json_show(item, shown));
        t->dims[i] = (size_t)dim;
    }
    return true;
}

/* Elements and bytes; refuses what does not fit into size_t. */
static bool sti_measure(const sti_reader *r, st_tensor *t) {
    size_t size = st_dtype_size(t->dtype);
    char shape[ST_SHAPE_TEXT];
    t->elements = 1;
    for (size_t i = 0; i < t->n_dims; i++) {
        if (t->dims[i] && t->elements > SIZE_MAX / t->dims[i])
            return sti_fail(r, "shape %s has more elements than can be addressed",
                            st_shape(t->dims, t->n_dims, shape));
        t->elements *= t->dims[i];
    }
    if (t->elements > SIZE_MAX / size)
        return sti_fail(r, "shape %s of %s has more bytes than can be addressed",
                        st_shape(t->dims, t->n_dims, shape), st_dtype_name(t->dtype));
    t->bytes = t->elements * size;
    return true;
}

static bool sti_read_offsets(const sti_reader *r, const json_value *entry, st_tensor *t,
                             sti_span *span) {
    const json_value *offsets = json_member(entry, "data_offsets");
    uint64_t begin, end;
    char shape[ST_SHAPE_TEXT];
    if (json_kind_of(offsets) != JSON_ARRAY || json_count(offsets) != 2 ||
        !json_unsigned(json_item(offsets, 0), &begin) ||
        !json_unsigned(json_item(offsets, 1), &end))
        return sti_fail(r, "data_offsets: expected an array of two non-negative integers");
    unsigned long long b = begin, n = end; /* the types that printf knows */
    if (begin > end) return sti_fail(r, "data_offsets [%llu, %llu] end before they begin", b, n);
    if (end > r->data_size)
        return sti_fail(r, "data_offsets [%llu, %llu] reach past the %zu bytes of data in the file",
                        b, n, r->data_size);
    if (end - begin != t->bytes)
        return sti_fail(r, "expected %zu bytes for %s %s, found %llu in data_offsets [%llu, %llu]",
                        t->bytes, st_dtype_name(t->dtype), st_shape(t->dims, t->n_dims, shape),
                        n - b, b, n);
    span->begin = (size_t)begin;
    span->end = (size_t)end;
    t->data = r->data + span->begin;
    return true;
}

static bool sti_read_tensor(const sti_reader *r, const json_value *entry, st_tensor *t,
                            sti_span *span) {
    memset(t, 0, sizeof *t);
    t->file = r->path;
    if (json_kind_of(entry) != JSON_OBJECT)
        return sti_fail(r, "expected an object, found %s", json_kind_name(entry));
    return sti_read_dtype(r, entry, t) && sti_read_shape(r, entry, t) && sti_measure(r, t) &&
           sti_read_offsets(r, entry, t, span);
}

static bool sti_check_metadata(const char *path, const json_value *metadata, error *e) {
    bool good = json_kind_of(metadata) == JSON_OBJECT;
    for (size_t i = 0; good && i < json_count(metadata); i++)
        good = json_kind_of(json_item(metadata, i)) == JSON_STRING;
    return good || error_set(e, "%s: %s: expected an object of strings", path, STI_METADATA);
}

/* ---- Header of a file ---- */

static bool sti_read_header(const sti_file *file, json *header, sti_reader *r, error *e) {
    error inner;
    if (file->size < 10)
        return error_set(e, "%s: expected a header length and a header, found a file of %zu bytes",
                         file->path, file->size);
    uint64_t length = st_load_u64(file->bytes);
    if (length < 2 || length > file->size - 8)
        return error_set(e, "%s: expected a header length from 2 to %zu, found %llu", file->path,
                         file->size - 8, (unsigned long long)length);
    if (length > STI_HEADER_LIMIT)
        return error_set(e, "%s: expected a header of at most %d bytes, found %llu", file->path,
                         STI_HEADER_LIMIT, (unsigned long long)length);
    if (file->bytes[8] != '{')
        return error_set(e, "%s: expected the header to start with '{', found byte 0x%02x",
                         file->path, (unsigned)file->bytes[8]);
    if (!json_parse(header, "header", (const char *)file->bytes + 8, (size_t)length, &inner))
        return error_set(e, "%s: %s", file->path, inner.text);
    r->path = file->path;
    r->data = file->bytes + 8 + (size_t)length;
    r->data_size = file->size - 8 - (size_t)length;
    r->name = "";
    r->e = e;
    return true;
}

/* Where in `tensors` the member of `names` at `place` is. */
static size_t sti_index(const st_checkpoint *c, size_t place) {
    return place - (place > c->metadata);
}

/* Reads one tensor of a header, and keeps it if `names` lists it (for this shard, if there are
 * shards). */
static bool sti_add_tensor(st_checkpoint *c, sti_reader *r, const json_value *header, size_t member,
                           const char *shard, sti_span *span) {
    st_tensor tensor;
    r->name = json_member_name(header, member, NULL);
    if (!r->name) return error_set(r->e, "%s: the name of a tensor holds a NUL", r->path);
    if (!sti_read_tensor(r, json_item(header, member), &tensor, span)) return false;
    span->member = member;
    size_t place = json_find(c->names, r->name, strlen(r->name));
    if (place == JSON_NOT_FOUND) return true;
    if (shard && !json_string_is(json_item(c->names, place), shard)) return true;
    tensor.name = json_member_name(c->names, place, NULL);
    c->tensors[sti_index(c, place)] = tensor;
    return true;
}

static int sti_compare_spans(const void *left, const void *right) {
    const sti_span *a = (const sti_span *)left, *b = (const sti_span *)right;
    if (a->begin != b->begin) return a->begin < b->begin ? -1 : 1;
    if (a->end != b->end) return a->end < b->end ? -1 : 1;
    return a->member < b->member ? -1 : 1; /* so that messages do not depend on qsort */
}

/* The spans must follow each other from the first byte of the data to the last. */
static bool sti_check_coverage(sti_reader *r, const json_value *header, sti_span *spans,
                               size_t count) {
    size_t covered = 0;
    qsort(spans, count, sizeof *spans, sti_compare_spans);
    for (size_t i = 0; i < count; i++) {
        r->name = json_member_name(header, spans[i].member, NULL);
        if (spans[i].begin < covered) /* never the first */
            return sti_fail(r, "its data overlaps that of tensor %.200s",
                            json_member_name(header, spans[i - 1].member, NULL));
        if (spans[i].begin > covered)
            return sti_fail(r, "the %zu bytes of data before it belong to no tensor",
                            spans[i].begin - covered);
        covered = spans[i].end;
    }
    if (covered == r->data_size) return true;
    return error_set(r->e, "%s: the last %zu bytes of data belong to no tensor", r->path,
                     r->data_size - covered);
}

static bool sti_add_tensors(st_checkpoint *c, sti_reader *r, const json_value *header,
                            const char *shard) {
    size_t members = json_count(header), count = 0;
    size_t metadata = json_find(header, STI_METADATA, strlen(STI_METADATA));
    sti_span *spans = (sti_span *)calloc(members ? members : 1, sizeof *spans);
    if (!spans) return sti_out_of_memory(r->path, r->e);
    bool ok = true;
    for (size_t i = 0; ok && i < members; i++)
        if (i == metadata)
            ok = sti_check_metadata(r->path, json_item(header, i), r->e);
        else
            ok = sti_add_tensor(c, r, header, i, shard, &spans[count++]);
    ok = ok && sti_check_coverage(r, header, spans, count);
    free(spans);
    return ok;
}

/* ---- The checkpoint ---- */

/* Makes room for the tensors that `names` lists; until they are read, their `file` is NULL. */
static bool sti_reserve(st_checkpoint *c, const char *path, error *e) {
    c->count = json_count(c->names) - (c->metadata != SIZE_MAX);
    c->tensors = (st_tensor *)calloc(c->count ? c->count : 1, sizeof *c->tensors);
    return c->tensors || sti_out_of_memory(path, e);
}

/* Reads the only file of a checkpoint. */
static bool sti_open_single(st_checkpoint *c, const sti_file *file, error *e) {
    sti_reader r;
    if (!sti_read_header(file, &c->document, &r, e)) return false;
    c->names = json_root(&c->document);
    c->metadata = json_find(c->names, STI_METADATA, strlen(STI_METADATA));
    return sti_reserve(c, file->path, e) && sti_add_tensors(c, &r, c->names, NULL);
}

/* The index may name files beside it, and no others. */
static bool sti_is_plain_name(const char *name) {
    return name && *name && !strpbrk(name, "/\\:") && !strstr(name, "..");
}

/* Opens the shard that holds the tensor at `place`. Since all tensors of a shard are taken at once,
 * a tensor still missing tells that its shard has not been opened. */
static bool sti_open_shard(st_checkpoint *c, const char *directory, const char *index, size_t place,
                           error *e) {
    const char *name = json_member_name(c->names, place, NULL);
    const char *shard = json_string(json_item(c->names, place), NULL);
    char shown[JSON_SHOWN];
    if (!name) return error_set(e, "%s: the name of a tensor holds a NUL", index);
    if (!sti_is_plain_name(shard))
        return error_set(e, "%s: tensor %.200s: expected a file in the same directory, found %s",
                         index, name, json_show(json_item(c->names, place), shown));
    char *path = sti_join(directory, shard);
    if (!path) return sti_out_of_memory(index, e);
    sti_file *file = sti_new_file(c, path, e);
    free(path);
    json header;
    sti_reader r;
    if (!file || !sti_load(file, e) || !sti_read_header(file, &header, &r, e)) return false;
    bool ok = sti_add_tensors(c, &r, json_root(&header), shard);
    json_free(&header);
    if (ok && !c->tensors[place].file)
        return error_set(e, "%s: tensor %.200s: expected in this file by the index, not found",
                         file->path, name);
    return ok;
}

/* The shards that the text of an index lists. */
static bool sti_open_shards(st_checkpoint *c, const char *directory, const char *index,
                            const char *text, size_t length, error *e) {
    if (!json_parse(&c->document, index, text, length, e)) return false;
    c->names = json_member(json_root(&c->document), "weight_map");
    c->metadata = SIZE_MAX;
    if (json_kind_of(c->names) != JSON_OBJECT)
        return error_set(e, "%s: weight_map: expected an object, found %s", index,
                         json_kind_name(c->names));
    if (!sti_reserve(c, index, e)) return false;
    for (size_t i = 0; i < c->count; i++)
        if (!c->tensors[i].file && !sti_open_shard(c, directory, index, i, e)) return false;
    return true;
}

static bool sti_open_index(st_checkpoint *c, const char *directory, const char *index, error *e) {
    char *text;
    size_t length;
    if (!json_read_file(index, STI_INDEX_LIMIT, &text, &length, e)) return false;
    bool ok = sti_open_shards(c, directory, index, text, length, e);
    free(text);
    return ok;
}

/* Leaves an empty checkpoint if it could not be opened. */
static bool sti_opened(st_checkpoint *c, bool ok) {
    if (!ok) st_close(c);
    return ok;
}

bool st_open_memory(st_checkpoint *c, const char *name, const void *bytes, size_t size, error *e) {
    memset(c, 0, sizeof *c);
    sti_file *file = sti_new_file(c, name, e);
    if (!file) return sti_opened(c, false);
    file->bytes = (const unsigned char *)bytes;
    file->size = size;
    return sti_opened(c, sti_open_single(c, file, e));
}

bool st_open_file(st_checkpoint *c, const char *path, error *e) {
    memset(c, 0, sizeof *c);
    sti_file *file = sti_new_file(c, path, e);
    return sti_opened(c, file && sti_load(file, e) && sti_open_single(c, file, e));
}

static bool sti_open_directory(st_checkpoint *c, const char *directory, const char *single,
                               const char *index, error *e) {
    if (json_is_there(single)) return st_open_file(c, single, e);
    if (json_is_there(index)) return sti_open_index(c, directory, index, e);
    if (!json_is_there(directory)) return error_set(e, "%s: directory not found", directory);
    return error_set(e,
                     "%s: expected model.safetensors or model.safetensors.index.json, "
                     "found neither",
                     directory);
}

bool st_open(st_checkpoint *c, const char *directory, error *e) {
    memset(c, 0, sizeof *c);
    char *single = sti_join(directory, "model.safetensors");
    char *index = sti_join(directory, "model.safetensors.index.json");
    bool ok = single && index ? sti_open_directory(c, directory, single, index, e)
                              : sti_out_of_memory(directory, e);
    free(single);
    free(index);
    return sti_opened(c, ok);
}

void st_close(st_checkpoint *c) {
    for (size_t i = 0; i < c->n_files; i++) {
        sti_unload(&c->files[i]);
        free(c->files[i].path);
    }
    free(c->files);
    free(c->tensors);
    json_free(&c->document);
    memset(c, 0, sizeof *c);
}

void st_prefault(const st_checkpoint *c) {
    for (size_t i = 0; i < c->n_files; i++) sti_prefault(&c->files[i]);
}

bool st_lock(const st_checkpoint *c, error *e) {
    for (size_t i = 0; i < c->n_files; i++)
        if (!sti_lock(&c->files[i], e)) return false;
    return true;
}

const char *st_file_at(const st_checkpoint *c, const void *address, size_t *offset) {
    for (size_t i = 0; i < c->n_files; i++) {
        const sti_file *file = &c->files[i];
        uintptr_t at = (uintptr_t)address - (uintptr_t)file->bytes; /* before it: wraps */
        if (at >= file->size) continue;
        *offset = (size_t)at;
        return file->path;
    }
    return NULL;
}

const st_tensor *st_find(const st_checkpoint *c, const char *name) {
    size_t place = json_find(c->names, name, strlen(name));
    if (place == JSON_NOT_FOUND || place == c->metadata) return NULL;
    return &c->tensors[sti_index(c, place)];
}

size_t st_count(const st_checkpoint *c) {
    return c->count;
}

const st_tensor *st_at(const st_checkpoint *c, size_t index) {
    return index < c->count ? &c->tensors[index] : NULL;
}

#endif
