/* test_generate.c - the program's contract: what it prints and writes, and how it refuses. Runs
 * $BUILD/generate (build/generate), from the repository root. */
#define SAFETENSORS_IMPLEMENTATION
#include "../examples/safetensors.h"

#define PROGRAM "generate"
#include "program.h"

#include <sys/resource.h>
#include <unistd.h>

/* Whether the peak of a process is what it allocated: not with a sanitizer's own memory. */
#if !defined(__linux__) || defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define COUNTS_MEMORY 0
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) ||                         \
    __has_feature(memory_sanitizer)
#define COUNTS_MEMORY 0
#endif
#endif
#ifndef COUNTS_MEMORY
#define COUNTS_MEMORY 1
#endif

static const struct {
    const char *directory;
    double bound;
} models[] = {{MODELS "kimi-linear-tiny", 6e-6}, {MODELS "kimi-k3-tiny", 5e-5}};
#define N_MODELS (sizeof models / sizeof *models)
#define LINEAR_TINY MODELS "kimi-linear-tiny"
#define K3_TINY MODELS "kimi-k3-tiny"

/* A run that fails when it has begun: the error is the last line on standard error. */
static void check_failed(const char *arguments, const char *part) {
    outcome o = run(arguments);
    const char *line = strstr(o.err, "\ngenerate: ");
    CHECK_MSG(o.status == 1 && o.n_out == 0, "%s: status %d: %s", arguments, o.status, o.err);
    CHECK_MSG(line && strchr(line + 1, '\n') == o.err + o.n_err - 1, "%s: %s", arguments, o.err);
    CHECK_MSG(line && strstr(line, part), "%s: no \"%s\" in: %s", arguments, part, o.err);
    outcome_free(&o);
}

/* ==== Logits and layers ==== */

static void logits_match_in_any_split(void) {
    static const char *const splits[] = {"", "--split 1", "--split 7", "--split 50"};
    for (size_t m = 0; m < N_MODELS; m++) {
        golden g = golden_open(models[m].directory);
        float *whole = NULL;
        write_ids("ids", g.ids, g.n);
        for (size_t i = 0; i < sizeof splits / sizeof *splits; i++) {
            char arguments[600];
            snprintf(arguments, sizeof arguments, "%s --tokens WORK/ids --logits WORK/logits %s",
                     models[m].directory, splits[i]);
            outcome o = run_ok(arguments);
            float *logits = read_floats("logits", g.n * g.vocab);
            CHECK(o.n_out == 0); /* --logits generates nothing */
            check_logits(&g, logits, models[m].bound);
            if (whole)
                CHECK_AT_MOST("split against whole",
                              test_relative_l2_f32(logits, whole, g.n * g.vocab), 1e-4);
            if (whole)
                free(logits);
            else
                whole = logits;
            outcome_free(&o);
        }
        free(whole);
        golden_free(&g);
    }
    CHECK(!exists("logits.part"));
}

static void logits_imply_no_generation(void) {
    outcome o = run_ok(LINEAR_TINY " --prompt ab --logits WORK/two --generate 5");
    CHECK(o.n_out == 0);
    free(read_floats("two", 2 * 256));
    outcome_free(&o);
}

static void layers_match(void) {
    for (size_t m = 0; m < N_MODELS; m++) {
        golden g = golden_open(models[m].directory);
        char arguments[600], path[400];
        st_checkpoint c;
        error e;
        write_ids("ids", g.ids, g.n);
        snprintf(arguments, sizeof arguments,
                 "%s --tokens WORK/ids --generate 0 --split 33 --dump-layers WORK/layers",
                 models[m].directory);
        outcome o = run_ok(arguments);
        snprintf(path, sizeof path, "%s/layers", work);
        bool ok = st_open_file(&c, path, &e);
        CHECK_MSG(ok, "%s", e.text);
        const st_tensor *t = ok ? st_find(&c, "hidden") : NULL;
        CHECK(t && t->dtype == ST_F32 && t->n_dims == 3 && t->dims[0] == g.layers &&
              t->dims[1] == g.n && t->dims[2] == g.hidden);
        if (t) {
            float *hidden = test_floats(t->elements);
            for (size_t i = 0; i < t->elements; i++) hidden[i] = st_load_f32(t->data + 4 * i);
            check_sums(&g, hidden, models[m].bound);
            free(hidden);
        }
        if (ok) st_close(&c);
        outcome_free(&o);
        golden_free(&g);
    }
}

/* Root of the mean square of layer l, from --dump-layers. */
static double dumped_rms(size_t l) {
    st_checkpoint c;
    error e;
    char path[400];
    double sum = 0;
    snprintf(path, sizeof path, "%s/layers", work);
    if (!st_open_file(&c, path, &e)) give_up(e.text);
    const st_tensor *t = st_find(&c, "hidden");
    size_t n = t->dims[1] * t->dims[2];
    for (size_t i = 0; i < n; i++) {
        double x = (double)st_load_f32(t->data + 4 * (l * n + i));
        sum += x * x;
    }
    st_close(&c);
    return sqrt(sum / (double)n);
}

/* The table of running sums: the embedding and `layers` layers, as they were dumped. */
static void check_sizes(const char *text, size_t layers) {
    const char *at = strstr(text, "\nembed ");
    CHECK_MSG(at, "no running sums in: %s", text);
    for (size_t l = 0; at && l <= layers; l++) {
        double rms = (double)NAN;
        size_t layer = 0;
        int fields = l ? sscanf(at, "\n%zu %lf", &layer, &rms) : sscanf(at, "\nembed %lf", &rms);
        CHECK(fields == (l ? 2 : 1) && layer == l);
        CHECK_AT_MOST("printed size", fabs(rms - dumped_rms(l)), 6e-4);
        at = strchr(at + 1, '\n');
    }
}

