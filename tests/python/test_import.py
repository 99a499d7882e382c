"""`import hsdp` needs NumPy and nothing else, and is quick."""

from __future__ import annotations

import subprocess
import sys

ALONE = """
import sys
for name in ("torch", "jax", "ml_dtypes", "matplotlib", "tqdm"):
    sys.modules[name] = None  # as if it were not installed
import numpy as np
import hsdp
with hsdp.init_mesh() as mesh:
    reducer = hsdp.Reducer(mesh)
    reducer.register("w", 3, "f16")
    with reducer.microbatch(last=True):
        reducer.gradient_ready("w", np.ones(3, np.float16))
    assert reducer.shard("w").numpy().tolist() == [1, 1, 1]
    try:
        mesh.world.allocate(3, "bf16").numpy()
    except hsdp.UsageError as error:
        assert "ml_dtypes" in str(error), error
    else:
        raise AssertionError("bf16 without ml_dtypes")
    for needs_torch in (
        lambda: hsdp.torch, lambda: reducer.attach(None), lambda: hsdp.broadcast_parameters(mesh, 0)
    ):
        try:
            needs_torch()
        except ImportError as error:
            assert "pip install 'torch>=2.9'" in str(error), error
        else:
            raise AssertionError("torch without torch")
    reducer.close()
print("fine")
"""

LIGHT = """
import sys
import hsdp
print([name for name in ("torch", "jax", "ml_dtypes", "matplotlib") if name in sys.modules])
"""


def output_of(source: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_numpy_is_enough() -> None:
    assert output_of(ALONE) == "fine"


def test_nothing_else_is_imported() -> None:
    assert output_of(LIGHT) == "[]"
