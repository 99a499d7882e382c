"""Makes the units of a plan: this rank's slices, their gathers and their hooks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from hsdp import _hsdp
from hsdp.dtypes import registered
from hsdp.reducer import Reducer
from hsdp.torch.slices.parameter_slices import ParameterSlice, ShardSlice, StoredMasters, refuse
from hsdp.torch.units.meta_init import MetaInit
from hsdp.torch.units.pass_hooks import PassHooks
from hsdp.torch.units.replica_parts import ReplicaParts
from hsdp.torch.units.sharded_unit import FrozenSlice, ShardedUnit, StoredSlice
from hsdp.torch.units.unit_plan import ModuleUnit, PlannedUnit, UnitPlan


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
) -> PassHooks:
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
    return PassHooks(
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
