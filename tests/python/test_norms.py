"""Norms of the mean gradient of other kinds than 2, and clipping by them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from conftest import Launcher
from one_rank import add_gradient

import hsdp

SHAPES = {"w": (31, 7), "bias": (5,), "empty": (0,), "scalar": ()}


def gradient(name: str, rank: int) -> np.ndarray[Any, Any]:
    generator = np.random.default_rng([rank, len(name)])
    return 4.0 * generator.integers(-9, 9, SHAPES[name]).astype(np.float32)


def mean(ranks: int) -> np.ndarray[Any, Any]:
    means = [sum(gradient(name, r) for r in range(ranks)) / ranks for name in SHAPES]
    return np.concatenate([np.reshape(m, -1) for m in means]).astype(np.float32)


def step(reducer: hsdp.Reducer, rank: int) -> None:
    with reducer.microbatch(last=True):
        for name in SHAPES:
            reducer.gradient_ready(name, gradient(name, rank))


def run_norms(replicate: int, shard: int) -> dict[str, Any]:
    with hsdp.init_mesh(replicate, shard) as mesh:
        reducer = hsdp.Reducer(mesh)
        for name, shape in SHAPES.items():
            reducer.register(name, shape)
        found: dict[str, Any] = {}
        for norm_type in (1.0, 2.0, math.inf):
            step(reducer, mesh.rank)
            norm = float(reducer.grad_norm(norm_type))
            was = float(reducer.clip_grad_norm_(norm / 3, norm_type, error_if_nonfinite=True))
            whole = {name: np.empty(shape, np.float32) for name, shape in SHAPES.items()}
            reducer.gather_gradients(whole)
            found[str(norm_type)] = {
                "norm": norm,
                "was": was,
                "unchanged": float(reducer.clip_grad_norm_(norm, norm_type)),
                "clipped": np.concatenate([whole[name].reshape(-1) for name in SHAPES]).tolist(),
            }
        for bad in (math.nan, math.inf):
            with reducer.microbatch(last=True):
                for name in SHAPES:
                    array = gradient(name, mesh.rank)
                    if name == "bias" and mesh.rank == mesh.size - 1:
                        array[3] = bad
                    reducer.gradient_ready(name, array)
            before = np.array(reducer.shard("w"))
            for norm_type in (1.0, 2.0, math.inf):
                with pytest.raises(hsdp.Error, match=f"finite norm, got {bad}"):
                    reducer.clip_grad_norm_(1.0, norm_type, error_if_nonfinite=True)
            assert np.array_equal(before, np.asarray(reducer.shard("w")))
        step(reducer, mesh.rank)
        with pytest.raises(hsdp.UsageError, match="1, 2 or inf, got 3"):
            reducer.grad_norm(3)
        return found


@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (1, 3)])
def test_norms_of_one_two_and_infinity(ranks: Launcher, shape: tuple[int, int]) -> None:
    size = shape[0] * shape[1]
    whole = mean(size).astype(np.float64)
    for found in ranks(size, run_norms, *shape):
        for norm_type in (1.0, 2.0, math.inf):
            expected = np.linalg.norm(whole, norm_type)
            got = found[str(norm_type)]
            assert got["norm"] == got["was"] == pytest.approx(expected, rel=1e-7)
            factor = np.float32((got["norm"] / 3) / (got["norm"] + 1e-6))
            assert got["clipped"] == (whole.astype(np.float32) * factor).tolist()
            assert got["unchanged"] == pytest.approx(got["norm"] / 3, rel=1e-5)


def test_one_norm_over_several_reducers() -> None:
    with hsdp.init_mesh() as mesh:
        reducers = [hsdp.Reducer(mesh), hsdp.Reducer(mesh)]
        for i, reducer in enumerate(reducers):
            reducer.register("w", 3)
            add_gradient(reducer, "w", np.array([1, -2, 3 + i], np.float32), last=True)
        assert float(hsdp.clip_grad_norm_(reducers, 100, norm_type=1)) == 13
        assert float(hsdp.clip_grad_norm_(reducers, 2, norm_type=math.inf)) == 4
        assert np.asarray(reducers[1].shard("w")).tolist() == pytest.approx([0.5, -1, 2], rel=1e-6)


def run_two_meshes() -> list[Any]:
    found = []
    with (
        hsdp.init_mesh(1, 2) as wide,
        hsdp.init_mesh(2, 1) as tall,
        hsdp.Reducer(wide) as one,
        hsdp.Reducer(tall) as other,
    ):
        for norm_type in (1.0, 2.0, math.inf):
            for reducers in ([one, other], [other, one]):
                for reducer, values in ((one, [1, -2, 3, 4]), (other, [-9, 5])):
                    if not reducer.parameters:
                        reducer.register("w", len(values))
                    add_gradient(reducer, "w", np.array(values, np.float32), last=True)
                found.append(float(hsdp.clip_grad_norm_(reducers, 1, norm_type)))
    return found


def test_one_norm_over_reducers_of_several_meshes(ranks: Launcher) -> None:
    values = np.array([1, -2, 3, 4, -9, 5], np.float64)
    expected = [np.linalg.norm(values, norm_type) for norm_type in (1, 1, 2, 2, np.inf, np.inf)]
    for found in ranks(2, run_two_meshes):
        assert found == pytest.approx(expected, rel=1e-7)


def test_what_is_no_limit_and_no_reducer() -> None:
    with hsdp.init_mesh() as mesh, hsdp.Reducer(mesh) as reducer:
        reducer.register("w", 2)
        add_gradient(reducer, "w", np.array([3, -4], np.float32), last=True)
        for norm_type in (1.0, 2.0, math.inf):
            for limit in (-0.5, math.nan):
                with pytest.raises(hsdp.UsageError, match=f"max_norm of at least 0, got {limit:g}"):
                    reducer.clip_grad_norm_(limit, norm_type)
            for wrong, message in [
                ([], "none"), ([reducer, reducer], "one again as number 1; pass each once"),
                ([np.ones(2)], "an object of type ndarray as number 0; .*torch.nn.utils"),
            ]:
                with pytest.raises(hsdp.UsageError, match=f"expected Reducers, got {message}"):
                    hsdp.clip_grad_norm_(wrong, 1.0, norm_type)  # type: ignore[arg-type]
        assert float(hsdp.clip_grad_norm_(reducer, 100.0)) == 5
        assert np.asarray(reducer.shard("w")).tolist() == [3, -4]


@pytest.mark.filterwarnings("error")
def test_by_what_is_not_finite_all_norms_clip_alike() -> None:
    with hsdp.init_mesh() as mesh, hsdp.Reducer(mesh) as reducer:
        reducer.register("w", 2)
        for bad, expected in [(math.nan, [math.nan, 1.0]), (math.inf, [math.nan, 0.0])]:
            for norm_type in (1.0, 2.0, math.inf):
                add_gradient(reducer, "w", np.array([bad, 1], np.float32), last=True)
                reducer.clip_grad_norm_(0.5, norm_type)
                np.testing.assert_array_equal(np.asarray(reducer.shard("w")), expected)
