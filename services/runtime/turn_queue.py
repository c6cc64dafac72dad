"""Calls of one rank that wait for their turns, on the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from services.runtime.turns import Ticket, TurnOrder

MISSING_S = 5.0
"""How long an idle rank waits for a missing call before it goes on with a later one: over a stream, calls come in
order."""


class TurnQueue:
    """Lets calls wait for their turns; `TurnOrder` decides whose turn it is. Used from the event loop."""

    def __init__(self) -> None:
        self._turns = TurnOrder()
        self._waiting: dict[Ticket, asyncio.Future[None]] = {}
        self._missing: int | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def next(self) -> int:
        """Sequence number of the session's next call."""
        return self._turns.next

    def begin_session(self, name: str) -> None:
        """Numbers count from 1 again, and calls of the session before wake to look whether they still may wait."""
        self._turns.begin_session(name)
        self.wake()

    def join(self, session: str, number: int) -> Ticket:
        """Claims a turn; see `TurnOrder.join`."""
        ticket = self._turns.join(session, number)
        self._watch_missing()
        return ticket

    def begin_at_once(self, ticket: Ticket) -> bool:
        """Takes the turn of a call that has not waited yet, if it is its turn."""
        may_begin = self._turns.may_begin(ticket)
        if may_begin:
            self._turns.begin(ticket)
            self._watch_missing()
        return may_begin

    async def begin(self, ticket: Ticket, deadline: float, check: Callable[[], None]) -> None:
        """Takes the call's turn once it has come. A call that fails here gives its turn up.

        Args:
            deadline: Latest time of the turn, by `time.monotonic()`.
            check: Raises where the call may wait no longer; called at first, whenever `wake` is, and at its turn.

        Raises:
            TimeoutError: The turn did not come before the deadline.
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
        """The running call has ended."""
        self._turns.end(ticket)
        self._pass_on()

    def abandon(self, session: str, number: int) -> None:
        """No call will come by this number; see `TurnOrder.abandon`."""
        self._turns.abandon(session, number)
        self._pass_on()

    def wake(self) -> None:
        """Wakes all that wait, to look whether they still may."""
        for turn in self._waiting.values():
            if not turn.done():
                turn.set_result(None)

    def _pass_on(self) -> None:
        """Wakes the call whose turn it is: one of many that wait, so that a turn costs the same in a long queue."""
        turn = self._waiting.get(ready) if (ready := self._turns.ready) else None
        if turn is not None and not turn.done():
            turn.set_result(None)
        self._watch_missing()

    def _watch_missing(self) -> None:
        """Starts the time for a number that is missing now, and stops that for another one."""
        if self._turns.missing == self._missing:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._missing = self._turns.missing
        is_missing = self._missing is not None
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(MISSING_S, self._pass_over_missing) if is_missing else None

    def _pass_over_missing(self) -> None:
        """Peers that have the missing call learn at its beginning that this rank is at a later one."""
        self._turns.pass_over_missing()
        self._pass_on()
