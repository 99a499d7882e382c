"""Models on the meta device: gives their tensors memory and values, one unit at a time.

[Note: models on the meta device]
"""

from __future__ import annotations

import base64
import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from hsdp.errors import MismatchError, UsageError
from hsdp.line_agreement import first_difference
from hsdp.mesh import Mesh
from hsdp.same_weights import VALUES
from hsdp.torch import private_torch
from hsdp.torch.slices.parameter_slices import refuse
from hsdp.torch.units.released_parameter import RELEASED, released
from hsdp.torch.units.unit_plan import PlannedUnit
from hsdp.torch.value_digests import row_major_bytes, value_digests

_MARK = 0xA5  #: bytes that mark unset values and cannot be NaN
_SURE_BYTES = 4  #: value size from which the mark is conclusive
_ACT = "share the random state of rank 0"
_SHOWN = 5  #: limit for names in an error

#: sets what a module itself owns
ParamInit = Callable[[torch.nn.Module], object]


class _Given(NamedTuple):
    """A tensor that got memory, and what it replaced."""

    name: str
    module: torch.nn.Module
    key: str
    tensor: torch.Tensor
    meta: torch.Tensor


class MetaInit:
    """Gives tensors of models on the meta device memory on `device`, and the values that an init of the
    whole model would give. Modules come in the order of `Module.apply`, children first. Each module
    with a tensor on the meta device, in it or below it, runs its `reset_parameters()` and then
    `param_init_fn(module)`. Of tied parameters, the first module's reset counts, as when modules are
    tied after construction. Tensors that have values keep them.
    """

    def __init__(
        self, models: Iterable[torch.nn.Module], device: str, param_init_fn: ParamInit | None
    ) -> None:
        self._models = [model for model in models if any(map(_has_meta, model.modules()))]
        self._device = torch.device(device)
        self._init = param_init_fn
        self._done: Callable[[PlannedUnit], None]
        self._units: dict[torch.nn.Module, PlannedUnit] = {}
        self._seen: dict[torch.nn.Module, bool] = {}
        self._given: dict[int, _Given] = {}  # by id of the parameter, or of the former buffer
        self._new_buffers: dict[int, torch.Tensor] = {}  # by id of the buffer on the meta device
        self._buffers: list[tuple[torch.nn.Module, str, torch.Tensor]] = []  # on the meta device
        self._unchecked: dict[int, _Given] = {}
        self._lines: list[str] = []

    @property
    def is_needed(self) -> bool:
        """Whether any tensor is on the meta device."""
        return bool(self._models)

    def run(self, units: Sequence[PlannedUnit], done: Callable[[PlannedUnit], None]) -> None:
        """Calls `done` for each unit that had no values once it has them; `done` may free it. Raises
        UsageError for modules that leave a tensor without values.
        """
        self._units = {planned.unit.module: planned for planned in units}
        self._done = done
        for model in self._models:
            without = list(self._without_init(model, "", self._init is not None))
            if without:
                more = "" if len(without) <= _SHOWN else f" and {len(without) - _SHOWN} more"
                refuse(
                    "modules on the meta device that have reset_parameters()",
                    f"none in {', '.join(without[:_SHOWN])}{more}; pass param_init_fn, which is called "
                    "with each module and sets what it has, or make them outside of "
                    "torch.device('meta')",
                )
        with torch.no_grad():
            for model in self._models:
                self._visit(model, "")
            self._check(list(self._unchecked))
        for given in self._given.values():  # some were released before parent modules had their turn
            self._require_same_kind(given)

    def undo(self) -> None:
        """Puts everything back on the meta device."""
        for given in reversed(self._given.values()):
            if isinstance(given.tensor, torch.nn.Parameter):
                released.pop(id(given.tensor), None)
                kind: Any = type(given.meta)
                given.tensor.__class__ = kind
                given.module._parameters[given.key] = given.tensor
                _swap(given.name, given.module, given.tensor, given.meta)
        for module, key, buffer in self._buffers:
            module._buffers[key] = buffer
        self._given.clear()

    def require_same_values(self, mesh: Mesh) -> None:
        """Raises MismatchError if ranks have set different values. Collective."""
        if not self._models:
            return
        difference = first_difference(mesh.world, self._lines, "compare initial parameters")
        if difference is None:
            return
        place = difference.places[0]
        name = difference.lines[place].partition(VALUES)[0]
        ranks = [mesh.world.ranks[place] for place in difference.places]
        raise MismatchError(
            "zero: ShardedOptimizer: expected every rank to set the same initial values, got others of "
            f"{name} on rank {ranks[0]} than on rank {mesh.world.ranks[0]}; param_init_fn may depend on "
            "torch's random state, which is rank 0's, and on nothing else that is the rank's own",
            ranks,
        )

    # The names of modules whose own tensors are set neither by them nor by parents.
    def _without_init(self, module: torch.nn.Module, name: str, is_set: bool) -> Iterator[str]:
        is_set = is_set or _reset_of(module) is not None
        if not is_set and _has_meta(module):
            kind = type(module).__name__
            yield f"'{name}' ({kind})" if name else kind
        for key, child in module.named_children():
            yield from self._without_init(child, _joined(name, key), is_set)

    # Returns whether it or a module below it has got memory.
    def _visit(self, module: torch.nn.Module, name: str) -> bool:
        if module in self._seen:
            return self._seen[module]
        below = [self._visit(child, _joined(name, key)) for key, child in module.named_children()]
        valued = [t for t in _own(module) if not t.is_meta and id(t) not in self._given]
        tied = [t for t in _own(module) if id(t) in self._given]
        is_new = self._give_memory(module, name) or bool(tied) or any(below)
        self._seen[module] = is_new
        if not is_new:
            return False
        reset = _reset_of(module)
        if reset is not None:
            with _kept([*tied, *valued]), _in_its_unit(f"{type(module).__name__}.reset_parameters()"):
                reset()
        if self._init is not None:
            with _kept(valued), _in_its_unit(f"param_init_fn of {name or 'the model'}"):
                self._init(module)
        planned = self._units.get(module)
        if planned is not None:
            ids = [id(p) for p in planned.parameters.values()]
            if all(one in self._given for one in ids):
                self._check(ids)
                self._done(planned)
        return True

    def _give_memory(self, module: torch.nn.Module, name: str) -> bool:
        before = len(self._given)
        own = {id(one) for one in _own(module)}
        for key, parameter in private_torch.parameters_of(module).items():
            if parameter is not None and parameter.is_meta and id(parameter) in own:
                path = _joined(name, key)
                if private_torch.backward_hooks(parameter) or private_torch.post_accumulate_grad_hooks(parameter):
                    refuse(
                        f"'{path}' on the meta device without hooks, as they would be lost",
                        "some; register them when the optimizer is made",
                    )
                fresh = private_torch.make_subclass(
                    type(parameter), _marked(parameter, self._device), parameter.requires_grad
                )
                _swap(path, module, parameter, fresh)
                self._note(_Given(path, module, key, parameter, fresh))
        for key, buffer in module._buffers.items():
            if buffer is None or not buffer.is_meta or id(buffer) not in own:
                continue
            self._buffers.append((module, key, buffer))
            if id(buffer) in self._new_buffers:  # another module shares it
                module._buffers[key] = self._new_buffers[id(buffer)]
                continue
            fresh_buffer = _marked(buffer, self._device)
            module._buffers[key] = self._new_buffers[id(buffer)] = fresh_buffer
            self._note(_Given(_joined(name, key), module, key, fresh_buffer, buffer))
        return len(self._given) > before

    def _note(self, given: _Given) -> None:
        self._given[id(given.tensor)] = self._unchecked[id(given.tensor)] = given

    # Checks that all have values and are otherwise unchanged.
    def _check(self, ids: Iterable[int]) -> None:
        checked = [_current(self._unchecked.pop(key)) for key in ids if key in self._unchecked]
        for one in checked:
            self._require_same_kind(one)
            if _is_unset(one.tensor):
                kind = type(one.module).__name__
                by = f"{kind}.reset_parameters()" if _reset_of(one.module) else kind
                by += "" if self._init is None else " and param_init_fn"
                refuse(
                    f"a value for every element of '{one.name}', which was on the meta device",
                    f"some that {by} did not set; set them there, or make it outside of "
                    "torch.device('meta')",
                )
        digests = value_digests([one.tensor for one in checked])
        for one, digest in zip(checked, digests, strict=True):
            self._lines.append(f"'{one.name}'{VALUES}{digest}")

    def _require_same_kind(self, one: _Given) -> None:
        def kind(tensor: torch.Tensor, device: torch.device) -> str:
            grad = ", with gradients" if tensor.requires_grad else ""
            return f"{tensor.dtype} {tuple(tensor.shape)} on {device}{grad}"

        expected, got = kind(one.meta, self._device), kind(one.tensor, one.tensor.device)
        if got != expected:
            refuse(
                f"'{one.name}' as it was on the meta device: {expected}",
                f"{got} after its init; change the model before attach",
            )


