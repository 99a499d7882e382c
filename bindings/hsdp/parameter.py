"""What a Reducer knows about a parameter."""

from __future__ import annotations

from typing import NamedTuple


class Parameter(NamedTuple):
    """A registered parameter."""

    name: str
    shape: tuple[int, ...]
    #: of its gradients
    dtype: str
    #: wire of its shard hop; None: that of the Reducer
    reduce_dtype: str | None
    group: str


class Slice(NamedTuple):
    """Where this rank's slice lies in the flattened parameter, in elements."""

    offset: int
    count: int  # type: ignore[assignment]
