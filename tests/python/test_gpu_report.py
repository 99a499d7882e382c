"""The report of a run on GPUs. Stand-ins of a few lines replace the programs and the driver."""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).parents[2]
RUN = ROOT / "tests" / "gpu" / "run.py"
sys.path.insert(0, str(RUN.parent))
import run as script  # noqa: E402
from gpu_report import command, lines, programs, record  # noqa: E402
from gpu_report import machine as facts  # noqa: E402

SMI = """case "$*" in
  *--query-gpu=name*) echo "NVIDIA Card, 9.0, 81559 MiB, 580.10"; echo "NVIDIA Card, 9.0, 81559 MiB, 580.10" ;;
  *) echo "GPU0 GPU1 NV18" ;;
esac"""
CHECK_DEVICE = """[ "$2" = --device ] && exit 0  # --quick, on another GPU
if [ "$1" = --list ]; then printf 'first\\nsecond: part\\nthird\\n'; exit 0; fi
echo 'ok       0.01 s  first'
echo 'FAILED   0.02 s  second: part: got 1: want 2'
exit 1"""
BANDWIDTH = """echo 'NVIDIA Card'
echo 'arrays of 64 MiB: device-to-device copy 3000 GB/s read and written'
echo '  pack f32 to bf16                      2850 GB/s   95.0 %  '
echo '  sum 8 rows of bf16, add, divide       1500 GB/s   50.0 %  below the aim of 90 %'"""
CHECK_NCCL = """[ "$RANK" = 0 ] || exit 0
echo "ok  moves"
echo 'exact   16 MiB f32, 2 ranks: reduce_scatter     1.25 ms, all_reduce     2.50 ms'"""
# Importing torch takes seconds in every run.
TORCH = """from types import SimpleNamespace as Names
__version__ = "2.13.0"
version = Names(cuda="13.0")
cuda = Names(nccl=Names(version=lambda: (2, 28, 9)))
distributed = Names(is_nccl_available=lambda: True)
"""


