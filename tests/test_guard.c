/* Memory and stack: no byte is touched outside the buffers, any allowed alignment gives the same
 * bits, inputs are only read, and the stack stays small.
 *
 * Each scenario below runs four times on equal values: with ordinary buffers; with every buffer
 * ending at a page that faults; with every buffer beginning behind one; and at addresses that are
 * aligned to the element size and to nothing more (scratch: to nothing at all). Guarded inputs are
 * read-only while the call runs. What the call writes must be the same bytes each time.
 */
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS */
#endif
#include "../kda.h"
#include "operator.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

/* ---- Buffers in unusual places ---- */

typedef enum placement { ORDINARY, FLUSH_END, FLUSH_START, MISALIGNED, PLACEMENTS } placement;
static const char *const placement_names[] = {"ordinary", "end at a guard page",
                                              "start at a guard page", "misaligned"};

typedef struct mapping {
    unsigned char *base; /* a guard page, the writable pages, a guard page; or malloc's */
    size_t inner;        /* bytes between the guard pages; 0: malloc's */
} mapping;

enum { MAX_BUFFERS = 64 };
static placement place;
static mapping mappings[MAX_BUFFERS];
static size_t n_mappings;

static size_t page_bytes(void) {
    return (size_t)sysconf(_SC_PAGESIZE);
}

static unsigned char *map_guarded(size_t inner) {
    size_t page = page_bytes(), whole = inner + 2 * page;
    void *p = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    unsigned char *base = (unsigned char *)p;
    if (p == MAP_FAILED || mprotect(base, page, PROT_NONE) != 0 ||
        mprotect(base + page + inner, page, PROT_NONE) != 0) {
        fprintf(stderr, "no guard pages\n");
        exit(2);
    }
    return base;
}

/* A zeroed buffer of elements of a size, where `place` says. */
static void *buffer(size_t bytes, size_t element) {
    size_t page = page_bytes(), inner = (bytes + page) / page * page;
    mapping *m = &mappings[n_mappings++];
    if (n_mappings > MAX_BUFFERS) exit(2);
    if (place == FLUSH_END || place == FLUSH_START) {
        m->base = map_guarded(inner), m->inner = inner;
        return m->base + page + (place == FLUSH_END ? inner - bytes : 0);
    }
    m->base = (unsigned char *)test_alloc(bytes + 128), m->inner = 0;
    size_t past = (uintptr_t)m->base % 64;
    return m->base + (place == MISALIGNED ? 64 - past + element : past ? 64 - past : 0);
}

static float *floats(size_t n) {
    return (float *)buffer(n * sizeof(float), sizeof(float));
}

static float *normal(size_t n) {
    float *x = floats(n);
    test_fill_normal(x, n);
    return x;
}

/* Normal numbers in a type. */
static void *tensor(size_t n, kda_type type) {
    if (type == KDA_F32) return normal(n);
    uint16_t *x = (uint16_t *)buffer(n * sizeof *x, sizeof *x);
    for (size_t i = 0; i < n; i++)
        x[i] = type == KDA_F16 ? kda_to_f16(test_normal()) : kda_to_bf16(test_normal());
    return x;
}

/* Room for a tensor of a type to be written. */
static void *room(size_t n, kda_type type) {
    size_t size = type == KDA_F32 ? 4 : 2;
    return buffer(n * size, size);
}

/* Makes all guarded buffers so far read-only: the inputs. */
static void seal(void) {
    for (size_t i = 0; i < n_mappings; i++)
        if (mappings[i].inner &&
            mprotect(mappings[i].base + page_bytes(), mappings[i].inner, PROT_READ) != 0)
            exit(2);
}

static void release(void) {
    for (size_t i = 0; i < n_mappings; i++)
        if (mappings[i].inner)
            munmap(mappings[i].base, mappings[i].inner + 2 * page_bytes());
        else
            free(mappings[i].base);
    n_mappings = 0;
}

/* ---- What scenarios wrote ---- */

static unsigned char record[PLACEMENTS][1 << 20];
static size_t recorded;

