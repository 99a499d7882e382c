#!/usr/bin/env python3
"""Measures replica hops and windows over slow links: each rank in a network namespace of its own.

If namespaces are not allowed (shaped_link.py), or with --sleeping, the ranks communicate through shared
memory and sleep for as long as a link would have taken (sleeping_link.h). The variants of a run take
turns. Prints tables of times and ratios for a step with each hop, and for a step of four backward passes
that are reduced one by one or as a window.

Usage: slow_link.py --build build/bench [--sleeping] [--rates 100 ...] [--rounds N] [--runs hops ...]
"""

import argparse
import dataclasses
import pathlib
import subprocess
import sys
from typing import Dict, Iterable, List, Optional, Tuple

from programs import Report, markdown_table
from shaped_link import ShapedLink, run_ranks, start, why_not_shaped

LEAST_ROUNDS = 9  # rounds are short, and single ones differ by a tenth
BACKWARD_MS = 50


@dataclasses.dataclass(frozen=True)
class Run:
    """One start of ours_hop on `ranks` ranks, and the names of its steps in values and tables."""

    ranks: int
    flags: Tuple[str, ...]
    prefix: str
    title: str
    columns: Tuple[str, ...]
    ratios: Tuple[Tuple[str, str], ...]


WINDOWS = dict(columns=("each", "window", "declared"),
               ratios=(("each", "window"), ("each", "declared")))
RUNS = {
    "hops": Run(2, (), "", "2x1, one backward pass", ("f32", "bf16", "plain4", "loco"),
                (("f32", "loco"), ("bf16", "loco"), ("loco", "plain4"))),
    "1x2": Run(2, ("--shard=2",), "1x2_", "1x2, four backward passes of no time", **WINDOWS),
    "2x2": Run(4, ("--shard=2",), "2x2_", "2x2, four backward passes of no time", **WINDOWS),
    "busy": Run(2, ("--shard=2", f"--backward-ms={BACKWARD_MS}"), "busy_",
                f"1x2, four backward passes of {BACKWARD_MS} ms", **WINDOWS),
}


class SleepingLink:
    """Has the interface of ShapedLink; ours_hop simulates the link inside its processes."""

    def __init__(self) -> None:
        self._mbit = 0

    def __enter__(self) -> "SleepingLink":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def shape(self, mbit: int) -> None:
        """Limits the rate in both directions; 0 removes the limit."""
        self._mbit = mbit

    def start(self, rank: int, ranks: int, command: List[str]) -> subprocess.Popen:
        return start(rank, ranks, [*command, f"--sleeping-mbit={self._mbit}"],
                     {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)})


def choose_link() -> "ShapedLink | SleepingLink":
    reason = why_not_shaped()
    if not reason:
        return ShapedLink()
    print(f"slow_link: the link sleeps, as none can be shaped: {reason}", file=sys.stderr)
    return SleepingLink()


class SlowLink:
    """Runs ours_hop of a build folder over links of several rates."""

    def __init__(self, build: pathlib.Path, sleeping: bool = False):
        self._program = build.resolve() / "tests" / "bench" / "ours_hop"
        self._link = SleepingLink() if sleeping else None  # if None, the first measure() chooses

    def missing(self) -> Optional[str]:
        return None if self._program.is_file() else "ours_hop was not built"

    def measure(self, rounds: int, rates: Iterable[int] = (1000,),
                names: Iterable[str] = tuple(RUNS)) -> Report:
        """Reports slow_link_<Mbit/s>_<prefix><variant>_ms, and slow_link_sleeps as 0 or 1."""
        self._link = self._link or choose_link()
        report = Report()
        report.values["slow_link_sleeps"] = float(isinstance(self._link, SleepingLink))
        with self._link as link:
            for mbit in rates:
                link.shape(mbit)
                for run in map(RUNS.__getitem__, names):
                    for variant, milliseconds in self._run(link, run, rounds, report).items():
                        report.values[f"slow_link_{mbit}_{run.prefix}{variant}_ms"] = milliseconds
                    if report.error:
                        return report
        return report

    def _run(self, link: "ShapedLink | SleepingLink", run: Run, rounds: int,
             report: Report) -> Dict[str, float]:
        command = [str(self._program), f"--rounds={max(rounds, LEAST_ROUNDS)}", *run.flags]
        output, report.error = run_ranks(link, [command] * run.ranks)
        lines = [line.split() for line in output.splitlines() if line.startswith("step ")]
        return {line[1]: float(line[3]) for line in lines}


def table(run: Run, rates: List[int], values: Dict[str, float]) -> str:
    heads = ["link", *(f"{variant}, ms" for variant in run.columns),
             *(f"{one} / {other}" for one, other in run.ratios)]
    rows = []
    for mbit in rates:
        prefix = f"slow_link_{mbit}_{run.prefix}"
        time = {variant: values[f"{prefix}{variant}_ms"] for variant in run.columns}
        rows.append([f"{mbit} Mbit/s" if mbit else "unshaped",
                     *(f"{time[variant]:.0f}" for variant in run.columns),
                     *(f"{time[one] / time[other]:.2f}" for one, other in run.ratios)])
    return "\n".join([run.title, "", *markdown_table(heads, rows), ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--build", type=pathlib.Path, required=True, help="the build folder")
    parser.add_argument("--rates", type=int, nargs="*", help="in Mbit/s; 0: unshaped",
                        default=[100, 300, 1000, 2500, 5000, 10000, 0])
    parser.add_argument("--rounds", type=int, default=LEAST_ROUNDS)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--sleeping", action="store_true", help="without network namespaces")
    asked = parser.parse_args()
    slow_link = SlowLink(asked.build, asked.sleeping)
    reason = slow_link.missing()
    if reason:
        print(f"slow_link: {reason}", file=sys.stderr)
        return 1
    report = slow_link.measure(asked.rounds, asked.rates, asked.runs)
    if report.error:
        print(f"slow_link: {report.error}", file=sys.stderr)
        return 1
    for name in asked.runs:
        print(table(RUNS[name], asked.rates, report.values))
    return 0


if __name__ == "__main__":
    sys.exit(main())
