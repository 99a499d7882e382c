"""ShardedOptimizer: the unsharded optimizer's values, states of slices, and refused input."""

from __future__ import annotations

import copy
import gc
import hashlib
import math
import pickle
from typing import Any

import pytest
import torch
from conftest import Launcher, on_mesh, on_meshes
from exact_gradients import assign, assign_mean
from one_rank import attached_to, mesh, message_of
from same_tensors import same
from torch import nn

import hsdp
from hsdp.torch import sharded_optimizer
from hsdp.zero import ShardedOptimizer, coalesce_grad_reduction

ELEMENTWISE: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "Adam": {"lr": 0.01, "amsgrad": True},
    "AdamW": {"lr": 0.01, "fused": True},
    "NAdam": {},
    "RAdam": {"foreach": True},
    "Adagrad": {},
    "Adadelta": {},
    "Adamax": {},
    "RMSprop": {"centered": True, "momentum": 0.5},
    "Rprop": {},
    "ASGD": {},
}


def make_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(7, 33), nn.GELU(), nn.Linear(33, 3))
    model.register_parameter("wide", nn.Parameter(torch.randn(6, 5).t()))  # not contiguous
    model.register_parameter("gain", nn.Parameter(torch.tensor(1.5)))
    return model.to(dtype)


def run_step(reducer: hsdp.Reducer, model: nn.Module, seed: int, rank: int) -> None:
    with reducer.microbatch(last=True):
        assign(model, seed, rank)


def step_both(
    reducer: hsdp.Reducer, model: nn.Module, optimizer: ShardedOptimizer, seed: int,
    alone: nn.Module, reference: torch.optim.Optimizer,
) -> None:
    """The unsharded optimizer, given the mean of all ranks' gradients."""
    run_step(reducer, model, seed, reducer.mesh.rank)
    optimizer.step()
    assign_mean(alone, seed, reducer.mesh.size)
    reference.step()


def require_equal(model: nn.Module, other: nn.Module, fused: bool = False) -> None:
    """To the bit, except that torch itself rounds differently with other strides, and in fused optimizers at
    the end of an array that does not fill a vector."""
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        if p.is_contiguous() and not fused:
            assert torch.equal(p, q), name
        else:
            assert torch.allclose(p, q, rtol=1e-6, atol=1e-7), name


def sharded(
    mesh: hsdp.Mesh, model: nn.Module, cls: Any = torch.optim.AdamW, layout: Any = "flat",
    **options: Any,
) -> tuple[hsdp.Reducer, ShardedOptimizer]:
    reducer = attached_to(model, mesh, layout=layout, bucket_bytes=256)
    return reducer, ShardedOptimizer(cls, model, reducer, **options)


@on_meshes((1, 1), (2, 2))
def test_every_optimizer_has_the_bits_of_the_unsharded_one(mesh: hsdp.Mesh) -> None:
    for name, options in ELEMENTWISE.items():
        model, alone = make_model(), make_model()
        cls = getattr(torch.optim, name)
        reducer, optimizer = sharded(mesh, model, cls, **options)
        reference = cls(alone.parameters(), **options)
        for step in range(4):
            step_both(reducer, model, optimizer, step, alone, reference)
            require_equal(model, alone, options.get("fused", False))
        reducer.close()


@on_meshes((2, 2), (2, 1))
def test_training_equals_unsharded_adamw(mesh: hsdp.Mesh) -> None:
    """Steps of three microbatches compared with unsharded AdamW, stages 1 and 2, with and without
    clipping."""
    hashes = []
    for stage, clip, microbatches, fused in (
        (1, None, 3, False), (2, None, 3, False), (1, 0.3, 3, False), (2, 0.3, 3, False),
        (2, 0.3, 3, False), (1, 0.3, 1, False), (2, 0.3, 1, False), (1, 0.3, 1, True),
        (2, 0.3, 1, True),
    ):
        model, alone = make_model(), make_model()
        reducer, optimizer = sharded(mesh, model, stage=stage, max_grad_norm=clip, lr=1e-2,
                                     fused=fused)
        reference = torch.optim.AdamW(alone.parameters(), lr=1e-2)
        for step in range(8):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(mesh.size, microbatches, 6, 7, generator=generator)
            for m in range(microbatches):
                with reducer.microbatch(last=m == microbatches - 1):
                    loss_of(model, x[mesh.rank, m]).backward()
            optimizer.step()
            reference.zero_grad()
            for row in x.flatten(0, 1):
                (loss_of(alone, row) / mesh.size).backward()
            if clip:
                want = nn.utils.clip_grad_norm_(alone.parameters(), clip)
                assert float(optimizer.grad_norm) == pytest.approx(float(want), rel=1e-5)
            reference.step()
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            assert float((p - q).abs().max() / q.abs().max()) < 2e-5
        state = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        hashes.append(hashlib.sha256(state).hexdigest())
        reducer.close()
    assert hashes[3] == hashes[4], "a second run"
    assert hashes[5] == hashes[6], "stages 1 and 2 with one microbatch"
    assert hashes[7] == hashes[8], "the same of a fused optimizer, which clips on its way"
    assert len(set(mesh.world._handle.exchange("".join(hashes), "test"))) == 1


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    extra = model.wide.square().mean() + model.gain.square()  # type: ignore[union-attr,operator]
    return model(x).square().mean() + extra


