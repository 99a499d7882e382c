"""What the microbatches of a step left in a shard group, before it goes over the replicas."""

from __future__ import annotations

from typing import Any

import torch

from hsdp.errors import UsageError
from hsdp.torch.fsdp_parameter_group import FsdpParameterGroup


class ShardCarry:
    """The fp32 sum of one FSDPModule's scattered gradients, not yet summed over the replicas."""

    def __init__(self, index: int, group: FsdpParameterGroup) -> None:
        self.index = index
        self.group = group
        self.total: torch.Tensor | None = None
        self.microbatch_count = 0
        self._factor: float | None = None  # of what is in the total
        self._written: Any = None  # CUDA: when the total is

    def require_usable(self, count: int) -> None:
        """UsageError unless `count` gradients can be added."""
        name, expected = self.group.name, self.group.count()
        held = expected if self.total is None else self.total.numel()
        if count != expected or held != expected:
            raise UsageError(
                f"replica_hook: gradients of {name}: expected {expected} elements, those of all "
                f"its trainable parameters, got {count} beside {held} from earlier backwards; "
                "where a backward leaves parameters of a module unused, call "
                "model.set_reduce_scatter_unused_params(True); freeze parameters between steps only"
            )
        if self.total is not None and self._factor != self.group.divide_factor:
            raise UsageError(
                f"replica_hook: gradients of {name}: expected the divide factor {self._factor} of "
                f"the step's earlier backwards, got {self.group.divide_factor}; call "
                "set_gradient_divide_factor between steps only"
            )

    def add(self, flat: torch.Tensor) -> torch.Tensor:
        """Adds a backward's gradients; returns the fp32 sum, which may be `flat` itself."""
        if self.total is not None:
            return self.total.add_(flat)
        return flat if flat.dtype == torch.float32 else flat.float()

    def keep(self, total: torch.Tensor) -> None:
        """Holds the sum until a later backward."""
        self.total = total
        self.microbatch_count += 1
        self._factor = self.group.divide_factor
        if total.is_cuda:
            self._written = torch.cuda.current_stream(total.device).record_event()

    def take(self) -> torch.Tensor:
        """The sum, ready on the current stream; zeros where there was no gradient."""
        total = self.total
        if total is None:
            total = torch.zeros(self.group.count(), device=self.group.device)
        elif total.is_cuda and self._written is not None:
            stream = torch.cuda.current_stream(total.device)
            stream.wait_event(self._written)
            total.record_stream(stream)
        self.drop()
        return total

    def drop(self) -> None:
        """Forgets the sum."""
        self.total = None
        self.microbatch_count = 0
        self._written = None
