"""What warm_python.py starts. `warm_start.py LISTENER PYTHON` is a server, which ends when its input ends.

`warm_start.py PYTHON FOLDER ARGUMENT...` is a program run by a server, or PYTHON itself. It hands over its
arguments, environment and standard streams, passes signals on, and ends as the server's fork does. If it is
killed, so is the fork.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import gc
import json
import os
import re
import runpy
import select
import signal
import socket
import sys
import types
from typing import Any, NoReturn

SERVER_COUNT = 2
REQUEST_BYTES = 1 << 17
PR_SET_PDEATHSIG = 1
WARM = ("torch", "transformers", "lightning", "accelerate")
IMPORTS_WARM = re.compile(rf"^\s*(?:import|from) .*\b(?:{'|'.join(WARM)})\b", re.MULTILINE)
PASSED_ON = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
RANKS = ("RANK", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK")


def source_of(arguments: list[str]) -> str:
    """The source of the program that Python is asked to run."""
    match arguments:
        case ["-u", *others]:
            return source_of(others)
        case ["-c", source, *_]:
            return source
        case ["-m", module, *_]:
            return f"import {module}"
        case [script, *_] if not script.startswith("-"):
            with contextlib.suppress(OSError), open(script, encoding="utf-8") as file:
                return file.read()
    return ""


# The program as its launcher sees it.


def start(python: str, folder: str, *arguments: str) -> NoReturn:
    if not IMPORTS_WARM.search(source_of([*arguments])):
        os.execv(python, [python, *arguments])
    rank = next((int(os.environ[name]) for name in RANKS if name in os.environ), 0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(f"{folder}/{rank % SERVER_COUNT}")
        for number in PASSED_ON:
            signal.signal(number, lambda number, _: server.send(str(number).encode()))
        # hsdp takes ranks of one parent for one job, and the fork's parent is another one.
        request = {"arguments": arguments, "folder": os.getcwd(),
                   "environment": {"HSDP_JOB": f"parent-{os.getppid()}", **os.environ}}
        socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
        status = int(server.recv(16) or 1)
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
        os.kill(os.getpid(), -status)
    os._exit(status)


# The server.


def serve(listener: socket.socket) -> dict[str, Any] | None:
    """Returns in each program's process, with the request; returns None at the end."""
    warm_up("import torch, torch._dynamo")  # an optimizer's first step would import the latter
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the leaders are not waited for
    inputs = [sys.stdin.fileno(), listener.fileno()]
    while inputs[0] not in select.select(inputs, [], [])[0]:
        client, _ = listener.accept()
        message, streams, _, _ = socket.recv_fds(client, REQUEST_BYTES, 3)
        request = json.loads(message)
        warm_up(source_of(request["arguments"]))
        gc.freeze()  # otherwise each fork's collections would copy the memory of all modules
        if fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            program = fork()
            if program == 0:
                client.close()
                become(request, streams)
                return dict(request)
            lead(program, client, streams)
        client.close()
        for stream in streams:
            os.close(stream)
    return None


def warm_up(source: str) -> None:
    """Runs the slow imports at the top of a program."""
    with contextlib.suppress(SyntaxError, ImportError):
        for line in ast.parse(source).body:
            names = [alias.name for alias in line.names] if isinstance(line, ast.Import) else []
            names += [str(line.module)] if isinstance(line, ast.ImportFrom) else []
            if any(name.split(".")[0] in WARM for name in names):
                exec(compile(ast.Module([line], []), "warm_start.py", "exec"), {})


def fork() -> int:
    """A child ends when its parent does."""
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    return child


def lead(program: int, client: socket.socket, streams: list[int]) -> NoReturn:
    """Passes signals on, and reports the end."""
    for stream in (*streams, 0, 1, 2):
        os.close(stream)
    end = os.pidfd_open(program)
    while end not in select.select([client.fileno(), end], [], [])[0]:
        number = client.recv(16)
        os.kill(program, int(number or signal.SIGKILL))
        if not number:
            break  # the client was killed
    _, status = os.waitpid(program, 0)
    with contextlib.suppress(OSError):
        client.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def become(request: dict[str, Any], streams: list[int]) -> None:
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
        os.close(stream)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ |= request["environment"]


def run(arguments: list[str]) -> None:
    """As Python itself does."""
    if arguments[0] == "-u" or os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    if arguments[0] == "-u":
        arguments = arguments[1:]
    if arguments[0] == "-m":
        sys.argv, sys.path[0] = arguments[1:], os.getcwd()
        sys.modules.pop(arguments[1], None)  # otherwise runpy warns
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    name = "<string>"
    if arguments[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *arguments[2:]], ""
    else:
        name = arguments[0]
        sys.argv, sys.path[0] = arguments, os.path.dirname(os.path.realpath(name))
        main.__file__ = os.path.abspath(name)
    exec(compile(source_of(arguments), name, "exec"), vars(main))


def main() -> None:
    if sys.argv[1].isdecimal():
        sys.executable = sys.argv[2]
        request = serve(socket.socket(fileno=int(sys.argv[1])))
        if request is not None:
            run(request["arguments"])
    else:
        start(*sys.argv[1:])


main()
