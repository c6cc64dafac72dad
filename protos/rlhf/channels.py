"""Opens gRPC channels and server ports. Encryption and authentication of connections would be added in this file
alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from rlhf.contract import PLAIN_OPTIONS

Options = Sequence[tuple[str, Any]]
"""gRPC channel arguments, by name."""


def open_channel(address: str, options: Options = PLAIN_OPTIONS) -> grpc.Channel:
    """Opens a channel to the server at `address`, host:port, which connects at its first call.

    Args:
        address: host:port.
        options: gRPC channel arguments. Default: PLAIN_OPTIONS, which any server accepts.
    """
    return grpc.insecure_channel(address, options)


def open_aio_channel(address: str, options: Options = PLAIN_OPTIONS) -> grpc.aio.Channel:
    """Opens a grpc.aio channel for the running event loop; otherwise as `open_channel`."""
    return grpc.aio.insecure_channel(address, options)


def listen(server: grpc.Server | grpc.aio.Server, address: str) -> int:
    """Makes a server listen on `address`, host:port, and returns the port. Port 0 chooses a free one.

    Raises:
        RuntimeError: The address cannot be bound.
    """
    return server.add_insecure_port(address)
