#!/usr/bin/env python3
"""Runs everything on one GPU, within a limit of time, and packs what is finished.

    python3 examples/train/run_all.py --corpus build/corpus/ --work build/train --out DIRECTORY

At the same time: the check of the operator, the n-gram, both text models, and both recall models,
each with the next seed until one meets its target. Processes share the GPU, so that one computes
while another compiles. Before the limit, runs that are not finished save a checkpoint in --work, and
the same command goes on from there. In --out:

    models.tar.gz   NAME/config.json, NAME/model.safetensors, NAME/result.json for the finished of
                    text-attnres, text-plain, recall-hybrid, recall-kda
    train.log       what all of them printed
    state.tar.00 .. only if something is unfinished: what another machine needs to go on,
                    cat state.tar.* | tar x -C build/train

Exit status: 0 if all is done and meets the targets, 3 if something is unfinished, 1 if something
failed.
"""
import argparse
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
UNFINISHED = 3
GRACE = 45  # seconds that a process has after the limit, to evaluate and to save
SILENCE = 240  # seconds without a line after which a process counts as stuck
PART = 15 << 20
SEEDS = (1, 2, 3)
TINY_TEXT = ("--steps 20 --rows 2 --length 64 --layers kf --hidden 64 --score 1100").split()

# What a recall model must reach: pairs to accuracy.
TARGETS = {"recall-hybrid": {"8": 0.99, "128": 0.995, "256": 0.99}, "recall-kda": {"8": 0.99}}


class Log:
    def __init__(self, path):
        self.file, self.lock = open(path, "a"), threading.Lock()

    def line(self, text):
        with self.lock:
            print(text, flush=True)
            self.file.write(text + "\n")
            self.file.flush()

    def say(self, text):
        self.line("%s run_all: %s" % (time.strftime("%H:%M:%S"), text))


class Runner:
    def __init__(self, o, log):
        self.o, self.log, self.until = o, log, time.time() + o.seconds
        self.status = {}  # name to 0, 1 or UNFINISHED

    def process(self, name, command):
        """Runs one command, its lines to the log; its exit status. Kills it when it is stuck or
        has not stopped by itself."""
        child = subprocess.Popen([sys.executable, "-u"] + command, stdout=subprocess.PIPE,
                                 stderr=subprocess.STDOUT, text=True, errors="replace",
                                 start_new_session=True)
        heard = [time.time()]

        def listen():
            for line in child.stdout:
                heard[0] = time.time()
                self.log.line(line.rstrip("\n"))

        listener = threading.Thread(target=listen, daemon=True)
        listener.start()
        why = ""
        while child.poll() is None:
            time.sleep(0.2)
            if time.time() > self.until + GRACE:
                why = "did not stop at the limit"
            elif time.time() > heard[0] + SILENCE:
                why = "said nothing for %d s" % SILENCE
            if why:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        listener.join(5)
        if why:
            self.log.say("%s %s and was killed" % (name, why))
        return UNFINISHED if why.startswith("did not") else child.returncode

    def run(self, name, command, fallbacks=()):
        """Runs a command; where it fails, again with the options of each fallback."""
        status = 1
        for extra in ((),) + tuple(fallbacks):
            if time.time() > self.until:
                return UNFINISHED
            status = self.process(name, [os.path.join(HERE, command[0])] + command[1:] + list(extra))
            if status in (0, UNFINISHED):
                return status
            self.log.say("%s %s: exit status %s" % (name, " ".join(extra), status))
        return 1

    def training(self, script, directory, options, fallbacks):
        command = [script, "--out", os.path.join(self.o.work, directory), "--until", str(self.until)]
        return self.run(directory, command + options, fallbacks)

    def text(self, name):
        options = ["--corpus", self.o.corpus, "--seed", str(SEEDS[0])]
        options += ["--plain"] if name == "text-plain" else []
        options += TINY_TEXT if self.o.tiny else []
        return self.training("text.py", name, options, (["--eager"], ["--eager", "--no-graph"]))

    def recall(self, name):
        options = ["--kda-only"] if name == "recall-kda" else []
        options += ["--tiny"] if self.o.tiny else []
        for seed in SEEDS:
            directory = "%s-seed%d" % (name, seed)
            status = self.training("recall.py", directory, options + ["--seed", str(seed)],
                                   (["--no-graph"],))
            if status != 0:
                return status
            if self.o.tiny or meets(self.o.work, name, directory):
                return 0
        self.log.say("%s: no seed meets the target" % name)
        return 1

    def jobs(self):
        return {
            "check": lambda: self.run("check", ["kda.py", "--check"]),
            "ngram": lambda: self.run("ngram", ["ngram.py", "--corpus", self.o.corpus]),
            "recall-hybrid": lambda: self.recall("recall-hybrid"),
            "recall-kda": lambda: self.recall("recall-kda"),
            "text-attnres": lambda: self.text("text-attnres"),
            "text-plain": lambda: self.text("text-plain"),
        }

    def start(self, name, job):
        def work():
            try:
                self.status[name] = job()
            except Exception as exception:
                self.log.say("%s: %r" % (name, exception))
                self.status[name] = 1

        thread = threading.Thread(target=work)
        thread.start()
        return thread


