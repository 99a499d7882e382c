#!/usr/bin/env python3
"""Compares what the ranks of a run told NCCL, from the traces that tests/gpu/nccl_shim wrote.

Usage: nccl_trace.py FOLDER [--json FILE]
Prints each violation and each note, and finally a line such as
`trace: 2 ranks, 384 calls, 0 violations`. On every communicator all ranks must call the same collectives
in the same order, each send must have a receive, and memory must be registered on all ranks or on none.
NCCL hangs otherwise (enqueue.cc, "We require users registering buffers on both sides"). The findings of
the shim count, too.
Exit status: 0 no violation, 1 violations, 2 bad usage or no trace.
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
import sys
from typing import Any, Dict, Iterator, NamedTuple

Line = Dict[str, Any]

COLLECTIVES = {"all_gather", "all_reduce", "broadcast", "reduce_scatter", "ncclCommSplit"}
ENDS = {"ncclCommAbort", "ncclCommRevoke"}  # after these the ranks' calls need not match
TERMS = ("call", "bytes", "peer", "dtype", "operation")  # must be the same on all ranks


class Finding(NamedTuple):
    rule: str
    text: str


class Report:
    """Violations, and notes that are only worth knowing."""

    def __init__(self) -> None:
        self.violations: list[Finding] = []
        self.notes: list[Finding] = []

    def add(self, rule: str, text: str, counts: bool = True) -> None:
        (self.violations if counts else self.notes).append(Finding(rule, text))


class Communicator:
    """The calls of the communicator's ranks, each rank's in order."""

    def __init__(self, name: str, lines: list[Line]) -> None:
        self.name = name
        self.size: int = max(line["ranks"] for line in lines)
        self.was_ended = any(line["call"] in ENDS for line in lines)
        self.by_rank: dict[int, list[Line]] = collections.defaultdict(list)
        for line in sorted(lines, key=lambda line: line["sequence"]):
            self.by_rank[line["rank"]].append(line)

    def where(self, rank: int) -> str:
        """Names a rank of the communicator by its rank in the job."""
        lines = self.by_rank.get(rank)
        return f"rank {lines[0]['world_rank']}" if lines else f"its rank {rank}"

    def check(self, report: Report) -> None:
        self.check_presence(report)
        self.check_collectives(report)
        self.check_messages(report)

    def check_presence(self, report: Report) -> None:
        missing = sorted(set(range(self.size)) - set(self.by_rank))
        if missing:
            names = ", ".join(map(str, missing))
            report.add("match", f"communicator {self.name}: no calls of {names} of its {self.size} ranks",
                       counts=not self.was_ended)

    def check_collectives(self, report: Report) -> None:
        calls = {rank: [line for line in lines if line["call"] in COLLECTIVES]
                 for rank, lines in sorted(self.by_rank.items())}
        first, *others = calls
        for other in others:
            self.compare(report, first, calls[first], other, calls[other])

    def compare(self, report: Report, first: int, wanted: list[Line], other: int, got: list[Line]) -> None:
        """Compares two ranks' calls up to the first difference, which causes all later ones."""
        for number, (a, b) in enumerate(zip(wanted, got), 1):
            place = f"communicator {self.name}, collective {number}"
            if any(a[term] != b[term] for term in TERMS):
                report.add("match", f"{place}: {describe(a)} on {self.where(first)}, "
                                    f"{describe(b)} on {self.where(other)}")
                return
            for side in ("in", "out"):
                what = f"{place}, {describe(a)}: {'read' if side == 'in' else 'written'} memory"
                self.check_registration(report, what, first, a[side], other, b[side])
        if len(wanted) != len(got):
            report.add("match", f"communicator {self.name}: {len(wanted)} collectives on "
                                f"{self.where(first)}, {len(got)} on {self.where(other)}",
                       counts=not self.was_ended)

    def check_messages(self, report: Report) -> None:
        sent: dict[tuple[int, int], list[Line]] = collections.defaultdict(list)
        received: dict[tuple[int, int], list[Line]] = collections.defaultdict(list)
        for rank, lines in self.by_rank.items():
            for line in lines:
                if line["call"] == "send":
                    sent[rank, line["peer"]].append(line)
                elif line["call"] == "receive":
                    received[line["peer"], rank].append(line)
        for a, b in sorted(set(sent) | set(received)):
            sends, receives = sent[a, b], received[a, b]
            way = f"communicator {self.name}, from {self.where(a)} to {self.where(b)}"
            for number, (send, receive) in enumerate(zip(sends, receives), 1):
                if send["bytes"] != receive["bytes"]:
                    report.add("match", f"{way}, message {number}: {send['bytes']} bytes are sent, "
                                        f"{receive['bytes']} received")
                    break
                what = f"{way}, message {number} of {send['bytes']} bytes: memory"
                self.check_registration(report, what, a, send["in"], b, receive["out"])
            if len(sends) != len(receives):
                report.add("match", f"{way}: {len(sends)} sends, {len(receives)} receives",
                           counts=not self.was_ended)

    def check_registration(self, report: Report, what: str, first: int, one: bool | None, other: int,
                           another: bool | None) -> None:
        if one is None or another is None or one == another:  # None: the call has no memory
            return
        there, not_there = (first, other) if one else (other, first)
        report.add("registration",
                   f"{what} is registered on {self.where(there)} and not on {self.where(not_there)}")


def describe(line: Line) -> str:
    root = f" from its rank {line['peer']}" if line["peer"] is not None else ""
    kind = "".join(f", {term} {line[term]}" for term in ("dtype", "operation") if line[term] is not None)
    return f"{line['call']} of {line['bytes']} bytes{root}{kind}"


def read_lines(file: pathlib.Path) -> Iterator[Line]:
    """Reads the lines of a file. A killed process may have left the last one unfinished."""
    for text in file.read_text(encoding="utf-8").splitlines(keepends=True):
        if text.endswith("\n"):
            yield json.loads(text)


def read_folder(folder: pathlib.Path) -> list[Line]:
    return [line for file in sorted(folder.glob("*.jsonl")) for line in read_lines(file)]


def check(lines: list[Line]) -> Report:
    report = Report()
    by_name: dict[str, list[Line]] = collections.defaultdict(list)
    for line in lines:
        if line["kind"] != "call":
            report.add(line["rule"], line["text"], counts=line["kind"] == "violation")
        elif line["rank"] >= 0:  # -1: the shim does not know the communicator
            by_name[line["communicator"]].append(line)
    for name, calls in sorted(by_name.items()):
        Communicator(name, calls).check(report)
    return report


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=pathlib.Path, help="what HSDP_NCCL_SHIM_TRACE named")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the findings there, too")
    options = parser.parse_args(arguments)
    try:
        lines = read_folder(options.folder)
    except (OSError, ValueError) as error:
        parser.error(f"{options.folder}: expected traces, got {error}")
    calls = [line for line in lines if line["kind"] == "call"]
    if not calls:
        parser.error(f"{options.folder}: expected traces (*.jsonl) with calls, got none")
    report = check(lines)
    for kind, findings in (("note", report.notes), ("violation", report.violations)):
        for finding in findings:
            print(f"{kind}: {finding.rule}: {finding.text}")
    ranks = len({line["world_rank"] for line in calls if line["rank"] >= 0})
    if options.json:
        options.json.write_text(json.dumps({
            "ranks": ranks, "calls": len(calls),
            "violations": [finding._asdict() for finding in report.violations],
            "notes": [finding._asdict() for finding in report.notes]}, indent=1) + "\n", encoding="utf-8")
    print(f"trace: {ranks} ranks, {len(calls)} calls, {len(report.violations)} violations")
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
