"""What a Reducer gives of a step to somebody with an attached torch model."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

import hsdp


@pytest.fixture
def mesh() -> Iterator[hsdp.Mesh]:
    with hsdp.init_mesh() as mesh:
        yield mesh


def attached(mesh: hsdp.Mesh) -> tuple[nn.Linear, hsdp.Reducer]:
    model = nn.Linear(3, 2)
    reducer = hsdp.Reducer(mesh)
    reducer.register("other", 4)
    reducer.attach(model)
    return model, reducer


def give(reducer: hsdp.Reducer, model: nn.Linear, value: float, **how: bool) -> None:
    """Gradients of that value everywhere."""
    with reducer.microbatch(**how):
        (value * (model.weight.sum() + model.bias.sum())).backward()
        reducer.gradient_ready("other", np.full(4, value, np.float32))


def test_shards_are_tensors(mesh: hsdp.Mesh) -> None:
    model, reducer = attached(mesh)
    give(reducer, model, 3.0, last=True)
    shard = reducer.shard("weight")
    assert type(shard) is torch.Tensor and shard.dtype is torch.float32
    assert shard.tolist() == [3.0] * 6 and not shard.requires_grad
    assert shard.data_ptr() == hsdp.Array(reducer._handle.shard("weight")).data_ptr
    shard[0] = 5  # a view
    assert reducer.shard("weight")[0] == 5
    other = reducer.shard("other")
    assert type(other) is hsdp.Array and other.numpy().tolist() == [3.0] * 4
    address = shard.data_ptr()
    give(reducer, model, 4.0, last=True)
    assert shard.tolist() == [4.0] * 6 and reducer.shard("weight").data_ptr() == address
    reducer.close()
    mesh.close()
    assert shard.tolist() == [4.0] * 6


def test_partials_and_local_sums_are_tensors(mesh: hsdp.Mesh) -> None:
    model, reducer = attached(mesh)
    give(reducer, model, 2.0, last=False)
    partial = reducer.partial_shard("bias")
    assert type(partial) is torch.Tensor and partial.tolist() == [2.0] * 2
    assert type(reducer.partial_shard("other")) is hsdp.Array
    partial[:] = 9  # a copy
    assert reducer.partial_shard("bias").tolist() == [2.0] * 2
    reducer.discard()
    for accumulate in ("buffer", "grad"):
        with hsdp.zero.coalesce_grad_reduction(reducer, last=True, accumulate=accumulate):
            give(reducer, model, 2.0)
            local = reducer.local_sum("weight")
            assert type(local) is torch.Tensor and local.tolist() == [[2.0] * 3] * 2
            if accumulate == "buffer":
                assert type(reducer.local_sum("other")) is hsdp.Array
    with pytest.raises(hsdp.UsageError, match="'unknown'"):
        reducer.shard("unknown")


def test_norms_are_tensors_of_no_dimensions(mesh: hsdp.Mesh) -> None:
    model, reducer = attached(mesh)
    give(reducer, model, 2.0, last=True)
    norms = [reducer.grad_norm(), reducer.clip_grad_norm_(1e6), hsdp.clip_grad_norm_([reducer], 1e6)]
    for norm in norms:
        assert type(norm) is torch.Tensor and norm.shape == () and norm.item() == 48**0.5
    plain = hsdp.Reducer(mesh)
    plain.register("w", 4)
    with plain.microbatch(last=True):
        plain.gradient_ready("w", np.full(4, 2, np.float32))
    for norm in (plain.grad_norm(), plain.clip_grad_norm_(1e6), hsdp.clip_grad_norm_([plain], 1e6)):
        assert type(norm) is float and norm == 4
    assert hsdp.clip_grad_norm_([plain, reducer], 1e6).shape == ()  # one of them has a model


def test_gathered_gradients_use_their_memory_again(mesh: hsdp.Mesh) -> None:
    model, reducer = attached(mesh)
    addresses = []
    for step in range(4):
        give(reducer, model, float(step), last=True)
        reducer.gather_gradients()
        assert model.weight.grad is not None and model.bias.grad is not None
        assert (model.weight.grad == step).all() and (model.bias.grad == step).all()
        addresses.append((model.weight.grad.data_ptr(), model.bias.grad.data_ptr()))
        if step == 2:
            model.zero_grad()
    assert len(set(addresses)) == 1
    reducer.gather_gradients()  # again in the step, while p.grad has the last one's
    assert (model.weight.grad == 3).all()


def test_channels_last_gradients_do_too(mesh: hsdp.Mesh) -> None:
    model = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
    reducer = hsdp.Reducer(mesh)
    reducer.attach(model)
    addresses = set()
    for step in range(3):
        with reducer.microbatch(last=True):
            (step * model.weight.sum() + model.bias.sum()).backward()
        reducer.gather_gradients()
        assert model.weight.grad.stride() == model.weight.stride()
        assert (model.weight.grad == step).all()
        addresses.add(model.weight.grad.data_ptr())
    assert len(addresses) == 1


@pytest.mark.parametrize("keep", [
    lambda grad: grad, lambda grad: grad.view(-1), lambda grad: grad.detach(),
    lambda grad: grad.numpy(), lambda grad: grad.untyped_storage(), lambda grad: np.from_dlpack(grad),
])
def test_a_gradient_that_somebody_keeps_stays_as_it_is(mesh: hsdp.Mesh, keep: object) -> None:
    assert callable(keep)
    model, reducer = attached(mesh)

    def step(value: float) -> None:
        give(reducer, model, value, last=True)
        reducer.gather_gradients()
        assert (model.weight.grad == value).all()

    step(1.0)
    kept = keep(model.weight.grad)
    step(2.0)
    step(3.0)
    if isinstance(kept, torch.UntypedStorage):
        kept = torch.tensor([], dtype=torch.float32).set_(kept)
    assert (np.asarray(kept) == 1).all() and np.asarray(kept).size == 6


def test_a_parameter_that_changes_gets_a_gradient_that_fits(mesh: hsdp.Mesh) -> None:
    model, reducer = attached(mesh)
    give(reducer, model, 1.0, last=True)
    reducer.gather_gradients()
    first = model.weight.grad
    model.weight.data = model.weight.data.t().contiguous().t()  # other strides
    give(reducer, model, 2.0, last=True)
    reducer.gather_gradients()
    assert model.weight.grad.stride() == model.weight.stride()
    assert (model.weight.grad == 2).all() and (first == 1).all()


def test_the_memory_can_be_freed(mesh: hsdp.Mesh) -> None:
    model, reducer = attached(mesh)
    give(reducer, model, 1.0, last=True)
    reducer.gather_gradients()
    storage = weakref.ref(model.weight.grad.untyped_storage())
    model.zero_grad()
    gc.collect()
    before = StorageWatch(reducer)
    reducer.release_memory()
    assert before.count() == 0 and storage() is None


class StorageWatch:
    """How many gathered gradients a Reducer keeps."""

    def __init__(self, reducer: hsdp.Reducer) -> None:
        self.gathered = reducer._attachments[0]._gathered_gradients  # type: ignore[attr-defined]
        assert self.count() == 2

    def count(self) -> int:
        return len(self.gathered._kept)
