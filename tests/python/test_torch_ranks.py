"""Attached models on several ranks: agreement, abandoned microbatches, gathered parameters."""

from __future__ import annotations

import pytest
import torch
from conftest import on_mesh
from one_rank import attached_to
from same_tensors import require_same
from torch import nn

import hsdp


def make_model(rank: int) -> nn.Module:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3, dtype=torch.float32))
    model[2].register_buffer("steps", torch.tensor(rank, dtype=torch.int32))
    model[2].register_buffer("mask", torch.tensor([rank == 1, True]))
    model.register_parameter("wide", nn.Parameter(torch.full((4, 6), float(rank)).t()))
    return model


@on_mesh(2, 2)
def test_broadcast_parameters(mesh: hsdp.Mesh) -> None:
    model = make_model(mesh.rank)
    hsdp.broadcast_parameters(mesh, model, root=1)
    require_same(model.state_dict(), make_model(1).state_dict())
    other = nn.Linear(3, 2 + mesh.rank // 3)
    with pytest.raises(hsdp.MismatchError) as error:
        hsdp.broadcast_parameters(mesh, other)
    assert "'weight (2, 3) torch.float32' on rank 0" in str(error.value)
    assert "'weight (3, 3) torch.float32' on rank 3" in str(error.value) and error.value.ranks == (3,)
    mesh.world.barrier()


class Boom(Exception):
    pass


@on_mesh(2, 2)
def test_exceptions_leave_all_ranks_usable(mesh: hsdp.Mesh) -> None:
    """User code on rank 2 raises in the middle of a backward pass; then all ranks train on."""
    model = make_model(mesh.rank)
    hsdp.broadcast_parameters(mesh, model)
    reducer = attached_to(model, mesh, missing="zero", bucket_bytes=64)
    raising = []

    def tensor_hook(grad: torch.Tensor) -> None:
        if raising:
            raise Boom("in the backward pass")

    for step in range(6):
        raising[:] = [1] if step % 2 == 0 and mesh.rank == 2 else []
        try:
            for m in range(2):
                with reducer.microbatch(last=m == 1):
                    hidden = model[0](torch.full((4, 5), float(mesh.rank)))
                    hidden.register_hook(tensor_hook)
                    model[2](hidden).sum().backward()
            assert step % 2 == 1 and mesh.shard_group.all_reduce(float(reducer.shard("2.bias").sum())) == 24
        except Boom:
            assert step % 2 == 0 and mesh.rank == 2
        except hsdp.StepAbortedError as error:
            assert step % 2 == 0 and error.ranks == (2,) and "in the backward" in str(error)
        assert all(p.grad is None for p in model.parameters())
    reducer.gather_gradients()
    assert model[2].bias.grad.tolist() == [8.0] * 3  # 4 rows, 2 microbatches, mean over ranks
    assert model.wide.grad is None  # it is unused on every rank


@on_mesh(1, 2)
def test_local_sums_begin_anew_after_a_dropped_step(mesh: hsdp.Mesh) -> None:
    """With keep_grads, what a dropped step left is not part of the next sum."""
    model = nn.Linear(2, 1, bias=False)
    reducer = attached_to(model, mesh, keep_grads=True)
    for step in range(3):
        try:
            for m in range(3):
                with reducer.microbatch(last=m == 2):
                    model(torch.ones(1, 2)).sum().backward()
                    if (step, m, mesh.rank) == (1, 1, 1):
                        raise Boom
            reducer.shard("weight")
        except (Boom, hsdp.StepAbortedError):
            assert step == 1
    assert model.weight.grad.tolist() == [[3.0, 3.0]]


@on_mesh(2, 2)
def test_gathered_parameters_agree(mesh: hsdp.Mesh) -> None:
    """Each rank has updated its shards in place."""
    torch.manual_seed(0)
    model = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
    weight, bias = (p.detach().clone() for p in model.parameters())
    reducer = attached_to(model, mesh)
    image = torch.ones(1, 2, 5, 5).to(memory_format=torch.channels_last)
    with reducer.microbatch(last=True):
        model(image * mesh.rank).sum().backward()
    for name, p in model.named_parameters():
        offset, count = reducer.slice(name)
        shard = torch.from_dlpack(reducer.shard(name))
        flat = p.detach().flatten()  # row-major: a copy where p is channels_last
        flat[offset : offset + count] -= 0.5 * shard
        p.data.copy_(flat.view_as(p))
    reducer.gather_parameters()
    assert torch.allclose(model.weight, weight - 0.5 * 9 * 1.5) and torch.allclose(model.bias, bias - 0.5 * 9)
    bits = str([p.detach().contiguous().flatten().tolist() for p in model.parameters()])
    assert len(set(mesh.world._handle.exchange(bits, "test"))) == 1
