/* test_sessions.c - sessions of the model driver: threads, batches, drafts, files and caches. The
 * numbers themselves are checked in test_hybrid.c; here bits must stay what they are. */
#include "../examples/saved.h"

#include "reader.h"

#include <sys/wait.h>
#include <unistd.h>

/* In place of the library's: a file is changed between the two times that loading reads it. */
static void (*before_seeking)(void);
int fseek(FILE *stream, long offset, int whence) {
    if (before_seeking) before_seeking();
    return fseeko(stream, offset, whence);
}

#define COUNT(array) (sizeof(array) / sizeof *(array))

static bool same_floats(const float *a, const float *b, size_t n) {
    return memcmp(a, b, n * sizeof *a) == 0;
}

/* Logits of n ids in one call, by a session of its own. */
static float *logits_alone(const hybrid_model *model, const uint32_t *ids, size_t n) {
    reader r = open_reader(model, n, 0);
    float *logits = test_floats(n * model->config.vocab_size);
    read_ids(&r, ids, n, n, logits, NULL);
    close_reader(&r);
    return logits;
}

/* A filled session goes on, as any other of its seed and as none of another seed; it is as full as it
 * says. */
static void filled_sessions(void) {
    hybrid_model model = open_model(models[0].directory);
    float *logits[3];
    error e;
    for (size_t i = 0; i < 3; i++) {
        uint32_t id = 1;
        reader r = open_reader(&model, 5001, 0);
        logits[i] = test_floats(model.config.vocab_size);
        CHECK(hybrid_session_fill(&r.session, 5000, i / 2, &e) && r.session.n_tokens == 5000);
        read_ids(&r, &id, 1, 1, logits[i], NULL);
        CHECK(!hybrid_check_tokens(&r.session, &id, 1, &e));
        CHECK(!hybrid_session_fill(&r.session, 5002, 0, &e) && strstr(e.text, "5002"));
        close_reader(&r);
        for (size_t j = 0; j < model.config.vocab_size; j++) CHECK(isfinite(logits[i][j]));
    }
    CHECK(same_floats(logits[0], logits[1], model.config.vocab_size));
    CHECK(!same_floats(logits[0], logits[2], model.config.vocab_size));
    for (size_t i = 0; i < 3; i++) free(logits[i]);
    hybrid_close(&model);
}

/* The configuration of kimi-linear-tiny with other values of some keys, and no weights: what sizes and
 * sessions are made from. */
static hybrid_model shape_of(const char *const (*keys)[2], size_t n) {
    size_t size;
    char *text = read_file(models[0].directory, "config.json", &size);
    hybrid_model model;
    error e;
    memset(&model, 0, sizeof model);
    for (size_t i = 0; i < n; i++) {
        char *edited = edit(text, keys[i][0], keys[i][1]);
        free(text);
        text = edited;
    }
    if (!hybrid_config_parse(&model.config, "shape", text, strlen(text), &e)) give_up(e.text);
    free(text);
    return model;
}

/* All numbers of the tokens that a session is filled with, in a cache of any width, and no other. */
static void filled_caches(void) {
    static const char *const ranks[][2] = {
        {"kv_lora_rank", "56"}, {"kv_lora_rank", "57"}, {"kv_lora_rank", "125"}};
    enum { CAPACITY = 5, FILLED = 3 };
    for (size_t i = 0; i < COUNT(ranks); i++) {
        hybrid_model model = shape_of(&ranks[i], 1);
        hybrid_session session = open_session(&model, CAPACITY, LINEAR_F32, 0);
        size_t layer = 0, width = model.config.kv_lora_rank + model.config.qk_rope_head_dim;
        error e;
        while (model.config.is_kda[layer]) layer++;
        unsigned char *latents = (unsigned char *)session.layers[layer].latents;
        memset(latents, 0xff, CAPACITY * width * 4); /* NaN */
        CHECK(hybrid_session_fill(&session, FILLED, 1, &e));
        for (size_t k = 0; k < CAPACITY * width; k++) {
            float x = st_load_f32(latents + 4 * k);
            CHECK(k < FILLED * width ? fabsf(x) <= 1.7f && x != 0 : isnan(x));
        }
        hybrid_session_close(&session);
    }
}

/* ==== Blocks and threads ==== */

static void pieces_keep_the_way_of_their_call(void) {
    for (size_t left = 0; left < 200; left++)
        for (size_t room = 0; room < 100; room++) {
            size_t n = hybrid_piece(left, room), rest = left - n;
            CHECK(n <= left && n <= room);
            if (left <= room) CHECK(n == left);
            if (left > room && left < HYBRID_CHUNKED_FROM) CHECK(n == room);
            if (left > room && left >= HYBRID_CHUNKED_FROM)
                CHECK(n == 0 || (n % KDA_CHUNK == 0 && n >= HYBRID_CHUNKED_FROM &&
                                 rest >= HYBRID_CHUNKED_FROM));
            if (room >= HYBRID_MIN_BLOCK && left > 0) CHECK(n > 0);
        }
}

static void blocks_change_no_bit(void) {
    static const size_t blocks[] = {32, 41, 72, 150, 300}, lengths[] = {150, 68, 75, 33, 11};
    for (size_t m = 0; m < N_MODELS; m++) {
        golden g = golden_open(models[m].directory);
        hybrid_model model = open_model(models[m].directory);
        float *got = test_floats(g.n * g.vocab);
        for (size_t l = 0; l < COUNT(lengths); l++) {
            float *want = logits_alone(&model, g.ids, lengths[l]);
            for (size_t i = 0; i < COUNT(blocks); i++) {
                reader r = open_reader(&model, g.n, blocks[i]);
                read_ids(&r, g.ids, lengths[l], lengths[l], got, NULL);
                CHECK_MSG(same_floats(got, want, lengths[l] * g.vocab), "blocks of %zu, %zu tokens",
                          blocks[i], lengths[l]);
                close_reader(&r);
            }
            free(want);
        }
        free(got);
        hybrid_close(&model);
        golden_free(&g);
    }
}

