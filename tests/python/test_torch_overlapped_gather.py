"""ShardedOptimizer's gathers run under later work: the bits equal those of synchronous gathers, whatever
reads them."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Launcher, on_mesh, on_ranks
from one_rank import attached_to
from same_tensors import same
from torch import nn

import hsdp
from hsdp.torch.slices.parameter_in_flight import ParameterInFlight
from hsdp.zero import ShardedOptimizer

STEPS = 3


class Net(nn.Module):
    """A module used twice, a conditional one, an unused parameter, tied weights, another layout, a None."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(24, 24)  # not in the order of registration
        self.twice = nn.Linear(24, 24)
        self.maybe = nn.Linear(24, 24)
        self.first = nn.Linear(24, 24)
        self.tied = nn.Linear(24, 24, bias=False)
        self.tied.weight = self.first.weight
        self.wide = nn.Parameter(torch.randn(30, 24).t())
        self.unused = nn.Parameter(torch.randn(5))
        self.empty = nn.Parameter(torch.empty(0))
        self.attention = nn.TransformerEncoderLayer(24, 2, 24, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor, choose: bool = False) -> torch.Tensor:
        x = self.twice(self.twice(self.first(x)).tanh())
        if choose:
            x = self.maybe(x)
        x = self.attention(self.last(x)[None])[0]
        return (self.tied(x) @ self.wide).tanh()

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x).tanh()


def through_forward(net: Net, x: torch.Tensor) -> Any:
    return net(x)


def outside_of_modules(net: Net, x: torch.Tensor) -> Any:
    norms = [p.norm() for p in net.parameters()]
    return torch.stack(norms), torch._foreach_norm([p for p in net.parameters() if p.numel()])


def averaged(net: Net, x: torch.Tensor) -> Any:
    with torch.no_grad():
        return [0.5 * p + 0.5 * p.detach().clone() for p in net.parameters()]


def clamped(net: Net, x: torch.Tensor) -> Any:
    for p in net.parameters():
        p.data.clamp_(-0.1, 0.1)
    return [p.detach().clone() for p in net.parameters()]


def written(net: Net, x: torch.Tensor) -> Any:
    with torch.no_grad():
        net.last.weight.mul_(0.5)
        net.wide.copy_(net.wide + 1)
        net.twice.weight.data = net.twice.weight.data * 2
    return net(x)


def evaluated(net: Net, x: torch.Tensor) -> Any:
    net.eval()
    with torch.inference_mode():
        result = net(x)
    with torch.no_grad():
        result = result + net(x)
    net.train()
    return result.clone()


def other_method(net: Net, x: torch.Tensor) -> Any:
    return net.embed(x)


def saved(net: Net, x: torch.Tensor) -> Any:
    return [(k, v.clone()) for k, v in net.state_dict().items()]


def kept(net: Net, x: torch.Tensor) -> Any:
    file = io.BytesIO()
    torch.save(net.state_dict(keep_vars=True), file)
    file.seek(0)
    loaded = torch.load(file)
    assert all(type(v) is nn.Parameter for v in loaded.values())
    return [*loaded.items()]


def copied(net: Net, x: torch.Tensor) -> Any:
    one = copy.deepcopy(net)
    other = pickle.loads(pickle.dumps(net))
    for p in (*one.parameters(), *other.parameters()):
        assert type(p) is nn.Parameter
    return one(x) + other(x)


def functional(net: Net, x: torch.Tensor) -> Any:
    parameters = dict(net.named_parameters())
    doubled = {name: 2 * p for name, p in parameters.items()}
    return torch.func.functional_call(net, parameters, x), torch.func.functional_call(net, doubled, x)


def transformed(net: Net, x: torch.Tensor) -> Any:
    def loss(parameters: Any) -> torch.Tensor:
        return torch.func.functional_call(net, parameters, x).square().sum()

    used = {k: v for k, v in net.named_parameters() if not k.startswith(("unused", "empty", "tied"))}
    return torch.func.grad(loss)(used)


def compiled(net: Net, x: torch.Tensor) -> Any:
    return torch.compile(net, backend="aot_eager", fullgraph=True)(x)


def compiled_function(net: Net, x: torch.Tensor) -> Any:
    return torch.compile(lambda p: p.square().sum(), backend="aot_eager")(net.last.weight)


def failed(net: Net, x: torch.Tensor) -> Any:
    with pytest.raises(RuntimeError):
        net(x[:, :5])
    return net(x)


def ignored(net: Net, x: torch.Tensor) -> Any:
    return x


READERS: dict[str, Callable[[Net, torch.Tensor], Any]] = {
    f.__name__: f for f in (
        through_forward, outside_of_modules, averaged, clamped, written, evaluated, other_method, saved,
        kept, copied, functional, transformed, compiled, compiled_function, failed, ignored,
    )
}


