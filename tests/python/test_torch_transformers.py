"""HsdpTrainer compared with transformers' Trainer, which wraps the model in DistributedDataParallel: the same
losses and weights. Models are made from small configs; nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Launcher, own_rank
from same_tensors import differing_ranks, max_difference, parameters_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hsdp

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")  # the ranks inherit it

import accelerate  # noqa: E402
import transformers  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402

from hsdp.integrations.transformers import HsdpTrainer  # noqa: E402

NEAR = 1e-6
WORDS, LENGTH = 32, 8


def make_gpt2() -> Any:
    torch.manual_seed(own_rank())  # rank 0's weights are used
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=WORDS, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2,
            bos_token_id=0, eos_token_id=0,
        )
    )


def make_adapted_gpt2() -> Any:
    import peft

    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.1)
    return peft.get_peft_model(make_gpt2(), config)


class TwoBranches(nn.Module):
    """A batch uses one branch or the other, and never the third. Has running statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(own_rank())
        self.norm = nn.BatchNorm1d(LENGTH)
        self.branches = nn.ModuleList(nn.Linear(LENGTH, 1) for _ in range(3))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        branch = self.branches[int(input_ids[0, 0]) % 2]
        values = branch(self.norm(input_ids / WORDS))
        return {"loss": (values.squeeze(1) - labels.float().mean(1) / WORDS).square().mean()}


