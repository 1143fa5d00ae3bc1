/* saved.h - a session in a file, to go on with later: the state of a long prefix costs its reading
 * once.
 *
 * In one source file of a program (this also brings in the bodies of the headers below it):
 *
 *     #define HYBRID_SAVED_IMPLEMENTATION
 *     #include "saved.h"
 *
 *     if (!hybrid_session_save(&session, "prefix.session", e)) ...
 *     if (!hybrid_session_load(&other, "prefix.session", e)) ...
 *
 * A file holds what the session has read: KDA states, convolution windows, the latents of its
 * tokens, how many these are. What follows a load gives the bits that it would have given without
 * the break. It is written as NAME.part and then renamed, and both ways it passes through a small
 * buffer: no second copy of a session is made.
 *
 * THE FILE
 *   Numbers are little-endian and unsigned; a checksum is kda.h's: for each 8 bytes,
 *   sum = (sum ^ word) * 0x9e3779b97f4a7c15, then sum ^= sum >> 32. States, windows and rows of a
 *   layer are summed one after another, each filled up with zeros to whole words.
 *
 *        0   8 bytes   "KDASESSN"
 *        8   8 bytes   version of the format, 1
 *       16   9 fields of 8 bytes: n_layers, hidden_size, kda_heads, kda_head_dim, conv_width,
 *            kv_lora_rank, qk_rope_head_dim, type of the cache (LINEAR_F32, ...), a fingerprint of
 *            the model's weights: all vectors, a sample of each matrix
 *       88   8 bytes   tokens read
 *       96   1024 bytes, a byte a layer: 1 KDA, 2 full attention, 0 past the last
 *     1120   8 bytes   checksum of all before it
 *     1128   per layer: KDA: state and windows, float32; full attention: the rows of the cache
 *            8 bytes   checksum of these contents, begun with that of the header
 */
#ifndef HYBRID_SAVED_H
#define HYBRID_SAVED_H

#include "error.h"
#include "hybrid.h"

#include <stdbool.h>
#include <stddef.h>

bool hybrid_session_save(const hybrid_session *session, const char *path, error *e);

/* Takes a session over from a file, whatever it had read before. A file that is short, long,
 * altered, of another version, model, type of cache, or with more tokens than the session's
 * capacity is refused by one sentence, and the session is as it was: the file is read once to check
 * it and once more into place. If it changes or fails between the two, the session is left empty.
 */
bool hybrid_session_load(hybrid_session *session, const char *path, error *e);

/* The number of tokens in a file with a sound header: for choosing a session's capacity. */
bool hybrid_saved_tokens(const char *path, size_t *n_tokens, error *e);

#endif

#if defined(HYBRID_SAVED_IMPLEMENTATION) && !defined(HYBRIDI_SAVED_IMPLEMENTED)
#define HYBRIDI_SAVED_IMPLEMENTED

#if !defined(HYBRID_IMPLEMENTATION)
#define HYBRID_IMPLEMENTATION
#endif
#include "hybrid.h"
#if !defined(OUTPUT_IMPLEMENTATION)
#define OUTPUT_IMPLEMENTATION
#endif
#include "output.h"

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

/* ---- Bytes ---- */

/* Each byte by name: compilers make one store of it. */
static void hybridi_put_u32(unsigned char *at, uint32_t value) {
    at[0] = (unsigned char)value, at[1] = (unsigned char)(value >> 8);
    at[2] = (unsigned char)(value >> 16), at[3] = (unsigned char)(value >> 24);
}

static void hybridi_put_u64(unsigned char *at, uint64_t value) {
    hybridi_put_u32(at, (uint32_t)value);
    hybridi_put_u32(at + 4, (uint32_t)(value >> 32));
}

/* Numbers of 4 bytes in memory to little-endian bytes, and back; bytes as they are. */
static void hybridi_put_numbers(unsigned char *to, const void *from, size_t count, size_t size) {
    uint32_t word;
    if (size == 1) memcpy(to, from, count);
    for (size_t i = 0; size == sizeof word && i < count; i++) {
        memcpy(&word, (const unsigned char *)from + i * sizeof word, sizeof word);
        hybridi_put_u32(to + i * sizeof word, word);
    }
}

static void hybridi_get_numbers(void *to, const unsigned char *from, size_t count, size_t size) {
    if (size == 1) memcpy(to, from, count);
    for (size_t i = 0; size == sizeof(uint32_t) && i < count; i++) {
        uint32_t word = st_load_u32(from + i * sizeof word);
        memcpy((unsigned char *)to + i * sizeof word, &word, sizeof word);
    }
}

static uint64_t hybridi_sum_word(uint64_t sum, uint64_t word) {
    sum = (sum ^ word) * 0x9e3779b97f4a7c15u;
    return sum ^ sum >> 32;
}

