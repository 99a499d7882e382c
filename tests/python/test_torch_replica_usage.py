"""Misuse of the replica hook: each case is an error on every rank that says what to do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import on_ranks
from fsdp2_model import TwoParts, device_mesh, start_torch, x_of
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard

import hsdp

# : whether an FSDPModule can continue after an exception; in older releases of torch none can
GOES_ON = hasattr(FSDPModule, "reset_iter_state")


@contextlib.contextmanager
def hooked(shard_mesh: Any, module: nn.Module) -> Iterator[tuple[Any, Any, int]]:
    """On two replicas: the model, its hook's handle and the rank."""
    with hsdp.init_mesh(2, 1) as mesh:
        model: Any = fully_shard(module, mesh=shard_mesh)
        with contextlib.closing(hsdp.torch.replica_hook(model, mesh)) as handle:
            yield model, handle, mesh.rank


def refused(message: str, *arguments: Any) -> None:
    with pytest.raises(hsdp.UsageError, match=message):
        hsdp.torch.replica_hook(*arguments)


@on_ranks(2)
def test_wrong_use_is_refused(tmp_path: str) -> None:
    start_torch(tmp_path)
    mesh_2d, flat = device_mesh(1, 2), device_mesh(2, 1)
    with hsdp.init_mesh(1, 2) as mesh:
        refused("fully_shard.*a Linear without.*reducer.attach", nn.Linear(2, 2), mesh)
        refused("2-D mesh .1, 2.*dp_shard", fully_shard(nn.Linear(2, 2), mesh=mesh_2d), mesh)
        good = fully_shard(nn.Linear(2, 2), mesh=mesh_2d["shard"])
        refused(r"hop: expected.*got.*str.*PlainHop", good, mesh, "bf16")
        with pytest.raises(hsdp.UsageError, match="verify_every: expected a whole number, got 0.5"):
            hsdp.torch.replica_hook(good, mesh, verify_every=0.5)  # type: ignore[arg-type]
        with pytest.raises(hsdp.UsageError, match="verify_every of at least 1, or 0 for no step, got -1"):
            hsdp.torch.replica_hook(good, mesh, verify_every=-1)
        refused("^replica_hook: mesh: expected an hsdp.Mesh.*the model comes first", good, "mesh")
        alone = fully_shard(nn.Linear(2, 2), mesh=flat["shard"])
        refused(r"ranks \[0, 1\].*got ranks \[[01]\].*init_device_mesh", alone, mesh)
        refused("got torch.float64.*MixedPrecision",
                fully_shard(nn.Linear(2, 2).double(), mesh=mesh_2d["shard"]), mesh)
        if hasattr(torch.Tensor, "grad_dtype"):
            wider = fully_shard(nn.Linear(2, 2, dtype=torch.bfloat16), mesh=mesh_2d["shard"])
            for parameter in wider.parameters():
                parameter.grad_dtype = torch.float32
            refused("torch.bfloat16, got grad_dtype torch.float32; leave grad_dtype", wider, mesh)
        handle = hsdp.torch.replica_hook(good, mesh)
        refused("root module without.*hook.*close", good, mesh)
        handle.close()
        handle.close()
        for use in (lambda: handle.set_requires_all_reduce(True), handle.finish, handle.discard):
            with pytest.raises(hsdp.UsageError, match="closed.*replica_hook"):
                use()
        hsdp.torch.replica_hook(good, mesh).close()
        other = fully_shard(nn.Linear(2, 2 + mesh.rank), mesh=mesh_2d["shard"])
        with pytest.raises(hsdp.MismatchError, match="same.*on every rank"):
            hsdp.torch.replica_hook(other, mesh)
        with pytest.raises(hsdp.MismatchError, match="the hop.*plain.*(bf16|f32)"):
            hsdp.torch.replica_hook(good, mesh, hsdp.PlainHop(("f32", "bf16")[mesh.rank]))
        refused("one-dimensional DeviceMesh of 1 of 2 ranks", alone, flat["shard"])
        use_parts(mesh, mesh_2d["shard"])
        check_hops(mesh)
        refuse_other_wrappers(mesh)
        with hsdp.torch.mesh_from_torch(mesh_2d) as known:
            assert hsdp.torch.mesh_from_torch(mesh_2d) is known
            with pytest.raises(hsdp.UsageError, match="options.*got.*5.0.*close"):
                hsdp.torch.mesh_from_torch(mesh_2d, timeout_s=5.0)
    if GOES_ON:
        end_differently(flat["shard"])
        refuse_to_finish(flat["shard"])
    step_too_early(flat["shard"])
    dist.destroy_process_group()


