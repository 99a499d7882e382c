"""Complex and float64 parameters beside float32 ones: complex ones are reduced as their real view, values of
float64 do not pass through fp32, and several ranks give the result of one process."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from conftest import on_mesh, on_meshes
from exact_steps import MICROBATCHES, UNIT, mean_inputs, released, require_equal, run_backward, values
from one_rank import attached_to

import hsdp
from hsdp.zero import ShardedOptimizer


DOUBLES = (torch.complex128, torch.float64)


class Complex(torch.nn.Module):
    """Its loss is linear in its parameters, so gradients are the conjugates of the inputs, and their sums are
    exact. Numbers of elements are odd: a slice that split a complex number would show.
    """

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)

        def values(*shape: int, dtype: torch.dtype = torch.complex64) -> torch.Tensor:
            return torch.randn(shape, dtype=dtype, generator=generator)

        self.real = torch.nn.Parameter(values(9, dtype=torch.float32))
        self.matrix = torch.nn.Parameter(values(7, 5))
        self.turned = torch.nn.Parameter(values(11, 3).T)
        self.wide = torch.nn.Parameter(values(5, dtype=torch.complex128))
        self.last = torch.nn.Parameter(values())
        self.empty = torch.nn.Parameter(values(0, 3))
        self.f64 = torch.nn.Parameter(values(7, 5, dtype=torch.float64))
        self.turned_f64 = torch.nn.Parameter(values(11, 3, dtype=torch.float64).T)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        pairs = zip(self.parameters(), inputs, strict=True)
        return torch.stack([(p * x).sum().real.double() for p, x in pairs]).sum()


def inputs_of(step: int, microbatch: int, rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * microbatch + rank)

    def one(p: torch.Tensor) -> torch.Tensor:
        parts = torch.randint(-4, 5, (*p.shape, 2), generator=generator).double()
        if p.dtype in DOUBLES:
            parts += torch.randint(0, 1 << 30, parts.shape, generator=generator) * UNIT
        return torch.view_as_complex(parts).to(p.dtype) if p.is_complex() else parts[..., 0].to(p.dtype)

    return [one(p) for p in Complex().parameters()]


def mean_gradients(step: int, size: int) -> list[torch.Tensor]:
    return [mean.conj().resolve_conj() for mean in mean_inputs(inputs_of, step, size)]


def backward(model: Any, reducer: hsdp.Reducer, mesh: hsdp.Mesh, step: int) -> None:
    run_backward(inputs_of, model, reducer, mesh, step)


def require_whole_numbers(reducer: hsdp.Reducer, model: torch.nn.Module) -> None:
    for name, p in model.named_parameters():
        place = reducer.slice(name)
        assert not p.is_complex() or (place.offset % 2, place.count % 2) == (0, 0), name


@on_meshes((1, 1), (1, 2), (2, 2), (1, 4))
def test_gathered_gradients_are_the_means(mesh: hsdp.Mesh) -> None:
    want = mean_gradients(0, mesh.size)
    for options in ({}, {"reduce_dtype": "bf16"}, {"layout": "dim0"}, {"layout": "whole"}, {"bucket_bytes": 64}):
        with attached_to(model := Complex(), mesh, **options) as reducer:
            backward(model, reducer, mesh, 0)
            require_whole_numbers(reducer, model)
            reducer.gather_gradients()
            require_equal([p.grad for p in model.parameters()], want)


@on_meshes((1, 1), (1, 2))
def test_norms_are_those_of_torch(mesh: hsdp.Mesh) -> None:
    for norm_type in (1.0, 2.0, math.inf):
        with attached_to(model := Complex(), mesh) as reducer:
            backward(model, reducer, mesh, 0)
            reducer.gather_gradients()
            alone = Complex()
            for p, mean in zip(alone.parameters(), mean_gradients(0, mesh.size), strict=True):
                p.grad = mean
            grads = [p.grad.to(torch.complex128) for p in alone.parameters() if p.numel()]
            want = torch.nn.utils.get_total_norm(grads, norm_type)
            norm = float(reducer.clip_grad_norm_(1.0, norm_type=norm_type))
            assert norm == pytest.approx(float(want), rel=1e-6)
            factor = 1.0 / (float(want) + 1e-6)
            for p, one in zip(model.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(p.grad, one.grad * factor)
            assert float(reducer.grad_norm(norm_type)) == pytest.approx(1.0, rel=1e-6)


class RealMoments(torch.optim.Optimizer):
    """Divides by a mean of the gradients' absolute values, which is real."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["size"] = torch.zeros_like(p, dtype=p.grad.real.dtype)
                state["size"].mul_(0.5).add_(p.grad.abs())
                p.sub_(group["lr"] * p.grad / (state["size"] + 1e-3))


