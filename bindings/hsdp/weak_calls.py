"""Methods that are called while their objects live."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


class WeakCalls:
    """Calls methods in the order in which they were added, without keeping their objects alive."""

    def __init__(self) -> None:
        self._methods: list[weakref.WeakMethod[Callable[..., None]]] = []

    def add(self, method: Callable[..., None]) -> None:
        """Calls it from now on, while its object lives."""
        self._methods.append(weakref.WeakMethod(method))

    def discard(self, method: Callable[..., None]) -> None:
        """Does nothing if it was not added."""
        self._methods = [one for one in self._methods if one() not in (None, method)]

    def __call__(self, *args: Any) -> None:
        for one in list(self._methods):
            method = one()
            if method is not None:
                method(*args)
