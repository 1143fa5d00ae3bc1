/* reference.h - the formulas of kda.h in float64, one loop to a symbol, never optimised.
 *
 * Written from the papers and from flash-linear-attention's definitions, not from kda.h: the state
 * here is [dim_k][dim_v], every token is a step, and exp, log1p and sqrt are libm's.
 */
#ifndef REFERENCE_H
#define REFERENCE_H

#include <math.h>
#include <stddef.h>

static inline double reference_sigmoid(double x) {
    return x >= 0 ? 1 / (1 + exp(-x)) : exp(x) / (1 + exp(x));
}

static inline double reference_softplus(double x) {
    return x > 0 ? x + log1p(exp(-x)) : log1p(exp(x));
}

/* One token of one head. q, k, g: [K]; v, o: [V]; S: [K][V]; q is scaled by the caller. */
static inline void reference_step(size_t K, size_t V, const double *q, const double *k,
                                  const double *v, const double *g, double beta, double *S,
                                  double *o) {
    for (size_t i = 0; i < K; i++)
        for (size_t j = 0; j < V; j++) S[i * V + j] *= exp(g[i]);
    for (size_t j = 0; j < V; j++) {
        double stored = 0;
        for (size_t i = 0; i < K; i++) stored += S[i * V + j] * k[i];
        double missing = v[j] - stored;
        for (size_t i = 0; i < K; i++) S[i * V + j] += beta * k[i] * missing;
        o[j] = 0;
        for (size_t i = 0; i < K; i++) o[j] += S[i * V + j] * q[i];
    }
}

/* The same in plain float32, as a first implementation would be: the yardstick for errors. */
static inline void reference_step_f32(size_t K, size_t V, const float *q, const float *k,
                                      const float *v, const float *g, float beta, float *S,
                                      float *o) {
    for (size_t i = 0; i < K; i++)
        for (size_t j = 0; j < V; j++) S[i * V + j] *= expf(g[i]);
    for (size_t j = 0; j < V; j++) {
        float stored = 0;
        for (size_t i = 0; i < K; i++) stored += S[i * V + j] * k[i];
        float missing = v[j] - stored;
        for (size_t i = 0; i < K; i++) S[i * V + j] += beta * k[i] * missing;
        o[j] = 0;
        for (size_t i = 0; i < K; i++) o[j] += S[i * V + j] * q[i];
    }
}

static inline void reference_l2_norm(size_t n, double eps, double *x) {
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += x[i] * x[i];
    for (size_t i = 0; i < n; i++) x[i] /= sqrt(sum + eps);
}

#endif
