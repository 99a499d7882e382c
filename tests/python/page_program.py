"""The programs that docs/tasks/trainers.md shows, as files."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

from conftest import program

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "tasks" / "trainers.md"


def program_of_page(folder: pathlib.Path, name: str) -> pathlib.Path:
    """The block of that title, in a file of the folder."""
    block = re.search(rf'^```python title="{re.escape(name)}"\n(.*?)^```$', PAGE.read_text(), re.S | re.M)
    assert block is not None, name
    path = folder / name
    path.write_text(block[1])
    return path


def run_program_of_page(folder: pathlib.Path, name: str) -> str:
    """What two ranks of it print."""
    command = [program("hsdp_run"), "-n", "2", sys.executable, str(program_of_page(folder, name))]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
