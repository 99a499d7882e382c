"""The package on GPUs of the stand-in for the CUDA runtime: what runs on which stream, that the host does not
wait, exact results, and refusals.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import Launcher, on_ranks
from gpu_array import GpuArray, Reader, TensorLike, stand_in
from one_rank import add_gradient, registered

import hsdp
from hsdp import _hsdp

SHAPE = (37, 5)


def gpu_mesh(replicate: int = 1, shard: int = 1) -> hsdp.Mesh:
    return hsdp.Mesh(stand_in.init_mesh(replicate, shard, 0))


@pytest.fixture
def mesh() -> Iterator[hsdp.Mesh]:
    with gpu_mesh() as mesh:
        yield mesh


@pytest.fixture
def stream(mesh: hsdp.Mesh) -> Iterator[int]:
    handle = stand_in.make_stream()
    mesh.set_stream(handle)
    yield handle
    stand_in.synchronize(handle)


def gradient(rank: int, microbatch: int) -> np.ndarray[Any, Any]:
    """Integers, so that sums are exact."""
    return (np.arange(np.prod(SHAPE)).reshape(SHAPE) * (1 + rank) + microbatch).astype(np.float32)


def mean(size: int, microbatches: int) -> np.ndarray[Any, Any]:
    parts = [gradient(r, m) for r in range(size) for m in range(microbatches)]
    return np.sum(parts, axis=0, dtype=np.float32).reshape(-1) / np.float32(size)


def run_step(reducer: hsdp.Reducer, stream: int, microbatches: int = 2) -> list[GpuArray]:
    """Gradients are overwritten as soon as hsdp allows that."""
    made = []
    for m in range(microbatches):
        array = GpuArray(gradient(reducer.mesh.rank, m), stream)
        add_gradient(reducer, "w", array, last=m == microbatches - 1)
        array.write(np.full(SHAPE, np.nan))
        made.append(array)
    return made


def step_of_rank(replicate: int, shard: int) -> None:
    with gpu_mesh(replicate, shard) as mesh:
        stream = stand_in.make_stream()
        mesh.set_stream(stream)
        reducer = registered(mesh, "w", SHAPE, bucket_bytes=128)
        want = mean(mesh.size, 2)
        for _ in range(2):
            alive = run_step(reducer, stream)
            offset, count = reducer.slice("w")
            whole = GpuArray(np.zeros(SHAPE, np.float32), stream)
            found = GpuArray(np.array(-1, np.float32), stream)
            reducer.gather_gradients({"w": whole})
            assert reducer.found_inf_tensor(found) is found
            got = Reader(reducer.shard("w"), stream).values()
            np.testing.assert_array_equal(got, want[offset : offset + count])
            np.testing.assert_array_equal(whole.read().reshape(-1), want)
            assert found.read() == 0.0
            norm = float(np.linalg.norm(want.astype("f8")))
            assert float(reducer.grad_norm()) == pytest.approx(norm)
            assert float(reducer.clip_grad_norm_(norm / 2)) == pytest.approx(norm)
            got = Reader(reducer.shard("w"), stream).values()
            np.testing.assert_allclose(got, want[offset : offset + count] / 2, rtol=1e-5)
            assert len(alive) == 2
        infinite = GpuArray(np.full(SHAPE, np.inf, np.float32), stream)
        add_gradient(reducer, "w", infinite, last=True)
        reducer.found_inf_tensor(found)
        assert found.read() == 1.0
        assert reducer.found_inf()
        reducer.close()


@pytest.mark.parametrize("replicate,shard", [(1, 2), (2, 1), (2, 2)])
def test_steps_are_exact_on_every_mesh(ranks: Launcher, replicate: int, shard: int) -> None:
    ranks(replicate * shard, step_of_rank, replicate, shard)


def test_the_host_does_not_wait(mesh: hsdp.Mesh, stream: int) -> None:
    reducer = registered(mesh, "w", SHAPE)
    alive = run_step(reducer, stream)
    assert not reducer.found_inf()
    whole = GpuArray(np.zeros(SHAPE, np.float32), stream)
    found = GpuArray(np.array(-1, np.float32), stream)
    with stand_in.Standstill():
        alive += run_step(reducer, stream)
        reducer.finish()
        shard = Reader(reducer.shard("w"), stream)
        elsewhere = Reader(reducer.shard("w"), stand_in.make_stream())
        reducer.gather_gradients({"w": whole})
        reducer.found_inf_tensor(found)
        norm = reducer.clip_grad_norm_(1e9)
        assert not stand_in.is_done(stream)
    for taken in (elsewhere, shard):
        np.testing.assert_array_equal(taken.values(), mean(1, 2))
    with stand_in.Standstill():  # meanwhile a step overwrites what was read on another stream
        last = GpuArray(gradient(0, 0), stream)
        add_gradient(reducer, "w", last, last=False)
        partial = Reader(reducer.partial_shard("w"), stream)
        assert not stand_in.is_done(stream)
    np.testing.assert_array_equal(whole.read().reshape(-1), mean(1, 2))
    np.testing.assert_array_equal(partial.values(), gradient(0, 0).reshape(-1))
    assert found.read() == 0.0
    assert float(norm) == pytest.approx(float(np.linalg.norm(mean(1, 2).astype("f8"))))
    assert repr(norm) == "hsdp.Array(1 x f64, cuda:0)"
    assert len(alive) == 4


def test_a_hook_asks_the_class_of_its_gradients(mesh: hsdp.Mesh) -> None:
    reducer = registered(mesh, "w", SHAPE)
    left: list[Any] = []  # what is returned to Python
    hook = _hsdp.gradient_hook(
        reducer._handle, 0, _hsdp.HeldGradients(), lambda p: left.append(p.grad), lambda error: error, TensorLike
    )
    theirs, named = stand_in.make_stream(), stand_in.make_stream()
    TensorLike.current_stream = theirs
    alive = []
    for stream in (theirs, named, theirs):
        mesh.set_stream(named if stream == named else None)  # a stream that the program names takes precedence
        TensorLike.asked.clear()
        array = TensorLike(gradient(0, 1), stream)
        alive.append(array)
        parameter = SimpleNamespace(grad=array)
        with reducer.microbatch(last=True):
            hook(parameter)
        assert parameter.grad is None
        assert TensorLike.asked == ([] if stream == named else [(2, 0)])
        got = Reader(reducer.shard("w"), named).values()
        np.testing.assert_array_equal(got, gradient(0, 1).reshape(-1))
    assert not left
    elsewhere = TensorLike(gradient(0, 1), theirs, index=1)
    narrow = TensorLike(gradient(0, 1).astype(np.float16), theirs)
    for other in (elsewhere, narrow, GpuArray(gradient(0, 1), theirs)):
        hook(SimpleNamespace(grad=other))
        assert left.pop() is other


def test_producers_are_told_the_stream(mesh: hsdp.Mesh) -> None:
    reducer = registered(mesh, "w", SHAPE)
    first, second = stand_in.make_stream(), stand_in.make_stream()
    array = GpuArray(gradient(0, 0), stand_in.make_stream())
    for source, want in [
        (None, 1), (first, first), (type("Torch", (), {"cuda_stream": second})(), second),
        (type("CuPy", (), {"ptr": first})(), first), (1, 1), (lambda: second, second),
    ]:
        mesh.set_stream(source)
        array.streams.clear()
        add_gradient(reducer, "w", array, last=True)
        assert array.streams == [want]
    for wrong in ["main", -1, True, 1.5]:
        with pytest.raises(hsdp.UsageError, match="set_stream: expected None, a cudaStream_t"):
            mesh.set_stream(wrong)
    reducer.close()
    stand_in.synchronize(array.stream)


def test_gradients_are_let_go(mesh: hsdp.Mesh, stream: int) -> None:
    reducer = registered(mesh, "w", SHAPE)

    class Export:
        def __init__(self, array: GpuArray) -> None:
            self.capsule = array.__dlpack__(stream=array.stream)

        def __dlpack__(self, **_: object) -> object:
            return self.capsule

        def __dlpack_device__(self) -> tuple[int, int]:
            return (2, 0)

        def references(self) -> int:
            return sys.getrefcount(self.capsule)

    array = GpuArray(gradient(0, 0), stream)
    for ordered in [False, True]:
        export = Export(array)
        count = export.references()
        with stand_in.Standstill():
            reducer.begin_microbatch(last=True)
            if ordered:
                address = array.memory.ctypes.data
                reducer._handle.gradient_of(0, address, None, export.capsule)
            else:
                reducer.gradient_ready("w", export)
            reducer.end_microbatch()
            shard = reducer.shard("w")
            gc.collect()
            assert export.references() > count
        reducer.found_inf()  # the GPU is done
        reducer.grad_norm()  # any call looks for owners that can be released
        assert export.references() == count
        assert shard.size == array.memory.size


def test_memory_of_another_device_is_refused(mesh: hsdp.Mesh, stream: int) -> None:
    reducer = registered(mesh, "w", SHAPE)
    on_host = gradient(0, 0)
    elsewhere = GpuArray(on_host, stream, index=1)
    remedy = "; move it there, or make the mesh with its device"
    for array, where in [(on_host, "cpu"), (elsewhere, "cuda:1")]:
        message = f"expected memory on cuda:0, the mesh's device, got {where}{remedy}"
        with pytest.raises(hsdp.UsageError, match=f"gradient of 'w': {message}"):
            add_gradient(reducer, "w", array, last=True)
        with pytest.raises(hsdp.UsageError, match=message):
            reducer.gather_gradients({"w": array})
        with pytest.raises(hsdp.UsageError, match=message):
            reducer.found_inf_tensor(array)
        with pytest.raises(hsdp.UsageError, match=message):
            mesh.world.all_reduce(array)
    assert elsewhere.streams == []  # not even asked
    on_gpu = GpuArray(on_host, stream)
    with hsdp.init_mesh() as host:
        other = registered(host, "w", SHAPE)
        message = f"expected memory on cpu, the mesh's device, got cuda:0{remedy}"
        with pytest.raises(hsdp.UsageError, match=f"gradient of 'w': {message}"):
            add_gradient(other, "w", on_gpu, last=True)
        with pytest.raises(hsdp.UsageError, match=message):
            host.world.all_reduce(on_gpu)
        with pytest.raises(hsdp.UsageError, match="set_stream: expected a mesh on a CUDA device"):
            host.set_stream(None)
        other.close()
    alive = run_step(reducer, stream)  # still usable
    with pytest.raises(hsdp.UsageError, match="expected host memory for NumPy, got cuda:0"):
        np.asarray(reducer.shard("w"))
    assert len(alive) == 2


@on_ranks(2)
def test_the_groups_work_on_the_stream() -> None:
    with gpu_mesh(1, 2) as mesh:
        stream = stand_in.make_stream()
        mesh.set_stream(stream)
        world, rank = mesh.world, mesh.rank
        array = GpuArray(np.full(3, 1 + rank, np.float32), stream)
        root = GpuArray(np.full(2, rank, np.float32), stream)
        world.barrier()
        with stand_in.Standstill():
            gathered = Reader(world.all_gather(array), stream)
            scattered = Reader(world.reduce_scatter(array), stream)
            world.all_reduce(array)
            world.broadcast(root, 1)
            world.barrier()
            assert not stand_in.is_done(stream)
        np.testing.assert_array_equal(gathered.values(), [1, 1, 1, 2, 2, 2])
        np.testing.assert_array_equal(scattered.values(), [3, 3] if rank == 0 else [3])
        np.testing.assert_array_equal(array.read(), [3, 3, 3])
        np.testing.assert_array_equal(root.read(), [1, 1])
        assert world.mean(rank) == 0.5
        world.mean(array)
        np.testing.assert_array_equal(array.read(), [3, 3, 3])


@on_ranks(2)
def test_rows_are_reduced_on_the_stream() -> None:
    with gpu_mesh(2, 1) as mesh:
        mesh.set_stream(stand_in.make_stream())
        place = ("w", (3,), "float32", 0, 3, 0)
        group = {"name": "w", "wire": "f32", "count": 3, "parameters": [place]}
        rows = _hsdp.RowReducer(mesh._handle, [group], None, 0)
        for value in (1.0, np.inf, 3.0):
            array = GpuArray(np.full(3, value * (1 + 2 * mesh.rank), np.float32), stand_in.make_stream())
            rows.set_requires_all_reduce(False, [0])
            rows.keep(0, array)
            rows.set_requires_all_reduce(True, [0])
            rows.reduce(0, array, array, 1)
            rows.end_backward()
            stand_in.order(array.stream, mesh._stream())
            np.testing.assert_array_equal(array.read(), np.full(3, value * 4))
            assert rows.begin_finish() == []
            rows.end_finish()
        assert rows.all_reduce_count == 3 and rows.kept_bytes == 0


class TorchMemory:
    """What hsdp asks torch for: memory from an allocator that knows what is in use."""

    uint8 = "uint8"

    class Tensor:
        def __init__(self, torch: TorchMemory, size: int) -> None:
            self._torch, self._size = torch, size
            self._memory = np.empty(size, np.uint8)
            torch.in_use += size

        def data_ptr(self) -> int:
            return int(self._memory.ctypes.data)

        def __del__(self) -> None:
            self._torch.in_use -= self._size

    def __init__(self, *, initialized: bool = True, limit: int = 1 << 40) -> None:
        self.cuda = self
        self._initialized, self._limit = initialized, limit
        self.in_use = self.most = self.emptied = 0

    def is_initialized(self) -> bool:
        return self._initialized

    def current_stream(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(cuda_stream=0)

    def device(self, name: str | int, index: int = 0) -> Any:
        return nullcontext(f"{name}:{index}")

    def ExternalStream(self, stream: int, device: Any) -> int:
        return stream

    def stream(self, stream: int) -> Any:
        assert stream != 0, "a stream of hsdp's"
        return nullcontext()

    def empty(self, size: int, dtype: str, device: Any) -> TorchMemory.Tensor:
        if self.in_use + size > self._limit:
            raise RuntimeError("CUDA out of memory.")
        tensor = TorchMemory.Tensor(self, size)
        self.most = max(self.most, self.in_use)
        return tensor

    def empty_cache(self) -> None:
        self.emptied += 1


def mean_of_a_step(mesh: hsdp.Mesh) -> np.ndarray[Any, Any]:
    """Of two microbatches; the first is added up in separate memory."""
    stream = stand_in.make_stream()
    mesh.set_stream(stream)
    with hsdp.Reducer(mesh) as reducer:
        reducer.register("w", SHAPE)
        arrays = []
        for m, sync in enumerate(("none", "all")):
            arrays.append(GpuArray(gradient(0, m), stream))
            add_gradient(reducer, "w", arrays[-1], sync=sync)
        return Reader(reducer.shard("w"), stream).values()


@pytest.mark.parametrize("initialized", [False, True])
def test_memory_comes_from_torch_where_it_uses_a_gpu(
    monkeypatch: pytest.MonkeyPatch, initialized: bool
) -> None:
    torch = TorchMemory(initialized=initialized)
    monkeypatch.setitem(sys.modules, "torch", torch)
    with gpu_mesh() as mesh:
        np.testing.assert_array_equal(mean_of_a_step(mesh), mean(1, 2))
    assert torch.most >= 4 * gradient(0, 0).size if initialized else torch.most == 0
    assert torch.in_use == 0


def test_torch_gives_back_what_it_keeps_before_memory_runs_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = TorchMemory()
    monkeypatch.setitem(sys.modules, "torch", torch)
    with gpu_mesh() as mesh, hsdp.Reducer(mesh, missing="zero") as reducer:
        reducer.register("large", (1 << 24,))  # its scratch exceeds what the pool has
        stand_in.fail_allocation_once()
        with reducer.microbatch(last=True):
            pass
    assert torch.emptied == 1


def test_an_error_of_torchs_allocator_is_one_of_hsdp(
    mesh: hsdp.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", TorchMemory(limit=8))
    with pytest.raises(hsdp.Error, match="CUDA out of memory"):
        mean_of_a_step(mesh)
    monkeypatch.setitem(sys.modules, "torch", TorchMemory())
    np.testing.assert_array_equal(mean_of_a_step(mesh), mean(1, 2))