static void keep(const void *bytes, size_t n) {
    if (recorded + n > sizeof record[0]) exit(2);
    memcpy(record[place] + recorded, bytes, n);
    recorded += n;
}

static kda_isa isa; /* that calls run with */

/* Runs a scenario in every place, from the same seed, and compares what it kept. */
static void in_every_place(void (*scenario)(void)) {
    size_t n = 0;
    for (int where = ORDINARY; where < PLACEMENTS; where++) {
        place = (placement)where;
        recorded = 0;
        test_seed(1);
        scenario();
        if (where == ORDINARY) n = recorded;
        CHECK(n > 0 && recorded == n);
        CHECK_MSG(memcmp(record[where], record[ORDINARY], n) == 0, "%s: other bytes",
                  placement_names[where]);
    }
}

/* The same with every instruction set. */
static void everywhere(void (*scenario)(void)) {
    for (int i = KDA_ISA_AUTO; i <= KDA_ISA_NEON; i++) {
        isa = (kda_isa)i;
        if (isa == KDA_ISA_AUTO || kda_isa_is_available(isa)) in_every_place(scenario);
    }
    isa = KDA_ISA_AUTO;
}

/* A run with exactly as much scratch as asked for, full of garbage. */
static kda_run run_with(size_t bytes, kda_algorithm algorithm) {
    kda_run run;
    memset(&run, 0, sizeof run);
    run.algorithm = algorithm;
    run.isa = isa;
    run.scratch_bytes = bytes;
    run.scratch = buffer(bytes, 1);
    memset(run.scratch, 0xA5, bytes);
    return run;
}

/* ---- The operator ---- */

enum { HEADS = 4, QK_HEADS = 2, K = 37, V = 35, TOKENS = 37 };

static kda_desc operator_desc(kda_type state_type) {
    kda_desc desc = problem_desc(HEADS, QK_HEADS, K, V);
    desc.gate = KDA_GATE_SOFTPLUS;
    desc.state_type = state_type;
    return desc;
}

/* Inputs of `tokens` rows in a type, dense; the output is room for them. */
static kda_args operator_args(size_t tokens, kda_type type) {
    kda_args args;
    memset(&args, 0, sizeof args);
    args.q = kda_in(tensor(tokens * QK_HEADS * K, type), type, QK_HEADS * K, K);
    args.k = kda_in(tensor(tokens * QK_HEADS * K, type), type, QK_HEADS * K, K);
    args.v = kda_in(tensor(tokens * HEADS * V, type), type, HEADS * V, V);
    args.g = kda_in(tensor(tokens * HEADS * K, type), type, HEADS * K, K);
    args.beta = kda_in(tensor(tokens * HEADS, type), type, HEADS, 1);
    args.A_log = normal(HEADS), args.dt_bias = normal(HEADS * K);
    seal();
    args.o = kda_out(room(tokens * HEADS * V, type), type, HEADS * V, V);
    return args;
}

static size_t bytes_of(size_t n, kda_type type) {
    return n * (type == KDA_F32 ? 4 : 2);
}

/* Two sequences, of 20 and 17 tokens. */
static void forward_once(kda_algorithm algorithm, kda_type type, kda_type state_type) {
    kda_desc desc = operator_desc(state_type);
    kda_args args = operator_args(TOKENS, type);
    kda_seq seqs[2];
    memset(seqs, 0, sizeof seqs);
    seqs[0].n_tokens = 20, seqs[1].n_tokens = 17;
    for (size_t i = 0; i < 2; i++) seqs[i].state = tensor(HEADS * K * V, state_type);
    args.seqs = seqs, args.n_seqs = 2;
    kda_run run = run_with(0, algorithm);
    run = run_with(kda_scratch_bytes(&desc, 2, &run), algorithm);
    CHECK(kda_forward(&desc, &args, &run) == KDA_OK);
    keep(args.o.data, bytes_of(TOKENS * HEADS * V, type));
    for (size_t i = 0; i < 2; i++) keep(seqs[i].state, kda_state_bytes(&desc));
    release();
}

