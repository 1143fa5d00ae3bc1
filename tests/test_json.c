/* test_json.c - the JSON reader: what it accepts, what it refuses and where, and what it costs. */
#include "test.h"

#include <time.h>

/* Allocations fail from the given one on; SIZE_MAX for never. Counts those that the reader makes.
 */
static size_t allocations, allocations_allowed = SIZE_MAX;
static void *test_malloc(size_t size) {
    return allocations++ < allocations_allowed ? malloc(size) : NULL;
}
static void *test_realloc(void *old, size_t size) {
    return allocations++ < allocations_allowed ? realloc(old, size) : NULL;
}
#define malloc test_malloc
#define realloc test_realloc
#define JSON_IMPLEMENTATION
#include "../examples/json.h"
#undef malloc
#undef realloc

#if JSON_POSIX
#include "limits.h"

#include <unistd.h>
#endif

/* A copy without a NUL, of exactly `length` bytes, so that a sanitizer sees a read past the end. */
static bool parse_bytes(json *document, const char *text, size_t length, error *e) {
    char *exact = (char *)test_alloc(length);
    memcpy(exact, text, length);
    memset(e, 0, sizeof *e);
    bool ok = json_parse(document, "t", exact, length, e);
    free(exact);
    if (!ok) {
        CHECK(document->root == NULL && document->strings == NULL && document->blocks == NULL);
        CHECK(strlen(e->text) > 10);
        CHECK(strchr(e->text, '\n') == NULL);
    }
    return ok;
}

static bool parse(json *document, const char *text, error *e) {
    return parse_bytes(document, text, strlen(text), e);
}

static void check_refused(const char *text, const char *message) {
    json document;
    error e;
    bool ok = parse(&document, text, &e);
    CHECK_MSG(!ok, "accepted: %s", text);
    if (ok)
        json_free(&document);
    else
        CHECK_MSG(strcmp(e.text, message) == 0, "%s\n  gives: %s\n  wants: %s", text, e.text,
                  message);
}

static void accepts_the_grammar(void) {
    static const char *const texts[] = {"null",
                                        "true",
                                        "false",
                                        "0",
                                        "-0",
                                        "-12.5e+3",
                                        "1E9",
                                        "\"\"",
                                        "[]",
                                        "{}",
                                        " \t\r\n[ ]\n",
                                        "[1,2 , 3]",
                                        "{\"a\":{},\"b\":[{}]}",
                                        "{ \"a\" : 1 , \"b\" : [ ] }",
                                        "[[[]],[]]",
                                        "{\"\":0}",
                                        "\"\x7f\"",
                                        "\"\\\"\\\\\\/\\b\\f\\n\\r\\t\\u00e9\"",
                                        "0.0000",
                                        "1e-0",
                                        "10"};
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        json document;
        error e;
        bool ok = parse(&document, texts[i], &e);
        CHECK_MSG(ok, "%s: %s", texts[i], e.text);
        if (ok) json_free(&document);
    }
}

