"""A torch optimizer that runs on this rank's slices of the parameters: ZeRO stages 1 and 2."""

from __future__ import annotations

import contextlib
import copy
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch

from hsdp.errors import UsageError
from hsdp.reducer import Reducer
from hsdp.reducer_results import clip_grad_norm_
from hsdp.torch.elementwise_probe import require_elementwise
from hsdp.zero.parameter_gather import ParameterGather

_owners: weakref.WeakKeyDictionary[Reducer, weakref.ref[ShardedOptimizer]] = (
    weakref.WeakKeyDictionary()
)


class _Shard:
    """This rank's slice of one parameter."""

    __slots__ = ("count", "master", "name", "offset", "own", "parameter", "reducer", "whole")

    def __init__(self, name: str, parameter: torch.nn.Parameter, reducer: Reducer) -> None:
        place = reducer.slice(name)
        data = parameter.data
        self.name = name
        self.parameter = parameter
        self.reducer = reducer
        self.offset, self.count = place.offset, place.count
        # What is gathered: the parameter's own memory, or a row-major copy of it.
        self.whole = data if data.is_contiguous() else data.contiguous()
        self.own = self.whole.view(-1)[self.offset : self.offset + self.count]
        self.master: torch.nn.Parameter  # fp32; of an f32 parameter it is `own`

    @property
    def is_copied(self) -> bool:
        return bool(self.whole.data_ptr() != self.parameter.data_ptr())


class _Masters:
    """fp32 masters of all slices of one 16-bit dtype, and what they were rounded to."""

    def __init__(self, shards: list[_Shard]) -> None:
        self._owns = [shard.own for shard in shards]
        counts = [shard.count for shard in shards]
        device, dtype = shards[0].own.device, shards[0].own.dtype
        self._rounded = torch.empty(sum(counts), dtype=dtype, device=device)
        self._now = torch.empty_like(self._rounded)
        self._now_parts = list(self._now.split(counts))
        self._read()
        self._flat = self._now.float()
        self.mark_rounded()
        for shard, part in zip(shards, self._flat.split(counts), strict=True):
            shard.master = torch.nn.Parameter(part)

    def _read(self) -> None:
        torch._foreach_copy_(self._now_parts, self._owns)

    def reread(self) -> None:
        """Takes over elements that somebody else has written since they were rounded."""
        self._read()
        written = self._now.view(torch.int16) != self._rounded.view(torch.int16)
        if self._flat.is_cuda or bool(written.any()):
            self._flat.copy_(torch.where(written, self._now.float(), self._flat))

    def mark_rounded(self) -> None:
        """The parameters have the masters' values."""
        self._rounded.copy_(self._flat)


