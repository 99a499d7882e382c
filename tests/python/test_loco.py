"""LocoHop between processes, as a NumPy user has it. The C++ tests cover its bits."""

from __future__ import annotations

import hashlib
import os
import pathlib
import re
import subprocess
from typing import Any

import numpy as np
import pytest
from conftest import Launcher, on_mesh, on_ranks, program

import hsdp
from hsdp.quant import LocoHop

COUNTS = {"norm": 33, "large": 4100, "tail": 700}
MICROBATCHES = 2


def gradients(step: int, microbatch: int, rank: int) -> dict[str, np.ndarray[Any, Any]]:
    always, make = (np.random.default_rng(seed) for seed in ([rank], [step, microbatch, rank]))
    return {
        name: (always.standard_normal(n) + make.standard_normal(n) / 2).astype(np.float32)
        for name, n in COUNTS.items()
    }


def make_reducer(mesh: hsdp.Mesh, hop: LocoHop, **options: Any) -> hsdp.Reducer:
    reducer = hsdp.Reducer(mesh, replica_hop=hop, **options)
    for name, n in COUNTS.items():
        reducer.register(name, (n,))
    return reducer


def run(reducer: hsdp.Reducer, step: int) -> dict[str, np.ndarray[Any, Any]]:
    """Runs one step; returns this rank's shards of the mean."""
    for m in range(MICROBATCHES):
        with reducer.microbatch(last=m == MICROBATCHES - 1):
            for name, g in gradients(step, m, reducer.mesh.rank).items():
                reducer.gradient_ready(name, g)
    return {name: np.array(reducer.shard(name)) for name in COUNTS}


def mean_of(step: int, ranks: int) -> dict[str, np.ndarray[Any, Any]]:
    """The mean in float64."""
    total = {name: np.zeros(n) for name, n in COUNTS.items()}
    for m in range(MICROBATCHES):
        for rank in range(ranks):
            for name, g in gradients(step, m, rank).items():
                total[name] += g / ranks
    return total


@on_mesh(2, 2)
def test_what_is_sent_adds_up(mesh: hsdp.Mesh) -> None:
    hop = LocoHop(exclude="norm", error_every=1)
    reducer = make_reducer(mesh, hop, replica_dtype="f32")
    errors, sent, given = [], 0.0, 0.0
    for step in range(20):
        shards = run(reducer, step)
        mean = mean_of(step, mesh.size)
        part = reducer.slice("large")
        wanted = mean["large"][part.offset : part.offset + part.count]
        errors.append(float(np.linalg.norm(shards["large"] - wanted) / np.linalg.norm(wanted)))
        sent, given = sent + shards["large"], given + wanted
        part = reducer.slice("norm")
        norm = mean["norm"][part.offset : part.offset + part.count]
        np.testing.assert_allclose(shards["norm"], norm, rtol=1e-5, atol=1e-6)
    assert all(0.05 < error < 0.3 for error in errors)
    assert np.linalg.norm(sent - given) / np.linalg.norm(given) < min(errors) / 3
    figures = hop.quantization_error()
    assert all(0.05 < error < 0.2 for pair in figures.values() for error in pair if error)
    found = mesh.world._handle.exchange(" ".join(figures), "test")
    assert {name for of_rank in found for name in of_rank.split()} == {"large", "tail"}
    stats = reducer.stats()
    assert hop.steps == 20 and not reducer.found_inf() and stats.replica_hop.startswith("loco 4 bit")
    assert stats.replica_hop_state_bytes > 0 and stats.replica_hop_bytes > 0
    bits = hashlib.sha256(b"".join(shard.tobytes() for shard in shards.values())).hexdigest()
    assert len(set(mesh.replicate_group._handle.exchange(bits, "test"))) == 1


def last_steps(reducer: hsdp.Reducer) -> str:
    """Runs two more steps; returns the bits that the last one leaves."""
    run(reducer, 3)
    return str({name: shard.tobytes().hex() for name, shard in run(reducer, 4).items()})


def run_and_save(folder: str, replicate: int, shard: int) -> str:
    """Writes a file of each rank's state, and a snapshot."""
    with hsdp.init_mesh(replicate, shard) as mesh:
        hop = LocoHop(reset_T=0)
        assert hop.state_dict() == {}
        reducer = make_reducer(mesh, hop, bucket_bytes=4096)
        for step in range(3):
            run(reducer, step)
        np.savez(pathlib.Path(folder) / f"{mesh.rank}.npz", **hop.state_dict())
        reducer.save_snapshot(pathlib.Path(folder) / "snapshot", 2)
        reducer.flush()
        return last_steps(reducer)


