/* make_checkpoint.c - writes a checkpoint of random weights for a configuration: the names, shapes
 * and types that a release of it has, to try and to measure what nobody needs to download.
 *
 *     build/make_checkpoint CONFIG.json OUT_DIR [options]
 *
 * The list of tensors is written here from the published layout and knows nothing of the list in
 * examples/weights.h, so that each checks the other: what this writes must open there.
 *
 * A tensor's numbers are uniform and of a size that keeps activations near 1 through any number of
 * layers. They depend on the seed and on the place of the tensor in the list alone, and come from
 * integers and correctly rounded operations: the same bytes on every machine.
 */
#include "../examples/config.h"
#include "../examples/safetensors.h"

#include "../examples/arguments.h"
#include "../examples/output.h"
#include "../examples/safetensors_write.h"

#include <math.h>
#include <sys/stat.h>
#include <unistd.h>

static const char help[] =
    "usage: make_checkpoint CONFIG.json OUT_DIR [options]\n"
    "\n"
    "Writes OUT_DIR/config.json and model.safetensors, or shards with an index, of random "
    "weights.\n"
    "\n"
    "  --set KEY=VALUE       another value for a key of the configuration (of text_config, where\n"
    "                        there is one), as JSON: --set vocab_size=32768\n"
    "                        --set linear_attn_config.kda_layers=[1,2]; up to 16 times\n"
    "  --experts-type TYPE   bf16 or mxfp4, which goes into the configuration too (default: what\n"
    "                        its quantization_config says)\n"
    "  --shard-bytes N       start another file where one would hold more (default 5000000000)\n"
    "  --seed N              of the numbers (default 1)\n"
    "  --sparse              headers only: data is a hole in the file and reads as zeros\n"
    "  --help                this text\n"
    "\n"
    "Exit status: 1 for bad input, 2 for bad usage.\n";

/* ---- Arguments ---- */

#define MOST_SETTINGS 16

typedef struct settings {
    const char *list[MOST_SETTINGS]; /* KEY=VALUE */
    size_t n;
} settings;

typedef enum experts_type { EXPERTS_BY_CONFIG, EXPERTS_BF16, EXPERTS_MXFP4 } experts_type;

typedef struct options {
    const char *paths[2]; /* CONFIG.json, OUT_DIR */
    settings set;
    experts_type experts;
    size_t shard_bytes;
    uint64_t seed;
    bool sparse, help;
} options;

static bool read_setting(const char *name, const char *text, void *place, error *e) {
    settings *set = (settings *)place;
    if (!strchr(text, '=') || text[0] == '=')
        return error_set(e, "%s: expected KEY=VALUE, found \"%.40s\"", name, text);
    if (set->n == MOST_SETTINGS)
        return error_set(e, "%s: expected at most %d, found one more", name, MOST_SETTINGS);
    set->list[set->n++] = text;
    return true;
}

static bool read_experts(const char *name, const char *text, void *place, error *e) {
    experts_type *type = (experts_type *)place;
    if (strcmp(text, "bf16") == 0) return *type = EXPERTS_BF16, true;
    if (strcmp(text, "mxfp4") == 0) return *type = EXPERTS_MXFP4, true;
    return error_set(e, "%s: expected bf16 or mxfp4, found \"%.40s\"", name, text);
}

static const argument argument_list[] = {
    {"--set", ARGUMENT_OTHER, offsetof(options, set), 0, 0, read_setting},
    {"--experts-type", ARGUMENT_OTHER, offsetof(options, experts), 0, 0, read_experts},
    {"--shard-bytes", ARGUMENT_SIZE, offsetof(options, shard_bytes), 1, 0, NULL},
    {"--seed", ARGUMENT_SEED, offsetof(options, seed), 0, 0, NULL},
    {"--sparse", ARGUMENT_FLAG, offsetof(options, sparse), 0, 0, NULL},
};
static const arguments argument_table = {argument_list,
                                         sizeof argument_list / sizeof *argument_list,
                                         "one CONFIG.json and one OUT_DIR", 2};

