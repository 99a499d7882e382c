"""A network in which every rank has its own slow link, made of namespaces, a bridge and tc's token bucket
filter. Needs root and iproute2."""

import os
import pathlib
import shutil
import subprocess
from typing import Dict, List, Optional, Tuple

from programs import TIMEOUT_S, PythonPackage, Report, parse

HUB = "hsdp-hub"
ENDS = ("hsdp-a", "hsdp-b", "hsdp-c", "hsdp-d")
PORT = 29577
MBIT_OF_TORCH, RANKS_OF_TORCH = 1000, 2


def ip(*arguments: str, check: bool = True) -> subprocess.CompletedProcess:
    return subprocess.run(["ip", *arguments], check=check, capture_output=True, text=True)


def shape_device(namespace: str, device: str, mbit: int) -> None:
    tc = ["tc", "-n", namespace, "qdisc"]
    subprocess.run([*tc, "del", "dev", device, "root"], check=False, capture_output=True)
    if mbit:
        # The burst lasts at least a millisecond and holds at least one packet of the kernel.
        burst = max(mbit * 1000 // 8, 128 * 1024)
        subprocess.run([*tc, "add", "dev", device, "root", "tbf", "rate", f"{mbit}mbit", "burst",
                        str(burst), "latency", "50ms"], check=True, capture_output=True, text=True)


class ShapedLink:
    """A namespace for each rank and the bridge that joins them; they exist inside a `with` block."""

    def __enter__(self) -> "ShapedLink":
        self.__exit__()  # removes what a killed run has left
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
        """Limits the rate in both directions; 0 removes the limit."""
        for end in ENDS:
            shape_device(end, "uplink", mbit)
            shape_device(HUB, end, mbit)

    def start(self, rank: int, ranks: int, command: List[str]) -> subprocess.Popen:
        return start(rank, ranks, ["ip", "netns", "exec", ENDS[rank], *command],
                     {"HSDP_ADDR": self._address(0), "HSDP_PORT": str(PORT),
                      "HSDP_SECRET": "slow link", "HSDP_TRANSPORT": "tcp"})


def pinned(command: List[str], ranks: int) -> List[List[str]]:
    """The command of each rank, pinned to a separate core while there are enough."""
    cores = sorted(os.sched_getaffinity(0))
    return [["taskset", "-c", str(core), *command] for core in (cores * ranks)[:ranks]]


def start(rank: int, ranks: int, command: List[str], variables: Dict[str, str]) -> subprocess.Popen:
    environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks),
                   "HSDP_JOB": f"slow link {os.getpid()}", **variables}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True)


def run_ranks(link, commands: List[List[str]]) -> Tuple[str, Optional[str]]:
    """Runs one command per rank over a shaped link. Returns rank 0's output, and what went wrong."""
    processes: List[subprocess.Popen] = []
    try:
        for rank, command in enumerate(commands):
            processes.append(link.start(rank, len(commands), command))
        outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    except subprocess.TimeoutExpired:
        return "", f"slow link: no end within {TIMEOUT_S} s"
    finally:
        for process in processes:
            process.kill()
    error = None
    for process, output in zip(processes, outputs):
        if process.returncode != 0:
            error = f"slow link: status {process.returncode}: {output.strip()[-800:]}"
    return outputs[0], error


def why_not_shaped() -> str:
    """Returns why links cannot be shaped here; empty if they can."""
    if not all(map(shutil.which, ("ip", "tc"))):
        return "ip and tc (iproute2) are not installed"
    try:
        with ShapedLink() as link:
            link.shape(1000)
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"
    return ""


class TorchOverLink:
    """Runs programs with torch over a shaped link. Only ours_hop can run over a sleeping link."""

    def __init__(self, build: pathlib.Path):
        self._build = build
        self._package = PythonPackage(build)

    def missing(self) -> Optional[str]:
        reason = why_not_shaped()
        return f"no link can be shaped: {reason}" if reason else self._package.missing()

    @staticmethod
    def run_over_link(report: Report, program: str, commands: List[List[str]]) -> None:
        """Runs each command as two pinned ranks, and adds the values that they print."""
        with ShapedLink() as link:
            link.shape(MBIT_OF_TORCH)
            for command in commands:
                output, error = run_ranks(link, pinned(command, RANKS_OF_TORCH))
                report.values.update(parse(output, "torch").values)
                report.error = f"{program}: {error}" if error else report.error
