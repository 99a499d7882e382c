"""Gathers an optimizer's parameters while the following work runs.

[Note: parameters in flight]
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from hsdp.reducer import Reducer
from hsdp.torch.slices.parameter_in_flight import (
    GatheredUnit, in_flight, may_put_in_flight, tell_of_compiler,
)
from hsdp.torch.slices.parameter_slices import ParameterSlice
from hsdp.zero.parameter_gather import GatherStats, ParameterGather

# They look at the parameters of modules below, and behave differently if one is of a subclass.
_READS_BELOW = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer)


# Their forward runs no hooks and ignores the parameters' class.
def _scripted_parameters(model: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            yield from module.parameters()


class WaitBeforeForward:
    """A pre-hook that waits for a module's parameters, and for those of modules below that have never
    been called: a list of parameters never is, and its owner's forward may ignore their class. A
    copy of the hook, in a copy of the model, does nothing.
    """

    def __init__(self, gather: OverlappedGather, slices: Sequence[ParameterSlice]) -> None:
        self._gather = weakref.ref(gather)
        self._slices = slices
        self._was_called = False
        #: the hooks of modules below; until the first call, all of them
        self.below: list[WaitBeforeForward] = []

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        """Called before the module's forward."""
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

    # A built-in that does nothing: the copy may be loaded without this package.
    def __reduce__(self) -> Any:
        return getattr, ({}, "get")


class OverlappedGather:
    """Gathers the parameters of one optimizer; with `models`, while the following work runs.

    Forward pre-hooks wait for the parameters of their module, and elsewhere the parameters themselves
    make readers wait. A compiler would recompile for a parameter in flight, so once it has met one,
    `start` itself waits for the gathers.

    The constructor and `start` are collective; everything else is local.
    """

    def __init__(
        self,
        slices: Sequence[ParameterSlice],
        unit_bytes: int,
        models: Sequence[torch.nn.Module] = (),
    ) -> None:
        self._slices = list(slices)  # in gather order
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
        """Waits. An exported graph runs elsewhere; a compiled one will run here again."""
        self._flies = self._flies and torch.compiler.is_exporting()
        self.wait_all()

    def start(self) -> None:
        """Call it when this rank's slices, or masters, are new: gathers all parameters. Waits for those
        that cannot be in flight.
        """
        if self._start_count == 1 and self._slices:
            self._agree_on_order()
        self._start_count += 1
        # Makes a backward pass of a graph that saved the old values fail, as usual in torch.
        torch.autograd.graph.increment_version([one.parameter for one in self._slices])
        for gather in self._gathers.values():
            gather.start()
        for unit in self._units:
            unit.depart(self._flies and unit not in self._grounded)

    # The order in which rank 0 first used the parameters since the first start. No rank knows which
    # parameters others have in flight.
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
        """From the next start, its parameter uses other memory. Call it while nothing is in flight."""
        self._gathers[one.reducer].rebind(one.name, one.whole)

    def wait_before_use(self, slices: Iterable[ParameterSlice]) -> None:
        """Called for a module that is about to read them."""
        watches = self._watches and self._start_count > 0
        if not in_flight and not watches:
            return
        for one in slices:
            if watches:  # even if it has already arrived
                self._used.setdefault(id(one.parameter))
            unit = in_flight.get(id(one.parameter))
            if unit is not None:
                unit.wait()

    def wait_all(self) -> None:
        """Waits until nothing is in flight."""
        for unit in self._units:
            unit.wait()
        self._release()

    # On a GPU, includes those that have not arrived.
    def _release(self) -> None:
        for unit in self._units:
            unit.release()

    def stats(self) -> GatherStats:
        """Totals of all gathers so far."""
        every = [*self._replaced, *(gather.stats() for gather in self._gathers.values())]
        return GatherStats(*map(sum, zip(*every, strict=True)))

    def last_times(self) -> dict[str, tuple[float, float]]:
        """When the last gather of each parameter began and ended, like ParameterGather.last_times."""
        every = (gather.last_times() for gather in self._gathers.values())
        return {name: times for one in every for name, times in one.items()}

    def abort(self, reason: str) -> None:
        """Ends the mesh with this text: for a rank whose slices will never come."""
        for gather in self._gathers.values():
            gather.abort(reason)

    def close(self) -> None:
        """Removes hooks and parameters in flight, even if waiting for them fails."""
        may_put_in_flight.discard(self)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        try:
            self.wait_all()
        finally:
            self._release()

    def close_quietly(self) -> None:
        """For contexts where no one would see an error."""
        with contextlib.suppress(Exception):
            self.close()
