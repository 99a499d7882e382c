"""The gradients of attached models, as guards see them, and the list of all that they watch.

[Note: gradients that are not what they seem]
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from typing import Any, Protocol

import torch

from hsdp import _hsdp
from hsdp.array import Array, TensorOrArray
from hsdp.errors import UsageError
from hsdp.reducer import Reducer


class ResultState:
    """For one attachment and one step: which gradients carry a loss scale, were zeroed, or were clipped
    only in p.grad.
    """

    def __init__(self, loss_scale: float) -> None:
        #: the Reducer's divisor (`set_loss_scale`)
        self.loss_scale = loss_scale
        #: the GradScaler's scale of the losses
        self.scale: torch.Tensor | None = None
        #: names whose gradients were unscaled, both in shards and p.grad
        self.unscaled: set[str] = set()
        #: the p.grad that zero_grad() left
        self.zeroed: dict[str, torch.Tensor | None] = {}
        #: names whose p.grad torch's clipping scaled, but not the shards
        self.clipped: set[str] = set()
        #: whether a GradScaler skips it
        self.skipped = False

    def gathered(self) -> None:
        """p.grad now equals the shards."""
        self.zeroed.clear()
        self.clipped.clear()

    def is_zeroed(self, name: str, grad: torch.Tensor) -> bool:
        """Whether the current p.grad is what zero_grad() left."""
        return self.zeroed.get(name) is grad

    def require_unscaled(self, caller: str, names: Iterable[str], divided: bool) -> None:
        """Raises UsageError if one of them carries a scale. `divided`: the Reducer has divided them."""
        name = next((name for name in names if name not in self.unscaled), None)
        if name is None or self.scale is None:
            return
        left = float(self.scale) / (self.loss_scale if divided else 1.0)
        if left != 1.0:
            raise UsageError(
                f"{caller}: expected gradients without a loss scale, got that of '{name}' times "
                f"{left:g}, by which a GradScaler scaled the loss; call scaler.unscale_(optimizer) "
                "before, after reducer.gather_gradients() (which a ShardedOptimizer does without), "
                "or reducer.set_loss_scale(scaler.get_scale()) before the step"
            )

    def require_unclipped(self, caller: str, names: Iterable[str]) -> None:
        """Raises UsageError if p.grad was clipped but the shards were not."""
        name = next((name for name in names if name in self.clipped), None)
        if name is not None:
            raise UsageError(
                f"{caller}: expected shards and p.grad of one scale, got the p.grad of '{name}' "
                "clipped by torch and its shard not; clip with reducer.clip_grad_norm_ alone, "
                "which does both, or call reducer.gather_gradients() anew"
            )

    def require_kept(self, caller: str, names: Iterable[str]) -> None:
        """Raises UsageError if zero_grad() was called."""
        name = next((name for name in names if name in self.zeroed), None)
        if name is not None:
            refuse_zeroed(caller, name)


def refuse_zeroed(caller: str, name: str) -> None:
    """Raises a UsageError for a gradient that is gone."""
    raise UsageError(
        f"{caller}: expected the gradient of '{name}' as the step left it, got one that was zeroed "
        "since; call zero_grad() after the optimizer's step, or begin the next step to drop this one"
    )


class WatchedGradients:
    """Where a model's gradients are, and what has happened to them since the step. A ModelAttachment is
    one, and keeps it up to date.
    """

    def __init__(self, reducer: Reducer, keep_grads: bool) -> None:
        self._own_reducer = weakref.ref(reducer)
        self._handle = reducer._handle
        #: whether p.grad, with local sums, is left to the user
        self.keeps_gradients = keep_grads
        self._parameters: dict[str, torch.nn.Parameter]
        self._names: dict[int, str]  # by id of the parameter
        self._indices: dict[str, int] = {}
        self._placed = False  #: whether we put what is in p.grad there
        self._unused: set[str] = set()  #: names whose p.grad the last step left empty
        self._gathered = False  #: whether it is the mean gradient
        #: whether a window is open at whose end gradients are reduced
        self.in_window = False
        self._held = _hsdp.HeldGradients()
        #: from the last step
        self.result = ResultState(1.0)

    @property
    def _reducer(self) -> Reducer:
        reducer = self._own_reducer()
        assert reducer is not None  # the Reducer has this
        return reducer

    @property
    def who(self) -> str:
        """The Reducer's name, for errors."""
        return self._reducer._who

    def name_of(self, parameter: torch.Tensor) -> str | None:
        """The name of an attached parameter; None for any other."""
        return self._names.get(id(parameter))

    def is_left(self, name: str) -> bool:
        """Whether the last gather left a parameter without a gradient, since no rank had one."""
        return self._gathered and name in self._unused

    def gradient_of(self, name: str) -> torch.Tensor | None:
        """The current p.grad."""
        return self._parameters[name].grad

    def shard(self, name: str) -> torch.Tensor:
        """This rank's slice of the result, flat; for a complex parameter its real view."""
        shard: torch.Tensor = self.as_array(Array(self._handle.shard(name)))
        return shard

    def found_inf_tensor(self, device: torch.device) -> torch.Tensor:
        """Whether any sum of the step was non-finite on any rank, as 1 or 0. Collective."""
        word: torch.Tensor = self._reducer.found_inf_tensor()
        return word.to(device, non_blocking=True)

    @property
    def holds_local_sums(self) -> bool:
        """Whether p.grad holds this rank's own, undivided sums."""
        return self.keeps_gradients and not self._gathered

    def has_result(self) -> bool:
        """Whether the last step is over and was not dropped."""
        handle = self._handle
        return handle.step_number() >= 0 and not handle.step_begun() and not handle.step_dropped()

    def is_collecting(self) -> bool:
        """Whether a microbatch or a window is open."""
        return self._handle.is_collecting()

    def step_begun(self) -> bool:
        """Whether a step has begun and not ended."""
        return self._handle.step_begun()

    def arrived(self, name: str) -> bool:
        """Whether that parameter's gradient was handed over in the current step."""
        return self._handle.has_gradient(self._indices[name])

    def lost(self, name: str) -> bool:
        """Whether the gradient that the step left in p.grad is gone."""
        return self._placed and self.has_result() and self.gradient_of(name) is None and (
            name not in self._unused
        )

    def parameter_names(self) -> Collection[str]:
        """The names of its parameters."""
        return self._parameters.keys()

    def as_array(self, memory: Array) -> TensorOrArray:
        """A tensor over the same memory."""
        return torch.from_dlpack(memory)

    @property
    def holds_gradients(self) -> bool:
        """Whether a window is open that adds gradients up in p.grad."""
        return self._held.active


