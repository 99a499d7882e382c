"""The command line of the scripts in this folder that run as several ranks."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable

import ranks
from gpu_report import command
from gpu_report.checks import titles
from gpu_report.lines import FAILED, NOT_RUN, OK, Check


def run(
    description: str,
    mesh: str,
    expected: str,
    takes: Callable[[int], bool],
    work: Callable[[str, str], int],
) -> int:
    """Returns the exit status of `work(mesh, device)`, or of a signal that ended it.

    `mesh` is the default. `takes` says whether a number of ranks is accepted; `expected` names the accepted ones.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--mesh", default=mesh, help=f"REPLICATExSHARD, {expected}")
    asked = parser.parse_args()
    try:
        size = math.prod(ranks.mesh_of(asked.mesh))
    except ValueError as error:
        parser.error(f"--mesh: {error}")
    if not takes(size):
        parser.error(f"--mesh: expected {expected}, got {size}")
    if asked.device == "cuda" and ranks.gpu_count() == 0:
        parser.error("--device cuda: expected a GPU that torch can use, got none; use --device cpu")
    command.raise_on_signals()
    try:
        return work(asked.mesh, asked.device)
    except command.Interrupted as signal:
        command.end_descendants()
        print(f"ended by {signal.name}", flush=True)
        return 128 + signal.number


def main(
    description: str,
    mesh: str,
    expected: str,
    takes: Callable[[int], bool],
    script: str,
    run_check: Callable[[str, str, str], str],
    why_not: Callable[[str, str], str] = lambda name, device: "",
) -> int:
    """Runs a script's checks and prints their lines. `run_check(name, mesh, device)` returns what is wrong, or
    nothing; `why_not(name, device)` returns why a check cannot run on the device, or nothing."""

    def work(mesh: str, device: str) -> int:
        failed = False
        for title, name in titles(script, mesh).items():
            check, start = Check(title, NOT_RUN, why_not(name, device)), time.monotonic()
            if not check.detail:
                problem = run_check(name, mesh, device)
                check = Check(title, FAILED if problem else OK, problem, time.monotonic() - start)
            print(check.line(), flush=True)
            failed = failed or check.verdict == FAILED
        return 1 if failed else 0

    return run(description, mesh, expected, takes, work)
