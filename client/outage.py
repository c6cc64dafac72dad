"""When a rank that cannot be reached is lost: not when a connection breaks, but when no other can be made."""

from __future__ import annotations

from typing import Any

import grpc

from rlhf.errors import STATUS_KEY

RETRY_S = 0.1
"""Pause between attempts to reach a rank."""
RECONNECT_S = 6.0
"""How long a rank may be out of reach: less than the ten seconds after which it ends a session without a controller."""
SILENT_S = 3.0
"""How long one that answered no ping may be: it was out of reach for ten seconds already. One attempt to connect."""
REFUSED_S = 0.7
"""How long its host may refuse connections: then no process listens there, and none will."""
RECONNECT_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 3000),
    ("grpc.max_reconnect_backoff_ms", 500),
)
"""Of a channel: tries again soon, and gives one attempt 3 s."""

_BREAKS = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL)


def is_break(error: grpc.RpcError) -> bool:
    """Whether a call ended because its connection did, and not because the rank said so."""
    call: Any = error  # what raises is a call too, which grpc's types do not say
    says = any(key == STATUS_KEY for key, _ in call.trailing_metadata() or ())
    return not says and call.code() in _BREAKS


def is_silence(error: grpc.RpcError) -> bool:
    """Whether a connection ended because the other side answered no ping."""
    call: Any = error
    return is_break(error) and "ping timeout" in (call.details() or "")


class Outage:
    """A time during which a rank cannot be reached.

    Args:
        first: How it began; None where the rank ended a stream.
        now: When, in the event loop's time.

    Attributes:
        ends: When the rank is lost at the latest.
    """

    def __init__(self, first: grpc.RpcError | None, now: float) -> None:
        self.first = first
        self.ends = now + (SILENT_S if first is not None and is_silence(first) else RECONNECT_S)
        self._refused_since: float | None = None

    def note(self, error: grpc.RpcError | None, now: float) -> None:
        """An attempt failed."""
        self.first = self.first or error
        call: Any = error
        if call is None or "refused" not in (call.details() or ""):
            self._refused_since = None
        elif self._refused_since is None:
            self._refused_since = now

    def is_lasting(self, now: float) -> bool:
        """Whether the rank is lost."""
        is_gone = self._refused_since is not None and now - self._refused_since >= REFUSED_S
        return is_gone or now >= self.ends
