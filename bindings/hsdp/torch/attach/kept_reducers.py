"""A model keeps its Reducers alive, but they do not keep the model alive.

[Note: a model keeps its Reducers]
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch

from hsdp.reducer import Reducer

_KEY = "_hsdp_reducers"
_WRAPPERS = (torch.nn.ModuleDict, torch.nn.ModuleList)


class KeptReducers:
    """Stored in an attached model's `__dict__`. A copy of the model, or one loaded from its pickle, has
    None there.
    """

    def __init__(self) -> None:
        #: in the order in which they were attached
        self.reducers: list[Reducer] = []

    # A built-in type: the model may be loaded without this package.
    def __reduce__(self) -> Any:
        return type(None), ()


def keep_reducer(model: torch.nn.Module, reducer: Reducer) -> list[KeptReducers]:
    """Keeps the Reducer alive as long as the model, or until it is removed from all returned lists."""
    places = []
    for module in _holders(model):
        if module.__dict__.get(_KEY) is None:
            module.__dict__[_KEY] = KeptReducers()
        places.append(module.__dict__[_KEY])
        places[-1].reducers.append(reducer)
    return places


def reducers_of(model: torch.nn.Module) -> list[Reducer]:
    """The open Reducers that `model` is attached to; the model keeps them alive."""
    kept = model.__dict__.get(_KEY)
    return [] if kept is None else list(kept.reducers)


class ModelReference:
    """A model and its modules, while they live. A ModuleDict or ModuleList that was made only for
    `attach` is rebuilt from the models in it.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        # The first is the model itself.
        self._modules = [(name, weakref.ref(module)) for name, module in model.named_modules()]
        self._wrapper = type(model) if type(model) in _WRAPPERS else None
        children = model.named_children() if self._wrapper else ()
        self._children = {name: ModelReference(child) for name, child in children}

    def __call__(self) -> torch.nn.Module | None:
        model = self._modules[0][1]()
        if model is not None or self._wrapper is None:
            return model
        model = self._wrapper()
        for name, reference in self._children.items():
            model.add_module(name, reference())
        return model

    def named_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Like the model's, including those of modules added since; without those that are gone."""
        model = self._modules[0][1]()
        if model is not None:
            yield from model.named_modules()
            return
        seen: set[torch.nn.Module] = set()
        for name, reference in self._modules:
            module = reference()
            if module is not None:
                yield from module.named_modules(seen, name)

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Like the model's: each once, under its first name."""
        seen = set()
        for prefix, module in self.named_modules():
            for name, parameter in module.named_parameters(prefix, recurse=False):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name, parameter


# A ModuleDict or ModuleList may be made only for `attach`: the models in it outlive it.
def _holders(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    yield model
    if isinstance(model, _WRAPPERS):
        for module in model.children():
            yield from _holders(module)
