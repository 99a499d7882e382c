"""The mesh: a world of ranks divided into replicate x shard."""

from __future__ import annotations

import contextlib
import importlib.util
import operator
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hsdp import _hsdp
from hsdp.closing import Closing
from hsdp.communicator import Communicator
from hsdp.current_stream import CurrentStream
from hsdp.errors import Error, UsageError
from hsdp.framework import current_device, is_distributed, of_torch
from hsdp.keyword_hints import MESH, hinting
from hsdp.log_sink import follow_logger
from hsdp.options import Engine


# Names that torch.distributed users look for on a mesh, and their counterparts.
_ELSEWHERE = {
    "get_rank": "rank",
    "get_world_size": "size",
    "world_size": "size",
    "all_gather": "world.all_gather()",
    "all_reduce": "world.all_reduce()",
    "barrier": "world.barrier()",
    "broadcast": "world.broadcast()",
    "reduce_scatter": "world.reduce_scatter()",
}


class Mesh(Closing):
    """A world of ranks divided into replicate x shard: rank = replica * shard_size + shard_rank.

    Made by `init_mesh`. Ranks of a shard group are neighbours (one node); ranks of a replicate group
    are `shard_size` apart. It is also a context manager, which closes it.
    """

    __slots__ = ("_handle", "_job_size", "_replicate_group", "_shard_group", "_stream", "_world", "__weakref__")

    def __init__(self, handle: _hsdp.Mesh) -> None:
        self._handle = handle
        self._job_size = _hsdp.job_size()  # according to the launcher
        self._world = Communicator(handle.world())
        self._shard_group = Communicator(handle.shard_group())
        self._replicate_group = Communicator(handle.replicate_group())
        self._stream = None if handle.device == "cpu" else CurrentStream(handle.device)
        if self._stream is not None:
            handle.follow(self._stream, False)

    @property
    def rank(self) -> int:
        """This process's rank in the mesh's world."""
        return self._handle.rank

    @property
    def size(self) -> int:
        """replicate_size * shard_size."""
        return self._handle.size

    @property
    def replica(self) -> int:
        """Which replica this rank belongs to: rank // shard_size."""
        return self._handle.replica

    @property
    def shard_rank(self) -> int:
        """This rank's place in its shard group: rank % shard_size."""
        return self._handle.shard_rank

    @property
    def replicate_size(self) -> int:
        """The number of replicas."""
        return self._handle.replicate_size

    @property
    def shard_size(self) -> int:
        """The number of ranks in a shard group."""
        return self._handle.shard_size

    @property
    def timeout_s(self) -> float:
        """The longest time, in seconds, that any wait lasts."""
        return self._handle.timeout_s

    @property
    def device(self) -> str:
        """Where gradients live: "cpu" or "cuda:0"."""
        return self._handle.device

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._handle.closed

    @property
    def world(self) -> Communicator:
        """All ranks of the mesh."""
        return self._world

    @property
    def shard_group(self) -> Communicator:
        """The ranks among which this replica's gradients are scattered."""
        return self._shard_group

    @property
    def replicate_group(self) -> Communicator:
        """The ranks that hold the same shard in other replicas."""
        return self._replicate_group

    def set_stream(self, stream: Any) -> None:
        """On a GPU, sets the stream on which the caller makes gradients and reads results, for
        everything that uses this mesh.

        hsdp reads a gradient after the work that was on the stream when it was handed over. Results are
        ready for the stream's next work. No call waits for the GPU in between. `stream` is a
        cudaStream_t as an int, a torch or CuPy stream, or a function that returns one and is called
        each time. None, the default: torch's current stream once torch has used the GPU, otherwise the
        legacy default stream. Raises UsageError on the host, which has no streams.
        """
        if self._stream is None:
            raise UsageError(
                "mesh: set_stream: expected a mesh on a CUDA device, got one on cpu; leave it out, "
                "as arrays there are ready when they are handed over"
            )
        self._stream.set(stream)
        self._handle.follow(self._stream, stream is not None)

    def flight_record(self, folder: str | os.PathLike[str]) -> None:
        """Writes what this rank's Reducers did last into `folder`, as rank_N.json.

        `hsdp_check --flight FOLDER` reads the files of all ranks and says which rank the others wait
        for. Asks no other rank, and may be called from any thread while others are in calls of hsdp. With
        HSDP_FLIGHT_DIR hsdp writes the same file by itself on an error and on SIGUSR1. Makes the folder
        if there is none; raises UsageError or Error if it cannot write there.
        """
        self._handle.flight_record(os.fspath(folder))

    def close(self) -> None:
        """Ends the mesh on this rank; safe to call twice. Later calls raise UsageError.

        Its Reducers stay usable until they are closed, except one with an attached model before its
        first step or with buffers that follow rank 0's. `hsdp.uneven`, and norms of 1 and inf, also
        need the mesh.
        """
        self._handle.close()

    if not TYPE_CHECKING:  # checkers know all its attributes

        def __getattr__(self, name: str) -> Any:
            text = f"'Mesh' object has no attribute '{name}'"
            if name in _ELSEWHERE:
                text += f"; it is mesh.{_ELSEWHERE[name]}"
            raise AttributeError(text, name=name, obj=self)

    def __repr__(self) -> str:
        try:
            return (
                f"hsdp.Mesh({self.replicate_size} x {self.shard_size}, rank {self.rank} of "
                f"{self.size}, {self.device}, {self._world.transport})"
            )
        except Error:  # includes a forked child
            return "hsdp.Mesh(closed)"


