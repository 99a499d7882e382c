"""Makes torch's optimizers and clipping raise instead of silently doing nothing or the wrong thing.

[Note: optimizers that would do nothing] [Note: gradients that are not what they seem]

They skip parameters without p.grad, such as attached parameters between microbatches; and FSDP2's have
zeros there while a replica hook keeps their gradients. The guard covers the whole process from the
first attachment on, and looks at nothing while there is none. An optimizer that uses shards declares
it: `takes_shards = True` on its class. The guard also raises if a loss scale is still in the gradients,
and if zero_grad() came in between.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.utils import clip_grad

from hsdp.errors import UsageError
from hsdp.named_errors import naming
from hsdp.torch import private_torch
from hsdp.torch.guards import zero_grad_guard
from hsdp.torch.guards.watched_gradients import (
    WatchedGradients, attached_names, refuse_zeroed, replica_hooks, watched,
)


def require_gradients(caller: str, parameters: Iterable[Any]) -> dict[WatchedGradients, list[str]]:
    """Names of the attached ones; raises UsageError unless all have their step's gradient in p.grad."""
    found = attached_names(parameters)
    for attachment, names in found.items():
        with naming(attachment.who):
            _require_no_pass(caller, attachment, names[0])
            for name in names:
                _require_gradient(caller, attachment, name)
    return found


# Once per attachment: this runs in every optimizer step.
def _require_no_pass(caller: str, attachment: WatchedGradients, name: str) -> None:
    if attachment.in_window:
        raise UsageError(
            f"{caller}: expected a call after hsdp.zero.coalesce_grad_reduction, got one "
            f"inside of its block: the gradient of '{name}' is reduced when that ends; move "
            "the call out of the block"
        )
    if attachment.is_collecting():
        raise UsageError(
            f"{caller}: expected a call after the microbatch, got one inside, where the gradient of "
            f"'{name}' is this rank's own; move the call out of the block, and out of hooks that run in "
            "the backward pass"
        )


def _require_gradient(caller: str, attachment: WatchedGradients, name: str) -> None:
    grad = attachment.gradient_of(name)
    if grad is None and attachment.step_begun() and not attachment.keeps_gradients:
        raise UsageError(
            f"{caller}: expected a call after the step's last microbatch, got one while others are "
            f"pending, which hold the gradient of '{name}'; end the step with last=True, or with "
            "reducer.finish()"
        )
    if grad is None:
        zeroed = attachment.lost(name)
    else:
        zeroed = attachment.result.is_zeroed(name, grad)
    if zeroed:
        refuse_zeroed(caller, name)
    if grad is None and not attachment.keeps_gradients and not attachment.is_left(name):
        raise UsageError(
            f"{caller}: expected a gradient in '{name}', got none: its Reducer took it, "
            "and the parameter would be skipped in silence; call reducer.gather_gradients() "
            "before, or use hsdp.zero.ShardedOptimizer and reducer.clip_grad_norm_, or "
            "attach with keep_grads=True for local sums"
        )


def require_result(caller: str, parameters: Iterable[Any]) -> None:
    """Raises UsageError if the shards of attached ones must not be used for training."""
    for attachment, names in attached_names(parameters).items():
        if attachment.has_result():
            with naming(attachment.who):
                attachment.result.require_kept(caller, names)
                attachment.result.require_unscaled(caller, names, divided=True)
                attachment.result.require_unclipped(caller, names)


def _require_usable(caller: str, parameters: Iterable[Any]) -> None:
    for attachment, names in require_gradients(caller, parameters).items():
        with naming(attachment.who):
            divided = not attachment.holds_local_sums
            attachment.result.require_unscaled(caller, names, divided)


def _require_reduced(caller: str, parameters: Iterable[Any]) -> None:
    hooks = [hook for hook in replica_hooks if hook.carry_bytes > 0]
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


def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    """A hook before the step of every optimizer of the process."""
    zero_grad_guard.guard_class(type(optimizer))
    if not (watched or replica_hooks) or hasattr(optimizer, "_unscale_shards"):
        return None

    def require() -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        caller = f"{type(optimizer).__name__}.step"
        if getattr(optimizer, "takes_shards", False):
            require_result(caller, parameters)
            return
        if getattr(optimizer, "grad_scale", None) is None:
            _require_usable(caller, parameters)
        else:  # a fused one, which divides by it
            require_gradients(caller, parameters)
        _require_reduced(caller, parameters)

    # The closure makes the gradients: check them after it.
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


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    name = name.lstrip("_")

    @functools.wraps(function)
    def guarded(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if not (watched or replica_hooks):
            return function(parameters, *args, **kwargs)
        listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        _require_usable(name, listed)
        _require_reduced(name, listed)
        generated = isinstance(parameters, types.GeneratorType)
        result = function((p for p in listed) if generated else listed, *args, **kwargs)
        limit = [*args, *(kwargs[key] for key in ("max_norm", "clip_value") if key in kwargs)][0]
        if float(limit) != math.inf:  # otherwise it only computes the norm
            for attachment, names in attached_names(listed).items():
                attachment.result.clipped.update(names)
        return result

    return guarded


def guard_clipping() -> None:
    """Wraps torch's functions that clip."""
    for name in ("clip_grad_norm_", "clip_grad_value_", private_torch.CLIP_WITH_NORM):
        _guard_function(name)


# Users hold a function, perhaps from before our import, that is a wrapper around the real one; so
# replace the real one inside the wrapper.
def _guard_function(name: str) -> None:
    outer = getattr(clip_grad, name)
    inner = getattr(outer, "__wrapped__", None)
    for cell in outer.__closure__ or ():
        if inner is not None and cell.cell_contents is inner:
            cell.cell_contents = _guarded(name, inner)
            return
    for module in (clip_grad, torch.nn.utils):
        setattr(module, name, _guarded(name, outer))
