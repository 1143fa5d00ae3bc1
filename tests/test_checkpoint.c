/* Checkpoints that make_checkpoint writes: the tensors of the reference checkpoints, by names,
 * shapes and types; the same bytes from the same seed; shards, holes, other values of keys; and
 * models that generate runs. And what generate says a model needs. */
#define SAFETENSORS_IMPLEMENTATION
#include "../examples/safetensors.h"

#define PROGRAM "make_checkpoint"
#include "program.h"

#define LINEAR MODELS "kimi-linear-tiny"
#define K3 MODELS "kimi-k3-tiny"

/* Removes what an earlier run left in the work directory. */
static void start_afresh(void) {
    char command[400];
    snprintf(command, sizeof command, "rm -rf %s", work);
    if (system(command) != 0) give_up(command);
    temporary("checkpoint", work);
}

static void open_checkpoint(st_checkpoint *c, const char *name) {
    char path[400];
    error e;
    snprintf(path, sizeof path, "%s/%s", work, name);
    if (!st_open(c, path, &e)) give_up(e.text);
}

/* Each tensor of a is in b, of the same type and shape. */
static void check_covers(const st_checkpoint *a, const st_checkpoint *b) {
    CHECK(st_count(a) > 300);
    for (size_t i = 0; i < st_count(a); i++) {
        const st_tensor *x = st_at(a, i), *y = st_find(b, x->name);
        char left[ST_SHAPE_TEXT], right[ST_SHAPE_TEXT];
        CHECK_MSG(y, "%s: only in %s", x->name, x->file);
        if (!y) continue;
        CHECK_MSG(x->dtype == y->dtype && x->n_dims == y->n_dims &&
                      memcmp(x->dims, y->dims, x->n_dims * sizeof *x->dims) == 0,
                  "%s: %s %s in %s, %s %s in %s", x->name, st_dtype_name(x->dtype),
                  st_shape(x->dims, x->n_dims, left), x->file, st_dtype_name(y->dtype),
                  st_shape(y->dims, y->n_dims, right), y->file);
    }
}

static void check_layout(const char *reference, const char *made) {
    st_checkpoint a, b;
    error e;
    if (!st_open(&a, reference, &e)) give_up(e.text);
    open_checkpoint(&b, made);
    CHECK(st_count(&a) == st_count(&b));
    check_covers(&a, &b), check_covers(&b, &a);
    st_close(&a), st_close(&b);
}

static void layout_is_that_of_the_reference_checkpoints(void) {
    outcome o = run_ok(LINEAR "/config.json WORK/linear");
    outcome_free(&o);
    check_layout(LINEAR, "linear");
    o = run_ok(K3 "/config.json WORK/k3");
    outcome_free(&o);
    check_layout(K3, "k3");
}

static bool same_file(const char *a, const char *b) {
    size_t n, m;
    char *x = read_file(work, a, &n), *y = read_file(work, b, &m);
    bool same = n == m && memcmp(x, y, n) == 0;
    free(x), free(y);
    return same;
}

/* FNV-1a of a whole file: what a release of this program writes, every other writes too. */
static uint64_t file_hash(const char *name) {
    size_t n;
    char *bytes = read_file(work, name, &n);
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < n; i++) hash = (hash ^ (unsigned char)bytes[i]) * 0x100000001b3u;
    free(bytes);
    return hash;
}

static void numbers_depend_on_the_seed_alone(void) {
    outcome o = run_ok(K3 "/config.json WORK/again --seed 1");
    outcome_free(&o);
    o = run_ok(K3 "/config.json WORK/other --seed 2");
    outcome_free(&o);
    CHECK(same_file("k3/model.safetensors", "again/model.safetensors"));
    CHECK(!same_file("k3/model.safetensors", "other/model.safetensors"));
    CHECK_MSG(file_hash("k3/model.safetensors") == 0x48e84c143b129960u, "%016llx",
              (unsigned long long)file_hash("k3/model.safetensors"));
}

