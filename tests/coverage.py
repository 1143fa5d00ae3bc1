#!/usr/bin/env python3
"""Lines and branches that a run of the tests reached, from clang's coverage of the programs in a directory.

    python3 tests/coverage.py build/coverage

All code is in headers that many programs include: a line is reached if any program reached it. A
branch is one outcome, true or false, of one condition: each operand of && and || has two. Lines that
no program compiled (another instruction set, another system) are not counted. What was not reached is
listed, but for what EXPLAINED has a reason for. The exit status is 1 if anything is listed.
"""
import argparse
import collections
import glob
import json
import os
import subprocess
import sys

# (file, function, part of the line or of the condition, why); an empty text stands for any.
EXPLAINED = [
    ("kda.h", "kdai_cpu_features", "", "of other processors"),
    ("kda.h", "kdai_find_best", "", "of other processors"),
    ("kda.h", "kdai_kernels_of", "best->isa", "of other processors"),
    ("kda.h", "kdai_parallel", "", "of builds with OpenMP"),
    ("kda.h", "kdai_sum", "a > KDAI_MAX_BYTES", "first terms are products, sums and checked sizes"),
    ("attnres.h", "attnresi_cpu_features", "", "of other processors"),
    ("attnres.h", "attnresi_find_best", "", "of other processors"),
    ("attnres.h", "attnresi_kernels_of", "best->isa", "of other processors"),
    ("attnres.h", "attnresi_parallel", "", "of builds with OpenMP"),
    ("examples/arguments.h", "argumentsi_value", "ARGUMENT_FLAG", "a flag has no value"),
    ("examples/arguments.h", "argumentsi_value", "return false;", "a flag has no value"),
    ("examples/chat.c", "read_on", "hybrid_forward(", "ids and a capacity that were checked"),
    ("examples/chat.c", "", "read_on(c, ", "ids and a capacity that were checked"),
    ("examples/chat.c", "take_turn", "ok", "ids and a capacity that were checked"),
    ("examples/chat.c", "load", "c->session.n_tokens != before", "a file that changes between two readings"),
    ("examples/chat.c", "read_input", "interrupts == before", "of other signals only a SIGBUS from outside returns"),
    ("examples/generate.c", "", "hybrid_forward(", "ids and a capacity that were checked"),
    ("examples/generate.c", "generate_single", "return false", "ids and a capacity that were checked"),
    ("examples/generate.c", "generate_drafting", "hybrid_verify(", "a draft of known ids, within the capacity"),
    ("examples/generate.c", "generate_drafting", "hybrid_commit(", "a commit of what was verified"),
    ("examples/generate.c", "prepare_session", "hybrid_session_fill(", "as many tokens as the session was opened for"),
    ("examples/generate.c", "allocate", "a <= most / b", "more bytes than 63 bits count"),
    ("examples/hybrid.h", "hybrid_session_open", "hybrid_session_close", "a reset of what was checked"),
    ("examples/hybrid.h", "hybrid_session_open", "return false", "a reset of what was checked"),
    ("examples/hybrid.h", "hybrid_session_open", "hybrid_session_reset(session, e)", "a reset of what was checked"),
    ("examples/hybrid.h", "hybridi_check_workspace", "!attnres_isa_is_available", "of builds that leave a set out of one library alone"),
    ("examples/hybrid.h", "hybrid_workspace_open", "!ok", "attnres_bank_init of a size that attnres_bank_bytes gave"),
    ("examples/hybrid.h", "hybridi_layer_forward", "!hybridi_add(", "attnres_bank_add after a read that went well, of an output in the workspace"),
    ("examples/json.h", "", "return jsoni_out_of_memory(p);", "more items than 64 bits count"),
    ("examples/json.h", "json_read_file", "errno == ENOENT", "a file that goes between two calls"),
    ("examples/json.h", "jsoni_allocate", "padded", "of 32-bit builds"),
    ("examples/json.h", "", "SIZE_MAX", "of 32-bit builds"),
    ("examples/kernels.h", "kernels_bf16_of", "", "of builds without AVX512-BF16"),
    ("examples/memory.c", "run_kda", "", "a call that is always the same"),
    ("examples/output.h", "output_abandon", "", "ends the process; test_driver_faults runs it"),
    ("examples/plan.h", "plan_available_memory", "fgets(", "of Linux before 3.14, without MemAvailable"),
    ("examples/plan.h", "plani_fits", "b > 0", "a workspace outgrows addresses after the session does"),
    ("examples/quantize.c", "write_index", "write_text(&out, e, ", "fewer bytes than a stream's buffer holds"),
    ("examples/quantize.c", "write_config", "path", "a path shorter than those just written to"),
    ("examples/recall.c", "ask", "return false", "ids that the model knows, within its capacity"),
    ("examples/recall.c", "accuracy", "ask(", "ids that the model knows, within its capacity"),
    ("examples/safetensors.h", "", "larger than this build can address", "of 32-bit builds"),
    ("examples/safetensors.h", "sti_map", "cannot be examined", "fstat of a file that was just opened"),
    ("examples/safetensors.h", "sti_map", "fstat(descriptor", "fstat of a file that was just opened"),
    ("examples/safetensors.h", "sti_map", "status.st_size", "of 32-bit builds, and of a size below 0, which no regular file has"),
    ("examples/safetensors.h", "sti_read_shape", "(size_t)dim != dim", "of 32-bit builds"),
    ("examples/safetensors_write.h", "sti_writer_reserve", "room <= SIZE_MAX / 2", "a header of half the address space"),
    ("examples/safetensors_write.h", "sti_writer_reserve", "room - w->length < more", "a header of half the address space"),
    ("examples/saved.h", "hybrid_session_save", "output_bytes(&out, bytes, ", "so few bytes stay in the stream's buffer: a full disk is told by a later call"),
    ("examples/signals.h", "", "", "ends the process; test_driver_faults runs it"),
    ("examples/speculative.c", "zeroed", "bytes > 0", "sizes that are always the same"),
    ("examples/speculative.c", "must", "", "calls that are always the same"),
    ("examples/speculative.c", "main", "same", "0 would be a fault of kda.h"),
    ("", "", "time > 0", "a clock that stands still, or is set back"),
    ("", "", "evaluator_re", "ids that the model knows, within its capacity"),
]

