/* memory.c - what a state of fixed size remembers, by the rule that writes to it.
 *
 *     build/memory
 *     build/memory --svg memory.svg
 *
 * No model and no weights: one head of 64 key and 64 value channels, random unit keys, random values
 * of variance 1, written one after another and then read back. With key k, value v, decay a in
 * [0, 1] and state S, the rules are
 *
 *     linear attention     S = S + k v^T                         every value is piled on the others
 *     scalar gate          S = a S + k v^T                       RetNet, Mamba-2: all fades alike
 *     delta rule           S = S + k (v - S^T k)^T               DeltaNet: what k holds is replaced
 *     gated delta rule     S = a S, then the delta rule          Gated DeltaNet
 *     KDA                  S = Diag(a) S, then the delta rule    a decay for each key channel
 *
 * The first two are written out below; the last three are kda.h's operator with beta 1 and a
 * log-decay of 0, of the same number in all channels, or of a number for each.
 *
 * The error of an item is |S^T k - v| / |v| for the value v that it should have, as the root of the
 * mean square over items and trials. Reading nothing at all has error 1, so above 1 a memory is
 * worse than none; what is read could be scaled down, which brings any error to at most 1.
 *
 * 1. OVERWRITES. 16 items are written, then 8 of them, the busy ones, R times more, with new values
 *    each time; the quiet ones stay. Linear attention reads the sum of all a key ever had. A scalar
 *    gate can fade old values, and with them the quiet items. Here its decay is constant, the one in
 *    `decays` that has the least error over both, which no model could know before; a decay that
 *    comes from the token, as Mamba-2's, fades all keys alike too. The delta rule replaces. What
 *    error remains is cross-talk: 16 random keys in 64 channels are not orthogonal.
 * 2. DISTRACTORS. 8 items, then D others with keys of their own, written once. Here the delta rule
 *    is no help as long as there is room: there are 64 channels, and who writes more than they hold
 *    loses something. Its error ends at sqrt(2), that of reading some other value; that of linear
 *    attention grows on.
 * 3. TOPICS. 8 lasting items, whose keys lie in channels 32 to 63, and then T topics of 8 items
 *    whose keys lie in channels 0 to 31, keys orthogonal within a topic. When a topic begins, what
 *    gates there are close: a = 0.05. In a model the gates come from the token; here they are given,
 *    as good as the rule allows. A rule with one gate for all channels forgets the lasting items
 *    with the topics; KDA closes the channels of the topics alone. Of the topic before the one at
 *    hand nothing should be left: (S^T k) . v / |v|^2, the share of its values that is still read.
 *
 * Exit status: 0, or 1 for a file that cannot be written, or 2 for bad usage.
 */
#define KDA_IMPLEMENTATION
#include "../kda.h"
#define OUTPUT_IMPLEMENTATION
#include "output.h"

#include "arguments.h"
#include "random.h"
#include "svg.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char help[] =
    "usage: memory [options]\n"
    "\n"
    "What a state of fixed size remembers, by the rule that writes to it: tables.\n"
    "\n"
    "  --svg FILE      and the same as a picture\n"
    "  --trials N      experiments that are averaged (default 40)\n"
    "  --seed N        of keys and values (default 1)\n"
    "  --help          this text\n";

enum { DIM = 64, ITEMS = 8, MOST_TOKENS = 400, MOST_POINTS = 8, MOST_COLUMNS = 6 };
enum { GROUP = DIM / 2 }; /* channels of the topics; the rest is for what lasts */

typedef struct options {
    const char *svg;
    size_t trials;
    uint64_t seed;
    bool help;
} options;

/* ---- Rules ---- */

/* Which channels a gate closes. */
typedef enum gating { OPEN, ALL_CHANNELS, CHANNELS_OF_TOPICS } gating;

/* What is written, and then read: token by token. */
typedef struct tape {
    size_t n;
    float keys[MOST_TOKENS][DIM];   /* the queries too */
    float values[MOST_TOKENS][DIM]; /* of a reading: what should be read */
    float decays[MOST_TOKENS];      /* before the token, where a rule has a gate */
    float beta[MOST_TOKENS];        /* 1: written, 0: read */
} tape;

typedef float outputs[MOST_TOKENS][DIM]; /* what is read at each token */

