"""Calls past their deadline, and calls whose callers have left."""

from __future__ import annotations

import asyncio
import time
from typing import Any, NoReturn, cast

import pytest

from rlhf.contract import group_methods
from rlhf.errors import CallCancelled, DeadlineExceeded, ServiceLost
from rlhf.v1 import common_pb2, worker_pb2
from services.runtime.execution import CallQueue
from services.runtime.ranks import Ranks
from services.runtime.worker import CallContext, CallResult, CallRows, Worker, register
from settings.reward import RewardTable

STUCK_S = 0.4
TIMEOUT_S = 0.2
TABLE = RewardTable(role="reward", address="127.0.0.1:1", stuck_timeout_s=STUCK_S)
NOTHING = cast(Any, None)


class Slow(Worker):
    """Saves for three times as long as a stuck call may, in pieces."""

    role = "reward"
    runs = 0

    def tell(self, call: CallContext) -> None:
        """Notes that a piece is done."""

    @register("ONE_TO_ALL")
    def save_checkpoint(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        self.runs += 1
        for _ in range(12):
            time.sleep(STUCK_S / 4)
            self.tell(call)
        return CallResult()


class Telling(Slow):
    """Its engine says that it gets on."""

    def tell(self, call: CallContext) -> None:
        self.progressed()


class Counting(Slow):
    """Its method says how far it is."""

    def tell(self, call: CallContext) -> None:
        call.progress(call.done + 1, 12)


class Stopping(Slow):
    """Stops when it is asked to."""

    def tell(self, call: CallContext) -> None:
        call.check()


def save(queue: CallQueue, call_id: str) -> asyncio.Future[Any]:
    request = worker_pb2.SaveCheckpointRequest(call=common_pb2.Call(call_id=call_id))
    registration = cast(Any, Slow.save_checkpoint).registration
    return queue.start(group_methods("reward")["save_checkpoint"], registration, request, TIMEOUT_S)


@pytest.mark.parametrize("kind", [Telling, Counting])
def test_a_call_that_gets_on_may_end_after_its_deadline_and_be_asked_for_its_outcome(
    kind: type[Slow],
) -> None:
    worker = kind(TABLE, Ranks(0, 1, 1))

    async def main() -> None:
        queue = CallQueue(worker, NOTHING, NOTHING)
        with pytest.raises(TimeoutError):
            # Its caller waits no longer than it said it would.
            await asyncio.wait_for(queue.wait("a", save(queue, "a")), TIMEOUT_S)
        response = await queue.wait("a", save(queue, "a"))
        assert await queue.wait("a", save(queue, "a")) is response
        await queue.drain()

    asyncio.run(main())
    assert worker.runs == 1


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Slow, r"is still running; signs of progress: none so far$"),
        (Telling, r"is still running; signs of progress: the last 0\.\d s ago$"),
        (Counting, r"is still running, \d+ of 12 done; signs of progress: the last 0\.\d s ago$"),
    ],
)
def test_who_asks_for_the_outcome_of_a_call_that_goes_on_is_told_whether_it_gets_on(
    kind: type[Slow], said: str
) -> None:
    async def main() -> None:
        queue = CallQueue(
            kind(TABLE.model_copy(update={"stuck_timeout_s": 30.0}), Ranks(0, 1, 1)), NOTHING, NOTHING
        )
        response = save(queue, "a")
        await asyncio.sleep(1.5 * TIMEOUT_S)
        with pytest.raises(DeadlineExceeded, match="SaveCheckpoint ran past its deadline and " + said):
            await queue.outcome("a", response, TIMEOUT_S)
        assert await queue.outcome("a", response, 30.0)
        await queue.drain()

    asyncio.run(main())


def test_a_call_that_makes_no_progress_after_its_deadline_makes_its_rank_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def leave(self: Worker, why: str) -> NoReturn:
        raise ServiceLost(why)

    monkeypatch.setattr(Worker, "leave", leave)

    async def main() -> None:
        queue, began = CallQueue(Slow(TABLE, Ranks(0, 1, 1)), NOTHING, NOTHING), time.monotonic()
        with pytest.raises(
            ServiceLost, match=rf"SaveCheckpoint \(a\) is stuck: .* no progress for {STUCK_S:g} s"
        ):
            await save(queue, "a")
        assert TIMEOUT_S + STUCK_S <= time.monotonic() - began < 3 * STUCK_S
        await queue.drain()

    asyncio.run(main())


def test_a_call_that_stops_at_its_deadline_says_that_it_was_late() -> None:
    async def main() -> None:
        queue = CallQueue(Stopping(TABLE, Ranks(0, 1, 1)), NOTHING, NOTHING)
        for _ in range(2):
            with pytest.raises(DeadlineExceeded, match="ran past its deadline"):
                await queue.wait("a", save(queue, "a"))
        await queue.drain()

    asyncio.run(main())


def test_a_call_is_stopped_when_the_last_of_its_callers_has_left() -> None:
    worker = Stopping(TABLE, Ranks(0, 1, 1))

    async def main() -> None:
        queue = CallQueue(worker, NOTHING, NOTHING)
        waiting = [asyncio.create_task(queue.wait("a", response)) for response in [save(queue, "a")] * 2]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.sleep(0)
        response = save(queue, "a")
        assert not queue._calls["a"].stopped.is_set()
        waiting[1].cancel()
        with pytest.raises(CallCancelled):
            await response
        await queue.drain()

    asyncio.run(main())


def test_a_call_that_a_session_s_stream_brought_is_not_stopped_when_it_breaks() -> None:
    """The session may come back on another one, until it ends."""

    async def main() -> None:
        queue = CallQueue(Telling(TABLE, Ranks(0, 1, 1)), NOTHING, NOTHING)
        waiting = asyncio.create_task(queue.wait("a", save(queue, "a"), hold=True))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.sleep(0)
        assert await queue.wait("a", save(queue, "a"))
        await queue.drain()

    asyncio.run(main())
