"""Thousands of steps of an attached model leave memory, descriptors and threads unchanged."""

from __future__ import annotations

import gc

import pytest
import torch
from conftest import on_mesh
from one_rank import attached_to
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


@on_mesh(1, 2)
def test_two_ranks_do_not_grow(mesh: hsdp.Mesh) -> None:
    model = torch.nn.Linear(16, 40)
    reducer = attached_to(model, mesh, keep_grads=mesh.rank == 0, bucket_bytes=1024)
    steps(reducer, model, WARM_UP_STEPS)
    before = resources()
    steps(reducer, model, STEPS)
    check(list(before), list(resources()))
    reducer.close()


@pytest.mark.parametrize("ends", ["closed", "forgotten"])
def test_attaching_again_and_again_leaves_nothing(ends: str) -> None:
    """Reducers of one model that are closed, and models that are dropped along with their Reducers."""
    model = torch.nn.Linear(64, 64)

    def once(mesh: hsdp.Mesh) -> None:
        mine = model if ends == "closed" else torch.nn.Linear(64, 64)
        reducer = attached_to(mine, mesh)
        with reducer.microbatch(last=True):
            mine(torch.ones(1, 64)).sum().backward()
        reducer.gather_gradients()
        mine.zero_grad()
        if ends == "closed":
            reducer.close()
        else:
            del mine, reducer
            gc.collect()

    gc.collect()
    gc.freeze()  # the objects of torch's import need not be scanned each time
    with hsdp.init_mesh() as mesh:
        for _ in range(50):
            once(mesh)
        before = resources()
        for _ in range(200):
            once(mesh)
        after = resources()
    check(list(before), list(after))
    assert not model.weight._post_accumulate_grad_hooks
