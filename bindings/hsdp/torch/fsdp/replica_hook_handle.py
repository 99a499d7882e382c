"""The hop between replicas for models that FSDP2 shards within each replica [Note: the hop under FSDP2]."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

from hsdp import _hsdp
from hsdp.errors import UsageError
from hsdp.keyword_hints import REPLICA_HOOK, hinting
from hsdp.mesh import Mesh, as_mesh
from hsdp.torch import private_torch
from hsdp.torch.fsdp.fsdp_parameter_group import (
    WIRES, fsdp_parameter_groups, places_within, require_usable,
)
from hsdp.torch.guards.installation import watch_hook


class ReplicaHookHandle:
    """The hooks that `replica_hook` installed on a model. One step:

        for m, batch in enumerate(microbatches):
            handle.set_requires_all_reduce(m == len(microbatches) - 1)
            loss(model(batch)).backward()
        handle.finish()
        optimizer.step()

    Every rank of the mesh calls every method, and `backward`, in the same order.
    """

    def __init__(
        self, model: torch.nn.Module, mesh: Mesh, hop: _hsdp.ReplicaHop | None, verify_every: int
    ) -> None:
        self._groups = fsdp_parameter_groups(model)
        for group in self._groups:
            require_usable(group, mesh)
        self._mesh = mesh
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._trainable = [group.trainable_ids() for group in self._groups]
        self._rows = _hsdp.RowReducer(mesh._handle, self._described(), hop, verify_every)
        self._factors: dict[int, float | None] = {}  # by group, of the stored rows
        # The backward pass and the root at whose end _end_backward is called.
        self._backward: tuple[int, int] | None = None
        self._closed = False
        for index, group in enumerate(self._groups):
            group.set_hook(functools.partial(self._in_backward, index))
        watch_hook(self)

    @property
    def mesh(self) -> Mesh:
        """The mesh whose replicas are reduced over."""
        return self._mesh

    @property
    def modules(self) -> tuple[str, ...]:
        """The FSDPModules that have a hook, as errors name them."""
        return tuple(group.name for group in self._groups)

    @property
    def carry_bytes(self) -> int:
        """The memory of sums that wait for the step's last backward pass."""
        return 0 if self._closed else self._rows.kept_bytes

    @property
    def all_reduce_count(self) -> int:
        """How often gradients of a module were reduced over the replicas."""
        return self._rows.all_reduce_count

    @property
    def replica_hop_bytes(self) -> int:
        """Bytes that the hop has sent from this rank; an all-reduce counts twice."""
        return self._rows.replica_hop_bytes

    def pending_module_of(self, parameter: torch.Tensor) -> str | None:
        """The parameter's module if it waits for the step's last backward pass; otherwise None."""
        for index, group in enumerate(self._groups):
            if not self._closed and self._rows.keeps(index) and group.holds(parameter):
                return group.name
        return None

    def set_requires_all_reduce(
        self, flag: bool, module: torch.nn.Module | None = None, recurse: bool = True
    ) -> None:
        """Call it before each backward pass: whether this is the step's last, in which its gradients
        and all earlier ones are reduced over the replicas. True until it is first called.

        With `module` it sets the flag of this FSDPModule, and with `recurse` of those within it; the
        others keep theirs, as with FSDP2's own `module.set_requires_all_reduce`. The step's last
        backward pass is then the first in which every flag is set. What was reduced over the replicas
        before is already in `.grad`, and more is added.

        Raises UsageError if the last step left something unreduced (see `finish`), and for a module
        without FSDPModules of the model. If flags differ between ranks, the next backward pass that
        reduces something raises MismatchError and drops the step.
        """
        self._require_open()
        self._end_backward()
        places = places_within(self._groups, module, recurse)
        self._rows.set_requires_all_reduce(bool(flag), places)

    def finish(self) -> None:
        """Ends the step: reduces modules that have pending gradients because they did not run in the
        last backward pass, into their parameters' `.grad`. Does nothing if there are none.

        Modules need not run on the same replicas: if one did not run, its gradient counts as zeros.
        """
        self._require_open()
        self._end_backward()
        try:
            for index, group in enumerate(self._groups):
                if self._rows.keeps(index):
                    self._require_usable(index, group.count())
        except UsageError as error:
            self._rows.abandon_step(str(error))
            raise
        for index in self._rows.begin_finish():
            group = self._groups[index]
            total = torch.empty(self._rows.count(index), device=group.device)
            self._reduce(index, None, total)
            with torch.no_grad():
                group.add_to_gradients(total)
        self._rows.end_finish()

    def discard(self) -> None:
        """Drops what is pending of a step, for example after an exception in it. Also call FSDP2's own
        `model.reset_iter_state()`; older releases of torch lack it, and their FSDPModules cannot
        continue. A rank that continues the step instead gets a StepAbortedError.
        """
        self.abandon_step("it was discarded")

    def abandon_step(self, reason: str) -> None:
        """Drops the step on all ranks, like `Reducer.abandon_step`: this rank is idle immediately, the
        others raise StepAbortedError with the reason in their next backward pass that reduces, or in
        finish(). FSDP2 itself needs all ranks of a shard group in each backward pass.

        In a backward pass that has already reduced something, it ends the mesh's world: the others wait
        for the rest of that pass.
        """
        self._require_open()
        self._leave_backward()
        self._rows.abandon_step(reason)

    def close(self) -> None:
        """Removes the hooks and drops what is pending; safe to call twice. Other calls then raise
        UsageError.
        """
        if self._closed:
            return
        self._leave_backward()
        self._rows.close()
        self._closed = True
        for group in self._groups:
            group.set_hook(None)

    # FSDP2 calls this after each reduce-scatter, with what it will add to the gradients next: the total
    # if the flag is set, otherwise zeros.
    def _in_backward(self, index: int, flat: torch.Tensor) -> None:
        reduces = self._rows.requires_all_reduce(index)
        try:
            if self._rows.begins_step:
                self._follow_frozen_parameters()
            self._require_usable(index, flat.numel())
        except UsageError as error:
            if reduces:
                self._rows.reject(str(error))
            raise
        if flat.is_cuda:  # from another stream, which must not reuse the memory before this one
            flat.record_stream(torch.cuda.current_stream(flat.device))
        if not reduces:
            self._factors[index] = self._groups[index].divide_factor
            self._rows.keep(index, flat)
            flat.zero_()
            return
        total = flat if flat.dtype == torch.float32 else torch.empty_like(flat, dtype=torch.float32)
        self._reduce(index, flat, total)
        if total is not flat:
            flat.data = total  # fp32: FSDP2 casts to the parameters' dtype, which rounds once
        # FSDP2 queues a callback for each root; ours follows that root's.
        root = self._groups[index].root
        backward = (private_torch.current_graph_task_id(), root)
        if self._backward != backward:
            self._backward = backward
            private_torch.at_end_of_backward(self._end_backward)

    def _reduce(self, index: int, flat: torch.Tensor | None, total: torch.Tensor) -> None:
        shard_size = self._mesh.shard_size if self._groups[index].sums else 1
        self._rows.reduce(index, flat, total, shard_size)

    # Called at the end of each backward pass, including inner ones that reentrant checkpointing runs.
    def _end_backward(self) -> None:
        if not self._backward_runs():
            self._rows.end_backward()

    # Called before the step is dropped, which waits for no other rank.
    def _leave_backward(self) -> None:
        if not self._backward_runs():
            self._rows.leave_backward()

    def _backward_runs(self) -> bool:
        return any(group.in_backward for group in self._groups)

    # Parameters may be frozen between two steps.
    def _follow_frozen_parameters(self) -> None:
        trainable = [group.trainable_ids() for group in self._groups]
        if trainable == self._trainable:
            return
        self._rows.set_groups(self._described())
        self._trainable = trainable

    # Raises UsageError unless `count` gradients can be added.
    def _require_usable(self, index: int, count: int) -> None:
        group = self._groups[index]
        keeps, expected, known = self._rows.keeps(index), group.count(), self._rows.count(index)
        if not count == expected == known:
            raise UsageError(
                f"replica_hook: gradients of {group.name}: expected {expected} elements, those of "
                f"all its trainable parameters, got {count} beside {known} from "
                "earlier backwards; where a backward leaves parameters of a module unused, call "
                "model.set_reduce_scatter_unused_params(True), with a torch that has it; freeze "
                "parameters between steps only"
            )
        if keeps and self._factors[index] != group.divide_factor:
            raise UsageError(
                f"replica_hook: gradients of {group.name}: expected the divide factor "
                f"{self._factors[index]} of the step's earlier backwards, got "
                f"{group.divide_factor}; call set_gradient_divide_factor between steps only"
            )

    def _described(self) -> list[dict[str, Any]]:
        return [
            {
                "name": group.name,
                "wire": WIRES[group.reduce_dtype],
                "count": group.count(),
                "parameters": group.places(self._names),
            }
            for group in self._groups
        ]

    def _require_open(self) -> None:
        if self._closed:
            raise UsageError(
                "replica_hook: expected an open handle, got a closed one; put new hooks on the "
                "model with hsdp.torch.replica_hook"
            )


