"""What a Reducer's microbatches left: shards of the mean gradient, and what becomes of them."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from hsdp import _hsdp, gradient_norm
from hsdp.array import Array, TensorOrArray
from hsdp.errors import UsageError
from hsdp.named_errors import naming, naming_itself, who_of
from hsdp.parameter import Balance, Slice, warn_of_no_gradients
from hsdp.reducer_stats import ControlLink, ReducerStats

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    from hsdp.attachment import Attachment
    from hsdp.mesh import Mesh
    from hsdp.reducer import Reducer


@naming_itself
class ReducerResults:
    """The half of a Reducer that reads results. `Reducer` is the class to use."""

    _mesh: Mesh
    _handle: _hsdp.Reducer
    _attachments: list[Attachment]
    _closed: bool
    _who: str  # in errors

    def shard(self, name: str) -> TensorOrArray:
        """This rank's slice of the mean gradient: fp32 (f64 of f64 gradients), writable, `slice(name).count`
        elements, on the mesh's device; of a complex parameter its real view. A torch tensor for a
        parameter of an attached torch model, else an `hsdp.Array`.

        A view, valid until the next `begin_microbatch`, after which its content is that of a later
        step. Slices of the ranks of a shard group, joined in rank order, are the flattened
        gradient. Waits for the reduction; on a GPU the current stream does, and what is written to
        the view comes before the next step on the current stream of its `begin_microbatch`.
        UsageError while microbatches are pending.
        """
        return self._array(name, self._handle.shard(name))

    # As whoever attached the parameter has arrays.
    def _array(self, name: str, memory: _hsdp.Memory) -> TensorOrArray:
        for attachment in self._attachments:
            if name in attachment.parameter_names():
                return attachment.as_array(Array(memory))
        return Array(memory)

    def shard_dtensor(self, name: str, device_mesh: DeviceMesh | None = None) -> DTensor:
        """This rank's slice of the mean gradient as the torch DTensor that users of `fully_shard`
        would have: placements (Replicate(), Shard(0)), dtype as of `shard`, or complex. Needs layout
        "dim0".

        The same memory as `shard(name)`, valid as long. Its device mesh has the ranks of this
        Reducer's mesh and needs torch.distributed on the same ranks: pass the (replicate, shard)
        one that there is, or None, and the first such call on a mesh makes one (collective).

        Raises UsageError for layout "flat", a scalar, and where torch.distributed has other ranks.
        """
        module = importlib.import_module("hsdp.torch.dtensor")
        found: DTensor = module.shard_dtensor(self, name, device_mesh)
        return found

    def partial_shard(self, name: str) -> TensorOrArray:
        """A copy of this rank's slice of what is pending: the mean over the shard group so far,
        dtype as of `shard`, a torch tensor where `shard` is one. UsageError when nothing is pending.
        """
        return self._array(name, self._handle.partial_shard(name))

    def local_sum(self, name: str) -> TensorOrArray:
        """A copy of what this rank has added up of a parameter's gradients and not sent yet: dtype as of
        `shard`, whole, of its shape, not divided by anything. A torch tensor where `shard` is one.

        In a window (`hsdp.zero.coalesce_grad_reduction`), or when microbatches with sync="none" are
        pending. UsageError where nothing is added up.
        """
        for attachment in self._attachments:
            if name in attachment.parameter_names():
                held = attachment.held_sum(name)
                if held is not None:
                    return held
        return self._array(name, self._handle.local_sum(name))

    def slice(self, name: str) -> Slice:
        """Where this rank's slice lies in the flattened parameter: offset and count, in elements; of a
        complex parameter in those of its real view, twice as many.

        With layouts "flat" and "whole" it is settled by the first microbatch.
        """
        return Slice(*self._handle.slice(name))

    def balance(self) -> Balance:
        """How evenly the ranks share the parameters, and the work of each bucket. Slices of layout "flat"
        are even; with "whole" a parameter that is larger than a rank's share cannot be evened out.
        """
        return Balance(*self._handle.balance())

    def gather_gradients(self, arrays: Mapping[str, Any] | None = None) -> None:
        """Fills in the whole mean gradient of parameters.

        `arrays` are f32, bf16 or f16 (f64 of f64 gradients; of complex parameters complex, or the real
        view), writable and contiguous, of the parameters' shapes, by name; the same names on every rank.
        Without it the gradients of the attached models are set (`p.grad`); with missing="zero" that of a
        parameter which no rank used stays None, and optimizers leave it as it is; a RuntimeWarning says
        so of a step without any gradient. On the host that memory is used again in the next step, unless
        somebody keeps a gradient or anything made of it; `release_memory` frees it.
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
        """Completes whole parameters of which this rank updated its own slice, in place.

        `arrays` are writable and contiguous, of the parameters' shapes and any dtype, by name; the
        same names and dtypes on every rank. Without it those of the attached models are completed.
        """
        if arrays is not None:
            self._handle.gather_parameters(dict(arrays))
            return
        for attachment in self._attached("gather_parameters"):
            attachment.gather_parameters()

    def grad_norm(self, norm_type: float = 2.0) -> Any:
        """The norm of the whole mean gradient, over all parameters: 1, 2 or inf. Collective.

        With an attached torch model a torch tensor of no dimensions, f64, where the mesh is, as
        torch's `clip_grad_norm_` returns it; nothing waits for a GPU until it is looked at. Else a
        float, or on a GPU an `hsdp.Array` of one element, of which `float(x)` waits.
        """
        return _as_number(gradient_norm.norm([self], norm_type), [self])

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Any:
        """Scales the shards in place so that the norm is at most `max_norm`, and what
        `gather_gradients` has put into `p.grad`; returns the norm that was, as `grad_norm` does.
        Collective. By a norm that is NaN nothing is scaled. With `error_if_nonfinite` a norm that is
        not finite raises an `hsdp.Error` on every rank, and nothing is scaled; on a GPU this waits
        for it.
        """
        return _clip([self], max_norm, norm_type, error_if_nonfinite)

    def found_inf(self) -> bool:
        """Whether a sum of the step was not finite on any rank. The same answer on all.

        Ask when the step is over: a UsageError while microbatches are pending. Waits for a GPU;
        `found_inf_tensor` does not.
        """
        return self._handle.found_inf()

    def found_inf_tensor(self, out: Any = None) -> Any:
        """`found_inf` as 1 or 0 in one f32 on the mesh's device, as torch.amp keeps it. Collective.

        On a GPU nothing waits: the value is there for what the current stream is given next. `out`
        is where it goes, anything with `__dlpack__`, and is returned; without it that is a new
        torch tensor of no dimensions. Between microbatches.
        """
        if out is None:
            torch = importlib.import_module("torch")
            out = torch.zeros((), dtype=torch.float32, device=self._mesh.device)
        self._handle.found_inf_word(out)
        return out

    def stats(self) -> ReducerStats:
        """Counts of collectives, bytes and memory. Also after `close` and after an error."""
        stats = self._handle.stats()
        links = tuple(ControlLink(*link) for link in stats.pop("control_links"))
        return ReducerStats(**stats, control_links=links)

    def save_snapshot(self, path: str | os.PathLike[str], step: int) -> None:
        """Writes this rank's file of the result (or of what is pending) into the folder `path`.

        Returns when the data is copied; the file is written in the background. `flush` waits and
        raises its error, as do the next `save_snapshot` and `close`. Every rank of the mesh writes
        its own; `hsdp_check` and `read_snapshot` read the folder.
        """
        self._handle.save_snapshot(os.fspath(path), int(step))

    def flush(self) -> None:
        """Waits until every snapshot is on disk; raises SnapshotError when one could not be."""
        self._handle.flush()


