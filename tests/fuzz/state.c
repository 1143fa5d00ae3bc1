/* state.c - a description and a blob: kda_load takes the whole of a sound blob that fits and gives
 * it back byte by byte, or nothing of any other. */
#define KDA_IMPLEMENTATION
#include "../../kda.h"

#include "fuzz.h"

/* Memory of `bytes` bytes of 0xA5 each; is it so still? */
static unsigned char *untouched(size_t bytes) {
    unsigned char *memory = (unsigned char *)fuzz_alloc(bytes);
    memset(memory, 0xA5, bytes);
    return memory;
}

static bool is_untouched(const void *memory, size_t bytes) {
    for (size_t i = 0; i < bytes; i++)
        if (((const unsigned char *)memory)[i] != 0xA5) return false;
    return true;
}

static kda_desc take_desc(fuzz_input *in) {
    kda_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.n_heads = take_below(in, 4);
    desc.dim_k = take_below(in, 10), desc.dim_v = take_below(in, 10);
    desc.gate = KDA_GATE_LOG_DECAY, desc.beta = KDA_BETA_VALUE;
    desc.state_type = (kda_type)take_below(in, 3);
    return desc;
}

static void fuzz_one(const uint8_t *bytes, size_t size) {
    fuzz_input in = fuzz_from(bytes, size);
    kda_desc desc = take_desc(&in);
    size_t window_bytes = take_below(&in, 100), state_bytes = kda_state_bytes(&desc);
    unsigned sound = take_u8(&in);
    size_t blob_bytes = fuzz_left(&in);
    unsigned char *blob = (unsigned char *)fuzz_copy(in.at, blob_bytes);
    /* A checksum that fits, so that what is behind it is reached. */
    if (sound & 1 && blob_bytes >= KDAI_BLOB_HEADER)
        kdai_put(blob + 72, kdai_blob_checksum(blob, blob_bytes), 8);
    kda_saved saved;
    saved.state = untouched(state_bytes);
    saved.window = untouched(window_bytes);
    saved.window_bytes = window_bytes;
    saved.n_tokens = 7;
    kda_result result = kda_load(&desc, &saved, blob, blob_bytes);
    FUZZ_CHECK(strcmp(kda_result_name(result), "KDA_ERR_UNKNOWN") != 0);
    if (result == KDA_OK) {
        unsigned char *again = (unsigned char *)fuzz_alloc(blob_bytes);
        FUZZ_CHECK(kda_save_bytes(&desc, window_bytes) == blob_bytes);
        FUZZ_CHECK(kda_save(&desc, &saved, again, blob_bytes) == KDA_OK);
        FUZZ_CHECK(memcmp(again, blob, blob_bytes) == 0);
        free(again);
    } else {
        FUZZ_CHECK(is_untouched(saved.state, state_bytes));
        FUZZ_CHECK(is_untouched(saved.window, window_bytes) && saved.n_tokens == 7);
    }
    free(saved.state), free(saved.window), free(blob);
}