@on_mesh(1, 2)
def test_parameters_of_sixteen_bits(mesh: hsdp.Mesh) -> None:
    """16-bit parameters equal their fp32 masters, rounded. Values that other code writes are taken over."""
    for dtype in (torch.bfloat16, torch.float16):
        model, alone = make_model(dtype), make_model(dtype).float()
        reducer, optimizer = sharded(mesh, model, lr=1e-3)
        reference = torch.optim.AdamW(alone.parameters(), lr=1e-3)

        def step(seed: int) -> None:
            step_both(reducer, model, optimizer, seed, alone, reference)
            for p, q in zip(model.parameters(), alone.parameters(), strict=True):
                assert torch.equal(p, q.to(dtype))
                own = optimizer.master(p)
                place = reducer.slice(names[p])
                assert torch.equal(own, q.reshape(-1)[place.offset : place.offset + own.numel()])

        names = {p: name for name, p in model.named_parameters()}
        for seed in range(10):
            step(seed)
        with torch.no_grad():  # every other element, whole ones among them
            for p, q in zip(model.parameters(), alone.parameters(), strict=True):
                values = torch.full_like(p.data.reshape(-1)[::2], 0.75)
                flat = p.data.reshape(-1).clone()
                flat[::2] = values
                p.copy_(flat.view(p.shape))
                kept = q.reshape(-1).clone()
                kept[::2] = values.float()
                q.copy_(kept.view(q.shape))
        step(10)
        model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()})
        with torch.no_grad():
            for p, q in zip(model.parameters(), alone.parameters(), strict=True):
                q.copy_(p.float())
        step(11)
        states = optimizer.state_dict()["state"].values()
        assert all(s["exp_avg"].dtype is s["master"].dtype is torch.float32 for s in states)
        assert all(torch.equal(s["master"].to_local(), optimizer.master(p))
                   for s, p in zip(states, model.parameters(), strict=True))
        reducer.close()


@on_mesh(1, 2)
def test_masters_that_others_write(mesh: hsdp.Mesh) -> None:
    """Through `master()`, even if other elements of the parameter were written too."""
    model = make_model(torch.bfloat16)
    reducer, optimizer = sharded(mesh, model, lr=0.0, weight_decay=0.0)
    parameters = dict(model.named_parameters())

    def step() -> list[torch.Tensor]:
        run_step(reducer, model, 0, mesh.rank)
        optimizer.step()
        optimizer.wait_parameters()
        masters = [optimizer.state[p]["master"].clone() for p in parameters.values()]
        for (name, p), master in zip(parameters.items(), masters, strict=True):
            place = reducer.slice(name)
            own = p.data.reshape(-1)[place.offset : place.offset + place.count]
            assert torch.equal(own, master.to(p.dtype))
        return masters

    factor = 1.5 + 2**-12  # 16 bits cannot hold the last bit
    before = step()
    for name, p in parameters.items():
        optimizer.master(p)[::2] *= factor
        flat = p.data.reshape(-1).clone()
        flat[reducer.slice(name).offset :][1::3] = 0.75
        p.data.copy_(flat.view(p.shape))
    after = step()
    for was, now in zip(before, after, strict=True):
        expected = was.clone()
        expected[::2] *= factor
        expected[1::3] = 0.75
        assert torch.equal(now, expected)

    for p in parameters.values():  # written in a way that no version counter of torch notices
        optimizer.state[p]["master"].numpy()[...] *= 2
    for was, now in zip(after, step(), strict=True):
        assert torch.equal(now, 2 * was)
    reducer.close()


