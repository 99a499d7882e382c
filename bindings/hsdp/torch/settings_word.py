"""An optimizer's settings, which all ranks must have alike."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

from hsdp import _hsdp
from hsdp.reducer import Reducer
from hsdp.torch.parameter_groups import settings


class SettingsWord:
    """Says a digest of settings in the status words of Reducers: where they differ, by a scheduler that
    follows a rank's own loss for one, slices would be updated by different rules, and nobody would
    notice. Numbers and texts count; what is a tensor or an object does not.
    """

    def __init__(
        self, reducers: Sequence[Reducer], fixed: tuple[Any, ...], groups: list[dict[str, Any]]
    ) -> None:
        self._reducers = reducers
        self._fixed = fixed
        self._groups = groups
        self._said: Any = None
        self._words = [_hsdp.StepWord(one._handle, "ShardedOptimizer") for one in reducers]
        for reducer in reducers:
            reducer._before_words.append(self._say)

    def _say(self) -> None:
        now = [
            [value for value in settings(group).values() if _is_plain(value)]
            for group in self._groups
        ]
        if now == self._said:
            return
        self._said = now
        digest = f"#{zlib.crc32(repr((self._fixed, now)).encode()):08x}"
        lr = self._groups[0].get("lr")
        text = f"lr {lr:.6g} {digest}" if isinstance(lr, (int, float)) else digest
        for word in self._words:
            word.say(text)

    def close(self) -> None:
        """Says nothing from here on."""
        for reducer in self._reducers:
            reducer._before_words.remove(self._say)
        self._reducers, self._words = [], []


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))
