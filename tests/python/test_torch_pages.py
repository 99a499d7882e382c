"""The pages for readers and for tasks that have PyTorch in them, followed to the letter."""

from __future__ import annotations

import pathlib

import pytest
from page import Page
from test_pages import name_of, pages

pytest_plugins = ["warm_python"]


@pytest.mark.parametrize("path", pages(with_torch=True), ids=name_of)
def test_a_page(path: pathlib.Path, tmp_path: pathlib.Path, python: pathlib.Path) -> None:
    Page(path, tmp_path, python.parent).follow()
