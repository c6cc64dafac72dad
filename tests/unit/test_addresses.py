"""Addresses of configurations, and whether they can be listened on."""

from __future__ import annotations

import socket

import pytest

from nccl_transfer.store.store import TensorStore
from nccl_transfer.transports.tcp_source import TcpSource
from rlhf import addresses
from rlhf.errors import ConfigError
from rlhf.security import Security, adopted
from services.runtime import main
from settings.reward import RewardTable


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "[fe80::1%eth0]", "node-0.example.org", "my_host"])
def test_hosts_are_names_and_addresses(host: str) -> None:
    addresses.check_host(host)
    assert addresses.address_host(f"{host}:7101") == host


@pytest.mark.parametrize(
    "host", ["", "*", "::1", "[::1", "[127.0.0.1]", "node:1", "[::1]:1", "a b", "unix", "Unix", "a..b"]
)
def test_other_texts_are_none(host: str) -> None:
    with pytest.raises(ValueError, match=r"host|IPv6"):
        addresses.check_host(host)


@pytest.mark.parametrize(
    ("host", "expected"), [("0.0.0.0", True), ("[::]", True), ("[::1]", False), ("node", False), ("", False)]
)
def test_a_wildcard_is_no_single_address(host: str, expected: bool) -> None:
    assert addresses.is_wildcard(host) == expected


@pytest.mark.parametrize(
    ("host", "key"), [("127.0.0.1", "address"), ("[::1]", "address"), ("[::]", "bind_host")]
)
def test_a_service_started_by_hand_can_listen_or_names_the_key(
    host: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host.strip("[]"), 0), family=family) as listener:
        port = listener.getsockname()[1]
        hosts = {"address": "[::1]", key: host}
        table = RewardTable.model_validate(
            {"role": "reward", **hosts, "address": f"{hosts['address']}:{port}"}
        )
        with pytest.raises(ConfigError) as caught:
            main._check(table, "reward", "judge")
    assert str(caught.value) == f"services.judge.{key}: {host}:{port}: Address already in use"
    with adopted(Security(allow_plaintext=True)):
        main._check(table, "reward", "judge")


def test_bytes_are_served_on_all_addresses_to_ipv4_too() -> None:
    store = TensorStore(1 << 16)
    server = TcpSource(store, "::")
    for host in ("127.0.0.1", "::1"):
        socket.create_connection((host, server.port), timeout=10).close()
    server.close()
    store.close()
