"""Runs a function of a script as the ranks of a job, and survives the loss of any rank.

A launcher would end the survivors of a lost rank, whose behaviour drills.py examines. If there are fewer GPUs
than ranks, the ranks share them: each then claims to be a separate host, and NCCL uses the loopback.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import pathlib
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

LAUNCHERS = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_", "OMPI_", "PMI", "SLURM_", "HSDP_JOB")
SHARING = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


@dataclasses.dataclass
class Outcome:
    """How a rank ended: its exit status, or None if it had to be killed."""

    status: int | None
    result: Any
    output: str

    def problem(self) -> str:
        """Returns why there is no result, with the last lines of output."""
        ended = "no end in time" if self.status is None else f"exit status {self.status}"
        last = " / ".join(self.output.strip().splitlines()[-3:])
        return f"{ended}: {last}" if last else ended


def gpu_count() -> int:
    """Returns how many GPUs torch sees; 0 without torch."""
    try:
        import torch
    except ImportError:
        return 0
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def mesh_of(text: str) -> tuple[int, int]:
    """Reads "2x4": replicas x ranks of a shard group."""
    parts = text.split("x")
    if len(parts) != 2 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"expected a mesh as REPLICATExSHARD, such as 2x4, got '{text}'")
    return int(parts[0]), int(parts[1])


def device_of_rank(device: str) -> Any:
    """Returns the device of this rank's tensors. Makes a GPU torch's current device."""
    import torch

    torch.set_num_threads(1)
    if device == "cpu":
        return torch.device("cpu")
    chosen = torch.device("cuda", int(os.environ["RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(chosen)
    return chosen


def _environment(rank: int, size: int, job: str, shared: bool) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    named = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    made = {name: str(value) for name, value in named.items()}
    if shared:
        kept = {**SHARING, **kept}
        made["NCCL_HOSTID"] = f"{job}-{rank}"
    return {**kept, **made, "HSDP_JOB": job}


def run_ranks(
    function: Any, mesh: str, arguments: Sequence[Any], device: str, limit_s: float, victim: int = -1
) -> list[Outcome]:
    """Runs `function(replicate, shard, *arguments)` on each rank, and kills what still runs after `limit_s`.
    It does not wait for the rank `victim`, which may never end."""
    sizes = mesh_of(mesh)
    size = math.prod(sizes)
    job = f"hsdp-gpu-{secrets.token_hex(4)}"
    shared = device == "cuda" and gpu_count() < size
    command = [sys.executable, __file__, sys.modules[function.__module__].__file__ or ""]
    command += [function.__name__, json.dumps([*sizes, *arguments])]
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        processes: list[subprocess.Popen[bytes]] = []
        end = time.monotonic() + limit_s
        try:
            for rank in range(size):
                with (folder / f"{rank}.txt").open("w") as output:
                    processes.append(subprocess.Popen(
                        [*command, str(folder / f"{rank}.json")],
                        env=_environment(rank, size, job, shared), stdin=subprocess.DEVNULL,
                        stdout=output, stderr=subprocess.STDOUT,
                    ))
            awaited = [p for rank, p in enumerate(processes) if rank != victim]
            while time.monotonic() < end and any(p.poll() is None for p in awaited):
                time.sleep(0.05)
            statuses = [p.poll() for p in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [_outcome(folder, rank, status) for rank, status in enumerate(statuses)]


def problems_of(outcomes: list[Outcome]) -> str:
    """Joins the problems that ranks returned, and how ranks without a result ended; empty if there are none."""
    said = [outcome.result if outcome.status == 0 else outcome.problem() for outcome in outcomes]
    return "; ".join(f"rank {rank}: {problem}" for rank, problem in enumerate(said) if problem != "")


def _outcome(folder: pathlib.Path, rank: int, status: int | None) -> Outcome:
    result = folder / f"{rank}.json"
    value = json.loads(result.read_text()) if result.exists() else None
    return Outcome(status, value, (folder / f"{rank}.txt").read_text(errors="replace"))


def _main() -> None:
    script, function, arguments, result = sys.argv[1:5]
    sys.path.insert(0, str(pathlib.Path(script).parent))
    spec = importlib.util.spec_from_file_location(pathlib.Path(script).stem, script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    value = getattr(module, function)(*json.loads(arguments))
    part = pathlib.Path(result + ".part")
    part.write_text(json.dumps(value))
    part.rename(result)


if __name__ == "__main__":
    _main()
