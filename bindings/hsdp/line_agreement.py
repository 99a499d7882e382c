"""Where the ranks' descriptions of something differ."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from hsdp.communicator import Communicator

NOTHING = "nothing"


class LineDifference(NamedTuple):
    """The first line that is not the same everywhere."""

    #: each rank's, in rank order; "nothing" where it has no such line
    lines: list[str]
    #: those whose line is not rank 0's, by their places in the group
    places: list[int]


def first_difference(
    world: Communicator, lines: Sequence[str], act: str
) -> LineDifference | None:
    """The same answer on every rank; None when all lines are equal. Collective: one short message a
    rank, and a few more to find a difference, so that they stay short for any number of lines. `act`:
    what this rank is about to do, for ranks that do something else.
    """
    if world.size == 1:
        return None
    words = world._handle.exchange(f"{len(lines)} {digest_of(lines)}", act)
    if _are_equal(words):
        return None
    same, differ = 0, max(int(word.split()[0]) for word in words)
    while differ - same > 1:  # the first so many lines are the same, or differ
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
    """Equal for equal lines."""
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()
