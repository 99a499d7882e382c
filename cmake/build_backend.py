"""The build backend of `pip install .`: scikit-build-core's, with progress on the terminal.

pip keeps a build's output to itself unless it is given -v, and this one compiles for minutes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from scikit_build_core import build as scikit_build
from scikit_build_core.build import (  # noqa: F401
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

_NINJA_STEP = re.compile(rb"\[(\d+)/(\d+)\]")


def _tell(terminal: TextIO, text: str) -> None:
    with contextlib.suppress(OSError):  # a terminal that was closed stops no build
        terminal.write(f"\n  hsdp: {text} ")
        terminal.flush()


def _follow(output: int, forward: int, terminal: TextIO) -> None:
    """Hands the build's output on, and tells each tenth of the steps that Ninja counts."""
    told = 0
    with open(output, "rb") as lines, open(forward, "wb", buffering=0, closefd=False) as on:
        for line in lines:
            on.write(line)
            if step := _NINJA_STEP.match(line):
                done, total = int(step[1]), int(step[2])
                if done * 10 // total > told:
                    _tell(terminal, f"{done} of {total} compiled")
                told = done * 10 // total


@contextlib.contextmanager
def _progress() -> Iterator[None]:
    try:
        terminal = open("/dev/tty", "w", encoding="utf-8")
    except OSError:  # none: a log shows what pip says
        yield
        return
    with terminal:
        _tell(terminal, f"compiling on {len(os.sched_getaffinity(0))} cores; pip install -v . shows all")
        output, written = os.pipe()
        saved = os.dup(1)
        os.dup2(written, 1)
        os.close(written)
        follower = threading.Thread(target=_follow, args=(output, saved, terminal))
        follower.start()
        try:
            yield
        finally:
            os.dup2(saved, 1)  # the last writer's end: the follower comes to the end of its input
            follower.join()
            os.close(saved)


def _with_progress(build: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(build)
    def hook(*arguments: Any, **options: Any) -> str:
        with _progress():
            return build(*arguments, **options)

    return hook


build_editable = _with_progress(scikit_build.build_editable)
build_wheel = _with_progress(scikit_build.build_wheel)