/* The last word is filled up with zeros. */
static uint64_t hybridi_checksum(uint64_t sum, const unsigned char *bytes, size_t n) {
    unsigned char rest[8] = {0};
    size_t whole = n / 8 * 8;
    for (size_t i = 0; i < whole; i += 8) sum = hybridi_sum_word(sum, st_load_u64(bytes + i));
    if (whole == n) return sum;
    memcpy(rest, bytes + whole, n - whole);
    return hybridi_sum_word(sum, st_load_u64(rest));
}

/* ---- Header ---- */

enum { HYBRIDI_N_FIELDS = 9, HYBRIDI_CACHE_FIELD = 7, HYBRIDI_WEIGHTS_FIELD = 8 };

static const char *const hybridi_field_names[HYBRIDI_N_FIELDS] = {
    "n_layers",     "hidden_size",      "kda_heads",         "kda_head_dim", "conv_width",
    "kv_lora_rank", "qk_rope_head_dim", "type of the cache", "weights"};

typedef struct hybridi_header {
    uint64_t fields[HYBRIDI_N_FIELDS];
    uint64_t n_tokens;
    unsigned char kinds[HYBRID_MAX_LAYERS];
    uint64_t checksum;
} hybridi_header;

#define HYBRIDI_VERSION 1
#define HYBRIDI_HEADER_BYTES (16 + 8 * HYBRIDI_N_FIELDS + 8 + HYBRID_MAX_LAYERS + 8)
static const char hybridi_magic[9] = "KDASESSN";

/* Bytes of each matrix that count: so no more than a page of each is read. */
#define HYBRIDI_SAMPLE 64

/* Nothing where the matrix is absent. */
static uint64_t hybridi_sum_matrix(uint64_t sum, const linear *w) {
    size_t bytes = w->rows * linear_row_bytes(w->type, w->cols);
    size_t n = bytes < HYBRIDI_SAMPLE ? bytes : HYBRIDI_SAMPLE;
    return w->type ? hybridi_checksum(sum + w->type, w->data + (bytes - n) / 2, n) : sum;
}

static uint64_t hybridi_sum_layer(uint64_t sum, const hybrid_layer *layer) {
    const hybrid_kda *kda = &layer->kda;
    const mla_weights *mla = &layer->mla;
    const hybrid_moe *moe = &layer->moe;
    const hybrid_glu *units[] = {&layer->dense, &moe->shared, moe->experts};
    const linear *matrices[] = {
        &kda->q,   &kda->k, &kda->v,      &kda->f_a,         &kda->f_b,      &kda->b,    &kda->g_a,
        &kda->g_b, &kda->g, &kda->o,      &mla->q_a,         &mla->q,        &mla->kv_a, &mla->kv_b,
        &mla->g,   &mla->o, &moe->router, &moe->latent_down, &moe->latent_up};
    for (size_t i = 0; i < sizeof matrices / sizeof *matrices; i++)
        sum = hybridi_sum_matrix(sum, matrices[i]);
    for (size_t i = 0; i < sizeof units / sizeof *units; i++) {
        if (!units[i]) continue; /* of the experts the first one stands for all */
        sum = hybridi_sum_matrix(sum, &units[i]->gate);
        sum = hybridi_sum_matrix(sum, &units[i]->up);
        sum = hybridi_sum_matrix(sum, &units[i]->down);
    }
    return sum;
}

/* All norms and decays, and a sample of each matrix: training may leave the former as they are. */
static uint64_t hybridi_fingerprint(const hybrid_model *model) {
    uint64_t sum = hybridi_sum_matrix(model->n_vectors, &model->embed);
    sum = hybridi_sum_matrix(sum, &model->head);
    for (size_t i = 0; i < model->config.n_layers; i++)
        sum = hybridi_sum_layer(sum, &model->layers[i]);
    for (size_t i = 0; i < model->n_vectors; i++) {
        unsigned char bytes[4];
        hybridi_put_numbers(bytes, model->vectors + i, 1, 4);
        sum = hybridi_checksum(sum, bytes, sizeof bytes);
    }
    return sum;
}

/* What a file of this session says. */
static hybridi_header hybridi_header_of(const hybrid_session *session) {
    const hybrid_config *c = &session->model->config;
    hybridi_header header = {{c->n_layers, c->hidden_size, c->kda_heads, c->kda_head_dim,
                              c->conv_width, c->kv_lora_rank, c->qk_rope_head_dim,
                              (uint64_t)session->options.cache,
                              hybridi_fingerprint(session->model)},
                             session->n_tokens,
                             {0},
                             0};
    for (size_t i = 0; i < c->n_layers; i++) header.kinds[i] = c->is_kda[i] ? 1 : 2;
    return header;
}

