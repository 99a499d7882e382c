"""Steps of models whose loss is linear in their parameters, so that means of gradients are exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import hsdp

MICROBATCHES = 2
UNIT = 2.0**-36  # sums of a few of these and small integers are exact in f64, but not in f32

#: the inputs of a step, microbatch and rank, one for each parameter
Inputs = Callable[[int, int, int], list[torch.Tensor]]


def mean_inputs(inputs_of: Inputs, step: int, size: int) -> list[torch.Tensor]:
    every = [inputs_of(step, m, rank) for m in range(MICROBATCHES) for rank in range(size)]
    return [sum(parts[1:], parts[0]) / size for parts in zip(*every, strict=True)]


def run_backward(inputs_of: Inputs, model: Any, reducer: hsdp.Reducer, mesh: hsdp.Mesh, step: int) -> None:
    for m in range(MICROBATCHES):
        with reducer.microbatch(last=m == MICROBATCHES - 1):
            model(*inputs_of(step, m, mesh.rank)).backward()


def values(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def released(stage: int) -> dict[str, Any]:
    """Options that release parameters at stage 3 although they are small."""
    return {"persistence_threshold": 0} if stage == 3 else {}


def require_equal(got: list[Any], want: list[torch.Tensor]) -> None:
    assert [g.dtype for g in got] == [w.dtype for w in want]
    assert all(map(torch.equal, got, want)), (got, want)
