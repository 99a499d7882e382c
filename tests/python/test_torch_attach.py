"""An attached model: which gradients arrive, where they go, and what is refused. One rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import on_mesh
from one_rank import add_gradient, attached_to, mesh, registered
from same_tensors import require_same
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import hsdp


def linear() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(3, 2)


def backward(model: nn.Module, seed: int = 0) -> None:
    torch.manual_seed(seed)
    model(torch.randn(5, 3)).square().mean().backward()


def expected(model: Any, seeds: list[int], run: Callable[[Any, int], None] = backward) -> dict[str, Any]:
    """What torch accumulates by itself."""
    for seed in seeds:
        run(model, seed)
    result = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return result


def grads(model: nn.Module) -> dict[str, Any]:
    return {name: p.grad for name, p in model.named_parameters()}


def shards(reducer: hsdp.Reducer) -> dict[str, torch.Tensor]:
    return {
        p.name: torch.from_dlpack(reducer.shard(p.name)).reshape(p.shape).clone()
        for p in reducer.parameters
    }


def test_gradients_are_freed_when_packed(mesh: hsdp.Mesh) -> None:
    model = linear()
    storages: list[StorageWeakRef] = []
    model.weight.register_post_accumulate_grad_hook(
        lambda p: storages.append(StorageWeakRef(p.grad.untyped_storage()))
    )
    reducer = attached_to(model, mesh)
    for m in range(2):
        with reducer.microbatch(last=m == 1):
            backward(model, m)
        assert all(p.grad is None for p in model.parameters())
        assert len(storages) == m + 1 and storages[m].expired()


@on_mesh(2, 2)
def test_hooks_and_norms_of_each_parameter(mesh: hsdp.Mesh) -> None:
    """The hooks and norms of docs/from/ddp.md."""
    model, seen = linear(), []
    model.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.norm().item()))
    reducer = attached_to(model, mesh)
    model.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    model.weight.register_hook(lambda grad: seen.insert(0, grad.norm().item()))
    with reducer.microbatch(last=True):
        backward(model, mesh.rank)
    assert seen[0] == seen[1] and seen[2] is None
    names = list(grads(model))
    squares = torch.stack([reducer.shard(name).square().sum() for name in names])
    mesh.shard_group.all_reduce(squares)
    reducer.gather_gradients()
    whole = torch.stack([grads(model)[name].norm() for name in names])
    torch.testing.assert_close(squares.sqrt(), whole)


def test_keep_grads_gives_the_local_sum(mesh: hsdp.Mesh) -> None:
    model = linear()
    sums = [expected(model, list(range(m + 1))) for m in range(3)]
    reducer = attached_to(model, mesh, keep_grads=True)
    for step in range(2):
        for m in range(3):
            with reducer.microbatch(last=m == 2):
                assert model.weight.grad is None
                backward(model, m)
            require_same(grads(model), sums[m])
        require_same(shards(reducer), sums[2])
        torch.optim.SGD(model.parameters(), 0.0).step()
    with reducer.microbatch(last=False):
        backward(model, 0)
    reducer.discard()
    with reducer.microbatch(last=False):
        backward(model, 0)
    require_same(grads(model), sums[0])
    reducer.finish()
    require_same(shards(reducer), sums[0])
    with reducer.microbatch(last=True):
        backward(model, 0)
    require_same(grads(model), sums[0])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.frozen(self.first(x)).relu())


def test_tied_parameters_come_once_and_frozen_ones_not(mesh: hsdp.Mesh) -> None:
    model = Tied()
    want = expected(model, [3])
    reducer = attached_to(model, mesh)
    assert [p.name for p in reducer.parameters] == ["second.bias", "first.bias", "first.weight"]
    with reducer.microbatch(last=True):
        backward(model, 3)
    require_same(shards(reducer), want)


def test_channels_last(mesh: hsdp.Mesh) -> None:
    model = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
    image = torch.randn(2, 4, 8, 8).to(memory_format=torch.channels_last)
    model(image).square().mean().backward()
    assert not model.weight.grad.is_contiguous()
    once = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    reducer = attached_to(model, mesh)
    for factor in (1.0, 2.0, 4.0):
        want = {n: factor * gradient for n, gradient in once.items()}
        with reducer.microbatch(last=True):
            (factor * model(image).square().mean()).backward()
        require_same(shards(reducer), want)
        reducer.gather_gradients()
        assert model.weight.grad.stride() == model.weight.stride()
        require_same(grads(model), want)
    reducer.gather_parameters()


def test_several_backwards(mesh: hsdp.Mesh) -> None:
    model = linear()
    want = expected(model, [0, 1])
    reducer = attached_to(model, mesh, keep_grads=True, backwards="many")
    with reducer.microbatch(last=True):
        backward(model, 0)
        backward(model, 1)
    require_same(shards(reducer), want)
    require_same(grads(model), want)


def test_gradients_without_a_backward(mesh: hsdp.Mesh) -> None:
    model = linear()
    reducer = attached_to(model, mesh)
    with reducer.microbatch(last=True):
        model.weight.grad = torch.full((2, 3), 7.0).t().contiguous().t()
        model.bias.grad = torch.ones(2)
    assert model.weight.grad is None
    require_same(shards(reducer), {"weight": torch.full((2, 3), 7.0), "bias": torch.ones(2)})
    weight, bias = torch.autograd.grad(model(torch.ones(1, 3)).sum(), list(model.parameters()))
    with reducer.microbatch(last=True):
        reducer.gradient_ready("weight", weight)
        model.bias.grad = bias
    require_same(shards(reducer), {"weight": weight, "bias": bias})


def test_the_loss_of_another_model(mesh: hsdp.Mesh) -> None:
    """A generator's loss goes through its discriminator."""
    generator, critic = nn.Linear(3, 3), linear()
    reducer = attached_to(critic, mesh)
    message = (
        "gradient of '(bias|weight)': expected an open microbatch, got a backward pass outside of one; "
        r"call begin_microbatch.*another model.*requires_grad_\(False\)"
    )
    with pytest.raises(hsdp.UsageError, match=message):
        critic(generator(torch.ones(1, 3))).sum().backward()
    critic.zero_grad()
    critic.requires_grad_(False)
    critic(generator(torch.ones(1, 3))).sum().backward()
    critic.requires_grad_(True)
    assert generator.weight.grad is not None
    with reducer.microbatch(last=True):
        critic(generator(torch.ones(1, 3)).detach()).sum().backward()


