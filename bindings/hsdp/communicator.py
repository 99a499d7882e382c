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

    Every collective is called by every rank of the group, in the same order. Sums are fp32 for f32,
    bf16 and f16, in ascending rank: the same inputs give the same bits. Arrays are NumPy arrays,
    anything with `__dlpack__` (torch, JAX, CuPy) or `hsdp.Array`; they are read and written in
    place, contiguous, and what is written must be writable.

    All of them wait for the other ranks with the GIL released. Every wait ends: PeerLostError,
    TimeoutError or MismatchError on every rank name the rank at fault, after which every call on
    this mesh repeats the error. Ctrl-C in a wait raises KeyboardInterrupt here and ends the mesh:
    the other ranks get an `hsdp.Error` that names this rank.
    """

    __slots__ = ("_handle",)

    def __init__(self, handle: _hsdp.Communicator) -> None:
        self._handle = handle

    @property
    def rank(self) -> int:
        """This process' rank in the group."""
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
        """Which way the bytes go: "shared memory", "tcp", "mixed", "nccl", "mpi" or "none"."""
        return self._handle.transport

    @overload
    def all_reduce(self, x: int, op: ReduceOp = "sum") -> int: ...
    @overload
    def all_reduce(self, x: float, op: ReduceOp = "sum") -> float: ...
    @overload
    def all_reduce(self, x: ArrayT, op: ReduceOp = "sum") -> ArrayT: ...
    def all_reduce(self, x: Any, op: ReduceOp = "sum") -> Any:
        """Sums `x` over the ranks, or takes the maximum or minimum: of an array in place; of a
        Python number as a new one (ints exactly, floats in fp64, in ascending rank).

        Sums of arrays are of f32, bf16, f16, f64 or i64. "max" and "min" take any real dtype and,
        of a GPU, torch tensors; where a rank has a NaN the result is one, as in torch. They, and
        numbers, go over the control connection through the host: for metrics, not for gradients.
        Ranks whose ops, dtypes or shapes differ get a MismatchError there, and may go on; where one
        sums an array while others do not, all wait for `timeout_s` and the mesh is over.
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
        if isinstance(x, np.generic):  # it would become a copy, to be reduced in vain
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
        """The mean over the ranks: of a number as a new float (fp64); of an array in place.

        Arrays are f32, bf16 or f16; the sum is divided once, in fp32. Numbers go over the control
        connection: beside a microbatch on a GPU they meet none of its collectives.
        """
        if isinstance(x, Real):  # NumPy's scalars too
            return reduce_number(self._handle, float(x), "sum") / self.size
        self._handle.mean(x)
        return x

    @overload
    def reduce_scatter(self, x: Any, out: None = None) -> Array: ...
    @overload
    def reduce_scatter(self, x: Any, out: ArrayT) -> ArrayT: ...
    def reduce_scatter(self, x: Any, out: Any = None) -> Any:
        """This rank's row of the sum of `x` over the ranks.

        n elements are cut into rows of c = ceil(n / size), the last ones shorter or empty. Without
        `out` the row is a new `hsdp.Array` of the dtype of `x`; `out` may also be f32 where `x` is
        bf16 or f16, and then holds the sum unrounded. Returns the row.
        """
        result = self._handle.reduce_scatter(x, out)
        return Array(result) if out is None else result

    @overload
    def all_gather(self, x: Any, out: None = None) -> Array: ...
    @overload
    def all_gather(self, x: Any, out: ArrayT) -> ArrayT: ...
    def all_gather(self, x: Any, out: Any = None) -> Any:
        """The rows `x` of all ranks, joined in rank order. Any dtype.

        Without `out` (on every rank, or on none) rows may have any lengths, which the ranks tell
        each other first. With `out`, which holds n elements, rows are those of `reduce_scatter`.
        Returns the joined array.
        """
        result = self._handle.all_gather(x, out)
        return Array(result) if out is None else result

    def broadcast(self, x: ArrayT, root: int = 0) -> ArrayT:
        """Copies `x` of rank `root` (of this group) into `x` of all others; returns it."""
        self._handle.broadcast(x, root)
        return x

    def barrier(self) -> None:
        """Returns when every rank of the group has called it."""
        self._handle.barrier()

    def allocate(self, count: int, dtype: DtypeLike = "f32") -> Array:
        """Memory of `count` zeros that the group's peers on this host read and write directly.

        Collectives on it cost no copy into shared memory. Collective; each rank may ask for its own
        count. It lives as long as the array, or anything made from it.
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
