"""Snapshots: written by ranks, read and compared in Python and by hsdp_check."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from conftest import Launcher, hsdp_check, own_rank, program
from one_rank import add_gradient, registered

import hsdp

SHAPES = {"bias": (3,), "weight": (40, 7)}


def gradient(name: str, rank: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng([len(name), rank]).standard_normal(SHAPES[name], np.float32)


def mean_gradients(size: int) -> dict[str, np.ndarray[Any, Any]]:
    return {
        name: (sum(gradient(name, r).astype(np.float64) for r in range(size)) / size)
        for name in SHAPES
    }


def reduced(mesh: hsdp.Mesh, over: Any) -> hsdp.Reducer:
    reducer = hsdp.Reducer(mesh, bucket_bytes=256, shard_over=over)
    for name, shape in SHAPES.items():
        reducer.register(name, shape)
    with reducer.microbatch(last=True):
        for name in SHAPES:
            reducer.gradient_ready(name, gradient(name, mesh.rank))
    return reducer


def write(folder: str) -> None:
    with hsdp.init_mesh(2, 2) as mesh:
        for over, name in (("mesh", "over_mesh"), ("shard", "mesh")):
            reducer = reduced(mesh, over)
            reducer.save_snapshot(pathlib.Path(folder) / name, step=7)
            reducer.flush()
        whole = {name: np.empty(shape, np.float32) for name, shape in SHAPES.items()}
        reducer.gather_gradients(whole)
        hsdp.write_snapshot(f"{folder}/all_ranks", whole, mesh, step=7)
        with pytest.raises(hsdp.UsageError, match="folder"):
            hsdp.write_snapshot(f"{folder}/x.h5", whole, mesh)
        reducer.close()
    mean = mean_gradients(4)
    if own_rank() == 0:
        hsdp.write_snapshot(f"{folder}/reference.h5", mean)
        mean["weight"][3, 4] += 0.5
        hsdp.write_snapshot(f"{folder}/off", mean, step=8)


def test_a_round_trip(ranks: Launcher, tmp_path: pathlib.Path) -> None:
    ranks(4, write, str(tmp_path))
    mean = mean_gradients(4)
    snapshot = hsdp.read_snapshot(tmp_path / "mesh")
    assert set(snapshot) == set(SHAPES)
    assert (snapshot.info.step, snapshot.info.replicate_size, snapshot.info.shard_size) == (7, 2, 2)
    assert snapshot.info.divide_factor == 4 and not snapshot.info.partial
    assert snapshot.copy_count == 2 and snapshot.dtype("bias") == "f32"
    for name in SHAPES:
        assert snapshot[name].dtype == np.float32 and snapshot[name].shape == SHAPES[name]
        np.testing.assert_allclose(snapshot[name], mean[name], rtol=1e-5, atol=1e-6)
        assert (snapshot.read(name, replica=1) == snapshot[name]).all()
        assert snapshot.read(name, dtype="f64").dtype == np.float64
    compare(tmp_path)


def compare(folder: pathlib.Path) -> None:
    same = hsdp.compare_snapshots(folder / "mesh", folder / "reference.h5", detail=True)
    assert same.same and same.verdict == "same" and same.criterion == "relative"
    assert {p.name for p in same.parameters} == set(SHAPES)
    assert max(p.relative_l2 for p in same.parameters) < 1e-6
    assert same.parameters[0].heat and sum(same.parameters[0].histogram.counts) > 0
    assert hsdp.compare_snapshots(folder / "mesh", folder / "all_ranks", bitwise=True).same
    off = hsdp.compare_snapshots(folder / "mesh", folder / "off")
    worst = off.parameters[0]
    assert not off.same and worst.name == "weight" and worst.verdict == "different"
    assert worst.worst_index == 3 * 7 + 4 and worst.max_absolute == pytest.approx(0.5, rel=1e-4)
    assert "weight" in str(off) and "different" in str(off)
    assert hsdp.compare_snapshots(folder / "mesh", folder / "off", atol=0.6).same
    assert hsdp_check(folder / "mesh", folder / "reference.h5") == 0
    assert hsdp_check(folder / "mesh", folder / "off") == 1
    assert hsdp_check(folder / "all_ranks") == 0
    assert hsdp_check("--bitwise", folder / "mesh", folder / "over_mesh") == 0
    assert hsdp_check(folder / "over_mesh", folder / "off") == 1


def digest_steps(folder: str, replicate: int, odd_step: int, steps: int = 4) -> None:
    """In one step rank 1 has a different gradient of "weight"."""
    with hsdp.init_mesh(replicate, 4 // replicate) as mesh:
        reducer = hsdp.Reducer(mesh)
        for name, shape in SHAPES.items():
            reducer.register(name, shape)
        for step in range(steps):
            with reducer.microbatch(last=True):
                for name in SHAPES:
                    one = gradient(name, mesh.rank)
                    if (step, mesh.rank, name) == (odd_step, 1, "weight"):
                        one[-1, -1] += 1
                    reducer.gradient_ready(name, one)
            reducer.save_digest(folder, step)
        reducer.close()


def said(*arguments: Any) -> tuple[int, str]:
    command = [program("hsdp_check"), *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return result.returncode, result.stdout + result.stderr


def test_digests_tell_where_two_runs_part(ranks: Launcher, tmp_path: pathlib.Path) -> None:
    runs = {"one": (2, -1), "same": (2, -1), "odd": (2, 2), "flat": (1, -1)}
    for name, (replicate, odd_step) in runs.items():
        ranks(4, digest_steps, str(tmp_path / name), replicate, odd_step)
    one, same = tmp_path / "one", tmp_path / "same"
    assert said("--digest", one, same) == (0, "same: 4 steps\n")
    # The last element is on the second rank of each shard group.
    assert said("--digest", one, tmp_path / "odd") == (1, (
        "step 2 is the first that differs, after 2 steps with equal bits:\n"
        "  'weight' on ranks 1, 3 of 4\n"
        "different: 1 of 4 steps\n"
    ))
    status, text = said("--digest", one, tmp_path / "odd", "--json")
    assert status == 1 and json.loads(text) == {
        "verdict": "different", "steps": 4, "different_steps": 1, "first_different_step": 2,
        "parameters": [{"name": "weight", "ranks": [1, 3]}],
    }
    status, text = said("--digest", one, tmp_path / "flat")
    assert status == 2 and "expected runs of one mesh shape, got 2x2 and 1x4" in text
    status, text = said("--digest", one, tmp_path / "none")
    assert status == 2 and "digests_0.txt: expected digests of that rank, got none" in text
    status, text = said("--digest", one)
    assert status == 2 and "two folders of digests" in text

    # A killed run leaves half a line. The next run goes on from there, and what it repeats counts.
    for rank in range(4):
        path = same / f"digests_{rank}.txt"
        path.write_text(path.read_text()[:-10])
    assert said("--digest", one, same) == (0, "same: 3 steps\n")
    ranks(4, digest_steps, str(same), 2, -1)
    assert said("--digest", one, same) == (0, "same: 4 steps\n")
    ranks(4, digest_steps, str(same), 2, 3)
    assert said("--digest", one, same)[1].startswith("step 3 is the first that differs, after 3")


def test_digests_of_many_ranks_take_the_memory_of_one(tmp_path: pathlib.Path) -> None:
    """Those of a rank take 1.6 MB in each run."""
    parts = [[f"p{i}", 0, 1] for i in range(100)]
    steps = "".join(f"{step}{' 7' * len(parts)} .\n" for step in range(2000))
    for run in ("one", "other"):
        (tmp_path / run).mkdir()
        for rank in range(32):
            header = {"hsdp_digests": 1, "reducer": "r", "rank": rank, "replicate": 1, "shard": 32}
            text = json.dumps({**header, "slices": parts}) + "\n" + steps
            (tmp_path / run / f"digests_{rank}.txt").write_text(text)
    within_48_mib = ["sh", "-c", 'ulimit -d 49152; exec "$@"', "sh"]
    command = [program("hsdp_check"), "--digest", tmp_path / "one", tmp_path / "other"]
    result = subprocess.run([*within_48_mib, *command], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (0, "same: 2,000 steps\n"), result.stderr


def write_run(folder: pathlib.Path, replicate: int, text: str = "") -> None:
    """Of four ranks with one parameter, and `text` after each rank's header."""
    folder.mkdir()
    for rank in range(4):
        header = {"hsdp_digests": 1, "reducer": "r", "rank": rank, "replicate": replicate,
                  "shard": 4 // replicate, "slices": [["w", 0, 1]]}
        (folder / f"digests_{rank}.txt").write_text(json.dumps(header) + "\n" + text)


def test_a_run_made_of_two_is_refused(tmp_path: pathlib.Path) -> None:
    """Also where both folders are alike."""
    for name, replicate in {"square": 2, "flat": 1, "one": 2, "other": 2}.items():
        write_run(tmp_path / name, replicate, "0 7 .\n")
    for name in ("one", "other"):
        shutil.copy(tmp_path / "flat" / "digests_2.txt", tmp_path / name)
    for a, b, wrong in (("one", "other", "one"), ("one", "square", "one"), ("square", "other", "other")):
        status, text = said("--digest", tmp_path / a, tmp_path / b)
        assert status == 2
        expected = f"{tmp_path / wrong}/digests_2.txt: expected rank 2 of a 2x2 mesh, got another run's"
        assert expected in text


@pytest.mark.parametrize("later", ["0 7 .\n1 7 .\n", "0 7 .\n"])
def test_files_that_change_while_they_are_read_leave_no_verdict(
    tmp_path: pathlib.Path, later: str
) -> None:
    """The second reading, which tells where step 1 differs, finds it the same, or gone."""
    for name, text in {"one": "0 7 .\n1 7 .\n", "other": "0 7 .\n1 8 .\n"}.items():
        write_run(tmp_path / name, 2, text)
    paths = [tmp_path / "other" / f"digests_{rank}.txt" for rank in range(4)]
    texts = [path.read_text() for path in paths]
    for path in paths:
        path.unlink()
        os.mkfifo(path)

    def feed() -> None:
        for _ in range(2):
            for path, text in zip(paths, texts, strict=True):
                path.write_text(text)
            for rank in range(4):
                texts[rank] = texts[rank].splitlines()[0] + "\n" + later

    threading.Thread(target=feed, daemon=True).start()
    status, text = said("--digest", tmp_path / "one", tmp_path / "other")
    assert status == 2
    path = paths[0] if later == "0 7 .\n" else tmp_path / "other"
    assert f"digests: {path}: expected step 1 as it was read before, got another, as the files" in text


def test_a_folder_has_the_digests_of_one_run(tmp_path: pathlib.Path) -> None:
    with hsdp.init_mesh() as mesh:
        for name in ("a", "b"):
            reducer = registered(mesh, name, 3)
            with pytest.raises(hsdp.UsageError, match="save_digest: expected a finished step"):
                reducer.save_digest(tmp_path, 0)
            add_gradient(reducer, name, np.ones(3, np.float32), last=True)
            if name == "a":
                reducer.save_digest(tmp_path, 0)
            else:
                with pytest.raises(hsdp.SnapshotError, match="got another run's; give each run a folder"):
                    reducer.save_digest(tmp_path, 0)
                (tmp_path / "digests_0.txt").write_text('{"hsdp_dig')  # a torn header
                reducer.save_digest(tmp_path, 0)
                assert said("--digest", tmp_path, tmp_path) == (0, "same: 1 step\n")
                other = registered(mesh, name, 3)
                add_gradient(other, name, np.ones(3, np.float32), last=True)
                with pytest.raises(hsdp.SnapshotError, match="the only one that writes it"):
                    other.save_digest(tmp_path, 0)
                other.close()
            reducer.close()
    (tmp_path / "digests_0.txt").write_text("something else\n")
    assert said("--digest", tmp_path, tmp_path)[0] == 2
    with pytest.raises(hsdp.SnapshotError, match="cannot make this folder"), hsdp.init_mesh() as mesh:
        reducer = registered(mesh, "w", 3)
        add_gradient(reducer, "w", np.ones(3, np.float32), last=True)
        reducer.save_digest(tmp_path / "digests_0.txt" / "folder", 0)


def test_plain_arrays_of_every_dtype(tmp_path: pathlib.Path) -> None:
    values = np.arange(12).reshape(3, 4)
    arrays = {
        "f32": values.astype(np.float32),
        "f64": values.astype(np.float64) / 3,
        "f16": values.astype(np.float16),
        "bf16": values.astype(ml_dtypes.bfloat16),
        "none": np.empty((0, 2), np.float32),
    }
    hsdp.write_snapshot(tmp_path / "all.h5", arrays, step=3)
    snapshot = hsdp.read_snapshot(tmp_path / "all.h5")
    assert snapshot.info.layout == "full" and snapshot.info.step == 3 and len(snapshot) == 5
    for name, array in arrays.items():
        assert snapshot.shape(name) == array.shape and (name == "none" or name in snapshot)
        assert (snapshot.read(name, dtype="f64") == array.astype(np.float64)).all()


def test_what_cannot_be_written_or_read(tmp_path: pathlib.Path) -> None:
    for tensors, kind, message in [
        ({"w": [1.0]}, hsdp.UsageError, "'w'.*list"),
        ({"w": np.ones((4, 4))[:, 1]}, hsdp.UsageError, "'w'.*contiguous"),
        ({"w": np.ones(4, np.int64)}, hsdp.Error, "i64"),
        ([np.ones(4)], hsdp.UsageError, "by name.*type list"),
        ({1: np.ones(4)}, hsdp.UsageError, "name.*type int"),
    ]:
        with pytest.raises(kind, match=message):
            hsdp.write_snapshot(tmp_path / "a", tensors)
    hsdp.write_snapshot(tmp_path / "b", {"w": np.ones(4)})
    hsdp.write_snapshot(tmp_path / "c", {"v": np.ones(4)})
    snapshot = hsdp.read_snapshot(tmp_path / "b")
    calls: list[tuple[type[Exception], str, Any]] = [
        (hsdp.SnapshotError, "", lambda: hsdp.read_snapshot(tmp_path / "nothing")),
        (hsdp.SnapshotError, "", lambda: hsdp.write_snapshot("/proc/no", {"w": np.ones(4)})),
        (KeyError, "", lambda: snapshot["v"]),
        (hsdp.UsageError, "f16", lambda: snapshot.read("w", dtype="f16")),
        (hsdp.Error, "", lambda: snapshot.read("w", replica=1)),
        (hsdp.SnapshotError, "", lambda: hsdp.compare_snapshots(tmp_path / "b", tmp_path / "c")),
        (hsdp.UsageError, "",
         lambda: hsdp.compare_snapshots(tmp_path / "b", tmp_path / "b", bitwise=True, rtol=0.1)),
    ]
    for kind, message, call in calls:
        with pytest.raises(kind, match=message):
            call()
    file = next((tmp_path / "b").iterdir())
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(hsdp.SnapshotError):
        hsdp.read_snapshot(tmp_path / "b")["w"]


def test_names_of_any_characters(tmp_path: pathlib.Path) -> None:
    names = ["a/b", "/", "..", "a b", "ü", "\n", "\0x", "\0y", "%s", "'\"\\", "x" * 4096]
    with hsdp.init_mesh() as mesh:
        reducer = hsdp.Reducer(mesh)
        for count, name in enumerate(names, 1):
            reducer.register(name, count)
        with reducer.microbatch(last=True):
            for count, name in enumerate(names, 1):
                reducer.gradient_ready(name, np.full(count, count, np.float32))
        reducer.save_snapshot(tmp_path / "s", step=1)
        reducer.close()
    snapshot = hsdp.read_snapshot(tmp_path / "s")
    assert sorted(snapshot) == sorted(names)
    for count, name in enumerate(names, 1):
        assert snapshot[name].tolist() == [count] * count


ENDS = """
import sys, numpy as np, hsdp
reducer = hsdp.Reducer(hsdp.init_mesh())
reducer.register("w", 1000)
with reducer.microbatch(last=True):
    reducer.gradient_ready("w", np.arange(1000, dtype=np.float32))
reducer.save_snapshot(sys.argv[1], step=1)
"""


def test_a_program_that_just_ends_still_writes(tmp_path: pathlib.Path) -> None:
    subprocess.run([sys.executable, "-c", ENDS, str(tmp_path / "s")], check=True, timeout=60)
    assert hsdp.read_snapshot(tmp_path / "s")["w"].tolist() == list(range(1000))


def test_a_program_that_ends_says_what_it_could_not_write(tmp_path: pathlib.Path) -> None:
    (tmp_path / "s" / "rank_00000.h5" / "in the way").mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, "-c", ENDS, str(tmp_path / "s")], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "" and "hsdp: a snapshot was lost: snapshot:" in done.stderr


