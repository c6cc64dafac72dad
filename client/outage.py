"""Outages of a rank: when its connection breaks, the client reconnects, and gives the rank up when that fails for
seconds."""

from __future__ import annotations

from typing import Any

import grpc

from rlhf.errors import STATUS_KEY

RETRY_S = 0.1
"""Pause between two attempts to reach a rank, in seconds."""
RECONNECT_S = 6.0
"""Longest outage of a rank, in seconds, before it counts as lost: less than the ten seconds after which a rank ends a
session whose controller is not connected."""
SILENT_S = 3.0
"""Longest outage, in seconds, where it began with unanswered pings, which took ten seconds already: enough for one
attempt to connect."""
REFUSED_S = 0.7
"""Time, in seconds, of refused connections after which the rank counts as lost, since its process has ended."""
RECONNECT_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 3000),
    ("grpc.max_reconnect_backoff_ms", 500),
)
"""Channel options: gRPC reconnects after 0.1 to 0.5 s, and an attempt takes at most 3 s."""

_BREAKS = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL)


def is_break(error: grpc.RpcError) -> bool:
    """Whether a call failed because its connection broke: with code UNAVAILABLE, CANCELLED or INTERNAL and without the
    details of an error that the rank reported."""
    call: Any = error  # the exception is the call too, which grpc's types do not declare
    says = any(key == STATUS_KEY for key, _ in call.trailing_metadata() or ())
    return not says and call.code() in _BREAKS


def is_silence(error: grpc.RpcError) -> bool:
    """Whether a call failed because its connection was closed after the rank answered no HTTP/2 ping."""
    call: Any = error
    return is_break(error) and "ping timeout" in (call.details() or "")


class Outage:
    """A period in which a rank cannot be reached. Times are those of the event loop's clock, in seconds.

    Args:
        first: The error that the outage began with; None where the rank ended a stream without one.
        now: Time at which the outage began.

    Attributes:
        first: The first gRPC error of the outage; None before there is one.
        ends: Time at which the rank counts as lost if it cannot be reached until then.
    """

    def __init__(self, first: grpc.RpcError | None, now: float) -> None:
        self.first = first
        self.ends = now + (SILENT_S if first is not None and is_silence(first) else RECONNECT_S)
        self._refused_since: float | None = None

    def note(self, error: grpc.RpcError | None, now: float) -> None:
        """Records an attempt to reach the rank that failed at time `now`, with `error`, or with None where the rank
        ended a stream without one."""
        self.first = self.first or error
        call: Any = error
        if call is None or "refused" not in (call.details() or ""):
            self._refused_since = None
        elif self._refused_since is None:
            self._refused_since = now

    def is_lasting(self, now: float) -> bool:
        """Whether the rank counts as lost at time `now`: past `ends`, or after `REFUSED_S` of refused connections."""
        is_gone = self._refused_since is not None and now - self._refused_since >= REFUSED_S
        return is_gone or now >= self.ends
