/* model.c - how fast whole checkpoints run here: tokens a second of a prompt and of generation, the
 * bytes that a generated token touches, and the share of this machine's read bandwidth that makes.
 *
 *     model MODEL_DIR... [--prompt N] [--generate N] [--context N] [--cache TYPE] [--quick] ...
 *
 * Several directories are measured in the same rounds: the same model in several types, say. See
 * README.md for how to read the table.
 */
#include "bench.h"

#include "../examples/hybrid.h"
#include "../examples/plan.h"

enum { MAX_MODELS = 8, LIMIT_BYTES = 1 << 28 };

/* One directory, open. */
typedef struct contestant {
    const char *directory;
    hybrid_model model;
    hybrid_workspace work;
    hybrid_session session;
    const struct suite *suite;
    uint32_t *ids; /* of the prompt, then of the tokens that follow */
    float *logits;
    random_state random;
} contestant;

typedef struct suite {
    bench b;
    size_t prompt, generate, context;
    linear_type cache;
    parallel pool;
    contestant models[MAX_MODELS];
    size_t n_models;
} suite;

static void give_up(const char *why) {
    fprintf(stderr, "model: %s\n", why);
    exit(1);
}

/* ---- Options ---- */

static const char option_help[] =
    "  MODEL_DIR...       one to eight checkpoints\n"
    "  --prompt N         tokens of the prompt (default 128)\n"
    "  --generate N       tokens that are generated in each round (default 8)\n"
    "  --context N        tokens that are taken as read before these (default 0)\n"
    "  --cache TYPE       f32, f16 or bf16: numbers of the latent cache (default bf16)\n";

static size_t parse_size(const bench *b, const char *value, size_t least) {
    char *end;
    unsigned long long n = strtoull(value, &end, 10);
    if (*value < '0' || *value > '9' || *end || n < least || n > 1u << 30)
        bench_usage_error(b, "not a number of tokens:", value);
    return (size_t)n;
}

static int parse_option(bench *b, const char *option, const char *value) {
    suite *s = (suite *)b->suite;
    if (option[0] != '-') {
        if (s->n_models == MAX_MODELS) bench_usage_error(b, "one directory too many:", option);
        s->models[s->n_models++].directory = option;
        return 1;
    }
    size_t *place = strcmp(option, "--prompt") == 0     ? &s->prompt
                    : strcmp(option, "--generate") == 0 ? &s->generate
                    : strcmp(option, "--context") == 0  ? &s->context
                                                        : NULL;
    int is_cache = strcmp(option, "--cache") == 0;
    if (!place && !is_cache) return 0;
    if (!value) bench_usage_error(b, "no value after", option);
    if (place) *place = parse_size(b, value, place == &s->context ? 0 : 1);
    if (is_cache && (!linear_type_of(value, &s->cache) ||
                     (s->cache != LINEAR_F32 && s->cache != LINEAR_F16 && s->cache != LINEAR_BF16)))
        bench_usage_error(b, "not a type of the cache:", value);
    return 2;
}

/* ---- Models ---- */

/* All weights in memory first, where they fit: a round shall not wait for the disk. */
static void open_model(suite *s, contestant *m) {
    error e;
    hybrid_session_options kept;
    hybrid_workspace_options how;
    memset(&kept, 0, sizeof kept), memset(&how, 0, sizeof how);
    m->suite = s;
    kept.capacity = how.capacity = s->context + s->prompt + s->generate;
    kept.cache = s->cache;
    how.run.isa = (kda_isa)s->b.isas[s->b.n_isas - 1], how.run.pool = &s->pool;
    if (!hybrid_open(&m->model, m->directory, &e)) give_up(e.text);
    if ((double)m->model.mapped_bytes < plan_available_memory()) st_prefault(&m->model.checkpoint);
    if (!hybrid_session_open(&m->session, &m->model, &kept, &e) ||
        !hybrid_workspace_open(&m->work, &m->model, &how, &e) ||
        !hybrid_session_fill(&m->session, s->context + s->prompt, 1, &e))
        give_up(e.text);
    m->random = random_seed(1);
    m->ids = (uint32_t *)bench_alloc(s->prompt * sizeof *m->ids);
    m->logits = bench_floats(m->model.config.vocab_size);
    for (size_t i = 0; i < s->prompt; i++)
        m->ids[i] = (uint32_t)random_below(&m->random, m->model.config.vocab_size);
}

static void close_model(contestant *m) {
    free(m->ids), free(m->logits);
    hybrid_session_close(&m->session);
    hybrid_workspace_close(&m->work);
    hybrid_close(&m->model);
}

static void forward(contestant *m, const uint32_t *ids, size_t n) {
    error e;
    hybrid_want want;
    memset(&want, 0, sizeof want);
    want.last_logits = m->logits;
    if (!hybrid_forward(&m->work, &m->session, ids, n, &want, &e)) give_up(e.text);
}

/* The session goes back to a number of tokens: its latents are written over, its states go on. */
static void run_prompt(void *context) {
    contestant *m = (contestant *)context;
    m->session.n_tokens = m->suite->context;
    forward(m, m->ids, m->suite->prompt);
}

/* Ids are drawn, not the most likely ones: random weights soon repeat themselves, and then the same
 * experts. */
static void run_generate(void *context) {
    contestant *m = (contestant *)context;
    m->session.n_tokens = m->suite->context + m->suite->prompt;
    for (size_t i = 0; i < m->suite->generate; i++) {
        uint32_t id = (uint32_t)random_below(&m->random, m->model.config.vocab_size);
        forward(m, &id, 1);
    }
}

