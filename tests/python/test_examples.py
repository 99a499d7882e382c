"""The Python examples, run as their users run them. They check their own results."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest
from conftest import program
from page import python_blocks

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


def run(size: int, path: pathlib.Path, *arguments: str) -> str:
    command = [program("hsdp_run"), "-n", str(size), sys.executable, str(path), *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("size", [1, 4])
def test_numpy_loop(size: int) -> None:
    assert f"on {size} ranks" in run(size, EXAMPLES / "numpy_loop.py")


def test_jax_loop() -> None:
    output = run(2, EXAMPLES / "jax_loop.py")
    if importlib.util.find_spec("jax") is None:
        assert output.count("skipped: JAX is not installed") == 2
    else:
        assert "after 40 steps on 2 ranks" in output


def test_the_loop_in_the_readme(tmp_path: pathlib.Path) -> None:
    readme = (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")
    (tmp_path / "program.py").write_text(python_blocks(readme)[0])
    lines = run(4, tmp_path / "program.py").splitlines()
    assert sorted(lines) == [f"[{rank}] rank {rank}: 6" for rank in range(4)]
