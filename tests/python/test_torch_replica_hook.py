"""FSDP2 models with hsdp's hop between replicas, on real ranks over gloo. test_torch_parity.py compares their
gradients with float64."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Launcher
from fsdp2_model import COUNTS, MICROBATCHES, CountedNet, device_mesh, start_torch, two_parts, x_of
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import hsdp

BF16 = torch.bfloat16


def run_parts(model: Any, handle: Any, rank: int, skips: Any, finish: bool = True) -> None:
    for m in range(MICROBATCHES):
        handle.set_requires_all_reduce(m == MICROBATCHES - 1)
        model(x_of(m, rank), skips(m, rank)).sum().backward()
    if finish:
        handle.finish()
        handle.finish()


def check_parts(model: Any, skips: Any, times: int = 1) -> None:
    """Small integers, whose sums are exact."""
    for name, never in [("early", lambda m, r: False), ("late", skips)]:
        used = [(m, r) for m in range(MICROBATCHES) for r in range(4) if not never(m, r)]
        weight = sum(x_of(m, r).sum(0) for m, r in used) * times / 4
        got = getattr(model, name)
        assert torch.equal(got.weight.grad.full_tensor(), weight.expand(5, 3)), name
        assert torch.equal(got.bias.grad.full_tensor(), torch.full((5,), len(used) * times / 2))


def in_the_last(microbatch: int, rank: int) -> bool:
    return microbatch == MICROBATCHES - 1


def on_one_replica_only(microbatch: int, rank: int) -> bool:
    return microbatch != 1 or rank >= 2


def finish_what_did_not_run(folder: str) -> None:
    start_torch(folder)
    shard_mesh = device_mesh(2, 2)["shard"]
    with hsdp.init_mesh(2, 2) as mesh:
        for skips in (in_the_last, on_one_replica_only):
            model = two_parts(shard_mesh)
            handle = hsdp.torch.replica_hook(model, mesh, verify_every=1)
            assert handle.modules == ("'early'", "'late'") and handle.mesh is mesh
            run_parts(model, handle, mesh.rank, skips)
            check_parts(model, skips)
            assert handle.carry_bytes == 0 and handle.all_reduce_count == 2
            run_parts(model, handle, mesh.rank, skips)  # adds to .grad, as backward does
            check_parts(model, skips, times=2)
            handle.close()
        check_what_is_left_over(mesh, shard_mesh)
        check_local_sums(mesh, shard_mesh)
        check_freezing(mesh, shard_mesh)
        check_reentrant_checkpoints(mesh, shard_mesh)
        check_ends_of_backwards(mesh, shard_mesh)
        check_counts(mesh, device_mesh(2, 2))
        check_flags_of_all(mesh, shard_mesh)
        check_sums_of_one_dtype(mesh, device_mesh(2, 2))
    dist.destroy_process_group()


def check_what_is_left_over(mesh: hsdp.Mesh, shard_mesh: Any) -> None:
    model = two_parts(shard_mesh)
    handle = hsdp.torch.replica_hook(model, mesh)
    run_parts(model, handle, mesh.rank, in_the_last, finish=False)
    with pytest.raises(hsdp.UsageError, match="'late'.*handle.finish"):
        handle.set_requires_all_reduce(False)
    with pytest.raises(hsdp.UsageError, match="'late'.*handle.finish"):
        model(x_of(0, 0), True).sum().backward()
    if not hasattr(model, "reset_iter_state"):  # in older releases no FSDPModule can continue after an exception
        return
    model.reset_iter_state()
    handle.discard()
    model.zero_grad()
    run_parts(model, handle, mesh.rank, in_the_last)
    check_parts(model, in_the_last)
    handle.set_requires_all_reduce(False)
    model.early.set_gradient_divide_factor(2)
    model(x_of(0, 0), False).sum().backward()
    model.early.set_gradient_divide_factor(4)
    with pytest.raises(hsdp.UsageError, match="'early'.*divide factor 2.*got 4.*between steps"):
        handle.finish()


def check_local_sums(mesh: hsdp.Mesh, shard_mesh: Any) -> None:
    """FSDP2's no-sync: the hook runs once for all microbatches."""
    model = two_parts(shard_mesh)
    handle = hsdp.torch.replica_hook(model, mesh, hsdp.PlainHop("f16"))
    for m in range(MICROBATCHES):
        model.set_requires_gradient_sync(m == MICROBATCHES - 1)
        handle.set_requires_all_reduce(m == MICROBATCHES - 1)
        model(x_of(m, mesh.rank), False).sum().backward()
    handle.finish()
    check_parts(model, lambda m, rank: False)
    assert handle.all_reduce_count == 2


