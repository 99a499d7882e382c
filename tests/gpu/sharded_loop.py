"""Training loops in torch with a ShardedOptimizer, LoCo and coalesced windows, compared bit for bit.

    sharded_loop.py --device cpu|cuda --mesh 2x2

It starts the ranks itself and prints a verdict for each check. Exit status: 0 if all hold, else 1. Each check
compares two ways to the same result: the stages of ZeRO, one process's optimizer and the sharded one, sums on the
device and in host memory, and for LoCo the GPU and the host engine. Updates on the device and in host memory must
agree within 1e-4. A check that would compare a thing with itself is not run.
"""

from __future__ import annotations

import sys
import time
import traceback
from typing import Any

import check_script
import ranks
import torch
from gpu_report.checks import LOCO, NEAR, OFFLOADED, OTHERS, PAIRS, SHARDED, WINDOW, titles
from gpu_report.lines import FAILED, NOT_RUN, OK, Check
from ranks import Outcome
from torch import nn

import hsdp

STEPS, MICROBATCHES = 3, 2
LIMIT_S = 360.0
TIMEOUT_S = 120.0
WIDTH, LAYERS = 96, 3
LOCO_COUNT = 100_003
NEEDS_GPU = {*OFFLOADED, *NEAR, WINDOW, LOCO}
NEEDS_SHARDS = {*PAIRS, *OFFLOADED}


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


def _loss(model: Any, mesh: Any, device: Any, dtype: Any, step: int, microbatch: int) -> Any:
    random = torch.Generator().manual_seed(1_000_000 * step + 1_000 * microbatch + mesh.rank)
    x = torch.randn(16, WIDTH, generator=random).to(device, dtype)
    return model(x).float().square().mean()


def _run_step(reducer: Any, model: Any, device: Any, dtype: Any, step: int) -> None:
    for m in range(MICROBATCHES):
        with reducer.microbatch(last=m == MICROBATCHES - 1):
            _loss(model, reducer.mesh, device, dtype, step, m).backward()


def _train(mesh: Any, device: Any, dtype: Any, options: dict[str, Any]) -> dict[str, Any]:
    model = Tower().to(device, dtype)
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
    """Returns what differs, or nothing."""
    for name, want in wanted.items():
        off = (found[name].double() - want.double()).abs().max().item() if want.numel() else 0.0
        if not off <= tolerance:  # true for NaN, too
            return f"'{name}' is off by up to {off:g}"
    return ""


def same_training(mesh: Any, device: Any, name: str) -> str:
    dtype, *both = {**PAIRS, **OFFLOADED, **NEAR}[name]
    trained = [_train(mesh, device, getattr(torch, dtype), options) for options in both]
    return _difference(*trained, 1e-4 if name in NEAR else 0.0)


def one_process(mesh: Any, device: Any) -> str:
    """Compares the sharded optimizer with torch's on whole parameters with the same mean gradients."""
    found = _train(mesh, device, torch.float32, {})
    model = Tower().to(device)
    with hsdp.Reducer(mesh, reduce_dtype="bf16", bucket_bytes=1 << 14) as reducer:
        reducer.attach(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(STEPS):
            _run_step(reducer, model, device, torch.float32, step)
            reducer.gather_gradients()
            optimizer.step()
    return _difference(found, {name: value.detach().cpu() for name, value in model.state_dict().items()})


def window(mesh: Any, device: Any) -> str:
    """Compares a coalesced window whose sums are on the device with one whose sums are in pinned memory."""
    results = []
    for where in ("host", "device"):
        model = Tower().to(device)
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


def loco(mesh: Any, device: Any) -> str:
    """Sends the same gradients through the same hop on this device and on the host engine."""
    sizes = mesh.replicate_group.size, mesh.shard_group.size
    with hsdp.init_mesh(*sizes, device=torch.device("cpu"), timeout_s=TIMEOUT_S) as host:
        wanted = _loco_shards(host, torch.device("cpu"))
    return _difference(_loco_shards(mesh, device), wanted)


def why_not(name: str, replicate: int, shard: int, on: str) -> str:
    """Returns why a check cannot run there or would compare a thing with itself, or nothing."""
    if on == "cpu" and name in NEEDS_GPU:
        return "it needs a GPU; use --device cuda"
    if shard == 1 and name in NEEDS_SHARDS:
        return "it needs a shard group of two"
    return "it needs two replicas" if replicate == 1 and name == LOCO else ""


def all_checks(replicate: int, shard: int, on: str) -> list[tuple[str, str, float]]:
    """Runs the checks of one rank up to one that raises. Returns name, problem or nothing, and seconds of each."""
    device = ranks.device_of_rank(on)
    done = []
    for name in SHARDED:
        if why_not(name, replicate, shard, on):
            continue
        start = time.monotonic()
        try:
            with hsdp.init_mesh(replicate, shard, device=device, timeout_s=TIMEOUT_S) as mesh:
                other = OTHERS.get(name)
                problem = globals()[other](mesh, device) if other else same_training(mesh, device, name)
        except Exception as error:
            traceback.print_exc()
            done.append((name, f"{type(error).__name__}: {error}", time.monotonic() - start))
            break  # the other ranks notice when this one ends
        done.append((name, problem, time.monotonic() - start))
    return done


def _check(title: str, name: str, outcomes: list[Outcome]) -> Check:
    """Makes one check of what the ranks returned for it."""
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
    outcomes = ranks.run_ranks(all_checks, mesh, [device], device, LIMIT_S)
    failed = False
    for title, name in titles("sharded_loop", mesh).items():
        why = why_not(name, *ranks.mesh_of(mesh), device)
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
