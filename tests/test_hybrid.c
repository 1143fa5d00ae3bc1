/* test_hybrid.c - the model driver against the vendor's code, and against damaged checkpoints. */
#include "../examples/hybrid.h"

#include "limits.h"
#include "reader.h"

#include <unistd.h>

/* A system that does not say how much memory it has, if that is asked for. */
static bool says_nothing;
static long test_sysconf(int what) {
    return says_nothing ? -1 : sysconf(what);
}
#define sysconf test_sysconf
#include "../examples/plan.h"
#undef sysconf

/* ==== Numbers ==== */

static void check_model(size_t i, size_t split, size_t block) {
    golden g = golden_open(models[i].directory);
    hybrid_model model = open_model(models[i].directory);
    reader r = open_reader(&model, g.n, block);
    float *logits = test_floats(g.n * g.vocab), *hidden = test_floats(g.layers * g.n * g.hidden);
    read_ids(&r, g.ids, g.n, split, logits, hidden);
    printf("%s, %zu at a time, blocks of %zu: %.2e\n", models[i].directory, split,
           r.work.options.block, test_relative_l2(logits, g.logits, g.n * g.vocab));
    check_logits(&g, logits, models[i].bound);
    check_sums(&g, hidden, models[i].bound);
    free(logits), free(hidden);
    close_reader(&r);
    hybrid_close(&model);
    golden_free(&g);
}

static void kimi_linear_matches(void) {
    check_model(0, 150, 0);
}

static void kimi_k3_matches(void) {
    check_model(1, 150, 0);
}

static void blocks_of_any_size_match(void) {
    for (size_t i = 0; i < N_MODELS; i++) {
        check_model(i, 150, HYBRID_MIN_BLOCK);
        check_model(i, 60, 41);
        check_model(i, 150, 150);
    }
}

static void splits_match_each_other(void) {
    static const size_t splits[] = {1, 7, 50};
    for (size_t i = 0; i < N_MODELS; i++) {
        golden g = golden_open(models[i].directory);
        hybrid_model model = open_model(models[i].directory);
        reader r = open_reader(&model, g.n, 0);
        float *whole = test_floats(g.n * g.vocab), *split = test_floats(g.n * g.vocab);
        error e;
        read_ids(&r, g.ids, g.n, g.n, whole, NULL);
        for (size_t k = 0; k < sizeof splits / sizeof *splits; k++) {
            CHECK(hybrid_session_reset(&r.session, &e));
            read_ids(&r, g.ids, g.n, splits[k], split, NULL);
            check_logits(&g, split, models[i].bound);
            CHECK_AT_MOST("split against whole", test_relative_l2_f32(split, whole, g.n * g.vocab),
                          1e-4);
            printf("%s: %zu at a time against whole: %.2e\n", models[i].directory, splits[k],
                   test_relative_l2_f32(split, whole, g.n * g.vocab));
        }
        free(whole), free(split);
        close_reader(&r);
        hybrid_close(&model);
        golden_free(&g);
    }
}

/* Each instruction set of this machine and build is as near to the reference; which ran is printed. */
static void each_isa_matches_with(kda_isa isa) {
    if (!kda_isa_is_available(isa)) {
        test_skip("not in this machine and build");
        return;
    }
    for (size_t m = 0; m < N_MODELS; m++) {
        golden g = golden_open(models[m].directory);
        hybrid_model model = open_model(models[m].directory);
        hybrid_workspace_options how = {0, g.n, {isa, NULL, false}};
        float *logits = test_floats(g.n * g.vocab);
        reader r;
        error e;
        if (!hybrid_workspace_open(&r.work, &model, &how, &e)) give_up(e.text);
        for (size_t split = 1; split <= g.n; split += g.n - 1) {
            r.session = open_session(&model, g.n, LINEAR_F32, 0);
            read_ids(&r, g.ids, g.n, split, logits, NULL);
            CHECK_AT_MOST("logits", test_relative_l2(logits, g.logits, g.n * g.vocab),
                          models[m].bound);
            hybrid_session_close(&r.session);
        }
        hybrid_workspace_close(&r.work);
        free(logits);
        hybrid_close(&model);
        golden_free(&g);
    }
}

static void scalar_matches(void) {
    each_isa_matches_with(KDA_ISA_SCALAR);
}
static void avx2_matches(void) {
    each_isa_matches_with(KDA_ISA_AVX2);
}
static void avx512_matches(void) {
    each_isa_matches_with(KDA_ISA_AVX512);
}
static void neon_matches(void) {
    each_isa_matches_with(KDA_ISA_NEON);
}

/* Integers with scales: as near as four times what float32 is in the vendor's code, in every
 * instruction set, and with the same bits for one token at a time as for a few. */
static void quantised_checkpoints_match(void) {
    for (size_t m = 0; m < N_QUANTISED; m++)
        for (int isa = KDA_ISA_SCALAR; isa <= KDA_ISA_NEON; isa++) {
            if (!kda_isa_is_available((kda_isa)isa)) continue;
            golden g = golden_open(quantised[m]);
            hybrid_model model = open_model(quantised[m]);
            hybrid_workspace_options how = {0, g.n, {(kda_isa)isa, NULL, false}};
            float *logits = test_floats(g.n * g.vocab);
            reader r;
            error e;
            if (!hybrid_workspace_open(&r.work, &model, &how, &e)) give_up(e.text);
            for (size_t split = 1; split <= g.n; split += g.n - 1) {
                r.session = open_session(&model, g.n, LINEAR_F32, 0);
                read_ids(&r, g.ids, g.n, split, logits, NULL);
                check_logits(&g, logits, 4 * g.f32_error);
                hybrid_session_close(&r.session);
            }
            printf("%s, %s: %.2e, float32 %.2e\n", quantised[m], kda_isa_name((kda_isa)isa),
                   test_relative_l2(logits, g.logits, g.n * g.vocab), g.f32_error);
            hybrid_workspace_close(&r.work);
            free(logits);
            hybrid_close(&model);
            golden_free(&g);
        }
}

static void last_logits_are_the_last_row(void) {
    for (size_t i = 0; i < N_MODELS; i++) {
        golden g = golden_open(models[i].directory);
        hybrid_model model = open_model(models[i].directory);
        reader r = open_reader(&model, g.n, HYBRID_MIN_BLOCK);
        float *logits = test_floats(g.n * g.vocab), *last = test_floats(g.vocab);
        hybrid_want want = {0};
        error e;
        g.n = 70; /* more than a block */
        read_ids(&r, g.ids, g.n, g.n, logits, NULL);
        CHECK(hybrid_session_reset(&r.session, &e));
        want.last_logits = last;
        CHECK(hybrid_forward(&r.work, &r.session, g.ids, g.n, &want, &e));
        CHECK(memcmp(last, logits + (g.n - 1) * g.vocab, g.vocab * sizeof *last) == 0);
        free(logits), free(last);
        close_reader(&r);
        hybrid_close(&model);
        golden_free(&g);
    }
}

/* softmax(query . v / rms(v)) in float64, over sources v of token t of running sums. */
static void weights_by_definition(const golden *g, const float *query, double eps,
                                  const size_t *sources, size_t n, size_t t, double *weights) {
    double largest = -HUGE_VAL, sum = 0;
    for (size_t j = 0; j < n; j++) {
        const double *v = g->sums + (sources[j] * g->dumped + t) * g->hidden;
        double dot = 0, square = 0;
        for (size_t i = 0; i < g->hidden; i++) {
            dot += (n > 1 ? (double)query[i] : 0) * v[i];
            square += v[i] * v[i];
        }
        weights[j] = dot / sqrt(square / (double)g->hidden + eps);
        largest = fmax(largest, weights[j]);
    }
    for (size_t j = 0; j < n; j++) sum += weights[j] = exp(weights[j] - largest);
    for (size_t j = 0; j < n; j++) weights[j] /= sum;
}

/* What attention of each layer reads, and the output: mixtures whose sources are running sums after
 * some layer. Those of the feed-forwards only have to be weights. */
