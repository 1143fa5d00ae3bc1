/* test_safetensors.c - opening tensors: sound files and shards, and every way they can be unsound.
 */
#include "../examples/json.h"
#include "test.h"

#include <time.h>

#if JSON_POSIX
#include "limits.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

#if JSON_POSIX && !defined(ST_NO_MMAP)
/* What the system says of its limits: the truth, that there are none, or nothing. */
static enum said { THE_TRUTH, NO_LIMIT, NOTHING } said_of_limits;
static int test_getrlimit(int resource, struct rlimit *limit) {
    int result = said_of_limits == NOTHING ? -1 : getrlimit(resource, limit);
    if (said_of_limits == NO_LIMIT) limit->rlim_cur = RLIM_INFINITY;
    return result;
}
#define getrlimit test_getrlimit
#endif

/* Allocations fail from the given one on; SIZE_MAX for never. Counts those that the reader makes.
 */
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
#define SAFETENSORS_IMPLEMENTATION
#include "../examples/safetensors.h"
#undef malloc
#undef calloc
#undef realloc
#undef getrlimit
#define OUTPUT_IMPLEMENTATION
#include "../examples/safetensors_write.h"

/* ---- Files in memory ---- */

typedef struct image {
    unsigned char *bytes; /* of exactly this size, so that a sanitizer sees a read past the end */
    size_t size;
} image;

static void put_u64(unsigned char *at, uint64_t value) {
    for (int i = 0; i < 8; i++)
        at[i] = (unsigned char)(value >> 8 * i);
}

/* Byte i of the data is 7i + 1. */
static image make_image(const char *header, size_t data_size) {
    size_t length = strlen(header);
    image file;
    file.size = 8 + length + data_size;
    file.bytes = (unsigned char *)test_alloc(file.size);
    put_u64(file.bytes, length);
    memcpy(file.bytes + 8, header, length);
    for (size_t i = 0; i < data_size; i++)
        file.bytes[8 + length + i] = (unsigned char)(7 * i + 1);
    return file;
}

static image copy_image(const unsigned char *bytes, size_t size) {
    image file;
    file.size = size;
    file.bytes = (unsigned char *)test_alloc(size);
    memcpy(file.bytes, bytes, size);
    return file;
}

static void check_sentence(const st_checkpoint *c, const error *e, const char *start) {
    CHECK_MSG(strncmp(e->text, start, strlen(start)) == 0, "\"%s\" does not start with %s", e->text,
              start);
    CHECK(strlen(e->text) > strlen(start) + 8 && strchr(e->text, '\n') == NULL);
    CHECK(c->tensors == NULL && c->files == NULL && c->count == 0 && c->document.root == NULL);
}

/* Opens and, if that works, reads every byte of every tensor. */
static bool opens(const image *file, error *e) {
    st_checkpoint c;
    memset(e, 0, sizeof *e);
    if (!st_open_memory(&c, "m.st", file->bytes, file->size, e)) {
        check_sentence(&c, e, "m.st: ");
        return false;
    }
    size_t total = 0;
    volatile unsigned sum = 0;
    for (size_t i = 0; i < st_count(&c); i++) {
        const st_tensor *t = st_at(&c, i);
        total += t->bytes;
        for (size_t j = 0; j < t->bytes; j++)
            sum = sum + t->data[j];
        CHECK(st_find(&c, t->name) == t && strcmp(t->file, "m.st") == 0);
        CHECK(t->bytes == t->elements * st_dtype_size(t->dtype));
    }
    CHECK(total <= file->size - 8);
    st_close(&c);
    return true;
}

static void check_refused_image(const image *file, const char *message) {
    error e;
    bool ok = opens(file, &e);
    CHECK_MSG(!ok && strcmp(e.text, message) == 0, "gives: %s\n  wants: %s",
              ok ? "no error" : e.text, message);
}

static void check_refused(const char *header, size_t data_size, const char *message) {
    image file = make_image(header, data_size);
    check_refused_image(&file, message);
    free(file.bytes);
}

static void check_accepted(const char *header, size_t data_size) {
    image file = make_image(header, data_size);
    error e;
    bool ok = opens(&file, &e);
    CHECK_MSG(ok, "%s: %s", header, e.text);
    free(file.bytes);
}

/* Neither the order of the header nor any alignment is that of the data. */
static const char *const sample =
    "{\"b\":{\"dtype\":\"F32\",\"shape\":[2,2],\"data_offsets\":[3,19]},"
    "\"__metadata__\":{\"format\":\"pt\"},"
    "\"a.weight\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0,3]},"
    "\"a.weight_scale\":{\"shape\":[],\"data_offsets\":[19,21],\"dtype\":\"BF16\"},"
    "\"none\":{\"dtype\":\"I64\",\"shape\":[4,0],\"data_offsets\":[21,21]}}  ";
enum { sample_data = 21 };

static void check_tensor(const st_tensor *t, const char *name, st_dtype dtype, const char *shape,
                         size_t elements, size_t bytes, const unsigned char *data) {
    char text[ST_SHAPE_TEXT];
    CHECK_MSG(t != NULL, "%s", name);
    if (!t) return;
    CHECK(strcmp(t->name, name) == 0 && t->dtype == dtype);
    CHECK(strcmp(st_shape(t->dims, t->n_dims, text), shape) == 0);
    CHECK(t->elements == elements && t->bytes == bytes && t->data == data);
}

/* A caller's bytes are neither read ahead nor locked, and found by address like those of a file. */
static void knows_where_bytes_come_from(void) {
    image file = make_image(sample, sample_data);
    st_checkpoint c;
    error e = {""};
    size_t offset = 77;
    bool ok = st_open_memory(&c, "m.st", file.bytes, file.size, &e);
    CHECK_MSG(ok, "%s", e.text);
    if (ok) {
        st_prefault(&c);
        /* A build that can lock has nothing to do. */
        CHECK_MSG(st_lock(&c, &e) == STI_MMAP, "%s", e.text);
        CHECK(!st_file_at(&c, NULL, &offset) && !st_file_at(&c, &c, &offset) && offset == 77);
        CHECK(!st_file_at(&c, file.bytes + file.size, &offset) && offset == 77);
        for (size_t i = 0; i < file.size; i += file.size - 1) {
            const char *name = st_file_at(&c, file.bytes + i, &offset);
            CHECK(name && strcmp(name, "m.st") == 0 && offset == i);
        }
        st_close(&c);
        CHECK(!st_file_at(&c, file.bytes, &offset));
    }
    free(file.bytes);
}

