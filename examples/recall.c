/* recall.c - "what was the value of this key?": accuracy of models against the number of pairs, and
 * the memory they need for it.
 *
 *     build/recall
 *     build/recall MODEL_DIR MODEL_DIR --pairs 64 --queries 20000 --seed 7
 *
 * A sequence of N pairs, as examples/train/recall.py makes them, whose models this is for:
 *
 *     k1 v1 k2 v2 ... kN vN SEPARATOR k v k v ...
 *
 * Keys are distinct; behind the separator each comes once, in random order, followed by its value.
 * An answer is the most likely of all tokens when the model has read the key. Every model gets the
 * same sequences. Chance is what a model can do that tells keys from values and forgets which
 * belong together: it answers with the value of any pair not yet asked for, which is the right pair
 * with probability h = (1 + 1/2 + ... + 1/N) / N, and otherwise one whose value, drawn from 128, is
 * the same with probability 1/128: h + (1 - h) / 128.
 *
 * Exit status: 0, or 1 for bad input, or 2 for bad usage, with one line on stderr.
 */
#include "evaluate.h"

#include "arguments.h"
#include "output.h"
#include "random.h"
#include "signals.h"

#include <stdio.h>
#include <stdlib.h>

static const char help[] =
    "usage: recall [MODEL_DIR ...] [options]\n"
    "\n"
    "Without a MODEL_DIR: examples/models/recall-hybrid and examples/models/recall-kda.\n"
    "\n"
    "  --pairs N       this number of pairs alone, 1 to 382 (default: 8, 16, 32, 64, 128,\n"
    "                  256 and 381)\n"
    "  --queries N     questions for each number of pairs, or a few more (default 4096)\n"
    "  --seed N        of the sequences (default 1)\n"
    "  --threads N     at least 1 (default: one a processor, at most 32)\n"
    "  --help          this text\n"
    "\n"
    "Exit status: 1 for bad input, 2 for bad usage.\n";

enum { SEPARATOR = 1, FIRST_VALUE = 2, N_VALUES = 128, FIRST_KEY = 130, VOCABULARY = 512 };
enum { N_KEYS = VOCABULARY - FIRST_KEY };
enum { MOST_TOKENS = 4 * N_KEYS + 1, MOST_MODELS = 8, N_COUNTS = 7 };
static const size_t all_counts[N_COUNTS] = {8, 16, 32, 64, 128, 256, 381};

typedef struct options {
    const char *models[MOST_MODELS];
    size_t n_models, pairs, queries, threads;
    uint64_t seed;
    bool help;
} options;

static const argument argument_list[] = {
    {"--pairs", ARGUMENT_SIZE, offsetof(options, pairs), 1, N_KEYS, NULL},
    {"--queries", ARGUMENT_SIZE, offsetof(options, queries), 1, 1e9, NULL},
    {"--seed", ARGUMENT_SEED, offsetof(options, seed), 0, 0, NULL},
    {"--threads", ARGUMENT_SIZE, offsetof(options, threads), 1, PARALLEL_MAX_THREADS, NULL},
};
static const arguments argument_table = {argument_list,
                                         sizeof argument_list / sizeof *argument_list,
                                         "8 of MODEL_DIR at most", MOST_MODELS};

static bool parse_arguments(options *o, int argc, char **argv, error *e) {
    memset(o, 0, sizeof *o);
    o->queries = 4096, o->seed = 1, o->threads = parallel_default();
    if (!arguments_parse(&argument_table, o, o->models, &o->n_models, &o->help, argc, argv, e))
        return false;
    if (o->n_models == 0) {
        o->models[o->n_models++] = "examples/models/recall-hybrid";
        o->models[o->n_models++] = "examples/models/recall-kda";
    }
    return true;
}

/* ---- Sequences ---- */

/* The first n of `items` become a random choice of all of them, in random order. */
static void shuffle(random_state *random, uint32_t *items, size_t of, size_t n) {
    for (size_t i = 0; i < n; i++) {
        size_t j = i + random_below(random, of - i);
        uint32_t item = items[i];
        items[i] = items[j];
        items[j] = item;
    }
}

/* Writes a sequence of 4 * pairs + 1 ids. */
static void make_sequence(random_state *random, size_t pairs, uint32_t *ids) {
    uint32_t keys[N_KEYS], order[N_KEYS];
    uint32_t *questions = ids + 2 * pairs + 1;
    for (uint32_t i = 0; i < N_KEYS; i++) keys[i] = FIRST_KEY + i, order[i] = i;
    shuffle(random, keys, N_KEYS, pairs);
    shuffle(random, order, pairs, pairs);
    for (size_t i = 0; i < pairs; i++) {
        ids[2 * i] = keys[i];
        ids[2 * i + 1] = FIRST_VALUE + (uint32_t)random_below(random, N_VALUES);
    }
    ids[2 * pairs] = SEPARATOR;
    for (size_t i = 0; i < pairs; i++)
        memcpy(questions + 2 * i, ids + 2 * order[i], 2 * sizeof *ids);
}

static double chance(size_t pairs) {
    double sum = 0;
    for (size_t i = 1; i <= pairs; i++) sum += 1 / (double)i;
    double pair = sum / (double)pairs;
    return pair + (1 - pair) / N_VALUES;
}

/* ---- Models ---- */

typedef struct result {
    double accuracy[N_COUNTS];
    hybrid_sizes sizes[N_COUNTS]; /* after the last token */
} result;

