"""One line about what was made, from rank 0 only: in Python's logging, or on stderr with HSDP_LOG."""

from __future__ import annotations

import logging.config
import os
import re
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
from conftest import Launcher
from one_rank import add_gradient

import hsdp
from hsdp import _hsdp, log_sink

SIZE = 1 << 20
MESH = (
    "hsdp: mesh 2 x 2: ranks 4 of 4, hosts 1, engine host, device cpu, "
    "shard group over shared memory, replicate group over shared memory"
)
LAYOUT = (
    "hsdp: reducer 'net': buckets 2 of at most 2.00 MiB, parameters 2, elements 1048579, wire bf16 and f32, "
    "replica hop (plain), on this rank: carry 2.00 MiB, staging 4.00 MiB"
)
STEP = r"hsdp: reducer 'net': step {}, microbatches 2, this rank waited \d+\.\d{{3}} s so far"


def run_steps() -> None:
    with hsdp.init_mesh(2, 2) as mesh, hsdp.Reducer(mesh, name="net") as reducer:
        reducer.register("weight", SIZE, "f32", reduce_dtype="bf16")
        reducer.register("bias", 3)
        for _ in range(2):
            for last in (False, True):
                with reducer.microbatch(last=last):
                    reducer.gradient_ready("weight", np.ones(SIZE, np.float32))
                    reducer.gradient_ready("bias", np.ones(3, np.float32))
            assert reducer.shard("weight").numpy()[0] == 2


def run_small_reducers() -> None:
    with hsdp.init_mesh(2, 1) as mesh:
        for size, hop in ((0, None), (1000, hsdp.quant.LocoHop())):
            with hsdp.Reducer(mesh, replica_hop=hop) as reducer:
                reducer.register("w", size)
                add_gradient(reducer, "w", np.ones(size, np.float32), last=True)


def test_empty_and_small_reducers_have_short_lines(ranks: Launcher) -> None:
    job = ranks.start(2, run_small_reducers, HSDP_LOG="info")
    job.wait()
    assert job.output.splitlines()[1:] == [
        "hsdp: reducer: buckets 0, parameters 1, elements 0, replica hop (plain)",
        "hsdp: reducer: buckets 1 of at most 3.91 KiB, parameters 1, elements 1000, wire f32, "
        "replica hop (loco 4 bit, groups of 64 bf16, beta 0.8, T 1024), on this rank: "
        "carry 3.91 KiB, staging 1.59 KiB, replica hop 3.19 KiB",
    ]


def run_with_logging(level: str) -> None:
    logging.basicConfig(level=level, format="%(levelname)s %(name)s %(message)s")
    run_steps()


@pytest.mark.parametrize("level", ["info", "debug"])
def test_rank_0_alone_writes_to_stderr(ranks: Launcher, level: str) -> None:
    job = ranks.start(4, run_steps, HSDP_LOG=level)
    job.wait()
    lines = job.output.splitlines()
    assert lines[:2] == [MESH, LAYOUT]
    steps = [STEP.format(step) for step in (0, 1) if level == "debug"]
    assert len(lines) == 2 + len(steps)
    for line, step in zip(lines[2:], steps):
        assert re.fullmatch(step, line)


def test_nothing_is_printed_by_default(ranks: Launcher) -> None:
    job = ranks.start(4, run_steps, HSDP_LOG="")
    job.wait()
    assert job.output == ""


@pytest.mark.parametrize("variable", ["", "info"])
def test_lines_go_to_logging_instead(ranks: Launcher, variable: str) -> None:
    job = ranks.start(4, run_with_logging, "INFO", HSDP_LOG=variable)
    job.wait()
    assert job.output.splitlines() == [f"INFO hsdp {MESH}", f"INFO hsdp {LAYOUT}"]


