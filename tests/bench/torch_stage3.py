"""Steps with sliced parameters: ShardedOptimizer at stage 3 beside FSDP2 over gloo.

stage3.py runs it in shared memory and over a slow link. All systems take turns, and the slowest rank of
a round counts. With --replicate 1 the ranks are one shard group.

- `steps`: a step is one backward pass and AdamW in bf16 on fp32 masters. What a system adds is the
  median over rounds of its step's time minus the time of the same backward pass and of AdamW on this
  rank's share of the elements, without communication.
- `coalesce`: steps of four backward passes, reduced one by one or once at the end, with units kept from
  their forward to their backward pass, or until the step.
- `prefetch`: a forward and a backward pass that need all parameters and reduce nothing. The hidden share
  is the part of the gathers' time by which the passes do not become longer than without communication.

Prints `value NAME NUMBER` lines.

    hsdp_run -n 4 python torch_stage3.py [--part P] [--replicate R] [--rounds N] [--layers L] [--width W]
        [--rows N]
"""

from __future__ import annotations

import argparse
import itertools
import pathlib
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import hsdp
from torch_zero import alone

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))
import beside_fsdp2 as example  # noqa: E402

PASSES = 4


def make_model(asked: argparse.Namespace, dtype: torch.dtype) -> nn.Sequential:
    return example.make_model(asked.layers, asked.width).to(dtype)


def ours(
    mesh: hsdp.Mesh, asked: argparse.Namespace, inputs: torch.Tensor, passes: int = 1,
    once: bool = False, **options: Any,
) -> example.Step:
    model = make_model(asked, torch.bfloat16)
    reducer = hsdp.Reducer(mesh)
    reducer.attach(model)
    optimizer = hsdp.zero.ShardedOptimizer(
        torch.optim.AdamW, model, reducer, stage=3, units=[nn.Linear], **options
    )

    def step() -> None:
        if once:
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
    mesh: hsdp.Mesh, asked: argparse.Namespace, inputs: torch.Tensor, passes: int = 1,
    once: bool = False, reshard_after_forward: bool = True, reshard_after_backward: bool = True,
) -> example.Step:
    if mesh.replicate_size > 1:
        shape, names = (mesh.replicate_size, mesh.shard_size), ("dp_replicate", "dp_shard")
    else:
        shape, names = (mesh.shard_size,), ("dp_shard",)
    torch_mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    model = make_model(asked, torch.float32)
    options = {"mp_policy": policy, "reshard_after_forward": reshard_after_forward}
    for layer in model:
        fully_shard(layer, mesh=torch_mesh, **options)
    root: Any = fully_shard(model, mesh=torch_mesh, **options)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        for m in range(passes):
            root.set_requires_gradient_sync(not once or m == passes - 1)
            root.set_reshard_after_backward(reshard_after_backward or m == passes - 1)
            example.backward(model, inputs, m)
        optimizer.step()

    return step


# When a system releases gathered parameters.
KEPT: dict[str, dict[str, bool]] = {
    "": {},
    "_kept": {"reshard_after_forward": False},
    "_until_step": {"reshard_after_forward": False, "reshard_after_backward": False},
}

Values = dict[str, float]


def median_ms(seconds: list[float]) -> float:
    return 1e3 * statistics.median(seconds)


def measure_steps(mesh: hsdp.Mesh, asked: argparse.Namespace) -> Values:
    inputs = torch.randn(asked.rows, asked.width, dtype=torch.bfloat16)
    systems = {"none": alone(make_model(asked, torch.bfloat16), inputs, mesh.shard_size)}
    for name, kept in (("resharded", KEPT[""]), ("kept", KEPT["_kept"])):
        systems[f"ours_{name}"] = ours(mesh, asked, inputs, **kept)
        systems[f"fsdp2_{name}"] = fsdp2(mesh, asked, inputs, **kept)
    seconds = example.time_steps(systems, asked.rounds)
    added = {name: example.added_ms(seconds, name) for name in systems if name != "none"}
    values = {f"{name}_added_ms": value for name, value in added.items()}
    values["none_ms"] = median_ms(seconds["none"])
    for name in ("resharded", "kept"):
        values[f"{name}_ratio"] = added[f"fsdp2_{name}"] / added[f"ours_{name}"]
    return values


