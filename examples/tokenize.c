/* tokenize.c - the token ids of a file, for --tokens of the other programs, and how fast they come.
 *
 *     build/tokenize MODEL_DIR book.txt >ids.txt
 *
 * Exit status: 0, or 1 for bad input, or 2 for bad usage, with one line on stderr.
 */
#include "arguments.h"
#include "output.h"
#include "tokenizer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const char help[] =
    "usage: tokenize MODEL_DIR FILE [options]\n"
    "\n"
    "The token ids of a text, by tiktoken.model and tokenizer_config.json of MODEL_DIR, with a\n"
    "space between. How long it took goes to standard error.\n"
    "\n"
    "  --special       names of special tokens in the text are these, not text\n"
    "  --repeat N      encode N times and tell the time of each (default 1)\n"
    "  --help          this text\n"
    "\n"
    "Exit status: 1 for bad input, 2 for bad usage.\n";

typedef struct options {
    const char *model, *file;
    size_t repeat;
    bool special, help;
} options;

static const argument argument_list[] = {
    {"--special", ARGUMENT_FLAG, offsetof(options, special), 0, 0, NULL},
    {"--repeat", ARGUMENT_SIZE, offsetof(options, repeat), 1, 0, NULL},
};
static const arguments argument_table = {
    argument_list, sizeof argument_list / sizeof *argument_list, "MODEL_DIR and FILE", 2};

static bool parse_arguments(options *o, int argc, char **argv, error *e) {
    const char *names[2] = {NULL, NULL};
    size_t n_names = 0;
    memset(o, 0, sizeof *o);
    o->repeat = 1;
    if (!arguments_parse(&argument_table, o, names, &n_names, &o->help, argc, argv, e))
        return false;
    o->model = names[0], o->file = names[1];
    return o->help || n_names == 2 ||
           error_set(e, "expected MODEL_DIR and FILE, found %zu of them", n_names);
}

static double seconds(void) {
    struct timespec now;
    timespec_get(&now, TIME_UTC);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static bool encode(const options *o, const tokenizer *t, const char *text, size_t length,
                   token_list *ids, error *e) {
    for (size_t i = 0; i < o->repeat; i++) {
        double start = seconds();
        ids->n = 0;
        if (!tokenizer_encode(t, text, length, o->special ? TOKENIZER_SPECIAL : 0, ids, NULL, e))
            return false;
        double time = seconds() - start;
        fprintf(stderr, "encoded %zu bytes to %zu ids in %.4f s, %.1f MB/s\n", length, ids->n, time,
                time > 0 ? 1e-6 * (double)length / time : 0.0);
    }
    return true;
}

static bool print(const token_list *ids, error *e) {
    for (size_t i = 0; i < ids->n; i++) printf("%s%lu", i ? " " : "", (unsigned long)ids->ids[i]);
    if (ids->n > 0) putchar('\n');
    return output_flush_standard(e);
}

static bool run_all(const options *o, error *e) {
    tokenizer t;
    token_list ids = {NULL, 0, 0};
    char *text = NULL;
    size_t length;
    double start = seconds();
    if (!tokenizer_open(&t, o->model, e)) return false;
    fprintf(stderr, "opened %zu tokens in %.4f s\n", tokenizer_count(&t), seconds() - start);
    bool ok = json_read_file(o->file, SIZE_MAX / 2, &text, &length, e) &&
              encode(o, &t, text, length, &ids, e) && print(&ids, e);
    free(text);
    free(ids.ids);
    tokenizer_close(&t);
    return ok;
}

int main(int argc, char **argv) {
    options o;
    error e;
    if (!parse_arguments(&o, argc, argv, &e)) {
        fprintf(stderr, "tokenize: %s (--help tells more)\n", e.text);
        return 2;
    }
    if (o.help) return arguments_help("tokenize", help);
    if (run_all(&o, &e)) return 0;
    fprintf(stderr, "tokenize: %s\n", e.text);
    return 1;
}
