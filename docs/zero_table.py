#!/usr/bin/env python3
"""Measures the tables of docs/zero.md: what stages of ZeRO hold and send, with and without windows,
and what AdamW holds.

Usage: hsdp_run -n 2 python docs/zero_table.py [docs/zero.md]    with torch, and hsdp on PYTHONPATH

Prints the tables, or writes them into the page.
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


def make_model(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)  # the same weights on every rank
    layers = (nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype) for _ in range(LAYERS))
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


@dataclasses.dataclass(frozen=True)
class Bytes:
    """For each parameter: of whole arrays, and of this rank's slices."""

    whole: int
    sliced: int = 0

    def __str__(self) -> str:
        parts = (f"{self.whole} n" if self.whole else "", f"{self.sliced} n/S" if self.sliced else "")
        return " + ".join(filter(None, parts))

    def at(self, shard_size: int) -> float:
        return self.whole + self.sliced / shard_size


@dataclasses.dataclass(frozen=True)
class AdamWRow:
    """Where AdamW runs, and what is held between two of its steps."""

    dtype: torch.dtype
    title: str
    stage: int | None  # of ShardedOptimizer; None: torch's own
    gradients: Bytes
    states: Bytes

    @property
    def holds(self) -> list[Bytes]:
        return [Bytes(self.dtype.itemsize), self.gradients, self.states]


ADAMW_ROWS = tuple(
    AdamWRow(dtype, title, stage, gradients, states)
    for dtype, whole_states, sliced_states in (
        (torch.float32, Bytes(8), Bytes(0, 8)), (torch.bfloat16, Bytes(4), Bytes(0, 12))
    )
    for title, stage, gradients, states in (
        ("`torch.optim.AdamW`", None, Bytes(dtype.itemsize, 4), whole_states),
        ("`ShardedOptimizer`, stage 1", 1, Bytes(4, 4), sliced_states),
        ("`ShardedOptimizer`, stage 2", 2, Bytes(0, 4), sliced_states),
    )
)


def measure_adamw_row(row: AdamWRow) -> list[float]:
    """Parameters, gradients and states after two steps, in bytes a parameter."""
    with hsdp.init_mesh(replicate=1, shard=2) as mesh:
        reducer = hsdp.Reducer(mesh, bucket_bytes=BUCKET_BYTES)
        model = make_model(row.dtype)
        reducer.attach(model)
        if row.stage is None:
            optimizer: Any = torch.optim.AdamW(model.parameters())
        else:
            optimizer = hsdp.zero.ShardedOptimizer(torch.optim.AdamW, model, reducer, stage=row.stage)
        for _ in range(2):
            for m in range(2):
                with reducer.microbatch(last=m == 1):
                    model(torch.ones(2, WIDTH, dtype=row.dtype)).sum().backward()
            if row.stage is None:
                reducer.gather_gradients()
            optimizer.step()
        parameters = sum(p.nbytes for p in model.parameters())
        grads = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
        stats = reducer.stats()
        states = stats.optimizer_bytes
        if row.stage is None:
            kept = [value for state in optimizer.state.values() for value in state.values()]
            states = sum(value.nbytes for value in kept if value.dim() > 0)
        gradients = grads + stats.carry_bytes + stats.accumulator_bytes + stats.total_bytes
        reducer.close()
    return [count / PARAMETER_COUNT for count in (parameters, gradients, states)]


def measure_adamw() -> list[list[float]]:
    """Each row on this rank, one of two. Collective."""
    torch.set_num_threads(1)
    return [measure_adamw_row(row) for row in ADAMW_ROWS]


def adamw_table(measured: list[list[float]]) -> str:
    """As it stands in the page."""
    heads = ["weights", "AdamW", "weights held", "gradients", "states, masters", "measured, S = 2",
             "S = 8"]
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for row, values in zip(ADAMW_ROWS, measured, strict=True):
        cells = [str(row.dtype).removeprefix("torch."), row.title, *map(str, row.holds),
                 f"{' + '.join(f'{one:.1f}' for one in values)} = {sum(values):.1f}",
                 f"{sum(held.at(8) for held in row.holds):g}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    with hsdp.init_mesh(replicate=1, shard=2) as mesh:
        tables = [table(measure()), adamw_table(measure_adamw())]
        if mesh.rank > 0:
            return
    if len(sys.argv) == 1:
        print("\n".join(tables), end="")
        return
    page = pathlib.Path(sys.argv[1])
    text = page.read_text(encoding="utf-8")
    for new in tables:
        head = re.escape("|".join(new.split("|")[:3]))  # its first two heads
        text = re.sub(rf"^{head}.*?\n(?=\n)", lambda _, new=new: new, text, flags=re.M | re.S)
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
