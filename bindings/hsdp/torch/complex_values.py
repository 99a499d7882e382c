"""Complex parameters: the library reduces and gathers real views; optimizers get complex slices."""

from __future__ import annotations

import torch

COMPLEX_DTYPES = (torch.complex64, torch.complex128)


def real_view(tensor: torch.Tensor) -> torch.Tensor:
    """The real view, with a last dimension of 2, of complex values; others unchanged. Copies only if
    torch only marks the tensor as conjugated.
    """
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def of_kind(flat: torch.Tensor, is_complex: bool) -> torch.Tensor:
    """A flat real view as complex values if the parameter is complex; no copy."""
    return torch.view_as_complex(flat.view(-1, 2)) if is_complex else flat


def mark_of(tensor: torch.Tensor) -> str | None:
    """Conjugation or negation that torch only marks, so that the memory does not show it."""
    return "conjugated" if tensor.is_conj() else "negated" if tensor.is_neg() else None
