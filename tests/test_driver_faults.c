/* test_driver_faults.c - the programs of $BUILD (build) where the system fails them: files that are
 * shortened while they are mapped, disks that are full, readers that go, signals in the middle of a
 * save. Each ends in one line about it and status 1, or by its signal, and what was saved before is
 * as it was. From the repository root. */
#ifndef _XOPEN_SOURCE
#define _XOPEN_SOURCE 700
#endif
#define SAFETENSORS_IMPLEMENTATION
#include "../examples/safetensors.h"

#define PROGRAM "generate"
#include "limits.h"
#include "program.h"

#include <fcntl.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>
#if defined(__linux__)
#include <linux/capability.h>
#include <sys/prctl.h>
#endif

#define TINY MODELS "kimi-linear-tiny"
#define TEXT "examples/models/text-attnres"

/* ---- Programs that run beside the test ---- */

static const char *in_work(const char *name, char path[360]) {
    snprintf(path, 360, "%s/%s", work, name);
    return path;
}

/* Begins `$BUILD/words`, as a shell reads them, and is the process that they become. */
static pid_t begin(const char *words) {
    char command[2000];
    snprintf(command, sizeof command, "exec >%s/out 2>%s/err %s/%s", work, work, build_directory(),
             words);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        execl("/bin/sh", "sh", "-c", command, (char *)NULL);
        _exit(127);
    }
    if (child < 0) give_up("cannot fork");
    return child;
}

static void rest(void) {
    const struct timespec moment = {0, 1000000};
    nanosleep(&moment, NULL);
}

/* Waits until a file in the work directory is there with so many bytes, or the child has ended; true
 * if the file came first. The child's status stays to be asked for. */
static bool wait_for(pid_t child, const char *name, off_t bytes) {
    char path[360];
    struct stat status;
    siginfo_t ended;
    for (;;) {
        if (stat(in_work(name, path), &status) == 0 && status.st_size >= bytes) return true;
        memset(&ended, 0, sizeof ended);
        if (waitid(P_PID, (id_t)child, &ended, WEXITED | WNOHANG | WNOWAIT) != 0 || ended.si_pid)
            return false;
        rest();
    }
}

