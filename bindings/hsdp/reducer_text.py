"""Descriptions of a Reducer."""

from __future__ import annotations

import math
from collections.abc import Iterable

from hsdp import _hsdp
from hsdp.attachment import Attachment
from hsdp.parameter import Parameter


def what_is_reduced(attachments: Iterable[Attachment], parameters: Iterable[Parameter]) -> str:
    """What is attached, and its size."""
    sizes = [math.prod(parameter.shape) for parameter in parameters]
    counts = f"{counted(len(sizes), 'parameter')}, {counted(sum(sizes), 'element')}"
    return ", ".join([*(attachment.describe() for attachment in attachments), counts])


def counted(count: int, what: str) -> str:
    """"1 parameter", "2 parameters"."""
    return f"{count} {what}{'' if count == 1 else 's'}"


class Wires:
    """The wire dtypes, as passed to a Reducer."""

    def __init__(
        self, reduce: str | None, replica: str | None, hop: _hsdp.ReplicaHop | None
    ) -> None:
        self._reduce = reduce
        self._replica = replica if hop is None else repr(hop)

    def describe(self, parameters: Iterable[Parameter]) -> str:
        """In the shard group, and over the replicas if that differs."""
        shard = self._reduce or "as gradients"
        dtypes = {p.reduce_dtype or self._reduce or p.dtype for p in parameters}
        if dtypes:
            shard = "/".join(sorted(dtypes))
        if self._replica is None or self._replica == shard:
            return f"wire {shard}"
        return f"wire {shard}, replicas {self._replica}"


def how_even(handle: _hsdp.Reducer, layout: str) -> list[str]:
    """How evenly whole parameters are shared."""
    if layout != "whole":
        return []
    elements, traffic = handle.balance()
    return [f"most on a rank {elements:.2f} of the mean", f"traffic {traffic:.2f}"]


def where_it_stands(handle: _hsdp.Reducer) -> str:
    """Its current step, counted from 0."""
    step = handle.step_number()
    if handle.failed():
        return f"failed in step {max(step, 0)}"
    if step < 0:
        return "no step yet"
    if handle.window_open():
        return f"in a window of step {step}"
    if handle.is_collecting():
        return f"in a microbatch of step {step}"
    if handle.step_begun():
        return f"step {step} begun"
    return f"step {step} {'dropped' if handle.step_dropped() else 'finished'}"
