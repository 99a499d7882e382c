"""What several tests compare."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def require_same(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> None:
    """The same keys and values, to the bit."""
    assert left.keys() == right.keys()
    for key, value in left.items():
        assert torch.equal(value, right[key]), key
