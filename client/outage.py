"""Outages of a rank: a broken connection is opened again, and a rank is lost when that fails for a while."""

from __future__ import annotations

from typing import Any

import grpc

from rlhf.errors import STATUS_KEY

RETRY_S = 0.1
"""Pause between attempts to reach a rank."""
RECONNECT_S = 6.0
"""Longest outage of a rank: less than the ten seconds after which it ends a session without a controller."""
SILENT_S = 3.0
"""Longest outage after unanswered pings, which took ten seconds already: one attempt to connect."""
REFUSED_S = 0.7
"""Longest time in which the host may refuse connections: after it, no process is going to listen there."""
RECONNECT_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 3000),
    ("grpc.max_reconnect_backoff_ms", 500),
)
"""Channel options: attempts to connect follow each other soon and take at most 3 s each."""

_BREAKS = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL)


def is_break(error: grpc.RpcError) -> bool:
    """Whether a call ended with its connection, and not with a status of the rank."""
    call: Any = error  # the exception is the call too, which grpc's types do not declare
    says = any(key == STATUS_KEY for key, _ in call.trailing_metadata() or ())
    return not says and call.code() in _BREAKS


def is_silence(error: grpc.RpcError) -> bool:
    """Whether a connection ended because the peer answered no ping."""
    call: Any = error
    return is_break(error) and "ping timeout" in (call.details() or "")


class Outage:
    """A period in which a rank cannot be reached. Times are of the event loop.

    Args:
        first: Error that began it; None where the rank ended a stream.
        now: Its beginning.

    Attributes:
        ends: Time at which the rank is lost at the latest.
    """

    def __init__(self, first: grpc.RpcError | None, now: float) -> None:
        self.first = first
        self.ends = now + (SILENT_S if first is not None and is_silence(first) else RECONNECT_S)
        self._refused_since: float | None = None

    def note(self, error: grpc.RpcError | None, now: float) -> None:
        """Records a failed attempt."""
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
