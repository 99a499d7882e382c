"""Checks that the installed hsdp works: ranks meet, reduce and write what hsdp_check accepts.

Run it with the environment's own Python, whose bin folder must be on the PATH. It needs only NumPy; with torch
it also trains a model.
"""

import importlib.util
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

# Trains attached, at stages 2 and 3, with a clipped norm and a checkpoint.
TORCH_RANK = """
import sys, warnings
warnings.simplefilter("error", RuntimeWarning)  # a torch that is newer than hsdp knows
import torch
import hsdp

results = []
for stage in (2, 3):
    torch.manual_seed(7)
    with hsdp.init_mesh(replicate=2, shard=2) as mesh:
        model = torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
        hsdp.broadcast_parameters(mesh, model)
        reducer = hsdp.Reducer(mesh)
        reducer.attach(model)
        optimizer = hsdp.zero.ShardedOptimizer(
            torch.optim.AdamW, model, reducer, stage=stage, max_grad_norm=1.0, lr=1e-2
        )
        inputs = torch.Generator().manual_seed(mesh.rank)
        for step in range(3):
            for microbatch in range(2):
                x = torch.randn(8, 6, generator=inputs)
                with reducer.microbatch(last=microbatch == 1):
                    (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        rank = mesh.rank
        results.append(optimizer.full_state_dict()["state"][0]["exp_avg"].flatten().tolist())
        reducer.close()
assert results[0] == results[1] and any(results[0]), results
if rank == 0:
    print("torch", torch.__version__)
"""


def run(*command: str) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}")
    return done.stdout


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        os.chdir(folder)  # so that Python imports only installed packages
        (folder / "rank.py").write_text(RANK)
        run("hsdp_run", "-n", "4", sys.executable, "rank.py", "snapshot")
        verdict = run("hsdp_check", "snapshot")
        with_torch = importlib.util.find_spec("torch") is not None
        (folder / "torch_rank.py").write_text(TORCH_RANK)
        trained = run("hsdp_run", "-n", "4", sys.executable, "torch_rank.py") if with_torch else ""
        version = run("hsdp_check", "--version").split()[-1]
        where = run(sys.executable, "-c", "import hsdp; print(hsdp.__version__, hsdp.__file__)").split()
        os.chdir("/")
    assert where[0] == version, (where, version)
    assert where[1].startswith(sys.prefix), f"expected hsdp of {sys.prefix}, got {where[1]}"
    python = f"Python {sys.version.split()[0]}"
    if trained:
        python += f", torch {trained.split()[-1]}"
    print(f"hsdp {version}, {python}: {verdict.splitlines()[-1].strip()}")


main()