/* A prompt in one call, then tokens one by one, in a pool. */
static void read_in_threads(const hybrid_model *model, const golden *g, size_t n_threads,
                            float *logits, float *hidden) {
    parallel pool;
    error e;
    if (!parallel_open(&pool, n_threads, &e)) give_up(e.text);
    reader r;
    r.work = open_workspace(model, g->n, 0, &pool);
    r.session = open_session(model, g->n, LINEAR_F32, 0);
    read_ids(&r, g->ids, 120, 120, logits, hidden);
    read_ids(&r, g->ids + 120, g->n - 120, 1, logits + 120 * g->vocab, NULL);
    close_reader(&r);
    parallel_close(&pool);
}

static void threads_change_no_bit(void) {
    static const size_t threads[] = {2, 3, 8};
    for (size_t m = 0; m < N_MODELS; m++) {
        golden g = golden_open(models[m].directory);
        hybrid_model model = open_model(models[m].directory);
        size_t n_hidden = g.layers * 120 * g.hidden;
        float *want = test_floats(g.n * g.vocab), *got = test_floats(g.n * g.vocab);
        float *want_hidden = test_floats(n_hidden), *got_hidden = test_floats(n_hidden);
        read_in_threads(&model, &g, 1, want, want_hidden);
        check_logits(&g, want, models[m].bound);
        for (size_t i = 0; i < COUNT(threads); i++) {
            read_in_threads(&model, &g, threads[i], got, got_hidden);
            CHECK_MSG(same_floats(got, want, g.n * g.vocab), "%zu threads", threads[i]);
            CHECK_MSG(same_floats(got_hidden, want_hidden, n_hidden), "%zu threads", threads[i]);
        }
        free(want), free(got), free(want_hidden), free(got_hidden);
        hybrid_close(&model);
        golden_free(&g);
    }
}

/* ==== Batches ==== */

/* Lengths of the calls of each of some sessions: round by round together, or each alone. */
#define N_SESSIONS 6
static const size_t rounds[][N_SESSIONS] = {
    {1, 70, 0, 12, 5, 33}, {1, 1, 1, 1, 1, 1}, {40, 2, 31, 0, 11, 1}, {1, 0, 1, 1, 64, 13}};

/* What one session gives: [COUNT(rounds)] times a row of room. */
typedef struct results {
    float *logits, *last, *hidden;
} results;

static results new_results(const golden *g) {
    results r = {test_floats(g->n * g->vocab), test_floats(COUNT(rounds) * g->vocab),
                 test_floats(g->layers * g->n * g->hidden)};
    return r;
}

static bool same_results(const golden *g, const results *a, const results *b) {
    return same_floats(a->logits, b->logits, g->n * g->vocab) &&
           same_floats(a->last, b->last, COUNT(rounds) * g->vocab) &&
           same_floats(a->hidden, b->hidden, g->layers * g->n * g->hidden);
}

static void free_results(results *r) {
    free(r->logits), free(r->last), free(r->hidden);
}

/* The call of one session in one round; each reads other tokens and wants other things. */
static hybrid_item item_of(const golden *g, hybrid_session *session, size_t which, size_t round,
                           const results *to) {
    hybrid_item item = {session,
                        g->ids + 5 * which + session->n_tokens,
                        rounds[round][which],
                        {NULL, to->last + round * g->vocab, NULL, g->n * g->hidden, NULL, 0}};
    if (which % 3 != 2) item.want.logits = to->logits + session->n_tokens * g->vocab;
    if (which % 2 == 0) item.want.hidden = to->hidden + session->n_tokens * g->hidden;
    if (which == 5) item.want.last_logits = NULL;
    return item;
}

static void check_batch(size_t m, size_t block, parallel *pool) {
    golden g = golden_open(models[m].directory);
    hybrid_model model = open_model(models[m].directory);
    hybrid_workspace work = open_workspace(&model, g.n, block, pool);
    hybrid_session sessions[N_SESSIONS];
    results got[N_SESSIONS];
    error e;
    for (size_t i = 0; i < N_SESSIONS; i++) {
        sessions[i] = open_session(&model, g.n - i, LINEAR_F32, 0);
        got[i] = new_results(&g);
    }
    for (size_t round = 0; round < COUNT(rounds); round++) {
        hybrid_item items[N_SESSIONS];
        for (size_t i = 0; i < N_SESSIONS; i++)
            items[i] = item_of(&g, &sessions[i], i, round, &got[i]);
        CHECK_MSG(hybrid_forward_batch(&work, items, N_SESSIONS, &e), "%s", e.text);
    }
    for (size_t i = 0; i < N_SESSIONS; i++) {
        reader alone = open_reader(&model, g.n, 0);
        results want = new_results(&g);
        for (size_t round = 0; round < COUNT(rounds); round++) {
            hybrid_item item = item_of(&g, &alone.session, i, round, &want);
            CHECK(hybrid_forward(&alone.work, item.session, item.ids, item.n, &item.want, &e));
        }
        CHECK_MSG(same_results(&g, &got[i], &want), "session %zu, blocks of %zu", i, block);
        CHECK(alone.session.n_tokens == sessions[i].n_tokens);
        close_reader(&alone);
        free_results(&want), free_results(&got[i]);
        hybrid_session_close(&sessions[i]);
    }
    hybrid_workspace_close(&work);
    hybrid_close(&model);
    golden_free(&g);
}

static void a_batch_gives_the_bits_of_each_alone(void) {
    parallel pool;
    error e;
    if (!parallel_open(&pool, 3, &e)) give_up(e.text);
    for (size_t m = 0; m < N_MODELS; m++) {
        check_batch(m, 0, NULL);
        check_batch(m, HYBRID_MIN_BLOCK, NULL);
        check_batch(m, 1000, &pool);
    }
    parallel_close(&pool);
}

