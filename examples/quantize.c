/* quantize.c - a checkpoint with its large matrices in 4 or 8 bits, as compressed-tensors lays out.
 *
 *     build/quantize MODEL_DIR OUT_DIR --format int4
 *     build/quantize MODEL_DIR OUT_DIR --format int4 --group 32 --asymmetric
 *     build/quantize MODEL_DIR OUT_DIR --format int8
 *
 * quantize.h says what numbers become, quantize_config.h which matrices are quantised. Here are the
 * files: those matrices are replaced, every other tensor is copied bit for bit, each shard becomes a
 * shard of the same name, config.json says in quantization_config what was done and is otherwise the
 * same text, and other files are copied, but for safetensors.
 *
 * Shards are read and written as streams, some rows at a time. What is held in memory does not
 * depend on the number of layers or experts: buffers of BLOCK_BYTES, the scales of one matrix, and
 * a row for each thread; and of every tensor its name and place. config.json is written last: what
 * a failed run leaves is no model.
 *
 * Exit status: 0, or 1 for bad input, or 2 for bad usage, with one line on stderr.
 */
#include "arguments.h"
#include "output.h"
#include "quantize_config.h"
#include "safetensors_write.h"
#include "signals.h"

#include <math.h>
#include <time.h>

#if JSON_POSIX
#include <dirent.h>
#include <sys/stat.h>
#endif

static const char help[] =
    "usage: quantize MODEL_DIR OUT_DIR --format int8|int4|mxfp4 [options]\n"
    "\n"
    "Writes a compressed-tensors checkpoint of a bf16, f16 or f32 one: in few bits the experts,\n"
    "shared experts, dense MLPs and the q, k, v and o projections of attention; as they are all\n"
    "other tensors. OUT_DIR must be empty or not exist.\n"
    "\n"
    "  --format F      int8: 8 bits, a bf16 scale for each row (int-quantized)\n"
    "                  int4: 4 bits, a bf16 scale for each group of a row (pack-quantized)\n"
    "                  mxfp4: 4-bit floats, a power of two for each group of 32\n"
    "                  (mxfp4-pack-quantized)\n"
    "  --group N       int4: elements of a row that share a scale, a multiple of 8, or channel\n"
    "                  (or 0) for the whole row (default 64)\n"
    "  --asymmetric    int4: with zero points\n"
    "  --threads N     at least 1 (default: one a processor, at most 32)\n"
    "  --help          this text\n"
    "\n"
    "Exit status: 1 for bad input, 2 for bad usage.\n";

/* By its shapes Kimi-Linear-48B-A3B, 48.28e9 of whose 49.12e9 numbers are quantised, needs in int4
 * 28.8 GB with groups of 32, 27.3 with 64 and 26.6 with 128. */
#define DEFAULT_GROUP 64
#define PATH_BYTES 4096
#define BLOCK_BYTES ((size_t)1 << 22)
#define BLOCK_ROWS 4096
#define CONFIG_LIMIT ((size_t)1 << 24)

/* ---- The command line ---- */

typedef struct options {
    const char *in, *out;
    quantize_format format;
    size_t group, threads;
    bool group_given, asymmetric, help;
} options;

static const char *const format_names[] = {"", "int8", "int4", "mxfp4"};

static bool read_format(const char *name, const char *text, void *place, error *e) {
    for (size_t i = 1; i < sizeof format_names / sizeof *format_names; i++)
        if (strcmp(text, format_names[i]) == 0) {
            *(quantize_kind *)place = (quantize_kind)i;
            return true;
        }
    return error_set(e, "%s: expected int8, int4 or mxfp4, found \"%.40s\"", name, text);
}

static bool read_group(const char *name, const char *text, void *place, error *e) {
    options *o = (options *)place;
    uint64_t group = 0;
    o->group_given = true;
    if (strcmp(text, "channel") != 0 && !arguments_integer(name, text, 0, 1 << 24, &group, e))
        return false;
    o->group = (size_t)group;
    return group % 8 == 0 ||
           error_set(e, "%s: expected a multiple of 8, 0 or channel, found %s", name, text);
}

