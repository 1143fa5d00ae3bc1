/* chat.c - a conversation with a checkpoint, in the message format that its tokenizer tells.
 *
 *     build/chat MODEL_DIR --temperature 0.8 --system "Answer in one sentence."
 *     printf 'Who was Noah?\nAnd his sons?\n' | build/chat MODEL_DIR
 *
 * The session goes on from turn to turn: only what is new is read. What it has read is never taken
 * back, which a KDA state could not: an answer that is cut short stays as far as it went, and is
 * closed as its format closes one.
 *
 * Messages are in chat_format.h, the model in hybrid.h. Exit status: 0, or 1 for bad input, or 2
 * for bad usage, with one line on stderr.
 */
#include "arguments.h"
#include "chat_format.h"
#include "hybrid.h"
#include "output.h"
#include "parallel.h"
#include "run_options.h"
#include "sample.h"
#include "saved.h"
#include "signals.h"
#include "stop.h"
#include "tokenizer.h"
#include "tokens.h"

#include <errno.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if OUTPUT_POSIX
#include <sys/select.h>
#include <unistd.h>
#endif

static const char help[] =
    "usage: chat MODEL_DIR [options]\n"
    "\n"
    "MODEL_DIR holds config.json, model.safetensors (or shards with an index) and a\n"
    "tokenizer with the special tokens of a chat. Each line of standard input is a\n"
    "message, in which names of special tokens are ordinary text; answers go to standard\n"
    "output, thoughts and all else to standard error.\n"
    "\n"
    "  --system TEXT       begin the conversation with this message of the system\n"
    "  --think             in the format that has it, thinking mode: an answer begins with\n"
    "                      a thought. Its effort is the model's own choice: the message\n"
    "                      that would set a level is not known here\n"
    "  --generate N        tokens of an answer at most (default 2048)\n"
    "  --capacity N        tokens of a conversation, for which memory is taken (default\n"
    "                      8192)\n"
    "\n"
    "choice of each token\n" SAMPLE_HELP "\n"
    "how to run\n" RUN_HELP "  --help              this text\n"
    "\n"
    "Lines that begin with a slash are commands; /help lists them. A line that begins with\n"
    "two is a message that begins with one. At a terminal, Ctrl-C stops an answer.\n"
    "Exit status: 1 for bad input, 2 for bad usage.\n";

static const char commands[] =
    "/save FILE   save the conversation: the session in FILE, its tokens' ids in FILE.tokens\n"
    "/load FILE   go on with a saved one, of this model and --cache\n"
    "/reset       begin a new conversation\n"
    "/help        this text\n"
    "/quit        leave, as the end of input does\n"
    "Ctrl-C stops an answer; after that, or twice, it leaves.\n";

/* ---- Arguments ---- */

typedef struct options {
    const char *model, *system;
    size_t generate, capacity;
    run_options how;
    sample_options sampling;
    bool think, help;
} options;

static const argument argument_list[] = {
    {"--system", ARGUMENT_TEXT, offsetof(options, system), 0, 0, NULL},
    {"--think", ARGUMENT_FLAG, offsetof(options, think), 0, 0, NULL},
    {"--generate", ARGUMENT_SIZE, offsetof(options, generate), 1, 0, NULL},
    {"--capacity", ARGUMENT_SIZE, offsetof(options, capacity), 1, 0, NULL},
    SAMPLE_ARGUMENTS(options),
    RUN_ARGUMENTS(options),
};
static const arguments argument_table = {
    argument_list, sizeof argument_list / sizeof *argument_list, "one MODEL_DIR", 1};

static bool parse_arguments(options *o, int argc, char **argv, error *e) {
    size_t n_models = 0;
    memset(o, 0, sizeof *o);
    o->generate = 2048, o->capacity = 8192;
    o->sampling = sample_defaults();
    if (!run_options_default(&o->how, e) ||
        !arguments_parse(&argument_table, o, &o->model, &n_models, &o->help, argc, argv, e))
        return false;
    return o->help || o->model || error_set(e, "expected a MODEL_DIR");
}

/* ---- Interrupts ---- */

/* SIGINT is blocked, in the pool's threads too, but where the program asks for it: between the
 * tokens of an answer, and while it waits for input. So none comes in between and is lost. */
static volatile sig_atomic_t interrupts; /* since the last line of input */

static void on_interrupt(int number) {
    interrupts++;
#if !OUTPUT_POSIX
    signal(number, on_interrupt); /* standard C may forget the handler */
#else
    (void)number;
#endif
}

