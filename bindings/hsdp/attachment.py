"""What a framework's layer does with the microbatches of a Reducer."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

from hsdp.array import Array, TensorOrArray
from hsdp.errors import UsageError


class Attachment(Protocol):
    """Follows a Reducer's microbatches; knows a framework's parameters and where gradients lie.

    A Reducer may have several, which it calls in the order in which they were attached, and closes
    in reverse.
    """

    def parameter_names(self) -> Collection[str]:
        """What it registered; no two attachments of a Reducer have a name in common."""
        ...

    def describe(self) -> str:
        """What was attached, for errors."""
        ...

    def description(self) -> list[str]:
        """Lines that are to be the same on every rank before the first step."""
        ...

    @property
    def joins_steps(self) -> bool:
        """Whether `step_began` has something to do, which is so on every rank or none."""
        ...

    def step_began(self) -> None:
        """Before the first microbatch of each step that was begun. Collective; only where it joins."""

    def loss_scale_set(self, scale: float) -> None:
        """Results of later steps are divided by it."""

    def microbatch_began(self) -> None:
        """Raises when the microbatch cannot be; it is then dropped on every rank."""

    def window_began(self, holds: bool, backwards: int | None) -> None:
        """As `microbatch_began`. `holds`: its own framework adds up the gradients of the window's
        passes; it hands over each parameter's sum, after so many passes or in the end.
        """

    def pass_ended(self) -> None:
        """A microbatch that only delimits, in a window, has ended."""

    def pass_count(self) -> int:
        """Of how many passes what it hands over is the sum."""
        ...

    def as_array(self, memory: Array) -> TensorOrArray:
        """The same memory as an array of its framework."""
        ...

    def held_sum(self, name: str) -> TensorOrArray | None:
        """What a parameter's passes add up to so far, where its framework does that."""
        ...

    def microbatch_ending(self) -> None:
        """The last chance to hand gradients over."""

    def microbatch_ended(self, completed: bool) -> None:
        """All is packed, or the step was dropped."""

    def step_dropped(self) -> None:
        """What was pending was discarded."""

    def explain(self, error: UsageError) -> UsageError:
        """What this side knows of an error at the end of a microbatch, or the error as it is."""
        ...

    def gather_gradients(self) -> bool:
        """Puts the whole mean where the framework's optimizers look for it. Whether there was any."""
        ...

    def clipping(self, caller: str) -> None:
        """Raises where the result must not be clipped as it is now."""

    def clipped(self, norm: Any, max_norm: float) -> None:
        """The result had this norm, and was scaled to at most the other one."""

    def release_memory(self) -> None:
        """Frees what it keeps for later steps."""

    def gather_parameters(self) -> None:
        """Completes the parameters, of which this rank updated its slices."""

    def close(self) -> None:
        """The Reducer is closed."""
