/* test_quantize.c - the program: what it packs against values by hand and against its definition,
 * unpacked here by code of its own; the text of config.json; shards; what it refuses. */
#define SAFETENSORS_IMPLEMENTATION
#include "../examples/safetensors.h"
#define OUTPUT_IMPLEMENTATION
#include "../examples/output.h"
#include "../examples/safetensors_write.h"

#define PROGRAM "quantize"
#include "limits.h"
#include "program.h"

#include <dirent.h>
#include <signal.h>
#include <unistd.h>
#if defined(__linux__)
#include <linux/capability.h>
#include <sys/prctl.h>
#endif

#define LINEAR_TINY MODELS "kimi-linear-tiny"
#define TRAINED "examples/models/text-attnres"
#define MODULE "model.layers.0.self_attn.q_proj."
#define BLOCK 4096 /* rows that the program quantises at a time */

/* ---- Models to quantise ---- */

/* A number as a type holds it, cut where it holds less; returns what is held. */
static float store(st_dtype type, float x, unsigned char *out) {
    uint32_t kept, stored;
    memcpy(&kept, &x, sizeof kept);
    if (type == ST_BF16) kept &= 0xffff0000u;
    if (type == ST_F16) kept &= (kept >> 23 & 255) < 113 ? 0x80000000u : 0xffffe000u;
    stored = type == ST_BF16 ? kept >> 16 : kept;
    if (type == ST_F16) {
        stored = kept >> 16 & 0x8000u;
        if (kept << 1) stored |= ((kept >> 23 & 255) - 112) << 10 | (kept >> 13 & 0x3ffu);
    }
    for (size_t b = 0; b < st_dtype_size(type); b++) out[b] = (unsigned char)(stored >> 8 * b);
    memcpy(&x, &kept, sizeof x);
    return x;
}

/* The path of what lies in the work directory, until the next call. */
static const char *in_work(const char *name) {
    static char path[360];
    snprintf(path, sizeof path, "%.300s/%.50s", work, name);
    return path;
}

/* An empty directory in it. */
static void empty_directory(const char *name) {
    const char *path = in_work(name);
    char command[400];
    snprintf(command, sizeof command, "rm -rf '%s'", path);
    if (system(command) != 0 || mkdir(path, 0777) != 0) give_up(path);
}

static void write_in(const char *directory, const char *name, const char *text) {
    write_file(in_work(directory), name, text, strlen(text));
}

/* A file of one matrix, whose values become what is stored of them. */
static void write_matrix(const char *directory, const char *file, const char *name, st_dtype type,
                         float *values, size_t rows, size_t cols) {
    char path[400];
    size_t dims[2] = {rows, cols}, size = st_dtype_size(type);
    unsigned char *bytes = (unsigned char *)test_alloc(rows * cols * size);
    st_writer w;
    error e;
    for (size_t i = 0; i < rows * cols; i++) values[i] = store(type, values[i], bytes + i * size);
    snprintf(path, sizeof path, "%s/%s/%s", work, directory, file);
    bool ok = st_writer_open(&w, path, &e) && st_writer_add(&w, name, type, dims, 2, &e) &&
              st_writer_bytes(&w, bytes, rows * cols * size, &e);
    if (!st_writer_close(&w, ok, &e)) give_up(e.text);
    free(bytes);
}

/* A tensor of zeros to write. */
typedef struct blank {
    const char *name;
    st_dtype type;
    size_t n_dims, dims[2];
} blank;

static void write_blanks(const char *file, const blank *tensors, size_t n) {
    char path[400];
    st_writer w;
    error e;
    snprintf(path, sizeof path, "%.300s/%.50s", in_work("model"), file);
    bool ok = st_writer_open(&w, path, &e);
    for (size_t i = 0; ok && i < n; i++)
        ok = st_writer_add(&w, tensors[i].name, tensors[i].type, tensors[i].dims, tensors[i].n_dims,
                           &e);
    ok = ok && st_writer_zeros(&w, &e);
    if (!st_writer_close(&w, ok, &e)) give_up(e.text);
}

/* A model of one file in WORK/model, and an empty WORK/made. */
static void write_blank_model(const blank *tensors, size_t n) {
    empty_directory("model"), empty_directory("made");
    write_in("model", "config.json", "{\n  \"a\": 1\n}\n");
    write_blanks("model.safetensors", tensors, n);
}

/* A model of one matrix in WORK/model, and an empty WORK/made. */
static void write_model(st_dtype type, float *values, size_t rows, size_t cols) {
    empty_directory("model");
    write_matrix("model", "model.safetensors", MODULE "weight", type, values, rows, cols);
    write_in("model", "config.json", "{\n  \"a\": 1\n}\n");
    empty_directory("made");
}

static void quantise(const char *options) {
    char arguments[300];
    snprintf(arguments, sizeof arguments, "WORK/model WORK/made %s", options);
    outcome o = run_ok(arguments);
    outcome_free(&o);
}

static st_checkpoint open_output(const char *name) {
    st_checkpoint c;
    error e;
    if (!st_open(&c, in_work(name), &e)) give_up(e.text);
    return c;
}

/* ---- Unpacking ---- */

typedef struct unpacked {
    size_t rows, cols, groups;
    bool floats;   /* MXFP4 */
    int *code;     /* [rows][cols]: q, or E2M1 as it is stored */
    int *zero;     /* [rows][groups] */
    double *scale; /* [rows][groups] */
    double *value; /* [rows][cols] */
    int least, most;
} unpacked;

static double from_bf16(const unsigned char *at) {
    uint32_t bits = (uint32_t)st_load_u16(at) << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return (double)x;
}

static const st_tensor *need(const st_checkpoint *c, const char *module, const char *end) {
    char name[200];
    snprintf(name, sizeof name, "%.150s%.40s", module, end);
    const st_tensor *t = st_find(c, name);
    if (!t) give_up(name);
    return t;
}

static bool has(const st_checkpoint *c, const char *module, const char *end) {
    char name[200];
    snprintf(name, sizeof name, "%.150s%.40s", module, end);
    return st_find(c, name) != NULL;
}

/* Field `at` of 4 bits, of 32-bit words `stride` apart. */
static unsigned field(const unsigned char *words, size_t at, size_t stride) {
    return st_load_u32(words + at / 8 * stride * 4) >> 4 * (at % 8) & 15;
}

static double e2m1(unsigned code) {
    static const double values[] = {0, .5, 1, 1.5, 2, 3, 4, 6};
    return code & 8 ? -values[code & 7] : values[code & 7];
}

static int code_at(const unpacked *u, const st_tensor *codes, size_t r, size_t c) {
    if (codes->dtype == ST_I8) return (signed char)codes->data[r * u->cols + c];
    if (u->floats) return codes->data[(r * u->cols + c) / 2] >> 4 * (c % 2) & 15;
    return (int)field(codes->data + r * codes->dims[1] * 4, c, 1) - 8;
}

static void unpack_values(unpacked *u) {
    for (size_t i = 0; i < u->rows * u->cols; i++) {
        size_t k = i / u->cols * u->groups + i % u->cols / (u->cols / u->groups);
        double q = u->floats ? e2m1((unsigned)u->code[i]) : u->code[i] - u->zero[k];
        u->value[i] = q * u->scale[k];
    }
}

