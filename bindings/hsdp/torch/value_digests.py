"""128-bit digests of tensors' values, computed in place.

[Note: digests of parameters]
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from hsdp.torch.complex_values import real_view

_WORD_BYTES = 8
_CHUNK_WORDS = 1 << 18  # a chunk fits in a cache
_ODD = -7046029254386353131  # its 64 bits look random
_LOW_HALF = 0xFFFFFFFF


def value_digests(tensors: Sequence[torch.Tensor]) -> list[str]:
    """One digest per tensor, of the bits of its elements in row-major order. The same on every device.
    Copies no tensor to the host, and waits for a GPU once.
    """
    places = _Weights()
    with torch.no_grad():
        sums = [_chunk_sums(tensor, places) for tensor in tensors]
    on_host = {
        device: iter(torch.cat([one for one in sums if one.device == device]).tolist())
        for device in {one.device for one in sums}
    }
    return [_digest([next(on_host[one.device]) for _ in range(one.numel())]) for one in sums]


def _digest(numbers: list[int]) -> str:
    return hashlib.blake2b(repr(numbers).encode(), digest_size=16).hexdigest()


class _Weights:
    """For each place in a chunk two odd numbers: multiplication by an odd number is one-to-one."""

    def __init__(self) -> None:
        self._on: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """On that device."""
        if device not in self._on:
            first = _mixed(_mixed(torch.arange(1, _CHUNK_WORDS + 1, device=device)))
            self._on[device] = (first | 1, _mixed(first) | 1)
        return self._on[device]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements as integers of their size, two for complex ones: tells apart what a comparison of
    values would take for equal.
    """
    tensor = real_view(tensor)
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize])


def differ(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """A mask of the elements whose bits differ."""
    written = bits(one) != bits(other)
    return written.any(-1) if one.is_complex() else written


def row_major_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of its elements in row-major order: its own memory if it has that order."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)


# Two sums per chunk.
def _chunk_sums(tensor: torch.Tensor, weights: _Weights) -> torch.Tensor:
    sums = []
    for chunk in row_major_bytes(tensor).split(_CHUNK_WORDS * _WORD_BYTES):
        words = _mixed(_words(chunk))
        for weight in weights.on(chunk.device):
            sums.append((words * weight[: words.numel()]).sum())
    return torch.stack(sums)


def _words(data: torch.Tensor) -> torch.Tensor:
    rest = -data.numel() % _WORD_BYTES
    if rest != 0 or data.storage_offset() % _WORD_BYTES != 0:
        data = torch.cat([data, data.new_zeros(rest)])
    return data.view(torch.int64)


# One-to-one. Plain words would not do: the highest bit times the difference of two odd weights
# vanishes, so numbers that swap their signs would not show.
def _mixed(words: torch.Tensor) -> torch.Tensor:
    words = words * _ODD
    words ^= (words >> 32) & _LOW_HALF
    return words
