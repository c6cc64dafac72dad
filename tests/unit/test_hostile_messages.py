"""A few hostile bytes are refused before they cost memory, a thread or the process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from nccl_transfer.refs import wire
from nccl_transfer.refs.ranges import ByteRange
from nccl_transfer.refs.shards import Endpoint, Shard
from nccl_transfer.store.arena import ArenaReader
from nccl_transfer.store.store import Lease, TensorStore
from nccl_transfer.transports import Reader, tcp_source
from nccl_transfer.transports.grpc_stream import GrpcReader, serve_fetch
from nccl_transfer.transports.sink import Sink
from nccl_transfer.transports.tcp import TcpReader
from nccl_transfer.transports.tcp_source import TcpSource
from nccl_transfer.transports.tcp_wire import ADVERT
from rlhf.errors import InvalidRequest, OutOfSpace, ServiceLost, TransferError
from rlhf.v1 import common_pb2 as pb
from rlhf.v1 import transfer_pb2

FLOAT32 = pb.ELEMENT_TYPE_FLOAT32
HUGE = 1 << 62


def batch(rows: int, *columns: pb.Column, row_numbers: tuple[pb.RowRange, ...] = ()) -> pb.Batch:
    endpoint, shard = pb.Endpoint(address="127.0.0.1:1"), pb.Shard(id=1, nbytes=8)
    return pb.Batch(rows=rows, columns=columns, row_numbers=row_numbers, endpoints=[endpoint], shards=[shard])


def remote(rows: int, first: int = 0, **fields: object) -> pb.Column:
    runs = pb.Runs(runs=[pb.Run(shard=0, rows=rows, first_element=first)])
    return pb.Column(name="x", dtype=FLOAT32, runs=runs, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (batch(HUGE), f"{HUGE} rows; at most"),
        (batch(HUGE, remote(HUGE)), "rows; at most"),
        (
            batch(1, pb.Column(name="x", dtype=FLOAT32, row_shape=[HUGE, HUGE], inline=b"")),
            "more than there can be",
        ),
        (
            batch(0, pb.Column(name="x", dtype=FLOAT32, row_shape=[HUGE], inline=b"")),
            "more than there can be",
        ),
        (
            batch(1, pb.Column(name="x", dtype=FLOAT32, row_shape=[HUGE, 0], inline=b"")),
            "more than there can be",
        ),
        (
            batch(1, pb.Column(name="x", dtype=FLOAT32, row_shape=[1] * 100, inline=b"....")),
            "more than there can be",
        ),
        (batch(2, remote(2, jagged=True, lengths=[HUGE, HUGE])), "lengths beyond"),
        (batch(1, remote(1, first=HUGE)), "a run begins at element"),
        (batch(1, pb.Column(name="x", text=pb.TextRows(rows=["a", "b"]))), "2 texts for 1 rows"),
        (batch(1, *[pb.Column(name="x", text=pb.TextRows(rows=["a"]))] * 2), "given twice"),
    ],
)
def test_a_batch_that_claims_more_than_it_brings_is_refused(message: pb.Batch, words: str):
    with pytest.raises(InvalidRequest, match=words):
        wire.from_proto(message)


@pytest.mark.parametrize(
    "numbers",
    [
        (0, HUGE),
        (0, 1 << 33),
        (HUGE, HUGE + 1),
        (5, 4),
        ((1 << 64) - 2, (1 << 64) - 1),
        (1 << 46, (1 << 46) + 1),
        (wire.MAX_ROWS, wire.MAX_ROWS + 1),  # mini-batches are dealt in blocks up to the largest row number
    ],
)
def test_row_numbers_are_counted_before_they_are_built(numbers: tuple[int, int]):
    start, stop = numbers
    message = batch(1, row_numbers=(pb.RowRange(start=start, stop=stop),))
    with pytest.raises(InvalidRequest, match="row number"):
        wire.row_numbers(message)


def test_the_largest_row_number_is_that_of_the_last_row_of_the_largest_batch():
    message = batch(1, row_numbers=(pb.RowRange(start=wire.MAX_ROWS - 1, stop=wire.MAX_ROWS),))
    assert wire.row_numbers(message).tolist() == [wire.MAX_ROWS - 1]


CLAIMS = [1 << 32, 1 << 46]
"""Bytes that a message says a shard has: more than a machine should lose to a message, and more than it has."""


@contextlib.contextmanager
def no_more_than(nbytes: int) -> Iterator[None]:
    """A block in which Python and numpy have no more than so much memory at a time."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < nbytes
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_size_that_only_the_message_knows_of_takes_no_memory_by_tcp(claim: int):
    store = TensorStore(1 << 16)
    store.endpoint = Endpoint("127.0.0.1:1", epoch=1)
    real = store.put(np.arange(8), Lease("run", 1))
    small = store.put(np.arange(8), Lease("run", 1))
    with contextlib.closing(store), contextlib.closing(TcpSource(store, "127.0.0.1")) as server:
        source = replace(store.endpoint, adverts={"tcp": server.advert()})
        claimed = replace(real, endpoint=source, nbytes=claim)
        # The first range is good: the source does not begin before it has looked at the second.
        ranges = [ByteRange(replace(small, endpoint=source), 0, 64), ByteRange(claimed, 0, claim)]
        with no_more_than(16 << 20), contextlib.closing(TcpReader()) as transport:
            with pytest.raises(TransferError, match="reach beyond shard"):
                transport.read(source, ranges, time.monotonic() + 10)
            read = transport.read(source, ranges[:1], time.monotonic() + 10)
            assert bytes(read.views[0]) == np.arange(8).tobytes()


