"""Meshes out of torch's DeviceMesh."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hsdp.errors import UsageError
from hsdp.mesh import Mesh, init_mesh


class _Known(NamedTuple):
    mesh: Mesh
    options: dict[str, Any]


_known: weakref.WeakKeyDictionary[Any, _Known] = weakref.WeakKeyDictionary()


def mesh_from_torch(device_mesh: Any, **options: Any) -> Mesh:
    """The hsdp.Mesh over the ranks of a torch DeviceMesh: (replicate, shard), or a shard group only
    where it has one dimension.

    Collective over the job when the DeviceMesh comes for the first time; the same Mesh after that,
    until it is closed. `options` are `engine` and `timeout_s` of `init_mesh`.

    Raises UsageError for options other than those of the Mesh that is there already.
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
    with _launched_as_torch():
        made = init_mesh(len(table), len(table[0]), device=device, ranks=table, **options)
    _require_same_rank(made)
    _known[device_mesh] = _Known(made, options)
    return made


# Processes that were started without a launcher told torch.distributed who they are; nobody else
# needs to be told again.
@contextmanager
def _launched_as_torch() -> Iterator[None]:
    families = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
    if not dist.is_initialized() or any(name in os.environ for name in families):
        yield
        return
    ours = {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            del os.environ[name]


def _require_same_rank(mesh: Mesh) -> None:
    rank = mesh.world.ranks[mesh.rank]
    if dist.is_initialized() and rank != dist.get_rank():
        raise UsageError(
            f"mesh: expected torch.distributed and the launcher to agree on ranks, got rank "
            f"{dist.get_rank()} of torch.distributed on rank {rank} of the launcher; leave the "
            "numbering to the launcher"
        )
