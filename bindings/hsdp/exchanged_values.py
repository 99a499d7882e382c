"""Reductions over the control connection: of numbers, and of arrays other than sums."""

from __future__ import annotations

import base64
import functools
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import numpy as np

from hsdp import _hsdp
from hsdp.array import Array
from hsdp.errors import MismatchError, UsageError
from hsdp.options import ReduceOp

NumberT = TypeVar("NumberT", int, float)

# Limit for all ranks' messages together; one exchange carries at most 64 MiB.
_MESSAGE_BYTES = 16 << 20


def reduce_number(group: _hsdp.Communicator, x: NumberT, op: ReduceOp) -> NumberT:
    """Reduces one int or float per rank, in ascending rank; ints exactly."""
    kind = type(x)
    header = f"{op} of {'an int' if kind is int else 'a float'}"
    values = [kind(text) for text in _exchange(group, header, repr(x))]
    if op == "sum":
        total = values[0]
        for value in values[1:]:
            total += value
        return total
    if kind is int:
        return max(values) if op == "max" else min(values)
    return kind(_extreme(op).reduce(np.array(values)))  # keeps a NaN


def reduce_array(group: _hsdp.Communicator, x: Any, op: ReduceOp) -> None:
    """The maximum or minimum of each element over the ranks, in place; a NaN wins."""
    host, is_bf16, put_back = _on_host(x)
    dtype = host.dtype.newbyteorder("=")
    header = f"{op} of {'bfloat16' if is_bf16 else dtype.name} {host.shape}"
    mine = host.astype(dtype).reshape(-1)
    each = max(1, _MESSAGE_BYTES // group.size // dtype.itemsize)
    for begin in range(0, max(mine.size, 1), each):
        part = mine[begin : begin + each]
        texts = _exchange(group, header, base64.b64encode(part.tobytes()).decode())
        rows = [np.frombuffer(base64.b64decode(text), dtype) for text in texts]
        part[:] = _reduce_bf16(rows, op) if is_bf16 else functools.reduce(_extreme(op), rows)
    host[...] = mine.reshape(host.shape)
    put_back()


def _extreme(op: ReduceOp) -> np.ufunc:
    return np.maximum if op == "max" else np.minimum


# bf16 is the upper half of fp32, which NumPy can compare.
def _reduce_bf16(rows: list[np.ndarray[Any, Any]], op: ReduceOp) -> np.ndarray[Any, Any]:
    wide = [(row.astype(np.uint32) << 16).view(np.float32) for row in rows]
    return (functools.reduce(_extreme(op), wide).view(np.uint32) >> 16).astype(np.uint16)


def _exchange(group: _hsdp.Communicator, header: str, text: str) -> list[str]:
    headers, texts = zip(
        *(word.split("\n") for word in group.exchange(f"{header}\n{text}", "all_reduce")), strict=True
    )
    for place, other in enumerate(headers):
        if other != headers[0]:
            ranks = group.ranks
            raise MismatchError(
                "all_reduce: expected the same op, dtype and shape on every rank, got "
                f"{headers[0]} on rank {ranks[0]} and {other} on rank {ranks[place]}; "
                "call it with the same kind of value everywhere",
                [ranks[place]],
            )
    return list(texts)


# A writable array over the memory, or over a copy to be written back; bf16 as uint16.
def _on_host(x: Any) -> tuple[np.ndarray[Any, Any], bool, Callable[[], None]]:
    torch = sys.modules.get("torch")
    on_gpu = isinstance(x, Array) and x.device != "cpu"
    if torch is not None and (on_gpu or isinstance(x, torch.Tensor)):
        return _tensor_on_host(torch, torch.from_dlpack(x) if on_gpu else x)
    if isinstance(x, Array):
        host = x.numpy()
    elif isinstance(x, np.ndarray):
        host = x
    elif hasattr(x, "__dlpack__"):
        try:
            host = np.from_dlpack(x)
        except (BufferError, RuntimeError, TypeError) as error:
            got = f"an object of type {_type(x)} ({error})"
            _refuse("an array in host memory or of torch", got)
    else:
        _refuse("a number or an array", f"an object of type {_type(x)}")
    if not host.flags.writeable:
        _refuse("a writable array", "a read-only one; pass a copy")
    is_bf16 = host.dtype.name == "bfloat16"
    return _comparable(host.view(np.uint16) if is_bf16 else host), is_bf16, lambda: None


def _tensor_on_host(
    torch: Any, x: Any
) -> tuple[np.ndarray[Any, Any], bool, Callable[[], None]]:
    if x.requires_grad:
        _refuse("an array to write to", "a tensor that requires a gradient; pass x.detach()")
    is_bf16 = x.dtype is torch.bfloat16
    try:
        host = x.cpu()
        array = host.view(torch.uint16).numpy() if is_bf16 else host.numpy()
    except (RuntimeError, TypeError, NotImplementedError) as error:
        _refuse("a dense tensor of numbers that can be compared", f"{x.dtype} ({error})")
    return _comparable(array), is_bf16, lambda: None if host is x else x.copy_(host)


def _comparable(host: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if host.dtype.kind not in "biuf":
        _refuse("numbers that can be compared", f"dtype {host.dtype.name}; reduce parts of it")
    return host


def _type(x: Any) -> str:
    return type(x).__name__


def _refuse(expected: str, got: str) -> NoReturn:
    raise UsageError(f"all_reduce: expected {expected}, got {got}")
