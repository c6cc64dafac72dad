"""The order in which calls run on one rank, by their sequence numbers in a session. This module decides which call is
next; `services.runtime.turn_queue` lets calls wait."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.errors import Refused, TooManyCalls

MAX_WAITING = 4096
"""Most ordered calls, and most unordered calls, that may wait for their turns. A sequence number that is this many or
more ahead of the next call's is refused."""


@dataclass(eq=False, frozen=True, slots=True)
class Ticket:
    """One call's place in the order of calls.

    Attributes:
        session: Name of the call's session.
        number: Sequence number of the call in its session, from 1; 0 for a call that needs no order.
        arrival: Position of the call among all calls of the rank, in the order in which they joined, from 1.
    """

    session: str
    number: int
    arrival: int


class TurnOrder:
    """Decides which call runs next, one at a time: calls of the current session in the order of their sequence
    numbers, unordered calls (number 0) in the order of their arrival.

    A sequence number whose call will not run is abandoned (`abandon`, `give_up`) and skipped. A sequence number whose
    call has not arrived is missing: later calls wait for it until `pass_over_missing`.

    Attributes:
        next: Sequence number of the session's next call, from 1.
    """

    def __init__(self) -> None:
        self.next = 1
        self._session = ""
        self._arrivals = 0
        self._running: Ticket | None = None
        self._waiting: dict[int, Ticket] = {}
        self._unordered: dict[Ticket, None] = {}
        self._abandoned: set[int] = set()

    def begin_session(self, name: str) -> None:
        """Makes `name` the current session: sequence numbers start from 1 again, and waiting calls of the previous
        session can no longer begin."""
        self._session, self.next = name, 1
        self._waiting.clear()
        self._abandoned.clear()

    def join(self, session: str, number: int) -> Ticket:
        """Adds a call to those that wait; returns its ticket.

        Args:
            session: Name of the call's session; ignored for an unordered call.
            number: Sequence number, from 1; 0 for an unordered call.

        Raises:
            Refused: The number is below `next` or belongs to another call that has not ended, or the session is not
                the current one.
            TooManyCalls: MAX_WAITING unordered calls wait already, or the number is MAX_WAITING or more above `next`.
        """
        if number:
            self._check(session, number)
        elif len(self._unordered) >= MAX_WAITING:
            raise TooManyCalls(f"{MAX_WAITING} calls without a sequence wait already; try again later")
        self._arrivals += 1
        ticket = Ticket(session, number, self._arrivals)
        if number:
            self._abandoned.discard(number)
            self._waiting[number] = ticket
        else:
            self._unordered[ticket] = None
        return ticket

    @property
    def ready(self) -> Ticket | None:
        """Ticket of the waiting call that should begin now; None while a call runs, or if no waiting call may begin.
        If an ordered and an unordered call may both begin, the one that arrived first."""
        if self._running is not None:
            return None
        candidates = (self._waiting.get(self.next), next(iter(self._unordered), None))
        return min(filter(None, candidates), key=lambda ticket: ticket.arrival, default=None)

    @property
    def missing(self) -> int | None:
        """Sequence number of the next call, if no call runs and later calls wait for it but it has not arrived; None
        otherwise."""
        is_blocked = self._running is None and self._waiting and self.next not in self._waiting
        return self.next if is_blocked else None

    def may_begin(self, ticket: Ticket) -> bool:
        """Whether a waiting call may begin now: no call runs, and its number is the next one or it is unordered."""
        if self._running is not None:
            return False
        return ticket in self._unordered or self._waiting.get(self.next) is ticket

    def begin(self, ticket: Ticket) -> None:
        """Makes a waiting call the running one; `may_begin` must be True."""
        assert self.may_begin(ticket), "another call's turn"
        self._leave(ticket)
        self._running = ticket

    def end(self, ticket: Ticket) -> None:
        """Notes that the running call, which must be this one, has ended, so that the next one may begin."""
        assert self._running is ticket, "another call runs"
        self._running = None
        if ticket.number and ticket.session == self._session:
            self.next = max(self.next, ticket.number + 1)
        self._skip_abandoned()

    def give_up(self, ticket: Ticket) -> None:
        """Removes a waiting call, which will not run, so that later calls do not wait for it."""
        self._leave(ticket)
        self.abandon(ticket.session, ticket.number)

    def abandon(self, session: str, number: int) -> None:
        """Lets later calls run without waiting for this sequence number. A call may still `join` with the number while
        it is not below `next`. No effect if a call with the number waits or runs, or if `join` would refuse the
        number."""
        is_free = number not in self._waiting and self._runs != (session, number)
        if session == self._session and is_free and self.next <= number < self.next + MAX_WAITING:
            self._abandoned.add(number)
            self._skip_abandoned()

    def pass_over_missing(self) -> None:
        """If the next call is missing, makes the lowest sequence number that waits the next one. Calls with lower
        numbers that arrive later are refused."""
        if self.missing is not None:
            self.next = min(self._waiting)
            self._abandoned = {number for number in self._abandoned if number > self.next}

    @property
    def _runs(self) -> tuple[str, int] | None:
        """Session and sequence number of the running call; None if no call runs."""
        return None if self._running is None else (self._running.session, self._running.number)

    def _check(self, session: str, number: int) -> None:
        """Raises as `join` if an ordered call of this session and number may not join."""
        where = f"sequence {number} of session {session!r}"
        if session != self._session:
            raise Refused(f"{where}, but the current session is {self._session!r}")
        if number < self.next:
            raise Refused(f"{where}, but {self.next} is next")
        if number >= self.next + MAX_WAITING:
            raise TooManyCalls(f"{where}, but {self.next} is next; at most {MAX_WAITING} calls may wait")
        if number in self._waiting or self._runs == (session, number):
            raise Refused(f"{where} is another call's, which has not ended")

    def _leave(self, ticket: Ticket) -> None:
        """Removes a call from those that wait; no effect if it does not wait."""
        self._unordered.pop(ticket, None)
        if self._waiting.get(ticket.number) is ticket:
            del self._waiting[ticket.number]

    def _skip_abandoned(self) -> None:
        """Advances `next` past sequence numbers that are abandoned."""
        while self.next in self._abandoned:
            self._abandoned.remove(self.next)
            self.next += 1
