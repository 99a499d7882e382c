"""Ctrl-C in a wait, and other signals: who gets which exception, and that no rank hangs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import Launcher, on_mesh
from one_rank import add_gradient, registered

import hsdp

WITHIN_S = 5.0  # a second on an idle machine


def one_step(reducer: hsdp.Reducer, rank: int) -> None:
    add_gradient(reducer, "w", np.full(8, rank, np.float32), last=True)


WAITS: dict[str, Callable[[hsdp.Mesh, hsdp.Reducer], Any]] = {
    "all_reduce": lambda mesh, reducer: mesh.world.all_reduce(np.ones(1000, np.float32)),
    "shard": lambda mesh, reducer: reducer.shard("w"),
    "grad_norm": lambda mesh, reducer: reducer.grad_norm(),
    "finish": lambda mesh, reducer: (reducer.finish(), reducer.shard("w")),
}


def interrupted(wait: str) -> str:
    """Rank 0 waits for rank 1, which never comes, until it is interrupted."""
    mesh = hsdp.init_mesh(1, 2, timeout_s=60)
    reducer = registered(mesh, "w", 8)
    one_step(reducer, mesh.rank)
    reducer.shard("w")
    if wait == "finish":
        add_gradient(reducer, "w", np.ones(8, np.float32), last=False)
    if mesh.rank == 1:
        try:
            return wait_for_end(mesh)
        finally:
            mesh.close()
    if wait in ("shard", "grad_norm"):
        one_step(reducer, mesh.rank)
    timer = threading.Timer(0.4, os.kill, [os.getpid(), signal.SIGINT])
    timer.start()
    start = time.monotonic()
    try:
        WAITS[wait](mesh, reducer)
    except KeyboardInterrupt:
        assert time.monotonic() - start < WITHIN_S
        return after_interrupt(mesh, reducer)
    return "was not interrupted"


def wait_for_end(mesh: hsdp.Mesh) -> str:
    try:
        while True:
            mesh.shard_group._handle.exchange("still there", "test")  # rank 0 never answers
    except hsdp.Error as error:
        return f"{type(error).__name__} {list(error.ranks)} {error}"


def after_interrupt(mesh: hsdp.Mesh, reducer: hsdp.Reducer) -> str:
    with pytest.raises(hsdp.Error, match="interrupted"):
        mesh.world.barrier()
    with pytest.raises(hsdp.Error, match="interrupted"):
        one_step(reducer, 0)
        reducer.shard("w")
    with contextlib.suppress(hsdp.Error):
        reducer.close()
    mesh.close()
    return "KeyboardInterrupt"


def interrupted_in_each() -> dict[str, str]:
    found = {}
    for wait in WAITS:
        print(wait, flush=True)
        found[wait] = interrupted(wait)
    return found


def test_ctrl_c_in_a_wait_ends_it_on_every_rank(ranks: Launcher) -> None:
    own, other = ranks(2, interrupted_in_each)
    assert own == dict.fromkeys(WAITS, "KeyboardInterrupt")
    for wait, heard in other.items():
        assert heard.startswith("Error [0] ") and "rank 0" in heard and "interrupted" in heard, wait


@on_mesh(1, 2, timeout_s=60)
def test_ctrl_c_in_user_code_drops_the_step(mesh: hsdp.Mesh) -> None:
    """The mesh stays usable, too."""
    reducer = registered(mesh, "w", 8)
    with pytest.raises((KeyboardInterrupt, hsdp.StepAbortedError)[mesh.rank]) as caught:
        with reducer.microbatch(last=True):
            reducer.gradient_ready("w", np.ones(8, np.float32))
            if mesh.rank == 0:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(60)
        reducer.shard("w")
    assert getattr(caught.value, "ranks", (0,)) == (0,)
    one_step(reducer, mesh.rank)
    assert reducer.shard("w")[0] == 0.5
    reducer.close()


def handlers_run() -> list[str]:
    """A handler that does not raise runs during the wait, which then continues. It may not call hsdp
    again."""
    heard: list[str] = []
    with hsdp.init_mesh(1, 2, timeout_s=60) as mesh:
        reducer = registered(mesh, "w", 8)
        add_gradient(reducer, "w", np.ones(8, np.float32), last=False)
        if mesh.rank == 0:
            came = threading.Event()

            def handler(*_: Any) -> None:
                try:
                    reducer.finish()
                except hsdp.UsageError as error:
                    heard.append(str(error))
                came.set()
                mesh.rank  # calls that do not wait are allowed

            signal.signal(signal.SIGUSR1, handler)
            threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGUSR1]).start()
            # Rank 1 answers only when the handler has run, so the wait spans it.
            threading.Thread(target=lambda: (came.wait(30), tell())).start()
        else:
            listen()
        reducer.finish()
        assert reducer.shard("w")[0] == 1
        reducer.close()
    return heard


def tell() -> None:
    with open(os.environ["HSDP_TEST_PIPE"], "w") as pipe:
        pipe.write("go")


def listen() -> None:
    with open(os.environ["HSDP_TEST_PIPE"]) as pipe:
        assert pipe.read() == "go"


def test_handlers_run_during_a_wait(ranks: Launcher) -> None:
    pipe = ranks.folder / "pipe"
    os.mkfifo(pipe)
    heard, _ = ranks.start(2, handlers_run, HSDP_TEST_PIPE=str(pipe)).wait()
    assert len(heard) == 1 and "one call at a time" in heard[0]


def faulty_local_microbatch() -> float:
    with hsdp.init_mesh(1, 2, timeout_s=60) as mesh:
        reducer = registered(mesh, "w", (4,), np.float32)
        reducer.begin_microbatch(sync="shard")
        reducer.gradient_ready("w", np.ones(4, np.float32))
        if mesh.rank == 1:
            listen()
            with pytest.raises(hsdp.Error, match="rank 0"):
                reducer.end_microbatch()
                reducer.finish()
            return 0.0
        reducer.end_microbatch()
        reducer.begin_microbatch(sync="none")
        threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT]).start()
        late = threading.Timer(10, tell)
        late.start()
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            reducer.end_microbatch()  # no gradient came, so the step is dropped
        took_s = time.monotonic() - start
        late.cancel()
        if took_s < WITHIN_S:
            tell()
        return took_s


# The drop waits until the ranks agree on the previous microbatch.
def test_ctrl_c_at_the_faulty_end_of_a_local_microbatch(ranks: Launcher) -> None:
    pipe = ranks.folder / "pipe"
    os.mkfifo(pipe)
    took_s, _ = ranks.start(2, faulty_local_microbatch, HSDP_TEST_PIPE=str(pipe)).wait()
    assert took_s < WITHIN_S


ALONE = """
import os, signal, threading, hsdp
threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT]).start()
try:
    hsdp.init_mesh(1, 2, timeout_s=60)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_ctrl_c_while_ranks_gather() -> None:
    env = {**os.environ, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    env["HSDP_JOB"] = f"interrupt-{os.getpid()}"
    done = subprocess.run(
        [sys.executable, "-c", ALONE], env=env, capture_output=True, text=True, timeout=30
    )
    assert done.stdout == "interrupted\n" and done.returncode == 0, done.stderr