static unpacked unpack(const st_checkpoint *c, const char *module) {
    unpacked u;
    memset(&u, 0, sizeof u);
    const st_tensor *codes = need(c, module, has(c, module, "weight") ? "weight" : "weight_packed");
    const st_tensor *scale = need(c, module, "weight_scale");
    const st_tensor *zero =
        has(c, module, "weight_zero_point") ? need(c, module, "weight_zero_point") : NULL;
    u.floats = codes->dtype == ST_U8;
    u.rows = codes->dims[0], u.cols = u.floats ? 2 * codes->dims[1] : codes->dims[1];
    u.least = codes->dtype == ST_I8 ? -128 : -8, u.most = -u.least - 1;
    if (codes->dtype == ST_I32) {
        const st_tensor *shape = need(c, module, "weight_shape");
        CHECK(shape->dtype == ST_I64 && shape->n_dims == 1 && shape->dims[0] == 2);
        CHECK(st_load_u64(shape->data) == u.rows);
        u.cols = (size_t)st_load_u64(shape->data + 8);
        CHECK(codes->dims[1] == (u.cols + 7) / 8);
    }
    u.groups = scale->dims[1];
    CHECK(scale->dims[0] == u.rows && scale->dtype == (u.floats ? ST_U8 : ST_BF16));
    if (zero) CHECK(zero->dims[0] == (u.rows + 7) / 8 && zero->dims[1] == u.groups);
    u.code = (int *)test_alloc(u.rows * u.cols * sizeof *u.code);
    u.zero = (int *)test_alloc(u.rows * u.groups * sizeof *u.zero);
    u.scale = (double *)test_alloc(u.rows * u.groups * sizeof *u.scale);
    u.value = (double *)test_alloc(u.rows * u.cols * sizeof *u.value);
    for (size_t i = 0; i < u.rows * u.cols; i++)
        u.code[i] = code_at(&u, codes, i / u.cols, i % u.cols);
    for (size_t k = 0; k < u.rows * u.groups; k++) {
        u.scale[k] = u.floats ? ldexp(1, scale->data[k] - 127) : from_bf16(scale->data + 2 * k);
        if (zero) u.zero[k] = (int)field(zero->data + k % u.groups * 4, k / u.groups, u.groups) - 8;
    }
    unpack_values(&u);
    return u;
}

static void unpacked_free(unpacked *u) {
    free(u->code), free(u->zero), free(u->scale), free(u->value);
}

/* ---- By hand ---- */

static void check_bytes(const st_checkpoint *c, const char *end, st_dtype type, size_t rows,
                        size_t cols, const unsigned char *want) {
    const st_tensor *t = need(c, MODULE, end);
    CHECK_MSG(t->dtype == type && t->dims[0] == rows && t->dims[1] == cols, "%s: %s [%zu, %zu]",
              end, st_dtype_name(t->dtype), t->dims[0], t->dims[1]);
    for (size_t i = 0; i < t->bytes; i++)
        CHECK_MSG(t->data[i] == want[i], "%s: byte %zu: %02x, expected %02x", end, i, t->data[i],
                  want[i]);
}

static void int8_by_hand(void) {
    float w[2][4] = {{-32, 31.75f, 0, -.25f}, {16, -64, 1, .5f}};
    static const unsigned char codes[] = {0x80, 0x7f, 0x00, 0xff, 0x20, 0x80, 0x02, 0x01};
    static const unsigned char scales[] = {0x80, 0x3e, 0x00, 0x3f}; /* .25, .5 */
    write_model(ST_BF16, w[0], 2, 4);
    quantise("--format int8");
    st_checkpoint c = open_output("made");
    CHECK(st_count(&c) == 2);
    check_bytes(&c, "weight", ST_I8, 2, 4, codes);
    check_bytes(&c, "weight_scale", ST_BF16, 2, 1, scales);
    st_close(&c);
}

static void int4_by_hand(void) {
    float w[1][16] = {{-8, 7, 0, 1, 2, 3, -1, -2, -4, 3.5f, .5f, 0, 1, 1.5f, -.5f, -1}};
    static const unsigned char codes[] = {0xf0, 0x98, 0xba, 0x67, 0xf0, 0x89, 0xba, 0x67};
    static const unsigned char scales[] = {0x80, 0x3f, 0x00, 0x3f}; /* 1, .5 */
    write_model(ST_F32, w[0], 1, 16);
    quantise("--format int4 --group 8");
    st_checkpoint c = open_output("made");
    CHECK(st_count(&c) == 3);
    check_bytes(&c, "weight_packed", ST_I32, 1, 2, codes);
    check_bytes(&c, "weight_scale", ST_BF16, 1, 2, scales);
    st_close(&c);
}

/* Nine rows, so that zero points take two words; rows differ in their zero point, r - 4. */
static void zero_points_by_hand(void) {
    float w[9][8];
    static const unsigned char zeros[] = {0x54, 0x76, 0x98, 0xba, 0x0c, 0, 0, 0};
    for (size_t r = 0; r < 9; r++)
        for (size_t i = 0; i < 8; i++) {
            int q = i == 0 ? -8 : i == 1 ? 7 : (int)i;
            w[r][i] = (float)(q - ((int)r - 4)) * 2;
        }
    write_model(ST_F16, w[0], 9, 8);
    quantise("--format int4 --group 8 --asymmetric");
    st_checkpoint c = open_output("made");
    CHECK(st_count(&c) == 4);
    check_bytes(&c, "weight_zero_point", ST_I32, 2, 1, zeros);
    const st_tensor *packed = need(&c, MODULE, "weight_packed");
    for (size_t r = 0; r < 9; r++) {
        CHECK(st_load_u32(packed->data + 4 * r) == 0xfedcbaf0u);
        CHECK(from_bf16(need(&c, MODULE, "weight_scale")->data + 2 * r) == 2);
    }
    st_close(&c);
}

static void mxfp4_by_hand(void) {
    float w[1][64];
    unsigned char codes[32], scales[2] = {127 - 2, 127 + 3};
    for (size_t i = 0; i < 64; i++) { /* every code twice in each group */
        w[0][i] = (float)(e2m1(i & 15) * (i < 32 ? .25 : 8));
        codes[i / 2] = (unsigned char)((i & 15) << 4 | ((i - 1) & 15));
    }
    write_model(ST_BF16, w[0], 1, 64);
    quantise("--format mxfp4");
    st_checkpoint c = open_output("made");
    CHECK(st_count(&c) == 2);
    check_bytes(&c, "weight_packed", ST_U8, 1, 32, codes);
    check_bytes(&c, "weight_scale", ST_U8, 1, 2, scales);
    st_close(&c);
}

/* Halfway numbers go to the even neighbour. The others hold the scale at 1. */
static void ties_go_to_even(void) {
    float w[1][64];
    static const float ties[] = {.5f, 1.5f, 2.5f, -.5f, -1.5f, -2.5f, 5.5f, -6.5f};
    static const int even[] = {0, 2, 2, 0, -2, -2, 6, -6};
    static const float mx_ties[] = {.25f, .75f, 1.25f, 1.75f, 2.5f, 3.5f, 5, -5};
    static const double mx_even[] = {0, 1, 1, 2, 2, 4, 4, -4};
    for (size_t i = 0; i < 64; i++) w[0][i] = i < 8 ? ties[i] : (float)(i % 16) - 8;
    write_model(ST_BF16, w[0], 1, 64);
    quantise("--format int4");
    st_checkpoint c = open_output("made");
    unpacked u = unpack(&c, MODULE);
    CHECK(u.scale[0] == 1);
    for (size_t i = 0; i < 8; i++)
        CHECK_MSG(u.code[i] == even[i], "%g: %d", (double)ties[i], u.code[i]);
    unpacked_free(&u);
    st_close(&c);
    for (size_t i = 0; i < 32; i++) w[0][i] = i < 8 ? mx_ties[i] : (float)e2m1((unsigned)i & 15);
    write_model(ST_BF16, w[0], 1, 32);
    quantise("--format mxfp4");
    c = open_output("made");
    u = unpack(&c, MODULE);
    CHECK(u.scale[0] == 1);
    for (size_t i = 0; i < 8; i++)
        CHECK_MSG(u.value[i] == mx_even[i], "%g: %g", (double)mx_ties[i], u.value[i]);
    unpacked_free(&u);
    st_close(&c);
}

