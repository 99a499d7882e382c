"""Runs functions of a test file as the ranks of a job: real processes."""

from __future__ import annotations

import inspect
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any

import pytest

HERE = pathlib.Path(__file__).parent
LIMIT_S = 120.0


def program(name: str) -> str:
    """hsdp_run or hsdp_check: of the build under test, else of the environment."""
    folder = os.environ.get("HSDP_TOOLS")
    return str(pathlib.Path(folder) / name) if folder else name


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def own_rank() -> int:
    """Of a rank, by its launcher's variable; 0 elsewhere."""
    return int(os.environ.get("RANK", "0"))


def is_readable(descriptor: int, limit_s: float) -> bool:
    """Or, of a process, over; waits for it."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(1000 * limit_s))


class Job:
    """A started job. `wait` gives what each rank returned."""

    def __init__(self, leader: int, folder: pathlib.Path, size: int) -> None:
        self.leader = leader
        self.folder = folder
        self.size = size
        try:
            self.end: int | None = os.pidfd_open(leader)
        except ProcessLookupError:
            self.end = None  # it was faster

    def wait(self, limit_s: float = LIMIT_S, may_fail: bool = False) -> list[Any]:
        if not self._ended(limit_s):
            self.kill()
            pytest.fail(f"the job did not end within {limit_s} s:\n{self.output}")
        status = self.folder / "status"
        if not may_fail and (code := status.read_text() if status.exists() else "none") != "0":
            pytest.fail(f"the job ended with {code}:\n{self.output}")
        return [self._result(rank) for rank in range(self.size)]

    @property
    def output(self) -> str:
        path = self.folder / "output"
        return path.read_text(errors="replace") if path.exists() else ""

    def _ended(self, limit_s: float) -> bool:
        return self.end is None or is_readable(self.end, limit_s)

    def _result(self, rank: int) -> Any:
        path = self.folder / f"{rank}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def kill(self) -> None:
        if not self._ended(0):
            with suppress(ProcessLookupError):
                os.killpg(self.leader, signal.SIGKILL)
            self._ended(20)
        if self.end is not None:
            os.close(self.end)
            self.end = None


class Forks:
    """The process that forks the ranks of a test file's jobs."""

    def __init__(self, file: pathlib.Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-u", str(HERE / "fork_ranks.py"), str(file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def start(self, job: dict[str, Any]) -> int:
        """The process id of the job's leader."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
        if not is_readable(self.process.stdout.fileno(), LIMIT_S):
            pytest.fail(f"fork_ranks.py did not import the test file within {LIMIT_S} s")
        answer = self.process.stdout.readline()
        if not answer:
            pytest.fail(f"fork_ranks.py ended with {self.process.wait()}")
        return int(answer)

    def close(self) -> None:
        try:
            self.process.communicate(timeout=20)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()


class Launcher:
    """Starts `function(*arguments)` of a test file on `size` ranks."""

    def __init__(self, forks: Forks, folder: pathlib.Path) -> None:
        self.forks = forks
        self.folder = folder
        self.jobs: list[Job] = []

    def start(self, size: int, function: Callable[..., Any], *arguments: Any, **env: str) -> Job:
        folder = self.folder / f"job{len(self.jobs)}"
        folder.mkdir()
        job = {
            "size": size,
            "file": inspect.getfile(function),
            "function": function.__name__,
            "arguments": arguments,
            "folder": str(folder),
            "cwd": str(pathlib.Path.cwd()),
            "environment": {**os.environ, "OMP_NUM_THREADS": "1", **env},
        }
        self.jobs.append(Job(self.forks.start(job), folder, size))
        return self.jobs[-1]

    def __call__(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        return self.start(size, function, *arguments).wait()

    def close(self) -> None:
        for job in self.jobs:
            job.kill()


@pytest.fixture(scope="module")
def forks(request: pytest.FixtureRequest) -> Iterator[Forks]:
    with closing(Forks(request.path)) as forks:
        yield forks


@pytest.fixture
def ranks(forks: Forks, tmp_path: pathlib.Path) -> Iterator[Launcher]:
    """`ranks(4, function, *arguments)`: what the function returned on each of 4 ranks."""
    with closing(Launcher(forks, tmp_path)) as launcher:
        yield launcher


@pytest.fixture(scope="module")
def module_ranks(
    forks: Forks, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Launcher]:
    """The same for jobs of which several tests look at the result."""
    with closing(Launcher(forks, tmp_path_factory.mktemp("jobs"))) as launcher:
        yield launcher
