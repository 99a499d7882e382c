"""Names of element types, as every array library spells them."""

from __future__ import annotations

from typing import Any, TypeAlias

from hsdp.errors import UsageError

#: "f32", "bf16", "f16", "f64", "i64", "u8" or their long names, or the dtype of an array library:
#: `numpy.float32`, `torch.bfloat16`, `jax.numpy.float16`. Of parameters "complex64" and "complex128", too.
DtypeLike: TypeAlias = Any


def dtype_text(dtype: DtypeLike) -> str:
    """The dtype as text that the library parses: "float32" for `torch.float32` and the like."""
    if isinstance(dtype, str):
        return dtype
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None)
    if isinstance(name, str):
        return name
    return str(dtype).rpartition(".")[2]


# Of the real and the imaginary part.
_PARTS = {"complex64": "float32", "complex128": "float64"}


def registered(shape: tuple[int, ...], dtype: DtypeLike) -> tuple[tuple[int, ...], str, bool]:
    """Shape and dtype of a parameter as the library knows it, of a complex one those of its real view, and
    whether it is complex.
    """
    text = dtype_text(dtype)
    if text.startswith("complex") and text not in _PARTS:
        raise UsageError(f"reducer: register: dtype: expected complex64 or complex128, got {text}")
    return ((*shape, 2), _PARTS[text], True) if text in _PARTS else (shape, text, False)


def optional_dtype_text(dtype: DtypeLike | None) -> str | None:
    """As `dtype_text`, and None for None."""
    return None if dtype is None else dtype_text(dtype)


def wire_text(dtype: DtypeLike | None) -> str | None:
    """The short name of what can travel."""
    text = optional_dtype_text(dtype)
    return {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}.get(text or "", text)
