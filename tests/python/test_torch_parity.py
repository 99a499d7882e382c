"""Compared with PyTorch's HSDP: the same model, data and schedule, all measured against float64.

Four ranks train a small model of uneven widths with tied weights for three steps of three microbatches: with
fully_shard over gloo, with hsdp's hop between the replicas of fully_shard, and attached to a Reducer.
Gradients are compared with the float64 sum for each system's current weights.
"""

from __future__ import annotations

import copy
import pathlib
from collections.abc import Callable
from typing import Any

import torch
from conftest import Launcher, on_mesh
from fsdp2_model import (
    COUNTS, MICROBATCHES, CountedNet, Net, device_mesh, expected_gradients, fingerprint, loss_of, make_model,
    squared_error, start_torch, worst_error,
)
from torch.distributed.tensor import DTensor

import hsdp

STEPS = 3
BF16 = torch.bfloat16
# A model, and the function that makes a step's gradients.
System = tuple[Any, Callable[[int], None]]


def hooked(mesh: hsdp.Mesh, shard_mesh: Any, reduce_dtype: Any, hop: Any, **settings: Any) -> System:
    """Its steps run through replica_hook."""
    model = make_model(shard_mesh, reduce_dtype)
    for name, value in settings.items():
        for module in (model, model.first, model.last):
            getattr(module, name)(value)
    handle = hsdp.torch.replica_hook(model, mesh, hop)

    def run(step: int) -> None:
        model.zero_grad(set_to_none=step % 2 == 0)
        for m in range(MICROBATCHES):
            handle.set_requires_all_reduce(m == MICROBATCHES - 1)
            loss_of(model, step, m, mesh.rank).backward()
            assert (handle.carry_bytes > 0) == (m < MICROBATCHES - 1)
        handle.finish()

    return model, run


def attached(mesh: hsdp.Mesh, *wires: str) -> System:
    """Attached to a Reducer with those dtypes in the shard group and between replicas."""
    torch.manual_seed(5)
    model = Net()
    reducer = hsdp.Reducer(mesh, reduce_dtype=wires[0], replica_dtype=wires[1])
    reducer.attach(model)

    def run(step: int) -> None:
        for m in range(MICROBATCHES):
            with reducer.microbatch(last=m == MICROBATCHES - 1):
                loss_of(model, step, m, mesh.rank).backward()
        reducer.gather_gradients()

    return model, run


def fsdp2(mesh: hsdp.Mesh, mesh_2d: Any, reduce_dtype: Any) -> System:
    """FSDP2's HSDP, which all-reduces in the reduce dtype."""
    model = make_model(mesh_2d, reduce_dtype)

    def run(step: int) -> None:
        model.zero_grad(set_to_none=step % 2 == 0)
        for m in range(MICROBATCHES):
            model.set_requires_all_reduce(m == MICROBATCHES - 1)
            loss_of(model, step, m, mesh.rank).backward()

    return model, run


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def errors(system: System, size: int, factor: float = 1.0) -> tuple[float, float]:
    """Errors over all steps, against float64: the worst parameter's, and the root mean square."""
    model, run = system
    squares, worst = 0.0, 0.0
    for step in range(STEPS):
        weights = {name: whole(p.detach()) for name, p in model.named_parameters()}
        expected = expected_gradients(weights, step, size)
        run(step)
        got = {name: whole(p.grad) / factor for name, p in model.named_parameters()}
        squares += squared_error(got, expected)
        worst = max(worst, worst_error(got, expected))
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.05 * p.grad.to(p.dtype)
    return worst, float((squares / STEPS) ** 0.5)


def same_on_all_replicas(mesh: hsdp.Mesh, system: System) -> None:
    model, run = system
    run(0)
    bits = mesh.replicate_group._handle.exchange(fingerprint(model), "test")
    assert len(set(bits)) == 1


def measure_all(folder: str) -> dict[str, Any]:
    start_torch(folder)
    return {f"{r}x{s}": measure(r, s) for r, s in [(2, 2), (4, 1), (1, 4)]}


