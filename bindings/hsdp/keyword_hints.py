"""Hints for keyword arguments of other libraries: what they are called here.

An unknown keyword is Python's TypeError. If DDP, FSDP, DeepSpeed or torch's ZeroRedundancyOptimizer
have it, or if it resembles one that the function takes, the TypeError includes a hint. Type checkers
see the original signatures and reject all of them.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_MESH = "the ranks are those of the mesh: hsdp.init_mesh(replicate=, shard=), or a torch DeviceMesh"
_DEVICE = "the device is that of the mesh: hsdp.init_mesh(..., device=)"
_WIRE = 'what travels: reduce_dtype="bf16", replica_dtype='
_WEIGHTS = "call hsdp.broadcast_parameters(mesh, model) before the first step"
_HOLES = 'missing="zero" of hsdp.Reducer takes parameters without a gradient'
_LEAVE_OUT = "there is nothing to choose here; leave it out"
_WHOLE = "parameters are whole on every rank here; leave it out"
_LAST = "the microbatch that ends a step says so: reducer.microbatch(last=True)"
_OPTIMIZER = "hsdp.zero.ShardedOptimizer has it: "

#: for hsdp.Reducer and Reducer.attach
REDUCER = {
    # DistributedDataParallel
    "module": "call reducer.attach(model)",
    "bucket_cap_mb": "bucket_bytes= of hsdp.Reducer counts bytes: 25 << 20 for 25 MiB",
    "find_unused_parameters": _HOLES,
    "broadcast_buffers": "reducer.attach(model, broadcast_buffers=) has it",
    "init_sync": _WEIGHTS,
    "device_ids": _DEVICE,
    "output_device": _DEVICE,
    "process_group": _MESH,
    "static_graph": _LEAVE_OUT,
    "gradient_as_bucket_view": "gradients are packed as they come and freed; leave it out",
    "mixed_precision": _WIRE,
    # FullyShardedDataParallel and fully_shard
    "sharding_strategy": "the mesh says it: hsdp.init_mesh(replicate=, shard=); and stage= of "
    "hsdp.zero.ShardedOptimizer",
    "device_id": _DEVICE,
    "device_mesh": "pass it as the first argument of hsdp.Reducer",
    "mp_policy": _WIRE,
    "sync_module_states": _WEIGHTS,
    "auto_wrap_policy": _OPTIMIZER + "stage=3, units=",
    "reshard_after_forward": _OPTIMIZER + "stage=3, reshard_after_forward=",
    "backward_prefetch": _OPTIMIZER + "stage=3, prefetch_bytes=",
    "param_init_fn": _OPTIMIZER + "param_init_fn=",
    "forward_prefetch": _OPTIMIZER + "stage=3, prefetch_bytes=",
    "limit_all_gathers": _WHOLE,
    "use_orig_params": _WHOLE,
    "cpu_offload": _OPTIMIZER + 'offload="host"',
    "offload_policy": _OPTIMIZER + 'offload="host"',
    # DeepSpeed's ZeRO
    "stage": _OPTIMIZER + "stage=1, 2 or 3",
    "reduce_bucket_size": "bucket_bytes= of hsdp.Reducer counts bytes, not elements",
    "communication_data_type": _WIRE,
    "gradient_accumulation_steps": _LAST,
    "gradient_clipping": "call reducer.clip_grad_norm_(max_norm)",
    "gradient_predivide_factor": "call reducer.set_gradient_divide_factor(f)",
    "prescale_gradients": _LEAVE_OUT,
    "overlap_comm": "reductions always overlap with the backward pass; leave it out",
    "contiguous_gradients": _LEAVE_OUT,
    "zero_quantized_gradients": "replica_hop=hsdp.quant.LocoHop() of hsdp.Reducer",
}

#: for hsdp.zero.ShardedOptimizer
OPTIMIZER = {
    "process_group": _MESH,
    "parameters_as_bucket_view": _LEAVE_OUT,
    "overlap_with_ddp": "overlap_param_gather= hides the gather of the parameters",
    "allgather_bucket_size": "gather_bucket_bytes= counts bytes, not elements",
    "gradient_clipping": "max_grad_norm=",
    "cpu_offload": 'offload="host"',
    "offload_optimizer": 'offload="host"',
    "mesh": "the mesh is that of the Reducer; leave it out",
}

#: for hsdp.torch.replica_hook
REPLICA_HOOK = {
    "shard_over": "FSDP2 updates all of a replica's slices, so each replica needs the whole total; "
    "hsdp.zero.ShardedOptimizer has it",
}

#: for hsdp.init_mesh
MESH = {
    "backend": 'engine="host", "nccl" or "mpi"',
    "device_type": "device=",
    "mesh_shape": "replicate= and shard=",
    "mesh_dim_names": "the dimensions are replicate and shard; leave it out",
    "world_size": "replicate= and shard=, whose product it is",
    "rank": "the launcher says it; leave it out",
    "timeout": "timeout_s=, in seconds",
}


def hinting(hints: Mapping[str, str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Adds the hints to a function; keywords that it accepts need none."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        own = inspect.signature(function).parameters
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in own.values())

        def hint_for(word: str) -> str | None:
            if word in hints or takes_any:
                return hints.get(word)
            near = difflib.get_close_matches(word, own.keys() - {"self"}, 1)
            return f"did you mean {near[0]}=?" if near else None

        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            for word in kwargs:
                hint = None if word in own else hint_for(word)
                if hint is not None:
                    raise TypeError(
                        f"{function.__qualname__.removesuffix('.__init__')}() got an unexpected "
                        f"keyword argument '{word}'; {hint}"
                    )
            return function(*args, **kwargs)

        return called

    return decorate
