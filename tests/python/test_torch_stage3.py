"""Stage 3: units that are gathered for their passes and released afterwards, with the bits of stage 2."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from conftest import Launcher, on_mesh
from one_rank import attached_to
from same_tensors import require_same, states_of
from torch import func, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import hsdp
from hsdp.torch.units.released_parameter import ReleasedParameter
from hsdp.zero import ShardedOptimizer

STEPS = 4


class Block(nn.Module):
    """Attention and a feed-forward network, each after a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Any, scale: Any = None) -> Any:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + torch.softmax(q @ k.transpose(-1, -2), -1) @ v
        y = self.down(torch.relu(self.up(x)))
        return x + (y if scale is None else scale * y)


class Model(nn.Module):
    """Blocks between an embedding and a head that share a weight."""

    def __init__(self, dtype: torch.dtype = torch.float32, width: int = 12, depth: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(17, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 17, bias=False)
        self.head.weight = self.embed.weight
        self.recompute: bool | None = None  # reentrantly or not; None: not at all
        self.to(dtype)

    def forward(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        if self.recompute and not x.requires_grad:  # reentrant checkpoints need that
            x.requires_grad_()
        for block in self.blocks:
            if self.recompute is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.recompute)
        return self.head(self.norm(x))


def batch(mesh: hsdp.Mesh, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + mesh.rank)
    return torch.randint(0, 17, (2, 5), generator=generator)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> Any:
    return nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())


def released(model: nn.Module) -> list[str]:
    return [n for n, p in model.named_parameters() if type(p) is ReleasedParameter]


def trained(mesh: hsdp.Mesh, model: nn.Module, passes: int = 1, **options: Any) -> dict[str, Any]:
    """What some steps make of the model: parameters, and masters and states as one process would have
    them."""
    with attached_to(model, mesh, bucket_bytes=512, verify_every=1) as reducer:
        options = {"lr": 0.01, "persistence_threshold": 0, **options}
        optimizer = ShardedOptimizer(torch.optim.AdamW, model, reducer, **options)
        for step in range(STEPS):
            for i in range(passes):
                with reducer.microbatch(last=i == passes - 1):
                    loss_of(model, batch(mesh, passes * step + i)).backward()
            optimizer.step()
        result = {**optimizer.full_model_state_dict(model), **states_of(optimizer),
                  "norm": torch.as_tensor(optimizer.grad_norm or 0.0)}
        optimizer.close()
        return result


# When units are released.
RESHARDS: list[dict[str, bool]] = [
    {"reshard_after_forward": True},
    {"reshard_after_forward": False},
    {"reshard_after_backward": False},
]


def compare_with_stage_2(shape: tuple[int, int], dtype_name: str, options: dict[str, Any]) -> None:
    dtype = getattr(torch, dtype_name)
    if "units" in options:
        options["units"] = [getattr(nn, name) for name in options["units"]]
    with hsdp.init_mesh(replicate=shape[0], shard=shape[1]) as mesh:
        want = trained(mesh, Model(dtype), stage=2, **options)
        for reshards in RESHARDS:
            model = Model(dtype)
            require_same(trained(mesh, model, stage=3, **reshards, **options), want)
            assert not released(model), "closed"


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((1, 1), "float32"), ((2, 2), "float32"), ((1, 3), "float32"), ((2, 2), "bfloat16")],
)
def test_stage_3_has_the_bits_of_stage_2(
    ranks: Launcher, shape: tuple[int, int], dtype: str
) -> None:
    ranks(shape[0] * shape[1], compare_with_stage_2, shape, dtype, {})


@pytest.mark.parametrize(
    "options",
    [
        {"passes": 3},
        {"max_grad_norm": 0.1},
        {"overlap_param_gather": False, "persistence_threshold": 30},
        {"persistence_threshold": float("inf")},
        {"prefetch_bytes": 0},
        {"prefetch_bytes": 1 << 20},
        {"units": ["Linear"]},
    ],
    ids=lambda options: "-".join(options),
)
def test_with_options_it_has_too(ranks: Launcher, options: dict[str, Any]) -> None:
    ranks(2, compare_with_stage_2, (1, 2), "bfloat16", options)


# Ways to train a model whose bits are compared: what a backward pass may meet.


