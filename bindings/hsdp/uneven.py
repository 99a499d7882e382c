"""A loop over batches in which some ranks have fewer [Note: uneven loops]."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Iterator
from typing import Any, TypeVar

from hsdp.communicator import Communicator
from hsdp.errors import Error, MismatchError, StepAbortedError, UsageError, reason_of
from hsdp.named_errors import naming, who_of
from hsdp.reducer import Reducer

_T = TypeVar("_T")

# A rank's message to the others: one when it asks for a batch, one when it begins the first microbatch
# after it. The reason follows FAILED.
_BATCH, _NONE, _ENTERS, _LEAVES, _FAILED = "batch", "none", "enters", "leaves", "failed "


def uneven(
    reducer: Reducer | Iterable[Reducer], loader: Iterable[_T]
) -> Generator[_T | None, None, None]:
    """Yields the batches of `loader`, then None for as long as any rank has one. So ranks with fewer
    batches still reduce with the others, and all leave the loop together, as in DDP's Join.

        for m, batch in enumerate(hsdp.uneven(reducer, loader)):
            with reducer.microbatch(last=m % 4 == 3):
                if batch is not None:
                    loss(model(batch)).backward()
        reducer.finish()  # where the last step has fewer than four

    Every rank must run the same number of microbatches for each batch, even for None; usually one.
    Those for None are empty: they have no gradients, and the default divide factor counts batches, not
    ranks. If several Reducers have microbatches in the loop, as in a GAN, pass all of them; they must
    be on one mesh. Collective: at each batch the ranks tell each other whether they have one, and once
    more when they begin its first microbatch.

    No rank waits for one that is gone. If a loader raises, its rank gets that exception and the others
    StepAbortedError. If a rank leaves the loop early (break, or an exception in its body) while others
    have batches, they raise StepAbortedError, which names it, at their next batch or when they begin a
    microbatch. The step is dropped on all ranks, which stay usable. If all leave early together,
    nothing is dropped. A rank that leaves waits for the others to reach the same place. It has left
    when the generator is closed, which after an exception happens once that is handled: call nothing
    collective before then. Raises MismatchError on every rank if some skip a batch that others reduce.
    """
    reducers = [reducer] if isinstance(reducer, Reducer) else _listed(reducer)
    return _named(who_of(one.name for one in reducers), _batches(reducers, loader))


def _listed(reducers: Any) -> list[Reducer]:
    listed = list(reducers) if isinstance(reducers, Iterable) else [reducers]
    for one in listed or [None]:
        if not isinstance(one, Reducer):
            raise UsageError(
                f"uneven: expected an hsdp.Reducer or several, got an object of type "
                f"{type(one).__name__}; pass those that the loop's microbatches are of"
            )
    if any(one.mesh is not listed[0].mesh for one in listed):
        raise UsageError("uneven: expected Reducers of one mesh, got several meshes")
    return listed


def _named(
    who: str, batches: Generator[_T | None, None, None]
) -> Generator[_T | None, None, None]:
    with naming(who):
        yield from batches


def _batches(
    reducers: list[Reducer], loader: Iterable[_T]
) -> Generator[_T | None, None, None]:
    if any(reducer._enter_batch is not None for reducer in reducers):
        raise UsageError(
            "uneven: expected one loop at a time over a Reducer, got a second; leave the first, or "
            "close() it"
        )
    loop = UnevenLoop(reducers)
    source: Iterator[_T] | None = None
    try:
        while True:
            batch: _T | None = None
            word = _BATCH
            try:
                source = iter(loader) if source is None else source
                batch = next(source)
                if batch is None:
                    raise UsageError(
                        "uneven: expected batches, got None from the loader, which stands for none; "
                        "let it yield something else"
                    )
            except StopIteration:
                word, source = _NONE, iter(())
            except BaseException as error:
                loop.leave(_FAILED + reason_of("its loader raised", error))
                raise
            if not loop.go_on(word):
                return
            try:
                yield batch
            except BaseException:
                loop.leave(_LEAVES)
                raise
    finally:
        loop.end()


class UnevenLoop:
    """The messages between the ranks of one loop."""

    def __init__(self, reducers: list[Reducer]) -> None:
        self._reducers = reducers
        self._world: Communicator = reducers[0].mesh.world
        self._over: Error | None = None
        self._entered = True
        self._has_batch = False
        for reducer in reducers:
            reducer._enter_batch = self.enter

    def end(self) -> None:
        """From now on, microbatches are outside the loop."""
        for reducer in self._reducers:
            reducer._enter_batch = None

    def go_on(self, word: str) -> bool:
        """Returns whether any rank has a batch."""
        self._require_open()
        self._entered, self._has_batch = False, word == _BATCH
        words = self._exchange(word)
        if all(each in (_BATCH, _NONE) for each in words):
            return _BATCH in words
        return self._judge(words)

    def enter(self) -> bool:
        """Called before a microbatch of a batch; before the first, checks whether a rank is leaving.
        Returns whether this rank has the batch.
        """
        self._require_open()
        if not self._entered:
            self._entered = True
            words = self._exchange(_ENTERS)
            if any(each != _ENTERS for each in words):
                self._judge(words)
        return self._has_batch

    # For callers that caught the error that ended the loop, and continue.
    def _require_open(self) -> None:
        if self._over is not None:
            raise self._over

    def leave(self, word: str) -> None:
        """Called instead of `go_on` or `enter`: this rank has its own exception."""
        if self._over is not None:
            return
        with contextlib.suppress(Error):
            for reducer in self._reducers:
                if reducer._handle.is_collecting():  # the others may wait for this microbatch
                    reducer.abandon_step("its rank left the loop of hsdp.uneven within it")
            self._judge(self._exchange(word))

    def _exchange(self, word: str) -> list[str]:
        try:
            return self._world._handle.exchange(word, "go on in hsdp.uneven")
        except BaseException as error:
            self._over = error if isinstance(error, Error) else Error("uneven: the loop has ended")
            raise

    def _judge(self, words: list[str]) -> bool:
        """Ends the loop. Raises unless this rank caused the end or would have stopped anyway."""
        self._over = Error("uneven: expected the loop to be left, got another batch of it")
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
        self._over = kind(reason, [self._world.ranks[rank] for rank in at_fault])
        raise self._over

    # The ranks at fault mark the step as dropped; the others discard theirs.
    def _drop(self, reason: str, at_fault: bool) -> None:
        for reducer in self._reducers:
            if at_fault:
                reducer.abandon_step(reason)
            else:
                with contextlib.suppress(Error):
                    reducer.discard()