/* The rows of weights: as many as there are sub-layers, and the output; each adds up to 1. */
static void check_weights(const char *text, size_t layers) {
    size_t rows = 0;
    for (const char *at = strchr(text, '|'); at; at = strchr(at + 1, '|')) {
        double sum = 0, weight;
        int used;
        at = strchr(at + 1, '|'); /* past the heat map */
        if (!at) break;
        for (const char *number = at + 1; *number != '\n'; number += used, sum += weight)
            if (sscanf(number, "%lf%n", &weight, &used) != 1) break;
        CHECK_AT_MOST("sum of a row", fabs(sum - 1), 4e-3);
        rows++;
    }
    CHECK_MSG(rows == 2 * layers + 1, "%zu rows", rows);
}

static void depth_is_shown(void) {
    outcome o = run_ok(K3_TINY " --prompt 'A few words' --show-depth --dump-layers WORK/layers");
    check_weights(o.out, 13);
    check_sizes(o.out, 13);
    outcome_free(&o);
    o = run_ok(LINEAR_TINY " --prompt 'A few words' --split 3 --dump-layers WORK/layers "
                           "--depth-svg WORK/depth.svg");
    CHECK(!strchr(o.out, '|') && exists("depth.svg"));
    check_sizes(o.out, 9);
    outcome_free(&o);
    o = run_ok(K3_TINY " --prompt ab --depth-svg WORK/depth.svg --generate 9");
    size_t size;
    char *text = read_file(work, "depth.svg", &size);
    CHECK(strstr(text, "Mean weight of each source") && strstr(text, "</svg>"));
    free(text);
    outcome_free(&o);
}

/* A copy of a model without a tokenizer, in which a key of config.json has another value. */
static void copy_model(const char *from, const char *name, const char *key, const char *value) {
    char directory[300];
    size_t size;
    temporary(name, directory);
    char *bytes = read_file(from, "model.safetensors", &size);
    write_file(directory, "model.safetensors", bytes, size);
    free(bytes);
    bytes = read_file(from, "config.json", &size);
    char *edited = edit(bytes, key, value);
    write_file(directory, "config.json", edited, strlen(edited));
    free(bytes), free(edited);
}

/* Blocks that end with the last layer, or would end after it: the last whole one is the first, or
 * there is none to tell of. */
static void depth_of_large_blocks(void) {
    static const char *const sizes[] = {"13", "14"};
    for (size_t i = 0; i < 2; i++) {
        copy_model(K3_TINY, "generate-block", "attn_res_block_size", sizes[i]);
        outcome o = run_ok("WORK/../generate-block --prompt ab --show-depth "
                           "--dump-layers WORK/layers");
        check_weights(o.out, 13);
        check_sizes(o.out, 13);
        bool told = strstr(o.out, "\n\nThe last block's sum: 1.00 times the first\n") != NULL;
        CHECK_MSG(told == (i == 0) && !strstr(o.out, "times the first") == (i == 1), "%s", o.out);
        outcome_free(&o);
    }
}

/* ==== Generation ==== */

/* The greedy continuation, found another way: by the logits of ever longer inputs. */
static void greedy_ids_follow_the_logits(void) {
    uint32_t ids[10] = {72, 101, 108, 108, 111};
    char want[100] = "";
    size_t n = 0;
    for (size_t i = 5; i < 10; i++) {
        write_ids("ids", ids, i);
        outcome o = run_ok(LINEAR_TINY " --tokens WORK/ids --logits WORK/logits");
        float *logits = read_floats("logits", i * 256);
        ids[i] = (uint32_t)best_f32(logits + (i - 1) * 256, 256);
        n += (size_t)sprintf(want + n, "%s%lu", n ? " " : "", (unsigned long)ids[i]);
        free(logits);
        outcome_free(&o);
    }
    sprintf(want + n, "\n");
    write_ids("ids", ids, 5);
    outcome o = run_ok(LINEAR_TINY " --tokens WORK/ids --generate 5");
    CHECK_MSG(strcmp(o.out, want) == 0, "%s instead of %s", o.out, want);
    outcome_free(&o);
    o = run_ok(LINEAR_TINY " --tokens - --generate 5 <WORK/ids");
    CHECK(strcmp(o.out, want) == 0);
    outcome_free(&o);
    o = run_ok(LINEAR_TINY " --prompt Hello --generate 5"); /* the same, as bytes */
    CHECK(o.n_out == 5);
    for (size_t i = 0; i < o.n_out; i++) CHECK((unsigned char)o.out[i] == ids[5 + i]);
    outcome_free(&o);
}

static size_t words(const char *text) {
    size_t n = 0;
    for (; *text; text++) n += *text != ' ' && *text != '\n' && (text[1] == ' ' || text[1] == '\n');
    return n;
}

static void exactly_as_many_as_asked(void) {
    static const size_t counts[] = {0, 1, 200};
    for (size_t i = 0; i < 3; i++) {
        char arguments[200];
        snprintf(arguments, sizeof arguments, "%s --tokens WORK/three --generate %zu", LINEAR_TINY,
                 counts[i]);
        write_file(work, "three", "1\t2\r\n 3", 7);
        outcome o = run_ok(arguments);
        CHECK(words(o.out) == counts[i]);
        CHECK(counts[i] ? o.out[o.n_out - 1] == '\n' : o.n_out == 0);
        outcome_free(&o);
    }
    outcome o = run_ok(LINEAR_TINY " --tokens WORK/three");
    CHECK(words(o.out) == 64);
    outcome_free(&o);
}

static bool same_output(const char *a, const char *b) {
    outcome x = run_ok(a), y = run_ok(b);
    bool same = x.n_out > 0 && x.n_out == y.n_out && memcmp(x.out, y.out, x.n_out) == 0;
    outcome_free(&x), outcome_free(&y);
    return same;
}

