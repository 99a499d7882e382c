"""`reducer.wait_table` when a step contains more than hops, and a job more than one Reducer."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from conftest import Launcher
from one_rank import add_gradient, registered

import hsdp

DELAY_S = 0.2
STEPS = 3


def square_mesh() -> hsdp.Mesh:
    return hsdp.init_mesh(replicate=2, shard=2, timeout_s=60)


def step(reducer: hsdp.Reducer, late: int = -1, delay_s: float = DELAY_S) -> None:
    if reducer.mesh.rank == late:
        time.sleep(delay_s)
    add_gradient(reducer, "w", np.ones(64, np.float32))
    reducer.shard("w")


def awaited_s(table: hsdp.WaitTable) -> dict[int, float]:
    """For each rank, the seconds that others waited for it, without what a busy machine causes."""
    totals: dict[int, float] = {}
    for (_, awaited), seconds in table.seconds.items():
        totals[awaited] = totals.get(awaited, 0) + seconds
    return {rank: seconds for rank, seconds in totals.items() if seconds > 0.75 * STEPS * DELAY_S}


def gather_twice(reducer: hsdp.Reducer) -> None:
    whole = np.zeros(64, np.float32)
    reducer.gather_gradients({"w": whole})
    reducer.gather_parameters({"w": whole})


def clip(reducer: hsdp.Reducer) -> None:
    hsdp.clip_grad_norm_([reducer], 1.0)


ENDS: dict[str, Callable[[hsdp.Reducer], object]] = {
    "norm": hsdp.Reducer.grad_norm,
    "clip": clip,
    "gathers": gather_twice,
}


def late_at_the_end_of_a_step(end: str, shard_over: str) -> None:
    for late in (0, 3):
        with square_mesh() as mesh, registered(mesh, "w", 64, shard_over=shard_over) as reducer:
            for _ in range(STEPS):
                step(reducer)
                if mesh.rank == late:
                    time.sleep(DELAY_S)
                ENDS[end](reducer)
            step(reducer)
            table = reducer.wait_table()
            assert set(awaited_s(table)) <= {late}, table
            if shard_over == "shard" or end != "gathers":
                assert table.straggler == late, table
                assert awaited_s(table)[late] > 2 * STEPS * DELAY_S, table
            assert table.steps == STEPS + 1


@pytest.mark.parametrize("shard_over", ["shard", "mesh"])
@pytest.mark.parametrize("end", list(ENDS))
def test_who_is_late_to_a_norm_or_a_gather_is_named(ranks: Launcher, end: str, shard_over: str) -> None:
    ranks(4, late_at_the_end_of_a_step, end, shard_over)


def two_without_a_name() -> None:
    with square_mesh() as mesh, registered(mesh, "w", 64) as one:
        with registered(mesh, "w", 64) as other:
            for _ in range(STEPS):
                step(one)
                step(other, late=2)
            table = one.wait_table()
            assert table.operations == STEPS * 5
            assert awaited_s(table) == {}, table  # all were late together
            table = other.wait_table()
            assert table.operations == STEPS * 5
            assert set(awaited_s(table)) == {2}, table
    with square_mesh() as mesh:
        for late in (1, 3):
            with registered(mesh, "w", 64) as reducer:
                for _ in range(STEPS):
                    step(reducer, late)
                table = reducer.wait_table()
                assert (table.straggler, table.operations) == (late, STEPS * 5), table
                assert set(awaited_s(table)) == {late}, table


def test_reducers_of_the_same_name_are_told_apart(ranks: Launcher) -> None:
    ranks(4, two_without_a_name)


def two_shapes_of_the_same_ranks() -> None:
    """Rank 2 is late to the other mesh's steps, and so next are the ranks that wait together with rank 1."""
    square = square_mesh()
    row = hsdp.init_mesh(replicate=1, shard=4, timeout_s=60)
    with registered(square, "w", 64) as reducer, registered(row, "w", 64) as other:
        step(reducer)
        step(other)
        for _ in range(STEPS):
            if square.rank == 1:
                time.sleep(DELAY_S * 0.9)
            step(other, late=2)
        table = reducer.wait_table()
        assert (table.operations, awaited_s(table)) == (5, {}), table
        table = other.wait_table()
        assert table.straggler == 2, table
        assert table.operations == (STEPS + 1) * 2


def test_steps_on_another_mesh_are_not_compared(ranks: Launcher) -> None:
    ranks(4, two_shapes_of_the_same_ranks)


def waits_elsewhere() -> None:
    """Ranks 0 and 1 wait for rank 0's sleep in one step; 2 and 3 wait for both of them."""
    mesh = square_mesh()
    own = [[0, 1]] if mesh.rank < 2 else [[2, 3]]
    pairs = hsdp.init_mesh(replicate=1, shard=2, ranks=own, timeout_s=60)
    with registered(mesh, "w", 64) as reducer, registered(pairs, "w", 64) as pair:
        for _ in range(STEPS):
            if mesh.rank == 0:
                time.sleep(DELAY_S)
            step(pair)
            step(reducer)
        table = reducer.wait_table()
        assert 1 not in awaited_s(table), table
        assert table.unexplained_s > 0 or set(awaited_s(table)) == {0}, table


def test_a_rank_that_waited_in_what_is_not_compared_is_not_named(ranks: Launcher) -> None:
    ranks(4, waits_elsewhere)
