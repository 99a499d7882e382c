"""Parameters in flight that are read without a hook: transforms, scripts, compilers, threads, children."""

from __future__ import annotations

import atexit
import gc
import os
import pickle
import sys
import threading
import time
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import on_mesh
from torch import nn

import hsdp
from hsdp.torch.slices.parameter_in_flight import ParameterInFlight
from hsdp.zero import ShardedOptimizer


@torch.jit.script
def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w


class Bank(nn.Module):
    """An ensemble whose members are never called."""

    def __init__(self, scripted: bool = False) -> None:
        super().__init__()
        self.members = nn.ParameterList([nn.Parameter(0.2 * torch.randn(4, 8, 8))])
        self.scripted = scripted

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scripted:
            return product(x, self.members[0]).sum(0)
        return torch.func.vmap(lambda w: x @ w)(self.members[0]).sum(0)


class Inner(nn.Module):
    """An inner step on the weight of a child module that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Sequential(nn.Linear(8, 8, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.child[0].weight
        grad = torch.func.grad(lambda w: F.linear(x, w).square().mean())(weight)
        return F.linear(x, weight - 0.1 * grad)


def multilayer() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def traced() -> Any:
    return torch.jit.trace(multilayer(), torch.ones(2, 8))  # type: ignore[no-untyped-call]


MODELS: dict[str, Any] = {
    "bank": Bank,
    "scripted bank": lambda: Bank(scripted=True),
    "inner": Inner,
    "traced": traced,
    "traced below": lambda: nn.Sequential(multilayer(), traced()),
    "scripted": lambda: torch.jit.script(multilayer()),
}


class Run:
    """A model in training. Rank 1 is late, so rank 0's parameters stay in flight for long."""

    def __init__(self, mesh: hsdp.Mesh, model: nn.Module, overlap: bool = True) -> None:
        self.mesh, self.model = mesh, model
        self.reducer = hsdp.Reducer(mesh, missing="zero", bucket_bytes=64)
        self.reducer.attach(model)
        self.optimizer = ShardedOptimizer(torch.optim.SGD, model, self.reducer, lr=0.05,
                                          overlap_param_gather=overlap, gather_bucket_bytes=64)

    def step(self, x: torch.Tensor) -> None:
        with self.reducer.microbatch(last=True):
            (self.model(x) - 1).square().mean().backward()
        if self.mesh.rank == 1:
            time.sleep(0.05)
        self.optimizer.step()

    def close(self) -> None:
        self.optimizer.close()
        self.reducer.close()


@on_mesh(1, 2)
def test_what_a_forward_gives_to_functions_that_do_not_ask(mesh: hsdp.Mesh) -> None:
    torch.jit.set_fusion_strategy([])
    for name, make in MODELS.items():
        ends = []
        for overlap in (True, False):
            torch.manual_seed(0)
            run = Run(mesh, make(), overlap)
            for _ in range(4):
                run.step(torch.ones(2, 8))
            ends.append([p.detach().clone() for p in run.model.parameters()])
            run.close()
        assert all(map(torch.equal, *ends)), name


class Marked(torch.Tensor):
    pass


@on_mesh(1, 2)
def test_copies_know_nothing_of_flights(mesh: hsdp.Mesh) -> None:
    """New parameters made from old ones, other classes, and saved models."""
    run = Run(mesh, multilayer())
    model: Any = run.model
    run.step(torch.ones(2, 8))
    again = nn.Parameter(model[0].weight, requires_grad=False)
    marked = model[2].weight.as_subclass(Marked)
    assert (type(again), type(marked)) == (nn.Parameter, Marked)
    assert again.data_ptr() == model[0].weight.data_ptr()
    assert torch.equal(again, model[0].weight)
    assert torch.equal(marked.as_subclass(torch.Tensor), model[2].weight)
    run.step(torch.ones(2, 8))
    saved = pickle.dumps(model)
    assert b"hsdp." not in saved  # only the name of an attribute, which is None
    assert torch.equal(pickle.loads(saved)(torch.ones(2, 8)), model(torch.ones(2, 8)))
    run.close()


