"""A unit of parameters stored as slices on the ranks: gathered before use, released after.

[Note: parameters that are released]
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import torch

from hsdp import _hsdp
from hsdp.profiler_range import profiler_range
from hsdp.reducer import Reducer
from hsdp.torch import private_torch
from hsdp.torch.flat_slice import FlatSlice
from hsdp.torch.slices.parameter_slices import (
    ParameterSlice, ShardSlice, chosen, flat_part, refuse, require_unmarked,
)
from hsdp.torch.units.released_parameter import ReleasedParameter, released
from hsdp.torch.value_digests import differ


class FrozenSlice:
    """The slice of a parameter without gradients: an even part of its elements, in its dtype."""

    def __init__(self, name: str, parameter: torch.nn.Parameter, reducer: Reducer) -> None:
        self.name = name
        self.parameter = parameter
        self.reducer = reducer
        mesh = reducer.mesh
        self.offset, self.count = _hsdp.UnitGather.even_slice(
            parameter.numel(), mesh.shard_size, mesh.shard_rank
        )
        #: flat
        self.stored = torch.empty(self.count, dtype=parameter.dtype, device=mesh.device)

    def rounded(self) -> torch.Tensor:
        """The stored slice itself."""
        return self.stored

    #: there is no master
    is_copied_to_store = False

    def arrive(self) -> None:
        """Does nothing: no rank updates it."""

    def take(self) -> None:
        """Takes its first values."""
        self.stored.copy_(flat_part(self.parameter.data, self.offset, self.count))

    def take_over(self, values: torch.Tensor, written: torch.Tensor | None = None) -> None:
        """Takes its new values."""
        self.stored.copy_(chosen(written, values, self.stored))


#: this rank's slice of a parameter, which is all that it stores
StoredSlice: TypeAlias = ParameterSlice | ShardSlice | FrozenSlice


class ReleasedArray:
    """The memory of one parameter: freed and reallocated for the same tensor. Views saved by autograd
    see the new values, since the storage stays the same object.
    """

    def __init__(self, slice_: StoredSlice) -> None:
        self.slice = slice_
        self.parameter = slice_.parameter
        self.name = slice_.name
        #: the unit that contains it
        self.unit: weakref.ref[ShardedUnit]
        data = self.parameter.data
        is_alone = data.untyped_storage().nbytes() == data.nbytes
        if not is_alone or not _is_dense(data):  # only its own memory can be freed
            self.parameter.data = data = data.clone(memory_format=torch.contiguous_format)
        self._kind = (data.shape, data.dtype, data.device)
        self._bind()

    def _bind(self) -> None:
        data = self.parameter.data
        self._storage: Any = data.untyped_storage()
        self._nbytes: int = data.nbytes
        # Gathers fill row-major memory.
        self._is_copied = not data.is_contiguous()
        self._row_major: torch.Tensor | None = None
        self._version: int = private_torch.version(self.parameter)
        self._shown: torch.Tensor | None = None  # if pinned or stale: the slice's values then

    @property
    def nbytes(self) -> int:
        """The size of the whole."""
        return self._nbytes

    def take(self) -> int:
        """Allocates the whole, and returns where a gather writes."""
        self._storage.resize_(self._nbytes)
        memory = self._storage
        if self._is_copied:
            p = self.parameter
            memory = self._row_major = torch.empty(p.shape, dtype=p.dtype, device=p.device)
        pointer: int = memory.data_ptr()
        return pointer

    def appear(self) -> None:
        """Called once it was gathered."""
        released.pop(id(self.parameter), None)
        self.parameter.__class__ = torch.nn.Parameter
        if self._row_major is not None:
            self.parameter.data.copy_(self._row_major)
            self._row_major = None
        self._version = private_torch.version(self.parameter)

    def was_written(self) -> bool:
        """Whether it was written to in a way that torch notices."""
        return private_torch.version(self.parameter) != self._version or not self._is_same_memory()

    def _is_same_memory(self) -> bool:
        return bool(self.parameter.untyped_storage().data_ptr() == self._storage.data_ptr())

    def _own(self) -> torch.Tensor:
        require_unmarked(self.name, self.parameter)
        data = self.parameter.data
        if (data.shape, data.dtype, data.device) != self._kind:
            refuse(
                f"'{self.name}' as it was: {self._kind[1]} {tuple(self._kind[0])} on {self._kind[2]}",
                f"{data.dtype} {tuple(data.shape)} on {data.device}; make the Reducer and the optimizer "
                "after the model has changed",
            )
        return flat_part(data, self.slice.offset, self.slice.count)

    def show(self) -> None:
        """The whole may now be written to: elements that are not keep the slice's values."""
        self._shown = self._own().clone()

    def read(self) -> None:
        """Updates the slice from the whole, which is present."""
        own = self._own()
        if self._shown is not None:
            written, self._shown = differ(own, self._shown), own.clone()
            self.slice.take_over(own, written)
        else:
            self.slice.take_over(own)
        self.was_read()

    def was_read(self) -> None:
        """Ignores all earlier writes."""
        self._version = private_torch.version(self.parameter)

    # Tensors over the old memory stay valid.
    def _move(self) -> None:
        data = self.parameter.data
        fresh = torch.empty(data.shape, dtype=data.dtype, device=data.device)
        if _is_dense(data):
            fresh = torch.empty_like(data)
        self.parameter.data = fresh
        self._bind()

    def vanish(self, moves: bool = False) -> None:
        """Frees the memory or, with `moves`, leaves it to other tensors over it."""
        if moves or not self._is_same_memory():
            self._move()
        released[id(self.parameter)] = self
        self.parameter.__class__ = ReleasedParameter
        self._shown = None
        self.free()

    def memory(self) -> object:
        """Objects that keep the memory alive to which a gather writes."""
        return self._row_major, self._storage

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is, or may be, in its memory."""
        try:
            memory = tensor.untyped_storage()
        except NotImplementedError:  # within vmap and the like
            return True
        return bool(memory.data_ptr() == self._storage.data_ptr())

    def free(self) -> None:
        """Frees allocated memory."""
        self._row_major = None
        self._storage.resize_(0)

    def forget(self) -> None:
        """Removes it from the table of released parameters."""
        if released.get(id(self.parameter)) is self:
            del released[id(self.parameter)]

    # For a model's state dict.

    def saved(self) -> torch.Tensor:
        """Its slice, as torch.distributed.checkpoint saves and loads it."""
        return FlatSlice(self.slice.rounded().detach(), self.parameter.shape, self.slice.offset)

    def load(self, values: torch.Tensor) -> None:
        """Takes its values from a whole tensor, or from this rank's slice of one."""
        shape, offset, count = self.parameter.shape, self.slice.offset, self.slice.count
        if isinstance(values, FlatSlice):
            own = values.to_local()
            if (values.shape, values.offset, own.numel()) != (shape, offset, count):
                refuse(
                    f"'{self.name}' as {tuple(shape)}, whole or elements from {offset}, {count} of them",
                    f"elements from {values.offset}, {own.numel()} of them, of {tuple(values.shape)}; "
                    "load through torch.distributed.checkpoint",
                )
        else:
            own = flat_part(values, offset, count)
        unit = self.unit()
        if unit is not None:
            unit.drop_request()
        stored = self.slice.rounded()
        is_same = own.data_ptr() == stored.data_ptr() and own.dtype == stored.dtype
        if self.slice.is_copied_to_store or not is_same:
            self.slice.take_over(own.to(stored.device, stored.dtype))


