"""A model keeps the Reducers that it is attached to; objects made from it have none. No model is attached and
in DistributedDataParallel at the same time.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import os
import pathlib
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Launcher, on_mesh
from one_rank import attached_to, mesh
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hsdp
from hsdp.torch.guards import ddp_guard


class Model(nn.Sequential):
    """Has another method that calls it."""

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """The same as forward."""
        return self.forward(x)


def attached(mesh: hsdp.Mesh, **options: Any) -> nn.Module:
    """Only the model outlives this function."""
    torch.manual_seed(1)
    model = Model(nn.Linear(3, 2), nn.BatchNorm1d(2))
    hsdp.Reducer(mesh).attach(model, **options)
    gc.collect()
    return model


def backward(model: nn.Module) -> None:
    model(torch.arange(12.0).reshape(4, 3)).square().sum().backward()


@pytest.mark.parametrize("keep_grads", [False, True])
def test_a_model_keeps_its_reducer(mesh: hsdp.Mesh, keep_grads: bool) -> None:
    model = attached(mesh, keep_grads=keep_grads)
    with pytest.raises(hsdp.UsageError, match="begin_microbatch"):
        backward(model)
    (reducer,) = hsdp.torch.reducers_of(model)
    model.zero_grad()
    with reducer.microbatch(last=True):
        backward(model)
    with pytest.raises(hsdp.UsageError, match=r"attached once.*hsdp.torch.reducers_of\(model\)"):
        hsdp.Reducer(mesh).attach(model)
    reducer.close()
    assert hsdp.torch.reducers_of(model) == []
    backward(model)
    assert model[0].weight.grad is not None
    hsdp.Reducer(mesh).attach(model)


def test_the_models_in_a_dictionary_keep_their_reducer(mesh: hsdp.Mesh) -> None:
    first, second, other = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2)
    reducer = attached_to(nn.ModuleDict({"a": first, "b": nn.ModuleList([second])}), mesh)
    reducer.attach(other)
    alive = weakref.ref(reducer)
    del reducer
    gc.collect()
    for model in (first, second, other):
        assert hsdp.torch.reducers_of(model) == [alive()]
        with pytest.raises(hsdp.UsageError, match="begin_microbatch"):
            backward(model)
    del model, first, second
    gc.collect()
    assert hsdp.torch.reducers_of(other) == [alive()]
    del other
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("how", ["deepcopy", "save"])
def test_copies_have_no_reducer(mesh: hsdp.Mesh, how: str) -> None:
    model = attached(mesh)
    model.reducer = hsdp.torch.reducers_of(model)[0]
    plain = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    assert list(model.state_dict()) == list(plain.state_dict())
    if how == "deepcopy":
        other = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        assert b"hsdp." not in file.getvalue()  # loading it does not need the package either
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert other.reducer is None
    assert hsdp.torch.reducers_of(other) == [] and len(hsdp.torch.reducers_of(model)) == 1
    backward(other)
    assert all(p.grad is not None for p in other.parameters())
    other.zero_grad()
    reducer = attached_to(other, mesh)
    again = copy.deepcopy(other)
    with reducer.microbatch(last=True):
        backward(other)
    backward(again)
    for p, q in zip(other.parameters(), again.parameters(), strict=True):
        assert q.grad is not None and p.grad is None


def train(mesh: hsdp.Mesh, kind: str, closes: bool) -> tuple[list[weakref.ref[Any]], nn.Parameter]:
    """Returns objects that must be gone afterwards, and a parameter that outlives them."""
    model: Any = attached(mesh, keep_grads=kind == "keep_grads")
    (reducer,) = hsdp.torch.reducers_of(model)
    of_all = [model, reducer, model[0].weight]
    scaler = hsdp.torch.GradScaler(reducer, device="cpu", init_scale=1.0)
    if kind.startswith("stage"):
        optimizer: Any = hsdp.zero.ShardedOptimizer(
            torch.optim.AdamW, model, reducer, stage=int(kind[-1]), persistence_threshold=0, max_grad_norm=1.0
        )
        of_all.append(optimizer)
        if kind == "stage 3":
            optimizer.register_forward_method(model, "compute")
    for _ in range(2):
        with hsdp.zero.coalesce_grad_reduction(reducer) if kind == "window" else contextlib.nullcontext():
            for m in range(2):
                with reducer.microbatch(last=m == 1):
                    scaler.scale(model(torch.arange(12.0).reshape(4, 3)).square().sum()).backward()
        if kind.startswith("stage"):
            scaler.step(optimizer)
            scaler.update()
            with optimizer.whole_parameters() as whole:
                assert whole["0.bias"].shape == (2,)
            assert optimizer.full_model_state_dict(model)["0.bias"].shape == (2,)
        elif kind != "keep_grads":
            reducer.gather_gradients()
        model.zero_grad()
    if closes:
        if kind.startswith("stage"):
            optimizer.close()
        reducer.close()
    return [weakref.ref(one) for one in of_all], model[0].bias


@on_mesh(1, 2)
def test_nothing_waits_for_a_garbage_collection(mesh: hsdp.Mesh) -> None:
    for kind in ("gathered", "keep_grads", "window", "stage 1", "stage 2", "stage 3"):
        for closes in (False, True):
            gc.collect()
            gc.disable()
            try:
                alive, bias = train(mesh, kind, closes)
                assert [one() for one in alive] == [None] * len(alive), (kind, closes)
            finally:
                gc.enable()
            if kind != "stage 3" or closes:  # otherwise its values are gone with its optimizer
                bias.sum().backward()  # no hook is left on the parameters that outlive them
                assert bias.grad is not None


def test_an_optimizer_in_its_own_model_is_collected(mesh: hsdp.Mesh) -> None:
    model: Any = attached(mesh)
    (reducer,) = hsdp.torch.reducers_of(model)
    model.optimizer = hsdp.zero.ShardedOptimizer(torch.optim.SGD, model, reducer, stage=3, lr=0.1)
    model.optimizer.close()
    reducer.close()
    alive = weakref.ref(model)
    del model, reducer
    gc.collect()
    assert alive() is None


def test_what_was_attached_in_a_wrapper_outlives_it(mesh: hsdp.Mesh) -> None:
    """Made only for attach, and yet later calls look into it."""
    model: Any = nn.Linear(3, 2)
    for wrapper, name in ((nn.ModuleDict({"a": nn.ModuleList([model])}), r"a\.0\.late"),
                          (nn.Sequential(nn.Sequential(model)), r"0\.0\.late")):
        reducer = attached_to(wrapper, mesh)
        del wrapper
        model.late = nn.Parameter(torch.zeros(2))
        with pytest.raises(hsdp.UsageError, match=f"got '{name}', which came"):
            reducer.begin_microbatch()
        del model.late
        reducer.close()
    reducer = attached_to(nn.Sequential(model), mesh)
    with pytest.raises(hsdp.UsageError, match="got none: the Sequential is gone"):
        hsdp.zero.ShardedOptimizer(torch.optim.SGD, model.parameters(), reducer, lr=1.0)


def run_collection(collected: str) -> float:
    """Rank 0 drops its model while rank 1 is idle."""
    with hsdp.init_mesh(1, 2) as mesh:
        torch.manual_seed(0)
        model: Any = nn.Linear(3, 2)
        reducer: Any = hsdp.Reducer(mesh)
        reducer.attach(model)
        with reducer.microbatch(last=True):
            backward(model)
        reducer.gather_gradients()
        mesh.world.barrier()
        took = 0.0
        if mesh.rank == 0:
            alive = weakref.ref(reducer)
            begun = time.monotonic()
            del model, reducer
            gc.collect()
            took = time.monotonic() - begun
            assert alive() is None
        with open(collected, "r" if mesh.rank == 1 else "w"):  # one rank waits for the other
            pass
        mesh.world.barrier()
        return took


def test_collecting_waits_for_nobody(ranks: Launcher, tmp_path: pathlib.Path) -> None:
    os.mkfifo(tmp_path / "collected")
    assert ranks(2, run_collection, str(tmp_path / "collected"))[0] < 1.5


# Only one thing may reduce a model's gradients: a Reducer or DistributedDataParallel.


@pytest.fixture(scope="module")
def ddp() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DistributedDataParallel
    dist.destroy_process_group()


def make_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def require_refused(model: nn.Module, name: str) -> None:
    message = f"'{name}' both attached and in one.*call the model that it wraps.*reducer.close"
    for _ in range(2):
        with pytest.raises(hsdp.UsageError, match=message):
            model(torch.ones(2, 3))


@pytest.mark.parametrize("first", ["wrapper", "reducer"])
def test_the_wrapped_model_is_attached(mesh: hsdp.Mesh, ddp: Any, first: str) -> None:
    model = make_model()
    reducer = hsdp.Reducer(mesh)
    if first == "wrapper":
        wrapper = ddp(model)
        wrapper(torch.ones(2, 3)).sum().backward()
        model.zero_grad()
        reducer.attach(model)
    else:
        reducer.attach(model)
        wrapper = ddp(model)
    require_refused(wrapper, "0.weight")
    with reducer.microbatch(last=True):
        model(torch.ones(2, 3)).sum().backward()
    reducer.close()
    wrapper(torch.ones(2, 3)).sum().backward()
    assert model[0].weight.grad is not None


def test_a_module_within_is_wrapped(mesh: hsdp.Mesh, ddp: Any) -> None:
    model = make_model()
    reducer = attached_to(model, mesh)
    model[1] = ddp(model[1])
    require_refused(model, "weight")


def test_what_it_ignores_may_be_attached(mesh: hsdp.Mesh, ddp: Any) -> None:
    model = make_model()
    ddp._set_params_and_buffers_to_ignore_for_model(model, ["0.weight", "0.bias"])
    wrapper = ddp(model)
    reducer = attached_to(model[0], mesh)
    with reducer.microbatch(last=True):
        wrapper(torch.ones(2, 3)).sum().backward()
    assert model[0].weight.grad is None and model[1].weight.grad is not None


def test_others_are_looked_at_once(mesh: hsdp.Mesh, ddp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = ddp(make_model())
    looked = []
    require = ddp_guard._require_unattached
    monkeypatch.setattr(
        ddp_guard, "_require_unattached", lambda *args: (looked.append(1), require(*args))
    )
    hsdp.Reducer(mesh).attach(make_model())
    for _ in range(3):
        wrapper(torch.ones(2, 3)).sum().backward()
    assert len(looked) == 1
    other = make_model()
    hsdp.Reducer(mesh).attach(other)
    for _ in range(3):
        wrapper(torch.ones(2, 3))
    assert len(looked) == 2


def test_a_compiled_wrapper_runs(mesh: hsdp.Mesh, ddp: Any) -> None:
    hsdp.Reducer(mesh).attach(make_model())
    wrapper = ddp(make_model())
    want = wrapper(torch.ones(2, 3))
    assert torch.equal(torch.compile(wrapper, backend="eager")(torch.ones(2, 3)), want)
