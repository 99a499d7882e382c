"""Buffers of an attached model follow rank 0's."""

from __future__ import annotations

import contextlib
import hashlib
from typing import Any

import pytest
import torch
from conftest import Launcher, on_mesh
from one_rank import attached_to
from torch import nn

import hsdp
from hsdp.torch.attach import buffer_sync


class Scaled(nn.Module):
    """Buffers of several dtypes and layouts, and a constant mask."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3, dtype=torch.float32)
        self.linear = nn.Linear(3, 2)
        self.mask = nn.Module()
        self.mask.register_buffer("causal", torch.ones(5, 5, dtype=torch.bool).tril())
        self.other = nn.Module()
        self.other.register_buffer("low", torch.zeros(3, dtype=torch.bfloat16))
        self.other.register_buffer("wide", torch.zeros(2, 3).t())
        self.other.register_buffer("none", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.other.low += x.mean()
            self.other.wide.add_(x.flatten()[0])
        y: torch.Tensor = self.linear(self.norm(x).mean((2, 3)) * self.mask.causal[4, :3])
        return y


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 3, 2, 2, generator=generator)


def state(model: nn.Module) -> dict[str, Any]:
    return {name: buffer.float().tolist() for name, buffer in model.named_buffers()}


def broadcasts(mesh: hsdp.Mesh) -> int:
    return mesh.world._handle.counts()["broadcast"][0]


def train(mesh: hsdp.Mesh, model: nn.Module, reducer: hsdp.Reducer, how: str) -> list[Any]:
    """The buffers when each step's first microbatch has begun, and at the end."""
    found = []

    def forward_and_backward(step: int) -> None:
        found.append(state(model))
        model(batch(step, mesh.rank)).sum().backward()

    for step in range(3):
        if how == "window":
            with hsdp.zero.coalesce_grad_reduction(reducer, last=True):
                forward_and_backward(step)
        elif how == "step":
            with reducer.step():
                with reducer.microbatch(last=False):
                    forward_and_backward(step)
                with reducer.microbatch(last=True):
                    forward_and_backward(step + 10)
        else:
            with reducer.microbatch(last=True):
                forward_and_backward(step)
    with reducer.microbatch(last=True):
        found.append(state(model))
    return found