/* ---- By definition ---- */

static double to_bf16(double x) {
    float f = (float)x;
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    bits = (bits + 0x7fffu + (bits >> 16 & 1)) & 0xffff0000u;
    memcpy(&f, &bits, sizeof f);
    return (double)f;
}

static double nearest_e2m1(double x) {
    double best = 0;
    for (unsigned code = 0; code < 16; code++)
        if (fabs(x - e2m1(code)) < fabs(x - best)) best = e2m1(code);
    return best;
}

/* Squared error of a group by the rule that needs no search. */
static double plain_error(const unpacked *u, const float *w, size_t n) {
    double largest = 0, sum = 0;
    for (size_t i = 0; i < n; i++) largest = fmax(largest, fabs((double)w[i]));
    double scale = u->floats ? exp2(floor(log2(largest)) - 2) : to_bf16(largest / (u->most + .5));
    if (!(scale > 0)) return 0;
    for (size_t i = 0; i < n; i++) {
        double x = (double)w[i] / scale;
        double q = u->floats ? nearest_e2m1(x) : fmin(fmax(rint(x), u->least), u->most);
        sum += ((double)w[i] - q * scale) * ((double)w[i] - q * scale);
    }
    return sum;
}

/* Each element is the nearest that its scale allows. */
static void check_element(const unpacked *u, size_t i, size_t k, double w) {
    double scale = u->scale[k], x = w / scale, off = fabs(w - u->value[i]) / scale;
    if (u->floats) {
        CHECK_MSG(off <= fabs(x - nearest_e2m1(x)) * (1 + 1e-6), "%zu: %g is %g off", i, x, off);
        return;
    }
    int q = u->code[i] - u->zero[k];
    bool low = u->code[i] == u->least && x < q, high = u->code[i] == u->most && x > q;
    CHECK_MSG(off <= .5 * (1 + 1e-6) || low || high, "%zu: %g is %g off", i, x, off);
}

/* Checks every element, and every group's error against the plain rule's. Returns the relative
 * error, and the plain rule's. */
static double check_matrix(const unpacked *u, const float *w, double *plain) {
    size_t group = u->cols / u->groups;
    double squares = 0, norm = 0, plain_squares = 0;
    for (size_t k = 0; k < u->rows * u->groups; k++) {
        const float *part = w + k * group;
        double sum = 0;
        CHECK_MSG(u->scale[k] > 0 && isfinite(u->scale[k]), "group %zu: scale %g", k, u->scale[k]);
        for (size_t i = 0; i < group; i++) {
            double d = (double)part[i] - u->value[k * group + i];
            check_element(u, k * group + i, k, (double)part[i]);
            sum += d * d;
            norm += (double)part[i] * (double)part[i];
        }
        double rule = plain_error(u, part, group);
        CHECK_MSG(sum <= rule * (1 + 1e-5), "group %zu: %g, by the rule %g", k, sum, rule);
        squares += sum, plain_squares += rule;
    }
    *plain = norm > 0 ? sqrt(plain_squares / norm) : 0;
    return norm > 0 ? sqrt(squares / norm) : 0;
}

static const struct {
    const char *options;
    size_t group; /* 0: a row */
} formats[] = {{"--format int8", 0},
               {"--format int4 --group 32", 32},
               {"--format int4 --group 8", 8},
               {"--format int4 --group channel", 0},
               {"--format int4 --group 0 --asymmetric", 0},
               {"--format int4 --asymmetric --group 32", 32},
               {"--format mxfp4", 32}};
#define N_FORMATS (sizeof formats / sizeof *formats)

static void check_all_formats(st_dtype type, float *w, size_t rows, size_t cols) {
    for (size_t f = 0; f < N_FORMATS; f++) {
        double plain;
        if (formats[f].group && cols % formats[f].group) continue;
        write_model(type, w, rows, cols);
        quantise(formats[f].options);
        st_checkpoint c = open_output("made");
        unpacked u = unpack(&c, MODULE);
        CHECK(u.rows == rows && u.cols == cols);
        CHECK(u.groups == (formats[f].group ? cols / formats[f].group : 1));
        check_matrix(&u, w, &plain);
        unpacked_free(&u);
        st_close(&c);
    }
}

/* Rows of 37 end within a word and within a byte; some elements are far out. */
static void every_element_is_the_nearest(void) {
    static const st_dtype types[] = {ST_BF16, ST_F16, ST_F32};
    static const size_t cols[] = {96, 37, 1, 1200};
    for (size_t i = 0; i < 3; i++)
        for (size_t n = 0; n < 4; n++) {
            size_t size = 11 * cols[n];
            float *w = test_floats(size);
            test_fill_normal(w, size);
            for (size_t k = 0; k < size; k += 53) w[k] *= 40;
            check_all_formats(types[i], w, 11, cols[n]);
            free(w);
        }
}

/* Their codes are more than those of a block: it is one row then. */
static void rows_longer_than_a_block(void) {
    enum { LONG = (1 << 22) + 3 };
    float *w = test_floats(2 * (size_t)LONG);
    double plain;
    for (size_t i = 0; i < 2 * (size_t)LONG; i++) w[i] = (float)(i % 251) - 100;
    write_model(ST_BF16, w, 2, LONG);
    quantise("--format int8");
    st_checkpoint c = open_output("made");
    unpacked u = unpack(&c, MODULE);
    CHECK(u.rows == 2 && u.cols == LONG);
    check_matrix(&u, w, &plain);
    unpacked_free(&u);
    st_close(&c);
    free(w);
}

static void zeros_have_a_scale(void) {
    float w[3][64];
    for (size_t i = 0; i < 3 * 64; i++)
        w[i / 64][i % 64] = i / 64 == 1 ? test_normal() : i % 2 ? -0.0f : 0.0f;
    for (size_t f = 0; f < N_FORMATS; f++) {
        write_model(ST_BF16, w[0], 3, 64);
        quantise(formats[f].options);
        st_checkpoint c = open_output("made");
        unpacked u = unpack(&c, MODULE);
        for (size_t i = 0; i < 3 * 64; i++)
            if (i / 64 != 1) CHECK(u.value[i] == 0);
        CHECK(u.scale[0] == 1 && u.zero[0] == 0);
        unpacked_free(&u);
        st_close(&c);
    }
}