/* Weights of the mixtures that one session of a batch wants: those that it has alone. */
static void depth_of_one_session_of_a_batch(void) {
    enum { N = 7 };
    golden g = golden_open(models[1].directory);
    hybrid_model model = open_model(models[1].directory);
    hybrid_workspace work = open_workspace(&model, 20, 0, NULL);
    hybrid_session alone = open_session(&model, 20, LINEAR_F32, 0), sessions[3];
    size_t stride = N * hybrid_depth_sources(&model.config);
    size_t n = (2 * model.config.n_layers + 1) * stride;
    float *want = test_floats(n), *got = test_floats(n);
    hybrid_want depth = {NULL, NULL, NULL, 0, want, stride}, nothing = {0};
    hybrid_item items[3];
    error e;
    CHECK(hybrid_forward(&work, &alone, g.ids, N, &depth, &e));
    depth.depth = got;
    for (size_t i = 0; i < 3; i++) {
        hybrid_item item = {&sessions[i], g.ids + (i + 2) % 3, N, i == 1 ? depth : nothing};
        sessions[i] = open_session(&model, 20, LINEAR_F32, 0);
        items[i] = item;
    }
    CHECK_MSG(hybrid_forward_batch(&work, items, 3, &e), "%s", e.text);
    CHECK(same_floats(got, want, n));
    for (size_t i = 0; i < 3; i++) hybrid_session_close(&sessions[i]);
    free(want), free(got);
    hybrid_session_close(&alone);
    hybrid_workspace_close(&work);
    hybrid_close(&model);
    golden_free(&g);
}

/* A call of three items, the last of them bad: refused, and nobody has read anything. */
static void check_batch_refused(hybrid_workspace *work, hybrid_session *a, hybrid_session *b,
                                hybrid_item bad, const char *part) {
    static const uint32_t ids[3] = {1, 2, 3};
    hybrid_item items[3] = {{a, ids, 3, {0}}, {b, ids, 3, {0}}, bad};
    size_t before[2] = {a->n_tokens, b->n_tokens};
    error e = {""};
    CHECK_MSG(!hybrid_forward_batch(work, items, 3, &e), "accepted: %s", part);
    CHECK_MSG(strstr(e.text, part), "no \"%s\" in \"%s\"", part, e.text);
    CHECK(a->n_tokens == before[0] && b->n_tokens == before[1] && !a->listed && !b->listed);
}

static void bad_batches_are_refused(void) {
    static const uint32_t ids[3] = {1, 2, 256};
    hybrid_model model = open_model(models[0].directory), other = open_model(models[1].directory);
    hybrid_workspace work = open_workspace(&model, 30, 0, NULL);
    hybrid_session a = open_session(&model, 30, LINEAR_F32, 0);
    hybrid_session b = open_session(&model, 30, LINEAR_F32, 0);
    hybrid_session c = open_session(&model, 2, LINEAR_F32, 0);
    hybrid_session larger = open_session(&model, 31, LINEAR_F32, 0);
    hybrid_session half = open_session(&model, 30, LINEAR_BF16, 0);
    hybrid_session foreign = open_session(&other, 30, LINEAR_F32, 0);
    hybrid_item bad = {&a, ids, 1, {0}};
    check_batch_refused(&work, &a, &b, bad, "found one twice");
    bad.session = &larger;
    check_batch_refused(&work, &a, &b, bad, "30 tokens, found one of 31");
    bad.session = &half;
    check_batch_refused(&work, &a, &b, bad, "one type of cache");
    bad.session = &foreign;
    check_batch_refused(&work, &a, &b, bad, "one model");
    bad.session = &c, bad.n = 3;
    check_batch_refused(&work, &a, &b, bad, "found 256");
    bad.ids = ids + 1, bad.n = 2;
    check_batch_refused(&work, &a, &b, bad, "found 256");
    bad.ids = (const uint32_t[]){1, 2, 3}, bad.n = 3;
    check_batch_refused(&work, &a, &b, bad, "room for 2");
    bad.n = 2; /* which is sound, and one before it is not */
    check_batch_refused(&work, &a, &a, bad, "found one twice");
    hybrid_session_close(&a), hybrid_session_close(&b), hybrid_session_close(&c);
    hybrid_session_close(&larger), hybrid_session_close(&half), hybrid_session_close(&foreign);
    hybrid_workspace_close(&work);
    hybrid_close(&model), hybrid_close(&other);
}

/* ==== Sizes and caches ==== */

static void sizes_are_known(void) {
    hybrid_model model = open_model(models[0].directory);
    hybrid_session_options none = {0, LINEAR_F32, 0}, some = {64, LINEAR_F32, 0};
    hybrid_session session;
    hybrid_workspace work;
    hybrid_workspace_options how = {SIZE_MAX / 2, 1, {KDA_ISA_AUTO, NULL, false}};
    error e;
    size_t fixed = hybrid_session_bytes(&model, &none);
    /* 3 MLA layers, 48 + 8 channels */
    CHECK(hybrid_session_bytes(&model, &some) - fixed == 3 * 64 * 56 * sizeof(float));
    some.cache = LINEAR_BF16;
    CHECK(hybrid_session_bytes(&model, &some) - fixed == 3 * 64 * 56 * 2);
    some.max_draft = 4;
    CHECK(hybrid_session_bytes(&model, &some) - fixed > 3 * 64 * 56 * 2);
    none.capacity = SIZE_MAX / 2;
    CHECK(hybrid_session_bytes(&model, &none) == 0);
    CHECK(!hybrid_session_open(&session, &model, &none, &e) && !session.memory);
    none.capacity = 1, none.cache = LINEAR_MXFP4;
    CHECK(!hybrid_session_open(&session, &model, &none, &e) && !session.memory);
    CHECK(hybrid_workspace_bytes(&model, &how) == 0);
    CHECK(!hybrid_workspace_open(&work, &model, &how, &e) && !work.memory);
    how.block = HYBRID_MIN_BLOCK - 1;
    CHECK(hybrid_workspace_bytes(&model, &how) == 0);
    CHECK(!hybrid_workspace_open(&work, &model, &how, &e) && !work.memory);
    CHECK_MSG(strstr(e.text, "32") && strstr(e.text, "31"), "%s", e.text);
    how.block = 0,
    how.run.isa = (kda_isa)(kda_isa_is_available(KDA_ISA_NEON) ? KDA_ISA_AVX2 : KDA_ISA_NEON);
    CHECK(!hybrid_workspace_open(&work, &model, &how, &e) && !work.memory);
    CHECK_MSG(strstr(e.text, kda_isa_name(how.run.isa)), "%s", e.text);
    hybrid_close(&model);
}

