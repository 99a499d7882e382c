"""This rank's slices of torch parameters: their places, masters and states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch

from hsdp import _hsdp
from hsdp.errors import UsageError
from hsdp.reducer import Reducer
from hsdp.torch import private_torch
from hsdp.torch.complex_values import mark_of, real_view
from hsdp.torch.slices.optimizer_probe import ProbedStates
from hsdp.torch.value_digests import differ

_CHUNK = 1 << 18  # elements


def refuse(expected: str, got: str) -> NoReturn:
    """Raises a UsageError of ShardedOptimizer."""
    raise UsageError(f"zero: ShardedOptimizer: expected {expected}, got {got}")


def flat_part(whole: torch.Tensor, offset: int, count: int) -> torch.Tensor:
    """Elements of a tensor flattened row-major: a view if its memory is row-major."""
    return whole.contiguous().reshape(-1)[offset : offset + count]


class ParameterSlice:
    """This rank's slice of one parameter; with layout "whole" either all of it or nothing."""

    def __init__(
        self,
        name: str,
        parameter: torch.nn.Parameter,
        reducer: Reducer,
        states: ProbedStates,
        offloaded: bool,
        is_released: bool = False,
    ) -> None:
        self.name = name
        self.parameter = parameter
        self.reducer = reducer
        self.states = states  #: of its optimizer
        self.offloaded = offloaded
        #: whether the whole parameter is freed between uses
        self.is_released = is_released
        place = reducer.slice(name)
        parts = 2 if parameter.is_complex() else 1
        #: in elements of the parameter
        self.offset, self.count = place.offset // parts, place.count // parts
        #: whether one rank has all of the parameter
        self.is_whole = reducer.layout == "whole"
        #: whether this rank's optimizer has it
        self.is_here = self.count > 0 or not self.is_whole
        self.own: torch.Tensor  # of the parameter, flat; unset if it is released
        self.master: torch.nn.Parameter  # of master_dtype; if the parameter has that dtype, it is `own`
        self.gradient: torch.Tensor  # the Reducer's shard, which stays in place
        self.stored: torch.Tensor  # if it is released: what gathers read
        #: whether it is released and a part of a ShardSlice
        self.is_part = is_released and reducer._is_over_mesh
        if not is_released:
            self.bind()

    def bind(self) -> None:
        """Binds to the parameter's current memory."""
        data = self.parameter.data
        # What is gathered: the parameter's own memory, or a row-major copy of it.
        self.is_copied = not data.is_contiguous()
        self.whole = data.contiguous() if self.is_copied else data
        self.own = self.part_of(self.whole)
        self.bound = memory_of(self.parameter)

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Its elements of a tensor of the parameter's shape, flat."""
        return flat_part(whole, self.offset, self.count)

    @property
    def inside_shape(self) -> torch.Size:
        """The shape for its optimizer: a matrix for a whole parameter, otherwise a flat slice."""
        is_matrix = self.is_whole and self.parameter.dim() > 1
        return self.parameter.shape if is_matrix else torch.Size([self.parameter.numel()])

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        """Its elements here, in the shape for its optimizer."""
        return flat.view(self.inside_shape) if self.is_whole and self.is_here else flat

    def require_same_kind(self) -> None:
        """Raises UsageError if the parameter now has another shape, dtype or device."""
        require_unmarked(self.name, self.parameter)
        data, whole = self.parameter.data, self.whole
        if (data.shape, data.dtype, data.device) != (whole.shape, whole.dtype, whole.device):
            refuse(
                f"'{self.name}' as it was: {whole.dtype} {tuple(whole.shape)} on {whole.device}",
                f"{data.dtype} {tuple(data.shape)} on {data.device}; make the Reducer and the "
                "optimizer after the model has changed",
            )

    @property
    def is_rounded(self) -> bool:
        """Whether the master has more bits than the parameter, and therefore is a state."""
        return self.parameter.dtype is not self.master_dtype

    @property
    def master_dtype(self) -> torch.dtype:
        """The dtype of master, gradient and states: float32, or a float64 or complex parameter's."""
        dtype = self.parameter.dtype
        return dtype if dtype is torch.float64 or dtype.is_complex else torch.float32

    @property
    def has_own_master(self) -> bool:
        """Whether the master has separate memory: the parameter is 16-bit, offloaded or released."""
        return self.offloaded or self.is_rounded or self.is_released

    def rounded(self) -> torch.Tensor:
        """If it is released: the slice in the parameter's dtype."""
        return self.stored.detach().to(self.parameter.dtype)

    @property
    def is_copied_to_store(self) -> bool:
        """If it is released: whether gathers read a rounded copy of the master."""
        return self.offloaded or self.is_part

    def arrive(self) -> None:
        """Does nothing: this rank alone updates it."""

    def take(self) -> None:
        """If it will be released: takes its first values from the parameter."""
        values = self.part_of(self.parameter.data)
        self.master.detach().view(-1).copy_(values)
        if self.is_copied_to_store:
            self.stored.copy_(values)

    def take_over(self, values: torch.Tensor, written: torch.Tensor | None = None) -> None:
        """If it is released: takes the slice's new values, in the parameter's dtype. Elements that were
        not `written`, or else those that equal the rounded master, keep the master's precision.
        """
        master = self.master.detach().reshape(-1)
        there = values.to(master.device)
        if self.is_copied_to_store:
            self.stored.copy_(chosen(written, values, self.stored))
        if written is None and self.is_rounded:
            written = differ(there, master.to(values.dtype))
        master.copy_(chosen(written, there.to(master.dtype), master))


