"""An optimizer's states of slices: shared with the inner optimizer, saved, and loaded."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from hsdp.torch.flat_slice import FlatSlice
from hsdp.torch.slices.optimizer_arguments import settings
from hsdp.torch.slices.optimizer_probe import begin_training
from hsdp.torch.slices.parameter_slices import ParameterSlice, refuse

# For a 16-bit parameter, next to its optimizer's states: the slice in fp32.
MASTER = "master"


class SharedStates:
    """The same state dicts by parameter, as users see them, and by master, as the inner optimizer does.
    Looking up parameters is too slow for every step, so a step compares the dicts with those of the
    previous step, and looks up only if one was replaced.
    """

    def __init__(self, slices: Sequence[ParameterSlice]) -> None:
        self._slices = slices
        self._without: list[ParameterSlice] = []  # whole on another rank, without a state so far
        self._outside: list[Any] | None = None  # as the last step left them
        self._inside: list[Any] | None = None

    def lend(self, outside: Any, inside: Any) -> None:
        """Gives the inner optimizer the states that users see."""
        if self._outside is not None and _are_same(outside.values(), self._outside):
            return
        self._inside = None
        self._without = [one for one in self._slices if not one.is_here]
        for one in self._slices:
            state = outside.get(one.parameter)
            if state and one.is_here:
                inside[one.master] = state
            elif self._outside is not None:  # cleared since the last step
                inside.pop(one.master, None)

    def take_back(
        self,
        outside: Any,
        inside: Any,
        unused: Collection[ParameterSlice],
        fresh: Callable[[ParameterSlice], dict[str, Any]],
    ) -> bool:
        """Gives users the states that the inner optimizer has updated. False: nothing has changed.
        `fresh`: this rank's initial state of a parameter that is whole on another rank.
        """
        is_new = self._begin_elsewhere(outside, unused, fresh)
        if not is_new and self._inside is not None and _are_same(inside.values(), self._inside):
            return False
        for one in self._slices:
            state = inside.get(one.master)
            if not state:  # not used yet
                continue
            if one.is_rounded:  # torch.distributed.checkpoint loads what is in `state`
                state[MASTER] = one.master.detach()
            outside[one.parameter] = state
        self._outside = [*outside.values()]
        # An empty one, created by a lookup, will be filled without being replaced.
        self._inside = [*inside.values()] if all(inside.values()) else None
        return True

    # If the rank that has a parameter begins with a state, so do the others.
    def _begin_elsewhere(
        self,
        outside: Any,
        unused: Collection[ParameterSlice],
        fresh: Callable[[ParameterSlice], dict[str, Any]],
    ) -> bool:
        still = []
        is_new = False
        for one in self._without:
            has_state = bool(outside.get(one.parameter))
            if not has_state and one not in unused:
                state = fresh(one)
                if state:
                    outside[one.parameter] = state
                    has_state = is_new = True
            if not has_state:
                still.append(one)
        self._without = still
        return is_new


class FreshStates:
    """States before the first step, and what they have after one. `make` makes an inner optimizer of
    parameter groups; `group_of`: a parameter's, by its id.
    """

    def __init__(
        self, make: Callable[[list[dict[str, Any]]], Any], group_of: Mapping[int, dict[str, Any]]
    ) -> None:
        self._make = make
        self._group_of = group_of
        self._examples: dict[tuple[Any, ...], dict[str, Any]] = {}

    def example(self, one: ParameterSlice, shape: torch.Size | None = None) -> dict[str, Any]:
        """What a state has after a step with zeros, by keys, shapes and dtypes; values mean nothing. Without
        memory if the optimizer works on the meta device. `shape`: of what it is given, if not whole.
        """
        shape = one.inside_shape if shape is None else shape
        options = settings(self._group_of[id(one.parameter)])
        key = (shape, one.master_dtype, repr(sorted(options.items())))
        if key not in self._examples:
            self._examples[key] = self._made_example(one, shape)
        return self._examples[key]

    def _made_example(self, one: ParameterSlice, shape: torch.Size) -> dict[str, Any]:
        for device in ("meta", str(one.master.device)):
            zeros = torch.zeros(shape, dtype=one.master_dtype, device=device)
            try:
                return self._after_a_step(one, zeros)
            except Exception:  # a class may raise anything when it looks at values
                if device != "meta":
                    raise
        return {}

    def _after_a_step(self, one: ParameterSlice, zeros: torch.Tensor) -> dict[str, Any]:
        parameter = torch.nn.Parameter(zeros)
        parameter.grad = torch.zeros_like(parameter)
        options = settings(self._group_of[id(one.parameter)])
        optimizer = self._make([{**options, "params": [parameter]}])
        begin_training(optimizer)
        optimizer.step()
        return dict(optimizer.state.get(parameter, {}))

    def elsewhere(self, one: ParameterSlice) -> dict[str, Any]:
        """Of a parameter that is whole on another rank."""
        return states_elsewhere(one, self.example(one))

    def load_target(self, one: ParameterSlice) -> dict[str, Any]:
        """A state of no step, into which torch's checkpoints load."""
        if not one.is_here:
            return self.elsewhere(one)
        state = self._after_a_step(one, torch.zeros_like(one.master))
        if "step" in state:
            state["step"] = state["step"] * 0
        if one.is_rounded:
            state[MASTER] = one.master.detach()
        return state


