"""Misuse is a UsageError that says what was wrong and what to do. No rank hangs or crashes."""

from __future__ import annotations

import json
import os
import pickle
import re
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Launcher, on_mesh
from dlpack_only import DlpackOnly, Handmade
from one_rank import add_gradient, mesh, registered

import hsdp
from hsdp import keyword_hints, open_reducers

F32 = np.float32


@pytest.fixture
def reducer(mesh: hsdp.Mesh) -> Iterator[hsdp.Reducer]:
    reducer = registered(mesh, "w", (2, 3))
    yield reducer
    reducer.close()


def refused(call: Callable[[], Any], *parts: str) -> str:
    with pytest.raises(hsdp.UsageError) as caught:
        call()
    message = str(caught.value)
    for part in parts:
        assert re.search(part, message), message
    assert isinstance(caught.value, ValueError) and caught.value.ranks == ()
    return message


class Refusing:
    def __dlpack__(self, **arguments: Any) -> Any:
        raise BufferError("it requires a gradient")


@pytest.mark.parametrize(
    "gradient, parts",
    [
        (np.zeros((3, 2), F32), [r"'w'", r"shape \(2, 3\)", r"got \(3, 2\)"]),
        (np.zeros((2, 3)), [r"'w'", "dtype f32 as registered", "got f64"]),
        (np.zeros((2, 3), np.int32), ["float32", "int32", "astype"]),
        (np.zeros((2, 3), ">f4"), [">f4", "astype"]),
        (np.zeros((2, 3), complex), ["complex128"]),
        (np.zeros((2, 3), bool), ["bool"]),
        ([[0.0] * 3] * 2, ["NumPy", "__dlpack__", "type list"]),
        (None, ["type NoneType"]),
        ("w", ["type str"]),
        (Refusing(), ["Refusing", "it requires a gradient", "detach"]),
        (np.zeros((2, 3), [("f", F32), ("c", "u1")])["f"], ["unaligned|whole elements"]),
        (DlpackOnly(np.zeros((2, 3), np.int16)), ["int16"]),
        (DlpackOnly(np.zeros((2, 3), np.complex64)), ["complex64"]),
        (Handmade(np.zeros((2, 3), F32), device=(2, 1)), [r"'w'", "memory on cpu", "got cuda:1"]),
        (Handmade(np.zeros((2, 3), F32), device=(8, 0)), ["device type 8", "copy it to the host"]),
        (Handmade(np.zeros((2, 3), F32), dtype=(2, 32, 4)), ["vectors of 4"]),
    ],
)
def test_gradients_that_do_not_fit(reducer: hsdp.Reducer, gradient: Any, parts: list[str]) -> None:
    reducer.begin_microbatch(last=True)
    refused(lambda: reducer.gradient_ready("w", gradient), *parts)
    reducer.abandon_step()
    add_gradient(reducer, "w", np.ones((2, 3), F32), last=True)
    assert reducer.shard("w").numpy().sum() == 6


def test_a_second_an_unknown_and_a_missing_gradient(reducer: hsdp.Reducer) -> None:
    x = np.ones((2, 3), F32)

    def twice() -> None:
        with reducer.microbatch():
            reducer.gradient_ready("w", x)
            reducer.gradient_ready("w", x)

    def unknown(key: Any) -> None:
        add_gradient(reducer, key, x)

    def missing() -> None:
        with reducer.microbatch():
            pass

    refused(twice, "'w'", "second", 'backwards="many"')
    refused(lambda: unknown("v"), "'v'")
    refused(lambda: unknown(1), "index below 1", "got 1")
    refused(lambda: unknown(-1), "index below 1", "got -1")
    refused(missing, r"got none at all \(rank 0 of 1\)", "loss.backward.*or call gradient_ready")
    refused(lambda: unknown(1 << 70), "index below 1")
    refused(lambda: unknown(1.5), "name or index", "type float")
    refused(lambda: unknown([]), "name or index", "type list")
    add_gradient(reducer, "w", x, last=True)
    assert reducer.shard("w").numpy().sum() == 6


