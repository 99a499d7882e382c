#!/usr/bin/env python3
"""Measures replica hops and windows over slow links: each rank in a network namespace of its own.

Each namespace has a veth pair to a bridge, shaped in both directions by tc's token bucket filter,
for which it needs root and iproute2. Where that is not allowed, and with --sleeping, the ranks talk
through shared memory and sleep for as long as a link would have taken (sleeping_link.h). In a run,
its variants take turns. Prints tables of times and ratios: a step with each hop, and one of four
backward passes that are reduced one by one or as a window.

Usage: slow_link.py --build build/bench [--sleeping] [--rates 100 ...] [--rounds N] [--runs hops ...]
"""

import argparse
import dataclasses
import os
import pathlib
import shutil
import subprocess
import sys
from typing import Dict, Iterable, List, Optional, Tuple

from programs import Report, TIMEOUT_S

HUB = "hsdp-hub"
ENDS = ("hsdp-a", "hsdp-b", "hsdp-c", "hsdp-d")
PORT = 29577
LEAST_ROUNDS = 9  # they are short, and single ones differ by a tenth
BACKWARD_MS = 50


@dataclasses.dataclass(frozen=True)
class Run:
    """One start of ours_hop on so many ranks, and what its steps are named in values and tables."""

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


def ip(*arguments: str, check: bool = True) -> subprocess.CompletedProcess:
    return subprocess.run(["ip", *arguments], check=check, capture_output=True, text=True)


def shape_device(namespace: str, device: str, mbit: int) -> None:
    tc = ["tc", "-n", namespace, "qdisc"]
    subprocess.run([*tc, "del", "dev", device, "root"], check=False, capture_output=True)
    if mbit:
        # Enough for a millisecond, and for one packet as the kernel cuts them.
        burst = max(mbit * 1000 // 8, 128 * 1024)
        subprocess.run([*tc, "add", "dev", device, "root", "tbf", "rate", f"{mbit}mbit", "burst",
                        str(burst), "latency", "50ms"], check=True, capture_output=True, text=True)


class ShapedLink:
    """Namespaces, one for each rank, and the bridge that joins them, while the block runs."""

    def __enter__(self) -> "ShapedLink":
        self.__exit__()  # what a run that was killed has left
        try:
            ip("netns", "add", HUB)
            ip("-n", HUB, "link", "add", "bridge", "type", "bridge")
            ip("-n", HUB, "link", "set", "bridge", "up")
            for rank, end in enumerate(ENDS):
                ip("netns", "add", end)
                ip("link", "add", "uplink", "netns", end, "type", "veth",
                   "peer", "name", end, "netns", HUB)
                ip("-n", HUB, "link", "set", end, "master", "bridge", "up")
                ip("-n", end, "address", "add", f"{self._address(rank)}/24", "dev", "uplink")
                ip("-n", end, "link", "set", "lo", "up")
                ip("-n", end, "link", "set", "uplink", "up")
        except subprocess.CalledProcessError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for namespace in (*ENDS, HUB):
            ip("netns", "del", namespace, check=False)

    @staticmethod
    def _address(rank: int) -> str:
        return f"10.77.0.{rank + 1}"

    def shape(self, mbit: int) -> None:
        """Both directions; 0: not at all."""
        for end in ENDS:
            shape_device(end, "uplink", mbit)
            shape_device(HUB, end, mbit)

    def start(self, rank: int, ranks: int, command: List[str]) -> subprocess.Popen:
        return start(rank, ranks, ["ip", "netns", "exec", ENDS[rank], *command],
                     {"HSDP_ADDR": self._address(0), "HSDP_PORT": str(PORT),
                      "HSDP_SECRET": "slow link", "HSDP_TRANSPORT": "tcp"})


class SleepingLink:
    """The same interface, inside the processes."""

    def __init__(self) -> None:
        self._mbit = 0

    def __enter__(self) -> "SleepingLink":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def shape(self, mbit: int) -> None:
        """Both directions; 0: not at all."""
        self._mbit = mbit

    def start(self, rank: int, ranks: int, command: List[str]) -> subprocess.Popen:
        return start(rank, ranks, [*command, f"--sleeping-mbit={self._mbit}"],
                     {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)})


def start(rank: int, ranks: int, command: List[str], variables: Dict[str, str]) -> subprocess.Popen:
    environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks),
                   "HSDP_JOB": f"slow link {os.getpid()}", **variables}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True)


def why_not_shaped() -> str:
    """Empty where a shaped link can be had."""
    if not all(map(shutil.which, ("ip", "tc"))):
        return "ip and tc (iproute2) are not installed"
    try:
        with ShapedLink() as link:
            link.shape(1000)
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"
    return ""


def choose_link() -> "ShapedLink | SleepingLink":
    reason = why_not_shaped()
    if not reason:
        return ShapedLink()
    print(f"slow_link: the link sleeps, as none can be shaped: {reason}", file=sys.stderr)
    return SleepingLink()


class SlowLink:
    """ours_hop of a build folder, over links of several rates."""

    def __init__(self, build: pathlib.Path, sleeping: bool = False):
        self._program = build.resolve() / "tests" / "bench" / "ours_hop"
        self._link = SleepingLink() if sleeping else None  # else chosen by the first measure()

    def missing(self) -> Optional[str]:
        return None if self._program.is_file() else "ours_hop was not built"

    def measure(self, rounds: int, rates: Iterable[int] = (1000,),
                names: Iterable[str] = tuple(RUNS)) -> Report:
        """Values: slow_link_<Mbit/s>_<prefix><variant>_ms, and slow_link_sleeps as 0 or 1."""
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
        ranks: List[subprocess.Popen] = []
        command = [str(self._program), f"--rounds={max(rounds, LEAST_ROUNDS)}", *run.flags]
        try:
            for rank in range(run.ranks):
                ranks.append(link.start(rank, run.ranks, command))
            outputs = [rank.communicate(timeout=TIMEOUT_S)[0] for rank in ranks]
        except subprocess.TimeoutExpired:
            report.error = f"slow link: no end within {TIMEOUT_S} s"
            return {}
        finally:
            for rank in ranks:
                rank.kill()
        for rank, output in zip(ranks, outputs):
            if rank.returncode != 0:
                report.error = f"slow link: status {rank.returncode}: {output.strip()[-800:]}"
        lines = [line.split() for line in outputs[0].splitlines() if line.startswith("step ")]
        return {line[1]: float(line[3]) for line in lines}


def table(run: Run, rates: List[int], values: Dict[str, float]) -> str:
    heads = ["link", *(f"{variant}, ms" for variant in run.columns),
             *(f"{one} / {other}" for one, other in run.ratios)]
    lines = [run.title, "", f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for mbit in rates:
        prefix = f"slow_link_{mbit}_{run.prefix}"
        time = {variant: values[f"{prefix}{variant}_ms"] for variant in run.columns}
        cells = [f"{mbit} Mbit/s" if mbit else "unshaped",
                 *(f"{time[variant]:.0f}" for variant in run.columns),
                 *(f"{time[one] / time[other]:.2f}" for one, other in run.ratios)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


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
