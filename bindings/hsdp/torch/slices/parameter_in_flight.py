"""Parameters that are gathered while other work runs: reading one waits for it.

[Note: parameters in flight]
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from hsdp.torch import private_torch
from hsdp.torch.slices.parameter_slices import ParameterSlice
from hsdp.torch.value_digests import bits
from hsdp.zero.parameter_gather import ParameterGather


class GatheredUnit:
    """Parameters that travel in one message. They are in flight from the start of the gather until any
    thread has waited for them. `used` records those that were used in flight, in order.
    """

    def __init__(
        self, gather: ParameterGather, slices: Sequence[ParameterSlice], used: dict[int, None]
    ) -> None:
        self._gather = gather
        self._slices = slices
        self._used = used
        self._lock = threading.RLock()
        self._is_in_flight = False
        self._on_host = slices[0].whole.is_cpu
        self._copied: list[Any] = []  # (memory that is not row-major, the gathered copy)

    def depart(self, flies: bool) -> None:
        """Call it once the gather has started: readers of its parameters then wait, or else this call
        does.
        """
        self._copied = [(s.parameter.data, s.whole) for s in self._slices if s.is_copied]
        if self._on_host:  # a reader may be inside a transform, in which torch copies nothing
            self._copied = [(bits(data).numpy(), bits(whole).numpy()) for data, whole in self._copied]
        # Subclasses by users may treat classes in their own way; a copy is made once, on one stream.
        if (
            flies
            and (self._on_host or not self._copied)
            and all(type(one.parameter) is torch.nn.Parameter for one in self._slices)
        ):
            self._is_in_flight = True
            for one in self._slices:
                in_flight[id(one.parameter)] = self
                one.parameter.__class__ = ParameterInFlight
        else:
            self._complete()

    def wait_for(self, parameter: torch.Tensor) -> None:
        """Called when that parameter is about to be used."""
        self._used.setdefault(id(parameter))
        self.wait()

    def wait(self) -> None:
        """Waits until its parameters have their new values. Raises a failure at each call."""
        with self._lock:
            if not self._is_in_flight:  # it may have been written to since
                return
            self._complete()
            # On a GPU only the current stream waits; another one may read next.
            if self._on_host or self._gather.is_ready(self._slices[0].name):
                self.release()

    def _complete(self) -> None:
        self._gather.wait(self._slices[0].name)
        for data, whole in self._copied:
            data[...] = whole

    def release(self) -> None:
        """Turns them into normal parameters again."""
        self._is_in_flight = False
        for one in self._slices:
            if in_flight.get(id(one.parameter)) is self:
                one.parameter.__class__ = torch.nn.Parameter
                in_flight.pop(id(one.parameter), None)


#: by id of the parameter, which the unit keeps alive
in_flight: dict[int, GatheredUnit] = {}


# A forked child has no thread that gathers.
def _land() -> None:
    for unit in list(in_flight.values()):
        with contextlib.suppress(Exception):
            unit.wait()


os.register_at_fork(before=_land)


class MetByCompiler(Protocol):
    """An object that puts parameters in flight."""

    def met_by_compiler(self) -> None:
        """Called when a compiler has met a parameter in flight, or a module that waits for one."""


may_put_in_flight: weakref.WeakSet[MetByCompiler] = weakref.WeakSet()


def _tell_of_compiler() -> bool:
    for one in [*may_put_in_flight]:
        one.met_by_compiler()
    return True


#: Nothing is in flight when this returns. It runs while a compiler traces, but is not traced.
tell_of_compiler: Any = torch.compiler.assume_constant_result(_tell_of_compiler)


class ParameterInFlight(torch.nn.Parameter):
    """The class of a parameter while it is gathered: reading or writing its values waits first."""

    # Not in flight itself: `type(p)(values)` is how torch copies a parameter.
    def __new__(cls, data: Any = None, requires_grad: bool = True) -> Any:
        return torch.nn.Parameter(data, requires_grad)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            tell_of_compiler()
        elif func is torch.Tensor.detach and _is_made_a_parameter(sys._getframe(1)):
            _wait_for_all(args)
            return private_torch.make_subclass(torch.nn.Parameter, args[0], args[0].requires_grad)
        elif func not in WITHOUT_VALUES and _wait_for_all(args) & _wait_for_all(kwargs.values()):
            return func(*args, **kwargs)
        with private_torch.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    # The only method that ignores __torch_function__.
    def as_subclass(self, cls: Any) -> Any:
        """Like torch's."""
        _wait_for_all([self])
        return torch.Tensor.as_subclass(self, cls)


# `nn.Parameter(p)` detaches p, and expects the class that p then has.
def _is_made_a_parameter(caller: Any) -> bool:
    return caller.f_code is torch.nn.Parameter.__new__.__code__


# Returns whether none of them is in flight any more.
def _wait_for_all(values: Iterable[Any]) -> bool:
    landed = True
    for value in values:
        if type(value) is ParameterInFlight:
            unit = in_flight.get(id(value))
            if unit is not None:
                unit.wait_for(value)
            landed &= type(value) is not ParameterInFlight
        elif isinstance(value, (list, tuple)):
            landed &= _wait_for_all(value)
        elif isinstance(value, dict):
            landed &= _wait_for_all(value.values())
    return landed


#: reads and writes no values: a Reducer looks at every p.grad when a microbatch begins
WITHOUT_VALUES = {
    *(getattr(torch.Tensor, name).__get__ for name in (
        "device", "dtype", "grad", "grad_fn", "is_cpu", "is_cuda", "is_leaf", "is_meta",
        "is_mkldnn", "is_mps", "is_nested", "is_quantized", "is_sparse", "is_sparse_csr", "is_xpu",
        "itemsize", "layout", "name", "nbytes", "ndim", "output_nr", "requires_grad",
        "retains_grad", "shape", *private_torch.ATTRIBUTES_WITHOUT_VALUES,
    )),
    *(getattr(torch.Tensor, name).__set__ for name in (
        "grad", "requires_grad", *private_torch.SETTABLE_WITHOUT_VALUES,
    )),
    getattr(torch.Tensor, "grad").__delete__,  # noqa: B009 - a descriptor, not a tensor
    *(getattr(torch.Tensor, name) for name in (
        "__hash__", "__len__", "dim", "element_size", "get_device", "is_complex", "is_contiguous",
        "is_floating_point", "is_inference", "is_shared", "is_signed", "nelement", "numel",
        "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad",
        "size", "storage_offset", "stride",
    )),
    torch.is_complex, torch.is_floating_point, torch.is_inference, torch.is_tensor, torch.numel,
}
