#!/usr/bin/env python3
"""What counting does on the same text: a byte n-gram with Witten-Bell backoff.

    python3 examples/train/ngram.py --corpus build/corpus/ [--order 5]

With c(b) the times that byte b followed a context in the training text, s their sum and t the
number of different bytes that did:

    p(b | context) = (c(b) + t p(b | context shortened by its first byte)) / (s + t)

and 1 / 256 below the empty context. Contexts have up to order - 1 bytes. As in text.py, byte 0 of
a split is not scored.
"""
import argparse
import math

import corpus


def count(data, order):
    """For each context length: context to (byte to count, sum of counts)."""
    tables = []
    for length in range(order):
        table = {}
        for i in range(length, len(data)):
            follows = table.setdefault(data[i - length:i], {})
            follows[data[i]] = follows.get(data[i], 0) + 1
        tables.append({context: (f, sum(f.values())) for context, f in table.items()})
    return tables


def bits_per_byte(tables, data):
    total = 0.0
    for i in range(1, len(data)):
        p = 1 / 256
        for length in range(min(len(tables), i + 1)):
            entry = tables[length].get(data[i - length:i])
            if entry is None:
                break  # nor has a longer context been seen
            follows, seen = entry
            p = (follows.get(data[i], 0) + len(follows) * p) / (seen + len(follows))
        total -= math.log2(p)
    return total / (len(data) - 1)


def main():
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("--corpus", required=True, help="directory of kjv.txt, or a file")
    arguments.add_argument("--order", type=int, default=5)
    o = arguments.parse_args()
    train, val, test = corpus.split(o.corpus)
    tables = count(train, o.order)
    print("%d-gram, Witten-Bell: val %.4f, test %.4f bits a byte" % (
        o.order, bits_per_byte(tables, val), bits_per_byte(tables, test)))


if __name__ == "__main__":
    main()
