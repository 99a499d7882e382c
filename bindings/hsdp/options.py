"""The values of string options, for type checkers. The library itself rejects others."""

from __future__ import annotations

from typing import Literal, TypeAlias

# For init_mesh.
Engine: TypeAlias = Literal["auto", "host", "nccl", "mpi"]

# For a Reducer.
Layout: TypeAlias = Literal["flat", "dim0", "whole"]
Missing: TypeAlias = Literal["error", "zero"]
Backwards: TypeAlias = Literal["one", "many"]
AccumulateDtype: TypeAlias = Literal["f32", "param"]
AccumulateOn: TypeAlias = Literal["device", "host"]
Reduction: TypeAlias = Literal["exact", "native"]
DivideBy: TypeAlias = Literal["ranks", "ranks*microbatches"]
ShardOver: TypeAlias = Literal["shard", "mesh"]

# For its microbatches and windows.
Sync: TypeAlias = Literal["none", "shard", "all"]
PartialSync: TypeAlias = Literal["none", "shard"]
Accumulate: TypeAlias = Literal["buffer", "grad"]

# For a ShardedOptimizer.
Stage: TypeAlias = Literal[1, 2, 3]
Offload: TypeAlias = Literal["host"]
MasterDtype: TypeAlias = Literal["f32"]

# For a LocoHop.
Bits: TypeAlias = Literal[4, 8]

# For a Communicator, and for a Snapshot's gradients.
ReduceOp: TypeAlias = Literal["sum", "max", "min"]
ReadDtype: TypeAlias = Literal["f32", "f64"]
