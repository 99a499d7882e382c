"""A rank's slice of a whole tensor, as torch.distributed.checkpoint saves and loads it.

[Note: slices in checkpoints]
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata, MetadataIndex, TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from hsdp.errors import UsageError
from hsdp.torch import private_torch

_aten = torch.ops.aten


# Functions that copy or move a tensor of any shape.
@functools.cache
def _copies() -> frozenset[Any]:
    return frozenset({
        _aten.alias.default, _aten.clone.default, _aten.detach.default, _aten.empty_like.default,
        _aten.lift_fresh.default, private_torch.to_copy,
    })


class FlatSlice(torch.Tensor):
    """Consecutive elements of a tensor in row-major order, from `offset`, with the whole's shape.

    Its values are only available as `to_local()`, a flat tensor. It can be copied, moved, pickled, and
    saved and loaded by torch.distributed.checkpoint, which sees at most 2 d - 1 boxes of d dimensions.
    Any other operation raises UsageError.
    """

    _local: torch.Tensor
    _offset: int

    def __new__(cls, local: torch.Tensor, shape: Sequence[int], offset: int) -> FlatSlice:
        made: FlatSlice = private_torch.make_wrapper_subclass(
            cls, tuple(shape), dtype=local.dtype, device=local.device
        )
        made._local = local
        made._offset = offset
        return made

    def to_local(self) -> torch.Tensor:
        """This rank's elements as a flat tensor; no copy."""
        return self._local

    @property
    def offset(self) -> int:
        """The place of the first element in the whole, in elements."""
        return self._offset

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        count = self._local.numel()
        return f"FlatSlice({self._local}, {count} elements from {self._offset} of {tuple(self.shape)})"

    # Not torch's way for wrappers, which torch.load(weights_only=True) would reject.
    def __reduce_ex__(self, protocol: Any) -> Any:
        local = self._local
        if local.untyped_storage().nbytes() > local.nbytes:  # otherwise all of it would be saved
            local = local.clone()
        return rebuild_flat_slice, (local, tuple(self.shape), self._offset)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first, *others = args
        if isinstance(first, FlatSlice):
            if func in _copies():
                return cls(func(first._local, **kwargs), first.shape, first._offset)
            if func is _aten.new_empty.default and torch.Size(others[0]) == first.shape:
                local = first._local.new_empty(first._local.shape, **kwargs)
                return cls(local, first.shape, first._offset)
            if func is _aten.copy_.default and first._is_beside(others[0]):
                first._local.copy_(others[0]._local, *others[1:])
                return first
        raise UsageError(
            f"zero: expected a whole tensor, got a slice of one in {func}: this rank's values are "
            "to_local(), all of them are in ShardedOptimizer.full_state_dict()"
        )

    def _is_beside(self, other: Any) -> bool:
        return (
            isinstance(other, FlatSlice)
            and (self.shape, self._offset) == (other.shape, other._offset)
            and self._local.shape == other._local.shape
        )

    # What torch.distributed.checkpoint calls on a tensor that is not whole.

    # Only loading calls this. It writes into a copy, from which load_state_dict takes complete ones.
    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        self._local = self._local.clone()
        return self._chunks()

    def _chunks(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            for offsets, sizes in self._boxes()
        ]

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        is_alone = not torch.distributed.is_initialized()
        if is_alone and self._local.numel() < math.prod(self.shape):
            raise UsageError(
                f"zero: save of '{name}': expected torch.distributed, through which ranks write one "
                "checkpoint, got no process group, in which each would overwrite the others' files; "
                "call torch.distributed.init_process_group() before"
            )
        properties = TensorProperties.create_from_tensor(self._local)
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in self._chunks()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        begin = 0
        for offsets, sizes in self._boxes():
            count = math.prod(sizes)
            if torch.Size(offsets) == index.offset:
                return self._local[begin : begin + count].view(sizes)
            begin += count
        raise UsageError(f"zero: expected a box of '{index.fqn}' that it has, got {index.offset}")

    def _boxes(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        shape = tuple(self.shape)
        if self.numel() == 0:  # every rank reports it, so that its name is not lost
            return [((0,) * len(shape), shape)]
        return boxes_of(shape, self._offset, self._offset + self._local.numel())


def rebuild_flat_slice(local: torch.Tensor, shape: tuple[int, ...], offset: int) -> FlatSlice:
    """Called by a pickle."""
    return FlatSlice(local, shape, offset)


torch.serialization.add_safe_globals([rebuild_flat_slice])


def boxes_of(
    shape: tuple[int, ...], begin: int, end: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The elements from `begin` to before `end` of a row-major array as boxes (offsets, sizes), in
    order; at most 2 d - 1 of them.
    """
    if begin >= end:
        return []
    if not shape:
        return [((), ())]
    row = math.prod(shape[1:])

    def within(i: int, first: int, last: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        return [((i, *o), (1, *s)) for o, s in boxes_of(shape[1:], first, last)]

    i, last = begin // row, end // row
    if i == last:
        return within(i, begin - i * row, end - i * row)
    boxes = []
    if begin > i * row:
        boxes += within(i, begin - i * row, row)
        i += 1
    if i < last:
        boxes.append(((i, *(0 for _ in shape[1:])), (last - i, *shape[1:])))
    return boxes + within(last, 0, end - last * row)
