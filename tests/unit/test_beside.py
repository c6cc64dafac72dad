"""Calls of a rank that run concurrently with ordered calls."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from nccl_transfer.fetch import Fetcher
from nccl_transfer.store.store import TensorStore
from rlhf.contract import group_methods
from rlhf.errors import CallCancelled, InvalidRequest, Refused, ServiceLost, ShuttingDown, TooManyCalls
from rlhf.v1 import common_pb2
from services.runtime.execution import MAX_BESIDE, CallQueue
from services.runtime.ranks import Ranks
from services.runtime.worker import CallContext, CallResult, CallRows, Worker, register
from settings.rollout import RolloutServiceTable

WAIT_S = 20.0
METHODS = group_methods("rollout")


class Receiver(Worker):
    """Its ordered call ends when one beside has begun, and that one when it is told to."""

    role = "rollout"
    beside = frozenset({"describe_weights"})

    def __init__(self) -> None:
        table = RolloutServiceTable(role="rollout", address="127.0.0.1:1", model=Path())
        super().__init__(table, Ranks(0, 1, 1))
        self.begun, self.told = threading.Event(), threading.Event()

    @register("ONE_TO_ALL", collective=False)
    def describe_weights(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        self.begun.set()
        while not self.told.wait(0.01):
            call.check()
        return CallResult()

    @register("ONE_TO_ALL")
    def save_checkpoint(self, rows: CallRows, request: Any, call: CallContext) -> CallResult:
        assert self.begun.wait(WAIT_S)
        return CallResult()


class Rank:
    """A queue and its worker."""

    def __init__(self, store: TensorStore) -> None:
        self.worker = Receiver()
        self.queue = CallQueue(self.worker, store, Fetcher("", []))
        self.count = 0

    def start(self, name: str, *, session: str = "run", sequence: int = 0) -> tuple[str, asyncio.Future[Any]]:
        """Starts a call; returns its id and the future of its response."""
        self.count += 1
        header = common_pb2.Call(call_id=f"call {self.count}", session=session, sequence=sequence)
        registration = cast(Any, getattr(Receiver, name)).registration
        request = cast(Any, METHODS[name].request)(call=header)
        return header.call_id, self.queue.start(METHODS[name], registration, request, WAIT_S)


@pytest.fixture
def store() -> Iterator[TensorStore]:
    made = TensorStore(1 << 16)
    yield made
    made.close()


def run(store: TensorStore, test: Any) -> None:
    async def main() -> None:
        rank = Rank(store)
        try:
            await asyncio.wait_for(test(rank), WAIT_S)
        finally:
            rank.worker.told.set()
            if not rank.queue.phase.is_draining:
                await rank.queue.drain()

    asyncio.run(main())


def test_a_call_without_a_number_runs_while_an_ordered_one_does_and_delays_none(store: TensorStore) -> None:
    async def test(rank: Rank) -> None:
        _, ordered = rank.start("save_checkpoint", sequence=1)
        _, beside = rank.start("describe_weights")
        await ordered  # ends only when the other one has begun
        await rank.start("save_checkpoint", sequence=2)[1]
        assert not beside.done()
        rank.worker.told.set()
        assert (await beside).outcome.timing.compute_s >= 0

    run(store, test)


def test_a_call_with_a_number_has_its_turn_as_always(store: TensorStore) -> None:
    async def test(rank: Rank) -> None:
        _, first = rank.start("describe_weights", sequence=1)
        _, second = rank.start("save_checkpoint", sequence=2)
        await asyncio.to_thread(rank.worker.begun.wait, WAIT_S)
        assert rank.queue.phase.call is not None
        assert not second.done()
        rank.worker.told.set()
        await asyncio.gather(first, second)

    run(store, test)


def test_it_ends_when_it_is_cancelled_and_with_its_session(store: TensorStore) -> None:
    async def test(rank: Rank) -> None:
        rank.worker.begun.set()
        await rank.start("save_checkpoint", sequence=1)[1]
        calls = [rank.start("describe_weights") for _ in range(2)]
        assert all(rank.queue.cancel(call_id) for call_id, _ in calls)
        for _, response in calls:
            with pytest.raises(CallCancelled):
                await response
        _, last = rank.start("describe_weights")
        rank.queue.sessions.end("run")
        with pytest.raises(CallCancelled):
            await last
        with pytest.raises(
            Refused, match="session 'run' is not open on this rank, so its calls cannot run concurrently"
        ):
            rank.start("describe_weights")

    run(store, test)


def test_a_rank_that_shuts_down_stops_it(store: TensorStore) -> None:
    async def test(rank: Rank) -> None:
        rank.worker.begun.set()
        await rank.start("save_checkpoint", sequence=1)[1]
        _, beside = rank.start("describe_weights")
        draining = asyncio.ensure_future(rank.queue.drain())
        with pytest.raises(ShuttingDown):
            await beside
        with pytest.raises(ServiceLost):
            rank.start("describe_weights")
        await draining

    run(store, test)


def test_few_wait_and_only_where_the_worker_allows_it(store: TensorStore) -> None:
    async def test(rank: Rank) -> None:
        rank.worker.begun.set()
        await rank.start("save_checkpoint", sequence=1)[1]
        calls = [rank.start("describe_weights")[1] for _ in range(MAX_BESIDE)]
        with pytest.raises(TooManyCalls, match=f"{MAX_BESIDE} calls without an order wait already"):
            rank.start("describe_weights")
        rank.worker.told.set()
        await asyncio.gather(*calls)
        rank.worker.ranks.size = 2
        await rank.start("describe_weights")[1]
        rank.worker.beside = frozenset()
        with pytest.raises(InvalidRequest, match=r"call\.sequence is missing"):
            rank.start("describe_weights")
        rank.worker.ranks.size = 1

    run(store, test)
