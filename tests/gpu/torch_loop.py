"""Training loops in torch with an attached Reducer, compared with a reference bit for bit.

    torch_loop.py --device cpu|cuda --mesh 2x4

It starts the ranks itself and prints a verdict for each check. Exit status: 0 if all hold, else 1.
Gradients are whole numbers, whose sums are exact in any order and dtype, except in one check: the gradients
of an MLP are summed by the numeric rules of docs/design.md.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterator
from typing import Any

import check_script
import ranks
import torch
from gpu_report.checks import LOOPS
from torch import nn

import hsdp

STEPS, MICROBATCHES = 4, 2
LARGEST = 7  # sums over 8 ranks x 2 microbatches are exact in bf16
LIMIT_S = 300.0
TIMEOUT_S = 120.0  # on a machine that was just started, NCCL takes up to a minute to connect
SHAPES = [(37, 5), (1,), (64, 129), (300_001,), (8, 3, 3)]


class Weighted(nn.Module):
    """A model whose gradients are the arguments of its call."""
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(shape)) for shape in SHAPES])

    def forward(self, factors: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([(w * x).sum() for w, x in zip(self.weights, factors)]).sum()


def _factors(step: int, microbatch: int, rank: int) -> list[Any]:
    random = torch.Generator().manual_seed(1_000_000 * step + 1_000 * microbatch + rank)
    return [torch.randint(-LARGEST, LARGEST + 1, shape, generator=random) for shape in SHAPES]


def _exact_means(step: int, size: int) -> Iterator[Any]:
    made = [_factors(step, m, rank) for rank in range(size) for m in range(MICROBATCHES)]
    for same in zip(*made):
        yield torch.stack(same).sum(0).double() / size


def _train_step(reducer: Any, model: Any, step: int, device: Any, dtype: Any) -> None:
    for m in range(MICROBATCHES):
        factors = [x.to(device, dtype) for x in _factors(step, m, reducer.mesh.rank)]
        with reducer.microbatch(last=m == MICROBATCHES - 1):
            model(factors).backward()


def whole_numbers(replicate: int, shard: int, on: str, dtype_name: str, wire: str) -> str:
    """Runs one rank. Returns what is wrong, or nothing."""
    device = ranks.device_of_rank(on)
    dtype = getattr(torch, dtype_name)
    with hsdp.init_mesh(replicate, shard, device=device, timeout_s=TIMEOUT_S) as mesh:
        model = Weighted().to(device, dtype)
        reducer = hsdp.Reducer(mesh, reduce_dtype=wire, bucket_bytes=1 << 18)
        reducer.attach(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
        weights = [torch.ones(shape, dtype=torch.float64) for shape in SHAPES]
        for step in range(STEPS):
            _train_step(reducer, model, step, device, dtype)
            reducer.gather_gradients()
            for index, (p, mean) in enumerate(zip(model.parameters(), _exact_means(step, mesh.size))):
                if not torch.equal(p.grad.double().cpu(), mean):
                    return f"step {step}, parameter {index}: its gradient is not the mean"
                weights[index] -= 0.125 * mean
            if dtype == torch.float32:  # bf16 weights would be rounded
                optimizer.step()
        for index, (p, want) in enumerate(zip(model.parameters(), weights)):
            if dtype == torch.float32 and not torch.equal(p.detach().double().cpu(), want):
                return f"parameter {index}: its weights are not the reference's"
        reducer.close()
    return ""


def _mlp(device: Any) -> Any:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(24, 65), nn.GELU(), nn.Linear(65, 7)).to(device)


def _backward(model: Any, device: Any, step: int, microbatch: int, rank: int) -> None:
    random = torch.Generator().manual_seed(1_000_000 * step + 1_000 * microbatch + rank)
    model(torch.randn(16, 24, generator=random).to(device)).square().mean().backward()


def _sum_by_the_rules(plain: Any, device: Any, step: int, replicate: int, shard: int) -> list[Any]:
    """Sums in fp32 in ascending rank: each microbatch over the shard group, then over the replicas."""
    total: list[Any] = []
    for replica in range(replicate):
        carry: list[Any] = []
        for m in range(MICROBATCHES):
            rows: list[Any] = []
            for rank in range(replica * shard, (replica + 1) * shard):
                plain.zero_grad()
                _backward(plain, device, step, m, rank)
                grads = [p.grad for p in plain.parameters()]
                rows = [a + b for a, b in zip(rows, grads)] if rows else grads
            carry = [a + b for a, b in zip(carry, rows)] if carry else rows
        total = [a + b for a, b in zip(total, carry)] if total else carry
    return [t / (replicate * shard) for t in total]


def by_the_rules(replicate: int, shard: int, on: str) -> str:
    """Runs one rank, which also computes every rank's gradients for the reference."""
    device = ranks.device_of_rank(on)
    with hsdp.init_mesh(replicate, shard, device=device, timeout_s=TIMEOUT_S) as mesh:
        model = _mlp(device)
        plain = copy.deepcopy(model)
        reducer = hsdp.Reducer(mesh)
        reducer.attach(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(STEPS):
            for m in range(MICROBATCHES):
                with reducer.microbatch(last=m == MICROBATCHES - 1):
                    _backward(model, device, step, m, mesh.rank)
            reducer.gather_gradients()
            want = _sum_by_the_rules(plain, device, step, replicate, shard)
            for index, (p, mean) in enumerate(zip(model.parameters(), want)):
                if not torch.equal(p.grad, mean):
                    off = float((p.grad - mean).abs().max())
                    return f"step {step}, parameter {index}: off by up to {off:g}"
            optimizer.step()
            plain.load_state_dict(model.state_dict())
        reducer.close()
    return ""


def found_inf(replicate: int, shard: int, on: str) -> str:
    """Runs one rank; the last rank has an infinity in every second step."""
    device = ranks.device_of_rank(on)
    with hsdp.init_mesh(replicate, shard, device=device, timeout_s=TIMEOUT_S) as mesh:
        reducer = hsdp.Reducer(mesh, reduce_dtype="bf16")
        reducer.register("w", (1000,))
        for step in range(STEPS):
            value = math.inf if mesh.rank == mesh.size - 1 and step % 2 == 0 else 1.0
            with reducer.microbatch(last=True):
                reducer.gradient_ready("w", torch.full((1000,), value, device=device))
            want = step % 2 == 0
            tensor = float(reducer.found_inf_tensor())
            if reducer.found_inf() != want or tensor != float(want):
                return f"step {step}: expected {want}, got {reducer.found_inf()} and {tensor:g}"
        reducer.close()
    return ""


def _run_check(name: str, mesh: str, device: str) -> str:
    function, *rest = LOOPS[name]
    return ranks.problems_of(ranks.run_ranks(globals()[function], mesh, [device, *rest], device, LIMIT_S))


def main() -> int:
    expected = "1, 2, 4 or 8 ranks, whose means are exact"
    description = "Training loops in torch against a reference."
    return check_script.main(
        description, "1x1", expected, lambda size: size in (1, 2, 4, 8), "torch_loop", _run_check
    )


if __name__ == "__main__":
    sys.exit(main())
