"""A torch optimizer that runs on this rank's slices of the parameters: ZeRO stages 1 to 3."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch

from hsdp.errors import UsageError
from hsdp.gradient_norm import EPSILON
from hsdp.keyword_hints import OPTIMIZER, hinting
from hsdp.named_errors import naming_itself, who_of
from hsdp.options import MasterDtype, Offload, ShardOver, Stage
from hsdp.parameter import unused_names, warn_of_no_gradients
from hsdp.profiler_range import profiler_range
from hsdp.reducer import Reducer, clip_grad_norm_
from hsdp.reducer_text import counted
from hsdp.torch import private_torch
from hsdp.torch.complex_values import of_kind
from hsdp.torch.guards.loss_scaling import require_scaled, unscale_result
from hsdp.torch.guards.unreduced_gradient_guard import require_result
from hsdp.torch.guards.watched_gradients import attached_names
from hsdp.torch.optimized_parameters import required_places, slice_makers
from hsdp.torch.slices.optimizer_arguments import (
    give_settings, is_offloaded, parameter_groups, require_options, require_unit_options,
    required_reducers, restoring_shard_over, settings, tensors,
)
from hsdp.torch.slices.optimizer_ownership import all_optimizers, disown, has_taken, own, owns, require_free, take
from hsdp.torch.slices.optimizer_probe import OptimizerProbe
from hsdp.torch.slices.overlapped_gather import OverlappedGather
from hsdp.torch.slices.parameter_slices import (
    KeptSlices, ParameterSlice, SliceMasters, gather_whole, refuse,
)
from hsdp.torch.slices.settings_word import SettingsWord
from hsdp.torch.slices.sharded_state_dict import loadable, make_whole, put_slices
from hsdp.torch.slices.slice_states import MASTER, FreshStates, SharedStates, held_bytes
from hsdp.torch.units.meta_init import MetaInit, ParamInit, random_state_of_rank_0
from hsdp.torch.units.pass_hooks import full_state_dict
from hsdp.torch.units.unit_plan import UnitPlan, Units, attached_models, model_of, plan_units
from hsdp.torch.units.unit_set_up import SlicedUnits, gathered_units, slice_units
from hsdp.zero.parameter_gather import GatherStats

_SET_UP = "make its ShardedOptimizer"


@naming_itself
class ShardedOptimizer(torch.optim.Optimizer):
    """Runs a torch optimizer on this rank's slices, and gathers the updated parameters.

        reducer = hsdp.Reducer(mesh)
        reducer.attach(model)
        optimizer = hsdp.zero.ShardedOptimizer(torch.optim.AdamW, model, reducer, lr=1e-3)
        with reducer.microbatch(last=True):
            loss(model(batch)).backward()
        optimizer.step()

    A `torch.optim.Optimizer` whose `param_groups` hold the model's own parameters, so schedulers
    and hooks work. States and masters, fp32 but of float64 and complex parameters of their
    dtype, are of this rank's slices alone: a shard group holds them once. `step` needs no
    `gather_gradients`.

    - `optimizer_class`, `**options`: any torch optimizer that updates each element by itself, or each
      parameter, as Muon and Adafactor do, where the Reducer has layout "whole": each parameter is then
      updated by the one rank that has it. It is tried out at construction; LBFGS is refused.
    - `params`: the attached model, its parameters, named parameters, or parameter groups. Another
      optimizer may have others of the same Reducer: Muon the matrices, AdamW the rest.
    - `reducer`: the Reducer that the model is attached to; several of one mesh for several models.
    - `stage`: 1 keeps gradients whole and local until the step's last microbatch, 2 shards them in
      every microbatch: what `last=False` means. 3 shards the parameters, too.
    - `shard_over`: "mesh" cuts states and masters over all ranks of the mesh, where "shard" has them
      once in each replica: each rank updates its part, and new values travel in place of the second
      half of the gradients' all-reduce. None: as the Reducer has it, which is "shard" by default.
    - `max_grad_norm`: clips by the norm of all gradients before each step; `grad_norm` is what it was.
    - `gather_bucket_bytes`: small parameters are gathered together, at most so many bytes at a time, or
      one bucket of the Reducer, which is never divided; whole ones of all ranks together.
    - `overlap_param_gather`: `step` returns while parameters are gathered; code that reads one waits
      for it. False: `step` waits. The same bits; docs/zero.md says what cannot wait.
    - `offload`: "host" keeps masters and states in pinned host memory, where the update then runs;
      gradients and new values cross the bus.
    - `master_dtype`: "f32", whatever the parameters have, but for float64 and complex ones; moments of
      16 bits make training stall.
    - `units`: at stage 3, what is gathered for its passes and released after: modules of these types, or
      of which a predicate is true; None: the elements of each ModuleList. The model itself is the
      unit of the rest.
    - `reshard_after_forward`: False keeps units from their forward to their backward pass.
    - `reshard_after_backward`: False keeps units from their backward pass until `step`, also through
      further microbatches or passes of a window, which then gather nothing.
    - `prefetch_bytes`: of units that are gathered ahead of use, at most so many; None: one unit.
    - `persistence_threshold`: parameters of at most so many elements stay whole, as at stage 2.
    - `param_init_fn`: of a model on the meta device, called with each module after its
      `reset_parameters()`, to set what it has; meanwhile only the units around it are whole.

    Parameters of 16 bits are rounded from their masters. Weights that something else has written
    since the last step (load_state_dict, `.data`) are taken over at the next one. A step in which any
    rank met a value that is not finite changes nothing (`step_was_skipped`). With missing="zero" a
    parameter that no rank used in a step stays as it is, as do its states.

    `state_dict()` is local and has this rank's slices; it loads on the same rank of the same mesh, and
    through torch.distributed.checkpoint (`get_optimizer_state_dict`, `save`, `load`) on any, also in
    the unsharded optimizer, as does what `full_state_dict()` gathers.

    Construction and `step` are collective over the mesh. Raises UsageError for parameters that no
    Reducer takes the gradients of, or that have an optimizer already (`close()` frees them), a `step`
    without gradients of a new step, and states that do not fit; nothing is changed then. If
    construction fails on one rank, every other rank raises StepAbortedError; all can retry. Ranks whose
    settings differ (lr, betas, max_grad_norm and the like) at the end of a step's last microbatch get a
    MismatchError. What goes wrong in the update itself ends the mesh: this rank keeps its error, the
    others get its text.
    """

    #: its step reads slices, and needs no `p.grad`
    takes_shards = True

    @hinting(OPTIMIZER)
    def __init__(
        self,
        optimizer_class: Any,
        params: Any,
        reducer: Reducer | Iterable[Reducer],
        stage: Stage = 2,
        max_grad_norm: float | None = None,
        gather_bucket_bytes: int = 4 << 20,
        overlap_param_gather: bool = True,
        offload: Offload | None = None,
        master_dtype: MasterDtype = "f32",
        units: Units = None,
        reshard_after_forward: bool = True,
        reshard_after_backward: bool = True,
        prefetch_bytes: int | None = None,
        persistence_threshold: float = 1 << 14,
        param_init_fn: ParamInit | None = None,
        shard_over: ShardOver | None = None,
        **options: Any,
    ) -> None:
        listed = list(reducer) if isinstance(reducer, Iterable) else [reducer]
        first = next((one for one in listed if isinstance(one, Reducer)), None)
        if first is None:  # by which the others could be told
            got = f"an object of type {type(listed[0]).__name__}" if listed else "none"
            refuse("a Reducer or several", got)
        with restoring_shard_over(listed):
            with first._together(_SET_UP):
                self._reducers = required_reducers(listed)
                require_options(stage, max_grad_norm, gather_bucket_bytes, master_dtype)
                offloaded = is_offloaded(offload, first)
                groups = parameter_groups(params)
                places = required_places(groups, self._reducers)
                require_free(itertools.chain(*places), stage, max_grad_norm)
                require_unit_options(prefetch_bytes, persistence_threshold)
                if shard_over is not None:
                    for one in self._reducers:
                        one._set_shard_over(shard_over)
                threshold = persistence_threshold if stage == 3 else math.inf
                plan = plan_units(self._reducers, itertools.chain(*places), units, threshold)
                plan.cut_buckets()
                makers = slice_makers(OptimizerProbe(optimizer_class, options), groups, places, offloaded)
                self._make_inner = functools.partial(optimizer_class, **options)
            for one in self._reducers:
                one.prepare()
        attachments = [a for one in self._reducers for a in attached_models(one)]
        models = [model_of(a) for a in attachments]
        meta = MetaInit(models, first.mesh.device, param_init_fn)
        sliced = self._make_masters(plan, makers, groups, meta)
        for attachment in attachments:
            attachment.install_hooks()
        self._stage = stage
        self._max_grad_norm = max_grad_norm
        self._states = SharedStates(self._shards)
        self._fresh = FreshStates(self._make_inner, self._group_of)
        self._are_targets = False  # whether `state` is there for a checkpoint to be loaded into
        self.register_state_dict_post_hook(_with_slices, prepend=True)
        overlaps = overlap_param_gather and any(one._slice_group.size > 1 for one in self._reducers)
        self._gather = OverlappedGather(self._kept.slices, gather_bucket_bytes, models if overlaps else [])
        self._units = gathered_units(
            sliced.units, prefetch_bytes, reshard_after_forward, reshard_after_backward,
            gather_bucket_bytes,
        )
        # At the end of the process, too: the other ranks need this one for their gathers.
        self._ends = [weakref.finalize(self, end) for end in (self._units.close, self._gather.close_quietly)]
        self._follow_steps(optimizer_class.__name__)
        self._count_memory()
        self._built = True
        self._last_mode = "eval" if callable(getattr(self._inner, "train", None)) else "train"
        #: the norm of all gradients before the last step clipped them
        self.grad_norm: Any = None
        self._skipped: Any = False
        self._found_none = False  # no gradient of any parameter, on any rank

    # Every rank gets its slices, masters and inner optimizer, or none does.
    def _make_masters(
        self,
        plan: UnitPlan,
        makers: dict[int, Callable[..., ParameterSlice]],
        groups: list[dict[str, Any]],
        meta: MetaInit,
    ) -> SlicedUnits:
        first = self._reducers[0]
        try:
            with random_state_of_rank_0(first.mesh, meta.is_needed):
                with first._together(_SET_UP):
                    sliced = self._make_slices(plan, makers, meta)
                    self._kept = KeptSlices([one for one in self._shards if not one.is_released])
                    self._masters: list[SliceMasters] = [*sliced.masters, *self._kept.masters]
                    self._make_inner_optimizer(groups)
                meta.require_same_values(first.mesh)
        except BaseException:
            meta.undo()
            raise
        return sliced

    # This rank's slices: those of parameters that are released lie in units, others are kept.
    def _make_slices(
        self, plan: UnitPlan, makers: dict[int, Callable[..., ParameterSlice]], meta: MetaInit
    ) -> SlicedUnits:
        sliced = slice_units(plan, makers, meta)
        self._shards = [sliced.slices[p] if p in sliced.slices else make() for p, make in makers.items()]
        self._parameters = [shard.parameter for shard in self._shards]
        self._first_names = {shard.reducer: shard.name for shard in reversed(self._shards)}
        self._names = {
            reducer: frozenset(s.name for s in self._shards if s.reducer is reducer)
            for reducer in self._reducers
        }
        return sliced

    # On the masters of each group; this one has the parameters.
    def _make_inner_optimizer(self, groups: list[dict[str, Any]]) -> None:
        slice_of = {id(shard.parameter): shard for shard in self._shards}
        inner = []
        for group in groups:
            here = [slice_of[id(p)] for p in tensors(group) if id(p) in slice_of]
            inner.append({**settings(group), "params": [one.master for one in here if one.is_here]})
        self._inner = self._make_inner(inner)
        self._built = False
        super().__init__(groups, self._inner.defaults)
        self._group_of: dict[int, dict[str, Any]] = {
            id(p): group for group in self.param_groups for p in group["params"]
        }

    # From here on the Reducers' steps are this optimizer's, whose settings the ranks compare in each.
    def _follow_steps(self, inner: str) -> None:
        for one in self._reducers:
            one.set_partial_sync("none" if self._stage == 1 else "shard")
            own(one, self)
        same = {"optimizer": inner, "stage": self._stage, "max_grad_norm": self._max_grad_norm}
        self._word = SettingsWord(self._reducers, same, self.param_groups, self.defaults)
        self._ends.append(weakref.finalize(self, self._word.close))

    @property
    def _who(self) -> str:
        return who_of(one.name for one in getattr(self, "_reducers", ()))

    def close(self) -> None:
        """Frees the parameters for another optimizer. Waits for the parameters, which stay as they are,
        as do their states; a `step` is a UsageError from here on. At stage 3 it is collective, and
        parameters are whole from here on.
        """
        try:
            if self._is_open():
                self._units.gather_all()
        finally:
            for end in self._ends:
                end.detach()  # it holds what the model must not be held by
            for reducer in self._reducers:
                disown(reducer, self)
            self._units.close()
            self._word.close()
            self._gather.close()

    def _is_open(self) -> bool:
        return all(owns(reducer, self) for reducer in self._reducers)

    def __repr__(self) -> str:
        rates = [f"{group['lr']:g}" for group in self.param_groups if "lr" in group]
        here = sum(shard.count for shard in self._shards)
        whole = sum(parameter.numel() for parameter in self._parameters)
        words = [
            *([] if self._is_open() else ["closed"]),
            f"{type(self._inner).__name__}, stage {self._stage}",
            f"{counted(len(self._shards), 'parameter')}, {here} of {whole} elements here",
            *([f"lr {'/'.join(dict.fromkeys(rates))}"] if rates else []),
            *map(repr, self._reducers),
        ]
        return f"hsdp.zero.ShardedOptimizer({', '.join(words)})"

    def __deepcopy__(self, memo: Any) -> NoReturn:
        refuse("one optimizer for a Reducer", "a copy; save its state_dict() instead")

    def __reduce__(self) -> NoReturn:
        refuse("a state_dict() to be pickled", "the optimizer itself")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """At construction only, where slices and gathers are laid out; later a UsageError."""
        if self.__dict__.get("_built", False):
            refuse("all parameter groups at construction", "another one")
        super().add_param_group(param_group)

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The optimizer of `optimizer_class` on this rank's slices, for methods of the class that this one
        does not have. `step` gives it `state` and the settings of `param_groups`. What else writes to
        its parameters is not gathered.
        """
        return self._inner

    def train(self) -> None:
        """Of a schedule-free class: the parameters are those to be trained from here on. To be called
        before the first step and after `eval`. Collective. Nothing for a class without such a method,
        or while that is so already.
        """
        self._switch("train")

    def eval(self) -> None:
        """Of a schedule-free class: the parameters are those to be evaluated from here on. As `train`."""
        self._switch("eval")

    def _switch(self, mode: str) -> None:
        method = getattr(self._inner, mode, None)
        if not callable(method) or self._mode() == mode:
            return
        if not self._is_open():
            refuse("an open optimizer", "a closed one")
        self._bind_moved()
        with self._ending_the_mesh(mode), torch.no_grad():
            self._forget_targets()
            self._reread_written()
            self._units.begin_update()
            self._call_inner(method, self._shards)
            self._start_gather()
        self._last_mode = mode

    # Schedule-free classes say it in their groups, which a checkpoint has.
    def _mode(self) -> str:
        said = self.param_groups[0].get("train_mode")
        return self._last_mode if said is None else "train" if said else "eval"

    def master(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """This rank's slice of a parameter in fp32, or in the dtype of a float64 or complex one, flat (with
        layout "whole" of the parameter's shape, on the rank that has it): what the optimizer updates. To
        be written between steps; the whole parameter follows at the next one on every rank. Ask for it
        anew after each step. Local. Elements of the parameter that other code has written since the last
        step are taken over at the next one.
        """
        self._bind_moved()
        self._units.expire()
        one = self._find(parameter)
        for masters in self._masters:
            masters.lend(one)
        master = one.master.detach()
        return master.view(parameter.shape) if one.is_whole and one.is_here else master

    @contextlib.contextmanager
    def whole_parameters(self, write_back: bool = False) -> Iterator[dict[str, torch.Tensor]]:
        """`with optimizer.whole_parameters() as whole:` has copies of the parameters that it optimizes in
        the masters' dtype, by name, and as precise as those: for an export or an average. With `write_back`
        what the block has written to them becomes the parameters' and masters' value. Collective,
        between steps; each rank makes the same changes. An exception in a block that writes back
        ends the mesh, as the other ranks wait for this one's slices.
        """
        names = {shard.name for shard in self._shards}
        if len(names) < len(self._shards):
            refuse("parameters of different names in several Reducers", "a name twice")
        self._bind_moved()
        with self._ending_the_mesh("whole_parameters"), torch.no_grad():
            self._kept.read_copied()
            self._units.read_written()
            parts = {s: s.own for s in self._shards if not s.has_own_master}
            for masters in self._masters:
                parts.update(zip(masters.slices, masters.current(), strict=True))
            whole = {shard.name: array for shard, array in gather_whole(parts)}
        if not write_back:
            yield whole
            return
        with self._ending_the_mesh("whole_parameters"):
            yield whole
            with torch.no_grad():
                self._reread_written()
                self._units.begin_update()
                for shard in self._shards:
                    shard.master.copy_(shard.shaped(shard.part_of(whole[shard.name])))
                self._start_gather()

    # The others wait for this rank's slices.
    @contextlib.contextmanager
    def _ending_the_mesh(self, call: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            reason = f"ShardedOptimizer.{call}: {type(error).__name__}: {error}"
            self._gather.abort(reason)
            self._units.abort(reason)
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
        if self._mode() != "train":
            refuse("a call of optimizer.train() before steps, as its class has one", "none, or eval() since")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        steps = self._take_gradients()
        self._require_new(steps)
        self._require_usable()
        self._found_none = False
        with self._ending_the_mesh("step"), torch.no_grad():
            if self._must_skip():
                self._skip()
            else:
                self._update()
            for reducer, step in zip(self._reducers, steps, strict=True):
                take(reducer, step, self._names[reducer])
        if self._found_none:
            warn_of_no_gradients("zero: ShardedOptimizer.step")
        return loss

    def _require_new(self, steps: list[int]) -> None:
        for reducer, step in zip(self._reducers, steps, strict=True):
            if has_taken(reducer, step, self._names[reducer]):
                refuse(
                    "gradients of a new step",
                    "those of the step before; end the step with last=True between two calls of step()",
                )

    # Before other ranks wait for this one.
    def _require_usable(self) -> None:
        require_result("ShardedOptimizer.step", self._parameters)
        if self._max_grad_norm is not None:
            for reducer in self._reducers:
                for attachment in attached_models(reducer):
                    attachment.clipping("ShardedOptimizer.step with max_grad_norm")

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step changed nothing, as a gradient was not finite."""
        return bool(self._skipped)

    # Fused optimizers clip and skip on their way.
    def _is_fused(self) -> bool:
        supports = private_torch.skips_by_itself(self._inner)
        return supports and all(group.get("fused") for group in self.param_groups)

    # So that the host need not wait for a GPU to know; the gather then has unchanged values.
    def _skips_by_itself(self) -> bool:
        return self._is_fused() and self._shards[0].master.is_cuda

    def _must_skip(self) -> bool:
        if self._skips_by_itself():
            self._skipped = self._inner.found_inf = self._found_inf_tensor()
            return False
        self._skipped = self._found_inf()
        return bool(self._skipped)

    def _found_inf_tensor(self) -> torch.Tensor:
        return torch.stack([one.found_inf_tensor() for one in self._reducers]).amax()

    def _skip(self) -> None:
        self._units.skip_update()
        if self._max_grad_norm is not None:
            self.grad_norm = clip_grad_norm_(self._reducers, math.inf)

    def _found_inf(self) -> bool:
        return any([reducer.found_inf() for reducer in self._reducers])  # each is collective

    def _update(self) -> None:
        self._forget_targets()
        self._reread_written()
        self._units.begin_update()
        try:
            if self._max_grad_norm is not None:
                self._clip(self._max_grad_norm)
            update = self._reducers[0]._handle.update()
            with contextlib.closing(update), profiler_range("hsdp:update"):
                self._run_inner()
        finally:
            for name in ("grad_scale", "found_inf"):
                vars(self._inner).pop(name, None)
        self._start_gather()

    # A pass over the gradients, or a factor for the optimizer's own, which torch has in fp32.
    def _clip(self, max_norm: float) -> None:
        fused = self._is_fused() and all(one.master_dtype is torch.float32 for one in self._shards)
        self.grad_norm = clip_grad_norm_(self._reducers, math.inf if fused else max_norm)
        if fused:
            device = self._shards[0].master.device
            norm = torch.as_tensor(self.grad_norm, dtype=torch.float32, device=device)
            self._inner.grad_scale = ((norm + EPSILON) / max_norm).clamp(min=1.0)

    def _run_inner(self) -> None:
        for masters in self._masters:
            masters.fetch_gradients()
        with self._without_unused() as unused:
            self._call_inner(self._inner.step, unused)
        if self._begin_unused(unused):
            self._count_memory()

    # With the states and settings that users see. `unused`: whose states it does not begin.
    def _call_inner(self, method: Callable[[], Any], unused: Iterable[ParameterSlice]) -> None:
        groups = list(zip(self.param_groups, self._inner.param_groups, strict=True))
        for group, inner in groups:
            give_settings(group, inner)
        self._states.lend(self.state, self._inner.state)
        method()
        if self._states.take_back(
            self.state, self._inner.state, set(unused), self._fresh.elsewhere
        ):
            self._count_memory()
        for group, inner in groups:
            group.update(settings(inner))  # some count there

    # Optimizers leave what has no gradient as it is.
    @contextlib.contextmanager
    def _without_unused(self) -> Iterator[list[ParameterSlice]]:
        names = {one: unused_names(one._handle, "step") for one in self._reducers}
        unused = [shard for shard in self._shards if shard.name in names[shard.reducer]]
        if unused and len(unused) == len(self._shards):
            self._found_none = all(
                len(names[one]) == len(one.parameters) for one in self._reducers
            )
        gradients = [shard.master.grad for shard in unused]
        for shard in unused:
            shard.master.grad = None
        try:
            yield unused
        finally:
            for shard, gradient in zip(unused, gradients, strict=True):
                shard.master.grad = gradient

    # What no step has used yet gets a state that says so, where an optimizer begins with zeros: torch's
    # checkpoints look for what `state` has. Elsewhere it has none, as in torch.
    def _begin_unused(self, shards: Iterable[ParameterSlice]) -> bool:
        beginning = [s for s in shards if s.states.begins_with_zeros]
        without = [shard for shard in beginning if not self.state.get(shard.parameter)]
        for shard in without:
            self.state[shard.parameter] = self._fresh.load_target(shard)
        return bool(without)

    # For the Reducers' stats().
    def _count_memory(self) -> None:
        counts = dict.fromkeys(self._reducers, 0)
        for shard in self._shards:
            counts[shard.reducer] += held_bytes(shard, self.state.get(shard.parameter, {}))
        self._held: list[Any] = []  # what was counted before is let go of
        for reducer, count in counts.items():
            self._held.append(reducer._handle.hold_optimizer_bytes(count))

    # For the Reducers' memory_plan(): of the states that the first step makes.
    def _state_bytes_to_come(self, reducer: Reducer) -> int:
        return sum(
            held_bytes(shard, self._fresh.example(shard, shard.master.shape)) - held_bytes(shard, {})
            for shard in self._shards
            if shard.reducer is reducer and shard.is_here and not self.state.get(shard.parameter)
        )

    # What this rank has updated is all ranks' from here on.
    def _start_gather(self) -> None:
        for masters in self._masters:
            masters.load_parameters()
        self._gather.start()
        self._units.updated()

    def unshard(self, module: torch.nn.Module) -> None:
        """Gathers the parameters of a module, which stay whole, also through steps, until `reshard`.
        Collective. Nothing but at stage 3.
        """
        self._units.pin(module)

    def reshard(self, module: torch.nn.Module) -> None:
        """Releases the parameters of a module after `unshard`. What was written to them meanwhile is
        kept, each rank's slice of it. Local.
        """
        with torch.no_grad():
            self._units.unpin(module)

    def register_forward_method(self, module: torch.nn.Module, name: str) -> None:
        """Makes another method than `forward` of a unit's module gather its parameters: `encode` of
        a model, say.
        """
        self._units.wrap(module, name)

    def full_model_state_dict(self, model: torch.nn.Module) -> dict[str, Any]:
        """`model.state_dict()` with whole parameters on the CPU, of which one unit at a time is gathered,
        also those of the model's other ShardedOptimizers. Collective. At stage 3 `model.state_dict()`
        itself has this rank's slices.
        """
        self._gather.wait_all()
        return full_state_dict(model, (unit for one in all_optimizers() for unit in one._units.units))

    def wait_parameters(self) -> None:
        """Waits until all parameters have their new values. Needed only for code that reads their
        memory and asks no class: an extension outside of a module's forward, a tensor that was made
        of a parameter before the step.
        """
        self._gather.wait_all()
        self._units.wait_parts()

    def gather_stats(self) -> GatherStats:
        """Of the gathers so far: their number, bytes, and for how long they were waited for."""
        every = [self._gather.stats(), *self._units.stats()]
        return GatherStats(*map(sum, zip(*every, strict=True)))

    def gather_times(self) -> dict[str, tuple[float, float]]:
        """When the last gather of each parameter began and ended, in seconds of time.monotonic(); on a
        GPU, when it was enqueued. The names are those of the Reducers.
        """
        return self._gather.last_times()

    def _unscale_shards(self, inverse_scale: torch.Tensor) -> torch.Tensor:
        """For torch's GradScaler: divides the gradients by its scale, unless the Reducer has done so
        (set_loss_scale). 1 where a gradient of any rank is not finite.
        """
        self._take_gradients()
        found = attached_names(self._parameters)
        for attachment, names in found.items():
            require_scaled(attachment, names)
        self._skipped = self._found_inf()  # a scaler that hears of it calls no step()
        if self._skipped:
            self._units.skip_update()
        for attachment, names in found.items():
            unscale_result(attachment, names, inverse_scale)
            attachment.result.skipped = self._skipped
        return torch.full_like(inverse_scale, float(self._skipped))

    def _take_gradients(self) -> list[int]:
        """Waits for the results, or says what is missing. Of which steps they are."""
        for reducer, first in self._first_names.items():
            if not owns(reducer, self):
                refuse("an open optimizer", "a closed one")
            try:
                reducer._handle.shard(first)
            except UsageError as error:
                text = str(error).removeprefix(f"{reducer._who or 'reducer'}: ").removeprefix("shard: ")
                raise UsageError(f"zero: ShardedOptimizer: step: {text}") from None
        if self._shards[0].master.grad is None:  # once: a Reducer's results stay where they are
            for shard in self._shards:
                flat = of_kind(shard.reducer.shard(shard.name), shard.parameter.is_complex())
                shard.gradient = shard.shaped(flat)
                if not shard.offloaded:
                    shard.master.grad = shard.gradient
            for masters in self._masters:
                masters.offload_gradients()
        return [reducer._handle.step_number() for reducer in self._reducers]

    # What others have written since. A master of 32 bits is the parameter's own memory.
    def _reread_written(self) -> None:
        self._bind_moved()
        self._kept.read_copied()
        for masters in self._masters:
            masters.reread()

    def _bind_moved(self) -> None:
        self._gather.wait_all()
        for shard in self._kept.bind_moved():
            self._gather.rebind(shard)

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
        is_untaken = step != -1 and not has_taken(reducer, step, self._names[reducer])
        return is_untaken and not reducer._handle.step_dropped()

    def _make_load_targets(self) -> None:
        for shard in self._shards:
            target = self._fresh.load_target(shard)
            if target:
                self.state[shard.parameter] = target
        self._are_targets = True
        self._count_memory()

    def _forget_targets(self) -> None:
        if self._are_targets:
            self.state.clear()
            self._count_memory()
        self._are_targets = False

    def state_dict(self) -> dict[str, Any]:
        """In torch's shape, with this rank's slices as `hsdp.torch.FlatSlice`s, and the masters of
        16-bit parameters as "master". Local: no other rank takes part.
        """
        for masters in self._kept.masters:
            masters.require_known()
        state: dict[str, Any] = super().state_dict()
        return state

    def full_state_dict(self) -> dict[str, Any]:
        """As `state_dict()` with whole states on every rank: what the unsharded optimizer has, and
        "master". Collective.
        """
        self._forget_targets()  # which this rank alone may have
        state = self.state_dict()
        make_whole(state, self.param_groups, self._shards)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict()` gave on this rank of the same mesh, or `full_state_dict()` on
        any, or the state dict of the unsharded optimizer. Raises UsageError, and loads nothing,
        where this rank's slices are not in it.
        """
        for hook in private_torch.load_state_dict_pre_hooks(self):
            state_dict = hook(self, state_dict) or state_dict
        groups, states = loadable(state_dict, self.param_groups, self._shards, self._fresh.example)
        self._gather.wait_all()  # it reads masters
        self._units.expire()
        self._are_targets = False
        self.state.clear()
        for shard, state in states:
            if MASTER in state:
                master = shard.master.detach()
                state[MASTER] = master.copy_(state[MASTER])
            if set(state) - {MASTER}:  # an optimizer begins where a state is empty
                self.state[shard.parameter] = state
        for masters in self._masters:
            masters.mark_rounded()
        for group, saved in zip(self.param_groups, groups, strict=True):
            group.update(copy.deepcopy(settings(saved)))
        self._begin_unused(self._shards if self.state else ())
        self._count_memory()
        for hook in private_torch.load_state_dict_post_hooks(self):
            hook(self)


# A hook of a class's own, before those of users.
def _with_slices(optimizer: Any, state_dict: dict[str, Any]) -> None:
    put_slices(state_dict, optimizer.param_groups, optimizer._shards)
