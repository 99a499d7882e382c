"""Parameter gathers beside the next forward: one message in step(), buckets in step(), and overlapped.

Run by hsdp_run over a slow link, or by hand; the ranks form one shard group. An iteration is one
backward pass, reduced while it runs, and AdamW. All variants take turns; medians over rounds of the
slowest rank. Hidden is the share of the synchronous gather that the overlapped one does not expose.
Prints a table.

    hsdp_run -n 2 python torch_gather.py [--rounds N] [--layers L] [--width W] [--rows B]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import hsdp

BUCKETS = (1 << 20, 4_000_000, 16 << 20)  # 4'000'000: a million f32
ONE_SHOT = 1 << 40
Seconds = tuple[float, float, float]  # of a forward, of an iteration, exposed of a gather


def make(
    mesh: hsdp.Mesh, asked: argparse.Namespace, dtype: torch.dtype, stage: int, bucket: int, overlap: bool
) -> Callable[[], Seconds]:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(part for _ in range(asked.layers) for part in (nn.Linear(asked.width, asked.width), nn.ReLU()))
    ).to(dtype)
    reducer = hsdp.Reducer(mesh)
    reducer.attach(model)
    optimizer = hsdp.zero.ShardedOptimizer(
        torch.optim.AdamW, model, reducer, stage=stage, gather_bucket_bytes=bucket,
        overlap_param_gather=overlap, lr=1e-6,
    )
    inputs = torch.randn(asked.rows, asked.width, dtype=dtype)

    # From one forward to the next: the gather of a step is exposed in it or in the forward after it.
    def iteration() -> Seconds:
        exposed = optimizer.gather_stats().exposed_s
        start = time.perf_counter()
        with reducer.microbatch(last=True):
            result = model(inputs)
            forward = time.perf_counter() - start
            result.float().square().mean().backward()
        optimizer.step()
        whole = time.perf_counter() - start
        return forward, whole, optimizer.gather_stats().exposed_s - exposed

    def settled() -> Seconds:
        result = iteration()
        optimizer.wait_parameters()  # the next variant has the link for itself
        return result

    # The forward is timed right after a step of the same variant.
    def timed() -> Seconds:
        iteration()
        result = iteration()
        optimizer.wait_parameters()
        return result

    settled()
    settled()
    return timed


def slowest(mesh: hsdp.Mesh, rounds: list[Seconds]) -> list[float]:
    medians = torch.tensor([statistics.median(column) for column in zip(*rounds, strict=True)])
    every = torch.from_dlpack(mesh.world.all_gather(medians))
    return [float(value) for value in every.view(mesh.size, -1).amax(0)]


def measure(mesh: hsdp.Mesh, asked: argparse.Namespace) -> None:
    if mesh.rank == 0:
        print("| dtype | stage | bucket, bytes | gather | forward, ms | iteration, ms | exposed, ms | hidden |")
        print("| --- " * 8 + "|")
    for dtype in (torch.float32, torch.float16):
        for stage in (1, 2):
            variants = {("one shot", ONE_SHOT): make(mesh, asked, dtype, stage, ONE_SHOT, False)}
            for bucket in BUCKETS:
                variants["in step", bucket] = make(mesh, asked, dtype, stage, bucket, False)
                variants["overlapped", bucket] = make(mesh, asked, dtype, stage, bucket, True)
            rounds: dict[tuple[str, int], list[Seconds]] = {key: [] for key in variants}
            for _ in range(asked.rounds):
                for key, run in variants.items():
                    mesh.world.barrier()
                    rounds[key].append(run())
            found = {key: slowest(mesh, one) for key, one in rounds.items()}
            for (name, bucket), (forward, whole, exposed) in found.items():
                hidden = ""
                if name == "overlapped":
                    hidden = f"{1 - exposed / found['in step', bucket][2]:.0%}"
                size = "all" if bucket == ONE_SHOT else str(bucket)
                if mesh.rank == 0:
                    print(f"| {str(dtype)[6:]} | {stage} | {size} | {name} | {1e3 * forward:.1f} "
                          f"| {1e3 * whole:.1f} | {1e3 * exposed:.1f} | {hidden} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=480)
    parser.add_argument("--rows", type=int, default=256)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with hsdp.init_mesh(replicate=1, shard=hsdp.job_size()) as mesh:
        measure(mesh, asked)


if __name__ == "__main__":
    main()
