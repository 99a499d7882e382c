#!/usr/bin/env python3
"""Builds, checks and measures what runs on this machine's GPUs, and writes one report.

    tests/gpu/run.py [--prebuilt FOLDER] [--report FOLDER] [--only STAGE ...] [--seconds N]

`make gpu` calls it; in a kit of `make gpu-kit` it is `./run`. The report names what cannot run here, with
the reason. Exit status: 0 all that ran holds, 1 something does not, 2 bad usage, 77 nothing ran on a GPU,
128 + N ended by signal N; the report then has what was done until then. HSDP_GPU_ARCH, such as 90, is the
architecture to build for; default this machine's GPU.
"""

import argparse
import functools
import math
import pathlib
import re
import shutil
import sys
import time
from typing import Callable, Dict, List, Optional, Tuple

from gpu_report import command, machine, programs
from gpu_report.checks import titles
from gpu_report.command import SKIPPED, Ended, Interrupted
from gpu_report.lines import (
    FAILED,
    NOT_RUN,
    OK,
    Check,
    bandwidths_in,
    checks_in,
    collective_times_in,
    values_in,
)
from gpu_report.record import Report, Stage

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# The most seconds that each stage may take; each command of a stage also has a limit. They bound a run in which
# something hangs. They are long because on a machine with eight GPUs that was just started each process takes
# up to a minute to open them, and nvcc takes minutes on few CPUs. If --seconds is less than their sum, every
# stage gets less.
LIMITS_S = {
    "build": 1800, "kernels": 600, "kernel bandwidths": 300, "engine over NCCL": 1500,
    "rules of NCCL": 1500, "torch loop": 2000, "sharded loop": 800, "failure drills": 2000,
    "step times": 900, "compute-sanitizer": 1200,
}
MESH_LIMIT_S = 300  # for check_nccl on one mesh
NOT_REACHED = "not reached"
SHARING_STAGES = ("engine over NCCL", "torch loop", "sharded loop", "failure drills")
SHARED_NOTE = ("ranks shared a GPU through the loopback: this says nothing about NVLink, P2P, InfiniBand "
               "or speed")
STEP_NOTES = {
    "1x1": "1x1: what hsdp adds on one GPU: packing, sums and host time; nothing is sent",
    "own": "{mesh}: whole steps over this machine's links; says nothing about several hosts",
    "shared": "{mesh}: ranks take turns on a GPU and send through the loopback: host time with all streams "
              "and collectives, but no speed; compare nothing with it but itself",
}
SANITIZED = {
    "memcheck": ["memcheck"],
    "initcheck": ["initcheck"],
    # The kernels that use shared memory.
    "racecheck: packs": ["racecheck", "cast-and-pack: large"],
    "racecheck: norms": ["racecheck", "squared norm"],
    "racecheck: codec": ["racecheck", "quantize: "],
}


def meshes_for(gpus: int) -> Tuple[List[str], bool]:
    """Returns the meshes of several ranks to try, and whether their ranks share a GPU."""
    if gpus < 2:
        return ["1x2", "2x1", "2x2"], True
    sizes = {2: ["1x2", "2x1"], 4: ["2x2", "1x4"], 8: ["2x4", "4x2", "1x8"]}
    return [mesh for size, meshes in sizes.items() if size <= gpus for mesh in meshes], False


def watched_meshes(meshes: List[str]) -> List[str]:
    """Returns the largest mesh that has both hops; if there is none, one mesh for each hop."""
    for mesh in ("2x4", "2x2"):
        if mesh in meshes:
            return [mesh]
    return ["1x2", "2x1"]


