"""A loop over batches of which some ranks have fewer [Note: uneven loops]."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Iterator
from typing import TypeVar

from hsdp.communicator import Communicator
from hsdp.errors import Error, MismatchError, StepAbortedError, UsageError
from hsdp.named_errors import naming
from hsdp.reducer import Reducer
from hsdp.step_blocks import reason_of

_T = TypeVar("_T")

# What a rank says to the others, once when it asks for a batch and once when it begins the first
# microbatch after; FAILED is followed by the reason.
_BATCH, _NONE, _ENTERS, _LEAVES, _FAILED = "batch", "none", "enters", "leaves", "failed "


def uneven(reducer: Reducer, loader: Iterable[_T]) -> Generator[_T | None, None, None]:
    """The batches of `loader`, then None for as long as any rank has one: so ranks with fewer
    batches reduce with the others, and all leave the loop together. As DDP's Join.

        for m, batch in enumerate(hsdp.uneven(reducer, loader)):
            with reducer.microbatch(last=m % 4 == 3):
                if batch is not None:
                    loss(model(batch)).backward()
        reducer.finish()  # where the last step has fewer than four

    One microbatch for each batch, None too, on every rank. The microbatch of a None is empty: it
    has no gradients, and the default divide factor counts the batches that there were, not the
    ranks. Collective: at each batch the ranks tell each other whether they have one, and once more
    as they begin its microbatch.

    Nobody waits for a rank that is gone. When a loader raises, its rank gets that exception and the
    others StepAbortedError. When a rank leaves the loop early (break, or an exception in its body)
    while others have batches, they get StepAbortedError that names it, at their next batch or as
    they begin a microbatch; the step that was begun is dropped on all ranks, which stay usable. All
    may leave early together, and nothing is dropped. A rank that leaves waits for the others to
    come to the same place; it has left when the generator is closed, which for an exception is when
    that was handled: call nothing collective before. MismatchError, on every rank, when some skip a
    batch that others reduce.
    """
    if not isinstance(reducer, Reducer):
        raise UsageError(
            f"uneven: expected an hsdp.Reducer, got an object of type {type(reducer).__name__}; "
            "pass the Reducer that the loop's microbatches are of"
        )
    return _named(reducer, _batches(reducer, loader))


def _named(reducer: Reducer, batches: Generator[_T | None, None, None]) -> Generator[_T | None, None, None]:
    with naming(reducer._who):
        yield from batches


def _batches(reducer: Reducer, loader: Iterable[_T]) -> Generator[_T | None, None, None]:
    if reducer._before_microbatch is not None:
        raise UsageError(
            "uneven: expected one loop at a time over a Reducer, got a second; leave the first, or "
            "close() it"
        )
    loop = _Loop(reducer)
    source: Iterator[_T] | None = None
    while True:
        batch: _T | None = None
        word = _BATCH
        try:
            source = iter(loader) if source is None else source
            batch = next(source)
        except StopIteration:
            word, source = _NONE, iter(())
        except BaseException as error:
            loop.leave(_FAILED + reason_of("its loader raised", error))
            raise
        if not loop.go_on(word):
            return
        reducer._next_has_batch = word == _BATCH
        reducer._before_microbatch = loop.enter
        try:
            yield batch
        except BaseException:
            loop.leave(_LEAVES)
            raise
        finally:
            reducer._before_microbatch = reducer._next_has_batch = None


class _Loop:
    """What the ranks of one loop say to each other."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer
        self._world: Communicator = reducer.mesh.world
        self._over = False

    def go_on(self, word: str) -> bool:
        """Whether any rank has a batch."""
        words = self._exchange(word)
        if all(each in (_BATCH, _NONE) for each in words):
            return _BATCH in words
        return self._judge(words)

    def enter(self) -> None:
        """Before the first microbatch of a batch: is nobody about to leave instead?"""
        self._reducer._before_microbatch = None
        words = self._exchange(_ENTERS)
        if any(each != _ENTERS for each in words):
            self._judge(words)

    def leave(self, word: str) -> None:
        """At the place where the others ask or enter; this rank has an exception of its own."""
        if self._over:
            return
        with contextlib.suppress(Error):
            if self._reducer._handle.is_collecting():  # the others may wait for this microbatch
                self._reducer.abandon_step("its rank left the loop of hsdp.uneven within it")
            self._judge(self._exchange(word))

    def _exchange(self, word: str) -> list[str]:
        try:
            return self._world._handle.exchange(word, "go on in hsdp.uneven")
        except BaseException:
            self._over = True
            raise

    def _judge(self, words: list[str]) -> bool:
        """Ends the loop. Raises where this rank is not the reason and would have gone on."""
        self._over = True
        if all(each in (_LEAVES, _NONE) for each in words):
            return False
        failed = [rank for rank, each in enumerate(words) if each.startswith(_FAILED)]
        left = [rank for rank, each in enumerate(words) if each == _LEAVES]
        skipped = [rank for rank, each in enumerate(words) if each in (_BATCH, _NONE)]
        at_fault = failed or left or skipped
        own, size = words[self._world.rank], self._world.size
        who = ", ".join(f"rank {rank} of {size}" for rank in at_fault)
        kind: type[Error] = StepAbortedError
        if failed:
            reason = f"uneven: {who} dropped the step: {words[failed[0]].removeprefix(_FAILED)}"
        elif left:
            reason = (
                f"uneven: expected every rank in the loop until none has a batch, got {who} that "
                "left it; leave it on all ranks after the same batch"
            )
        else:
            kind = MismatchError
            reason = (
                f"uneven: expected one microbatch for each batch on every rank, got {who} that "
                "skipped one; begin a microbatch there too, without gradients"
            )
        self._drop(reason, at_fault=self._world.rank in at_fault)
        if own == _LEAVES or own.startswith(_FAILED):
            return False
        raise kind(reason, [self._world.ranks[rank] for rank in at_fault])

    # Whoever is at fault sends the mark, and the others meet it.
    def _drop(self, reason: str, at_fault: bool) -> None:
        if at_fault:
            self._reducer.abandon_step(reason)
        else:
            with contextlib.suppress(Error):
                self._reducer.discard()
