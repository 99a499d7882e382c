"""The private parts of torch that hsdp uses behave as it assumes, and are all named in one file."""

from __future__ import annotations

import ast
import builtins
import inspect
import pathlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import on_ranks
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import hsdp
from hsdp.torch import private_torch

HERE = pathlib.Path(private_torch.__file__).resolve()
PACKAGE = HERE.parents[1]  # the sources: a build links to their folders, which rglob does not follow
ROOT = pathlib.Path(__file__).parents[2]


def test_foreach_writes_into_the_first_tensors() -> None:
    tensors = [torch.full((2,), 3.0), torch.full((3, 2), 5.0)]
    private_torch.foreach_mul_(tensors, torch.tensor(2.0))
    assert [one.unique().tolist() for one in tensors] == [[6.0], [10.0]]
    private_torch.foreach_copy_(tensors, [torch.ones(2), torch.zeros(3, 2, dtype=torch.bfloat16)])
    assert [one.unique().tolist() for one in tensors] == [[1.0], [0.0]]


def test_whether_the_profiler_records() -> None:
    assert private_torch.profiler_is_on() is False
    with torch.profiler.profile():
        assert private_torch.profiler_is_on() is True
    assert private_torch.profiler_is_on() is False


class Seen(torch.Tensor):
    """A tensor without memory that records the operators called on it."""

    seen: list[Any] = []

    def __new__(cls, shape: tuple[int, ...]) -> Any:
        return private_torch.make_wrapper_subclass(cls, shape, dtype=torch.float32, device="cpu")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func)
        return args[0]


def test_a_wrapper_has_a_shape_and_sees_operators() -> None:
    wrapper: Any = Seen((1 << 20, 1 << 20))  # larger than the memory
    assert wrapper.shape == (1 << 20, 1 << 20) and wrapper.dtype == torch.float32
    Seen.seen.clear()
    wrapper.to(torch.float64)
    assert Seen.seen == [private_torch.to_copy]


class Asked(torch.nn.Parameter):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("asked")


def test_a_subclass_is_made_and_passed_by() -> None:
    plain = torch.ones(2)
    made: Any = private_torch.make_subclass(Asked, plain, True)
    with private_torch.DisableTorchFunctionSubclass():
        assert type(made) is Asked and made.requires_grad and made.data_ptr() == plain.data_ptr()
        assert made.add(1).tolist() == [2, 2]
    with pytest.raises(AssertionError, match="asked"):
        made.add(1)


def test_leaves_of_a_tree() -> None:
    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    assert [*map(id, private_torch.tree_leaves({"a": (a, [b]), "c": c}))] == [id(a), id(b), id(c)]


def test_versions_and_bases() -> None:
    whole = torch.zeros(4)
    part = whole[1:]
    before = private_torch.version(whole)
    part.add_(1)
    assert private_torch.version(whole) == private_torch.version(part) == before + 1
    assert private_torch.base(part) is whole and private_torch.base(whole) is None


def test_attributes_are_descriptors() -> None:
    for name in private_torch.ATTRIBUTES_WITHOUT_VALUES:
        assert callable(getattr(torch.Tensor, name).__get__)
    for name in private_torch.SETTABLE_WITHOUT_VALUES:
        assert callable(getattr(torch.Tensor, name).__set__)


def test_holders_of_a_storage() -> None:
    tensor = torch.zeros(4)
    alone = private_torch.storage_holders(tensor.untyped_storage())
    other = tensor[:2]
    assert private_torch.storage_holders(tensor.untyped_storage()) == alone + 1
    del other
    assert private_torch.storage_holders(tensor.untyped_storage()) == alone


def test_hooks_of_a_tensor() -> None:
    tensor = torch.zeros(2, requires_grad=True)
    assert not private_torch.backward_hooks(tensor) and not private_torch.post_accumulate_grad_hooks(tensor)
    handles = [
        tensor.register_hook(lambda gradient: None),
        tensor.register_post_accumulate_grad_hook(lambda parameter: None),
    ]
    found = [private_torch.backward_hooks(tensor), private_torch.post_accumulate_grad_hooks(tensor)]
    assert [[*hooks] for hooks in found] == [[handle.id] for handle in handles]
    del found[1][handles[1].id]  # torch's dict
    assert not private_torch.post_accumulate_grad_hooks(tensor)


