"""A mesh of one rank, and what most tests do with its Reducer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import hsdp


@pytest.fixture
def mesh() -> Iterator[hsdp.Mesh]:
    with hsdp.init_mesh() as mesh:
        yield mesh


def registered(mesh: hsdp.Mesh, name: str, shape: Any, dtype: Any = "f32", **options: Any) -> hsdp.Reducer:
    """A Reducer of one parameter."""
    reducer = hsdp.Reducer(mesh, **options)
    reducer.register(name, shape, dtype)
    return reducer


def attached_to(model: Any, mesh: hsdp.Mesh, keep_grads: bool = False, **options: Any) -> hsdp.Reducer:
    reducer = hsdp.Reducer(mesh, **options)
    reducer.attach(model, keep_grads=keep_grads)
    return reducer


def add_gradient(reducer: hsdp.Reducer, name: str, gradient: Any, **microbatch: Any) -> None:
    """Runs a microbatch with one gradient."""
    with reducer.microbatch(**microbatch):
        reducer.gradient_ready(name, gradient)


def message_of(call: Callable[[], Any]) -> str:
    """The text of the UsageError that the call raises."""
    with pytest.raises(hsdp.UsageError) as error:
        call()
    return str(error.value)
