"""Optimizer state over the whole mesh: a quarter of it on each of 2x2 ranks, where HSDP keeps half.

    hsdp_run -n 4 python examples/mesh_wide.py

Trains one model twice, with shard_over="shard" and "mesh", by the same batches. Both give the same bits, as
the replica wire is fp32. Rank 0 prints what a rank holds of the optimizer's states, and what it gives to the
replica hop in a step.
"""

from __future__ import annotations

import argparse
import hashlib
from typing import Any

import torch

import hsdp


def train(mesh: hsdp.Mesh, shard_over: Any, width: int, steps: int) -> tuple[list[float], str]:
    """What a rank holds and sends, in MiB, and a digest of the weights."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(width, width), torch.nn.Tanh())]
    model = torch.nn.Sequential(*layers)
    reducer = hsdp.Reducer(mesh, replica_dtype="f32", shard_over=shard_over)
    reducer.attach(model)
    optimizer = hsdp.zero.ShardedOptimizer(torch.optim.AdamW, model, reducer, stage=2, lr=1e-3)
    for step in range(steps):
        x = torch.randn(8, width, generator=torch.Generator().manual_seed(10 * step + mesh.rank))
        with reducer.microbatch(last=True):
            (model(x) - x.roll(1, 1)).square().mean().backward()
        optimizer.step()
    optimizer.wait_parameters()
    stats = reducer.stats()
    sent = stats.replica_hop_bytes / stats.step_count
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    numbers = [stats.optimizer_bytes / 2**20, sent / 2**20]
    optimizer.close()
    reducer.close()
    return numbers, digest.hexdigest()


def main() -> None:
    """Prints a table, and fails where the bits differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    with hsdp.init_mesh(replicate=2, shard=2) as mesh:
        lines, digests = [], []
        for shard_over in ("shard", "mesh"):
            numbers, digest = train(mesh, shard_over, options.width, options.steps)
            digests.append(digest)
            lines.append(f"{shard_over:10}" + "".join(f"{number:16.1f}" for number in numbers))
        if mesh.rank == 0:
            print(f"{4 * options.width**2 / 1e6:.1f} M parameters on 2x2 ranks, MiB of each rank")
            print("shard_over   AdamW's states    sent, a step")
            print("\n".join(lines))
            print("the same bits" if digests[0] == digests[1] else "other bits")
        if digests[0] != digests[1]:
            raise SystemExit("expected the same weights, to the bit")


if __name__ == "__main__":
    main()
