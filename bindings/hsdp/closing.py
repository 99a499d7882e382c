"""Objects that a `with` block closes."""

from __future__ import annotations

from types import TracebackType
from typing import Self


class Closing:
    """`with` yields the object itself and closes it at the end of the block."""

    __slots__ = ()

    def close(self) -> None:
        """Safe to call twice."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
