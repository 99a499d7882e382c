"""Parameters that are gathered under what comes next, and who waits for them.

[Note: parameters in flight]
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hsdp.torch.parameter_slices import ParameterSlice
from hsdp.zero.parameter_gather import ParameterGather


class GatheredUnit:
    """Parameters that travel in one message, from its start until somebody has waited for it."""

    def __init__(
        self, gather: ParameterGather, slices: Sequence[ParameterSlice], used: dict[int, None]
    ) -> None:
        self._gather = gather
        self._used = used
        self._has_landed = False
        self._slices = slices
        self._on_host = slices[0].whole.is_cpu
        self._copied: list[Any] = [(s.parameter.data, s.whole) for s in slices if s.is_copied]
        if self._on_host:  # whoever waits may be inside a transform, in which torch copies nothing
            self._copied = [(_bits(data), _bits(whole)) for data, whole in self._copied]
        # A class of the user's has its own ideas of what a class does; a copy is made once, on one
        # stream.
        self.may_fly = all(type(s.parameter) is torch.nn.Parameter for s in slices) and (
            self._on_host or not self._copied
        )

    def guard(self) -> None:
        """From here on whoever reads one of its parameters waits."""
        for one in self._slices:
            _in_flight[id(one.parameter)] = self
            one.parameter.__class__ = ParameterInFlight

    def wait_for(self, parameter: torch.Tensor) -> None:
        """For who is about to use that one."""
        self._used.setdefault(id(parameter))
        self.wait()

    def wait(self) -> None:
        """Until its parameters have their new values. What went wrong is raised, each time."""
        if self._has_landed:  # and somebody may have written since
            return
        name = self._slices[0].name
        self._gather.wait(name)
        for parameter, whole in self._copied:
            parameter[...] = whole
        # On a GPU only the current stream waits; another one may read next.
        if self._on_host or self._gather.is_ready(name):
            self.release()

    def release(self) -> None:
        """They are parameters like others again."""
        self._has_landed = True
        for one in self._slices:
            if _in_flight.get(id(one.parameter)) is self:
                one.parameter.__class__ = torch.nn.Parameter
                del _in_flight[id(one.parameter)]


def _bits(tensor: torch.Tensor) -> Any:
    return tensor.view(torch.int32 if tensor.dtype is torch.float32 else torch.int16).numpy()


_in_flight: dict[int, GatheredUnit] = {}  # by id of the parameter, which the unit keeps alive


class ParameterInFlight(torch.nn.Parameter):
    """The class of a parameter while it is gathered: what reads or writes its values waits before."""

    # Not another one in flight: `type(p)(values)` is how torch copies a parameter.
    def __new__(cls, data: Any = None, requires_grad: bool = True) -> Any:
        return torch.nn.Parameter(data, requires_grad)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _WITHOUT_VALUES and _wait_for_all(args) & _wait_for_all(kwargs.values()):
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    # The only method that asks no class.
    def as_subclass(self, cls: Any) -> Any:
        """As torch's."""
        _wait_for_all([self])
        return super().as_subclass(cls)


# Whether none of them is in flight any more.
def _wait_for_all(values: Iterable[Any]) -> bool:
    landed = True
    for value in values:
        if type(value) is ParameterInFlight:
            unit = _in_flight.get(id(value))
            if unit is not None:
                unit.wait_for(value)
            landed &= type(value) is not ParameterInFlight
        elif isinstance(value, (list, tuple)):
            landed &= _wait_for_all(value)
        elif isinstance(value, dict):
            landed &= _wait_for_all(value.values())
    return landed


# What neither reads nor writes values: a Reducer looks at every p.grad when a microbatch begins.
_WITHOUT_VALUES = {
    *(getattr(torch.Tensor, name).__get__ for name in (
        "device", "dtype", "grad", "grad_fn", "is_cpu", "is_cuda", "is_leaf", "is_meta",
        "is_mkldnn", "is_mps", "is_nested", "is_quantized", "is_sparse", "is_sparse_csr", "is_xpu",
        "itemsize", "layout", "name", "nbytes", "ndim", "output_nr", "requires_grad",
        "retains_grad", "shape", "_backward_hooks", "_post_accumulate_grad_hooks", "_version",
    )),
    *(getattr(torch.Tensor, name).__set__ for name in (
        "grad", "requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks",
    )),
    torch.Tensor.grad.__delete__,
    *(getattr(torch.Tensor, name) for name in (
        "__hash__", "__len__", "dim", "element_size", "get_device", "is_complex", "is_contiguous",
        "is_floating_point", "is_inference", "is_shared", "is_signed", "nelement", "numel",
        "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad",
        "size", "storage_offset", "stride",
    )),
    torch.is_complex, torch.is_floating_point, torch.is_inference, torch.is_tensor, torch.numel,
}