def test_a_backward_pass_has_a_number_and_an_end() -> None:
    numbers: list[int] = []
    events: list[str] = []

    def hook(gradient: torch.Tensor) -> None:
        numbers.append(private_torch.current_graph_task_id())
        private_torch.at_end_of_backward(lambda: events.append("end"))
        events.append("hook")

    for _ in range(2):
        one, other = (torch.ones(1, requires_grad=True) for _ in range(2))
        one.register_hook(hook)
        other.register_hook(hook)
        (one * other).backward()
    assert private_torch.current_graph_task_id() == -1
    assert numbers[0] == numbers[1] != numbers[2] == numbers[3] and min(numbers) >= 0
    assert events == ["hook", "hook", "end", "end"] * 2


def test_the_raw_stream_is_a_function_of_the_device() -> None:
    raw = private_torch.current_raw_stream
    if not torch.cuda.is_available():
        assert raw is None or callable(raw)
        return
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert raw is not None and raw(0) == stream.cuda_stream


def test_who_asks_a_parameter_for_its_values() -> None:
    """For `_called_by` of released_parameter.py: called directly below __torch_function__."""
    asked: list[tuple[str, Any]] = []

    class Asks(torch.nn.Parameter):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append((getattr(func, "__name__", ""), sys._getframe(1).f_code))
            with private_torch.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

    module = torch.nn.Linear(1, 1, bias=False)
    module.weight = Asks(torch.ones(1, 1))
    state = module.state_dict()
    assert ("detach", private_torch.SAVES) in asked
    module.load_state_dict({"weight": torch.zeros(1, 1)})
    assert ("copy_", private_torch.LOADS) in asked and ("copy_", private_torch.SAVES) not in asked
    assert state["weight"].shape == (1, 1)
    asked.clear()
    optimizer = torch.optim.AdamW([module.weight])
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    get_optimizer_state_dict(module, optimizer)
    codes = [code for name, code in asked if name == "zeros_like"]
    assert any(map(private_torch.initialises, codes)) and not private_torch.initialises(private_torch.SAVES)


def test_a_modules_own() -> None:
    norm = torch.nn.BatchNorm1d(2, affine=True)
    outer = torch.nn.Sequential(norm, norm)
    assert [*private_torch.parameters_of(norm)] == ["weight", "bias"]
    assert [*private_torch.buffers_of(norm)] == ["running_mean", "running_var", "num_batches_tracked"]
    assert [*private_torch.children_of(outer).items()] == [("0", norm), ("1", norm)]
    private_torch.parameters_of(norm)["weight"] = torch.nn.Parameter(torch.zeros(2))
    assert norm.weight.tolist() == [0, 0]


def test_resets() -> None:
    public, private = private_torch.RESETS
    assert callable(getattr(torch.nn.Linear, public))
    assert callable(getattr(torch.nn.MultiheadAttention, private))


def test_parameters_of_an_rnn_are_swapped() -> None:
    rnn = torch.nn.GRU(2, 2)
    fresh = torch.nn.Parameter(torch.zeros_like(rnn.weight_ih_l0))
    with pytest.raises(RuntimeError):
        torch.utils.swap_tensors(rnn.weight_ih_l0, fresh)  # the case for forget_flat_weights
    private_torch.forget_flat_weights(rnn)
    torch.utils.swap_tensors(rnn.weight_ih_l0, fresh)
    private_torch.make_flat_weights(rnn)
    assert rnn(torch.ones(1, 1, 2))[0].isfinite().all()
    assert rnn.weight_ih_l0.abs().sum() == 0


def test_clipping_goes_through_the_private_function() -> None:
    function = getattr(torch.nn.utils.clip_grad, private_torch.CLIP_WITH_NORM)
    parameter = torch.nn.Parameter(torch.ones(4))
    parameter.grad = torch.full((4,), 3.0)
    function([parameter], 1.0, torch.tensor(6.0))
    assert parameter.grad.norm().item() == pytest.approx(1.0, abs=1e-5)
    assert "max_norm" in inspect.signature(function).parameters


def test_optimizers_that_skip_and_their_hooks() -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    fused = torch.optim.AdamW([parameter], fused=True)
    plain = torch.optim.SGD([parameter], lr=1.0)
    assert private_torch.skips_by_itself(fused) and not private_torch.skips_by_itself(plain)

    def before(optimizer: Any, state_dict: Any) -> None: ...
    def after(optimizer: Any) -> None: ...

    plain.register_load_state_dict_pre_hook(before)
    plain.register_load_state_dict_post_hook(after)
    assert [*private_torch.load_state_dict_pre_hooks(plain)] == [before]
    assert [*private_torch.load_state_dict_post_hooks(plain)] == [after]


def test_what_a_scaler_keeps() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    assert private_torch.is_enabled(scaler)
    assert not private_torch.is_enabled(torch.amp.GradScaler("cpu", enabled=False))
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler.scale(parameter.sum()).backward()
    assert private_torch.scale_of(scaler).item() == 8.0
    assert private_torch.optimizer_state(scaler, optimizer)["stage"].name == "READY"
    scaler.unscale_(optimizer)
    assert private_torch.optimizer_state(scaler, optimizer)["stage"].name == "UNSCALED"


