#!/usr/bin/env python3
"""Do the tests see faults?  make mutants  (or: python3 tests/mutants.py --help)

Makes copies of kda.h and attnres.h with one fault each and runs the tests on every copy until one
fails, which kills the mutant. Named mutants are faults that software of this kind has had or could
have; random ones change an operator, a constant or a condition anywhere in the code that this
machine runs, or drop a statement. A survivor is a hole in the tests, unless it is among SPARED,
with the reason why nothing can see it.

Exit status: 0 if every mutant was killed or spared, 1 if one survived, 2 if one does not apply.
"""
import argparse
import collections
import concurrent.futures
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# Header: the tests that know it, those that kill most and build fastest first.
TESTS = {
    "kda.h": "golden isa kda layer parts types math saved speculation args faults threads guard "
             "long hybrid sessions",
    "attnres.h": "attnres attnres_isa golden types threads guard hybrid sessions",
}
FLAGS = "-O1 -w -DKDA_NO_AVX512 -DATTNRES_NO_AVX512"
# What the plain tests let pass is tried with these too, as .ci/run does with everything.
SANITIZERS = " -fsanitize=address,undefined -fno-sanitize-recover=all"

# (header, name, what is there once, what stands there in the mutant)
NAMED = [
    # Scratch.
    ("kda.h", "scratch: the bias as it lies there", "    memset(work->bias, 0, stride * sizeof(float));\n",
     ""),
    ("kda.h", "scratch: values and outputs overlap", "work->v_block = kdai_take_floats(&arena, KDA_CHUNK * KDAI_ROWS);",
     "work->v_block = kdai_take_floats(&arena, KDA_CHUNK + KDAI_ROWS);"),
    ("kda.h", "a commit of windows counts no tokens",
     "    size_t n_tokens;\n    kda_result result = kdai_check_conv_desc(desc);\n"
     "    if (result == KDA_OK) result = kdai_check_run(run);\n"
     "    if (result == KDA_OK) result = kdai_count_tokens(seqs, n_seqs, &n_tokens);\n",
     "    kda_result result = kdai_check_conv_desc(desc);\n"
     "    if (result == KDA_OK) result = kdai_check_run(run);\n"),
    # What is not asked for.
    ("kda.h", "plain C: keys are normalised unasked", "    if (in->desc->flags & KDA_L2_NORM_QK) {\n        q_factor",
     "    {\n        q_factor"),
    ("kda.h", "plain C: a convolution has SiLU unasked", "block->silu ? sum * kda_sigmoid(sum) : sum);",
     "sum * kda_sigmoid(sum));"),
    ("kda.h", "a row may end beyond all memory", " || dim > most - by_token - by_head)", ")"),
    ("kda.h", "a copy to a state that cannot be one",
     "    if (result == KDA_OK) result = kdai_check_state(desc, to);\n", ""),
    ("attnres.h", "wide sources by blocks of no token", "attnresi_min(even, ATTNRESI_TOKENS), fit ? fit : 1)",
     "attnresi_min(even, ATTNRESI_TOKENS), fit)"),
    # The recurrence.
    ("kda.h", "plain C: the state does not decay", "kdai_fma(k[d], u, s[d] * decay[d])",
     "kdai_fma(k[d], u, s[d])"),
    ("kda.h", "plain C: the correction is subtracted", "kdai_fma(k[d], u, s[d] * decay[d])",
     "kdai_fma(-k[d], u, s[d] * decay[d])"),
    ("kda.h", "plain C: values pile up, nothing is corrected",
     "work->beta[i] * (kdai_value_row(work, i)[r] - a)", "work->beta[i] * kdai_value_row(work, i)[r]"),
    ("kda.h", "plain C: beta is forgotten", "float u = work->beta[i] * (kdai_value_row",
     "float u = (kdai_value_row"),
    ("kda.h", "plain C: beta of the token before", "float u = work->beta[i] * (kdai_value_row",
     "float u = work->beta[i ? i - 1 : 0] * (kdai_value_row"),
    ("kda.h", "plain C: the output before the write", "[r] = kdai_fma(work->kq[i], u, b);", "[r] = b;"),
    ("kda.h", "plain C: read with the key before its decay",
     "float a = kdai_dot(s, work->k_seen + row, dim);", "float a = kdai_dot(s, work->k + row, dim);"),
    ("kda.h", "plain C: query and key swapped in the read",
     "float b = kdai_dot(s, work->q_seen + row, dim);",
     "float b = kdai_dot(s, work->k_seen + row, dim);"),
    ("kda.h", "vectors: the state does not decay", "KDAI_(mul)(KDAI_(read_state)(s1, d, in_f16), e)",
     "KDAI_(read_state)(s1, d, in_f16)"),
    ("kda.h", "vectors: the wrong row is written", "KDAI_(write_state)(s2, d, in_f16, x2)",
     "KDAI_(write_state)(s2, d, in_f16, x3)"),
    ("kda.h", "vectors: nothing is corrected", "work->beta[i] * (v[row[r]] - sums[r])",
     "work->beta[i] * v[row[r]]"),
    ("kda.h", "vectors: the sum of another row", "work->beta[i] * (v[row[r]] - sums[r])",
     "work->beta[i] * (v[row[r]] - sums[r ^ 1])"),
    ("kda.h", "vectors: the output of the correction is lost",
     "o[row[r]] = kdai_fma(work->kq[i], write[r], sums[4 + r]);", "o[row[r]] = sums[4 + r];"),
    ("kda.h", "vectors: the last rows read past the end",
     "row[r] = first + r < rows ? first + r : rows - 1;", "row[r] = first + r;"),
    ("kda.h", "vectors: padding is not cleared after an infinite correction",
     "for (size_t r = 0; work->dim != n && r < 4; r++)", "for (size_t r = 0; 0 && r < 4; r++)"),
    # Gates, betas, norms.
    ("kda.h", "plain C: a positive log-decay grows the state",
     "return raw > 0.0f ? 0.0f : raw;", "return raw;"),
    ("kda.h", "plain C: the softplus gate has the other sign", "return -(a * kda_softplus(z));",
     "return a * kda_softplus(z);"),
    ("kda.h", "plain C: dt_bias is forgotten", "float z = raw + bias;", "float z = raw;"),
    ("kda.h", "plain C: the bounded gate without A_log",
     "return desc->lower_bound * kda_sigmoid(a * z);",
     "return desc->lower_bound * kda_sigmoid(z);"),
    ("kda.h", "plain C: the bounded gate as a clamp of the other",
     "return desc->lower_bound * kda_sigmoid(a * z);",
     "return fmaxf(desc->lower_bound, -(a * kda_softplus(z)));"),
    ("kda.h", "vectors: a positive log-decay grows the state",
     "return KDAI_(two_min)(KDAI_(two_set)(0.0f), x);", "return x;"),
    ("kda.h", "vectors: dt_bias is forgotten", "x = KDAI_(two_add)(x, bias);", "(void)bias;"),
    ("kda.h", "A_log for its exponential",
     "return kdai_exp(A_log[head] > 88.0f ? 88.0f : A_log[head]);", "return A_log[head];"),
    ("kda.h", "A_log is not kept finite",
     "return kdai_exp(A_log[head] > 88.0f ? 88.0f : A_log[head]);", "return kdai_exp(A_log[head]);"),
    ("kda.h", "A_log of the first head", "in.a = kdai_rate(args->A_log, head);",
     "in.a = kdai_rate(args->A_log, 0);"),
    ("kda.h", "dt_bias per head, not per channel", "args->dt_bias + head * dim, dim * sizeof(float)",
     "args->dt_bias + head, dim * sizeof(float)"),
    ("kda.h", "beta is not doubled", "(desc->beta == KDA_BETA_LOGIT_DOUBLED ? 2.0f : 1.0f)", "1.0f"),
    ("kda.h", "a beta that is one already is squashed",
     "if (desc->beta == KDA_BETA_VALUE) return x;", ""),
    ("kda.h", "plain C: the query is scaled twice", "q[d] = in->q[d] * q_factor * in->scale;",
     "q[d] = in->q[d] * q_factor * in->scale * in->scale;"),
    ("kda.h", "plain C: keys are not normalised", "k[d] = in->k[d] * k_factor;", "k[d] = in->k[d];"),
    ("kda.h", "plain C: keys by the norm of queries",
     "k_factor = kdai_inverse_norm(kdai_dot(in->k, in->k, n)",
     "k_factor = kdai_inverse_norm(kdai_dot(in->q, in->q, n)"),
    ("kda.h", "the default scale of another width", "1.0f / sqrtf((float)dim) : desc->scale",
     "1.0f / sqrtf((float)stride) : desc->scale"),
    ("kda.h", "head maps swapped", "desc->head_map == KDA_HEADS_TILED ? head % n",
     "desc->head_map != KDA_HEADS_TILED ? head % n"),
    ("kda.h", "the gate of the key's head", "in.g = kdai_padded_row(kernels, args->g, token + i, head,",
     "in.g = kdai_padded_row(kernels, args->g, token + i, qk_head,"),
    # Chunks.
    ("kda.h", "plain C chunk: the triangle without beta",
     "work->A[i * KDA_CHUNK + j] = work->beta[i] * kdai_dot(work->k + i * dim, left, dim);",
     "work->A[i * KDA_CHUNK + j] = kdai_dot(work->k + i * dim, left, dim);"),
    ("kda.h", "plain C chunk: corrections of later tokens too", "for (size_t j = 0; j < i; j++)\n            sum = kdai_fma(-work->A",
     "for (size_t j = 0; j <= i; j++)\n            sum = kdai_fma(-work->A"),
    ("kda.h", "plain C chunk: a token does not see its own write",
     "for (size_t j = 0; j <= i; j++)\n            sum = kdai_fma(work->P",
     "for (size_t j = 0; j < i; j++)\n            sum = kdai_fma(work->P"),
    ("kda.h", "plain C chunk: the state does not decay",
     "for (size_t d = 0; d < dim; d++) s[d] *= work->total[d];", ""),
    ("kda.h", "plain C chunk: decay of the chunk's last row but one",
     "for (size_t i = j + 1; i < n; i++) {\n            for (size_t d = 0; d < dim; d++) left[d]",
     "for (size_t i = j + 1; i + 1 < n; i++) {\n            for (size_t d = 0; d < dim; d++) left[d]"),
    ("kda.h", "vectors chunk: an odd last token decays twice", "if (next != i) x = KDAI_(mul)(x,",
     "if (1) x = KDAI_(mul)(x,"),
    ("kda.h", "vectors chunk: the triangle without beta",
     "work->A[next * KDA_CHUNK + j] = work->beta[next] * sums[2];",
     "work->A[next * KDA_CHUNK + j] = sums[2];"),
    ("kda.h", "vectors chunk: total starts with the second token",
     "KDAI_WIDE total = KDAI_(set)(1.0f);\n        for (size_t i = 0; i < n_tokens; i++) {",
     "KDAI_WIDE total = KDAI_(set)(1.0f);\n        for (size_t i = 1; i < n_tokens; i++) {"),
    ("kda.h", "chunks overlap by a token",
     "size_t n = span->n_tokens - done < KDA_CHUNK ? span->n_tokens - done : KDA_CHUNK;\n        size_t token = span->token + done;\n        kdai_prepare(op->kernels, op->desc, op->args, tile->head, token, n, work);\n        op->kernels->chunk_prepare(work, n);",
     "size_t n = span->n_tokens - done < KDA_CHUNK ? span->n_tokens - done : KDA_CHUNK;\n        size_t token = span->token + (done ? done - 1 : 0);\n        kdai_prepare(op->kernels, op->desc, op->args, tile->head, token, n, work);\n        op->kernels->chunk_prepare(work, n);"),
    # Convolution.
    ("kda.h", "plain C: taps in the other order", "kdai_fma(block->taps[i * stride + c], rows[i * stride + c], sum)",
     "kdai_fma(block->taps[(block->width - 1 - i) * stride + c], rows[i * stride + c], sum)"),
    ("kda.h", "plain C: no activation", "block->silu ? sum * kda_sigmoid(sum) : sum);", "sum);"),
    ("kda.h", "vectors: two taps swapped",
     "KDAI_WIDE tap1 = KDAI_(hold)(KDAI_(read)(taps + stride));",
     "KDAI_WIDE tap1 = KDAI_(hold)(KDAI_(read)(taps + 2 * stride));"),
    ("kda.h", "the window is not kept",
     "memcpy(window + i * desc->channels, block.rows + i * block.padded, block.n * sizeof(float));",
     ";"),
    ("kda.h", "the window moves on by a token too many", "size_t from = i + tokens;",
     "size_t from = i + tokens + 1;"),
    # Sequences, files.
    ("kda.h", "the first state for all sequences",
     "(const float *)v.data + t * v.token_stride + h * v.head_stride + column",
     "(const float *)v.data + t * v.token_stride + h * v.head_stride"),
    ("kda.h", "a checksum that misses a byte",
     "static uint64_t kdai_blob_checksum(const unsigned char *blob, size_t bytes) {",
     "static uint64_t kdai_blob_checksum(const unsigned char *blob, size_t bytes) {\n    bytes -= bytes > 8;"),
    # Attention Residuals.
    ("attnres.h", "the scale is forgotten", "score = attnresi_scale(desc) * dot * inv_rms;",
     "score = dot * inv_rms;"),
    ("attnres.h", "keys are not normalised", "score = attnresi_scale(desc) * dot * inv_rms;",
     "score = attnresi_scale(desc) * dot;"),
    ("attnres.h", "the maximum passes over the last source",
     "for (size_t j = 1; j < n; j++)\n        if (scores[j] > largest)",
     "for (size_t j = 1; j + 1 < n; j++)\n        if (scores[j] > largest)"),
    ("attnres.h", "the sum passes over the first source",
     "for (size_t j = 0; j < n; j++) sum += weights[j];",
     "for (size_t j = 1; j < n; j++) sum += weights[j];"),
    ("attnres.h", "weights are not divided by their sum",
     "for (size_t j = 0; j < n; j++) work.weights[j] /= sum;", "(void)sum;"),
    ("attnres.h", "one source: no norm of the output",
     "if (call->norm.weight) {", "if (call->norm.weight && rows->n > 1) {"),
    ("attnres.h", "the merge forgets the stored sum",
     "float sum = attnresi_fma(weights[0], args->sum[token], weights[1]);",
     "float sum = weights[0] + weights[1];"),
    ("attnres.h", "the merge without a maximum", "max = score > stored ? score : stored;",
     "max = stored;"),
    ("attnres.h", "the merge swaps what it mixes", "weights[0] = (float)(stored - max);",
     "weights[0] = (float)(score - max);"),
    ("attnres.h", "blocks by sub-layers where layers are meant",
     "return sublayer % 2 == 0 && sublayer / 2 % desc->block_size == 0;",
     "return sublayer % desc->block_size == 0;"),
    ("attnres.h", "the output begins a block", "if (sublayer == 2 * desc->n_layers) return 0;", ""),
    ("attnres.h", "a block's last sum goes on into the next", "bank->n_blocks++;\n    bank->has_partial = 0;",
     "bank->n_blocks++;"),
    ("attnres.h", "a short last block has no room",
     "return units / desc->block_size + (units % desc->block_size != 0);",
     "return units / desc->block_size;"),
    ("attnres.h", "cached inverse norms of the block before", "bank->inv_rms + bank->n_blocks * bank->n_tokens;",
     "bank->inv_rms;"),
    ("attnres.h", "the output's block sees one source too few",
     "args.n_sources = bank->n_blocks + 1;", "args.n_sources = bank->n_blocks + (bank->n_blocks == 0);"),
    ("attnres.h", "cached values of another token", "cached ? cached + t : NULL);",
     "cached ? cached + first : NULL);"),
    ("attnres.h", "plain C: the first row is counted twice",
     "for (size_t l = 0; j > 0 && l < some; l++)", "for (size_t l = 0; l < some; l++)"),
]

