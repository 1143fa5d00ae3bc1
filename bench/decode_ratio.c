/* decode_ratio.c - a generated token of full attention in every layer against one of the hybrid, by
 * context: time, memory, and why a ratio is what it is.
 *
 *     decode_ratio [--quick] [--shape 48b|k3-slice|toy] [--contexts 4K,1M] [--svg FILE]
 *                  [--roofline] ...
 *
 * Both stacks run the same kernels (stack.h). See README.md for how to read the tables.
 */
#include "bench.h"

#include "../examples/mla.h"
#include "../examples/svg.h"

#include "stack.h"

enum { MAX_CONTEXTS = 32, WEIGHT_TYPES = 3, MAX_REPEATED = 64, MAX_MEASURED_BATCH = 64 };

static const double gib = 1073741824.0;

static const struct weight_type {
    const char *name;
    double bytes; /* of a weight */
} weight_types[WEIGHT_TYPES] = {{"bf16", 2}, {"int8", 1}, {"int4", 0.5}};

/* What was found at one context. Times in ns, of a step unless said. */
typedef struct point {
    size_t context;
    int composed; /* 1: of one layer of each kind, multiplied */
    double full, hybrid, ratio;
    double full_layer, kda_layer; /* of one layer, of one sequence's step */
    double full_bytes, hybrid_bytes;
    double full_share, hybrid_share; /* of the roofline */
    double error, bound;
    roofline_machine machine; /* its limits, as measured in the same rounds */
    /* The largest batches in the budget. */
    double full_batch, hybrid_batch;
    double full_in_batch, kda_in_batch; /* of one layer, of one sequence, in a batch */
    size_t measured_batch;              /* of sequences that full_in_batch was measured with */
    /* Whole layers, where their weights are held. */
    double whole_full, whole_hybrid;
} point;

typedef struct suite {
    bench b;
    roofline_shape shape;
    linear_type cache;
    kda_type state;
    size_t contexts[MAX_CONTEXTS], n_contexts;
    size_t batch;
    double memory; /* bytes that whole stacks may take */
    double most;   /* and anything at all: 0.9 of what is free */
    double budget; /* bytes of the equal-memory view */
    const char *svg_name;
    int roofline, bf16_dots;
    roofline_machine given; /* bandwidth 0: none */
    parallel pool;
    kda_isa isa;
    size_t cache_level; /* bytes of the last level */
    point points[MAX_CONTEXTS];
    size_t n_points;
    double crossover; /* tokens; 0: not found */
} suite;

static suite *suite_of(bench *b) {
    return (suite *)b->suite;
}

static double state_element(const suite *s) {
    return s->state == KDA_F32 ? 4 : 2;
}

static roofline_model model_of(const suite *s, int hybrid, double weight) {
    roofline_model m = {&s->shape, hybrid, (double)stack_element_bytes(s->cache), state_element(s),
                        weight};
    return m;
}

/* 4096 as 4K; what is no whole number of K as it is. */
static const char *context_text(double context, char text[32]) {
    double k = context / 1024;
    if (k < 1 || floor(k) < k)
        snprintf(text, 32, "%.0f", context);
    else if (k < 1024 || floor(k / 1024) < k / 1024)
        snprintf(text, 32, "%.0fK", k);
    else
        snprintf(text, 32, "%.0fM", k / 1024);
    return text;
}

/* ==== Options ================================================================================== */

static const char option_help[] =
    "  --shape NAME       48b (default), k3-slice, toy; the options below change one number of "
    "it:\n"
    "    --layers --full --heads --dim --latent --rope N\n"
    "  --contexts LIST    tokens, as 4K,64K,1M (default 4K,16K,64K,128K,256K,512K,1M)\n"
    "  --batch N          sequences of the equal-batch view (1)\n"
    "  --cache TYPE       of latent caches: bf16 (default), f16, f32\n"
    "  --state TYPE       of KDA states: f32 (default), f16\n"
    "  --bf16-dots        full attention in products of bf16, where the processor has them\n"
    "  --memory GIB       for caches that are measured; larger stacks are composed of one layer "
    "of\n"
    "                     each kind (three quarters of what is free, quick runs: 1)\n"
    "  --budget GIB       of the equal-memory view, for caches and states (this machine's memory)\n"
    "  --svg FILE         draw ratio and memory against context\n"
    "  --roofline         the cost model: this machine, and the published figures\n"
    "  --machine A,B,C,D  for the cost model: GB/s, GB, GFLOP/s, ms of a step that nothing "
    "shortens\n";

/* A number of at least `least`, all of the text but for what `end` is set to. */
static double parse_number(bench *b, const char *text, double least, const char **end) {
    char *after;
    double x = strtod(text, &after);
    if (after == text || !(x >= least) || !(x <= 1e15)) bench_usage_error(b, "not a number:", text);
    *end = after;
    return x;
}

/* The whole text as a number from `least` on. */
static double parse_all(bench *b, const char *text, double least) {
    const char *end;
    double x = parse_number(b, text, least, &end);
    if (*end) bench_usage_error(b, "not a number:", text);
    return x;
}

static size_t parse_count(bench *b, const char *text, double most) {
    double x = parse_all(b, text, 1);
    if (floor(x) < x || x > most) bench_usage_error(b, "not a number for this option:", text);
    return (size_t)x;
}