/* A workspace has room for the widest that a token goes through, whichever that is, and there is none
 * whose bytes cannot be addressed. */
static void workspaces_grow_with_their_block(void) {
    static const struct {
        const char *key, *value;
        size_t numbers; /* that its widest part holds of each token */
    } cases[] = {{"linear_attn_config.num_heads", "64", (size_t)5 * 64 * 32},
                 {"vocab_size", "4000", 4000},
                 {"vocab_size", "100000", 4096}, /* of the head some rows at a time */
                 {"intermediate_size", "9000", 2 * 9000},
                 {"moe_intermediate_size", "9000", 2 * 9000},
                 {"num_shared_experts", "300", (size_t)2 * 300 * 32}};
    for (size_t i = 0; i < COUNT(cases); i++) {
        const char *const keys[][2] = {{"num_shared_experts", "0"},
                                       {cases[i].key, cases[i].value},
                                       {"num_attention_heads", "1"},
                                       {"num_key_value_heads", "1"}};
        hybrid_model model = shape_of(keys, COUNT(keys));
        hybrid_workspace_options how = {1024, 1, {KDA_ISA_AUTO, NULL, false}};
        size_t one = hybrid_workspace_bytes(&model, &how);
        how.block *= 2;
        size_t token = (hybrid_workspace_bytes(&model, &how) - one) / 1024;
        CHECK_MSG(token > 4 * cases[i].numbers, "%s: %zu bytes", cases[i].key, token);
        how.block = PTRDIFF_MAX / token / 16 * 15;
        CHECK_MSG(hybrid_workspace_bytes(&model, &how) / token >= how.block, "%s", cases[i].key);
        how.block = PTRDIFF_MAX / token / 16 * 17;
        CHECK_MSG(hybrid_workspace_bytes(&model, &how) == 0, "%s", cases[i].key);
    }
}

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y; /* NaN is the equal of all, and where it is first or last it shows */
}

/* The error of the middle token: where a rounded latent makes a router choose another expert, a
 * token is far away, however small the rounding. */
static double median_error(const golden *g, const float *logits) {
    double errors[512] = {0};
    for (size_t t = 0; t < g->n; t++)
        errors[t] = test_relative_l2(logits + t * g->vocab, g->logits + t * g->vocab, g->vocab);
    qsort(errors, g->n, sizeof *errors, by_size);
    return errors[g->n - 1] >= 0 ? errors[g->n / 2] : (double)NAN;
}

/* Half-size caches round each latent: by 2^-12 of itself at most in f16, by 2^-9 in bf16. */
static void caches_of_16_bits_stay_near(void) {
    static const struct {
        linear_type type;
        const char *name;
        double bound;
    } caches[] = {{LINEAR_F16, "f16", 8 * 0x1p-12}, {LINEAR_BF16, "bf16", 8 * 0x1p-9}};
    for (size_t m = 0; m < N_MODELS; m++) {
        golden g = golden_open(models[m].directory);
        hybrid_model model = open_model(models[m].directory);
        hybrid_workspace work = open_workspace(&model, g.n, 0, NULL);
        float *logits = test_floats(g.n * g.vocab), *split = test_floats(g.n * g.vocab);
        error e;
        for (size_t i = 0; i < COUNT(caches); i++) {
            hybrid_session session = open_session(&model, g.n, caches[i].type, 0);
            forward(&work, &session, g.ids, g.n, g.n, logits, NULL);
            double found = median_error(&g, logits);
            printf("%s, cache of %s: %.2e\n", models[m].directory, caches[i].name, found);
            CHECK_AT_MOST(caches[i].name, found, caches[i].bound);
            CHECK(found > models[m].bound); /* the option does something */
            CHECK(hybrid_session_reset(&session, &e));
            forward(&work, &session, g.ids, g.n, 40, split,
                    NULL); /* 40, 40, 40, 30: whole chunks */
            CHECK(same_floats(split, logits, g.n * g.vocab));
            hybrid_session_close(&session);
        }
        free(logits), free(split);
        hybrid_workspace_close(&work);
        hybrid_close(&model);
        golden_free(&g);
    }
}

/* ==== Drafts ==== */

enum { DRAFT = 6, PROMPT = 20 };

