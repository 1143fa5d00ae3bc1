/* signals.h - what a program of the driver does when a signal would end it: one line that says why,
 * and no half-written files.
 *
 *     int main(...) {
 *         signals_catch("generate");
 *         signals_watch(&model.checkpoint);
 *         ... open the model, write outputs ...
 *
 *   SIGBUS    a watched checkpoint's file was shortened while it is mapped, or its disk fails: tells
 *             which file and where, and exits with status 1. Otherwise it is the program's own fault
 *             and ends it as if it were not caught
 *   SIGHUP, SIGINT, SIGPIPE, SIGTERM
 *             removes the parts of files that are being written (output.h), so that of a save either
 *             all is there or what was there before, and ends the program as if it were not caught;
 *             one that the program's parent ignores stays ignored
 *   SIGXFSZ   is ignored: what reaches the limit of a file's size (ulimit -f) fails to be written,
 *             and that is reported
 *
 * Nothing where JSON_POSIX is 0. Every function is static.
 */
#ifndef SIGNALS_H
#define SIGNALS_H

#include "output.h"
#include "safetensors.h"

#include <signal.h>
#include <stddef.h>
#include <string.h>

#if JSON_POSIX
#include <unistd.h>
#endif

static const char *signalsi_program;
static const st_checkpoint *volatile signalsi_checkpoint;

/* Watches a checkpoint, which may be closed as yet (all zero), be opened and be closed again; one at
 * a time. NULL ends it, as must come before its memory goes. */
static inline void signals_watch(const st_checkpoint *checkpoint) {
    signalsi_checkpoint = checkpoint;
}

#if JSON_POSIX

/* Only functions that POSIX allows in a handler from here on. */

static size_t signalsi_put(char *line, size_t size, size_t n, const char *text) {
    while (*text && n < size) line[n++] = *text++;
    return n;
}

static size_t signalsi_put_size(char *line, size_t size, size_t n, size_t value) {
    char digits[24];
    size_t at = sizeof digits;
    digits[--at] = '\0';
    do digits[--at] = (char)('0' + value % 10);
    while ((value /= 10) > 0);
    return signalsi_put(line, size, n, digits + at);
}

static void signalsi_unreadable(int number, siginfo_t *info, void *context) {
    static volatile char told; /* by another thread, which ends the program */
    char line[OUTPUT_PATH + 200];
    const size_t size = sizeof line - 1;
    size_t offset = 0, n = 0;
    const char *path =
        signalsi_checkpoint ? st_file_at(signalsi_checkpoint, info->si_addr, &offset) : NULL;
    (void)context;
    if (!path) { /* returning, the same access is made again */
        signal(number, SIG_DFL);
        return;
    }
    while (__atomic_test_and_set(&told, __ATOMIC_RELAXED)) pause();
    n = signalsi_put(line, size, n, signalsi_program);
    n = signalsi_put(line, size, n, ": ");
    n = signalsi_put(line, size - 100, n, path);
    n = signalsi_put(line, size, n, ": byte ");
    n = signalsi_put_size(line, size, n, offset);
    n = signalsi_put(line, size, n, " cannot be read: the file was shortened, or its disk fails");
    line[n++] = '\n';
    ssize_t written = write(STDERR_FILENO, line, n);
    (void)written; /* there is nobody else to tell */
    output_abandon();
    _exit(1);
}

/* Caught once: the second time, at the end of this handler, it ends the program. */
static void signalsi_end(int number) {
    output_abandon();
    raise(number);
}

/* `program` begins the line about a file. */
static inline void signals_catch(const char *program) {
    static const int ends[] = {SIGHUP, SIGINT, SIGPIPE, SIGTERM};
    struct sigaction action, before;
    signalsi_program = program;
    memset(&action, 0, sizeof action);
    sigfillset(&action.sa_mask);
    action.sa_sigaction = signalsi_unreadable;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGBUS, &action, NULL);
    memset(&action, 0, sizeof action);
    sigfillset(&action.sa_mask);
    action.sa_handler = signalsi_end;
    action.sa_flags = (int)SA_RESETHAND;
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++)
        if (sigaction(ends[i], NULL, &before) == 0 && before.sa_handler == SIG_DFL)
            sigaction(ends[i], &action, NULL);
#ifdef SIGXFSZ
    signal(SIGXFSZ, SIG_IGN);
#endif
}

#else

static inline void signals_catch(const char *program) {
    signalsi_program = program;
}

#endif

#endif
