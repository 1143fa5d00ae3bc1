/* A long sequence of weak decay: errors of the state must not grow past those of a plain float32
 * recurrence. One head of 32 x 32, g about -1e-4; inputs are made a piece at a time.
 *
 *     KDA_LONG_TOKENS=1048576 build/tests/test_long
 *
 * The default keeps `make test` quick. */
#include "../kda.h"
#include "operator.h"

enum { K = 32, V = 32, PIECE = 4096, DEFAULT_TOKENS = 16384 };

/* One sequence four ways, from zeros: float64 and plain float32 in [K][V], kda.h's in [V][K]. */
typedef struct sequence {
    double state[K * V], o[V]; /* o: of the last token */
    float state_f32[K * V], o_f32[V];
    float state_kda[2][K * V], o_kda[2][V]; /* recurrent, chunked */
    size_t n_tokens;
} sequence;

static const kda_algorithm both[] = {KDA_RECURRENT, KDA_CHUNKED};
static const char *const both_names[] = {"recurrent", "chunked"};

/* KDA_LONG_TOKENS, or the default if it is not set; 0 if it is no number of tokens. */
static size_t tokens_wanted(void) {
    const char *text = getenv("KDA_LONG_TOKENS");
    char *end;
    if (!text || !*text) return DEFAULT_TOKENS;
    unsigned long long n = strtoull(text, &end, 10);
    return *end || text[0] == '-' || n > SIZE_MAX / 2 ? 0 : (size_t)n;
}

/* The next tokens: every piece from a seed of its own, so that any can be made again. */
static problem next_piece(const sequence *s, size_t n) {
    kda_desc desc = problem_desc(1, 0, K, V);
    test_seed(1000 + s->n_tokens / PIECE);
    problem p = problem_new(&desc, n);
    for (size_t i = 0; i < n * K; i++) p.g[i] = -1e-4f * test_uniform_f32(0.5f, 1.5f);
    return p;
}

static void step_references(sequence *s, const problem *p) {
    double q[K], k[K], g[K], v[V];
    float in[3 * K + V], *q_f32 = in, *k_f32 = in + K, *g_f32 = in + 2 * K, *v_f32 = in + 3 * K;
    for (size_t t = 0; t < p->tokens; t++) {
        double beta = problem_token(p, t, 0, q, k, v, g);
        for (size_t i = 0; i < K; i++) {
            q_f32[i] = (float)q[i], k_f32[i] = (float)k[i], g_f32[i] = (float)g[i];
        }
        for (size_t j = 0; j < V; j++) v_f32[j] = (float)v[j];
        reference_step(K, V, q, k, v, g, beta, s->state, s->o);
        reference_step_f32(K, V, q_f32, k_f32, v_f32, g_f32, (float)beta, s->state_f32, s->o_f32);
    }
}

static void step_kda(sequence *s, const problem *p) {
    float *o = test_floats(p->output_count);
    for (size_t a = 0; a < 2; a++) {
        CHECK(problem_run(p, both[a], 0, p->tokens, s->state_kda[a], o) == KDA_OK);
        memcpy(s->o_kda[a], o + (p->tokens - 1) * V, V * sizeof(float));
    }
    free(o);
}

/* Relative L2 error of a state in [V][K] (or, transposed, in [K][V]) against float64's. */
static double state_error(const sequence *s, const float *state, int transposed) {
    double want[K * V];
    for (size_t i = 0; i < K; i++)
        for (size_t j = 0; j < V; j++)
            want[transposed ? i * V + j : j * K + i] = s->state[i * V + j];
    return test_relative_l2(state, want, K * V);
}

static void weak_decay_over_many_tokens(void) {
    static sequence s;
    size_t tokens = tokens_wanted();
    CHECK_MSG(tokens > 0, "KDA_LONG_TOKENS=%s is no number of tokens", getenv("KDA_LONG_TOKENS"));
    while (s.n_tokens < tokens) {
        size_t n = tokens - s.n_tokens < PIECE ? tokens - s.n_tokens : PIECE;
        problem p = next_piece(&s, n);
        step_references(&s, &p);
        step_kda(&s, &p);
        problem_free(&p);
        s.n_tokens += n;
    }
    double o_f32 = test_relative_l2(s.o_f32, s.o, V), state_f32 = state_error(&s, s.state_f32, 1);
    printf("%zu tokens\n", s.n_tokens);
    printf("  %-14s state %.2e, last output %.2e\n", "plain float32", state_f32, o_f32);
    for (size_t a = 0; a < 2; a++) {
        double o = test_relative_l2(s.o_kda[a], s.o, V), state = state_error(&s, s.state_kda[a], 0);
        printf("  %-14s state %.2e, last output %.2e\n", both_names[a], state, o);
        CHECK_AT_MOST("state", state, 4 * state_f32 + 1e-7);
        CHECK_AT_MOST("last output", o, 4 * o_f32 + 1e-7);
    }
}

int main(void) {
    TEST(weak_decay_over_many_tokens);
    return test_summary();
}
