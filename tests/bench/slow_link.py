#!/usr/bin/env python3
"""Measures the replica hops over slow links: a replica in each of two network namespaces.

The namespaces are joined by a veth pair whose ends are shaped by tc's token bucket filter, for which
it needs root and iproute2. Where that is not allowed, and with --sleeping, the replicas talk through
shared memory and sleep for as long as a link would have taken (sleeping_link.h). Every rate is one
run, in which the hops take turns. Prints a table: the time of a step with each hop, as ratios.

Usage: slow_link.py --build build/bench [--sleeping] [--rates 100 1000 ...] [--rounds N]
"""

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
from typing import Dict, Iterable, List, Optional

from programs import Report, TIMEOUT_S

ENDS = ("hsdp-a", "hsdp-b")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = 29577
LEAST_ROUNDS = 9  # they are short, and single ones differ by a tenth
HOPS = ("f32", "bf16", "plain4", "loco")


def ip(*arguments: str, check: bool = True) -> subprocess.CompletedProcess:
    return subprocess.run(["ip", *arguments], check=check, capture_output=True, text=True)


class ShapedLink:
    """Two namespaces and what joins them, while the block runs."""

    def __enter__(self) -> "ShapedLink":
        self.__exit__()  # what a run that was killed has left
        try:
            for end in ENDS:
                ip("netns", "add", end)
            ip("link", "add", "veth-a", "netns", ENDS[0], "type", "veth", "peer", "name", "veth-b", "netns",
               ENDS[1])
            for end, device, address in zip(ENDS, ("veth-a", "veth-b"), ADDRESSES):
                ip("-n", end, "address", "add", f"{address}/24", "dev", device)
                ip("-n", end, "link", "set", "lo", "up")
                ip("-n", end, "link", "set", device, "up")
        except subprocess.CalledProcessError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for end in ENDS:
            ip("netns", "del", end, check=False)

    def shape(self, mbit: int) -> None:
        """Both directions; 0: not at all."""
        for end, device in zip(ENDS, ("veth-a", "veth-b")):
            tc = ["tc", "-n", end, "qdisc"]
            subprocess.run([*tc, "del", "dev", device, "root"], check=False, capture_output=True)
            if mbit:
                # Enough for a millisecond, and for one packet as the kernel cuts them.
                burst = max(mbit * 1000 // 8, 128 * 1024)
                subprocess.run([*tc, "add", "dev", device, "root", "tbf", "rate", f"{mbit}mbit", "burst",
                                str(burst), "latency", "50ms"], check=True, capture_output=True, text=True)

    def start(self, rank: int, command: List[str]) -> subprocess.Popen:
        return start(rank, ["ip", "netns", "exec", ENDS[rank], *command],
                     {"HSDP_ADDR": ADDRESSES[0], "HSDP_PORT": str(PORT), "HSDP_SECRET": "slow link",
                      "HSDP_TRANSPORT": "tcp"})


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

    def start(self, rank: int, command: List[str]) -> subprocess.Popen:
        return start(rank, [*command, f"--sleeping-mbit={self._mbit}"],
                     {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"})


def start(rank: int, command: List[str], variables: Dict[str, str]) -> subprocess.Popen:
    environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2",
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

    def measure(self, rounds: int, rates: Iterable[int] = (1000,)) -> Report:
        """Values: slow_link_<Mbit/s>_<hop>_ms, and slow_link_sleeps as 0 or 1."""
        self._link = self._link or choose_link()
        report = Report()
        report.values["slow_link_sleeps"] = float(isinstance(self._link, SleepingLink))
        with self._link as link:
            for mbit in rates:
                link.shape(mbit)
                for hop, milliseconds in self._run(link, rounds, report).items():
                    report.values[f"slow_link_{mbit}_{hop}_ms"] = milliseconds
                if report.error:
                    break
        return report

    def _run(self, link: "ShapedLink | SleepingLink", rounds: int, report: Report) -> Dict[str, float]:
        ranks: List[subprocess.Popen] = []
        command = [str(self._program), f"--rounds={max(rounds, LEAST_ROUNDS)}"]
        try:
            for rank in range(2):
                ranks.append(link.start(rank, command))
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
        lines = [line.split() for line in outputs[0].splitlines() if line.startswith("hop ")]
        return {line[1]: float(line[3]) for line in lines}


def row(mbit: int, values: Dict[str, float]) -> str:
    f32, bf16, plain4, loco = (values[f"slow_link_{mbit}_{hop}_ms"] for hop in HOPS)
    return (f"| {f'{mbit} Mbit/s' if mbit else 'unshaped'} | {f32:.0f} | {bf16:.0f} | {plain4:.0f} | "
            f"{loco:.0f} | {f32 / loco:.2f} | {bf16 / loco:.2f} | {loco / plain4:.2f} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--build", type=pathlib.Path, required=True, help="the build folder")
    parser.add_argument("--rates", type=int, nargs="*", help="in Mbit/s; 0: unshaped",
                        default=[100, 300, 1000, 2500, 5000, 10000, 0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sleeping", action="store_true", help="without network namespaces")
    asked = parser.parse_args()
    slow_link = SlowLink(asked.build, asked.sleeping)
    reason = slow_link.missing()
    if reason:
        print(f"slow_link: {reason}", file=sys.stderr)
        return 1
    print("| link | f32, ms | bf16, ms | plain 4 bit, ms | LoCo, ms | f32 / LoCo | bf16 / LoCo | LoCo / plain |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for mbit in asked.rates:
        report = slow_link.measure(asked.rounds, [mbit])
        if report.error:
            print(f"slow_link: {report.error}", file=sys.stderr)
            return 1
        print(row(mbit, report.values), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
