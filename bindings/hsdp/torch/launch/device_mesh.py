"""Meshes from torch's DeviceMesh."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch

from hsdp.errors import UsageError
from hsdp.mesh import Mesh, init_mesh


class _Known(NamedTuple):
    mesh: Mesh
    options: dict[str, Any]


_known: weakref.WeakKeyDictionary[Any, _Known] = weakref.WeakKeyDictionary()


def mesh_from_torch(device_mesh: Any, **options: Any) -> Mesh:
    """The hsdp.Mesh over the ranks of a torch DeviceMesh: (replicate, shard), or only a shard group if
    it has one dimension.

    The first call for a DeviceMesh is collective over the job; later calls return the same Mesh until
    it is closed. `options` are `engine` and `timeout_s` of `init_mesh`.

    Raises UsageError if the options differ from those of the existing Mesh.
    """
    ranks = getattr(device_mesh, "mesh", None)
    if not isinstance(ranks, torch.Tensor) or ranks.ndim not in (1, 2):
        got = f"one of {ranks.ndim} dimensions" if isinstance(ranks, torch.Tensor) else (
            f"an object of type {type(device_mesh).__name__}"
        )
        raise UsageError(
            f"mesh: expected a torch DeviceMesh of (replicate, shard) or (shard,), got {got}; "
            "slice it, as in mesh['dp_replicate', 'dp_shard']"
        )
    known = _known.get(device_mesh)
    if known is not None and not known.mesh.closed:
        if options and options != known.options:
            raise UsageError(
                f"mesh: expected the options with which this DeviceMesh became an hsdp.Mesh, "
                f"{known.options}, got {options}; close() that mesh first, or leave them out"
            )
        return known.mesh
    table = ranks.reshape(-1, ranks.shape[-1]).tolist()
    device = device_mesh.device_type
    if device == "cuda":
        device = f"cuda:{torch.cuda.current_device()}"
    made = init_mesh(len(table), len(table[0]), device=device, ranks=table, **options)
    _known[device_mesh] = _Known(made, options)
    return made
