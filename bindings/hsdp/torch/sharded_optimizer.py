"""A torch optimizer that runs on this rank's slices of the parameters: ZeRO stages 1 and 2."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch

from hsdp.errors import UsageError
from hsdp.reducer import Reducer
from hsdp.reducer_results import clip_grad_norm_
from hsdp.torch.elementwise_probe import require_elementwise
from hsdp.torch.flat_slice import FlatSlice
from hsdp.torch.overlapped_gather import OverlappedGather
from hsdp.torch.parameter_slices import Masters, ParameterSlice, memory_of, refuse
from hsdp.torch.slice_states import (
    MASTER,
    SharedStates,
    load_target,
    loaded_states,
    require_alike,
    saved_states,
)
from hsdp.zero.parameter_gather import GatherStats, ParameterGather

_EPSILON = 1e-6  # torch's, and the Reducer's, when they clip

_owners: weakref.WeakKeyDictionary[Reducer, weakref.ref[ShardedOptimizer]] = (
    weakref.WeakKeyDictionary()
)
# The last step of each Reducer that an optimizer has taken: none is taken twice.
_taken: weakref.WeakKeyDictionary[Reducer, int] = weakref.WeakKeyDictionary()


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
    - `overlap_param_gather`: `step` returns while parameters are gathered, and whoever reads one waits
      for it. False: `step` waits. The same bits; docs/zero.md says what cannot wait.
    - `offload`: "host" keeps masters and states in pinned host memory, where the update then runs;
      gradients and new values cross the bus. Not run on a GPU yet.
    - `master_dtype`: "f32", whatever the parameters have; moments of 16 bits make training stall.

    Parameters of 16 bits are rounded from their masters. Weights that something else has written
    since the last step (load_state_dict, `.data`) are taken over at the next one. A step in which any rank met a value that is
    not finite changes nothing (`step_was_skipped`). A parameter that is unused with missing="zero"
    has a gradient of zeros, and moves by momentum and weight decay.

    `state_dict()` is local and has this rank's slices; it loads on the same rank of the same mesh, and
    through torch.distributed.checkpoint (`get_optimizer_state_dict`, `save`, `load`) on any, also in
    the unsharded optimizer, as does what `full_state_dict()` gathers.

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
        overlap_param_gather: bool = False,
        offload: str | None = None,
        master_dtype: str = "f32",
        **options: Any,
    ) -> None:
        if stage not in (1, 2):
            refuse("stage 1 or 2", repr(stage))
        if master_dtype != "f32":
            refuse("a master_dtype of 'f32', which training needs", repr(master_dtype))
        if max_grad_norm is not None and not max_grad_norm > 0:
            refuse("a max_grad_norm above 0, or None", repr(max_grad_norm))
        self._reducers = _reducers(reducer)
        offloaded = _is_offloaded(offload, self._reducers[0])
        self._max_grad_norm = max_grad_norm
        self._built = False
        groups = _groups(params)
        found = [[self._place_of(p) for p in _tensors(g) if p.requires_grad] for g in groups]
        self._require_parameters([owner for of_group in found for _, _, owner in of_group])
        states = [require_elementwise(optimizer_class, options, _settings(g)) for g in groups]
        for one in self._reducers:
            one.prepare()
        shards = [
            [ParameterSlice(*place, of_group, offloaded) for place in places]
            for places, of_group in zip(found, states, strict=True)
        ]
        self._shards = list(itertools.chain.from_iterable(shards))
        self._parameters = [shard.parameter for shard in self._shards]
        self._first_names = {shard.reducer: shard.name for shard in reversed(self._shards)}
        self._note_memory()
        self._make_masters()
        self._make_inner = functools.partial(optimizer_class, **options)
        self._inner = self._make_inner(
            [
                {**_settings(group), "params": [shard.master for shard in of_group]}
                for group, of_group in zip(groups, shards, strict=True)
            ]
        )
        super().__init__(groups, self._inner.defaults)
        self._states = SharedStates(self._shards)
        self._are_targets = False  # whether `state` is there for a checkpoint to be loaded into
        self.register_state_dict_post_hook(_with_slices, prepend=True)
        self._unit_bytes = gather_bucket_bytes
        self._order = self._shards  # in which they are gathered
        self._gathers = {one: self._make_gather(one) for one in self._reducers}
        self._replaced: list[GatherStats] = []
        self._gather_count = 0
        overlaps = overlap_param_gather and self._reducers[0].mesh.shard_size > 1
        models = [a._model for one in self._reducers for a in one._attachments if hasattr(a, "_model")]
        self._in_flight = OverlappedGather(models if overlaps else [], self._shards)
        self._overlaps = overlaps
        # At the end of the process, too: the other ranks need this one for their gathers.
        weakref.finalize(self, self._in_flight.close_quietly)
        for one in self._reducers:
            one.set_partial_sync("none" if stage == 1 else "shard")
            _owners[one] = weakref.ref(self)
        self._built = True
        #: the norm of all gradients before the last step clipped them
        self.grad_norm: Any = None
        self._skipped: Any = False

    def _place_of(self, parameter: torch.nn.Parameter) -> tuple[str, torch.nn.Parameter, Reducer]:
        for reducer in self._reducers:
            for attachment in reducer._attachments:
                name = getattr(attachment, "name_of", lambda p: None)(parameter)
                if name is not None:
                    return name, parameter, reducer
        refuse(
            "parameters whose gradients the Reducer takes (reducer.attach(model))",
            f"one of shape {tuple(parameter.shape)} that it does not know",
        )

    def _require_parameters(self, owners: list[Reducer]) -> None:
        for reducer in self._reducers:
            if not any(owner is reducer for owner in owners):
                refuse("parameters of every Reducer that require gradients", "a Reducer without")
            other = _owners.get(reducer)
            if other is not None and other() is not None:
                refuse(
                    "a Reducer without an optimizer",
                    "one that has a ShardedOptimizer already; close() that first",
                )

    def close(self) -> None:
        """Frees the Reducers for another optimizer. Waits for the parameters, which stay as they are,
        as do their states; a `step` is a UsageError from here on.
        """
        for reducer in self._reducers:
            owner = _owners.get(reducer)
            if owner is not None and owner() is self:
                del _owners[reducer]
        self._in_flight.close()

    def __deepcopy__(self, memo: Any) -> NoReturn:
        refuse("one optimizer for a Reducer", "a copy; save its state_dict() instead")

    def __reduce__(self) -> NoReturn:
        refuse("a state_dict() to be pickled", "the optimizer itself")

    def _make_masters(self) -> None:
        of_dtype: dict[torch.dtype, list[ParameterSlice]] = {}
        for shard in self._shards:
            if shard.has_own_master:
                of_dtype.setdefault(shard.own.dtype, []).append(shard)
            else:
                shard.master = torch.nn.Parameter(shard.own)
        self._masters = [Masters(shards) for shards in of_dtype.values()]

    def _make_gather(self, reducer: Reducer) -> ParameterGather:
        shards = self._ordered_slices(reducer)
        masters = {
            s.name: s.master.detach() for s in shards if s.has_own_master and not s.offloaded
        }
        return ParameterGather(reducer, {s.name: s.whole for s in shards}, masters, self._unit_bytes)

    def _ordered_slices(self, reducer: Reducer) -> list[ParameterSlice]:
        return [shard for shard in self._order if shard.reducer is reducer]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """At construction only: slices and gathers are laid out there."""
        if self.__dict__.get("_built", False):
            refuse("all parameter groups at construction", "another one")
        super().add_param_group(param_group)

    def master(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """This rank's slice of a parameter in fp32, flat: what the optimizer updates. To be written
        between steps; the whole parameter follows at the next one on every rank. Ask for it anew
        after each step. Local. What somebody else has written to the parameter since the last step is
        taken over at the next one.
        """
        self._bind_moved()
        return self._find(parameter).master.detach()

    @contextlib.contextmanager
    def whole_parameters(self, write_back: bool = False) -> Iterator[dict[str, torch.Tensor]]:
        """`with optimizer.whole_parameters() as whole:` has copies of the parameters that it optimizes in
        fp32, by name, as precise as the masters are: for an export or an average. With `write_back`
        what the block has written to them becomes the parameters' and masters' value. Collective,
        between steps; each rank makes the same changes. An exception in a block that writes back
        ends the mesh, as the other ranks wait for this one's slices.
        """
        names = {shard.name for shard in self._shards}
        if len(names) < len(self._shards):
            refuse("parameters of different names in several Reducers", "a name twice")
        with torch.no_grad():
            self._bind_moved()
            self._read_copied()
            parts = {s: s.own for s in self._shards if not s.has_own_master}
            for masters in self._masters:
                parts.update(zip(masters.slices, masters.current(), strict=True))
            whole = {shard.name: array for shard, array in self._gathered(parts)}
        if not write_back:
            yield whole
            return
        with self._ending_the_mesh("whole_parameters"):
            yield whole
            with torch.no_grad():
                self._reread_written()
                for shard in self._shards:
                    shard.master.copy_(shard.part_of(whole[shard.name]))
                self._gather()

    # The others wait for this rank's slices.
    @contextlib.contextmanager
    def _ending_the_mesh(self, call: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            next(iter(self._gathers.values())).abort(f"ShardedOptimizer.{call}: {type(error).__name__}: {error}")
            raise

    def _find(self, parameter: torch.Tensor) -> ParameterSlice:
        for shard in self._shards:
            if shard.parameter is parameter:
                return shard
        refuse("a parameter that it optimizes", f"another of shape {tuple(parameter.shape)}")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates this rank's slices by the step's gradients, and gathers all parameters. The
        closure may hold the step's microbatches.
        """
        if closure is None and self._is_initialised_by_dcp():
            self._make_load_targets()
            return None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        steps = self._take_gradients()
        for reducer, step in zip(self._reducers, steps, strict=True):
            if _taken.get(reducer) == step:
                refuse(
                    "gradients of a new step",
                    "those of the step before; end the step with last=True between two calls of step()",
                )
        with self._ending_the_mesh("step"), torch.no_grad():
            if self._skips_by_itself():
                self._skipped = self._inner.found_inf = self._found_inf_tensor()
                self._update()
                del self._inner.found_inf
            else:
                self._skipped = self._found_inf()
                if not self._skipped:
                    self._update()
            _taken.update(zip(self._reducers, steps, strict=True))
        return loss

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step changed nothing, as a gradient was not finite."""
        return bool(self._skipped)

    # Fused optimizers clip and skip on their way.
    def _is_fused(self) -> bool:
        supports = getattr(self._inner, "_step_supports_amp_scaling", False)
        return supports and all(group.get("fused") for group in self.param_groups)

    # So that the host need not wait for a GPU to know; the gather then has unchanged values.
    def _skips_by_itself(self) -> bool:
        return self._is_fused() and self._shards[0].master.is_cuda

    def _found_inf(self) -> bool:
        return any([reducer.found_inf() for reducer in self._reducers])  # each is collective

    def _found_inf_tensor(self) -> torch.Tensor:
        return torch.stack([one.found_inf_tensor() for one in self._reducers]).amax()

    def _update(self) -> None:
        self._forget_targets()
        self._reread_written()
        with self._clipping():
            self._run_inner()
        self._gather()

    # Else it takes a pass over the gradients.
    @contextlib.contextmanager
    def _clipping(self) -> Iterator[None]:
        most = self._max_grad_norm
        if most is None or not self._is_fused():
            if most is not None:
                self.grad_norm = clip_grad_norm_(self._reducers, most)
            yield
            return
        self.grad_norm = clip_grad_norm_(self._reducers, math.inf)
        device = self._shards[0].master.device
        norm = torch.as_tensor(self.grad_norm, dtype=torch.float32, device=device)
        self._inner.grad_scale = ((norm + _EPSILON) / most).clamp(min=1.0)
        try:
            yield
        finally:
            del self._inner.grad_scale

    def _run_inner(self) -> None:
        for masters in self._masters:
            masters.fetch_gradients()
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update(_settings(group))
        self._states.lend(self.state, self._inner.state)
        self._inner.step()
        self._states.take_back(self.state, self._inner.state)
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            group.update(_settings(inner))  # some count there

    # What this rank has updated is all ranks' from here on.
    def _gather(self) -> None:
        if self._gather_count == 1:
            self._agree_on_order()
        self._gather_count += 1
        for masters in self._masters:
            masters.mark_rounded()
            masters.load_parameters()
        for gather in self._gathers.values():
            gather.start()
        started = [(g, self._ordered_slices(one)) for one, g in self._gathers.items()]
        self._in_flight.start(started, self._overlaps)

    # That in which rank 0 used the parameters first since the first gather. Also without overlap: no
    # rank knows what the others do.
    def _agree_on_order(self) -> None:
        numbers = self._in_flight.order_of_use(self._shards)
        agreed = torch.tensor(numbers, device=self._shards[0].own.device)
        self._reducers[0].mesh.world.broadcast(agreed)
        order = [self._shards[number] for number in agreed.tolist()]
        if order == self._order:
            return
        self._order = order
        for reducer in self._reducers:
            self._replaced.append(self._gathers[reducer].stats())
            self._gathers[reducer] = self._make_gather(reducer)

    def wait_parameters(self) -> None:
        """Waits until all parameters have their new values. Needed only for code that reads their
        memory and asks no class: an extension outside of a module's forward, a tensor that was made
        of a parameter before the step.
        """
        self._in_flight.wait_all()

    def gather_stats(self) -> GatherStats:
        """Of the gathers so far: their number, bytes, and for how long they were waited for."""
        every = [*self._replaced, *(gather.stats() for gather in self._gathers.values())]
        return GatherStats(*map(sum, zip(*every, strict=True)))

    def gather_times(self) -> dict[str, tuple[float, float]]:
        """When the last gather of each parameter began and ended, in seconds of time.monotonic(); on a
        GPU, when it was enqueued. The names are those of the Reducers.
        """
        every = (gather.last_times() for gather in self._gathers.values())
        return {name: times for one in every for name, times in one.items()}

    def _unscale_shards(self, inverse_scale: torch.Tensor) -> torch.Tensor:
        """For torch's GradScaler: divides the gradients by its scale, unless the Reducer has done so
        (set_loss_scale). 1 where a gradient of any rank is not finite, and then they stay.
        """
        self._take_gradients()
        self._skipped = self._found_inf()  # a scaler that hears of it calls no step()
        if self._skipped:
            return torch.ones_like(inverse_scale)
        for reducer in self._reducers:
            factor = inverse_scale * reducer._loss_scale
            if float(factor) != 1.0:
                grads = [s.gradient for s in self._shards if s.reducer is reducer]
                torch._foreach_mul_(grads, factor.to(grads[0].device))
        return torch.zeros_like(inverse_scale)

    def _take_gradients(self) -> list[int]:
        """Waits for the results, or says what is missing. Of which steps they are."""
        for reducer, first in self._first_names.items():
            owner = _owners.get(reducer)
            if owner is None or owner() is not self:
                refuse("an open optimizer", "a closed one")
            try:
                reducer.shard(first)
            except UsageError as error:
                raise UsageError(
                    f"zero: ShardedOptimizer: step: {error}; end the step with last=True before"
                ) from None
        if self._shards[0].master.grad is None:  # once: a Reducer's results stay where they are
            for shard in self._shards:
                shard.gradient = torch.from_dlpack(shard.reducer.shard(shard.name))
                if not shard.offloaded:
                    shard.master.grad = shard.gradient
            for masters in self._masters:
                masters.offload_gradients()
        return [reducer._handle.step_number() for reducer in self._reducers]

    # What others have written since. A master of 32 bits is the parameter's own memory.
    def _reread_written(self) -> None:
        self._bind_moved()
        self._read_copied()
        for masters in self._masters:
            masters.reread()

    def _bind_moved(self) -> None:
        self._in_flight.wait_all()
        if self._bound == [*map(memory_of, self._parameters)]:
            return
        for shard in self._shards:
            shard.require_same_kind()
        for shard in self._shards:
            if shard.bound == memory_of(shard.parameter):
                continue
            shard.bind()
            if not shard.has_own_master:
                shard.master.data = shard.own
            self._gathers[shard.reducer].rebind(shard.name, shard.whole)
        self._note_memory()

    def _read_copied(self) -> None:
        for shard in self._copied:
            shard.whole.copy_(shard.parameter.data)

    def _note_memory(self) -> None:
        self._bound = [shard.bound for shard in self._shards]
        self._copied = [shard for shard in self._shards if shard.is_copied]

    # torch.distributed.checkpoint makes tensors to load into by a step of zeros. Not while gradients of
    # a step wait for theirs.
    def _is_initialised_by_dcp(self) -> bool:
        return (
            not self.state
            and all(float(group.get("lr", 0.0)) == 0.0 for group in self.param_groups)
            and all(p.grad is not None and not p.grad.any()
                    for p in self._parameters if p.requires_grad)
            and not any(self._has_untaken_step(reducer) for reducer in self._reducers)
        )

    def _has_untaken_step(self, reducer: Reducer) -> bool:
        step = reducer._handle.step_number()
        return step not in (-1, _taken.get(reducer)) and not reducer._handle.step_dropped()

    def _make_load_targets(self) -> None:
        of_parameter = {id(shard.parameter): shard for shard in self._shards}
        for group in self.param_groups:
            for parameter in group["params"]:
                shard = of_parameter.get(id(parameter))
                target = shard and load_target(shard, self._make_inner, _settings(group))
                if target:
                    self.state[parameter] = target
        self._are_targets = True

    def _forget_targets(self) -> None:
        if self._are_targets:
            self.state.clear()
        self._are_targets = False

    def state_dict(self) -> dict[str, Any]:
        """In torch's shape, with this rank's slices as `hsdp.torch.FlatSlice`s, and the fp32 masters of
        16-bit parameters as "master". Local: no other rank takes part.
        """
        state: dict[str, Any] = super().state_dict()
        return state

    def _numbers(self) -> dict[int, int]:
        """id(parameter) -> its number in a state dict."""
        every = itertools.chain.from_iterable(group["params"] for group in self.param_groups)
        return {id(parameter): i for i, parameter in enumerate(every)}

    def full_state_dict(self) -> dict[str, Any]:
        """As `state_dict()` with whole states on every rank: what the unsharded optimizer has, and
        "master". Collective.
        """
        self._forget_targets()  # which this rank alone may have
        state = self.state_dict()
        parts: dict[str, dict[ParameterSlice, torch.Tensor]] = {}  # of the slices, by key
        numbers = self._numbers()
        for shard in self._shards:
            own = state["state"].get(numbers[id(shard.parameter)], {})
            for key, value in own.items():
                if isinstance(value, FlatSlice):
                    parts.setdefault(key, {})[shard] = value.to_local()
                elif isinstance(value, torch.Tensor) and value.dim() > 0:
                    refuse(f"states that are numbers or slices, of '{shard.name}'", f"'{key}'")
                else:
                    own[key] = copy.deepcopy(value)
        for key in sorted(parts):
            for shard, whole in self._gathered(parts[key]):
                state["state"][numbers[id(shard.parameter)]][key] = whole
        return state

    def _gathered(
        self, parts: dict[ParameterSlice, torch.Tensor]
    ) -> list[tuple[ParameterSlice, torch.Tensor]]:
        """Whole tensors of slices. Collective: the same ones on every rank."""
        result = []
        for reducer in self._reducers:
            arrays = {}
            for shard, part in parts.items():
                if shard.reducer is reducer:
                    whole = torch.empty(
                        shard.parameter.shape, dtype=part.dtype, device=shard.parameter.device
                    )
                    shard.part_of(whole).copy_(part)
                    arrays[shard.name] = whole
                    result.append((shard, whole))
            reducer.gather_parameters(arrays)
        return [(shard, whole.to(parts[shard].device)) for shard, whole in result]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict()` gave on this rank of the same mesh, or `full_state_dict()` on
        any, or the state dict of the unsharded optimizer. Raises UsageError, and loads nothing,
        where this rank's slices are not in it.
        """
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        groups = self._loadable_groups(state_dict)
        keys = list(itertools.chain.from_iterable(group["params"] for group in groups))
        numbers = self._numbers()
        loaded = {}
        for shard in self._shards:
            state = state_dict["state"].get(keys[numbers[id(shard.parameter)]], {})
            # Where its own step would have put numbers.
            on_device = any(g.get("fused") or g.get("capturable") for g in self.param_groups)
            loaded[id(shard.parameter)] = (shard, loaded_states(shard, state, on_device))
        for group in self.param_groups:
            require_alike([loaded[id(p)] for p in group["params"] if id(p) in loaded])
        self._in_flight.wait_all()  # a gather reads masters
        self._are_targets = False
        self.state.clear()
        for shard, state in loaded.values():
            if MASTER in state:
                master = shard.master.detach()
                state[MASTER] = master.copy_(state[MASTER])
            if set(state) - {MASTER}:
                self.state[shard.parameter] = state
        for masters in self._masters:
            masters.mark_rounded()
        for group, saved in zip(self.param_groups, groups, strict=True):
            group.update(copy.deepcopy(_settings(saved)))
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _loadable_groups(self, state_dict: Any) -> list[dict[str, Any]]:
        if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
            got = sorted(state_dict) if isinstance(state_dict, Mapping) else type(state_dict).__name__
            refuse("a state dict with 'state' and 'param_groups'", str(got))
        groups: list[dict[str, Any]] = list(state_dict["param_groups"])
        lengths = [len(group["params"]) for group in self.param_groups]
        if [len(group.get("params", ())) for group in groups] != lengths:
            refuse(
                f"a state dict with parameter groups of {lengths}",
                str([len(group.get("params", ())) for group in groups]),
            )
        for own, saved in zip(self.param_groups, groups, strict=True):
            # Keys that are names have found their parameters.
            names = saved.get("param_names", ()) if isinstance((*saved["params"], 0)[0], int) else ()
            for name, other in zip(own.get("param_names", ()), names):
                if name != other:
                    refuse(f"the states of '{name}' in its place", f"those of '{other}'")
        return groups