def measure(replicate: int, shard: int) -> dict[str, tuple[float, float]]:
    mesh_2d = device_mesh(replicate, shard)
    one = mesh_2d["shard"]
    with hsdp.init_mesh(replicate, shard) as mesh:
        systems = {
            "fsdp2 bf16": fsdp2(mesh, mesh_2d, BF16),
            "attached f32": attached(mesh, "f32", "f32"),
            "attached bf16, f32": attached(mesh, "bf16", "f32"),
            "attached bf16": attached(mesh, "bf16", "bf16"),
        }
        if replicate > 1:
            systems |= {
                "hooked f32": hooked(mesh, one, None, None),
                "hooked bf16, f32": hooked(mesh, one, BF16, hsdp.PlainHop("f32")),
                "hooked bf16": hooked(mesh, one, BF16, None),
            }
        result = {name: errors(system, mesh.size) for name, system in systems.items()}
        if replicate == shard:
            bf16 = hsdp.PlainHop("bf16")
            result["hooked f32, bf16"] = errors(hooked(mesh, one, None, bf16), mesh.size)
            result["hooked f16"] = errors(hooked(mesh, one, torch.float16, None), mesh.size)
            settings = {"set_gradient_divide_factor": 1, "set_force_sum_reduction_for_comms": True}
            result["hooked sum"] = errors(
                hooked(mesh, one, None, None, **settings), mesh.size, factor=shard
            )
            same_on_all_replicas(mesh, hooked(mesh, one, BF16, hsdp.PlainHop("bf16")))
    return result


def test_gradients_are_those_of_float64(ranks: Launcher, tmp_path: pathlib.Path) -> None:
    everywhere = ranks.start(4, measure_all, str(tmp_path)).wait(limit_s=240)
    assert everywhere[1:] == everywhere[:1] * 3  # replicas have the same bits
    for mesh, found in everywhere[0].items():
        worst = {name: value[0] for name, value in found.items()}
        rms = {name: value[1] for name, value in found.items()}
        print(mesh, found)
        theirs = rms["fsdp2 bf16"]
        assert 1e-4 < theirs < 2**-7, "the measure sees rounding"
        for way in {name.split()[0] for name in found} - {"fsdp2"}:
            assert worst[f"{way} f32"] < 1e-6, (mesh, way)
            assert rms[f"{way} bf16, f32"] <= 0.7 * theirs, (mesh, way)
            assert rms[f"{way} bf16"] <= theirs, (mesh, way)
        assert worst.get("hooked sum", 0) < 1e-6, mesh
        if mesh == "2x2":
            assert rms["hooked f16"] < rms["hooked bf16"] / 4
            assert rms["hooked f32, bf16"] < rms["hooked bf16"]


@on_mesh(2, 2)
def test_collective_counts(mesh: hsdp.Mesh) -> None:
    for flag, flagged, expected in COUNTS:
        net = CountedNet()
        groups = net.parts()
        reducer = hsdp.Reducer(mesh)
        plain = copy.deepcopy(net)
        reducer.attach(net, groups=groups)
        assert {p.group for p in reducer.parameters} == set(groups)
        for m in range(MICROBATCHES):
            for group in flagged:
                getattr(reducer, f"set_requires_{flag}")(m == MICROBATCHES - 1, group=group)
            x = torch.full((2, 7), float(1 + m + mesh.rank))
            with reducer.microbatch():
                net(x).square().mean().backward()
            plain(x).square().mean().backward()
        reducer.gather_gradients()
        for (name, p), q in zip(net.named_parameters(), plain.parameters(), strict=True):
            mesh.world.mean(q.grad)
            assert torch.allclose(p.grad, q.grad, rtol=1e-5, atol=1e-7), name
        stats = reducer.stats()
        reducer.close()
        assert [stats.reduce_scatter_count, stats.all_reduce_count] == expected, (flag, flagged)