static const argument argument_list[] = {
    {"--format", ARGUMENT_OTHER, offsetof(options, format), 0, 0, read_format},
    {"--group", ARGUMENT_OTHER, 0, 0, 0, read_group},
    {"--asymmetric", ARGUMENT_FLAG, offsetof(options, asymmetric), 0, 0, NULL},
    {"--threads", ARGUMENT_SIZE, offsetof(options, threads), 1, PARALLEL_MAX_THREADS, NULL},
};
static const arguments argument_table = {
    argument_list, sizeof argument_list / sizeof *argument_list, "MODEL_DIR and OUT_DIR", 2};

static bool parse_arguments(options *o, int argc, char **argv, error *e) {
    const char *names[2] = {NULL, NULL};
    size_t n_names = 0;
    memset(o, 0, sizeof *o);
    o->group = DEFAULT_GROUP, o->threads = parallel_default();
    if (!arguments_parse(&argument_table, o, names, &n_names, &o->help, argc, argv, e))
        return false;
    o->in = names[0], o->out = names[1];
    if (o->help) return true;
    if (n_names < 2)
        return error_set(e, "expected MODEL_DIR and OUT_DIR, found %zu of them", n_names);
    if (!o->format.kind) return error_set(e, "expected --format int8, int4 or mxfp4");
    if (o->format.kind != QUANTIZE_INT4 && (o->group_given || o->asymmetric))
        return error_set(e, "%s: expected only with --format int4, found %s",
                         o->asymmetric ? "--asymmetric" : "--group", format_names[o->format.kind]);
    o->format.asymmetric = o->asymmetric;
    o->format.group = o->format.kind == QUANTIZE_INT8    ? 0
                      : o->format.kind == QUANTIZE_MXFP4 ? LINEAR_MXFP4_GROUP
                                                         : o->group;
    return true;
}

/* ---- The run ---- */

static linear_type type_of(const st_tensor *t) {
    switch (t->dtype) {
    case ST_F32: return LINEAR_F32;
    case ST_F16: return LINEAR_F16;
    case ST_BF16: return LINEAR_BF16;
    default: return (linear_type)0;
    }
}

typedef struct run {
    const options *o;
    st_checkpoint model;
    const st_tensor **tensors; /* [n]: by file, in each as its data lie */
    size_t n;
    parallel pool;
    /* Of the block of rows that is quantised. */
    linear matrix;
    size_t first, rows, next; /* its rows, and the first of them that nobody has claimed */
    float *floats;            /* [threads][cols]: rows as floats */
    unsigned char *codes;     /* [rows][quantize_row_bytes] */
    double *errors, *norms;   /* [rows]: sums of squares */
    size_t *bad;              /* [rows]: a column that is not finite, or cols */
    /* Of the whole matrix. */
    unsigned char *scales, *zero_words; /* [rows][groups] scales; the packed zeros */
    signed char *zeros;                 /* [rows][groups] */
    size_t buffer_bytes;
    /* For the last line. */
    uint64_t bytes_in, bytes_out;
    size_t n_quantised;
    double error_sum, worst;
    const char *worst_name;
} run;

static bool refuse(const st_tensor *t, error *e, const char *expected) {
    char shape[ST_SHAPE_TEXT];
    return error_set(e, "%s: tensor %.200s: expected %s, found %s %s", t->file, t->name, expected,
                     st_dtype_name(t->dtype), st_shape(t->dims, t->n_dims, shape));
}

/* A tensor that names what quantised models have, or one that cannot be quantised. */
static bool check_tensor(const run *r, const st_tensor *t, error *e) {
    static const char *const ends[] = {".weight_packed", ".weight_scale", ".weight_zero_point",
                                       ".weight_shape"};
    char expected[100];
    size_t group = r->o->format.group;
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++)
        if (quantize_ends_with(t->name, ends[i]))
            return refuse(t, e, "a model that is not quantised");
    if (!quantize_is_chosen(t->name)) return true;
    if (!type_of(t)) return refuse(t, e, "F32, F16 or BF16, not quantised");
    if (t->n_dims != 2 || t->elements == 0) return refuse(t, e, "a matrix");
    if (group == 0 || t->dims[1] % group == 0) return true;
    snprintf(expected, sizeof expected, "rows of whole groups of %zu%s", group,
             r->o->format.kind == QUANTIZE_INT4 ? " (--group)" : "");
    return refuse(t, e, expected);
}

