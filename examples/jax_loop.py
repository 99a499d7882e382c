"""Trains a linear model with JAX on a mesh of processes; says so and ends where JAX is missing.

    hsdp_run -n 4 python examples/jax_loop.py

JAX arrays are read-only; the Reducer takes them by DLPack without a copy. Each rank computes the
gradients of its own examples, gathers the whole mean and takes the same step.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import numpy as np

import hsdp

STEPS = 60
EXAMPLES = 32  # per rank
RATE = 0.2


def load_jax() -> Any:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    try:
        jax = importlib.import_module("jax")
    except ImportError:
        print("skipped: JAX is not installed (pip install hsdp[jax])")
        sys.exit(0)
    return jax


def train(jax: Any, mesh: hsdp.Mesh) -> float:
    jnp = jax.numpy
    truth = {"weight": jnp.arange(1.0, 9.0), "bias": jnp.array(3.0)}
    weights = {"weight": jnp.zeros(8), "bias": jnp.array(0.0)}

    def predict(w: Any, x: Any) -> Any:
        return x @ w["weight"] + w["bias"]

    def loss(w: Any, x: Any, y: Any) -> Any:
        return ((predict(w, x) - y) ** 2).mean()

    step = jax.jit(jax.value_and_grad(loss))
    reducer = hsdp.Reducer(mesh)
    for name, value in weights.items():
        reducer.register(name, value.shape, value.dtype)
    mean = {name: np.empty(value.shape, np.float32) for name, value in weights.items()}
    value = 0.0
    for i in range(STEPS):
        x = jax.random.normal(jax.random.PRNGKey(i * mesh.size + mesh.rank), (EXAMPLES, 8))
        value, gradients = step(weights, x, predict(truth, x))
        with reducer.microbatch(last=True):
            for name, gradient in gradients.items():
                reducer.gradient_ready(name, gradient)
        reducer.gather_gradients(mean)
        weights = {name: weights[name] - RATE * mean[name] for name in weights}
    reducer.close()
    return mesh.world.mean(float(value))


def main() -> None:
    jax = load_jax()
    size = hsdp.job_size()
    with hsdp.init_mesh(shard=size) as mesh:
        loss = train(jax, mesh)
        if mesh.rank == 0:
            print(f"loss {loss:.2e} after {STEPS} steps on {mesh.size} ranks")
        if not loss < 1e-3:
            raise SystemExit("the model was not learned")


if __name__ == "__main__":
    main()