def turn_off(way: str) -> None:
    """What a program may do to the logger, usually without thinking of hsdp."""
    if way == "disable":
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
        logging.disable(logging.INFO)
        return
    logging.config.dictConfig({  # disables existing loggers
        "version": 1,
        "root": {"level": "INFO", "handlers": ["stderr"]},
        "handlers": {"stderr": {"class": "logging.StreamHandler"}},
    })


def run_turned_off(way: str) -> None:
    turn_off(way)
    run_steps()


@pytest.mark.parametrize("way", ["disable", "dictConfig"])
@pytest.mark.parametrize("variable", ["", "Info"])
def test_what_logging_would_drop_goes_to_stderr(ranks: Launcher, way: str, variable: str) -> None:
    job = ranks.start(4, run_turned_off, way, HSDP_LOG=variable)
    job.wait()
    assert job.output.splitlines() == ([MESH, LAYOUT] if variable else [])


def run_with_a_wrong_level() -> str:
    with pytest.raises(hsdp.Error) as error:
        hsdp.init_mesh(1, 2)
    return f"{type(error.value).__name__} {error.value}"


def run_with_one_wrong_level() -> str:
    if os.environ["RANK"] == "1":
        os.environ["HSDP_LOG"] = "all"
    return run_with_a_wrong_level()


def test_another_value_is_an_error_on_every_rank(ranks: Launcher) -> None:
    told = "launch: HSDP_LOG: expected warning, info or debug, got 'all'; unset it for warnings alone"
    assert ranks.start(2, run_with_a_wrong_level, HSDP_LOG="all").wait() == [f"UsageError {told}"] * 2
    assert ranks(2, run_with_one_wrong_level) == [
        f"MismatchError mesh: rank 1 of 2 could not make its mesh: {told}", f"UsageError {told}",
    ]


def run_one_step() -> None:
    with hsdp.init_mesh() as mesh, hsdp.Reducer(mesh) as reducer:
        reducer.register("w", 2)
        add_gradient(reducer, "w", np.ones(2, np.float32), last=True)


@pytest.mark.parametrize("on_main_thread", [True, False])
def test_records_have_levels(on_main_thread: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "hsdp"):
        if on_main_thread:
            run_one_step()
        else:
            thread = threading.Thread(target=run_one_step)
            thread.start()
            thread.join()
    assert [(record.name, record.levelname) for record in caplog.records] == [
        ("hsdp", "INFO"), ("hsdp", "INFO"), ("hsdp", "DEBUG"),
    ]
    assert caplog.messages[0].startswith("hsdp: mesh 1 x 1: ranks 1 of 1, hosts 1, ")
    caplog.clear()
    run_one_step()
    assert caplog.records == []


def test_a_step_that_finish_ends_counts_its_microbatches(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "hsdp"), hsdp.init_mesh() as mesh:
        with hsdp.Reducer(mesh, name="net") as reducer:
            reducer.register("w", 2)
            for _ in range(2):
                add_gradient(reducer, "w", np.ones(2, np.float32), last=False)
            reducer.finish()
    assert re.fullmatch(STEP.format(0), caplog.messages[-1])


def run_two_meshes() -> None:
    ranks = [[0, 2]] if os.environ["RANK"] in "02" else [[1, 3]]
    hsdp.init_mesh(1, 2, ranks=ranks).close()


def test_each_mesh_has_its_line(ranks: Launcher) -> None:
    job = ranks.start(4, run_two_meshes, HSDP_LOG="info")
    job.wait()
    line = MESH.replace("2 x 2: ranks 4", "1 x 2: ranks 2")
    line = line.replace("replicate group over shared memory", "replicate group over none")
    assert job.output.splitlines() == [line] * 2


