"""Where ranks listen and are reached, on one host and on several."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import psutil
import pytest

from nccl_transfer.refs.shards import Endpoint
from rlhf.errors import ConfigError
from services.runtime.hosts import (
    HostAddresses,
    check_reachable,
    host_addresses,
    interface_of,
    network_interfaces,
)
from settings.service import ServiceTable

ELSEWHERE = "192.0.2.1"
"""An address for documents: no host has it."""


def endpoint(rank: int, address: str, host_id: str) -> Endpoint:
    return Endpoint(f"{address}:7101", host_id, service="actor", rank=rank)


@pytest.mark.parametrize(
    ("group", "keys", "expected"),
    [
        (None, {}, HostAddresses(ELSEWHERE, ELSEWHERE)),
        ("0", {}, HostAddresses(ELSEWHERE, ELSEWHERE)),
        ("0", {"bind_host": "0.0.0.0"}, HostAddresses("0.0.0.0", ELSEWHERE)),
        ("0", {"advertise_host": "node0"}, HostAddresses(ELSEWHERE, "node0")),
        ("1", {"address": "127.0.0.1:1"}, HostAddresses("127.0.0.1", "127.0.0.1")),
        ("1", {"address": "[::1]:1"}, HostAddresses("[::1]", "[::1]")),
        ("1", {"address": "127.0.0.1:1", "bind_host": "0.0.0.0"}, HostAddresses("0.0.0.0", "127.0.0.1")),
        ("1", {"address": "127.0.0.1:1", "advertise_host": "node1"}, HostAddresses("127.0.0.1", "node1")),
    ],
)
def test_ranks_beside_rank_0_are_at_its_address_and_others_where_they_reach_it_from(
    group: str | None, keys: dict[str, str], expected: HostAddresses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GROUP_RANK", raising=False)
    if group is not None:
        monkeypatch.setenv("GROUP_RANK", group)
    assert (
        host_addresses(
            ServiceTable.model_validate({"role": "reward", "address": f"{ELSEWHERE}:7101", **keys})
        )
        == expected
    )


def test_a_first_host_that_nobody_knows_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUP_RANK", "1")
    with pytest.raises(ConfigError, match=r"no route to nowhere\.invalid, the host of rank 0"):
        host_addresses(ServiceTable(role="reward", address="nowhere.invalid:7101"))


@pytest.mark.parametrize(("host", "expected"), [("127.0.0.1", "lo"), ("[::1]", "lo"), (ELSEWHERE, None)])
def test_the_interface_of_an_address(host: str, expected: str | None) -> None:
    assert interface_of(host) == expected


@pytest.mark.parametrize(
    ("local", "expected"),
    [
        # All ranks on one host: no need of gloo beyond it, wherever the service is reached.
        ("2", {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=eth7"}),
        ("1", {"GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": "=eth7"}),
    ],
)
def test_gloo_and_nccl_are_kept_on_the_interfaces_that_the_config_names(
    local: str, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    interfaces = {"lo": "127.0.0.1", "eth7": ELSEWHERE}
    addresses = {name: [SimpleNamespace(address=address)] for name, address in interfaces.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    environment = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": local}
    here = HostAddresses(ELSEWHERE, ELSEWHERE)
    assert network_interfaces(here, environment) == expected
    said = {**environment, "GLOO_SOCKET_IFNAME": "ib0"}
    assert network_interfaces(here, said) == {"NCCL_SOCKET_IFNAME": "=eth7"}


@pytest.mark.parametrize("loopback", ["127.0.0.1", "[::1]", "localhost"])
def test_loopback_is_refused_for_ranks_on_several_hosts(loopback: str) -> None:
    ranks = [endpoint(0, "10.0.0.1", "boot:1:0"), endpoint(1, loopback, "boot:2:0")]
    with pytest.raises(
        ConfigError, match=r"services\.actor\.address: .* 2 hosts, and rank 1 is at .*only its own"
    ):
        check_reachable(ranks, "0.0.0.0")


def test_a_name_that_is_loopback_on_its_own_host_is_no_place_to_listen_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def looked_up(host: str, port: None) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        assert host == "node0"
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.1.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", looked_up)
    ranks = [endpoint(0, "node0", "boot:1:0"), endpoint(1, "10.0.0.2", "boot:2:0")]
    with pytest.raises(
        ConfigError, match=r"services\.actor\.bind_host: .* 2 hosts, and node0, .* 127\.0\.1\.1"
    ):
        check_reachable(ranks, "node0")


def test_loopback_is_enough_on_one_host_whoever_its_users_are() -> None:
    check_reachable([endpoint(0, "127.0.0.1", "boot:1:0"), endpoint(1, "127.0.0.1", "boot:1:7")], "127.0.0.1")
