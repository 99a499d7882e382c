"""Which arrays are accepted, and what the returned arrays support."""

from __future__ import annotations

import array
import gc
import sys
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from dlpack_only import DlpackOnly, Handmade
from one_rank import add_gradient, mesh, registered

import hsdp

def reduced(mesh: hsdp.Mesh, gradient: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    reducer = registered(mesh, "w", shape, dtype)
    add_gradient(reducer, "w", gradient, last=True)
    return reducer.shard("w").numpy()


def sample(shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    count = int(np.prod(shape))
    return (np.arange(count) % 251 - 100).astype(dtype).reshape(shape)


def frozen(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    x.flags.writeable = False
    return x


@pytest.mark.parametrize(
    ("handed_over", "shape", "dtype"),
    [
        *[(lambda x: x, (5, 33), dtype) for dtype in (np.float32, ml_dtypes.bfloat16, np.float16)],
        (lambda x: x.reshape(()), (1,), np.float32),
        (lambda x: x, (0, 5), np.float32),
        *[(DlpackOnly, (3, 4, 17), dtype) for dtype in (np.float32, np.float16)],
        *[(lambda x: DlpackOnly(x, False), (3, 4, 17), dtype) for dtype in (np.float32, np.float16)],
        (frozen, (64,), np.float32),
        (lambda x: DlpackOnly(frozen(x)), (64,), np.float32),
        (lambda x: array.array("f", x), (20,), np.float32),
        (lambda x: memoryview(array.array("f", x)), (20,), np.float32),
    ],
)
def test_kinds_of_gradients(mesh: hsdp.Mesh, handed_over: Any, shape: tuple[int, ...], dtype: Any) -> None:
    x = sample(shape, dtype)
    given = handed_over(x)
    got = reduced(mesh, given, getattr(given, "shape", shape), dtype)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, x.astype(np.float32).ravel())


def test_dlpack_bf16_and_byte_offset(mesh: hsdp.Mesh) -> None:
    x = sample((40,), ml_dtypes.bfloat16)
    got = reduced(mesh, Handmade(x[8:], dtype=(4, 16, 1), byte_offset=16), (32,), "bf16")
    np.testing.assert_array_equal(got, x[8:].astype(np.float32))


@pytest.mark.parametrize(
    "strided",
    [
        lambda x: x.T,
        lambda x: x[::2, ::3],
        lambda x: x[::-1, :],
        lambda x: np.moveaxis(x.reshape(4, 6, 50), 0, 2),
        lambda x: np.broadcast_to(x[0], (24, 50)),
    ],
)
def test_strided_gradients_are_read_in_logical_order(mesh: hsdp.Mesh, strided: Any) -> None:
    x = strided(sample((24, 50)))
    assert not x.flags.c_contiguous
    np.testing.assert_array_equal(reduced(mesh, x, x.shape, "f32"), x.ravel())


def test_dtype_spellings(mesh: hsdp.Mesh) -> None:
    reducer = hsdp.Reducer(mesh, reduce_dtype=ml_dtypes.bfloat16, replica_dtype=np.dtype("f4"))
    for i, dtype in enumerate(["bf16", "bfloat16", ml_dtypes.bfloat16, np.dtype("float16"), "f32"]):
        reducer.register(f"p{i}", 3, dtype)
    assert [p.dtype for p in reducer.parameters] == ["bf16", "bf16", "bf16", "f16", "f32"]
    assert reducer.parameters[0] == hsdp.Parameter("p0", (3,), "bf16", None, "")


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "f64", "i64", "u8"])
def test_allocated_memory_is_an_array(mesh: hsdp.Mesh, dtype: str) -> None:
    x = mesh.world.allocate(12, dtype)
    assert (x.shape, x.size, len(x), x.dtype, x.device) == ((12,), 12, 12, dtype, "cpu")
    view = np.asarray(x)
    assert view.ctypes.data == x.data_ptr and not view.any() and view.flags.writeable
    x[3:5] = [1, 2]
    assert view[3:5].astype(int).tolist() == [1, 2]
    assert np.array(x, copy=True).ctypes.data != x.data_ptr
    assert [int(value) for value in x] == view.astype(int).tolist()


