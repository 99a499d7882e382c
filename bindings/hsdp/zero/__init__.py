"""Around ZeRO: backward passes that are reduced once, optimizers that run on slices, and parameters
that are gathered under what comes next. docs/zero.md says when they pay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from hsdp.framework import of_torch as _of_torch
from hsdp.zero.coalesced_window import CoalescedWindow, coalesce_grad_reduction
from hsdp.zero.parameter_gather import GatherStats, ParameterGather

if _TYPE_CHECKING:
    from hsdp.torch.sharded_optimizer import ShardedOptimizer as ShardedOptimizer

__all__ = [
    "CoalescedWindow", "GatherStats", "ParameterGather", "ShardedOptimizer",
    "coalesce_grad_reduction",
]


# It needs torch, which `import hsdp` does not.
def __getattr__(name: str) -> _Any:
    if name == "ShardedOptimizer":
        return _of_torch(name)
    raise AttributeError(f"module 'hsdp.zero' has no attribute '{name}'")
