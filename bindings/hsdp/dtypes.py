"""Names of element types, as array libraries spell them."""

from __future__ import annotations

from typing import Any, TypeAlias

from hsdp.errors import UsageError

#: "f32", "bf16", "f16", "f64", "i64", "u8" or their long names, or an array library's dtype, such as `numpy.float32` or
#: `torch.bfloat16`. Parameters may also be "complex64" and "complex128".
DtypeLike: TypeAlias = Any


def dtype_text(dtype: DtypeLike) -> str:
    """The dtype as text that the library parses: "float32" for `torch.float32` and the like."""
    if isinstance(dtype, str):
        return dtype
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None)
    if isinstance(name, str):
        return name
    return str(dtype).rpartition(".")[2]


# The dtype of the real and the imaginary part.
_PARTS = {"complex64": "float32", "complex128": "float64"}


def registered(shape: tuple[int, ...], dtype: DtypeLike) -> tuple[tuple[int, ...], str, bool]:
    """Shape and dtype of a parameter as the library sees them (those of its real view if it is
    complex), and whether it is complex.
    """
    text = dtype_text(dtype)
    if text.startswith("complex") and text not in _PARTS:
        raise UsageError(f"reducer: register: dtype: expected complex64 or complex128, got {text}")
    return ((*shape, 2), _PARTS[text], True) if text in _PARTS else (shape, text, False)


def optional_dtype_text(dtype: DtypeLike | None) -> str | None:
    """Like `dtype_text`, but None for None."""
    return None if dtype is None else dtype_text(dtype)


def wire_text(dtype: DtypeLike | None) -> str | None:
    """The short name of a wire dtype."""
    text = optional_dtype_text(dtype)
    return {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}.get(text or "", text)
