#!/usr/bin/env python3
"""Plants faults in the product, one at a time, and reports those that no test detects: `make mutants`.

    make mutants ARGS="--seed 5 --count 40 --files 'hsdp/reducer/*'"

It builds a copy of the sources with all chosen faults once, in build/mutants; fault.py says how. The tests run once
without a fault. Then, for each fault, the tests that reach it run, shortest first, until one fails. The seed and
the product's sources determine the faults, so two states of the tests can be compared.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import fnmatch
import json
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from typing import Any, NamedTuple

import cpp_faults
import python_faults
from fault import Fault, plant

ROOT = pathlib.Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "mutants"
TREE = WORK / "tree"
BUILD = TREE / "build" / "release"
PRODUCT = ("hsdp/*", "zero/*", "quant/*", "bindings/*")
NOT_TESTED = {"nightly", "package"}  # labels; the package tests compile sources themselves
DATA_BYTES = 8 << 30  # memory limit of a process: a fault may make it allocate without end


def finder_of(file: str) -> Any:
    """The module that finds faults in the file's language; None if no faults are planted in the file."""
    if file.endswith((".cpp", ".h", ".cu", ".cuh")):
        return cpp_faults
    return python_faults if file.startswith("bindings/hsdp/") and file.endswith(".py") else None


def tracked() -> list[str]:
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    return sorted(file for file in listed if (ROOT / file).is_file())


def choose(files: list[str], seed: int, count: int, only: list[str]) -> dict[int, Fault]:
    """Chooses faults that do not overlap, by number from 1: more than `count`, as some will not compile."""
    faults = [
        fault for file in files if (finder := finder_of(file))
        for fault in finder.find_faults(file, (ROOT / file).read_text())
    ]
    random.Random(seed).shuffle(faults)
    chosen: dict[int, Fault] = {}
    for fault in faults:
        if len(chosen) == count + count // 3:
            break
        if not any(f.file == fault.file and f.begin < fault.end and fault.begin < f.end for f in chosen.values()):
            chosen[len(chosen) + 1] = fault
    return {n: fault for n, fault in chosen.items() if not only or any(text in str(fault) for text in only)}


def write_tree(chosen: dict[int, Fault]) -> None:
    """Writes only files that change, so that the others are not rebuilt."""
    files = tracked()
    for old in TREE.rglob("*") if TREE.exists() else ():
        name = str(old.relative_to(TREE))
        if not name.startswith("build") and old.is_file() and name not in files:
            old.unlink()
    for file in files:
        source, target = ROOT / file, TREE / file
        of_file = {n: fault for n, fault in chosen.items() if fault.file == file}
        content = source.read_bytes()
        if of_file:
            text = plant(content.decode(), of_file)
            text = python_faults.with_switch(text) if file.endswith(".py") else cpp_faults.INCLUDE + text
            content = text.encode()
        if not target.exists() or target.read_bytes() != content:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
            shutil.copymode(source, target)
    shutil.copy(pathlib.Path(__file__).with_name("_mutants.py"), TREE / "bindings" / "hsdp" / "_mutants.py")
    (TREE / "build").mkdir(exist_ok=True)
    if not (TREE / "build" / "venv").exists():
        (TREE / "build" / "venv").symlink_to(ROOT / "build" / "venv")


