"""layout="whole": optimizers of whole matrices, several optimizers on one Reducer, and their checkpoints."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from conftest import Launcher, on_mesh, on_meshes
from exact_gradients import assign, assign_mean
from fsdp2_model import start_torch
from one_rank import attached_to, mesh
from same_tensors import same
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import hsdp
from hsdp.zero import ShardedOptimizer

STEPS = 4


class OneByOne(torch.optim.Optimizer):
    """Updates each matrix separately."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def update(self, p: Any, state: dict[str, Any], lr: float) -> None:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, self.state[p], group["lr"])


class Shampoo(OneByOne):
    """An optimizer of whole matrices. Its states have other sides than the parameter, and one is a number."""

    def update(self, p: Any, state: dict[str, Any], lr: float) -> None:
        if not state:
            state.update(
                left=torch.eye(p.shape[0]), right=torch.eye(p.shape[1]),
                momentum=torch.zeros_like(p), count=0, scale=torch.tensor(1.0),
            )
        state["count"] += 1
        state["scale"] *= 0.5
        state["left"] += p.grad @ p.grad.T
        state["right"] += p.grad.T @ p.grad
        update = torch.linalg.solve(state["left"], p.grad) @ torch.linalg.inv(state["right"])
        state["momentum"].mul_(0.9).add_(update)
        p.sub_(state["momentum"], alpha=lr / (state["count"] + state["scale"]))


class Late(OneByOne):
    """Like SOAP: lists as states, an uncounted first step, and other states for large matrices."""

    def update(self, p: Any, state: dict[str, Any], lr: float) -> None:
        if not state:
            state.update(step=torch.tensor(0.0), sums=[torch.zeros(n) for n in p.shape])
            if p.numel() > 35:
                state["large"] = torch.zeros(3, dtype=torch.float64)
            return
        state["step"] += 1
        for side, total in enumerate(state["sums"]):
            total += p.grad.sum(1 - side)
        if "large" in state:
            state["large"] += 1
        scale = sum(float(total.abs().sum()) for total in state["sums"]) + 1.0
        p.sub_(p.grad, alpha=lr / scale / float(state["step"]))


class Odd(torch.optim.SGD):
    """A state that another rank cannot make."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["odd"] = object()


class Mixing(torch.optim.SGD):
    """Scales all updates by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        norm = torch.linalg.vector_norm(torch.cat([g.reshape(-1) for g in grads]))
        for grad in grads:
            grad /= norm
        super().step()