@pytest.mark.parametrize(("missing", "name", "wrong", "parts"), [
    ("error", "v", np.ones(1, F32), ["'v'"]),
    ("zero", "w", [1.0] * 6, ["'w'", "type list"]),  # where it could pass for a missing gradient
])
def test_a_fault_that_was_caught_still_drops_the_step(
    mesh: hsdp.Mesh, missing: str, name: str, wrong: Any, parts: list[str]
) -> None:
    reducer = registered(mesh, "w", (2, 3), missing=missing)
    reducer.begin_microbatch(last=True)
    with pytest.raises(hsdp.UsageError):
        reducer.gradient_ready(name, wrong)
    if name != "w":
        reducer.gradient_ready("w", np.ones((2, 3), F32))
    refused(reducer.end_microbatch, *parts)
    refused(lambda: reducer.shard("w"), "finished step")


def test_calls_in_the_wrong_order(reducer: hsdp.Reducer) -> None:
    x = np.ones((2, 3), F32)
    refused(lambda: reducer.gradient_ready("w", x), "begin_microbatch")
    refused(reducer.end_microbatch, "begin_microbatch")
    refused(lambda: reducer.shard("w"), "finished step")
    refused(lambda: reducer.partial_shard("w"), "pending")
    refused(lambda: reducer.slice("v"), "'v'")
    reducer.begin_microbatch(last=False)
    refused(lambda: reducer.begin_microbatch(), "end_microbatch")
    refused(lambda: reducer.register("v", 1), "register|microbatch")
    reducer.gradient_ready("w", x)
    reducer.end_microbatch()
    refused(lambda: reducer.shard("w"), "finish")
    refused(lambda: reducer.gather_gradients(), "{name: array}")
    reducer.discard()


def test_wrong_options(mesh: hsdp.Mesh, reducer: hsdp.Reducer) -> None:
    for option, word in {
        "layout": "rows", "missing": "ignore", "backwards": "two", "accumulate_dtype": "f16",
        "reduce_dtype": "f64", "replica_dtype": "i64",
    }.items():
        refused(lambda: hsdp.Reducer(mesh, **{option: word}), option, f"'{word}'", "expected")
    refused(lambda: hsdp.Reducer(mesh, reduction="fast"), "fast")
    refused(lambda: hsdp.Reducer(mesh, bucket_bytes=0), "bucket_bytes")
    refused(lambda: hsdp.Reducer(mesh, verify_every=-1), "verify_every of at least 1")
    refused(lambda: hsdp.Reducer(mesh, verify_every=0.5), "verify_every: expected a whole number")  # type: ignore[arg-type]
    refused(lambda: hsdp.Reducer(mesh, layout=None), "reducer: layout", "type NoneType")
    refused(lambda: hsdp.Reducer(mesh, missing=0), "reducer: missing", "type int")
    refused(lambda: hsdp.Reducer(mesh, replica_hop="f32"), "ReplicaHop", "type str", "PlainHop")
    refused(hsdp.Reducer(mesh).begin_microbatch, "got none; attach a model or register parameters")
    refused(lambda: reducer.begin_microbatch(sync="some"), "sync", "'some'")
    refused(lambda: reducer.register("v", 1, "i64"), "i64")
    refused(lambda: reducer.register("v", 1, "float8"), "float8")
    refused(lambda: reducer.register("v", -1), "-1")
    for shape in (2.5, "23", None, [1, 2.5]):
        refused(lambda: reducer.register("v", shape), "shape", repr(shape).replace("[", r"\["))
    refused(lambda: reducer.register(1, 2), "name", "type int")
    refused(lambda: reducer.register("\ud800", 2), "name", "UTF-8")
    refused(lambda: reducer.shard(b"w"), "name", "type bytes")
    refused(lambda: reducer.slice(None), "name", "type NoneType")
    refused(lambda: reducer.partial_shard(0), "name", "type int")
    refused(lambda: reducer.register("w", 1), "'w'")
    refused(lambda: reducer.set_gradient_divide_factor(0), "factor|divide")
    refused(lambda: reducer.clip_grad_norm_(-1), "max_norm")
    refused(lambda: hsdp.clip_grad_norm_([], 1), "none")


