"""The norm of the mean gradient, and clipping by it."""

from __future__ import annotations

import importlib
import math
from typing import Any

import numpy as np

from hsdp import _hsdp
from hsdp.array import Array
from hsdp.errors import Error, UsageError
from hsdp.profiler_range import profiler_range

#: Added to a norm before dividing by it, as in torch.
EPSILON = 1e-6


def clip(
    reducers: list[Any], max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> Any:
    """Scales the results of all Reducers so that their norm is at most `max_norm`; returns the norm
    before that, like `norm`.
    """
    if not max_norm >= 0:
        raise UsageError(
            f"reducer: clip_grad_norm_: expected a max_norm of at least 0, got {max_norm:g}; "
            "grad_norm() only asks for the norm"
        )
    if norm_type != 2 or error_if_nonfinite:
        was = norm(reducers, norm_type)
        number = _number_of(was) if error_if_nonfinite else 0.0
        if not math.isfinite(number):
            raise Error(
                f"reducer: clip_grad_norm_: expected a finite norm, got {number}; nothing was "
                "scaled: skip this step where found_inf() is true, or leave error_if_nonfinite out"
            )
        if norm_type != 2:
            _scale(reducers, max_norm, was)
            return was
    with profiler_range("hsdp:clip_grad_norm"):
        return _hsdp.clip_grad_norm([one._handle for one in reducers], max_norm)


def _number_of(norm: Any) -> float:
    return norm.number() if isinstance(norm, _hsdp.Memory) else float(norm.reshape(()))


def norm(reducers: list[Any], norm_type: float) -> Any:
    """The joint norm of the results of all Reducers: one f64 on the mesh's device, or an array of one
    element.
    """
    handles = [one._handle for one in reducers]
    if norm_type == 2:
        return handles[0].grad_norm() if len(handles) == 1 else _hsdp.clip_grad_norm(handles, math.inf)
    if norm_type not in (1, math.inf):
        raise UsageError(
            f"reducer: norm_type: expected 1, 2 or inf, got {norm_type!r}; compute others from "
            "gather_gradients()"
        )
    on_host = reducers[0]._mesh.device == "cpu"
    combine = _norm_on_host if on_host else _norm_on_gpu
    groups = {id(one._slice_group): one._slice_group for one in reducers}
    parts = [
        combine(_results([one for one in reducers if one._slice_group is group]), norm_type, group)
        for group in groups.values()
    ]
    together: Any = sum(parts[1:], parts[0]) if norm_type == 1 else _maximum(parts)
    return together


# NaN if any part is NaN. For NumPy arrays or torch tensors.
def _maximum(parts: list[Any]) -> Any:
    most = parts[0]
    for part in parts[1:]:
        most = np.maximum(most, part) if isinstance(most, np.ndarray) else most.maximum(part)
    return most


# These norms are rare, so the arrays' libraries compute them: one number per array, in a fixed order.
def _norm_on_host(results: list[Any], norm_type: float, group: Any) -> Any:
    if norm_type == 1:
        return group.all_reduce(np.array([sum(np.abs(x).sum(dtype=np.float64) for x in results)]))
    most = np.array([np.max([np.abs(x).max(initial=0.0) for x in results])], dtype=np.float64)
    return np.asarray(group.all_gather(most)).max(keepdims=True)


def _norm_on_gpu(results: list[Any], norm_type: float, group: Any) -> Any:
    torch: Any = importlib.import_module("torch")
    norms = [x.abs().double().sum() if norm_type == 1 else x.abs().double().max() if x.numel()
             else x.new_zeros((), dtype=torch.float64) for x in results]
    if norm_type == 1:
        return group.all_reduce(torch.stack(norms).sum().reshape(1)).reshape(())
    rows = group.all_gather(torch.stack(norms).amax().reshape(1))
    return torch.from_dlpack(rows).amax()


# NumPy arrays, or on a GPU torch tensors; complex for complex parameters. Once the first result is
# there, the ranks agree on the step.
def _results(reducers: list[Any]) -> list[Any]:
    on_host = reducers[0]._mesh.device == "cpu"
    as_array = np.asarray if on_host else importlib.import_module("torch").from_dlpack
    results = []
    for one in reducers:
        for parameter in one.parameters:
            result = as_array(Array(one._handle.shard(parameter.name)))
            results.append(_as_complex(result) if parameter.is_complex else result)
    return results


def _as_complex(parts: Any) -> Any:
    if isinstance(parts, np.ndarray):
        return parts.view(np.complex64 if parts.dtype == np.float32 else np.complex128)
    return importlib.import_module("torch").view_as_complex(parts.view(-1, 2))


# Like the kernel: a NaN scales nothing; an infinity makes every element zero or NaN.
def _scale(reducers: list[Any], max_norm: float, was: Any) -> None:
    factor = max_norm / (was + EPSILON)
    if reducers[0]._mesh.device == "cpu":
        if factor < 1:
            with np.errstate(invalid="ignore"):
                for result in _results(reducers):
                    result *= result.real.dtype.type(factor)
        return
    torch: Any = importlib.import_module("torch")
    factor = torch.where(factor < 1, factor, 1.0)
    for result in _results(reducers):
        result *= factor.to(result.real.dtype)
