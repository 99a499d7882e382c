"""Parameters whose values are stored as slices, one per rank, while the memory of the whole is freed.

[Note: parameters that are released]
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn, Protocol

import torch

from hsdp.errors import UsageError
from hsdp.torch import private_torch
from hsdp.torch.slices.parameter_in_flight import WITHOUT_VALUES


class Released(Protocol):
    """What this rank keeps of a released parameter."""

    name: str

    def saved(self) -> torch.Tensor:
        """Its slice, as stored in a state dict."""
        ...

    def load(self, values: torch.Tensor) -> None:
        """Takes its slice of these values."""
        ...


#: for errors
RELEASED = "got it released"

#: by id of the parameter, which the value keeps alive
released: dict[int, Released] = {}


class ReleasedParameter(torch.nn.Parameter):
    """The class of a parameter while it is released: it has shape and gradient, but no values. Many of
    torch's kernels would read the freed memory.
    """

    # `type(p)(values)` is how torch copies a parameter.
    def __new__(cls, data: Any = None, requires_grad: bool = True) -> Any:
        return torch.nn.Parameter(data, requires_grad)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func not in WITHOUT_VALUES and func not in _PASSES:
            one = released.get(id(args[0])) if args else None
            if one is not None and func is torch.Tensor.detach and _caller() is private_torch.SAVES:
                return one.saved()
            if one is not None and func is torch.Tensor.copy_ and _caller() is private_torch.LOADS:
                one.load(args[1])
                return args[0]
            if func is torch.zeros_like and private_torch.initialises(_caller()):  # whole gradients
                return torch.zeros((), dtype=args[0].dtype, device=args[0].device).expand(args[0].shape)
            _refuse(func, (*args, *(kwargs or {}).values()))
        with private_torch.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    # The only method that ignores __torch_function__.
    def as_subclass(self, cls: Any) -> Any:
        """Refused: it has no values."""
        _refuse(torch.Tensor.as_subclass, (self,))


# Its unit is gathered in these.
_PASSES = {torch.autograd.backward, torch.autograd.grad, torch.Tensor.backward}


# The code of the caller of __torch_function__.
def _caller() -> Any:
    return sys._getframe(2).f_code


def _refuse(func: Any, values: Any) -> NoReturn:
    flat = private_torch.tree_leaves(values)
    name = next((released[id(v)].name for v in flat if id(v) in released), None)
    if name is None:
        raise UsageError(
            "zero: ShardedOptimizer: expected a parameter with its optimizer, got a released one whose "
            "optimizer is gone without close(), and its values with it; load a checkpoint into a new model"
        )
    what = getattr(func, "__name__", str(func))
    if what in ("__get__", "__set__"):
        what = getattr(getattr(func, "__self__", None), "__name__", what)
    raise UsageError(
        f"zero: ShardedOptimizer: expected '{name}' to be whole for '{what}', {RELEASED}, as each rank "
        "keeps a slice at stage 3; call optimizer.unshard(module) before and reshard(module) after, take "
        "this rank's slice from optimizer.master(parameter), or let units= have the module whose "
        "forward reads it"
    )