# Random mutants that nothing can see: header, a part of the line, why.
SPARED = [
    ("kda.h", "if ((i + 1) + KDAI_LANES > n) {", "a whole vector element by element: the same"),
    ("kda.h", "if (n - (i + 1) > KDAI_LANES) KDAI_(write)", "n and i are multiples of KDAI_LANES"),
    ("kda.h", "tile->n - row <= 4 ?", "4 either way"),
    ("kda.h", "for (size_t j = 0; j <= n; j++) {",
     "one key more is prepared than is used, in scratch that is written before it is read"),
    ("kda.h", ">= KDAI_MAX_BYTES - *n_tokens) return KDA_ERR_SIZE",
     "as many tokens as bytes that a machine can have: their rows are refused"),
    ("kda.h", "while (kdai_workers(run) >= 1 && op->tiles", "how work is cut changes no bit"),
    ("kda.h", "if (piece.n_tokens == 0) break; -> ;", "a piece of no tokens does nothing"),
    ("kda.h", "if (piece.token > KDAI_LAYER_ROWS) break;", "no room is left: a piece of no tokens"),
    ("kda.h", "A_log[head] >= 88.0f ?", "88 either way"),
    ("kda.h", "block->n - c >= 4; c += 3)", "some taps are copied twice"),
    ("kda.h", "return raw >= 0.0f ? 0.0f : raw", "0 either way"),
    ("kda.h", "size_t rows = row > tile->n ? 0", "0 either way"),
    ("kda.h", "t <= piece->n_tokens; t += KDAI_ROW_TOKENS", "rows of no tokens"),
    ("kda.h", "memset(&rows, 1, sizeof rows)", "what other kernels use, these do not read"),
    ("kda.h", "span->n_tokens + done - n", "how far ahead is asked for changes no bit"),
    ("attnres.h", "if (dot || !wide) {", "sums that wide ones replace"),
    ("attnres.h", "k <= dim && k - i < ATTNRESI_RUN", "no lanes more"),
    ("attnres.h", "n - (i + 1) >= ATTNRESI_PAIR", "the last pair one by one: the same"),
    ("attnres.h", "if (n > ATTNRESI_LANES) return", "a whole vector element by element: the same"),
    ("attnres.h", "memset(&call, 1, sizeof call);", "what other calls use, this one does not read"),
]