#define ABC LINEAR_TINY " --prompt abc --generate 40 "
static void sampling(void) {
    CHECK(same_output(ABC "--temperature 1 --seed 7", ABC "--temperature 1 --seed 7"));
    CHECK(same_output(ABC "--temperature 1", ABC "--temperature 1 --seed 1"));
    CHECK(!same_output(ABC "--temperature 1 --seed 7", ABC "--temperature 1 --seed 8"));
    CHECK(!same_output(ABC "--temperature 1 --seed 7", ABC));
    CHECK(same_output(ABC "--temperature 0.7 --top-k 1", ABC)); /* one choice only: greedy */
    CHECK(same_output(ABC "--temperature 0.7 --top-p 0.000001", ABC));
    CHECK(same_output(ABC "--temperature 0.7 --min-p 1", ABC));
    CHECK(!same_output(ABC "--repetition-penalty 5", ABC));
    CHECK(same_output(ABC "--temperature 0.001", ABC));
    CHECK(same_output(ABC "--temperature 1 --top-k 256 --top-p 1", ABC "--temperature 1"));
}

static void threads_and_isa_change_nothing(void) {
    CHECK(same_output(ABC "--threads 7 --isa scalar", ABC "--threads 1 --isa auto"));
    CHECK(same_output(ABC "--cache f32", ABC));
}

/* The logits of a run, which must not differ from those in "logits" by a bit. */
static void check_same_logits(const char *arguments, size_t from, size_t n) {
    float *want = read_floats("logits", from + n), *got;
    outcome o = run_ok(arguments);
    got = read_floats("again", n);
    CHECK_MSG(memcmp(got, want + from, n * sizeof *got) == 0, "%s", arguments);
    free(want), free(got);
    outcome_free(&o);
}

static void threads_change_no_bit(void) {
    golden g = golden_open(models[1].directory);
    write_ids("ids", g.ids, g.n);
    outcome o = run_ok(K3_TINY " --tokens WORK/ids --logits WORK/logits --threads 1");
    outcome_free(&o);
    for (size_t threads = 2; threads <= 8; threads += threads / 2 + threads / 3) { /* 2, 3, 5, 8 */
        char arguments[200];
        snprintf(arguments, sizeof arguments,
                 "%s --tokens WORK/ids --logits WORK/again --threads %zu", K3_TINY, threads);
        check_same_logits(arguments, 0, g.n * g.vocab);
    }
    golden_free(&g);
}

/* A run that stops and another that goes on give the bits of one run in the same two slices. */
static void sessions_go_on(void) {
    static const char *const caches[] = {"f32", "f16", "bf16"};
    golden g = golden_open(models[1].directory);
    for (size_t i = 0; i < 3; i++) {
        char arguments[300];
        write_ids("ids", g.ids, g.n);
        write_ids("first", g.ids, 90);
        write_ids("rest", g.ids + 90, g.n - 90);
        snprintf(arguments, sizeof arguments,
                 K3_TINY " --tokens WORK/ids --split 90 --logits WORK/logits --cache %s",
                 caches[i]);
        outcome whole = run_ok(arguments);
        snprintf(arguments, sizeof arguments,
                 K3_TINY " --tokens WORK/first --generate 0 --save-session WORK/session --cache %s",
                 caches[i]);
        outcome first = run_ok(arguments);
        CHECK(exists("session") && !exists("session.part"));
        snprintf(arguments, sizeof arguments,
                 K3_TINY " --tokens WORK/rest --load-session WORK/session --logits WORK/again"
                         " --cache %s",
                 caches[i]);
        check_same_logits(arguments, 90 * g.vocab, (g.n - 90) * g.vocab);
        outcome_free(&whole), outcome_free(&first);
    }
    golden_free(&g);
}

/* All generated tokens but the last are in a saved session. */
static void generation_goes_on(void) {
    outcome whole = run_ok(LINEAR_TINY " --tokens WORK/three --generate 9");
    outcome first =
        run_ok(LINEAR_TINY " --tokens WORK/three --generate 4 --save-session WORK/session");
    const char *last = strrchr(first.out, ' ');
    CHECK(last && strncmp(whole.out, first.out, first.n_out - 1) == 0);
    write_file(work, "last", last ? last : "", last ? strlen(last) : 0);
    outcome rest =
        run_ok(LINEAR_TINY " --tokens WORK/last --generate 5 --load-session WORK/session");
    CHECK_MSG(strcmp(whole.out + first.n_out, rest.out) == 0, "%s%s instead of %s", first.out,
              rest.out, whole.out);
    outcome_free(&whole), outcome_free(&first), outcome_free(&rest);
}

/* Guesses change the number of passes and no token. The shipped model repeats itself, so that many
 * are right. */
static void drafts_change_nothing(void) {
    static const char text[] =
        "examples/models/text-attnres --prompt 'And God said' --generate 150";
    char command[300];
    outcome want = run_ok(text);
    for (size_t draft = 1; draft <= 64; draft = 4 * draft - 1) {
        size_t accepted = 0, proposed = 0, passes = 0;
        snprintf(command, sizeof command, "%s --draft %zu", text, draft);
        outcome got = run_ok(command);
        CHECK(got.n_out == want.n_out && memcmp(got.out, want.out, want.n_out) == 0);
        const char *line = strstr(got.err, "drafts: ");
        CHECK_MSG(line && sscanf(line, "drafts: %zu of %zu tokens accepted, in %zu passes",
                                 &accepted, &proposed, &passes) == 3,
                  "%s", got.err);
        CHECK(accepted > 0 && accepted <= proposed && passes < 149);
        outcome_free(&got);
    }
    outcome_free(&want);
    /* Of the only token that is asked for nothing follows. */
    CHECK(same_output(LINEAR_TINY " --tokens WORK/three --generate 1 --draft 5",
                      LINEAR_TINY " --tokens WORK/three --generate 1"));
}

