"""Times a training step with the Reducer beside torch's FSDP2 on the same mesh, and what one parameter
costs the host.

    step_times.py --device cpu|cuda [--mesh 1x1]

It starts the ranks itself. The systems take turns, and rank 0 prints medians as `value NAME NUMBER UNIT`. If
there are fewer GPUs than ranks, the ranks share them, as ranks.py arranges for hsdp and for torch's NCCL alike.
Then the host's time is meaningful, but the times of the steps are not.
"""

from __future__ import annotations

import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import check_script
import ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import hsdp

LAYERS = {"cpu": 4, "cuda": 16}
WIDTH = {"cpu": 256, "cuda": 4096}
ROWS = {"cpu": 16, "cuda": 2048}
MICROBATCHES = 2
ROUNDS, WARM_UP = 15, 3
SMALL_PARAMETERS = 1000
LIMIT_S = 420.0
TIMEOUT_S = 120.0

Step = Callable[[], None]


def _model(on: str, device: Any) -> Any:
    torch.manual_seed(0)
    layers = (nn.Linear(WIDTH[on], WIDTH[on], bias=False) for _ in range(LAYERS[on]))
    return nn.Sequential(*layers).to(device, torch.bfloat16)


def _backward(model: Any, x: Any) -> None:
    model(x).float().square().mean().backward()


def _alone(model: Any, x: Any) -> Step:
    def step() -> None:
        model.zero_grad()
        for _ in range(MICROBATCHES):
            _backward(model, x)

    return step


def _with_hsdp(mesh: Any, model: Any, x: Any) -> Step:
    reducer = hsdp.Reducer(mesh)
    reducer.attach(model)

    def step() -> None:
        for m in range(MICROBATCHES):
            with reducer.microbatch(last=m == MICROBATCHES - 1):
                _backward(model, x)
        reducer.gather_gradients()

    return step


def _with_fsdp2(model: Any, x: Any, on: str, replicate: int, shard: int) -> Step:
    names = ("replicate", "shard")
    mesh = init_device_mesh(on, (replicate, shard), mesh_dim_names=names)
    if replicate == 1:
        mesh = mesh["shard"]
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for layer in model:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return _alone(model, x)


def _medians_ms(systems: dict[str, Step], wait: Callable[[], None]) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in systems}
    for number in range(WARM_UP + ROUNDS):
        for name, step in systems.items():
            wait()
            start = time.perf_counter()
            step()
            wait()
            if number >= WARM_UP:
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def _step_lines(mesh: Any, on: str, device: Any, wait: Callable[[], None]) -> list[str]:
    replicate, shard = mesh.replicate_group.size, mesh.shard_group.size

    x = torch.randn(ROWS[on], WIDTH[on], device=device, dtype=torch.bfloat16)
    systems = {"alone": _alone(_model(on, device), x), "hsdp": _with_hsdp(mesh, _model(on, device), x)}
    lines = []
    try:  # it succeeds on all ranks or on none
        fsdp2 = _with_fsdp2(_model(on, device), x, on, replicate, shard)
        fsdp2()
        systems["fsdp2"] = fsdp2
    except RuntimeError as error:  # torch.distributed raises it, too
        lines.append(f"note: no step with FSDP2 on this mesh: {str(error).splitlines()[0]}")
    medians = _medians_ms(systems, wait)
    lines += [f"value step_{name} {median:.3f} ms" for name, median in medians.items()]
    if "fsdp2" in medians:
        lines.append(f"value step_hsdp_over_fsdp2 {medians['hsdp'] / medians['fsdp2']:.3f} ratio")
    return lines


def _host_time_line(mesh: Any, device: Any, wait: Callable[[], None]) -> str:
    model, other = (
        nn.ParameterList([nn.Parameter(torch.ones(16, device=device)) for _ in range(SMALL_PARAMETERS)])
        for _ in range(2)
    )
    reducer = hsdp.Reducer(mesh)
    reducer.attach(model)
    added = []
    for number in range(WARM_UP + ROUNDS):
        wait()
        start = time.perf_counter()
        with reducer.microbatch(last=True):
            torch.cat(list(model)).sum().backward()
        middle = time.perf_counter()
        wait()
        again = time.perf_counter()
        torch.cat(list(other)).sum().backward()
        end = time.perf_counter()
        other.zero_grad()
        if number >= WARM_UP:
            added.append((middle - start) - (end - again))
    overhead = 1e6 * statistics.median(added) / SMALL_PARAMETERS
    return f"value host_time_per_parameter_and_step {overhead:.3f} us"


def measure(replicate: int, shard: int, on: str, rendezvous: str) -> list[str]:
    """Runs one rank and returns the lines to print."""
    device = ranks.device_of_rank(on)
    def wait() -> None:
        if on == "cuda":
            torch.cuda.synchronize()

    dist.init_process_group(
        "nccl" if on == "cuda" else "gloo", init_method=f"file://{rendezvous}",
        rank=int(os.environ["RANK"]), world_size=replicate * shard,
    )
    with hsdp.init_mesh(replicate, shard, device=device, timeout_s=TIMEOUT_S) as mesh:
        lines = _step_lines(mesh, on, device, wait)
        lines.append(_host_time_line(mesh, device, wait))
    if not any(line.startswith("note: ") for line in lines):  # destroying a broken group may hang
        dist.destroy_process_group()
    return lines


def _run(mesh: str, on: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        arguments = [on, str(pathlib.Path(folder) / "rendezvous")]
        outcomes = ranks.run_ranks(measure, mesh, arguments, on, LIMIT_S)
    problems = [f"FAILED rank {rank}: {outcome.problem()}"
                for rank, outcome in enumerate(outcomes) if outcome.status != 0 or not outcome.result]
    print("\n".join(problems or outcomes[0].result), flush=True)
    return 1 if problems else 0


def main() -> int:
    description = "Times a step beside FSDP2."
    return check_script.run(description, "1x1", "any number of ranks", lambda size: True, _run)


if __name__ == "__main__":
    sys.exit(main())
