"""The order of calls on one rank: whose turn it is, by the sequence numbers of a session. No clock and no waiting."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.errors import Refused, TooManyCalls

MAX_WAITING = 4096
"""Most ordered calls, and most unordered calls, that wait for their turns. A number is less than this above the next
one."""


@dataclass(eq=False, frozen=True, slots=True)
class Ticket:
    """One call's claim to a turn.

    Attributes:
        session: Name of the call's session.
        number: Sequence number in the session, from 1; 0 for a call that needs no order.
        arrival: Position among all calls of the rank.
    """

    session: str
    number: int
    arrival: int


class TurnOrder:
    """Hands out turns, one at a time: to the calls of the current session by number, to unordered calls by arrival.

    A number whose call does not run is abandoned, and the calls behind it go on. A number whose call has not come is
    missing, and they wait until `pass_over_missing`.

    Attributes:
        next: Number of the session's next call.
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
        """Numbers count from 1 again; those of the session before have no turn any more."""
        self._session, self.next = name, 1
        self._waiting.clear()
        self._abandoned.clear()

    def join(self, session: str, number: int) -> Ticket:
        """Claims a turn.

        Raises:
            Refused: The number was passed or is another call's, or the session is not the current one.
            TooManyCalls: MAX_WAITING calls wait, or the number is as far ahead.
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
        """The waiting call whose turn it is; None while a call runs, or where none may begin."""
        if self._running is not None:
            return None
        candidates = (self._waiting.get(self.next), next(iter(self._unordered), None))
        return min(filter(None, candidates), key=lambda ticket: ticket.arrival, default=None)

    @property
    def missing(self) -> int | None:
        """The number that calls wait for on an idle rank, and whose call has not come."""
        is_blocked = self._running is None and self._waiting and self.next not in self._waiting
        return self.next if is_blocked else None

    def may_begin(self, ticket: Ticket) -> bool:
        """Whether a waiting call may take its turn now; of unordered calls, each may on an idle rank."""
        if self._running is not None:
            return False
        return ticket in self._unordered or self._waiting.get(self.next) is ticket

    def begin(self, ticket: Ticket) -> None:
        """The call takes its turn, which `may_begin` allows."""
        assert self.may_begin(ticket), "another call's turn"
        self._leave(ticket)
        self._running = ticket

    def end(self, ticket: Ticket) -> None:
        """The running call has ended."""
        assert self._running is ticket, "another call runs"
        self._running = None
        if ticket.number and ticket.session == self._session:
            self.next = max(self.next, ticket.number + 1)
        self._skip_abandoned()

    def give_up(self, ticket: Ticket) -> None:
        """A waiting call does not take its turn: later ones do not wait for it."""
        self._leave(ticket)
        self.abandon(ticket.session, ticket.number)

    def abandon(self, session: str, number: int) -> None:
        """No call will come by this number, unless one joins by it before its turn. A number of a call that is here,
        or one that `join` would refuse, stays as it is."""
        is_free = number not in self._waiting and self._runs != (session, number)
        if session == self._session and is_free and self.next <= number < self.next + MAX_WAITING:
            self._abandoned.add(number)
            self._skip_abandoned()

    def pass_over_missing(self) -> None:
        """Goes on with the lowest number that is here, where an idle rank waits for another. A call that comes by a
        number below it is refused."""
        if self.missing is not None:
            self.next = min(self._waiting)
            self._abandoned = {number for number in self._abandoned if number > self.next}

    @property
    def _runs(self) -> tuple[str, int] | None:
        return None if self._running is None else (self._running.session, self._running.number)

    def _check(self, session: str, number: int) -> None:
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
        self._unordered.pop(ticket, None)
        if self._waiting.get(ticket.number) is ticket:
            del self._waiting[ticket.number]

    def _skip_abandoned(self) -> None:
        while self.next in self._abandoned:
            self._abandoned.remove(self.next)
            self.next += 1
