"""All private parts of torch that hsdp uses.

Each part is looked up when it is first used, in the form that this torch has. A missing part is a
UsageError that names it, and what works without it. Each has a check in
tests/python/test_torch_private.py, which fails first when torch changes. A test there keeps them out of
other files.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from operator import attrgetter
from types import CodeType
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from hsdp.caller_warning import warn_caller
from hsdp.errors import UsageError

#: the first and last release of torch that all tests have run with
OLDEST = (2, 9)
NEWEST = (2, 15)

# What works without a part.
_GRADIENTS = "Reducer.gradient_ready and the rest of hsdp outside hsdp.torch work without it"
_ATTACH = "Reducer.attach works without it"
_STAGE_2 = "Reducer.attach and ShardedOptimizer at stages 1 and 2 work without it"
_VALUES = "ShardedOptimizer works without it for a model that has its values, which is not on the meta device"
_CHECKPOINTS = "training works without it, and so does ShardedOptimizer.full_model_state_dict"
_NO_SCALER = "training without a GradScaler works without it, as does Reducer.set_loss_scale"
_LAUNCHERS = "ranks that hsdp_run, torchrun, mpirun or srun starts work without it"
_NO_HOOK = "Reducer.attach and ShardedOptimizer work without it"

_Found = TypeVar("_Found")
_parts: dict[str, tuple[Callable[[], Any], str]] = {}


# The decorated function finds the part, whose name it has: __getattr__ calls it once.
def _part(works: str) -> Callable[[Callable[[], _Found]], _Found]:
    def keep(find: Callable[[], Any]) -> Any:
        _parts[find.__name__] = (find, works)

    return keep


if not TYPE_CHECKING:  # mypy knows the names

    def __getattr__(name: str) -> Any:
        if name not in _parts:
            raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
        find, works = _parts[name]
        try:
            found = find()
        except (AttributeError, ImportError) as error:
            raise _missing(error, works) from error
        globals()[name] = found
        return found


def _missing(error: Exception, works: str) -> UsageError:
    return UsageError(
        f"hsdp.torch: expected a part of torch that torch {torch.__version__} does not have ({error}); "
        f"{works}; take torch {_text(OLDEST)} to {_text(NEWEST)}, or a later hsdp"
    )


# For objects whose class does not tell.
def _attribute(owner: Any, name: str, works: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError as error:
        raise _missing(error, works) from error


def _text(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))


def check_release(version: str) -> None:
    """Raises ImportError for a torch that is too old; RuntimeWarning for one that no test has seen."""
    release = tuple(map(int, version.split(".")[:2]))
    if release < OLDEST:
        raise ImportError(
            f"hsdp.torch: expected torch {_text(OLDEST)} or later, got {version}; "
            f"install one with pip install 'torch>={_text(OLDEST)}'"
        )
    if release > NEWEST:
        warn_caller(
            f"hsdp.torch: expected torch {_text(OLDEST)} to {_text(NEWEST)}, which hsdp was tested with, got "
            f"{version}; what it needs of torch and does not find there will be an error when it is used"
        )


# Tensors


@_part(_ATTACH)
def foreach_mul_() -> Callable[[list[torch.Tensor], Any], object]:
    """`f(tensors, tensor_or_tensors)`, in one kernel of a GPU"""
    return torch._foreach_mul_


@_part(_ATTACH)
def foreach_copy_() -> Callable[[list[torch.Tensor], list[torch.Tensor]], object]:
    """`f(tensors, values)`, in one kernel of a GPU"""
    return torch._foreach_copy_


@_part(_ATTACH)
def profiler_is_on() -> Callable[[], bool]:
    """`f()`: whether torch.profiler records; False if this torch does not say"""
    from torch.autograd import profiler

    return lambda: getattr(profiler, "_is_profiler_enabled", False)


@_part(_CHECKPOINTS)
def to_copy() -> Any:
    """the operator behind Tensor.to(), as __torch_dispatch__ sees it"""
    return torch.ops.aten._to_copy.default


@_part(_STAGE_2)
def make_subclass() -> Callable[..., Any]:
    """`f(cls, tensor, requires_grad)`: the tensor's storage under another class"""
    return torch.Tensor._make_subclass


@_part(_CHECKPOINTS)
def make_wrapper_subclass() -> Callable[..., Any]:
    """`f(cls, shape, dtype=, device=)`: a tensor without memory, for __torch_dispatch__"""
    return torch.Tensor._make_wrapper_subclass


@_part(_ATTACH)
def DisableTorchFunctionSubclass() -> Any:  # noqa: N802 - a class
    """a context without __torch_function__ of subclasses"""
    return torch._C.DisableTorchFunctionSubclass


@_part(_STAGE_2)
def tree_leaves() -> Callable[[Any], list[Any]]:
    """the tensors in nested tuples, lists and dicts"""
    from torch.utils import _pytree

    return _pytree.tree_leaves


