#!/usr/bin/env python3
"""The commands that README.md, CONTRIBUTING.md and the pages of docs name: who runs each, and a run of some.

commands.txt has them all. Run as a program, in the stage `commands` of `make nightly`, this types those of its
sections [run ...], as a reader does who has typed `. build/release/activate`, and counts them.

Usage: commands.py [PART]      PART: only commands that contain it
"""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIST = pathlib.Path(__file__).with_name("commands.txt")
LIMIT_S = 3600
_PROGRAM = re.compile(
    r"(?:[A-Z_]+=\S+ )*(?:make [a-zA-Z_-]+|cmake -|ctest -|python3? \S|pip install|hsdp_run -n|hsdp_(?:check|plan) \S|mpirun -|"
    r"srun -|torchrun -|tar |rm -|sh cmake/|\./run|\.ci/run|\. build/|build/\S+ |tests/\S+\.sh )"
)
_FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_INDENTED = re.compile(r"^    (\S.*)$", re.MULTILINE)
_INLINE = re.compile(r"`([^`]+)`")


class Command(NamedTuple):
    section: str
    text: str


def pages() -> list[pathlib.Path]:
    """What readers follow. Blocks of the pages in docs/from and docs/tasks are followed by tests/python/page.py;
    the messages that docs/troubleshooting.md lists are no commands."""
    docs = [path for path in (ROOT / "docs").rglob("*.md") if path.name != "troubleshooting.md"]
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(docs)]


def commands_in(text: str) -> set[str]:
    """In indented blocks, without their comments, and between backticks; the blocks between ``` are left out."""
    text = _FENCED.sub("", text).replace("\\\n", " ")
    found = [re.sub(r"\s+#.*", "", line) for line in _INDENTED.findall(text)]
    found += _INLINE.findall(_INDENTED.sub("", text))
    spaced = (" ".join(command.split()) for command in found)
    return {command for command in spaced if _PROGRAM.match(command)}


def listed(text: str) -> list[Command]:
    """In the order of the list."""
    section, found = "", []
    for line in text.splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            found.append(Command(section, line))
    return found


def type_in(command: str, environment: dict[str, str]) -> int:
    print(f"\n--- {command}", flush=True)
    words = ["timeout", str(LIMIT_S), "bash", "-e", "-o", "pipefail", "-c", command]
    return subprocess.run(words, cwd=ROOT, env=environment, check=False).returncode


def main(part: str) -> int:
    activate = ". build/release/activate && env -0"
    shell = subprocess.run(["bash", "-c", activate], cwd=ROOT, stdout=subprocess.PIPE, check=True)
    pairs = (pair.partition("=") for pair in shell.stdout.decode().split("\0") if pair)
    environment = {name: value for name, _, value in pairs}
    environment["PATH"] = f"{ROOT}/build/venv/bin:{environment['PATH']}"
    failed = []
    chosen = [one for one in listed(LIST.read_text()) if one.section.startswith("run") and part in one.text]
    for section, command in chosen:
        ends = re.search(r"ends with (\d+)", section)
        wanted = int(ends[1]) if ends else 0
        setting = re.search(r"with ([A-Z]+)=([^:]+)", section)
        status = type_in(command, environment | ({setting[1]: setting[2]} if setting else {}))
        if status != wanted:
            failed.append(f"{command}: expected exit status {wanted}, got {status}")
    print("", *failed, f"{len(chosen) - len(failed)} passed, {len(failed)} failed", sep="\n")
    return 1 if failed or not chosen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else ""))
