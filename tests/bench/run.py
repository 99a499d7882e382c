#!/usr/bin/env python3
"""Measures hsdp beside its peers and the memory of the machine, all interleaved in one go.

Each round starts every program once, in a different order from the round before. A time is the median
over rounds of the median that the program reports. Prints a table and writes everything as JSON.
Exit status: 0 if all that could run ran, 1 if a program of ours failed or, with --strict, if a claim
was missed.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import platform
import subprocess
import sys
import time
from typing import Dict, List

import claims as rules
from gather_over_link import GatherOverLink
from programs import (BesideTorch, IMPI, IMPI_SETTINGS, KEEP_PAGES, Launcher, OPENMPI, OPENMPI_TCP,
                      Program, markdown_table)
from slow_link import SlowLink
from snapshots import Snapshots
from stage3 import Stage3

SIZES = {"64K": 64 << 10, "1M": 1 << 20, "16M": 16 << 20, "64M": 64 << 20, "256M": 256 << 20}

OURS_PRIVATE = Program("ours_private", "ours_collectives", "hsdp_run", ("--system=ours_private",))
PROGRAMS = [
    *(Program("impi", "peer_impi", "impi", setting=setting) for setting in IMPI_SETTINGS),
    Program("openmpi", "peer_openmpi", "openmpi"),
    Program("mpich", "peer_mpich", "mpich"),
    Program("gloo", "peer_gloo", "files"),
    Program("ours_shared", "ours_collectives", "hsdp_run", ("--system=ours_shared",)),
    OURS_PRIVATE,
    Program("roofline", "ours_collectives", "hsdp_run", ("--system=roofline",)),
]
TCP_PROGRAMS = [
    Program("openmpi_tcp", "peer_openmpi", "openmpi", tcp=True),
    Program("ours_tcp", "ours_collectives", "hsdp_run", ("--system=ours_private",), tcp=True),
]
IDLE = Program("ours_idle", "ours_collectives", "hsdp_run", ("--idle",))
STEP_PROGRAMS = [
    Program("impi_step", "peer_impi_step", "impi"),
    Program("openmpi_step", "peer_openmpi_step", "openmpi"),
    Program("ours_step", "ours_step", "hsdp_run"),
]
# These measure in a separate run.
PARTS = {"snapshots": Snapshots, "torch": BesideTorch, "slow_link": SlowLink,
         "gather": GatherOverLink, "stage3": Stage3}


@dataclasses.dataclass
class Run:
    """One start of a program."""

    program: Program
    ranks: int
    arguments: List[str]


def case(op: str, dtype: str, size: int) -> str:
    return f"{op}:{dtype}:{size}"


def plan_of_round(sizes: List[int], with_steps: bool) -> List[Run]:
    runs = []
    cases = [case(op, "f32", size) for op in rules.OPS for size in sizes]
    largest = SIZES["256M"]
    narrow = [case(op, dtype, largest) for op in rules.OPS for dtype in ("bf16", "f16")]
    for ranks in (2, 4):
        for program in PROGRAMS:
            ask_narrow = (program.system == "ours_shared" and ranks == 4 and largest in sizes)
            runs.append(Run(program, ranks, cases + (narrow if ask_narrow else [])))
    if largest in sizes:
        runs += [Run(program, 2, [case("all_reduce", "f32", largest)]) for program in TCP_PROGRAMS]
    if SIZES["1M"] in sizes:
        runs.append(Run(OURS_PRIVATE, 64, [case("all_reduce", "f32", SIZES["1M"])]))
    runs.append(Run(IDLE, 4, []))
    if with_steps:
        runs += [Run(program, 4, [f"--gradient={dtype}"]) for dtype in ("f32", "bf16")
                 for program in STEP_PROGRAMS]
    return runs


def narrowed(run: Run, samples: rules.Samples) -> List[str]:
    """The arguments after the first round. A step peer runs only its fastest variant. A system with
    several settings runs only the cases in which this setting is the fastest; empty if there is none."""
    def fastest(op: str, dtype: str, size: int) -> str:
        best = samples.best(run.program.system, op, dtype, size, run.ranks)
        return best[1] if best else ""

    if run.program.system in rules.STEP_PEERS:
        variant = fastest("step", run.arguments[0].split("=")[1], SIZES["256M"])
        return run.arguments + ([f"--variant={variant}"] if variant else [])
    if run.program.launcher != "impi":
        return run.arguments
    return [argument for argument in run.arguments
            for op, dtype, size in [argument.split(":")]
            if fastest(op, dtype, int(size)).partition("+")[2] == run.program.setting]


def first_line(command: List[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "not installed"
    return (done.stdout or done.stderr).strip().split("\n")[0]


def read_first(path: str, default: str = "unknown") -> str:
    try:
        return pathlib.Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return default


def machine(launcher: Launcher) -> Dict[str, object]:
    model = [line.split(":", 1)[1].strip() for line in read_first("/proc/cpuinfo").splitlines()
             if line.startswith("model name")]
    cores = os.cpu_count() or 1
    return {
        "cpu": model[0] if model else platform.machine(),
        "cores": cores,
        "cores_sharing_l3": [read_first(f"/sys/devices/system/cpu/cpu{core}/cache/index3/"
                                        "shared_cpu_list") for core in range(cores)],
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "load_at_start": os.getloadavg()[0],
        "impi": first_line([launcher.impi, "--version"]),
        "openmpi": first_line(["mpirun.openmpi", "--version"]),
        "mpich": first_line(["mpichversion"]),
        "gloo": first_line(["dpkg-query", "-W", "libgloo-dev"]),
    }


def show_progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text:60}\r", end="", file=sys.stderr, flush=True)


def measure(launcher: Launcher, runs: List[Run], rounds: int) -> "tuple[rules.Samples, List[str]]":
    samples = rules.Samples()
    errors: List[str] = []
    for number in range(rounds):
        offset = number * len(runs) // rounds
        for index, run in enumerate(runs[offset:] + runs[:offset]):
            show_progress(f"round {number + 1}/{rounds}: {index + 1}/{len(runs)} "
                          f"{run.program.system}, {run.ranks} ranks")
            arguments = narrowed(run, samples) if number > 0 else run.arguments
            if run.arguments and not arguments:
                continue
            report = launcher.run(run.program, run.ranks, arguments)
            samples.add(report)
            if report.error:
                errors.append(report.error)
    show_progress("")
    return samples, errors


def measure_part(name: str, part: "Snapshots | BesideTorch | SlowLink | GatherOverLink | Stage3",
                 rounds: int, samples: rules.Samples, errors: List[str],
                 skipped: Dict[str, str]) -> None:
    reason = part.missing()
    if reason:
        skipped[name] = reason
        print(f"not measured: {name}: {reason}")
        return
    show_progress(name)
    report = part.measure(rounds)
    show_progress("")
    samples.add(report)
    if report.error:
        errors.append(f"ours: {report.error}")


def milliseconds(time_us) -> str:
    if time_us is None:
        return "-"
    return f"{time_us:.0f} us" if time_us < 1000 else f"{time_us / 1000:.1f} ms"


def times_table(samples: rules.Samples, sizes: List[int]) -> List[str]:
    """The times of every system, and the ratio of the fastest peer's to ours in each kind of memory."""
    systems = list(dict.fromkeys(program.system for program in PROGRAMS))
    lines = [f"{'':30}" + "".join(f"{system:>14}" for system in
                                  systems + ["peer/shared", "peer/private"])]
    for op in rules.OPS:
        for ranks in (2, 4):
            for size in sizes:
                row = [milliseconds(samples.time(system, op, "f32", size, ranks))
                       for system in systems]
                for system in ("ours_shared", "ours_private"):
                    ratio = rules.peer_ratio(samples, system, op, size, ranks)
                    row.append("-" if ratio is None else f"{ratio:.2f}")
                lines.append(f"{op:15}{ranks} ranks {rules.size_text(size):>8}" +
                             "".join(f"{cell:>14}" for cell in row))
    return lines


