"""Runs jobs of test files: one job for each line of its input.

The process has imported the tests, as that takes longer than most jobs. For each job it forks a leader, whose
forks are the ranks, and answers with the leader's process id. The ranks share the seed of string hashes,
unlike those of examples and pages, which hsdp_run starts. A job leaves in its folder what was printed
(`output`), what the function returned on each rank (`0.json`) and, at its end, the first status that is not 0
(`status`).

With torch, which takes seconds to import, the process is a fork of pytest. Its ranks run their exit handlers
and then just end; those of examples and pages end as programs do. Without torch it is `fork_ranks.py FILE`,
and its ranks end as programs do too.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib.util
import json
import os
import pathlib
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from types import ModuleType
from typing import Any, NoReturn

GRACE_S = 5.0  # for the other ranks, when one has failed
PR_SET_PDEATHSIG = 1


def load(file: pathlib.Path) -> ModuleType:
    known = sys.modules.get(file.stem)
    if known is not None and known.__file__ == str(file):
        return known
    sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def fork() -> int:
    """A child ends when its parent does."""
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    return child


def prepare_leader(job: dict[str, Any]) -> None:
    os.setpgid(0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.chdir(job["cwd"])
    output = os.open(f"{job['folder']}/output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ |= job["environment"]
    os.environ |= {
        "WORLD_SIZE": str(job["size"]),
        "LOCAL_WORLD_SIZE": str(job["size"]),
        "HSDP_JOB": secrets.token_hex(8),
        "HSDP_SECRET": secrets.token_hex(16),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }


def lead(children: set[int]) -> int:
    """Waits for the ranks. Once one has failed the others have GRACE_S to end by themselves."""
    first = 0
    deadline = float("inf")
    while children:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child != 0:
            children.remove(child)
            code = os.waitstatus_to_exitcode(status)
            if code != 0 and first == 0:
                first, deadline = code, time.monotonic() + GRACE_S
        elif time.monotonic() > deadline:
            for late in children:
                os.kill(late, signal.SIGKILL)
            deadline = float("inf")
        else:
            time.sleep(0.01)
    return first


def run_rank(job: dict[str, Any], rank: int) -> None:
    """All ranks make the same torch models, unless the test seeds them differently."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    module = load(pathlib.Path(job["file"]))
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    function = getattr(module, job["function"])
    result = getattr(function, "on_rank", function)(*job["arguments"])
    pathlib.Path(job["folder"], f"{rank}.json").write_text(json.dumps(result))


def run_job(job: dict[str, Any]) -> None:
    """Returns only on a rank; the leader exits."""
    prepare_leader(job)
    children: set[int] = set()
    for rank in range(job["size"]):
        child = fork()
        if child == 0:
            return run_rank(job, rank)
        children.add(child)
    status = lead(children)
    pathlib.Path(job["folder"], "status").write_text(str(status))
    os._exit(0)


def serve() -> None:
    """Returns on a rank, and when there are no more jobs."""
    gc.freeze()  # otherwise a rank's garbage collection would copy all memory
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the leaders are not waited for
    for line in sys.stdin:
        leader = fork()
        if leader == 0:
            return run_job(json.loads(line))
        with contextlib.suppress(OSError):  # it leads its group already, or has ended
            os.setpgid(leader, leader)
        print(leader, flush=True)


def serve_and_exit() -> NoReturn:
    """Called in a fork of pytest, in which nothing else may run."""
    importlib.import_module("torch._dynamo")  # otherwise an optimizer's first step would import it
    faulthandler.disable()  # it writes to pytest's output
    sys.stdin = open(0, closefd=False)
    sys.stdout, sys.stderr = (open(n, "w", buffering=1, closefd=False) for n in (1, 2))
    code = 0
    try:
        serve()
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    load(pathlib.Path(sys.argv[1]))
    serve()
