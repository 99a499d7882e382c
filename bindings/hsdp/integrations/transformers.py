"""A transformers.Trainer that reduces gradients with hsdp instead of DistributedDataParallel."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

try:
    import accelerate  # noqa: F401 - without it transformers has no Trainer
    import transformers
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "hsdp.integrations.transformers: expected the packages transformers and accelerate, got no "
        f"{error.name}; install them with "
        "pip install 'accelerate>=1.15,<1.16' 'transformers>=5.23,<5.25'",
        name=error.name,
    ) from error

import hsdp
from hsdp.errors import UsageError
from hsdp.integrations.trained_model import TrainedModel

__all__ = ["HsdpTrainer"]

_WHO = "HsdpTrainer"


class HsdpTrainer(transformers.Trainer):
    """transformers.Trainer, but hsdp reduces the gradients of `train()`.

        trainer = HsdpTrainer(model, args, train_dataset=data, replicate=2, shard=4)

    It also works in front of your own Trainer: `class Mine(HsdpTrainer, MyTrainer): ...`.

    - `replicate`, `shard`: the mesh. Either one determines the other; without both, the ranks of a host
      share gradients and hosts are replicas.
    - `mesh`: an `hsdp.Mesh` to use instead, which `train()` leaves open.
    - `reducer_options`: options of `hsdp.Reducer`, such as `{"reduce_dtype": "bf16"}`. `missing` is
      "zero" where Trainer would let DistributedDataParallel find unused parameters.

    All other arguments are Trainer's. `train()` makes a Reducer at its start and closes it at its end.
    Raises UsageError for arguments that distribute the model in another way.
    """

    def __init__(
        self,
        *args: Any,
        replicate: int | None = None,
        shard: int | None = None,
        mesh: Any = None,
        reducer_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._hsdp = TrainedModel(_WHO, replicate, shard, mesh, reducer_options)
        super().__init__(*args, **kwargs)
        self._require_data_parallel()

    @property
    def reducer(self) -> hsdp.Reducer | None:
        """The Reducer of the current or last `train()`; None before the first."""
        return self._hsdp.reducer

    def create_accelerator_and_postprocess(self) -> None:
        """See Trainer."""
        super().create_accelerator_and_postprocess()
        # With evaluation_mode, a model gets autocast and torch.compile, but no DistributedDataParallel.
        prepare_model: Any = functools.partial(self.accelerator.prepare_model, evaluation_mode=True)
        self.accelerator.prepare_model = prepare_model

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """See Trainer."""
        try:
            return super().train(*args, **kwargs)
        except BaseException as error:
            self._hsdp.close(error)
            raise
        finally:
            self._hsdp.close()
            # Otherwise accelerate considers it prepared, and a Trainer without hsdp would omit DDP.
            setattr(self.model, "_is_accelerate_prepared", False)  # noqa: B010 - None for checkers

    # After loading the weights of a checkpoint, before the first batch.
    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **kwargs)
        model: Any = self.model
        ddp: Any = self.accelerator.ddp_handler
        self._hsdp.open(
            model,
            self.args.device,
            timeout_s=float(self.args.ddp_timeout),
            find_unused_parameters=ddp.find_unused_parameters,
            broadcast_buffers=ddp.broadcast_buffers,
        )
        return prepared

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Like Trainer's, within a microbatch of the Reducer."""
        reducer = self._hsdp.opened()
        last = self.accelerator.sync_gradients
        with reducer.microbatch(last=last):
            loss = super().training_step(*args, **kwargs)
        if last:
            reducer.gather_gradients()
        return loss

    def _require_data_parallel(self) -> None:
        kind = self.accelerator.distributed_type.value
        others = [name for name in ("fsdp", "deepspeed") if getattr(self.args, name, None)]
        if others:  # accelerate ignores these on CPUs
            what = f"{others[0]} in the arguments"
        elif kind not in ("NO", "MULTI_CPU", "MULTI_GPU"):
            what = f"accelerate's distributed type {kind}"
        elif self.args.n_gpu > 1:
            what = f"one with {self.args.n_gpu} GPUs (DataParallel)"
        elif getattr(self.accelerator, "parallelism_config", None) is not None:
            what = "a parallelism_config"
        elif getattr(self, "is_distributed_loading_by_transformers", False):
            what = "a model that from_pretrained has spread over the processes"
        else:
            return
        raise UsageError(
            f"{_WHO}: expected whole models in one process per device, got {what}; leave fsdp, "
            "deepspeed and parallelism_config out of the arguments and of accelerate's config, and "
            "start one process per device, as torchrun does"
        )
