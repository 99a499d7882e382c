"""The parameters of one FSDPModule, which FSDP2 reduces together as one flat tensor.

FSDP2 has no public way to list these groups; private_torch.py has what is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from hsdp.errors import UsageError
from hsdp.mesh import Mesh
from hsdp.torch import private_torch


#: Dtypes that FSDP2 may send, by hsdp's names.
WIRES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


class FsdpParameterGroup:
    """One FSDPModule's own parameters, in the order of its flat tensor."""

    def __init__(self, name: str, module: FSDPModule, group: Any) -> None:
        self.name = name
        self._module = module
        self._group = group

    @property
    def identity(self) -> int:
        """Identifies FSDP2's group."""
        return id(self._group)

    @property
    def shard_ranks(self) -> list[int]:
        """The ranks of torch.distributed that share the parameters."""
        ranks: list[int] = dist.get_process_group_ranks(self._group.mesh_info.shard_process_group)
        return ranks

    @property
    def mesh_text(self) -> str | None:
        """Why a replica hook cannot be used; None for a one-dimensional shard mesh, as required."""
        info = self._group.mesh_info
        if private_torch.fsdp_has_replicas(info):
            return f"a {info.mesh.ndim}-D mesh {tuple(info.mesh.shape)}, which has replicas"
        return None

    @property
    def device(self) -> torch.device:
        """The device on which FSDP2 computes."""
        device: torch.device = self._group.device
        return device

    @property
    def divide_factor(self) -> float | None:
        """The factor set by set_gradient_divide_factor."""
        factor: float | None = self._group.gradient_divide_factor
        return factor

    @property
    def sums(self) -> bool:
        """Whether the flat tensor holds sums over the shard group rather than means."""
        forced = self._group.force_sum_reduction_for_comms or self.divide_factor is not None
        return bool(forced) or self.reduce_dtype == torch.float16

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype of FSDP2's reduce-scatter; raises UsageError if there is more than one."""
        found = private_torch.fsdp_reduce_dtypes(self._group) or {self.dtype}
        (dtype, *others) = sorted(found, key=str)
        if others or dtype is None:
            raise UsageError(
                f"replica_hook: expected gradients of {self.name} in one dtype, got "
                f"{' and '.join(map(str, (dtype, *others)))}, as grad_dtype of its parameters says; "
                "set reduce_dtype in its MixedPrecisionPolicy"
            )
        return dtype

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters and their gradients."""
        dtype: torch.dtype = self._group.fsdp_params[0].sharded_param.dtype
        return dtype

    @property
    def gradient_dtypes(self) -> set[torch.dtype | None]:
        """The parameters' grad_dtype; None: any."""
        return {getattr(p.sharded_param, "grad_dtype", self.dtype) for p in self._trainable()}

    @property
    def hook(self) -> Any:
        """The hook set by set_all_reduce_hook."""
        return private_torch.fsdp_all_reduce_hook(self._group)

    def set_hook(self, hook: Callable[[torch.Tensor], None] | None) -> None:
        """Like FSDPModule.set_all_reduce_hook; None removes the hook."""
        module: Any = self._module  # torch's type lacks None
        module.set_all_reduce_hook(hook)

    def holds(self, parameter: torch.Tensor) -> bool:
        """Whether it is one of these parameters, as seen by optimizers."""
        return any(p.sharded_param is parameter for p in self._group.fsdp_params)

    def _trainable(self) -> Iterator[Any]:
        return (p for p in self._group.fsdp_params if p.sharded_param.requires_grad)

    def count(self) -> int:
        """Elements of the flat tensor if every trainable parameter has a gradient."""
        return sum(p.padded_sharded_param_size.numel() for p in self._trainable())

    @property
    def in_backward(self) -> bool:
        """Whether FSDP2 is in a backward pass of the model, at any depth."""
        return bool(private_torch.fsdp_root(self._module).post_backward_final_callback_queued)

    @property
    def root(self) -> int:
        """Identifies the model of FSDPModules that contains it."""
        return id(private_torch.fsdp_root(self._module))

    def trainable_ids(self) -> tuple[int, ...]:
        """The ids of the parameters in the flat tensor."""
        return tuple(id(p) for p in self._trainable())

    def places(
        self, names: dict[int, str]
    ) -> list[tuple[str, tuple[int, ...], str, int, int, int]]:
        """For each trainable parameter: name, whole shape and dtype; where this rank's slice begins in
        the flat tensor, its element count, and where it begins in the parameter, shard after shard.
        """
        places = []
        offset = 0
        for i, p in enumerate(self._trainable()):
            padded = p.padded_sharded_param_size.numel()
            begin = min(self._group.mesh_info.shard_mesh_rank * padded, private_torch.fsdp_size(p).numel())
            name = names.get(id(p.sharded_param), f"{self.name}, parameter {i}")
            dtype = str(self.dtype).removeprefix("torch.")
            count = p.sharded_size.numel()
            places.append((name, tuple(private_torch.fsdp_size(p)), dtype, offset, count, begin))
            offset += padded
        return places

    def add_to_gradients(self, flat: torch.Tensor) -> None:
        """Does what FSDP2 does with the flat tensor after its hook: divides, casts, and sets or adds to
        the gradients.
        """
        divide_after = private_torch.fsdp_divisor_after(self._group, self.reduce_dtype, self.device.type)
        if divide_after is not None and divide_after != 1:
            flat = flat / divide_after
        flat = flat.to(self.dtype)
        offset = 0
        for p in self._trainable():
            part = torch.as_strided(flat, p.sharded_size, p.contiguous_sharded_stride, offset)
            offset += p.padded_sharded_param_size.numel()
            self._add(p, part.to("cpu") if p.offload_to_cpu else part)

    @staticmethod
    def _add(fsdp_param: Any, part: torch.Tensor) -> None:
        parameter = fsdp_param.sharded_param
        if parameter.grad is None:
            parameter.grad = fsdp_param.to_sharded_dtensor(part)
        else:
            parameter.grad.to_local().add_(part)
        for hook in private_torch.post_accumulate_grad_hooks(parameter).values():
            hook(parameter)


