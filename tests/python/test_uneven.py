"""`hsdp.uneven`: ranks with more and with fewer batches leave the loop together."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import hsdp
import numpy as np
import pytest
from conftest import on_ranks

PROMPT_S = 10.0  # well below the mesh's limit of a minute


@contextmanager
def reducers(size: int) -> Iterator[hsdp.Reducer]:
    started = time.monotonic()
    with hsdp.init_mesh(shard=size, timeout_s=60) as mesh:
        with hsdp.Reducer(mesh, missing="zero") as reducer:
            reducer.register("w", 8 * size)
            reducer.set_gradient_divide_factor(1.0)
            yield reducer
    assert time.monotonic() - started < PROMPT_S


def reduce(reducer: hsdp.Reducer, batch: int | None, last: bool = True) -> None:
    with reducer.microbatch(last=last):
        if batch is not None:
            reducer.gradient_ready("w", np.full(8 * reducer.mesh.size, batch, np.float32))


def result(reducer: hsdp.Reducer) -> int:
    values = np.asarray(reducer.shard("w"))
    assert (values == values[0]).all()
    return int(values[0])


def steps(reducer: hsdp.Reducer, loader: Any) -> list[list[int | None]]:
    """(batch, sum) of each step."""
    found = []
    for batch in hsdp.uneven(reducer, loader):
        reduce(reducer, batch)
        found.append([batch, result(reducer)])
    return found


def in_turn(name: str, cases: list[list[Any]]) -> list[Any]:
    """What the function returns for each case. If the job fails, the last line printed names the case."""
    found = []
    for case in cases:
        print(name, *case, flush=True)
        found.append(globals()[name](*case))
    return found


def check_usable(reducer: hsdp.Reducer) -> None:
    """Nothing is left of earlier cases."""
    size, rank = reducer.mesh.size, reducer.mesh.rank
    total = sum(range(1, size + 1))
    expected = [[rank + 1, total]] + ([[None, 7]] if rank else [[7, 7]])
    assert steps(reducer, [rank + 1] if rank else [1, 7]) == expected


# --- lengths ---------------------------------------------------------------------------------


def lengths_differ(*lengths: int) -> Any:
    with reducers(len(lengths)) as reducer:
        rank = reducer.mesh.rank
        found = steps(reducer, (10**rank for _ in range(lengths[rank])))
        check_usable(reducer)
        return found


@pytest.mark.parametrize("cases", [[[3, 1], [0, 2], [2, 2], [0, 0]], [[1, 3, 2], [0, 0, 1]]])
def test_the_shorter_ones_go_on_with_none(ranks: Any, cases: list[list[int]]) -> None:
    for rank, of_rank in enumerate(ranks(len(cases[0]), in_turn, "lengths_differ", cases)):
        for lengths, found in zip(cases, of_rank, strict=True):
            assert found == [
                [
                    10**rank if m < lengths[rank] else None,
                    sum(10**r for r, length in enumerate(lengths) if m < length),
                ]
                for m in range(max(lengths))
            ], lengths


@on_ranks(2)
def test_accumulation() -> None:
    with reducers(2) as reducer:
        sums = []
        for m, batch in enumerate(hsdp.uneven(reducer, range(1, 6) if reducer.mesh.rank == 0 else [100])):
            reduce(reducer, batch, m % 2 == 1)
            if m % 2 == 1:
                sums.append(result(reducer))
        reducer.finish()
        assert [*sums, result(reducer)] == [103, 7, 5]


def counts_batches(divide_by: Any) -> Any:
    with hsdp.init_mesh(1, 2) as mesh:
        reducer = hsdp.Reducer(mesh, divide_by=divide_by)  # with missing="error"
        reducer.register("w", 1)
        found = []
        for m, batch in enumerate(hsdp.uneven(reducer, [[6.0, 2.0, 8.0], [4.0]][mesh.rank])):
            with reducer.microbatch(last=m > 0):
                if batch is not None:
                    reducer.gradient_ready("w", np.array([batch], np.float32))
            if m > 0:
                found.append(mean_of(reducer))
        return found


def mean_of(reducer: hsdp.Reducer) -> float:
    whole = np.zeros(1, np.float32)
    reducer.gather_gradients({"w": whole})
    return float(whole[0])


# (6 + 4 + 2) over three batches, on one and a half ranks on average; then 8 over one.
def test_the_factor_counts_batches(ranks: Any) -> None:
    cases = [["ranks"], ["ranks*microbatches"]]
    assert ranks(2, in_turn, "counts_batches", cases) == [[[8.0, 8.0], [4.0, 8.0]]] * 2


@on_ranks(2)
def test_windows() -> None:
    with reducers(2) as reducer:
        sums = []
        for batch in hsdp.uneven(reducer, range(3) if reducer.mesh.rank else [10]):
            with hsdp.zero.coalesce_grad_reduction(reducer, last=True):
                for part in (1, 2):
                    with reducer.microbatch():
                        if batch is not None:
                            reducer.gradient_ready("w", np.full(16, part * batch, np.float32))
            sums.append(result(reducer))
        assert sums == [30, 3, 6]


# --- errors ----------------------------------------------------------------------------------


class Broken:
    """Fails at its n-th batch; with -1, when it is started."""

    def __init__(self, at: int) -> None:
        self.at = at

    def __iter__(self) -> Iterator[int]:
        if self.at < 0:
            raise OSError("no such shard")
        return self._batches()

    def _batches(self) -> Iterator[int]:
        for _ in range(self.at):
            yield 1
        raise OSError("no such shard")


def loader_fails(size: int, at: int, other_length: int, per_step: int) -> Any:
    with reducers(size) as reducer:
        rank = reducer.mesh.rank
        loader = Broken(at) if rank == 1 else [1] * other_length
        expected = OSError if rank == 1 else hsdp.StepAbortedError
        with pytest.raises(expected, match="no such shard") as caught:
            for m, batch in enumerate(hsdp.uneven(reducer, loader)):
                reduce(reducer, batch, (m + 1) % per_step == 0)
        if rank != 1:
            assert caught.value.ranks == (1,) and f"rank 1 of {size}" in str(caught.value)
        del caught
        check_usable(reducer)


@pytest.mark.parametrize("cases", [
    [[2, -1, 3, 1], [2, 0, 3, 1], [2, 2, 0, 1], [2, 1, 1, 4]], [[3, 2, 5, 1], [3, 3, 9, 2]],
])
def test_a_loader_that_raises(ranks: Any, cases: list[list[int]]) -> None:
    ranks(cases[0][0], in_turn, "loader_fails", cases)


def body_fails(where: str, last: bool) -> Any:
    with reducers(3) as reducer:
        rank = reducer.mesh.rank

        def loop() -> None:
            for m, batch in enumerate(hsdp.uneven(reducer, range(5))):
                if where == "before" and rank == 1 and m == 2:
                    raise RuntimeError("in the body")
                with reducer.microbatch(last=last):
                    if where == "within" and rank == 1 and m == 2:
                        raise RuntimeError("in the body")
                    reducer.gradient_ready("w", np.full(24, batch, np.float32))
                if where == "after" and rank == 1 and m == 2:
                    raise RuntimeError("in the body")
                if last:
                    result(reducer)

        try:
            loop()
            pytest.fail("it went on")
        except RuntimeError:
            assert rank == 1
        except hsdp.StepAbortedError as error:
            assert rank != 1 and 1 in error.ranks, error
        check_usable(reducer)


PLACES = ("before", "within", "after")


def test_a_body_that_raises(ranks: Any) -> None:
    ranks(3, in_turn, "body_fails", list(itertools.product(PLACES, (True, False))))


# --- leaving early ---------------------------------------------------------------------------


def one_leaves(where: str, per_step: int) -> Any:
    with reducers(3) as reducer:
        rank = reducer.mesh.rank

        def loop() -> None:
            for m, batch in enumerate(hsdp.uneven(reducer, range(5))):
                leaves = rank == 2 and m == 3
                if leaves and where == "before":
                    break
                last = (m + 1) % per_step == 0
                reducer.begin_microbatch(last=last)
                if leaves and where == "within":
                    break
                reducer.gradient_ready("w", np.full(24, batch, np.float32))
                reducer.end_microbatch()
                if leaves:
                    break
                if last:
                    result(reducer)

        if rank == 2:
            loop()
        else:
            with pytest.raises(hsdp.StepAbortedError, match="rank 2 of 3") as caught:
                loop()
            assert caught.value.ranks == (2,)
            del caught
        check_usable(reducer)


def test_one_that_leaves_early_is_named(ranks: Any) -> None:
    ranks(3, in_turn, "one_leaves", list(itertools.product(PLACES, (1, 2, 5))))


def all_leave(where: str) -> Any:
    with reducers(2) as reducer:
        rank = reducer.mesh.rank
        if where == "zip":
            for batch, _ in zip(hsdp.uneven(reducer, itertools.count()), range(3)):
                reduce(reducer, batch)
        elif where == "islice":
            for batch in itertools.islice(hsdp.uneven(reducer, itertools.count()), 3):
                reduce(reducer, batch)
        else:
            for m, batch in enumerate(hsdp.uneven(reducer, [0, 1, 2] if rank else range(9))):
                if m == 3:
                    assert batch == (None if rank else 3)
                    break
                reduce(reducer, batch)
        assert result(reducer) == 4  # the last step's, untouched
        check_usable(reducer)


def test_all_may_leave_early(ranks: Any) -> None:
    ranks(2, in_turn, "all_leave", [["zip"], ["islice"], ["break"]])


@on_ranks(2)
def test_a_pending_step_outlives_the_loop() -> None:
    with reducers(2) as reducer:
        for batch in hsdp.uneven(reducer, [1, 2, 3]):
            reduce(reducer, batch, last=False)
            if batch == 2:
                break
        reducer.finish()
        assert result(reducer) == 6
        check_usable(reducer)


def skips(rank_that_skips: int) -> Any:
    with reducers(2) as reducer:

        def loop() -> None:
            for batch in hsdp.uneven(reducer, range(4)):
                if batch == 2 and rank_that_skips in (reducer.mesh.rank, -1):
                    continue
                reduce(reducer, batch)
                result(reducer)

        if rank_that_skips == -1:
            loop()
        else:
            with pytest.raises(hsdp.MismatchError, match="rank 1 of 2.*skip") as caught:
                loop()
            assert caught.value.ranks == (1,)
            del caught
        check_usable(reducer)


def test_a_batch_that_one_rank_skips(ranks: Any) -> None:
    ranks(2, in_turn, "skips", [[1], [-1]])


# --- misuse ----------------------------------------------------------------------------------


def several(per_batch: int) -> Any:
    """Two Reducers that need a fixed number of steps for each batch and miss no gradient."""
    with hsdp.init_mesh(2, 1) as mesh:
        both = [hsdp.Reducer(mesh, divide_by="ranks*microbatches") for _ in range(2)]
        for reducer in both:
            reducer.register("w", 1)
        found = []
        for batch in hsdp.uneven(both, [2.0, 4.0] if mesh.rank else []):
            for _ in range(per_batch):
                for factor, reducer in enumerate(both, 1):
                    with reducer.microbatch(last=True):
                        if batch is not None:
                            reducer.gradient_ready("w", np.array([factor * batch], np.float32))
                    found.append(mean_of(reducer))
        return found


def test_several_reducers_and_steps_for_each_batch(ranks: Any) -> None:
    once = [2.0, 4.0, 4.0, 8.0]
    twice = [2.0, 4.0] * 2 + [4.0, 8.0] * 2
    assert ranks(2, in_turn, "several", [[1], [2]]) == [[once, twice]] * 2


def goes_on(how: str) -> Any:
    """Rank 0 catches the error that ended its loop, and asks for more."""
    with reducers(2) as reducer:
        said = []
        if reducer.mesh.rank == 1:
            for batch in hsdp.uneven(reducer, range(5)):
                if batch == 1:
                    break
                reduce(reducer, batch)
        else:
            with pytest.raises(hsdp.StepAbortedError, match="rank 1 of 2 that left it") as caught:
                for batch in hsdp.uneven(reducer, range(5)):
                    try:
                        reduce(reducer, batch)
                    except hsdp.StepAbortedError as error:
                        said.append(str(error))
                        if how == "again":
                            with pytest.raises(hsdp.StepAbortedError):
                                reduce(reducer, batch)
            assert said == [str(caught.value)]
        check_usable(reducer)


def test_a_loop_that_ended_stays_ended(ranks: Any) -> None:
    ranks(2, in_turn, "goes_on", [["next"], ["again"]])


def test_what_is_refused() -> None:
    for wrong in ([], 3, [None]):
        with pytest.raises(hsdp.UsageError, match=r"uneven: expected an hsdp\.Reducer or several"):
            hsdp.uneven(wrong, [])  # type: ignore[arg-type]
    with reducers(1) as reducer:
        with pytest.raises(hsdp.UsageError, match="uneven: expected batches, got None"):
            next(hsdp.uneven(reducer, [None]))
        with hsdp.init_mesh() as mesh, hsdp.Reducer(mesh) as other:
            with pytest.raises(hsdp.UsageError, match="uneven: expected Reducers of one mesh"):
                hsdp.uneven([reducer, other], [])
    with reducers(1) as reducer:
        loop = hsdp.uneven(reducer, [1, 2])
        assert next(loop) == 1
        with pytest.raises(hsdp.UsageError, match="uneven: .*one loop at a time"):
            next(hsdp.uneven(reducer, [3]))
        reduce(reducer, 1)
        with pytest.raises(hsdp.UsageError, match="uneven: .*one loop at a time"):
            next(hsdp.uneven(reducer, [3]))
        assert next(loop) == 2
        loop.close()
        assert list(hsdp.uneven(reducer, [])) == []
