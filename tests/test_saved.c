/* Saved states: a round trip keeps every field, the bytes are those of the documented layout, and a
 * buffer that is anything but one whole, unaltered, fitting blob is refused, nothing written. */
#include "../kda.h"
#include "operator.h"

enum { HEADER = 80, MAX_BLOB = 1024 };

static const kda_type state_types[] = {KDA_F32, KDA_F16};

/* Every byte value, NaN and -0 among them: a blob keeps bits, not numbers. */
static void fill_bytes(void *memory, size_t bytes) {
    for (size_t i = 0; i < bytes; i++)
        ((unsigned char *)memory)[i] = (unsigned char)test_random_u64();
}

static kda_desc saved_desc(kda_type type) {
    kda_desc desc = problem_desc(3, 1, 5, 4);
    desc.gate = KDA_GATE_BOUNDED;
    desc.lower_bound = -5.0f;
    desc.state_type = type;
    return desc;
}

/* ---- Round trip ---- */

static void check_round_trip(const kda_desc *desc, size_t window_bytes, size_t offset) {
    size_t state_bytes = kda_state_bytes(desc), bytes = kda_save_bytes(desc, window_bytes);
    unsigned char memory[MAX_BLOB], *blob = memory + offset;
    void *state = test_alloc(state_bytes), *state_back = test_alloc(state_bytes);
    void *window = test_alloc(window_bytes), *window_back = test_alloc(window_bytes);
    kda_saved saved, back;
    memset(&saved, 0, sizeof saved), memset(&back, 0, sizeof back);
    memset(memory, 0xA5, sizeof memory);
    fill_bytes(state, state_bytes), fill_bytes(window, window_bytes);
    memset(state_back, 0xFF, state_bytes), memset(window_back, 0xFF, window_bytes);
    saved.state = state, saved.window_bytes = back.window_bytes = window_bytes;
    saved.window = window_bytes ? window : NULL;
    saved.n_tokens = ((uint64_t)1 << 63) + 5;
    back.state = state_back, back.window = window_bytes ? window_back : NULL;
    CHECK(bytes == HEADER + state_bytes + window_bytes && bytes + offset < sizeof memory);
    CHECK(kda_save(desc, &saved, blob, bytes) == KDA_OK);
    for (size_t i = 0; i < offset; i++) CHECK(memory[i] == 0xA5);
    for (size_t i = offset + bytes; i < sizeof memory; i++) CHECK(memory[i] == 0xA5);
    CHECK(kda_load(desc, &back, blob, bytes) == KDA_OK);
    CHECK(memcmp(state, state_back, state_bytes) == 0);
    CHECK(memcmp(window, window_back, window_bytes) == 0);
    CHECK(back.n_tokens == ((uint64_t)1 << 63) + 5);
    CHECK(back.state == state_back && back.window_bytes == window_bytes);
    free(state), free(state_back), free(window), free(window_back);
}

/* With a window and without, at any alignment of the blob. */
static void round_trip_of_every_field(void) {
    test_seed(1);
    for (size_t type = 0; type < 2; type++)
        for (size_t offset = 0; offset < 9; offset++) {
            kda_desc desc = saved_desc(state_types[type]);
            check_round_trip(&desc, 0, offset);
            check_round_trip(&desc, 4, offset);
            check_round_trip(&desc, 84, offset);
        }
}

static void round_trip_of_every_shape(void) {
    static const size_t shapes[][3] = {{1, 1, 1}, {1, 1, 3}, {1, 3, 1}, {5, 2, 3}, {2, 7, 9}};
    test_seed(2);
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (size_t type = 0; type < 2; type++) {
            kda_desc desc = problem_desc(shapes[i][0], 0, shapes[i][1], shapes[i][2]);
            desc.state_type = state_types[type];
            check_round_trip(&desc, 0, 0);
            check_round_trip(&desc, 12, 1);
        }
}

/* ---- Resuming ---- */

/* A small layer over dense float32 rows, for as many tokens as its problem holds. */
typedef struct decoder {
    kda_layer_desc layer;
    problem p;
    float *gate, *weights;
    size_t state_bytes, window_bytes;
} decoder;

