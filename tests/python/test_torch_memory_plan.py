"""memory_plan() before the first step is what stats() counts after some steps, to the byte."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch
from conftest import on_mesh, on_meshes
from one_rank import message_of
from torch import nn

import hsdp
from hsdp.zero import ShardedOptimizer, coalesce_grad_reduction

STEPS = 2
MICROBATCHES = 2
HOPS: dict[str, Any] = {
    "plain": lambda: None,
    "loco": lambda: hsdp.quant.LocoHop(bits=4, group_size=32),
}


def make_model(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(3)
    layers = [nn.Linear(7, 33), nn.GELU(), nn.Linear(33, 20), nn.GELU(), nn.Linear(20, 3)]
    return nn.Sequential(*layers).to(dtype)


def backward(model: nn.Module, dtype: torch.dtype) -> None:
    model(torch.ones(4, 7, dtype=dtype)).float().square().mean().backward()


def require_planned(plan: hsdp.MemoryPlan, stats: hsdp.ReducerStats, reduced: int) -> None:
    """The traffic is that of one step; messages of gathers exist only while these run."""
    got = dataclasses.asdict(stats)
    for key, planned in dataclasses.asdict(plan).items():
        each = {"shard_hop_bytes": reduced * STEPS, "replica_hop_bytes": STEPS}.get(key, 1)
        wanted = 0 if key == "parameter_gather_bytes" else planned * each
        assert got[key] == wanted, f"{key}: planned {wanted}, got {got[key]}"


def check_case(
    mesh: hsdp.Mesh, stage: Any, over: Any, hop: str, in_window: bool, dtype: torch.dtype
) -> None:
    model = make_model(dtype)
    reducer = hsdp.Reducer(mesh, bucket_bytes=512, replica_hop=HOPS[hop]())
    reducer.attach(model)
    options: dict[str, Any] = {}
    if stage == 3:
        options = {"persistence_threshold": 30, "units": [nn.Linear]}
    optimizer = ShardedOptimizer(
        torch.optim.AdamW, model, reducer, stage=stage, shard_over=over, gather_bucket_bytes=1024,
        **options,
    )
    plan = reducer.memory_plan(local_sums="f32" if in_window else None)
    assert plan.optimizer_bytes > 0
    for _ in range(STEPS):
        if in_window:
            with coalesce_grad_reduction(reducer, last=True):
                for _ in range(MICROBATCHES):
                    backward(model, dtype)
        else:
            for m in range(MICROBATCHES):
                with reducer.microbatch(last=m + 1 == MICROBATCHES):
                    backward(model, dtype)
        optimizer.step()
    optimizer.wait_parameters()
    require_planned(plan, reducer.stats(), 1 if in_window or stage == 1 else MICROBATCHES)
    assert reducer.memory_plan(local_sums="f32" if in_window else None) == plan
    optimizer.close()
    reducer.close()


@on_meshes((1, 4), (2, 2), (4, 1))
def test_every_stage_holds_what_was_planned(mesh: hsdp.Mesh) -> None:
    dtypes = itertools.cycle((torch.float32, torch.bfloat16, torch.bfloat16))  # meets every choice
    for case in itertools.product((1, 2, 3), ("shard", "mesh"), HOPS, (False, True)):
        check_case(mesh, *case, next(dtypes))


@on_mesh(1, 2)
def test_syncs_and_states_of_other_optimizers(mesh: hsdp.Mesh) -> None:
    for cls, options in ((torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adam, {"amsgrad": True})):
        model = make_model(torch.float32)
        reducer = hsdp.Reducer(mesh, accumulate_dtype="param")
        reducer.attach(model)
        optimizer = ShardedOptimizer(cls, model, reducer, lr=0.1, **options)
        plan = reducer.memory_plan(local_sums="param")
        for _ in range(STEPS):
            with reducer.microbatch(sync="none"):
                backward(model, torch.float32)
            with reducer.microbatch(last=True):
                backward(model, torch.float32)
            optimizer.step()
        optimizer.wait_parameters()
        require_planned(plan, reducer.stats(), 1)
        optimizer.close()
        held = reducer.memory_plan(local_sums="param").optimizer_bytes
        assert held == reducer.stats().optimizer_bytes, "a closed optimizer makes no states"
        reducer.close()


@on_mesh(1, 1)
def test_what_a_plan_needs_and_shows(mesh: hsdp.Mesh) -> None:
    with hsdp.Reducer(mesh) as reducer:
        assert message_of(lambda: reducer.memory_plan()) == (
            "reducer: memory_plan: expected registered parameters, got none; attach a model or register "
            "parameters first"
        )
        reducer.register("w", (1 << 20,))
        text = message_of(lambda: reducer.memory_plan(local_sums="bf16"))  # type: ignore[arg-type]
        assert text == "reducer: memory_plan: local_sums: expected one of 'f32', 'param', got 'bf16'"
        assert "carry_bytes              4194304 (4.0 MiB)" in str(reducer.memory_plan())
