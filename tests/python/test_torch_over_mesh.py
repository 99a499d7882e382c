"""shard_over="mesh": the same bits as with slices of the shard group, with part of the memory and traffic."""

from __future__ import annotations

import ctypes
import pathlib
import time
from typing import Any

import pytest
import torch
from conftest import Launcher, on_mesh, on_meshes
from one_rank import message_of
from same_tensors import require_same, states_of
from torch import nn

import hsdp
from hsdp.torch.flat_slice import FlatSlice
from hsdp.zero import ShardedOptimizer, coalesce_grad_reduction

OVERS: tuple[Any, ...] = ("shard", "mesh")
ADAMW: dict[str, Any] = {"cls": torch.optim.AdamW, "lr": 0.02}


def make_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(3)
    layers = [nn.Linear(7, 33), nn.GELU(), nn.Linear(33, 20), nn.GELU(), nn.Linear(20, 3)]
    model = nn.Sequential(*layers)
    model.register_parameter("unused", nn.Parameter(torch.ones(5)))
    return model.to(dtype)


class Run:
    """Trains one model."""

    def __init__(
        self, mesh: hsdp.Mesh, over: Any, stage: Any = 2, dtype: torch.dtype = torch.float32,
        cls: Any = torch.optim.AdamW, reducer_options: Any = None, **options: Any,
    ) -> None:
        self.mesh = mesh
        self.model = make_model(dtype)
        # Small buckets, so that the largest matrix is sent in several.
        self.reducer = hsdp.Reducer(mesh, missing="zero", bucket_bytes=512, **(reducer_options or {}))
        self.reducer.attach(self.model)
        if stage == 3:
            options |= {"persistence_threshold": 30, "units": [nn.Linear]}
        self.optimizer = ShardedOptimizer(
            cls, self.model, self.reducer, stage=stage, shard_over=over, gather_bucket_bytes=1024,
            **options,
        )

    def backward(self, seed: int, poison: bool = False) -> None:
        generator = torch.Generator().manual_seed(100 * seed + self.mesh.rank)
        x = torch.randn(4, 7, generator=generator).to(next(self.model.parameters()).dtype)
        if poison and self.mesh.rank == 0:
            x[0, 0] = torch.inf
        self.model(x).float().square().mean().backward()

    def step(self, number: int, microbatches: int = 2, poison: bool = False) -> None:
        for m in range(microbatches):
            with self.reducer.microbatch(last=m + 1 == microbatches):
                self.backward(10 * number + m, poison and m == 0)
        self.optimizer.step()

    def everything(self) -> dict[str, torch.Tensor]:
        state = self.optimizer.full_model_state_dict(self.model)
        return {**{key: value.clone() for key, value in state.items()}, **states_of(self.optimizer)}

    def close(self) -> None:
        self.optimizer.close()
        self.reducer.close()


def total(mesh: hsdp.Mesh, number: int) -> int:
    """Compares over all ranks."""
    return int(mesh.world.all_reduce(float(number), op="sum"))


def both(mesh: hsdp.Mesh, **options: Any) -> list[Run]:
    return [Run(mesh, over, **options) for over in OVERS]


@on_meshes((1, 4), (2, 2), (4, 1), (3, 2))
def test_training_has_the_bits_of_slices_of_the_shard_group(mesh: hsdp.Mesh) -> None:
    """With an fp32 replica wire, whatever the shard group's."""
    wires = ("f32", "bf16", "f16")
    cases: list[dict[str, Any]] = [
        {"stage": 1, **ADAMW},
        {"stage": 2, "cls": torch.optim.Adam, "amsgrad": True, "lr": 0.01},
        {"stage": 3, **ADAMW},
        {"stage": 2, "overlap_param_gather": False, "cls": torch.optim.SGD, "lr": 0.1, "momentum": 0.9},
        {"stage": 3, "dtype": torch.bfloat16, **ADAMW},
        {"stage": 1, "dtype": torch.bfloat16, "cls": torch.optim.RMSprop, "lr": 0.001},
    ]
    for number, case in enumerate(cases):
        options = {"reduce_dtype": wires[number % 3], "replica_dtype": "f32"}
        runs = both(mesh, reducer_options=options, **case)
        for step in range(20):
            for run in runs:
                run.step(step)
            if step % 7 == 0 or step == 19:
                require_same(*(run.everything() for run in runs))
        for run in runs:
            run.close()


