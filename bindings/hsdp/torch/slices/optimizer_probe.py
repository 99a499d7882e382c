"""Tests what an optimizer may run on: flat slices of parameters, or whole ones spread over the ranks.

[Note: optimizers on slices]
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any, NamedTuple, NoReturn

import torch

from hsdp.errors import UsageError

_SHAPE = (3, 4099)  # 12,297 elements
_BLOCKS = (3, 4096)  #: whole blocks of optimizers that quantize their states in blocks
_CUT = 5001  #: not a boundary of any vector loop
_SIDES = (5, 7, 3, 2)  #: of whole parameters: a state with other sides is not per element
_RATE = 0.1
_ON_HOST: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
_REMEDY = (
    "take an elementwise one, as torch.optim.AdamW, or make the Reducer with layout=\"whole\", "
    "under which optimizers get whole parameters"
)
_NOT_FUSED = "leave out fused for complex parameters, or give them a parameter group without it"
_UNSHARDED = "step it unsharded, after reducer.gather_gradients()"

Settings = Mapping[str, Any]


class ProbedStates(NamedTuple):
    """The states of an optimizer."""

    #: those with an element for each of the parameter's
    elementwise: frozenset[str]
    #: whether "step" is a tensor
    has_tensor_step: bool
    #: whether zeros are as good as no state before the first step
    begins_with_zeros: bool


class Example(NamedTuple):
    """Values of a parameter, and its gradients in some steps."""

    start: torch.Tensor
    grads: torch.Tensor

    def flat_parts(self) -> list[Example]:
        """The same as two slices."""
        start, grads = self.start.view(-1), self.grads.view(len(self.grads), -1)
        parts = (slice(0, _CUT), slice(_CUT, None))
        return [Example(start[part], grads[:, part]) for part in parts]

    def both(self) -> list[Example]:
        """The same as a pair of parameters."""
        return [Example(self.start[i], self.grads[:, i]) for i in range(2)]


class _Told(NamedTuple):
    """The parts of the error for an optimizer that is refused."""

    wants: str
    where: str  # where it raised
    if_raised: str
    differs: str
    if_differs: str


class _Run(NamedTuple):
    """The outcome of some steps: for each parameter, and for their group."""

    values: list[torch.Tensor]
    states: list[dict[str, Any]]
    settings: dict[str, Any]


class OptimizerProbe:
    """Tests a class of torch optimizers. Preserves torch's random state. Errors of the class itself are
    raised as they are.
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

    def on_slices(self, settings: Settings, is_complex: bool = False) -> ProbedStates:
        """Raises UsageError unless some steps of a matrix, real or complex, give the same bits as those
        of its two flat halves, each in a separate optimizer. `settings`: the parameter group's.
        """
        examples = [_of_all_sizes(_SHAPE, is_complex), _of_two_kinds(_BLOCKS, is_complex)]
        self._make(settings, [torch.nn.Parameter(examples[0].start)])
        told = _Told(
            "an optimizer that updates each element by itself",
            " on flat slices", _REMEDY,
            "gives other values on slices of a parameter than on the whole", _REMEDY,
        )
        runs = [
            self._require_alike(settings, [example], example.flat_parts(), told) for example in examples
        ]
        return self._states(settings, examples[0], runs[0].states[0])

    def on_whole(
        self, settings: Settings, dimensions: int, is_complex: bool = False
    ) -> ProbedStates:
        """Raises UsageError unless some steps of two parameters of `dimensions` dimensions give the
        same bits as those of each in a separate optimizer.
        """
        shape = (*_SIDES, *[2] * dimensions)[:dimensions]
        shape = (2, *shape)
        examples = [each(shape, is_complex).both() for each in (_of_all_sizes, _of_two_kinds)]
        what = f"parameters of {dimensions} dimension{'s' if dimensions != 1 else ''}"
        told = _Told(
            f"an optimizer that updates each of its {what} by itself",
            "", "give it those that it takes, and the others to another ShardedOptimizer",
            "gives a parameter other values beside another one", _UNSHARDED,
        )
        runs = [self._require_alike(settings, both, both, told) for both in examples]
        return self._states(settings, examples[0][0], runs[0].states[0])

    # Runs all together, and each part in a separate optimizer.
    def _require_alike(
        self, settings: Settings, whole: list[Example], parts: list[Example], told: _Told
    ) -> _Run:
        with torch.random.fork_rng(devices=[]):
            try:
                together = self._run(settings, whole)
                alone = [self._run(settings, [part]) for part in parts]
            except Exception as error:  # an unsuitable class may raise anything
                raised = f"raised {type(error).__name__}: {error}{told.where}"
                fused = {**self._options, **settings}.get("fused") and whole[0].start.is_complex()
                self._refuse(told.wants, raised, _NOT_FUSED if fused else told.if_raised, error)
        # A group's step count is the same everywhere; a value computed from all elements is not.
        for key, value in together.settings.items():
            if any(_differ(value, one.settings.get(key)) for one in alone):
                got = f"computes {key!r} of a parameter group from all its gradients"
                self._refuse(told.wants, got, _UNSHARDED)
        values = [value for one in alone for value in one.values]
        if not torch.equal(_flat(together.values), _flat(values)):
            self._refuse(told.wants, told.differs, told.if_differs)
        return together

    def _states(self, settings: Settings, example: Example, state: dict[str, Any]) -> ProbedStates:
        with torch.random.fork_rng(devices=[]):
            begins = self._begins_with_zeros(settings, example)
        elementwise = frozenset(
            key for key, value in state.items()
            if key != "step" and isinstance(value, torch.Tensor) and value.shape == example.start.shape
        )
        return ProbedStates(elementwise, isinstance(state.get("step"), torch.Tensor), begins)

    def _begins_with_zeros(self, settings: Settings, example: Example) -> bool:
        once = Example(example.start, example.grads[:1])
        wanted = self._run(settings, [once])
        (state,) = wanted.states
        if not any(isinstance(value, torch.Tensor) for value in state.values()):
            return False
        try:
            zeros = {key: zero_of(value) for key, value in state.items()}
            found = self._run(settings, [once], zeros)
        except Exception:  # a class may raise anything if a state is missing
            return False
        return bool(torch.equal(found.values[0], wanted.values[0]))

    def _run(
        self, settings: Settings, examples: list[Example], state: dict[str, Any] | None = None
    ) -> _Run:
        parameters = [torch.nn.Parameter(one.start.clone()) for one in examples]
        optimizer = self._make(settings, parameters)
        begin_training(optimizer)
        if state is not None:
            optimizer.state[parameters[0]] = state
        for step in range(len(examples[0].grads)):
            for parameter, one in zip(parameters, examples, strict=True):
                parameter.grad = one.grads[step].clone()
            optimizer.step()
        return _Run(
            [p.detach() for p in parameters],
            [optimizer.state[p] for p in parameters],
            {key: value for key, value in optimizer.param_groups[0].items() if key != "params"},
        )

    def _make(self, settings: Settings, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        is_complex = parameters[0].is_complex()
        group = {**_on_host(settings, is_complex), "params": parameters}
        optimizer: torch.optim.Optimizer = self._class([group], **_on_host(self._options, is_complex))
        return optimizer

    def _refuse(
        self, wants: str, got: str, remedy: str, error: Exception | None = None
    ) -> NoReturn:
        raise UsageError(
            f"zero: ShardedOptimizer: expected {wants}, got {self._name}, which {got}; {remedy}"
        ) from error


def begin_training(optimizer: torch.optim.Optimizer) -> None:
    """Schedule-free optimizers must be told before they step."""
    train = getattr(optimizer, "train", None)
    if callable(train):
        train()


# Compares numbers; other values that a class keeps there are its own business.
def _differ(a: Any, b: Any) -> bool:
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) != len(b) or any(map(_differ, a, b))
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape != b.shape or bool(((a != b) & ~(a.isnan() & b.isnan())).any())
    if isinstance(a, Real) and isinstance(b, Real):
        return bool(a != b and not (a != a and b != b))
    return False


