/* test_sample.c - the sampler against its definition: filters one after another over all ids,
 * ranked by a sort, in float64. */
#include "../examples/draft.h"
#include "../examples/sample.h"

#include "test.h"

enum { MOST = 700 };

/* A definition's view of one id. */
typedef struct entry {
    double logit, probability; /* the latter as far as filters have come; 0: dropped */
    uint32_t id;
} entry;

static int by_rank(const void *a, const void *b) {
    const entry *x = (const entry *)a, *y = (const entry *)b;
    if (x->logit != y->logit) return x->logit > y->logit ? -1 : 1;
    return x->id < y->id ? -1 : x->id > y->id;
}

static void normalise(entry *list, size_t n) {
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += list[i].probability;
    for (size_t i = 0; i < n; i++) list[i].probability /= sum;
}

/* What is left of `logits` after each filter by itself, with probabilities that add up to 1 after
 * each. */
static void define(const sample_options *o, const float *logits, const unsigned char *seen,
                   size_t n, entry *list) {
    double before = 0;
    for (size_t i = 0; i < n; i++) {
        double l = isnan(logits[i]) ? -HUGE_VAL : (double)logits[i], r = o->repetition_penalty;
        if (seen[i]) l = (double)(float)(l > 0 ? l / r : l * r);
        list[i].logit = l, list[i].id = (uint32_t)i;
    }
    qsort(list, n, sizeof *list, by_rank);
    for (size_t i = 0; i < n; i++)
        list[i].probability = o->top_k > 0 && i >= o->top_k
                                  ? 0
                                  : exp((list[i].logit - list[0].logit) / o->temperature);
    normalise(list, n);
    for (size_t i = 0; i < n && o->top_p < 1; i++) {
        double own = list[i].probability;
        if (before >= o->top_p) list[i].probability = 0;
        before += own;
    }
    normalise(list, n);
    for (size_t i = n; i-- > 0;)
        if (list[i].probability < o->min_p * list[0].probability) list[i].probability = 0;
    normalise(list, n);
}

/* The id that a uniform number picks from the definition, and how near it is to another's. */
static uint32_t pick(const entry *list, size_t n, double uniform, double *margin) {
    double below = 0;
    size_t last = 0;
    for (size_t i = 0; i < n && list[i].probability > 0; i++) {
        double above = below + list[i].probability;
        *margin = fmin(uniform - below, above - uniform);
        if (uniform < above) return list[i].id;
        below = above, last = i;
    }
    return list[last].id;
}

static sampler open_sampler(const sample_options *o, size_t vocab) {
    sampler s;
    error e;
    if (!sampler_open(&s, o, vocab, &e)) {
        fprintf(stderr, "%s\n", e.text);
        exit(2);
    }
    return s;
}

/* A vocabulary of some size, with ties, with what was seen, and with what is no number. */
static size_t fill(float *logits, unsigned char *seen, size_t kind) {
    static const size_t sizes[] = {1, 2, 3, 17, 256, MOST};
    size_t n = sizes[test_random_u64() % 6];
    for (size_t i = 0; i < n; i++) {
        logits[i] = test_uniform_f32(-4, 4);
        if (kind % 2) logits[i] = roundf(logits[i]); /* many are equal */
        if (kind % 3 == 2 && i % 5 == 1) logits[i] = (float)NAN;
        if (kind % 3 == 2 && i % 7 == 1) logits[i] = -HUGE_VALF;
        seen[i] = test_random_u64() % 3 == 0;
    }
    return n;
}

static sample_options some_options(void) {
    static const double temperatures[] = {0.2, 1, 1.7}, top_p[] = {1, 0.9, 0.3, 1e-9};
    static const double min_p[] = {0, 0, 0.05, 0.7, 1}, penalties[] = {1, 1, 1.3, 0.8};
    static const size_t top_k[] = {0, 0, 1, 5, 40, 100000};
    sample_options o = sample_defaults();
    o.temperature = temperatures[test_random_u64() % 3];
    o.top_p = top_p[test_random_u64() % 4];
    o.min_p = min_p[test_random_u64() % 5];
    o.top_k = top_k[test_random_u64() % 6];
    o.repetition_penalty = penalties[test_random_u64() % 4];
    o.seed = test_random_u64();
    return o;
}

/* Any options, many draws: each the id that the definition gives for the generator's number. A sum
 * that only rounding takes across a bound is left out. */
static void draws_are_the_definition(void) {
    static float logits[MOST];
    static unsigned char seen[MOST], none[MOST];
    static entry list[MOST];
    size_t compared = 0;
    test_seed(3);
    for (size_t round = 0; round < 4000; round++) {
        size_t n = fill(logits, seen, round);
        sample_options o = some_options();
        sampler s = open_sampler(&o, n);
        random_state random = random_seed(o.seed);
        for (uint32_t i = 0; i < n; i++)
            if (seen[i]) sampler_read(&s, &i, 1), sampler_read(&s, &i, 1);
        define(&o, logits, o.repetition_penalty == 1 ? none : seen, n, list);
        for (size_t i = 0; i < 3; i++) {
            double margin = 0;
            uint32_t want = pick(list, n, random_uniform(&random), &margin);
            uint32_t got = sampler_next(&s, logits);
            if (margin > 1e-9) {
                compared++;
                CHECK_MSG(got == want, "round %zu: id %u, not %u", round, (unsigned)got,
                          (unsigned)want);
            }
            if (o.repetition_penalty == 1) continue;
            seen[got] = 1; /* what is drawn is in the context */
            define(&o, logits, seen, n, list);
        }
        sampler_close(&s);
    }
    CHECK_MSG(compared > 11000, "%zu", compared);
}

