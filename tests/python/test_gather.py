"""Gathers of updated parameters from Python, without a framework."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from conftest import on_mesh
from one_rank import registered

import hsdp

SHAPES = {"w": (300, 7), "bias": (5,), "empty": (0,), "scalar": ()}


def value(name: str, step: int) -> np.ndarray[Any, Any]:
    generator = np.random.default_rng([step, len(name)])
    return generator.standard_normal(SHAPES[name]).astype(np.float32)


@pytest.mark.parametrize(("dtype", "unit_bytes", "units"), [
    ("float32", 1 << 20, 1), ("float16", 1, 2),  # two are joined in a bucket
])
@on_mesh(2, 2)
def test_gathers_complete_parameters(mesh: hsdp.Mesh, dtype: str, unit_bytes: int, units: int) -> None:
    reducer = hsdp.Reducer(mesh, bucket_bytes=256)
    for name, shape in SHAPES.items():
        reducer.register(name, shape, "f32")
    reducer.prepare()
    arrays = {name: np.zeros(shape, dtype) for name, shape in SHAPES.items()}
    slices = {name: reducer.slice(name) for name in SHAPES}
    masters = {name: np.zeros(s.count, np.float32) for name, s in slices.items()}
    gather = hsdp.zero.ParameterGather(reducer, arrays, masters, unit_bytes)
    gather.wait_all()  # nothing was started yet
    for step in range(3):
        gather.fence()
        for name, own in slices.items():
            masters[name][:] = value(name, step).reshape(-1)[own.offset : own.offset + own.count]
        began = time.monotonic()
        gather.start()
        gather.wait("bias")
        assert gather.is_ready("bias")
        assert np.array_equal(arrays["bias"], value("bias", step).astype(dtype))
        gather.wait_all()
        for name, array in arrays.items():
            assert np.array_equal(array, value(name, step).astype(dtype)), name
    times = gather.last_times()
    assert set(times) == {name for name in SHAPES if np.prod(SHAPES[name]) > 0}
    assert all(began <= begin <= end <= time.monotonic() for begin, end in times.values())
    other = {name: np.full_like(array, 7) for name, array in arrays.items()}
    if mesh.rank == 0:  # a local call
        for name, array in other.items():
            gather.rebind(name, array)
    gather.start()
    gather.wait_all()
    for name, array in (other if mesh.rank == 0 else arrays).items():
        assert np.array_equal(array, value(name, 2).astype(dtype)), name
    with pytest.raises(hsdp.UsageError, match="2100 .*, as before, got 5"):
        gather.rebind("w", arrays["bias"])
    stats = gather.stats()
    assert len(gather._handle.units()) == units
    assert stats.gather_count == 4 * units and stats.exposed_s >= 0
    with pytest.raises(hsdp.UsageError, match="'unknown'"):
        gather.wait("unknown")


def test_what_is_refused() -> None:
    with hsdp.init_mesh() as mesh:
        reducer = registered(mesh, "w", (3,))
        whole = np.zeros(3, np.float32)

        def message(*arguments: Any) -> str:
            with pytest.raises(hsdp.UsageError) as error:
                hsdp.zero.ParameterGather(*arguments)
            return str(error.value)

        assert "got an object of type int" in message(3, {})
        assert "contiguous" in message(reducer, {"w": np.zeros(6, np.float32)[::2]})
        assert "array of 'w', which has a master" in message(reducer, {}, {"w": whole})
        gather = hsdp.zero.ParameterGather(reducer, {"w": whole})
        reducer.close()
        gather.start()  # it needs nothing from the Reducer
        gather.wait_all()
