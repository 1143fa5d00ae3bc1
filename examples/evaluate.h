/* evaluate.h - a model that reads one sequence after another: for programs that score it.
 *
 *     evaluator m;
 *     if (!evaluator_open(&m, "path/to/directory", 512, 2, e)) return false;
 *     for each sequence:
 *         evaluator_reset(&m, e) && evaluator_read(&m, ids, n, logits, e) ...
 *     evaluator_close(&m);
 *
 * Every function is static.
 */
#ifndef EVALUATE_H
#define EVALUATE_H

#include "hybrid.h"
#include "parallel.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Does not move while it is open. */
typedef struct evaluator {
    hybrid_model model;
    parallel pool;
    hybrid_workspace work;
    hybrid_session session;
} evaluator;

static inline void evaluator_close(evaluator *m) {
    hybrid_session_close(&m->session);
    hybrid_workspace_close(&m->work);
    parallel_close(&m->pool);
    hybrid_close(&m->model);
}

/* For sequences of `capacity` tokens at most. After a failure nothing is open. */
static inline bool evaluator_open(evaluator *m, const char *directory, size_t capacity,
                                  size_t threads, error *e) {
    hybrid_session_options kept;
    hybrid_workspace_options how;
    memset(m, 0, sizeof *m), memset(&kept, 0, sizeof kept), memset(&how, 0, sizeof how);
    kept.capacity = how.capacity = capacity;
    how.run.pool = &m->pool;
    bool ok = hybrid_open(&m->model, directory, e) && parallel_open(&m->pool, threads, e) &&
              hybrid_session_open(&m->session, &m->model, &kept, e) &&
              hybrid_workspace_open(&m->work, &m->model, &how, e);
    if (!ok) evaluator_close(m);
    return ok;
}

/* Begins another sequence. */
static inline bool evaluator_reset(evaluator *m, error *e) {
    return hybrid_session_reset(&m->session, e);
}

/* Reads the sequence's next n tokens; logits: [n][vocab_size], or null. */
static inline bool evaluator_read(evaluator *m, const uint32_t *ids, size_t n, float *logits,
                                  error *e) {
    hybrid_want want;
    memset(&want, 0, sizeof want);
    want.logits = logits;
    return hybrid_forward(&m->work, &m->session, ids, n, &want, e);
}

#endif