def check_freezing(mesh: hsdp.Mesh, shard_mesh: Any) -> None:
    """Parameters that are frozen and unfrozen between two steps."""

    def never(microbatch: int, rank: int) -> bool:
        return False

    model = two_parts(shard_mesh)
    handle = hsdp.torch.replica_hook(model, mesh, verify_every=1)
    run_parts(model, handle, mesh.rank, never)
    for part in (model.early, model.late):
        for free in (False, True):
            part.weight.requires_grad_(free)
            model.zero_grad()
            run_parts(model, handle, mesh.rank, never)
            if free:
                check_parts(model, never)
            else:
                assert part.weight.grad is None
                expected = torch.full((5,), MICROBATCHES * 4 / 2)
                assert torch.equal(part.bias.grad.full_tensor(), expected)


class Checkpointed(nn.Module):
    """With `reentrant`, its layers run in backward passes within the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)])
        self._reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True) if self._reentrant else layer(x)
        return x.square().sum()


def check_reentrant_checkpoints(mesh: hsdp.Mesh, shard_mesh: Any) -> None:
    results = []
    for reentrant in (False, True):
        torch.manual_seed(3)
        model = Checkpointed(reentrant)
        for module in (*model.layers, model):
            fully_shard(module, mesh=shard_mesh)
        handle = hsdp.torch.replica_hook(model, mesh)
        for m in range(2):
            handle.set_requires_all_reduce(m == 1)
            x = torch.full((2, 3), float(1 + m + mesh.rank), requires_grad=True)
            model(x).backward()
        handle.finish()
        results.append([p.grad.full_tensor() for p in model.parameters()])
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected)


def check_ends_of_backwards(mesh: hsdp.Mesh, shard_mesh: Any) -> None:
    """The end of a backward is looked for only once, however many modules there are."""
    model = Checkpointed(reentrant=False)
    for module in (*model.layers, model):
        fully_shard(module, mesh=shard_mesh)
    handle: Any = hsdp.torch.replica_hook(model, mesh)
    end_backward, ends = handle._end_backward, []
    handle._end_backward = lambda: ends.append(end_backward())
    for m in range(3):
        model(torch.ones(2, 3)).backward()
        assert len(ends) == m + 1 and handle.all_reduce_count == 3 * len(ends)


def run_counted(model: Any, set_flag: Any, flagged: list[str], rank: int) -> int:
    """The number of reduce-scatters of a step in which the flags are off except in the last microbatch."""
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    reduce_scatter, scattered = getattr(dist, name), []

    def counting(**arguments: Any) -> Any:
        scattered.append(arguments["output"].numel())
        return reduce_scatter(**arguments)

    setattr(dist, name, counting)
    for m in range(MICROBATCHES):
        for part in flagged:
            set_flag(model.parts()[part], m == MICROBATCHES - 1)
        model(torch.full((2, 7), float(1 + m + rank))).square().mean().backward()
    setattr(dist, name, reduce_scatter)
    return len(scattered)


def check_counts(mesh: hsdp.Mesh, mesh_2d: Any) -> None:
    """As in PyTorch's test of accumulation, and with the gradients of FSDP2's HSDP."""
    for flag, flagged, expected in COUNTS:
        theirs, model = CountedNet(), CountedNet()
        for net, on in [(theirs, mesh_2d), (model, mesh_2d["shard"])]:
            for part in reversed(net.parts().values()):
                fully_shard(part, mesh=on)
        handle = hsdp.torch.replica_hook(model, mesh)

        def set_own(part: Any, value: bool, flag: str = flag) -> None:
            getattr(part, f"set_requires_{flag}")(value, recurse=False)

        def set_ours(part: Any, value: bool, handle: Any = handle) -> None:
            handle.set_requires_all_reduce(value, part, recurse=False)

        for step in range(2):
            ours = set_own if flag == "gradient_sync" else set_ours
            found = run_counted(model, ours, flagged, mesh.rank), handle.all_reduce_count
            assert found == (expected[0], (step + 1) * expected[1]), (flag, flagged)
            run_counted(theirs, set_own, flagged, mesh.rank)
        assert handle.carry_bytes == 0
        handle.finish()
        for (name, p), q in zip(theirs.named_parameters(), model.parameters(), strict=True):
            assert torch.allclose(p.grad.to_local(), q.grad.to_local(), 1e-5, 1e-6), name
        handle.close()


def check_flags_of_all(mesh: hsdp.Mesh, shard_mesh: Any) -> None:
    model = CountedNet()
    for part in reversed(model.parts().values()):
        fully_shard(part, mesh=shard_mesh)
    handle = hsdp.torch.replica_hook(model, mesh)
    x = torch.ones(2, 7)
    for _ in range(2):  # unless told otherwise, each backward is the last
        model(x).sum().backward()
    assert handle.all_reduce_count == 8 and handle.carry_bytes == 0
    handle.set_requires_all_reduce(True)
    handle.set_requires_all_reduce(False, model)  # and the modules within it
    model(x).sum().backward()
    assert handle.all_reduce_count == 8 and handle.carry_bytes > 0
    handle.set_requires_all_reduce(True, model[1])
    model(x).sum().backward()
    assert handle.all_reduce_count == 9
    handle.finish()
    assert handle.all_reduce_count == 12 and handle.carry_bytes == 0
    for wrong, message in [(nn.Linear(1, 1), "a Linear without.*fully_shard"), ("mlp1", "type str")]:
        with pytest.raises(hsdp.UsageError, match=message):
            handle.set_requires_all_reduce(True, wrong)


def check_sums_of_one_dtype(mesh: hsdp.Mesh, mesh_2d: Any) -> None:
    """256 + 1 - 256 in bf16: the sum is fp32, unlike FSDP2's."""
    for given, expected in [(mesh_2d["shard"], 1.0), (mesh_2d, 0.0)]:
        model: Any = nn.Linear(3, 5, bias=False).bfloat16()
        fully_shard(model, mesh=given)
        handle: Any = model
        if given is not mesh_2d:
            handle = hsdp.torch.replica_hook(model, mesh, hsdp.PlainHop("f32"))
        for m, value in enumerate([256.0, 1.0, -256.0]):
            handle.set_requires_all_reduce(m == 2)
            model(torch.full((1, 3), value).bfloat16()).sum().backward()
        grad = model.weight.grad
        assert grad.dtype == BF16
        assert set(grad.full_tensor().float().view(-1).tolist()) == {expected}


def test_modules_that_do_not_run_in_the_last_backward(
    ranks: Launcher, tmp_path: pathlib.Path
) -> None:
    ranks.start(4, finish_what_did_not_run, str(tmp_path)).wait(limit_s=240)


def two_roots(folder: str) -> list[str]:
    start_torch(folder)
    seen = []
    with hsdp.init_mesh(2, 1) as mesh:
        model: Any = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        for module in model:
            fully_shard(module, mesh=device_mesh(2, 1)["shard"])
        handle: Any = hsdp.torch.replica_hook(model, mesh)
        for _ in range(3):
            model(torch.ones(2, 3)).sum().backward()
            seen.append("ended" if handle._rows.begins_step else "still under way")
        model[0].bias.requires_grad_(False)  # it may be frozen between steps
        model(torch.ones(2, 3)).sum().backward()
        handle.close()
    dist.destroy_process_group()
    return seen


# FSDP2 queues the end of a backward once for each root.
def test_a_backward_through_several_roots_ends_its_step(ranks: Launcher, tmp_path: Any) -> None:
    assert ranks.start(2, two_roots, str(tmp_path)).wait() == [["ended"] * 3] * 2
