"""Times a training step with the Reducer beside torch's FSDP2 on one device, and what one parameter costs
the host.

    step_times.py --device cpu|cuda

One rank. The systems take turns; medians are printed as `value NAME NUMBER UNIT`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import check_script
import ranks

LAYERS = {"cpu": 4, "cuda": 16}
WIDTH = {"cpu": 256, "cuda": 4096}
ROWS = {"cpu": 16, "cuda": 2048}
MICROBATCHES = 2
ROUNDS, WARM_UP = 15, 3
SMALL_PARAMETERS = 1000

Step = Callable[[], None]


def _model(on: str, device: Any) -> Any:
    import torch
    from torch import nn

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
    import hsdp

    reducer = hsdp.Reducer(mesh)
    reducer.attach(model)

    def step() -> None:
        for m in range(MICROBATCHES):
            with reducer.microbatch(last=m == MICROBATCHES - 1):
                _backward(model, x)
        reducer.gather_gradients()

    return step


def _with_fsdp2(model: Any, x: Any, on: str) -> Step:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(on, (1,))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for layer in model:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)

    def step() -> None:
        model.zero_grad()
        for _ in range(MICROBATCHES):
            _backward(model, x)

    return step


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


def _print_steps(mesh: Any, on: str, device: Any, wait: Callable[[], None]) -> None:
    import torch

    x = torch.randn(ROWS[on], WIDTH[on], device=device, dtype=torch.bfloat16)
    medians = _medians_ms({
        "alone": _alone(_model(on, device), x),
        "hsdp": _with_hsdp(mesh, _model(on, device), x),
        "fsdp2": _with_fsdp2(_model(on, device), x, on),
    }, wait)
    for name, median in medians.items():
        print(f"value step_{name} {median:.3f} ms")
    print(f"value step_hsdp_over_fsdp2 {medians['hsdp'] / medians['fsdp2']:.3f} ratio", flush=True)


def _print_host_time(mesh: Any, device: Any, wait: Callable[[], None]) -> None:
    import torch
    from torch import nn

    import hsdp

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
    print(f"value host_time_per_parameter_and_step {overhead:.3f} us", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Times a step beside FSDP2.")
    check_script.add_device(parser)
    on = parser.parse_args().device
    check_script.require_device(parser, on)
    os.environ.setdefault("RANK", "0")
    import torch
    import torch.distributed as dist

    device = ranks.device_of_rank(on)

    def wait() -> None:
        if on == "cuda":
            torch.cuda.synchronize()

    store = dist.HashStore()
    dist.init_process_group("nccl" if on == "cuda" else "gloo", store=store, rank=0, world_size=1)
    import hsdp

    with hsdp.init_mesh(device=device) as mesh:
        _print_steps(mesh, on, device, wait)
        _print_host_time(mesh, device, wait)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
