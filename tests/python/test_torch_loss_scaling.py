"""A GradScaler with a Reducer: every order of calls trains correctly or is refused."""

from __future__ import annotations

import contextlib
import itertools
import os
from typing import Any

import pytest
import torch
from conftest import Launcher, on_mesh
from one_rank import attached_to, mesh, message_of
from torch import nn

import hsdp
from hsdp.zero import ShardedOptimizer, coalesce_grad_reduction

SCALE = 1024.0
OPTIONS: dict[str, Any] = {"device": "cpu", "init_scale": SCALE, "growth_interval": 100}


def make_model() -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(3, 2)


def loss_of(model: nn.Module, rank: int = 0) -> torch.Tensor:
    """Gradients are whole numbers; each rank's are rank + 1 times rank 0's."""
    x = (rank + 1) * torch.tensor([[2.0, 4.0, -6.0]])
    return (model(x) * torch.tensor([3.0, -1.0])).sum() + rank * model.bias.sum() * 0  # type: ignore


def expected(size: int, max_norm: float | None, local_rank: int | None = None) -> nn.Linear:
    model = make_model()
    if local_rank is None:
        (sum(loss_of(model, rank) for rank in range(size)) / size).backward()  # type: ignore
    else:
        loss_of(model, local_rank).backward()
    if max_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    torch.optim.SGD(model.parameters(), 1.0).step()
    return model


def close(model: nn.Module, want: nn.Module) -> bool:
    return all(
        torch.allclose(p, q, rtol=1e-6, atol=1e-6)
        for p, q in zip(model.parameters(), want.parameters(), strict=True)
    )


RIGHT = ["gather", "gather unscale", "gather unscale ours", "gather unscale torch",
         "gather unscale ours torch"]
RIGHT_WHEN_DIVIDED = [*RIGHT, "gather ours", "ours gather", "gather torch", "gather torch unscale",
                      "ours gather unscale", "gather ours unscale", "gather ours torch"]
RIGHT_OF_SHARDS = ["", "gather", "unscale", "unscale ours", "unscale gather", "gather unscale ours",
                   "unscale ours gather", "unscale gather ours"]


KINDS = list(itertools.product(("torch", "own", "fused", "sharded", "sharded clips"), (False, True)))
# The nightly run tries all orders of the other kinds too.
IN_ALL_ORDERS = [("torch", False), ("torch", True), ("sharded", False)]


def right_orders(kind: str, divided: bool) -> list[str]:
    if kind.startswith("sharded"):
        return [*RIGHT_OF_SHARDS, *(["ours", "gather ours", "ours gather"] if divided else [])]
    return RIGHT_WHEN_DIVIDED if divided else RIGHT


def orders_of(kind: str, divided: bool) -> list[str]:
    every = (kind, divided) in IN_ALL_ORDERS or os.environ.get("HSDP_ALL_ORDERS") == "1"
    orders = [" ".join(order) for count in range(5 if every else 3)
              for order in itertools.permutations(("gather", "unscale", "ours", "torch"), count)]
    return [*dict.fromkeys([*orders, *right_orders(kind, divided)])]


def try_order(mesh: hsdp.Mesh, kind: str, divided: bool, order: str) -> str:
    model, reducer = make_model(), hsdp.Reducer(mesh)
    reducer.attach(model)
    optimizer: Any
    if kind.startswith("sharded"):
        limit = 0.5 if kind == "sharded clips" else None
        optimizer = ShardedOptimizer(torch.optim.SGD, model, reducer, lr=1.0, max_grad_norm=limit)
    else:
        optimizer = torch.optim.SGD(model.parameters(), 1.0, fused=kind == "fused")
    scaler = (hsdp.torch.GradScaler(reducer, **OPTIONS) if kind == "own"
              else torch.amp.GradScaler(**OPTIONS))
    if divided:
        reducer.set_loss_scale(SCALE)
    with reducer.microbatch(last=True):
        scaler.scale(loss_of(model, mesh.rank)).backward()
    act: dict[str, Any] = {
        "gather": reducer.gather_gradients,
        "unscale": lambda: scaler.unscale_(optimizer),
        "ours": lambda: reducer.clip_grad_norm_(0.5),
        "torch": lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.5),
    }
    try:
        for call in order.split():
            act[call]()
        scaler.step(optimizer)
        clips = "ours" in order or "torch" in order or kind == "sharded clips"
        return "right" if close(model, expected(2, 0.5 if clips else None)) else "wrong"
    except hsdp.UsageError:
        same = all(map(torch.equal, model.parameters(), make_model().parameters()))
        return "refused" if same else "wrong"
    finally:
        reducer.close()


