"""The exceptions of hsdp, all subclasses of `hsdp.Error`."""

from __future__ import annotations

import builtins
from collections.abc import Iterable


class Error(Exception):
    """Base of all exceptions of hsdp.

    `ranks` are the job ranks at fault; empty if the error concerns no rank. If another rank ended the
    job on purpose (Ctrl-C in a wait), this class itself is raised and names that rank.
    """

    ranks: tuple[int, ...]

    def __init__(self, message: str = "", ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)

    def __reduce__(self) -> tuple[type[Error], tuple[str, tuple[int, ...]]]:
        return type(self), (str(self), self.ranks)


class PeerLostError(Error):
    """A peer process ended or its link broke; `ranks` names it. The mesh is over on every rank."""


class TimeoutError(Error, builtins.TimeoutError):  # noqa: A001
    """A peer did not arrive, or stopped, within the mesh's `timeout_s`. The mesh is over."""


class MismatchError(Error):
    """The ranks did not agree: different calls, counts, shapes, factors or sync modes."""


class StepAbortedError(Error):
    """Another rank dropped the step, or failed to set up the Reducer; all ranks may try again."""


class UsageError(Error, ValueError):
    """A call that violates the interface: wrong shape, dtype, device, name or order of calls.

    The message says what was wrong and what to do.
    """


class SnapshotError(Error):
    """A snapshot could not be written, read or understood."""


def reason_of(what: str, error: BaseException) -> str:
    """Why a step is dropped: what happened, and the first line of the error that caused it."""
    text = f"{what} {type(error).__name__}"
    detail = str(error).partition("\n")[0]
    return f"{text}: {detail[:200]}" if detail else text
