"""The Reducer: microbatches of gradients in, shards of their mean out."""

from __future__ import annotations

import contextlib
import importlib
import operator
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from hsdp import _hsdp
from hsdp.array import as_shape
from hsdp.caller_warning import warn_caller
from hsdp.closing import Closing
from hsdp.dtypes import DtypeLike, registered, wire_text
from hsdp.errors import Error, StepAbortedError, UsageError
from hsdp.keyword_hints import REDUCER, hinting
from hsdp.mesh import as_mesh
from hsdp.named_errors import naming_itself, who_of
from hsdp.open_reducers import open_reducers
from hsdp.options import (
    Accumulate,
    AccumulateDtype,
    AccumulateOn,
    Backwards,
    DivideBy,
    Layout,
    Missing,
    PartialSync,
    Reduction,
    Sync,
)
from hsdp.parameter import Parameter
from hsdp.reducer_results import ReducerResults
from hsdp.reducer_text import Wires, how_even, what_is_reduced, where_it_stands
from hsdp.same_weights import require_same_models
from hsdp.step_blocks import Microbatch, Step, reason_of
from hsdp.weak_calls import WeakCalls

if TYPE_CHECKING:
    import torch

    from hsdp.attachment import Attachment
    from hsdp.uneven import UnevenLoop


