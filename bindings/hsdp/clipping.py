"""Clipping by one norm over several Reducers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hsdp.errors import UsageError
from hsdp.named_errors import naming, who_of
from hsdp.reducer import Reducer
from hsdp.reducer_results import clip


def clip_grad_norm_(
    reducers: Reducer | Iterable[Reducer],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Any:
    """Like `Reducer.clip_grad_norm_`, with one norm over the gradients of several Reducers on one
    device. Returns the norm before clipping. Collective.
    """
    listed = _listed(reducers)
    with naming(who_of(one.name for one in listed)):
        return clip(listed, max_norm, norm_type, error_if_nonfinite)


def _listed(reducers: Any) -> list[Any]:
    listed = [reducers] if isinstance(reducers, Reducer) else list(reducers)
    got = "" if listed else "none; pass one or several"
    for i, one in enumerate(listed):
        if not isinstance(one, Reducer):
            got = (
                f"an object of type {type(one).__name__} as number {i}; parameters are clipped by "
                "torch.nn.utils.clip_grad_norm_"
            )
        elif any(one is before for before in listed[:i]):
            got = f"one again as number {i}; pass each once"
        if got:
            break
    if got:
        raise UsageError(f"reducer: clip_grad_norm_: expected Reducers, got {got}")
    return listed
