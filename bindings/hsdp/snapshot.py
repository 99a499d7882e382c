"""Gradients on disk: writing, reading and comparing snapshots."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import operator
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from hsdp import _hsdp
from hsdp.dtypes import DtypeLike, optional_dtype_text
from hsdp.errors import Error, MismatchError, SnapshotError, UsageError
from hsdp.framework import has_tensors, of_torch
from hsdp.mesh import Mesh, as_mesh
from hsdp.options import ReadDtype


@dataclasses.dataclass(frozen=True)
class SnapshotInfo:
    """What a snapshot says about the run that wrote it."""

    #: random, agreed by the ranks
    id: str
    #: the Reducer's name, or ""
    reducer: str
    #: as passed to `save_snapshot`
    step: int
    #: of the mesh
    replicate_size: int
    #: of the mesh
    shard_size: int
    #: in the sums
    microbatch_count: int
    #: what sums were divided by, besides the loss scale
    divide_factor: float
    #: the factor of the losses, by which sums were divided
    loss_scale: float
    #: wire dtype between replicas; "own": each parameter's wire dtype in the shard group
    replica_dtype: str
    replica_hop: str
    #: whether the replica hop quantized, so that comparisons report without judging
    quantizes: bool
    #: "exact" or "native"
    reduction: str
    #: "flat", "dim0", "whole", or "full" for plain named arrays
    layout: str
    #: that reduced it: "host", "nccl" or "mpi"
    engine: str
    #: written before the replica hop: a mean over the shard group only
    partial: bool


class Snapshot(Mapping[str, np.ndarray[Any, Any]]):
    """A snapshot opened for reading: a mapping from parameter names to whole gradients.

    `snapshot["w"]` reads that gradient from disk immediately: an fp32 NumPy array of the parameter's
    shape, assembled from the shards of the first replica (partials: divided). Made by `read_snapshot`.
    """

    def __init__(self, handle: _hsdp.Snapshot) -> None:
        self._handle = handle
        rows = handle.parameters()
        self._index = {row[0]: i for i, row in enumerate(rows)}
        self._shapes = {row[0]: row[1] for row in rows}
        self._dtypes = {row[0]: row[2] for row in rows}
        #: facts about the run
        self.info = SnapshotInfo(**handle.info())

    @property
    def path(self) -> str:
        """The folder or file."""
        return self._handle.path

    @property
    def copy_count(self) -> int:
        """The number of replicas of every gradient."""
        return self._handle.copy_count

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a parameter."""
        return self._shapes[name]

    def dtype(self, name: str) -> str:
        """The dtype of a parameter's gradients, such as "bf16"."""
        return self._dtypes[name]

    def read(
        self, name: str, replica: int = 0, dtype: ReadDtype = "f32"
    ) -> np.ndarray[Any, Any]:
        """The gradient of `name` as replica `replica` holds it, in "f32" or "f64".

        Raises KeyError for an unknown name, SnapshotError for damaged data.
        """
        index, shape = self._index[name], self._shapes[name]
        memory = self._handle.read(index, int(replica), 0, math.prod(shape), dtype)
        array: np.ndarray[Any, Any] = memory.numpy().reshape(shape)
        return array

    def to_torch(self, name: str, replica: int = 0) -> Any:
        """Like `read`, but returns a torch tensor."""
        import torch

        return torch.from_numpy(self.read(name, replica))

    def hop_state(self, rank: int | None = None) -> dict[str, np.ndarray[Any, Any]]:
        """The replica hop's state saved with the gradients, of one rank or of all.

        A hop restores it with `hop.load_state_dict(snapshot.hop_state(mesh.rank))` on an equal mesh
        with equal buckets, otherwise with `hop.load_state_dict(snapshot.hop_state())`. Empty if the hop
        has none, and in partials.
        """
        files = range(self._handle.file_count) if rank is None else [int(rank)]
        return {
            key: self._handle.read_hop_state(file, i).numpy()
            for file in files
            for i, (key, _, _) in enumerate(self._handle.hop_state(file))
        }

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        return self.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)

    def __repr__(self) -> str:
        return f"hsdp.Snapshot({self.path!r}, step {self.info.step}, {len(self)} parameters)"


def read_snapshot(path: str | os.PathLike[str]) -> Snapshot:
    """Opens the snapshot in the folder or file `path`; each gradient is read when it is requested.

    Raises SnapshotError if files are missing, damaged or from different runs.
    """
    return Snapshot(_hsdp.Snapshot.open(os.fspath(path)))


_ACT = "write a snapshot"  #: what other ranks' errors say

#: name, shape, dtype, offset in the flattened parameter, array; None: the array's
Entry = tuple[str, tuple[int, ...] | None, str | None, int, Any]


