"""Scoring of rows in parallel, for rewards that wait for processes or for a model behind HTTP."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from rlhf.v1 import reward_pb2
from services.runtime.worker import CallContext

LOOK_S = 0.05
"""Seconds between two checks whether the call should stop."""


async def score_side_by_side(
    rows: Sequence[reward_pb2.TextRow],
    call: CallContext,
    slots: int,
    score: Callable[[int, reward_pb2.TextRow], Awaitable[reward_pb2.RowScore]],
) -> list[reward_pb2.RowScore]:
    """Scores rows in parallel and returns one RowScore per row, in row order.

    Args:
        rows: The rows.
        call: Context of the call, which is told the progress and checked for its end.
        slots: Maximum number of rows that are scored at the same time.
        score: Coroutine function that maps (slot number, row) to a RowScore. A slot scores one row at a time.
            Cancelled when the call should stop.

    Raises:
        CallCancelled, DeadlineExceeded: As raised by `call.check`, after all scoring has ended.
    """
    verdicts: dict[int, reward_pb2.RowScore] = {}
    waiting = deque(enumerate(rows))

    async def work(slot: int) -> None:
        while waiting:
            number, row = waiting.popleft()
            verdicts[number] = await score(slot, row)
            call.progress(len(verdicts), len(rows))

    tasks = [asyncio.ensure_future(work(slot)) for slot in range(min(slots, len(rows)))]
    try:
        while pending := [task for task in tasks if not task.done()]:
            call.check()
            await asyncio.wait(pending, timeout=LOOK_S)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.gather(*tasks)
    return [verdicts[number] for number in range(len(rows))]