def test_outputs_must_be_writable_and_contiguous(mesh: hsdp.Mesh) -> None:
    world = mesh.world
    frozen = np.ones(4, F32)
    frozen.flags.writeable = False
    immutable = DlpackOnly(np.ones(4, F32), versioned=False)  # as JAX exports its arrays
    refused(lambda: world.mean(immutable), "mean", "writable")
    refused(lambda: world.broadcast(immutable), "broadcast", "writable")
    refused(lambda: world.reduce_scatter(np.ones(4, F32), immutable), "out", "writable")
    refused(lambda: world.all_reduce(np.ones((4, 4), F32)[:, 1]), "contiguous", "ascontiguousarray")
    refused(lambda: world.mean(np.ones(4)), "f64", "all_reduce and divide")
    refused(lambda: world.all_reduce(np.ones(4, np.uint8)), "u8, which only moves")
    refused(lambda: world.broadcast(np.ones(4, F32), root=1), "root")
    refused(lambda: world.reduce_scatter(np.ones(4, F32), np.ones(3, F32)), "4 elements", "3")
    refused(lambda: world.reduce_scatter(np.ones(4, F32), frozen), "out", "writable")
    refused(lambda: world.allocate(-1), "count")
    refused(lambda: world.allocate(1, "f8"), "'f8'")
    x = bytearray(b"abc")
    assert world.broadcast(x) is x


def test_gathered_arrays_must_fit(reducer: hsdp.Reducer) -> None:
    add_gradient(reducer, "w", np.ones((2, 3), F32), last=True)
    refused(lambda: reducer.gather_gradients({"w": np.ones((3, 2), F32)}), "'w'", r"\(2, 3\)")
    refused(lambda: reducer.gather_gradients({"w": np.ones((2, 3), int)}), "'w'", "i64")
    refused(lambda: reducer.gather_gradients({"v": np.ones((2, 3), F32)}), "'v'")
    refused(lambda: reducer.gather_gradients({"w": DlpackOnly(np.ones((2, 3), F32), False)}),
            "'w'", "writable")
    refused(lambda: reducer.gather_gradients({1: np.ones((2, 3), F32)}), "name", "type int")
    refused(lambda: reducer.gather_parameters({"w": np.ones((2, 6), F32)[:, ::2]}), "contiguous")


def test_use_after_close() -> None:
    mesh = hsdp.init_mesh()
    reducer = registered(mesh, "w", 4)
    world = mesh.world
    reducer.close()
    for call in [
        lambda: reducer.begin_microbatch(), lambda: reducer.shard("w"), lambda: reducer.finish(),
        lambda: reducer.gradient_ready("w", np.ones(4, F32)), lambda: reducer.grad_norm(),
        lambda: reducer.register("v", 3), lambda: reducer.save_snapshot("/nowhere", 1),
    ]:
        refused(call, "closed")
    reducer.stats()
    mesh.close()
    mesh.close()
    assert mesh.closed and "closed" in repr(mesh)
    for call in [
        lambda: mesh.rank, lambda: world.all_reduce(np.ones(4, F32)), lambda: world.size,
        lambda: mesh.world.barrier(), lambda: hsdp.Reducer(mesh),
    ]:
        refused(call, "mesh", "closed")


def test_meshes_that_cannot_be() -> None:
    refused(lambda: hsdp.init_mesh(2, 2), "world of 1", "2 x 2", "start that many processes")
    refused(lambda: hsdp.init_mesh(0, 1), "at least 1")
    for size in (1.5, "2", None, 1 << 40, -1):
        refused(lambda: hsdp.init_mesh(size, 1), "replicate", "whole numbers", repr(size))
    refused(lambda: hsdp.init_mesh(timeout_s=0), "timeout_s")
    refused(lambda: hsdp.init_mesh(device="tpu"), "'tpu'", "'cuda:1'")
    refused(lambda: hsdp.init_mesh(engine="gloo"), "'gloo'", "auto, host, nccl, mpi")
    refused(lambda: hsdp.init_mesh(ranks=[[1]]), "from 0 to 0", "got 1")
    refused(lambda: hsdp.init_mesh(1, 2, ranks=[[0, 0]]), "twice")
    with pytest.raises(hsdp.Error):  # not in this build, or no device
        hsdp.init_mesh(device="cuda:0")