static void forward_scenario(void) {
    for (int algorithm = KDA_AUTO; algorithm <= KDA_CHUNKED; algorithm++)
        for (int type = KDA_F32; type <= KDA_BF16; type++) /* the state's is never the tensors' */
            forward_once((kda_algorithm)algorithm, (kda_type)type,
                         type == KDA_F32 ? KDA_F16 : KDA_F32);
    forward_once(KDA_AUTO, KDA_F32, KDA_F32);
    forward_once(KDA_CHUNKED, KDA_F16, KDA_F16);
}

static void verify_and_commit_once(kda_type state_type) {
    enum { DRAFT = 20 }; /* more than a block */
    kda_desc desc = operator_desc(state_type);
    kda_args args = operator_args(DRAFT, KDA_F32);
    void *state = tensor(HEADS * K * V, state_type);
    kda_seq seq;
    memset(&seq, 0, sizeof seq);
    seq.n_tokens = DRAFT, seq.state = state;
    seq.journal = buffer(kda_journal_bytes(&desc, DRAFT), sizeof(float));
    args.seqs = &seq, args.n_seqs = 1;
    kda_run run = run_with(0, KDA_RECURRENT);
    run = run_with(kda_verify_scratch_bytes(&desc, 1, &run), KDA_RECURRENT);
    CHECK(kda_verify(&desc, &args, &run) == KDA_OK);
    keep(args.o.data, bytes_of(DRAFT * HEADS * V, KDA_F32));
    keep(state, kda_state_bytes(&desc));
    seq.n_tokens = 18;
    run = run_with(kda_scratch_bytes(&desc, 1, &run), KDA_RECURRENT);
    CHECK(kda_commit(&desc, &seq, 1, &run) == KDA_OK);
    keep(state, kda_state_bytes(&desc));
    release();
}

static void verify_scenario(void) {
    verify_and_commit_once(KDA_F32);
    verify_and_commit_once(KDA_F16);
}

/* ---- The convolution ---- */

enum { CHANNELS = 133 }; /* one block of 128 and a rest */

static void conv_once(size_t width, kda_type type) {
    enum { ROWS = 9 };
    kda_conv_desc desc;
    kda_conv_args args;
    kda_seq seqs[2];
    memset(&desc, 0, sizeof desc), memset(&args, 0, sizeof args), memset(seqs, 0, sizeof seqs);
    desc.channels = CHANNELS, desc.width = width, desc.activation = KDA_ACTIVATION_SILU;
    args.x = kda_in(tensor(ROWS * CHANNELS, type), type, CHANNELS, 0);
    args.weight = normal(CHANNELS * width);
    seal();
    args.y = kda_out(room(ROWS * CHANNELS, type), type, CHANNELS, 0);
    size_t window_bytes = kda_conv_window_bytes(&desc);
    for (size_t i = 0; i < 2; i++) {
        seqs[i].n_tokens = i == 0 ? 2 : 7;
        seqs[i].window = normal(window_bytes / sizeof(float));
        seqs[i].journal = buffer(kda_conv_journal_bytes(&desc, seqs[i].n_tokens), sizeof(float));
    }
    args.seqs = seqs, args.n_seqs = 2;
    kda_run run = run_with(0, KDA_AUTO);
    run = run_with(kda_conv_scratch_bytes(&desc, 2, &run), KDA_AUTO);
    CHECK(kda_conv_verify(&desc, &args, &run) == KDA_OK);
    keep(args.y.data, bytes_of(ROWS * CHANNELS, type));
    for (size_t i = 0; i < 2; i++) keep(seqs[i].window, window_bytes);
    seqs[1].n_tokens = 3;
    CHECK(kda_conv_commit(&desc, seqs, 2, &run) == KDA_OK);
    for (size_t i = 0; i < 2; i++) keep(seqs[i].window, window_bytes);
    seqs[1].n_tokens = 7;
    CHECK(kda_conv(&desc, &args, &run) == KDA_OK);
    keep(args.y.data, bytes_of(ROWS * CHANNELS, type));
    for (size_t i = 0; i < 2; i++) keep(seqs[i].window, window_bytes);
    release();
}

