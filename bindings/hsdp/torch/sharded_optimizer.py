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
# The last step of each Reducer that an optimizer has taken: none is taken twice.
_taken: weakref.WeakKeyDictionary[Reducer, int] = weakref.WeakKeyDictionary()


class _Shard:
    """This rank's slice of one parameter."""

    def __init__(
        self, name: str, parameter: torch.nn.Parameter, reducer: Reducer, states: frozenset[str]
    ) -> None:
        self.name = name
        self.parameter = parameter
        self.reducer = reducer
        self.states = states  # of its optimizer that have an element for each of its own
        place = reducer.slice(name)
        self.offset, self.count = place.offset, place.count
        self.master: torch.nn.Parameter  # fp32; of an f32 parameter it is `own`
        self.bind()

    def bind(self) -> None:
        """To the parameter's memory as it is now."""
        data = self.parameter.data
        # What is gathered: the parameter's own memory, or a row-major copy of it.
        self.is_copied = not data.is_contiguous()
        self.whole = data.contiguous() if self.is_copied else data
        self.own = self.whole.view(-1)[self.offset : self.offset + self.count]
        self._bound = (data.data_ptr(), data.stride())

    def is_bound(self) -> bool:
        data = self.parameter.data
        return (data.data_ptr(), data.stride()) == self._bound

    def require_same_kind(self) -> None:
        data, whole = self.parameter.data, self.whole
        if (data.shape, data.dtype, data.device) != (whole.shape, whole.dtype, whole.device):
            _refuse(
                f"'{self.name}' as it was: {whole.dtype} {tuple(whole.shape)} on {whole.device}",
                f"{data.dtype} {tuple(data.shape)} on {data.device}",
            )

    @property
    def has_own_master(self) -> bool:
        return self.own.dtype is not torch.float32