@pytest.mark.parametrize("claim", CLAIMS)
@pytest.mark.parametrize("transport", [TcpReader, GrpcReader])
def test_a_source_that_cannot_be_reached_takes_no_memory(claim: int, transport: type[Reader]):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    source = Endpoint(f"127.0.0.1:{port}", adverts={"tcp": ADVERT.pack(port, bytes(16))})
    claimed = ByteRange(Shard(source, 1, 64, claim), 0, claim)
    with no_more_than(16 << 20), contextlib.closing(transport()) as reader, pytest.raises(ServiceLost):
        reader.read(source, [claimed], time.monotonic() + 10)


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_size_that_only_the_message_knows_of_takes_no_memory_by_grpc(claim: int):
    """The half of the source, which the reader waits for."""
    store = TensorStore(1 << 16)
    store.endpoint = Endpoint("127.0.0.1:1", epoch=1)
    shard = store.put(np.arange(8), Lease("run", 1))
    ranges = [transfer_pb2.ByteRange(shard=shard.id, nbytes=nbytes) for nbytes in (64, claim)]

    async def first() -> object:
        return await anext(serve_fetch(store, transfer_pb2.FetchRequest(ranges=ranges, chunk_bytes=64)))

    with pytest.raises(TransferError, match="reach beyond shard"):
        asyncio.run(first())
    store.close()


def test_rows_in_many_columns_of_two_runs_take_no_memory():
    message = pb.Batch(rows=1 << 24)
    message.endpoints.add(address="127.0.0.1:1")
    message.shards.add(id=1, nbytes=1 << 30)
    for number in range(100):
        column = message.columns.add(name=f"c{number}", dtype=pb.ELEMENT_TYPE_FLOAT32)
        for _ in range(2):
            column.runs.runs.add(rows=1 << 23)
    assert message.ByteSize() < 10_000
    with (
        no_more_than(1 << 20),
        pytest.raises(InvalidRequest, match="16777216 rows in 100 columns of several runs"),
    ):
        wire.from_proto(message)


def test_memory_that_there_is_not_is_an_error_that_says_so():
    source = Endpoint("127.0.0.1:1", service="actor")
    sink = Sink([ByteRange(Shard(source, 7, 64, 1 << 46), 0, 1 << 46)])
    with pytest.raises(
        OutOfSpace, match=r"actor rank 0 at 127\.0\.0\.1:1: no memory here for .* MiB of shard 7"
    ):
        sink.room(64)


def test_an_arena_that_its_owner_could_truncate_is_not_mapped():
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    with pytest.raises(TransferError, match="not sealed against shrinking"):
        ArenaReader.of_peer(fd, 4096, b"0" * 16)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_an_arena_smaller_than_said_is_not_mapped():
    store = TensorStore(1 << 16)
    fd = os.dup(store.reader.fd)
    with pytest.raises(TransferError, match="was said to have"):
        ArenaReader.of_peer(fd, 1 << 30, store.reader.nonce)
    store.close()


def test_a_file_in_place_of_an_arena_is_not_mapped(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 4096)
    with pytest.raises(TransferError, match="no memfd"):
        ArenaReader.of_peer(os.open(path, os.O_RDONLY), 4096, b"0" * 16)


@pytest.fixture
def server() -> Iterator[TcpSource]:
    store = TensorStore(1 << 16)
    with contextlib.closing(store), contextlib.closing(TcpSource(store, "127.0.0.1")) as server:
        yield server


def test_connections_without_the_key_cost_no_thread(server: TcpSource):
    threads = threading.active_count()
    with contextlib.ExitStack() as opened:
        connect = lambda: socket.create_connection(("127.0.0.1", server.port), timeout=10)  # noqa: E731
        strangers = [opened.enter_context(connect()) for _ in range(40)]
        for stranger in strangers[:20]:
            stranger.sendall(b"rlhf")
        wrong = opened.enter_context(connect())
        wrong.sendall(b"x" * 28)
        assert wrong.recv(1) == b""  # disconnected, and by then the others have been seen too
        assert threading.active_count() == threads


def test_the_oldest_connection_without_the_key_makes_room_for_a_new_one(
    server: TcpSource, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tcp_source, "MAX_STRANGERS", 4)
    with contextlib.ExitStack() as opened:
        strangers = [
            opened.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=10))
            for _ in range(5)
        ]
        assert strangers[0].recv(1) == b""
        strangers[1].setblocking(False)
        with pytest.raises(BlockingIOError):
            strangers[1].recv(1)


def test_half_a_header_is_waited_for_no_longer_than_the_stall_time(
    server: TcpSource, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tcp_source, "STALL_S", 0.2)
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as stranger:
        stranger.sendall(b"rlhf")
        begun = time.monotonic()
        assert stranger.recv(1) == b""
        assert time.monotonic() - begun < 5
