"""`Communicator.all_reduce` of numbers, and its maximum and minimum of arrays."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from conftest import Launcher, on_mesh
from dlpack_only import DlpackOnly
from one_rank import mesh

import hsdp

HAS_TORCH = importlib.util.find_spec("torch") is not None
BIG = (1 << 62) + 1  # no float can represent it


@on_mesh(1, 3)
def test_numbers(mesh: hsdp.Mesh) -> None:
    world = mesh.world
    rank = mesh.rank
    floats = [0.1, 1e16, -1e16]
    whole = [BIG + rank, -(BIG + rank)]
    found: list[Any] = [
        world.all_reduce(BIG + 2 * rank - (BIG if rank else 0)),
        *[world.all_reduce(x, op) for x in whole for op in ("max", "min")],
        world.all_reduce(floats[rank]), world.all_reduce(floats[rank], op="max"),
        world.all_reduce(float(rank), op="min"),
        math.isnan(world.all_reduce(math.nan if rank == 1 else 5.0, op="max")),
        math.isnan(world.all_reduce(math.nan if rank == 2 else 5.0, op="min")),
        world.all_reduce(math.inf if rank == 0 else 1.0),
    ]
    assert all(type(x) is int for x in found[:5]) and type(found[5]) is float
    assert found == [BIG + 6, BIG + 2, BIG, -BIG, -(BIG + 2), (0.1 + 1e16) - 1e16, 1e16, 0.0, True, True,
                     math.inf]
    assert mesh.shard_group.all_reduce(np.float64(rank)) == 3.0


def rows_of(dtype: Any) -> list[np.ndarray[Any, Any]]:
    rows = np.random.default_rng(5).integers(-9, 9, (3, 4, 5)).astype(dtype)
    if np.dtype(dtype).kind == "f" or dtype is ml_dtypes.bfloat16:
        rows[0, 1, 1] = rows[2, 2, 2] = math.nan
        rows[1, 0, 0], rows[2, 0, 1] = math.inf, -math.inf
    return list(rows)


def require_reduced(world: hsdp.Communicator, make: Callable[[Any], Any], dtype: Any) -> None:
    """NaN where any rank has one, otherwise the largest or smallest, bit for bit."""
    rows = rows_of(dtype)
    for op, pick in (("max", np.maximum), ("min", np.minimum)):
        x = make(rows[world.rank].copy())
        assert world.all_reduce(x, op=op) is x
        got = np.asarray(x.float() if hasattr(x, "float") else x).astype(np.float64).reshape(-1)
        want = pick.reduce([row.astype(np.float64) for row in rows]).reshape(-1)
        np.testing.assert_array_equal(got, want)


@on_mesh(1, 3)
def test_maximum_and_minimum_of_arrays(mesh: hsdp.Mesh) -> None:
    world = mesh.world
    for dtype in (np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int64, np.uint8,
                  np.int32, np.dtype(">f4")):
        require_reduced(world, lambda x: x, dtype)
    require_reduced(world, DlpackOnlyArray, np.float32)
    require_reduced(world, lambda x: np.asfortranarray(x), np.float32)
    mine = world.allocate(20, "f32")

    def allocated(x: Any) -> hsdp.Array:
        mine[:] = x.reshape(-1)
        return mine

    require_reduced(world, allocated, np.float32)
    assert world.all_reduce(np.empty(0, np.float32), "max").size == 0
    flags = np.array([mesh.rank == 1, False])
    assert world.all_reduce(flags, "max").tolist() == [True, False]
    large = np.arange(3 << 20, dtype=np.int64) * (1 if mesh.rank == 1 else -1)  # several messages
    assert (world.all_reduce(large, "max") == np.arange(3 << 20)).all()
    if HAS_TORCH:
        import torch

        for kind in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64):
            dtype = np.int64 if kind is torch.int64 else np.float32
            require_reduced(world, lambda x: torch.from_numpy(x).to(kind), dtype)
        # one rank's array may come from another library
        x = torch.full((3,), mesh.rank, dtype=torch.bfloat16)
        y = np.full(3, mesh.rank, ml_dtypes.bfloat16)
        both = world.all_reduce(x if mesh.rank else y, op="max")
        assert [float(v) for v in both] == [2.0] * 3


class DlpackOnlyArray(DlpackOnly):
    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return np.from_dlpack(self)


def run_differing() -> list[str]:
    said = []
    with hsdp.init_mesh(1, 2) as mesh:
        world = mesh.world
        one = mesh.rank == 1
        kinds = (np.float32, np.float64) if one else (np.float32, np.float32)
        calls: list[Callable[[], Any]] = [
            lambda: world.all_reduce(np.ones(3, kinds[1]), op="max"),
            lambda: world.all_reduce(np.ones((3, 1) if one else 3), op="max"),
            lambda: world.all_reduce(np.ones(3), op="min" if one else "max"),
            lambda: world.all_reduce(1 if one else 1.0),
            lambda: world.all_reduce(1, op="max" if one else "sum"),
            lambda: world.all_reduce(np.ones(1) if one else 1.0, op="max"),
        ]
        for call in calls:
            with pytest.raises(hsdp.MismatchError) as caught:
                call()
            said.append(f"{list(caught.value.ranks)} {caught.value}")
        assert world.all_reduce(mesh.rank) == 1  # the mesh stays usable
    return said


def test_ranks_that_differ_are_told(ranks: Launcher) -> None:
    one, other = ranks(2, run_differing)
    assert one == other
    for text, parts in zip(one, [
        ("max of float32 (3,)", "max of float64 (3,)"),
        ("(3,)", "(3, 1)"),
        ("max of", "min of"),
        ("sum of a float", "sum of an int"),
        ("sum of an int", "max of an int"),
        ("max of a float", "max of float64 (1,)"),
    ], strict=True):
        assert text.startswith("[1] all_reduce: expected the same") and "on rank 1" in text, text
        assert all(part in text for part in parts), text


def run_other_calls(folder: str) -> list[str]:
    said = []
    with hsdp.init_mesh(1, 2) as mesh:
        values = {"w": np.ones(3, np.float32)}
        calls: list[Callable[[], Any]] = [
            lambda: hsdp.write_snapshot(folder, values, mesh),
            lambda: mesh.world.all_reduce(1),
            lambda: hsdp.Reducer(mesh),
        ]
        for i in range(3):
            with pytest.raises(hsdp.MismatchError) as caught:
                calls[i - mesh.rank]()
            said.append(str(caught.value))
        assert mesh.world.all_reduce(mesh.rank) == 1  # the mesh stays usable
    return said


def test_ranks_that_make_other_calls_are_told_which(ranks: Launcher, tmp_path: Path) -> None:
    one, other = ranks(2, run_other_calls, str(tmp_path))
    assert one == other
    for text, (first, second) in zip(one, [
        ("write a snapshot", "make its Reducer"),
        ("all_reduce", "write a snapshot"),
        ("make its Reducer", "all_reduce"),
    ], strict=True):
        assert f"expected '{first}' on every rank, got '{second}' on rank 1 of 2; " in text, text


def test_what_cannot_be_reduced(mesh: hsdp.Mesh) -> None:
    frozen = np.ones(3)
    frozen.flags.writeable = False
    for x, op, words in [
        (1, "mean", "'sum', 'max', 'min'.*'mean'.*mean\\(x\\)"),
        (np.ones(3), "avg", "'avg'"),
        (True, "sum", "bool.*int\\(x\\)"),
        (np.int64(3), "sum", "writable.*int64.*x.item\\(\\)"),
        (frozen, "max", "writable.*copy"),
        (DlpackOnly(np.ones(3), versioned=False), "max", "writable"),
        ([1.0], "max", "array.*type list"),
        (np.ones(3, complex), "max", "complex128"),
    ]:
        with pytest.raises(hsdp.UsageError, match=f"^all_reduce: .*{words}"):
            mesh.world.all_reduce(x, op)


@pytest.mark.skipif(not HAS_TORCH, reason="needs torch")
def test_a_parameter_is_refused(mesh: hsdp.Mesh) -> None:
    import torch

    with pytest.raises(hsdp.UsageError, match="all_reduce.*requires a gradient.*detach"):
        mesh.world.all_reduce(torch.nn.Parameter(torch.ones(2)), op="max")
