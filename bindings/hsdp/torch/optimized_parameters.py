"""What a ShardedOptimizer optimizes: where its parameters are attached, and what makes their slices."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from hsdp.reducer import Reducer
from hsdp.torch.slices.optimizer_arguments import settings, tensors
from hsdp.torch.slices.optimizer_probe import OptimizerProbe
from hsdp.torch.slices.parameter_slices import ParameterSlice, refuse
from hsdp.torch.units.unit_plan import Place, attached_models


def required_places(groups: list[dict[str, Any]], reducers: list[Reducer]) -> list[list[Place]]:
    """Where the parameters of each group are attached. Each Reducer must have one of them."""
    places = [[_place_of(p, reducers) for p in tensors(g) if p.requires_grad] for g in groups]
    for reducer in reducers:
        if not any(owner is reducer for of_group in places for _, _, owner in of_group):
            refuse("parameters of every Reducer that require gradients", "a Reducer without; leave it out")
    return places


def _place_of(parameter: torch.nn.Parameter, reducers: list[Reducer]) -> Place:
    for reducer in reducers:
        for attachment in attached_models(reducer):
            name = attachment.name_of(parameter)
            if name is not None:
                return name, parameter, reducer
    refuse(
        "parameters whose gradients the Reducer takes (reducer.attach(model))",
        f"one of shape {tuple(parameter.shape)} that it does not know",
    )


def slice_makers(
    probe: OptimizerProbe, groups: list[dict[str, Any]], places: list[list[Place]], offloaded: bool
) -> dict[int, Callable[..., ParameterSlice]]:
    """By a parameter's id: what makes this rank's slice, with the states that the probe has found."""
    makers: dict[int, Callable[..., ParameterSlice]] = {}
    for group, of_group in zip(groups, places, strict=True):
        on_slices = functools.cache(functools.partial(probe.on_slices, settings(group)))
        on_whole = functools.cache(functools.partial(probe.on_whole, settings(group)))
        for name, p, reducer in of_group:
            is_whole = reducer.layout == "whole"
            states = on_whole(max(1, p.dim()), p.is_complex()) if is_whole else on_slices(p.is_complex())
            makers[id(p)] = functools.partial(ParameterSlice, name, p, reducer, states, offloaded)
    return makers