static int by_place(const void *left, const void *right) {
    const st_tensor *a = *(const st_tensor *const *)left, *b = *(const st_tensor *const *)right;
    int files = strcmp(a->file, b->file);
    if (files != 0) return files;
    if (a->data != b->data) return a->data < b->data ? -1 : 1;
    return strcmp(a->name, b->name); /* empty ones lie where others begin */
}

static bool list_tensors(run *r, error *e) {
    r->n = st_count(&r->model);
    r->tensors = (const st_tensor **)calloc(r->n + 1, sizeof *r->tensors);
    if (!r->tensors) return error_set(e, "%s: no memory for a list of tensors", r->o->in);
    for (size_t i = 0; i < r->n; i++) {
        r->tensors[i] = st_at(&r->model, i);
        if (!check_tensor(r, r->tensors[i], e)) return false;
        r->n_quantised += quantize_is_chosen(r->tensors[i]->name);
        r->bytes_in += r->tensors[i]->bytes;
    }
    qsort(r->tensors, r->n, sizeof *r->tensors, by_place);
    return r->n_quantised > 0 ||
           error_set(e, "%s: expected a tensor like %s, found none", r->o->in, QUANTIZE_EXAMPLE);
}

/* ---- Rows ---- */

/* Rows that are quantised at a time. */
static size_t block_rows(const run *r, const st_tensor *t) {
    size_t rows = BLOCK_BYTES / quantize_row_bytes(&r->o->format, t->dims[1]);
    if (rows > BLOCK_ROWS) rows = BLOCK_ROWS;
    if (rows > t->dims[0]) rows = t->dims[0];
    return rows ? rows : 1;
}

static size_t larger_of(size_t a, size_t b) {
    return a > b ? a : b;
}

static void *reserve(run *r, size_t bytes) {
    r->buffer_bytes += bytes;
    return malloc(bytes ? bytes : 1);
}

/* Buffers for the largest of the matrices. */
static bool reserve_buffers(run *r, error *e) {
    const quantize_format *f = &r->o->format;
    size_t cols = 0, codes = 0, rows = 0, scales = 0, words = 0;
    for (size_t i = 0; i < r->n; i++) {
        const st_tensor *t = r->tensors[i];
        if (!quantize_is_chosen(t->name)) continue;
        size_t block = block_rows(r, t), groups = quantize_groups(f, t->dims[1]);
        cols = larger_of(cols, t->dims[1]);
        rows = larger_of(rows, block);
        codes = larger_of(codes, block * quantize_row_bytes(f, t->dims[1]));
        scales = larger_of(scales, t->dims[0] * groups);
        words = larger_of(words, (t->dims[0] + 7) / 8 * groups * 4);
    }
    r->floats = (float *)reserve(r, r->o->threads * cols * sizeof *r->floats);
    r->codes = (unsigned char *)reserve(r, codes);
    r->errors = (double *)reserve(r, rows * sizeof *r->errors);
    r->norms = (double *)reserve(r, rows * sizeof *r->norms);
    r->bad = (size_t *)reserve(r, rows * sizeof *r->bad);
    r->scales = (unsigned char *)reserve(r, scales * quantize_scale_bytes(f));
    r->zeros = (signed char *)reserve(r, f->asymmetric ? scales : 0);
    r->zero_words = (unsigned char *)reserve(r, f->asymmetric ? words : 0);
    return (r->floats && r->codes && r->errors && r->norms && r->bad && r->scales && r->zeros &&
            r->zero_words) ||
           error_set(e, "%s: no memory for %zu bytes of buffers", r->o->in, r->buffer_bytes);
}

