"""torch's store, where ranks that have no connection yet leave word for each other."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from hsdp.errors import Error, TimeoutError

_T = TypeVar("_T")
_LONGEST_PAUSE_S = 0.05


class MeetingStore:
    """Keys under `prefix`, for at most `timeout_s` from now on.

    Waits by looking again: so Ctrl-C ends it, and the limit is ours, not the store's.
    """

    def __init__(self, store: Any, prefix: str, size: int, timeout_s: float) -> None:
        self._store = dist.PrefixStore(prefix, store)
        self._size = size
        self._timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s

    def put(self, key: str, text: str) -> None:
        self._asked(lambda: self._store.set(key, text))

    def get(self, key: str, rank: int) -> str:
        """What `rank` puts there. TimeoutError, naming the rank, when it does not."""
        if not self._comes_true(lambda: self._store.check([key])):
            raise self._timeout(f"rank {rank}", [rank])
        return str(self._asked(lambda: self._store.get(key)).decode())

    def wait_until_removed(self, key: str) -> None:
        if not self._comes_true(lambda: not self._store.check([key])):
            raise self._timeout("all ranks", [])

    def count(self, key: str) -> int:
        """How many ranks have counted there, this one with them."""
        return int(self._asked(lambda: self._store.add(key, 1)))

    def remove(self, key: str) -> None:
        self._asked(lambda: self._store.delete_key(key))

    def _comes_true(self, ask: Callable[[], bool]) -> bool:
        pause_s = 0.001
        while not self._asked(ask):
            if not time.monotonic() < self._end:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return True

    def _timeout(self, who: str, ranks: list[int]) -> TimeoutError:
        return TimeoutError(
            f"rendezvous: expected {who} of {self._size} at torch's store within "
            f"{self._timeout_s:g} s, got no word; check that all ranks were started, still run and "
            "make the same mesh",
            ranks,
        )

    def _asked(self, call: Callable[[], _T]) -> _T:
        try:
            return call()
        except RuntimeError as error:  # of every kind of store
            raise Error(
                f"rendezvous: torch's store failed: {error}; check that the process that keeps it "
                "still runs"
            ) from error
