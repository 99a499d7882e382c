"""`reducer.trace` and `reducer.wait_table`: what a job did, and which ranks it waited for."""

from __future__ import annotations

import json
import pathlib
import time
from typing import Any

import numpy as np
import pytest
from conftest import Launcher
from one_rank import add_gradient, registered

import hsdp


def square_mesh() -> hsdp.Mesh:
    return hsdp.init_mesh(replicate=2, shard=2, timeout_s=60)


def step(reducer: hsdp.Reducer, late: int = -1) -> None:
    if reducer.mesh.rank == late:
        time.sleep(0.15)
    add_gradient(reducer, "w", np.ones(64, np.float32))
    reducer.shard("w")


def traces(folder: pathlib.Path) -> list[str]:
    """Includes unfinished ones."""
    return sorted(path.name for path in folder.glob("*trace*"))


def traced(path: str) -> None:
    with square_mesh() as mesh, registered(mesh, "w", 64) as reducer:
        step(reducer)
        with reducer.trace(path):
            step(reducer)
            step(reducer)


def test_a_block_is_written_into_one_file(ranks: Launcher, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "trace.json"
    ranks(4, traced, str(path))
    trace = json.loads(path.read_text())
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    for rank in range(4):
        of_rank = [event for event in slices if event["pid"] == rank]
        for name in ("pack 0", "shard_hop 0", "replica_hop 0"):
            found = [event["args"]["step"] for event in of_rank if event["name"] == name]
            assert found == [1, 2], name
    assert trace["otherData"]["clock_error_ms"] > 0
    assert traces(tmp_path) == ["trace.json"]


def traced_to_none(path: str) -> None:
    with square_mesh() as mesh, registered(mesh, "w", 64) as reducer:
        error = hsdp.UsageError if mesh.rank == 0 else hsdp.StepAbortedError
        with pytest.raises(error, match="expected a path on the first rank, got none"):
            with reducer.trace(None if mesh.rank == 0 else path):
                pass
        with reducer.trace(path if mesh.rank == 0 else None):
            step(reducer)


def test_only_rank_0_needs_a_path(ranks: Launcher, tmp_path: pathlib.Path) -> None:
    ranks(4, traced_to_none, str(tmp_path / "trace.json"))
    assert traces(tmp_path) == ["trace.json"]


def raises_on_rank_1(path: str) -> str | None:
    """Rank 1 gets its own exception at once; the others are told at the end of their block."""
    with square_mesh() as mesh, registered(mesh, "w", 64) as reducer:
        text = None
        try:
            with reducer.trace(path):
                step(reducer)
                if mesh.rank == 1:
                    raise ValueError("mine")
        except ValueError:
            assert mesh.rank == 1
        except hsdp.StepAbortedError as error:
            assert error.ranks == (1,)
            text = str(error)
        step(reducer)
        with reducer.trace(path):
            step(reducer)
        return text


def test_a_block_that_raises_holds_up_no_other_rank(ranks: Launcher, tmp_path: pathlib.Path) -> None:
    told = (
        "trace: write: expected every rank to write its trace, got 'its block raised ValueError: mine' on "
        "rank 1 of 4; no file was written"
    )
    assert ranks(4, raises_on_rank_1, str(tmp_path / "trace.json")) == [told, None, told, told]
    assert traces(tmp_path) == ["trace.json"]  # the second one


def steps_outside_on_rank_1(path: str) -> str | None:
    """The others take that step within their block."""
    with square_mesh() as mesh, registered(mesh, "w", 64) as reducer:
        step(reducer)
        text = None
        try:
            with reducer.trace(path):
                if mesh.rank == 1:
                    raise ValueError("mine")
                step(reducer)
        except ValueError:
            step(reducer)
        except hsdp.StepAbortedError as error:
            text = str(error)
        step(reducer)
        assert reducer.stats().step_count == 3
        return text


def test_a_rank_that_left_its_block_goes_on_with_the_others(
    ranks: Launcher, tmp_path: pathlib.Path
) -> None:
    texts = ranks(4, steps_outside_on_rank_1, str(tmp_path / "trace.json"))
    assert texts.pop(1) is None
    assert all("got 'its block raised ValueError: mine' on rank 1 of 4" in text for text in texts)
    assert traces(tmp_path) == []


def leaves_the_mesh_on_rank_1(path: str) -> str:
    """The timeout is longer than the test may take."""
    try:
        with hsdp.init_mesh(replicate=2, shard=2, timeout_s=600) as mesh:
            with registered(mesh, "w", 64) as reducer:
                step(reducer)
                with reducer.trace(path):
                    if mesh.rank == 1:
                        raise ValueError("mine")
                    step(reducer)
    except (ValueError, hsdp.PeerLostError) as error:
        return str(error)
    return "no error"


def test_a_rank_that_left_for_good_is_lost_to_the_others(
    ranks: Launcher, tmp_path: pathlib.Path
) -> None:
    texts = ranks(4, leaves_the_mesh_on_rank_1, str(tmp_path / "trace.json"))
    assert texts.pop(1) == "mine"
    assert all("rank 1 of 4 was lost (" in text for text in texts), texts
    assert traces(tmp_path) == []


def test_a_reducer_may_be_closed_within_its_block(tmp_path: pathlib.Path) -> None:
    with hsdp.init_mesh() as mesh, registered(mesh, "w", 64) as reducer:
        with reducer.trace(tmp_path / "trace.json"):
            step(reducer)
            reducer.close()
        with pytest.raises(hsdp.UsageError, match="closed"):
            reducer.wait_table()
    assert "shard_hop 0" not in (tmp_path / "trace.json").read_text()  # a rank alone has none
    assert "pack 0" in (tmp_path / "trace.json").read_text()


def waits_for_rank_2() -> Any:
    with square_mesh() as mesh, registered(mesh, "w", 64) as reducer:
        for _ in range(3):
            step(reducer, late=2)
        table = reducer.wait_table()
        assert table.straggler == 2
        assert all(waiting != awaited for waiting, awaited in table.seconds)
        assert 0 < table.clock_error_s < 0.03
        # Three steps: a shard hop in each shard group, a replica hop in each replicate group, a word.
        assert table.operations == 3 * (2 + 2 + 1)
        return repr(table)


def test_a_wait_table_names_the_rank_that_is_late(ranks: Launcher) -> None:
    texts = ranks(4, waits_for_rank_2)
    assert len(set(texts)) == 1
    assert texts[0].startswith("rank 2 was waited for ")
    assert "in 15 operations, 3 steps, " in texts[0]
    assert texts[0].endswith(" ms)")


def test_a_rank_alone_waits_for_nobody() -> None:
    with hsdp.init_mesh() as mesh, registered(mesh, "w", 64) as reducer:
        step(reducer)
        table = reducer.wait_table()
        assert (table.seconds, table.operations, table.straggler) == ({}, 0, None)
        assert repr(table) == "no rank was waited for in 0 operations, 0 steps, 0.00 s (clock error 0.00 ms)"
