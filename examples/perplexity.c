/* perplexity.c - how well a model foresees a file: bits per byte, or per token.
 *
 *     build/perplexity MODEL_DIR kjv.txt --from 4079384
 *     build/perplexity MODEL_DIR ids.txt --tokens --window 4096
 *
 * Tokens 1, 2, ... are scored, each once, in windows that start `stride` apart. A window predicts
 * the `window` tokens behind its first one. The first window scores all of them, every other its
 * last `stride`: so each token, but for those of the first window, is predicted from at least
 * window - stride tokens before it. Token 0 has nothing before it and is not scored.
 * examples/train/text.py scores the same way.
 *
 * Exit status: 0, or 1 for bad input, or 2 for bad usage, with one line on stderr.
 */
#include "evaluate.h"

#include "arguments.h"
#include "output.h"
#include "signals.h"
#include "tokens.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static const char help[] =
    "usage: perplexity MODEL_DIR FILE [options]\n"
    "\n"
    "Bits per byte of FILE, whose bytes are the model's tokens; - is standard input.\n"
    "\n"
    "  --tokens        FILE holds token ids, separated by white space: bits per token\n"
    "  --from N        score as if the file began at byte (or token) N (default 0)\n"
    "  --to N          and as if it ended before byte (or token) N (default: its end)\n"
    "  --window N      tokens that a window predicts (default 512)\n"
    "  --stride N      tokens from one window's start to the next, at most the window\n"
    "                  (default: half of it)\n"
    "  --threads N     at least 1 (default: one a processor, at most 32)\n"
    "  --help          this text\n"
    "\n"
    "Progress goes to standard error, every 5 seconds. Exit status: 1 for bad input, 2 for\n"
    "bad usage.\n";

/* Logits are taken from the model for so many tokens at a time. */
#define PIECE 64
#define PROGRESS_SECONDS 5

typedef struct options {
    const char *model, *file;
    size_t window, stride, from, to, threads;
    bool tokens, help;
} options;

static const argument argument_list[] = {
    {"--tokens", ARGUMENT_FLAG, offsetof(options, tokens), 0, 0, NULL},
    {"--from", ARGUMENT_SIZE, offsetof(options, from), 0, 0, NULL},
    {"--to", ARGUMENT_SIZE, offsetof(options, to), 0, 0, NULL},
    {"--window", ARGUMENT_SIZE, offsetof(options, window), 1, 0, NULL},
    {"--stride", ARGUMENT_SIZE, offsetof(options, stride), 1, 0, NULL},
    {"--threads", ARGUMENT_SIZE, offsetof(options, threads), 1, PARALLEL_MAX_THREADS, NULL},
};
static const arguments argument_table = {
    argument_list, sizeof argument_list / sizeof *argument_list, "MODEL_DIR and FILE", 2};

static bool parse_arguments(options *o, int argc, char **argv, error *e) {
    const char *names[2] = {NULL, NULL};
    size_t n_names = 0;
    memset(o, 0, sizeof *o);
    o->window = 512, o->to = SIZE_MAX, o->threads = parallel_default();
    if (!arguments_parse(&argument_table, o, names, &n_names, &o->help, argc, argv, e))
        return false;
    o->model = names[0], o->file = names[1];
    if (o->help) return true;
    if (n_names < 2) return error_set(e, "expected MODEL_DIR and FILE, found %zu of them", n_names);
    if (o->stride == 0) o->stride = (o->window + 1) / 2;
    if (o->stride > o->window)
        return error_set(e, "--stride: expected at most the window, %zu, found %zu", o->window,
                         o->stride);
    return true;
}

/* ---- Scoring ---- */

/* The part of a file that is scored, and how far that is. */
typedef struct scoring {
    const options *o;
    evaluator model;
    token_list file;
    const uint32_t *ids; /* [n]: from --from to --to */
    size_t n;
    float *logits; /* [PIECE][vocab] */
    double bits;
    size_t n_scored;
    time_t told; /* when progress was last */
} scoring;

/* -log2 of the probability that logits give to an id. */
static double bits_of(const float *logits, size_t vocab, uint32_t id) {
    double largest = -HUGE_VAL, sum = 0;
    for (size_t i = 0; i < vocab; i++) largest = fmax(largest, (double)logits[i]);
    for (size_t i = 0; i < vocab; i++) sum += exp((double)logits[i] - largest);
    return (log(sum) + largest - (double)logits[id]) / log(2);
}

