"""zero_grad() of optimizers and modules: it drops the gradients, or it says what would remain."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_rank import attached_to, mesh
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import hsdp
from hsdp.zero import ShardedOptimizer, coalesce_grad_reduction


def make_model() -> nn.Linear:
    model = nn.Linear(3, 2)  # whole numbers, so that steps are exact
    for p in model.parameters():
        nn.init.constant_(p, 5.0)
    return model


def backward(model: nn.Module, factor: float = 1.0) -> None:
    (model(torch.ones(1, 3)).sum() * factor).backward()


def stepped(model: nn.Module, by: float) -> bool:
    """Whether SGD with a learning rate of 1 moved it by that much."""
    return all(bool((p == 5.0 - by).all()) for p in model.parameters())


Attached = tuple[nn.Linear, hsdp.Reducer, torch.optim.Optimizer]


def attached(mesh: hsdp.Mesh, keep_grads: bool = False) -> Attached:
    model = make_model()
    return model, attached_to(model, mesh, keep_grads), torch.optim.SGD(model.parameters(), 1.0)


def who(model: nn.Module, optimizer: torch.optim.Optimizer, kind: str) -> Callable[..., None]:
    return model.zero_grad if kind == "model" else optimizer.zero_grad


PENDING = r"zero_grad: expected.*'(weight|bias)'.*reducer.finish\(\).*reducer.discard\(\).*reducer.abandon_step\(\)"


@pytest.mark.parametrize("kind", ["model", "optimizer"])
@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("keep_grads", [False, True])
def test_pending_microbatches(
    mesh: hsdp.Mesh, kind: str, set_to_none: bool, keep_grads: bool
) -> None:
    model, reducer, optimizer = attached(mesh, keep_grads)
    zero_grad = who(model, optimizer, kind)
    with reducer.microbatch(last=False):
        zero_grad(set_to_none)  # no gradient has come yet
        backward(model)
    with pytest.raises(hsdp.UsageError, match=PENDING):
        zero_grad(set_to_none)
    with pytest.raises(hsdp.UsageError, match=PENDING), reducer.microbatch(last=True):
        zero_grad(set_to_none=set_to_none)  # the block drops the step
    zero_grad(set_to_none)
    for drop in (reducer.discard, reducer.abandon_step):
        with reducer.microbatch(last=False):
            backward(model)
        drop()
        zero_grad(set_to_none)
    with reducer.microbatch(last=True):
        backward(model, 2.0)
    if not keep_grads:
        reducer.gather_gradients()
    optimizer.step()
    zero_grad(set_to_none)
    assert stepped(model, 2.0)
    with reducer.microbatch(last=False):
        backward(model)
    with pytest.warns(RuntimeWarning, match="reducer: close: "):
        reducer.close()
    zero_grad(set_to_none)


def test_the_open_microbatch(mesh: hsdp.Mesh) -> None:
    model, reducer, optimizer = attached(mesh)
    with pytest.raises(hsdp.UsageError, match=PENDING), reducer.microbatch(last=True):
        backward(model)
        optimizer.zero_grad()
    with pytest.raises(hsdp.UsageError, match=PENDING), coalesce_grad_reduction(reducer):
        backward(model)
        optimizer.zero_grad()


def test_windows_that_add_up_in_place(mesh: hsdp.Mesh) -> None:
    model, reducer, optimizer = attached(mesh)
    for set_to_none in (False, True):
        with pytest.raises(hsdp.UsageError, match=PENDING):
            with coalesce_grad_reduction(reducer, accumulate="grad"):
                optimizer.zero_grad()
                backward(model)
                optimizer.zero_grad(set_to_none)
        optimizer.zero_grad()
    with coalesce_grad_reduction(reducer, accumulate="grad"):
        optimizer.zero_grad()
        backward(model)
    reducer.gather_gradients()
    optimizer.step()
    assert stepped(model, 1.0)


def test_what_is_not_concerned(mesh: hsdp.Mesh) -> None:
    """Other models, other parts, and gradients that a user puts into p.grad between microbatches."""
    model, reducer, optimizer = attached(mesh)
    other = make_model()
    with reducer.microbatch(last=False):
        backward(model)
    backward(other)
    other.zero_grad()
    torch.optim.SGD(other.parameters(), 1.0).zero_grad()
    nn.ModuleList([other]).zero_grad()
    with pytest.raises(hsdp.UsageError, match="ModuleList.zero_grad"):
        nn.ModuleList([other, model]).zero_grad()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.zero_grad()
    get_optimizer_state_dict(model, torch.optim.AdamW(model.parameters()))
    assert all(p.grad is None for p in model.parameters())
    with reducer.microbatch(last=True):
        backward(model)
    reducer.gather_gradients()
    optimizer.step()
    assert stepped(model, 2.0)


@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("keep_grads", [False, True])
@pytest.mark.parametrize("kind", ["model", "optimizer"])
def test_zeroed_before_the_optimizer(
    mesh: hsdp.Mesh, keep_grads: bool, set_to_none: bool, kind: str
) -> None:
    model, reducer, optimizer = attached(mesh, keep_grads)
    zero_grad = who(model, optimizer, kind)
    steps = 0.0
    for gathers in (False, True, True):
        with reducer.microbatch(last=True):
            backward(model)
        zero_grad(set_to_none)  # p.grad is filled again, or the step was dropped
        if gathers:
            reducer.gather_gradients()
            optimizer.step()
            steps += 1.0
        assert stepped(model, steps)
    for gathers in {not keep_grads, True}:
        with reducer.microbatch(last=True):
            backward(model)
        if gathers:
            reducer.gather_gradients()
        zero_grad(set_to_none)
        for call in (optimizer.step, lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0)):
            with pytest.raises(hsdp.UsageError, match="'weight'.*zeroed since.*after the optimizer"):
                call()
        for p in model.parameters():  # a gradient that a user puts there is the user's
            p.grad = torch.zeros_like(p)
        optimizer.step()
    assert stepped(model, steps)
    with reducer.microbatch(last=True):
        zero_grad(set_to_none)
        backward(model)
    reducer.gather_gradients()
    optimizer.step()
    zero_grad(set_to_none)
    assert stepped(model, steps + 1.0)


def test_local_sums_that_are_missing(mesh: hsdp.Mesh) -> None:
    model = nn.ModuleList([make_model(), make_model()])
    reducer = attached_to(model, mesh, keep_grads=True, missing="zero")
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    optimizer.step()  # there was no step yet
    with reducer.microbatch(last=True):
        backward(model[0])
    optimizer.step()  # the second one got no gradient, as in torch
    assert stepped(model[0], 1.0) and stepped(model[1], 0.0)
    model[0].bias.grad = None
    with pytest.raises(hsdp.UsageError, match="'0.bias'.*zeroed since"):
        optimizer.step()
    with reducer.microbatch(last=False):
        backward(model[0])
    reducer.discard()
    optimizer.step()
    assert stepped(model[0], 1.0)


def test_several_optimizers(mesh: hsdp.Mesh) -> None:
    model, reducer, _ = attached(mesh)
    one, other = (torch.optim.SGD([p], 1.0) for p in (model.weight, model.bias))
    for _ in range(2):
        with reducer.microbatch(last=True):
            backward(model)
        reducer.gather_gradients()
        one.step()
        one.zero_grad(set_to_none=False)
        other.step()
        other.zero_grad()
    assert stepped(model, 2.0)


@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("kind", ["model", "optimizer"])
def test_a_sharded_optimizer(mesh: hsdp.Mesh, kind: str, set_to_none: bool) -> None:
    model, reducer, _ = attached(mesh)
    optimizer = ShardedOptimizer(torch.optim.SGD, model, reducer, lr=1.0)
    zero_grad = who(model, optimizer, kind)
    for step in range(3):
        zero_grad(set_to_none)
        with reducer.microbatch(last=True):
            zero_grad(set_to_none)
            backward(model)
        optimizer.step()
        zero_grad(set_to_none)
        assert stepped(model, 1.0 + step)
    with reducer.microbatch(last=False):
        backward(model)
    with pytest.raises(hsdp.UsageError, match=PENDING):
        zero_grad(set_to_none)
    with reducer.microbatch(last=True):
        backward(model)
    zero_grad(set_to_none)
    with pytest.raises(hsdp.UsageError, match="ShardedOptimizer.step.*zeroed since"):
        optimizer.step()
    with reducer.microbatch(last=True):
        backward(model)

    def closure() -> None:  # as Lightning's closure
        with reducer.microbatch(last=True):
            zero_grad(set_to_none)
            backward(model)

    optimizer.step(closure)
    assert stepped(model, 4.0)


def test_a_skipped_first_step_is_saved(mesh: hsdp.Mesh) -> None:
    """torch makes the states that it saves with a step on zeros and zero_grad()."""
    model, reducer, _ = attached(mesh)
    optimizer: Any
    for optimizer in (torch.optim.AdamW(model.parameters(), 1.0),
                      ShardedOptimizer(torch.optim.AdamW, model, reducer, lr=1.0)):
        scaler = torch.amp.GradScaler("cpu")
        with reducer.microbatch(last=True):
            scaler.scale(model(torch.full((1, 3), torch.inf)).sum()).backward()
        if isinstance(optimizer, torch.optim.AdamW):
            reducer.gather_gradients()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        get_optimizer_state_dict(model, optimizer)
        assert stepped(model, 0.0)


def test_two_models_of_one_reducer_are_told_apart(mesh: hsdp.Mesh) -> None:
    first, second = make_model(), make_model()
    reducer = attached_to(nn.ModuleDict({"first": first}), mesh, missing="zero", name="gan")
    reducer.attach(nn.ModuleDict({"second": second}))
    optimizer = torch.optim.SGD(second.parameters(), 1.0)
    with reducer.microbatch(last=False):
        backward(first)
        second.zero_grad()
        optimizer.zero_grad()
        with pytest.raises(hsdp.UsageError, match=r"'first\..*\(reducer 'gan'\)$"):
            first.zero_grad()
    optimizer.zero_grad()
    with reducer.microbatch(last=False):
        backward(second)
        with pytest.raises(hsdp.UsageError, match=r"'second\..*\(reducer 'gan'\)$"):
            optimizer.zero_grad()
    reducer.discard()
    reducer.close()


def test_what_is_refused_outside_of_a_reducers_calls_names_it(mesh: hsdp.Mesh) -> None:
    model = make_model()
    reducer = attached_to(model, mesh, name="critic")
    with pytest.raises(hsdp.UsageError, match="^reducer 'critic': gradient of .*open microbatch"):
        backward(model)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    with reducer.microbatch(last=True):
        backward(model)
    with pytest.raises(hsdp.UsageError, match=r"^SGD.step: .*\(reducer 'critic'\)$"):
        optimizer.step()
    sharded = ShardedOptimizer(torch.optim.SGD, model, reducer, lr=1.0)
    sharded.step()
    with pytest.raises(hsdp.UsageError, match=r"^zero: .*a new step.*\(reducer 'critic'\)$"):
        sharded.step()
    with pytest.raises(hsdp.UsageError, match=r"^zero: .*already.*\(reducer 'critic'\)$"):
        ShardedOptimizer(torch.optim.SGD, model, reducer, lr=1.0)
    with (
        pytest.raises(hsdp.UsageError, match=r"^uneven: .*\(reducer 'critic'\)$"),
        contextlib.closing(hsdp.uneven(reducer, [1])) as loop,
    ):
        next(loop)
        next(hsdp.uneven(reducer, [1]))
    reducer.close()


class OwnZeroGrad(torch.optim.SGD):
    """As optimizers that define zero_grad() do."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None


