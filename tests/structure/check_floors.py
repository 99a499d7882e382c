#!/usr/bin/env python3
"""Checks who may include whom: the floors of docs/design.md.

Usage: check_floors.py REPOSITORY
Exit status: 0 when the tree keeps the rules, 1 after printing each violation, 2 on bad usage.
"""

import pathlib
import re
import sys
from typing import Callable, Iterator, List, NamedTuple, Optional, Set

SOURCE_SUFFIXES = {".h", ".cpp", ".cu", ".cuh"}
SOURCE_FOLDERS = ("hsdp", "zero", "quant", "bindings", "examples", "tests")

CORE = {"error", "log", "index_check", "dtype", "tensor_view", "divide_factors", "row_cut", "bucket_layout",
        "bucket_layout_builder"}

# A file may include what is in its own folder or on a lower floor. Folders first, then single files of
# hsdp/; everything else in hsdp/ stands on the Reducer's floor.
FOLDER_FLOORS = {
    "hsdp/device": 1,
    "hsdp/kernels": 2,
    "hsdp/comm": 3,
    "zero": 6,
    "quant": 6,
    "bindings": 7,
    "hsdp/tools": 7,
    "examples": 7,
    "tests": 8,
}
CORE_FLOOR = 0
MESH_FLOOR = 4
REDUCER_FLOOR = 5


class Library(NamedTuple):
    """A foreign header and the only files that may include it."""

    name: str
    header: "re.Pattern[str]"
    files: "re.Pattern[str]"
    in_headers: bool  # whether private headers of that concern may include it, too


LIBRARIES = [
    Library("NCCL", re.compile(r"nccl(_net)?\.h$"),
            re.compile(r"hsdp/comm/nccl/nccl_\w+$|tests/gpu/nccl_shim/\w+$"), False),
    Library("MPI", re.compile(r"mpi\.h$"),
            re.compile(r"(hsdp/comm/mpi/mpi_\w+|tests/(bench/peer_mpi\w*|mpi/\w+))$"), False),
    Library("Boost.Asio", re.compile(r"boost/asio(\.hpp$|/)"),
            re.compile(r"(hsdp|tests)/comm/(\w+/)?\w+$"), True),
    Library("HDF5", re.compile(r"(hdf5|H5\w+|hdf5_hl)\.h$|H5Cpp\.h$"),
            re.compile(r"(hsdp/snapshot/hdf5_\w+|tests/(snapshot|fuzz|bench)/\w+)$"), True),
    Library("NVTX", re.compile(r"nvtx3/|nvToolsExt"),
            re.compile(r"(hsdp|tests)/device/nvtx\w*$"), False),
    Library("CUDA", re.compile(r"cuda(_runtime(_api)?|_fp16|_bf16)?\.h$"),
            re.compile(r"(hsdp/(device|kernels)|quant)/cuda_\w+$|hsdp/comm/nccl/nccl_\w+$|"
                       r"tests/(stand_in|gpu/nccl_shim)/\w+$|.*/\w+\.cu$"),
            False),
]

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*["<]([^">]+)[">]', re.MULTILINE)
OPTION_SWITCH = re.compile(
    r"^[ \t]*#[ \t]*(?:if|ifdef|ifndef|elif)\b.*\bHSDP_(?:HAVE|HAS|WITH|USE|ENABLE|CUDA|MPI|NCCL)(?:_\w+)?\b",
    re.MULTILINE)
BLOCK_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)


class Include(NamedTuple):
    line: int
    target: str


def includes(text: str) -> Iterator[Include]:
    # Blank block comments out, but keep the line numbers.
    text = BLOCK_COMMENT.sub(lambda match: "\n" * match.group().count("\n"), text)
    for match in INCLUDE.finditer(text):
        yield Include(text.count("\n", 0, match.start(1)) + 1, match.group(1))


