"""Where ranks on several hosts meet when torch's store is all that joins them."""

from __future__ import annotations

import os
import secrets
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hsdp.errors import TimeoutError, UsageError

_PROBE_S = 5.0


def meet_at_store(rank: int, size: int, timeout_s: float) -> None:
    """Sets HSDP_ADDR and HSDP_PORT, for this process, to an address of rank 0 that other hosts reach.

    Agreed over the store at MASTER_ADDR:MASTER_PORT (torchrun's, or torch.distributed's own).
    Nothing where no store answers: the variables stay unset, and connecting says so. The store is not
    authenticated: it carries a secret, into HSDP_SECRET, only with HSDP_TRUST_STORE=1.

    Raises UsageError, on every rank, when rank 0 has not the address that others know it by;
    TimeoutError when a rank does not come.
    """
    master = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    reached = _reached_address(*master)
    if reached is None:
        return
    run = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        store = dist.PrefixStore(f"hsdp/{run}", _open_store(*master, timeout_s))
        # Names may lead a host to its own loopback; the last rank is on another host than rank 0.
        if rank == size - 1:
            store.set("address", reached)
        address = store.get("address").decode()
        if rank == 0:
            store.set("port", _free_port(address))
            store.set("secret", _offered_secret())
        port, secret = store.get("port").decode(), store.get("secret").decode()
    except dist.DistError as error:
        raise TimeoutError(
            f"rendezvous: expected ranks 0 and {size - 1} of {size} at torch's store at "
            f"{master[0]}:{master[1]} within {timeout_s:g} s: {error}; check that all ranks were "
            "started and still run, or set HSDP_ADDR and HSDP_PORT on every rank",
            [0, size - 1],
        ) from error
    if not port:
        raise UsageError(
            f"rendezvous: expected rank 0 to listen at {address}, where rank {size - 1} of {size} "
            "reaches it, got an address that is not its own; set HSDP_ADDR and HSDP_PORT on every "
            "rank to an address of rank 0's host and a free port of it"
        )
    os.environ["HSDP_ADDR"], os.environ["HSDP_PORT"] = address, port
    if secret and _trusted() and not _has_secret():
        os.environ["HSDP_SECRET"] = secret


def _reached_address(host: str, port: int) -> str | None:
    try:
        with socket.create_connection((host, port), _PROBE_S) as connection:
            return str(connection.getpeername()[0])
    except OSError:
        return None


def _open_store(host: str, port: int, timeout_s: float) -> Any:
    if dist.is_initialized():
        return dist.distributed_c10d._get_default_store()
    limit = timedelta(seconds=timeout_s)
    return dist.TCPStore(host, port, is_master=False, timeout=limit, wait_for_workers=False)


def _free_port(address: str) -> str:
    try:
        family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
            return str(probe.getsockname()[1])
    except OSError:
        return ""


def _trusted() -> bool:
    return os.environ.get("HSDP_TRUST_STORE") == "1"


def _has_secret() -> bool:
    return "HSDP_SECRET" in os.environ or "HSDP_SECRET_FILE" in os.environ


def _offered_secret() -> str:
    return secrets.token_hex(32) if _trusted() and not _has_secret() else ""
