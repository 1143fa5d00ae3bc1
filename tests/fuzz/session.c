/* session.c - any bytes as a saved session of one small model: what is taken is what the file says
 * and is saved as the same bytes; what is refused leaves the session as it was. An odd first byte
 * asks for checksums that fit, so that what is behind them is reached. */
#define HYBRID_SAVED_IMPLEMENTATION
#include "../../examples/saved.h"

#include "fuzz.h"

#include <sys/stat.h>

enum { CAPACITY = 3 };

static const char configuration[] =
    "{\"vocab_size\":4,\"hidden_size\":4,\"intermediate_size\":4,\"num_hidden_layers\":2,"
    "\"num_attention_heads\":1,\"tie_word_embeddings\":true,\"hidden_act\":\"silu\","
    "\"q_lora_rank\":null,\"kv_lora_rank\":3,\"qk_nope_head_dim\":2,\"qk_rope_head_dim\":1,"
    "\"v_head_dim\":2,\"mla_use_nope\":true,\"num_experts\":null,\"linear_attn_config\":{"
    "\"kda_layers\":[1],\"full_attn_layers\":[2],\"num_heads\":2,\"head_dim\":3,"
    "\"short_conv_kernel_size\":2}}";

/* A model without matrices is all that a session's memory depends on. */
static const hybrid_model *model(void) {
    static hybrid_model m;
    error e;
    if (m.layers) return &m;
    FUZZ_CHECK(
        hybrid_config_parse(&m.config, "config", configuration, sizeof configuration - 1, &e));
    static hybrid_layer layers[2];
    m.layers = layers;
    return &m;
}

static const char *saved_path(void) {
    static char path[200];
    const char *build = getenv("BUILD");
    if (*path) return path;
    snprintf(path, sizeof path, "%.100s", build ? build : "build");
    mkdir(path, 0777);
    snprintf(path + strlen(path), 64, "/fuzz-session-%ld", (long)getpid());
    return path;
}

static hybrid_session new_session(linear_type cache) {
    hybrid_session session;
    hybrid_session_options options = {CAPACITY, cache, 0};
    error e;
    FUZZ_CHECK(hybrid_session_open(&session, model(), &options, &e));
    FUZZ_CHECK(hybrid_session_fill(&session, 1, 5, &e));
    return session;
}

/* The checksum of the header and that of the contents. */
static void mend(uint8_t *bytes, size_t size) {
    const hybrid_config *c = &model()->config;
    kda_layer_desc kda = hybridi_kda_desc(c, NULL);
    size_t at = HYBRIDI_HEADER_BYTES, end = size - 8;
    if (size < HYBRIDI_HEADER_BYTES + 8) return;
    uint64_t sum = hybridi_checksum(0, bytes, at - 8);
    hybridi_put_u64(bytes + at - 8, sum);
    size_t parts[3] = {kda_state_bytes(&kda.op), kda_layer_window_bytes(&kda), 0};
    if (at + parts[0] + parts[1] > end) return;
    parts[2] = end - at - parts[0] - parts[1];
    for (size_t i = 0; i < 3; at += parts[i++]) sum = hybridi_checksum(sum, bytes + at, parts[i]);
    hybridi_put_u64(bytes + end, sum);
}

static void check_saved(const hybrid_session *session, const uint8_t *bytes, size_t size) {
    error e;
    char *again;
    size_t length;
    FUZZ_CHECK(hybrid_session_save(session, saved_path(), &e));
    FUZZ_CHECK(json_read_file(saved_path(), 1 << 20, &again, &length, &e));
    FUZZ_CHECK(length == size && memcmp(again, bytes, size) == 0);
    remove(saved_path());
    free(again);
}

static void fuzz_one(const uint8_t *bytes, size_t size) {
    static const linear_type caches[] = {LINEAR_F32, LINEAR_F16, LINEAR_BF16};
    fuzz_input in = fuzz_from(bytes, size);
    unsigned kind = take_u8(&in);
    hybrid_session session = new_session(caches[(kind >> 1) % 3]);
    hybrid_session before = session;
    size_t length = fuzz_left(&in), all = hybrid_session_bytes(model(), &session.options);
    uint8_t *file_bytes = (uint8_t *)fuzz_copy(in.at, length);
    error e;
    if (kind & 1) mend(file_bytes, length);
    void *memory = fuzz_copy(session.layers, all);
    FILE *file = length ? fmemopen(file_bytes, length, "rb") : NULL;
    if (file && hybridi_load(&session, file, "s", &e)) {
        FUZZ_CHECK(session.n_tokens <= CAPACITY);
        check_saved(&session, file_bytes, length);
    } else if (file) {
        FUZZ_CHECK(session.n_tokens == before.n_tokens);
        FUZZ_CHECK(memcmp(memory, session.layers, all) == 0);
        FUZZ_CHECK(!strchr(e.text, '\n'));
    }
    if (file) fclose(file);
    free(memory), free(file_bytes);
    hybrid_session_close(&session);
}
