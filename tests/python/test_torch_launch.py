"""Ranks find each other under every launcher, with and without torch.distributed."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from conftest import LIMIT_S, free_port, is_readable, program

from hsdp.torch.launch.meeting_store import MeetingStore

pytest_plugins = ["warm_python"]
EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "device_mesh.py"
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# Without torch.distributed.
PLAIN = """
import torch, hsdp
torch.set_num_threads(1)
with hsdp.init_mesh(replicate=2, shard=1) as mesh:
    torch.manual_seed(mesh.rank)
    model = torch.nn.Linear(4, 3)
    hsdp.broadcast_parameters(mesh, model, root=1)
    reducer = hsdp.Reducer(mesh)
    reducer.attach(model)
    with reducer.microbatch(last=True):
        model(torch.full((1, 4), float(mesh.rank))).sum().backward()
    reducer.gather_gradients()
    print(f"rank {mesh.rank}: {float(model.weight.grad[0, 0]):g}", flush=True)
    assert not torch.distributed.is_initialized()
"""

# As if each process were alone on its host.
TWO_HOSTS = """
import hsdp
with hsdp.init_mesh(replicate=2, shard=1, timeout_s=60) as mesh:
    x = mesh.world.allocate(1000).numpy()
    x[:] = mesh.rank + 1
    mesh.world.all_reduce(x)
    print(f"rank {mesh.rank}: {x.sum():g}", flush=True)
with hsdp.init_mesh(replicate=1, shard=2) as again:
    assert again.shard_size == 2
"""

WITH_TORCH = "import torch\n"  # starts warm

# Rank 1 is killed once the job has met for the first time.
RESTARTED = """
import os, pathlib, signal, sys, time, torch, hsdp
killed = pathlib.Path(sys.argv[1])
restarted = killed.exists()
with hsdp.init_mesh(replicate=2, shard=1, timeout_s=60) as mesh:
    mesh.world.barrier()
    if restarted:
        count = os.environ["TORCHELASTIC_RESTART_COUNT"]
        print(f"rank {mesh.rank}: met after restart {count}", flush=True)
    elif mesh.rank == 1:
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        time.sleep(60)  # until torchrun ends it: its agent does not count this restart
"""

def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {**kept, "OMP_NUM_THREADS": "1", **allowed}


def run(*command: str) -> str:
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def torchrun(python: pathlib.Path | str, size: int) -> list[str]:
    return [str(python), "-m", "torch.distributed.run", "--nproc-per-node", str(size)]


def test_the_device_mesh_example_under_torchrun(python: pathlib.Path) -> None:
    output = run(*torchrun(python, 4), str(EXAMPLE))
    for rank in range(4):
        assert f"rank {rank} of 2x2: elements" in output


def test_without_torch_distributed(python: pathlib.Path, tmp_path: pathlib.Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text(PLAIN)
    hsdp_run = [program("hsdp_run"), "-n", "2", str(python)]
    launchers = {"torchrun": torchrun(sys.executable, 2), "hsdp_run": hsdp_run}
    if shutil.which("mpirun.openmpi"):
        launch = ["mpirun.openmpi", "--oversubscribe", "--bind-to", "none", "-n", "2"]
        launchers["mpirun"] = [*launch, str(python)]
    for name, launcher in launchers.items():
        output = run(*launcher, str(script))
        assert "rank 0: 0.5" in output and "rank 1: 0.5" in output, name


def test_torch_distributed_under_hsdp_run(python: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "meet.py").write_text(
        "import torch.distributed as dist, hsdp\n"
        "dist.init_process_group('gloo')\n"
        "mesh = dist.device_mesh.init_device_mesh('cpu', (2,))\n"
        "print(hsdp.Reducer(mesh).mesh.size, flush=True)\n"
        "dist.destroy_process_group()\n"
    )
    output = run(program("hsdp_run"), "-n", "2", str(python), str(tmp_path / "meet.py"))
    assert [f"[{rank}] 2" in output for rank in range(2)] == [True] * 2


def run_two_hosts(
    python: pathlib.Path, script: pathlib.Path, *arguments: str, restarts: int = 0,
    of_one_host: dict[str, str] | None = None, **variables: str,
) -> list[tuple[int, str]]:
    """One torchrun for each "host"; they share nothing but torch's store."""
    command = [
        str(python), "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}",
        "--rdzv-id", "job", "--local-addr", "127.0.0.1", "--max-restarts", str(restarts), str(script),
        *arguments,
    ]
    hosts = [
        subprocess.Popen(command, env={**environment(), **variables, **own}, stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT, text=True)
        for own in (of_one_host or {}, {})
    ]
    try:
        outputs = [host.communicate(timeout=120)[0] for host in hosts]
        return [(host.returncode, output) for host, output in zip(hosts, outputs, strict=True)]
    finally:
        for host in hosts:
            host.kill()


