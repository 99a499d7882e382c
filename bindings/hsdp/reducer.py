"""The Reducer: takes microbatches of gradients and returns shards of their mean."""

from __future__ import annotations

import contextlib
import operator
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from hsdp import _hsdp
from hsdp.array import as_shape
from hsdp.attachment import Attachment
from hsdp.caller_warning import warn_caller
from hsdp.closing import Closing
from hsdp.dtypes import DtypeLike, registered, wire_text
from hsdp.errors import Error, UsageError, reason_of
from hsdp.framework import Module, of_torch
from hsdp.keyword_hints import REDUCER, hinting
from hsdp.log_sink import follow_logger
from hsdp.mesh import as_mesh
from hsdp.named_errors import naming, naming_itself, who_of
from hsdp.open_reducers import open_reducers
from hsdp.options import (
    AccumulateDtype, AccumulateOn, Backwards, DivideBy, Layout, Missing, PartialSync, Reduction,
    ShardOver, Sync,
)
from hsdp.parameter import Parameter
from hsdp.profiler_range import profiler_range
from hsdp.reducer_results import ReducerResults, clip
from hsdp.reducer_text import Wires, how_even, what_is_reduced, where_it_stands

@naming_itself
class Reducer(ReducerResults, Closing):
    """Reduces gradients over a mesh: each microbatch is reduce-scattered in the shard group and added
    to an fp32 carry; the step's last one is also reduced over the replicas.

        mesh = hsdp.init_mesh(replicate=2, shard=2)
        reducer = hsdp.Reducer(mesh, reduce_dtype="bf16")
        reducer.register("w", (128, 64))
        for m in range(4):
            with reducer.microbatch(last=m == 3):
                reducer.gradient_ready("w", gradient)
        mean = reducer.shard("w")

    Result = (sum over microbatches and ranks) / f. f is the number of ranks, so microbatches are
    summed, not averaged, without `divide_by`, `divide_by_tokens` or `set_gradient_divide_factor`.

    - `mesh`: an `hsdp.Mesh`, or a torch DeviceMesh.
    - `reduce_dtype`: the wire dtype in the shard group: "f32", "bf16", "f16"; None: each gradient's own
      dtype. Sums are always fp32, except that f64 gradients travel and are summed in f64.
    - `replica_dtype`: the wire dtype between replicas; None: the reduce dtype.
    - `layout`: "flat" cuts parameters into even ranges; "dim0" into rows of their first dimension;
      "whole" gives each parameter to one rank, for optimizers of whole matrices.
    - `bucket_bytes`: wire bytes that travel together. Default: 2 MiB on the host, which stays in a
      cache between packing and summing; 32 MiB on GPUs (64 KiB per rank, up to 128 MiB).
    - `missing`: "error": each parameter gets one gradient per microbatch; "zero": missing ones are 0.
    - `backwards`: "many" adds the gradients of several backward passes within a microbatch, as
      `hsdp.zero.coalesce_grad_reduction` does for a block.
    - `accumulate_dtype`: of local sums, as in `no_sync`: "f32", or "param" for the gradient's.
    - `accumulate_on`: where local sums lie: "device", or "host" for pinned memory beside a GPU. "host"
      saves GPU memory, but each gradient crosses the bus.
    - `reduction`: "exact" (the same bits everywhere), or "native" (nccl only).
    - `divide_by`: "ranks", or "ranks*microbatches" for the mean over microbatches, too; each pass of a
      window counts.
    - `shard_over`: "shard": every replica has the whole result, cut into slices over its shard group.
      "mesh": each replica has only its part of those slices, so optimizer states are cut over all ranks
      and half as much travels between replicas. With one replica both are the same.
    - `verify_every`: in every Nth step the replicas compare the bits of its result, unless it is sharded
      over the mesh, before it can be read, and all ranks the parameters that they have gathered, at stage
      3 before the next update. A difference raises a `MismatchError` with the parameter and the ranks.
      0: never.
    - `replica_hop`: another hop between replicas, such as `hsdp.quant.LocoHop`; None: the plain one.
    - `name`: for programs with several Reducers; appears in every error, in `repr` and in snapshots.
      The same on every rank.

    Every rank of the mesh calls the constructor, the first `begin_microbatch`, microbatches, `finish`,
    `discard`, `grad_norm`, `clip_grad_norm_`, `gather_*` and `close` in the same order.
    `gradient_ready` may be called from any thread; everything else from one at a time.

    Errors: UsageError for misuse on this rank. StepAbortedError if another rank dropped the step or
    failed to set up the Reducer; all stay usable. It may come as late as the call that reads the step's
    result: put `try` around `with reducer.step():` and everything that reads its result, and let every
    rank begin a new step. PeerLostError, TimeoutError and MismatchError end the Reducer. Every later
    call repeats them, except `stats`, `close` and reading the last finished result. Ctrl-C raises
    KeyboardInterrupt: in your own code within a step or a microbatch it drops the step and all ranks
    stay usable; in a wait for other ranks it ends the mesh, and they get an `hsdp.Error` that names
    this rank. In a forked child every call raises UsageError.
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
        shard_over: ShardOver = "shard",
        name: str | None = None,
    ) -> None:
        follow_logger()
        self._name = name or None
        self._who = who_of([name])
        own_mesh = as_mesh(
            mesh, "reducer: mesh", "it comes first, and a model goes to reducer.attach(model)"
        )
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
            "shard_over": shard_over,
        }
        super().__init__(own_mesh, _hsdp.Reducer(own_mesh._handle, options), shard_over)
        self._layout: Layout = layout
        self._loss_scale = 1.0
        open_reducers.add(self)

    @property
    def mesh(self) -> Any:
        """The mesh that gradients are reduced over."""
        return self._mesh

    @property
    def name(self) -> str | None:
        """Its name, as passed to the constructor."""
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
    def shard_over(self) -> ShardOver:
        """Over which ranks results are cut into slices: "shard" or "mesh"."""
        return self._shard_over

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
        """Registers a parameter; returns its index, which `gradient_ready` also accepts.

        Call it before the first microbatch, in the same order on every rank (the ranks compare it).
        `dtype` is that of its gradients: f32, bf16, f16, f64, complex64 or complex128. Complex
        gradients are reduced as their real view, whose shape has one more dimension of 2; so are
        results, and a slice never splits a number. The parameters of a `group` share their sync flags
        and have separate buckets.
        """
        extents, text, is_complex = registered(as_shape(shape), dtype)
        wire = wire_text(reduce_dtype)
        return self._handle.register(name, extents, text, wire, group or "", is_complex)

    @hinting(REDUCER)
    def attach(
        self,
        model: Module,
        groups: Mapping[str, Module | Iterable[Module]] | None = None,
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
        name), in reverse order. `begin_microbatch` takes `p.grad` out, and each gradient is freed once
        it is packed. `end_microbatch` takes a gradient that was assigned to `p.grad` within a
        microbatch without a backward pass. Activation checkpointing works. For several backward passes
        in a microbatch, or reentrant checkpointing of shared parameters, make the Reducer with
        `backwards="many"`.

        The model keeps this Reducer alive until `close`, or as long as the model lives. A copy of the
        model, or one loaded from its pickle, has no Reducer. `hsdp.torch.reducers_of(model)` finds it.

        Several models may be attached, with one call each. They must not share parameters or names:
        `torch.nn.ModuleDict({"critic": model})` gives a model's names a prefix.

        - `groups`: name -> a module, or several. Their parameters form a group with separate sync
          flags, except those of inner modules that have their own group, just as FSDP2 treats modules
          that were sharded one by one.
        - `keep_grads`: `end_microbatch` puts this rank's own sum over the step's microbatches into
          `p.grad`.
        - `check_parameters`: when the first step begins, or in `prepare`, the ranks compare a 128-bit
          digest of every parameter, including frozen ones. A MismatchError on all ranks names the first
          that differs. The Reducer stays usable and compares again at the next call, which succeeds
          after `hsdp.broadcast_parameters(mesh, model)`; after a success it never compares again. It
          reads each parameter once, in place (2 to 3 GB a second on a CPU core), and sends a short
          message; a world of one does neither. False: the weights differ on purpose.
        - `broadcast_buffers`: when a step begins, rank 0's buffers (running statistics of BatchNorm)
          are copied to all ranks, as DistributedDataParallel does in each forward pass; so run the
          forward pass within the microbatch. Only modules are copied of which some rank has written to
          or replaced a buffer, according to torch's version counters; writes through `.data` do not
          count. A model with buffers costs one short message per step. If rank 0 had no batch
          (`hsdp.uneven`), the buffers of the first rank that had one are copied. On a GPU, changed
          buffers wait for rank 0's. Pass a collection of buffer names to leave these out, or False to
          leave out all.

        If a model is on the meta device, pass it to a `hsdp.zero.ShardedOptimizer` before the first
        step, which gives it memory and values.

        torch's optimizers and `clip_grad_norm_` silently skip parameters without `p.grad`. From now on
        they raise UsageError for attached ones: call `gather_gradients` first (or in the closure passed
        to `optimizer.step`), or update the shards. `zero_grad` also raises while gradients of an
        unfinished step are with the Reducer, and so does a step after `zero_grad`, and clipping or
        stepping by gradients that still have a GradScaler's scale.

        Raises UsageError for parameters that are DTensors (see `hsdp.torch.replica_hook`), sparse, of
        other dtypes or on another device, and for a model in DistributedDataParallel. Later raises
        UsageError for sparse gradients, for gradients outside of a microbatch, and, when a step begins,
        for parameters that were added or unfrozen since: make another Reducer then.
        """
        attached: Attachment = of_torch("ModelAttachment")(
            self, model, groups, bool(keep_grads), check_parameters, broadcast_buffers
        )
        self._attachments.append(attached)
        self._is_agreed = self._mesh.size == 1
        attached.loss_scale_set(self._loss_scale)

    def set_requires_gradient_sync(self, flag: bool, group: str | None = None) -> None:
        """False: microbatches only add to local fp32 sums; `no_sync` does the same for a block."""
        self._handle.set_requires_gradient_sync(bool(flag), group)

    def no_sync(self) -> AbstractContextManager[None]:
        """`with reducer.no_sync():` works as in torch's DistributedDataParallel: microbatches within
        only add to local fp32 sums, and the first one after the block sends these with its own.

            with reducer.no_sync():
                for batch in microbatches[:-1]:
                    with reducer.microbatch():
                        loss(model(batch)).backward()
            with reducer.microbatch(last=True):
                loss(model(microbatches[-1])).backward()

        Restores the sync flags when it ends. Within it an explicit `sync` still decides; `last=True`
        and windows raise UsageError. Call it outside a microbatch.
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
        """False: microbatches stop at the shard group. Used when `last` is not given."""
        self._handle.set_requires_all_reduce(bool(flag), group)

    def set_partial_sync(self, sync: PartialSync) -> None:
        """What `last=False` means: "shard" reduce-scatters each microbatch, like stages 2 and 3 of
        ZeRO; "none" keeps gradients whole and local until the step's end, like stage 1. Call it
        outside a microbatch, the same on every rank.
        """
        self._handle.set_partial_sync(sync)

    def set_gradient_divide_factor(self, factor: float | None) -> None:
        """What sums are divided by, for results and partials; None: the number of ranks that were
        summed over. Call it outside a microbatch, before the step's last one begins, and the same on
        every rank. It stays until changed.
        """
        number = None if factor is None else _number(factor, "set_gradient_divide_factor")
        self._handle.set_gradient_divide_factor(number)

    def divide_by_tokens(self, count: int) -> None:
        """For losses that are summed over tokens: call it before each microbatch of a step with the
        number of tokens this rank has in it. The sum of these numbers over microbatches and ranks is
        the divisor:

            reducer.divide_by_tokens(int((labels != -100).sum()))
            with reducer.microbatch(last=last):
                cross_entropy(logits, labels, reduction="sum").backward()

        So the gradient is that of the mean over all tokens of the step, however they are distributed.
        Numbers for the same microbatch, or window, add up. If none were counted, nothing is divided: a
        sum over no tokens is zero. Local; either all ranks call it or none. Raises UsageError if a
        factor is set or if microbatches of the step were not counted, and after a replica hop of this
        step that divides immediately (`hsdp.quant.LocoHop`).
        """
        self._handle.divide_by_tokens(_whole(count, "divide_by_tokens"))

    def set_loss_scale(self, scale: float) -> None:
        """Also divides by the loss scale, in the same division. Call it only between steps."""
        number = _number(scale, "set_loss_scale")
        self._handle.set_loss_scale(number)
        self._loss_scale = number
        for attachment in self._attachments:
            attachment.loss_scale_set(self._loss_scale)

    def step(self) -> Step:
        """`with reducer.step():` around the microbatches of one step drops the step on every rank if
        anything in the block raises; all ranks stay usable and begin a new step.
        """
        return Step(self)

    def trace(self, path: str | os.PathLike[str] | None) -> Trace:
        """`with reducer.trace("trace.json"):` writes what all ranks did in the block into one file, on
        one clock. Perfetto (ui.perfetto.dev) and chrome://tracing open it.

            with reducer.trace("trace.json"):
                for _ in range(3):
                    train_step()

        A process of the picture is a rank. Its packs, shard hops, replica hops, gathers, updates and
        waits are slices with their bytes, step, microbatch and bucket; arrows lead from a bucket's pack to
        its hops. The file says by how much the ranks' clocks may differ. On a GPU times are the host's,
        which issues the work. All Reducers and gathers of a rank are in it, with their first 65,536
        operations; the file says how many came after them. Nothing is slower while no trace runs.

        Collective at both ends of the block, outside a microbatch, on all ranks of the mesh. Rank 0 writes
        the file, whole or not at all; what others pass as `path`, None for example, is not used. What goes
        wrong on one rank is an error on all. If the block raises, nothing is written and the exception
        continues: this rank waits for no other, and where the others reach the end of their block they
        raise StepAbortedError, which names this rank. Their steps wait for this rank as they do without a
        trace: `reducer.step()` tells them of an exception within a step. Raises UsageError if a trace is
        running or a microbatch is open, MismatchError if a rank makes another collective call instead.
        """
        return Trace(self, "" if path is None else os.fspath(path))

    def prepare(self) -> None:
        """Lays out buckets, allocates memory and starts threads; otherwise the first microbatch does.
        Collective: it succeeds on all ranks or on none, and may be tried again.
        """
        self._handle.prepare()
        self._agree()

    def begin_step(self) -> None:
        """Begins a step before its first microbatch, which otherwise does so; the previous result
        becomes invalid. Raises StepAbortedError if another rank dropped the step before it.
        """
        self._begin()
        self._hearing_of_drops(self._handle.begin_step)

    @hinting({})
    def microbatch(self, last: bool | None = None, sync: Sync | None = None) -> Microbatch:
        """`with reducer.microbatch(last=...):` calls `begin_microbatch` and `end_microbatch`, and drops
        the step on every rank if the block raises. `last` and `sync` as in `begin_microbatch`.
        """
        return Microbatch(self, last, sync)

    @hinting({})
    def begin_microbatch(self, last: bool | None = None, sync: Sync | None = None) -> None:
        """Opens a microbatch; the previous result becomes invalid.

        `last=True` ends the step: the gradients are also reduced over the replicas. `last=False` leaves
        the step pending. Without `last` the flags decide; by default they end the step.

        `sync` is explicit and overrides the flags: "none" adds locally, "shard" reduce-scatters, "all"
        also reduces over the replicas and ends the step.

        In a window (`hsdp.zero.coalesce_grad_reduction`) it only delimits a pass; `last` and `sync` are
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
        with profiler_range("hsdp:begin_microbatch"):
            self._hearing_of_drops(
                lambda: self._handle.begin_microbatch(
                    None if last is None else bool(last), sync, has_batch
                )
            )
        if not inside:
            self._had_batch = has_batch is not False
            self._began(lambda attachment: attachment.microbatch_began())

    def gradient_ready(self, parameter: str | int, gradient: Any) -> None:
        """Hands over a gradient: a NumPy array, or anything with `__dlpack__`. It may be read-only and
        have any strides; it is copied only by packing.

        `parameter` is a name or the index from `register`. Shape and dtype must be the registered ones.
        Never waits. Call it from any thread, in any order. The gradient must not change until
        `end_microbatch` returns (in a window with accumulate="grad", until the window ends); it is kept
        alive for as long as it is needed. On a GPU it is read after the work that is already on the
        thread's current stream, and work put on that stream after `end_microbatch` may change it (see
        `Mesh.set_stream`).

        Raises UsageError for a gradient that does not fit, comes twice or is unknown; `end_microbatch`
        then drops the step on every rank.
        """
        self._handle.gradient_ready(parameter, gradient)

    def end_microbatch(self) -> None:
        """Returns when every gradient is packed, not when it is reduced; on a GPU when packing is
        enqueued.

        Raises UsageError if a gradient was missing or wrong (the step is dropped on every rank), and
        StepAbortedError if another rank dropped it.
        """
        if self._handle.window_open():
            for attachment in self._attachments:
                attachment.pass_ended()
            self._handle.end_microbatch()
        else:
            self._end(self._handle.end_microbatch)

    def abandon_step(self, reason: str = "it was abandoned") -> None:
        """Drops the step on every rank, within a microbatch or between two.

        This rank is idle immediately, and sends zeros for what its peers still wait for. The peers
        raise StepAbortedError with the reason at the end of their next microbatch that sends something.
        Never raises. Does nothing if no step has begun, or if another rank has already dropped it.
        """
        self._abandon(str(reason))

    def release_memory(self) -> None:
        """Frees what is kept for later steps: local sums, totals of groups that are reduced before a
        step's end, and host memory for gradients gathered into `p.grad`. Call it between steps; not
        collective. The memory is allocated again when needed.
        """
        self._hearing_of_drops(self._handle.release_memory)
        for attachment in self._attachments:
            attachment.release_memory()

    def finish(self) -> None:
        """Completes a step whose microbatches are pending, without new gradients.

        Does nothing if none is pending, so it is safe to call twice.
        """
        self._before_words()
        with profiler_range("hsdp:finish"):
            self._hearing_of_drops(self._handle.finish)

    def discard(self) -> None:
        """Drops the pending part of a step, if any."""
        self._handle.discard()
        self._step_dropped()

    def close(self) -> None:
        """Waits for this rank's work and snapshots; afterwards every call that reduces or reads a
        result raises UsageError.

        Safe to call twice. Arrays that `shard` returned keep their memory. If it drops microbatches of
        an unfinished step, it issues a RuntimeWarning, unless an exception is in flight or the mesh has
        failed.
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

    # Whether an unfinished step is being dropped unintentionally.
    def _step_is_left(self) -> bool:
        if self._closed or sys.exc_info()[0] is not None:
            return False
        try:
            return self._handle.pending() and not self._handle.failed()
        except Error:  # in a forked child
            return False

    # A copy or an unpickled version of an object that holds it has None instead.
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

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is not None:
            self._reducer.abandon_step(reason_of("its block raised", error or kind()))


class Trace:
    """The block of `with reducer.trace(path)`: writes a trace of it, unless the block raises."""

    __slots__ = ("_path", "_reducer", "_running")

    def __init__(self, reducer: Reducer, path: str) -> None:
        self._reducer = reducer
        self._path = path
        self._running: _hsdp.Trace | None = None

    def __enter__(self) -> None:
        self._running = self._reducer._handle.trace(self._path)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        running, self._running = self._running, None
        if running is None:
            return
        if kind is None:
            running.write()
        else:
            running.leave(reason_of("its block raised", error or kind()))


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

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            self._reducer.end_microbatch()
        else:
            self._reducer.abandon_step(reason_of("its block raised", error or kind()))


def clip_grad_norm_(
    reducers: Reducer | Iterable[Reducer],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Any:
    """Like `Reducer.clip_grad_norm_`, with one norm over the gradients of several Reducers on one
    device. Returns the norm before clipping. Collective.
    """
    listed = _listed(reducers)
    with naming(who_of(one.name for one in listed)):
        return clip(listed, max_norm, norm_type, error_if_nonfinite)


def _listed(reducers: Any) -> list[Any]:
    listed = [reducers] if isinstance(reducers, Reducer) else list(reducers)
    got = "" if listed else "none; pass one or several"
    for i, one in enumerate(listed):
        if not isinstance(one, Reducer):
            got = (
                f"an object of type {type(one).__name__} as number {i}; parameters are clipped by "
                "torch.nn.utils.clip_grad_norm_"
            )
        elif any(one is before for before in listed[:i]):
            got = f"one again as number {i}; pass each once"
        if got:
            break
    if got:
        raise UsageError(f"reducer: clip_grad_norm_: expected Reducers, got {got}")
    return listed


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