@hinting(REPLICA_HOOK)
def replica_hook(
    model: torch.nn.Module, mesh: Any, hop: _hsdp.ReplicaHop | None = None, *, verify_every: int = 0
) -> ReplicaHookHandle:
    """Reduces gradients between replicas for a model that FSDP2 shards within each replica.

        shard_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))["shard"]
        fully_shard(model, mesh=shard_mesh)
        handle = hsdp.torch.replica_hook(model, hsdp.init_mesh(replicate=2, shard=2))

    FSDP2 works as before: it gathers parameters, reduce-scatters gradients over the 1-D shard mesh, and
    divides by its size. For every backward pass but a step's last, hsdp keeps the result as an fp32 sum
    per FSDPModule and gives FSDP2 zeros to add to `.grad`. In the last one it sums over the replicas,
    divides by their number (a factor set on the model replaces only that of the shard group) and
    returns the total. The total stays fp32 until FSDP2 casts it to the parameters' dtype.

    - `mesh`: an `hsdp.Mesh` (or a 2-D torch DeviceMesh) of the same ranks. Its shard groups are those
      that the model is sharded over. Do not pass the 1-D slice that `fully_shard` takes: it does not
      know the replicas.
    - `hop`: the hop between replicas, such as `hsdp.PlainHop("bf16")`; None: in the dtype of FSDP2's
      reduce-scatter. Sums are always fp32.
    - `verify_every`: in every Nth step the replicas compare the bits of their totals. A difference raises
      a `MismatchError` with the parameter and the ranks, in `finish` or, without it, in the next step's
      backward pass. 0: never.

    Call it after the last `fully_shard`, on every rank. The replicas must hold the same weights, as for
    FSDP2's own HSDP; nothing compares them. Returns the handle, which is told which backward pass is the
    last.

    Raises UsageError for a model without FSDPModules, with a 2-D mesh, on other ranks or another device
    than the mesh, or with an existing hook; MismatchError if the ranks' models differ.
    """
    if hop is not None and not isinstance(hop, _hsdp.ReplicaHop):
        raise UsageError(
            "replica_hook: hop: expected an hsdp.ReplicaHop or None, got an object of type "
            f"{type(hop).__name__}; take hsdp.PlainHop('bf16')"
        )
    _refuse_slice(mesh)
    if not isinstance(verify_every, int):
        raise UsageError(
            f"replica_hook: verify_every: expected a whole number, got {verify_every!r}; pass an int"
        )
    return ReplicaHookHandle(model, as_mesh(mesh, "replica_hook: mesh", _ORDER), hop, verify_every)


_ORDER = "the model comes first: hsdp.torch.replica_hook(model, mesh)"


# A mesh of one replica is fine if there is only one.
def _refuse_slice(mesh: Any) -> None:
    ranks = getattr(mesh, "mesh", None)
    if not isinstance(ranks, torch.Tensor) or ranks.ndim != 1 or not dist.is_initialized():
        return
    if ranks.numel() < dist.get_world_size():
        raise UsageError(
            "replica_hook: mesh: expected replicas and shards, got a one-dimensional DeviceMesh of "
            f"{ranks.numel()} of {dist.get_world_size()} ranks, whose gradients would not be "
            "reduced over the replicas; pass the two-dimensional mesh that it is a slice of"
        )
