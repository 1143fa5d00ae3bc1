#!/usr/bin/env python3
"""The training text: the King James Version as Debian packages it.

    apt-get install bible-kjv-text bible-kjv
    python3 examples/train/corpus.py build/corpus/

writes build/corpus/kjv.txt: one verse a line behind its number, chapters under a heading such as
"Genesis 1", leading blanks removed. `split` cuts it into

    train   everything but
    val     The Acts
    test    Hebrews to Revelation

Licence, as Debian's copyright file of the package states it: the copyright of the text has
expired; the retrieval program is "provided for unrestricted use", with later parts under GPL 2 or
later. Only the text is used here, and it is not in the repository.
"""
import hashlib
import os
import subprocess
import sys


def text(path):
    """The bytes of kjv.txt in a directory, or of a file."""
    if os.path.isdir(path):
        path = os.path.join(path, "kjv.txt")
    with open(path, "rb") as file:
        return file.read()


def split(path):
    """(train, val, test) as bytes."""
    whole = text(path)
    places = []
    for heading in (b"\nActs 1\n", b"\nRomans 1\n", b"\nHebrews 1\n"):
        if whole.count(heading) != 1:
            sys.exit("%s: expected one heading %r, found %d" % (path, heading, whole.count(heading)))
        places.append(whole.index(heading) + 1)
    acts, romans, hebrews = places
    return whole[:acts] + whole[romans:hebrews], whole[acts:romans], whole[hebrews:]


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: corpus.py DIRECTORY")
    os.makedirs(sys.argv[1], exist_ok=True)
    raw = subprocess.run(["bible", "-l100000", "Gen1:1-Rev22:21"], check=True,
                         stdout=subprocess.PIPE).stdout
    whole = b"\n".join(line.lstrip() for line in raw.split(b"\n")).lstrip()
    with open(os.path.join(sys.argv[1], "kjv.txt"), "wb") as file:
        file.write(whole)
    print("kjv.txt %d bytes, sha256 %s" % (len(whole), hashlib.sha256(whole).hexdigest()))
    for name, part in zip(("train", "val", "test"), split(sys.argv[1])):
        print("%s %d bytes" % (name, len(part)))


if __name__ == "__main__":
    main()
