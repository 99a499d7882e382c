"""Finds where the ranks' descriptions of something differ."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from hsdp.communicator import Communicator

NOTHING = "nothing"


class LineDifference(NamedTuple):
    """The first line that is not the same on all ranks."""

    #: one per rank, in rank order; "nothing" if a rank has no such line
    lines: list[str]
    #: the ranks whose line differs from rank 0's, as places in the group
    places: list[int]


def first_difference(
    world: Communicator, lines: Sequence[str], act: str
) -> LineDifference | None:
    """Returns the same on every rank; None if all lines are equal. Collective. Sends one short message
    per rank, and a few more to find a difference; they stay short for any number of lines. `act`:
    what this rank is about to do, for ranks that do something else.
    """
    if world.size == 1:
        return None
    words = world._handle.exchange(f"{len(lines)} {digest_of(lines)}", act)
    if _are_equal(words):
        return None
    same, differ = 0, max(int(word.split()[0]) for word in words)
    while differ - same > 1:  # the first `same` lines agree, the first `differ` do not
        middle = (same + differ) // 2
        if _are_equal(world._handle.exchange(digest_of(lines[:middle]), act)):
            same = middle
        else:
            differ = middle
    found = world._handle.exchange(lines[same] if same < len(lines) else NOTHING, act)
    return LineDifference(found, [place for place, line in enumerate(found) if line != found[0]])


def _are_equal(words: Sequence[str]) -> bool:
    return all(word == words[0] for word in words)


def digest_of(lines: Sequence[str]) -> str:
    """A digest: equal for equal lines."""
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()