#if OUTPUT_POSIX
static sigset_t open_mask; /* lets SIGINT through */

static void catch_interrupts(void) {
    struct sigaction action;
    sigset_t interrupt;
    memset(&action, 0, sizeof action);
    action.sa_handler = on_interrupt;
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
    sigemptyset(&interrupt);
    sigaddset(&interrupt, SIGINT);
    pthread_sigmask(SIG_BLOCK, &interrupt, &open_mask);
    sigdelset(&open_mask, SIGINT);
}

static bool interrupted(void) {
    sigset_t blocked;
    pthread_sigmask(SIG_SETMASK, &open_mask, &blocked);
    pthread_sigmask(SIG_SETMASK, &blocked, NULL);
    return interrupts > 0;
}
#else
static void catch_interrupts(void) {
    signal(SIGINT, on_interrupt);
}

static bool interrupted(void) {
    return interrupts > 0;
}
#endif

static bool is_terminal(void) {
#if OUTPUT_POSIX
    return isatty(STDIN_FILENO) == 1;
#else
    return false;
#endif
}

/* ---- The conversation ---- */

typedef struct chat {
    const options *o;
    bool interactive;
    hybrid_model model;
    tokenizer tokenizer;
    chat_format format;
    parallel pool;
    hybrid_workspace work;
    hybrid_session session;
    sampler sampling;
    token_list stops;
    token_list ids; /* the conversation; the session has read the first session.n_tokens */
    float *logits;  /* [vocab]: what follows those */
    chat_answer answer;
    tokenizer_stream text; /* of the answer */
    chat_part part;        /* of the answer, that `text` belongs to */
    struct {
        char *bytes;
        size_t n, room;
    } line;
    struct {
        char bytes[4096];
        size_t at, n;
    } input; /* read ahead of the line */
} chat;

static bool open_chat(chat *c, error *e) {
    const options *o = c->o;
    hybrid_session_options kept;
    hybrid_workspace_options how;
    memset(&kept, 0, sizeof kept), memset(&how, 0, sizeof how);
    if (!run_options_open(&o->how, &c->model, o->model, e)) return false;
    if (!tokenizer_is_in(o->model))
        return error_set(e, "%s: expected a tokenizer, tiktoken.model, found none", o->model);
    size_t vocab = c->model.config.vocab_size;
    if (!tokenizer_open(&c->tokenizer, o->model, e) ||
        !chat_format_open(&c->format, &c->tokenizer, o->model, o->think, e) ||
        !stop_read(o->model, &c->tokenizer, &c->stops, e))
        return false;
    if (tokenizer_count(&c->tokenizer) > vocab)
        return error_set(e,
                         "%s: expected at most vocab_size, %zu, tokens in tiktoken.model and "
                         "special ones, found %zu",
                         o->model, vocab, tokenizer_count(&c->tokenizer));
    kept.capacity = how.capacity = o->capacity;
    kept.cache = o->how.cache;
    c->logits = (float *)malloc(vocab * sizeof *c->logits);
    if (!c->logits) return error_set(e, "no memory for %zu logits", vocab);
    catch_interrupts(); /* before there are threads, which do as this one does */
    return parallel_open(&c->pool, o->how.threads, e) &&
           run_options_apply(&o->how, &c->model, &c->pool, &how.run, e) &&
           hybrid_session_open(&c->session, &c->model, &kept, e) &&
           hybrid_workspace_open(&c->work, &c->model, &how, e) &&
           sampler_open(&c->sampling, &o->sampling, vocab, e);
}

static void close_chat(chat *c) {
    hybrid_session_close(&c->session);
    hybrid_workspace_close(&c->work);
    parallel_close(&c->pool);
    hybrid_close(&c->model);
    tokenizer_close(&c->tokenizer);
    sampler_close(&c->sampling);
    free(c->stops.ids), free(c->ids.ids), free(c->logits), free(c->line.bytes);
}

static void announce(const chat *c) {
    double session = (double)hybrid_session_bytes(&c->model, &c->session.options);
    double workspace = (double)hybrid_workspace_bytes(&c->model, &c->work.options);
    fprintf(stderr,
            "messages in %s, a conversation of at most %zu tokens\n"
            "memory: weights %.0f bytes mapped, session %.0f bytes, workspace %.0f bytes\n",
            c->format.kind == CHAT_TAGS ? "<|open|> tags" : "<|im_user|> turns", c->o->capacity,
            (double)c->model.mapped_bytes, session, workspace);
    if (c->interactive) fputs("/help lists commands\n", stderr);
}

