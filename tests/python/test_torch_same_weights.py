"""Weights that differ between ranks are found before the first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import Launcher, on_mesh
from one_rank import attached_to
from torch import nn

import hsdp
from hsdp.torch.value_digests import value_digests


def digest(tensor: torch.Tensor) -> str:
    return value_digests([tensor])[0]


def require_all_differ(tensors: list[torch.Tensor]) -> None:
    digests = value_digests(tensors)
    assert len(set(digests)) == len(tensors)
    assert digests == [digest(tensor) for tensor in tensors]
    assert all(len(one) == 32 for one in digests)


# Words of 8 bytes, a tail, and more than one chunk.
@pytest.mark.parametrize("count", [1, 7, 16, 1001])
def test_every_bit_counts(count: int) -> None:
    data = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    changed = [data.clone()]
    for byte in range(0, count, max(1, count // 20)):
        for bit in range(8):
            changed.append(data.clone())
            changed[-1][byte] ^= 1 << bit
    require_all_differ(changed)


def test_every_bit_counts_in_a_large_tensor() -> None:
    zeros = torch.zeros(5 << 18, dtype=torch.float64)
    changed = [zeros]
    for place in (0, 1, 2, (1 << 18) - 1, 1 << 18, (1 << 18) + 1, 1 << 19, zeros.numel() - 1):
        changed.append(zeros.clone())
        changed[-1][place] = -0.0
    require_all_differ(changed)


# Equal sums of the words, and equal sums of their products with odd numbers if only the highest bits differ.
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
def test_the_order_counts(dtype: torch.dtype) -> None:
    plain = torch.zeros(64, dtype=dtype)
    plain[0] = 1
    orders = [plain.roll(i) for i in range(64)]
    if dtype.is_floating_point:
        signs = torch.zeros(64, dtype=dtype)
        signs[0] = -0.0
        orders += [signs.roll(i) for i in range(64)]
        both = torch.ones(64, dtype=dtype)
        both[0] = -1
        orders += [both.roll(i) for i in range(64)]
    require_all_differ(orders)
    large = torch.ones(3 << 18, dtype=torch.float64)
    large[5] = -1
    require_all_differ([large.roll(i) for i in (0, 1, 2, 1 << 17, 1 << 18, 1 << 19)])


def test_bits_count_not_values() -> None:
    nans = torch.tensor([0x7FC00000, 0x7FC00001, 0x7F800001, -0x400000], dtype=torch.int32)
    require_all_differ([*nans.view(torch.float32).split(1), torch.tensor([0.0]), torch.tensor([-0.0])])


def test_memory_does_not_count() -> None:
    plain = torch.arange(4 * 6 * 5 * 3, dtype=torch.float32).reshape(4, 6, 5, 3)
    padded = torch.zeros(plain.numel() + 1)
    padded[1:] = plain.flatten()
    same = [
        plain,
        plain.to(memory_format=torch.channels_last),
        plain.transpose(0, 3).contiguous().transpose(0, 3),
        padded[1:].view(plain.shape),
    ]
    assert len(set(value_digests(same))) == 1
    assert digest(plain.transpose(0, 1)) == digest(plain.transpose(0, 1).contiguous())
    assert digest(plain.transpose(0, 1)) != digest(plain)
    complex_ = torch.complex(torch.ones(3), torch.arange(3.0))
    assert digest(complex_.conj()) == digest(torch.complex(torch.ones(3), -torch.arange(3.0)))
    assert digest(torch._neg_view(plain)) == digest(-plain)


def test_any_dtype() -> None:
    dtypes = [
        torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16,
        torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn,
    ]
    for dtype in dtypes:
        zeros, ones = torch.zeros(9).to(dtype), torch.ones(9).to(dtype)
        require_all_differ([zeros, ones])
        assert digest(torch.zeros(()).to(dtype)) != digest(torch.ones(()).to(dtype))
    assert digest(torch.empty(0)) == digest(torch.empty(3, 0))
    assert value_digests([]) == []


def make_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2))


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 3)).sum().backward()


def begin(how: str, reducer: hsdp.Reducer, model: nn.Module) -> None:
    """Begins something and ends it."""
    if how == "prepare":
        reducer.prepare()
    elif how == "optimizer":
        hsdp.zero.ShardedOptimizer(torch.optim.SGD, model, reducer, lr=0.1)
    elif how == "step":
        with reducer.step(), reducer.microbatch(last=True):
            backward(model)
    elif how == "microbatch":
        with reducer.microbatch(last=True):
            backward(model)
    else:
        with hsdp.zero.coalesce_grad_reduction([reducer] if how == "windows" else reducer, last=True):
            backward(model)


WHERE = ("everywhere", "frozen", "bias", "nowhere")
HOW = ("prepare", "optimizer", "step", "microbatch", "window", "windows")


def spoil(model: nn.Module, where: str, rank: int) -> None:
    with torch.no_grad():
        if where == "everywhere":
            model[0].weight.add_(rank)
            model[2].bias.add_(rank)
        elif where == "frozen" and rank in (1, 3):
            model[1].weight[2, 3].neg_()
        elif where == "bias" and rank == 2:
            model[2].bias[1] += 1


def run_different_weights() -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    with hsdp.init_mesh(2, 2) as mesh:
        for how, where in [*((how, "everywhere") for how in HOW), *(("step", w) for w in WHERE)]:
            model = make_model(0)
            spoil(model, where, mesh.rank)
            reducer = attached_to(model, mesh)
            said: list[Any] = []
            for _ in range(2):  # repeated calls until it holds
                try:
                    begin(how, reducer, model)
                except hsdp.MismatchError as error:
                    said.append([str(error), list(error.ranks)])
            assert mesh.world.mean(float(mesh.rank)) == 1.5
            hsdp.broadcast_parameters(mesh, model)
            begin(how, reducer, model)
            with reducer.microbatch(last=True):
                backward(model)
            reducer.gather_gradients()
            spoil(model, "everywhere", mesh.rank)  # once is enough
            with reducer.microbatch(last=True):
                backward(model)
            found[f"{how}, {where}"] = said
            reducer.close()
    return found


def test_different_weights_are_an_error_everywhere(ranks: Launcher) -> None:
    found = ranks(4, run_different_weights)
    assert all(said == found[0] for said in found)
    for how in HOW:
        first, second = found[0][f"{how}, everywhere"]
        assert "other values of parameter '0.weight' (4, 3) torch.float32 on ranks 1, 2, 3" in first[0]
        assert "call hsdp.broadcast_parameters(mesh, model) before the first step" in first[0]
        assert first[1] == [1, 2, 3] and second == first
    for where, name, who in (("frozen", "'1.weight' (4, 4)", [1, 3]), ("bias", "'2.bias' (2,)", [2])):
        (message, at), second = found[0][f"step, {where}"]
        assert f"other values of parameter {name}" in message and at == who
        assert second == [message, at]
    assert found[0]["step, nowhere"] == []


@on_mesh(1, 2)
def test_several_models(mesh: hsdp.Mesh) -> None:
    first, second = nn.ModuleDict({"a": make_model(0)}), nn.ModuleDict({"b": make_model(1)})

    def attempt(**options: Any) -> str:
        reducer = attached_to(first, mesh, missing="zero")
        reducer.attach(second, **options)
        try:
            with reducer.microbatch(last=True):
                pass
            said = "fine"
        except hsdp.Error as error:
            said = str(error)
        finally:
            reducer.close()
        (heard,) = set(mesh.world._handle.exchange(said, "test"))
        return heard

    assert attempt() == "fine"
    with torch.no_grad():
        second["b"][0].weight[0, 0] += mesh.rank
    assert "'b.0.weight' (4, 3) torch.float32 on rank 1" in attempt()
    assert attempt(check_parameters=False) == "fine"
    missing = "got parameter 'b.0.weight' (4, 3) torch.float32 on rank 0 and nothing on rank 1"
    assert missing in attempt(check_parameters=mesh.rank == 0)
    if mesh.rank == 1:
        first["a"][1] = nn.Linear(4, 4, device="meta").requires_grad_(False)
    assert "'a.1.weight' (4, 4) torch.float32 on the meta device on rank 1" in attempt()
    if mesh.rank == 1:
        first["a"][1] = nn.Linear(4, 5).requires_grad_(False)
    assert "got parameter 'a.1.weight' (4, 4) torch.float32 on rank 0 and parameter 'a.1" in attempt()
    first["a"][1] = nn.Identity()
    if mesh.rank == 1:
        first["a"].register_parameter("extra", nn.Parameter(torch.ones(2), requires_grad=False))
    assert "parameter 'a.extra' (2,)" in attempt()


def test_a_world_of_one_looks_at_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr("hsdp.torch.attach.model_attachment.described_parameters", refuse)
    with hsdp.init_mesh() as mesh:
        model = make_model(0)
        reducer = attached_to(model, mesh)
        begin("microbatch", reducer, model)
