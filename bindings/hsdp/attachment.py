"""How a framework's layer follows the microbatches of a Reducer."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

from hsdp.array import Array, TensorOrArray
from hsdp.errors import UsageError


class Attachment(Protocol):
    """Follows a Reducer's microbatches; knows a framework's parameters and where gradients lie.

    A Reducer may have several. It calls them in the order in which they were attached, and closes them
    in reverse.
    """

    def parameter_names(self) -> Collection[str]:
        """The names it registered; two attachments of a Reducer have none in common."""
        ...

    def describe(self) -> str:
        """What was attached, for errors."""
        ...

    def description(self) -> list[str]:
        """Lines that must be the same on every rank before the first step."""
        ...

    @property
    def joins_steps(self) -> bool:
        """Whether `step_began` has work to do; the same on every rank."""
        ...

    def step_began(self) -> None:
        """Called before the first microbatch of each step. Collective; only called if `joins_steps`."""

    def loss_scale_set(self, scale: float) -> None:
        """Called when later steps will be divided by `scale`."""

    def microbatch_began(self) -> None:
        """Raises if the microbatch cannot begin; it is then dropped on every rank."""

    def window_began(self, holds: bool, backwards: int | None) -> None:
        """Like `microbatch_began`. With `holds`, the framework adds up the gradients of the window's
        passes; it hands over each parameter's sum after `backwards` passes or at the end.
        """

    def pass_ended(self) -> None:
        """Called when a microbatch that only delimits a pass of a window has ended."""

    def pass_count(self) -> int:
        """How many passes are summed in the gradients it hands over."""
        ...

    def as_array(self, memory: Array) -> TensorOrArray:
        """The same memory as an array of its framework."""
        ...

    def held_sum(self, name: str) -> TensorOrArray | None:
        """The sum of a parameter's passes so far, if its framework adds them up."""
        ...

    def microbatch_ending(self) -> None:
        """The last chance to hand over gradients."""

    def microbatch_ended(self, completed: bool) -> None:
        """Called when everything is packed, or the step was dropped."""

    def step_dropped(self) -> None:
        """Called when pending gradients were discarded."""

    def explain(self, error: UsageError) -> UsageError:
        """Returns `error` from the end of a microbatch, explained further if this attachment can."""
        ...

    def gather_gradients(self) -> bool:
        """Puts the whole mean where the framework's optimizers look for it; returns whether there was any."""
        ...

    def clipping(self, caller: str) -> None:
        """Raises if the result must not be clipped now."""

    def clipped(self, norm: Any, max_norm: float) -> None:
        """Called when the result had this norm and was scaled to at most `max_norm`."""

    def release_memory(self) -> None:
        """Frees memory kept for later steps."""

    def gather_parameters(self) -> None:
        """Completes the parameters after this rank has updated its slices."""

    def close(self) -> None:
        """Called when the Reducer is closed."""