/* Reads what the session has not read yet; if `stoppable`, until an interrupt. What is left then
 * comes first the next time. */
static bool read_on(chat *c, bool stoppable, error *e) {
    hybrid_want want;
    memset(&want, 0, sizeof want);
    while (c->session.n_tokens < c->ids.n && !(stoppable && interrupted())) {
        size_t first = c->session.n_tokens, left = c->ids.n - first;
        size_t n = hybrid_piece(left, HYBRID_BLOCK);
        want.last_logits = n == left ? c->logits : NULL;
        sampler_read(&c->sampling, c->ids.ids + first, n);
        if (!hybrid_forward(&c->work, &c->session, c->ids.ids + first, n, &want, e)) return false;
    }
    return true;
}

static bool forget(chat *c, error *e) {
    c->ids.n = 0;
    sampler_forget(&c->sampling);
    return hybrid_session_reset(&c->session, e);
}

/* ---- Answers ---- */

static FILE *stream_of(chat_part part) {
    return part == CHAT_SPOKEN ? stdout : stderr;
}

static void flush_text(chat *c) {
    size_t length;
    const char *rest = tokenizer_stream_flush(&c->text, &length);
    fwrite(rest, 1, length, stream_of(c->part));
    fflush(stream_of(c->part));
}

/* A token of the answer, at once; of a character in several, once it is whole. */
static void show(chat *c, uint32_t id) {
    size_t length = 0;
    chat_part part = chat_answer_read(&c->answer, &c->format, id);
    if (part == CHAT_MARKUP) return;
    if (part != c->part) {
        flush_text(c);
        if (c->part == CHAT_UNSAID) putc('\n', stderr);
        c->part = part;
    }
    const char *text = tokenizer_stream_push(&c->text, &c->tokenizer, id, &length);
    if (text)
        fwrite(text, 1, length, stream_of(part));
    else
        fprintf(stream_of(part), "<%lu>", (unsigned long)id);
    fflush(stream_of(part));
}

/* The answer, token by token, to the logits of what was read. *ended: by its end marker. */
static bool generate(chat *c, bool *ended, error *e) {
    const char *why = NULL;
    size_t n = 0;
    while (!interrupted() && !why && !ferror(stdout)) {
        uint32_t id = sampler_next(&c->sampling, c->logits);
        bool is_end = id == c->format.end;
        if (!is_end && stop_has(&c->stops, id)) return true;
        if (!tokens_append(&c->ids, id, e)) return false;
        if (is_end) return *ended = true;
        show(c, id);
        if (!read_on(c, false, e)) return false;
        if (++n == c->o->generate) why = "--generate";
        if (c->ids.n + chat_answer_reserve(&c->answer, &c->format) >= c->o->capacity)
            why = "the end of the conversation's --capacity";
    }
    flush_text(c);
    if (why) fprintf(stderr, "\n[cut off by %s]\n", why);
    return true;
}

/* A message and what makes the model answer, at the end of the ids. */
static bool append_message(chat *c, const char *text, size_t length, error *e) {
    const char *system = c->ids.n == 0 ? c->o->system : NULL;
    return (!system || chat_message(&c->format, CHAT_SYSTEM, system, strlen(system), &c->ids, e)) &&
           chat_message(&c->format, CHAT_USER, text, length, &c->ids, e) &&
           chat_begin_answer(&c->format, &c->ids, e);
}

static bool append_fitting(chat *c, const char *text, size_t length, error *e) {
    size_t before = c->ids.n;
    chat_answer_begin(&c->answer, &c->format);
    bool ok = append_message(c, text, length, e);
    size_t need = c->ids.n + chat_answer_reserve(&c->answer, &c->format) + 1;
    if (ok && need > c->o->capacity)
        ok = error_set(e,
                       "the message does not fit: the conversation has %zu tokens, would need %zu "
                       "and --capacity is %zu; /reset begins a new one",
                       before, need, c->o->capacity);
    if (!ok) c->ids.n = before;
    return ok;
}

/* A message of the user and its answer. */
static bool take_turn(chat *c, const char *text, size_t length, error *e) {
    bool ended = false;
    if (!append_fitting(c, text, length, e)) return false;
    c->part = c->o->think ? CHAT_UNSAID : CHAT_SPOKEN;
    bool ok = read_on(c, true, e), whole = c->session.n_tokens == c->ids.n;
    ok = ok && (!whole || generate(c, &ended, e)) &&
         (ended || chat_answer_close(&c->answer, &c->format, &c->ids, e)) && read_on(c, !whole, e);
    flush_text(c);
    putchar('\n');
    return output_flush_standard(e) && ok;
}

