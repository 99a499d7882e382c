"""Windows around a loss that runs many backward passes: a cached one of sentence-transformers, which
embeds a batch again in mini-batches inside of one backward(). The others do the same to a Reducer.

Nothing is downloaded: a BERT of random weights and a tokenizer of made-up words.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import pathlib
import random
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import Launcher
from torch import nn

import hsdp

# The ranks inherit these variables.
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")

# Meshes, and how batches are cut there.
MESHES = [(1, 2, "one rows tokens"), (2, 2, "one tokens")]
COLUMNS = 3
ROWS = 12  # in a rank's batch
# By rank: how a batch is cut, so that each rank runs a different number of backward passes.
CUTS: dict[str, dict[str, list[int]]] = {
    "one": {"mini_batch_size": [ROWS] * 4},
    "rows": {"mini_batch_size": [5, 2, 3, 1]},
    "tokens": {"mini_batch_num_tokens": [40, 17, 25, 60]},
}
# The largest error of a parameter's gradient against float64, relative to its norm. In fp32 the loss that
# is not cached is up to 2e-6 off; if a rank leaves out one row, the error is at least 1e-2.
TOLERANCE = 1e-5
# Relative to the model's norm: smaller norms are replaced by this. Key biases do not change an attention, so
# their gradients are rounding errors only.
SMALLEST = 1e-2

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(60))]
Batch = list[list[str]]
Gradients = dict[str, torch.Tensor]


def make_model(seed: int) -> Any:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import BertConfig, BertModel, BertTokenizer

    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=16, initializer_range=0.2,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = pathlib.Path(folder) / "vocab.txt"
        vocabulary.write_text("\n".join(WORDS))
        BertTokenizer(str(vocabulary)).save_pretrained(folder)
        BertModel(config).save_pretrained(folder)
        return SentenceTransformer(modules=[Transformer(folder), Pooling(32)])


def make_batch(rank: int) -> Batch:
    """Columns of sentences of all lengths, all different."""
    choose = random.Random(100 * COLUMNS + rank)
    sentences: set[str] = set()
    while len(sentences) < COLUMNS * ROWS:
        words = choose.choices(WORDS[5:], k=choose.randint(1, 12))
        sentences.add(" ".join(words))
    shuffled = sorted(sentences)
    choose.shuffle(shuffled)
    return [shuffled[c * ROWS : (c + 1) * ROWS] for c in range(COLUMNS)]


def make_loss(name: str, model: Any, **options: int) -> Any:
    from sentence_transformers.sentence_transformer import losses

    return getattr(losses, name)(model, **options)


def loss_of(loss: Any, batch: Batch) -> torch.Tensor:
    found: torch.Tensor = loss([loss.model.preprocess(column) for column in batch], None)
    return found


def float64_mean(mesh: hsdp.Mesh, model: Any, batch: Batch) -> Gradients:
    """The mean of the ranks' gradients of the uncached loss, in float64."""
    model = copy.deepcopy(model).double()
    loss_of(make_loss("MultipleNegativesRankingLoss", model), batch).backward()
    means = {}
    for parameter_name, p in model.named_parameters():
        grad = torch.zeros_like(p) if p.grad is None else p.grad  # the pooler's, which is unused
        means[parameter_name] = mesh.world.all_reduce(grad.detach().contiguous()) / mesh.size
    return means


def distance(model: nn.Module, want: Gradients) -> float:
    """The largest error of a parameter's gradient, relative to its norm."""
    norms = {name: float(w.norm()) for name, w in want.items()}
    smallest = SMALLEST * math.hypot(*norms.values())
    return max(
        float((p.grad.double() - want[name]).norm()) / max(norms[name], smallest)
        for name, p in model.named_parameters()
        if p.grad is not None  # the pooler's, which no rank uses
    )


