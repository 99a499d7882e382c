"""The check programs and the Python module: built here, or taken from a prebuilt folder."""

import json
import os
import pathlib
import platform
import re
import shutil
import sys
import sysconfig
from typing import Any, Dict, List, Optional, Sequence

from gpu_report import command, machine
from gpu_report.lines import FAILED, NOT_RUN, OK, Check

CHECKS = ("check_device", "kernel_bandwidth_gpu", "check_nccl")
SHIM = "libhsdp_nccl_shim.so"
MANIFEST = "manifest.json"
LANGUAGE_LIBRARIES = ("libstdc++.so.6", "libgcc_s.so.1")  # the only ones the check programs load
BUILD_CHECKS, BUILD_MODULE, IMPORT_MODULE = "build: C++ checks", "build: Python module", "import hsdp"
OLDEST_PYTHON = (3, 11)
CMAKE_OF_THE_MODULE = "3.25"  # CMakePresets.json needs it


def _missing_tools(*makers: str) -> str:
    """Returns the build tools that this machine lacks. One of `makers` is enough."""
    names = [name for name in ("cmake", "nvcc") if shutil.which(name) is None]
    if not any(shutil.which(compiler) for compiler in (os.environ.get("CXX", "c++"), "g++")):
        names.append("a C++ compiler")
    if not any(shutil.which(maker) for maker in makers):
        names.append(" or ".join(makers))
    return f"{', '.join(names)} not found" if names else ""


def _old_cmake(needed: str) -> str:
    found = re.findall(r"version ([0-9.]+)", machine.ask(["cmake", "--version"]) or "")
    if not found or version(found[0]) >= version(needed):
        return ""
    return f"CMake {needed} or newer is needed, {found[0]} found"


def _bring(missing: str) -> str:
    return f"{missing}; install what is missing, or bring a kit along (make gpu-kit)"


def cmake_error(output: str) -> str:
    """Returns the text of the first error of a configuration on one line."""
    begin, end = r"^CMake Error(?: at [^\n]*\n|: ?)", r"(?:\n\n\n|\n--|\nCMake |\nCall Stack|\Z)"
    match = re.search(f"{begin}(.*?){end}", output, re.M | re.S)
    return " ".join(match[1].split())[:600] if match else ""


def _settings(architectures: Optional[str]) -> List[str]:
    chosen = [f"-DCMAKE_CUDA_ARCHITECTURES={architectures}"] if architectures else []
    headers = [] if os.environ.get("NCCL_HOME") else machine.nccl_headers()
    return chosen + [f"-DHSDP_NCCL_INCLUDE_DIR={folder}" for folder in headers[:1]]


def _keep_going(build: pathlib.Path) -> List[str]:
    """Returns the option that makes the chosen build tool go on after a program that does not compile."""
    cache = build / "CMakeCache.txt"
    text = cache.read_text(encoding="utf-8", errors="replace") if cache.exists() else ""
    return ["--", "-k", "0"] if "CMAKE_GENERATOR:INTERNAL=Ninja" in text else ["--", "-k"]


def _configure_and_build(check: str, configure: List[str], build: List[str], log: pathlib.Path,
                         limit_s: float, failed_configuration: str) -> Check:
    done = command.run(configure, log, limit_s)
    if done.problem():
        why = cmake_error(done.output) or done.problem()
        return Check(check, failed_configuration, why, done.seconds)
    jobs = ["-j", str(os.cpu_count() or 1)]
    folder = pathlib.Path(configure[configure.index("-B") + 1])
    made = command.run([*build, *jobs, *_keep_going(folder)], log, limit_s - done.seconds)
    problem = made.first_error()
    return Check(check, FAILED if problem else OK, problem, done.seconds + made.seconds)


def build_checks(source: pathlib.Path, build: pathlib.Path, architectures: Optional[str],
                 log: pathlib.Path, limit_s: float) -> Check:
    """Builds tests/gpu, a separate project; without `architectures`, for all that cuda.cmake names. Afterwards only
    the programs that it has linked exist, or, if it cannot build at all, those of an earlier build."""
    missing = _missing_tools("make", "ninja")
    if missing:
        if (build / "check_device").exists():
            return Check(BUILD_CHECKS, NOT_RUN, f"{missing}; those in {build} are used")
        return Check(BUILD_CHECKS, NOT_RUN, _bring(missing))
    for name in (*CHECKS, SHIM):
        (build / name).unlink(missing_ok=True)
    configure = ["cmake", "-S", str(source), "-B", str(build), "-DCMAKE_BUILD_TYPE=Release",
                 *_settings(architectures)]
    if shutil.which("make") is None:
        configure += ["-G", "Ninja"]
    return _configure_and_build(BUILD_CHECKS, configure, ["cmake", "--build", str(build)], log,
                                limit_s, FAILED)


