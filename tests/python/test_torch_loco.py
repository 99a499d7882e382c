"""LocoHop under FSDP2, and its state through torch's distributed checkpoints."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from conftest import Launcher
from fsdp2_model import (
    MICROBATCHES, device_mesh, expected_gradients, fingerprint, loss_of, make_model, squared_error,
    start_torch, whole, whole_gradients,
)

import hsdp
from hsdp.quant import LocoHop


def run(model: Any, handle: Any, step: int, rank: int) -> None:
    model.zero_grad()
    for m in range(MICROBATCHES):
        handle.set_requires_all_reduce(m == MICROBATCHES - 1)
        loss_of(model, step, m, rank).backward()
    handle.finish()


def fsdp2(folder: str) -> dict[str, Any]:
    start_torch(folder)
    shard_mesh = device_mesh(2, 2)["shard"]
    result: dict[str, Any] = {}
    with hsdp.init_mesh(2, 2) as mesh:
        for name, hop in [
            ("plain", LocoHop(error_feedback=False)),
            ("loco", LocoHop(exclude="*bias", plain_dtype="f32", error_every=1)),
        ]:
            model = make_model(shard_mesh)
            handle = hsdp.torch.replica_hook(model, mesh, hop)
            sums: dict[str, Any] = {}
            wanted: dict[str, Any] = {}
            # The same data in every step: what was sent must add up to the gradients.
            for _ in range(12):
                run(model, handle, 0, mesh.rank)
                for key, grad in whole_gradients(model).items():
                    sums[key] = sums.get(key, 0) + grad.double()
            for key, grad in expected_gradients(whole(model), 0, mesh.size).items():
                wanted[key] = 12 * grad
            weights = [key for key in sums if key.endswith("weight")]
            biases = [key for key in sums if key.endswith("bias")]
            for part, keys in [("weights", weights), ("biases", biases)]:
                square = squared_error({k: sums[k] for k in keys}, {k: wanted[k] for k in keys})
                result[f"{name} {part}"] = float(square) ** 0.5
            bits = mesh.replicate_group._handle.exchange(fingerprint(model), "test")
            result[name] = len(set(bits)) == 1 and hop.steps == 12
            result[f"{name} figures"] = sorted(hop.quantization_error())
            handle.close()
    dist.destroy_process_group()
    return result


def test_fsdp2_models(ranks: Launcher, tmp_path: pathlib.Path) -> None:
    for found in ranks.start(4, fsdp2, str(tmp_path)).wait(limit_s=240):
        assert found["plain"] and found["loco"]
        assert found["loco weights"] < found["plain weights"] / 3
        assert found["loco biases"] < 1e-5 < found["plain biases"]
        assert found["loco figures"] and all(name.endswith("weight") for name in found["loco figures"])


def frozen_in_between(folder: str) -> list[bool]:
    """Parameters are frozen in the middle, which changes rows and owners: the errors move along."""
    start_torch(folder)
    shard_mesh = device_mesh(2, 2)["shard"]
    with hsdp.init_mesh(2, 2) as mesh:
        hops = [LocoHop(reset_T=0), LocoHop(reset_T=0)]
        models = [make_model(shard_mesh) for _ in hops]
        handles = [hsdp.torch.replica_hook(m, mesh, h) for m, h in zip(models, hops, strict=True)]
        same = []
        for step in range(6):
            for i, (model, handle) in enumerate(zip(models, handles, strict=True)):
                if i == 1:  # its bias ends a row, so other groups change owners
                    model.last.bias.requires_grad_(step not in (2, 3))
                run(model, handle, step, mesh.rank)
            grads = [
                {name: p.grad.full_tensor() for name, p in model.named_parameters()
                 if p.grad is not None and name != "last.bias"}  # which lacks two steps
                for model in models
            ]
            same.append(all(torch.equal(grads[0][name], g) for name, g in grads[1].items()))
            assert grads[0].keys() == grads[1].keys()
    dist.destroy_process_group()
    return same


def test_errors_move_with_frozen_parameters(ranks: Launcher, tmp_path: pathlib.Path) -> None:
    for same in ranks.start(4, frozen_in_between, str(tmp_path)).wait(limit_s=240):
        assert same == [True] * 6


def save(folder: str, replicate: int, shard: int, resumes: bool) -> list[str]:
    """Three steps and a checkpoint, or a start from one; returns what two more steps give."""
    start_torch(folder)
    shard_mesh = device_mesh(replicate, shard)["shard"]
    with hsdp.init_mesh(replicate, shard) as mesh:
        hop = LocoHop(reset_T=0)
        model = make_model(shard_mesh)
        handle = hsdp.torch.replica_hook(model, mesh, hop)
        # The model is not saved: it is never updated, so the gradients do not depend on it.
        if resumes:
            state = {"hop": hop}
            dcp.load(state, checkpoint_id=f"{folder}/saved")
        else:
            for step in range(3):
                run(model, handle, step, mesh.rank)
            dcp.save({"hop": hop}, checkpoint_id=f"{folder}/saved")
        bits = []
        for step in (3, 4):
            run(model, handle, step, mesh.rank)
            bits.append(fingerprint(model))
        assert hop.steps == 5
    dist.destroy_process_group()
    return bits


def elsewhere(folder: str, replicate: int, shard: int) -> dict[str, float]:
    start_torch(folder)
    shard_mesh = device_mesh(replicate, shard)["shard"]
    with hsdp.init_mesh(replicate, shard) as mesh:
        hop = LocoHop(reset_T=0)
        model = make_model(shard_mesh)
        handle = hsdp.torch.replica_hook(model, mesh, hop)
        reader = dcp.FileSystemReader(f"{folder}/saved")
        metadata = reader.read_metadata()
        with pytest.raises(hsdp.UsageError, match="give the prefix"):
            hop.state_dict_for(metadata)
        state = {"hop": hop.state_dict_for(metadata, prefix="hop.")}
        dcp.load(state, storage_reader=reader)
        hop.load_state_dict(state["hop"])
        loaded = hop.state_dict()
        run(model, handle, 3, mesh.rank)
        assert hop.steps == 4
    dist.destroy_process_group()
    return {key: float(value.double().sum()) for key, value in loaded.items() if "gather" in key}


def test_distributed_checkpoints(ranks: Launcher, tmp_path: pathlib.Path) -> None:
    bits = ranks.start(4, save, str(tmp_path), 2, 2, False).wait(limit_s=240)
    assert ranks.start(4, save, str(tmp_path), 2, 2, True).wait(limit_s=240) == bits
    found = ranks.start(3, elsewhere, str(tmp_path), 3, 1).wait(limit_s=240)
    assert any(value for sums in found for value in sums.values())
