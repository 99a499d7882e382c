"""The results of a Reducer's microbatches: shards of the mean gradient, and their uses."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from hsdp import _hsdp, gradient_norm
from hsdp.array import Array, TensorOrArray
from hsdp.attachment import Attachment
from hsdp.errors import UsageError
from hsdp.framework import DeviceMesh, DTensor, of_torch
from hsdp.memory_plan import MemoryPlan
from hsdp.named_errors import naming_itself
from hsdp.options import AccumulateDtype
from hsdp.parameter import Balance, Slice, warn_of_no_gradients
from hsdp.reducer_internals import ReducerInternals
from hsdp.reducer_stats import ControlLink, ReducerStats
from hsdp.wait_table import WaitTable


@naming_itself
class ReducerResults(ReducerInternals):
    """The part of a Reducer that reads results. Use `Reducer`."""

    def shard(self, name: str) -> TensorOrArray:
        """This rank's slice of the mean gradient: fp32 (f64 for f64 gradients), writable,
        `slice(name).count` elements, on the mesh's device; for a complex parameter its real view. A
        torch tensor for a parameter of an attached torch model, otherwise an `hsdp.Array`.

        It is a view, valid until the next `begin_microbatch`; after that it holds a later step's
        content. The slices of the ranks of a shard group, joined in rank order, are the flattened
        gradient. Waits for the reduction; on a GPU only the current stream waits, and writes to the
        view precede the next step if they are on the stream that is current in its `begin_microbatch`.
        Raises UsageError while microbatches are pending.
        """
        return self._array(name, self._handle.shard(name))

    # As an array of the framework whose attachment has the parameter.
    def _array(self, name: str, memory: _hsdp.Memory) -> TensorOrArray:
        for attachment in self._attachments:
            if name in attachment.parameter_names():
                return attachment.as_array(Array(memory))
        return Array(memory)

    def shard_dtensor(self, name: str, device_mesh: DeviceMesh | None = None) -> DTensor:
        """This rank's slice of the mean gradient as the torch DTensor that `fully_shard` would produce:
        placements (Replicate(), Shard(0)), dtype as for `shard`, or complex. Needs layout "dim0".

        It shares the memory of `shard(name)` and is valid as long. Its device mesh has the ranks of
        this Reducer's mesh and needs torch.distributed on the same ranks. Pass an existing (replicate,
        shard) one, or None: the first such call on a mesh makes one (collective).

        Raises UsageError for layout "flat", for a scalar, and if torch.distributed has other ranks.
        """
        found: DTensor = of_torch("shard_dtensor")(self, name, device_mesh)
        return found

    def partial_shard(self, name: str) -> TensorOrArray:
        """A copy of this rank's slice of the pending gradients: the mean over the shard group so far, dtype and kind of
        array as for `shard`. Raises UsageError if nothing is pending.
        """
        return self._array(name, self._handle.partial_shard(name))

    def local_sum(self, name: str) -> TensorOrArray:
        """A copy of the sum of a parameter's gradients that this rank has not sent yet: undivided, of the parameter's
        full shape, dtype and kind of array as for `shard`.

        Call it in a window (`hsdp.zero.coalesce_grad_reduction`), or while microbatches with sync="none" are pending.
        Raises UsageError if there is no sum.
        """
        for attachment in self._attachments:
            if name in attachment.parameter_names():
                held = attachment.held_sum(name)
                if held is not None:
                    return held
        return self._array(name, self._handle.local_sum(name))

    def slice(self, name: str) -> Slice:
        """Where this rank's slice lies in the flattened parameter: offset and count, in elements. For a
        complex parameter in those of its real view, twice as many.

        With layouts "flat" and "whole" the first microbatch fixes it.
        """
        return Slice(*self._handle.slice(name))

    def balance(self) -> Balance:
        """How evenly the ranks share the parameters and the work of each bucket. Slices of layout
        "flat" are even; with "whole" a parameter larger than a rank's share makes them uneven.
        """
        return Balance(*self._handle.balance())

    def gather_gradients(self, arrays: Mapping[str, Any] | None = None) -> None:
        """Fills in the whole mean gradient of parameters.

        `arrays` maps names to arrays of the parameters' shapes, writable and contiguous: f32, bf16 or
        f16 (f64 for f64 gradients; for complex parameters complex, or the real view). Use the same
        names on every rank. Without `arrays`, sets the gradients of the attached models (`p.grad`).
        With missing="zero", a parameter that no rank used keeps None, and optimizers do not change it;
        a step without any gradient causes a RuntimeWarning. On the host this memory is reused in the
        next step, unless a gradient or anything made from it is still referenced; `release_memory`
        frees it.
        """
        if arrays is not None:
            self._handle.gather_gradients(dict(arrays))
            return
        had_some = [each.gather_gradients() for each in self._attached("gather_gradients")]
        if not any(had_some):
            warn_of_no_gradients(f"{self._who or 'reducer'}: gather_gradients")

    def _attached(self, call: str) -> list[Attachment]:
        if not self._attachments:
            if self._closed:
                raise UsageError(
                    f"reducer: {call}: expected an open Reducer, got a closed one; make a new one"
                )
            raise UsageError(
                f"reducer: {call}: expected arrays by name, or an attached model, got neither; "
                "pass {name: array}"
            )
        return self._attachments

    def gather_parameters(self, arrays: Mapping[str, Any] | None = None) -> None:
        """Completes whole parameters, in place, after this rank has updated its own slice.

        `arrays` maps names to arrays of the parameters' shapes and any dtype, writable and contiguous;
        use the same names and dtypes on every rank. Without it, completes those of the attached models.
        """
        if arrays is not None:
            self._handle.gather_parameters(dict(arrays))
            return
        for attachment in self._attached("gather_parameters"):
            attachment.gather_parameters()

    def grad_norm(self, norm_type: float = 2.0) -> Any:
        """The norm of the whole mean gradient over all parameters: 1, 2 or inf. Collective.

        With an attached torch model it is a 0-dimensional f64 torch tensor on the mesh's device, as
        torch's `clip_grad_norm_` returns; nothing waits for a GPU until its value is read. Otherwise it
        is a float, or on a GPU an `hsdp.Array` of one element; `float(x)` waits for it.
        """
        return _as_number(gradient_norm.norm([self], norm_type), [self])

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Any:
        """Scales the shards in place so that the norm is at most `max_norm`, and also what
        `gather_gradients` has put into `p.grad`. Returns the norm before that, like `grad_norm`.
        Collective. A NaN norm scales nothing. With `error_if_nonfinite`, a non-finite norm raises an
        `hsdp.Error` on every rank and scales nothing; on a GPU this waits for the norm.
        """
        return clip([self], max_norm, norm_type, error_if_nonfinite)

    def found_inf(self) -> bool:
        """Whether any sum of the step was non-finite on any rank. The same on all.

        Call it when the step is over: raises UsageError while microbatches are pending. Waits for a
        GPU, unlike `found_inf_tensor`.
        """
        return self._handle.found_inf()

    def found_inf_tensor(self, out: Any = None) -> Any:
        """`found_inf` as 1 or 0 in one f32 on the mesh's device, as torch.amp stores it. Collective.

        On a GPU nothing waits: the value is ready for the current stream's next work. `out`, anything
        with `__dlpack__`, receives it and is returned; by default it is a new 0-dimensional torch
        tensor. Call it between microbatches.
        """
        if out is None:
            torch = importlib.import_module("torch")
            out = torch.zeros((), dtype=torch.float32, device=self._mesh.device)
        self._handle.found_inf_word(out)
        return out

    def stats(self) -> ReducerStats:
        """Counts of collectives, bytes and memory. Works even after `close` and after an error."""
        stats = self._handle.stats()
        links = tuple(ControlLink(*link) for link in stats.pop("control_links"))
        return ReducerStats(**stats, control_links=links)

    def wait_table(self) -> WaitTable:
        """Who waited for whom in this Reducer's operations among each rank's last 1,000.

            table = reducer.wait_table()
            if table.straggler == mesh.rank:
                print(table)

        Collective, outside a microbatch, and not for each step: it waits for what is being reduced,
        measures how far the ranks' clocks are apart, and sends some KiB from each rank to rank 0.
        """
        return WaitTable(*self._handle.wait_table())

    def memory_plan(
        self, local_sums: AccumulateDtype | None = None, totals: bool = False
    ) -> MemoryPlan:
        """What this rank will hold and send, to the byte as `stats()` counts it once steps have run.
        Local, and takes no memory: call it as soon as a model is attached or parameters are registered
        (UsageError before that), and after making the ShardedOptimizer if there is one.

        - `local_sums`: the dtype of local sums, if steps have microbatches with sync="none" or windows
          in which the Reducer adds up. Default: those that backwards="many" or
          set_partial_sync("none"), so stage 1, keep.
        - `totals`: whether some groups are reduced over the replicas before the step ends.

        It leaves out what depends on the run: gradients that wait for a staging bucket
        (`retained_bytes`), copies for snapshots, and work memory for units of stage 3 that only other
        ranks ask for.
        """
        fields = self._handle.memory_plan(local_sums, totals)
        to_come = sum(optimizer._state_bytes_to_come(self) for optimizer in self._optimizers)
        fields["optimizer_bytes"] += to_come
        fields["resident_bytes"] += to_come
        return MemoryPlan(**fields)

    def save_snapshot(self, path: str | os.PathLike[str], step: int) -> None:
        """Writes this rank's file of the result (or of what is pending) into the folder `path`.

        Returns once the data is copied; the file is written in the background. `flush` waits and raises
        errors of the write, as do the next `save_snapshot` and `close`. Every rank of the mesh writes
        its own file; `hsdp_check` and `read_snapshot` read the folder. With shard_over="mesh" it is
        collective, as the replicas' parts are gathered first.
        """
        self._handle.save_snapshot(os.fspath(path), int(step))

    def save_digest(self, folder: str | os.PathLike[str], step: int) -> None:
        """Appends digests of this rank's slices of the result to its file in `folder`: 17 bytes a parameter,
        by which `hsdp_check --digest A B` compares two runs of one mesh and model step by step.

        Local. On a GPU it waits for the result. Each Reducer needs a folder of its own. A run that goes on
        from a checkpoint may go on with its folder: what it did after that step before does not count.
        """
        self._handle.save_digest(os.fspath(folder), int(step))

    def flush(self) -> None:
        """Waits until every snapshot is on disk; raises SnapshotError if one could not be written."""
        self._handle.flush()


def clip(reducers: list[Any], max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Any:
    """`clip_grad_norm_` of several."""
    for reducer in reducers:
        for attachment in reducer._attachments:
            attachment.clipping("reducer: clip_grad_norm_")
    was = gradient_norm.clip(reducers, float(max_norm), norm_type, error_if_nonfinite)
    norm = _as_number(was, reducers)
    for reducer in reducers:
        for attachment in reducer._attachments:
            attachment.clipped(norm, float(max_norm))
    return norm


# Does not wait for a GPU.
def _as_number(norm: Any, reducers: list[Any]) -> Any:
    held = Array(norm) if isinstance(norm, _hsdp.Memory) else norm
    for reducer in reducers:
        for attachment in reducer._attachments:
            return attachment.as_array(held).reshape(())
    if isinstance(norm, _hsdp.Memory) and norm.device == "cpu":
        return norm.number()
    return float(norm[0]) if isinstance(norm, np.ndarray) else held
