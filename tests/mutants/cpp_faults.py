"""Finds the faults that can be planted in a C++ source by patterns in the formatted text. run.py leaves out those
that do not compile.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from fault import MOVED, OPPOSITE, Fault

SWITCH = "hsdp_mutants::fault(NUMBER)"
INCLUDE = '#include "tests/mutants/switch.h"\n'
_HIDDEN = re.compile(r"//[^\n]*|/\*.*?\*/|R\"\((?:.*?)\)\"|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])'", re.DOTALL)
_CONDITION = re.compile(r"\b(?:if|while) \(")
_COMPARISON = re.compile(r" (<=|>=|==|!=|<|>) ")
_CALL = re.compile(r"^[ ]+((?:[\w:]+(?:\(\))?(?:\.|->))*[\w:]+(?:<[\w:]+>)?\()", re.MULTILINE)
_NO_CALL = re.compile(r"(?:return|if|for|while|switch|static_assert|throw|else|sizeof|decltype|using)\b|[A-Z_]+\(")
_NUMBER = re.compile(r"(?<![\w.'\[<])(?<!e[-+])(?:0x[0-9a-fA-F]+|\d+(?:'\d+)*)(?:U|L|UL|ULL)?(?![\w.'>])")
# Lines where the compiler needs a constant, or where the text is no expression.
_FIXED = re.compile(r"^\s*#|\b(?:constexpr|static_assert|template|operator|case|enum|alignas|requires|using|extern)\b")
_OPENING, _CLOSING = "([{", ")]}"


def find_faults(file: str, source: str) -> list[Fault]:
    code = _HIDDEN.sub(lambda found: re.sub(r"[^\n]", "_", found.group()), source)
    found: list[Fault] = []

    def add(begin: int, end: int, kind: str, wrong: str, planted: str) -> None:
        start = code.rfind("\n", 0, begin) + 1
        if not _FIXED.search(code[start : code.find("\n", begin)]):
            line = code.count("\n", 0, begin) + 1
            found.append(Fault(file, begin, end, line, kind, source[begin:end], wrong, planted))

    for begin, end in _conditions(code):
        text = source[begin:end]
        add(begin, end, "condition negated", f"!({text})", f"{SWITCH} != static_cast<bool>({text})")
    for match in _COMPARISON.finditer(code):
        begin, end = _operands(code, match.start(), match.end())
        left, right, sign = source[begin : match.start()], source[match.end() : end], match.group(1)
        for kind, wrong in (("comparison turned", OPPOSITE[sign]), ("bound moved", MOVED.get(sign))):
            if wrong and left.strip() and right.strip():
                text = f"{left} {wrong} {right}"
                add(begin, end, kind, text, f"({SWITCH} ? ({text}) : ({left} {sign} {right}))")
    for match in _CALL.finditer(code):
        begin = match.start(1)
        end = _closing(code, match.end(1) - 1) + 1
        starts = code[:begin].rstrip()[-1:] in (";", "{", "}", ")")
        if starts and code[end : end + 1] == ";" and not _NO_CALL.match(code, begin):
            text = source[begin : end + 1]
            add(begin, end + 1, "call left out", "", f"{{ if (!{SWITCH}) {text} }}")
    for match in _NUMBER.finditer(code):
        text = match.group()
        add(*match.span(), "constant changed", f"{text} + 1", f"({SWITCH} ? {text} + 1 : {text})")
    return found


def _closing(code: str, opening: int) -> int:
    """The place of the bracket that closes the one at `opening`."""
    depth = 0
    for place in range(opening, len(code)):
        depth += (code[place] in _OPENING) - (code[place] in _CLOSING)
        if depth == 0:
            return place
    return len(code)


def _conditions(code: str) -> Iterator[tuple[int, int]]:
    """Yields the conditions that are expressions, without a declaration or an initial statement."""
    for match in _CONDITION.finditer(code):
        end = _closing(code, match.end() - 1)
        if not re.search(r";| = ", code[match.end() : end]):
            yield match.end(), end


def _operands(code: str, left: int, right: int) -> tuple[int, int]:
    """Returns where the left side of a comparison begins and the right side ends."""
    begin, depth = left, 0
    while begin > 0:
        before = code[begin - 1]
        depth += (before in _CLOSING) - (before in _OPENING)
        if depth < 0 or depth == 0 and (
            before in ",;{}?&|^" or re.search(r"(?:\breturn| [-+*/|&]?=| :)$", code[max(0, begin - 8) : begin])
        ):
            break
        begin -= 1
    begin += len(code[begin:left]) - len(code[begin:left].lstrip())
    end, depth = right, 0
    while end < len(code):
        depth += (code[end] in _OPENING) - (code[end] in _CLOSING)
        if depth < 0 or depth == 0 and (code[end] in ",;?&|^" or code[end : end + 3] == " : "):
            break
        end += 1
    return begin, end - (len(code[right:end]) - len(code[right:end].rstrip()))