static void conv_scenario(void) {
    static const size_t widths[] = {1, 2, 4, 7};
    for (size_t w = 0; w < 4; w++)
        for (int type = KDA_F32; type <= KDA_BF16; type++) conv_once(widths[w], (kda_type)type);
}

/* ---- A layer ---- */

static kda_layer_desc layer_desc(size_t width, kda_type state_type) {
    kda_layer_desc layer;
    memset(&layer, 0, sizeof layer);
    layer.op = operator_desc(state_type);
    layer.conv_width = width, layer.conv_activation = KDA_ACTIVATION_SILU;
    layer.q_conv = normal(QK_HEADS * K * width), layer.k_conv = normal(QK_HEADS * K * width);
    layer.v_conv = normal(HEADS * V * width);
    layer.A_log = normal(HEADS), layer.dt_bias = normal(HEADS * K);
    layer.norm_weight = normal(V), layer.norm_eps = 1e-5f;
    return layer;
}

static kda_layer_args layer_args(size_t tokens, kda_type type) {
    kda_args op = operator_args(tokens, type);
    kda_layer_args args;
    memset(&args, 0, sizeof args);
    args.q = op.q, args.k = op.k, args.v = op.v, args.g = op.g, args.beta = op.beta, args.o = op.o;
    args.gate = kda_in(tensor(tokens * HEADS * V, type), type, HEADS * V, V);
    return args;
}

/* Forward on 70 + 3 rows (more than a block of the layer's), then verify 20 and commit 18 more. */
static void layer_once(size_t width, kda_type type, kda_type state_type) {
    enum { ROWS = 73, DRAFT = 20 };
    kda_layer_desc layer = layer_desc(width, state_type);
    kda_layer_args args = layer_args(ROWS, type);
    size_t window_bytes = kda_layer_window_bytes(&layer);
    kda_seq seqs[2];
    memset(seqs, 0, sizeof seqs);
    for (size_t i = 0; i < 2; i++) {
        seqs[i].n_tokens = i == 0 ? 70 : 3;
        seqs[i].state = tensor(HEADS * K * V, state_type);
        seqs[i].window = width > 1 ? normal(window_bytes / sizeof(float)) : NULL;
    }
    seqs[0].journal = buffer(kda_layer_journal_bytes(&layer, DRAFT), sizeof(float));
    args.seqs = seqs, args.n_seqs = 2;
    kda_run run = run_with(0, KDA_AUTO);
    run = run_with(kda_layer_scratch_bytes(&layer, 2, &run), KDA_AUTO);
    CHECK(kda_layer(&layer, &args, &run) == KDA_OK);
    keep(args.o.data, bytes_of(ROWS * HEADS * V, type));
    seqs[0].n_tokens = DRAFT, args.n_seqs = 1;
    CHECK(kda_layer_verify(&layer, &args, &run) == KDA_OK);
    keep(args.o.data, bytes_of(ROWS * HEADS * V, type));
    seqs[0].n_tokens = 18;
    CHECK(kda_layer_commit(&layer, seqs, 1, &run) == KDA_OK);
    for (size_t i = 0; i < 2; i++) keep(seqs[i].state, kda_state_bytes(&layer.op));
    for (size_t i = 0; i < 2 && width > 1; i++) keep(seqs[i].window, window_bytes);
    release();
}

static void layer_scenario(void) {
    layer_once(4, KDA_F32, KDA_F32);
    layer_once(4, KDA_BF16, KDA_F16);
    layer_once(2, KDA_F16, KDA_F32);
}

static void layer_without_a_window_scenario(void) {
    layer_once(1, KDA_F32, KDA_F32);
}

/* ---- Norms, gate, saved states, state functions ---- */

