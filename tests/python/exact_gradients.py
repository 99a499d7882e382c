"""Gradients of whole numbers. Their sums and means over two or four ranks are exact, so training on several
ranks gives the bits of a single process.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn


def assign(model: nn.Module, seed: int, rank: int, unused: Collection[str] = ()) -> None:
    for i, (name, p) in enumerate(model.named_parameters()):
        if p.requires_grad and name not in unused:
            generator = torch.Generator().manual_seed(1000 * seed + 10 * i + rank)
            values = 4 * torch.randint(-4, 5, p.shape, generator=generator)
            memory = torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device=p.device)
            p.grad = memory.copy_(values)


def assign_mean(model: nn.Module, seed: int, size: int, unused: Collection[str] = ()) -> None:
    """Assigns the mean of all ranks' gradients."""
    sums: dict[nn.Parameter, torch.Tensor] = {}
    for rank in range(size):
        assign(model, seed, rank, unused)
        for p in model.parameters():
            if p.grad is not None:
                sums[p] = sums.get(p, torch.zeros_like(p.grad)) + p.grad
    for p, total in sums.items():
        p.grad = total / size
