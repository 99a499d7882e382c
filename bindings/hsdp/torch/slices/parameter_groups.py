"""Parameter groups as torch's optimizers take them."""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch

from hsdp.torch.slices.parameter_slices import refuse


def parameter_groups(params: Any) -> list[dict[str, Any]]:
    """For a model, its named parameters."""
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


def tensors(group: dict[str, Any]) -> list[torch.nn.Parameter]:
    """The parameters of a group, which may have names."""
    return [p[1] if isinstance(p, tuple) else p for p in group["params"]]


def settings(group: dict[str, Any]) -> dict[str, Any]:
    """What applies to all parameters of a group, such as lr."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def give_settings(group: dict[str, Any], other: dict[str, Any]) -> None:
    """Copies settings of one group to another. A setting stored in a tensor stays a tensor, which no
    other group shares.
    """
    for key, value in settings(group).items():
        now = other.get(key)
        if isinstance(now, torch.Tensor) and isinstance(value, Real):
            value = torch.full_like(now, float(value))
        other[key] = value


def numbers(groups: list[dict[str, Any]]) -> dict[int, int]:
    """id(parameter) -> its number in a state dict."""
    return {id(p): i for i, p in enumerate(p for group in groups for p in group["params"])}
