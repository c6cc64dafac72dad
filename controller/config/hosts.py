"""Hosts of services: HOST of the devices of each rank, HOST/gpu:N or HOST/cpu:N, or the host of the service's address.
Pure functions."""

from __future__ import annotations

from collections.abc import Mapping

from controller.config.config import Config
from controller.config.devices import host_of
from rlhf.addresses import address_host, names_loopback
from rlhf.errors import ConfigError


def rank_hosts(config: Config) -> dict[str, tuple[str, ...]]:
    """Returns the name of the host of each rank, in rank order, by name of the service; without external services.

    A service whose devices name no host is on the host of its address: under the name that devices of other services
    with this address host have, else under that of the address. The name is empty for an address of loopback.

    Raises:
        ConfigError: Some of the devices of a service's ranks name a host and others do not, the ranks of a host are not
            consecutive, or an address host is that of ranks 0 on two hosts.
    """
    services = {name: table for name, table in config.services.items() if not table.external}
    placed = {name: hosts for name in services if any(hosts := _device_hosts(config, name))}
    by_address: dict[str, tuple[str, str]] = {}
    for name, hosts in placed.items():
        host = address_host(services[name].address)
        if names_loopback(host):
            continue
        first, other = by_address.setdefault(host, (hosts[0], name))
        if first != hosts[0]:
            raise ConfigError(
                f"services.{name}.address: {host} is the host of services.{other}, whose rank 0 is on {first}, and "
                f"rank 0 of this service is on {hosts[0]}; the host of an address is that of rank 0"
            )
    return {
        name: placed.get(name) or (_unplaced_host(table.address, by_address),) * table.ranks
        for name, table in services.items()
    }


def _unplaced_host(address: str, by_address: Mapping[str, tuple[str, str]]) -> str:
    host = address_host(address)
    return "" if names_loopback(host) else by_address.get(host, (host, ""))[0]


def _device_hosts(config: Config, name: str) -> tuple[str, ...]:
    """Returns the hosts that the devices of a service's ranks name, in rank order; empty texts where they name none."""
    devices = config.device_order(name)[: config.services[name].ranks]
    hosts = tuple(map(host_of, devices))
    if any(hosts) and not all(hosts):
        named, unnamed = devices[[*map(bool, hosts)].index(True)], devices[hosts.index("")]
        raise ConfigError(
            f"services.{name}: {named} names a host and {unnamed} does not; either all devices or none must"
        )
    for rank in range(1, len(hosts)):
        if hosts[rank] != hosts[rank - 1] and hosts[rank] in hosts[:rank]:
            raise ConfigError(
                f"services.{name}: ranks of {hosts[rank]} are not consecutive (devices in rank order: "
                f"{', '.join(devices)}); name the devices of one host after those of another"
            )
    return hosts
