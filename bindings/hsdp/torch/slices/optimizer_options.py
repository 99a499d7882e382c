"""Checks the options of a ShardedOptimizer."""

from __future__ import annotations

from typing import Any

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
