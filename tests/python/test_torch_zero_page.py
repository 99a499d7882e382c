"""docs/zero.md: its tables equal what docs/zero_table.py measures, and its examples run."""

from __future__ import annotations

import importlib
import pathlib

import pytest
from conftest import Launcher
from page import python_blocks
from warm_python import Run

pytest_plugins = ["warm_python"]

DOCS = pathlib.Path(__file__).parents[2] / "docs"


@pytest.fixture
def page() -> str:
    return (DOCS / "zero.md").read_text(encoding="utf-8")


def test_the_tables_are_up_to_date(
    ranks: Launcher, page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    maker = importlib.import_module("zero_table")
    for measure, table in ((maker.measure, maker.table), (maker.measure_adamw, maker.adamw_table)):
        measured, other = ranks(2, measure)
        assert measured == other
        assert f"\n\n{table(measured)}\n" in page, (
            "run: PYTHONPATH=build/release/python build/release/hsdp/tools/hsdp_run -n 2 "
            "build/venv/bin/python docs/zero_table.py docs/zero.md"
        )
    for row, values in zip(maker.ADAMW_ROWS, measured, strict=True):
        assert values == pytest.approx([held.at(2) for held in row.holds], abs=0.01)


def printed(run: Run, block: str, folder: pathlib.Path) -> float:
    """The number that both ranks print last."""
    (folder / "program.py").write_text(block)
    (number,) = {line.rpartition(" ")[2] for line in run(2, folder / "program.py").splitlines()}
    return float(number)


def test_the_examples(page: str, run: Run, tmp_path: pathlib.Path) -> None:
    window, optimizer, matrices, sharded, meta, over_mesh, checkpoint, gather = python_blocks(page)
    assert printed(run, window, tmp_path) < 3  # 4.2 at the start, the logarithm of 64
    assert printed(run, optimizer, tmp_path) > 0
    assert 1 < printed(run, matrices, tmp_path) < 2
    assert printed(run, sharded, tmp_path) == 16 * 256 + 256 + 4 * (256 * 256 + 256) + 256 + 1
    assert -0.25 < printed(run, meta, tmp_path) < -0.24  # for 16 inputs
    assert printed(run, over_mesh, tmp_path) == 16 * 64 + 64 + 64 + 1
    for part in (checkpoint, gather):  # parts of a loop
        compile(part, "part", "exec")
