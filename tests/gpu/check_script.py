"""The command line of the scripts in this folder that run as several ranks."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable

import ranks
from gpu_report import command
from gpu_report.lines import FAILED, Check


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)


def require_device(parser: argparse.ArgumentParser, device: str) -> None:
    if device == "cuda" and ranks.gpu_count() == 0:
        parser.error("--device cuda: expected a GPU that torch can use, got none; use --device cpu")


def main(
    description: str,
    mesh: str,
    expected: str,
    takes: Callable[[int], bool],
    names: Iterable[str],
    run_check: Callable[[str, str, str], Check],
) -> int:
    """Runs the checks of those names, `run_check(name, mesh, device)`, and prints their lines.

    `mesh` is the default one; `takes` says whether that many ranks will do, which are `expected`.
    """
    parser = argparse.ArgumentParser(description=description)
    add_device(parser)
    parser.add_argument("--mesh", default=mesh, help=f"REPLICATExSHARD, {expected}")
    asked = parser.parse_args()
    try:
        size = math.prod(ranks.mesh_of(asked.mesh))
    except ValueError as error:
        parser.error(f"--mesh: {error}")
    if not takes(size):
        parser.error(f"--mesh: expected {expected}, got {size}")
    require_device(parser, asked.device)
    failed = False
    command.raise_on_signals()
    try:
        for name in names:
            check = run_check(name, asked.mesh, asked.device)
            print(check.line(), flush=True)
            failed = failed or check.verdict == FAILED
    except command.Interrupted as signal:  # the ranks have been ended
        print(f"ended by {signal.name}", flush=True)
        return 128 + signal.number
    return 1 if failed else 0
