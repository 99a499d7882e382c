"""Types: the package, its stubs and the examples under mypy --strict, and stubs against the module."""

from __future__ import annotations

import inspect
import os
import pathlib
import subprocess
import sys

import pytest

import hsdp
from hsdp import _hsdp

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where mypy keeps what it knows of NumPy: for good in the build tree, else for this run."""
    return os.environ.get("HSDP_MYPY_CACHE") or str(tmp_path_factory.mktemp("mypy"))


def mypy(cache: str, folder: pathlib.Path, *targets: pathlib.Path) -> str:
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
    env = {**os.environ, "MYPYPATH": str(ROOT / "bindings")}
    done = subprocess.run(
        [*command, f"--cache-dir={cache}", *map(str, targets)],
        env=env, cwd=folder, capture_output=True, text=True, timeout=300,
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_the_package_and_the_examples(cache: str, tmp_path: pathlib.Path) -> None:
    own = [p for p in (ROOT / "bindings" / "hsdp").rglob("*.py*") if p.suffix in (".py", ".pyi")]
    examples = list((ROOT / "examples").glob("*.py"))
    assert len(own) > 10
    assert mypy(cache, tmp_path, *own, *examples) == ""


def test_wrong_types_are_found(cache: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "wrong.py").write_text(
        "import hsdp\n"
        "mesh = hsdp.init_mesh(replicate='two')\n"
        "hsdp.Reducer(mesh).register(1, 2)\n"
        "size: str = mesh.size\n"
    )
    found = mypy(cache, tmp_path, tmp_path / "wrong.py")
    assert [f"wrong.py:{line}" in found for line in (2, 3, 4)] == [True] * 3, found


def test_the_package_is_typed() -> None:
    assert (pathlib.Path(inspect.getfile(hsdp)).parent / "py.typed").exists()


def test_the_stub_names_what_the_module_has() -> None:
    import ast

    tree = ast.parse((ROOT / "bindings" / "hsdp" / "_hsdp.pyi").read_text())
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            stub = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
            real = {name for name in vars(getattr(_hsdp, node.name)) if not name.startswith("_")}
            assert stub - {"__init__"} == real, node.name
    classes = {node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    assert classes == {name for name in vars(_hsdp) if not name.startswith("_")}
