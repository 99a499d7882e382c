"""Thousands of steps leave memory, descriptors and threads unchanged.

HSDP_GROWTH_STEPS says how many: 1,000 by default, 10,000 at night.
"""

from __future__ import annotations

import gc
import os
import pathlib
from typing import Any

import numpy as np
import pytest
from conftest import Launcher
from dlpack_only import DlpackOnly
from one_rank import add_gradient, registered

import hsdp

STEPS = int(os.environ.get("HSDP_GROWTH_STEPS", "1000"))
WARM_UP_STEPS = 200
GROWTH_BYTES = 3 << 20
GROWTH_BYTES_A_STEP = 1500


def resources() -> tuple[int, int, int]:
    """Resident bytes, descriptors and threads of this process."""
    gc.collect()
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    folders = [len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task")]
    return pages * os.sysconf("SC_PAGE_SIZE"), folders[0], folders[1]


def steps(reducer: hsdp.Reducer, mesh: hsdp.Mesh, count: int) -> None:
    gradients: list[Any] = [np.ones((16, 4), np.float32), DlpackOnly(np.ones(40, np.float16))]
    for step in range(count):
        with reducer.microbatch(last=True):
            reducer.gradient_ready("a", gradients[0] if step % 2 else gradients[0].copy("F"))
            reducer.gradient_ready("b", gradients[1])
        shard = reducer.shard("a")
        shard.numpy()
        if step % 16 == 0:
            np.from_dlpack(shard)
            mesh.world.all_gather(gradients[0])
            try:
                with reducer.microbatch():
                    raise KeyError("user code")
            except KeyError:
                pass


def run_steps(count: int) -> list[list[int]]:
    with hsdp.init_mesh(shard=int(os.environ.get("WORLD_SIZE", "1"))) as mesh:
        reducer = hsdp.Reducer(mesh, missing="zero", bucket_bytes=128)
        reducer.register("a", (16, 4))
        reducer.register("b", 40, "f16")
        run_all(reducer, mesh, WARM_UP_STEPS)
        before = resources()
        run_all(reducer, mesh, count)
        after = resources()
        reducer.close()
    return [list(before), list(after)]


def run_all(reducer: hsdp.Reducer, mesh: hsdp.Mesh, count: int) -> None:
    # A step is abandoned on every rank, or every rank is told. Here all ranks raise.
    try:
        steps(reducer, mesh, count)
    except hsdp.StepAbortedError:
        pytest.fail("every rank raised in the same block")


def check(before: list[int], after: list[int], limit_bytes: int = GROWTH_BYTES) -> None:
    assert after[0] - before[0] < limit_bytes, (before, after)
    # Fewer is fine: what was needed to connect may still have been open before.
    assert after[1] <= before[1] and after[2] <= before[2], (before, after)


def limit_of(count: int) -> int:
    return min(GROWTH_BYTES, GROWTH_BYTES_A_STEP * count)


def test_one_rank_does_not_grow() -> None:
    check(*run_steps(STEPS), limit_of(STEPS))


def test_two_ranks_do_not_grow(ranks: Launcher) -> None:
    for before, after in ranks(2, run_steps, STEPS // 2):
        check(before, after, limit_of(STEPS // 2))


def test_meshes_and_reducers_leave_nothing() -> None:
    def once() -> None:
        with hsdp.init_mesh() as mesh:
            reducer = registered(mesh, "w", 1000)
            add_gradient(reducer, "w", np.ones(1000, np.float32), last=True)
            reducer.shard("w").numpy()[:] = 1

    for _ in range(20):
        once()
    before = resources()
    for _ in range(200):
        once()
    check(list(before), list(resources()))