class Derived(OwnZeroGrad):
    pass


def test_an_optimizer_with_a_zero_grad_of_its_own(mesh: hsdp.Mesh) -> None:
    model, reducer, _ = attached(mesh)
    optimizer = Derived(model.parameters(), 1.0)
    with reducer.microbatch(last=True):
        backward(model)
    reducer.gather_gradients()
    optimizer.step()
    optimizer.zero_grad()
    with reducer.microbatch(last=False):
        backward(model)
    with pytest.raises(hsdp.UsageError, match=PENDING.replace("zero_grad", "Derived.zero_grad")):
        optimizer.zero_grad()
    reducer.discard()
    reducer.close()


@pytest.mark.parametrize("missing", ["zero", "error"])
def test_a_step_within_the_backward_pass(mesh: hsdp.Mesh, missing: Any) -> None:
    model = make_model()
    optimizers = {p: torch.optim.SGD([p], 1.0) for p in model.parameters()}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())  # before attach
    reducer = attached_to(model, mesh, missing=missing)
    with (
        pytest.raises(hsdp.UsageError, match="SGD.step: expected a call after the microbatch"),
        reducer.microbatch(last=True),
    ):
        backward(model)
    assert stepped(model, 0.0)
    reducer.close()


def test_a_step_with_microbatches_pending(mesh: hsdp.Mesh) -> None:
    model, reducer, optimizer = attached(mesh)
    with reducer.microbatch(last=False):
        backward(model)
    for call in (optimizer.step, lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0)):
        with pytest.raises(hsdp.UsageError, match=r"last microbatch.*last=True.*reducer.finish\(\)"):
            call()
    with pytest.raises(hsdp.UsageError, match="^reducer: gather_gradients: .*microbatches pending"):
        reducer.gather_gradients()
    reducer.finish()
    reducer.gather_gradients()
    optimizer.step()
    assert stepped(model, 1.0)
    reducer.close()
