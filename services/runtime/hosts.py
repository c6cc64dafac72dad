"""Where the ranks of a service listen and where others reach them, be they on one host or on several."""

from __future__ import annotations

import ipaddress
import os
import platform
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from nccl_transfer.refs.shards import Endpoint
from rlhf.errors import ConfigError
from rlhf.rendezvous import is_on_one_host
from settings.service import ServiceTable

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class HostAddresses:
    """Hosts without a port, as in addresses: a name, an IPv4 address, or an IPv6 address in brackets.

    Attributes:
        listen: Where the ranks here listen.
        advertised: Where others find them.
    """

    listen: str
    advertised: str


def cpu_name() -> str:
    """Name of this host's CPU, such as "AMD EPYC 7B13"; its architecture where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def host_addresses(table: ServiceTable) -> HostAddresses:
    """The place of this host's ranks.

    Hosts are numbered (GROUP_RANK), and rank 0 is on the first. Ranks there are at the host of the service's address;
    those on another are where that host sees them, which is the address this one would send to it from.

    Raises:
        ConfigError: There is no way to the first host.
    """
    first = table.address.rpartition(":")[0]
    own = first if os.environ.get("GROUP_RANK", "0") == "0" else source_host(first)
    return HostAddresses(table.bind_host or own, table.advertise_host or own)


def source_host(target: str) -> str:
    """The address that this host sends from to another.

    Raises:
        ConfigError: It does not know the other, or no way to it.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            target.strip("[]"), 1, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # of datagrams: chooses a route and sends nothing
            host = probe.getsockname()[0]
    except OSError as error:
        raise ConfigError(
            f"there is no way from here to {target}, where rank 0 is: {error.strerror}"
        ) from None
    return f"[{host}]" if family == socket.AF_INET6 else host


def interface_of(host: str) -> str | None:
    """The network interface that has a host's address; None where it is not an interface's of this host."""
    address = _address_of(host)
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, has in interfaces if address in {each.address for each in has}), None)


def network_interfaces(here: HostAddresses, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that keep gloo and NCCL on the interfaces that the config names; left alone, they take one that
    they choose. Ranks that are all on one host have no need of gloo beyond it. NCCL also carries rows between services,
    which may be on others.

    Args:
        environment: Of the rank. What it says already stays.
    """
    own = interface_of(here.advertised) or interface_of(here.listen)
    gloo = interface_of(LOOPBACK) if is_on_one_host(environment) else own
    wanted = {"GLOO_SOCKET_IFNAME": gloo, "NCCL_SOCKET_IFNAME": f"={own}" if own else None}
    return {name: value for name, value in wanted.items() if value and name not in environment}


def check_reachable(endpoints: Sequence[Endpoint], listen: str) -> None:
    """Raises ConfigError where ranks are on several hosts and one is found only on its own.

    Args:
        listen: Host that this rank listens on.
    """
    # Without the user, who has to be the same to share memory and not to connect.
    hosts = {endpoint.host_id.rpartition(":")[0] for endpoint in endpoints}
    if len(hosts) == 1:
        return
    for endpoint in endpoints:
        if _is_loopback(endpoint.address.rpartition(":")[0]):
            raise ConfigError(
                f"services.{endpoint.service}.address: ranks are on {len(hosts)} hosts, and rank {endpoint.rank} is at "
                f"{endpoint.address}, where only its own host reaches it"
            )
    # Many a host has its own name on loopback (Debian: 127.0.1.1), and others know better.
    address = _address_of(listen)
    if address is not None and _is_loopback(address):
        raise ConfigError(
            f"services.{endpoints[0].service}.bind_host: ranks are on {len(hosts)} hosts, and {listen}, where they "
            f"listen on this one, is {address} here; name an address that others reach"
        )


def _address_of(host: str) -> str | None:
    """The address that a host name resolves to; None for an unknown host."""
    try:
        return str(socket.getaddrinfo(host.strip("[]"), None)[0][4][0])
    except OSError:
        return None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
