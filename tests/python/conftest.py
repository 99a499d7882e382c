"""Runs functions of a test file as the ranks of a job: real processes."""

from __future__ import annotations

import functools
import inspect
import json
import math
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from typing import Any

import fork_ranks
import pytest
from fork_ranks import free_port as free_port  # for the tests

LIMIT_S = 120.0

os.environ["OMP_NUM_THREADS"] = "1"  # for all processes, before any of them imports torch


def program(name: str) -> str:
    """Finds hsdp_run or hsdp_check: in the build under test, else in the environment."""
    folder = os.environ.get("HSDP_TOOLS")
    return str(pathlib.Path(folder) / name) if folder else name


def hsdp_check(*arguments: Any) -> int:
    command = [program("hsdp_check"), *map(str, arguments)]
    return subprocess.run(command, stdout=subprocess.DEVNULL, timeout=60).returncode


def own_rank() -> int:
    """This rank, by its launcher's variable; 0 outside a job."""
    return int(os.environ.get("RANK", "0"))


def is_readable(descriptor: int, limit_s: float) -> bool:
    """Whether the descriptor is readable within the limit. A process's is once the process has ended."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(1000 * limit_s))


class Job:
    """A started job. `wait` returns what each rank returned."""

    def __init__(self, leader: int, folder: pathlib.Path, size: int) -> None:
        self.leader = leader
        self.folder = folder
        self.size = size
        try:
            self.end: int | None = os.pidfd_open(leader)
        except ProcessLookupError:
            self.end = None  # it has ended already

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
    """The process that forks the ranks of jobs, as fork_ranks.py describes."""

    def __init__(self, file: pathlib.Path | None = None) -> None:
        """Forks this process, or starts a Python that imports the file."""
        ours, theirs = socket.socketpair()
        self.process = fork_ranks.fork()
        if self.process == 0:
            ours.close()  # otherwise it would never see the end of its input
            os.dup2(theirs.fileno(), 0)
            os.dup2(theirs.fileno(), 1)
            if file is None:
                fork_ranks.serve_and_exit()
            os.execv(sys.executable, [sys.executable, "-u", fork_ranks.__file__, str(file)])
        with ours, theirs:
            self.jobs, self.answers = ours.makefile("w"), ours.makefile("r")

    def start(self, job: dict[str, Any]) -> int:
        """The process id of the job's leader."""
        with suppress(BrokenPipeError):
            self.jobs.write(json.dumps(job, default=str) + "\n")
            self.jobs.flush()
        if not is_readable(self.answers.fileno(), LIMIT_S):
            pytest.fail(f"fork_ranks.py did not start a job within {LIMIT_S} s")
        answer = self.answers.readline()
        if not answer:
            pytest.fail("fork_ranks.py ended; what it said is above")
        return int(answer)

    def close(self) -> None:
        self.jobs.close()
        self.answers.close()
        process = os.pidfd_open(self.process)
        if not is_readable(process, 20):
            os.kill(self.process, signal.SIGKILL)
        os.close(process)
        os.waitpid(self.process, 0)


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
            "file": inspect.getfile(inspect.unwrap(function)),
            "function": function.__name__,
            "arguments": arguments,
            "folder": str(folder),
            "cwd": str(pathlib.Path.cwd()),
            "environment": {**os.environ, **env},
        }
        self.jobs.append(Job(self.forks.start(job), folder, size))
        return self.jobs[-1]

    def __call__(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        return self.start(size, function, *arguments).wait()

    def close(self) -> None:
        for job in self.jobs:
            job.kill()


OF_PYTEST = pytest.StashKey[Forks]()


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, bool, bool]:
    """Forks this process before the first test, when nothing has run in it yet."""
    if "torch" not in sys.modules or not any("forks" in item.fixturenames for item in session.items):
        return (yield)
    with closing(Forks()) as session.config.stash[OF_PYTEST]:
        return (yield)


@pytest.fixture(scope="module")
def forks(request: pytest.FixtureRequest) -> Iterator[Forks]:
    if OF_PYTEST in request.config.stash:
        yield request.config.stash[OF_PYTEST]
    else:
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
    """The same, for jobs whose result several tests look at."""
    with closing(Launcher(forks, tmp_path_factory.mktemp("jobs"))) as launcher:
        yield launcher


def on_ranks(size: int | Callable[..., int]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turns a function into a test that runs on each of `size` ranks; `size` may compute that from the test's
    arguments. A path arrives as text.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        names = list(inspect.signature(function).parameters)

        @functools.wraps(function)
        def test(ranks: Launcher, **named: Any) -> None:
            arguments = [named[name] for name in names]
            ranks(size(*arguments) if callable(size) else size, test, *arguments)

        test.__signature__ = _signature("ranks", *names)  # type: ignore[attr-defined]
        test.on_rank = function  # type: ignore[attr-defined]
        return test

    return decorate


def _signature(*names: str) -> inspect.Signature:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Signature([inspect.Parameter(name, kind) for name in names])


def on_mesh(
    replicate: int, shard: int, **options: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The same for a function whose first argument is a mesh of all ranks."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def with_mesh(*arguments: Any) -> None:
            import hsdp

            with hsdp.init_mesh(replicate, shard, **options) as mesh:
                function(mesh, *arguments)

        names = list(inspect.signature(function).parameters)[1:]
        with_mesh.__signature__ = _signature(*names)  # type: ignore[attr-defined]
        return on_ranks(replicate * shard)(with_mesh)

    return decorate


def on_meshes(*shapes: tuple[int, int]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The same on meshes of these sizes, (replicate, shard), one after the other."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def with_mesh(shape: tuple[int, int], *arguments: Any) -> None:
            import hsdp

            with hsdp.init_mesh(*shape) as mesh:
                function(mesh, *arguments)

        names = list(inspect.signature(function).parameters)[1:]
        with_mesh.__signature__ = _signature("shape", *names)  # type: ignore[attr-defined]
        test = on_ranks(lambda shape, *_: math.prod(shape))(with_mesh)
        return pytest.mark.parametrize("shape", shapes, ids=lambda shape: "x".join(map(str, shape)))(test)

    return decorate
