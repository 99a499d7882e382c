"""Reduces gradients over a two-dimensional mesh of processes, replicate x shard.

You keep your own training loop; hsdp does the gradient traffic of hybrid-sharded data parallelism.
Start with `init_mesh` and `Reducer`.
"""

from __future__ import annotations

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

import numpy as _numpy  # first, as the extension cannot work without it

from hsdp import quant, zero
from hsdp._hsdp import ReplicaHop, __version__
from hsdp.array import Array
from hsdp.communicator import Communicator
from hsdp.comparison import Comparison, ErrorHistogram, ParameterDifference, compare_snapshots
from hsdp.errors import (
    Error, MismatchError, PeerLostError, SnapshotError, StepAbortedError, TimeoutError, UsageError,
)
from hsdp.log_sink import use_logging as _use_logging
from hsdp.memory_plan import MemoryPlan
from hsdp.mesh import Mesh, init_mesh, job_size
from hsdp.parameter import Balance, Parameter, Slice
from hsdp.reducer import Microbatch, Reducer, Step, Trace, clip_grad_norm_
from hsdp.reducer_stats import ReducerStats
from hsdp.replica_hop import PlainHop
from hsdp.same_weights import broadcast_parameters
from hsdp.snapshot import Snapshot, SnapshotInfo, read_snapshot, write_snapshot
from hsdp.torch_memory import use_torch_memory as _use_torch_memory
from hsdp.uneven import uneven
from hsdp.wait_table import WaitTable

_use_torch_memory()
_use_logging()

__all__ = [
    "Array",
    "Balance",
    "Communicator",
    "Comparison",
    "Error",
    "ErrorHistogram",
    "MemoryPlan",
    "Mesh",
    "Microbatch",
    "MismatchError",
    "Parameter",
    "ParameterDifference",
    "PeerLostError",
    "PlainHop",
    "Reducer",
    "ReducerStats",
    "ReplicaHop",
    "Slice",
    "Snapshot",
    "SnapshotError",
    "SnapshotInfo",
    "Step",
    "StepAbortedError",
    "TimeoutError",
    "Trace",
    "UsageError",
    "WaitTable",
    "__version__",
    "broadcast_parameters",
    "clip_grad_norm_",
    "compare_snapshots",
    "init_mesh",
    "job_size",
    "quant",
    "read_snapshot",
    "uneven",
    "write_snapshot",
    "zero",
]
del _numpy

if _TYPE_CHECKING:
    from hsdp import torch as torch
else:

    def __getattr__(name: str) -> _Any:
        # `hsdp.torch` is imported when it is first used.
        if name == "torch":
            return _importlib.import_module("hsdp.torch")
        raise AttributeError(f"module 'hsdp' has no attribute '{name}'")
