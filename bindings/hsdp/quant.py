"""Quantized replica hops: fewer bits between replicas. docs/loco.md says when they pay."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

from hsdp import _hsdp
from hsdp.dtypes import DtypeLike, dtype_text, optional_dtype_text
from hsdp.errors import UsageError
from hsdp.options import Bits

__all__ = ["LocoHop", "QuantizationError"]


class QuantizationError(NamedTuple):
    """How much of its norm quantization changed in a parameter's gradient on this rank; 0.08 to 0.17 is
    usual with 4 bits.
    """

    #: what this replica sent
    scattered: float
    #: for the sums that this replica sent back to all; 0 if it sent none
    gathered: float


def _refuse(option: str, expected: str, got: object) -> NoReturn:
    raise UsageError(f"loco: {option}: expected {expected}, got {got!r}")


def _whole(option: str, value: Any, below: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        _refuse(option, "a whole number", value)
    if isinstance(value, bool) or not 0 <= number < below:
        _refuse(option, f"a whole number from 0 to below {below}", value)
    return number


def _number(option: str, value: Any) -> float:
    if isinstance(value, (str, bytes, bool)) or not hasattr(value, "__float__"):
        _refuse(option, "a number", value)
    return float(value)


def _flag(option: str, value: Any) -> bool:
    if not isinstance(value, bool) and type(value).__name__ not in ("bool", "bool_"):
        _refuse(option, "True or False", value)
    return bool(value)


def _patterns(exclude: Any) -> list[str]:
    if isinstance(exclude, str):
        return [exclude]
    if isinstance(exclude, Iterable):
        patterns = list(exclude)
        if all(isinstance(pattern, str) for pattern in patterns):
            return patterns
    _refuse("exclude", "names or patterns of parameters", exclude)


class LocoHop(_hsdp.LocoHop):
    """Sends 4 or 8 bits per element between replicas, and feeds the rounding error back.

        hop = hsdp.quant.LocoHop()
        reducer = hsdp.Reducer(mesh, replica_hop=hop)              # or, for an FSDP2 model:
        handle = hsdp.torch.replica_hook(model, mesh, hop)

    All ranks pass the same options. A hop belongs to one Reducer or replica_hook until that is closed.
    Every replica ends with the same bits. The method is LoCo (Xie et al., arXiv 2407.04480);
    DeepSpeed's options work: `LocoHop(**config["zeropp_loco_param"])`.

    - `bits`: of a code on the way to its owner: 4 or 8.
    - `group_size`: elements that share a scale, a multiple of 32 up to 4096.
    - `scale_dtype`: "bf16" or "f32".
    - `err_beta`: the weight of the old error, from 0 to below 1.
    - `reset_T`: reset the errors to zero every this many steps; 0: never.
    - `error_dtype`: how errors are stored: "int8" or "f32".
    - `gather`: format of the way back: "int4", "int8" or "bf16" (which keeps no error); None: as
      `bits`.
    - `error_feedback`: False quantizes without it.
    - `exclude`: parameters sent unquantized: names, or fnmatch patterns.
    - `plain_dtype`: the wire dtype of these; None: the Reducer's `replica_dtype`.
    - `warmup_steps`: in these first steps nothing is quantized.
    - `stochastic_error`, `seed`: round int8 errors stochastically.
    - `error_every`: steps between figures for `quantization_error`; 0: never.

    Raises UsageError for invalid options. Call its methods between steps: after reading the result of
    the last one or, with replica_hook, after `handle.finish()`.
    """

    def __init__(
        self,
        bits: Bits = 4,
        group_size: int = 64,
        scale_dtype: DtypeLike = "bf16",
        err_beta: float = 0.8,
        reset_T: int = 1024,  # noqa: N803 - DeepSpeed's name
        error_dtype: DtypeLike = "int8",
        gather: DtypeLike | None = None,
        error_feedback: bool = True,
        exclude: str | Iterable[str] = (),
        plain_dtype: DtypeLike | None = None,
        warmup_steps: int = 0,
        stochastic_error: bool = False,
        seed: int = 0,
        error_every: int = 16,
    ) -> None:
        super().__init__(
            _whole("bits", bits, 2**31),
            _whole("group_size", group_size, 2**31),
            dtype_text(scale_dtype),
            _number("err_beta", err_beta),
            _whole("reset_T", reset_T, 2**63),
            dtype_text(error_dtype),
            optional_dtype_text(gather),
            _flag("error_feedback", error_feedback),
            _patterns(exclude),
            optional_dtype_text(plain_dtype),
            _whole("warmup_steps", warmup_steps, 2**63),
            _flag("stochastic_error", stochastic_error),
            _whole("seed", seed, 2**64),
            _whole("error_every", error_every, 2**63),
        )

    def __repr__(self) -> str:
        return f"LocoHop({self.describe()})"

    @property
    def steps(self) -> int:
        """The number of clean steps so far: those that neither overflowed nor were dropped."""
        return self.steps_so_far()

    def scale_errors(self, factor: float) -> None:
        """Multiplies the errors by `factor`, at most 1 and the same on every rank.

        Call it when a step was clipped much harder than usual: otherwise the errors deliver the
        unclipped rest of the spike over the next steps. min(1, clip coefficient / its running mean) is
        a good factor.
        """
        self.scale(float(factor))

    def quantization_error(self) -> dict[str, QuantizationError]:
        """By parameter, for the last clean step in which it was measured, every `error_every` steps.

        The first one above 0.3 is also logged as a warning, once: exclude it, or use smaller groups.
        """
        return {
            name: QuantizationError(scattered, gathered)
            for name, scattered, gathered in self.errors_by_parameter()
        }

    def state_dict(self) -> dict[str, Any]:
        """This rank's errors, as copies in host memory: torch tensors if torch is imported, otherwise
        NumPy arrays. Empty before the Reducer is prepared, unless a state was loaded. With one
        replica there are no errors.

        Keys contain parameter, replica and place, so all ranks' errors can be saved together, for
        example with torch's DCP: `dcp.save({"hop": hop.state_dict()}, checkpoint_id=folder)`. int8
        codes are stored as uint8.
        """
        state = self.state()
        torch = sys.modules.get("torch")
        if torch is None:
            return state
        return {key: torch.from_numpy(array) for key, array in state.items()}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Restores errors; call it before the Reducer's first step, or between steps.

        With the same options, mesh and buckets, each rank loads its own and continues with the same
        bits. Otherwise it needs all ranks' errors together (a union of their dicts will do): a
        different number of replicas or shards, `group_size`, `error_dtype` or `err_beta` is converted
        so that what is owed survives. With `strict`, the parameters on both sides must match; otherwise
        new ones start from zero. Raises UsageError, and changes nothing, if the state does not fit; if
        it is loaded before the Reducer's first step, that may come as late as in this step.
        """
        self.load(dict(state), bool(strict))

    def state_dict_for(self, metadata: Any, prefix: str = "") -> dict[str, Any]:
        """Empty tensors for loading a checkpoint that ranks of any mesh have saved with DCP.

            saved = dcp.FileSystemReader(folder)
            state = {"hop": hop.state_dict_for(saved.read_metadata(), prefix="hop.")}
            dcp.load(state, storage_reader=saved)
            hop.load_state_dict(state["hop"])

        Contains what this rank needs once the Reducer is prepared; before that, everything. `prefix` is
        what DCP put before the keys.
        """
        import torch

        saved = {
            key.removeprefix(prefix): value
            for key, value in metadata.state_dict_metadata.items()
            if key.startswith(prefix)
        }
        if "steps" not in saved:
            raise UsageError(
                f"loco: state_dict_for: expected '{prefix}steps' among the checkpoint's keys, got "
                f"{len(metadata.state_dict_metadata)} others; give the prefix that it was saved with"
            )
        sizes = [(key, value.size.numel()) for key, value in saved.items()]
        return {
            key: torch.empty(saved[key].size, dtype=saved[key].properties.dtype)
            for key in self.keys_to_load(sizes)
        }