static void check_depth(const golden *g, const hybrid_model *model, const float *depth) {
    const hybrid_config *c = &model->config;
    size_t n_sources = hybrid_depth_sources(c), block = c->attn_res_block_size, sources[16];
    for (size_t read = 0; read <= 2 * c->n_layers; read++) {
        size_t layer = read / 2, n = 0;
        for (size_t l = 0; l < layer; l += block) sources[n++] = l;
        sources[n++] = layer;
        const float *query =
            layer < c->n_layers ? model->layers[layer].attention_query : model->output_query;
        for (size_t t = 0; t < g->dumped; t++) {
            const float *found = depth + (read * g->n + t) * n_sources;
            double want[16], sum = 0;
            for (size_t j = 0; j < n_sources; j++) {
                CHECK(found[j] >= 0);
                sum += (double)found[j];
            }
            CHECK_AT_MOST("sum of weights", fabs(sum - 1), 1e-6);
            if (read % 2) continue;
            weights_by_definition(g, query, (double)c->rms_norm_eps, sources, n, t, want);
            for (size_t j = 0; j < n_sources; j++) /* the sums themselves are that far away */
                CHECK_AT_MOST("weight", fabs((double)found[j] - (j < n ? want[j] : 0)),
                              2 * models[1].bound);
        }
    }
}

static void depth_weights_match(void) {
    static const size_t splits[] = {1000, 40};
    golden g = golden_open(models[1].directory);
    hybrid_model model = open_model(models[1].directory), plain = open_model(models[0].directory);
    reader r = open_reader(&model, g.n, 0);
    size_t n_sources = hybrid_depth_sources(&model.config), reads = 2 * model.config.n_layers + 1;
    CHECK(n_sources == 5); /* the embedding, and 13 layers in blocks of 4 */
    CHECK(hybrid_depth_sources(&plain.config) == 0);
    for (size_t i = 0; i < 2; i++) {
        float *depth = test_floats(reads * g.n * n_sources);
        for (size_t k = 0; k < reads * g.n * n_sources; k++) depth[k] = NAN;
        for (size_t t = 0; t < g.n; t += splits[i]) {
            hybrid_want want = {0};
            error e;
            want.depth = depth + t * n_sources, want.depth_stride = g.n * n_sources;
            size_t n = g.n - t < splits[i] ? g.n - t : splits[i];
            CHECK(hybrid_forward(&r.work, &r.session, g.ids + t, n, &want, &e));
        }
        check_depth(&g, &model, depth);
        free(depth);
        error e;
        CHECK(hybrid_session_reset(&r.session, &e));
    }
    close_reader(&r);
    hybrid_close(&model), hybrid_close(&plain);
    golden_free(&g);
}

/* ==== Refusals of a session ==== */

/* Refused tokens leave the session as it was: what follows gives the same bits. */
static void refused_tokens_change_nothing(void) {
    for (size_t i = 0; i < N_MODELS; i++) {
        golden g = golden_open(models[i].directory);
        hybrid_model model = open_model(models[i].directory);
        reader r = open_reader(&model, 30, 0);
        float *want = test_floats(30 * g.vocab), *got = test_floats(30 * g.vocab);
        hybrid_want nothing = {0};
        uint32_t bad[3] = {1, 2, 256};
        error e;
        read_ids(&r, g.ids, 30, 10, want, NULL);
        CHECK(!hybrid_forward(&r.work, &r.session, g.ids, 1, &nothing, &e));
        CHECK_MSG(strstr(e.text, "30") && strstr(e.text, "found 1"), "%s", e.text);
        CHECK(hybrid_forward(&r.work, &r.session, g.ids, 0, &nothing, &e));
        CHECK(hybrid_session_reset(&r.session, &e));
        for (size_t t = 0; t < 30; t += 10) {
            bad[2] = t == 10 ? UINT32_MAX : 256;
            CHECK(!hybrid_forward(&r.work, &r.session, bad, 3, &nothing, &e));
            CHECK_MSG(strstr(e.text, "token 3") && strstr(e.text, "256"), "%s", e.text);
            CHECK(!hybrid_forward(&r.work, &r.session, g.ids, 31 - t, &nothing, &e));
            CHECK(r.session.n_tokens == t);
            read_ids(&r, g.ids + t, 10, 10, got + t * g.vocab, NULL);
        }
        CHECK(memcmp(got, want, 30 * g.vocab * sizeof *got) == 0);
        free(want), free(got);
        close_reader(&r);
        hybrid_close(&model);
        golden_free(&g);
    }
}

/* ==== The router ==== */

/* The definition, in float64 and by repeated search. */
static void route_reference(const hybrid_config *c, const float *scores, const float *bias,
                            size_t *chosen, double *weights) {
    size_t members = c->num_experts / c->num_expert_group;
    double sum = 0;
    enum { NONE = 64 };
    char group_in[NONE + 1] = {0}, taken[NONE + 1] = {0};
    for (size_t k = 0; k < c->topk_group; k++) {
        size_t best = NONE;
        double best_score = 0;
        for (size_t g = 0; g < c->num_expert_group; g++) {
            double first = -HUGE_VAL, second = -HUGE_VAL;
            for (size_t i = g * members; i < (g + 1) * members; i++) {
                double s = (double)(scores[i] + bias[i]);
                if (s > first)
                    second = first, first = s;
                else if (s > second)
                    second = s;
            }
            if (!group_in[g] && (best == NONE || first + second > best_score))
                best = g, best_score = first + second;
        }
        group_in[best] = 1;
    }
    for (size_t k = 0; k < c->experts_per_token; k++) {
        size_t best = NONE;
        for (size_t i = 0; i < c->num_experts; i++)
            if (group_in[i / members] && !taken[i] &&
                (best == NONE || scores[i] + bias[i] > scores[best] + bias[best]))
                best = i;
        taken[best] = 1, chosen[k] = best;
        sum += weights[k] = (double)scores[best];
    }
    for (size_t k = 0; k < c->experts_per_token; k++) {
        if (c->moe_renormalize && c->experts_per_token > 1) weights[k] /= sum + 1e-20;
        weights[k] *= (double)c->routed_scaling_factor;
    }
}

static void check_route(const hybrid_config *c, const float *scores, const float *bias) {
    uint32_t chosen[8];
    float weights[8], scratch[64];
    size_t want_chosen[8];
    double want_weights[8];
    hybrid_route(c, scores, bias, chosen, weights, scratch);
    route_reference(c, scores, bias, want_chosen, want_weights);
    for (size_t k = 0; k < c->experts_per_token; k++) CHECK(chosen[k] == want_chosen[k]);
    CHECK_AT_MOST("weights", test_relative_l2(weights, want_weights, c->experts_per_token), 3e-7);
}

static void router_matches_definition(void) {
    static const size_t shapes[][4] = {/* experts, groups, groups kept, experts kept */
                                       {12, 1, 1, 3}, {12, 4, 2, 3}, {12, 4, 1, 3}, {12, 3, 3, 4},
                                       {16, 8, 3, 5}, {16, 2, 1, 1}, {5, 1, 1, 5}};
    float scores[16], bias[16];
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        hybrid_config c = {0};
        c.num_experts = shapes[i][0], c.num_expert_group = shapes[i][1];
        c.topk_group = shapes[i][2], c.experts_per_token = shapes[i][3];
        c.routed_scaling_factor = 2.446f;
        for (size_t trial = 0; trial < 400; trial++) {
            c.moe_renormalize = trial % 2;
            for (size_t k = 0; k < c.num_experts; k++) {
                scores[k] = test_uniform_f32(0, 1);
                bias[k] = test_uniform_f32(-0.5f, 0.5f);
                if (trial % 4 == 3) scores[k] = 0.5f, bias[k] = 0; /* ties: the lower number */
                if (trial % 4 == 2) scores[k] = 0.25f * (float)(test_random_u64() % 3), bias[k] = 0;
            }
            check_route(&c, scores, bias);
        }
    }
}

/* The bias decides who is chosen and does not reach the weights. */
static void bias_only_selects(void) {
    hybrid_config c = {0};
    float scores[4] = {0.9f, 0.8f, 0.2f, 0.1f}, bias[4] = {0, 0, 5, 0}, weights[2], scratch[5];
    uint32_t chosen[2];
    c.num_experts = 4, c.num_expert_group = c.topk_group = 1, c.experts_per_token = 2;
    c.routed_scaling_factor = 1;
    hybrid_route(&c, scores, bias, chosen, weights, scratch);
    CHECK(chosen[0] == 2 && weights[0] == 0.2f && chosen[1] == 0 && weights[1] == 0.9f);
}

