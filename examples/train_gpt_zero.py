"""Trains a small GPT with a sharded optimizer, and goes on from its last checkpoint on any mesh.

    hsdp_run -n 4 python examples/train_gpt_zero.py --folder run --die-at 50   # a rank is killed
    hsdp_run -n 2 python examples/train_gpt_zero.py --folder run               # goes on with two

Each rank of a shard group has AdamW's states only for its slices. Checkpoints use
torch.distributed.checkpoint and are written while the training continues; an optimizer on another mesh,
or torch's own, can read them. The folder also has the losses, one per line.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from beside_fsdp2 import join_gloo
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from train_gpt import MICROBATCHES, Gpt, Text, loss_of

import hsdp


class Training:
    """The model, its optimizer, and their progress."""

    def __init__(self, mesh: hsdp.Mesh, text: Text, folder: pathlib.Path) -> None:
        self.folder = folder
        self.step = 0
        torch.manual_seed(0)
        self.model = Gpt(text.character_count)
        self.reducer = hsdp.Reducer(mesh, reduce_dtype="bf16")
        self.reducer.attach(self.model)
        # Losses are means over a microbatch, so the sum is also divided by the number of microbatches.
        self.reducer.set_gradient_divide_factor(mesh.size * MICROBATCHES)
        self.optimizer = hsdp.zero.ShardedOptimizer(
            torch.optim.AdamW, self.model, self.reducer, max_grad_norm=1.0, lr=3e-3,
            betas=(0.9, 0.98),
        )

    def load_last(self) -> None:
        """Unfinished checkpoints have no metadata."""
        whole = [int(path.parent.name) for path in self.folder.glob("*/.metadata")]
        if not whole:
            return
        state = self._state()
        dcp.load(state, checkpoint_id=self.folder / str(max(whole)))
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"],
                       optim_state_dict=state["optimizer"])
        self.step = max(whole)

    def save(self) -> Future[Any]:
        """Saves in the background; the training may continue immediately."""
        saving = dcp.async_save(self._state(), checkpoint_id=self.folder / str(self.step))
        assert isinstance(saving, Future)
        return saving

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}


def train(mesh: hsdp.Mesh, text: Text, training: Training, until: int) -> Iterator[float]:
    while training.step < until:
        parts = text.batch(training.step).chunk(mesh.size * MICROBATCHES)
        total = 0.0
        for m in range(MICROBATCHES):
            with training.reducer.microbatch(last=m == MICROBATCHES - 1):
                loss = loss_of(training.model, parts[m * mesh.size + mesh.rank])
                loss.backward()
            total += loss.item() / MICROBATCHES
        training.optimizer.step()
        training.step += 1
        yield mesh.world.mean(total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--die-at", type=int, help="the step in which the last rank is killed")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    text = Text()
    asked.folder.mkdir(parents=True, exist_ok=True)
    losses = asked.folder / "losses.txt"
    size = hsdp.job_size()
    replicate = 2 if size % 4 == 0 else 1
    with hsdp.init_mesh(replicate=replicate, shard=size // replicate) as mesh:
        join_gloo(mesh)
        training = Training(mesh, text, asked.folder)
        training.load_last()
        begin = training.step
        known = losses.read_text().splitlines()[:begin] if begin else []
        saving: Future[Any] | None = None
        for loss in train(mesh, text, training, asked.steps):
            known.append(f"{loss:.6f}")
            if mesh.rank == 0:
                losses.write_text("\n".join(known) + "\n")
            if training.step % asked.save_every == 0:
                if saving is not None:
                    saving.result()
                saving = training.save()
            if training.step == asked.die_at and mesh.rank == mesh.size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
        if saving is not None:
            saving.result()
        if mesh.rank == 0:
            print(f"steps {begin} to {training.step} on {replicate}x{mesh.shard_size} ranks: "
                  f"loss {known[0]} -> {known[-1]}")
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
