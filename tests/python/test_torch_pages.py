"""The pages docs/from and docs/tasks that use PyTorch, followed to the letter."""

from __future__ import annotations

import pathlib

import pytest
import torch
from page import Page
from test_pages import name_of, pages

pytest_plugins = ["warm_python"]


@pytest.mark.parametrize("path", pages(with_torch=True), ids=name_of)
def test_a_page(path: pathlib.Path, tmp_path: pathlib.Path, python: pathlib.Path) -> None:
    if name_of(path) == "from/ddp" and torch.__version__.startswith("2.9."):
        pytest.skip("compares what two programs print, to which torch 2.9's gloo adds lines")
    Page(path, tmp_path, python.parent).follow()