/* ---- Text that grows ---- */

typedef struct text {
    char *bytes;
    size_t n, room;
} text;

static bool append_bytes(text *t, const char *bytes, size_t n, error *e) {
    if (n == 0) return true; /* to a text that is not there yet, from one that is none */
    if (n > t->room - t->n) {
        size_t room = 2 * t->room + n + 4096;
        char *grown = (char *)realloc(t->bytes, room);
        if (!grown) return error_set(e, "no memory for a text of %zu bytes", room);
        t->bytes = grown, t->room = room;
    }
    memcpy(t->bytes + t->n, bytes, n);
    t->n += n;
    return true;
}

static bool append(text *t, const char *string, error *e) {
    return append_bytes(t, string, strlen(string), e);
}

/* ---- The configuration with other values ---- */

/* What follows a name at the start of KEY=VALUE: "=" after the key itself, "." after an object on
 * the way to it; null if it starts with another name. */
static const char *after_name(const char *key, const char *name) {
    size_t n = strlen(name);
    return strncmp(key, name, n) == 0 && (key[n] == '=' || key[n] == '.') ? key + n : NULL;
}

static bool append_string(text *t, const char *string, size_t n, error *e) {
    bool ok = append(t, "\"", e);
    for (size_t i = 0; ok && i < n; i++) {
        unsigned char c = (unsigned char)string[i];
        char escaped[8];
        if (c == '"' || c == '\\')
            snprintf(escaped, sizeof escaped, "\\%c", c);
        else
            snprintf(escaped, sizeof escaped, c < 0x20 ? "\\u%04x" : "%c", c);
        ok = append(t, escaped, e);
    }
    return ok && append(t, "\"", e);
}

static bool append_value(text *t, const json_value *value, const char *key, error *e);

/* The members of an object; the value of `key` is what stands after its "=", and is added to the
 * object if it is not there. */
static bool append_object(text *t, const json_value *object, const char *key, error *e) {
    bool ok = append(t, "{", e), found = false;
    for (size_t i = 0; ok && i < json_count(object); i++) {
        const char *name = json_member_name(object, i, NULL);
        const char *rest = key && name ? after_name(key, name) : NULL;
        if (!name) return error_set(e, "a key holds a NUL");
        found = found || rest;
        ok = append(t, i ? ", " : "", e) && append_string(t, name, strlen(name), e) &&
             append(t, ": ", e);
        if (ok && rest && *rest == '=')
            ok = append(t, rest + 1, e);
        else if (ok)
            ok = append_value(t, json_item(object, i), rest ? rest + 1 : NULL, e);
    }
    if (ok && key && !found) {
        size_t n = strcspn(key, "=.");
        if (key[n] == '.') return error_set(e, "--set: no object \"%.*s\"", (int)n, key);
        ok = append(t, json_count(object) ? ", " : "", e) && append_string(t, key, n, e) &&
             append(t, ": ", e) && append(t, key + n + 1, e);
    }
    return ok && append(t, "}", e);
}

static bool append_value(text *t, const json_value *value, const char *key, error *e) {
    char shown[JSON_SHOWN];
    bool yes = false, ok;
    size_t n = 0;
    const char *string;
    if (key && json_kind_of(value) != JSON_OBJECT)
        return error_set(e, "--set: no object where \"%.60s\" would go", key);
    switch (json_kind_of(value)) {
    case JSON_OBJECT: return append_object(t, value, key, e);
    case JSON_ARRAY:
        ok = append(t, "[", e);
        for (size_t i = 0; ok && i < json_count(value); i++)
            ok = append(t, i ? ", " : "", e) && append_value(t, json_item(value, i), NULL, e);
        return ok && append(t, "]", e);
    case JSON_STRING: string = json_string(value, &n); return append_string(t, string, n, e);
    case JSON_BOOLEAN: json_boolean(value, &yes); return append(t, yes ? "true" : "false", e);
    case JSON_NUMBER: return append(t, json_show(value, shown), e);
    case JSON_NULL:
    case JSON_NOTHING: break;
    }
    return append(t, "null", e);
}

