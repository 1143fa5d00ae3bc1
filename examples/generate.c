/* generate.c - continues a prompt with a checkpoint, or writes down what the model computed.
 *
 *     build/generate MODEL_DIR --prompt "In the beginning" --generate 200 --temperature 0.8
 *     build/generate MODEL_DIR --tokens ids.txt --logits logits.f32
 *
 * Arguments, files and printing are here; the model is in hybrid.h. Exit status: 0, or 1 for bad
 * input, or 2 for bad usage, with one line on stderr, the last there.
 */
#include "arguments.h"
#include "depth.h"
#include "draft.h"
#include "hybrid.h"
#include "output.h"
#include "parallel.h"
#include "plan.h"
#include "run_options.h"
#include "safetensors_write.h"
#include "sample.h"
#include "saved.h"
#include "signals.h"
#include "stop.h"
#include "tokenizer.h"
#include "tokens.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const char help[] =
    "usage: generate MODEL_DIR (--tokens FILE | --prompt TEXT | --plan) [options]\n"
    "\n"
    "MODEL_DIR holds config.json and model.safetensors (or shards with an index).\n"
    "\n"
    "input\n"
    "  --tokens FILE       token ids, separated by white space; - is standard input\n"
    "  --prompt TEXT       a text, in which names of special tokens are these; without\n"
    "                      tiktoken.model in MODEL_DIR its bytes, each the id of its value\n"
    "  --split N           feed the input N tokens at a time (default: all at once)\n"
    "\n"
    "output\n"
    "  --generate N        tokens to generate (default 64): ids after --tokens, text after\n"
    "                      --prompt, where an id that is no text is written <id>, up to\n"
    "                      the model's end of text: eos_token_id of generation_config.json,\n"
    "                      or of config.json, or a special token called [EOS], <|im_end|>\n"
    "                      or <|end_of_msg|>\n"
    "  --ignore-stop       go on behind the end of text\n"
    "  --logits FILE       write float32 logits, little-endian, a row of vocab_size for\n"
    "                      each input token, and generate nothing\n"
    "  --dump-layers FILE  write safetensors: `hidden`, F32 [layers + 1, tokens, hidden],\n"
    "                      the running sum after the embedding and after each layer, for\n"
    "                      each input token\n"
    "  --show-depth        print, of the input, the size of the running sum after each layer\n"
    "                      and, with Attention Residuals, what each sub-layer reads of the\n"
    "                      blocks before it; generate nothing\n"
    "  --depth-svg FILE    and the same as a picture\n"
    "\n"
    "sessions\n"
    "  --save-session FILE save at the end what was read: the input and all generated tokens\n"
    "                      but the last\n"
    "  --load-session FILE go on from there: the input follows the tokens of that session,\n"
    "                      which must be of the same model and --cache\n"
    "  --context N         begin as if N tokens had been read, with contents drawn from\n"
    "                      --seed: to measure what a long context costs\n"
    "\n"
    "choice of each token\n" SAMPLE_HELP
    "  --draft N           guess up to N tokens ahead from what the text repeats, and take\n"
    "                      what the model agrees to, for temperature 0 without a repetition\n"
    "                      penalty: the same output\n"
    "\n"
    "how to run\n" RUN_HELP
    "  --plan              print what a run will need, bytes of weights, of a token, of a\n"
    "                      session and of a workspace for --context tokens, and the longest\n"
    "                      context for this machine's memory; read no weights and stop\n"
    "  --help              this text\n"
    "\n"
    "Memory, before it is used, and speed go to standard error. Exit status: 1 for bad\n"
    "input, 2 for bad usage.\n";

/* ---- Arguments ---- */

#define MOST_DRAFT 64

typedef struct options {
    const char *model, *tokens, *prompt, *logits, *dump, *save, *load, *depth_svg;
    size_t generate, split, context, draft;
    run_options how;
    sample_options sampling;
    bool show_depth, ignore_stop, plan, help;
} options;

