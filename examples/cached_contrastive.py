"""Trains a small text encoder to find code by what it does, with a gradient cache in windows.

    hsdp_run -n 2 python examples/cached_contrastive.py

A docstring of Python's standard library has to find its code among the code of all ranks' batches. A
loss that compares everything needs all embeddings at once, but their graphs do not fit. So each rank
embeds its batch without a graph, computes the gradient of the loss by the embeddings, and embeds again
in chunks, with one backward pass each. The passes are reduced once, at the end of their window. Ranks
have chunks of different sizes, so they run different numbers of passes.

Every step is compared with one batch: the same loss without chunks, ranks and windows.
"""

from __future__ import annotations

import argparse
import collections
import pathlib
import re
import sysconfig
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

import hsdp

PAIRS = 32  # in a rank's batch
CHUNK_PAIRS = (8, 5, 3, 12)  # by rank
WIDTH, HEADS, VOCABULARY = 48, 4, 3000
TEXT_WORDS, CODE_WORDS = 16, 40
SCALE = 20.0  # of the cosines: a temperature of 0.05
# Of the distances of loss and gradient norm from one batch, in fp32. Only the order of sums differs,
# which causes less than 1e-6; leaving out a chunk causes 1e-2 and more.
TOLERANCE = 1e-5
COUNTS = ("reduce_scatter_count", "all_reduce_count", "all_gather_count")

DOCUMENTED = re.compile(
    r'\n +def \w+\([^"]{0,200}?:\n +"""([^"]{40,600}?)"""\n(.{80,600}?)\n *def ', re.DOTALL
)
WORD = re.compile("[a-z]{2,}")


class Pairs:
    """Docstrings and their code, as word numbers; 0 is no word."""

    def __init__(self) -> None:
        library = pathlib.Path(sysconfig.get_path("stdlib"))
        source = "".join(path.read_text("utf-8") for path in sorted(library.glob("*.py")))
        parts = DOCUMENTED.findall(source)
        found = [[WORD.findall(part.lower()) for part in pair] for pair in parts]
        count = collections.Counter(word for pair in found for words in pair for word in words)
        number = {word: i + 1 for i, (word, _) in enumerate(count.most_common(VOCABULARY - 1))}
        self.columns = [
            torch.tensor([self._row(pair[i], number, length) for pair in found])
            for i, length in enumerate((TEXT_WORDS, CODE_WORDS))
        ]

    @staticmethod
    def _row(words: list[str], number: dict[str, int], length: int) -> list[int]:
        known = [number[word] for word in words if word in number][:length]
        return known + [0] * (length - len(known))

    def batch(self, step: int, count: int) -> list[torch.Tensor]:
        """`count` docstrings and their code; the same on every rank."""
        random = torch.Generator().manual_seed(step)
        chosen = torch.randperm(len(self.columns[0]), generator=random)[:count]
        return [column[chosen] for column in self.columns]


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(CODE_WORDS, WIDTH))
        self.block = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        none = words == 0
        x = self.embed(words) + self.position[: words.shape[1]]
        x = self.block(x, src_key_padding_mask=none).masked_fill(none[..., None], 0.0)
        return functional.normalize(self.out(x.sum(1)), dim=1)