static void activations_match_definition(void) {
    static const float betas[][2] = {{0, 0}, {4, 25}, {4, 0}}; /* SiLU; SiTU; its up as it is */
    for (size_t k = 0; k < 3; k++) {
        hybrid_config c = {0};
        float gate[101], up[101];
        double want[101];
        c.activation = betas[k][0] > 0 ? HYBRID_SITU : HYBRID_SILU;
        c.situ_beta = betas[k][0], c.situ_linear_beta = betas[k][1];
        for (size_t i = 0; i < 101; i++) {
            double a = (double)(gate[i] = -25 + 0.5f * (float)i);
            double b = (double)(up[i] = test_uniform_f32(-60, 60));
            double linear_beta = (double)betas[k][1];
            want[i] = a;
            if (k > 0) want[i] = (double)betas[k][0] * tanh(a / (double)betas[k][0]);
            want[i] /= 1 + exp(-a);
            want[i] *= linear_beta > 0 ? linear_beta * tanh(b / linear_beta) : b;
        }
        hybrid_activate(&c, 101, gate, up);
        CHECK_AT_MOST("activation", test_relative_l2(gate, want, 101), 2e-7);
    }
}

/* ==== Configurations ==== */

static const char *const required[] = {"vocab_size",
                                       "hidden_size",
                                       "intermediate_size",
                                       "num_hidden_layers",
                                       "num_attention_heads",
                                       "hidden_act",
                                       "kv_lora_rank",
                                       "q_lora_rank",
                                       "qk_nope_head_dim",
                                       "qk_rope_head_dim",
                                       "v_head_dim",
                                       "mla_use_nope",
                                       "num_experts",
                                       "num_experts_per_token",
                                       "moe_intermediate_size",
                                       "moe_layer_freq",
                                       "tie_word_embeddings",
                                       "linear_attn_config",
                                       "linear_attn_config.kda_layers",
                                       "linear_attn_config.full_attn_layers",
                                       "linear_attn_config.num_heads",
                                       "linear_attn_config.head_dim",
                                       "linear_attn_config.short_conv_kernel_size"};
static const char *const optional[] = {"rms_norm_eps",
                                       "num_key_value_heads",
                                       "num_shared_experts",
                                       "first_k_dense_replace",
                                       "moe_renormalize",
                                       "moe_router_activation_func",
                                       "routed_scaling_factor",
                                       "num_expert_group",
                                       "topk_group",
                                       "topk_method",
                                       "num_nextn_predict_layers",
                                       "mla_use_output_gate",
                                       "attn_res_block_size",
                                       "routed_expert_hidden_size",
                                       "latent_moe_use_norm",
                                       "linear_attn_config.use_full_rank_gate",
                                       "linear_attn_config.gate_lower_bound"};
#define COUNT(array) (sizeof(array) / sizeof *(array))

static bool parse(const char *text, hybrid_config *config, error *e) {
    return hybrid_config_parse(config, "some/config.json", text, strlen(text), e);
}

/* An edit must be refused by one sentence that names the file and the key. */
static void check_refused(const char *text, const char *key, const char *value) {
    hybrid_config config;
    error e = {""};
    char *edited = edit(text, key, value);
    const char *dot = strchr(key, '.');
    bool ok = parse(edited, &config, &e);
    CHECK_MSG(!ok, "%s = %s was accepted", key, value ? value : "(missing)");
    CHECK_MSG(strstr(e.text, "some/config.json: ") && strstr(e.text, dot ? dot + 1 : key),
              "%s = %s: \"%s\"", key, value ? value : "(missing)", e.text);
    free(edited);
}

static void each_key_is_checked(void) {
    static const char *const wrong[] = {"\"nonsense\"", "{}", "-1", "1.5", "[true]", "1e300"};
    for (size_t m = 0; m < N_MODELS; m++) {
        size_t size;
        char *text = read_file(models[m].directory, "config.json", &size);
        for (size_t i = 0; i < COUNT(required); i++) {
            check_refused(text, required[i], NULL);
            for (size_t k = 0; k < COUNT(wrong); k++) {
                char *edited = edit(text, required[i], wrong[k]);
                hybrid_config config;
                error e;
                CHECK_MSG(!parse(edited, &config, &e), "%s = %s", required[i], wrong[k]);
                free(edited);
            }
            bool nullable =
                strcmp(required[i], "q_lora_rank") == 0 || strcmp(required[i], "num_experts") == 0;
            if (!nullable) check_refused(text, required[i], "null");
        }
        for (size_t i = 0; i < COUNT(optional); i++)
            for (size_t k = 0; k < 2; k++)
                check_refused(text, optional[i], k ? "[0]" : "\"nonsense\"");
        free(text);
    }
}

static void a_configuration_is_an_object(void) {
    static const char *const texts[][2] = {{"[]", "an array"}, {"7", "a number"}};
    for (size_t i = 0; i < COUNT(texts); i++) {
        hybrid_config config;
        error e = {""};
        char expected[100];
        snprintf(expected, sizeof expected, "some/config.json: expected an object, found %s",
                 texts[i][1]);
        CHECK_MSG(!parse(texts[i][0], &config, &e) && strcmp(e.text, expected) == 0, "%s", e.text);
    }
}

static void ranges_and_contradictions(void) {
    static const char *const cases[][2] = {
        {"linear_attn_config.kda_layers", "[1, 2, 3, 5, 6]"},
        {"linear_attn_config.kda_layers", "[1, 2, 3, 5, 6, 7, 7]"},
        {"linear_attn_config.full_attn_layers", "[4, 8]"},
        {"linear_attn_config.full_attn_layers", "[3, 4, 8, 9]"},
        {"linear_attn_config.full_attn_layers", "[0, 4, 8, 9]"},
        {"linear_attn_config.full_attn_layers", "[4, 8, 10]"},
        {"linear_attn_config.full_attn_layers", "[4, 8, 9.5]"},
        {"linear_attn_config.short_conv_kernel_size", "65"},
        {"linear_attn_config.short_conv_kernel_size", "0"},
        {"linear_attn_config.gate_lower_bound", "0"},
        {"linear_attn_config.gate_lower_bound", "5"},
        {"linear_attn_config.head_dim", "16777216"},
        {"mla_use_nope", "false"},
        {"hidden_act", "\"gelu\""},
        {"moe_router_activation_func", "\"softmax\""},
        {"num_key_value_heads", "2"},
        {"num_experts_per_token", "9"},
        {"num_expert_group", "3"},
        {"num_expert_group", "8"},
        {"topk_group", "2"},
        {"num_nextn_predict_layers", "1"},
        {"attn_res_block_size", "0"},
        {"hidden_size", "16777217"},
        {"hidden_size", "18446744073709551616"},
        {"num_hidden_layers", "0"},
        {"num_hidden_layers", "1025"},
        {"v_head_dim", "16777216"},
        {"rms_norm_eps", "0"},
        {"routed_scaling_factor", "-2"}};
    size_t size;
    char *text = read_file(models[0].directory, "config.json", &size);
    for (size_t i = 0; i < COUNT(cases); i++) check_refused(text, cases[i][0], cases[i][1]);

    char *grouped = edit(text, "num_expert_group", "4"); /* groups of 2 */
    check_refused(grouped, "topk_group", "1");           /* 3 experts from 2 */
    check_refused(grouped, "use_grouped_topk", "false");
    char *kept = edit(grouped, "topk_group", "2");
    hybrid_config config;
    error e;
    CHECK(parse(kept, &config, &e));
    free(kept), free(grouped), free(text);
}

static void missing_keys_have_published_defaults(void) {
    static const char *const keys[] = {
        "rms_norm_eps", "moe_renormalize",       "num_shared_experts", "moe_router_activation_func",
        "topk_group",   "routed_scaling_factor", "num_expert_group",   "first_k_dense_replace"};
    size_t size;
    char *text = read_file(models[0].directory, "config.json", &size);
    hybrid_config c;
    error e;
    for (size_t i = 0; i < COUNT(keys); i++) {
        char *edited = edit(text, keys[i], NULL);
        free(text);
        text = edited;
    }
    CHECK(parse(text, &c, &e));
    CHECK(c.rms_norm_eps == 1e-6f && c.moe_renormalize && c.routed_scaling_factor == 1);
    CHECK(c.num_shared_experts == 0 && c.first_k_dense_replace == 0);
    CHECK(c.num_expert_group == 1 && c.topk_group == 1);
    CHECK(!c.mla_use_output_gate && c.attn_res_block_size == 0 && !c.latent_moe_use_norm);
    CHECK(c.inner_norm_eps == 1e-6f && c.gate_lower_bound == 0 && !c.use_full_rank_gate);
    CHECK(hybrid_is_moe(&c, 0));
    free(text);
}