# What says in a line what is wrong, and is false for the caller to return.
ERRORS = ("error_set(", "hybridi_altered(", "jsoni_expected(", "jsoni_fail(", "jsoni_out_of_memory(",
          "quantizationi_expected(", "sti_fail(", "sti_out_of_memory(", "tokenizeri_expected(",
          "tokenizeri_fail(", "tokenizeri_out_of_memory(")


def explained(name, function, text):
    return any(file in ("", name) and of in ("", function) and part in text
               for file, of, part, why in EXPLAINED)


def programs(directory):
    found = glob.glob(os.path.join(directory, "*")) + glob.glob(os.path.join(directory, "tests", "*"))
    return sorted(p for p in found if os.path.isfile(p) and os.access(p, os.X_OK))


def export(profile, objects, *flags):
    command = ["llvm-cov", "export", "-instr-profile", profile, *flags, objects[0]]
    for other in objects[1:]:
        command += ["-object", other]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def own(path):
    """The name of a file of this repository's headers or programs, or None."""
    name = os.path.relpath(path)
    return name if name in ("kda.h", "attnres.h") or name.startswith("examples" + os.sep) else None


def read_lines(text):
    """lcov's records: file -> line -> reached."""
    lines, name = collections.defaultdict(dict), None
    for record in text.splitlines():
        kind, _, rest = record.partition(":")
        if kind == "SF":
            name = own(rest)
        elif kind == "DA" and name:
            line, count = (int(x) for x in rest.split(",")[:2])
            lines[name][line] = lines[name].get(line, False) or count > 0
    return lines


def read_functions(text):
    """file -> (line, column, last line, last column) -> [true, false] taken; and the function of each line."""
    branches = collections.defaultdict(lambda: collections.defaultdict(lambda: [False, False]))
    functions = {}
    for f in json.loads(text)["data"][0]["functions"]:
        bare = f["name"].split(":")[-1]
        for first, _, last, _, _, file, _, kind in f["regions"]:
            name = own(f["filenames"][file])
            if name and kind == 0:
                functions.update(((name, line), bare) for line in range(first, last + 1))
        for *place, true, false, file, _, _ in f["branches"]:
            name = own(f["filenames"][file])
            if name:
                outcome = branches[name][tuple(place)]
                outcome[0], outcome[1] = outcome[0] or true > 0, outcome[1] or false > 0
    return branches, functions


def share(values):
    values = list(values)
    return f"{sum(values):6} of {len(values):6} {100 * sum(values) / max(len(values), 1):6.1f}%"


def condition(source, place):
    first, column, last, end = place
    lines = source[first - 1:last]
    lines[-1] = lines[-1][:end - 1]
    lines[0] = lines[0][column - 1:]
    return " ".join(line.strip() for line in lines)


def is_one_way(text, line, true):
    """A call that returns false always, or the operand of a switch over all values of an enum."""
    return not true and (text.startswith(ERRORS) or f"switch ({text}) {{" in line)


def not_reached(name, lines, branches, functions):
    """(line, function, what it says) of lines, and of conditions that always went the same way."""
    source = open(name, encoding="utf-8").read().splitlines()
    for n, reached in lines.items():
        if not reached:
            yield n, functions.get((name, n), ""), source[n - 1].strip(), source[n - 1].strip()
    for place, (true, false) in branches.items():
        text = condition(source, place)
        if true != false and not is_one_way(text, source[place[0] - 1], true):
            yield place[0], functions.get((name, place[0]), ""), text, \
                f"never {'false' if true else 'true'}: {text}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("directory")
    directory = parser.parse_args().directory
    profile, objects = os.path.join(directory, "all.profdata"), programs(directory)
    counts = glob.glob(os.path.join(directory, "*.profraw"))
    if not counts or not objects:
        sys.exit(f"{directory}: expected programs and counts (*.profraw) of their runs, found none")
    subprocess.run(["llvm-profdata", "merge", "-sparse", *counts, "-o", profile], check=True)
    lines = read_lines(export(profile, objects, "-format=lcov"))
    branches, functions = read_functions(export(profile, objects))
    print(f"{'':28} {'lines':>16}            branches")
    for name in sorted(lines):
        outcomes = [x for pair in branches[name].values() for x in pair]
        print(f"{name:28} {share(lines[name].values())}   {share(outcomes)}")
    print(f"{'all':28} {share(x for of in lines.values() for x in of.values())}   "
          f"{share(x for of in branches.values() for pair in of.values() for x in pair)}")
    known = listed = 0
    for name in sorted(lines):
        for n, function, text, shown in sorted(not_reached(name, lines[name], branches[name], functions)):
            if explained(name, function, text):
                known += 1
            else:
                listed += 1
                print(f"{name}:{n}: {function}: {shown}")
    print(f"{listed} not reached; {known} more are explained in tests/coverage.py")
    sys.exit(listed > 0)


if __name__ == "__main__":
    main()