static bool has_text_config(const json *document) {
    return json_kind_of(json_member(json_root(document), "text_config")) == JSON_OBJECT;
}

/* Replaces the text by one in which a setting holds. */
static bool apply_setting(text *t, const char *path, const char *setting, error *e) {
    json document;
    text edited = {NULL, 0, 0}, key = {NULL, 0, 0};
    if (!json_parse(&document, path, t->bytes, t->n, e)) return false;
    bool ok = append(&key, has_text_config(&document) ? "text_config." : "", e) &&
              append_bytes(&key, setting, strlen(setting) + 1, e) &&
              append_value(&edited, json_root(&document), key.bytes, e);
    json_free(&document);
    free(key.bytes);
    if (!ok) return free(edited.bytes), false;
    free(t->bytes);
    *t = edited;
    return true;
}

/* ---- What the configuration calls for ---- */

typedef enum tensor_kind {
    BF16,      /* uniform from low to high */
    F32,       /* the same */
    CODES,     /* any byte: two E2M1 numbers */
    EXPONENTS, /* E8M0: low or the one above */
} tensor_kind;

typedef struct tensor {
    char name[112];
    tensor_kind kind;
    size_t n_dims, dims[4];
    float low, high;
    size_t n_random; /* numbers, which zeros follow */
} tensor;

typedef struct layout {
    hybrid_config config;
    bool is_inside; /* as in K3's release: under "language_model.", A_log padded */
    bool packed_experts;
    char stem[64]; /* goes before the names that are added */
    tensor *list;
    size_t n, room;
    bool failed; /* out of memory */
} layout;

static size_t elements(const tensor *t) {
    size_t n = 1;
    for (size_t i = 0; i < t->n_dims; i++) n *= t->dims[i];
    return n;
}

static size_t bytes_of(const tensor *t) {
    return elements(t) * (t->kind == F32 ? 4u : t->kind == BF16 ? 2u : 1u);
}

static tensor *add(layout *l, tensor_kind kind, const char *name, const char *suffix) {
    static tensor lost;
    if (l->n == l->room) {
        size_t room = 2 * l->room + 1024;
        tensor *grown = (tensor *)realloc(l->list, room * sizeof *grown);
        if (!grown) return l->failed = true, &lost;
        l->list = grown, l->room = room;
    }
    tensor *t = &l->list[l->n++];
    memset(t, 0, sizeof *t);
    t->kind = kind;
    t->n_random = SIZE_MAX;
    snprintf(t->name, sizeof t->name, "%s%s%s", l->stem, name, suffix);
    return t;
}

static void add_vector(layout *l, tensor_kind kind, const char *name, size_t n, float low,
                       float high) {
    tensor *t = add(l, kind, name, "");
    t->n_dims = 1, t->dims[0] = n;
    t->low = low, t->high = high;
}

static void add_norm(layout *l, const char *name, size_t n) {
    add_vector(l, BF16, name, n, 0.9f, 1.1f);
}

/* A matrix whose products with inputs of size 1 have size 1. */
static void add_matrix(layout *l, const char *name, size_t rows, size_t cols) {
    tensor *t = add(l, BF16, name, ".weight");
    t->n_dims = 2, t->dims[0] = rows, t->dims[1] = cols;
    t->high = sqrtf(3.0f / (float)cols), t->low = -t->high;
}

/* The same in MXFP4, as well as a power of two allows: E2M1 numbers of random codes have a root
 * mean square of 2.93, and half of the groups have a scale twice that of the others. */
static void add_packed(layout *l, const char *name, size_t rows, size_t cols) {
    tensor *codes = add(l, CODES, name, ".weight_packed");
    codes->n_dims = 2, codes->dims[0] = rows, codes->dims[1] = cols / 2;
    tensor *scale = add(l, EXPONENTS, name, ".weight_scale");
    scale->n_dims = 2, scale->dims[0] = rows, scale->dims[1] = cols / 32;
    float target = 1 / (2.93f * 1.6f * sqrtf((float)cols)), power = 1;
    for (scale->low = 127; power > target; power /= 2) scale->low--;
}

