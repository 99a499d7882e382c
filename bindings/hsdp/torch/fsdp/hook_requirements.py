"""What replica_hook requires of a model and a mesh before it installs hooks."""

from __future__ import annotations

import torch

from hsdp.errors import UsageError
from hsdp.mesh import Mesh
from hsdp.torch.fsdp.fsdp_parameter_group import FsdpParameterGroup

#: Dtypes that FSDP2 may send, by hsdp's names.
WIRES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


def require_usable(group: FsdpParameterGroup, mesh: Mesh) -> None:
    """Raises UsageError unless the mesh has the ranks and the device of the group."""
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
    reduced = group.dtype if group.dtype.is_complex else group.reduce_dtype
    if reduced not in WIRES:
        raise UsageError(
            f"replica_hook: expected gradients of {group.name} in float32, bfloat16 or float16, "
            f"got {reduced}; set reduce_dtype in its MixedPrecisionPolicy"
        )
    if group.gradient_dtypes - {group.dtype}:  # FSDP2 orders the flat tensor by them
        raise UsageError(
            f"replica_hook: expected gradients of {group.name} in its parameters' dtype, {group.dtype}, got "
            f"grad_dtype {' and '.join(sorted(map(str, group.gradient_dtypes)))}; leave grad_dtype as it is, "
            "and set reduce_dtype in its MixedPrecisionPolicy"
        )
    if group.hook is not None:
        raise UsageError(
            f"replica_hook: expected {group.name} without an all-reduce hook, got one that was set "
            "before; close() the earlier handle, or take out your own with "
            "set_all_reduce_hook(None)"
        )
