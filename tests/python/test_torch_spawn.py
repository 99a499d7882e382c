"""torch.distributed knows the ranks, and the launcher's variables describe them incompletely."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable
from typing import Any

import hsdp
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import Job, Launcher, free_port, on_ranks
from hsdp.torch.launch import distributed_launch, store_rendezvous

ADDRESS = ("MASTER_ADDR", "MASTER_PORT")
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "HSDP_JOB", "HSDP_ADDR", "HSDP_PORT",
            "HSDP_SECRET", "HSDP_TRUST_STORE")
# The variables that Lightning's launcher sets beside the address.
LIGHTNING = {"WORLD_SIZE": "{size}", "LOCAL_RANK": "{rank}", "NODE_RANK": "0"}
NO_LOCAL_SIZE = {"RANK": "{rank}", "WORLD_SIZE": "{size}"}
WHOLE = {**NO_LOCAL_SIZE, "LOCAL_RANK": "{rank}", "LOCAL_WORLD_SIZE": "{size}"}


def rank_of(
    rank: int, size: int, function: Callable[..., None], method: str, *arguments: Any
) -> None:
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=size)
    before = dict(os.environ)
    function(rank, size, *arguments)
    assert dict(os.environ) == before
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def forget_the_launcher() -> int:
    """The rank that torch.distributed gave."""
    rank = int(os.environ["RANK"])
    for name in LAUNCHED:
        os.environ.pop(name, None)
    return rank


def forked(size: int, function: Callable[..., None], method: str, *arguments: Any) -> None:
    rank = forget_the_launcher()
    if method != "env://":
        for variable in ADDRESS:
            del os.environ[variable]
    rank_of(rank, size, function, method, *arguments)


def forked_by_name(size: int, name: str, method: str, *arguments: Any) -> None:
    forked(size, globals()[name], method, *arguments)


def on_ranks_of_torch(size: int) -> Callable[[Callable[[int, int], None]], Callable[..., None]]:
    """Turns a function into a test on ranks that find each other through a file."""

    def decorate(function: Callable[[int, int], None]) -> Callable[..., None]:
        def test(tmp_path: str) -> None:
            forked(size, function, f"file://{tmp_path}/store")

        test.__name__ = function.__name__
        return on_ranks(size)(test)

    return decorate


class Spawn:
    """Starts functions on ranks as mp.spawn does, but in forks."""

    def __init__(self, ranks: Launcher) -> None:
        self.ranks = ranks

    def start(self, size: int, function: Callable[..., Any], method: str, *arguments: Any) -> Job:
        return self.ranks.start(size, forked_by_name, size, function.__name__, method, *arguments)

    def __call__(self, *arguments: Any) -> None:
        self.start(*arguments).wait()


@pytest.fixture
def spawn(ranks: Launcher) -> Spawn:
    return Spawn(ranks)


def launched(rank: int, size: int, variables: dict[str, str]) -> None:
    os.environ.update({k: v.format(rank=rank, size=size) for k, v in variables.items()})


@pytest.fixture
def store(tmp_path: pathlib.Path) -> str:
    return f"file://{tmp_path}/store"


def check_sum(mesh: hsdp.Mesh) -> None:
    """Integer gradients, two microbatches: the sum over microbatches and ranks, divided by the number of
    ranks."""
    torch.manual_seed(0)  # the same weights on every rank
    model = torch.nn.Linear(3, 5, bias=False)
    with hsdp.Reducer(mesh) as reducer:
        reducer.attach(model)
        for m in range(2):
            with reducer.microbatch(last=m == 1):
                model(torch.full((1, 3), float(mesh.size * (mesh.rank + m)))).sum().backward()
        reducer.gather_gradients()
    expected = sum(rank + m for rank in range(mesh.size) for m in range(2))
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, torch.full((5, 3), float(expected)))


def reduces_right(rank: int, size: int, variables: dict[str, str]) -> None:
    launched(rank, size, variables)
    before = dict(os.environ)
    assert hsdp.job_size() == size
    with hsdp.init_mesh(replicate=size // 2, shard=2) as mesh:
        assert (mesh.size, mesh.rank) == (size, rank)
        check_sum(mesh)
        with hsdp.init_mesh(replicate=size, shard=1) as second:
            assert (second.replicate_size, second.rank) == (size, rank)
            check_sum(second)
    with hsdp.init_mesh(shard=size) as again:
        check_sum(again)
    assert dict(os.environ) == before
    for name in variables:
        del os.environ[name]


@pytest.mark.parametrize(
    ("size", "method"), [(2, "file://{folder}/store"), (4, "tcp://127.0.0.1:{port}"), (2, "env://")]
)
def test_gradients_are_reduced_right(
    spawn: Spawn, size: int, method: str, tmp_path: pathlib.Path
) -> None:
    method = method.format(folder=tmp_path, port=free_port())
    spawn(size, reduces_right, method, {})


def test_processes_of_torch(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*LAUNCHED, *ADDRESS):
        monkeypatch.delenv(name, raising=False)
    mp.spawn(rank_of, (2, reduces_right, store, {}), nprocs=2)


@pytest.mark.parametrize("variables", [LIGHTNING, NO_LOCAL_SIZE, WHOLE])
def test_some_variables_are_set(spawn: Spawn, variables: dict[str, str], store: str) -> None:
    spawn(2, reduces_right, store, variables)


@on_ranks_of_torch(2)
def test_only_one_rank_has_variables(rank: int, size: int) -> None:
    reduces_right(rank, size, WHOLE if rank == 1 else {})


def other_job(rank: int, size: int, number: int) -> None:
    for _ in range(3):
        with hsdp.init_mesh(shard=size) as mesh:
            assert [int(word) for word in mesh.world._handle.exchange(str(number), "test")] == [number] * 2
            x = np.full(7, number, np.float32)
            mesh.world.all_reduce(x)
            assert (x == 2 * number).all()


def test_two_jobs_at_once_do_not_meet(spawn: Spawn, tmp_path: pathlib.Path) -> None:
    jobs = [spawn.start(2, other_job, f"file://{tmp_path}/{n}", n) for n in (3, 5)]
    for job in jobs:
        job.wait()


@on_ranks_of_torch(4)
def test_sub_groups(rank: int, size: int) -> None:
    table = [[2, 0]] if rank % 2 == 0 else [[1], [3]]
    with hsdp.init_mesh(len(table), len(table[0]), ranks=table) as mesh:
        assert mesh.world.ranks[mesh.rank] == rank
        check_sum(mesh)
    with hsdp.init_mesh(ranks=[[rank]]) as alone:
        assert alone.size == 1


@on_ranks_of_torch(4)
def test_a_device_mesh(rank: int, size: int) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2))
    reducer, again = hsdp.Reducer(mesh), hsdp.Reducer(mesh)
    assert again.mesh is reducer.mesh
    assert (reducer.mesh.replica, reducer.mesh.shard_rank) == divmod(rank, 2)
    check_sum(reducer.mesh)
    again.close()
    reducer.close()
    reducer.mesh.close()


@on_ranks_of_torch(2)
def test_sizes_that_do_not_fit(rank: int, size: int) -> None:
    with pytest.raises(hsdp.UsageError, match=r"1 x 1.*torch\.distributed.*rank . of 2"):
        hsdp.init_mesh()
    with pytest.raises(hsdp.UsageError, match="timeout_s"):
        hsdp.init_mesh(shard=2, timeout_s=float("nan"))
    with hsdp.init_mesh(shard=2) as mesh:
        check_sum(mesh)


@on_ranks_of_torch(2)
def test_variables_that_contradict_torch(rank: int, size: int) -> None:
    launched(rank, size, {**WHOLE, "WORLD_SIZE": "4"})
    for call in (hsdp.init_mesh, hsdp.job_size):
        with pytest.raises(hsdp.UsageError, match=rf"rank {rank} of 4.*rank {rank} of 2"):
            call()
    launched(1 - rank, size, WHOLE)
    with pytest.raises(hsdp.UsageError, match=rf"rank {1 - rank} of 2.*rank {rank} of 2"):
        hsdp.init_mesh(shard=2)
    launched(rank, size, WHOLE)
    if rank == 0:
        with pytest.raises(hsdp.MismatchError, match="rank 1 of 2: .*rank 0 of 1") as caught:
            hsdp.init_mesh(shard=2)
        assert caught.value.ranks == (1,)
    else:
        launched(0, 1, WHOLE)
        with pytest.raises(hsdp.UsageError, match="rank 0 of 1.*rank 1 of 2"):
            hsdp.init_mesh(shard=2)
    launched(rank, size, WHOLE)
    with hsdp.init_mesh(shard=2) as mesh:
        check_sum(mesh)
    for name in WHOLE:
        del os.environ[name]


@on_ranks_of_torch(2)
def test_a_rank_that_stays_away_is_named(rank: int, size: int) -> None:
    if rank == 0:
        with pytest.raises(hsdp.TimeoutError, match="rank 1 of 2") as caught:
            hsdp.init_mesh(shard=2, timeout_s=1.0)
        assert caught.value.ranks == (1,)
    dist.barrier()
    with hsdp.init_mesh(shard=2) as mesh:
        check_sum(mesh)


def new_groups(rank: int, size: int, folder: str) -> None:
    with hsdp.init_mesh(shard=2) as mesh:
        check_sum(mesh)
    dist.destroy_process_group()
    # One store for two groups, in which the ranks are in a different order.
    keeper = dist.FileStore(f"{folder}/kept", 2)
    for place in (1 - rank, rank):
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(str(place == rank), keeper), rank=place, world_size=2
        )
        with hsdp.init_mesh(shard=2) as mesh:
            assert mesh.rank == place
            check_sum(mesh)
        dist.destroy_process_group()
    for turn in range(20):
        words = distributed_launch._agree(keeper, rank, 2, {"mine": [rank, turn]}, 30.0).words
        assert [word["mine"] for word in words] == [[0, turn], [1, turn]]


def test_a_new_process_group(spawn: Spawn, store: str, tmp_path: pathlib.Path) -> None:
    spawn(2, new_groups, store, str(tmp_path))


def hosts(rank: int, size: int, secret: dict[str, str], address: dict[str, str]) -> None:
    """As if each rank were alone on its host."""
    distributed_launch._host_identity = lambda: f"host {rank}"
    launched(rank, size, {**secret, **(address if rank == 0 else {})})
    before = dict(os.environ)
    if not secret:
        with pytest.raises(hsdp.UsageError, match="set HSDP_SECRET"):
            hsdp.init_mesh(shard=2)
        return
    for _ in range(2):
        with hsdp.init_mesh(shard=2) as mesh:
            check_sum(mesh)
    assert dict(os.environ) == before
    for name in {**secret, **address}:
        os.environ.pop(name, None)


@pytest.mark.parametrize("secret", [{"HSDP_SECRET": "s"}, {"HSDP_TRUST_STORE": "1"}, {}])
def test_several_hosts(spawn: Spawn, secret: dict[str, str]) -> None:
    spawn(2, hosts, f"tcp://127.0.0.1:{free_port()}", secret, {})


def test_several_hosts_and_an_address_of_rank_0(spawn: Spawn, store: str) -> None:
    address = {"HSDP_ADDR": "127.0.0.1", "HSDP_PORT": str(free_port())}
    spawn(2, hosts, store, {"HSDP_SECRET": "s"}, address)


@on_ranks_of_torch(2)
def test_several_hosts_that_only_share_a_file(rank: int, size: int) -> None:
    distributed_launch._host_identity = lambda: f"host {rank}"
    store_rendezvous._named_address = lambda: ""
    with pytest.raises(hsdp.UsageError, match="set HSDP_ADDR and HSDP_PORT"):
        hsdp.init_mesh(shard=2)


def too_early(method: str) -> None:
    rank = forget_the_launcher()
    mesh = hsdp.init_mesh(hsdp.job_size())
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=2)
    model = torch.nn.Linear(2, 1)
    reducer = hsdp.Reducer(mesh)
    reducer.attach(model)
    with pytest.raises(hsdp.UsageError, match="this process alone.*torch.distributed has 2; make it after"):
        reducer.begin_microbatch()
    reducer.close()
    dist.barrier()
    dist.destroy_process_group()


def test_a_mesh_from_before_torch_knew_the_ranks(ranks: Launcher, store: str) -> None:
    ranks(2, too_early, store)


@on_ranks_of_torch(2)
def test_a_mesh_of_one_rank_of_several(rank: int, size: int) -> None:
    with hsdp.init_mesh(1, 1, ranks=[[rank]]) as mesh, hsdp.Reducer(mesh) as reducer:
        model = torch.nn.Linear(2, 1)
        reducer.attach(model)
        with reducer.microbatch(last=True):
            model(torch.ones(1, 2)).sum().backward()