static void add_conv(layout *l, const char *name, size_t channels) {
    tensor *t = add(l, BF16, name, ".weight");
    t->n_dims = 3, t->dims[0] = channels, t->dims[1] = 1, t->dims[2] = l->config.conv_width;
    t->high = sqrtf(3.0f / (float)l->config.conv_width), t->low = -t->high;
}

/* A pseudo-query of Attention Residuals and the norm of its keys. */
static void add_query(layout *l, const char *name) {
    size_t hidden = l->config.hidden_size;
    tensor *norm = add(l, BF16, name, "_norm.weight");
    norm->n_dims = 1, norm->dims[0] = hidden;
    norm->low = 0.9f, norm->high = 1.1f;
    tensor *query = add(l, BF16, name, "_proj.weight");
    query->n_dims = 2, query->dims[0] = 1, query->dims[1] = hidden;
    query->high = sqrtf(3.0f / (float)hidden), query->low = -query->high;
}

static void add_kda(layout *l) {
    const hybrid_config *c = &l->config;
    size_t hidden = c->hidden_size, low = c->kda_head_dim, channels = c->kda_heads * low;
    bool bounded = c->gate_lower_bound < 0;
    add_matrix(l, "self_attn.q_proj", channels, hidden);
    add_matrix(l, "self_attn.k_proj", channels, hidden);
    add_matrix(l, "self_attn.v_proj", channels, hidden);
    add_conv(l, "self_attn.q_conv1d", channels);
    add_conv(l, "self_attn.k_conv1d", channels);
    add_conv(l, "self_attn.v_conv1d", channels);
    /* Decays as training begins with: exp(A_log) from 1 to 16, or near 1 with a bound; softplus of
     * dt_bias from 0.001 to 0.1. */
    tensor *decay = add(l, F32, "self_attn.A_log", "");
    decay->low = bounded ? -0.5f : 0.0f, decay->high = bounded ? 1.0f : 2.77f;
    decay->n_random = c->kda_heads;
    if (l->is_inside) {
        decay->n_dims = 1, decay->dims[0] = (c->kda_heads + low - 1) / low * low;
    } else {
        decay->n_dims = 4, decay->dims[0] = decay->dims[1] = decay->dims[3] = 1;
        decay->dims[2] = c->kda_heads;
    }
    add_vector(l, F32, "self_attn.dt_bias", channels, -6.9f, -2.25f);
    add_matrix(l, "self_attn.f_a_proj", low, hidden);
    add_matrix(l, "self_attn.f_b_proj", channels, low);
    add_matrix(l, "self_attn.b_proj", c->kda_heads, hidden);
    if (c->use_full_rank_gate) {
        add_matrix(l, "self_attn.g_proj", channels, hidden);
    } else {
        add_matrix(l, "self_attn.g_a_proj", low, hidden);
        add_matrix(l, "self_attn.g_b_proj", channels, low);
    }
    add_norm(l, "self_attn.o_norm.weight", low);
    add_matrix(l, "self_attn.o_proj", hidden, channels);
}

static void add_mla(layout *l) {
    const hybrid_config *c = &l->config;
    size_t hidden = c->hidden_size, values = c->n_heads * c->v_head_dim;
    size_t queries = c->n_heads * (c->qk_nope_head_dim + c->qk_rope_head_dim);
    if (c->q_lora_rank > 0) {
        add_matrix(l, "self_attn.q_a_proj", c->q_lora_rank, hidden);
        add_norm(l, "self_attn.q_a_layernorm.weight", c->q_lora_rank);
        add_matrix(l, "self_attn.q_b_proj", queries, c->q_lora_rank);
    } else {
        add_matrix(l, "self_attn.q_proj", queries, hidden);
    }
    add_matrix(l, "self_attn.kv_a_proj_with_mqa", c->kv_lora_rank + c->qk_rope_head_dim, hidden);
    add_norm(l, "self_attn.kv_a_layernorm.weight", c->kv_lora_rank);
    add_matrix(l, "self_attn.kv_b_proj", c->n_heads * (c->qk_nope_head_dim + c->v_head_dim),
               c->kv_lora_rank);
    if (c->mla_use_output_gate) add_matrix(l, "self_attn.g_proj", values, hidden);
    add_matrix(l, "self_attn.o_proj", hidden, values);
}

