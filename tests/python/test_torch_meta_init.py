"""Models on the meta device: they get the values of a whole init, and no rank ever holds more than a few
units."""

from __future__ import annotations

import operator
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import on_mesh, on_meshes
from one_rank import attached_to
from same_tensors import require_same
from torch import nn

import hsdp
from hsdp.errors import MismatchError, StepAbortedError, UsageError
from hsdp.torch.units.released_parameter import ReleasedParameter
from hsdp.zero import ShardedOptimizer

SEED = 5


class Rotary(nn.Module):
    """A module with a buffer that is not in checkpoints."""

    inverse: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("inverse", torch.empty(width), persistent=False)
        self.register_buffer("even", torch.empty(width, dtype=torch.bool), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        places = torch.arange(len(self.inverse))
        self.inverse.copy_(10.0 ** -places)
        self.even.copy_(places % 2 == 0)

    def forward(self, x: Any) -> Any:
        return x + self.inverse * self.even


class Layer(nn.Module):
    """Attention with torch's init, a norm with statistics, and a bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.rotary = Rotary(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm = nn.BatchNorm1d(width)
        self.mix = nn.Linear(width, width)

    def forward(self, x: Any) -> Any:
        y, _ = self.attention(self.rotary(x), x, x)
        return self.norm((x + y).transpose(1, 2)).transpose(1, 2) + self.mix(x)


class Model(nn.Module):
    """Layers between an embedding and a head that share a weight, and a recurrent layer."""

    def __init__(self, depth: int = 3, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.recurrent = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, 11)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.recurrent(x)[0])


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def whole_init(make: Callable[[], nn.Module], seed: int = SEED) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def trained(
    mesh: hsdp.Mesh, model: nn.Module, steps: int = 0, **options: Any
) -> dict[str, torch.Tensor]:
    options = {"lr": 0.01, "persistence_threshold": 0, **options}
    with attached_to(model, mesh, bucket_bytes=512) as reducer:
        optimizer = ShardedOptimizer(torch.optim.AdamW, model, reducer, **options)
        for step in range(steps):
            tokens = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(step))
            with reducer.microbatch(last=True):
                loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
                loss.backward()
            optimizer.step()
        state = optimizer.full_model_state_dict(model)
        state.update({name: b.clone() for name, b in model.named_buffers()})
        optimizer.close()
        return state


@on_meshes((1, 1), (1, 2), (2, 2))
def test_values_are_those_of_a_whole_init(mesh: hsdp.Mesh) -> None:
    cases: list[dict[str, Any]] = [{"stage": 3}]
    if mesh.size == 2:
        cases += [{"stage": 1}, {"stage": 2}]
        cases += [{"stage": 3, "persistence_threshold": n} for n in (30, float("inf"))]
    for options in cases:
        want = trained(mesh, whole_init(Model), steps=2, **options)
        after = torch.get_rng_state()
        model = on_meta(Model)
        held = list(model.parameters())
        torch.manual_seed(SEED)
        require_same(trained(mesh, model, steps=2, **options), want)
        assert torch.equal(torch.get_rng_state(), after)
        assert all(map(operator.is_, model.parameters(), held))
        assert all(type(p) is nn.Parameter and p.device.type == "cpu" for p in held)


@on_mesh(1, 2)
def test_values_in_16_bits(mesh: hsdp.Mesh) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 9)).bfloat16()

    want = make()
    torch.manual_seed(SEED)
    for layer in want:
        layer.reset_parameters()
    model = on_meta(make)
    torch.manual_seed(SEED)
    require_same(trained(mesh, model, stage=3, units=[nn.Linear]), want.state_dict())


@on_mesh(1, 2)
def test_seeds_that_differ_by_rank(mesh: hsdp.Mesh) -> None:
    want = whole_init(Model)
    after = torch.get_rng_state()
    torch.manual_seed(SEED + mesh.rank)
    own = torch.get_rng_state()
    got = trained(mesh, on_meta(Model), stage=3)
    require_same(got, {**want.state_dict(), **dict(want.named_buffers())})
    assert torch.equal(torch.get_rng_state(), after if mesh.rank == 0 else own)


def live_bytes(model: nn.Module) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return sum(p.untyped_storage().nbytes() for p in model.parameters() if not p.is_meta)


@on_mesh(1, 2)
def test_memory_is_that_of_one_unit(mesh: hsdp.Mesh) -> None:
    model: Any = on_meta(lambda: Model(depth=6))
    unit = sum(p.nbytes for p in model.layers[0].parameters())
    root = sum(p.nbytes for p in model.parameters()) - 6 * unit
    seen: list[int] = []
    with attached_to(model, mesh) as reducer:
        optimizer = ShardedOptimizer(
            torch.optim.AdamW, model, reducer, stage=3, persistence_threshold=0,
            param_init_fn=lambda module: seen.append(live_bytes(model)),
        )
        # The layers are initialized after the embedding and before the rest of the root.
        assert max(seen) == max(root, model.embed.weight.nbytes + unit)
        assert live_bytes(model) == 0
        assert all(type(p) is ReleasedParameter for p in model.parameters())
        optimizer.close()


class Plain(nn.Module):
    """A parameter that no init sets."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return self.inner(x) @ self.weight


def init_plain(module: nn.Module) -> None:
    if isinstance(module, Plain):
        module.weight.fill_(2.0)
    elif isinstance(module, nn.Linear):
        module.weight.data.normal_()


@on_mesh(1, 2)
def test_values_of_a_function(mesh: hsdp.Mesh) -> None:
    want = whole_init(Plain)
    with torch.no_grad():
        want.apply(init_plain)
    model = on_meta(Plain)
    torch.manual_seed(SEED)
    require_same(trained(mesh, model, stage=3, param_init_fn=init_plain), want.state_dict())


class Adapted(nn.Module):
    """A frozen layer and trained ones."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6).requires_grad_(False)
        self.down = nn.Linear(6, 2, bias=False)
        self.up = nn.Linear(2, 6, bias=False)

    def forward(self, x: Any) -> Any:
        return self.base(x) + self.up(self.down(x))


def adapted() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), Adapted(), Adapted())


@on_mesh(1, 2)
def test_frozen_layers(mesh: hsdp.Mesh) -> None:
    want = whole_init(adapted)
    model = on_meta(adapted)
    torch.manual_seed(SEED)
    require_same(trained(mesh, model, stage=3, units=[Adapted]), want.state_dict())
    assert [p.requires_grad for p in model.parameters()] == [
        p.requires_grad for p in want.parameters()
    ]


@on_mesh(1, 2)
def test_layers_that_have_values_keep_them(mesh: hsdp.Mesh) -> None:
    first = whole_init(adapted)
    before = {f"0.{key}": value.clone() for key, value in first.state_dict().items()}
    model = nn.Sequential(first, on_meta(lambda: nn.Linear(6, 6)))
    got = trained(mesh, model, stage=3, units=[nn.Linear])
    require_same({key: value for key, value in got.items() if key in before}, before)


@on_mesh(1, 2)
def test_values_beside_others_are_kept(mesh: hsdp.Mesh) -> None:
    """For a head whose embedding has values already, and for one whose bias has."""
    embedding = nn.Embedding(5, 4)
    head = on_meta(lambda: nn.Linear(4, 5))
    head.weight = embedding.weight
    norm = on_meta(lambda: nn.BatchNorm1d(4))
    norm.register_buffer("running_mean", torch.full((4,), 3.0))
    before = embedding.weight.detach().clone()
    model = nn.ModuleDict({"embedding": embedding, "norm": norm, "head": head})
    hsdp.broadcast_parameters(mesh, embedding)
    before = embedding.weight.detach().clone()

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.fill_(1.0)
            module.bias.fill_(2.0)

    got = trained(mesh, model, stage=3, units=[nn.Linear], param_init_fn=init)
    assert torch.equal(got["embedding.weight"], before)
    assert got["head.bias"].tolist() == [2.0] * 5 and got["norm.running_mean"].tolist() == [3.0] * 4


class Box(nn.Module):
    """Sets its submodules' parameters, a list of parameters, and a buffer, which it replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.rest = nn.ParameterList([torch.empty(3), torch.empty(2)])
        self.register_buffer("places", torch.empty(4))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.inner.weight)
        for parameter in self.rest:
            nn.init.normal_(parameter)
        self.places = torch.arange(4.0)

    def forward(self, x: Any) -> Any:
        return self.inner(x) + self.places