def run_orders() -> list[dict[str, str]]:
    with hsdp.init_mesh(1, 2) as mesh:
        return [{order: try_order(mesh, *kind, order) for order in orders_of(*kind)} for kind in KINDS]


@pytest.fixture(scope="module")
def outcomes(module_ranks: Launcher) -> list[list[dict[str, str]]]:
    return module_ranks(2, run_orders)


@pytest.mark.parametrize("index", range(len(KINDS)), ids=[f"{k} {d}" for k, d in KINDS])
def test_every_order_is_right_or_refused(outcomes: list[list[dict[str, str]]], index: int) -> None:
    found, other = (of_rank[index] for of_rank in outcomes)
    assert found == other
    assert [order for order, outcome in found.items() if outcome == "wrong"] == []
    right = [order for order in right_orders(*KINDS[index]) if found[order] != "right"]
    assert right == []
    assert [*found.values()].count("refused") > len(found) // 3


def attached(
    mesh: hsdp.Mesh, divided: bool = False, keep_grads: bool = False
) -> tuple[nn.Linear, hsdp.Reducer, torch.optim.SGD, Any]:
    model = make_model()
    reducer = attached_to(model, mesh, keep_grads)
    if divided:
        reducer.set_loss_scale(SCALE)
    return model, reducer, torch.optim.SGD(model.parameters(), 1.0), torch.amp.GradScaler(**OPTIONS)


def run(reducer: hsdp.Reducer, model: nn.Module, scaler: Any) -> None:
    with reducer.microbatch(last=True):
        scaler.scale(loss_of(model)).backward()


def clip_and_step(reducer: hsdp.Reducer, scaler: Any, optimizer: Any) -> None:
    scaler.unscale_(optimizer)
    reducer.clip_grad_norm_(0.5)
    scaler.step(optimizer)


def test_what_is_said(mesh: hsdp.Mesh) -> None:
    model, reducer, optimizer, scaler = attached(mesh)
    run(reducer, model, scaler)
    remedies = r"scaler.unscale_(optimizer) before, after reducer.gather_gradients()"
    for call in (lambda: scaler.unscale_(optimizer), lambda: scaler.step(optimizer)):
        assert "unscale_: expected a gradient in 'weight', got none" in message_of(call)
        assert "call reducer.gather_gradients() before" in message_of(call)
    for clip in (lambda: reducer.clip_grad_norm_(1.0), lambda: hsdp.clip_grad_norm_([reducer], 1.0)):
        said = message_of(clip)
        assert said.startswith("reducer: clip_grad_norm_: expected gradients without a loss scale")
        assert "times 1024" in said and remedies in said and "set_loss_scale" in said
    reducer.gather_gradients()
    norm = lambda: nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
    assert message_of(norm).startswith("clip_grad_norm_: expected gradients without")
    value = lambda: nn.utils.clip_grad_value_(model.parameters(), 1.0)
    assert message_of(value).startswith("clip_grad_value_: expected gradients without")
    assert message_of(optimizer.step).startswith("SGD.step: expected gradients without")
    scaler.unscale_(optimizer)
    unclipped = float(norm())
    assert float(reducer.clip_grad_norm_(1e6)) == pytest.approx(unclipped)
    value()
    said = message_of(lambda: reducer.clip_grad_norm_(1.0))
    assert "clipped by torch and its shard not; clip with reducer.clip_grad_norm_ alone" in said
    again = torch.amp.GradScaler(**OPTIONS)
    again.scale(torch.ones(()))
    assert "'weight' unscaled already" in message_of(lambda: again.unscale_(optimizer))
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)
    reducer.gather_gradients()
    scaler.step(optimizer)
    assert close(model, expected(1, None))
    scaler.update()
    assert "unscaled already" in message_of(lambda: scaler.step(optimizer))


