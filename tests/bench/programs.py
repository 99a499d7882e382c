"""Starts the benchmark programs and reads what they report."""

import argparse
import dataclasses
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from typing import Any, Callable, Dict, List, Optional, Tuple

TIMEOUT_S = 600

# Without these, every call of the MPI libraries allocates fresh pages for its temporary memory.
KEEP_PAGES = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
RUN_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
OPENMPI = ["mpirun.openmpi", "--oversubscribe", "--bind-to", "none"]
OPENMPI_TCP = OPENMPI + ["--mca", "pml", "ob1", "--mca", "btl", "tcp,self",
                         "--mca", "btl_tcp_if_include", "lo"]
# The programs pin their ranks. Which setting is the fastest depends on the machine and the size.
IMPI = {"I_MPI_FABRICS": "shm", "I_MPI_PIN": "0"}
IMPI_SETTINGS = ("", "I_MPI_THREAD_YIELD=3", "I_MPI_SHM_CMA=0", "I_MPI_SHM_HEAP=1")

BENCH_LINE = re.compile(
    r"\bbench (?P<system>\S+) (?P<variant>\S+) (?P<op>\S+) (?P<dtype>\S+) (?P<bytes>\d+) "
    r"(?P<ranks>\d+) (?P<time_us>[\d.]+) (?P<checked>[01])\s*$")
VALUE_LINE = re.compile(r"\bvalue (?P<name>\w+) (?P<number>-?[\d.]+(?:e[-+]?\d+)?)\s*$")


@dataclasses.dataclass(frozen=True)
class Key:
    """Names what was timed."""

    system: str
    variant: str
    op: str
    dtype: str
    bytes: int
    ranks: int


@dataclasses.dataclass
class Report:
    """What one run of a program printed."""

    times: List[Tuple[Key, float, bool]] = dataclasses.field(default_factory=list)
    values: Dict[str, float] = dataclasses.field(default_factory=dict)
    error: Optional[str] = None


def parse(output: str, system: str, setting: str = "") -> Report:
    """Files the times under `system`, the name of the launch, because two launches may differ only in
    settings. A `setting` becomes part of the variant's name. A program may also report a roofline."""
    report = Report()
    for line in output.splitlines():
        found = BENCH_LINE.search(line)
        if found:
            named = "roofline" if found["system"] == "roofline" else system
            variant = found["variant"] + (f"+{setting}" if setting else "")
            key = Key(named, variant, found["op"], found["dtype"], int(found["bytes"]),
                      int(found["ranks"]))
            report.times.append((key, float(found["time_us"]), found["checked"] == "1"))
        found = VALUE_LINE.search(line)
        if found:
            report.values[found["name"]] = float(found["number"])
    return report


@dataclasses.dataclass(frozen=True)
class Program:
    """One way to start a program."""

    system: str
    file: str  # in tests/bench of the build folder
    launcher: str  # "impi", "openmpi", "mpich", "files" (Gloo's store) or "hsdp_run"
    flags: Tuple[str, ...] = ()
    tcp: bool = False
    setting: str = ""  # NAME=VALUE in the environment, one of several to try with the system


class PythonPackage:
    """The Python package of a build folder, with the virtual environment beside it."""

    def __init__(self, build: pathlib.Path):
        self.python = str(build.resolve().parent / "venv" / "bin" / "python")
        self.variables = {"PYTHONPATH": str(build.resolve() / "python"), "OMP_NUM_THREADS": "1"}

    def missing(self) -> Optional[str]:
        """Returns why programs that need torch cannot run here, or None."""
        if not os.path.isfile(self.python):
            return f"{self.python} is not there; run make test"
        done = subprocess.run([self.python, "-c", "import torch, hsdp"], check=False,
                              env={**os.environ, **self.variables}, stdin=subprocess.DEVNULL,
                              capture_output=True, timeout=TIMEOUT_S)
        return None if done.returncode == 0 else "torch or hsdp cannot be imported; run make test"

    def command(self, script: str, variables: Dict[str, str]) -> List[str]:
        """The command that runs a script of this folder with the package's variables and `variables`."""
        every = {**self.variables, **variables}
        return ["env", *(f"{name}={value}" for name, value in every.items()),
                self.python, str(pathlib.Path(__file__).with_name(script))]


def tool(build: pathlib.Path, name: str) -> pathlib.Path:
    """The path of hsdp_run or hsdp_check in a build folder."""
    return build / "hsdp" / "tools" / name