@on_meshes((2, 2), (2, 1))
def test_windows_have_the_same_bits(mesh: hsdp.Mesh) -> None:
    for stage in (1, 2, 3):
        runs = both(mesh, stage=stage, reducer_options={"replica_dtype": "f32"}, lr=0.02)
        for step in range(5):
            for run in runs:
                with coalesce_grad_reduction(run.reducer, last=True):
                    for part in range(2 + mesh.rank % 2):
                        run.backward(10 * step + part)
                run.optimizer.step()
        require_same(*(run.everything() for run in runs))
        for run in runs:
            run.close()


@on_meshes((2, 2), (3, 1))
def test_a_total_on_a_16_bit_wire_is_not_rounded(mesh: hsdp.Mesh) -> None:
    """So the result is closer to fp64's than when half of it is gathered in 16 bits."""
    missed = []
    for over in OVERS:
        reducer = hsdp.Reducer(mesh, replica_dtype="bf16", bucket_bytes=4096, shard_over=over)
        reducer.register("w", (5000,))
        rows = [torch.randn(5000, generator=torch.Generator().manual_seed(r)) for r in range(mesh.size)]
        with reducer.microbatch(last=True):
            reducer.gradient_ready("w", rows[mesh.rank])
        got = {"w": torch.empty(5000)}
        reducer.gather_gradients(got)
        want = torch.stack(rows).double().mean(0)
        missed.append((got["w"].double() - want).norm())
        reducer.close()
    assert missed[1] < 0.9 * missed[0]


@on_mesh(2, 2)
def test_loco_quantizes_one_half_and_misses_less(mesh: hsdp.Mesh) -> None:
    missed = []
    for over in OVERS:
        hop = hsdp.quant.LocoHop()
        reducer = hsdp.Reducer(mesh, replica_hop=hop, bucket_bytes=4096, shard_over=over)
        reducer.register("w", (5000,))
        got, want = torch.zeros(5000), torch.zeros(5000)
        for step in range(30):
            rows = [torch.randn(5000, generator=torch.Generator().manual_seed(10 * step + r))
                    for r in range(mesh.size)]
            with reducer.microbatch(last=True):
                reducer.gradient_ready("w", rows[mesh.rank])
            mean = {"w": torch.empty(5000)}
            reducer.gather_gradients(mean)
            got, want = got + mean["w"], want + torch.stack(rows).mean(0)
        missed.append((got - want).norm())
        assert any("/gather/" in key for key in hop.state_dict()) == (over == "shard")
        reducer.close()
    assert missed[1] < 0.9 * missed[0]


@on_meshes((2, 2), (3, 2), (2, 1))
def test_a_rank_has_its_part_of_states_and_sends_half_between_replicas(mesh: hsdp.Mesh) -> None:
    for stage in (2, 3) if mesh.shard_size > 1 else (2,):
        runs = both(mesh, stage=stage, lr=0.02)
        for run in runs:
            run.step(0)
        count = sum(p.numel() for p in make_model().parameters())
        own = [sum(run.reducer.slice(p.name).count for p in run.reducer.parameters) for run in runs]
        assert [total(mesh, n) for n in own] == [mesh.replicate_size * count, count]
        kept = [run.reducer.stats().optimizer_bytes for run in runs]
        if stage == 2:  # two moments; the master shares the parameter's memory
            assert [n - 8 * o for n, o in zip(kept, own, strict=True)] == pytest.approx([0, 0], abs=64)
        hops = [total(mesh, run.reducer.stats().replica_hop_bytes) for run in runs]
        assert hops[1] * 2 == hops[0] == 2 * 4 * mesh.replicate_size * count
        states = run.optimizer.state_dict()["state"].values()
        held = sum(s["exp_avg"].to_local().numel() for s in states if isinstance(s["exp_avg"], FlatSlice))
        assert total(mesh, held) == count
        for run in runs:
            run.close()


def resident_after_steps(over: str) -> int:
    """Bytes of a rank's private memory, which the carry and staging are not in."""
    with hsdp.init_mesh(2, 2) as mesh:
        model = nn.Linear(4096, 4096, bias=False)
        reducer = hsdp.Reducer(mesh, shard_over="mesh" if over == "mesh" else "shard")
        reducer.attach(model)
        optimizer = ShardedOptimizer(torch.optim.AdamW, model, reducer)
        for _ in range(2):
            with reducer.microbatch(last=True):
                model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
        optimizer.wait_parameters()
        ctypes.CDLL(None).malloc_trim(0)
        status = pathlib.Path("/proc/self/status").read_text(encoding="utf-8")
        return 1024 * int(status.partition("RssAnon:")[2].split()[0])


