#!/usr/bin/env python3
"""Checks the notes of docs/notes: each is cited from the tree, and what is cited exists.

Usage: check_notes.py REPOSITORY
Exit status: 0 when all is well, 1 after printing each note that nobody cites or that is missing, 2 on
bad usage.
"""

import pathlib
import re
import sys
from typing import Dict, List

FOLDERS = ("bindings", "cmake", "examples", "hsdp", "quant", "tests", "zero")
SUFFIXES = {".cmake", ".cpp", ".cu", ".cuh", ".h", ".py", ".txt"}
NOTES = "docs/notes"
OWN = {"check_notes.py", "test_check_notes.py"}

CITATION = re.compile(r"\[Note: ([^\]]+)\]")
TITLE = re.compile(r"^## Note: (.+)$", re.MULTILINE)
#: A citation may go on in the next line of its comment.
LINE_BREAK = re.compile(r"\n\s*(?://|#)?\s*")


def citations(text: str) -> List[str]:
    return CITATION.findall(LINE_BREAK.sub(" ", text))


def cited(repository: pathlib.Path) -> Dict[str, str]:
    """Of each note that is cited: the first file that does."""
    found: Dict[str, str] = {}
    for folder in FOLDERS:
        for path in sorted((repository / folder).rglob("*")):
            if path.suffix not in SUFFIXES or path.name in OWN:
                continue
            for title in citations(path.read_text(encoding="utf-8")):
                found.setdefault(title, str(path.relative_to(repository)))
    return found


def violations(repository: pathlib.Path) -> List[str]:
    pages = {
        str(path.relative_to(repository)): path.read_text(encoding="utf-8")
        for path in sorted((repository / NOTES).glob("*.md"))
    }
    titles = [title for text in pages.values() for title in TITLE.findall(text)]
    found = cited(repository)
    lines = [f"{path}: no such note: '{title}'" for title, path in found.items()
             if title not in titles]
    for page, text in pages.items():
        lines += [f"{page}: no such note: '{title}'" for title in citations(text) if title not in titles]
        lines += [f"{page}: nobody cites '{title}'" for title in TITLE.findall(text) if title not in found]
    lines += [f"{NOTES}: twice: '{title}'" for title in set(titles) if titles.count(title) > 1]
    return lines


def main(arguments: List[str]) -> int:
    if len(arguments) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    lines = violations(pathlib.Path(arguments[1]))
    print("\n".join(lines) if lines else "every note is cited, and every citation has its note")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
