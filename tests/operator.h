/* operator.h - a random problem for kda_forward, in dense arrays, and its float64 solution.
 *
 * Include after kda.h with KDA_IMPLEMENTATION.
 */
#ifndef OPERATOR_H
#define OPERATOR_H

#include "reference.h"
#include "test.h"

typedef struct problem {
    kda_desc desc;
    size_t tokens;
    float *q, *k;       /* [tokens][qk heads][dim_k] */
    float *v;           /* [tokens][heads][dim_v] */
    float *g;           /* [tokens][heads][dim_k] */
    float *beta;        /* [tokens][heads] */
    float *A_log;       /* [heads], or null with a ready log-decay */
    float *dt_bias;     /* [heads][dim_k], or null likewise */
    float *start;       /* the state before the first token */
    size_t state_count; /* floats of a state */
    size_t output_count;
} problem;

static inline size_t problem_qk_heads(const kda_desc *desc) {
    return desc->n_qk_heads ? desc->n_qk_heads : desc->n_heads;
}

static inline kda_desc problem_desc(size_t n_heads, size_t n_qk_heads, size_t dim_k, size_t dim_v) {
    kda_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.n_heads = n_heads;
    desc.n_qk_heads = n_qk_heads;
    desc.dim_k = dim_k;
    desc.dim_v = dim_v;
    desc.gate = KDA_GATE_LOG_DECAY;
    desc.beta = KDA_BETA_LOGIT;
    desc.flags = KDA_L2_NORM_QK;
    return desc;
}

static inline float *problem_normal(size_t n) {
    float *x = test_floats(n);
    test_fill_normal(x, n);
    return x;
}

/* Inputs as a layer makes them: normal q, k, v, gate and beta logit, a small state. A ready
 * log-decay is spread from weak (-0.001) to strong (-8). */
static inline problem problem_new(const kda_desc *desc, size_t tokens) {
    problem p;
    size_t qk = tokens * problem_qk_heads(desc) * desc->dim_k;
    size_t gates = tokens * desc->n_heads * desc->dim_k;
    memset(&p, 0, sizeof p);
    p.desc = *desc;
    p.tokens = tokens;
    p.output_count = tokens * desc->n_heads * desc->dim_v;
    p.state_count = desc->n_heads * desc->dim_v * desc->dim_k;
    p.q = problem_normal(qk);
    p.k = problem_normal(qk);
    p.v = problem_normal(p.output_count);
    p.g = problem_normal(gates);
    p.beta = problem_normal(tokens * desc->n_heads);
    p.start = problem_normal(p.state_count);
    if (desc->beta == KDA_BETA_VALUE)
        for (size_t i = 0; i < tokens * desc->n_heads; i++) p.beta[i] = test_uniform_f32(0, 1);
    if (desc->gate == KDA_GATE_LOG_DECAY) {
        for (size_t i = 0; i < gates; i++) p.g[i] = -expf(test_uniform_f32(-6.9f, 2.0f));
    } else {
        p.A_log = test_floats(desc->n_heads);
        for (size_t i = 0; i < desc->n_heads; i++) p.A_log[i] = test_uniform_f32(-1.0f, 1.0f);
        p.dt_bias = problem_normal(desc->n_heads * desc->dim_k);
    }
    return p;
}

static inline void problem_free(problem *p) {
    free(p->q);
    free(p->k);
    free(p->v);
    free(p->g);
    free(p->beta);
    free(p->A_log);
    free(p->dt_bias);
    free(p->start);
}

/* The dense views of tokens first .. of a problem; o is the output of the whole problem, of which
 * row `first` is the first written. */
static inline kda_args problem_args(const problem *p, size_t first, float *o) {
    kda_args args;
    const kda_desc *d = &p->desc;
    ptrdiff_t k = (ptrdiff_t)d->dim_k, v = (ptrdiff_t)d->dim_v, heads = (ptrdiff_t)d->n_heads;
    ptrdiff_t qk_heads = (ptrdiff_t)problem_qk_heads(d), t = (ptrdiff_t)first;
    memset(&args, 0, sizeof args);
    args.q = kda_in_f32(p->q + t * qk_heads * k, qk_heads * k, k);
    args.k = kda_in_f32(p->k + t * qk_heads * k, qk_heads * k, k);
    args.v = kda_in_f32(p->v + t * heads * v, heads * v, v);
    args.g = kda_in_f32(p->g + t * heads * k, heads * k, k);
    args.beta = kda_in_f32(p->beta + t * heads, heads, 1);
    args.o = kda_out_f32(o + t * heads * v, heads * v, v);
    args.A_log = p->A_log;
    args.dt_bias = p->dt_bias;
    return args;
}

/* Runs tokens first .. first + n - 1 as one sequence. */
static inline kda_result problem_run(const problem *p, kda_algorithm algorithm, size_t first,
                                     size_t n, void *state, float *o) {
    kda_args args = problem_args(p, first, o);
    kda_seq seq;
    kda_run run;
    memset(&seq, 0, sizeof seq);
    seq.n_tokens = n;
    seq.state = state;
    args.seqs = &seq;
    args.n_seqs = 1;
    memset(&run, 0, sizeof run);
    run.algorithm = algorithm;
    run.scratch_bytes = kda_scratch_bytes(&p->desc, 1, &run);
    run.scratch = test_scratch(run.scratch_bytes);
    kda_result result = kda_forward(&p->desc, &args, &run);
    free(run.scratch);
    return result;
}

