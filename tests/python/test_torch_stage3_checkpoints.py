"""Checkpoints of stage 3: between stages, meshes and FSDP2, and whole state dicts."""

from __future__ import annotations

import copy
import io
import itertools
import pathlib
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import Launcher, on_mesh, on_ranks
from fsdp2_model import start_torch
from same_tensors import require_same, states_of
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hsdp
from hsdp.torch.flat_slice import FlatSlice
from hsdp.zero import ShardedOptimizer

DTYPES = ("float32", "bfloat16")
OVERS = ("shard", "mesh")


class Net(nn.Module):
    """Layers of odd sizes, one of them frozen, with tied weights and a buffer."""

    def __init__(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 13), nn.Linear(13, 6)])
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.ones(2))
        self.to(dtype)

    def forward(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x + self.frozen(x))


class Run:
    """Trains a model with one stage."""

    def __init__(
        self, mesh: hsdp.Mesh, stage: int, dtype_name: str, seed: int = 0, over: Any = "shard"
    ) -> None:
        self.mesh = mesh
        self.model = Net(getattr(torch, dtype_name), seed)
        self.reducer = hsdp.Reducer(mesh, bucket_bytes=256)
        self.reducer.attach(self.model)
        options: Any = {"persistence_threshold": 8} if stage == 3 else {}
        self.optimizer = ShardedOptimizer(
            torch.optim.AdamW, self.model, self.reducer, stage=stage, shard_over=over, lr=0.02, **options
        )

    def step(self, number: int) -> None:
        # The gradients are the same on every rank and mesh.
        tokens = torch.randint(0, 11, (2, 4), generator=torch.Generator().manual_seed(number))
        with self.reducer.microbatch(last=True):
            nn.functional.cross_entropy(self.model(tokens).float().flatten(0, 1),
                                        tokens.flatten()).backward()
        self.optimizer.step()

    def save(self, folder: str) -> None:
        dcp.save(self.state(), checkpoint_id=folder)

    def state(self) -> dict[str, Any]:
        return {
            "model": get_model_state_dict(self.model),
            "optim": get_optimizer_state_dict(self.model, self.optimizer),
        }

    def load(self, folder: str, optimizer_first: bool = False) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        set_optimizer = lambda: set_optimizer_state_dict(  # noqa: E731
            self.model, self.optimizer, optim_state_dict=state["optim"]
        )
        if optimizer_first:
            set_optimizer()
        set_model_state_dict(self.model, state["model"])
        if not optimizer_first:
            set_optimizer()

    def everything(self) -> dict[str, torch.Tensor]:
        result = {**self.optimizer.full_model_state_dict(self.model), **states_of(self.optimizer)}
        return {key: value.detach().float().clone() for key, value in result.items()}

    def close(self) -> None:
        self.optimizer.close()
        self.reducer.close()


def save_all(folder: str, replicate: int, shard: int, over: Any) -> None:
    start_torch(folder)
    with hsdp.init_mesh(replicate, shard) as mesh:
        for dtype in DTYPES:
            for stage in (2, 3):
                run = Run(mesh, stage, dtype, over=over)
                run.step(0)
                run.step(1)
                path = f"{folder}/{over}_{stage}_{dtype}"
                run.save(path)
                before = run.everything()
                run.step(2)
                after = run.everything()
                if mesh.rank == 0:
                    require_each_element_once(path)
                    torch.save([before, after], f"{path}.pt")
                run.close()


def require_each_element_once(path: str) -> None:
    metadata = dcp.FileSystemReader(path).read_metadata()
    for key, one in metadata.state_dict_metadata.items():
        if isinstance(one, TensorStorageMetadata):
            assert sum(chunk.sizes.numel() for chunk in one.chunks) == one.size.numel(), key


def load_all(folder: str, replicate: int, shard: int, over: Any) -> None:
    start_torch(folder)
    with hsdp.init_mesh(replicate, shard) as mesh:
        for dtype, stage, saved, saved_over in itertools.product(DTYPES, (1, 3), (2, 3), OVERS):
            run = Run(mesh, stage, dtype, seed=3, over=over)
            if saved == 2:
                run.step(7)
            path = f"{folder}/{saved_over}_{saved}_{dtype}"
            run.load(path, optimizer_first=stage == saved)
            before, after = torch.load(f"{path}.pt")
            require_same(run.everything(), before)
            if shard == 2:  # a mean of equal gradients has their bits
                run.step(2)
                require_same(run.everything(), after)
            run.close()


