"""The collectives of one group of ranks."""

from __future__ import annotations

from numbers import Real
from typing import Any, TypeVar, overload

import numpy as np

from hsdp import _hsdp
from hsdp.array import Array
from hsdp.dtypes import DtypeLike, dtype_text
from hsdp.errors import Error, UsageError
from hsdp.exchanged_values import reduce_array, reduce_number
from hsdp.options import ReduceOp

ArrayT = TypeVar("ArrayT")


class Communicator:
    """A group of ranks of a mesh: `mesh.world`, `mesh.shard_group` or `mesh.replicate_group`.

    Every rank of the group calls every collective, in the same order. Sums are fp32 for f32, bf16 and
    f16, in ascending rank: the same inputs give the same bits. Arrays are NumPy arrays, anything with
    `__dlpack__` (torch, JAX, CuPy) or `hsdp.Array`. They are read and written in place, so they must be
    contiguous, and outputs writable.

    All collectives release the GIL while they wait for the other ranks. Every wait ends: PeerLostError,
    TimeoutError or MismatchError on every rank name the rank at fault, and every later call on this
    mesh repeats the error. Ctrl-C in a wait raises KeyboardInterrupt here and ends the mesh: the other
    ranks get an `hsdp.Error` that names this rank.
    """

    __slots__ = ("_handle",)

    def __init__(self, handle: _hsdp.Communicator) -> None:
        self._handle = handle

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self._handle.rank

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        return self._handle.size

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members, as ranks of the job, in the order of the group."""
        return tuple(self._handle.ranks)

    @property
    def transport(self) -> str:
        """How data travels: "shared memory", "tcp", "mixed", "nccl", "mpi" or "none"."""
        return self._handle.transport

    @overload
    def all_reduce(self, x: int, op: ReduceOp = "sum") -> int: ...
    @overload
    def all_reduce(self, x: float, op: ReduceOp = "sum") -> float: ...
    @overload
    def all_reduce(self, x: ArrayT, op: ReduceOp = "sum") -> ArrayT: ...
    def all_reduce(self, x: Any, op: ReduceOp = "sum") -> Any:
        """Sums `x` over the ranks, or takes the maximum or minimum. An array is reduced in place; for a
        Python number the result is a new one (ints exactly, floats in fp64, in ascending rank).

        Sums take arrays of f32, bf16, f16, f64 or i64. "max" and "min" take any real dtype and, on a
        GPU, torch tensors; a NaN on any rank makes the result NaN, as in torch. Like numbers, they go
        through the host over the control connection: use them for metrics, not for gradients. If ops,
        dtypes or shapes differ there, the ranks get a MismatchError and may continue. If one rank sums
        an array while others do not, all wait for `timeout_s`, and the mesh is over.
        """
        if op not in ("sum", "max", "min"):
            raise UsageError(
                f"all_reduce: op: expected one of 'sum', 'max', 'min', got {op!r}; the mean is "
                "mean(x)"
            )
        if isinstance(x, (int, float)) and not isinstance(x, bool):
            kind = int if isinstance(x, int) else float
            return reduce_number(self._handle, kind(x), op)
        if isinstance(x, bool):
            raise UsageError("all_reduce: expected a number or an array, got bool; pass int(x)")
        if isinstance(x, np.generic):  # it would become a copy, and its result would be lost
            raise UsageError(
                "all_reduce: expected a Python number or a writable array, got a NumPy scalar, "
                f"{type(x).__name__}; pass x.item(), or np.array(x) as a copy to write to"
            )
        if op == "sum":
            self._handle.all_reduce(x)
        else:
            reduce_array(self._handle, x, op)
        return x

    @overload
    def mean(self, x: float) -> float: ...
    @overload
    def mean(self, x: ArrayT) -> ArrayT: ...
    def mean(self, x: Any) -> Any:
        """The mean over the ranks: for a number a new float (fp64); for an array in place.

        Arrays are f32, bf16 or f16; the sum is divided once, in fp32. Numbers go over the control
        connection, so they do not interfere with the collectives of a microbatch on a GPU.
        """
        if isinstance(x, Real):  # includes NumPy's scalars
            return reduce_number(self._handle, float(x), "sum") / self.size
        self._handle.mean(x)
        return x

    @overload
    def reduce_scatter(self, x: Any, out: None = None) -> Array: ...
    @overload
    def reduce_scatter(self, x: Any, out: ArrayT) -> ArrayT: ...
    def reduce_scatter(self, x: Any, out: Any = None) -> Any:
        """Returns this rank's row of the sum of `x` over the ranks.

        n elements are cut into rows of c = ceil(n / size), the last ones shorter or empty. Without
        `out` the row is a new `hsdp.Array` with the dtype of `x`. `out` may also be f32 if `x` is bf16
        or f16, and then holds the unrounded sum.
        """
        result = self._handle.reduce_scatter(x, out)
        return Array(result) if out is None else result

    @overload
    def all_gather(self, x: Any, out: None = None) -> Array: ...
    @overload
    def all_gather(self, x: Any, out: ArrayT) -> ArrayT: ...
    def all_gather(self, x: Any, out: Any = None) -> Any:
        """Joins the rows `x` of all ranks in rank order and returns the joined array. Any dtype.

        Without `out` (on every rank, or on none) rows may have any length; the ranks exchange the
        lengths first. With `out`, which holds n elements, rows are those of `reduce_scatter`.
        """
        result = self._handle.all_gather(x, out)
        return Array(result) if out is None else result

    def broadcast(self, x: ArrayT, root: int = 0) -> ArrayT:
        """Copies `x` of rank `root` (of this group) to `x` of all others; returns it."""
        self._handle.broadcast(x, root)
        return x

    def barrier(self) -> None:
        """Returns once every rank of the group has called it."""
        self._handle.barrier()

    def allocate(self, count: int, dtype: DtypeLike = "f32") -> Array:
        """Allocates `count` zeros that the group's peers on this host read and write directly.

        Collectives on this memory need no copy into shared memory. Collective; each rank may ask for
        its own count. It lives as long as the array, or anything made from it.
        """
        return Array(self._handle.allocate(count, dtype_text(dtype)))

    def __repr__(self) -> str:
        try:
            ranks = _text_of(self.ranks)
            return f"hsdp.Communicator(rank {self.rank} of {self.size}, {ranks}, {self.transport})"
        except Error:  # in a forked child, too
            return "hsdp.Communicator(closed)"


def _text_of(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown}{', ...' if len(ranks) > 8 else ''} of the job"