/* A context of seeded contents counts as read. */
static void contexts_are_filled(void) {
    outcome o = run_ok(LINEAR_TINY " --tokens WORK/three --generate 2 --context 5000");
    CHECK_MSG(strstr(o.err, "for 5004 tokens"), "%s", o.err);
    outcome_free(&o);
    CHECK(same_output(LINEAR_TINY " --tokens WORK/three --context 5000 --threads 1",
                      LINEAR_TINY " --tokens WORK/three --context 5000 --threads 3"));
    CHECK(!same_output(LINEAR_TINY " --tokens WORK/three --context 5000",
                       LINEAR_TINY " --tokens WORK/three --context 5000 --seed 2"));
}

static void bad_sessions(void) {
    size_t size;
    outcome o = run_ok(LINEAR_TINY " --tokens WORK/three --generate 0 --save-session WORK/session");
    char *bytes = read_file(work, "session", &size);
    check_refused(LINEAR_TINY " --prompt a --load-session WORK/none", 1, "none: cannot open");
    check_refused(K3_TINY " --prompt a --load-session WORK/session", 1,
                  "session: n_layers: expected 13 by the model, found 9");
    check_refused(LINEAR_TINY " --prompt a --load-session WORK/session --cache bf16", 1,
                  "expected bf16, found f32");
    check_refused(LINEAR_TINY " --prompt a --load-session WORK/three", 1,
                  "three: expected a saved");
    write_file(work, "session", bytes, size - 100);
    check_refused(LINEAR_TINY " --prompt a --load-session WORK/session", 1, "short");
    bytes[size - 200] ^= 1;
    write_file(work, "session", bytes, size);
    check_refused(LINEAR_TINY " --prompt a --load-session WORK/session", 1, "altered");
    free(bytes);
    outcome_free(&o);
}

static void memory_is_reported(void) {
    outcome o = run_ok(LINEAR_TINY " --prompt 0123456789 --generate 1");
    /* 6 KDA layers of 4 states of 32 x 32 and 3 windows of 3 x 128; 3 layers of 9 cache 56 numbers
     * a token. */
    CHECK_MSG(strstr(o.err, "KDA state 98304 bytes"), "%s", o.err);
    CHECK_MSG(strstr(o.err, "convolution windows 27648 bytes"), "%s", o.err);
    CHECK_MSG(strstr(o.err, "latent cache 6720 bytes for 10 tokens, 20160 bytes if every"), "%s",
              o.err);
    CHECK_MSG(strstr(o.err, "prompt: 10 tokens") && strstr(o.err, "tokens/s"), "%s", o.err);
    outcome_free(&o);
}

/* ==== Memory ==== */

/* Tensors of zeros, which need no room on the disk. */
typedef struct zeros {
    char header[1 << 18];
    size_t length, bytes;
} zeros;

static void add_zeros(zeros *z, const char *layer, const char *name, const char *shape, size_t n) {
    z->length +=
        (size_t)sprintf(z->header + z->length,
                        "%s\"%s%s\":{\"dtype\":\"BF16\",\"shape\":%s,\"data_offsets\":"
                        "[%zu,%zu]}",
                        z->length > 9 ? "," : "", layer, name, shape, z->bytes, z->bytes + 2 * n);
    z->bytes += 2 * n;
}

/* 40 KDA layers of 16 heads of 256 channels, 4 MiB of state each, and a full attention layer with
 * 1024 numbers a token, over 32 channels: the session is most of it. */
enum { LARGE_KDA = 40 };

static void write_large_config(const char *directory) {
    char config[2000];
    size_t n = (size_t)sprintf(
        config,
        "{\"vocab_size\": 32, \"hidden_size\": 32, \"num_hidden_layers\": %d,"
        "\"num_attention_heads\": 1, \"intermediate_size\": 32, \"hidden_act\": \"silu\","
        "\"kv_lora_rank\": 1024, \"q_lora_rank\": null, \"qk_nope_head_dim\": 1,"
        "\"qk_rope_head_dim\": 0, \"v_head_dim\": 1, \"mla_use_nope\": true,"
        "\"num_experts\": null, \"tie_word_embeddings\": true,"
        "\"linear_attn_config\": {\"full_attn_layers\": [%d], \"head_dim\": 256,"
        "\"num_heads\": 16, \"short_conv_kernel_size\": 4, \"use_full_rank_gate\": true,"
        "\"kda_layers\": [1",
        LARGE_KDA + 1, LARGE_KDA + 1);
    for (int i = 2; i <= LARGE_KDA; i++) n += (size_t)sprintf(config + n, ",%d", i);
    n += (size_t)sprintf(config + n, "]}}");
    write_file(directory, "config.json", config, n);
}

static void add_large_mla(zeros *z, const char *layer) {
    add_zeros(z, layer, "q_proj.weight", "[1,32]", 32);
    add_zeros(z, layer, "kv_a_proj_with_mqa.weight", "[1024,32]", 1024 * 32);
    add_zeros(z, layer, "kv_a_layernorm.weight", "[1024]", 1024);
    add_zeros(z, layer, "kv_b_proj.weight", "[2,1024]", 2 * 1024);
    add_zeros(z, layer, "o_proj.weight", "[32,1]", 32);
}

