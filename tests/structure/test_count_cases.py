"""What counts as a passed and as a failed case."""

from __future__ import annotations

import pathlib
import sys
import tempfile
import unittest
import xml.etree.ElementTree as ElementTree

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from count_cases import Count, count_entry, entries_of, longest_of  # noqa: E402

GOOGLETEST = """[==========] 12 tests from 3 test suites ran. (15 ms total)
[  PASSED  ] 9 tests.
[  SKIPPED ] 1 test, listed below:
[  FAILED  ] 2 tests, listed below:
"""


def parsed(cases: str) -> list[ElementTree.Element]:
    with tempfile.NamedTemporaryFile("w", suffix=".xml") as file:
        file.write(f"<testsuite>{cases}</testsuite>")
        file.flush()
        return entries_of(file.name)


# Statuses and outputs of entries, and their count.
ENTRIES = [
    ([("run", "[  PASSED  ] 12 tests.\n")], Count(12)),
    ([("run", "[  PASSED  ] 1 test.\n")], Count(1)),
    ([("fail", GOOGLETEST)], Count(9, 2, 1)),
    ([("run", "....\n4 passed in 3.21s\n")], Count(4)),
    ([("run", "=== 4 passed, 2 skipped in 83.0s (0:01:23) ===\n")], Count(4, 0, 2)),
    ([("fail", "2 failed, 4 passed, 1 error in 0.5s\n")], Count(4, 3)),
    ([("run", "Ran 7 tests in 0.1s\n\nOK\n")], Count(7)),
    ([("fail", "Ran 7 tests in 0.1s\n\nFAILED (failures=1, errors=2)\n")], Count(4, 3)),
    # An entry that counts nothing is one case.
    ([("run", "ok"), ("fail", "no"), ("notrun", "")], Count(1, 1, 1)),
    # A crash is a failed case.
    ([("fail", "[ RUN      ] A.b\nSegmentation fault\n")], Count(0, 1)),
    ([("fail", "[  PASSED  ] 3 tests.\n==1== data race\n")], Count(3, 1)),
    ([("run", "[  PASSED  ] 2 tests.\n"), ("run", ""), ("fail", "")], Count(3, 1)),
]


class CountCases(unittest.TestCase):
    def test_what_counts(self) -> None:
        for entries, expected in ENTRIES:
            with self.subTest(entries):
                cases = (f'<testcase name="t" status="{status}"><system-out>{output}</system-out></testcase>'
                         for status, output in entries)
                self.assertEqual(sum(map(count_entry, parsed("".join(cases))), Count()), expected)

    def test_a_count_as_text(self) -> None:
        self.assertEqual(str(Count(3, 1)), "3 passed, 1 failed")

    def test_what_took_longest_comes_first(self) -> None:
        entries = parsed('<testcase name="a" time="1.2"/><testcase name="b" time="30.6"/><testcase name="c"/>')
        self.assertEqual(longest_of(entries), "longest: b 31 s, a 1 s, c 0 s; all together 32 s")


if __name__ == "__main__":
    unittest.main()
