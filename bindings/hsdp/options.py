"""The words that options take, for type checkers. The library itself refuses others."""

from __future__ import annotations

from typing import Literal, TypeAlias

ReduceOp: TypeAlias = Literal["sum", "max", "min"]
