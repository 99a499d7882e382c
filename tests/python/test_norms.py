"""Norms of the mean gradient other than the 2-norm, and clipping by them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from conftest import on_meshes, on_ranks
from one_rank import add_gradient, registered

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


@on_meshes((1, 1), (2, 2), (1, 3))
def test_norms_of_one_two_and_infinity(mesh: hsdp.Mesh) -> None:
    reducer = hsdp.Reducer(mesh)
    for name, shape in SHAPES.items():
        reducer.register(name, shape)
    for norm_type in (1.0, 2.0, math.inf):
        step(reducer, mesh.rank)
        norm = float(reducer.grad_norm(norm_type))
        assert norm == pytest.approx(np.linalg.norm(mean(mesh.size).astype(np.float64), norm_type), rel=1e-7)
        assert float(reducer.clip_grad_norm_(norm / 3, norm_type, error_if_nonfinite=True)) == norm
        whole = {name: np.empty(shape, np.float32) for name, shape in SHAPES.items()}
        reducer.gather_gradients(whole)
        clipped = mean(mesh.size) * np.float32((norm / 3) / (norm + 1e-6))
        assert np.array_equal(np.concatenate([whole[name].reshape(-1) for name in SHAPES]), clipped)
        assert float(reducer.clip_grad_norm_(norm, norm_type)) == pytest.approx(norm / 3, rel=1e-5)
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


def test_one_norm_over_several_reducers() -> None:
    with hsdp.init_mesh() as mesh:
        reducers = [hsdp.Reducer(mesh), hsdp.Reducer(mesh)]
        for i, reducer in enumerate(reducers):
            reducer.register("w", 3)
            add_gradient(reducer, "w", np.array([1, -2, 3 + i], np.float32), last=True)
        assert float(hsdp.clip_grad_norm_(reducers, 100, norm_type=1)) == 13
        assert float(hsdp.clip_grad_norm_(reducers, 2, norm_type=math.inf)) == 4
        assert np.asarray(reducers[1].shard("w")).tolist() == pytest.approx([0.5, -1, 2], rel=1e-6)


@on_ranks(2)
def test_one_norm_over_reducers_of_several_meshes() -> None:
    with (
        hsdp.init_mesh(1, 2) as wide,
        hsdp.init_mesh(2, 1) as tall,
        registered(wide, "w", 4) as one,
        registered(tall, "w", 2) as other,
    ):
        for norm_type in (1.0, 2.0, math.inf):
            for reducers in ([one, other], [other, one]):
                add_gradient(one, "w", np.array([1, -2, 3, 4], np.float32), last=True)
                add_gradient(other, "w", np.array([-9, 5], np.float32), last=True)
                expected = np.linalg.norm([1, -2, 3, 4, -9, 5], norm_type)
                norm = float(hsdp.clip_grad_norm_(reducers, 1, norm_type))
                assert norm == pytest.approx(expected, rel=1e-7)


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
