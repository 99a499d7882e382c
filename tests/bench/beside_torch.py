"""Runs torch_step.py and torch_zero.py: what reduction and a sharded optimizer add to a step in
torch, beside FSDP2, DDP and ZeroRedundancyOptimizer."""

import os
import pathlib
import subprocess
from typing import List, Optional

from programs import Report, parse

TIMEOUT_S = 600


class BesideTorch:
    """The package of a build folder, in the virtual environment beside it."""

    def __init__(self, build: pathlib.Path):
        self._python = build.resolve().parent / "venv" / "bin" / "python"
        self._hsdp_run = build / "hsdp" / "tools" / "hsdp_run"
        self._environment = {**os.environ, "PYTHONPATH": str(build.resolve() / "python"),
                             "OMP_NUM_THREADS": "1"}

    def missing(self) -> Optional[str]:
        if not self._python.is_file():
            return f"{self._python} is not there; run make test"
        done = self._run([str(self._python), "-c", "import torch, hsdp"])
        return None if done.returncode == 0 else "torch or hsdp cannot be imported; run make test"

    def measure(self, rounds: int) -> Report:
        report = Report()
        for name, ranks in (("torch_step", "4"), ("torch_zero", "2")):
            program = [str(self._python), str(pathlib.Path(__file__).with_name(f"{name}.py")),
                       f"--rounds={rounds}"]
            for command in (program + ["--overhead"], [str(self._hsdp_run), "-n", ranks] + program):
                try:
                    done = self._run(command)
                except subprocess.TimeoutExpired:
                    report.error = f"{name}: no end within {TIMEOUT_S} s"
                    return report
                report.values.update(parse(done.stdout, "torch").values)
                if done.returncode != 0:
                    report.error = f"{name}: status {done.returncode}: {done.stdout.strip()[-800:]}"
        return report

    def _run(self, command: List[str]) -> subprocess.CompletedProcess:
        return subprocess.run(command, env=self._environment, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              timeout=TIMEOUT_S, check=False)
