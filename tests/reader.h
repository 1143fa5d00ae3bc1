/* reader.h - for tests of the driver: a session with a workspace of its own, opened or else the end
 * of the run. Include it after hybrid.h. */
#ifndef TEST_READER_H
#define TEST_READER_H

#include "model.h"

/* The reference's own float32 is 1.6e-6 and 1.6e-5 away from its float64. */
static const struct {
    const char *directory;
    double bound;
} models[] = {{MODELS "kimi-linear-tiny", 6e-6}, {MODELS "kimi-k3-tiny", 5e-5}};
#define N_MODELS (sizeof models / sizeof *models)

/* The first of these with quantised weights. */
static const char *const quantised[] = {MODELS "kimi-linear-tiny-int4",
                                        MODELS "kimi-linear-tiny-int4-zp",
                                        MODELS "kimi-linear-tiny-int8"};
#define N_QUANTISED (sizeof quantised / sizeof *quantised)

typedef struct reader {
    hybrid_workspace work;
    hybrid_session session;
} reader;

static inline hybrid_model open_model(const char *directory) {
    hybrid_model model;
    error e;
    if (!hybrid_open(&model, directory, &e)) give_up(e.text);
    return model;
}

static inline hybrid_workspace open_workspace(const hybrid_model *model, size_t capacity,
                                              size_t block, parallel *pool) {
    hybrid_workspace_options options = {block, capacity, {KDA_ISA_AUTO, pool, false}};
    hybrid_workspace work;
    error e;
    if (!hybrid_workspace_open(&work, model, &options, &e)) give_up(e.text);
    return work;
}

static inline hybrid_session open_session(const hybrid_model *model, size_t capacity,
                                          linear_type cache, size_t max_draft) {
    hybrid_session_options options = {capacity, cache, max_draft};
    hybrid_session session;
    error e;
    if (!hybrid_session_open(&session, model, &options, &e)) give_up(e.text);
    return session;
}

static inline reader open_reader(const hybrid_model *model, size_t capacity, size_t block) {
    reader r;
    r.work = open_workspace(model, capacity, block, NULL);
    r.session = open_session(model, capacity, LINEAR_F32, 0);
    return r;
}

static inline void close_reader(reader *r) {
    hybrid_session_close(&r->session);
    hybrid_workspace_close(&r->work);
}

/* Logits, and running sums where hidden is not null, of n ids fed `split` at a time. */
static inline void forward(hybrid_workspace *work, hybrid_session *session, const uint32_t *ids,
                           size_t n, size_t split, float *logits, float *hidden) {
    const hybrid_config *c = &session->model->config;
    for (size_t t = 0; t < n; t += split) {
        hybrid_want want = {0};
        error e;
        want.logits = logits + t * c->vocab_size;
        want.hidden = hidden ? hidden + t * c->hidden_size : NULL;
        want.hidden_stride = n * c->hidden_size;
        if (!hybrid_forward(work, session, ids + t, n - t < split ? n - t : split, &want, &e))
            give_up(e.text);
    }
}

static inline void read_ids(reader *r, const uint32_t *ids, size_t n, size_t split, float *logits,
                            float *hidden) {
    forward(&r->work, &r->session, ids, n, split, logits, hidden);
}

#endif