static void run_sums(const tape *t, gating gates, outputs out) {
    float state[DIM][DIM]; /* [key channel][value channel] */
    memset(state, 0, sizeof state);
    for (size_t i = 0; i < t->n; i++) {
        float decay = gates == OPEN ? 1 : t->decays[i];
        memset(out[i], 0, sizeof out[i]);
        for (size_t k = 0; k < DIM; k++)
            for (size_t v = 0; v < DIM; v++) {
                state[k][v] = decay * state[k][v] + t->beta[i] * t->keys[i][k] * t->values[i][v];
                out[i][v] += t->keys[i][k] * state[k][v];
            }
    }
}

static void run_kda(const tape *t, gating gates, outputs out) {
    static float log_decays[MOST_TOKENS][DIM], state[DIM * DIM];
    static unsigned char scratch[1 << 16];
    kda_desc desc;
    kda_seq seq;
    kda_args args;
    kda_run run;
    memset(&desc, 0, sizeof desc), memset(&seq, 0, sizeof seq);
    memset(&args, 0, sizeof args), memset(&run, 0, sizeof run);
    for (size_t i = 0; i < t->n; i++)
        for (size_t k = 0; k < DIM; k++) {
            bool closed = gates == ALL_CHANNELS || (gates == CHANNELS_OF_TOPICS && k < GROUP);
            log_decays[i][k] = closed ? logf(t->decays[i]) : 0;
        }
    desc.n_heads = 1, desc.dim_k = desc.dim_v = DIM, desc.scale = 1;
    desc.gate = KDA_GATE_LOG_DECAY, desc.beta = KDA_BETA_VALUE;
    memset(state, 0, sizeof state);
    seq.n_tokens = t->n, seq.state = state;
    args.q = kda_in_f32(t->keys[0], DIM, DIM);
    args.k = args.q;
    args.v = kda_in_f32(t->values[0], DIM, DIM);
    args.g = kda_in_f32(log_decays[0], DIM, DIM);
    args.beta = kda_in_f32(t->beta, 1, 1);
    args.o = kda_out_f32(out[0], DIM, DIM);
    args.seqs = &seq, args.n_seqs = 1;
    run.scratch = scratch, run.scratch_bytes = sizeof scratch, run.n_threads = 1;
    kda_result result = kda_forward(&desc, &args, &run);
    if (result == KDA_OK) return;
    fprintf(stderr, "memory: kda_forward: %s\n", kda_result_text(result));
    exit(1);
}

typedef struct rule {
    const char *name;
    void (*run)(const tape *t, gating gates, outputs out);
    gating gates;
} rule;

enum { LINEAR, GATED, DELTA, GATED_DELTA, KDA, N_RULES };
static const rule rules[N_RULES] = {{"linear attention", run_sums, OPEN},
                                    {"scalar gate", run_sums, ALL_CHANNELS},
                                    {"delta rule", run_kda, OPEN},
                                    {"gated delta rule", run_kda, ALL_CHANNELS},
                                    {"KDA", run_kda, CHANNELS_OF_TOPICS}};

/* ---- Tapes ---- */

/* A unit vector in channels first .. last - 1, zero elsewhere. */
static void random_key(random_state *random, size_t first, size_t last, float *key) {
    double norm = 0;
    memset(key, 0, DIM * sizeof *key);
    for (size_t i = first; i < last; i++) {
        key[i] = (float)random_normal(random);
        norm += (double)key[i] * (double)key[i];
    }
    for (size_t i = first; i < last; i++) key[i] = (float)((double)key[i] / sqrt(norm));
}

/* Keys [ITEMS][DIM], orthogonal to each other (Gram and Schmidt). */
static void orthogonal_keys(random_state *random, size_t first, size_t last, float (*keys)[DIM]) {
    for (size_t n = 0; n < ITEMS; n++) {
        double norm = 0;
        random_key(random, first, last, keys[n]);
        for (size_t j = 0; j < n; j++) {
            double dot = 0;
            for (size_t i = 0; i < DIM; i++) dot += (double)keys[n][i] * (double)keys[j][i];
            for (size_t i = 0; i < DIM; i++) keys[n][i] -= (float)(dot * (double)keys[j][i]);
        }
        for (size_t i = 0; i < DIM; i++) norm += (double)keys[n][i] * (double)keys[n][i];
        for (size_t i = 0; i < DIM; i++) keys[n][i] = (float)((double)keys[n][i] / sqrt(norm));
    }
}

/* Writes a random value for a key; returns its place. */
static size_t put(tape *t, random_state *random, const float *key, double decay) {
    size_t at = t->n++;
    memcpy(t->keys[at], key, sizeof t->keys[at]);
    for (size_t i = 0; i < DIM; i++) t->values[at][i] = (float)random_normal(random);
    t->decays[at] = (float)decay;
    t->beta[at] = 1;
    return at;
}