@on_mesh(1, 2)
def test_a_module_that_sets_what_is_below(mesh: hsdp.Mesh) -> None:
    want = whole_init(Box)
    model = on_meta(Box)
    torch.manual_seed(SEED)
    got = trained(mesh, model, stage=3)
    require_same(got, want.state_dict())
    listed = nn.Sequential(on_meta(Box))
    with attached_to(listed, mesh) as reducer:
        with pytest.raises(UsageError, match=r"Box.reset_parameters\(\) to set what no unit below"):
            ShardedOptimizer(
                torch.optim.AdamW, listed, reducer, stage=3, units=[nn.Linear], persistence_threshold=0
            )


def refused(mesh: hsdp.Mesh, **options: Any) -> str:
    model = on_meta(Plain)
    with attached_to(model, mesh) as reducer:
        options = {"stage": 3, "persistence_threshold": 0, **options}
        with pytest.raises((UsageError, MismatchError, StepAbortedError)) as error:
            ShardedOptimizer(torch.optim.AdamW, model, reducer, **options)
        assert all(p.is_meta and type(p) is nn.Parameter for p in model.parameters())
        # It can be tried again.
        options = {**options, "param_init_fn": init_plain}
        optimizer = ShardedOptimizer(torch.optim.AdamW, model, reducer, **options)
        with reducer.microbatch(last=True):
            model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.close()
    return f"{type(error.value).__name__}: {error.value}"


