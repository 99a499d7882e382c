"""The same weights on every rank."""

from __future__ import annotations

from typing import Any

import torch

from hsdp.errors import MismatchError, UsageError
from hsdp.line_agreement import first_difference
from hsdp.mesh import as_mesh
from hsdp.torch.attach.trainable_parameters import is_dtensor
from hsdp.torch.value_digests import row_major_bytes


def broadcast_parameters(mesh: Any, model: torch.nn.Module, root: int = 0) -> None:
    """Copies parameters and buffers of rank `root` of the mesh to all its ranks. See
    `hsdp.broadcast_parameters`.
    """
    remedy = "the mesh comes first: hsdp.broadcast_parameters(mesh, model)"
    world = as_mesh(mesh, "broadcast_parameters: mesh", remedy).world
    tensors = _tensors(model)
    described = [f"{name} {tuple(t.shape)} {t.dtype}" for name, t in tensors.items()]
    difference = first_difference(world, described, "broadcast_parameters")
    if difference is not None:
        place = difference.places[0]
        raise MismatchError(
            f"broadcast_parameters: expected the same model on every rank, got "
            f"'{difference.lines[0]}' on rank {world.ranks[0]} and '{difference.lines[place]}' on "
            f"rank {world.ranks[place]}; make the same model everywhere",
            [world.ranks[place]],
        )
    with torch.no_grad():
        for tensor in tensors.values():
            if tensor.numel() == 0:
                continue
            data = row_major_bytes(tensor)
            world.broadcast(data, root)
            if data.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(data.view(tensor.dtype).view(tensor.shape))


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in found.items():
        if is_dtensor(tensor) or tensor.is_meta or tensor.layout is not torch.strided:
            raise UsageError(
                f"broadcast_parameters: expected '{name}' to be a plain tensor with memory, got a "
                f"{'DTensor' if is_dtensor(tensor) else str(tensor.layout)} on {tensor.device}; "
                "broadcast before the model is sharded, after it is materialized"
            )
    return found
