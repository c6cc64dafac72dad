"""Opens and accepts gRPC connections: the one file in which a connection would be encrypted and authenticated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from rlhf.contract import PLAIN_OPTIONS

Options = Sequence[tuple[str, Any]]
"""gRPC channel arguments, by name."""


def open_channel(address: str, options: Options = PLAIN_OPTIONS) -> grpc.Channel:
    """A channel to the server at `address`, host:port. It connects with the first call.

    Args:
        options: Channel arguments; by default those that any server accepts.
    """
    return grpc.insecure_channel(address, options)


def open_aio_channel(address: str, options: Options = PLAIN_OPTIONS) -> grpc.aio.Channel:
    """As `open_channel`, for the running event loop."""
    return grpc.aio.insecure_channel(address, options)


def listen(server: grpc.Server | grpc.aio.Server, address: str) -> int:
    """Makes a server listen on `address`, host:port, and returns the port; port 0 takes a free one.

    Raises:
        RuntimeError: The address cannot be bound.
    """
    return server.add_insecure_port(address)
