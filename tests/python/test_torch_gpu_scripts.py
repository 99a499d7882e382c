"""The training loops and failure drills of tests/gpu, run on the host engine."""

from __future__ import annotations

import contextlib
import json
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import torch

import hsdp

pytest_plugins = ["warm_python"]
GPU = pathlib.Path(__file__).parents[1] / "gpu"
sys.path.insert(0, str(GPU))
import drills  # noqa: E402
import ranks  # noqa: E402
import sharded_loop  # noqa: E402
import torch_loop  # noqa: E402
from gpu_report.checks import LOCO, LOOPS, PAIRS, SHARDED, titles  # noqa: E402
from gpu_report.lines import NOT_RUN, OK, checks_in, values_in  # noqa: E402
from ranks import Outcome  # noqa: E402


def run(python: pathlib.Path, script: str, *arguments: str, status: int = 0) -> str:
    command = [str(python), str(GPU / script), "--device", "cpu", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def verdicts(python: pathlib.Path, script: str, mesh: str) -> list[str]:
    """The results of all checks of a script, in order."""
    names = [*titles(script, mesh)]
    found = checks_in(run(python, f"{script}.py", "--mesh", mesh), names)
    assert [check.name for check in found] == names
    return [check.verdict for check in found]


@pytest.mark.parametrize("mesh", ["1x1", "2x2"])
def test_loops_equal_their_references(python: pathlib.Path, mesh: str) -> None:
    assert verdicts(python, "torch_loop", mesh) == [OK] * len(LOOPS)


def test_sharded_loops_agree(python: pathlib.Path) -> None:
    assert verdicts(python, "sharded_loop", "2x2") == [
        NOT_RUN if sharded_loop.why_not(name, 2, 2, "cpu") else OK for name in SHARDED
    ]


def test_what_the_sharded_loops_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(sharded_loop.why_not(name, 2, 1, "cuda") for name in PAIRS)
    def fail(mesh: Any, device: Any) -> str:
        raise RuntimeError("no way")

    monkeypatch.setattr(sharded_loop, "one_process", fail)
    monkeypatch.setattr(sharded_loop, "_train", lambda mesh, device, dtype, options: {
        "w": torch.tensor([float("nan") if options.get("stage") == 3 else 1.0])
    })
    monkeypatch.setattr(
        sharded_loop, "why_not", lambda name, *_: "GPU" if name in sharded_loop.NEEDS_GPU else ""
    )
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    done = sharded_loop.all_checks(1, 1, "cpu")
    assert [name for name, _, _ in done] == [*PAIRS, "AdamW as in one process"]
    assert [problem for _, problem, _ in done[1:3]] == ["'w' is off by up to nan"] * 2
    outcomes = [Outcome(0, json.loads(json.dumps(done)), "")]
    tell = sharded_loop._check
    assert tell("t", "gather while step returns", outcomes).verdict == OK
    assert tell("t", "stage 3 as stage 2, fp32", outcomes).detail == "rank 0: 'w' is off by up to nan"
    assert tell("t", "AdamW as in one process", outcomes).detail == "rank 0: RuntimeError: no way"
    assert tell("t", LOCO, outcomes).detail == "one before it raised"
    assert tell("t", LOCO, [Outcome(-9, None, "a")]).detail == "rank 0: exit status -9: a"


def test_lost_and_stopped_ranks_are_survived(python: pathlib.Path) -> None:
    assert verdicts(python, "drills", "2x2") == [OK, OK, NOT_RUN, NOT_RUN]


def test_a_script_that_is_ended_ends_its_ranks() -> None:
    words = [sys.executable, str(GPU / "torch_loop.py"), "--device", "cpu", "--mesh", "1x2"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while len(pids := children.read_text().split()) < 2:
        time.sleep(0.01)
    process.terminate()
    text, _ = process.communicate(timeout=60)
    assert (process.returncode, text) == (128 + signal.SIGTERM, "ended by SIGTERM\n")
    assert not [pid for pid in pids if pathlib.Path("/proc", pid).exists()]


def test_a_wrong_reference_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = torch_loop._factors
    monkeypatch.setattr(torch_loop, "_exact_means", lambda step, size: wrong(step, 0, 0))
    assert "is not the mean" in torch_loop.whole_numbers(1, 1, "cpu", "float32", "f32")


def test_what_a_drill_does_not_accept() -> None:
    good = {"error": "PeerLostError", "text": "rank 1 of 2 was lost", "ranks": [1], "seconds": 1.0,
            "stray": []}
    judge = drills._problem_of_survivor

    def problem(**changes: object) -> str:
        return judge(Outcome(0, {**good, **changes}, ""), "PeerLostError", 1, 10.0)

    assert problem() == ""
    missing = problem(error="", text="no error was raised")
    assert missing == "expected PeerLostError of rank 1, got none: no error was raised"
    assert "got TimeoutError" in problem(error="TimeoutError")
    assert "expected PeerLostError of rank 1" in problem(ranks=[0])
    assert "after 11.0 s, expected it within 10 s" in problem(seconds=11.0)
    assert problem(stray=[48.0]) == "garbage in a result: [48.0]"
    assert judge(Outcome(None, None, "a\nb"), "PeerLostError", 1, 10.0) == "no end in time: a / b"
    assert judge(Outcome(-11, good, ""), "PeerLostError", 1, 10.0) == "exit status -11"


@pytest.mark.parametrize("mesh", ["1x1", "2x2"])
def test_steps_are_timed(python: pathlib.Path, mesh: str) -> None:
    output = run(python, "step_times.py", "--mesh", mesh)
    names = {measured.name for measured in values_in(output)}
    times = {"step_alone", "step_hsdp", "step_fsdp2", "step_hsdp_over_fsdp2"}
    assert names == times | {"host_time_per_parameter_and_step"}
    assert "note:" not in output


def test_wrong_arguments_are_explained(python: pathlib.Path) -> None:
    for script, mesh, message in [
        ("torch_loop.py", "3x1", "expected 1, 2, 4 or 8 ranks, whose means are exact, got 3"),
        ("torch_loop.py", "2*2", "expected a mesh as REPLICATExSHARD, such as 2x4, got '2*2'"),
        ("drills.py", "1x1", "expected at least 2 ranks, one of which is lost, got 1"),
    ]:
        assert message in run(python, script, "--mesh", mesh, status=2)


class Capture:
    """Stands for a CUDA graph: calls of `reducer` during the capture are refused."""

    begun = False

    def capture_begin(self, capture_error_mode: str) -> None:
        assert capture_error_mode == "global"
        Capture.begun = True

    def capture_end(self) -> None:
        Capture.begun = False

    def replay(self) -> None:
        pass


def test_the_steps_of_the_capture_drill(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, where nothing can be captured."""
    monkeypatch.setattr(ranks, "device_of_rank", lambda device: torch.device("cpu"))
    for name in ("synchronize", "_sleep"):
        monkeypatch.setattr(torch.cuda, name, lambda *arguments: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Capture)
    monkeypatch.setattr(torch.cuda, "Stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(drills, "CAPTURE_S", 0.0)
    assert "expected a UsageError about the capture, got: none" in drills.capture_and_step(1, 1)
    take = hsdp.Reducer.gradient_ready

    def refuse(self: hsdp.Reducer, *arguments: Any) -> None:
        if Capture.begun:
            raise hsdp.UsageError("expected a stream that is not being captured")
        take(self, *arguments)

    monkeypatch.setattr(hsdp.Reducer, "gradient_ready", refuse)
    assert drills.capture_and_step(1, 1) == ""
