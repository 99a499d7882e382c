"""A fault that can be planted: some text of a source and its replacement, chosen when the program runs.

One build has all chosen faults, each behind a switch: `fault(7)` is true in a process with HSDP_FAULT=7.
So nothing is rebuilt between two faults, and a first run without a fault shows which tests reach which fault.
"""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    file: str
    begin: int  # where the text begins in the file
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
    """Returns the source with these faults, by number. No two may overlap."""
    for number, fault in sorted(faults.items(), key=lambda item: -item[1].begin):
        assert source[fault.begin : fault.end] == fault.text, fault
        source = source[: fault.begin] + fault.planted.replace("NUMBER", str(number)) + source[fault.end :]
    return source


# The opposite of each comparison, and the one whose bound is one off.
OPPOSITE = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}
MOVED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
