"""Bytes cross to a host once: ranks of one host, over real sockets and memory, against what was planned."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

import grpc
import grpc.aio
import numpy as np
import pytest
from drawn import PROTOCOLS, meshes
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from controller.role_groups.requests import cut
from nccl_transfer.fetch import Fetcher
from nccl_transfer.refs import wire
from nccl_transfer.refs.batch import Batch
from nccl_transfer.refs.columns import Jagged
from nccl_transfer.refs.mesh import Mesh
from nccl_transfer.refs.plans import Relay, plan_relays
from nccl_transfer.refs.protocols import TransferProtocol
from nccl_transfer.refs.ranges import ByteRange
from nccl_transfer.refs.shards import Endpoint, Shard
from nccl_transfer.registry import create_readers
from nccl_transfer.relay import RelayRequest
from nccl_transfer.rows import FetchedRows
from nccl_transfer.store.store import Lease, TensorStore
from nccl_transfer.testing.serving import add_handlers
from nccl_transfer.transports import host_id
from nccl_transfer.transports.grpc_stream import serve_fetch
from nccl_transfer.transports.memfd_source import MemfdSource
from nccl_transfer.transports.tcp_source import TcpSource, cut_frames
from rlhf.contract import SERVICES
from rlhf.errors import DeadlineExceeded, OutOfSpace, Refused, ServiceLost
from rlhf.v1 import transfer_pb2 as pb
from services.runtime.server import SERVER_OPTIONS

Row = tuple[tuple[float, float], tuple[int, ...]]
"""A row of the columns `fixed` and `jagged`, as tests count it out."""

HERE = host_id()
ELSEWHERE = "another host"
LEASE = Lease("session", 1)


class Rank:
    """The data plane of a rank; `host` is the host that it claims, `sent` the bytes of each frame that went out of
    its data port."""

    def __init__(self, number: int, host: str, loop: asyncio.AbstractEventLoop, arena_bytes: int) -> None:
        self.number, self.host = number, host
        self.store = TensorStore(arena_bytes)
        self.arena = MemfdSource(self.store)
        self.sent: list[int] = []
        self.stream = TcpSource(self.store, "127.0.0.1", self._frames)
        self.server, port = self.on(loop, self._start())
        self.endpoint = Endpoint(
            f"127.0.0.1:{port}", host, 1, "test", number,
            {"memfd": self.arena.advert(), "tcp": self.stream.advert()},
        )  # fmt: skip
        self.store.endpoint = self.endpoint
        self.fetcher = Fetcher(host, create_readers(), self.store)

    def _frames(self, store: TensorStore, request: pb.FetchRequest) -> Iterator[list[memoryview]]:
        for pieces in cut_frames(store, request):
            self.sent.append(sum(map(len, pieces)))
            yield pieces

    @staticmethod
    def on(loop, work):
        return asyncio.run_coroutine_threadsafe(work, loop).result(10)

    async def _start(self):
        server = grpc.aio.server(options=SERVER_OPTIONS)
        methods = SERVICES["transfer"]
        add_handlers(server, {methods["Fetch"].path: self._fetch, methods["TakeRelayed"].path: self._take})
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, port

    def _fetch(self, request, context):
        return serve_fetch(self.store, request)

    async def _take(self, request, context):
        return await self.fetcher.relays.take(request, context.time_remaining() - 0.2)

    def close(self, loop) -> None:
        self.on(loop, self.server.stop(None))
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


@contextmanager
def started(
    hosts: Sequence[str], loop: asyncio.AbstractEventLoop, first: int = 0, arena_bytes: int = 1 << 18
) -> Iterator[list[Rank]]:
    """A rank on each host named, numbered from `first` on."""
    ranks = [Rank(number, host, loop, arena_bytes) for number, host in enumerate(hosts, first)]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.fetcher.close()
        for rank in ranks:
            rank.close(loop)


@pytest.fixture(scope="module")
def ranks(loop) -> Iterator[list[Rank]]:
    """Two that hold rows, elsewhere, and two that need them, here."""
    with started([ELSEWHERE, ELSEWHERE, HERE, HERE], loop) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def pool(loop) -> Iterator[list[Rank]]:
    """For meshes of up to 16 ranks, on three hosts."""
    with started([f"host {number % 3}" for number in range(24)], loop) as ranks:
        yield ranks


@pytest.fixture
def large_pool(loop) -> Iterator[list[Rank]]:
    """For meshes of up to 64 ranks, on four hosts. Of one test: all of them connected with all others, in one process,
    are more descriptors than it may have."""
    with started([f"host {number % 4}" for number in range(96)], loop) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def calls() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


@pytest.fixture(scope="module")
def caller() -> Iterator[Fetcher]:
    """Who takes the results: a process that stores nothing."""
    fetcher = Fetcher("host 0", create_readers())
    yield fetcher
    fetcher.close()


def store_rows(holder: Rank, rows: Sequence[Row]) -> Batch:
    """The rows in shards of a rank."""
    fixed = np.array([numbers for numbers, _ in rows], np.float64).reshape(len(rows), 2)
    lengths = np.array([len(entries) for _, entries in rows], np.int64)
    jagged = Jagged(np.array([entry for _, entries in rows for entry in entries], np.int64), lengths)
    columns = {
        "fixed": holder.store.put_column(fixed, "float64", LEASE),
        "jagged": holder.store.put_column(jagged, "int64", LEASE),
    }
    return Batch(len(rows), columns)


def rows_of(fetched: FetchedRows) -> list[Row]:
    fixed, jagged = fetched["fixed"], fetched["jagged"]
    assert isinstance(fixed, np.ndarray)
    assert isinstance(jagged, Jagged)
    return [((fixed[row, 0], fixed[row, 1]), tuple(jagged.row(row).tolist())) for row in range(fetched.rows)]


def row_bytes(rows: Iterable[Row]) -> int:
    return sum(2 * 8 + 8 * len(entries) for _, entries in rows)


def start_fetch(
    rank: Rank,
    part: Batch,
    relays: Sequence[Relay],
    call_id: str,
    calls: ThreadPoolExecutor,
    timeout_s: float = 10,
) -> Future[FetchedRows]:
    """Fetches as a rank does that is sent its part of a call."""
    message = wire.to_proto(part, None, relays)
    relay_request = RelayRequest(call_id, LEASE, wire.relays_from_proto(message))
    batch = wire.from_proto(message)
    return calls.submit(rank.fetcher.fetch, batch, time.monotonic() + timeout_s, relay_request)


@contextmanager
def counted(fetchers: Sequence[Fetcher]) -> Iterator[list[Counter[str]]]:
    """Bytes each fetcher moves within the block, by transport; filled in at the end."""
    before = [fetcher.traffic() for fetcher in fetchers]
    moved = [Counter[str]() for _ in fetchers]
    yield moved
    for fetcher, old, counter in zip(fetchers, before, moved, strict=True):
        now = Counter({name: count.bytes for name, count in fetcher.traffic().items()})
        counter.update(now - Counter({name: count.bytes for name, count in old.items()}))


@dataclass(frozen=True)
class Call:
    """A call on `ranks` with the rows of `order`, of those that `held` says ranks have; no two of these are alike."""

    held: list[tuple[Rank, Row]]
    order: list[int]
    protocol: TransferProtocol
    mesh: Mesh
    ranks: list[Rank]

    @property
    def rows(self) -> list[Row]:
        return [self.held[number][1] for number in self.order]

    @property
    def given(self) -> list[list[int]]:
        """Places in `order` of the rows of each rank."""
        return [part.tolist() for part in self.protocol.distribute(len(self.order), self.mesh)]

    def wanted(self, rank: int, near: bool) -> set[Row]:
        """Rows that a rank needs of other ranks: of those on its host, or of those on others."""
        here = self.ranks[rank]
        needed = [self.held[self.order[place]] for place in self.given[rank]]
        return {row for holder, row in needed if holder is not here and (holder.host == here.host) is near}

    def stored(self) -> Batch:
        """The batch of the call, its rows put where they are held."""
        pieces = [
            store_rows(holder, [row for _, row in rows])
            for holder, rows in itertools.groupby(self.held, lambda item: item[0])
        ]
        return Batch.concat(pieces).take(np.array(self.order, np.int64))


@st.composite
def drawn_calls(draw: st.DrawFn, protocol: TransferProtocol, pool: list[Rank], most_ranks: int) -> Call:
    """Ranks on at least two hosts, and rows in shards of up to three ranks, shuffled and repeated."""
    mesh = draw(meshes().filter(lambda mesh: 2 <= mesh.size <= most_ranks))
    ranks = draw(st.permutations(pool))[: mesh.size]
    assume(len({rank.host for rank in ranks}) > 1)
    count = itertools.count(1)
    held: list[tuple[Rank, Row]] = []
    for holder in draw(st.lists(st.sampled_from(pool), min_size=1, max_size=3, unique_by=id)):
        for length in draw(st.lists(st.integers(0, 5), min_size=1, max_size=8)):
            held.append((holder, ((next(count), next(count)), tuple(itertools.islice(count, length)))))
    rows = draw(st.integers(0, 3 * mesh.size))
    order = draw(st.lists(st.integers(0, len(held) - 1), min_size=rows, max_size=rows)) if rows else []
    if protocol.name == "ALL_TO_ALL":
        order = order[: len(order) // mesh.size * mesh.size]
    return Call(held, order, protocol, mesh, ranks)


def check_a_call(call: Call, caller: Fetcher, calls: ThreadPoolExecutor) -> None:
    """Rows arrive, and an answer for every row comes back, as counted out by hand; so do the bytes."""
    protocol, mesh, ranks, batch = call.protocol, call.mesh, call.ranks, call.stored()
    parts = cut(batch, protocol, mesh)
    relays = [plan_relays(part.batch, [ranks[rank].endpoint for rank in part.ranks]) for part in parts]
    call_id = f"call {time.monotonic_ns()}"
    sources = {holder for holder, _ in call.held}
    for source in sources:
        source.sent.clear()
    with counted([rank.fetcher for rank in ranks]) as moved:
        fetches = {
            rank: start_fetch(ranks[rank], part.batch, planned, call_id, calls)
            for part, planned in zip(parts, relays, strict=True)
            for rank in part.ranks
        }
        arrived = [rows_of(fetches[rank].result(20)) for rank in range(len(ranks))]
    assert arrived == [[call.rows[row] for row in part] for part in call.given]

    lower_bounds = {}
    for host in {rank.host for rank in ranks}:
        here = [number for number, rank in enumerate(ranks) if rank.host == host]
        far = {number: call.wanted(number, near=False) for number in here}
        groups = [set(part.ranks) & far.keys() for part in parts]
        lower_bounds[host] = sum(row_bytes(far[min(group)]) for group in groups if group)
        assert sum(moved[number]["tcp"] for number in here) == lower_bounds[host]
        for number in here:
            assert moved[number].keys() <= {"tcp", "relay", "memfd"}
            assert moved[number]["tcp"] + moved[number]["relay"] == row_bytes(far[number])
            assert moved[number]["memfd"] == row_bytes(call.wanted(number, near=True))
    assert sum(sum(source.sent) for source in sources) == sum(lower_bounds.values())

    def answers(rows: Iterable[Row]) -> list[Row]:
        return [((-a, b), entries) for (a, b), entries in rows]

    outputs = [store_rows(ranks[rank], answers(arrived[rank])) for rank in protocol.collect(mesh)]
    result = Batch.concat(outputs)
    expected = answers(row for rank in protocol.collect(mesh) for row in arrived[rank])
    if protocol.splits:
        result, expected = protocol.restore(result, len(call.rows), mesh), answers(call.rows)
    with counted([caller]) as taken:
        assert rows_of(caller.fetch(result, time.monotonic() + 10)) == expected
    assert taken[0].total() == row_bytes(expected)


def check_calls(protocol: TransferProtocol, pool: list[Rank], caller, calls, examples: int) -> None:
    """On random meshes over a pool of ranks, of which a mesh takes two thirds at most."""

    @settings(
        max_examples=examples, suppress_health_check=[HealthCheck.too_slow]
    )  # to draw, on a busy machine
    @given(drawn_calls(protocol, pool, len(pool) * 2 // 3))
    def check(call: Call) -> None:
        for rank in pool:
            rank.store.release(LEASE.session)
        check_a_call(call, caller, calls)

    check()


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.name)
def test_every_row_arrives_and_every_byte_crosses_once(protocol, pool, caller, calls):
    check_calls(protocol, pool, caller, calls, 60)


@pytest.mark.full
@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.name)
def test_every_row_arrives_and_every_byte_crosses_once_on_up_to_64_ranks(protocol, large_pool, caller, calls):
    check_calls(protocol, large_pool, caller, calls, 300)


def two_readers(ranks: list[Rank]) -> tuple[Batch, list[Relay]]:
    batch = store_rows(ranks[0], [((row, -row), (row,) * row) for row in range(4)])
    return batch, plan_relays(batch, [ranks[2].endpoint, ranks[3].endpoint])


def test_what_the_reader_could_not_read_its_neighbours_hear_of(ranks, calls):
    batch, relays = two_readers(ranks)
    ranks[0].store.release("session")
    with pytest.raises(Refused, match="was released"):
        start_fetch(ranks[2], batch, relays, "released", calls).result(10)
    with pytest.raises(Refused, match=r"test rank 2 .*test rank 0 .*was released"):
        start_fetch(ranks[3], batch, relays, "released", calls).result(10)


def test_a_reader_that_never_reads_is_named_at_the_deadline(ranks, calls):
    batch, relays = two_readers(ranks)
    with pytest.raises(DeadlineExceeded, match=r"test rank 2 .*did not read from"):
        start_fetch(ranks[3], batch, relays, "never", calls, timeout_s=1).result(10)
    ranks[0].store.release("session")


def test_a_reader_that_is_gone_is_named(ranks, calls):
    batch, relays = two_readers(ranks)
    gone = [replace(relay, reader=replace(relay.reader, address="127.0.0.1:9")) for relay in relays]
    with pytest.raises(ServiceLost, match=r"127\.0\.0\.1:9"):
        start_fetch(ranks[3], batch, gone, "gone", calls).result(10)
    ranks[0].store.release("session")


def test_a_relay_of_another_epoch_is_refused(ranks, calls):
    batch, relays = two_readers(ranks)
    older = [replace(relay, reader=replace(relay.reader, epoch=7)) for relay in relays]
    with pytest.raises(Refused, match="epoch is 1, the rows are of epoch 7"):
        start_fetch(ranks[3], batch, older, "older", calls).result(10)
    ranks[0].store.release("session")


@pytest.fixture
def tiny_rank(loop) -> Iterator[Rank]:
    """One more here, of 64 KiB."""
    with started([HERE], loop, first=4, arena_bytes=64 << 10) as [rank]:
        yield rank


def test_a_reader_without_space_says_what_does_not_fit_and_its_neighbours_hear_at_once(
    ranks, tiny_rank, calls
):
    rows: list[Row] = [((row, row), tuple(range(1000))) for row in range(5)]
    batch = Batch.concat([store_rows(ranks[0], rows[:1]), store_rows(ranks[1], rows[1:])])
    tiny_rank.store.put(
        np.zeros(40 << 10, np.uint8), LEASE
    )  # beside it, rows of rank 0 fit, and of rank 1 do not
    together = [tiny_rank, *ranks[2:4]]
    # One reader of both ranks, also for the two that would share the reading with it.
    relays = [
        replace(relay, reader=tiny_rank.endpoint)
        for relay in plan_relays(batch, [r.endpoint for r in together])
    ]

    def start(number: int, call_id: str) -> Future[FetchedRows]:
        return start_fetch(together[number], batch, relays, call_id, calls, timeout_s=100)

    def assert_told(fetch: Future[FetchedRows]) -> None:
        does_not_fit = r"test rank 4 .*: 0\.0 MiB do not fit into the arena of 0\.1 MiB, .*: raise arena_mb"
        whose = r"they are of test rank 1 .*, kept for other ranks of this host"
        with pytest.raises(OutOfSpace, match=f"{does_not_fit}; {whose}$"):
            fetch.result(10)

    waiting = [start(1, "full"), start(2, "full")]
    for fetch in [start(0, "full"), *waiting]:
        assert_told(fetch)
    assert_told(start(1, "full"))  # and who asks later

    tiny_rank.store.release("session")
    assert [rows_of(start(number, "next").result(10)) for number in range(3)] == [rows] * 3
    ranks[0].store.release("session")
    ranks[1].store.release("session")


def ask(rank: Rank, call_id: str, source: Endpoint, loop, timeout_s: float = 5) -> pb.TakeRelayedResponse:
    request = pb.TakeRelayedRequest(epoch=1, call_id=call_id, source=source.address)
    return Rank.on(loop, rank.fetcher.relays.take(request, timeout_s))


def keep_of(reader: Rank, number: int, *call_ids: str) -> tuple[Endpoint, memoryview]:
    """Has a rank keep eight bytes of one of many sources in calls; where they are of, and what they are."""
    source = Endpoint(f"10.0.0.{number}:7000", ELSEWHERE)
    ranges, read = [ByteRange(Shard(source, 1, 0, 8), 0, 8)], memoryview(number.to_bytes(8, "little"))
    for call_id in call_ids:
        relay, relay_request = Relay(source, reader.endpoint), RelayRequest(call_id, LEASE)
        reader.fetcher.relays.keep(relay, ranges, [read], relay_request)
    return source, read


def test_a_call_keeps_the_rows_of_a_hundred_ranks(ranks, loop):
    reader = ranks[2]
    made = [keep_of(reader, number, "of a hundred") for number in range(100)]
    for source, read in made:
        answer = ask(reader, "of a hundred", source, loop)
        assert reader.store.read_bytes(answer.shard, 0, answer.nbytes) == read
    reader.store.release("session")


def test_asks_that_nobody_answers_leave_nothing_behind(ranks, loop):
    reader = ranks[2]
    source, read = keep_of(reader, 1, "answered")
    for number in range(200):
        with pytest.raises(DeadlineExceeded):
            ask(reader, f"unanswered {number}", source, loop, timeout_s=0)
    answer = ask(reader, "answered", source, loop)
    assert reader.store.read_bytes(answer.shard, 0, answer.nbytes) == read
    reader.store.release("session")


def test_a_read_that_is_waited_for_is_not_forgotten_for_many_others(ranks, loop):
    reader = ranks[2]
    source, read = keep_of(reader, 1)
    request = pb.TakeRelayedRequest(epoch=1, call_id="late", source=source.address)
    waiting = asyncio.run_coroutine_threadsafe(reader.fetcher.relays.take(request, 10), loop)
    Rank.on(loop, asyncio.sleep(0))  # once it is the loop's turn again, it waits
    keep_of(reader, 1, *(f"early {number}" for number in range(200)))
    assert not waiting.done()
    keep_of(reader, 1, "late")
    answer = waiting.result(5)
    assert reader.store.read_bytes(answer.shard, 0, answer.nbytes) == read
    # Of calls that nobody waits for the oldest are forgotten, whole.
    with pytest.raises(DeadlineExceeded):
        ask(reader, "early 0", source, loop, timeout_s=0.2)
    ask(reader, "early 199", source, loop)
    reader.store.release("session")