def measure_coalescing(mesh: hsdp.Mesh, asked: argparse.Namespace) -> Values:
    inputs = torch.randn(asked.rows, asked.width, dtype=torch.bfloat16)
    systems = {}
    for name, kept in KEPT.items():
        for times, once in (("each", False), ("once", True)):
            options: dict[str, Any] = {"passes": PASSES, "once": once, **kept}
            systems[f"ours{name}_{times}"] = ours(mesh, asked, inputs, **options)
            systems[f"fsdp2{name}_{times}"] = fsdp2(mesh, asked, inputs, **options)
    seconds = example.time_steps(systems, asked.rounds)
    values = {f"{name}_ms": median_ms(each) for name, each in seconds.items()}
    for name in (f"{system}{kept}" for system in ("ours", "fsdp2") for kept in KEPT):
        pairs = zip(seconds[f"{name}_each"], seconds[f"{name}_once"], strict=True)
        values[f"{name}_once_ratio"] = statistics.median(each / once for each, once in pairs)
    return values


def frozen_model(asked: argparse.Namespace, dtype: torch.dtype) -> nn.Sequential:
    """A model whose layers are only gathered; it trains a single number beside them."""
    model = make_model(asked, dtype).requires_grad_(False)
    model.register_parameter("trained", nn.Parameter(torch.zeros(1, dtype=dtype)))
    return model


def measure_prefetching(mesh: hsdp.Mesh, asked: argparse.Namespace) -> Values:
    """Times passes that gather for the forward and for the backward pass, and reduce nothing."""
    inputs = torch.randn(asked.rows, asked.width, dtype=torch.bfloat16, requires_grad=True)

    def passes_of(model: nn.Module) -> example.Step:
        def passes() -> None:
            torch.autograd.grad(model(inputs).sum(), inputs)

        return passes

    systems = {"alone": passes_of(make_model(asked, torch.bfloat16).requires_grad_(False))}
    for name, options in (("ours", {}), ("ours_not_ahead", {"prefetch_bytes": 0})):
        model = frozen_model(asked, torch.bfloat16)
        reducer = hsdp.Reducer(mesh)
        reducer.attach(model)
        optimizer = hsdp.zero.ShardedOptimizer(
            torch.optim.AdamW, model, reducer, stage=3, units=[nn.Linear], **options
        )
        systems[f"{name}_passes"] = passes_of(model)
        systems[f"{name}_gathers"] = gathers_of(model, optimizer.unshard, optimizer.reshard)
    torch_mesh = init_device_mesh("cpu", (mesh.shard_size,), mesh_dim_names=("dp_shard",))
    for name, is_ahead in (("fsdp2", False), ("fsdp2_ahead", True)):
        model = frozen_model(asked, torch.bfloat16)
        for layer in model:
            fully_shard(layer, mesh=torch_mesh)
        fully_shard(model, mesh=torch_mesh)
        if is_ahead:
            layers: list[Any] = list(model)
            for before, after in itertools.pairwise(layers):
                before.set_modules_to_forward_prefetch([after])
                after.set_modules_to_backward_prefetch([before])
        systems[f"{name}_passes"] = passes_of(model)
        systems[f"{name}_gathers"] = gathers_of(model, lambda m: m.unshard(), lambda m: m.reshard())
    seconds = example.time_steps(systems, asked.rounds)
    values = {f"{name}_ms": median_ms(each) for name, each in seconds.items()}
    for name in ("ours", "ours_not_ahead", "fsdp2", "fsdp2_ahead"):
        rounds = zip(
            seconds["alone"], seconds[f"{name}_passes"], seconds[f"{name}_gathers"], strict=True
        )
        values[f"{name}_hidden"] = statistics.median(1 - (b - a) / gathers for a, b, gathers in rounds)
    return values


def gathers_of(
    model: nn.Sequential, gather: Callable[[Any], Any], release: Callable[[Any], Any]
) -> example.Step:
    """Gathers as often as a forward and a backward pass; the backward pass still has the last layer."""

    def gathers() -> None:
        layers = list(model)
        for layer in [*layers, *reversed(layers[:-1])]:
            gather(layer)
            release(layer)

    return gathers


PARTS = {"steps": measure_steps, "coalesce": measure_coalescing, "prefetch": measure_prefetching}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--part", choices=PARTS, default="steps")
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
        values = PARTS[asked.part](mesh, asked)
        if mesh.rank == 0:
            shape = f"{mesh.replicate_size}x{mesh.shard_size}"
            for name, value in values.items():
                print(f"value torch_stage3_{shape}_{name} {value:.3f}")
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
