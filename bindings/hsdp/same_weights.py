"""The same weights on every rank, before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hsdp.communicator import Communicator
from hsdp.errors import MismatchError
from hsdp.framework import Module, of_torch
from hsdp.line_agreement import first_difference

# In a line, what follows it changes with the values of the described object.
VALUES = " #"


def broadcast_parameters(mesh: Any, model: Module, root: int = 0) -> None:
    """Copies the parameters and buffers of rank `root` of the mesh to all its ranks, in place.

    Any dtype, any strides. Collective. Raises MismatchError on every rank if the ranks' models differ
    in names, shapes or dtypes; UsageError for DTensors and for parameters without memory.
    """
    of_torch("broadcast_parameters")(mesh, model, root)


def require_same_models(world: Communicator, lines: Sequence[str]) -> None:
    """Raises MismatchError on every rank if the ranks' models differ in these lines. Collective."""
    difference = first_difference(world, lines, "compare attached models")
    if difference is None:
        return
    plain = [line.partition(VALUES)[0] for line in difference.lines]
    ranks = [world.ranks[place] for place in difference.places]
    other = plain[difference.places[0]]
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    if plain[0] == other:
        raise MismatchError(
            f"reducer: set-up: expected the same weights on every rank, got other values of {other} on "
            f"{who} than on rank {world.ranks[0]}; call hsdp.broadcast_parameters(mesh, model) before "
            "the first step, or attach with check_parameters=False where they differ on purpose",
            ranks,
        )
    raise MismatchError(
        f"reducer: set-up: expected the same model on every rank, got {plain[0]} on rank "
        f"{world.ranks[0]} and {other} on {who}; attach the same models with the same options",
        ranks,
    )
