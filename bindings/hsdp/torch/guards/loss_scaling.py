"""Teaches torch's GradScaler about attached parameters: whose gradients carry its scale, and to unscale
shards with p.grad. Applies to the whole process, once one scales beside an attached model. `GradScaler`
also has the same verdict on every rank.

[Note: one verdict for a loss scale] [Note: gradients that are not what they seem]
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch.amp.grad_scaler import OptState

from hsdp.errors import UsageError
from hsdp.named_errors import naming
from hsdp.reducer import Reducer
from hsdp.torch import private_torch
from hsdp.torch.complex_values import real_view
from hsdp.torch.guards.unreduced_gradient_guard import require_gradients
from hsdp.torch.guards.watched_gradients import WatchedGradients, attached_names, owner_of, watched

_CALLER = "GradScaler.unscale_"
_torch_scale = torch.amp.GradScaler.scale

#: what torch's scaler keeps for an optimizer: 1 by device if it found an infinity
Found: TypeAlias = "dict[torch.device, torch.Tensor]"
_Slices: TypeAlias = dict[WatchedGradients, dict[torch.Tensor, str]]


def merged(founds: Iterable[Found]) -> Found:
    """The union of what they found."""
    result: Found = {}
    for found in founds:
        for device, flag in found.items():
            result[device] = torch.maximum(result[device], flag) if device in result else flag
    return result


def unscale_result(
    attachment: WatchedGradients,
    names: Collection[str],
    inverse_scale: torch.Tensor,
    done: Collection[int] = (),
) -> None:
    """Divides the shards of these parameters, and their p.grad, by a GradScaler's scale, unless the
    Reducer already has. `done` are addresses that the scaler has unscaled.
    """
    shards = [attachment.shard(name) for name in names]
    grads = [g for name in names if (g := attachment.gradient_of(name)) is not None]
    factor = inverse_scale * attachment.result.loss_scale
    if attachment.holds_local_sums:
        _multiply(grads, inverse_scale, done)
    else:
        shards += grads
    if attachment.result.loss_scale == 1.0 or float(factor) != 1.0:
        _multiply(shards, factor, done)
    attachment.result.unscaled.update(names)


# Each once: p.grad may be a shard's memory.
def _multiply(tensors: list[torch.Tensor], factor: torch.Tensor, done: Collection[int]) -> None:
    left = {t.data_ptr(): t for t in tensors if t.data_ptr() not in done}
    if left:
        listed = list(left.values())
        private_torch.foreach_mul_(listed, factor.to(listed[0].device))


def require_scaled(attachment: WatchedGradients, names: Iterable[str]) -> None:
    """Raises UsageError if there is nothing to unscale."""
    if not attachment.has_result():
        raise UsageError(
            f"{_CALLER}: expected a step that is over, got one that is not; end it with last=True "
            "or reducer.finish() before"
        )
    again = next((name for name in names if name in attachment.result.unscaled), None)
    if again is not None:
        raise UsageError(
            f"{_CALLER}: expected gradients that carry the scale, got that of '{again}' unscaled "
            "already; unscale each parameter once a step, through one optimizer and one scaler"
        )


def _scale(self: torch.amp.GradScaler, outputs: Any) -> Any:
    scaled = _torch_scale(self, outputs)
    if watched and private_torch.is_enabled(self) and not torch.compiler.is_compiling():
        take_over_unscaling()
        _note(self, scaled)
    return scaled


def guard_scale() -> None:
    """Notes the scale of the losses that GradScalers scale."""
    torch.amp.GradScaler.scale = _scale


@functools.cache
def take_over_unscaling() -> None:
    """Installs the changes. Raises UsageError if this torch divides gradients in an unknown way."""
    _ = private_torch.unscale_grads  # torch's own
    private_torch.set_unscale_grads(_unscale_grads)


# Counts for the microbatch whose backward pass starts from this loss, not the one open now.
def _note(self: torch.amp.GradScaler, scaled: Any) -> None:
    if isinstance(scaled, (list, tuple)):
        for one in scaled:
            _note(self, one)
    elif isinstance(scaled, torch.Tensor):
        if scaled.requires_grad:
            scaled.register_hook(lambda _: _mark(self))
        else:  # the start of a backward pass
            _mark(self)


def _mark(scaler: Any) -> None:
    for attachment in list(watched):
        if attachment.is_collecting():
            attachment.result.scale = private_torch.scale_of(scaler).clone()  # update() changes it


def _unscale_grads(
    self: torch.amp.GradScaler,
    optimizer: torch.optim.Optimizer,
    inv_scale: torch.Tensor,
    found_inf: torch.Tensor,
    allow_fp16: bool,
) -> Found:
    unscale = getattr(optimizer, "_unscale_shards", None)
    if unscale is not None:
        return {found_inf.device: unscale(inv_scale).to(found_inf)}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    attached, slices = attached_names(parameters), _slices_among(parameters)
    if not attached and not slices:
        found: Found = private_torch.unscale_grads(self, optimizer, inv_scale, found_inf, allow_fp16)
        return found
    takes_shards = bool(getattr(optimizer, "takes_shards", False))
    if not takes_shards:
        require_gradients(_CALLER, parameters)
    results = [*attached.items(), *((attachment, [*of.values()]) for attachment, of in slices.items())]
    for attachment, names in results:
        with naming(attachment.who):
            require_scaled(attachment, names)
    # A fused optimizer divides by the scale itself, and only knows the whole scale.
    only_looks = allow_fp16
    if only_looks and any(attachment.result.loss_scale != 1.0 for attachment, _ in results):
        only_looks = False
        inv_scale = private_torch.scale_of(self).double().reciprocal().float()
        private_torch.optimizer_state(self, optimizer)["stage"] = OptState.UNSCALED
    founds = []
    done: set[int] = set()
    for divisor, part in _by_divisor(parameters, slices, takes_shards).items():
        inverse = inv_scale if only_looks else inv_scale * divisor
        of_torch: Any = SimpleNamespace(param_groups=[{"params": [_real(p) for p in part]}])
        founds.append(
            private_torch.unscale_grads(self, of_torch, inverse, found_inf.clone(), allow_fp16)
        )
        done.update(p.grad.data_ptr() for p in part if p.grad is not None)
    if not only_looks:
        for attachment, names in results:
            unscale_result(attachment, names, inv_scale, done)
    founds += [{found_inf.device: a.found_inf_tensor(found_inf.device)} for a in attached]
    return merged(founds)


# Torch cannot unscale complex gradients with one kernel.
def _real(parameter: torch.Tensor) -> torch.Tensor:
    if not parameter.is_complex():
        return parameter
    real = real_view(parameter.detach())
    if parameter.grad is not None:
        if parameter.grad.is_conj():
            parameter.grad = parameter.grad.resolve_conj()
        real.grad = real_view(parameter.grad)
    return real


# Groups parameters by what a Reducer has already divided their p.grad by.
def _by_divisor(
    parameters: Iterable[torch.Tensor], slices: _Slices, takes_shards: bool
) -> dict[float, list[torch.Tensor]]:
    parts: dict[float, list[torch.Tensor]] = {}
    for parameter in parameters:
        owner = owner_of(parameter)
        divisor = 1.0
        if owner is not None:
            if takes_shards:
                continue
            if not owner.holds_local_sums:
                divisor = owner.result.loss_scale
        else:
            for attachment, names in slices.items():
                if parameter in names:
                    divisor = attachment.result.loss_scale
        parts.setdefault(divisor, []).append(parameter)
    return parts


# The parameters of optimizers with their own slices, whose .grad is the shard, and their names.
def _slices_among(parameters: Iterable[torch.Tensor]) -> _Slices:
    attachments = [a for a in list(watched) if a.has_result()]
    of_address = {
        p.grad.data_ptr(): p
        for p in (parameters if attachments else ())
        if p.grad is not None and p.grad.numel() > 0 and owner_of(p) is None
    }
    found: _Slices = {}
    for attachment in attachments if of_address else ():
        shards = [(name, attachment.shard(name)) for name in attachment.parameter_names()]
        names = {of_address[s.data_ptr()]: n for n, s in shards if s.data_ptr() in of_address}
        if names:
            found[attachment] = names
    return found


class GradScaler(torch.amp.GradScaler):
    """torch's GradScaler, but a step is skipped on all ranks or on none.

        scaler = hsdp.torch.GradScaler(reducer, device="cpu")
        with reducer.microbatch(last=True):
            scaler.scale(loss).backward()
        reducer.gather_gradients()
        scaler.unscale_(optimizer)  # where something is clipped
        reducer.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()

    For optimizers that hold attached parameters, torch's own GradScaler does the same: an infinity or
    NaN that any rank saw in the step (`reducer.found_inf`) counts on every rank, and `unscale_` divides
    the shards as well as p.grad. This class applies what its Reducer saw to every optimizer, including
    one that holds its own slices.

    - `unscale_` comes after `gather_gradients`. Local sums (`keep_grads=True`) and optimizers that take
      shards, such as `hsdp.zero.ShardedOptimizer`, do not need a gather.
    - `reducer.set_loss_scale(scaler.get_scale())` before a step saves the unscaling pass, and clipping
      then needs no `unscale_`; nothing is divided twice.
    - Clipping, or stepping, that would mistake scaled gradients for unscaled ones raises UsageError.

    Every rank calls `step`, `unscale_` and `update`. Other arguments are those of torch.amp.GradScaler.
    """

    def __init__(self, reducer: Reducer, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        take_over_unscaling()
        self._reducer = reducer

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> Found:
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        word = self._reducer.found_inf_tensor().to(found_inf.device, non_blocking=True)
        return merged([found, {found_inf.device: word}])
