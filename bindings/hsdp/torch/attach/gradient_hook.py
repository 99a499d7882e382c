"""Hooks that hand over a parameter's gradient as soon as it is accumulated.

[Note: p.grad is taken out] [Note: gradients are packed, not viewed] [Note: a model keeps its Reducers]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, TypeAlias

import torch

from hsdp import _hsdp
from hsdp.errors import UsageError
from hsdp.named_errors import put_name
from hsdp.torch.complex_values import real_view

GradientHook: TypeAlias = Callable[[torch.Tensor], None]


def make_hook(
    handle: _hsdp.Reducer,
    index: int,
    name: str,
    parameter: torch.Tensor,
    held: _hsdp.HeldGradients,
    who: str = "",
) -> GradientHook:
    """Takes p.grad out and hands it over. `who`: the Reducer, for errors."""
    refusal = Refusal(handle, who, name, parameter)
    take = python_way(handle, index, parameter, refusal)
    return _hsdp.gradient_hook(handle, index, held, take, refusal.explained, torch.Tensor)


def python_way(
    handle: _hsdp.Reducer, index: int, parameter: torch.Tensor, refusal: Refusal
) -> GradientHook:
    """Takes a p.grad that the extension's hook does not: complex, of another class, marked as negated,
    to be refused, or any if torch lacks the C functions to inspect it.
    """
    dtype, shape = parameter.dtype, parameter.shape
    on_host, is_complex = parameter.is_cpu, dtype.is_complex
    hand_over = handle.gradient_of
    strided = torch.strided

    # Memory handed over by address must be as registered, even if the parameter was given other data
    # since.
    def take(p: torch.Tensor) -> None:
        grad = p.grad
        assert grad is not None  # checked by the hook
        p.grad = None
        if (
            grad.dtype is not dtype or grad.shape != shape or grad.layout is not strided
            or grad.is_cpu is not on_host
        ):
            refusal.refuse(grad)
        if is_complex:
            grad = real_view(grad)
        if grad.is_neg():  # autograd only marks a negation; the memory does not show it
            grad = grad.resolve_neg()
        strides = None if grad.is_contiguous() else grad.stride()
        try:
            hand_over(index, grad.data_ptr(), strides, grad)
        except UsageError as error:
            raise refusal.explained(error) from None

    return take


class Refusal:
    """The errors for a parameter's gradient that cannot be taken."""

    def __init__(
        self, handle: _hsdp.Reducer, who: str, name: str, parameter: torch.Tensor
    ) -> None:
        self._handle = handle
        self._who = who
        self._name = name
        self._dtype = parameter.dtype
        self._shape = parameter.shape

    def refuse(self, grad: torch.Tensor) -> NoReturn:
        """Raises UsageError, and drops the step on all ranks even if the error is caught."""
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
        """Adds why a gradient may arrive when no microbatch is open."""
        try:
            is_stray = not self._handle.is_collecting()
        except UsageError:  # in a forked child
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
    """Also adds the gradient to `fresh[name]`; not in place, because it may still have to be packed."""

    def keep(p: torch.Tensor) -> None:
        grad = p.grad
        hook(p)
        if grad is not None and p.grad is None:  # it was taken
            grad = grad.detach()
            fresh[name] = fresh[name] + grad if name in fresh else grad

    return keep


def _word(thing: torch.dtype | torch.layout) -> str:
    return str(thing).rpartition(".")[2]
