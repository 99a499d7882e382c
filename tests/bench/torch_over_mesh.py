"""ShardedOptimizer with shard_over="mesh" beside "shard": steps over a slow link between replicas, and what
reduction and update add in shared memory, beside DDP with torch's ZeroRedundancyOptimizer over all ranks.

over_mesh.py runs it. Variants take turns, alternating their order. The slowest rank of a round counts. Ratios
are computed within a round, then their median over rounds. Prints `value NAME NUMBER` lines.

    hsdp_run -n 2 python torch_over_mesh.py --part link [--rounds N]
    hsdp_run -n 4 python torch_over_mesh.py --part memory [--rounds N]
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import hsdp
from torch_gather import Seconds, time_rounds
from torch_zero import alone, ddp, ours

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))
import beside_fsdp2 as example  # noqa: E402

LAYERS, WIDTH = 64, 512  # over the link: 16 Mi elements
ROWS = {"link": 512, "long": 2048}  # a forward shorter than the gather, and a longer one
# Name: shard_over, and whether step() returns before the parameters are gathered.
WAYS: dict[str, tuple[Any, bool]] = {
    "shard": ("shard", True), "mesh": ("mesh", True), "mesh_in_step": ("mesh", False)
}


def over_link(mesh: hsdp.Mesh, rows: int, over: Any, overlap: bool) -> Callable[[], Seconds]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).bfloat16()
    reducer = hsdp.Reducer(mesh, shard_over=over)
    reducer.attach(model)
    optimizer = hsdp.zero.ShardedOptimizer(
        torch.optim.AdamW, model, reducer, overlap_param_gather=overlap, lr=1e-6,
        gather_bucket_bytes=2 << 20,
    )
    update = 0.0
    call = optimizer._run_inner

    def timed() -> None:
        nonlocal update
        start = time.perf_counter()
        call()
        update = time.perf_counter() - start

    optimizer._run_inner = timed  # type: ignore[method-assign]
    inputs = torch.randn(rows, WIDTH, dtype=torch.bfloat16)

    def forward_and_backward() -> None:
        with reducer.microbatch(last=True):
            model(inputs).float().square().mean().backward()
        reducer.shard(reducer.parameters[0].name)

    def iteration() -> Seconds:
        exposed = optimizer.gather_stats().exposed_s
        start = time.perf_counter()
        optimizer.step()
        forward_and_backward()
        whole = time.perf_counter() - start
        return update, whole, optimizer.gather_stats().exposed_s - exposed

    forward_and_backward()
    return iteration


def measure_link(mesh: hsdp.Mesh, case: str, rounds: int) -> None:
    variants = {name: over_link(mesh, ROWS[case], *way) for name, way in WAYS.items()}
    slowest = {name: each.unbind(1) for name, each in time_rounds(mesh, variants, rounds).items()}
    if mesh.rank > 0:
        return
    shard, whole, in_step = (slowest[name] for name in WAYS)
    values = {
        "shard_ms": 1e3 * shard[1], "mesh_ms": 1e3 * whole[1], "ratio": whole[1] / shard[1],
        "shard_update_ms": 1e3 * shard[0], "mesh_update_ms": 1e3 * whole[0],
        "update_ratio": shard[0] / whole[0], "gather_ms": 1e3 * in_step[2],
        "hidden": 1 - whole[2] / in_step[2],
    }
    for name, of_rounds in values.items():
        print(f"value torch_over_mesh_{case}_{name} {float(of_rounds.quantile(0.5)):.4f}")


def measure_memory(mesh: hsdp.Mesh, rounds: int) -> None:
    layers, width = 6, 2048
    inputs = torch.randn(8, width)
    model = partial(example.make_model, layers, width)
    zero_redundancy = partial(
        ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW, parameters_as_bucket_view=True
    )
    systems = {
        "none": alone(model(), inputs, mesh.size),
        "shard": ours(model(), inputs, mesh),
        "mesh": ours(model(), inputs, mesh, over="mesh"),
        "zero_redundancy": ddp(model(), inputs, zero_redundancy),
    }
    seconds = example.time_steps(systems, rounds)
    if mesh.rank > 0:
        return
    for name in systems:
        print(f"value torch_over_mesh_{name}_step_ms {1e3 * statistics.median(seconds[name]):.3f}")
    added = {name: example.added_ms(seconds, name) for name in systems if name != "none"}
    for name, milliseconds in added.items():
        print(f"value torch_over_mesh_{name}_added_ms {milliseconds:.3f}")
    for name in ("shard", "mesh"):
        print(f"value torch_over_mesh_{name}_times {added['zero_redundancy'] / added[name]:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--part", choices=("link", "memory"), default="memory")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    size = hsdp.job_size()
    with hsdp.init_mesh(replicate=2, shard=size // 2) as mesh:
        if asked.part == "link":
            for case in ROWS:
                measure_link(mesh, case, asked.rounds)
            return
        example.join_gloo(mesh)
        measure_memory(mesh, asked.rounds)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
