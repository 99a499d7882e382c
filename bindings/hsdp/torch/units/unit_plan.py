"""Which modules are units, and which parameters of attached models are released in them between uses."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Union

import torch
import torch.nn.utils.parametrize

from hsdp.errors import UsageError
from hsdp.reducer import Reducer
from hsdp.torch import private_torch
from hsdp.torch.attach.model_attachment import ModelAttachment
from hsdp.torch.attach.trainable_parameters import GRADIENT_DTYPES
from hsdp.torch.slices.parameter_slices import refuse

#: module types or a predicate; None: the elements of each ModuleList
Units = Union[Iterable[type[torch.nn.Module]], Callable[[torch.nn.Module], bool], None]

# Their forward reads the parameters of modules below without calling these.
_READS_BELOW = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer)

# Of frozen parameters: dtypes that gathers support, unpacked. Complex ones stay whole, since even
# slices might split a number.
_DTYPES = tuple(dtype for dtype in GRADIENT_DTYPES if not dtype.is_complex)

#: a parameter's name, itself, and its Reducer
Place = tuple[str, torch.nn.Parameter, Reducer]


def attached_models(reducer: Reducer) -> list[ModelAttachment]:
    """The models whose gradients the Reducer takes."""
    return [one for one in reducer._attachments if isinstance(one, ModelAttachment)]


def model_of(attachment: ModelAttachment) -> torch.nn.Module:
    """Raises UsageError if the model is gone: its parameters may outlive it."""
    model = attachment.model
    if model is None:
        refuse("the model that was attached", f"none: the {attachment.describe()} is gone; keep it")
    return model


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


class PlannedUnit(NamedTuple):
    """A unit, and those of its parameters that are released, by their names in the model."""

    reducer: Reducer
    unit: ModuleUnit
    parameters: dict[str, torch.nn.Parameter]


class UnitPlan(NamedTuple):
    """What is released in which units, and where units lie in a Reducer's buckets."""

    units: list[PlannedUnit]
    numbers: dict[int, int]  # of units, from 1, by id of the parameter

    # Consecutive parameters of different units share no bucket: their slices are cut separately.
    def cut_buckets(self) -> None:
        """Makes each unit spread over all ranks, unless a Reducer's buckets are already cut."""
        for reducer in {planned.reducer: None for planned in self.units}:
            number_of = {
                name: self.numbers.get(id(p), 0)
                for attachment in attached_models(reducer)
                for name, p in attachment.parameters.items()
            }
            registered = [name for name, *_ in reducer._handle.parameters()]
            with contextlib.suppress(UsageError):
                reducer._handle.set_units([number_of.get(name, 0) for name in registered])


def plan_units(
    reducers: Sequence[Reducer], places: Iterable[Place], units: Units, persistence_threshold: float
) -> UnitPlan:
    """Plans all attached models: parameters that are optimized or frozen, and larger than the
    threshold. A shard group of one would gain nothing.
    """
    owner = {id(parameter): reducer for _, parameter, reducer in places}
    models = [model_of(one) for reducer in reducers for one in attached_models(reducer)]
    uses = collections.Counter(id(p) for model in models for p in model.parameters())
    plan = UnitPlan([], {})
    for reducer in reducers:
        if reducer.mesh.shard_size == 1:
            continue
        for attachment in attached_models(reducer):
            for unit in module_units(model_of(attachment), units):
                number = len(plan.numbers) + 1
                plan.numbers.update((id(p), number) for p in unit.parameters.values())
                parameters = {}
                for name, p in unit.parameters.items():
                    is_frozen = not p.requires_grad and p.dtype in _DTYPES
                    is_ours = owner.get(id(p)) is reducer or is_frozen
                    # Otherwise one model would read what another one's unit has released.
                    is_free = uses[id(p)] == 1 and type(p) is torch.nn.Parameter
                    if is_ours and is_free and p.numel() > persistence_threshold:
                        parameters[name] = p
                if parameters:
                    plan.units.append(PlannedUnit(reducer, unit, parameters))
    return plan
