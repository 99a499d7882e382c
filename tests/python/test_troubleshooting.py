"""docs/troubleshooting.md has all messages of the sources and no others.

A text of the sources is a sum of string literals, an f-string, or the parts of a C++ Message, with `…` for
what varies. Every Message, and every other text of three words or more, has to be on the page: some code span
contains its constant parts in order, up to the remedy. A line of a list that is one code span is an entry.
Each of its parts, between `…` and the words that join the parts of a Message, has to be in a text of the
sources.
"""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Iterator
from typing import NamedTuple

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
VARIES = "…"

# Texts that are not messages, or that no user can meet. A key is a file, a function whose arguments they are,
# or a text.
NOT_ON_THE_PAGE = {
    # Not the text of an error.
    "bindings/hsdp/keyword_hints.py": "what to write instead, behind `got an unexpected keyword argument`",
    "bindings/hsdp/torch/private_torch.py": "what works without a part; the page has the messages",
    "hsdp/tools/check_facts.cpp": "verdicts of hsdp_check",
    "hsdp/tools/check_flight.cpp": "what hsdp_check finds in flight records",
    "hsdp/tools/check_text.cpp": "the table of hsdp_check",
    "hsdp/tools/plan_report.cpp": "rows of hsdp_plan",
    "hsdp/tools/plan_text.cpp": "the tables of hsdp_plan",
    "hsdp/tools/progress_bar.cpp": "the progress bar",
    "hsdp/wait_table.cpp": "a table's text",
    "rank … (replica …, shard …)": "a process of a trace",
    "host, which issues the GPU's work": "what a trace says of itself",
    ")()": "help for an option of a tool",
    "__repr__()": "not an error",
    "where_it_stands()": "part of __repr__",
    "how_even()": "part of __repr__",
    "def()": "a docstring",
    "log_line()": "not an error",
    "def_property_readonly()": "a docstring",
    "The C++ library behind the package hsdp.": "a docstring",
    "hsdp control connection": "part of a proof",
    "hsdp flight record": "the mark of a file",
    "!tcp: cannot listen at …: …": "`!` marks a failure in an exchange; the page has the rest",
    "hsdp leader paths": "a key",
    "hsdp leader reach": "a key",
    "hsdp relay paths": "a key",
    "hsdp relay reach": "a key",
    "loco … bit, groups of … …": "a hop's description",
    "'…' … … reduced in …, group '…'…": "a parameter's description",
    "the hop … sends …": "a hop's description",
    "… bytes a unit": "a gather's description",
    "ranks … of the job": "a mesh's description",
    " of job ranks": "a mesh's description",
    "parameter '…' … … on the meta device": "a parameter's description",
    "set_requires_gradient_sync and set_requires_all_reduce": "a call's name",
    # What was being done; one entry has it as `…`.
    "check_cuda()": "in `device: …: cannot …: expected success`",
    "ask for an event": "as check_cuda()",
    "ask for a stream": "as check_cuda()",
    "the arguments of a kernel": "as check_cuda()",
    "check()": "in `nccl: …: expected success` and `snapshot: HDF5 could not …`",
    "together()": "in `reducer: set-up: could not …`",
    "hsdp/snapshot/hdf5_structure.cpp": "in `snapshot: HDF5 could not …`",
    # The library itself keeps to these.
    "hsdp/row_cut.cpp": "cuts are the library's",
    "hsdp/comm/control/process_control.cpp": "sizes of its messages",
    "hsdp/comm/control/rank_control.cpp": "sizes of its messages",
    "control: tell: expected another world rank, got … (rank … of …)": "it tells others alone",
    "control: expected a rank below the world size, got rank … of …": "the launcher's are checked before",
    "…: expected a word of at most … bytes, got …": "words are the library's",
    "hsdp/kernels/cast_and_pack.cpp": "arguments of a kernel",
    "hsdp/kernels/norm.cpp": "arguments of a kernel",
    "hsdp/kernels/row_pass.cpp": "arguments of a kernel",
    "hsdp/kernels/scale_and_cast.cpp": "arguments of a kernel",
    "hsdp/kernels/sum_rows.cpp": "arguments of a kernel",
    "quant/quantize.cpp": "arguments of a kernel",
}


class Text(NamedTuple):
    file: str
    line: int
    shown: str
    call: str = ""  # the function whose argument it is
    is_message: bool = False  # made of a Message's parts

    @property
    def head(self) -> str:
        """Without the remedy, which an entry states in other words."""
        return self.shown.partition("; ")[0]

    @property
    def is_needed(self) -> bool:
        if "\n" in self.shown.strip("\n"):  # help, or a docstring
            return False
        if self.is_message:
            return bool(parts_of(self.head))
        return len([word for word in self.head.split() if re.search("[A-Za-z]", word)]) >= 3

    @property
    def keys(self) -> set[str]:
        return {self.file, self.call + "()", self.shown}


def parts_of(shown: str) -> list[str]:
    """The constant parts that carry meaning, without what joins them."""
    parts = re.split("…|: expected |: |, got |; ", shown)
    return [part.strip(" '(),") for part in parts if re.search("[A-Za-z]", part)]


