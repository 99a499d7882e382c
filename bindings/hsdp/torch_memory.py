"""Uses torch's caching allocator for GPU memory, if the program uses torch on GPUs."""

from __future__ import annotations

import sys
from typing import Any

from hsdp import _hsdp


def _torch() -> Any:
    """Torch, if it has been imported and has used a GPU."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    return torch if cuda is not None and cuda.is_initialized() else None


def _allocate(index: int, size: int, stream: int) -> tuple[int, object] | None:
    torch = _torch()
    if torch is None:
        return None
    device = torch.device("cuda", index)
    own = torch.cuda.ExternalStream(stream, device=device)
    with torch.cuda.device(device), torch.cuda.stream(own):  # otherwise the memory returns to GPU 0
        memory = torch.empty(size, dtype=torch.uint8, device=device)
    return memory.data_ptr(), memory


def _give_back_unused(index: int) -> None:
    torch = _torch()
    if torch is not None:
        with torch.cuda.device(index):
            torch.cuda.empty_cache()


def use_torch_memory() -> None:
    """Makes both use one pool: memory that one has freed is available to the other."""
    _hsdp.set_memory_source(_allocate, _give_back_unused)
