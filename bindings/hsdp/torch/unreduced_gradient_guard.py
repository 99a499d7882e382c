"""Makes torch's optimizers and clipping raise where they would silently do nothing.

[Note: optimizers that would do nothing]

They skip parameters without p.grad, which is what attached parameters are between microbatches;
and FSDP2's have zeros there while a replica hook keeps their gradients. Both are watched for the
whole process from the first attachment on, and look at nothing while there is none. An optimizer
that knows shards says so: `takes_shards = True` on its class.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hsdp.errors import UsageError
from hsdp.torch.ddp_guard import guard_ddp

if TYPE_CHECKING:
    from hsdp.torch.model_attachment import ModelAttachment
    from hsdp.torch.replica_hook_handle import ReplicaHookHandle

_attachments: weakref.WeakSet[ModelAttachment] = weakref.WeakSet()
_replica_hooks: weakref.WeakSet[ReplicaHookHandle] = weakref.WeakSet()
_attach_count = 0  # in this process so far


def watch(attachment: ModelAttachment) -> None:
    """From now on its parameters must not be met without gradients."""
    global _attach_count  # noqa: PLW0603
    _attach_count += 1
    _install()
    _attachments.add(attachment)


def watch_hook(handle: ReplicaHookHandle) -> None:
    """From now on its parameters must not be met while gradients of theirs are pending."""
    _install()
    _replica_hooks.add(handle)


def forget(attachment: ModelAttachment) -> None:
    """The opposite of `watch`."""
    _attachments.discard(attachment)


def require_unwatched(name: str, parameter: torch.Tensor) -> None:
    """UsageError when a Reducer already takes the parameter's gradients."""
    if is_watched(parameter):
        raise UsageError(
            f"reducer: attach: expected '{name}' to be attached once, got it attached already; "
            "close the other Reducer first (hsdp.torch.reducers_of(model) has it), or join models that "
            "share parameters in a torch.nn.ModuleList"
        )


def is_watched(parameter: torch.Tensor) -> bool:
    """Whether some Reducer takes its gradients."""
    return any(attachment.name_of(parameter) is not None for attachment in _attachments)


def _require_gradients(caller: str, parameters: Iterable[Any]) -> None:
    watching = [a for a in _attachments if not a.keeps_gradients]
    open_windows = [a for a in _attachments if a.in_window]
    if not watching and not open_windows:
        return
    for parameter in parameters:
        if not isinstance(parameter, torch.Tensor):
            continue
        for attachment in open_windows:
            name = attachment.name_of(parameter)
            if name is not None:
                raise UsageError(
                    f"{caller}: expected a call after hsdp.zero.coalesce_grad_reduction, got one "
                    f"inside of its block: the gradient of '{name}' is reduced when that ends; move "
                    "the call out of the block"
                )
        if parameter.grad is not None:
            continue
        for attachment in watching:
            name = attachment.name_of(parameter)
            if name is not None and not attachment.is_left(name):
                raise UsageError(
                    f"{caller}: expected a gradient in '{name}', got none: its Reducer took it, "
                    "and the parameter would be skipped in silence; call reducer.gather_gradients() "
                    "before, or use hsdp.zero.ShardedOptimizer and reducer.clip_grad_norm_, or "
                    "attach with keep_grads=True for local sums"
                )


def _require_reduced(caller: str, parameters: Iterable[Any]) -> None:
    hooks = [hook for hook in _replica_hooks if hook.carry_bytes > 0]
    for parameter in parameters if hooks else ():
        for hook in hooks:
            module = hook.pending_module_of(parameter)
            if module is not None:
                raise UsageError(
                    f"{caller}: expected gradients that were reduced over the replicas, got those "
                    f"of {module} still waiting for the step's last backward, and zeros in "
                    "p.grad; call handle.set_requires_all_reduce(True) before that backward, or "
                    "handle.finish() after it"
                )


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    if not (_attachments or _replica_hooks) or getattr(optimizer, "takes_shards", False):
        return None

    def require() -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        _require_gradients(f"{type(optimizer).__name__}.step", parameters)
        _require_reduced(f"{type(optimizer).__name__}.step", parameters)

    # A closure is what makes the gradients: they are due when it is done.
    if len(args) > 1 and callable(args[1]):
        return (args[0], _then(args[1], require), *args[2:]), kwargs
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": _then(kwargs["closure"], require)}
    require()
    return None


def _then(closure: Callable[[], Any], check: Callable[[], None]) -> Callable[[], Any]:
    def checked() -> Any:
        result = closure()
        check()
        return result

    return checked


@functools.cache
def _install() -> None:
    register_optimizer_step_pre_hook(_before_step)
    for name in ("clip_grad_norm_", "clip_grad_value_", "_clip_grads_with_norm_"):
        _guard_function(name)
    guard_ddp(is_watched, lambda: _attach_count)


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    name = name.lstrip("_")

    @functools.wraps(function)
    def guarded(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(parameters, torch.Tensor):
            _require_gradients(name, [parameters])
        elif _attachments:
            listed = list(parameters)
            _require_gradients(name, listed)
            generated = isinstance(parameters, types.GeneratorType)
            parameters = (p for p in listed) if generated else listed
        return function(parameters, *args, **kwargs)

    return guarded


# The function that users hold, maybe since before we were imported, is a wrapper around the real
# one; so the real one is replaced where the wrapper keeps it.
def _guard_function(name: str) -> None:
    outer = getattr(clip_grad, name)
    inner = getattr(outer, "__wrapped__", None)
    for cell in outer.__closure__ or ():
        if inner is not None and cell.cell_contents is inner:
            cell.cell_contents = _guarded(name, inner)
            return
    for module in (clip_grad, torch.nn.utils):
        setattr(module, name, _guarded(name, outer))
