"""Reducers of a program that ends: writes their snapshots, but does not wait for their steps."""

from __future__ import annotations

import atexit
import sys
import weakref

from hsdp.errors import Error, UsageError
from hsdp.reducer_results import ReducerResults

GRACE_S = 10.0

open_reducers: weakref.WeakSet[ReducerResults] = weakref.WeakSet()


def leave(reducer: ReducerResults, reason: str, grace_s: float) -> None:
    """Closes `reducer` on a rank that will not continue. The others learn that its step is dropped. If
    one does not within `grace_s`, because it waits for this rank elsewhere (in torch.distributed,
    say), the mesh ends on every rank.
    """
    try:
        reducer._leave(reason, grace_s)
        open_reducers.discard(reducer)
    except Exception:  # the reason why this rank leaves is more important
        pass


# Snapshots are written in the background: finish them even if the program just ends.
@atexit.register
def _end_open_reducers() -> None:
    for reducer in list(open_reducers):
        try:
            reducer.flush()
        except UsageError:  # a forked child, or a call that was interrupted
            continue
        except Error as error:
            print(f"hsdp: a snapshot was lost: {error}", file=sys.stderr)
        if reducer._is_in_step():
            leave(reducer, "its program ended within a step", GRACE_S)
