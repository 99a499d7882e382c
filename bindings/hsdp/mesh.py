"""The mesh: a world of ranks cut into replicate x shard."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import operator
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hsdp import _hsdp
from hsdp.closing import Closing
from hsdp.communicator import Communicator
from hsdp.current_stream import CurrentStream
from hsdp.errors import Error, UsageError
from hsdp.keyword_hints import MESH, hinting
from hsdp.options import Engine


# What those who know torch.distributed look for on a mesh, and where it is.
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
    """A world of ranks cut into replicate x shard: rank = replica * shard_size + shard_rank.

    Made by `init_mesh`. Ranks of a shard group are neighbours (one node), ranks of a replicate
    group are `shard_size` apart. Also a context manager, which closes it.
    """

    __slots__ = ("_handle", "_job_size", "_replicate_group", "_shard_group", "_stream", "_world", "__weakref__")

    def __init__(self, handle: _hsdp.Mesh) -> None:
        self._handle = handle
        self._job_size = _hsdp.job_size()  # as the launcher says now
        self._world = Communicator(handle.world())
        self._shard_group = Communicator(handle.shard_group())
        self._replicate_group = Communicator(handle.replicate_group())
        self._stream = None if handle.device == "cpu" else CurrentStream(handle.device)
        if self._stream is not None:
            handle.follow(self._stream, False)

    @property
    def rank(self) -> int:
        """This process' rank in the mesh's world."""
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
        """How many seconds any wait lasts at most."""
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
        """On a GPU: where gradients are made and results are read from now on, by everything that
        uses this mesh.

        Gradients are read after what that stream has been given when they are handed over, and
        results are there for what it is given next; no call waits for the GPU in between. `stream`
        is a cudaStream_t as an int, a torch or CuPy stream, or a function that returns one and is
        called each time. None, as at the start: torch's current stream once torch has used the GPU,
        else the legacy default stream. UsageError on the host, which has no streams.
        """
        if self._stream is None:
            raise UsageError(
                "mesh: set_stream: expected a mesh on a CUDA device, got one on cpu; leave it out, "
                "as arrays there are ready when they are handed over"
            )
        self._stream.set(stream)
        self._handle.follow(self._stream, stream is not None)

    def close(self) -> None:
        """Ends the mesh on this rank; safe to call twice. Later calls are a UsageError.

        Reducers made on it stay usable until they are closed, but for an attached model before its
        first step, and one whose buffers follow rank 0's; `hsdp.uneven`, and norms of 1 and inf, need
        the mesh, too.
        """
        self._handle.close()

    if not TYPE_CHECKING:  # checkers know all that it has

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
        except Error:  # in a forked child, too
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
    """Connects to the other processes of the job and cuts them into replicate x shard.

    Rank and size come from the launcher: hsdp_run, torchrun, mpirun or srun; where its variables
    are missing or incomplete, from torch.distributed once init_process_group was called
    (torch.multiprocessing.spawn, Lightning); alone, a process is a world of one. Collective over
    the job. Across hosts the ranks meet at HSDP_ADDR:HSDP_PORT; without these MPI tells them where,
    or torch's store.

    - `replicate`, `shard`: their product is the number of processes, or of `ranks`.
    - `engine`: "host", "nccl", "mpi" or "auto" (nccl for a CUDA device, else host).
    - `device`: where gradients live, "cpu" (None) or "cuda:0"; a `torch.device` is taken too.
      "cuda" is torch's current device once torch is imported, else the first one.
    - `ranks`: a 2-D array of job ranks, `ranks[replica][shard_rank]`, for several meshes in one
      job. Each process passes the array that holds its own rank.
    - `timeout_s`: seconds after which any wait for a peer is a TimeoutError: also for one that is
      busy with its own work, as an evaluation on rank 0 only. Meshes that are open at the same
      time share the first one's; `mesh.timeout_s` tells.

    Raises UsageError for sizes that do not fit the job, and where the launcher and
    torch.distributed disagree on rank or size; MismatchError when ranks ask for different meshes,
    TimeoutError when a rank does not come. Ctrl-C while it waits leaves the attempt behind; the
    process should end then.
    """
    rows, columns = _whole("replicate", replicate), _whole("shard", shard)
    table = [] if ranks is None else [[_whole("ranks", rank) for rank in row] for row in ranks]
    where = "cpu" if device is None else str(device)
    if where == "cuda":
        where = _current_device()
    launch = _distributed_launch()
    with contextlib.nullcontext() if launch is None else launch.launched(float(timeout_s)):
        _meet_at_store(float(timeout_s))
        return Mesh(_hsdp.init_mesh(rows, columns, str(engine), where, table, float(timeout_s)))


def job_size() -> int:
    """How many ranks the launcher started, whichever it was, else torch.distributed has: 1 without
    either. Connects to nobody.

    Raises UsageError for variables of a launcher that contradict torch.distributed, and without
    that for variables that are incomplete or contradict each other.
    """
    launch = _distributed_launch()
    return _hsdp.job_size() if launch is None else int(launch.job_size())


# What init_process_group was told about the ranks; None before it was called.
def _distributed_launch() -> Any:
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return importlib.import_module("hsdp.torch.distributed_launch")


def _meet_at_store(timeout_s: float) -> None:
    lost = _hsdp.needs_store()
    if lost is not None and importlib.util.find_spec("torch") is not None:
        importlib.import_module("hsdp.torch.store_rendezvous").meet_at_store(*lost, timeout_s)


def _whole(option: str, number: Any) -> int:
    try:
        whole = operator.index(number)
    except TypeError:
        whole = -1
    if not 0 <= whole < 2**31:
        raise UsageError(f"mesh: {option}: expected whole numbers below 2^31, got {number!r}")
    return whole


def _current_device() -> str:
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    index = cuda.current_device() if cuda is not None and cuda.is_available() else 0
    return f"cuda:{index}"


def as_mesh(mesh: Any, call: str, remedy: str) -> Mesh:
    """A Mesh from whatever is accepted as one: a Mesh, or torch's DeviceMesh. `call` and `remedy`: of the
    UsageError for anything else.
    """
    if isinstance(mesh, Mesh):
        return mesh
    if hasattr(mesh, "mesh_dim_names"):
        adapted: Mesh = importlib.import_module("hsdp.torch").mesh_from_torch(mesh)
        return adapted
    raise UsageError(
        f"{call}: expected an hsdp.Mesh (hsdp.init_mesh) or a torch DeviceMesh, got an object of type "
        f"{type(mesh).__name__}; {remedy}"
    )