/* Reads the key that was written at a place. */
static size_t get(tape *t, size_t written) {
    size_t at = t->n++;
    memcpy(t->keys[at], t->keys[written], sizeof t->keys[at]);
    memcpy(t->values[at], t->values[written], sizeof t->values[at]);
    t->decays[at] = 1;
    t->beta[at] = 0;
    return at;
}

/* ---- Errors ---- */

typedef struct mean {
    double sum;
    size_t n;
} mean;

static double root(mean m) {
    return sqrt(m.sum / (double)m.n);
}

/* Adds |read - value|^2 / |value|^2 of `n` readings from place `first` on. */
static void add_errors(mean *m, const tape *t, outputs out, size_t first, size_t n) {
    for (size_t at = first; at < first + n; at++) {
        double difference = 0, norm = 0;
        for (size_t i = 0; i < DIM; i++) {
            double value = (double)t->values[at][i], d = (double)out[at][i] - value;
            difference += d * d;
            norm += value * value;
        }
        m->sum += difference / norm;
        m->n++;
    }
}

/* Adds read . value / |value|^2: 1 if the value is in what is read, 0 if nothing of it is. */
static void add_shares(mean *m, const tape *t, outputs out, size_t first, size_t n) {
    for (size_t at = first; at < first + n; at++) {
        double dot = 0, norm = 0;
        for (size_t i = 0; i < DIM; i++) {
            double value = (double)t->values[at][i];
            dot += (double)out[at][i] * value;
            norm += value * value;
        }
        m->sum += dot / norm;
        m->n++;
    }
}

/* ---- Experiments ---- */

/* A column of a table: what was found of one kind of item by one rule, for each point. */
typedef struct column {
    const char *rule, *items;
    double found[MOST_POINTS];
} column;

typedef struct table {
    const char *title, *measure;
    const char *points, *axis; /* heading of the points, in the table and in the picture */
    svg_scale scale;
    double at[MOST_POINTS];
    size_t n_points, n_columns;
    column columns[MOST_COLUMNS];
} table;

/* 1. The decays that the scalar gate may choose from. */
static const double decays[] = {1, .999, .998, .995, .99, .98, .95, .9, .8, .5, 0};
enum { N_DECAYS = sizeof decays / sizeof *decays };

static void write_overwrites(tape *t, random_state *random, size_t times, double decay) {
    size_t last[2 * ITEMS];
    t->n = 0;
    for (size_t i = 0; i < 2 * ITEMS; i++) {
        float key[DIM];
        random_key(random, 0, DIM, key);
        last[i] = put(t, random, key, decay);
    }
    for (size_t r = 0; r < times; r++)
        for (size_t i = ITEMS; i < 2 * ITEMS; i++)
            last[i] = put(t, random, t->keys[last[i]], decay);
    for (size_t i = 0; i < 2 * ITEMS; i++) get(t, last[i]);
}

/* Errors of the quiet and the busy items; the same keys and values whatever the decay. */
static void overwrite(const options *o, const rule *r, size_t times, double decay, double *quiet,
                      double *busy) {
    static tape t;
    static outputs out;
    mean m[2] = {{0, 0}, {0, 0}};
    random_state random = random_seed(o->seed);
    for (size_t i = 0; i < o->trials; i++) {
        write_overwrites(&t, &random, times, decay);
        r->run(&t, r->gates, out);
        add_errors(&m[0], &t, out, t.n - 2 * ITEMS, ITEMS);
        add_errors(&m[1], &t, out, t.n - ITEMS, ITEMS);
    }
    *quiet = root(m[0]), *busy = root(m[1]);
}

static void overwrites(const options *o, table *result) {
    static const double times[] = {0, 1, 2, 4, 8, 16};
    static const int shown[] = {LINEAR, GATED, DELTA};
    result->title = "Overwrites: 8 items written once, 8 overwritten";
    result->measure = "error", result->points = "overwrites";
    result->axis = "overwrites of each busy item";
    result->n_points = sizeof times / sizeof *times, result->n_columns = 6;
    for (size_t p = 0; p < result->n_points; p++) {
        result->at[p] = times[p];
        for (size_t s = 0; s < 3; s++) {
            const rule *r = &rules[shown[s]];
            double least = HUGE_VAL;
            result->columns[2 * s].rule = result->columns[2 * s + 1].rule = r->name;
            result->columns[2 * s].items = "quiet", result->columns[2 * s + 1].items = "busy";
            for (size_t d = 0; d < (r->gates == OPEN ? 1 : N_DECAYS); d++) {
                double quiet, busy;
                overwrite(o, r, (size_t)times[p], decays[d], &quiet, &busy);
                if (quiet * quiet + busy * busy >= least) continue;
                least = quiet * quiet + busy * busy;
                result->columns[2 * s].found[p] = quiet;
                result->columns[2 * s + 1].found[p] = busy;
            }
        }
    }
}