def test_what_a_filter_raises_does_not_end_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(record: logging.LogRecord) -> bool:
        raise KeyError(record.levelname)

    logger = logging.getLogger("hsdp")
    caught: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda raised: caught.append(repr(raised.exc_value)))
    monkeypatch.setattr(logger, "level", logging.INFO)
    logger.manager._clear_cache()
    monkeypatch.setattr(logger, "filters", [refuse])
    run_one_step()
    assert caught == ["KeyError('INFO')"] * 2


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_what_ends_the_program_is_no_longer_lost(
    kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(record: logging.LogRecord) -> bool:
        written.append(record.getMessage())
        if len(written) == 1:
            raise kind
        return False

    logger = logging.getLogger("hsdp")
    written: list[str] = []
    caught: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda raised: caught.append(raised.exc_type))
    monkeypatch.setattr(logger, "level", logging.INFO)
    logger.manager._clear_cache()
    monkeypatch.setattr(logger, "filters", [end])
    with pytest.raises(KeyboardInterrupt):
        hsdp.init_mesh().close()
    assert len(written) == 1 and caught == [kind]


def test_lines_after_the_end_go_to_stderr(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HSDP_LOG", "info")
    with caplog.at_level(logging.INFO, "hsdp"):
        log_sink.follow_logger()
        _hsdp.end_log()
        _hsdp.init_mesh(1, 1, "host", "cpu", [], 5.0).close()
    assert capfd.readouterr().err.startswith("hsdp: mesh 1 x 1: ranks 1 of 1, ")
    assert caplog.records == []


def records_of_logger() -> list[tuple[str, str]]:
    records: list[tuple[str, str]] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append((record.levelname, record.getMessage()))  # type: ignore
    logging.getLogger("hsdp").addHandler(handler)
    return records


def gradient_for_a_warning() -> np.ndarray:
    """One value is so large that four bits lose the others of its group."""
    gradient = np.full(128, 0.5, np.float32)
    gradient[::64] = 7
    return gradient


def run_loco() -> list[tuple[str, str]]:
    records = records_of_logger()
    gradient = gradient_for_a_warning()
    hop = hsdp.quant.LocoHop(warmup_steps=0)
    with hsdp.init_mesh(2, 1) as mesh, hsdp.Reducer(mesh, replica_hop=hop) as reducer:
        reducer.register("w", 128)
        for _ in range(3):
            add_gradient(reducer, "w", gradient, last=True)
            reducer.shard("w")
    return records


def test_a_warning_comes_once(ranks: Launcher) -> None:
    for records in ranks(2, run_loco):
        assert [level for level, _ in records] == ["WARNING"]
        assert records[0][1].startswith("hsdp: loco: 'w': quantization changed its gradient by ")


def run_turned_off_loco(way: str) -> list[tuple[str, str]]:
    turn_off(way)
    return run_loco()


def test_a_warning_of_a_disabled_logger_goes_to_stderr_if_asked_for(ranks: Launcher) -> None:
    for variable in ("", "warning"):
        job = ranks.start(2, run_turned_off_loco, "dictConfig", HSDP_LOG=variable)
        assert job.wait() == [[], []]
        lines = job.output.splitlines()
        assert len(lines) == (2 if variable else 0)
        assert all(line.startswith("hsdp: loco: 'w': quantization changed") for line in lines)


def fork_with_a_kept_line() -> list[int]:
    """Returns how many lines a forked child and then its parent write."""
    records = records_of_logger()
    hop = hsdp.quant.LocoHop(warmup_steps=0, error_every=1)
    with hsdp.init_mesh(2, 1) as mesh, hsdp.Reducer(mesh, replica_hop=hop) as reducer:
        reducer.register("w", 128)
        add_gradient(reducer, "w", gradient_for_a_warning(), last=True)
        limit = time.monotonic() + 10
        while not hop.quantization_error() and time.monotonic() < limit:
            time.sleep(0.01)
        assert records == []
        child = os.fork()
        if child == 0:
            _hsdp.end_log()
            os._exit(len(records))
        _, status = os.waitpid(child, 0)
        reducer.shard("w")
    return [os.waitstatus_to_exitcode(status), len(records)]


def test_a_forked_child_does_not_repeat_lines(ranks: Launcher) -> None:
    assert ranks(2, fork_with_a_kept_line) == [[0, 1]] * 2
