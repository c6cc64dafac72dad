"""Ports for services that a benchmark starts."""

from __future__ import annotations

import random
import socket
from pathlib import Path

EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
FIRST = 16384


def free_port() -> int:
    """A port on the loopback interface that is free at this moment, and that no connection is given by chance before
    its service starts."""
    while True:
        port = random.randrange(FIRST, int(EPHEMERAL.read_text().split()[0]))
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