static decoder decoder_new(kda_type type, size_t tokens) {
    decoder d;
    kda_desc desc = saved_desc(type);
    memset(&d, 0, sizeof d);
    d.p = problem_new(&desc, tokens);
    d.gate = problem_normal(d.p.output_count);
    d.weights = problem_normal(256);
    d.layer.op = desc;
    d.layer.conv_width = 4, d.layer.conv_activation = KDA_ACTIVATION_SILU;
    d.layer.q_conv = d.weights, d.layer.k_conv = d.weights + 20, d.layer.v_conv = d.weights + 40;
    d.layer.A_log = d.p.A_log, d.layer.dt_bias = d.p.dt_bias;
    d.layer.norm_weight = d.weights + 100, d.layer.norm_eps = 1e-5f;
    d.state_bytes = kda_state_bytes(&desc);
    d.window_bytes = kda_layer_window_bytes(&d.layer);
    return d;
}

static void decoder_free(decoder *d) {
    free(d->gate), free(d->weights);
    problem_free(&d->p);
}

/* Tokens first .. first + n - 1. */
static void decoder_run(const decoder *d, const kda_saved *at, size_t first, size_t n, float *o) {
    kda_args op = problem_args(&d->p, first, o);
    kda_layer_args args;
    kda_seq seq;
    kda_run run;
    memset(&args, 0, sizeof args), memset(&seq, 0, sizeof seq), memset(&run, 0, sizeof run);
    args.q = op.q, args.k = op.k, args.v = op.v, args.g = op.g, args.beta = op.beta, args.o = op.o;
    args.gate = kda_in_f32(d->gate + first * 3 * 4, 3 * 4, 4);
    seq.n_tokens = n, seq.state = at->state, seq.window = at->window;
    args.seqs = &seq, args.n_seqs = 1;
    run.algorithm = KDA_RECURRENT;
    run.scratch_bytes = kda_layer_scratch_bytes(&d->layer, 1, &run);
    run.scratch = test_scratch(run.scratch_bytes);
    CHECK(kda_layer(&d->layer, &args, &run) == KDA_OK);
    free(run.scratch);
}

static kda_saved decoder_start(const decoder *d, int byte) {
    kda_saved at;
    memset(&at, 0, sizeof at);
    at.state = test_alloc(d->state_bytes), at.window = test_alloc(d->window_bytes);
    at.window_bytes = d->window_bytes;
    memset(at.state, byte, d->state_bytes), memset(at.window, byte, d->window_bytes);
    return at;
}

/* 30 tokens, saved, 20 more; the same 20 from the blob, in memory that held NaN. */
static void resuming_gives_the_same_bits(void) {
    test_seed(3);
    for (size_t type = 0; type < 2; type++) {
        decoder d = decoder_new(state_types[type], 50);
        size_t bytes = kda_save_bytes(&d.layer.op, d.window_bytes), row = 3 * 4;
        unsigned char *blob = (unsigned char *)test_alloc(bytes);
        float *o = test_floats(d.p.output_count), *again = test_floats(d.p.output_count);
        kda_saved live = decoder_start(&d, 0), back = decoder_start(&d, 0xFF);
        decoder_run(&d, &live, 0, 30, o);
        live.n_tokens = 30;
        CHECK(kda_save(&d.layer.op, &live, blob, bytes) == KDA_OK);
        decoder_run(&d, &live, 30, 20, o);
        CHECK(kda_load(&d.layer.op, &back, blob, bytes) == KDA_OK);
        CHECK(back.n_tokens == 30);
        decoder_run(&d, &back, (size_t)back.n_tokens, 20, again);
        CHECK(memcmp(o + 30 * row, again + 30 * row, 20 * row * sizeof(float)) == 0);
        CHECK(memcmp(live.state, back.state, d.state_bytes) == 0);
        CHECK(memcmp(live.window, back.window, d.window_bytes) == 0);
        CHECK(kda_state_is_finite(&d.layer.op, back.state));
        free(blob), free(o), free(again);
        free(live.state), free(live.window), free(back.state), free(back.window);
        decoder_free(&d);
    }
}

/* A prefix cache keeps blobs under the number of tokens of their key. One filed under a number of
 * one less or more is found out by what comes back, and resuming there would give other bits. */