def states_elsewhere(one: ParameterSlice, like: Mapping[str, Any]) -> dict[str, Any]:
    """This rank's states of a parameter that is whole on another rank: tensors without elements, so
    that torch's checkpoints find the same ones on every rank. `like` has such tensors.
    """
    state: dict[str, Any] = {}
    for key, value in like.items():
        if isinstance(value, torch.Tensor) and key != MASTER:
            nothing = torch.empty(0, dtype=value.dtype, device=one.master.device)
            shape = one.parameter.shape if value.shape == one.inside_shape else value.shape
            state[key] = FlatSlice(nothing, shape, 0)
    if one.is_rounded:
        state[MASTER] = one.master.detach()
    return state


def _are_same(states: Any, known: list[Any]) -> bool:
    return len(states) == len(known) and all(map(operator.is_, states, known))


def held_bytes(one: ParameterSlice, state: Mapping[str, Any]) -> int:
    """Bytes of the states, and of masters and what belongs to them."""
    kept = 0
    for key, value in state.items():
        if key != MASTER and isinstance(value, torch.Tensor):
            kept += 0 if isinstance(value, FlatSlice) else value.nbytes
    if one.has_own_master:
        kept += one.count * one.master_dtype.itemsize
    if one.offloaded:  # a gradient, and at stage 3 what gathers read
        kept += one.count * one.master_dtype.itemsize
        if one.is_released and not one.is_part:
            kept += one.count * one.parameter.itemsize
    return kept


