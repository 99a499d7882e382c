"""The Reducer and mesh of a model that another library's loop trains."""

from __future__ import annotations

import collections
import socket
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

import hsdp
from hsdp.errors import UsageError, reason_of
from hsdp.mesh import as_mesh
from hsdp.open_reducers import GRACE_S, leave


class TrainedModel:
    """Opens a Reducer when training begins and closes it at the end. May be opened again.

    `who` is the prefix of its errors. The other arguments come from the user: `replicate` and `shard`,
    or a mesh, which stays open, and options of `hsdp.Reducer`.
    """

    def __init__(
        self,
        who: str,
        replicate: int | None,
        shard: int | None,
        mesh: Any,
        reducer_options: Mapping[str, Any] | None,
    ) -> None:
        self._who = who
        self._shape = (replicate, shard)
        self._mesh = mesh
        self._options = dict(reducer_options or {})
        self._own_mesh: hsdp.Mesh | None = None
        self.reducer: hsdp.Reducer | None = None
        if mesh is not None and self._shape != (None, None):
            raise UsageError(
                f"{who}: expected a mesh, or replicate= and shard=, got both; leave one out"
            )
        if self._options.get("divide_by", "ranks") != "ranks":
            raise UsageError(
                f"{who}: expected divide_by='ranks', as the loss is divided by the microbatches "
                f"already, got {self._options['divide_by']!r}; leave it out"
            )

    def open(
        self,
        model: torch.nn.Module,
        device: torch.device,
        timeout_s: float,
        find_unused_parameters: bool,
        broadcast_buffers: bool,
    ) -> None:
        """Gives the ranks the same weights and attaches the model. Collective."""
        self.close()
        if self._mesh is None:
            mesh = self._own_mesh = self._open_mesh(device, timeout_s)
        else:
            mesh = as_mesh(self._mesh, f"{self._who}: mesh", "make it with hsdp.init_mesh(replicate=, shard=)")
            if mesh.size != _world_size():
                raise UsageError(
                    f"{self._who}: expected a mesh of all {_world_size()} processes, got one of "
                    f"{mesh.size}; make it with hsdp.init_mesh(replicate=, shard=)"
                )
        missing = "zero" if find_unused_parameters else "error"
        self.reducer = hsdp.Reducer(mesh, **{"missing": missing, **self._options})
        hsdp.broadcast_parameters(mesh, model)
        self.reducer.attach(model, broadcast_buffers=broadcast_buffers)

    @property
    def is_open(self) -> bool:
        """Whether there is a Reducer to train with."""
        return self.reducer is not None and not self.reducer.closed

    def opened(self) -> hsdp.Reducer:
        """The Reducer if it is open; otherwise raises UsageError."""
        if self.reducer is None or self.reducer.closed:
            raise UsageError(
                f"{self._who}: expected a training step within training, got one before it was set "
                "up; call super() in methods that override those of the class"
            )
        return self.reducer

    def close(self, error: BaseException | None = None) -> None:
        """Drops what is pending. Safe to call twice; `reducer.stats()` still works afterwards.

        `error`: what ends the training on this rank. If others cannot hear of it, because they wait for this rank in
        torch.distributed, the mesh ends; a mesh that the user passed stays open.
        """
        if error is not None and self.is_open:
            reason = reason_of("training raised", error)
            if self._own_mesh is not None:
                leave(self.opened(), reason, GRACE_S)
            else:
                self.opened().abandon_step(reason)
        if self.reducer is not None:
            self.reducer.close()
        if self._own_mesh is not None:
            self._own_mesh.close()
            self._own_mesh = None

    def _open_mesh(self, device: torch.device, timeout_s: float) -> hsdp.Mesh:
        replicate, shard = self._shape
        size = _world_size()
        if shard is None:
            shard = self._ranks_of_a_host() if replicate is None else max(1, size // replicate)
        if replicate is None:
            replicate = max(1, size // shard)
        return hsdp.init_mesh(replicate, shard, device=device, timeout_s=timeout_s)

    def _ranks_of_a_host(self) -> int:
        if _world_size() == 1:
            return 1
        hosts: list[Any] = [None] * _world_size()
        dist.all_gather_object(hosts, socket.gethostname())
        counts = collections.Counter(hosts)
        if len(set(counts.values())) != 1:
            told = ", ".join(f"{count} on {host}" for host, count in counts.items())
            raise UsageError(
                f"{self._who}: expected equally many processes on each host, got {told}; say the "
                "mesh's shape with replicate= and shard="
            )
        return counts[hosts[0]]


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
