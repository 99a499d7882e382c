"""Trains a small GPT three times: bf16, plain 4 bit and LoCo between the replicas.

    hsdp_run -n 4 python examples/train_gpt_loco.py            # the Reducer
    hsdp_run -n 4 python examples/train_gpt_loco.py --fsdp2    # an FSDP2 model, with replica_hook

The trainings share weights and batches, so their losses differ only by the effect of the hop, which is
far less than that of another seed. Writes the distances between them as PNG (--plot), and prints how
much was sent between the replicas.
"""

from __future__ import annotations

import argparse
import pathlib
from typing import NamedTuple

import torch
import torch.distributed as dist
from beside_fsdp2 import join_gloo
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from train_gpt import MICROBATCHES, NOISE, Text, at_the_end, loss_of, make_model

import hsdp


class Training(NamedTuple):
    losses: list[float]
    #: between the replicas, from this rank in a step
    bytes: float


def hops() -> dict[str, hsdp.ReplicaHop]:
    return {
        "bf16": hsdp.PlainHop("bf16"),
        "plain 4 bit": hsdp.quant.LocoHop(error_feedback=False),
        "LoCo": hsdp.quant.LocoHop(),
    }


def train(mesh: hsdp.Mesh, text: Text, steps: int, hop: hsdp.ReplicaHop) -> Training:
    model, optimizer = make_model(text, seed=0)
    reducer = hsdp.Reducer(mesh, reduce_dtype="bf16", replica_hop=hop)
    reducer.attach(model)
    reducer.set_gradient_divide_factor(mesh.size * MICROBATCHES)
    losses = []
    for step in range(steps):
        total = 0.0
        for m, rows in enumerate(microbatches(mesh, text, step)):
            with reducer.microbatch(last=m == MICROBATCHES - 1):
                loss = loss_of(model, rows)
                loss.backward()
            total += loss.item() / MICROBATCHES
        reducer.clip_grad_norm_(1.0)
        reducer.gather_gradients()
        optimizer.step()
        losses.append(mesh.world.mean(total))
    sent = reducer.stats().replica_hop_bytes / steps
    reducer.close()
    return Training(losses, sent)


def train_fsdp2(
    mesh: hsdp.Mesh, shard_mesh: DeviceMesh, text: Text, steps: int, hop: hsdp.ReplicaHop
) -> Training:
    model, _ = make_model(text, seed=0)
    for module in [*model.blocks, model]:
        fully_shard(module, mesh=shard_mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98))
    handle = hsdp.torch.replica_hook(model, mesh, hop)
    losses = []
    for step in range(steps):
        total = 0.0
        for m, rows in enumerate(microbatches(mesh, text, step)):
            handle.set_requires_all_reduce(m == MICROBATCHES - 1)
            loss = loss_of(model, rows) / MICROBATCHES
            loss.backward()
            total += loss.item()
        handle.finish()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mesh.world.mean(total))
    sent = handle.replica_hop_bytes / steps
    handle.close()
    return Training(losses, sent)


def microbatches(mesh: hsdp.Mesh, text: Text, step: int) -> list[torch.Tensor]:
    """This rank's rows of each microbatch."""
    parts = text.batch(step).chunk(mesh.size * MICROBATCHES)
    return list(parts[mesh.rank :: mesh.size])


def plot(path: pathlib.Path, found: dict[str, Training]) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: matplotlib is not installed (pip install matplotlib)")
        return
    figure = Figure(figsize=(7, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    steps = range(1, len(found["bf16"].losses) + 1)
    for name, training in found.items():
        above.plot(steps, training.losses, label=name, linewidth=1.2)
        apart = [a - b for a, b in zip(training.losses, found["bf16"].losses, strict=True)]
        below.plot(steps, apart, label=name, linewidth=1.2)
    above.set(ylabel="loss (nats per character)", title="character-level GPT, one seed")
    below.set(xlabel="step", ylabel="above the bf16 hop's")
    for axes in (above, below):
        axes.legend()
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"losses: {path}")


def report(found: dict[str, Training]) -> None:
    print("hop           bytes on the wire   loss at the end")
    for name, training in found.items():
        ratio = training.bytes / found["bf16"].bytes
        print(f"{name:12} {ratio:11.3f} of bf16   {at_the_end(training.losses):.4f}")
    apart = abs(at_the_end(found["LoCo"].losses) - at_the_end(found["bf16"].losses))
    if not (apart <= NOISE and found["LoCo"].losses[-1] < 0.9 * found["LoCo"].losses[0]):
        raise SystemExit("LoCo's loss differs by more than noise, or training did not work")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--plot", type=pathlib.Path, default=pathlib.Path("train_gpt_loco.png"))
    parser.add_argument("--fsdp2", action="store_true", help="shard the model by FSDP2")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    text = Text()
    with hsdp.init_mesh(replicate=2, shard=hsdp.job_size() // 2) as mesh:
        if asked.fsdp2:
            join_gloo(mesh)
            shard_mesh = init_device_mesh(
                "cpu", (2, mesh.shard_size), mesh_dim_names=("replicate", "shard")
            )["shard"]
            found = {
                name: train_fsdp2(mesh, shard_mesh, text, asked.steps, hop)
                for name, hop in hops().items()
            }
            dist.destroy_process_group()
        else:
            found = {name: train(mesh, text, asked.steps, hop) for name, hop in hops().items()}
        if mesh.rank == 0:
            plot(asked.plot, found)
            report(found)


if __name__ == "__main__":
    main()
