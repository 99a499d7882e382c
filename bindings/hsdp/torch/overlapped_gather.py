"""The gathers of an optimizer's parameters, under what comes next.

[Note: parameters in flight]
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from hsdp.reducer import Reducer
from hsdp.torch.parameter_in_flight import (
    GatheredUnit,
    in_flight,
    may_put_in_flight,
    tell_of_compiler,
)
from hsdp.torch.parameter_slices import ParameterSlice
from hsdp.zero.parameter_gather import GatherStats, ParameterGather

# They look at the parameters of modules below them, and take another way where one is of a class of
# its own.
_READS_BELOW = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer)


# Their forward runs no hook and asks no class.
def _scripted_parameters(model: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            yield from module.parameters()


class WaitBeforeForward:
    """A pre-hook that waits for a module's parameters, and for those of modules below it that nobody
    has called yet: a list of parameters never is, and what its owner's forward does with them may ask
    no class. A copy of the hook, in a copy of the model, does nothing.
    """

    def __init__(self, gather: OverlappedGather, slices: Sequence[ParameterSlice]) -> None:
        self._gather = weakref.ref(gather)
        self._slices = slices
        self._was_called = False
        #: the hooks of modules below, all of them until the first call
        self.below: list[WaitBeforeForward] = []

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        """Before the module's forward."""
        if torch.compiler.is_compiling():
            tell_of_compiler()
            return
        gather = self._gather()
        if gather is None:
            return
        self._was_called = True
        if self.below:
            self.below = [one for one in self.below if not one._was_called]
            for one in self.below:
                gather.wait_before_use(one._slices)
        gather.wait_before_use(self._slices)

    # A function of Python's own that changes nothing: who loads the copy may not have this package.
    def __reduce__(self) -> Any:
        return getattr, ({}, "get")


