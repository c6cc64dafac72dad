"""The ranks of a service begin a call together or not at all, whichever of them received it."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from rlhf.contract import Method
from rlhf.errors import InvalidRequest, OutOfStep, PeerFailed
from rlhf.v1 import common_pb2
from services.runtime.ranks import Ranks, known_to_all

ROWS = ("batch", "text_rows")
"""Request fields that differ from rank to rank."""


@dataclass
class Attendance:
    """This rank's wait for its peers at one call.

    Attributes:
        note: Start of the call's session, its number in the session, and a checksum of the fields that all ranks
            receive alike.
        is_wanted: Whether a caller still waits for the call on this rank.
        has_begun: Whether the note was sent, or is about to be.
    """

    note: list[float]
    is_wanted: bool = True
    has_begun: bool = False

    @property
    def order(self) -> list[float]:
        """Sort key of calls: session start, number."""
        return self.note[:2]


class Meetings:
    """Barrier of the ranks before each call that they compute together. Used from the event loop.

    A rank notes the call that it is at, and gets the notes of all ranks once each has noted one. Until then its caller
    may give up, and the rank go on to later calls. A note cannot be taken back; so the rank goes on to attend for that
    call, and tells peers that come to it that it is not wanted any more. Of further calls that are given up meanwhile,
    it attends for the last one.

    Args:
        leave: Ends this process and prints a reason; called where the ranks fall out of step while no caller waits for
            the error.
    """

    def __init__(self, ranks: Ranks, leave: Callable[[str], object]) -> None:
        self._ranks = ranks
        self._leave = leave
        self._turn = asyncio.Lock()
        self._attending: dict[asyncio.Task[None], Attendance] = {}

    async def meet(self, method: Method, request: Any, stopped: asyncio.Event, deadline: float) -> bool:
        """Waits until every rank is at this call; returns False where it was stopped or its deadline came first.

        Args:
            deadline: By `time.monotonic()`.

        Raises:
            PeerFailed: A peer is at a later call, or has given this one up.
            InvalidRequest: The ranks received different requests.
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
        mine = self._attending.pop(attending)
        error = None if attending.cancelled() else attending.exception()
        if isinstance(error, OutOfStep) and not mine.is_wanted:
            self._leave(str(error))

    async def _attend(self, mine: Attendance) -> None:
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
        """Raises where this call cannot begin; returns where ranks at earlier calls may still come. Every rank decides
        by the same notes."""
        gone = [str(rank) for rank, note in enumerate(notes) if note == mine.note and not wanted[rank]]
        if gone:
            raise known_to_all(PeerFailed(f"nobody waits for the call on rank {', '.join(gone)} any more"))
        for rank, note in enumerate(notes):
            if note[:2] > mine.order:
                raise known_to_all(PeerFailed(f"rank {rank} was not sent this call, and is at a later one"))
            if wanted[rank] and note[:2] == mine.order and note != mine.note:
                raise known_to_all(InvalidRequest(f"rank {rank} was sent another request by the same number"))

    async def _round(self, note: Sequence[float]) -> list[list[float]]:
        notes = await self._ranks.begin_round(note).arrive()
        return [each[: len(note)] for each in notes]


def _note(method: Method, request: Any) -> list[float]:
    call: common_pb2.Call = request.call
    checksum = zlib.crc32(method.path.encode())
    for field, value in request.ListFields():
        if field.name not in ROWS:
            is_message = isinstance(value, Message)
            encoded = value.SerializeToString(deterministic=True) if is_message else repr(value).encode()
            checksum = zlib.crc32(encoded, checksum)
    # float64 rounds nanoseconds to a fraction of a microsecond; sessions begin further apart than that.
    return [float(call.session_started_unix_ns), float(call.sequence), float(checksum)]