/* As every optional key of a published configuration, some of which are written so. */
static void null_is_a_missing_key(void) {
    size_t size;
    for (size_t m = 0; m < N_MODELS; m++) {
        char *text = read_file(models[m].directory, "config.json", &size);
        for (size_t i = 0; i < COUNT(optional); i++) {
            const char *dot = strchr(optional[i], '.');
            char quoted[60];
            snprintf(quoted, sizeof quoted, "\"%s\":", dot ? dot + 1 : optional[i]);
            char *null = edit(text, optional[i], "null");
            char *none = strstr(text, quoted) ? edit(text, optional[i], NULL) : NULL;
            hybrid_config with, without;
            error e = {""};
            CHECK_MSG(parse(null, &with, &e), "%s: %s", optional[i], e.text);
            CHECK(parse(none ? none : text, &without, &e));
            CHECK_MSG(memcmp(&with, &without, sizeof with) == 0, "%s", optional[i]);
            free(null), free(none);
        }
        free(text);
    }
}

/* The published rule: from first_k_dense_replace on, each layer whose number, from 0, is a multiple of
 * moe_layer_freq. */
static void layers_with_experts(void) {
    size_t size;
    char *text = read_file(models[0].directory, "config.json", &size);
    char *edited = edit(text, "moe_layer_freq", "3");
    hybrid_config c;
    error e;
    CHECK(parse(edited, &c, &e));
    for (size_t i = 0; i < 9; i++) CHECK(hybrid_is_moe(&c, i) == (i == 3 || i == 6));
    free(edited), free(text);
}

/* The sizes published for the 48B: 40 MiB of states, and 576 numbers a token and MLA layer. */
static void kimi_linear_48b_sizes(void) {
    static const char text[] =
        "{\"vocab_size\": 163840, \"hidden_size\": 2304, \"num_hidden_layers\": 27,"
        "\"num_attention_heads\": 32, \"num_key_value_heads\": 32, \"intermediate_size\": 9216,"
        "\"hidden_act\": \"silu\", \"rms_norm_eps\": 1e-5, \"kv_lora_rank\": 512,"
        "\"q_lora_rank\": null, \"qk_nope_head_dim\": 128, \"qk_rope_head_dim\": 64,"
        "\"v_head_dim\": 128, \"mla_use_nope\": true, \"num_experts\": 256,"
        "\"num_experts_per_token\": 8, \"num_shared_experts\": 1, \"moe_intermediate_size\": 1024,"
        "\"first_k_dense_replace\": 1, \"moe_layer_freq\": 1, \"routed_scaling_factor\": 2.446,"
        "\"tie_word_embeddings\": false, \"linear_attn_config\": {"
        "\"full_attn_layers\": [4,8,12,16,20,24,27], \"head_dim\": 128, \"num_heads\": 32,"
        "\"kda_layers\": [1,2,3,5,6,7,9,10,11,13,14,15,17,18,19,21,22,23,25,26],"
        "\"short_conv_kernel_size\": 4}}";
    hybrid_model model;
    error e;
    memset(&model, 0, sizeof model);
    CHECK_MSG(parse(text, &model.config, &e), "%s", e.text);
    hybrid_sizes sizes = hybrid_memory_sizes(&model, 1000, LINEAR_F32);
    CHECK(sizes.states == 40.0 * 1024 * 1024);
    CHECK(sizes.windows == 20.0 * 3 * 3 * 4096 * 4);
    CHECK(sizes.latents == 1000.0 * 7 * 576 * 4);
    CHECK(sizes.full_attention == 1000.0 * 27 * 576 * 4);
    sizes = hybrid_memory_sizes(&model, 1000, (linear_type)0); /* as of a session: F32 */
    CHECK(sizes.latents == 1000.0 * 7 * 576 * 4);
    sizes = hybrid_memory_sizes(&model, 1000, LINEAR_BF16);
    CHECK(sizes.states == 40.0 * 1024 * 1024 && sizes.latents == 1000.0 * 7 * 576 * 2);
}

/* ==== Checkpoints: rewritten and damaged ==== */

typedef enum change_kind {
    AS_IT_IS,
    DROPPED,
    OTHER_TYPE,        /* of the same size, not what is wanted */
    LONGER,            /* the last dimension by one */
    ONE_DIMENSION_MORE /* [1][...] */
} change_kind;

typedef struct rewrite {
    const char *name; /* the one tensor that is changed, or null */
    change_kind kind;
    linear_type type; /* what bf16 becomes; 0: stays */
    bool flush;       /* numbers below 2^-14 become 0, which makes bf16 to f16 exact */
    size_t shift;     /* spaces after the header: moves the data to other alignments */
} rewrite;

static const char *other_type(st_dtype dtype) {
    switch (st_dtype_size(dtype)) {
    case 8: return "F64";
    case 4: return dtype == ST_I32 ? "F32" : "I32";
    case 2: return "I16";
    default: return dtype == ST_I8 ? "U8" : "I8";
    }
}

/* One bf16 number in another type; returns its size. */
static size_t convert(const rewrite *r, const unsigned char *in, unsigned char *out) {
    uint32_t bits = (uint32_t)st_load_u16(in) << 16;
    uint32_t exponent = bits >> 23 & 255;
    if (r->flush && exponent < 113) bits &= 0x80000000u;
    if (r->type == LINEAR_F32) {
        for (int i = 0; i < 4; i++) out[i] = (unsigned char)(bits >> 8 * i);
        return 4;
    }
    uint32_t half = bits >> 16 & 0x8000u;
    if (bits << 1) half |= (exponent - 112) << 10 | (bits >> 13 & 0x3ffu);
    out[0] = (unsigned char)half, out[1] = (unsigned char)(half >> 8);
    return 2;
}

/* The data of one tensor as rewritten; returns its size. */
static size_t rewrite_data(const rewrite *r, const st_tensor *t, bool changed, unsigned char *out) {
    size_t size = t->bytes, row = t->n_dims ? t->dims[t->n_dims - 1] * st_dtype_size(t->dtype) : 0;
    if (r->type && t->dtype == ST_BF16) {
        size = 0;
        for (size_t i = 0; i < t->elements; i++) size += convert(r, t->data + 2 * i, out + size);
    } else {
        memcpy(out, t->data, t->bytes);
    }
    if (changed && r->kind == LONGER) { /* contents do not matter: it is refused */
        size_t more = t->bytes / row * st_dtype_size(t->dtype);
        memset(out + size, 0, more);
        size += more;
    }
    return size;
}

/* Writes a checkpoint's tensors anew. */
static void write_checkpoint(const char *directory, const st_checkpoint *c, rewrite r) {
    size_t room = 1 << 23, used = 0, length = 8;
    unsigned char *data = (unsigned char *)test_alloc(room);
    char *header = (char *)test_alloc(room);
    length += (size_t)sprintf(header + length, "{");
    for (size_t i = 0; i < st_count(c); i++) {
        const st_tensor *t = st_at(c, i);
        bool changed = r.name && strcmp(t->name, r.name) == 0;
        size_t dims[ST_MAX_DIMS + 1], n = 0;
        char shape[ST_SHAPE_TEXT];
        if (changed && r.kind == DROPPED) continue;
        if (changed && r.kind == ONE_DIMENSION_MORE) dims[n++] = 1;
        for (size_t d = 0; d < t->n_dims; d++) dims[n++] = t->dims[d];
        if (changed && r.kind == LONGER) dims[n - 1]++;
        const char *type = st_dtype_name(t->dtype);
        if (r.type && t->dtype == ST_BF16) type = r.type == LINEAR_F32 ? "F32" : "F16";
        if (changed && r.kind == OTHER_TYPE) type = other_type(t->dtype);
        size_t size = rewrite_data(&r, t, changed, data + used);
        length += (size_t)sprintf(header + length,
                                  "%s\"%s\":{\"dtype\":\"%s\",\"shape\":%s,\"data_offsets\":"
                                  "[%zu,%zu]}",
                                  length > 9 ? "," : "", t->name, type, st_shape(dims, n, shape),
                                  used, used + size);
        used += size;
    }
    length += (size_t)sprintf(header + length, "}%*s", (int)r.shift, "");
    for (int i = 0; i < 8; i++) header[i] = (char)((length - 8) >> 8 * i);
    memcpy(header + length, data, used);
    write_file(directory, "model.safetensors", header, length + used);
    free(data), free(header);
}