/* What is near the ends of float32, and one number that drowns the others. */
static void extremes_stay_finite(void) {
    float w[6][32];
    for (size_t r = 0; r < 6; r++)
        for (size_t i = 0; i < 32; i++) {
            static const float size[] = {3e38f, 1e-40f, 1e-45f, 1e-37f, 1, 1e30f};
            w[r][i] = size[r] * (i == 5 ? 1 : test_uniform_f32(-1, 1));
        }
    w[4][7] = 1e6f;
    for (size_t f = 0; f < N_FORMATS; f++) {
        write_model(ST_F32, w[0], 6, 32);
        quantise(formats[f].options);
        st_checkpoint c = open_output("made");
        unpacked u = unpack(&c, MODULE);
        for (size_t i = 0; i < 6 * 32; i++) {
            double least = u.floats ? 0x1p-127 : 0x1p-133; /* the least scale that there is */
            size_t k = i / 32 * u.groups + i % 32 / (32 / u.groups);
            CHECK_MSG(isfinite(u.value[i]) && u.scale[k] >= least, "%zu: %g", i, u.value[i]);
            check_element(&u, i, k, (double)w[i / 32][i % 32]);
        }
        unpacked_free(&u);
        st_close(&c);
    }
}

/* ---- A model ---- */

static float *floats_of(const st_tensor *t) {
    float *w = test_floats(t->elements);
    for (size_t i = 0; i < t->elements; i++) w[i] = (float)from_bf16(t->data + 2 * i);
    return w;
}

static bool is_listed(const json_value *list, const char *module, size_t length) {
    for (size_t i = 0; i < json_count(list); i++) {
        const char *item = json_string(json_item(list, i), NULL);
        if (item && strlen(item) == length && strncmp(item, module, length) == 0) return true;
    }
    return false;
}

static json read_config(const char *directory) {
    size_t size;
    json document;
    error e;
    char *text = read_file(directory, "config.json", &size);
    if (!json_parse(&document, directory, text, size, &e)) give_up(e.text);
    free(text);
    return document;
}

static const json_value *quantization(const json *document) {
    return json_member(json_root(document), "quantization_config");
}

/* Every projection by its definition, every other tensor as it was; Linears among those listed. */
static size_t check_tiny(const st_checkpoint *before, const st_checkpoint *after,
                         const json_value *ignore, double *mean, double *plain_mean) {
    size_t n = 0, listed = 0;
    *mean = *plain_mean = 0;
    for (size_t i = 0; i < st_count(before); i++) {
        const st_tensor *t = st_at(before, i), *same = st_find(after, t->name);
        char module[150];
        size_t length = strlen(t->name) - strlen("weight");
        snprintf(module, sizeof module, "%.*s", (int)length, t->name);
        if (has(after, module, "weight_scale")) {
            double plain;
            float *w = floats_of(t);
            unpacked u = unpack(after, module);
            CHECK(u.rows == t->dims[0] && u.cols == t->dims[1]);
            *mean += check_matrix(&u, w, &plain);
            *plain_mean += plain;
            CHECK(!is_listed(ignore, module, length - 1));
            unpacked_free(&u);
            free(w);
            n++;
            continue;
        }
        bool good = same && same->dtype == t->dtype && same->bytes == t->bytes &&
                    memcmp(same->data, t->data, t->bytes) == 0;
        CHECK_MSG(good, "%s is not as it was", t->name);
        listed += is_listed(ignore, module, length - 1);
    }
    CHECK(listed == json_count(ignore));
    *mean /= (double)n, *plain_mean /= (double)n;
    return n;
}

/* q, k, v and o of 6 KDA layers, q and o of 3 MLA layers; 3 matrices of the dense MLP of one layer,
 * and of the shared expert and each of 8 experts of the others. */
#define TINY_MATRICES (6 * 4 + 3 * 2 + 3 + 8 * 3 * (1 + 8))

static void check_tiny_format(const char *options, const char *format, size_t tensors,
                              double bound) {
    char arguments[300];
    double mean, plain, printed, worst;
    size_t matrices;
    snprintf(arguments, sizeof arguments, LINEAR_TINY " WORK/made %s", options);
    empty_directory("made");
    outcome o = run_ok(arguments);
    CHECK(sscanf(o.err,
                 "quantize: %*u bytes of tensors became %*u; relative error of %zu matrices: mean "
                 "%lf, worst %lf",
                 &matrices, &printed, &worst) == 3);
    st_checkpoint before, after = open_output("made");
    error e;
    json config = read_config(in_work("made"));
    const json_value *q = quantization(&config);
    if (!st_open(&before, LINEAR_TINY, &e)) give_up(e.text);
    CHECK(json_string_is(json_member(q, "format"), format));
    size_t n = check_tiny(&before, &after, json_member(q, "ignore"), &mean, &plain);
    CHECK_MSG(n == TINY_MATRICES && matrices == n, "%zu matrices", n);
    CHECK_MSG(st_count(&after) == st_count(&before) + tensors * n, "%zu", st_count(&after));
    CHECK_MSG(fabs(printed - mean) < 1e-5 && worst >= mean, "%g printed, %g", printed, mean);
    CHECK_AT_MOST(options, mean, bound);
    printf("%s: relative error %.4f, by the plain rule %.4f\n", options, mean, plain);
    json_free(&config);
    st_close(&before);
    st_close(&after);
    outcome_free(&o);
}

static void tiny_in_every_format(void) {
    check_tiny_format("--format int8", "int-quantized", 1, .0066);
    check_tiny_format("--format int4 --group 32", "pack-quantized", 2, .088);
    check_tiny_format("--format int4 --group 32 --asymmetric", "pack-quantized", 3, .079);
    check_tiny_format("--format mxfp4", "mxfp4-pack-quantized", 1, .113);
}

/* ---- config.json and other files ---- */

/* The text of a config.json after a run is that before it, but for one member put in where `mark`
 * is: the last of its object. */
static void check_config(const char *marked, const char *inner) {
    const char *mark = strchr(marked, '@');
    size_t before = (size_t)(mark - marked), after = strlen(mark + 1), size;
    char text[1000];
    float w[8] = {1, 2, 3};
    write_model(ST_BF16, w, 1, 8);
    snprintf(text, sizeof text, "%.*s%s", (int)before, marked, mark + 1);
    write_in("model", "config.json", text);
    quantise("--format int4 --group 8");
    char *written = read_file(in_work("made"), "config.json", &size);
    CHECK_MSG(size > before + after && strncmp(written, marked, before) == 0 &&
                  strcmp(written + size - after, mark + 1) == 0,
              "%s became %s", text, written);
    json document = read_config(in_work("made"));
    const json_value *object = json_root(&document);
    if (inner) {
        CHECK(!json_member(object, "quantization_config"));
        object = json_member(object, inner);
    }
    size_t last = json_find(object, "quantization_config", strlen("quantization_config"));
    CHECK_MSG(last + 1 == json_count(object), "%s", written);
    CHECK(
        json_string_is(json_member(json_item(object, last), "quant_method"), "compressed-tensors"));
    json_free(&document);
    free(written);
}

static void config_text_is_kept(void) {
    check_config("{\n \"b\": [1.50, 2e0],\n \"a\": null@\n}\n", NULL);
    check_config("{\"a\":\"}\\\"{\\\\\",\"b\":{\"text_config\":{}}@}", NULL);
    check_config("{@}", NULL);
    check_config("  {@   } \n\n", NULL);
    check_config("{\r\n\t\"text_configs\": \"text_config\"@\r\n}", NULL);
    check_config("{\n  \"x\": \"text_config\",\n  \"text_config\" : {\n    \"y\": {\"z\": []}@\n"
                 "  },\n  \"v\": {\"a\": 1}\n}",
                 "text_config");
    check_config("{\"text_config\":{@}}", "text_config");
}