def require_named(hop: LocoHop, own: dict[str, Any]) -> None:
    """What a state lacks, or has of parameters that are none, unless the caller does not mind."""
    part = {key: value for key, value in own.items() if not key.startswith("large")}
    other = {**own, "other/r0/o0/values": np.zeros(3, np.float32)}
    for state, text in ((part, "of 'large'.*all ranks"), (other, "'other', which it has not")):
        with pytest.raises(hsdp.UsageError, match=text):
            hop.load_state_dict(state)
        hop.load_state_dict(state, strict=False)


def resume(folder: str) -> list[str]:
    """Resumes from this rank's file, before and after the set-up, and from the snapshot."""
    found = []
    with hsdp.init_mesh(2, 2) as mesh, np.load(pathlib.Path(folder) / f"{mesh.rank}.npz") as own:
        snapshot = hsdp.read_snapshot(pathlib.Path(folder) / "snapshot")
        for state, early in ((own, True), (own, False), (snapshot.hop_state(mesh.rank), True)):
            hop = LocoHop(reset_T=0)
            with make_reducer(mesh, hop, bucket_bytes=4096) as reducer:
                if not early:
                    reducer.prepare()
                    require_named(hop, dict(own))
                hop.load_state_dict(state)
                found.append(last_steps(reducer))
                assert hop.steps == 5
    return found


def test_a_resumed_run_has_the_same_bits(ranks: Launcher, tmp_path: pathlib.Path) -> None:
    bits = ranks(4, run_and_save, str(tmp_path), 2, 2)
    assert ranks(4, resume, str(tmp_path)) == [[own] * 3 for own in bits]
    folder = tmp_path / "snapshot"
    snapshot = hsdp.read_snapshot(folder)
    assert snapshot.info.quantizes and snapshot.hop_state(3).keys() < snapshot.hop_state().keys()
    assert snapshot.hop_state()["steps"].tolist() == [3]
    # A run with the same gradients over the plain hop: the difference is reported, and judged on request.
    plain = tmp_path / "plain"
    hsdp.write_snapshot(plain, {name: mean.astype(np.float32) for name, mean in mean_of(2, 4).items()})
    check = [program("hsdp_check"), str(folder), str(plain)]
    done = subprocess.run(check, capture_output=True, text=True)
    assert done.returncode == 2 and "not judged: 3 parameters" in done.stdout, done.stdout
    assert subprocess.run([*check, "--rtol", "1e-3"], capture_output=True).returncode == 1
    assert subprocess.run([*check, "--atol", "1"], capture_output=True).returncode == 0


@on_ranks(2)
def test_mistakes_are_named() -> None:
    def expect(kind: type[Exception], words: str, call: Any) -> None:
        with pytest.raises(kind, match=re.escape(words)):
            call()

    for options, words in [
        ({"bits": 3}, "bits: expected 4 or 8, got 3"), ({"group_size": 40}, "multiple of 32"),
        ({"gather": "int2"}, "'int4', 'int8' or 'bf16'"), ({"seed": -1}, "seed"),
        ({"bits": 4.5}, "bits: expected a whole number, got 4.5"), ({"reset_T": 2**70}, "reset_T"),
        ({"error_feedback": "False"}, "error_feedback: expected True or False"),
        ({"exclude": [1]}, "exclude: expected names"), ({"err_beta": "x"}, "err_beta: expected a number"),
        ({"scale_dtype": "int4"}, "scale_dtype: expected 'bf16' or 'f32'"),
    ]:
        expect(hsdp.UsageError, words, lambda: LocoHop(**options))
    expect(TypeError, "beta", lambda: LocoHop(beta=0.8))  # type: ignore[call-arg]
    with hsdp.init_mesh(2, 1) as mesh:
        hop = LocoHop(exclude=("*bias",))
        expect(hsdp.UsageError, "'*bias', which matches none", make_reducer(mesh, hop).prepare)
        hop = LocoHop(plain_dtype="bf16")
        expect(hsdp.UsageError, "which the replica_hop sends",
               lambda: make_reducer(mesh, hop, replica_dtype="f32").prepare())
        hop = LocoHop()
        reducer = make_reducer(mesh, hop)
        reducer.prepare()
        expect(hsdp.UsageError, "got a second", make_reducer(mesh, hop).prepare)
        expect(hsdp.UsageError, "at most 1", lambda: hop.scale_errors(float("nan")))
        state = {"steps": np.zeros(1, np.int64)}
        expect(hsdp.UsageError, "'replicas' in it", lambda: hop.load_state_dict(state))
        hop.scale_errors(0.5 + mesh.rank / 2)
        expect(hsdp.MismatchError, "x", lambda: run(reducer, 0))
    with hsdp.init_mesh(2, 1) as mesh:
        hop = LocoHop(err_beta=0.5 + mesh.rank / 4)
        expect(hsdp.MismatchError, "beta 0.5", lambda: make_reducer(mesh, hop))


