"""Trains a small character-level GPT on a mesh of processes, and again in one to compare.

    hsdp_run -n 4 python examples/train_gpt.py

The text is the licences that Debian ships, or else this project's own. Each rank reads its
part of every batch in four microbatches; bf16 travels. A single process then trains the same model
on the same batches, and the losses have to agree. Writes the curves as PNG (--plot).
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Iterable

import torch
from torch import nn
from torch.nn import functional

import hsdp

LICENCES = [pathlib.Path("/usr/share/common-licenses") / name for name in ("GPL-3", "MPL-2.0")]
OWN_LICENCE = pathlib.Path(__file__).parents[1] / "LICENSE"
MICROBATCHES = 4
BATCH, CONTEXT, WIDTH, HEADS, LAYERS = 32, 48, 48, 4, 2
AVERAGED_STEPS = 10  # over which the compared loss is averaged
NOISE = 0.02  # in nats; other batches or another seed change the loss by more


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.to_qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        qkv = self.to_qkv(self.norm1(x)).view(rows, length, 3, HEADS, width // HEADS)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    def __init__(self, characters: int, width: int = WIDTH, layers: int = LAYERS) -> None:
        super().__init__()
        self.embed = nn.Embedding(characters, width)
        self.position = nn.Parameter(0.02 * torch.randn(CONTEXT, width))
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, characters, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.head.weight = self.embed.weight  # tied: reduced once

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.position
        logits: torch.Tensor = self.head(self.norm(self.blocks(x)))
        return logits


class Text:
    """The licences, and batches of them."""

    def __init__(self) -> None:
        paths = [path for path in LICENCES if path.exists()] or [OWN_LICENCE]
        text = "\n".join(path.read_text(encoding="utf-8") for path in paths)
        characters = sorted(set(text))
        self.character_count = len(characters)
        number = {character: i for i, character in enumerate(characters)}
        self.tokens = torch.tensor([number[character] for character in text])

    def batch(self, step: int) -> torch.Tensor:
        """BATCH rows of CONTEXT + 1 characters; the same on every rank."""
        random = torch.Generator().manual_seed(step)
        starts = torch.randint(len(self.tokens) - CONTEXT - 1, (BATCH,), generator=random)
        return self.tokens[starts[:, None] + torch.arange(CONTEXT + 1)]


def loss_of(model: Gpt, rows: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def make_model(text: Text, seed: int) -> tuple[Gpt, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Gpt(text.character_count)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98))


def progress(steps: int, what: str, shown: bool) -> Iterable[int]:
    if shown and sys.stderr.isatty():
        try:
            from tqdm import tqdm  # type: ignore[import-untyped]
        except ImportError:
            return range(steps)
        bar: Iterable[int] = tqdm(range(steps), desc=what, leave=False)
        return bar
    return range(steps)


def train_on_mesh(mesh: hsdp.Mesh, text: Text, steps: int) -> list[float]:
    model, optimizer = make_model(text, seed=mesh.rank)
    hsdp.broadcast_parameters(mesh, model)
    reducer = hsdp.Reducer(mesh, reduce_dtype="bf16")
    reducer.attach(model)
    # Losses are means over a microbatch, so the sum is also divided by the number of microbatches.
    reducer.set_gradient_divide_factor(mesh.size * MICROBATCHES)
    losses = []
    for step in progress(steps, "mesh", mesh.rank == 0):
        parts = text.batch(step).chunk(mesh.size * MICROBATCHES)
        total = 0.0
        for m in range(MICROBATCHES):
            with reducer.microbatch(last=m == MICROBATCHES - 1):
                loss = loss_of(model, parts[m * mesh.size + mesh.rank])
                loss.backward()
            total += loss.item() / MICROBATCHES
        reducer.clip_grad_norm_(1.0)
        reducer.gather_gradients()
        optimizer.step()
        losses.append(mesh.world.mean(total))
    reducer.close()
    return losses


def train_alone(text: Text, steps: int) -> list[float]:
    model, optimizer = make_model(text, seed=0)
    losses = []
    for step in progress(steps, "alone", shown=True):
        optimizer.zero_grad()
        loss = loss_of(model, text.batch(step))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def at_the_end(losses: list[float]) -> float:
    last = losses[-AVERAGED_STEPS:]
    return sum(last) / len(last)


def plot(path: pathlib.Path, curves: dict[str, list[float]]) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: matplotlib is not installed (pip install matplotlib)")
        return
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, losses in curves.items():
        axes.plot(range(1, len(losses) + 1), losses, label=name, linewidth=1.2)
    axes.set(xlabel="step", ylabel="loss (nats per character)", title="character-level GPT")
    axes.legend()
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"loss curves: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--plot", type=pathlib.Path, default=pathlib.Path("train_gpt.png"))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    text = Text()
    size = hsdp.job_size()
    replicate = 2 if size % 2 == 0 else 1
    with hsdp.init_mesh(replicate=replicate, shard=size // replicate) as mesh:
        if BATCH % (mesh.size * MICROBATCHES) != 0:
            raise SystemExit(f"expected a number of ranks that divides {BATCH // MICROBATCHES}")
        losses = train_on_mesh(mesh, text, asked.steps)
        if mesh.rank > 0:
            return
        name = f"{replicate}x{mesh.shard_size} ranks, {MICROBATCHES} microbatches, bf16"
    alone = train_alone(text, asked.steps)
    plot(asked.plot, {name: losses, "one process": alone})
    gap = abs(at_the_end(losses) - at_the_end(alone))
    print(
        f"loss {losses[0]:.3f} -> {at_the_end(losses):.3f} on {name}; {at_the_end(alone):.3f} in "
        f"one process, {gap:.4f} apart"
    )
    if not (gap <= NOISE and at_the_end(losses) < 0.8 * losses[0]):
        raise SystemExit("the losses differ by more than noise, or training did not work")


if __name__ == "__main__":
    main()