static const argument argument_list[] = {
    {"--tokens", ARGUMENT_TEXT, offsetof(options, tokens), 0, 0, NULL},
    {"--prompt", ARGUMENT_TEXT, offsetof(options, prompt), 0, 0, NULL},
    {"--split", ARGUMENT_SIZE, offsetof(options, split), 1, 0, NULL},
    {"--generate", ARGUMENT_SIZE, offsetof(options, generate), 0, 0, NULL},
    {"--logits", ARGUMENT_TEXT, offsetof(options, logits), 0, 0, NULL},
    {"--dump-layers", ARGUMENT_TEXT, offsetof(options, dump), 0, 0, NULL},
    {"--show-depth", ARGUMENT_FLAG, offsetof(options, show_depth), 0, 0, NULL},
    {"--depth-svg", ARGUMENT_TEXT, offsetof(options, depth_svg), 0, 0, NULL},
    {"--ignore-stop", ARGUMENT_FLAG, offsetof(options, ignore_stop), 0, 0, NULL},
    SAMPLE_ARGUMENTS(options),
    {"--save-session", ARGUMENT_TEXT, offsetof(options, save), 0, 0, NULL},
    {"--load-session", ARGUMENT_TEXT, offsetof(options, load), 0, 0, NULL},
    {"--context", ARGUMENT_SIZE, offsetof(options, context), 0, 0, NULL},
    {"--draft", ARGUMENT_SIZE, offsetof(options, draft), 0, MOST_DRAFT, NULL},
    {"--plan", ARGUMENT_FLAG, offsetof(options, plan), 0, 0, NULL},
    RUN_ARGUMENTS(options),
};
static const arguments argument_table = {
    argument_list, sizeof argument_list / sizeof *argument_list, "one MODEL_DIR", 1};

static bool parse_arguments(options *o, int argc, char **argv, error *e) {
    memset(o, 0, sizeof *o);
    size_t n_models = 0;
    o->generate = 64, o->split = SIZE_MAX;
    o->sampling = sample_defaults();
    if (!run_options_default(&o->how, e) ||
        !arguments_parse(&argument_table, o, &o->model, &n_models, &o->help, argc, argv, e))
        return false;
    if (o->help) return true;
    if (!o->model) return error_set(e, "expected a MODEL_DIR");
    if (o->plan) return true;
    if (!o->tokens == !o->prompt) return error_set(e, "expected one of --tokens and --prompt");
    if (o->load && o->context > 0)
        return error_set(e, "expected one of --load-session and --context");
    if (o->draft > 0 && o->sampling.temperature > 0)
        return error_set(e, "--draft: expected temperature 0, found %g", o->sampling.temperature);
    if (o->draft > 0 && o->sampling.repetition_penalty != 1)
        return error_set(e, "--draft: expected a repetition penalty of 1, found %g",
                         o->sampling.repetition_penalty);
    if (o->depth_svg) o->show_depth = true;
    if (o->logits || o->show_depth) o->generate = 0;
    return true;
}

/* ---- Input ---- */

/* The model's tokenizer, if it brings one, stays open for the text that is generated. */
static bool read_prompt(const options *o, tokenizer *t, token_list *list, error *e) {
    if (tokenizer_is_in(o->model))
        return tokenizer_open(t, o->model, e) &&
               tokenizer_encode(t, o->prompt, strlen(o->prompt), TOKENIZER_SPECIAL, list, NULL, e);
    for (const char *c = o->prompt; *c; c++)
        if (!tokens_append(list, (unsigned char)*c, e)) return false;
    return true;
}

static bool read_input(const options *o, tokenizer *t, token_list *list, error *e) {
    if (!(o->tokens ? tokens_read(o->tokens, false, list, e) : read_prompt(o, t, list, e)))
        return false;
    return list->n > 0 || error_set(e, "%s: expected a token or more, found none",
                                    o->tokens ? o->tokens : "--prompt");
}

/* ---- Output files ---- */

