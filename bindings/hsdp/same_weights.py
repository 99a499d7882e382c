"""The same weights on every rank, before the first step."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def broadcast_parameters(mesh: Any, model: torch.nn.Module, root: int = 0) -> None:
    """Copies the parameters and buffers of rank `root` of the mesh to all its ranks, in place.

    Any dtype, any strides. Collective. Raises MismatchError, on every rank, when the ranks' models
    differ in names, shapes or dtypes; UsageError for DTensors and for parameters without memory.
    """
    importlib.import_module("hsdp.torch.broadcast").broadcast_parameters(mesh, model, root)