def write_program(path: pathlib.Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def machine(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder with `bin` for the PATH, which contains a driver, `built` check programs, and a torch."""
    for folder in ("bin", "built", "site"):
        (tmp_path / folder).mkdir()
    (tmp_path / "site" / "torch.py").write_text(TORCH)
    write_program(tmp_path / "bin" / "nvidia-smi", SMI)
    write_program(tmp_path / "built" / "check_device", CHECK_DEVICE)
    write_program(tmp_path / "built" / "kernel_bandwidth_gpu", BANDWIDTH)
    write_program(tmp_path / "built" / "check_nccl", CHECK_NCCL)
    return tmp_path


def start(machine: pathlib.Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    folders = ["--prebuilt", str(machine / "built"), "--report", str(machine / "out")]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("NCCL_", "CUDA_", "HSDP_GPU"))}
    path = f"{machine / 'bin'}:/usr/bin:/bin"
    return subprocess.Popen(
        [sys.executable, str(RUN), *folders, *arguments],
        env={**kept, "PATH": path, "PYTHONPATH": str(machine / "site"), "CUDA_HOME": "/nonexistent",
             **variables},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )


def run(machine: pathlib.Path, *arguments: str, **variables: str) -> tuple[int, Any, str]:
    """Returns the exit status, the report as JSON, and everything that was printed."""
    process = start(machine, *arguments, **variables)
    text, _ = process.communicate(timeout=120)
    file = machine / "out" / "report.json"
    report = json.loads(file.read_text()) if file.exists() else None
    return process.returncode, report, text


def stage(report: Any, name: str) -> Any:
    return next(stage for stage in report["stages"] if stage["name"] == name)


def verdicts(report: Any, name: str) -> dict[str, tuple[str, str]]:
    return {c["name"]: (c["verdict"], c["detail"]) for c in stage(report, name)["checks"]}


def test_what_programs_print_is_in_the_report(machine: pathlib.Path) -> None:
    status, report, text = run(machine)
    assert status == 1
    assert verdicts(report, "kernels") == {
        "first": ("ok", ""), "second: part": ("FAILED", "got 1: want 2"),
        "third": ("not run", "check_device did not get there"),
        "check_device --quick on cuda:1": ("ok", ""),
    }
    assert "FAILED   0.02 s  second: part: got 1: want 2" in text
    measured = {m["name"]: m for m in stage(report, "kernel bandwidths")["measurements"]}
    assert measured["copy, 64 MiB"]["value"] == 3000
    assert measured["pack f32 to bf16, 64 MiB"]["note"] == "2850 GB/s"
    assert "below goal" in measured["sum 8 rows of bf16, add, divide, 64 MiB"]["note"]
    assert stage(report, "kernel bandwidths")["verdict"] == "ok"  # a missed goal is not a failure
    nccl = verdicts(report, "engine over NCCL")
    assert set(nccl) == {"nccl 1x2", "nccl 1x2: moves", "nccl 2x1", "nccl 2x1: moves"}
    assert stage(report, "engine over NCCL")["measurements"][0]["value"] == 1.25
    assert not stage(report, "engine over NCCL")["notes"]  # two GPUs: no two ranks share one
    rules = verdicts(report, "rules of NCCL")
    assert rules["nccl 1x2: the rules of NCCL"] == ("not run", "the shim was not built")
    assert {name.split(":")[0] for name in rules} == {
        "nccl 1x2", "nccl 2x1", "torch_loop 1x2", "torch_loop 2x1", "sharded_loop 1x2",
        "sharded_loop 2x1", "drills 1x2", "drills 2x1"}
    reason = "the prebuilt folder has no Python module; make gpu-kit makes one that has"
    assert verdicts(report, "torch loop")["torch 1x2: found_inf"] == ("not run", reason)
    assert verdicts(report, "compute-sanitizer")["memcheck"] == ("not run", "compute-sanitizer not found")
    assert report["machine"]["GPUs"] == ["NVIDIA Card, 9.0, 81559 MiB, 580.10"] * 2
    assert [report["machine"][fact] for fact in ("torch", "torch CUDA", "torch NCCL")] == [
        "2.13.0", "13.0", "2.28.9"]
    assert (machine / "out" / stage(report, "kernels")["log"]).read_text().count("second: part") == 2


def test_without_a_driver_every_check_is_listed(machine: pathlib.Path) -> None:
    (machine / "bin" / "nvidia-smi").unlink()
    status, report, text = run(machine)
    if any(pathlib.Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("this machine has a GPU")
    assert status == 77
    reason = "no NVIDIA driver (nvidia-smi not found)"
    names = ["first", "second: part", "third"]
    assert verdicts(report, "kernels") == dict.fromkeys(names, ("not run", reason))
    assert verdicts(report, "failure drills")["drill 1x2: stop"] == ("not run", reason)
    assert report["totals"] == {"ok": 0, "FAILED": 0, "not run": report["totals"]["not run"]}
    assert f"kernels            not run: {reason}" in text


def test_hidden_gpus_and_one_that_is_shared(machine: pathlib.Path) -> None:
    status, report, _ = run(machine, "--only", "kernels", CUDA_VISIBLE_DEVICES="")
    assert status == 77
    assert verdicts(report, "kernels")["first"] == ("not run", "no GPU (CUDA_VISIBLE_DEVICES hides all)")
    assert verdicts(report, "torch loop") == {"torch loop": ("not run", "left out by --only")}
    status, report, _ = run(machine, "--only", "engine over NCCL", CUDA_VISIBLE_DEVICES="1")
    assert status == 0
    assert {"nccl 1x2", "nccl 2x1", "nccl 2x2"} < set(verdicts(report, "engine over NCCL"))
    assert "says nothing about NVLink" in stage(report, "engine over NCCL")["notes"][0]


def test_a_program_that_dies_or_hangs_has_failed(machine: pathlib.Path) -> None:
    write_program(machine / "built" / "check_device", CHECK_DEVICE.split("echo")[0] + "\nkill -SEGV $$")
    write_program(machine / "built" / "kernel_bandwidth_gpu", "echo started; sleep 60")
    status, report, _ = run(machine, "--only", "kernels", "kernel bandwidths", "--seconds", "8")
    assert status == 1
    assert verdicts(report, "kernels")["check_device"][0] == "FAILED"
    assert "signal 11" in verdicts(report, "kernels")["check_device"][1]
    ((verdict, detail),) = verdicts(report, "kernel bandwidths").values()
    assert verdict == "FAILED" and detail.startswith("no end within")


def test_a_driver_that_is_too_old_is_said(machine: pathlib.Path) -> None:
    text = CHECK_DEVICE.split("echo")[0] + "\necho 'skipped: device: a driver that is too old'; exit 77"
    write_program(machine / "built" / "check_device", text)
    status, report, _ = run(machine)
    assert status == 77
    reason = "device: a driver that is too old"
    assert verdicts(report, "kernels")["third"] == ("not run", reason)
    assert verdicts(report, "engine over NCCL")["nccl 1x2"] == ("not run", reason)


def make_kit(machine: pathlib.Path, **changes: object) -> None:
    kit = machine / "built"
    for folder in ("bin", "lib", "python/hsdp"):
        (kit / folder).mkdir(parents=True)
    for name in ("check_device", "kernel_bandwidth_gpu", "check_nccl"):
        (kit / name).rename(kit / "bin" / name)
    for name in ("libc.so.6", "libstdc++.so.6", "libof_the_kit.so.1"):
        (kit / "lib" / name).touch()
    manifest = {
        "commit": "abc", "python": "3.11.7", "extension_suffix": ".other.so", "cuda": "13.0",
        "architectures": "90", "nccl_header": "2.28.9", "glibc": {"check_device": "2.17"}, "glibcxx": "3.4.9",
    }
    (kit / "manifest.json").write_text(json.dumps({**manifest, **changes}))


def test_a_kit_for_another_python(machine: pathlib.Path) -> None:
    make_kit(machine, python="3.99.1")
    _, report, _ = run(machine, "--only", "torch loop")
    verdict, detail = verdicts(report, "torch loop")["torch 1x1: found_inf"]
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert verdict == "not run"
    assert detail.startswith(f"the module was built for Python 3.99, this one is {here}")
    assert report["commit"] == "abc" and report["machine"]["kit"]["cuda"] == "13.0"
    # The programs borrow only what this machine lacks.
    assert [file.name for file in (machine / "out" / "lib").iterdir()] == ["libof_the_kit.so.1"]


def test_a_kit_for_a_newer_system(machine: pathlib.Path) -> None:
    make_kit(machine, glibc={"check_device": "2.34", "check_nccl": "9.1"}, glibcxx="9.9")
    status, report, _ = run(machine)
    assert status == 77
    assert "the kit needs glibc 9.1 or newer" in verdicts(report, "kernels")["check_device"][1]
    lent = {file.name for file in (machine / "out" / "lib").iterdir()}
    assert lent == {"libof_the_kit.so.1", "libstdc++.so.6"}


def test_wrong_arguments_are_explained(
    machine: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    no_programs = "expected a folder with manifest.json or check_device, got"
    architectures = "expected an architecture such as 90, or several as '80;90', got"
    for arguments, architecture, message in [
        (["--prebuilt", str(machine / "bin")], "", no_programs),
        (["--seconds", "0"], "", "--seconds: expected a number above 0, got 0"),
        (["--seconds", "nan"], "", "--seconds: expected a number above 0, got nan"),
        (["--report", "/proc/nowhere"], "", "--report: expected a folder to write to, got /proc/nowhere"),
        (["--only", "kernel"], "", "invalid choice: 'kernel'"),
        *[([], wrong, f"{architectures} '{wrong}'") for wrong in ("abc", "90;", "9.0")],
    ]:
        monkeypatch.setenv("HSDP_GPU_ARCH", architecture)
        with pytest.raises(SystemExit) as ended:
            script.parse_arguments(arguments)
        assert ended.value.code == 2 and message in capsys.readouterr().err


def test_the_architecture_to_compile_for(machine: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{machine / 'bin'}:/usr/bin:/bin")
    for named in ("90", "80-real;90", "100a", "native"):
        monkeypatch.setenv("HSDP_GPU_ARCH", named)
        assert facts.why_bad_architecture() == "" and facts.architecture() == named
    monkeypatch.delenv("HSDP_GPU_ARCH")
    write_program(machine / "bin" / "nvcc", "echo compute_80; echo compute_90; echo compute_100")
    assert facts.architecture() == "90"
    write_program(machine / "bin" / "nvcc", "echo compute_75; echo compute_80")  # it does not know the GPU yet
    assert facts.architecture() == "80"


def test_what_is_missing_for_a_build(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    check = programs.build_checks(RUN.parent, tmp_path, "90", tmp_path / "log", 10)
    assert check.verdict == lines.NOT_RUN
    missing = "cmake, nvcc, a C++ compiler, make or ninja not found; install what is missing"
    assert check.detail.startswith(missing)
    check = programs.build_module(ROOT, tmp_path, "90", tmp_path / "log", 10)
    assert check.detail.startswith("cmake, nvcc, a C++ compiler, ninja not found; install what is missing")
    for tool in ("nvcc", "c++", "g++", "ninja"):
        write_program(tmp_path / tool, "exit 1")
    write_program(tmp_path / "cmake", "echo cmake version 3.22.1")
    check = programs.build_module(ROOT, tmp_path, "90", tmp_path / "log", 10)
    assert check.detail.startswith("CMake 3.25 or newer is needed, 3.22.1 found; install what is missing")


def test_what_a_build_that_fails_says() -> None:
    error = "-- x\nCMake Error at a.cmake:1 (message):\n  hsdp: expected b,\n  got none\n\n\n-- y\n"
    assert programs.cmake_error(error) == "hsdp: expected b, got none"
    error = "CMake Error at a.cmake:1 (message):\n  no b\nCall Stack (most recent call first):\n  c\n\n\n"
    assert programs.cmake_error(error) == "no b"
    error = "-- x\nCMake Error: CMake cannot find \"Ninja\".\nCMake Error: more\n-- Configuring incomplete\n"
    assert programs.cmake_error(error) == 'CMake cannot find "Ninja".'
    for line in ("a.cpp:1:2: error: no b", "nvcc fatal   : Unsupported gpu architecture 'compute_130'",
                 "/usr/bin/ld: a.o: undefined reference to `b'"):
        ended = command.Ended(2, f"[1/2] a\n{line}\na.cpp:9:9: error: c\nmake: *** [all] Error 2\n", 1.0, 9.0)
        assert ended.first_error() == line
    assert command.Ended(2, "make: *** no rule", 1.0, 9.0).first_error() == "exit status 2: make: *** no rule"
    assert command.Ended(0, "0 error: s", 1.0, 9.0).first_error() == ""


# Replaces CMake: configures, and compiles check_nccl but not check_device.
CMAKE = """case "$*" in
  *--build*) touch "$2/check_nccl"; echo "a.cpp:1:2: error: no b"; exit 2 ;;
  *--version*) echo "cmake version 3.30.0" ;;
