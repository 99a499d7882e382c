"""Who waited for whom."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, repr=False)
class WaitTable:
    """Which rank comes late to the collectives of a mesh; `repr` says it in a line.

    Of the shard hops, replica hops, gathers and ends of microbatches that every rank of their group still
    has in its record of 1,000: the last rank to begin one is who the others waited for, from their own
    beginning on and for as long as it took them. Where that rank was late because it had waited itself,
    whom it waited for counts instead. On a GPU the hosts wait for each other at the ends of microbatches
    only.
    """

    #: (waiting rank, awaited rank) -> seconds; none shorter than the clocks' error
    seconds: dict[tuple[int, int], float]
    #: how many were compared
    operations: int
    #: of the time between two ranks, at most
    clock_error_s: float
    #: the rank that was waited for longest; None: nobody was
    straggler: int | None
    _text: str

    def __repr__(self) -> str:
        return self._text