@pytest.mark.parametrize("call", ["step", "whole_parameters"])
def test_masters_and_parameters_written_at_once(mesh: hsdp.Mesh, call: str) -> None:
    """Written in ways that do not show which elements count."""
    model = make_model(torch.bfloat16)
    reducer, optimizer = sharded(mesh, model, lr=0.0, weight_decay=0.0)

    def write(parameter: torch.Tensor) -> None:
        run_step(reducer, model, 0, 0)
        optimizer.state[model.gain]["master"].data += 1
        parameter.data.add_(1)

    run_step(reducer, model, 0, 0)
    optimizer.step()
    write(model.gain)  # the same values: nothing is ambiguous
    optimizer.step()
    assert model.gain.item() == optimizer.state[model.gain]["master"].item() == 2.5
    model[2].weight.data[0, :17] = torch.nan  # torch rounds it to other bits
    run_step(reducer, model, 0, 0)
    optimizer.step()
    for parameter in (model[2].bias, model.gain):
        run_step(reducer, model, 0, 0)
        optimizer.state[parameter]["master"].data += 1
        optimizer.step()
        assert torch.equal(parameter, optimizer.state[parameter]["master"].bfloat16().view_as(parameter))
    write(model[2].weight)

    def whole() -> None:
        with optimizer.whole_parameters():
            pass

    text = message_of(optimizer.step if call == "step" else whole)
    assert "expected masters to be written through optimizer.master(parameter)" in text
    assert "and '2.weight' written since the same step" in text


@on_mesh(1, 2)
def test_weights_that_others_write(mesh: hsdp.Mesh) -> None:
    """Weights that change without the optimizer's knowledge, as a whole or in other memory."""
    model, alone = make_model(), make_model()
    reducer, optimizer = sharded(mesh, model, lr=1e-2)
    reference = torch.optim.AdamW(alone.parameters(), lr=1e-2)

    def step(seed: int) -> None:
        step_both(reducer, model, optimizer, seed, alone, reference)
        require_equal(model, alone)

    def loaded(m: nn.Module) -> None:
        m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()})

    def halved(m: nn.Module) -> None:
        for p in m.parameters():
            p.data.mul_(0.5)

    def cleared(m: nn.Module) -> None:
        m[2].weight.data.zero_()  # type: ignore[index]

    def other_memory(m: nn.Module) -> None:
        for p in m.parameters():
            p.data = p.data * 2

    def other_layout(m: nn.Module) -> None:
        m[0].weight.data = m[0].weight.data.t().contiguous().t()  # type: ignore[index]

    for seed, write in enumerate((loaded, halved, other_memory, other_layout, cleared)):
        step(2 * seed)
        for m in (model, alone):
            write(m)
        step(2 * seed + 1)
    run_step(reducer, model, 11, mesh.rank)
    model[0].weight.data = torch.zeros(3, 3)
    wanted = r"'0\.weight' as it was: torch\.float32 \(33, 7\) on cpu, got"
    with pytest.raises(hsdp.UsageError, match=wanted):
        optimizer.step()


@on_mesh(1, 2)
def test_states_of_another_rank_are_refused(mesh: hsdp.Mesh, tmp_path: str) -> None:
    """And change nothing; with a frozen parameter, which has no state."""
    model = make_model()
    model[0].bias.requires_grad_(False)
    reducer, optimizer = sharded(mesh, model, lr=1e-2)
    run_step(reducer, model, 0, mesh.rank)
    optimizer.step()
    before = optimizer.full_state_dict()
    torch.save(optimizer.state_dict(), f"{tmp_path}/{mesh.rank}.pt")
    mesh.world.barrier()
    other = torch.load(f"{tmp_path}/{1 - mesh.rank}.pt")
    other["param_groups"][0]["lr"] = 7.0
    with pytest.raises(hsdp.UsageError, match=r"full_state_dict\(\) gave"):
        optimizer.load_state_dict(other)
    assert same(optimizer.full_state_dict(), before)
    plain = torch.optim.AdamW(copy.deepcopy(model).parameters(), lr=0.5)
    plain.load_state_dict(before)
    optimizer.load_state_dict(plain.state_dict())
    assert same(optimizer.full_state_dict()["state"], before["state"])


