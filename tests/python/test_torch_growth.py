"""Thousands of steps of an attached model leave memory, descriptors and threads as they were."""

from __future__ import annotations

import torch
from conftest import Launcher
from test_growth import STEPS, WARM_UP_STEPS, check, resources

import hsdp


def steps(reducer: hsdp.Reducer, model: torch.nn.Module, count: int) -> None:
    x = torch.ones(2, 16)
    for step in range(count):
        for m in range(2):
            with reducer.microbatch(last=False if m == 0 else None):
                model(x).sum().backward()
        if step % 4 == 0:
            reducer.finish()
            reducer.gather_gradients()
        else:
            reducer.shard("weight").numpy()
        if step % 50 == 0:
            try:
                with reducer.microbatch():
                    model(x).sum().backward()
                    raise KeyError("user code")
            except KeyError:
                pass


def run_steps(shard: int) -> list[list[int]]:
    torch.set_num_threads(1)
    with hsdp.init_mesh(shard=shard) as mesh:
        model = torch.nn.Linear(16, 40)
        reducer = hsdp.Reducer(mesh, bucket_bytes=1024)
        reducer.attach(model, keep_grads=mesh.rank == 0)
        steps(reducer, model, WARM_UP_STEPS)
        before = resources()
        steps(reducer, model, STEPS)
        after = resources()
        reducer.close()
    return [list(before), list(after)]


def test_two_ranks_do_not_grow(ranks: Launcher) -> None:
    for before, after in ranks(2, run_steps, 2):
        check(before, after)


def test_attaching_again_and_again_leaves_nothing() -> None:
    model = torch.nn.Linear(64, 64)

    def once(mesh: hsdp.Mesh) -> None:
        reducer = hsdp.Reducer(mesh)
        reducer.attach(model)
        with reducer.microbatch(last=True):
            model(torch.ones(1, 64)).sum().backward()
        reducer.gather_gradients()
        model.zero_grad()
        if mesh.closed:
            reducer.close()

    with hsdp.init_mesh() as mesh:
        for _ in range(50):
            once(mesh)
        before = resources()
        for _ in range(300):
            once(mesh)
        after = resources()
    check(list(before), list(after))
    assert len(model.weight._post_accumulate_grad_hooks) == 0
