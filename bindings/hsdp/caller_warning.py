"""Warnings that point at the caller's line."""

from __future__ import annotations

import sys
import warnings

_BETWEEN = {"hsdp", "torch", "contextlib"}


def warn_caller(text: str) -> None:
    """A RuntimeWarning of the first frame that is not the library's, nor of what calls it for others."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] in _BETWEEN:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, RuntimeWarning, stacklevel=level)