static void refuses_with_a_place(void) {
    static const char *const cases[][2] = {
        {"", "t: line 1, column 1: expected a value, found the end of the text"},
        {" \n ", "t: line 2, column 2: expected a value, found the end of the text"},
        {"x", "t: line 1, column 1: expected a value, found 'x'"},
        {"1 2", "t: line 1, column 3: expected the end of the text, found '2'"},
        {"{}}", "t: line 1, column 3: expected the end of the text, found '}'"},
        {"nul", "t: line 1, column 4: expected null, found the end of the text"},
        {"trie", "t: line 1, column 3: expected true, found 'i'"},
        {"falsey", "t: line 1, column 6: expected the end of the text, found 'y'"},
        {"NaN", "t: line 1, column 1: expected a value, found 'N'"},
        {"[1,]", "t: line 1, column 4: expected a value, found ']'"},
        {"[,1]", "t: line 1, column 2: expected a value, found ','"},
        {"[1 2]", "t: line 1, column 4: expected ',' or ']', found '2'"},
        {"[1}", "t: line 1, column 3: expected ',' or ']', found '}'"},
        {"[", "t: line 1, column 2: expected a value, found the end of the text"},
        {"{\"a\":1,}", "t: line 1, column 8: expected '\"' to start a name, found '}'"},
        {"{a:1}", "t: line 1, column 2: expected '\"' to start a name, found 'a'"},
        {"{1:1}", "t: line 1, column 2: expected '\"' to start a name, found '1'"},
        {"{\"a\" 1}", "t: line 1, column 6: expected ':' after a name, found '1'"},
        {"{\"a\":}", "t: line 1, column 6: expected a value, found '}'"},
        {"{\n\"a\":1\n\"b\"", "t: line 3, column 1: expected ',' or '}', found '\"'"},
        {"// c\n1", "t: line 1, column 1: expected a value, found '/'"},
        {"'a'", "t: line 1, column 1: expected a value, found '''"},
        {"01", "t: line 1, column 2: expected the end of the text, found '1'"},
        {"-", "t: line 1, column 2: expected a digit, found the end of the text"},
        {"-a", "t: line 1, column 2: expected a digit, found 'a'"},
        {"+1", "t: line 1, column 1: expected a value, found '+'"},
        {".5", "t: line 1, column 1: expected a value, found '.'"},
        {"1.", "t: line 1, column 3: expected a digit, found the end of the text"},
        {"[1.e1]", "t: line 1, column 4: expected a digit, found 'e'"},
        {"1e", "t: line 1, column 3: expected a digit, found the end of the text"},
        {"1e+-1", "t: line 1, column 4: expected a digit, found '-'"},
        {"0x10", "t: line 1, column 2: expected the end of the text, found 'x'"},
        {"\"abc",
         "t: line 1, column 5: expected '\"' to close a string, found the end of the text"},
        {"\"a\nb\"", "t: line 1, column 3: expected control characters in a string to be escaped, "
                     "found byte 0x0a"},
        {"\"\\x\"",
         "t: line 1, column 3: expected one of \"\\/bfnrtu after a backslash, found 'x'"},
        {"\"\\",
         "t: line 1, column 3: expected one of \"\\/bfnrtu after a backslash, found the end "
         "of the text"},
        {"\"\\u12g4\"",
         "t: line 1, column 6: expected four hexadecimal digits after \\u, found 'g'"},
        {"\"\\ud800\"", "t: line 1, column 2: a high surrogate without a low one after it"},
        {"\"\\ud800\\n\"", "t: line 1, column 2: a high surrogate without a low one after it"},
        {"\"\\ud800\\u0041\"", "t: line 1, column 2: a high surrogate without a low one after it"},
        {"\"\\ud800\\ud800\"", "t: line 1, column 2: a high surrogate without a low one after it"},
        {"\"a\\udc00\"", "t: line 1, column 3: a low surrogate without a high one before it"},
        {"\"\xff\"", "t: line 1, column 2: invalid UTF-8 in a string (byte 0xff)"},
        {"\xef\xbb\xbf{}", "t: line 1, column 1: the text starts with a byte order mark"},
        {"\xc2\xa0"
         "1",
         "t: line 1, column 1: expected a value, found byte 0xc2"},
        {"[\v1]", "t: line 1, column 2: expected a value, found byte 0x0b"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        check_refused(cases[i][0], cases[i][1]);
}

static void refuses_control_characters_in_strings(void) {
    for (int c = 0; c < 0x20; c++) {
        char text[] = {'"', 'a', (char)c, '"'}, found[16];
        json document;
        error e;
        CHECK(!parse_bytes(&document, text, sizeof text, &e));
        sprintf(found, "byte 0x%02x", (unsigned)c);
        CHECK_MSG(strstr(e.text, "column 3: expected control") && strstr(e.text, found), "%s",
                  e.text);
    }
}

static void refuses_a_nul_anywhere(void) {
    static const char text[] = "{\"a\":[1,true]}";
    json document;
    error e;
    for (size_t i = 0; i < sizeof text - 1; i++) {
        char altered[sizeof text];
        memcpy(altered, text, sizeof text);
        altered[i] = '\0';
        CHECK_MSG(!parse_bytes(&document, altered, sizeof text - 1, &e), "NUL at %zu", i);
    }
    CHECK(!parse_bytes(&document, text, sizeof text, &e)); /* after the end */
}

static void limits_depth(void) {
    enum { deep = 10000 };
    char *text = (char *)test_alloc(2 * deep + 1);
    json document;
    error e;
    memset(text, '[', JSON_DEPTH);
    memset(text + JSON_DEPTH, ']', JSON_DEPTH);
    CHECK(parse_bytes(&document, text, 2 * JSON_DEPTH, &e));
    json_free(&document);
    memset(text, '[', deep);
    memset(text + deep, ']', deep);
    CHECK(!parse_bytes(&document, text, 2 * deep, &e));
    CHECK(strcmp(e.text, "t: line 1, column 65: nested deeper than 64 levels") == 0);
    CHECK(!parse_bytes(&document, text, deep, &e));
    for (size_t i = 0; i + 5 <= 2 * deep; i += 5)
        memcpy(text + i, "{\"a\":", 5);
    CHECK(!parse_bytes(&document, text, 2 * deep, &e));
    CHECK(strcmp(e.text, "t: line 1, column 321: nested deeper than 64 levels") == 0);
    /* Containers side by side are not deep. */
    for (size_t i = 0; i < deep / 3; i++)
        memcpy(text + 1 + 3 * i, "[],", 3);
    text[0] = '[';
    text[deep / 3 * 3] = ']';
    CHECK(parse_bytes(&document, text, deep / 3 * 3 + 1, &e));
    CHECK(json_count(json_root(&document)) == deep / 3);
    json_free(&document);
    free(text);
}

static const char *const sample =
    "{\"model\": \"a\\u00e9\\ud83d\\ude00\", \"layers\": [1, -2.5e3, true, null, {}],\n"
    " \"nested\": {\"x\": [[0, 1], [2]], \"y\": false}}";

static void refuses_every_truncation(void) {
    json document;
    error e;
    size_t length = strlen(sample);
    CHECK(parse(&document, sample, &e));
    json_free(&document);
    for (size_t i = 0; i < length; i++)
        CHECK_MSG(!parse_bytes(&document, sample, i, &e), "accepted the first %zu bytes", i);
}

static void survives_every_altered_byte(void) {
    size_t length = strlen(sample), accepted = 0;
    char text[256];
    for (size_t i = 0; i < length; i++)
        for (int byte = 0; byte < 256; byte++) {
            json document;
            error e;
            memcpy(text, sample, length);
            text[i] = (char)byte;
            if (!parse_bytes(&document, text, length, &e)) continue;
            json_free(&document);
            accepted++;
        }
    CHECK(accepted > length && accepted < 256 * length);
}

static void refuses_duplicate_names(void) {
    check_refused("{\"a\":1,\"b\":2,\n \"a\":3}",
                  "t: line 2, column 2: the name \"a\" occurs twice in one object");
    check_refused("{\"a\":1,\"\\u0061\":2}",
                  "t: line 1, column 8: the name \"a\" occurs twice in one object");
    check_refused("{\"\":1,\"\":2}",
                  "t: line 1, column 7: the name \"\" occurs twice in one object");
    check_refused("{\"x\\ny\":1,\"x\\ny\":2}",
                  "t: line 1, column 11: the name \"x?y\" occurs twice in one object");
    json document;
    error e;
    CHECK(parse(&document, "{\"a\":{\"a\":{\"a\":1}},\"b\":{\"a\":2}}", &e));
    json_free(&document);
}

/* An object {"name0": 0, "name1": 1, ...}; the caller frees it. */
static char *many_members(size_t count, size_t *length) {
    char *text = (char *)test_alloc(count * 40 + 3), *out = text;
    *out++ = '{';
    for (size_t i = 0; i < count; i++)
        out += sprintf(out, "%s\"name%zu\": %zu", i ? "," : "", i, i);
    *out++ = '}';
    *length = (size_t)(out - text);
    return text;
}

/* Around the sizes where objects get a hash table and where the table grows. */
static void finds_members_in_objects_of_any_size(void) {
    for (size_t count = 0; count < 140; count++) {
        size_t length;
        char *text = many_members(count, &length), name[32];
        json document;
        error e;
        CHECK(parse_bytes(&document, text, length, &e));
        const json_value *object = json_root(&document);
        CHECK(json_count(object) == count);
        for (size_t i = 0; i < count; i++) {
            uint64_t found = SIZE_MAX;
            sprintf(name, "name%zu", i);
            CHECK(json_unsigned(json_member(object, name), &found) && found == i);
            CHECK(json_find(object, name, strlen(name)) == i);
            CHECK(strcmp(json_member_name(object, i, NULL), name) == 0);
        }
        CHECK(json_member(object, "name") == NULL);
        CHECK(json_member(object, "name140") == NULL);
        CHECK(json_find(object, "", 0) == JSON_NOT_FOUND);
        json_free(&document);
        /* A repetition of any name, at the end. */
        for (size_t i = 0; i < count; i++) {
            sprintf(text + length - 1, ",\"name%zu\":0}", i);
            CHECK(!parse(&document, text, &e));
            CHECK(strstr(e.text, "occurs twice") != NULL);
        }
        free(text);
    }
}

static void compares_whole_names(void) {
    json document;
    error e;
    CHECK(parse(&document,
                "{\"weight_scale\":1,\"weight\":2,\"w\":3,\"a\\u0000b\":4,\"a\":5,\"\\u0000\":6}",
                &e));
    const json_value *object = json_root(&document);
    uint64_t n = 0;
    CHECK(json_unsigned(json_member(object, "weight"), &n) && n == 2);
    CHECK(json_unsigned(json_member(object, "weight_scale"), &n) && n == 1);
    CHECK(json_unsigned(json_member(object, "w"), &n) && n == 3);
    CHECK(json_unsigned(json_member(object, "a"), &n) && n == 5);
    CHECK(json_member(object, "weight_") == NULL && json_member(object, "") == NULL);
    CHECK(json_find(object, "a\0b", 3) == 3 && json_find(object, "a\0", 2) == JSON_NOT_FOUND);
    CHECK(json_find(object, "\0", 1) == 5);
    size_t length = 0;
    CHECK(json_member_name(object, 3, NULL) == NULL); /* would be read as "a" */
    CHECK(memcmp(json_member_name(object, 3, &length), "a\0b", 4) == 0 && length == 3);
    json_free(&document);
}

/* Past the last there is none, whatever lies behind it: here, the members of the object around it. */
static void ends_with_the_last_member(void) {
    json document;
    error e;
    size_t length = 77;
    CHECK(parse(&document, "{\"inner\":{\"a\":1},\"b\":2}", &e));
    const json_value *inner = json_member(json_root(&document), "inner");
    CHECK(strcmp(json_member_name(inner, 0, NULL), "a") == 0);
    for (size_t i = 1; i < 4; i++)
        CHECK(!json_member_name(inner, i, &length) && !json_item(inner, i) && length == 77);
    json_free(&document);
}

static void keeps_lengths_of_strings(void) {
    json document;
    error e;
    CHECK(parse(&document, "[\"ab\\u0000c\", \"ab\", \"\", 5]", &e));
    const json_value *root = json_root(&document);
    size_t length = 0;
    const char *text = json_string(json_item(root, 0), &length);
    CHECK(text && length == 4 && memcmp(text, "ab\0c", 5) == 0);
    CHECK(json_string(json_item(root, 0), NULL) == NULL);
    CHECK(!json_string_is(json_item(root, 0), "ab"));
    CHECK(json_string_is(json_item(root, 1), "ab"));
    CHECK(!json_string_is(json_item(root, 1), "a") && !json_string_is(json_item(root, 1), "abc"));
    CHECK(json_string_is(json_item(root, 2), ""));
    CHECK(json_string(json_item(root, 3), &length) == NULL && !json_string_is(root, ""));
    json_free(&document);
}

static void reads_kinds_in_order(void) {
    static const char *const names[] = {"null",     "true or false", "true or false", "a number",
                                        "a string", "an array",      "an object",     "nothing"};
    static const char *const shown[] = {"null",  "true or false", "true or false", "-1.50",
                                        "\"s\"", "an array",      "an object",     "nothing"};
    json document;
    error e;
    char text[JSON_SHOWN];
    bool value = false;
    CHECK(parse(&document, "[null, true, false, -1.50, \"s\", [1], {\"a\": 2}]", &e));
    const json_value *root = json_root(&document);
    CHECK(json_count(root) == 7);
    for (size_t i = 0; i < 8; i++) {
        CHECK(strcmp(json_kind_name(json_item(root, i)), names[i]) == 0);
        CHECK(strcmp(json_show(json_item(root, i), text), shown[i]) == 0);
    }
    CHECK(json_kind_of(json_item(root, 0)) == JSON_NULL && json_kind_of(root) == JSON_ARRAY);
    CHECK(json_boolean(json_item(root, 1), &value) && value);
    CHECK(json_boolean(json_item(root, 2), &value) && !value);
    CHECK(!json_boolean(json_item(root, 3), &value));
    CHECK(json_count(json_item(root, 4)) == 0 && json_count(json_item(root, 5)) == 1);
    CHECK(json_count(json_item(root, 6)) == 1 && json_count(json_item(root, 1)) == 0);
    json_free(&document);
}

static void treats_null_as_nothing(void) {
    int64_t i = 7;
    uint64_t u = 7;
    double d = 7;
    bool b = true;
    size_t length = 7;
    CHECK(json_kind_of(NULL) == JSON_NOTHING && json_count(NULL) == 0);
    CHECK(json_item(NULL, 0) == NULL && json_member(json_member(NULL, "a"), "b") == NULL);
    CHECK(json_member_name(NULL, 0, &length) == NULL && json_string(NULL, &length) == NULL);
    CHECK(!json_integer(NULL, &i) && !json_unsigned(NULL, &u) && !json_number(NULL, &d));
    CHECK(!json_boolean(NULL, &b) && !json_string_is(NULL, ""));
    CHECK(i == 7 && u == 7 && d > 6 && b && length == 7);
}

static void cuts_what_it_shows(void) {
    char text[300], shown[JSON_SHOWN];
    json document;
    error e;
    memset(text, 'x', sizeof text);
    text[0] = text[sizeof text - 2] = '"';
    text[sizeof text - 1] = '\0';
    CHECK(parse(&document, text, &e));
    CHECK(strlen(json_show(json_root(&document), shown)) == JSON_SHOWN - 1);
    CHECK(shown[0] == '"' && shown[JSON_SHOWN - 2] == '"');
    json_free(&document);
}

static void reads_integers_exactly(void) {
    static const struct {
        const char *text;
        bool is_signed, is_unsigned;
        int64_t i;
        uint64_t u;
    } cases[] = {{"0", true, true, 0, 0},
                 {"-0", true, true, 0, 0},
                 {"-0.0e9", true, true, 0, 0},
                 {"3", true, true, 3, 3},
                 {"-3", true, false, -3, 0},
                 {"3.0", true, true, 3, 3},
                 {"1e3", true, true, 1000, 1000},
                 {"30e-1", true, true, 3, 3},
                 {"0.0125E4", true, true, 125, 125},
                 {"1200.00e-2", true, true, 12, 12},
                 {"1.5", false, false, 0, 0},
                 {"15e-1", false, false, 0, 0},
                 {"1e-1", false, false, 0, 0},
                 {"1e400", false, false, 0, 0},
                 {"1e-400", false, false, 0, 0},
                 {"0e400", true, true, 0, 0},
                 {"1e999999999999999999999999", false, false, 0, 0},
                 {"1e-999999999999999999999999", false, false, 0, 0},
                 {"0e999999999999999999999999", true, true, 0, 0},
                 {"9007199254740993", true, true, 9007199254740993, 9007199254740993},
                 {"9223372036854775807", true, true, INT64_MAX, 9223372036854775807},
                 {"9223372036854775808", false, true, 0, 9223372036854775808u},
                 {"-9223372036854775808", true, false, INT64_MIN, 0},
                 {"-9223372036854775809", false, false, 0, 0},
                 {"18446744073709551615", false, true, 0, UINT64_MAX},
                 {"18446744073709551616", false, false, 0, 0},
                 {"18446744073709551615.5", false, false, 0, 0},
                 {"100000000000000000000", false, false, 0, 0},
                 {"100000000000000000001", false, false, 0, 0},
                 {"1e19", false, true, 0, 10000000000000000000u},
                 {"1e20", false, false, 0, 0},
                 {"\"3\"", false, false, 0, 0},
                 {"true", false, false, 0, 0}};
    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
        json document;
        error e;
        int64_t i = 77;
        uint64_t u = 77;
        CHECK(parse(&document, cases[c].text, &e));
        bool is_signed = json_integer(json_root(&document), &i);
        bool is_unsigned = json_unsigned(json_root(&document), &u);
        CHECK_MSG(is_signed == cases[c].is_signed && i == (is_signed ? cases[c].i : 77),
                  "%s as integer", cases[c].text);
        CHECK_MSG(is_unsigned == cases[c].is_unsigned && u == (is_unsigned ? cases[c].u : 77),
                  "%s as unsigned", cases[c].text);
        json_free(&document);
    }
}

static bool number_of(const char *text, double *out) {
    json document;
    error e;
    bool ok = parse(&document, text, &e);
    CHECK_MSG(ok, "%s", e.text);
    if (!ok) return false;
    ok = json_number(json_root(&document), out);
    json_free(&document);
    return ok;
}

static void check_number(const char *text, double want) {
    double got = 0;
    CHECK_MSG(number_of(text, &got) && memcmp(&got, &want, sizeof got) == 0,
              "%.60s: %.17g, not %.17g", text, got, want);
}

static void reads_numbers_to_nearest(void) {
    double got = 77;
    check_number("0", 0.0);
    check_number("-0.0", -0.0);
    check_number("0.1", 0.1);
    check_number("-12.50e+1", -125.0);
    check_number("1.7976931348623157e308", 1.7976931348623157e308);
    check_number("4.9406564584124654e-324", 4.9406564584124654e-324);
    check_number("2.2250738585072011e-308", 2.2250738585072011e-308);
    check_number("1e-400", 0.0);
    check_number("1e-10000", 0.0);
    check_number("-1e-999999999999999999999", -0.0);
    check_number("0e999999999999999999", 0.0);
    check_number("9007199254740993", 9007199254740992.0);
    check_number("9007199254740993.0000000000000000000000000000000001", 9007199254740994.0);
    CHECK(!number_of("1e400", &got) && !number_of("-1e400", &got));
    CHECK(!number_of("1.7976931348623159e308", &got));
    CHECK(!number_of("\"1\"", &got) && got > 76 && got < 78);
    for (int i = 0; i < 2000; i++) {
        char text[64];
        double want = (test_uniform() - 0.5) * pow(10, (double)(test_random_u64() % 600) - 300);
        sprintf(text, "%.17g", want);
        check_number(text, want);
        sprintf(text, "%.14f", want / pow(10, floor(log10(fabs(want)))));
        check_number(text, strtod(text, NULL));
    }
}

/* Digits far behind the point decide between two doubles; places are counted past any buffer. */
static void reads_numbers_of_thousands_of_digits(void) {
    static char text[8000];
    strcpy(text, "9007199254740993."); /* the midpoint of two doubles */
    size_t length = strlen(text);
    memset(text + length, '0', 5000);
    text[length + 5000] = '\0';
    check_number(text, 9007199254740992.0);
    text[length + 5000] = '1';
    text[length + 5001] = '\0';
    check_number(text, 9007199254740994.0);
    strcpy(text, "0."); /* 5,000 zeros after the point, then 1234.5 shifted by as many places */
    memset(text + 2, '0', 5000);
    strcpy(text + 5002, "12345e5004");
    check_number(text, 1234.5);
    strcpy(text, "12345");
    memset(text + 5, '0', 5000);
    strcpy(text + 5005, "e-5001");
    check_number(text, 1234.5);
    memset(text, '7', 7000); /* 7,000 significant digits */
    strcpy(text + 7000, "e-7000");
    check_number(text, 0.77777777777777777777777);
    uint64_t n;
    json document;
    error e;
    CHECK(parse(&document, text, &e));
    CHECK(!json_unsigned(json_root(&document), &n));
    json_free(&document);
}

static size_t encode(uint32_t code, char *out) {
    if (code < 0x80) return (size_t)sprintf(out, "%c", (int)code);
    if (code < 0x800)
        return (size_t)sprintf(out, "%c%c", (int)(0xc0 | code >> 6), (int)(0x80 | (code & 63)));
    if (code < 0x10000)
        return (size_t)sprintf(out, "%c%c%c", (int)(0xe0 | code >> 12),
                               (int)(0x80 | (code >> 6 & 63)), (int)(0x80 | (code & 63)));
    return (size_t)sprintf(out, "%c%c%c%c", (int)(0xf0 | code >> 18),
                           (int)(0x80 | (code >> 12 & 63)), (int)(0x80 | (code >> 6 & 63)),
                           (int)(0x80 | (code & 63)));
}

/* The same character as bytes and as an escape. */
static void check_character(uint32_t code) {
    char bytes[8], text[64];
    json document;
    error e;
    size_t length = encode(code, bytes), got = 0;
    if (code < 0x10000)
        sprintf(text, "[\"%s\",\"\\u%04x\"]", bytes, (unsigned)code);
    else
        sprintf(text, "[\"%s\",\"\\u%04x\\u%04X\"]", bytes,
                (unsigned)(0xd800 + ((code - 0x10000) >> 10)), (unsigned)(0xdc00 + (code & 0x3ff)));
    bool ok = parse(&document, text, &e);
    CHECK_MSG(ok, "U+%04X: %s", (unsigned)code, e.text);
    if (!ok) return;
    for (size_t i = 0; i < 2; i++) {
        const char *string = json_string(json_item(json_root(&document), i), &got);
        CHECK_MSG(got == length && memcmp(string, bytes, length) == 0, "U+%04X", (unsigned)code);
    }
    json_free(&document);
}

static void reads_every_kind_of_character(void) {
    static const uint32_t edges[] = {0x20,    0x7f,    0x80,    0x7ff,    0x800,   0xfff,   0x1000,
                                     0xcfff,  0xd7ff,  0xe000,  0xfffd,   0xffff,  0x10000, 0x1f600,
                                     0x3ffff, 0x40000, 0xfffff, 0x100000, 0x10ffff};
    for (size_t i = 0; i < sizeof edges / sizeof edges[0]; i++)
        check_character(edges[i]);
    for (uint32_t code = 0x80; code < 0x110000; code += 211)
        if (code < 0xd800 || code > 0xdfff) check_character(code);
}

static void refuses_invalid_utf8(void) {
    static const char *const bad[] = {"\x80",
                                      "\xbf",
                                      "\xc0\x80",
                                      "\xc1\xbf",
                                      "\xc2",
                                      "\xc2 ",
                                      "\xc2\xc2",
                                      "\xe0\x80\x80",
                                      "\xe0\x9f\xbf",
                                      "\xe1\x80",
                                      "\xe1\x80 ",
                                      "\xed\xa0\x80",
                                      "\xed\xbf\xbf",
                                      "\xf0\x80\x80\x80",
                                      "\xf0\x8f\xbf\xbf",
                                      "\xf1\x80\x80",
                                      "\xf1\x80\x80 ",
                                      "\xf4\x90\x80\x80",
                                      "\xf5\x80\x80\x80",
                                      "\xf8\x88\x80\x80\x80",
                                      "\xfe",
                                      "\xff"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        char text[32], message[80];
        sprintf(text, "[\"ab%s\"]", bad[i]);
        sprintf(message, "t: line 1, column 5: invalid UTF-8 in a string (byte 0x%02x)",
                (unsigned)(unsigned char)bad[i][0]);
        check_refused(text, message);
        json document;
        error e;
        CHECK(!parse_bytes(&document, text, 4 + strlen(bad[i]), &e)); /* ends inside */
    }
    CHECK(json_utf8_length("a", 0) == 0 && json_utf8_length("a", 1) == 1);
}

static void reads_a_large_object_quickly(void) {
    enum { count = 200000 };
    size_t length;
    char *text = many_members(count, &length), name[32];
    json document;
    error e;
    clock_t start = clock();
    bool ok = parse_bytes(&document, text, length, &e);
    CHECK_MSG(ok, "%s", e.text);
    for (size_t i = 0; ok && i < count; i++) {
        sprintf(name, "name%zu", i);
        CHECK(json_find(json_root(&document), name, strlen(name)) == i);
    }
    CHECK_AT_MOST("seconds", (double)(clock() - start) / CLOCKS_PER_SEC, 5.0);
    if (ok) json_free(&document);
    sprintf(text + length - 1, ",\"name7\":0}");
    CHECK(!parse(&document, text, &e));
    CHECK(strstr(e.text, "\"name7\" occurs twice") != NULL);
    free(text);
}

/* Refused by its length, before a byte of it is read. */
static void refuses_texts_of_4_gib(void) {
    json document;
    error e = {""};
    char message[100];
    sprintf(message, "t: expected less than 4294967295 bytes of JSON, found %zu", SIZE_MAX);
    CHECK(!json_parse(&document, "t", "{}", SIZE_MAX, &e) && json_root(&document) == NULL);
    CHECK_MSG(strcmp(e.text, message) == 0, "%s", e.text);
    CHECK(!json_parse(&document, "t", "{}", UINT32_MAX, &e));
    CHECK_MSG(strstr(e.text, "found 4294967295"), "%s", e.text);
}

/* Names picked by their hash so that each would be compared with all before it. */
static void refuses_names_that_collide_on_purpose(void) {
    enum { count = 600, mask = 2047 };
    char *text = (char *)test_alloc(count * 24), *out = text;
    *out++ = '{';
    for (size_t i = 0, found = 0; found < count; i++) {
        char name[24];
        size_t length = (size_t)sprintf(name, "n%zu", i);
        if ((jsoni_hash(name, length) & mask) != 0) continue;
        out += sprintf(out, "%s\"%s\":0", found++ ? "," : "", name);
    }
    *out++ = '}';
    json document;
    error e;
    CHECK(!parse_bytes(&document, text, (size_t)(out - text), &e));
    CHECK(strstr(e.text, "too many names of one object share a hash value") != NULL);
    free(text);
}

static void reports_every_failed_allocation(void) {
    size_t length, needed;
    char *text = many_members(3000, &length);
    json document;
    error e;
    allocations = 0;
    CHECK(json_parse(&document, "t", text, length, &e));
    json_free(&document);
    needed = allocations;
    CHECK(needed > 5);
    for (size_t i = 0; i < needed; i++) {
        allocations = 0;
        allocations_allowed = i;
        CHECK(!parse_bytes(&document, text, length, &e));
        CHECK(strstr(e.text, "not enough memory") != NULL);
    }
    allocations_allowed = SIZE_MAX;
    free(text);
}

static void may_be_freed_twice(void) {
    json document;
    error e;
    CHECK(parse(&document, sample, &e));
    json_free(&document);
    json_free(&document);
    CHECK(json_root(&document) == NULL);
}

#if JSON_POSIX

/* A fresh directory, and a path in it. */
static char scratch[512], path[600];
static bool make_scratch(void) {
    const char *parent = getenv("TMPDIR");
    snprintf(scratch, sizeof scratch, "%s/test_json.XXXXXX", parent ? parent : "/tmp");
    if (!mkdtemp(scratch)) return false;
    snprintf(path, sizeof path, "%s/file", scratch);
    return true;
}

static void write_file(const void *bytes, size_t size) {
    FILE *file = fopen(path, "wb");
    CHECK(file && fwrite(bytes, 1, size, file) == size);
    if (file) fclose(file);
}

static void check_read(const char *name, size_t limit, const char *message) {
    char *bytes;
    size_t length;
    error e;
    bool ok = json_read_file(name, limit, &bytes, &length, &e);
    CHECK(!ok && bytes == NULL && length == 0);
    if (!ok) CHECK_MSG(strstr(e.text, name) == e.text && strstr(e.text, message), "%s", e.text);
    free(bytes);
}

static void reads_whole_files(void) {
    static const size_t sizes[] = {0, 1, 65534, 65535, 65536, 65537, 300000};
    char *content = (char *)test_alloc(300000), *bytes;
    size_t length;
    error e;
    CHECK(make_scratch());
    for (size_t i = 0; i < 300000; i++)
        content[i] = (char)test_random_u64();
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        write_file(content, sizes[i]);
        for (int exact = 0; exact < 2; exact++) {
            bool ok = json_read_file(path, exact ? sizes[i] : SIZE_MAX, &bytes, &length, &e);
            CHECK_MSG(ok, "%s", e.text);
            if (!ok) continue;
            CHECK(length == sizes[i] && memcmp(bytes, content, length) == 0 && bytes[length] == 0);
            free(bytes);
        }
        if (sizes[i]) check_read(path, sizes[i] - 1, "larger than the");
    }
    remove(path);
    check_read(path, SIZE_MAX, "file not found");
    rmdir(scratch);
    free(content);
}