def test_how_a_scaler_divides() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.full((1,), 16.0)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    found = private_torch.unscale_grads(scaler, optimizer, torch.tensor(0.125), torch.zeros(1), False)
    assert parameter.grad.item() == 2 and [flag.item() for flag in found.values()] == [0]
    scaler.scale(parameter.sum())  # which creates its scale
    own, called = torch.amp.GradScaler._unscale_grads_, []

    def method(self: Any, *args: Any) -> Any:
        called.append(self)
        return private_torch.unscale_grads(self, *args)

    private_torch.set_unscale_grads(method)
    try:
        scaler.unscale_(optimizer)
    finally:
        private_torch.set_unscale_grads(own)
    assert called == [scaler] and parameter.grad.item() == 0.25


@on_ranks(2)
def test_fsdp2() -> None:
    dist.init_process_group("gloo")
    try:
        rank = dist.get_rank()
        store = private_torch.default_store()
        store.set(f"rank{rank}", "here")
        assert store.get(f"rank{1 - rank}") == b"here"
        mesh = dist.init_device_mesh("cpu", (2,))
        model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 1))
        for module in (model[0], model):
            fully_shard(module, mesh=mesh)
        groups = [private_torch.fsdp_groups(module) for module in (model[0], model)]
        assert [len(of) for of in groups] == [1, 1] and groups[0][0] is not groups[1][0]
        assert private_torch.fsdp_state(model) is not private_torch.fsdp_state(model[0])
        (group,) = groups[0]
        assert [private_torch.fsdp_size(p) for p in group.fsdp_params] == [(5, 3), (5,)]
        assert not private_torch.fsdp_has_replicas(group.mesh_info)
        assert private_torch.fsdp_all_reduce_hook(group) is None
        assert private_torch.fsdp_reduce_dtypes(group) == {torch.float32}
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        (cast,) = private_torch.fsdp_groups(fully_shard(torch.nn.Linear(3, 5), mesh=mesh, mp_policy=policy))
        follows_grad_dtype = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)
        expected = torch.float32 if follows_grad_dtype else torch.bfloat16
        assert private_torch.fsdp_reduce_dtypes(cast) == {expected}

        def hook(flat: torch.Tensor) -> None:
            root = private_torch.fsdp_root(model)
            assert root is private_torch.fsdp_root(model[0])
            queued.append(root.post_backward_final_callback_queued)

        queued: list[bool] = []
        model[0].set_all_reduce_hook(hook)
        assert private_torch.fsdp_all_reduce_hook(group) is hook
        model(torch.ones(2, 3)).sum().backward()
        assert queued == [True]
        assert not private_torch.fsdp_root(model).post_backward_final_callback_queued
        # In f32 the collective divides; f16 is divided before and after it.
        model[0].set_gradient_divide_factor(8.0)
        assert private_torch.fsdp_divisor_after(group, torch.float32, "cpu") is None
        assert private_torch.fsdp_divisor_after(group, torch.float16, "cpu") == 2
        two = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        hybrid = torch.nn.Linear(3, 5)
        fully_shard(hybrid, mesh=two)
        assert private_torch.fsdp_has_replicas(private_torch.fsdp_groups(hybrid)[0].mesh_info)
    finally:
        dist.destroy_process_group()


def own_names() -> set[str]:
    """Everything that hsdp defines anywhere."""
    found = set(dir(builtins))
    for file in PACKAGE.rglob("*.py"):
        if file == HERE:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
    return found - {"_version"}  # torch defines it too


def private_uses(tree: ast.AST, own: set[str]) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            of_self = isinstance(node.value, ast.Name) and node.value.id == "self" and node.attr == "_version"
            if node.attr.startswith("_") and not node.attr.startswith("__") and not of_self:
                if node.attr not in own:
                    yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            if any(name.startswith("_") for name in names):
                yield node.lineno, ast.unparse(node)


# : names of Python, and of the compiled module
NOT_TORCH = {"sys._getframe", "given._replace"}
# : the extras of transformers and Lightning bound which releases hsdp uses them with
OF_OTHERS = PACKAGE / "integrations"


def test_no_other_file_uses_private_parts() -> None:
    own = own_names()
    found = [
        f"{file.relative_to(PACKAGE)}:{line}: {text}"
        for file in sorted(PACKAGE.rglob("*.py")) if file != HERE and OF_OTHERS not in file.parents
        for line, text in private_uses(ast.parse(file.read_text()), own)
        if text not in NOT_TORCH
    ]
    assert (PACKAGE / "torch" / "sharded_optimizer.py").is_file()
    assert found == [], "move them to torch/private_torch.py, with a check here"


