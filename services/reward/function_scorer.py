"""Scorers by Python functions that run in the service's own process, one after another or as coroutines."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.v1 import reward_pb2
from services.reward.functions import score_range
from services.reward.groups import in_row_order
from services.reward.loaded import LoadedFunction, Scored
from services.reward.scorers.base import Scorer, gave_up_metrics
from services.reward.scorers.extras import merged
from services.reward.scorers.side_by_side import score_side_by_side
from services.runtime.worker import CallContext

CANCEL_S = 0.25
"""Seconds that a cancelled coroutine has to end; less than the time before a call's deadline that is for its answer."""


class FunctionScorer(Scorer):
    """Scores rows by a function that runs in this process, one row, group or batch after another. Its exceptions become
    the rows' errors.

    Args:
        name: Name of the function, as taken by `find_function`.
        options: Keyword arguments of every call.

    Raises:
        ConfigError: As raised by `find_function`.
    """

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self.function = LoadedFunction.load(name, options)
        self.score_range = score_range(name)
        self.scores_groups = self.function.unit == "group"

    def kind(self) -> str:
        return f"function {self.function.name}"

    def score_texts(self, rows: Sequence[reward_pb2.TextRow], call: CallContext) -> list[reward_pb2.RowScore]:
        places = self.function.units_of(rows, whole_batch=not self.function.is_async)
        scored = self.score_units([[rows[index] for index in each] for each in places], call)
        causes = Counter(each.cause for each in scored)
        gave_up = gave_up_metrics(causes, len(rows)) if any(causes) else {}
        self.metrics = {**gave_up, **merged(each.metrics for each in scored)}
        return in_row_order(places, [each.scores for each in scored])

    def score_units(self, units: Sequence[Sequence[reward_pb2.TextRow]], call: CallContext) -> list[Scored]:
        """Scores units of rows, and returns one result per unit.

        Raises:
            CallCancelled, DeadlineExceeded: As raised by `call.check`.
        """
        scored = []
        for unit in units:
            call.check()
            scored.append(self.function.score(unit))
            call.progress(len(scored), len(units))
        return scored


class AsyncFunctionScorer(FunctionScorer):
    """Scores rows by an `async` function that runs in this process, several rows or groups at a time. All calls run on
    one event loop, so that the function may keep connections. A row that takes too long is cancelled and gets an
    error; where the call ends early, its rows are cancelled. A coroutine that has not ended `CANCEL_S` seconds after
    that is left running, and a warning is logged.

    Args:
        name: Name of the function, as taken by `find_function`.
        options: Keyword arguments of every call.
        concurrency: Maximum number of rows or groups that are scored at the same time.
        row_timeout_s: Maximum seconds for a row or group.

    Raises:
        ConfigError: As raised by `find_function`.
    """

    def __init__(self, name: str, options: Mapping[str, Any], concurrency: int, row_timeout_s: float) -> None:
        super().__init__(name, options)
        self._concurrency = concurrency
        self._row_timeout_s = row_timeout_s
        self._loop = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._left: set[asyncio.Task[Scored]] = set()

    def kind(self) -> str:
        return f"async function {self.function.name}"

    def close(self) -> None:
        """Cancels what the function has left running on the event loop, waits at most `CANCEL_S` seconds for its end,
        and closes the loop."""
        if self._loop.run(_cancel_others()):
            logging.warning("%s: coroutines do not end when they are cancelled", self.function.name)
            self._loop.get_loop().close()  # the runner would wait for them
        else:
            self._loop.close()

    def score_units(self, units: Sequence[Sequence[reward_pb2.TextRow]], call: CallContext) -> list[Scored]:
        return self._loop.run(score_side_by_side(units, call, self._concurrency, self._score))

    async def _score(self, slot: int, rows: Sequence[reward_pb2.TextRow]) -> Scored:
        task = asyncio.ensure_future(self.function.score_async(rows))
        try:
            done, _ = await asyncio.wait({task}, timeout=self._row_timeout_s)
        finally:
            await self._cancel(task)
        if not done:
            cause = f"{self.function.name} took longer than {self._row_timeout_s:g} s"
        elif task.cancelled():
            cause = f"{self.function.name} raised CancelledError"
        else:
            return task.result()
        return Scored([reward_pb2.RowScore(error=cause)] * len(rows))

    async def _cancel(self, task: asyncio.Task[Scored]) -> None:
        """Cancels a task if it has not ended; leaves it running if it has not ended after `CANCEL_S` seconds."""
        if task.done():
            return
        task.cancel()
        await asyncio.wait({task}, timeout=CANCEL_S)
        if not task.done():
            self._left.add(task)  # the event loop itself may forget a task
            task.add_done_callback(self._left.discard)
            logging.warning(
                "%s: a coroutine that was cancelled has not ended after %g s and is left running",
                self.function.name,
                CANCEL_S,
            )


async def _cancel_others() -> bool:
    """Cancels all other tasks of the event loop; returns whether some have not ended after `CANCEL_S` seconds."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    return bool(others and (await asyncio.wait(others, timeout=CANCEL_S))[1])
