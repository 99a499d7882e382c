"""What the package asks of hsdp.torch, which is imported when it is first needed.

Nothing else outside of that folder names its modules. What it follows of a Reducer is an `Attachment`.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh as DeviceMesh
    from torch.distributed.tensor import DTensor as DTensor
    from torch.nn import Module as Module
else:
    DeviceMesh = DTensor = Module = Any

#: where each lies; FSDP2, DTensor and torch's checkpoints take long to import
_MODULES = {
    "FlatSlice": "flat_slice",
    "ModelAttachment": "attach.model_attachment",  # for Reducer.attach
    "ReplicaHookHandle": "fsdp.replica_hook_handle",
    "ShardedOptimizer": "sharded_optimizer",
    "broadcast_parameters": "attach.broadcast",
    "shard_dtensor": "fsdp.dtensor",
    "snapshot_entries": "fsdp.dtensor",  # of tensors and DTensors
    "mesh_from_torch": "launch.device_mesh",
    "launched": "launch.distributed_launch",
    "job_size": "launch.distributed_launch",
    "meet_at_store": "launch.store_rendezvous",
    "profiler_is_on": "private_torch",
    "reducers_of": "attach.kept_reducers",
    "replica_hook": "fsdp.replica_hook_handle",
}


def of_torch(name: str) -> Any:
    """The class or function of hsdp.torch."""
    return getattr(importlib.import_module(f"hsdp.torch.{_MODULES[name]}"), name)


def is_distributed() -> bool:
    """Whether init_process_group of torch.distributed was called."""
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and dist.is_initialized()


def has_tensors(values: list[Any]) -> bool:
    """Whether there is a torch tensor among them."""
    torch = sys.modules.get("torch")  # without torch there are no tensors
    return torch is not None and any(isinstance(x, torch.Tensor) for x in values)


def current_device() -> str:
    """The current GPU of torch, if that is imported; otherwise the first."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    index = cuda.current_device() if cuda is not None and cuda.is_available() else 0
    return f"cuda:{index}"