/* Drafts of every length, of which every number is accepted, against tokens one by one. */
static void check_drafts(size_t m, parallel *pool) {
    golden g = golden_open(models[m].directory);
    hybrid_model model = open_model(models[m].directory);
    hybrid_workspace work = open_workspace(&model, g.n, 0, pool);
    hybrid_session session = open_session(&model, g.n, LINEAR_F32, DRAFT);
    float *serial = test_floats(g.n * g.vocab), *got = test_floats(PROMPT * g.vocab);
    size_t t = PROMPT;
    error e;
    forward(&work, &session, g.ids, PROMPT, PROMPT, serial, NULL);
    forward(&work, &session, g.ids + PROMPT, g.n - PROMPT, 1, serial + PROMPT * g.vocab, NULL);
    CHECK(hybrid_session_reset(&session, &e));
    forward(&work, &session, g.ids, PROMPT, PROMPT, got, NULL);
    for (size_t round = 0; t + DRAFT < g.n; round++) {
        size_t n = 1 + round % DRAFT, m_accepted = round / 2 % (n + 1);
        uint32_t draft[DRAFT];
        hybrid_want want = {0};
        want.logits = got;
        memcpy(draft, g.ids + t, n * sizeof *draft);
        if (m_accepted < n) draft[m_accepted] ^= 1; /* the draft model was wrong there */
        CHECK_MSG(hybrid_verify(&work, &session, draft, n, &want, &e), "%s", e.text);
        CHECK(session.n_tokens == t && session.n_draft == n);
        CHECK(same_floats(got, serial + t * g.vocab, m_accepted * g.vocab));
        CHECK_MSG(hybrid_commit(&work, &session, m_accepted, &e), "%s", e.text);
        t += m_accepted;
        CHECK(session.n_tokens == t && session.n_draft == 0);
        if (round % 3 == 2) { /* a token between drafts */
            CHECK(hybrid_forward(&work, &session, g.ids + t, 1, &want, &e));
            CHECK(same_floats(got, serial + t * g.vocab, g.vocab));
            t++;
        }
    }
    CHECK(t + DRAFT >= g.n);
    free(serial), free(got);
    hybrid_session_close(&session);
    hybrid_workspace_close(&work);
    hybrid_close(&model);
    golden_free(&g);
}

static void drafts_give_the_bits_of_single_tokens(void) {
    parallel pool;
    error e;
    if (!parallel_open(&pool, 2, &e)) give_up(e.text);
    for (size_t m = 0; m < N_MODELS; m++) {
        check_drafts(m, NULL);
        check_drafts(m, &pool);
    }
    parallel_close(&pool);
}

/* Several sessions verify together; a draft that is not committed leaves nothing behind. */
static void drafts_in_a_batch(void) {
    enum { READ = 15, MOST = 12 };
    golden g = golden_open(models[1].directory);
    hybrid_model model = open_model(models[1].directory);
    hybrid_workspace work = open_workspace(&model, g.n, HYBRID_MIN_BLOCK, NULL);
    hybrid_session serial = open_session(&model, g.n, LINEAR_F32, 0), sessions[4];
    float *want = test_floats((READ + MOST) * g.vocab), *got = test_floats(4 * MOST * g.vocab);
    float *unseen = test_floats(READ * g.vocab);
    hybrid_item items[4];
    error e;
    memset(items, 0, sizeof items);
    forward(&work, &serial, g.ids, READ, READ, want, NULL);
    forward(&work, &serial, g.ids + READ, MOST, 1, want + READ * g.vocab, NULL);
    for (size_t i = 0; i < 4; i++) { /* drafts of 12, 11, 10, 9 in blocks of 32: two blocks */
        sessions[i] = open_session(&model, g.n, LINEAR_F32, MOST);
        forward(&work, &sessions[i], g.ids, READ, READ, unseen, NULL);
        items[i].session = &sessions[i], items[i].ids = g.ids + READ, items[i].n = MOST - i;
        items[i].want.logits = got + i * MOST * g.vocab;
    }
    for (size_t pass = 0; pass < 2; pass++) { /* the first draft is forgotten */
        CHECK_MSG(hybrid_verify_batch(&work, items, 4, &e), "%s", e.text);
        for (size_t i = 0; i < 4; i++)
            CHECK(same_floats(items[i].want.logits, want + READ * g.vocab, items[i].n * g.vocab));
    }
    for (size_t i = 0; i < 4; i++) {
        hybrid_want last = {NULL, got, NULL, 0, NULL, 0};
        if (i % 2) CHECK(hybrid_commit(&work, &sessions[i], 2, &e));
        CHECK(hybrid_forward(&work, &sessions[i], g.ids + sessions[i].n_tokens, 1, &last, &e));
        CHECK(same_floats(got, want + (sessions[i].n_tokens - 1) * g.vocab, g.vocab));
        CHECK(!hybrid_commit(&work, &sessions[i], 1, &e)); /* that token dropped the draft */
        hybrid_session_close(&sessions[i]);
    }
    free(want), free(got), free(unseen);
    hybrid_session_close(&serial);
    hybrid_workspace_close(&work);
    hybrid_close(&model);
    golden_free(&g);
}

static void bad_drafts_are_refused(void) {
    static const uint32_t ids[40] = {1, 2, 3};
    hybrid_model model = open_model(models[0].directory);
    hybrid_workspace work = open_workspace(&model, 40, HYBRID_MIN_BLOCK, NULL);
    hybrid_session none = open_session(&model, 40, LINEAR_F32, 0);
    hybrid_session some = open_session(&model, 4, LINEAR_F32, 3);
    hybrid_session many = open_session(&model, 40, LINEAR_F32, 40);
    hybrid_want want = {0};
    error e;
    CHECK(!hybrid_verify(&work, &none, ids, 1, &want, &e));
    CHECK_MSG(strstr(e.text, "at most 0 tokens, found 1"), "%s", e.text);
    CHECK(!hybrid_verify(&work, &some, ids, 4, &want, &e));
    CHECK_MSG(strstr(e.text, "at most 3 tokens, found 4"), "%s", e.text);
    CHECK(!hybrid_verify(&work, &many, ids, 33, &want, &e)); /* more than a block */
    CHECK_MSG(strstr(e.text, "at most 32 tokens, found 33"), "%s", e.text);
    CHECK(!hybrid_commit(&work, &some, 1, &e));
    CHECK(hybrid_verify(&work, &some, ids, 3, &want, &e));
    CHECK(!hybrid_commit(&work, &some, 4, &e) && some.n_draft == 3);
    CHECK_MSG(strstr(e.text, "3") && strstr(e.text, "4"), "%s", e.text);
    CHECK(hybrid_commit(&work, &some, 2, &e));
    CHECK(!hybrid_verify(&work, &some, ids, 3, &want, &e)); /* no room in the cache */
    CHECK_MSG(strstr(e.text, "room for 4"), "%s", e.text);
    hybrid_session_close(&none), hybrid_session_close(&some), hybrid_session_close(&many);
    hybrid_workspace_close(&work);
    hybrid_close(&model);
}