static st_checkpoint open_checkpoint(const char *directory) {
    st_checkpoint c;
    error e;
    if (!st_open(&c, directory, &e)) give_up(e.text);
    return c;
}

static void copy_config(const char *from, const char *to) {
    size_t size;
    char *text = read_file(from, "config.json", &size);
    write_file(to, "config.json", text, size);
    free(text);
}

/* Edits the configuration in a directory in place. */
static void edit_config(const char *directory, const char *key, const char *value) {
    size_t size;
    char *text = read_file(directory, "config.json", &size);
    char *edited = edit(text, key, value);
    write_file(directory, "config.json", edited, strlen(edited));
    free(edited), free(text);
}

/* Is the first tensor of its kind: no earlier name is the same but for numbers? */
static bool same_kind(const char *a, const char *b) {
    for (;;) {
        while (*a >= '0' && *a <= '9') a++;
        while (*b >= '0' && *b <= '9') b++;
        if (*a != *b) return false;
        if (!*a) return true;
        a++, b++;
    }
}

static bool first_of_kind(const st_checkpoint *c, size_t index) {
    for (size_t i = 0; i < index; i++)
        if (same_kind(st_at(c, i)->name, st_at(c, index)->name)) return false;
    return true;
}

/* Every kind of tensor: missing, of another type, too long, of another rank. */
static void each_tensor_is_checked(void) {
    char directory[300];
    size_t kinds = 0;
    temporary("tensors", directory);
    for (size_t m = 0; m < N_MODELS + N_QUANTISED; m++) {
        const char *from = m < N_MODELS ? models[m].directory : quantised[m - N_MODELS];
        st_checkpoint c = open_checkpoint(from);
        copy_config(from, directory);
        for (size_t i = 0; i < st_count(&c); i++) {
            const st_tensor *t = st_at(&c, i);
            if (!first_of_kind(&c, i)) continue;
            if (m >= N_MODELS && !strstr(t->name, "proj.weight") && !strstr(t->name, ".w1."))
                continue;
            kinds++;
            for (int kind = DROPPED; kind <= ONE_DIMENSION_MORE; kind++) {
                rewrite r = {t->name, (change_kind)kind, (linear_type)0, false, 0};
                /* Which spelling a checkpoint uses is seen by its embedding. */
                const char *name =
                    strstr(t->name, "model.embed_tokens") ? "model.embed_tokens.weight" : t->name;
                hybrid_model model;
                error e;
                /* A_log may have any shape that holds enough numbers. */
                if (strstr(t->name, "A_log") && kind >= LONGER) continue;
                write_checkpoint(directory, &c, r);
                if (hybrid_open(&model, directory, &e)) {
                    CHECK_MSG(false, "%s, change %d: accepted", t->name, kind);
                    hybrid_close(&model);
                } else if (strstr(t->name, ".weight_packed") && kind == DROPPED) {
                    CHECK_MSG(strstr(e.text, ".weight: "), "%s: %s", t->name, e.text);
                } else {
                    CHECK_MSG(strstr(e.text, name), "%s, change %d: %s", t->name, kind, e.text);
                }
            }
        }
        st_close(&c);
    }
    CHECK(kinds > 70);
}

/* Logits of the first 20 golden tokens of a model in some directory. */
static float *logits_of(const char *directory, const golden *g) {
    hybrid_model model = open_model(directory);
    reader r = open_reader(&model, 20, 0);
    float *logits = test_floats(20 * g->vocab);
    read_ids(&r, g->ids, 20, 20, logits, NULL);
    close_reader(&r);
    hybrid_close(&model);
    return logits;
}

static void check_same_logits(const char *directory, const golden *g, const float *want) {
    float *got = logits_of(directory, g);
    CHECK(memcmp(got, want, 20 * g->vocab * sizeof *got) == 0);
    free(got);
}

/* A copy of kimi-linear-tiny-int4-zp in which, in the header or behind it, one text is another of
 * the same length, is refused by a message with `expected`. */
static void check_altered(const char *text, const char *other, const char *expected) {
    char directory[300];
    size_t size, length = strlen(text);
    char *bytes = read_file(quantised[1], "model.safetensors", &size), *at = bytes;
    hybrid_model model;
    error e = {""};
    if (strlen(other) != length) give_up(other);
    temporary("altered", directory);
    copy_config(quantised[1], directory);
    while ((size_t)(at - bytes) + length <= size && memcmp(at, text, length) != 0) at++;
    if ((size_t)(at - bytes) + length > size) give_up(text);
    memcpy(at, other, length);
    write_file(directory, "model.safetensors", bytes, size);
    CHECK_MSG(!hybrid_open(&model, directory, &e) && strstr(e.text, expected), "%s: %s", other,
              e.text);
    free(bytes);
}

static void quantised_layouts_are_checked(void) {
    check_altered("q_proj.weight_zero_point\":", "q_proj.weight_g_idx\"     :", "weight_g_idx");
    check_altered(
        "q_proj.weight_zero_point\":", "q_proj.weight_zero_paint\":", "weight_zero_point");
    check_altered("q_proj.weight_shape\":", "q_proj.weight_shade\":", "weight_shape");

    /* The shape, a number that is said twice. */
    char directory[300];
    hybrid_model model;
    error e;
    st_checkpoint c = open_checkpoint(quantised[0]);
    temporary("shape", directory);
    copy_config(quantised[0], directory);
    const st_tensor *shape = st_find(&c, "model.layers.3.self_attn.q_proj.weight_shape");
    size_t size, at = (size_t)(shape->data - st_at(&c, 0)->data);
    char *bytes = read_file(quantised[0], "model.safetensors", &size);
    at += (size_t)st_load_u64((unsigned char *)bytes) + 8 + 8;
    CHECK(st_load_u64((unsigned char *)bytes + at) == 64);
    bytes[at] = 65;
    write_file(directory, "model.safetensors", bytes, size);
    CHECK(!hybrid_open(&model, directory, &e));
    CHECK_MSG(strstr(e.text, "expected 128 and 64, found 128 and 65"), "%s", e.text);
    bytes[at] = 64, bytes[at - 8] = 127;
    write_file(directory, "model.safetensors", bytes, size);
    CHECK(!hybrid_open(&model, directory, &e));
    CHECK_MSG(strstr(e.text, "expected 128 and 64, found 127 and 64"), "%s", e.text);
    st_close(&c), free(bytes);
}

/* What the configuration says of a module and what is stored must agree; plain is always plain. */
static void layouts_are_those_of_the_configuration(void) {
    char directory[300];
    size_t size;
    temporary("layouts", directory);
    hybrid_model model;
    error e;
    static const char *const changes[][2] = {{"ignore", "[\"re:.*layers.3.self_attn.q_proj\"]"},
                                             {"targets", "[\"re:.*experts.*\"]"},
                                             {"format", "\"int-quantized\""},
                                             {"quantization_config", "null"}};
    char *file = read_file(quantised[0], "model.safetensors", &size);
    write_file(directory, "model.safetensors", file, size);
    for (size_t i = 0; i < COUNT(changes); i++) {
        size_t length;
        char *text = read_file(quantised[0], "config.json", &length);
        char *edited = edit(text, changes[i][0], changes[i][1]), *other = edited;
        if (i == 2) other = edit(edited, "num_bits", "8"); /* which that format has */
        write_file(directory, "config.json", other, strlen(other));
        CHECK(!hybrid_open(&model, directory, &e));
        CHECK_MSG(strstr(e.text, "weight_packed: expected weight, by quantization_config"),
                  "%s: %s", changes[i][0], e.text);
        if (other != edited) free(other);
        free(edited), free(text);
    }
    free(file);

    golden g = golden_open(models[0].directory);
    float *want = logits_of(models[0].directory, &g);
    file = read_file(models[0].directory, "model.safetensors", &size);
    write_file(directory, "model.safetensors", file, size);
    for (size_t i = 0; i < N_QUANTISED; i++) {
        copy_config(quantised[i], directory);
        check_same_logits(directory, &g, want);
    }
    free(want), free(file);
    golden_free(&g);
}

/* ---- The same integers in other layouts ---- */