def test_several_hosts_meet_at_the_store_of_torchrun(
    python: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    script = tmp_path / "two_hosts.py"
    script.write_text(TWO_HOSTS)
    trusts = ({"HSDP_TRUST_STORE": "1"}, {"HSDP_SECRET": "same on both"})
    with ThreadPoolExecutor(2) as jobs:
        started = [
            jobs.submit(run_two_hosts, python, script, HSDP_JOB=name, **trust)
            for name, trust in zip("ab", trusts, strict=True)
        ]
        for job, trust in zip(started, trusts, strict=True):
            ended = job.result()
            assert [status for status, _ in ended] == [0, 0], (trust, ended)
            text = ended[0][1] + ended[1][1]
            assert "rank 0: 3000" in text and "rank 1: 3000" in text, (trust, text)


def test_a_job_that_torchrun_restarts_meets_again(python: pathlib.Path, tmp_path: pathlib.Path) -> None:
    script = tmp_path / "restarted.py"
    script.write_text(RESTARTED)
    meetings = {"store": {}, "address": {"HSDP_ADDR": "127.0.0.1", "HSDP_PORT": str(free_port())}}

    def restart(name: str) -> list[tuple[int, str]]:
        return run_two_hosts(python, script, str(tmp_path / name), restarts=1, HSDP_SECRET="same on both",
                             HSDP_JOB=name, **meetings[name])

    with ThreadPoolExecutor(2) as jobs:  # they mostly wait
        for name, ended in zip(meetings, jobs.map(restart, meetings), strict=True):
            assert [status for status, _ in ended] == [0, 0], (name, ended)
            text = ended[0][1] + ended[1][1]
            assert "rank 0: met after restart 0" in text, (name, text)
            assert "rank 1: met after restart 1" in text, (name, text)


@pytest.mark.parametrize("answered", [True, False])
def test_what_an_ended_start_left_in_the_store_is_passed_over(answered: bool) -> None:
    store = dist.HashStore()
    left = dist.PrefixStore("meet", store)
    left.set("attempt", "old")
    if answered:
        left.set("old/all", json.dumps([["nonce"], "stale"]))

    def exchange(rank: int) -> str:
        meeting = MeetingStore(store, "meet", 2, 60)
        return str(meeting.exchange(rank, f"word {rank}", lambda words: " and ".join(words)))

    with ThreadPoolExecutor(2) as ranks:
        first = ranks.submit(exchange, 1)
        while not first.done() and not left.check(["old/rank 1"]):  # it has reached the stale keys
            time.sleep(0.001)
        said = [ranks.submit(exchange, 0).result(), first.result()]
    assert said == ["word 0 and word 1"] * 2


def test_the_store_carries_no_secret_unasked(python: pathlib.Path, tmp_path: pathlib.Path) -> None:
    script = tmp_path / "two_hosts.py"
    script.write_text(WITH_TORCH + TWO_HOSTS)
    for status, output in run_two_hosts(python, script):
        assert status != 0 and "set HSDP_SECRET" in output and "HSDP_TRUST_STORE=1" in output, output


@pytest.mark.parametrize("faulty, named", [
    ({"HSDP_SECRET_FILE": "/nowhere/secret"}, "an HSDP_SECRET_FILE that cannot be read on rank"),
    ({"HSDP_TRUST_STORE": "1"}, "HSDP_TRUST_STORE on rank"),
    ({}, "none on rank"),
])
def test_no_rank_waits_for_one_without_the_secret(
    python: pathlib.Path, tmp_path: pathlib.Path, faulty: dict[str, str], named: str
) -> None:
    script = tmp_path / "two_hosts.py"
    waiting = TWO_HOSTS.replace("timeout_s=60", "timeout_s=1000")  # longer than the test
    script.write_text(WITH_TORCH + waiting)
    ours = {"HSDP_SECRET": "", "HSDP_SECRET_FILE": str(tmp_path / "secret")}
    (tmp_path / "secret").write_text("same on both")
    of_one_host = {**ours, "HSDP_SECRET_FILE": "", **faulty}
    for status, output in run_two_hosts(python, script, of_one_host=of_one_host, **ours):
        assert status != 0 and "expected one source of the secret on every rank" in output, output
        assert named in output, output


def test_without_a_store_the_variables_are_named() -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = subprocess.run([sys.executable, "-c", TWO_HOSTS], env={**environment(), **alone},
                          capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "set HSDP_ADDR and HSDP_PORT" in done.stderr, done.stderr


ENDS = """
import os, sys, torch
print(os.getpid(), flush=True)
sys.stdin.read()
{}
"""


@contextlib.contextmanager
def warm(python: pathlib.Path, end: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A program that ends when its input does, and a descriptor of the process that runs it."""
    command = [str(python), "-c", ENDS.format(end)]
    with subprocess.Popen(
        command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        program = os.pidfd_open(int(process.stdout.readline()))
        yield process, program
        os.close(program)


def test_warm_programs_end_as_others_do(python: pathlib.Path) -> None:
    statuses = {"sys.exit(3)": 3, "raise ValueError": 1, "os.abort()": -6, "os.kill(os.getpid(), 9)": -9}
    with contextlib.ExitStack() as stack:
        started = {end: stack.enter_context(warm(python, end))[0] for end in statuses}
        for process in started.values():
            assert process.stdin is not None
            process.stdin.close()
        assert {end: process.wait() for end, process in started.items()} == statuses


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_a_warm_program(python: pathlib.Path, number: signal.Signals) -> None:
    with warm(python, "") as (process, program):
        process.send_signal(number)
        assert process.wait() == -number and is_readable(program, LIMIT_S)