class OverlappedGather:
    """Gathers the parameters of one optimizer, beside what comes next where `models` are given.

    Forward pre-hooks wait for the parameters of their module, and the parameters themselves for
    whoever meets them elsewhere. A compiler would compile once more for a parameter in flight, so
    once it has met one of them, starts wait for their gathers themselves.

    Construction is collective, as `start` is; all else is local.
    """

    def __init__(
        self,
        slices: Sequence[ParameterSlice],
        unit_bytes: int,
        models: Sequence[torch.nn.Module] = (),
    ) -> None:
        self._slices = list(slices)  # in the order in which they are gathered
        self._unit_bytes = unit_bytes
        self._start_count = 0
        self._replaced: list[GatherStats] = []
        self._used: dict[int, None] = {}  # ids of parameters, in the order of first use
        self._watches = True
        self._flies = bool(models)
        self._scripted = {id(p) for model in models for p in _scripted_parameters(model)}
        self._hooks: list[Any] = []
        self._make_gathers()
        for model in models:
            self._hook(model)
        if models:
            may_put_in_flight.add(self)

    def _make_gathers(self) -> None:
        self._gathers: dict[Reducer, ParameterGather] = {}
        self._units: list[GatheredUnit] = []
        self._grounded: set[GatheredUnit] = set()
        of_reducer: dict[Reducer, list[ParameterSlice]] = {}
        for one in self._slices:
            of_reducer.setdefault(one.reducer, []).append(one)
        for reducer, slices in of_reducer.items():
            by_name = {one.name: one for one in slices}
            gather = ParameterGather(
                reducer,
                {one.name: one.whole for one in slices},
                {
                    s.name: s.master.detach().reshape(-1)
                    for s in slices if s.has_own_master and not s.offloaded
                },
                self._unit_bytes,
            )
            self._gathers[reducer] = gather
            for names in gather.units():
                together = [by_name[name] for name in names]
                self._units.append(GatheredUnit(gather, together, self._used))
                if any(id(one.parameter) in self._scripted for one in together):
                    self._grounded.add(self._units[-1])

    def _hook(self, model: torch.nn.Module) -> None:
        by_parameter = {id(one.parameter): one for one in self._slices}
        hooks: dict[torch.nn.Module, WaitBeforeForward] = {}
        for module in model.modules():
            read = module.parameters(recurse=isinstance(module, _READS_BELOW))
            if isinstance(module, torch.nn.TransformerEncoder):  # looks at those of the first layer
                read = module.layers[0].parameters()
            found = [by_parameter[id(p)] for p in read if id(p) in by_parameter]
            if not isinstance(module, torch.jit.ScriptModule):
                hooks[module] = WaitBeforeForward(self, found)
        for module, hook in hooks.items():
            hook.below = [hooks[one] for one in module.modules()
                          if one is not module and one in hooks and hooks[one]._slices]
            if hook.below or hook._slices:
                self._hooks.append(module.register_forward_pre_hook(hook, prepend=True))

    def met_by_compiler(self) -> None:
        """Waits. An export goes elsewhere; what is compiled will run again."""
        self._flies = self._flies and torch.compiler.is_exporting()
        self.wait_all()

    def start(self) -> None:
        """This rank's slices, or masters, are new: gathers all parameters. Waits for those that
        cannot be in flight.
        """
        if self._start_count == 1 and self._slices:
            self._agree_on_order()
        self._start_count += 1
        # A backward pass of a graph that saved the old values is an error, as torch has it.
        torch.autograd.graph.increment_version([one.parameter for one in self._slices])
        for gather in self._gathers.values():
            gather.start()
        for unit in self._units:
            unit.depart(self._flies and unit not in self._grounded)

    # That in which rank 0 used the parameters first since the first start. No rank knows which others
    # have parameters in flight.
    def _agree_on_order(self) -> None:
        self._watches = False
        numbers = {id(one.parameter): number for number, one in enumerate(self._slices)}
        used = [numbers[one] for one in {**self._used, **dict.fromkeys(numbers)}]
        first = self._slices[0]
        agreed = torch.tensor(used, device=first.reducer.mesh.device)
        first.reducer.mesh.world.broadcast(agreed)
        order = [self._slices[number] for number in agreed.tolist()]
        if order != self._slices:
            self._slices = order
            self._replaced += [gather.stats() for gather in self._gathers.values()]
            self._make_gathers()

    def rebind(self, one: ParameterSlice) -> None:
        """From the next start on its parameter is other memory. While nothing is in flight."""
        self._gathers[one.reducer].rebind(one.name, one.whole)

    def wait_before_use(self, slices: Iterable[ParameterSlice]) -> None:
        """For a module that is about to read them."""
        watches = self._watches and self._start_count > 0
        if not in_flight and not watches:
            return
        for one in slices:
            if watches:  # also one that is there already
                self._used.setdefault(id(one.parameter))
            unit = in_flight.get(id(one.parameter))
            if unit is not None:
                unit.wait()

    def wait_all(self) -> None:
        """Until nothing is in flight."""
        for unit in self._units:
            unit.wait()
        self._release()

    # On a GPU also what has not landed.
    def _release(self) -> None:
        for unit in self._units:
            unit.release()

    def stats(self) -> GatherStats:
        """Of all gathers so far."""
        every = [*self._replaced, *(gather.stats() for gather in self._gathers.values())]
        return GatherStats(*map(sum, zip(*every, strict=True)))

    def last_times(self) -> dict[str, tuple[float, float]]:
        """When the last gather of each parameter began and ended, as ParameterGather.last_times."""
        every = (gather.last_times() for gather in self._gathers.values())
        return {name: times for one in every for name, times in one.items()}

    def abort(self, reason: str) -> None:
        """Ends the mesh with this text: for a rank whose slices the others wait for in vain."""
        for gather in self._gathers.values():
            gather.abort(reason)

    def close(self) -> None:
        """Leaves neither hooks nor parameters in flight, also when what it waits for fails."""
        may_put_in_flight.discard(self)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        try:
            self.wait_all()
        finally:
            self._release()

    def close_quietly(self) -> None:
        """Where nobody hears what went wrong."""
        with contextlib.suppress(Exception):
            self.close()