def build_module(root: pathlib.Path, build: pathlib.Path, architectures: Optional[str],
                 log: pathlib.Path, limit_s: float) -> Check:
    """Builds the Python package of the preset cuda for this Python, without MPI, whose library a machine may lack.
    A machine that lacks what the library needs is not a failure."""
    missing = _missing_tools("ninja") or _old_cmake(CMAKE_OF_THE_MODULE)
    if missing:
        return Check(BUILD_MODULE, NOT_RUN, _bring(missing))
    if sys.version_info < OLDEST_PYTHON:
        return Check(BUILD_MODULE, NOT_RUN, _old_python())
    configure = [
        "cmake", "-S", str(root), "-B", str(build), "--preset", "cuda", "-DHSDP_MPI=OFF",
        "-DHSDP_BUILD_TESTS=OFF", "-DHSDP_BUILD_EXAMPLES=OFF", f"-DPython_EXECUTABLE={sys.executable}",
        *_settings(architectures),
    ]
    target = ["cmake", "--build", str(build), "--target", "hsdp_python"]
    return _configure_and_build(BUILD_MODULE, configure, target, log, limit_s, NOT_RUN)


def _old_python() -> str:
    return f"hsdp needs Python 3.11 or later, this one is {platform.python_version()}"


class Programs:
    """The folders of the programs, and the environment that they need. A prebuilt folder is a kit, which has a
    manifest, or a build folder of tests/gpu from another machine."""

    def __init__(self, checks: pathlib.Path, package: Optional[pathlib.Path],
                 kit: Optional[pathlib.Path] = None) -> None:
        self.folder = checks
        self.package = package
        self.manifest: Dict[str, Any] = {}
        self._libraries: Optional[pathlib.Path] = None
        self._lent: List[str] = []
        if kit is not None:
            self.manifest = json.loads((kit / MANIFEST).read_text(encoding="utf-8"))
            self._libraries = kit / "lib"

    @classmethod
    def prebuilt(cls, folder: pathlib.Path) -> "Programs":
        if (folder / MANIFEST).exists():
            return cls(folder / "bin", folder / "python", folder)
        return cls(folder, None)

    def find(self, name: str) -> Optional[pathlib.Path]:
        path = self.folder / name
        return path if path.exists() else None

    def why_unfit(self) -> str:
        """Returns why the kit's programs cannot run here, or nothing."""
        lent = [name for name in self._lent if name in LANGUAGE_LIBRARIES]
        return self._why_too_new([*CHECKS, SHIM, *lent])

    def _why_too_new(self, names: Sequence[str]) -> str:
        needed_by = self.manifest.get("glibc", {})
        needed = max((needed_by.get(name, "") for name in names), key=version)
        here = platform.libc_ver()[1]
        if version(here) < version(needed):
            return (f"the kit needs glibc {needed} or newer, this machine has {here or 'none'}; make the kit "
                    f"on a system that is as old, such as a container of this one's distribution")
        return ""

    def why_no_module(self) -> str:
        """Returns why this Python cannot import the package, or nothing."""
        if sys.version_info < OLDEST_PYTHON:
            return _old_python()
        if self.package is None:
            return "the prebuilt folder has no Python module; make gpu-kit makes one that has"
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        if self.manifest and self.manifest["extension_suffix"] != suffix:
            built, here = self.manifest["python"], platform.python_version()
            return (f"the module was built for Python {_minor(built)}, this one is {_minor(here)}; run "
                    f"with that Python, or make the kit with this one: "
                    f"rm -rf build/venv && make gpu-kit PYTHON=python{_minor(here)}")
        files = [file.name for file in (self.package / "hsdp").glob("_hsdp*.so")]
        if not files:
            return f"no module in {self.package / 'hsdp'}"
        return self._why_too_new([*files, *self._lent])

    def lend_libraries(self, folder: pathlib.Path) -> None:
        """Links only those libraries of the kit into `folder` that this machine lacks, so that none hides one of
        the machine, Python or torch."""
        if self._libraries is None:
            return
        known = machine.loader_cache()
        folder.mkdir(parents=True, exist_ok=True)
        for file in self._libraries.iterdir():
            link = folder / file.name
            if link.is_symlink():
                link.unlink()
            if file.name not in known or _is_older(known[file.name], self.manifest, file.name):
                link.symlink_to(file.resolve())
                self._lent.append(file.name)
        self._libraries = folder

    def environment(self, with_package: bool = False) -> Dict[str, str]:
        """Returns the variables for one of the programs, or for Python with the package."""
        variables: Dict[str, str] = {}
        if self._libraries is not None:
            variables["LD_LIBRARY_PATH"] = _joined(os.environ.get("LD_LIBRARY_PATH"), self._libraries)
        if with_package and self.package is not None:
            variables["PYTHONPATH"] = _joined(os.environ.get("PYTHONPATH"), self.package, first=True)
            variables["PYTHONDONTWRITEBYTECODE"] = "1"
        return variables


def _joined(paths: Optional[str], added: pathlib.Path, first: bool = False) -> str:
    parts = [part for part in (paths or "").split(":") if part]
    return ":".join([str(added), *parts] if first else [*parts, str(added)])


def version(text: str) -> List[int]:
    """Returns the numbers of a version, for comparison."""
    return [int(part) for part in re.findall(r"\d+", text)]


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def newest_symbols(file: pathlib.Path, family: str) -> str:
    """Returns the newest symbol version, GLIBC_x or GLIBCXX_x, that a binary names."""
    found = re.findall(rb"\b" + family.encode() + rb"_([0-9]+(?:\.[0-9]+)+)", file.read_bytes())
    return max((text.decode() for text in found), key=version, default="")


def _is_older(path: str, manifest: Dict[str, Any], name: str) -> bool:
    if name != "libstdc++.so.6":
        return False
    return version(newest_symbols(pathlib.Path(path), "GLIBCXX")) < version(manifest["glibcxx"])
