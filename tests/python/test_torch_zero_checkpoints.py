"""ShardedOptimizer with torch.distributed.checkpoint: from any mesh to any other, and to torch's
optimizers."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import hashlib
import io
import math
import pathlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from conftest import Launcher, on_mesh, on_meshes
from exact_gradients import assign, assign_mean
from fsdp2_model import start_torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from one_rank import attached_to, mesh, message_of
from same_tensors import same

import hsdp
from hsdp.torch.flat_slice import FlatSlice, boxes_of
from hsdp.zero import ShardedOptimizer

STEPS = 3
UNUSED = ("unused",)


@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 4), (4, 1, 3), (2, 3, 4), (2, 2, 2, 3)])
def test_boxes_are_the_elements_in_their_order(shape: tuple[int, ...]) -> None:
    whole = torch.arange(math.prod(shape)).reshape(shape)
    for begin in range(whole.numel() + 1):
        for end in range(begin, whole.numel() + 1):
            boxes = boxes_of(shape, begin, end)
            assert len(boxes) <= max(2 * len(shape) - 1, 1)
            parts = []
            for offsets, sizes in boxes:
                part = whole
                for d, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
                    part = part.narrow(d, offset, size)
                parts.append(part.reshape(-1))
            assert torch.equal(torch.cat(parts) if parts else whole.new_empty(0),
                               whole.reshape(-1)[begin:end])


def test_a_slice_is_copied_and_pickled() -> None:
    whole = FlatSlice(torch.arange(5.0), (3, 4), 2)
    assert whole.shape == (3, 4) and whole.offset == 2
    file = io.BytesIO()
    torch.save({"w": whole}, file)
    file.seek(0)
    for other in (copy.deepcopy(whole), whole.clone(), whole.detach(), whole.to(torch.float32),
                  torch.load(file)["w"]):
        assert isinstance(other, FlatSlice)
        assert (other.shape, other.offset) == ((3, 4), 2)
        assert torch.equal(other.to_local(), whole.to_local())
    assert whole.to(torch.bfloat16).to_local().dtype is torch.bfloat16
    other = whole.clone()
    other.to_local().zero_()
    assert torch.equal(whole.to_local(), torch.arange(5.0))
    whole.copy_(other)
    assert torch.equal(whole.to_local(), torch.zeros(5))
    assert "5 elements from 2 of (3, 4)" in repr(whole)
    for call in (lambda: whole + 1, lambda: whole.sum(), lambda: torch.zeros(3, 4).copy_(whole),
                 lambda: whole.copy_(FlatSlice(torch.zeros(5), (3, 4), 3)), lambda: whole[0],
                 lambda: whole.new_empty(3)):
        with pytest.raises(hsdp.UsageError, match="to_local"):
            call()


def test_ranks_without_a_process_group_do_not_overwrite_each_other() -> None:
    with pytest.raises(hsdp.UsageError, match="'w'.*init_process_group"):
        FlatSlice(torch.zeros(3), torch.Size([2, 3]), 3).__create_write_items__("w", None)
    whole = FlatSlice(torch.zeros(6), torch.Size([2, 3]), 0)
    assert len(whole.__create_write_items__("w", None)) == 1


class Model(nn.Module):
    """With a frozen parameter, an unused one, a scalar, one of two strides, and an empty one."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(5, 9)
        self.second = nn.Linear(9, 3)
        self.frozen = nn.Parameter(torch.randn(4, 2), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(3, 2))
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.wide = nn.Parameter(torch.randn(6, 5).t())
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.to(dtype)

    def values(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.parameters()]


def groups(model: Model) -> list[dict[str, Any]]:
    named = dict(model.named_parameters())
    return [
        {"params": [p for n, p in named.items() if "bias" not in n], "weight_decay": 0.1},
        {"params": [p for n, p in named.items() if "bias" in n]},
    ]


