#!/usr/bin/env python3
"""Lines and branches that a run of the tests reached, from what gcc --coverage left in a directory.

    python3 tests/coverage.py build/coverage

All code is in headers that many programs include: a line is reached if any program reached it, and a
branch if any program took it in the same function. Lines that no program compiled (another
instruction set, another system) are not counted. What a test ends by a signal leaves no counts.
Lines that were not reached are listed with their text, but for those that EXPLAINED has a reason for.
"""
import argparse
import collections
import glob
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

# (file, function, part of the line, why no test counts it); an empty text stands for any.
EXPLAINED = [
    ("kda.h", "", "return &kdai_kernels_avx2", "of machines without AVX-512"),
    ("attnres.h", "", "return &attnresi_kernels_avx2", "of machines without AVX-512"),
    ("examples/kernels.h", "kernels_bf16_of", "", "of builds without AVX512-BF16"),
    ("examples/signals.h", "", "", "ends the process; test_driver_faults runs it"),
    ("examples/output.h", "output_abandon", "", "ends the process; test_driver_faults runs it"),
    ("examples/safetensors.h", "", "cannot be examined", "fstat of a file that was just opened"),
    ("examples/safetensors.h", "", "larger than this build can address", "of 32-bit builds"),
    ("examples/json.h", "", "return jsoni_out_of_memory(p);", "more items than 64 bits count"),
    ("examples/json.h", "", "errno == ENOENT", "a file that goes between two calls"),
    ("examples/chat.c", "", "forget(c, &unused)", "a file that changes between two readings"),
    ("examples/hybrid.h", "hybrid_session_open", "hybrid_session_close", "a reset of what was checked"),
    ("examples/hybrid.h", "hybrid_session_open", "return false", "a reset of what was checked"),
    ("examples/hybrid.h", "hybrid_commit", "return false", "a commit of what was verified"),
    ("examples/memory.c", "run_kda", "", "a call that is always the same"),
    ("examples/generate.c", "generate_single", "return false", "a forward of an id that the model chose"),
    ("examples/recall.c", "ask", "return false", "a forward of ids that the model knows"),
]


def reason(name, function, text):
    for file, of, part, why in EXPLAINED:
        if file == name and of in ("", function) and part in text:
            return why
    return None


def read(path):
    """What gcov says about one object: a list of files. Counts that a signal cut short say nothing."""
    run = subprocess.run(["gcov", "--json-format", "--stdout", "--branch-probabilities", path],
                         capture_output=True)
    if run.returncode != 0:
        print("%s: left out: %s" % (path, run.stderr.decode().strip()), file=sys.stderr)
        return []
    return [f for line in run.stdout.splitlines() if line for f in json.loads(line)["files"]]


def shown(path):
    """A path of this repository's own code, or None."""
    name = os.path.relpath(os.path.normpath(path))
    top = name in ("kda.h", "attnres.h")
    return name if top or name.startswith("examples" + os.sep) else None


def collect(directory):
    lines = collections.defaultdict(dict)  # file -> line -> reached
    branches = collections.defaultdict(dict)  # file -> (function, line, place) -> taken
    functions = {}  # (file, line) -> function
    counts = [f for part in ("*.gcda", "tests/*.gcda") for f in glob.glob(os.path.join(directory, part))]
    if not counts:
        sys.exit(f"{directory}: expected counts (*.gcda) of a run, found none")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for files in pool.map(read, counts):
            for f in files:
                name = shown(f["file"])
                if not name:
                    continue
                for line in f["lines"]:
                    n, reached = line["line_number"], line["count"] > 0
                    functions[name, n] = line.get("function_name")
                    lines[name][n] = lines[name].get(n, False) or reached
                    for place, branch in enumerate(line["branches"]):
                        key = (line.get("function_name"), n, place)
                        branches[name][key] = branches[name].get(key, False) or branch["count"] > 0
    return lines, branches, functions


def share(values):
    return f"{sum(values):6} of {len(values):6} {100 * sum(values) / max(len(values), 1):6.1f}%"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("directory")
    lines, branches, functions = collect(parser.parse_args().directory)
    print(f"{'':28} {'lines':>16}            branches")
    for name in sorted(lines):
        print(f"{name:28} {share(lines[name].values())}   {share(branches[name].values())}")
    every = [[v for of in table.values() for v in of.values()] for table in (lines, branches)]
    print(f"{'all':28} {share(every[0])}   {share(every[1])}")
    explained = 0
    for name in sorted(lines):
        text = open(name, encoding="utf-8").read().splitlines()
        for n in sorted(n for n, reached in lines[name].items() if not reached):
            if reason(name, functions[name, n], text[n - 1]):
                explained += 1
            else:
                print(f"not reached: {name}:{n}: {text[n - 1].strip()}")
    print(f"not reached and explained in tests/coverage.py: {explained} lines")


if __name__ == "__main__":
    main()
