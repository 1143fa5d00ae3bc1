/* test_pattern.c - pattern.h against what Python's re.match answers. */
#define PATTERN_IMPLEMENTATION
#include "../examples/pattern.h"

#include "test.h"

#include <string.h>

/* Expressions as checkpoints have them, and each construct; name; re.match is not None. */
static const struct {
    const char *text, *name;
    bool matches;
} answers[] = {
    {"re", "regular", true},
    {".*self_attn.*", "model.layers.0.self_attn.q_proj", true},
    {".*self_attn.*", "model.layers.0.mlp.up_proj", false},
    {".*mlp\\.(gate|up|gate_up|down)_proj.*", "model.layers.0.mlp.gate_up_proj", true},
    {".*mlp\\.(gate|up|gate_up|down)_proj.*", "model.layers.0.mlp.left_proj", false},
    {".*mlp\\.(gate|up|gate_up|down)_proj.*", "model.layers.0.mlpxup_proj", false},
    {".*lm_head.*", "language_model.lm_head", true},
    {"lm_head", "lm_head.weight", true},
    {"lm_head", "model.lm_head", false},
    {"lm_head$", "lm_head.weight", false},
    {"lm_head$", "lm_head", true},
    {"^lm_head$", "lm_head", true},
    {"a^b", "ab", false},
    {"", "anything", true},
    {"", "", true},
    {"a", "", false},
    {"a*", "", true},
    {"$", "", true},
    {"$", "a", false},
    {"model\\.layers\\.\\d+\\.mlp", "model.layers.12.mlp", true},
    {"model\\.layers\\.\\d+\\.mlp", "model.layers..mlp", false},
    {"layers\\.(0|1|2\\d?)\\.x", "layers.27.x", true},
    {"layers\\.(0|1|2\\d?)\\.x", "layers.17.x", false},
    {"layers\\.(?:[0-9]|1[0-5])\\.", "layers.15.", true},
    {"layers\\.(?:[0-9]|1[0-5])\\.", "layers.16.", false},
    {"[a-c]+x", "abcabcx", true},
    {"[a-c]+x", "abdx", false},
    {"[^a-c]x", "dx", true},
    {"[^a-c]x", "bx", false},
    {"[]]x", "]x", true},
    {"[a-]x", "-x", true},
    {"[\\d.]+$", "1.5", true},
    {"[\\d.]+$", "1,5", false},
    {"\\w+\\.\\W\\S\\s\\D", "a_9..b x", true},
    {"\\w+\\.\\W\\S\\s\\D", "a_9..b 7", false},
    {"a{3}$", "aaa", true},
    {"a{3}$", "aaaa", false},
    {"a{2,}$", "aaaaa", true},
    {"a{2,}$", "a", false},
    {"a{2,3}$", "aaa", true},
    {"a{2,3}$", "aaaa", false},
    {"a{0}b", "b", true},
    {"a{0}b", "ab", false},
    {"(ab|c){2}$", "cab", true},
    {"(ab|c){2}$", "ababab", false},
    {"a.c", "a\nc", false},
    {"a.c", "abc", true},
    {"a+?b*?c??$", "aabbc", true},
    {"(a*)*b", "aaab", true},
    {"(a*)*b", "aaac", false},
    {"(a|b|)c", "c", true},
    {"a|b|c|d", "d", true},
    {"a|b|c|d", "e", false},
    {"abc[x]|def", "def", true},
    {"x(abc\\))?y", "xy", true},
    {"ab?c{2}d", "accd", true},
    {"ab?c{2}d", "abccd", true},
    {"ab?c{2}d", "abcd", false},
    {"\\*\\\\\\|", "*\\|", true},
};

static void as_python_answers(void) {
    pattern p;
    size_t wrong;
    for (size_t i = 0; i < sizeof answers / sizeof *answers; i++) {
        const char *text = answers[i].text;
        CHECK_MSG(pattern_compile(&p, text, strlen(text), &wrong), "%s", text);
        CHECK_MSG(pattern_matches(&p, answers[i].name) == answers[i].matches, "%s: %s", text,
                  answers[i].name);
    }
}

