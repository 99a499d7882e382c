"""Buffers that follow those of rank 0, mostly running statistics.

[Note: buffers follow rank 0]
"""

from __future__ import annotations

import base64
import contextlib
import weakref
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from hsdp.errors import Error, MismatchError, StepAbortedError, UsageError
from hsdp.line_agreement import digest_of, first_difference
from hsdp.mesh import Mesh
from hsdp.torch import private_torch
from hsdp.torch.attach.trainable_parameters import is_dtensor
from hsdp.torch.value_digests import row_major_bytes, value_digests

_MESSAGE_BYTES = 24 << 10  # fits in a control message for many ranks
_FAULT = "!"
_ACT = "copy buffers of rank 0"  # what other ranks' errors say


class _Place(NamedTuple):
    name: str
    owner: weakref.ref[torch.nn.Module]
    key: str

    @property
    def module(self) -> torch.nn.Module | None:
        """The module that has the buffer, while it lives."""
        return self.owner()

    @property
    def tensor(self) -> torch.Tensor | None:
        """The current buffer, if it has values that can be copied."""
        found = getattr(self.module, self.key, None)
        if found is None or is_dtensor(found) or found.is_inference():
            return None
        is_plain = found.layout is torch.strided and not (found.is_meta or found.is_quantized)
        return found if is_plain and found.numel() > 0 else None

    @property
    def of_norm(self) -> bool:
        """Whether F.batch_norm may write to it, which does not change its version."""
        module = self.module
        return module is not None and "running_mean" in private_torch.buffers_of(module)

    @property
    def state(self) -> tuple[Any, ...] | None:
        """Changes when the buffer is written to or replaced."""
        tensor = self.tensor
        return None if tensor is None else (tensor.data_ptr(), private_torch.version(tensor))


