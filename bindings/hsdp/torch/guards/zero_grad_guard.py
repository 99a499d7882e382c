"""Makes zero_grad() raise if it would drop only part of the gradients, and otherwise records it.

[Note: gradients that are not what they seem]
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

import torch

from hsdp.errors import UsageError
from hsdp.named_errors import naming

if TYPE_CHECKING:
    from hsdp.torch.attach.model_attachment import ModelAttachment


def install(attachments: Collection[ModelAttachment]) -> None:
    """Watches zero_grad() of all optimizers and modules of the process, for these attachments."""
    guard_class(torch.optim.Optimizer, attachments)
    module = torch.nn.Module
    module.zero_grad = _guarded(module.zero_grad, attachments, lambda it: it.parameters())


def guard_class(kind: type[torch.optim.Optimizer], attachments: Collection[ModelAttachment]) -> None:
    """The same for a class of optimizers, which may define its own zero_grad()."""
    for part in kind.__mro__:
        own = vars(part).get("zero_grad")
        if own is not None and not hasattr(own, "_hsdp_guarded"):
            guarded = _guarded(
                own, attachments, lambda it: (p for g in it.param_groups for p in g["params"])
            )
            setattr(part, "zero_grad", guarded)  # noqa: B010 - of a class that checkers do not know


def _guarded(
    function: Callable[..., None],
    attachments: Collection[ModelAttachment],
    parameters_of: Callable[[Any], Iterable[torch.Tensor]],
) -> Callable[..., None]:
    @functools.wraps(function)
    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        if torch.compiler.is_compiling() or not attachments:
            function(self, *args, **kwargs)
            return
        met = _met(attachments, lambda: parameters_of(self))
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
    attachments: Iterable[ModelAttachment], parameters: Callable[[], Iterable[torch.Tensor]]
) -> list[tuple[ModelAttachment, list[str]]]:
    found = []
    for attachment in attachments:
        if attachment.has_result() or attachment.step_begun():
            names = [name for p in parameters() if (name := attachment.name_of(p)) is not None]
            if names:
                found.append((attachment, names))
    return found


def _require_none_arrived(caller: str, attachment: ModelAttachment, names: list[str]) -> None:
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
