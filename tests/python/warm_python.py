"""Starts programs in forks of a Python that has imported torch, as the import takes longer than most
programs.

`warm_python(folder)` makes a folder with `python` and `torchrun`, to come first in PATH. A program that
imports torch then runs in a fork of a server. Other programs start as usual, and with HSDP_COLD_PYTHON=1 all
do. Even and odd ranks have separate servers, as the string hashes of ranks have different seeds.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Protocol

import pytest
from conftest import program

START = str(pathlib.Path(__file__).with_name("warm_start.py"))
SERVER_COUNT = 2  # as warm_start.py has


@contextlib.contextmanager
def warm_python(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """The folder also has the servers' sockets."""
    if os.environ.get("HSDP_COLD_PYTHON") == "1":
        yield pathlib.Path(sys.executable).parent
        return
    _write_program(folder / "torchrun", f'exec "{folder}/python" -m torch.distributed.run "$@"')
    client = f'exec "{sys.executable}" -IS "{START}" "{sys.executable}" "{folder}" "$@"'
    _write_program(folder / "python", client)
    with contextlib.ExitStack() as stack:
        for index in range(SERVER_COUNT):
            stack.enter_context(_server(folder, index))
        yield folder


def _write_program(path: pathlib.Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


@contextlib.contextmanager
def _server(folder: pathlib.Path, index: int) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(folder / str(index)))
        listener.listen(64)
        server = subprocess.Popen(
            [sys.executable, START, str(listener.fileno()), str(folder / "python")],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=[listener.fileno()],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": str(index + 1)},
        )
    try:
        yield
    finally:
        server.communicate()


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pathlib.Path]:
    """The `python` of such a folder."""
    with warm_python(tmp_path_factory.mktemp("warm")) as folder:
        yield folder / "python"


class Run(Protocol):
    """Runs a program on that many ranks; returns what it printed."""

    def __call__(self, size: int, path: pathlib.Path, *arguments: str) -> str: ...


@pytest.fixture
def run(python: pathlib.Path) -> Run:
    def run(size: int, path: pathlib.Path, *arguments: str) -> str:
        return output_of(program("hsdp_run"), "-n", str(size), str(python), str(path), *arguments)

    return run


def output_of(*command: str) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
