"""Which parameters of attached models are released between uses, and in which units."""

from __future__ import annotations

import collections
import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from hsdp import _hsdp
from hsdp.dtypes import registered
from hsdp.errors import UsageError
from hsdp.reducer import Reducer
from hsdp.torch.attach.model_attachment import ModelAttachment
from hsdp.torch.attach.trainable_parameters import GRADIENT_DTYPES
from hsdp.torch.slices.parameter_slices import ParameterSlice, ShardSlice, StoredMasters, refuse
from hsdp.torch.units.meta_init import MetaInit
from hsdp.torch.units.pass_hooks import UnitHooks
from hsdp.torch.units.replica_parts import ReplicaParts
from hsdp.torch.units.sharded_unit import FrozenSlice, ShardedUnit, StoredSlice
from hsdp.torch.units.unit_choice import ModuleUnit, Units, module_units

# Of frozen parameters: dtypes that gathers support, unpacked. Complex ones stay whole, since even
# slices might split a number.
_DTYPES = tuple(dtype for dtype in GRADIENT_DTYPES if not dtype.is_complex)

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


class SlicedUnits(NamedTuple):
    """What this rank stores of released parameters."""

    slices: dict[int, ParameterSlice]  # by id of the parameter; optimized ones
    masters: list[StoredMasters]
    units: list[tuple[Reducer, ShardedUnit]]


def slice_units(
    plan: UnitPlan, make: Mapping[int, Callable[..., ParameterSlice]], meta: MetaInit
) -> SlicedUnits:
    """This rank's slices of what is to be released. `make`: makes those of optimized parameters. What
    is on the meta device gets values and is released immediately.
    """
    slices: dict[int, ParameterSlice] = {}
    alike: dict[tuple[torch.dtype, bool], list[ParameterSlice]] = {}
    shards: dict[ParameterSlice, ShardSlice] = {}
    stored: dict[ModuleUnit, list[StoredSlice]] = {}
    # Allocate all slices before any unit: an allocation in between would keep an allocator from reusing
    # the previous unit's memory.
    for reducer, unit, parameters in plan.units:
        its = stored[unit] = []
        for name, p in parameters.items():
            if id(p) in make:
                made = slices[id(p)] = make[id(p)](is_released=True)
                alike.setdefault((p.dtype, made.is_copied_to_store), []).append(made)
                if made.is_part:
                    shards[made] = ShardSlice(made)
                its.append(shards[made] if made.is_part else made)
            else:
                its.append(FrozenSlice(f"{name} (frozen)", p, reducer))
    masters = [StoredMasters(listed, shards) for listed in alike.values()]
    units: dict[ModuleUnit, ShardedUnit] = {}

    def take(planned: PlannedUnit) -> ShardedUnit:
        unit = planned.unit
        for one in stored[unit]:
            device, own = torch.device(one.reducer.mesh.device), one.parameter.device
            if own != device:
                refuse(f"'{one.name}' on {device}, where its Reducer's mesh is", f"it on {own}")
            one.take()
        units[unit] = ShardedUnit(unit.name, unit.module, unit.is_root, stored[unit], unit.read_above)
        return units[unit]

    meta.run(plan.units, lambda planned: take(planned).release())
    for planned in plan.units:
        if planned.unit not in units:
            take(planned)
    return SlicedUnits(slices, masters, [(planned.reducer, units[planned.unit]) for planned in plan.units])


def gathered_units(
    units: Sequence[tuple[Reducer, ShardedUnit]],
    prefetch_bytes: int | None,
    reshards_after_forward: bool,
    reshards_after_backward: bool,
    part_bytes: int,
) -> UnitHooks:
    """Their gathers and hooks; they are released from now on. Collective. `part_bytes`: of slices that
    replicas hold in parts, so many bytes are gathered at a time.
    """
    of_reducer: dict[Reducer, list[ShardedUnit]] = {}
    for reducer, unit in units:
        of_reducer.setdefault(reducer, []).append(unit)
    every = {}
    parts = {}
    for reducer, its in of_reducer.items():
        gathers = _unit_gather(reducer, its)
        every[reducer] = gathers
        shards = [one for unit in its for one in unit.slices if isinstance(one, ShardSlice)]
        if shards:
            parts[reducer] = ReplicaParts(reducer, shards, part_bytes)
            parts[reducer].complete(gathers, [unit.slices for unit in its])
        for number, unit in enumerate(its):
            unit.bind(gathers, number)
            unit.release()
    return UnitHooks(
        [unit for _, unit in units],
        every,
        parts,
        prefetch_bytes,
        reshards_after_forward,
        reshards_after_backward,
    )


def _unit_gather(reducer: Reducer, units: Iterable[ShardedUnit]) -> _hsdp.UnitGather:
    def told(one: StoredSlice) -> tuple[str, str, int, torch.Tensor]:
        whole = one.parameter
        shape, dtype, _ = registered(tuple(whole.shape), whole.dtype)
        return one.name, dtype, math.prod(shape), one.stored.detach()

    return _hsdp.UnitGather(
        reducer._handle, [(unit.name, [told(one) for one in unit.slices]) for unit in units]
    )