/* 2. */
static double distract(const options *o, const rule *r, size_t distractors) {
    static tape t;
    static outputs out;
    mean m = {0, 0};
    random_state random = random_seed(o->seed);
    for (size_t i = 0; i < o->trials; i++) {
        t.n = 0;
        for (size_t j = 0; j < ITEMS + distractors; j++) {
            float key[DIM];
            random_key(&random, 0, DIM, key);
            put(&t, &random, key, 1);
        }
        for (size_t j = 0; j < ITEMS; j++) get(&t, j);
        r->run(&t, r->gates, out);
        add_errors(&m, &t, out, t.n - ITEMS, ITEMS);
    }
    return root(m);
}

static void distractors(const options *o, table *result) {
    static const double numbers[] = {0, 8, 16, 32, 64, 128, 256};
    static const int shown[] = {LINEAR, DELTA};
    result->title = "Distractors: 8 items, then others";
    result->measure = "error", result->points = "distractors";
    result->axis = "other items written after them";
    result->n_points = sizeof numbers / sizeof *numbers, result->n_columns = 2;
    for (size_t s = 0; s < 2; s++) {
        result->columns[s].rule = rules[shown[s]].name;
        result->columns[s].items = "first 8";
        for (size_t p = 0; p < result->n_points; p++) {
            result->at[p] = numbers[p];
            result->columns[s].found[p] = distract(o, &rules[shown[s]], (size_t)numbers[p]);
        }
    }
}

/* 3. Ends with ITEMS readings each: what lasts, the topic at hand, the topic before it. */
static void write_topics(tape *t, random_state *random, size_t topics) {
    float keys[ITEMS][DIM];
    t->n = 0;
    orthogonal_keys(random, GROUP, DIM, keys);
    for (size_t i = 0; i < ITEMS; i++) put(t, random, keys[i], 1);
    for (size_t topic = 0; topic < topics; topic++) {
        orthogonal_keys(random, 0, GROUP, keys);
        for (size_t i = 0; i < ITEMS; i++) put(t, random, keys[i], i == 0 && topic > 0 ? 0.05 : 1);
    }
    size_t current = t->n - ITEMS, before = current - ITEMS;
    for (size_t i = 0; i < ITEMS; i++) get(t, i);
    for (size_t i = 0; i < ITEMS; i++) get(t, current + i);
    for (size_t i = 0; i < ITEMS; i++) get(t, before + i);
}

/* Errors of the three, in that order. */
static void read_topics(const options *o, const rule *r, size_t n, double found[3]) {
    static tape t;
    static outputs out;
    mean m[3] = {{0, 0}, {0, 0}, {0, 0}};
    random_state random = random_seed(o->seed);
    for (size_t i = 0; i < o->trials; i++) {
        write_topics(&t, &random, n);
        r->run(&t, r->gates, out);
        add_errors(&m[0], &t, out, t.n - 3 * ITEMS, ITEMS);
        add_errors(&m[1], &t, out, t.n - 2 * ITEMS, ITEMS);
        add_shares(&m[2], &t, out, t.n - ITEMS, ITEMS);
    }
    found[0] = root(m[0]), found[1] = root(m[1]), found[2] = m[2].sum / (double)m[2].n;
}

static void topics(const options *o, table result[3]) {
    static const double numbers[] = {2, 4, 8, 16, 32};
    static const char *const titles[] = {"Topics: the lasting items, to be kept",
                                         "Topics: the topic at hand, to be kept",
                                         "Topics: the topic before, to be forgotten"};
    static const char *const measures[] = {"error", "error", "share of its values still read"};
    static const char *const items[] = {"lasting", "at hand", "before"};
    for (size_t kind = 0; kind < 3; kind++) {
        table *of = &result[kind];
        of->title = titles[kind], of->measure = measures[kind], of->points = "topics";
        of->axis = "topics, 8 items each", of->scale = SVG_LOG2;
        of->n_points = sizeof numbers / sizeof *numbers, of->n_columns = N_RULES;
        for (size_t r = 0; r < N_RULES; r++)
            of->columns[r].rule = rules[r].name, of->columns[r].items = items[kind];
    }
    for (size_t p = 0; p < result->n_points; p++)
        for (size_t r = 0; r < N_RULES; r++) {
            double found[3];
            read_topics(o, &rules[r], (size_t)numbers[p], found);
            for (size_t kind = 0; kind < 3; kind++) {
                result[kind].at[p] = numbers[p];
                result[kind].columns[r].found[p] = found[kind];
            }
        }
}

