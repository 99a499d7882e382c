"""Times hsdp_check against h5diff and against reading the same bytes."""

import os
import pathlib
import shutil
import subprocess
import tempfile
import time
from typing import Dict, List, Optional

from programs import Report, tool

MOST_ROUNDS = 3  # h5diff is slow


class Snapshots:
    """Two snapshots of 1 GiB in a folder that the `with` block of this object removes."""

    def __init__(self, build: pathlib.Path):
        self._build = build
        self._program = build / "tests" / "bench" / "ours_snapshot"
        self._hsdp_check = tool(build, "hsdp_check")

    def missing(self) -> Optional[str]:
        if not self._program.is_file():
            return "ours_snapshot was not built"
        if not self._hsdp_check.is_file():
            return "hsdp_check was not built"
        if shutil.disk_usage(self._build).free < 5 << 30:
            return "the build folder has less than 5 GiB of free disk"
        return None

    def measure(self, rounds: int) -> Report:
        report = Report()
        with tempfile.TemporaryDirectory(prefix="snapshots-", dir=self._build) as folder:
            done = subprocess.run([str(self._program), folder], capture_output=True, text=True,
                                  stdin=subprocess.DEVNULL, check=False)
            if done.returncode != 0:
                report.error = f"ours_snapshot: status {done.returncode}: {done.stderr.strip()}"
                return report
            for line in done.stdout.splitlines():
                _, name, number = line.split()
                report.values[name] = float(number)
            self._compare(folder, min(rounds, MOST_ROUNDS), report)
        return report

    def _compare(self, folder: str, rounds: int, report: Report) -> None:
        pair = [os.path.join(folder, name) for name in ("a.h5", "b.h5")]
        commands = {"hsdp_check": [str(self._hsdp_check), *pair], "read": ["cat", *pair]}
        if shutil.which("h5diff"):
            commands["h5diff"] = ["h5diff", *pair]
        times: Dict[str, List[float]] = {name: [] for name in commands}
        peak_bytes = 0
        for _ in range(rounds):
            for name, command in commands.items():
                seconds, status, peak = timed(command)
                times[name].append(seconds)
                # hsdp_check accepts rounding noise; h5diff reports it as a difference.
                if status != (1 if name == "h5diff" else 0):
                    report.error = f"snapshots: {name}: status {status}"
                if name == "hsdp_check":
                    peak_bytes = max(peak_bytes, peak)
        for name, seconds in times.items():
            report.values[f"snapshot_{name}_s"] = sorted(seconds)[len(seconds) // 2]
        report.values["hsdp_check_peak_bytes"] = float(peak_bytes)


def timed(command: List[str]) -> "tuple[float, int, int]":
    """Returns seconds, exit status and peak memory in bytes."""
    start = time.monotonic()
    with open(os.devnull, "wb") as nowhere:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=nowhere,
                                   stderr=nowhere)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return time.monotonic() - start, process.returncode, usage.ru_maxrss * 1024
