"""The blocks of `with reducer.step()` and `with reducer.microbatch()`."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hsdp.options import Sync
    from hsdp.reducer import Reducer


class Step:
    """The block of `with reducer.step()`: begins a step, and drops it if the block raises.

    The step is dropped on every rank, wherever in the block the exception was raised: in a microbatch,
    between two, or before the first. The other ranks raise StepAbortedError, which names this rank, at
    the end of their next microbatch that sends something. If the block ends before the step, the step
    stays pending for `finish` or `discard`.
    """

    __slots__ = ("_reducer",)

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer

    def __enter__(self) -> Reducer:
        self._reducer.begin_step()
        return self._reducer

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._reducer.abandon_step(reason_of("its block raised", error or kind()))


class Microbatch:
    """The block of `with reducer.microbatch(...)`: ends the microbatch, or drops the step.

    If the block raises, this rank sends zeros for what its peers still wait for, the step is dropped on
    every rank, and the exception continues. The other ranks raise StepAbortedError, which names this
    rank, in this microbatch or a later call; all stay usable and begin a new step.
    """

    __slots__ = ("_last", "_reducer", "_sync")

    def __init__(self, reducer: Reducer, last: bool | None, sync: Sync | None) -> None:
        self._reducer = reducer
        self._last = last
        self._sync: Sync | None = sync

    def __enter__(self) -> Reducer:
        self._reducer.begin_microbatch(self._last, self._sync)
        return self._reducer

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self._reducer.end_microbatch()
        else:
            self._reducer.abandon_step(reason_of("its block raised", error or kind()))


def reason_of(what: str, error: BaseException) -> str:
    """Why a step is dropped: what happened, and the first line of the error that caused it."""
    text = f"{what} {type(error).__name__}"
    detail = str(error).partition("\n")[0]
    return f"{text}: {detail[:200]}" if detail else text