static void parse_contexts(bench *b, const char *text) {
    suite *s = suite_of(b);
    const char *at = text;
    for (s->n_contexts = 0; s->n_contexts < MAX_CONTEXTS; at++) {
        double x = parse_number(b, at, 1, &at);
        if (*at == 'K' || *at == 'k') x *= 1024, at++;
        if (*at == 'M' || *at == 'm') x *= 1048576, at++;
        if (floor(x) < x || x > 0x1p30) break;
        s->contexts[s->n_contexts++] = (size_t)x;
        if (*at == 0) return;
        if (*at != ',') break;
    }
    bench_usage_error(b, "not a list of contexts:", text);
}

static void parse_machine(bench *b, const char *text) {
    suite *s = suite_of(b);
    static const double unit[4] = {1e9, 1e9, 1e9, 1e-3};
    double *number[4] = {&s->given.bandwidth, &s->given.memory, &s->given.peak, &s->given.fixed};
    const char *at = text;
    for (int i = 0; i < 4; i++, at++) {
        *number[i] = parse_number(b, at, i < 3 ? 1e-3 : 0, &at) * unit[i];
        if (*at != (i < 3 ? ',' : 0)) bench_usage_error(b, "not four numbers:", text);
    }
    s->roofline = 1;
}

static void parse_shape(bench *b, const char *text) {
    static const roofline_shape *const presets[] = {&roofline_48b, &roofline_k3_slice,
                                                    &roofline_toy};
    for (size_t i = 0; i < 3; i++)
        if (strcmp(presets[i]->name, text) == 0) {
            suite_of(b)->shape = *presets[i];
            return;
        }
    bench_usage_error(b, "not a shape:", text);
}

static void parse_types(bench *b, const char *option, const char *text) {
    suite *s = suite_of(b);
    int f32 = strcmp(text, "f32") == 0, f16 = strcmp(text, "f16") == 0;
    int cache = strcmp(option, "--cache") == 0;
    if (!f32 && !f16 && !(cache && strcmp(text, "bf16") == 0))
        bench_usage_error(b, "not a type for this option:", text);
    if (cache) s->cache = f32 ? LINEAR_F32 : f16 ? LINEAR_F16 : LINEAR_BF16;
    if (!cache) s->state = f32 ? KDA_F32 : KDA_F16;
}

/* bench.option: words used. */
static int parse_option(bench *b, const char *option, const char *value) {
    suite *s = suite_of(b);
    const struct {
        const char *name;
        size_t *number;
        double most;
    } numbers[] = {{"--layers", &s->shape.layers, 1024}, {"--full", &s->shape.full, 1024},
                   {"--heads", &s->shape.heads, 1024},   {"--dim", &s->shape.dim, 1024},
                   {"--latent", &s->shape.latent, 8192}, {"--rope", &s->shape.rope, 1024},
                   {"--batch", &s->batch, 4096}};
    static const char *const others[] = {"--shape",  "--contexts", "--cache", "--state",
                                         "--memory", "--budget",   "--svg",   "--machine"};
    int roofline = strcmp(option, "--roofline") == 0, dots = strcmp(option, "--bf16-dots") == 0;
    s->roofline |= roofline, s->bf16_dots |= dots;
    if (roofline || dots) return 1;
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (strcmp(option, numbers[i].name) == 0) {
            if (!value) bench_usage_error(b, "no value after", option);
            *numbers[i].number = parse_count(b, value, numbers[i].most);
            if (numbers[i].number != &s->batch) s->shape.name = "own";
            return 2;
        }
    size_t which = 0, n = sizeof others / sizeof *others;
    while (which < n && strcmp(option, others[which]) != 0) which++;
    if (which == n) return 0;
    if (!value) bench_usage_error(b, "no value after", option);
    if (which == 0) parse_shape(b, value);
    if (which == 1) parse_contexts(b, value);
    if (which == 2 || which == 3) parse_types(b, option, value);
    if (which == 4) s->memory = parse_all(b, value, 1e-3) * gib;
    if (which == 5) s->budget = parse_all(b, value, 1e-3) * gib;
    if (which == 6) s->svg_name = value;
    if (which == 7) parse_machine(b, value);
    return 2;
}

/* A line of /proc/meminfo in bytes; 0 where there is none. */
static double system_memory(const char *name) {
    char line[128];
    double kib = 0;
    FILE *f = fopen("/proc/meminfo", "r");
    while (f && fgets(line, sizeof line, f))
        if (strncmp(line, name, strlen(name)) == 0) kib = strtod(line + strlen(name), NULL);
    if (f) fclose(f);
    return kib * 1024;
}

static size_t last_level_cache(void) {
    long bytes = 0;
#ifdef _SC_LEVEL3_CACHE_SIZE
    bytes = sysconf(_SC_LEVEL3_CACHE_SIZE);
#endif
    return bytes > 0 ? (size_t)bytes : (size_t)32 << 20;
}

/* What was not given. */
static void choose_defaults(suite *s) {
    static const size_t contexts[] = {4096, 16384, 65536, 131072, 262144, 524288, 1048576};
    double total = system_memory("MemTotal:"), free_now = system_memory("MemAvailable:");
    if (!(total > 0)) total = 8 * gib, free_now = 4 * gib;
    for (size_t i = 0; s->n_contexts == 0 && i < 7; i++) s->contexts[i] = contexts[i];
    if (s->n_contexts == 0) s->n_contexts = 7;
    s->most = free_now * 0.9;
    if (s->memory > s->most) bench_usage_error(&s->b, "--memory:", "more than is free");
    if (!(s->memory > 0)) s->memory = s->b.quick ? fmin(gib, s->most / 2) : free_now * 0.75;
    if (!(s->budget > 0)) s->budget = total;
    if (s->shape.full > s->shape.layers) bench_usage_error(&s->b, "--full:", "more than layers");
    s->cache_level = last_level_cache();
    output picture; /* whether there can be one: better now than after minutes */
    error e;
    if (s->svg_name && !output_open(&picture, s->svg_name, &e))
        bench_usage_error(&s->b, "cannot write", s->svg_name);
    if (s->svg_name) output_close(&picture, false, &e);
}

