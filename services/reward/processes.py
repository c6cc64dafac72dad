"""Reward functions in separate processes: one that hangs or crashes is killed, and the others go on.

A verifier reads a row's ground truth before it reads the response. If it hangs or crashes after that, the response is
the cause and scores 0, and the metrics count it by cause. If it fails earlier, if a function that is no verifier
hangs or crashes, or if the service's own processes fail, the row gets an error.

A function over groups runs once per group, and every row of the group gets the error. A function of batches, as TRL's
rewards are, gets one row at a time.
"""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from rlhf.v1 import reward_pb2
from services.reward.fork_server import Child, ForkServer, described
from services.reward.functions import score_range, truth_reader
from services.reward.groups import in_row_order
from services.reward.loaded import LoadedFunction, Scored
from services.reward.scorers.base import Scorer, gave_up_metrics
from services.reward.scorers.extras import merged
from services.reward.scorers.side_by_side import score_side_by_side
from services.runtime.worker import CallContext

LOOK_S = 0.2
"""Most seconds of a row's time that pass while this process stands still."""
T = TypeVar("T")

FROM_OUTSIDE = frozenset({-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP})
"""Return codes of processes that were ended from outside: by the kernel when memory ran out, by a user, or by the end
of the fork server."""


class ProcessScorer(Scorer):
    """Scores rows by a function that runs in separate processes, once per row or group. A row whose process hangs or
    ends gets an error or, if the function is a verifier and had read the ground truth, score 0.

    Args:
        name: Name of the function, as taken by `find_function`.
        options: Keyword arguments of every call.
        processes: Maximum number of processes, which are forked when rows need them.
        row_timeout_s: Maximum seconds for a row or group, after which its process is killed. Time in which this process
            stands still, as in a container that is paused, does not count.

    Raises:
        ConfigError: As raised by `find_function`.
    """

    def __init__(self, name: str, options: Mapping[str, Any], processes: int, row_timeout_s: float) -> None:
        self._function = LoadedFunction.load(name, options)
        self.score_range = score_range(name)
        self.scores_groups = self._function.unit == "group"
        self._name = name
        self._options = options
        self._row_timeout_s = row_timeout_s
        self._is_verifier = truth_reader(name) is not None
        self._children: list[Child | None] = [None] * processes
        self._loop = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._server = ForkServer(name, options)
        self._is_closed = False

    def kind(self) -> str:
        return f"function {self._name}, {len(self._children)} processes"

    def close(self) -> None:
        """Ends all processes. They also end when this process ends, for any reason."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.run(self._drop_all())
            self._server.close()
            self._loop.close()

    def score_texts(self, rows: Sequence[reward_pb2.TextRow], call: CallContext) -> list[reward_pb2.RowScore]:
        places = self._function.units_of(rows, whole_batch=False)
        units = [[rows[index] for index in each] for each in places]
        scored = self._loop.run(score_side_by_side(units, call, len(self._children), self._score))
        causes = Counter(each.cause for each in scored)
        gave_up = gave_up_metrics(causes, len(rows)) if self._is_verifier else {}
        self.metrics = {**gave_up, **merged(each.metrics for each in scored)}
        return in_row_order(places, [each.scores for each in scored])

    async def _score(self, slot: int, rows: Sequence[reward_pb2.TextRow]) -> Scored:
        try:
            child = await self._child(slot)
        except (EOFError, OSError) as error:
            event = (
                "did not start in time" if isinstance(error, TimeoutError) else "ended before it was ready"
            )
            return self._errors(f"{event}; the service's log has its last words", rows)
        try:
            return await _within(self._row_timeout_s, child.score(rows))
        except (EOFError, OSError) as error:
            ran_out = isinstance(error, TimeoutError)
            code = await self._drop(slot)
        except asyncio.CancelledError:
            await self._drop(slot)
            raise
        if child.has_read_truth and code not in FROM_OUTSIDE:
            cause = "timeout" if ran_out or code == -signal.SIGPROF else "crashed"
            return Scored([reward_pb2.RowScore(score=0.0)], cause)
        how = f" ({described(code)})" if code is not None else ""
        return self._errors(f"took longer than {self._row_timeout_s:g} s" if ran_out else f"ended{how}", rows)

    def _errors(self, event: str, rows: Sequence[reward_pb2.TextRow]) -> Scored:
        return Scored([reward_pb2.RowScore(error=f"{self._name}: its process {event}")] * len(rows))

    async def _child(self, slot: int) -> Child:
        """Returns the process of a slot; forks one if there is none, from a new fork server if the current one is
        closed. Raises as `ForkServer.fork` does."""
        child = self._children[slot]
        if child is not None and child.is_lost:
            await self._drop(slot)
            child = None
        if child is None:
            if self._server.is_closed:
                self._server = ForkServer(self._name, self._options)
            child = self._children[slot] = await self._server.fork()
        return child

    async def _drop_all(self) -> None:
        for slot in range(len(self._children)):
            await self._drop(slot)

    async def _drop(self, slot: int) -> int | None:
        """Ends the process of a slot, if any; the next row gets a new one. Returns the result of `Child.end`."""
        child, self._children[slot] = self._children[slot], None
        return await child.end() if child else None


async def _within(limit_s: float, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of a coroutine. Raises TimeoutError, after it has ended the coroutine, where that takes more
    than `limit_s` seconds, of which at most `LOOK_S` pass without a look for its end."""
    task, left = asyncio.ensure_future(work), limit_s
    try:
        while left > 0:
            step_s = min(left, LOOK_S)
            if (await asyncio.wait({task}, timeout=step_s))[0]:
                return task.result()
            left -= step_s
        raise TimeoutError
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
