"""docs/python.md names everything public, and all of it has a docstring."""

from __future__ import annotations

import importlib
import inspect
import pathlib
import re
from typing import Any

import pytest

import hsdp

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "python.md"
# A name that the site describes. `heading`: as the heading has it, where that differs from the source's path.
NAMED = re.compile(r"^::: (\S+)(?:\n +options: .*\bheading: ([\w.]+))?", re.MULTILINE)


def public_things() -> dict[str, Any]:
    pytest.importorskip("torch")  # part of the page is about torch
    names = set(hsdp.__all__) - {"__version__"} | {"torch"}
    found = {name: getattr(hsdp, name) for name in names}
    for package in ("torch", "quant", "zero"):
        part = getattr(hsdp, package)
        found |= {f"{package}.{name}": getattr(part, name) for name in part.__all__}
    for name in ("lightning", "transformers"):
        part = importlib.import_module(f"hsdp.integrations.{name}")
        found |= {f"integrations.{name}.{key}": getattr(part, key) for key in part.__all__}
    return {f"hsdp.{name}": thing for name, thing in found.items()}


def members_of(thing: Any) -> dict[str, Any]:
    """Of classes: what users may call and read, wherever in hsdp it is inherited from."""
    if not inspect.isclass(thing):
        return {}
    kinds = [kind for kind in thing.__mro__ if kind.__module__.startswith("hsdp")]
    return {
        name: member for kind in reversed(kinds) for name, member in vars(kind).items()
        if not name.startswith("_") and (isinstance(member, property) or inspect.isfunction(member))
    }


def test_every_public_name_is_on_the_page_once() -> None:
    named = [heading or path for path, heading in NAMED.findall(PAGE.read_text(encoding="utf-8"))]
    assert sorted(named) == sorted(public_things())


def test_everything_public_has_a_docstring() -> None:
    bare = []
    for name, thing in public_things().items():
        members = {f"{name}.{key}": member for key, member in members_of(thing).items()}
        bare += [
            full_name for full_name, described in {name: thing, **members}.items()
            if not (described.__doc__ or "").strip()
        ]
    assert bare == []


def test_nothing_public_is_missing_from_all() -> None:
    public = {
        name for name, value in vars(hsdp).items()
        if not name.startswith("_") and not inspect.ismodule(value) and name != "annotations"
    }
    assert public <= set(hsdp.__all__)
