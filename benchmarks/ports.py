"""Ports for services that a benchmark starts."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A port on the loopback interface that is free at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
