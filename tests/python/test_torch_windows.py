"""Windows of several backward passes over attached models, and what they refuse."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conftest import on_mesh, on_meshes
from one_rank import add_gradient, attached_to, mesh, message_of, registered
from same_tensors import require_same
from torch import nn

import hsdp
from hsdp.zero import coalesce_grad_reduction

WAYS = list(itertools.product((1, 2), ("buffer", "grad"), (False, True)))


@pytest.fixture
def attached(mesh: hsdp.Mesh) -> tuple[hsdp.Reducer, nn.Module]:
    model = make_model()
    reducer = attached_to(model, mesh, bucket_bytes=64)
    return reducer, model


def make_model() -> nn.Sequential:
    """Of whole numbers, like all its inputs, so that sums of its gradients are exact."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 4))
    for p in model.parameters():
        p.data = torch.randint(-2, 3, p.shape).float()
    return model


def inputs(seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randint(-2, 3, (3, 6)).float()


def run_pass(model: nn.Module, seed: int) -> None:
    model(inputs(seed)).sum().backward()


def big_batch(seeds: list[int], divisor: int) -> dict[str, torch.Tensor]:
    """What torch computes for the rows of all passes at once."""
    model = make_model()
    model(torch.cat([inputs(seed) for seed in seeds])).sum().backward()
    return {name: p.grad / divisor for name, p in model.named_parameters()}  # type: ignore[operator]


def taken(model: nn.Module) -> dict[str, torch.Tensor]:
    grads = {}
    for name, p in model.named_parameters():
        assert p.grad is not None
        grads[name], p.grad = p.grad, None
    return grads


@on_meshes((2, 2), (1, 2), (2, 1))
def test_every_way(mesh: hsdp.Mesh) -> None:
    """Everything that DeepSpeed's coalesce_grad_reduction supports, and stage 0 on a mesh without shards: the
    gradient of one big batch to the bit, and the same collectives for any number of passes. Stages 2 and 3
    are one schedule."""
    counted: dict[int, list[list[int]]] = {1: [], 2: []}
    for (stage, accumulate, overlaps), count in itertools.product(WAYS, (1, 3)):
        model = make_model()
        reducer = hsdp.Reducer(mesh, bucket_bytes=64)
        reducer.set_partial_sync("none" if stage == 1 else "shard")
        reducer.attach(model)
        messages = []
        for step in range(2):  # nothing of the first may be in the second
            # Two windows a step, with a plain microbatch between them.
            first, second = count, count + mesh.rank % 2  # ranks have different numbers
            seeds = [100 * step + 10 * mesh.rank + i for i in range(first + 1 + second)]
            ahead = iter(seeds)
            with coalesce_grad_reduction(
                reducer, last=False, backwards=first if overlaps else None, accumulate=accumulate
            ):
                for _ in range(first):
                    run_pass(model, next(ahead))
            with reducer.microbatch(last=False):
                run_pass(model, next(ahead))
            with coalesce_grad_reduction(
                reducer, backwards=second if overlaps else None, accumulate=accumulate
            ):
                for _ in range(second):
                    with reducer.microbatch(last=False):
                        run_pass(model, next(ahead))
            reducer.gather_gradients()
            of_all = [
                100 * step + 10 * rank + i
                for rank in range(mesh.size)
                for i in range(2 * count + 1 + rank % 2)
            ]
            require_same(taken(model), big_batch(of_all, mesh.size))
            mesh.world.all_reduce(0.0, op="max")  # one message, after all that were sent
            messages.append(reducer.stats().control_message_count)
        stats = reducer.stats()
        counted[stage].append(
            [stats.reduce_scatter_count, stats.all_reduce_count, messages[1] - messages[0],
             stats.shard_hop_bytes, stats.replica_hop_bytes]
        )
        buckets = stats.bucket_count
        reducer.close()
    for stage, reductions in ((1, 1), (2, 3)):
        assert all(row == counted[stage][0] for row in counted[stage]), "they depend on the passes"
        scatters, reduces, sent, _, _ = counted[stage][0]
        assert scatters == (2 * reductions * buckets if mesh.shard_size > 1 else 0)
        assert reduces == (2 * buckets if mesh.replicate_size > 1 else 0)
        # A word whenever something is sent, the bit for found_inf, and the maximum above; rank 0 answers all
        # other ranks.
        assert sent == (reductions + 2) * (mesh.size - 1 if mesh.rank == 0 else 1)


@pytest.mark.parametrize("accumulate", ["buffer", "grad"])
def test_the_local_sum_is_readable(
    attached: tuple[hsdp.Reducer, nn.Module], accumulate: str
) -> None:
    reducer, model = attached
    with pytest.raises(hsdp.UsageError, match="'0.weight'"):
        reducer.local_sum("0.weight")
    with coalesce_grad_reduction(reducer, accumulate=accumulate):
        for count in (1, 2, 3):
            run_pass(model, count)
            got = {name: torch.from_dlpack(reducer.local_sum(name)).clone()
                   for name, _ in model.named_parameters()}
            require_same(got, big_batch(list(range(1, count + 1)), 1))
        held = [p.grad is not None for p in model.parameters()]
        assert held == [accumulate == "grad"] * 4
    assert all(p.grad is None for p in model.parameters())
    assert (reducer.stats().accumulator_bytes > 0) is (accumulate == "buffer")
    with pytest.raises(hsdp.UsageError, match="local_sum"):
        reducer.local_sum("0.weight")
    reducer.set_requires_gradient_sync(False)
    with coalesce_grad_reduction(reducer, accumulate=accumulate):
        run_pass(model, 5)
    assert np.array_equal(
        reducer.local_sum("1.bias").numpy(), big_batch([5], 1)["1.bias"].numpy()
    )
    with pytest.raises(hsdp.UsageError, match="unknown"):
        reducer.local_sum("unknown")


def test_keep_grads_has_the_windows_sum(mesh: hsdp.Mesh) -> None:
    for accumulate in ("buffer", "grad"):
        model = make_model()
        reducer = attached_to(model, mesh, keep_grads=True)
        with coalesce_grad_reduction(reducer, last=False, accumulate=accumulate):
            run_pass(model, 1)
            run_pass(model, 2)
        with coalesce_grad_reduction(reducer, accumulate=accumulate):
            run_pass(model, 3)
        require_same(taken(model), big_batch([1, 2, 3], 1))
        reducer.close()


def test_gradients_without_a_backward_pass(attached: tuple[hsdp.Reducer, nn.Module]) -> None:
    """Gradients that a user assigns are taken at the end of each microbatch."""
    reducer, model = attached
    with coalesce_grad_reduction(reducer):
        for seed in (1, 2):
            with reducer.microbatch():
                for name, p in model.named_parameters():
                    p.grad = big_batch([seed], 1)[name]
    reducer.gather_gradients()
    require_same(taken(model), big_batch([1, 2], 1))


def test_what_is_refused(attached: tuple[hsdp.Reducer, nn.Module], mesh: hsdp.Mesh) -> None:
    reducer, model = attached
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def nested() -> None:
        with coalesce_grad_reduction(reducer):
            pass

    def step() -> None:
        with reducer.step():
            pass

    def in_window(call: Callable[[], Any], accumulate: str = "buffer") -> str:
        with coalesce_grad_reduction(reducer, last=True, accumulate=accumulate):
            run_pass(model, 1)
            return message_of(call)

    for call in (nested, step, reducer.finish, reducer.discard, reducer.gather_gradients):
        assert "outside of a window" in in_window(call)
    for accumulate in ("buffer", "grad"):
        assert "SGD.step" in in_window(optimizer.step, accumulate)
        assert "inside of its block" in in_window(optimizer.step, accumulate)
        clip = lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # noqa: E731
        assert "inside of its block" in in_window(clip, accumulate)

    def left_open() -> None:
        with coalesce_grad_reduction(reducer):
            reducer.begin_microbatch()
            run_pass(model, 1)

    def one_more(accumulate: str) -> Callable[[], None]:
        def run() -> None:
            with coalesce_grad_reduction(reducer, backwards=2, accumulate=accumulate):
                for seed in range(3):
                    run_pass(model, seed)

        return run

    def missing() -> None:
        with coalesce_grad_reduction(reducer):
            model[0](inputs(1)).sum().backward()  # type: ignore[index]

    reducer.discard()
    assert "every microbatch inside of the window ended" in message_of(left_open)
    assert "at most 2 in its window" in message_of(one_more("buffer"))
    assert "of at most 2 as backwards says" in message_of(one_more("grad"))
    assert "'1.bias' and 1 more" in message_of(missing)
    assert all(p.grad is None for p in model.parameters())

    def dropped() -> None:
        with coalesce_grad_reduction(reducer):
            reducer.abandon_step("enough")

    assert "dropped inside of it" in message_of(dropped)
    model[0].bias.grad = torch.ones(9)  # type: ignore[index]
    assert "'0.bias'" in message_of(lambda: enter(reducer))
    model.zero_grad()
    assert "got 'f16'" in message_of(lambda: enter(reducer, accumulate_dtype="f16"))
    assert "got 'sum'" in message_of(lambda: enter(reducer, accumulate="sum"))
    for backwards in (0, -1, 1.5, True, "2"):
        assert repr(backwards) in message_of(lambda: enter(reducer, backwards=backwards))
    assert "attach" in message_of(lambda: enter(hsdp.Reducer(mesh), accumulate="grad"))
    assert "got none" in message_of(lambda: enter([]))
    assert "one again as number 1" in message_of(lambda: enter([reducer, reducer]))
    assert "list as number 0" in message_of(lambda: enter([[reducer]]))
    assert "object of type int" in message_of(lambda: enter(3))
    with coalesce_grad_reduction(reducer):
        run_pass(model, 1)
    reducer.gather_gradients()
    require_same(taken(model), big_batch([1], 1))


@on_mesh(1, 2)
def test_a_window_hears_of_an_earlier_drop(mesh: hsdp.Mesh) -> None:
    """A step whose drop a rank learns of in its next window."""
    model = make_model()
    reducer = attached_to(model, mesh)
    for accumulate in ("buffer", "grad"):
        try:
            with reducer.microbatch(last=False):
                run_pass(model, 1)
                if mesh.rank == 1:
                    raise ValueError("a bad batch")
            mesh.world.barrier()
            with coalesce_grad_reduction(reducer, accumulate=accumulate):
                run_pass(model, 1)
            pytest.fail("nothing was dropped")
        except hsdp.StepAbortedError as error:
            assert mesh.rank == 0 and error.ranks == (1,)
        except ValueError:
            mesh.world.barrier()
        assert all(p.grad is None for p in model.parameters())
        with coalesce_grad_reduction(reducer, accumulate=accumulate):
            run_pass(model, mesh.rank)
        reducer.gather_gradients()
        require_same(taken(model), big_batch([0, 1], 2))


def enter(reducers: Any, **options: Any) -> None:
    with coalesce_grad_reduction(reducers, **options):
        pytest.fail("the window began")


@on_mesh(2, 2)
def test_an_exception_drops_the_step_on_all_ranks(mesh: hsdp.Mesh) -> None:
    """One rank's block raises: the other ranks are told, and all continue."""
    models = [make_model(), make_model()]
    reducers = [hsdp.Reducer(mesh, bucket_bytes=64), hsdp.Reducer(mesh)]
    for reducer, model in zip(reducers, models, strict=True):
        reducer.attach(model)
    for which, accumulate in itertools.product(range(3), ("buffer", "grad")):
        try:
            with coalesce_grad_reduction(reducers, accumulate=accumulate):
                for seed in range(3):
                    for model in models:
                        run_pass(model, seed)
                    if mesh.rank == which and seed == which:
                        raise ValueError("a bad batch")
            for reducer in reducers:
                reducer.grad_norm()
            pytest.fail("nothing was dropped")
        except ValueError:
            assert mesh.rank == which
        except hsdp.StepAbortedError as error:
            assert mesh.rank != which and error.ranks == (which,) and "a bad batch" in str(error)
        for reducer in reducers:  # what was not thrown yet
            with pytest.raises((hsdp.StepAbortedError, hsdp.UsageError)):
                reducer.grad_norm()
        assert all(p.grad is None for model in models for p in model.parameters())
        with coalesce_grad_reduction(reducers, accumulate=accumulate):
            for model in models:
                for _ in range(1 + mesh.rank):
                    run_pass(model, mesh.rank)
        want = big_batch([rank for rank in range(4) for _ in range(1 + rank)], 4)
        for reducer, model in zip(reducers, models, strict=True):
            reducer.gather_gradients()
            require_same(taken(model), want)


def test_sums_in_the_gradients_dtype(mesh: hsdp.Mesh) -> None:
    """Sums of gradients that are handed over."""
    reducer = registered(mesh, "w", (5,), "f16")
    for accumulate_dtype, want in (("f32", 2052.0), ("param", 2048.0)):  # in f16 2048 + 1 is 2048, each time
        with coalesce_grad_reduction(reducer, accumulate_dtype=accumulate_dtype):
            reducer.gradient_ready("w", np.full(5, 2048, np.float16))
            for _ in range(4):
                gradient = np.ones(5, np.float16)
                add_gradient(reducer, "w", gradient)
                gradient[:] = np.nan  # its sum has it already
        assert reducer.shard("w").numpy().tolist() == [want] * 5
