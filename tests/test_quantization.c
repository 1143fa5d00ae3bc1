/* test_quantization.c - what a configuration says of its matrices, and what is refused in it. */
#include "../examples/quantization.h"
#include "../examples/safetensors.h"

#include "model.h"

/* As one of the formats writes it; %s: more keys, each with a comma behind it. */
static const char packed[] =
    "{\"quantization_config\": {\"quant_method\": \"compressed-tensors\",\n"
    "\"format\": \"pack-quantized\",\n\"quantization_status\": \"compressed\",\n"
    "\"kv_cache_scheme\": null,\n\"config_groups\": {\"group_0\": {\"targets\": [\"Linear\"],\n"
    "\"weights\": {\"num_bits\": 4,\n\"type\": \"int\",\n\"symmetric\": true,\n"
    "\"group_size\": 32,\n\"strategy\": \"group\",\n\"block_structure\": null,\n"
    "\"dynamic\": false,\n\"actorder\": null},\n\"input_activations\": null,\n"
    "\"output_activations\": null}},\n\"ignore\": [\"lm_head\", \"re:.*self_attn.*\"]\n}}";

static bool parse(quantization *q, const char *text, error *e) {
    return quantization_parse(q, "some/config.json", text, strlen(text), e);
}

static void nothing_is_quantised_without_the_key(void) {
    static const char *const texts[] = {"{}", "{\"quantization_config\": null}",
                                        "{\"text_config\": {\"quantization_config\": null}}"};
    for (size_t i = 0; i < 3; i++) {
        quantization q;
        error e;
        CHECK_MSG(parse(&q, texts[i], &e), "%s", e.text);
        CHECK(!quantization_of(&q, "model.layers.0.mlp.up_proj"));
        quantization_free(&q);
    }
}

static void the_key_is_an_object(void) {
    static const char *const texts[] = {
        "{\"quantization_config\": 7}", "{\"quantization_config\": []}",
        "{\"text_config\": {\"quantization_config\": \"compressed-tensors\"}}"};
    static const char *const found[] = {"a number", "an array", "a string"};
    for (size_t i = 0; i < 3; i++) {
        quantization q;
        error e = {""};
        CHECK(!parse(&q, texts[i], &e) && q.n_groups == 0);
        CHECK_MSG(strstr(e.text, "key quantization_config: expected an object, found ") &&
                      strstr(e.text, found[i]),
                  "%s", e.text);
    }
}

static void targets_and_ignored(void) {
    quantization q;
    error e;
    CHECK_MSG(parse(&q, packed, &e), "%s", e.text);
    const quantization_scheme *s = quantization_of(&q, "model.layers.1.mlp.up_proj");
    CHECK(s && s->format == QUANTIZATION_PACKED && s->bits == 4 && s->group_size == 32 &&
          s->symmetric);
    CHECK(!quantization_of(&q, "lm_head"));
    CHECK(quantization_of(&q, "model.lm_head")); /* a name is the whole name */
    CHECK(!quantization_of(&q, "model.layers.1.self_attn.q_proj"));
    quantization_free(&q);

    char *edited = edit(packed, "targets", "[\"re:.*up_proj$\", \"model.a\"]");
    CHECK_MSG(parse(&q, edited, &e), "%s", e.text);
    CHECK(quantization_of(&q, "model.layers.1.mlp.up_proj") && quantization_of(&q, "model.a"));
    CHECK(!quantization_of(&q, "model.layers.1.mlp.down_proj"));
    CHECK(!quantization_of(&q, "model.layers.1.self_attn.up_proj")); /* ignored */
    quantization_free(&q), free(edited);
}

/* Two groups: a module is the first's that has it; a format of one's own counts. */
static void several_groups(void) {
    static const char text[] =
        "{\"quantization_config\": {\"quant_method\": \"compressed-tensors\","
        "\"format\": \"mixed-precision\", \"config_groups\": {"
        "\"a\": {\"format\": \"int-quantized\", \"targets\": [\"re:.*experts.*\"], \"weights\": "
        "{\"num_bits\": 8, \"type\": \"int\", \"strategy\": \"channel\"}},"
        "\"b\": {\"format\": \"pack-quantized\", \"targets\": [\"Linear\"], \"weights\": "
        "{\"num_bits\": 8, \"type\": \"int\", \"group_size\": 100, \"symmetric\": false}}}}}";
    quantization q;
    error e;
    CHECK_MSG(parse(&q, text, &e), "%s", e.text);
    const quantization_scheme *s = quantization_of(&q, "experts.1.w1");
    CHECK(s && s->format == QUANTIZATION_INT8 && s->group_size == 0 && s->symmetric);
    s = quantization_of(&q, "mlp.up_proj");
    CHECK(s && s->format == QUANTIZATION_PACKED && s->group_size == 100 && !s->symmetric);
    quantization_free(&q);
}