class BufferSync:
    """Copies rank 0's buffers to all ranks if any rank's have changed. Covers the buffers that the
    model has at construction, except those named in `without`.
    """

    def __init__(self, mesh: Mesh, model: torch.nn.Module, without: Collection[str]) -> None:
        self._mesh = mesh
        self._places = list(_places(model, without))
        self._seen: list[Any] | None = None  # their states when they were last equal on all ranks
        self._layout = ""

    @property
    def is_needed(self) -> bool:
        """Whether there are buffers to keep equal."""
        return bool(self._places)

    def description(self) -> list[str]:
        """Lines that must be the same on every rank."""
        return [f"buffer '{place.name}'" for place in self._places]

    def synchronise(self, trained: bool) -> None:
        """Collective, once per step. Sends one short message if nothing has changed. Copies from the
        first rank that has `trained` since, as some may not have in a loop of `hsdp.uneven`.
        """
        world = self._mesh.world
        try:
            word = f"{self._word()} {int(trained)}"
        except BaseException as error:  # the others wait for this rank's word
            with contextlib.suppress(Error):
                world._handle.exchange(f"{_FAULT}{error or type(error).__name__}", _ACT)
            raise
        words = world._handle.exchange(word, _ACT)
        for place, other in enumerate(words):
            if other.startswith(_FAULT):
                rank = world.ranks[place]
                raise StepAbortedError(
                    f"reducer: buffers: rank {rank} could not look at its own: {other[1:]}", [rank]
                )
        parts = [other.split() for other in words]
        if any(part[1] != parts[0][1] for part in parts):
            self._refuse_layout()
        if self._seen is None:  # the first parts are digests
            is_same = all(part[0] == parts[0][0] for part in parts)
            changed = [] if is_same else [p for p in self._places if p.tensor is not None]
        else:
            mask = 0
            for part in parts:
                mask |= int(part[0], 16)
            changed = [place for i, place in enumerate(self._places) if mask >> i & 1]
        if changed:
            with torch.no_grad():
                self._copy(changed, next((i for i, part in enumerate(parts) if part[2] == "1"), 0))
        self._seen = [place.state for place in self._places]

    # This rank's layout of buffers, and which have changed; the first time, their values.
    def _word(self) -> str:
        if self._seen is None:
            tensors = [p.tensor for p in self._places]
            digests = value_digests([tensor for tensor in tensors if tensor is not None])
            self._note_layout()
            return f"{digest_of(digests)} {self._layout}"
        now = [place.state for place in self._places]
        if now == self._seen and not any(map(_is_unseen, self._places)):
            return f"0 {self._layout}"
        # A write by F.batch_norm shows in the counter beside the buffer.
        modules = {
            id(place.module)
            for place, state, seen in zip(self._places, now, self._seen, strict=True)
            if state != seen or _is_unseen(place)
        }
        mask = 0
        for i, (place, state) in enumerate(zip(self._places, now, strict=True)):
            if state is not None and id(place.module) in modules:
                mask |= 1 << i
        self._note_layout()
        return f"{mask:x} {self._layout}"

    def _layout_lines(self) -> list[str]:
        lines = []
        for place in self._places:
            found = place.tensor
            what = "none that can be copied" if found is None else f"{tuple(found.shape)} {found.dtype}"
            lines.append(f"'{place.name}': {what}")
        return lines

    def _note_layout(self) -> None:
        self._layout = digest_of(self._layout_lines())

    def _refuse_layout(self) -> None:
        world = self._mesh.world
        difference = first_difference(world, self._layout_lines(), _ACT)
        if difference is None:
            return
        place = difference.places[0]
        raise MismatchError(
            f"reducer: buffers: expected the same on every rank, got {difference.lines[0]} on rank "
            f"{world.ranks[0]} and {difference.lines[place]} on rank {world.ranks[place]}; a buffer "
            "that ranks need not have alike is left out with attach(model, broadcast_buffers=[names])",
            [world.ranks[place] for place in difference.places],
        )

    def _copy(self, changed: Sequence[_Place], root: int) -> None:
        tensors = [place.tensor for place in changed]
        own = [row_major_bytes(tensor) for tensor in tensors if tensor is not None]
        data = torch.cat([one.to(self._mesh.device) for one in own])
        data = self._broadcast(data, root)
        if self._mesh.rank == root:
            return
        offset = 0
        for place, tensor in zip(changed, tensors, strict=True):
            if tensor is None:
                continue
            count = tensor.numel() * tensor.element_size()
            values = data[offset : offset + count].to(tensor.device).clone().view(tensor.dtype)
            offset += count
            # Write like F.batch_norm: a graph recorded before may still run backward.
            target = tensor.data if place.of_norm else tensor.detach()
            target.copy_(values.view(tensor.shape))

    # On a GPU, sends messages: a collective here would have no place in the order of those of other
    # Reducers and gathers [Note: one order for all collectives].
    def _broadcast(self, data: torch.Tensor, root: int) -> torch.Tensor:
        world = self._mesh.world
        if data.is_cpu:
            return world.broadcast(data, root)
        return _broadcast_by_messages(self._mesh, data, root)


def _broadcast_by_messages(mesh: Mesh, data: torch.Tensor, root: int) -> torch.Tensor:
    exchange = mesh.world._handle.exchange
    whole = bytes(data.cpu().numpy()) if mesh.rank == root else b""
    parts = []
    for begin in range(0, data.numel(), _MESSAGE_BYTES):
        part = whole[begin : begin + _MESSAGE_BYTES]
        parts.append(base64.b64decode(exchange(base64.b64encode(part).decode(), _ACT)[root]))
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8).to(data.device)


# Has statistics for F.batch_norm, but no counter beside them.
def _is_unseen(place: _Place) -> bool:
    return place.of_norm and getattr(place.module, "num_batches_tracked", None) is None


def _places(model: torch.nn.Module, without: Collection[str]) -> Iterable[_Place]:
    if isinstance(without, str) or not isinstance(without, Collection):
        raise UsageError(
            "reducer: attach: broadcast_buffers: expected True, False or names of buffers to leave "
            f"out, got {without!r}"
        )
    found: dict[int, _Place] = {}
    names = set()
    for prefix, module in model.named_modules():
        for key, buffer in private_torch.buffers_of(module).items():
            name = f"{prefix}.{key}" if prefix else key
            names.add(name)
            if buffer is not None and name not in without:
                found.setdefault(id(buffer), _Place(name, weakref.ref(module), key))
    for name in without:
        if name not in names:
            raise UsageError(
                f"reducer: attach: broadcast_buffers: expected names of buffers to leave out, got "
                f"{name!r}, which {type(model).__name__} does not have; model.named_buffers() has them"
            )
    return found.values()
