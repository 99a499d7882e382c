"""Where a program's work on a GPU goes at the moment."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from hsdp.errors import UsageError

#: of CUDA: what programs use that know of no streams
LEGACY_DEFAULT = 0


class CurrentStream:
    """Gives the calling thread's stream of one device each time it is called: a cudaStream_t."""

    def __init__(self, device: str) -> None:
        self._index = int(device.partition(":")[2])
        self._source: Callable[[], int] | None = None
        self._raw: Callable[[int], int] | None = None  # asked for every gradient

    def set(self, stream: Any) -> None:
        """Follows `stream` from now on, as `Mesh.set_stream` says."""
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


# An int, or what torch (cuda_stream), CuPy (ptr) and others (handle) call it.
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