@on_mesh(1, 2)
def test_what_gets_no_values_is_refused_and_left_on_the_meta_device(mesh: hsdp.Mesh) -> None:
    assert "reset_parameters(), got none in Plain; pass param_init_fn" in refused(mesh)
    text = refused(mesh, param_init_fn=lambda module: None)
    assert "every element of 'weight'" in text and "Plain and param_init_fn did not" in text


@on_mesh(1, 2)
def test_an_init_that_fails_on_one_rank(mesh: hsdp.Mesh) -> None:
    def fails_on_rank_1(module: nn.Module) -> None:
        init_plain(module)
        if mesh.rank == 1 and isinstance(module, Plain):
            raise UsageError("out of paint")

    text = refused(mesh, param_init_fn=fails_on_rank_1)
    if mesh.rank == 1:
        assert text == "UsageError: out of paint"
    else:
        assert text.startswith("StepAbortedError") and "out of paint" in text


@on_mesh(1, 2)
def test_an_init_whose_values_differ(mesh: hsdp.Mesh) -> None:
    def differs(module: nn.Module) -> None:
        init_plain(module)
        if isinstance(module, Plain):
            module.weight.fill_(random.Random(mesh.rank).random())

    text = refused(mesh, param_init_fn=differs)
    assert text.startswith("MismatchError") and "'weight' on rank 1 than on rank 0" in text


@on_mesh(1, 2)
def test_a_model_that_is_elsewhere_on_one_rank(mesh: hsdp.Mesh) -> None:
    with hsdp.Reducer(mesh) as reducer:
        model = on_meta(Plain) if mesh.rank == 1 else Plain()
        reducer.attach(model, check_parameters=False)
        wanted = "elsewhere on rank 0 and on the meta device on rank 1"
        with pytest.raises(MismatchError, match=wanted):
            ShardedOptimizer(torch.optim.AdamW, model, reducer, param_init_fn=init_plain)