def fsdp_parameter_groups(model: torch.nn.Module) -> list[FsdpParameterGroup]:
    """The groups of `model`, in module order. Raises UsageError if one cannot take a hook."""
    found: list[FsdpParameterGroup] = []
    seen: set[int] = set()
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        state = id(private_torch.fsdp_state(module))
        if state in seen:
            continue
        seen.add(state)
        groups = private_torch.fsdp_groups(module)
        if len(groups) > 1:
            raise UsageError(
                f"replica_hook: expected one mesh for all parameters of {title(name)}, got "
                f"{len(groups)} (from shard_placement_fn); FSDP2 takes no hook there"
            )
        found += [FsdpParameterGroup(title(name), module, group) for group in groups]
    if not found:
        raise UsageError(
            "replica_hook: expected a model that torch.distributed.fsdp.fully_shard has sharded, "
            f"got a {type(model).__name__} without an FSDPModule; call fully_shard(model, "
            "mesh=shard_mesh) first, or take reducer.attach(model) for a plain model"
        )
    return found


def places_within(
    groups: list[FsdpParameterGroup], module: torch.nn.Module | None, recurse: bool
) -> list[int]:
    """Places of the groups that are a module's own or, with `recurse`, of those within; None: all."""
    if module is None:
        return list(range(len(groups)))
    if not isinstance(module, torch.nn.Module):
        raise UsageError(
            "replica_hook: set_requires_all_reduce: module: expected an FSDPModule of the model, "
            f"got an object of type {type(module).__name__}; pass one that fully_shard was called on"
        )
    modules = module.modules() if recurse else [module]
    within = [m for m in modules if isinstance(m, FSDPModule)]
    theirs = {id(group) for m in within for group in private_torch.fsdp_groups(m)}
    places = [place for place, group in enumerate(groups) if group.identity in theirs]
    if not places:
        raise UsageError(
            "replica_hook: set_requires_all_reduce: module: expected an FSDPModule of the model, "
            f"with parameters, got a {type(module).__name__} without; pass one that fully_shard was "
            "called on, or None for all"
        )
    return places


def title(name: str) -> str:
    """How errors name a module."""
    return f"'{name}'" if name else "the root module"


def require_usable(group: FsdpParameterGroup, mesh: Mesh) -> None:
    """Raises UsageError unless a replica hook may be installed: the mesh has the group's ranks and device."""
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