/* gate, up, down: three names after the path. */
static void add_glu(layout *l, const char *path, const char *const *names, bool packed,
                    size_t inputs, size_t width) {
    char name[3][96];
    for (size_t i = 0; i < 3; i++) snprintf(name[i], sizeof name[i], "%s.%s", path, names[i]);
    void (*add_one)(layout *, const char *, size_t, size_t) = packed ? add_packed : add_matrix;
    add_one(l, name[0], width, inputs);
    add_one(l, name[1], width, inputs);
    add_one(l, name[2], inputs, width);
}

static const char *const glu_names[3] = {"gate_proj", "up_proj", "down_proj"};
static const char *const expert_names[3] = {"w1", "w3", "w2"};

static void add_moe(layout *l) {
    const hybrid_config *c = &l->config;
    size_t hidden = c->hidden_size, latent = c->routed_hidden_size;
    for (size_t i = 0; i < c->num_experts && !l->failed; i++) {
        char path[64];
        snprintf(path, sizeof path, "block_sparse_moe.experts.%zu", i);
        add_glu(l, path, expert_names, l->packed_experts, latent ? latent : hidden,
                c->moe_intermediate_size);
    }
    add_matrix(l, "block_sparse_moe.gate", c->num_experts, hidden);
    add_vector(l, F32, "block_sparse_moe.gate.e_score_correction_bias", c->num_experts, -0.05f,
               0.05f);
    if (latent > 0) {
        add_matrix(l, "block_sparse_moe.routed_expert_down_proj", latent, hidden);
        add_matrix(l, "block_sparse_moe.routed_expert_up_proj", hidden, latent);
        if (c->latent_moe_use_norm)
            add_norm(l, "block_sparse_moe.routed_expert_norm.weight", latent);
    }
    if (c->num_shared_experts > 0)
        add_glu(l, "block_sparse_moe.shared_experts", glu_names, false, hidden,
                c->num_shared_experts * c->moe_intermediate_size);
}

static void add_layer(layout *l, size_t i) {
    const hybrid_config *c = &l->config;
    snprintf(l->stem, sizeof l->stem, "%smodel.layers.%zu.", l->is_inside ? "language_model." : "",
             i);
    add_norm(l, "input_layernorm.weight", c->hidden_size);
    add_norm(l, "post_attention_layernorm.weight", c->hidden_size);
    if (c->attn_res_block_size > 0) add_query(l, "self_attention_res"), add_query(l, "mlp_res");
    if (c->is_kda[i])
        add_kda(l);
    else
        add_mla(l);
    if (hybrid_is_moe(c, i))
        add_moe(l);
    else
        add_glu(l, "mlp", glu_names, false, c->hidden_size, c->intermediate_size);
}

static bool add_model(layout *l, error *e) {
    const hybrid_config *c = &l->config;
    const char *prefix = l->is_inside ? "language_model." : "";
    size_t inputs = c->routed_hidden_size ? c->routed_hidden_size : c->hidden_size;
    if (l->packed_experts && c->num_experts > 0 &&
        (inputs % 32 != 0 || c->moe_intermediate_size % 32 != 0))
        return error_set(e,
                         "experts of mxfp4: expected widths of whole groups of 32, found %zu "
                         "and %zu",
                         inputs, c->moe_intermediate_size);
    snprintf(l->stem, sizeof l->stem, "%smodel.", prefix);
    add_matrix(l, "embed_tokens", c->vocab_size, c->hidden_size);
    if (!l->failed) l->list[0].low = -1.7f, l->list[0].high = 1.7f;
    for (size_t i = 0; i < c->n_layers && !l->failed; i++) add_layer(l, i);
    snprintf(l->stem, sizeof l->stem, "%smodel.", prefix);
    add_norm(l, "norm.weight", c->hidden_size);
    if (c->attn_res_block_size > 0) add_query(l, "output_attn_res");
    snprintf(l->stem, sizeof l->stem, "%s", prefix);
    if (!c->tie_word_embeddings) add_matrix(l, "lm_head", c->vocab_size, c->hidden_size);
    return !l->failed || error_set(e, "no memory for a list of %zu tensors", l->n);
}