def _is_dense(data: torch.Tensor) -> bool:
    return bool(torch.ops.aten.is_non_overlapping_and_dense(data))


class ShardedUnit:
    """Parameters that are gathered together, and whether they are present.

    A pinned unit stays present until it is unpinned.
    """

    def __init__(
        self,
        name: str,
        module: torch.nn.Module,
        is_root: bool,
        slices: Sequence[StoredSlice],
        read_above: Sequence[torch.nn.Module] = (),
    ) -> None:
        self.name = name
        self._module = weakref.ref(module)
        self.is_root = is_root
        self.slices = slices
        self._read_above = [weakref.ref(one) for one in read_above]
        self._arrays = [ReleasedArray(one) for one in slices]
        for array in self._arrays:
            array.unit = weakref.ref(self)
        #: size of the whole
        self.nbytes = sum(array.nbytes for array in self._arrays)
        self.is_present = True
        self.is_requested = False
        self.is_pinned = False
        self._is_stale = False

    @property
    def module(self) -> torch.nn.Module | None:
        """The module whose parameters it has, while that lives."""
        return self._module()

    @property
    def read_above(self) -> list[torch.nn.Module]:
        """Parent modules that look at its parameters before they call it."""
        return [module for one in self._read_above if (module := one()) is not None]

    def bind(self, gathers: _hsdp.UnitGather, number: int) -> None:
        """Sets the UnitGather that gathers it, as unit `number`."""
        #: gathers this unit
        self.gathers = gathers
        self._number = number

    def request(self) -> None:
        """Starts its gather, unless it is present or being gathered."""
        if self.is_present or self.is_requested:
            return
        pointers = [array.take() for array in self._arrays]
        self.is_requested = True
        self.gathers.gather(self._number, pointers, [array.memory() for array in self._arrays])

    def request_ahead(self) -> None:
        """The same by a guess, unless the ranks' record says that it is wrong: a wrong one would have this
        rank ask for what it has skipped then.
        """
        if not self.is_present and not self.is_requested and self.gathers.comes_next(self._number):
            self.request()

    def expire(self) -> None:
        """Called when its slices will be written to: the next use gathers it again, unless it is
        pinned. Until then its values stay, as a graph may have saved them, and writes to it count.
        """
        self.drop_request()
        self.read_written()
        if self.is_present and not self.is_pinned and not self._is_stale:
            self._is_stale = True
            for array in self._arrays:
                array.show()

    def gather(self) -> None:
        """Makes it present, with the slices' values."""
        if self._is_stale:
            self.release()
        if self.is_present:
            return
        self.request()
        with profiler_range("hsdp:gather_wait"):
            self.gathers.wait(self._number)
        self.is_requested = False
        self.is_present = True
        for array in self._arrays:
            array.appear()

    def read_written(self) -> None:
        """Updates its slices from writes: those that torch has noticed or, if it is pinned, all."""
        if self.is_present:
            for array in self._arrays:
                if self.is_pinned or array.was_written():
                    array.read()

    def was_read(self) -> None:
        """Ignores all earlier writes."""
        for array in self._arrays:
            array.was_read()

    def has_memory_of(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether one of these is a view of its parameters."""
        return any(array.has(one) for one in tensors for array in self._arrays)

    def drop_request(self) -> None:
        """Drops a gather that was requested ahead."""
        if self.is_requested:
            self.gathers.wait(self._number)
            self.is_requested = False
            for array in self._arrays:
                array.free()

    def release(self) -> None:
        """Frees its memory, unless it is pinned. Writes to it that torch has noticed are kept."""
        self.drop_request()
        if self.is_present and not self.is_pinned:
            self.read_written()
            self._vanish()

    def _vanish(self, moves: bool = False) -> None:
        self.is_present = self._is_stale = False
        for array in self._arrays:
            array.vanish(moves)

    def pin(self) -> None:
        """Gathers it, to stay present and to be written to."""
        self.gather()
        if not self.is_pinned:
            self.read_written()
            self.is_pinned = True
            for array in self._arrays:
                array.show()

    def unpin(self) -> None:
        """Updates its slices from what was written to it, and releases it."""
        if self.is_pinned:
            self.read_written()
            self.is_pinned = False
            self._vanish(moves=True)

    def refresh(self) -> None:
        """Its slices have changed: gathers it again, in place. Collective."""
        self.is_pinned = False
        self._vanish()
        self.pin()

    def forget(self) -> None:
        """Called when it will never be gathered again."""
        for array in self._arrays:
            array.forget()