def test_an_unfinished_step(mesh: hsdp.Mesh) -> None:
    model, reducer, optimizer, scaler = attached(mesh, keep_grads=True)
    with reducer.microbatch(last=False):
        scaler.scale(loss_of(model)).backward()
    said = message_of(lambda: scaler.unscale_(optimizer))
    assert "expected a step that is over" in said and "reducer.finish()" in said
    reducer.finish()
    scaler.step(optimizer)
    assert close(model, expected(1, None))


@pytest.mark.parametrize("divided", [False, True])
def test_optimizers_of_parts(mesh: hsdp.Mesh, divided: bool) -> None:
    model, reducer, _, scaler = attached(mesh, divided)
    optimizers = [torch.optim.SGD([p], 1.0) for p in model.parameters()]
    run(reducer, model, scaler)
    reducer.gather_gradients()
    scaler.unscale_(optimizers[0])
    if not divided:
        assert "'bias' times 1024" in message_of(lambda: reducer.clip_grad_norm_(0.5))
        assert "'bias' times 1024" in message_of(optimizers[1].step)
    scaler.unscale_(optimizers[1])
    reducer.clip_grad_norm_(0.5)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert close(model, expected(1, 0.5))


def test_models_of_one_reducer_in_turns(mesh: hsdp.Mesh) -> None:
    models = [nn.Linear(3, 2) for _ in range(2)]
    reducer = hsdp.Reducer(mesh, missing="zero")
    for i, model in enumerate(models):
        reducer.attach(nn.ModuleDict({str(i): model}))
    optimizers = [torch.optim.SGD(model.parameters(), 1.0) for model in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    for model, optimizer in zip(models, optimizers, strict=True):
        with reducer.microbatch(last=True):
            scaler.scale(model(torch.ones(1, 3)).sum()).backward()
        reducer.gather_gradients()
        scaler.unscale_(optimizer)
        assert float(reducer.clip_grad_norm_(0.5)) == pytest.approx(8**0.5)
        before = [p.detach().clone() for p in model.parameters()]
        scaler.step(optimizer)
        moved = [q - p.detach() for p, q in zip(model.parameters(), before, strict=True)]
        assert float(torch.cat([m.flatten() for m in moved]).norm()) == pytest.approx(0.5, rel=1e-4)
    scaler.update()
    reducer.close()


def test_a_loss_scale_of_another_step(mesh: hsdp.Mesh) -> None:
    """A result is divided by the scale that was set when its step began."""
    for before, after, then in ((SCALE, 1.0, True), (1.0, SCALE, False), (2.0, SCALE, False)):
        model, reducer, optimizer, scaler = attached(mesh)
        reducer.set_loss_scale(before)
        run(reducer, model, scaler)
        reducer.set_loss_scale(after)
        reducer.gather_gradients()
        if then:
            reducer.clip_grad_norm_(0.5)
        else:
            assert f"times {SCALE / before:g}" in message_of(lambda: reducer.clip_grad_norm_(0.5))
            scaler.unscale_(optimizer)
            reducer.clip_grad_norm_(0.5)
        scaler.step(optimizer)
        assert close(model, expected(1, 0.5))
        reducer.close()


@on_mesh(1, 2)
def test_local_sums(mesh: hsdp.Mesh) -> None:
    """p.grad is this rank's gradient and always scaled; the shards may be divided."""
    bias, weight = 10.0, 10.0 * 56.0
    for divided in (False, True):
        model, reducer, optimizer, scaler = attached(mesh, divided, keep_grads=True)
        with reducer.microbatch(last=True):
            scaler.scale(loss_of(model, mesh.rank)).backward()
        assert "times 1024" in message_of(optimizer.step)
        assert "times 1024" in message_of(lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        if not divided:
            assert "times 1024" in message_of(lambda: reducer.clip_grad_norm_(0.5))
        scaler.unscale_(optimizer)
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        assert norm == pytest.approx((bias + weight * (mesh.rank + 1) ** 2) ** 0.5)
        assert float(reducer.clip_grad_norm_(1e6)) == pytest.approx((bias + weight * 1.5**2) ** 0.5)
        scaler.step(optimizer)
        assert close(model, expected(2, 0.5, mesh.rank))


def train_with_an_infinity(mesh: hsdp.Mesh, kind: str) -> list[Any]:
    """One rank alone has an infinity, in one backward pass of two."""
    model, reducer, optimizer, scaler = attached(mesh, keep_grads="local" in kind)
    taking: Any = optimizer
    if "own" in kind:
        scaler = hsdp.torch.GradScaler(reducer, **OPTIONS)
    if "fused" in kind:
        taking = torch.optim.SGD(model.parameters(), 1.0, fused=True)
    if "sharded" in kind:
        taking = ShardedOptimizer(torch.optim.SGD, model, reducer, lr=1.0)
    want = expected(2, None, mesh.rank if "local" in kind else None)
    found = []
    for step in range(3):
        if "divided" in kind:
            reducer.set_loss_scale(scaler.get_scale())
        before = [p.detach().clone() for p in model.parameters()]
        with coalesce_grad_reduction(reducer) if kind == "window" else contextlib.nullcontext():
            for m in range(2):
                factor = float("inf") if step == 1 and m == 0 and mesh.rank == 1 else 1.0
                with reducer.microbatch(last=m == 1):
                    scaler.scale(loss_of(model, mesh.rank) * factor).backward()
        assert reducer.found_inf() is (step == 1)
        if "local" not in kind and "sharded" not in kind:
            reducer.gather_gradients()
        if step == 2:
            scaler.unscale_(taking)
        scaler.step(taking)
        scaler.update()
        same = all(map(torch.equal, before, model.parameters()))
        for p, was, to, start in zip(model.parameters(), before, want.parameters(), make_model().parameters(),
                                     strict=True):
            assert same or torch.allclose(p - was, 2 * (to - start), rtol=1e-5, atol=1e-5)
        found.append([same, scaler.get_scale()])
    return found


@on_mesh(1, 2)
def test_all_ranks_skip_together(mesh: hsdp.Mesh) -> None:
    for kind in ("gathered", "fused", "local", "fused local", "sharded", "divided sharded", "own",
                 "own local", "own sharded", "window"):
        found = train_with_an_infinity(mesh, kind)
        assert found == [[False, 1024.0], [True, 512.0], [False, 512.0]], kind


def test_an_infinity_counts_for_optimizers_that_hold_nothing_of_it(mesh: hsdp.Mesh) -> None:
    model, reducer, _, _ = attached(mesh)
    scaler = hsdp.torch.GradScaler(reducer, **OPTIONS)
    with reducer.microbatch(last=True):
        scaler.scale(loss_of(model) * float("inf")).backward()
    copy = nn.Parameter(torch.zeros(1))
    copy.grad = torch.ones(1)
    scaler.step(torch.optim.SGD([copy], 1.0))
    scaler.update()
    assert copy.item() == 0 and scaler.get_scale() == SCALE / 2


@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_slices_of_ones_own(mesh: hsdp.Mesh, own: bool, divided: bool) -> None:
    """Parameters whose .grad is the shard: it is unscaled once, and hsdp knows."""
    model, reducer, _, scaler = attached(mesh, divided)
    if own:
        scaler = hsdp.torch.GradScaler(reducer, **OPTIONS)
    run(reducer, model, scaler)
    slices = []
    for name, p in model.named_parameters():
        slices.append(nn.Parameter(p.detach().flatten()))  # shares the parameter's memory
        slices[-1].grad = torch.from_dlpack(reducer.shard(name))
    optimizer = torch.optim.SGD(slices, 1.0)
    if not divided:
        assert "times 1024" in message_of(lambda: reducer.clip_grad_norm_(0.5))
    clip_and_step(reducer, scaler, optimizer)
    scaler.update()
    assert close(model, expected(1, 0.5))


class TakesShards(torch.optim.SGD):
    """An optimizer as users might write it."""

    takes_shards = True
    reducer: hsdp.Reducer
    model: nn.Module

    def step(self, closure: Any = None) -> None:
        for name, p in self.model.named_parameters():
            p.data -= torch.from_dlpack(self.reducer.shard(name)).view_as(p)


@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("gathers", [False, True])
def test_an_optimizer_that_takes_shards(mesh: hsdp.Mesh, divided: bool, gathers: bool) -> None:
    model, reducer, _, scaler = attached(mesh, divided)
    optimizer = TakesShards(model.parameters(), 1.0)
    optimizer.reducer, optimizer.model = reducer, model
    run(reducer, model, scaler)
    if gathers:
        reducer.gather_gradients()
    if not divided:
        assert "TakesShards.step: expected gradients without" in message_of(optimizer.step)
    scaler.unscale_(optimizer)
    norm = reducer.clip_grad_norm_(0.5)
    if gathers:
        assert norm > float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)) > 0.49
        assert "clipped by torch" in message_of(optimizer.step)
        reducer.gather_gradients()
    scaler.step(optimizer)
    assert close(model, expected(1, 0.5))