/* A matrix keeps the size of what it multiplies; what is padded is zero. */
static void numbers_have_sensible_sizes(void) {
    st_checkpoint c;
    open_checkpoint(&c, "k3");
    const st_tensor *q = st_find(&c, "language_model.model.layers.0.self_attn.q_proj.weight");
    double sum = 0;
    for (size_t i = 0; i < q->elements; i++) {
        uint32_t bits = (uint32_t)st_load_u16(q->data + 2 * i) << 16;
        float x;
        memcpy(&x, &bits, sizeof x);
        sum += (double)x * (double)x;
    }
    CHECK_AT_MOST("a row's square", fabs(sum / (double)q->dims[0] - 1), 0.05);
    const st_tensor *decay = st_find(&c, "language_model.model.layers.0.self_attn.A_log");
    for (size_t i = 0; i < decay->elements; i++)
        CHECK((st_load_f32(decay->data + 4 * i) == 0) == (i >= 3));
    const st_tensor *scale =
        st_find(&c, "language_model.model.layers.1.block_sparse_moe.experts.3.w1.weight_scale");
    for (size_t i = 0; i < scale->elements; i++)
        CHECK(scale->data[i] >= 121 && scale->data[i] <= 124);
    st_close(&c);
}

/* Shards hold the numbers of a single file, and the index finds them. */
static void shards_hold_the_same(void) {
    st_checkpoint one, many;
    outcome o = run_ok(LINEAR "/config.json WORK/shards --shard-bytes 400000");
    CHECK_MSG(strstr(o.out, " in 5 files\n"), "%s", o.out);
    outcome_free(&o);
    CHECK(exists("shards/model-00001-of-00005.safetensors"));
    CHECK(exists("shards/model-00005-of-00005.safetensors"));
    open_checkpoint(&one, "linear"), open_checkpoint(&many, "shards");
    CHECK(st_count(&one) == st_count(&many));
    for (size_t i = 0; i < st_count(&one); i++) {
        const st_tensor *x = st_at(&one, i), *y = st_find(&many, x->name);
        CHECK(y && x->bytes == y->bytes && memcmp(x->data, y->data, x->bytes) == 0);
    }
    st_close(&one), st_close(&many);
}

/* A directory is written over: the file that is gone would hide the shards. */
static void directory_is_written_over(void) {
    outcome o = run_ok(LINEAR "/config.json WORK/over");
    outcome_free(&o);
    o = run_ok(LINEAR "/config.json WORK/over --shard-bytes 1000000");
    outcome_free(&o);
    CHECK(!exists("over/model.safetensors"));
    CHECK(exists("over/model.safetensors.index.json"));
    o = run_ok(LINEAR "/config.json WORK/over");
    outcome_free(&o);
    CHECK(exists("over/model.safetensors"));
    CHECK(!exists("over/model.safetensors.index.json"));
}

static void check_runs(const char *arguments) {
    outcome o = run_program("generate", arguments);
    CHECK_MSG(o.status == 0, "%s: status %d: %s", arguments, o.status, o.err);
    CHECK_MSG(strcmp(o.out, "\n") != 0, "%s: no tokens", arguments);
    outcome_free(&o);
}

static void settings_change_the_model(void) {
    st_checkpoint c;
    outcome o = run_ok(LINEAR "/config.json WORK/tied --set tie_word_embeddings=true"
                              " --set vocab_size=300 --set attn_res_block_size=2"
                              " --set linear_attn_config.head_dim=16 --experts-type mxfp4");
    outcome_free(&o);
    open_checkpoint(&c, "tied");
    const st_tensor *embedding = st_find(&c, "model.embed_tokens.weight");
    CHECK(embedding->dims[0] == 300);
    CHECK(!st_find(&c, "lm_head.weight"));
    CHECK(st_find(&c, "model.layers.8.mlp_res_proj.weight"));
    CHECK(st_find(&c, "model.layers.1.block_sparse_moe.experts.7.w2.weight_packed"));
    CHECK(st_find(&c, "model.layers.0.self_attn.q_proj.weight")->dims[0] == 64);
    st_close(&c);
}

/* The whole published model, of which a disk holds the headers alone. */
static void sparse_files_take_no_room(void) {
    st_checkpoint c;
    struct stat status;
    char path[400];
    outcome o = run_ok("tests/configs/kimi-linear-48b.json WORK/full --sparse");
    CHECK_MSG(strstr(o.out, ": 20493 tensors, 98245541888 bytes in 20 files\n"), "%s", o.out);
    outcome_free(&o);
    open_checkpoint(&c, "full");
    const st_tensor *last = st_find(&c, "model.layers.26.block_sparse_moe.experts.255.w2.weight");
    CHECK(last && last->dims[0] == 2304 && last->dims[1] == 1024 &&
          last->data[last->bytes - 1] == 0);
    st_close(&c);
    snprintf(path, sizeof path, "%s/full/model-00007-of-00020.safetensors", work);
    CHECK(stat(path, &status) == 0 && status.st_size > 4000000000);
    CHECK(status.st_blocks < 10000);
}

