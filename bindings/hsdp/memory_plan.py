"""What a Reducer is going to hold and send."""

from __future__ import annotations

import dataclasses

from hsdp.reducer_stats import rows_text


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes of this rank under the names that `stats()` has for them, before any of it is allocated."""

    carry_bytes: int
    total_bytes: int
    staging_bytes: int
    accumulator_bytes: int
    replica_hop_state_bytes: int
    #: of the ShardedOptimizers that exist, with the states that their first step will make
    optimizer_bytes: int
    #: on a GPU before `prepare()`: without the work memory of NCCL collectives
    scratch_bytes: int
    #: the sum of the above: `stats().resident_bytes` between steps
    resident_bytes: int
    #: on top of these while a gather runs: the largest message of each gather that exists
    parameter_gather_bytes: int
    #: of each microbatch that is reduced
    shard_hop_bytes: int
    #: of each step; of LoCo after its warm-up
    replica_hop_bytes: int

    def __str__(self) -> str:
        return rows_text(dataclasses.asdict(self))
