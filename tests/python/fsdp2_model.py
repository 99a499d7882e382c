"""A small model, its data, and its float64 gradients, with which runs on FSDP2 are compared."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

MICROBATCHES = 3
Gradients = dict[str, torch.Tensor]


class Net(nn.Module):
    """Widths 3, 16 and 17, which no shard group divides evenly. Two layers share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 16)
        self.second = nn.Linear(16, 17)
        self.again = nn.Linear(16, 17)
        self.again.weight = self.second.weight
        self.last = nn.Linear(17, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.second(x))
        x = torch.tanh(self.again(x[:, :16]))
        result: torch.Tensor = self.last(x)
        return result


def start_torch(folder: str) -> None:
    """Starts torch.distributed over gloo on the launcher's ranks."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store_{os.environ['HSDP_JOB']}",
        rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]),
    )


def device_mesh(replicate: int, shard: int) -> Any:
    """A DeviceMesh over all ranks."""
    return init_device_mesh("cpu", (replicate, shard), mesh_dim_names=("replicate", "shard"))


def make_model(
    mesh: Any, reduce_dtype: torch.dtype | None = None, model: nn.Module | None = None
) -> Any:
    """A Net (the same on every rank) under fully_shard: `first`, `last` and the rest are separate modules."""
    torch.manual_seed(5)
    net: Any = Net() if model is None else model
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    for module in (net.first, net.last, net):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return net


def batch(step: int, microbatch: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of one rank."""
    make = torch.Generator().manual_seed(1000 * step + 10 * microbatch + rank)
    x = torch.randn(6, 3, generator=make, dtype=torch.float64)
    return x, torch.randn(6, 5, generator=make, dtype=torch.float64)


def loss_of(model: Any, step: int, microbatch: int, rank: int) -> torch.Tensor:
    """One microbatch in the precision of the model's parameters."""
    dtype = next(model.parameters()).dtype
    x, y = (t.to(dtype) for t in batch(step, microbatch, rank))
    return nn.functional.mse_loss(model(x), y)


def expected_gradients(weights: Mapping[str, torch.Tensor], step: int, size: int) -> Gradients:
    """In float64: the sum over microbatches of the mean over ranks."""
    model = Net().double()
    for name, p in model.named_parameters():
        p.data = weights[name].double()
    for rank in range(size):
        for m in range(MICROBATCHES):
            loss_of(model, step, m, rank).backward()
    return {n: p.grad / size for n, p in model.named_parameters() if p.grad is not None}


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """The gathered parameters."""
    return {n: p.detach().full_tensor() for n, p in model.named_parameters()}  # type: ignore


def whole_gradients(model: nn.Module) -> Gradients:
    """The gathered gradients."""
    return {n: p.grad.full_tensor() for n, p in model.named_parameters()}  # type: ignore


def squared_error(got: Gradients, expected: Gradients) -> float:
    """The squared error over all parameters, relative to the expected gradients."""
    assert list(got) == list(expected)
    off = sum(float((got[n].double() - expected[n]).square().sum()) for n in got)
    return off / sum(float(g.square().sum()) for g in expected.values())


def worst_error(got: Gradients, expected: Gradients) -> float:
    """The largest relative L2 error of a parameter."""
    assert list(got) == list(expected)
    return max(float((got[n].double() - e).norm() / e.norm()) for n, e in expected.items())


def fingerprint(model: nn.Module) -> str:
    """A hash of the bits of this rank's gradients."""
    digest = hashlib.sha256()
    for p in model.parameters():
        assert p.grad is not None
        digest.update(p.grad.to_local().contiguous().numpy().tobytes())  # type: ignore
    return digest.hexdigest()


class TwoParts(nn.Module):
    """A microbatch may leave out `late`."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.late = nn.Linear(3, 5), nn.Linear(3, 5)

    def forward(self, x: torch.Tensor, skips_late: bool) -> torch.Tensor:
        result: torch.Tensor = self.early(x)
        return result if skips_late else result + self.late(x)


def two_parts(shard_mesh: Any) -> Any:
    """Each part is a separate module under fully_shard; the same on every rank."""
    torch.manual_seed(3)
    model: Any = TwoParts()
    for module in (model.early, model.late, model):
        fully_shard(module, mesh=shard_mesh)
    return model


def x_of(microbatch: int, rank: int) -> torch.Tensor:
    """Small integers, whose sums are exact."""
    return torch.arange(6.0).view(2, 3) + 10 * microbatch + rank


def mlp(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))


class CountedNet(nn.Sequential):
    """A layer in the root and three MLPs, as in PyTorch's test that counts collectives."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(7, 7), mlp(7), mlp(7), mlp(7))

    def parts(self) -> dict[str, nn.Module]:
        """The modules that are sharded separately and have flags."""
        return {"root": self, "mlp1": self[1], "mlp2": self[2], "mlp3": self[3]}


# For three microbatches: which modules' flags are off in all but the last one, and how many reduce-scatters
# and all-reduces follow.
ALL = ["root", "mlp1", "mlp2", "mlp3"]
COUNTS = [
    ("all_reduce", ALL, [12, 4]),
    ("gradient_sync", ALL, [4, 4]),
    ("all_reduce", ["root"], [12, 10]),
    ("gradient_sync", ["root"], [10, 10]),
    ("all_reduce", ["mlp1", "mlp2"], [12, 8]),
    ("gradient_sync", ["mlp1", "mlp2"], [8, 8]),
]