# They look at the parameters of modules below them, and take another way where one is of a class of
# its own.
_READS_BELOW = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer)


class WaitBeforeForward:
    """A pre-hook that waits for a module's parameters. A copy of it, in a copy of the model, does
    nothing.
    """

    def __init__(
        self, gather: OverlappedGather | None = None, slices: Sequence[ParameterSlice] = ()
    ) -> None:
        self._gather = gather
        self._slices = slices

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        """Before the module's forward."""
        if self._gather is None:
            return
        if torch.compiler.is_compiling():
            self._gather.note_compiled()
            return
        self._gather.wait_before_use(self._slices)

    def __reduce__(self) -> Any:
        return WaitBeforeForward, ()


class OverlappedGather:
    """What is in flight between a step and the next one, of one optimizer.

    Forward pre-hooks wait for the parameters of their module, and the parameters themselves for
    whoever meets them elsewhere. A compiler would compile once more for a parameter in flight, so
    once it has met one of the modules, steps wait for their gathers themselves.
    """

    def __init__(self, models: Iterable[torch.nn.Module], slices: Sequence[ParameterSlice]) -> None:
        self._units: list[GatheredUnit] = []
        self._used: dict[int, None] = {}  # ids of parameters, in the order of first use
        self._watches = True
        self._is_compiled = False
        self.note_compiled = torch.compiler.assume_constant_result(self._make_note())
        self._hooks: list[Any] = []
        by_parameter = {id(one.parameter): one for one in slices}
        for module in {module: None for model in models for module in model.modules()}:
            below = isinstance(module, _READS_BELOW)
            own = [by_parameter.get(id(p)) for p in module.parameters(recurse=below)]
            found = [one for one in own if one is not None]
            if isinstance(module, torch.nn.TransformerEncoder):  # looks at those of the first layer
                found = [by_parameter[id(p)] for p in module.layers[0].parameters()
                         if id(p) in by_parameter]
            if found:
                hook = WaitBeforeForward(self, found)
                self._hooks.append(module.register_forward_pre_hook(hook, prepend=True))

    # The compiler runs it while it traces, and traces nothing of it.
    def _make_note(self) -> Any:
        def note_compiled() -> bool:
            self._is_compiled = True
            self.wait_all()
            return True

        return note_compiled

    def start(
        self, gathers: Iterable[tuple[ParameterGather, Sequence[ParameterSlice]]], overlaps: bool
    ) -> None:
        """What these gathers complete is in flight from here on, or waited for now."""
        for gather, slices in gathers:
            by_name = {one.name: one for one in slices}
            for names in gather.units():
                self._units.append(GatheredUnit(gather, [by_name[n] for n in names], self._used))
        if self._is_compiled or not overlaps:
            return self.wait_all()
        for unit in self._units:
            if unit.may_fly:
                unit.guard()
            else:
                unit.wait()
                unit.release()

    def wait_before_use(self, slices: Iterable[ParameterSlice]) -> None:
        """For a module that is about to read them."""
        if not self._units:
            return
        for one in slices:
            if self._watches:  # also one that is there already
                self._used.setdefault(id(one.parameter))
            unit = _in_flight.get(id(one.parameter))
            if unit is not None:
                unit.wait()

    def wait_all(self) -> None:
        """Until nothing is in flight."""
        for unit in self._units:
            unit.wait()
        self._end()

    def _end(self) -> None:
        for unit in self._units:
            unit.release()
        self._units.clear()

    def order_of_use(self, slices: Sequence[ParameterSlice]) -> list[int]:
        """Their numbers, those first that were used first since the last start. Watches no longer."""
        self._watches = False
        numbers = {id(one.parameter): number for number, one in enumerate(slices)}
        return [numbers[one] for one in {**self._used, **dict.fromkeys(numbers)}]

    def close(self) -> None:
        """Leaves neither hooks nor parameters in flight, also when what it waits for fails."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        try:
            self.wait_all()
        finally:
            self._end()

    def close_quietly(self) -> None:
        """Where nobody hears what went wrong."""
        with contextlib.suppress(Exception):
            self.close()
