"""The pages docs/from and docs/tasks, followed to the letter: those without PyTorch, and the follower
itself."""

from __future__ import annotations

import pathlib

import pytest
from page import ROOT, Page, PageError

FOLDERS = ("from", "tasks")


def pages(*, with_torch: bool) -> list[pathlib.Path]:
    found = sorted(path for folder in FOLDERS for path in (ROOT / "docs" / folder).glob("*.md"))
    return [path for path in found if ("import torch" in path.read_text(encoding="utf-8")) == with_torch]


def name_of(path: pathlib.Path) -> str:
    return f"{path.parent.name}/{path.stem}"


@pytest.mark.parametrize("path", pages(with_torch=False), ids=name_of)
def test_a_page(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    Page(path, tmp_path).follow()


def follow(tmp_path: pathlib.Path, *blocks: str) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n" + "\n\n".join(blocks) + "\n")
    (tmp_path / "folder").mkdir()
    Page(page, tmp_path / "folder").follow()


PROGRAM = '```python title="a.py"\nfor i in range(3):\n    print("seen", i)\n```'
CHANGE = '```diff title="a.py"\n@@\n-for i in range(3):\n+for i in range(5):\n     print("seen", i)\n```'
RUN = "```sh\npython a.py\n```"


def test_what_holds(tmp_path: pathlib.Path) -> None:
    follow(
        tmp_path, PROGRAM, RUN, "```text\nseen 2\nse… 0\n```", CHANGE, RUN, "```text\nseen 4\n```",
        "```python\nprint(\"seen\", i)\n```", '```sh title="not run here"\nrm -rf nothing; exit 1\n```',
        "```sh\nhsdp_run -n 2 python a.py && hsdp_check --version\n```", "```text\n[1] seen 3\n```",
    )


@pytest.mark.parametrize(("blocks", "message"), [
    ((PROGRAM, RUN, "```text\nseen 3\n```"), r"line 12: expected the line\nseen 3\ngot\nseen 0"),
    ((PROGRAM, "```sh\nfalse\necho on\n```"), r"line 8: exit status 1\nfalse"),
    ((PROGRAM, "```sh\nfalse | cat\n```"), r"line 8: exit status 1"),
    (("```text\nseen\n```",), "expected a block of commands before"),
    ((PROGRAM, CHANGE, CHANGE), "line 15: expected this once in a.py, got it 0 times"),
    ((CHANGE,), "expected the title to name a file of the page, got 'a.py'"),
    ((PROGRAM, "```python\nprint(i)\n```"), r"line 8: expected these lines in a file"),
    (("    python a.py",), "expected every block between"),
    (("```\npython a.py\n```",), "expected every block between"),
    (('```python title="b.py (not run here)"\nfor\n```',), "invalid syntax"),
    (('```sh title="not run here"\nif\n```',), "syntax error"),
])
def test_what_does_not(tmp_path: pathlib.Path, blocks: tuple[str, ...], message: str) -> None:
    with pytest.raises(PageError, match=message):
        follow(tmp_path, *blocks)
