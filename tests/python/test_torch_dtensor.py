"""torch tensors and DTensors in snapshots, and shards as DTensors, on real ranks over gloo."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import Launcher, hsdp_check, on_ranks
from fsdp2_model import MICROBATCHES, Net, expected_gradients, loss_of, make_model, start_torch, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import hsdp

SHAPES = {"even": (8, 3), "uneven": (5, 2, 2), "fewer": (1, 7), "none": (0, 4), "one": (1,)}


def gradients(model: nn.Module) -> dict[str, Any]:
    return {name: p.grad for name, p in model.named_parameters()}


def backwards(model: Any, rank: int, handle: Any = None) -> None:
    for m in range(MICROBATCHES):
        if handle is not None:
            handle.set_requires_all_reduce(m == MICROBATCHES - 1)
        elif hasattr(model, "set_requires_all_reduce"):
            model.set_requires_all_reduce(m == MICROBATCHES - 1)
        loss_of(model, 0, m, rank).backward()


def write_runs(folder: str) -> None:
    """The same step with FSDP2's HSDP, FSDP2 with hsdp's hook, DDP and a Reducer."""
    start_torch(folder)
    mesh_2d = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with hsdp.init_mesh(2, 2, timeout_s=60) as mesh:
        native = make_model(mesh_2d)
        weights = whole(native)
        backwards(native, mesh.rank)
        hsdp.write_snapshot(f"{folder}/fsdp2", gradients(native), mesh, step=7)
        hooked = make_model(mesh_2d["shard"])
        backwards(hooked, mesh.rank, hsdp.torch.replica_hook(hooked, mesh))
        hsdp.write_snapshot(f"{folder}/hooked", gradients(hooked), mesh)
        backwards(hooked, mesh.rank)
        hsdp.write_snapshot(f"{folder}/twice", gradients(hooked), mesh)
        rounded = {n: g.bfloat16() for n, g in gradients(native).items()}
        hsdp.write_snapshot(f"{folder}/bf16", rounded, mesh)
        as_f32 = {n: g.float() for n, g in rounded.items()}
        hsdp.write_snapshot(f"{folder}/wire", as_f32, mesh, reduce_dtype=torch.bfloat16)
        torch.manual_seed(5)
        ddp = nn.parallel.DistributedDataParallel(Net())
        backwards(ddp, mesh.rank)
        own = {n.removeprefix("module."): g for n, g in gradients(ddp).items()}
        hsdp.write_snapshot(f"{folder}/ddp", own, mesh)
        mixed = {n: own[n] if "bias" in n else g for n, g in gradients(native).items()}
        hsdp.write_snapshot(f"{folder}/mixed", mixed, mesh)
        if mesh.rank == 0:
            expected = expected_gradients(weights, 0, 4)
            hsdp.write_snapshot(f"{folder}/float64.h5", expected)
        check_refusals(folder, mesh, mesh_2d)
        check_shards(mesh, mesh_2d)
    dist.destroy_process_group()


def test_snapshots_of_fsdp2_and_ddp(ranks: Launcher, tmp_path: pathlib.Path) -> None:
    ranks(4, write_runs, str(tmp_path))
    runs = {run: hsdp.read_snapshot(tmp_path / run) for run in ("fsdp2", "hooked", "ddp", "mixed")}
    for run, snapshot in runs.items():
        assert snapshot.info.layout == ("full" if run == "ddp" else "dim0")
        assert snapshot.copy_count == (4 if run == "ddp" else 2)
        assert hsdp_check(tmp_path / run) == 0
        assert hsdp_check(tmp_path / run, tmp_path / "float64.h5") == 0
        assert hsdp_check(tmp_path / run, tmp_path / "fsdp2") == 0
        assert hsdp_check(tmp_path / run, tmp_path / "twice") == 1
    names = {name for name, _ in Net().named_parameters()}
    assert runs["fsdp2"].info.step == 7 and set(runs["fsdp2"]) == names
    weight = runs["hooked"].to_torch("second.weight")
    assert weight.shape == (17, 16) and weight.dtype == torch.float32
    assert torch.equal(weight, torch.from_numpy(runs["hooked"]["second.weight"]))
    check_dtypes(tmp_path)


def check_dtypes(folder: pathlib.Path) -> None:
    """The recorded dtypes decide how close is close enough."""
    assert hsdp.read_snapshot(folder / "bf16").dtype("last.bias") == "bf16"
    assert hsdp.read_snapshot(folder / "wire").dtype("last.bias") == "f32"
    assert hsdp.read_snapshot(folder / "wire").info.replica_dtype == "bf16"
    assert hsdp.compare_snapshots(folder / "bf16", folder / "wire", bitwise=True).same
    for run in ("bf16", "wire"):
        assert hsdp_check(folder / run, folder / "float64.h5") == 0
        assert hsdp_check(folder / run, folder / "float64.h5", "--rtol", "1e-6") == 1


def check_refusals(folder: str, mesh: hsdp.Mesh, mesh_2d: Any) -> None:
    def refused(message: str, x: Any, mesh: Any = mesh) -> None:
        with pytest.raises(hsdp.UsageError, match=message):
            hsdp.write_snapshot(f"{folder}/no", {"w": x}, mesh)

    one = mesh_2d["shard"]
    sharded = distribute_tensor(torch.ones(4, 4), one, [Shard(0)])
    refused("'w'.*expected a mesh for a sharded DTensor", sharded, None)
    refused("'w'.*dimension 0.*full_tensor", distribute_tensor(torch.ones(4, 4), one, [Shard(1)]))
    both = distribute_tensor(torch.ones(4, 4), mesh_2d, [Shard(0), Shard(0)])
    refused("'w'.*cut once", both)
    refused("'w'.*cut once", DTensor.from_local(torch.ones(2), one, [Partial()]))
    refused("'w'.*mesh that it is sharded over",
            distribute_tensor(torch.ones(4, 4), mesh_2d["replicate"], [Shard(0)]))
    refused("'w'.*dense real tensor", torch.ones(2).to_sparse())
    refused("'w'.*dense real tensor", torch.ones(2) + 1j)
    refused("'w'.*got None.*leave out", None)
    if mesh.rank == 1:
        refused("'w'.*dense real tensor", torch.ones(2).to_sparse())
    else:
        with pytest.raises(hsdp.SnapshotError, match="error on rank 1") as caught:
            hsdp.write_snapshot(f"{folder}/no", {"w": torch.ones(2)}, mesh)
        assert caught.value.ranks == (1,)
    check_uneven_refusals(folder, mesh)


def check_uneven_refusals(folder: str, mesh: hsdp.Mesh) -> None:
    """A mistake on one rank is an error on all ranks, and the mesh stays usable."""
    good = {"w": np.ones(2, np.float32)}
    mistakes: list[tuple[Any, ...]] = [
        (f"{folder}/uneven", {"w": np.ones(2, np.int64)}, mesh),
        (f"{folder}/uneven", good, mesh, "x"),
        (f"{folder}/uneven.h5", good, mesh),
        (f"{folder}/uneven", good, mesh, 0, "f8"),
    ]
    for arguments in mistakes:
        if mesh.rank == 1:
            with pytest.raises(hsdp.UsageError):
                hsdp.write_snapshot(*arguments)
        else:
            with pytest.raises(hsdp.SnapshotError, match="error on rank 1"):
                hsdp.write_snapshot(f"{folder}/uneven", good, mesh)
    for names, step in ((f"w{mesh.rank}", 0), ("w", mesh.rank)):
        with pytest.raises(hsdp.MismatchError, match="same (parameters|step) on all ranks.*0 and 1"):
            hsdp.write_snapshot(f"{folder}/uneven", {names: good["w"]}, mesh, step)
    hsdp.write_snapshot(f"{folder}/even", good, mesh)


def check_shards(mesh: hsdp.Mesh, mesh_2d: Any) -> None:
    """`shard_dtensor` equals distribute_tensor of the mean gradient."""
    reducer = hsdp.Reducer(mesh, layout="dim0")
    shapes = {**SHAPES, "scalar": ()}
    for name, shape in shapes.items():
        reducer.register(name, shape)
    numbers = torch.arange(10).view(5, 2) * (1 - 2j)
    reducer.register("complex", numbers.shape, numbers.dtype)
    reducer.register("point", (), "complex64")
    with reducer.microbatch(last=True):
        reducer.gradient_ready("complex", numbers + mesh.rank)
        reducer.gradient_ready("point", numbers[0, 0])
        for name, shape in shapes.items():
            x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
            reducer.gradient_ready(name, x + mesh.rank)
    for given in (None, mesh_2d, None):
        for name, shape in SHAPES.items():
            got = reducer.shard_dtensor(name, given)
            mean = torch.arange(float(np.prod(shape))).view(shape) + 1.5
            like = distribute_tensor(mean, got.device_mesh, [Replicate(), Shard(0)])
            assert got.placements == like.placements and got.shape == like.shape
            assert got.stride() == like.stride() and got.dtype == torch.float32
            assert torch.equal(got.to_local(), like.to_local()), name
            assert torch.equal(got.full_tensor(), mean), name
    got.to_local().zero_()  # the same memory
    assert not reducer.shard("one").numpy().any()
    assert torch.equal(reducer.shard_dtensor("complex").full_tensor(), numbers + 1.5)
    for scalar in ("scalar", "point"):
        with pytest.raises(hsdp.UsageError, match=f"'{scalar}' to have rows"):
            reducer.shard_dtensor(scalar)
    with pytest.raises(hsdp.UsageError, match="nothing"):
        reducer.shard_dtensor("nothing")
    with pytest.raises(hsdp.UsageError, match="DeviceMesh over ranks"):
        reducer.shard_dtensor("even", mesh_2d["shard"])
    reducer.close()


def test_tensors_without_ranks(tmp_path: pathlib.Path) -> None:
    tensors = {
        "f32": torch.arange(12.0).view(3, 4).t().requires_grad_(),
        "f64": torch.arange(5).double() / 3,
        "f16": torch.ones(2, 2).half(),
        "bf16": torch.full((2, 3, 4, 5), 3.0).bfloat16().to(memory_format=torch.channels_last),
        "scalar": torch.tensor(2.5),
        "negated by a mark": torch._neg_view(torch.ones(3)),
        "numpy": np.ones(3),
    }
    hsdp.write_snapshot(tmp_path / "a.h5", tensors, step=3)
    snapshot = hsdp.read_snapshot(tmp_path / "a.h5")
    for name, x in tensors.items():
        assert snapshot.shape(name) == tuple(x.shape)
        expected = torch.as_tensor(x).double().detach().numpy()
        assert np.array_equal(snapshot.read(name, dtype="f64"), expected)
        assert snapshot.to_torch(name).shape == x.shape


def test_a_dtensor_needs_rows_and_torch_distributed() -> None:
    with hsdp.init_mesh() as mesh:
        flat, rows = hsdp.Reducer(mesh), hsdp.Reducer(mesh, layout="dim0")
        assert (flat.layout, rows.layout) == ("flat", "dim0")
        for reducer in (flat, rows):
            reducer.register("w", (3, 2))
            with reducer.microbatch(last=True):
                reducer.gradient_ready("w", np.ones((3, 2), np.float32))
        with pytest.raises(hsdp.UsageError, match="layout 'dim0', got 'flat'"):
            flat.shard_dtensor("w")
        with pytest.raises(hsdp.UsageError, match="init_process_group"):
            rows.shard_dtensor("w")


@on_ranks(2)
def test_torch_distributed_with_other_ranks(tmp_path: str) -> None:
    start_torch(tmp_path)
    job_rank = dist.get_rank()
    with hsdp.init_mesh(1, 1, ranks=[[job_rank]]) as mesh:
        reducer = hsdp.Reducer(mesh, layout="dim0")
        reducer.register("w", (3, 2))
        with reducer.microbatch(last=True):
            reducer.gradient_ready("w", np.full((3, 2), job_rank, np.float32))
        with pytest.raises(hsdp.UsageError, match=f"rank {job_rank} of 2; start it.*device_mesh"):
            reducer.shard_dtensor("w")
        pairs = init_device_mesh("cpu", (2, 1), mesh_dim_names=("other", "shard"))
        with pytest.raises(hsdp.UsageError, match="DeviceMesh over ranks"):
            reducer.shard_dtensor("w", pairs)
        reducer.close()
    dist.destroy_process_group()
