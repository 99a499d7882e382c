"""Trains a small network with JAX on a mesh of processes; says so and ends where JAX is missing.

    hsdp_run -n 4 python examples/jax_loop.py

Each rank computes the gradients of its own microbatches and hands them over: JAX arrays are read-only,
and the Reducer takes them through DLPack without a copy. Then it gathers the whole mean and takes the
same step as all others. At the end the loss is compared with that of one process.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import numpy as np

import hsdp

STEPS = 40
MICROBATCHES = 2
EXAMPLES = 16  # in a rank's microbatch
RATE = 0.1


def load_jax() -> Any:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    try:
        jax = importlib.import_module("jax")
    except ImportError:
        print("skipped: JAX is not installed (pip install jax ml_dtypes)")
        sys.exit(0)
    return jax


class Network:
    """The compiled functions of one network; its weights are a tree of dicts."""

    def __init__(self, jax: Any) -> None:
        self._jax = jax
        self.value_and_grad = jax.jit(jax.value_and_grad(self._loss))
        self.update = jax.jit(self._update)

    def weights(self) -> Any:
        normal, key = self._jax.random.normal, self._jax.random.PRNGKey
        return {
            "hidden": {"weight": 0.3 * normal(key(1), (8, 32)), "bias": normal(key(2), (32,))},
            "out": {"weight": 0.2 * normal(key(3), (32, 1))},
        }

    def batch(self, number: int) -> tuple[Any, Any]:
        x = self._jax.random.normal(self._jax.random.PRNGKey(number), (EXAMPLES, 8))
        return x, self._jax.numpy.sin(x[:, :1]) + x[:, 1:2]

    def _loss(self, w: Any, x: Any, y: Any) -> Any:
        hidden = self._jax.numpy.tanh(x @ w["hidden"]["weight"] + w["hidden"]["bias"])
        return ((hidden @ w["out"]["weight"] - y) ** 2).mean()

    def _update(self, weights: Any, gradients: Any) -> Any:
        return self._jax.tree_util.tree_map(lambda w, g: w - RATE * g, weights, gradients)


def train_on_mesh(jax: Any, mesh: hsdp.Mesh) -> list[float]:
    network = Network(jax)
    weights = network.weights()
    leaves, tree = jax.tree_util.tree_flatten_with_path(weights)
    names = [".".join(str(part.key) for part in path) for path, _ in leaves]  # "hidden.weight"
    reducer = hsdp.Reducer(mesh, divide_by="ranks*microbatches")
    for name, (_, leaf) in zip(names, leaves, strict=True):
        reducer.register(name, leaf.shape, leaf.dtype)
    losses = []
    for step in range(STEPS):
        total = 0.0
        for m in range(MICROBATCHES):
            batch = network.batch((step * MICROBATCHES + m) * mesh.size + mesh.rank)
            loss, gradients = network.value_and_grad(weights, *batch)
            with reducer.microbatch(last=m == MICROBATCHES - 1):
                for name, leaf in zip(names, jax.tree_util.tree_leaves(gradients), strict=True):
                    reducer.gradient_ready(name, leaf)
            total += float(loss) / MICROBATCHES
        means = {name: np.empty(leaf.shape, np.float32) for name, (_, leaf) in zip(names, leaves)}
        reducer.gather_gradients(means)
        weights = network.update(weights, jax.tree_util.tree_unflatten(tree, means.values()))
        losses.append(mesh.world.mean(total))
    reducer.close()
    return losses


def train_alone(jax: Any, size: int) -> list[float]:
    """The same training in one process: the mean over all ranks' microbatches."""
    network = Network(jax)
    weights = network.weights()
    losses = []
    for step in range(STEPS):
        count = MICROBATCHES * size
        batches = [network.batch(step * count + i) for i in range(count)]
        x, y = (jax.numpy.concatenate(part) for part in zip(*batches, strict=True))
        loss, gradients = network.value_and_grad(weights, x, y)
        weights = network.update(weights, gradients)
        losses.append(float(loss))
    return losses


def main() -> None:
    jax = load_jax()
    with hsdp.init_mesh(shard=hsdp.job_size()) as mesh:
        losses = train_on_mesh(jax, mesh)
        if mesh.rank > 0:
            return
        alone = train_alone(jax, mesh.size)
        apart = max(abs(one - other) for one, other in zip(losses, alone, strict=True))
        print(
            f"loss {losses[0]:.3f} -> {losses[-1]:.3f} after {STEPS} steps on {mesh.size} ranks, "
            f"{apart:.0e} from one process"
        )
        if not (apart < 1e-5 and losses[-1] < 0.3 * losses[0]):
            raise SystemExit("expected the losses of one process, and that they fall")


if __name__ == "__main__":
    main()
