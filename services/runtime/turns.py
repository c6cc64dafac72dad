"""The order in which calls run on one rank, by their sequence numbers in their sessions. This module decides which call
is next; `services.runtime.turn_queue` lets calls wait."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from rlhf.errors import Refused, TooManyCalls

MAX_WAITING = 4096
"""Maximum number of waiting ordered calls, and of waiting unordered calls. A sequence number that exceeds that of the
next call by this number or more is refused."""


@dataclass(eq=False, frozen=True, slots=True)
class Ticket:
    """One call's place in the order of calls.

    Attributes:
        session: Name of the call's session.
        number: Sequence number of the call in its session, from 1; 0 for a call that needs no order.
        arrival: Position of the call among all calls of the rank, in the order in which they joined, from 1.
        meets: Whether all ranks of the service begin the call together.
    """

    session: str
    number: int
    arrival: int
    meets: bool = False


class _Session:
    """The calls of one session: those that wait, by sequence number, and the numbers whose calls will not run.

    Args:
        began: See Attributes.

    Attributes:
        next: Sequence number of the session's next call, from 1.
        began: Number of calls that had joined when the session began. Earlier ones with its name are of a session that
            has ended.
    """

    def __init__(self, began: int) -> None:
        self.next, self.began = 1, began
        self.waiting: dict[int, Ticket] = {}
        self.abandoned: set[int] = set()

    @property
    def ready(self) -> Ticket | None:
        """The waiting call with number `next`; None if it has not arrived."""
        return self.waiting.get(self.next)

    @property
    def is_blocked(self) -> bool:
        """Whether calls wait for one that has not arrived."""
        return bool(self.waiting) and self.next not in self.waiting

    def pass_over_missing(self) -> None:
        """Makes the lowest waiting sequence number the next one."""
        self.next = min(self.waiting)
        self.abandoned = {number for number in self.abandoned if number > self.next}

    def skip_abandoned(self) -> None:
        """Advances `next` past numbers that are abandoned."""
        while self.next in self.abandoned:
            self.abandoned.remove(self.next)
            self.next += 1


class TurnOrder:
    """Decides which call runs next, one at a time: calls of each session in the order of their sequence numbers; of
    several sessions' next calls, and of unordered calls (number 0), the one that arrived first.

    A call whose turn has come may wait at a barrier for the other ranks (`await_peers`). Meanwhile calls of other
    sessions that need no barrier may run. The call then continues (`resume`), or all ranks begin another session's call
    first (`give_way`).

    A sequence number whose call will not run is abandoned (`abandon`, `give_up`) and skipped. A sequence number whose
    call has not arrived is missing: later calls of the session wait for it until `pass_over_missing`.
    """

    def __init__(self) -> None:
        self._sessions: dict[str, _Session] = {}
        self._arrivals = 0
        self._running: Ticket | None = None
        self._at_barrier: Ticket | None = None
        self._first: Ticket | None = None
        self._unordered: dict[Ticket, None] = {}

    def begin_session(self, name: str) -> None:
        """Adds a session, whose sequence numbers start from 1. One of this name may have ended before."""
        self._sessions[name] = _Session(self._arrivals)

    def end_session(self, name: str) -> None:
        """Removes a session, if it was added: its waiting calls can no longer begin."""
        ended = self._sessions.pop(name, None)
        if ended is not None and self._first in ended.waiting.values():
            self._first = None

    def next_of(self, session: str) -> int:
        """Returns the sequence number of a session's next call; 0 for a session that was not added or has ended."""
        known = self._sessions.get(session)
        return known.next if known else 0

    def join(self, session: str, number: int, *, meets: bool = False) -> Ticket:
        """Adds a call to those that wait; returns its ticket.

        Args:
            session: Name of the call's session; ignored for an unordered call.
            number: Sequence number, from 1; 0 for an unordered call.
            meets: As in `Ticket`.

        Raises:
            Refused: The number is below the session's next one or belongs to another call that has not ended, or there
                is no such session.
            TooManyCalls: MAX_WAITING unordered calls wait already, or the number is MAX_WAITING or more above the
                session's next one.
        """
        known = self._checked(session, number) if number else None
        if known is None and len(self._unordered) >= MAX_WAITING:
            raise TooManyCalls(f"{MAX_WAITING} calls without a sequence wait already; try again later")
        self._arrivals += 1
        ticket = Ticket(session, number, self._arrivals, meets)
        if known is not None:
            known.abandoned.discard(number)
            known.waiting[number] = ticket
        else:
            self._unordered[ticket] = None
        return ticket

    @property
    def heads(self) -> list[Ticket]:
        """The waiting call of each session that is the session's next one."""
        return [ticket for known in self._sessions.values() if (ticket := known.ready)]

    @property
    def ready(self) -> Iterator[Ticket]:
        """Tickets of the waiting calls that may begin now, in the order in which they should: the one that `resume` or
        `give_way` chose alone; else the next one of each session, and the unordered ones, in the order of their
        arrival."""
        if self._running is not None:
            return iter(())
        heads = sorted(self.heads, key=_arrival)
        candidates = [self._first] if self._first else heapq.merge(heads, self._unordered, key=_arrival)
        return filter(self.may_begin, candidates)

    @property
    def missing(self) -> dict[str, int]:
        """Missing sequence numbers by session: the session's next call has not arrived, and later calls wait for it.
        Omits sessions with a running call; empty while an unordered call runs."""
        if self._running is not None and not self._running.number:
            return {}
        active = [session for session, _ in self._active]
        blocked = (name for name, known in self._sessions.items() if known.is_blocked)
        return {name: self._sessions[name].next for name in blocked if name not in active}

    def may_begin(self, ticket: Ticket) -> bool:
        """Returns whether a call may begin now. No call may be running. If `resume` or `give_way` has chosen a call,
        only that call may begin; otherwise any unordered call, and any session's next call. A call with a barrier may
        not begin while another call waits at its barrier."""
        if self._running is not None:
            return False
        if self._first is not None or (ticket.meets and self._at_barrier is not None):
            return ticket is self._first
        known = self._sessions.get(ticket.session)
        return ticket in self._unordered or (known is not None and known.ready is ticket)

    def begin(self, ticket: Ticket) -> None:
        """Makes a waiting call the running one; `may_begin` must be True."""
        assert self.may_begin(ticket), "another call's turn"
        if self._at_barrier is ticket:
            self._stop(ticket)
        self._leave(ticket)
        self._running = ticket

    def end(self, ticket: Ticket) -> None:
        """Notes that this call, which runs or waits for the other ranks, has ended, so that the next one may begin."""
        self._stop(ticket)
        if known := self._session_of(ticket):
            known.next = max(known.next, ticket.number + 1)
            known.skip_abandoned()

    def await_peers(self, ticket: Ticket) -> None:
        """Notes that the running call, which must be this one, waits at a barrier for the other ranks. Calls without a
        barrier may begin."""
        self._stop(ticket)
        self._at_barrier = ticket

    def resume(self, ticket: Ticket) -> None:
        """Makes this call, which waits at a barrier, the next one to begin, even if its session has ended, since the
        other ranks begin it too."""
        assert self._at_barrier is ticket, "another call waits"
        self._first = ticket

    def give_way(self, ticket: Ticket, to: Ticket) -> None:
        """Moves this call, which waits at a barrier, back to its position in the queue, and makes the call `to` of
        another session the next one to begin. No effect on the order if `to` is no longer the waiting next call of its
        session."""
        self._stop(ticket)
        if known := self._session_of(ticket):
            known.waiting[ticket.number] = ticket
        self._first = to if to in self.heads else None

    def give_up(self, ticket: Ticket) -> None:
        """Removes a waiting call, which will not run, so that later calls of its session do not wait for it."""
        self._leave(ticket)
        if self._session_of(ticket):
            self.abandon(ticket.session, ticket.number)

    def abandon(self, session: str, number: int) -> None:
        """Lets later calls of the session run without waiting for this sequence number. A call may still `join` with
        the number while it is not below the session's next one. No effect if a call with the number waits or runs, or
        if `join` would refuse the number."""
        known = self._sessions.get(session)
        if known is None or number in known.waiting or (session, number) in self._active:
            return
        if known.next <= number < known.next + MAX_WAITING:
            known.abandoned.add(number)
            known.skip_abandoned()

    def pass_over_missing(self, session: str) -> None:
        """If the next call of a session is missing, makes the lowest sequence number that waits the next one. Calls
        with lower numbers that arrive later are refused."""
        if session in self.missing:
            self._sessions[session].pass_over_missing()

    @property
    def _active(self) -> list[tuple[str, int]]:
        """Session and sequence number of the call that runs, and of the one that waits for the other ranks, as far as
        they are calls of sessions that have not ended."""
        tickets = (self._running, self._at_barrier)
        return [(ticket.session, ticket.number) for ticket in tickets if ticket and self._session_of(ticket)]

    def _session_of(self, ticket: Ticket) -> _Session | None:
        """Returns the session of an ordered call; None where it has ended, also if another one has its name."""
        known = self._sessions.get(ticket.session) if ticket.number else None
        return known if known and ticket.arrival > known.began else None

    def _checked(self, session: str, number: int) -> _Session:
        """Returns the session of an ordered call; raises as `join` if a call with this number may not join."""
        where, known = f"sequence {number} of session {session!r}", self._sessions.get(session)
        if known is None:
            raise Refused(f"{where}, but there is no such session here")
        if number < known.next:
            raise Refused(f"{where}, but {known.next} is next")
        if number >= known.next + MAX_WAITING:
            raise TooManyCalls(f"{where}, but {known.next} is next; at most {MAX_WAITING} calls may wait")
        if number in known.waiting or (session, number) in self._active:
            raise Refused(f"{where} is another call's, which has not ended")
        return known

    def _leave(self, ticket: Ticket) -> None:
        """Removes a call from those that wait; no effect if it does not wait."""
        self._unordered.pop(ticket, None)
        if self._first is ticket:
            self._first = None
        if self._is_waiting(ticket):
            del self._sessions[ticket.session].waiting[ticket.number]

    def _is_waiting(self, ticket: Ticket) -> bool:
        """Whether an ordered call waits for its turn."""
        known = self._sessions.get(ticket.session)
        return known is not None and known.waiting.get(ticket.number) is ticket

    def _stop(self, ticket: Ticket) -> None:
        """Notes that this call, which runs or waits at a barrier, no longer does so."""
        if self._at_barrier is ticket:
            self._at_barrier = None
            self._first = None if self._first is ticket else self._first
        else:
            assert self._running is ticket, "another call runs"
            self._running = None


def _arrival(ticket: Ticket) -> int:
    return ticket.arrival