/* ---- Output ---- */

enum { N_TABLES = 5 };

static void print_table(const table *t) {
    printf("%s (%s)\n\n%11s", t->title, t->measure, t->points);
    for (size_t c = 0; c < t->n_columns; c++) printf("  %16s", t->columns[c].rule);
    printf("\n%11s", "");
    for (size_t c = 0; c < t->n_columns; c++) printf("  %16s", t->columns[c].items);
    for (size_t p = 0; p < t->n_points; p++) {
        printf("\n%11.0f", t->at[p]);
        for (size_t c = 0; c < t->n_columns; c++) printf("  %16.3f", t->columns[c].found[p]);
    }
    printf("\n\n");
}

static void draw_table(svg *s, const table *t, double left, double top, double width,
                       double height) {
    char names[MOST_COLUMNS][80];
    svg_line lines[MOST_COLUMNS];
    svg_chart chart;
    memset(lines, 0, sizeof lines), memset(&chart, 0, sizeof chart);
    for (size_t c = 0; c < t->n_columns; c++) {
        snprintf(names[c], sizeof names[c], "%s: %s", t->columns[c].rule, t->columns[c].items);
        lines[c].name = names[c];
        lines[c].x = t->at, lines[c].y = t->columns[c].found, lines[c].n = t->n_points;
    }
    chart.title = t->title;
    chart.x.label = t->axis, chart.x.scale = t->scale, chart.y.label = t->measure;
    chart.lines = lines, chart.n_lines = t->n_columns;
    svg_draw(s, &chart, left, top, width, height);
}

/* Two rows of charts: the first two experiments, and the third. */
static bool draw(const char *path, const table *tables, error *e) {
    enum { WIDTH = 1200, HEIGHT = 400 };
    svg s;
    if (!svg_open(&s, path, WIDTH, 2 * HEIGHT, "What a state of fixed size remembers, by rule", e))
        return false;
    for (size_t i = 0; i < 2; i++)
        draw_table(&s, &tables[i], (double)i * WIDTH / 2, 0, WIDTH / 2.0, HEIGHT);
    for (size_t i = 0; i < 3; i++)
        draw_table(&s, &tables[2 + i], (double)i * WIDTH / 3, HEIGHT, WIDTH / 3.0, HEIGHT);
    return svg_close(&s, e);
}

static bool run_all(const options *o, error *e) {
    static table tables[N_TABLES];
    overwrites(o, &tables[0]);
    distractors(o, &tables[1]);
    topics(o, &tables[2]);
    printf("One head of %d x %d numbers, written by each rule, then read. Reading nothing has "
           "error 1.\nThe comment at the start of examples/memory.c tells the experiments.\n\n",
           DIM, DIM);
    for (size_t i = 0; i < N_TABLES; i++) print_table(&tables[i]);
    if (o->svg && !draw(o->svg, tables, e)) return false;
    return output_flush_standard(e);
}

static bool parse_arguments(options *o, int argc, char **argv, error *e) {
    static const argument list[] = {
        {"--svg", ARGUMENT_TEXT, offsetof(options, svg), 0, 0, NULL},
        {"--trials", ARGUMENT_SIZE, offsetof(options, trials), 1, 1e6, NULL},
        {"--seed", ARGUMENT_SEED, offsetof(options, seed), 0, 0, NULL},
    };
    static const arguments table_of_them = {list, sizeof list / sizeof *list, "options alone", 0};
    size_t n_others = 0;
    memset(o, 0, sizeof *o);
    o->trials = 40, o->seed = 1;
    return arguments_parse(&table_of_them, o, NULL, &n_others, &o->help, argc, argv, e);
}

int main(int argc, char **argv) {
    options o;
    error e;
    if (!parse_arguments(&o, argc, argv, &e)) {
        fprintf(stderr, "memory: %s (--help tells more)\n", e.text);
        return 2;
    }
    if (o.help) return arguments_help("memory", help);
    if (run_all(&o, &e)) return 0;
    fprintf(stderr, "memory: %s\n", e.text);
    return 1;
}