static void opens_a_file(void) {
    image file = make_image(sample, sample_data);
    const unsigned char *data = file.bytes + file.size - sample_data;
    st_checkpoint opened, c;
    error e;
    bool ok = st_open_memory(&opened, "m.st", file.bytes, file.size, &e);
    CHECK_MSG(ok, "%s", e.text);
    if (ok) {
        c = opened; /* may be moved */
        CHECK(st_count(&c) == 4);
        check_tensor(st_at(&c, 0), "b", ST_F32, "[2, 2]", 4, 16, data + 3);
        check_tensor(st_at(&c, 1), "a.weight", ST_U8, "[3]", 3, 3, data);
        check_tensor(st_at(&c, 2), "a.weight_scale", ST_BF16, "[]", 1, 2, data + 19);
        check_tensor(st_at(&c, 3), "none", ST_I64, "[4, 0]", 0, 0, data + 21);
        CHECK(st_at(&c, 4) == NULL);
        for (size_t i = 0; i < 4; i++)
            CHECK(st_find(&c, st_at(&c, i)->name) == st_at(&c, i));
        CHECK(strcmp(st_at(&c, 0)->file, "m.st") == 0);
        st_close(&c);
        st_close(&c);
        CHECK(st_count(&c) == 0 && st_find(&c, "b") == NULL);
    }
    free(file.bytes);
}

static void finds_whole_names(void) {
    image file = make_image(sample, sample_data);
    st_checkpoint c;
    error e;
    CHECK(st_open_memory(&c, "m.st", file.bytes, file.size, &e));
    static const char *const absent[] = {
        "", "a", "a.", "a.weight_", "a.weight_scale2", "B", "a.weight ", "__metadata__"};
    for (size_t i = 0; i < sizeof absent / sizeof absent[0]; i++)
        CHECK_MSG(st_find(&c, absent[i]) == NULL, "%s", absent[i]);
    CHECK(st_find(&c, "a.weight") != st_find(&c, "a.weight_scale"));
    st_close(&c);
    free(file.bytes);
}

static void knows_every_type(void) {
    static const struct {
        const char *name;
        st_dtype dtype;
        size_t size;
    } types[] = {{"F64", ST_F64, 8},        {"F32", ST_F32, 4},         {"F16", ST_F16, 2},
                 {"BF16", ST_BF16, 2},      {"I64", ST_I64, 8},         {"I32", ST_I32, 4},
                 {"I16", ST_I16, 2},        {"I8", ST_I8, 1},           {"U64", ST_U64, 8},
                 {"U32", ST_U32, 4},        {"U16", ST_U16, 2},         {"U8", ST_U8, 1},
                 {"BOOL", ST_BOOL, 1},      {"F8_E4M3", ST_F8_E4M3, 1}, {"F8_E5M2", ST_F8_E5M2, 1},
                 {"F8_E8M0", ST_F8_E8M0, 1}};
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++) {
        char header[128];
        st_checkpoint c;
        error e;
        CHECK(strcmp(st_dtype_name(types[i].dtype), types[i].name) == 0);
        CHECK(st_dtype_size(types[i].dtype) == types[i].size);
        sprintf(header, "{\"x\":{\"dtype\":\"%s\",\"shape\":[3],\"data_offsets\":[0,%zu]}}",
                types[i].name, 3 * types[i].size);
        image file = make_image(header, 3 * types[i].size);
        bool ok = st_open_memory(&c, "m.st", file.bytes, file.size, &e);
        CHECK_MSG(ok && st_find(&c, "x")->dtype == types[i].dtype, "%s", types[i].name);
        if (ok) st_close(&c);
        free(file.bytes);
    }
}

static void loads_little_endian_at_any_alignment(void) {
    static const unsigned char two[] = {0xcd, 0xab}, four[] = {0x00, 0x00, 0xc0, 0xbf};
    static const unsigned char eight[] = {0xef, 0xcd, 0xab, 0x89, 0x67, 0x45, 0x23, 0x01};
    static const unsigned char d[] = {0, 0, 0, 0, 0, 0, 0x04, 0xc0};
    unsigned char buffer[24];
    for (size_t i = 0; i < 8; i++) {
        memcpy(buffer + i, two, 2);
        CHECK(st_load_u16(buffer + i) == 0xabcd);
        memcpy(buffer + i, four, 4);
        CHECK(st_load_u32(buffer + i) == 0xbfc00000u);
        float f = st_load_f32(buffer + i);
        CHECK(f > -1.51f && f < -1.49f);
        memcpy(buffer + i, eight, 8);
        CHECK(st_load_u64(buffer + i) == 0x0123456789abcdefu);
        memcpy(buffer + i, d, 8);
        double g = st_load_f64(buffer + i);
        CHECK(g > -2.51 && g < -2.49);
    }
}

static void writes_shapes(void) {
    char text[ST_SHAPE_TEXT];
    size_t dims[ST_MAX_DIMS] = {128, 64, 1, 0};
    CHECK(strcmp(st_shape(dims, 0, text), "[]") == 0);
    CHECK(strcmp(st_shape(dims, 2, text), "[128, 64]") == 0);
    CHECK(strcmp(st_shape(dims, 4, text), "[128, 64, 1, 0]") == 0);
    for (size_t i = 0; i < ST_MAX_DIMS; i++)
        dims[i] = SIZE_MAX;
    size_t longest = strlen(st_shape(dims, ST_MAX_DIMS, text));
    CHECK(longest < ST_SHAPE_TEXT && text[longest - 1] == ']');
}

/* ---- Unsound files ---- */

static void refuses_every_truncation(void) {
    image file = make_image(sample, sample_data);
    for (size_t size = 0; size < file.size; size++) {
        error e;
        image shorter = copy_image(file.bytes, size);
        CHECK_MSG(!opens(&shorter, &e), "opened with %zu bytes", size);
        free(shorter.bytes);
    }
    image longer = copy_image(file.bytes, file.size);
    longer.bytes = (unsigned char *)realloc(longer.bytes, longer.size + 1);
    longer.bytes[longer.size++] = 0;
    check_refused_image(&longer, "m.st: the last 1 bytes of data belong to no tensor");
    free(longer.bytes);
    free(file.bytes);
}

static void survives_every_altered_byte(void) {
    static const unsigned char others[] = {0,   1,   0x20, '"', '\\', '0', '1', '9', '-', '.', ',',
                                           ':', '[', ']',  '{', '}',  'e', 'F', 'U', 127, 128, 255};
    image file = make_image(sample, sample_data);
    size_t opened = 0, refused = 0;
    for (size_t i = 0; i < file.size - sample_data; i++) {
        unsigned char original = file.bytes[i];
        for (size_t k = 0; k < sizeof others; k++) {
            error e;
            file.bytes[i] = others[k];
            if (opens(&file, &e))
                opened++;
            else
                refused++;
        }
        file.bytes[i] = original;
    }
    CHECK(opened > 100 && refused > 1000);
    free(file.bytes);
}

/* Several bytes at once, to pass more than one check. */
static void survives_random_damage(void) {
    image file = make_image(sample, sample_data);
    test_seed(1);
    for (int run = 0; run < 20000; run++) {
        error e;
        image damaged = copy_image(file.bytes, file.size);
        for (int k = 0; k < 3; k++) {
            size_t at = (size_t)(test_random_u64() % (file.size - sample_data));
            size_t from = (size_t)(test_random_u64() % (file.size - sample_data));
            damaged.bytes[at] = file.bytes[from];
        }
        opens(&damaged, &e);
        free(damaged.bytes);
    }
    free(file.bytes);
}

