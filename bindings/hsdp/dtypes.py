"""Names of element types, as every array library spells them."""

from __future__ import annotations

from typing import Any, TypeAlias

#: "f32", "bf16", "f16", "f64", "i64", "u8" or their long names, or the dtype of an array library:
#: `numpy.float32`, `torch.bfloat16`, `jax.numpy.float16`.
DtypeLike: TypeAlias = Any


def dtype_text(dtype: DtypeLike) -> str:
    """The dtype as text that the library parses: "float32" for `torch.float32` and the like."""
    if isinstance(dtype, str):
        return dtype
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None)
    if isinstance(name, str):
        return name
    return str(dtype).rpartition(".")[2]


def optional_dtype_text(dtype: DtypeLike | None) -> str | None:
    """As `dtype_text`, and None for None."""
    return None if dtype is None else dtype_text(dtype)


def wire_text(dtype: DtypeLike | None) -> str | None:
    """The short name of what can travel."""
    text = optional_dtype_text(dtype)
    return {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}.get(text or "", text)
