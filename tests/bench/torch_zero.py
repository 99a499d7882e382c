"""From the end of the backward pass to usable parameters: ShardedOptimizer, on slices and on whole
parameters, beside DDP with torch's ZeroRedundancyOptimizer over gloo; Muon beside DDP with Muon.

hsdp_run starts it; the ranks form one shard group. A step is one backward pass and AdamW. What a system
adds is the median over rounds of its step's time minus the time of the same backward pass and of AdamW
on this rank's share of the elements, without communication; the slowest rank counts. All systems take
turns. For Muon it compares whole steps. Prints `value NAME NUMBER` lines.

    hsdp_run -n 2 python torch_zero.py [--rounds N] [--layers L] [--width W]
    python torch_zero.py --overhead
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import hsdp
from hsdp.options import Layout, ShardOver
from torch_step import report_overhead, small_parameters

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))
import beside_fsdp2 as example  # noqa: E402

ROWS = 8


def alone(model: nn.Module, inputs: torch.Tensor, share: int) -> example.Step:
    """Runs AdamW on fp32 masters of this rank's share, without communication."""
    parameters = list(model.parameters())
    slices = [nn.Parameter(p.detach().reshape(-1)[: p.numel() // share].float().clone())
              for p in parameters]
    optimizer = torch.optim.AdamW(slices)

    def step() -> None:
        model.zero_grad()
        example.backward(model, inputs, 0)
        for part, whole in zip(slices, parameters, strict=True):
            part.grad = whole.grad.reshape(-1)[: part.numel()].float()  # type: ignore[union-attr]
        optimizer.step()

    return step


def ours(
    model: nn.Module, inputs: torch.Tensor, mesh: hsdp.Mesh, cls: Any = torch.optim.AdamW,
    layout: Layout = "flat", over: ShardOver = "shard",
) -> example.Step:
    reducer = hsdp.Reducer(mesh, layout=layout, shard_over=over)
    reducer.attach(model)
    optimizer = hsdp.zero.ShardedOptimizer(
        cls, model, reducer, overlap_param_gather=False  # parameters are usable after step()
    )

    def step() -> None:
        with reducer.microbatch(last=True):
            example.backward(model, inputs, 0)
        optimizer.step()

    return step


def ddp(model: nn.Module, inputs: torch.Tensor, make: Callable[..., Any]) -> example.Step:
    """Runs DDP with the optimizer that `make` returns for the parameters."""
    parallel = DistributedDataParallel(model)
    optimizer = make(parallel.parameters())

    def step() -> None:
        parallel.zero_grad()
        example.backward(parallel, inputs, 0)
        optimizer.step()

    return step


def measure(mesh: hsdp.Mesh, asked: argparse.Namespace) -> None:
    inputs = torch.randn(ROWS, asked.width)
    model = partial(example.make_model, asked.layers, asked.width)
    zero_redundancy = partial(
        ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW, parameters_as_bucket_view=True
    )
    systems = {
        "none": alone(model(), inputs, mesh.size),
        "ours": ours(model(), inputs, mesh),
        "whole": ours(model(), inputs, mesh, layout="whole"),
        "zero_redundancy": ddp(model(), inputs, zero_redundancy),
    }
    seconds = example.time_steps(systems, asked.rounds)
    muons = {
        "muon_ddp": ddp(model(), inputs, torch.optim.Muon),
        "muon_ours": ours(model(), inputs, mesh, torch.optim.Muon, "whole"),
    }
    of_muon = example.time_steps(muons, max(1, min(asked.rounds // 3, 3)))
    if mesh.rank > 0:
        return
    for name, each in of_muon.items():
        print(f"value torch_zero_{name}_step_ms {1e3 * statistics.median(each):.3f}")
    for name in systems:
        print(f"value torch_zero_{name}_step_ms {1e3 * statistics.median(seconds[name]):.3f}")
    added = {name: example.added_ms(seconds, name) for name in systems if name != "none"}
    for name, milliseconds in added.items():
        print(f"value torch_zero_{name}_added_ms {milliseconds:.3f}")
    print(f"value torch_zero_ratio {added['zero_redundancy'] / added['ours']:.2f}")


def measure_overhead(rounds: int) -> None:
    """Times a step of many tiny parameters on one rank, minus that of the unsharded optimizer."""
    model, other = small_parameters(), small_parameters()
    with hsdp.init_mesh() as mesh:
        reducer = hsdp.Reducer(mesh)
        reducer.attach(model)
        options = {"lr": 1e-3, "fused": True}
        optimizer = hsdp.zero.ShardedOptimizer(torch.optim.AdamW, model, reducer, **options)
        plain = torch.optim.AdamW(other.parameters(), **options)

        def make_gradients() -> None:
            with reducer.microbatch(last=True):
                torch.cat(list(model)).sum().backward()
            torch.cat(list(other)).sum().backward()
            reducer.shard("0")

        report_overhead("torch_zero", rounds, optimizer.step, plain.step, make_gradients)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--overhead", action="store_true", help="of many small parameters, alone")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.overhead:
        measure_overhead(10 * asked.rounds)
        return
    with hsdp.init_mesh(replicate=1, shard=hsdp.job_size()) as mesh:
        example.join_gloo(mesh)
        measure(mesh, asked)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
