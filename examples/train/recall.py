#!/usr/bin/env python3
"""Trains the recall models: what was the value of this key?

    python3 examples/train/recall.py --out build/train/recall-hybrid --seed 1
    python3 examples/train/recall.py --out build/train/recall-kda --seed 1 --kda-only

A sequence of N pairs (multi-query associative recall):

    k1 v1 k2 v2 ... kN vN SEPARATOR k v k v ...      4 N + 1 tokens

After the separator every key comes once, in random order, followed by its value, and the model is
to say the value when it has read the key. The N keys are distinct; values may repeat. Vocabulary:

    0           padding, never in a sequence but behind its end
    1           SEPARATOR
    2 .. 129    128 values
    130 .. 511  382 keys

Accuracy counts queries whose most likely token, of all 512, is the value. Guessing the value of a pair
not yet asked for finds that pair with (1 + 1/2 + ... + 1/N) / N, which is printed beside it; that
values repeat adds less than 1/128.

Both models have 4 layers, width 128, heads 4 x 16 and about 460,000 parameters: four layers of KDA,
or three and one of full attention (MLA, no rotation). They train for the same steps. Sequences
start short, at most 7 pairs, and grow to 127 pairs: a run that starts long stays for thousands of
steps where it only knows which values are still unused.
"""
import argparse

import torch

import kda
import layout
import training

PADDING, SEPARATOR = 0, 1
FIRST_VALUE, N_VALUES = 2, 128
FIRST_KEY, VOCABULARY = 130, 512
N_KEYS = VOCABULARY - FIRST_KEY

# Tokens of a row, tokens of a batch, steps.
PHASES = ((32, 16384, 400), (64, 16384, 400), (128, 16384, 400), (256, 32768, 500),
          (512, 32768, 1000))
EVALUATED = (8, 16, 32, 64, 127, 128, 256, 381)


def parse_arguments():
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    training.add_arguments(arguments, 3e-3)
    arguments.add_argument("--kda-only", action="store_true", help="no layer of full attention")
    arguments.add_argument("--tiny", action="store_true",
                           help="a few small steps, to see that everything runs")
    return arguments.parse_args()


def configuration(o):
    return kda.Config("kkkk" if o.kda_only else "kkkf", vocab_size=VOCABULARY, hidden_size=128,
                      intermediate_size=96, kda_heads=4, kda_head_dim=16, n_heads=4,
                      qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16, kv_lora_rank=32)


def sequences(pairs, T, generator):
    """pairs [B] to (x, y) [B, T]: the tokens, and the value to say or training.IGNORED."""
    B, most, device = len(pairs), int((T - 1) // 4), pairs.device

    def uniform(*shape):
        return torch.rand(*shape, device=device, generator=generator)

    keys = uniform(B, N_KEYS).argsort(1)[:, :most] + FIRST_KEY
    values = FIRST_VALUE + torch.randint(0, N_VALUES, (B, most), device=device, generator=generator)
    n = pairs[:, None]
    # Each row's first n pairs in random order, the others behind them.
    order = (uniform(B, most) + 2.0 * (torch.arange(most, device=device) >= n)).argsort(1)
    place = torch.arange(T, device=device).expand(B, T)
    shown = (place // 2).clamp(max=most - 1)
    asked_place = place - 2 * n - 1
    asked = order.gather(1, (asked_place // 2).clamp(0, most - 1))
    in_pairs, in_queries = place < 2 * n, (asked_place >= 0) & (asked_place < 2 * n)
    pick = torch.where(in_pairs, shown, asked)
    is_key = torch.where(in_pairs, place, asked_place) % 2 == 0
    x = torch.where(is_key, keys.gather(1, pick), values.gather(1, pick))
    x = torch.where(in_pairs | in_queries, x, torch.full_like(x, PADDING))
    x = torch.where(place == 2 * n, torch.full_like(x, SEPARATOR), x)
    y = torch.where(in_queries & is_key, values.gather(1, pick),
                    torch.full_like(x, training.IGNORED))
    return x, y


def mixed_pairs(B, T, device, generator):
    """Pairs of each row, up to T / 4: half of the rows uniform, half uniform by their logarithm."""
    most, least = (T - 1) // 4, 2 if T == 32 else 4
    u, coin = (torch.rand(B, device=device, generator=generator) for _ in range(2))
    pairs = torch.where(coin < 0.5, least + u * (most - least + 1), least * (most / least) ** u)
    return pairs.long().clamp(least, most)


def chance(n):
    return sum(1.0 / i for i in range(1, n + 1)) / n


def accuracy(model, n, device, queries=8192):
    """Of at least so many queries, in sequences of n pairs that no training step has seen."""
    generator = torch.Generator(device=device)
    generator.manual_seed(987654321 + n)
    T, right, asked = 4 * n + 1, 0, 0
    while asked < queries:
        rows = max(1, min(32768 // T, -(-queries // n)))
        x, y = sequences(torch.full((rows,), n, device=device), T, generator)
        with torch.no_grad():
            said = model(x).argmax(-1)
        mine = y != training.IGNORED
        right += int((said[mine] == y[mine]).sum().item())
        asked += int(mine.sum().item())
    return right / asked


def table(model, device, counts, queries=8192):
    return {n: round(accuracy(model, n, device, queries), 4) for n in counts}


def phase_of(step, phases):
    for phase in phases:
        if step < phase[2]:
            return phase
        step -= phase[2]
    raise AssertionError("a step behind the last phase")


def learning_rate(step, total):
    """Constant, then from 60 % of the steps on linearly to 0."""
    return training.warm_up(step) * min(1.0, (1 - step / total) / 0.4)


def train(run, o, phases, device):
    model, total, step, phase = run.model, sum(p[2] for p in phases), None, None
    generator = torch.Generator(device=device)
    model.train()
    while run.step < total:
        if phase_of(run.step, phases) is not phase:
            phase = phase_of(run.step, phases)
            T, tokens, _ = phase
            step = training.Step(model, run.optimizer, tokens // T, T, not o.no_graph)
        generator.manual_seed(1000003 * o.seed + run.step)
        pairs = mixed_pairs(tokens // T, T, device, generator)
        x, y = sequences(pairs, T, generator)
        step(x, y, o.lr * learning_rate(run.step, total))
        run.after_step(step, total, log_every=100, save_every=500)


def main():
    o = parse_arguments()
    name = "recall-%s seed %d" % ("kda" if o.kda_only else "hybrid", o.seed)
    if training.finished(o):
        training.say(name, "is complete")
        return
    device = training.start_device()
    torch.manual_seed(o.seed)
    model = kda.Model(configuration(o)).to(device)
    run = training.Run(name, o, model, training.Optimizer(model))
    training.say(name, "%d parameters, %s" % (kda.n_parameters(model), vars(o)))
    train(run, o, ((32, 64, 6), (64, 128, 6)) if o.tiny else PHASES, device)
    layout.export(model, o.out)
    torch.set_float32_matmul_precision("highest")
    counts = (8, 16) if o.tiny else EVALUATED
    found = table(layout.load(o.out, device), device, counts, 64 if o.tiny else 8192)
    for n, share in found.items():
        training.say(name, "%3d pairs: accuracy %.4f, chance %.3f" % (n, share, chance(n)))
    run.finish({"seed": o.seed, "accuracy": found})


if __name__ == "__main__":
    main()
