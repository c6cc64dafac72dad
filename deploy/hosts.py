"""Choice of the host whose ranks `rlhf-deploy` starts, where a config has several."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from controller.config.config import Config
from controller.config.devices import host_of
from controller.config.hosts import rank_hosts
from deploy.ending import never, probe_when_free
from rlhf.addresses import (
    address_host,
    check_address,
    is_loopback,
    is_wildcard,
    listening,
    names_loopback,
    overlap,
    probe,
)
from rlhf.errors import ConfigError
from settings.service import ServiceTable

STORE_PORTS = 10_000
"""The ranks of a service over several hosts meet at the port of its address and this number."""


@dataclass(frozen=True)
class HostPlan:
    """The ranks of services on this host.

    Attributes:
        host: Name of this host in the config; empty where all ranks are on this host, whatever its name.
        hosts: Host of each rank, in rank order, by name of the service; only services with a rank on this host.
    """

    host: str
    hosts: Mapping[str, tuple[str, ...]]

    @staticmethod
    def of(config: Config, names: Sequence[str], given: str | None = None) -> HostPlan:
        """Makes the plan of this host.

        Args:
            config: Configuration of the run.
            names: Names of the services to start, on whatever hosts; none of them is external.
            given: Name of this host in the config. Default: the one among the hosts of all services that is this host's
                name or address, or where that is unclear the one among those of `names`. All ranks are on this host
                where the config names no host for them, or one.

        Raises:
            ConfigError: No rank is on the host, or none of the hosts is this one, or several are; or there are several
                hosts, and that of a service is unclear.
        """
        is_local = all(names_loopback(address_host(config.services[name].address)) for name in names)
        if given is None and is_local:
            return _everything(config, names)
        by_service = rank_hosts(config)
        chosen = {name: by_service[name] for name in names}
        own = _own_host(config, by_service, chosen) if given is None else given
        if given is None and not own:
            return _everything(config, names)
        hosts = _distinct(chosen)
        if own not in hosts:
            raise ConfigError(f"{'this host is' if given is None else '--host'} {own}: {_known(hosts)}")
        if len(hosts) > 1:
            _check_named(config, chosen, hosts)
        here = {name: each for name, each in chosen.items() if own in each or not any(each)}
        return HostPlan(own, {name: each if any(each) else (own,) * len(each) for name, each in here.items()})

    @property
    def names(self) -> list[str]:
        """Names of the services with a rank on this host, in the order of the config."""
        return list(self.hosts)

    @property
    def elsewhere(self) -> set[str]:
        """Names of those of these services whose rank 0 is on another host."""
        return {name for name, hosts in self.hosts.items() if hosts[0] != self.host}

    def ranks(self, name: str) -> range:
        """Returns the ranks of a service on this host."""
        hosts = self.hosts[name]
        first = hosts.index(self.host)
        return range(first, first + hosts.count(self.host))

    def number(self, name: str) -> int:
        """Returns the number of this host among those of a service, from 0, the host of rank 0."""
        return list(dict.fromkeys(self.hosts[name])).index(self.host)

    def spans(self, name: str) -> bool:
        """Returns whether the ranks of a service are on several hosts."""
        return len(set(self.hosts[name])) > 1

    def first_ranks_elsewhere(self, name: str) -> dict[str, int]:
        """Returns the first rank of a service on each other host, by name of the host."""
        hosts = self.hosts[name]
        return {host: hosts.index(host) for host in dict.fromkeys(hosts) if host != self.host}


def store_address(table: ServiceTable) -> str:
    """Returns host:port of the store at which the ranks of a service over several hosts meet."""
    host, _, port = table.address.rpartition(":")
    return f"{host}:{int(port) + STORE_PORTS}"


def store_listens_on(table: ServiceTable) -> str:
    """Returns host:port that rank 0 opens this store on: `bind_host` of the table, unless it is a wildcard, since the
    store authenticates no client."""
    port = store_address(table).rpartition(":")[2]
    host = address_host(table.address) if is_wildcard(table.bind_host) else table.bind_host
    return f"{host or address_host(table.address)}:{port}"


def check_stores(config: Config, plan: HostPlan, should_stop: Callable[[], bool] = never) -> None:
    """Checks the stores of services over several hosts, of those whose rank 0 is on this host; waits as
    `probe_when_free`.

    Raises:
        ConfigError: A port is above 65535, is in use or taken by another service of this host, or only this host
            reaches the address.
    """
    taken = {name: config.services[name].bind_address for name in plan.names if name not in plan.elsewhere}
    for name in filter(plan.spans, plan.names):
        table = config.services[name]
        key, place = f"services.{name}.{table.bind_key}", store_listens_on(table)
        with _named(key, place):
            check_address(place)
        if name in plan.elsewhere:
            continue
        host = address_host(place)
        if is_loopback(host):
            raise ConfigError(
                f"{key}: {host} is loopback on this host, and ranks on other hosts have to reach it; name an address "
                "that they reach"
            )
        for other, its in taken.items():
            if any(overlap(one, two) for one in listening(place) for two in listening(its)):
                raise ConfigError(
                    f"{key}: {_purpose(place)} is taken by services.{other}, which listens on {its}"
                )
        with _named(key, place):
            probe_when_free(place, table.address, should_stop)
        taken[name + "'s store"] = place


def _everything(config: Config, names: Sequence[str]) -> HostPlan:
    return HostPlan("", {name: ("",) * config.services[name].ranks for name in names})


def _distinct(services: Mapping[str, tuple[str, ...]]) -> list[str]:
    return list(dict.fromkeys(host for each in services.values() for host in each if host))


def _own_host(
    config: Config, services: Mapping[str, tuple[str, ...]], chosen: Mapping[str, tuple[str, ...]]
) -> str:
    """Returns the name of this host among those of all services, or where that is unclear among those of the chosen
    ones, given the hosts of their ranks; empty where all their ranks are on this host. Raises ConfigError where it is
    unclear among either."""
    hosts = _distinct(services)
    mine = [host for host in hosts if _is_here(host, config, services)]
    if len(hosts) < 2 or (mine == hosts and not any(len(set(each)) > 1 for each in services.values())):
        return ""
    if len(mine) != 1 and services != chosen:
        return _own_host(config, chosen, chosen)
    return _only(mine, hosts)


def _only(mine: Sequence[str], hosts: Sequence[str]) -> str:
    if len(mine) == 1:
        return mine[0]
    found = (
        f"{' and '.join(mine)} are both this host" if mine else f"none is this host, {socket.gethostname()}"
    )
    raise ConfigError(f"the services are on hosts {', '.join(hosts)}, of which {found}; name it by --host")


def _known(hosts: Sequence[str]) -> str:
    if hosts:
        return f"no rank is on this host; hosts of the services: {', '.join(hosts)}"
    return (
        "the config names no hosts: no devices are HOST/gpu:N or HOST/cpu:N, and all addresses are loopback"
    )


def _check_named(config: Config, chosen: Mapping[str, tuple[str, ...]], hosts: Sequence[str]) -> None:
    """Raises ConfigError if a service has an address of loopback, or devices name hosts and its address is on none of
    them: it would be unclear which host starts it."""
    named = {host_of(device) for name in chosen for device in config.device_order(name)} - {""}
    for name, on in chosen.items():
        address = config.services[name].address
        if names_loopback(address_host(address)):
            raise ConfigError(
                f"services.{name}.address: {address} is reached from its own host alone, and there are several: "
                f"{', '.join(hosts)}; give the address of the host that rank 0 is on"
            )
        if named and on[0] not in named:
            raise ConfigError(
                f"services.{name}.address: {address} is on none of the hosts that devices name: "
                f"{', '.join(sorted(named))}; place the service on a device of its host, HOST/gpu:N or HOST/cpu:N"
            )


def _is_here(host: str, config: Config, chosen: Mapping[str, tuple[str, ...]]) -> bool:
    """Returns whether a host of the config is this one: its name is this host's, or this host has its address, or that
    of a service whose rank 0 is there."""
    name, own = host.lower(), socket.gethostname().lower()
    if own in (name, name.partition(".")[0]) or own.partition(".")[0] == name:
        return True
    addresses = {address_host(config.services[each].address) for each, on in chosen.items() if on[0] == host}
    return any(_has_address(each) for each in {host, *addresses} if not names_loopback(each))


def _has_address(host: str) -> bool:
    try:
        probe(f"{host}:0")
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _named(key: str, place: str) -> Iterator[None]:
    """Context manager that raises ConfigError with the key where the address `place` of a store cannot be served."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"{key}: {_purpose(place)} is no address: {error}") from None
    except OSError as error:
        raise ConfigError(f"{key}: {_purpose(place)}: {error.strerror}") from None


def _purpose(place: str) -> str:
    return f"{place}, where the ranks of this service meet (its port and {STORE_PORTS:,})"