static void keys_are_those_of_published_models(void) {
    float w[64] = {1, 2, 3};
    uint64_t bits = 0;
    bool symmetric = true;
    write_model(ST_BF16, w, 1, 64);
    quantise("--format int4 --asymmetric");
    json config = read_config(in_work("made"));
    const json_value *q = quantization(&config);
    const json_value *group = json_member(json_member(q, "config_groups"), "group_0");
    const json_value *weights = json_member(group, "weights");
    CHECK(json_string_is(json_item(json_member(group, "targets"), 0), "Linear"));
    CHECK(json_unsigned(json_member(weights, "num_bits"), &bits) && bits == 4);
    CHECK(json_unsigned(json_member(weights, "group_size"), &bits) && bits == 64);
    CHECK(json_string_is(json_member(weights, "type"), "int"));
    CHECK(json_string_is(json_member(weights, "strategy"), "group"));
    CHECK(json_boolean(json_member(weights, "symmetric"), &symmetric) && !symmetric);
    json_free(&config);
    write_model(ST_BF16, w, 1, 64);
    quantise("--format int8");
    config = read_config(in_work("made"));
    weights = json_member(
        json_member(json_member(quantization(&config), "config_groups"), "group_0"), "weights");
    CHECK(json_unsigned(json_member(weights, "num_bits"), &bits) && bits == 8);
    CHECK(json_kind_of(json_member(weights, "group_size")) == JSON_NULL);
    CHECK(json_string_is(json_member(weights, "strategy"), "channel"));
    json_free(&config);
}

/* Three shards, of which one is named in its own way, and a matrix of more rows than a block; a file
 * that the index leaves out. */
#define TALL (BLOCK + 5)
static void write_shards(float *tall, float *wide) {
    empty_directory("model");
    empty_directory("made");
    test_seed(7);
    test_fill_normal(tall, TALL * 8);
    test_fill_normal(wide, 3 * 24);
    write_matrix("model", "s-1.safetensors", "language_model." MODULE "weight", ST_BF16, tall, TALL,
                 8);
    write_matrix("model", "s-2.st", "model.layers.3.mlp.up_proj.weight", ST_F16, wide, 3, 24);
    write_matrix("model", "s-3.safetensors", "lm_head.weight", ST_F32, wide, 3, 24);
    write_in("model", "model.safetensors.index.json",
             "{\"weight_map\": {\"model.layers.3.mlp.up_proj.weight\": \"s-2.st\", "
             "\"language_model." MODULE "weight\": \"s-1.safetensors\", \"lm_head.weight\": "
             "\"s-3.safetensors\"}}");
    write_in("model", "config.json", "{\"text_config\": {}}");
    write_in("model", "tiktoken.model", "words");
    write_in("model", "unused.safetensors", "not copied");
}

static void shards_become_shards(void) {
    float *tall = test_floats(TALL * 8), wide[3 * 24];
    double plain;
    size_t size;
    uint64_t total = 0, sum = 0;
    json index;
    error e;
    write_shards(tall, wide);
    quantise("--format int4 --group 8 --asymmetric");
    st_checkpoint c = open_output("made"); /* each tensor is where the index says */
    CHECK(st_count(&c) == 4 + 4 + 1);
    for (size_t i = 0; i < st_count(&c); i++) sum += st_at(&c, i)->bytes;
    CHECK(strstr(need(&c, "model.layers.3.mlp.up_proj.", "weight_packed")->file, "/s-2."));
    CHECK(strstr(need(&c, "lm_head.", "weight")->file, "/s-3."));
    unpacked u = unpack(&c, "language_model." MODULE);
    CHECK(u.rows == TALL);
    check_matrix(&u, tall, &plain);
    unpacked_free(&u);
    char *text = read_file(in_work("made"), "model.safetensors.index.json", &size);
    if (!json_parse(&index, "index", text, size, &e)) give_up(e.text);
    const json_value *metadata = json_member(json_root(&index), "metadata");
    CHECK(json_unsigned(json_member(metadata, "total_size"), &total) && total == sum);
    free(text);
    text = read_file(in_work("made"), "tiktoken.model", &size);
    CHECK(strcmp(text, "words") == 0);
    free(text);
    CHECK(exists("made/config.json") && !exists("made/unused.safetensors"));
    json_free(&index);
    st_close(&c);
    free(tall);
}

static void check_same_file(const char *name, const char *other) {
    size_t size, other_size;
    char *bytes = read_file(work, name, &size), *others = read_file(work, other, &other_size);
    CHECK_MSG(size == other_size && memcmp(bytes, others, size) == 0, "%s is not %s", other, name);
    free(bytes), free(others);
}

static void threads_change_no_byte(void) {
    float *tall = test_floats(TALL * 8), wide[3 * 24];
    char command[1000];
    write_shards(tall, wide);
    for (size_t threads = 1; threads <= 5; threads += 2) {
        snprintf(command, sizeof command,
                 "WORK/model WORK/made --format int4 --group 8 --asymmetric --threads %zu",
                 threads);
        empty_directory("made");
        outcome o = run_ok(command);
        outcome_free(&o);
        if (threads == 1) {
            snprintf(command, sizeof command, "rm -rf '%s/first' && mv '%s/made' '%s/first'", work,
                     work, work);
            if (system(command) != 0) give_up(command);
            continue;
        }
        check_same_file("first/s-1.safetensors", "made/s-1.safetensors");
        check_same_file("first/s-2.st", "made/s-2.st");
        check_same_file("first/config.json", "made/config.json");
    }
    free(tall);
}

/* Names that are nearly those of what is quantised, and data in another order than the index. */
static void other_tensors_are_kept(void) {
    static const blank tensors[] = {{"model.layers.x.self_attn.q_proj.weight", ST_F32, 2, {2, 8}},
                                    {MODULE "weight", ST_F32, 2, {2, 8}},
                                    {"model.layers.0.self_attn.q_conv1d.weight", ST_F16, 2, {2, 4}},
                                    {"model.layers.0.mlp.table", ST_F16, 2, {2, 8}},
                                    {"lm_head.weight", ST_BF16, 2, {2, 8}},
                                    {"a.weight", ST_BF16, 1, {8}}};
    const unsigned char *last = NULL;
    char index[1000];
    size_t n = (size_t)sprintf(index, "{\"weight_map\": {\"%s\": \"s\"", tensors[5].name);
    for (size_t i = 0; i < 5; i++)
        n += (size_t)sprintf(index + n, ", \"%s\": \"s\"", tensors[i].name);
    sprintf(index + n, "}}");
    empty_directory("model"), empty_directory("made");
    write_in("model", "config.json", "{}");
    write_in("model", "model.safetensors.index.json", index);
    write_blanks("s", tensors, 6);
    quantise("--format int8");
    st_checkpoint c = open_output("made");
    CHECK(st_count(&c) == 7);
    for (size_t i = 0; i < 6; i++) {
        const st_tensor *t = st_find(&c, tensors[i].name);
        CHECK_MSG(t && t->dtype == (i == 1 ? ST_I8 : tensors[i].type), "%s", tensors[i].name);
        CHECK_MSG(t && (!last || t->data > last), "%s is not where it was", tensors[i].name);
        if (t) last = t->data;
    }
    json config = read_config(in_work("made"));
    const json_value *ignore = json_member(quantization(&config), "ignore");
    static const char *const listed[] = {"model.layers.x.self_attn.q_proj", "lm_head"};
    for (size_t i = 0; i < 2; i++) CHECK(is_listed(ignore, listed[i], strlen(listed[i])));
    CHECK(json_count(ignore) == 2);
    json_free(&config);
    st_close(&c);
}