class Run:
    """A model in training."""

    def __init__(self, mesh: hsdp.Mesh, dtype: str, lr: float = 0.5, **options: Any) -> None:
        self.mesh = mesh
        self.model = Model(getattr(torch, dtype))
        self.reducer = hsdp.Reducer(mesh, missing="zero", bucket_bytes=128)
        self.reducer.attach(self.model)
        cls = options.pop("cls", torch.optim.AdamW)
        self.optimizer = ShardedOptimizer(cls, groups(self.model), self.reducer, lr=lr, **options)

    def step(self, seed: int, size: int) -> None:
        """A step as `size` ranks would do it together; exact, so it is the same on every mesh."""
        with self.reducer.microbatch(last=True):
            if size == self.mesh.size:
                assign(self.model, seed, self.mesh.rank, UNUSED)
            else:
                assign_mean(self.model, seed, size, UNUSED)
        self.optimizer.step()

    def load(self, folder: str) -> None:
        weights, state = get_state_dict(self.model, self.optimizer)
        state_dict = {"model": weights, "optim": state}
        dcp.load(state_dict, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=state_dict["model"],
                       optim_state_dict=state_dict["optim"])

    def save(self, folder: str) -> None:
        weights, state = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": weights, "optim": state}, checkpoint_id=folder)


def hash_of(tensors: list[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() if t.dim()
                                   else str(t).encode() for t in tensors)).hexdigest()


DTYPES = ("float32", "bfloat16", "complex64")


def run_save(folder: str) -> list[str]:
    hashes = []
    with hsdp.init_mesh(2, 2) as mesh:
        start_torch(folder)
        for dtype in DTYPES:
            run = Run(mesh, dtype, lr=0.01)
            for seed in range(STEPS):
                run.step(seed, 4)
            run.save(f"{folder}/{dtype}")
            full = run.optimizer.full_state_dict()
            if mesh.rank == 0:
                torch.save(full, f"{folder}/{dtype}.full.pt")
            run.step(STEPS, 4)
            hashes.append(hash_of(run.model.values()))
            run.reducer.close()
        dist.destroy_process_group()
    return hashes


@pytest.fixture(scope="module")
def saved(module_ranks: Launcher) -> tuple[str, list[str]]:
    """The folder that a 2 x 2 mesh saved, and hashes of what that mesh made of it."""
    folder = str(module_ranks.folder)
    hashes = module_ranks(4, run_save, folder)
    assert hashes == [hashes[0]] * 4
    return folder, hashes[0]


@on_meshes((1, 4), (4, 1), (1, 1))
def test_every_mesh_continues_to_the_bit(mesh: hsdp.Mesh, saved: tuple[str, list[str]]) -> None:
    folder, wanted = saved
    start_torch(folder)
    for dtype, hashed in zip(DTYPES, wanted, strict=True):
        run = Run(mesh, dtype)
        run.load(f"{folder}/{dtype}")
        assert run.optimizer.param_groups[0]["lr"] == 0.01
        full = torch.load(f"{folder}/{dtype}.full.pt")
        assert same(run.optimizer.full_state_dict()["state"], full["state"])
        run.step(STEPS, 4)
        assert hash_of(run.model.values()) == hashed
        run.reducer.close()
    dist.destroy_process_group()


def run_plain(folder: str) -> None:
    """Into torch's AdamW, one step further, and back."""
    model = Model(torch.float32)
    optimizer = torch.optim.AdamW(groups(model), lr=0.5)
    weights, state = get_state_dict(model, optimizer)
    state_dict = {"model": weights, "optim": state}
    dcp.load(state_dict, checkpoint_id=f"{folder}/float32", no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=state_dict["model"],
                   optim_state_dict=state_dict["optim"])
    full = torch.load(f"{folder}/float32.full.pt")
    for number, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            assert torch.equal(value, full["state"][number][key]), (number, key)
    assign_mean(model, STEPS, 4, UNUSED)
    optimizer.step()
    optimizer.zero_grad()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=f"{folder}/plain", no_dist=True)
    assign_mean(model, STEPS + 1, 4, UNUSED)
    optimizer.step()
    torch.save(model.values(), f"{folder}/plain.pt")


def run_back(folder: str) -> None:
    with hsdp.init_mesh(2, 2) as mesh:
        start_torch(folder)
        run = Run(mesh, "float32")
        run.load(f"{folder}/plain")
        run.step(STEPS + 1, 4)
        dist.destroy_process_group()
        for p, q in zip(run.model.values(), torch.load(f"{folder}/plain.pt"), strict=True):
            assert torch.allclose(p, q, rtol=0.0, atol=1e-6)


