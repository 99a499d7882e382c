"""What an optimizer may run on: flat slices of parameters, or whole ones of which each rank has some.

[Note: optimizers on slices]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

import torch

from hsdp.errors import UsageError

_SHAPE = (3, 4099)  # 12,297 elements
_CUT = 5001  # on no boundary that a vector loop would notice
_SIDES = (5, 7, 3, 2)  # of whole parameters: what has one of other sides is no state of each element
_STEPS = 3
_REMEDY = (
    "take an elementwise one, as torch.optim.AdamW, or make the Reducer with layout=\"whole\", "
    "under which optimizers get whole parameters"
)

Settings = Mapping[str, Any]


class ProbedStates(NamedTuple):
    """What the states of an optimizer are."""

    #: which have an element for each of the parameter's
    elementwise: frozenset[str]
    #: whether "step" is a tensor
    has_tensor_step: bool
    #: whether a state of zeros is as good as none before the first step
    begins_with_zeros: bool


class OptimizerProbe:
    """Tries out a class of torch optimizers. torch's random state stays as it is. What the class itself
    refuses, it raises.
    """

    def __init__(self, optimizer_class: Any, options: Settings) -> None:
        self._class = optimizer_class
        self._name = getattr(optimizer_class, "__name__", str(optimizer_class))
        self._options = options
        if not (
            isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)
        ):
            is_one = isinstance(optimizer_class, torch.optim.Optimizer)
            kind = type(optimizer_class).__name__
            raise UsageError(
                "zero: ShardedOptimizer: expected a class of torch optimizers and its options, as in "
                "ShardedOptimizer(torch.optim.AdamW, model, reducer, lr=1e-3), got "
                + (f"an instance of {kind}" if is_one else f"{optimizer_class!r}")
            )

    def on_slices(self, settings: Settings) -> ProbedStates:
        """UsageError unless three steps of a matrix give the same bits as those of its two flat halves,
        each in an optimizer of its own. `settings` are those of the parameter group.
        """
        (start,), (grads,) = _examples(_SHAPE)
        flat = start.reshape(-1)
        parts = [slice(0, _CUT), slice(_CUT, None)]
        self._make(settings, [torch.nn.Parameter(start)])
        wants = "an optimizer that updates each element by itself"
        with torch.random.fork_rng(devices=[]):
            try:
                (whole,), (state,) = self._run(settings, [start], [grads])
                halves = [
                    self._run(settings, [flat[part]], [grads.reshape(_STEPS, -1)[:, part]])[0][0]
                    for part in parts
                ]
            except Exception as error:  # whatever a class raises that cannot
                self._refuse(wants, f"raised {_text(error)} on flat slices", _REMEDY, error)
        if not torch.equal(whole.reshape(-1), torch.cat(halves)):
            self._refuse(wants, "gives other values on slices of a parameter than on the whole", _REMEDY)
        return self._states(settings, start, grads, state)

    def on_whole(self, settings: Settings, dimensions: int) -> ProbedStates:
        """UsageError unless three steps of two parameters of so many dimensions give the same bits as
        those of each in an optimizer of its own.
        """
        shape = (*_SIDES, *[2] * dimensions)[:dimensions]
        starts, grads = _examples(shape, 2)
        what = f"parameters of {dimensions} dimension{'s' if dimensions != 1 else ''}"
        wants = f"an optimizer that updates each of its {what} by itself"
        with torch.random.fork_rng(devices=[]):
            try:
                together, states = self._run(settings, starts, grads)
                alone = [
                    self._run(settings, [start], [of_one])[0][0]
                    for start, of_one in zip(starts, grads, strict=True)
                ]
            except Exception as error:  # whatever a class raises that cannot
                remedy = "give it those that it takes, and the others to another ShardedOptimizer"
                self._refuse(wants, f"raised {_text(error)}", remedy, error)
        if not all(map(torch.equal, together, alone)):
            remedy = "step it unsharded, after reducer.gather_gradients()"
            self._refuse(wants, "gives a parameter other values beside another one", remedy)
        return self._states(settings, starts[0], grads[0], states[0])

    def _states(
        self, settings: Settings, start: torch.Tensor, grads: torch.Tensor, state: Settings
    ) -> ProbedStates:
        elementwise = frozenset(
            key for key, value in state.items()
            if key != "step" and isinstance(value, torch.Tensor) and value.shape == start.shape
        )
        has_tensor_step = isinstance(state.get("step"), torch.Tensor)
        with torch.random.fork_rng(devices=[]):
            begins = self._begins_with_zeros(settings, start, grads)
        return ProbedStates(elementwise, has_tensor_step, begins)

    def _begins_with_zeros(self, settings: Settings, start: torch.Tensor, grads: torch.Tensor) -> bool:
        wanted, states = self._run(settings, [start], [grads], 1)
        if not any(isinstance(value, torch.Tensor) for value in states[0].values()):
            return False
        try:
            zeros = {key: zero_of(value) for key, value in states[0].items()}
            found, _ = self._run(settings, [start], [grads], 1, zeros)
        except Exception:  # whatever a class raises where something else was to be there
            return False
        return bool(torch.equal(found[0], wanted[0]))

    def _run(
        self, settings: Settings, starts: list[torch.Tensor], grads: list[torch.Tensor],
        steps: int = _STEPS, state: dict[str, Any] | None = None,
    ) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
        parameters = [torch.nn.Parameter(start.clone()) for start in starts]
        optimizer = self._make(settings, parameters)
        if state is not None:
            optimizer.state[parameters[0]] = state
        for step in range(steps):
            for parameter, of_one in zip(parameters, grads, strict=True):
                parameter.grad = of_one[step].clone()
            optimizer.step()
        return [p.detach() for p in parameters], [optimizer.state[p] for p in parameters]

    def _make(self, settings: Settings, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        group = {**_on_host(settings), "params": parameters}
        optimizer: torch.optim.Optimizer = self._class([group], **_on_host(self._options))
        return optimizer

    def _refuse(
        self, wants: str, got: str, remedy: str, error: Exception | None = None
    ) -> NoReturn:
        raise UsageError(
            f"zero: ShardedOptimizer: expected {wants}, got {self._name}, which {got}; {remedy}"
        ) from error


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


# Values, and gradients of all steps.
def _examples(shape: tuple[int, ...], count: int = 1) -> tuple[list[Any], list[Any]]:
    on_host: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
    generator = torch.Generator("cpu").manual_seed(1)
    starts, grads = [], []
    for _ in range(count):
        starts.append(torch.randn(shape, generator=generator, **on_host))
        powers = 9 * torch.rand((_STEPS, *shape), generator=generator, **on_host) - 6
        grads.append(torch.randn((_STEPS, *shape), generator=generator, **on_host) * 10.0**powers)
    return starts, grads


def zero_of(value: Any) -> Any:
    """The zero of a state; UsageError where it has none."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, (bool, int, float)):
        return type(value)(0)
    raise UsageError(f"zero: ShardedOptimizer: expected a number, got a {type(value).__name__}")


# These change where and in which instructions it computes, not what.
def _on_host(options: Settings) -> dict[str, Any]:
    return {k: v for k, v in options.items() if k not in ("fused", "capturable")}