/* Reads n tokens from place `first` on and scores what follows each of them. */
static bool score(scoring *s, size_t first, size_t n, error *e) {
    size_t vocab = s->model.model.config.vocab_size;
    for (size_t count; n > 0; first += count, n -= count) {
        count = n < PIECE ? n : PIECE;
        if (!evaluator_read(&s->model, s->ids + first, count, s->logits, e)) return false;
        for (size_t t = 0; t < count; t++) {
            double bits = bits_of(s->logits + t * vocab, vocab, s->ids[first + t + 1]);
            if (!isfinite(bits))
                return error_set(e, "%s: the model's logits for token %zu of %s are not finite",
                                 s->o->model, s->o->from + first + t + 1, s->o->file);
            s->bits += bits;
        }
        s->n_scored += count;
    }
    return true;
}

static void tell(scoring *s) {
    time_t now = time(NULL);
    if (now - s->told < PROGRESS_SECONDS) return;
    s->told = now;
    fprintf(stderr, "perplexity: %zu of %zu scored, %.4f bits each\n", s->n_scored, s->n - 1,
            s->bits / (double)s->n_scored);
}

static bool score_all(scoring *s, error *e) {
    size_t window = s->o->window, stride = s->o->stride;
    for (size_t start = 0, scored = 0; scored < s->n - 1; start += stride) {
        size_t end = s->n - 1 - start < window ? s->n - 1 : start + window; /* last one scored */
        size_t known = scored - start; /* read without a score */
        if (!evaluator_reset(&s->model, e) ||
            !evaluator_read(&s->model, s->ids + start, known, NULL, e) ||
            !score(s, scored, end - scored, e))
            return false;
        scored = end;
        tell(s);
    }
    return true;
}

/* ---- The run ---- */

static bool read_file(scoring *s, error *e) {
    const options *o = s->o;
    if (!o->tokens && !tokens_are_bytes(o->model, "a file of text", "--tokens", e)) return false;
    if (!tokens_read(o->file, !o->tokens, &s->file, e)) return false;
    size_t to = o->to < s->file.n ? o->to : s->file.n;
    s->n = o->from < to ? to - o->from : 0;
    s->ids = s->n ? s->file.ids + o->from : NULL;
    return s->n >= 2 || error_set(e, "%s: expected 2 %s or more from %zu on, found %zu", o->file,
                                  o->tokens ? "tokens" : "bytes", o->from, s->n);
}

static bool prepare(scoring *s, error *e) {
    const options *o = s->o;
    if (!read_file(s, e)) return false;
    size_t capacity = o->window < s->n - 1 ? o->window : s->n - 1;
    if (!evaluator_open(&s->model, o->model, capacity, o->threads, e)) return false;
    size_t vocab = s->model.model.config.vocab_size;
    if (!o->tokens && vocab != 256)
        return error_set(e,
                         "%s: expected vocab_size 256, a token for each byte of %s, found %zu; "
                         "give ids with --tokens",
                         o->model, o->file, vocab);
    for (size_t i = 0; i < s->n; i++)
        if (s->ids[i] >= vocab)
            return error_set(e, "%s: token %zu: expected an id below vocab_size %zu, found %lu",
                             o->file, o->from + i + 1, vocab, (unsigned long)s->ids[i]);
    s->logits = (float *)malloc(PIECE * vocab * sizeof *s->logits);
    s->told = time(NULL);
    return s->logits || error_set(e, "no memory for %zu times %zu numbers", (size_t)PIECE, vocab);
}

static bool run_all(scoring *s, error *e) {
    const options *o = s->o;
    if (!prepare(s, e) || !score_all(s, e)) return false;
    double bits = s->bits / (double)s->n_scored;
    printf("%.4f bits per %s: %zu of %s, window %zu, stride %zu\n", bits,
           o->tokens ? "token" : "byte", s->n_scored, o->file, o->window, o->stride);
    return output_flush_standard(e);
}

int main(int argc, char **argv) {
    options o;
    error e;
    scoring s;
    if (!parse_arguments(&o, argc, argv, &e)) {
        fprintf(stderr, "perplexity: %s (--help tells more)\n", e.text);
        return 2;
    }
    if (o.help) return arguments_help("perplexity", help);
    memset(&s, 0, sizeof s);
    s.o = &o;
    signals_catch("perplexity");
    signals_watch(&s.model.model.checkpoint);
    bool ok = run_all(&s, &e);
    if (!ok) fprintf(stderr, "perplexity: %s\n", e.text);
    evaluator_close(&s.model);
    free(s.logits);
    free(s.file.ids);
    return ok ? 0 : 1;
}
