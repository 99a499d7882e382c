"""Hooks that hand a parameter's gradient over as soon as it is accumulated.

[Note: p.grad is taken out] [Note: gradients are packed, not viewed] [Note: a model keeps its Reducers]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn, TypeAlias

import torch

from hsdp.errors import UsageError
from hsdp.named_errors import put_name
from hsdp.torch.complex_values import real_view

if TYPE_CHECKING:
    from hsdp import _hsdp

GradientHook: TypeAlias = Callable[[torch.Tensor], None]


class HeldGradients:
    """The gradients that a window leaves in p.grad, where autograd adds them up."""

    def __init__(self) -> None:
        self.active = False
        self._backwards: int | None = None
        self._passes: dict[int, int] = {}

    def begin(self, backwards: int | None) -> None:
        """From here on a gradient is left where it is, until it is the sum of so many."""
        self.active = True
        self._backwards = backwards
        self._passes = {}

    def keeps(self, index: int) -> bool:
        """Counts one gradient of that parameter; whether it stays in p.grad."""
        count = self._passes.get(index, 0) + 1
        self._passes[index] = count
        return self._backwards is None or count < self._backwards

    def end(self) -> None:
        """From here on gradients are handed over again."""
        self.active = False

    @property
    def pass_count(self) -> int:
        """The most that one parameter got in the last window."""
        return max(self._passes.values(), default=1)


def make_hook(
    handle: _hsdp.Reducer,
    index: int,
    name: str,
    parameter: torch.Tensor,
    held: HeldGradients,
    who: str = "",
) -> GradientHook:
    """Takes p.grad out and hands it over. Runs once per parameter and backward pass: keep it short.
    `who`: the Reducer, in errors.
    """
    refusal = Refusal(handle, who, name, parameter)
    dtype, shape = parameter.dtype, parameter.shape
    on_host, is_complex = parameter.is_cpu, dtype.is_complex
    take = handle.gradient_of
    strided = torch.strided

    # What is handed over by address must be what was registered, also when somebody gave the
    # parameter other data since.
    def hook(p: torch.Tensor) -> None:
        grad = p.grad
        if grad is None or (held.active and held.keeps(index)):
            return
        p.grad = None
        if (
            grad.dtype is not dtype or grad.shape != shape or grad.layout is not strided
            or grad.is_cpu is not on_host
        ):
            refusal.refuse(grad)
        if is_complex:
            grad = real_view(grad)
        if grad.is_neg():  # autograd negates by a mark, and memory does not show it
            grad = grad.resolve_neg()
        strides = None if grad.is_contiguous() else grad.stride()
        try:
            take(index, grad.data_ptr(), strides, grad)
        except UsageError as error:
            raise refusal.explained(error) from None

    return hook


class Refusal:
    """What is said of one parameter's gradient that cannot be taken."""

    def __init__(
        self, handle: _hsdp.Reducer, who: str, name: str, parameter: torch.Tensor
    ) -> None:
        self._handle = handle
        self._who = who
        self._name = name
        self._dtype = parameter.dtype
        self._shape = parameter.shape

    def refuse(self, grad: torch.Tensor) -> NoReturn:
        """Raises UsageError, and drops the step on all ranks even when somebody catches it."""
        remedy = "; make another Reducer when the model has changed"
        if grad.layout is not torch.strided:
            expected, got = "a dense one", f"a sparse one ({_word(grad.layout)})"
            remedy = "; embeddings give dense gradients with sparse=False"
        elif grad.dtype is not self._dtype:
            expected, got = _word(self._dtype), _word(grad.dtype)
        elif grad.shape != self._shape:
            expected, got = f"shape {tuple(self._shape)}", str(tuple(grad.shape))
        else:
            expected, got = "memory of the device that the model was attached on", str(grad.device)
        message = f"reducer: gradient of '{self._name}': expected {expected}, got {got}{remedy}"
        self._handle.reject_gradient(message)
        raise self._named(UsageError(message))

    def explained(self, error: UsageError) -> UsageError:
        """Why a gradient may come where no microbatch is open."""
        try:
            is_stray = not self._handle.is_collecting()
        except UsageError:  # of a forked child
            is_stray = False
        if not is_stray:
            return self._named(error)
        return self._named(
            UsageError(
                f"reducer: gradient of '{self._name}': expected an open microbatch, got a backward "
                "pass outside of one; call begin_microbatch before it (with reducer.microbatch(...)). "
                "When it is the loss of another model that went through this one, keep it out: "
                "requires_grad_(False) on this model for that pass, or detach() or torch.no_grad() "
                "where no gradient has to pass through"
            )
        )

    def _named(self, error: UsageError) -> UsageError:
        put_name(error, self._who)
        return error


def keeping_hook(
    hook: GradientHook, name: str, fresh: dict[str, torch.Tensor]
) -> GradientHook:
    """Also adds the gradient to `fresh[name]`; not in place, because it may yet have to be packed."""

    def keep(p: torch.Tensor) -> None:
        grad = p.grad
        hook(p)
        if grad is not None and p.grad is None:  # it was taken
            grad = grad.detach()
            fresh[name] = fresh[name] + grad if name in fresh else grad

    return keep


def _word(thing: torch.dtype | torch.layout) -> str:
    return str(thing).rpartition(".")[2]
