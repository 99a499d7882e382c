"""What replica_hook asks of a model and a mesh before it puts hooks on anything."""

from __future__ import annotations

import json
from typing import Any

import torch

from hsdp import _hsdp
from hsdp.errors import MismatchError, UsageError
from hsdp.mesh import Mesh
from hsdp.torch.fsdp_parameter_group import FsdpParameterGroup

#: What FSDP2 may send, as hsdp calls it.
WIRES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


def require_usable(group: FsdpParameterGroup, mesh: Mesh) -> None:
    """UsageError unless the mesh has the ranks and the device of the group."""
    if group.mesh_text is not None:
        raise UsageError(
            f"replica_hook: expected {group.name} sharded over a one-dimensional mesh, got "
            f"{group.mesh_text} that FSDP2 reduces over by itself; shard over one dimension of it, "
            "as in fully_shard(module, mesh=mesh_2d['dp_shard'])"
        )
    ranks, expected = group.shard_ranks, list(mesh.shard_group.ranks)
    if ranks != expected:
        raise UsageError(
            f"replica_hook: expected {group.name} sharded over ranks {expected}, this rank's shard "
            f"group in {mesh!r}, got ranks {ranks}; make both meshes of the same sizes, as in "
            f'init_device_mesh("{group.device.type}", ({mesh.replicate_size}, {mesh.shard_size}), '
            "mesh_dim_names=('dp_replicate', 'dp_shard'))"
        )
    if str(group.device) != mesh.device:
        raise UsageError(
            f"replica_hook: expected {group.name} on {mesh.device}, the mesh's device, got "
            f"{group.device}; make the mesh with hsdp.init_mesh(..., device='{group.device}')"
        )
    if group.reduce_dtype not in WIRES:
        raise UsageError(
            f"replica_hook: expected gradients of {group.name} in float32, bfloat16 or float16, "
            f"got {group.reduce_dtype}; set reduce_dtype in its MixedPrecisionPolicy"
        )
    if group.hook is not None:
        raise UsageError(
            f"replica_hook: expected {group.name} without an all-reduce hook, got one that was set "
            "before; close() the earlier handle, or take out your own with "
            "set_all_reduce_hook(None)"
        )


def require_same_model(
    groups: list[FsdpParameterGroup],
    mesh: Mesh,
    reduction: _hsdp.ReplicaReduction,
    hop: _hsdp.ReplicaHop | None,
) -> None:
    """MismatchError, on every rank, when their models or hops differ. Collective."""
    own: list[list[Any]] = [[g.name, g.count(), str(g.reduce_dtype)] for g in groups]
    wire = getattr(hop, "dtype", None) or "the dtype of the reduce-scatter"
    own.append(["the hop", reduction.hop_name, wire])
    for rank, word in enumerate(reduction.exchange(json.dumps(own))):
        other = json.loads(word)
        if other == own:
            continue
        pairs = zip([*own, None], [*other, None], strict=False)
        mine, theirs = next(pair for pair in pairs if pair[0] != pair[1])
        raise MismatchError(
            f"replica_hook: model: expected the same on all ranks, got {mine} on rank "
            f"{mesh.rank} and {theirs} on rank {rank} (of {mesh.size}); shard the "
            "same model in the same way everywhere, and give it the same hop",
            [mesh.world.ranks[rank]],
        )