KINDS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.AdamW, {"lr": 1e-2, "foreach": False}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": False}),
    (RealMoments, {"lr": 1e-2}),
]


@pytest.mark.parametrize("layout", ["flat", "whole"])
@on_meshes((1, 1), (1, 2), (2, 2))
def test_optimizers_do_as_one_process_does(mesh: hsdp.Mesh, layout: Any) -> None:
    for kind, options in KINDS:
        alone = Complex()
        whole = kind(alone.parameters(), **options)
        expected = []
        for step in range(4):
            for p, grad in zip(alone.parameters(), mean_gradients(step, mesh.size), strict=True):
                p.grad = grad
            whole.step()
            expected.append(values(alone))
        for stage in (1, 2, 3):
            with attached_to(model := Complex(), mesh, layout=layout) as reducer:
                optimizer: Any = ShardedOptimizer(kind, model, reducer, stage=stage, **options, **released(stage))
                for step in range(4):
                    backward(model, reducer, mesh, step)
                    optimizer.step()
                    state = optimizer.full_model_state_dict(model)
                    require_equal([state[n] for n, _ in model.named_parameters()], expected[step])
                    if stage < 3:
                        optimizer.wait_parameters()
                        require_equal(values(model), expected[step])
                    if step == 2:  # resumes from what was saved
                        optimizer.load_state_dict(optimizer.full_state_dict())
                        optimizer.load_state_dict(optimizer.state_dict())
                states = optimizer.full_state_dict()["state"]
                for number, want in enumerate(whole.state.values()):
                    for key, value in want.items():
                        if value is not None and key != "step":
                            require_equal([states[number][key]], [value])
                optimizer.close()


@on_mesh(1, 2)
def test_an_optimizer_of_real_parameters_alone_is_refused(mesh: hsdp.Mesh) -> None:
    cases = ((torch.optim.Adafactor, {}), (torch.optim.SGD, {"lr": 0.1, "fused": True}))
    with attached_to(model := Complex(), mesh) as reducer:
        for kind, options in cases:
            with pytest.raises((hsdp.UsageError, RuntimeError), match="complex|floating point"):
                ShardedOptimizer(kind, [model.matrix], reducer, **options)
        with pytest.raises(hsdp.UsageError, match="leave out fused for complex parameters"):
            ShardedOptimizer(torch.optim.AdamW, [model.matrix], reducer, fused=True)
        ShardedOptimizer(torch.optim.SGD, [model.real], reducer, lr=0.1, fused=True).close()


@pytest.mark.parametrize("stage", [1, 3])
@on_mesh(1, 2)
def test_a_mark_that_comes_later_is_found(mesh: hsdp.Mesh, stage: int) -> None:
    reducer = attached_to(model := Complex(), mesh)
    optimizer: Any = ShardedOptimizer(torch.optim.SGD, model, reducer, stage=stage, lr=0.1, **released(stage))
    optimizer.unshard(model)
    model.matrix.data = model.matrix.data.conj()
    with pytest.raises(hsdp.UsageError, match="'matrix' to have its values in memory.*conjugated"):
        backward(model, reducer, mesh, 0)
        optimizer.step()