static void refuses_tiny_files(void) {
    for (size_t size = 0; size < 10; size++) {
        char message[128];
        image file = copy_image((const unsigned char *)"\2\0\0\0\0\0\0\0{}", size);
        sprintf(message, "m.st: expected a header length and a header, found a file of %zu bytes",
                size);
        check_refused_image(&file, message);
        free(file.bytes);
    }
    check_accepted("{}", 0);
    check_accepted("{\"__metadata__\":{}}", 0);
}

static void refuses_wrong_header_lengths(void) {
    const char *header = "{\"x\":{\"dtype\":\"U8\",\"shape\":[32],\"data_offsets\":[0,32]}}";
    image file = make_image(header, 32);
    const uint64_t lengths[] = {0,
                                1,
                                file.size - 7,
                                file.size,
                                1000,
                                100000001,
                                (uint64_t)1 << 32,
                                (uint64_t)1 << 63,
                                UINT64_MAX - 8,
                                UINT64_MAX - 7,
                                UINT64_MAX};
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        char message[128];
        sprintf(message, "m.st: expected a header length from 2 to %zu, found %llu", file.size - 8,
                (unsigned long long)lengths[i]);
        put_u64(file.bytes, lengths[i]);
        check_refused_image(&file, message);
    }
    put_u64(file.bytes, 7);
    check_refused_image(&file, "m.st: header: line 1, column 8: expected '\"' to close a string, "
                               "found the end of the text");
    put_u64(file.bytes, file.size - 8);
    check_refused_image(&file, "m.st: header: line 1, column 56: expected the end of the text, "
                               "found byte 0x01");
    free(file.bytes);
}

static void refuses_headers_above_the_limit(void) {
    size_t length = 100000001;
    image file = {(unsigned char *)test_alloc(length + 8), length + 8}; /* never touched: no cost */
    put_u64(file.bytes, length);
    file.bytes[8] = '{';
    check_refused_image(&file, "m.st: expected a header of at most 100000000 bytes, "
                               "found 100000001");
    free(file.bytes);
}

static void refuses_headers_that_are_no_object_of_tensors(void) {
    check_refused(" {}", 0, "m.st: expected the header to start with '{', found byte 0x20");
    check_refused("[]", 0, "m.st: expected the header to start with '{', found byte 0x5b");
    check_refused("\xef\xbb\xbf{}", 0,
                  "m.st: expected the header to start with '{', found byte 0xef");
    check_refused("{} x", 0,
                  "m.st: header: line 1, column 4: expected the end of the text, found 'x'");
    check_refused("{\"a\":5}", 0, "m.st: tensor a: expected an object, found a number");
    check_refused("{\"a\":[]}", 0, "m.st: tensor a: expected an object, found an array");
    check_refused("{\"__metadata__\":5}", 0, "m.st: __metadata__: expected an object of strings");
    check_refused("{\"__metadata__\":{\"a\":\"b\",\"n\":1}}", 0,
                  "m.st: __metadata__: expected an object of strings");
    check_refused("{\"a\\nb\":5}", 0, "m.st: tensor a?b: expected an object, found a number");
    check_refused("{\"a\\u0000b\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}", 0,
                  "m.st: the name of a tensor holds a NUL");
    char deep[10002];
    memset(deep, '[', 10001);
    memcpy(deep, "{\"a\":", 5);
    deep[10001] = '\0';
    check_refused(deep, 0, "m.st: header: line 1, column 69: nested deeper than 64 levels");
}

static void refuses_duplicate_names(void) {
    check_refused("{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
                  "\"\\u0061\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,2]}}",
                  2, "m.st: header: line 1, column 54: the name \"a\" occurs twice in one object");
    check_refused(
        "{\"a\":{\"dtype\":\"U8\",\"dtype\":\"I8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1,
        "m.st: header: line 1, column 20: the name \"dtype\" occurs twice in one object");
}

static void check_entry(const char *dtype, const char *shape, const char *offsets,
                        const char *message) {
    char header[512], expected[640];
    sprintf(header, "{\"t.w\":{\"dtype\":%s,\"shape\":%s,\"data_offsets\":%s}}", dtype, shape,
            offsets);
    sprintf(expected, "m.st: tensor t.w: %s", message);
    check_refused(header, 64, expected);
}

static void refuses_wrong_types(void) {
    check_entry("\"F31\"", "[16]", "[0,64]", "expected a known dtype, found \"F31\"");
    check_entry("\"f32\"", "[16]", "[0,64]", "expected a known dtype, found \"f32\"");
    check_entry("\"F32\\u0000\"", "[16]", "[0,64]", "expected a known dtype, found \"F32\"");
    check_entry("\"F\"", "[16]", "[0,64]", "expected a known dtype, found \"F\"");
    check_entry("\"\"", "[16]", "[0,64]", "expected a known dtype, found \"\"");
    check_entry("4", "[16]", "[0,64]", "expected a known dtype, found 4");
    check_entry("null", "[16]", "[0,64]", "expected a known dtype, found null");
    check_refused("{\"t\":{\"shape\":[16],\"data_offsets\":[0,64]}}", 64,
                  "m.st: tensor t: expected a known dtype, found nothing");
}

static void refuses_wrong_shapes(void) {
    char range[128];
    static const char *const bad[] = {"-1", "1.5", "1e400", "18446744073709551616", "null"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        char shape[64];
        sprintf(shape, "[2,%s]", bad[i]);
        sprintf(range, "shape: expected integers from 0 to %zu, found %s", SIZE_MAX, bad[i]);
        check_entry("\"F32\"", shape, "[0,64]", range);
    }
    check_entry("\"F32\"", "16", "[0,64]", "shape: expected an array, found 16");
    check_entry("\"F32\"", "{\"a\":16}", "[0,64]", "shape: expected an array, found an object");
    check_entry("\"F32\"", "[1,1,1,1,16,1,1,1,1]", "[0,64]",
                "shape: expected at most 8 dimensions, found 9");
    check_refused("{\"t\":{\"dtype\":\"F32\",\"data_offsets\":[0,64]}}", 64,
                  "m.st: tensor t: shape: expected an array, found nothing");
    check_accepted("{\"t\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1,16,1,1,1],"
                   "\"data_offsets\":[0,64]}}",
                   64);
}