/* ==== Measuring ================================================================================ */

/* What is timed of a stack: a step, or some of its layers. */
typedef struct timed {
    stack *s;
    int hybrid;
} timed;

static void run_step(void *context) {
    const timed *t = (const timed *)context;
    stack_step(t->s, t->hybrid);
}

static void run_full_layers(void *context) {
    const timed *t = (const timed *)context;
    for (size_t i = 0; i < t->s->is.n_full; i++) stack_full_layer(t->s, i);
}

static void run_kda_layers(void *context) {
    const timed *t = (const timed *)context;
    for (size_t i = 0; i < t->s->is.n_kda; i++) stack_kda_layer(t->s, i);
}

static stack_options options_of(suite *s, size_t context, size_t batch, size_t n_full) {
    stack_options is = {&s->shape, s->cache,    s->state,
                        s->isa,    &s->pool,    context,
                        batch,     n_full,      s->shape.layers - s->shape.full,
                        0,         s->bf16_dots};
    return is;
}

/* An entry whose every round is a sum of that round of two others. */
static bench_entry combined(const bench_entry *a, const bench_entry *b, double times_a,
                            double times_b) {
    bench_entry entry = *a;
    for (size_t i = 0; i < a->rounds; i++)
        entry.ns[i] = times_a * a->ns[i] + (times_b > 0 ? times_b * b->ns[i] : 0);
    entry.ns_med = bench_median(entry.ns, entry.rounds);
    return entry;
}

/* Enough caches that a pass over them finds none in the last-level cache. */
static size_t caches_beyond_cache(suite *s, size_t context, size_t batch) {
    stack_options one = options_of(s, context, batch, 1);
    double n = ceil(2 * (double)s->cache_level / stack_cache_bytes(&one));
    return n < 1 ? 1 : n > MAX_REPEATED ? MAX_REPEATED : (size_t)n;
}

static bench_limit limit_of(suite *s, stack *stacked) {
    bench_limit limit;
    double bytes = stack_cache_bytes(&stacked->is);
    memset(&limit, 0, sizeof limit);
    limit.pool = &s->b.pool;
    limit.kernels = bench_kernels_of(kda_isa_name(s->isa));
    limit.threads = s->b.max_threads;
    limit.data = stacked->caches;
    limit.bytes = (size_t)fmin(bytes, 256e6) / 256 * 256;
    return limit;
}

/* Times, ratio and shares of a point from the entries of both stacks and of both limits. */
static void settle(const suite *s, point *p, const bench_entry *full, const bench_entry *hybrid,
                   const bench_entry *read, const bench_entry *fma, const bench_limit *limit) {
    roofline_model f = model_of(s, 0, 0), h = model_of(s, 1, 0);
    double batch = (double)s->batch, context = (double)p->context;
    p->full = full->ns_med, p->hybrid = hybrid->ns_med;
    p->ratio = bench_speed(hybrid, full);
    p->machine.bandwidth = 1e9 * (double)limit->bytes / read->ns_med;
    p->machine.peak = 1e9 * bench_fma_flops(limit) / fma->ns_med;
    p->machine.memory = s->budget;
    p->full_bytes = batch * roofline_sequence_bytes(&f, context);
    p->hybrid_bytes = batch * roofline_sequence_bytes(&h, context);
    p->full_share = 1e9 * roofline_step(&p->machine, &f, context, batch) / p->full;
    p->hybrid_share = 1e9 * roofline_step(&p->machine, &h, context, batch) / p->hybrid;
}

static void check(point *p, stack *stacked) {
    double full = stack_full_error(stacked);
    double kda = stacked->is.n_kda ? stack_kda_error(stacked) : 0;
    p->error = full > kda || full != full ? full : kda;
    if (stacked->is.state != KDA_F32) p->error = full; /* its type rounds more than kernels err */
    int rounded = stacked->is.bf16_dots && mla_has_bf16_dots(&stacked->linear, &stacked->mla);
    p->bound = rounded ? 1e-2 : 2e-6;
}

/* ns that one run of a contestant may take: a quick run must end. */
static double patience(const suite *s) {
    return s->b.quick ? fmax(0, s->b.deadline - bench_now()) / 30 : HUGE_VAL;
}

/* What a step of one full layer will take, going by the context before; 0 if there is none. */
static double expected_layer(const suite *s, size_t context) {
    if (s->n_points == 0) return 0;
    const point *last = &s->points[s->n_points - 1];
    return last->full_layer * (double)s->batch * (double)context / (double)last->context;
}

/* What equal batch holds at a context: all layers, or one full layer often enough that its caches
 * are in none of the machine's caches. */
static stack_options equal_batch_options(suite *s, size_t context, int *composed) {
    stack_options is = options_of(s, context, s->batch, s->shape.layers);
    double step = (double)s->shape.layers * expected_layer(s, context);
    *composed = stack_bytes(&is) > s->memory || step > patience(s);
    if (*composed) is.n_full = caches_beyond_cache(s, context, s->batch);
    return is;
}

