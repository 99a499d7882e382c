"""Objects that a `with` block closes."""

from __future__ import annotations

from typing import Any, Self


class Closing:
    """`with` yields the object itself and closes it at the end of the block."""

    __slots__ = ()

    def close(self) -> None:
        """Safe to call twice."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.close()
