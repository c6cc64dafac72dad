"""Queue in which the calls of one rank wait for their turns, as coroutines on the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from services.runtime.turns import Ticket, TurnOrder

MISSING_S = 5.0
"""Seconds that a rank waits for a missing call of a session, while none of the session runs, before it runs a later
call. Calls on a stream arrive in order, so a call that is missing for longer is unlikely to arrive."""


class TurnQueue:
    """Lets calls wait for their turns, in the order that `TurnOrder` decides. Not thread-safe: used from the event
    loop alone."""

    def __init__(self) -> None:
        self._turns = TurnOrder()
        self._waiting: dict[Ticket, asyncio.Future[None]] = {}
        self._timers: dict[tuple[str, int], asyncio.TimerHandle] = {}

    @property
    def heads(self) -> Sequence[Ticket]:
        """Tickets of the sessions' next calls that wait in `begin`."""
        return [ticket for ticket in self._turns.heads if ticket in self._waiting]

    def next_of(self, session: str) -> int:
        """Returns the sequence number of a session's next call; 0 for a session that was not added or has ended."""
        return self._turns.next_of(session)

    def begin_session(self, name: str) -> None:
        """Adds a session, whose sequence numbers start from 1."""
        self._turns.begin_session(name)

    def end_session(self, name: str) -> None:
        """Removes a session, if it was added; every waiting call checks whether it may still wait."""
        self._turns.end_session(name)
        self._watch_missing()
        self.wake()

    def join(self, session: str, number: int, *, meets: bool = False) -> Ticket:
        """Adds a call to those that wait and returns its ticket, without waiting for the turn; arguments and errors
        are those of `TurnOrder.join`."""
        ticket = self._turns.join(session, number, meets=meets)
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
        """Notes that this call, which runs or waits for the other ranks, has ended, and wakes the next one."""
        self._turns.end(ticket)
        self._pass_on()

    def await_peers(self, ticket: Ticket) -> None:
        """Notes that the running call, which must be this one, waits at the barrier for the other ranks. Calls without
        a barrier may begin until `resume`, `give_way` or `end`."""
        self._turns.await_peers(ticket)
        self._pass_on()

    async def resume(self, ticket: Ticket) -> None:
        """Begins this call, which waited at the barrier, as soon as the call that runs meanwhile has ended. Cannot be
        stopped, since the other ranks begin the call too."""
        self._turns.resume(ticket)
        while not self._turns.may_begin(ticket):
            turn = self._waiting[ticket] = asyncio.get_running_loop().create_future()
            await turn
        self._waiting.pop(ticket, None)
        self._turns.begin(ticket)
        self._watch_missing()

    def give_way(self, ticket: Ticket, to: Ticket) -> None:
        """Moves this call, which waits at the barrier, back into the queue, so that the call `to` of another session
        begins first. The caller then has to `begin` this call again."""
        self._turns.give_way(ticket, to)
        self._pass_on()

    def abandon(self, session: str, number: int) -> None:
        """Lets later calls of the session run without waiting for this sequence number. A call may still `join` with
        the number while it is not below the session's next one. No effect if a call with the number waits or runs, or
        if `join` would refuse the number."""
        self._turns.abandon(session, number)
        self._pass_on()

    def wake(self) -> None:
        """Wakes all waiting calls, so that each checks whether it may still wait."""
        for turn in self._waiting.values():
            if not turn.done():
                turn.set_result(None)

    def _pass_on(self) -> None:
        """Wakes the call whose turn it is, and no other, so that the cost of a turn does not grow with the queue. A
        call that does not wait in `begin` yet, since its rows are still fetched, does not hold up those of other
        sessions."""
        turn = next((self._waiting[ticket] for ticket in self._turns.ready if ticket in self._waiting), None)
        if turn is not None and not turn.done():
            turn.set_result(None)
        self._watch_missing()

    def _watch_missing(self) -> None:
        """Starts a timer of MISSING_S for each sequence number that is missing now, and stops those of numbers that no
        longer are."""
        missing = set(self._turns.missing.items())
        for each in self._timers.keys() - missing:
            self._timers.pop(each).cancel()
        for each in missing - self._timers.keys():
            timer = asyncio.get_running_loop().call_later(MISSING_S, self._pass_over_missing, each)
            self._timers[each] = timer

    def _pass_over_missing(self, missing: tuple[str, int]) -> None:
        """Ends the wait for the missing call, given as (session, number): the session's waiting call with the lowest
        sequence number becomes its next call. If the missing call is collective, `CallBarrier` fails it, since this
        rank is at a later call."""
        del self._timers[missing]
        self._turns.pass_over_missing(missing[0])
        self._pass_on()
