"""`with reducer.no_sync()`: microbatches that are only added up on this rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from conftest import Launcher
from one_rank import add_gradient

import hsdp

F32 = np.float32


@pytest.fixture
def reducer() -> Iterator[hsdp.Reducer]:
    with hsdp.init_mesh() as mesh, hsdp.Reducer(mesh) as reducer:
        reducer.register("w", 4)
        yield reducer
        reducer.discard()


def add(reducer: hsdp.Reducer, value: float, **how: Any) -> None:
    add_gradient(reducer, "w", np.full(4, value, F32), **how)


def run_as_ddp() -> list[float]:
    """Three microbatches within and one after: a single reduction of what all four add up to."""
    with hsdp.init_mesh(1, 2) as mesh, hsdp.Reducer(mesh) as reducer:
        reducer.register("w", 4)
        found = []
        for step in range(2):
            with reducer.no_sync():
                for m in range(3):
                    add(reducer, m + mesh.rank, **({"last": False} if step else {}))
            assert reducer.stats().reduce_scatter_count == step
            assert reducer.local_sum("w").numpy().tolist() == [3 + 3 * mesh.rank] * 4
            add(reducer, 8)
            found += reducer.shard("w").numpy().tolist()
        assert reducer.stats().reduce_scatter_count == 2
    return found


def test_it_is_ddps(ranks: Launcher) -> None:
    assert ranks(2, run_as_ddp) == [[(3 + 6 + 16) / 2] * 4] * 2


def test_what_was_before_is_back(reducer: hsdp.Reducer) -> None:
    def ends_the_step() -> bool:
        add(reducer, 1)
        try:
            return bool(reducer.shard("w").numpy().any())
        except hsdp.UsageError:
            return False

    with reducer.no_sync():
        with reducer.no_sync():
            assert not ends_the_step()
        assert not ends_the_step()
    assert ends_the_step()
    with pytest.raises(KeyError), reducer.no_sync():
        raise KeyError("in the block")
    assert ends_the_step()
    reducer.set_requires_all_reduce(False)
    with reducer.no_sync():
        assert not ends_the_step()
    assert not ends_the_step()
    assert reducer.partial_shard("w").numpy().tolist() == [2] * 4  # sync is shard, as the flag says
    reducer.discard()
    reducer.set_requires_gradient_sync(False)
    with reducer.no_sync():
        pass
    assert not ends_the_step()
    assert reducer.local_sum("w").numpy().tolist() == [1] * 4


def test_an_explicit_sync_decides(reducer: hsdp.Reducer) -> None:
    with reducer.no_sync():
        add(reducer, 1)
        add(reducer, 2, sync="all")
    assert reducer.shard("w").numpy().tolist() == [3] * 4


def test_the_last_microbatch_comes_after_it(reducer: hsdp.Reducer) -> None:
    with reducer.no_sync():
        add(reducer, 1)
        with pytest.raises(hsdp.UsageError, match="begin_microbatch.*last=True.*no_sync.*after"):
            add(reducer, 2, last=True)
    add(reducer, 3, last=True)
    assert reducer.shard("w").numpy().tolist() == [4] * 4  # the refused call has changed nothing


def test_where_it_means_nothing(reducer: hsdp.Reducer) -> None:
    with reducer.microbatch():
        with pytest.raises(hsdp.UsageError, match="no_sync.*end_microbatch"), reducer.no_sync():
            pass
        reducer.gradient_ready("w", np.ones(4, F32))
    window = hsdp.zero.coalesce_grad_reduction
    with reducer.no_sync(), pytest.raises(hsdp.UsageError, match="coalesce.*no_sync"):
        with window(reducer):
            pass
    with window(reducer, last=True):  # whose microbatches only delimit passes
        with reducer.no_sync():
            add(reducer, 1, last=True)
    assert reducer.shard("w").numpy().tolist() == [1] * 4
