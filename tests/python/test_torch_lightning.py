"""HsdpStrategy beside Lightning's DDPStrategy: the same losses and weights."""

from __future__ import annotations

import importlib
import os
import re
import sys
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from conftest import Launcher, own_rank
from same_tensors import differing_ranks, max_difference, parameters_of
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import hsdp

pytest.importorskip("lightning")

import lightning.pytorch as pl  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy  # noqa: E402

from hsdp.integrations.lightning import HsdpStrategy  # noqa: E402

NEAR = 1e-6


@cache  # Lightning removes it from the environment after a fit()
def job_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


class Model(pl.LightningModule):
    def __init__(
        self,
        optimizer: str = "SGD",
        dropout: float = 0.2,
        checkpointing: bool = False,
        spare: bool = False,
    ) -> None:
        super().__init__()
        torch.manual_seed(own_rank())  # rank 0's weights are used
        self.first = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Tanh())
        self.middle = nn.Sequential(nn.Linear(12, 12), nn.Dropout(dropout), nn.Tanh())
        self.last = nn.Linear(12, 1)
        self.spare = nn.Linear(3, 3) if spare else None
        self.optimizer = optimizer
        self.checkpointing = checkpointing
        self.losses: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = checkpoint(self.middle, x, use_reentrant=False) if self.checkpointing else self.middle(x)
        return self.last(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = (self(x) - y).square().mean()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("held_out", (self(x) - y).square().mean(), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        held_out = self.trainer.callback_metrics.get("held_out")
        if held_out is not None:
            self.losses.append(float(held_out))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        self.losses.append(float(torch.stack(norms).norm()))

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        if self.optimizer == "SGD":
            return torch.optim.SGD(trained, lr=0.05, momentum=0.9)
        return torch.optim.AdamW(trained, lr=0.02)


class FailingModel(Model):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1 and batch_idx == 2:
            raise ValueError("a bad batch")
        return super().training_step(batch, batch_idx)


class ManualModel(Model):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def make_adapted_model() -> Model:
    import peft

    model = Model()
    model.middle[0] = peft.get_peft_model(
        nn.Sequential(nn.Linear(12, 12)), peft.LoraConfig(r=2, target_modules=["0"])
    )
    model.first.requires_grad_(False)
    return model


def make_loader(seed: int, count: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True).tanh()), batch_size=2)


def fit(
    strategy: Any,
    make_model: Callable[[], Model] = Model,
    ckpt_path: str | None = None,
    folder: str | None = None,
    **options: Any,
) -> pl.Trainer:
    """Saves in the folder, if there is one."""
    defaults: dict[str, Any] = {
        "max_epochs": 1, "logger": False, "enable_checkpointing": False, "devices": job_size(),
        "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0,
    }
    if folder is not None:
        place = f"{folder}/{type(strategy).__name__}"
        options["callbacks"] = [ModelCheckpoint(place, filename="{step}", save_top_k=-1)]
        options["enable_checkpointing"] = True
    trainer = pl.Trainer(accelerator="cpu", strategy=strategy, **{**defaults, **options})
    model = make_model()
    torch.manual_seed(5)  # for dropout
    trainer.fit(model, make_loader(2, 20), make_loader(3, 8), ckpt_path=ckpt_path)
    return trainer


def differences(one: pl.Trainer, other: pl.Trainer) -> dict[str, float]:
    left: Any = one.lightning_module
    right: Any = other.lightning_module
    assert len(left.losses) == len(right.losses) > 4
    return {
        "weights": max_difference(left.state_dict(), right.state_dict()),
        "losses": max(abs(a - b) for a, b in zip(left.losses, right.losses, strict=True)),
    }


def fit_both(
    make_model: Callable[[], Model] = Model, ours: dict[str, Any] | None = None, **options: Any
) -> tuple[dict[str, Any], Any]:
    """How far a training with hsdp is from one with DDP; and its trainer."""
    own = ours or {}
    ddp_options = {key: own[key] for key in ("find_unused_parameters",) if key in own}
    theirs = fit(DDPStrategy(**ddp_options), make_model, **options)
    trainer: Any = fit(HsdpStrategy(**own), make_model, **options)
    assert trainer.strategy.reducer.closed
    found = {
        **differences(theirs, trainer),
        "moved": max_difference(parameters_of(make_model()), parameters_of(trainer.lightning_module)),
        "differing ranks": differing_ranks(trainer.lightning_module),
        "steps": trainer.strategy.reducer.stats().step_count,
    }
    return found, trainer