def build(jobs: int) -> str:
    """Returns the compiler's output if the build fails, else nothing."""
    for command in (
        ["cmake", "--preset", "release"],
        ["cmake", "--build", "--preset", "release", "-j", str(jobs), "--", "-k", "0"],
    ):
        done = subprocess.run(command, cwd=TREE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            return done.stdout
    return ""


def build_what_compiles(chosen: dict[int, Fault], jobs: int) -> None:
    while True:
        write_tree(chosen)
        said = build(jobs)
        if not said:
            return
        places = re.findall(r"^(?:In file included from )?(\S+?):(\d+):\d+: error:", said, re.MULTILINE)
        wrong = set()
        for path, line in places:
            file = str(pathlib.Path(path).resolve()).removeprefix(f"{TREE}/")
            # The include of the switch moves each line down by one; a condition may span several lines.
            wrong |= {
                n for n, f in chosen.items()
                if f.file == file and f.line <= int(line) - 1 <= f.line + f.text.count("\n")
            }
        if not wrong:
            sys.exit(f"{said}\nmutants: the sources do not build, and not for a fault")
        for number in wrong:
            del chosen[number]


class Test(NamedTuple):
    name: str
    command: list[str]
    folder: str
    environment: dict[str, str]
    limit_s: float


class Outcome(NamedTuple):
    passed: bool
    seconds: float


def tests_matching(pattern: str) -> list[Test]:
    command = ["ctest", "--test-dir", str(BUILD), "--show-only=json-v1", "-R", pattern]
    shown = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    tests = []
    for test in shown["tests"]:
        properties = {one["name"]: one["value"] for one in test["properties"]}
        if not NOT_TESTED.intersection(properties.get("LABELS", [])):
            environment = dict(text.split("=", 1) for text in properties.get("ENVIRONMENT", []))
            folder = properties["WORKING_DIRECTORY"]
            tests.append(Test(test["name"], test["command"], folder, environment, properties["TIMEOUT"]))
    return tests


def run(test: Test, limit_s: float, **environment: str) -> Outcome:
    def confine() -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_DATA, (DATA_BYTES, DATA_BYTES))

    start = time.monotonic()
    process = subprocess.Popen(
        test.command, cwd=test.folder, env={**os.environ, **test.environment, **environment}, preexec_fn=confine,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )
    try:
        passed = process.wait(limit_s) == 0
    except subprocess.TimeoutExpired:
        passed = False
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
    return Outcome(passed, time.monotonic() - start)


def run_without_faults(tests: list[Test], jobs: int) -> dict[str, tuple[float, set[int]]]:
    """For each test that passes: its seconds, and the faults that it reaches."""
    reached = WORK / "reached"
    shutil.rmtree(reached, ignore_errors=True)
    found = {}
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        futures = {}
        for test in tests:
            folder = reached / test.name
            folder.mkdir(parents=True)
            futures[test.name] = pool.submit(run, test, test.limit_s, HSDP_FAULTS_REACHED=str(folder))
        for name, future in futures.items():
            passed, seconds = future.result()
            if passed:
                found[name] = (seconds, {int(path.name) for path in (reached / name).iterdir()})
            else:
                print(f"mutants: {name} fails without a fault and is left out", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="make mutants", description="Which planted faults does no test see?")
    parser.add_argument("--seed", type=int, default=datetime.date.today().timetuple().tm_yday, help="default: the day")
    parser.add_argument("--count", type=int, default=20, help="how many faults (20)")
    parser.add_argument("--files", nargs="+", default=PRODUCT, help="patterns of paths, such as 'hsdp/reducer/*'")
    parser.add_argument("--only", nargs="+", default=[], help="of the chosen faults, those whose line has such a text")
    parser.add_argument("--tests", default=".", help="a regular expression of ctest entries")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="at a time")
    options = parser.parse_args()
    files = [f for f in tracked() if any(fnmatch.fnmatch(f, p) for p in PRODUCT)]
    files = [f for f in files if any(fnmatch.fnmatch(f, p) for p in options.files)]

    chosen = choose(files, options.seed, options.count, options.only)
    build_what_compiles(chosen, options.jobs)
    chosen = dict(sorted(chosen.items())[: options.count])
    print(f"mutants: {len(chosen)} faults, seed {options.seed}", flush=True)
    tests = {test.name: test for test in tests_matching(options.tests)}
    clean = run_without_faults(list(tests.values()), options.jobs)

    def verdict_on(number: int) -> str:
        seeing = sorted((seconds, name) for name, (seconds, reached) in clean.items() if number in reached)
        for seconds, name in seeing:
            if not run(tests[name], 60 + 4 * seconds, HSDP_FAULT=str(number)).passed:
                return f"caught by {name}"
        return f"SURVIVED {len(seeing)} tests" if seeing else "SURVIVED: no test reaches it"

    caught = 0
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for number, verdict in zip(chosen, pool.map(verdict_on, chosen)):
            caught += verdict.startswith("caught")
            print(f"{chosen[number]}\n    {verdict}", flush=True)
    print(f"mutants: {caught} of {len(chosen)} caught, {len(chosen) - caught} survived")


if __name__ == "__main__":
    main()