/* ---- The table ---- */

/* The type of most bytes of a model's matrices. */
static const char *type_of(const hybrid_model *model) {
    plan_weights weights = plan_weights_of(model);
    size_t most = 0;
    for (size_t i = 1; i < PLAN_TYPES; i++)
        if (weights.matrices[i] > weights.matrices[most]) most = i;
    return linear_type_name((linear_type)most);
}

static plan_token token_of(const contestant *m) {
    size_t before = m->suite->context + m->suite->prompt + m->suite->generate / 2;
    return plan_token_of(&m->model, before, m->suite->cache);
}

static void describe(suite *s, const contestant *m) {
    char text[400];
    plan_token t = token_of(m);
    snprintf(text, sizeof text,
             "%.100s: %.1f MB of weights; a token touches, in MB: dense matrices %.1f, chosen "
             "experts %.1f, head %.1f, vectors %.2f, states %.1f, latents %.2f",
             m->directory, (double)m->model.mapped_bytes / 1e6, t.dense / 1e6, t.experts / 1e6,
             t.head / 1e6, (t.vectors + t.embedding) / 1e6, t.states / 1e6, t.latents / 1e6);
    bench_note(&s->b, text);
}

static void print_row(suite *s, const contestant *m, const bench_entry *prompt,
                      const bench_entry *generate, const bench_entry *limit) {
    double bytes = token_of(m).total, tokens = (double)s->generate;
    double read = (double)LIMIT_BYTES / limit->ns_med;
    /* Time of reading as many bytes, against the time taken, round by round. */
    double share = bench_speed(generate, limit) * tokens * bytes / (double)LIMIT_BYTES;
    double prompt_speed = (double)s->prompt / prompt->ns_med * 1e9;
    double speed = tokens / generate->ns_med * 1e9, gb = bytes * tokens / generate->ns_med;
    s->b.rows++;
    if (s->b.table)
        printf("%-32s %-7s %3zu %12.1f %12.2f %12.1f %8.2f %8.2f %6.3f\n", m->directory,
               type_of(&m->model), s->b.max_threads, prompt_speed, speed, bytes / 1e6, gb, read,
               share);
    if (s->b.csv)
        fprintf(s->b.csv, "%s,%s,%zu,%zu,%zu,%.3f,%.3f,%.0f,%.3f,%.3f,%.4f\n", m->directory,
                type_of(&m->model), s->b.max_threads, s->context, s->prompt, prompt_speed, speed,
                bytes, gb, read, share);
    fflush(stdout);
}

static void measure(suite *s) {
    static bench_entry generate[MAX_MODELS + 1], prompt[MAX_MODELS];
    bench_limit limit;
    memset(&limit, 0, sizeof limit);
    limit.pool = &s->b.pool, limit.threads = s->b.max_threads;
    limit.kernels = bench_kernels_of(kda_isa_name((kda_isa)s->b.isas[s->b.n_isas - 1]));
    limit.bytes = LIMIT_BYTES, limit.data = (unsigned char *)bench_alloc(LIMIT_BYTES);
    for (size_t i = 0; i < s->n_models; i++) {
        generate[i] = bench_contestant(run_generate, &s->models[i]);
        prompt[i] = bench_contestant(run_prompt, &s->models[i]);
    }
    generate[s->n_models] = bench_contestant(bench_run_read, &limit);
    s->b.measures = 2;
    bench_tell(&s->b, "1/2 generation");
    bench_measure(&s->b, generate, s->n_models + 1);
    bench_tell(&s->b, "2/2 prompt");
    bench_measure(&s->b, prompt, s->n_models);
    for (size_t i = 0; i < s->n_models; i++)
        print_row(s, &s->models[i], &prompt[i], &generate[i], &generate[s->n_models]);
    free(limit.data);
}

/* ---- The run ---- */

static const char *isa_name(int isa) {
    return kda_isa_name((kda_isa)isa);
}

static int isa_is_available(int isa) {
    return kda_isa_is_available((kda_isa)isa);
}

int main(int argc, char **argv) {
    static suite s;
    bench *b = &s.b;
    error e;
    b->name = "model", b->counted = "", b->suite = &s;
    b->best_isa = (int)kda_isa_best(), b->isa_name = isa_name;
    b->isa_is_available = isa_is_available;
    b->option = parse_option, b->option_help = option_help;
    b->quick_seconds = 10;
    s.prompt = 128, s.generate = 8, s.cache = LINEAR_BF16;
    bench_parse(b, argc, argv);
    if (s.n_models == 0) bench_usage_error(b, "expected a directory after", "model");
    bench_choose_isas(b);
    if (!parallel_open(&s.pool, b->max_threads, &e)) give_up(e.text);
    for (size_t i = 0; i < s.n_models; i++) open_model(&s, &s.models[i]);
    bench_open(b);
    for (size_t i = 0; i < s.n_models; i++) describe(&s, &s.models[i]);
    if (b->csv)
        fprintf(b->csv, "model,type,threads,context,prompt,prompt tokens/s,tokens/s,bytes/token,"
                        "GB/s,read GB/s,share\n");
    if (b->table)
        printf("%-32s %-7s %3s %12s %12s %12s %8s %8s %6s\n", "model", "type", "thr",
               "prompt tok/s", "tokens/s", "MB/token", "GB/s", "read", "of it");
    measure(&s);
    for (size_t i = 0; i < s.n_models; i++) close_model(&s.models[i]);
    parallel_close(&s.pool);
    return bench_end(b);
}
