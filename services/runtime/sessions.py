"""The session (one run of a controller) whose calls a rank runs, and whether its controller is connected."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable

from rlhf.errors import InvalidRequest, Refused
from rlhf.v1 import common_pb2

ABSENCE_S = 10.0
"""Seconds without a stream of its controller after which a session ends. A controller that is alive reopens a broken
stream sooner than that."""

MOST_AHEAD_S = 3600.0
"""Seconds that a controller's clock may be ahead of this rank's. A session that claims a later start is refused: all
sessions that start before that time would be refused as older."""

MAX_NAME = 256
"""Most characters of a session's name and of a call's id; limited, since a rank stores many of them."""


def check_name(field: str, name: str) -> None:
    """Raises InvalidRequest if `name`, the value of a request's `field`, has more than MAX_NAME characters."""
    if len(name) > MAX_NAME:
        raise InvalidRequest(f"{field} has {len(name)} characters; at most {MAX_NAME} are allowed")


class CurrentSession:
    """The one session whose ordered calls the rank runs. Not thread-safe: used from the event loop alone.

    Args:
        ended: Called with the name of a session when it ends; it must stop the session's calls and free its rows.

    Attributes:
        name: Name of the current session; empty where there is none.
        started_unix_ns: Start of the youngest session so far, in Unix nanoseconds; sessions that started earlier are
            refused. 0 before the first session.
    """

    def __init__(self, ended: Callable[[str], None]) -> None:
        self.name = ""
        self.started_unix_ns = 0
        self._ended = ended
        self._streams: Counter[str] = Counter()
        self._absences: dict[str, asyncio.TimerHandle] = {}

    @property
    def holder(self) -> str:
        """Name of the current session if its controller has a stream to this rank, or had one in the last ABSENCE_S;
        otherwise "". A younger session replaces a holder only if it asks to take over. A current session that is no
        holder, such as one whose calls come without a stream, is replaced by any younger session."""
        return self.name if self.is_connected or self.name in self._absences else ""

    @property
    def is_connected(self) -> bool:
        """Whether the current session's controller has a stream to this rank."""
        return bool(self.name) and self._streams[self.name] > 0

    def open(self, call: common_pb2.Call) -> None:
        """Makes a call's session the current one, and ends the session that was.

        Raises:
            InvalidRequest: The session's start is more than MOST_AHEAD_S in the future.
            Refused: The session is older than the current one, the call is not its first, or the current session has a
                holder and the call does not ask to take over.
        """
        started = call.session_started_unix_ns
        if started > time.time_ns() + MOST_AHEAD_S * 1e9:
            raise InvalidRequest(
                f"session {call.session!r}: session_started_unix_ns is {started}, more than {MOST_AHEAD_S:g} s ahead "
                "of this host's clock"
            )
        if started < self.started_unix_ns:
            raise Refused(f"session {call.session!r} was superseded by {self.name or 'a younger one'!r}")
        if call.sequence != 1:
            current = repr(self.name) if self.name else "there is none"
            raise Refused(f"session {call.session!r} is not the current one ({current})")
        if self.holder and not call.take_over:
            raise Refused(f"session {self.name!r} is running here; {call.session!r} may only take it over")
        before, self.name = self.name, call.session
        self.started_unix_ns = started
        if before:
            self._ended(before)

    def check(self, call: common_pb2.Call) -> None:
        """Raises Refused if a call is ordered (has a sequence number) and its session is not the current one."""
        if call.sequence and call.session != self.name:
            how = f"was superseded by {self.name!r}" if self.name else "has ended"
            raise Refused(f"session {call.session!r} {how}")

    def end(self, name: str) -> None:
        """Ends a session by name, whether or not it is the current one: calls `ended`, which stops its calls and
        frees its rows. If it was the current one, there is no current session afterwards."""
        if absence := self._absences.pop(name, None):
            absence.cancel()
        if name == self.name:
            self.name = ""
        self._ended(name)

    def opened_stream(self, name: str) -> None:
        """Notes that a session's controller has opened a stream to this rank, and so cancels the end of the session
        that `closed_stream` has scheduled, if any."""
        self._streams[name] += 1
        if absence := self._absences.pop(name, None):
            absence.cancel()

    def closed_stream(self, name: str) -> None:
        """Notes that a stream of a session has closed. If it was the last, the session ends after ABSENCE_S, unless
        its controller opens a new one before."""
        self._streams[name] -= 1
        if not self._streams[name]:
            del self._streams[name]
            loop = asyncio.get_running_loop()
            self._absences[name] = loop.call_later(ABSENCE_S, self.end, name)