/* Questions of one sequence that are answered rightly; logits: [2 * pairs][VOCABULARY]. */
static bool ask(evaluator *m, const uint32_t *ids, size_t pairs, float *logits, size_t *right,
                error *e) {
    size_t start = 2 * pairs + 1, n = 2 * pairs;
    if (!evaluator_reset(m, e) || !evaluator_read(m, ids, start, NULL, e) ||
        !evaluator_read(m, ids + start, n, logits, e))
        return false;
    for (size_t t = 0; t < n; t += 2) {
        const float *row = logits + t * VOCABULARY;
        size_t best = 0;
        for (size_t i = 1; i < VOCABULARY; i++)
            if (row[i] > row[best]) best = i;
        *right += best == ids[start + t + 1];
    }
    return true;
}

/* Asks a model `queries` questions or a few more, about sequences of that many pairs. */
static bool accuracy(evaluator *m, const options *o, size_t pairs, float *logits, double *share,
                     error *e) {
    uint32_t ids[MOST_TOKENS];
    random_state random = random_seed(o->seed * 1000 + pairs);
    size_t right = 0, asked = 0;
    for (; asked < o->queries; asked += pairs) {
        make_sequence(&random, pairs, ids);
        if (!ask(m, ids, pairs, logits, &right, e)) return false;
    }
    *share = (double)right / (double)asked;
    return true;
}

static bool run_model(const options *o, const char *directory, const size_t *counts,
                      size_t n_counts, result *found, error *e) {
    evaluator m;
    memset(&m, 0, sizeof m);
    signals_watch(&m.model.checkpoint);
    if (!evaluator_open(&m, directory, MOST_TOKENS, o->threads, e)) return false;
    size_t vocab = m.model.config.vocab_size;
    float *logits = (float *)malloc(2 * N_KEYS * VOCABULARY * sizeof *logits);
    bool ok = logits != NULL || error_set(e, "no memory for logits");
    if (vocab != VOCABULARY)
        ok = error_set(e,
                       "%s: expected vocab_size %d (padding, separator, %d values, %d keys), found "
                       "%zu",
                       directory, VOCABULARY, N_VALUES, N_KEYS, vocab);
    for (size_t i = 0; i < n_counts && ok; i++) {
        ok = accuracy(&m, o, counts[i], logits, &found->accuracy[i], e);
        found->sizes[i] = hybrid_memory_sizes(&m.model, 4 * counts[i] + 1, LINEAR_F32);
    }
    free(logits);
    signals_watch(NULL);
    evaluator_close(&m);
    return ok;
}

/* ---- Tables ---- */

enum { NAME = 41 };

/* The last part of a path, as much of it as a table has room for, in name [NAME]. */
static const char *name_of(const char *directory, char *name) {
    const char *last = directory;
    for (const char *c = directory; *c; c++)
        if (*c == '/' && c[1] && c[1] != '/') last = c + 1;
    snprintf(name, NAME, "%.*s", (int)strcspn(last, "/"), last);
    return name;
}

static void print_accuracy(const options *o, const size_t *counts, size_t n_counts,
                           const result *found) {
    char name[NAME];
    printf("Accuracy, %zu questions or a few more for each number of pairs, seed %llu:\n\n",
           o->queries, (unsigned long long)o->seed);
    printf("pairs  tokens  chance");
    for (size_t m = 0; m < o->n_models; m++) printf("  %15s", name_of(o->models[m], name));
    for (size_t i = 0; i < n_counts; i++) {
        printf("\n%5zu  %6zu  %6.3f", counts[i], 4 * counts[i] + 1, chance(counts[i]));
        for (size_t m = 0; m < o->n_models; m++) printf("  %15.4f", found[m].accuracy[i]);
    }
    printf("\n");
}

static void print_memory(const options *o, const size_t *counts, size_t n_counts,
                         const result *found) {
    char name[NAME];
    printf("\nBytes of memory after these tokens: KDA states and convolution windows, which do not "
           "grow,\nand the latent cache of full attention; last, that cache if every layer of %s "
           "were\nfull attention:\n\npairs  tokens",
           name_of(o->models[0], name));
    for (size_t m = 0; m < o->n_models; m++) printf("  %15s", name_of(o->models[m], name));
    printf("  %15s", "full attention");
    for (size_t i = 0; i < n_counts; i++) {
        printf("\n%5zu  %6zu", counts[i], 4 * counts[i] + 1);
        for (size_t m = 0; m < o->n_models; m++) {
            const hybrid_sizes *s = &found[m].sizes[i];
            printf("  %15.0f", s->states + s->windows + s->latents);
        }
        printf("  %15.0f", found[0].sizes[i].full_attention);
    }
    printf("\n\nAll of this is said of these models, at their size and training budget.\n");
}

int main(int argc, char **argv) {
    options o;
    error e;
    result found[MOST_MODELS];
    if (!parse_arguments(&o, argc, argv, &e)) {
        fprintf(stderr, "recall: %s (--help tells more)\n", e.text);
        return 2;
    }
    if (o.help) return arguments_help("recall", help);
    const size_t *counts = o.pairs ? &o.pairs : all_counts;
    size_t n_counts = o.pairs ? 1 : N_COUNTS;
    bool ok = true;
    signals_catch("recall");
    for (size_t m = 0; m < o.n_models && ok; m++)
        ok = run_model(&o, o.models[m], counts, n_counts, &found[m], &e);
    if (ok) {
        print_accuracy(&o, counts, n_counts, found);
        print_memory(&o, counts, n_counts, found);
        ok = output_flush_standard(&e);
    }
    if (!ok) fprintf(stderr, "recall: %s\n", e.text);
    return ok ? 0 : 1;
}
