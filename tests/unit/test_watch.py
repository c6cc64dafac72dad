"""Statuses of the ranks: read while they change, and streamed again after their stream has ended."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from client.rank import RankClient
from client.session import Session
from controller.role_groups import watch
from controller.role_groups.call import RunningCall
from controller.role_groups.cluster import Cluster
from controller.role_groups.watch import StatusWatch
from rlhf.contract import SERVICES
from rlhf.v1 import worker_pb2

WATCH = SERVICES["worker"]["Watch"]
SOON_S = 10.0
PAUSE_S = 0.005

Answer = Callable[[grpc.aio.ServicerContext], Awaitable[None]]
"""Answers one stream of Watch."""


class WatchedRank:
    """A rank that has one status."""

    def __init__(self, service: str, rank: int, status: Any) -> None:
        self.service, self.rank, self._status = service, rank, status
        self.is_seen = threading.Event()

    async def stream(self, method: Any, request: Any) -> AsyncIterator[Any]:
        yield self._status
        self.is_seen.set()
        await asyncio.Event().wait()


class StatusReadWhileOthersArrive:
    """A status of 1 byte. While it is read, the loop gets the first statuses of two more ranks, one of its service and
    one of another, of 1 byte each."""

    device_memory_bytes = 0

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._reads = 0

    @property
    def memory_bytes(self) -> int:
        self._reads += 1
        newest = worker_pb2.WatchResponse(memory_bytes=1)
        begin(
            self._cluster, WatchedRank("actor", self._reads, newest), WatchedRank(f"{self._reads}", 0, newest)
        )
        return 1


def begin(cluster: Cluster, *ranks: WatchedRank) -> None:
    """Watches ranks, and returns once their statuses are there."""

    async def on_the_loop() -> None:
        cluster._watch.begin(cast(Any, ranks))

    cluster._loop.run(on_the_loop(), SOON_S)
    for rank in ranks:
        assert rank.is_seen.wait(SOON_S)


def test_memory_can_be_read_while_statuses_arrive_on_the_loop() -> None:
    cluster = Cluster(cast(Any, SimpleNamespace(device_memory_gb=None)), Session())
    try:
        begin(cluster, WatchedRank("actor", 0, StatusReadWhileOthersArrive(cluster)))
        assert cluster.memory() == {"actor": 1}
        assert cluster.memory() == {"actor": 2, "1": 1}
        assert cluster.memory() == {"actor": 3, "1": 1, "2": 1}
    finally:
        cluster.close()


def test_running_calls_of_several_steps_are_shown_with_their_steps() -> None:
    statuses = StatusWatch()
    statuses._statuses["actor"] = {
        0: worker_pb2.WatchResponse(method="UpdateActor", done=3, done_of=4),
    }
    actor, reward = (
        cast(Any, SimpleNamespace(ranks=SimpleNamespace(service=name), running={}))
        for name in ("actor", "reward")
    )
    actor.running = {"a": RunningCall("UpdateActor", 2)}
    groups = {"actor": actor, "reward": reward}
    assert statuses.running(groups) == {"actor.UpdateActor": "3/4"}
    reward.running = {"b": RunningCall("ComputeReward", 3)}
    assert statuses.running(groups) == {
        "actor.UpdateActor of step 2": "3/4",
        "reward.ComputeReward of step 3": "",
    }


def test_gauges_are_added_up_over_the_ranks_of_a_service() -> None:
    def gauging(**gauges: float) -> worker_pb2.WatchResponse:
        return worker_pb2.WatchResponse(gauges=gauges)

    cluster = Cluster(cast(Any, SimpleNamespace(device_memory_gb=None)), Session())
    try:
        begin(
            cluster,
            WatchedRank("actor", 0, gauging(cpu_s=1.5, power_w=300.0)),
            WatchedRank("actor", 1, gauging(cpu_s=2.0)),
            WatchedRank("critic", 0, gauging(cpu_s=4.0)),
        )
        assert cluster.gauges() == {"actor/cpu_s": 3.5, "actor/power_w": 300.0, "critic/cpu_s": 4.0}
    finally:
        cluster.close()


@contextlib.asynccontextmanager
async def serving(answer: Answer, port: int = 0) -> AsyncIterator[int]:
    """Port of a server whose Watch answers so."""
    server = grpc.aio.server()

    async def handler(_: Any, context: Any) -> None:
        await answer(context)

    method = grpc.unary_stream_rpc_method_handler(
        handler, worker_pb2.WatchRequest.FromString, worker_pb2.WatchResponse.SerializeToString
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(WATCH.service, {WATCH.name: method}),)
    )
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


@contextlib.asynccontextmanager
async def watching(port: int) -> AsyncIterator[StatusWatch]:
    """A watch of rank 0 of the actor."""
    client, watched = RankClient("actor", 0, f"127.0.0.1:{port}"), StatusWatch()
    watched.begin([client])
    try:
        yield watched
    finally:
        watched.end()
        await client.close()


async def until_memory_is(watched: StatusWatch, expected: dict[str, int]) -> None:
    for _ in range(int(SOON_S / PAUSE_S)):
        if watched.memory() == expected:
            return
        await asyncio.sleep(PAUSE_S)
    raise AssertionError(f"memory is {watched.memory()} and not {expected}")


def status(memory_bytes: int) -> worker_pb2.WatchResponse:
    return worker_pb2.WatchResponse(memory_bytes=memory_bytes)


async def abort(context: Any) -> None:
    await context.abort(grpc.StatusCode.UNAVAILABLE, "broken")


async def end(context: Any) -> None:
    """Ends the stream without an error."""


@pytest.mark.parametrize(("ending", "meanwhile"), [(abort, {"actor": 0}), (end, {"actor": 1})])
def test_a_watch_whose_stream_ends_is_opened_again(
    ending: Answer, meanwhile: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "REOPEN_S", 0.01)

    async def main() -> None:
        opened, ends, goes_on = 0, asyncio.Event(), asyncio.Event()

        async def answer(context: Any) -> None:
            nonlocal opened
            opened += 1
            if opened == 1:
                await context.write(status(1))
                await ends.wait()
                return await ending(context)
            await goes_on.wait()
            await context.write(status(2))
            await asyncio.Event().wait()

        async with serving(answer) as port, watching(port) as watched:
            await until_memory_is(watched, {"actor": 1})
            ends.set()
            await until_memory_is(watched, meanwhile)
            goes_on.set()
            await until_memory_is(watched, {"actor": 2})

    asyncio.run(asyncio.wait_for(main(), 3 * SOON_S))


def test_a_rank_that_was_away_is_watched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "REOPEN_S", 0.01)

    def answering(memory_bytes: int) -> Answer:
        async def answer(context: Any) -> None:
            await context.write(status(memory_bytes))
            await asyncio.Event().wait()

        return answer

    async def main() -> None:
        async with contextlib.AsyncExitStack() as first:
            port = await first.enter_async_context(serving(answering(1)))
            async with watching(port) as watched:
                await until_memory_is(watched, {"actor": 1})
                await first.aclose()
                await until_memory_is(watched, {"actor": 0})
                async with serving(answering(2), port):
                    await until_memory_is(watched, {"actor": 2})

    asyncio.run(asyncio.wait_for(main(), 3 * SOON_S))