/* Both stacks as a whole, or one layer of each kind: equal batch. */
static void measure_equal_batch(suite *s, point *p) {
    const double layers = (double)s->shape.layers, n_full = (double)s->shape.full;
    stack_options is = equal_batch_options(s, p->context, &p->composed);
    stack stacked;
    stack_open(&stacked, &is);
    timed t[2] = {{&stacked, 0}, {&stacked, 1}};
    bench_limit limit = limit_of(s, &stacked);
    bench_entry entry[4] = {bench_contestant(p->composed ? run_full_layers : run_step, &t[0]),
                            bench_contestant(p->composed ? run_kda_layers : run_step, &t[1]),
                            bench_contestant(bench_run_read, &limit),
                            bench_contestant(bench_run_fma, &limit)};
    bench_measure(&s->b, entry, 4);
    bench_entry full = entry[0], hybrid = entry[1];
    double sequences = (double)s->batch, kda = layers - n_full;
    if (p->composed) {
        double layer = 1 / (double)is.n_full;
        full = combined(&entry[0], &entry[0], layers * layer, 0);
        hybrid = combined(&entry[0], &entry[1], n_full * layer, 1);
        p->kda_layer = kda > 0 ? entry[1].ns_med / kda / sequences : 0;
    } else {
        bench_entry rest = combined(&entry[1], &entry[0], 1, 0);
        for (size_t i = 0; i < rest.rounds; i++) rest.ns[i] -= n_full / layers * entry[0].ns[i];
        p->kda_layer = kda > 0 ? bench_median(rest.ns, rest.rounds) / kda / sequences : 0;
    }
    settle(s, p, &full, &hybrid, &entry[2], &entry[3], &limit);
    p->full_layer = p->full / layers / sequences;
    check(p, &stacked);
    stack_close(&stacked);
}

/* One layer of each kind in a batch as large as both memory and patience allow; a cache of its own
 * for each sequence. */
static void measure_in_batch(suite *s, point *p) {
    roofline_model f = model_of(s, 0, 0), h = model_of(s, 1, 0);
    double context = (double)p->context;
    double most = fmin(s->b.quick ? 262144 : 1048576, patience(s) / p->full_layer * context);
    p->full_batch = floor(s->budget / roofline_sequence_bytes(&f, context));
    p->hybrid_batch = floor(s->budget / roofline_sequence_bytes(&h, context));
    double batch = fmin(p->hybrid_batch, fmin(MAX_MEASURED_BATCH, floor(most / context)));
    p->measured_batch = batch > 1 ? (size_t)batch : 1;
    p->full_in_batch = p->full_layer, p->kda_in_batch = p->kda_layer;
    if (p->measured_batch == 1) return;
    stack stacked;
    stack_options is = options_of(s, p->context, p->measured_batch, 1);
    if (is.n_kda > 4) is.n_kda = 4;
    if (stack_bytes(&is) > s->memory) return;
    stack_open(&stacked, &is);
    timed t = {&stacked, 0};
    bench_entry entry[2] = {bench_contestant(run_full_layers, &t),
                            bench_contestant(run_kda_layers, &t)};
    bench_measure(&s->b, entry, 2);
    p->full_in_batch = entry[0].ns_med / (double)is.batch;
    if (is.n_kda) p->kda_in_batch = entry[1].ns_med / (double)(is.batch * is.n_kda);
    stack_close(&stacked);
}

/* Whole layers, weights and all, where the shape's are small enough to be held. */
static void measure_whole(suite *s, point *p) {
    stack_options is = options_of(s, p->context, s->batch, s->shape.layers);
    roofline_model m = model_of(s, 0, 4); /* as much again while matrices are made */
    double bytes = stack_bytes(&is) + 2 * roofline_resident_bytes(&m);
    if (!stack_can_hold_weights(&s->shape) || bytes > s->memory) return;
    stack stacked;
    is.weights = 1;
    stack_open(&stacked, &is);
    timed t[2] = {{&stacked, 0}, {&stacked, 1}};
    bench_entry entry[2] = {bench_contestant(run_step, &t[0]), bench_contestant(run_step, &t[1])};
    bench_measure(&s->b, entry, 2);
    p->whole_full = entry[0].ns_med, p->whole_hybrid = entry[1].ns_med;
    stack_close(&stacked);
}

/* Times of one layer of each kind at a context. */
static void layer_times(suite *s, size_t context, double *full, double *kda) {
    stack stacked;
    stack_options is = options_of(s, context, s->batch, caches_beyond_cache(s, context, s->batch));
    stack_open(&stacked, &is);
    timed t = {&stacked, 0};
    bench_entry entry[2] = {bench_contestant(run_full_layers, &t),
                            bench_contestant(run_kda_layers, &t)};
    bench_measure(&s->b, entry, 2);
    *full = entry[0].ns_med / (double)is.n_full, *kda = entry[1].ns_med / (double)is.n_kda;
    stack_close(&stacked);
}

enum { CROSSOVER_FIRST = 16, CROSSOVER_LAST = 4096 };

/* The context at which a full layer takes as long as a KDA layer: both stacks are as fast there. */
static void find_crossover(suite *s) {
    double before = 0, full, kda;
    if (s->shape.layers == s->shape.full) return;
    for (size_t context = CROSSOVER_FIRST; context <= CROSSOVER_LAST; context *= 2) {
        layer_times(s, context, &full, &kda);
        if (full >= kda) {
            double part = context > CROSSOVER_FIRST ? (kda - before) / (full - before) : 1;
            part = fmin(1, fmax(0, part)); /* two measurements need not agree */
            s->crossover = (double)context * (context > CROSSOVER_FIRST ? (1 + part) / 2 : 1);
            return;
        }
        before = full;
    }
}

