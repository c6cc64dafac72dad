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
    began = time.monotonic()
    while True:
        try:
            return addresses.probe(address)
        except OSError as error:
            waited_s = time.monotonic() - began
            is_over = error.errno != errno.EADDRINUSE or waited_s >= ENDING_S
            if is_over or not _is_ending(address, service, waited_s):
                raise
        if should_stop():
            return
        time.sleep(POLL_S)


def _is_ending(address: str, service: str, waited_s: float) -> bool:
    """Returns whether a process of a deployment listens on the port of an address, and the service does not serve, or
    has served for less than `LEARNS_S` of the wait: it takes a moment until it learns that its controller has ended."""
    port = int(address.rpartition(":")[2])
    pids = {each.pid for each in psutil.net_connections("tcp") if each.laddr and each.laddr.port == port}
    try:
        if not any(pid and is_marked(psutil.Process(pid)) for pid in pids):
            return False
    except psutil.NoSuchProcess:  # it has just ended
        return True
    return waited_s < LEARNS_S or ask(service).state != SERVING
