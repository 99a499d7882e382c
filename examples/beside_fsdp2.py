"""A Reducer and PyTorch's FSDP2 on the same mesh: how exact they are, and what a step costs.

    hsdp_run -n 4 python examples/beside_fsdp2.py

Both reduce the gradients of the same model in bf16 over 2x2 ranks, four microbatches per step; FSDP2
does it with gloo. The gradients of each are compared with a float64 sum, and the steps with the same
step without any reduction, all taking turns. FSDP2 keeps its parameters whole between steps, so that
they are not gathered again.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import hsdp
from hsdp.options import PartialSync

LAYERS, WIDTH, ROWS = 12, 384, 8
MICROBATCHES = 4
ROUNDS = 9

Step = Callable[[], None]


def make_model(layers: int, width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


def backward(model: nn.Module, inputs: torch.Tensor, microbatch: int) -> None:
    model(inputs * (1 + microbatch)).square().mean().backward()


def without_reduction(model: nn.Module, inputs: torch.Tensor) -> Step:
    def step() -> None:
        model.zero_grad()
        for m in range(MICROBATCHES):
            backward(model, inputs, m)

    return step


def reduced_by_hsdp(
    reducer: hsdp.Reducer, model: nn.Module, inputs: torch.Tensor, first: PartialSync = "shard"
) -> Step:
    """`first`: the sync of all microbatches but the last."""
    reducer.set_partial_sync(first)
    reducer.attach(model)
    names = [parameter.name for parameter in reducer.parameters]

    def step() -> None:
        for m in range(MICROBATCHES):
            with reducer.microbatch(last=m == MICROBATCHES - 1):
                backward(model, inputs, m)
        for name in names:
            reducer.shard(name)

    return step


def reduced_by_fsdp2(
    model: nn.Sequential, inputs: torch.Tensor, dtype: torch.dtype
) -> tuple[Step, list[nn.Parameter]]:
    """The step, and the sharded parameters, which the model hides while it has whole ones."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    policy = MixedPrecisionPolicy(reduce_dtype=dtype)
    for layer in model:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    sharded = cast(FSDPModule, model)
    sharded.set_reshard_after_backward(False)
    parameters = list(model.parameters())

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        for m in range(MICROBATCHES):
            sharded.set_requires_all_reduce(m == MICROBATCHES - 1)
            backward(model, inputs, m)

    return step, parameters


def time_steps(systems: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Seconds of each round, on the slowest rank."""
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    gc.disable()
    for number in range(rounds + 1):
        for name, step in systems.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            longest = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
            dist.all_reduce(longest, dist.ReduceOp.MAX)
            if number > 0:  # the first one allocates
                seconds[name].append(float(longest))
    gc.enable()
    return seconds


def added_ms(seconds: dict[str, list[float]], name: str) -> float:
    """What reduction adds to a step: the median difference over the rounds."""
    pairs = zip(seconds[name], seconds["none"], strict=True)
    return 1e3 * statistics.median(with_it - without for with_it, without in pairs)


def distance(parameters: list[nn.Parameter], exact: list[torch.Tensor]) -> float:
    """Relative distance of their gradients from the float64 mean."""
    off = size = 0.0
    for parameter, mean in zip(parameters, exact, strict=True):
        grad = parameter.grad
        assert grad is not None
        whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
        off += float((whole.double() - mean).square().sum())
        size += float(mean.square().sum())
    return float((off / size) ** 0.5)


def float64_means(inputs: torch.Tensor) -> list[torch.Tensor]:
    model = make_model(LAYERS, WIDTH)
    sums = [torch.zeros(p.shape, dtype=torch.float64) for p in model.parameters()]
    for m in range(MICROBATCHES):
        backward(model, inputs, m)
        for parameter, total in zip(model.parameters(), sums, strict=True):
            assert parameter.grad is not None
            total += parameter.grad
        model.zero_grad()
    for total in sums:
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return sums


def join_gloo(mesh: hsdp.Mesh) -> None:
    """Initializes torch.distributed over the mesh's ranks, which meet at a file named by rank 0."""
    name = tempfile.mktemp(prefix="gloo-") if mesh.rank == 0 else ""
    path = mesh.world.all_gather(np.frombuffer(name.encode(), np.uint8)).numpy().tobytes().decode()
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=mesh.rank, world_size=mesh.size
    )


def main() -> None:
    torch.set_num_threads(1)
    with hsdp.init_mesh(replicate=2, shard=2) as mesh:
        join_gloo(mesh)
        torch.manual_seed(mesh.rank)
        inputs = torch.randn(ROWS, WIDTH)
        plain, ours, theirs = (make_model(LAYERS, WIDTH) for _ in range(3))
        reducer = hsdp.Reducer(mesh, reduce_dtype="bf16")
        fsdp2, sharded = reduced_by_fsdp2(theirs, inputs, torch.bfloat16)
        systems = {
            "none": without_reduction(plain, inputs),
            "hsdp": reduced_by_hsdp(reducer, ours, inputs),
            "fsdp2": fsdp2,
        }
        seconds = time_steps(systems, ROUNDS)
        added = {name: added_ms(seconds, name) for name in ("hsdp", "fsdp2")}
        reducer.gather_gradients()
        exact = float64_means(inputs)
        off = {
            "hsdp": distance(list(ours.parameters()), exact),
            "fsdp2": distance(sharded, exact),
        }
        dist.destroy_process_group()
        if mesh.rank > 0:
            return
    held = off["hsdp"] <= off["fsdp2"] and added["hsdp"] < added["fsdp2"]
    print(
        f"       {'ok' if held else 'NO'}  bf16, beside FSDP2 over gloo        "
        f"{100 * off['hsdp']:.2f} % and {100 * off['fsdp2']:.2f} % from float64, "
        f"{max(added['hsdp'], 0):.0f} and {added['fsdp2']:.0f} ms added to a step"
    )
    if not held:
        raise SystemExit("expected to be nearer to float64 and faster than FSDP2")


if __name__ == "__main__":
    main()
