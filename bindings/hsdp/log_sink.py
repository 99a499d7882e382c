"""The library's lines in Python's logging, under the logger "hsdp"."""

from __future__ import annotations

import atexit
import logging

from hsdp import _hsdp

_LOGGER = logging.getLogger("hsdp")


def follow_logger() -> None:
    """Lines go to the logger from its present level on; others that HSDP_LOG asks for, to stderr."""
    _hsdp.set_log_level(_LOGGER.getEffectiveLevel())


def use_logging() -> None:
    """Until the interpreter exits."""
    _hsdp.set_log_writer(_LOGGER.log)
    follow_logger()
    atexit.register(_hsdp.end_log)