def _own(module: torch.nn.Module) -> list[torch.Tensor]:
    own = (*module._parameters.values(), *module._buffers.values())
    uninitialized = (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer)
    return [one for one in own if one is not None and not isinstance(one, uninitialized)]


# Preserves their values, whatever the block writes.
@contextlib.contextmanager
def _kept(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    values = [one.detach().clone() for one in tensors]
    try:
        yield
    finally:
        for one, before in zip(tensors, values, strict=True):
            one.detach().copy_(before)


# Units below are already sliced.
@contextlib.contextmanager
def _in_its_unit(init: str) -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        if RELEASED not in str(error):
            raise
        refuse(
            f"{init} to set what no unit below has, as those are sliced by then",
            f"'{str(error).split(chr(39))[1]}'; let units= have the module as one, or set it in the "
            "module that has it",
        )


# What its module has now. An init may replace a buffer; of another parameter only the values are taken.
def _current(given: _Given) -> _Given:
    if not isinstance(given.tensor, torch.nn.Parameter):
        now = given.module._buffers.get(given.key)
        return given if now is None else given._replace(tensor=now)
    other = given.module._parameters.get(given.key)
    if other is None or other is given.tensor:
        return given
    if (other.shape, other.dtype) != (given.tensor.shape, given.tensor.dtype):
        return given._replace(tensor=other)  # to be refused
    given.tensor.copy_(other)
    given.module._parameters[given.key] = given.tensor
    return given


def _joined(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _has_meta(module: torch.nn.Module) -> bool:
    return any(one.is_meta for one in _own(module))


# torch hides some. A wrapper may forward those of what it wraps, which is itself visited.
def _reset_of(module: torch.nn.Module) -> Callable[[], Any] | None:
    for name in private_torch.RESETS:
        if callable(getattr(type(module), name, None)):
            reset: Callable[[], Any] = getattr(module, name)
            return reset
    return None


# Both stay the same objects, so anything that holds them, such as an optimizer's group, sees the
# other's values from now on.
def _swap(name: str, module: torch.nn.Module, one: torch.Tensor, other: torch.Tensor) -> None:
    vars(other).update(vars(one))
    is_rnn = isinstance(module, torch.nn.RNNBase)
    if is_rnn:
        private_torch.forget_flat_weights(module)
    try:
        torch.utils.swap_tensors(one, other)
    except RuntimeError as error:
        refuse(f"'{name}' on the meta device to be held by its model alone", f"more: {error}")
    finally:
        if is_rnn:
            private_torch.make_flat_weights(module)


# Filled so that unset values can be recognized.
def _marked(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    if _has_nan(like):
        nan = complex(math.nan, math.nan) if like.is_complex() else math.nan
        return torch.full_like(like, nan, device=device, requires_grad=False)
    marks = torch.full((like.nbytes,), _MARK, dtype=torch.uint8, device=device)
    return marks.view(like.dtype).reshape(like.shape)


def _is_unset(tensor: torch.Tensor) -> bool:
    if tensor.numel() == 0:
        return False
    if _has_nan(tensor):
        return bool(tensor.isnan().any())
    marks = (row_major_bytes(tensor) == _MARK).view(tensor.numel(), -1).all(1)
    return bool(marks.any() if tensor.dtype.itemsize >= _SURE_BYTES else marks.all())


def _has_nan(tensor: torch.Tensor) -> bool:
    return tensor.is_complex() or bool(tensor.is_floating_point() and tensor.dtype.itemsize > 1)


@contextlib.contextmanager
def random_state_of_rank_0(mesh: Mesh, is_needed: bool) -> Iterator[None]:
    """In the block, torch's random numbers are those of the mesh's rank 0. Ranks that had the same
    state continue from there; others continue with their own. Collective; raises MismatchError
    unless all ranks or none need it.
    """
    world = mesh.world
    device = torch.device(mesh.device)
    own = _random_state(device)
    word = "" if not is_needed else own if mesh.rank == 0 else "needed"
    words = world._handle.exchange(word, _ACT) if mesh.size > 1 else [word]
    others = [place for place, other in enumerate(words) if bool(other) != bool(words[0])]
    if others:
        where = ("elsewhere", "on the meta device")
        raise MismatchError(
            "zero: ShardedOptimizer: expected the models on the meta device on every rank or on none, got "
            f"them {where[bool(words[0])]} on rank {world.ranks[0]} and {where[not words[0]]} on rank "
            f"{world.ranks[others[0]]}",
            [world.ranks[place] for place in others],
        )
    if not words[0]:
        yield
        return
    _set_random_state(device, words[0])
    is_done = False
    try:
        yield
        is_done = True
    finally:
        if not is_done or own != words[0]:
            _set_random_state(device, own)


def _random_state(device: torch.device) -> str:
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return " ".join(base64.b64encode(bytes(state.numpy())).decode() for state in states)


def _set_random_state(device: torch.device, text: str) -> None:
    states = [
        torch.frombuffer(bytearray(base64.b64decode(word)), dtype=torch.uint8) for word in text.split()
    ]
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)