/* ---- Refusals ---- */

/* Refused with nothing written: OUT_DIR is not even made. */
static void check_untouched(const char *arguments, const char *part) {
    char command[800];
    snprintf(command, sizeof command, "rm -rf '%s/made'", work);
    if (system(command) != 0) give_up(command);
    check_refused(arguments, 1, part);
    CHECK(!exists("made"));
}

static void bad_usage_is_refused(void) {
    check_refused("", 2, "expected MODEL_DIR and OUT_DIR, found 0");
    check_refused("WORK/model", 2, "found 1");
    check_refused("a b c --format int8", 2, "found \"c\" too");
    check_refused("WORK/model WORK/made", 2, "expected --format");
    check_refused("WORK/model WORK/made --format int5", 2,
                  "expected int8, int4 or mxfp4, found \"int5\"");
    check_refused("WORK/model WORK/made --format int4 --group 12", 2, "multiple of 8");
    check_refused("WORK/model WORK/made --format int4 --group row", 2, "--group");
    check_refused("WORK/model WORK/made --format int8 --group 32", 2,
                  "--group: expected only with");
    check_refused("WORK/model WORK/made --format mxfp4 --asymmetric", 2,
                  "--asymmetric: expected only");
}

static void bad_input_is_refused(void) {
    float w[16] = {1, 2};
    check_untouched("WORK/none WORK/made --format int8", "none/config.json: file not found");
    check_untouched(MODELS "kimi-k3-tiny WORK/made --format int8", "key quantization_config");
    check_untouched(LINEAR_TINY " WORK/made --format int4", "rows of whole groups of 64 (--group)");
    write_model(ST_BF16, w, 2, 8);
    check_untouched("WORK/model WORK/made --format mxfp4", MODULE "weight: expected rows of whole");
    write_in("model", "config.json", "{\"text_config\": {\"quantization_config\": null}}");
    check_untouched("WORK/model WORK/made --format int8", "config.json: key quantization_config");
    write_in("model", "config.json", "{\"quantization_config\": {}, \"text_config\": {}}");
    check_untouched("WORK/model WORK/made --format int8", "config.json: key quantization_config");
    write_in("model", "config.json", "[]");
    check_untouched("WORK/model WORK/made --format int8", "config.json: expected an object");
    write_in("model", "config.json", "{\"text_config\": 1}");
    check_untouched("WORK/model WORK/made --format int8", "key text_config: expected an object");
    write_in("model", "config.json", "{}");
    write_matrix("model", "model.safetensors", MODULE "weight_packed", ST_F32, w, 2, 8);
    check_untouched("WORK/model WORK/made --format int8",
                    "a model that is not quantised, found F32 [2, 8]");
    write_matrix("model", "model.safetensors", "model.embed_tokens.weight", ST_F32, w, 2, 8);
    check_untouched("WORK/model WORK/made --format int8", "expected a tensor like model.layers");
    write_matrix("model", "model.safetensors", MODULE "weight", ST_F32, w, 0, 8);
    check_untouched("WORK/model WORK/made --format int8", "expected a matrix, found F32 [0, 8]");
    write_matrix("model", "model.safetensors", MODULE "weight", ST_F32, w, 2, 8);
    empty_directory("made");
    write_in("made", "other", "");
    check_refused("WORK/model WORK/made --format int8", 1, "empty directory, found other in it");
    check_refused("WORK/model WORK/model --format int8", 1, "expected an empty directory");
    check_refused("WORK/model WORK/none/made --format int8", 1, "none/made: cannot be made");
}

static void check_no_model(void) {
    DIR *directory = opendir(in_work("made"));
    if (!directory) give_up("the output");
    for (struct dirent *entry; (entry = readdir(directory)) != NULL;)
        CHECK_MSG(!strstr(entry->d_name, ".part") && strcmp(entry->d_name, "config.json") != 0,
                  "%s is there", entry->d_name);
    closedir(directory);
}

/* A file of two empty tensors and one of rows x 8 zeros that is to be quantised. */
static void write_with_empty_ones(st_dtype type, size_t rows) {
    const blank tensors[] = {
        {"b", ST_F32, 1, {0}}, {"a", ST_BF16, 1, {0}}, {MODULE "weight", type, 2, {rows, 8}}};
    write_blank_model(tensors, 3);
}

static void integers_and_vectors_are_refused(void) {
    static const blank vector = {MODULE "weight", ST_F32, 1, {8}};
    write_blank_model(&vector, 1);
    check_untouched("WORK/model WORK/made --format int8",
                    "tensor " MODULE "weight: expected a matrix, found F32 [8]");
    write_with_empty_ones(ST_I32, 2);
    check_refused("WORK/model WORK/made --format int8", 1,
                  "expected F32, F16 or BF16, not quantised, found I32 [2, 8]");
    check_no_model();
}

/* They lie where others begin, and go on as they are, by name. */
static void empty_tensors_are_kept(void) {
    write_with_empty_ones(ST_F32, 2);
    quantise("--format int8");
    st_checkpoint made = open_output("made");
    const st_tensor *a = st_find(&made, "a"), *b = st_find(&made, "b");
    CHECK(a && a->elements == 0 && a->dtype == ST_BF16 && b && b->elements == 0);
    CHECK(a && b && a->dtype == ST_BF16 && b->dtype == ST_F32 && a < b);
    st_close(&made);
}

/* What is too long to be written: bytes of OUT_DIR's path, and what is said then. */
#define DOTS "/$(printf %%0%zud 0 | sed s,00,./,g)"        /* ././././ */
#define ANOTHER "a-file-with-a-name-of-two-hundred-bytes-" /* five times */
static const struct {
    size_t bytes;
    const char *told;
} longer_paths[] = {
    {4090, ".../s-1.safetensors: expected a path of less than 4096 bytes"},
    {4077, "expected a shorter path"}, /* with .part */
    {4072, ".../model.safetensors.index.json: expected a path of less than 4096 bytes"},
    {4064, "expected a shorter path"},
    {4000, ".../" ANOTHER},
    {3892, "expected a shorter path"}};

static void paths_that_are_too_long(void) {
    char arguments[1000], in[100], name[251];
    float *tall = test_floats(TALL * 8), wide[3 * 24];
    check_refused("$(printf %04100d 0) WORK/made --format int8", 1,
                  ".../config.json: expected a path of less than 4096 bytes");
    write_shards(tall, wide);
    free(tall);
    snprintf(name, sizeof name, "%s%s%s%s%s", ANOTHER, ANOTHER, ANOTHER, ANOTHER, ANOTHER);
    write_in("model", "short", "");
    snprintf(arguments, sizeof arguments, "mv %s/model/short %s/model/%s", work, work, name);
    if (system(arguments) != 0) give_up(arguments);
    for (size_t i = 0; i < sizeof longer_paths / sizeof *longer_paths; i++) {
        size_t more = (longer_paths[i].bytes - strlen(in_work("made"))) / 2 * 2;
        empty_directory("made");
        snprintf(in, sizeof in, DOTS, more);
        snprintf(arguments, sizeof arguments, "WORK/model WORK/made%s --format int8", in);
        check_refused(arguments, 1, longer_paths[i].told);
        check_no_model();
    }
    empty_directory("made");
    snprintf(in, sizeof in, DOTS, (size_t)3900);
    snprintf(arguments, sizeof arguments, "WORK/model%s WORK/made --format int8", in);
    check_refused(arguments, 1, ".../" ANOTHER);
    check_no_model();
}

