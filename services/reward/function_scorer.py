"""Scorers by Python functions that run in the service's own process, one after another or as coroutines."""

from __future__ import annotations

import asyncio
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
    error; where the call ends early, its rows are cancelled.

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

    def kind(self) -> str:
        return f"async function {self.function.name}"

    def close(self) -> None:
        """Cancels what the function has left running on the event loop, and closes the loop."""
        self._loop.close()

    def score_units(self, units: Sequence[Sequence[reward_pb2.TextRow]], call: CallContext) -> list[Scored]:
        return self._loop.run(score_side_by_side(units, call, self._concurrency, self._score))

    async def _score(self, slot: int, rows: Sequence[reward_pb2.TextRow]) -> Scored:
        try:
            return await asyncio.wait_for(self.function.score_async(rows), self._row_timeout_s)
        except TimeoutError:
            cause = f"{self.function.name} took longer than {self._row_timeout_s:g} s"
            return Scored([reward_pb2.RowScore(error=cause)] * len(rows))
