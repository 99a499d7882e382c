"""What several tests compare."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist


def require_same(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> None:
    """The same keys and values, to the bit."""
    assert left.keys() == right.keys()
    for key, value in left.items():
        assert torch.equal(value, right[key]), key


def parameters_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """By name, as they are now and will be."""
    return {name: value.detach() for name, value in model.named_parameters()}


def max_difference(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> float:
    """The largest of any element of the same keys."""
    assert left.keys() == right.keys()
    return max(float((left[key].double() - right[key].double()).abs().max()) for key in left)


def differing_ranks(model: torch.nn.Module) -> int:
    """How many ranks of torch.distributed have other parameters than rank 0. Collective."""
    mine = b"".join(p.numpy().tobytes() for p in parameters_of(model).values())
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, hashlib.sha256(mine).hexdigest())
    return sum(digest != digests[0] for digest in digests)