/* ---- Numbers ---- */

/* One step of splitmix64 (Steele, Lea and Flood). */
static inline uint64_t mixed(uint64_t x) {
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

#define GOLDEN 0x9E3779B97F4A7C15u
#define BUFFER ((size_t)1 << 20) /* bytes that are filled and written at a time */
#define LEVELS 4096              /* different numbers of a tensor */

typedef struct generator {
    uint64_t counter;
    float low, high; /* of the tables */
    uint32_t f32[LEVELS];
    uint16_t bf16[LEVELS];
} generator;

static void make_tables(generator *g, float low, float high) {
    if (g->low == low && g->high == high) return;
    g->low = low, g->high = high;
    for (size_t i = 0; i < LEVELS; i++) {
        /* The product is exact, so that fusing it with the sum changes nothing. */
        float x = (float)((double)low + (double)(high - low) * (((double)i + 0.5) / LEVELS));
        memcpy(&g->f32[i], &x, sizeof x);
        g->bf16[i] = (uint16_t)((g->f32[i] + 0x7fffu + (g->f32[i] >> 16 & 1u)) >> 16);
    }
}

/* The next n bytes of a tensor, n a multiple of 8 unless they are the last; `room` for 7 more. */
static void fill(generator *g, const tensor *t, size_t n, unsigned char *bytes) {
    if (t->kind == CODES || t->kind == EXPONENTS) {
        uint64_t most = t->kind == CODES ? UINT64_MAX : 0x0101010101010101u;
        uint64_t least = t->kind == CODES ? 0 : 0x0101010101010101u * (uint64_t)t->low;
        for (size_t i = 0; i < n; i += 8) {
            uint64_t x = (mixed(g->counter += GOLDEN) & most) + least;
            for (size_t b = 0; b < 8; b++) bytes[i + b] = (unsigned char)(x >> 8 * b);
        }
        return;
    }
    if (t->kind == BF16) {
        for (size_t i = 0; i < n; i += 8) {
            uint64_t x = mixed(g->counter += GOLDEN);
            for (size_t k = 0; k < 4; k++) {
                uint16_t value = g->bf16[x >> (16 + 12 * k) & (LEVELS - 1)];
                bytes[i + 2 * k] = (unsigned char)value;
                bytes[i + 2 * k + 1] = (unsigned char)(value >> 8);
            }
        }
        return;
    }
    for (size_t i = 0; i < n; i += 4) {
        uint32_t value = g->f32[mixed(g->counter += GOLDEN) >> 52];
        for (size_t b = 0; b < 4; b++) bytes[i + b] = (unsigned char)(value >> 8 * b);
    }
}

/* ---- Files ---- */

typedef struct writer {
    const options *o;
    const layout *l;
    generator numbers;
    unsigned char *buffer; /* [BUFFER + 8] */
    uint64_t total;
} writer;

static bool write_tensor(writer *w, st_writer *file, size_t index, error *e) {
    const tensor *t = &w->l->list[index];
    size_t left = bytes_of(t);
    w->numbers.counter = mixed(w->o->seed + mixed((uint64_t)index));
    make_tables(&w->numbers, t->low, t->high);
    while (left > 0) {
        size_t n = left < BUFFER ? left : BUFFER;
        fill(&w->numbers, t, n, w->buffer);
        if (t->n_random < SIZE_MAX) /* A_log: small enough for one buffer, and F32 */
            for (size_t i = 4 * t->n_random; i < n; i++) w->buffer[i] = 0;
        if (!st_writer_bytes(file, w->buffer, n, e)) return false;
        left -= n;
    }
    return true;
}

/* Tensors first .. end - 1. */
static bool write_shard(writer *w, const char *path, size_t first, size_t end, error *e) {
    static const st_dtype types[] = {ST_BF16, ST_F32, ST_U8, ST_U8};
    st_writer file;
    bool ok = st_writer_open(&file, path, e);
    for (size_t i = first; ok && i < end; i++) {
        const tensor *t = &w->l->list[i];
        ok = st_writer_add(&file, t->name, types[t->kind], t->dims, t->n_dims, e);
        w->total += bytes_of(t);
    }
    for (size_t i = first; ok && !w->o->sparse && i < end; i++) ok = write_tensor(w, &file, i, e);
    if (ok && w->o->sparse) ok = st_writer_zeros(&file, e);
    return st_writer_close(&file, ok, e);
}

/* The end of the shard that begins with tensor `first`. */
static size_t shard_end(const layout *l, size_t first, size_t most) {
    size_t end = first, bytes = 0;
    do bytes += bytes_of(&l->list[end++]);
    while (end < l->n && bytes_of(&l->list[end]) <= most - (bytes < most ? bytes : most));
    return end;
}

static void path_in(const options *o, char *path, size_t size, const char *name) {
    snprintf(path, size, "%s/%s", o->paths[1], name);
}

static bool write_whole(const char *path, const text *t, error *e) {
    output out = {path, "", NULL};
    bool ok = output_open(&out, path, e) && output_bytes(&out, t->bytes, t->n, e);
    return output_close(&out, ok, e);
}

/* All shards, and the index that says where a tensor is. */
static bool write_shards(writer *w, size_t n_shards, error *e) {
    char path[4096], name[64], line[300];
    text map = {NULL, 0, 0}, index = {NULL, 0, 0};
    bool ok = true;
    for (size_t i = 0, first = 0, end; ok && first < w->l->n; first = end, i++) {
        end = shard_end(w->l, first, w->o->shard_bytes);
        snprintf(name, sizeof name, "model-%05zu-of-%05zu.safetensors", i + 1, n_shards);
        path_in(w->o, path, sizeof path, name);
        ok = write_shard(w, path, first, end, e);
        for (size_t t = first; ok && t < end; t++) {
            snprintf(line, sizeof line, "%s\n    \"%s\": \"%s\"", t ? "," : "", w->l->list[t].name,
                     name);
            ok = append(&map, line, e);
        }
    }
    snprintf(line, sizeof line, "{\n  \"metadata\": {\"total_size\": %llu},\n  \"weight_map\": {",
             (unsigned long long)w->total);
    path_in(w->o, path, sizeof path, "model.safetensors.index.json");
    ok = ok && append(&index, line, e) && append_bytes(&index, map.bytes, map.n, e) &&
         append(&index, "\n  }\n}\n", e) && write_whole(path, &index, e);
    free(map.bytes), free(index.bytes);
    return ok;
}

static bool write_model(writer *w, size_t *n_shards, error *e) {
    char single[4096], index[4096];
    path_in(w->o, single, sizeof single, "model.safetensors");
    path_in(w->o, index, sizeof index, "model.safetensors.index.json");
    remove(single), remove(index); /* one of them would hide or mislead */
    *n_shards = 0;
    for (size_t first = 0; first < w->l->n; ++*n_shards)
        first = shard_end(w->l, first, w->o->shard_bytes);
    w->buffer = (unsigned char *)malloc(BUFFER + 8);
    if (!w->buffer) return error_set(e, "no memory for a buffer");
    bool ok =
        *n_shards == 1 ? write_shard(w, single, 0, w->l->n, e) : write_shards(w, *n_shards, e);
    free(w->buffer);
    return ok;
}

/* ---- The run ---- */

/* What hybrid_config does not keep: how the release packs its experts. */
static bool read_release(const options *o, layout *l, const text *t, error *e) {
    json document;
    if (!json_parse(&document, o->paths[0], t->bytes, t->n, e)) return false;
    l->is_inside = has_text_config(&document);
    const json_value *text_config = json_member(json_root(&document), "text_config");
    const json_value *root = json_root(&document);
    const char *key = "quantization_config";
    const json_value *inner = json_member(l->is_inside ? text_config : root, key);
    const json_value *quantization = inner ? inner : json_member(root, key);
    l->packed_experts = json_string_is(json_member(quantization, "format"), "mxfp4-pack-quantized");
    json_free(&document);
    return true;
}

/* --experts-type goes into the configuration: as K3's release says it, or nothing of it. */
static bool state_experts(const options *o, layout *l, text *config, error *e) {
    bool packed = l->packed_experts;
    if (o->experts != EXPERTS_BY_CONFIG) l->packed_experts = o->experts == EXPERTS_MXFP4;
    if (packed == l->packed_experts) return true;
    return apply_setting(
        config, o->paths[0],
        packed ? "quantization_config=null"
               : "quantization_config={\"quant_method\": \"compressed-tensors\", "
                 "\"format\": \"mxfp4-pack-quantized\", \"config_groups\": {\"group_0\": "
                 "{\"weights\": {\"num_bits\": 4, \"type\": \"float\", \"group_size\": 32, "
                 "\"symmetric\": true, \"strategy\": \"group\"}, \"targets\": [\"Linear\"]}}, "
                 "\"ignore\": [\"re:.*self_attn.*\", \"re:.*shared_experts.*\", "
                 "\"re:.*mlp\\\\.(gate|up|gate_up|down)_proj.*\", \"re:.*lm_head.*\"]}",
        e);
}

static bool run_all(const options *o, layout *l, text *config, error *e) {
    char path[4096];
    writer w;
    size_t n_shards;
    if (!json_read_file(o->paths[0], (size_t)1 << 24, &config->bytes, &config->n, e)) return false;
    for (size_t i = 0; i < o->set.n; i++)
        if (!apply_setting(config, o->paths[0], o->set.list[i], e)) return false;
    if (!hybrid_config_parse(&l->config, o->paths[0], config->bytes, config->n, e) ||
        !read_release(o, l, config, e) || !state_experts(o, l, config, e) || !add_model(l, e))
        return false;
    if (strlen(o->paths[1]) > sizeof path - 100)
        return error_set(e, "%.60s...: expected a shorter path", o->paths[1]);
    if (mkdir(o->paths[1], 0777) != 0 && errno != EEXIST)
        return error_set(e, "%s: cannot be made: %s", o->paths[1], strerror(errno));
    memset(&w, 0, sizeof w);
    w.o = o, w.l = l;
    path_in(o, path, sizeof path, "config.json");
    if (!write_model(&w, &n_shards, e) || !write_whole(path, config, e)) return false;
    printf("%s: %zu tensors, %llu bytes in %zu file%s\n", o->paths[1], l->n,
           (unsigned long long)w.total, n_shards, n_shards == 1 ? "" : "s");
    return true;
}

int main(int argc, char **argv) {
    static layout l;
    options o;
    error e;
    text config = {NULL, 0, 0};
    size_t n_paths = 0;
    memset(&o, 0, sizeof o);
    o.shard_bytes = 5000000000, o.seed = 1;
    bool usage = arguments_parse(&argument_table, &o, o.paths, &n_paths, &o.help, argc, argv, &e);
    if (usage && o.help) return arguments_help("make_checkpoint", help);
    if (usage && n_paths != 2) usage = error_set(&e, "expected %s", argument_table.positional);
    if (!usage) {
        fprintf(stderr, "make_checkpoint: %s (--help tells more)\n", e.text);
        return 2;
    }
    bool ok = run_all(&o, &l, &config, &e);
    if (!ok) fprintf(stderr, "make_checkpoint: %s\n", e.text);
    free(config.bytes);
    free(l.list);
    return ok ? 0 : 1;
}
