"""What hsdp offers for PyTorch, besides `Reducer.attach` and `broadcast_parameters`.

It is imported when it is first used: `import hsdp` does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

try:
    import torch as _torch
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "hsdp.torch: expected the package torch, got none; install it with pip install 'torch>=2.9'",
        name=error.name,
    ) from error

from hsdp.framework import of_torch as _of_torch
from hsdp.torch.private_torch import check_release as _check_release

_check_release(_torch.__version__)

from hsdp.torch.guards.loss_scaling import GradScaler
from hsdp.torch.launch.device_mesh import mesh_from_torch

if _TYPE_CHECKING:
    from hsdp.torch.attach.kept_reducers import reducers_of as reducers_of
    from hsdp.torch.flat_slice import FlatSlice as FlatSlice
    from hsdp.torch.fsdp.replica_hook_handle import ReplicaHookHandle as ReplicaHookHandle
    from hsdp.torch.fsdp.replica_hook_handle import replica_hook as replica_hook

__all__ = [
    "FlatSlice", "GradScaler", "ReplicaHookHandle", "mesh_from_torch", "reducers_of",
    "replica_hook",
]


def __getattr__(name: str) -> _Any:
    if name in __all__:
        return _of_torch(name)
    raise AttributeError(f"module 'hsdp.torch' has no attribute '{name}'")
