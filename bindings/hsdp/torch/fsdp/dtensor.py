"""torch's DTensors: a Reducer's shards as DTensors, and snapshots of DTensors."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from hsdp.errors import UsageError
from hsdp.mesh import Mesh
from hsdp.reducer import Reducer
from hsdp.snapshot import Entry
from hsdp.torch.complex_values import of_kind

_device_meshes: weakref.WeakKeyDictionary[Mesh, DeviceMesh] = weakref.WeakKeyDictionary()


def shard_dtensor(reducer: Reducer, name: str, device_mesh: DeviceMesh | None = None) -> DTensor:
    """See `Reducer.shard_dtensor`."""
    if reducer.layout != "dim0":
        raise UsageError(
            f"reducer: shard_dtensor: expected layout 'dim0', got '{reducer.layout}'; make the "
            "Reducer with layout='dim0', whose slices are whole rows"
        )
    if reducer._is_over_mesh:
        raise UsageError(
            "reducer: shard_dtensor: expected slices that every replica has, got shard_over='mesh'; "
            "make the Reducer with shard_over='shard'"
        )
    parameter = next((p for p in reducer.parameters if p.name == name), None)
    is_complex = parameter is not None and parameter.is_complex
    shape = None if parameter is None else parameter.shape[:-1] if is_complex else parameter.shape
    if shape == ():
        raise UsageError(
            f"reducer: shard_dtensor: expected '{name}' to have rows, got a scalar; give it the "
            "shape (1,), or take shard()"
        )
    local = torch.from_dlpack(reducer.shard(name))  # rejects an unknown name
    assert shape is not None
    local = of_kind(local, is_complex)
    device_mesh = _device_mesh_of(reducer.mesh, device_mesh)
    begin, end = row_range(shape[0], reducer.mesh.shard_rank, reducer.mesh.shard_size)
    return DTensor.from_local(
        local.view(end - begin, *shape[1:]), device_mesh, (Replicate(), Shard(0)),
        run_check=False, shape=torch.Size(shape), stride=_row_major(shape),
    )


def row_range(row_count: int, rank: int, size: int) -> tuple[int, int]:
    """The rows of rank `rank` when `size` ranks share a dimension, in layout dim0 and Shard(0)."""
    each = -(-row_count // size)
    return min(rank * each, row_count), min((rank + 1) * each, row_count)


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, stride = [], 1
    for extent in reversed(shape):
        strides.append(stride)
        stride *= max(extent, 1)
    return tuple(reversed(strides))


def _device_mesh_of(mesh: Mesh, given: DeviceMesh | None) -> DeviceMesh:
    if not dist.is_available() or not dist.is_initialized():
        raise UsageError(
            "reducer: shard_dtensor: expected torch.distributed with the ranks of the mesh, got "
            "none; call torch.distributed.init_process_group() first"
        )
    ranks = torch.tensor(mesh.world.ranks).view(mesh.replicate_size, mesh.shard_size)
    if given is not None:
        if not torch.equal(given.mesh, ranks):
            raise UsageError(
                f"reducer: shard_dtensor: expected a DeviceMesh over ranks {ranks.tolist()}, got "
                f"one over {given.mesh.tolist()}; pass the (replicate, shard) one"
            )
        return given
    if mesh in _device_meshes:
        return _device_meshes[mesh]
    rank = int(ranks.view(-1)[mesh.rank])
    if (dist.get_rank(), dist.get_world_size()) != (rank, mesh.size):
        raise UsageError(
            f"reducer: shard_dtensor: expected torch.distributed with the ranks of the mesh, "
            f"where this one is {rank} of {mesh.size}, got rank {dist.get_rank()} of {dist.get_world_size()}; "
            "start it by the same launcher, and pass device_mesh where the mesh is a part of it"
        )
    device = mesh.device.partition(":")[0]
    made = DeviceMesh(device, ranks, mesh_dim_names=("dp_replicate", "dp_shard"))
    _device_meshes[mesh] = made
    return made


def snapshot_entries(
    named_gradients: Mapping[str, Any], mesh: Mesh | None
) -> tuple[list[Entry], str]:
    """What this rank writes of gradients that may be torch tensors or DTensors, and its layout: whole
    gradients, or, if any of them is sharded, all cut into rows.
    """
    shards = {name: _shard_dimension(name, x) for name, x in named_gradients.items()}
    if all(dimension is None for dimension in shards.values()):
        entries = [(name, None, None, 0, _on_host(name, x)) for name, x in named_gradients.items()]
        return list(entries), "full"
    if mesh is None:
        first = next(name for name, dimension in shards.items() if dimension is not None)
        raise UsageError(
            f"snapshot: gradient of '{first}': expected a mesh for a sharded DTensor, got none; "
            "pass the mesh whose ranks hold the other rows"
        )
    return [_rows(name, x, shards[name], mesh) for name, x in named_gradients.items()], "dim0"


# The dimension of a DTensor's device mesh over which its rows are sharded; None if it is whole.
def _shard_dimension(name: str, x: Any) -> int | None:
    if not isinstance(x, DTensor):
        return None
    found = None
    for dimension, placement in enumerate(x.placements):
        if isinstance(placement, Replicate) or x.device_mesh.size(dimension) == 1:
            continue
        if type(placement) is not Shard or placement.dim != 0 or found is not None:
            raise UsageError(
                f"snapshot: gradient of '{name}': expected a DTensor that is replicated, or cut "
                f"once along dimension 0, got placements {x.placements}; pass x.full_tensor()"
            )
        found = dimension
    return found


def _rows(name: str, x: Any, dimension: int | None, mesh: Mesh) -> Entry:
    shape = tuple(x.shape)
    local = _on_host(name, x)
    if not shape:  # a scalar belongs to rank 0
        return name, shape, None, 0, local.reshape(1)[: 1 if mesh.shard_rank == 0 else 0]
    begin, end = row_range(shape[0], mesh.shard_rank, mesh.shard_size)
    if dimension is None:
        local = local[begin:end]
    else:
        ranks = dist.get_process_group_ranks(x.device_mesh.get_group(dimension))
        expected = list(mesh.shard_group.ranks)
        if ranks != expected or local.shape[0] != end - begin:
            raise UsageError(
                f"snapshot: gradient of '{name}': expected {end - begin} of its rows here, and the "
                f"others on ranks {expected}, this rank's shard group, got {local.shape[0]} rows "
                f"and ranks {ranks}; pass the mesh that it is sharded over"
            )
    return name, shape, None, begin * math.prod(shape[1:]), local


# A tensor that DLPack can export: detached, dense, in host memory, row-major.
def _on_host(name: str, x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    if isinstance(x, DTensor):
        x = x.to_local()
    if x.layout != torch.strided or x.is_complex():
        raise UsageError(
            f"snapshot: gradient of '{name}': expected a dense real tensor, got layout {x.layout}, "
            f"{x.dtype}; pass x.to_dense() or torch.view_as_real(x)"
        )
    return x.detach().cpu().resolve_neg().contiguous()
