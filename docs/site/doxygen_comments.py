"""Turns the plain comments of a header into Doxygen's.

A block of `//` above a declaration becomes `///`, a comment behind one `///<`, and the block at the top
of the header describes the file. Text is taken as it is written: only lists, backticks and indented
code mean something.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

WHOLE_LINE = re.compile(r"( *)// ?(.*)")
BEHIND_CODE = re.compile(r"(.*\S)(  +)// (.*)")
LABEL = re.compile(r"([A-Za-z]\w*): (?=\S)")


def escaped(text: str) -> str:
    """Nothing in it is a command, a tag, emphasis or a dash."""
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [re.sub(r"--|[\\@#<>&%*]", r"\\\g<0>", part) for part in parts[::2]]
    return "".join(parts)


def paragraphs(block: list[str]) -> Iterator[str]:
    """The block as Markdown: what is indented is code, unless it continues a labelled paragraph."""
    before, in_label, in_code = "", False, False
    for line in block:
        label = LABEL.match(line)
        if line.startswith("  ") and not in_label:
            if not in_code:
                yield ""
            in_code = True
            yield "    " + line.removeprefix("  ")
        else:
            if in_code:
                yield ""
            in_code = False
            if label is not None and (not before or before.endswith(".")):
                in_label = True
                yield ""
                yield f"**{label[1]}:** {escaped(line[label.end():])}"
            else:
                in_label = in_label and line != ""
                yield escaped(line.strip())
        before = line


def with_doxygen_comments(lines: list[str]) -> Iterator[str]:
    """The lines of a header."""
    index, behind = 0, -1  # behind: the column of the comment behind the code of the line before
    while index < len(lines):
        line = lines[index]
        whole = WHOLE_LINE.fullmatch(line)
        if whole is None:
            code = BEHIND_CODE.fullmatch(line)
            if code is not None and code[1][-1] in ";,}" and not code[3].startswith("namespace "):
                behind = code.start(3) - 3
                yield f"{code[1]}  ///< {escaped(code[3])}"
            else:
                behind = -1
                yield line
            index += 1
        elif len(whole[1]) == behind:
            yield f"{whole[1]}///< {escaped(whole[2])}"
            index += 1
        else:
            end = index
            while end < len(lines) and WHOLE_LINE.fullmatch(lines[end]):
                end += 1
            block = [lines[at][len(whole[1]) + 2 :].removeprefix(" ") for at in range(index, end)]
            if index == 0:
                yield "/// \\file"
                yield "///"
            if index == 0 or (end < len(lines) and lines[end]):
                yield from (f"{whole[1]}/// {text}".rstrip() for text in paragraphs(block))
            index = end