@hinting(MESH)
def init_mesh(
    replicate: int = 1,
    shard: int = 1,
    engine: Engine = "auto",
    device: Any = None,
    ranks: Sequence[Sequence[int]] | None = None,
    timeout_s: float = 300.0,
) -> Mesh:
    """Connects to the other processes of the job and divides them into replicate x shard.

    Rank and size come from the launcher: hsdp_run, torchrun, mpirun or srun. If its variables are
    missing or incomplete, they come from torch.distributed once init_process_group was called
    (torch.multiprocessing.spawn, Lightning); without either, a process is a world of one. Collective
    over the job. Across hosts the ranks meet at HSDP_ADDR:HSDP_PORT, or else through MPI or torch's
    store.

    - `replicate`, `shard`: their product is the number of processes, or of `ranks`.
    - `engine`: "host", "nccl", "mpi" or "auto" (nccl for a CUDA device, otherwise host).
    - `device`: where gradients live: "cpu" (None), "cuda:0", or a `torch.device`. "cuda" is torch's
      current device once torch is imported, otherwise the first one.
    - `ranks`: a 2-D array of job ranks, `ranks[replica][shard_rank]`, for several meshes in one job.
      Each process passes the array that holds its own rank.
    - `timeout_s`: seconds after which any wait for a peer raises TimeoutError, even if the peer is only
      busy, for example with an evaluation on rank 0. Meshes that are open at the same time share the
      first one's; see `mesh.timeout_s`.

    Raises UsageError if the sizes do not fit the job, or if the launcher and torch.distributed disagree
    on rank or size; MismatchError if ranks ask for different meshes; TimeoutError if a rank does not
    come. Ctrl-C while waiting abandons the attempt; the process should then end.
    """
    follow_logger()
    rows, columns = _whole("replicate", replicate), _whole("shard", shard)
    table = [] if ranks is None else [[_whole("ranks", rank) for rank in row] for row in ranks]
    where = "cpu" if device is None else str(device)
    if where == "cuda":
        where = current_device()
    launched = of_torch("launched") if is_distributed() else contextlib.nullcontext
    with launched(float(timeout_s)):
        lost = _hsdp.needs_store()
        if lost is not None and importlib.util.find_spec("torch") is not None:
            of_torch("meet_at_store")(*lost, float(timeout_s))
        return Mesh(_hsdp.init_mesh(rows, columns, str(engine), where, table, float(timeout_s)))


def job_size() -> int:
    """The number of ranks that the launcher started, or otherwise that torch.distributed has; 1 without
    either. Does not connect.

    Raises UsageError if a launcher's variables contradict torch.distributed, or, without that, if they
    are incomplete or contradict each other.
    """
    return int(of_torch("job_size")()) if is_distributed() else _hsdp.job_size()


def _whole(option: str, number: Any) -> int:
    try:
        whole = operator.index(number)
    except TypeError:
        whole = -1
    if not 0 <= whole < 2**31:
        raise UsageError(f"mesh: {option}: expected whole numbers below 2^31, got {number!r}")
    return whole


def as_mesh(mesh: Any, call: str, remedy: str) -> Mesh:
    """Returns a Mesh for a Mesh or torch's DeviceMesh. `call` and `remedy` appear in the UsageError for
    anything else.
    """
    if isinstance(mesh, Mesh):
        return mesh
    if hasattr(mesh, "mesh_dim_names"):
        adapted: Mesh = of_torch("mesh_from_torch")(mesh)
        return adapted
    raise UsageError(
        f"{call}: expected an hsdp.Mesh (hsdp.init_mesh) or a torch DeviceMesh, got an object of type "
        f"{type(mesh).__name__}; {remedy}"
    )