@on_mesh(1, 2)
def test_a_model_without_an_optimizer_has_no_memory(mesh: hsdp.Mesh) -> None:
    model = on_meta(Plain)
    with attached_to(model, mesh) as reducer:
        with pytest.raises(UsageError, match="'weight' to have memory.*ShardedOptimizer"):
            reducer.begin_microbatch(last=True)


@on_mesh(1, 2)
def test_parameters_that_others_hold_weakly(mesh: hsdp.Mesh) -> None:
    model: Any = on_meta(Plain)
    reference = weakref.ref(model.inner.weight)
    with attached_to(model, mesh) as reducer:
        wanted = "'inner.weight' on the meta device to be held by its model alone"
        with pytest.raises(UsageError, match=wanted):
            ShardedOptimizer(torch.optim.AdamW, model, reducer, param_init_fn=init_plain)
        assert reference() is model.inner.weight and model.inner.weight.is_meta


class Places(nn.Module):
    """An integer buffer that three modules share."""

    def __init__(self, places: torch.Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("places", torch.empty(4, dtype=torch.int64) if places is None else places)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return self.layer(x) * self.places


def shared_places() -> nn.Module:
    places = torch.empty(4, dtype=torch.int64)
    return nn.Sequential(Places(places), Places(places), Places(places))


@on_mesh(1, 2)
def test_a_refused_model_is_as_before_and_may_be_made(mesh: hsdp.Mesh) -> None:
    """The model and the random state must be unchanged after each error; some layers have values already."""
    valued = nn.Linear(4, 4)
    hsdp.broadcast_parameters(mesh, valued)
    before = valued.weight.detach().clone()
    model: Any = on_meta(shared_places)
    model.append(valued)
    state = torch.get_rng_state()

    def sets(count: int, then: Callable[[Any], Any]) -> Callable[[nn.Module], None]:
        def init(module: nn.Module) -> None:
            if isinstance(module, Places):
                module.places[:count] = 7  # type: ignore[index]
            then(module)

        return init

    def freeze(module: Any) -> None:
        if module is model[0]:
            module.layer.requires_grad_(False)

    def differ(module: Any) -> None:
        if module is model[1].layer:
            module.bias = nn.Parameter(torch.full((4,), float(mesh.rank)))

    with attached_to(model, mesh) as reducer:
        options: dict[str, Any] = {"stage": 3, "units": [nn.Linear], "persistence_threshold": 0}
        for init, text in (
            (sets(2, bool), "every element of '0.places'"),
            (sets(4, freeze),
             "'0.layer.weight' as it was on the meta device: torch.float32 (4, 4) on cpu, with"),
            (sets(4, differ), "others of '1.layer.bias' on rank 1 than on rank 0"),
        ):
            with pytest.raises((UsageError, MismatchError)) as error:
                ShardedOptimizer(torch.optim.AdamW, model, reducer, **options, param_init_fn=init)
            assert text in str(error.value)
            assert all(one.places.is_meta for one in model[:3])
            assert torch.equal(model[3].weight, before) and torch.equal(torch.get_rng_state(), state)
            for p in model[:3].parameters():
                p.requires_grad_()
        optimizer = ShardedOptimizer(
            torch.optim.AdamW, model, reducer, **options, param_init_fn=sets(4, bool)
        )
        assert model[0].places is model[2].places and model[0].places.tolist() == [7] * 4
        optimizer.close()
        assert torch.equal(model[3].weight, before)


@on_mesh(1, 2)
def test_parameters_with_hooks(mesh: hsdp.Mesh) -> None:
    model: Any = on_meta(Plain)
    model.inner.bias.register_hook(lambda gradient: gradient * 0)
    with attached_to(model, mesh) as reducer:
        with pytest.raises(UsageError, match="'inner.bias' on the meta device without hooks"):
            ShardedOptimizer(torch.optim.AdamW, model, reducer, param_init_fn=init_plain)
        assert all(p.is_meta for p in model.parameters())
