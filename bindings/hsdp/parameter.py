"""What a Reducer knows about a parameter."""

from __future__ import annotations

from typing import NamedTuple

from hsdp import _hsdp
from hsdp.caller_warning import warn_caller


class Parameter(NamedTuple):
    """A registered parameter."""

    name: str
    shape: tuple[int, ...]
    #: the dtype of its gradients
    dtype: str
    #: wire dtype of its shard hop; None: the Reducer's
    reduce_dtype: str | None
    group: str
    #: whether this is the real view of complex numbers, whose last dimension is 2
    is_complex: bool = False


class Slice(NamedTuple):
    """Where this rank's slice lies in the flattened parameter, in elements."""

    offset: int
    count: int  # type: ignore[assignment]


class Balance(NamedTuple):
    """How evenly the ranks of a shard group share a layout: 1 is even."""

    #: the most that a rank owns, relative to the mean
    elements: float
    #: ranks times the longest row of each bucket, relative to all data
    traffic: float


def unused_names(handle: _hsdp.Reducer, call: str) -> set[str]:
    """With missing="zero", the parameters without a gradient on any rank in the finished step."""
    unused = handle.unused_parameters(call)
    rows = handle.parameters() if unused else []
    return {rows[i][0] for i in unused}


def warn_of_no_gradients(call: str) -> None:
    """With missing="zero", some parameters may be unused in a step; if all are, something is wrong."""
    warn_caller(
        f"{call}: expected a gradient in the step, got none at all on any rank, so that no "
        "parameter is updated; run the backward pass (loss.backward()) inside the microbatch"
    )
