"""Parameters that are released at stage 3: what memory they take, who may read them, and how they come
back."""

from __future__ import annotations

import copy
import io
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from conftest import on_ranks
from one_rank import attached_to
from same_tensors import require_same
from torch import nn

import hsdp
from hsdp.torch.flat_slice import FlatSlice
from hsdp.torch.units.released_parameter import ReleasedParameter
from hsdp.torch.units.unit_plan import module_units
from hsdp.zero import ShardedOptimizer, coalesce_grad_reduction


class Tower(nn.Module):
    """Layers with one layer before and one after them."""

    def __init__(self, depth: int = 4, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(width, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.last = nn.Linear(width, 1)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: Any) -> Any:
        x = self.encode(x)
        return self.last(x)

    def encode(self, x: Any) -> Any:
        x = self.first(x)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def rows(mesh: hsdp.Mesh, seed: int = 0) -> torch.Tensor:
    return torch.randn(3, 32, generator=torch.Generator().manual_seed(10 * seed + mesh.rank))


@contextmanager
def training(
    model: nn.Module, shard: int = 2, replicate: int = 1, layout: Any = "flat",
    optimizer: Any = torch.optim.AdamW, **options: Any
) -> Iterator[tuple[hsdp.Mesh, hsdp.Reducer, ShardedOptimizer]]:
    options = {"stage": 3, "lr": 0.01, "persistence_threshold": 40, **options}
    with (
        hsdp.init_mesh(replicate=replicate, shard=shard) as mesh,
        hsdp.Reducer(mesh, layout=layout, bucket_bytes=1 << 12) as reducer,
    ):
        reducer.attach(model)
        made = ShardedOptimizer(optimizer, model, reducer, **options)
        yield mesh, reducer, made
        made.close()


def at_both_stages(
    make: Callable[[], nn.Module] = Tower, **options: Any
) -> Iterator[tuple[Any, hsdp.Mesh, hsdp.Reducer, ShardedOptimizer]]:
    """A training at stage 2 and one at stage 3, which must end with the same bits."""
    results = []
    for stage in (2, 3):
        torch.manual_seed(0)
        model = make()
        with training(model, stage=stage, **options) as (mesh, reducer, optimizer):
            assert any(map(is_released, model.parameters())) == (stage == 3)
            yield model, mesh, reducer, optimizer
            results.append(optimizer.full_model_state_dict(model))
    require_same(*results)


def step(model: nn.Module, mesh: hsdp.Mesh, reducer: hsdp.Reducer, optimizer: Any, seed: int = 0) -> None:
    with reducer.microbatch(last=True):
        model(rows(mesh, seed)).square().mean().backward()
    optimizer.step()


def held_bytes(model: nn.Module) -> int:
    kept = 0
    for p in model.parameters():
        with torch._C.DisableTorchFunctionSubclass():
            kept += p.untyped_storage().nbytes()
    return kept


def is_released(p: torch.Tensor) -> bool:
    return type(p) is ReleasedParameter


# A module's parameters exist during its forward and backward passes, beside those of the root and, with a
# prefetch, of the next module. All others are slices.


@pytest.mark.parametrize("prefetch", [True, False])
@on_ranks(2)
def test_a_rank_holds_slices_and_what_is_in_use(prefetch: bool) -> None:
    model = Tower()
    layer_bytes = sum(p.nbytes for p in model.layers[0].parameters() if p.numel() > 40)
    root_bytes = model.first.weight.nbytes
    persistent = sum(p.nbytes for p in model.parameters() if p.numel() <= 40)
    whole = held_bytes(model)
    with training(model, prefetch_bytes=None if prefetch else 0) as (mesh, reducer, optimizer):
        assert held_bytes(model) == persistent
        stored = sum(one.stored.nbytes for unit in optimizer._units.units for one in unit.slices)
        assert stored <= -(-(whole - persistent) // 2) + 128 * 5
        for unit in optimizer._units.units:  # each is spread over the ranks
            own = sum(one.stored.nbytes for one in unit.slices)
            assert abs(own - unit.nbytes / 2) <= 256, unit.name
        for seed in range(3):
            peaks: list[int] = []

            def look(*_: Any) -> None:
                peaks.append(held_bytes(model))  # noqa: B023

            handles = [m.register_forward_hook(look) for m in [model, *model.layers]]
            for layer in model.layers:
                handles.append(layer.weight.register_hook(look))
            step(model, mesh, reducer, optimizer, seed)
            for handle in handles:
                handle.remove()
            assert len(peaks) == 9
            ahead = layer_bytes if prefetch and seed > 0 else 0
            assert max(peaks) <= persistent + root_bytes + layer_bytes + ahead
            if prefetch and seed > 0:
                assert max(peaks) == persistent + root_bytes + 2 * layer_bytes, "one is ahead"
            assert held_bytes(model) == persistent
        assert all(is_released(p) == (p.numel() > 40) for p in model.parameters())
    assert not any(map(is_released, model.parameters()))
    assert held_bytes(model) == whole


# Of a released parameter, only its shape, gradient and slice exist.


@on_ranks(2)
def test_nobody_reads_a_released_parameter() -> None:
    model = Tower()
    with training(model) as (mesh, reducer, optimizer):
        weight = model.layers[1].weight
        assert weight.shape == (32, 32)
        assert weight.dtype is torch.float32
        assert weight.requires_grad
        assert "Linear" in repr(model)
        master = optimizer.master(weight)
        assert 0 < master.numel() < weight.numel()
        for read in (
            lambda: weight + 1, lambda: weight.norm(), lambda: weight.clone(), lambda: print(weight),
            lambda: copy.deepcopy(model), lambda: weight.data, lambda: weight.detach(),
            lambda: weight.numpy(), lambda: weight.tolist(), lambda: torch.stack([weight, weight]),
            lambda: weight.data_ptr(), lambda: weight.untyped_storage(), lambda: model.half(),
            lambda: nn.functional.linear(rows(mesh), weight), lambda: torch.equal(weight, weight),
            lambda: weight.as_subclass(nn.Parameter), lambda: model.layers[1].weight.copy_(weight),
            lambda: torch.nn.utils.parameters_to_vector(model.parameters()),
            lambda: hsdp.broadcast_parameters(mesh, model),
        ):
            with pytest.raises(hsdp.UsageError, match=r"'(layers|first).*unshard"):
                read()
        with pytest.raises(hsdp.UsageError, match="first.weight.*unshard"):
            model.encode(rows(mesh))  # the root's forward does not run
        step(model, mesh, reducer, optimizer)


@pytest.mark.parametrize("write", [True, False])
@on_ranks(2)
def test_an_unsharded_module_may_be_written_to(write: bool) -> None:
    for model, mesh, reducer, optimizer in at_both_stages():
        is_stage_3 = is_released(model.layers[1].weight)
        step(model, mesh, reducer, optimizer)
        optimizer.unshard(model.layers[1])
        assert not is_released(model.layers[1].weight)
        assert is_released(model.layers[2].weight) == is_stage_3
        before = model.layers[1].weight.detach().clone()
        if write:
            model.layers[1].weight.data.mul_(2)
        step(model, mesh, reducer, optimizer, 1)
        assert not is_released(model.layers[1].weight)
        assert not torch.equal(model.layers[1].weight, before)
        if write:
            with torch.no_grad():
                model.layers[1].weight[3] = 7
                model.layers[1].weight.data[4] = 8
        optimizer.reshard(model.layers[1])
        assert is_released(model.layers[1].weight) == is_stage_3
        step(model, mesh, reducer, optimizer, 2)
        with optimizer.whole_parameters(write_back=write) as whole:
            if write:
                whole["layers.2.bias"] += 1
                whole["layers.2.weight"] += 1
        step(model, mesh, reducer, optimizer, 3)
        assert optimizer.full_model_state_dict(model).keys() == Tower().state_dict().keys()


@pytest.mark.parametrize(
    ("layout", "threshold", "stays"), [("flat", 40, False), ("flat", 40, True), ("whole", 0, False)]
)
@on_ranks(2)
def test_a_model_with_two_optimizers(layout: Any, threshold: int, stays: bool) -> None:
    """Of layers and the rest, or of the matrices and biases of the layers."""
    options: Any = {"lr": 0.01, "persistence_threshold": threshold, "reshard_after_backward": not stays}
    states = []
    for stage in (2, 3):
        model = Tower()
        first = [p for p in model.layers.parameters() if layout == "flat" or p.dim() == 2]
        rest = [p for p in model.parameters() if all(p is not f for f in first)]
        cls = torch.optim.AdamW if layout == "flat" else torch.optim.Muon
        with hsdp.init_mesh(shard=2) as mesh, attached_to(model, mesh, layout=layout) as reducer:
            both = [ShardedOptimizer(of, part, reducer, stage=stage, **options)
                    for of, part in ((cls, first), (torch.optim.AdamW, rest))]
            for seed in range(3):
                with reducer.microbatch(last=True):
                    model(rows(mesh, seed)).square().mean().backward()
                for optimizer in both:
                    optimizer.step()
            one, other = (optimizer.full_model_state_dict(model) for optimizer in both)
            require_same(one, other)
            assert is_released(model.layers[0].weight) == (stage == 3)
            states.append(one)
            for optimizer in both:
                optimizer.close()
        require_same(model.state_dict(), one)
    require_same(*states)


@on_ranks(2)
def test_other_methods_may_be_forwards() -> None:
    for model, mesh, reducer, optimizer in at_both_stages():
        if is_released(model.first.weight):
            optimizer.register_forward_method(model, "encode")
            with pytest.raises(hsdp.UsageError, match="whose parameters are a unit"):
                optimizer.register_forward_method(nn.Linear(1, 1), "forward")
        for seed in range(3):
            with torch.no_grad():
                model.encode(rows(mesh))
            with reducer.microbatch(last=True):
                model.last(model.encode(rows(mesh, seed))).sum().backward()
            optimizer.step()


# What the ranks do differently.


@on_ranks(2)
def test_ranks_may_go_different_ways() -> None:
    for model, mesh, reducer, optimizer in at_both_stages():
        for seed in range(6):
            try:
                with reducer.step():
                    with reducer.microbatch(last=False):
                        model(rows(mesh, seed)).mean().backward()
                    with reducer.microbatch(last=True):
                        if seed == 2 and mesh.rank == 1:
                            model.layers[1](model.layers[0](rows(mesh)))
                            raise KeyError("this rank's batch")
                        for _ in range(mesh.rank + 1 if seed % 2 else 1):
                            with torch.no_grad():
                                model.layers[seed % 4](rows(mesh))
                                if mesh.rank == 0:
                                    model(rows(mesh))
                        model(rows(mesh, seed)).square().mean().backward()
                optimizer.step()
            except KeyError:
                assert mesh.rank == 1
            except hsdp.StepAbortedError as error:
                assert seed == 2 and mesh.rank == 0
                assert list(error.ranks) == [1]


@pytest.mark.parametrize("layout", ["flat", "dim0", "whole"])
@on_ranks(4)
def test_windows_and_loss_scales_have_the_bits_of_stage_2(layout: str) -> None:
    for model, mesh, reducer, optimizer in at_both_stages(layout=layout, shard=2, replicate=2):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for seed in range(4):
            with coalesce_grad_reduction(reducer, last=True):
                for i in range(3):
                    scaler.scale(model(rows(mesh, 3 * seed + i)).square().mean()).backward()
            scaler.unscale_(optimizer)
            reducer.clip_grad_norm_(0.5)
            if seed == 2:
                optimizer.param_groups[0]["lr"] = 0.1
            scaler.step(optimizer)
            scaler.update()


@pytest.mark.parametrize("forward", [True, False])
@on_ranks(2)
def test_units_may_stay_until_the_step(forward: bool) -> None:
    model, reference = Tower().bfloat16(), Tower().bfloat16()
    options: dict[str, Any] = {"reshard_after_forward": forward, "prefetch_bytes": 0}
    with (
        training(reference, **options) as (_, its_reducer, its_optimizer),
        training(model, reshard_after_backward=False, **options) as (mesh, reducer, optimizer),
    ):
        released = sum(map(is_released, model.parameters()))
        for seed in range(3):
            for one, own, opt in ((reference, its_reducer, its_optimizer), (model, reducer, optimizer)):
                before = opt.gather_stats().gather_count
                counts = []
                for i in range(2):
                    with own.microbatch(last=i == 1):
                        one(rows(mesh, 3 * seed + i).bfloat16()).square().mean().backward()
                    counts.append(opt.gather_stats().gather_count - before)
                if opt is optimizer:
                    assert not any(map(is_released, model.parameters()))
                    # The first forward and backward pass. The root stays between them, and so does the last
                    # layer once its next use is known. The first step's record has that layer twice and is
                    # followed once.
                    twice = released - 1 - (seed > 1) if forward else 0
                    assert counts == [released + twice] * 2, (counts, released, seed)
                    with torch.no_grad():
                        model(rows(mesh).bfloat16())
                    assert opt.gather_stats().gather_count - before == counts[1]
                with torch.no_grad():
                    if seed == 1 and opt is optimizer:  # as at stage 2, the value is taken over
                        model.layers[1].weight.mul_(2)
                    elif seed == 1:
                        opt.unshard(reference.layers[1])
                        reference.layers[1].weight.mul_(2)
                        opt.reshard(reference.layers[1])
                opt.step()
                assert sum(map(is_released, one.parameters())) == released
        for key, value in its_optimizer.full_model_state_dict(reference).items():
            assert torch.equal(value, optimizer.full_model_state_dict(model)[key]), key
        # A window is one microbatch. Values loaded within it are used at once.
        before = optimizer.gather_stats().gather_count
        with coalesce_grad_reduction(reducer, last=True):
            for i in range(3):
                model(rows(mesh, i).bfloat16()).square().mean().backward()
        assert optimizer.gather_stats().gather_count - before == released + twice
        state = copy.deepcopy(optimizer.state_dict())
        for one in state["state"].values():
            one["master"].to_local().zero_()
        optimizer.load_state_dict(state)
        seen = []
        for layer in model.layers:
            layer.register_forward_pre_hook(lambda m, _: seen.append(m.weight.abs().max().item()))
        with torch.no_grad():
            model(rows(mesh).bfloat16())
        assert seen == [0.0] * 4
        optimizer.step()


# A value written to a unit that stays, before a whole copy is asked for, is taken over as at stage 2.
@pytest.mark.parametrize("how", ["unshard", "whole", "write back"])
@on_ranks(2)
def test_what_is_written_to_what_stays_counts(how: str) -> None:
    wholes = []
    for model, mesh, reducer, optimizer in at_both_stages(reshard_after_backward=False):
        step(model, mesh, reducer, optimizer)
        with reducer.microbatch(last=True):
            model(rows(mesh, 1)).square().mean().backward()
        with torch.no_grad():
            model.layers[1].weight.mul_(2)
        if how == "unshard":
            optimizer.unshard(model.layers[1])
            optimizer.reshard(model.layers[1])
        else:
            with optimizer.whole_parameters(write_back=how == "write back") as whole:
                wholes.append(whole)
        optimizer.step()
    if wholes:
        require_same(*wholes)


# One rank still has its units, the other has none, when both gather all.
@on_ranks(2)
def test_ranks_with_other_units_gather_all() -> None:
    model = Tower()
    with training(model, reshard_after_backward=False) as (mesh, reducer, optimizer):
        try:
            with reducer.microbatch(last=True):
                loss = model(rows(mesh)).square().mean()
                if mesh.rank == 1:
                    raise KeyError("user code")
                loss.backward()
            reducer.gather_gradients()  # this tells it of the other rank's error
        except (KeyError, hsdp.StepAbortedError):
            pass
        whole = optimizer.full_model_state_dict(model)
        assert all(torch.equal(value, p) for value, p in zip(whole.values(), Tower().state_dict().values()))
        optimizer.unshard(model)
        mesh.world.all_reduce(torch.ones(1))
        optimizer.reshard(model)
        step(model, mesh, reducer, optimizer)


@on_ranks(2)
def test_what_stays_is_given_back_where_nothing_is_updated() -> None:
    model = Tower()
    with training(model, reshard_after_backward=False) as (mesh, reducer, optimizer):
        released = sum(map(is_released, model.parameters()))
        with reducer.microbatch(last=True):
            (model(rows(mesh)).square().mean() * float("inf")).backward()
        assert not any(map(is_released, model.parameters()))
        optimizer.step()
        assert optimizer.step_was_skipped
        assert sum(map(is_released, model.parameters())) == released
        with reducer.microbatch(last=True):
            model(rows(mesh)).square().mean().backward()
        state = {key: copy.deepcopy(value) for key, value in model.state_dict().items()}
        assert sum(isinstance(value, FlatSlice) for value in state.values()) == released
        with torch.no_grad():
            model(rows(mesh))
            model(rows(mesh))
        model.load_state_dict(state)
        optimizer.step()


class Branches(nn.Module):
    """Runs one of its layers or another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(12))

    def forward(self, x: Any, way: list[int]) -> Any:
        for number in way:
            x = self.layers[number](x)
        return x


# Guesses stop at what will have been released by then.
@pytest.mark.parametrize("forward", [True, False])
@on_ranks(2)
def test_units_are_gathered_once_a_pass(forward: bool) -> None:
    model = Tower(depth=6)
    with training(model, reshard_after_forward=forward) as (_, reducer, optimizer):
        mesh = reducer.mesh
        released = sum(map(is_released, (p for p in model.parameters() if p.dim() > 1)))
        for _ in range(3):
            before = optimizer.gather_stats().gather_count
            with coalesce_grad_reduction(reducer):
                for seed in range(4):
                    model(rows(mesh, seed)).square().mean().backward()
            gathers = optimizer.gather_stats().gather_count - before
            optimizer.step()
        assert gathers <= 4 * released * (2 if forward else 1), (gathers, released)


@on_ranks(2)
def test_wrong_guesses_are_given_back() -> None:
    model = Branches()
    layer_bytes = model.layers[0].weight.nbytes
    persistent = sum(layer.bias.nbytes for layer in model.layers)
    generator = torch.Generator().manual_seed(1)
    with training(model) as (mesh, _, _), torch.no_grad():
        for _ in range(30):
            model(rows(mesh), torch.randint(0, 12, (4,), generator=generator).tolist())
            assert held_bytes(model) <= persistent + 3 * layer_bytes


# The head is used outside the module that gathers it, which a pass between forward and backward may do.
@on_ranks(2)
def test_a_master_may_be_read_between_the_passes() -> None:
    for model, mesh, reducer, optimizer in at_both_stages():
        for seed in range(2):
            with reducer.microbatch(last=True):
                loss = model(rows(mesh, seed)).square().mean()
                optimizer.master(model.layers[0].weight)
                loss.backward()
            optimizer.step()


# After a forward pass without a backward pass the root still exists, and its slices were replaced.
@pytest.mark.parametrize("how", ["load", "write"])
@on_ranks(2)
def test_what_is_written_to_what_expired_counts(how: str) -> None:
    for model, mesh, reducer, optimizer in at_both_stages():
        step(model, mesh, reducer, optimizer)
        optimizer_state = optimizer.state_dict()
        whole = optimizer.full_model_state_dict(model)
        step(model, mesh, reducer, optimizer, 1)
        model(rows(mesh))
        if how == "load":
            optimizer.load_state_dict(optimizer_state)
            model.load_state_dict({key: value * 2 for key, value in whole.items()})
        else:
            optimizer.master(model.first.weight)
            with torch.no_grad():
                model.first.weight[3:].mul_(2)
        step(model, mesh, reducer, optimizer, 2)


@on_ranks(2)
def test_memory_of_any_order() -> None:
    def make() -> nn.Module:
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last), nn.Flatten(), nn.Linear(8 * 4, 3)
        )
        model[2].weight = nn.Parameter(model[2].weight.detach().t().clone().t())
        shared = torch.randn(2 * 3)
        model.register_parameter("a", nn.Parameter(shared[:3]))
        model.register_parameter("b", nn.Parameter(shared[3:]))
        model[2].register_forward_hook(
            lambda _, args, out: out * model.a + model.b  # type: ignore[operator]
        )
        return model

    for model, mesh, reducer, optimizer in at_both_stages(make, persistence_threshold=0):
        for seed in range(3):
            x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(seed + mesh.rank))
            with reducer.microbatch(last=True):
                model(x).square().mean().backward()
            optimizer.step()
        assert [p.stride() for p in model.parameters()][2] == (27, 1, 9, 3)


@on_ranks(2)
def test_without_released_parameters_it_is_stage_2() -> None:
    counts = {}
    for stage, threshold in ((2, 0), (3, float("inf"))):
        model = Tower()
        with training(model, stage=stage, persistence_threshold=threshold) as (mesh, reducer, optimizer):
            for seed in range(3):
                step(model, mesh, reducer, optimizer, seed)
            optimizer.wait_parameters()
            counts[stage] = optimizer.gather_stats()[:2]
    assert counts[2] == counts[3]


@on_ranks(2)
def test_options_are_checked() -> None:
    model = Tower()
    with hsdp.init_mesh(shard=2) as mesh, attached_to(model, mesh) as reducer:
        for options, text in (
            ({"stage": 4}, "stage 1, 2 or 3"),
            ({"prefetch_bytes": -1}, "prefetch_bytes of at least 0"),
            ({"persistence_threshold": -1}, "persistence_threshold of at least 0"),
            ({"units": nn.Linear}, "units of module types"),
            ({"units": [3]}, "units of module types"),
        ):
            with pytest.raises(hsdp.UsageError, match=text):
                ShardedOptimizer(torch.optim.AdamW, model, reducer, **{"stage": 3, **options})
        assert not any(map(is_released, model.parameters()))


@on_ranks(2)
def test_copies_and_forked_children() -> None:
    model = Tower()
    with training(model) as (mesh, reducer, optimizer):
        step(model, mesh, reducer, optimizer)
        optimizer.unshard(model)
        optimizer.wait_parameters()
        twin = copy.deepcopy(model)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        want = model(rows(mesh))
        optimizer.reshard(model)
        for one in (twin, loaded):
            assert torch.equal(one(rows(mesh)), want)
            assert not any(map(is_released, one.parameters()))
        assert is_released(model.layers[0].weight)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about forks beside threads
            child = os.fork()
        if child == 0:
            try:
                model(rows(mesh))
            except hsdp.UsageError as error:
                os._exit(7 if "a forked child" in str(error) else 8)
            os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        step(model, mesh, reducer, optimizer)


@on_ranks(2)
def test_what_others_hold_stays() -> None:
    model = Tower()
    with training(model) as (mesh, reducer, optimizer):
        step(model, mesh, reducer, optimizer)
        # A state dict of whole parameters, after they were released.
        optimizer.unshard(model)
        optimizer.wait_parameters()
        whole = model.state_dict()
        copied = {key: value.clone() for key, value in whole.items()}
        optimizer.reshard(model)
        assert all(torch.equal(whole[key], copied[key]) for key in whole)
        # Parameters that have become views of one vector.
        optimizer.unshard(model)
        vector = torch.cat([value.flatten() for key, value in copied.items() if key != "scale"])
        torch.nn.utils.vector_to_parameters(vector * 2, model.parameters())
        optimizer.reshard(model)
        assert vector.sum().isfinite()
        got = optimizer.full_model_state_dict(model)
        assert all(torch.equal(got[key], 2 * copied[key]) for key in got if key != "scale")
        # Weights that are loaded while a layer is gathered ahead.
        for _ in range(2):
            with torch.no_grad():
                model(rows(mesh))
        time.sleep(0.05)
        model.load_state_dict(copied)
        twin = Tower()
        twin.load_state_dict(copied)
        with torch.no_grad():
            assert torch.equal(model(rows(mesh)), twin(rows(mesh)))
        # A graph from before the step.
        result = model(rows(mesh)).sum()
        step(model, mesh, reducer, optimizer)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.backward()
        step(model, mesh, reducer, optimizer)
    # A dropped optimizer.
    model = Tower()
    with hsdp.init_mesh(shard=2) as mesh, attached_to(model, mesh) as reducer:
        optimizer = ShardedOptimizer(torch.optim.AdamW, model, reducer, stage=3, persistence_threshold=40)
        del optimizer
        with pytest.raises(hsdp.UsageError, match=r"gone without close\(\)"):
            model(rows(mesh))


@on_ranks(2)
def test_containers_of_modules() -> None:
    def make() -> nn.Module:
        encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True), 2
        )
        stages = nn.ModuleList(
            nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Linear(32, 32)}) for _ in range(2)
        )
        model = nn.ModuleDict({"encoder": encoder, "tower": Tower(), "stages": stages})
        model["ints"] = nn.Identity()
        model["ints"].table = nn.Parameter(torch.ones(100, dtype=torch.int8), requires_grad=False)
        model["frozen"] = nn.Linear(32, 32).requires_grad_(False)
        return model

    outputs = []
    for model, mesh, reducer, optimizer in at_both_stages(make):
        for seed in range(3):
            x = torch.stack([rows(mesh, seed)] * 2)
            mask = torch.tensor([[False, False, True], [False, False, False]])
            with torch.no_grad():
                model.eval()
                outputs.append(model["encoder"](x, src_key_padding_mask=mask))
                model.train()
            with reducer.microbatch(last=True):
                y = model["frozen"](model["encoder"](x, src_key_padding_mask=mask))
                for one in model["stages"]:
                    y = one["b"](torch.relu_(one["a"](y)))
                model["tower"](y).square().mean().backward()
            optimizer.step()
    assert all(map(torch.equal, outputs[:3], outputs[3:]))


@on_ranks(2)
def test_parametrized_layers() -> None:
    def make() -> nn.Module:
        model = Tower()
        for layer in model.layers:
            torch.nn.utils.parametrizations.weight_norm(layer)
        return model

    for model, mesh, reducer, optimizer in at_both_stages(make, persistence_threshold=0):
        for seed in range(3):
            step(model, mesh, reducer, optimizer, seed)


def test_units_of_a_model() -> None:
    def units(model: nn.Module, chosen: Any = None) -> dict[str, list[str]]:
        return {unit.name: list(unit.parameters) for unit in module_units(model, chosen)}

    tower = Tower(depth=2)
    root = ["first.weight", "first.bias", "last.weight", "last.bias"]
    layers = {f"layers.{i}": [f"layers.{i}.weight", f"layers.{i}.bias"] for i in range(2)}
    assert units(tower) == {"Tower": root, **layers}
    every = [name for name, _ in tower.named_parameters()]
    assert units(tower, []) == {"Tower": every}
    assert list(units(tower, [nn.Linear])) == ["first", "layers.0", "layers.1", "last"]
    assert units(tower, lambda module: module is tower.last)["last"] == ["last.weight", "last.bias"]
    tower.last.weight = tower.layers[0].weight  # in several units
    assert units(tower)["Tower"] == ["first.weight", "first.bias", "layers.0.weight", "last.bias"]
    tower.layers[1] = torch.jit.script(nn.Linear(2, 2))
    assert "layers.1" not in units(tower)
    attention = nn.MultiheadAttention(8, 2)  # it reads its submodules' parameters
    assert list(units(attention, [nn.Linear])) == ["MultiheadAttention"]
    nested = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2)]), nn.Linear(2, 2)])
    assert list(units(nested)) == ["0.0", "1"]