# A hook of a class's own, before those of users.
def _with_slices(optimizer: Any, state_dict: dict[str, Any]) -> None:
    numbers = optimizer._numbers()
    for shard in optimizer._shards:
        number = numbers[id(shard.parameter)]
        states = saved_states(shard, state_dict["state"].get(number, {}))
        if states:
            state_dict["state"][number] = states


def _is_offloaded(offload: Any, reducer: Reducer) -> bool:
    if offload not in (None, "host"):
        refuse("offload None or 'host'", repr(offload))
    if offload == "host" and reducer.mesh.device == "cpu":
        refuse("offload='host' on a mesh of GPUs", "it on the CPU, whose memory that is already")
    return bool(offload == "host")


def _reducers(given: Any) -> list[Reducer]:
    listed = [given] if isinstance(given, Reducer) else list(given)
    for i, reducer in enumerate(listed):
        if not isinstance(reducer, Reducer):
            refuse("a Reducer or several", f"an object of type {type(reducer).__name__}")
        if reducer.mesh is not listed[0].mesh:
            refuse("Reducers of one mesh", "several meshes")
        if any(reducer is before for before in listed[:i]):
            refuse("each Reducer once", f"one again as number {i}")
    if not listed:
        refuse("a Reducer or several", "none")
    return listed


# As torch.optim.Optimizer takes them; of a model the named parameters.
def _groups(params: Any) -> list[dict[str, Any]]:
    if isinstance(params, torch.nn.Module):
        params = params.named_parameters()
    if isinstance(params, (torch.Tensor, set)):
        refuse("a model, or a list of parameters or groups", f"a {type(params).__name__}")
    listed = list(params)
    if not listed or not isinstance(listed[0], dict):
        listed = [{"params": listed}]
    return [{**group, "params": _as_list(group["params"])} for group in listed]


def _as_list(params: Any) -> list[Any]:
    if isinstance(params, set):
        refuse("parameters in an order, as a list", "a set")
    return [params] if isinstance(params, torch.Tensor) else list(params)


def _tensors(group: dict[str, Any]) -> list[torch.nn.Parameter]:
    return [p[1] if isinstance(p, tuple) else p for p in group["params"]]


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