static void refuses_products_that_wrap(void) {
#if SIZE_MAX == UINT64_MAX
    /* Each wraps to 16 elements or 64 bytes in 64 bits. */
    check_entry("\"F32\"", "[4294967296,4294967296]", "[0,64]",
                "shape [4294967296, 4294967296] has more elements than can be addressed");
    check_entry("\"F32\"", "[9223372036854775808,2]", "[0,0]",
                "shape [9223372036854775808, 2] has more elements than can be addressed");
    check_entry("\"F32\"", "[4294967297,4294967297,16]", "[0,64]",
                "shape [4294967297, 4294967297, 16] has more elements than can be addressed");
    check_entry("\"F32\"", "[4611686018427387920]", "[0,64]",
                "shape [4611686018427387920] of F32 has more bytes than can be addressed");
    check_entry("\"F64\"", "[2305843009213693960]", "[0,64]",
                "shape [2305843009213693960] of F64 has more bytes than can be addressed");
    check_entry("\"U8\"", "[18446744073709551615]", "[0,64]",
                "expected 18446744073709551615 bytes for U8 [18446744073709551615], "
                "found 64 in data_offsets [0, 64]");
    /* As in the reference implementation, a zero does not excuse what comes before it. */
    check_entry("\"U8\"", "[4294967296,4294967296,0]", "[0,0]",
                "shape [4294967296, 4294967296, 0] has more elements than can be addressed");
    check_accepted("{\"t\":{\"dtype\":\"F64\",\"shape\":[0,4294967296,4294967296],"
                   "\"data_offsets\":[0,0]}}",
                   0);
#else
    check_entry("\"U8\"", "[4294967296]", "[0,64]",
                "shape: expected integers from 0 to 4294967295, found 4294967296");
    check_entry("\"U8\"", "[65536,65536]", "[0,64]",
                "shape [65536, 65536] has more elements than can be addressed");
#endif
}

