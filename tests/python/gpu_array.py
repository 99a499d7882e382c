"""Arrays on a GPU of the stand-in for the CUDA runtime, which look as CuPy's do."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from dlpack_only import Handmade, Tensor, capsule

from hsdp import _hsdp

stand_in: Any = getattr(_hsdp, "stand_in")

CODES = {"float32": (2, 32, 1), "float16": (2, 16, 1), "int64": (0, 64, 1), "float64": (2, 64, 1)}
CUDA = 2


class GpuArray:
    """Holds `values` once `stream` has written them, and garbage before."""

    def __init__(self, values: Any, stream: int, index: int = 0) -> None:
        self.memory = np.full_like(values, 99)
        self.stream = stream
        self.streams: list[int] = []  # the streams that consumers passed
        self._index = index
        self._alive: list[Any] = []  # until all work is done
        self.write(values)

    def write(self, values: np.ndarray[Any, Any]) -> None:
        """Enqueues a write."""
        source = np.array(values, self.memory.dtype)
        self._alive.append(source)
        stand_in.copy(self.stream, self.memory.ctypes.data, source.ctypes.data, source.nbytes)

    def read(self) -> np.ndarray[Any, Any]:
        """What the memory holds once its stream is done."""
        stand_in.synchronize(self.stream)
        return self.memory.copy()

    def __dlpack__(self, *, stream: int) -> Any:
        self.streams.append(stream)
        stand_in.order(stream, self.stream)
        exported = Handmade(self.memory, (CUDA, self._index), CODES[str(self.memory.dtype)])
        self._alive.append(exported)
        return exported.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (CUDA, self._index)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"data": (self.memory.ctypes.data, False), "shape": self.memory.shape, "version": 3}


_DESCRIBE = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(Tensor))
_CURRENT_STREAM = ctypes.PYFUNCTYPE(
    ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p)
)


class _ExchangeApi(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("older", ctypes.c_void_p),
        ("unused", ctypes.c_void_p * 3),
        ("describe", _DESCRIBE),
        ("current_stream", _CURRENT_STREAM),
    ]


class TensorLike(GpuArray):
    """With C functions to look at it, as torch.Tensor has them."""

    current_stream = 0
    asked: list[tuple[int, int]] = []  # the devices whose stream was asked for

    def __init__(self, values: Any, stream: int, index: int = 0) -> None:
        super().__init__(values, stream, index)
        self.exported = Handmade(self.memory, (CUDA, index), CODES[str(self.memory.dtype)])

    def is_neg(self) -> bool:
        """As torch.Tensor.is_neg()."""
        return False


@_DESCRIBE
def _describe(array: Any, out: Any) -> int:
    ctypes.memmove(out, ctypes.byref(array.exported.tensor), ctypes.sizeof(Tensor))
    return 0


@_CURRENT_STREAM
def _current_stream(kind: int, index: int, out: Any) -> int:
    TensorLike.asked.append((kind, index))
    out[0] = TensorLike.current_stream
    return 0


_NAME = b"dlpack_exchange_api"
_API = _ExchangeApi(1, 3, None, (ctypes.c_void_p * 3)(), _describe, _current_stream)
setattr(TensorLike, "__dlpack_c_exchange_api__", capsule(_API, _NAME))


class Reader:
    """Copies memory of hsdp on a stream for which it takes the array by DLPack."""

    def __init__(self, array: Any, stream: int) -> None:
        assert array.__dlpack_device__() == (CUDA, 0)
        self._capsule = array.__dlpack__(stream=stream)
        self._stream = stream
        self._copy = np.full(array.size, np.nan, {"f32": "float32"}[array.dtype])
        stand_in.copy(stream, self._copy.ctypes.data, array.data_ptr, self._copy.nbytes)

    def values(self) -> np.ndarray[Any, Any]:
        stand_in.synchronize(self._stream)
        return self._copy