class Adapter(nn.Module):
    """LoRA: a frozen layer, and beside it a product of two small trained ones."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, base.in_features) / 4)
        self.b = nn.Parameter(torch.randn(base.out_features, 2) / 4)

    def forward(self, x: Any) -> Any:
        return self.base(x) + x @ self.a.T @ self.b.T


def adapted(model: Model) -> Model:
    model.requires_grad_(False)
    torch.manual_seed(1)
    for block in model.blocks:
        block.up = Adapter(block.up)
    return model


class TwiceUsed(Model):
    """Runs its blocks twice."""

    def forward(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for block in [*self.blocks, *self.blocks]:
            x = block(x)
        return self.head(self.norm(x))


class Chosen(Model):
    """The rank and the values decide which blocks run."""

    def forward(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for i, block in enumerate(self.blocks):
            if (int(tokens[0, 0]) + i) % 2:
                x = block(x, scale=torch.ones(()))
        return self.head(self.norm(x))


class Wrapped(Model):
    """Passes hidden values on in objects that torch looks into, and in some that it does not."""

    class Opaque:
        def __init__(self, value: Any) -> None:
            self.value = value

    class Layer(nn.Module):
        def __init__(self, block: Block, opaque: bool) -> None:
            super().__init__()
            self.block = block
            self.opaque = opaque

        def forward(self, hidden: Any) -> Any:
            x = hidden.value if isinstance(hidden, Wrapped.Opaque) else hidden["x"]
            y = self.block(x)
            return Wrapped.Opaque(y) if self.opaque else {"x": y, "aux": (y.sum(), None, "text")}

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.blocks = nn.ModuleList(Wrapped.Layer(b, i % 2 == 0) for i, b in enumerate(self.blocks))

    def forward(self, tokens: Any) -> Any:
        hidden: Any = {"x": self.embed(tokens)}
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden.value))


class Forces(Model):
    """Computes a gradient within its forward pass, and continues."""

    def forward(self, tokens: Any) -> Any:
        x = y = self.embed(tokens).detach().requires_grad_()
        for block in self.blocks:
            y = block(y)
        (force,) = torch.autograd.grad(y.float().square().sum(), x, create_graph=True)
        return self.head(self.norm(self.blocks[0](y) + force))


class Recursive(Model):
    """A unit that calls itself."""

    class Layer(nn.Module):
        def __init__(self, block: Block) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: Any, depth: int = 2) -> Any:
            y = self(x, depth=depth - 1) if depth else x
            return self.block(y)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.blocks = nn.ModuleList(Recursive.Layer(block) for block in self.blocks)


class Habits(Model):
    """What layers do with arguments and results: a list that they append to, a tensor returned twice, one
    that they ignore, a view of a parameter, and a result that the caller writes to in place.
    """

    class Layer(nn.Module):
        def __init__(self, block: Block) -> None:
            super().__init__()
            self.block = block
            self.shift = nn.Parameter(torch.linspace(0, 1, 24))
            self.out = nn.Linear(12, 12)

        def forward(self, x: Any, again: Any, ignored: Any, losses: list[Any]) -> Any:
            assert again is x
            losses.append(self.block(x).float().mean())
            return self.out(self.block(again)), self.shift[:12]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.blocks = nn.ModuleList(Habits.Layer(block) for block in self.blocks)
        self.unused = nn.Linear(12, 12)
        self.to(self.norm.weight.dtype)

    def forward(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        losses: list[Any] = []
        for block in self.blocks:
            y, shift = block(x, x, self.unused(x), losses)
            x = nn.functional.relu_(y) + shift
        assert len(losses) == len(self.blocks)
        return self.head(self.norm(x)) + sum(losses).to(x.dtype)


def once(model: Any, tokens: Any) -> None:
    loss_of(model, tokens).backward()


def recomputing(reentrant: bool) -> Any:
    def run(model: Any, tokens: Any) -> None:
        model.recompute = reentrant
        loss_of(model, tokens).backward()

    return run


def with_two_losses(model: Any, tokens: Any) -> None:
    hidden = model(tokens)
    (hidden.float().square().mean() + hidden.float().mean()).backward()


def with_evaluation(model: Any, tokens: Any) -> None:
    model.eval()
    with torch.no_grad():
        model(tokens)
    with torch.inference_mode():
        for length in range(1, 4):
            model(tokens[:, :length])
    loss_of(model, tokens)  # recorded and dropped
    model.train()
    once(model, tokens)


def retained(model: Any, tokens: Any) -> None:
    loss = loss_of(model, tokens)
    parameters = [p for p in model.parameters() if p.requires_grad]
    torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    loss.backward()


def with_penalty(model: Any, tokens: Any) -> None:
    x = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(int(tokens.sum())))
    x = x.to(model.norm.weight.dtype).requires_grad_()
    out = model.blocks[1](model.blocks[0](x))
    (gradient,) = torch.autograd.grad(out.float().sum(), x, create_graph=True)
    (loss_of(model, tokens) + gradient.float().square().sum()).backward()


def divide_by_zero(*_: Any) -> Any:
    return 1 / 0


def after_an_error(model: Any, tokens: Any) -> None:
    handle = model.norm.register_forward_pre_hook(divide_by_zero)
    with pytest.raises(ZeroDivisionError):
        model(tokens)
    handle.remove()
    layer = next(p for p in model.blocks[0].parameters() if p.requires_grad)
    handle = layer.register_hook(divide_by_zero)
    with contextlib.suppress(ZeroDivisionError):  # not every model uses it each time
        once(model, tokens)
    handle.remove()
    once(model, tokens)


def by_functional_call(model: Any, tokens: Any) -> None:
    parameters = {"norm.weight": torch.full((12,), 0.5, dtype=model.norm.weight.dtype)}

    def call(some: Any) -> Any:
        return torch.func.functional_call(model, parameters, (some,))

    nn.functional.cross_entropy(call(tokens).float().flatten(0, 1), tokens.flatten()).backward()


def mapped(model: Any, tokens: Any) -> None:
    logits = torch.func.vmap(lambda one: model(one[None])[0])(tokens)
    nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten()).backward()


def compiled(model: Any, tokens: Any) -> None:
    nn.functional.cross_entropy(
        torch.compile(model, backend="eager")(tokens).float().flatten(0, 1), tokens.flatten()
    ).backward()


MODELS: dict[str, Any] = {
    "plain": Model,
    "adapted": lambda dtype: adapted(Model()).to(dtype),
    "twice": TwiceUsed,
    "chosen": Chosen,
    "wrapped": Wrapped,
    "forces": Forces,
    "recursive": Recursive,
    "habits": Habits,
}
# Combinations that torch does not support either.
LEFT_OUT = {
    "habits": ("penalty", "reentrant", "recomputing"),
    "wrapped": ("penalty", "reentrant", "recomputing"),
    "forces": ("reentrant", "recomputing", "evaluation", "functional", "mapped", "compiled"),
    "chosen": ("mapped",),
}
PASSES: dict[str, Any] = {
    "once": once,
    "reentrant": recomputing(True),
    "recomputing": recomputing(False),
    "two losses": with_two_losses,
    "evaluation": with_evaluation,
    "retained": retained,
    "penalty": with_penalty,
    "an error": after_an_error,
    "functional": by_functional_call,
    "mapped": mapped,
}


def run_passes(mesh: hsdp.Mesh, model: Any, run: Any, **options: Any) -> dict[str, Any]:
    torch._dynamo.reset()
    with attached_to(model, mesh, bucket_bytes=512, missing="zero", backwards="many") as reducer:
        optimizer = ShardedOptimizer(
            torch.optim.AdamW, model, reducer, lr=0.01, persistence_threshold=0, **options
        )
        for step in range(3):
            with reducer.microbatch(last=True):
                run(model, batch(mesh, step))
            if options["stage"] == 3 and options.get("reshard_after_backward", True):
                assert len(released(model)) == len(list(model.named_parameters()))
            optimizer.step()
        state = optimizer.full_model_state_dict(model)
        optimizer.close()
        return state


def compare_passes(mesh: hsdp.Mesh, name: str, run_name: str, run: Any, ways: Any) -> None:
    dtype = torch.bfloat16 if run_name == "once" else torch.float32
    want = run_passes(mesh, MODELS[name](dtype), run, stage=2)
    for reshards in ways:
        got = run_passes(mesh, MODELS[name](dtype), run, stage=3, **reshards)
        print(name, run_name, reshards, flush=True)
        require_same(got, want)


WAYS = (RESHARDS[0], {**RESHARDS[1], **RESHARDS[2]})


@pytest.mark.parametrize("name", MODELS)
@on_mesh(1, 2)
def test_whatever_a_pass_meets(mesh: hsdp.Mesh, name: str) -> None:
    """The plain model with every kind of release; other models with one kind each, in turn."""
    for number, (run_name, run) in enumerate(PASSES.items()):
        if run_name not in LEFT_OUT.get(name, ()):
            compare_passes(mesh, name, run_name, run, WAYS if name == "plain" else WAYS[number % 2 :][:1])


def messages_of_steps(mesh: hsdp.Mesh, depth: int, **reshards: bool) -> list[int]:
    """Messages on the control connection in each step of two microbatches; rank 1 skips a block in step 4."""
    model = Model(depth=depth)
    with attached_to(model, mesh, missing="zero") as reducer:
        optimizer = ShardedOptimizer(
            torch.optim.SGD, model, reducer, lr=0.01, persistence_threshold=0, stage=3, **reshards
        )
        counts = [reducer.stats().control_message_count]
        blocks = list(model.blocks)
        for step in range(8):
            for i in range(2):
                leaves_out = step == 4 and i == 0 and mesh.rank == 1
                model.blocks = nn.ModuleList(blocks[: depth // 2 - 1] if leaves_out else blocks)
                with reducer.microbatch(last=i == 1):
                    loss_of(model, batch(mesh, step)).backward()
            optimizer.step()
            counts.append(reducer.stats().control_message_count)
        model.blocks = nn.ModuleList(blocks)
        optimizer.close()
    return [after - before for before, after in zip(counts, counts[1:], strict=False)]


@pytest.mark.parametrize("reshards", RESHARDS, ids=lambda reshards: "-".join(map(str, reshards.items())))
@on_mesh(1, 3)
def test_gathers_ask_nobody_from_the_third_step_on(mesh: hsdp.Mesh, reshards: dict[str, bool]) -> None:
    """If one rank skips half of the model, the ranks ask once more."""
    few, many = (messages_of_steps(mesh, depth, **reshards) for depth in (4, 12))
    print(few, many)
    assert min(few[2:4]) == max(few[2:4] + few[6:])
    assert many[2:4] == few[2:4]
    assert many[6:] == few[6:]


@on_mesh(1, 2)
def test_whatever_model_is_compiled(mesh: hsdp.Mesh) -> None:
    """In one job, as a rank's first compilation takes seconds."""
    for name in MODELS:
        if "compiled" not in LEFT_OUT.get(name, ()):
            compare_passes(mesh, name, "compiled", compiled, WAYS if name == "plain" else WAYS[1:])


