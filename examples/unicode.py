#!/usr/bin/env python3
"""Writes unicode.h: the classes of characters that the tokenizer tells apart.

    python3 examples/unicode.py DIRECTORY >examples/unicode.h

DIRECTORY holds UnicodeData.txt and Scripts.txt of the Unicode Character Database.
"""
import os
import re
import sys

END = 0x110000

CLASSES = [
    ("OTHER", "none of the following; also what is not assigned"),
    ("SPACE", "White_Space"),
    ("NUMBER", "Nd, Nl, No, and not Han"),
    ("UPPER", "Lu, Lt"),
    ("LOWER", "Ll"),
    ("LETTER", "Lm, Lo, and not Han"),
    ("MARK", "Mn, Mc, Me, and not Han"),
    ("HAN", "Script=Han, and neither letter nor number"),
    ("HAN_NUMBER", "Script=Han, a number"),
    ("HAN_LETTER", "Script=Han, a letter"),
    ("UPPER_LOWER", "only in the table: UPPER where the code is even, else LOWER"),
    ("LOWER_UPPER", "only in the table: the other way round"),
]
INDEX = {name: i for i, (name, _) in enumerate(CLASSES)}


def read_categories(directory):
    """General_Category of each code point."""
    categories = ["Cn"] * END
    first = None
    with open(os.path.join(directory, "UnicodeData.txt"), encoding="utf-8") as file:
        for line in file:
            code, name, category = line.split(";")[:3]
            code = int(code, 16)
            if name.endswith(", First>"):
                first = code
                continue
            start = code if first is None else first
            first = None
            categories[start : code + 1] = [category] * (code + 1 - start)
    return categories


def read_han(directory):
    """Whether each code point is of the script Han, and the version of the database."""
    han = [False] * END
    with open(os.path.join(directory, "Scripts.txt"), encoding="utf-8") as file:
        version = re.match(r"# Scripts-(\d+\.\d+\.\d+)\.txt", file.readline()).group(1)
        for line in file:
            match = re.match(r"([0-9A-F]+)(?:\.\.([0-9A-F]+))?\s*;\s*Han\b", line)
            if match:
                start = int(match.group(1), 16)
                last = int(match.group(2) or match.group(1), 16)
                han[start : last + 1] = [True] * (last + 1 - start)
    return han, version


def class_of(code, category, han):
    if category[0] == "Z" or 0x09 <= code <= 0x0D or code == 0x85:
        return "SPACE"
    if han:
        return {"L": "HAN_LETTER", "N": "HAN_NUMBER"}.get(category[0], "HAN")
    if category[0] == "N":
        return "NUMBER"
    if category[0] == "M":
        return "MARK"
    by_category = {"Lu": "UPPER", "Lt": "UPPER", "Ll": "LOWER", "Lm": "LETTER", "Lo": "LETTER"}
    return by_category.get(category, "OTHER")


def ranges_of(classes):
    """[start, class] of each run, where letters that alternate in case make one."""
    runs = []
    for code, name in enumerate(classes):
        if runs and runs[-1][1] == name:
            continue
        if name in ("UPPER", "LOWER"):
            pair = "UPPER_LOWER" if (name == "UPPER") == (code % 2 == 0) else "LOWER_UPPER"
            if runs and runs[-1][1] == pair:
                continue
            other = "LOWER" if name == "UPPER" else "UPPER"
            if code + 1 < END and classes[code + 1] == other:
                name = pair
        runs.append([code, name])
    return runs


def expand(runs):
    classes = []
    for i, (start, name) in enumerate(runs):
        last = runs[i + 1][0] if i + 1 < len(runs) else END
        for code in range(start, last):
            if name == "UPPER_LOWER":
                classes.append("LOWER" if code % 2 else "UPPER")
            elif name == "LOWER_UPPER":
                classes.append("UPPER" if code % 2 else "LOWER")
            else:
                classes.append(name)
    return classes


def write(version, runs):
    print(f"""/* unicode.h - classes of characters: those that the tokenizer tells apart.
 *
 * Written by unicode.py from the Unicode Character Database, version {version}: edit that instead.
 */
#ifndef UNICODE_H
#define UNICODE_H

#include <stddef.h>
#include <stdint.h>

#define UNICODE_VERSION "{version}"
#define UNICODE_END 0x110000u

typedef enum unicode_class {{""")
    for i, (name, what) in enumerate(CLASSES):
        comma = "," if i + 1 < len(CLASSES) else ""
        print(f"    {'UNICODE_' + name + comma:20} /* {what} */")
    print("""} unicode_class;

/* Each number is the first code point of a run, times 16, plus the class of the run. */
/* clang-format off */
static const uint32_t unicode_runs[] = {""")
    line = "   "
    for i, (start, name) in enumerate(runs):
        item = f" 0x{start << 4 | INDEX[name]:x}" + ("," if i + 1 < len(runs) else "};")
        if len(line) + len(item) > 100:
            print(line)
            line = "   "
        line += item
    print(line)
    print("""/* clang-format on */

/* The class of a code point below UNICODE_END. */
static inline unicode_class unicode_class_of(uint32_t code) {
    /* The run that holds the code is in [low, high). */
    size_t low = 0, high = sizeof unicode_runs / sizeof *unicode_runs;
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (unicode_runs[middle] >> 4 <= code)
            low = middle;
        else
            high = middle;
    }
    unicode_class found = (unicode_class)(unicode_runs[low] & 15);
    if (found < UNICODE_UPPER_LOWER) return found;
    return (found == UNICODE_UPPER_LOWER) == (code % 2 == 0) ? UNICODE_UPPER : UNICODE_LOWER;
}

#endif""")


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: unicode.py DIRECTORY")
    categories = read_categories(sys.argv[1])
    han, version = read_han(sys.argv[1])
    classes = [class_of(code, categories[code], han[code]) for code in range(END)]
    runs = ranges_of(classes)
    if expand(runs) != classes:
        sys.exit("unicode.py: the runs do not give the classes back")
    write(version, runs)


main()