def use_parts(mesh: hsdp.Mesh, shard_mesh: Any) -> None:
    """A backward that leaves some parameters of an FSDPModule unused."""
    model: Any = fully_shard(TwoParts(), mesh=shard_mesh)
    handle = hsdp.torch.replica_hook(model, mesh)
    handle.set_requires_all_reduce(False)
    model(x_of(0, 0), False).sum().backward()
    with pytest.raises(hsdp.UsageError, match="root module.*set_reduce_scatter_unused_params"):
        model(x_of(0, 0), True).sum().backward()
    if not GOES_ON:
        return
    model.reset_iter_state()
    model.set_reduce_scatter_unused_params(True)
    handle.set_requires_all_reduce(True)
    model(x_of(0, 0), True).sum().backward()
    handle.finish()
    assert model.late.bias.grad.full_tensor().tolist() == [2.0] * 5
    assert model.early.bias.grad.full_tensor().tolist() == [4.0] * 5


def check_hops(mesh: hsdp.Mesh) -> None:
    assert [hsdp.PlainHop(d).dtype for d in ("f32", "bf16", "f16", None)] == [
        "f32", "bf16", "f16", None
    ]
    assert hsdp.PlainHop("float16").describe() == "plain" and hsdp.PlainHop().dtype is None
    with pytest.raises(hsdp.UsageError, match="'f32', 'bf16' or 'f16', got 'f64'"):
        hsdp.PlainHop("f64")
    with pytest.raises(hsdp.UsageError, match="replica_dtype: expected bf16.*got f16"):
        hsdp.Reducer(mesh, replica_dtype="f16", replica_hop=hsdp.PlainHop("bf16"))


def refuse_other_wrappers(mesh: hsdp.Mesh) -> None:
    wrapped = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))
    with pytest.raises(hsdp.UsageError, match="FullyShardedDataParallel.*attach the model.*wraps"):
        hsdp.Reducer(mesh).attach(wrapped)


def end_differently(shard_mesh: Any) -> None:
    """Ranks disagree on which backward is the last, or on whether to finish: all are told, and the next step
    is right."""
    with hooked(shard_mesh, nn.Linear(2, 2)) as (model, handle, rank):

        def backward(last: bool) -> None:
            handle.set_requires_all_reduce(last)
            model(torch.full((2, 2), 1.0 + rank)).sum().backward()

        for last_by_rank in ((True, False), (False, True)):
            message = "expected call '(finish|backward)' on every rank, got '(finish|backward)'"
            with pytest.raises(hsdp.MismatchError, match=message):
                backward(last_by_rank[rank])
                handle.finish()
            handle.discard()
            model.reset_iter_state()
            model.zero_grad()
            backward(False)
            backward(True)
            handle.finish()
            assert model.weight.grad.full_tensor().tolist() == [[6.0, 6.0]] * 2
            model.zero_grad()


def refuse_to_finish(shard_mesh: Any) -> None:
    """A step that one rank cannot finish is dropped on all ranks."""
    with hooked(shard_mesh, nn.Linear(2, 2)) as (model, handle, rank):
        handle.set_requires_all_reduce(False)
        model(torch.ones(2, 2)).sum().backward()
        if rank == 1:
            model.set_gradient_divide_factor(3.0)
        error = (hsdp.StepAbortedError, hsdp.UsageError)[rank]
        who = ("was dropped by rank 1 of 2.*", "")[rank]
        with pytest.raises(error, match=who + "divide factor None of the step.*, got 3.0"):
            handle.finish()
        assert handle.carry_bytes == 0
        model.set_gradient_divide_factor(2.0)
        model.reset_iter_state()
        model.zero_grad()
        handle.set_requires_all_reduce(True)
        model(torch.ones(2, 2)).sum().backward()
        handle.finish()
        assert model.weight.grad.full_tensor().tolist() == [[1.0, 1.0]] * 2


def step_too_early(shard_mesh: Any) -> None:
    """An optimizer that would find FSDP2's zeros instead of gradients."""
    linear = nn.Linear(2, 2)
    nn.init.zeros_(linear.bias)
    with hooked(shard_mesh, linear) as (model, handle, _):
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        handle.set_requires_all_reduce(False)
        model(torch.ones(2, 2)).sum().backward()
        with pytest.raises(hsdp.UsageError, match="SGD.step.*root module.*handle.finish"):
            optimizer.step()
        parameters = list(model.parameters())
        for given in (parameters, iter(parameters), parameters[0]):
            with pytest.raises(hsdp.UsageError, match="clip_grad_norm_.*root.*handle.finish"):
                torch.nn.utils.clip_grad_norm_(given, 1.0)
        with pytest.raises(hsdp.UsageError, match="clip_grad_value_.*root.*handle.finish"):
            torch.nn.utils.clip_grad_value_(parameters, 1.0)
        handle.finish()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 100.0)
        assert norm.full_tensor() == pytest.approx(24.0**0.5)
        optimizer.step()
        assert model.bias.full_tensor().tolist() == [-2.0, -2.0]