# --- C++


class Token(NamedTuple):
    text: str
    line: int
    is_literal: bool = False


TOKEN = re.compile(
    r"""//[^\n]*|/\*.*?\*/|\#\s*include[^\n]*|R"(?P<mark>[^(]*)\(.*?\)(?P=mark)"|"""
    r"""(?P<literal>"(?:\\.|[^"\\\n])*")|"""
    r"""(?P<other>\d[\w.']*|'(?:\\.[^']*|[^'\\])'|\w+|::|<<|\+\+|\+=|==|\S)""",
    re.DOTALL,
)
OPENING, CLOSING = ("(", "[", "{"), (")", "]", "}")
ENDS_OPERAND = {"+", ",", ";", "?", ":", "=", "<<", "+=", "==", "{", *CLOSING}
BEGINS_EXPRESSION = {",", "=", "return", "?", ":", "<<", "+=", "throw", *OPENING}
FIELDS: tuple[str, ...] = ("where", "expected", "got", "remedy")


def tokens_of(source: str) -> list[Token]:
    found, line, last = [], 1, 0
    for match in TOKEN.finditer(source):
        line += source.count("\n", last, match.start())
        last = match.start()
        if match["literal"]:
            found.append(Token(ast.literal_eval(match["literal"]), line, is_literal=True))
        elif match["other"]:
            found.append(Token(match["other"], line))
    return found


class CppTexts:
    def __init__(self, source: str, file: str) -> None:
        self._file, self._tokens = file, tokens_of(source)
        self._seen: set[int] = set()  # literals in texts that have been found

    def __iter__(self) -> Iterator[Text]:
        calls: list[str] = []
        yield from self._messages()
        for i in range(1, len(self._tokens)):
            before = self._mark(i - 1)
            if before in OPENING:
                calls.append(self._mark(i - 2) if before == "(" and i > 1 else "")
            elif before in CLOSING and calls:
                calls.pop()
            if before in BEGINS_EXPRESSION:
                shown, _, literals = self._sum(i)
                if not literals <= self._seen:
                    self._seen |= literals
                    yield Text(self._file, self._tokens[i].line, shown, calls[-1] if calls else "")

    def _mark(self, i: int) -> str:
        """A token that is not a literal; a space for others and beyond the end."""
        return " " if i >= len(self._tokens) or self._tokens[i].is_literal else self._tokens[i].text

    def _end(self, i: int, ends: set[str]) -> int:
        """The next token in `ends` that is not inside brackets opened since i."""
        depth = 0
        while i < len(self._tokens) and (depth or self._mark(i) not in ends):
            depth += (self._mark(i) in OPENING) - (self._mark(i) in CLOSING)
            i += 1
        return i

    def _sum(self, i: int) -> tuple[str, int, set[int]]:
        """The operands joined by + from i on: where they end, and the literals shown."""
        shown, literals = "", set[int]()
        while True:
            end = self._end(i, ENDS_OPERAND)
            operand = range(i, end)
            if [token.text for token in self._tokens[i:i + 4]] == ["std", "::", "string", "("]:
                operand = range(i + 4, end - 1)
            if operand and all(self._tokens[k].is_literal for k in operand):
                text = "".join(self._tokens[k].text for k in operand)
                shown += re.sub(r"%[.\dl]*[dfs]", VARIES, text)  # conversions of printf
                literals |= set(operand)
            elif not shown.endswith(VARIES):
                shown += VARIES
            if self._mark(end) == "?":  # what came first is a condition
                return VARIES, end, set()
            if self._mark(end) != "+":
                return shown, end, literals
            i = end + 1

    def _messages(self) -> Iterator[Text]:
        for i in range(len(self._tokens)):
            if [self._mark(i + k) for k in range(3)] != [".", "where", "="]:
                continue
            parts = {field: "" for field in FIELDS}
            at = i
            while self._mark(at) == "." and self._mark(at + 1) in FIELDS:
                name = self._mark(at + 1)
                parts[name], end, literals = self._sum(at + 3)
                self._seen |= literals
                at = self._end(end, {",", "}"}) + 1
            shown = f"{parts['where']}: expected {parts['expected']}, got {parts['got']}"
            shown += f"; {parts['remedy']}" if parts["remedy"] else ""
            yield Text(self._file, self._tokens[i].line, shown, is_message=True)


# --- Python


class PythonTexts(ast.NodeVisitor):
    def __init__(self, source: str, file: str) -> None:
        self.found: list[Text] = []
        self._file, self._call = file, ""
        self.visit(ast.parse(source))

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # a docstring
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call | ast.FunctionDef) -> None:
        call = node.name if isinstance(node, ast.FunctionDef) else ast.unparse(node.func).rpartition(".")[2]
        outer, self._call = self._call, call
        self.generic_visit(node)
        self._call = outer

    visit_FunctionDef = visit_Call

    def _add(self, node: ast.expr) -> None:
        shown = re.sub(f"{VARIES}+", VARIES, self._shown(node))
        if shown != VARIES:
            self.found.append(Text(self._file, node.lineno, shown, self._call))
        else:
            self.generic_visit(node)

    visit_BinOp = visit_JoinedStr = visit_Constant = _add

    def _shown(self, node: ast.expr) -> str:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        if isinstance(node, ast.JoinedStr):
            return "".join(map(self._shown, node.values))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self._shown(node.left) + self._shown(node.right)
        if not isinstance(node, ast.Constant):
            self.generic_visit(node)  # texts within
        return VARIES