def clip_grad_norm_(
    reducers: Reducer | Iterable[Reducer],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Any:
    """As `Reducer.clip_grad_norm_`, with one norm over the gradients of several Reducers of one
    device. Returns the norm that was. Collective.
    """
    listed = _listed(reducers)
    with naming(who_of(one.name for one in listed)):
        return _clip(listed, max_norm, norm_type, error_if_nonfinite)


def _listed(reducers: Any) -> list[Any]:
    listed = [reducers] if isinstance(reducers, ReducerResults) else list(reducers)
    got = "" if listed else "none; pass one or several"
    for i, one in enumerate(listed):
        if not isinstance(one, ReducerResults):
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


def _clip(reducers: list[Any], max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Any:
    for reducer in reducers:
        for attachment in reducer._attachments:
            attachment.clipping("reducer: clip_grad_norm_")
    was = gradient_norm.clip(reducers, float(max_norm), norm_type, error_if_nonfinite)
    norm = _as_number(was, reducers)
    for reducer in reducers:
        for attachment in reducer._attachments:
            attachment.clipped(norm, float(max_norm))
    return norm


# Of a GPU it is not waited for.
def _as_number(norm: Any, reducers: list[Any]) -> Any:
    held = Array(norm) if isinstance(norm, _hsdp.Memory) else norm
    for reducer in reducers:
        for attachment in reducer._attachments:
            return attachment.as_array(held).reshape(())
    if isinstance(norm, _hsdp.Memory) and norm.device == "cpu":
        return norm.number()
    return float(norm[0]) if isinstance(norm, np.ndarray) else held
