"""An array that supports DLPack and nothing else, as arrays of other libraries do."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np


class DlpackOnly:
    """Exports a NumPy array by DLPack, with the versioned protocol (which marks read-only memory) or
    without."""

    def __init__(self, array: np.ndarray[Any, Any], versioned: bool = True) -> None:
        self._array = array
        self._versioned = versioned

    def __dlpack__(self, **arguments: Any) -> Any:
        if not self._versioned:
            if arguments:
                raise TypeError("__dlpack__() got an unexpected keyword argument")
            return self._array.__dlpack__()
        return self._array.__dlpack__(**arguments)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


class Tensor(ctypes.Structure):
    """DLPack's description of an array."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class Handmade:
    """A hand-made capsule with any device, dtype and byte offset, for what NumPy cannot export."""

    def __init__(
        self,
        array: np.ndarray[Any, Any],
        device: tuple[int, int] = (1, 0),
        dtype: tuple[int, int, int] = (2, 32, 1),
        byte_offset: int = 0,
    ) -> None:
        self._array = array
        self._shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        self.tensor = Tensor(
            array.ctypes.data - byte_offset, *device, array.ndim, *dtype, self._shape, None,
            byte_offset,
        )
        self._managed = _Managed(self.tensor, None, None)

    def __dlpack__(self) -> Any:
        return capsule(self._managed, b"dltensor")

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.tensor.device_type, self.tensor.device_id)


def capsule(struct: ctypes.Structure, name: bytes) -> Any:
    """A capsule with this address. The memory and the name live as long as something refers to them."""
    make = ctypes.pythonapi.PyCapsule_New
    make.restype = ctypes.py_object
    make.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return make(ctypes.addressof(struct), name, None)
