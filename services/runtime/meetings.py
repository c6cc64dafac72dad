"""Makes all ranks of a service begin a call together, or none, even if only some of them received it."""

from __future__ import annotations

import asyncio
import functools
import operator
import time
import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from rlhf.contract import Method
from rlhf.errors import InvalidRequest, OutOfStep, PeerFailed, Refused
from rlhf.v1 import common_pb2
from services.runtime.ranks import Ranks, known_to_all

ROWS = ("batch", "text_rows")
"""Names of the request fields whose values differ from rank to rank."""

PAUSE_S = 0.01
"""Seconds between two rounds of ranks that are at calls of different sessions, none of which has reached all ranks."""

MOST_VOTES = 50
"""Most calls that ranks vote on at a time; a float64 keeps this many bits."""

Note = list[float]
"""Four numbers that identify a call: start of its session in Unix nanoseconds, a checksum of the session's name, the
call's sequence number, and a checksum of the method and of the request fields that are the same on all ranks."""


@dataclass
class Attendance:
    """This rank's wait for its peers at the beginning of one call.

    Attributes:
        note: The note that identifies the call, from `note_of`.
        is_wanted: Whether this rank still wants to run the call. False once the call is stopped or reaches its
            deadline while the rank waits.
        has_begun: Whether this rank has begun to send the note to its peers.
    """

    note: Note
    is_wanted: bool = True
    has_begun: bool = False

    @property
    def session(self) -> Note:
        """The part of the note that identifies the session: its start, and the checksum of its name."""
        return self.note[:2]

    @property
    def order(self) -> Note:
        """Position of the call in the order of all calls: `session`, and the sequence number."""
        return self.note[:3]


