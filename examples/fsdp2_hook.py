"""Trains an FSDP2 model with hsdp between the replicas, under torchrun.

    torchrun --nproc-per-node 4 examples/fsdp2_hook.py

FSDP2 shards the model within each replica, as if there were only one: it gathers parameters and
reduce-scatters gradients. Between the replicas hsdp sums the gradients once per step, bf16 on the wire,
from an fp32 sum over the microbatches. At the end every rank has the losses of the same training in one
process, and replicas hold the same bits.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import hsdp

STEPS = 30
MICROBATCHES = 4
SAMPLES = 16  # of a rank in a microbatch


def make_model() -> nn.Sequential:
    torch.manual_seed(0)  # the replicas start with the same weights
    layers = [nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)]
    return nn.Sequential(*layers)


def loss_of(model: nn.Module, step: int, microbatch: int, rank: int, size: int) -> torch.Tensor:
    """For one rank's part of a microbatch; microbatches are summed, so each is scaled by its share."""
    generator = torch.Generator().manual_seed((step * MICROBATCHES + microbatch) * size + rank)
    x = torch.rand(SAMPLES, 2, generator=generator) * 4 - 2
    y = torch.sin(x[:, :1]) * torch.cos(x[:, 1:])
    return nn.functional.mse_loss(model(x), y) / MICROBATCHES


def train_sharded(device_mesh: DeviceMesh, mesh: hsdp.Mesh) -> tuple[nn.Module, list[float]]:
    model = make_model()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=device_mesh["dp_shard"])  # one dimension: hsdp handles the replicas
    handle = hsdp.torch.replica_hook(model, mesh, hop=hsdp.PlainHop("bf16"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        total = 0.0
        for m in range(MICROBATCHES):
            handle.set_requires_all_reduce(m == MICROBATCHES - 1)
            loss = loss_of(model, step, m, mesh.rank, mesh.size)
            loss.backward()
            total += loss.item()
        handle.finish()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mesh.world.mean(total))
    return model, losses


def train_alone(size: int) -> list[float]:
    """The same training in one process: all ranks' parts of every microbatch, averaged."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        total = 0.0
        for m in range(MICROBATCHES):
            for rank in range(size):
                loss = loss_of(model, step, m, rank, size) / size
                loss.backward()
                total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    replicate = 2 if size % 2 == 0 else 1
    device_mesh = init_device_mesh(
        "cpu", (replicate, size // replicate), mesh_dim_names=("dp_replicate", "dp_shard")
    )
    with hsdp.init_mesh(replicate=replicate, shard=size // replicate) as mesh:
        model, losses = train_sharded(device_mesh, mesh)
        for name, parameter in model.named_parameters():
            mine = cast(DTensor, parameter).to_local().detach().flatten()
            together = mesh.replicate_group.all_gather(mine).numpy().reshape(replicate, -1)
            assert (together == mine.numpy()).all(), f"{name} differs between replicas"
        if mesh.rank == 0:
            alone = train_alone(size)
            apart = max(abs(a - b) for a, b in zip(losses, alone, strict=True))
            assert apart < 0.02 * alone[0] and losses[-1] < 0.2 * losses[0], (losses, alone)
            print(
                f"after {STEPS} steps on {replicate}x{size // replicate} ranks: loss "
                f"{losses[0]:.4f} -> {losses[-1]:.4f}, {apart:.0e} from one process",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
