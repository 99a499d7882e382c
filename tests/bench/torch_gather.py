"""Gathers of ShardedOptimizer's parameters beside the next forward: waited for in step(), or overlapped.

gather_over_link.py runs it over a slow link; the ranks form one shard group. An iteration is step(), a
forward pass, and a backward pass that is reduced while it runs. Variants take turns. Those that are compared
run one after the other, alternating their order. The slowest rank of a round counts. Shares and ratios
are computed within a round, then their median over rounds. Prints `value NAME NUMBER` lines.

    hsdp_run -n 2 python torch_gather.py [--rounds N] [--cases f32 ...]
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import hsdp

LAYERS, WIDTH = 8, 480


@dataclasses.dataclass(frozen=True)
class Case:
    dtype: torch.dtype
    rows: int  # determines how long a forward takes


# On a CPU without f16 arithmetic, a product of f16 matrices takes four times as long, and a gather half as long.
CASES = {
    "f32": Case(torch.float32, 3072),
    "short": Case(torch.float32, 1024),
    "f16": Case(torch.float16, 320),
}
# Elements per message: about a layer, about half of the model, and all of it.
BUCKETS = {"256k": 256 << 10, "1m": 1_000_000, "4m": 4 << 20}
WAYS = ("in_step", "overlapped")
# The forward pass, or what else is timed apart; the iteration; the exposed part of the gather.
Seconds = tuple[float, float, float]
Key = tuple[int, str, str]  # a stage, a bucket, a way


def make(mesh: hsdp.Mesh, case: Case, stage: int, bucket: str, overlap: bool) -> Callable[[], Seconds]:
    torch.manual_seed(0)
    layers = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
    model = nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU()))).to(case.dtype)
    bucket_bytes = BUCKETS[bucket] * case.dtype.itemsize
    reducer = hsdp.Reducer(mesh, bucket_bytes=min(bucket_bytes, 2 << 20))  # the default, or less
    reducer.attach(model)
    optimizer = hsdp.zero.ShardedOptimizer(
        torch.optim.AdamW, model, reducer, stage=stage, overlap_param_gather=overlap, lr=1e-6,
        gather_bucket_bytes=bucket_bytes,
    )
    inputs = torch.randn(case.rows, WIDTH, dtype=case.dtype)

    # At its end nothing is in flight: the forward has read all parameters, and all gradients are reduced.
    def forward_and_backward() -> float:
        start = time.perf_counter()
        with reducer.microbatch(last=True):
            result = model(inputs)
            forward = time.perf_counter() - start
            result.float().square().mean().backward()
        reducer.shard(reducer.parameters[0].name)
        return forward

    def iteration() -> Seconds:
        exposed = optimizer.gather_stats().exposed_s
        start = time.perf_counter()
        optimizer.step()
        forward = forward_and_backward()
        whole = time.perf_counter() - start
        return forward, whole, optimizer.gather_stats().exposed_s - exposed

    forward_and_backward()
    return iteration


def time_rounds(
    mesh: hsdp.Mesh, variants: dict[Any, Callable[[], Seconds]], rounds: int
) -> dict[Any, torch.Tensor]:
    """Times of the slowest rank: a row for each round, with columns as in Seconds."""
    seconds: dict[Any, list[Seconds]] = {key: [] for key in variants}
    gc.disable()
    for number in range(rounds + 2):  # the first gather has a different order, the second allocates
        for key in variants if number % 2 == 0 else reversed(variants):
            mesh.world.barrier()
            measured = variants[key]()
            if number >= 2:
                seconds[key].append(measured)
    gc.enable()
    slowest = {}
    for key, own in seconds.items():
        every = torch.from_dlpack(mesh.world.all_gather(torch.tensor(own).flatten()))
        slowest[key] = every.view(mesh.size, rounds, -1).amax(0)
    return slowest


def report(name: str, seconds: dict[Key, torch.Tensor]) -> None:
    for stage, bucket in dict.fromkeys((stage, bucket) for stage, bucket, _ in seconds):
        in_step, overlapped = (seconds[stage, bucket, way].unbind(1) for way in WAYS)
        values = {
            "forward_ms": 1e3 * in_step[0], "gather_ms": 1e3 * in_step[2],
            "exposed_ms": 1e3 * overlapped[2], "in_step_ms": 1e3 * in_step[1],
            "overlapped_ms": 1e3 * overlapped[1], "hidden": 1 - overlapped[2] / in_step[2],
            "ratio": overlapped[1] / in_step[1],
        }
        for value, of_rounds in values.items():
            print(f"value torch_gather_{name}_{stage}_{bucket}_{value} {float(of_rounds.quantile(0.5)):.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with hsdp.init_mesh(replicate=1, shard=hsdp.job_size()) as mesh:
        for name in asked.cases:
            variants = {
                (stage, bucket, way): make(mesh, CASES[name], stage, bucket, way == "overlapped")
                for stage in (1, 2) for bucket in BUCKETS for way in WAYS
            }
            seconds = time_rounds(mesh, variants, asked.rounds)
            if mesh.rank == 0:
                report(name, seconds)


if __name__ == "__main__":
    main()
