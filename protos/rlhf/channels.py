"""Opens gRPC channels and servers, with the credentials of this process (`rlhf.security`), and in this file alone."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
import grpc.aio

from rlhf.access import Access
from rlhf.contract import PLAIN_OPTIONS
from rlhf.errors import one_line
from rlhf.guard import Guard
from rlhf.security import Certificates, current

Options = Sequence[tuple[str, Any]]
"""gRPC channel arguments, by name."""


MOST_RPCS = 1 << 14
"""Most RPCs, streams included, that a server handles at a time; further ones end with RESOURCE_EXHAUSTED."""


CLOSED = "Socket closed"
"""gRPC's reason where a server ends a connection at its first bytes."""


def open_channel(
    address: str, options: Options = PLAIN_OPTIONS, access: Access = Access.CALL
) -> grpc.Channel:
    """Opens a channel to the server at `address`, host:port, which connects at its first call.

    Args:
        address: host:port.
        options: gRPC channel arguments. Default: PLAIN_OPTIONS, which any server accepts.
        access: Highest class of the methods that are called over the channel. Determines the token that is sent
            to the server (`Security.token_for`); it should not allow more, since the server could misuse it. Default:
            CALL.
    """
    certificates = current().certificates
    if certificates is None:
        return grpc.insecure_channel(address, options)
    return grpc.secure_channel(address, _credentials(certificates, access), _named(options, certificates))


def open_aio_channel(
    address: str, options: Options = PLAIN_OPTIONS, access: Access = Access.CALL
) -> grpc.aio.Channel:
    """Opens a grpc.aio channel for the running event loop; otherwise as `open_channel`."""
    certificates = current().certificates
    if certificates is None:
        return grpc.aio.insecure_channel(address, options)
    return grpc.aio.secure_channel(address, _credentials(certificates, access), _named(options, certificates))


def why_not_connected(details: str) -> str:
    """Returns the reason of a failed connection from gRPC's message, as one line without addresses, and with a hint
    where the server may ask for TLS and this process has no certificates."""
    reason = one_line(
        re.sub(r".*ipv[46]:\S+: ", "", details).removeprefix("Failed to connect to remote host: ")
    )
    is_plain = current().certificates is None
    return (
        f"{reason} (as by a server with TLS; no [security] is given here)"
        if is_plain and reason == CLOSED
        else reason
    )


def open_server(options: Options, classes: Mapping[str, Access]) -> tuple[grpc.aio.Server, Guard]:
    """Makes a grpc.aio server that asks for tokens where this process has some; `listen` gives it a port.

    Args:
        options: gRPC channel arguments.
        classes: Class of each method, by path, as for `Guard`.

    Returns:
        The server, and the guard that knows what its clients may do.
    """
    security = current()
    guard = Guard(security, classes)
    interceptors = [guard] if security.tokens else []
    server = grpc.aio.server(interceptors=interceptors, options=options, maximum_concurrent_rpcs=MOST_RPCS)
    return server, guard


def listen(server: grpc.Server | grpc.aio.Server, address: str) -> int:
    """Makes a server listen on `address`, host:port, and returns the port. Port 0 chooses a free one.

    Raises:
        RuntimeError: The address cannot be bound.
    """
    certificates = current().certificates
    if certificates is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, certificates.server_credentials)


def _credentials(certificates: Certificates, access: Access) -> grpc.ChannelCredentials:
    """Returns the credentials of a channel: certificate, and a token for a class if this process has one, which gRPC
    sends over encrypted connections alone."""
    credentials, token = certificates.channel_credentials, current().token_for(access)
    if not token:
        return credentials
    return grpc.composite_channel_credentials(credentials, grpc.access_token_call_credentials(token))


def _named(options: Options, certificates: Certificates) -> Options:
    """Returns the options with the name that the server's certificate must have, if it is not the host's."""
    name = certificates.server_name
    return (*options, ("grpc.ssl_target_name_override", name)) if name else options
