"""Makes all ranks of a service begin a call together, or none, even if only some of them received it."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from rlhf.contract import Method
from rlhf.errors import InvalidRequest, OutOfStep, PeerFailed, Refused
from rlhf.v1 import common_pb2
from services.runtime.ranks import Ranks, known_to_all

ROWS = ("batch", "text_rows")
"""Names of the request fields whose values differ from rank to rank."""


@dataclass
class Attendance:
    """This rank's wait for its peers at the beginning of one call.

    Attributes:
        note: Three numbers that identify the call: start of its session in Unix nanoseconds, its sequence number, and
            a checksum of the method and of the request fields that are the same on all ranks.
        is_wanted: Whether this rank still wants to run the call. False once the call is stopped or reaches its
            deadline while the rank waits.
        has_begun: Whether this rank has begun to send the note to its peers.
    """

    note: list[float]
    is_wanted: bool = True
    has_begun: bool = False

    @property
    def order(self) -> list[float]:
        """Position of the call in the order of all calls: [start of its session, sequence number]."""
        return self.note[:2]


class Meetings:
    """Barrier of all ranks before each call that they compute together. Used from the event loop alone.

    At the barrier each rank sends a note that identifies its call, and receives the notes of all ranks once all have
    sent one. A call may be stopped, or reach its deadline, before that, and the rank then goes on to later calls. A
    note that was sent cannot be taken back: the rank keeps waiting at the barrier of that call in the background, and
    tells peers that arrive there that it no longer wants the call. If more calls are given up meanwhile, the rank
    waits for the last of them alone.

    Args:
        ranks: Ranks of the service.
        leave: Prints a reason and ends this process. Called if a peer dies while this rank waits for a call that it
            has given up, so that no caller would see the error.
    """

    def __init__(self, ranks: Ranks, leave: Callable[[str], object]) -> None:
        self._ranks = ranks
        self._leave = leave
        self._turn = asyncio.Lock()
        self._attending: dict[asyncio.Task[None], Attendance] = {}

    async def meet(self, method: Method, request: Any, stopped: asyncio.Event, deadline: float) -> bool:
        """Waits until every rank is ready to begin this call.

        Args:
            method: Method of the call.
            request: Request message of the call, as this rank received it.
            stopped: Event that ends the wait.
            deadline: Latest end of the wait, in seconds of `time.monotonic()`.

        Returns:
            True if all ranks begin the call; False if `stopped` was set or the deadline came first.

        Raises:
            PeerFailed: A peer is at a later call of the session, or has given this one up.
            Refused: A peer is at a call of a later session.
            InvalidRequest: The ranks received different requests with the same sequence number.
            OutOfStep: A peer died.
        """
        mine = Attendance(_note(method, request))
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
            return False
        attending.result()
        return True

    def _end(self, attending: asyncio.Task[None]) -> None:
        """Forgets a barrier that this rank has left; ends the process if a peer died there and no caller would see
        it."""
        mine = self._attending.pop(attending)
        error = None if attending.cancelled() else attending.exception()
        if isinstance(error, OutOfStep) and not mine.is_wanted:
            self._leave(str(error))

    async def _attend(self, mine: Attendance) -> None:
        """Waits at the barrier of one call until all ranks have come to it; raises as `_check` if they cannot begin
        it. If this rank no longer wants the call by then, tells its peers, whose call fails."""
        async with self._turn:
            mine.has_begun = True
            while (notes := await self._round(mine.note)) != [mine.note] * len(notes):
                is_wanted = mine.is_wanted
                wanted = [vote[0] for vote in await self._round([is_wanted])]
                if not is_wanted:
                    return
                self._check(mine, notes, wanted)
            if not mine.is_wanted:
                # The peers begin the call. This takes part in their first agreement, as a rank that failed before it.
                await self._round([True])

    def _check(self, mine: Attendance, notes: list[list[float]], wanted: list[float]) -> None:
        """Raises if this call cannot begin; returns if it still may, once ranks that are at earlier calls arrive. All
        ranks see the same notes and so decide alike.

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
            if note[0] > mine.note[0]:
                raise known_to_all(
                    Refused(f"the call's session was superseded: rank {rank} is at a younger one")
                )
            if note[:2] > mine.order:
                raise known_to_all(PeerFailed(f"rank {rank} was not sent this call, and is at a later one"))
            if wanted[rank] and note[:2] == mine.order and note != mine.note:
                raise known_to_all(InvalidRequest(f"rank {rank} was sent another request by the same number"))

    async def _round(self, note: Sequence[float]) -> list[list[float]]:
        """Begins an all-gather of `note`, waits for it, and returns the notes of all ranks, in rank order and without
        padding."""
        notes = await self._ranks.begin_round(note).arrive()
        return [each[: len(note)] for each in notes]


def _note(method: Method, request: Any) -> list[float]:
    """Returns the note of a call, as `Attendance.note` describes it."""
    call: common_pb2.Call = request.call
    checksum = zlib.crc32(method.path.encode())
    for field, value in request.ListFields():
        if field.name not in ROWS:
            is_message = isinstance(value, Message)
            encoded = value.SerializeToString(deterministic=True) if is_message else repr(value).encode()
            checksum = zlib.crc32(encoded, checksum)
    # float64 rounds nanoseconds to a fraction of a microsecond; sessions begin further apart than that.
    return [float(call.session_started_unix_ns), float(call.sequence), float(checksum)]
