"""Draws on one time axis how updated parameters are gathered under the next forward pass.

    hsdp_run -n 2 python examples/overlap_gather.py

A sharded optimizer updates this rank's slices and starts to gather the whole parameters. The next
forward pass does not wait for all of them: each layer waits for its own, while those of later layers
are still on their way. The same training without overlap has the same bits. Writes the picture of
one step as PNG (--plot).
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import time
from typing import Any, NamedTuple

import torch
from torch import nn

import hsdp

LAYERS = 6


class Span(NamedTuple):
    row: str
    layer: int
    begin_s: float
    end_s: float


def make_model(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(LAYERS)))


class Recorder:
    """Records when each layer's forward ran."""

    def __init__(self, model: nn.Sequential) -> None:
        self.spans: list[Span] = []
        self._begin_s = 0.0
        for number, layer in enumerate(model):
            layer.register_forward_pre_hook(self._begin)
            layer.register_forward_hook(functools.partial(self._end, number))

    def _begin(self, *_: Any) -> None:
        self._begin_s = time.monotonic()

    def _end(self, number: int, *_: Any) -> None:
        self.spans.append(Span("forward", number, self._begin_s, time.monotonic()))


class Result(NamedTuple):
    weights: list[torch.Tensor]
    spans: list[Span]  # in one step
    waited_s: float  # time waited for gathers in that step


def train(mesh: hsdp.Mesh, width: int, rows: int, steps: int, overlaps: bool) -> Result:
    model = make_model(width)
    recorder = Recorder(model)
    reducer = hsdp.Reducer(mesh)
    reducer.attach(model)
    optimizer = hsdp.zero.ShardedOptimizer(
        torch.optim.AdamW, model, reducer, overlap_param_gather=overlaps, lr=1e-3
    )
    before_s = waited_s = 0.0
    spans: list[Span] = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step * mesh.size + mesh.rank)
        batch = torch.randn(rows, width, generator=generator)
        mesh.world.barrier()
        recorder.spans.clear()
        with reducer.microbatch(last=True):
            loss = model(batch).square().mean()  # the gathers of the last step run meanwhile
            if step == steps - 1:
                spans = [*recorder.spans, *gathers(optimizer)]
                waited_s = optimizer.gather_stats().exposed_s - before_s
            loss.backward()
        before_s = optimizer.gather_stats().exposed_s
        optimizer.step()
    weights = [p.detach().clone() for p in model.parameters()]
    optimizer.close()
    reducer.close()
    return Result(weights, spans, waited_s)


def gathers(optimizer: hsdp.zero.ShardedOptimizer) -> list[Span]:
    return [
        Span("gather", int(name.split(".")[0]), begin_s, end_s)
        for name, (begin_s, end_s) in optimizer.gather_times().items()
    ]


def plot(path: pathlib.Path, spans: list[Span]) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: matplotlib is not installed (pip install matplotlib)")
        return
    figure = Figure(figsize=(9, 2.6), layout="constrained")
    axes = figure.subplots()
    begin_s = min(span.begin_s for span in spans)
    rows = ["forward", "gather"]
    for span in spans:
        left, length = 1e3 * (span.begin_s - begin_s), 1e3 * (span.end_s - span.begin_s)
        row = rows.index(span.row)
        axes.barh(row, length, left=left, height=0.6, color=f"C{span.layer}", edgecolor="white")
        if span.row == "forward":
            axes.text(left + length / 2, row, str(span.layer), ha="center", va="center")
    axes.set(yticks=range(len(rows)), yticklabels=rows, xlabel="ms since the optimizer's step",
             title="Parameters are gathered under the forward pass (numbers: layers)")
    axes.invert_yaxis()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"time axis: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--plot", type=pathlib.Path, default=pathlib.Path("overlap_gather.png"))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with hsdp.init_mesh(shard=hsdp.job_size()) as mesh:
        overlapped, synchronous = (
            train(mesh, asked.width, asked.rows, asked.steps, overlaps) for overlaps in (True, False)
        )
        for p, q in zip(overlapped.weights, synchronous.weights, strict=True):
            if not torch.equal(p, q):
                raise SystemExit("the gathers changed what was computed")
        if mesh.rank > 0:
            return
        plot(asked.plot, overlapped.spans)
        forward, gather = (
            [span for span in overlapped.spans if span.row == row] for row in ("forward", "gather")
        )
        busy_ms = 1e3 * sum(end - begin for begin, end in {(s.begin_s, s.end_s) for s in gather})
        passed_ms = 1e3 * (forward[-1].end_s - forward[0].begin_s)
        print(f"forward {passed_ms:.1f} ms, gathers {busy_ms:.1f} ms, waited for them "
              f"{1e3 * overlapped.waited_s:.1f} ms; the same bits as without overlap")


if __name__ == "__main__":
    main()
