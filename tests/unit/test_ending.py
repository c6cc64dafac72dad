"""Waits for the address of a service that is about to end, at moments when it does."""

from __future__ import annotations

import socket
import time
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from deploy import ending


@pytest.fixture
def listener() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def address_of(listener: socket.socket) -> str:
    return f"127.0.0.1:{listener.getsockname()[1]}"


def probe_when_free(address: str) -> None:
    ending.probe_when_free(address, service=address)


def test_a_service_that_ends_between_the_probe_and_the_search_for_it_is_not_in_the_way(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
):
    address, search = address_of(listener), psutil.net_connections

    def ends_just_now(kind: str) -> list[Any]:
        listener.close()
        return search(kind)

    monkeypatch.setattr(psutil, "net_connections", ends_just_now)
    probe_when_free(address)


def test_a_service_whose_process_is_gone_once_it_was_found_is_not_in_the_way(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
):
    address = address_of(listener)

    def gone(pid: int) -> None:
        listener.close()
        raise psutil.NoSuchProcess(pid)

    monkeypatch.setattr(psutil, "Process", gone)
    probe_when_free(address)


def test_a_process_that_exits_is_waited_for_although_its_environment_is_freed(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
):
    address = address_of(listener)
    began = time.monotonic()

    class Exiting(psutil.Process):
        """This process as Linux shows one that exits and has freed its memory, and soon its sockets."""

        def environ(self) -> dict[str, str]:
            return {}

        def memory_info(self) -> Any:
            if time.monotonic() - began > 2 * ending.SETTLED_S:
                listener.close()
            return SimpleNamespace(rss=0, vms=0)

    monkeypatch.setattr(psutil, "Process", Exiting)
    probe_when_free(address)


def test_an_address_that_another_program_holds_is_refused_before_the_longest_wait(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ending, "ENDING_S", 3600.0)
    with listener, pytest.raises(OSError, match="in use"):
        probe_when_free(address_of(listener))
