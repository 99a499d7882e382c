"""Makes DistributedDataParallel raise if a Reducer takes the gradients of the model that it wraps."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from hsdp.errors import UsageError

# The number of attachments when a wrapper was last found to have nothing attached.
_cleared: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()


def guard_ddp(is_attached: Callable[[torch.Tensor], bool], attach_count: Callable[[], int]) -> None:
    """Installs the guard, once per process. It looks at parameters only if something was attached since
    the wrapper's last forward pass.
    """
    forward = DistributedDataParallel.forward

    @functools.wraps(forward)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and _cleared.get(self) != attach_count():
            _require_unattached(self, is_attached)
            _cleared[self] = attach_count()
        return forward(self, *args, **kwargs)

    DistributedDataParallel.forward = guarded


def _require_unattached(wrapper: Any, is_attached: Callable[[torch.Tensor], bool]) -> None:
    ignored = getattr(wrapper, "parameters_to_ignore", ())
    for name, parameter in wrapper.module.named_parameters():
        if name not in ignored and is_attached(parameter):
            raise UsageError(
                f"reducer: attach: expected a model that is not in DistributedDataParallel, got '{name}' "
                "both attached and in one, and both would reduce its gradient; call the model that it "
                "wraps, without DistributedDataParallel, or reducer.close() to leave it to that"
            )
