"""Methods that a rank answers at once."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from nccl_transfer.fetch import Fetcher
from nccl_transfer.store.store import TensorStore
from rlhf.guard import Guard
from rlhf.security import PLAINTEXT
from rlhf.v1 import worker_pb2
from services.runtime import worker_handlers
from services.runtime.boundary import RpcBoundary
from services.runtime.execution import CallQueue
from services.runtime.ranks import Ranks
from services.runtime.worker import Worker
from services.runtime.worker_handlers import WorkerHandlers
from settings.reward import RewardTable


class Reward(Worker):
    """Computes nothing."""

    role = "reward"


def test_the_cpu_is_looked_up_once_and_not_for_each_describe(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(worker_handlers, "cpu_name", lambda: asked.append("cpu") or "a CPU")

    async def main() -> None:
        worker = Reward(RewardTable(role="reward", address="127.0.0.1:1"), Ranks(0, 1, 1))
        store, stop = TensorStore(1 << 16), asyncio.Event()
        queue = CallQueue(worker, store, Fetcher("", []))
        boundary = RpcBoundary(worker, "reward", stop)
        guard = Guard(PLAINTEXT, {})
        made = WorkerHandlers("reward", worker, {}, queue, store, [], boundary, guard, stop, stop)
        handlers = made.handlers()
        for _ in range(3):
            answer = await handlers["Describe"](worker_pb2.DescribeRequest(), cast(Any, None))
            assert answer.cpu == "a CPU"
        await queue.drain()

    asyncio.run(main())
    assert asked == ["cpu"]
