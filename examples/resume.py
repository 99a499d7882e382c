"""Trains with a sharded optimizer and LoCo, is killed, and goes on with the bits of an undisturbed run.

    hsdp_run -n 4 python examples/resume.py --folder run --die-at 9   # a rank is killed
    hsdp_run -n 4 python examples/resume.py --folder run              # goes on from the last checkpoint

A checkpoint has weights, optimizer states, the schedule, LoCo's errors, the step, which tells where the
data continues, and each rank's random state, for dropout. Rank 0 prints a digest of all weights after
the last step. On another number of ranks the training continues, but with other bits.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import pathlib
import signal
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import hsdp

STEPS = 12
SAVE_EVERY = 4
MICROBATCHES = 2
ROWS = torch.randn(640, 16, generator=torch.Generator().manual_seed(0))


def rows_of(step: int, microbatch: int, mesh: hsdp.Mesh) -> torch.Tensor:
    """The rows depend only on the step, so a checkpoint needs nothing else about the data."""
    part_count = MICROBATCHES * mesh.size
    epoch, place = divmod(step, len(ROWS) // 64)
    order = torch.randperm(len(ROWS), generator=torch.Generator().manual_seed(epoch))
    batch = order[64 * place : 64 * (place + 1)]
    return ROWS[batch.chunk(part_count)[microbatch * mesh.size + mesh.rank]]


class Training:
    """The contents of a checkpoint."""

    def __init__(self, mesh: hsdp.Mesh) -> None:
        self.mesh = mesh
        self.step = 0
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1)
        )
        torch.manual_seed(1 + mesh.rank)  # each rank has its own dropout
        self.hop = hsdp.quant.LocoHop()
        self.reducer = hsdp.Reducer(mesh, divide_by="ranks*microbatches", replica_hop=self.hop)
        self.reducer.attach(self.model)
        self.optimizer = hsdp.zero.ShardedOptimizer(torch.optim.AdamW, self.model, self.reducer, lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)
        self.reducer.prepare()  # now the hop knows which errors are this rank's

    def state(self) -> dict[str, Any]:
        weights, states = get_state_dict(self.model, self.optimizer)
        return {
            "model": weights,
            "optimizer": states,
            "schedule": self.schedule.state_dict(),
            "hop": self.hop.state_dict(),
            "step": self.step,
            f"random of rank {self.mesh.rank}": torch.get_rng_state(),
        }

    def save(self, folder: pathlib.Path) -> None:
        dcp.save(self.state(), checkpoint_id=folder / str(self.step))

    def load_last(self, folder: pathlib.Path) -> None:
        """An unfinished checkpoint has no metadata."""
        whole = [int(path.parent.name) for path in folder.glob("*/.metadata")]
        if not whole:
            return
        saved = dcp.FileSystemReader(folder / str(max(whole)))
        metadata = saved.read_metadata()
        state = self.state()
        state["hop"] = self.hop.state_dict_for(metadata, prefix="hop.")
        random = f"random of rank {self.mesh.rank}"
        if random not in metadata.state_dict_metadata:
            del state[random]  # it was saved on fewer ranks
        dcp.load(state, storage_reader=saved)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        self.schedule.load_state_dict(state["schedule"])
        self.hop.load_state_dict(state["hop"])
        self.step = state["step"]
        if random in state:
            torch.set_rng_state(state[random])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--die-at", type=int, help="the step in which the last rank is killed")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with hsdp.init_mesh(replicate=2, shard=hsdp.job_size() // 2) as mesh:
        training = Training(mesh)
        training.load_last(asked.folder)
        begin = training.step
        while training.step < STEPS:
            for m in range(MICROBATCHES):
                x = rows_of(training.step, m, mesh)
                with training.reducer.microbatch(last=m == MICROBATCHES - 1):
                    if training.step == asked.die_at and mesh.rank == mesh.size - 1:
                        os.kill(os.getpid(), signal.SIGKILL)
                    (training.model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            training.optimizer.step()
            training.schedule.step()
            training.step += 1
            if training.step % SAVE_EVERY == 0:
                training.save(asked.folder)
        if mesh.rank == 0:
            weights = torch.cat([p.detach().flatten() for p in training.model.parameters()])
            digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
            print(f"steps {begin} to {training.step} on 2x{mesh.shard_size} ranks: weights {digest}")
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
