"""An optimizer's settings, which must be equal on all ranks."""

from __future__ import annotations

import numbers
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from hsdp import _hsdp
from hsdp.reducer import Reducer

_MOST_SHOWN = 4  # limit for groups whose value differs from the first's


class SettingsWord:
    """Puts a digest of settings into the status words of Reducers. If they differ, for example because
    a scheduler follows each rank's own loss, slices would silently be updated by different rules.
    Numbers and texts of the optimizer's own settings (`defaults`) are compared by value. The error
    names the first that differs.
    """

    def __init__(
        self,
        reducers: Sequence[Reducer],
        fixed: Mapping[str, Any],
        groups: list[dict[str, Any]],
        defaults: Iterable[str],
    ) -> None:
        self._reducers = reducers
        self._fixed = fixed
        self._groups = groups
        self._keys = sorted(defaults)
        self._said: Any = None
        self._words = [_hsdp.StepWord(one._handle, "ShardedOptimizer") for one in reducers]
        for reducer in reducers:
            reducer._before_words.add(self._say)

    def _say(self) -> None:
        now = [[_value(group.get(key)) for key in self._keys] for group in self._groups]
        if now == self._said:
            return
        self._said = now
        lines = [f"{key} {value}" for key, value in self._fixed.items()]
        lines.append(f"parameter groups {len(now)}")
        lines += [_line(key, values) for key, values in zip(self._keys, zip(*now, strict=True), strict=True)]
        details = "\n".join(lines)
        for word in self._words:
            word.say(_digest(details), details)

    def close(self) -> None:
        """Stops comparing."""
        for reducer in self._reducers:
            reducer._before_words.discard(self._say)
        self._reducers, self._words = [], []


def _digest(text: str) -> str:
    return f"#{zlib.crc32(text.encode()):08x}"


# "lr 0.1, of group 3 0.2": short, since messages have little room.
def _line(key: str, values: Sequence[Any]) -> str:
    others = [f", of group {n} {value}" for n, value in enumerate(values) if value != values[0]]
    more = f" and more {_digest(repr(others))}" if len(others) > _MOST_SHOWN else ""
    return f"{key} {values[0]}" + "".join(others[:_MOST_SHOWN]) + more


# Equal for settings with the same effect, whatever their type. A number on a GPU would need a wait.
def _value(setting: Any) -> Any:
    if isinstance(setting, torch.Tensor) and setting.numel() == 1 and setting.is_cpu:
        setting = setting.item()
    if isinstance(setting, (tuple, list)):
        return tuple(map(_value, setting))
    if isinstance(setting, numbers.Real):  # includes bool
        return float(setting)
    return setting if isinstance(setting, str) else None