class WatchedHook(Protocol):
    """Keeps gradients of FSDP2's modules for a replica hop."""

    @property
    def carry_bytes(self) -> int:
        """The memory of what it keeps."""
        ...

    def pending_module_of(self, parameter: torch.Tensor) -> str | None:
        """The parameter's module, if it keeps its gradient."""
        ...


#: of all Reducers of the process
watched: weakref.WeakSet[WatchedGradients] = weakref.WeakSet()
replica_hooks: weakref.WeakSet[WatchedHook] = weakref.WeakSet()


def require_unwatched(name: str, parameter: torch.Tensor, others: Iterable[object]) -> None:
    """Raises UsageError if a Reducer already takes the parameter's gradients: this one, which has
    `others`, or another.
    """
    owner = owner_of(parameter)
    if owner is None:
        return
    got = "it attached to another Reducer"
    remedy = "close that one first (hsdp.torch.reducers_of(model) has it)"
    if any(owner is other for other in others):
        got, remedy = "it attached to this Reducer already", "call attach once for each model"
    raise UsageError(
        f"reducer: attach: expected '{name}' to be attached once, got {got}; {remedy}, or join models "
        "that share parameters in a torch.nn.ModuleList"
    )


def owner_of(parameter: torch.Tensor) -> WatchedGradients | None:
    """The attachment that takes its gradients."""
    return next((a for a in watched if a.name_of(parameter) is not None), None)


def is_watched(parameter: torch.Tensor) -> bool:
    """Whether a Reducer takes its gradients."""
    return owner_of(parameter) is not None


def attached_names(parameters: Iterable[Any]) -> dict[WatchedGradients, list[str]]:
    """The names of attached parameters, by attachment."""
    found: dict[WatchedGradients, list[str]] = {}
    watching = list(watched)
    for parameter in parameters if watching else ():
        for attachment in watching:
            name = attachment.name_of(parameter)
            if name is not None:
                found.setdefault(attachment, []).append(name)
    return found