@on_mesh(1, 2)
def test_an_overflow_skips_the_step(mesh: hsdp.Mesh) -> None:
    """A step in which some rank meets infinity changes nothing on any rank."""
    model = make_model()
    reducer, optimizer = sharded(mesh, model, lr=1e-2, max_grad_norm=1e3)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    for seed in range(3):
        before = [p.detach().clone() for p in model.parameters()]
        with reducer.microbatch(last=True):
            assign(model, seed, mesh.rank)
            if seed == 1 and mesh.rank == 1:
                model[0].weight.grad[3, 3] = torch.inf  # type: ignore[index]
        optimizer.step()
        changed = [not torch.equal(p, q) for p, q in
                   zip(model.parameters(), before, strict=True)]
        assert optimizer.step_was_skipped is (seed == 1)
        assert math.isfinite(optimizer.grad_norm) is (seed != 1)
        assert any(changed) is (seed != 1)
    assert {float(state["step"]) for state in optimizer.state.values()} == {2.0}
    assert len(calls) == 3


class OnAGpu(torch.Tensor):
    """Reading its value waits for the device."""

    in_step = False

    def __bool__(self) -> bool:
        assert not OnAGpu.in_step
        return bool(self.as_subclass(torch.Tensor))


@pytest.mark.parametrize(
    ("dtype", "fused", "layout"),
    [("float32", False, "flat"), ("float32", True, "whole"), ("bfloat16", False, "whole"),
     ("bfloat16", True, "flat")],
)
@on_mesh(1, 2)
def test_offloaded_states_have_the_same_bits(
    mesh: hsdp.Mesh, dtype: str, fused: bool, layout: str
) -> None:
    """Masters and states in other memory, as beside a GPU: the same bits as without. With `fused` the update
    skips by itself, too."""
    runs = []
    for offloads in (False, True):
        model = make_model(getattr(torch, dtype))
        if offloads:
            sharded_optimizer._is_offloaded = lambda offload, reducer: True
            if fused:
                ShardedOptimizer._skips_by_itself = ShardedOptimizer._is_fused
                found = ShardedOptimizer._found_inf_tensor
                ShardedOptimizer._found_inf_tensor = lambda self: found(self).as_subclass(OnAGpu)
        options = {"lr": 1e-2, "max_grad_norm": 3.0, "fused": fused}
        runs.append((model, *sharded(mesh, model, layout=layout, **options)))
    for seed in range(6):
        for model, reducer, optimizer in runs:
            with reducer.microbatch(last=True):
                assign(model, seed, mesh.rank)
                if seed == 2 and mesh.rank == 1:
                    model[0].weight.grad[0, 0] = torch.inf
            OnAGpu.in_step = True
            optimizer.step()
            OnAGpu.in_step = False
            assert optimizer.step_was_skipped is (seed == 2)
            if seed == 3:
                model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()})
                for p in model.parameters():
                    assert optimizer.master(p).device.type == "cpu"
            if seed == 4:
                optimizer.load_state_dict(runs[0][2].full_state_dict())
        for p, q in zip(runs[0][0].parameters(), runs[1][0].parameters(), strict=True):
            assert torch.equal(p, q)
    one, other = (run[2].full_state_dict()["state"] for run in runs)
    for number, state in one.items():
        assert state.keys() == other[number].keys()
        for key, value in state.items():
            assert torch.equal(value, other[number][key]), (number, key)
        assert float(state["step"]) == 5


def test_groups_schedulers_hooks_and_closures(mesh: hsdp.Mesh) -> None:
    model, alone = make_model(), make_model()
    reducer = attached_to(model, mesh)

    def groups(m: nn.Module) -> list[dict[str, Any]]:
        named = dict(m.named_parameters())
        biases = [(n, p) for n, p in named.items() if n.endswith("bias")]
        return [
            {"params": [(n, p) for n, p in named.items() if not n.endswith("bias")], "lr": 0.1},
            {"params": biases, "weight_decay": 0.0},
        ]

    optimizer = ShardedOptimizer(torch.optim.AdamW, groups(model), reducer, lr=0.01)
    reference = torch.optim.AdamW(groups(alone), lr=0.01)
    assert [g["lr"] for g in optimizer.param_groups] == [0.1, 0.01]
    assert optimizer.param_groups[1]["params"][0] is model[0].bias
    assert optimizer.state_dict()["param_groups"][1]["param_names"] == ["0.bias", "2.bias"]
    schedulers = [
        torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (optimizer, reference)
    ]
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    for seed in range(3):
        def closure(seed: int = seed) -> float:
            with coalesce_grad_reduction(reducer):
                run = reducer.microbatch()
                with run:
                    assign(model, seed, 0)
            return 0.5 + seed

        assert optimizer.step(closure) == 0.5 + seed
        assign_mean(alone, seed, 1)
        reference.step()
        for scheduler in schedulers:
            scheduler.step()
        require_equal(model, alone)
    assert seen == ["before", "after"] * 3
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0125)
    optimizer.zero_grad()