@on_mesh(1, 2)
def test_a_graph_that_is_older_than_the_step(mesh: hsdp.Mesh) -> None:
    """A backward pass of a graph from before the step, as with torch's optimizers."""
    for overlap in (True, False):
        run = Run(mesh, multilayer(), overlap)
        x = torch.ones(2, 8, requires_grad=True)
        old = run.model(x).sum()
        run.step(torch.ones(2, 8))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            old.backward()
        run.close()


@on_mesh(1, 2)
def test_compiled_code_outside_of_modules(mesh: hsdp.Mesh) -> None:
    """Compiled code reads several parameters and calls none of the hooked modules."""
    for kind in ("list", "average", "export"):
        ends = []
        for overlap in (True, False):
            torch._dynamo.reset()
            torch.manual_seed(0)
            run = Run(mesh, multilayer(), overlap)
            average = [torch.zeros_like(p) for p in run.model.parameters()]

            def total(run: Run = run) -> torch.Tensor:
                return torch.stack([p.square().sum() for p in run.model.parameters()])

            def blend(run: Run = run, average: list[torch.Tensor] = average) -> None:
                for a, p in zip(average, run.model.parameters(), strict=True):
                    a.mul_(0.5).add_(p, alpha=0.5)

            compiled = torch.compile(total if kind == "list" else blend, backend="aot_eager")
            read = []
            for step in range(3):
                run.step(torch.ones(2, 8))
                if kind == "export" and step == 1:
                    torch.export.export(run.model, (torch.ones(2, 8),))
                elif kind != "export":
                    with torch.no_grad():
                        value = compiled()
                    read += [a.clone() for a in average] if value is None else [value.clone()]
            run.step(torch.ones(2, 8))
            flies = type(run.model[0].weight) is ParameterInFlight
            assert flies == (overlap and kind == "export")
            ends.append([*read, *(p.detach().clone() for p in run.model.parameters())])
            run.close()
        assert all(map(torch.equal, *ends)), kind


@on_mesh(1, 2)
def test_threads_that_meet_at_a_parameter(mesh: hsdp.Mesh) -> None:
    """Writes from several threads to a parameter that is copied when its gather ends."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    lost = 0
    model = nn.Module()
    model.w = weight = nn.Parameter(torch.ones(64, 48).t())
    model.forward = lambda x: weight.sum()  # type: ignore[method-assign,assignment]
    run = Run(mesh, model)
    for _ in range(40):
        run.step(torch.ones(1))
        threads = [threading.Thread(target=lambda: weight.detach().sum()) for _ in range(4)]
        for thread in threads:
            thread.start()
        with torch.no_grad():
            weight.fill_(7.0)
        for thread in threads:
            thread.join()
        lost += not bool((weight == 7).all())
    run.close()
    sys.setswitchinterval(interval)
    assert lost == 0


@on_mesh(1, 2)
def test_children_find_nothing_in_flight(mesh: hsdp.Mesh) -> None:
    """Child processes that read a parameter in flight, drop its optimizer, or just end."""
    warnings.simplefilter("ignore", DeprecationWarning)  # about forks of a process with threads
    run = Run(mesh, multilayer())
    for what in ("read", "drop", "end"):
        run.step(torch.ones(2, 8))
        child = os.fork()
        if child == 0:
            if what == "read":
                sum(float(p.detach()[0].sum()) for p in run.model.parameters())
            elif what == "drop":
                del run.optimizer
                gc.collect()
            else:
                atexit._run_exitfuncs()
            os._exit(0)
        end = time.monotonic() + 20
        while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < end:
            time.sleep(0.01)
        if ended[0] == 0:
            os.kill(child, 9)
            ended = os.waitpid(child, 0)
        assert ended[1] == 0, what
    run.close()