def result_of(work, directory):
    try:
        with open(os.path.join(work, directory, "result.json")) as file:
            return json.load(file)
    except OSError:
        return None


def meets(work, name, directory):
    result = result_of(work, directory)
    return result is not None and all(
        result["accuracy"].get(n, 0) >= least for n, least in TARGETS[name].items())


def best_seed(work, name):
    """The directory of the first seed that meets the target, or else the best one; or None."""
    found = []
    for seed in SEEDS:
        directory = "%s-seed%d" % (name, seed)
        result = result_of(work, directory)
        if result:
            score = sum(min(1, result["accuracy"].get(n, 0) / least)
                        for n, least in TARGETS[name].items())
            found.append((meets(work, name, directory), score, -seed, directory))
    return max(found)[3] if found else None


def pack_models(o, log):
    chosen = {"text-attnres": "text-attnres", "text-plain": "text-plain"}
    for name in TARGETS:
        chosen[name] = best_seed(o.work, name)
    with tarfile.open(os.path.join(o.out, "models.tar.gz"), "w:gz") as tar:
        for name, directory in chosen.items():
            result = result_of(o.work, directory) if directory else None
            if result is None or not os.path.exists(
                    os.path.join(o.work, directory, "model.safetensors")):
                log.say("%s: not finished here" % name)
                continue
            log.say("%s is %s: %s" % (name, directory, json.dumps(result)))
            for file in ("config.json", "model.safetensors", "result.json"):
                tar.add(os.path.join(o.work, directory, file), name + "/" + file)


def pack_state(o):
    """Checkpoints, and the results that say what need not run again, in parts."""
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode="w") as tar:
        for directory in sorted(os.listdir(o.work)):
            for file in ("checkpoint.pt", "result.json"):
                path = os.path.join(o.work, directory, file)
                if os.path.exists(path):
                    tar.add(path, directory + "/" + file)
    data = memory.getvalue()
    for i in range(0, len(data), PART):
        with open(os.path.join(o.out, "state.tar.%02d" % (i // PART)), "wb") as file:
            file.write(data[i:i + PART])


def parse_arguments():
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("--corpus", required=True, help="directory of kjv.txt, or a file")
    arguments.add_argument("--work", required=True, help="checkpoints and models")
    arguments.add_argument("--out", required=True, help="what to take away")
    arguments.add_argument("--seconds", type=float, default=440)
    arguments.add_argument("--only", default="", help="jobs by name, with commas")
    arguments.add_argument("--tiny", action="store_true",
                           help="small sizes and few steps, to see that everything runs")
    return arguments.parse_args()


def main():
    o = parse_arguments()
    os.makedirs(o.work, exist_ok=True)
    os.makedirs(o.out, exist_ok=True)
    log = Log(os.path.join(o.out, "train.log"))
    runner = Runner(o, log)
    jobs = runner.jobs()
    names = o.only.split(",") if o.only else list(jobs)
    for thread in [runner.start(name, jobs[name]) for name in names]:
        thread.join()
    for name in names:
        log.say("%s: %s" % (name, {0: "done", UNFINISHED: "unfinished"}.get(
            runner.status[name], "failed")))
    pack_models(o, log)
    states = [runner.status[name] for name in names]
    if any(states):
        pack_state(o)
    log.say("packed")
    sys.exit(1 if any(s not in (0, UNFINISHED) for s in states) else max(states))


if __name__ == "__main__":
    main()
