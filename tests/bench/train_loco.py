#!/usr/bin/env python3
"""Trains small GPTs with bf16, plain 4 bit and LoCo between two replicas, by several seeds.

They learn the source text of Python's standard library, character by character. A seed determines weights and
batches, so the hops are compared pair by pair. Prints by how much the loss on files that were not trained on
differs from the bf16 hop's: the mean over the seeds and its 95 % interval (Student's t).

Usage: hsdp_run -n 2 python tests/bench/train_loco.py [--seeds 6] [--sizes small large] [--json FILE] [--plot FILE]
"""

import argparse
import json
import math
import pathlib
import statistics
import sys
import sysconfig
import time

import torch
from torch.nn import functional

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "examples"))
import train_gpt  # noqa: E402

import hsdp  # noqa: E402

# width, layers, steps, learning rate
SIZES = {"small": (48, 2, 2000, 3e-3), "large": (96, 4, 1200, 2e-3)}
WARM_UP = 0.1  # share of the steps in which the learning rate rises
HOPS = ("bf16", "plain 4 bit", "LoCo")
BATCH = 32
SKIPPED = {"test", "tests", "site-packages", "dist-packages"}
# Student's t for the 95 % interval, by the number of seeds.
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}


def make_hop(name, error_every=0):
    if name == "bf16":
        return hsdp.PlainHop("bf16")
    return hsdp.quant.LocoHop(error_feedback=name == "LoCo", error_every=error_every)


class Text:
    """Splits the text: every tenth file is held out for evaluation."""

    def __init__(self):
        library = pathlib.Path(sysconfig.get_path("stdlib"))
        texts = [path.read_bytes() for path in sorted(library.rglob("*.py")) if SKIPPED.isdisjoint(path.relative_to(library).parts)]
        characters = torch.tensor(sorted(set(b"".join(texts))))
        self.character_count = len(characters)
        self.held = self.tokens(texts[::10], characters)
        self.trained = self.tokens([text for i, text in enumerate(texts) if i % 10], characters)

    @staticmethod
    def tokens(texts, characters):
        return torch.searchsorted(characters, torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8))

    @staticmethod
    def rows(tokens, count, seed):
        random = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(tokens) - train_gpt.CONTEXT - 1, (count,), generator=random)
        return tokens[starts[:, None] + torch.arange(train_gpt.CONTEXT + 1)]


def loss_of(model, rows):
    return functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def train(mesh, text, size, hop, seed, watch=lambda step: None):
    width, layers, steps, rate = SIZES[size]
    torch.manual_seed(seed)
    model = train_gpt.Gpt(text.character_count, width, layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / (WARM_UP * steps), 0.5 + 0.5 * math.cos(math.pi * step / steps)))
    reducer = hsdp.Reducer(mesh, reduce_dtype="bf16", replica_hop=hop)
    reducer.attach(model)
    for step in range(steps):
        rows = text.rows(text.trained, BATCH, 1_000_000 * seed + step).chunk(mesh.size)[mesh.rank]
        with reducer.microbatch(last=True):
            loss_of(model, rows).backward()
        reducer.clip_grad_norm_(1.0)
        reducer.gather_gradients()
        optimizer.step()
        schedule.step()
        watch(step)
    reducer.close()
    with torch.no_grad():
        return loss_of(model, text.rows(text.held, 2048, 7)).item()


def report(size, losses):
    count = len(losses["bf16"])
    print(f"\n{size}: width {SIZES[size][0]}, {SIZES[size][1]} layers, {SIZES[size][2]} steps, {count} seeds")
    spread = statistics.stdev(losses["bf16"]) if count > 1 else float("nan")
    print(f"  bf16         {statistics.mean(losses['bf16']):.4f}, standard deviation over seeds {spread:.4f}")
    for hop in HOPS[1:]:
        apart = [a - b for a, b in zip(losses[hop], losses["bf16"])]
        half = STUDENT.get(count, float("nan")) * statistics.stdev(apart) / count**0.5 if count > 1 else float("nan")
        print(f"  {hop:12} {statistics.mean(losses[hop]):.4f}, above bf16 by {statistics.mean(apart):+.4f} +- {half:.4f}",
              flush=True)


def plot_errors(mesh, text, path):
    """Plots quantization_error() of all parameters while the small model trains."""
    hop = make_hop("LoCo", error_every=16)
    steps, found = [], []

    def watch(step):
        if step % 16 == 0:
            steps.append(step)
            found.append(sorted(max(one) for one in hop.quantization_error().values()))

    train(mesh, text, "small", hop, 1, watch)
    if mesh.rank != 0:
        return
    from matplotlib import rcParams
    from matplotlib.figure import Figure
    rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "hsdp", "path.simplify_threshold": 0.5})
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    axes.fill_between(steps, [row[0] for row in found], [row[-1] for row in found], color="#33658a", alpha=0.25,
                      linewidth=0, label="from the least to the most of all parameters")
    axes.plot(steps, [statistics.median(row) for row in found], color="#33658a", linewidth=1.2, label="median")
    axes.axhline(0.3, color="#b5482f", linewidth=1, linestyle="--", label="named on stderr")
    axes.set(xlabel="step", ylabel="quantization error / norm", ylim=(0, 0.35))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", ncols=3, fontsize=8)
    figure.savefig(path, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    print(f"least {min(row[0] for row in found):.3f}, most {max(row[-1] for row in found):.3f}: {path}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=6, choices=STUDENT)
    parser.add_argument("--sizes", nargs="*", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--plot", type=pathlib.Path, help="instead: draw what quantization changes")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    text = Text()
    found = {}
    with hsdp.init_mesh(replicate=2, shard=1) as mesh:
        if asked.plot:
            plot_errors(mesh, text, asked.plot)
            return
        for size in asked.sizes:
            found[size] = {hop: [] for hop in HOPS}
            for seed in range(1, asked.seeds + 1):
                for hop in HOPS:
                    begin = time.monotonic()
                    found[size][hop].append(train(mesh, text, size, make_hop(hop), seed))
                    if mesh.rank == 0:
                        print(f"{size} seed {seed} {hop}: {found[size][hop][-1]:.4f} ({time.monotonic() - begin:.0f} s)",
                              flush=True)
                if mesh.rank == 0 and asked.json:
                    asked.json.write_text(json.dumps(found, indent=1))
            if mesh.rank == 0:
                report(size, found[size])


if __name__ == "__main__":
    main()
