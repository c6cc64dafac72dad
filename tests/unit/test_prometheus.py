"""The /metrics endpoint of the controller: scrapes are answered, and idle connections are few and end."""

from __future__ import annotations

import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest

from controller.tracking import prometheus
from controller.tracking.prometheus import MOST_CONNECTIONS, MetricsEndpoint
from rlhf.errors import ConfigError


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.fixture
def port() -> Iterator[int]:
    port = free_port()
    with MetricsEndpoint("127.0.0.1", port):
        yield port


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return answer.read().decode()


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(5)
    with suppress(ConnectionResetError):
        return connection.recv(1) == b""
    return True


def test_a_scrape_is_answered(port: int) -> None:
    assert "rlhf_step" in scrape(port)


@pytest.mark.parametrize("host", ["unknown.invalid", "a..b"])
def test_a_host_that_cannot_be_looked_up_is_an_error_of_its_key(host: str) -> None:
    with pytest.raises(ConfigError, match=rf"^tracking.prometheus_port: {host}:9090: "):
        MetricsEndpoint(host, 9090)


def test_idle_connections_are_bounded_and_end(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus._Handler, "timeout", 2.0)
    threads = threading.active_count()
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(MOST_CONNECTIONS + 5)]
    assert all(is_closed(connection) for connection in idle[MOST_CONNECTIONS:])
    assert threading.active_count() <= threads + MOST_CONNECTIONS
    deadline = time.monotonic() + 20
    while True:
        try:
            assert "rlhf_step" in scrape(port)
            break
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.2)
    for connection in idle:
        with closing(connection):
            assert is_closed(connection)
