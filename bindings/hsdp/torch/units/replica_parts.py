"""Stored slices, completed from the parts that the replicas have updated."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from hsdp import _hsdp
from hsdp.reducer import Reducer
from hsdp.torch.slices.parameter_slices import ShardSlice
from hsdp.zero.parameter_gather import GatherStats


class ReplicaParts:
    """Gathers a shard rank's slices over the replicas, beside what comes next. A slice waits for its
    parts when it is needed. Construction is collective, as `start` is; all else is local.
    """

    def __init__(self, reducer: Reducer, slices: Sequence[ShardSlice], unit_bytes: int) -> None:
        stored = {one.name: one.stored for one in slices}
        self._handle = _hsdp.ParameterGather(reducer._handle, stored, {}, unit_bytes, True)
        self._numbers = {id(one): number for number, one in enumerate(slices)}
        for one in slices:
            one.arrive = functools.partial(self._handle.wait, self._numbers[id(one)])

    def complete(self, gathers: _hsdp.UnitGather, units: Iterable[Iterable[object]]) -> None:
        """Has rounds come after the parts of the units' slices."""
        numbers = [[self._numbers[id(one)] for one in its if id(one) in self._numbers] for its in units]
        gathers.read_after(self._handle, numbers)

    def start(self) -> None:
        """This replica's parts are new."""
        self._handle.start()

    def fence(self) -> None:
        """Waits until no other replica reads this one's parts."""
        self._handle.fence()

    def abort(self, reason: str) -> None:
        """Ends the mesh with this text."""
        self._handle.abort(reason)

    def stats(self) -> GatherStats:
        """Of the gathers so far."""
        return GatherStats(**self._handle.stats())
