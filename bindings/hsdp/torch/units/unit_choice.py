"""Which parameters of a model are gathered together: those of a unit, such as a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Union

import torch
import torch.nn.utils.parametrize

from hsdp.torch import private_torch
from hsdp.torch.slices.parameter_slices import refuse

#: module types or a predicate; None: the elements of each ModuleList
Units = Union[Iterable[type[torch.nn.Module]], Callable[[torch.nn.Module], bool], None]

# Their forward reads the parameters of modules below without calling these.
_READS_BELOW = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer)


class ModuleUnit:
    """A module and the parameters that its forward needs, by their names in the model: its own and
    those below, except those of units below. A root, with no unit above, also has shared ones.
    """

    def __init__(self, name: str, module: torch.nn.Module, root: ModuleUnit | None) -> None:
        self.name = name
        self.module = module
        self._root = root
        self.parameters: dict[str, torch.nn.Parameter] = {}
        #: parent modules that look at its parameters before they call it
        self.read_above: list[torch.nn.Module] = []

    @property
    def is_root(self) -> bool:
        """Whether no unit is above it."""
        return self._root is None

    @property
    def root(self) -> ModuleUnit:
        """The topmost unit above it."""
        return self._root or self


class _Found:
    """A parameter, and the units that need it."""

    def __init__(self, name: str, parameter: torch.nn.Parameter) -> None:
        self.name = name
        self.parameter = parameter
        self.owners: list[ModuleUnit | None] = []

    # None: no forward that would gather it begins before it is read.
    def owner(self) -> ModuleUnit | None:
        first = self.owners[0]
        if len(self.owners) == 1 or first is None:
            return first
        is_of_one_root = all(one is not None and one.root is first.root for one in self.owners)
        return first.root if is_of_one_root else None


class _Walk:
    """Walks a model. The root is the model itself or, if that is never called, the topmost modules
    below it that are.
    """

    def __init__(self, model: torch.nn.Module, units: Units) -> None:
        self._chosen = _chosen(units)
        self.units: dict[torch.nn.Module, ModuleUnit] = {}
        self.found: dict[int, _Found] = {}  # by id of the parameter
        self._walk(model, "", None, may_be=True, listed=False)

    def _walk(
        self, module: torch.nn.Module, name: str, owner: ModuleUnit | None, may_be: bool, listed: bool
    ) -> None:
        if isinstance(module, torch.jit.ScriptModule):  # runs no hooks
            for key, parameter in module.named_parameters():
                self._note(f"{name}.{key}", parameter, None)
            return
        if _has_forward(module):
            if owner is None:
                root = ModuleUnit(name or type(module).__name__, module, None)
                owner = self.units.setdefault(module, root)
            elif may_be and self._chosen(module, listed):
                owner = self.units.setdefault(module, ModuleUnit(name, module, owner.root))
        for key, parameter in private_torch.parameters_of(module).items():
            if parameter is not None:
                self._note(f"{name}.{key}" if name else key, parameter, owner)
        may_be = may_be and not isinstance(module, _READS_BELOW)
        for key, child in private_torch.children_of(module).items():
            if child is not None:
                self._walk(child, f"{name}.{key}" if name else key, owner, may_be, _is_list(module))
        if isinstance(module, torch.nn.TransformerEncoder) and module.layers[0] in self.units:
            self.units[module.layers[0]].read_above.append(module)

    def _note(self, name: str, parameter: torch.nn.Parameter, owner: ModuleUnit | None) -> None:
        found = self.found.setdefault(id(parameter), _Found(name, parameter))
        if owner not in found.owners:
            found.owners.append(owner)


def module_units(model: torch.nn.Module, units: Units) -> list[ModuleUnit]:
    """The units of a model. A root has the remaining parameters. Parameters that no unit would gather
    in time are in none: those of scripted modules, and of modules that are never called.
    """
    walk = _Walk(model, units)
    for found in walk.found.values():
        owner = found.owner()
        if owner is not None:
            owner.parameters[found.name] = found.parameter
    return [unit for unit in walk.units.values() if unit.parameters]


# A list or a namespace of modules is never called.
def _has_forward(module: torch.nn.Module) -> bool:
    return type(module).forward is not torch.nn.Module.forward


# A parametrization is called when the parameter is read.
def _is_list(module: torch.nn.Module) -> bool:
    is_parametrization = isinstance(module, torch.nn.utils.parametrize.ParametrizationList)
    return isinstance(module, torch.nn.ModuleList) and not is_parametrization


def _chosen(units: Units) -> Callable[[torch.nn.Module, bool], bool]:
    if units is None:
        return lambda module, listed: listed
    if isinstance(units, Iterable) and not isinstance(units, (str, type)):
        types = tuple(units)
        for one in types:
            if not (isinstance(one, type) and issubclass(one, torch.nn.Module)):
                refuse("units of module types, a predicate or None", repr(one))
        return lambda module, listed: isinstance(module, types)
    if isinstance(units, type) or not callable(units):
        refuse("units of module types, a predicate or None", repr(units))
    predicate: Callable[[torch.nn.Module], Any] = units
    return lambda module, listed: bool(predicate(module))
