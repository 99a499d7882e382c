"""docs/zero.md: its table is what docs/zero_table.py measures, and its example runs."""

from __future__ import annotations

import importlib
import pathlib
import re

import pytest
from conftest import Launcher
from test_examples import run

DOCS = pathlib.Path(__file__).parents[2] / "docs"


@pytest.fixture
def page() -> str:
    return (DOCS / "zero.md").read_text(encoding="utf-8")


def test_the_table_is_up_to_date(
    ranks: Launcher, page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    maker = importlib.import_module("zero_table")
    measured, other = ranks(2, maker.measure)
    assert measured == other
    assert f"\n\n{maker.table(measured)}\n" in page, (
        "run: PYTHONPATH=build/release/python build/release/hsdp/tools/hsdp_run -n 2 "
        "build/venv/bin/python docs/zero_table.py docs/zero.md"
    )


def printed(block: str, folder: pathlib.Path) -> float:
    """The number that both ranks end with."""
    (folder / "program.py").write_text(block)
    (number,) = {line.rpartition(" ")[2] for line in run(2, folder / "program.py").splitlines()}
    return float(number)


def test_the_examples(page: str, tmp_path: pathlib.Path) -> None:
    window, optimizer, checkpoint, gather = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert printed(window, tmp_path) < 3  # from 4.2, the logarithm of 64
    assert printed(optimizer, tmp_path) > 0
    for part in (checkpoint, gather):  # of a loop
        compile(part, "part", "exec")
