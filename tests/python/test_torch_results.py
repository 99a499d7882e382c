"""A step's results for users with an attached torch model: tensors, and what happens on a GPU, with tensors
and streams that only look like CUDA's.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import on_mesh
from one_rank import add_gradient, attached_to, mesh, registered
from same_tensors import max_difference, parameters_of, require_same
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import hsdp
from hsdp.current_stream import CurrentStream
from hsdp.framework import current_device
from hsdp.torch import private_torch
from hsdp.torch.attach.gradient_hook import Refusal, keeping_hook, python_way
from hsdp.torch.attach.trainable_parameters import _require_usable


def attached(mesh: hsdp.Mesh) -> tuple[nn.Linear, hsdp.Reducer]:
    model = nn.Linear(3, 2)
    reducer = registered(mesh, "other", 4)
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
    plain = registered(mesh, "w", 4)
    add_gradient(plain, "w", np.full(4, 2, np.float32), last=True)
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
    reducer.gather_gradients()  # again in the next step, while p.grad still has the last one's
    assert (model.weight.grad == 3).all()


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
    storage = StorageWeakRef(model.weight.grad.untyped_storage())
    model.zero_grad()
    assert not storage.expired()  # for the next step
    reducer.release_memory()
    assert storage.expired()


# As with DDP's find_unused_parameters: a parameter that no rank used gets no gradient, and an optimizer skips
# it.
@on_mesh(2, 2)
def test_parameters_that_no_rank_uses_do_not_move(mesh: hsdp.Mesh) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({k: nn.Linear(4, 4) for k in ("all", "one", "none")})
    reference = copy.deepcopy(model)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(5))
    reducer = attached_to(model, mesh, missing="zero")
    options = {"lr": 0.125, "weight_decay": 0.5}
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    other = torch.optim.AdamW(reference.parameters(), **options)
    sharded_model = copy.deepcopy(reference)
    sharded_reducer = attached_to(sharded_model, mesh, missing="zero")
    sharded = hsdp.zero.ShardedOptimizer(
        torch.optim.AdamW, sharded_model, sharded_reducer, max_grad_norm=1e9, **options
    )

    def loss(of: nn.ModuleDict, use_one: bool) -> torch.Tensor:
        y = of["all"](x)
        return (y + of["one"](x) if use_one else y).square().sum()

    # "one" is used on rank 2 only, and in the second step on no rank.
    none, one = ([f"{name}.weight", f"{name}.bias"] for name in ("none", "one"))
    for step in range(3):
        for its in (reducer, sharded_reducer):
            of = model if its is reducer else sharded_model
            with its.microbatch(last=True):
                loss(of, step != 1 and mesh.rank == 2).backward()
        reducer.gather_gradients()
        reducer.clip_grad_norm_(1e9)
        without = [name for name, p in model.named_parameters() if p.grad is None]
        assert without == (none if step != 1 else [*one, *none])
        optimizer.step()
        sharded.step()
        other.zero_grad()
        rest = 3 if step != 1 else 4
        (loss(reference, False) * (rest / 4)).backward()
        if step != 1:
            (loss(reference, True) / 4).backward()
        other.step()
    sharded.wait_parameters()
    for of in (model, sharded_model):
        assert max_difference(parameters_of(of), parameters_of(reference)) < 2e-6
    require_same(parameters_of(model["none"]), parameters_of(reference["none"]))


# On a GPU.

GPU = torch.device("cuda", 0)
SHAPE = torch.Size([4, 4])


class Handle:
    """A Reducer that records its calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def gradient_of(self, *arguments: Any) -> None:
        self.calls.append(arguments)

    def reject_gradient(self, message: str) -> None:
        self.calls.append(message)


def cuda_weight() -> Any:
    """A parameter there, as far as a hook can tell."""
    return SimpleNamespace(
        dtype=torch.bfloat16, device=GPU, is_cpu=False, shape=SHAPE, grad=None
    )


def cuda_gradient(**changes: Any) -> Any:
    """A CUDA tensor, as far as a hook can tell."""
    fields = {
        "layout": torch.strided, "dtype": torch.bfloat16, "device": GPU, "is_cpu": False, "is_complex": lambda: False,
        "shape": SHAPE, "is_neg": lambda: False, "is_contiguous": lambda: False, "stride": lambda: (1, 4), "data_ptr": lambda: 4096,
    }
    return SimpleNamespace(**(fields | changes))