/* Which ids can come of four whose probabilities are .4, .3, .2 and .1. */
static unsigned possible(size_t top_k, double top_p, double min_p) {
    static const float logits[4] = {-1.6094379f, -0.9162907f, -2.3025851f, -1.2039728f};
    sample_options o = sample_defaults();
    unsigned found = 0;
    o.temperature = 1, o.top_k = top_k, o.top_p = top_p, o.min_p = min_p;
    sampler s = open_sampler(&o, 4);
    for (size_t i = 0; i < 400; i++) found |= 1u << sampler_next(&s, logits);
    sampler_close(&s);
    return found;
}

/* By rank these are the ids 1, 3, 0, 2, bits 2, 8, 1, 4. */
static void filters_by_hand(void) {
    CHECK(possible(0, 1, 0) == 15 && possible(4, 1, 0) == 15 && possible(2, 1, 0) == 10);
    CHECK(possible(0, 0.39, 0) == 2 && possible(0, 0.69, 0) == 10 && possible(0, 0.71, 0) == 11);
    CHECK(possible(0, 1, 0.24) == 15 && possible(0, 1, 0.26) == 11 && possible(0, 1, 0.76) == 2);
}

/* top-p takes its share of what top-k has kept: .4 of .7 is .571. Before top-k it would keep both.
 * And min-p drops from what top-p has kept: were it first, .4 of .9 would hold more than .42. */
static void filters_have_an_order(void) {
    CHECK(possible(2, 0.56, 0) == 2 && possible(2, 0.58, 0) == 10);
    CHECK(possible(0, 0.42, 0.3) == 10);
}

static void penalty_by_hand(void) {
    static const float logits[4] = {3, 2, -1, -1.5f};
    static const uint32_t read[3] = {0, 2, 0};
    sample_options o = sample_defaults();
    o.repetition_penalty = 2;
    sampler s = open_sampler(&o, 4);
    CHECK(sampler_next(&s, logits) == 0); /* nothing occurred before */
    CHECK(sampler_next(&s, logits) == 1); /* 1.5 against 2 */
    CHECK(sampler_next(&s, logits) == 0); /* 1.5 against 1 */
    sampler_forget(&s);
    CHECK(sampler_next(&s, logits) == 0);
    sampler_forget(&s);
    sampler_read(&s, read, 3);
    CHECK(sampler_next(&s, logits + 0) == 1);
    sampler_close(&s);
    static const float negative[3] = {-1, -1.5f, -HUGE_VALF};
    s = open_sampler(&o, 3);
    sampler_read(&s, read, 1);
    CHECK(sampler_next(&s, negative) == 1); /* -2 against -1.5 */
    sampler_close(&s);
}

static void greedy(void) {
    static const float logits[6] = {(float)NAN, -2, 5, (float)NAN, 5, -HUGE_VALF};
    static const float nothing[3] = {(float)NAN, -HUGE_VALF, (float)NAN};
    static const float infinite[3] = {1, HUGE_VALF, HUGE_VALF};
    sample_options o = sample_defaults();
    for (size_t i = 0; i < 2; i++, o.temperature = 1, o.top_k = 1) {
        sampler s = open_sampler(&o, 6);
        CHECK(sampler_next(&s, logits) == 2); /* the lower of two equals */
        sampler_close(&s);
        s = open_sampler(&o, 3);
        CHECK(sampler_next(&s, nothing) == 0 && sampler_next(&s, infinite) == 1);
        sampler_close(&s);
    }
    CHECK(sampler_bytes(&o, 1000) == 16000);
}

/* Frequencies of a large vocabulary, by the few ids that matter. */
static void frequencies(void) {
    enum { VOCAB = 163840, DRAWS = 100 };
    float *logits = test_floats(VOCAB);
    size_t count[3] = {0};
    sample_options o = sample_defaults();
    o.temperature = 1, o.top_p = 0.95;
    for (size_t i = 0; i < VOCAB; i++) logits[i] = -30;
    logits[163839] = 1.0986123f, logits[7] = 0, logits[100000] = 0; /* .6, .2, .2 */
    sampler s = open_sampler(&o, VOCAB);
    for (size_t i = 0; i < DRAWS; i++) {
        uint32_t id = sampler_next(&s, logits);
        CHECK(id == 163839 || id == 7 || id == 100000);
        count[id == 7 ? 1 : id == 100000 ? 2 : 0]++;
    }
    CHECK_AT_MOST("share", fabs((double)count[0] / DRAWS - 0.6), 0.15);
    CHECK_AT_MOST("share", fabs((double)count[1] / DRAWS - 0.2), 0.15);
    sampler_close(&s);
    free(logits);
}

