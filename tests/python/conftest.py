"""Runs functions of a test file as the ranks of a job: real processes, started by hsdp_run."""

from __future__ import annotations

import inspect
import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

HERE = pathlib.Path(__file__).parent
LIMIT_S = 120.0


def program(name: str) -> str:
    """hsdp_run or hsdp_check: of the build under test, else of the environment."""
    folder = os.environ.get("HSDP_TOOLS")
    return str(pathlib.Path(folder) / name) if folder else name


class Job:
    """A started job. `wait` gives what each rank returned."""

    def __init__(self, process: subprocess.Popen[str], folder: pathlib.Path, size: int) -> None:
        self.process = process
        self.folder = folder
        self.size = size

    def wait(self, limit_s: float = LIMIT_S, may_fail: bool = False) -> list[Any]:
        try:
            output, _ = self.process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            self.kill()
            output, _ = self.process.communicate()
            pytest.fail(f"the job did not end within {limit_s} s:\n{output}")
        if self.process.returncode != 0 and not may_fail:
            pytest.fail(f"the job ended with {self.process.returncode}:\n{output}")
        return [self._result(rank) for rank in range(self.size)]

    def _result(self, rank: int) -> Any:
        path = self.folder / f"{rank}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                self.process.kill()


class Launcher:
    """Starts `function(*arguments)` of a test file on `size` ranks."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.jobs: list[Job] = []

    def start(self, size: int, function: Callable[..., Any], *arguments: Any, **env: str) -> Job:
        folder = self.folder / f"job{len(self.jobs)}"
        folder.mkdir()
        where = [inspect.getfile(function), function.__name__, json.dumps(arguments), str(folder)]
        command = [program("hsdp_run"), "-n", str(size), "--grace-s", "5", sys.executable]
        process = subprocess.Popen(
            [*command, str(HERE / "run_rank.py"), *where],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        )
        self.jobs.append(Job(process, folder, size))
        return self.jobs[-1]

    def __call__(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        return self.start(size, function, *arguments).wait()


@pytest.fixture
def ranks(tmp_path: pathlib.Path) -> Iterator[Launcher]:
    """`ranks(4, function, *arguments)`: what the function returned on each of 4 ranks."""
    launcher = Launcher(tmp_path)
    yield launcher
    for job in launcher.jobs:
        job.kill()
