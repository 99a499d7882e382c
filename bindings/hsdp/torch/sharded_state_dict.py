"""The state dict of an optimizer on slices: saved, made whole, and loaded."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from hsdp.torch.flat_slice import FlatSlice
from hsdp.torch.parameter_groups import numbers
from hsdp.torch.parameter_slices import ParameterSlice, gather_whole, refuse
from hsdp.torch.slice_states import is_unused, loaded_states, require_alike, saved_states

Groups = list[dict[str, Any]]


def put_slices(state_dict: dict[str, Any], groups: Groups, slices: Iterable[ParameterSlice]) -> None:
    """Has it name what of a state this rank has, and the masters."""
    number_of = numbers(groups)
    for one in slices:
        number = number_of[id(one.parameter)]
        states = saved_states(one, state_dict["state"].get(number, {}))
        if states:
            state_dict["state"][number] = states


def make_whole(state_dict: dict[str, Any], groups: Groups, slices: Iterable[ParameterSlice]) -> None:
    """Puts whole tensors in the place of slices. Collective."""
    number_of = numbers(groups)
    parts: dict[str, dict[ParameterSlice, torch.Tensor]] = {}  # of the slices, by key
    for one in slices:
        own = state_dict["state"].get(number_of[id(one.parameter)], {})
        for key, value in own.items():
            if isinstance(value, FlatSlice):
                parts.setdefault(key, {})[one] = value.to_local()
            elif isinstance(value, torch.Tensor) and value.dim() > 0:
                refuse(f"states that are numbers or slices, of '{one.name}'", f"'{key}'")
            else:
                own[key] = copy.deepcopy(value)
    for key in sorted(parts):
        for one, whole in gather_whole(parts[key]):
            state_dict["state"][number_of[id(one.parameter)]][key] = whole


def loadable(
    state_dict: Any, own: Groups, slices: Sequence[ParameterSlice]
) -> tuple[Groups, list[tuple[ParameterSlice, dict[str, Any]]]]:
    """The groups of a state dict, and copies of its states for each slice. UsageError where it is not
    one of these parameters.
    """
    groups = _loadable_groups(state_dict, own)
    keys = list(itertools.chain.from_iterable(group["params"] for group in groups))
    number_of = numbers(own)
    # Where its own step would have put numbers.
    on_device = any(group.get("fused") or group.get("capturable") for group in own)
    loaded = {}
    used = set()
    for one in slices:
        state = state_dict["state"].get(keys[number_of[id(one.parameter)]], {})
        loaded[id(one.parameter)] = (one, loaded_states(one, state, on_device))
        if not is_unused(state):
            used.add(id(one.parameter))
    for group in own:
        require_alike([loaded[id(p)] for p in group["params"] if id(p) in used])
    return groups, list(loaded.values())


def _loadable_groups(state_dict: Any, own: Groups) -> Groups:
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        got = sorted(state_dict) if isinstance(state_dict, Mapping) else type(state_dict).__name__
        refuse("a state dict with 'state' and 'param_groups'", str(got))
    groups: Groups = list(state_dict["param_groups"])
    lengths = [len(group["params"]) for group in own]
    given = [len(group.get("params", ())) for group in groups]
    if given != lengths:
        refuse(f"a state dict with parameter groups of {lengths}", str(given))
    for group, saved in zip(own, groups, strict=True):
        # Keys that are names have found their parameters.
        names = saved.get("param_names", ()) if isinstance((*saved["params"], 0)[0], int) else ()
        for name, other in zip(group.get("param_names", ()), names):
            if name != other:
                refuse(f"the states of '{name}' in its place", f"those of '{other}'")
    return groups
