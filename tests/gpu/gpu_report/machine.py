"""Describes this machine: GPUs, driver, CUDA, Python, torch and the NCCL that programs will use."""

import datetime
import functools
import glob
import importlib.util
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
from typing import Any, Dict, List, Optional

VARIABLES = ("NCCL_", "CUDA_", "HSDP_", "PYTORCH_", "TORCH_NCCL_", "LD_LIBRARY_PATH")
SECRET = "SECRET"

_TORCH = """
import torch
print(torch.__version__)
print(torch.version.cuda or "none: built for the CPU")
print(".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none")
"""


def ask(command: List[str], limit_s: float = 60.0) -> Optional[str]:
    """Returns what a command prints; None if it is missing or fails."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              timeout=limit_s, stdin=subprocess.DEVNULL, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.rstrip() if done.returncode == 0 else None


def add_cuda_to_path() -> None:
    """Adds CUDA's folder to the PATH, which often lacks it, to find nvcc and compute-sanitizer."""
    folder = os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin")
    os.environ["PATH"] = f"{os.environ.get('PATH', '')}:{folder}"


def gpu_lines() -> List[str]:
    """Returns a line with name, compute capability, memory and driver for each GPU."""
    query = "name,compute_cap,memory.total,driver_version"
    found = ask(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"])
    return [line.strip() for line in found.splitlines() if line.count(",") >= 3] if found else []


def gpu_settings() -> List[str]:
    """Returns those settings of each GPU that can prevent a run."""
    query = "persistence_mode,compute_mode,mig.mode.current"
    found = ask(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"])
    rows = [re.split(r",\s*", line.strip()) for line in found.splitlines()] if found else []
    return [f"persistence mode {row[0]}, compute mode {row[1]}, MIG {row[2]}" for row in rows if len(row) == 3]


def why_no_gpu() -> str:
    """Returns why there is no GPU; empty if there is one."""
    if gpu_count() > 0:
        return ""
    if shutil.which("nvidia-smi") is None:
        return "no NVIDIA driver (nvidia-smi not found)"
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "no GPU (CUDA_VISIBLE_DEVICES hides all)"
    return "no GPU (nvidia-smi lists none; run it to see why)"


def gpu_count() -> int:
    """Returns the number of GPUs that programs see."""
    count = len(gpu_lines())
    if count == 0 and shutil.which("nvidia-smi") is None:  # a container may have only the driver
        count = len(glob.glob("/dev/nvidia[0-9]*"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return count
    return min(count, len([part for part in visible.split(",") if part.strip() not in ("", "-1")]))


def why_bad_architecture() -> str:
    """Returns what is wrong with HSDP_GPU_ARCH, or nothing."""
    named = os.environ.get("HSDP_GPU_ARCH", "")
    one = r"(\d{2,3}[af]?(-real|-virtual)?)"
    if re.fullmatch(rf"({one}(;{one})*|native|all|all-major)?", named):
        return ""
    return f"HSDP_GPU_ARCH: expected an architecture such as 90, or several as '80;90', got '{named}'"


def architecture() -> str:
    """Returns the architecture to compile for: HSDP_GPU_ARCH, else the first GPU's, else 90. If nvcc is older than
    the GPU, it is the newest one that both know; the driver then compiles its PTX."""
    named = os.environ.get("HSDP_GPU_ARCH")
    if named:
        return named
    lines = gpu_lines()
    digits = lines[0].split(",")[1].replace(".", "").strip() if lines else ""
    wanted = int(digits) if digits.isdigit() else 90
    listed = ask(["nvcc", "--list-gpu-arch"]) or ""
    known = sorted(int(digits) for digits in re.findall(r"^compute_(\d+)$", listed, re.M))
    older = [number for number in known if number <= wanted]
    return str(older[-1] if older else wanted)


def nccl_library() -> str:
    """Returns the libnccl.so.2 that programs without torch must open; empty if the loader finds one itself, or
    if there is none."""
    named = os.environ.get("HSDP_NCCL_LIBRARY", "")
    return named if named or "libnccl.so.2" in loader_cache() else torch_nccl_library()


def torch_nccl_library() -> str:
    """Returns the libnccl.so.2 beside this Python, which torch loads; empty if there is none."""
    folders = [folder / "lib" for folder in _wheel_folders()]
    torch = importlib.util.find_spec("torch")
    if torch is not None and torch.origin:
        folders.append(pathlib.Path(torch.origin).parent / "lib")
    files = [folder / "libnccl.so.2" for folder in folders]
    return next((str(file) for file in files if file.exists()), "")


def _wheel_folders() -> List[pathlib.Path]:
    """Returns the folders of the NCCL wheel that torch depends on."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ImportError:
        return []
    return [pathlib.Path(place) for place in (spec.submodule_search_locations or [])] if spec else []


def nccl_headers() -> List[pathlib.Path]:
    """Returns the folders beside this Python that have nccl.h."""
    folders = [folder / "include" for folder in _wheel_folders()]
    return [folder for folder in folders if (folder / "nccl.h").exists()]


def loader_cache() -> Dict[str, str]:
    """Maps the names of the libraries that the dynamic loader finds to their files."""
    found: Dict[str, str] = {}
    for program in ("ldconfig", "/sbin/ldconfig"):
        listed = ask([program, "-p"])
        for line in (listed or "").splitlines():
            name, arrow, path = line.strip().partition(" => ")
            if arrow:
                found.setdefault(name.split(" ")[0], path)
        if found:
            break
    return found


def nccl_file(beside_torch: bool = False) -> str:
    """Returns the libnccl.so.2 that programs open; with `beside_torch`, the one that torch has loaded."""
    named = os.environ.get("HSDP_NCCL_LIBRARY", "")
    of_torch = torch_nccl_library() if beside_torch else ""
    return named or of_torch or nccl_library() or loader_cache().get("libnccl.so.2", "")


@functools.lru_cache(maxsize=None)
def torch_facts() -> Dict[str, str]:
    """Returns the versions of torch, its CUDA and its NCCL; empty if this Python has no torch."""
    answer = ask([sys.executable, "-c", _TORCH], 180.0)
    lines = answer.splitlines()[-3:] if answer else []
    return dict(zip(("torch", "torch CUDA", "torch NCCL"), lines)) if len(lines) == 3 else {}


def facts() -> Dict[str, Any]:
    """Returns the facts for the report, in the order in which it shows them."""
    compiler = re.findall(r"release .*", ask(["nvcc", "--version"]) or "")
    nccl = nccl_file()
    environment = {name: "(set)" if SECRET in name else value
                   for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)}
    return {
        "GPUs": gpu_lines() or [f"none: {why_no_gpu() or 'nvidia-smi lists none'}"],
        "settings": gpu_settings() or ["unknown: nvidia-smi says nothing"],
        "topology": ask(["nvidia-smi", "topo", "-m"]) or "unknown: nvidia-smi topo -m says nothing",
        "nvcc": compiler[0] if compiler else "not found",
        "Python": f"{platform.python_version()}, {sys.executable}",
        **(torch_facts() or {"torch": "not found"}),
        "libnccl": os.path.realpath(nccl) if nccl else "none: libnccl.so.2 not found",
        "CPUs": str(os.cpu_count()),
        "system": f"{platform.platform()}",
        "variables": environment,
    }


def commit(root: pathlib.Path) -> str:
    """Returns git's name of the sources."""
    return ask(["git", "-C", str(root), "describe", "--always", "--dirty", "--tags"]) or "unknown"


def now() -> str:
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")