/* The exit status of a child; of one that a signal ended, that and 128. */
static int end_of(pid_t child) {
    int status = 0;
    if (waitpid(child, &status, 0) != child) give_up("cannot wait");
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/* The last line of standard error begins with the program's name and a colon, and has `part`. What
 * gcov says behind it of counts that it could not write does not count. */
static void check_told(const char *program, const char *part) {
    size_t n;
    char *text = read_file(work, "err", &n), *line = text;
    for (char *c = text; *c; c++)
        if (*c == '\n' && c[1] && strncmp(c + 1, "profiling:", 10) != 0) line = c + 1;
    CHECK_MSG(strncmp(line, program, strlen(program)) == 0 && line[strlen(program)] == ':' &&
                  strstr(line, part) && strchr(line, '\n'),
              "%s, \"%s\": %s", program, part, text);
    free(text);
}

/* A copy of a model in the work directory, whose file may be shortened. */
static void copy_model(const char *from) {
    static const char *const names[] = {"config.json", "model.safetensors"};
    char path[360];
    mkdir(in_work("model", path), 0777);
    for (size_t i = 0; i < 2; i++) {
        size_t n;
        char *bytes = read_file(from, names[i], &n);
        write_file(path, names[i], bytes, n);
        free(bytes);
    }
}

static void check_text(const char *name, const char *text) {
    size_t n;
    char *found = read_file(work, name, &n);
    CHECK_MSG(strcmp(found, text) == 0, "%s: %zu bytes, not as before", name, n);
    free(found);
}

static void remove_all(const char *directory) {
    char command[500];
    snprintf(command, sizeof command, "rm -rf %s/%s", work, directory);
    CHECK(system(command) == 0);
}

/* ---- Weights that go ---- */

/* The program opens its model, and then waits for tokens in a pipe: in between the file loses all
 * but its first page, and in the second run all of it. */
static void weights_are_shortened(void) {
    static const off_t left[] = {4096, 0};
    char fifo[360], words[1200], weights[360];
    in_work("fifo", fifo), in_work("model/model.safetensors", weights);
    remove(fifo);
    if (mkfifo(fifo, 0600) != 0) {
        test_skip("no pipes with names here");
        return;
    }
    for (int i = 0; i < 2; i++) {
        copy_model(TINY);
        write_file(work, "logits", "before", 6);
        snprintf(words, sizeof words,
                 "generate %s/model --threads 2 --tokens %s --logits %s/logits", work, fifo, work);
        pid_t child = begin(words);
        FILE *pipe = fopen(fifo, "w"); /* returns when the program opens the other end */
        CHECK(truncate(weights, left[i]) == 0);
        CHECK(pipe && fputs("1 2 3 4 5 6 7 8 9\n", pipe) > 0 && fclose(pipe) == 0);
        int status = end_of(child);
        CHECK_MSG(status == 1, "status %d", status);
        check_told("generate", "model/model.safetensors: byte ");
        check_told("generate", "the file was shortened, or its disk fails");
        check_text("logits", "before");
        CHECK(!exists("logits.part"));
    }
}

/* The same of quantize, in whose threads it may come, in the middle of its work. */
static void weights_are_shortened_under_quantize(void) {
    char words[1000], weights[360];
    copy_model(TEXT);
    remove_all("small");
    in_work("model/model.safetensors", weights);
    snprintf(words, sizeof words, "quantize %s/model %s/small --format int4 --threads 2", work,
             work);
    pid_t child = begin(words);
    bool began = wait_for(child, "small/model.safetensors.part", 1);
    CHECK(began && kill(child, SIGSTOP) == 0);
    CHECK(truncate(weights, 4096) == 0);
    if (began) kill(child, SIGCONT);
    int status = end_of(child);
    CHECK_MSG(status == 1, "status %d", status);
    check_told("quantize", "model/model.safetensors: byte ");
    CHECK(!exists("small/model.safetensors.part") && !exists("small/model.safetensors"));
    CHECK(!exists("small/config.json"));
}

/* ---- Signals in the middle of a save ---- */

#define LONG_INPUT 3000

/* Begins to write logits in place of a file, gets the signal, and ends by it. */
static void check_signal(int number, bool cleans) {
    char words[1000];
    uint32_t ids[LONG_INPUT];
    for (size_t i = 0; i < LONG_INPUT; i++) ids[i] = (uint32_t)(i % 200);
    write_ids("ids", ids, LONG_INPUT);
    write_file(work, "logits", "before", 6);
    snprintf(words, sizeof words, "generate " TINY " --tokens %s/ids --logits %s/logits", work,
             work);
    pid_t child = begin(words);
    CHECK(wait_for(child, "logits.part", 1) && kill(child, number) == 0);
    int status = end_of(child);
    CHECK_MSG(status == 128 + number, "signal %d: status %d", number, status);
    check_text("logits", "before");
    CHECK_MSG(exists("logits.part") != cleans, "signal %d", number);
}

static void signals_leave_what_was_saved(void) {
    check_signal(SIGINT, true);
    check_signal(SIGTERM, true);
    check_signal(SIGHUP, true);
    check_signal(SIGKILL, false); /* nobody can */
    /* A part in the way is no harm. */
    outcome o = run_ok(TINY " --prompt abc --logits WORK/logits");
    CHECK(!exists("logits.part"));
    free(read_floats("logits", 3 * 256));
    outcome_free(&o);
}

/* One that the program was begun to ignore, as by nohup, does not end it. */
static void ignored_signals_stay_ignored(void) {
    char words[1000];
    snprintf(words, sizeof words, "generate " TINY " --tokens %s/ids --logits %s/logits", work,
             work);
    signal(SIGHUP, SIG_IGN);
    pid_t child = begin(words);
    signal(SIGHUP, SIG_DFL);
    CHECK(wait_for(child, "logits.part", 1) && kill(child, SIGHUP) == 0);
    CHECK(end_of(child) == 0);
    free(read_floats("logits", (size_t)LONG_INPUT * 256));
}

static void quantize_is_interrupted(void) {
    char words[1000];
    remove_all("small");
    snprintf(words, sizeof words, "quantize " TEXT " %s/small --format int4", work);
    pid_t child = begin(words);
    CHECK(wait_for(child, "small/model.safetensors.part", 1) && kill(child, SIGTERM) == 0);
    CHECK(end_of(child) == 128 + SIGTERM);
    CHECK(!exists("small/model.safetensors.part") && !exists("small/model.safetensors"));
}

/* ---- Full disks ---- */

/* What is to be written reaches the largest size of a file that the system allows. */
static void check_limit(const char *program, const char *words, const char *file) {
    char command[1000], path[360], part[60];
    snprintf(part, sizeof part, "%s.part", file);
    snprintf(command, sizeof command, "(ulimit -f 8; exec %s/%s %s) >%s/out 2>%s/err",
             build_directory(), program, words, work, work);
    int status = system(command);
    CHECK_MSG(WIFEXITED(status) && WEXITSTATUS(status) == 1, "%s: status %d", words, status);
    check_told(program, in_work(part, path));
    CHECK_MSG(!exists(part), "%s is left", part);
}

static void files_reach_their_limit(void) {
    char words[1000];
    snprintf(words, sizeof words, TINY " --prompt abcdefghijklmnopq --logits %s/large", work);
    write_file(work, "large", "before", 6);
    check_limit("generate", words, "large");
    snprintf(words, sizeof words, TINY " --prompt abcdefghijklmnopq --dump-layers %s/large", work);
    check_limit("generate", words, "large");
    snprintf(words, sizeof words, TINY " --prompt a --generate 0 --save-session %s/large", work);
    check_limit("generate", words, "large");
    check_text("large", "before");
    remove_all("small");
    snprintf(words, sizeof words, TINY " %s/small --format int8", work);
    check_limit("quantize", words, "small/model.safetensors");
    CHECK(!exists("small/model.safetensors") && !exists("small/config.json"));
}

/* A run that says that standard output is full, and fails. */
static void check_full(const char *program, const char *words) {
    char command[1000];
    snprintf(command, sizeof command, "%s/%s %s >/dev/full 2>%s/err", build_directory(), program,
             words, work);
    int status = system(command);
    CHECK_MSG(WIFEXITED(status) && WEXITSTATUS(status) == 1, "%s: %d", command, status);
    check_told(program, "standard output: cannot write: ");
}

static void full_standard_output(void) {
    static const char *const runs[][2] = {
        {"generate", TINY " --prompt a --generate 4"},
        {"generate", TINY " --prompt a --show-depth"},
        {"generate", TINY " --plan"},
        {"memory", "--trials 1"},
        {"perplexity", TEXT " LICENSE --to 64"},
        {"recall", "examples/models/recall-kda --pairs 8 --queries 1"},
        {"tokenize", "tests/golden/tokenizer LICENSE"},
    };
    if (!test_has_full_device()) return;
    for (size_t i = 0; i < sizeof runs / sizeof *runs; i++) check_full(runs[i][0], runs[i][1]);
}

/* Help that nobody can read is no success. */
static void help_without_room(void) {
    static const char *const programs[] = {"chat",       "generate", "make_checkpoint", "memory",
                                           "perplexity", "quantize", "recall",          "tokenize"};
    if (!test_has_full_device()) return;
    for (size_t i = 0; i < sizeof programs / sizeof *programs; i++) {
        size_t n;
        check_full(programs[i], "--help");
        char *text = read_file(work, "err", &n);
        CHECK_MSG(strchr(text, '\n') == text + n - 1, "%s: not one line: %s", programs[i], text);
        free(text);
    }
}

/* ---- Readers that go ---- */

/* A filter whose reader has gone ends, by the signal or, where that is ignored, with a line, and long
 * before its last token. */
static void readers_go(void) {
    char words[1000];
    int ends[2];
    for (int ignored = 0; ignored < 2; ignored++) {
        if (pipe(ends) != 0 || fcntl(ends[0], F_SETFD, FD_CLOEXEC) != 0) give_up("no pipe");
        signal(SIGPIPE, ignored ? SIG_IGN : SIG_DFL);
        snprintf(words, sizeof words,
                 "generate " TINY " --prompt a --generate 200000 --ignore-stop >&%d", ends[1]);
        pid_t child = begin(words);
        signal(SIGPIPE, SIG_DFL);
        close(ends[0]), close(ends[1]);
        int status = end_of(child);
        CHECK_MSG(status == (ignored ? 1 : 128 + SIGPIPE), "status %d", status);
        if (ignored) check_told("generate", "standard output: cannot write: Broken pipe");
    }
}

/* ---- Files that cannot be read ---- */

static void directories_in_place_of_files(void) {
    check_refused(TINY " --tokens tests", 1, "tests: cannot read: ");
    check_refused(TINY " --prompt a --load-session tests", 1, "tests: cannot read: ");
    char path[360];
    remove_all("model");
    copy_model(TINY);
    remove(in_work("model/model.safetensors", path));
    mkdir(path, 0777);
    check_refused("WORK/model --prompt a", 1, "model.safetensors: is a directory, not a file");
    rmdir(path);
    copy_model(TINY);
    remove(in_work("model/config.json", path));
    mkdir(path, 0777);
    check_refused("WORK/model --prompt a", 1, "config.json: is a directory, not a file");
    rmdir(path);
}

/* A link to itself cannot be opened by anybody; a file that nobody may read can, by the superuser. */
static void files_that_do_not_open(void) {
    static const char *const names[] = {"model/model.safetensors", "model/config.json"};
    char path[360];
    for (size_t i = 0; i < 2; i++) {
        copy_model(TINY);
        remove(in_work(names[i], path));
        CHECK(symlink(strrchr(names[i], '/') + 1, path) == 0);
        check_refused("WORK/model --prompt a", 1, names[i]);
        remove(path);
    }
    if (geteuid() == 0) return;
    for (size_t i = 0; i < 2; i++) {
        copy_model(TINY);
        CHECK(chmod(in_work(names[i], path), 0) == 0);
        check_refused("WORK/model --prompt a", 1, "ermission denied");
        CHECK(chmod(path, 0600) == 0);
    }
}

/* ---- Weights that may not be locked ---- */

/* The programs that follow may not lock memory as they like, as those of the superuser may. */
static void weights_that_cannot_be_locked(void) {
#if defined(__linux__)
    (void)prctl(PR_CAPBSET_DROP, CAP_IPC_LOCK, 0, 0, 0);
#endif
    rlim_t before = set_limit(RLIMIT_MEMLOCK, 0);
    outcome o = run(TINY " --prompt a --generate 1 --lock");
    set_limit(RLIMIT_MEMLOCK, before);
    if (o.status == 0) {
        test_skip("who runs this may lock memory whatever the limit");
    } else {
        CHECK_MSG(o.status == 1 && o.n_out == 0, "status %d", o.status);
        check_told("generate", "cannot be locked in memory: ");
        check_told("generate", "; the limit is 0 bytes in all (ulimit -l)");
    }
    outcome_free(&o);
}

int main(void) {
    /* nohup and & begin programs that ignore some. */
    static const int ends[] = {SIGHUP, SIGINT, SIGPIPE, SIGTERM};
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) signal(ends[i], SIG_DFL);
    temporary("driver-faults", work);
    TEST(weights_are_shortened);
    TEST(weights_are_shortened_under_quantize);
    TEST(signals_leave_what_was_saved);
    TEST(ignored_signals_stay_ignored);
    TEST(quantize_is_interrupted);
    TEST(files_reach_their_limit);
    TEST(full_standard_output);
    TEST(help_without_room);
    TEST(readers_go);
    TEST(directories_in_place_of_files);
    TEST(files_that_do_not_open);
    TEST(weights_that_cannot_be_locked);
    return test_summary();
}
