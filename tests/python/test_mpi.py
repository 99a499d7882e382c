"""The engine mpi, if the build has it: under its MPI's mpirun, and its errors elsewhere."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest
from one_rank import add_gradient, registered

import hsdp

SCRIPT = """
import os
import numpy as np
import hsdp
mesh = hsdp.init_mesh(replicate=2, shard=1, engine="mpi", timeout_s=60)
assert mesh.world.transport == "mpi"
reducer = hsdp.Reducer(mesh, reduce_dtype="bf16")
reducer.register("weight", (64, 3))
for microbatch in range(3):
    with reducer.microbatch(last=microbatch == 2):
        reducer.gradient_ready("weight", np.full((64, 3), mesh.rank, np.float32))
print(f"rank {mesh.rank}: {reducer.shard('weight')[0]:g}", flush=True)
if os.environ["CLOSES"] == "yes":
    reducer.close()
    mesh.close()
"""


def has_mpi() -> bool:
    """A world of one needs the engine, but no MPI."""
    try:
        hsdp.init_mesh(engine="mpi").close()
    except hsdp.UsageError as error:
        assert "-DHSDP_MPI=ON" in str(error)
        return False
    return True


def run_on_two(
    script: pathlib.Path, folder: pathlib.Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs with the mpirun of the MPI that this process has loaded."""
    loaded = pathlib.Path("/proc/self/maps").read_text()
    name = "mpirun.mpich" if "libmpich" in loaded else "mpirun.openmpi"
    if not has_mpi() or not shutil.which(name):
        pytest.skip(f"needs a build with MPI, and {name}")
    settings = [] if name == "mpirun.mpich" else ["--oversubscribe", "--bind-to", "none"]
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return subprocess.run(
        [name, *settings, "-n", "2", sys.executable, str(script)], capture_output=True, text=True,
        timeout=100, cwd=folder, env={**os.environ, **allowed, **environment},
    )


# A program that forgets to close still ends well: MPI is finalized at exit.
@pytest.mark.parametrize("closes", ["yes", "no"])
def test_a_reducer_under_mpirun(tmp_path: pathlib.Path, closes: str) -> None:
    script = tmp_path / "reduce.py"
    script.write_text(SCRIPT)
    done = run_on_two(script, CLOSES=closes)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 0: 1.5" in done.stdout and "rank 1: 1.5" in done.stdout


def test_a_wait_table_and_a_trace_under_mpirun(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "reduce.py"
    script.write_text(
        "import time\n" + SCRIPT.replace("        red", "        time.sleep(mesh.rank / 10)\n        red").replace(
            'if os.environ["CLOSES"]',
            'print("straggler", reducer.wait_table().straggler, flush=True)\n'
            'with reducer.trace("trace.json"):\n'
            '    with reducer.microbatch():\n'
            '        reducer.gradient_ready("weight", np.zeros((64, 3), np.float32))\n'
            'if os.environ["CLOSES"]',
        )
    )
    done = run_on_two(script, CLOSES="yes", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("straggler 1") == 2
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["pid"] for e in events if e["name"] == "replica_hop 0"] == [0, 1]


# Without any setting, on the engine that is chosen by default.
def test_an_example_under_mpirun() -> None:
    example = pathlib.Path(__file__).parents[2] / "examples" / "numpy_loop.py"
    done = run_on_two(example)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "on 2 ranks" in done.stdout


def test_an_exception_on_one_rank_ends_the_job(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "reduce.py"
    script.write_text(SCRIPT.replace("mesh.rank, np.float32", "[0][microbatch - mesh.rank], np.float32"))
    done = run_on_two(script, CLOSES="no")
    assert done.returncode != 0
    assert "IndexError" in done.stderr


def test_a_world_of_one_needs_no_mpi() -> None:
    if not has_mpi():
        pytest.skip("needs a build with MPI")
    with hsdp.init_mesh(engine="mpi") as mesh:
        reducer = registered(mesh, "weight", (4,))
        add_gradient(reducer, "weight", np.full(4, 2.5, np.float32), last=True)
        np.testing.assert_array_equal(np.asarray(reducer.shard("weight")), np.full(4, 2.5, np.float32))