class ShardSlice:
    """A shard rank's slice of a released parameter, of which each replica updates a part."""

    #: beside the part's master
    is_copied_to_store = True

    def __init__(self, part: ParameterSlice) -> None:
        self.name = part.name
        self.parameter = part.parameter
        self.reducer = part.reducer
        offset, count = part.reducer._handle.shard_slice(part.name)
        numbers = 2 if part.parameter.is_complex() else 1
        #: in elements of the parameter
        self.offset, self.count = offset // numbers, count // numbers
        self._part = part
        self.stored: torch.Tensor  # flat, of the parameter's dtype
        #: waits for the other replicas' parts
        self.arrive: Callable[[], None] = lambda: None

    def part_of(self, values: torch.Tensor) -> torch.Tensor:
        """The elements of the slice that this replica updates."""
        begin = self._part.offset - self.offset
        return values[begin : begin + self._part.count]

    def rounded(self) -> torch.Tensor:
        """The stored values, which have the parameter's dtype."""
        self.arrive()
        return self.stored

    def take(self) -> None:
        """Takes its first values from the parameter."""
        self._part.take()
        self.stored.copy_(flat_part(self.parameter.data, self.offset, self.count))

    def take_over(self, values: torch.Tensor, written: torch.Tensor | None = None) -> None:
        """As that of its part."""
        self.arrive()
        self._part.take_over(self.part_of(values), None if written is None else self.part_of(written))
        self.stored.copy_(chosen(written, values, self.stored))

    def store(self, stored: torch.Tensor) -> None:
        """Gives it and its part their memory."""
        self.stored = stored
        self._part.stored = self.part_of(stored)


