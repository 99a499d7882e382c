#!/usr/bin/env python3
"""Measures the table of docs/zero.md: what stages of ZeRO hold and send, with and without windows.

Usage: hsdp_run -n 2 python docs/zero_table.py [docs/zero.md]    with torch, and hsdp on PYTHONPATH

Prints the table, or writes it into the page.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import sys
from typing import Any

import torch
from torch import nn

import hsdp

LAYERS, WIDTH = 8, 128
PARAMETER_COUNT = LAYERS * WIDTH * WIDTH
GRADIENT_BYTES = 2 * PARAMETER_COUNT  # bf16: P
BUCKET_BYTES = GRADIENT_BYTES // 64
PASSES = (2, 4, 8)
MEASURED_AT = 4  # memory, which does not depend on it


@dataclasses.dataclass(frozen=True)
class Row:
    """A way to reduce several backward passes, and what DeepSpeed says of its own, in P."""

    stage: str
    title: str
    holds: str
    shard: int = 2  # of two ranks; the others are replicas
    partial_sync: str = "shard"
    sync: str | None = None  # of all microbatches but the last
    window: dict[str, Any] | None = None
    theirs: str = "-"


ROWS = (
    Row("0", "microbatches", "2P", shard=1),
    Row("0", "window", "2P + 2P", shard=1, window={}, theirs="refused"),
    Row("1, `no_sync`", 'microbatches, `sync="none"`', "2P + 2P/S", sync="none"),
    Row("1", 'microbatches, `set_partial_sync("none")`', "2P + 2P/S", partial_sync="none",
        theirs="1 collective"),
    Row("1", "window", "2P + 2P/S", partial_sync="none", window={}),
    Row("2", "microbatches", "2P/S", theirs="peak 2.5, N collectives"),
    Row("2", "window", "2P + 2P/S", window={}, theirs="peak 1.5, after 0.5, 1 collective"),
    Row("2", '`accumulate_dtype="param"`', "P + 2P/S", window={"accumulate_dtype": "param"}),
    Row("2", '`accumulate="grad"`', "P + 2P/S", window={"accumulate": "grad"}),
    Row("3", "microbatches", "2P/S", theirs="0.5, peak 2.5, N collectives"),
    Row("3", "window", "2P + 2P/S", window={}, theirs="1.5, peak 2.5, after 0.5, 1 collective"),
)


@dataclasses.dataclass
class Measured:
    """One row. Memory in multiples of P."""

    inside: float
    peak: float
    after: float
    wire: list[float]  # by PASSES
    collectives: list[float]  # of each bucket


class Memory:
    """What the Reducer and p.grad hold, and the most of it whenever a gradient was there."""

    def __init__(self, reducer: hsdp.Reducer, model: nn.Module) -> None:
        self._reducer = reducer
        self._parameters = list(model.parameters())
        self.peak = 0
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._note)

    def now(self) -> int:
        grads = [p.grad for p in self._parameters]
        held = sum(g.nbytes for g in grads if g is not None)
        return int(held) + self._reducer.stats().resident_bytes

    def _note(self, _: torch.Tensor) -> None:
        self.peak = max(self.peak, self.now())


def make_model() -> nn.Sequential:
    layers = (nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(LAYERS))
    return nn.Sequential(*layers)


def run_step(reducer: hsdp.Reducer, model: nn.Module, memory: Memory, row: Row, passes: int) -> int:
    """One step. What is held when all passes but one are over."""
    inputs = torch.ones(2, WIDTH, dtype=torch.bfloat16)

    def backward() -> None:
        model(inputs).sum().backward()

    inside = 0
    if row.window is not None:
        with hsdp.zero.coalesce_grad_reduction(reducer, **row.window):
            for m in range(passes):
                inside = memory.now()
                backward()
    else:
        for m in range(passes):
            last = m == passes - 1
            inside = memory.now()
            with reducer.microbatch(last=last, sync=None if last else row.sync):
                backward()
    reducer.finish()
    return inside


def sent(stats: hsdp.ReducerStats, mesh: hsdp.Mesh) -> float:
    """Bytes that left this rank: of a collective's message it keeps its own row."""
    shard, replicate = mesh.shard_size, mesh.replicate_size
    return (stats.shard_hop_bytes * (shard - 1) / shard
            + stats.replica_hop_bytes * (replicate - 1) / replicate)


def measure_row(row: Row) -> Measured:
    wire, collectives = [], []
    inside = peak = after = 0
    for passes in PASSES:
        with hsdp.init_mesh(replicate=2 // row.shard, shard=row.shard) as mesh:
            model = make_model()
            reducer = hsdp.Reducer(mesh, bucket_bytes=BUCKET_BYTES)
            memory = Memory(reducer, model)
            reducer.attach(model)
            reducer.set_partial_sync(row.partial_sync)
            held = run_step(reducer, model, memory, row, passes)
            stats = reducer.stats()
            wire.append(sent(stats, mesh) / GRADIENT_BYTES)
            count = stats.reduce_scatter_count + stats.all_reduce_count
            collectives.append(count / stats.bucket_count)
            if passes == MEASURED_AT:
                inside, peak = held, memory.peak
                reducer.release_memory()
                after = memory.now()
            reducer.close()
    return Measured(inside / GRADIENT_BYTES, peak / GRADIENT_BYTES, after / GRADIENT_BYTES, wire,
                    collectives)


def measure() -> list[dict[str, Any]]:
    """Each row on this rank, one of two. Collective."""
    torch.set_num_threads(1)
    return [dataclasses.asdict(measure_row(row)) for row in ROWS]


def table(measured: list[dict[str, Any]]) -> str:
    """As it stands in the page."""
    counts = ", ".join(map(str, PASSES))
    heads = ["stage", "as", "gradients held", "in it", "peak", "after",
             f"wire, N = {counts}", f"collectives, N = {counts}", "DeepSpeed"]
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for row, values in zip(ROWS, map(lambda one: Measured(**one), measured), strict=True):
        cells = [row.stage, row.title, row.holds, f"{values.inside:.2f}", f"{values.peak:.2f}",
                 f"{values.after:.2f}", ", ".join(f"{one:g}" for one in values.wire),
                 ", ".join(f"{one:g}" for one in values.collectives), row.theirs]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    with hsdp.init_mesh(replicate=1, shard=2) as mesh:
        text = table(measure())
        if mesh.rank > 0:
            return
    if len(sys.argv) == 1:
        print(text, end="")
        return
    page = pathlib.Path(sys.argv[1])
    old = page.read_text(encoding="utf-8")
    new = re.sub(r"^\| stage \| as \|.*?\n(?=\n)", text, old, flags=re.M | re.S)
    page.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
