"""What a Reducer has done and holds."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple


class ControlLink(NamedTuple):
    """Traffic on one link of the control connection since the world began, headers included."""

    #: world rank
    peer: int
    sent_count: int
    sent_bytes: int
    received_count: int
    received_bytes: int


@dataclasses.dataclass(frozen=True)
class ReducerStats:
    """Counts since the Reducer was made, and the memory it holds now. Bytes are this rank's."""

    #: buckets that hold at least one element
    bucket_count: int
    microbatch_count: int
    #: finished steps
    step_count: int
    #: includes dropped steps
    begun_step_count: int
    reduce_scatter_count: int
    #: replica hops
    all_reduce_count: int
    all_gather_count: int
    #: what this process sent over its world's control connection, without beats; on a rank that relays,
    #: including what it passed on
    control_message_count: int
    control_bytes: int
    #: of this rank's buckets, in the wire dtype
    shard_hop_bytes: int
    #: of this rank's messages in both halves of the hop (an all-reduce's count twice), in the wire
    #: dtype
    replica_hop_bytes: int
    #: on a GPU: bytes of gradients, local sums and rows that were read 2 or 4 at a time, because their
    #: alignment to 16 differs from the output's; slower than the rest
    misaligned_bytes: int
    #: seconds that threads of this rank spent on packing; on a GPU the host's, which only issues the work
    pack_s: float
    #: waits for peers included, as in those that follow
    shard_hop_s: float
    replica_hop_s: float
    gather_s: float
    #: updates of sharded optimizers
    update_s: float
    #: of the threads that call hsdp, for hsdp: ends of microbatches, results, gathers
    waiting_s: float
    #: fp32 (f64) carry, which is also the result
    carry_bytes: int
    #: replica-summed totals of groups that are reduced before the step ends
    total_bytes: int
    #: two buckets
    staging_bytes: int
    #: full-size local sums of sync="none"
    accumulator_bytes: int
    replica_hop_state_bytes: int
    #: gradients kept by reference until there is room to pack them
    retained_bytes: int
    peak_retained_bytes: int
    #: copies of snapshots not yet written, and one kept for reuse
    snapshot_bytes: int
    #: moments and master weights of slices
    optimizer_bytes: int
    #: messages of small arrays being gathered
    parameter_gather_bytes: int
    #: on a GPU: work memory of kernels and collectives
    scratch_bytes: int
    #: the sum of the above, without the retained references
    resident_bytes: int
    peak_resident_bytes: int
    engine: str
    reduction: str
    replica_hop: str
    shard_transport: str
    replica_transport: str
    #: the same per link, and what was received
    control_links: tuple[ControlLink, ...]

    def __str__(self) -> str:
        rows = dataclasses.asdict(self)
        del rows["control_links"]
        return rows_text(rows)


def rows_text(rows: dict[str, int | str]) -> str:
    """A line for each, with large bytes in MiB, too."""
    width = max(map(len, rows))
    return "\n".join(f"{key:<{width}}  {_text(key, value)}" for key, value in rows.items())


def _text(key: str, value: float | str) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    if not key.endswith("_bytes") or isinstance(value, str):
        return str(value)
    return f"{value} ({value / 2**20:.1f} MiB)" if value >= 2**20 else str(value)
