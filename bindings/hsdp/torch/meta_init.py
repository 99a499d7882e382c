"""Models on the meta device: their tensors get memory and values, one unit at a time.

[Note: models on the meta device]
"""

from __future__ import annotations

import base64
import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hsdp.errors import MismatchError
from hsdp.line_agreement import first_difference
from hsdp.mesh import Mesh
from hsdp.same_weights import VALUES
from hsdp.torch.parameter_slices import refuse
from hsdp.torch.released_parameter import released
from hsdp.torch.value_digests import row_major_bytes, value_digests

if TYPE_CHECKING:
    from hsdp.torch.unit_sharding import PlannedUnit

_MARK = 0xA5  # bytes of what nothing has set yet and cannot be NaN
_ACT = "share the random state of rank 0"
_SHOWN = 5  # names in an error

#: sets what a module has of its own
ParamInit = Callable[[torch.nn.Module], object]


class _Given(NamedTuple):
    """A tensor that got memory, and what was there before."""

    name: str
    module: torch.nn.Module
    key: str
    tensor: torch.Tensor
    meta: torch.Tensor


class MetaInit:
    """Gives tensors of models on the meta device memory on `device`, and the values of an init of the
    whole model. Modules come in the order of `Module.apply`, those below first; each runs its
    `reset_parameters()`, and then `param_init_fn(module)`. Of tied parameters the first module's
    reset counts, as it does where modules are tied after they were made.
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
        self._given: dict[int, _Given] = {}  # by id of the parameter, or of what became a buffer
        self._new_buffers: dict[int, torch.Tensor] = {}  # by id of the one on the meta device
        self._unchecked: dict[int, _Given] = {}
        self._lines: list[str] = []

    @property
    def is_needed(self) -> bool:
        """Whether something is on the meta device."""
        return bool(self._models)

    def run(self, units: Sequence[PlannedUnit], done: Callable[[PlannedUnit], None]) -> None:
        """Of each unit `done` is called when it has its values, and may free it. Raises UsageError for
        modules that leave something without a value.
        """
        self._units = {planned.unit.module: planned for planned in units}
        self._done = done
        for model in self._models:
            self._require_inits(model)
        with torch.no_grad():
            for model in self._models:
                self._visit(model, "")
            self._check(list(self._unchecked))

    def undo(self) -> None:
        """Everything is on the meta device again."""
        for given in reversed(self._given.values()):
            if isinstance(given.tensor, torch.nn.Parameter):
                released.pop(id(given.tensor), None)
                given.tensor.__class__ = torch.nn.Parameter
                _swap(given.name, given.module, given.tensor, given.meta)
            else:
                given.module._buffers[given.key] = given.meta
        self._given.clear()

    def require_same_values(self, mesh: Mesh) -> None:
        """MismatchError where ranks have given other values. Collective."""
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

    def _require_inits(self, model: torch.nn.Module) -> None:
        if self._init is not None:
            return
        without = [
            f"'{name}' ({type(module).__name__})" if name else type(module).__name__
            for name, module in model.named_modules()
            if _has_meta(module) and _reset_of(module) is None
        ]
        if without:
            more = "" if len(without) <= _SHOWN else f" and {len(without) - _SHOWN} more"
            refuse(
                "modules on the meta device that have reset_parameters()",
                f"none in {', '.join(without[:_SHOWN])}{more}; pass param_init_fn, which is called with "
                "each module and sets what it has, or make them outside of torch.device('meta')",
            )

    # Whether it or something below it has got memory.
    def _visit(self, module: torch.nn.Module, name: str) -> bool:
        if module in self._seen:
            return self._seen[module]
        below = [self._visit(child, _joined(name, key)) for key, child in module.named_children()]
        tied = self._tied(module)
        has_own = self._give_memory(module, name) or bool(tied)
        reset = _reset_of(module)
        if has_own and reset is not None:
            values = [p.clone() for p in tied]
            reset()
            for parameter, before in zip(tied, values, strict=True):
                parameter.copy_(before)
        is_new = self._seen[module] = has_own or any(below)
        if is_new and self._init is not None:
            self._init(module)
        planned = self._units.get(module)
        if planned is not None:
            self._check([id(p) for p in planned.parameters.values()])
            self._done(planned)
        return is_new

    def _tied(self, module: torch.nn.Module) -> list[torch.Tensor]:
        return [p for p in module._parameters.values() if id(p) in self._given and p is not None]

    def _give_memory(self, module: torch.nn.Module, name: str) -> bool:
        given = []
        for key, parameter in module._parameters.items():
            if parameter is not None and _is_meta(parameter):
                fresh = torch.nn.Parameter(
                    _marked(parameter, self._device), requires_grad=parameter.requires_grad
                )
                _swap(_joined(name, key), module, parameter, fresh)
                given.append(_Given(_joined(name, key), module, key, parameter, fresh))
        for key, buffer in module._buffers.items():
            if buffer is None or not _is_meta(buffer):
                continue
            if id(buffer) in self._new_buffers:  # another module has it, too
                module._buffers[key] = self._new_buffers[id(buffer)]
                continue
            fresh_buffer = _marked(buffer, self._device)
            module._buffers[key] = self._new_buffers[id(buffer)] = fresh_buffer
            given.append(_Given(_joined(name, key), module, key, fresh_buffer, buffer))
        for one in given:
            self._given[id(one.tensor)] = self._unchecked[id(one.tensor)] = one
        return bool(given)

    # That all of them have values.
    def _check(self, ids: Iterable[int]) -> None:
        checked = [self._unchecked.pop(key) for key in ids if key in self._unchecked]
        for one in checked:
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


def _joined(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _is_meta(tensor: torch.Tensor) -> bool:
    uninitialized = (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer)
    return tensor.is_meta and not isinstance(tensor, uninitialized)


def _has_meta(module: torch.nn.Module) -> bool:
    own = (*module._parameters.values(), *module._buffers.values())
    return any(one is not None and _is_meta(one) for one in own)


# MultiheadAttention hides its own.
def _reset_of(module: torch.nn.Module) -> Callable[[], Any] | None:
    for name in ("reset_parameters", "_reset_parameters"):
        found = getattr(module, name, None)
        if callable(found):
            reset: Callable[[], Any] = found
            return reset
    return None


# They stay the objects that they are: whoever holds them, an optimizer's group for one, has the other's
# values from here on.
def _swap(name: str, module: torch.nn.Module, one: torch.Tensor, other: torch.Tensor) -> None:
    vars(other).update(vars(one))
    is_rnn = isinstance(module, torch.nn.RNNBase)
    if is_rnn:
        module._flat_weight_refs = []  # weak ones, which would be in the way
    try:
        torch.utils.swap_tensors(one, other)
    except RuntimeError as error:
        refuse(f"'{name}' on the meta device to be held by its model alone", f"more: {error}")
    finally:
        if is_rnn:
            module._init_flat_weights()


# What shows where nothing is set.
def _marked(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    if _has_nan(like):
        return torch.full_like(like, math.nan, device=device, requires_grad=False)
    marks = torch.full((like.nbytes,), _MARK, dtype=torch.uint8, device=device)
    return marks.view(like.dtype).reshape(like.shape)


def _is_unset(tensor: torch.Tensor) -> bool:
    if tensor.numel() == 0:
        return False
    if _has_nan(tensor):
        return bool(tensor.isnan().any())
    return bool((row_major_bytes(tensor) == _MARK).all())


def _has_nan(tensor: torch.Tensor) -> bool:
    return tensor.is_complex() or bool(tensor.is_floating_point() and tensor.dtype.itemsize > 1)


@contextlib.contextmanager
def random_state_of_rank_0(mesh: Mesh, is_needed: bool) -> Iterator[None]:
    """Within, torch's random numbers are those of the mesh's rank 0. Ranks whose state was the same
    go on from there, others go on with their own. Collective; MismatchError where it is not needed on
    all ranks or on none.
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
