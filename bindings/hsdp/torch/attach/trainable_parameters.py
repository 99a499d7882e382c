"""Which parameters of a model are reduced, and in which groups."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch

from hsdp.errors import UsageError
from hsdp.same_weights import VALUES
from hsdp.torch.complex_values import COMPLEX_DTYPES, mark_of
from hsdp.torch.value_digests import value_digests

#: dtypes that can be reduced
GRADIENT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, *COMPLEX_DTYPES)

Named = list[tuple[str, torch.nn.Parameter]]


def trainable_parameters(model: torch.nn.Module, device: str) -> Named:
    """The parameters that require gradients, each once, under their first names."""
    if not isinstance(model, torch.nn.Module):
        _fault("a torch.nn.Module", f"an object of type {type(model).__name__}")
    if any(isinstance(m, torch.nn.parallel.DistributedDataParallel) for m in model.modules()):
        _fault(
            "a plain model",
            "one in DistributedDataParallel, which reduces gradients itself; attach and call the "
            "model that it wraps",
        )
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp and any(isinstance(m, fsdp.FullyShardedDataParallel) for m in model.modules()):
        _fault(
            "a plain model",
            "one in FullyShardedDataParallel, which shards and reduces by itself; attach the model "
            "that it wraps, or use fully_shard and hsdp.torch.replica_hook(model, mesh)",
        )
    found = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not found:
        _fault("a model with parameters that require gradients", "one without")
    for name, parameter in found:
        _require_usable(name, parameter, device)
    return found


def described_parameters(parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> list[str]:
    """A line for each parameter, frozen or not, that changes with its values. Leaves out values without
    their own memory (DTensors, sparse and uninitialized parameters).
    """
    lines, compared = [], []
    for name, p in parameters:
        plain = type(p) is not torch.nn.UninitializedParameter and not is_dtensor(p)
        if not plain or p.layout is not torch.strided or p.is_quantized:
            lines.append(f"parameter '{name}' {type(p).__name__}")
            continue
        if p.is_meta:  # compared when they get values
            lines.append(f"parameter '{name}' {tuple(p.shape)} {p.dtype} on the meta device")
            continue
        compared.append((len(lines), p))
        lines.append(f"parameter '{name}' {tuple(p.shape)} {p.dtype}")
    digests = value_digests([p for _, p in compared])
    for (place, _), digest in zip(compared, digests, strict=True):
        lines[place] += VALUES + digest
    return lines


def require_memory(parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
    """Raises UsageError if a parameter is on the meta device when the first step begins."""
    for name, p in parameters:
        if p.is_meta:
            _fault(
                f"'{name}' to have memory when the first step begins",
                "it on the meta device; give the model to hsdp.zero.ShardedOptimizer, which gives it memory "
                "and values, or materialize it and broadcast its parameters before attach",
            )


def frozen_since(parameters: Mapping[str, torch.nn.Parameter], error: UsageError) -> UsageError:
    """The error for a missing gradient of a parameter that no longer requires one; otherwise `error`.
    """
    text = str(error)
    for name, parameter in parameters.items():
        if not parameter.requires_grad and f"none for '{name}'" in text:
            return UsageError(
                f"{text.partition('; ')[0]}; '{name}' was frozen since attach (requires_grad_(False)): "
                "make another Reducer after freezing, or one with missing=\"zero\" where parameters are "
                "frozen only at times"
            )
    return error


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor, without importing anything."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def groups_by_name(model: torch.nn.Module, groups: Mapping[str, Any]) -> dict[str, str]:
    """Parameter name -> group. A module within another one's group may have its own."""
    names = {id(module): name for name, module in model.named_modules()}
    group_at: dict[str, str] = {}
    for group, modules in groups.items():
        for module in _each(group, modules):
            path = names.get(id(module))
            if path is None:
                _fault(f"modules of the model in group '{group}'", "one that is not part of it")
            if group_at.setdefault(path, group) != group:
                _fault("every module in one group", f"'{path}' in '{group_at[path]}' and '{group}'")
    result = {}
    for name, _ in model.named_parameters():
        path = name.rpartition(".")[0]
        while path and path not in group_at:
            path = path.rpartition(".")[0]
        if path in group_at:
            result[name] = group_at[path]
    return result


def _each(group: str, modules: Any) -> list[torch.nn.Module]:
    if isinstance(modules, torch.nn.Module):
        return [modules]
    if not isinstance(modules, Iterable):
        _fault(f"a module or modules as group '{group}'", f"a {type(modules).__name__}")
    return list(modules)


def _require_usable(name: str, parameter: torch.nn.Parameter, device: str) -> None:
    what = f"'{name}' "
    if isinstance(parameter, torch.nn.UninitializedParameter):
        _fault(what + "to have a shape", "one that is not initialized; run a forward pass first")
    if is_dtensor(parameter):
        _fault(
            what + "to be a plain tensor",
            "a DTensor, which its own model reduces; use hsdp.torch.replica_hook(model, mesh)",
        )
    if parameter.layout is not torch.strided:
        _fault(what + "to be dense", str(parameter.layout).rpartition(".")[2])
    if parameter.dtype not in GRADIENT_DTYPES:
        _fault(
            what + "to be float32, bfloat16, float16, float64, complex64 or complex128",
            str(parameter.dtype).rpartition(".")[2],
        )
    if parameter.device != torch.device(device) and not parameter.is_meta:
        _fault(
            f"{what}on the mesh's device, {device}",
            f"{parameter.device}; move the model, or make the mesh with device=",
        )
    mark = mark_of(parameter)
    if mark is not None:
        _fault(
            what + "to have its values in memory",
            f"one that is {mark} by a mark; pass torch.nn.Parameter(x.resolve_conj().resolve_neg())",
        )


def _fault(expected: str, got: str) -> NoReturn:
    raise UsageError(f"reducer: attach: expected {expected}, got {got}")
