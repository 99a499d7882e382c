"""Complex parameters: the library reduces and gathers their real view, an optimizer gets complex slices."""

from __future__ import annotations

import torch

COMPLEX_DTYPES = (torch.complex64, torch.complex128)


def real_view(tensor: torch.Tensor) -> torch.Tensor:
    """Of complex values with a last dimension of 2; others as they are. No copy, but of what torch
    conjugates by a mark.
    """
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def of_kind(flat: torch.Tensor, is_complex: bool) -> torch.Tensor:
    """A flat real view as complex values where the parameter has such; no copy."""
    return torch.view_as_complex(flat.view(-1, 2)) if is_complex else flat


def mark_of(tensor: torch.Tensor) -> str | None:
    """What torch does to its values by a mark, which its memory does not show."""
    return "conjugated" if tensor.is_conj() else "negated" if tensor.is_neg() else None
