"""Rows scored side by side, for rewards that wait for processes or for a model behind HTTP."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from rlhf.v1 import reward_pb2
from services.runtime.worker import CallContext

LOOK_S = 0.05
"""Seconds between two checks of whether the call should stop."""


async def score_side_by_side(
    rows: Sequence[reward_pb2.TextRow],
    call: CallContext,
    slots: int,
    score: Callable[[int, reward_pb2.TextRow], Awaitable[reward_pb2.RowScore]],
) -> list[reward_pb2.RowScore]:
    """Scores rows, at most `slots` at a time, and returns the verdicts in row order.

    Args:
        score: Maps (slot, row) to the verdict. Each slot scores one row at a time. Cancelled when the call should stop.

    Raises:
        CallCancelled, DeadlineExceeded: As `call.check`, once all scoring has ended.
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