static void add_large_kda(zeros *z, const char *layer) {
    static const char *const projections[] = {"q_proj.weight", "k_proj.weight", "v_proj.weight",
                                              "g_proj.weight"};
    static const char *const convolutions[] = {"q_conv1d.weight", "k_conv1d.weight",
                                               "v_conv1d.weight"};
    for (size_t k = 0; k < 4; k++) add_zeros(z, layer, projections[k], "[4096,32]", 4096 * 32);
    for (size_t k = 0; k < 3; k++) add_zeros(z, layer, convolutions[k], "[4096,4]", 4096 * 4);
    add_zeros(z, layer, "f_a_proj.weight", "[256,32]", 256 * 32);
    add_zeros(z, layer, "f_b_proj.weight", "[4096,256]", 4096 * 256);
    add_zeros(z, layer, "b_proj.weight", "[16,32]", 16 * 32);
    add_zeros(z, layer, "o_proj.weight", "[32,4096]", 4096 * 32);
    add_zeros(z, layer, "A_log", "[16]", 16);
    add_zeros(z, layer, "dt_bias", "[4096]", 4096);
    add_zeros(z, layer, "o_norm.weight", "[256]", 256);
}

static void write_large_model(const char *directory) {
    zeros *z = (zeros *)test_alloc(sizeof *z);
    z->length = (size_t)sprintf(z->header, "12345678{");
    add_zeros(z, "model.", "embed_tokens.weight", "[32,32]", 32 * 32);
    add_zeros(z, "model.", "norm.weight", "[32]", 32);
    for (size_t i = 0; i <= LARGE_KDA; i++) {
        char layer[40];
        snprintf(layer, sizeof layer, "model.layers.%zu.", i);
        add_zeros(z, layer, "input_layernorm.weight", "[32]", 32);
        add_zeros(z, layer, "post_attention_layernorm.weight", "[32]", 32);
        add_zeros(z, layer, "mlp.gate_proj.weight", "[32,32]", 32 * 32);
        add_zeros(z, layer, "mlp.up_proj.weight", "[32,32]", 32 * 32);
        add_zeros(z, layer, "mlp.down_proj.weight", "[32,32]", 32 * 32);
        snprintf(layer, sizeof layer, "model.layers.%zu.self_attn.", i);
        if (i < LARGE_KDA)
            add_large_kda(z, layer);
        else
            add_large_mla(z, layer);
    }
    z->header[z->length++] = '}';
    for (size_t b = 0; b < 8; b++) z->header[b] = (char)((z->length - 8) >> 8 * b);
    write_large_config(directory);
    write_file(directory, "model.safetensors", z->header, z->length);
    char path[400];
    snprintf(path, sizeof path, "%s/model.safetensors", directory);
    if (truncate(path, (off_t)(z->length + z->bytes)) != 0) give_up(path);
    free(z);
}

/* What is announced before the run is what the run takes: within 2 in 100, where what the program
 * itself takes is less than that. */
static void memory_is_announced(void) {
    if (!COUNTS_MEMORY) {
        test_skip("the system, or a sanitizer, counts memory in another way");
        return;
    }
    char directory[300];
    uint32_t ids[90];
    double announced = 0;
    struct rusage usage;
    for (size_t i = 0; i < 90; i++) ids[i] = (uint32_t)i % 32;
    temporary("generate-large", directory);
    write_large_model(directory);
    write_ids("ids", ids, 90);
    outcome o = run_ok("WORK/../generate-large --tokens WORK/ids --generate 3 --threads 2");
    const char *total = strstr(o.err, "bytes: ");
    CHECK_MSG(total && sscanf(total, "bytes: %lf bytes in all", &announced) == 1, "%s", o.err);
    CHECK(getrusage(RUSAGE_CHILDREN, &usage) == 0); /* of the largest child: this one */
    double peak = (double)usage.ru_maxrss * 1024;
    printf("announced %.1f MiB, peak %.1f MiB\n", announced / (1 << 20), peak / (1 << 20));
    CHECK_AT_MOST("announced against peak", fabs(announced / peak - 1), 0.02);
    outcome_free(&o);
}

/* Rounded queries where the processor has products of such numbers, or a refusal: latents in whole
 * steps are not enough, nor is the cache. */
static void rounded_dots(void) {
    char directory[300];
    temporary("generate-large", directory);
    write_large_model(directory);
    write_file(work, "three", "1 2 3", 5);
    outcome o = run("WORK/../generate-large --tokens WORK/three --generate 2 --cache bf16 "
                    "--bf16-dots");
    if (o.status == 0)
        CHECK(o.n_out == 4);
    else
        CHECK_MSG(strstr(o.err, "--bf16-dots: expected --cache bf16, a processor with "), "%s",
                  o.err);
    outcome_free(&o);
    check_refused("WORK/../generate-large --tokens WORK/three --cache f16 --bf16-dots", 1,
                  "--bf16-dots: expected --cache bf16");
}

static void help_is_not_an_error(void) {
    outcome o = run_ok("--help");
    CHECK(o.n_err == 0 && strstr(o.out, "usage: generate MODEL_DIR"));
    CHECK(strstr(o.out, "--dump-layers") && strstr(o.out, "--isa") && strstr(o.out, "--top-p"));
    outcome_free(&o);
}

/* ==== Refusals ==== */

