"""What the package asks of a framework's layer: of hsdp.torch, which is imported when it is first needed.

Nothing else outside of that folder names its modules. What the layer follows of a Reducer is an
`Attachment`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from hsdp.attachment import Attachment

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh as DeviceMesh
    from torch.distributed.tensor import DTensor as DTensor
    from torch.nn import Module as Module
else:
    DeviceMesh = DTensor = Module = Any


def _part(name: str) -> Any:
    return importlib.import_module(f"hsdp.torch.{name}")


def attachment(*arguments: Any) -> Attachment:
    """Attaches a model, with the arguments of ModelAttachment."""
    attached: Attachment = _part("attach.model_attachment").ModelAttachment(*arguments)
    return attached


def broadcast_parameters(mesh: Any, model: Module, root: int) -> None:
    """Copies the parameters of rank `root`."""
    _part("attach.broadcast").broadcast_parameters(mesh, model, root)


def shard_dtensor(reducer: Any, name: str, device_mesh: DeviceMesh | None) -> DTensor:
    """This rank's slice of a result."""
    found: DTensor = _part("fsdp.dtensor").shard_dtensor(reducer, name, device_mesh)
    return found


def has_tensors(values: Iterable[Any]) -> bool:
    """Whether there is a torch tensor among them."""
    torch = sys.modules.get("torch")  # without torch there are no tensors
    return torch is not None and any(isinstance(x, torch.Tensor) for x in values)


def snapshot_entries(named_gradients: Mapping[str, Any], mesh: Any) -> Any:
    """What a snapshot has of tensors, and its layout."""
    return _part("fsdp.dtensor").snapshot_entries(named_gradients, mesh)


def zero_word(device: str) -> Any:
    """A 0-dimensional f32 tensor."""
    torch = importlib.import_module("torch")
    return torch.zeros((), dtype=torch.float32, device=device)


def mesh_of(device_mesh: Any) -> Any:
    """The Mesh of a DeviceMesh."""
    return _part("launch.device_mesh").mesh_from_torch(device_mesh)


def launch() -> Any:
    """Of torch.distributed, once init_process_group was called; otherwise None."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return _part("launch.distributed_launch")


def meet_at_store(lost: tuple[Any, ...], timeout_s: float) -> None:
    """Lets the ranks meet at torch's store, if torch is installed."""
    if importlib.util.find_spec("torch") is not None:
        _part("launch.store_rendezvous").meet_at_store(*lost, timeout_s)


def current_device() -> str:
    """The current GPU of torch, if that is imported; otherwise the first."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    index = cuda.current_device() if cuda is not None and cuda.is_available() else 0
    return f"cuda:{index}"
