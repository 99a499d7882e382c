"""docs/python.md says everything that is public, and what the docstrings say now."""

from __future__ import annotations

import importlib.util
import inspect
import pathlib
from types import ModuleType
from typing import Any

import pytest

import hsdp

DOCS = pathlib.Path(__file__).parents[2] / "docs"


@pytest.fixture
def maker() -> ModuleType:
    path = DOCS / "make_python_reference.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_is_up_to_date(maker: ModuleType) -> None:
    pytest.importorskip("torch")  # which the page is about, in part
    written = (DOCS / "python.md").read_text(encoding="utf-8")
    assert written == maker.reference(), (
        "run: PYTHONPATH=build/release/python build/venv/bin/python docs/make_python_reference.py "
        "docs/python.md"
    )


def test_every_public_name_stands_once(maker: ModuleType) -> None:
    named = [name for names in maker.SECTIONS.values() for name in names]
    assert sorted(set(named) - {"torch"}) == sorted(set(hsdp.__all__) - {"__version__"})
    assert len(named) == len(set(named))


def public_things() -> dict[str, Any]:
    found = {name: getattr(hsdp, name) for name in hsdp.__all__ if name != "__version__"}
    if importlib.util.find_spec("torch") is not None:
        found |= {f"torch.{name}": getattr(hsdp.torch, name) for name in hsdp.torch.__all__}
    return found


def members_of(thing: Any) -> dict[str, Any]:
    """Of classes: what users may call and read, wherever in hsdp it is inherited from."""
    if not inspect.isclass(thing):
        return {}
    kinds = [kind for kind in thing.__mro__ if kind.__module__.startswith("hsdp")]
    return {
        name: member for kind in reversed(kinds) for name, member in vars(kind).items()
        if not name.startswith("_") and (isinstance(member, property) or inspect.isfunction(member))
    }


def test_everything_public_is_described(maker: ModuleType) -> None:
    page = maker.reference()
    bare = []
    for name, thing in public_things().items():
        members = {f"{name}.{key}": member for key, member in members_of(thing).items()}
        for full_name, described in {name: thing, **members}.items():
            text = (described.__doc__ or "").strip().partition("\n")[0]
            if not text or text not in page:
                bare.append(full_name)
    assert bare == []


def test_nothing_public_is_missing_from_all() -> None:
    public = {
        name for name, value in vars(hsdp).items()
        if not name.startswith("_") and not inspect.ismodule(value) and name != "annotations"
    }
    assert public <= set(hsdp.__all__)
