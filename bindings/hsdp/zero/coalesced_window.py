"""Several backward passes that are reduced once."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from types import TracebackType
from typing import Any, NoReturn

from hsdp import _hsdp
from hsdp.errors import UsageError, reason_of
from hsdp.named_errors import naming, who_of
from hsdp.options import Accumulate, AccumulateDtype
from hsdp.reducer import Reducer


class CoalescedWindow:
    """The block of `with hsdp.zero.coalesce_grad_reduction(...)`."""

    __slots__ = ("_options", "_reducers")

    def __init__(
        self,
        reducers: list[Reducer],
        last: bool | None,
        backwards: int | None,
        accumulate: Accumulate,
        accumulate_dtype: AccumulateDtype,
    ) -> None:
        self._reducers = reducers
        self._options = (last, backwards, accumulate, accumulate_dtype)

    def __enter__(self) -> CoalescedWindow:
        several = len(self._reducers) > 1
        if several:
            self._hear_drops()
        handles = [reducer._handle for reducer in self._reducers]
        before = [(handle.step_begun(), handle.step_number()) for handle in handles]
        for reducer in self._reducers:
            try:
                reducer._begin_window(*self._options)
            except BaseException as error:
                if several:  # the other ranks may be in the step of all of them
                    reason = reason_of("a Reducer of its window could not begin:", error)
                    for each, (begun, number) in zip(self._reducers, before, strict=True):
                        each._drop_step(reason, begun or each._handle.step_number() != number)
                raise
        return self

    # What another rank has dropped of the last window is raised once.
    def _hear_drops(self) -> None:
        try:
            _hsdp.hear_drops([reducer._handle for reducer in self._reducers])
        finally:
            for reducer in self._reducers:
                if reducer._handle.step_dropped():
                    reducer._step_dropped()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._leave("its window's block raised", error or kind())
            return
        try:  # what one of them refuses must not leave a result of another
            for reducer in self._reducers:
                reducer._check_window()
            for reducer in self._reducers:
                reducer._end_window()
        except BaseException as failure:
            self._leave("its window ended with", failure)
            raise

    def _leave(self, what: str, error: BaseException) -> None:
        reason = reason_of(what, error)
        for reducer in self._reducers:
            reducer._leave_window(reason)


def coalesce_grad_reduction(
    reducers: Reducer | Iterable[Reducer],
    last: bool | None = None,
    backwards: int | None = None,
    accumulate: Accumulate = "buffer",
    accumulate_dtype: AccumulateDtype = "f32",
) -> CoalescedWindow:
    """A block of several backward passes that are reduced once, at its end, however many they are.

        with hsdp.zero.coalesce_grad_reduction(reducer):
            for chunk in chunks:  # or one backward that runs others inside, as cached losses do
                loss(model(chunk)).backward()
        reducer.gather_gradients()
        optimizer.step()

    The block is one microbatch of the step. Gradients are added up on this rank; the ranks need not
    keep step inside of it, and may run different numbers of passes. Microbatches inside
    (`reducer.microbatch(...)`) only delimit, and flags that are set inside are undone at its end.

    - `reducers`: a Reducer, or several that are reduced together (pipeline stages, meshes of
      experts, two networks that train each other), in the same order on every rank.
    - `last`: True ends the step. False leaves it pending: in shards, or whole and local after
      `reducer.set_partial_sync("none")`, as stage 1 of ZeRO. None: the Reducer's flags decide, all of
      which are on by default; it ends the step.
    - `backwards`: how many gradients each parameter gets, where this rank knows. A parameter is
      then reduced while its last backward pass still runs (with an f16 wire at the block's end),
      and what got fewer at the block's end; one gradient more is a UsageError.
    - `accumulate`: "buffer" adds gradients up in memory of the Reducer, which is kept for the next
      window (`reducer.release_memory()` frees it); "grad" leaves them in `p.grad` of an attached
      model, where autograd adds them up in the parameter's dtype.
    - `accumulate_dtype`: of the buffer: "f32", or "param" for the gradient's own.

    Equal bits, whatever `backwards` and the number of buckets. When the block raises, the step is
    dropped on every rank: this one keeps its exception, the others get a StepAbortedError that
    names it; all may begin a new step. What is read of the result waits, as after a microbatch.

    Raises UsageError for windows in each other, a step, an optimizer's step or a `zero_grad` after
    the first gradient inside, and a microbatch that is still open at the end.
    """
    if isinstance(reducers, Reducer):
        listed = [reducers]
    elif isinstance(reducers, Iterable):
        listed = list(reducers)
    else:
        _refuse("a Reducer or several", f"an object of type {type(reducers).__name__}")
    if not listed:
        _refuse("a Reducer or several", "none")
    for i, reducer in enumerate(listed):
        if not isinstance(reducer, Reducer):
            _refuse("Reducers", f"an object of type {type(reducer).__name__} as number {i}")
        if any(reducer is before for before in listed[:i]):
            _refuse("each Reducer once", f"one again as number {i}")
    with naming(who_of(reducer.name for reducer in listed)):
        passes = _passes(backwards)
    whether_last = None if last is None else bool(last)
    return CoalescedWindow(listed, whether_last, passes, accumulate, accumulate_dtype)


def _passes(backwards: Any) -> int | None:
    if backwards is None:
        return None
    try:
        number = operator.index(backwards)
    except TypeError:
        _refuse("backwards to be a whole number of passes, or None", repr(backwards))
    if isinstance(backwards, bool) or not 1 <= number < 1 << 31:
        _refuse("backwards of at least 1 and below 2**31, or None", repr(backwards))
    return number


def _refuse(expected: str, got: str) -> NoReturn:
    raise UsageError(f"zero: coalesce_grad_reduction: expected {expected}, got {got}")
