"""A rank that shuts down, and sessions that end."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlhf.contract import group_methods
from rlhf.errors import CallCancelled, Refused, ServiceLost
from rlhf.v1 import common_pb2, worker_pb2
from services.reward.worker import RewardWorker
from services.runtime import execution, sessions
from services.runtime.execution import CallQueue
from services.runtime.ranks import Ranks
from services.runtime.worker import CallContext, CallResult, CallRows, Worker, register
from settings.reward import JudgeTable, RewardTable

NOTHING = cast(Any, None)
TABLE = RewardTable(role="reward", address="127.0.0.1:1")


class Closing(Worker):
    """Notes the thread it is closed on."""

    role = "reward"
    closed_on = ""

    def close(self) -> None:
        self.closed_on = threading.current_thread().name


class Waiting(Worker):
    """Computes until it is asked to stop."""

    role = "reward"

    @register("ONE_TO_ALL")
    def save_checkpoint(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        while not call.stopping:
            time.sleep(0.01)
        call.check()
        return CallResult()


async def drain(worker: Worker) -> None:
    await CallQueue(worker, NOTHING, NOTHING).drain()


def test_a_worker_is_closed_on_its_compute_thread_when_the_server_has_drained() -> None:
    worker = Closing(TABLE, NOTHING)
    asyncio.run(drain(worker))
    assert worker.closed_on.startswith("compute")


def test_a_worker_that_does_not_close_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "GRACE_S", 0.1)
    released = threading.Event()

    class Stuck(Worker):
        role = "reward"

        def close(self) -> None:
            released.wait(30)

    async def timed() -> float:
        started = time.monotonic()
        await drain(Stuck(TABLE, NOTHING))
        return time.monotonic() - started

    async def main() -> None:
        assert await timed() < 10
        released.set()

    asyncio.run(main())


@pytest.mark.parametrize(
    "keys", [{"processes": 1}, {"kind": "judge", "judge": JudgeTable(url="http://127.0.0.1:9", model="m")}]
)
def test_a_reward_closes_its_scorer(keys: dict[str, Any]) -> None:
    if "judge" in keys:
        pytest.importorskip("httpx")
    worker = RewardWorker(TABLE.model_copy(update=keys), NOTHING)
    worker.close()
    scorer = cast(Any, worker.scorer)
    assert scorer._server.is_closed if "processes" in keys else scorer._loop.is_closed()


def test_a_sandbox_reward_closes_its_grader() -> None:
    table = TABLE.model_copy(update={"kind": "sandbox"})
    worker = RewardWorker(table, NOTHING)
    worker.close()
    assert cast(Any, worker.scorer)._grader._pool._shutdown


def test_a_session_ends_some_time_after_its_last_stream_has_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "ABSENCE_S", 0.05)

    async def main() -> None:
        ended: asyncio.Queue[str] = asyncio.Queue()
        store = cast(
            Any, SimpleNamespace(begin=lambda name: None, end=ended.put_nowait, release=lambda session: 0)
        )
        worker = Waiting(TABLE, cast(Any, Ranks(0, 1, 1)))
        queue = CallQueue(worker, store, NOTHING)
        method = group_methods("reward")["save_checkpoint"]
        registration = cast(Any, Waiting.save_checkpoint).registration
        call = common_pb2.Call(call_id="a", session="run", sequence=1)
        request = worker_pb2.SaveCheckpointRequest(call=call)
        running = queue.start(method, registration, request, timeout_s=30)
        queue.sessions.opened_stream("run")
        queue.sessions.opened_stream("run")
        queue.sessions.closed_stream("run")
        queue.sessions.closed_stream("run")
        queue.sessions.opened_stream("run")
        await asyncio.sleep(0.1)
        assert ended.empty(), "a stream is open"
        queue.sessions.closed_stream("run")
        assert await asyncio.wait_for(ended.get(), 5) == "run"
        with pytest.raises(Refused, match="session 'run' has ended"):
            await running
        late = worker_pb2.SaveCheckpointRequest(call=common_pb2.Call(call_id="b", session="run", sequence=2))
        with pytest.raises(Refused, match="session 'run' is not the current one"):
            queue.start(method, registration, late, timeout_s=30)
        await queue.drain()

    asyncio.run(main())


def test_a_drained_rank_lets_the_running_call_end_and_begins_no_other() -> None:
    async def main() -> None:
        queue = CallQueue(Waiting(TABLE, cast(Any, Ranks(0, 1, 1))), NOTHING, NOTHING)
        method = group_methods("reward")["save_checkpoint"]
        registration = cast(Any, Waiting.save_checkpoint).registration

        def start(call_id: str) -> asyncio.Future[Any]:
            request = worker_pb2.SaveCheckpointRequest(call=common_pb2.Call(call_id=call_id))
            return queue.start(method, registration, request, timeout_s=30)

        running, behind = start("running"), start("behind")
        await asyncio.sleep(0)
        draining = asyncio.create_task(queue.drain())
        with pytest.raises(ServiceLost, match="the service is shutting down"):
            await asyncio.wait_for(behind, 5)
        assert not running.done()
        with pytest.raises(ServiceLost):
            start("late")
        queue.cancel("running")
        with pytest.raises(CallCancelled):
            await running
        await draining

    asyncio.run(asyncio.wait_for(main(), 20))
