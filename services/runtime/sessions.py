"""The sessions (runs of controllers) whose calls a rank runs, and whether their controllers are connected."""

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

SILENCE_S = 600.0
"""Seconds after its last call at which a session of a shared rank ends that never had a stream."""

MOST_AHEAD_S = 3600.0
"""Seconds that a controller's clock may be ahead of this rank's. A session that claims a later start is refused: all
sessions that start before that time would be refused as older."""

MOST_SESSIONS = 16
"""Most sessions that share a rank at a time. Each may keep MAX_WAITING calls and rows in the arena."""

MAX_NAME = 256
"""Most characters of a session's name and of a call's id; limited, since a rank stores many of them."""


def check_name(field: str, name: str) -> None:
    """Raises InvalidRequest if `name`, the value of a request's `field`, has more than MAX_NAME characters."""
    if len(name) > MAX_NAME:
        raise InvalidRequest(f"{field} has {len(name)} characters; at most {MAX_NAME} are allowed")


class Sessions:
    """The sessions whose ordered calls the rank runs: one at a time, or, where the service is shared, several. Not
    thread-safe: used from the event loop alone.

    A session is held while its controller has a stream to this rank, and for ABSENCE_S afterwards. One that is not
    held, such as one whose calls come without a stream, ends when another one opens. Without sharing, a younger session
    that asks to take over replaces one that is held, and older ones are refused. Where the service is shared, sessions
    that are held do not end each other, whatever their starts, and `Call.take_over` changes nothing; there, one that is
    not held also ends after SILENCE_S without a call, since it may be long until another one opens.

    Args:
        ended: Called with the name of a session when it ends; it must stop the session's calls and free its rows.
        is_shared: Whether up to MOST_SESSIONS sessions are open at a time. Default: False.
        is_busy: Whether calls of a session, given its name, wait or run. Default: none ever do.

    Attributes:
        is_shared: As given.
        started_unix_ns: Start of the youngest session so far, in Unix nanoseconds; without sharing, sessions that
            started earlier are refused. 0 before the first session.
    """

    def __init__(
        self,
        ended: Callable[[str], None],
        *,
        is_shared: bool = False,
        is_busy: Callable[[str], bool] = lambda name: False,
    ) -> None:
        self.is_shared = is_shared
        self.started_unix_ns = 0
        self._open: dict[str, int] = {}
        """Start of each open session, in Unix nanoseconds, by its name."""
        self._ended, self._is_busy = ended, is_busy
        self._streams: Counter[str] = Counter()
        self._absences: dict[str, asyncio.TimerHandle] = {}
        self._silences: dict[str, asyncio.TimerHandle] = {}

    @property
    def names(self) -> frozenset[str]:
        """Names of the open sessions."""
        return frozenset(self._open)

    @property
    def holder(self) -> str:
        """Name of the session that keeps others from the rank: the current one if it is held; "" otherwise, and where
        the service is shared."""
        return "" if self.is_shared else next(filter(self._is_held, self._open), "")

    def is_connected(self, name: str) -> bool:
        """Whether the controller of this session, which is open, has a stream to this rank."""
        return name in self._open and self._streams[name] > 0

    def open(self, call: common_pb2.Call) -> None:
        """Opens a call's session, which is not open. Without sharing, ends the session that was current; with sharing,
        those that are not held.

        Raises:
            InvalidRequest: The session's start is more than MOST_AHEAD_S in the future.
            Refused: The call is not the session's first. Or, without sharing, the session is older than the current
                one, or that is held and the call does not ask to take over. Or, with sharing, MOST_SESSIONS are held.
        """
        started = call.session_started_unix_ns
        if started > time.time_ns() + MOST_AHEAD_S * 1e9:
            raise InvalidRequest(
                f"session {call.session!r}: session_started_unix_ns is {started}, more than {MOST_AHEAD_S:g} s ahead "
                "of this host's clock"
            )
        if not self.is_shared and started < self.started_unix_ns:
            raise Refused(
                f"session {call.session!r} was superseded by {self._current or repr('a younger one')}"
            )
        for name in self._to_end(call):
            self._close(name)
        self._open[call.session] = started
        self.started_unix_ns = max(self.started_unix_ns, started)
        self.noticed(call.session)

    def check(self, call: common_pb2.Call) -> None:
        """Raises Refused if a call is ordered (has a sequence number) and its session is not open, or has begun again
        since, as where a message comes late."""
        if not call.sequence:
            return
        if call.session not in self._open:
            is_superseded = self._open and not self.is_shared
            how = f"was superseded by {self._current}" if is_superseded else "has ended"
            raise Refused(f"session {call.session!r} {how}")
        if call.session_started_unix_ns < self._open[call.session]:
            raise Refused(
                f"session {call.session!r} has begun again: the start in the call, {call.session_started_unix_ns}, is "
                f"before its own, {self._open[call.session]}"
            )

    def noticed(self, name: str) -> None:
        """Notes that a call of a session has arrived or ended. On a shared rank, restarts the SILENCE_S timer of the
        session if it is open and not held."""
        if silence := self._silences.pop(name, None):
            silence.cancel()
        if self.is_shared and name in self._open and not self._is_held(name):
            loop = asyncio.get_running_loop()
            self._silences[name] = loop.call_later(SILENCE_S, self._end_silent, name)

    def end(self, name: str) -> None:
        """Ends a session by name, whether or not it is open: calls `ended`, which stops its calls and frees its
        rows."""
        if absence := self._absences.pop(name, None):
            absence.cancel()
        self._close(name)

    def opened_stream(self, name: str) -> None:
        """Notes that a session's controller has opened a stream to this rank, and so cancels the end of the session
        that `closed_stream` or `noticed` has scheduled, if any."""
        self._streams[name] += 1
        for timers in (self._absences, self._silences):
            if timer := timers.pop(name, None):
                timer.cancel()

    def closed_stream(self, name: str) -> None:
        """Notes that a stream of a session has closed. If it was the last, the session ends after ABSENCE_S, unless
        its controller opens a new one before."""
        self._streams[name] -= 1
        if not self._streams[name]:
            del self._streams[name]
            loop = asyncio.get_running_loop()
            self._absences[name] = loop.call_later(ABSENCE_S, self.end, name)

    def _end_silent(self, name: str) -> None:
        if self._is_busy(name):
            self.noticed(name)
        else:
            self.end(name)

    def _close(self, name: str) -> None:
        self._open.pop(name, None)
        if silence := self._silences.pop(name, None):
            silence.cancel()
        self._ended(name)

    def _is_held(self, name: str) -> bool:
        """Whether an open session is held, as the class describes it."""
        return self.is_connected(name) or name in self._absences

    def _to_end(self, call: common_pb2.Call) -> list[str]:
        """Returns the sessions that end when the session of a call opens; raises Refused as `open` does."""
        if call.sequence != 1:
            which = "open here" if self.is_shared else f"the current one ({self._current or 'there is none'})"
            raise Refused(f"session {call.session!r} is not {which}")
        held = [name for name in self._open if self._is_held(name)]
        if self.is_shared:
            if len(held) >= MOST_SESSIONS:
                raise Refused(
                    f"{len(held)} sessions share this service, the maximum; {call.session!r} has to wait until one of "
                    "them ends"
                )
            return [name for name in self._open if name not in held]
        if held and not call.take_over:
            raise Refused(
                f"session {held[0]!r} is open on this rank; {call.session!r} can begin only by taking it over"
            )
        return list(self._open)

    @property
    def _current(self) -> str:
        """Names of the open sessions, for messages; "" if there is none."""
        return ", ".join(map(repr, self._open))
