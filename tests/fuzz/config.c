/* config.c - any text as config.json: its sizes and its quantization_config. */
#define HYBRID_CONFIG_IMPLEMENTATION
#include "../../examples/config.h"
#define QUANTIZATION_IMPLEMENTATION
#include "../../examples/quantization.h"

#include "fuzz.h"

static void check_sentence(const error *e) {
    FUZZ_CHECK(strncmp(e->text, "config.json: ", 13) == 0 && !strchr(e->text, '\n'));
}

/* What those who allocate and index rely on. */
static void check_config(const hybrid_config *c) {
    const size_t most = HYBRID_MAX_DIM;
    FUZZ_CHECK(c->n_layers >= 1 && c->n_layers <= HYBRID_MAX_LAYERS);
    FUZZ_CHECK(c->vocab_size >= 1 && c->vocab_size <= most);
    FUZZ_CHECK(c->hidden_size >= 1 && c->hidden_size <= most);
    FUZZ_CHECK(c->kda_heads >= 1 && c->kda_head_dim >= 1 && c->kda_heads * c->kda_head_dim <= most);
    FUZZ_CHECK(c->conv_width >= 1 && c->conv_width <= KDA_CONV_MAX_WIDTH);
    FUZZ_CHECK(c->n_heads * (c->qk_nope_head_dim + c->qk_rope_head_dim) <= most);
    FUZZ_CHECK(c->n_heads * (c->qk_nope_head_dim + c->v_head_dim) <= most);
    FUZZ_CHECK(c->gate_lower_bound <= 0 && c->gate_lower_bound >= -1000);
    FUZZ_CHECK(c->rms_norm_eps > 0 && c->rms_norm_eps <= 1);
    for (size_t i = 0; i < c->n_layers; i++)
        if (hybrid_is_moe(c, i)) FUZZ_CHECK(c->num_experts > 0);
    if (c->num_experts == 0) return;
    FUZZ_CHECK(c->experts_per_token >= 1 && c->experts_per_token <= c->num_experts);
    FUZZ_CHECK(c->num_experts % c->num_expert_group == 0 && c->topk_group <= c->num_expert_group);
    FUZZ_CHECK(c->num_shared_experts * c->moe_intermediate_size <= most);
}

static void check_quantization(const quantization *q) {
    static const char *const names[] = {
        "", "lm_head", "model.layers.0.self_attn.q_proj", "model.layers.11.mlp.down_proj",
        "language_model.model.layers.3.block_sparse_moe.experts.17.w2"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const quantization_scheme *s = quantization_of(q, names[i]);
        if (s) FUZZ_CHECK(s->bits == 4 || s->bits == 8);
        if (s) FUZZ_CHECK(s->format >= QUANTIZATION_PACKED && s->format <= QUANTIZATION_MXFP4);
    }
}

static void fuzz_one(const uint8_t *bytes, size_t size) {
    hybrid_config config;
    quantization q;
    error e;
    const char *text = (const char *)bytes;
    if (hybrid_config_parse(&config, "config.json", text, size, &e))
        check_config(&config);
    else
        check_sentence(&e);
    if (quantization_parse(&q, "config.json", text, size, &e))
        check_quantization(&q);
    else
        check_sentence(&e);
    quantization_free(&q);
}
