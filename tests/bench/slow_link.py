#!/usr/bin/env python3
"""Measures the replica hops over slow links: a replica in each of two network namespaces.

The namespaces are joined by a veth pair whose ends are shaped by tc's token bucket filter. Every rate
is one run, in which the hops take turns. Prints a table: the time of a step with each hop, as ratios.
Needs root, iproute2 and two cores.

Usage: slow_link.py --build build/bench [--rates 100 1000 ...] [--json FILE]      rates in Mbit/s, 0: unshaped
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys

ENDS = ("hsdp-a", "hsdp-b")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = 29577
HOPS = ("f32", "bf16", "plain4", "loco")


def ip(*arguments, check=True):
    subprocess.run(["ip", *arguments], check=check, capture_output=not check)


class Link:
    """Two namespaces and what joins them, while the block runs."""

    def __enter__(self):
        self.__exit__()
        for end in ENDS:
            ip("netns", "add", end)
        ip("link", "add", "veth-a", "netns", ENDS[0], "type", "veth", "peer", "name", "veth-b", "netns",
           ENDS[1])
        for end, device, address in zip(ENDS, ("veth-a", "veth-b"), ADDRESSES):
            ip("-n", end, "address", "add", f"{address}/24", "dev", device)
            ip("-n", end, "link", "set", "lo", "up")
            ip("-n", end, "link", "set", device, "up")
        return self

    def __exit__(self, *_):
        for end in ENDS:
            ip("netns", "del", end, check=False)

    def shape(self, mbit):
        """Both directions; 0: not at all."""
        for end, device in zip(ENDS, ("veth-a", "veth-b")):
            tc = ["tc", "-n", end, "qdisc"]
            subprocess.run([*tc, "del", "dev", device, "root"], check=False, capture_output=True)
            if mbit:
                # Enough for a millisecond, and for one packet as the kernel cuts them.
                burst = max(mbit * 1000 // 8, 128 * 1024)
                subprocess.run([*tc, "add", "dev", device, "root", "tbf", "rate", f"{mbit}mbit", "burst",
                                str(burst), "latency", "50ms"], check=True)


def run(program, arguments):
    """The lines of rank 0: hop -> (milliseconds, bytes)."""
    ranks = []
    for rank, end in enumerate(ENDS):
        environment = dict(os.environ, RANK=str(rank), WORLD_SIZE="2", HSDP_ADDR=ADDRESSES[0],
                           HSDP_PORT=str(PORT), HSDP_SECRET="slow link", HSDP_JOB="slow link",
                           HSDP_TRANSPORT="tcp")
        ranks.append(subprocess.Popen(["ip", "netns", "exec", end, program, *arguments], env=environment,
                                      stdout=subprocess.PIPE, text=True))
    outputs = []
    for rank in ranks:
        outputs.append(rank.communicate(timeout=900)[0])
        if rank.returncode:
            for other in ranks:
                other.kill()
            sys.exit("slow_link: a rank failed")
    found = {}
    for line in outputs[0].splitlines():
        word, *fields = line.split()
        if word == "hop":
            found[fields[0]] = (float(fields[2]), int(fields[3]))
    return found


def row(mbit, found):
    times = {hop: found[hop][0] for hop in HOPS}
    rate = f"{mbit} Mbit/s" if mbit else "unshaped"
    return (f"| {rate} | {times['f32']:.0f} | {times['bf16']:.0f} | {times['plain4']:.0f} | "
            f"{times['loco']:.0f} | {times['f32'] / times['loco']:.2f} | "
            f"{times['bf16'] / times['loco']:.2f} | {times['loco'] / times['plain4']:.2f} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--build", type=pathlib.Path, required=True)
    parser.add_argument("--rates", type=int, nargs="*", default=[100, 300, 1000, 2500, 5000, 10000, 0])
    parser.add_argument("--mebielements", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=pathlib.Path)
    asked = parser.parse_args()
    program = str((asked.build / "tests" / "bench" / "ours_hop").resolve())
    all_found = {}
    print("| link | f32, ms | bf16, ms | plain 4 bit, ms | LoCo, ms | f32 / LoCo | bf16 / LoCo | LoCo / plain |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    with Link() as link:
        for mbit in asked.rates:
            link.shape(mbit)
            found = run(program, [f"--mebielements={asked.mebielements}", f"--rounds={asked.rounds}"])
            all_found[mbit] = found
            print(row(mbit, found), flush=True)
    if asked.json:
        asked.json.write_text(json.dumps(all_found, indent=1))


if __name__ == "__main__":
    main()