# --- CMake and the shell


def cmake_texts(source: str, file: str) -> Iterator[Text]:
    for match in re.finditer(r'message\((?:FATAL_ERROR|WARNING)((?:\s*"[^"]*")+)\s*\)', source):
        shown = "".join(re.findall('"([^"]*)"', match[1]))
        yield Text(file, line_of(match), re.sub(r"\$\{[^}]*\}", VARIES, shown))


def shell_texts(source: str, file: str) -> Iterator[Text]:
    for match in re.finditer(r"echo ([^\n]*) >&2", source):
        shown = re.sub(r"\$\([^)]*\)|\$\w+", VARIES, match[1])
        yield Text(file, line_of(match), shown.replace('"', ""))


def line_of(match: re.Match[str]) -> int:
    return match.string.count("\n", 0, match.start()) + 1


def texts() -> Iterator[Text]:
    for folder in ("hsdp", "zero", "quant", "bindings", "cmake"):
        for path in sorted((ROOT / folder).rglob("*")):
            file, kind = str(path.relative_to(ROOT)), path.suffix
            if kind in (".h", ".cpp", ".cu", ".cuh"):
                yield from CppTexts(path.read_text(encoding="utf-8"), file)
            elif kind == ".py" and folder == "bindings":  # the others are tools of the project
                yield from PythonTexts(path.read_text(encoding="utf-8"), file).found
            elif kind == ".cmake" or path.name == "CMakeLists.txt":
                yield from cmake_texts(path.read_text(encoding="utf-8"), file)
            elif kind == ".sh":
                yield from shell_texts(path.read_text(encoding="utf-8"), file)


# --- The page


def entries(page: str) -> Iterator[tuple[int, str]]:
    """Lines of a list that are one code span, with the backslash that breaks the line."""
    for number, line in enumerate(page.splitlines(), 1):
        match = re.fullmatch(r"(?:- |  )`([^`]+)`\\", line)
        if match:
            yield number, match[1]


def pattern_of(text: Text) -> re.Pattern[str]:
    parts = [re.escape(part.strip("\n")) for part in text.head.split(VARIES)]
    return re.compile(".*".join(parts))


def missing(found: list[Text], page: str) -> list[str]:
    all_spans = "\n".join(re.findall("`([^`\n]+)`", page))
    return [
        f"{text.file}:{text.line}: add `{text.shown}`"
        for text in found
        if text.is_needed and not text.keys & set(NOT_ON_THE_PAGE)
        and not pattern_of(text).search(all_spans)
    ]


def stale(found: list[Text], page: str) -> list[str]:
    known = "\n".join({text.shown for text in found})
    return [
        f"docs/troubleshooting.md:{number}: no source has '{part}' of `{shown}`"
        for number, shown in entries(page)
        for part in parts_of(shown)
        if not re.search(rf"(?<!\w){re.escape(part)}(?!\w)", known)
    ]


@pytest.fixture(scope="module")
def found() -> list[Text]:
    return list(texts())


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text(encoding="utf-8")


def test_every_message_is_on_the_page(found: list[Text], page: str) -> None:
    assert missing(found, page) == []


def test_every_entry_is_in_the_sources(found: list[Text], page: str) -> None:
    assert stale(found, page) == []


def test_what_is_left_out_is_in_the_sources(found: list[Text]) -> None:
    keys = {key for text in found if text.is_needed for key in text.keys}
    assert sorted(set(NOT_ON_THE_PAGE) - keys) == []


def test_no_code_span_goes_over_a_line_end(page: str) -> None:
    assert [line for line in page.splitlines() if line.count("`") % 2] == []


def test_texts_of_cpp() -> None:
    source = """
      if (bad) throw Error("mesh: rank " + std::to_string(r) + " of "
                           "the job");  // "a comment of four words"
      throw UsageError({.where = "mesh",
                        .expected = any ? "a, b" : "one of several things",
                        .got = "'" + std::string(name) + "'",
                        .remedy = "give one"});
    """
    assert [(text.line, text.shown) for text in CppTexts(source, "mesh.cpp") if text.is_needed] == [
        (4, "mesh: expected …, got '…'; give one"),
        (2, "mesh: rank … of the job"),
        (5, "one of several things"),
    ]


def test_texts_of_python() -> None:
    source = """
def f(x: int) -> None:
    'A docstring of five words.'
    if x < 0:
        raise ValueError(f"f: expected x of at least 0, got {x}; " + ("give a larger one" if x else "?"))
"""
    assert [text.shown for text in PythonTexts(source, "f.py").found if text.is_needed] == [
        "give a larger one", "f: expected x of at least 0, got …; …",
    ]
