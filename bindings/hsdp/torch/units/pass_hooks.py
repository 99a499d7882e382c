"""When units are gathered and released: hooks around the forward and backward passes of their modules.

[Note: parameters that are released]
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from hsdp import _hsdp
from hsdp.reducer import Reducer
from hsdp.torch import private_torch
from hsdp.torch.slices.parameter_slices import refuse
from hsdp.torch.units.replica_parts import ReplicaParts
from hsdp.torch.units.sharded_unit import ShardedUnit
from hsdp.zero.parameter_gather import GatherStats


# A graph of torch.compile ends before it, and a new one begins after it.
def _uncompiled(function: Any) -> Any:
    disable: Any = torch.compiler.disable
    return disable(function)


class ModuleHook:
    """A hook of a unit's module, which keeps no unit alive. Its copy, in a copy of the module, does
    nothing.
    """

    def __init__(self, hooks: PassHooks, number: int, run: Callable[..., Any]) -> None:
        owner = weakref.ref(hooks)

        @_uncompiled
        def call(*args: Any) -> Any:
            hooks = owner()
            return None if hooks is None else run(hooks, hooks.units[number], *args)

        self._call = call

    def __call__(self, module: torch.nn.Module, *args: Any) -> Any:
        """Called by torch."""
        return self._call(*args)

    # A built-in that does nothing: the copy may be loaded without this package.
    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")


class _AfterBackward(torch.autograd.Function):
    """Wraps a module's inputs; its backward runs when the module's own backward is over."""

    generate_vmap_rule = True

    @staticmethod
    def forward(done: Callable[[], None], *inputs: torch.Tensor) -> Any:
        return tuple(one.view_as(one) for one in inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.done = inputs[0]
        ctx.set_materialize_grads(False)  # an unused input gets no gradient

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.done()
        return (None, *grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tuple(None if one is None else one.view_as(one) for one in tangents[1:])


class _BeforeBackward:
    """Runs before the backward of a module's outputs: reports a backward pass's first gradient."""

    def __init__(self, begin: Callable[[], None]) -> None:
        self._begin = begin
        self._told = -1

    def __call__(self, grads: Any) -> None:
        backward = private_torch.current_graph_task_id()
        if self._told != backward:
            self._told = backward
            self._begin()


class GatherOrder:
    """Predicts the next unit from the last two and from whether gradients are recorded or computed, as
    learned from earlier orders. A wrong guess costs a gather.
    """

    def __init__(self) -> None:
        # (mode, last two) -> (next one, its mode).
        self._next: dict[tuple[Any, ...], tuple[ShardedUnit, tuple[bool, bool]]] = {}
        self._before: tuple[ShardedUnit | None, ShardedUnit | None] = (None, None)
        self._mode: tuple[bool, bool] = (False, False)

    def needed(self, unit: ShardedUnit) -> None:
        """Records that this unit is needed now."""
        mode = (torch.is_grad_enabled(), private_torch.current_graph_task_id() != -1)
        if self._before[1] is not None:
            self._next[self._mode, *self._before] = unit, mode
        self._before = (self._before[1], unit)
        self._mode = mode

    def following(self) -> Iterator[ShardedUnit]:
        """The units that will be needed next, as far as known."""
        key = self._mode, *self._before
        seen = set()
        while key in self._next and key not in seen:
            seen.add(key)
            unit, mode = self._next[key]
            yield unit
            key = mode, key[-1], unit

    def restart(self) -> None:
        """What comes next does not follow from what came before."""
        self._before = (None, None)


class PassHooks:
    """Gathers units before the forward and backward passes of their modules, or earlier if the order is
    known, and releases them afterwards.

    - `reshards_after_forward`: whether to release them after it even if a backward pass will follow.
      The root is then never released.
    - `reshards_after_backward`: whether to release them after that. Otherwise they stay until the next
      update.
    - `prefetch_bytes`: limit for units that are gathered ahead; None: one unit.

    A unit is kept during its module's backward pass, even while a checkpoint recomputes in it. Hooks
    run on any thread that torch uses, one at a time.
    """

    def __init__(
        self,
        units: Sequence[ShardedUnit],
        gathers: Mapping[Reducer, _hsdp.UnitGather],
        parts: Mapping[Reducer, ReplicaParts],
        prefetch_bytes: int | None,
        reshards_after_forward: bool,
        reshards_after_backward: bool,
    ) -> None:
        self.units = units
        self._gathers = gathers
        self._parts = parts
        self._prefetch_bytes = prefetch_bytes
        self._reshards_after_forward = reshards_after_forward
        self._reshards_after_backward = reshards_after_backward
        self._order = GatherOrder()
        self._in_forward = dict.fromkeys(units, 0)  # nesting depth
        self._in_backward: dict[ShardedUnit, dict[int, int]] = {unit: {} for unit in units}
        self._told: set[int] = set()  # backward passes with a callback at their end
        # Needed before others have to be gathered: the root, and one more.
        self._kept: set[ShardedUnit] = set()
        self._held: set[ShardedUnit] = set()  # until all passes are over
        self._until_update: set[ShardedUnit] = set()
        self._handles: list[Any] = []
        for number in range(len(units)):
            self._hook(number)
        for one in gathers:
            one._after_passes.add(self.end)

    def _hook(self, number: int) -> None:
        unit = self.units[number]
        hook = functools.partial(ModuleHook, self, number)
        before = hook(PassHooks._before_forward)
        after = hook(lambda hooks, unit, args, output: hooks._after_forward(unit, output))
        module = unit.module
        assert module is not None  # given with the unit
        self._handles += [
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
            module.register_forward_hook(after, always_call=True),
        ]
        give_back = hook(lambda hooks, unit, *args: hooks._give_back(unit))
        self._handles += [
            module.register_state_dict_pre_hook(give_back),
            module.register_load_state_dict_pre_hook(give_back),
        ]
        for above in unit.read_above:
            look = hook(lambda hooks, unit, args: hooks._need(unit))
            self._handles.append(above.register_forward_pre_hook(look))

    def _need(self, unit: ShardedUnit) -> None:
        if not unit.is_present:  # a wrong guess, or another one is over
            self._release(self._kept)
        self._kept.discard(unit)
        self._order.needed(unit)
        unit.gather()
        ahead = self._next_ahead()
        for other in self.units:
            if other.is_requested and other not in ahead:
                other.drop_request()  # a wrong guess
        for following in ahead:
            following.request_ahead()

    # The units needed next, up to one that is present now but will have been released by then.
    def _coming(self) -> Iterator[ShardedUnit]:
        passed = set()
        for unit in self._order.following():
            if unit in passed and unit.is_present and not (unit.is_pinned or unit.is_root):
                return
            passed.add(unit)
            yield unit

    # What fits into `prefetch_bytes`, in the order of use.
    def _next_ahead(self) -> list[ShardedUnit]:
        if all(unit.is_present for unit in self.units):
            return []
        ahead: list[ShardedUnit] = []
        size = 0
        for unit in self._coming():
            if unit.is_present or unit in ahead:
                continue
            size += unit.nbytes
            if self._prefetch_bytes is not None and size > self._prefetch_bytes:
                break
            ahead.append(unit)
            if self._prefetch_bytes is None:
                break
        return ahead

    def _is_in_use(self, unit: ShardedUnit) -> bool:
        return bool(unit in self._held or self._in_forward[unit] or self._in_backward[unit])

    def _release(self, units: Iterable[ShardedUnit]) -> None:
        for unit in list(units):
            self._kept.discard(unit)
            unit.release()

    # A unit stays if it is needed before any other would have to be gathered.
    def _let_go(self, unit: ShardedUnit) -> None:
        if self._is_in_use(unit) or unit in self._until_update:
            return
        coming = self._coming()
        if next((one for one in coming if one is unit or not one.is_present), None) is unit:
            if not unit.is_root:
                self._release(one for one in self._kept if one is not unit and not one.is_root)
            self._kept.add(unit)
        else:
            self._release([unit])

    # Releases a unit that only stays for later use: a state dict uses its slices.
    def _give_back(self, unit: ShardedUnit) -> None:
        if not self._is_in_use(unit) and (unit in self._kept or unit in self._until_update):
            self._release([unit])

    def _before_forward(self, unit: ShardedUnit, args: Any, kwargs: Any) -> Any:
        self._in_forward[unit] += 1
        self._need(unit)
        if not torch.is_grad_enabled():
            return args, kwargs
        # Tensors in lists and dicts are skipped: a module may write to those. A tensor that occurs
        # twice stays one.
        own = {id(x): x for x in (*args, *kwargs.values()) if _has_gradient(x)}
        if not own:
            return args, kwargs
        passed = _AfterBackward.apply(lambda: self._backward_over(unit), *own.values())
        by_id = dict(zip(own, passed, strict=True))
        return (
            tuple(by_id.get(id(x), x) for x in args),
            {key: by_id.get(id(x), x) for key, x in kwargs.items()},
        )

    # Also called if the forward has raised.
    def _after_forward(self, unit: ShardedUnit, output: Any) -> None:
        self._in_forward[unit] = max(0, self._in_forward[unit] - 1)
        if private_torch.current_graph_task_id() == -1:  # left by a failed backward pass
            self._in_backward[unit].clear()
        keeps = False
        leaves = private_torch.tree_leaves(output)
        if unit.has_memory_of(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)):
            self._held.add(unit)
        if torch.is_grad_enabled():
            outputs = [leaf for leaf in leaves if _has_gradient(leaf)]
            hook = _BeforeBackward(lambda: self._backward_begins(unit))
            for node in {_maker(one) for one in outputs} - {None}:
                node.register_prehook(hook)
            # For objects that torch cannot look into, and for tangents, the beginning of their backward
            # is not reported.
            if not all(isinstance(leaf, _PLAIN) for leaf in leaves) or any(map(_has_tangent, leaves)):
                self._held.add(unit)
            keeps = bool(outputs) and (unit.is_root or not self._reshards_after_forward)
        if not keeps:
            self._let_go(unit)

    def _backward_begins(self, unit: ShardedUnit) -> None:
        backward = private_torch.current_graph_task_id()
        count = self._in_backward[unit]
        count[backward] = count.get(backward, 0) + 1
        self._need(unit)
        if torch.is_grad_enabled():  # gradients of gradients read the parameters once more
            self._held.add(unit)
        if not self._reshards_after_backward:
            self._until_update.add(unit)
        if backward not in self._told:
            self._told.add(backward)
            private_torch.at_end_of_backward(lambda: self._backward_ended(backward))

    def _backward_over(self, unit: ShardedUnit) -> None:
        backward = private_torch.current_graph_task_id()
        count = self._in_backward[unit]
        if count.get(backward, 0) > 1:
            count[backward] -= 1
            return
        count.pop(backward, None)
        self._let_go(unit)

    def _backward_ended(self, backward: int) -> None:
        self._told.discard(backward)
        for unit, count in self._in_backward.items():
            count.pop(backward, None)
            if unit.is_present:
                self._let_go(unit)

    def end(self, reducer: Reducer) -> None:
        """This rank needs none of its units for now. Collective over the shard group, on a GPU over the
        mesh, but may be called any number of times.
        """
        gathers = self._gathers[reducer]
        self._release_all(gathers)
        gathers.end()

    def begin_update(self) -> None:
        """Called before this rank's slices change; updates them from writes to parameters. Collective.
        A graph that saved the old values then refuses its backward pass, as usual in torch.
        """
        self._until_update.clear()
        for gathers in self._gathers.values():
            self._release_all(gathers)
            gathers.begin_update()
        self.wait_parts()
        self.read_written()
        parameters = [one.parameter for unit in self.units for one in unit.slices]
        torch.autograd.graph.increment_version(parameters)
        for unit in self.units:
            unit.was_read()

    def read_written(self) -> None:
        """Updates slices from writes to parameters that are present."""
        for unit in self.units:
            unit.read_written()

    def expire(self) -> None:
        """Slices are about to be written to: units will be gathered again when needed."""
        for unit in self.units:
            unit.expire()

    def skip_update(self) -> None:
        """There will be no update: releases what stayed until then."""
        self._release(unit for unit in self._until_update if not self._is_in_use(unit))
        self._until_update.clear()

    def updated(self) -> None:
        """Gathers the replicas' parts, and new values of what is pinned. Collective."""
        for parts in self._parts.values():
            parts.start()
        for unit in self.units:
            if unit.is_pinned:
                unit.refresh()

    def _release_all(self, gathers: _hsdp.UnitGather) -> None:
        self._order.restart()
        self._kept = {unit for unit in self._kept if unit.gathers is not gathers}
        self._told.clear()
        for unit in self.units:
            if unit.gathers is gathers:
                self._held.discard(unit)
                self._in_forward[unit] = 0
                self._in_backward[unit].clear()
                if unit not in self._until_update:
                    unit.release()

    def wait_parts(self) -> None:
        """Waits until this rank's slices are complete."""
        for parts in self._parts.values():
            parts.fence()

    def pin(self, module: torch.nn.Module) -> None:
        """Gathers the units with parameters of that module, to stay. Collective."""
        for unit in self._of(module):
            unit.pin()
        self._serve()

    # Others may need this rank's slices.
    def _serve(self) -> None:
        for gathers in self._gathers.values():
            gathers.end()

    def unpin(self, module: torch.nn.Module) -> None:
        """Releases them."""
        for unit in self._of(module):
            unit.unpin()

    def _of(self, module: torch.nn.Module) -> list[ShardedUnit]:
        parameters = {id(p) for p in module.parameters()}
        return [
            unit for unit in self.units
            if any(id(one.parameter) in parameters for one in unit.slices)
        ]

    def gather_all(self) -> None:
        """Gathers all units permanently. Collective."""
        for unit in self.units:
            unit.pin()
        self._serve()

    def wrap(self, module: torch.nn.Module, name: str) -> None:
        """Treats a method of a unit's module as a forward."""
        number = next((n for n, unit in enumerate(self.units) if unit.module is module), None)
        if number is None:
            refuse("a module whose parameters are a unit", type(module).__name__)
        before = ModuleHook(self, number, PassHooks._before_forward)
        after = ModuleHook(self, number, PassHooks._after_forward)
        method = getattr(module, name)
        # The module keeps this wrapper, which must not keep the module.
        is_own = getattr(method, "__self__", None) is module
        function = method.__func__ if is_own else method
        its = weakref.ref(module)

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            module, output = its(), None
            if module is None:
                refuse(f"the module whose '{name}' this is", "none, as it is gone; keep it")
            args, kwargs = before(module, args, kwargs) or (args, kwargs)
            try:
                output = function(module, *args, **kwargs) if is_own else function(*args, **kwargs)
            finally:
                after(module, output)
            return output

        setattr(module, name, wrapped)

    def abort(self, reason: str) -> None:
        """Ends the mesh with this text."""
        for gathers in self._gathers.values():
            gathers.abort(reason)
        for parts in self._parts.values():
            parts.abort(reason)

    def stats(self) -> list[GatherStats]:
        """Statistics of the gathers so far."""
        units = [GatherStats(**gathers.stats()) for gathers in self._gathers.values()]
        return units + [parts.stats() for parts in self._parts.values()]

    def close(self) -> None:
        """Removes the hooks; parameters stay as they are."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        with contextlib.suppress(Exception):  # as the other replicas wait for this one's parts
            self.wait_parts()
        for one in self._gathers:
            one._after_passes.discard(self.end)
        for unit in self.units:
            unit.forget()


def full_state_dict(model: torch.nn.Module, units: Iterable[ShardedUnit]) -> dict[str, Any]:
    """A model's state dict on the CPU, gathered one unit at a time. Collective."""
    state = model.state_dict(keep_vars=True)
    of_parameter: dict[int, list[str]] = {}
    for key, value in state.items():
        of_parameter.setdefault(id(value), []).append(key)
    needed = [unit for unit in units if any(id(one.parameter) in of_parameter for one in unit.slices)]
    for gathers, its in itertools.groupby(needed, lambda unit: unit.gathers):
        for unit in its:
            was_present = unit.is_present
            unit.gather()
            for one in unit.slices:
                keys = of_parameter.pop(id(one.parameter), ())
                whole = one.parameter.detach().to("cpu", copy=True) if keys else None
                for key in keys:
                    state[key] = whole
            if not was_present:
                unit.release()
        gathers.end()  # others may need this rank's slices
    for keys in of_parameter.values():
        value = state[keys[0]]
        whole = value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
        for key in keys:
            state[key] = whole
    return dict(state)


_PLAIN = (torch.Tensor, str, bytes, int, float, complex, type(None), torch.dtype, torch.device)


def _has_gradient(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _has_tangent(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and forward_ad.unpack_dual(leaf).tangent is not None


# An in-place write to a view gives it a new grad_fn; that of its base stays.
def _maker(output: torch.Tensor) -> Any:
    base = private_torch.base(output)
    return (output if base is None else base).grad_fn