class Field(nn.Module):
    """A function of a point."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(n, m) for n, m in [(3, 16), (16, 16), (16, 1)])

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x[..., 0]


def dual(field: Any, x: Any) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(field(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


# With respect to the point, as in losses of physics; the backward pass differentiates once more.
DERIVATIVES: dict[str, Any] = {
    "grad": lambda field, x: func.grad(field)(x[0]),
    "grad mapped": lambda field, x: func.vmap(func.grad(field))(x),
    "vjp": lambda field, x: func.vjp(field, x)[1](torch.ones(4))[0],
    "jvp": lambda field, x: func.jvp(field, (x,), (torch.ones_like(x),))[1],
    "hessian": lambda field, x: func.vmap(func.hessian(field))(x),
    "hessian reversed": lambda field, x: func.vmap(func.jacrev(func.jacrev(field)))(x),
    "dual": dual,
}


def train_by(mesh: hsdp.Mesh, derivative: Any, **options: Any) -> dict[str, Any]:
    field = Field()
    with attached_to(field, mesh, bucket_bytes=512, missing="zero") as reducer:
        optimizer = ShardedOptimizer(
            torch.optim.AdamW, field, reducer, lr=0.01, persistence_threshold=0, **options
        )
        for step in range(3):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + mesh.rank))
            with reducer.microbatch(last=True):
                derivative(field, x).square().mean().backward()
            optimizer.step()
        state = optimizer.full_model_state_dict(field)
        optimizer.close()
        return state


@on_mesh(1, 2)
def test_derivatives_by_the_input(mesh: hsdp.Mesh) -> None:
    for name, derivative in DERIVATIVES.items():
        print(name, flush=True)
        want = train_by(mesh, derivative, stage=2)
        for reshards in WAYS:
            require_same(train_by(mesh, derivative, stage=3, **reshards), want)
