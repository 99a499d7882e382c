"""Runs a command within a time limit, its whole output into a log, and ends all it started."""

import dataclasses
import os
import pathlib
import signal
import subprocess
import time
from typing import Dict, List, Optional

SKIPPED = 77


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

    def skipped(self) -> str:
        """The reason that a program gave for exit status 77."""
        reasons = [line for line in self.output.splitlines() if "skipped: " in line]
        return reasons[0].split("skipped: ", 1)[1] if reasons else "it gave no reason"


def run(command: List[str], log: pathlib.Path, limit_s: float,
        environment: Optional[Dict[str, str]] = None) -> Ended:
    """Appends to `log`. The command's process group is killed in the end."""
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
            except ProcessLookupError:
                pass
            process.wait()
    with log.open("rb") as file_again:
        file_again.seek(begin)
        output = file_again.read().decode("utf-8", errors="replace")
    return Ended(status, output, time.monotonic() - start, limit_s)