static void quantise_row(run *r, size_t row, float *w) {
    const quantize_format *f = &r->o->format;
    size_t cols = r->matrix.cols, bad = 0, place = r->first + row;
    size_t scales = quantize_groups(f, cols);
    double norm = 0;
    linear_expand(&r->matrix, place, 0, cols, w);
    while (bad < cols && isfinite(w[bad])) bad++;
    r->bad[row] = bad;
    if (bad < cols) return;
    for (size_t i = 0; i < cols; i++) norm += (double)w[i] * (double)w[i];
    r->norms[row] = norm;
    r->errors[row] = quantize_row(f, w, cols, r->codes + row * quantize_row_bytes(f, cols),
                                  r->scales + place * scales * quantize_scale_bytes(f),
                                  f->asymmetric ? r->zeros + place * scales : NULL);
}

/* One thread's share of a block. */
static void quantise_rows(void *context, size_t thread) {
    run *r = (run *)context;
    for (size_t row; (row = parallel_claim(&r->next)) < r->rows;)
        quantise_row(r, row, r->floats + thread * r->matrix.cols);
}

static bool report_bad(const run *r, const st_tensor *t, size_t row, error *e) {
    float value;
    linear_expand(&r->matrix, r->first + row, 0, r->matrix.cols, r->floats);
    value = r->floats[r->bad[row]];
    return error_set(e, "%s: tensor %.200s: element [%zu, %zu]: expected a finite number, found %g",
                     t->file, t->name, r->first + row, r->bad[row], (double)value);
}

/* Writes the codes of a matrix, and leaves its scales and zeros in the buffers. */
static bool quantise_matrix(run *r, const st_tensor *t, st_writer *w, error *e) {
    double error_squares = 0, norm = 0;
    memset(&r->matrix, 0, sizeof r->matrix);
    r->matrix.type = type_of(t), r->matrix.data = t->data;
    r->matrix.rows = t->dims[0], r->matrix.cols = t->dims[1];
    size_t bytes = quantize_row_bytes(&r->o->format, t->dims[1]);
    for (r->first = 0; r->first < t->dims[0]; r->first += r->rows) {
        r->rows = block_rows(r, t), r->next = 0;
        if (r->rows > t->dims[0] - r->first) r->rows = t->dims[0] - r->first;
        parallel_for(&r->pool, r->o->threads, quantise_rows, r);
        for (size_t row = 0; row < r->rows; row++) {
            if (r->bad[row] < t->dims[1]) return report_bad(r, t, row, e);
            error_squares += r->errors[row], norm += r->norms[row];
        }
        if (!st_writer_bytes(w, r->codes, r->rows * bytes, e)) return false;
    }
    double relative = norm > 0 ? sqrt(error_squares / norm) : 0;
    r->error_sum += relative;
    if (!r->worst_name || relative > r->worst) r->worst = relative, r->worst_name = t->name;
    return true;
}

/* ---- Shards ---- */

/* What a tensor becomes: itself, or up to four others. */
typedef struct part {
    char stem[QUANTIZE_NAME]; /* of a quantised one: the name is stem and end */
    const char *name;
    st_dtype dtype;
    size_t n_dims, dims[ST_MAX_DIMS];
} part;

static part named_part(const st_tensor *t, const char *end, st_dtype dtype, size_t rows,
                       size_t cols) {
    part p;
    memset(&p, 0, sizeof p);
    snprintf(p.stem, sizeof p.stem, "%.*s%s", (int)(strlen(t->name) - strlen("weight")), t->name,
             end);
    p.dtype = dtype, p.n_dims = 2, p.dims[0] = rows, p.dims[1] = cols;
    return p;
}

static size_t parts_of(const quantize_format *f, const st_tensor *t, part parts[4]) {
    size_t n = 0;
    if (!quantize_is_chosen(t->name)) {
        memset(parts, 0, sizeof *parts);
        parts[0].name = t->name, parts[0].dtype = t->dtype, parts[0].n_dims = t->n_dims;
        memcpy(parts[0].dims, t->dims, sizeof t->dims);
        return 1;
    }
    size_t rows = t->dims[0], cols = t->dims[1], groups = quantize_groups(f, cols);
    size_t bytes = quantize_row_bytes(f, cols);
    if (f->kind == QUANTIZE_INT8) parts[n++] = named_part(t, "weight", ST_I8, rows, bytes);
    if (f->kind == QUANTIZE_INT4)
        parts[n++] = named_part(t, "weight_packed", ST_I32, rows, bytes / 4);
    if (f->kind == QUANTIZE_MXFP4) parts[n++] = named_part(t, "weight_packed", ST_U8, rows, bytes);
    parts[n++] =
        named_part(t, "weight_scale", f->kind == QUANTIZE_MXFP4 ? ST_U8 : ST_BF16, rows, groups);
    if (f->asymmetric)
        parts[n++] = named_part(t, "weight_zero_point", ST_I32, (rows + 7) / 8, groups);
    if (f->kind == QUANTIZE_INT4) {
        parts[n] = named_part(t, "weight_shape", ST_I64, 2, 0);
        parts[n++].n_dims = 1;
    }
    return n;
}

