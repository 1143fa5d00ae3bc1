#!/usr/bin/env python3
"""Compares the C driver with PyTorch on a model directory: logits, and running sums of the layers.

    python3 examples/train/check.py MODEL_DIR [--tokens N] [--program build/generate]

Both compute in float32 from the same file; PyTorch over chunks, the driver also token by token
(--split 1). Fails if the relative L2 difference of either is above the bound.
"""
import argparse
import os
import subprocess
import sys
import tempfile

import torch

import layout

BOUND = 1e-4


def floats(path, offset=0):
    with open(path, "rb") as file:
        return torch.frombuffer(bytearray(file.read()[offset:]), dtype=torch.float32)


def run_driver(program, directory, ids, extra):
    """(logits [T, vocab], running sums [layers + 1, T, hidden]) of the C driver."""
    with tempfile.TemporaryDirectory() as scratch:
        logits, dump = os.path.join(scratch, "logits"), os.path.join(scratch, "dump")
        text = " ".join(str(i) for i in ids.reshape(-1).tolist()).encode()
        subprocess.run([program, directory, "--tokens", "-", "--logits", logits, "--dump-layers",
                        dump] + extra, input=text, check=True, stderr=subprocess.DEVNULL)
        return floats(logits), layout.read_safetensors(dump)["hidden"]


def main():
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("model")
    arguments.add_argument("--tokens", type=int, default=200)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--program", default="build/generate")
    o = arguments.parse_args()
    model = layout.load(o.model)
    torch.manual_seed(o.seed)
    ids = torch.randint(0, model.config.vocab_size, (1, o.tokens))
    sums = []
    with torch.no_grad():
        logits = model(ids, sums)[0]
    sums = torch.stack([x[0, :o.tokens] for x in sums])
    good = True
    for extra in ([], ["--split", "1"]):
        found, hidden = run_driver(o.program, o.model, ids, extra)
        errors = [layout.kda.relative(found.reshape(logits.shape), logits),
                  layout.kda.relative(hidden, sums)]
        largest = (found.reshape(logits.shape) - logits).abs().max().item()
        good = good and all(e <= BOUND for e in errors)
        print("%s%s: %d tokens, relative difference of logits %.1e (largest %.1e), of sums %.1e" % (
            o.model, " " + " ".join(extra) if extra else "", o.tokens, errors[0], largest,
            errors[1]))
    if not good:
        sys.exit("%s: the driver and PyTorch differ by more than %g" % (o.model, BOUND))


if __name__ == "__main__":
    main()