/* Files beside the model that cannot be copied: a link to nowhere, what cannot be read, and a name to
 * which nothing can be added. */
static void files_that_cannot_be_copied(void) {
    static const blank matrix = {MODULE "weight", ST_F32, 2, {2, 8}};
    char path[700];
    write_blank_model(&matrix, 1);
    snprintf(path, sizeof path, "%.300s/%0253d", in_work("model"), 0);
    FILE *file = fopen(path, "wb");
    if (!file || fclose(file) != 0) give_up(path);
    check_refused("WORK/model WORK/made --format int8", 1, "0000.part: cannot write: ");
    check_no_model();
    remove(path);
    snprintf(path, sizeof path, "%.300s/tiktoken.model", in_work("model"));
    CHECK(symlink("nowhere", path) == 0);
    empty_directory("made");
    check_refused("WORK/model WORK/made --format int8", 1,
                  "model/tiktoken.model: cannot be opened: ");
    check_no_model();
    remove(path);
    if (access("/proc/self/mem", R_OK) != 0) return; /* a file whose beginning nobody can read */
    CHECK(symlink("/proc/self/mem", path) == 0);
    empty_directory("made");
    check_refused("WORK/model WORK/made --format int8", 1,
                  "model/tiktoken.model: cannot be read: ");
    check_no_model();
    remove(path);
}

static void numbers_that_are_none_are_refused(void) {
    static const float bad[] = {INFINITY, -INFINITY, NAN};
    for (size_t i = 0; i < 3; i++)
        for (size_t f = 0; f < N_FORMATS; f++) {
            float w[3 * 64] = {1, 2};
            char arguments[200];
            w[64 + 37] = bad[i];
            w[2 * 64 + 5] = bad[i]; /* the first one is named */
            write_model(ST_BF16, w, 3, 64);
            snprintf(arguments, sizeof arguments, "WORK/model WORK/made %s", formats[f].options);
            check_refused(arguments, 1,
                          "model/model.safetensors: tensor " MODULE
                          "weight: element [1, 37]: expected a finite number, found ");
            check_no_model();
        }
}

/* As when a disk is full: no file may grow beyond so many bytes. */
static void check_full(const char *options, size_t bytes, const char *file) {
    char arguments[200], told[100];
    snprintf(arguments, sizeof arguments, "WORK/model WORK/made %s", options);
    snprintf(told, sizeof told, "made/%s.part: cannot write: ", file);
    empty_directory("made");
    signal(SIGXFSZ, SIG_IGN);
    rlim_t before = set_limit(RLIMIT_FSIZE, (rlim_t)bytes);
    check_refused(arguments, 1, told);
    set_limit(RLIMIT_FSIZE, before);
    check_no_model();
}

static size_t size_in_made(const char *name) {
    size_t size;
    free(read_file(in_work("made"), name, &size));
    return size;
}

/* Whatever does not fit: codes, scales, zero points or the shape, which lies where a page ends, as a
 * full buffer does. */
static void a_full_disk_is_told(void) {
    static const char options[] = "--format int4 --group 8 --asymmetric";
    blank tensors[2] = {{"a", ST_U8, 1, {1000}}, {MODULE "weight", ST_BF16, 2, {1024, 64}}};
    write_blank_model(tensors, 2);
    quantise(options);
    tensors[0].dims[0] += 4096 + 8 - size_in_made("model.safetensors") % 4096;
    write_blank_model(tensors, 2);
    quantise(options);
    size_t size = size_in_made("model.safetensors");
    CHECK_MSG(size % 4096 <= 16, "%zu bytes", size);
    for (size_t bytes = 2048; bytes < size; bytes += 2048)
        check_full(options, bytes, "model.safetensors");
}

/* Four shards of 30 matrices, named so that the index ends 3 bytes behind its second page. */
static void write_index_of_two_pages(char names[120][200]) {
    static const blank matrix = {MODULE "weight", ST_F32, 2, {2, 8}};
    char *index = (char *)test_alloc(120 * 200), file[30];
    size_t n = (size_t)sprintf(index, "{\"weight_map\": {\"%s\": \"s-0\"", matrix.name);
    empty_directory("model"), empty_directory("made");
    write_in("model", "config.json", "{}");
    write_blanks("s-0", &matrix, 1);
    for (size_t s = 1; s <= 4; s++) {
        blank tensors[30];
        for (size_t i = 0; i < 30; i++) {
            const blank tensor = {names[30 * (s - 1) + i], ST_F32, 2, {0, 8}};
            tensors[i] = tensor;
            n += (size_t)sprintf(index + n, ", \"%s\": \"s-%zu\"", tensor.name, s);
        }
        snprintf(file, sizeof file, "s-%zu", s);
        write_blanks(file, tensors, 30);
    }
    sprintf(index + n, "}}");
    write_in("model", "model.safetensors.index.json", index);
    free(index);
}

static void a_full_disk_is_told_of_an_index(void) {
    static const char index[] = "model.safetensors.index.json";
    char names[120][200];
    for (size_t i = 0; i < 120; i++) snprintf(names[i], 200, "m%03zu.%039d.weight", i, 0);
    write_index_of_two_pages(names);
    quantise("--format int8");
    json config = read_config(in_work("made"));
    CHECK(json_count(json_member(quantization(&config), "ignore")) == 120);
    json_free(&config);
    size_t size = size_in_made(index);
    CHECK_MSG(size < 8192 && size > 8192 - 140, "%zu bytes", size);
    snprintf(names[0], 200, "m000.%0*d.weight", 39 + 8195 - (int)size, 0);
    write_index_of_two_pages(names);
    quantise("--format int8");
    CHECK(size_in_made(index) == 8195);
    check_full("--format int8", 4000, index);
    check_full("--format int8", 8192, index);
}

static void a_full_disk_is_told_of_other_files(void) {
    static const blank matrix = {MODULE "weight", ST_F32, 2, {2, 8}};
    char text[40001];
    write_blank_model(&matrix, 1);
    memset(text, ' ', 40000), memcpy(text, "{}", 2), text[40000] = '\0';
    write_in("model", "config.json", text);
    check_full("--format int8", 16384, "config.json");
    write_in("model", "tiktoken.model", text);
    check_full("--format int8", 16384, "tiktoken.model");
}

/* What is held does not grow with the number of matrices. */
static void buffers_are_those_of_one_matrix(void) {
    size_t buffers[2] = {0, 0};
    float *w = test_floats(256 * 512);
    for (size_t i = 0; i < 2; i++) {
        write_model(ST_BF16, w, i ? 256 : 64, 512);
        outcome o = run_ok("WORK/model WORK/made --format int8 --threads 2");
        const char *at = strstr(o.err, "buffers ");
        CHECK(at && sscanf(at, "buffers %zu bytes", &buffers[i]) == 1);
        outcome_free(&o);
    }
    free(w);
    empty_directory("made");
    outcome o = run_ok(LINEAR_TINY " WORK/made --format int8 --threads 2");
    size_t tiny = 0;
    const char *at = strstr(o.err, "buffers ");
    CHECK(at && sscanf(at, "buffers %zu bytes", &tiny) == 1);
    /* 249 matrices; the largest have 160 rows, 160 columns, 10240 codes */
    CHECK_MSG(tiny <= 2 * 160 * 4 + 10240 + 160 * (8 + 8 + sizeof(size_t) + 2), "%zu", tiny);
    CHECK(buffers[0] < buffers[1] && buffers[1] < 256 * 512 * 2);
    outcome_free(&o);
}

