"""Warnings that point at the caller's line."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

_BETWEEN = {"hsdp", "torch", "contextlib", "importlib", "_frozen_importlib"}


def warn_caller(text: str) -> None:
    """A RuntimeWarning at the user's line: the first outside hsdp and the modules that run its code."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _package(frame) in _BETWEEN:
        if "importlib._bootstrap" not in frame.f_code.co_filename:  # warn() does not count these
            level += 1
        frame = frame.f_back
    warnings.warn(text, RuntimeWarning, stacklevel=level)


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
