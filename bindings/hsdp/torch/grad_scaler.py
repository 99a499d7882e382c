"""Loss scaling whose verdict is the same on every rank [Note: one verdict for a loss scale]."""

from __future__ import annotations

from typing import Any

import torch

from hsdp.reducer import Reducer


class GradScaler(torch.amp.GradScaler):
    """torch's GradScaler, but a step is skipped on all ranks or on none.

        scaler = hsdp.torch.GradScaler(reducer, device="cpu")
        with reducer.microbatch(last=True):
            scaler.scale(loss).backward()
        reducer.gather_gradients()
        scaler.step(optimizer)
        scaler.update()

    An infinity or NaN that any rank saw in the step (`reducer.found_inf`) counts on every rank,
    beside what p.grad shows here; so it also works for local sums (`keep_grads=True`) and for
    optimizers that take shards. `hsdp.zero.ShardedOptimizer` unscales its own; others call
    `reducer.set_loss_scale(scaler.get_scale())` before the step, because shards have no p.grad that
    the scaler could unscale. `step`, `unscale_` and `update` are then called by every rank. Other
    arguments are those of torch.amp.GradScaler.
    """

    def __init__(self, reducer: Reducer, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reducer = reducer

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        found: dict[torch.device, torch.Tensor] = super()._unscale_grads_(
            optimizer, inv_scale, found_inf, allow_fp16
        )
        if not found:
            found = {found_inf.device: found_inf}
        word = self._reducer.found_inf_tensor()
        for device, flag in found.items():
            flag.copy_(torch.maximum(flag, word.to(device, non_blocking=True)))
        return found


# torch's own asserts that it has seen a gradient in p.grad; an optimizer that takes shards has none.
_unscale_grads = torch.amp.GradScaler._unscale_grads_


def _unscale_shards_or_grads(
    self: torch.amp.GradScaler,
    optimizer: torch.optim.Optimizer,
    inv_scale: torch.Tensor,
    found_inf: torch.Tensor,
    allow_fp16: bool,
) -> dict[torch.device, torch.Tensor]:
    unscale = getattr(optimizer, "_unscale_shards", None)
    if unscale is not None:
        return {found_inf.device: unscale(inv_scale).to(found_inf)}
    found: dict[torch.device, torch.Tensor] = _unscale_grads(
        self, optimizer, inv_scale, found_inf, allow_fp16
    )
    return found


torch.amp.GradScaler._unscale_grads_ = _unscale_shards_or_grads
