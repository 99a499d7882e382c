"""Who waited for whom."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, repr=False)
class WaitTable:
    """Which rank comes late to the collectives of a Reducer; `repr` says it in a line.

    Compares the Reducer's shard hops, replica hops, gathers, norms and ends of microbatches that every rank
    of their group still has among its last 1,000 operations, of any Reducer and kind. The ranks that begin
    one earlier wait for the last. If the last rank had waited in another operation before, that time counts
    for the rank it had waited for, or is unexplained if that operation was not compared: it is of another
    Reducer, or a gather with `shard_over="mesh"`. Time in calls of a Communicator, snapshots or other
    libraries counts as the rank's own. On a GPU hosts wait for each other at ends of microbatches only.
    """

    #: (waiting rank, awaited rank) -> seconds; none shorter than the clocks' error
    seconds: dict[tuple[int, int], float]
    #: how many were compared
    operations: int
    #: how many steps they are of
    steps: int
    #: seconds from the begin of the oldest one to that of the newest
    span_s: float
    #: of the time between two ranks, at most, for the oldest operation: clocks may drift by 100 ppm
    clock_error_s: float
    #: seconds of waits, of all ranks, whose cause is not known
    unexplained_s: float
    #: the rank that was waited for longest; None if no rank was
    straggler: int | None
    _text: str

    def __repr__(self) -> str:
        return self._text
