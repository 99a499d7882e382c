"""`pip install .` into a fresh environment installs the package and both commands, and reports its
progress."""

from __future__ import annotations

import contextlib
import os
import pathlib
import pty
import re
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def run(*command: str, cwd: pathlib.Path) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Built with what this environment has, so nothing is downloaded."""
    folder = tmp_path_factory.mktemp("wheel")
    settings = os.environ.get("HSDP_WHEEL_SETTINGS", "").split("|")
    run(
        sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation",
        *[f"-C{setting}" for setting in settings if not setting.endswith("=")],
        f"-Cbuild-dir={os.environ.get('HSDP_WHEEL_BUILD', folder / 'build')}",
        "-w", str(folder), str(ROOT), cwd=folder,
    )
    return next(folder.glob("hsdp-*.whl"))


def test_what_is_in_it(wheel: pathlib.Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for ending in ["hsdp/__init__.py", "hsdp/py.typed", "hsdp/_hsdp.pyi", "scripts/hsdp_check",
                   "scripts/hsdp_plan", "scripts/hsdp_run", "hsdp/torch/slices/parameter_slices.py"]:
        assert [name for name in names if name.endswith(ending)], ending
    assert len([name for name in names if name.endswith(".so")]) == 1
    strangers = [name for name in names if not name.startswith(("hsdp/", "hsdp-"))]
    assert strangers == [] and not [name for name in names if "tests" in name or "include" in name]


def test_it_installs_and_runs(wheel: pathlib.Path, tmp_path: pathlib.Path) -> None:
    run(sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv"), cwd=tmp_path)
    there = tmp_path / "venv" / "bin"
    pip = [sys.executable, "-m", "pip", "--python", str(there / "python")]
    run(*pip, "install", "-q", str(wheel), cwd=tmp_path)
    command = ["env", f"PATH={there}", str(there / "python"), str(ROOT / "tests/package/try_installed.py")]
    assert re.match(r"hsdp [0-9.]+, Python 3.*: sound", run(*command, cwd=tmp_path))


# Ninja's lines bypass Python's sys.stdout, as CMake's do.
BUILD = """
import subprocess, build_backend
with build_backend._progress():
    subprocess.run(["sh", "-c", "echo start; for i in $(seq 0 40); do echo [$i/40] x; done; echo [1/2] y; echo [2/2] z"])
print("done")
"""


def test_a_terminal_is_told_each_tenth_of_a_build(tmp_path: pathlib.Path) -> None:
    """Reads the build's output as pip does."""
    kept = tmp_path / "kept"
    child, terminal = pty.fork()
    if child == 0:
        os.dup2(os.open(kept, os.O_CREAT | os.O_WRONLY), 1)
        os.execve(sys.executable, [sys.executable, "-c", BUILD], {**os.environ, "PYTHONPATH": str(ROOT / "cmake")})
    told = b""
    with contextlib.suppress(OSError):  # EIO: the child has closed it
        while part := os.read(terminal, 1000):
            told += part
    os.close(terminal)
    assert os.waitpid(child, 0)[1] == 0
    lines = [line.strip() for line in told.decode().replace("\r", "").split("\n  hsdp: ")]
    assert lines[1].startswith("compiling on ") and "pip install -v . shows all" in lines[1]
    assert lines[2:] == [f"{n} of 40 compiled" for n in range(4, 41, 4)] + ["2 of 2 compiled"]
    assert kept.read_text() == "start\n" + "".join(f"[{n}/40] x\n" for n in range(41)) + "[1/2] y\n[2/2] z\ndone\n"