def test_into_the_unsharded_optimizer_and_back(
    ranks: Launcher, saved: tuple[str, list[str]]
) -> None:
    run_plain(saved[0])
    ranks(4, run_back, saved[0])


@on_mesh(1, 2)
def test_load_targets_are_local_and_forgotten(mesh: hsdp.Mesh) -> None:
    """If one rank alone asks for load targets, the training afterwards is unchanged."""
    for name, dtype in (("AdamW", "float32"), ("AdamW", "bfloat16"), ("NAdam", "float32"),
                        ("Adagrad", "bfloat16"), ("ASGD", "float32")):
        hashes = []
        for asks in (False, True):
            run = Run(mesh, dtype, lr=0.01, cls=getattr(torch.optim, name))
            if asks and mesh.rank == 0:
                state = get_optimizer_state_dict(run.model, run.optimizer)["state"]
                assert set(state) == {n for n, p in run.model.named_parameters()
                                      if p.requires_grad}
                assert run.optimizer.param_groups[0]["lr"] == 0.01
                assert run.optimizer.state
            for seed in range(3):
                run.step(seed, 2)
            states = run.optimizer.full_state_dict()["state"].values()
            hashes.append(hash_of(run.model.values() + [
                value for state in states for value in state.values()
                if isinstance(value, torch.Tensor)
            ]))
            run.reducer.close()
        others = mesh.world._handle.exchange("".join(hashes), "test")
        assert others == [2 * hashes[0]] * 2, (name, dtype)


@on_mesh(1, 2)
def test_a_checkpoint_of_the_start(mesh: hsdp.Mesh, tmp_path: str) -> None:
    """A training saved before its first step begins like any other."""
    start_torch(tmp_path)
    for name, dtype in (("AdamW", "float32"), ("AdamW", "bfloat16"), ("NAdam", "float32"),
                        ("ASGD", "float32")):
        cls = getattr(torch.optim, name)
        run = Run(mesh, dtype, lr=0.01, cls=cls)
        run.save(f"{tmp_path}/start_{name}_{dtype}")
        hashes = []
        for resumed in (False, True):
            if resumed:
                run.reducer.close()
                run = Run(mesh, dtype, cls=cls)
                run.load(f"{tmp_path}/start_{name}_{dtype}")
            for seed in range(2):
                run.step(seed, 2)
            hashes.append(hash_of(run.model.values()))
        assert hashes[0] == hashes[1], (name, dtype)
        run.reducer.close()
    dist.destroy_process_group()


@on_mesh(1, 2)
def test_flattened_async_and_whole(mesh: hsdp.Mesh, tmp_path: str) -> None:
    """Flattened, saved without the training's knowledge, and as a whole."""
    start_torch(tmp_path)
    for dtype in DTYPES:
        run = Run(mesh, dtype, lr=0.01)
        for seed in range(STEPS):
            run.step(seed, 2)
        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        weights, state = get_state_dict(run.model, run.optimizer, options=flat)
        dcp.save({"model": weights, "optim": state}, checkpoint_id=f"{tmp_path}/flat_{dtype}")
        weights, state = get_state_dict(run.model, run.optimizer)
        saving: Any = dcp.async_save({"model": weights, "optim": state},
                                     checkpoint_id=f"{tmp_path}/async_{dtype}")
        whole = run.optimizer.full_state_dict()
        names = [n for g in groups(run.model) for p in g["params"]
                 for n, q in run.model.named_parameters() if q is p]
        whole["state"] = {names[i]: s for i, s in whole["state"].items()}
        for group in whole["param_groups"]:
            group["params"] = [names[i] for i in group["params"]]
        weights = copy.deepcopy(run.model.state_dict())
        run.step(STEPS, 2)  # while the save is under way
        wanted = hash_of(run.model.values())
        saving.result()
        run.reducer.close()

        run = Run(mesh, dtype)
        run.load(f"{tmp_path}/async_{dtype}")
        run.step(STEPS, 2)
        assert hash_of(run.model.values()) == wanted, "async"
        run.reducer.close()

        for fresh in (True, False):
            run = Run(mesh, dtype)
            if not fresh:
                run.step(7, 2)
            loaded, state = get_state_dict(run.model, run.optimizer, options=flat)
            state_dict = {"model": loaded, "optim": state}
            dcp.load(state_dict, checkpoint_id=f"{tmp_path}/flat_{dtype}")
            set_state_dict(run.model, run.optimizer, model_state_dict=state_dict["model"],
                           optim_state_dict=state_dict["optim"], options=flat)
            run.step(STEPS, 2)
            assert hash_of(run.model.values()) == wanted, ("flat", fresh)
            run.reducer.close()

        for from_first in (False, True):
            run = Run(mesh, dtype)
            run.model.load_state_dict(weights)
            set_optimizer_state_dict(
                run.model, run.optimizer, whole if mesh.rank == 0 or not from_first else {},
                options=StateDictOptions(full_state_dict=True,
                                         broadcast_from_rank0=from_first),
            )
            run.step(STEPS, 2)
            assert hash_of(run.model.values()) == wanted, ("whole", from_first)
            run.reducer.close()
    dist.destroy_process_group()