def _flat(values: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([value.reshape(-1) for value in values])


# Gradients of all magnitudes, in any direction.
def _of_all_sizes(shape: tuple[int, ...], is_complex: bool) -> Example:
    generator = torch.Generator("cpu").manual_seed(1)
    kind: dict[str, Any] = {"generator": generator, **_kind(is_complex)}
    powers = 9 * torch.rand((3, *shape), generator=generator, **_ON_HOST) - 6
    grads = torch.randn((3, *shape), **kind) * 10.0**powers
    return Example(torch.randn(shape, **kind), grads)


# The gradients of the first part stay the same; those of the second change sign in every step. A scalar
# computed over all elements, such as Prodigy's step size, then differs between the parts.
def _of_two_kinds(shape: tuple[int, ...], is_complex: bool) -> Example:
    kind: dict[str, Any] = {"generator": torch.Generator("cpu").manual_seed(2), **_kind(is_complex)}
    one = torch.randn(shape, **kind)
    grads = torch.stack([one] * 8)
    flat = grads.view(len(grads), -1)
    second = _CUT if flat.shape[1] > _CUT else flat.shape[1] // 2
    flat[1::2, second:] *= -1
    return Example(torch.randn(shape, **kind) / 100, grads)


def _kind(is_complex: bool) -> dict[str, Any]:
    return {**_ON_HOST, "dtype": torch.complex64} if is_complex else _ON_HOST


def zero_of(value: Any) -> Any:
    """The zero value of a state; raises UsageError if it has none."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, (bool, int, float)):
        return type(value)(0)
    raise UsageError(f"zero: ShardedOptimizer: expected a number, got a {type(value).__name__}")


# The omitted options change where and how it computes, not what; but a fused optimizer takes no complex
# parameters. A rate of 0, with which a warm-up begins, would show nothing.
def _on_host(options: Settings, is_complex: bool) -> dict[str, Any]:
    left_out = ("capturable",) if is_complex else ("fused", "capturable")
    kept = {key: value for key, value in options.items() if key not in left_out}
    rate = kept.get("lr")
    if isinstance(rate, (int, float, torch.Tensor)) and not isinstance(rate, bool) and float(rate) == 0.0:
        kept["lr"] = torch.full_like(rate, _RATE) if isinstance(rate, torch.Tensor) else _RATE
    return kept
