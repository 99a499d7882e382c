"""Comparisons that several tests use."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist


def require_same(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> None:
    """Asserts the same keys and values, to the bit."""
    assert left.keys() == right.keys()
    for key, value in left.items():
        assert torch.equal(value, right[key]), key


def same(one: Any, other: Any) -> bool:
    """Compares tensors in dictionaries and lists, to the bit, with their dtypes."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def states_of(optimizer: Any) -> dict[str, torch.Tensor]:
    """The whole states of a ShardedOptimizer, by number and name."""
    return {
        f"{number} {key}": torch.as_tensor(value)
        for number, state in optimizer.full_state_dict()["state"].items() for key, value in state.items()
    }


def parameters_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters by name, as they are now, in memory that does not change later."""
    return {name: value.detach() for name, value in model.named_parameters()}


def max_difference(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> float:
    """The largest difference of any element, over the same keys."""
    assert left.keys() == right.keys()
    return max(float((left[key].double() - right[key].double()).abs().max()) for key in left)


def differing_ranks(model: torch.nn.Module) -> int:
    """How many ranks of torch.distributed have parameters that differ from rank 0's. Collective."""
    mine = b"".join(p.numpy().tobytes() for p in parameters_of(model).values())
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, hashlib.sha256(mine).hexdigest())
    return sum(digest != digests[0] for digest in digests)