/* A checkpoint whose tensors are of another one, or made here. */
typedef struct remade {
    st_checkpoint c;
    st_tensor tensors[2048];
    unsigned char *data; /* of those made, and their names; so far `used` */
    size_t used;
} remade;

static unsigned char *take(remade *m, size_t bytes) {
    unsigned char *part = m->data + m->used;
    m->used += bytes;
    if (m->used > (size_t)1 << 23) give_up("remade: too large");
    return part;
}

static void add(remade *m, const st_tensor *tensor) {
    if (m->c.count == COUNT(m->tensors)) give_up("remade: too many tensors");
    m->tensors[m->c.count++] = *tensor;
}

/* A new tensor "<stem>.<suffix>", of zeros; cols 0: of one dimension. */
static unsigned char *make(remade *m, const char *stem, const char *suffix, st_dtype dtype,
                           size_t rows, size_t cols) {
    st_tensor t;
    memset(&t, 0, sizeof t);
    char *name = (char *)take(m, strlen(stem) + strlen(suffix) + 2);
    sprintf(name, "%s.%s", stem, suffix);
    t.name = name, t.dtype = dtype, t.dims[0] = rows, t.dims[1] = cols, t.n_dims = cols ? 2 : 1;
    t.elements = rows * (cols ? cols : 1), t.bytes = t.elements * st_dtype_size(dtype);
    unsigned char *data = take(m, t.bytes);
    t.data = data;
    add(m, &t);
    return data;
}

/* Integers of 8 bits in words: element i of a row, plus 128, at byte i. */
static void make_packed(remade *m, const char *stem, const st_tensor *t) {
    size_t rows = t->dims[0], cols = t->dims[1], words = (cols + 3) / 4;
    unsigned char *packed = make(m, stem, "weight_packed", ST_I32, rows, words);
    for (size_t i = 0; i < rows * cols; i++)
        packed[i / cols * 4 * words + i % cols] = t->data[i] ^ 0x80;
    unsigned char *shape = make(m, stem, "weight_shape", ST_I64, 2, 0);
    shape[0] = (unsigned char)rows, shape[1] = (unsigned char)(rows >> 8);
    shape[8] = (unsigned char)cols, shape[9] = (unsigned char)(cols >> 8);
}

/* Integers of a row all one more, or one less, as these have room for it, and that as their zero. */
static void make_shifted(remade *m, const char *stem, const st_tensor *t) {
    size_t rows = t->dims[0], cols = t->dims[1];
    unsigned char *weight = make(m, stem, "weight", ST_I8, rows, cols);
    unsigned char *zero = make(m, stem, "weight_zero_point", ST_I8, rows, 1);
    for (size_t r = 0; r < rows; r++) {
        const unsigned char *row = t->data + r * cols;
        int shift = memchr(row, 127, cols) ? memchr(row, 128, cols) ? 0 : -1 : 1;
        for (size_t i = 0; i < cols; i++) weight[r * cols + i] = (unsigned char)(row[i] + shift);
        zero[r] = (unsigned char)shift;
    }
}

/* kimi-linear-tiny-int8 with all integers in another layout. */
static void write_integers(const char *directory, const char *key, const char *value,
                           void (*make_matrix)(remade *m, const char *stem, const st_tensor *t)) {
    rewrite as_they_are = {NULL, AS_IT_IS, (linear_type)0, false, 0};
    st_checkpoint c = open_checkpoint(quantised[2]);
    remade *m = (remade *)test_alloc(sizeof *m);
    size_t n = 0;
    m->data = (unsigned char *)test_alloc((size_t)1 << 23);
    m->c.tensors = m->tensors;
    for (size_t i = 0; i < st_count(&c); i++) {
        const st_tensor *t = st_at(&c, i);
        char stem[200];
        if (t->dtype != ST_I8) {
            add(m, t);
            continue;
        }
        snprintf(stem, sizeof stem, "%.*s", (int)(strlen(t->name) - strlen(".weight")), t->name);
        make_matrix(m, stem, t);
        n++;
    }
    CHECK(n > 100);
    write_checkpoint(directory, &m->c, as_they_are);
    copy_config(quantised[2], directory);
    edit_config(directory, key, value);
    free(m->data), free(m);
    st_close(&c);
}

static void integers_in_any_layout(void) {
    char directory[300];
    golden g = golden_open(quantised[2]);
    float *want = logits_of(quantised[2], &g);
    temporary("integers", directory);
    write_integers(directory, "format", "\"pack-quantized\"", make_packed);
    check_same_logits(directory, &g, want);
    write_integers(directory, "symmetric", "false", make_shifted);
    check_same_logits(directory, &g, want);
    free(want);
    golden_free(&g);
}

/* Zeros that are stored count, though a scheme that is called symmetric needs none. */
static void symmetric_with_zeros(void) {
    char directory[300];
    size_t size;
    golden g = golden_open(quantised[1]);
    float *want = logits_of(quantised[1], &g);
    char *file = read_file(quantised[1], "model.safetensors", &size);
    temporary("symmetric", directory);
    write_file(directory, "model.safetensors", file, size);
    copy_config(quantised[1], directory);
    edit_config(directory, "symmetric", "true");
    check_same_logits(directory, &g, want);
    free(want), free(file);
    golden_free(&g);
}

/* ---- Other checkpoints ---- */

/* Weights keep their values in any type that holds them, at any address. */
static void weight_types_and_alignment(void) {
    char directory[300];
    temporary("types", directory);
    for (size_t m = 0; m < N_MODELS; m++) {
        golden g = golden_open(models[m].directory);
        st_checkpoint c = open_checkpoint(models[m].directory);
        rewrite r = {NULL, AS_IT_IS, (linear_type)0, false, 0};
        float *want = logits_of(models[m].directory, &g);
        copy_config(models[m].directory, directory);
        for (r.shift = 1; r.shift < 4; r.shift++) {
            write_checkpoint(directory, &c, r);
            check_same_logits(directory, &g, want);
        }
        r.type = LINEAR_F32;
        write_checkpoint(directory, &c, r);
        check_same_logits(directory, &g, want);
        free(want);
        r.flush = true; /* few weights are that small, but some are */
        write_checkpoint(directory, &c, r);
        want = logits_of(directory, &g);
        r.type = LINEAR_F16;
        write_checkpoint(directory, &c, r);
        check_same_logits(directory, &g, want);
        free(want);
        st_close(&c);
        golden_free(&g);
    }
}

/* 32 numbers share a scale: 48 inputs of an expert are no whole groups. */
static void mxfp4_has_whole_groups(void) {
    char directory[300];
    size_t size;
    hybrid_model model;
    error e = {""};
    temporary("groups", directory);
    copy_config(models[1].directory, directory);
    edit_config(directory, "routed_expert_hidden_size", "48");
    char *file = read_file(models[1].directory, "model.safetensors", &size);
    write_file(directory, "model.safetensors", file, size);
    CHECK(!hybrid_open(&model, directory, &e));
    CHECK_MSG(strstr(e.text, "w1.weight_packed: expected rows of whole groups of 32 by the "
                             "configuration, found rows of 48"),
              "%s", e.text);
    free(file);
}

/* Tied: the head is the embedding, unless a head is stored too. */
static void tied_embeddings(void) {
    char directory[300];
    golden g = golden_open(models[0].directory);
    st_checkpoint c = open_checkpoint(models[0].directory);
    rewrite r = {"lm_head.weight", DROPPED, (linear_type)0, false, 0};
    const st_tensor *head = st_find(&c, "lm_head.weight");
    const unsigned char *stored = head->data;
    temporary("tied", directory);
    copy_config(models[0].directory, directory);

    /* Untied, with a head that is a copy of the embedding: what tied ones must equal. */
    c.tensors[head - c.tensors].data = st_find(&c, "model.embed_tokens.weight")->data;
    r.kind = AS_IT_IS;
    write_checkpoint(directory, &c, r);
    float *want = logits_of(directory, &g);

    c.tensors[head - c.tensors].data = stored;
    edit_config(directory, "tie_word_embeddings", "true");
    r.kind = DROPPED;
    write_checkpoint(directory, &c, r);
    check_same_logits(directory, &g, want);
    free(want);

    r.kind = AS_IT_IS;
    write_checkpoint(directory, &c, r);
    want = logits_of(models[0].directory, &g);
    check_same_logits(directory, &g, want);
    free(want);

    /* One that is stored in a way that the configuration does not know is no reason to take the
     * embedding. */
    hybrid_model model;
    error e = {""};
    c.tensors[head - c.tensors].name = "lm_head.weight_packed";
    write_checkpoint(directory, &c, r);
    CHECK(!hybrid_open(&model, directory, &e));
    CHECK_MSG(strstr(e.text, "tensor lm_head.weight_packed: expected weight, by "
                             "quantization_config, found weight_packed"),
              "%s", e.text);
    st_close(&c);
    golden_free(&g);
}

