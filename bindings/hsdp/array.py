"""The library's memory as an array: zero-copy for NumPy, and for others through DLPack."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from hsdp import _hsdp
from hsdp.errors import UsageError

#: A torch tensor for parameters of an attached torch model, otherwise an `hsdp.Array`. Types cannot
#: tell which.
TensorOrArray: TypeAlias = Any


class Array(NDArrayOperatorsMixin):
    """A one-dimensional view of memory that hsdp owns: a shard, or the result of `allocate`.

    Nothing is copied: `numpy.asarray(x)` and `x.numpy()` are NumPy arrays over the same memory,
    `torch.from_dlpack(x)` is a tensor over it. Indexing, assignment and arithmetic work as on that
    NumPy array. The memory lives as long as the array or anything made from it, even after the Reducer
    or Mesh is closed or gone; the call that returned the array says how long its content is valid.

    GPU memory is exported only through DLPack, for example `torch.from_dlpack`: the consumer's stream
    waits for the content, the host does not.
    """

    __slots__ = ("_hsdp_memory", "_numpy")

    def __init__(self, memory: _hsdp.Memory) -> None:
        self._hsdp_memory = memory
        self._numpy: np.ndarray[Any, Any] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""
        return self._hsdp_memory.shape

    @property
    def size(self) -> int:
        """The number of elements."""
        return self._hsdp_memory.count

    @property
    def dtype(self) -> str:
        """The element type: "f32", "bf16", "f16", "f64", "i64" or "u8"."""
        return self._hsdp_memory.dtype

    @property
    def device(self) -> str:
        """Where the memory is: "cpu" or "cuda:0"."""
        return self._hsdp_memory.device

    @property
    def data_ptr(self) -> int:
        """The address of the first element."""
        return self._hsdp_memory.pointer

    def numpy(self) -> np.ndarray[Any, Any]:
        """The memory as a writable NumPy array, without a copy; bf16 needs the package ml_dtypes.

        Raises UsageError for memory of a CUDA device, and for bf16 without ml_dtypes.
        """
        if self._numpy is None:
            self._numpy = self._hsdp_memory.numpy()
        return self._numpy

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        array = self.numpy()
        if dtype is not None and np.dtype(dtype) != array.dtype:
            if copy is False:
                raise ValueError(f"array: cannot become {np.dtype(dtype)} without a copy")
            return array.astype(dtype)
        return array.copy() if copy else array

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        outputs = kwargs.get("out")
        if outputs is not None:
            kwargs["out"] = tuple(_plain(x) for x in outputs)
        result = getattr(ufunc, method)(*(_plain(x) for x in inputs), **kwargs)
        return outputs[0] if outputs is not None and len(outputs) == 1 else result

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(
                f"array: expected dl_device to be that of this memory, {self.__dlpack_device__()}, got "
                f"{tuple(dl_device)}; copy the result"
            )
        if copy:
            raise BufferError("array: expected copy=None or False, got True; copy the result")
        return self._hsdp_memory.dlpack(max_version is not None and max_version[0] >= 1, stream)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._hsdp_memory.dlpack_device()

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[Any]:
        return iter(self.numpy())

    def __getitem__(self, key: Any) -> Any:
        return self.numpy()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.numpy()[key] = _plain(value)

    def __float__(self) -> float:
        if self.device != "cpu" and self.dtype == "f64" and self.size == 1:
            return self._hsdp_memory.number()
        return float(self.numpy().item())

    def __repr__(self) -> str:
        return f"hsdp.Array({self.size} x {self.dtype}, {self.device})"


def _plain(value: Any) -> Any:
    return value.numpy() if isinstance(value, Array) else value


def as_shape(shape: Any) -> tuple[int, ...]:
    """A shape from an int or a sequence of ints."""
    try:
        return (operator.index(shape),)
    except TypeError:
        pass
    try:
        return tuple(operator.index(extent) for extent in shape)
    except TypeError:
        raise UsageError(
            f"reducer: register: shape: expected an int or several, got {shape!r}"
        ) from None
