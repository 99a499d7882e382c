"""float64 parameters beside others: none of their values passes through fp32. test_torch_complex.py trains
some."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from conftest import on_mesh, on_meshes
from exact_steps import UNIT, mean_inputs, released, require_equal, run_backward, values
from one_rank import attached_to

import hsdp
from hsdp.zero import ShardedOptimizer


class Wide(torch.nn.Module):
    """Its loss is linear in its parameters, so gradients are the inputs, and their sums are exact."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.matrix = torch.nn.Parameter(torch.randn(7, 5, dtype=torch.float64, generator=generator))
        self.narrow = torch.nn.Parameter(torch.randn(9, generator=generator))
        self.turned = torch.nn.Parameter(torch.randn(11, 3, dtype=torch.float64, generator=generator).T)
        self.last = torch.nn.Parameter(torch.randn((), dtype=torch.float64, generator=generator))

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return torch.stack([(p * x).sum().double() for p, x in zip(self.parameters(), inputs, strict=True)]).sum()


def inputs_of(step: int, microbatch: int, rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * microbatch + rank)

    def one(p: torch.Tensor) -> torch.Tensor:
        whole = torch.randint(-4, 5, p.shape, generator=generator).to(p.dtype)
        parts = torch.randint(0, 1 << 30, p.shape, generator=generator).double() * UNIT
        return whole + parts if p.dtype is torch.float64 else whole

    return [one(p) for p in Wide().parameters()]


def mean_gradients(step: int, size: int) -> list[torch.Tensor]:
    return mean_inputs(inputs_of, step, size)


def backward(model: Any, reducer: hsdp.Reducer, mesh: hsdp.Mesh, step: int) -> None:
    run_backward(inputs_of, model, reducer, mesh, step)


@on_meshes((1, 1), (1, 2), (2, 2))
def test_gathered_gradients_are_the_means_in_f64(mesh: hsdp.Mesh) -> None:
    for options in ({}, {"reduce_dtype": "bf16", "replica_dtype": "bf16"}, {"layout": "dim0"}, {"layout": "whole"}):
        with attached_to(model := Wide(), mesh, **options) as reducer:
            backward(model, reducer, mesh, 0)
            assert np.asarray(reducer.shard("matrix")).dtype == np.float64
            reducer.gather_gradients()
            grads = [p.grad for p in model.parameters()]
            want = mean_gradients(0, mesh.size)
            wide = [i for i, p in enumerate(model.parameters()) if p.dtype is torch.float64]
            require_equal([grads[i] for i in wide], [want[i] for i in wide])
            norm = float(reducer.clip_grad_norm_(1.0))
            if not options:  # a 16-bit wire rounds the other gradients
                squares = sum(float(w.double().square().sum()) for w in want)
                assert norm == pytest.approx(squares**0.5, rel=1e-12)
            factor = 1.0 / (norm + 1e-6)
            require_equal([model.get_parameter(n).grad for n in ("matrix", "turned")],
                          [want[i] * factor for i in (0, 2)])


@on_mesh(1, 2)
def test_arrays_of_numpy(mesh: hsdp.Mesh) -> None:
    with hsdp.Reducer(mesh) as reducer:
        reducer.register("w", (6,), "f64")
        for last in (False, True):
            with reducer.microbatch(last=last):
                reducer.gradient_ready("w", np.full(6, 1 + UNIT + mesh.rank))
            if not last:
                assert np.asarray(reducer.partial_shard("w")).tolist() == [(3 + 2 * UNIT) / 2] * 3
        assert np.asarray(reducer.shard("w")).tolist() == [3 + 2 * UNIT] * 3
        with pytest.raises(hsdp.UsageError, match="expected f64"):
            reducer.gather_gradients({"w": np.zeros(6, np.float32)})


@on_mesh(1, 2)
def test_a_fused_optimizer_clips_in_f64(mesh: hsdp.Mesh) -> None:
    with attached_to(model := Wide(), mesh) as reducer:
        first = values(model)
        optimizer = ShardedOptimizer(torch.optim.SGD, model, reducer, lr=1.0, fused=True, max_grad_norm=1.0)
        backward(model, reducer, mesh, 0)
        optimizer.step()
        optimizer.wait_parameters()
        factor = 1.0 / (float(optimizer.grad_norm) + 1e-6)
        for p, was, mean in zip(model.parameters(), first, mean_gradients(0, mesh.size), strict=True):
            if p.dtype is torch.float64:
                torch.testing.assert_close(p.detach(), was - mean * factor, rtol=1e-14, atol=1e-14)


@on_mesh(1, 2)
def test_states_and_their_bytes_are_those_of_f64(mesh: hsdp.Mesh) -> None:
    with attached_to(model := Wide(), mesh, layout="whole") as reducer:
        optimizer = ShardedOptimizer(torch.optim.SGD, model, reducer, lr=0.1, momentum=0.9)
        backward(model, reducer, mesh, 0)
        optimizer.step()
        kinds = [p.dtype for p in model.parameters()]
        states = optimizer.state_dict()["state"]
        assert [states[i]["momentum_buffer"].dtype for i in range(len(kinds))] == kinds
    with attached_to(model := Wide(), mesh) as reducer:
        optimizer = ShardedOptimizer(torch.optim.SGD, model, reducer, lr=0.1, stage=3, **released(3))
        backward(model, reducer, mesh, 0)
        optimizer.step()
        counts = [(reducer.slice(n).count, p.dtype.itemsize) for n, p in model.named_parameters()]
        assert reducer.stats().optimizer_bytes == sum(count * size for count, size in counts)
