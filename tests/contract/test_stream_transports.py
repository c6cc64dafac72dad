"""`tcp` and `grpc`: streams that break, stop or send wrong bytes, and readers that take none."""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from contract.transport_helpers import canned_server
from nccl_transfer.fetch import Fetcher
from nccl_transfer.refs.batch import Batch
from nccl_transfer.refs.remote_column import RemoteColumn
from nccl_transfer.refs.shards import ShardRun
from nccl_transfer.registry import create_readers
from nccl_transfer.testing.peer_process import EPOCH, MIB, PeerProcess
from nccl_transfer.testing.transports.rows import assert_same_bits, fetch, moved_to, random_array, wait_until
from nccl_transfer.transports import host_id
from nccl_transfer.transports.tcp_wire import ADVERT
from rlhf.errors import (
    DeadlineExceeded,
    Refused,
    ServiceLost,
    TransferError,
)
from rlhf.v1 import transfer_pb2

pytestmark = pytest.mark.timeout(60)


def test_a_peer_that_dies_in_the_middle_of_a_stream_is_lost(stream, mortal_peer):
    batch = mortal_peer.put(random_array("uint8", (1, 6 * MIB)))
    mortal_peer.ask("configure", pause_after=3)

    def kill_when_paused():
        assert mortal_peer.answer() == {"event": "paused"}
        mortal_peer.kill()

    killer = threading.Thread(target=kill_when_paused)
    killer.start()
    with pytest.raises(ServiceLost, match=re.escape(str(mortal_peer.endpoint))):
        fetch(stream, batch, within_s=10)
    killer.join()


def test_a_peer_that_hangs_in_the_middle_of_a_stream_ends_the_read_at_its_deadline(stream, mortal_peer):
    batch = mortal_peer.put(random_array("uint8", (1, 6 * MIB)))
    mortal_peer.ask("configure", pause_after=3)
    start = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=re.escape(str(mortal_peer.endpoint))):
        fetch(stream, batch, within_s=0.5)
    assert time.monotonic() - start < 1.5


def test_a_peer_that_hangs_is_waited_for_no_longer_once_it_is_forgotten(stream, mortal_peer):
    """It is not connected to again either."""
    batch = mortal_peer.put(random_array("uint8", (1, 6 * MIB)))
    mortal_peer.ask("configure", pause_after=3)

    def forget_when_paused():
        assert mortal_peer.answer() == {"event": "paused"}
        stream.forget(mortal_peer.endpoint)

    forgetting = threading.Thread(target=forget_when_paused)
    forgetting.start()
    start = time.monotonic()
    with pytest.raises(Refused, match="no session introduces this endpoint any longer"):
        fetch(stream, batch, within_s=40)
    assert time.monotonic() - start < 20
    forgetting.join()


def test_a_peer_that_hangs_is_waited_for_where_another_one_is_forgotten(stream, mortal_peer):
    """Such as the rank that was at its address before."""
    batch = mortal_peer.put(random_array("uint8", (1, 6 * MIB)))
    mortal_peer.ask("configure", pause_after=3)

    def forget_when_paused():
        assert mortal_peer.answer() == {"event": "paused"}
        stream.forget(replace(mortal_peer.endpoint, epoch=EPOCH + 1))

    forgetting = threading.Thread(target=forget_when_paused)
    forgetting.start()
    with pytest.raises(DeadlineExceeded):
        fetch(stream, batch, within_s=1)
    forgetting.join()


def test_a_reader_that_takes_nothing_neither_fills_its_source_nor_holds_up_others(peer):
    """The kernel buffers part of the rows; the rest stays in the arena until the reader takes bytes."""
    array = random_array("uint8", (1, 64 * MIB))
    batch = peer.put(array)
    before = anonymous_bytes(peer)
    fetcher = Fetcher(host_id(), create_readers(["tcp"]))
    with idle_reader(peer, batch) as connection:
        wait_until(lambda: queued_bytes(connection) > 0)
        for _ in range(
            2
        ):  # by then it would have been sent whatever it takes, if anything did not wait for it
            assert_same_bits(fetch(fetcher, batch)["x"], array)
        assert queued_bytes(connection) < 8 * MIB
        assert anonymous_bytes(peer) - before < 8 * MIB
        assert received_bytes(connection) == array.tobytes()
    fetcher.close()


@contextmanager
def idle_reader(peer: PeerProcess, batch: Batch) -> Iterator[socket.socket]:
    """A connection to the data port that has requested column "x"."""
    column = batch["x"]
    assert isinstance(column, RemoteColumn)
    assert isinstance(column.place, ShardRun)
    wanted = transfer_pb2.ByteRange(shard=column.place.shard.id, start=0, nbytes=column.place.nbytes)
    request = transfer_pb2.FetchRequest(epoch=EPOCH, ranges=[wanted]).SerializeToString()
    port, key = ADVERT.unpack(peer.endpoint.adverts["tcp"])
    with socket.create_connection(("127.0.0.1", port), 20) as connection:
        connection.sendall(struct.pack("<8s16sI", b"rlhftcp1", key, len(request)) + request)
        yield connection


def received_bytes(connection: socket.socket) -> bytes:
    """The data of all frames until the last."""
    received = []
    with connection.makefile("rb") as stream:
        while (header := struct.unpack("<II", stream.read(8)))[0] == 1:
            received.append(stream.read(header[1]))
    return b"".join(received)