static const char *part_name(const part *p) {
    return p->name ? p->name : p->stem;
}

/* Rows and columns as two I64. */
static bool write_shape(const st_tensor *t, st_writer *w, error *e) {
    unsigned char bytes[16];
    for (size_t b = 0; b < 16; b++)
        bytes[b] = (unsigned char)((uint64_t)t->dims[b / 8] >> 8 * (b % 8));
    return st_writer_bytes(w, bytes, sizeof bytes, e);
}

/* Copied first: were the system to read a mapping that cannot be read, the error would be that of the
 * file that is written. */
static bool write_same(const st_tensor *t, st_writer *w, error *e) {
    unsigned char bytes[16384];
    for (size_t first = 0, n; first < t->bytes; first += n) {
        n = t->bytes - first < sizeof bytes ? t->bytes - first : sizeof bytes;
        memcpy(bytes, t->data + first, n);
        if (!st_writer_bytes(w, bytes, n, e)) return false;
    }
    return true;
}

static bool write_tensor(run *r, const st_tensor *t, st_writer *w, error *e) {
    const quantize_format *f = &r->o->format;
    if (!quantize_is_chosen(t->name)) return write_same(t, w, e);
    size_t rows = t->dims[0], groups = quantize_groups(f, t->dims[1]);
    if (!quantise_matrix(r, t, w, e) ||
        !st_writer_bytes(w, r->scales, rows * groups * quantize_scale_bytes(f), e))
        return false;
    if (f->asymmetric) {
        quantize_pack_zeros(r->zeros, rows, groups, r->zero_words);
        if (!st_writer_bytes(w, r->zero_words, (rows + 7) / 8 * groups * 4, e)) return false;
    }
    return f->kind != QUANTIZE_INT4 || write_shape(t, w, e);
}

static bool join(char path[PATH_BYTES], const char *directory, const char *name, error *e) {
    return (size_t)snprintf(path, PATH_BYTES, "%s/%s", directory, name) < PATH_BYTES ||
           error_set(e, "%.60s.../%.60s: expected a path of less than %d bytes", directory, name,
                     PATH_BYTES);
}

static const char *base_name(const char *path) {
    for (const char *c = path; *c; c++)
        if (*c == '/') path = c + 1;
    return path;
}

/* The first tensor of the next file. */
static size_t end_of_shard(const run *r, size_t first) {
    size_t end = first;
    while (end < r->n && strcmp(r->tensors[end]->file, r->tensors[first]->file) == 0) end++;
    return end;
}

/* Tensors first .. end - 1, in a file of the name that theirs has. */
static bool write_shard(run *r, size_t first, size_t end, error *e) {
    char path[PATH_BYTES];
    part parts[4];
    st_writer w;
    if (!join(path, r->o->out, base_name(r->tensors[first]->file), e)) return false;
    bool ok = st_writer_open(&w, path, e);
    for (size_t i = first; ok && i < end; i++) {
        size_t n = parts_of(&r->o->format, r->tensors[i], parts);
        for (size_t k = 0; ok && k < n; k++)
            ok = st_writer_add(&w, part_name(&parts[k]), parts[k].dtype, parts[k].dims,
                               parts[k].n_dims, e);
    }
    r->bytes_out += w.declared;
    for (size_t i = first; ok && i < end; i++) ok = write_tensor(r, r->tensors[i], &w, e);
    return st_writer_close(&w, ok, e);
}

static bool write_text(output *out, error *e, const char *text) {
    return output_bytes(out, text, strlen(text), e);
}