/* A copy of a model but for a key of its configuration. */
static hybrid_model open_with(const char *from, const char *name, const char *key,
                              const char *value) {
    char directory[300];
    size_t size;
    char *file = read_file(from, "model.safetensors", &size);
    temporary(name, directory);
    write_file(directory, "model.safetensors", file, size);
    copy_config(from, directory);
    edit_config(directory, key, value);
    free(file);
    return open_model(directory);
}

/* Logits of a model's first 20 golden tokens. */
static float *logits_of_model(const hybrid_model *model, const golden *g, size_t block) {
    reader r = open_reader(model, 20, block);
    float *logits = test_floats(20 * g->vocab);
    read_ids(&r, g->ids, 20, 20, logits, NULL);
    close_reader(&r);
    return logits;
}

/* Without a norm between them, twice the experts' weights and half of what leads up from their sum are
 * the same, bit by bit: powers of two. With the norm, which undoes the first, they are not. */
static void latent_experts_without_a_norm(void) {
    golden g = golden_open(models[1].directory);
    for (size_t norm = 0; norm < 2; norm++) {
        hybrid_model model = open_with(models[1].directory, "latent", "latent_moe_use_norm",
                                       norm ? "true" : "false");
        size_t n = model.config.hidden_size * model.config.routed_hidden_size;
        float *halves = test_floats(model.config.n_layers * n);
        float *want = logits_of_model(&model, &g, 0);
        model.config.routed_scaling_factor *= 2;
        for (size_t i = 0; i < model.config.n_layers; i++) {
            linear *up = &model.layers[i].moe.latent_up;
            float *half = halves + i * n;
            if (!hybrid_is_moe(&model.config, i)) continue;
            CHECK(up->rows * up->cols == n && (model.layers[i].moe.latent_norm != NULL) == norm);
            for (size_t row = 0; row < up->rows; row++)
                linear_expand(up, row, 0, up->cols, half + row * up->cols);
            for (size_t k = 0; k < n; k++) half[k] *= 0.5f;
            *up = linear_plain(LINEAR_F32, up->rows, up->cols, half);
        }
        float *got = logits_of_model(&model, &g, 0);
        CHECK((memcmp(got, want, 20 * g.vocab * sizeof *got) == 0) == (norm == 0));
        free(want), free(got), free(halves);
        hybrid_close(&model);
    }
    golden_free(&g);
}

/* Shared experts that give zeros are as good as none. */
static void no_shared_experts(void) {
    golden g = golden_open(models[0].directory);
    hybrid_model with = open_model(models[0].directory);
    hybrid_model without = open_with(models[0].directory, "unshared", "num_shared_experts", "0");
    unsigned char *zeros = (unsigned char *)test_alloc(64 * 32 * 2);
    for (size_t i = 0; i < with.config.n_layers; i++) {
        linear *down = &with.layers[i].moe.shared.down;
        CHECK(!without.layers[i].moe.shared.gate.type);
        CHECK(linear_bytes(down) == (hybrid_is_moe(&with.config, i) ? 64 * 32 * 2 : 0));
        down->data = zeros;
    }
    float *want = logits_of_model(&with, &g, 0), *got = logits_of_model(&without, &g, 0);
    CHECK(memcmp(got, want, 20 * g.vocab * sizeof *got) == 0);
    free(want), free(got), free(zeros);
    hybrid_close(&with), hybrid_close(&without);
    golden_free(&g);
}

/* Many different experts in one block, each several times: the bits of small blocks. */
static void many_experts(void) {
    enum { EXPERTS = 48, TOKENS = 70 };
    golden g = golden_open(models[0].directory);
    hybrid_model model = open_model(models[0].directory);
    hybrid_glu *experts =
        (hybrid_glu *)test_alloc(model.config.n_layers * EXPERTS * sizeof *experts);
    float *router = test_floats(EXPERTS * 64), *bias = test_floats(EXPERTS), *logits[2];
    size_t stored = model.config.num_experts, chosen = 0;
    bool seen[EXPERTS] = {false};
    hybrid_want nothing = {0};
    error e;
    test_fill_normal(router, EXPERTS * 64);
    model.config.num_experts = EXPERTS;
    for (size_t i = model.config.first_k_dense_replace; i < model.config.n_layers; i++) {
        hybrid_moe *moe = &model.layers[i].moe;
        for (size_t k = 0; k < EXPERTS; k++) experts[i * EXPERTS + k] = moe->experts[k % stored];
        moe->experts = experts + i * EXPERTS, moe->bias = bias;
        moe->router = linear_plain(LINEAR_F32, EXPERTS, 64, router);
    }
    for (size_t i = 0; i < 2; i++) {
        reader r = open_reader(&model, TOKENS, i ? 250 : HYBRID_MIN_BLOCK);
        logits[i] = test_floats(TOKENS * g.vocab);
        if (i) { /* with no logits, the last layer's choice stays in the scratch */
            CHECK(hybrid_forward(&r.work, &r.session, g.ids, TOKENS, &nothing, &e));
            for (size_t k = 0; k < TOKENS * 3; k++) seen[r.work.scratch.ffn.chosen[k]] = true;
            CHECK(hybrid_session_reset(&r.session, &e));
        }
        read_ids(&r, g.ids, TOKENS, TOKENS, logits[i], NULL);
        close_reader(&r);
    }
    for (size_t k = 0; k < EXPERTS; k++) chosen += seen[k];
    CHECK_MSG(chosen > 40, "%zu experts", chosen);
    CHECK(memcmp(logits[0], logits[1], TOKENS * g.vocab * sizeof *logits[0]) == 0);
    free(logits[0]), free(logits[1]), free(experts), free(router), free(bias);
    hybrid_close(&model);
    golden_free(&g);
}

/* Heads of more rows than are applied at once: each logit against its row in float64. */
static void large_vocabularies(void) {
    static const size_t sizes[] = {4095, 4096, 4097, 9000};
    enum { TOKENS = 3, HIDDEN = 64 };
    golden g = golden_open(models[0].directory);
    hybrid_model model = open_model(models[0].directory);
    size_t layers = model.config.n_layers + 1;
    float *head = test_floats((size_t)9000 * HIDDEN);
    float *hidden = test_floats(layers * TOKENS * HIDDEN);
    test_fill_normal(head, (size_t)9000 * HIDDEN);
    for (size_t i = 0; i < COUNT(sizes); i++) {
        size_t vocab = model.config.vocab_size = sizes[i];
        float *logits = test_floats(TOKENS * vocab);
        double *want = (double *)test_alloc(TOKENS * vocab * sizeof *want);
        model.head = linear_plain(LINEAR_F32, vocab, HIDDEN, head);
        reader r = open_reader(&model, TOKENS, 0);
        read_ids(&r, g.ids, TOKENS, TOKENS, logits, hidden);
        for (size_t t = 0; t < TOKENS; t++) {
            const float *x = hidden + ((layers - 1) * TOKENS + t) * HIDDEN;
            double squares = 0;
            for (size_t k = 0; k < HIDDEN; k++) squares += (double)x[k] * (double)x[k];
            double scale = 1 / sqrt(squares / HIDDEN + (double)model.config.rms_norm_eps);
            for (size_t v = 0; v < vocab; v++)
                for (size_t k = 0; k < HIDDEN; k++) {
                    double normed = (double)x[k] * scale * (double)model.norm[k];
                    want[t * vocab + v] += (double)head[v * HIDDEN + k] * normed;
                }
        }
        CHECK_AT_MOST("logits", test_relative_l2(logits, want, TOKENS * vocab), 1e-6);
        free(logits), free(want);
        close_reader(&r);
    }
    free(head), free(hidden);
    hybrid_close(&model);
    golden_free(&g);
}

/* One KDA layer with a dense feed-forward: a model without attention, experts and cache. The
 * checkpoint keeps its other layers, which are extra tensors. */