def test_checkpoints_cross_between_stages_and_meshes(ranks: Launcher, tmp_path: pathlib.Path) -> None:
    ranks(2, save_all, str(tmp_path), 1, 2, "shard")
    ranks(4, save_all, str(tmp_path), 2, 2, "mesh")
    ranks(3, load_all, str(tmp_path), 1, 3, "shard")
    ranks(3, load_all, str(tmp_path), 3, 1, "mesh")
    for over in OVERS:
        ranks(4, load_all, str(tmp_path), 2, 2, over)


@on_ranks(2)
def test_checkpoints_cross_to_fsdp2_and_back(tmp_path: str) -> None:
    start_torch(tmp_path)
    torch_mesh = init_device_mesh("cpu", (2,))

    def sharded(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Net(seed=seed)
        for layer in model.layers:
            fully_shard(layer, mesh=torch_mesh)
        fully_shard(model, mesh=torch_mesh)
        named = [each for each in model.named_parameters() if each[1].requires_grad]
        return model, torch.optim.AdamW(named, lr=0.02)

    whole = StateDictOptions(full_state_dict=True)
    theirs, their_optimizer = sharded(0)
    for seed in range(2):
        tokens = torch.randint(0, 11, (2, 4), generator=torch.Generator().manual_seed(seed))
        nn.functional.cross_entropy(theirs(tokens).flatten(0, 1), tokens.flatten()).backward()
        their_optimizer.step()
        their_optimizer.zero_grad()
    state = {
        "model": get_model_state_dict(theirs),
        "optim": get_optimizer_state_dict(theirs, their_optimizer),
    }
    dcp.save(state, checkpoint_id=f"{tmp_path}/fsdp2")
    want = get_model_state_dict(theirs, options=whole)
    want_states = get_optimizer_state_dict(theirs, their_optimizer, options=whole)["state"]

    for over, shape in (("shard", (1, 2)), ("mesh", (2, 1))):
        with hsdp.init_mesh(*shape) as mesh:
            run = Run(mesh, 3, "float32", seed=5, over=over)
            run.load(f"{tmp_path}/fsdp2")
            got = run.optimizer.full_model_state_dict(run.model)
            assert got.keys() >= set(want)
            for key, value in want.items() if mesh.rank == 0 else ():
                assert torch.equal(got[key], value), key
            states = run.optimizer.full_state_dict()["state"]
            names = [n for n, p in run.model.named_parameters() if p.requires_grad]
            for number, name in enumerate(names) if mesh.rank == 0 else ():
                for key, value in want_states[name].items():
                    assert torch.equal(states[number][key], value), (name, key)

            run.step(2)
            run.save(f"{tmp_path}/{over}")
            ours = run.optimizer.full_model_state_dict(run.model)
            back, back_optimizer = sharded(9)
            state = {
                "model": get_model_state_dict(back),
                "optim": get_optimizer_state_dict(back, back_optimizer),
            }
            dcp.load(state, checkpoint_id=f"{tmp_path}/{over}")
            set_model_state_dict(back, state["model"])
            set_optimizer_state_dict(back, back_optimizer, optim_state_dict=state["optim"])
            got = get_model_state_dict(back, options=whole)
            for key, value in got.items():
                assert torch.equal(value, ours[key]), key
            run.close()


@on_mesh(1, 2)
def test_whole_state_dicts(mesh: hsdp.Mesh) -> None:
    for dtype in DTYPES:
        run = Run(mesh, 3, dtype)
        run.step(0)
        whole = run.optimizer.full_model_state_dict(run.model)
        assert list(whole) == list(Net().state_dict())
        assert whole["head.weight"] is whole["embed.weight"], "saved once"
        Net(getattr(torch, dtype)).load_state_dict(whole)
        other = Run(mesh, 3, dtype, seed=2)
        other.model.load_state_dict(copy.deepcopy(whole))
        got = other.optimizer.full_model_state_dict(other.model)
        require_same(got, whole)
        # Its own state, through a file.
        sliced = run.model.state_dict()
        assert isinstance(sliced["layers.0.weight"], FlatSlice)
        assert isinstance(sliced["frozen.weight"], FlatSlice)
        assert sliced["layers.1.bias"].shape == (6,)
        file = io.BytesIO()
        torch.save(sliced, file)
        file.seek(0)
        other = Run(mesh, 3, dtype, seed=4)
        other.model.load_state_dict(torch.load(file, weights_only=True))
        require_same(other.optimizer.full_model_state_dict(other.model), whole)
        # State that does not fit.
        wrong = {**whole, "layers.0.weight": torch.zeros(3, 3)}
        with pytest.raises(RuntimeError, match="size mismatch for layers.0.weight"):
            other.model.load_state_dict(wrong)
        shifted = FlatSlice(torch.zeros(3), (13, 6), 1)
        with pytest.raises(RuntimeError, match="elements from 1, 3 of them"):
            other.model.load_state_dict({**whole, "layers.0.weight": shifted})
        run.close()
        other.close()