static void parts_once(kda_type type) {
    enum { ROWS = 3, DIM = 133 };
    kda_desc desc = problem_desc(2, 0, DIM, 1);
    desc.gate = KDA_GATE_BOUNDED, desc.lower_bound = -5;
    kda_input x = kda_in(tensor(ROWS * 2 * DIM, type), type, 2 * DIM, DIM);
    kda_input gate = kda_in(tensor(ROWS * 2 * DIM, type), type, 2 * DIM, DIM);
    float *weight = normal(DIM), *A_log = normal(2), *dt_bias = normal(2 * DIM);
    seal();
    kda_output y = kda_out(room(ROWS * 2 * DIM, type), type, 2 * DIM, DIM);
    kda_run run = run_with(0, KDA_AUTO);
    CHECK(kda_l2_norm(ROWS, 2, DIM, 0, x, y, &run) == KDA_OK);
    keep(y.data, bytes_of(ROWS * 2 * DIM, type));
    CHECK(kda_gated_norm(ROWS, 2, DIM, 1e-5f, weight, x, gate, y, &run) == KDA_OK);
    keep(y.data, bytes_of(ROWS * 2 * DIM, type));
    CHECK(kda_log_decay(&desc, ROWS, x, A_log, dt_bias, y, &run) == KDA_OK);
    keep(y.data, bytes_of(ROWS * 2 * DIM, type));
    release();
}

static void parts_scenario(void) {
    for (int type = KDA_F32; type <= KDA_BF16; type++) parts_once((kda_type)type);
}

static void saved_once(kda_type state_type) {
    kda_desc desc = problem_desc(2, 0, 5, 3);
    enum { WINDOW = 33, N = 30 };
    desc.state_type = state_type;
    kda_saved saved, loaded;
    saved.state = tensor(N, state_type), saved.window = normal(WINDOW);
    saved.window_bytes = WINDOW * sizeof(float), saved.n_tokens = 12345;
    float *kv = normal(N);
    seal();
    size_t bytes = kda_save_bytes(&desc, saved.window_bytes);
    void *blob = buffer(bytes, 1), *copy = room(N, state_type);
    CHECK(kda_save(&desc, &saved, blob, bytes) == KDA_OK);
    keep(blob, bytes);
    loaded = saved;
    loaded.state = room(N, state_type), loaded.window = floats(WINDOW);
    CHECK(kda_load(&desc, &loaded, blob, bytes) == KDA_OK);
    CHECK(memcmp(loaded.state, saved.state, kda_state_bytes(&desc)) == 0);
    CHECK(memcmp(loaded.window, saved.window, saved.window_bytes) == 0);
    CHECK(kda_load(&desc, &loaded, blob, bytes - 1) == KDA_ERR_BLOB_SHORT);
    CHECK(kda_state_is_finite(&desc, saved.state));
    CHECK(kda_state_copy(&desc, saved.state, copy) == KDA_OK);
    keep(copy, kda_state_bytes(&desc));
    CHECK(kda_state_import_kv(&desc, kv, copy) == KDA_OK);
    keep(copy, kda_state_bytes(&desc));
    float *out = floats(N);
    CHECK(kda_state_export_kv(&desc, copy, out) == KDA_OK);
    keep(out, N * sizeof(float));
    CHECK(kda_state_clear(&desc, copy) == KDA_OK);
    keep(copy, kda_state_bytes(&desc));
    release();
}

/* A blob cut short anywhere lies in a buffer that ends there: nothing is read behind it. */
static void cut_blobs_once(void) {
    kda_desc desc = problem_desc(1, 0, 2, 3);
    float state[6] = {1, 2, 3, 4, 5, 6};
    unsigned char blob[128];
    kda_saved saved;
    memset(&saved, 0, sizeof saved);
    saved.state = state;
    size_t bytes = kda_save_bytes(&desc, 0);
    CHECK(bytes <= sizeof blob && kda_save(&desc, &saved, blob, bytes) == KDA_OK);
    for (size_t n = 0; n < bytes; n++) {
        void *part = buffer(n, 1);
        memcpy(part, blob, n);
        CHECK(kda_load(&desc, &saved, part, n) == KDA_ERR_BLOB_SHORT);
        release();
    }
    keep(blob, bytes);
}

static void saved_scenario(void) {
    saved_once(KDA_F32);
    saved_once(KDA_F16);
    cut_blobs_once();
}