def last_block(reducer: hsdp.Reducer, window: bool) -> Any:
    if window:
        return hsdp.zero.coalesce_grad_reduction(reducer, last=True)
    return reducer.microbatch(last=True)


@pytest.mark.parametrize("window", [False, True])
def test_layers_that_were_frozen_since(mesh: hsdp.Mesh, window: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    reducer = attached_to(model, mesh)

    def run() -> None:
        with last_block(reducer, window):
            model(torch.ones(1, 3)).sum().backward()

    run()
    model[0].requires_grad_(False)
    message = (
        r"none for '0.bias' and 1 more.*'0.bias' was frozen since attach \(requires_grad_\(False\)\): "
        'make another Reducer after freezing, or one with missing="zero"'
    )
    with pytest.raises(hsdp.UsageError, match=message):
        run()
    model[0].requires_grad_(True)
    run()
    with pytest.raises(hsdp.UsageError) as caught:  # unused, not frozen
        with reducer.microbatch(last=True):
            model[1](torch.ones(1, 3)).sum().backward()
    assert "frozen" not in str(caught.value)


@pytest.mark.parametrize("window", [False, True])
def test_a_forgotten_backward_pass(mesh: hsdp.Mesh, window: bool) -> None:
    reducer, model = hsdp.Reducer(mesh), linear()
    reducer.attach(model)
    with pytest.raises(hsdp.UsageError, match=r"got none at all \(rank 0 of 1\); .*loss.backward\(\)"):
        with last_block(reducer, window):
            model(torch.ones(1, 3)).sum()


NOTHING_CAME = r": expected a gradient in the step, got none at all on any rank.*loss.backward\(\)"


def test_a_forgotten_backward_pass_where_holes_are_zeros(mesh: hsdp.Mesh) -> None:
    reducer, model = hsdp.Reducer(mesh, missing="zero"), linear()
    reducer.attach(model)
    optimizer = hsdp.zero.ShardedOptimizer(torch.optim.SGD, model, reducer, lr=1.0)
    for call, name in ((reducer.gather_gradients, "gather_gradients"), (optimizer.step, "step")):
        with reducer.microbatch(last=True):
            model(torch.ones(1, 3)).sum()
        with pytest.warns(RuntimeWarning, match=name + NOTHING_CAME) as caught:
            call()
        assert [warning.filename for warning in caught] == [__file__]
    with reducer.microbatch(last=True):
        model.bias.sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reducer.gather_gradients()
        optimizer.step()


@pytest.mark.filterwarnings("ignore:Using backward")
def test_create_graph(mesh: hsdp.Mesh) -> None:
    model = linear()
    want = expected(model, [0])
    reducer = attached_to(model, mesh)
    with reducer.microbatch(last=True):
        torch.manual_seed(0)
        model(torch.randn(5, 3)).square().mean().backward(create_graph=True)
    require_same(shards(reducer), want)


class Wrapped(nn.parallel.DistributedDataParallel):
    """Without the process group that a real one needs."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module


def wrong_models() -> dict[str, tuple[Any, str]]:
    narrow = nn.ParameterDict({"n": nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn))})
    return {
        "8 bits": (narrow, "'n'.*complex128, got float8_e4m3fn"),
        "wrapped": (Wrapped(linear()), "plain model.*DistributedDataParallel"),
        "lazy": (nn.LazyLinear(2), "'weight'.*not initialized.*forward pass"),
        "frozen": (linear().requires_grad_(False), "require gradients"),
        "no module": ([torch.ones(2)], "torch.nn.Module.*list"),
    }


@pytest.mark.parametrize("kind", sorted(wrong_models()))
def test_wrong_models(mesh: hsdp.Mesh, kind: str) -> None:
    model, message = wrong_models()[kind]
    reducer = hsdp.Reducer(mesh)
    with pytest.raises(hsdp.UsageError, match=message):
        reducer.attach(model)
    with pytest.raises(hsdp.UsageError, match="neither"):
        reducer.gather_gradients()
    reducer.attach(linear())


def test_the_mesh_comes_before_the_model(mesh: hsdp.Mesh) -> None:
    message = "^broadcast_parameters: mesh: expected an hsdp.Mesh.*got an object of type Linear; the mesh comes"
    with pytest.raises(hsdp.UsageError, match=message):
        hsdp.broadcast_parameters(linear(), mesh)


def test_one_reducer_per_model(mesh: hsdp.Mesh) -> None:
    model = linear()
    first, second = hsdp.Reducer(mesh), hsdp.Reducer(mesh)
    first.attach(model)
    for reducer, which in ((first, "this Reducer already; call attach once"), (second, "another Reducer; close")):
        with pytest.raises(hsdp.UsageError, match=f"'weight' to be attached once, got it attached to {which}"):
            reducer.attach(model)
    first.close()
    second.attach(model)
    with second.microbatch(last=True):
        backward(model)


def two_models() -> nn.ModuleDict:
    torch.manual_seed(2)
    first = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3))
    return nn.ModuleDict({"first": first, "second": nn.Linear(3, 2)})


def run_two(models: nn.ModuleDict, seed: int) -> None:
    torch.manual_seed(seed)
    models["second"](models["first"](torch.randn(5, 3))).square().mean().backward()


@pytest.mark.parametrize("keep_grads", [False, True])
def test_two_models_are_as_one(mesh: hsdp.Mesh, keep_grads: bool) -> None:
    joined, apart = two_models(), two_models()
    one, two = hsdp.Reducer(mesh), hsdp.Reducer(mesh)
    one.attach(joined, keep_grads=keep_grads)
    two.attach(apart["first"], keep_grads=keep_grads)
    two.attach(apart["second"], keep_grads=keep_grads)
    names = [p.name for p in two.parameters]
    assert names == ["2.bias", "2.weight", "0.bias", "0.weight", "bias", "weight"]
    for step in range(2):
        for m, (models, reducer) in enumerate([(joined, one), (apart, two)] * 2):
            with reducer.microbatch(last=m >= 2):
                run_two(models, 10 * step + m // 2)
                assert all(p.grad is None for p in models.parameters())
            if keep_grads:
                assert all(p.grad is not None for p in models.parameters())
        one.gather_gradients()
        two.gather_gradients()
        require_same(grads(apart), grads(joined))
        optimizers = [torch.optim.SGD(models.parameters(), 0.1) for models in (joined, apart)]
        for optimizer in optimizers:
            optimizer.step()
        two.gather_parameters()
        require_same(dict(apart.named_parameters()), dict(joined.named_parameters()))
    two.close()
    run_two(apart, 0)  # no hooks are left
    assert all(p.grad is not None for p in apart.parameters())


def test_two_models_need_names_of_their_own(mesh: hsdp.Mesh) -> None:
    models = nn.ModuleDict({"actor": linear(), "critic": nn.LayerNorm(2)})
    reducer = attached_to(models["actor"], mesh)
    message = "'weight' of LayerNorm and of Linear, which was attached before.*ModuleDict"
    with pytest.raises(hsdp.UsageError, match=message):
        reducer.attach(models["critic"])
    reducer.attach(nn.ModuleDict({"critic": models["critic"]}))
    assert [p.name for p in reducer.parameters] == [
        "bias", "weight", "critic.bias", "critic.weight"
    ]
    with reducer.microbatch(last=True):
        models["critic"](models["actor"](torch.ones(1, 3))).sum().backward()
    for model in models.values():
        with pytest.raises(hsdp.UsageError, match="SGD.step: expected a gradient in"):
            torch.optim.SGD(model.parameters(), 1.0).step()
    with pytest.raises(hsdp.UsageError, match="register"):
        reducer.attach(nn.ModuleDict({"late": nn.Linear(1, 1)}))


# All ranks are told of a drop, wherever it comes from.
@pytest.mark.parametrize("where", ["begin", "block", "between", "discard"])
def test_two_models_forget_a_dropped_step_together(mesh: hsdp.Mesh, where: str) -> None:
    models = two_models()
    want = expected(models, [3], run_two)
    reducer = attached_to(models["first"], mesh, keep_grads=True)
    reducer.attach(models["second"])
    with reducer.microbatch(last=False):
        run_two(models, 1)
    if where == "begin":
        models["second"].bias.grad = torch.ones(2)
        with pytest.raises(hsdp.UsageError, match="no gradient in 'bias' yet"):
            reducer.begin_microbatch()
        models["second"].bias.grad = None
    elif where == "block":
        with pytest.raises(RuntimeError, match="of the caller"), reducer.microbatch():
            run_two(models, 2)
            models["second"].bias.grad = torch.ones(2)
            raise RuntimeError("of the caller")
    elif where == "between":
        reducer.abandon_step()
    else:
        reducer.discard()
    assert all(p.grad is None for p in models.parameters())
    with reducer.microbatch(last=True):
        run_two(models, 3)
    got = grads(models["first"])
    require_same(got, {n: want[f"first.{n}"] for n in got})
    reducer.gather_gradients()
    require_same(grads(models), want)


GRADIENT_BEFORE = r"^reducer 'critic': begin_microbatch: .*'weight'.*zero_grad\(set_to_none=True\)"


def test_a_named_reducer_is_named_in_what_it_refuses(mesh: hsdp.Mesh) -> None:
    model = linear()
    reducer = hsdp.Reducer(mesh, name="critic")
    with pytest.raises(hsdp.UsageError, match="^reducer 'critic': attach: .*torch.nn.Module"):
        reducer.attach(3)
    reducer.attach(model)
    with pytest.raises(hsdp.UsageError, match="^reducer 'critic': attach: .*attached once"):
        reducer.attach(model)
    model.weight.grad = torch.ones(2, 3)
    with pytest.raises(hsdp.UsageError, match=GRADIENT_BEFORE):
        reducer.begin_microbatch()
    model.weight.grad = None
    with reducer.microbatch(last=True):
        backward(model)


def test_groups() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    with hsdp.init_mesh() as mesh:
        reducer = hsdp.Reducer(mesh)
        reducer.attach(model, groups={"inner": model[1], "leaf": [model[1][0]]})
        groups = {p.name: p.group for p in reducer.parameters}
        assert groups == {
            "0.weight": "", "0.bias": "", "1.0.weight": "leaf", "1.0.bias": "leaf",
            "1.1.weight": "inner", "1.1.bias": "inner",
        }
        reducer.set_requires_all_reduce(False, group="leaf")
        for wrong, message in [
            ({"a": nn.Linear(1, 1)}, "group 'a'.*not part"),
            ({"a": model[0], "b": model[0]}, "'0' in 'a' and 'b'"),
            ({"a": 3}, "group 'a'.*int"),
        ]:
            with pytest.raises(hsdp.UsageError, match=message):
                hsdp.Reducer(mesh).attach(model, groups=wrong)


imported_before = nn.utils.clip_grad_norm_


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gathers_first", [False, True])
def test_clipping_before_or_after_the_gather(
    mesh: hsdp.Mesh, dtype: torch.dtype, gathers_first: bool
) -> None:
    model = linear().to(dtype)
    reducer = attached_to(model, mesh)
    with reducer.microbatch(last=True):
        for p in model.parameters():
            p.grad = torch.full(p.shape, 3.0, dtype=dtype)
    if gathers_first:
        reducer.gather_gradients()
    assert reducer.clip_grad_norm_(1e6) == 72**0.5
    assert hsdp.clip_grad_norm_([reducer], 4.0) == 72**0.5
    assert reducer.clip_grad_norm_(2.0) == pytest.approx(4.0)
    if not gathers_first:
        reducer.gather_gradients()
    for p in model.parameters():
        assert p.grad is not None
        torch.testing.assert_close(p.grad, torch.full_like(p, 0.5**0.5, requires_grad=False))
    model.zero_grad()
    reducer.clip_grad_norm_(1.0)
    assert all(p.grad is None for p in model.parameters())


def test_what_would_skip_parameters_raises(mesh: hsdp.Mesh) -> None:
    model, other = linear(), linear()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    reducer = attached_to(model, mesh)
    with reducer.microbatch(last=True):
        backward(model)
    remedies = "gather_gradients.*ShardedOptimizer.*keep_grads"
    with pytest.raises(hsdp.UsageError, match=f"SGD.step.*'weight'.*{remedies}"):
        optimizer.step()
    with pytest.raises(hsdp.UsageError, match=f"clip_grads_with_norm_.*'weight'.*{remedies}"):
        nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, torch.tensor(2.0))
    for clip in (imported_before, nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_):
        with pytest.raises(hsdp.UsageError, match=f"clip_grad.*'weight'.*{remedies}"):
            clip(model.parameters(), 1.0)
    with pytest.raises(hsdp.UsageError, match="clip_grad_norm_.*'bias'"):
        nn.utils.clip_grad_norm_(model.bias, 1.0)
    # No other Reducer or model is affected.
    backward(other)
    assert imported_before(other.parameters(), 1e-3) > 0
    nn.utils.clip_grad_value_(list(other.parameters()), 1.0)
    torch.optim.SGD(other.parameters(), 1.0).step()
    reducer.gather_gradients()
    before = reducer.grad_norm()
    assert float(imported_before(model.parameters(), 1e-3)) == pytest.approx(before)
    optimizer.step()
    with reducer.microbatch(last=True):
        backward(model)
    with pytest.raises(hsdp.UsageError):
        optimizer.step()
    reducer.close()
    optimizer.step()


@pytest.mark.parametrize("make", [torch.optim.LBFGS, torch.optim.SGD])
@pytest.mark.parametrize("window", [False, True])
def test_closures_make_the_gradients(mesh: hsdp.Mesh, make: Any, window: bool) -> None:
    model, alone = linear(), linear()
    reducer = attached_to(model, mesh)
    ours, theirs = make(model.parameters(), lr=0.1), make(alone.parameters(), lr=0.1)

    def closure(gather: bool = True) -> torch.Tensor:
        with last_block(reducer, window):
            loss = model(torch.ones(1, 3)).square().sum()
            loss.backward()
        if gather:
            reducer.gather_gradients()
        return loss

    def alone_closure() -> torch.Tensor:
        theirs.zero_grad()
        loss = alone(torch.ones(1, 3)).square().sum()
        loss.backward()
        return loss

    for named in (False, True, True):
        got = ours.step(closure=closure) if named else ours.step(closure)
        assert torch.equal(got, theirs.step(alone_closure))
    require_same(dict(model.named_parameters()), dict(alone.named_parameters()))
    with pytest.raises(hsdp.UsageError, match="step: expected a gradient in 'weight'"):
        ours.step(lambda: closure(gather=False))


@pytest.mark.parametrize("change", ["thawed", "replaced", "added"])
def test_parameters_that_nobody_would_reduce(mesh: hsdp.Mesh, change: str) -> None:
    model = nn.Sequential(linear().requires_grad_(False), linear())
    reducer = attached_to(model, mesh, missing="zero")
    with reducer.microbatch(last=False):
        model[1](torch.ones(1, 3)).sum().backward()
    if change == "thawed":
        model[0].bias.requires_grad_(True)
    elif change == "replaced":
        model[0].bias = nn.Parameter(torch.ones(2))
    else:
        model[0].register_parameter("bias", nn.Parameter(torch.ones(2)))
    with reducer.microbatch(last=True):  # within a step p.grad is not checked
        pass
    with pytest.raises(hsdp.UsageError, match="'0.bias', which came or began.*another Reducer"):
        reducer.begin_microbatch(last=True)
    other = hsdp.Reducer(mesh)  # it may use the model
    other.attach(nn.ParameterList([model[0].bias]))
    for _ in range(2):
        with reducer.microbatch(last=True), other.microbatch(last=True):
            model[1](torch.ones(1, 3)).sum().backward()
            model[0].bias.sum().backward()


def test_a_mark_is_refused_where_nobody_resolves_it(mesh: hsdp.Mesh) -> None:
    reducer = registered(mesh, "w", 2)
    x = torch._neg_view(torch.ones(2))
    with pytest.raises(hsdp.UsageError, match=r"'w'.*negated.*resolve_neg\(\)"):
        add_gradient(reducer, "w", x, last=True)
    with pytest.raises(hsdp.UsageError, match=r"all_reduce.*resolve_neg\(\)"):
        mesh.world.all_reduce(x)
