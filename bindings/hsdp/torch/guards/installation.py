"""The functions of torch that are wrapped, for the whole process, from the first attachment on."""

from __future__ import annotations

import functools

from torch.optim.optimizer import register_optimizer_step_pre_hook

from hsdp.torch.guards.ddp_guard import guard_ddp
from hsdp.torch.guards.loss_scaling import guard_scale
from hsdp.torch.guards.unreduced_gradient_guard import before_step, guard_clipping
from hsdp.torch.guards.watched_gradients import (
    WatchedGradients, WatchedHook, is_watched, replica_hooks, watched,
)
from hsdp.torch.guards.zero_grad_guard import guard_zero_grad

_attach_count = 0  # in this process so far


def watch(attachment: WatchedGradients) -> None:
    """From now on, its parameters must not be used without gradients."""
    global _attach_count  # noqa: PLW0603
    _attach_count += 1
    _install()
    watched.add(attachment)


def watch_hook(handle: WatchedHook) -> None:
    """From now on, its parameters must not be used while their gradients are pending."""
    _install()
    replica_hooks.add(handle)


@functools.cache
def _install() -> None:
    register_optimizer_step_pre_hook(before_step)
    guard_clipping()  # torch.nn.utils
    guard_zero_grad()  # of optimizers and modules
    guard_scale()  # GradScaler, and its unscale_ once it scales beside an attached model
    guard_ddp(is_watched, lambda: _attach_count)  # DistributedDataParallel.forward