def test_it_says_what_it_is(mesh: hsdp.Mesh) -> None:
    model = nn.Linear(3, 2)
    reducer, optimizer = sharded(mesh, model, stage=1, lr=1e-2)
    assert repr(optimizer) == (
        "hsdp.zero.ShardedOptimizer(AdamW, stage 1, 2 parameters, 8 of 8 elements here, lr 0.01, "
        "hsdp.Reducer(Linear, 2 parameters, 8 elements, wire f32, layout flat, no step yet, "
        "hsdp.Mesh(1 x 1, rank 0 of 1, cpu, none)))"
    )


def test_what_is_refused(mesh: hsdp.Mesh) -> None:
    model = make_model()
    reducer = attached_to(model, mesh)

    def make(cls: Any = torch.optim.AdamW, params: Any = model, **options: Any) -> str:
        return message_of(lambda: ShardedOptimizer(cls, params, reducer, **options))

    assert "got Adafactor, which gives other values" in make(torch.optim.Adafactor)
    assert "got Muon, which raised ValueError" in make(torch.optim.Muon)
    assert "got LBFGS, which raised TypeError" in make(torch.optim.LBFGS)
    assert "a class of torch optimizers" in make(nn.Linear)
    with pytest.raises(TypeError, match="unknown"):  # as the class itself says
        ShardedOptimizer(torch.optim.AdamW, model, reducer, unknown=3)
    assert "stage 1, 2 or 3, got 4" in make(stage=4)
    assert "max_grad_norm above 0" in make(max_grad_norm=0.0)
    assert "offload None or 'host', got 'disk'" in make(offload="disk")
    assert "on a mesh of GPUs, got it on the CPU" in make(offload="host")
    assert "one of shape (2, 7)" in make(params=nn.Linear(7, 2))
    assert "got a Reducer without" in make(params=nn.ReLU())
    assert "a Tensor" in make(params=model.gain.data)
    assert "one again as number 1" in message_of(
        lambda: ShardedOptimizer(torch.optim.AdamW, model, [reducer, reducer])
    )
    assert "object of type int" in message_of(
        lambda: ShardedOptimizer(torch.optim.AdamW, model, [3], lr=1.0)
    )
    optimizer = ShardedOptimizer(torch.optim.AdamW, model, reducer)
    assert "which a ShardedOptimizer has already" in make()
    assert "another one" in message_of(lambda: optimizer.add_param_group({"params": [model.gain]}))
    assert "shape (4,)" in message_of(lambda: optimizer.master(nn.Parameter(torch.zeros(4))))
    assert "expected a finished step, got none; run the microbatches" in message_of(optimizer.step)
    with reducer.microbatch(last=False):
        assign(model, 0, 0)
    assert "last=True" in message_of(optimizer.step)
    with reducer.microbatch(last=True):
        assign(model, 0, 0)
    optimizer.step()
    assert "last=True between two calls" in message_of(optimizer.step)
    with coalesce_grad_reduction(reducer):
        assert "outside of a window" in message_of(optimizer.step)
        assign(model, 1, 0)
    optimizer.step()
    assert "parameter groups of [6], got [2]" in message_of(
        lambda: optimizer.load_state_dict({"state": {}, "param_groups": [{"params": [0, 1]}]})
    )
    for copying in (lambda: copy.deepcopy(optimizer), lambda: pickle.dumps(optimizer)):
        assert "state_dict()" in message_of(copying)
    optimizer.close()
    assert "got a closed one" in message_of(optimizer.step)
    again = ShardedOptimizer(torch.optim.AdamW, model, reducer)
    assert "those of the step before" in message_of(again.step)  # the first call has taken them