static void the_token_count_comes_back_for_the_caller_to_check(void) {
    enum { KEY = 30 };
    test_seed(4);
    decoder d = decoder_new(KDA_F32, KEY + 2);
    size_t bytes = kda_save_bytes(&d.layer.op, d.window_bytes), row = 3 * 4;
    unsigned char *blob = (unsigned char *)test_alloc(bytes);
    float *o = test_floats(d.p.output_count), *want = test_floats(d.p.output_count);
    kda_saved truth = decoder_start(&d, 0);
    decoder_run(&d, &truth, 0, KEY + 1, want);
    for (size_t seen = KEY - 1; seen <= KEY + 1; seen++) {
        kda_saved live = decoder_start(&d, 0), back = decoder_start(&d, 0xFF);
        decoder_run(&d, &live, 0, seen, o);
        live.n_tokens = seen;
        CHECK(kda_save(&d.layer.op, &live, blob, bytes) == KDA_OK);
        CHECK(kda_load(&d.layer.op, &back, blob, bytes) == KDA_OK);
        CHECK(back.n_tokens == seen);
        decoder_run(&d, &back, KEY, 1, o); /* as a cache would that does not check */
        int same = memcmp(o + KEY * row, want + KEY * row, row * sizeof(float)) == 0;
        CHECK_MSG(same == (back.n_tokens == KEY), "saved at %zu", seen);
        free(live.state), free(live.window), free(back.state), free(back.window);
    }
    free(blob), free(o), free(want), free(truth.state), free(truth.window);
    decoder_free(&d);
}

/* ---- The layout ---- */

static uint64_t get_number(const unsigned char *at, size_t bytes) {
    uint64_t value = 0;
    for (size_t i = bytes; i > 0; i--) value = value << 8 | at[i - 1];
    return value;
}

static void put_number(unsigned char *at, uint64_t value, size_t bytes) {
    for (size_t i = 0; i < bytes; i++, value >>= 8) at[i] = (unsigned char)(value & 0xFF);
}

/* From the size of the blob on, over all bytes but the checksum itself, in words of 8 little-endian
 * bytes (the last filled up with zeros): sum = (sum ^ word) * odd constant, sum ^= sum >> 32. */
static uint64_t checksum(const unsigned char *blob, size_t bytes) {
    uint64_t sum = bytes;
    for (size_t at = 0; at < bytes; at += 8) {
        if (at == 72) continue;
        sum = (sum ^ get_number(blob + at, bytes - at < 8 ? bytes - at : 8)) * 0x9e3779b97f4a7c15u;
        sum ^= sum >> 32;
    }
    return sum;
}

static void sign(unsigned char *blob, size_t bytes) {
    put_number(blob + 72, checksum(blob, bytes), 8);
}

static void check_layout(const kda_desc *desc, kda_saved *saved, const unsigned char *want,
                         size_t bytes) {
    unsigned char blob[HEADER + 32], expected[HEADER + 32];
    memcpy(expected, want, bytes);
    sign(expected, bytes);
    CHECK(kda_save_bytes(desc, saved->window_bytes) == bytes);
    CHECK(kda_save(desc, saved, blob, bytes) == KDA_OK);
    for (size_t i = 0; i < bytes; i++)
        CHECK_MSG(blob[i] == expected[i], "byte %zu: %02x, want %02x", i, blob[i], expected[i]);
    saved->n_tokens = 0;
    CHECK(kda_load(desc, saved, expected, bytes) == KDA_OK); /* written by hand: read as well */
    CHECK(saved->n_tokens == 0x0102030405060708u);
}

#define U32(low) (low), 0, 0, 0
#define U64(low) (low), 0, 0, 0, 0, 0, 0, 0

/* Two heads of [dim_v 1][dim_k 3] in float32, and a window of one. */
static void bytes_by_hand_f32(void) {
    static const unsigned char want[HEADER + 28] = {
        'K', 'D', 'A', 'S', 'T', 'A', 'T', 'E', U32(1), U32(80), U64(80 + 28), /* 0 */
        U64(2), U64(3), U64(1), U64(4),                                        /* 24 */
        U32(0), U32(1), 8, 7, 6, 5, 4, 3, 2, 1, U64(0),                        /* 56 */
        0x00, 0x00, 0x80, 0x3F, 0x00, 0x00, 0x00, 0xC0, 0x00, 0x00, 0x20, 0x41, /* 1 -2 10 */
        0x00, 0x00, 0x00, 0x80, 0x00, 0x00, 0x80, 0x7F, 0xDB, 0x0F, 0x49, 0x40, /* -0 inf pi */
        0x00, 0x00, 0x00, 0x3F};                                                /* 0.5 */
    float state[] = {1, -2, 10, -0.0f, INFINITY, 3.14159274f}, window[] = {0.5f};
    kda_desc desc = problem_desc(2, 0, 3, 1);
    kda_saved saved;
    memset(&saved, 0, sizeof saved);
    saved.state = state, saved.window = window, saved.window_bytes = sizeof window;
    saved.n_tokens = 0x0102030405060708u;
    check_layout(&desc, &saved, want, sizeof want);
}

