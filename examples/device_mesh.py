"""A torch DeviceMesh as the mesh, under torchrun.

    torchrun --nproc-per-node 4 examples/device_mesh.py

A network on a DeviceMesh of (dp_replicate, dp_shard) gives its gradients to a Reducer instead of
torch.distributed. Each rank prints its slice of one gradient, and checks all of them against an
all-reduce of torch.distributed.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import hsdp

MICROBATCHES = 3


def main() -> None:
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    replicate = 2 if size % 2 == 0 else 1
    device_mesh = init_device_mesh(
        "cpu", (replicate, size // replicate), mesh_dim_names=("dp_replicate", "dp_shard")
    )
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
    hsdp.broadcast_parameters(device_mesh, model)

    reducer = hsdp.Reducer(device_mesh, reduce_dtype="f32")
    reducer.attach(model, keep_grads=True)
    for m in range(MICROBATCHES):
        with reducer.microbatch(last=m == MICROBATCHES - 1):
            model(torch.randn(16, 8)).square().mean().backward()

    for name, parameter in model.named_parameters():
        whole = parameter.grad  # this rank's own sum, because of keep_grads
        assert whole is not None
        dist.all_reduce(whole)
        offset, count = reducer.slice(name)
        mean = whole.flatten()[offset : offset + count] / size
        assert torch.allclose(reducer.shard(name), mean, atol=1e-6), name

    offset, count = reducer.slice("0.weight")
    print(
        f"rank {reducer.mesh.rank} of {replicate}x{size // replicate}: elements {offset} to "
        f"{offset + count} of 0.weight, launched by {os.environ.get('TORCHELASTIC_RUN_ID', 'hand')}",
        flush=True,
    )
    reducer.close()
    reducer.mesh.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
