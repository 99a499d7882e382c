"""The Python examples, run as their users run them. They check their own results."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

from conftest import program
from page import python_blocks

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


def run(size: int, path: pathlib.Path, *arguments: str) -> str:
    command = [program("hsdp_run"), "-n", str(size), sys.executable, str(path), *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_numpy_loop() -> None:
    assert "on 4 ranks" in run(4, EXAMPLES / "numpy_loop.py")


def test_the_loop_in_the_readme(tmp_path: pathlib.Path) -> None:
    readme = (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")
    (tmp_path / "program.py").write_text(python_blocks(readme)[0])
    lines = run(4, tmp_path / "program.py").splitlines()
    assert sorted(lines) == [f"[{rank}] rank {rank}: 6" for rank in range(4)]