static void bad_usage(void) {
    check_refused("", 2, "MODEL_DIR");
    check_refused("--prompt a", 2, "MODEL_DIR");
    check_refused(LINEAR_TINY, 2, "--tokens and --prompt");
    check_refused(LINEAR_TINY " --prompt a --tokens WORK/three", 2, "--tokens and --prompt");
    check_refused(LINEAR_TINY " --prompt a --frobnicate 3", 2, "\"--frobnicate\"");
    check_refused(LINEAR_TINY " --prompt a -x", 2, "\"-x\"");
    check_refused(LINEAR_TINY " other --prompt a", 2, "\"other\"");
    check_refused(LINEAR_TINY " --prompt", 2, "--prompt");
    check_refused(LINEAR_TINY " --prompt a --split 0", 2, "--split");
    check_refused(LINEAR_TINY " --prompt a --split -1", 2, "--split");
    check_refused(LINEAR_TINY " --prompt a --generate many", 2, "--generate");
    check_refused(LINEAR_TINY " --prompt a --generate 1x", 2, "--generate");
    check_refused(LINEAR_TINY " --prompt a --generate 99999999999999999999", 2, "--generate");
    check_refused(LINEAR_TINY " --prompt a --generate ''", 2, "--generate");
    check_refused(LINEAR_TINY " --prompt a --threads 0", 2, "--threads");
    check_refused(LINEAR_TINY " --prompt a --threads 1025", 2, "--threads");
    check_refused(LINEAR_TINY " --prompt a --cache f64", 2, "f32, f16 or bf16");
    check_refused(LINEAR_TINY " --prompt a --cache int8", 2, "f32, f16 or bf16, found \"int8\"");
    check_refused(LINEAR_TINY " --prompt a --seed -3", 2, "--seed");
    check_refused(LINEAR_TINY " --prompt a --temperature nan", 2, "--temperature");
    check_refused(LINEAR_TINY " --prompt a --temperature -1", 2, "--temperature");
    check_refused(LINEAR_TINY " --prompt a --temperature 1x", 2, "found \"1x\"");
    check_refused(LINEAR_TINY " --prompt a --temperature ''", 2, "found \"\"");
    check_refused(LINEAR_TINY " --prompt a --top-p 0", 2, "--top-p");
    check_refused(LINEAR_TINY " --prompt a --top-p 1.5", 2, "--top-p");
    check_refused(LINEAR_TINY " --prompt a --min-p 1.5", 2, "--min-p");
    check_refused(LINEAR_TINY " --prompt a --repetition-penalty 0", 2, "--repetition-penalty");
    check_refused(LINEAR_TINY " --prompt a --isa avx9", 2, "auto, scalar, avx2");
    check_refused(LINEAR_TINY " --prompt a --draft 2 --repetition-penalty 1.1", 2,
                  "--draft: expected a repetition penalty of 1, found 1.1");
    check_refused(LINEAR_TINY " --prompt a --draft 65", 2, "--draft");
    check_refused(LINEAR_TINY " --prompt a --draft 2 --temperature 1", 2, "--draft");
    check_refused(LINEAR_TINY " --prompt a --context 9 --load-session x", 2, "--context");
    check_refused(LINEAR_TINY " --prompt a --bf16-dots", 1, "--bf16-dots");
    char most[200];
    snprintf(most, sizeof most, LINEAR_TINY " --prompt abc --generate %zu", SIZE_MAX / 2);
    check_refused(most, 1, " tokens to generate after 0 cannot be counted");
    snprintf(most, sizeof most, LINEAR_TINY " --prompt abc --context %zu", SIZE_MAX / 2);
    check_refused(most, 1, "64 tokens to generate after ");
}

static void instruction_sets(void) {
    check_instruction_sets(LINEAR_TINY " --prompt a");
    outcome best = run_ok(ABC "--isa auto"),
            plain = run_program_with("KDA_ISA=scalar", PROGRAM, ABC);
    CHECK(plain.status == 0 && strcmp(plain.out, best.out) == 0);
    outcome_free(&best), outcome_free(&plain);
}

static void bad_tokens(void) {
    write_file(work, "bad", "1 2 300 4", 9);
    check_refused(LINEAR_TINY " --tokens WORK/bad", 1, "found 300");
    check_refused(LINEAR_TINY " --tokens WORK/bad --logits WORK/none", 1, "token 3");
    CHECK(!exists("none") && !exists("none.part"));
    write_file(work, "bad", "1 two 3", 7);
    check_refused(LINEAR_TINY " --tokens WORK/bad", 1, "\"two\"");
    write_file(work, "bad", "1 -2 3", 6);
    check_refused(LINEAR_TINY " --tokens WORK/bad", 1, "\"-2\"");
    write_file(work, "bad", "99999999999999999999999999999999999999999", 41);
    check_refused(LINEAR_TINY " --tokens WORK/bad", 1, "token 1");
    write_file(work, "bad", "0000000000000000000000000000001garbage", 38); /* 31 digits first */
    check_refused(LINEAR_TINY " --tokens WORK/bad", 1, "token 1");
    write_file(work, "bad", "12\0003", 4);
    check_refused(LINEAR_TINY " --tokens WORK/bad", 1, "token 1");
    write_file(work, "bad", " \n", 2);
    check_refused(LINEAR_TINY " --tokens WORK/bad", 1, "found none");
    check_refused(LINEAR_TINY " --tokens - </dev/null", 1, "found none");
    check_refused(LINEAR_TINY " --prompt ''", 1, "found none");
    check_refused(LINEAR_TINY " --tokens WORK/no-such-file", 1, "no-such-file");
    check_refused(LINEAR_TINY " --tokens WORK", 1, work);
}

static void bad_models(void) {
    char directory[300];
    size_t size, n_config;
    temporary("generate-model", directory);
    char *bytes = read_file(LINEAR_TINY, "model.safetensors", &size);
    char *config = read_file(LINEAR_TINY, "config.json", &n_config);
    size_t header = 8 + (size_t)st_load_u64(bytes);
    check_refused("no/such/directory --prompt a", 1, "no/such/directory/config.json");
    check_refused("no/such/directory --plan", 1, "no/such/directory/config.json");
    write_file(directory, "config.json", config, n_config);
    for (size_t n = 0; n < size; n += n < 16 ? 1 : n < header ? 4999 : 399989) {
        write_file(directory, "model.safetensors", bytes, n);
        check_refused("WORK/../generate-model --prompt a", 1, "model.safetensors");
    }
    write_file(directory, "model.safetensors", bytes, size);
    char *edited = edit(config, "hidden_act", "\"gelu\"");
    write_file(directory, "config.json", edited, strlen(edited));
    check_refused("WORK/../generate-model --prompt a", 1, "hidden_act");
    free(edited);
    edited = edit(config, "kv_lora_rank", NULL);
    write_file(directory, "config.json", edited, strlen(edited));
    check_refused("WORK/../generate-model --prompt a", 1, "kv_lora_rank");
    free(edited);
    edited = edit(config, "hidden_size", "32");
    write_file(directory, "config.json", edited, strlen(edited));
    check_refused("WORK/../generate-model --prompt a", 1, "[256, 32], found [256, 64]");
    free(edited);
    write_file(directory, "config.json", config, n_config / 2);
    check_refused("WORK/../generate-model --prompt a", 1, "config.json: line");
    write_file(directory, "config.json", config, n_config);
    write_file(directory, "tiktoken.model", "", 0);
    check_refused("WORK/../generate-model --prompt a", 1, "tiktoken.model");
    outcome o = run_ok("WORK/../generate-model --tokens WORK/three --generate 3");
    CHECK(words(o.out) == 3);
    outcome_free(&o);
    free(bytes), free(config);
}

