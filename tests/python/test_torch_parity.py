"""Beside PyTorch's own HSDP: the same models, seeds and schedules, both held to float64.

Four ranks train small models of uneven widths with tied weights for five steps of three
microbatches, once with fully_shard over gloo and once attached to a Reducer. A system's gradients
are compared with the float64 sum of the fp32 gradients that its own weights give.
"""

from __future__ import annotations

import copy
import math
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Launcher
from fsdp2_model import COUNTS, CountedNet
from torch import nn
from torch.func import functional_call

import hsdp

# Shapes of meshes, and widths of models on them.
CASES = [((2, 2), 3), ((2, 2), 16), ((2, 2), 17), ((1, 4), 17), ((4, 1), 3)]
MICROBATCHES, STEPS = 3, 5
SYSTEMS = {
    # name: shard hop, replica hop
    "ours_f32": ("f32", "f32"),
    "ours_bf16": ("bf16", "bf16"),
    "ours_bf16_f32": ("bf16", "f32"),
}
FSDP2 = {"fsdp2_f32": torch.float32, "fsdp2_bf16": torch.bfloat16}

Tensors = dict[str, torch.Tensor]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, bias=False)
        self.inner = nn.Linear(width, 3 * width)
        self.outer = nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(self.inner(self.norm(x)).relu())


class Net(nn.Module):
    """Its first and last weights are one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(x)))


def make_net(width: int) -> Net:
    torch.manual_seed(width)
    return Net(width)


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], step: int, m: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(1000 * step + 10 * m + dist.get_rank())
    tokens = torch.randint(0, 11, (4, 6), generator=random)
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def reference(plain: Net, weights: Tensors, step: int) -> Tensors:
    """The mean over ranks, summed over microbatches, in float64, of these weights' gradients."""
    sums = {name: torch.zeros_like(w, dtype=torch.float64) for name, w in weights.items()}
    for m in range(MICROBATCHES):
        leaves = {name: w.detach().clone().requires_grad_() for name, w in weights.items()}
        loss = loss_of(lambda x, at=leaves: functional_call(plain, at, (x,)), step, m)
        for name, grad in zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True):
            sums[name] += grad
    joined = torch.cat([s.flatten() for s in sums.values()])
    dist.all_reduce(joined)
    joined /= dist.get_world_size()
    parts = joined.split([s.numel() for s in sums.values()])
    return {name: part.view_as(s) for (name, s), part in zip(sums.items(), parts, strict=True)}


def train_ours(mesh: hsdp.Mesh, net: Net, wires: list[str]) -> Iterator[tuple[int, Tensors, Tensors]]:
    """Each step: its number, the weights it began with, its gradients."""
    reducer = hsdp.Reducer(mesh, reduce_dtype=wires[0], replica_dtype=wires[1])
    reducer.attach(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for step in range(STEPS):
        weights = {name: p.detach().clone() for name, p in net.named_parameters()}
        for m in range(MICROBATCHES):
            with reducer.microbatch(last=m == MICROBATCHES - 1):
                loss_of(net, step, m).backward()
        reducer.gather_gradients()
        yield step, weights, {name: p.grad for name, p in net.named_parameters()}
        optimizer.step()
    reducer.close()


def train_fsdp2(shape: tuple[int, int], net: Net,
                dtype: torch.dtype) -> Iterator[tuple[int, Tensors, Tensors]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(reduce_dtype=dtype)}
    for block in net.blocks:
        fully_shard(block, **options)
    sharded = fully_shard(net, **options)
    optimizer = torch.optim.SGD(sharded.parameters(), 0.1, momentum=0.9)
    for step in range(STEPS):
        whole = {name: p.detach().full_tensor().clone() for name, p in sharded.named_parameters()}
        for m in range(MICROBATCHES):
            sharded.set_requires_all_reduce(m == MICROBATCHES - 1)
            loss_of(sharded, step, m).backward()
        yield step, whole, {name: p.grad.full_tensor() for name, p in sharded.named_parameters()}
        optimizer.step()
        optimizer.zero_grad(set_to_none=bool(step % 2))


def distance(steps: Iterator[tuple[int, Tensors, Tensors]], width: int) -> dict[str, Any]:
    """Relative distance from float64: of all gradients together, and of the worst step."""
    plain = make_net(width)
    squares, total, worst = 0.0, 0.0, 0.0
    for step, weights, gradients in steps:
        exact = reference(plain, weights, step)
        off = sum(float((gradients[n].double() - g).square().sum()) for n, g in exact.items())
        size = sum(float(g.square().sum()) for g in exact.values())
        squares, total = squares + off, total + size
        worst = max(worst, math.sqrt(off / size))
    flat = torch.cat([w.flatten() for w in weights.values()])
    return {"all": math.sqrt(squares / total), "worst": worst, "weights": flat.tolist()}


def apart(a: list[float], b: list[float]) -> float:
    """Relative distance."""
    return math.dist(a, b) / math.hypot(*b)


def join_torch(store: str) -> None:
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)


def run_parity(store: str) -> dict[str, Any]:
    join_torch(store)
    found: dict[str, Any] = {}
    for shape, width in CASES:
        case = f"{shape[0]}x{shape[1]} {width}"
        found[case] = {}
        for name, dtype in FSDP2.items():
            found[case][name] = distance(train_fsdp2(shape, make_net(width), dtype), width)
        with hsdp.init_mesh(*shape) as mesh:
            for name, wires in SYSTEMS.items():
                steps = train_ours(mesh, make_net(width), list(wires))
                found[case][name] = distance(steps, width)
    dist.destroy_process_group()
    return found


def test_parity(ranks: Launcher, tmp_path: pathlib.Path) -> None:
    everywhere = ranks(4, run_parity, str(tmp_path / "store"))
    assert everywhere[1:] == everywhere[:1] * 3  # replicas have the same bits
    missed = []
    for case, found in everywhere[0].items():
        bf16 = found["fsdp2_bf16"]["all"]
        rules = {
            "f32 within 1e-6": found["ours_f32"]["worst"] <= 1e-6,
            # Rounding in the first steps grows a little in the later ones.
            "f32 trains as FSDP2": apart(
                found["ours_f32"]["weights"], found["fsdp2_f32"]["weights"]) < 1e-4,
            "bf16, then f32": found["ours_bf16_f32"]["all"] <= 0.7 * bf16,
            "bf16 twice": found["ours_bf16"]["all"] <= bf16,
            "the measure sees rounding": bf16 > 1e-4,
        }
        numbers = {name: (found[name]["all"], found[name]["worst"],
                          apart(found[name]["weights"], found["fsdp2_f32"]["weights"]))
                   for name in found}
        print(case, numbers)
        missed += [(case, rule, numbers) for rule, held in rules.items() if not held]
    assert missed == []


def run_counts(flag: str, flagged: list[str]) -> list[int]:
    net = CountedNet()
    groups = net.parts()
    with hsdp.init_mesh(2, 2) as mesh:
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
        return [stats.reduce_scatter_count, stats.all_reduce_count]


def run_all_counts(cases: list[Any]) -> list[list[int]]:
    torch.set_num_threads(1)
    return [run_counts(flag, flagged) for flag, flagged, _ in cases]


def test_collective_counts(ranks: Launcher) -> None:
    for counts in ranks(4, run_all_counts, COUNTS):
        assert counts == [expected for _, _, expected in COUNTS]
