"""Memory of whole gradients in p.grad, used again from one gather to the next."""

from __future__ import annotations

import sys

import torch

from hsdp.torch import private_torch


class GatheredGradients:
    """One tensor for each parameter, as long as nobody else holds the last one's memory.

    On the host, where fresh memory is paid for by page faults. On a GPU torch's allocator gives the
    same memory again by itself, and others may use it during the backward pass.
    """

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}

    def take(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """An uninitialized gradient, with the strides of the parameter."""
        kept = self._kept.get(name)
        if kept is None or not _fits(kept, parameter) or _holders(kept) != _ALONE:
            kept = torch.empty_like(parameter, requires_grad=False)
            if kept.is_cpu:
                self._kept[name] = kept
        # Whoever holds this one, or anything over its memory, holds the storage beside `_kept`.
        return kept.detach()

    def release(self) -> None:
        """Lets go of what nobody else holds, too."""
        self._kept.clear()


def _fits(kept: torch.Tensor, parameter: torch.Tensor) -> bool:
    return (kept.shape, kept.stride(), kept.dtype, kept.device) == (
        parameter.shape, parameter.stride(), parameter.dtype, parameter.device
    )


# Of tensors (NumPy's arrays over them, too), and of Python's object for the storage.
def _holders(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return private_torch.storage_holders(storage), sys.getrefcount(storage)


_ALONE = _holders(torch.empty(1))