def accumulated_and_resumed(folder: str) -> dict[str, Any]:
    """Five batches an epoch, two a step, so the third step of an epoch has one. Clipped, validated and
    saved."""
    options: dict[str, Any] = {
        "accumulate_grad_batches": 2, "gradient_clip_val": 0.05, "max_epochs": 2, "folder": folder
    }

    def make_model() -> Model:
        return Model(dropout=0.0)  # Lightning does not save the state of random numbers

    found, whole = fit_both(make_model, **options)
    resumed: Any = fit(HsdpStrategy(), make_model, f"{folder}/HsdpStrategy/step=3.ckpt", **options)
    losses = whole.lightning_module.losses
    found["resumed"] = [
        max_difference(whole.lightning_module.state_dict(), resumed.lightning_module.state_dict()),
        resumed.lightning_module.losses == losses[len(losses) // 2 :],
        resumed.strategy.reducer.stats().step_count,
    ]
    return found


def fitted_twice() -> dict[str, Any]:
    """A second fit() of the same Trainer."""
    found = []
    for strategy in (DDPStrategy(), HsdpStrategy()):
        trainer = fit(strategy)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(trainer.lightning_module, make_loader(2, 20), make_loader(3, 8))
        found.append(trainer)
    return differences(*found)


def error_of(function: Callable[[], Any]) -> str:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def quiet() -> None:
    import logging

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")


def fit_on_two(folder: str) -> dict[str, Any]:
    quiet()
    rows = {
        "whole": fit_both(lambda: Model("AdamW")),
        "bf16, checkpointing": fit_both(lambda: Model(checkpointing=True), precision="bf16-mixed"),
        "LoRA": fit_both(make_adapted_model),
        "unused parameters": fit_both(
            lambda: Model(spare=True), {"find_unused_parameters": True, "shard": 1}
        ),
    }
    # Ranks of one host share gradients by default.
    stats = {name: trainer.strategy.reducer.stats() for name, (_, trainer) in rows.items()}
    assert stats["whole"].reduce_scatter_count == 5 and stats["whole"].all_reduce_count == 0
    assert stats["unused parameters"].reduce_scatter_count == 0
    assert stats["unused parameters"].all_reduce_count == 5
    found: dict[str, Any] = {name: row for name, (row, _) in rows.items()}
    found["accumulated"] = accumulated_and_resumed(folder)
    found["twice"] = fitted_twice()
    found["unused, not said"] = error_of(lambda: fit(HsdpStrategy(), lambda: Model(spare=True)))
    found["manual"] = error_of(lambda: fit(HsdpStrategy(), ManualModel))
    found["failed"] = error_of(lambda: fit(HsdpStrategy(), FailingModel))
    return found


@pytest.fixture(scope="module")
def on_two(module_ranks: Launcher) -> list[dict[str, Any]]:
    return module_ranks(2, fit_on_two, str(module_ranks.folder / "output"))


# With two ranks and no accumulation both sides add the same two numbers, so the bits are equal.
@pytest.mark.parametrize("name", ["whole", "bf16, checkpointing", "LoRA", "unused parameters"])
def test_the_same_bits_as_ddp(on_two: list[dict[str, Any]], name: str) -> None:
    for found in on_two:
        row = found[name]
        assert (row["weights"], row["losses"], row["differing ranks"]) == (0, 0, 0)
        assert row["moved"] > 1e-3 and row["steps"] == 5


def test_accumulation_clipping_and_validation_are_ddps(on_two: list[dict[str, Any]]) -> None:
    for found in on_two:
        row = found["accumulated"]
        assert row["weights"] <= NEAR and row["losses"] <= NEAR and row["differing ranks"] == 0
        assert row["moved"] > 1e-3 and row["steps"] == 6


def test_a_resumed_training_has_the_bits_of_a_whole_one(on_two: list[dict[str, Any]]) -> None:
    assert [found["accumulated"]["resumed"] for found in on_two] == [[0, True, 3]] * 2


def test_it_fits_again(on_two: list[dict[str, Any]]) -> None:
    assert [found["twice"] for found in on_two] == [{"weights": 0, "losses": 0}] * 2


def test_errors_say_what_to_do(on_two: list[dict[str, Any]]) -> None:
    for found in on_two:
        assert re.match("UsageError: .*'spare.bias' .* missing=\"zero\"", found["unused, not said"])
        assert re.match("UsageError: .*automatic_optimization=False in ManualModel", found["manual"])


def test_a_rank_that_fails_is_named(on_two: list[dict[str, Any]]) -> None:
    assert on_two[1]["failed"] == "ValueError: a bad batch"
    assert re.match("StepAbortedError.*rank 1 of 2.*ValueError: a bad batch", on_two[0]["failed"])


@pytest.mark.parametrize(("options", "message"), [
    ({"mesh": 1, "replicate": 2}, "got both; leave one out"),
    ({"static_graph": True, "bucket_cap_mb": 25}, "got bucket_cap_mb, static_graph; options of"),
    ({"ddp_comm_hook": print}, "expected no ddp_comm_hook"),
    ({"reducer_options": {"divide_by": "ranks*microbatches"}}, "expected divide_by='ranks'"),
])
def test_what_is_not_supported(options: dict[str, Any], message: str) -> None:
    with pytest.raises(hsdp.UsageError, match=message):
        HsdpStrategy(**options)


def test_the_package_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "hsdp.integrations.lightning")
    monkeypatch.setitem(sys.modules, "lightning.pytorch.strategies", None)
    with pytest.raises(ImportError, match="pip install 'lightning"):
        importlib.import_module("hsdp.integrations.lightning")