def test_what_is_found_to_be_private() -> None:
    text = "from torch.utils import _pytree\nx._base\nself._version\np._version\nx._mine\nx.public\n"
    assert [line for line, _ in private_uses(ast.parse(text), {"_mine"})] == [1, 2, 4]


def test_every_use_has_a_check() -> None:
    constants = {"OLDEST", "NEWEST", "ATTRIBUTES_WITHOUT_VALUES", "SETTABLE_WITHOUT_VALUES", "RESETS", "CLIP_WITH_NORM"}
    functions = {
        name for name, value in vars(private_torch).items() if inspect.isfunction(value)
        and value.__module__ == private_torch.__name__ and not name.startswith("_")
    }
    used = {*private_torch._parts, *constants, *functions}
    assert constants <= {*vars(private_torch)} and len(used) > 35
    checked = pathlib.Path(__file__).read_text()
    assert [name for name in sorted(used) if f"private_torch.{name}" not in checked] == []


def test_the_package_takes_every_torch_from_the_oldest_on() -> None:
    oldest, newest = ((".".join(map(str, of))) for of in (private_torch.OLDEST, private_torch.NEWEST))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    of_torch = [one for extra in extras.values() for one in extra if one.startswith("torch")]
    assert of_torch == [f"torch>={oldest}"] * 3
    assert f"torch {oldest} to {newest}" in (ROOT / "README.md").read_text()
    nightly = (ROOT / ".ci" / "nightly").read_text()
    assert re.findall(r"TORCH_VERSION=(\d+\.\d+)", nightly) == [oldest, newest]


@pytest.mark.parametrize(
    ("name", "holder", "attribute", "works"),
    [
        ("make_flat_weights", torch.nn.RNNBase, "_init_flat_weights", "not on the meta device"),
        ("current_graph_task_id", torch._C, "_current_graph_task_id", "Reducer.gradient_ready"),
        ("unscale_grads", torch.amp.GradScaler, "_unscale_grads_", "without a GradScaler"),
        ("default_store", distributed_c10d, "_get_default_store", "torchrun"),
    ],
)
def test_a_missing_part_is_an_error_that_says_what_works(
    monkeypatch: pytest.MonkeyPatch, name: str, holder: Any, attribute: str, works: str
) -> None:
    getattr(private_torch, name)  # now it exists, each time it is looked up
    monkeypatch.delitem(vars(private_torch), name)
    monkeypatch.delattr(holder, attribute)
    with pytest.raises(hsdp.UsageError) as caught:
        getattr(private_torch, name)
    text = str(caught.value)
    assert attribute in text and torch.__version__ in text and works in text, text
    monkeypatch.undo()
    getattr(private_torch, name)


def test_a_missing_part_of_an_object_is_an_error_too() -> None:
    class Group: ...

    with pytest.raises(hsdp.UsageError, match=r"'_all_reduce_hook'.*Reducer.attach and ShardedOptimizer work"):
        private_torch.fsdp_all_reduce_hook(Group())


def test_what_is_no_part_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'nothing'"):
        private_torch.nothing


def test_fsdp_groups_of_older_releases() -> None:
    class State:
        _fsdp_param_group: Any = None

    class Module:
        def _get_fsdp_state(self) -> State:
            return State()

    assert private_torch.fsdp_groups(Module()) == []
    State._fsdp_param_group = "one"
    assert private_torch.fsdp_groups(Module()) == ["one"]


IMPORTED_WITH = """
import sys, warnings
import torch
torch.__version__ = sys.argv[1]
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    import hsdp
    try:
        hsdp.torch.GradScaler
        import hsdp.torch
    except ImportError as error:
        print(error)
for one in seen:
    print(one.category.__name__, one.filename, one.message)
"""


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("2.9.0", ""),
        ("2.15.3+cu130", ""),
        ("2.16.0a0+git1234", "RuntimeWarning <string> hsdp.torch: expected torch 2.9 to 2.15, which"),
        ("3.0.0", "RuntimeWarning <string> hsdp.torch: expected torch 2.9 to 2.15, which"),
        ("2.8.1", "hsdp.torch: expected torch 2.9 or later, got 2.8.1; install one with pip install 'torch>=2.9'"),
    ],
)
def test_a_torch_that_no_test_has_seen(version: str, said: str) -> None:
    # private_torch.check_release
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED_WITH, version], capture_output=True, text=True, timeout=60, check=True
    )
    lines = done.stdout.splitlines()
    assert len(lines) == bool(said) and done.stdout.startswith(said), done.stdout