def test_the_kernel_counts_less_memory(ranks: Launcher) -> None:
    shard, mesh = (ranks(4, resident_after_steps, over) for over in ("shard", "mesh"))
    count = 4096 * 4096
    states, result = 8 * count / 2, 4 * count / 4  # on 2x2 ranks; with "mesh" the result has separate memory
    for one, other in zip(shard, mesh, strict=True):
        assert one - other == pytest.approx(states / 2 - result, rel=0.3)


@on_meshes((2, 2), (3, 1))
def test_whole_matrices_belong_to_one_rank_of_the_mesh(mesh: hsdp.Mesh) -> None:
    """Muon orthogonalizes each of them once in the whole job."""

    def made(over: Any) -> tuple[nn.Sequential, hsdp.Reducer, ShardedOptimizer]:
        torch.manual_seed(1)
        model = nn.Sequential(*(nn.Linear(9, 9, bias=False) for _ in range(7)))
        reducer = hsdp.Reducer(mesh, layout="whole", bucket_bytes=512, shard_over=over)
        reducer.attach(model)
        return model, reducer, ShardedOptimizer(torch.optim.Muon, model, reducer, lr=0.02)

    results = []
    for over in OVERS:
        model, reducer, optimizer = made(over)
        for step in range(4):
            x = torch.randn(5, 9, generator=torch.Generator().manual_seed(10 * step + mesh.rank))
            with reducer.microbatch(last=True):
                model(x).square().mean().backward()
            optimizer.step()
        optimizer.wait_parameters()
        whole = optimizer.full_state_dict()["state"]
        results.append({
            **{str(k): s["momentum_buffer"] for k, s in whole.items()},
            **{name: p.detach().clone() for name, p in model.named_parameters()},
        })
        owned = sum(reducer.slice(p.name).count > 0 for p in reducer.parameters)
        assert total(mesh, owned) == 7 * (mesh.replicate_size if over == "shard" else 1)
        reducer.close()
    require_same(*results)


@on_mesh(2, 2)
def test_clipping_skipping_and_averages(mesh: hsdp.Mesh) -> None:
    for stage in (2, 3):
        runs = both(mesh, stage=stage, lr=0.02, max_grad_norm=0.05)
        for step in range(4):
            for run in runs:
                run.step(step, poison=step == 2)
            assert all(run.optimizer.step_was_skipped == (step == 2) for run in runs)
            if step != 2:
                norms = [float(run.optimizer.grad_norm) for run in runs]
                assert norms[0] == pytest.approx(norms[1], rel=1e-12)
                assert norms[0] > 0.05
        for key, (a, b) in zip_of(*(run.everything() for run in runs)).items():
            assert torch.allclose(a, b, rtol=0, atol=2e-6 * float(a.abs().max())), key
        for norm_type in (1.0, float("inf")):
            found = [float(run.reducer.grad_norm(norm_type)) for run in runs]
            assert found[0] == pytest.approx(found[1], rel=1e-12)
        with runs[1].optimizer.whole_parameters(write_back=True) as whole:
            for value in whole.values():
                value.mul_(0.5)
        with runs[0].optimizer.whole_parameters() as before, runs[1].optimizer.whole_parameters() as after:
            for key, (a, b) in zip_of(before, after).items():
                assert torch.allclose(a * 0.5, b, rtol=0, atol=4e-6), key
        for run in runs:
            run.close()