def run_statistics(by_messages: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with hsdp.init_mesh(1, 2) as mesh:
        if by_messages:  # as on a GPU
            buffer_sync.BufferSync._broadcast = (  # type: ignore[method-assign]
                lambda self, data, root: buffer_sync._broadcast_by_messages(mesh, data, root)
            )
            buffer_sync._MESSAGE_BYTES = 16
        for how in ("microbatch", "window", "step"):
            torch.manual_seed(0)
            model = Scaled()
            if how == "window":  # they differ at first
                model.other.low += mesh.rank
            reducer = attached_to(model, mesh, missing="zero")
            before = broadcasts(mesh)
            found[how] = train(mesh, model, reducer, how)
            found[f"{how} broadcasts"] = broadcasts(mesh) - before
            reducer.close()
    return found


@pytest.mark.parametrize("by_messages", [False, True])
def test_every_step_begins_with_those_of_rank_0(ranks: Launcher, by_messages: bool) -> None:
    found = ranks(2, run_statistics, by_messages)
    for how in ("microbatch", "window", "step"):
        torch.manual_seed(0)
        alone = Scaled()
        want = []
        for step in range(3):
            want.append(state(alone))
            alone(batch(step, 0))
            if how == "step":
                want.append(state(alone))
                alone(batch(step + 10, 0))
        want.append(state(alone))
        assert found[0][how] == want
        begins = [2 * i for i in range(4)] if how == "step" else range(len(want))
        assert [found[1][how][i] for i in begins] == [want[i] for i in begins]
        if how == "step":  # nothing is copied within a step
            assert found[1][how][1] != want[1]
        copied = 4 if how == "window" else 3  # nothing is copied if nothing has changed
        assert found[0][f"{how} broadcasts"] == (0 if by_messages else copied)


def run_choices() -> dict[str, Any]:
    said: dict[str, Any] = {}
    with hsdp.init_mesh(1, 2) as mesh:

        def attempt(name: str, change: Any, **options: Any) -> None:
            torch.manual_seed(0)
            model = Scaled()
            reducer = hsdp.Reducer(mesh, missing="zero")
            before = broadcasts(mesh)
            try:
                reducer.attach(nn.ModuleDict({"m": model}), **options)
                reducer.attach(nn.BatchNorm1d(1))  # it has other buffers
                with reducer.microbatch(last=True):
                    change(model)
                with reducer.microbatch(last=True):
                    said[name] = [model.other.low[0].item(), model.norm.running_mean[0].item()]
            except hsdp.Error as error:
                said[name] = f"{type(error).__name__}: {error}"
            said[f"{name} broadcasts"] = broadcasts(mesh) - before
            reducer.close()

        def replace(model: Scaled) -> None:
            model.other.low = torch.full((3,), float(mesh.rank + 5), dtype=torch.bfloat16)

        def write(model: Scaled) -> None:
            model.other.low += mesh.rank + 1
            model.norm.running_mean += mesh.rank + 1

        def write_on_one(model: Scaled) -> None:
            if mesh.rank == 1:
                write(model)

        attempt("replaced", replace)
        attempt("untouched", lambda model: None)
        attempt("by rank 1", write_on_one)
        attempt("off", write, broadcast_buffers=False)
        attempt("left out", write, broadcast_buffers=["m.other.low"])
        attempt("unknown", write, broadcast_buffers=["other.low"])
        attempt("text", write, broadcast_buffers="m.other.low")

        def resize(model: Scaled) -> None:
            model.other.low = torch.zeros(3 + mesh.rank, dtype=torch.bfloat16)

        torch.manual_seed(0)
        model = Scaled()
        reducer = attached_to(model, mesh, missing="zero")
        with reducer.microbatch(last=True):
            resize(model)
        for name in ("shape", "shape again"):
            try:
                with reducer.microbatch(last=True):
                    pass
            except hsdp.MismatchError as error:
                said[name] = str(error)
        replace(model)
        with reducer.microbatch(last=True):
            said["after"] = model.other.low.tolist()
        reducer.close()
        reducer = hsdp.Reducer(mesh, missing="zero")
        reducer.attach(Scaled(), broadcast_buffers=mesh.rank == 0, check_parameters=False)
        try:
            reducer.prepare()
        except hsdp.MismatchError as error:
            said["one"] = str(error)
    return said


def test_what_is_copied(ranks: Launcher) -> None:
    zero, one = ranks(2, run_choices)
    assert zero["replaced"] == one["replaced"] == [5.0, 0.0]
    assert zero["replaced broadcasts"] == 1
    assert zero["untouched broadcasts"] == 0
    assert zero["by rank 1"] == one["by rank 1"] == [0.0, 0.0]
    assert (zero["off"], one["off"], zero["off broadcasts"]) == ([1.0, 1.0], [2.0, 2.0], 0)
    assert (zero["left out"], one["left out"]) == ([1.0, 1.0], [2.0, 1.0])
    assert "'other.low', which ModuleDict does not have" in zero["unknown"]
    assert "expected True, False or names of buffers to leave out, got 'm.other.low'" in zero["text"]
    for said in (zero, one):
        assert "got 'other.low': (3,) torch.bfloat16 on rank 0 and 'other.low': (4,)" in said["shape"]
        assert "broadcast_buffers=[names]" in said["shape"] and said["shape again"] == said["shape"]
        assert said["after"] == [5.0] * 3
        assert "got buffer 'norm.running_mean' on rank 0 and nothing on rank 1" in said["one"]


class Boom(Exception):
    pass


def run_drops() -> list[str]:
    """Rank 1 raises while rank 0 continues."""
    said = []
    with hsdp.init_mesh(1, 2, timeout_s=30.0) as mesh:
        torch.manual_seed(0)
        models = [nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)) for _ in range(2)]
        reducers = [hsdp.Reducer(mesh) for _ in models]
        for reducer, model in zip(reducers, models, strict=True):
            reducer.attach(model)

        def backward(model: nn.Module) -> None:
            model(torch.randn(4, 3)).sum().backward()

        def one_step(where: str) -> None:
            if where == "window":
                if mesh.rank == 1:  # the second one cannot begin on this rank
                    models[1][0].bias.grad = torch.ones(2)
                try:
                    with hsdp.zero.coalesce_grad_reduction(reducers, last=True):
                        for model in models:
                            backward(model)
                finally:
                    models[1].zero_grad()
                    if mesh.rank == 0:  # it is told when it reads the results
                        for reducer in reducers:
                            with contextlib.suppress(hsdp.StepAbortedError):
                                reducer.gather_gradients()
                                said.append("nothing was dropped")
                return
            with reducers[0].step():
                if where == "before" and mesh.rank == 1:
                    raise Boom(where)
                with reducers[0].microbatch(last=False):
                    backward(models[0])
                if where == "between" and mesh.rank == 1:
                    raise Boom(where)
                with reducers[0].microbatch(last=True):
                    backward(models[0])
                reducers[0].gather_gradients()

        for where in ("before", "between", "", "window", "before", ""):
            try:
                one_step(where)
                said.append("fine")
            except hsdp.StepAbortedError as error:
                said.append(f"{list(error.ranks)} {str(error).partition('Boom: ')[2]}")
            except (Boom, hsdp.UsageError) as error:
                said.append(type(error).__name__)
            models[0].zero_grad()
        for reducer, model in zip(reducers, models, strict=True):
            for _ in range(2):
                with reducer.microbatch(last=True):
                    same = mesh.world.all_gather(model[1].running_var.clone()).numpy().reshape(2, -1)
                    assert (same[0] == same[1]).all()
                    backward(model)
        said.append(str(reducers[0].stats().begun_step_count))
    return said


