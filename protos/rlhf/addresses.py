"""Checks of addresses in configurations, host:port, where a host is a name, an IPv4 address, or an IPv6 address in
brackets."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket

TARGET_KINDS = (
    *("dns", "fake", "google-c2p", "google-c2p-experimental", "ipv4", "ipv6"),
    *("unix", "unix-abstract", "vsock", "xds"),
)
"""Names that cannot be hosts, because gRPC reads them as a scheme: `unix:7101` is a socket in the file system."""


def check_address(address: str) -> None:
    """Checks that a text is an address, host:port, to which clients can connect.

    Raises:
        ValueError: The text is not host:port, or the host is a wildcard such as 0.0.0.0.
    """
    host, _, port = address.rpartition(":")
    if not host or not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise ValueError(f"{address!r} is not host:port with a port from 1 to 65535")
    check_host(host)
    if is_wildcard(host):
        raise ValueError(f"{address!r} is no address that others can connect to")


def check_host(host: str) -> None:
    """Checks that a text is a host without a port.

    Raises:
        ValueError: The text is not a name, an IPv4 address or an IPv6 address in brackets, or it is one of
            TARGET_KINDS.
    """
    if host.startswith("[") and host.endswith("]"):
        try:
            ipaddress.IPv6Address(host[1:-1])
        except ValueError as error:
            raise ValueError(f"{host!r} is no IPv6 address: {error}") from None
    elif ":" in host:
        raise ValueError(f"{host!r} is not a host alone; it has no port, and an IPv6 address is in brackets")
    elif not re.fullmatch(r"[\w.-]+", host):
        raise ValueError(f"{host!r} is no host: neither a name nor an address")
    elif not _can_be_looked_up(host):
        raise ValueError(f"{host!r} is no host: a part between dots is empty or has more than 63 characters")
    elif host.lower() in TARGET_KINDS:
        raise ValueError(f"{host!r} is no host: gRPC takes it for the kind of an address")


def address_host(address: str) -> str:
    """Returns the host of an address, host:port; an IPv6 address in brackets."""
    return address.rpartition(":")[0]


def spelled_out(address: str) -> frozenset[tuple[str, int]]:
    """Returns the hosts and port of an address, host:port, in one spelling: localhost as the two addresses that it
    usually has, IP addresses in their shortest form, names in lower case. Looks no name up."""
    host, _, port = address.rpartition(":")
    name = host.strip("[]").lower().rstrip(".")
    if name == "localhost":
        return frozenset({("127.0.0.1", int(port)), ("::1", int(port))})
    with contextlib.suppress(ValueError):
        name = str(ipaddress.ip_address(name))
    return frozenset({(name, int(port))})


def listening(address: str) -> frozenset[tuple[str, int]]:
    """Returns the IP addresses and port that a server of this host listens on at an address, host:port; none where the
    host is unknown."""
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError:
        return frozenset()
    return frozenset((str(target[0]), int(port)) for *_, target in found)


def overlap(one: tuple[str, int], other: tuple[str, int]) -> bool:
    """Returns whether two servers cannot both listen on these IP addresses and ports: they are the same, or a wildcard
    of the port has the other."""
    if one[1] != other[1]:
        return False
    if one[0] == other[0] or "::" in (one[0], other[0]):
        return True
    return any(is_wildcard(a) and ":" not in b for a, b in ((one[0], other[0]), (other[0], one[0])))


def is_wildcard(host: str) -> bool:
    """Returns whether a host is a wildcard, such as 0.0.0.0 or [::]: a server that listens on it listens on all
    addresses."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


def names_loopback(host: str) -> bool:
    """Returns whether a host is localhost or an IP address of loopback. Looks no name up: many hosts resolve their own
    name to loopback."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def is_loopback(host: str) -> bool:
    """Returns whether only this host can connect to a server that listens on `host`: a name or address whose IP
    addresses are all of loopback. False for a wildcard and for a name that is not known."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found)


def probe(address: str) -> None:
    """Checks that a server can listen on an address: binds it and releases it again.

    Raises:
        OSError: The address is in use, is not one of this host, or is unknown.
    """
    host, _, port = address.rpartition(":")
    for family, kind, protocol, _, target in socket.getaddrinfo(
        host.strip("[]"), int(port), type=socket.SOCK_STREAM
    ):
        with socket.socket(family, kind, protocol) as listener:
            # As in the server: a port with connections in TIME_WAIT is free.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(target)


def _can_be_looked_up(name: str) -> bool:
    """Returns whether the `socket` module, which encodes names in this way, can look a name up, known or not."""
    try:
        name.encode("idna")
    except UnicodeError:
        return False
    return True
