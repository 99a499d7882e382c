"""The library's lines in Python's logging, under the logger "hsdp"."""

from __future__ import annotations

import atexit
import logging

from hsdp import _hsdp

_LOGGER = logging.getLogger("hsdp")


def follow_logger() -> None:
    """Lines go to the logger if it is enabled for them now; others that HSDP_LOG asks for, to stderr."""
    levels = (logging.DEBUG, logging.INFO, logging.WARNING)
    _hsdp.set_log_level(next(filter(_LOGGER.isEnabledFor, levels), logging.CRITICAL))


def use_logging() -> None:
    """Until the interpreter exits."""
    _hsdp.set_log_writer(_LOGGER.log)
    follow_logger()
    atexit.register(_hsdp.end_log)