static bool write_index_entry(output *out, const char *name, const char *file, bool first,
                              error *e) {
    static const char before[] = ",\n    ", between[] = ": ";
    size_t size =
        sizeof before + ST_QUOTED(strlen(name)) + sizeof between + ST_QUOTED(strlen(file));
    char *entry = (char *)malloc(size);
    if (!entry) return error_set(e, "%s: no memory for a name", out->path);
    size_t n = (size_t)sprintf(entry, "%s", first ? before + 1 : before);
    n += st_quote(name, entry + n);
    n += (size_t)sprintf(entry + n, "%s", between);
    n += st_quote(file, entry + n);
    bool ok = output_bytes(out, entry, n, e);
    free(entry);
    return ok;
}

static bool write_index(const run *r, error *e) {
    char path[PATH_BYTES], start[100];
    part parts[4];
    output out;
    if (!join(path, r->o->out, "model.safetensors.index.json", e)) return false;
    snprintf(start, sizeof start,
             "{\n  \"metadata\": {\n    \"total_size\": %llu\n  },\n  \"weight_map\": {",
             (unsigned long long)r->bytes_out);
    bool ok = output_open(&out, path, e) && write_text(&out, e, start);
    for (size_t i = 0; ok && i < r->n; i++) {
        size_t n = parts_of(&r->o->format, r->tensors[i], parts);
        for (size_t k = 0; ok && k < n; k++)
            ok = write_index_entry(&out, part_name(&parts[k]), base_name(r->tensors[i]->file),
                                   i + k == 0, e);
    }
    ok = ok && write_text(&out, e, "\n  }\n}\n");
    return output_close(&out, ok, e);
}

static bool write_shards(run *r, error *e) {
    for (size_t first = 0, end; first < r->n; first = end) {
        end = end_of_shard(r, first);
        if (!write_shard(r, first, end, e)) return false;
    }
    return strcmp(base_name(r->tensors[0]->file), "model.safetensors") == 0 || write_index(r, e);
}

/* ---- Other files ---- */

static bool write_config(const char *directory, const char *text, error *e) {
    char path[PATH_BYTES];
    output out;
    if (!join(path, directory, "config.json", e)) return false;
    bool ok = output_open(&out, path, e) && write_text(&out, e, text);
    return output_close(&out, ok, e);
}

static bool copy_stream(FILE *file, const char *path, output *out, error *e) {
    char bytes[16384];
    size_t n;
    while ((n = fread(bytes, 1, sizeof bytes, file)) > 0)
        if (!output_bytes(out, bytes, n, e)) return false;
    return !ferror(file) || error_set(e, "%s: cannot be read: %s", path, strerror(errno));
}

/* Into OUT_DIR, under the same name. */
static bool copy_file(const options *o, const char *from, error *e) {
    char to[PATH_BYTES];
    output out;
    if (!join(to, o->out, base_name(from), e)) return false;
    FILE *file = fopen(from, "rb");
    if (!file) return error_set(e, "%s: cannot be opened: %s", from, strerror(errno));
    bool ok = output_open(&out, to, e) && copy_stream(file, from, &out, e);
    fclose(file);
    return output_close(&out, ok, e);
}

/* Is this file written otherwise, or not part of the new model? */
static bool is_replaced(const run *r, const char *name) {
    if (quantize_ends_with(name, ".safetensors") ||
        strcmp(name, "model.safetensors.index.json") == 0 || strcmp(name, "config.json") == 0)
        return true;
    for (size_t i = 0; i < r->n; i = end_of_shard(r, i))
        if (strcmp(name, base_name(r->tensors[i]->file)) == 0) return true;
    return false;
}

#if JSON_POSIX

static bool copy_files(const run *r, error *e) {
    char path[PATH_BYTES];
    struct stat status;
    bool ok = true;
    DIR *directory = opendir(r->o->in);
    if (!directory) return error_set(e, "%s: cannot be listed: %s", r->o->in, strerror(errno));
    for (struct dirent *entry; ok && (entry = readdir(directory)) != NULL;) {
        if (is_replaced(r, entry->d_name)) continue;
        ok = join(path, r->o->in, entry->d_name, e);
        /* No directory or device; what cannot be examined, as a link to nowhere, is refused there. */
        if (ok && (stat(path, &status) != 0 || S_ISREG(status.st_mode)))
            ok = copy_file(r->o, path, e);
    }
    closedir(directory);
    return ok;
}

