"""The ranks, when only torch.distributed knows them [Note: launch detection]."""

from __future__ import annotations

import os
import pathlib
import secrets
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch.distributed as dist

from hsdp import _hsdp
from hsdp.errors import MismatchError, UsageError
from hsdp.torch import private_torch
from hsdp.torch.launch.meeting_store import MeetingStore
from hsdp.torch.launch.store_rendezvous import address_of_rank_0, address_of_store

# Agreed once per default group; empty if the launcher has set everything.
_agreed: weakref.WeakKeyDictionary[Any, dict[str, str]] = weakref.WeakKeyDictionary()

_RANK_AND_SIZE = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)
# Slurm's batch and interactive shells are not parallel steps.
_NO_SLURM_STEPS = ("", "batch", "interactive", "4294967291", "4294967290")


class _Said(NamedTuple):
    job: str
    words: list[dict[str, Any]]


@contextmanager
def launched(timeout_s: float) -> Iterator[None]:
    """A block in which the launcher's variables are complete. Collective over the default group.

    Raises UsageError if the launcher contradicts torch.distributed, and MismatchError on the other
    ranks; TimeoutError if a rank does not come.
    """
    # The block rejects an invalid timeout.
    variables = _variables(timeout_s) if timeout_s > 0 else {}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    except UsageError as error:
        if variables:
            place = f"rank {dist.get_rank()} of {dist.get_world_size()}"
            error.args = (f"{error} (by torch.distributed this process is {place})",)
        raise
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def job_size() -> int:
    """The number of ranks. Does not communicate."""
    fault = _contradiction(_launcher_place())
    if fault:
        raise UsageError(fault)
    return int(dist.get_world_size())


def _variables(timeout_s: float) -> dict[str, str]:
    place = _launcher_place()
    fault = _contradiction(place)
    group = dist.group.WORLD
    known = _agreed.get(group)
    if known is not None and not fault:
        return known
    store = private_torch.default_store()
    if store is None:  # MPI: its launcher's variables are set
        if fault or place is None:
            raise UsageError(fault or "launch: expected a store of torch.distributed's default "
                             "group, got none; start the ranks with mpirun, or set RANK and "
                             "WORLD_SIZE on every rank")
        return {}
    mine = {
        "host": _host_identity(),
        # Rank and size alone do not tell the number of hosts.
        "launched": place is not None and ("LOCAL_WORLD_SIZE" in os.environ or not _text("RANK")),
        "fault": fault,
        "meets_at": {name: _text(name) for name in ("HSDP_ADDR", "HSDP_PORT") if _text(name)},
    }
    rank, size = dist.get_rank(), dist.get_world_size()
    said = _agree(store, rank, size, mine, timeout_s)
    if fault:
        raise UsageError(fault)
    for other, word in enumerate(said.words):
        if word["fault"]:
            raise MismatchError(f"launch: rank {other} of {size}: {word['fault']}", [other])
    agreed: dict[str, str] = {}
    if not all(word["launched"] for word in said.words):
        agreed = _place_by_torch(store, rank, said, timeout_s)
    _agreed[group] = agreed
    return agreed


def _launcher_place() -> tuple[int, int] | None:
    """The launcher's rank and size; None if its variables are incomplete."""
    try:
        size = _hsdp.job_size()
    except UsageError:
        return None
    for rank_name, size_name in _RANK_AND_SIZE:
        if rank_name == "SLURM_PROCID" and _text("SLURM_STEP_ID") in _NO_SLURM_STEPS:
            continue
        if _text(rank_name) or _text(size_name):
            return int(_text(rank_name)), size
    return None


def _contradiction(place: tuple[int, int] | None) -> str:
    rank, size = dist.get_rank(), dist.get_world_size()
    if place in (None, (rank, size)):
        return ""
    assert place is not None
    return (
        f"launch: expected the launcher's variables and torch.distributed to agree, got rank "
        f"{place[0]} of {place[1]} by the launcher and rank {rank} of {size} by torch.distributed; "
        "give init_process_group the launcher's numbers, or unset its variables"
    )


def _agree(
    store: Any, rank: int, size: int, mine: dict[str, Any], timeout_s: float
) -> _Said:
    """All ranks' statements, and a unique name for the job."""
    meeting = MeetingStore(store, "hsdp/launch", size, timeout_s)
    return _Said(*meeting.exchange(
        rank, mine, lambda words: [f"torch-{secrets.token_hex(16)}", words]
    ))


def _place_by_torch(store: Any, rank: int, said: _Said, timeout_s: float) -> dict[str, str]:
    hosts = [word["host"] for word in said.words]
    size = len(hosts)
    local_ranks = [other for other in range(size) if hosts[other] == hosts[rank]]
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local_ranks.index(rank)),
        "LOCAL_WORLD_SIZE": str(len(local_ranks)),
        "HSDP_JOB": said.job,
    }
    if len(local_ranks) == size:
        return variables
    if said.words[0]["meets_at"]:
        return {**variables, **said.words[0]["meets_at"]}
    far_rank = max(other for other in range(size) if hosts[other] != hosts[0])
    meeting = MeetingStore(store, f"hsdp/{said.job}", size, timeout_s)
    return {**variables, **address_of_rank_0(meeting, rank, far_rank, address_of_store(store))}


def _host_identity() -> str:
    """The same for ranks that can meet at a Unix socket and share memory. Containers on one machine
    differ, and use TCP.
    """
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network, files = os.stat("/proc/self/ns/net"), os.stat("/tmp")
    except OSError:  # unknown: no rank counts as being on the same host
        return secrets.token_hex(16)
    return f"{boot}/{os.geteuid()}/{network.st_ino}/{files.st_dev}/{files.st_ino}"


def _text(name: str) -> str:
    return os.environ.get(name, "")
