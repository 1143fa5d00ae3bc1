#!/usr/bin/env python3
"""Trains the byte-level text model: 8 layers, 3 KDA to 1 MLA, about 2.9 M parameters.

    python3 examples/train/text.py --corpus build/corpus/ --out build/train/text-attnres --seed 1
    python3 examples/train/text.py --corpus build/corpus/ --out build/train/text-plain --seed 1 --plain

The two differ in the residuals alone: they see the same batches. A token is a byte. 2000 steps of 32
rows of 1024 bytes are 65.5 M tokens, 17 times the training text; dropout 0.2 is what keeps that from
being memorized. Rows of 512 would do for short windows, but then attention without positions gets
worse over 4096 bytes than it is over 512.

Every number at the end is of the exported model: f16 weights, float32 arithmetic.
"""
import argparse
import math

import torch
import torch.nn.functional as F

import corpus
import kda
import layout
import training


def parse_arguments():
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    training.add_arguments(arguments, 3e-3)
    arguments.add_argument("--corpus", required=True, help="directory of kjv.txt, or a file")
    arguments.add_argument("--eager", action="store_true", help="do not use torch.compile")
    arguments.add_argument("--plain", action="store_true", help="plain residuals")
    arguments.add_argument("--steps", type=int, default=2000)
    arguments.add_argument("--rows", type=int, default=32)
    arguments.add_argument("--length", type=int, default=1024)
    arguments.add_argument("--layers", default="kkkf" * 2)
    arguments.add_argument("--hidden", type=int, default=192)
    arguments.add_argument("--dropout", type=float, default=0.2)
    arguments.add_argument("--score", type=int, default=0,
                           help="bytes of val and test to score; 0: all")
    return arguments.parse_args()


def configuration(o):
    return kda.Config(o.layers, vocab_size=256, hidden_size=o.hidden,
                      intermediate_size=2 * o.hidden, kda_heads=4, kda_head_dim=32, n_heads=4,
                      qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, kv_lora_rank=64,
                      attn_res_block_size=0 if o.plain else 2)


def to_tensor(data, device):
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


class Batches:
    """Rows from random places. A step's batch depends on seed and step alone."""

    def __init__(self, data, rows, length, seed):
        self.data, self.rows, self.length, self.seed = data, rows, length, seed
        self.generator = torch.Generator()
        self.offsets = torch.arange(length + 1, device=data.device)

    def __call__(self, step):
        self.generator.manual_seed(1000003 * self.seed + step)
        places = torch.randint(0, len(self.data) - self.length, (self.rows, 1),
                               generator=self.generator)
        rows = self.data[places.to(self.data.device) + self.offsets].long()
        return rows[:, :-1], rows[:, 1:]


def bits_per_byte(model, data, window, stride):
    """Bytes 1 .. of data, each once, in windows that start `stride` apart and score their last
    `stride` bytes (the first one all). Byte 0 has nothing before it and is not scored."""
    device, n = data.device, len(data)
    starts = [0]
    while starts[-1] + window + 1 < n:
        starts.append(starts[-1] + stride)
    total, scored, at_once = 0.0, 0, max(1, 65536 // window)
    place = torch.arange(window + 1, device=device)
    for first in range(0, len(starts), at_once):
        start = torch.tensor(starts[first:first + at_once], device=device)[:, None]
        rows = data[(start + place).clamp(max=n - 1)].long()
        with torch.no_grad():
            logits = model(rows[:, :-1])
        bits = F.cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none") / math.log(2)
        target = start + place[1:]
        mine = (target < n) & ((start == 0) | (place[1:] > window - stride))
        total += bits[mine].double().sum().item()
        scored += int(mine.sum().item())
    if scored != n - 1:
        raise AssertionError("%d bytes scored of %d" % (scored, n - 1))
    return total / scored


def sum_growth(model, data):
    """RMS of the running sum after each layer, and how much the last is above the first. With
    Attention Residuals the sum starts anew with each block, so it is taken where blocks end."""
    n = min(32, len(data) // 512)
    rows = data[:512 * n].reshape(n, 512).long()
    sums = []
    with torch.no_grad():
        model(rows, sums)
    rms = [x.square().mean().sqrt().item() for x in sums[1:]]
    block = model.config.attn_res_block_size
    ends = rms[block - 1::block] if block else rms
    return [round(x, 3) for x in rms], round(ends[-1] / ends[0], 2)


def evaluate(o, device, splits):
    torch.set_float32_matmul_precision("highest")
    model = layout.load(o.out, device)
    result = {"seed": o.seed, "residuals": "plain" if o.plain else "attnres",
              "tokens": o.steps * o.rows * o.length}
    for name, data in splits:
        for window, stride in ((512, 256), (4096, 2048)):
            bits = bits_per_byte(model, data, window, stride)
            result["%s_%d" % (name, window)] = round(bits, 4)
    result["rms_by_layer"], result["growth"] = sum_growth(model, splits[0][1])
    return result


def main():
    o = parse_arguments()
    name = "text-" + ("plain" if o.plain else "attnres")
    if training.finished(o):
        training.say(name, "is complete")
        return
    device = training.start_device()
    train, val, test = (to_tensor(part, device) for part in corpus.split(o.corpus))
    if o.score:
        val, test = val[:o.score], test[:o.score]
    if device == "cuda" and not o.eager:
        kda.compile_layers()
    torch.manual_seed(o.seed)
    model = kda.Model(configuration(o), o.dropout).to(device)
    optimizer = training.Optimizer(model)
    run = training.Run(name, o, model, optimizer)
    training.say(name, "%d parameters, %s" % (kda.n_parameters(model), vars(o)))
    batch = Batches(train, o.rows, o.length, o.seed)
    step = training.Step(model, optimizer, o.rows, o.length, not o.no_graph)
    model.train()
    while run.step < o.steps:
        rate = 0.02 + 0.98 * (0.5 + 0.5 * math.cos(math.pi * run.step / o.steps))
        x, y = batch(run.step)
        step(x, y, o.lr * training.warm_up(run.step) * rate)
        run.after_step(step, o.steps, log_every=100, save_every=250)
        if run.step % 500 == 0 and run.step < o.steps:
            model.eval()
            training.say(name, "val %.4f bits a byte" % bits_per_byte(model, val, 512, 256))
            model.train()
    layout.export(model, o.out)
    run.finish(evaluate(o, device, (("val", val), ("test", test))))


if __name__ == "__main__":
    main()
