"""The hook that takes gradients, in the extension and, if torch has no C functions to look at a tensor, in
Python. Both accept and refuse the same, with the same words, and leave nothing behind. One rank.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from one_rank import attached_to, mesh, message_of
from same_tensors import require_same
from torch import nn

import hsdp
from hsdp.torch.attach import gradient_hook

API = "__dlpack_c_exchange_api__"
HAS_API = hasattr(torch.Tensor, API)
WAYS = ["extension", "python"] if HAS_API else ["python"]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the parameters whose gradients Python code took."""
    names: list[str] = []
    python_way = gradient_hook.python_way

    def noted(handle: Any, index: int, parameter: Any, refusal: Any) -> Callable[[Any], None]:
        take = python_way(handle, index, parameter, refusal)

        def note(p: torch.Tensor) -> None:
            names.append(refusal._name)
            take(p)

        return note

    monkeypatch.setattr(gradient_hook, "python_way", noted)
    return names


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "python" and HAS_API:
        monkeypatch.delattr(torch.Tensor, API)
    yield request.param


def only(tensor: torch.Tensor) -> nn.ParameterDict:
    return nn.ParameterDict({"w": nn.Parameter(tensor)})


def step(reducer: hsdp.Reducer, run: Callable[[], Any]) -> torch.Tensor:
    """Runs a step; returns its result."""
    with reducer.microbatch(last=True):
        run()
    return torch.from_dlpack(reducer.shard("w")).clone()


class Other(torch.Tensor):
    """Gradients of another class."""


VALUES = torch.arange(6.0).reshape(2, 3)
GRADIENTS: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: VALUES.clone(),
    "bf16": lambda: VALUES.bfloat16(),
    "f16": lambda: VALUES.half(),
    "f64": lambda: VALUES.double(),
    "transposed": lambda: VALUES.t().contiguous().t(),
    "every second": lambda: VALUES.repeat_interleave(2, 1)[:, ::2],
    "expanded": lambda: torch.tensor([[1.0], [2.0]]).expand(2, 3),
    "a slice": lambda: torch.cat([torch.zeros(1, 3), VALUES])[1:],
    "one row": lambda: VALUES[:1],
    "scalar": lambda: torch.tensor(3.0),
    "differentiable": lambda: VALUES.clone().requires_grad_(),
}
PYTHON_ONLY: dict[str, Callable[[], torch.Tensor]] = {
    "negated": lambda: torch._neg_view(VALUES.clone()),
    "another class": lambda: VALUES.clone().as_subclass(Other),
    "complex": lambda: torch.complex(VALUES, -VALUES),
    "conjugated": lambda: torch.complex(VALUES, -VALUES).conj(),
}


@pytest.mark.parametrize("kind", [*GRADIENTS, *PYTHON_ONLY])
def test_gradients_that_are_taken(way: str, taken: list[str], mesh: hsdp.Mesh, kind: str) -> None:
    gradient = {**GRADIENTS, **PYTHON_ONLY}[kind]()
    model = only(torch.zeros_like(gradient.resolve_conj().detach()).as_subclass(torch.Tensor).contiguous())
    reducer = attached_to(model, mesh)

    def give() -> None:
        model.w.grad = gradient

    got = step(reducer, give)
    assert model.w.grad is None
    want = gradient.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    want = torch.view_as_real(want) if want.is_complex() else want
    wide = torch.float64 if want.dtype == torch.float64 else torch.float32
    require_same({"w": got}, {"w": want.to(wide).reshape(-1)})
    assert taken == (["w"] if way == "python" or kind in PYTHON_ONLY else [])


def test_parameters_without_elements(way: str, taken: list[str], mesh: hsdp.Mesh) -> None:
    model = nn.ParameterDict({"w": nn.Parameter(torch.ones(2)), "none": nn.Parameter(torch.ones(0, 3))})
    reducer = attached_to(model, mesh)
    got = step(reducer, lambda: (model.w.sum() + model.none.sum()).backward())
    assert got.tolist() == [1.0, 1.0]
    assert taken == ([] if way == "extension" else ["none", "w"])


def test_a_backward_pass_on_another_thread(way: str, mesh: hsdp.Mesh) -> None:
    model = only(torch.ones(3))
    reducer = attached_to(model, mesh)

    def run() -> None:
        thread = threading.Thread(target=lambda: model.w.square().sum().backward())
        thread.start()
        thread.join()

    assert step(reducer, run).tolist() == [2.0, 2.0, 2.0]


def of_another_shape(model: nn.ParameterDict) -> None:
    model.w.data = torch.zeros(3)
    model.w.sum().backward()


def of_another_rank(model: nn.ParameterDict) -> None:
    model.w.data = torch.zeros(2, 1)
    model.w.sum().backward()


def of_another_dtype(model: nn.ParameterDict) -> None:
    model.w.data = torch.zeros(2).half()
    model.w.sum().backward()


def of_parts_that_look_alike(model: nn.ParameterDict) -> None:
    model.w.data = torch.zeros(2, dtype=torch.int32).view(torch.float32).to(torch.complex64)
    model.w.abs().sum().backward()


