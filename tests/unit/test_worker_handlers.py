"""Methods that a rank answers at once."""

from __future__ import annotations

import asyncio
import errno
import os
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from nccl_transfer.fetch import Fetcher
from nccl_transfer.refs.shards import Endpoint
from nccl_transfer.store.store import Lease, TensorStore
from rlhf.errors import InvalidRequest, RlhfError
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


class SharedReward(Reward):
    is_frozen = True


def handlers_of(queue: CallQueue, worker: Worker, store: TensorStore) -> dict[str, Any]:
    stop = asyncio.Event()
    boundary, guard = RpcBoundary(worker, stop), Guard(PLAINTEXT, {})
    made = WorkerHandlers(worker, {}, queue, store, [], boundary, guard, stop, stop)
    return cast(dict[str, Any], made.handlers())


def test_only_a_session_with_a_name_is_ended() -> None:
    """Calls without a session belong to none, and rows of theirs can be stored for ever."""

    async def main() -> None:
        worker, store = (
            Reward(RewardTable(role="reward", address="127.0.0.1:1"), Ranks(0, 1, 1)),
            TensorStore(1 << 16),
        )
        queue = CallQueue(worker, store, Fetcher("", []))
        end = handlers_of(queue, worker, store)["EndSession"]
        with pytest.raises(InvalidRequest, match="session"):
            await end(worker_pb2.EndSessionRequest(), cast(Any, None))
        store.endpoint = Endpoint("127.0.0.1:1", epoch=1)
        store.put(np.zeros(8), Lease("", 0))
        await queue.drain()

    asyncio.run(main())


def test_the_cpu_is_looked_up_once_and_not_for_each_describe(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(worker_handlers, "cpu_name", lambda: asked.append("cpu") or "a CPU")

    async def main() -> None:
        worker = Reward(RewardTable(role="reward", address="127.0.0.1:1"), Ranks(0, 1, 1))
        store = TensorStore(1 << 16)
        queue = CallQueue(worker, store, Fetcher("", []))
        handlers = handlers_of(queue, worker, store)
        for _ in range(3):
            answer = await handlers["Describe"](worker_pb2.DescribeRequest(), cast(Any, None))
            assert answer.cpu == "a CPU"
        await queue.drain()

    asyncio.run(main())
    assert asked == ["cpu"]


def test_describe_answers_when_the_working_directory_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.chdir(scratch)

    async def main() -> None:
        worker = Reward(RewardTable(role="reward", address="127.0.0.1:1"), Ranks(0, 1, 1))
        store = TensorStore(1 << 16)
        queue = CallQueue(worker, store, Fetcher("", []))
        handlers = handlers_of(queue, worker, store)
        scratch.rmdir()
        answer = await handlers["Describe"](worker_pb2.DescribeRequest(), cast(Any, None))
        assert answer.working_directory == str(scratch)
        await queue.drain()

    asyncio.run(main())


@pytest.mark.parametrize(("kind", "told"), [(Reward, "run-1_7"), (SharedReward, "")])
def test_a_shared_rank_tells_nobody_which_run_it_computes_for(kind: type[Worker], told: str) -> None:
    """The id of a call begins with the name of its session, by which any holder of the call token could end it."""

    async def main() -> None:
        worker = kind(RewardTable(role="reward", address="127.0.0.1:1"), Ranks(0, 1, 1))
        (store := TensorStore(1 << 16)).endpoint = Endpoint("127.0.0.1:1", epoch=1)
        queue = CallQueue(worker, store, Fetcher("", []))
        call = SimpleNamespace(
            call_id="run-1_7",
            method=SimpleNamespace(name="ComputeReward"),
            context=SimpleNamespace(done=3, done_of=8),
        )
        queue.phase.set(worker_pb2.PHASE_COMPUTING, cast(Any, call))
        watch = handlers_of(queue, worker, store)["Watch"]
        status = await anext(watch(worker_pb2.WatchRequest(), cast(Any, None)))
        assert (status.method, status.done, status.done_of) == ("ComputeReward", 3, 8)
        assert status.call_id == told
        queue.phase.set(worker_pb2.PHASE_IDLE, None)
        await queue.drain()

    asyncio.run(main())


def test_a_checkpoint_that_does_not_fit_on_the_disk_says_so_and_names_no_file_that_is_not_known(
    tmp_path: Path,
) -> None:
    root = tmp_path.resolve()

    class Full(Reward):
        """Its disk is full: writes of an open file do not know its name."""

        def writing(self, directory: Path) -> Future[Any]:
            written: Future[Any] = Future()
            written.set_exception(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
            return written

    async def main() -> None:
        worker = Full(RewardTable(role="reward", address="127.0.0.1:1"), Ranks(0, 1, 1))
        worker.output_roots = (root,)
        store = TensorStore(1 << 16)
        queue = CallQueue(worker, store, Fetcher("", []))
        wait = handlers_of(queue, worker, store)["AwaitCheckpoint"]
        request = worker_pb2.AwaitCheckpointRequest(directory=str(tmp_path / "step-1"))
        with pytest.raises(RlhfError, match=r"No space left on device$"):
            await wait(request, cast(Any, None))
        await queue.drain()

    asyncio.run(main())