static void too_many_groups(void) {
    char text[6000];
    quantization q;
    error e;
    for (int groups = QUANTIZATION_MAX_GROUPS; groups <= QUANTIZATION_MAX_GROUPS + 1; groups++) {
        int n = sprintf(text, "{\"quantization_config\": {\"quant_method\": \"compressed-tensors\","
                              "\"format\": \"int-quantized\", \"config_groups\": {");
        for (int i = 0; i < groups; i++)
            n += sprintf(text + n,
                         "%s\"%d\": {\"targets\": [\"m.%d\"], \"weights\": {\"num_bits\": 8, "
                         "\"type\": \"int\", \"strategy\": \"channel\"}}",
                         i ? ", " : "", i, i);
        sprintf(text + n, "}}}");
        bool ok = parse(&q, text, &e);
        CHECK_MSG(ok == (groups == QUANTIZATION_MAX_GROUPS), "%d groups: %s", groups, e.text);
        if (ok) CHECK(quantization_of(&q, "m.15") && !quantization_of(&q, "m.16"));
        if (ok) quantization_free(&q);
    }
    CHECK_MSG(strcmp(e.text, "some/config.json: key quantization_config.config_groups: expected an "
                             "object of 1 to 16 groups, found an object") == 0,
              "%s", e.text);
}

/* Of each key, what is understood and what is not. */
static const struct {
    const char *key, *value;
    bool ok;
} values[] = {
    {"quant_method", "\"gptq\"", false},
    {"quant_method", NULL, false},
    {"format", "\"float-quantized\"", false},
    {"format", "\"int-quantized\"", false}, /* of 4 bits */
    {"format", NULL, false},
    {"quantization_status", "\"frozen\"", false},
    {"quantization_status", NULL, true},
    {"kv_cache_scheme", "{\"num_bits\": 8}", false},
    {"config_groups", "{}", false},
    {"config_groups", "[1]", false},
    {"config_groups", "{\"a\": 1}", false},
    {"targets", "[]", false},
    {"targets", "\"Linear\"", false},
    {"targets", "[\"Embedding\"]", false},
    {"targets", "[\"lm_head\"]", true}, /* no class, by its underscore */
    {"targets", "[1]", false},
    {"targets", "[\"re:(?i)x\"]", false},
    {"targets", "[\"re:[a\"]", false},
    {"targets", "[\"a\\u0000b\"]", false},
    {"ignore", "[1]", false},
    {"ignore", "{}", false},
    {"ignore", "[\"re:(\"]", false},
    {"ignore", "[]", true},
    {"ignore", NULL, true},
    {"weights", "null", false},
    {"num_bits", "3", false},
    {"num_bits", "8", true},
    {"num_bits", "null", false},
    {"num_bits", "4.5", false},
    {"type", "\"float\"", false},
    {"type", NULL, false},
    {"symmetric", "1", false},
    {"symmetric", "false", true},
    {"symmetric", NULL, true},
    {"group_size", "0", false},
    {"group_size", "-2", false},
    {"group_size", "null", false}, /* with strategy "group" */
    {"group_size", "-1", false},
    {"group_size", "1.5", false},
    {"group_size", "16777217", false},
    {"group_size", "1", true},
    {"strategy", "\"channel\"", false}, /* with a group_size */
    {"strategy", "\"tensor\"", false},
    {"strategy", "\"token\"", false},
    {"strategy", NULL, true},
    {"actorder", "\"group\"", false},
    {"actorder", "true", false},
    {"actorder", "\"weight\"", true},
    {"actorder", "\"static\"", true},
    {"actorder", "false", true},
    {"dynamic", "true", false},
    {"block_structure", "[128, 128]", false},
    {"input_activations", "{\"num_bits\": 8}", false},
    {"output_activations", "{}", false},
    {"sparsity_config", "{\"format\": \"dense\"}", false},
    {"sparsity_config", "{}", true},
    {"sparsity_config", "[]", false},
    {"sparsity_config", "null", true},
    {"transform_config", "\"none\"", false},
    {"transform_config", "{\"config_groups\": {}}", false},
};

