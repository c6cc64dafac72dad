"""When a rank that cannot be reached is lost."""

from __future__ import annotations

from typing import Any

import grpc

from client.outage import RECONNECT_S, SILENT_S, Outage
from client.stream import _broken
from controller.config.run import RunTable
from rlhf.contract import CHANNEL_OPTIONS
from rlhf.errors import ServiceLost


class Broken(grpc.RpcError):
    """How gRPC tells that a connection broke."""

    def __init__(self, details: str) -> None:
        self._details = details

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> tuple[Any, ...]:
        return ()


def test_a_rank_that_answered_no_ping_has_less_time_to_be_reached_again() -> None:
    assert Outage(Broken("Socket closed"), 100.0).ends == 100.0 + RECONNECT_S
    assert Outage(Broken("ping timeout"), 100.0).ends == 100.0 + SILENT_S
    assert SILENT_S < RECONNECT_S


def test_a_rank_that_answered_no_ping_is_told_as_one_that_is_silent() -> None:
    error = _broken(Broken("ping timeout"), "actor rank 1 (127.0.0.1:1) UpdateActor")
    assert type(error) is ServiceLost
    assert str(error) == (
        "actor rank 1 (127.0.0.1:1) UpdateActor: no answer, not even to pings: its process is stopped, "
        "or its host cut off"
    )


def test_a_stopped_process_is_lost_after_the_time_that_call_timeout_s_is_compared_with() -> None:
    options = dict(CHANNEL_OPTIONS)
    silent_s = (options["grpc.keepalive_time_ms"] + options["grpc.keepalive_timeout_ms"]) / 1000
    described = RunTable.model_fields["call_timeout_s"].description or ""
    assert f"Below {silent_s + SILENT_S:g}," in described.replace("\n", " ")