static void forward_between_guards(void) { everywhere(forward_scenario); }
static void verify_and_commit_between_guards(void) { everywhere(verify_scenario); }
static void convolution_between_guards(void) { everywhere(conv_scenario); }
static void layer_between_guards(void) { everywhere(layer_scenario); }
static void layer_without_a_window(void) { everywhere(layer_without_a_window_scenario); }
static void norms_and_gate_between_guards(void) { everywhere(parts_scenario); }
static void saved_states_between_guards(void) { everywhere(saved_scenario); }

/* The guards themselves: a place is what it says it is. */
static void places_are_what_they_say(void) {
    for (int where = ORDINARY; where < PLACEMENTS; where++) {
        place = (placement)where;
        uintptr_t at = (uintptr_t)buffer(12, 4), page = page_bytes();
        CHECK(where != ORDINARY || at % 64 == 0);
        CHECK(where != FLUSH_END || (at + 12) % page == 0);
        CHECK(where != FLUSH_START || at % page == 0);
        CHECK(where != MISALIGNED || (at % 4 == 0 && at % 8 != 0));
        release();
    }
}

/* ---- Stack ---- */

/* What kda.h's manual promises of every call; musl gives a thread 128 KiB in all. */
enum { STACK_LIMIT = 4096, STACK_BYTES = 1 << 18, PAINT = 0xA5 };

/* Everything a call on a thread of its own needs: nothing is set up there. */
static struct {
    kda_layer_desc layer;
    kda_conv_desc conv;
    kda_args op;
    kda_layer_args layer_args;
    kda_conv_args conv_args;
    kda_seq seq;
    kda_run run, recurrent, chunked;
    kda_saved saved;
    void *blob;
    size_t blob_bytes, tokens;
    kda_output g;
    float *kv;
    kda_result result;
} w;

static void call_nothing(void) { w.result = KDA_OK; }
static void call_recurrent(void) { w.result = kda_forward(&w.layer.op, &w.op, &w.recurrent); }
static void call_chunked(void) { w.result = kda_forward(&w.layer.op, &w.op, &w.chunked); }
static void call_verify(void) { w.result = kda_verify(&w.layer.op, &w.op, &w.run); }
static void call_commit(void) { w.result = kda_commit(&w.layer.op, &w.seq, 1, &w.run); }
static void call_conv(void) { w.result = kda_conv(&w.conv, &w.conv_args, &w.run); }
static void call_conv_verify(void) { w.result = kda_conv_verify(&w.conv, &w.conv_args, &w.run); }
static void call_conv_commit(void) { w.result = kda_conv_commit(&w.conv, &w.seq, 1, &w.run); }
static void call_layer(void) { w.result = kda_layer(&w.layer, &w.layer_args, &w.run); }
static void call_layer_verify(void) {
    w.result = kda_layer_verify(&w.layer, &w.layer_args, &w.run);
}
static void call_layer_commit(void) { w.result = kda_layer_commit(&w.layer, &w.seq, 1, &w.run); }
static void call_l2_norm(void) {
    w.result = kda_l2_norm(w.tokens, w.layer.op.n_heads, w.layer.op.dim_k, 0, w.op.g, w.g, NULL);
}
static void call_log_decay(void) {
    w.result = kda_log_decay(&w.layer.op, w.tokens, w.op.g, w.layer.A_log, w.layer.dt_bias, w.g, NULL);
}
static void call_gated_norm(void) {
    w.result = kda_gated_norm(w.tokens, w.layer.op.n_heads, w.layer.op.dim_v, 1e-5f,
                              w.layer.norm_weight, w.op.v, w.layer_args.gate, w.op.o, NULL);
}
static void call_save(void) {
    w.result = kda_save(&w.layer.op, &w.saved, w.blob, w.blob_bytes);
}
static void call_load(void) {
    w.result = kda_load(&w.layer.op, &w.saved, w.blob, w.blob_bytes);
}
static void call_import_kv(void) {
    w.result = kda_state_import_kv(&w.layer.op, w.kv, w.seq.state);
}
static void call_export_kv(void) {
    w.result = kda_state_export_kv(&w.layer.op, w.seq.state, w.kv);
}
static void call_is_finite(void) {
    w.result = kda_state_is_finite(&w.layer.op, w.seq.state) ? KDA_OK : KDA_ERR_NUMBER;
}

