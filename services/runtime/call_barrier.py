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
"""Seconds between two rounds while the ranks are at calls of different sessions and no call has reached all ranks."""

MOST_VOTES = 50
"""Maximum number of calls in one vote; a float64 represents this many bits exactly."""

Note = list[float]
"""Four numbers that identify a call: start of its session in Unix nanoseconds, a checksum of the session's name, the
call's sequence number, and a checksum of the method and of the request fields that are the same on all ranks."""


@dataclass
class BarrierEntry:
    """Entry of this rank into the barrier before one call.

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


class CallBarrier:
    """Barrier of all ranks before each collective call. Used from the event loop only.

    At the barrier, the ranks all-gather notes that identify their calls. A call may be stopped, or reach its deadline,
    before the all-gather completes; the rank then continues with later calls. An all-gather that has begun cannot be
    revoked: the rank stays in the barrier of the abandoned call in the background, and informs peers that enter it
    that it no longer runs the call. If it abandons further calls meanwhile, it enters only the barrier of the last one.

    If several sessions share the service, their calls may arrive in different orders on different ranks. Ranks that
    enter the barrier with calls of different sessions vote: each rank reports which of these calls it can begin now.
    All ranks then begin the first call, in rank order, that every rank can begin, so the calls of each session keep
    their order. If there is no such call, the ranks repeat the barrier after PAUSE_S.

    Args:
        ranks: Ranks of the service.
        leave: Prints a reason and ends this process. Called if a peer dies while this rank is in the barrier of a call
            that it has abandoned, since no caller would receive the error.
        others: Returns the notes of the calls of other sessions that this rank can begin in place of its own. Default
            None: the service has one session at a time, and a younger session supersedes it.
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
        self._entries: dict[asyncio.Task[Note], BarrierEntry] = {}

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
        mine = BarrierEntry(note)
        for earlier, entry in self._entries.items():
            if not entry.has_begun:
                earlier.cancel()
        entering = asyncio.create_task(self._enter(mine))
        self._entries[entering] = mine
        entering.add_done_callback(self._end)
        waiting = asyncio.ensure_future(stopped.wait())
        timeout_s = max(deadline - time.monotonic(), 0)
        await asyncio.wait([entering, waiting], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not entering.done():
            mine.is_wanted = False
            return None
        return entering.result()

    def _end(self, entering: asyncio.Task[Note]) -> None:
        """Removes the entry of a barrier that this rank has left. Ends the process if a peer died in the barrier of an
        abandoned call, since no caller would receive the error."""
        mine = self._entries.pop(entering)
        error = None if entering.cancelled() else entering.exception()
        if isinstance(error, OutOfStep) and not mine.is_wanted:
            self._leave(str(error))

    async def _enter(self, mine: BarrierEntry) -> Note:
        """Waits in the barrier of one call until all ranks have entered it. Returns the note of the call, or the note
        of another session's call that all ranks begin first; raises as `_check` if they cannot begin the call. If this
        rank has abandoned the call by then, informs its peers, whose call fails, and returns the note."""
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
                # The peers begin the call. This rank joins their first agreement as one that has failed.
                await self._round([True])
            return mine.note

    def _vote(self, mine: BarrierEntry, notes: Sequence[Note]) -> int:
        """Returns the calls that this rank can begin now as a bit mask: bit i stands for the i-th distinct note of
        `notes`, in rank order."""
        possible = [*(self._others() if self._others else ()), *([mine.note] if mine.is_wanted else ())]
        return sum(1 << i for i, note in enumerate(_different(notes)) if note in possible)

    def _check(self, mine: BarrierEntry, notes: Sequence[Note], wanted: Sequence[float]) -> None:
        """Raises if this call cannot begin. Returns if it may begin later, after ranks that are at earlier calls or at
        calls of other sessions. All ranks have the same notes and so reach the same decision.

        Args:
            mine: The call on this rank.
            notes: Notes of all ranks, in rank order.
            wanted: For each rank, 1 if it still wants its call, else 0.

        Raises:
            PeerFailed: A rank has abandoned this call, or is at a later call of the session.
            Refused: A rank is at a call of a younger session, so this session has been superseded.
            InvalidRequest: A rank received a different request with the same sequence number.
        """
        gone = [str(rank) for rank, note in enumerate(notes) if note == mine.note and not wanted[rank]]
        if gone:
            raise known_to_all(PeerFailed(f"rank {', '.join(gone)} no longer waits for this call"))
        for rank, note in enumerate(notes):
            if note[:2] != mine.session:
                if self._others is None and note[:2] > mine.session:
                    raise known_to_all(
                        Refused(f"the call's session was superseded: rank {rank} is in a younger session")
                    )
            elif note[:3] > mine.order:
                raise known_to_all(
                    PeerFailed(
                        f"rank {rank} has not received this call and is at a later call of the session"
                    )
                )
            elif wanted[rank] and note[:3] == mine.order and note != mine.note:
                raise known_to_all(
                    InvalidRequest(f"rank {rank} received a different request with the same sequence number")
                )

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
    """Returns the distinct notes, in the order of their first ranks; at most MOST_VOTES."""
    return [note for i, note in enumerate(notes) if note not in notes[:i]][:MOST_VOTES]


def _first_of_all(notes: Sequence[Note], votes: Sequence[int]) -> Note | None:
    """Returns the first distinct note that all ranks have voted for; None if there is none."""
    common = functools.reduce(operator.and_, votes)
    return next((note for i, note in enumerate(_different(notes)) if common >> i & 1), None)
