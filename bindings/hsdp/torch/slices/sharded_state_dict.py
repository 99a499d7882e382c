"""The state dict of an optimizer on slices: saves it, makes it whole, and loads it."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from hsdp.communicator import Communicator
from hsdp.torch.flat_slice import FlatSlice
from hsdp.torch.slices.optimizer_arguments import numbers
from hsdp.torch.slices.parameter_slices import ParameterSlice, gather_whole, refuse
from hsdp.torch.slices.slice_states import (
    is_missing, is_unused, loaded_states, require_alike, saved_states,
)

Groups = list[dict[str, Any]]

_ACT = "gather the states of whole parameters"


def put_slices(state_dict: dict[str, Any], groups: Groups, slices: Iterable[ParameterSlice]) -> None:
    """Adds this rank's parts of states, and the masters, under their names."""
    number_of = numbers(groups)
    for one in slices:
        number = number_of[id(one.parameter)]
        states = saved_states(one, state_dict["state"].get(number, {}))
        if states:
            state_dict["state"][number] = states


def make_whole(state_dict: dict[str, Any], groups: Groups, slices: Sequence[ParameterSlice]) -> None:
    """Replaces slices by whole tensors. Collective."""
    number_of = numbers(groups)
    parts: dict[str, dict[ParameterSlice, torch.Tensor]] = {}  # this rank's slices, by key
    for one in slices:
        own = state_dict["state"].get(number_of[id(one.parameter)], {})
        if one.is_whole:
            continue
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
    for reducer in {one.reducer: None for one in slices if one.is_whole}:
        of_reducer = [one for one in slices if one.reducer is reducer]
        _share_whole(state_dict["state"], number_of, of_reducer)


# The states of whole parameters come from the ranks that have them, whatever they are.
def _share_whole(
    states: dict[int, Any], number_of: Mapping[int, int], slices: Sequence[ParameterSlice]
) -> None:
    group = slices[0].reducer._slice_group
    own: list[tuple[int, str, Any]] = []
    fault = None
    for one in slices:
        number = number_of[id(one.parameter)]
        state = states.pop(number, {})
        if not one.is_here and one.parameter.numel() > 0:  # without elements it belongs to no rank
            continue
        for key, value in state.items():
            own.append((number, key, _unsliced(value)))
            if _kind(own[-1][2]) is None:
                fault = f"'{key}' of '{one.name}', an object of type {type(value).__name__}"
    word = {"fault": fault, "states": [(number, key, _kind(value)) for number, key, value in own]}
    words = [json.loads(text) for text in group._handle.exchange(json.dumps(word), _ACT)]
    for said in words:
        if said["fault"]:
            refuse("states of tensors, numbers, texts, and lists of them", said["fault"])
    for root, said in enumerate(words):
        for i, (number, key, kind) in enumerate(said["states"]):
            value = own[i][2] if root == group.rank else None
            device = slices[0].parameter.device
            states.setdefault(number, {})[key] = _broadcast(group, root, device, value, kind)


def _unsliced(value: Any) -> Any:
    if not isinstance(value, FlatSlice):
        return value
    local = value.to_local()
    if local.numel() < value.numel():  # of a parameter without elements
        return torch.zeros(value.shape, dtype=value.dtype)
    return local.reshape(value.shape)


# In JSON. None: a value that another rank cannot make.
def _kind(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return {"tensor": [str(value.dtype).removeprefix("torch."), *value.shape], "on": value.device.type}
    if isinstance(value, (list, tuple)):
        kinds = [_kind(each) for each in value]
        return None if None in kinds else {"list": kinds, "is_tuple": isinstance(value, tuple)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value}
    return None


def _broadcast(
    group: Communicator, root: int, device: torch.device, value: Any, kind: dict[str, Any]
) -> Any:
    if "value" in kind:
        return kind["value"]
    if "list" in kind:
        values = [None] * len(kind["list"]) if value is None else value
        every = [
            _broadcast(group, root, device, *each) for each in zip(values, kind["list"], strict=True)
        ]
        return tuple(every) if kind["is_tuple"] else every
    dtype, *shape = kind["tensor"]
    whole = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
    if value is not None:
        whole.copy_(value)
    if whole.numel() > 0:
        group.broadcast(whole.reshape(-1).view(torch.uint8), root)
    return whole.to(kind["on"])


def loadable(
    state_dict: Any,
    own: Groups,
    slices: Sequence[ParameterSlice],
    expected: Callable[[ParameterSlice], Mapping[str, Any]],
) -> tuple[Groups, list[tuple[ParameterSlice, dict[str, Any]]]]:
    """The groups of a state dict, and copies of its states for each slice. Raises UsageError if it does
    not fit all of these parameters. `expected` returns the states that a whole parameter has.
    """
    groups = _loadable_groups(state_dict, own)
    keys = list(itertools.chain.from_iterable(group["params"] for group in groups))
    number_of = numbers(own)
    # Where the optimizer's own step would have put numbers.
    on_device = any(group.get("fused") or group.get("capturable") for group in own)
    loaded = {}
    used = set()
    for one in slices:
        state = state_dict["state"].get(keys[number_of[id(one.parameter)]], {})
        loaded[id(one.parameter)] = (one, loaded_states(one, state, on_device))
        may_be_missing = is_missing(state) and not one.states.begins_with_zeros
        if not is_unused(state) and not may_be_missing:
            used.add(id(one.parameter))
    for group in own:
        require_alike([loaded[id(p)] for p in group["params"] if id(p) in used], expected)
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
        # Keys that are names have already found their parameters.
        names = saved.get("param_names", ()) if isinstance((*saved["params"], 0)[0], int) else ()
        for name, other in zip(group.get("param_names", ()), names):
            if name != other:
                refuse(f"the states of '{name}' in its place", f"those of '{other}'")
    return groups