static void a_commit_is_of_one_model(void) {
    hybrid_model model = open_model(models[0].directory), other = open_model(models[1].directory);
    reader r = open_reader(&model, 4, 0);
    hybrid_session session = open_session(&other, 4, LINEAR_F32, 2);
    error e = {""};
    CHECK(!hybrid_commit(&r.work, &session, 0, &e));
    CHECK_MSG(strcmp(e.text, "session and workspace: expected one model, found two") == 0, "%s",
              e.text);
    hybrid_session_close(&session);
    close_reader(&r);
    hybrid_close(&model), hybrid_close(&other);
}

/* ==== What a library refuses ==== */

static bool begins_with(const char *text, const char *start) {
    return strncmp(text, start, strlen(start)) == 0;
}

/* Some tokens are refused by a sentence that names the library's call. */
static void check_forward_fails(hybrid_workspace *work, hybrid_session *session, const char *call) {
    static const uint32_t ids[3] = {1, 2, 3};
    float *logits = test_floats(3 * session->model->config.vocab_size);
    hybrid_want want = {0};
    error e = {""};
    want.logits = logits;
    CHECK_MSG(!hybrid_forward(work, session, ids, 3, &want, &e) && begins_with(e.text, call),
              "%s: \"%s\"", call, e.text);
    free(logits);
}

/* A session with a state where no float may be. */
static void refusals_of_kda_are_handed_on(void) {
    static const uint32_t ids[3] = {1, 2, 3};
    hybrid_model model = open_model(models[0].directory);
    hybrid_workspace work = open_workspace(&model, 9, 0, NULL);
    hybrid_session session = open_session(&model, 9, LINEAR_F32, 3);
    hybrid_want want = {0};
    error e = {""};
    CHECK(hybrid_verify(&work, &session, ids, 3, &want, &e));
    void *state = session.layers[1].state;
    session.layers[1].state = (unsigned char *)state + 1;
    CHECK(!hybrid_commit(&work, &session, 3, &e) && session.n_draft == 3);
    CHECK_MSG(begins_with(e.text, "kda_layer_commit: "), "%s", e.text);
    CHECK(!hybrid_verify(&work, &session, ids, 3, &want, &e));
    CHECK_MSG(begins_with(e.text, "kda_layer_verify: "), "%s", e.text);
    check_forward_fails(&work, &session, "kda_layer: ");
    CHECK(session.n_tokens == 0);
    CHECK(!hybrid_session_reset(&session, &e));
    CHECK_MSG(begins_with(e.text, "kda_state_clear: "), "%s", e.text);
    session.layers[1].state = state;
    CHECK(hybrid_session_reset(&session, &e) &&
          hybrid_forward(&work, &session, ids, 3, &want, &e) && session.n_tokens == 3);
    hybrid_session_close(&session);
    hybrid_workspace_close(&work);
    hybrid_close(&model);
}

/* A model without one of its queries, and a workspace with an instruction set that is not there. */
static void refusals_of_attnres_are_handed_on(void) {
    hybrid_model model = open_model(models[1].directory);
    hybrid_workspace work = open_workspace(&model, 9, 0, NULL);
    hybrid_session session = open_session(&model, 9, LINEAR_F32, 0);
    const float **queries[] = {&model.layers[1].attention_query, &model.layers[1].ffn_query,
                               &model.output_query};
    error e;
    for (size_t i = 0; i < COUNT(queries); i++) {
        const float *query = *queries[i];
        *queries[i] = NULL;
        check_forward_fails(&work, &session, "attnres_bank_read: ");
        *queries[i] = query;
        CHECK(hybrid_session_reset(&session, &e));
    }
    work.depth.isa =
        attnres_isa_is_available(ATTNRES_ISA_NEON) ? ATTNRES_ISA_AVX2 : ATTNRES_ISA_NEON;
    check_forward_fails(&work, &session, "attnres_bank_start: ");
    hybrid_session_close(&session);
    hybrid_workspace_close(&work);
    hybrid_close(&model);
}

/* ==== Files ==== */

static char directory[300]; /* of the files */

static const char *file_path(const char *name) {
    static char path[400];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    return path;
}

/* A break between two calls changes no bit, in a session with another capacity and another past. */
static void a_loaded_session_goes_on(void) {
    static const linear_type caches[] = {LINEAR_F32, LINEAR_F16, LINEAR_BF16};
    static const size_t breaks[] = {0, 1, 37, 150};
    for (size_t i = 0; i < N_MODELS * COUNT(caches) * COUNT(breaks); i++) {
        const char *name = models[i % N_MODELS].directory;
        linear_type cache = caches[i / N_MODELS % COUNT(caches)];
        size_t first = breaks[i / N_MODELS / COUNT(caches)];
        if (cache != LINEAR_F32 && first != 37) continue;
        golden g = golden_open(name);
        hybrid_model model = open_model(name);
        hybrid_workspace work = open_workspace(&model, g.n + 9, 0, NULL);
        hybrid_session a = open_session(&model, g.n, cache, 0);
        hybrid_session b = open_session(&model, g.n + 9, cache, 3);
        float *want = test_floats(g.n * g.vocab), *got = test_floats(g.n * g.vocab);
        error e;
        forward(&work, &a, g.ids, first, g.n, want, NULL);
        CHECK_MSG(hybrid_session_save(&a, file_path("session"), &e), "%s", e.text);
        forward(&work, &a, g.ids + first, g.n - first, g.n, want, NULL);
        forward(&work, &b, g.ids + 50, 3, 3, got, NULL);
        CHECK_MSG(hybrid_session_load(&b, file_path("session"), &e), "%s", e.text);
        CHECK(b.n_tokens == first && b.n_draft == 0);
        forward(&work, &b, g.ids + first, g.n - first, g.n, got, NULL);
        CHECK_MSG(same_floats(got, want, (g.n - first) * g.vocab), "%s after %zu", name, first);
        free(want), free(got);
        hybrid_session_close(&a), hybrid_session_close(&b);
        hybrid_workspace_close(&work);
        hybrid_close(&model);
        golden_free(&g);
    }
    FILE *part = fopen(file_path("session.part"), "rb");
    CHECK(!part);
}

