"""What text.py and recall.py share: optimizer, one step as a CUDA graph, checkpoints, progress.

A run stops by itself before a deadline, keeps a checkpoint, and goes on from it when it is started
again with the same arguments. The moments of the optimizer are kept in bf16, so that a run which
was interrupted differs by rounding from one which was not; on a GPU no two runs agree to the bit.
"""
import json
import os
import sys
import time

import torch
import torch.nn.functional as F

import kda

UNFINISHED = 3  # exit status: the deadline came first, start again to go on
IGNORED = -100  # a target that no loss is taken of
SYNC_EVERY = 20  # steps between looks at the loss and the clock


def add_arguments(parser, learning_rate):
    parser.add_argument("--out", required=True, help="directory: checkpoint, model, result.json")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--lr", type=float, default=learning_rate)
    parser.add_argument("--until", type=float, default=0, metavar="SECONDS",
                        help="stop then, in seconds since 1970; 0: run to the end")
    parser.add_argument("--no-graph", action="store_true", help="do not use a CUDA graph")


def start_device():
    torch.set_float32_matmul_precision("high")  # TF32 for large products
    return "cuda" if torch.cuda.is_available() else "cpu"


def say(name, text):
    print("%s %s: %s" % (time.strftime("%H:%M:%S"), name, text), flush=True)


class Optimizer:
    """AdamW, weight decay on matrices but for embedding, convolutions and pseudo-queries."""

    def __init__(self, model, weight_decay=0.1):
        self.parameters = list(model.parameters())
        decayed, others = [], []
        for name, p in model.named_parameters():
            matrix = name.endswith("_proj.weight") or name.startswith("lm_head") or (
                "kv_a_proj_with_mqa" in name)
            (decayed if matrix and "res_proj" not in name else others).append(p)
        self.cuda = self.parameters[0].is_cuda
        # A graph reads the rate from a tensor on the device; eager CPU code wants a number.
        self.rate = torch.zeros((), device="cuda") if self.cuda else 0.0
        extra = {"fused": True, "capturable": True} if self.cuda else {}
        self.adam = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": weight_decay},
             {"params": others, "weight_decay": 0.0}], lr=self.rate, betas=(0.9, 0.95), **extra)

    def set_rate(self, rate):
        for group in self.adam.param_groups:
            if torch.is_tensor(group["lr"]):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def step(self):
        self.adam.step()

    def state(self):
        """Values, and moments of those that have any: the pseudo-query before the first layer,
        which has one source alone, never gets a gradient."""
        kept = []
        for p in self.parameters:
            state = self.adam.state.get(p, {})
            moments = [state[key].bfloat16().cpu() for key in ("exp_avg", "exp_avg_sq") if state]
            kept.append([p.detach().cpu().clone()] + moments)
        return kept

    def restore(self, kept, steps):
        for p, (value, *moments) in zip(self.parameters, kept):
            p.data.copy_(value)
            if moments:
                average, square = (m.to(p.device, torch.float32) for m in moments)
                self.adam.state[p] = {"step": torch.tensor(float(steps), device=p.device),
                                      "exp_avg": average, "exp_avg_sq": square}