def print_claims(found: List[rules.Claim]) -> None:
    width = max(len(claim.name) for claim in found)
    for claim in found:
        sign = "<=" if claim.at_most else ">="
        print(f"{claim.name:{width}} {claim.ratio_text:>7} {sign} {claim.target:<5g} {claim.verdict:13}"
              f"{claim.detail}")


def markdown(found: List[rules.Claim], table: List[str]) -> str:
    """Writes the tables of docs/benchmarks.md."""
    rows = []
    for claim in found:
        bound = f"at {'most' if claim.at_most else 'least'} {claim.target:g}"
        verdict = "**missed**" if claim.verdict == "MISSED" else claim.verdict
        rows.append([claim.name, claim.ratio_text, bound, verdict, claim.detail])
    claims = markdown_table(["claim", "ratio", "target", "verdict", ""], rows)
    return "\n".join([*claims, "", "```", *table, "```", ""])


def write_json(path: pathlib.Path, samples: rules.Samples, found: List[rules.Claim],
               notes: Dict[str, object]) -> None:
    times = [dict(dataclasses.asdict(key), median_us=samples.median(key), samples_us=values,
                  wrong_results=samples.wrong.get(key, 0))
             for key, values in samples.times.items()]
    document = {
        **notes,
        "settings": {"environment": {**KEEP_PAGES}, "impi": IMPI,
                     "impi_tried": IMPI_SETTINGS, "openmpi": OPENMPI, "openmpi_tcp": OPENMPI_TCP,
                     "pinning": "rank modulo cores"},
        "claims": [dict(dataclasses.asdict(claim), verdict=claim.verdict) for claim in found],
        "values": samples.values,
        "times": times,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def parse_arguments(arguments: List[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--build", type=pathlib.Path, required=True, help="the build folder")
    parser.add_argument("--json", type=pathlib.Path, help="where to write everything")
    parser.add_argument("--markdown", type=pathlib.Path, help="where to write the docs' tables")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", default=",".join(SIZES), help="of " + ",".join(SIZES))
    parser.add_argument("--only", default="",
                        help="systems and parts to run, comma separated; default all")
    parser.add_argument("--without", nargs="+", choices=["steps", *PARTS], default=[],
                        help="what to leave out")
    parser.add_argument("--strict", action="store_true", help="a missed claim is a failure")
    parsed = parser.parse_args(arguments)
    unknown = [size for size in parsed.sizes.split(",") if size not in SIZES]
    if unknown or parsed.rounds < 1:
        parser.error(f"expected sizes of {','.join(SIZES)} and at least one round")
    return parsed


def main(arguments: List[str]) -> int:
    asked = parse_arguments(arguments)
    launcher = Launcher(asked.build)
    sizes = [SIZES[name] for name in asked.sizes.split(",")]
    only = set(filter(None, asked.only.split(",")))
    start = time.time()
    notes: Dict[str, object] = {"machine": machine(launcher), "rounds": asked.rounds}
    runs = []
    skipped: Dict[str, str] = {}
    for run in plan_of_round(sizes, "steps" not in asked.without):
        reason = launcher.missing(run.program)
        if only and run.program.system not in only:
            continue
        if reason:
            skipped[run.program.system] = reason
        else:
            runs.append(run)
    for system, reason in skipped.items():
        print(f"not measured: {system}: {reason}")
    samples, errors = measure(launcher, runs, asked.rounds)
    for name, part in PARTS.items():
        if name in (only or PARTS) and name not in asked.without:
            measure_part(name, part(asked.build), asked.rounds, samples, errors, skipped)
    found = rules.claims(samples, lambda size: size in sizes)

    table = times_table(samples, sizes)
    print("\n".join(table) + "\n")
    print_claims(found)
    for key, count in samples.wrong.items():
        print(f"wrong results, not quoted: {key.system}/{key.variant} {key.op} {key.bytes} bytes, "
              f"{key.ranks} ranks: {count} of {len(samples.times[key])} runs")
    for error in errors:
        print(f"failed: {error}")
    notes.update(seconds=round(time.time() - start, 1), errors=errors, not_measured=skipped)
    if asked.json:
        write_json(asked.json, samples, found, notes)
        print(f"written: {asked.json}")
    if asked.markdown:
        asked.markdown.write_text(markdown(found, table), encoding="utf-8")
        print(f"written: {asked.markdown}")
    ours_failed = any(error.startswith(("ours", "roofline")) for error in errors)
    ours_wrong = any(key.system.startswith(("ours", "roofline")) for key in samples.wrong)
    missed = asked.strict and any(claim.verdict == "MISSED" for claim in found)
    return 1 if ours_failed or ours_wrong or missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
