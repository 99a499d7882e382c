"""What the torch layer does on a GPU, with tensors and streams that only look like CUDA's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hsdp
from hsdp.current_stream import CurrentStream
from hsdp.mesh import _current_device
from hsdp.torch.gradient_hook import HeldGradients, keeping_hook, make_hook
from hsdp.torch.trainable_parameters import _require_usable

GPU = torch.device("cuda", 0)
SHAPE = torch.Size([4, 4])


class Handle:
    """A Reducer that notes what it is told."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def gradient_of(self, *arguments: Any) -> None:
        self.calls.append(arguments)

    def reject_gradient(self, message: str) -> None:
        self.calls.append(message)


def weight() -> Any:
    """A parameter there, as far as a hook looks at one."""
    return SimpleNamespace(
        dtype=torch.bfloat16, device=GPU, is_cpu=False, shape=SHAPE, grad=None
    )


def gradient(**changes: Any) -> Any:
    """A CUDA tensor, as far as a hook looks at one."""
    fields = {
        "layout": torch.strided, "dtype": torch.bfloat16, "device": GPU, "is_cpu": False,
        "shape": SHAPE, "is_neg": lambda: False, "is_contiguous": lambda: False, "stride": lambda: (1, 4), "data_ptr": lambda: 4096,
    }
    return SimpleNamespace(**(fields | changes))


def test_a_gradient_goes_over_by_address() -> None:
    handle = Handle()
    parameter = weight()
    hook = make_hook(handle, 3, "w", parameter, HeldGradients())  # type: ignore[arg-type]
    hook(parameter)  # no gradient: nothing
    assert handle.calls == []
    parameter.grad = grad = gradient()
    hook(parameter)
    assert parameter.grad is None
    assert handle.calls == [(3, 4096, (1, 4), grad)]


def test_a_gradient_that_does_not_fit_is_refused() -> None:
    handle = Handle()
    parameter = weight()
    parameter.grad = gradient(dtype=torch.float32)
    fresh: dict[str, torch.Tensor] = {}
    hook = keeping_hook(make_hook(handle, 0, "w", parameter, HeldGradients()), "w", fresh)  # type: ignore[arg-type]
    message = "reducer: gradient of 'w': expected bfloat16, got float32"
    with pytest.raises(hsdp.UsageError, match=message):
        hook(parameter)
    assert len(handle.calls) == 1 and handle.calls[0].startswith(message)
    assert not fresh


def test_the_stream_is_torchs_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    current = CurrentStream("cuda:3")
    assert current() == 0  # torch has not used a GPU
    used: list[Any] = []

    def current_stream(device: int) -> Any:
        used.append(device)
        return SimpleNamespace(cuda_stream=77)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    assert current() == 77
    assert used == [3]
    current.set(5)
    assert current() == 5
    current.set(lambda: SimpleNamespace(ptr=6))
    assert current() == 6
    current.set(None)
    assert current() == 77


def test_cuda_is_torchs_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _current_device() == "cuda:0"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert _current_device() == "cuda:2"


def test_a_model_on_another_gpu_is_refused() -> None:
    parameter: Any = SimpleNamespace(
        layout=torch.strided, dtype=torch.float32, device=torch.device("cuda", 1), is_meta=False
    )
    _require_usable("w", parameter, "cuda:1")
    message = "attach: expected 'w' on the mesh's device, cuda:0, got cuda:1; move the model"
    with pytest.raises(hsdp.UsageError, match=message):
        _require_usable("w", parameter, "cuda:0")


def test_found_inf_is_a_tensor() -> None:
    with hsdp.init_mesh() as mesh:
        reducer = hsdp.Reducer(mesh)
        reducer.register("w", (3,))
        for value, want in [(1.0, 0.0), (float("inf"), 1.0), (2.0, 0.0)]:
            with reducer.microbatch(last=True):
                reducer.gradient_ready("w", torch.full((3,), value))
            found = reducer.found_inf_tensor()
            assert found.shape == () and found.dtype == torch.float32 and found.item() == want
            out = torch.full((1,), -1.0)
            assert reducer.found_inf_tensor(out) is out and out.item() == want
        with pytest.raises(hsdp.UsageError, match="expected an output of 1 f32 on cpu, got 2 f32"):
            reducer.found_inf_tensor(torch.zeros(2))
        with pytest.raises(hsdp.UsageError, match="1 f32 on cpu, got 1 f64"):
            reducer.found_inf_tensor(torch.zeros(1, dtype=torch.float64))
        reducer.close()
