"""Warnings that point at the caller's line."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

_BETWEEN = {"hsdp", "torch", "contextlib"}


def warn_caller(text: str) -> None:
    """A RuntimeWarning at the user's line: the first one outside hsdp and of what runs its code."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _package(frame) in _BETWEEN:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, RuntimeWarning, stacklevel=level)


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