/* A session of 10 tokens, saved, and another one that damaged files are offered to. */
typedef struct saving {
    hybrid_model model;
    reader r;
    hybrid_session_options options;
    size_t size;
    unsigned char *file, *before; /* the file; the other session's memory */
} saving;

static void begin_saving(saving *s) {
    error e;
    golden g = golden_open(models[0].directory);
    float *logits = test_floats(20 * g.vocab);
    s->model = open_model(models[0].directory);
    s->r = open_reader(&s->model, 16, 0);
    s->options = s->r.session.options;
    read_ids(&s->r, g.ids, 10, 10, logits, NULL);
    if (!hybrid_session_save(&s->r.session, file_path("good"), &e)) give_up(e.text);
    s->file = (unsigned char *)read_file(directory, "good", &s->size);
    read_ids(&s->r, g.ids, 3, 3, logits, NULL);
    s->before = (unsigned char *)test_alloc(hybrid_session_bytes(&s->model, &s->options));
    memcpy(s->before, s->r.session.layers, hybrid_session_bytes(&s->model, &s->options));
    free(logits);
    golden_free(&g);
}

static void end_saving(saving *s) {
    free(s->file), free(s->before);
    close_reader(&s->r);
    hybrid_close(&s->model);
}

/* The file "bad" of that many bytes is refused, and the session is what it was. */
static void check_load_refused(saving *s, size_t size, const char *part) {
    error e = {""};
    write_file(directory, "bad", s->file, size);
    CHECK_MSG(!hybrid_session_load(&s->r.session, file_path("bad"), &e), "accepted: %s", part);
    CHECK_MSG(strstr(e.text, "/bad: ") && strstr(e.text, part), "no \"%s\" in \"%s\"", part,
              e.text);
    CHECK(s->r.session.n_tokens == 13 && memcmp(s->before, s->r.session.layers,
                                                hybrid_session_bytes(&s->model, &s->options)) == 0);
}

static void damaged_files_are_refused(void) {
    saving s;
    begin_saving(&s);
    s.file = (unsigned char *)realloc(s.file, s.size + 8);
    memset(s.file + s.size, 0, 8);
    for (size_t n = 0; n < s.size; n += n < 1200 || n + 1200 > s.size ? 7 : 1999)
        check_load_refused(&s, n, "short");
    check_load_refused(&s, s.size - 1, "short");
    check_load_refused(&s, s.size + 1, "more");
    check_load_refused(&s, s.size + 8, "more");
    for (size_t i = 0; i < s.size; i += i < 1200 || i + 20 > s.size ? 1 : 499) {
        s.file[i] ^= (unsigned char)(1 << i % 8);
        check_load_refused(&s, s.size,
                           i < 8    ? "another kind of file"
                           : i < 16 ? "version"
                                    : "altered");
        s.file[i] ^= (unsigned char)(1 << i % 8);
    }
    error e;
    CHECK(!hybrid_session_load(&s.r.session, file_path("none"), &e));
    CHECK_MSG(strstr(e.text, "/none: cannot open"), "%s", e.text);
    CHECK(!hybrid_session_load(&s.r.session, directory, &e)); /* a directory */
    CHECK(hybrid_session_load(&s.r.session, file_path("good"), &e) && s.r.session.n_tokens == 10);
    end_saving(&s);
}

/* The header ends in a checksum of what is before it, as saved.h says. */
#define HEADER_BYTES 1128

static void put_number(unsigned char *at, uint64_t value, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) at[i] = (unsigned char)(value >> 8 * i);
}

/* Sets a number of the header and makes the checksum fit: what a hostile writer would do. */
static void check_header_refused(saving *s, size_t at, uint64_t value, size_t bytes,
                                 const char *part) {
    unsigned char kept[HEADER_BYTES];
    uint64_t sum = 0;
    memcpy(kept, s->file, sizeof kept);
    put_number(s->file + at, value, bytes);
    for (size_t i = 0; i < HEADER_BYTES - 8; i += 8) {
        sum = (sum ^ st_load_u64(s->file + i)) * 0x9e3779b97f4a7c15u;
        sum ^= sum >> 32;
    }
    put_number(s->file + HEADER_BYTES - 8, sum, 8);
    check_load_refused(s, s->size, part);
    memcpy(s->file, kept, sizeof kept);
}

static void other_sessions_are_refused_by_name(void) {
    static const char *const names[] = {"n_layers",        "hidden_size", "kda_heads",
                                        "kda_head_dim",    "conv_width",  "kv_lora_rank",
                                        "qk_rope_head_dim"};
    saving s;
    begin_saving(&s);
    size_t n_tokens = 5;
    error e;
    for (size_t i = 0; i < COUNT(names); i++) {
        check_header_refused(&s, 16 + 8 * i, 3, 8, names[i]);
        check_header_refused(&s, 16 + 8 * i, UINT64_MAX, 8, names[i]);
    }
    check_header_refused(&s, 72, LINEAR_BF16, 8, "type of the cache: expected f32, found bf16");
    check_header_refused(&s, 72, 99, 8, "type of the cache: expected f32, found unknown");
    check_header_refused(&s, 80, 1, 8, "session of this model");
    check_header_refused(&s, 88, 17, 8, "at most the session's 16 tokens, found 17");
    check_header_refused(&s, 88, UINT64_MAX, 8, "found 18446744073709551615");
    CHECK(!hybrid_saved_tokens(file_path("bad"), &n_tokens, &e) && n_tokens == 5);
    CHECK_MSG(strstr(e.text, "expected fewer tokens, found 18446744073709551615"), "%s", e.text);
    check_header_refused(&s, 88, 11, 8, "short"); /* the contents are of 10 */
    check_header_refused(&s, 88, 9, 8, "");       /* too long, or the checksum is elsewhere */
    check_header_refused(&s, 96, 2, 1, "kinds of layers");
    check_header_refused(&s, 96 + 9, 1, 1, "kinds of layers");
    CHECK(hybrid_saved_tokens(file_path("good"), &n_tokens, &e) && n_tokens == 10);
    CHECK(!hybrid_saved_tokens(file_path("none"), &n_tokens, &e));
    write_file(directory, "bad", s.file, 100);
    CHECK(!hybrid_saved_tokens(file_path("bad"), &n_tokens, &e) && strstr(e.text, "short"));
    end_saving(&s);
}