/* The order matters: a commit needs the journal of the verify before it. */
static const struct {
    const char *name;
    void (*call)(void);
} stack_calls[] = {
    {"kda_forward, recurrent", call_recurrent},
    {"kda_forward, chunked", call_chunked},
    {"kda_verify", call_verify},
    {"kda_commit", call_commit},
    {"kda_conv", call_conv},
    {"kda_conv_verify", call_conv_verify},
    {"kda_conv_commit", call_conv_commit},
    {"kda_layer", call_layer},
    {"kda_layer_verify", call_layer_verify},
    {"kda_layer_commit", call_layer_commit},
    {"kda_l2_norm", call_l2_norm},
    {"kda_gated_norm", call_gated_norm},
    {"kda_log_decay", call_log_decay},
    {"kda_save", call_save},
    {"kda_load", call_load},
    {"kda_state_import_kv", call_import_kv},
    {"kda_state_export_kv", call_export_kv},
    {"kda_state_is_finite", call_is_finite},
};

static void prepare_work(size_t heads, size_t dim_k, size_t dim_v, size_t tokens) {
    ptrdiff_t k = (ptrdiff_t)dim_k, v = (ptrdiff_t)dim_v, h = (ptrdiff_t)heads;
    size_t keys = heads * dim_k, values = heads * dim_v;
    kda_layer_desc *l = &w.layer;
    memset(&w, 0, sizeof w);
    place = ORDINARY, w.tokens = tokens;
    l->op = problem_desc(heads, 0, dim_k, dim_v);
    l->op.gate = KDA_GATE_SOFTPLUS, l->op.state_type = KDA_F16;
    l->conv_width = 4, l->conv_activation = KDA_ACTIVATION_SILU, l->norm_eps = 1e-5f;
    l->q_conv = normal(keys * 4), l->k_conv = normal(keys * 4), l->v_conv = normal(values * 4);
    l->A_log = normal(heads), l->dt_bias = normal(keys), l->norm_weight = normal(dim_v);
    w.op.q = kda_in_f32(normal(tokens * keys), h * k, k);
    w.op.k = kda_in_f32(normal(tokens * keys), h * k, k);
    w.op.g = kda_in_f32(normal(tokens * keys), h * k, k);
    w.op.v = kda_in_f32(normal(tokens * values), h * v, v);
    w.op.beta = kda_in_f32(normal(tokens * heads), h, 1);
    w.op.o = kda_out_f32(floats(tokens * values), h * v, v);
    w.op.A_log = l->A_log, w.op.dt_bias = l->dt_bias, w.op.seqs = &w.seq, w.op.n_seqs = 1;
    w.layer_args.q = w.op.q, w.layer_args.k = w.op.k, w.layer_args.v = w.op.v;
    w.layer_args.g = w.op.g, w.layer_args.beta = w.op.beta, w.layer_args.o = w.op.o;
    w.layer_args.gate = kda_in_f32(normal(tokens * values), h * v, v);
    w.layer_args.seqs = &w.seq, w.layer_args.n_seqs = 1;
    w.conv.channels = values, w.conv.width = 4, w.conv.activation = KDA_ACTIVATION_SILU;
    w.conv_args.x = kda_in_f32((const float *)w.op.v.data, h * v, 0);
    w.conv_args.y = kda_out_f32((float *)w.op.o.data, h * v, 0);
    w.conv_args.weight = l->v_conv, w.conv_args.seqs = &w.seq, w.conv_args.n_seqs = 1;
    w.g = kda_out_f32(floats(tokens * keys), h * k, k);
    w.kv = normal(heads * dim_k * dim_v);
    w.seq.n_tokens = tokens;
    w.seq.state = tensor(heads * dim_k * dim_v, KDA_F16);
    w.seq.window = normal(3 * (2 * keys + values));
    w.seq.journal = buffer(kda_layer_journal_bytes(l, tokens), sizeof(float));
    w.run = run_with(kda_layer_scratch_bytes(l, 1, NULL), KDA_AUTO); /* the largest of all */
    w.recurrent = w.chunked = w.run;
    w.recurrent.algorithm = KDA_RECURRENT, w.chunked.algorithm = KDA_CHUNKED;
    w.saved.state = w.seq.state, w.saved.window = w.seq.window;
    w.saved.window_bytes = kda_layer_window_bytes(l);
    w.blob_bytes = kda_save_bytes(&l->op, w.saved.window_bytes);
    w.blob = buffer(w.blob_bytes, 1);
}

