"""Updated parameters, gathered under what comes next."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

from hsdp import _hsdp
from hsdp.errors import UsageError
from hsdp.named_errors import naming_itself
from hsdp.profiler_range import profiler_range
from hsdp.reducer import Reducer


class GatherStats(NamedTuple):
    """What a ParameterGather did."""

    #: all-gathers; none in a shard group of one
    gather_count: int
    #: of whole arrays, gathered
    bytes: int
    #: seconds for which `wait`, `wait_all` and `fence` have held up the host
    exposed_s: float


@naming_itself
class ParameterGather:
    """Completes parameters of which each rank of a shard group has updated its slice, beside
    whatever comes next: on a thread and in a group of its own.

        gather = hsdp.zero.ParameterGather(reducer, {"w": weights})
        for batch in batches:
            gather.wait("w")              # before the first use
            ...                           # a step
            gather.fence()                # before the update
            own = reducer.slice("w")
            weights.reshape(-1)[own.offset : own.offset + own.count] -= lr * reducer.shard("w")
            gather.start()                # returns at once

    - `arrays`: whole parameters by name, writable and contiguous, of any dtype; they are kept alive.
      The same names in the same order on every rank, which the ranks compare.
    - `masters`: fp32 arrays of this rank's slices, by name. Those are updated instead of the slice
      in the whole array, and rounded into it on the way; the array is f32, bf16 or f16. Or both are
      f64, or complex.
    - `unit_bytes`: small parameters travel together in messages of at most so many. Those that are
      in one bucket of the Reducer always do: smaller messages need a smaller `bucket_bytes`.

    Nobody reads or writes an array between `start` and `wait`, nor a slice or master before `fence`.
    `start` is called by every rank of the shard group; `wait` by whoever reads, from any thread, in
    any order. On a GPU `start` follows the current stream, and `wait` and `fence` let it wait.

    Raises UsageError for arrays that do not fit (the other ranks get a StepAbortedError, all may
    try again), MismatchError where ranks give other parameters. What goes wrong in a gather ends
    the mesh, and every wait raises it.
    """

    def __init__(
        self,
        reducer: Reducer,
        arrays: Mapping[str, Any],
        masters: Mapping[str, Any] | None = None,
        unit_bytes: int = 4 << 20,
    ) -> None:
        if not isinstance(reducer, Reducer):
            raise UsageError(
                "zero: parameter gather: expected a Reducer, got an object of type "
                f"{type(reducer).__name__}"
            )
        self._who = reducer._who
        for name in masters or ():
            if name not in arrays:
                raise UsageError(
                    f"zero: parameter gather: expected an array of '{name}', which has a master, "
                    "got none"
                )
        self._handle = _hsdp.ParameterGather(
            reducer._handle, dict(arrays), dict(masters or {}), operator.index(unit_bytes), False
        )
        names = list(arrays)
        self._units = [tuple(names[i] for i in unit) for unit in self._handle.units()]
        self._first = [unit[0] for unit in self._handle.units()]

    def units(self) -> list[tuple[str, ...]]:
        """Which parameters travel together, in the order in which they are gathered."""
        return list(self._units)

    def start(self) -> None:
        """This rank's slices, or masters, are new: gathers all parameters."""
        self._handle.start()

    def wait(self, name: str) -> None:
        """Waits until that parameter is whole. Nothing where no gather was started."""
        with profiler_range("hsdp:gather_wait"):
            self._handle.wait(self._handle.find(name))

    def wait_all(self) -> None:
        """Waits until all parameters are whole."""
        with profiler_range("hsdp:gather_wait"):
            for parameter in self._first:
                self._handle.wait(parameter)

    def is_ready(self, name: str) -> bool:
        """Whether that parameter is whole; never waits."""
        return self._handle.is_ready(self._handle.find(name))

    def fence(self) -> None:
        """Waits until no gather reads this rank's slices any more: before the next update."""
        self._handle.fence()

    def rebind(self, name: str, array: Any) -> None:
        """From the next `start` on that parameter is another array, of the same size, dtype and device.
        Local; after `fence`.
        """
        self._handle.rebind(self._handle.find(name), array)

    def abort(self, reason: str) -> None:
        """Ends the mesh on every rank with this text: for a rank that cannot update its slices, which
        the others wait for.
        """
        self._handle.abort(reason)

    def stats(self) -> GatherStats:
        """Counts of gathers, and how long they were waited for."""
        return GatherStats(**self._handle.stats())

    def last_times(self) -> dict[str, tuple[float, float]]:
        """When the last gather of each parameter began and ended, in seconds of time.monotonic(). On a
        GPU: when it was enqueued. Parameters without elements are not gathered.
        """
        return {
            name: times
            for unit, times in zip(self._units, self._handle.last_times(), strict=True)
            for name in unit
        }