def write_snapshot(
    path: str | os.PathLike[str],
    named_gradients: Mapping[str, Any],
    mesh: Any = None,
    step: int = 0,
    reduce_dtype: DtypeLike | None = None,
) -> None:
    """Writes gradients by name, so that runs without a Reducer (FSDP2, DDP) can be compared, too.

        hsdp.write_snapshot(path, {n: p.grad for n, p in model.named_parameters()}, mesh)

    Arrays are f32, f64, bf16 or f16: NumPy arrays and the like, contiguous and in host memory, or torch
    tensors on any device, including DTensors. Without a `mesh` one file is written: `path` itself if it
    ends in ".h5", otherwise a file in this folder. With a mesh every rank writes its own file into the
    folder (collective). Whole gradients must be the same on every rank. Of DTensors with `Shard(0)`
    each rank writes its own rows, which needs the mesh; rows may be uneven, and the device mesh may
    have one or two dimensions (replicas first). If there are any, the rows of all other arrays are cut
    alike.

    `reduce_dtype` is the wire dtype, if it differs from the arrays'. The coarsest one determines how
    close `hsdp_check` and `compare_snapshots` expect two runs to be.

    Blocks until the file is durable; with a mesh, all files. Raises UsageError for what cannot be
    stored, SnapshotError if this or another rank cannot write, and MismatchError if the ranks' names
    differ.
    """
    remedy = "the mesh comes third: hsdp.write_snapshot(path, named_gradients, mesh)"
    own_mesh = None if mesh is None else as_mesh(mesh, "write_snapshot: mesh", remedy)
    try:
        entries, layout = _entries(named_gradients, own_mesh)
        info: dict[str, Any] = {"step": _step_number(step), "layout": layout}
        if reduce_dtype is not None:
            info["reduce_dtype"] = optional_dtype_text(reduce_dtype)
        place = _place(path, own_mesh)
    except Exception:
        if own_mesh is not None:
            with contextlib.suppress(Error):  # the others wait for it
                own_mesh.world._handle.exchange(json.dumps(None), _ACT)
        raise
    info["id"] = _hsdp.new_snapshot_id()
    if own_mesh is None:
        _hsdp.write_snapshot(place, info, entries)
        return
    info["id"] = _agreed_id(own_mesh, info, [entry[:3] for entry in entries])
    info["rank"] = own_mesh.rank
    info["replicate_size"] = own_mesh.replicate_size
    info["shard_size"] = own_mesh.shard_size
    written = False
    try:
        _hsdp.write_snapshot(place, info, entries)
        written = True
    finally:
        words = own_mesh.world._handle.exchange("written" if written else "", _ACT)
    _require_all(own_mesh, [word == "written" for word in words], "a file")


def _step_number(step: Any) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        number = 2**63
    if not -(2**63) <= number < 2**63:
        raise UsageError(f"snapshot: step: expected a whole number below 2^63, got {step!r}")
    return number


def _place(path: str | os.PathLike[str], mesh: Mesh | None) -> str:
    place = os.fspath(path)
    if mesh is not None and mesh.size > 1 and place.endswith(".h5"):
        raise UsageError(
            "snapshot: expected a folder for the files of several ranks, got a path that ends in "
            f".h5: {place}"
        )
    return place


def _entries(named_gradients: Mapping[str, Any], mesh: Mesh | None) -> tuple[list[Entry], str]:
    if not isinstance(named_gradients, Mapping):
        raise UsageError(
            "snapshot: expected gradients by name, {name: array}, got an object of type "
            f"{type(named_gradients).__name__}; pass dict() of pairs"
        )
    for name, x in named_gradients.items():
        if x is None:
            raise UsageError(
                f"snapshot: array of '{name}': expected a gradient, got None; leave out parameters "
                "without one"
            )
    if not has_tensors(list(named_gradients.values())):
        return [(name, None, None, 0, x) for name, x in named_gradients.items()], "full"
    found: tuple[list[Entry], str] = of_torch("snapshot_entries")(named_gradients, mesh)
    return found


def _require_all(mesh: Mesh, good: list[bool], what: str) -> None:
    for rank, is_good in enumerate(good):
        if not is_good:
            raise SnapshotError(
                f"snapshot: expected {what} from every rank, got an error on rank {rank} "
                f"(of {mesh.size}); see the message there",
                [mesh.world.ranks[rank]],
            )


# A random id for all files of a snapshot. A rank that rejected its gradients sends nothing.
def _agreed_id(mesh: Mesh, info: dict[str, Any], parameters: list[Any]) -> str:
    own = {"id": info["id"], "step": info["step"], "layout": info["layout"],
           "parameters": parameters}
    words = [json.loads(w) for w in mesh.world._handle.exchange(json.dumps(own), _ACT)]
    _require_all(mesh, [word is not None for word in words], "gradients")
    first = words[0]
    for rank, word in enumerate(words):
        for part in ("step", "layout", "parameters"):
            if word[part] != first[part]:
                raise MismatchError(
                    f"snapshot: expected the same {part} on all ranks, got "
                    f"{_first_difference(first[part], word[part])} on ranks 0 and {rank} "
                    f"(of {mesh.size}); write the same gradients everywhere",
                    [mesh.world.ranks[rank]],
                )
    return str(first["id"])


def _first_difference(a: Any, b: Any) -> str:
    if not isinstance(a, list):
        return f"{a!r} and {b!r}"
    pairs = zip([*a, None], [*b, None], strict=False)
    mine, theirs = next(pair for pair in pairs if pair[0] != pair[1])
    return " and ".join(repr(x[0]) if x else "no more" for x in (mine, theirs))
