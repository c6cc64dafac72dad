"""Scoring of rows in parallel, for rewards that wait for processes or for a model behind HTTP."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from services.runtime.worker import CallContext

T = TypeVar("T")
R = TypeVar("R")

LOOK_S = 0.05
"""Seconds between two checks whether the call should stop."""
STOP_S = 10.0
"""Seconds that cancelled scoring has to end, such as to end its processes."""


async def score_side_by_side(
    units: Sequence[T], call: CallContext, slots: int, score: Callable[[int, T], Awaitable[R]]
) -> list[R]:
    """Scores units, which are rows or groups of rows, in parallel and returns the result for each, in order.

    Args:
        units: The units.
        call: Context of the call, which is told the progress and checked for its end.
        slots: Maximum number of units that are scored at the same time.
        score: Coroutine function that maps (slot number, unit) to a result. A slot scores one unit at a time.
            Cancelled when the call should stop.

    Raises:
        CallCancelled, DeadlineExceeded: As raised by `call.check`, after all scoring has ended or, if it does not end
            when it is cancelled, after `STOP_S` seconds.
        Exception: The first one that `score` raised, after all scoring has ended.
    """
    results: dict[int, R] = {}
    waiting = deque(enumerate(units))

    async def work(slot: int) -> None:
        while waiting:
            number, unit = waiting.popleft()
            results[number] = await score(slot, unit)
            call.progress(len(results), len(units))

    tasks = [asyncio.ensure_future(work(slot)) for slot in range(min(slots, len(units)))]
    try:
        while pending := [task for task in tasks if not task.done()]:
            call.check()
            await asyncio.wait(pending, timeout=LOOK_S)
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            ended, _ = await asyncio.wait(tasks, timeout=STOP_S)
            await asyncio.gather(
                *ended, return_exceptions=True
            )  # so that none logs that nobody read its error
    await asyncio.gather(*tasks)
    return [results[number] for number in range(len(units))]
