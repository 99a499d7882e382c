"""Facts about a step's gradients besides their values [Note: gradients that are not what they seem]."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hsdp.errors import UsageError


class ResultState:
    """For one attachment and one step: which gradients carry a loss scale, were zeroed, or were clipped
    only in p.grad.
    """

    def __init__(self, loss_scale: float) -> None:
        #: the Reducer's divisor (`set_loss_scale`)
        self.loss_scale = loss_scale
        #: the GradScaler's scale of the losses
        self.scale: torch.Tensor | None = None
        #: names whose gradients were unscaled, both in shards and p.grad
        self.unscaled: set[str] = set()
        #: the p.grad that zero_grad() left
        self.zeroed: dict[str, torch.Tensor | None] = {}
        #: names whose p.grad torch's clipping scaled, but not the shards
        self.clipped: set[str] = set()
        #: whether a GradScaler skips it
        self.skipped = False

    def gathered(self) -> None:
        """p.grad now equals the shards."""
        self.zeroed.clear()
        self.clipped.clear()

    def is_zeroed(self, name: str, grad: torch.Tensor) -> bool:
        """Whether the current p.grad is what zero_grad() left."""
        return self.zeroed.get(name) is grad

    def require_unscaled(self, caller: str, names: Iterable[str], divided: bool) -> None:
        """Raises UsageError if one of them carries a scale. `divided`: the Reducer has divided them."""
        name = next((name for name in names if name not in self.unscaled), None)
        if name is None or self.scale is None:
            return
        left = float(self.scale) / (self.loss_scale if divided else 1.0)
        if left != 1.0:
            raise UsageError(
                f"{caller}: expected gradients without a loss scale, got that of '{name}' times "
                f"{left:g}, by which a GradScaler scaled the loss; call scaler.unscale_(optimizer) "
                "before, after reducer.gather_gradients() (which a ShardedOptimizer does without), "
                "or reducer.set_loss_scale(scaler.get_scale()) before the step"
            )

    def require_unclipped(self, caller: str, names: Iterable[str]) -> None:
        """Raises UsageError if p.grad was clipped but the shards were not."""
        name = next((name for name in names if name in self.clipped), None)
        if name is not None:
            raise UsageError(
                f"{caller}: expected shards and p.grad of one scale, got the p.grad of '{name}' "
                "clipped by torch and its shard not; clip with reducer.clip_grad_norm_ alone, "
                "which does both, or call reducer.gather_gradients() anew"
            )

    def require_kept(self, caller: str, names: Iterable[str]) -> None:
        """Raises UsageError if zero_grad() was called."""
        name = next((name for name in names if name in self.zeroed), None)
        if name is not None:
            refuse_zeroed(caller, name)


def refuse_zeroed(caller: str, name: str) -> None:
    """Raises a UsageError for a gradient that is gone."""
    raise UsageError(
        f"{caller}: expected the gradient of '{name}' as the step left it, got one that was zeroed "
        "since; call zero_grad() after the optimizer's step, or begin the next step to drop this one"
    )