/* A vocabulary in which byte b is token 255 - b: a prompt is these ids, and what is generated from
 * them is the text of the ids that --tokens prints. */
static void prompts_with_a_tokenizer(void) {
    char directory[300], model[256 * 16];
    size_t size, n_config, n_model = 0, n_text = 0;
    temporary("generate-tokenizer", directory);
    char *bytes = read_file(LINEAR_TINY, "model.safetensors", &size);
    char *config = read_file(LINEAR_TINY, "config.json", &n_config);
    for (unsigned b = 0; b < 256; b++) {
        static const char digits[] =
            "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        n_model += (size_t)snprintf(model + n_model, sizeof model - n_model, "%c%c== %u\n",
                                    digits[b >> 2], digits[(b & 3) << 4], 255 - b);
    }
    write_file(directory, "model.safetensors", bytes, size);
    write_file(directory, "config.json", config, n_config);
    write_file(directory, "tiktoken.model", model, n_model);
    write_file(work, "tokenized", "158 157 223 60 86", 17); /* "ab " and U+00E9 */
    outcome ids = run_ok("WORK/../generate-tokenizer --tokens WORK/tokenized --generate 40");
    outcome text = run_ok("WORK/../generate-tokenizer --prompt 'ab \xc3\xa9' --generate 40");
    for (char *at = ids.out; *at && *at != '\n'; n_text++) {
        unsigned long id = strtoul(at, &at, 10);
        CHECK(n_text < text.n_out && (unsigned char)text.out[n_text] == 255 - id);
    }
    CHECK(n_text == 40 && text.n_out == 40);
    outcome_free(&ids), outcome_free(&text);
    check_refused("WORK/../generate-tokenizer --prompt 'a[BOS]'", 1, "256");
    free(bytes), free(config);
}

/* A run in a copy of the tiny model, with what is written of its end of text. */
static outcome run_ending(const char *generation_config, const char *line) {
    char directory[300], command[300];
    temporary("generate-ending", directory);
    if (generation_config)
        write_file(directory, "generation_config.json", generation_config,
                   strlen(generation_config));
    snprintf(command, sizeof command, "WORK/../generate-ending %s", line);
    return run(command);
}

/* The output up to the first byte that is an end of text: said by generation_config.json, or by
 * config.json, one or several, drafting or not. */
static void texts_end(void) {
    char config[100], number[20], path[400];
    outcome whole = run_ok(LINEAR_TINY " --prompt 'In the' --generate 40 --ignore-stop");
    unsigned end = (unsigned char)whole.out[20];
    const char *first = (const char *)memchr(whole.out, (int)end, 40);
    size_t n = (size_t)(first - whole.out);
    CHECK(whole.n_out == 40 && n > 0);
    snprintf(number, sizeof number, "%u", end);
    copy_model(LINEAR_TINY, "generate-ending", "eos_token_id", number);
    snprintf(config, sizeof config, "{\"eos_token_id\": [300, %u]}", end);
    const char *const ways[] = {NULL, "{\"eos_token_id\": null}", config};
    for (size_t i = 0; i < 3; i++) {
        outcome o = run_ending(ways[i], "--prompt 'In the' --generate 40");
        CHECK_MSG(o.n_out == n && memcmp(o.out, whole.out, n) == 0, "%zu: %zu, not %zu bytes", i,
                  o.n_out, n);
        CHECK(strstr(o.err, "the text ends"));
        outcome_free(&o);
    }
    outcome o = run_ending(NULL, "--prompt 'In the' --generate 40 --draft 5");
    CHECK(o.n_out == n && memcmp(o.out, whole.out, n) == 0);
    outcome_free(&o);
    o = run_ending(NULL, "--prompt 'In the' --generate 40 --ignore-stop");
    CHECK(o.n_out == 40 && memcmp(o.out, whole.out, 40) == 0);
    outcome_free(&o);
    write_file(work, "three", "1 2 3", 5); /* ids have no end */
    o = run_ending("{\"eos_token_id\": [0, 1, 2, 3]}", "--tokens WORK/three --generate 40");
    CHECK(words(o.out) == 40);
    outcome_free(&o);
    outcome_free(&whole);
    snprintf(path, sizeof path, "%s/../generate-ending/generation_config.json", work);
    remove(path);
}

