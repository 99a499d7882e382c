"""Sums over real ranks, to the bit: rules 1, 2, 4 and 5 of docs/design.md through Python."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from conftest import on_mesh, on_meshes
from dlpack_only import DlpackOnly
from one_rank import add_gradient, registered

import hsdp

MICROBATCHES = 3
SHAPES = {"a": (7, 33), "b": (5,), "c": (2, 3, 64), "none": (0, 4), "one": ()}
DTYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}


def gradient(name: str, rank: int, microbatch: int, dtype: str) -> np.ndarray[Any, Any]:
    seed = [sorted(SHAPES).index(name), rank, microbatch]
    values = np.random.default_rng(seed).standard_normal(SHAPES[name]) * 3
    return np.asarray(values).astype(np.float32).astype(DTYPES[dtype])


def rounded(x: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    return x.astype(DTYPES[dtype]).astype(np.float32)


def expected_mean(name: str, mesh: hsdp.Mesh, dtype: str, wire: str, replica_wire: str) -> Any:
    """Carries for each replica in ascending rank, then over the replicas, then one division."""
    totals = []
    for replica in range(mesh.replicate_size):
        carry = np.zeros(SHAPES[name], np.float32)
        for m in range(MICROBATCHES):
            rows = [
                rounded(gradient(name, replica * mesh.shard_size + s, m, dtype), wire)
                for s in range(mesh.shard_size)
            ]
            t = rows[0]
            for row in rows[1:]:
                t = t + row
            carry = t if m == 0 else carry + t
        totals.append(rounded(carry, replica_wire) if mesh.replicate_size > 1 else carry)
    total = totals[0]
    for other in totals[1:]:
        total = total + other
    if mesh.replicate_size > 1:
        total = rounded(total, replica_wire)
    return (total / np.float32(mesh.size)).astype(np.float32)


def handed_over(x: np.ndarray[Any, Any], rank: int) -> Any:
    """The same values, on each rank as another kind of array."""
    if rank == 1:
        return np.asfortranarray(x) if x.ndim > 0 else x
    if rank == 2 and x.dtype != ml_dtypes.bfloat16:
        x.flags.writeable = False
        return DlpackOnly(x)
    if rank == 3 and x.ndim > 0:
        padded = np.zeros((*x.shape, 3), x.dtype)
        padded[..., 1] = x
        return padded[..., 1]
    return x


def check_reducer(
    mesh: hsdp.Mesh, dtype: str, wire: str | None, replica_wire: str | None, layout: str
) -> None:
    reducer = hsdp.Reducer(
        mesh, reduce_dtype=wire, replica_dtype=replica_wire, layout=layout, bucket_bytes=512
    )
    for name, shape in SHAPES.items():
        reducer.register(name, shape, dtype)
    for m in range(MICROBATCHES):
        with reducer.microbatch(last=m == MICROBATCHES - 1):
            for index, name in reversed(list(enumerate(SHAPES))):
                x = handed_over(gradient(name, mesh.rank, m, dtype), mesh.rank)
                reducer.gradient_ready(index if m == 1 else name, x)
    wire = wire or dtype
    for name in SHAPES:
        mean = expected_mean(name, mesh, dtype, wire, replica_wire or wire)
        offset, count = reducer.slice(name)
        shard = reducer.shard(name).numpy()
        assert shard.tobytes() == mean.ravel()[offset : offset + count].tobytes(), (name, dtype)
        whole = np.empty(SHAPES[name], np.float32)
        reducer.gather_gradients({name: whole})
        assert whole.tobytes() == mean.tobytes(), (name, dtype)
    reducer.close()


@on_meshes((2, 2), (1, 4))
def test_the_mean_gradient_is_exact(mesh: hsdp.Mesh) -> None:
    for layout in ["flat", "dim0"]:
        check_reducer(mesh, "f32", None, None, layout)
        check_reducer(mesh, "f32", "bf16", "f32", layout)
        check_reducer(mesh, "bf16", None, None, layout)
        check_reducer(mesh, "f16", None, "f32", layout)


@on_mesh(1, 3)
def test_collectives_are_exact(mesh: hsdp.Mesh) -> None:
    world = mesh.world
    for dtype in DTYPES:
        rows = [gradient("a", r, 0, dtype).ravel() for r in range(3)]
        total = rows[0].astype(np.float32)
        for row in rows[1:]:
            total = total + row.astype(np.float32)
        x = rows[world.rank].copy()
        assert world.all_reduce(x).tobytes() == total.astype(DTYPES[dtype]).tobytes()
        x = rows[world.rank].copy()
        mean = (total / np.float32(3)).astype(DTYPES[dtype])
        assert world.mean(x).tobytes() == mean.tobytes()
        cut = -(-total.size // 3)
        own = total[world.rank * cut : (world.rank + 1) * cut]
        x = rows[world.rank]
        x.flags.writeable = False
        got = world.reduce_scatter(x)
        assert got.dtype == dtype
        assert got.numpy().tobytes() == own.astype(DTYPES[dtype]).tobytes()
        out = np.empty(own.size, np.float32)
        assert world.reduce_scatter(x, out) is out and out.tobytes() == own.tobytes()
    check_moves(world)
    for x in [np.full(4, world.rank, np.int64), np.full(4, world.rank, np.float64)]:
        assert world.all_reduce(x).tolist() == [3] * 4
    for number in (float, int, np.float32, np.float64, np.int64):
        assert world.mean(number(world.rank)) == 1.0
    assert world._handle.counts()["all_gather"][0] == 2


def check_moves(world: hsdp.Communicator) -> None:
    """all_gather, broadcast and shared memory: every byte arrives at its place."""
    ragged = np.full(world.rank * 2, world.rank, np.uint8)
    assert world.all_gather(ragged).numpy().tolist() == [1, 1, 2, 2, 2, 2]
    out = np.zeros(7, ml_dtypes.bfloat16)
    row = np.full([3, 3, 1][world.rank], world.rank + 1, ml_dtypes.bfloat16)
    assert world.all_gather(row, out) is out
    assert out.astype(int).tolist() == [1, 1, 1, 2, 2, 2, 3]
    x = np.full(5, world.rank)
    assert world.broadcast(x, root=2).tolist() == [2] * 5
    shared = world.allocate(1000, "bf16")
    shared[:] = world.rank + 1
    assert set(np.asarray(world.all_reduce(shared)).astype(int)) == {6}


@on_mesh(2, 2)
def test_schedules_factors_and_norms(mesh: hsdp.Mesh) -> None:
    """none, shard and all; partials; factor, loss scale and finish."""
    reducer = registered(mesh, "w", 8)

    def add(value: float, **how: Any) -> None:
        add_gradient(reducer, "w", np.full(8, value, np.float32), **how)

    add(1 + mesh.rank, sync="none")
    add(1 + mesh.rank, last=False)
    pair = 2 * (3 if mesh.rank < 2 else 7)
    assert set(reducer.partial_shard("w").numpy()) == {pair / 2}
    reducer.finish()
    reducer.finish()
    assert set(reducer.shard("w").numpy()) == {20 / 4}
    assert reducer.grad_norm() == pytest.approx(5 * 8**0.5)
    assert reducer.clip_grad_norm_(1.0) == pytest.approx(5 * 8**0.5)
    assert reducer.grad_norm() == pytest.approx(1.0, rel=1e-5)
    other = registered(mesh, "v", 1)
    add_gradient(other, "v", np.zeros(1, np.float32), last=True)
    assert hsdp.clip_grad_norm_([reducer, other], 0.5) == pytest.approx(1.0, rel=1e-5)
    reducer.set_loss_scale(2.0)
    reducer.set_gradient_divide_factor(16)
    add(8, last=False)
    reducer.discard()
    add(8, last=True)
    assert set(reducer.shard("w").numpy()) == {1.0} and not reducer.found_inf()
    reducer.set_gradient_divide_factor(None)
    reducer.divide_by_tokens(1 + mesh.rank % 2)
    add(6, last=True)
    assert set(reducer.shard("w").numpy()) == {24 / 6 / 2}
    add(np.inf if mesh.rank == 3 else 0, last=True)
    assert reducer.found_inf()
    check_parameters(mesh, reducer)
    reducer.close()
    reducer.close()
    stats = reducer.stats()
    assert (stats.step_count, stats.microbatch_count) == (4, 6)
    assert stats.engine == "host" and "step_count " in str(stats)


def check_parameters(mesh: hsdp.Mesh, reducer: hsdp.Reducer) -> None:
    weights = np.full(8, -1, np.float64)
    offset, count = reducer.slice("w")
    weights[offset : offset + count] = mesh.shard_rank
    reducer.gather_parameters({"w": weights})
    assert weights.tolist() == [0] * 4 + [1] * 4
