"""Follows a page of docs/ to the letter, as its readers do.

A fenced block says by its language and title what it is:

    ```python title="train.py"   a file, in any language
    ```diff title="train.py"     a change to that file; between @@ lines, what is there once
    ```diff                      a sketch of one
    ```sh                        what is typed in the folder with these files; it has to succeed
    ```text                      what that printed: each line, wherever it came; … is anything
    ```python                    a part of a file of the page, or of one in examples/ that it links to

Where a title says "not run here" the block's syntax is looked at, if Python or a shell know it. A page with
a CMakeLists.txt finds the build under test installed.
"""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
import textwrap
from typing import NamedTuple

from conftest import program

ROOT = pathlib.Path(__file__).parents[2]
LIMIT_S = 240
_BLOCK = re.compile(r'^```(\w+)(?: title="([^"\n]*)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
_EXAMPLE = re.compile(r"\]\(([./]*/examples/[^)#]+)\)")
_NOT_RUN = "not run here"
# What triton prints at the end of a program that warm_python.py has forked.
_NOISE = re.compile(r"nanobind: leaked .*?/refleaks\.html", re.DOTALL)


class PageError(AssertionError):
    """A statement of the page that does not hold."""


class _Block(NamedTuple):
    line: int
    language: str
    title: str
    text: str


def blocks_of(text: str) -> list[_Block]:
    """The blocks, in the order of the page."""
    return [
        _Block(text.count("\n", 0, found.start()) + 1, found[1], found[2] or "", found[3])
        for found in _BLOCK.finditer(text)
    ]


def python_blocks(text: str) -> list[str]:
    """The Python blocks without a title."""
    return [block.text for block in blocks_of(text) if block.language == "python" and not block.title]


class Page:
    """A page, the folder in which it is followed, and the folder of the Python that its commands use."""

    def __init__(self, path: pathlib.Path, folder: pathlib.Path, python: pathlib.Path | None = None) -> None:
        self._path = path
        self._folder = folder
        self._python = python or pathlib.Path(sys.executable).parent
        self._text = path.read_text(encoding="utf-8")
        self._files: dict[str, str] = {}
        self._printed: str | None = None

    def follow(self) -> None:
        """Raises PageError if something does not go as the page says."""
        outside = _BLOCK.sub("", self._text)
        if "```" in outside or re.search(r"\n\n    \S", outside):
            raise PageError(f"{self._path.name}: expected every block between ```, with a language")
        (self._folder / "examples").symlink_to(ROOT / "examples")
        blocks = blocks_of(self._text)
        for block in blocks:
            try:
                self._do(block)
            except PageError as error:
                raise PageError(f"{self._path.name}, line {block.line}: {error}") from None
        linked = [(self._path.parent / name).resolve() for name in _EXAMPLE.findall(self._text)]
        sources = [*self._files.values(), *(path.read_text() for path in linked if path.is_file())]
        for block in blocks:
            if block.language in ("python", "cpp") and not block.title and not _is_part(block.text, sources):
                raise PageError(
                    f"{self._path.name}, line {block.line}: expected these lines in a file of the page or an "
                    f"example that it links to\n{block.text}"
                )

    def _do(self, block: _Block) -> None:
        if _NOT_RUN in block.title:
            _look_at(block)
        elif block.language == "sh":
            self._type(block.text)
        elif block.language == "text":
            self._expect(block.text)
        elif block.language == "diff" and block.title:
            self._change(block)
        elif block.title:
            (self._folder / block.title).parent.mkdir(parents=True, exist_ok=True)
            (self._folder / block.title).write_text(block.text)
            self._files[block.title] = block.text

    def _type(self, commands: str) -> None:
        here = [self._python, pathlib.Path(program("hsdp_run")).parent, pathlib.Path(sys.executable).parent]
        path = ":".join([*map(str, here), os.environ["PATH"]])
        root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        # Unbuffered, processes that share an output would write their lines and line ends in turn.
        env = {**os.environ, **root, "PATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""}
        if "CMakeLists.txt" in self._files and "HSDP_TOOLS" in os.environ:
            env["CMAKE_PREFIX_PATH"] = str(self._install())
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", commands], cwd=self._folder, env=env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=LIMIT_S,
        )
        self._printed = _NOISE.sub("", done.stdout)
        if done.returncode != 0:
            raise PageError(f"exit status {done.returncode}\n{commands}{done.stdout}")

    def _install(self) -> pathlib.Path:
        prefix = self._folder / "installed"
        if not prefix.exists():
            build = pathlib.Path(os.environ["HSDP_TOOLS"]).parents[1]
            command = ["cmake", "--install", str(build), "--prefix", str(prefix)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
            if done.returncode != 0:
                raise PageError(f"the build could not be installed\n{done.stdout}{done.stderr}")
        return prefix

    def _expect(self, text: str) -> None:
        if self._printed is None:
            raise PageError("expected a block of commands before what they print")
        lines = self._printed.splitlines()
        for wanted in filter(None, map(str.strip, text.splitlines())):
            pattern = ".*".join(map(re.escape, wanted.split("…")))
            if not any(re.fullmatch(pattern, line.strip()) for line in lines):
                raise PageError(f"expected the line\n{wanted}\ngot\n{self._printed}")

    def _change(self, block: _Block) -> None:
        if block.title not in self._files:
            raise PageError(f"expected the title to name a file of the page, got '{block.title}'")
        text = self._files[block.title]
        for hunk in filter(str.strip, re.split(r"^@@.*\n", block.text, flags=re.MULTILINE)):
            lines = [line if line != "\n" else " \n" for line in hunk.splitlines(keepends=True)]
            old, new = ("".join(line[1:] for line in lines if line[0] in kept) for kept in (" -", " +"))
            if set(line[0] for line in lines) - set(" -+") or text.count(old) != 1:
                raise PageError(f"expected this once in {block.title}, got it {text.count(old)} times\n{old}")
            text = text.replace(old, new)
        self._files[block.title] = text
        (self._folder / block.title).write_text(text)


def _look_at(block: _Block) -> None:
    if block.language == "python":
        try:
            compile(block.text, block.title, "exec")
        except SyntaxError as error:
            raise PageError(str(error)) from None
    elif block.language == "sh":
        done = subprocess.run(["bash", "-n"], input=block.text, text=True, capture_output=True)
        if done.returncode != 0:
            raise PageError(done.stderr)


def _is_part(text: str, sources: list[str]) -> bool:
    wanted = [line.strip() for line in textwrap.dedent(text).splitlines() if line.strip()]
    for source in sources:
        lines = [line.strip() for line in source.splitlines() if line.strip()]
        if any(lines[at:at + len(wanted)] == wanted for at in range(len(lines) - len(wanted) + 1)):
            return True
    return False