@on_mesh(1, 2)
def test_whole_parameters(mesh: hsdp.Mesh) -> None:
    """Whole parameters in fp32, read and written back."""
    for dtype in (torch.float32, torch.bfloat16):
        model, alone = make_model(dtype), make_model(dtype).float()
        reducer, optimizer = sharded(mesh, model, lr=1e-2)
        reference = torch.optim.AdamW(alone.parameters(), lr=1e-2)
        for seed in range(4):
            step_both(reducer, model, optimizer, seed, alone, reference)
            writes = seed % 2 == 0
            with optimizer.whole_parameters(write_back=writes) as whole:
                for name, p in alone.named_parameters():
                    assert torch.allclose(whole[name], p, rtol=1e-6, atol=1e-7)
                    assert whole[name].shape == p.shape
                    whole[name].mul_(0.5)
            with torch.no_grad():
                for p, q in zip(model.parameters(), alone.parameters(), strict=True):
                    if writes:
                        q.mul_(0.5)
                    assert torch.allclose(p.float(), q.to(dtype).float(), rtol=1e-6, atol=1e-7)
        reducer.close()


class Broken(torch.optim.SGD):
    """Cannot be made for more than one parameter."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        if len(self.param_groups[0]["params"]) > 1:
            raise RuntimeError("out of order")


def run_refusals() -> list[str]:
    """One rank cannot make its optimizer; afterwards all ranks can."""
    found = []
    with hsdp.init_mesh(1, 2) as mesh:
        model = make_model()
        reducer = attached_to(model, mesh)
        for bad in ({"stage": 5}, {"max_grad_norm": -1.0}, {"optimizer_class": Broken},
                    {"reducer": [reducer, reducer]}):
            options: Any = {"optimizer_class": torch.optim.SGD, "reducer": reducer}
            options |= bad if mesh.rank == 1 else {}
            try:
                ShardedOptimizer(params=model, lr=0.1, **options)
            except (hsdp.Error, RuntimeError) as error:
                found.append(f"{type(error).__name__}: {error}")
        optimizer = ShardedOptimizer(torch.optim.SGD, model, reducer, lr=0.1)
        run_step(reducer, model, 0, mesh.rank)
        optimizer.step()
    return found


def test_a_rank_that_cannot_make_it_is_named_to_the_others(ranks: Launcher) -> None:
    others, own = ranks(2, run_refusals)
    for text, wanted in zip(own, ("stage 1, 2 or 3, got 5", "max_grad_norm above 0", "out of order",
                                  "each Reducer once"), strict=True):
        assert wanted in text
    for text, wanted in zip(others, own, strict=True):
        assert text.startswith("StepAbortedError")
        assert "rank 1 of 2 could not make its ShardedOptimizer" in text
        assert wanted.split(": ", 1)[1] in text


@on_mesh(1, 2)
def test_ranks_with_other_settings_do_not_step(mesh: hsdp.Mesh) -> None:
    """A rank with its own learning rate, as when a schedule follows the local loss."""
    model = make_model()
    reducer, optimizer = sharded(mesh, model, lr=0.5, weight_decay=0.0)
    run_step(reducer, model, 0, mesh.rank)
    optimizer.step()
    if mesh.rank == 1:  # the same values as another type, and an entry that is not a setting
        group = optimizer.param_groups[0]
        group.update(betas=list(group["betas"]), weight_decay=0, lr=torch.tensor([0.5]), note="mine")
    run_step(reducer, model, 0, mesh.rank)
    optimizer.step()
    optimizer.param_groups[0].pop("note", None)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.param_groups[0]["lr"] = 0.5 / (1 + mesh.rank)
    with pytest.raises(hsdp.MismatchError) as caught:
        run_step(reducer, model, 1, mesh.rank)
        optimizer.step()
    assert all(map(torch.equal, model.parameters(), before))
    assert "ShardedOptimizer 'lr 0.5' on every rank, got 'lr 0.25' on rank 1 of 2" in str(caught.value)


class Counting(torch.optim.SGD):
    """Counts in its groups, as schedule-free optimizers do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["lr"] = 0.5 / group["k"]
        return super().step(closure)