/* ---- Saved conversations ---- */

/* The ids stand beside the session: what the penalty looks at, and what the session must be at the
 * end of, a whole message. */
static bool write_tokens(const chat *c, output *out, error *e) {
    char text[16];
    for (size_t i = 0; i < c->ids.n; i++) {
        int n = snprintf(text, sizeof text, "%lu\n", (unsigned long)c->ids.ids[i]);
        if (!output_bytes(out, text, (size_t)n, e)) return false;
    }
    return output_flush(out, e);
}

static bool tokens_path(char *path, size_t size, const char *name, error *e) {
    int n = snprintf(path, size, "%s.tokens", name);
    return (size_t)n < size || error_set(e, "%.60s...: expected a shorter path", name);
}

/* What there is to fail comes before either file has its name: no session stands beside the tokens
 * of another. */
static bool save(chat *c, const char *name, error *e) {
    char path[4096];
    output tokens;
    interrupts = 0;
    if (!tokens_path(path, sizeof path, name, e) || !read_on(c, true, e)) return false;
    if (c->session.n_tokens < c->ids.n) return error_set(e, "%s: interrupted", name);
    bool ok = output_open(&tokens, path, e) && write_tokens(c, &tokens, e) &&
              hybrid_session_save(&c->session, name, e);
    return output_close(&tokens, ok, e);
}

static bool check_saved(const chat *c, const char *name, const char *path, const token_list *ids,
                        error *e) {
    size_t n = 0;
    if (!hybrid_saved_tokens(name, &n, e)) return false;
    if (ids->n != n)
        return error_set(e, "%s: expected the %zu tokens of the session, found %zu", path, n,
                         ids->n);
    for (size_t i = 0, vocab = c->model.config.vocab_size; i < n; i++)
        if (ids->ids[i] >= vocab)
            return error_set(e, "%s: token %zu: expected an id below vocab_size %zu, found %lu",
                             path, i + 1, vocab, (unsigned long)ids->ids[i]);
    if (n > 0 && ids->ids[n - 1] != c->format.end)
        return error_set(e, "%s: expected the end of a message, %lu, as the last token, found %lu",
                         path, (unsigned long)c->format.end, (unsigned long)ids->ids[n - 1]);
    return true;
}

static bool load(chat *c, const char *name, error *e) {
    char path[4096];
    token_list ids = {NULL, 0, 0};
    size_t before = c->session.n_tokens;
    error unused;
    bool ok = tokens_path(path, sizeof path, name, e) && tokens_read(path, false, &ids, e) &&
              check_saved(c, name, path, &ids, e) && hybrid_session_load(&c->session, name, e);
    if (ok) {
        token_list old = c->ids;
        c->ids = ids, ids = old;
        sampler_forget(&c->sampling);
        sampler_read(&c->sampling, c->ids.ids, c->ids.n);
    }
    /* The file changed while it was read. */
    if (!ok && c->session.n_tokens != before) forget(c, &unused);
    free(ids.ids);
    return ok;
}

/* ---- Input ---- */

/* Is this line the command, with a name behind it where `file` is not null? */
static bool is_command(const chat *c, const char *command, const char **file) {
    size_t n = strlen(command);
    const char *rest = c->line.bytes + n;
    if (strncmp(c->line.bytes, command, n) != 0) return false;
    if (!file) return *rest == '\0';
    while (*rest == ' ') rest++;
    *file = rest;
    return rest > c->line.bytes + n && *rest != '\0';
}

static bool obey(chat *c, bool *quit, error *e) {
    const char *file;
    if (is_command(c, "/quit", NULL)) return *quit = true;
    if (is_command(c, "/help", NULL)) return fputs(commands, stderr) >= 0;
    if (is_command(c, "/reset", NULL)) return forget(c, e);
    if (is_command(c, "/save", &file)) return save(c, file, e);
    if (is_command(c, "/load", &file)) return load(c, file, e);
    return error_set(e,
                     "expected /save FILE, /load FILE, /reset, /help or /quit, or // for a message "
                     "that begins with /, found \"%.40s\"",
                     c->line.bytes);
}

