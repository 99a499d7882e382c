"""Trains a small network with NumPy alone, on a mesh of processes.

    hsdp_run -n 4 python examples/numpy_loop.py

Every rank holds all weights, and computes gradients on its own part of each batch in four microbatches.
The Reducer sums them, bf16 on the wire; each rank updates the slice it owns, with momentum, and the
ranks gather the rest. At the end the loss is compared with that of the same training in one process.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np

import hsdp

Array: TypeAlias = np.ndarray[Any, Any]
Weights: TypeAlias = dict[str, Array]

STEPS = 120
MICROBATCHES = 4
BATCH = 64  # over all ranks and microbatches
RATE, MOMENTUM = 0.05, 0.9


def make_weights() -> Weights:
    random = np.random.default_rng(1)
    shapes = {"hidden.weight": (2, 32), "hidden.bias": (32,), "out.weight": (32, 1), "out.bias": (1,)}
    return {
        name: (random.standard_normal(shape) / math.sqrt(shape[0])).astype(np.float32)
        for name, shape in shapes.items()
    }


def make_batch(step: int) -> tuple[Array, Array]:
    """Points in a square, and a surface over it that the network learns."""
    x = np.random.default_rng([2, step]).uniform(-1, 1, (BATCH, 2)).astype(np.float32)
    y = np.sin(3 * x[:, :1]) * x[:, 1:]
    return x, y


def loss_and_gradients(w: Weights, x: Array, y: Array) -> tuple[float, Weights]:
    hidden = np.tanh(x @ w["hidden.weight"] + w["hidden.bias"])
    error = hidden @ w["out.weight"] + w["out.bias"] - y
    to_out = 2 * error / len(x)
    to_hidden = (to_out @ w["out.weight"].T) * (1 - hidden**2)
    gradients = {
        "hidden.weight": x.T @ to_hidden,
        "hidden.bias": to_hidden.sum(0),
        "out.weight": hidden.T @ to_out,
        "out.bias": to_out.sum(0),
    }
    return float((error**2).mean()), gradients


def train_on_mesh(mesh: hsdp.Mesh) -> float:
    weights = make_weights()
    reducer = hsdp.Reducer(mesh, reduce_dtype="bf16", replica_dtype="f32")
    for name, weight in weights.items():
        reducer.register(name, weight.shape)
    # Losses are means over a microbatch, so the sum is also divided by the number of microbatches.
    reducer.set_gradient_divide_factor(mesh.size * MICROBATCHES)
    momentum = {name: np.zeros(reducer.slice(name).count, np.float32) for name in weights}
    loss = 0.0
    for step in range(STEPS):
        x, y = make_batch(step)
        parts = np.array_split(np.arange(BATCH), mesh.size * MICROBATCHES)
        loss = 0.0
        for m in range(MICROBATCHES):
            part = parts[m * mesh.size + mesh.rank]
            with reducer.microbatch(last=m == MICROBATCHES - 1):
                part_loss, gradients = loss_and_gradients(weights, x[part], y[part])
                for name, gradient in gradients.items():
                    reducer.gradient_ready(name, gradient)
            loss += part_loss / MICROBATCHES
        reducer.clip_grad_norm_(1.0)
        for name, weight in weights.items():
            offset, count = reducer.slice(name)
            momentum[name] = MOMENTUM * momentum[name] + reducer.shard(name)
            weight.reshape(-1)[offset : offset + count] -= RATE * momentum[name]
        reducer.gather_parameters(weights)
        loss = mesh.world.mean(loss)
        if mesh.rank == 0 and step % 20 == 19:
            print(f"step {step + 1:4}: loss {loss:.4f}", flush=True)
    reducer.close()
    return loss


def train_alone() -> float:
    weights = make_weights()
    momentum = {name: np.zeros_like(weight) for name, weight in weights.items()}
    loss = 0.0
    for step in range(STEPS):
        loss, gradients = loss_and_gradients(weights, *make_batch(step))
        norm = math.sqrt(sum(float((g**2).sum()) for g in gradients.values()))
        scale = min(1.0, 1.0 / (norm + 1e-6))
        for name, weight in weights.items():
            momentum[name] = MOMENTUM * momentum[name] + scale * gradients[name]
            weight -= RATE * momentum[name]
    return loss


def main() -> None:
    size = hsdp.job_size()
    replicate = 2 if size % 2 == 0 else 1
    with hsdp.init_mesh(replicate=replicate, shard=size // replicate) as mesh:
        loss = train_on_mesh(mesh)
        if mesh.rank > 0:
            return
        alone = train_alone()
        print(f"loss {loss:.4f} on {mesh.size} ranks, {alone:.4f} in one process")
        if not abs(loss - alone) < 0.02 * alone + 1e-3:
            raise SystemExit("the losses differ by more than rounding to bf16 explains")


if __name__ == "__main__":
    main()
