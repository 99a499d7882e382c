"""All that hsdp uses of torch's private parts. For their sake pyproject.toml bounds torch.

Each has a check in tests/python/test_torch_private.py, which fails first when torch changes. A test there
keeps such uses out of other files.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from operator import attrgetter
from types import CodeType
from typing import Any

import torch
from torch.autograd import Variable
from torch.distributed import distributed_c10d
from torch.utils import _pytree

# Tensors

#: `f(tensors, tensor_or_tensors)`, in one kernel of a GPU
foreach_mul_ = torch._foreach_mul_
foreach_copy_ = torch._foreach_copy_

#: the operator behind Tensor.to(), as __torch_dispatch__ sees it
to_copy = torch.ops.aten._to_copy.default

#: `f(cls, tensor, requires_grad)`: the tensor's storage under another class
make_subclass = torch.Tensor._make_subclass

#: `f(cls, shape, dtype=, device=)`: a tensor without memory, for __torch_dispatch__
make_wrapper_subclass = torch.Tensor._make_wrapper_subclass

#: a context without __torch_function__ of subclasses
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass

#: the tensors in nested tuples, lists and dicts
tree_leaves = _pytree.tree_leaves

#: attributes of tensors that neither read nor write values
ATTRIBUTES_WITHOUT_VALUES = ("_backward_hooks", "_post_accumulate_grad_hooks", "_version")
SETTABLE_WITHOUT_VALUES = ("_backward_hooks", "_post_accumulate_grad_hooks")

#: `f(tensor)`: grows with each write in place
version: Callable[[torch.Tensor], int] = attrgetter("_version")

#: `f(tensor)`: what a view is of
base: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("_base")


def storage_holders(storage: torch.UntypedStorage) -> int:
    """How many tensors share it."""
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count


def backward_hooks(tensor: torch.Tensor) -> dict[int, Any]:
    """Those of Tensor.register_hook."""
    hooks: dict[int, Any] | None = tensor._backward_hooks
    return hooks or {}


def post_accumulate_grad_hooks(tensor: torch.Tensor) -> dict[int, Any]:
    """Those of Tensor.register_post_accumulate_grad_hook: torch's own dict, once there was one."""
    hooks: dict[int, Any] | None = getattr(tensor, "_post_accumulate_grad_hooks", None)
    return {} if hooks is None else hooks


# The backward pass

#: the number of the backward pass that this thread is in; -1 outside
current_graph_task_id: Callable[[], int] = torch._C._current_graph_task_id


def at_end_of_backward(run: Callable[[], None]) -> None:
    """Runs it once the backward pass that this thread is in is over."""
    engine: Any = Variable._execution_engine
    engine.queue_callback(run)


# GPUs

#: `f(device_index)`: the handle of the current stream; None where torch has no CUDA
current_raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)


# Modules

#: of the functions in which a module asks for and is given the values of its parameters
SAVES: CodeType = torch.nn.Module._save_to_state_dict.__code__
LOADS: CodeType = torch.nn.Module._load_from_state_dict.__code__

#: methods that give a module its first values
RESETS = ("reset_parameters", "_reset_parameters")

#: `f(module)`: its own parameters, by its own names, each as often as it is there
parameters_of: Callable[[torch.nn.Module], dict[str, torch.nn.Parameter | None]] = attrgetter("_parameters")

#: `f(module)`: its own buffers
buffers_of: Callable[[torch.nn.Module], dict[str, torch.Tensor | None]] = attrgetter("_buffers")

#: `f(module)`: its own modules, each as often as it is there
children_of: Callable[[torch.nn.Module], dict[str, torch.nn.Module | None]] = attrgetter("_modules")


def forget_flat_weights(rnn: torch.nn.RNNBase) -> None:
    """Drops its weak references to its parameters, which keep torch.utils.swap_tensors from working."""
    rnn._flat_weight_refs = []


def make_flat_weights(rnn: torch.nn.RNNBase) -> None:
    """Lists its parameters anew."""
    rnn._init_flat_weights()


# Optimizers and loss scaling

#: what torch.nn.utils.clip_grad_norm_ and users of its parts write gradients with
CLIP_WITH_NORM = "_clip_grads_with_norm_"


def skips_by_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its fused step takes GradScaler's found_inf."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def load_state_dict_pre_hooks(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Those of Optimizer.register_load_state_dict_pre_hook."""
    return [*optimizer._optimizer_load_state_dict_pre_hooks.values()]


def load_state_dict_post_hooks(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Those of Optimizer.register_load_state_dict_post_hook."""
    return [*optimizer._optimizer_load_state_dict_post_hooks.values()]


def is_enabled(scaler: torch.amp.GradScaler) -> bool:
    """Without the call of a method that users may replace."""
    return bool(scaler._enabled)

#: `f(scaler)`: the tensor that update() changes
scale_of: Callable[[torch.amp.GradScaler], torch.Tensor] = attrgetter("_scale")


def optimizer_state(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What the scaler keeps for an optimizer until update()."""
    state: dict[str, Any] = scaler._per_optimizer_states[id(optimizer)]
    return state


# torch.distributed

#: the store that the default group met in; None over MPI
default_store: Callable[[], Any] = distributed_c10d._get_default_store


def initialises(code: CodeType) -> bool:
    """Whether it is what makes an optimizer's states, with gradients of zeros, for a checkpoint to be
    loaded into.
    """
    module = sys.modules.get("torch.distributed.checkpoint.state_dict")  # a second to import
    return module is not None and code is module._init_optim_state.__code__


# FSDP2, which has no public way to list what it reduces together.


def fsdp_state(module: Any) -> Any:
    """Of an FSDPModule; modules that were given to fully_shard together share one."""
    return module._get_fsdp_state()


def fsdp_groups(module: Any) -> list[Any]:
    """Of each mesh the parameters that are reduced together."""
    groups: list[Any] = fsdp_state(module)._fsdp_param_groups
    return groups


def fsdp_root(module: Any) -> Any:
    """What the FSDPModules of one model share: `post_backward_final_callback_queued` is of it."""
    return fsdp_state(module)._state_ctx

#: `f(group)`: what set_all_reduce_hook set
fsdp_all_reduce_hook: Callable[[Any], Any] = attrgetter("_all_reduce_hook")

#: `f(fsdp_param)`: the size of the whole parameter
fsdp_size: Callable[[Any], torch.Size] = attrgetter("_orig_size")


def fsdp_has_replicas(info: Any) -> bool:
    """Whether a group's mesh_info is anything but a one-dimensional shard mesh."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo

    return isinstance(info, DDPMeshInfo) or not isinstance(info, FSDPMeshInfo)


def fsdp_divisor_after(group: Any, reduce_dtype: torch.dtype, device_type: str) -> float | None:
    """What FSDP2 divides by after its reduce-scatter."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors

    _, divide_after, _, _ = _get_gradient_divide_factors(
        group._reduce_scatter_process_group, None, reduce_dtype, device_type,
        group.gradient_divide_factor, group.force_sum_reduction_for_comms,
    )
    divisor: float | None = divide_after
    return divisor
