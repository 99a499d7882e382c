#!/usr/bin/env python3
"""Builds a kit for the GPUs of a machine that has no compiler, no Boost, no HDF5 and no network.

    tests/gpu/make_kit.py [FOLDER]      default build/gpu-kit

FOLDER, and the archive FOLDER.tar.gz, then hold ./run, the check programs, the Python package for the Python
that runs this script, the libraries that they need besides glibc, and a manifest. The script needs nvcc, Boost
and HDF5, but no GPU. It builds for the default architectures, or for those in CUDAARCHS.
"""

import argparse
import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from typing import Dict, List

from gpu_report import command, machine, programs
from gpu_report.lines import OK

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LIMIT_S = 3600
SCRIPTS = ("run.py", "ranks.py", "check_script.py", "torch_loop.py", "sharded_loop.py", "drills.py",
           "step_times.py", "nccl_ranks.sh", "nccl_trace.py")
# Libraries of glibc, which must be the machine's, and of the driver.
NOT_CARRIED = re.compile(
    r"^(linux-vdso|ld-linux|libc\.so|libm\.so|libdl\.so|libpthread|librt\.so|libresolv|libutil\.so|"
    r"libanl|libnss_|libcuda\.so|libnvidia)"
)
RUN = """#!/bin/sh
# Runs all checks on this machine's GPUs. Usage: ./run [ARGUMENTS of tests/gpu/run.py]
here=$(cd "$(dirname "$0")" && pwd)
exec "${PYTHON:-python3}" "$here/tests/gpu/run.py" --prebuilt "$here" --report "$here/report" "$@"
"""


def libraries_of(file: pathlib.Path) -> Dict[str, pathlib.Path]:
    """Maps the names of the libraries that a binary loads, except glibc's and the driver's, to their files."""
    listed = subprocess.run(["ldd", str(file)], stdout=subprocess.PIPE, text=True, check=True).stdout
    found = {}
    for line in listed.splitlines():
        name, arrow, rest = line.strip().partition(" => ")
        if not arrow or NOT_CARRIED.match(name):
            continue
        path = rest.split(" (")[0]
        if path == "not found":
            raise SystemExit(f"make_kit: {file.name}: expected the library {name}, got none; install it")
        found[name] = pathlib.Path(path)
    return found


def cache_value(build: pathlib.Path, name: str) -> str:
    """Returns the value that CMake has in its cache."""
    cache = (build / "CMakeCache.txt").read_text(encoding="utf-8")
    found = re.search(rf"^{name}:[A-Z]+=(.*)$", cache, re.M)
    return found[1] if found else "unknown"


def header_version(folder: str) -> str:
    header = pathlib.Path(folder) / "nccl.h"
    if not header.exists():
        return "none: no NCCL engine"
    text = header.read_text(encoding="utf-8", errors="replace")
    parts = [re.search(rf"#define NCCL_{part} +([0-9]+)", text) for part in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(part[1] if part else "?" for part in parts)


def build_all(checks: pathlib.Path, module: pathlib.Path) -> None:
    architectures = os.environ.get("CUDAARCHS")
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder) / "log.txt"
        made = [programs.build_checks(HERE, checks, architectures, log, LIMIT_S)]
        if made[0].verdict == OK:
            made.append(programs.build_module(ROOT, module, architectures, log, LIMIT_S))
        if made[-1].verdict != OK:
            raise SystemExit(f"{log.read_text()[-8000:]}\nmake_kit: {made[-1].line()}")


def copy_package(module: pathlib.Path, package: pathlib.Path) -> pathlib.Path:
    """Copies the package, following its links into the sources. Returns the path of the module."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(module / "python" / "hsdp", package / "hsdp", symlinks=False, ignore=ignored)
    return next((package / "hsdp").glob("_hsdp*.so"))


def copy_programs(checks: pathlib.Path, folder: pathlib.Path) -> List[pathlib.Path]:
    folder.mkdir()
    names = [name for name in (*programs.CHECKS, programs.SHIM) if (checks / name).exists()]
    return [pathlib.Path(shutil.copy2(checks / name, folder / name)) for name in names]


def copy_scripts(folder: pathlib.Path) -> None:
    folder.mkdir(parents=True)
    for name in SCRIPTS:
        if (HERE / name).exists():
            shutil.copy2(HERE / name, folder / name)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(HERE / "gpu_report", folder / "gpu_report", ignore=ignored)


def make_kit(made: pathlib.Path) -> pathlib.Path:
    """Makes the kit and returns its archive. A kit gets its name only when it is complete."""
    checks, module = ROOT / "build" / "gpu-kit-checks", ROOT / "build" / "gpu-kit-python"
    build_all(checks, module)
    kit = made.with_name(made.name + ".part")
    shutil.rmtree(kit, ignore_errors=True)
    kit.mkdir(parents=True)
    binaries = [*copy_programs(checks, kit / "bin"), copy_package(module, kit / "python")]
    copy_scripts(kit / "tests" / "gpu")
    (kit / "lib").mkdir()
    libraries = {name: path for file in binaries for name, path in libraries_of(file).items()}
    for name, path in sorted(libraries.items()):
        shutil.copy2(path.resolve(), kit / "lib" / name)
    carried = [kit / "lib" / name for name in libraries]
    release = re.findall(r"release ([0-9.]+)", machine.ask(["nvcc", "--version"]) or "")
    manifest = {
        "format": 1,
        "commit": machine.commit(ROOT),
        "python": platform.python_version(),
        "extension_suffix": sysconfig.get_config_var("EXT_SUFFIX"),
        "cuda": release[0] if release else "unknown",
        "architectures": cache_value(checks, "CMAKE_CUDA_ARCHITECTURES"),
        "nccl_header": header_version(cache_value(checks, "HSDP_NCCL_INCLUDE_DIR")),
        "glibc": {file.name: programs.newest_symbols(file, "GLIBC") for file in [*binaries, *carried]},
        "glibcxx": max(
            (programs.newest_symbols(file, "GLIBCXX") for file in binaries), key=programs.version
        ),
    }
    (kit / programs.MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    (kit / "run").write_text(RUN, encoding="utf-8")
    (kit / "run").chmod(0o755)
    shutil.rmtree(made, ignore_errors=True)
    kit.rename(made)
    archive = made.with_name(made.name + ".tar.gz")
    with tarfile.open(archive, "w:gz", compresslevel=6) as file:
        file.add(made, arcname=f"hsdp-{made.name}")
    return archive


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=pathlib.Path, nargs="?", default=ROOT / "build" / "gpu-kit")
    kit = parser.parse_args().folder.resolve()
    if kit.exists() and not (kit / programs.MANIFEST).exists():
        parser.error(f"expected a new folder or an older kit, got {kit}; name another one")
    machine.add_cuda_to_path()
    command.raise_on_signals()
    command.adopt_orphans()
    try:
        archive = make_kit(kit)
    except command.Interrupted as signal:
        command.end_descendants()
        print(f"make_kit: ended by {signal.name}", file=sys.stderr)
        return 128 + signal.number
    print(f"written: {kit} and {archive} ({archive.stat().st_size / 1e6:.0f} MB); copy one of them to the "
          f"machine and run ./run there with {platform.python_implementation()} {platform.python_version()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