def zip_of(a: dict[str, Any], b: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    assert a.keys() == b.keys()
    return {key: (a[key], b[key]) for key in a}


@on_mesh(2, 2)
def test_a_dropped_step_leaves_nothing_half_updated(mesh: hsdp.Mesh) -> None:
    for stage in (1, 2, 3):
        runs = both(mesh, stage=stage, lr=0.02, reducer_options={"replica_dtype": "f32"})
        for run in runs:
            run.step(0)
            with pytest.raises(RuntimeError if mesh.rank == 3 else hsdp.StepAbortedError):
                with run.reducer.microbatch(last=True):
                    run.backward(5)
                    if mesh.rank == 3:
                        raise RuntimeError("a bad batch")
                run.optimizer.step()
            run.step(1)
        require_same(*(run.everything() for run in runs))
        for run in runs:
            run.close()


class Conditional(nn.Module):
    """Some ranks do not use all of its layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.second = nn.Linear(7, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, uses_layers: bool) -> torch.Tensor:
        return (self.second(self.first(x)) if uses_layers else x).square().mean()


@on_mesh(2, 2)
def test_a_rank_serves_units_that_are_complete(mesh: hsdp.Mesh) -> None:
    """Also parameters that this rank does not use, while the other replica's part of its slice is late."""
    results = []
    for over in OVERS:
        model = Conditional()
        reducer = hsdp.Reducer(mesh, missing="zero", replica_dtype="f32", shard_over=over)
        reducer.attach(model)
        optimizer = ShardedOptimizer(
            torch.optim.AdamW, model, reducer, stage=3, units=[nn.Linear], persistence_threshold=0, lr=0.1
        )
        if mesh.rank == 2:
            start = optimizer._start_gather
            optimizer._start_gather = lambda: (time.sleep(0.1), start())  # type: ignore[assignment, misc]
        for step in range(6):
            x = torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * step + mesh.rank))
            with reducer.microbatch(last=True):
                model(x.requires_grad_(), mesh.shard_rank == 1).backward()
            optimizer.step()
        results.append({k: v.clone() for k, v in optimizer.full_model_state_dict(model).items()})
        optimizer.close()
        reducer.close()
    require_same(*results)


@on_mesh(2, 2)
def test_masters_that_were_written_to_reach_pinned_units_and_state_dicts(mesh: hsdp.Mesh) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        runs = both(mesh, stage=3, dtype=dtype, lr=0.02, reducer_options={"replica_dtype": "f32"})
        for run in runs:
            run.step(0)
            layer: Any = run.model[2]
            run.optimizer.unshard(layer)
            run.optimizer.master(layer.weight).mul_(0.5)
            run.optimizer.master(layer.bias)
            with torch.no_grad():
                layer.bias[0] = 3.0
            run.step(1)
            run.optimizer.reshard(layer)
            state = run.model.state_dict()
            state["0.weight"].to_local().mul_(0.25)
            run.model.load_state_dict(state)
            run.step(2)
        require_same(*(run.everything() for run in runs))
        for run in runs:
            run.close()


@on_mesh(2, 2)
def test_what_does_not_fit_says_why(mesh: hsdp.Mesh) -> None:
    run = Run(mesh, "mesh")
    run.step(0)
    assert "as in the steps so far" in message_of(lambda: run.reducer._set_shard_over("shard"))
    assert run.reducer.shard_over == "mesh"
    with run.reducer.microbatch(last=False):
        run.backward(1)
    assert "sharded over the mesh" in message_of(lambda: run.reducer.partial_shard("0.weight"))
    run.reducer.discard()
    run.close()
    with pytest.raises(hsdp.MismatchError, match='shard_over="mesh"'):
        hsdp.Reducer(mesh, shard_over="mesh" if mesh.rank == 1 else "shard")
    with pytest.raises(hsdp.MismatchError, match="mesh-wide"):
        Run(mesh, "mesh" if mesh.rank == 1 else "shard")


def steps_with_a_drifted_master() -> list[str]:
    """The error of this rank."""
    with hsdp.init_mesh(2, 2) as mesh:
        run = Run(mesh, "shard", reducer_options={"verify_every": 1})
        run.step(0)
        run.step(1)
        if mesh.rank == 2:
            weight: Any = run.model[2].weight
            run.optimizer.master(weight)[5] += 1
        run.step(2)  # gathers it
        with pytest.raises(hsdp.MismatchError) as error:
            run.step(3)
        return [str(error.value), *map(str, error.value.ranks)]


def test_gathered_parameters_are_compared(ranks: Launcher) -> None:
    for text, *at_fault in ranks(4, steps_with_a_drifted_master):
        assert "parameters after their gather '2.weight of digest" in text and at_fault == ["2", "3"]