def folder_of(path: str) -> Optional[str]:
    """The listed folder that holds `path`, the most specific one."""
    held_by = [folder for folder in FOLDER_FLOORS if path.startswith(folder + "/")]
    return max(held_by, key=len) if held_by else None


def floor_of(path: str) -> Optional[int]:
    folder = folder_of(path)
    if folder is not None:
        return FOLDER_FLOORS[folder]
    if not path.startswith("hsdp/"):
        return None
    name = str(pathlib.PurePosixPath(path).with_suffix("").relative_to("hsdp"))
    if name in CORE:
        return CORE_FLOOR
    return MESH_FLOOR if name == "mesh" else REDUCER_FLOOR


def own_include_violation(path: str, target: str) -> Optional[str]:
    floor, target_floor = floor_of(path), floor_of(target)
    if floor is None or target_floor is None:
        return None
    if target_floor > floor:
        return f"floor {floor} includes {target} of floor {target_floor}: includes run downward"
    folder, target_folder = folder_of(path), folder_of(target)
    if floor == target_floor and folder != target_folder:
        return f"includes {target}: {folder}/ and {target_folder}/ are strangers"
    return None


def foreign_include_violation(path: str, target: str, public: Set[str]) -> Optional[str]:
    for library in LIBRARIES:
        if not library.header.match(target):
            continue
        pure = pathlib.PurePosixPath(path)
        stem_path = path if pure.suffix == ".cu" else str(pure.with_suffix(""))
        if not library.files.match(stem_path):
            return f"includes {target}: {library.name} stays in the files of its own concern"
        if path in public:
            return f"a public header includes {target} of {library.name}"
        if pure.suffix == ".h" and not library.in_headers:
            return f"includes {target}: {library.name} stays in source files"
    return None


def public_headers(root: pathlib.Path) -> Set[str]:
    listing = root / "cmake" / "public_headers.cmake"
    if not listing.is_file():
        return set()
    return set(re.findall(r"\b\w+(?:/\w+)+\.h\b", listing.read_text(encoding="utf-8")))


def sources(root: pathlib.Path) -> Iterator[pathlib.Path]:
    for folder in SOURCE_FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in SOURCE_SUFFIXES and path.is_file():
                yield path


def violations_in(path: str, text: str, public: Set[str]) -> Iterator[str]:
    for include in includes(text):
        where = f"{path}:{include.line}"
        for problem in (own_include_violation(path, include.target),
                        foreign_include_violation(path, include.target, public)):
            if problem:
                yield f"{where}: {problem}"
        if path in public and include.target.startswith("hsdp/") and include.target not in public:
            yield f"{where}: a public header includes {include.target}, which is not installed"
        if include.target.startswith("../") or "/../" in include.target:
            yield f"{where}: includes {include.target}: name headers from the repository root"
    if not path.startswith("tests/"):
        for match in OPTION_SWITCH.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            yield f"{path}:{line}: an option decides by #if: let CMake choose x.cpp or no_x.cpp"


def check(root: pathlib.Path) -> List[str]:
    public = public_headers(root)
    found = [f"cmake/public_headers.cmake: {path} does not exist"
             for path in sorted(public) if not (root / path).is_file()]
    for path in sources(root):
        relative = path.relative_to(root).as_posix()
        found += violations_in(relative, path.read_text(encoding="utf-8"), public)
    return found


def run(script: str, arguments: List[str], folder: pathlib.Path, find: Callable[[pathlib.Path], List[str]],
        all_well: str) -> int:
    """What a script that reads this folder of a repository does with its arguments: its exit status."""
    if len(arguments) != 1 or not (pathlib.Path(arguments[0]) / folder).is_dir():
        print(f"{script}: usage: {script}.py REPOSITORY", file=sys.stderr)
        return 2
    found = find(pathlib.Path(arguments[0]))
    print("\n".join(found) if found else f"{script}: {all_well}")
    return 1 if found else 0


def main(arguments: List[str]) -> int:
    return run("check_floors", arguments, pathlib.Path("hsdp"), check, "the tree keeps its floors")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