/* One head of [dim_v 1][dim_k 3] in float16, no window: a last word of 6 bytes. */
static void bytes_by_hand_f16(void) {
    static const unsigned char want[HEADER + 6] = {
        'K', 'D', 'A', 'S', 'T', 'A', 'T', 'E', U32(1), U32(80), U64(80 + 6), /* 0 */
        U64(1), U64(3), U64(1), U64(0),                                       /* 24 */
        U32(1), U32(1), 8, 7, 6, 5, 4, 3, 2, 1, U64(0),                       /* 56 */
        0x00, 0x3C, 0x00, 0xC0, 0xFF, 0x7B};                                  /* 1 -2 65504 */
    uint16_t state[] = {0x3C00, 0xC000, 0x7BFF};
    kda_desc desc = problem_desc(1, 0, 3, 1);
    kda_saved saved;
    desc.state_type = KDA_F16;
    memset(&saved, 0, sizeof saved);
    saved.state = state;
    saved.n_tokens = 0x0102030405060708u;
    check_layout(&desc, &saved, want, sizeof want);
}

/* What is not of the state's shape is not in the blob: resuming may run a model another way. */
static void how_it_was_run_does_not_matter(void) {
    kda_desc desc = saved_desc(KDA_F32), other = problem_desc(3, 3, 5, 4);
    unsigned char blob[HEADER + 3 * 5 * 4 * 4];
    float state[60], back[60];
    kda_saved saved;
    test_seed(5);
    test_fill_normal(state, 60);
    memset(&saved, 0, sizeof saved);
    saved.state = state;
    CHECK(kda_save(&desc, &saved, blob, sizeof blob) == KDA_OK);
    saved.state = back;
    CHECK(kda_load(&other, &saved, blob, sizeof blob) == KDA_OK);
    CHECK(memcmp(state, back, sizeof state) == 0);
}

/* ---- Refusals ---- */

/* A good blob with a window, and memory to load into that must stay as it is. */
typedef struct parcel {
    kda_desc desc;
    unsigned char blob[MAX_BLOB];
    size_t bytes;
    float state[24], window[7]; /* what a load would write */
    kda_saved into;
} parcel;

static parcel *parcel_new(kda_type type) {
    parcel *p = (parcel *)test_alloc(sizeof *p);
    p->desc = problem_desc(1, 0, type == KDA_F16 ? 12 : 6, 4);
    p->desc.state_type = type;
    fill_bytes(p->state, sizeof p->state), fill_bytes(p->window, sizeof p->window);
    p->into.state = p->state, p->into.window = p->window, p->into.window_bytes = sizeof p->window;
    p->into.n_tokens = 1234;
    p->bytes = kda_save_bytes(&p->desc, sizeof p->window);
    CHECK(p->bytes <= sizeof p->blob - 16);
    CHECK(kda_save(&p->desc, &p->into, p->blob, p->bytes) == KDA_OK);
    fill_bytes(p->state, sizeof p->state), fill_bytes(p->window, sizeof p->window);
    p->into.n_tokens = 77;
    return p;
}

/* Loads `bytes` bytes, in memory of just that size, and expects a refusal that writes nothing. */
static kda_result load_refused(parcel *p, size_t bytes) {
    parcel *before = (parcel *)test_alloc(sizeof *before);
    unsigned char *exact = (unsigned char *)test_alloc(bytes);
    memcpy(exact, p->blob, bytes);
    memcpy(before, p, sizeof *p);
    kda_result result = kda_load(&p->desc, &p->into, exact, bytes);
    CHECK(result != KDA_OK);
    CHECK(memcmp(before->state, p->state, sizeof p->state) == 0);
    CHECK(memcmp(before->window, p->window, sizeof p->window) == 0);
    CHECK(p->into.n_tokens == 77 && p->into.window_bytes == before->into.window_bytes);
    CHECK(p->into.state == before->into.state && p->into.window == before->into.window);
    free(exact), free(before);
    return result;
}

static void check_refused(parcel *p, kda_result want, const char *what) {
    kda_result got = load_refused(p, p->bytes);
    CHECK_MSG(got == want, "%s: %s, want %s", what, kda_result_name(got), kda_result_name(want));
}