/* A safetensors file of one tensor: hidden [layers][tokens][dim]. */
static bool write_hidden(const char *path, const float *hidden, size_t layers, size_t tokens,
                         size_t dim, error *e) {
    size_t dims[3] = {layers, tokens, dim};
    st_writer w;
    bool ok = st_writer_open(&w, path, e) && st_writer_add(&w, "hidden", ST_F32, dims, 3, e) &&
              st_writer_floats(&w, hidden, layers * tokens * dim, e);
    return st_writer_close(&w, ok, e);
}

/* ---- The run ---- */

/* Tokens whose logits are held at a time with --logits. */
#define LOGITS_BLOCK 64

typedef struct run {
    const options *o;
    hybrid_model model;
    parallel pool;
    hybrid_workspace work;
    hybrid_session session;
    token_list input; /* and with --draft what is generated */
    size_t prompt_tokens;
    tokenizer tokenizer; /* of a --prompt; closed if the model has none */
    tokenizer_stream text;
    token_list stops; /* ids that end a text; empty with --tokens */
    float *logits;    /* [LOGITS_BLOCK][vocab] with --logits, else [draft + 1][vocab] */
    float *hidden;    /* [layers + 1][input.n][hidden] with --dump-layers or --show-depth */
    float *depth;     /* [2 layers + 1][input.n][sources] with --show-depth */
    output out;       /* of --logits */
    sampler sampling;
    size_t session_bytes, workspace_bytes, other_bytes; /* allocated */
    double prompt_seconds, generate_seconds;
    size_t generated, passes, proposed, accepted; /* the last three with --draft */
    bool stopped;                                 /* by the end of text */
} run;

