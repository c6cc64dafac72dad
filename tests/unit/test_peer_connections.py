"""Connections of the GPU transports by address: a rank that was restarted there keeps its own."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

from nccl_transfer.refs.shards import Endpoint
from nccl_transfer.transports.gpu.peer_connection import PeerConnections

OLD = Endpoint("10.0.0.1:1", epoch=1)
NEW = replace(OLD, epoch=2)


class Connection:
    def __init__(self, address: str) -> None:
        self.address, self.closed = address, threading.Event()

    def close(self) -> None:
        self.closed.set()

    def forget(self) -> None: ...


def connections() -> Any:
    make: Any = Connection
    return PeerConnections(make)


def test_a_source_that_is_forgotten_is_connected_to_anew() -> None:
    made = connections()
    first = made.to(OLD)
    assert made.to(OLD) is first
    made.forget(OLD)
    assert first.closed.wait(10)
    assert made.to(OLD) is not first


def test_the_rank_that_was_at_the_address_before_is_forgotten_alone() -> None:
    made = connections()
    made.to(OLD)
    used = made.to(NEW)
    made.forget(OLD)
    assert made.to(NEW) is used
    assert not used.closed.wait(0.2)
    made.forget(NEW)
    assert used.closed.wait(10)
