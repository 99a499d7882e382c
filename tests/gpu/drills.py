"""Failures on purpose: a rank that is killed, one that stops, no memory, a CUDA graph capture.

    drills.py --device cpu|cuda [--mesh 1x2]

It starts the ranks itself and prints a verdict for each drill. Exit status: 0 if all hold, else 1. The last
two need a GPU. In each drill every rank must get an error in time, and results must hold only right values
or NaN.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import check_script
import ranks
import torch
from ranks import Outcome

import hsdp

NAMES = [f"w{i}" for i in range(8)]
COUNT = 40_000
# NCCL takes a minute to connect eight processes on eight GPUs, and the timeout bounds that, too.
TIMEOUT_S = {"cpu": 4.0, "cuda": 60.0}
LIMIT_S = {"cpu": 150.0, "cuda": 300.0}
GRACE_S = {"cpu": 10.0, "cuda": 30.0}  # a later error counts as late
KEPT_FREE_BYTES = 8 << 20
MEMORY_STEP_ELEMENTS = 64 << 20
# A GPU spins for half a second or more. The capture is shorter, so it ends while the step still waits.
BUSY_CYCLES = 1_000_000_000
CAPTURE_S = 0.2


def _step(reducer: Any, device: Any, scale: float, in_the_middle: Callable[[], None]) -> None:
    with reducer.microbatch(last=True):
        for index, name in enumerate(NAMES):
            if index == len(NAMES) // 2:
                in_the_middle()
            value = scale * (reducer.mesh.rank + 1)
            reducer.gradient_ready(name, torch.full((COUNT,), value, device=device))


def _shards(reducer: Any) -> list[Any]:
    return [torch.from_dlpack(reducer.shard(name)) for name in NAMES]


def _stray_values(tensors: list[Any], allowed: list[float]) -> list[float]:
    """Returns up to five of the values that are neither allowed nor NaN."""
    values = torch.cat([t.float().flatten().cpu() for t in tensors]) if tensors else torch.empty(0)
    right = values.isnan()
    for value in allowed:
        right |= values == value
    return [float(v) for v in values[~right].unique()[:5]]


def lose_last_rank(replicate: int, shard: int, on: str, signal_number: int) -> Any:
    """Runs one rank. The last rank sends itself the signal in the middle of its second step."""
    device = ranks.device_of_rank(on)
    mesh = hsdp.init_mesh(replicate, shard, device=device, timeout_s=TIMEOUT_S[on])
    reducer = hsdp.Reducer(mesh, bucket_bytes=2 * 4 * COUNT)
    for name in NAMES:
        reducer.register(name, (COUNT,))
    _step(reducer, device, 1.0, lambda: None)
    means = [scale * (mesh.size + 1) / 2 for scale in (1.0, 16.0)]
    if _stray_values(_shards(reducer), means[:1]):
        return {"error": "", "text": "the first step is wrong"}

    def leave() -> None:
        if mesh.rank == mesh.size - 1:
            if device.type == "cuda":
                torch.cuda.synchronize()  # so that the first buckets are on their way
            os.kill(os.getpid(), signal_number)

    seen = []  # without the first step's shards, which the second step may overwrite
    start = time.monotonic()
    try:
        _step(reducer, device, 16.0, leave)
        seen += _shards(reducer)
        if device.type == "cuda":
            torch.cuda.synchronize()
        reducer.found_inf()
        return {"error": "", "text": "no error was raised"}
    except hsdp.Error as error:
        name, text, at_fault = type(error).__name__, str(error), list(error.ranks)
    found: dict[str, Any] = {"error": name, "text": text, "ranks": at_fault}
    found["seconds"] = time.monotonic() - start
    try:
        seen += _shards(reducer)  # the last finished result, or the error once more
    except hsdp.Error:
        pass
    found["stray"] = _stray_values(seen, means)
    return found


def _lost(mesh: str, device: str, signal_number: int, error: str, limit_s: float) -> str:
    last = math.prod(ranks.mesh_of(mesh)) - 1
    outcomes = ranks.run_ranks(
        lose_last_rank, mesh, [device, signal_number], device, LIMIT_S[device], victim=last
    )
    problems = [_problem_of_survivor(outcome, error, last, limit_s) for outcome in outcomes[:-1]]
    return ranks.problems_of([Outcome(0, problem, "") for problem in problems])


def _problem_of_survivor(outcome: Outcome, error: str, victim: int, limit_s: float) -> str:
    got = outcome.result
    if outcome.status != 0 or got is None:
        return outcome.problem()
    if got["error"] != error or got["ranks"] != [victim] or f"rank {victim} of" not in got["text"]:
        return f"expected {error} of rank {victim}, got {got['error'] or 'none'}: {got['text']}"
    if got["seconds"] > limit_s:
        return f"{error} after {got['seconds']:.1f} s, expected it within {limit_s:g} s"
    return f"garbage in a result: {got['stray']}" if got["stray"] else ""


def kill(mesh: str, device: str) -> str:
    return _lost(mesh, device, signal.SIGKILL, "PeerLostError", GRACE_S[device])


def stop(mesh: str, device: str) -> str:
    return _lost(mesh, device, signal.SIGSTOP, "TimeoutError", TIMEOUT_S[device] + GRACE_S[device])


def _fill_memory() -> list[Any]:
    """Allocates until no block of KEPT_FREE_BYTES is left on this GPU."""
    held = []
    size = torch.cuda.mem_get_info()[0]
    while size > KEPT_FREE_BYTES:
        try:
            held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
    return held


def fill_and_step(replicate: int, shard: int) -> list[str]:
    """Runs one rank; the first rank leaves no memory for the Reducer. Returns how that step and the next end."""
    device = ranks.device_of_rank("cuda")
    mesh = hsdp.init_mesh(replicate, shard, device=device, timeout_s=TIMEOUT_S["cuda"])
    reducer = hsdp.Reducer(mesh)
    reducer.register("w", (MEMORY_STEP_ELEMENTS,))
    gradient = torch.ones(MEMORY_STEP_ELEMENTS, device=device)
    mesh.world.barrier()  # ranks that share the GPU have allocated their gradients
    held = _fill_memory() if mesh.rank == 0 else []
    mesh.world.barrier()
    told = []
    for _ in range(2):
        try:
            with reducer.microbatch(last=True):
                reducer.gradient_ready("w", gradient)
            shard_of_w = torch.from_dlpack(reducer.shard("w"))
            torch.cuda.synchronize()
            told.append("wrong" if _stray_values([shard_of_w], [1.0]) else "right")
        except (hsdp.Error, torch.OutOfMemoryError) as error:
            told.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
        held.clear()
        torch.cuda.empty_cache()
        mesh.world.barrier()  # no rank tries again before the memory is free
    return told


def out_of_memory(mesh: str, device: str) -> str:
    outcomes = ranks.run_ranks(fill_and_step, mesh, [], device, LIMIT_S[device])
    problems = []
    fulls = []
    for rank, outcome in enumerate(outcomes):
        if outcome.status != 0 or not outcome.result:
            problems.append(f"rank {rank}: {outcome.problem()}")
            continue
        full, freed = outcome.result
        fulls.append(full)
        told = f"rank {rank}: full: {full}; freed: {freed}"
        print(f"  {told}", flush=True)
        if full == "wrong" or freed != "right":
            problems.append(told)
    if len({full == "right" for full in fulls}) > 1:
        problems.append("some ranks went on without the others: " + "; ".join(fulls))
    return "; ".join(problems)


def capture_and_step(replicate: int, shard: int) -> str:
    """Runs one rank and returns what is wrong, or nothing. All ranks capture while their GPUs still have a step
    to do, so that the threads that watch its collectives query events during the capture. CUDA treats such a
    query, from any thread, as an error that invalidates the capture."""
    device = ranks.device_of_rank("cuda")
    mesh = hsdp.init_mesh(replicate, shard, device=device, timeout_s=TIMEOUT_S["cuda"])
    reducer = hsdp.Reducer(mesh)
    reducer.register("w", (1000,))
    gradient = torch.full((1000,), 3.0, device=device)
    doubled = torch.zeros_like(gradient)

    def step() -> None:
        with reducer.microbatch(last=True):
            reducer.gradient_ready("w", gradient)

    step()  # otherwise the first step's set-up would fall into the capture
    torch.cuda.synchronize()
    mesh.world.barrier()
    torch.cuda._sleep(BUSY_CYCLES)
    step()
    refused = ""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(capture_error_mode="global")
        try:
            reducer.begin_microbatch(last=True)
            reducer.gradient_ready("w", gradient)
        except hsdp.UsageError as error:
            refused = str(error)
        doubled.add_(gradient, alpha=2)
        time.sleep(CAPTURE_S)
        graph.capture_end()
    try:
        reducer.end_microbatch()
    except hsdp.Error:
        pass  # expected, as the gradient is missing
    reducer.discard()
    if "captured" not in refused:
        return f"expected a UsageError about the capture, got: {refused or 'none'}"
    torch.cuda.synchronize()
    graph.replay()
    if doubled.ne(6.0).any():
        return "the graph does not give what was captured"
    step()
    if torch.from_dlpack(reducer.shard("w")).ne(3.0).any():
        return "the step after the capture is wrong"
    return ""


def capture(mesh: str, device: str) -> str:
    return ranks.problems_of(ranks.run_ranks(capture_and_step, mesh, [], device, LIMIT_S[device]))


def _why_not(name: str, device: str) -> str:
    needs_gpu = device == "cpu" and name in ("out of memory", "capture")
    return "it needs a GPU; use --device cuda" if needs_gpu else ""


def _run_drill(name: str, mesh: str, device: str) -> str:
    drill = {"kill": kill, "stop": stop, "out of memory": out_of_memory, "capture": capture}[name]
    return drill(mesh, device)


def main() -> int:
    expected = "at least 2 ranks, one of which is lost"
    return check_script.main(
        "Failures on purpose.", "1x2", expected, lambda size: size >= 2, "drills", _run_drill, _why_not
    )


if __name__ == "__main__":
    sys.exit(main())