#: attributes of tensors that neither read nor write values
ATTRIBUTES_WITHOUT_VALUES = tuple(
    name for name in ("_backward_hooks", "_post_accumulate_grad_hooks", "_version") if hasattr(torch.Tensor, name)
)
SETTABLE_WITHOUT_VALUES = tuple(name for name in ATTRIBUTES_WITHOUT_VALUES if name != "_version")


@_part(_GRADIENTS)
def version() -> Callable[[torch.Tensor], int]:
    """`f(tensor)`: increases with each in-place write"""
    return _getter(torch.Tensor, "_version")


@_part(_STAGE_2)
def base() -> Callable[[torch.Tensor], torch.Tensor | None]:
    """`f(tensor)`: the tensor that a view is of"""
    return _getter(torch.Tensor, "_base")


@_part(_GRADIENTS)
def storage_holders() -> Callable[[torch.UntypedStorage], int]:
    """`f(storage)`: how many tensors share it"""
    use_count, handle = torch._C._storage_Use_Count, _getter(torch.UntypedStorage, "_cdata")
    return lambda storage: use_count(handle(storage))


@_part(_STAGE_2)
def backward_hooks() -> Callable[[torch.Tensor], dict[int, Any]]:
    """`f(tensor)`: the hooks of Tensor.register_hook"""
    hooks = _getter(torch.Tensor, "_backward_hooks")
    return lambda tensor: hooks(tensor) or {}


@_part(_GRADIENTS)
def post_accumulate_grad_hooks() -> Callable[[torch.Tensor], dict[int, Any]]:
    """`f(tensor)`: those of Tensor.register_post_accumulate_grad_hook; torch's own dict, if any"""
    hooks = _getter(torch.Tensor, "_post_accumulate_grad_hooks")

    def found(tensor: torch.Tensor) -> dict[int, Any]:
        own: dict[int, Any] | None = hooks(tensor)
        return {} if own is None else own

    return found


# Raises AttributeError if a class, or an object that stands for the others, lacks the attribute.
def _getter(owner: Any, name: str) -> Callable[[Any], Any]:
    getattr(owner, name)
    return attrgetter(name)


# The backward pass


@_part(_GRADIENTS)
def current_graph_task_id() -> Callable[[], int]:
    """`f()`: the number of the backward pass that this thread is in; -1 outside"""
    return torch._C._current_graph_task_id


@_part(_GRADIENTS)
def at_end_of_backward() -> Callable[[Callable[[], None]], None]:
    """`f(run)`: calls `run` once this thread's current backward pass is over"""
    queue: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
    return queue


# GPUs


@_part(_GRADIENTS)
def current_raw_stream() -> Callable[[int], int] | None:
    """`f(device_index)`: the handle of the current stream; None if torch has no CUDA"""
    return getattr(torch._C, "_cuda_getCurrentRawStream", None)


# Modules


@_part(_CHECKPOINTS)
def SAVES() -> CodeType:  # noqa: N802 - a constant
    """the code of the function in which a module asks for the values of its parameters"""
    return torch.nn.Module._save_to_state_dict.__code__


@_part(_CHECKPOINTS)
def LOADS() -> CodeType:  # noqa: N802 - a constant
    """the code of the function in which a module is given the values of its parameters"""
    return torch.nn.Module._load_from_state_dict.__code__


#: methods that give a module its first values
RESETS = ("reset_parameters", "_reset_parameters")


@_part(_GRADIENTS)
def parameters_of() -> Callable[[torch.nn.Module], dict[str, torch.nn.Parameter | None]]:
    """`f(module)`: its own parameters, by local name, each as often as it occurs"""
    return _getter(torch.nn.Module(), "_parameters")


@_part(_GRADIENTS)
def buffers_of() -> Callable[[torch.nn.Module], dict[str, torch.Tensor | None]]:
    """`f(module)`: its own buffers"""
    return _getter(torch.nn.Module(), "_buffers")


@_part(_ATTACH)
def children_of() -> Callable[[torch.nn.Module], dict[str, torch.nn.Module | None]]:
    """`f(module)`: its own modules, each as often as it occurs"""
    return _getter(torch.nn.Module(), "_modules")


def forget_flat_weights(rnn: torch.nn.RNNBase) -> None:
    """Drops its weak references to its parameters, which make torch.utils.swap_tensors fail."""
    rnn._flat_weight_refs = []


@_part(_VALUES)
def make_flat_weights() -> Callable[[torch.nn.RNNBase], None]:
    """`f(rnn)`: lists its parameters again"""
    return torch.nn.RNNBase._init_flat_weights


# Optimizers and loss scaling

#: the function with which torch.nn.utils.clip_grad_norm_ and users of its parts write gradients
CLIP_WITH_NORM = "_clip_grads_with_norm_"