/* A matrix of the model with every byte another. */
static void check_matrix_counts(saving *s, linear *w) {
    size_t bytes = w->rows * linear_row_bytes(w->type, w->cols);
    const unsigned char *data = w->data;
    unsigned char *other = (unsigned char *)test_alloc(bytes);
    for (size_t i = 0; i < bytes; i++) other[i] = data[i] ^ 1;
    w->data = other;
    check_load_refused(s, s->size, "session of this model");
    w->data = data;
    free(other);
}

/* Same dimensions, other weights. */
static void another_training_is_told_apart(void) {
    saving s;
    begin_saving(&s);
    check_matrix_counts(&s, &s.model.embed);
    for (size_t i = 0; i < s.model.config.n_layers; i++) {
        hybrid_layer *layer = &s.model.layers[i];
        check_matrix_counts(&s, s.model.config.is_kda[i] ? &layer->kda.f_b : &layer->mla.kv_b);
        check_matrix_counts(&s, hybrid_is_moe(&s.model.config, i) ? &layer->moe.router
                                                                  : &layer->dense.down);
    }
    float *vectors = s.model.vectors;
    vectors[s.model.n_vectors - 1] += 1;
    check_load_refused(&s, s.size, "session of this model");
    end_saving(&s);
}

/* A pipe gives what is in it once. */
static void pipes_are_refused(void) {
    saving s;
    begin_saving(&s);
    error e = {""};
    char path[400];
    snprintf(path, sizeof path, "%s", file_path("fifo"));
    remove(path);
    if (mkfifo(path, 0600) != 0) {
        test_skip("no pipes with names here");
        end_saving(&s);
        return;
    }
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        write_file(directory, "fifo", s.file, s.size);
        _exit(0);
    }
    CHECK(child > 0 && !hybrid_session_load(&s.r.session, path, &e));
    CHECK_MSG(strstr(e.text, "/fifo: expected a file that can be read twice: "), "%s", e.text);
    CHECK(s.r.session.n_tokens == 13 &&
          memcmp(s.before, s.r.session.layers, hybrid_session_bytes(&s.model, &s.options)) == 0);
    CHECK(child > 0 && waitpid(child, NULL, 0) == child);
    remove(path);
    end_saving(&s);
}

static int shortenings;

static void shorten_the_file(void) {
    shortenings++;
    if (truncate(file_path("good"), HEADER_BYTES + 999) != 0) give_up("truncate");
}

/* A file that was sound when it was checked, and then is not: the session is empty, as a new one. */
static void a_file_that_changes_while_it_is_read(void) {
    saving s;
    golden g = golden_open(models[0].directory);
    begin_saving(&s);
    error e = {""};
    float *got = test_floats(10 * g.vocab), *want = logits_alone(&s.model, g.ids, 10);
    shortenings = 0, before_seeking = shorten_the_file;
    bool loaded = hybrid_session_load(&s.r.session, file_path("good"), &e);
    before_seeking = NULL;
    if (shortenings == 0) {
        test_skip("the library's own fseek is called here");
    } else {
        CHECK_MSG(!loaded && strstr(e.text, "/good: ") && strstr(e.text, "short"), "%s", e.text);
        CHECK(s.r.session.n_tokens == 0);
        read_ids(&s.r, g.ids, 10, 10, got, NULL);
        CHECK(same_floats(got, want, 10 * g.vocab));
    }
    free(got), free(want);
    end_saving(&s);
    golden_free(&g);
}

static void failed_saves_leave_nothing(void) {
    saving s;
    begin_saving(&s);
    error e;
    CHECK(!hybrid_session_save(&s.r.session, file_path("no/such/file"), &e));
    CHECK_MSG(strstr(e.text, "no/such/file"), "%s", e.text);
    CHECK(!hybrid_session_save(&s.r.session, directory, &e));
    if (test_has_full_device()) {
        CHECK(!hybrid_session_save(&s.r.session, "/dev/full", &e));
        CHECK_MSG(strstr(e.text, "/dev/full: cannot write"), "%s", e.text);
    }
    end_saving(&s);
}

int main(void) {
    temporary("sessions", directory);
    TEST(pieces_keep_the_way_of_their_call);
    TEST(blocks_change_no_bit);
    TEST(threads_change_no_bit);
    TEST(a_batch_gives_the_bits_of_each_alone);
    TEST(depth_of_one_session_of_a_batch);
    TEST(bad_batches_are_refused);
    TEST(sizes_are_known);
    TEST(workspaces_grow_with_their_block);
    TEST(filled_sessions);
    TEST(filled_caches);
    TEST(caches_of_16_bits_stay_near);
    TEST(drafts_give_the_bits_of_single_tokens);
    TEST(drafts_in_a_batch);
    TEST(bad_drafts_are_refused);
    TEST(a_commit_is_of_one_model);
    TEST(refusals_of_kda_are_handed_on);
    TEST(refusals_of_attnres_are_handed_on);
    TEST(a_loaded_session_goes_on);
    TEST(damaged_files_are_refused);
    TEST(other_sessions_are_refused_by_name);
    TEST(another_training_is_told_apart);
    TEST(pipes_are_refused);
    TEST(a_file_that_changes_while_it_is_read);
    TEST(failed_saves_leave_nothing);
    return test_summary();
}