# What stands in a line of code, and what may stand there instead.
SWAPS = [(r" \+ ", " - "), (r" - ", " + "), (r" \* ", " + "), (r" / ", " * "), (r" < ", " <= "),
         (r" <= ", " < "), (r" > ", " >= "), (r" >= ", " > "), (r" == ", " != "), (r" != ", " == "),
         (r" && ", " || "), (r" \|\| ", " && "), (r" \+= ", " -= "), (r" \*= ", " += "),
         (r"\+ 1\b", "+ 2"), (r"- 1\b", "- 0"), (r"\b0\b", "1"), (r"\b4\b", "3"),
         (r"if \((.*)\) ", r"if (!(\1)) "), (r"\bi\b", "(i + 1)"), (r"\bfirst\b", "0"),
         (r"^( +)(?!return|const|size_t|float|double|int|for|if|else|case|KDAI_W|KDAI_T|memset)[^=;]*[=(][^;]*;$",
          r"\1;")]


def code_lines(text):
    """Numbers of the lines that are statements which a GNU compiler builds for this machine and
    its AVX2: not comments, declarations of the interface, other machines' parts, or texts."""
    inside_comment = started = False
    conditions = []  # of each #if around: its text, and whether its part is left out
    for number, line in enumerate(text.split("\n")):
        if line.startswith("#if"):
            started = started or "_IMPLEMENTATION" in line
            conditions.append([line, bool(re.search("NEON|_MSC_VER|AVX512|BROAD == 2", line))])
        elif line.startswith("#else"):
            of, left_out = conditions[-1]
            conditions[-1][1] = not left_out and "defined(__GNUC__)" in of
        elif line.startswith("#elif"):
            conditions[-1] = [line, bool(re.search("NEON|_MSC_VER", line))]
        elif line.startswith("#endif"):
            conditions.pop()
        comment = "/*" in line
        if started and not any(out for _, out in conditions) and not inside_comment and not comment and \
                line.startswith("    ") and not line.endswith("\\") and \
                not re.search(r'"|prefetch|FETCH|_mm512|\(void\)|KDAI_BOTH|cpuid|AVX512', line):
            yield number
        if comment or inside_comment:
            inside_comment = "*/" not in line