/* ==== Views ==================================================================================== */

static double saving(const point *p) {
    return 100 * (1 - p->hybrid_bytes / p->full_bytes);
}

/* ns of a step with weights read, by this machine's limits. */
static double with_weights(const suite *s, const point *p, int hybrid, double weight, double batch,
                           double attention) {
    roofline_model m = model_of(s, hybrid, weight);
    return attention + 1e9 * roofline_weights_time(&p->machine, &m, batch);
}

/* Tokens a second of a batch of sequences. */
static double throughput(const suite *s, const point *p, int hybrid, double weight) {
    double batch = hybrid ? p->hybrid_batch : p->full_batch;
    double full = (double)(hybrid ? s->shape.full : s->shape.layers);
    double kda = (double)s->shape.layers - full;
    double attention = batch * (full * p->full_in_batch + kda * p->kda_in_batch);
    return batch > 0 ? 1e9 * batch / with_weights(s, p, hybrid, weight, batch, attention) : 0;
}

static double throughput_ratio(const suite *s, const point *p, double weight) {
    double full = throughput(s, p, 0, weight);
    return full > 0 ? throughput(s, p, 1, weight) / full : (double)NAN;
}

static double whole_ratio(const suite *s, const point *p, double weight) {
    double batch = (double)s->batch;
    return with_weights(s, p, 0, weight, batch, p->full) /
           with_weights(s, p, 1, weight, batch, p->hybrid);
}

/* A number, or a dash where a stack holds no sequence. */
static const char *number_text(double x, int digits, char text[16]) {
    snprintf(text, 16, "%.*f", digits, x);
    if (x != x) snprintf(text, 16, "-");
    return text;
}

static const char *ratio_text(double ratio, char text[16]) {
    return number_text(ratio, 2, text);
}

static void heading(suite *s, const char *text, const char *columns) {
    if (s->b.table) printf("\n# %s\n%s\n", text, columns);
    if (s->b.csv) fprintf(s->b.csv, "# %s\n", text);
}

/* A row as soon as it is there. */
static void print_equal_batch(suite *s, const point *p) {
    char context[32];
    const char *how = p->composed ? "composed" : "whole";
    const char *verdict = p->error <= p->bound ? "ok" : "FAIL";
    s->b.rows++, s->b.failed += verdict[0] == 'F';
    context_text((double)p->context, context);
    if (s->b.table) {
        if (isatty(2)) fprintf(stderr, "\r\033[K");
        printf("%7s %-8s %11.3f %11.3f %6.3f %10.4f %10.4f %8.2f %8.2f %8.2f %9.1e %s\n", context,
               how, p->full / 1e6, p->hybrid / 1e6, p->ratio, p->full_bytes / gib,
               p->hybrid_bytes / gib, saving(p), p->full_share, p->hybrid_share, p->error, verdict);
        fflush(stdout);
    }
    if (s->b.csv)
        fprintf(s->b.csv,
                "equal-batch,%zu,%s,%zu,%zu,%.6f,%.6f,%.4f,%.0f,%.0f,%.3f,%.4f,%.4f,%.2e,%s\n",
                p->context, how, s->batch, s->batch, p->full / 1e6, p->hybrid / 1e6, p->ratio,
                p->full_bytes, p->hybrid_bytes, saving(p), p->full_share, p->hybrid_share, p->error,
                verdict);
}

static void print_whole_model(suite *s) {
    char context[32];
    heading(s,
            "whole model, equal batch: the stacks above, and the weights that a step uses at this"
            " machine's measured limits",
            "context   bf16: full     hybrid  ratio   int8: full     hybrid  ratio   int4: full"
            "     hybrid  ratio   measured: full     hybrid  ratio");
    for (size_t i = 0; i < s->n_points; i++) {
        const point *p = &s->points[i];
        if (s->b.table) printf("%7s", context_text((double)p->context, context));
        for (size_t k = 0; k < WEIGHT_TYPES; k++) {
            double weight = weight_types[k].bytes, batch = (double)s->batch;
            double full = with_weights(s, p, 0, weight, batch, p->full) / 1e6;
            double hybrid = with_weights(s, p, 1, weight, batch, p->hybrid) / 1e6;
            if (s->b.table) printf("  %11.2f %10.2f %6.3f", full, hybrid, full / hybrid);
            if (s->b.csv)
                fprintf(s->b.csv, "whole-model-%s,%zu,computed,%zu,%zu,%.6f,%.6f,%.4f,,,,,,,\n",
                        weight_types[k].name, p->context, s->batch, s->batch, full, hybrid,
                        full / hybrid);
        }
        if (p->whole_full > 0) {
            double full = p->whole_full / 1e6, hybrid = p->whole_hybrid / 1e6;
            if (s->b.table) printf("  %15.2f %10.2f %6.3f", full, hybrid, full / hybrid);
            if (s->b.csv)
                fprintf(s->b.csv, "whole-model-measured,%zu,whole,%zu,%zu,%.6f,%.6f,%.4f,,,,,,,\n",
                        p->context, s->batch, s->batch, full, hybrid, full / hybrid);
        }
        if (s->b.table) printf("\n");
    }
}

