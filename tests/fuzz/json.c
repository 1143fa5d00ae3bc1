/* json.c - any bytes as JSON: what is accepted is whole, and each value can be asked anything. */
#define JSON_IMPLEMENTATION
#include "../../examples/json.h"

#include "fuzz.h"

static void check_text(const char *text, size_t length) {
    FUZZ_CHECK(text[length] == '\0');
    for (size_t at = 0, n; at < length; at += n) {
        n = json_utf8_length(text + at, length - at);
        FUZZ_CHECK(n > 0);
    }
}

static void check_numbers(const json_value *value) {
    int64_t i = 7;
    uint64_t u = 7;
    double d = 7;
    bool has_i = json_integer(value, &i), has_u = json_unsigned(value, &u);
    bool has_d = json_number(value, &d);
    FUZZ_CHECK(!has_d || (d == d && d - d == 0));
    FUZZ_CHECK(!has_i || (has_d && d == (double)i));
    FUZZ_CHECK(!has_u || (has_d && d == (double)u));
    FUZZ_CHECK(!(has_i && i >= 0) || (has_u && u == (uint64_t)i));
    FUZZ_CHECK(has_i || i == 7);
    FUZZ_CHECK(has_u || u == 7);
    FUZZ_CHECK(has_d || d == 7);
}

static void check_value(const json_value *value, int depth) {
    char shown[JSON_SHOWN];
    size_t length = 0;
    const char *text = json_string(value, &length);
    FUZZ_CHECK(depth <= JSON_DEPTH);
    FUZZ_CHECK(strlen(json_show(value, shown)) < JSON_SHOWN);
    FUZZ_CHECK((text != NULL) == (json_kind_of(value) == JSON_STRING));
    if (text) check_text(text, length);
    check_numbers(value);
    for (size_t i = 0; i < json_count(value); i++) {
        check_value(json_item(value, i), depth + 1);
        if (json_kind_of(value) != JSON_OBJECT) continue;
        const char *name = json_member_name(value, i, &length);
        check_text(name, length);
        FUZZ_CHECK(json_find(value, name, length) == i);
    }
    FUZZ_CHECK(json_item(value, json_count(value)) == NULL);
}

static void fuzz_one(const uint8_t *bytes, size_t size) {
    json document;
    error e;
    if (json_parse(&document, "t", (const char *)bytes, size, &e))
        check_value(json_root(&document), 0);
    else
        FUZZ_CHECK(document.root == NULL && strlen(e.text) > 10 && !strchr(e.text, '\n'));
    json_free(&document);
}