class _Masters:
    """fp32 masters of all slices of one 16-bit dtype, and what they were rounded to."""

    def __init__(self, shards: list[_Shard]) -> None:
        self._shards = shards
        self._counts = [shard.count for shard in shards]
        self._rounded = self._read()
        self._flat = self._rounded.float()
        for shard, part in zip(shards, self._flat.split(self._counts), strict=True):
            shard.master = torch.nn.Parameter(part)

    def _read(self) -> torch.Tensor:
        own = self._shards[0].own
        now = torch.empty(sum(self._counts), dtype=own.dtype, device=own.device)
        torch._foreach_copy_(list(now.split(self._counts)), [shard.own for shard in self._shards])
        return now

    def reread(self) -> None:
        """Takes over elements that somebody else has written since they were rounded."""
        now = self._read()
        written = now.view(torch.int16) != self._rounded.view(torch.int16)
        if self._flat.is_cuda or bool(written.any()):
            self._flat.copy_(torch.where(written, now.float(), self._flat))
            self._rounded = now

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
    since the last step (load_state_dict, `.data`) are taken over at the next one; `.data` that is
    other memory is, too, when it is so on every rank. A step in which any rank met a value that is
    not finite changes nothing (`step_was_skipped`). A parameter that is unused with missing="zero"
    has a gradient of zeros, and moves by momentum and weight decay.

    `state_dict()` is local and has this rank's slices; it loads on the same rank of the same mesh.
    `full_state_dict()` is collective and loads anywhere, also into the unsharded optimizer.

    Construction and `step` are collective over the mesh. Raises UsageError for parameters that no
    Reducer takes the gradients of, a Reducer that has an optimizer already (`close()` frees it), a
    `step` without gradients of a new step, and states that do not fit; nothing is changed then. What
    goes wrong in the update itself ends the mesh: this rank keeps its error, the others get its text.
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
        self._reducers = _reducers(reducer)
        self._max_grad_norm = max_grad_norm
        self._built = False
        groups = _groups(params)
        found = [[self._place_of(p) for p in _tensors(g) if p.requires_grad] for g in groups]
        self._require_parameters([owner for of_group in found for _, _, owner in of_group])
        states = [require_elementwise(optimizer_class, {**options, **_settings(g)}) for g in groups]
        for one in self._reducers:
            one.prepare()
        shards = [
            [_Shard(*place, states=of_group) for place in places]
            for places, of_group in zip(found, states, strict=True)
        ]
        self._shards = list(itertools.chain.from_iterable(shards))
        self._make_masters()
        self._inner = optimizer_class(
            [
                {**_settings(group), "params": [shard.master for shard in of_group]}
                for group, of_group in zip(groups, shards, strict=True)
            ],
            **options,
        )
        super().__init__(groups, self._inner.defaults)
        self._unit_bytes = gather_bucket_bytes
        self._gathers = [self._make_gather(one) for one in self._reducers]
        for one in self._reducers:
            one.set_partial_sync("none" if stage == 1 else "shard")
            _owners[one] = weakref.ref(self)
        self._built = True
        #: the norm of all gradients before the last step clipped them
        self.grad_norm: Any = None
        #: whether the last step changed nothing, as a gradient was not finite
        self.step_was_skipped = False

    def _place_of(self, parameter: torch.nn.Parameter) -> tuple[str, torch.nn.Parameter, Reducer]:
        for reducer in self._reducers:
            for attachment in reducer._attachments:
                name = getattr(attachment, "name_of", lambda p: None)(parameter)
                if name is not None:
                    return name, parameter, reducer
        _refuse(
            "parameters whose gradients the Reducer takes (reducer.attach(model))",
            f"one of shape {tuple(parameter.shape)} that it does not know",
        )

    def _require_parameters(self, owners: list[Reducer]) -> None:
        for reducer in self._reducers:
            if not any(owner is reducer for owner in owners):
                _refuse("parameters of every Reducer that require gradients", "a Reducer without")
            other = _owners.get(reducer)
            if other is not None and other() is not None:
                _refuse(
                    "a Reducer without an optimizer",
                    "one that has a ShardedOptimizer already; close() that first",
                )

    def close(self) -> None:
        """Frees the Reducers for another optimizer. Parameters and their states stay as they are; a
        `step` is a UsageError from here on.
        """
        for reducer in self._reducers:
            owner = _owners.get(reducer)
            if owner is not None and owner() is self:
                del _owners[reducer]

    def __deepcopy__(self, memo: Any) -> NoReturn:
        _refuse("one optimizer for a Reducer", "a copy; save its state_dict() instead")

    def __reduce__(self) -> NoReturn:
        _refuse("a state_dict() to be pickled", "the optimizer itself")

    def _make_masters(self) -> None:
        of_dtype: dict[torch.dtype, list[_Shard]] = {}
        for shard in self._shards:
            if shard.has_own_master:
                of_dtype.setdefault(shard.own.dtype, []).append(shard)
            else:
                shard.master = torch.nn.Parameter(shard.own)
        self._masters = [_Masters(shards) for shards in of_dtype.values()]

    def _make_gather(self, reducer: Reducer) -> ParameterGather:
        shards = [shard for shard in self._shards if shard.reducer is reducer]
        masters = {s.name: s.master.detach() for s in shards if s.has_own_master}
        return ParameterGather(reducer, {s.name: s.whole for s in shards}, masters, self._unit_bytes)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """At construction only: slices and gathers are laid out there."""
        if self.__dict__.get("_built", False):
            _refuse("all parameter groups at construction", "another one")
        super().add_param_group(param_group)

    def master(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """This rank's slice of a parameter in fp32, flat: what the optimizer updates. To be written
        between steps; the whole parameter follows at the next one on every rank.
        """
        with torch.no_grad():
            self._reread_written()
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
        if not write_back:
            yield whole
            return
        with self._ending_the_mesh("whole_parameters"):
            yield whole
            with torch.no_grad():
                for shard in self._shards:
                    end = shard.offset + shard.count
                    shard.master.copy_(whole[shard.name].view(-1)[shard.offset : end])
                self._gather()

    # The others wait for this rank's slices.
    @contextlib.contextmanager
    def _ending_the_mesh(self, call: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._gathers[0].abort(f"ShardedOptimizer.{call}: {type(error).__name__}: {error}")
            raise

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
        for reducer, step in zip(self._reducers, steps, strict=True):
            if _taken.get(reducer) == step:
                _refuse(
                    "gradients of a new step",
                    "those of the step before; end the step with last=True between two calls of step()",
                )
        with self._ending_the_mesh("step"), torch.no_grad():
            self.step_was_skipped = self._found_inf()
            if not self.step_was_skipped:
                self._update()
            _taken.update(zip(self._reducers, steps, strict=True))
        return loss

    def _found_inf(self) -> bool:
        return any([reducer.found_inf() for reducer in self._reducers])  # each is collective

    def _update(self) -> None:
        for gather in self._gathers:
            gather.fence()
        self._reread_written()
        if self._max_grad_norm is not None:
            self.grad_norm = clip_grad_norm_(self._reducers, self._max_grad_norm)
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update(_settings(group))
        for shard in self._shards:  # somebody may have changed or cleared them
            state = self.state.get(shard.parameter)
            if state:
                self._inner.state[shard.master] = state
            else:
                self._inner.state.pop(shard.master, None)
        self._inner.step()
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            group.update(_settings(inner))  # some count there
        for shard in self._shards:
            self.state[shard.parameter] = self._inner.state.get(shard.master, {})
        self._gather()

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
        self.step_was_skipped = self._found_inf()  # a scaler that hears of it calls no step()
        if self.step_was_skipped:
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
            owner = _owners.get(reducer)
            if owner is None or owner() is not self:
                _refuse("an open optimizer", "a closed one")
            first = next(shard for shard in self._shards if shard.reducer is reducer)
            reducer.shard(first.name)
        if self._shards[0].master.grad is None:  # once: a Reducer's results stay where they are
            for shard in self._shards:
                shard.master.grad = torch.from_dlpack(shard.reducer.shard(shard.name))
        return [reducer._handle.step_number() for reducer in self._reducers]

    # What others have written since. A master of 32 bits is the parameter's own memory.
    def _reread_written(self) -> None:
        for shard in self._shards:
            shard.require_same_kind()
        moved = [shard for shard in self._shards if not shard.is_bound()]
        for shard in moved:
            shard.bind()
            if not shard.has_own_master:
                shard.master.data = shard.own
        for shard in self._shards:
            if shard.is_copied:
                shard.whole.copy_(shard.parameter.data)
        for masters in self._masters:
            masters.reread()
        for i, reducer in enumerate(self._reducers):
            if any(shard.reducer is reducer for shard in moved):
                self._gathers[i] = self._make_gather(reducer)  # collective: moved on all ranks

    def state_dict(self) -> dict[str, Any]:
        """In torch's shape, with this rank's slices, and the fp32 masters of 16-bit parameters as
        "master". Local: no other rank takes part.
        """
        state: dict[str, Any] = super().state_dict()
        numbers = self._numbers()
        for shard in self._shards:
            if shard.has_own_master:
                number = numbers[id(shard.parameter)]
                own = state["state"].get(number, {})
                state["state"][number] = {**own, "master": shard.master.detach()}
        state["slices"] = {numbers[id(s.parameter)]: [s.offset, s.count] for s in self._shards}
        return state

    def _numbers(self) -> dict[int, int]:
        """id(parameter) -> its number in a state dict."""
        every = itertools.chain.from_iterable(group["params"] for group in self.param_groups)
        return {id(parameter): i for i, parameter in enumerate(every)}

    def full_state_dict(self) -> dict[str, Any]:
        """As `state_dict()` with whole states on every rank: what the unsharded optimizer has, and
        "master". Collective.
        """
        with torch.no_grad():
            self._reread_written()
        state = self.state_dict()
        del state["slices"]
        numbers = self._numbers()
        for shard in self._shards:
            of_shard = state["state"].get(numbers[id(shard.parameter)], {})
            for key, value in of_shard.items():
                if not isinstance(value, torch.Tensor) or value.dim() == 0:
                    continue
                if key != "master" and key not in shard.states:
                    _refuse(f"states that are numbers or slices, of '{shard.name}'", f"'{key}'")
        for shard in self._shards:
            number = numbers[id(shard.parameter)]
            if number in state["state"]:
                state["state"][number] = {
                    key: self._whole(shard, value)
                    if key == "master" or key in shard.states
                    else copy.deepcopy(value)
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
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        groups = state_dict["param_groups"]
        lengths = [len(group["params"]) for group in self.param_groups]
        if [len(group.get("params", ())) for group in groups] != lengths:
            _refuse(
                f"a state dict with parameter groups of {lengths}",
                str([len(group.get("params", ())) for group in groups]),
            )
        keys = list(itertools.chain.from_iterable(group["params"] for group in groups))
        numbers = self._numbers()
        loaded = []
        for shard in self._shards:
            key = keys[numbers[id(shard.parameter)]]
            state = state_dict["state"].get(key, {})
            place = state_dict.get("slices", {}).get(key)
            loaded.append({k: self._own_part(shard, k, v, place) for k, v in state.items()})
        self._require_states(loaded)
        for shard, state in zip(self._shards, loaded, strict=True):
            master = state.pop("master", None)
            if master is not None and shard.has_own_master:
                shard.master.detach().copy_(master)
            self.state[shard.parameter] = state
        for masters in self._masters:
            masters.mark_rounded()
        for group, saved in zip(self.param_groups, groups, strict=True):
            group.update(_settings(saved))
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _require_states(self, loaded: list[dict[str, Any]]) -> None:
        """Of all parameters or of none, and of this class of optimizers."""
        if not any(set(state) - {"master"} for state in loaded):
            return
        for shard, state in zip(self._shards, loaded, strict=True):
            got = {
                key for key, value in state.items()
                if key in shard.states or (isinstance(value, torch.Tensor) and value.dim() > 0)
            } - {"master"}
            if got != shard.states:
                _refuse(
                    f"states {sorted(shard.states)} of '{shard.name}'",
                    f"{sorted(got)}; load what the same optimizer saved, of the same model",
                )

    def _own_part(self, shard: _Shard, key: str, value: Any, place: Any) -> Any:
        if key != "master" and key not in shard.states:
            if not isinstance(value, torch.Tensor):
                return value
            # Where its own step would have put it.
            on_device = any(g.get("fused") or g.get("capturable") for g in self.param_groups)
            return value.to(shard.master.device if on_device else value.device, copy=True)
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
    for i, reducer in enumerate(listed):
        if not isinstance(reducer, Reducer):
            _refuse("a Reducer or several", f"an object of type {type(reducer).__name__}")
        if reducer.mesh is not listed[0].mesh:
            _refuse("Reducers of one mesh", "several meshes")
        if any(reducer is before for before in listed[:i]):
            _refuse("each Reducer once", f"one again as number {i}")
    if not listed:
        _refuse("a Reducer or several", "none")
    return listed


# As torch.optim.Optimizer takes them; of a model the named parameters.
def _groups(params: Any) -> list[dict[str, Any]]:
    if isinstance(params, torch.nn.Module):
        params = params.named_parameters()
    if isinstance(params, (torch.Tensor, set)):
        _refuse("a model, or a list of parameters or groups", f"a {type(params).__name__}")
    listed = list(params)
    if not listed or not isinstance(listed[0], dict):
        listed = [{"params": listed}]
    return [{**group, "params": _as_list(group["params"])} for group in listed]


def _as_list(params: Any) -> list[Any]:
    if isinstance(params, set):
        _refuse("parameters in an order, as a list", "a set")
    return [params] if isinstance(params, torch.Tensor) else list(params)


def _tensors(group: dict[str, Any]) -> list[torch.nn.Parameter]:
    return [p[1] if isinstance(p, tuple) else p for p in group["params"]]


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
