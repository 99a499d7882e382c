"""Whether the hsdp that is installed here works: ranks meet, reduce and write what hsdp_check accepts.

Run it with the environment's own Python, whose bin folder is on the PATH. It needs NumPy alone.
"""

import os
import pathlib
import subprocess
import sys
import tempfile

RANK = """
import sys
import numpy as np
import hsdp

with hsdp.init_mesh(replicate=2, shard=2) as mesh:
    reducer = hsdp.Reducer(mesh, reduce_dtype="bf16")
    reducer.register("weight", (6, 4))
    for last in (False, True):
        with reducer.microbatch(last=last):
            reducer.gradient_ready("weight", np.full((6, 4), mesh.rank, np.float32))
    assert np.asarray(reducer.shard("weight")).tolist() == [3.0] * 12  # (0 + 1 + 2 + 3) * 2 / 4
    reducer.save_snapshot(sys.argv[1], step=1)
"""


def run(*command: str) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}")
    return done.stdout


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        os.chdir(folder)  # so that only what is installed can be imported
        (folder / "rank.py").write_text(RANK)
        run("hsdp_run", "-n", "4", sys.executable, "rank.py", "snapshot")
        verdict = run("hsdp_check", "snapshot")
        version = run("hsdp_check", "--version").split()[-1]
        where = run(sys.executable, "-c", "import hsdp; print(hsdp.__version__, hsdp.__file__)").split()
        os.chdir("/")
    assert where[0] == version, (where, version)
    assert where[1].startswith(sys.prefix), f"expected hsdp of {sys.prefix}, got {where[1]}"
    print(f"hsdp {version}, Python {sys.version.split()[0]}: {verdict.splitlines()[-1].strip()}")


main()