def random_mutants(count, seed):
    draw = random.Random(seed)
    all_of_them = []
    for header in TESTS:
        text = open(os.path.join(ROOT, header)).read()
        lines = text.split("\n")
        for number in code_lines(text):
            for pattern, other in SWAPS:
                for match in re.finditer(pattern, lines[number]):
                    changed = lines[number][:match.start()] + match.expand(other) + \
                        lines[number][match.end():]
                    if changed != lines[number]:
                        all_of_them.append((header, number, lines[number], changed))
    draw.shuffle(all_of_them)
    for header, number, line, changed in all_of_them[:count]:
        yield header, "line %d: %s -> %s" % (number + 1, line.strip(), changed.strip()), \
            (number, changed)


def apply(header, change):
    text = open(os.path.join(ROOT, header)).read()
    if isinstance(change[0], int):
        lines = text.split("\n")
        lines[change[0]] = change[1]
        return "\n".join(lines)
    if text.count(change[0]) != 1:
        sys.exit("mutants: %s: the mutant does not apply, its text is there %d times:\n%s"
                 % (header, text.count(change[0]), change[0]))
    return text.replace(change[0], change[1])


def run_tests(directory, header, flags, seconds):
    """What kills the mutant in this directory, or None."""
    folder = "sanitized" if SANITIZERS in flags else "plain"
    for test in TESTS[header].split():
        program = folder + "/tests/test_" + test
        build = subprocess.run(["make", "-s", "-j1", "BUILD=" + folder, "CFLAGS=" + flags, program],
                               cwd=directory, capture_output=True)
        if build.returncode != 0:
            return "does not compile"
        try:
            run = subprocess.run([program], cwd=directory, capture_output=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            return "killed by test_%s, which did not end" % test
        if run.returncode != 0:
            return "killed by test_%s" % test
    return None


def try_mutant(mutant, flags, seconds):
    """'killed by ...', 'does not compile', 'spared, ...' or 'SURVIVED'."""
    header, name, change = mutant
    with tempfile.TemporaryDirectory() as directory:
        for entry in ("Makefile", *TESTS):
            shutil.copy(os.path.join(ROOT, entry), directory)
        with open(os.path.join(directory, header), "w") as file:
            file.write(apply(header, change))
        for folder in ("tests", "examples"):
            os.mkdir(os.path.join(directory, folder))
            for entry in os.listdir(os.path.join(ROOT, folder)):
                path = os.path.join(ROOT, folder, entry)
                if os.path.isdir(path):
                    os.symlink(path, os.path.join(directory, folder, entry))
                elif entry.endswith((".c", ".h")):
                    shutil.copy(path, os.path.join(directory, folder))
        answer = run_tests(directory, header, flags, seconds)
        why = next((why for of, part, why in SPARED if of == header and part in name), None)
        if not answer and not why:
            answer = run_tests(directory, header, flags + SANITIZERS, 3 * seconds)
            answer = answer and answer + " with sanitizers"
    return answer or ("spared: " + why if why else "SURVIVED")


def main():
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("--random", type=int, default=60, help="random mutants (default 60)")
    arguments.add_argument("--seed", type=int, default=1, help="of their choice (default 1)")
    arguments.add_argument("--only", default="", help="only mutants with this in their name")
    arguments.add_argument("--jobs", type=int, default=os.cpu_count())
    arguments.add_argument("--seconds", type=int, default=300, help="a test may take (default 300)")
    arguments.add_argument("--flags", default=FLAGS, help="of the compiler")
    given = arguments.parse_args()
    mutants = [(h, n, (old, new)) for h, n, old, new in NAMED]
    mutants += list(random_mutants(given.random, given.seed))
    mutants = [m for m in mutants if given.only in m[1]]
    for mutant in mutants:
        apply(mutant[0], mutant[2])
    counts = collections.Counter()
    with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        runs = {pool.submit(try_mutant, m, given.flags, given.seconds): m for m in mutants}
        for run in concurrent.futures.as_completed(runs):
            mutant, answer = runs[run], run.result()
            counts[re.match(r"\w+", answer).group()] += 1
            print("%s: %s: %s" % (mutant[0], mutant[1], answer), flush=True)
    print("%d mutants: %d killed, %d survived, %d spared, %d do not compile" %
          (len(mutants), counts["killed"], counts["SURVIVED"], counts["spared"], counts["does"]))
    return 1 if counts["SURVIVED"] else 0


if __name__ == "__main__":
    sys.exit(main())