class ShardedOptimizer(torch.optim.Optimizer):
    """Runs a torch optimizer on this rank's slices, and gathers the updated parameters.

        reducer = hsdp.Reducer(mesh)
        reducer.attach(model)
        optimizer = hsdp.zero.ShardedOptimizer(torch.optim.AdamW, model, reducer, lr=1e-3)
        with reducer.microbatch(last=True):
            loss(model(batch)).backward()
        optimizer.step()

    A `torch.optim.Optimizer` whose `param_groups` hold the model's own parameters, so schedulers
    and hooks work. States and fp32 masters are of this rank's slices alone: a shard group holds
    them once. `step` needs no `gather_gradients`.

    - `optimizer_class`, `**options`: any torch optimizer that updates each element by itself, which
      is tried out at construction; Adafactor, Muon and LBFGS are refused.
    - `params`: the attached model, its parameters, named parameters, or parameter groups.
    - `reducer`: the Reducer that the model is attached to; several of one mesh for several models.
    - `stage`: 1 keeps gradients whole and local until the step's last microbatch, 2 shards them in
      every microbatch: what `last=False` means.
    - `max_grad_norm`: clips by the norm of all gradients before each step; `grad_norm` is what it was.
    - `gather_bucket_bytes`: small parameters are gathered together in messages of at most so many.

    Parameters of 16 bits are rounded from their masters. Weights that something else has written
    since the last step (load_state_dict, `.data`, an EMA swap) are taken over at the next one. A
    step in which any rank met a value that is not finite changes nothing (`step_was_skipped`).

    `state_dict()` is local and has this rank's slices; it loads on the same rank of the same mesh.
    `full_state_dict()` is collective and loads anywhere, also into the unsharded optimizer.

    Construction and `step` are collective over the mesh. Raises UsageError for parameters that no
    Reducer takes the gradients of, a Reducer that has an optimizer already, a `step` without
    gradients of a new step, and states that do not fit; nothing is changed then. What goes wrong in
    the update itself ends the mesh: this rank keeps its error, the others get its text.
    """

    takes_shards = True  # of torch's optimizers: needs no p.grad

    def __init__(
        self,
        optimizer_class: Any,
        params: Any,
        reducer: Reducer | Iterable[Reducer],
        stage: int = 2,
        max_grad_norm: float | None = None,
        gather_bucket_bytes: int = 4 << 20,
        **options: Any,
    ) -> None:
        if stage not in (1, 2):
            _refuse("stage 1 or 2", repr(stage))
        if max_grad_norm is not None and not max_grad_norm > 0:
            _refuse("a max_grad_norm above 0, or None", repr(max_grad_norm))
        self._sliced = require_elementwise(optimizer_class, options) | {"master"}
        self._reducers = _reducers(reducer)
        self._max_grad_norm = max_grad_norm
        self._built = False
        groups = _groups(params)
        shards = [[self._shard(p) for p in _tensors(g) if p.requires_grad] for g in groups]
        self._shards = list(itertools.chain.from_iterable(shards))
        if not self._shards:
            _refuse("parameters that require gradients", "none")
        for one in self._reducers:
            owner = _owners.get(one)
            if owner is not None and owner() is not None:
                _refuse("a Reducer without an optimizer", "one that has a ShardedOptimizer already")
        self._make_masters()
        self._inner = optimizer_class(
            [
                {**_settings(group), "params": [shard.master for shard in of_group]}
                for group, of_group in zip(groups, shards, strict=True)
            ],
            **options,
        )
        super().__init__(groups, self._inner.defaults)
        self._gathers = [self._make_gather(one, gather_bucket_bytes) for one in self._reducers]
        for one in self._reducers:
            one.set_partial_sync("none" if stage == 1 else "shard")
            _owners[one] = weakref.ref(self)
        self._last_steps = [-1] * len(self._reducers)
        self._built = True
        #: the norm of all gradients before the last step clipped them
        self.grad_norm: Any = None
        #: whether the last step changed nothing, as a gradient was not finite
        self.step_was_skipped = False

    def _shard(self, parameter: torch.nn.Parameter) -> _Shard:
        for reducer in self._reducers:
            for attachment in reducer._attachments:
                name = getattr(attachment, "name_of", lambda p: None)(parameter)
                if name is not None:
                    return _Shard(name, parameter, reducer)
        _refuse(
            "parameters whose gradients the Reducer takes (reducer.attach(model))",
            f"one of shape {tuple(parameter.shape)} that it does not know",
        )

    def _make_masters(self) -> None:
        of_dtype: dict[torch.dtype, list[_Shard]] = {}
        for shard in self._shards:
            if shard.own.dtype is torch.float32:
                shard.master = torch.nn.Parameter(shard.own)
            else:
                of_dtype.setdefault(shard.own.dtype, []).append(shard)
        self._masters = [_Masters(shards) for shards in of_dtype.values()]

    def _make_gather(self, reducer: Reducer, unit_bytes: int) -> ParameterGather:
        shards = [shard for shard in self._shards if shard.reducer is reducer]
        masters = {s.name: s.master.detach() for s in shards if s.own.dtype is not torch.float32}
        return ParameterGather(reducer, {s.name: s.whole for s in shards}, masters, unit_bytes)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """At construction only: slices and gathers are laid out there."""
        if self.__dict__.get("_built", False):
            _refuse("all parameter groups at construction", "another one")
        super().add_param_group(param_group)

    def master(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """This rank's slice of a parameter in fp32, flat: what the optimizer updates. To be written
        between steps; a parameter of 16 bits follows at the next step.
        """
        return self._find(parameter).master.detach()

    @contextlib.contextmanager
    def whole_parameters(self, write_back: bool = False) -> Iterator[dict[str, torch.Tensor]]:
        """`with optimizer.whole_parameters() as whole:` has copies of all parameters in fp32, by name,
        as precise as the masters are: for an export or an average. With `write_back` what the block
        has written to them becomes the parameters' and masters' value. Collective, between steps;
        each rank makes the same changes.
        """
        with torch.no_grad():
            self._reread_written()
            whole = {s.name: self._whole(s, s.master.detach()) for s in self._shards}
        if len(whole) < len(self._shards):
            _refuse("parameters of different names in several Reducers", "a name twice")
        yield whole
        if write_back:
            with torch.no_grad():
                for shard in self._shards:
                    end = shard.offset + shard.count
                    shard.master.copy_(whole[shard.name].view(-1)[shard.offset : end])
                self._gather()

    def _find(self, parameter: torch.Tensor) -> _Shard:
        for shard in self._shards:
            if shard.parameter is parameter:
                return shard
        _refuse("a parameter that it optimizes", f"another of shape {tuple(parameter.shape)}")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates this rank's slices by the step's gradients, and gathers all parameters. The
        closure may hold the step's microbatches.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        steps = self._take_gradients()
        for step, last in zip(steps, self._last_steps, strict=True):
            if step == last:
                _refuse(
                    "gradients of a new step",
                    "those of the step before; end the step with last=True between two calls of step()",
                )
        self._last_steps = steps
        self.step_was_skipped = any([reducer.found_inf() for reducer in self._reducers])
        if not self.step_was_skipped:
            if self._max_grad_norm is not None:
                self.grad_norm = clip_grad_norm_(self._reducers, self._max_grad_norm)
            with torch.no_grad():
                for gather in self._gathers:
                    gather.fence()
                self._reread_written()
                try:
                    self._update()
                except BaseException as error:  # the others wait for this rank's slices
                    self._gathers[0].abort(f"ShardedOptimizer.step: {type(error).__name__}: {error}")
                    raise
        return loss

    def _update(self) -> None:
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update(_settings(group))
        self._inner.step()
        self._gather()
        if len(self.state) != len(self._inner.state):
            self._show_state()

    # What this rank has updated is all ranks' from here on.
    def _gather(self) -> None:
        for gather in self._gathers:
            gather.start()
        for gather in self._gathers:
            gather.wait_all()
        for masters in self._masters:
            masters.mark_rounded()
        for shard in self._shards:
            if shard.is_copied:
                shard.parameter.data.copy_(shard.whole)

    def _unscale(self, inverse_scale: torch.Tensor) -> torch.Tensor:
        """For torch's GradScaler: divides the gradients by its scale, unless the Reducer has done so
        (set_loss_scale). 1 where a gradient of any rank is not finite, and then they stay.
        """
        self._take_gradients()
        if any([reducer.found_inf() for reducer in self._reducers]):
            return torch.ones_like(inverse_scale)
        for reducer in self._reducers:
            factor = inverse_scale * reducer._loss_scale
            if float(factor) != 1.0:
                grads = [s.master.grad for s in self._shards if s.reducer is reducer]
                torch._foreach_mul_(grads, factor.to(grads[0].device))
        return torch.zeros_like(inverse_scale)

    def _take_gradients(self) -> list[int]:
        """Waits for the results, or says what is missing. Of which steps they are."""
        for reducer in self._reducers:
            first = next(shard for shard in self._shards if shard.reducer is reducer)
            reducer.shard(first.name)
        if self._shards[0].master.grad is None:  # once: a Reducer's results stay where they are
            for shard in self._shards:
                shard.master.grad = torch.from_dlpack(shard.reducer.shard(shard.name))
        return [reducer._handle.step_number() for reducer in self._reducers]

    # A master of 32 bits is the parameter's own memory.
    def _reread_written(self) -> None:
        for shard in self._shards:
            if not shard.is_copied:
                continue
            data = shard.parameter.data
            if data.shape != shard.whole.shape or data.dtype != shard.whole.dtype:
                _refuse(
                    f"'{shard.name}' as it was: {shard.whole.dtype} {tuple(shard.whole.shape)}",
                    f"{data.dtype} {tuple(data.shape)}",
                )
            shard.whole.copy_(data)
            if data.is_contiguous():  # other memory since: back to what is gathered
                shard.parameter.data = shard.whole
        for masters in self._masters:
            masters.reread()

    def _show_state(self) -> None:
        self.state.clear()
        for shard in self._shards:
            if shard.master in self._inner.state:
                state = self._inner.state[shard.master]
                if shard.own.dtype is not torch.float32:
                    state["master"] = shard.master.detach()
                self.state[shard.parameter] = state

    def state_dict(self) -> dict[str, Any]:
        """In torch's shape, with this rank's slices. Local: no other rank takes part."""
        state: dict[str, Any] = super().state_dict()
        numbers = self._numbers()
        state["slices"] = {numbers[id(s.parameter)]: [s.offset, s.count] for s in self._shards}
        return state

    def _numbers(self) -> dict[int, int]:
        """id(parameter) -> its number in a state dict."""
        every = itertools.chain.from_iterable(group["params"] for group in self.param_groups)
        return {id(parameter): i for i, parameter in enumerate(every)}

    def full_state_dict(self) -> dict[str, Any]:
        """As `state_dict()` of the unsharded optimizer, with whole states on every rank, and the
        fp32 masters of 16-bit parameters as "master". Collective.
        """
        state: dict[str, Any] = super().state_dict()
        numbers = self._numbers()
        for shard in self._shards:
            number = numbers[id(shard.parameter)]
            if number in state["state"]:
                state["state"][number] = {
                    key: self._whole(shard, value) if key in self._sliced else copy.deepcopy(value)
                    for key, value in state["state"][number].items()
                }
        return state

    def _whole(self, shard: _Shard, part: torch.Tensor) -> torch.Tensor:
        whole = torch.empty(shard.parameter.shape, dtype=part.dtype, device=part.device)
        whole.view(-1)[shard.offset : shard.offset + shard.count] = part
        shard.reducer.gather_parameters({shard.name: whole})
        return whole

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict()` gave on this rank of the same mesh, or `full_state_dict()` on
        any, or the state dict of the unsharded optimizer. Raises UsageError, and loads nothing,
        where this rank's slices are not in it.
        """
        groups = state_dict["param_groups"]
        lengths = [len(group["params"]) for group in self.param_groups]
        if [len(group["params"]) for group in groups] != lengths:
            _refuse(
                f"a state dict with parameter groups of {lengths}",
                str([len(group["params"]) for group in groups]),
            )
        keys = list(itertools.chain.from_iterable(group["params"] for group in groups))
        numbers = self._numbers()
        loaded = []
        for shard in self._shards:
            key = keys[numbers[id(shard.parameter)]]
            state = state_dict["state"].get(key, {})
            place = state_dict.get("slices", {}).get(key)
            loaded.append({k: self._own_part(shard, k, v, place) for k, v in state.items()})
        self._inner.state.clear()
        for shard, state in zip(self._shards, loaded, strict=True):
            master = state.pop("master", None)
            if master is not None:
                shard.master.detach().copy_(master)
            if state:
                self._inner.state[shard.master] = state
        for masters in self._masters:
            masters.mark_rounded()
        for group, saved in zip(self.param_groups, groups, strict=True):
            group.update(_settings(saved))
        self._show_state()

    def _own_part(self, shard: _Shard, key: str, value: Any, place: Any) -> Any:
        if key not in self._sliced:
            return value.clone() if isinstance(value, torch.Tensor) else value
        if value.shape == shard.parameter.shape:
            value = value.reshape(-1)[shard.offset : shard.offset + shard.count]
        elif list(place or ()) != [shard.offset, shard.count] or value.numel() != shard.count:
            got = "no slices" if place is None else f"elements from {place[0]}, {place[1]} of them"
            _refuse(
                f"'{key}' of '{shard.name}' whole, or this rank's elements from {shard.offset}, "
                f"{shard.count} of them",
                f"{tuple(value.shape)} and {got}; load what full_state_dict() gave, or this rank's "
                "own state_dict() of the same mesh",
            )
        return value.to(shard.master.device, torch.float32, copy=True)


# torch's own asserts that it has seen a gradient in p.grad.
_unscale_grads = torch.amp.GradScaler._unscale_grads_


def _unscale_shards(
    self: torch.amp.GradScaler,
    optimizer: torch.optim.Optimizer,
    inv_scale: torch.Tensor,
    found_inf: torch.Tensor,
    allow_fp16: bool,
) -> dict[torch.device, torch.Tensor]:
    if isinstance(optimizer, ShardedOptimizer):
        return {found_inf.device: optimizer._unscale(inv_scale).to(found_inf)}
    found: dict[torch.device, torch.Tensor] = _unscale_grads(
        self, optimizer, inv_scale, found_inf, allow_fp16
    )
    return found


torch.amp.GradScaler._unscale_grads_ = _unscale_shards


def _refuse(expected: str, got: str) -> NoReturn:
    raise UsageError(f"zero: ShardedOptimizer: expected {expected}, got {got}")


def _reducers(given: Any) -> list[Reducer]:
    listed = [given] if isinstance(given, Reducer) else list(given)
    for reducer in listed:
        if not isinstance(reducer, Reducer):
            _refuse("a Reducer or several", f"an object of type {type(reducer).__name__}")
        if reducer.mesh is not listed[0].mesh:
            _refuse("Reducers of one mesh", "several meshes")
        reducer.prepare()
    if not listed:
        _refuse("a Reducer or several", "none")
    return listed


# As torch.optim.Optimizer takes them; of a model the named parameters.
def _groups(params: Any) -> list[dict[str, Any]]:
    if isinstance(params, torch.nn.Module):
        params = params.named_parameters()
    listed = list(params)
    if not listed or not isinstance(listed[0], dict):
        listed = [{"params": listed}]
    return [{**group, "params": _as_list(group["params"])} for group in listed]


def _as_list(params: Any) -> list[Any]:
    return [params] if isinstance(params, torch.Tensor) else list(params)


def _tensors(group: dict[str, Any]) -> list[torch.nn.Parameter]:
    return [p[1] if isinstance(p, tuple) else p for p in group["params"]]


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
