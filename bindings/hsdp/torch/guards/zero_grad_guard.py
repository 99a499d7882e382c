"""Makes zero_grad() raise if it would drop only part of the gradients, and otherwise records it.

[Note: gradients that are not what they seem]
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from hsdp.errors import UsageError
from hsdp.named_errors import naming
from hsdp.torch.guards.watched_gradients import WatchedGradients, watched


def guard_zero_grad() -> None:
    """Watches zero_grad() of all optimizers and modules of the process."""
    guard_class(torch.optim.Optimizer)
    module = torch.nn.Module
    module.zero_grad = _guarded(module.zero_grad, lambda it: it.parameters())


def guard_class(kind: type[torch.optim.Optimizer]) -> None:
    """The same for a class of optimizers, which may define its own zero_grad()."""
    for part in kind.__mro__:
        own = vars(part).get("zero_grad")
        if own is not None and not hasattr(own, "_hsdp_guarded"):
            guarded = _guarded(own, lambda it: (p for g in it.param_groups for p in g["params"]))
            setattr(part, "zero_grad", guarded)  # noqa: B010 - of a class that checkers do not know


def _guarded(
    function: Callable[..., None], parameters_of: Callable[[Any], Iterable[torch.Tensor]]
) -> Callable[..., None]:
    @functools.wraps(function)
    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        if torch.compiler.is_compiling() or not watched:
            function(self, *args, **kwargs)
            return
        met = _met(lambda: parameters_of(self))
        for attachment, names in met:
            with naming(attachment.who):
                _require_none_arrived(f"{type(self).__name__}.zero_grad", attachment, names)
        function(self, *args, **kwargs)
        for attachment, names in met:
            if attachment.has_result() and not attachment.result.skipped:
                attachment.result.zeroed.update((n, attachment.gradient_of(n)) for n in names)

    zero_grad._hsdp_guarded = True  # type: ignore[attr-defined]
    return zero_grad


# Affected attachments, and the names of what is zeroed of them.
def _met(
    parameters: Callable[[], Iterable[torch.Tensor]]
) -> list[tuple[WatchedGradients, list[str]]]:
    found = []
    for attachment in watched:
        if attachment.has_result() or attachment.step_begun():
            names = [name for p in parameters() if (name := attachment.name_of(p)) is not None]
            if names:
                found.append((attachment, names))
    return found


def _require_none_arrived(caller: str, attachment: WatchedGradients, names: list[str]) -> None:
    if not attachment.step_begun():
        return
    here = [name for name in names if attachment.gradient_of(name) is not None]
    if attachment.holds_gradients:
        name = next(iter(here), None)
    elif here and not attachment.keeps_gradients and not attachment.is_collecting():
        return  # put there by someone else
    else:
        name = next((name for name in names if attachment.arrived(name)), None)
    if name is None:
        return
    raise UsageError(
        f"{caller}: expected a call between steps, got one when gradients of the step, as that of "
        f"'{name}', were handed to the Reducer, where they would stay; end the step first, with "
        "last=True or reducer.finish(), or drop it on all ranks: with reducer.discard() called by all, "
        "or reducer.abandon_step() by this one, which skips a batch"
    )
