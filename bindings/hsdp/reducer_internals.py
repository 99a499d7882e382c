"""What the package's other parts use of a Reducer: how attachments follow its steps, and windows.

A step is dropped in `_abandon`, by this rank; `_hearing_of_drops` and `_end` hear of another's.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from hsdp import _hsdp
from hsdp.attachment import Attachment
from hsdp.communicator import Communicator
from hsdp.errors import Error, StepAbortedError, UsageError, reason_of
from hsdp.mesh import Mesh
from hsdp.named_errors import naming_itself
from hsdp.options import Accumulate, AccumulateDtype, ShardOver
from hsdp.profiler_range import profiler_range
from hsdp.same_weights import require_same_models


@naming_itself
class ReducerInternals:
    """The inner part of a Reducer. Users call `Reducer`; windows, gathers, `hsdp.uneven` and the
    framework's layer call this. `_who` is the Reducer's name for errors.
    """

    _who: str

    def __init__(self, mesh: Mesh, handle: _hsdp.Reducer, shard_over: ShardOver) -> None:
        self._mesh = mesh
        self._handle = handle
        self._shard_over: ShardOver = shard_over
        self._closed = False
        self._attachments: list[Attachment] = []
        # ShardedOptimizers that have its parameters: what memory they will take is asked of them.
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._is_agreed = True  # whether attachments are known to be the same on every rank
        # Called before the ranks compare their words, and may change them.
        self._before_words = WeakCalls()
        # Called with this Reducer when this rank's passes of a microbatch have ended or been abandoned.
        self._after_passes = WeakCalls()
        # Set by a loop of hsdp.uneven: whether this rank has a batch for the microbatch that begins.
        self._enter_batch: Callable[[], bool] | None = None
        self._had_batch = True  # whether this rank had a batch for its last microbatch
        self._pass_count = 1  # of the window that is about to end
        self._no_sync_depth = 0

    def _set_shard_over(self, over: ShardOver) -> None:
        self._handle.set_shard_over(over)
        self._shard_over = over

    # Whose slices are the whole, each once.
    @property
    def _slice_group(self) -> Communicator:
        group: Communicator = self._mesh.world if self._is_over_mesh else self._mesh.shard_group
        return group

    @property
    def _is_over_mesh(self) -> bool:
        return self._shard_over == "mesh" and bool(self._mesh.replicate_size > 1)

    # Repeated until it succeeds, like the rest of the setup.
    def _agree(self) -> None:
        if self._is_agreed:
            return
        self._handle.prepare()
        with self._together("describe what is attached"):
            if self._mesh.closed:
                raise UsageError(
                    "reducer: set-up: expected an open mesh when the first step of an attached model "
                    "begins, got a closed one; close it later"
                )
            lines = [line for one in self._attachments for line in one.description()]
        require_same_models(self._mesh.world, lines)
        self._is_agreed = True

    # Runs before a step's first microbatch. If attachments join steps, every step of this rank, even one dropped at
    # once, starts here: the others wait for it [Note: buffers follow rank 0].
    def _begin(self) -> None:
        self._agree()
        joining = [one for one in self._attachments if one.joins_steps]
        if not joining or self._handle.step_begun():
            return
        self._hearing_of_drops(self._handle.begin_step)
        try:
            self._after_passes(self)  # other ranks may still be in them
            for attachment in joining:
                attachment.step_began()
        except BaseException as error:
            self._abandon(reason_of("it could not begin:", error))
            raise

    # Wraps a part of the setup: if it raises on one rank, the others raise StepAbortedError.
    @contextlib.contextmanager
    def _together(self, what: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(Error):
                self._handle.together(what, str(error) or type(error).__name__)
            raise
        self._handle.together(what, "")

    def _entered_batch(self) -> bool | None:
        return None if self._enter_batch is None else self._enter_batch()

    def _began(self, tell: Callable[[Attachment], None]) -> None:
        for i, attachment in enumerate(self._attachments):
            try:
                tell(attachment)
            except BaseException as error:  # the attachment that raised needs no call
                self._handle.abandon_step(str(error))
                for before in self._attachments[:i]:
                    before.microbatch_ended(completed=False)
                for after in self._attachments[i + 1 :]:
                    after.step_dropped()
                raise

    def _end(self, end: Callable[[], None]) -> None:
        try:
            self._take_what_is_left()
            with profiler_range("hsdp:end_microbatch"):
                end()
        except BaseException as error:
            self._ended(completed=False)
            self._raise_explained(error)
            raise
        self._ended(completed=True)

    def _raise_explained(self, error: BaseException) -> None:
        if not isinstance(error, UsageError):
            return
        for attachment in self._attachments:
            explained = attachment.explain(error)
            if explained is not error:
                raise explained from None

    def _take_what_is_left(self) -> None:
        self._after_passes(self)
        for attachment in self._attachments:
            attachment.microbatch_ending()
        self._before_words()

    # The two ends of a window; hsdp.zero provides the block.
    def _begin_window(
        self,
        last: bool | None,
        backwards: int | None,
        accumulate: Accumulate,
        accumulate_dtype: AccumulateDtype,
    ) -> None:
        if accumulate == "grad" and not self._attachments:
            raise UsageError(
                "zero: coalesce_grad_reduction: expected an attached model, whose p.grad holds the "
                "sums with accumulate=\"grad\", got a Reducer without; call reducer.attach, or use "
                "accumulate=\"buffer\""
            )
        if self._no_sync_depth:
            raise UsageError(
                "zero: coalesce_grad_reduction: expected a window outside of no_sync(), got one "
                "inside; leave no_sync() out, as gradients are local until the window ends"
            )
        has_batch = self._entered_batch()
        self._begin()
        self._hearing_of_drops(
            lambda: self._handle.begin_window(
                last, backwards, accumulate, accumulate_dtype, has_batch
            )
        )
        self._had_batch = has_batch is not False
        holds = accumulate == "grad"
        try:
            self._began(lambda attachment: attachment.window_began(holds, backwards))
        except BaseException as error:
            self._handle.leave_window(str(error))
            raise

    def _leave_window(self, reason: str) -> None:
        with contextlib.suppress(UsageError):  # in a forked child
            self._handle.leave_window(reason)
        self._ended(completed=False)

    # Drops the step that others may be in, even if this rank has not begun it or has dropped it.
    def _drop_step(self, reason: str, was_begun: bool) -> None:
        with contextlib.suppress(Error):
            if not was_begun:
                self._begin()
                self._handle.begin_step()
        self._abandon(reason)
        self._leave_window(reason)

    def _check_window(self) -> None:
        try:
            if self._handle.window_open():
                self._pass_count = max((a.pass_count() for a in self._attachments), default=1)
                self._take_what_is_left()
            self._handle.check_window()
        except BaseException as error:
            self._ended(completed=False)
            self._raise_explained(error)
            raise

    def _end_window(self) -> None:
        self._end(lambda: self._handle.end_window(self._pass_count))

    # Never raises.
    def _abandon(self, reason: str) -> None:
        begun = self._handle.step_begun()
        collecting = self._handle.is_collecting()
        try:
            with contextlib.suppress(UsageError):  # in a forked child
                self._handle.abandon_step(reason)
        finally:
            if collecting:
                self._ended(completed=False)
            elif begun:
                self._step_dropped()
            if begun or collecting:
                with contextlib.suppress(Error):  # the mesh has failed
                    self._after_passes(self)

    def _hearing_of_drops(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Error as error:
            if isinstance(error, StepAbortedError):
                self._step_dropped()
            raise

    def _ended(self, completed: bool) -> None:
        for attachment in self._attachments:
            attachment.microbatch_ended(completed)

    def _step_dropped(self) -> None:
        for attachment in self._attachments:
            attachment.step_dropped()

    def _is_in_step(self) -> bool:
        return self._handle.step_begun() or self._handle.step_dropped()

    def _leave(self, reason: str, grace_s: float) -> None:
        self._detach()
        self._handle.leave(reason, grace_s)

    def _detach(self) -> None:
        self._is_agreed = True
        while self._attachments:  # later attachments may depend on earlier ones
            self._attachments.pop().close()
        self._closed = True


class WeakCalls:
    """Calls methods in the order in which they were added, without keeping their objects alive."""

    def __init__(self) -> None:
        self._methods: list[weakref.WeakMethod[Callable[..., None]]] = []

    def add(self, method: Callable[..., None]) -> None:
        """Calls it from now on, while its object lives."""
        self._methods.append(weakref.WeakMethod(method))

    def discard(self, method: Callable[..., None]) -> None:
        """Does nothing if it was not added."""
        self._methods = [one for one in self._methods if one() not in (None, method)]

    def __call__(self, *args: Any) -> None:
        for one in list(self._methods):
            method = one()
            if method is not None:
                method(*args)