/* Sets the checksum too. */
static void hybridi_put_header(hybridi_header *header, unsigned char *bytes) {
    unsigned char *at = bytes + 16;
    memcpy(bytes, hybridi_magic, 8);
    hybridi_put_u64(bytes + 8, HYBRIDI_VERSION);
    for (size_t i = 0; i < HYBRIDI_N_FIELDS; i++, at += 8) hybridi_put_u64(at, header->fields[i]);
    hybridi_put_u64(at, header->n_tokens);
    memcpy(at + 8, header->kinds, sizeof header->kinds);
    header->checksum = hybridi_checksum(0, bytes, HYBRIDI_HEADER_BYTES - 8);
    hybridi_put_u64(bytes + HYBRIDI_HEADER_BYTES - 8, header->checksum);
}

static bool hybridi_short(FILE *file, const char *path, error *e) {
    if (ferror(file)) return error_set(e, "%s: cannot read: %s", path, strerror(errno));
    return error_set(e, "%s: expected a saved session, found a part of one: the file is short",
                     path);
}

static bool hybridi_altered(const char *path, error *e) {
    return error_set(e, "%s: expected a saved session as it was written, found an altered one",
                     path);
}

static bool hybridi_read_header(FILE *file, const char *path, hybridi_header *header, error *e) {
    unsigned char bytes[HYBRIDI_HEADER_BYTES];
    const unsigned char *at = bytes + 16;
    size_t n = fread(bytes, 1, sizeof bytes, file);
    if (n < 16) return hybridi_short(file, path, e);
    if (memcmp(bytes, hybridi_magic, 8) != 0)
        return error_set(e, "%s: expected a saved session, found another kind of file", path);
    if (st_load_u64(bytes + 8) != HYBRIDI_VERSION)
        return error_set(e, "%s: expected version %d of the format, found %llu", path,
                         HYBRIDI_VERSION, (unsigned long long)st_load_u64(bytes + 8));
    if (n < sizeof bytes) return hybridi_short(file, path, e);
    for (size_t i = 0; i < HYBRIDI_N_FIELDS; i++, at += 8) header->fields[i] = st_load_u64(at);
    header->n_tokens = st_load_u64(at);
    memcpy(header->kinds, at + 8, sizeof header->kinds);
    header->checksum = hybridi_checksum(0, bytes, sizeof bytes - 8);
    return st_load_u64(bytes + sizeof bytes - 8) == header->checksum || hybridi_altered(path, e);
}

static const char *hybridi_cache_name(uint64_t type) {
    return linear_type_name(type <= LINEAR_BF16 ? (linear_type)type : (linear_type)0);
}

/* Is it a file for this session? */
static bool hybridi_match(const hybridi_header *found, const hybrid_session *session,
                          const char *path, error *e) {
    hybridi_header expected = hybridi_header_of(session);
    for (size_t i = 0; i < HYBRIDI_N_FIELDS; i++) {
        uint64_t want = expected.fields[i], have = found->fields[i];
        const char *name = hybridi_field_names[i];
        if (want == have) continue;
        if (i == HYBRIDI_CACHE_FIELD)
            return error_set(e, "%s: %s: expected %s, found %s", path, name,
                             hybridi_cache_name(want), hybridi_cache_name(have));
        if (i == HYBRIDI_WEIGHTS_FIELD)
            return error_set(e, "%s: %s: expected a session of this model, found one of another",
                             path, name);
        return error_set(e, "%s: %s: expected %llu by the model, found %llu", path, name,
                         (unsigned long long)want, (unsigned long long)have);
    }
    if (memcmp(found->kinds, expected.kinds, sizeof expected.kinds) != 0)
        return error_set(e, "%s: kinds of layers: expected the model's order, found another", path);
    if (found->n_tokens > session->options.capacity)
        return error_set(e, "%s: expected at most the session's %zu tokens, found %llu", path,
                         session->options.capacity, (unsigned long long)found->n_tokens);
    return true;
}

/* ---- Contents ---- */

typedef enum hybridi_direction { HYBRIDI_SAVE, HYBRIDI_CHECK, HYBRIDI_LOAD } hybridi_direction;

typedef struct hybridi_stream {
    hybridi_direction direction;
    output *out; /* HYBRIDI_SAVE */
    FILE *in;    /* the others */
    const char *path;
    uint64_t checksum;
    error *e;
} hybridi_stream;

/* Some numbers of a session to the file, from it, or, to check them, past. */
static bool hybridi_move(hybridi_stream *s, void *numbers, size_t count, size_t size) {
    unsigned char bytes[1 << 14];
    for (size_t first = 0, n; first < count; first += n) {
        unsigned char *at = (unsigned char *)numbers + first * size;
        n = count - first < sizeof bytes / size ? count - first : sizeof bytes / size;
        if (s->direction == HYBRIDI_SAVE) {
            hybridi_put_numbers(bytes, at, n, size);
            if (!output_bytes(s->out, bytes, n * size, s->e)) return false;
        } else if (fread(bytes, size, n, s->in) != n) {
            return hybridi_short(s->in, s->path, s->e);
        }
        s->checksum = hybridi_checksum(s->checksum, bytes, n * size);
        if (s->direction == HYBRIDI_LOAD) hybridi_get_numbers(at, bytes, n, size);
    }
    return true;
}

