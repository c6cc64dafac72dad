"""Addresses at which the ranks of a service listen and are reached, on one host or on several."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from nccl_transfer.refs.shards import Endpoint
from rlhf.addresses import address_host, names_loopback
from rlhf.errors import ConfigError
from rlhf.rendezvous import is_on_one_host
from settings.service import ServiceTable

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class HostAddresses:
    """Addresses of the ranks on this host, without a port: a host name, an IPv4 address, or an IPv6 address in
    brackets.

    Attributes:
        listen: Address that the ranks listen on.
        advertised: Address that clients and other ranks connect to.
    """

    listen: str
    advertised: str


def cpu_name() -> str:
    """Returns the name of this host's CPU, such as "AMD EPYC 7B13"; the architecture if the system does not name
    it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def host_addresses(table: ServiceTable) -> HostAddresses:
    """Returns the addresses of the ranks on this host.

    The first host (GROUP_RANK 0 in the environment) has rank 0, and its ranks use the host of the service's address.
    Ranks on any other host use the address from which that host sends to the first. `bind_host` and `advertise_host`
    of the table override this.

    Raises:
        ConfigError: This host has no route to the first.
    """
    first = address_host(table.address)
    own = first if os.environ.get("GROUP_RANK", "0") == "0" else source_host(first)
    return HostAddresses(table.bind_host or own, table.advertise_host or own)


def source_host(target: str) -> str:
    """Returns the local address from which this host sends to a target host; IPv6 in brackets. Sends nothing.

    Raises:
        ConfigError: The target's name is unknown, or there is no route to it.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            target.strip("[]"), 1, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # a datagram socket chooses a route and sends nothing
            host = probe.getsockname()[0]
    except OSError as error:
        raise ConfigError(
            f"this host has no route to {target}, the host of rank 0: {error.strerror}"
        ) from None
    return f"[{host}]" if family == socket.AF_INET6 else host


def interface_of(host: str) -> str | None:
    """Returns the name of this host's network interface that has the address of `host`; None if none has."""
    address = _address_of(host)
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, has in interfaces if address in {each.address for each in has}), None)


def network_interfaces(here: HostAddresses, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables that restrict gloo and NCCL to the network interface of the configured
    address, instead of one that the libraries choose. If all ranks are on one host, gloo is restricted to loopback;
    NCCL is not, since it also carries rows between services, which may be on other hosts.

    Args:
        here: Addresses of the ranks on this host.
        environment: Environment of the rank; variables that it has already are left out of the result.
    """
    own = interface_of(here.advertised) or interface_of(here.listen)
    gloo = interface_of(LOOPBACK) if is_on_one_host(environment) else own
    wanted = {"GLOO_SOCKET_IFNAME": gloo, "NCCL_SOCKET_IFNAME": f"={own}" if own else None}
    return {name: value for name, value in wanted.items() if value and name not in environment}


def check_reachable(endpoints: Sequence[Endpoint], listen: str) -> None:
    """Raises ConfigError if the ranks are on several hosts and one of them can be reached from its own host only,
    because it listens on or advertises a loopback address.

    Args:
        endpoints: Endpoints of all ranks of the service.
        listen: Host that this rank listens on.
    """
    # Without the user id in host ids: ranks of two users share no memory, but connect.
    hosts = {endpoint.host_id.rpartition(":")[0] for endpoint in endpoints}
    if len(hosts) == 1:
        return
    for endpoint in endpoints:
        if names_loopback(address_host(endpoint.address)):
            raise ConfigError(
                f"services.{endpoint.service}.address: ranks are on {len(hosts)} hosts, and rank {endpoint.rank} is at "
                f"{endpoint.address}, where only its own host reaches it"
            )
    # Many hosts resolve their own name to loopback (Debian: 127.0.1.1), and other hosts do not.
    address = _address_of(listen)
    if address is not None and names_loopback(address):
        raise ConfigError(
            f"services.{endpoints[0].service}.bind_host: ranks are on {len(hosts)} hosts, and {listen}, where they "
            f"listen on this one, is {address} here; name an address that others reach"
        )


def _address_of(host: str) -> str | None:
    """Returns the IP address that a host name resolves to; None for an unknown host."""
    try:
        return str(socket.getaddrinfo(host.strip("[]"), None)[0][4][0])
    except OSError:
        return None