static void print_equal_memory(suite *s) {
    char text[160], context[32], ratio[4][16];
    snprintf(text, sizeof text,
             "equal memory: the largest batches that %.1f GiB of caches and states hold, tokens a"
             " second of the attention stack",
             s->budget / gib);
    heading(s, text,
            "context  batches: full    hybrid   tokens/s: full     hybrid  ratio   with weights: "
            "bf16   int8   int4");
    for (size_t i = 0; i < s->n_points; i++) {
        const point *p = &s->points[i];
        double full = throughput(s, p, 0, 0), hybrid = throughput(s, p, 1, 0);
        ratio_text(throughput_ratio(s, p, 0), ratio[3]);
        for (size_t k = 0; k < WEIGHT_TYPES; k++)
            ratio_text(throughput_ratio(s, p, weight_types[k].bytes), ratio[k]);
        if (s->b.table)
            printf("%7s %14.0f %9.0f %16.4f %10.4f %6s %20s %6s %6s\n",
                   context_text((double)p->context, context), p->full_batch, p->hybrid_batch, full,
                   hybrid, ratio[3], ratio[0], ratio[1], ratio[2]);
        if (s->b.csv)
            fprintf(s->b.csv,
                    "equal-memory,%zu,composed of batches of %zu,%.0f,%.0f,%.6f,%.6f,%s,,,,,,,\n",
                    p->context, p->measured_batch, p->full_batch, p->hybrid_batch,
                    full > 0 ? 1e3 / full : 0, hybrid > 0 ? 1e3 / hybrid : 0, ratio[3]);
    }
    if (s->b.table)
        printf("# - : full attention does not hold one sequence. Without weights nothing is shared"
               " by a batch:\n# larger batches alone give no more than layers / full layers.\n");
}

/* ---- The cost model ---- */

/* The model beside what was measured, with the machine's measured limits. */
static void print_prediction(suite *s) {
    char context[32];
    roofline_model f = model_of(s, 0, 0), h = model_of(s, 1, 0);
    heading(s, "cost model of this machine's measured limits, attention stack, equal batch",
            "context     GB/s  GFLOP/s  ms full: model   measured  hybrid: model   measured  ratio:"
            " model measured");
    for (size_t i = 0; i < s->n_points; i++) {
        const point *p = &s->points[i];
        double batch = (double)s->batch, tokens = (double)p->context;
        double full = 1e3 * roofline_step(&p->machine, &f, tokens, batch);
        double hybrid = 1e3 * roofline_step(&p->machine, &h, tokens, batch);
        if (s->b.table)
            printf("%7s %8.2f %8.2f %15.3f %10.3f %14.3f %10.3f %13.3f %8.3f\n",
                   context_text(tokens, context), p->machine.bandwidth / 1e9, p->machine.peak / 1e9,
                   full, p->full / 1e6, hybrid, p->hybrid / 1e6, full / hybrid, p->ratio);
        if (s->b.csv)
            fprintf(s->b.csv,
                    "model-here,%zu,%.2f GB/s %.2f GFLOP/s,%zu,%zu,%.6f,%.6f,%.4f,,,,,,,\n",
                    p->context, p->machine.bandwidth / 1e9, p->machine.peak / 1e9, s->batch,
                    s->batch, full, hybrid, full / hybrid);
    }
}

/* What the model says of a context, of one sequence and of the largest batches: ms a token. NaN
 * where a stack does not fit. */
typedef struct prediction {
    double one_full, one_hybrid, full_batch, hybrid_batch, full, hybrid;
} prediction;

static prediction predict(const roofline_machine *machine, const roofline_model *f,
                          const roofline_model *h, double context) {
    prediction x;
    x.one_full = 1e3 * roofline_step(machine, f, context, 1);
    x.one_hybrid = 1e3 * roofline_step(machine, h, context, 1);
    x.full_batch = roofline_largest_batch(machine, f, context);
    x.hybrid_batch = roofline_largest_batch(machine, h, context);
    x.full = 1e3 * roofline_step(machine, f, context, x.full_batch) / x.full_batch;
    x.hybrid = 1e3 * roofline_step(machine, h, context, x.hybrid_batch) / x.hybrid_batch;
    if (!(x.full_batch > 0)) x.full = (double)NAN;
    if (!(x.hybrid_batch > 0)) x.hybrid = (double)NAN;
    return x;
}

/* Batch 1 and the largest batches on a machine that is described by its figures alone. */
static void print_machine(suite *s, const roofline_machine *machine, const roofline_model *f,
                          const roofline_model *h, const char *name) {
    char text[240], context[32], ratio[16], full[16], hybrid[16];
    snprintf(text, sizeof text,
             "cost model: %s: %.4g GB/s, %.4g GB, %.4g GFLOP/s, %.4g ms a step; %s, weights of %g"
             " bytes, caches of %g",
             name, machine->bandwidth / 1e9, machine->memory / 1e9, machine->peak / 1e9,
             1e3 * machine->fixed, f->shape->name, f->weight, f->cache_element);
    heading(s, text,
            "context  batch 1, ms: full  hybrid  ratio  largest batches: full  hybrid  ms/token:"
            " full  hybrid  ratio");
    for (size_t i = 0; i < s->n_contexts; i++) {
        double tokens = (double)s->contexts[i];
        prediction x = predict(machine, f, h, tokens);
        if (s->b.table)
            printf("%7s %18.2f %7.2f %6.2f %22.0f %7.0f %15s %7s %6s\n",
                   context_text(tokens, context), x.one_full, x.one_hybrid,
                   x.one_full / x.one_hybrid, x.full_batch, x.hybrid_batch,
                   number_text(x.full, 3, full), number_text(x.hybrid, 3, hybrid),
                   ratio_text(x.full / x.hybrid, ratio));
        if (s->b.csv)
            fprintf(s->b.csv, "model-%s,%zu,computed,%.0f,%.0f,%s,%s,%s,,,,,,,\n", f->shape->name,
                    s->contexts[i], x.full_batch, x.hybrid_batch, number_text(x.full, 3, full),
                    number_text(x.hybrid, 3, hybrid), ratio_text(x.full / x.hybrid, ratio));
    }
}