static void cut_or_continued_at_every_byte(void) {
    test_seed(10);
    for (size_t type = 0; type < 2; type++) {
        parcel *p = parcel_new(state_types[type]);
        for (size_t bytes = 0; bytes < p->bytes; bytes++)
            CHECK_MSG(load_refused(p, bytes) == KDA_ERR_BLOB_SHORT, "%zu bytes", bytes);
        for (size_t more = 1; more <= 16; more++)
            CHECK_MSG(load_refused(p, p->bytes + more) == KDA_ERR_BLOB_LONG, "%zu more", more);
        CHECK(kda_load(&p->desc, &p->into, p->blob, p->bytes) == KDA_OK);
        free(p);
    }
}

/* Whatever is in them: fewer bytes than a header are too few. */
static void buffers_smaller_than_a_header(void) {
    test_seed(11);
    parcel *p = parcel_new(KDA_F32);
    for (size_t bytes = 0; bytes < HEADER; bytes++) {
        memset(p->blob, 0, bytes);
        CHECK(load_refused(p, bytes) == KDA_ERR_BLOB_SHORT);
    }
    memset(p->blob, 0, HEADER);
    CHECK(load_refused(p, HEADER) == KDA_ERR_BLOB);
    free(p);
}

/* The result says what a flipped bit looks like: a magic, version or size, or an alteration. */
static void every_bit_flipped(void) {
    test_seed(12);
    for (size_t type = 0; type < 2; type++) {
        parcel *p = parcel_new(state_types[type]);
        for (size_t bit = 0; bit < p->bytes * 8; bit++) {
            size_t byte = bit / 8;
            p->blob[byte] ^= (unsigned char)(1u << bit % 8);
            kda_result got = load_refused(p, p->bytes);
            int fits = byte < 8    ? got == KDA_ERR_BLOB
                       : byte < 12 ? got == KDA_ERR_BLOB_VERSION
                       : byte >= 16 && byte < 24
                           ? got == KDA_ERR_BLOB_SHORT || got == KDA_ERR_BLOB_LONG
                           : got == KDA_ERR_BLOB_ALTERED;
            CHECK_MSG(fits, "bit %zu: %s", bit, kda_result_name(got));
            p->blob[byte] ^= (unsigned char)(1u << bit % 8);
        }
        free(p);
    }
}

/* Damage of other kinds: bytes and words exchanged, stretches zeroed. */
static void other_damage(void) {
    test_seed(13);
    parcel *p = parcel_new(KDA_F32);
    unsigned char good[MAX_BLOB];
    memcpy(good, p->blob, sizeof good);
    for (size_t at = 24; at + 16 <= p->bytes; at++) {
        memcpy(p->blob, good, sizeof good);
        memcpy(p->blob + at, good + at + 8, 8), memcpy(p->blob + at + 8, good + at, 8);
        if (memcmp(p->blob, good, sizeof good) != 0)
            CHECK_MSG(load_refused(p, p->bytes) == KDA_ERR_BLOB_ALTERED, "words at %zu", at);
        memcpy(p->blob, good, sizeof good);
        memset(p->blob + at, 0, 16);
        if (memcmp(p->blob, good, sizeof good) != 0)
            CHECK_MSG(load_refused(p, p->bytes) == KDA_ERR_BLOB_ALTERED, "zeros at %zu", at);
    }
    free(p);
}