def saved_states(one: ParameterSlice, state: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's states as in a state dict: those with an element for each of the slice's are
    FlatSlices over the same memory.
    """
    saved = dict(state)
    if one.is_rounded:
        saved.setdefault(MASTER, one.master.detach())
    for key, value in saved.items():
        if isinstance(value, torch.Tensor) and value.shape == one.master.shape:
            saved[key] = FlatSlice(value.reshape(-1), one.parameter.shape, one.offset)
        elif isinstance(value, torch.Tensor):
            saved[key] = value.clone()  # a load writes into it
    return saved


def loaded_states(one: ParameterSlice, state: Any, on_device: bool) -> dict[str, Any]:
    """Copies of saved states for this slice, from whole ones or those of the same slice; raises
    UsageError for others. `on_device`: where the optimizer keeps numbers.
    """
    if not isinstance(state, Mapping):
        refuse(f"the states of '{one.name}' by name", f"an object of type {type(state).__name__}")
    if one.is_here:
        loaded = {key: _loaded(one, key, value, on_device) for key, value in state.items()}
    else:
        loaded = states_elsewhere(one, state)
    if not one.is_rounded:
        loaded.pop(MASTER, None)
    if is_unused(state):
        loaded = {key: value for key, value in loaded.items() if key == MASTER}
    return loaded


def is_unused(state: Mapping[str, Any]) -> bool:
    """Whether a state says that no step has been made."""
    step = state.get("step")
    return step is not None and not isinstance(step, FlatSlice) and float(step) == 0.0


def is_missing(state: Mapping[str, Any]) -> bool:
    """Whether there is no state, except for the master."""
    return not set(state) - {MASTER}


def _loaded(one: ParameterSlice, key: str, value: Any, on_device: bool) -> Any:
    if isinstance(value, FlatSlice):
        shape, place, part = value.shape, (value.offset, value.to_local().numel()), value.to_local()
    elif isinstance(value, torch.Tensor) and _has_elements(one, key, value):
        shape, place = value.shape, (one.offset, one.count)
        part = one.part_of(value) if shape == one.parameter.shape else value
    else:
        if key == "step" and isinstance(value, (int, float)) and one.states.has_tensor_step:
            value = torch.tensor(float(value))
        if not isinstance(value, torch.Tensor):
            return copy.deepcopy(value)
        follows = on_device or value.dim() > 0
        return value.to(one.master.device if follows else value.device, copy=True)
    if shape != one.parameter.shape or place != (one.offset, one.count):
        got = f"{tuple(shape)}"
        if isinstance(value, FlatSlice):
            got = f"elements from {place[0]}, {place[1]} of them, of {got}"
        refuse(
            f"'{key}' of '{one.name}' as {tuple(one.parameter.shape)}, whole or this rank's elements "
            f"from {one.offset}, {one.count} of them",
            f"{got}; load what full_state_dict() gave, this rank's own state_dict() of the same "
            "mesh, or by torch.distributed.checkpoint",
        )
    is_alike = value.dtype.is_complex if one.parameter.is_complex() else value.dtype.is_floating_point
    dtype = one.master_dtype if is_alike else value.dtype
    return one.shaped(part.to(one.master.device, dtype, copy=True))


# Whether it has an element for each of the parameter's.
def _has_elements(one: ParameterSlice, key: str, value: torch.Tensor) -> bool:
    if one.is_whole and key != MASTER:  # an optimizer may have matrices with other sides
        fits = value.shape == one.parameter.shape
        return fits and (value.dim() > 0 or key in one.states.elementwise)
    return value.dim() > 0 or key == MASTER or key in one.states.elementwise


def require_alike(
    group: Sequence[tuple[ParameterSlice, Mapping[str, Any]]],
    expected: Callable[[ParameterSlice], Mapping[str, Any]],
) -> None:
    """Raises UsageError if the parameters of a group have different states or, for a whole parameter,
    other states than `expected`.
    """
    if all(is_missing(state) for _, state in group):
        return
    first, most = max(group, key=lambda each: len(each[1]))
    for one, state in group:
        if one.is_whole:
            wanted = {
                key for key, value in expected(one).items()
                if one.is_here or isinstance(value, torch.Tensor)
            }
            is_part = not wanted <= set(state)
        else:
            wanted = set(most)
            is_part = set(state) - {MASTER} != wanted - {MASTER}
        if is_part:
            _refuse_part(one, state, wanted, first)
    rounded = [each for each in group if each[0].is_rounded]
    for one, state in rounded:
        if MASTER not in state and any(MASTER in other for _, other in rounded):
            _refuse_part(one, state, {*state, MASTER}, first)


def _refuse_part(one: ParameterSlice, got: Any, wanted: Any, first: ParameterSlice) -> None:
    wanted = set(wanted) if one.is_rounded else set(wanted) - {MASTER}
    like = "" if one is first else f", as of '{first.name}'"
    refuse(
        f"states {sorted(wanted)} of '{one.name}'{like}",
        f"{sorted(got)}; load a state dict that is complete",
    )