esac"""


def test_what_did_not_compile_is_not_run(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for tool, text in [("cmake", CMAKE), ("nvcc", ""), ("c++", ""), ("make", "")]:
        write_program(tmp_path / tool, text)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    build = tmp_path / "build"
    build.mkdir()
    for name in ("check_device", "check_nccl"):
        (build / name).write_text("older")
    check = programs.build_checks(RUN.parent, build, "90", tmp_path / "log", 10)
    assert (check.verdict, check.detail) == (lines.FAILED, "a.cpp:1:2: error: no b")
    there = programs.Programs(build, None)
    assert there.find("check_device") is None and (build / "check_nccl").read_text() == ""


def test_limits_fit_into_the_time_that_there_is(tmp_path: pathlib.Path) -> None:
    asked = script.parse_arguments(["--report", str(tmp_path)])
    work = script.Run(asked)
    names, left = list(script.LIMITS_S), asked.seconds
    for name in names:
        share = work.share(name, names, left)
        assert 0 < share <= script.LIMITS_S[name]
        left -= share
    assert left > -1e-6
    assert work.share("kernels", ["kernels"], 1e6) == script.LIMITS_S["kernels"]


def test_a_sanitizer_that_is_slow_has_found_nothing(machine: pathlib.Path) -> None:
    write_program(machine / "bin" / "compute-sanitizer", 'case "$*" in *--tool*) sleep 60 ;; esac')
    status, report, _ = run(machine, "--only", "compute-sanitizer", "--seconds", "8")
    assert status == 77
    verdict, detail = verdicts(report, "compute-sanitizer")["memcheck"]
    assert verdict == "not run" and detail.startswith("ran out of ")


def test_a_rank_that_runs_out_of_time_is_named(machine: pathlib.Path) -> None:
    write_program(machine / "built" / "check_nccl", '[ "$RANK" = 0 ] || sleep 60')
    status, report, _ = run(machine, "--only", "engine over NCCL", LIMIT_S="1")
    assert status == 1
    assert verdicts(report, "engine over NCCL")["nccl 2x1"] == ("FAILED", "rank 1: ran out of 1 s")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_ends_all_and_leaves_a_report(machine: pathlib.Path, name: str) -> None:
    """Also what a check has started in another session, as ninja's children may be."""
    number = signal.Signals[name]
    (machine / "out").mkdir()
    (machine / "out" / "report.json").write_text("older")
    pids = machine / "pids"
    text = f'setsid sh -c "echo \\$\\$ >>{pids}; sleep 100" & echo $$ >>{pids}; sleep 100'
    write_program(machine / "built" / "check_nccl", f"({text})")
    process = start(machine, "--only", "kernels", "engine over NCCL", "torch loop")
    end = time.monotonic() + 60
    while time.monotonic() < end and (not pids.exists() or len(pids.read_text().split()) < 4):
        time.sleep(0.05)
    process.send_signal(number)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "Traceback" not in text and f"ended by {name}" in text
    report = json.loads((machine / "out" / "report.json").read_text())
    assert verdicts(report, "kernels")["first"] == ("ok", "")
    rest = verdicts(report, "engine over NCCL")["engine over NCCL: the rest"]
    assert rest == ("not run", f"ended by {name}")
    assert verdicts(report, "torch loop") == {"torch loop": ("not run", "not reached")}
    assert not [pid for pid in pids.read_text().split() if is_alive(pid)]


