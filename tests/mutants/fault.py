"""A fault that can be planted: some text of a source and what stands there instead, chosen when the program runs.

All chosen faults are in one build, each behind a switch: `fault(7)` is true in a process with HSDP_FAULT=7.
So nothing is built again between two faults, and a first run without any tells which tests reach which.
"""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    file: str
    begin: int  # of the text, in the file
    end: int
    line: int
    kind: str
    text: str
    wrong: str
    planted: str  # what replaces the text; NUMBER stands for the fault's number

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.kind}: {_short(self.text)} -> {_short(self.wrong)}"


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 70 else f"{text[:67]}..."


def plant(source: str, faults: dict[int, Fault]) -> str:
    """The source with these faults of it, by number; of two that overlap none may be there."""
    for number, fault in sorted(faults.items(), key=lambda item: -item[1].begin):
        assert source[fault.begin : fault.end] == fault.text, fault
        source = source[: fault.begin] + fault.planted.replace("NUMBER", str(number)) + source[fault.end :]
    return source


# Each comparison with its opposite, and with the one whose bound lies one further on.
OPPOSITE = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}
MOVED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
