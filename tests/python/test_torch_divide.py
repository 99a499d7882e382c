"""What losses are divided by: the result is that of one process that sees everything."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from conftest import Launcher
from torch import nn

import hsdp

MICROBATCHES = 3


def make_model() -> nn.Module:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double().float()


def batch(rank: int, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a length of its own, with labels that do not count."""
    generator = torch.Generator().manual_seed(10 * rank + microbatch)
    length = 4 + 3 * rank + microbatch
    labels = torch.randint(0, 5, (length,), generator=generator)
    labels[::3] = -100
    return torch.randn(length, 6, generator=generator), labels


def loss_of(model: nn.Module, rank: int, m: int, reduction: str) -> torch.Tensor:
    inputs, labels = batch(rank, m)
    return nn.functional.cross_entropy(model(inputs), labels, reduction=reduction)


def gradients(model: nn.Module) -> list[float]:
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]).tolist()


def of_one_process(size: int, loss: Callable[[nn.Module], torch.Tensor]) -> list[float]:
    model = make_model()
    loss(model).backward()
    return gradients(model)


def run_steps() -> dict[str, list[float]]:
    with hsdp.init_mesh(2, 2) as mesh:
        found: dict[str, list[float]] = {}

        def run(name: str, reduction: str, before: Callable[[hsdp.Reducer, int], Any],
                scale: float = 1.0, **options: Any) -> None:
            model = make_model()
            with hsdp.Reducer(mesh, **options) as reducer:
                reducer.attach(model)
                for m in range(MICROBATCHES):
                    before(reducer, m)
                    with reducer.microbatch(last=m == MICROBATCHES - 1):
                        (loss_of(model, mesh.rank, m, reduction) * scale).backward()
                reducer.gather_gradients()
                found[name] = gradients(model)

        run("ranks", "mean", lambda *_: None, scale=1 / MICROBATCHES)
        run("ranks*microbatches", "mean", lambda *_: None, divide_by="ranks*microbatches")
        run("tokens", "sum", lambda reducer, m: reducer.divide_by_tokens(
            int((batch(mesh.rank, m)[1] != -100).sum())))
        return found


def test_the_table_of_losses(ranks: Launcher) -> None:
    def mean_of_means(model: nn.Module) -> torch.Tensor:
        losses = [loss_of(model, r, m, "mean") for r in range(4) for m in range(MICROBATCHES)]
        return torch.stack(losses).mean()

    def mean_of_tokens(model: nn.Module) -> torch.Tensor:
        losses = [loss_of(model, r, m, "sum") for r in range(4) for m in range(MICROBATCHES)]
        count = sum(int((batch(r, m)[1] != -100).sum()) for r in range(4) for m in range(MICROBATCHES))
        return torch.stack(losses).sum() / count

    means = torch.tensor(of_one_process(4, mean_of_means))
    tokens = torch.tensor(of_one_process(4, mean_of_tokens))
    assert not torch.allclose(means, tokens, rtol=1e-2)
    for found in ranks(4, run_steps):
        for name, expected in [("ranks", means), ("ranks*microbatches", means), ("tokens", tokens)]:
            torch.testing.assert_close(torch.tensor(found[name]), expected, rtol=1e-5, atol=1e-7)


def run_unused() -> dict[str, Any]:
    with hsdp.init_mesh(2, 2) as mesh:
        torch.manual_seed(0)
        model = nn.ModuleDict({k: nn.Linear(4, 4) for k in ("all", "one", "none")})
        reference = copy.deepcopy(model)
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(5))
        reducer = hsdp.Reducer(mesh, missing="zero")
        reducer.attach(model)
        options = {"lr": 0.125, "weight_decay": 0.5}
        optimizer = torch.optim.AdamW(model.parameters(), **options)
        other = torch.optim.AdamW(reference.parameters(), **options)
        sharded_model = copy.deepcopy(reference)
        sharded_reducer = hsdp.Reducer(mesh, missing="zero")
        sharded_reducer.attach(sharded_model)
        sharded = hsdp.zero.ShardedOptimizer(
            torch.optim.AdamW, sharded_model, sharded_reducer, max_grad_norm=1e9, **options
        )

        def loss(of: nn.ModuleDict, use_one: bool) -> torch.Tensor:
            y = of["all"](x)
            return (y + of["one"](x) if use_one else y).square().sum()

        # "one" is used on rank 2 alone, and in the second step on none.
        grads = []
        for step in range(3):
            for its in (reducer, sharded_reducer):
                of = model if its is reducer else sharded_model
                with its.microbatch(last=True):
                    loss(of, step != 1 and mesh.rank == 2).backward()
            reducer.gather_gradients()
            reducer.clip_grad_norm_(1e9)
            grads.append([name for name, p in model.named_parameters() if p.grad is None])
            optimizer.step()
            sharded.step()
            other.zero_grad()
            rest = 3 if step != 1 else 4
            (loss(reference, False) * (rest / 4)).backward()
            if step != 1:
                (loss(reference, True) / 4).backward()
            other.step()
        sharded.wait_parameters()
        with torch.no_grad():
            apart = max(
                float((a - b).abs().max())
                for of in (model, sharded_model)
                for a, b in zip(of.parameters(), reference.parameters(), strict=True)
            )
        same = all(
            torch.equal(a, b)
            for a, b in zip(model["none"].parameters(), reference["none"].parameters(), strict=True)
        )
        return {"grads": grads, "apart": apart, "same": same}


# As with DDP's find_unused_parameters: what no rank used keeps no gradient, and an optimizer leaves it.
def test_parameters_that_no_rank_uses_do_not_move(ranks: Launcher) -> None:
    none = ["none.weight", "none.bias"]
    one = ["one.weight", "one.bias"]
    for found in ranks(4, run_unused):
        assert found["grads"] == [none, [*one, *none], none]
        assert found["apart"] < 2e-6 and found["same"]
