"""Types: the package, its stubs and the examples under mypy --strict and pyright, and the stubs against the
module.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import pathlib
import subprocess
import sys
import tomllib
from typing import Any

import pytest

import hsdp
from hsdp import _hsdp

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where mypy caches what it knows of NumPy: permanently in the build tree, otherwise for this run."""
    return os.environ.get("HSDP_MYPY_CACHE") or str(tmp_path_factory.mktemp("mypy"))


def mypy(cache: str, folder: pathlib.Path, *targets: pathlib.Path) -> list[str]:
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
    env = {**os.environ, "MYPYPATH": str(ROOT / "bindings")}
    done = subprocess.run(
        [*command, "--no-error-summary", f"--cache-dir={cache}", *map(str, targets)],
        env=env, cwd=folder, capture_output=True, text=True, timeout=300,
    )
    assert not done.stderr and done.returncode in (0, 1), done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if ": note:" not in line]


def pyright(folder: pathlib.Path, config: dict[str, Any]) -> list[str]:
    """Runs basedpyright, pyright as a wheel. Returns errors as file:line, each with its text."""
    (folder / "pyrightconfig.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--project", str(folder)]
    done = subprocess.run(
        [*command, "--pythonpath", sys.executable], capture_output=True, text=True, timeout=300
    )
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert found["summary"]["filesAnalyzed"] > 0
    return [
        f"{pathlib.Path(one['file']).name}:{one['range']['start']['line'] + 1}: {one['message']}"
        for one in found["generalDiagnostics"] if one["severity"] == "error"
    ]


def pyright_settings() -> dict[str, Any]:
    """The options of pyproject.toml, with absolute paths."""
    settings: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]
    return {
        key: [str(ROOT / path) for path in value] if isinstance(value, list) else value
        for key, value in settings.items()
    }


WRONG = """import hsdp
mesh = hsdp.init_mesh(replicate='two')
hsdp.Reducer(mesh).register(1, 2)
size: str = mesh.size
hsdp.init_mesh(engine="gloo")
reducer = hsdp.Reducer(mesh, layout="rows")
hsdp.Reducer(mesh, missing="ignore")
hsdp.Reducer(mesh, backwards="two")
hsdp.Reducer(mesh, accumulate_dtype="bf16")
hsdp.Reducer(mesh, accumulate_on="disk")
hsdp.Reducer(mesh, reduction="fast")
reducer.microbatch(sync="some")
reducer.begin_microbatch(sync="partial")
reducer.set_partial_sync("all")
hsdp.zero.coalesce_grad_reduction(reducer, accumulate="sum")
hsdp.zero.coalesce_grad_reduction(reducer, accumulate_dtype="f16")
hsdp.quant.LocoHop(bits=5)
mesh.world.all_reduce(1, op="mean")
hsdp.Reducer(mesh, bucket_cap_mb=25)
hsdp.read_snapshot("x").read("w", dtype="bf16")
"""
RIGHT = """import numpy as np
import hsdp
from hsdp.options import Layout
layout: Layout = "dim0"
mesh = hsdp.init_mesh(engine="host")
reducer = hsdp.Reducer(mesh, layout=layout, missing="zero", backwards="many", accumulate_on="host",
                       accumulate_dtype="param", reduction="native", reduce_dtype="bf16")
with reducer.microbatch(last=True), reducer.no_sync():
    reducer.set_partial_sync("none")
kept: Layout = reducer.layout
whole: int = mesh.world.all_reduce(3, op="max")
part: float = mesh.world.all_reduce(3.0)
array: np.ndarray[tuple[int], np.dtype[np.float32]] = mesh.world.all_reduce(np.ones(3, np.float32))
w = np.ones(3, np.float32)
w -= 0.1 * reducer.shard("w")
norm: float = float(reducer.grad_norm())
total: float = reducer.shard("w").sum()
"""


def require_errors_in_wrong_alone(errors: list[str]) -> None:
    """The package, the examples and right.py have no errors; every line of wrong.py after the import has
    one."""
    places = [error.split(":")[:2] for error in errors]
    assert {file for file, _ in places} == {"wrong.py"}, errors
    assert sorted({int(line) for _, line in places}) == list(range(2, WRONG.count("\n") + 1)), errors


def test_what_mypy_finds(cache: str, tmp_path: pathlib.Path) -> None:
    own = [p for p in (ROOT / "bindings" / "hsdp").rglob("*.py*") if p.suffix in (".py", ".pyi")]
    examples = list((ROOT / "examples").glob("*.py"))
    assert len(own) > 10
    (tmp_path / "wrong.py").write_text(WRONG)
    (tmp_path / "right.py").write_text(RIGHT)
    users = [tmp_path / "wrong.py", tmp_path / "right.py"]
    require_errors_in_wrong_alone(mypy(cache, tmp_path, *own, *examples, *users))


def test_what_pyright_finds(tmp_path: pathlib.Path) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch, whose types it looks at")
    (tmp_path / "wrong.py").write_text(WRONG)
    (tmp_path / "right.py").write_text(RIGHT)
    settings = pyright_settings()
    settings["include"] = [*settings["include"], str(tmp_path)]
    require_errors_in_wrong_alone(pyright(tmp_path, settings))


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
