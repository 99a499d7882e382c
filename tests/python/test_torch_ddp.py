"""A model has one who reduces its gradients: a Reducer or DistributedDataParallel. One rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hsdp
from hsdp.torch import ddp_guard


@pytest.fixture(scope="module", autouse=True)
def gloo() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def mesh() -> Iterator[hsdp.Mesh]:
    with hsdp.init_mesh() as mesh:
        yield mesh


def make_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def require_refused(model: nn.Module, name: str) -> None:
    message = f"'{name}' both attached and in one.*call the model that it wraps.*reducer.close"
    for _ in range(2):
        with pytest.raises(hsdp.UsageError, match=message):
            model(torch.ones(2, 3))


@pytest.mark.parametrize("first", ["wrapper", "reducer"])
def test_the_wrapped_model_is_attached(mesh: hsdp.Mesh, first: str) -> None:
    model = make_model()
    reducer = hsdp.Reducer(mesh)
    if first == "wrapper":
        wrapper = DistributedDataParallel(model)
        wrapper(torch.ones(2, 3)).sum().backward()
        model.zero_grad()
        reducer.attach(model)
    else:
        reducer.attach(model)
        wrapper = DistributedDataParallel(model)
    require_refused(wrapper, "0.weight")
    with reducer.microbatch(last=True):
        model(torch.ones(2, 3)).sum().backward()
    reducer.close()
    wrapper(torch.ones(2, 3)).sum().backward()
    assert model[0].weight.grad is not None


def test_a_module_within_is_wrapped(mesh: hsdp.Mesh) -> None:
    model = make_model()
    reducer = hsdp.Reducer(mesh)
    reducer.attach(model)
    model[1] = DistributedDataParallel(model[1])
    require_refused(model, "weight")


def test_what_it_ignores_may_be_attached(mesh: hsdp.Mesh) -> None:
    model = make_model()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        model, ["0.weight", "0.bias"]
    )
    wrapper = DistributedDataParallel(model)
    reducer = hsdp.Reducer(mesh)
    reducer.attach(model[0])
    with reducer.microbatch(last=True):
        wrapper(torch.ones(2, 3)).sum().backward()
    assert model[0].weight.grad is None and model[1].weight.grad is not None


def test_others_are_looked_at_once(mesh: hsdp.Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = DistributedDataParallel(make_model())
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


def test_a_compiled_wrapper_runs(mesh: hsdp.Mesh) -> None:
    hsdp.Reducer(mesh).attach(make_model())
    wrapper = DistributedDataParallel(make_model())
    want = wrapper(torch.ones(2, 3))
    assert torch.equal(torch.compile(wrapper, backend="eager")(torch.ones(2, 3)), want)