def test_arrays_calculate_as_numpy_arrays(mesh: hsdp.Mesh) -> None:
    x = mesh.world.allocate(4)
    x[:] = [1, 2, 3, 4]
    assert (0.5 * x).tolist() == [0.5, 1, 1.5, 2]
    assert isinstance(x + x, np.ndarray)
    weights = np.ones(4, np.float32)
    weights -= 0.5 * x
    assert weights.tolist() == [0.5, 0, -0.5, -1]
    weights -= x
    before = x
    x *= 2
    assert x is before and x[3] == 8
    assert np.add.reduce(x) == 20
    assert np.asarray(x, np.float64).dtype == np.float64
    with pytest.raises(ValueError, match="without a copy"):
        np.asarray(x, np.float64, copy=False)


@pytest.mark.parametrize("version", [None, (1, 0), (2, 3)])
def test_arrays_are_exported_without_a_copy(mesh: hsdp.Mesh, version: Any) -> None:
    x = mesh.world.allocate(9)
    assert x.__dlpack_device__() == (1, 0)
    capsule = x.__dlpack__(max_version=version)
    assert ("versioned" in repr(capsule)) == (version is not None)
    del capsule  # not consumed: it must free the export
    view = np.from_dlpack(x)
    assert view.ctypes.data == x.data_ptr
    with pytest.raises(BufferError, match="copy"):
        x.__dlpack__(copy=True)
    with pytest.raises(BufferError, match="device"):
        x.__dlpack__(dl_device=(2, 0))


def test_an_array_is_taken_back(mesh: hsdp.Mesh) -> None:
    x = mesh.world.allocate(32)
    x[:] = np.arange(32)
    np.testing.assert_array_equal(reduced(mesh, x, (32,), "f32"), np.arange(32))
    assert mesh.world.all_reduce(x) is x


def test_views_outlive_everything(mesh: hsdp.Mesh) -> None:
    reducer = registered(mesh, "w", 1000)
    add_gradient(reducer, "w", np.full(1000, 7, np.float32), last=True)
    shard = reducer.shard("w")
    views = [shard.numpy(), np.from_dlpack(shard), shard, np.asarray(shard)[5:]]
    gone = weakref.ref(reducer)
    reducer.close()
    del reducer, shard
    gc.collect()
    assert gone() is None
    assert all((np.asarray(view) == 7).all() for view in views)
    views[0][:] = 8  # the memory is shared
    assert all((np.asarray(view) == 8).all() for view in views)


def test_allocated_memory_outlives_its_mesh() -> None:
    with hsdp.init_mesh() as mesh:
        x = mesh.world.allocate(100_000)
    del mesh
    view = x.numpy()
    del x
    gc.collect()
    view[:] = 3
    assert view.sum() == 300_000


def test_gradients_are_let_go(mesh: hsdp.Mesh) -> None:
    reducer = registered(mesh, "w", 50_000)
    x = np.ones(50_000, np.float32)
    holders = sys.getrefcount(x)
    add_gradient(reducer, "w", x, last=True)
    assert sys.getrefcount(x) == holders
    reducer.shard("w")[0] = 1


def test_collectives_of_one_rank(mesh: hsdp.Mesh) -> None:
    world = mesh.world
    x = np.arange(6, dtype=np.float64)
    assert world.all_reduce(x) is x
    assert world.mean(2) == 2.0 and isinstance(world.mean(2), float)
    assert (world.all_reduce(3), world.all_reduce(2.5, op="max")) == (3, 2.5)
    assert world.all_reduce(x, op="min") is x and x.tolist() == [*range(6)]
    assert world.broadcast(x) is x
    assert world.reduce_scatter(x).numpy().tolist() == list(range(6))
    out = np.zeros(6)
    assert world.all_gather(x, out) is out and out.tolist() == list(range(6))
    assert (world.rank, world.size, world.ranks) == (0, 1, (0,))
    world.barrier()
    assert world._handle.counts()["all_reduce"] == (0, 0)
