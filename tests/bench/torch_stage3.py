"""Steps with sliced parameters: ShardedOptimizer at stage 3 beside FSDP2 over gloo.

Run by hsdp_run, or by stage3_over_link.py over a slow link. A step is one backward pass and AdamW in
bf16 on fp32 masters. What a system adds is the median over rounds of its step's time less that of the same backward
pass and of AdamW on this rank's share of the elements, without any exchange; the slowest rank counts.
All take turns. With --replicate 1 the ranks are one shard group.

- `coalesce`: four backward passes, each reduced, or in one window, at stage 3.
- `prefetch`: how much longer a step is than without any exchange, with gathers ahead and without.

Prints `value NAME NUMBER` lines.

    hsdp_run -n 4 python torch_stage3.py [--replicate R] [--rounds N] [--layers L] [--width W] [--rows N]
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import hsdp

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))
import beside_fsdp2 as example  # noqa: E402

PASSES = 4


def make_model(asked: argparse.Namespace, dtype: torch.dtype) -> nn.Sequential:
    return example.make_model(asked.layers, asked.width).to(dtype)


def alone(asked: argparse.Namespace, inputs: torch.Tensor, share: int, passes: int = 1) -> example.Step:
    model = make_model(asked, torch.bfloat16)
    parameters = list(model.parameters())
    slices = [nn.Parameter(p.detach().reshape(-1)[: p.numel() // share].float()) for p in parameters]
    optimizer = torch.optim.AdamW(slices)

    def step() -> None:
        model.zero_grad()
        for m in range(passes):
            example.backward(model, inputs, m)
        for part, whole in zip(slices, parameters, strict=True):
            part.grad = whole.grad.reshape(-1)[: part.numel()].float()  # type: ignore[union-attr]
        optimizer.step()

    return step


def ours(
    mesh: hsdp.Mesh, asked: argparse.Namespace, inputs: torch.Tensor, passes: int = 1,
    window: bool = False, **options: Any,
) -> example.Step:
    model = make_model(asked, torch.bfloat16)
    reducer = hsdp.Reducer(mesh)
    reducer.attach(model)
    optimizer = hsdp.zero.ShardedOptimizer(
        torch.optim.AdamW, model, reducer, stage=3, units=[nn.Linear], **options
    )

    def step() -> None:
        if window:
            with hsdp.zero.coalesce_grad_reduction(reducer, last=True, backwards=passes):
                for m in range(passes):
                    example.backward(model, inputs, m)
        else:
            for m in range(passes):
                with reducer.microbatch(last=m == passes - 1):
                    example.backward(model, inputs, m)
        optimizer.step()

    return step


def fsdp2(
    mesh: hsdp.Mesh, asked: argparse.Namespace, inputs: torch.Tensor, reshards: bool, passes: int = 1
) -> example.Step:
    if mesh.replicate_size > 1:
        shape, names = (mesh.replicate_size, mesh.shard_size), ("dp_replicate", "dp_shard")
    else:
        shape, names = (mesh.shard_size,), ("dp_shard",)
    torch_mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    model = make_model(asked, torch.float32)
    for layer in model:
        fully_shard(layer, mesh=torch_mesh, mp_policy=policy, reshard_after_forward=reshards)
    fully_shard(model, mesh=torch_mesh, mp_policy=policy, reshard_after_forward=reshards)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        for m in range(passes):
            example.backward(model, inputs, m)
        optimizer.step()

    return step


def measure(mesh: hsdp.Mesh, asked: argparse.Namespace) -> None:
    inputs = torch.randn(asked.rows, asked.width, dtype=torch.bfloat16)
    systems = {"none": alone(asked, inputs, mesh.shard_size)}
    for name, reshards in (("resharded", True), ("kept", False)):
        systems[f"ours_{name}"] = ours(mesh, asked, inputs, reshard_after_forward=reshards)
        systems[f"fsdp2_{name}"] = fsdp2(mesh, asked, inputs, reshards)
    systems["ours_not_ahead"] = ours(mesh, asked, inputs, prefetch_bytes=0)
    seconds = example.time_steps(systems, asked.rounds)
    added = {name: example.added_ms(seconds, name) for name in systems if name != "none"}
    values = {f"{name}_added_ms": value for name, value in added.items()}
    values["none_ms"] = 1e3 * statistics.median(seconds["none"])
    for name in ("resharded", "kept"):
        values[f"{name}_ratio"] = added[f"fsdp2_{name}"] / added[f"ours_{name}"]
    passes = {
        "each": ours(mesh, asked, inputs, PASSES),
        "window": ours(mesh, asked, inputs, PASSES, window=True),
    }
    seconds = example.time_steps(passes, asked.rounds)
    for name, each in seconds.items():
        values[f"{name}_ms"] = 1e3 * statistics.median(each)
    ratios = [a / b for a, b in zip(seconds["each"], seconds["window"], strict=True)]
    values["coalesce_ratio"] = statistics.median(ratios)
    if mesh.rank == 0:
        shape = f"{mesh.replicate_size}x{mesh.shard_size}"
        for name, value in values.items():
            print(f"value torch_stage3_{shape}_{name} {value:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--replicate", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=8)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    shard = hsdp.job_size() // asked.replicate
    with hsdp.init_mesh(replicate=asked.replicate, shard=shard) as mesh:
        example.join_gloo(mesh)
        measure(mesh, asked)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