class Run:
    """One run: the programs and GPUs that it has, and the report so far."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.folder: pathlib.Path = asked.report
        self.prebuilt: Optional[pathlib.Path] = asked.prebuilt
        self.only: List[str] = asked.only
        self.seconds: float = asked.seconds
        self.end = self.stage_end = time.monotonic() + asked.seconds
        self.interrupted = 0
        self.no_gpu = machine.why_no_gpu()
        self.gpus = machine.gpu_count()
        self.meshes, self.shared = meshes_for(self.gpus)
        self.no_module = self.no_checks = ""
        build = ROOT / "build"
        self.programs = programs.Programs(build / "gpu", build / "gpu-python" / "python")
        if self.prebuilt is not None:
            self.programs = programs.Programs.prebuilt(self.prebuilt)
        self.report = Report(machine.now(), self.programs.manifest.get("commit") or machine.commit(ROOT))

    # What a stage needs.

    def log(self, stage: Stage) -> pathlib.Path:
        stage.log = "logs/" + re.sub(r"\W+", "_", stage.name) + ".txt"
        return self.folder / stage.log

    def run(self, stage: Stage, words: List[str], limit_s: float,
            environment: Optional[Dict[str, str]] = None) -> Ended:
        left = min(limit_s, self.stage_end - time.monotonic())
        if left < 1:
            return Ended(SKIPPED, "skipped: no time was left for it", 0.0, limit_s)
        return command.run(words, self.log(stage), left, environment)

    def why_not(self, program: str) -> str:
        """Returns why a program cannot check anything here, or nothing."""
        if self.no_gpu:
            return self.no_gpu
        if self.programs.why_unfit():
            return self.programs.why_unfit()
        if self.programs.find(program) is not None:
            return ""
        if program == "check_nccl" and self.programs.find("check_device") is not None:
            return "nccl.h was not found when the checks were built; docs/gpu.md says where it is looked for"
        return self.no_checks or f"{program} was not built"

    def add_verdicts(self, stage: Stage, done: Ended, names: List[str], title: str) -> None:
        """Adds the checks that a program printed. Those of `names` that are missing count as not run. If the
        program failed and no check that it printed says so, that is one more failed check."""
        if done.status == SKIPPED:
            return stage.add_not_run(names, done.skipped())
        found = checks_in(done.output, names)
        stage.checks += found
        problem = done.problem()
        if problem and (done.status != 1 or not any(check.verdict == FAILED for check in found)):
            stage.checks.append(Check(title, FAILED, problem, done.seconds))
        seen = {check.name for check in found}
        stage.add_not_run([name for name in names if name not in seen], f"{title} did not get there")

    # The stages.

    def build(self, stage: Stage) -> None:
        if self.prebuilt is not None:
            stage.add_not_run([programs.BUILD_CHECKS, programs.BUILD_MODULE], f"taken from {self.prebuilt}")
            self.programs.lend_libraries(self.folder / "lib")
        else:
            architecture = machine.architecture()
            log, limit_s = self.log(stage), self.stage_end - time.monotonic()
            checks = programs.build_checks(HERE, ROOT / "build" / "gpu", architecture, log, limit_s)
            stage.checks.append(checks)
            build = ROOT / "build" / "gpu-python"
            module = programs.build_module(ROOT, build, architecture, log, limit_s - (checks.seconds or 0))
            stage.checks.append(module)
            if checks.verdict == FAILED:
                self.no_checks = "it did not compile; the stage build says why"
            if module.verdict != OK:
                self.no_module = "no Python module; the stage build says why"
        self.import_module(stage)

    def import_module(self, stage: Stage) -> None:
        """Imports hsdp like the ranks: after torch, whose libraries are then used."""
        why = self.no_module or self.programs.why_no_module()
        if not why and not machine.torch_facts():
            why = (f"torch is not there, or does not load, in {sys.executable}; make gpu PYTHON=... names "
                   "another Python")
        if why:
            stage.add_not_run([programs.IMPORT_MODULE], why)
            self.no_module = why
            return
        words = [sys.executable, "-c", "import torch, hsdp; print(hsdp.__version__)"]
        done = self.run(stage, words, 180, self.programs.environment(with_package=True))
        problem = done.problem()
        stage.checks.append(Check(programs.IMPORT_MODULE, FAILED if problem else OK, problem, done.seconds))
        self.no_module = f"hsdp cannot be imported: {problem}" if problem else self.why_torch_has_no_cuda()

    def why_torch_has_no_cuda(self) -> str:
        facts = machine.torch_facts()
        is_for_cpu = facts.get("torch CUDA", "").startswith("none")
        return f"torch {facts['torch']} was built for the CPU; install one for CUDA" if is_for_cpu else ""

    def kernels(self, stage: Stage) -> None:
        program = self.programs.find("check_device")
        environment = self.programs.environment()
        names = ["check_device"]
        if program is not None and not self.programs.why_unfit():
            listed = self.run(stage, [str(program), "--list"], 60, environment)
            names = listed.output.splitlines() if listed.status == 0 else names
        why = self.why_not("check_device")
        if why:
            return stage.add_not_run(names, why)
        done = self.run(stage, [str(program)], LIMITS_S["kernels"], environment)
        self.add_verdicts(stage, done, names, "check_device")
        if done.status == SKIPPED:
            self.no_gpu = done.skipped()
            return None
        for gpu in range(1, self.gpus):  # the first GPU has run all checks
            words = [str(program), "--quick", "--device", str(gpu)]
            done = self.run(stage, words, LIMITS_S["kernels"] / 2, environment)
            stage.checks.append(_whole(f"check_device --quick on cuda:{gpu}", done))
        return None

    def bandwidths(self, stage: Stage) -> None:
        name = "kernel_bandwidth_gpu: results are right"
        why = self.why_not("kernel_bandwidth_gpu")
        if why:
            return stage.add_not_run([name], why)
        words = [str(self.programs.find("kernel_bandwidth_gpu"))]
        done = self.run(stage, words, LIMITS_S[stage.name], self.programs.environment())
        stage.measurements = bandwidths_in(done.output)
        stage.checks.append(_whole(name, done))

    def engine(self, stage: Stage) -> None:
        why = self.why_not("check_nccl")
        for mesh in self.meshes:
            title = f"nccl {mesh}"
            if why:
                stage.add_not_run([title], why)
                continue
            done = self.run_mesh(stage, mesh, {})
            for what in re.findall(r"^ok  (.+)$", done.output, re.M):
                stage.checks.append(Check(f"{title}: {what}", OK))
            stage.checks.append(_whole(title, done))
            stage.measurements += collective_times_in(done.output, mesh, self.shared)

    def run_mesh(self, stage: Stage, mesh: str, environment: Dict[str, str]) -> Ended:
        library = machine.nccl_library()
        variables = {"SHARE_GPU": "1" if self.shared else "0", **self.programs.environment()}
        if library:
            variables["HSDP_NCCL_LIBRARY"] = library
        words = [str(HERE / "nccl_ranks.sh"), str(self.programs.folder), *mesh.split("x")]
        return self.run(stage, words, MESH_LIMIT_S, {**variables, **environment})

    def rules_of_nccl(self, stage: Stage) -> None:
        """Runs the engine's checks, the training loops and the drills again, with the shim between them and
        NCCL."""
        for mesh in watched_meshes(self.meshes):
            run = functools.partial(self.run_mesh, stage, mesh)
            self.watch(stage, f"nccl {mesh}", self.why_not("check_nccl"), machine.nccl_file(), run)
            for script in ("torch_loop", "sharded_loop", "drills"):
                why = self.no_gpu or self.no_module
                real = machine.nccl_file(beside_torch=True)
                run = functools.partial(self.run_python, stage, f"{script}.py", mesh, 1200)
                self.watch(stage, f"{script} {mesh}", why, real, run)

    def watch(self, stage: Stage, what: str, why: str, real: str,
              run: Callable[[Dict[str, str]], Ended]) -> None:
        """Runs a program with the shim, and checks by the traces that it kept the rules."""
        name = f"{what}: the rules of NCCL"
        shim, reader = self.programs.find(programs.SHIM), HERE / "nccl_trace.py"
        if not why and (shim is None or not reader.exists()):
            why = "the shim was not built"
        if not why and not real:
            why = "libnccl.so.2 not found"
        if why:
            return stage.add_not_run([name], why)
        traces = self.folder / "nccl_traces"
        trace = traces / what.replace(" ", "_")
        shutil.rmtree(trace, ignore_errors=True)  # otherwise an earlier run's traces would count
        trace.mkdir(parents=True)
        done = run({"HSDP_NCCL_LIBRARY": str(shim), "HSDP_NCCL_SHIM_OVER": real,
                    "HSDP_NCCL_SHIM_TRACE": str(trace)})
        if done.status == 0:
            report = str(trace) + ".json"
            done = self.run(stage, [sys.executable, str(reader), str(trace), "--json", report], 120)
        stage.checks.append(_whole(name, done))
        return None

    def run_python(self, stage: Stage, script: str, mesh: str, limit_s: float,
                   environment: Optional[Dict[str, str]] = None) -> Ended:
        words = [sys.executable, str(HERE / script), "--device", "cuda", "--mesh", mesh]
        variables = {**self.programs.environment(with_package=True), **(environment or {})}
        return self.run(stage, words, limit_s, variables)

    def scripts(self, script: str, meshes: List[str], limit_s: float, stage: Stage) -> None:
        why = self.no_gpu or self.no_module
        for mesh in meshes:
            names = [*titles(script, mesh)]
            if why:
                stage.add_not_run(names, why)
                continue
            done = self.run_python(stage, f"{script}.py", mesh, limit_s)
            self.add_verdicts(stage, done, names, f"{script}.py {mesh}")
            stage.notes += re.findall(r"^  (rank \d+: .+)$", done.output, re.M)

    def step_times(self, stage: Stage) -> None:
        # Each rank holds three models; a small GPU has room for two ranks.
        for mesh in ("1x1", "1x2" if self.shared else watched_meshes(self.meshes)[0]):
            name = f"step_times.py {mesh}"
            why = self.no_gpu or self.no_module
            if why:
                stage.add_not_run([name], why)
                continue
            done = self.run_python(stage, "step_times.py", mesh, 450)
            stage.measurements += values_in(done.output, mesh)
            stage.checks.append(_whole(name, done))
            kind = "1x1" if mesh == "1x1" else "shared" if self.shared else "own"
            stage.notes.append(STEP_NOTES[kind].format(mesh=mesh))
            stage.notes += re.findall(r"^note: (.+)$", done.output, re.M)

    def sanitizer(self, stage: Stage) -> None:
        why = self.why_not("check_device")
        if not why and shutil.which("compute-sanitizer") is None:
            why = "compute-sanitizer not found"
        program, environment = str(self.programs.find("check_device")), self.programs.environment()
        # One check asks for more memory than there is, so a failed API call is no finding.
        sanitize = ["compute-sanitizer", "--report-api-errors", "no", "--error-exitcode", "1"]
        if not why:
            quick = [program, "--quick", "--only", "buffer: zero"]
            if "Device not supported" in self.run(stage, [*sanitize, *quick], 60, environment).output:
                why = "compute-sanitizer does not support this machine's GPU"
        if why:
            return stage.add_not_run(list(SANITIZED), why)
        for name, (tool, *only) in SANITIZED.items():
            words = [*sanitize, "--tool", tool, program, "--quick"] + (["--only", *only] if only else [])
            done = self.run(stage, words, 400, environment)
            if done.status is None:  # running out of time is no finding, as the tool is slow
                stage.add_not_run([name], f"ran out of {done.limit_s:.0f} s")
            else:
                stage.checks.append(_whole(name, done))

    def all_stages(self) -> None:
        self.report.machine = machine.facts()
        if self.programs.manifest:
            shown = ("commit", "python", "cuda", "architectures", "nccl_header")
            self.report.machine["kit"] = {key: self.programs.manifest[key] for key in shown}
        loops = ["1x1", *self.meshes]
        drilled = [mesh for mesh in ("1x2", "2x2", "2x4") if mesh in self.meshes]
        stages: Dict[str, Callable[[Stage], None]] = {
            "build": self.build, "kernels": self.kernels, "kernel bandwidths": self.bandwidths,
            "engine over NCCL": self.engine, "rules of NCCL": self.rules_of_nccl,
            "torch loop": functools.partial(self.scripts, "torch_loop", loops, 600),
            "sharded loop": functools.partial(self.scripts, "sharded_loop", loops, 400),
            "failure drills": functools.partial(self.scripts, "drills", drilled, 1200),
            "step times": self.step_times, "compute-sanitizer": self.sanitizer,
        }
        asked = [name for name in stages if not self.only or name in self.only or name == "build"]
        self.report.stages = [Stage(name) for name in stages]
        for stage in self.report.stages:
            stage.add_not_run([stage.name], NOT_REACHED)
        self.report.write(self.folder)  # replaces an older one, and remains if the machine is lost
        for index, name in enumerate(stages):
            stage = self.report.stages[index] = Stage(name)
            self.log(stage).unlink(missing_ok=True)
            start = time.monotonic()
            if name not in asked:
                stage.add_not_run([name], "left out by --only")
            elif self.end - start < 1:
                stage.add_not_run([name], f"no time was left of --seconds {self.seconds:g}")
            else:
                self.stage_end = start + self.share(name, asked, self.end - start)
                self.run_stage(stage, stages[name])
            stage.seconds = time.monotonic() - start
            stage.log = stage.log if (self.folder / stage.log).exists() else ""
            self.report.write(self.folder)
            print(f"{name}: {stage.verdict}, {stage.seconds:.0f} s", flush=True)
            if self.interrupted:
                break

    def share(self, name: str, asked: List[str], left: float) -> float:
        """Returns the seconds for a stage that leave the later stages their share."""
        later = asked[asked.index(name):]
        return min(1.0, left / sum(LIMITS_S[each] for each in later)) * LIMITS_S[name]

    def run_stage(self, stage: Stage, run: Callable[[Stage], None]) -> None:
        try:
            run(stage)
        except Interrupted as signal:
            self.interrupted = signal.number
            command.end_descendants()
            stage.add_not_run([f"{stage.name}: the rest"], f"ended by {signal.name}")
        if stage.name in SHARING_STAGES and stage.verdict != NOT_RUN:
            stage.notes += [SHARED_NOTE] if self.shared else []

    def status(self) -> int:
        if self.interrupted:
            return 128 + self.interrupted
        if self.report.count(FAILED):
            return 1
        on_gpu = [check for stage in self.report.stages if stage.name != "build" for check in stage.checks]
        return 0 if any(check.verdict == OK for check in on_gpu) else SKIPPED


def _whole(name: str, done: Ended) -> Check:
    """Returns the verdict of a whole program as one check."""
    if done.status == SKIPPED:
        return Check(name, NOT_RUN, done.skipped())
    failures = re.findall(r"^FAILED +(?:[0-9.]+ s  )?(.+)$", done.output, re.M)
    problem = failures[0] if failures and done.problem() else done.problem()
    return Check(name, FAILED if problem else OK, problem, done.seconds)


def parse_arguments(arguments: List[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--prebuilt", type=pathlib.Path, metavar="FOLDER",
                        help="a kit of `make gpu-kit`, or a build folder of tests/gpu from elsewhere")
    parser.add_argument("--report", type=pathlib.Path, metavar="FOLDER",
                        help="where the report and the logs go, default build/gpu-report; beside a "
                        "kit's ./run: report")
    parser.add_argument("--only", nargs="+", metavar="STAGE", default=[], choices=list(LIMITS_S),
                        help="stages to run beside the build: " + ", ".join(LIMITS_S))
    parser.add_argument("--seconds", type=float, default=7200.0, help="for all of it, default 7200")
    asked = parser.parse_args(arguments)
    if asked.prebuilt is not None:
        if not any((asked.prebuilt / name).exists() for name in (programs.MANIFEST, "check_device")):
            parser.error(f"--prebuilt: expected a folder with {programs.MANIFEST} or check_device, got "
                         f"{asked.prebuilt}; make one with `make gpu-kit`")
        asked.prebuilt = asked.prebuilt.resolve()
    if not 0 < asked.seconds < math.inf:
        parser.error(f"--seconds: expected a number above 0, got {asked.seconds:g}")
    if machine.why_bad_architecture():
        parser.error(machine.why_bad_architecture())
    asked.report = (asked.report or ROOT / "build" / "gpu-report").resolve()
    try:
        (asked.report / "logs").mkdir(parents=True, exist_ok=True)
        (asked.report / "report.txt").open("a").close()
    except OSError as error:
        parser.error(f"--report: expected a folder to write to, got {asked.report} ({error.strerror})")
    return asked


def main(arguments: List[str]) -> int:
    asked = parse_arguments(arguments)
    command.raise_on_signals()
    command.adopt_orphans()
    try:
        machine.add_cuda_to_path()
        run = Run(asked)
        run.all_stages()
    except Interrupted as signal:  # it came between two stages
        print(f"ended by {signal.name}", file=sys.stderr)
        return 128 + signal.number
    finally:
        command.end_descendants()
    print(f"\n{run.report.as_text()}\nwritten: {asked.report}/report.txt and report.json")
    return run.status()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
