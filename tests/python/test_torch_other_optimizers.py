"""Optimizers from outside torch under a ShardedOptimizer: they give what one process gives, or are refused
with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import on_mesh
from exact_gradients import assign, assign_mean
from one_rank import attached_to, mesh, message_of
from prodigyopt import Prodigy
from schedulefree import AdamWScheduleFree
from torch import nn

import hsdp
from hsdp.zero import ShardedOptimizer


def make_model() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(7, 33), nn.GELU(), nn.Linear(33, 3))


def require_equal(optimizer: ShardedOptimizer, model: nn.Module, other: nn.Module) -> None:
    """Equal to the bit."""
    whole = optimizer.full_model_state_dict(model)
    for name, values in other.state_dict().items():
        assert torch.equal(whole[name], values), name


@on_mesh(1, 2)
def test_schedule_free_ones_train_and_are_evaluated(mesh: hsdp.Mesh) -> None:
    for stage in (1, 2, 3):
        model, alone = make_model(), make_model()
        reducer = attached_to(model, mesh)
        optimizer = ShardedOptimizer(
            AdamWScheduleFree, model, reducer, stage=stage, persistence_threshold=0, warmup_steps=2
        )
        reference = AdamWScheduleFree(alone.parameters(), warmup_steps=2)
        reference.train()
        for step in range(6):
            with reducer.microbatch(last=True):
                assign(model, step, mesh.rank)
            if step == 0:
                assert "optimizer.train() before steps" in message_of(optimizer.step)
                optimizer.train()
            optimizer.step()
            assign_mean(alone, step, mesh.size)
            reference.step()
            if step in (2, 4):
                reference.eval()
                optimizer.eval()
                require_equal(optimizer, model, alone)
                assert "or eval() since" in message_of(optimizer.step)
                reference.train()
                optimizer.train()
            require_equal(optimizer, model, alone)
        assert isinstance(optimizer.inner, AdamWScheduleFree)
        optimizer.close()
        assert "an open optimizer" in message_of(optimizer.eval)
        reducer.close()


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("saved_in", ["train", "eval"])
@on_mesh(1, 2)
def test_schedule_free_ones_are_saved_in_both_modes(mesh: hsdp.Mesh, saved_in: str, stage: Any) -> None:
    model, alone, other = make_model(), make_model(), make_model()
    reducer = attached_to(model, mesh)
    optimizer = ShardedOptimizer(AdamWScheduleFree, model, reducer, stage=stage, persistence_threshold=0)
    reference = AdamWScheduleFree(alone.parameters())
    for one in (optimizer, reference):
        one.train()

    def step(number: int) -> None:
        with reducer.microbatch(last=True):
            assign(model, number, mesh.rank)
        optimizer.step()
        assign_mean(alone, number, mesh.size)
        reference.step()

    step(0)
    step(1)
    getattr(optimizer, saved_in)()
    getattr(reference, saved_in)()
    saved = optimizer.full_state_dict()
    want = reference.state_dict()["state"]
    for number, states in saved["state"].items():
        for key in ("z", "exp_avg_sq"):
            assert torch.equal(states[key], want[number][key])
    loaded = AdamWScheduleFree(other.parameters())
    loaded.load_state_dict(saved)
    other.load_state_dict(optimizer.full_model_state_dict(model))
    optimizer.train()
    reference.train()
    step(2)
    optimizer.load_state_dict(saved)  # as in a run that starts from it
    with torch.no_grad():
        model.load_state_dict(other.state_dict())
        alone.load_state_dict(other.state_dict())
    reference.load_state_dict(loaded.state_dict())
    if saved_in == "eval":
        with reducer.microbatch(last=True):
            assign(model, 9, mesh.rank)
        assert "optimizer.train() before steps" in message_of(optimizer.step)
    optimizer.train()
    reference.train()
    step(3)
    require_equal(optimizer, model, alone)
    reducer.close()


class Estimating(torch.optim.Optimizer):
    """Its step size grows with how well all gradients agree in direction, and is shown nowhere."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr})
        self._size = 1e-6

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        along = total = 0.0
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(start=p.clone(), sum=torch.zeros_like(p))
                along += float(torch.dot(p.grad.flatten(), (state["start"] - p).flatten()))
                state["sum"] += p.grad
                total += float(state["sum"].abs().sum())
        self._size = max(self._size, along / total)
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=self._size * group["lr"])


