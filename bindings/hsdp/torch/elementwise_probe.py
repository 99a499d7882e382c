"""Whether an optimizer may run on flat slices of parameters [Note: optimizers on slices]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hsdp.errors import UsageError

_SHAPE = (3, 4099)  # 12,297 elements
_CUT = 5001  # on no boundary that a vector loop would notice
_STEPS = 3


def require_elementwise(optimizer_class: Any, options: Mapping[str, Any]) -> frozenset[str]:
    """UsageError unless three steps of a matrix give the same bits as those of its two flat halves,
    each in an optimizer of its own. torch's random state is as before. Returns which of its states
    have an element for each of the parameter's.
    """
    name = getattr(optimizer_class, "__name__", str(optimizer_class))
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
        raise UsageError(
            f"zero: ShardedOptimizer: expected a class of torch optimizers, got {optimizer_class!r}"
        )
    # These change where and in which instructions it computes, not what.
    options = {k: v for k, v in options.items() if k not in ("fused", "capturable")}
    on_host: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
    generator = torch.Generator("cpu").manual_seed(1)
    start = torch.randn(_SHAPE, generator=generator, **on_host)
    magnitudes = 10.0 ** (9 * torch.rand((_STEPS, *_SHAPE), generator=generator, **on_host) - 6)
    grads = torch.randn((_STEPS, *_SHAPE), generator=generator, **on_host) * magnitudes
    flat = start.reshape(-1)
    with torch.random.fork_rng(devices=[]):
        try:
            whole, state = _run(optimizer_class, options, start, grads)
            halves = [
                _run(optimizer_class, options, flat[part], grads.reshape(_STEPS, -1)[:, part])[0]
                for part in (slice(0, _CUT), slice(_CUT, None))
            ]
        except Exception as error:  # whatever a class raises that cannot
            raise UsageError(
                f"zero: ShardedOptimizer: expected an optimizer that updates each element by itself, "
                f"got {name}, which raised {type(error).__name__} on flat slices: {error}"
            ) from error
    if not torch.equal(whole.reshape(-1), torch.cat(halves)):
        raise UsageError(
            f"zero: ShardedOptimizer: expected an optimizer that updates each element by itself, got "
            f"{name}, which gives other values on slices of a parameter than on the whole"
        )
    return frozenset(
        key for key, value in state.items() if isinstance(value, torch.Tensor) and value.dim() == 2
    )


def _run(
    optimizer_class: Any, options: Mapping[str, Any], start: torch.Tensor, grads: torch.Tensor
) -> tuple[torch.Tensor, dict[str, Any]]:
    parameter = torch.nn.Parameter(start.clone())
    optimizer = optimizer_class([parameter], **options)
    for grad in grads:
        parameter.grad = grad.clone()
        optimizer.step()
    return parameter.detach(), optimizer.state[parameter]