/* A key that is not in the text goes where it belongs. */
static char *with(const char *key, const char *value) {
    bool absent = strstr(key, "_config") && strcmp(key, "config_groups") != 0;
    char name[100];
    if (!absent) return edit(packed, key, value);
    snprintf(name, sizeof name, "quantization_config.%s", key);
    return edit(packed, name, value);
}

static void each_key(void) {
    for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
        quantization q;
        error e = {""};
        char *edited = with(values[i].key, values[i].value);
        const char *shown = values[i].value ? values[i].value : "(missing)";
        bool ok = parse(&q, edited, &e);
        CHECK_MSG(ok == values[i].ok, "%s = %s: %s", values[i].key, shown, e.text);
        if (ok) quantization_free(&q);
        /* Two keys may contradict each other: then either is named. */
        bool pair =
            strcmp(values[i].key, "strategy") == 0 || strcmp(shown, "\"int-quantized\"") == 0;
        CHECK_MSG(ok || (strstr(e.text, "some/config.json: key ") &&
                         strstr(e.text, pair ? "" : values[i].key)),
                  "%s = %s: %s", values[i].key, shown, e.text);
        free(edited);
    }
}

/* A copy of a text in which `to` stands for the first `from`. */
static char *with_other(const char *text, const char *from, const char *to) {
    size_t at = 0, length = strlen(from);
    while (text[at] && strncmp(text + at, from, length) != 0) at++;
    if (!text[at]) give_up(from);
    char *edited = (char *)test_alloc(strlen(text) + strlen(to) + 1);
    sprintf(edited, "%.*s%s%s", (int)at, text, to, text + at + length);
    return edited;
}

static void mxfp4_is_of_one_kind(void) {
    static const char *const wrong[][2] = {{"\"type\": \"float\"", "\"type\": \"int\""},
                                           {"\"num_bits\": 4", "\"num_bits\": 8"},
                                           {"\"group_size\": 32", "\"group_size\": 16"},
                                           {"\"symmetric\": true", "\"symmetric\": false"}};
    size_t size;
    char *text = read_file(MODELS "kimi-k3-tiny", "config.json", &size);
    quantization q;
    error e;
    CHECK_MSG(parse(&q, text, &e), "%s", e.text);
    const quantization_scheme *s =
        quantization_of(&q, "language_model.model.layers.1.block_sparse_moe.experts.0.w1");
    CHECK(s && s->format == QUANTIZATION_MXFP4 && s->group_size == 32);
    CHECK(!quantization_of(&q, "language_model.model.layers.0.mlp.gate_up_proj"));
    CHECK(!quantization_of(&q, "language_model.lm_head"));
    quantization_free(&q);
    for (size_t i = 0; i < 4; i++) {
        char *edited = with_other(text, wrong[i][0], wrong[i][1]);
        CHECK_MSG(!parse(&q, edited, &e), "%s", wrong[i][1]);
        free(edited);
    }
    free(text);
}

static void twice_is_once_too_often(void) {
    quantization q;
    error e;
    char text[3000];
    snprintf(text, sizeof text, "{\"text_config\": %s, %s", packed, packed + 1);
    CHECK(!parse(&q, text, &e));
    CHECK(strstr(e.text, "text_config.quantization_config"));
}

/* Any byte of a configuration another, cut anywhere: an answer, and nothing lost. */
static void damaged_texts(void) {
    size_t understood = 0, length = strlen(packed);
    for (size_t i = 0; i < 20000; i++) {
        char text[sizeof packed];
        quantization q;
        error e;
        memcpy(text, packed, sizeof packed);
        size_t n = i < length ? i : length;
        for (size_t k = 0; k < 1 + i % 3; k++)
            text[test_random_u64() % length] = (char)test_random_u64();
        if (quantization_parse(&q, "some/config.json", text, n, &e)) {
            understood++;
            quantization_of(&q, "model.layers.1.mlp.up_proj");
            quantization_free(&q);
        }
    }
    CHECK(understood > 100);
}

int main(void) {
    TEST(nothing_is_quantised_without_the_key);
    TEST(the_key_is_an_object);
    TEST(targets_and_ignored);
    TEST(several_groups);
    TEST(too_many_groups);
    TEST(each_key);
    TEST(mxfp4_is_of_one_kind);
    TEST(twice_is_once_too_often);
    TEST(damaged_texts);
    return test_summary();
}
