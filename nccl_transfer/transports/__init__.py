"""Ways to move bytes from the arena of one rank into another process. Which one is used for a pair of ranks is
decided by where the two are: see `nccl_transfer.fetch.Fetcher`."""

from __future__ import annotations

from collections.abc import Sequence

from nccl_transfer.arena import ByteRange
from nccl_transfer.transports.base import Reading, Traffic, Transport
from nccl_transfer.transports.memfd import ArenaServer, MemfdTransport, host_id
from nccl_transfer.transports.tcp import TcpTransport, serve_fetch, stat_response
from rlhf.errors import ConfigError

__all__ = [
    "TRANSPORTS",
    "ArenaServer",
    "ByteRange",
    "MemfdTransport",
    "Reading",
    "TcpTransport",
    "Traffic",
    "Transport",
    "create_transports",
    "host_id",
    "serve_fetch",
    "stat_response",
]

TRANSPORTS: dict[str, type[Transport]] = {
    transport.name: transport for transport in (MemfdTransport, TcpTransport)
}
"""Transports by name, the ones that move fewest bytes first."""


def create_transports(names: Sequence[str] = tuple(TRANSPORTS)) -> list[Transport]:
    """A transport of each name; the first that reaches a rank is used for it.

    Raises:
        ConfigError: A name is unknown; the text lists the known ones.
    """
    for name in names:
        if name not in TRANSPORTS:
            raise ConfigError(f"unknown transport {name!r}; known: {', '.join(TRANSPORTS)}")
    return [TRANSPORTS[name]() for name in names]
