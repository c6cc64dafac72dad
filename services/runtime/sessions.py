"""The session whose calls a rank runs: who may have it, and whether its controller is there."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable

from rlhf.errors import InvalidRequest, Refused
from rlhf.v1 import common_pb2

ABSENCE_S = 10.0
"""How long a session may be without any stream of its controller before it is ended: a controller that lives makes one
that broke anew, sooner than that."""

MOST_AHEAD_S = 3600.0
"""How far a controller's clock may be ahead of this rank's. No later start is ever remembered, so that no controller
can lock out all that come after it."""


MAX_NAME = 256
"""Most characters of the name of a session or a call, of which a rank remembers many."""


def check_name(field: str, name: str) -> None:
    """Raises InvalidRequest for a name that is too long to be remembered."""
    if len(name) > MAX_NAME:
        raise InvalidRequest(f"{field} has {len(name)} characters; at most {MAX_NAME} are allowed")


class CurrentSession:
    """One session at a time has the rank. Used from the event loop.

    Args:
        ended: Told of a session that has ended, so that its calls are stopped and its rows are freed.

    Attributes:
        name: Of the current session; empty where there is none.
        started_unix_ns: Start of the youngest session there was: an older one is refused.
    """

    def __init__(self, ended: Callable[[str], None]) -> None:
        self.name = ""
        self.started_unix_ns = 0
        self._ended = ended
        self._streams: Counter[str] = Counter()
        self._absences: dict[str, asyncio.TimerHandle] = {}

    @property
    def holder(self) -> str:
        """The current session, where its controller is there or was a moment ago; only a take-over ends it. A session
        whose calls come without a stream of them is never known to be there, and gives way to any younger one."""
        return self.name if self.is_connected or self.name in self._absences else ""

    @property
    def is_connected(self) -> bool:
        """Whether the current session's controller has a stream here."""
        return bool(self.name) and self._streams[self.name] > 0

    def open(self, call: common_pb2.Call) -> None:
        """Makes a call's session the current one, and ends the one before.

        Raises:
            InvalidRequest: It says that it began in the future.
            Refused: It is not the younger one, this is not its first call, or the current one's controller is there
                and is not to be taken over.
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
        """Raises Refused where an ordered call is not of the current session."""
        if call.sequence and call.session != self.name:
            how = f"was superseded by {self.name!r}" if self.name else "has ended"
            raise Refused(f"session {call.session!r} {how}")

    def end(self, name: str) -> None:
        """Ends a session, whether it is the current one or another that left something here."""
        if absence := self._absences.pop(name, None):
            absence.cancel()
        if name == self.name:
            self.name = ""
        self._ended(name)

    def opened_stream(self, name: str) -> None:
        """A session's controller has a stream here, which tells that it is there."""
        self._streams[name] += 1
        if absence := self._absences.pop(name, None):
            absence.cancel()

    def closed_stream(self, name: str) -> None:
        """One of them closed. After the last the session ends, unless there soon is a new one."""
        self._streams[name] -= 1
        if not self._streams[name]:
            del self._streams[name]
            loop = asyncio.get_running_loop()
            self._absences[name] = loop.call_later(ABSENCE_S, self.end, name)
