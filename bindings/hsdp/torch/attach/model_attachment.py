"""A model whose gradients a Reducer takes as the backward pass produces them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from hsdp import _hsdp
from hsdp.array import Array, TensorOrArray
from hsdp.attachment import Attachment
from hsdp.dtypes import registered
from hsdp.errors import UsageError
from hsdp.gradient_norm import EPSILON
from hsdp.parameter import unused_names
from hsdp.reducer import Reducer
from hsdp.torch import private_torch
from hsdp.torch.attach.buffer_sync import BufferSync
from hsdp.torch.attach.gathered_gradients import GatheredGradients
from hsdp.torch.attach.gradient_hook import GradientHook, keeping_hook, make_hook
from hsdp.torch.attach.kept_reducers import ModelReference, keep_reducer
from hsdp.torch.attach.trainable_parameters import (
    described_parameters, frozen_since, groups_by_name, require_memory, trainable_parameters,
)
from hsdp.torch.complex_values import real_view
from hsdp.torch.guards.installation import watch
from hsdp.torch.guards.watched_gradients import (
    ResultState, WatchedGradients, is_watched, require_unwatched, watched,
)


class ModelAttachment(WatchedGradients):
    """The parameters of a model, their hooks, and their `p.grad`. Made by `Reducer.attach`, which
    documents it.
    """

    def __init__(
        self,
        reducer: Reducer,
        model: torch.nn.Module,
        groups: Mapping[str, Any] | None,
        keep_grads: bool,
        check_parameters: bool,
        broadcast_buffers: bool | Collection[str],
    ) -> None:
        super().__init__(reducer, keep_grads)
        self._kind = type(model).__name__
        self._checks = check_parameters
        self._step = -1  #: the step of the last microbatch
        self._loss_scale = 1.0  #: for the next step
        parameters = trainable_parameters(model, reducer.mesh.device)
        self._model = ModelReference(model)
        follows = broadcast_buffers is not False and reducer.mesh.size > 1
        without = () if isinstance(broadcast_buffers, bool) else broadcast_buffers
        buffers = BufferSync(reducer.mesh, model, without)
        self._buffers = buffers if follows and buffers.is_needed else None
        group_of = groups_by_name(model, groups or {})
        for name, parameter in parameters:
            require_unwatched(name, parameter, reducer._attachments)
        self._require_new_names([name for name, _ in parameters], reducer._attachments)
        # A backward pass produces the last layers' gradients first.
        self._parameters = dict(reversed(parameters))
        self._names = {id(p): name for name, p in parameters}
        self._fresh: dict[str, torch.Tensor] = {}
        self._sums: dict[str, torch.Tensor] = {}
        self._gathered_gradients = GatheredGradients()
        self._hooks: dict[str, GradientHook] = {}
        self._installed: list[tuple[dict[int, Any], int]] = []  # a parameter's hooks, and which is ours
        for name, parameter in self._parameters.items():
            self._register(name, parameter, group_of.get(name, ""))
        self.install_hooks()
        watch(self)
        self._kept = [weakref.ref(kept) for kept in keep_reducer(model, reducer)]

    @property
    def model(self) -> torch.nn.Module | None:
        """The attached model, while it lives."""
        return self._model()

    def install_hooks(self) -> None:
        """Installs hooks on parameters without one: on the meta device they cannot keep one."""
        for name, parameter in self._parameters.items():
            if name not in self._hooks and not parameter.is_meta:
                self._install_hook(name, parameter)

    @property
    def parameters(self) -> Mapping[str, torch.nn.Parameter]:
        """The attached parameters, by name."""
        return self._parameters

    def loss_scale_set(self, scale: float) -> None:
        """Sets the divisor of later steps' results."""
        self._loss_scale = scale

    def describe(self) -> str:
        """The model's class."""
        return self._kind

    def description(self) -> list[str]:
        """Lines that must be equal for every rank's model when the first step begins."""
        lines = described_parameters(self._model.named_parameters()) if self._checks else []
        return lines if self._buffers is None else lines + self._buffers.description()

    @property
    def joins_steps(self) -> bool:
        """Whether there are buffers that follow rank 0's."""
        return self._buffers is not None

    def step_began(self) -> None:
        """Copies rank 0's buffers."""
        if self._buffers is not None:
            self._buffers.synchronise(self._reducer._had_batch)

    def microbatch_began(self) -> None:
        """Takes p.grad out, so that a hook sees only its own backward pass's gradient."""
        step = self._handle.step_number()
        if step != self._step:
            if self._step == -1:
                require_memory(self._model.named_parameters())
                self.install_hooks()
            self._require_same_parameters()
            self._require_same_world()
            self.result = ResultState(self._loss_scale)
        left = self._with_gradient()
        if left and not self._placed:
            self._refuse_gradient(left[0])
        if self.keeps_gradients and step == self._step:
            for name in left:
                grad = self.gradient_of(name)
                assert grad is not None
                self._sums[name] = grad
        self._step = step
        self._gathered = self._placed = False
        for name in left:
            self._parameters[name].grad = None

    def window_began(self, holds: bool, backwards: int | None) -> None:
        """Like `microbatch_began`; with `holds`, the window's gradients add up in p.grad."""
        self.microbatch_began()
        self.in_window = True
        if holds:
            self._held.begin(backwards)

    def pass_ended(self) -> None:
        """Takes gradients that no backward pass produced, before the next pass overwrites them."""
        if not self._held.active:
            self._take()

    def pass_count(self) -> int:
        """How many passes are summed in the gradients of this window."""
        return self._held.pass_count if self._held.active else 1

    def held_sum(self, name: str) -> TensorOrArray | None:
        """A copy of p.grad in a window that leaves it there."""
        grad = self._parameters[name].grad if self._held.active else None
        if grad is None:
            return None
        held = torch.from_dlpack(Array(self._handle.copy_of(real_view(grad.detach()))))
        with contextlib.suppress(UsageError):  # there is no sum before it
            held.add_(torch.from_dlpack(Array(self._handle.local_sum(name))))
        return held

    def microbatch_ending(self) -> None:
        """Takes gradients that no backward pass produced: those that are now in p.grad."""
        self._held.end()
        self._take()

    def _take(self) -> None:
        for name in self._with_gradient():
            parameter = self._parameters[name]
            grad = parameter.grad
            assert grad is not None
            if grad.is_cuda:  # the current stream frees it, whichever stream made it
                grad.record_stream(torch.cuda.current_stream(grad.device))
            try:
                self._hooks[name](parameter)
            except UsageError as error:
                self._handle.reject_gradient(str(error))

    def microbatch_ended(self, completed: bool) -> None:
        """Everything is packed, or the step was dropped. With keep_grads, puts the sums into p.grad."""
        self._leave_window()
        if not completed:
            self._clear()
        elif self.keeps_gradients:
            self._handle.wait_packed()  # adds to sums that are being packed
            for name, parameter in self._parameters.items():
                grad = self._sums.get(name)
                fresh = self._fresh.get(name)
                if grad is not None and fresh is not None:
                    grad += fresh
                parameter.grad = fresh if grad is None else grad
            self._unused = {n for n, p in self._parameters.items() if p.grad is None}
            self._placed = True
        self._fresh.clear()
        self._sums.clear()

    def step_dropped(self) -> None:
        """Discards pending gradients and local sums."""
        if self.keeps_gradients or self.in_window:
            self._clear()
        self._leave_window()

    def _leave_window(self) -> None:
        self._held.end()
        self.in_window = False

    def explain(self, error: UsageError) -> UsageError:
        """Explains a missing gradient by a frozen parameter."""
        return frozen_since(self._parameters, error)

    def gather_gradients(self) -> bool:
        """Sets every p.grad to the whole mean gradient. Returns whether there was any."""
        self._unused = unused_names(self._handle, "gather_gradients")
        grads = {
            name: self._gathered_gradients.take(name, p)
            for name, p in self._parameters.items()
            if name not in self._unused
        }
        whole = {
            name: g if g.is_contiguous() else torch.empty(g.shape, dtype=g.dtype, device=g.device)
            for name, g in grads.items()
        }
        self._handle.gather_gradients(whole)
        for name, parameter in self._parameters.items():
            grad = grads.get(name)
            if grad is not None and whole[name] is not grad:
                grad.copy_(whole[name])
            parameter.grad = grad
        self._placed = self._gathered = True
        self.result.gathered()
        return bool(grads)

    def clipping(self, caller: str) -> None:
        """Raises UsageError if clipping would be wrong: part of the result is scaled or clipped."""
        if self.has_result():
            unused = unused_names(self._handle, "clip_grad_norm_") if self.result.scale is not None else ()
            used = [name for name in self._parameters if name not in unused]
            self.result.require_unscaled(caller, used, divided=True)
            if self._gathered:
                self.result.require_unclipped(caller, used)

    def release_memory(self) -> None:
        """Frees gathered gradients."""
        self._gathered_gradients.release()

    def clipped(self, norm: Any, max_norm: float) -> None:
        """The result was scaled to that norm: scales what was gathered of it, too."""
        grads = [p.grad for p in self._parameters.values() if p.grad is not None]
        if not self._gathered or not grads:
            return
        grads = [real_view(g.conj() if g.is_conj() else g) for g in grads]  # over the original memory
        norm = torch.as_tensor(norm, device=grads[0].device, dtype=torch.float64)
        factor = max_norm / (norm + EPSILON)
        factor = torch.where(factor < 1, factor, 1.0)
        wide = [grad for grad in grads if grad.dtype is torch.float64]
        narrow = [grad for grad in grads if grad.dtype is not torch.float64]
        for part, by in ((wide, factor), (narrow, factor.float())):
            if part:
                private_torch.foreach_mul_(part, by)

    def gather_parameters(self) -> None:
        """Completes every parameter after this rank has updated its own slice."""
        whole = {name: p.detach().contiguous() for name, p in self._parameters.items()}
        self._handle.gather_parameters(whole)
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if not parameter.is_contiguous():
                    parameter.copy_(whole[name])

    def close(self) -> None:
        """Removes the hooks. Gradients stay in place."""
        watched.discard(self)
        self._remove_hooks()
        for kept in self._kept:
            place = kept()
            if place is not None:
                place.reducers.remove(self._reducer)
        self._kept = []

    # Parameters may outlive their model and an unclosed Reducer; the hooks must not.
    def __del__(self) -> None:
        self._remove_hooks()

    # Does not use torch's handles: the garbage collector clears their weak references first.
    def _remove_hooks(self) -> None:
        for hooks, number in getattr(self, "_installed", ()):
            hooks.pop(number, None)
        self._installed = []

    def _with_gradient(self) -> list[str]:
        return _hsdp.names_with_gradient(self._parameters)

    def _clear(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None
        self._placed = False

    # Called before anything is registered, so the Reducer stays as it was.
    def _require_new_names(self, names: Iterable[str], others: Iterable[Attachment]) -> None:
        for other in others:
            for name in names:
                if name in other.parameter_names():
                    raise UsageError(
                        "reducer: attach: expected names that nothing attached has, got "
                        f"'{name}' of {self.describe()} and of {other.describe()}, which was "
                        'attached before; attach torch.nn.ModuleDict({"prefix": model}) to give '
                        "one of them other names"
                    )

    def _refuse_gradient(self, name: str) -> NoReturn:
        raise UsageError(
            f"reducer: begin_microbatch: expected no gradient in '{name}' yet, got one "
            "that was put there outside of a microbatch and would be lost; produce it "
            "within the microbatch, or drop it with zero_grad(set_to_none=True)"
        )

    # A parameter added or unfrozen since would be trained with only this rank's gradients.
    def _require_same_parameters(self) -> None:
        names = self._names
        for _, module in self._model.named_modules():
            for p in private_torch.parameters_of(module).values():
                if p is not None and id(p) not in names and p.requires_grad:
                    self._require_reduced_elsewhere(p)

    # The mesh may have been made before torch.distributed, which knows of other ranks.
    def _require_same_world(self) -> None:
        if self._reducer.mesh.size > 1 or not dist.is_initialized() or dist.get_world_size() == 1:
            return
        if self._reducer.mesh._job_size == 1:
            raise UsageError(
                "reducer: begin_microbatch: expected a mesh of the job's ranks, got one of this process "
                f"alone, while torch.distributed has {dist.get_world_size()}; make it after "
                "init_process_group, or start the ranks by hsdp_run, torchrun, mpirun or srun"
            )

    def _require_reduced_elsewhere(self, parameter: torch.Tensor) -> None:
        if is_watched(parameter):
            return
        name = next(name for name, p in self._model.named_parameters() if p is parameter)
        raise UsageError(
            "reducer: begin_microbatch: expected the parameters that were there at attach, got "
            f"'{name}', which came or began to require a gradient later and would not be reduced; "
            "make another Reducer when the model has changed"
        )

    def _register(self, name: str, parameter: torch.nn.Parameter, group: str) -> None:
        shape, dtype, is_complex = registered(tuple(parameter.shape), parameter.dtype)
        index = self._handle.register(name, shape, dtype, None, group, is_complex)
        self._indices[name] = index

    def _install_hook(self, name: str, parameter: torch.nn.Parameter) -> None:
        hook = make_hook(self._handle, self._indices[name], name, parameter, self._held, self.who)
        if self.keeps_gradients:
            hook = keeping_hook(hook, name, self._fresh)
        self._hooks[name] = hook
        number = parameter.register_post_accumulate_grad_hook(hook).id
        self._installed.append((private_torch.post_accumulate_grad_hooks(parameter), number))
