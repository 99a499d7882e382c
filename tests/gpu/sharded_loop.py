"""Training loops in torch with a ShardedOptimizer, LoCo and coalesced windows, compared bit for bit.

    sharded_loop.py --device cpu|cuda --mesh 2x2

Starts the ranks itself. Prints a verdict for each check; exit status 0 when all hold, else 1. Two ways
to the same result are compared: the stages of ZeRO, one process's optimizer and the sharded one, sums here
and in host memory, and of LoCo, the GPU and the host engine. Updates here and in host memory agree within
1e-4. What would compare a thing with itself is not run.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import check_script
import ranks
from gpu_report.lines import FAILED, NOT_RUN, OK, Check
from ranks import Outcome

STEPS, MICROBATCHES = 3, 2
LIMIT_S = 360.0
TIMEOUT_S = 120.0
WIDTH, LAYERS = 96, 3
LOCO_COUNT = 100_003
STAGE_3 = {"stage": 3, "persistence_threshold": 0}
# What both loops are given beside the model's dtype: what must not change a bit.
PAIRS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gather while step returns": (
        "float32", {"overlap_param_gather": True}, {"overlap_param_gather": False}
    ),
    "stage 3 as stage 2, fp32": ("float32", STAGE_3, {}),
    "stage 3 as stage 2, bf16": ("bfloat16", STAGE_3, {}),
    "stage 3 that keeps units": (
        "bfloat16", {**STAGE_3, "reshard_after_forward": False, "reshard_after_backward": False}, {}
    ),
    "stage 3 that clips": ("float32", {**STAGE_3, "max_grad_norm": 0.01}, {"max_grad_norm": 0.01}),
}
OFFLOADED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "stage 3 with offload, fp32": ("float32", {**STAGE_3, "offload": "host"}, {"offload": "host"}),
    "stage 3 with offload, bf16": ("bfloat16", {**STAGE_3, "offload": "host"}, {"offload": "host"}),
}
NEAR = "offload beside none"
LOCO = "LoCo as on the host"


def _model(device: Any, dtype: Any) -> Any:
    import torch
    from torch import nn

    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
            self.head = nn.Linear(WIDTH, 5)

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = x + torch.tanh(layer(x))
            return self.head(x)

    return Tower().to(device, dtype)


def _loss(model: Any, mesh: Any, device: Any, dtype: Any, step: int, microbatch: int) -> Any:
    import torch

    random = torch.Generator().manual_seed(1_000_000 * step + 1_000 * microbatch + mesh.rank)
    x = torch.randn(16, WIDTH, generator=random).to(device, dtype)
    return model(x).float().square().mean()


def _run_step(reducer: Any, model: Any, device: Any, dtype: Any, step: int) -> None:
    for m in range(MICROBATCHES):
        with reducer.microbatch(last=m == MICROBATCHES - 1):
            _loss(model, reducer.mesh, device, dtype, step, m).backward()


def _train(mesh: Any, device: Any, dtype: Any, options: dict[str, Any]) -> dict[str, Any]:
    import torch

    import hsdp

    model = _model(device, dtype)
    with hsdp.Reducer(mesh, reduce_dtype="bf16", bucket_bytes=1 << 14) as reducer:
        reducer.attach(model)
        optimizer = hsdp.zero.ShardedOptimizer(torch.optim.AdamW, model, reducer, lr=1e-2, **options)
        for step in range(STEPS):
            _run_step(reducer, model, device, dtype, step)
            optimizer.step()
        state = optimizer.full_model_state_dict(model)
        optimizer.close()
    return {name: value.detach().cpu().clone() for name, value in state.items()}


def _difference(found: dict[str, Any], wanted: dict[str, Any], tolerance: float = 0.0) -> str:
    """What differs, or nothing."""
    for name, want in wanted.items():
        off = (found[name].double() - want.double()).abs().max().item() if want.numel() else 0.0
        if not off <= tolerance:  # NaN neither
            return f"'{name}' is off by up to {off:g}"
    return ""


def _same_training(mesh: Any, device: Any, name: str) -> str:
    import torch

    dtype, *both = {**PAIRS, **OFFLOADED}[name]
    return _difference(*(_train(mesh, device, getattr(torch, dtype), options) for options in both))


def _near_training(mesh: Any, device: Any) -> str:
    """Updates on the host and on the GPU, whose divisions may round differently."""
    import torch

    both = ({"offload": "host"}, {})
    return _difference(*(_train(mesh, device, torch.float32, options) for options in both), 1e-4)


def _one_process(mesh: Any, device: Any) -> str:
    """The sharded optimizer, and torch's on whole parameters with the same mean gradients."""
    import torch

    import hsdp

    found = _train(mesh, device, torch.float32, {})
    model = _model(device, torch.float32)
    with hsdp.Reducer(mesh, reduce_dtype="bf16", bucket_bytes=1 << 14) as reducer:
        reducer.attach(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(STEPS):
            _run_step(reducer, model, device, torch.float32, step)
            reducer.gather_gradients()
            optimizer.step()
    return _difference(found, {name: value.detach().cpu() for name, value in model.state_dict().items()})


def _window(mesh: Any, device: Any) -> str:
    """A coalesced window whose sums lie here, and one whose sums lie in pinned memory."""
    import torch

    import hsdp

    results = []
    for where in ("host", "device"):
        model = _model(device, torch.float32)
        with hsdp.Reducer(mesh, bucket_bytes=1 << 14, accumulate_on=where) as reducer:
            reducer.attach(model)
            for step in range(2):
                with hsdp.zero.coalesce_grad_reduction(reducer):
                    for m in range(3):
                        _loss(model, mesh, device, torch.float32, step, m).backward()
                reducer.gather_gradients()
            results.append({name: p.grad.cpu().clone() for name, p in model.named_parameters()})
    return _difference(*results)


def _loco_shards(mesh: Any, device: Any) -> dict[str, Any]:
    import torch

    import hsdp

    shards = {}
    names = [f"w{index}" for index in range(3)]
    with hsdp.Reducer(mesh, replica_hop=hsdp.quant.LocoHop(), bucket_bytes=1 << 17) as reducer:
        for name in names:
            reducer.register(name, (LOCO_COUNT,))
        for step in range(STEPS):
            random = torch.Generator().manual_seed(1_000 * step + mesh.rank)
            with reducer.microbatch(last=True):
                for name in names:
                    gradient = torch.randn(LOCO_COUNT, generator=random)
                    reducer.gradient_ready(name, gradient.to(device))
            for name in names:
                shards[f"step {step}, {name}"] = torch.from_dlpack(reducer.shard(name)).cpu().clone()
    return shards


def _loco(mesh: Any, device: Any) -> str:
    """The same gradients through the same hop, on this device and on the host engine."""
    import torch

    import hsdp

    sizes = mesh.replicate_group.size, mesh.shard_group.size
    with hsdp.init_mesh(*sizes, device=torch.device("cpu"), timeout_s=TIMEOUT_S) as host:
        wanted = _loco_shards(host, torch.device("cpu"))
    return _difference(_loco_shards(mesh, device), wanted)


OTHERS: dict[str, Callable[[Any, Any], str]] = {
    "AdamW as in one process": _one_process,
    NEAR: _near_training,
    "a window, sums on the host": _window,
    LOCO: _loco,
}
CHECKS = [*PAIRS, *OFFLOADED, *OTHERS]
NEEDS_GPU = {*OFFLOADED, NEAR, "a window, sums on the host", LOCO}
NEEDS_SHARDS = {*PAIRS, *OFFLOADED}


def why_not(name: str, replicate: int, shard: int, on: str) -> str:
    """Why a check cannot run there, or would compare a thing with itself; or nothing."""
    if on == "cpu" and name in NEEDS_GPU:
        return "it needs a GPU; use --device cuda"
    if shard == 1 and name in NEEDS_SHARDS:
        return "it needs a shard group of two"
    return "it needs two replicas" if replicate == 1 and name == LOCO else ""


def check_names(mesh: str) -> list[str]:
    return [f"sharded {mesh}: {name}" for name in CHECKS]


def all_checks(replicate: int, shard: int, on: str) -> list[tuple[str, str, float]]:
    """One rank: each check's name, what is wrong or nothing, and seconds; up to one that raised."""
    device = ranks.device_of_rank(on)

    import hsdp

    done = []
    for name in CHECKS:
        if why_not(name, replicate, shard, on):
            continue
        start = time.monotonic()
        try:
            with hsdp.init_mesh(replicate, shard, device=device, timeout_s=TIMEOUT_S) as mesh:
                other = OTHERS.get(name)
                problem = other(mesh, device) if other else _same_training(mesh, device, name)
        except Exception as error:
            traceback.print_exc()
            done.append((name, f"{type(error).__name__}: {error}", time.monotonic() - start))
            break  # the other ranks hear of it when this one ends
        done.append((name, problem, time.monotonic() - start))
    return done


def _check(title: str, name: str, outcomes: list[Outcome]) -> Check:
    """Of what the ranks said of it."""
    problems, seconds, is_missing = [], 0.0, False
    for rank, outcome in enumerate(outcomes):
        found = [words for words in outcome.result or [] if words[0] == name]
        if outcome.status != 0:
            problems.append(f"rank {rank}: {outcome.problem()}")
        is_missing = is_missing or not found
        for _, problem, took in found:
            seconds = max(seconds, took)
            problems += [f"rank {rank}: {problem}"] if problem else []
    if is_missing and not problems:
        return Check(title, NOT_RUN, "one before it raised")
    return Check(title, FAILED if problems else OK, "; ".join(problems), seconds)


def _run(mesh: str, device: str) -> int:
    replicate, shard = ranks.mesh_of(mesh)
    outcomes = ranks.run_ranks(all_checks, [replicate, shard, device], replicate * shard, device, LIMIT_S)
    failed = False
    for title, name in zip(check_names(mesh), CHECKS):
        why = why_not(name, replicate, shard, device)
        check = Check(title, NOT_RUN, why) if why else _check(title, name, outcomes)
        failed = failed or check.verdict == FAILED
        print(check.line(), flush=True)
    for rank, outcome in enumerate(outcomes):
        if failed and outcome.output:
            print(f"rank {rank} said:\n{outcome.output}", flush=True)
    return 1 if failed else 0


def main() -> int:
    return check_script.run(
        "Training loops with sharded optimizers.", "1x2", "any number of ranks", lambda size: True, _run
    )


if __name__ == "__main__":
    sys.exit(main())