/* The whole problem from its start state; any call that fails is a failed check. */
static inline void problem_solve(const problem *p, kda_algorithm algorithm, float *state,
                                 float *o) {
    memcpy(state, p->start, p->state_count * sizeof(float));
    CHECK(problem_run(p, algorithm, 0, p->tokens, state, o) == KDA_OK);
}

static inline double problem_log_decay(const problem *p, size_t head, size_t channel, double raw) {
    const kda_desc *d = &p->desc;
    if (d->gate == KDA_GATE_LOG_DECAY) return raw;
    double z = raw + (p->dt_bias ? (double)p->dt_bias[head * d->dim_k + channel] : 0);
    double a = p->A_log ? exp((double)p->A_log[head]) : 1;
    if (d->gate == KDA_GATE_SOFTPLUS) return -a * reference_softplus(z);
    return (double)d->lower_bound * reference_sigmoid(a * z);
}

static inline double problem_beta(const kda_desc *d, double x) {
    if (d->beta == KDA_BETA_VALUE) return x;
    return reference_sigmoid(x) * (d->beta == KDA_BETA_LOGIT_DOUBLED ? 2 : 1);
}

/* Token t of one head in float64: q normalised and scaled, k normalised, g a log-decay. */
static inline double problem_token(const problem *p, size_t t, size_t head, double *q, double *k,
                                   double *v, double *g) {
    const kda_desc *d = &p->desc;
    size_t K = d->dim_k, V = d->dim_v, HV = d->n_heads, H = problem_qk_heads(d);
    size_t qk_head = d->head_map == KDA_HEADS_TILED ? head % H : head / (HV / H);
    double eps = d->l2_eps != 0.0f ? (double)d->l2_eps : 1e-6;
    double scale = d->scale != 0.0f ? (double)d->scale : 1 / sqrt((double)K);
    for (size_t i = 0; i < K; i++) {
        q[i] = (double)p->q[(t * H + qk_head) * K + i];
        k[i] = (double)p->k[(t * H + qk_head) * K + i];
        g[i] = problem_log_decay(p, head, i, (double)p->g[(t * HV + head) * K + i]);
    }
    if (d->flags & KDA_L2_NORM_QK) {
        reference_l2_norm(K, eps, q);
        reference_l2_norm(K, eps, k);
    }
    for (size_t i = 0; i < K; i++) q[i] *= scale;
    for (size_t j = 0; j < V; j++) v[j] = (double)p->v[(t * HV + head) * V + j];
    return problem_beta(d, (double)p->beta[t * HV + head]);
}

/* The solution in float64, or in plain float32 kept in doubles (the yardstick for errors).
 * o: [tokens][heads][dim_v], state: [heads][dim_v][dim_k] like kda.h's. */
static inline void problem_reference_in(const problem *p, int in_f32, double *state, double *o) {
    const kda_desc *d = &p->desc;
    size_t K = d->dim_k, V = d->dim_v, n = 3 * K + 2 * V + K * V;
    double *row = (double *)test_alloc(n * sizeof(double));
    float *row_f32 = test_floats(n);
    double *q = row, *k = q + K, *g = k + K, *v = g + K, *y = v + V, *S = y + V;
    for (size_t h = 0; h < d->n_heads; h++) {
        float *S_f32 = row_f32 + (S - row);
        for (size_t i = 0; i < K; i++)
            for (size_t j = 0; j < V; j++) {
                S_f32[i * V + j] = p->start[(h * V + j) * K + i];
                S[i * V + j] = (double)S_f32[i * V + j];
            }
        for (size_t t = 0; t < p->tokens; t++) {
            double beta = problem_token(p, t, h, q, k, v, g);
            double *out = o + (t * d->n_heads + h) * V;
            if (in_f32) {
                for (size_t i = 0; i < 3 * K + V; i++) row_f32[i] = (float)row[i];
                reference_step_f32(K, V, row_f32, row_f32 + K, row_f32 + 3 * K, row_f32 + 2 * K,
                                   (float)beta, S_f32, row_f32 + 3 * K + V);
                for (size_t j = 0; j < V; j++) out[j] = (double)row_f32[3 * K + V + j];
            } else {
                reference_step(K, V, q, k, v, g, beta, S, out);
            }
        }
        for (size_t i = 0; i < K; i++)
            for (size_t j = 0; j < V; j++)
                state[(h * V + j) * K + i] = in_f32 ? (double)S_f32[i * V + j] : S[i * V + j];
    }
    free(row);
    free(row_f32);
}

static inline void problem_reference(const problem *p, double *state, double *o) {
    problem_reference_in(p, 0, state, o);
}

/* Relative L2 error of the plain float32 recurrence on p: output and state, against float64. */
static inline void problem_f32_error(const problem *p, double *o_error, double *state_error) {
    double *o = (double *)test_alloc(p->output_count * sizeof *o);
    double *o_f32 = (double *)test_alloc(p->output_count * sizeof *o);
    double *state = (double *)test_alloc(p->state_count * sizeof *state);
    double *state_f32 = (double *)test_alloc(p->state_count * sizeof *state);
    problem_reference_in(p, 0, state, o);
    problem_reference_in(p, 1, state_f32, o_f32);
    *o_error = test_relative_l2_f64(o_f32, o, p->output_count);
    *state_error = test_relative_l2_f64(state_f32, state, p->state_count);
    free(o);
    free(o_f32);
    free(state);
    free(state_f32);
}

#endif
