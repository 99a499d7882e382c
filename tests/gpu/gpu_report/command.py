"""Runs a command within a time limit, logs its whole output, and ends all processes that it started."""

import ctypes
import dataclasses
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from typing import Any, Dict, List, Optional

SKIPPED = 77
PR_SET_CHILD_SUBREAPER = 36
# After this time a process that cannot be killed, because it waits for a broken GPU, is left behind.
KILL_LIMIT_S = 10.0
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """A signal that asks this process to end. Not an Exception, so that no handler takes it for a failure."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number
        self.name = signal.Signals(number).name


def _interrupt(number: int, _frame: Any) -> None:
    for other in ENDING_SIGNALS:  # a second signal must not interrupt the writing of the report
        signal.signal(other, signal.SIG_IGN)
    raise Interrupted(number)


def raise_on_signals() -> None:
    """Makes the signals that end a process raise `Interrupted`, except those that nohup has turned off."""
    for number in ENDING_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)


def adopt_orphans() -> None:
    """Makes this process the parent of orphaned descendants, so that it can end them."""
    if sys.platform == "linux":
        try:
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        except (OSError, AttributeError):
            pass  # the process groups are killed in any case


def _descendants() -> List[int]:
    """Finds the descendants of this process that have not ended, in /proc."""
    children: Dict[int, List[int]] = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            stat = pathlib.Path(entry.path, "stat").read_text(errors="replace")
        except OSError:
            continue  # the process has ended
        state, parent = stat.rpartition(")")[2].split()[:2]
        if state != "Z":
            children.setdefault(int(parent), []).append(int(entry.name))
    found: List[int] = []
    todo = [os.getpid()]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def end_descendants() -> None:
    """Kills all descendants of this process, in whatever session they are."""
    end = time.monotonic() + KILL_LIMIT_S
    while time.monotonic() < end:
        living = _descendants() if os.path.isdir("/proc/self") else []
        for pid in living:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
        _reap()
        if not living:
            return
        time.sleep(0.02)


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0] != 0:
            pass
    except ChildProcessError:
        pass


@dataclasses.dataclass
class Ended:
    """How a command ended. `status` is None if it ran out of time."""

    status: Optional[int]
    output: str
    seconds: float
    limit_s: float

    def problem(self) -> str:
        """Returns why the command failed, or nothing."""
        if self.status is None:
            return f"no end within {self.limit_s:.0f} s"
        if self.status == 0:
            return ""
        ended = f"signal {-self.status}" if self.status < 0 else f"exit status {self.status}"
        lines = [line for line in self.output.splitlines() if line.strip()]
        return f"{ended}: {lines[-1].strip()}" if lines else ended

    def first_error(self) -> str:
        """Returns the first error of a compiler or linker; `problem()` if there is none or the command succeeded."""
        if self.status in (None, 0):
            return self.problem()
        found = re.search(r"^.*(?:\berror:|\bfatal\b|undefined reference).*$", self.output, re.M)
        return found[0].strip() if found else self.problem()

    def skipped(self) -> str:
        """Returns the reason that a program gave for exit status 77."""
        reasons = [line for line in self.output.splitlines() if "skipped: " in line]
        return reasons[0].split("skipped: ", 1)[1] if reasons else "it gave no reason"


def run(command: List[str], log: pathlib.Path, limit_s: float,
        environment: Optional[Dict[str, str]] = None) -> Ended:
    """Runs the command and appends its output to `log`. Leaves no process of the command behind."""
    start = time.monotonic()
    with log.open("a+", encoding="utf-8", errors="replace") as file:
        file.write(f"$ {' '.join(command)}\n")
        file.flush()
        begin = log.stat().st_size
        status: Optional[int] = None
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})}, start_new_session=True,
            )
        except OSError as error:
            file.write(f"{error}\n")
            return Ended(127, str(error), 0.0, limit_s)
        try:
            status = process.wait(timeout=max(limit_s, 0.0))
        except subprocess.TimeoutExpired:
            pass
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
            end_descendants()
            process.poll()  # so that Python does not take it for one that still runs
    with log.open("rb") as file_again:
        file_again.seek(begin)
        output = file_again.read().decode("utf-8", errors="replace")
    return Ended(status, output, time.monotonic() - start, limit_s)