def sparse(model: nn.ParameterDict) -> None:
    model.w.grad = torch.ones(2).to_sparse()


def twice(model: nn.ParameterDict) -> None:
    for _ in range(2):
        model.w.sum().backward()


REFUSED: dict[str, tuple[Callable[[nn.ParameterDict], None], str]] = {
    "shape": (of_another_shape, r"expected shape \(2,\), got \(3,\); make another"),
    "rank": (of_another_rank, r"expected shape \(2,\), got \(2, 1\)"),
    "dtype": (of_another_dtype, "expected float32, got float16"),
    "complex": (of_parts_that_look_alike, "expected float32, got complex64"),
    "sparse": (sparse, "expected a dense one, got a sparse one"),
    "second": (twice, "expected one gradient per microbatch, got a second one.*backwards"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_gradients_that_are_refused(mesh: hsdp.Mesh, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    run, text = REFUSED[kind]
    messages = set()
    for way, caught in itertools.product(WAYS, (False, True)):
        if way == "python" and HAS_API:
            monkeypatch.delattr(torch.Tensor, API, raising=False)
        model = only(torch.ones(2))
        reducer = attached_to(model, mesh, name="named")

        def begin(reducer: hsdp.Reducer = reducer, model: nn.ParameterDict = model, caught: bool = caught) -> None:
            with reducer.microbatch(last=True):
                with contextlib.suppress(hsdp.UsageError if caught else ()):  # by the user's code
                    run(model)

        messages.add(message_of(begin))
        assert model.w.grad is None
        reducer.close()
    assert len(messages) == 1
    assert re.search(text, messages.pop())


def test_gradients_that_nobody_waits_for(way: str, mesh: hsdp.Mesh) -> None:
    model = only(torch.ones(2))
    reducer = attached_to(model, mesh)
    stray = message_of(lambda: model.w.sum().backward())
    assert "gradient of 'w': expected an open microbatch, got a backward pass outside of one" in stray
    assert model.w.grad is None
    hook = reducer._attachments[0]._hooks["w"]
    reducer.close()
    model.w.sum().backward()
    assert model.w.grad is not None  # the hook is gone
    assert message_of(lambda: hook(model.w)) == stray


def test_errors_that_say_nothing_of_the_gradient(way: str, mesh: hsdp.Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gradient_hook.Refusal, "explained", raising)
    model = only(torch.ones(2))
    reducer = attached_to(model, mesh)
    with pytest.raises(KeyboardInterrupt):
        with reducer.microbatch(last=True):
            twice(model)
    assert step(reducer, lambda: model.w.sum().backward()).tolist() == [1.0, 1.0]


class Unreadable:
    """Takes a parameter's place."""

    @property
    def grad(self) -> Any:
        raise RuntimeError("no gradient here")


def test_what_is_not_a_parameter(way: str, mesh: hsdp.Mesh) -> None:
    reducer = attached_to(only(torch.ones(2)), mesh)
    hook: Any = reducer._attachments[0]._hooks["w"]
    with pytest.raises(RuntimeError, match="no gradient here"):
        hook(Unreadable())
    with pytest.raises(AttributeError, match="grad"):
        hook(None)
    with pytest.raises(TypeError):
        hook()


def test_nothing_is_left_behind(way: str, mesh: hsdp.Mesh) -> None:
    model = nn.ParameterDict({"w": nn.Parameter(torch.ones(2)), "z": nn.Parameter(torch.ones(2, dtype=torch.complex64))})
    parameters = list(model.values())
    reducer = hsdp.Reducer(mesh, missing="zero")
    handle = reducer._handle
    before = sys.getrefcount(handle)
    reducer.attach(model)

    def counts() -> list[int]:
        gc.collect()
        values = [*parameters, handle, None, False, torch.Tensor, hsdp.UsageError]
        return [sys.getrefcount(one) for one in values]

    def steps(count: int) -> None:
        for _ in range(count):
            step(reducer, lambda: (model.w.sum() + model.z.abs().sum()).backward())
            with pytest.raises(hsdp.UsageError):
                with reducer.microbatch(last=True):
                    twice(model)

    steps(3)
    then = counts()
    steps(100)
    assert all(abs(now - past) < 20 for now, past in zip(counts(), then, strict=True))
    gradient = torch.ones(2)
    life = weakref.ref(gradient)

    def give() -> None:
        nonlocal gradient
        model.w.grad = gradient
        del gradient

    step(reducer, give)
    assert life() is None
    reducer.close()
    del model, parameters
    gc.collect()
    assert sys.getrefcount(handle) == before


@pytest.mark.skipif(not HAS_API, reason="torch has no such functions")
def test_functions_of_another_kind_are_left_alone(
    taken: list[str], mesh: hsdp.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, API, "something else")
    model = only(torch.ones(2))
    assert step(attached_to(model, mesh), lambda: model.w.sum().backward()).tolist() == [1.0, 1.0]
    assert taken == ["w"]
