"""Whether an optimizer may run on flat slices of parameters [Note: optimizers on slices]."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from hsdp.errors import UsageError

_SHAPE = (3, 4099)  # 12,297 elements
_CUT = 5001  # on no boundary that a vector loop would notice
_REMEDY = (
    "take an elementwise one, as torch.optim.AdamW, or step this one unsharded, after "
    "reducer.gather_gradients()"
)
_STEPS = 3


class ProbedStates(NamedTuple):
    """What the states of an optimizer are."""

    #: which have an element for each of the parameter's
    elementwise: frozenset[str]
    #: whether "step" is a tensor
    has_tensor_step: bool


def require_elementwise(
    optimizer_class: Any, options: Mapping[str, Any], settings: Mapping[str, Any]
) -> ProbedStates:
    """UsageError unless three steps of a matrix give the same bits as those of its two flat halves,
    each in an optimizer of its own. torch's random state is as before. `settings` are those of the
    parameter group. What the class itself refuses, it raises.
    """
    name = getattr(optimizer_class, "__name__", str(optimizer_class))
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
        raise UsageError(
            f"zero: ShardedOptimizer: expected a class of torch optimizers, got {optimizer_class!r}"
        )
    def make(parameter: torch.nn.Parameter) -> torch.optim.Optimizer:
        group = {**settings, "params": [parameter]}
        optimizer: torch.optim.Optimizer = optimizer_class([_on_host(group)], **_on_host(options))
        return optimizer

    on_host: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
    generator = torch.Generator("cpu").manual_seed(1)
    start = torch.randn(_SHAPE, generator=generator, **on_host)
    magnitudes = 10.0 ** (9 * torch.rand((_STEPS, *_SHAPE), generator=generator, **on_host) - 6)
    grads = torch.randn((_STEPS, *_SHAPE), generator=generator, **on_host) * magnitudes
    flat = start.reshape(-1)
    make(torch.nn.Parameter(start))
    with torch.random.fork_rng(devices=[]):
        try:
            whole, state = _run(make, start, grads)
            halves = [
                _run(make, flat[part], grads.reshape(_STEPS, -1)[:, part])[0]
                for part in (slice(0, _CUT), slice(_CUT, None))
            ]
        except Exception as error:  # whatever a class raises that cannot
            raise UsageError(
                f"zero: ShardedOptimizer: expected an optimizer that updates each element by itself, "
                f"got {name}, which raised {type(error).__name__} on flat slices: {error}; {_REMEDY}"
            ) from error
    if not torch.equal(whole.reshape(-1), torch.cat(halves)):
        raise UsageError(
            f"zero: ShardedOptimizer: expected an optimizer that updates each element by itself, got "
            f"{name}, which gives other values on slices of a parameter than on the "
            f"whole; {_REMEDY}"
        )
    return ProbedStates(
        frozenset(k for k, v in state.items() if isinstance(v, torch.Tensor) and v.dim() == 2),
        isinstance(state.get("step"), torch.Tensor),
    )


# These change where and in which instructions it computes, not what.
def _on_host(options: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in options.items() if k not in ("fused", "capturable")}


def _run(
    make: Callable[[torch.nn.Parameter], torch.optim.Optimizer],
    start: torch.Tensor,
    grads: torch.Tensor,
) -> tuple[torch.Tensor, dict[str, Any]]:
    parameter = torch.nn.Parameter(start.clone())
    optimizer = make(parameter)
    for grad in grads:
        parameter.grad = grad.clone()
        optimizer.step()
    return parameter.detach(), optimizer.state[parameter]
