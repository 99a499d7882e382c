"""Which parameters of attached models are released between uses, and in which units."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from hsdp.errors import UsageError
from hsdp.reducer import Reducer
from hsdp.torch.attach.model_attachment import ModelAttachment
from hsdp.torch.attach.trainable_parameters import GRADIENT_DTYPES
from hsdp.torch.slices.parameter_slices import refuse
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
