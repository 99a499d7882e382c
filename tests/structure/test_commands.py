"""Every command of the pages is in commands.txt, and runs where that says."""

from __future__ import annotations

import re
import unittest

from commands import LIST, ROOT, commands_in, listed, pages


class Extraction(unittest.TestCase):
    def test_blocks_and_text(self) -> None:
        text = (
            "Say `make  test` or `ctest\n--preset dev`, not `makes it so`.\n\n"
            "    make demo     # a comment\n    build/x/y 1 \\\n        2\n    seven claims\n\n"
            "```sh\nmake lint\n```\n"
        )
        expected = {"make test", "ctest --preset dev", "make demo", "build/x/y 1 2"}
        self.assertEqual(commands_in(text), expected)


class List(unittest.TestCase):
    def test_it_is_what_the_pages_name(self) -> None:
        named = set[str]().union(*(commands_in(page.read_text(encoding="utf-8")) for page in pages()))
        texts = [command.text for command in listed(LIST.read_text())]
        self.assertEqual(sorted(texts), sorted(named))

    def test_each_section_says_who_runs_it(self) -> None:
        for section, command in listed(LIST.read_text()):
            with self.subTest(command=command):
                self.assertRegex(
                    section,
                    r"^(stage of \.ci/(run|nightly)|run(, (with [A-Z]+=[^:]+|ends with \d+): .+)?|not run: .+)$",
                )

    def test_stages_are_in_their_script(self) -> None:
        for section, command in listed(LIST.read_text()):
            if section.startswith("stage of "):
                script = (ROOT / section.removeprefix("stage of ")).read_text()
                with self.subTest(command=command):
                    settings = r"""("\$\w+" |[A-Z_]+=\S+ )*"""
                    self.assertRegex(script, rf"(?m)^\s*stage \w+ {settings}{re.escape(command)}$")
