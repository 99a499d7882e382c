#!/usr/bin/env python3
"""What a clipped spike leaves behind in LocoHop's errors, and what scale_errors() does about it.

It reduces random gradients of norm 1, one of them many times as large, over two replicas and clips them.
For the steps after the spike it prints the error of the clipped gradients relative to their norm, as a
multiple of the error without a spike, once with the hop's errors left alone and once with them scaled.

Usage: hsdp_run -n 2 python tests/bench/loco_spike.py
"""

import numpy as np

import hsdp

COUNT, STEPS, SPIKE, AFTER = 1 << 16, 40, 30, 5
CLIP = 1.0


def errors(mesh, spike, scales):
    """Returns the relative error of each step after the spike."""
    hop = hsdp.quant.LocoHop(error_every=0)
    found = []
    mean = None  # running mean of the clip coefficient
    reducer = hsdp.Reducer(mesh, replica_hop=hop)
    reducer.register("w", (COUNT,), "f32")
    for step in range(STEPS):
        replicas = [np.random.default_rng((step, r)).standard_normal(COUNT, dtype=np.float32)
                    for r in range(mesh.replicate_size)]
        size = (spike if step == SPIKE else 1.0) / np.sqrt(COUNT / mesh.replicate_size)
        wanted = np.mean(replicas, axis=0) * np.float32(size)
        with reducer.microbatch(last=True):
            reducer.gradient_ready("w", replicas[mesh.rank] * np.float32(size))
        coefficient = min(1.0, CLIP / reducer.clip_grad_norm_(CLIP))
        wanted *= min(1.0, CLIP / np.linalg.norm(wanted))
        if step > SPIKE:
            found.append(np.linalg.norm(reducer.shard("w") - wanted) / np.linalg.norm(wanted))
        if scales and mean is not None:
            hop.scale_errors(min(1.0, coefficient / mean))
        mean = coefficient if mean is None else 0.9 * mean + 0.1 * coefficient
    reducer.close()
    return np.array(found[:AFTER])


def main():
    with hsdp.init_mesh(replicate=2, shard=1) as mesh:
        calm = errors(mesh, 1.0, False)
        if mesh.rank == 0:
            print("spike  errors      " + "".join(f"   step +{i + 1}" for i in range(AFTER)))
        for spike in (5.0, 20.0, 100.0):
            for scales in (False, True):
                ratios = errors(mesh, spike, scales) / calm
                if mesh.rank == 0:
                    print(f"{spike:4.0f}x  {'scaled' if scales else 'left alone':12}" +
                          "".join(f"{ratio:10.2f}" for ratio in ratios))


if __name__ == "__main__":
    main()