/* What is wrong with the ends of a text in generation_config.json, or in config.json. */
static void bad_ends_of_text(void) {
    static const char *const texts[][2] = {
        {"{\"eos_token_id\": \"x\"}", "found \"x\""},
        {"{\"eos_token_id\": 4294967296}", "found 4294967296"},
        {"{\"eos_token_id\": [1, 1, -1]}", "found -1"},
        {"{\"text_config\": {\"eos_token_id\": 1.5}}", "found 1.5"},
    };
    char path[400];
    copy_model(LINEAR_TINY, "generate-ending", "eos_token_id", "[true]");
    outcome o = run_ending(NULL, "--prompt a");
    CHECK_MSG(o.status == 1 && strstr(o.err, "generate-ending/config.json: key eos_token_id: "
                                             "expected an id or an array of ids, found true"),
              "%s", o.err);
    outcome_free(&o);
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        o = run_ending(texts[i][0], "--prompt a");
        CHECK_MSG(o.status == 1 &&
                      strstr(o.err, "generation_config.json: key eos_token_id: "
                                    "expected an id or an array of ids, found ") &&
                      strstr(o.err, texts[i][1]),
                  "%s: %s", texts[i][0], o.err);
        outcome_free(&o);
    }
    o = run_ending("{", "--prompt a");
    CHECK(o.status == 1 && strstr(o.err, "generation_config.json: line 1"));
    outcome_free(&o);
    snprintf(path, sizeof path, "%s/../generate-ending/generation_config.json", work);
    remove(path);
    CHECK(symlink("generation_config.json", path) == 0); /* a link to itself */
    o = run_ending(NULL, "--prompt a");
    CHECK_MSG(o.status == 1 && strstr(o.err, "generation_config.json: cannot be examined: "), "%s",
              o.err);
    outcome_free(&o);
    remove(path);
}

/* What was read up to the end is what a saved session has, however it came there. */
static void sessions_end_with_the_text(void) {
    static const char run_text[] = "--prompt 'In the' --generate 40 --save-session WORK/ended";
    char drafting[200];
    size_t size[2];
    char *bytes[2];
    for (size_t i = 0; i < 2; i++) {
        snprintf(drafting, sizeof drafting, "%s%s", run_text, i ? " --draft 3" : "");
        outcome o = run_ending(NULL, drafting);
        bytes[i] = read_file(work, "ended", &size[i]);
        CHECK(o.status == 0 && size[i] == size[0] && memcmp(bytes[i], bytes[0], size[0]) == 0);
        outcome_free(&o);
    }
    free(bytes[0]), free(bytes[1]);
}

/* The end comes in the middle of a guess that the model agrees to: what was guessed behind it is
 * neither printed nor read. */
static void texts_end_within_a_draft(void) {
    static const char said[] =
        "And God said unto him, The LORD hath said unto me, The LORD hath said";
    char command[400], path[400];
    size_t size[2], accepted = 0;
    char *bytes[2];
    copy_model("examples/models/text-attnres", "generate-draft", "text_config.eos_token_id", "44");
    for (size_t i = 0; i < 2; i++) {
        snprintf(command, sizeof command,
                 "WORK/../generate-draft --prompt '%s' --generate 40 --save-session WORK/ended %s",
                 said, i ? "--draft 30" : "");
        outcome o = run_ok(command);
        CHECK_MSG(strcmp(o.out, " unto me") == 0 && strstr(o.err, "the text ends"), "%s", o.out);
        const char *line = strstr(o.err, "drafts: ");
        if (i)
            CHECK_MSG(line && sscanf(line, "drafts: %zu of", &accepted) == 1 && accepted > 8, "%s",
                      o.err); /* with what was not said */
        bytes[i] = read_file(work, "ended", &size[i]);
        CHECK(size[i] == size[0] && memcmp(bytes[i], bytes[0], size[0]) == 0);
        outcome_free(&o);
    }
    free(bytes[0]), free(bytes[1]);
    snprintf(path, sizeof path, "%s/ended", work);
    remove(path);
}

static void failed_writes(void) {
    check_refused(LINEAR_TINY " --prompt a --logits WORK/no/such/file", 1, "no/such/file");
    check_failed(LINEAR_TINY " --prompt a --dump-layers WORK/no/such/file", "no/such/file");
    check_failed(LINEAR_TINY " --prompt a --generate 0 --save-session WORK/no/such/file",
                 "no/such/file");
    check_refused(LINEAR_TINY " --prompt a --logits WORK", 1, "cannot");
    check_refused(LINEAR_TINY " --prompt a --generate 4611686018427387904", 1,
                  "4611686018427387905");
    check_failed(LINEAR_TINY
                 " --prompt a --generate 0 --show-depth --dump-layers WORK/no/such/file",
                 "no/such/file");
    outcome o = run(LINEAR_TINY " --prompt a --depth-svg WORK/no/such/picture");
    CHECK_MSG(o.status == 1 && strstr(o.err, "/no/such/picture") && strstr(o.out, "\nembed "),
              "%d: %s", o.status, o.err);
    outcome_free(&o);
    if (!test_has_full_device()) return;
    check_failed(LINEAR_TINY " --prompt a --logits /dev/full", "/dev/full");
    check_failed(LINEAR_TINY " --prompt a --dump-layers /dev/full", "/dev/full");
    check_failed(LINEAR_TINY " --prompt a --generate 0 --save-session /dev/full", "/dev/full");
}

int main(void) {
    temporary(PROGRAM, work);
    TEST(logits_match_in_any_split);
    TEST(logits_imply_no_generation);
    TEST(layers_match);
    TEST(depth_is_shown);
    TEST(depth_of_large_blocks);
    TEST(greedy_ids_follow_the_logits);
    TEST(exactly_as_many_as_asked);
    TEST(sampling);
    TEST(threads_and_isa_change_nothing);
    TEST(threads_change_no_bit);
    TEST(sessions_go_on);
    TEST(generation_goes_on);
    TEST(drafts_change_nothing);
    TEST(contexts_are_filled);
    TEST(bad_sessions);
    TEST(memory_is_reported);
    TEST(memory_is_announced);
    TEST(rounded_dots);
    TEST(help_is_not_an_error);
    TEST(bad_usage);
    TEST(instruction_sets);
    TEST(bad_tokens);
    TEST(bad_models);
    TEST(prompts_with_a_tokenizer);
    TEST(texts_end);
    TEST(sessions_end_with_the_text);
    TEST(texts_end_within_a_draft);
    TEST(bad_ends_of_text);
    TEST(failed_writes);
    return test_summary();
}