@on_mesh(1, 2)
def test_states_of_every_kind(mesh: hsdp.Mesh) -> None:
    """States that depend on groups, are kept in groups, exist without others, or are cleared."""
    def groups(m: nn.Module) -> list[dict[str, Any]]:
        p = list(m.parameters())
        return [{"params": p[:2], "momentum": 0.9}, {"params": p[2:]}]

    model, alone = make_model(), make_model()
    reducer = attached_to(model, mesh)
    optimizer = ShardedOptimizer(torch.optim.SGD, groups(model), reducer, lr=0.1)
    reference = torch.optim.SGD(groups(alone), lr=0.1)
    for p in model.parameters():
        assert not optimizer.state[p].get("momentum_buffer")  # reading fills a defaultdict
    for seed in range(3):
        step_both(reducer, model, optimizer, seed, alone, reference)
        require_equal(model, alone)
        if seed == 1:
            optimizer.state.clear()
            reference.state.clear()
    full, want = optimizer.full_state_dict()["state"], reference.state_dict()["state"]
    for number in (0, 1):
        got = full[number]["momentum_buffer"]
        wanted = want[number]["momentum_buffer"]
        assert got.shape == wanted.shape and torch.allclose(got, wanted)
    whole = optimizer.full_state_dict()
    del whole["state"][1]
    with pytest.raises(hsdp.UsageError, match=r"expected states \['momentum_buffer'\] of"):
        optimizer.load_state_dict(whole)
    seen: list[str] = []
    optimizer.register_load_state_dict_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_load_state_dict_post_hook(lambda *_: seen.append("after"))
    optimizer.load_state_dict(optimizer.full_state_dict())
    assert seen == ["before", "after"]
    reducer.close()
    model, alone = make_model(), make_model()
    reducer, optimizer = sharded(mesh, model, Counting, lr=0.1)
    counting = Counting(alone.parameters(), lr=0.1)
    for seed in range(3):
        step_both(reducer, model, optimizer, seed, alone, counting)
        require_equal(model, alone)
    assert optimizer.param_groups[0]["k"] == 3


@on_mesh(1, 2)
def test_memory_that_is_swapped(mesh: hsdp.Mesh) -> None:
    """Other memory or another layout under a parameter, on all ranks."""
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(2)
        model = nn.Linear(6, 6).to(dtype)
        alone = copy.deepcopy(model).float()
        reducer, optimizer = sharded(mesh, model, lr=1e-2)
        reference = torch.optim.AdamW(alone.parameters(), lr=1e-2)

        def step(seed: int) -> None:
            step_both(reducer, model, optimizer, seed, alone, reference)
            for p, q in zip(model.parameters(), alone.parameters(), strict=True):
                assert torch.equal(p, q.to(dtype))

        step(0)
        average = torch.full_like(model.weight.data, 0.5)
        kept = model.weight.data
        backup = kept.clone()
        model.weight.data = average  # and back below: references to the old memory stay valid
        alone.weight.data.copy_(average)
        step(1)
        assert torch.equal(kept, backup)
        model.weight.data = kept
        alone.weight.data.copy_(kept)
        step(2)
        model.weight.data = model.weight.data.t()  # the same memory
        alone.weight.data.copy_(model.weight.data)
        if dtype is torch.bfloat16:  # where elements are equal the masters keep their extra bits
            with optimizer.whole_parameters() as whole:
                alone.weight.data.copy_(whole["weight"])
        step(3)
        reducer.close()


@on_mesh(1, 2)
def test_states_are_of_slices_and_counted(mesh: hsdp.Mesh) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = make_model(dtype)
        reducer, optimizer = sharded(mesh, model)
        run_step(reducer, model, 0, mesh.rank)
        master_bytes = reducer.stats().optimizer_bytes
        optimizer.step()
        states = [v for state in optimizer.state.values() for k, v in state.items() if k != "master"]
        kept = sum(v.numel() for v in states if v.dim() > 0)
        assert mesh.world.all_reduce(kept) == 2 * sum(p.numel() for p in model.parameters())
        assert master_bytes == (4 * kept // 2 if dtype is torch.bfloat16 else 0)  # fp32 masters
        counted = master_bytes + sum(v.nbytes for v in states)
        assert reducer.stats().optimizer_bytes == counted
        optimizer.close()
        reducer.close()
        assert reducer.stats().optimizer_bytes == counted
        del optimizer, states
        gc.collect()
        assert reducer.stats().optimizer_bytes == 0
