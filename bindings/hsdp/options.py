"""The words that options take, for type checkers. The library itself refuses others."""

from __future__ import annotations

from typing import Literal, TypeAlias

# Of init_mesh.
Engine: TypeAlias = Literal["auto", "host", "nccl", "mpi"]

# Of a Reducer.
Layout: TypeAlias = Literal["flat", "dim0", "whole"]
Missing: TypeAlias = Literal["error", "zero"]
Backwards: TypeAlias = Literal["one", "many"]
AccumulateDtype: TypeAlias = Literal["f32", "param"]
AccumulateOn: TypeAlias = Literal["device", "host"]
Reduction: TypeAlias = Literal["exact", "native"]
DivideBy: TypeAlias = Literal["ranks", "ranks*microbatches"]

# Of its microbatches and windows.
Sync: TypeAlias = Literal["none", "shard", "all"]
PartialSync: TypeAlias = Literal["none", "shard"]
Accumulate: TypeAlias = Literal["buffer", "grad"]

# Of a ShardedOptimizer.
Stage: TypeAlias = Literal[1, 2, 3]
Offload: TypeAlias = Literal["host"]
MasterDtype: TypeAlias = Literal["f32"]

# Of a LocoHop.
Bits: TypeAlias = Literal[4, 8]

# Of a Communicator, and of a Snapshot's gradients.
ReduceOp: TypeAlias = Literal["sum", "max", "min"]
ReadDtype: TypeAlias = Literal["f32", "f64"]