class ComplexStates(torch.optim.SGD):
    """Made of real parameters."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("phase", torch.full_like(p, 1 + 2j, dtype=torch.complex64))
        return super().step(closure)


@on_mesh(1, 2)
def test_complex_states_of_real_parameters_are_loaded(mesh: hsdp.Mesh) -> None:
    with attached_to(model := Complex(), mesh) as reducer:
        optimizer: Any = ShardedOptimizer(ComplexStates, [model.real], reducer, lr=0.1)
        backward(model, reducer, mesh, 0)
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        local = optimizer.state_dict()["state"][0]["phase"].to_local()
        assert local.dtype is torch.complex64 and set(local.tolist()) == {1 + 2j}


@on_mesh(1, 1)
def test_marks_are_no_values(mesh: hsdp.Mesh) -> None:
    model = torch.nn.ParameterDict({"q": torch.nn.Parameter(torch.randn(3, 4, dtype=torch.complex64).mH)})
    with pytest.raises(hsdp.UsageError, match="'q' to have its values in memory.*conjugated by a mark.*resolve_conj"):
        attached_to(model, mesh)
    model = torch.nn.Module()
    model.register_buffer("turn", torch.tensor([1 + 2j]).conj())
    hsdp.broadcast_parameters(mesh, model)
    assert model.turn.tolist() == [1 - 2j]
    with attached_to(model := Complex(), mesh) as reducer:
        backward(model, reducer, mesh, 0)
        reducer.gather_gradients()
        model.matrix.grad = model.matrix.grad.conj()
        factor = 1.0 / (float(reducer.clip_grad_norm_(1.0)) + 1e-6)
        torch.testing.assert_close(model.matrix.grad, mean_gradients(0, 1)[1].conj().resolve_conj() * factor)
    with hsdp.Reducer(mesh) as reducer:
        reducer.register("z", 3, torch.complex64)
        reducer.begin_microbatch(last=True)
        with pytest.raises(hsdp.UsageError, match="gradient of 'z'.*conjugated by a mark; pass x.resolve_conj"):
            reducer.gradient_ready("z", torch.ones(3, dtype=torch.complex64).conj())


@on_mesh(1, 2)
def test_a_scaler_unscales_both_parts(mesh: hsdp.Mesh) -> None:
    with attached_to(model := Complex(), mesh) as reducer:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        first = values(model)
        scaler.scale(torch.ones(()))
        inputs = [8 * x for x in inputs_of(0, 0, mesh.rank)]
        with reducer.microbatch(last=True):
            model(*inputs).backward()
        reducer.gather_gradients()
        scaler.unscale_(optimizer)
        grads = [p.grad.clone() for p in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        with reducer.microbatch(last=True):
            model(*(x * complex(0, math.inf) if x.is_complex() else x for x in inputs)).backward()
        reducer.gather_gradients()
        scaler.step(optimizer)  # skipped
        ranks = [inputs_of(0, 0, rank) for rank in range(2)]
        want = [((a + b) / 2).conj().resolve_conj() for a, b in zip(*ranks, strict=True)]
        require_equal(grads, want)
        require_equal(values(model), [p - mean for p, mean in zip(first, want, strict=True)])


@on_mesh(1, 2)
def test_a_written_weight_is_taken_over(mesh: hsdp.Mesh) -> None:
    for stage in (1, 3):
        with attached_to(model := Complex(), mesh) as reducer:
            optimizer: Any = ShardedOptimizer(torch.optim.SGD, model, reducer, stage=stage, lr=0.0, **released(stage))
            backward(model, reducer, mesh, 0)
            optimizer.step()
            if stage == 3:
                optimizer.unshard(model)
            with torch.no_grad():
                model.matrix.fill_(3 + 4j)
                model.wide.fill_(1 + UNIT * 1j)
                model.f64.fill_(1 + UNIT)
            backward(model, reducer, mesh, 1)
            optimizer.step()
            state = optimizer.full_model_state_dict(model) if stage == 3 else model.state_dict()
            assert set(state["matrix"].flatten().tolist()) == {3 + 4j}
            assert set(state["wide"].tolist()) == {1 + UNIT * 1j}
            assert state["f64"].unique().tolist() == [1 + UNIT]
            optimizer.close()


@on_mesh(1, 2)
def test_frozen_ones_stay_whole(mesh: hsdp.Mesh) -> None:
    model = Complex()
    model.matrix.requires_grad_(False)
    first = values(model)
    with attached_to(model, mesh) as reducer:
        optimizer: Any = ShardedOptimizer(torch.optim.SGD, model, reducer, stage=3, lr=0.1, **released(3))
        backward(model, reducer, mesh, 0)
        optimizer.step()
        assert torch.equal(model.matrix, first[1])
        assert not torch.equal(optimizer.full_model_state_dict(model)["turned"], first[2])
        optimizer.close()


@on_mesh(1, 2)
def test_on_the_meta_device(mesh: hsdp.Mesh) -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.empty(33, dtype=torch.complex64))
            self.reset_parameters()

        def reset_parameters(self) -> None:
            with torch.no_grad():
                self.scale.copy_(torch.arange(33) * (1 - 2j))

    with torch.device("meta"):
        model = Scaled()
    with attached_to(model, mesh) as reducer:
        optimizer: Any = ShardedOptimizer(torch.optim.SGD, model, reducer, stage=3, lr=0.1, **released(3))
        assert torch.equal(optimizer.full_model_state_dict(model)["scale"], torch.arange(33) * (1 - 2j))
        optimizer.close()

    def set_one_part(module: torch.nn.Module) -> None:
        if isinstance(module, Scaled):
            module.scale.real.fill_(1)

    with torch.device("meta"):
        model = Scaled()
    Scaled.reset_parameters = lambda self: self.scale.real.fill_(1)  # type: ignore[assignment]
    with attached_to(model, mesh) as reducer, pytest.raises(hsdp.UsageError, match="scale"):
        ShardedOptimizer(torch.optim.SGD, model, reducer, lr=0.1, param_init_fn=set_one_part)


@on_mesh(2, 2)
def test_loco_keeps_numbers_together(mesh: hsdp.Mesh) -> None:
    with attached_to(model := Complex(), mesh, replica_hop=hsdp.quant.LocoHop()) as reducer:
        backward(model, reducer, mesh, 0)
        require_whole_numbers(reducer, model)
        reducer.gather_gradients()
        for p, mean in zip(model.parameters(), mean_gradients(0, mesh.size), strict=True):
            torch.testing.assert_close(p.grad, mean, rtol=0.0, atol=1.5)  # four bits a part
            assert p.grad.dtype not in DOUBLES or torch.equal(p.grad, mean)


@on_mesh(1, 2)
def test_windows_local_sums_and_snapshots(mesh: hsdp.Mesh, tmp_path: str) -> None:
    want = mean_gradients(0, mesh.size)
    with attached_to(model := Complex(), mesh) as reducer:
        with hsdp.zero.coalesce_grad_reduction(reducer):
            for m in range(MICROBATCHES):
                model(*inputs_of(0, m, mesh.rank)).backward()
                if m == 0:
                    own = inputs_of(0, 0, mesh.rank)[1].conj().resolve_conj()
                    require_equal([reducer.local_sum("matrix")], [torch.view_as_real(own)])
        reducer.save_snapshot(tmp_path, step=1)
        reducer.flush()
        reducer.gather_gradients()
        require_equal([p.grad for p in model.parameters()], want)
    mesh.world.barrier()
    snapshot = hsdp.read_snapshot(tmp_path)
    require_equal([torch.from_numpy(snapshot["matrix"])], [torch.view_as_real(want[1])])
    assert snapshot.dtype("f64") == "f64"
    require_equal([torch.from_numpy(snapshot.read("f64", dtype="f64"))], want[6:7])


@on_mesh(1, 2)
def test_local_gradients_stay_complex(mesh: hsdp.Mesh) -> None:
    with attached_to(model := Complex(), mesh, keep_grads=True) as reducer:
        backward(model, reducer, mesh, 0)
        own = [inputs_of(0, m, mesh.rank) for m in range(MICROBATCHES)]
        require_equal([p.grad for p in model.parameters()],
                      [(a + b).conj().resolve_conj() for a, b in zip(*own, strict=True)])
        reducer.gather_gradients()
        require_equal([p.grad for p in model.parameters()], mean_gradients(0, mesh.size))


@on_mesh(1, 2)
def test_arrays_of_numpy(mesh: hsdp.Mesh) -> None:
    with hsdp.Reducer(mesh, layout="dim0") as reducer:
        reducer.register("z", (3, 5), "complex64")
        reducer.register("one", (), np.complex128)
        assert reducer.parameters[0][:3] == ("z", (3, 5, 2), "f32") and reducer.parameters[0].is_complex
        z = (np.arange(15) * (1 + 2j) + mesh.rank).astype(np.complex64).reshape(5, 3).T
        with reducer.microbatch(last=True):
            reducer.gradient_ready("z", z)
            reducer.gradient_ready("one", np.array(1 - 1j * mesh.rank))
        whole = {"z": np.zeros((3, 5), np.complex64), "one": np.zeros((2,), np.float64)}
        reducer.gather_gradients(whole)
        assert (whole["z"] == (np.arange(15) * (1 + 2j) + 0.5).reshape(5, 3).T).all()
        assert whole["one"].tolist() == [1, -0.5]
        gather = hsdp.zero.ParameterGather(reducer, {"z": whole["z"]})
        place = reducer.slice("z")
        whole["z"].view(np.float32).reshape(-1)[place.offset : place.offset + place.count] = 2 + mesh.rank
        gather.start()
        gather.wait_all()
        assert (whole["z"][:2] == 2 + 2j).all() and (whole["z"][2] == 3 + 3j).all()
        with pytest.raises(hsdp.UsageError, match="register: dtype.*complex32"):
            reducer.register("half", 3, "complex32")
        with pytest.raises(hsdp.UsageError, match=r"shape \(3, 5, 2\)"):
            reducer.gather_gradients({"z": np.zeros((3, 5), np.float32)})
        with pytest.raises(hsdp.UsageError, match="all_gather.*real numbers.*complex64.*real view"):
            mesh.world.all_gather(whole["z"])
    with hsdp.Reducer(mesh) as reducer:
        reducer.register("x", (4,), "f32")
        reducer.prepare()
        with pytest.raises(hsdp.UsageError, match="array of 'x'.*real numbers.*complex64"):
            reducer.gather_parameters({"x": np.zeros(2, np.complex64)})
        with pytest.raises(hsdp.UsageError, match="array of 'x'.*real numbers.*complex64"):
            hsdp.zero.ParameterGather(reducer, {"x": np.zeros(2, np.complex64)})