MATRICES: dict[str, tuple[Any, dict[str, Any]]] = {
    "muon": (torch.optim.Muon, {"lr": 0.02}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.02}),
    "shampoo": (Shampoo, {}),
    "late": (Late, {}),
}
ANY: dict[str, tuple[Any, dict[str, Any]]] = {
    "adafactor": MATRICES["adafactor"],
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "nadam": (torch.optim.NAdam, {}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
}


class Model(nn.Module):
    """Matrices, one of them transposed in memory, and with `rest` a bias and a scalar."""

    def __init__(self, dtype: torch.dtype, rest: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        for i, shape in enumerate([(6, 5), (4, 4), (5, 9), (3, 20)]):
            self.register_parameter(f"matrix{i}", nn.Parameter(torch.randn(shape).to(dtype)))
        self.register_parameter("wide", nn.Parameter(torch.randn(6, 5).to(dtype).t()))
        if rest:
            self.register_parameter("bias", nn.Parameter(torch.randn(7).to(dtype)))
            self.register_parameter("gain", nn.Parameter(torch.tensor(1.5).to(dtype)))


def masters_of(model: Model) -> Model:
    """What one process would train: fp32 copies of the 16-bit values."""
    alone = Model(torch.float32, hasattr(model, "bias"))
    for p, q in zip(alone.parameters(), model.parameters(), strict=True):
        p.data = q.detach().float().contiguous()
    return alone


def step_of(reducer: hsdp.Reducer, model: nn.Module, step: int) -> None:
    with reducer.microbatch(last=True):
        assign(model, step, reducer.mesh.rank)


@on_meshes((1, 2), (2, 2), (1, 4))
def test_values_are_those_of_one_process(mesh: hsdp.Mesh) -> None:
    for rest, optimizers in ((False, MATRICES), (True, ANY)):
        for name, (cls, options) in optimizers.items():
            for dtype in (torch.float32, torch.bfloat16):
                model = Model(dtype, rest)
                alone = masters_of(model)
                reducer = attached_to(model, mesh, layout="whole", bucket_bytes=256)
                optimizer = ShardedOptimizer(cls, model, reducer, stage=1 if mesh.size == 2 else 2, **options)
                reference = cls(alone.parameters(), **options)
                for step in range(STEPS):
                    step_of(reducer, model, step)
                    reducer.shard("wide")  # waits
                    before = reducer.stats()
                    optimizer.step()
                    after = reducer.stats()
                    assert after.reduce_scatter_count == before.reduce_scatter_count
                    assert after.all_reduce_count == before.all_reduce_count
                    assert after.all_gather_count == before.all_gather_count
                    assign_mean(alone, step, mesh.size)
                    reference.step()
                    for (key, p), q in zip(
                        model.named_parameters(), alone.parameters(), strict=True
                    ):
                        assert torch.equal(p, q.to(dtype)), (name, key, step)
                for p, q in zip(model.parameters(), alone.parameters(), strict=True):
                    here = optimizer.master(p)
                    assert here.numel() in (0, p.numel())
                    if here.numel() > 0:
                        assert torch.equal(here.reshape(q.shape), q)
                reducer.close()


class Run:
    """A model in training, with one optimizer for whole matrices and perhaps another for the rest."""

    def __init__(
        self, mesh: hsdp.Mesh, name: str, dtype: str, layout: str = "whole", **options: Any
    ) -> None:
        self.mesh = mesh
        self.model = Model(getattr(torch, dtype), name in ANY)
        self.reducer = hsdp.Reducer(mesh, layout=layout, bucket_bytes=256, missing="zero")
        self.reducer.attach(self.model)
        cls, own = {**MATRICES, **ANY}[name]
        self.optimizer = ShardedOptimizer(cls, self.model, self.reducer, **{**own, **options})

    def step(self, seed: int, size: int) -> None:
        """A step as `size` ranks would do it together; exact, so it is the same on every mesh."""
        with self.reducer.microbatch(last=True):
            if size == self.mesh.size:
                assign(self.model, seed, self.mesh.rank)
            else:
                assign_mean(self.model, seed, size)
            if seed == 1:
                self.model.matrix0.grad = None  # unused on every rank in that step
        self.optimizer.step()

    def values(self) -> list[Any]:
        return [p.detach().float().tolist() for p in self.model.parameters()]


SAVED = [(name, dtype) for name in {**MATRICES, **ANY} for dtype in ("float32", "bfloat16")]


def run_save(folder: str) -> list[Any]:
    """The weights after one more step, and those of a run that has loaded the state before it."""
    values = []
    with hsdp.init_mesh(2, 2) as mesh:
        start_torch(folder)
        for name, dtype in SAVED:
            run = Run(mesh, name, dtype)
            for seed in range(3):
                run.step(seed, 4)
            states = get_optimizer_state_dict(run.model, run.optimizer)
            dcp.save(states, checkpoint_id=f"{folder}/{name}_{dtype}")
            weights = copy.deepcopy(run.model.state_dict())
            full = run.optimizer.full_state_dict()
            again = Run(mesh, name, dtype, lr=7.0)
            again.model.load_state_dict(weights)
            again.optimizer.load_state_dict(run.optimizer.state_dict())  # this rank's state
            for each in (run, again):
                each.step(3, 4)
                values.append(each.values())
                each.reducer.close()
            if mesh.rank == 0:
                torch.save((weights, full, values[-1]), f"{folder}/{name}_{dtype}.pt")
        dist.destroy_process_group()
    return values


@pytest.fixture(scope="module")
def saved(module_ranks: Launcher) -> str:
    folder = str(module_ranks.folder)
    values = module_ranks(4, run_save, folder)
    assert values == [values[0]] * 4
    assert values[0][::2] == values[0][1::2]
    return folder


@on_meshes((1, 4), (4, 1), (1, 1), (1, 3))
def test_every_mesh_loads_what_another_saved(mesh: hsdp.Mesh, saved: str) -> None:
    start_torch(saved)
    layout = "flat" if mesh.shard_size == 3 else "whole"
    for name, dtype in SAVED:
        if layout != "whole" and name in MATRICES:
            continue
        weights, full, want = torch.load(f"{saved}/{name}_{dtype}.pt")
        for whole in (False, True):
            run = Run(mesh, name, dtype, layout, lr=7.0)
            run.model.load_state_dict(weights)
            if whole:
                run.optimizer.load_state_dict(full)
            else:
                states = get_optimizer_state_dict(run.model, run.optimizer)
                dcp.load(states, checkpoint_id=f"{saved}/{name}_{dtype}")
                set_optimizer_state_dict(run.model, run.optimizer, states)
            found = run.optimizer.full_state_dict()
            assert found["param_groups"] == full["param_groups"], name
            assert same(found["state"], full["state"]), name
            run.step(3, 4)
            assert run.values() == want, name
            run.reducer.close()
    dist.destroy_process_group()


@on_mesh(1, 2)
def test_into_the_unsharded_optimizer_and_back(mesh: hsdp.Mesh) -> None:
    """One process's optimizer resumes from what ranks saved, and ranks from what it saved."""
    for name in {**MATRICES, **ANY}:
        run = Run(mesh, name, "float32")
        cls, options = {**MATRICES, **ANY}[name]
        for seed in range(3):
            run.step(seed, 2)
        alone = Model(torch.float32, name in ANY)
        alone.load_state_dict(run.model.state_dict())
        reference = cls(alone.parameters(), **options)
        reference.load_state_dict(run.optimizer.full_state_dict())
        run.step(3, 2)
        assign_mean(alone, 3, 2)
        reference.step()
        run.optimizer.load_state_dict(reference.state_dict())
        run.step(4, 2)
        assign_mean(alone, 4, 2)
        reference.step()
        for p, q in zip(run.model.parameters(), alone.parameters(), strict=True):
            assert torch.equal(p, q), name
        run.reducer.close()


@on_mesh(1, 2)
def test_parameters_that_were_never_used(mesh: hsdp.Mesh, tmp_path: str) -> None:
    """Some optimizers have a state for a parameter that no step has used, others have none."""
    start_torch(tmp_path)
    for name, dtype in SAVED:
        run = Run(mesh, name, dtype)
        for seed in range(2):
            with run.reducer.microbatch(last=True):
                assign(run.model, seed, mesh.rank)
                run.model.matrix1.grad = run.model.matrix2.grad = None
            run.optimizer.step()
        full = run.optimizer.full_state_dict()
        again = Run(mesh, name, dtype, lr=7.0)
        again.model.load_state_dict(run.model.state_dict())
        states = [full, run.optimizer.state_dict()]
        if name in ("muon", "adamw", "sgd"):  # a state of zeros is as good as none
            dcp.save(get_optimizer_state_dict(run.model, run.optimizer),
                     checkpoint_id=f"{tmp_path}/{name}_{dtype}")
            wanted = get_optimizer_state_dict(again.model, again.optimizer)
            dcp.load(wanted, checkpoint_id=f"{tmp_path}/{name}_{dtype}")
            set_optimizer_state_dict(again.model, again.optimizer, wanted)
            states.append(again.optimizer.state_dict())
        for state in states:
            again.optimizer.load_state_dict(state)
            assert same(again.optimizer.full_state_dict()["state"], full["state"]), name
        for each in (run, again):
            each.step(3, 2)
        assert run.values() == again.values(), name
        run.reducer.close()
        again.reducer.close()
    dist.destroy_process_group()


@on_mesh(1, 2, timeout_s=60)
def test_states_that_cannot_be_gathered(mesh: hsdp.Mesh) -> None:
    model = nn.ParameterList([torch.zeros(3, 10)])
    reducer = attached_to(model, mesh, layout="whole")
    optimizer = ShardedOptimizer(Odd, model, reducer, lr=0.1)
    step_of(reducer, model, 0)
    optimizer.step()
    wanted = "lists of them, got 'odd' of '0', an object of type object"
    with pytest.raises(hsdp.UsageError, match=wanted):
        optimizer.full_state_dict()
    step_of(reducer, model, 1)  # all ranks continue
    optimizer.step()


def split(model: Model) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    return matrices, [p for p in model.parameters() if p.dim() != 2]


@pytest.mark.parametrize("scales", [False, True])
@pytest.mark.parametrize("layout", ["flat", "whole"])
@on_mesh(1, 2)
def test_two_optimizers_of_one_reducer(mesh: hsdp.Mesh, layout: Any, scales: bool) -> None:
    """Muon for matrices, AdamW for the rest."""
    model, alone = Model(torch.float32, True), Model(torch.float32, True)
    if layout == "flat":  # of slices: both are elementwise
        classes = [(torch.optim.SGD, {"lr": 0.1}), (torch.optim.AdamW, {"lr": 0.01})]
    else:
        classes = [(torch.optim.Muon, {"lr": 0.02}), (torch.optim.AdamW, {"lr": 0.01})]
    reducer = attached_to(model, mesh, layout=layout, bucket_bytes=256)
    optimizers = [
        ShardedOptimizer(cls, params, reducer, **options)
        for (cls, options), params in zip(classes, split(model), strict=True)
    ]
    references = [
        cls(params, **options)
        for (cls, options), params in zip(classes, split(alone), strict=True)
    ]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scales)
    norms = []
    for step in range(STEPS):
        with reducer.microbatch(last=True):
            assign(model, step, mesh.rank)
            for p in model.parameters():
                p.grad *= float(scaler.scale(torch.ones(())))
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        norms.append(float(reducer.clip_grad_norm_(3.0)))
        for optimizer in optimizers:
            scaler.step(optimizer)
            assert not optimizer.step_was_skipped
        scaler.update()
        assign_mean(alone, step, mesh.size)
        coefficient = min(1.0, 3.0 / (norms[-1] + 1e-6))
        for q in alone.parameters():
            q.grad = q.grad * torch.tensor(coefficient)
        for reference in references:
            reference.step()
        for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert torch.allclose(p, q, rtol=1e-5, atol=1e-6), (name, step)
    states = [optimizer.full_state_dict() for optimizer in optimizers]
    assert [len(state["state"]) for state in states] == (
        [0 if layout == "flat" else 5, 2]
    )
    optimizers[0].close()
    with reducer.microbatch(last=True):
        assign(model, STEPS, mesh.rank)
    before = [p.detach().clone() for p in split(model)[0]]
    optimizers[1].step()
    assert all(map(torch.equal, split(model)[0], before))
    again = ShardedOptimizer(torch.optim.SGD, split(model)[0], reducer, lr=0.1)
    again.step()  # the first one has not taken these gradients
    assert not any(map(torch.equal, split(model)[0], before))
    assert len(set(mesh.world._handle.exchange(str(norms), "test"))) == 1


def test_what_is_refused(mesh: hsdp.Mesh) -> None:
    model = Model(torch.float32, True)
    reducer = attached_to(model, mesh, layout="whole")
    matrices, rest = split(model)

    def refused(cls: Any, params: Any, **options: Any) -> str:
        with pytest.raises(hsdp.UsageError) as error:
            ShardedOptimizer(cls, params, reducer, **options)
        return str(error.value)

    got = refused(torch.optim.Muon, model)
    assert "each of its parameters of 1 dimension by itself, got Muon, which raised ValueError" in got
    assert "give it those that it takes, and the others to another ShardedOptimizer" in got
    assert "which gives a parameter other values beside another one" in refused(Mixing, matrices, lr=1.0)
    assert "raised TypeError" in refused(torch.optim.LBFGS, matrices)
    muon = ShardedOptimizer(torch.optim.Muon, matrices, reducer)
    assert "'matrix0', which a ShardedOptimizer has already" in refused(torch.optim.AdamW, model)
    assert "stage 2, as the Reducer's other optimizer has, got 1" in refused(
        torch.optim.AdamW, rest, stage=1
    )
    assert "reducer.clip_grad_norm_(max_norm) before" in refused(
        torch.optim.AdamW, rest, max_grad_norm=1.0
    )
    adamw = ShardedOptimizer(torch.optim.AdamW, rest, reducer)
    with reducer.microbatch(last=True):
        assign(model, 0, 0)
    muon.step()
    with pytest.raises(hsdp.UsageError, match="last=True between two calls"):
        muon.step()
    adamw.step()


@on_mesh(1, 2)
def test_it_says_how_even_it_is(mesh: hsdp.Mesh) -> None:
    reducer = hsdp.Reducer(mesh, layout="whole")
    model = nn.ParameterList([torch.zeros(30, 10), torch.zeros(10, 10), torch.zeros(10, 10)])
    reducer.attach(model)
    assert reducer.balance() == hsdp.Balance(1.2, 1.2)
    assert "layout whole, most on a rank 1.20 of the mean, traffic 1.20" in repr(reducer)
