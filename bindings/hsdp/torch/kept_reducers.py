"""The Reducers that a model keeps alive.

[Note: a model keeps its Reducers]
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from hsdp.reducer import Reducer

_KEY = "_hsdp_reducers"
_WRAPPERS = (torch.nn.ModuleDict, torch.nn.ModuleList)


class KeptReducers:
    """What lies in an attached model's `__dict__`. A copy of the model, or what is loaded of its pickle,
    has None there.
    """

    def __init__(self) -> None:
        #: in the order of their attachments
        self.reducers: list[Reducer] = []

    # Of Python's own: who loads the model may not have this package.
    def __reduce__(self) -> Any:
        return type(None), ()


def keep_reducer(model: torch.nn.Module, reducer: Reducer) -> list[KeptReducers]:
    """The Reducer lives as long as the model, or until it is taken out of all that is returned."""
    places = []
    for module in _holders(model):
        if module.__dict__.get(_KEY) is None:
            module.__dict__[_KEY] = KeptReducers()
        places.append(module.__dict__[_KEY])
        places[-1].reducers.append(reducer)
    return places


def reducers_of(model: torch.nn.Module) -> list[Reducer]:
    """The Reducers that `model` was attached to and that nobody has closed: it keeps them alive."""
    kept = model.__dict__.get(_KEY)
    return [] if kept is None else list(kept.reducers)


# A ModuleDict or ModuleList may be made for `attach` alone: the models in it live on, and it does not.
def _holders(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    yield model
    if isinstance(model, _WRAPPERS):
        for module in model.children():
            yield from _holders(module)