static double seconds(void) {
    struct timespec now;
    timespec_get(&now, TIME_UTC);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* a times b numbers of that size; none of the three is 0. */
static bool allocate(run *r, void **memory, size_t a, size_t b, size_t size, error *e) {
    size_t most = SIZE_MAX / 2 / size;
    *memory = a <= most / b ? malloc(a * b * size) : NULL;
    if (!*memory) return error_set(e, "no memory for %zu times %zu numbers", a, b);
    r->other_bytes += a * b * size;
    return true;
}

/* Session and workspace for all tokens that there will be. */
static bool prepare_session(run *r, error *e) {
    const options *o = r->o;
    hybrid_session_options kept;
    hybrid_workspace_options how;
    size_t past = o->context;
    if (o->load && !hybrid_saved_tokens(o->load, &past, e)) return false;
    if (past > SIZE_MAX / 4 || o->generate > SIZE_MAX / 2 - r->input.n - past)
        return error_set(e, "%zu tokens to generate after %zu cannot be counted", o->generate,
                         past);
    if (!parallel_open(&r->pool, o->how.threads, e)) return false;
    memset(&kept, 0, sizeof kept), memset(&how, 0, sizeof how);
    kept.capacity = how.capacity = past + r->input.n + o->generate;
    kept.cache = o->how.cache;
    kept.max_draft = o->draft > 0 ? o->draft + 1 : 0;
    /* No more than the input fills, so that what is announced is used; no bit depends on it. */
    how.block = r->input.n < HYBRID_BLOCK ? r->input.n : HYBRID_BLOCK;
    if (how.block < HYBRID_MIN_BLOCK) how.block = HYBRID_MIN_BLOCK;
    if (how.block < kept.max_draft) how.block = kept.max_draft;
    if (!run_options_apply(&o->how, &r->model, &r->pool, &how.run, e)) return false;
    r->session_bytes = hybrid_session_bytes(&r->model, &kept);
    r->workspace_bytes = hybrid_workspace_bytes(&r->model, &how);
    return hybrid_session_open(&r->session, &r->model, &kept, e) &&
           hybrid_workspace_open(&r->work, &r->model, &how, e) &&
           hybrid_check_tokens(&r->session, r->input.ids, r->input.n, e) &&
           (!o->load || hybrid_session_load(&r->session, o->load, e)) &&
           (o->context == 0 || hybrid_session_fill(&r->session, o->context, o->sampling.seed, e));
}

/* --plan: a prompt of a workspace's block or more, after --context tokens. */
static bool print_plan(run *r, error *e) {
    const options *o = r->o;
    hybrid_session_options kept;
    hybrid_workspace_options how;
    memset(&kept, 0, sizeof kept), memset(&how, 0, sizeof how);
    if (!hybrid_open(&r->model, o->model, e) || !parallel_open(&r->pool, o->how.threads, e))
        return false;
    kept.capacity = how.capacity = o->context;
    kept.cache = o->how.cache;
    kept.max_draft = o->draft > 0 ? o->draft + 1 : 0;
    how.run.pool = &r->pool;
    plan_print(&r->model, &kept, &how, stdout);
    return output_flush_standard(e);
}

static bool prepare(run *r, error *e) {
    const options *o = r->o;
    if (!run_options_open(&o->how, &r->model, o->model, e) ||
        !read_input(o, &r->tokenizer, &r->input, e) || !prepare_session(r, e))
        return false;
    const hybrid_config *c = &r->model.config;
    void *logits, *hidden = NULL, *depth = NULL;
    size_t rows = o->logits ? LOGITS_BLOCK : o->draft + 1;
    bool ok = allocate(r, &logits, rows, c->vocab_size, sizeof(float), e);
    r->logits = (float *)logits;
    if (!ok || !sampler_open(&r->sampling, &o->sampling, c->vocab_size, e)) return false;
    r->other_bytes += sampler_bytes(&o->sampling, c->vocab_size);
    sampler_read(&r->sampling, r->input.ids, r->input.n);
    if (o->prompt && !o->ignore_stop && !stop_read(o->model, &r->tokenizer, &r->stops, e))
        return false;
    if (o->dump || o->show_depth)
        ok = allocate(r, &hidden, (c->n_layers + 1) * c->hidden_size, r->input.n, sizeof(float), e);
    r->hidden = (float *)hidden;
    size_t sources = hybrid_depth_sources(c);
    if (o->show_depth && sources > 0)
        ok = ok &&
             allocate(r, &depth, (2 * c->n_layers + 1) * sources, r->input.n, sizeof(float), e);
    r->depth = (float *)depth;
    return ok;
}

/* What the run will have in memory when it ends, but for the program itself and weights that no
 * token needed: experts that were not chosen, rows of the embedding. */
static void announce(const run *r) {
    double weights = (double)r->model.mapped_bytes;
    double others = (double)r->other_bytes + (double)(r->model.n_vectors * sizeof(float)) +
                    (double)(r->input.room * sizeof *r->input.ids) +
                    (double)tokenizer_memory(&r->tokenizer);
    double session = (double)r->session_bytes, workspace = (double)r->workspace_bytes;
    fprintf(stderr,
            "memory: weights %.0f bytes mapped, session %.0f bytes, workspace %.0f bytes, "
            "others %.0f bytes: %.0f bytes in all\n",
            weights, session, workspace, others, weights + session + workspace + others);
}

/* One piece of the input, of LOGITS_BLOCK tokens at most with --logits. */
static bool feed_piece(run *r, size_t first, size_t n, error *e) {
    const hybrid_config *c = &r->model.config;
    hybrid_want want;
    memset(&want, 0, sizeof want);
    if (r->o->logits)
        want.logits = r->logits;
    else if (first + n == r->input.n)
        want.last_logits = r->logits;
    if (r->hidden) want.hidden = r->hidden + first * c->hidden_size;
    want.hidden_stride = r->input.n * c->hidden_size;
    if (r->depth) want.depth = r->depth + first * hybrid_depth_sources(c);
    want.depth_stride = r->input.n * hybrid_depth_sources(c);
    if (!hybrid_forward(&r->work, &r->session, r->input.ids + first, n, &want, e)) return false;
    return !r->o->logits || output_floats(&r->out, r->logits, n * c->vocab_size, e);
}

/* The input in slices of --split tokens. With --logits a slice goes in pieces: this bounds the
 * logits held at a time and changes no bit. */
static bool feed(run *r, error *e) {
    double start = seconds();
    for (size_t first = 0, slice = 0; first < r->input.n;) {
        size_t left = r->input.n - first;
        if (left > r->o->split - slice) left = r->o->split - slice;
        size_t n = r->o->logits ? hybrid_piece(left, LOGITS_BLOCK) : left;
        if (!feed_piece(r, first, n, e)) return false;
        first += n;
        slice = slice + n < r->o->split ? slice + n : 0;
    }
    r->prompt_seconds = seconds() - start;
    r->prompt_tokens = r->input.n;
    return true;
}

/* The text of a generated token; of a character in several, once it is whole. */
static void emit_text(run *r, uint32_t id) {
    bool has_tokenizer = tokenizer_memory(&r->tokenizer) > 0;
    char byte = (char)(unsigned char)id;
    size_t length = 1;
    const char *text = id < 256 ? &byte : NULL;
    if (has_tokenizer) text = tokenizer_stream_push(&r->text, &r->tokenizer, id, &length);
    if (text)
        fwrite(text, 1, length, stdout);
    else
        printf("<%lu>", (unsigned long)id);
}

/* A generated token, at once. False where it is the end of the text, or nobody takes it: the stream
 * remembers that. */
static bool emit(run *r, uint32_t id) {
    r->stopped = stop_has(&r->stops, id);
    if (r->stopped) return false;
    if (r->o->tokens)
        printf("%s%lu", r->generated == 0 ? "" : " ", (unsigned long)id);
    else
        emit_text(r, id);
    fflush(stdout);
    r->generated++;
    return !ferror(stdout);
}

/* Ends what was generated: a line of ids, but a text is its bytes and no more. */
static void emit_end(run *r) {
    size_t length;
    const char *text = tokenizer_stream_flush(&r->text, &length);
    fwrite(text, 1, length, stdout);
    if (r->o->tokens && r->o->generate > 0) putchar('\n');
}

/* One token after the other. */
static bool generate_single(run *r, error *e) {
    hybrid_want want;
    memset(&want, 0, sizeof want);
    want.last_logits = r->logits;
    for (size_t i = 0; i < r->o->generate; i++) {
        uint32_t id = sampler_next(&r->sampling, r->logits);
        if (!emit(r, id)) break;
        if (i + 1 < r->o->generate && !hybrid_forward(&r->work, &r->session, &id, 1, &want, e))
            return false;
    }
    /* release frees the logits. NOLINTNEXTLINE(clang-analyzer-unix.Malloc) */
    return true;
}

/* How many of n ids in a row the model would have chosen itself: the first was, row i of the logits
 * decides about ids[i + 1]. */
static size_t agreed(const float *logits, size_t vocab, const uint32_t *ids, size_t n) {
    size_t m = 1;
    while (m < n && sample_most_likely(logits + (m - 1) * vocab, vocab) == ids[m]) m++;
    return m;
}

/* The sure next token and guesses behind it in one pass through the model. Tokens that are read are
 * appended to the input, which is what guesses come from. */
static bool generate_drafting(run *r, error *e) {
    size_t vocab = r->model.config.vocab_size, left = r->o->generate;
    uint32_t ids[MOST_DRAFT + 1];
    hybrid_want want;
    memset(&want, 0, sizeof want);
    want.logits = r->logits;
    while (left > 0) {
        size_t room = r->o->draft < left - 1 ? r->o->draft : left - 1, n, m;
        ids[0] = sample_most_likely(r->logits, vocab);
        if (!emit(r, ids[0]) || left == 1) break; /* nobody asks what would follow */
        if (!tokens_append(&r->input, ids[0], e)) return false;
        n = 1 + draft_ngram(r->input.ids, r->input.n, room, ids + 1);
        if (!hybrid_verify(&r->work, &r->session, ids, n, &want, e)) return false;
        m = agreed(r->logits, vocab, ids, n);
        r->passes++, r->proposed += n - 1, r->accepted += m - 1;
        for (size_t i = 1; i < m; i++) {
            if (!emit(r, ids[i]))
                m = i; /* what follows the end was not asked for */
            else if (!tokens_append(&r->input, ids[i], e))
                return false;
        }
        if (!hybrid_commit(&r->work, &r->session, m, e)) return false;
        if (r->stopped) break;
        memmove(r->logits, r->logits + (m - 1) * vocab, vocab * sizeof *r->logits);
        left -= m;
    }
    return true;
}

static bool generate(run *r, error *e) {
    double start = seconds();
    if (!(r->o->draft > 0 ? generate_drafting(r, e) : generate_single(r, e))) return false;
    emit_end(r);
    r->generate_seconds = seconds() - start;
    return output_flush_standard(e);
}

static void report_speed(const char *what, size_t n, double time) {
    fprintf(stderr, "%s: %zu tokens in %.3f s, %.1f tokens/s\n", what, n, time,
            time > 0 ? (double)n / time : 0.0);
}

static void report(const run *r) {
    size_t n = r->session.n_tokens;
    hybrid_sizes sizes = hybrid_memory_sizes(&r->model, n, r->o->how.cache);
    report_speed("prompt", r->prompt_tokens, r->prompt_seconds);
    if (r->o->generate > 0) report_speed("generation", r->generated, r->generate_seconds);
    if (r->stopped) fprintf(stderr, "generation: the text ends\n");
    if (r->o->draft > 0)
        fprintf(stderr, "drafts: %zu of %zu tokens accepted, in %zu passes\n", r->accepted,
                r->proposed, r->passes);
    fprintf(stderr, "memory: KDA state %.0f bytes, convolution windows %.0f bytes\n", sizes.states,
            sizes.windows);
    fprintf(stderr,
            "memory: latent cache %.0f bytes for %zu tokens, %.0f bytes if every layer were full "
            "attention\n",
            sizes.latents, n, sizes.full_attention);
}

static bool show_depth(const run *r, error *e) {
    depth_report report = {&r->model.config, r->input.n, r->hidden, r->depth};
    if (!depth_print(&report, e)) return false;
    return !r->o->depth_svg || depth_draw(&report, r->o->depth_svg, e);
}

static bool run_all(run *r, error *e) {
    const hybrid_config *c = &r->model.config;
    if (r->o->plan) return print_plan(r, e);
    if (!prepare(r, e)) return false;
    if (r->o->logits && !output_open(&r->out, r->o->logits, e)) return false;
    announce(r);
    bool ok = feed(r, e);
    if (r->o->logits) ok = output_close(&r->out, ok, e);
    if (!ok) return false;
    if (r->o->dump &&
        !write_hidden(r->o->dump, r->hidden, c->n_layers + 1, r->input.n, c->hidden_size, e))
        return false;
    if (r->o->show_depth && !show_depth(r, e)) return false;
    if (!generate(r, e)) return false;
    if (r->o->save && !hybrid_session_save(&r->session, r->o->save, e)) return false;
    report(r);
    return true;
}

static void release(run *r) {
    hybrid_session_close(&r->session);
    hybrid_workspace_close(&r->work);
    parallel_close(&r->pool);
    hybrid_close(&r->model);
    tokenizer_close(&r->tokenizer);
    free(r->input.ids);
    free(r->logits);
    free(r->hidden);
    free(r->depth);
    free(r->stops.ids);
    sampler_close(&r->sampling);
}

int main(int argc, char **argv) {
    options o;
    error e;
    run r;
    if (!parse_arguments(&o, argc, argv, &e)) {
        fprintf(stderr, "generate: %s (--help tells more)\n", e.text);
        return 2;
    }
    if (o.help) return arguments_help("generate", help);
    memset(&r, 0, sizeof r);
    r.o = &o;
    signals_catch("generate");
    signals_watch(&r.model.checkpoint);
    bool ok = run_all(&r, &e);
    if (!ok) fprintf(stderr, "generate: %s\n", e.text);
    release(&r);
    return ok ? 0 : 1;
}
