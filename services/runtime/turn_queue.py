"""Queue in which the calls of one rank wait for their turns, as coroutines on the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from services.runtime.turns import Ticket, TurnOrder

MISSING_S = 5.0
"""Seconds that an idle rank waits for a missing call before it runs a later one. Calls on a stream arrive in order,
so a call that is missing for longer will hardly come."""


class TurnQueue:
    """Lets calls wait for their turns, in the order that `TurnOrder` decides. Not thread-safe: used from the event
    loop alone."""

    def __init__(self) -> None:
        self._turns = TurnOrder()
        self._waiting: dict[Ticket, asyncio.Future[None]] = {}
        self._missing: int | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def next(self) -> int:
        """Sequence number of the current session's next call, from 1."""
        return self._turns.next

    def begin_session(self, name: str) -> None:
        """Makes `name` the current session: sequence numbers start from 1 again, and every waiting call checks
        whether it may still wait."""
        self._turns.begin_session(name)
        self._watch_missing()
        self.wake()

    def join(self, session: str, number: int) -> Ticket:
        """Adds a call to those that wait and returns its ticket, without waiting for the turn; arguments and errors
        are those of `TurnOrder.join`."""
        ticket = self._turns.join(session, number)
        self._watch_missing()
        return ticket

    def begin_at_once(self, ticket: Ticket) -> bool:
        """Begins a call that has joined if it is its turn, and returns True; otherwise it keeps waiting, and this
        returns False."""
        may_begin = self._turns.may_begin(ticket)
        if may_begin:
            self._turns.begin(ticket)
            self._watch_missing()
        return may_begin

    async def begin(self, ticket: Ticket, deadline: float, check: Callable[[], None]) -> None:
        """Waits until it is the call's turn, and begins it. If this raises or is cancelled, the call leaves the
        queue, and later calls do not wait for it.

        Args:
            deadline: Latest time of the turn, in seconds of `time.monotonic()`.
            check: Raises if the call may not wait any longer. Called before the wait, after each `wake`, and before
                the call begins.

        Raises:
            TimeoutError: The turn did not come before the deadline.
            Exception: The error that `check` raised.
        """
        try:
            while not self._turns.may_begin(ticket):
                check()
                turn = self._waiting[ticket] = asyncio.get_running_loop().create_future()
                await asyncio.wait_for(turn, max(deadline - time.monotonic(), 0))
            check()
        except BaseException:
            self._turns.give_up(ticket)
            self._pass_on()
            raise
        finally:
            self._waiting.pop(ticket, None)
        self._turns.begin(ticket)
        self._watch_missing()

    def end(self, ticket: Ticket) -> None:
        """Notes that the running call, which must be this one, has ended, and wakes the next one."""
        self._turns.end(ticket)
        self._pass_on()

    def abandon(self, session: str, number: int) -> None:
        """Lets later calls of the session run without waiting for this sequence number. A call may still `join` with
        the number while it is not below `next`. No effect if a call with the number waits or runs, or if `join` would
        refuse the number."""
        self._turns.abandon(session, number)
        self._pass_on()

    def wake(self) -> None:
        """Wakes all waiting calls, so that each checks whether it may still wait."""
        for turn in self._waiting.values():
            if not turn.done():
                turn.set_result(None)

    def _pass_on(self) -> None:
        """Wakes the call whose turn it is, and no other, so that the cost of a turn does not grow with the queue."""
        turn = self._waiting.get(ready) if (ready := self._turns.ready) else None
        if turn is not None and not turn.done():
            turn.set_result(None)
        self._watch_missing()

    def _watch_missing(self) -> None:
        """Starts the timer of MISSING_S for the sequence number that is missing now, if any, and stops the timer of a
        number that no longer is."""
        if self._turns.missing == self._missing:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._missing = self._turns.missing
        is_missing = self._missing is not None
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(MISSING_S, self._pass_over_missing) if is_missing else None

    def _pass_over_missing(self) -> None:
        """Ends the wait for the missing call: the waiting call with the lowest sequence number is next. If the ranks
        of the service meet for the missing call, `Meetings` fails it, since this rank is past it."""
        self._turns.pass_over_missing()
        self._pass_on()
