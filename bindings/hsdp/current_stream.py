"""Where a program's GPU work currently goes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from hsdp.errors import UsageError

#: CUDA's stream for programs that do not use streams
LEGACY_DEFAULT = 0


class CurrentStream:
    """Returns the calling thread's current stream of one device, a cudaStream_t, at each call."""

    def __init__(self, device: str) -> None:
        self._index = int(device.partition(":")[2])
        self._source: Callable[[], int] | None = None
        self._raw: Callable[[int], int] | None = None  # called for every gradient

    def set(self, stream: Any) -> None:
        """From now on follows `stream`, as described in `Mesh.set_stream`."""
        if stream is None:
            self._source = None
        elif callable(stream):
            self._source = lambda: _handle_of(stream())
        else:
            handle = _handle_of(stream)
            self._source = lambda: handle

    def __call__(self) -> int:
        if self._source is not None:
            return self._source()
        if self._raw is None:
            cuda = getattr(sys.modules.get("torch"), "cuda", None)
            if cuda is None or not cuda.is_initialized():
                return LEGACY_DEFAULT
            self._raw = getattr(sys.modules.get("hsdp.torch.private_torch"), "current_raw_stream", None)
            if self._raw is None:
                handle: int = cuda.current_stream(self._index).cuda_stream
                return handle
        return self._raw(self._index)


# An int, or the attribute of torch (cuda_stream), CuPy (ptr) and others (handle).
def _handle_of(stream: Any) -> int:
    for name in ("cuda_stream", "ptr", "handle"):
        found = getattr(stream, name, None)
        if isinstance(found, int):
            return found
    if isinstance(stream, int) and not isinstance(stream, bool) and stream >= 0:
        return stream
    raise UsageError(
        "mesh: set_stream: expected None, a cudaStream_t as an int, a torch or CuPy stream, or a "
        f"function that returns one, got {stream!r}"
    )
