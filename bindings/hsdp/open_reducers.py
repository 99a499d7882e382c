"""Reducers that may still have snapshots to write when the program ends."""

from __future__ import annotations

import atexit
import sys
import weakref
from typing import TYPE_CHECKING

from hsdp.errors import Error, UsageError

if TYPE_CHECKING:
    from hsdp.reducer import Reducer

# Snapshots are written in the background: a program that just ends still gets them.
open_reducers: weakref.WeakSet[Reducer] = weakref.WeakSet()


@atexit.register
def _flush_open_reducers() -> None:
    for reducer in list(open_reducers):
        try:
            reducer.flush()
        except UsageError:  # a forked child, or a call that was left behind
            pass
        except Error as error:
            print(f"hsdp: a snapshot was lost: {error}", file=sys.stderr)
