#!/usr/bin/env python3
"""Lines and branches that a run of the tests reached, from what gcc --coverage left in a directory.

    python3 tests/coverage.py build/coverage [--list FILE]

All code is in headers that many programs include: a line is reached if any program reached it, and a
branch if any program took it in the same function. Lines that no program compiled (another
instruction set, another system) are not counted. With --list, the lines of FILE that were not
reached, with their text. What a test ends by a signal leaves no counts.
"""
import argparse
import collections
import glob
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor


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
    counts = glob.glob(os.path.join(directory, "**", "*.gcda"), recursive=True)
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
                    lines[name][n] = lines[name].get(n, False) or reached
                    for place, branch in enumerate(line["branches"]):
                        key = (line.get("function_name"), n, place)
                        branches[name][key] = branches[name].get(key, False) or branch["count"] > 0
    return lines, branches


def share(values):
    return f"{sum(values):6} of {len(values):6} {100 * sum(values) / max(len(values), 1):6.1f}%"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--list", metavar="FILE")
    arguments = parser.parse_args()
    lines, branches = collect(arguments.directory)
    if arguments.list:
        text = open(arguments.list, encoding="utf-8").read().splitlines()
        for n, reached in sorted(lines[os.path.normpath(arguments.list)].items()):
            if not reached:
                print(f"{arguments.list}:{n}: {text[n - 1].strip()}")
        return
    print(f"{'':28} {'lines':>16}            branches")
    for name in sorted(lines):
        print(f"{name:28} {share(lines[name].values())}   {share(branches[name].values())}")
    every = [[v for of in table.values() for v in of.values()] for table in (lines, branches)]
    print(f"{'all':28} {share(every[0])}   {share(every[1])}")


if __name__ == "__main__":
    main()
