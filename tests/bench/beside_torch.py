"""Runs torch_step.py and torch_zero.py: what reduction and a sharded optimizer add to a step in
torch, beside FSDP2, DDP and ZeroRedundancyOptimizer."""

import pathlib
from typing import Optional

from programs import PythonPackage, Report, run_torch, tool


class BesideTorch:
    """The package of a build folder, beside what torch has."""

    def __init__(self, build: pathlib.Path):
        self._package = PythonPackage(build)
        self._hsdp_run = tool(build, "hsdp_run")

    def missing(self) -> Optional[str]:
        return self._package.missing()

    def measure(self, rounds: int) -> Report:
        report = Report()
        for name, ranks in (("torch_step", "4"), ("torch_zero", "2")):
            program = [*self._package.command(f"{name}.py", {}), f"--rounds={rounds}"]
            for command in (program + ["--overhead"], [str(self._hsdp_run), "-n", ranks] + program):
                if not run_torch(name, command, report):
                    return report
        return report
