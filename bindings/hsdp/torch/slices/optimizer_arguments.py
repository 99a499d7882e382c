"""Checks the arguments of a ShardedOptimizer; parameter groups as torch's optimizers take them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from numbers import Real
from typing import Any

import torch

from hsdp.errors import Error
from hsdp.reducer import Reducer
from hsdp.torch.slices.parameter_slices import refuse


def require_options(
    stage: Any, max_grad_norm: Any, gather_bucket_bytes: Any, master_dtype: Any
) -> None:
    """Raises UsageError for options that no optimizer can have."""
    if stage not in (1, 2, 3):
        refuse("stage 1, 2 or 3", repr(stage))
    if max_grad_norm is not None and not max_grad_norm > 0:
        refuse("a max_grad_norm above 0, or None", repr(max_grad_norm))
    if not isinstance(gather_bucket_bytes, int) or gather_bucket_bytes < 1:
        refuse("gather_bucket_bytes of at least 1", repr(gather_bucket_bytes))
    if master_dtype != "f32":
        refuse("a master_dtype of 'f32', which training needs", repr(master_dtype))


def require_unit_options(prefetch_bytes: Any, persistence_threshold: Any) -> None:
    """The same for stage 3."""
    is_count = isinstance(prefetch_bytes, int) and prefetch_bytes >= 0
    if prefetch_bytes is not None and not is_count:
        refuse("prefetch_bytes of at least 0, or None", repr(prefetch_bytes))
    if not isinstance(persistence_threshold, (int, float)) or not persistence_threshold >= 0:
        refuse("a persistence_threshold of at least 0 elements", repr(persistence_threshold))


def is_offloaded(offload: Any, reducer: Reducer) -> bool:
    """Whether master weights and states are kept on the host."""
    if offload not in (None, "host"):
        refuse("offload None or 'host'", repr(offload))
    if offload == "host" and reducer.mesh.device == "cpu":
        refuse("offload='host' on a mesh of GPUs", "it on the CPU, whose memory that is already")
    return bool(offload == "host")


def required_reducers(listed: list[Any]) -> list[Reducer]:
    """The Reducers, if they are Reducers of one mesh."""
    for i, reducer in enumerate(listed):
        if not isinstance(reducer, Reducer):
            refuse("a Reducer or several", f"an object of type {type(reducer).__name__}")
        if reducer.mesh is not listed[0].mesh:
            refuse("Reducers of one mesh", "several meshes")
        if any(reducer is before for before in listed[:i]):
            refuse("each Reducer once", f"one again as number {i}")
    return listed


@contextlib.contextmanager
def restoring_shard_over(listed: list[Any]) -> Iterator[None]:
    """Gives Reducers their `shard_over` again if the block raises before their buckets are laid out."""
    before = [(one, one.shard_over) for one in listed if isinstance(one, Reducer)]
    try:
        yield
    except BaseException:
        for one, over in before:
            with contextlib.suppress(Error):
                one._set_shard_over(over)
        raise


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