def loss_of(texts: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Each docstring has to find its code among all."""
    return functional.cross_entropy(SCALE * texts @ codes.T, torch.arange(len(texts)))


def gather(mesh: hsdp.Mesh, own: torch.Tensor) -> torch.Tensor:
    """The embeddings of all ranks, with gradients."""
    return torch.from_dlpack(mesh.world.all_gather(own)).view(-1, WIDTH).requires_grad_()


def run_window(
    mesh: hsdp.Mesh, reducer: hsdp.Reducer, model: Encoder, batch: list[torch.Tensor]
) -> float:
    """Leaves the gradient of the loss over all ranks' pairs in p.grad; returns the loss."""
    chunk_pairs = CHUNK_PAIRS[mesh.rank % len(CHUNK_PAIRS)]
    chunks = [column.chunk(mesh.size)[mesh.rank].split(chunk_pairs) for column in batch]
    with torch.no_grad():
        embedded = [torch.cat([model(chunk) for chunk in column]) for column in chunks]
    everything = [gather(mesh, column) for column in embedded]
    loss = loss_of(*everything)
    cache = torch.autograd.grad(loss, everything)
    with hsdp.zero.coalesce_grad_reduction(reducer):
        for column, grad in zip(chunks, cache, strict=True):
            own = grad.chunk(mesh.size)[mesh.rank].split(chunk_pairs)
            for chunk, part in zip(column, own, strict=True):
                model(chunk).backward(part)
    reducer.gather_gradients()
    return float(loss)


class Distance(NamedTuple):
    """Distance from one batch."""

    loss: float
    gradient: float


def distance_from_one_batch(model: Encoder, batch: list[torch.Tensor], loss: float) -> Distance:
    whole = loss_of(*(model(column) for column in batch))
    parameters = list(model.parameters())
    off = size = 0.0
    for p, want in zip(parameters, torch.autograd.grad(whole, parameters), strict=True):
        assert p.grad is not None
        off += float((p.grad - want).square().sum())
        size += float(want.square().sum())
    return Distance(abs(loss - whole.item()) / whole.item(), float((off / size) ** 0.5))


def require_same_parameters(mesh: hsdp.Mesh, model: Encoder) -> None:
    own = torch.cat([p.detach().flatten() for p in model.parameters()])
    rows = torch.from_dlpack(mesh.world.all_gather(own)).view(mesh.size, -1)
    if not all(torch.equal(row, own) for row in rows):
        raise SystemExit("expected the same parameters on all ranks, got others")


def exchanged(reducer: hsdp.Reducer) -> torch.Tensor:
    stats = reducer.stats()
    return torch.tensor([getattr(stats, count) for count in COUNTS])


def require_same_counts(mesh: hsdp.Mesh, steps: list[torch.Tensor]) -> None:
    """The counts must be equal in all steps, even if ranks run different numbers of passes."""
    rows = torch.from_dlpack(mesh.world.all_gather(torch.stack(steps))).view(-1, len(COUNTS))
    if not bool((rows == rows[0]).all()):
        raise SystemExit(f"expected the same {', '.join(COUNTS)} in all steps, got {rows.tolist()}")


def passes(rank: int) -> int:
    return 2 * -(-PAIRS // CHUNK_PAIRS[rank % len(CHUNK_PAIRS)])


def train(mesh: hsdp.Mesh, pairs: Pairs, steps: int) -> str:
    torch.manual_seed(mesh.rank)
    model = Encoder()
    hsdp.broadcast_parameters(mesh, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    reducer = hsdp.Reducer(mesh)
    reducer.attach(model)
    # Each rank has the part of its rows in one loss, so parts are added and nothing is averaged.
    reducer.set_gradient_divide_factor(1)
    losses: list[float] = []
    counts: list[torch.Tensor] = []
    furthest = Distance(0.0, 0.0)
    for step in range(steps):
        batch = pairs.batch(step, PAIRS * mesh.size)
        before = exchanged(reducer)
        losses.append(run_window(mesh, reducer, model, batch))
        counts.append(exchanged(reducer) - before)
        off = distance_from_one_batch(model, batch, losses[-1])
        if not max(off) <= TOLERANCE:
            raise SystemExit(
                f"step {step}: expected at most {TOLERANCE} from one batch, got {off.loss:.1e} in "
                f"the loss and {off.gradient:.1e} in the gradient"
            )
        furthest = Distance(*map(max, furthest, off))
        optimizer.step()
        if mesh.rank == 0 and step % 10 == 0:
            print(f"step {step:3}: loss {losses[-1]:.3f}")
    require_same_parameters(mesh, model)
    require_same_counts(mesh, counts)
    first, last = losses[0], sum(losses[-5:]) / 5
    if not last < 0.8 * first:
        raise SystemExit(f"expected a loss that falls, got {first:.3f} -> {last:.3f}")
    run = ", ".join(str(passes(rank)) for rank in range(mesh.size))
    took = ", ".join(f"{name} {n}" for name, n in zip(COUNTS, counts[0].tolist(), strict=True))
    reducer.close()
    return (
        f"loss {first:.3f} -> {last:.3f} on {mesh.replicate_size}x{mesh.shard_size} ranks\n"
        f"backward passes of a step, by rank: {run}; its collectives: {took}\n"
        f"from one batch, at most: loss {furthest.loss:.0e}, gradient {furthest.gradient:.0e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=60)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    pairs = Pairs()
    size = hsdp.job_size()
    replicate = 2 if size % 4 == 0 else 1
    with hsdp.init_mesh(replicate=replicate, shard=size // replicate) as mesh:
        report = train(mesh, pairs, asked.steps)
        if mesh.rank == 0:
            print(report)


if __name__ == "__main__":
    main()
