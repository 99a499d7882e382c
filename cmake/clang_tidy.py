#!/usr/bin/env python3
"""Runs clang-tidy over the sources that changed since the commit in .ci/clang_tidy_clean.

For a changed header its own source is looked at, else the first one that includes it. Everything is looked
at with --all, when .clang-tidy changed, and where that commit is not known. A commit is recorded, with
`git rev-parse HEAD >.ci/clang_tidy_clean`, when --all found nothing and it is on the main branch.

Usage: clang_tidy.py BUILD_DIR JOBS [--all]      BUILD_DIR holds compile_commands.json
"""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
RECORD = ROOT / ".ci" / "clang_tidy_clean"
FOLDERS = ("hsdp", "zero", "quant", "examples")
# The analyzer takes half the time when it follows calls less far. The compile commands are those of the
# compiler that builds, which may know other warnings.
FLAGS = ["-Wno-unknown-warning-option", "-Xclang", "-analyzer-config", "-Xclang", "mode=shallow"]


def git(*command: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *command], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


def changed_files() -> list[str] | None:
    """Relative to the root; None: everything counts as changed."""
    commit = RECORD.read_text().strip() if RECORD.exists() else ""
    changed = git("diff", "--name-only", commit, "--") if commit else None
    new = git("ls-files", "--others", "--exclude-standard")
    if changed is None or new is None:
        return None
    names = changed.split() + new.split()
    return None if ".clang-tidy" in names else names


def all_sources(build: pathlib.Path) -> list[str]:
    commands = json.loads((build / "compile_commands.json").read_text())
    paths = (pathlib.Path(entry["file"]) for entry in commands)
    names = {str(path.relative_to(ROOT)) for path in paths if path.is_relative_to(ROOT)}
    return sorted(name for name in names if name.startswith(FOLDERS) and name.endswith(".cpp"))


def source_for(header: str, sources: list[str]) -> str | None:
    own = header.removesuffix(".h") + ".cpp"
    if own in sources:
        return own
    include = f'#include "{header}"'
    return next((name for name in sources if include in (ROOT / name).read_text()), None)


def chosen_sources(build: pathlib.Path, everything: bool) -> list[str]:
    sources = all_sources(build)
    changed = None if everything else changed_files()
    if changed is None:
        if not everything:
            print("clang-tidy: what changed is not known, so everything is looked at", flush=True)
        return sources
    chosen = {name for name in changed if name in sources}
    headers = (name for name in changed if name.endswith(".h") and (ROOT / name).exists())
    chosen.update(name for name in (source_for(header, sources) for header in headers) if name)
    return sorted(chosen)


def main(build: pathlib.Path, jobs: str, everything: bool) -> int:
    sources = chosen_sources(build, everything)
    if not sources:
        print("clang-tidy: nothing changed")
        return 0
    patterns = ["^" + re.escape(str(ROOT / name)) + "$" for name in sources]
    command = ["run-clang-tidy", "-quiet", "-j", jobs, "-p", str(build)]
    command += [f"-extra-arg={flag}" for flag in FLAGS]
    done = subprocess.run(command + patterns, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          check=False)
    if done.returncode != 0:
        print(done.stdout)
        return 1
    print(f"clang-tidy: {len(sources)} sources are clean")
    return 0


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4) or sys.argv[3:] not in ([], ["--all"]):
        sys.exit(__doc__)
    sys.exit(main(pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3:] == ["--all"]))
