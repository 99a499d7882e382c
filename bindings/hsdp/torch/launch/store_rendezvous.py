"""Where ranks on several hosts meet if they are only connected through torch's store."""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hsdp.errors import MismatchError, TimeoutError, UsageError
from hsdp.torch import private_torch
from hsdp.torch.launch.meeting_store import MeetingStore

_PROBE_S = 5.0
_NONE = "none"
_UNREADABLE = "an HSDP_SECRET_FILE that cannot be read"


def meet_at_store(rank: int, size: int, timeout_s: float) -> None:
    """Sets HSDP_ADDR and HSDP_PORT, for this process, to an address of rank 0 that other hosts can
    reach.

    The ranks agree on it over the store at MASTER_ADDR:MASTER_PORT (torchrun's, or torch.distributed's
    own). Without a store the variables stay unset, and connecting reports that. The store is not
    authenticated: it carries a secret, into HSDP_SECRET, only with HSDP_TRUST_STORE=1.

    Raises UsageError on every rank if rank 0 lacks the address that others use for it; MismatchError if
    not all ranks have a secret; TimeoutError if a rank does not come.
    """
    master = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    reached = _reached_address(*master)
    if reached is None:
        return
    try:
        opened = _open_store(*master, timeout_s)
    except dist.DistError as error:
        raise TimeoutError(
            f"rendezvous: expected torch's store at {master[0]}:{master[1]} within {timeout_s:g} s: "
            f"{error}; check that the launcher still runs, or set HSDP_ADDR and HSDP_PORT on every "
            "rank"
        ) from error
    # A unique name for this start: the store has entries of earlier starts of a restarted job.
    start, sources = MeetingStore(opened, "hsdp/meet", size, timeout_s).exchange(
        rank, _secret_source(), lambda words: [secrets.token_hex(8), words]
    )
    _require_one_source(sources)
    store = MeetingStore(opened, f"hsdp/{start}", size, timeout_s)
    # Names may lead a host to its own loopback; the last rank is on another host than rank 0.
    os.environ.update(address_of_rank_0(store, rank, size - 1, reached))


def address_of_rank_0(
    store: MeetingStore, rank: int, far_rank: int, reached: str
) -> dict[str, str]:
    """HSDP_ADDR and HSDP_PORT, agreed with the others, and HSDP_SECRET if the store may carry it.

    `reached`: the store's address as seen from this rank; the store is usually on rank 0's host. "" if
    it has no address. The one seen by `far_rank`, on another host, is used.
    """
    if rank == far_rank:
        store.put("reached", reached)
    if rank == 0:
        own = store.get("reached", far_rank) or _named_address()
        store.put("address", own)
        store.put("port", _free_port(own) if own else "")
        store.put("secret", _offered_secret())
    address, port, secret = (store.get(key, 0) for key in ("address", "port", "secret"))
    if not port:
        got = f"{address}, which is not its own" if address else "a name that means a loopback"
        raise UsageError(
            f"rendezvous: expected an address of rank 0 at which rank {far_rank} on another host "
            f"reaches it, got {got}; set HSDP_ADDR and HSDP_PORT on every rank to an address of "
            "rank 0's host and a free port of it"
        )
    found = {"HSDP_ADDR": address, "HSDP_PORT": port}
    if secret and _trusted() and not _has_secret():
        found["HSDP_SECRET"] = secret
    return found


def address_of_store(store: Any) -> str:
    """The address of a torch store as seen from this host; "" for one without, such as a file."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return ""
    return _reached_address(store.host, store.port) or ""


def _reached_address(host: str, port: int) -> str | None:
    try:
        with socket.create_connection((host, port), _PROBE_S) as connection:
            return str(connection.getpeername()[0])
    except OSError:
        return None


def _open_store(host: str, port: int, timeout_s: float) -> Any:
    if dist.is_initialized():
        return private_torch.default_store()
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


def _named_address() -> str:
    """The address to which this host's name leads others; "" if that is a loopback."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return ""
    for *_, place in found:
        address = ipaddress.ip_address(str(place[0]).partition("%")[0])
        if not (address.is_loopback or address.is_link_local):
            return str(address)
    return ""


def _secret_source() -> str:
    file = os.environ.get("HSDP_SECRET_FILE")
    if file and not _is_readable(file):
        return _UNREADABLE
    if _has_secret():
        return "HSDP_SECRET or HSDP_SECRET_FILE"
    return "HSDP_TRUST_STORE" if _trusted() else _NONE


# Does not read it, since it may be a pipe.
def _is_readable(file: str) -> bool:
    return os.access(file, os.R_OK)


def _require_one_source(sources: list[str]) -> None:
    """Raises MismatchError unless the secrets have one source; without any, each rank reports that."""
    if len(set(sources)) == 1:
        return
    without = [rank for rank, source in enumerate(sources) if source in (_NONE, _UNREADABLE)]
    odd = without[0] if without else next(
        rank for rank, source in enumerate(sources) if source != sources[0]
    )
    other = next(rank for rank, source in enumerate(sources) if source != sources[odd])
    raise MismatchError(
        f"rendezvous: expected one source of the secret on every rank, got {sources[odd]} on rank {odd} "
        f"and {sources[other]} on rank {other} of {len(sources)}; set HSDP_SECRET, HSDP_SECRET_FILE or "
        "HSDP_TRUST_STORE alike on all ranks",
        [odd],
    )


def _trusted() -> bool:
    return os.environ.get("HSDP_TRUST_STORE") == "1"


def _has_secret() -> bool:
    return bool(os.environ.get("HSDP_SECRET") or os.environ.get("HSDP_SECRET_FILE"))


def _offered_secret() -> str:
    return secrets.token_hex(32) if _trusted() and not _has_secret() else ""