@contextlib.contextmanager
def counted(parameter: torch.Tensor) -> Iterator[list[int]]:
    """Counts the gradients that the parameter gets."""
    passes = [0]

    def count(grad: torch.Tensor) -> None:
        passes[0] += 1

    handle = parameter.register_hook(count)
    try:
        yield passes
    finally:
        handle.remove()


def run_window(
    reducer: hsdp.Reducer, loss: Any, batch: Batch, accumulate: str, backwards: int | None = None
) -> int:
    """One step with one backward() in a window. Returns how many gradients a parameter got in it."""
    with counted(next(loss.model.parameters())) as passes:
        with hsdp.zero.coalesce_grad_reduction(reducer, backwards=backwards, accumulate=accumulate):
            loss_of(loss, batch).backward()
    reducer.gather_gradients()
    return passes[0]


def gradients_of(model: nn.Module) -> Gradients:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same_bits(model: nn.Module, want: Gradients) -> bool:
    found = gradients_of(model)
    return found.keys() == want.keys() and all(torch.equal(found[n], want[n]) for n in want)


def run_case(
    reducer: hsdp.Reducer, loss: Any, batch: Batch, want: Gradients, accumulate: str
) -> dict[str, Any]:
    passes = run_window(reducer, loss, batch, accumulate)
    found = {"passes": passes, "distance": distance(loss.model, want)}
    bits = gradients_of(loss.model)
    run_window(reducer, loss, batch, accumulate, backwards=passes)
    return {**found, "declared": same_bits(loss.model, bits)}


def run_without_a_window(reducer: hsdp.Reducer, loss: Any, batch: Batch) -> dict[str, Any]:
    run_window(reducer, loss, batch, "buffer")
    bits = gradients_of(loss.model)
    try:
        with reducer.microbatch(last=True):
            loss_of(loss, batch).backward()
        refused = ""
    except hsdp.UsageError as error:
        refused = str(error)
    run_window(reducer, loss, batch, "buffer")
    return {"refused": refused, "same": same_bits(loss.model, bits)}


def run_mesh(replicate: int, shard: int, cuts: str) -> dict[str, Any]:
    cases = []
    with hsdp.init_mesh(replicate, shard) as mesh:
        model = make_model(mesh.rank)
        hsdp.broadcast_parameters(mesh, model)
        batch = make_batch(mesh.rank)
        want = float64_mean(mesh, model, batch)
        reducer = hsdp.Reducer(mesh, bucket_bytes=16384, missing="zero")
        reducer.attach(model)
        for cut in cuts.split():
            options = {option: sizes[mesh.rank] for option, sizes in CUTS[cut].items()}
            loss = make_loss("CachedMultipleNegativesRankingLoss", model, **options)
            for accumulate in ("buffer", "grad"):
                case = run_case(reducer, loss, batch, want, accumulate)
                cases.append({**case, "cut": cut, "accumulate": accumulate})
        without = run_without_a_window(reducer, loss, batch)
    return {"cases": cases, "without": without}


@pytest.fixture(scope="module", params=MESHES, ids=["1x2", "2x2"])
def found(request: pytest.FixtureRequest, module_ranks: Launcher) -> list[dict[str, Any]]:
    """By rank."""
    replicate, shard, cuts = request.param
    return list(module_ranks(replicate * shard, run_mesh, replicate, shard, cuts))


def test_gradients_are_those_of_the_whole_batch(found: list[dict[str, Any]]) -> None:
    for cases in zip(*(result["cases"] for result in found), strict=True):
        assert all(case["distance"] <= TOLERANCE for case in cases), cases
        assert len({case["passes"] for case in cases}) == (1 if cases[0]["cut"] == "one" else len(found))


def test_a_declared_number_of_passes_changes_no_bit(found: list[dict[str, Any]]) -> None:
    for result in found:
        for case in result["cases"]:
            assert case["declared"], case


def test_without_a_window_they_are_refused(found: list[dict[str, Any]]) -> None:
    for result in found:
        without = result["without"]
        assert "one gradient" in without["refused"], without
        assert without["same"], "expected the next window to be as the one before"