/* ---- The driver reads it ---- */

static const struct {
    const char *options;
    double logits; /* of the driver from those of the same numbers as float32 */
    double bits;   /* more for each byte of a text, at most */
} readable[] = {{"--format int8", 1e-5, .01},
                {"--format int4 --group 32", 1e-5, .03},
                {"--format int4 --group 32 --asymmetric", 1e-5, .03},
                {"--format mxfp4", 1e-5, .09}};
#define N_READABLE (sizeof readable / sizeof *readable)

static bool declare(st_writer *w, const st_checkpoint *made, const st_tensor *t, error *e) {
    char module[150];
    snprintf(module, sizeof module, "%.*s", (int)(strlen(t->name) - strlen("weight")), t->name);
    st_dtype type = has(made, module, "weight_scale") ? ST_F32 : t->dtype;
    return st_writer_add(w, t->name, type, t->dims, t->n_dims, e);
}

static bool write_values(st_writer *w, const st_checkpoint *made, const st_tensor *t, error *e) {
    char module[150];
    snprintf(module, sizeof module, "%.*s", (int)(strlen(t->name) - strlen("weight")), t->name);
    if (!has(made, module, "weight_scale")) return st_writer_bytes(w, t->data, t->bytes, e);
    unpacked u = unpack(made, module);
    float *values = test_floats(t->elements);
    for (size_t i = 0; i < t->elements; i++) values[i] = (float)u.value[i];
    bool ok = st_writer_floats(w, values, t->elements, e);
    free(values);
    unpacked_free(&u);
    return ok;
}

/* WORK/floats: the model of WORK/made in float32, by the unpacking of this test. */
static void write_floats(const char *source) {
    st_checkpoint before, made = open_output("made");
    st_writer w;
    error e;
    char path[400];
    size_t size;
    empty_directory("floats");
    if (!st_open(&before, source, &e)) give_up(e.text);
    snprintf(path, sizeof path, "%.300s/model.safetensors", in_work("floats"));
    bool ok = st_writer_open(&w, path, &e);
    for (size_t i = 0; ok && i < st_count(&before); i++)
        ok = declare(&w, &made, st_at(&before, i), &e);
    for (size_t i = 0; ok && i < st_count(&before); i++)
        ok = write_values(&w, &made, st_at(&before, i), &e);
    if (!st_writer_close(&w, ok, &e)) give_up(e.text);
    char *config = read_file(source, "config.json", &size);
    write_file(in_work("floats"), "config.json", config, size);
    free(config);
    st_close(&before);
    st_close(&made);
}

static float *logits_of(const char *model, size_t n) {
    char arguments[300];
    snprintf(arguments, sizeof arguments, "%s --tokens WORK/ids --logits WORK/logits", model);
    outcome o = run_program("generate", arguments);
    CHECK_MSG(o.status == 0, "%s", o.err);
    outcome_free(&o);
    return read_floats("logits", n);
}

/* The driver's logits from the file are those from the numbers that the file stands for. */
static void the_driver_reads_it(void) {
    golden g = golden_open(LINEAR_TINY);
    write_ids("ids", g.ids, g.n);
    for (size_t i = 0; i < N_READABLE; i++) {
        char arguments[300];
        empty_directory("made");
        snprintf(arguments, sizeof arguments, LINEAR_TINY " WORK/made %s", readable[i].options);
        outcome o = run_ok(arguments);
        outcome_free(&o);
        write_floats(LINEAR_TINY);
        float *packed = logits_of("WORK/made", g.n * g.vocab);
        float *floats = logits_of("WORK/floats", g.n * g.vocab);
        CHECK_AT_MOST(readable[i].options, test_relative_l2_f32(packed, floats, g.n * g.vocab),
                      readable[i].logits);
        free(packed);
        free(floats);
    }
    golden_free(&g);
}

static double bits_per_byte(const char *model) {
    char arguments[300];
    double bits = (double)NAN;
    snprintf(arguments, sizeof arguments, "%s LICENSE", model);
    outcome o = run_program("perplexity", arguments);
    CHECK_MSG(o.status == 0 && sscanf(o.out, "%lf bits per byte", &bits) == 1, "%s", o.err);
    outcome_free(&o);
    return bits;
}

/* A trained model says nearly as much about a text as before. (One of random weights does not: the
 * experts that it takes hang on the last bits.) */
static void a_trained_model_keeps_what_it_knows(void) {
    double before = bits_per_byte(TRAINED);
    for (size_t i = 0; i < N_READABLE; i++) {
        char arguments[300];
        empty_directory("made");
        snprintf(arguments, sizeof arguments, TRAINED " WORK/made %s", readable[i].options);
        outcome o = run_ok(arguments);
        outcome_free(&o);
        double after = bits_per_byte("WORK/made");
        CHECK_AT_MOST(readable[i].options, after - before, readable[i].bits);
        printf("%s: %.4f bits per byte, %.4f before\n", readable[i].options, after, before);
    }
}

/* ---- Directories that cannot be listed ---- */

/* The programs that follow may not do with files as they like, as those of the superuser may. */
static void directories_that_cannot_be_listed(void) {
    static const blank matrix = {MODULE "weight", ST_F32, 2, {2, 8}};
    static const char *const names[] = {"model", "made"};
#if defined(__linux__)
    (void)prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, 0, 0, 0);
    (void)prctl(PR_CAPBSET_DROP, CAP_DAC_READ_SEARCH, 0, 0, 0);
#endif
    for (size_t i = 0; i < 2; i++) {
        char told[100], command[400];
        write_blank_model(&matrix, 1);
        CHECK(chmod(in_work(names[i]), 0300) == 0);
        snprintf(command, sizeof command, "ls '%s' >/dev/null 2>&1", in_work(names[i]));
        bool listed = system(command) == 0;
        snprintf(told, sizeof told, "/%s: cannot be listed: ", names[i]);
        if (listed)
            test_skip("who runs this may list any directory");
        else
            check_refused("WORK/model WORK/made --format int8", 1, told);
        CHECK(chmod(in_work(names[i]), 0700) == 0);
        if (!listed) check_no_model();
    }
}

int main(void) {
    temporary(PROGRAM, work);
    TEST(int8_by_hand);
    TEST(int4_by_hand);
    TEST(zero_points_by_hand);
    TEST(mxfp4_by_hand);
    TEST(ties_go_to_even);
    TEST(every_element_is_the_nearest);
    TEST(rows_longer_than_a_block);
    TEST(zeros_have_a_scale);
    TEST(extremes_stay_finite);
    TEST(tiny_in_every_format);
    TEST(config_text_is_kept);
    TEST(keys_are_those_of_published_models);
    TEST(shards_become_shards);
    TEST(threads_change_no_byte);
    TEST(other_tensors_are_kept);
    TEST(bad_usage_is_refused);
    TEST(bad_input_is_refused);
    TEST(integers_and_vectors_are_refused);
    TEST(empty_tensors_are_kept);
    TEST(paths_that_are_too_long);
    TEST(files_that_cannot_be_copied);
    TEST(numbers_that_are_none_are_refused);
    TEST(a_full_disk_is_told);
    TEST(a_full_disk_is_told_of_an_index);
    TEST(a_full_disk_is_told_of_other_files);
    TEST(buffers_are_those_of_one_matrix);
    TEST(the_driver_reads_it);
    TEST(a_trained_model_keeps_what_it_knows);
    TEST(directories_that_cannot_be_listed);
    return test_summary();
}