def is_alive(pid: str) -> bool:
    try:
        stat = pathlib.Path("/proc", pid, "stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def test_a_report_begins_with_all_that_is_not_reached(machine: pathlib.Path) -> None:
    (machine / "out").mkdir()
    (machine / "out" / "report.txt").write_text("older")
    write_program(machine / "built" / "kernel_bandwidth_gpu", "sleep 20")
    process = start(machine, "--only", "kernel bandwidths")
    end = time.monotonic() + 60
    while time.monotonic() < end and (machine / "out" / "report.txt").read_text() == "older":
        time.sleep(0.05)
    process.kill()
    process.communicate()
    # The first stage left out after a failure says "not reached", the ones after it "as above".
    report = json.loads((machine / "out" / "report.json").read_text())
    assert verdicts(report, "kernel bandwidths") == {"kernel bandwidths": ("not run", "not reached")}


def test_a_reason_is_said_once() -> None:
    made = record.Report("today", "abc")
    stages = made.stages = [record.Stage(name) for name in ("mixed", "first", "second")]
    stages[0].checks.append(lines.Check("ran", lines.OK))
    for stage in stages:
        stage.add_not_run(["a", "b"], "no GPU")
    text = made.as_text()
    assert "  not run  a: no GPU\n  not run  b: as above\n" in text
    assert "\nfirst: not run: no GPU (0 s)\n" in text and "\nsecond: not run: as above (0 s)\n" in text
    assert "  first   not run: no GPU\n  second  not run: as above\n" in text


def test_a_goal_stands_beside_its_figure() -> None:
    fast, slow = lines.values_in("value host_time_per_parameter_and_step 1.5 us\n"
                                 "value host_time_per_parameter_and_step 2.5 us\n", "1x1")
    assert (fast.name, fast.note) == ("host_time_per_parameter_and_step, 1x1", "goal: at most 2 us")
    assert slow.note == "below goal (at most 2 us)"


def test_a_command_ends_with_all_it_started(tmp_path: pathlib.Path) -> None:
    log = tmp_path / "log.txt"
    done = command.run(["sh", "-c", "echo begun; sleep 50 & sleep 50"], log, 1.0)
    assert done.status is None and done.problem() == "no end within 1 s"
    assert log.read_text() == "$ sh -c echo begun; sleep 50 & sleep 50\nbegun\n"
    assert command.run(["/nonexistent"], log, 1.0).status == 127


LIBRARY = "int ncclGetVersion() { return 0; } int ncclCommRegister() { return 0; }"
LOOK_UP = """#include <dlfcn.h>
int main(int count, char** words) {
  void* library = dlopen(words[1], RTLD_LAZY);
  return !library ? 2 : dlsym(library, "ncclCommRevoke") ? 1 : 0;
}"""


@pytest.mark.skipif("HSDP_NCCL_SHIM" not in os.environ, reason="run by ctest, which names the shim")
def test_the_shim_has_revoke_where_the_library_below_has_it(tmp_path: pathlib.Path) -> None:
    """A program that called it would fail over an NCCL before 2.28.7."""
    def compiled(name: str, text: str, *options: str) -> str:
        (tmp_path / f"{name}.c").write_text(text)
        words = ["cc", str(tmp_path / f"{name}.c"), "-o", str(tmp_path / name), *options, "-ldl"]
        subprocess.run(words, check=True)
        return str(tmp_path / name)

    program = compiled("look_up", LOOK_UP)
    newer = LIBRARY + " int ncclCommRevoke() { return 0; }"
    for name, text, found in [("older", LIBRARY, 0), ("newer", newer, 1)]:
        over = compiled(name, text, "-shared", "-fPIC")
        words = [program, os.environ["HSDP_NCCL_SHIM"]]
        assert subprocess.run(words, env={**os.environ, "HSDP_NCCL_SHIM_OVER": over}).returncode == found


# Sources that tests/gpu, as a separate project, does not need. Its other lists are folders.
LEFT_OUT = {
    "hsdp": "compare flight_record row_reducer snapshot trace validate",
    "hsdp/comm": "connect_world descriptor_limit no_mpi no_nccl retry",
    "hsdp/comm/control": "control_frames control_hub control_hub_watch control_link control_loop "
                         "control_loop_watch control_member control_relay control_state control_tree "
                         "descriptor_broker descriptor_channel process_control process_watch rank_control "
                         "thread_control wait_slots",
    "hsdp/comm/host": "control_reduce host_allocation host_board host_direct host_engine host_group "
                      "host_memory host_piped host_world multicast multicast_copy piped_copy piped_reduce "
                      "ring_channel ring_layout shared_segment socket_waiter staged_reduce tcp_channel "
                      "tcp_handshake tcp_links tile_plan",
    "quant": "dequantize_simd error_state hop_errors hop_figures hop_state loco_exchange loco_hop loco_options "
             "no_device_quantize quantize_simd",
    "zero": "adamw adamw_simd coalesced_window no_device_adamw parameter_check "
            "parameter_gather round_records stored_slice unit_check unit_gather",
}


def test_no_source_is_forgotten_where_the_checks_are_a_project_of_their_own() -> None:
    """Without nvcc no other test notices that they do not link."""
    listed = re.findall(r"[\w/]+", (RUN.parent / "CMakeLists.txt").read_text())
    known = {word.rpartition("/")[2] for word in listed}
    for folder, left_out in LEFT_OUT.items():
        files = {file.stem for file in (ROOT / folder).iterdir() if file.suffix in (".cpp", ".cu")}
        assert files - known - set(left_out.split()) == set(), "add them to tests/gpu/CMakeLists.txt, or here"
        assert set(left_out.split()) <= files, "gone"