def test_a_reducer_outlives_its_mesh() -> None:
    mesh = hsdp.init_mesh()
    reducer = registered(mesh, "w", 4)
    mesh.close()
    add_gradient(reducer, "w", np.ones(4, F32), last=True)
    assert reducer.shard("w").numpy().sum() == 4 and reducer.grad_norm() == 2
    reducer.close()


def in_child(check: Callable[[], None]) -> None:
    """Runs `check` in a forked child, which must survive to its own exit."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            check()
            os.write(write, b"ok")
        except BaseException as error:
            os.write(write, repr(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as answer:
        assert answer.read() == b"ok"
    os.waitpid(child, 0)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_refused() -> None:
    mesh = hsdp.init_mesh()
    reducer = registered(mesh, "w", 4)
    add_gradient(reducer, "w", np.ones(4, F32), last=True)
    shard = reducer.shard("w")

    def check() -> None:
        nonlocal mesh, reducer, shard
        assert "closed" in repr(mesh.world) and "of the parent process" in repr(reducer)
        x = np.ones(4, F32)
        for call in [
            lambda: reducer.begin_microbatch(), lambda: reducer.gradient_ready("w", x),
            lambda: reducer.shard("w"), lambda: reducer.stats(), lambda: reducer.close(),
            lambda: mesh.rank, lambda: mesh.world.all_reduce(x), lambda: mesh.world.allocate(3),
            lambda: mesh.close(), lambda: hsdp.Reducer(mesh),
        ]:
            refused(call, "forked child", "parent")
        del reducer, mesh, shard  # the child may not destroy them either

    in_child(check)
    assert shard.numpy().sum() == 4
    reducer.close()
    mesh.close()


def wrong_alone() -> list[str]:
    """A mistake of rank 1 alone, and what rank 0 is told."""
    heard: list[str] = []
    with hsdp.init_mesh(1, 2, timeout_s=30) as mesh:
        reducer = registered(mesh, "w", 4)

        def step(call: Callable[[], None]) -> None:
            try:
                with reducer.microbatch(last=True):
                    call()
                reducer.shard("w")
                heard.append("nothing")
            except hsdp.Error as error:
                heard.append(f"{type(error).__name__} {list(error.ranks)} {error}")

        def give(x: Any) -> None:
            reducer.gradient_ready("w", x)

        good = np.ones(4, F32)
        wrong = mesh.rank == 1
        step(lambda: give(np.ones(5, F32) if wrong else good))
        step(lambda: None if wrong else give(good))
        step(lambda: give(good))
        if wrong:
            try:
                with reducer.microbatch(last=True):
                    raise KeyError("user code")
            except KeyError as error:
                heard.append(repr(error))
        else:
            step(lambda: give(good))
        step(lambda: give(good))
        assert reducer.shard("w").numpy().tolist() == [1, 1]
        reducer.close()
    return heard


def test_a_fault_on_one_rank_is_heard_on_all(ranks: Launcher) -> None:
    other, own = ranks(2, wrong_alone)
    assert own[0].startswith("UsageError [] ") and "(5,)" in own[0]
    assert other[0].startswith("StepAbortedError [1] ") and "(5,)" in other[0]
    assert own[1].startswith("UsageError [] ") and "none at all" in own[1]
    assert other[1].startswith("StepAbortedError [1] ") and "none at all" in other[1]
    assert own[2] == other[2] == "nothing"
    assert own[3] == "KeyError('user code')"
    assert "StepAbortedError [1] " in other[3] and "KeyError: 'user code'" in other[3]
    assert own[4] == other[4] == "nothing"


@on_mesh(1, 2, timeout_s=60)
def test_a_drop_that_nobody_hears_is_no_hang(mesh: hsdp.Mesh) -> None:
    """One rank drops a step; in its next step it waits for the words of the others, which are gone."""
    reducer = registered(mesh, "w", 4)
    add_gradient(reducer, "w", np.ones(4, F32), last=True)
    reducer.shard("w")
    if mesh.rank == 1:
        return
    with pytest.raises(KeyError), reducer.step():
        raise KeyError("user code")
    with pytest.raises(hsdp.PeerLostError) as caught:
        reducer.begin_microbatch()
    assert caught.value.ranks == (1,)


def test_a_reducer_is_a_block_and_says_what_it_is(mesh: hsdp.Mesh) -> None:
    with hsdp.Reducer(mesh, layout="dim0", replica_dtype="bf16") as reducer:
        reducer.register("w", (2, 3))
        reducer.register("b", 4)
        assert repr(reducer) == (
            "hsdp.Reducer(2 parameters, 10 elements, wire f32, replicas bf16, layout dim0, "
            "no step yet, hsdp.Mesh(1 x 1, rank 0 of 1, cpu, none))"
        )
        assert not reducer.closed
    assert reducer.closed and repr(reducer) == "hsdp.Reducer(closed)"
    refused(reducer.begin_microbatch, "closed")
    with pytest.raises(KeyError), hsdp.Reducer(mesh) as reducer:
        reducer.register("w", 2)
        reducer.begin_microbatch()
        raise KeyError("in a step")
    refused(reducer.begin_microbatch, "closed")


def test_a_reducer_says_where_its_step_stands(mesh: hsdp.Mesh) -> None:
    with hsdp.Reducer(mesh, name="critic", reduce_dtype=np.float16) as reducer:
        reducer.register("w", 2)
        reducer.register("v", 1, reduce_dtype="f32")
        assert repr(reducer).startswith(
            "hsdp.Reducer('critic', 2 parameters, 3 elements, wire f16/f32, layout flat, "
            "no step yet, "
        )

        def give() -> None:
            reducer.gradient_ready("w", np.ones(2, F32))
            reducer.gradient_ready("v", np.ones(1, F32))

        with reducer.microbatch(last=False):
            assert "layout flat, in a microbatch of step 0, " in repr(reducer)
            give()
        assert ", step 0 begun, " in repr(reducer)
        reducer.abandon_step()
        assert ", step 0 dropped, " in repr(reducer)
        with hsdp.zero.coalesce_grad_reduction(reducer):
            assert ", in a window of step 1, " in repr(reducer)
            give()
        assert ", step 1 finished, " in repr(reducer)
    assert repr(reducer) == "hsdp.Reducer('critic', closed)"
    hop = hsdp.quant.LocoHop()
    with hsdp.Reducer(mesh, replica_hop=hop) as reducer:
        assert f"0 parameters, 0 elements, wire as gradients, replicas {hop!r}, " in repr(reducer)


def test_a_mesh_writes_what_its_reducers_did(mesh: hsdp.Mesh, tmp_path: Path) -> None:
    with hsdp.Reducer(mesh, name="critic") as reducer:
        reducer.register("w", 2)
        add_gradient(reducer, "w", np.ones(2, F32))
        reducer.shard("w")
        mesh.flight_record(tmp_path / "flight")
    record = json.loads((tmp_path / "flight" / "rank_0.json").read_text())
    assert (record["reason"], record["error"], record["size"]) == ("call", "", 1)
    own = record["sources"][-1]  # others may belong to the same world
    assert (own["name"], own["ranks"]) == ("reducer 'critic'", [0])
    done = [one for one in record["operations"] if one["source"] == own["source"]]
    packed = [one for one in done if one["kind"] == "pack"]
    assert [(one["step"], one["index"], one["state"]) for one in packed] == [(0, 0, "done")]
    (tmp_path / "file").touch()
    refused(lambda: mesh.flight_record(tmp_path / "file"), "flight record", "a folder")
    (tmp_path / "flight" / "rank_0.json").unlink()
    (tmp_path / "flight" / "rank_0.json").mkdir()
    with pytest.raises(hsdp.Error, match="flight record: cannot rename "):
        mesh.flight_record(tmp_path / "flight")


def test_stats_have_the_times_of_steps(mesh: hsdp.Mesh) -> None:
    with hsdp.Reducer(mesh) as reducer:
        reducer.register("w", 1 << 20)
        before = reducer.stats()
        names = ("pack_s", "shard_hop_s", "replica_hop_s", "gather_s", "update_s", "waiting_s")
        assert [getattr(before, name) for name in names] == [0] * 6
        begin = time.perf_counter()
        add_gradient(reducer, "w", np.ones(1 << 20, F32))
        reducer.shard("w")
        passed = time.perf_counter() - begin
        after = reducer.stats()
        assert 0 < after.pack_s < passed
        assert after.shard_hop_s == after.replica_hop_s == 0  # a rank alone has no hops
        assert re.search(rf"^pack_s +{after.pack_s:.3f}$", str(after), re.MULTILINE)


def test_what_else_says_what_it_is() -> None:
    assert repr(hsdp.PlainHop("bfloat16")) == "PlainHop('bf16')"
    assert repr(hsdp.PlainHop()) == "PlainHop()"
    with hsdp.init_mesh() as mesh:
        assert repr(mesh) == "hsdp.Mesh(1 x 1, rank 0 of 1, cpu, none)"
        world = mesh.world
        assert repr(world) == "hsdp.Communicator(rank 0 of 1, ranks 0 of the job, none)"
    assert repr(mesh) == "hsdp.Mesh(closed)" and repr(world) == "hsdp.Communicator(closed)"


def test_errors_name_the_reducer(mesh: hsdp.Mesh) -> None:
    with hsdp.Reducer(mesh, name="critic") as reducer:
        assert reducer.name == "critic"
        reducer.register("w", (2, 3))
        named = "^reducer 'critic': "
        refused(lambda: reducer.register("w", 2), named + "parameter 'w'")
        refused(lambda: reducer.begin_microbatch(sync="some"), named + "sync")
        refused(lambda: reducer.gather_gradients(), named + "gather_gradients")
        with reducer.no_sync():
            refused(lambda: reducer.begin_microbatch(last=True), named + "begin_microbatch")
        reducer.begin_microbatch()
        refused(lambda: reducer.no_sync().__enter__(), named + "no_sync")
        refused(reducer.end_microbatch, named + ".*none at all")
    refused(lambda: hsdp.Reducer(mesh, name="critic", layout="rows"), named + "layout")
    for name, expected in [("a\nb", "one line"), ("x" * 128, "128 bytes"), (3, "a string")]:
        refused(lambda: hsdp.Reducer(mesh, name=name), "name: expected", expected)
    for name in (None, ""):
        with hsdp.Reducer(mesh, name=name) as reducer:
            assert reducer.name is None and "('" not in repr(reducer)


def test_errors_from_elsewhere_name_the_reducer_at_their_end(mesh: hsdp.Mesh, tmp_path: Path) -> None:
    with hsdp.Reducer(mesh, name="actor") as actor, hsdp.Reducer(mesh, name="critic") as critic:
        for reducer in (actor, critic):
            reducer.register("w", 2)
            add_gradient(reducer, "w", np.ones(2, F32), last=True)
        refused(lambda: hsdp.zero.ParameterGather(critic, {"v": np.ones(2, F32)}), "zero: ", "'critic'")
        refused(lambda: hsdp.clip_grad_norm_([actor, critic], -1.0), "reducers 'actor', 'critic': ")
        (tmp_path / "file").write_text("")
        with pytest.raises(hsdp.SnapshotError, match=r"\(reducer 'critic'\)$"):
            critic.save_snapshot(tmp_path / "file", 0)


def test_numbers_are_numbers(mesh: hsdp.Mesh) -> None:
    wrong: Any = "2MB"
    refused(lambda: hsdp.Reducer(mesh, bucket_bytes=wrong), "^reducer: bucket_bytes: .*'2MB'")
    with hsdp.Reducer(mesh, name="critic") as reducer:
        for count in (1.5, np.float32(2), "3"):
            refused(lambda count=count: reducer.divide_by_tokens(count), "'critic': divide_by_tokens")
        for call in (reducer.set_gradient_divide_factor, reducer.set_loss_scale):
            refused(lambda call=call: call("two"), "^reducer 'critic': set_.*: expected a number")
        refused(lambda: reducer.set_loss_scale(-1e-9), "got -1e-09")
        reducer.divide_by_tokens(np.int64(3))
        no_text: Any = KeyError("x")
        reducer.abandon_step(no_text)
    assert float(mesh.world.allocate(1, "f32")) == 0.0


def test_what_is_no_mesh(tmp_path: Path) -> None:
    array = np.ones(2)
    refused(lambda: hsdp.Reducer(array), "^reducer: mesh: expected an hsdp.Mesh", "type ndarray; it comes "
            r"first.*reducer.attach\(model\)")
    refused(lambda: hsdp.write_snapshot(tmp_path, {}, {"w": array}),  # type: ignore[arg-type]
            "^write_snapshot: mesh: expected an hsdp.Mesh", "type dict; the mesh comes third")


def test_a_mesh_says_where_it_has_what_process_groups_have(mesh: hsdp.Mesh) -> None:
    for name, place in [
        ("barrier", r"world.barrier\(\)"), ("all_reduce", r"world.all_reduce\(\)"), ("world_size", "size"),
        ("get_rank", "rank"),
    ]:
        with pytest.raises(AttributeError, match=f"^'Mesh' object has no attribute '{name}'; it is mesh.{place}$"):
            getattr(mesh, name)
    with pytest.raises(AttributeError, match="^'Mesh' object has no attribute 'colour'$"):
        getattr(mesh, "colour")  # noqa: B009 - checkers know that it is not there
    assert not hasattr(mesh, "mesh_dim_names")


LEFT = "^reducer: close: expected no step under way, got one with microbatches pending"


def test_closing_says_so_where_it_drops_microbatches(mesh: hsdp.Mesh) -> None:
    def pending() -> hsdp.Reducer:
        reducer = registered(mesh, "w", 2)
        add_gradient(reducer, "w", np.ones(2, F32), last=False)
        return reducer

    with pytest.warns(RuntimeWarning, match=LEFT) as caught:
        pending().close()
        with pending():
            pass
    assert [warning.filename for warning in caught] == [__file__] * 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for end in (hsdp.Reducer.finish, hsdp.Reducer.discard, hsdp.Reducer.abandon_step):
            with pending() as reducer:
                end(reducer)
        with pytest.raises(KeyError), pending():
            raise KeyError
        reducer = pending()
        with pytest.raises(RuntimeWarning):
            reducer.close()
        assert reducer.closed


@on_mesh(1, 2)
def test_a_rank_that_left_within_a_step(mesh: hsdp.Mesh) -> None:
    """Closing says nothing either then."""
    reducer = registered(mesh, "w", 2)
    add_gradient(reducer, "w", np.ones(2, F32), last=False)
    reducer.partial_shard("w")
    if mesh.rank == 1:
        time.sleep(1)  # until rank 0 waits
        os._exit(0)
    with pytest.raises(hsdp.PeerLostError, match="rank 1 of 2 was lost"):
        reducer.finish()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reducer.close()


@on_mesh(1, 2)
def test_what_ended_a_mesh_keeps_the_name_of_where_it_was(mesh: hsdp.Mesh) -> None:
    actor, critic = hsdp.Reducer(mesh, name="actor"), hsdp.Reducer(mesh, name="critic")
    for reducer in (critic, actor):
        reducer.register("w", 2)
        reducer.prepare()
    critic.set_gradient_divide_factor(1.0 + mesh.rank)
    for reducer in (critic, actor):
        with pytest.raises(hsdp.MismatchError, match="^reducer 'critic': end of microbatch 0 of step 0: "):
            add_gradient(reducer, "w", np.ones(2, F32), last=True)
            reducer.shard("w")
    assert all(", failed in step 0, " in repr(reducer) for reducer in (critic, actor))


def leave_in_a_microbatch() -> str:
    """What rank 0 raises when it waits, outside hsdp, until rank 1 is gone, whose program fails in a step."""
    open_reducers.GRACE_S = 0.5
    with hsdp.init_mesh(2, 1) as mesh:
        reducer = registered(mesh, "w", 2)
        other = Path(f"/proc/{mesh.world.all_reduce(mesh.rank * os.getpid())}")
        with pytest.raises(hsdp.Error) as caught, reducer.microbatch(last=True):
            if mesh.rank == 1:
                raise ValueError("a bad batch")
            deadline = time.monotonic() + 60
            while other.exists():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            reducer.gradient_ready("w", np.ones(2, F32))
            reducer.shard("w")
        return str(caught.value)


def test_a_rank_that_ends_within_a_step_is_soon_gone(ranks: Launcher) -> None:
    message, _ = ranks.start(2, leave_in_a_microbatch).wait(may_fail=True)
    assert "rank 1" in message and "its program ended within a step" in message, message


def test_a_snapshot_has_the_name_of_its_reducer(mesh: hsdp.Mesh, tmp_path: Path) -> None:
    for name in (None, "critic"):
        with hsdp.Reducer(mesh, name=name) as reducer:
            reducer.register("w", 2)
            add_gradient(reducer, "w", np.ones(2, F32), last=True)
            reducer.save_snapshot(tmp_path / str(name), 0)
        assert hsdp.read_snapshot(tmp_path / str(name)).info.reducer == (name or "")


def test_a_timeout_is_pythons_own_too() -> None:
    error = hsdp.TimeoutError("rank 1 did not arrive", (1,))
    for one in (error, pickle.loads(pickle.dumps(error))):
        assert isinstance(one, TimeoutError) and isinstance(one, hsdp.Error)
        assert (str(one), one.ranks) == ("rank 1 did not arrive", (1,))


# Keyword arguments of other libraries: a TypeError, like Python's, that says what to write.


@pytest.mark.parametrize(("word", "value", "hint"), [
    ("bucket_cap_mb", 25, r"bucket_bytes=.*25 << 20"),
    ("find_unused_parameters", True, 'missing="zero"'),
    ("process_group", None, "mesh"),
    ("mixed_precision", None, 'reduce_dtype="bf16"'),
    ("gradient_accumulation_steps", 4, "last=True"),
])
def test_words_of_other_libraries(mesh: hsdp.Mesh, word: str, value: Any, hint: str) -> None:
    text = rf"^Reducer\(\) got an unexpected keyword argument '{word}'; .*{hint}"
    with pytest.raises(TypeError, match=text) as caught:
        hsdp.Reducer(mesh, **{word: value})
    assert type(caught.value) is TypeError
    with hsdp.Reducer(mesh) as reducer, pytest.raises(TypeError, match=rf"attach\(\).*{hint}"):
        reducer.attach(None, **{word: value})


@pytest.mark.parametrize(("call", "text"), [
    (lambda _: hsdp.init_mesh(backend="nccl"), r"^init_mesh\(\) got.*'backend'; engine="),
    (lambda _: hsdp.init_mesh(replicates=2), r"init_mesh\(\) got.*'replicates'; did you mean replicate="),
    (lambda mesh: hsdp.Reducer(mesh, bucket_mb=1), r"Reducer\(\) got.*; did you mean bucket_bytes="),
    (lambda mesh: hsdp.Reducer(mesh).microbatch(lst=True), r"microbatch\(\) got.*; did you mean last="),
    (lambda mesh: hsdp.Reducer(mesh).begin_microbatch(snyc="all"), r"; did you mean sync="),
    (lambda mesh: hsdp.Reducer(mesh, colour="red"), "unexpected keyword argument 'colour'$"),
])
def test_words_that_are_not_known(mesh: hsdp.Mesh, call: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        call(mesh)


def test_a_word_for_another_optimizer(mesh: hsdp.Mesh) -> None:
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