/* All that a session with n_tokens keeps, in the order of the file. */
static bool hybridi_move_all(hybridi_stream *s, const hybrid_session *session, size_t n_tokens) {
    const hybrid_config *c = &session->model->config;
    kda_layer_desc kda = hybridi_kda_desc(c, NULL);
    mla_desc mla = hybridi_mla_desc(c, session->options.cache);
    size_t latents = n_tokens * mla_cache_row_bytes(&mla); /* little-endian already */
    for (size_t i = 0; i < c->n_layers; i++) {
        const hybrid_memory *memory = &session->layers[i];
        bool ok = c->is_kda[i]
                      ? hybridi_move(s, memory->state, kda_state_bytes(&kda.op) / 4, 4) &&
                            hybridi_move(s, memory->window, kda_layer_window_bytes(&kda) / 4, 4)
                      : hybridi_move(s, memory->latents, latents, 1);
        if (!ok) return false;
    }
    return true;
}

/* ---- Calls ---- */

bool hybrid_session_save(const hybrid_session *session, const char *path, error *e) {
    unsigned char bytes[HYBRIDI_HEADER_BYTES];
    hybridi_header header = hybridi_header_of(session);
    output out;
    hybridi_put_header(&header, bytes);
    hybridi_stream s = {HYBRIDI_SAVE, &out, NULL, path, header.checksum, e};
    bool ok = output_open(&out, path, e) && output_bytes(&out, bytes, sizeof bytes, e) &&
              hybridi_move_all(&s, session, session->n_tokens);
    hybridi_put_u64(bytes, s.checksum);
    ok = ok && output_bytes(&out, bytes, 8, e);
    return output_close(&out, ok, e);
}

/* The contents are those that were written, and nothing follows. */
static bool hybridi_check_contents(hybridi_stream *s, const hybrid_session *session,
                                   size_t n_tokens) {
    unsigned char bytes[8];
    if (!hybridi_move_all(s, session, n_tokens)) return false;
    if (fread(bytes, 1, 8, s->in) != 8) return hybridi_short(s->in, s->path, s->e);
    if (getc(s->in) != EOF)
        return error_set(s->e, "%s: expected the end of the file after the session, found more",
                         s->path);
    return st_load_u64(bytes) == s->checksum || hybridi_altered(s->path, s->e);
}

static bool hybridi_load(hybrid_session *session, FILE *file, const char *path, error *e) {
    hybridi_header header;
    error unused;
    if (!hybridi_read_header(file, path, &header, e) || !hybridi_match(&header, session, path, e))
        return false;
    size_t n_tokens = (size_t)header.n_tokens;
    hybridi_stream s = {HYBRIDI_CHECK, NULL, file, path, header.checksum, e};
    if (!hybridi_check_contents(&s, session, n_tokens)) return false;
    if (fseek(file, HYBRIDI_HEADER_BYTES, SEEK_SET) != 0)
        return error_set(e, "%s: expected a file that can be read twice: %s", path,
                         strerror(errno));
    s.direction = HYBRIDI_LOAD;
    s.checksum = header.checksum;
    session->n_tokens = n_tokens;
    session->n_draft = 0;
    if (hybridi_check_contents(&s, session, n_tokens)) return true;
    hybrid_session_reset(session, &unused);
    return false;
}

static FILE *hybridi_open_saved(const char *path, error *e) {
    FILE *file = fopen(path, "rb");
    if (!file) error_set(e, "%s: cannot open: %s", path, strerror(errno));
    return file;
}

bool hybrid_session_load(hybrid_session *session, const char *path, error *e) {
    FILE *file = hybridi_open_saved(path, e);
    if (!file) return false;
    bool ok = hybridi_load(session, file, path, e);
    fclose(file);
    return ok;
}

bool hybrid_saved_tokens(const char *path, size_t *n_tokens, error *e) {
    hybridi_header header;
    FILE *file = hybridi_open_saved(path, e);
    if (!file) return false;
    bool ok = hybridi_read_header(file, path, &header, e);
    fclose(file);
    if (!ok) return false;
    if (header.n_tokens >= SIZE_MAX / 4)
        return error_set(e, "%s: expected fewer tokens, found %llu", path,
                         (unsigned long long)header.n_tokens);
    *n_tokens = (size_t)header.n_tokens;
    return true;
}

#endif
