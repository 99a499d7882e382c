"""The plain hop between replicas; `hsdp.quant` has another."""

from __future__ import annotations

from hsdp import _hsdp
from hsdp.dtypes import DtypeLike, wire_text


class PlainHop(_hsdp.PlainHop):
    """The all-reduce over the replicas in one dtype, summed in fp32: PlainHop("f32"), "bf16" or "f16".
    PlainHop() uses the shard group's wire dtype.
    """

    def __init__(self, dtype: DtypeLike | None = None) -> None:
        super().__init__(wire_text(dtype))

    def __repr__(self) -> str:
        return f"PlainHop({self.dtype!r})" if self.dtype else "PlainHop()"
