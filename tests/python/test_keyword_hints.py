"""Keyword arguments of other libraries: a TypeError, as Python's own, that says what to write."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import hsdp
from hsdp import keyword_hints


@pytest.fixture
def mesh() -> Iterator[hsdp.Mesh]:
    with hsdp.init_mesh() as mesh:
        yield mesh


@pytest.mark.parametrize(("word", "value", "hint"), [
    ("bucket_cap_mb", 25, r"bucket_bytes=.*25 << 20"),
    ("find_unused_parameters", True, 'missing="zero"'),
    ("process_group", None, "mesh"),
    ("mixed_precision", None, 'reduce_dtype="bf16"'),
    ("gradient_accumulation_steps", 4, "last=True"),
])
def test_a_reducer(mesh: hsdp.Mesh, word: str, value: Any, hint: str) -> None:
    text = rf"^Reducer\(\) got an unexpected keyword argument '{word}'; .*{hint}"
    with pytest.raises(TypeError, match=text) as caught:
        hsdp.Reducer(mesh, **{word: value})
    assert type(caught.value) is TypeError
    with hsdp.Reducer(mesh) as reducer, pytest.raises(TypeError, match=rf"attach\(\).*{hint}"):
        reducer.attach(None, **{word: value})


def test_a_mesh() -> None:
    with pytest.raises(TypeError, match=r"^init_mesh\(\) got.*'backend'; engine="):
        hsdp.init_mesh(backend="nccl")


@pytest.mark.parametrize(("call", "text"), [
    (lambda _: hsdp.init_mesh(replicates=2), r"init_mesh\(\) got.*'replicates'; did you mean replicate="),
    (lambda mesh: hsdp.Reducer(mesh, bucket_mb=1), r"Reducer\(\) got.*; did you mean bucket_bytes="),
    (lambda mesh: hsdp.Reducer(mesh).microbatch(lst=True), r"microbatch\(\) got.*; did you mean last="),
    (lambda mesh: hsdp.Reducer(mesh).begin_microbatch(snyc="all"), r"; did you mean sync="),
])
def test_a_word_with_a_mistake(mesh: hsdp.Mesh, call: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        call(mesh)


def test_a_word_that_nobody_has(mesh: hsdp.Mesh) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'$"):
        hsdp.Reducer(mesh, colour="red")


def test_an_optimizer(mesh: hsdp.Mesh) -> None:
    torch = pytest.importorskip("torch")
    with hsdp.Reducer(mesh) as reducer:
        reducer.attach(torch.nn.Linear(2, 2))
        make: Any = hsdp.zero.ShardedOptimizer
        with pytest.raises(TypeError, match="ShardedOptimizer.*'parameters_as_bucket_view'; "):
            make(torch.optim.SGD, None, reducer, parameters_as_bucket_view=True, lr=0.1)


def test_a_word_that_a_function_takes_itself_is_no_mistake() -> None:
    @keyword_hints.hinting({"stage": "leave it out", "lr": "leave it out"})
    def make(stage: int) -> int:
        return stage

    assert make(stage=2) == 2
    with pytest.raises(TypeError, match="'lr'; leave it out"):
        make(lr=1)  # type: ignore[call-arg]