static void refuses_wrong_offsets(void) {
    static const char *const bad[] = {"[]",       "[0]",  "[0,64,64]",  "[-1,64]",
                                      "[0,64.5]", "null", "[\"0\",64]", "[0,18446744073709551616]",
                                      "64"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        check_entry("\"F32\"", "[16]", bad[i],
                    "data_offsets: expected an array of two non-negative integers");
    check_refused("{\"t\":{\"dtype\":\"F32\",\"shape\":[16]}}", 64,
                  "m.st: tensor t: data_offsets: expected an array of two non-negative integers");
    check_entry("\"F32\"", "[16]", "[5,3]", "data_offsets [5, 3] end before they begin");
    check_entry("\"U8\"", "[0]", "[1,0]", "data_offsets [1, 0] end before they begin");
    check_entry(
        "\"F32\"", "[16]", "[0,9223372036854775808]",
        "data_offsets [0, 9223372036854775808] reach past the 64 bytes of data in the file");
    check_entry("\"F32\"", "[16]", "[18446744073709551552,18446744073709551615]",
                "data_offsets [18446744073709551552, 18446744073709551615] reach past the 64 bytes "
                "of data in the file");
    check_entry("\"F32\"", "[16]", "[1,65]",
                "data_offsets [1, 65] reach past the 64 bytes of data in the file");
    check_entry("\"U8\"", "[0]", "[65,65]",
                "data_offsets [65, 65] reach past the 64 bytes of data in the file");
    check_entry("\"F32\"", "[4,4]", "[0,60]",
                "expected 64 bytes for F32 [4, 4], found 60 in data_offsets [0, 60]");
    check_entry("\"F16\"", "[4,4]", "[0,64]",
                "expected 32 bytes for F16 [4, 4], found 64 in data_offsets [0, 64]");
    check_entry("\"F32\"", "[]", "[0,64]",
                "expected 4 bytes for F32 [], found 64 in data_offsets [0, 64]");
}

/* Two tensors of bytes, by their offsets. */
static void two_tensors(char *header, int a0, int a1, int b0, int b1) {
    sprintf(header,
            "{\"a\":{\"dtype\":\"U8\",\"shape\":[%d],\"data_offsets\":[%d,%d]},"
            "\"b\":{\"dtype\":\"U8\",\"shape\":[%d],\"data_offsets\":[%d,%d]}}",
            a1 - a0, a0, a1, b1 - b0, b0, b1);
}

static void wants_data_covered_exactly_once(void) {
    static const struct {
        int a0, a1, b0, b1;
        const char *message; /* NULL if they are sound, in 8 bytes of data */
    } cases[] = {{0, 4, 4, 8, NULL},
                 {4, 8, 0, 4, NULL},
                 {0, 0, 0, 8, NULL},
                 {0, 8, 8, 8, NULL},
                 {8, 8, 0, 8, NULL},
                 {0, 5, 4, 8, "m.st: tensor b: its data overlaps that of tensor a"},
                 {4, 8, 0, 5, "m.st: tensor a: its data overlaps that of tensor b"},
                 {0, 8, 0, 8, "m.st: tensor b: its data overlaps that of tensor a"},
                 {0, 8, 4, 4, "m.st: tensor b: its data overlaps that of tensor a"},
                 {0, 8, 2, 4, "m.st: tensor b: its data overlaps that of tensor a"},
                 {0, 3, 4, 8, "m.st: tensor b: the 1 bytes of data before it belong to no tensor"},
                 {2, 4, 4, 8, "m.st: tensor a: the 2 bytes of data before it belong to no tensor"},
                 {0, 4, 4, 6, "m.st: the last 2 bytes of data belong to no tensor"},
                 {0, 0, 0, 0, "m.st: the last 8 bytes of data belong to no tensor"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char header[256];
        two_tensors(header, cases[i].a0, cases[i].a1, cases[i].b0, cases[i].b1);
        if (cases[i].message)
            check_refused(header, 8, cases[i].message);
        else
            check_accepted(header, 8);
    }
    check_refused("{}", 8, "m.st: the last 8 bytes of data belong to no tensor");
}

/* By their begin, their end and their place in the header: any qsort gives one order, and so one
 * message. */
static void spans_have_one_order(void) {
    static const sti_span spans[] = {{0, 0, 4}, {0, 4, 0}, {0, 4, 3}, {0, 8, 2}, {4, 4, 1}};
    enum { COUNT = sizeof spans / sizeof *spans };
    for (size_t i = 0; i < COUNT; i++)
        for (size_t j = 0; j < COUNT; j++) {
            int order = sti_compare_spans(&spans[i], &spans[j]);
            if (i != j) CHECK_MSG((order < 0) == (i < j) && order != 0, "%zu and %zu", i, j);
        }
}

/* The end of a sentence survives names longer than the sentence's buffer. */
static void reports_on_long_names(void) {
    char header[5000];
    memset(header, 'n', sizeof header);
    memcpy(header, "{\"", 2);
    strcpy(header + 4000, "\":{\"dtype\":\"F31\"}}");
    image file = make_image(header, 0);
    error e;
    CHECK(!opens(&file, &e));
    CHECK(strstr(e.text, "nnn: expected a known dtype, found \"F31\"") != NULL);
    free(file.bytes);
}

static void opens_many_tensors_quickly(void) {
    enum { count = 100000 };
    char *header = (char *)test_alloc(count * 100), *out = header, name[64];
    st_checkpoint c;
    error e;
    *out++ = '{';
    for (size_t i = 0; i < count; i++) /* in the data in reverse order */
        out += sprintf(out,
                       "%s\"experts.%zu.w\":{\"dtype\":\"U8\",\"shape\":[1],"
                       "\"data_offsets\":[%zu,%zu]}",
                       i ? "," : "", i, count - 1 - i, count - i);
    strcpy(out, "}");
    image file = make_image(header, count);
    clock_t start = clock();
    bool ok = st_open_memory(&c, "m.st", file.bytes, file.size, &e);
    CHECK_MSG(ok, "%s", e.text);
    for (size_t i = 0; ok && i < count; i++) {
        sprintf(name, "experts.%zu.w", i);
        CHECK(st_find(&c, name) == st_at(&c, i));
    }
    CHECK_AT_MOST("seconds", (double)(clock() - start) / CLOCKS_PER_SEC, 5.0);
    if (ok) st_close(&c);
    free(file.bytes);
    free(header);
}

static void reports_every_failed_allocation(void) {
    image file = make_image(sample, sample_data);
    st_checkpoint c;
    error e;
    allocations = 0;
    CHECK(st_open_memory(&c, "m.st", file.bytes, file.size, &e));
    st_close(&c);
    size_t needed = allocations;
    CHECK(needed > 5);
    for (size_t i = 0; i < needed; i++) {
        allocations = 0;
        allocations_allowed = i;
        bool ok = st_open_memory(&c, "m.st", file.bytes, file.size, &e);
        allocations_allowed = SIZE_MAX;
        CHECK(!ok && strstr(e.text, "not enough memory") != NULL);
        if (!ok) check_sentence(&c, &e, "m.st: ");
    }
    free(file.bytes);
}

/* ---- Files and directories ---- */

#if JSON_POSIX

static char directory[512];

static void make_directory(void) {
    const char *parent = getenv("TMPDIR");
    snprintf(directory, sizeof directory, "%s/test_safetensors.XXXXXX", parent ? parent : "/tmp");
    if (!mkdtemp(directory)) {
        fprintf(stderr, "%s: cannot be made\n", directory);
        exit(2);
    }
}

/* One of a few paths at a time. */
static const char *path_of(const char *name) {
    static char paths[4][600];
    static size_t next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", directory, name);
    return path;
}

static void write_file(const char *name, const void *bytes, size_t size) {
    FILE *file = fopen(path_of(name), "wb");
    CHECK(file && fwrite(bytes, 1, size, file) == size);
    if (file) fclose(file);
}

static void write_image(const char *name, const char *header, size_t data_size) {
    image file = make_image(header, data_size);
    write_file(name, file.bytes, file.size);
    free(file.bytes);
}

static void write_index(const char *text) {
    write_file("model.safetensors.index.json", text, strlen(text));
}

static void remove_directory(void) {
    static const char *const names[] = {"model.safetensors", "model.safetensors.index.json", "1.st",
                                        "2.st", "fifo"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        remove(path_of(names[i]));
    CHECK(rmdir(directory) == 0);
}

/* The message starts with the path of `name` in the directory and goes on as given. */
static void check_not_opened(bool ok, st_checkpoint *c, const error *e, const char *name,
                             const char *rest) {
    char message[1200];
    snprintf(message, sizeof message, "%s%s: %s", directory, name, rest);
    if (ok)
        st_close(c);
    else
        check_sentence(c, e, directory);
    CHECK_MSG(!ok && strcmp(e->text, message) == 0, "gives: %s\n  wants: %s",
              ok ? "no error" : e->text, message);
}

static void check_directory(const char *name, const char *rest) {
    st_checkpoint c;
    error e;
    bool ok = st_open(&c, directory, &e);
    check_not_opened(ok, &c, &e, name, rest);
}

static void check_file(const char *name, const char *rest) {
    st_checkpoint c;
    error e;
    char with_slash[64];
    bool ok = st_open_file(&c, path_of(name), &e);
    sprintf(with_slash, "/%s", name);
    check_not_opened(ok, &c, &e, with_slash, rest);
}

static void opens_files(void) {
    st_checkpoint c;
    error e;
    image file = make_image(sample, sample_data);
    make_directory();
    write_file("1.st", file.bytes, file.size);
    bool ok = st_open_file(&c, path_of("1.st"), &e);
    CHECK_MSG(ok, "%s", e.text);
    if (ok) {
        remove(path_of("1.st")); /* what is open stays readable */
        const st_tensor *b = st_find(&c, "b");
        CHECK(memcmp(b->data, file.bytes + file.size - sample_data + 3, 16) == 0);
        CHECK(strcmp(b->file, path_of("1.st")) == 0);
        st_close(&c);
    }
    free(file.bytes);
    remove_directory();
}

#if STI_MMAP

static void unmaps_what_it_closes(void) {
    st_checkpoint c;
    error e;
    make_directory();
    write_image("1.st", sample, sample_data);
    bool ok = st_open_file(&c, path_of("1.st"), &e);
    CHECK_MSG(ok, "%s", e.text);
    if (ok) {
        void *mapped = c.files[0].owned;
        CHECK(msync(mapped, 1, MS_ASYNC) == 0);
        st_close(&c);
        CHECK(msync(mapped, 1, MS_ASYNC) != 0 && errno == ENOMEM); /* no such pages */
    }
    remove_directory();
}

/* The sentence names the limit, where the system says that there is one. */
static void check_lock_refused(const st_checkpoint *c) {
    for (int said = THE_TRUTH; said <= NOTHING; said++) {
        error e = {""};
        said_of_limits = (enum said)said;
        bool ok = st_lock(c, &e);
        said_of_limits = THE_TRUTH;
        CHECK(!ok && strstr(e.text, "/2.st: "));
        CHECK(strstr(e.text, " bytes cannot be locked in memory: "));
        CHECK_MSG(!strstr(e.text, "; the limit is ") == (said != THE_TRUTH), "%s", e.text);
    }
}

/* A file with a hole that no memory is left to map, one that loses its last page before it is to be
 * locked, and one more open file than the system allows. */
static void reports_what_the_system_says(void) {
    enum { PAGES = 1 << 16, MIB = 1 << 20 };
    st_checkpoint c;
    error e = {""};
    unsigned long pages = 0;
    long page = sysconf(_SC_PAGESIZE);
    make_directory();
    write_image("1.st", sample, sample_data);
    char full[200];
    snprintf(full, sizeof full, "cannot be opened: %s", strerror(EMFILE));
    rlim_t before = set_limit(RLIMIT_NOFILE, 0);
    check_file("1.st", full);
    set_limit(RLIMIT_NOFILE, before);

    write_image("2.st", "{\"t\":{\"dtype\":\"U8\",\"shape\":[65536],\"data_offsets\":[0,65536]}}",
                PAGES);
    bool ok = st_open_file(&c, path_of("2.st"), &e);
    CHECK_MSG(ok && truncate(path_of("2.st"), page) == 0, "%s", e.text);
    before = set_limit(RLIMIT_MEMLOCK, (rlim_t)page);
    if (ok && mlock(c.files[0].owned, c.files[0].size) == 0)
        test_skip("mlock does not lock here, as under sanitizers");
    else if (ok)
        check_lock_refused(&c);
    set_limit(RLIMIT_MEMLOCK, before);
    if (ok) st_close(&c);

    FILE *sizes = fopen("/proc/self/statm", "r");
    bool known = sizes && fscanf(sizes, "%lu", &pages) == 1; /* NOLINT(cert-err34-c) */
    if (sizes) fclose(sizes);
    known = known && truncate(path_of("2.st"), 1024L * MIB) == 0;
    if (known) {
        before = set_limit(RLIMIT_AS, (rlim_t)pages * (rlim_t)page + 64 * MIB);
        ok = st_open_file(&c, path_of("2.st"), &e);
        set_limit(RLIMIT_AS, before);
        CHECK_MSG(!ok && strstr(e.text, "/2.st: cannot be mapped: "), "%s", e.text);
        if (ok) st_close(&c);
    } else {
        test_skip("the size of this process is not known, or a file has no holes");
    }
    remove_directory();
}

/* A file with a hole takes no space. */
static void opens_tensors_beyond_4_gib(void) {
    const char *header = "{\"t\":{\"dtype\":\"F32\",\"shape\":[5,268435456],"
                         "\"data_offsets\":[0,5368709120]}}";
    st_checkpoint c;
    error e;
    make_directory();
    write_image("1.st", header, 0);
    if (sizeof(off_t) < 8 || truncate(path_of("1.st"), (off_t)(8 + strlen(header) + 5368709120))) {
        test_skip("no files beyond 4 GiB here");
    } else {
        bool ok = st_open_file(&c, path_of("1.st"), &e);
        if (sizeof(size_t) < 8) {
            CHECK(!ok && strlen(e.text) > strlen(directory));
        } else {
            CHECK_MSG(ok && st_find(&c, "t")->elements == 1342177280, "%s", e.text);
            CHECK(ok && st_find(&c, "t")->data[5368709119] == 0);
        }
        if (ok) st_close(&c);
    }
    remove_directory();
}

#else

static void unmaps_what_it_closes(void) {
    test_skip("no mapped files in this build");
}
static void reports_what_the_system_says(void) {
    test_skip("no mapped files in this build");
}
static void opens_tensors_beyond_4_gib(void) {
    test_skip("no mapped files in this build");
}

#endif

/* ---- Writing ---- */

/* Every byte that a name may have, 1 to 127, as JSON writes it: quotes, backslashes and control
 * characters. */
static void writes_what_it_reads(void) {
    char name[128] = "";
    const unsigned char bytes[3] = {7, 8, 9};
    const size_t dims[1] = {3};
    st_writer w;
    st_checkpoint c;
    error e;
    for (size_t i = 0; i < 127; i++) name[i] = (char)(i + 1);
    make_directory();
    bool ok = st_writer_open(&w, path_of("1.st"), &e) &&
              st_writer_add(&w, name, ST_U8, dims, 1, &e) && st_writer_bytes(&w, bytes, 3, &e);
    CHECK_MSG(st_writer_close(&w, ok, &e), "%s", e.text);
    ok = st_open_file(&c, path_of("1.st"), &e);
    CHECK_MSG(ok, "%s", e.text);
    const st_tensor *t = ok ? st_find(&c, name) : NULL;
    CHECK(t && t->bytes == 3 && memcmp(t->data, bytes, 3) == 0);
    if (ok) st_close(&c);
    remove_directory();
}

/* Nothing of a file is left whose data are more or fewer than was said, and what was there before
 * stays. */
static void check_unwritten(size_t n, bool zeros, const char *part) {
    static const unsigned char bytes[9] = {0};
    const size_t dims[1] = {8};
    st_writer w;
    error e = {""};
    bool ok = st_writer_open(&w, path_of("1.st"), &e) &&
              st_writer_add(&w, "t", ST_U8, dims, 1, &e) && st_writer_bytes(&w, bytes, n, &e) &&
              (!zeros || st_writer_zeros(&w, &e));
    ok = st_writer_close(&w, ok, &e);
    CHECK_MSG(!ok && strstr(e.text, "/1.st") && strstr(e.text, part), "%s", e.text);
    struct stat status;
    CHECK(stat(path_of("1.st.part"), &status) != 0);
}

static void writers_keep_their_word(void) {
    make_directory();
    write_file("1.st", "before", 6);
    check_unwritten(9, false, ": more data than the 8 bytes of its tensors");
    check_unwritten(7, false, ": expected 8 bytes of data, found 7");
    char *bytes = NULL;
    size_t length = 0;
    error e;
    CHECK(json_read_file(path_of("1.st"), 6, &bytes, &length, &e) && length == 6 &&
          memcmp(bytes, "before", 6) == 0);
    free(bytes);
    remove(path_of("1.st"));
    /* A pipe has no holes. */
    CHECK(mkfifo(path_of("1.st"), 0600) == 0);
    FILE *reader = fopen(path_of("1.st"), "r+b"); /* the other end, so that no writer waits */
    CHECK(reader != NULL);
    if (reader) check_unwritten(1, true, ": cannot be extended by 7 bytes: ");
    if (reader) fclose(reader);
    remove_directory();
}

/* What is added after data, more floats than were said, and zeros where nothing is left. */
static void writers_take_what_was_said(void) {
    static const float values[3] = {1, 2, 3};
    const size_t dims[1] = {2};
    st_writer w;
    st_checkpoint c;
    error e = {""};
    make_directory();
    bool ok = st_writer_open(&w, path_of("1.st"), &e) &&
              st_writer_add(&w, "t", ST_F32, dims, 1, &e) && st_writer_floats(&w, values, 1, &e);
    CHECK_MSG(ok, "%s", e.text);
    CHECK(!st_writer_add(&w, "late", ST_F32, dims, 1, &e));
    CHECK_MSG(strstr(e.text, "/1.st: tensor late: expected before all data, found after some"),
              "%s", e.text);
    CHECK(!st_writer_floats(&w, values, 2, &e));
    CHECK_MSG(strstr(e.text, "/1.st: more data than the 8 bytes of its tensors"), "%s", e.text);
    ok = ok && st_writer_floats(&w, values + 1, 1, &e) && st_writer_zeros(&w, &e);
    CHECK_MSG(st_writer_close(&w, ok, &e), "%s", e.text);
    ok = st_open_file(&c, path_of("1.st"), &e);
    CHECK_MSG(ok && st_count(&c) == 1, "%s", e.text);
    const st_tensor *t = ok ? st_find(&c, "t") : NULL;
    CHECK(t && t->bytes == 8 && st_load_f32(t->data) == 1 && st_load_f32(t->data + 4) == 2);
    if (ok) st_close(&c);
    remove_directory();
}

/* A device that is full at the first byte, which is one of the header: data are not asked for, and a
 * file that has none is not written either. */
static void writers_on_a_full_device(void) {
    const size_t dims[1] = {8};
    if (!test_has_full_device()) return;
    for (int data = 0; data < 2; data++) {
        st_writer w;
        error e = {""};
        bool ok = st_writer_open(&w, "/dev/full", &e) && setvbuf(w.out.file, NULL, _IONBF, 0) == 0;
        CHECK_MSG(ok, "%s", e.text);
        if (data) ok = ok && st_writer_add(&w, "t", ST_U8, dims, 1, &e) && st_writer_zeros(&w, &e);
        CHECK(ok == (data == 0) && !st_writer_close(&w, ok, &e));
        CHECK_MSG(strstr(e.text, "/dev/full: cannot write: "), "%s", e.text);
    }
}

static void outputs_fail_in_one_sentence(void) {
    static char longer[OUTPUT_PATH + 10];
    output out;
    error e = {""};
    make_directory();
    memset(longer, 'x', sizeof longer - 1);
    CHECK(!output_open(&out, longer, &e) && strstr(e.text, "xxx...: expected a shorter path"));
    longer[OUTPUT_PATH - 1] = '\0'; /* fits, but not with .part */
    CHECK(!output_open(&out, longer, &e) && strstr(e.text, "expected a shorter path"));
    /* A directory appears where the file is to be. */
    const char *path = path_of("2.st");
    CHECK(output_open(&out, path, &e) && output_bytes(&out, "x", 1, &e));
    CHECK(mkdir(path, 0700) == 0);
    CHECK(!output_close(&out, true, &e) && strstr(e.text, "/2.st: cannot rename "));
    struct stat status;
    CHECK(stat(path_of("2.st.part"), &status) != 0 && rmdir(path) == 0);
    /* What does not fit a buffer is told at the latest when it is flushed. */
    if (test_has_full_device()) {
        CHECK(symlink("/dev/full", path) == 0); /* so that a fault removes no device */
        CHECK(output_open(&out, path, &e) && output_bytes(&out, "x", 1, &e));
        CHECK(!output_flush(&out, &e) && strstr(e.text, "/2.st: cannot write: "));
        output_close(&out, false, &e);
        CHECK(output_open(&out, path, &e) && output_bytes(&out, "x", 1, &e));
        strcpy(e.text, "what went wrong before");
        CHECK(!output_close(&out, false, &e) && strcmp(e.text, "what went wrong before") == 0);
        CHECK(lstat(path, &status) == 0 && S_ISLNK(status.st_mode));
    }
    remove_directory();
}

/* A pipe stays one, and has what was written. */
static void outputs_into_pipes(void) {
    char bytes[4] = "";
    struct stat status;
    output out;
    error e;
    make_directory();
    const char *path = path_of("fifo");
    CHECK(mkfifo(path, 0600) == 0);
    int reader = open(path, O_RDWR | O_NONBLOCK); /* the other end, so that nobody waits */
    CHECK(reader >= 0 && output_open(&out, path, &e) && output_bytes(&out, "abc", 3, &e));
    CHECK(output_close(&out, true, &e) && stat(path, &status) == 0 && S_ISFIFO(status.st_mode));
    CHECK(read(reader, bytes, sizeof bytes) == 3 && memcmp(bytes, "abc", 3) == 0);
    close(reader);
    remove_directory();
}

/* More at a time than a signal handler knows of: they are written like any other. */
static void many_outputs_at_a_time(void) {
    static const char *const names[] = {"0", "1", "2", "3", "4", "5"};
    char paths[6][400];
    output outs[6];
    error e;
    make_directory();
    for (int abandoned = 0; abandoned < 2; abandoned++) {
        size_t left = 0;
        for (size_t i = 0; i < 6; i++) {
            snprintf(paths[i], sizeof paths[i], "%s", path_of(names[i]));
            CHECK(output_open(&outs[i], paths[i], &e) && output_bytes(&outs[i], names[i], 1, &e));
        }
        if (abandoned) output_abandon();
        for (size_t i = 0; i < 6; i++) {
            struct stat status;
            left += stat(outs[i].part, &status) == 0;
            CHECK(output_close(&outs[i], !abandoned, &e) == !abandoned);
            CHECK(stat(outs[i].part, &status) != 0 && (stat(paths[i], &status) == 0) == !abandoned);
            remove(paths[i]);
        }
        CHECK(left == (abandoned ? 2 : 6));
    }
    remove_directory();
}

static void opens_regular_files_only(void) {
    make_directory();
    check_file("1.st", "file not found");
    write_file("1.st", "", 0);
    check_file("1.st", "expected a header length and a header, found a file of 0 bytes");
    write_file("1.st", "1234567", 7);
    check_file("1.st", "expected a header length and a header, found a file of 7 bytes");
    CHECK(mkfifo(path_of("fifo"), 0600) == 0);
    check_file("fifo", "is not a regular file");
    st_checkpoint c;
    error e;
    bool ok = st_open_file(&c, directory, &e);
    check_not_opened(ok, &c, &e, "", "is a directory, not a file");
    remove_directory();
}

static void opens_a_directory_with_one_file(void) {
    st_checkpoint c;
    error e;
    make_directory();
    check_directory("",
                    "expected model.safetensors or model.safetensors.index.json, found neither");
    write_image("model.safetensors", sample, sample_data);
    write_index("this is not read");
    bool ok = st_open(&c, directory, &e);
    CHECK_MSG(ok, "%s", e.text);
    if (ok) {
        CHECK(st_count(&c) == 4 && st_find(&c, "a.weight") != NULL);
        st_close(&c);
    }
    /* A damaged file is not passed over in favour of an index. */
    write_image("model.safetensors", sample, sample_data - 1);
    check_directory(
        "/model.safetensors",
        "tensor a.weight_scale: data_offsets [19, 21] reach past the 20 bytes of data in "
        "the file");
    char below[640];
    snprintf(below, sizeof below, "%s/x", path_of("model.safetensors"));
    ok = st_open(&c, below, &e);
    check_not_opened(ok, &c, &e, "/model.safetensors/x", "directory not found");
    remove_directory();
    check_directory("", "directory not found");
}

static const char *const shard1 = "{\"x\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]},"
                                  "\"y\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[2,5]}}";
static const char *const shard2 = "{\"__metadata__\":{\"format\":\"pt\"},"
                                  "\"z\":{\"dtype\":\"I8\",\"shape\":[1],\"data_offsets\":[4,5]},"
                                  "\"x\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]}}";
static const char *const index_text = "{\"metadata\": {\"total_size\": 5},\n \"weight_map\": "
                                      "{\"y\": \"1.st\", \"z\": \"2.st\", \"x\": \"1.st\"}}\n";

static void make_shards(void) {
    make_directory();
    write_image("1.st", shard1, 5);
    write_image("2.st", shard2, 5);
    write_index(index_text);
}

static void opens_shards(void) {
    st_checkpoint c;
    error e;
    make_shards();
    bool ok = st_open(&c, directory, &e);
    CHECK_MSG(ok, "%s", e.text);
    if (ok) {
        CHECK(st_count(&c) == 3 && c.n_files == 2);
        CHECK(st_at(&c, 0) == st_find(&c, "y") && st_at(&c, 1) == st_find(&c, "z"));
        const st_tensor *x = st_find(&c, "x"), *z = st_find(&c, "z");
        CHECK(x->dtype == ST_U8 && x->data[0] == 1 && x->data[1] == 8); /* not that of 2.st */
        CHECK(strcmp(x->file, path_of("1.st")) == 0 && strcmp(z->file, path_of("2.st")) == 0);
        CHECK(z->dtype == ST_I8 && z->data[0] == 29);
        CHECK(st_find(&c, "") == NULL && st_find(&c, "weight_map") == NULL);
        st_close(&c);
    }
    remove_directory();
}

static void refuses_unsound_shards(void) {
    make_shards();
    remove(path_of("2.st"));
    check_directory("/2.st", "file not found");
    write_image("2.st", shard2, 4);
    check_directory("/2.st",
                    "tensor z: data_offsets [4, 5] reach past the 4 bytes of data in the file");
    write_image("2.st", shard2, 6); /* in a tensor that the index does not list, or in none */
    check_directory("/2.st", "the last 1 bytes of data belong to no tensor");
    write_image("2.st", "{}", 0);
    check_directory("/2.st", "tensor z: expected in this file by the index, not found");
    remove(path_of("2.st"));
    CHECK(mkdir(path_of("2.st"), 0700) == 0);
    check_directory("/2.st", "is a directory, not a file");
    CHECK(rmdir(path_of("2.st")) == 0);
    remove_directory();
}

static void check_index(const char *text, const char *rest) {
    write_index(text);
    check_directory("/model.safetensors.index.json", rest);
}

static void refuses_unsound_indexes(void) {
    static const char *const names[] = {"../1.st", "/etc/passwd", "a/1.st", "a\\\\1.st", "",
                                        "..",      "C:1.st",      "1..st",  "1.st/"};
    make_shards();
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        char text[256], message[256];
        sprintf(text, "{\"weight_map\":{\"x\":\"1.st\",\"z\":\"%s\"}}", names[i]);
        sprintf(message, "tensor z: expected a file in the same directory, found \"%s\"",
                strcmp(names[i], "a\\\\1.st") ? names[i] : "a\\1.st");
        check_index(text, message);
    }
    check_index("{\"weight_map\":{\"z\":\"2.st\\u0000\"}}",
                "tensor z: expected a file in the same directory, found \"2.st\"");
    check_index("{\"weight_map\":{\"z\":5}}",
                "tensor z: expected a file in the same directory, found 5");
    check_index("{\"weight_map\":{\"z\\u0000\":\"2.st\"}}", "the name of a tensor holds a NUL");
    check_index("{\"weight_map\":[]}", "weight_map: expected an object, found an array");
    check_index("{\"metadata\":{}}", "weight_map: expected an object, found nothing");
    check_index("[]", "weight_map: expected an object, found nothing");
    check_index("", "line 1, column 1: expected a value, found the end of the text");
    check_index("{\"weight_map\":{\"x\":\"1.st\",\n\"x\":\"2.st\"}}",
                "line 2, column 1: the name \"x\" occurs twice in one object");
    write_index("{\"weight_map\":{\"w\":\"1.st\"}}");
    check_directory("/1.st", "tensor w: expected in this file by the index, not found");
    write_index("{\"weight_map\":{\"__metadata__\":\"2.st\"}}");
    check_directory("/2.st", "tensor __metadata__: expected in this file by the index, not found");
    remove_directory();
}

static void survives_every_altered_byte_of_an_index(void) {
    static const char others[] = {0, ' ', '"', '\\', '1', ',', ':', '{', '}', '/', '.', 'x'};
    char text[256];
    size_t length = strlen(index_text), opened = 0;
    make_shards();
    for (size_t i = 0; i < length; i++)
        for (size_t k = 0; k < sizeof others; k++) {
            st_checkpoint c;
            error e;
            memcpy(text, index_text, length);
            text[i] = others[k];
            write_file("model.safetensors.index.json", text, length);
            if (st_open(&c, directory, &e)) {
                opened++;
                st_close(&c);
            } else {
                check_sentence(&c, &e, directory);
            }
        }
    CHECK(opened > 50);
    remove_directory();
}

static void reports_every_failed_allocation_of_shards(void) {
    st_checkpoint c;
    error e;
    make_shards();
    allocations = 0;
    CHECK(st_open(&c, directory, &e));
    st_close(&c);
    size_t needed = allocations;
    CHECK(needed > 15);
    for (size_t i = 0; i < needed; i++) {
        allocations = 0;
        allocations_allowed = i;
        bool ok = st_open(&c, directory, &e);
        allocations_allowed = SIZE_MAX;
        CHECK(!ok && strstr(e.text, "not enough memory") != NULL);
        if (!ok) check_sentence(&c, &e, directory);
    }
    remove_directory();
}

static void file_cases(void) {
    TEST(opens_files);
    TEST(unmaps_what_it_closes);
    TEST(reports_what_the_system_says);
    TEST(writes_what_it_reads);
    TEST(writers_keep_their_word);
    TEST(writers_take_what_was_said);
    TEST(writers_on_a_full_device);
    TEST(outputs_fail_in_one_sentence);
    TEST(outputs_into_pipes);
    TEST(many_outputs_at_a_time);
    TEST(opens_tensors_beyond_4_gib);
    TEST(opens_regular_files_only);
    TEST(opens_a_directory_with_one_file);
    TEST(opens_shards);
    TEST(refuses_unsound_shards);
    TEST(refuses_unsound_indexes);
    TEST(survives_every_altered_byte_of_an_index);
    TEST(reports_every_failed_allocation_of_shards);
}

#else

static void opens_directories(void) {
    test_skip("no POSIX files in this build");
}
static void file_cases(void) {
    TEST(opens_directories);
}

#endif

int main(void) {
    TEST(opens_a_file);
    TEST(knows_where_bytes_come_from);
    TEST(finds_whole_names);
    TEST(knows_every_type);
    TEST(loads_little_endian_at_any_alignment);
    TEST(writes_shapes);
    TEST(refuses_every_truncation);
    TEST(survives_every_altered_byte);
    TEST(survives_random_damage);
    TEST(refuses_tiny_files);
    TEST(refuses_wrong_header_lengths);
    TEST(refuses_headers_above_the_limit);
    TEST(refuses_headers_that_are_no_object_of_tensors);
    TEST(refuses_duplicate_names);
    TEST(refuses_wrong_types);
    TEST(refuses_wrong_shapes);
    TEST(refuses_products_that_wrap);
    TEST(refuses_wrong_offsets);
    TEST(wants_data_covered_exactly_once);
    TEST(spans_have_one_order);
    TEST(reports_on_long_names);
    TEST(opens_many_tensors_quickly);
    TEST(reports_every_failed_allocation);
    file_cases();
    return test_summary();
}
