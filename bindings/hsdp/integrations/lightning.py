"""A strategy for Lightning's Trainer that reduces gradients with hsdp."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

try:
    from lightning.pytorch.strategies import DDPStrategy
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "hsdp.integrations.lightning: expected the package lightning, got no "
        f"{error.name}; install it with pip install 'lightning>=2.6,<2.7'",
        name=error.name,
    ) from error

import torch
from torch.distributed.constants import default_pg_timeout

import hsdp
from hsdp.errors import UsageError
from hsdp.integrations.trained_model import TrainedModel

__all__ = ["HsdpStrategy"]

_WHO = "HsdpStrategy"


class HsdpStrategy(DDPStrategy):
    """Lightning's DDPStrategy, but hsdp reduces the gradients of `fit()`.

        trainer = lightning.Trainer(strategy=HsdpStrategy(replicate=2, shard=4), devices=8)

    - `replicate`, `shard`: the mesh. Either one determines the other; without both, the ranks of a host
      share gradients and hosts are replicas.
    - `mesh`: an `hsdp.Mesh` to use instead, which `fit()` leaves open.
    - `reducer_options`: options of `hsdp.Reducer`, such as `{"reduce_dtype": "bf16"}`.

    Other arguments are DDPStrategy's; of those for DistributedDataParallel, `find_unused_parameters`
    and `broadcast_buffers` are supported. `fit()` makes a Reducer at its start and closes it at its
    end. Raises UsageError for features without a counterpart here, including manual optimization.
    """

    def __init__(
        self,
        replicate: int | None = None,
        shard: int | None = None,
        mesh: Any = None,
        reducer_options: Mapping[str, Any] | None = None,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
        **kwargs: Any,
    ) -> None:
        self._hsdp = TrainedModel(_WHO, replicate, shard, mesh, reducer_options)
        self._find_unused_parameters = find_unused_parameters
        self._broadcast_buffers = broadcast_buffers
        self._syncs = True
        self._in_microbatch = False
        super().__init__(**kwargs)
        if self._ddp_kwargs:
            raise UsageError(
                f"{_WHO}: expected find_unused_parameters or broadcast_buffers of "
                f"DistributedDataParallel's arguments, got {', '.join(sorted(self._ddp_kwargs))}; "
                "options of hsdp.Reducer go into reducer_options"
            )
        if self._ddp_comm_hook is not None or self._ddp_comm_state is not None:
            raise UsageError(
                f"{_WHO}: expected no ddp_comm_hook and no ddp_comm_state, got one; pass "
                'reducer_options={"reduce_dtype": "bf16"}, or a "replica_hop"'
            )

    @property
    def reducer(self) -> hsdp.Reducer | None:
        """The Reducer of the current or last `fit()`; None before the first."""
        return self._hsdp.reducer

    def configure_ddp(self) -> None:
        """Attaches the model to a Reducer, where DDPStrategy would wrap it."""
        module = self.lightning_module
        assert module is not None
        if not module.automatic_optimization:
            raise UsageError(
                f"{_WHO}: expected automatic optimization, got automatic_optimization=False in "
                f"{type(module).__name__}; which of its backward passes ends a step is not known "
                "here. Use DDPStrategy, or hsdp.Reducer in a loop of your own"
            )
        self._syncs, self._in_microbatch = True, False
        self._hsdp.open(
            module,
            self.root_device,
            timeout_s=(self._timeout or default_pg_timeout).total_seconds(),
            find_unused_parameters=self._find_unused_parameters,
            broadcast_buffers=self._broadcast_buffers,
        )

    # Lightning calls it around batches that do not end a step.
    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulates the batches within."""
        self._syncs = False
        try:
            yield
        finally:
            self._syncs = True

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Like DDPStrategy's, but begins a microbatch."""
        reducer = self._hsdp.opened()
        # Begin before the forward pass, for buffers. If a backward pass was skipped, one is still open.
        if not self._in_microbatch:
            reducer.begin_microbatch(last=self._syncs)
            self._in_microbatch = True
        return super().training_step(*args, **kwargs)

    def post_backward(self, closure_loss: Any) -> None:
        """Ends the microbatch; after a step's last one `p.grad` holds the mean."""
        reducer = self._hsdp.opened()
        self._in_microbatch = False
        reducer.end_microbatch()
        if self._syncs:
            reducer.gather_gradients()

    def on_validation_start(self) -> None:
        """Validates with rank 0's buffers, like DDPStrategy."""
        super().on_validation_start()
        if self._broadcast_buffers and self.lightning_module is not None and self._hsdp.is_open:
            buffers = torch.nn.Module()
            for i, buffer in enumerate(self.lightning_module.buffers()):
                buffers.register_buffer(str(i), buffer)
            hsdp.broadcast_parameters(self._hsdp.opened().mesh, buffers)

    def on_exception(self, exception: BaseException) -> None:
        """Drops the step on all ranks, so that none waits for this one."""
        self._hsdp.close(exception)

    def teardown(self) -> None:
        """See DDPStrategy."""
        self._hsdp.close()
        super().teardown()