def test_a_gradient_goes_over_by_address() -> None:
    handle = Handle()
    parameter = cuda_weight()
    refusal = Refusal(handle, "", "w", parameter)  # type: ignore[arg-type]
    take = python_way(handle, 3, parameter, refusal)  # type: ignore[arg-type]
    parameter.grad = grad = cuda_gradient()
    take(parameter)
    assert parameter.grad is None
    assert handle.calls == [(3, 4096, (1, 4), grad)]


def test_a_gradient_that_does_not_fit_is_refused() -> None:
    handle = Handle()
    parameter = cuda_weight()
    parameter.grad = cuda_gradient(dtype=torch.float32)
    fresh: dict[str, torch.Tensor] = {}
    refusal = Refusal(handle, "", "w", parameter)  # type: ignore[arg-type]
    hook = keeping_hook(python_way(handle, 0, parameter, refusal), "w", fresh)  # type: ignore[arg-type]
    message = "reducer: gradient of 'w': expected bfloat16, got float32"
    with pytest.raises(hsdp.UsageError, match=message):
        hook(parameter)
    assert len(handle.calls) == 1 and handle.calls[0].startswith(message)
    assert not fresh


def test_the_stream_is_torchs_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    current = CurrentStream("cuda:3")
    assert current() == 0  # torch has not used a GPU yet
    used: list[Any] = []

    def current_stream(device: int) -> Any:
        used.append(device)
        return SimpleNamespace(cuda_stream=77)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    monkeypatch.setattr(private_torch, "current_raw_stream", None)  # only a CUDA build of torch has it
    assert current() == 77
    assert used == [3]
    current.set(5)
    assert current() == 5
    current.set(lambda: SimpleNamespace(ptr=6))
    assert current() == 6
    current.set(None)
    assert current() == 77


def test_cuda_is_torchs_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert current_device() == "cuda:0"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert current_device() == "cuda:2"


def test_a_model_on_another_gpu_is_refused() -> None:
    parameter: Any = SimpleNamespace(
        layout=torch.strided, dtype=torch.float32, device=torch.device("cuda", 1), is_meta=False,
        is_conj=lambda: False, is_neg=lambda: False,
    )
    _require_usable("w", parameter, "cuda:1")
    message = "attach: expected 'w' on the mesh's device, cuda:0, got cuda:1; move the model"
    with pytest.raises(hsdp.UsageError, match=message):
        _require_usable("w", parameter, "cuda:0")


def test_found_inf_is_a_tensor(mesh: hsdp.Mesh) -> None:
    reducer = registered(mesh, "w", (3,))
    for value, want in [(1.0, 0.0), (float("inf"), 1.0), (2.0, 0.0)]:
        add_gradient(reducer, "w", torch.full((3,), value), last=True)
        found = reducer.found_inf_tensor()
        assert found.shape == () and found.dtype == torch.float32 and found.item() == want
        out = torch.full((1,), -1.0)
        assert reducer.found_inf_tensor(out) is out and out.item() == want
    with pytest.raises(hsdp.UsageError, match="expected an output of 1 f32 on cpu, got 2 f32"):
        reducer.found_inf_tensor(torch.zeros(2))
    with pytest.raises(hsdp.UsageError, match="1 f32 on cpu, got 1 f64"):
        reducer.found_inf_tensor(torch.zeros(1, dtype=torch.float64))
    reducer.close()


def test_torch_profiler_shows_the_calls(mesh: hsdp.Mesh) -> None:
    model = nn.Linear(3, 2)
    reducer = attached_to(model, mesh)
    optimizer = hsdp.zero.ShardedOptimizer(torch.optim.SGD, model, reducer, lr=0.1)

    def step() -> None:
        with reducer.microbatch(last=True):
            model(torch.ones(1, 3)).sum().backward()
        reducer.clip_grad_norm_(1.0)
        optimizer.step()

    with torch.profiler.profile() as profile:
        step()
    names = [event.name for event in profile.events() if event.name.startswith("hsdp:")]
    calls = ["begin_microbatch", "end_microbatch", "clip_grad_norm", "update", "gather_wait"]
    assert names == [f"hsdp:{call}" for call in calls]
    assert 0 < reducer.stats().update_s < 60
    step()  # as before, without a stream
    reducer.close()