def skips_by_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its fused step takes GradScaler's found_inf."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def load_state_dict_pre_hooks(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The hooks of Optimizer.register_load_state_dict_pre_hook."""
    return [*_attribute(optimizer, "_optimizer_load_state_dict_pre_hooks", _CHECKPOINTS).values()]


def load_state_dict_post_hooks(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The hooks of Optimizer.register_load_state_dict_post_hook."""
    return [*_attribute(optimizer, "_optimizer_load_state_dict_post_hooks", _CHECKPOINTS).values()]


@_part(_NO_SCALER)
def unscale_grads() -> Callable[..., dict[torch.device, torch.Tensor]]:
    """the method in which a GradScaler divides gradients and finds infinities"""
    return torch.amp.GradScaler._unscale_grads_


def set_unscale_grads(method: Callable[..., dict[torch.device, torch.Tensor]]) -> None:
    """Replaces it for every GradScaler."""
    torch.amp.GradScaler._unscale_grads_ = method


def is_enabled(scaler: torch.amp.GradScaler) -> bool:
    """Avoids a method that users may replace."""
    return bool(_attribute(scaler, "_enabled", _NO_SCALER))


def scale_of(scaler: torch.amp.GradScaler) -> torch.Tensor:
    """The tensor that update() changes."""
    scale: torch.Tensor = _attribute(scaler, "_scale", _NO_SCALER)
    return scale


def optimizer_state(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What the scaler stores for an optimizer until update()."""
    state: dict[str, Any] = _attribute(scaler, "_per_optimizer_states", _NO_SCALER)[id(optimizer)]
    return state


# torch.distributed


@_part(_LAUNCHERS)
def default_store() -> Callable[[], Any]:
    """`f()`: the store in which the default group met; None over MPI"""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store


def initialises(code: CodeType) -> bool:
    """Whether this code makes an optimizer's states, with zero gradients, to load a checkpoint into."""
    module = sys.modules.get("torch.distributed.checkpoint.state_dict")  # takes a second to import
    made_in = getattr(module, "_init_optim_state", None)
    return made_in is not None and code is made_in.__code__


# FSDP2 has no public way to list what it reduces together.


def fsdp_state(module: Any) -> Any:
    """The state of an FSDPModule; modules passed to fully_shard together share one."""
    return _attribute(module, "_get_fsdp_state", _NO_HOOK)()


def fsdp_groups(module: Any) -> list[Any]:
    """For each mesh, the parameters that are reduced together."""
    state = fsdp_state(module)
    groups: list[Any] | None = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return groups
    only = _attribute(state, "_fsdp_param_group", _NO_HOOK)  # older releases: of one mesh, or None
    return [] if only is None else [only]


def fsdp_root(module: Any) -> Any:
    """What the FSDPModules of one model share; holds `post_backward_final_callback_queued`."""
    return _attribute(fsdp_state(module), "_state_ctx", _NO_HOOK)


def fsdp_all_reduce_hook(group: Any) -> Any:
    """The hook set by set_all_reduce_hook."""
    return _attribute(group, "_all_reduce_hook", _NO_HOOK)


def fsdp_size(fsdp_param: Any) -> torch.Size:
    """The size of the whole parameter."""
    size: torch.Size = _attribute(fsdp_param, "_orig_size", _NO_HOOK)
    return size


def fsdp_reduce_dtypes(group: Any) -> set[torch.dtype | None]:
    """The dtypes in which FSDP2 sends the group's gradients; None: whichever they have."""
    trainable = [p for p in group.fsdp_params if p.sharded_param.requires_grad]
    policy = getattr(group, "mp_policy", None)
    if policy is not None:  # the group's; param_dtype matters up to torch 2.14
        return {policy.reduce_dtype or policy.param_dtype or p.sharded_param.dtype for p in trainable}
    return {
        _attribute(p, "mp_policy", _NO_HOOK).reduce_dtype or p.sharded_param.grad_dtype for p in trainable
    }


@_part(_NO_HOOK)
def fsdp_has_replicas() -> Callable[[Any], bool]:
    """`f(mesh_info)`: whether a group's mesh is anything but a one-dimensional shard mesh"""
    from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo

    return lambda info: isinstance(info, DDPMeshInfo) or not isinstance(info, FSDPMeshInfo)


@_part(_NO_HOOK)
def fsdp_divisor_after() -> Callable[[Any, torch.dtype, str], float | None]:
    """`f(group, reduce_dtype, device_type)`: what FSDP2 divides by after its reduce-scatter"""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors

    def divisor(group: Any, reduce_dtype: torch.dtype, device_type: str) -> float | None:
        scattered_over = _attribute(group, "_reduce_scatter_process_group", _NO_HOOK)
        _, after, _, _ = _get_gradient_divide_factors(
            scattered_over, None, reduce_dtype, device_type,
            group.gradient_divide_factor, group.force_sum_reduction_for_comms,
        )
        return after

    return divisor


for _name in _parts:
    del globals()[_name]