def chosen(written: torch.Tensor | None, values: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """New values where they were written, None: everywhere."""
    return values if written is None else torch.where(written.to(values.device), values, old)


def memory_of(parameter: torch.Tensor) -> tuple[Any, ...]:
    """Changes when the memory or layout of a parameter does."""
    return parameter.data_ptr(), parameter.stride(), parameter.shape, parameter.dtype, parameter.is_conj()


def require_unmarked(name: str, parameter: torch.Tensor) -> None:
    """Raises UsageError if torch marks the tensor so that its memory differs from its values."""
    mark = mark_of(parameter)
    if mark is not None:
        refuse(
            f"'{name}' to have its values in memory",
            f"them {mark} by a mark; assign x.resolve_conj().resolve_neg()",
        )


def gather_whole(
    parts: Mapping[ParameterSlice, torch.Tensor],
) -> list[tuple[ParameterSlice, torch.Tensor]]:
    """Whole tensors from the ranks' parts. Collective: the same ones on every rank."""
    whole_of: dict[Reducer, dict[ParameterSlice, torch.Tensor]] = {}
    for one, part in parts.items():
        shape, device = one.parameter.shape, one.parameter.device
        whole = torch.empty(shape, dtype=part.dtype, device=device)
        one.part_of(whole).copy_(part.reshape(-1))
        whole_of.setdefault(one.reducer, {})[one] = whole
    result = []
    for reducer, wholes in whole_of.items():
        arrays = {one.name: _gathered(one, whole) for one, whole in wholes.items()}
        reducer.gather_parameters(arrays)
        for one, whole in wholes.items():
            array = arrays[one.name]
            whole = whole if array is whole else array[..., 0]
            result.append((one, whole.to(parts[one].device)))
    return result


# A state of a complex parameter may be real: the real view then has each value twice.
def _gathered(one: ParameterSlice, whole: torch.Tensor) -> torch.Tensor:
    is_of_parts = one.parameter.is_complex() and not whole.is_complex()
    return torch.stack((whole, whole), -1) if is_of_parts else whole


class SliceMasters:
    """Masters of all slices of one dtype. Offloaded masters are in pinned host memory, and so are their
    gradients.
    """

    def __init__(self, slices: list[ParameterSlice]) -> None:
        self.slices = slices
        self._counts = [one.count for one in slices]
        self._offloaded = slices[0].offloaded
        self._flat = self._empty(slices[0].master_dtype)
        for one, part in zip(slices, self._flat.split(self._counts), strict=True):
            one.master = torch.nn.Parameter(one.shaped(part))

    def _empty(self, dtype: torch.dtype) -> torch.Tensor:
        device = torch.device("cpu" if self._offloaded else self.slices[0].reducer.mesh.device)
        return torch.empty(
            sum(self._counts), dtype=dtype, device=device, pin_memory=self._offloaded
        )

    def offload_gradients(self) -> None:
        """Allocates gradients next to offloaded masters."""
        if self._offloaded:
            parts = self._empty(self._flat.dtype).split(self._counts)
            for one, part in zip(self.slices, parts, strict=True):
                one.master.grad = one.shaped(part)

    def fetch_gradients(self) -> None:
        """Called before an update."""
        if self._offloaded:
            grads: list[Any] = [one.master.grad for one in self.slices]
            private_torch.foreach_copy_(grads, [one.gradient for one in self.slices])

    def reread(self) -> None:
        """Takes over what others have written to the parameters."""

    def current(self) -> list[torch.Tensor]:
        """The values that `reread` would set; read-only. Does not change the masters."""
        return list(self._flat.split(self._counts))

    def lend(self, one: ParameterSlice) -> None:
        """Called before others may write to the master of `one`."""

    def mark_rounded(self) -> None:
        """Called when the parameters have the masters' values, or will get them from the gather."""

    def load_parameters(self) -> None:
        """Called before a gather of the masters' values. Copies them to where it reads, if that is elsewhere."""


class Masters(SliceMasters):
    """Masters of parameters that are not released. A digest of what they were rounded to tells whether
    others have written to the parameters since.

    [Note: which values others have written]
    """

    def __init__(self, slices: list[ParameterSlice]) -> None:
        super().__init__(slices)
        self._dtype = slices[0].own.dtype
        #: of masters that others may have written to: what they were rounded to
        self._lent: dict[ParameterSlice, torch.Tensor] = {}
        self._flat.copy_(self._read())
        self._wrote_both = torch.zeros((), dtype=torch.bool, device=self._flat.device)
        self._seen = torch.zeros_like(self._wrote_both, device="cpu", pin_memory=self._flat.is_cuda)
        self.mark_rounded()

    def _read(self) -> torch.Tensor:
        now = self._empty(self._dtype)
        private_torch.foreach_copy_(list(now.split(self._counts)), [one.own for one in self.slices])
        return now

    @property
    def _mesh(self) -> Any:
        return None if self._offloaded else self.slices[0].reducer.mesh._handle

    def _digest(self, values: torch.Tensor) -> torch.Tensor:
        digest = torch.zeros(1, dtype=torch.int64, device=values.device)
        _hsdp.add_digest(self._mesh, real_view(values), digest)
        return digest

    # Rounds as gathers do, and returns the digest of that. A shorter `rounded` gets one piece after the other.
    def _round(self, masters: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
        digest = torch.zeros(1, dtype=torch.int64, device=masters.device)
        _hsdp.add_rounded_digest(self._mesh, real_view(masters), real_view(rounded), digest)
        return digest

    def _parts(self, values: torch.Tensor) -> dict[ParameterSlice, torch.Tensor]:
        return dict(zip(self.slices, values.split(self._counts), strict=True))

    # The masters, with elements taken over that others have written to the parameters. Waits for no GPU.
    def _with_written(self) -> torch.Tensor:
        now = self._read()
        is_written = self._digest(now) != self._expected
        if not now.is_cuda and not is_written:
            return self._flat
        rounded = self._empty(self._dtype)
        digest = self._round(self._flat, rounded)
        if self._lent:
            parts = self._parts(rounded)
            for one, was in self._lent.items():
                parts[one].copy_(was)
            digest = self._digest(rounded)
        written = differ(now, rounded) & is_written
        self._wrote_both |= (written.any() & (digest != self._expected)).squeeze()
        self._seen.copy_(self._wrote_both, non_blocking=True)
        if self._seen:  # on a GPU that of an earlier step, so that nothing waits
            self._refuse_both(written)
        return torch.where(written, now.to(self._flat.dtype), self._flat)

    def require_known(self) -> None:
        """Raises UsageError if masters and parameters were written at once. Waits for a GPU."""
        if self._wrote_both:
            self._refuse_both()

    def _refuse_both(self, written: torch.Tensor | None = None) -> NoReturn:
        parts = {} if written is None or written.is_cuda else self._parts(written)
        named = [f"'{one.name}'" for one, part in parts.items() if part.any()]
        what = " and ".join([*named[:2], *(["others"] if len(named) > 2 else [])]) or "parameters"
        refuse(
            "masters to be written through optimizer.master(parameter) or load_state_dict()",
            f"masters that other code has written, and {what} written since the same step; write "
            "one of the two",
        )

    def reread(self) -> None:
        """Takes over elements written since they were rounded."""
        current = self._with_written()
        if current is not self._flat:
            self._flat.copy_(current)

    def current(self) -> list[torch.Tensor]:
        """Includes such elements."""
        return list(self._with_written().split(self._counts))

    def lend(self, one: ParameterSlice) -> None:
        """Keeps what the master was rounded to, until the next step."""
        if one in self.slices and one not in self._lent:
            master = one.master.detach().reshape(-1)
            self._lent[one] = torch.empty_like(master, dtype=self._dtype)
            self._round(master, self._lent[one])

    def mark_rounded(self) -> None:
        """Later writes are detected by comparison with this."""
        room = self._flat.numel() if self._flat.is_cuda else min(_CHUNK, self._flat.numel())
        self._mark(torch.empty(room, dtype=self._dtype, device=self._flat.device))

    def _mark(self, rounded: torch.Tensor) -> None:
        self._expected = self._round(self._flat, rounded)
        self._lent.clear()

    def load_parameters(self) -> None:
        """Gathers read the own slices."""
        if not self._offloaded:
            self.mark_rounded()
            return
        rounded = self._empty(self._dtype)
        self._mark(rounded)
        own = [one.own for one in self.slices]
        private_torch.foreach_copy_(own, list(rounded.split(self._counts)))


class KeptSlices:
    """Slices of parameters that stay whole, with their masters. Where nothing is rounded, a master is in
    the parameter's own memory, in place of which others may put another.
    """

    def __init__(self, slices: list[ParameterSlice]) -> None:
        self.slices = slices
        alike: dict[torch.dtype, list[ParameterSlice]] = {}
        for one in slices:
            if one.has_own_master:
                alike.setdefault(one.own.dtype, []).append(one)
            else:
                one.master = torch.nn.Parameter(one.shaped(one.own))
        self.masters = [Masters(its) for its in alike.values()]
        self._note_memory()

    def _note_memory(self) -> None:
        self._bound = [one.bound for one in self.slices]
        self._copied = [one for one in self.slices if one.is_copied]

    def bind_moved(self) -> list[ParameterSlice]:
        """Binds those to new memory whose parameters have it now, and returns them."""
        now = [memory_of(one.parameter) for one in self.slices]
        if self._bound == now:
            return []
        for one in self.slices:
            one.require_same_kind()
        moved = [one for one, memory in zip(self.slices, now, strict=True) if one.bound != memory]
        for one in moved:
            one.bind()
            if not one.has_own_master:
                one.master.data = one.shaped(one.own)
        self._note_memory()
        return moved

    def read_copied(self) -> None:
        """Reads parameters whose memory is not row-major."""
        for one in self._copied:
            one.whole.copy_(one.parameter.data)


class StoredMasters(SliceMasters):
    """Masters of released parameters, the only copy of their values. Gathers read them. If they are
    offloaded, or a part of a slice that is sharded over the mesh, gathers read their rounded values, which
    stay on the device. They are unset until `take` of each slice. A unit itself reports when it was written
    to.
    """

    def __init__(
        self, slices: list[ParameterSlice], shards: Mapping[ParameterSlice, ShardSlice]
    ) -> None:
        super().__init__(slices)
        counts = [shards[one].count if one.is_part else one.count for one in slices]
        stored = self._flat
        if slices[0].is_copied_to_store:
            first = slices[0]
            stored = torch.empty(
                sum(counts), dtype=first.parameter.dtype, device=first.reducer.mesh.device
            )
        for one, part in zip(slices, stored.split(counts), strict=True):
            if one.is_part:
                shards[one].store(part)
            else:
                one.stored = part

    def load_parameters(self) -> None:
        """Gathers read rounded copies of the masters."""
        if self.slices[0].is_copied_to_store:
            private_torch.foreach_copy_(
                [one.stored for one in self.slices], list(self._flat.split(self._counts))
            )
