"""Loss scaling with the same verdict on every rank [Note: one verdict for a loss scale]."""

from __future__ import annotations

from typing import Any

import torch

from hsdp.reducer import Reducer
from hsdp.torch.guards.loss_scaling import Found, merged, take_over_unscaling


class GradScaler(torch.amp.GradScaler):
    """torch's GradScaler, but a step is skipped on all ranks or on none.

        scaler = hsdp.torch.GradScaler(reducer, device="cpu")
        with reducer.microbatch(last=True):
            scaler.scale(loss).backward()
        reducer.gather_gradients()
        scaler.unscale_(optimizer)  # where something is clipped
        reducer.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()

    For optimizers that hold attached parameters, torch's own GradScaler does the same: an infinity or
    NaN that any rank saw in the step (`reducer.found_inf`) counts on every rank, and `unscale_` divides
    the shards as well as p.grad. This class applies what its Reducer saw to every optimizer, including
    one that holds its own slices.

    - `unscale_` comes after `gather_gradients`. Local sums (`keep_grads=True`) and optimizers that take
      shards, such as `hsdp.zero.ShardedOptimizer`, do not need a gather.
    - `reducer.set_loss_scale(scaler.get_scale())` before a step saves the unscaling pass, and clipping
      then needs no `unscale_`; nothing is divided twice.
    - Clipping, or stepping, that would mistake scaled gradients for unscaled ones raises UsageError.

    Every rank calls `step`, `unscale_` and `update`. Other arguments are those of torch.amp.GradScaler.
    """

    def __init__(self, reducer: Reducer, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        take_over_unscaling()
        self._reducer = reducer

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> Found:
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        word = self._reducer.found_inf_tensor().to(found_inf.device, non_blocking=True)
        return merged([found, {found_inf.device: word}])