/* The 48B's ratio that was found here at a context, or a dash. */
static const char *ratio_here(const suite *s, double context, int equal_memory, char text[16]) {
    double ratio = (double)NAN;
    for (size_t i = 0; strcmp(s->shape.name, "48b") == 0 && i < s->n_points; i++) {
        const point *p = &s->points[i];
        if (fabs((double)p->context - context) > 0.5) continue;
        ratio = equal_memory ? throughput_ratio(s, p, weight_types[0].bytes)
                             : whole_ratio(s, p, weight_types[0].bytes);
    }
    return ratio_text(ratio, text);
}

/* The 48B's published ratios, what the model gives with figures that fit them, and what was found
 * here, all with bf16 weights. */
static void print_published(suite *s) {
    static const struct {
        double context;
        const char *one, *largest;
    } published[] = {{262144, "-", "4.8"}, {524288, "1.8", "5.7"}, {1048576, "2.2-2.3", "6.3"}};
    roofline_model f = {&roofline_48b, 0, 2, 4, 2}, h = {&roofline_48b, 1, 2, 4, 2};
    char context[32], one[16], largest[16], here[2][16];
    print_machine(s, &roofline_published_batch_1, &f, &h,
                  "solved for the published ratios of batch 1");
    print_machine(s, &roofline_published_largest, &f, &h,
                  "solved for the published times of the largest batches at 1M");
    heading(
        s,
        "published for the 48B (no machine stated; the largest batches' called theoretical), the"
        " model's, and here, with bf16 weights",
        "context  batch 1: published  model   here  largest batches: published  model   here"
        " (equal memory)");
    for (size_t i = 0; i < 3 && s->b.table; i++) {
        double tokens = published[i].context;
        prediction x = predict(&roofline_published_batch_1, &f, &h, tokens);
        prediction y = predict(&roofline_published_largest, &f, &h, tokens);
        printf("%7s %19s %6s %6s %27s %6s %6s\n", context_text(tokens, context), published[i].one,
               ratio_text(x.one_full / x.one_hybrid, one), ratio_here(s, tokens, 0, here[0]),
               published[i].largest, ratio_text(y.full / y.hybrid, largest),
               ratio_here(s, tokens, 1, here[1]));
    }
    bench_note(&s->b,
               "By the model a ratio beyond 27/7 needs batches that differ by more than the caches"
               " do (1 and 7, from memory for 1.9 and 7.3) and a step whose fixed cost outweighs"
               " its reads; batch 1 gains little on such a machine: none gives both figures");
}

/* ==== The picture ============================================================================== */

/* Ratios and memory of all points, for svg.h. */
typedef struct curves {
    double context[MAX_CONTEXTS], ratio[MAX_CONTEXTS], whole[MAX_CONTEXTS], memory[MAX_CONTEXTS];
    double limit[MAX_CONTEXTS], full[MAX_CONTEXTS], hybrid[MAX_CONTEXTS], budget[MAX_CONTEXTS];
} curves;

static void draw(suite *s) {
    static curves c;
    double top = 1;
    char title[200], cpu[120], budget[64];
    error e;
    svg picture;
    size_t n = s->n_points;
    for (size_t i = 0; i < n; i++) {
        const point *p = &s->points[i];
        c.context[i] = (double)p->context;
        c.ratio[i] = p->ratio, c.whole[i] = whole_ratio(s, p, weight_types[0].bytes);
        c.memory[i] = throughput_ratio(s, p, weight_types[0].bytes);
        c.limit[i] = (double)s->shape.layers / (double)s->shape.full;
        c.full[i] = p->full_bytes / gib, c.hybrid[i] = p->hybrid_bytes / gib;
        c.budget[i] = s->budget / gib;
        double most = fmax(fmax(c.ratio[i], c.whole[i]), fmax(c.memory[i], c.limit[i]));
        top = fmax(top, ceil(most)); /* fmax passes over the NaN of what does not fit */
    }
    snprintf(budget, sizeof budget, "equal memory (%.1f GiB), bf16 weights computed",
             s->budget / gib);
    svg_line ratios[] = {{"attention stack, equal batch", c.context, c.ratio, n, SVG_SOLID},
                         {"equal batch, bf16 weights computed", c.context, c.whole, n, SVG_SOLID},
                         {budget, c.context, c.memory, n, SVG_SOLID},
                         {"layers / full layers", c.context, c.limit, n, SVG_DASHED}};
    svg_line bytes[] = {{"full attention", c.context, c.full, n, SVG_SOLID},
                        {"hybrid, states counted", c.context, c.hybrid, n, SVG_SOLID},
                        {"memory of the machine or budget", c.context, c.budget, n, SVG_DASHED}};
    svg_chart left = {"Speed of the hybrid against full attention",
                      {"context, tokens", SVG_LOG2, 0, 0},
                      {"times as many tokens a second", SVG_LINEAR, 0, top},
                      ratios,
                      4};
    svg_chart right = {"Caches and states",
                       {"context, tokens", SVG_LOG2, 0, 0},
                       {"GiB", SVG_LOG10, 0, 0},
                       bytes,
                       3};
    bench_cpu_name(cpu, sizeof cpu);
    snprintf(title, sizeof title, "%s: %zu layers, %zu full, batch %zu; %.100s, %zu threads",
             s->shape.name, s->shape.layers, s->shape.full, s->batch, cpu, s->b.max_threads);
    if (!svg_open(&picture, s->svg_name, 960, 430, title, &e)) bench_die(e.text);
    svg_text(&picture, 18, 24, 13, title);
    svg_draw(&picture, &left, 0, 36, 480, 390);
    svg_draw(&picture, &right, 480, 36, 480, 390);
    if (!svg_close(&picture, &e)) bench_die(e.text);
}