def test_a_sharded_optimizer_is_unscaled_once(mesh: hsdp.Mesh) -> None:
    model, reducer, _, scaler = attached(mesh)
    optimizer = ShardedOptimizer(torch.optim.SGD, model, reducer, lr=1.0, max_grad_norm=0.5)
    run(reducer, model, scaler)
    assert "ShardedOptimizer.step: expected gradients without" in message_of(optimizer.step)
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert "unscaled already" in message_of(lambda: scaler.step(optimizer))
    assert close(model, expected(1, 0.5))


def test_where_nothing_is_scaled(mesh: hsdp.Mesh) -> None:
    """A scaler for other parameters, a disabled scaler, and a loss that is scaled for later use."""
    model, reducer, optimizer, scaler = attached(mesh)
    other = make_model()
    theirs = torch.optim.SGD(other.parameters(), 1.0)
    scaler.scale(loss_of(other)).backward()
    with reducer.microbatch(last=True):
        loss_of(model).backward()
        scaled = scaler.scale([loss_of(other), (loss_of(other),)])
    scaled[0].backward()
    scaled[1][0].backward()
    reducer.gather_gradients()
    reducer.clip_grad_norm_(1e6)
    nn.utils.clip_grad_norm_(model.parameters(), 1e6)
    optimizer.step()
    assert close(model, expected(1, None))
    scaler.step(theirs)
    scaler.update()
    off = torch.amp.GradScaler(device="cpu", enabled=False)
    run(reducer, model, off)
    reducer.gather_gradients()
    reducer.clip_grad_norm_(0.5)
    off.unscale_(optimizer)
    off.step(optimizer)


