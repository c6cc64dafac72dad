"""Bytes cross to a host once: ranks of one host, over real sockets and memory, against what was planned."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import grpc
import grpc.aio
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nccl_transfer import wire
from nccl_transfer.arena import ByteRange
from nccl_transfer.batch import Batch, Endpoint, Shard, concat_columns
from nccl_transfer.columns import Jagged
from nccl_transfer.fetch import Fetcher, Rows
from nccl_transfer.mesh import Mesh
from nccl_transfer.plans import Relay, RowPlan, plan_rows
from nccl_transfer.protocols import get_protocol, protocol_names
from nccl_transfer.relay import Errand
from nccl_transfer.serving import add_transfer_service
from nccl_transfer.store import Lease, TensorStore
from nccl_transfer.transports import ArenaServer, ByteServer, create_transports, host_id, serve_fetch
from rlhf.contract import CHANNEL_OPTIONS
from rlhf.errors import DeadlineExceeded, Refused, ServiceLost
from rlhf.v1 import transfer_pb2 as pb

HERE = host_id()
ELSEWHERE = "another host"
LEASE = Lease("session", 1)


class Rank:
    """What a rank serves of the data plane; `host` is what it says of itself."""

    def __init__(self, number: int, host: str, loop: asyncio.AbstractEventLoop) -> None:
        self.number, self.host = number, host
        self.store = TensorStore(1 << 20)
        self.arena = ArenaServer(self.store)
        self.stream = ByteServer(self.store, "127.0.0.1")
        self.server, port = self.on(loop, self._start())
        self.endpoint = Endpoint(
            f"127.0.0.1:{port}", host, self.arena.name, 1, "test", number,
            data_port=self.stream.port, data_key=self.stream.key,
        )  # fmt: skip
        self.store.endpoint = self.endpoint
        self.fetcher = Fetcher(host, create_transports(), self.store)

    @staticmethod
    def on(loop, work):
        return asyncio.run_coroutine_threadsafe(work, loop).result(10)

    async def _start(self):
        server = grpc.aio.server(options=CHANNEL_OPTIONS)
        add_transfer_service(server, {"Fetch": self._fetch, "TakeRelayed": self._take})
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, port

    def _fetch(self, request, context):
        return serve_fetch(self.store, request)

    async def _take(self, request, context):
        return await self.fetcher.relays.take(request, context.time_remaining() - 0.2)

    def close(self, loop) -> None:
        self.on(loop, self.server.stop(None))
        self.fetcher.close()
        self.arena.close()
        self.stream.close()
        self.store.close()


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture(scope="module")
def ranks(loop) -> Iterator[list[Rank]]:
    """Two that hold the rows, elsewhere, and eight that need them, here."""
    ranks = [Rank(number, ELSEWHERE if number < 2 else HERE, loop) for number in range(10)]
    yield ranks
    for rank in ranks:
        rank.close(loop)


@pytest.fixture
def calls() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def store_rows(holders: Sequence[Rank], rows: int) -> tuple[Batch, np.ndarray, Jagged[np.ndarray]]:
    """A fixed and a jagged column over the holders, and their values."""
    rng = np.random.default_rng(rows)
    fixed = rng.standard_normal((rows, 2))
    lengths = rng.integers(0, 6, rows)
    jagged = Jagged(rng.integers(0, 99, lengths.sum()), lengths)
    pieces = []
    for holder, part in zip(holders, np.array_split(np.arange(rows), len(holders)), strict=True):
        offsets = jagged.offsets
        some = (
            Jagged(jagged.values[offsets[part[0]] : offsets[part[-1] + 1]], lengths[part])
            if len(part)
            else Jagged(jagged.values[:0], lengths[:0])
        )
        pieces.append(
            (
                holder.store.put_column(fixed[part], "float64", LEASE),
                holder.store.put_column(some, "int64", LEASE),
            )
        )
    fixed_column, jagged_column = (concat_columns(list(columns)) for columns in zip(*pieces, strict=True))
    return Batch(rows, {"fixed": fixed_column, "jagged": jagged_column}), fixed, jagged


def start_fetch(
    rank: Rank, part: Batch, plan: RowPlan, call_id: str, calls: ThreadPoolExecutor, timeout_s: float = 10
) -> Future[Rows]:
    """Fetches as a rank does that is sent its part of a call."""
    message = wire.to_proto(part, None, (*plan.kept, *plan.relayed))
    errand = Errand(call_id, LEASE, wire.relays_from_proto(message))
    batch = wire.from_proto(message)
    return calls.submit(rank.fetcher.fetch, batch, time.monotonic() + timeout_s, errand)


def received(rank: Rank) -> dict[str, int]:
    return {name: moved.bytes for name, moved in rank.fetcher.traffic().items()}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), name=st.sampled_from(protocol_names()))
def test_every_row_arrives_and_every_byte_crosses_once(data, name, ranks, calls):
    mesh = Mesh(
        *data.draw(st.sampled_from([(1, 2, 2), (2, 2, 1), (2, 2, 2), (1, 4, 1), (1, 1, 3), (1, 4, 2, 1, 2)]))
    )
    rows = (
        data.draw(st.integers(0, 12)) // mesh.size * mesh.size
        if name == "ALL_TO_ALL"
        else data.draw(st.integers(0, 12))
    )
    holders, needers = ranks[:2], ranks[2 : 2 + mesh.size]
    batch, fixed, jagged = store_rows(holders, rows)
    order = np.array(data.draw(st.permutations(range(rows))), np.int64)
    numbers = [order[part] for part in get_protocol(name).distribute(rows, mesh)]
    parts = [batch.take(each) for each in numbers]
    plans = plan_rows(parts, [rank.endpoint for rank in needers])
    before = [received(rank) for rank in needers]
    call_id = f"call {time.monotonic_ns()}"
    fetches = [
        start_fetch(rank, part, plan, call_id, calls)
        for rank, part, plan in zip(needers, parts, plans, strict=True)
    ]
    for fetch, each in zip(fetches, numbers, strict=True):
        values = fetch.result(20).values
        np.testing.assert_array_equal(values["fixed"], fixed[each])
        arrived = values["jagged"]
        assert isinstance(arrived, Jagged)
        for row, number in enumerate(each.tolist()):
            np.testing.assert_array_equal(arrived.row(row), jagged.row(number))
    moved = [
        {name: count - old.get(name, 0) for name, count in received(rank).items()}
        for rank, old in zip(needers, before, strict=True)
    ]
    used = sorted({row for each in numbers for row in each.tolist()})
    lower_bound = sum(16 + 8 * int(jagged.lengths[row]) for row in used)
    assert sum(plan.direct_bytes for plan in plans) == lower_bound
    assert sum(counts.get("tcp", 0) for counts in moved) == lower_bound
    assert [counts.get("relay", 0) for counts in moved] == [plan.relayed_bytes for plan in plans]
    for rank in ranks:
        rank.store.release("session")


def two_readers(ranks: list[Rank]) -> tuple[Batch, list[RowPlan]]:
    batch, _, _ = store_rows(ranks[:1], 4)
    return batch, plan_rows([batch, batch], [ranks[2].endpoint, ranks[3].endpoint])


def test_what_the_reader_could_not_read_its_neighbours_hear_of(ranks, calls):
    batch, plans = two_readers(ranks)
    ranks[0].store.release("session")
    with pytest.raises(Refused, match="was released"):
        start_fetch(ranks[2], batch, plans[0], "released", calls).result(10)
    with pytest.raises(Refused, match=r"test rank 2 .*test rank 0 .*was released"):
        start_fetch(ranks[3], batch, plans[1], "released", calls).result(10)


def test_a_reader_that_never_reads_is_named_at_the_deadline(ranks, calls):
    batch, plans = two_readers(ranks)
    with pytest.raises(DeadlineExceeded, match=r"test rank 2 .*did not read from"):
        start_fetch(ranks[3], batch, plans[1], "never", calls, timeout_s=1).result(10)
    ranks[0].store.release("session")


def test_a_reader_that_is_gone_is_named(ranks, calls):
    batch, plans = two_readers(ranks)
    gone = replace(plans[1].relayed[0].reader, address="127.0.0.1:9")
    relayed = tuple(replace(relay, reader=gone) for relay in plans[1].relayed)
    with pytest.raises(ServiceLost, match=r"127\.0\.0\.1:9"):
        start_fetch(ranks[3], batch, replace(plans[1], relayed=relayed), "gone", calls).result(10)
    ranks[0].store.release("session")


def test_a_relay_of_another_epoch_is_refused(ranks, calls):
    batch, plans = two_readers(ranks)
    older = replace(plans[1].relayed[0].reader, epoch=7)
    relayed = tuple(replace(relay, reader=older) for relay in plans[1].relayed)
    with pytest.raises(Refused, match="epoch is 1, the rows are of epoch 7"):
        start_fetch(ranks[3], batch, replace(plans[1], relayed=relayed), "older", calls).result(10)
    ranks[0].store.release("session")


def ask(rank: Rank, call_id: str, source: Endpoint, loop, timeout_s: float = 5) -> pb.TakeRelayedResponse:
    request = pb.TakeRelayedRequest(epoch=1, call_id=call_id, source=source.address)
    return Rank.on(loop, rank.fetcher.relays.take(request, timeout_s))


def relay_of(reader: Rank, number: int) -> tuple[Relay, memoryview]:
    """Eight bytes of one of many sources, and what they are."""
    source = Endpoint(f"10.0.0.{number}:7000", ELSEWHERE)
    relay = Relay(source, reader.endpoint, (ByteRange(Shard(source, 1, 0, 8), 0, 8),))
    return relay, memoryview(number.to_bytes(8, "little"))


def test_a_call_keeps_the_rows_of_a_hundred_ranks(ranks, loop):
    reader = ranks[2]
    made = [relay_of(reader, number) for number in range(100)]
    for relay, read in made:
        reader.fetcher.relays.keep(relay, lambda _, read=read: read, Errand("of a hundred", LEASE))
    for relay, read in made:
        answer = ask(reader, "of a hundred", relay.source, loop)
        assert reader.store.read_bytes(answer.shard, 0, answer.nbytes) == read
    reader.store.release("session")


def test_asks_that_nobody_answers_leave_nothing_behind(ranks, loop):
    reader = ranks[2]
    relay, read = relay_of(reader, 1)
    for number in range(200):
        with pytest.raises(DeadlineExceeded):
            ask(reader, f"unanswered {number}", relay.source, loop, timeout_s=0)
    for number in range(3):
        reader.fetcher.relays.keep(relay, lambda _: read, Errand(f"answered {number}", LEASE))
    for number in range(3):
        answer = ask(reader, f"answered {number}", relay.source, loop)
        assert reader.store.read_bytes(answer.shard, 0, answer.nbytes) == read
    reader.store.release("session")


def test_a_read_that_is_waited_for_is_not_forgotten_for_many_others(ranks, loop):
    reader = ranks[2]
    relay, read = relay_of(reader, 1)
    request = pb.TakeRelayedRequest(epoch=1, call_id="late", source=relay.source.address)
    waiting = asyncio.run_coroutine_threadsafe(reader.fetcher.relays.take(request, 10), loop)
    for number in range(200):
        reader.fetcher.relays.keep(relay, lambda _: read, Errand(f"early {number}", LEASE))
    assert not waiting.done()
    reader.fetcher.relays.keep(relay, lambda _: read, Errand("late", LEASE))
    answer = waiting.result(5)
    assert reader.store.read_bytes(answer.shard, 0, answer.nbytes) == read
    # Of calls that nobody waits for the oldest are forgotten, whole.
    with pytest.raises(DeadlineExceeded):
        ask(reader, "early 0", relay.source, loop, timeout_s=0)
    ask(reader, "early 199", relay.source, loop)
    reader.store.release("session")