static void *on_thread(void *call) {
    void (**function)(void) = (void (**)(void))call;
    (*function)();
    return NULL;
}

/* How deep the stack of a thread was ever painted over by a call. */
static size_t stack_depth(void (*call)(void)) {
    pthread_attr_t attributes;
    pthread_t thread;
    void *p = mmap(NULL, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) exit(2);
    unsigned char *stack = (unsigned char *)p;
    size_t untouched = 0;
    memset(stack, PAINT, STACK_BYTES);
    if (pthread_attr_init(&attributes) != 0 ||
        pthread_attr_setstack(&attributes, stack, STACK_BYTES) != 0 ||
        pthread_create(&thread, &attributes, on_thread, &call) != 0)
        exit(2);
    pthread_join(thread, NULL);
    pthread_attr_destroy(&attributes);
    while (untouched < STACK_BYTES && stack[untouched] == PAINT) untouched++;
    munmap(stack, STACK_BYTES);
    return STACK_BYTES - untouched;
}

static int frames_are_a_sanitizers(void) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    return 1;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) ||                         \
    __has_feature(memory_sanitizer)
    return 1;
#endif
#endif
    return 0;
}

/* Each call once here (so that libm's functions are bound) and then on painted stacks; what an empty
 * call takes is the thread's own. The least of three counts: a call takes the same path each time,
 * and what a busy system now and then adds to a thread is not the call's. */
static void measure_stack(size_t heads, size_t dim_k, size_t dim_v, size_t tokens) {
    enum { CALLS = sizeof stack_calls / sizeof *stack_calls };
    size_t least[CALLS], most = 0, own;
    test_seed(2);
    prepare_work(heads, dim_k, dim_v, tokens);
    call_nothing();
    own = stack_depth(call_nothing);
    for (int round = 0; round <= 3; round++)
        for (size_t i = 0; i < CALLS; i++) {
            size_t depth = STACK_BYTES;
            w.result = KDA_ERR_NULL;
            if (round == 0)
                stack_calls[i].call();
            else
                depth = stack_depth(stack_calls[i].call);
            CHECK_MSG(w.result == KDA_OK, "%s: %s", stack_calls[i].name, kda_result_name(w.result));
            if (round == 0 || depth < least[i]) least[i] = depth;
        }
    printf("stack with dim_k %zu, dim_v %zu, %zu heads, %zu tokens:\n", dim_k, dim_v, heads,
           tokens);
    for (size_t i = 0; i < CALLS; i++) {
        size_t used = least[i] > own ? least[i] - own : 0;
        CHECK_MSG(used <= STACK_LIMIT, "%s: %zu bytes of stack", stack_calls[i].name, used);
        printf("  %5zu bytes  %s\n", used, stack_calls[i].name);
        if (used > most) most = used;
    }
    CHECK(most > 0); /* a measurement of nothing would show nothing */
    release();
}

static void stack_of_every_call(void) {
    if (frames_are_a_sanitizers()) {
        test_skip("stack frames are a sanitizer's here");
        return;
    }
    measure_stack(1, 128, 128, 17);
    measure_stack(1, 3000, 70, 17);
    measure_stack(300, 3, 2, 70);
}

int main(void) {
    TEST(places_are_what_they_say);
    TEST(forward_between_guards);
    TEST(verify_and_commit_between_guards);
    TEST(convolution_between_guards);
    TEST(layer_between_guards);
    TEST(layer_without_a_window);
    TEST(norms_and_gate_between_guards);
    TEST(saved_states_between_guards);
    TEST(stack_of_every_call);
    return test_summary();
}