def trained(mesh: hsdp.Mesh, reader: str, dtype: torch.dtype, overlap: bool, **options: Any) -> Any:
    """Everything that was read, and the final parameters."""
    torch.manual_seed(3)
    torch._dynamo.reset()
    net = Net().to(dtype)
    if reader == "compiled":
        READERS[reader](net, torch.zeros(6, 24, dtype=dtype))  # before and after attaching
    reducer = attached_to(net, mesh, missing="zero", bucket_bytes=4096)
    optimizer = ShardedOptimizer(
        torch.optim.AdamW, net, reducer, lr=1e-2, gather_bucket_bytes=4096,
        overlap_param_gather=overlap, **options,
    )
    read = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + mesh.rank)
        x = torch.randn(6, 24, generator=generator).to(dtype)
        with reducer.microbatch(last=True):
            net(x, choose=(step + mesh.rank) % 2 == 0).square().mean().backward()
        optimizer.step()
        if step == 0 and reader == "ignored":
            run_again(net, reducer, optimizer, x)
        flies = {type(p) is ParameterInFlight for p in net.parameters() if p.numel()}
        assert flies == {overlap and not (reader.startswith("compiled") and step > 0)}, (reader, step)
        read.append(READERS[reader](net, x))
    final = [p.detach().clone() for p in net.parameters()]
    optimizer.close()
    assert {type(p) for p in net.parameters()} == {nn.Parameter}
    reducer.close()
    return read, final


def run_again(net: Net, reducer: hsdp.Reducer, optimizer: ShardedOptimizer, x: torch.Tensor) -> None:
    """A second step, when nothing has been read since the first."""
    with reducer.microbatch(last=True):
        for p in net.parameters():
            p.grad = torch.ones(p.shape, dtype=p.dtype)
    optimizer.step()


@pytest.mark.parametrize(("dtype", "stage"), [("float32", 2), ("bfloat16", 1)])
@on_ranks(2)
def test_readers_get_the_values_of_the_synchronous_gather(dtype: str, stage: int) -> None:
    torch.backends.mha.set_fastpath_enabled(True)
    with hsdp.init_mesh(1, 2) as mesh:
        for reader in READERS:
            runs = [trained(mesh, reader, getattr(torch, dtype), overlap, stage=stage)
                    for overlap in (True, False)]
            assert same(*runs), reader


@on_mesh(1, 2)
def test_metadata_does_not_wait_and_the_order_of_use_is_agreed(mesh: hsdp.Mesh) -> None:
    """Reads that need no values do not wait; other reads wait for one unit only."""
    net = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(3)))
    reducer = attached_to(net, mesh, bucket_bytes=4096)
    optimizer = ShardedOptimizer(torch.optim.SGD, net, reducer, lr=0.1, gather_bucket_bytes=4096,
                                 overlap_param_gather=True)

    def step() -> None:
        with reducer.microbatch(last=True):
            for p in net.parameters():
                p.grad = torch.ones_like(p, requires_grad=False)
        optimizer.step()

    def delete(p: nn.Parameter) -> None:
        p.grad = torch.ones(32, 32)
        p.grad = None

    step()
    looks: dict[str, Callable[[nn.Parameter], Any]] = {
        "grad": lambda p: p.grad, "set grad": delete, "shape": lambda p: p.shape,
        "dtype": lambda p: p.dtype, "device": lambda p: p.device, "is_leaf": lambda p: p.is_leaf,
        "requires_grad": lambda p: p.requires_grad, "grad_fn": lambda p: p.grad_fn,
        "stride": lambda p: p.stride(), "size": lambda p: p.size(), "dim": lambda p: p.dim(),
        "numel": lambda p: p.numel(), "hash": hash, "len": len, "ndim": lambda p: p.ndim,
        "is_contiguous": lambda p: p.is_contiguous(), "is_cpu": lambda p: p.is_cpu,
        "hook": lambda p: p.register_hook(lambda g: None).remove(),
        "accumulated": lambda p: p.register_post_accumulate_grad_hook(lambda g: None).remove(),
        "isinstance": lambda p: isinstance(p, nn.Parameter),
        "floating": lambda p: p.is_floating_point() and torch.is_floating_point(p),
        "thaw": lambda p: p.requires_grad_(),
    }
    for name, look in looks.items():
        look(net[0].weight)  # type: ignore[arg-type]
        assert type(net[0].weight) is ParameterInFlight, name
    with reducer.microbatch(last=True):  # it looks at every p.grad
        net[1](torch.ones(1, 32))
        assert [type(m.weight) is ParameterInFlight for m in net] == [True, False, True]
        net[2].weight.sum()
        assert [type(m.weight) is ParameterInFlight for m in net] == [True, False, False]
        net[0](torch.ones(1, 32))
        for p in net.parameters():
            p.grad = torch.ones_like(p, requires_grad=False)
    optimizer.step()  # remade in the order of use
    units = [names for gather in optimizer._gather._gathers.values() for names in gather.units()]
    assert units == [("1.weight",), ("2.weight",), ("0.weight",)]
    optimizer.wait_parameters()
    assert optimizer.gather_stats().gather_count == 6
    step()
    hooks = [len(m._forward_pre_hooks) for m in net]
    del optimizer, step
    gc.collect()
    assert {type(p) for p in net.parameters()} == {nn.Parameter}
    assert (hooks, [len(m._forward_pre_hooks) for m in net]) == ([1, 1, 1], [0, 0, 0])


