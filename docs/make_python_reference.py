#!/usr/bin/env python3
"""Writes the API reference of the package hsdp from its docstrings.

Usage: make_python_reference.py FILE    with the package on PYTHONPATH
"""

from __future__ import annotations

import dataclasses
import inspect
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import Any

import hsdp

# Every public name of the package stands in exactly one section.
SECTIONS: dict[str, list[str]] = {
    "The mesh": ["init_mesh", "job_size", "Mesh", "Communicator"],
    "Reducing gradients": [
        "Reducer", "Step", "Microbatch", "Parameter", "Slice", "Balance", "ReducerStats",
        "clip_grad_norm_", "ReplicaHop", "PlainHop", "uneven",
    ],
    "ZeRO": ["zero"],
    "Quantization": ["quant"],
    "PyTorch": ["broadcast_parameters", "torch"],
    "Arrays": ["Array"],
    "Snapshots": [
        "write_snapshot", "read_snapshot", "Snapshot", "SnapshotInfo", "compare_snapshots",
        "Comparison", "ParameterDifference", "ErrorHistogram",
    ],
    "Errors": [
        "Error", "PeerLostError", "TimeoutError", "MismatchError", "StepAbortedError",
        "UsageError", "SnapshotError",
    ],
}

INTRODUCTION = """# Python reference

Made from the docstrings of the package by `docs/make_python_reference.py`; edit those. The
[README](../README.md) shows a whole loop, [design.md](design.md) gives the reasons.

Arrays that hsdp takes are NumPy arrays (bf16 by the package ml_dtypes), anything with `__dlpack__`
(torch, JAX, CuPy), `hsdp.Array` and plain buffers; dtypes are "f32", "bf16", "f16", "f64", "i64",
"u8", their long names, or the dtypes of those libraries. Nothing is copied on the way.
"""


def docstring(thing: Any) -> str:
    return inspect.getdoc(thing) or ""


def one_line(text: str) -> str:
    return " ".join(text.split())


def type_text(annotation: Any) -> str:
    text = "" if annotation is inspect.Signature.empty else str(annotation)
    return "" if text == "None" else text


def signature(thing: Any) -> str:
    """As it is written, on one line; without `self`."""
    shown = inspect.signature(thing)
    words = []
    for parameter in shown.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
        word = stars.get(parameter.kind, "") + parameter.name
        if parameter.annotation is not parameter.empty:
            word += f": {type_text(parameter.annotation) or None}"
        if parameter.default is not parameter.empty:
            default = parameter.default
            word += " = " + (f'"{default}"' if isinstance(default, str) else repr(default))
        words.append(word)
    result = type_text(shown.return_annotation)
    return f"({', '.join(words)})" + (f" -> {result}" if result else "")


def property_type(member: property) -> str:
    try:
        return ": " + type_text(inspect.signature(member.fget).return_annotation)
    except (TypeError, ValueError):  # of the extension module
        return ""


def is_public(kind: type) -> bool:
    return getattr(hsdp, kind.__name__, None) is kind


def own_members(kind: type) -> Iterator[tuple[str, Any]]:
    """Those of a class, and of hsdp's bases that nobody else describes."""
    bases = [base for base in kind.__bases__ if base.__module__.startswith("hsdp")]
    seen = set()
    for part in [kind, *(base for base in bases if not is_public(base))]:
        for name, member in vars(part).items():
            if name.startswith("_") or name in seen or isinstance(member, type(part)):
                continue
            seen.add(name)
            if isinstance(member, property) or inspect.isfunction(member):
                yield name, member


def field_rows(kind: type) -> list[str]:
    """A class of plain fields: their types, and the `#:` comments above them."""
    rows, notes = [], []
    for line in inspect.getsource(kind).splitlines():
        line = line.strip()
        field = re.match(r"(\w+): ([^=#]+)", line)
        if line.startswith("#:"):
            notes.append(line[2:].strip())
        elif field:
            note = f": {' '.join(notes)}" if notes else ""
            rows.append(f"- `{field[1]}: {field[2].strip()}`{note}")
            notes = []
        elif line.startswith(("def ", "@property")):
            break
    return rows


def describe_class(name: str, kind: type, level: int = 3) -> list[str]:
    bases = [base.__name__ for base in kind.__bases__ if is_public(base)]
    title = f"{'#' * level} `{name}`" + (f" (an `{bases[0]}`)" if bases else "")
    has_fields = dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")
    made_here = "__init__" in vars(kind) and name in (
        "Reducer", "quant.LocoHop", "torch.GradScaler"
    )
    lines = [title, ""]
    if made_here:
        lines += [f"    {name}{signature(kind)}", ""]
    lines += [docstring(kind), ""]
    if has_fields:
        lines += [*field_rows(kind), ""]
    members = list(own_members(kind))
    for member_name, member in members:
        if isinstance(member, property):
            shown = f".{member_name}{property_type(member)}"
            lines += [f"- `{shown}`: {one_line(docstring(member))}"]
    lines += [""] if any(isinstance(member, property) for _, member in members) else []
    for member_name, member in members:
        if not isinstance(member, property):
            title = f"{'#' * (level + 1)} `.{member_name}{signature(member)}`"
            lines += [title, "", docstring(member), ""]
    return lines


def describe_package(name: str, package: Any) -> list[str]:
    lines = [f"### `hsdp.{name}`", "", docstring(package), ""]
    for member_name in package.__all__:
        member = getattr(package, member_name)
        if inspect.isclass(member):
            lines += describe_class(f"{name}.{member_name}", member, level=4)
        else:
            lines += [f"#### `{name}.{member_name}{signature(member)}`", "", docstring(member), ""]
    return lines


def describe(name: str) -> list[str]:
    thing = getattr(hsdp, name)
    if hasattr(thing, "__all__"):
        return describe_package(name, thing)
    if inspect.ismodule(thing):
        lines = [f"### `hsdp.{name}`", "", docstring(thing), ""]
        for function_name, function in vars(thing).items():
            public = not function_name.startswith("_") and inspect.isfunction(function)
            if public and function.__module__ == thing.__name__:
                shown = f"{name}.{function_name}{signature(function)}"
                lines += [f"#### `{shown}`", "", docstring(function), ""]
        return lines
    if inspect.isclass(thing):
        return describe_class(name, thing)
    return [f"### `{name}{signature(thing)}`", "", docstring(thing), ""]


def reference() -> str:
    lines = [INTRODUCTION]
    for section, names in SECTIONS.items():
        lines += [f"## {section}", ""]
        for name in names:
            lines += describe(name)
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit("make_python_reference: usage: make_python_reference.py FILE")
    pathlib.Path(sys.argv[1]).write_text(reference(), encoding="utf-8")


if __name__ == "__main__":
    main()
