#!/usr/bin/env python3
"""Runs torch_stage3.py: sliced parameters beside FSDP2, in shared memory and over a slow link.

Four ranks in shared memory; over the link two, each pinned to a core and in a network namespace of its
own (shaped_link.py). Prints the tables of docs/benchmarks.md.

Usage: stage3.py --build build/bench [--rounds N]
"""

import pathlib
import subprocess
import sys
from typing import Dict, List, Optional

from programs import PythonPackage, Report, TIMEOUT_S, parse, run_part
from shaped_link import ShapedLink, pinned, run_ranks, why_not_shaped

MBIT = 1000
RANKS, RANKS_ON_LINK = 4, 2
LEAST_ROUNDS = 9
MESHES = {"1x4": 1, "2x2": 2}  # and the number of replicas
OVER_LINK = {
    "coalesce": ["--layers=6", "--width=1024", "--rows=8"],
    "prefetch": ["--layers=12", "--width=1024", "--rows=4096"],  # twice as long as the gathers
}
SYSTEMS = {f"{system}{way}": name + words
           for system, name in (("ours", "hsdp"), ("fsdp2", "FSDP2"))
           for way, words in (("", ""), ("_kept", ", kept"), ("_until_step", ", until the step"))}
AHEAD = {"ours": "hsdp", "ours_not_ahead": "hsdp, prefetch_bytes=0", "fsdp2": "FSDP2",
         "fsdp2_ahead": "FSDP2, set_modules_to_*_prefetch"}


class Stage3:
    """The package of a build folder, and torch's FSDP2 over gloo."""

    def __init__(self, build: pathlib.Path):
        self._package = PythonPackage(build)
        self._hsdp_run = build / "hsdp" / "tools" / "hsdp_run"

    def missing(self) -> Optional[str]:
        reason = why_not_shaped()
        return f"no link can be shaped: {reason}" if reason else self._package.missing()

    def measure(self, rounds: int) -> Report:
        """Values as torch_stage3.py prints them."""
        asked = f"--rounds={max(rounds, LEAST_ROUNDS)}"
        report = Report()
        for replicas in MESHES.values():
            program = self._package.command("torch_stage3.py", {})
            command = [str(self._hsdp_run), "-n", str(RANKS), *program, asked,
                       f"--replicate={replicas}"]
            try:
                done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                      stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_S,
                                      check=False)
            except subprocess.TimeoutExpired:
                report.error = f"torch_stage3: no end within {TIMEOUT_S} s"
                return report
            self._add(report, done.stdout, done.returncode and done.stdout.strip()[-800:])
        program = self._package.command("torch_stage3.py", {"GLOO_SOCKET_IFNAME": "uplink"})
        with ShapedLink() as link:
            link.shape(MBIT)
            for part, sizes in OVER_LINK.items():
                command = [*program, asked, f"--part={part}", *sizes]
                self._add(report, *run_ranks(link, pinned(command, RANKS_ON_LINK)))
        return report

    @staticmethod
    def _add(report: Report, output: str, error: Optional[str]) -> None:
        report.values.update(parse(output, "torch").values)
        if error:
            report.error = f"torch_stage3: {error}"


def table(heads: List[str], rows: List[List[str]]) -> List[str]:
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]


def tables(values: Dict[str, float]) -> str:
    def value(mesh: str, name: str) -> float:
        return values[f"torch_stage3_{mesh}_{name}"]

    steps = [[mesh + title, f"{value(mesh, f'ours_{way}_added_ms'):.0f}",
              f"{value(mesh, f'fsdp2_{way}_added_ms'):.0f}", f"{value(mesh, f'{way}_ratio'):.1f}"]
             for mesh in MESHES for way, title in (("resharded", ""), ("kept", ", kept"))]
    once = [[title, f"{value('1x2', f'{system}_each_ms'):.0f}",
             f"{value('1x2', f'{system}_once_ms'):.0f}",
             f"{value('1x2', f'{system}_once_ratio'):.2f}"] for system, title in SYSTEMS.items()]
    ahead = [[title, f"{value('1x2', 'alone_ms'):.0f}", f"{value('1x2', f'{system}_passes_ms'):.0f}",
              f"{value('1x2', f'{system}_gathers_ms'):.0f}",
              f"{value('1x2', f'{system}_hidden'):.0%}"] for system, title in AHEAD.items()]
    return "\n".join([
        *table(["added to a step, ms", "hsdp", "FSDP2", "ratio"], steps),
        *table(["four passes, ms", "each reduced", "reduced once", "ratio"], once),
        *table(["passes, ms", "without gathers", "with them", "gathers alone", "hidden"], ahead)])


if __name__ == "__main__":
    sys.exit(run_part(Stage3, tables, LEAST_ROUNDS))