/* A release's other keys are read by config.h, whose refusals come through. */
static void refusals_are_one_line(void) {
    check_refused("", 2, "expected one CONFIG.json and one OUT_DIR");
    check_refused(LINEAR "/config.json WORK/x --set vocab_size", 2, "expected KEY=VALUE");
    check_refused(LINEAR "/config.json WORK/x --experts-type int3", 2, "expected bf16 or mxfp4");
    check_refused("WORK/none.json WORK/x", 1, "none.json: file not found");
    check_refused(LINEAR "/config.json WORK/x --set vocab_size=many", 1, "config.json");
    check_refused(LINEAR "/config.json WORK/x --set vocab_size=0", 1, "vocab_size");
    check_refused(LINEAR "/config.json WORK/x --set a.b=0", 1, "no object \"a\"");
    check_refused(LINEAR "/config.json WORK/x --set vocab_size.b=0", 1, "no object where");
    check_refused(LINEAR "/config.json WORK/x --set mla_use_nope=false", 1, "mla_use_nope");
    check_refused(K3 "/config.json WORK/x --set routed_expert_hidden_size=40", 1, "groups of 32");
    check_refused(LINEAR "/config.json WORK/none/x", 1, "cannot be made");
    CHECK(!exists("x/config.json"));
}

/* ---- What generate says of them ---- */

static bool ends_in(const char *name, const char *end) {
    size_t n = strlen(name), m = strlen(end);
    return n >= m && strcmp(name + n - m, end) == 0;
}

typedef struct counted {
    double all, dense, experts, head, embedding, others;
} counted;

/* By names: experts, head and embedding have theirs; of the rest matrices are what is multiplied
 * by. A head that is not there is the embedding. */
static counted count_bytes(const char *directory) {
    st_checkpoint c;
    error e;
    counted n = {0, 0, 0, 0, 0, 0};
    double table = 0;
    if (!st_open(&c, directory, &e)) give_up(e.text);
    for (size_t i = 0; i < st_count(&c); i++) {
        const st_tensor *t = st_at(&c, i);
        double bytes = (double)t->bytes;
        n.all += bytes;
        if (strstr(t->name, ".experts."))
            n.experts += bytes;
        else if (ends_in(t->name, "lm_head.weight"))
            n.head += bytes;
        else if (ends_in(t->name, "embed_tokens.weight"))
            table += bytes, n.embedding += bytes / (double)t->dims[0];
        else if (t->n_dims == 2 && !ends_in(t->name, "_res_proj.weight"))
            n.dense += bytes;
        else
            n.others += bytes;
    }
    if (n.head == 0) n.head = table;
    st_close(&c);
    return n;
}

static void check_plan(const char *directory, double per_token, double experts) {
    char arguments[400];
    double mapped = 0, total = 0, dense = 0, chosen = 0, head = 0, embedding = 0, vectors = 0;
    double states = 0, latents = 0, others = 0;
    counted n = count_bytes(directory);
    snprintf(arguments, sizeof arguments, "%s --plan", directory);
    outcome o = run_program("generate", arguments);
    CHECK_MSG(o.status == 0 && o.n_err == 0, "%s: status %d: %s", arguments, o.status, o.err);
    const char *token = strstr(o.out, "\na token: ");
    CHECK(sscanf(o.out, "weights: %lf bytes mapped", &mapped) == 1);
    CHECK(token &&
          sscanf(token,
                 "\na token: %lf bytes touched: dense matrices %lf, %*d of %*d experts %lf,"
                 " head %lf, embedding %lf, vectors %lf, states %lf, latents %lf",
                 &total, &dense, &chosen, &head, &embedding, &vectors, &states, &latents) == 8);
    CHECK_MSG(mapped == n.all && dense == n.dense && head == n.head && embedding == n.embedding,
              "%s: %s", directory, o.out);
    const char *rest = strstr(o.out, " others ");
    CHECK_MSG(rest && sscanf(rest, " others %lf;", &others) == 1 && others == n.others, "%s: %s",
              directory, o.out);
    CHECK_AT_MOST("experts", fabs(chosen - n.experts * per_token / experts), 1);
    CHECK(total == dense + chosen + head + embedding + vectors + states + latents);
    CHECK(strstr(o.out, "\nmemory: ") && strstr(o.out, "largest context"));
    outcome_free(&o);
}

