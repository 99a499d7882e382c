"""The hop between replicas for models that FSDP2 shards within each replica."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable

from hsdp import _hsdp
from hsdp.errors import MismatchError, UsageError
from hsdp.mesh import Mesh, as_mesh
from hsdp.torch import unreduced_gradient_guard
from hsdp.torch.fsdp_parameter_group import fsdp_parameter_groups, places_within
from hsdp.torch.hook_requirements import WIRES, require_same_model, require_usable
from hsdp.torch.shard_carry import ShardCarry


class ReplicaHookHandle:
    """The hooks that `replica_hook` put on a model. One step:

        for m, batch in enumerate(microbatches):
            handle.set_requires_all_reduce(m == len(microbatches) - 1)
            loss(model(batch)).backward()
        handle.finish()
        optimizer.step()

    Every method is called by every rank of the mesh in the same order, as is `backward`.
    """

    def __init__(self, model: torch.nn.Module, mesh: Mesh, hop: _hsdp.ReplicaHop | None) -> None:
        groups = fsdp_parameter_groups(model)
        for group in groups:
            require_usable(group, mesh)
        self._mesh = mesh
        self._reduction = _hsdp.ReplicaReduction(mesh._handle, hop)
        self._alone = mesh.replicate_size == 1
        self._carries = [ShardCarry(i, group) for i, group in enumerate(groups)]
        require_same_model(groups, mesh, self._reduction, hop)
        self._flags = [True] * len(groups)
        self._call_count = 0  # of set_requires_all_reduce, in this step
        self._agreed = False  # that all ranks are in a backward that goes over the replicas
        self._backward_over = False  # that one
        self._posted: str | None = None
        self._microbatch_count = 1
        self._unsettled = False  # the hop has not been told how the last step ended
        self._closed = False
        for carry in self._carries:
            carry.group.set_hook(functools.partial(self._reduce_in_backward, carry))
        unreduced_gradient_guard.watch_hook(self)

    @property
    def mesh(self) -> Mesh:
        """The mesh whose replicas are reduced over."""
        return self._mesh

    @property
    def modules(self) -> tuple[str, ...]:
        """The FSDPModules that have a hook, as they are called in errors."""
        return tuple(carry.group.name for carry in self._carries)

    @property
    def carry_bytes(self) -> int:
        """The memory of what waits for the step's last backward."""
        totals = [carry.total for carry in self._carries]
        return sum(4 * total.numel() for total in totals if total is not None)

    @property
    def all_reduce_count(self) -> int:
        """How often gradients of a module went over the replicas."""
        return self._reduction.all_reduce_count

    def pending_module_of(self, parameter: torch.Tensor) -> str | None:
        """The module of the parameter when it waits for the step's last backward; else None."""
        for carry in self._carries:
            if carry.total is not None and carry.group.holds(parameter):
                return carry.group.name
        return None

    def set_requires_all_reduce(
        self, flag: bool, module: torch.nn.Module | None = None, recurse: bool = True
    ) -> None:
        """Before each backward: whether it is the step's last, whose gradients go over the replicas
        with all that came before. True until it is first called.

        With `module` the flag is that of this FSDPModule, and with `recurse` of those within it;
        the others keep theirs, as with FSDP2's own `module.set_requires_all_reduce`. The step's
        last backward is then the first in which every flag is set; what went over the replicas
        before is in `.grad` already, and more is added.

        Raises UsageError when the last step left something unreduced (see `finish`), and for a
        module without FSDPModules of the model; MismatchError when flags differ between ranks.
        """
        self._require_open()
        if self._agreed:
            self._end_backward()
        for place in places_within([c.group for c in self._carries], module, recurse):
            self._flags[place] = bool(flag)
        self._call_count += 1
        if module is not None:
            self._collect()  # what was posted has other flags
        elif flag and not self._alone and self._posted is None:
            self._post()

    def finish(self) -> None:
        """Ends the step: reduces modules that have gradients pending because they did not run in
        the last backward, into their parameters' `.grad`. Nothing where none has.

        Modules need not run on the same replicas: where one did not, its gradient counts as zeros.
        """
        self._require_open()
        self._collect()
        counts = self._pending_counts()
        for carry in self._carries:
            if counts[carry.index] == 0:
                continue
            carry.require_usable(carry.group.count())
            self._microbatch_count = max(counts[carry.index], self._call_count)
            total = carry.take()
            self._reduce(carry, total)
            with torch.no_grad():
                carry.group.add_to_gradients(total)
        if self._unsettled:
            bad = "1" in self._reduction.exchange(str(int(self._reduction.nonfinite)))
            self._settle(not bad)
        self._end_step()

    def discard(self) -> None:
        """Drops what is pending of a step, as after an exception in it. On every rank, beside
        FSDP2's own `model.reset_iter_state()`.
        """
        self._require_open()
        for carry in self._carries:
            carry.drop()
        self._end_step()

    def close(self) -> None:
        """Takes the hooks out and drops what is pending; safe to call twice. Other calls are a
        UsageError from here on.
        """
        self._closed = True
        for carry in self._carries:
            carry.drop()
            carry.group.set_hook(None)
        self._carries = []

    # FSDP2 calls this after each reduce-scatter, with what it will add to the gradients next: the
    # total where the flag is set, else nothing.
    def _reduce_in_backward(self, carry: ShardCarry, flat: torch.Tensor) -> None:
        carry.require_usable(flat.numel())
        if flat.is_cuda:  # made on another stream, which must not reuse the memory before this one
            flat.record_stream(torch.cuda.current_stream(flat.device))
        if not self._flags[carry.index]:
            total = carry.add(flat)
            carry.keep(total.clone() if total is flat else total)
            flat.zero_()
            return
        self._agree()
        total = carry.add(flat)
        self._reduce(carry, total)
        carry.drop()
        if total is not flat:
            flat.data = total  # fp32: FSDP2 casts to the parameters' dtype, which rounds once

    def _reduce(self, carry: ShardCarry, total: torch.Tensor) -> None:
        if self._alone:
            return
        group = carry.group
        self._unsettled = True
        self._reduction.reduce(total, {
            "bucket": carry.index,
            "wire": WIRES[group.reduce_dtype],
            "shard_size": self._mesh.shard_size if group.sums else 1,
            "microbatch_count": self._microbatch_count,
        })

    # Before anything is summed, all ranks must be in the same backward of the same step: ranks that
    # count differently would add sums of different microbatches.
    def _agree(self) -> None:
        if self._agreed and self._backward_over:
            self._end_backward()
        if self._agreed:
            return
        if not self._alone:
            if self._posted is None:
                self._post()
            self._collect()
        self._agreed = True
        self._backward_over = False
        Variable._execution_engine.queue_callback(self._note_end_of_backward)

    def _note_end_of_backward(self) -> None:
        self._backward_over = True

    def _post(self) -> None:
        # One reduce-scatter may carry several microbatches (set_requires_gradient_sync).
        pending = max(carry.microbatch_count for carry in self._carries)
        self._posted = self._reduction.post(json.dumps({
            "call": "a step's last backward",
            "calls": self._call_count,
            "flags": self._flags,
            "microbatches": max(1 + pending, self._call_count),
            "nonfinite": self._reduction.nonfinite,
        }))

    def _collect(self) -> None:
        if self._posted is None:
            return
        key, self._posted = self._posted, None
        words = self._agreed_words(self._reduction.collect(key))
        self._require_same_flags([word["flags"] for word in words])
        self._microbatch_count = max(word["microbatches"] for word in words)
        if self._unsettled:
            self._settle(not any(word["nonfinite"] for word in words))

    # Per group, on the rank that has most: how many microbatches are pending.
    def _pending_counts(self) -> list[int]:
        own = [0 if c.total is None else c.microbatch_count for c in self._carries]
        if self._alone:
            return own
        word = json.dumps({"call": "finish()", "calls": self._call_count, "pending": own})
        words = self._agreed_words(self._reduction.exchange(word))
        return [max(counts) for counts in zip(*(word["pending"] for word in words), strict=True)]

    # The hop may keep state that depends on whether the step's sums were finite on all ranks.
    def _settle(self, clean: bool) -> None:
        self._reduction.end_step(clean)
        self._unsettled = False

    def _end_backward(self) -> None:
        if all(self._flags):
            self._end_step()
        self._agreed = False

    def _end_step(self) -> None:
        pending = [carry.group.name for carry in self._carries if carry.total is not None]
        if pending:
            raise UsageError(
                f"replica_hook: expected no gradients left over from the last step, got those of "
                f"{', '.join(pending)}, which did not run in its last backward; call "
                "handle.finish() before optimizer.step()"
            )
        self._agreed = False
        self._call_count = 0

    # What all ranks said, when they are at the same point of the same step.
    def _agreed_words(self, texts: list[str]) -> list[dict[str, Any]]:
        words: list[dict[str, Any]] = [json.loads(text) for text in texts]
        own = f"on rank {self._mesh.rank}"
        self._require_same([word["call"] for word in words], lambda here, there, rank: (
            f"all ranks in the same call, got {here} {own} and {there} on {rank}; call "
            "set_requires_all_reduce with the same flags, and finish(), on all of them"
        ))
        self._require_same([word["calls"] for word in words], lambda here, there, rank: (
            "the same number of backwards on all ranks, got "
            f"{here} calls of set_requires_all_reduce {own} and {there} on {rank}; call it once "
            "before each backward"
        ))
        return words

    def _require_same_flags(self, flags: list[list[bool]]) -> None:
        def describe(here: list[bool], there: list[bool], rank: str) -> str:
            pairs = enumerate(zip(here, there, strict=True))
            place = next(place for place, (one, other) in pairs if one != other)
            return (
                "the same all-reduce flags on all ranks, got "
                f"{here[place]} for {self.modules[place]} on rank {self._mesh.rank} and "
                f"{there[place]} on {rank}; call set_requires_all_reduce alike on all of them"
            )

        self._require_same(flags, describe)

    # `describe(here, there, "rank r (of n)")` is what was expected and what came.
    def _require_same(
        self, values: list[Any], describe: Callable[[Any, Any, str], str]
    ) -> None:
        own = values[self._mesh.rank]
        for rank, other in enumerate(values):
            if other != own:
                text = describe(own, other, f"rank {rank} (of {self._mesh.size})")
                raise MismatchError(
                    f"replica_hook: step: expected {text}", [self._mesh.world.ranks[rank]]
                )

    def _require_open(self) -> None:
        if self._closed:
            raise UsageError(
                "replica_hook: expected an open handle, got a closed one; put new hooks on the "
                "model with hsdp.torch.replica_hook"
            )


