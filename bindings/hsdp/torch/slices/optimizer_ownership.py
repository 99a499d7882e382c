"""Which optimizers use a Reducer, and which steps' gradients they have taken."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Protocol

from hsdp.reducer import Reducer
from hsdp.torch.slices.parameter_slices import refuse


class Owner(Protocol):
    """A ShardedOptimizer, as others of its Reducers know it."""

    _names: dict[Reducer, frozenset[str]]
    _stage: int
    _max_grad_norm: float | None
    _units: Any


# In the order in which they were made.
_owners: weakref.WeakKeyDictionary[Reducer, weakref.WeakKeyDictionary[Owner, None]] = (
    weakref.WeakKeyDictionary()
)
# The last step of each Reducer that optimizers have taken, with the names of those parameters: none is
# taken twice.
_taken: weakref.WeakKeyDictionary[Reducer, tuple[int, frozenset[str]]] = weakref.WeakKeyDictionary()


def own(reducer: Reducer, optimizer: Owner) -> None:
    """Notes that it has parameters of this Reducer."""
    _owners.setdefault(reducer, weakref.WeakKeyDictionary())[optimizer] = None


def disown(reducer: Reducer, optimizer: Owner) -> None:
    """Notes that it no longer has any."""
    if owns(reducer, optimizer):
        del _owners[reducer][optimizer]


def owns(reducer: Reducer, optimizer: Owner) -> bool:
    """Whether it has parameters of this Reducer."""
    return optimizer in _owners.get(reducer, ())


def all_optimizers() -> list[Owner]:
    """The optimizers of all Reducers, in the same order on every rank."""
    return list({optimizer: None for its in _owners.values() for optimizer in its})


def has_taken(reducer: Reducer, step: int, names: frozenset[str]) -> bool:
    """Whether the gradients of one of these parameters were taken in this step."""
    taken, before = _taken.get(reducer, (-1, frozenset()))
    return taken == step and not before.isdisjoint(names)


def take(reducer: Reducer, step: int, names: frozenset[str]) -> None:
    """Notes that they are taken."""
    taken, before = _taken.get(reducer, (-1, frozenset()))
    _taken[reducer] = (step, names | before if taken == step else names)


def require_free(places: Iterable[tuple[str, object, Reducer]], stage: int, max_grad_norm: float | None) -> None:
    """Raises UsageError if another optimizer of a Reducer has one of these, or different rules."""
    places = list(places)
    for reducer in {reducer: None for _, _, reducer in places}:
        for other in _owners.get(reducer, ()):
            for name, _, owner in places:
                if owner is reducer and name in other._names[reducer]:
                    refuse(
                        "parameters without an optimizer",
                        f"'{name}', which a ShardedOptimizer has already; close() that first",
                    )
            if other._stage != stage:
                refuse(f"stage {other._stage}, as the Reducer's other optimizer has", str(stage))
            if max_grad_norm is not None or other._max_grad_norm is not None:
                refuse(
                    "max_grad_norm=None where a Reducer has several optimizers",
                    "a norm; call reducer.clip_grad_norm_(max_norm) before their steps",
                )