def queued_bytes(connection: socket.socket) -> int:
    """Bytes in the kernel's buffers of a connection within this host."""
    here, there = connection.getsockname()[1], connection.getpeername()[1]
    queued = 0
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, _, queues, *_ = line.split()
        ports, (sending, receiving) = {local[-4:], remote[-4:]}, queues.split(":")
        if ports == {f"{here:04X}", f"{there:04X}"}:
            queued += int(receiving if local.endswith(f"{here:04X}") else sending, 16)
    return queued


def anonymous_bytes(peer: PeerProcess) -> int:
    """Private memory of the peer, without its arena."""
    status = Path(f"/proc/{peer.process.pid}/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) << 10


def test_rows_that_were_copied_stay_good_when_released(stream, peer):
    array = random_array("int32", (4,))
    got = fetch(stream, peer.put(array))
    peer.release()
    got.verify()
    assert_same_bits(got["x"], array)


def test_a_broken_stream_is_taken_up_where_it_broke(stream, peer):
    array = random_array("uint8", (1, 5 * MIB + 3))
    batch = peer.put_columns({"x": (array, "uint8", None), "y": (array[:, :9], "uint8", None)})
    peer.ask("configure", break_after=2)
    got = fetch(stream, batch)
    assert_same_bits(got["x"], array)
    assert_same_bits(got["y"], array[:, :9])
    unconfirmed = MIB if "tcp" in stream.traffic() else 0  # the last frame before the break is sent again
    assert peer.ask("served") == {"bytes": array.nbytes + 9 + unconfirmed}


def test_a_service_that_keeps_breaking_is_lost(stream, peer):
    batch = peer.put(random_array("uint8", (1, 100)))
    peer.ask("configure", break_after=0, always=True)
    try:
        with pytest.raises(ServiceLost, match=r"broken on purpose|the connection ended"):
            fetch(stream, batch)
    finally:
        peer.ask("configure")


def test_a_rank_that_is_back_at_its_address_is_reached_at_once(over_grpc, peer):
    """Back-off after failed connections does not delay the next one."""
    array = random_array("int32", (4,))
    with canned_server(array.tobytes()) as address:
        batch = moved_to(peer.put(array), address=address)
    for _ in range(3):
        with pytest.raises(ServiceLost):
            fetch(over_grpc, batch)
    with canned_server(array.tobytes(), address):
        assert_same_bits(fetch(over_grpc, batch, within_s=0.5)["x"], array)


@pytest.mark.parametrize(("sent", "text"), [(15, "ended before all bytes"), (17, "1 bytes more than asked")])
def test_a_peer_that_sends_too_little_or_too_much_is_an_error(over_grpc, peer, sent, text):
    with canned_server(bytes(sent)) as address, pytest.raises(TransferError, match=f"{address}: .*{text}"):
        fetch(over_grpc, moved_to(peer.put(random_array("int32", (4,))), address=address))


def frame(kind: int, payload: bytes) -> bytes:
    return struct.pack("<II", kind, len(payload)) + payload


def at_data_port(batch: Batch, port: int, key: bytes = bytes(range(16))) -> Batch:
    """The same rows, of a rank with this data port and key."""
    return moved_to(batch, adverts={"tcp": ADVERT.pack(port, key)})


@contextmanager
def canned_stream(data: bytes) -> Iterator[int]:
    """A server that answers the first request over plain tcp with these bytes; yields its port."""

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(data)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (frame(1, bytes(15)) + frame(2, b""), "ended before all bytes"),
        (frame(1, bytes(17)) + frame(2, b""), "1 bytes more than asked"),
        (frame(9, b""), "sent a frame of kind 9"),
    ],
)
def test_a_stream_that_is_not_as_it_should_be_is_an_error(peer, data, text):
    batch = peer.put(random_array("int32", (4,)))
    fetcher = Fetcher(host_id(), create_readers(["tcp"]))
    with canned_stream(data) as port, pytest.raises(TransferError, match=text):
        fetch(fetcher, at_data_port(batch, port))
    fetcher.close()


def test_a_stream_that_broke_before_its_last_frame_was_confirmed_sends_it_again(peer, mortal_peer):
    """Unconfirmed bytes may be those of another shard: the next frame, or the end, confirms them."""
    array = random_array("int32", (4,))
    batch = peer.put(array)
    fetcher = Fetcher(host_id(), create_readers(["tcp"]))
    peer.ask("release")
    with canned_stream(frame(1, bytes(16))) as port:
        moved = at_data_port(batch, port)
        with pytest.raises(DeadlineExceeded):  # asked again, this one is silent
            fetch(fetcher, moved, within_s=0.5)
    fetcher.close()


def test_a_reader_without_the_key_gets_nothing(peer):
    batch = peer.put(random_array("int32", (4,)))
    port, _ = ADVERT.unpack(peer.endpoint.adverts["tcp"])
    fetcher = Fetcher(host_id(), create_readers(["tcp"]))
    with pytest.raises(ServiceLost):
        fetch(fetcher, at_data_port(batch, port, key=bytes(16)))
    fetcher.close()


def test_whoever_sends_no_request_is_hung_up_on(peer):
    port, _ = ADVERT.unpack(peer.endpoint.adverts["tcp"])
    with socket.create_connection(("127.0.0.1", port), 5) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: a-rank-of-the-cluster\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""
