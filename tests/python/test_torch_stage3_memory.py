"""A model of three times the memory that a rank may use is made, trained and read at stage 3."""

from __future__ import annotations

import ctypes
import pathlib
import threading
from typing import Any

import torch
from conftest import Launcher
from torch import nn

import hsdp
from hsdp.zero import ShardedOptimizer

RANKS = 8
LAYERS, WIDTH = 48, 1024
MODEL_BYTES = LAYERS * WIDTH * WIDTH * 4  # 200 MB
ALLOWED_BYTES = MODEL_BYTES // 3
INTERVAL_S = 0.03
M_MMAP_THRESHOLD = -3


class Layer(nn.Module):
    """Adds something to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Any) -> Any:
        return x + self.inner(x) / LAYERS


# The memory of this process alone, and its part of the segments that all ranks share. smaps would tell that
# part, but reading it would take most of the ranks' time.
def held_bytes() -> int:
    status = pathlib.Path("/proc/self/status").read_text()
    anonymous, shared = (int(status.partition(name)[2].split()[0]) for name in ("RssAnon:", "RssShmem:"))
    return 1024 * (anonymous + shared // RANKS)


class Peak:
    """The most memory that this process held in a block, beyond what it had at the beginning."""

    def __enter__(self) -> Peak:
        self._before = held_bytes()
        self.bytes = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._over.wait(INTERVAL_S):
            self.bytes = max(self.bytes, held_bytes() - self._before)

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self._thread.join()


def train_a_large_model() -> list[int]:
    # By default glibc keeps freed blocks that lie between used ones.
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 256 << 10) == 1
    with torch.device("meta"):
        model = nn.Sequential(*(Layer() for _ in range(LAYERS)))
    x = torch.ones(1, WIDTH)
    with hsdp.init_mesh(shard=RANKS) as mesh, Peak() as peak:
        reducer = hsdp.Reducer(mesh, bucket_bytes=4 << 20)
        reducer.attach(model)
        optimizer = ShardedOptimizer(
            torch.optim.SGD, model, reducer, stage=3, units=[Layer], prefetch_bytes=0, lr=0.1
        )
        with reducer.microbatch(last=True):
            before = model(x).square().mean()
            before.backward()
        optimizer.step()
        with torch.no_grad():
            assert model(x).square().mean() < before
    return [peak.bytes]


def test_a_model_three_times_what_a_rank_may_take(ranks: Launcher) -> None:
    peaks = [peak for peak, in ranks(RANKS, train_a_large_model)]
    assert max(peaks) < ALLOWED_BYTES, [f"{peak / MODEL_BYTES:.3f}" for peak in peaks]
    assert min(peaks) > MODEL_BYTES // RANKS, "or nothing was measured"