def stage_3_with_a_drifted_master(over: Any, drifting: int) -> list[str]:
    """The error of this rank, whose weights the step has not changed."""
    with hsdp.init_mesh(2, 2) as mesh:
        run = Run(mesh, over, 3, reducer_options={"verify_every": 2})
        for step in (0, 1):
            run.step(step)
            with run.optimizer.whole_parameters(write_back=True):  # an update that is no step
                pass
        weight: Any = run.model[2].weight
        master = run.optimizer.master(weight)
        if mesh.rank == drifting:
            master.view(torch.int32).view(-1)[0] ^= 1 << 31
        run.step(2)  # whose update has the others gather it
        for m in (0, 1):
            with run.reducer.microbatch(last=m == 1):
                run.backward(30 + m)
        before = run.optimizer.master(weight).clone()
        with pytest.raises(hsdp.MismatchError) as error:
            run.optimizer.step()
        assert torch.equal(run.optimizer.master(weight), before)
        return [str(error.value), *map(str, error.value.ranks)]


@pytest.mark.parametrize("drifting", range(4))
def test_parameters_of_units_are_compared(ranks: Launcher, drifting: int) -> None:
    replica = [str(drifting // 2 * 2), str(drifting // 2 * 2 + 1)]
    for text, *at_fault in ranks(4, stage_3_with_a_drifted_master, "shard", drifting):
        assert "expected the same '2.weight' of unit '2' on all ranks before step 3" in text
        assert at_fault == ["0", "1", "2", "3"] and f"on ranks {', '.join(replica)} of 4" in text


@on_meshes((2, 2), (4, 1))
def test_equal_units_are_no_difference(mesh: hsdp.Mesh) -> None:
    """With skipped updates, and evaluations on one replica, of an average or before all ranks load."""

    def evaluate(run: Run) -> None:
        if mesh.replica == 0:
            with torch.no_grad():
                run.model(torch.ones(1, 7, dtype=next(run.model.parameters()).dtype))

    def load(run: Run) -> None:
        evaluate(run)
        state = make_model(next(run.model.parameters()).dtype).state_dict()
        run.model.load_state_dict({key: torch.full_like(v, 0.01) for key, v in state.items()})

    def average(run: Run) -> None:
        masters = [run.optimizer.master(p) for p in run.model.parameters()] if mesh.replica == 0 else []
        own = [master.clone() for master in masters]
        for master in masters:
            master.mul_(0.9)
        evaluate(run)
        for master, values in zip(masters, own, strict=True):
            master.copy_(values)

    def write_masters(run: Run) -> None:
        evaluate(run)
        for p in run.model.parameters():
            run.optimizer.master(p).fill_(0.02)

    def write_back(run: Run) -> None:
        evaluate(run)
        with run.optimizer.whole_parameters(write_back=True) as whole:
            for values in whole.values():
                values.fill_(0.03)

    between = (load, average, write_masters, write_back, evaluate, load)
    cases: list[dict[str, Any]] = [
        {"over": "shard"},
        {"over": "mesh", "dtype": torch.bfloat16},
        {"over": "shard", "reshard_after_forward": False, "dtype": torch.bfloat16},
    ]
    for case in cases:
        run = Run(mesh, stage=3, lr=0.02, reducer_options={"verify_every": 1}, **case)
        run.step(0)
        for step, change in enumerate(between, 1):
            run.step(step, poison=step == 3)
            change(run)
        run.step(7)
        run.close()


@on_mesh(1, 2)
def test_with_one_replica_it_is_the_shard_group(mesh: hsdp.Mesh) -> None:
    runs = both(mesh, lr=0.02)
    for run in runs:
        run.step(0)
    assert runs[0].reducer.slice("0.weight") == runs[1].reducer.slice("0.weight")
    assert runs[0].reducer.stats().carry_bytes == runs[1].reducer.stats().carry_bytes


@on_mesh(2, 1)
def test_an_optimizer_that_cannot_be_made_leaves_the_reducer_as_it_was(mesh: hsdp.Mesh) -> None:
    model = make_model()
    reducer = hsdp.Reducer(mesh, missing="zero")
    reducer.attach(model)

    bad_somewhere = torch.optim.LBFGS if mesh.rank == 1 else torch.optim.AdamW
    for cls, kind in (
        (torch.optim.LBFGS, hsdp.UsageError),
        (bad_somewhere, (hsdp.StepAbortedError, hsdp.UsageError)[mesh.rank]),
    ):
        with pytest.raises(kind, match="LBFGS"):
            ShardedOptimizer(cls, model, reducer, shard_over="mesh")
        assert reducer.shard_over == "shard"
    reducer.prepare()
    assert reducer.slice("0.weight").count == 7 * 33  # each replica has all of it
    reducer.close()