class Step:
    """One training step over a fixed shape: eager for the first three, then a CUDA graph.

    `loss` is that of the last step, `norm` the norm of its gradient before clipping.
    """

    WARM_UP = 3

    def __init__(self, model, optimizer, B, T, graph=True, clip=1.0):
        self.model, self.optimizer, self.clip = model, optimizer, clip
        device = optimizer.parameters[0].device
        self.x, self.y = (torch.zeros(B, T, dtype=torch.long, device=device) for _ in range(2))
        self.loss, self.norm = (torch.zeros((), device=device) for _ in range(2))
        self.use_graph, self.graph, self.done = graph and optimizer.cuda, None, 0

    def work(self):
        self.optimizer.adam.zero_grad(set_to_none=True)
        logits = self.model(self.x)
        loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), self.y.reshape(-1),
                               ignore_index=IGNORED)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.optimizer.parameters, self.clip)
        self.optimizer.step()
        self.loss.copy_(loss.detach())
        self.norm.copy_(norm.detach())

    def __call__(self, x, y, rate):
        self.x.copy_(x)
        self.y.copy_(y)
        self.optimizer.set_rate(rate)
        if not self.use_graph:
            self.work()
        elif self.done < self.WARM_UP:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self.work()
            torch.cuda.current_stream().wait_stream(side)
        else:
            if self.graph is None:
                self.optimizer.adam.zero_grad(set_to_none=True)
                self.graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.graph):
                    self.work()  # records, and computes nothing
            self.graph.replay()
        self.done += 1


class Run:
    """Progress of one training run in its directory."""

    def __init__(self, name, options, model, optimizer):
        self.name, self.directory, self.until = name, options.out, options.until
        self.model, self.optimizer = model, optimizer
        self.path = os.path.join(options.out, "checkpoint.pt")
        self.step, self.seconds, self.began = 0, 0.0, time.time()
        self.log_step, self.log_time, self.losses = 0, time.time(), []
        os.makedirs(options.out, exist_ok=True)
        if os.path.exists(self.path):
            kept = torch.load(self.path, map_location="cpu")
            self.step, self.seconds = kept["step"], kept["seconds"]
            optimizer.restore(kept["state"], self.step)
            self.log_step = self.step
            say(name, "goes on from step %d" % self.step)
        torch.manual_seed(options.seed + self.step)  # of dropout

    def elapsed(self):
        return self.seconds + time.time() - self.began

    def save(self):
        state = {"step": self.step, "seconds": self.elapsed(), "state": self.optimizer.state()}
        torch.save(state, self.path + ".part")
        os.replace(self.path + ".part", self.path)

    def after_step(self, step, total, log_every, save_every):
        """Counts a step; every now and then looks at the loss, logs and saves."""
        self.step += 1
        last = self.step == total
        if step.done == 1:
            step.loss.item()  # waits for the device
            say(self.name, "T %d: first step %.1f s after the start" % (
                step.x.shape[1], time.time() - self.began))
        if self.step % SYNC_EVERY and not last:
            return
        loss = step.loss.item()
        if not loss < 1e4:
            sys.exit("%s: step %d: loss is %g" % (self.name, self.step, loss))
        self.losses.append(loss)
        if self.step % log_every == 0 or last:
            pace = (time.time() - self.log_time) / max(1, self.step - self.log_step)
            say(self.name, "step %d of %d, T %d, loss %.4f nats, gradient %.2f, %.1f ms a step, %.0f s" % (
                self.step, total, step.x.shape[1], sum(self.losses) / len(self.losses),
                step.norm.item(), 1e3 * pace, self.elapsed()))
            self.log_step, self.losses = self.step, []
        if self.step % save_every == 0 or last:
            self.save()
        if self.until and time.time() > self.until and not last:
            self.save()
            say(self.name, "the deadline came first: step %d of %d is saved" % (self.step, total))
            sys.exit(UNFINISHED)
        if self.log_step == self.step:
            self.log_time = time.time()

    def finish(self, result):
        """Writes result.json, which says that the run is complete."""
        path = os.path.join(self.directory, "result.json")
        result = dict(result, name=self.name, parameters=kda.n_parameters(self.model),
                      steps=self.step, seconds=round(self.elapsed(), 1))
        with open(path + ".part", "w") as file:
            json.dump(result, file)
            file.write("\n")
        os.replace(path + ".part", path)
        if os.path.exists(self.path):
            os.remove(self.path)
        say(self.name, "result " + json.dumps(result))


def finished(options):
    return os.path.exists(os.path.join(options.out, "result.json"))


def warm_up(step, steps=100):
    return min(1.0, (step + 1) / steps)