static void plans_count_what_the_files_hold(void) {
    check_plan(LINEAR, 3, 8);
    check_plan(K3, 4, 16);
    check_plan("examples/models/text-attnres", 0, 1);
    char tied[400];
    snprintf(tied, sizeof tied, "%s/tied", work);
    check_plan(tied, 3, 8);
}

static double planned_session(const char *arguments) {
    double bytes = 0;
    outcome o = run_program("generate", arguments);
    const char *line = strstr(o.out, "\nsession: ");
    CHECK_MSG(o.status == 0 && line && sscanf(line, "\nsession: %lf bytes", &bytes) == 1, "%s",
              o.err);
    outcome_free(&o);
    return bytes;
}

/* A draft's tokens wait in the session: of each KDA layer at least the values that a token brings,
 * 4 heads of 32 channels. */
static void plans_count_drafts(void) {
    double none = planned_session(LINEAR " --plan"),
           five = planned_session(LINEAR " --plan --draft 5");
    CHECK_MSG(five - none >= 6 * 6 * 4 * 32 * 4, "%.0f and %.0f bytes", none, five);
}

/* Published sizes of the 48B: 98.2 GB of bf16, 40 MiB of states and windows of three tokens of 3 x
 * 4096 channels in 20 layers, 8064 bytes of latents a token. */
static void plan_of_the_published_model(void) {
    outcome o = run_program("generate", "WORK/full --plan --cache bf16");
    CHECK_MSG(o.status == 0, "%s", o.err);
    CHECK_MSG(strstr(o.out, "weights: 98245541888 bytes mapped: bf16 matrices "), "%s", o.out);
    CHECK_MSG(strstr(o.out, " states 89784320, latents 8064; after each 1000 tokens 8064000 more"),
              "%s", o.out);
    CHECK_MSG(strstr(o.out, "for each 1000 tokens 8064000 more"), "%s", o.out);
    outcome_free(&o);
}

/* The same tokens, or a refusal that says what the limit is; as the one or the other depends on who
 * runs this. */
static void weights_are_read_ahead_or_locked(void) {
    outcome plain = run_program("generate", LINEAR " --tokens WORK/ids --generate 4");
    outcome ahead = run_program("generate", LINEAR " --tokens WORK/ids --generate 4 --prefault");
    outcome locked = run_program("generate", LINEAR " --tokens WORK/ids --generate 4 --lock");
    CHECK(plain.status == 0 && ahead.status == 0);
    CHECK(strcmp(plain.out, ahead.out) == 0);
    if (locked.status == 0)
        CHECK(strcmp(plain.out, locked.out) == 0);
    else
        CHECK_MSG(locked.status == 1 && strstr(locked.err, "cannot be locked in memory"), "%s",
                  locked.err);
    outcome_free(&plain), outcome_free(&ahead), outcome_free(&locked);
}

static void models_run(void) {
    uint32_t ids[5] = {1, 2, 3, 250, 5};
    write_ids("ids", ids, 5);
    check_runs("WORK/linear --tokens WORK/ids --generate 4");
    check_runs("WORK/k3 --tokens WORK/ids --generate 4");
    check_runs("WORK/shards --tokens WORK/ids --generate 4");
    check_runs("WORK/tied --tokens WORK/ids --generate 4");
    outcome o = run_ok(K3 "/config.json WORK/wide --experts-type bf16");
    outcome_free(&o);
    check_runs("WORK/wide --tokens WORK/ids --generate 4");
}

int main(void) {
    start_afresh();
    TEST(layout_is_that_of_the_reference_checkpoints);
    TEST(numbers_depend_on_the_seed_alone);
    TEST(numbers_have_sensible_sizes);
    TEST(shards_hold_the_same);
    TEST(directory_is_written_over);
    TEST(settings_change_the_model);
    TEST(sparse_files_take_no_room);
    TEST(refusals_are_one_line);
    TEST(models_run);
    TEST(plans_count_what_the_files_hold);
    TEST(plans_count_drafts);
    TEST(plan_of_the_published_model);
    TEST(weights_are_read_ahead_or_locked);
    return test_summary();
}