/* Changes a field of a good blob, signs it anew, and expects the result. */
#define FORGED(at, value, size, want)                                                              \
    do {                                                                                           \
        parcel *p = parcel_new(KDA_F32);                                                           \
        put_number(p->blob + (at), (value), (size));                                               \
        sign(p->blob, p->bytes);                                                                   \
        check_refused(p, want, #at " = " #value);                                                  \
        free(p);                                                                                   \
    } while (0)

static void forged_headers(void) {
    const uint64_t huge = (uint64_t)1 << 63;
    FORGED(0, 'k', 1, KDA_ERR_BLOB);
    FORGED(7, 0, 1, KDA_ERR_BLOB);
    FORGED(8, 0, 4, KDA_ERR_BLOB_VERSION);
    FORGED(8, 2, 4, KDA_ERR_BLOB_VERSION);
    FORGED(12, 81, 4, KDA_ERR_BLOB_MISMATCH);
    FORGED(16, huge, 8, KDA_ERR_BLOB_SHORT);
    FORGED(16, UINT64_MAX, 8, KDA_ERR_BLOB_SHORT);
    FORGED(16, 0, 8, KDA_ERR_BLOB_LONG);
    FORGED(16, 79, 8, KDA_ERR_BLOB_LONG);
    FORGED(24, huge, 8, KDA_ERR_BLOB_MISMATCH);
    FORGED(32, huge, 8, KDA_ERR_BLOB_MISMATCH);
    FORGED(40, huge, 8, KDA_ERR_BLOB_MISMATCH);
    FORGED(48, huge, 8, KDA_ERR_BLOB_MISMATCH);
    FORGED(28, 1, 4, KDA_ERR_BLOB_MISMATCH); /* 2^32 more than is right: not for 32 bits to cut */
    FORGED(36, 1, 4, KDA_ERR_BLOB_MISMATCH);
    FORGED(44, 1, 4, KDA_ERR_BLOB_MISMATCH);
    FORGED(52, 1, 4, KDA_ERR_BLOB_MISMATCH);
    FORGED(20, 1, 4, KDA_ERR_BLOB_SHORT);
    FORGED(24, 0, 8, KDA_ERR_BLOB_MISMATCH);
    FORGED(32, 5, 8, KDA_ERR_BLOB_MISMATCH);
    FORGED(56, 1, 4, KDA_ERR_BLOB_MISMATCH);
    FORGED(56, 77, 4, KDA_ERR_BLOB_MISMATCH);
    FORGED(60, 2, 4, KDA_ERR_BLOB_MISMATCH);
}

/* Sound blobs of a neighbour that take as many bytes. */
static void sound_blobs_of_another_shape(void) {
    test_seed(14);
    parcel *p = parcel_new(KDA_F32);
    p->desc.dim_k = 4, p->desc.dim_v = 6; /* K and V exchanged */
    check_refused(p, KDA_ERR_BLOB_MISMATCH, "swapped");
    p->desc.n_heads = 2, p->desc.dim_v = 3;
    check_refused(p, KDA_ERR_BLOB_MISMATCH, "heads");
    p->desc = problem_desc(1, 0, 12, 4);
    p->desc.state_type = KDA_F16; /* as many bytes of state */
    CHECK(kda_save_bytes(&p->desc, sizeof p->window) == p->bytes);
    check_refused(p, KDA_ERR_BLOB_MISMATCH, "type and width");
    p->desc = problem_desc(1, 0, 6, 4);
    p->into.window_bytes -= 4;
    check_refused(p, KDA_ERR_BLOB_MISMATCH, "shorter window");
    p->into.window_bytes = 0, p->into.window = NULL;
    check_refused(p, KDA_ERR_BLOB_MISMATCH, "no window");
    free(p);
    p = parcel_new(KDA_F16);
    p->desc.state_type = KDA_F32, p->desc.dim_k = 6;
    check_refused(p, KDA_ERR_BLOB_MISMATCH, "float16 for float32");
    p->desc.state_type = KDA_F16, p->desc.dim_k = 14, p->into.window_bytes -= 16;
    CHECK(kda_save_bytes(&p->desc, p->into.window_bytes) == p->bytes);
    check_refused(p, KDA_ERR_BLOB_MISMATCH, "state for window");
    free(p);
}

/* ---- Misuse ---- */

static void arguments_of_load(void) {
    test_seed(15);
    parcel *p = parcel_new(KDA_F32);
    unsigned char *base = p->blob;
    CHECK(kda_load(NULL, &p->into, base, p->bytes) == KDA_ERR_NULL);
    CHECK(kda_load(&p->desc, NULL, base, p->bytes) == KDA_ERR_NULL);
    CHECK(kda_load(&p->desc, &p->into, NULL, p->bytes) == KDA_ERR_NULL);
    p->into.state = NULL;
    check_refused(p, KDA_ERR_NULL, "no state");
    p->into.state = p->state, p->into.window = NULL;
    check_refused(p, KDA_ERR_NULL, "no window");
    p->into.window = (unsigned char *)p->window + 1;
    check_refused(p, KDA_ERR_ALIGN, "window");
    p->into.window = p->window, p->into.state = (unsigned char *)p->state + 2;
    check_refused(p, KDA_ERR_ALIGN, "state");
    p->into.state = p->state, p->desc.dim_k = 0;
    check_refused(p, KDA_ERR_DIMS, "description");
    p->desc.dim_k = 6, p->desc.gate = (kda_gate)0;
    check_refused(p, KDA_ERR_GATE, "gate");
    free(p);
}

static void arguments_of_save(void) {
    kda_desc desc = problem_desc(1, 0, 2, 1), zero;
    float state[2] = {1, 2}, window[2] = {3, 4};
    unsigned char blob[HEADER + 16], before[HEADER + 16];
    kda_saved saved;
    memset(&saved, 0, sizeof saved), memset(&zero, 0, sizeof zero);
    memset(blob, 0xA5, sizeof blob), memset(before, 0xA5, sizeof before);
    saved.state = state, saved.window = window, saved.window_bytes = sizeof window;
    for (size_t bytes = 0; bytes < sizeof blob; bytes++)
        CHECK(kda_save(&desc, &saved, blob, bytes) == KDA_ERR_BLOB_SHORT);
    CHECK(kda_save(&desc, &saved, blob, sizeof blob + 1) == KDA_ERR_BLOB_LONG);
    CHECK(kda_save(&desc, &saved, blob, SIZE_MAX) == KDA_ERR_BLOB_LONG);
    CHECK(kda_save(&desc, &saved, NULL, sizeof blob) == KDA_ERR_NULL);
    CHECK(kda_save(NULL, &saved, blob, sizeof blob) == KDA_ERR_NULL);
    CHECK(kda_save(&desc, NULL, blob, sizeof blob) == KDA_ERR_NULL);
    CHECK(kda_save(&zero, &saved, blob, sizeof blob) == KDA_ERR_DIMS);
    saved.window = NULL;
    CHECK(kda_save(&desc, &saved, blob, sizeof blob) == KDA_ERR_NULL);
    saved.window = (unsigned char *)window + 2;
    CHECK(kda_save(&desc, &saved, blob, sizeof blob) == KDA_ERR_ALIGN);
    saved.window = window, saved.state = (unsigned char *)state + 1;
    CHECK(kda_save(&desc, &saved, blob, sizeof blob) == KDA_ERR_ALIGN);
    saved.state = NULL;
    CHECK(kda_save(&desc, &saved, blob, sizeof blob) == KDA_ERR_NULL);
    saved.state = state, saved.window_bytes = SIZE_MAX / 8 * 4;
    CHECK(kda_save(&desc, &saved, blob, sizeof blob) == KDA_ERR_SIZE);
    CHECK(memcmp(blob, before, sizeof blob) == 0);
}

static void sizes(void) {
    kda_desc desc = problem_desc(3, 0, 5, 7), zero;
    memset(&zero, 0, sizeof zero);
    CHECK(kda_save_bytes(&desc, 0) == HEADER + 3 * 5 * 7 * 4);
    CHECK(kda_save_bytes(&desc, 8) == HEADER + 3 * 5 * 7 * 4 + 8);
    for (size_t odd = 1; odd < 4; odd++) CHECK(kda_save_bytes(&desc, 8 + odd) == 0);
    CHECK(kda_save_bytes(&desc, SIZE_MAX - 3) == 0); /* wraps to a small number */
    CHECK(kda_save_bytes(&desc, SIZE_MAX / 2 + 1) == 0);
    CHECK(kda_save_bytes(&desc, (size_t)PTRDIFF_MAX / 4 * 4) == 0);
    CHECK(kda_save_bytes(&zero, 0) == 0 && kda_save_bytes(NULL, 0) == 0);
    desc.state_type = KDA_F16;
    CHECK(kda_save_bytes(&desc, 4) == HEADER + 3 * 5 * 7 * 2 + 4);
}

int main(void) {
    TEST(round_trip_of_every_field);
    TEST(round_trip_of_every_shape);
    TEST(resuming_gives_the_same_bits);
    TEST(the_token_count_comes_back_for_the_caller_to_check);
    TEST(bytes_by_hand_f32);
    TEST(bytes_by_hand_f16);
    TEST(how_it_was_run_does_not_matter);
    TEST(cut_or_continued_at_every_byte);
    TEST(buffers_smaller_than_a_header);
    TEST(every_bit_flipped);
    TEST(other_damage);
    TEST(forged_headers);
    TEST(sound_blobs_of_another_shape);
    TEST(arguments_of_load);
    TEST(arguments_of_save);
    TEST(sizes);
    return test_summary();
}