class H5pyLock:
    """Stands for the lock that h5py holds in every call of HDF5."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.owners: list[int] = []
        self.wanted = threading.Event()

    def acquire(self, blocking: bool = True) -> bool:
        self.wanted.set()
        acquired = self.lock.acquire(blocking)
        if acquired:
            self.owners.append(threading.get_ident())
        return acquired

    def release(self) -> None:
        self.lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


@pytest.fixture
def phil(monkeypatch: pytest.MonkeyPatch) -> H5pyLock:
    module: Any = types.ModuleType("h5py._objects")
    module.phil = H5pyLock()
    monkeypatch.setitem(sys.modules, "h5py._objects", module)
    return module.phil


def write_one(folder: pathlib.Path) -> None:
    hsdp.write_snapshot(folder / "one.h5", {"w": np.ones(3, np.float32)})


def run_in_thread(task: Any) -> int:
    thread = threading.Thread(target=task)
    thread.start()
    thread.join()
    assert thread.ident is not None
    return thread.ident


def test_hdf5_is_entered_by_the_calling_thread_with_the_lock_of_h5py(
    phil: H5pyLock, tmp_path: pathlib.Path
) -> None:
    main = threading.get_ident()
    write_one(tmp_path)
    assert phil.owners == [main]
    other = run_in_thread(lambda: write_one(tmp_path))
    assert phil.owners == [main, other]
    with hsdp.init_mesh(1, 1) as mesh:
        reducer = registered(mesh, "w", 3)
        add_gradient(reducer, "w", np.ones(3, np.float32), last=True)
        reducer.save_snapshot(tmp_path / "run", step=1)
        reducer.flush()
    assert phil.owners == [main, other, main]
    assert hsdp.read_snapshot(tmp_path / "run")["w"].tolist() == [1, 1, 1]


def test_a_snapshot_may_be_written_inside_a_call_of_h5py(
    phil: H5pyLock, tmp_path: pathlib.Path
) -> None:
    with phil:  # as in a callback of visititems()
        write_one(tmp_path)
    assert len(phil.owners) == 2


def hold_elsewhere(phil: H5pyLock, when_wanted: Callable[[], object]) -> threading.Thread:
    """A thread in a call of h5py that calls this once the main thread is about to enter."""
    inside = threading.Event()

    def hold() -> None:
        with phil:
            phil.wanted.clear()
            inside.set()
            if phil.wanted.wait(30):
                when_wanted()

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(30)
    return thread


def test_a_snapshot_waits_for_a_call_of_h5py_on_another_thread(
    phil: H5pyLock, tmp_path: pathlib.Path
) -> None:
    thread = hold_elsewhere(phil, lambda: phil.owners.append(0))
    write_one(tmp_path)
    thread.join()
    assert phil.owners == [thread.ident, 0, threading.get_ident()]


def test_ctrl_c_ends_the_wait_for_h5py(phil: H5pyLock, tmp_path: pathlib.Path) -> None:
    leave = threading.Event()
    thread = hold_elsewhere(phil, lambda: (os.kill(os.getpid(), signal.SIGINT), leave.wait(30)))
    with pytest.raises(KeyboardInterrupt):
        write_one(tmp_path)
    leave.set()
    thread.join()
    assert list(tmp_path.iterdir()) == []
    write_one(tmp_path)