@pytest.mark.parametrize("accumulate", ["buffer", "grad"])
def test_windows(mesh: hsdp.Mesh, accumulate: str) -> None:
    model, reducer, optimizer, scaler = attached(mesh)
    with coalesce_grad_reduction(reducer, accumulate=accumulate):
        half = 0.5 * loss_of(model)
        scaler.scale((half,))[0].backward(retain_graph=True)
        half.backward(scaler.scale(torch.ones(())))
    assert "times 1024" in message_of(lambda: reducer.clip_grad_norm_(0.5))
    reducer.gather_gradients()
    clip_and_step(reducer, scaler, optimizer)
    assert close(model, expected(1, 0.5))


def test_several_reducers_and_parameters_of_nobody(mesh: hsdp.Mesh) -> None:
    models = [make_model() for _ in range(3)]
    reducers = [hsdp.Reducer(mesh), hsdp.Reducer(mesh)]
    for reducer, model in zip(reducers, models, strict=False):
        reducer.attach(model)
    optimizer = torch.optim.SGD(nn.ModuleList(models).parameters(), 1.0)
    scaler = torch.amp.GradScaler(**OPTIONS)
    reducers[1].set_loss_scale(SCALE)  # only one of them
    for reducer, model in zip(reducers, models, strict=False):
        run(reducer, model, scaler)
        reducer.gather_gradients()
    scaler.scale(loss_of(models[2])).backward()
    assert "times 1024" in message_of(lambda: hsdp.clip_grad_norm_(reducers, 1.0))
    scaler.unscale_(optimizer)
    assert float(hsdp.clip_grad_norm_(reducers, 1e6)) == pytest.approx((2 * 570.0) ** 0.5)
    scaler.step(optimizer)
    assert all(close(model, expected(1, None)) for model in models)