/* A state whose next number is the largest there is: the generator's steps undone. */
static random_state before_the_largest(void) {
    random_state r, next;
    uint64_t inverse = 1, last, second = 0, first = 0, start = 0;
    for (int i = 0; i < 6; i++) inverse *= 2 - 0x2545F4914F6CDD1Du * inverse; /* Newton */
    last = UINT64_MAX * inverse;
    for (int i = 0; i < 3; i++) second = last ^ second >> 27;
    for (int i = 0; i < 3; i++) first = second ^ first << 25;
    for (int i = 0; i < 6; i++) start = first ^ start >> 12;
    r.bits = start, next = r;
    CHECK(random_uniform(&next) == 1 - 0x1p-53);
    return r;
}

/* It draws the last by rank, also where by rounding the sum is more than its parts one by one. */
static void the_largest_number_draws_the_last(void) {
    static float logits[MOST];
    sample_options o = sample_defaults();
    o.temperature = 1;
    test_seed(8);
    for (size_t round = 0; round < 200; round++) {
        size_t n = 2 + round * 3, last = 0;
        error e;
        sampler s;
        if (!sampler_open(&s, &o, n, &e)) exit(2);
        for (size_t i = 0; i < n; i++) logits[i] = test_uniform_f32(-2, 2);
        for (size_t i = 0; i < n; i++)
            if (logits[i] <= logits[last]) last = i;
        s.random = before_the_largest();
        uint32_t id = sampler_next(&s, logits);
        CHECK_MSG(id == last, "of %zu: %u, not %zu", n, (unsigned)id, last);
        sampler_close(&s);
    }
}

/* Of all seeds one would begin with the state that xorshift never leaves. */
static void no_seed_stands_still(void) {
    uint64_t inverse = 1;
    for (int i = 0; i < 6; i++) inverse *= 2 - 0x9E3779B97F4A7C15u * inverse; /* Newton */
    random_state r = random_seed((0 - 0xD1B54A32D192ED03u) * inverse), before = r;
    CHECK(r.bits != 0);
    for (int i = 0; i < 10; i++) random_uniform(&r);
    CHECK(r.bits != before.bits && random_uniform(&r) > 0);
}

/* Ids that no vocabulary of that size has change nothing; one that no memory holds is refused. */
static void sizes_of_vocabularies(void) {
    static const float logits[4] = {3, 2, -1, -1.5f};
    static const uint32_t others[3] = {4, 1000, UINT32_MAX};
    const size_t huge = SIZE_MAX / 2;
    sample_options o = sample_defaults();
    char expected[80];
    error e;
    o.repetition_penalty = 2;
    sampler s = open_sampler(&o, 4);
    sampler_read(&s, others, 3);
    CHECK(sampler_next(&s, logits) == 0);
    sampler_close(&s);
    CHECK(!sampler_open(&s, &o, huge, &e) && !s.candidates && !s.logits && !s.seen);
    snprintf(expected, sizeof expected, "no memory to choose from %zu tokens", huge);
    CHECK_MSG(strcmp(e.text, expected) == 0, "%s", e.text);
}

/* What followed the last time that as many as possible of the last tokens stood together: two at
 * least, sixteen at most, the latest of equals; into the repetition itself. */
static void guesses_are_what_followed(void) {
    static const struct {
        const char *text;
        size_t most;
        const char *guess;
    } cases[] = {
        {"", 9, ""},
        {"ab", 9, ""},
        {"abcab", 2, "ca"},
        {"abcab", 7, "cabcabc"},
        {"abcab", 0, ""},
        {"xbcab", 9, ""}, /* one token is not enough */
        {"aaaa", 3, "aaa"},
        {"abxabyab", 1, "y"},
        {"cabxabycab", 1, "x"}, /* three agree there */
        {"0123456789abcdef>X0123456789abcdef<Y0123456789abcdef", 2, "<Y"},
        {"A0123456789abcdef>XB0123456789abcdef<YA0123456789abcdef", 2, "<Y"}, /* 17 as 16 */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        uint32_t ids[60], proposed[10];
        char guess[11] = "";
        size_t n = strlen(cases[i].text);
        for (size_t k = 0; k < n; k++) ids[k] = (unsigned char)cases[i].text[k];
        size_t count = draft_ngram(ids, n, cases[i].most, proposed);
        for (size_t k = 0; k < count && k < 10; k++) guess[k] = (char)proposed[k];
        CHECK_MSG(strcmp(guess, cases[i].guess) == 0, "%s: \"%s\", not \"%s\"", cases[i].text,
                  guess, cases[i].guess);
    }
}

int main(void) {
    TEST(draws_are_the_definition);
    TEST(filters_by_hand);
    TEST(filters_have_an_order);
    TEST(penalty_by_hand);
    TEST(greedy);
    TEST(the_largest_number_draws_the_last);
    TEST(frequencies);
    TEST(no_seed_stands_still);
    TEST(sizes_of_vocabularies);
    TEST(guesses_are_what_followed);
    return test_summary();
}
