"""Runs a command within a time limit, its whole output into a log, and ends all it started."""

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
# A process that waits for a broken GPU cannot be killed; it is left behind after this.
KILL_LIMIT_S = 10.0
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """A signal that asks this process to end. No Exception, so that nobody takes it for a failure."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number
        self.name = signal.Signals(number).name


def _interrupt(number: int, _frame: Any) -> None:
    for other in ENDING_SIGNALS:  # the report is being written: once is enough
        signal.signal(other, signal.SIG_IGN)
    raise Interrupted(number)


def raise_on_signals() -> None:
    """Signals that end a process become `Interrupted`, but for those that nohup has turned off."""
    for number in ENDING_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)


def adopt_orphans() -> None:
    """What a child leaves behind becomes a child of this process, which can then end it."""
    if sys.platform == "linux":
        try:
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        except (OSError, AttributeError):
            pass  # process groups are killed anyway


def _descendants() -> List[int]:
    """The processes below this one that have not ended, from /proc."""
    children: Dict[int, List[int]] = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            stat = pathlib.Path(entry.path, "stat").read_text(errors="replace")
        except OSError:
            continue  # it has gone
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
    """Kills all that this process has started and what that has started, in whatever session."""
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
    """How a command ended. `status` is None when it ran out of time."""

    status: Optional[int]
    output: str
    seconds: float
    limit_s: float

    def problem(self) -> str:
        """Why it is no success, or nothing."""
        if self.status is None:
            return f"no end within {self.limit_s:.0f} s"
        if self.status == 0:
            return ""
        ended = f"signal {-self.status}" if self.status < 0 else f"exit status {self.status}"
        lines = [line for line in self.output.splitlines() if line.strip()]
        return f"{ended}: {lines[-1].strip()}" if lines else ended

    def first_error(self) -> str:
        """What a compiler or linker complained of first; `problem()` where it did not, or succeeded."""
        if self.status in (None, 0):
            return self.problem()
        found = re.search(r"^.*(?:\berror:|\bfatal\b|undefined reference).*$", self.output, re.M)
        return found[0].strip() if found else self.problem()

    def skipped(self) -> str:
        """The reason that a program gave for exit status 77."""
        reasons = [line for line in self.output.splitlines() if "skipped: " in line]
        return reasons[0].split("skipped: ", 1)[1] if reasons else "it gave no reason"


def run(command: List[str], log: pathlib.Path, limit_s: float,
        environment: Optional[Dict[str, str]] = None) -> Ended:
    """Appends to `log`. Nothing that the command has started outlives this."""
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
            process.poll()  # so that it is not taken for one that still runs
    with log.open("rb") as file_again:
        file_again.seek(begin)
        output = file_again.read().decode("utf-8", errors="replace")
    return Ended(status, output, time.monotonic() - start, limit_s)