/* With where they are not understood. */
static const struct {
    const char *text;
    size_t wrong;
} refused[] = {{"*a", 0},     {"a**", 2},    {"a)", 1},   {"(a", 2},       {"[a", 2},
               {"[b-a]", 4},  {"a{2,1}", 5}, {"a{x}", 2}, {"(?=a)", 2},    {"(?i)a", 2},
               {"\\1", 1},    {"\\b", 1},    {"a\\", 1},  {"(?P<n>a)", 2}, {"[[:alpha:]]", 1},
               {"a{401}", 4}, {"a]", 1},     {"a{2", 3},  {"[a-\\d]", 5}};

static void others_are_refused(void) {
    pattern p;
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        size_t wrong = 99;
        CHECK_MSG(!pattern_compile(&p, refused[i].text, strlen(refused[i].text), &wrong), "%s",
                  refused[i].text);
        CHECK_MSG(wrong == refused[i].wrong, "%s: at %zu", refused[i].text, wrong);
    }
    CHECK(!pattern_compile(&p, "a\0b", 3, &(size_t){0}));
}

/* What would take a backtracking matcher years; programs at and above their limit. */
static void none_is_slow(void) {
    pattern p;
    size_t wrong;
    char text[PATTERN_SIZE + 100], name[20001];
    strcpy(text, "(a|a)*(a|a)*(.*.*.*a?a?a?a?)*$b");
    memset(name, 'a', 20000), name[20000] = '\0';
    CHECK(pattern_compile(&p, text, strlen(text), &wrong));
    CHECK(!pattern_matches(&p, name));
    CHECK(!pattern_compile(&p, "((a{20}){20}){20}", 17, &wrong));
    memset(text, 'a', sizeof text);
    CHECK(pattern_compile(&p, text, PATTERN_SIZE, &wrong) && pattern_matches(&p, name));
    CHECK(!pattern_compile(&p, text, PATTERN_SIZE + 1, &wrong));
    memset(text, '(', sizeof text);
    CHECK(!pattern_compile(&p, text, PATTERN_SIZE, &wrong));
}

/* Of as many steps as there may be, and what is one more: a character, a set, a mark, an alternative
 * and a repetition with and without end, which take one or two steps beside what they repeat. */
static void programs_at_their_limit(void) {
    static const char *const longest[] = {"a{400}",   "a{399}b",  "a{398}$",
                                          "a{398}a?", "a{397}a*", "(a{200}|a{198})"};
    static const char *const longer[] = {"a{400}b",         "a{400}.",    "a{400}[b]", "a{400}\\d",
                                         "a{400}^",         "a{400}$",    "a{400}|b",  "a{399}|",
                                         "(a{400})?",       "a{399}a?",   "a{398}a*",  "a{399}a*",
                                         "(a{200}|a{199})", "(a{20}){21}"};
    char name[400];
    pattern p;
    size_t wrong;
    memset(name, 'a', 399), name[399] = '\0';
    for (size_t i = 0; i < sizeof longest / sizeof *longest; i++)
        CHECK_MSG(pattern_compile(&p, longest[i], strlen(longest[i]), &wrong), "%s", longest[i]);
    CHECK(pattern_matches(&p, name) && !pattern_matches(&p, name + 399 - 197));
    for (size_t i = 0; i < sizeof longer / sizeof *longer; i++) {
        wrong = 99;
        CHECK_MSG(!pattern_compile(&p, longer[i], strlen(longer[i]), &wrong), "%s", longer[i]);
        CHECK_MSG(wrong > 0 && wrong <= strlen(longer[i]), "%s: at %zu", longer[i], wrong);
    }
}

/* Bytes of any kind: neither accesses outside nor endless loops, which a sanitizer sees. */
static void any_bytes(void) {
    static const char alphabet[] = "ab.*+?{}()[]|^$\\-,019dws";
    pattern p;
    size_t wrong, understood = 0;
    for (size_t i = 0; i < 20000; i++) {
        char text[24];
        size_t n = test_random_u64() % sizeof text;
        for (size_t j = 0; j < n; j++)
            text[j] = test_random_u64() % 20 ? alphabet[test_random_u64() % (sizeof alphabet - 1)]
                                             : (char)test_random_u64();
        if (!pattern_compile(&p, text, n, &wrong)) {
            CHECK(wrong <= n);
            continue;
        }
        understood++;
        pattern_matches(&p, "ab.01-ba,sdw");
    }
    CHECK(understood > 1000);
}

int main(void) {
    TEST(as_python_answers);
    TEST(others_are_refused);
    TEST(none_is_slow);
    TEST(programs_at_their_limit);
    TEST(any_bytes);
    return test_summary();
}