def replica_hook(
    model: torch.nn.Module, mesh: Any, hop: _hsdp.ReplicaHop | None = None
) -> ReplicaHookHandle:
    """Gives a model that FSDP2 shards within each replica its hop between replicas.

        shard_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))["shard"]
        fully_shard(model, mesh=shard_mesh)
        handle = hsdp.torch.replica_hook(model, hsdp.init_mesh(replicate=2, shard=2))

    FSDP2 goes on as it is: it gathers parameters and reduce-scatters gradients over the 1-D shard
    mesh, and divides by its size. Of every backward but a step's last, hsdp keeps the result as an
    fp32 sum per FSDPModule and gives FSDP2 zeros to add to `.grad`; in the last it sums over the
    replicas, divides by their number (a factor set on the model replaces that of the shard group
    only) and gives the total. It stays fp32 until FSDP2 casts it to the parameters' dtype.

    - `mesh`: an `hsdp.Mesh` (or a 2-D torch DeviceMesh) of the same ranks: its shard groups are
      those that the model is sharded over. Not the 1-D slice that `fully_shard` takes: it does not
      know the replicas.
    - `hop`: what goes between replicas: `hsdp.PlainHop("bf16")` and the like; None: the dtype of
      FSDP2's reduce-scatter. Sums are fp32 in any case.

    Call it after the last `fully_shard`, on every rank. The replicas must hold the same weights, as
    for FSDP2's own HSDP. Returns the handle that says which backward is the last.

    Raises UsageError for a model without FSDPModules, one on a 2-D mesh, on other ranks or another
    device than the mesh, or with a hook already; MismatchError when the ranks' models differ.
    """
    if hop is not None and not isinstance(hop, _hsdp.ReplicaHop):
        raise UsageError(
            "replica_hook: hop: expected an hsdp.ReplicaHop or None, got an object of type "
            f"{type(hop).__name__}; take hsdp.PlainHop('bf16')"
        )
    _refuse_slice(mesh)
    return ReplicaHookHandle(model, as_mesh(mesh), hop)


# A mesh of one replica is fine when that is all there is.
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
