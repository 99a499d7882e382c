"""Runs torch_step.py and torch_zero.py: what reduction and a sharded optimizer add to a step in
torch, beside FSDP2, DDP and ZeroRedundancyOptimizer."""

import os
import pathlib
import subprocess
from typing import List, Optional

from programs import PythonPackage, Report, TIMEOUT_S, parse


class BesideTorch:
    """The package of a build folder, beside what torch has."""

    def __init__(self, build: pathlib.Path):
        self._package = PythonPackage(build)
        self._hsdp_run = build / "hsdp" / "tools" / "hsdp_run"

    def missing(self) -> Optional[str]:
        return self._package.missing()

    def measure(self, rounds: int) -> Report:
        report = Report()
        for name, ranks in (("torch_step", "4"), ("torch_zero", "2")):
            program = [self._package.python, str(pathlib.Path(__file__).with_name(f"{name}.py")),
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
        return subprocess.run(command, env={**os.environ, **self._package.variables},
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_S, check=False)
