"""Waits for addresses of services that are about to end, such as those of a run whose controller was killed."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable

import psutil

from deploy.health import SERVING, ask
from deploy.processes import POLL_S, is_marked
from rlhf import addresses
from settings.service import ENDING_S

LEARNS_S = 2.0
"""Time, in seconds, within which a service that a killed controller has left begins to end."""

SETTLED_S = 0.3
"""Time, in seconds, for which an address must be held by other processes before it counts as in use: that of a service
that has ended between the probe and the search for it is free at the next probe."""


def never() -> bool:
    """Returns False."""
    return False


def probe_when_free(address: str, service: str, should_stop: Callable[[], bool] = never) -> None:
    """Checks that a process can listen on an address. Waits for up to `ENDING_S` while a service that rlhf-deploy has
    started holds it and is about to end.

    Args:
        address: host:port.
        service: Address of that service, whose health is asked for.
        should_stop: Returns True to end the wait, which then raises no error.

    Raises:
        OSError: The address is in use, or not this host's.
    """
    began = was_ending = time.monotonic()
    while True:
        try:
            return addresses.probe(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() - began >= ENDING_S:
                raise
            if _is_ending(address, service, time.monotonic() - began):
                was_ending = time.monotonic()
            elif time.monotonic() - was_ending >= SETTLED_S:
                raise
        if should_stop():
            return
        time.sleep(POLL_S)


def _is_ending(address: str, service: str, waited_s: float) -> bool:
    """Returns whether a process of a deployment listens on the port of an address, and the service does not serve, or
    has served for less than `LEARNS_S` of the wait: it takes a moment until it learns that its controller has ended.
    Also True for a process that exits: its environment, which has the mark, is freed before its sockets are."""
    port = int(address.rpartition(":")[2])
    pids = {each.pid for each in psutil.net_connections("tcp") if each.laddr and each.laddr.port == port}
    try:
        holders = [psutil.Process(pid) for pid in pids if pid]
        if any(process.memory_info().vms == 0 for process in holders):
            return True
        if not any(is_marked(process) for process in holders):
            return False
    except psutil.NoSuchProcess:  # it has just ended
        return True
    return waited_s < LEARNS_S or ask(service).state != SERVING