HEADER = ["steps", "replicas", "group_size", "err_beta"]


@on_ranks(2)
def test_a_state_goes_to_one_replica_and_back(tmp_path: str) -> None:
    with hsdp.init_mesh(1, 2) as mesh:
        alone = LocoHop()
        reducer = make_reducer(mesh, alone)
        run(reducer, 0)
        own, stats = alone.state_dict(), reducer.stats()
        assert list(own) == HEADER and stats.replica_hop_bytes == stats.replica_hop_state_bytes == 0
        alone.load_state_dict(own)
        snapshot = pathlib.Path(tmp_path) / "alone"
        reducer.save_snapshot(snapshot, step=0)
        reducer.close()
        mesh.world.barrier()
        assert set(hsdp.read_snapshot(snapshot).hop_state(mesh.rank)) == set(HEADER)
    with hsdp.init_mesh(2, 1) as mesh:
        hop = LocoHop()
        hop.load_state_dict(own)
        reducer = make_reducer(mesh, hop)
        run(reducer, 0)
        assert hop.steps == 1
        state = hop.state_dict()
        hop.load_state_dict(own)
        assert hop.steps == 0 and not any(
            np.any(errors) for key, errors in hop.state_dict().items() if key.endswith("codes")
        )
        reducer.close()
    with hsdp.init_mesh(1, 2) as mesh:
        for ready in (True, False):
            hop = LocoHop()
            reducer = make_reducer(mesh, hop)
            if ready:
                reducer.prepare()
            hop.load_state_dict(state)
            run(reducer, 1)
            assert hop.steps == 1 and list(hop.state_dict()) == HEADER
            reducer.close()


@on_mesh(2, 1)
def test_a_closed_reducer_has_let_go_of_its_hop(mesh: hsdp.Mesh) -> None:
    """A closed Reducer frees its hop; options may be given in any order."""
    patterns = ["n*", "tail"] if mesh.rank == 0 else ["tail", "n*", "tail"]
    hop = LocoHop(exclude=patterns, gather=None if mesh.rank == 0 else "int4", seed=2**64 - 1,
                  stochastic_error=True, plain_dtype="bf16", warmup_steps=10**15, err_beta=1 / 3)
    first, second = make_reducer(mesh, hop), make_reducer(mesh, hop)
    run(first, 0)
    sent = first.stats().replica_hop_bytes
    first.close()
    run(second, 1)
    assert hop.steps == 2 and first.stats().replica_hop_bytes == sent > 0


def test_options_of_deepspeed_will_do() -> None:
    config = {"zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024}}
    hop = LocoHop(**config["zeropp_loco_param"])  # type: ignore[arg-type]
    assert repr(hop) == "LocoHop(loco 4 bit, groups of 64 bf16, beta 0.8, T 1024)"


def digest(hop: LocoHop) -> str:
    state = sorted((key, np.array(value).tobytes()) for key, value in hop.state_dict().items())
    return hashlib.sha256(repr(state).encode()).hexdigest()


def lose_a_rank(moment: list[int]) -> list[str]:
    """Returns what every step leaves. Rank 2 dies at a microbatch and parameter of the fourth step; the last
    entry is what the other ranks then hold.
    """
    mesh = hsdp.init_mesh(3, 1)
    hop = LocoHop()
    reducer = make_reducer(mesh, hop, bucket_bytes=2048)
    left = []
    try:
        for step in range(5):
            for m in range(MICROBATCHES):
                with reducer.microbatch(last=m == MICROBATCHES - 1):
                    for p, (name, gradient) in enumerate(gradients(step, m, mesh.rank).items()):
                        if [mesh.rank, step, m, p] == [2, 3, *moment]:
                            os._exit(0)
                        reducer.gradient_ready(name, gradient)
            reducer.shard("norm")
            left.append(digest(hop))
    except hsdp.Error:
        reducer.close()
        left.append(f"{hop.steps} {digest(hop)}")
    return left


def test_a_lost_rank_leaves_the_errors_of_one_step_or_the_next(ranks: Launcher) -> None:
    whole = ranks(3, lose_a_rank, [])
    for moment in ([0, 2], [1, 2]):
        found = ranks.start(3, lose_a_rank, moment).wait(may_fail=True)
        assert found[2] is None
        for rank in range(2):
            *before, last = found[rank]
            steps, held = last.split()
            assert before == whole[rank][:3] and int(steps) in (3, 4), moment
            assert held == whole[rank][int(steps) - 1], moment