static void reads_regular_files_only(void) {
    char below[700];
    CHECK(make_scratch());
    check_read(scratch, SIZE_MAX, "is a directory");
    CHECK(mkfifo(path, 0600) == 0);
    check_read(path, SIZE_MAX, "is not a regular file"); /* and does not wait for a writer */
    snprintf(below, sizeof below, "%s/x", path);
    check_read(below, SIZE_MAX, "file not found");
    check_read("", SIZE_MAX, "file not found");
    remove(path);
    rmdir(scratch);
}

/* As many files are open as the system allows; one opens, and then cannot be read: nothing is at
 * address 0 of a process. */
static void reports_what_the_system_says(void) {
    CHECK(make_scratch());
    write_file(sample, strlen(sample));
    rlim_t before = set_limit(RLIMIT_NOFILE, 0);
    check_read(path, SIZE_MAX, "cannot be opened: ");
    set_limit(RLIMIT_NOFILE, before);
    remove(path);
    rmdir(scratch);
    FILE *memory = fopen("/proc/self/mem", "rb");
    if (!memory) {
        test_skip("no /proc/self/mem here");
        return;
    }
    fclose(memory);
    check_read("/proc/self/mem", SIZE_MAX, "cannot be read: ");
}

static void reports_memory_that_a_file_lacks(void) {
    CHECK(make_scratch());
    write_file(sample, strlen(sample));
    allocations = allocations_allowed = 0;
    check_read(path, SIZE_MAX, "not enough memory");
    allocations_allowed = SIZE_MAX;
    remove(path);
    rmdir(scratch);
}