def test_dropped_steps_do_not_hang(ranks: Launcher) -> None:
    zero, one = ranks(2, run_drops)
    before, between = (f"[1] {where}; begin a new step on every rank" for where in ("before", "between"))
    assert zero == [before, between, "fine", "fine", before, "fine", "8"]
    assert one == ["Boom", "Boom", "fine", "UsageError", "Boom", "fine", "8"]


@on_mesh(1, 2)
def test_scripted_models(mesh: hsdp.Mesh) -> None:
    model: Any = torch.jit.script(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    reducer = attached_to(model, mesh)
    x = torch.arange(12.0).reshape(4, 3) * (mesh.rank + 1)
    for _ in range(2):
        with reducer.microbatch(last=True):
            found = model[1].running_mean.tolist()
            model(x).sum().backward()
    assert found != [0.0, 0.0]
    assert len(set(mesh.world._handle.exchange(str(found), "test"))) == 1


@on_mesh(1, 2)
def test_statistics_may_be_copied_before_a_backward(mesh: hsdp.Mesh) -> None:
    """What F.batch_norm writes raises no version counter of torch, and a copy of it does not either."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    reducer = attached_to(model, mesh)
    for _ in range(3):
        loss = model(torch.randn(4, 3) * (mesh.rank + 1)).square().sum()
        with reducer.microbatch(last=True):
            loss.backward()
        reducer.gather_gradients()
        model.zero_grad()


@on_mesh(1, 2)
def test_where_rank_0_has_no_batch_they_follow_one_that_has(mesh: hsdp.Mesh) -> None:
    model = Scaled()
    hsdp.broadcast_parameters(mesh, model)
    reducer = attached_to(model, mesh)
    steps = [batch(step, mesh.rank) for step in range(3)]
    for x in hsdp.uneven(reducer, steps if mesh.rank else []):
        with reducer.microbatch(last=True):
            if x is not None:
                model(x).sum().backward()
        reducer.discard()
    with reducer.microbatch(last=True):
        found = state(model)
        model(batch(0, mesh.rank)).sum().backward()
    reducer.close()
    assert found["norm.num_batches_tracked"] == 3.0
    digest = hashlib.sha256(str(found).encode()).hexdigest()
    assert len(set(mesh.world._handle.exchange(digest, "test"))) == 1
