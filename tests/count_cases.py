#!/usr/bin/env python3
"""Adds up the test cases in what `ctest --output-junit` wrote: prints what took longest and `N passed, N failed`.

A ctest entry is a whole program. What GoogleTest, pytest or unittest counted in its output counts here;
an entry without such a line counts as one case. An entry that failed without saying which case did (it
crashed, or ran out of time) has one failed case more than it said.

Usage: count_cases.py FILE...
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from typing import NamedTuple


LONGEST_COUNT = 8


class Count(NamedTuple):
    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __add__(self, other: object) -> Count:
        assert isinstance(other, Count)
        return Count(*(a + b for a, b in zip(self, other)))

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed"


def number(pattern: str, output: str) -> int | None:
    """The number in the last line that matches."""
    found = re.findall(pattern, output, re.MULTILINE)
    return int(found[-1]) if found else None


def said_in(output: str) -> Count | None:
    """What the test framework said; None without its closing line."""
    skipped = number(r"^\[  SKIPPED \] (\d+) tests?, listed below", output) or 0
    passed = number(r"^\[  PASSED  \] (\d+) tests?\.", output)
    if passed is not None:
        failed = number(r"^\[  FAILED  \] (\d+) tests?, listed below", output) or 0
        return Count(passed, failed, skipped)
    closing = re.findall(r"^.*\b\d+ (?:passed|failed|errors?|skipped)\b.* in [\d.]+s.*$", output, re.MULTILINE)
    if closing:
        words = {word.rstrip("s"): int(n) for n, word in re.findall(r"(\d+) (\w+)", closing[-1])}
        return Count(words.get("passed", 0), words.get("failed", 0) + words.get("error", 0),
                     words.get("skipped", 0))
    ran = number(r"^Ran (\d+) tests? in ", output)
    if ran is not None:
        failed = sum(map(int, re.findall(r"(?:failures|errors)=(\d+)", output)))
        return Count(ran - failed, failed)
    return None


def count_entry(entry: ElementTree.Element) -> Count:
    """One <testcase>."""
    status = entry.get("status")
    if status in ("notrun", "disabled"):
        return Count(skipped=1)
    said = said_in(entry.findtext("system-out") or "")
    if status == "run":
        return said or Count(passed=1)
    if said is None or said.failed == 0:
        return (said or Count()) + Count(failed=1)
    return said


def entries_of(path: str) -> list[ElementTree.Element]:
    return list(ElementTree.parse(path).getroot().iter("testcase"))


def longest_of(entries: list[ElementTree.Element]) -> str:
    seconds = {entry.get("name"): float(entry.get("time") or 0) for entry in entries}
    names = sorted(seconds, key=lambda name: -seconds[name])[:LONGEST_COUNT]
    listed = ", ".join(f"{name} {seconds[name]:.0f} s" for name in names)
    return f"longest: {listed}; all together {sum(seconds.values()):.0f} s"


def main(paths: list[str]) -> None:
    entries = [entry for path in paths for entry in entries_of(path)]
    total = sum(map(count_entry, entries), Count())
    print(longest_of(entries))
    if total.skipped:
        print(f"{total.skipped} skipped")
    print(total)


if __name__ == "__main__":
    main(sys.argv[1:])