static bool append_byte(chat *c, char byte, error *e) {
    if (c->line.n == c->line.room) {
        size_t room = c->line.room ? 2 * c->line.room : 256;
        char *bytes = (char *)realloc(c->line.bytes, room);
        if (!bytes) return error_set(e, "no memory for a line of %zu bytes", room);
        c->line.bytes = bytes, c->line.room = room;
    }
    c->line.bytes[c->line.n++] = byte;
    return true;
}

/* Bytes of standard input; *n is 0 at its end, or where an interrupt comes first. */
static bool read_input(char *bytes, size_t size, size_t *n, error *e) {
#if OUTPUT_POSIX
    fd_set set;
    ssize_t got = 0;
    FD_ZERO(&set);
    FD_SET(STDIN_FILENO, &set);
    sig_atomic_t before = interrupts;
    int ready;
    do /* again after another signal */
        ready = pselect(STDIN_FILENO + 1, &set, NULL, NULL, NULL, &open_mask);
    while (ready < 0 && errno == EINTR && interrupts == before);
    if (ready > 0) got = read(STDIN_FILENO, bytes, size);
    *n = got > 0 ? (size_t)got : 0;
    bool failed = ready < 0 ? errno != EINTR : got < 0;
#else
    *n = fgets(bytes, (int)size, stdin) ? strlen(bytes) : 0;
    bool failed = ferror(stdin) != 0;
#endif
    return !failed || error_set(e, "standard input: cannot read: %s", strerror(errno));
}

/* Is it time to leave after an interrupt that came instead of input? */
static bool leave_after_interrupt(chat *c) {
    if (!c->interactive || interrupts > 1) return true;
    fputs("\n[Ctrl-C again leaves]\n> ", stderr);
    return false;
}

/* More input, which ends where the user leaves. */
static bool fill_input(chat *c, error *e) {
    c->input.at = c->input.n = 0;
    for (;;) {
        sig_atomic_t before = interrupts;
        if (!read_input(c->input.bytes, sizeof c->input.bytes, &c->input.n, e)) return false;
        if (c->input.n > 0 || interrupts == before) return true;
        c->line.n = 0; /* of a terminal what was typed is gone */
        if (leave_after_interrupt(c)) return true;
    }
}

/* A line without its end, with a NUL behind it. *end: there is none left, or the user leaves. */
static bool read_line(chat *c, bool *end, error *e) {
    bool whole = false;
    c->line.n = 0;
    if (c->interactive) fputs("> ", stderr);
    while (!whole) {
        if (c->input.at == c->input.n && !fill_input(c, e)) return false;
        if (c->input.n == 0) break;
        char byte = c->input.bytes[c->input.at++];
        whole = byte == '\n';
        if (!whole && !append_byte(c, byte, e)) return false;
    }
    if (!whole && c->line.n == 0) return *end = true;
    if (c->line.n > 0 && c->line.bytes[c->line.n - 1] == '\r') c->line.n--;
    if (!append_byte(c, '\0', e)) return false;
    c->line.n--;
    return true;
}

/* What a line asks for. */
static bool take_line(chat *c, bool *quit, error *e) {
    const char *text = c->line.bytes;
    size_t n = c->line.n;
    interrupts = 0;
    if (n == 0) return true;
    if (text[0] == '/' && text[1] != '/') return obey(c, quit, e);
    size_t escaped = text[0] == '/';
    return take_turn(c, text + escaped, n - escaped, e);
}

/* Lines to the end. At a terminal what goes wrong is told and the next line comes. */
static bool converse(chat *c, error *e) {
    bool end = false;
    while (!end) {
        if (!read_line(c, &end, e)) return false;
        if (end || take_line(c, &end, e)) continue;
        if (!c->interactive) return false;
        fprintf(stderr, "chat: %s\n", e->text);
    }
    if (c->interactive) putc('\n', stderr);
    return true;
}

int main(int argc, char **argv) {
    options o;
    error e;
    chat c;
    if (!parse_arguments(&o, argc, argv, &e)) {
        fprintf(stderr, "chat: %s (--help tells more)\n", e.text);
        return 2;
    }
    if (o.help) return arguments_help("chat", help);
    memset(&c, 0, sizeof c);
    c.o = &o;
    signals_catch("chat");
    signals_watch(&c.model.checkpoint);
    c.interactive = is_terminal();
    bool ok = open_chat(&c, &e);
    if (ok) {
        announce(&c);
        ok = converse(&c, &e);
    }
    if (!ok) fprintf(stderr, "chat: %s\n", e.text);
    close_chat(&c);
    return ok ? 0 : 1;
}
