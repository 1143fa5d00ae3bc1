/* pattern.c - an expression, a NUL and a name: any of both, and answers that do not depend on how
 * the expression is written. */
#define PATTERN_IMPLEMENTATION
#include "../../examples/pattern.h"

#include "fuzz.h"

/* Does "<before><expression><after>" match the name? -1: it is refused. */
static int matches_within(const char *before, const char *text, size_t length, const char *after,
                          const char *name) {
    pattern p;
    size_t wrong, n = strlen(before), all = n + length + strlen(after);
    char *whole = (char *)fuzz_alloc(all);
    memcpy(whole, before, n);
    if (length) memcpy(whole + n, text, length);
    memcpy(whole + n + length, after, strlen(after));
    bool ok = pattern_compile(&p, whole, all, &wrong);
    FUZZ_CHECK(ok || wrong <= all);
    free(whole);
    if (!ok) return -1;
    bool matches = pattern_matches(&p, name);
    p.needle[0] = '\0'; /* the text looked for first is a short cut and no more */
    FUZZ_CHECK(pattern_matches(&p, name) == matches);
    return matches;
}

static void fuzz_one(const uint8_t *bytes, size_t size) {
    fuzz_input in = fuzz_from(bytes, size);
    size_t length, name_length;
    const char *text = take_text(&in, &length), *rest = take_text(&in, &name_length);
    char *name = (char *)fuzz_alloc(name_length + 1);
    if (name_length) memcpy(name, rest, name_length);
    name[name_length] = '\0';
    int plain = matches_within("", text, length, "", name);
    int grouped = matches_within("(?:", text, length, ")", name);
    int either = matches_within("[^\\s\\S]|", text, length, "", name);
    if (plain >= 0 && grouped >= 0) FUZZ_CHECK(plain == grouped);
    if (plain >= 0 && either >= 0) FUZZ_CHECK(plain == either);
    free(name);
}
