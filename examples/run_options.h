/* run_options.h - the options of a program about how a model runs: threads, instruction set, cache,
 * weights in memory.
 *
 * Every function is static.
 */
#ifndef RUN_OPTIONS_H
#define RUN_OPTIONS_H

#include "arguments.h"
#include "hybrid.h"
#include "parallel.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

typedef struct run_options {
    size_t threads;
    linear_type cache; /* numbers of the latent cache */
    kda_isa isa;
    bool bf16_dots;
    bool prefault, lock; /* weights into memory, and kept there */
} run_options;

static bool run_optionsi_isa(const char *name, const char *text, void *place, error *e) {
    for (int isa = KDA_ISA_AUTO; isa <= KDA_ISA_NEON; isa++)
        if (strcmp(text, kda_isa_name((kda_isa)isa)) == 0) {
            *(kda_isa *)place = (kda_isa)isa;
            return true;
        }
    return error_set(e, "%s: expected auto, scalar, avx2, avx512 or neon, found \"%.40s\"", name,
                     text);
}

static bool run_optionsi_cache(const char *name, const char *text, void *place, error *e) {
    linear_type type = (linear_type)0;
    if (!linear_type_of(text, &type) || !linear_is_plain(type))
        return error_set(e, "%s: expected f32, f16 or bf16, found \"%.40s\"", name, text);
    *(linear_type *)place = type;
    return true;
}

/* Rows of a program's table of arguments: `type` is its options, which have run_options as `how`.
 * Then the help text about them. */
#define RUN_ARGUMENTS(type)                                                                        \
    {"--threads", ARGUMENT_SIZE, offsetof(type, how.threads), 1, PARALLEL_MAX_THREADS, NULL},      \
        {"--cache", ARGUMENT_OTHER, offsetof(type, how.cache), 0, 0, run_optionsi_cache},          \
        {"--bf16-dots", ARGUMENT_FLAG, offsetof(type, how.bf16_dots), 0, 0, NULL},                 \
        {"--prefault", ARGUMENT_FLAG, offsetof(type, how.prefault), 0, 0, NULL},                   \
        {"--lock", ARGUMENT_FLAG, offsetof(type, how.lock), 0, 0, NULL}, {                         \
        "--isa", ARGUMENT_OTHER, offsetof(type, how.isa), 0, 0, run_optionsi_isa                   \
    }

#define RUN_HELP                                                                                   \
    "  --threads N         at least 1 (default: one a processor, at most 32); results do\n"        \
    "                      not depend on it\n"                                                     \
    "  --cache TYPE        f32, f16 or bf16: numbers of the latent cache of full attention\n"      \
    "                      (default f32); the others take half the memory and round\n"             \
    "  --bf16-dots         with --cache bf16, round queries and weights of full attention\n"       \
    "                      to bf16 too, where the processor multiplies such numbers\n"             \
    "  --prefault          read all weights from disk before the first token\n"                    \
    "  --lock              and keep them in memory: an error where the system forbids it\n"        \
    "  --isa NAME          auto, scalar, avx2, avx512 or neon: which kernels run (default:\n"      \
    "                      $KDA_ISA, or auto)\n"

static inline bool run_options_default(run_options *how, error *e) {
    const char *isa = getenv("KDA_ISA");
    memset(how, 0, sizeof *how);
    how->threads = parallel_default();
    how->cache = LINEAR_F32;
    return !isa || run_optionsi_isa("KDA_ISA", isa, &how->isa, e);
}

/* Opens a model, and brings its weights into memory if that is wanted. */
static inline bool run_options_open(const run_options *how, hybrid_model *model,
                                    const char *directory, error *e) {
    if (!hybrid_open(model, directory, e)) return false;
    if (how->prefault || how->lock) st_prefault(&model->checkpoint);
    if (!how->lock || st_lock(&model->checkpoint, e)) return true;
    hybrid_close(model);
    return false;
}

/* Sets how a model's calls run, in the threads of an open pool. */
static inline bool run_options_apply(const run_options *how, const hybrid_model *model,
                                     parallel *pool, linear_run *run, error *e) {
    run->isa = how->isa;
    run->pool = pool;
    run->bf16_dots = how->bf16_dots;
    return !how->bf16_dots || hybrid_has_bf16_dots(model, how->cache, run) ||
           error_set(e,
                     "--bf16-dots: expected --cache bf16, a processor with AVX512-BF16 and "
                     "latents in whole steps of %d",
                     LINEAR_BF16_STEP);
}

#endif
