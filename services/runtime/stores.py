"""torch's stores for ranks on several hosts, each of which listens on one address alone, and how ranks enter one."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from rlhf.errors import ConfigError, OutOfStep

OF_ONE_HOST = frozenset({"bind_host", "advertise_host", "startup_timeout_s"})
"""Keys of a service's table that may differ between the hosts of its ranks."""
READ_TIMEOUT_S = 10.0
"""Longest time, in seconds, that rank 0 keeps its store open for others to read why the ranks do not fit together."""


def listening_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """Opens a store on a host and port; raises OSError if this host cannot listen there."""
    # A TCPStore that binds by itself listens on every interface, whatever host it is given.
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(address)
    return TCPStore(
        host,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def connected_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """Connects to the store of another process, for whose start it waits up to `timeout_s` seconds; raises RuntimeError
    after it."""
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


def store_of_hosts(place: str, rank: int, size: int, table: str, timeout_s: float) -> Store:
    """Opens the store of a service over several hosts on rank 0, and connects to it on the other ranks; waits until all
    have entered it, and compares their tables. Collective.

    Args:
        place: host:port of the store.
        rank: Rank of this process.
        size: Number of ranks of the service.
        table: The service's table, as JSON, that this rank was started with.
        timeout_s: How long to wait for the other ranks, in seconds.

    Raises:
        ConfigError: Rank 0 cannot listen there, a rank was started with another table than rank 0, or this one is there
            twice.
        OutOfStep: A rank has not entered in time, or rank 0 has ended.
    """
    store = _opened(place, rank, timeout_s)
    _enter(PrefixStore("rlhf-hosts", store), rank, size, table, timeout_s)
    return store


def _opened(place: str, rank: int, timeout_s: float) -> TCPStore:
    """Opens the store, or connects to it; arguments and errors are those of `store_of_hosts`."""
    host, _, port = place.rpartition(":")
    host = host.strip("[]")
    if rank == 0:
        try:
            return listening_store(host, int(port), timeout_s)
        except OSError as error:
            raise ConfigError(
                f"rank 0 cannot open the store of its service at {place}: {error.strerror}"
            ) from None
    logging.info("waiting for the store of rank 0 at %s", place)
    try:
        return connected_store(host, int(port), timeout_s)
    except RuntimeError:
        raise OutOfStep(
            f"rank {rank} waited {timeout_s:g} s for the store of rank 0 at {place}; is rlhf-deploy up on its host?"
        ) from None


def _enter(store: Store, rank: int, size: int, table: str, timeout_s: float) -> None:
    """Enters the store, waits for all ranks and compares their tables; arguments and errors are those of
    `store_of_hosts`."""
    try:
        if store.add(f"entered/{rank}", 1) > 1:
            raise ConfigError(
                f"rank {rank} is in the service's store already: another host has started it too, by another config, "
                "or other hosts still run ranks of an earlier start; stop the services on all hosts first"
            )
        store.set(f"table/{rank}", table)
        tables = _tables(store, rank, size, timeout_s)
        if wrong := _difference(tables):
            _leave_together(store, rank, size)
            raise ConfigError(wrong)
    except RuntimeError:
        raise OutOfStep(f"rank {rank} has lost the store of rank 0, which has ended") from None


def _tables(store: Store, rank: int, size: int, timeout_s: float) -> list[dict[str, object]]:
    """Returns the tables of all ranks, once they are there; raises OutOfStep where they are not in time."""
    keys = [f"table/{peer}" for peer in range(size)]
    missing = [peer for peer, key in enumerate(keys) if not store.check([key])]
    if missing:
        logging.info("waiting for ranks %s of other hosts", ", ".join(map(str, missing)))
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError:
        missing = [str(peer) for peer, key in enumerate(keys) if not store.check([key])]
        if not missing:
            raise
        raise OutOfStep(
            f"rank {rank} waited {timeout_s:g} s for ranks of other hosts; missing: {', '.join(missing)}"
        ) from None
    return [json.loads(store.get(key)) for key in keys]


def _difference(tables: list[dict[str, object]]) -> str:
    """Returns how the table of a rank differs from that of rank 0; empty where none does."""
    first = tables[0]
    for rank, table in enumerate(tables):
        keys = sorted((first.keys() | table.keys()) - OF_ONE_HOST)
        found = [
            f"{key} is {json.dumps(table.get(key))} there and {json.dumps(first.get(key))} on rank 0"
            for key in keys
            if table.get(key) != first.get(key)
        ]
        if found:
            return f"rank {rank} was started with another config than rank 0: {'; '.join(found)}"
    return ""


def _leave_together(store: Store, rank: int, size: int) -> None:
    """Returns when the ranks have read the store, on rank 0, with which it ends; on the others at once."""
    store.set(f"read/{rank}", "")
    with contextlib.suppress(RuntimeError):
        if rank == 0:
            store.wait([f"read/{peer}" for peer in range(size)], timedelta(seconds=READ_TIMEOUT_S))
