"""`pip install .` into a fresh environment gives the package and both commands."""

from __future__ import annotations

import os
import pathlib
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
    """Built with what this environment has, so that nothing is fetched for it."""
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
                   "scripts/hsdp_run"]:
        assert [name for name in names if name.endswith(ending)], ending
    assert len([name for name in names if name.endswith(".so")]) == 1
    strangers = [name for name in names if not name.startswith(("hsdp/", "hsdp-"))]
    assert strangers == [] and not [name for name in names if "tests" in name or "include" in name]


STEP = """
import numpy as np, hsdp
with hsdp.init_mesh(shard=2) as mesh:
    x = np.full(3, mesh.rank + 1, np.float32)
    assert mesh.world.all_reduce(x).tolist() == [3] * 3
print("hsdp", hsdp.__version__)
"""


def test_it_installs_and_runs(wheel: pathlib.Path, tmp_path: pathlib.Path) -> None:
    run(sys.executable, "-m", "venv", str(tmp_path / "venv"), cwd=tmp_path)
    there = tmp_path / "venv" / "bin"
    run(str(there / "python"), "-m", "pip", "install", "-q", str(wheel), cwd=tmp_path)
    (tmp_path / "step.py").write_text(STEP)
    command = [str(there / "hsdp_run"), "-n", "2", str(there / "python"), "step.py"]
    version = run(str(there / "hsdp_check"), "--version", cwd=tmp_path).split()[-1]
    assert f"hsdp {version}" in run(*command, cwd=tmp_path)