def run_torch(name: str, command: List[str], report: Report) -> bool:
    """Adds the values that the command prints to `report`. Returns False if it did not end in time."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        report.error = f"{name}: no end within {TIMEOUT_S} s"
        return False
    report.values.update(parse(done.stdout, "torch").values)
    if done.returncode != 0:
        report.error = f"{name}: status {done.returncode}: {done.stdout.strip()[-800:]}"
    return True


class BesideTorch:
    """Runs torch_step.py and torch_zero.py: what reduction and a sharded optimizer add to a step in torch,
    compared with FSDP2, DDP and ZeroRedundancyOptimizer."""

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


def end(process: subprocess.Popen) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


class Launcher:
    """Runs the programs of a build folder."""

    def __init__(self, build: pathlib.Path):
        self._bench = build / "tests" / "bench"
        self._hsdp_run = tool(build, "hsdp_run")
        self.impi = str((self._bench / "mpiexec.impi").resolve())

    def missing(self, program: Program) -> Optional[str]:
        """Returns why the program cannot run here, or None."""
        if not (self._bench / program.file).is_file():
            return f"{program.file} was not built"
        needed = {"impi": self.impi, "openmpi": "mpirun.openmpi",
                  "mpich": "mpirun.mpich"}.get(program.launcher)
        if needed and not shutil.which(needed):
            return f"{needed} is not installed"
        if program.launcher == "hsdp_run" and not self._hsdp_run.is_file():
            return "hsdp_run was not built"
        return None

    def run(self, program: Program, ranks: int, arguments: List[str]) -> Report:
        command = [str(self._bench / program.file), *program.flags, *arguments]
        environment = dict(os.environ)
        if program.setting:
            environment.update([program.setting.split("=", 1)])
        if program.launcher == "files":
            return self._run_with_store(program, command, ranks, environment)
        if program.launcher == "openmpi":
            environment.update(KEEP_PAGES)
            environment.update(RUN_AS_ROOT)
            launch = [*(OPENMPI_TCP if program.tcp else OPENMPI), "-n", str(ranks)]
        elif program.launcher == "mpich":
            environment.update(KEEP_PAGES)
            launch = ["mpirun.mpich", "-n", str(ranks)]
        elif program.launcher == "impi":
            environment.update(KEEP_PAGES)
            # Without its root it does not find its tuning files.
            environment.update(IMPI, I_MPI_ROOT=str(pathlib.Path(self.impi).parents[1]))
            launch = [self.impi, "-n", str(ranks)]
        else:
            if program.tcp:
                environment["HSDP_TRANSPORT"] = "tcp"
            launch = [str(self._hsdp_run), "-n", str(ranks)]
        return self._collect(program, [self._start(launch + command, environment)])

    def _run_with_store(self, program: Program, command: List[str], ranks: int,
                        environment: Dict[str, str]) -> Report:
        with tempfile.TemporaryDirectory(prefix="hsdp-bench-") as store:
            environment.update(KEEP_PAGES, HSDP_BENCH_STORE=store, WORLD_SIZE=str(ranks))
            processes = [self._start(command, {**environment, "RANK": str(rank)})
                         for rank in range(ranks)]
            return self._collect(program, processes)

    @staticmethod
    def _start(command: List[str], environment: Dict[str, str]) -> subprocess.Popen:
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                start_new_session=True)

    @staticmethod
    def _collect(program: Program, processes: List[subprocess.Popen]) -> Report:
        output = ""
        error = None
        try:
            for process in processes:
                output += process.communicate(timeout=TIMEOUT_S)[0]
        except subprocess.TimeoutExpired:
            error = f"{program.system}: no end within {TIMEOUT_S} s"
        finally:
            for process in processes:
                end(process)
        failed = [process.returncode for process in processes if process.returncode != 0]
        report = parse(output, program.system, program.setting)
        if error is None and failed:
            error = f"{program.system}: status {failed[0]}: {output.strip()[-800:]}"
        report.error = error
        return report


def markdown_table(heads: List[str], rows: List[List[str]]) -> List[str]:
    return [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|",
            *(f"| {' | '.join(row)} |" for row in rows)]


def run_part(make: Callable[[pathlib.Path], Any], show: Callable[[Dict[str, float]], str],
             least_rounds: int) -> int:
    """The main function of a separate program: measures, and prints `show` of the values."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", type=pathlib.Path, required=True, help="the build folder")
    parser.add_argument("--rounds", type=int, default=least_rounds)
    asked = parser.parse_args()
    part = make(asked.build)
    reason = part.missing()
    report = Report(error=reason) if reason else part.measure(asked.rounds)
    if report.error:
        print(f"{pathlib.Path(sys.argv[0]).stem}: {report.error}", file=sys.stderr)
        return 1
    print(show(report.values))
    return 0