@on_mesh(1, 2)
def test_checkpoints_that_do_not_fit(mesh: hsdp.Mesh, tmp_path: str) -> None:
    """A state that does not fit is refused, and the training continues as if nothing had happened."""
    start_torch(tmp_path)
    run = Run(mesh, "bfloat16", lr=0.01)
    run.step(0, 2)
    wanted = hash_of(run.model.values())
    state: Any = get_optimizer_state_dict(run.model, run.optimizer)
    dcp.save({"optim": state}, checkpoint_id=f"{tmp_path}/truncated")
    del state["state"]["first.bias"]["exp_avg_sq"]
    dcp.save({"optim": state}, checkpoint_id=f"{tmp_path}/lacks")
    if mesh.rank == 0:
        for file in pathlib.Path(f"{tmp_path}/truncated").glob("*.distcp"):
            with file.open("r+b") as opened:
                opened.truncate(file.stat().st_size // 2)
    dist.barrier()
    run.reducer.close()

    run = Run(mesh, "bfloat16", lr=0.01)
    for name, text in (("lacks", "optim.state.first.bias.exp_avg_sq"),
                       ("truncated", "CheckpointException")):
        with pytest.raises(BaseException) as error:  # its CheckpointException is not an Exception
            state = get_optimizer_state_dict(run.model, run.optimizer)
            dcp.load({"optim": state}, checkpoint_id=f"{tmp_path}/{name}")
        assert text in f"{type(error.value).__name__} {error.value}"
    other = nn.Linear(4, 4)
    reducer = attached_to(other, mesh)
    small = ShardedOptimizer(torch.optim.AdamW, other, reducer)
    with pytest.raises(hsdp.UsageError, match=r"parameter groups of \[2\], got \[7, 2\]"):
        small.load_state_dict(run.optimizer.state_dict())
    assert not small.state
    run.step(0, 2)
    assert hash_of(run.model.values()) == wanted
    dist.destroy_process_group()


class Late(torch.optim.SGD):
    """Has a state that appears late."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for p in self.param_groups[0]["params"]:
            self.state[p]["calls"] = self.state[p].get("calls", 0) + 1
            if self.state[p]["calls"] == 2:
                self.state[p]["slow"] = p.detach().clone()
        return result


@on_mesh(1, 2)
def test_habits(mesh: hsdp.Mesh, tmp_path: str) -> None:
    """What people do between steps, none of which may lose anything."""
    start_torch(tmp_path)
    run = Run(mesh, "bfloat16", lr=0.01)
    fresh = run.optimizer.state_dict()
    for seed in range(2):
        run.step(seed, 2)

    # Other weights for a while: neither reading nor saving takes them for new ones.
    own = [run.optimizer.master(p).clone() for p in run.optimizer._parameters]
    weights = copy.deepcopy(run.model.state_dict())
    run.model.load_state_dict({k: v * 2 for k, v in weights.items()})
    run.optimizer.full_state_dict()
    with run.optimizer.whole_parameters() as whole:
        assert torch.equal(whole["gain"], weights["gain"].float() * 2)
    run.optimizer.master(run.model.gain)
    run.model.load_state_dict(weights)
    run.optimizer._reread_written()
    for p, master in zip(run.optimizer._parameters, own, strict=True):
        assert torch.equal(run.optimizer.master(p), master)

    # A failed load leaves a training unchanged.
    dcp.save({"optim": get_optimizer_state_dict(run.model, run.optimizer)},
             checkpoint_id=f"{tmp_path}/live")
    dist.barrier()
    if mesh.rank == 0:
        for file in pathlib.Path(f"{tmp_path}/live").glob("*.distcp"):
            with file.open("r+b") as opened:
                opened.truncate(file.stat().st_size // 2)
    dist.barrier()
    run.step(2, 2)
    before = hash_of([v for s in run.optimizer.state.values() for v in s.values()])
    with contextlib.suppress(BaseException):
        dcp.load({"optim": get_optimizer_state_dict(run.model, run.optimizer)},
                 checkpoint_id=f"{tmp_path}/live")
    assert hash_of([v for s in run.optimizer.state.values() for v in s.values()]) == before

    # States that lack something or belong to something else.
    full = run.optimizer.full_state_dict()
    for key, text in (("step", "'step'] of 'second.weight', as of"),
                      ("master", "'master', 'step'] of 'second.weight'")):
        lacks = copy.deepcopy(full)
        del lacks["state"][6][key]
        assert text in message_of(functools.partial(run.optimizer.load_state_dict, lacks))
    for bad, text in ((None, "got NoneType"), ({"state": {}}, "got ['state']")):
        assert text in message_of(functools.partial(run.optimizer.load_state_dict, bad))
    full["state"] = {k: {**s, "step": int(s["step"])} for k, s in full["state"].items()}
    run.optimizer.load_state_dict(full)  # as old versions saved it
    run.step(3, 2)
    run.optimizer.state = collections.defaultdict(dict)
    run.step(4, 2)
    for p, state in run.optimizer.state.items():
        assert float(state["step"]) == (0.0 if p is run.model.unused else 1.0)
    run.optimizer.load_state_dict(fresh)  # starts over
    assert not run.optimizer.state
    if mesh.rank == 0:
        assert get_optimizer_state_dict(run.model, run.optimizer)["state"]
    run.optimizer.full_state_dict()  # even after targets were asked for
    if mesh.rank == 0:
        run.model.first.weight.data = run.model.first.weight.data.clone()
    run.step(5, 2)
    run.reducer.close()

    late = Run(mesh, "float32", lr=0.1, cls=Late)
    for seed in range(3):
        late.step(seed, 2)
    full = late.optimizer.full_state_dict()
    assert full["state"][5]["slow"].shape == late.model.first.weight.shape
    late.optimizer.load_state_dict(full)
    late.step(3, 2)
    late.reducer.close()

    named = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    reducer = attached_to(named, mesh)
    two = [(n, p) for n, p in named.named_parameters() if n.endswith("weight")]
    optimizer = ShardedOptimizer(
        torch.optim.AdamW, [{"params": two, "initial_lr": 0.1, "fused": False}], reducer,
        fused=True, max_grad_norm=1.0,
    )
    with reducer.microbatch(last=True):
        named(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    other = optimizer.full_state_dict()
    other["param_groups"][0]["param_names"] = ["1.weight", "0.weight"]
    text = "the states of '0.weight' in its place, got those of '1.weight'"
    assert text in message_of(lambda: optimizer.load_state_dict(other))
    dist.destroy_process_group()


def test_only_steps_of_zeros_make_targets(mesh: hsdp.Mesh) -> None:
    run = Run(mesh, "float32", lr=0.0)
    with pytest.raises(hsdp.UsageError, match="expected a finished step, got none"):
        run.optimizer.step()
    run.step(0, 1)  # the first step of a warm-up has a learning rate of zero
    assert float(run.optimizer.state[run.model.gain]["step"]) == 1.0
    for p in run.model.parameters():
        p.grad = torch.zeros_like(p)
    with pytest.raises(hsdp.UsageError, match="last=True between"):
        run.optimizer.step()