def test_a_rate_of_zero_hides_nothing(mesh: hsdp.Mesh) -> None:
    """A warm-up may begin with it."""
    model = nn.Linear(7, 3, bias=False)
    reducer = attached_to(model, mesh)
    for lr in (0.0, torch.tensor(0.0)):
        for groups in ({"params": model, "lr": lr}, {"params": [{"params": [model.weight], "lr": lr}]}):
            text = message_of(lambda: ShardedOptimizer(torch.optim.Adafactor, reducer=reducer, **groups))
            assert "Adafactor, which gives other values" in text
    ShardedOptimizer(torch.optim.AdamW, model, reducer, lr=0.0)


@pytest.mark.parametrize("layout", ["flat", "whole"])
def test_what_is_computed_of_all_elements_is_refused(mesh: hsdp.Mesh, layout: Any) -> None:
    model = nn.Linear(7, 3, bias=False)
    reducer = attached_to(model, mesh, layout=layout)

    def refusal(cls: Any) -> str:
        return message_of(lambda: ShardedOptimizer(cls, model, reducer))

    class Keeping(torch.optim.SGD):
        """A group setting that is not a number, or does not count, belongs to each rank."""

        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.1)
            for group in self.param_groups:
                group.update(best=float("nan"), key=object(), generator=torch.Generator(),
                             table={"a": torch.ones(2)}, last=torch.tensor(float("nan")))

    assert "got Prodigy, which computes 'd" in refusal(Prodigy)
    assert "step it unsharded, after reducer.gather_gradients()" in refusal(Prodigy)
    assert "other values" in refusal(Estimating)
    optimizer = ShardedOptimizer(Keeping, model, reducer)
    optimizer.train()  # every class has it, for loops that call it
    optimizer.eval()
    with reducer.microbatch(last=True):
        assign(model, 0, 0)
    optimizer.step()


def test_a_tensor_as_lr_is_of_one_group(mesh: hsdp.Mesh) -> None:
    model = nn.Linear(3, 2)
    lr = torch.tensor(0.5)
    groups = [{"params": [p]} for p in model.parameters()]
    reducer = attached_to(model, mesh)
    optimizer = ShardedOptimizer(torch.optim.Adam, groups, reducer, lr=lr)
    optimizer.param_groups[0]["lr"] = 0.25
    with reducer.microbatch(last=True):
        assign(model, 0, 0)
    optimizer.step()
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.25, 0.5] and lr == 0.5


class EightBits(torch.optim.Optimizer):
    """Like torchao's: an lr that must stay a tensor, and large states that are rounded in blocks."""

    def __init__(self, params: Any, lr: float = 0.125) -> None:
        super().__init__(params, {"lr": torch.tensor(lr)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not isinstance(group["lr"], torch.Tensor):
                raise RuntimeError("lr was changed to a non-Tensor object")
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                momentum = state["momentum"].mul_(0.5).add_(p.grad)
                if p.numel() >= 4096 and p.numel() % 256 == 0:
                    blocks = momentum.view(-1, 256)
                    scale = blocks.abs().amax(1, keepdim=True) / 127 + 1e-12
                    blocks.copy_((blocks / scale).round() * scale)
                p.sub_(momentum * group["lr"])


@on_mesh(1, 2)
def test_states_of_eight_bits(mesh: hsdp.Mesh) -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 5))

    model = make()
    reducer = attached_to(model, mesh)
    text = message_of(lambda: ShardedOptimizer(EightBits, model, reducer))
    assert "got EightBits, which gives other values on slices" in text and 'layout="whole"' in text
    reducer.close()
    for stage in (1, 2, 3):
        model, alone = make(), make()
        reducer = attached_to(model, mesh, layout="whole")
        optimizer = ShardedOptimizer(EightBits, model, reducer, stage=stage, persistence_threshold=0)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        reference = EightBits(alone.parameters())
        for step in range(4):
            with reducer.microbatch(last=True):
                assign(model, step, mesh.rank)
            if step == 2:
                optimizer.param_groups[0]["lr"] = 0.25  # as users do
                reference.param_groups[0]["lr"].fill_(0.25)
            optimizer.step()
            assign_mean(alone, step, mesh.size)
            reference.step()
            schedule.step()
            reference.param_groups[0]["lr"] *= 0.5
            require_equal(optimizer, model, alone)
        optimizer.close()
        reducer.close()