/* ==== The run ================================================================================== */

static const char *isa_name(int isa) {
    return kda_isa_name((kda_isa)isa);
}

static int isa_is_available(int isa) {
    return kda_isa_is_available((kda_isa)isa);
}

static void describe(suite *s) {
    char text[320];
    const roofline_shape *shape = &s->shape;
    snprintf(
        text, sizeof text,
        "shape %s: %zu layers, the hybrid with %zu full; %zu heads; latent %zu + %zu, caches of"
        " %zu bytes an element; KDA states %zu x %zu of %.0f bytes; batch %zu, %s, %zu threads",
        shape->name, shape->layers, shape->full, shape->heads, shape->latent, shape->rope,
        stack_element_bytes(s->cache), shape->dim, shape->dim, state_element(s), s->batch,
        kda_isa_name(s->isa), s->b.max_threads);
    bench_note(&s->b, text);
    snprintf(text, sizeof text,
             "measured caches take up to %.1f GiB; past that a row is composed of one layer of each"
             " kind. At equal batch no ratio goes beyond layers / full layers = %.3f",
             s->memory / gib, (double)shape->layers / (double)shape->full);
    bench_note(&s->b, text);
    if (s->b.csv)
        fprintf(s->b.csv, "view,context,how,batch_full,batch_hybrid,ms_full,ms_hybrid,ratio,"
                          "bytes_full,bytes_hybrid,saving_percent,roofline_full,roofline_hybrid,"
                          "error,verdict\n");
}

/* What keeps a context from being measured at all; null: nothing. */
static const char *what_is_short(suite *s, size_t context) {
    int composed;
    stack_options is = equal_batch_options(s, context, &composed);
    if (stack_bytes(&is) > s->most) return "memory";
    return expected_layer(s, context) > 6 * patience(s) ? "time" : NULL;
}

static void measure_all(suite *s) {
    char text[96], context[32];
    heading(s, "equal batch: the attention stack, a step of one token for each sequence",
            "context how         ms, full      hybrid  ratio  GiB, full     hybrid saving %  of"
            " roof: full  hybrid     error");
    s->b.measures = s->n_contexts * 3 + 9;
    for (size_t i = 0; i < s->n_contexts; i++) {
        point *p = &s->points[s->n_points];
        context_text((double)s->contexts[i], context);
        snprintf(text, sizeof text, "%zu/%zu context %s", i + 1, s->n_contexts + 1, context);
        bench_tell(&s->b, text);
        const char *obstacle = what_is_short(s, s->contexts[i]);
        if (obstacle) {
            snprintf(text, sizeof text, "context %s is left out: no %s left", context, obstacle);
            bench_note(&s->b, text);
            continue;
        }
        memset(p, 0, sizeof *p);
        p->context = s->contexts[i];
        measure_equal_batch(s, p);
        print_equal_batch(s, p);
        measure_in_batch(s, p);
        measure_whole(s, p);
        s->n_points++;
    }
    snprintf(text, sizeof text, "%zu/%zu cross-over", s->n_contexts + 1, s->n_contexts + 1);
    bench_tell(&s->b, text);
    if (s->n_points == 0) return;
    find_crossover(s);
    if (s->crossover > 0)
        snprintf(text, sizeof text, "cross-over: the hybrid is faster from %.0f tokens on",
                 s->crossover);
    else
        snprintf(text, sizeof text, "cross-over: none up to %d tokens", CROSSOVER_LAST);
    bench_note(&s->b, text);
}

int main(int argc, char **argv) {
    static suite s;
    bench *b = &s.b;
    error e;
    b->name = "decode_ratio", b->counted = "", b->suite = &s;
    b->best_isa = (int)kda_isa_best(), b->isa_name = isa_name;
    b->isa_is_available = isa_is_available;
    b->option = parse_option, b->option_help = option_help;
    b->quick_seconds = 36;
    s.shape = roofline_48b, s.cache = LINEAR_BF16, s.state = KDA_F32, s.batch = 1;
    bench_parse(b, argc, argv);
    bench_choose_isas(b);
    choose_defaults(&s);
    s.isa = (kda_isa)b->isas[b->n_isas - 1];
    if (!parallel_open(&s.pool, b->max_threads, &e)) bench_die(e.text);
    bench_open(b);
    describe(&s);
    measure_all(&s);
    print_whole_model(&s);
    print_equal_memory(&s);
    if (s.roofline) print_prediction(&s);
    roofline_model full = model_of(&s, 0, 2), hybrid = model_of(&s, 1, 2);
    if (s.given.bandwidth > 0) print_machine(&s, &s.given, &full, &hybrid, "the machine given");
    if (s.roofline) print_published(&s);
    if (s.svg_name && s.n_points > 0) draw(&s);
    parallel_close(&s.pool);
    return bench_end(b);
}
