"""Memory of whole gradients in p.grad, reused from one gather to the next."""

from __future__ import annotations

import sys

import torch

from hsdp.torch import private_torch


class GatheredGradients:
    """One tensor per parameter, reused unless something else holds its memory.

    For the host, where new memory costs page faults. On a GPU, torch's allocator reuses memory anyway,
    and others may use it during the backward pass.
    """

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}

    def take(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """An uninitialized gradient with the strides of the parameter."""
        kept = self._kept.get(name)
        if kept is None or not _fits(kept, parameter) or _holders(kept) != _ALONE:
            kept = torch.empty_like(parameter, requires_grad=False)
            if kept.is_cpu:
                self._kept[name] = kept
        # Anything that holds this tensor, or its memory, holds the storage besides `_kept`.
        return kept.detach()

    def release(self) -> None:
        """Releases everything that nothing else holds."""
        self._kept.clear()


def _fits(kept: torch.Tensor, parameter: torch.Tensor) -> bool:
    return (kept.shape, kept.stride(), kept.dtype, kept.device) == (
        parameter.shape, parameter.stride(), parameter.dtype, parameter.device
    )


# The holders of its storage: tensors (and NumPy's arrays over them), and the Python object.
def _holders(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return private_torch.storage_holders(storage), sys.getrefcount(storage)


_ALONE = _holders(torch.empty(1))