static void make_one_layer(const char *directory) {
    copy_config(models[0].directory, directory);
    edit_config(directory, "num_hidden_layers", "1");
    edit_config(directory, "linear_attn_config.kda_layers", "[1]");
    edit_config(directory, "linear_attn_config.full_attn_layers", "[]");
    edit_config(directory, "num_experts", "null");
}

static void one_layer_and_extra_tensors(void) {
    char directory[300];
    golden g = golden_open(models[0].directory);
    rewrite plain = {NULL, AS_IT_IS, (linear_type)0, false, 0};
    st_checkpoint c = open_checkpoint(models[0].directory);
    float *logits = test_floats(g.n * g.vocab), *hidden = test_floats(2 * g.n * g.hidden);
    temporary("layer", directory);
    make_one_layer(directory);
    write_checkpoint(directory, &c, plain);
    hybrid_model model = open_model(directory);
    reader r = open_reader(&model, g.n, 0);
    read_ids(&r, g.ids, g.n, g.n, logits, hidden);
    g.layers = 2; /* the embedding and the first layer are those of the whole model */
    check_sums(&g, hidden, 1e-6);
    CHECK(hybrid_memory_sizes(&model, 100, LINEAR_F32).latents == 0);
    free(logits), free(hidden);
    close_reader(&r);
    hybrid_close(&model);
    st_close(&c);
    golden_free(&g);
}

/* A file cut short anywhere is refused. */
static void truncated_files_are_refused(void) {
    char directory[300];
    size_t size, header;
    rewrite r = {NULL, AS_IT_IS, (linear_type)0, false, 0};
    st_checkpoint c = open_checkpoint(models[0].directory);
    hybrid_model model;
    error e;
    temporary("truncated", directory);
    make_one_layer(directory);
    c.count = 22; /* the embedding and the first layer; the head is tied */
    edit_config(directory, "tie_word_embeddings", "true");
    c.tensors[21] = *st_find(&c, "model.norm.weight");
    write_checkpoint(directory, &c, r);
    CHECK_MSG(hybrid_open(&model, directory, &e), "%s", e.text);
    hybrid_close(&model);
    char *bytes = read_file(directory, "model.safetensors", &size);
    header = 8 + (size_t)st_load_u64(bytes);
    for (size_t n = 0; n < size; n += n < header + 16 || n + 16 >= size ? 1 : 997) {
        write_file(directory, "model.safetensors", bytes, n);
        bool ok = hybrid_open(&model, directory, &e);
        CHECK_MSG(!ok && strstr(e.text, "model.safetensors"), "cut to %zu bytes: %s", n, e.text);
        if (ok) hybrid_close(&model);
    }
    free(bytes);
    st_close(&c);
}

/* A_log may be longer than the heads, in any shape, and not shorter. */
static void A_log_shapes(void) {
    char directory[300];
    st_checkpoint c = open_checkpoint(models[0].directory);
    st_tensor *A_log = &c.tensors[st_find(&c, "model.layers.0.self_attn.A_log") - c.tensors];
    rewrite r = {NULL, AS_IT_IS, (linear_type)0, false, 0};
    hybrid_model model;
    error e;
    temporary("A_log", directory);
    copy_config(models[0].directory, directory);
    A_log->n_dims = 2, A_log->dims[0] = 2, A_log->dims[1] = 2;
    write_checkpoint(directory, &c, r);
    CHECK(hybrid_open(&model, directory, &e));
    hybrid_close(&model);
    A_log->n_dims = 1, A_log->dims[0] = 3, A_log->elements = 3, A_log->bytes = 12;
    write_checkpoint(directory, &c, r);
    CHECK(!hybrid_open(&model, directory, &e));
    CHECK_MSG(strstr(e.text, "4 numbers") && strstr(e.text, "[3]"), "%s", e.text);
    st_close(&c);
}

static void no_model_at_all(void) {
    hybrid_model model;
    error e;
    char directory[300], long_path[5000];
    CHECK(!hybrid_open(&model, "tests/no/such/directory", &e));
    CHECK_MSG(strstr(e.text, "tests/no/such/directory/config.json"), "%s", e.text);
    temporary("empty", directory);
    copy_config(models[0].directory, directory);
    CHECK(!hybrid_open(&model, directory, &e));
    CHECK_MSG(strstr(e.text, "model.safetensors"), "%s", e.text);
    memset(long_path, 'a', sizeof long_path - 1);
    long_path[sizeof long_path - 1] = '\0';
    CHECK(!hybrid_open(&model, long_path, &e));
}

/* What a plan prints while no file can be opened, where the system may say what memory it has. */
static void read_plan(const hybrid_model *model, bool files, char text[2000]) {
    hybrid_session_options session = {100, LINEAR_F32, 0};
    hybrid_workspace_options work;
    memset(&work, 0, sizeof work);
    work.capacity = 100, work.block = 96;
    FILE *out = tmpfile();
    if (!out) give_up("tmpfile");
    rlim_t before = set_limit(RLIMIT_NOFILE, 0);
    if (files) set_limit(RLIMIT_NOFILE, before);
    plan_print(model, &session, &work, out);
    set_limit(RLIMIT_NOFILE, before);
    rewind(out);
    text[fread(text, 1, 1999, out)] = '\0';
    fclose(out);
}

/* Weights that are more than memory; all of a machine's memory, where nothing is said of what is
 * free; and nothing said at all. */
static void plans_without_memory(void) {
    char text[2000];
    hybrid_model model = open_model(models[0].directory);
    read_plan(&model, true, text);
    CHECK_MSG(strstr(text, " tokens with all weights in memory\n"), "%s", text);
    CHECK_MSG(strstr(text, " bytes for 96 tokens at a time and a context of 100\n"), "%s", text);
    uint64_t bytes = model.mapped_bytes;
    size_t tokens = 0;
    model.mapped_bytes = SIZE_MAX / 2;
    read_plan(&model, true, text);
    model.mapped_bytes = bytes;
    const char *at = strstr(text, "largest context: none with all weights in memory, ");
    CHECK_MSG(at &&
                  sscanf(at, "largest context: none with all weights in memory, %zu tokens",
                         &tokens) == 1 && /* NOLINT(cert-err34-c) */
                  tokens > 0,
              "%s", text);
    rlim_t before = set_limit(RLIMIT_NOFILE, 0);
    double memory = plan_available_memory(), pages = (double)sysconf(_SC_PHYS_PAGES);
    set_limit(RLIMIT_NOFILE, before);
    CHECK(memory == (pages > 0 ? pages * (double)sysconf(_SC_PAGESIZE) : 0));
    says_nothing = true;
    read_plan(&model, false, text);
    says_nothing = false;
    CHECK_MSG(strstr(text, "memory: unknown, so is the largest context\n"), "%s", text);
    hybrid_close(&model);
}

int main(void) {
    TEST(kimi_linear_matches);
    TEST(kimi_k3_matches);
    TEST(blocks_of_any_size_match);
    TEST(splits_match_each_other);
    TEST(scalar_matches);
    TEST(avx2_matches);
    TEST(avx512_matches);
    TEST(neon_matches);
    TEST(quantised_checkpoints_match);
    TEST(last_logits_are_the_last_row);
    TEST(depth_weights_match);
    TEST(refused_tokens_change_nothing);
    TEST(router_matches_definition);
    TEST(bias_only_selects);
    TEST(activations_match_definition);
    TEST(each_key_is_checked);
    TEST(a_configuration_is_an_object);
    TEST(ranges_and_contradictions);
    TEST(missing_keys_have_published_defaults);
    TEST(null_is_a_missing_key);
    TEST(layers_with_experts);
    TEST(kimi_linear_48b_sizes);
    TEST(each_tensor_is_checked);
    TEST(quantised_layouts_are_checked);
    TEST(layouts_are_those_of_the_configuration);
    TEST(integers_in_any_layout);
    TEST(symmetric_with_zeros);
    TEST(weight_types_and_alignment);
    TEST(mxfp4_has_whole_groups);
    TEST(tied_embeddings);
    TEST(latent_experts_without_a_norm);
    TEST(no_shared_experts);
    TEST(many_experts);
    TEST(large_vocabularies);
    TEST(one_layer_and_extra_tensors);
    TEST(truncated_files_are_refused);
    TEST(A_log_shapes);
    TEST(no_model_at_all);
    TEST(plans_without_memory);
    return test_summary();
}