/* OUT_DIR is there and empty. */
static bool prepare_directory(const char *path, error *e) {
    if (mkdir(path, 0777) == 0) return true;
    if (errno != EEXIST) return error_set(e, "%s: cannot be made: %s", path, strerror(errno));
    DIR *directory = opendir(path);
    if (!directory) return error_set(e, "%s: cannot be listed: %s", path, strerror(errno));
    bool ok = true;
    for (struct dirent *entry; ok && (entry = readdir(directory)) != NULL;)
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
            ok = error_set(e, "%s: expected an empty directory, found %.200s in it", path,
                           entry->d_name);
    closedir(directory);
    return ok;
}

#else

/* Standard C lists no directory: the files that published models have. */
static bool copy_files(const run *r, error *e) {
    static const char *const names[] = {"tiktoken.model", "tokenizer_config.json",
                                        "generation_config.json", "chat_template.jinja"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char path[PATH_BYTES];
        if (!join(path, r->o->in, names[i], e)) return false;
        FILE *file = fopen(path, "rb");
        if (file) fclose(file);
        if (file && !copy_file(r->o, path, e)) return false;
    }
    return true;
}

static bool prepare_directory(const char *path, error *e) {
    char config[PATH_BYTES];
    if (!join(config, path, "config.json", e)) return false;
    FILE *file = fopen(config, "rb");
    if (!file) return true;
    fclose(file);
    return error_set(e, "%s: expected an empty directory, found config.json in it", path);
}

#endif

/* ---- The program ---- */

static double seconds(void) {
    struct timespec now;
    timespec_get(&now, TIME_UTC);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Everything that can be refused before anything is written. */
static bool prepare(run *r, char **config, error *e) {
    char path[PATH_BYTES], *old;
    size_t length;
    if (!join(path, r->o->in, "config.json", e) ||
        !json_read_file(path, CONFIG_LIMIT, &old, &length, e))
        return false;
    bool ok = quantize_config_check(path, old, length, e) && st_open(&r->model, r->o->in, e) &&
              list_tensors(r, e) &&
              quantize_config_extend(&r->o->format, &r->model, path, old, config, e);
    free(old);
    return ok && reserve_buffers(r, e) && parallel_open(&r->pool, r->o->threads, e) &&
           prepare_directory(r->o->out, e);
}

static bool run_all(run *r, error *e) {
    double start = seconds();
    char *config = NULL;
    bool ok = prepare(r, &config, e) && write_shards(r, e) && copy_files(r, e) &&
              write_config(r->o->out, config, e);
    free(config);
    if (!ok) return false;
    fprintf(stderr,
            "quantize: %llu bytes of tensors became %llu; relative error of %zu matrices: mean "
            "%.5f, worst %.5f (%s); buffers %zu bytes; %.1f s\n",
            (unsigned long long)r->bytes_in, (unsigned long long)r->bytes_out, r->n_quantised,
            r->error_sum / (double)r->n_quantised, r->worst, r->worst_name, r->buffer_bytes,
            seconds() - start);
    return true;
}

static void close_all(run *r) {
    parallel_close(&r->pool);
    st_close(&r->model);
    free(r->tensors);
    free(r->floats);
    free(r->codes);
    free(r->errors);
    free(r->norms);
    free(r->bad);
    free(r->scales);
    free(r->zeros);
    free(r->zero_words);
}

int main(int argc, char **argv) {
    options o;
    error e;
    run r;
    if (!parse_arguments(&o, argc, argv, &e)) {
        fprintf(stderr, "quantize: %s (--help tells more)\n", e.text);
        return 2;
    }
    if (o.help) return arguments_help("quantize", help);
    memset(&r, 0, sizeof r);
    r.o = &o;
    signals_catch("quantize");
    signals_watch(&r.model);
    bool ok = run_all(&r, &e);
    if (!ok) fprintf(stderr, "quantize: %s\n", e.text);
    close_all(&r);
    return ok ? 0 : 1;
}