def run_other_orders() -> list[Any]:
    """Ranks use modules in different orders, and different modules; rank 0's order is used."""
    with hsdp.init_mesh(1, 2) as mesh:
        found = []
        for overlap in (True, mesh.rank == 0, False):
            torch.manual_seed(1)
            net = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(4))
            reducer = attached_to(net, mesh, missing="zero", bucket_bytes=4096)
            optimizer = ShardedOptimizer(torch.optim.AdamW, net, reducer, gather_bucket_bytes=4096,
                                         overlap_param_gather=overlap, max_grad_norm=1.0)
            for step in range(6):
                x = torch.ones(2, 32)
                with reducer.microbatch(last=True):
                    for i in ((3, 1, 0, 2), (2, 0))[mesh.rank] if step != 2 else (0,):
                        x = net[i](x)
                    x.square().mean().backward()
                optimizer.step()
            units = [names[0] for g in optimizer._gather._gathers.values() for names in g.units()]
            found.append(units if overlap else [])
            found.append([float(p.double().sum()) for p in net.parameters()])
            optimizer.close()
            reducer.close()
        return found


def test_rank_0_says_the_order(ranks: Launcher) -> None:
    first, second = ranks(2, run_other_orders)
    assert first[0] == second[0] == [f"{i}.weight" for i in (3, 1, 0, 2)]
    assert first[1] == first[3] == first[5] == second[1] == second[3] == second[5]


class Failing(torch.optim.SGD):
    fails = False

    def step(self, closure: Any = None) -> Any:
        if Failing.fails:
            raise ValueError("no more steps")
        return super().step(closure)


@on_mesh(1, 2, timeout_s=20)
def test_a_rank_that_cannot_update_is_heard_by_every_reader(mesh: hsdp.Mesh) -> None:
    net = nn.Linear(8, 8)
    reducer = attached_to(net, mesh)
    optimizer = ShardedOptimizer(Failing, net, reducer, lr=0.1, overlap_param_gather=True)
    heard = ""
    for step in range(3):
        with reducer.microbatch(last=True):
            net(torch.ones(1, 8)).sum().backward()
        Failing.fails = step == 2 and mesh.rank == 1
        try:
            optimizer.step()
        except ValueError as error:
            heard = str(error)
    for _ in range(2):
        if mesh.rank == 0:
            with pytest.raises(hsdp.Error, match="no more steps") as told:
                net.weight.sum()
            heard = str(told.value)
            assert "rank 1" in heard and "ShardedOptimizer.step: ValueError" in heard
            with pytest.raises(hsdp.Error, match="no more steps"):
                net(torch.ones(1, 8))
            assert type(net.weight) is ParameterInFlight
    if mesh.rank == 0:
        with pytest.raises(hsdp.Error, match="no more steps"):
            optimizer.close()
    optimizer.close()
    assert type(net.weight) is nn.Parameter
    net.state_dict()
    assert "no more steps" in heard


class OwnParameter(nn.Parameter):
    pass


@on_ranks(2)
def test_edges() -> None:
    """Several Reducers, a user's class, a group of one, and reads after the mesh is closed."""
    with hsdp.init_mesh(1, 2) as mesh:
        nets = [nn.Linear(16, 16), nn.Linear(16, 4)]
        nets[1].weight = OwnParameter(nets[1].weight.detach())
        reducers = [hsdp.Reducer(mesh) for _ in nets]
        for reducer, net in zip(reducers, nets, strict=True):
            reducer.attach(net)
        named = [(f"{i}.{n}", p) for i, net in enumerate(nets) for n, p in net.named_parameters()]
        optimizer = ShardedOptimizer(torch.optim.AdamW, named, reducers, overlap_param_gather=True)
        for _ in range(3):
            for reducer, net in zip(reducers, nets, strict=True):
                with reducer.microbatch(last=True):
                    net(torch.ones(2, 16)).sum().backward()
            optimizer.step()
            assert type(nets[0].weight) is ParameterInFlight
            assert type(nets[1].weight) is OwnParameter
    assert torch.isfinite(nets[0].weight).all()
    assert type(nets[0].weight) is nn.Parameter
    with hsdp.init_mesh(2, 1) as mesh:
        net = nn.Linear(4, 4)
        reducer = attached_to(net, mesh)
        optimizer = ShardedOptimizer(torch.optim.AdamW, net, reducer, overlap_param_gather=True)
        with reducer.microbatch(last=True):
            net(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        assert type(net.weight) is nn.Parameter
        assert not net._forward_pre_hooks
