"""torch's store, through which ranks exchange messages before they are connected."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from hsdp.errors import Error, TimeoutError

_T = TypeVar("_T")
_LONGEST_PAUSE_S = 0.05


class MeetingStore:
    """Keys under `prefix`, for at most `timeout_s` from now on.

    Waits by polling, so that Ctrl-C ends a wait, and our limit applies rather than the store's. The
    store may hold messages of ranks that have ended: of a restarted job, or of a destroyed group.
    """

    def __init__(self, store: Any, prefix: str, size: int, timeout_s: float) -> None:
        self._store = dist.PrefixStore(prefix, store)
        self._size = size
        self._timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s

    def exchange(self, rank: int, word: Any, answer: Callable[[list[Any]], Any]) -> Any:
        """Each rank sends a word, rank 0 computes one answer from all of them, and every rank gets it.

        Each call on rank 0 is a new attempt with a unique name, because no launcher counts attempts the
        same way on all hosts. A rank polls until an attempt includes its own word, and uses the newest
        one. Raises TimeoutError, naming a rank that does not come.
        """
        nonce = secrets.token_hex(8)
        if rank == 0:
            attempt = secrets.token_hex(8)
            self.put("attempt", attempt)
            others = range(1, self._size)
            said = [json.loads(self.get(f"{attempt}/rank {other}", other)) for other in others]
            answered = answer([word, *(theirs for _, theirs in said)])
            self.put(f"{attempt}/all", json.dumps([[heard for heard, _ in said], answered]))
        else:
            attempt, answered = self._heard_by_rank_0(rank, nonce, word)
            self.remove(f"{attempt}/rank {rank}")
        if self.count(f"{attempt}/read") == self._size:
            self.remove(f"{attempt}/read")
            self.remove(f"{attempt}/all")
        elif rank == 0:  # rank 0 may host the store and end
            self._wait_until_removed(f"{attempt}/all")
        return answered

    def _heard_by_rank_0(self, rank: int, nonce: str, word: Any) -> tuple[str, Any]:
        attempt, answers = "", list[Any]()

        def is_answered() -> bool:
            nonlocal attempt
            if not attempt and not self._store.check(["attempt"]):
                return False
            # Read before the answer: once rank 0 begins its next attempt, this one's answer is there.
            newest = self._store.get("attempt").decode()
            if attempt and self._store.check([f"{attempt}/all"]):
                heard, answer = json.loads(self._store.get(f"{attempt}/all"))
                if nonce in heard:
                    answers.append(answer)
                    return True
            if newest != attempt:
                if attempt:  # rank 0 has finished that one
                    self._store.delete_key(f"{attempt}/rank {rank}")
                attempt = newest
                self._store.set(f"{attempt}/rank {rank}", json.dumps([nonce, word]))
            return False

        if not self._comes_true(is_answered):
            raise self._timeout("rank 0", [0])
        return attempt, answers[0]

    def put(self, key: str, text: str) -> None:
        self._asked(lambda: self._store.set(key, text))

    def get(self, key: str, rank: int) -> str:
        """The value that `rank` stores there. Raises TimeoutError, naming the rank, if it does not."""
        if not self._comes_true(lambda: self._store.check([key])):
            raise self._timeout(f"rank {rank}", [rank])
        return str(self._asked(lambda: self._store.get(key)).decode())

    def _wait_until_removed(self, key: str) -> None:
        if not self._comes_true(lambda: not self._store.check([key])):
            raise self._timeout("all ranks", [])

    def count(self, key: str) -> int:
        """How many ranks have counted there, including this one."""
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
        except RuntimeError as error:  # raised by every kind of store
            raise Error(
                f"rendezvous: torch's store failed: {error}; check that the process that keeps it "
                "still runs"
            ) from error