class Meetings:
    """Barrier of all ranks before each call that they compute together. Used from the event loop alone.

    At the barrier each rank sends a note that identifies its call, and receives the notes of all ranks once all have
    sent one. A call may be stopped, or reach its deadline, before that, and the rank then goes on to later calls. A
    note that was sent cannot be taken back: the rank keeps waiting at the barrier of that call in the background, and
    tells peers that arrive there that it no longer wants the call. If more calls are given up meanwhile, the rank
    waits for the last of them alone.

    Where sessions share the service, their calls may arrive in different orders on different ranks. Ranks that come
    with calls of different sessions vote on them: each says which of these calls it could begin now. All ranks then
    begin the first one, in the order of the ranks that came with them, that all could begin; so each session's calls
    keep their order. If there is none, the ranks meet again after PAUSE_S.

    Args:
        ranks: Ranks of the service.
        leave: Prints a reason and ends this process. Called if a peer dies while this rank waits for a call that it
            has given up, so that no caller would see the error.
        others: Returns the notes of the calls of other sessions that this rank could begin in place of the one that it
            has come with. Default None: one session has the service at a time, and a younger one supersedes it.
    """

    def __init__(
        self,
        ranks: Ranks,
        leave: Callable[[str], object],
        others: Callable[[], Collection[Note]] | None = None,
    ) -> None:
        self._ranks = ranks
        self._leave = leave
        self._others = others
        self._turn = asyncio.Lock()
        self._attending: dict[asyncio.Task[Note], Attendance] = {}

    async def meet(self, note: Note, stopped: asyncio.Event, deadline: float) -> Note | None:
        """Waits until every rank is ready to begin this call, or all agree to begin another session's call first.

        Args:
            note: Note of the call, from `note_of`.
            stopped: Event that ends the wait.
            deadline: Latest end of the wait, in seconds of `time.monotonic()`.

        Returns:
            `note` if all ranks begin the call; the note of another session's call if all ranks are to begin that one
            first; None if `stopped` was set or the deadline came before.

        Raises:
            PeerFailed: A peer is at a later call of the session, or has given this one up.
            Refused: A peer is at a call of a later session, which has superseded this one.
            InvalidRequest: The ranks received different requests with the same sequence number.
            OutOfStep: A peer died.
        """
        mine = Attendance(note)
        for earlier, attendance in self._attending.items():
            if not attendance.has_begun:
                earlier.cancel()
        attending = asyncio.create_task(self._attend(mine))
        self._attending[attending] = mine
        attending.add_done_callback(self._end)
        waiting = asyncio.ensure_future(stopped.wait())
        timeout_s = max(deadline - time.monotonic(), 0)
        await asyncio.wait([attending, waiting], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not attending.done():
            mine.is_wanted = False
            return None
        return attending.result()

    def _end(self, attending: asyncio.Task[Note]) -> None:
        """Forgets a barrier that this rank has left; ends the process if a peer died there and no caller would see
        it."""
        mine = self._attending.pop(attending)
        error = None if attending.cancelled() else attending.exception()
        if isinstance(error, OutOfStep) and not mine.is_wanted:
            self._leave(str(error))

    async def _attend(self, mine: Attendance) -> Note:
        """Waits at the barrier of one call until all ranks have come to it, and returns its note, or that of another
        session's call, which all ranks are to begin first; raises as `_check` if they cannot begin it. If this rank no
        longer wants the call by then, tells its peers, whose call fails, and returns its note."""
        async with self._turn:
            mine.has_begun = True
            while (notes := await self._round(mine.note)) != [mine.note] * len(notes):
                is_wanted = mine.is_wanted
                votes = await self._round([is_wanted, self._vote(mine, notes)])
                if not is_wanted:
                    return mine.note
                self._check(mine, notes, [vote[0] for vote in votes])
                if self._others is None or all(note[:2] == mine.session for note in notes):
                    continue
                first = _first_of_all(notes, [int(vote[1]) for vote in votes])
                if first is None:
                    await asyncio.sleep(PAUSE_S)
                elif first != mine.note:
                    return first
            if not mine.is_wanted:
                # The peers begin the call. This takes part in their first agreement, as a rank that failed before it.
                await self._round([True])
            return mine.note

    def _vote(self, mine: Attendance, notes: Sequence[Note]) -> int:
        """Returns the calls that this rank could begin now, of those that the ranks have come with: bit i stands for
        the i-th different note, in rank order."""
        possible = [*(self._others() if self._others else ()), *([mine.note] if mine.is_wanted else ())]
        return sum(1 << i for i, note in enumerate(_different(notes)) if note in possible)

    def _check(self, mine: Attendance, notes: Sequence[Note], wanted: Sequence[float]) -> None:
        """Raises if this call cannot begin; returns if it still may, once ranks arrive that are at earlier calls or at
        calls of other sessions that share the service. All ranks see the same notes and so decide alike.

        Args:
            mine: The call on this rank.
            notes: Notes of all ranks, in rank order.
            wanted: For each rank, 1 if it still wants its call, else 0.

        Raises:
            PeerFailed: A rank has given this call up, or is at a later one of the session.
            Refused: A rank is at a call of a later session, so this session has been superseded.
            InvalidRequest: A rank received a different request with the same sequence number.
        """
        gone = [str(rank) for rank, note in enumerate(notes) if note == mine.note and not wanted[rank]]
        if gone:
            raise known_to_all(PeerFailed(f"nobody waits for the call on rank {', '.join(gone)} any more"))
        for rank, note in enumerate(notes):
            if note[:2] != mine.session:
                if self._others is None and note[:2] > mine.session:
                    raise known_to_all(
                        Refused(f"the call's session was superseded: rank {rank} is at a younger one")
                    )
            elif note[:3] > mine.order:
                raise known_to_all(PeerFailed(f"rank {rank} was not sent this call, and is at a later one"))
            elif wanted[rank] and note[:3] == mine.order and note != mine.note:
                raise known_to_all(InvalidRequest(f"rank {rank} was sent another request by the same number"))

    async def _round(self, note: Note) -> list[Note]:
        """Begins an all-gather of `note`, waits for it, and returns the notes of all ranks, in rank order and without
        padding."""
        notes = await self._ranks.begin_round(note).arrive()
        return [each[: len(note)] for each in notes]


def note_of(method: Method, request: Any) -> Note:
    """Returns the note of a call, given its method and its request as this rank received it."""
    call: common_pb2.Call = request.call
    checksum = zlib.crc32(method.path.encode())
    for field, value in request.ListFields():
        if field.name not in ROWS:
            is_message = isinstance(value, Message)
            encoded = value.SerializeToString(deterministic=True) if is_message else repr(value).encode()
            checksum = zlib.crc32(encoded, checksum)
    # float64 rounds nanoseconds to a fraction of a microsecond; sessions that began so close have different names.
    session = (float(call.session_started_unix_ns), float(zlib.crc32(call.session.encode())))
    return [*session, float(call.sequence), float(checksum)]


def _different(notes: Sequence[Note]) -> list[Note]:
    """Returns the different notes, in the order of their first ranks; at most MOST_VOTES."""
    return [note for i, note in enumerate(notes) if note not in notes[:i]][:MOST_VOTES]


def _first_of_all(notes: Sequence[Note], votes: Sequence[int]) -> Note | None:
    """Returns the first of the different notes that all ranks have voted for; None if there is none."""
    common = functools.reduce(operator.and_, votes)
    return next((note for i, note in enumerate(_different(notes)) if common >> i & 1), None)