@naming_itself
class Reducer(ReducerResults, Closing):
    """Reduces gradients over a mesh: each microbatch is reduce-scattered in the shard group and
    added to an fp32 carry, the step's last one goes over the replicas too.

        mesh = hsdp.init_mesh(replicate=2, shard=2)
        reducer = hsdp.Reducer(mesh, reduce_dtype="bf16")
        reducer.register("w", (128, 64))
        for m in range(4):
            with reducer.microbatch(last=m == 3):
                reducer.gradient_ready("w", gradient)
        mean = reducer.shard("w")

    Result = (sum over microbatches and ranks) / f; f is the number of ranks, so microbatches are
    summed, not averaged, unless `divide_by`, `divide_by_tokens` or `set_gradient_divide_factor` say
    otherwise.

    - `mesh`: an `hsdp.Mesh`, or a torch DeviceMesh.
    - `reduce_dtype`: what travels in the shard group: "f32", "bf16", "f16"; None: each gradient's
      own dtype. Sums are fp32 in any case. Gradients of f64 travel and are summed in f64, whatever
      the wires.
    - `replica_dtype`: what travels between replicas; None: the reduce dtype.
    - `layout`: "flat" cuts parameters into even ranges; "dim0" into rows of their first dimension;
      "whole" gives each parameter to one rank, for optimizers of whole matrices.
    - `bucket_bytes`: wire bytes that travel together; default 2 MiB on the host, which a cache
      holds between packing and summing, 32 MiB on GPUs (64 KiB a rank up to 128 MiB).
    - `missing`: "error": each parameter gets one gradient per microbatch; "zero": holes are zeros.
    - `backwards`: "many" adds the gradients of several backward passes within a microbatch, as
      `hsdp.zero.coalesce_grad_reduction` does for a block.
    - `accumulate_dtype`: of local sums, as of `no_sync`: "f32", or "param" for the gradient's.
    - `accumulate_on`: where local sums lie: "device", or "host": in pinned memory beside a GPU,
      whose own memory it spares; each gradient then crosses the bus.
    - `reduction`: "exact" (the same bits everywhere), or "native" (nccl only).
    - `divide_by`: "ranks", or "ranks*microbatches", for the mean over microbatches too; of a window
      each pass counts.
    - `verify_every`: in every Nth step the replicas compare the bits of its result: a `MismatchError`
      before anybody reads it names the parameter and the ranks whose bits are others. 0: never.
    - `replica_hop`: another way over the replicas, as `hsdp.quant.LocoHop`; None: the plain one.
    - `name`: for programs with several; in every error, in `repr` and in snapshots. The same on
      every rank.

    Construction, the first `begin_microbatch`, microbatches, `finish`, `discard`, `grad_norm`,
    `clip_grad_norm_`, `gather_*` and `close` are called by every rank of the mesh in the same
    order. `gradient_ready` may be called from any thread; everything else from one at a time.

    Errors: UsageError for misuse on this rank; StepAbortedError when another rank dropped the step
    or failed to set the Reducer up (all stay usable). It may come as late as the call that reads
    the step's result: put `try` around `with reducer.step():` and all that reads its result, and
    let every rank go on with a new step. PeerLostError, TimeoutError and MismatchError end the
    Reducer, and every later call repeats them, but for `stats`, `close` and reading the last
    finished result. Ctrl-C raises KeyboardInterrupt: in your own code within a step or a microbatch
    it drops the step and all ranks stay usable; in a wait for other ranks it ends the mesh, and
    they get an `hsdp.Error` that names this rank. In a forked child every call is a UsageError.
    """

    @hinting(REDUCER)
    def __init__(
        self,
        mesh: Any,
        reduce_dtype: DtypeLike | None = None,
        replica_dtype: DtypeLike | None = None,
        layout: Layout = "flat",
        bucket_bytes: int | None = None,
        missing: Missing = "error",
        backwards: Backwards = "one",
        accumulate_dtype: AccumulateDtype = "f32",
        reduction: Reduction = "exact",
        replica_hop: _hsdp.ReplicaHop | None = None,
        accumulate_on: AccumulateOn = "device",
        divide_by: DivideBy = "ranks",
        verify_every: int = 0,
        name: str | None = None,
    ) -> None:
        self._name = name or None
        self._who = who_of([name])
        self._mesh = as_mesh(
            mesh, "reducer: mesh", "it comes first, and a model goes to reducer.attach(model)"
        )
        self._closed = False
        self._wires = Wires(wire_text(reduce_dtype), wire_text(replica_dtype), replica_hop)
        options = {
            "name": "" if name is None else name,
            "reduce_dtype": wire_text(reduce_dtype),
            "replica_dtype": wire_text(replica_dtype),
            "layout": layout,
            "bucket_bytes": None if bucket_bytes is None else _whole(bucket_bytes, "bucket_bytes"),
            "missing": missing,
            "backwards": backwards,
            "accumulate_dtype": accumulate_dtype,
            "accumulate_on": accumulate_on,
            "reduction": reduction,
            "replica_hop": replica_hop,
            "divide_by": divide_by,
            "verify_every": _whole(verify_every, "verify_every"),
        }
        self._handle = _hsdp.Reducer(self._mesh._handle, options)
        self._layout: Layout = layout
        self._attachments: list[Attachment] = []
        self._is_agreed = True  # whether what is attached is known to be the same on every rank
        # Called before the ranks compare their words, which these may change.
        self._before_words = WeakCalls()
        # With this Reducer, when this rank's passes of a microbatch are over, or given up.
        self._after_passes = WeakCalls()
        self._uneven: UnevenLoop | None = None  # the loop of hsdp.uneven that is open
        self._had_batch = True  # whether this rank had one for its last microbatch
        self._pass_count = 1  # of the window that is about to end
        self._loss_scale = 1.0
        self._no_sync_depth = 0
        open_reducers.add(self)

    @property
    def mesh(self) -> Any:
        """The mesh that gradients are reduced over."""
        return self._mesh

    @property
    def name(self) -> str | None:
        """What it was called when it was made."""
        return self._name

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def layout(self) -> Layout:
        """How parameters are cut into slices: "flat", "dim0" or "whole"."""
        return self._layout

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The registered parameters, in order."""
        return tuple(Parameter(*row) for row in self._handle.parameters())

    def register(
        self,
        name: str,
        shape: int | Iterable[int],
        dtype: DtypeLike = "f32",
        reduce_dtype: DtypeLike | None = None,
        group: str | None = None,
    ) -> int:
        """Makes a parameter known; returns its index, which `gradient_ready` takes too.

        Before the first microbatch, in the same order on every rank (which the ranks compare).
        `dtype` is that of its gradients: f32, bf16, f16, f64, complex64 or complex128. Complex ones are
        reduced as their real view, of the shape with one more dimension of 2; results are that, too, and
        every slice has whole numbers. Parameters of one `group` get their sync flags together and have
        buckets of their own.
        """
        extents, text, is_complex = registered(as_shape(shape), dtype)
        wire = wire_text(reduce_dtype)
        return self._handle.register(name, extents, text, wire, group or "", is_complex)

    @hinting(REDUCER)
    def attach(
        self,
        model: torch.nn.Module,
        groups: Mapping[str, torch.nn.Module | Iterable[torch.nn.Module]] | None = None,
        keep_grads: bool = False,
        check_parameters: bool = True,
        broadcast_buffers: bool | Collection[str] = True,
    ) -> None:
        """Takes the gradients of a torch model as its backward passes produce them.

            reducer.attach(model)
            for m, batch in enumerate(microbatches):
                with reducer.microbatch(last=m == len(microbatches) - 1):
                    loss(model(batch)).backward()
            reducer.gather_gradients()
            optimizer.step()

        Registers every parameter that requires a gradient, each once (tied ones under their first
        name), in reverse order. `begin_microbatch` takes `p.grad` out, and each gradient is freed
        once it is packed. A gradient that is assigned to `p.grad` within a microbatch, without a
        backward pass, is taken by `end_microbatch`. Activation checkpointing works; with several
        backward passes in a microbatch, or reentrant checkpointing of shared parameters, make the
        Reducer with `backwards="many"`.

        The model keeps this Reducer alive until `close`, or as long as it lives itself; a copy of it,
        or what is loaded of its pickle, has no Reducer. `hsdp.torch.reducers_of(model)` finds it.

        Several models may be attached, with one call each. They share neither parameters nor names:
        `torch.nn.ModuleDict({"critic": model})` gives the names of a model a prefix.

        - `groups`: name -> a module, or several. Their parameters form a group, whose sync flags
          are set apart, but for those of modules within that have a group of their own: as FSDP2
          treats modules that were sharded one by one.
        - `keep_grads`: `end_microbatch` puts this rank's own sum over the step's microbatches into
          `p.grad`.
        - `check_parameters`: when the first step begins, or in `prepare`, a digest of 128 bits of every
          parameter, frozen ones too, is compared over the ranks: a MismatchError on all of them names
          the first that differs. The Reducer stays usable, and asks again at the next call: after
          `hsdp.broadcast_parameters(mesh, model)` it succeeds. Once it has, nothing is compared any
          more. It reads each parameter once, where it lies (2 to 3 GB a second on a CPU core), and
          sends a short message; a world of one does neither. False: weights differ on purpose.
        - `broadcast_buffers`: when a step begins, rank 0's buffers (running statistics of BatchNorm) are
          copied to all ranks, as DistributedDataParallel does in each forward pass; so run the forward
          pass within the microbatch. Only those of modules with one that some rank has written to or
          replaced since, as torch's version counters tell; writes through `.data` do not count. A model
          with buffers costs a short message a step. Where rank 0 had no batch (`hsdp.uneven`) they are
          those of the first rank that had. On a GPU, what has changed waits for rank 0's. A
          collection has the names of buffers to leave out; False leaves out all.

        A model on the meta device is given to a `hsdp.zero.ShardedOptimizer` before the first step, which
        gives it memory and values.

        torch's optimizers and `clip_grad_norm_` skip parameters without `p.grad` in silence. From
        here on they raise UsageError for attached ones: call `gather_gradients` before (or in the
        closure that `optimizer.step` is given), or update the shards. So does `zero_grad` while
        gradients of an unfinished step are with the Reducer, a step after `zero_grad`, and clipping
        or stepping by gradients that still have a GradScaler's scale.

        Raises UsageError for parameters that are DTensors (see `hsdp.torch.replica_hook`), sparse,
        of other dtypes or on another device, and for a model in DistributedDataParallel; later for sparse
        gradients, gradients that come outside of a microbatch, and, when a step begins, for
        parameters that were added or began to require a gradient since: make another Reducer then.
        """
        make: Any = importlib.import_module("hsdp.torch.model_attachment").ModelAttachment
        attached = make(self, model, groups, bool(keep_grads), check_parameters, broadcast_buffers)
        self._attachments.append(attached)
        self._is_agreed = self._mesh.size == 1
        attached.loss_scale_set(self._loss_scale)

    def set_requires_gradient_sync(self, flag: bool, group: str | None = None) -> None:
        """False: microbatches only add into local fp32 sums; `no_sync` says so for a block."""
        self._handle.set_requires_gradient_sync(bool(flag), group)

    def no_sync(self) -> AbstractContextManager[None]:
        """`with reducer.no_sync():` as of torch's DistributedDataParallel: microbatches within only
        add into local fp32 sums, and the first one after the block sends them with its own.

            with reducer.no_sync():
                for batch in microbatches[:-1]:
                    with reducer.microbatch():
                        loss(model(batch)).backward()
            with reducer.microbatch(last=True):
                loss(model(microbatches[-1])).backward()

        The sync flags are what they were when it ends. An explicit `sync` decides within it, too;
        `last=True` is a UsageError there, as is a window. Outside a microbatch.
        """
        if self._handle.is_collecting() and not self._handle.window_open():
            raise UsageError(
                "reducer: no_sync: expected a call outside of a microbatch, got one inside; "
                "call end_microbatch() before, or pass sync=\"none\" to the microbatch"
            )
        return self._without_sync()

    @contextlib.contextmanager
    def _without_sync(self) -> Iterator[None]:
        self._no_sync_depth += 1
        try:
            yield
        finally:
            self._no_sync_depth -= 1

    def set_requires_all_reduce(self, flag: bool, group: str | None = None) -> None:
        """False: microbatches stop at the shard group. Counts where `last` is not given."""
        self._handle.set_requires_all_reduce(bool(flag), group)

    def set_partial_sync(self, sync: PartialSync) -> None:
        """What `last=False` means: "shard" reduce-scatters each microbatch, as stages 2 and 3 of
        ZeRO do; "none" keeps gradients whole and local until the step's end, as stage 1 does.
        Outside a microbatch; the same on every rank.
        """
        self._handle.set_partial_sync(sync)

    def set_gradient_divide_factor(self, factor: float | None) -> None:
        """What sums are divided by, for results and partials; None: the number of ranks that were
        summed over. Outside a microbatch, until the step's last one begins; stays until changed.
        The same on every rank.
        """
        number = None if factor is None else _number(factor, "set_gradient_divide_factor")
        self._handle.set_gradient_divide_factor(number)

    def divide_by_tokens(self, count: int) -> None:
        """For losses that are summed over tokens: says, before each microbatch of a step, how many
        this rank has in it. The numbers add up over microbatches and ranks, and their sum divides:

            reducer.divide_by_tokens(int((labels != -100).sum()))
            with reducer.microbatch(last=last):
                cross_entropy(logits, labels, reduction="sum").backward()

        So the gradient is that of the mean over all tokens of the step, however they are spread.
        Numbers that are said before the same microbatch, or window, add up. Where none were counted
        nothing is divided: a sum over no tokens is zero. Local; all ranks call it, or none. Raises UsageError
        where a factor is set, or where microbatches of the step were not counted; after a replica
        hop of this step that divides as it goes (`hsdp.quant.LocoHop`).
        """
        self._handle.divide_by_tokens(_whole(count, "divide_by_tokens"))

    def set_loss_scale(self, scale: float) -> None:
        """Divides by the loss scale in the same division. Between steps only."""
        number = _number(scale, "set_loss_scale")
        self._handle.set_loss_scale(number)
        self._loss_scale = number
        for attachment in self._attachments:
            attachment.loss_scale_set(self._loss_scale)

    def step(self) -> Step:
        """`with reducer.step():` around the microbatches of one step drops it on every rank when
        anything in the block raises; all ranks stay usable, and begin a new step.
        """
        return Step(self)

    def prepare(self) -> None:
        """Lays out buckets, takes memory and starts threads, which otherwise the first microbatch
        does. Collective; all ranks have it in the end or none, and it may be tried again.
        """
        self._handle.prepare()
        self._agree()

    # Asked until it is so, as whoever sets up does.
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

    # Before a step's first microbatch. Where attachments join, every step that this rank begins, also to
    # drop it at once, begins here: the others wait for it [Note: buffers follow rank 0].
    def _begin(self) -> None:
        self._agree()
        joining = [one for one in self._attachments if one.joins_steps]
        if not joining or self._handle.step_begun():
            return
        self._hearing_of_drops(self._handle.begin_step)
        try:
            self._after_passes(self)  # which other ranks may be in still
            for attachment in joining:
                attachment.step_began()
        except BaseException as error:
            self.abandon_step(reason_of("it could not begin:", error))
            raise

    # Around a part of a set-up: where it raises on one rank, the others get a StepAbortedError.
    @contextlib.contextmanager
    def _together(self, what: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(Error):
                self._handle.together(what, str(error) or type(error).__name__)
            raise
        self._handle.together(what, "")

    def begin_step(self) -> None:
        """Begins a step before its first microbatch, which otherwise does so; the previous result
        is over. Raises StepAbortedError when another rank dropped the step before it.
        """
        self._begin()
        self._hearing_of_drops(self._handle.begin_step)

    @hinting({})
    def microbatch(self, last: bool | None = None, sync: Sync | None = None) -> Microbatch:
        """`with reducer.microbatch(last=...):` runs `begin_microbatch` and `end_microbatch`, and
        drops the step on every rank when the block raises. `last` and `sync` as there.
        """
        return Microbatch(self, last, sync)

    @hinting({})
    def begin_microbatch(self, last: bool | None = None, sync: Sync | None = None) -> None:
        """Opens a microbatch; the previous result is over.

        `last=True` ends the step: the gradients are reduced over the replicas as well. `last=False`
        leaves it pending. Without `last` the flags decide, which by default end the step.

        `sync` says the same in full, whatever the flags: "none" adds locally, "shard"
        reduce-scatters, "all" goes over the replicas and ends the step.

        In a window (`hsdp.zero.coalesce_grad_reduction`) it only delimits: `last` and `sync` are
        ignored.
        """
        inside = self._handle.window_open()
        if self._no_sync_depth and sync is None and not inside:
            if last:
                raise UsageError(
                    "reducer: begin_microbatch: expected gradient sync on with last=True, got "
                    "it off by no_sync(); begin the last microbatch after that block"
                )
            sync = "none"
        has_batch = None if inside else self._entered_batch()
        self._begin()
        self._hearing_of_drops(
            lambda: self._handle.begin_microbatch(
                None if last is None else bool(last), sync, has_batch
            )
        )
        if not inside:
            self._had_batch = has_batch is not False
            self._began(lambda attachment: attachment.microbatch_began())

    # In a loop of hsdp.uneven: whether this rank has a batch for the microbatch that begins.
    def _entered_batch(self) -> bool | None:
        if self._uneven is None:
            return None
        self._uneven.enter()
        return self._uneven.has_batch

    def _began(self, tell: Callable[[Attachment], None]) -> None:
        for i, attachment in enumerate(self._attachments):
            try:
                tell(attachment)
            except BaseException as error:  # this one has told what it will not have
                self._handle.abandon_step(str(error))
                for before in self._attachments[:i]:
                    before.microbatch_ended(completed=False)
                for after in self._attachments[i + 1 :]:
                    after.step_dropped()
                raise

    def gradient_ready(self, parameter: str | int, gradient: Any) -> None:
        """Hands over a gradient: a NumPy array, or anything with `__dlpack__`; read-only or with
        any strides, never copied but for the packing.

        `parameter` is a name or the index from `register`. Shape and dtype are the registered
        ones. Never waits. From any thread, in any order. The gradient must not change until
        `end_microbatch` returns (a window with accumulate="grad": until that ends); it is kept alive for
        as long as it is needed. On a GPU it is read
        after what the thread's current stream has been given, and may change by what that stream is
        given after `end_microbatch` (see `Mesh.set_stream`).

        Raises UsageError for a gradient that does not fit, comes twice or is unknown; the step is
        then dropped on every rank at `end_microbatch`.
        """
        self._handle.gradient_ready(parameter, gradient)

    def end_microbatch(self) -> None:
        """Returns when every gradient is packed, not when it is reduced; on a GPU when the packing
        is enqueued.

        Raises UsageError when a gradient is missing or was wrong (the step is dropped on every
        rank), StepAbortedError when another rank dropped it.
        """
        if self._handle.window_open():
            for attachment in self._attachments:
                attachment.pass_ended()
            self._handle.end_microbatch()
        else:
            self._end(self._handle.end_microbatch)

    def _end(self, end: Callable[[], None]) -> None:
        try:
            self._take_what_is_left()
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

    # The parts of a window; hsdp.zero has the block.
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
        with contextlib.suppress(UsageError):  # of a forked child
            self._handle.leave_window(reason)
        self._ended(completed=False)

    # The step that the others may be in, which this rank may not have begun, or has dropped already.
    def _drop_step(self, reason: str, was_begun: bool) -> None:
        with contextlib.suppress(Error):
            if not was_begun:
                self._begin()
                self._handle.begin_step()
        self.abandon_step(reason)
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

    def abandon_step(self, reason: str = "it was abandoned") -> None:
        """Drops the step on every rank, in a microbatch or between two.

        This rank is idle at once, and sends zeros for what its peers still wait for. They get a
        StepAbortedError with the reason at the end of their next microbatch that sends something.
        Never raises; nothing where no step is begun, or another rank has dropped it already.
        """
        begun = self._handle.step_begun()
        collecting = self._handle.is_collecting()
        try:
            with contextlib.suppress(UsageError):  # of a forked child
                self._handle.abandon_step(str(reason))
        finally:
            if collecting:
                self._ended(completed=False)
            elif begun:
                self._step_dropped()
            if begun or collecting:
                with contextlib.suppress(Error):  # of a mesh that has failed
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

    def release_memory(self) -> None:
        """Frees what is kept for later steps: local sums, totals of groups that are reduced before a
        step's end, and memory for gradients that were gathered into `p.grad` on the host. Between
        steps; each rank for itself. They are taken again when they are needed.
        """
        self._hearing_of_drops(self._handle.release_memory)
        for attachment in self._attachments:
            attachment.release_memory()

    def finish(self) -> None:
        """Completes a step whose microbatches are pending, without fresh gradients.

        Nothing when none is pending, so it is safe to call twice.
        """
        self._before_words()
        self._hearing_of_drops(self._handle.finish)

    def discard(self) -> None:
        """Drops what is pending of a step. Nothing when nothing is."""
        self._handle.discard()
        self._step_dropped()

    def close(self) -> None:
        """Waits for own work and snapshots; then every call that reduces or reads a result is a
        UsageError.

        Safe to call twice. Arrays that `shard` returned keep their memory. A RuntimeWarning says so when
        microbatches of a step that has not ended are dropped, unless an exception is in flight or the
        mesh has failed.
        """
        drops = self._step_is_left()
        self._detach()
        self._handle.close()
        open_reducers.discard(self)
        if drops:
            warn_caller(
                f"{self._who or 'reducer'}: close: expected no step under way, got one with microbatches "
                "pending, whose gradients are dropped; end it with last=True or reducer.finish(), or drop "
                "it with reducer.discard()"
            )

    # By nobody's intention.
    def _step_is_left(self) -> bool:
        if self._closed or sys.exc_info()[0] is not None:
            return False
        try:
            return self._handle.pending() and not self._handle.failed()
        except Error:  # of a forked child
            return False

    def _is_in_step(self) -> bool:
        return self._handle.step_begun() or self._handle.step_dropped()

    def _leave(self, reason: str, grace_s: float) -> None:
        self._detach()
        self._handle.leave(reason, grace_s)
        open_reducers.discard(self)

    def _detach(self) -> None:
        self._is_agreed = True
        while self._attachments:  # what was attached last may rest on the others
            self._attachments.pop().close()
        self._closed = True

    # A copy of what holds it, or what is loaded of its pickle, has None there.
    def __reduce__(self) -> Any:
        return type(None), ()

    def __repr__(self) -> str:
        words = [] if self._name is None else [repr(self._name)]
        if self._closed:
            return f"hsdp.Reducer({', '.join([*words, 'closed'])})"
        try:
            parameters = self.parameters
            words += [
                what_is_reduced(self._attachments, parameters), self._wires.describe(parameters),
                f"layout {self._layout}", *how_even(self._handle, self._layout),
                where_it_stands(self._handle),
            ]
        except Error:  # in a forked child
            words += ["of the parent process"]
        return f"hsdp.Reducer({', '.join(words)}, {self._mesh!r})"


def _whole(value: Any, what: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise UsageError(
            f"reducer: {what}: expected a whole number, got {value!r}; pass an int"
        ) from None


def _number(value: Any, what: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UsageError(f"reducer: {what}: expected a number, got {value!r}") from None
