"""Names hsdp's calls in the traces of torch.profiler."""

from __future__ import annotations

import contextlib
import sys
from contextlib import AbstractContextManager

from hsdp.framework import of_torch

_NOTHING = contextlib.nullcontext()


def profiler_range(name: str) -> AbstractContextManager[object]:
    """A block that torch.profiler shows under that name, on the thread that runs it; nothing while it
    does not record.

    Torch records the threads that it knows. Those of the library are in the traces of Nsight Systems.
    """
    if "torch.autograd.profiler" not in sys.modules:
        return _NOTHING
    if not of_torch("profiler_is_on")():
        return _NOTHING
    block: AbstractContextManager[object] = sys.modules["torch"].profiler.record_function(name)
    return block