def make_data(count: int, seed: int = 3) -> list[dict[str, torch.Tensor]]:
    """Sequences with different numbers of counted tokens."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for i in range(count):
        ids = torch.randint(1, WORDS, (LENGTH,), generator=generator)
        labels = ids.clone()
        labels[: i % 5] = -100
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def make_args(folder: str, **changed: Any) -> Any:
    options: dict[str, Any] = {
        "output_dir": folder, "use_cpu": True, "report_to": [], "disable_tqdm": True, "seed": 5,
        "per_device_train_batch_size": 2, "logging_steps": 1, "save_strategy": "no",
        "learning_rate": 0.05, "optim": "sgd", "num_train_epochs": 1,
    }
    return transformers.TrainingArguments(**{**options, **changed})


class OwnTrainer(transformers.Trainer):
    """A callback such as users have already."""

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.own_steps = getattr(self, "own_steps", 0) + 1
        return super().training_step(*args, **kwargs)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        loss = outputs["loss"] + 0.1 * outputs["logits"].square().mean()
        return (loss, outputs) if return_outputs else loss


class OwnHsdpTrainer(HsdpTrainer, OwnTrainer):
    pass


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def logged(trainer: Any) -> list[tuple[str, float]]:
    """All losses and norms of a training, in order."""
    names = ("loss", "grad_norm", "eval_loss")
    return [(k, float(row[k])) for row in trainer.state.log_history for k in names if k in row]


def differences(one: Any, other: Any) -> dict[str, Any]:
    left, right = logged(one), logged(other)
    assert [key for key, _ in left] == [key for key, _ in right] and len(left) > 4
    return {
        "weights": max_difference(state(one.model), state(other.model)),
        "logged": max(abs(a - b) for (_, a), (_, b) in zip(left, right, strict=True)),
    }


def make_trainer(
    kind: Any,
    folder: str,
    make_model: Callable[[], nn.Module] = make_gpt2,
    options: Any = None,
    **changed: Any,
) -> Any:
    return kind(
        make_model(), make_args(folder, **changed), train_dataset=make_data(20),
        eval_dataset=make_data(6, seed=4), **(options or {}),
    )


def train_both(
    make_model: Callable[[], nn.Module] = make_gpt2,
    prepare: Callable[[Any], None] = lambda trainer: None,
    kinds: tuple[Any, Any] = (transformers.Trainer, HsdpTrainer),
    options: dict[str, Any] | None = None,
    folder: str = "unused",
    **changed: Any,
) -> tuple[dict[str, Any], Any]:
    """How far a training with hsdp is from one with DDP; and its trainer."""
    trainers = []
    for kind, more in zip(kinds, ({}, options), strict=True):
        trainer = make_trainer(kind, f"{folder}/{kind.__name__}", make_model, more, **changed)
        prepare(trainer)
        trainer.train()
        trainers.append(trainer)
    ddp, ours = trainers
    assert isinstance(ddp.model_wrapped, nn.parallel.DistributedDataParallel)
    assert ours.model_wrapped is ours.model
    assert ours.reducer.closed
    found = {
        **differences(ddp, ours),
        "moved": max_difference(parameters_of(make_model()), parameters_of(ours.model)),
        "differing ranks": differing_ranks(ours.model),
        "steps": ours.reducer.stats().step_count,
    }
    return found, ours


def accumulated_and_resumed(folder: str) -> dict[str, Any]:
    """Five batches an epoch, two a step, so the third step of an epoch has one. Clipped, evaluated and
    saved."""
    changed = {
        "gradient_accumulation_steps": 2, "max_grad_norm": 0.1, "num_train_epochs": 2,
        "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 4,
    }
    found, whole = train_both(folder=folder, **changed)
    kept = f"{folder}/HsdpTrainer"
    resumed = make_trainer(HsdpTrainer, kept, **changed)
    resumed.train(resume_from_checkpoint=f"{kept}/checkpoint-4")
    resumed_steps = resumed.reducer.stats().step_count
    found["resumed"] = [differences(whole, resumed), resumed_steps]
    ddp = [make_trainer(transformers.Trainer, f"{folder}/Trainer", **changed) for _ in range(2)]
    ddp[0].train()
    ddp[1].train(resume_from_checkpoint=f"{folder}/Trainer/checkpoint-4")
    found["DDP resumed"] = differences(*ddp)
    return found


def with_loss_scaling() -> dict[str, Any]:
    """As on a GPU, where accelerate has a GradScaler for fp16. The first scale overflows."""

    def prepare(trainer: Any) -> None:
        accelerator = trainer.accelerator
        accelerator.state._mixed_precision = "fp16"
        accelerator.native_amp = True
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18)

    try:
        found, ours = train_both(prepare=prepare, max_grad_norm=0.1, learning_rate=0.1)
        found["scale"] = ours.accelerator.scaler.get_scale()
    finally:
        AcceleratorState._reset_state(True)
    return found


def trained_twice() -> dict[str, Any]:
    """Evaluated first and trained twice. Then a Trainer of the same model uses DDP as usual."""
    ours = make_trainer(HsdpTrainer, "unused")
    ours.evaluate()
    other = make_trainer(transformers.Trainer, "unused")
    for trainer in (other, ours):
        transformers.set_seed(7)  # for dropout
        trainer.train()
        trainer.train()
    found = differences(other, ours)
    plain = make_trainer(transformers.Trainer, "unused", lambda: ours.model)
    plain.train()
    found["DDP again"] = isinstance(plain.model_wrapped, nn.parallel.DistributedDataParallel)
    return found


class Failing(HsdpTrainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        if self.args.process_index == 1 and self.state.global_step == 2:
            raise ValueError("a bad batch")
        return super().compute_loss(*args, **kwargs)


class WithoutSuper(HsdpTrainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss)
        return loss.detach()


def error_of(kind: Any, **changed: Any) -> str:
    """The error that a training raises."""
    trainer = None
    try:
        trainer = make_trainer(kind, "unused", **changed)
        trainer.train()
    except (ValueError, hsdp.StepAbortedError) as error:
        assert trainer is None or trainer.reducer.closed
        return f"{type(error).__name__}: {error}"
    return "none"


def with_own_mesh() -> dict[str, Any]:
    with hsdp.init_mesh(replicate=2) as mesh:
        found, trainer = train_both(options={"mesh": mesh, "reducer_options": {"reduce_dtype": "bf16"}})
        found["open"] = not mesh.closed
    found["bytes"] = trainer.reducer.stats().replica_hop_bytes
    return found


def accelerate_loop(with_hsdp: bool) -> tuple[dict[str, torch.Tensor], int]:
    """A loop around an Accelerator: five batches for each rank and epoch, two a step. Its weights and
    steps."""
    torch.manual_seed(8)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model: nn.Module = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 4)
    x = torch.randn(20, 6)
    loader: Any = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=2, shuffle=True)
    optimizer, loader, scheduler = accelerator.prepare(optimizer, loader, scheduler)
    reducer = None
    if with_hsdp:
        model = accelerator.prepare_model(model, evaluation_mode=True)
        mesh = hsdp.init_mesh(shard=accelerator.num_processes)
        hsdp.broadcast_parameters(mesh, model)
        reducer = hsdp.Reducer(mesh)
        reducer.attach(model)
    else:
        model = accelerator.prepare_model(model)
    steps = 0
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                last = accelerator.sync_gradients
                with contextlib.nullcontext() if reducer is None else reducer.microbatch(last=last):
                    accelerator.backward((model(x) - y).square().mean())
                if last:
                    if reducer is not None:
                        reducer.gather_gradients()
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    steps += 1
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    if reducer is not None:
        reducer.close()
        mesh.close()
    return state(accelerator.unwrap_model(model)), steps


def accelerate_loops() -> list[float]:
    theirs, ours = accelerate_loop(False), accelerate_loop(True)
    assert theirs[1] == ours[1]
    return [max_difference(theirs[0], ours[0]), ours[1]]


def begin_in(folder: str) -> None:
    """Trainer makes its output folder even if nothing is saved."""
    transformers.logging.set_verbosity_error()
    os.makedirs(folder, exist_ok=True)
    os.chdir(folder)


def train_on_two(folder: str) -> dict[str, Any]:
    begin_in(folder)
    found: dict[str, Any] = {
        "whole": train_both(max_grad_norm=0.0, optim="adamw_torch", learning_rate=1e-3),
        "bf16, checkpointing": train_both(bf16=True, gradient_checkpointing=True),
        "LoRA": train_both(make_adapted_gpt2),
        "unused parameters": train_both(TwoBranches),
        "own Trainer": train_both(kinds=(OwnTrainer, OwnHsdpTrainer), options={"shard": 1}),
    }
    # Ranks of one host share gradients by default.
    stats = {name: trainer.reducer.stats() for name, (_, trainer) in found.items()}
    assert stats["whole"].reduce_scatter_count == 5 and stats["whole"].all_reduce_count == 0
    assert stats["own Trainer"].reduce_scatter_count == 0
    assert stats["own Trainer"].all_reduce_count == 5
    assert found["own Trainer"][1].own_steps == 5
    found = {name: row for name, (row, _) in found.items()}
    found["accumulated"] = accumulated_and_resumed(folder)
    found["twice"] = trained_twice()
    found["own mesh"] = with_own_mesh()
    found["scaled"] = with_loss_scaling()
    found["failed"], found["without super"] = error_of(Failing), error_of(WithoutSuper)
    found["loop of accelerate"] = accelerate_loops()
    found["FSDP"] = error_of(HsdpTrainer, fsdp=True)
    return found


def train_on_four(folder: str) -> dict[str, Any]:
    begin_in(folder)
    found, trainer = train_both(
        options={"replicate": 2}, gradient_accumulation_steps=2, max_grad_norm=0.1,
        num_train_epochs=2, folder=folder,
    )
    stats = trainer.reducer.stats()
    # Three batches for each rank and epoch, two a step: six sums in the shard group, four steps over the
    # replicas.
    found["hops"] = [stats.reduce_scatter_count, stats.all_reduce_count]
    return found


@pytest.fixture(scope="module")
def on_two(module_ranks: Launcher) -> list[dict[str, Any]]:
    return module_ranks(2, train_on_two, str(module_ranks.folder / "output"))


# With two ranks and no accumulation both sides add the same two numbers, so the bits are equal.
@pytest.mark.parametrize(
    "name", ["whole", "bf16, checkpointing", "LoRA", "unused parameters", "own Trainer", "scaled"]
)
def test_the_same_bits_as_ddp(on_two: list[dict[str, Any]], name: str) -> None:
    for found in on_two:
        row = found[name]
        assert (row["weights"], row["logged"], row["differing ranks"]) == (0, 0, 0)
        assert row["moved"] > 1e-3


def test_accumulation_clipping_and_evaluation_are_ddps(on_two: list[dict[str, Any]]) -> None:
    for found in on_two:
        row = found["accumulated"]
        assert row["weights"] <= NEAR and row["logged"] <= NEAR and row["differing ranks"] == 0
        assert row["steps"] == 6 and row["moved"] > 1e-3


def test_a_resumed_training_has_the_bits_of_a_whole_one(on_two: list[dict[str, Any]]) -> None:
    for found in on_two:
        same = {"weights": 0, "logged": 0}
        assert found["accumulated"]["DDP resumed"] == same
        assert found["accumulated"]["resumed"] == [same, 2]


def test_it_trains_again(on_two: list[dict[str, Any]]) -> None:
    for found in on_two:
        assert found["twice"] == {"weights": 0, "logged": 0, "DDP again": True}


@pytest.mark.parametrize(("name", "message"), [
    ("FSDP", "got fsdp in the arguments; leave fsdp"), ("without super", "a backward pass outside of one"),
])
def test_errors_say_what_to_do(on_two: list[dict[str, Any]], name: str, message: str) -> None:
    assert [bool(re.match(f"UsageError: .*{message}", found[name])) for found in on_two] == [True, True]


def test_a_mesh_and_options_are_taken(on_two: list[dict[str, Any]]) -> None:
    for found in on_two:
        row = found["own mesh"]
        assert row["open"] and row["differing ranks"] == 0
        assert 0 < row["weights"] < 1e-2  # bf16 on the wire


def test_a_step_is_skipped_where_the_scale_overflows(on_two: list[dict[str, Any]]) -> None:
    assert [found["scaled"]["scale"] < 2.0**18 for found in on_two] == [True, True]


def test_a_rank_that_fails_is_named(on_two: list[dict[str, Any]]) -> None:
    assert on_two[1]["failed"] == "ValueError: a bad batch"
    assert re.match("StepAbortedError.*rank 1 of 2.*a bad batch", on_two[0]["failed"])


def test_a_loop_of_accelerate(on_two: list[dict[str, Any]]) -> None:
    for found in on_two:
        difference, steps = found["loop of accelerate"]
        assert difference <= NEAR and steps == 6


def test_a_mesh_of_two_by_two(module_ranks: Launcher) -> None:
    for row in module_ranks(4, train_on_four, str(module_ranks.folder / "four")):
        assert row["weights"] <= NEAR and row["logged"] <= NEAR and row["differing ranks"] == 0
        assert row["moved"] > 1e-3 and row["hops"] == [6, 4]


def test_what_is_not_supported(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(**options: Any) -> Any:
        return make_trainer(HsdpTrainer, str(tmp_path), options=options)

    for options, message in [
        ({"mesh": 1, "shard": 2}, "got both; leave one out"),
        ({"reducer_options": {"divide_by": "ranks*microbatches"}}, "expected divide_by='ranks'"),
    ]:
        with pytest.raises(hsdp.UsageError, match=message):
            make(**options)
    with pytest.raises(hsdp.UsageError, match="training step within training"):
        make().training_step(None, {})
    with pytest.raises(hsdp.UsageError, match="expected an hsdp.Mesh"):
        make(mesh="2x2").train()
    args = make_args(str(tmp_path))
    args.deepspeed = "deepspeed.json"
    with pytest.raises(hsdp.UsageError, match="got deepspeed in the arguments; leave fsdp, deepspeed"):
        HsdpTrainer(make_gpt2(), args)
    kind = accelerate.utils.DistributedType.FSDP
    for of, name, value, message in [
        (transformers.GPT2LMHeadModel, "is_distributed_loading_by_transformers", property(lambda self: True),
         "got a model that from_pretrained has spread"),
        (accelerate.Accelerator, "parallelism_config", accelerate.ParallelismConfig(),
         "got a parallelism_config; leave"),
        (transformers.TrainingArguments, "n_gpu", property(lambda self: 2),
         "got one with 2 GPUs .DataParallel"),
        (accelerate.Accelerator, "distributed_type", property(lambda self: kind),
         "got accelerate's distributed type FSDP; leave fsdp"),
    ]:
        with monkeypatch.context() as patch, pytest.raises(hsdp.UsageError, match=message):
            patch.setattr(of, name, value, raising=False)
            make()


def test_packages_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "import sys, hsdp, hsdp.integrations\n"
        "print({'torch', 'transformers', 'lightning'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
    monkeypatch.delitem(sys.modules, "hsdp.integrations.transformers")
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(ImportError, match="got no accelerate; .* pip install 'accelerate.*' 'transformers"):
        importlib.import_module("hsdp.integrations.transformers")