#else

static void reads_whole_files(void) {
    test_skip("no POSIX files in this build");
}
static void reads_regular_files_only(void) {
    test_skip("no POSIX files in this build");
}
static void reports_what_the_system_says(void) {
    test_skip("no POSIX files in this build");
}
static void reports_memory_that_a_file_lacks(void) {
    test_skip("no POSIX files in this build");
}

#endif

int main(void) {
    TEST(accepts_the_grammar);
    TEST(refuses_with_a_place);
    TEST(refuses_control_characters_in_strings);
    TEST(refuses_a_nul_anywhere);
    TEST(limits_depth);
    TEST(refuses_every_truncation);
    TEST(survives_every_altered_byte);
    TEST(refuses_duplicate_names);
    TEST(finds_members_in_objects_of_any_size);
    TEST(compares_whole_names);
    TEST(ends_with_the_last_member);
    TEST(keeps_lengths_of_strings);
    TEST(reads_kinds_in_order);
    TEST(treats_null_as_nothing);
    TEST(cuts_what_it_shows);
    TEST(reads_integers_exactly);
    TEST(reads_numbers_to_nearest);
    TEST(reads_numbers_of_thousands_of_digits);
    TEST(reads_every_kind_of_character);
    TEST(refuses_invalid_utf8);
    TEST(reads_a_large_object_quickly);
    TEST(refuses_texts_of_4_gib);
    TEST(refuses_names_that_collide_on_purpose);
    TEST(reports_every_failed_allocation);
    TEST(may_be_freed_twice);
    TEST(reads_whole_files);
    TEST(reads_regular_files_only);
    TEST(reports_what_the_system_says);
    TEST(reports_memory_that_a_file_lacks);
    return test_summary();
}
