"""An optimizer's settings, which all ranks must have alike."""

from __future__ import annotations

import numbers
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hsdp import _hsdp
from hsdp.reducer import Reducer


class SettingsWord:
    """Says a digest of settings in the status words of Reducers: where they differ, by a scheduler that
    follows a rank's own loss for one, slices would be updated by different rules, and nobody would
    notice. Numbers and texts of the optimizer's own settings (`defaults`) count, by their values.
    """

    def __init__(
        self,
        reducers: Sequence[Reducer],
        fixed: tuple[Any, ...],
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
            reducer._before_words.append(self._say)

    def _say(self) -> None:
        now = [[_value(group.get(key)) for key in self._keys] for group in self._groups]
        if now == self._said:
            return
        self._said = now
        digest = f"#{zlib.crc32(repr((self._fixed, now)).encode()):08x}"
        lr = _value(self._groups[0].get("lr"))
        text = f"lr {lr:.6g} {digest}" if isinstance(lr, float) else digest
        for word in self._words:
            word.say(text)

    def close(self) -> None:
        """Says nothing from here on."""
        for reducer in self._reducers:
            reducer._before_words.remove(self._say)
        self._reducers, self._words = [], []


# Equal for what updates alike, whatever its type. A number on a GPU would have to be waited for.
def _value(setting: Any) -> Any:
    if isinstance(setting, torch.Tensor) and setting.dim() == 0 and setting.is_cpu:
        setting = setting.item()
    if isinstance(setting, (tuple, list)):
        return tuple(map(_value, setting))
    if isinstance(setting, numbers.Real):  # bool, too
        return float(setting)
    return setting if isinstance(setting, str) else None
