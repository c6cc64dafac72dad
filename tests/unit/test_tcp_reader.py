"""Connections of the tcp reader: what ends while one is made."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time

import numpy as np
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from nccl_transfer.refs.ranges import ByteRange
from nccl_transfer.refs.shards import Endpoint, Shard
from nccl_transfer.store.store import Lease, TensorStore
from nccl_transfer.transports import tcp
from nccl_transfer.transports.tcp import TcpReader
from nccl_transfer.transports.tcp_source import TcpSource
from nccl_transfer.transports.tcp_wire import ADVERT, ERROR, FRAME
from rlhf.errors import DOMAIN, DeadlineExceeded, Refused, ServiceLost, TransferError

NOWHERE = Endpoint("127.0.0.1:1", adverts={"tcp": ADVERT.pack(1, bytes(16))})
connect = socket.create_connection


def of(source: Endpoint) -> list[ByteRange]:
    return [ByteRange(Shard(source, 1, 64, 64), 0, 64)]


def test_a_source_that_is_forgotten_while_it_is_connected_to_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    store, connecting, forgotten = TensorStore(1 << 16), threading.Event(), threading.Event()

    def slow(*args: object) -> socket.socket:
        connecting.set()
        assert forgotten.wait(10)
        return connect(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(tcp.socket, "create_connection", slow)
    with contextlib.closing(store), contextlib.closing(TcpSource(store, "127.0.0.1")) as server:
        source = Endpoint("127.0.0.1:1", epoch=1, adverts={"tcp": server.advert()})
        store.endpoint = source
        shard = store.put(np.arange(8), Lease("run", 1))
        with contextlib.closing(TcpReader()) as reader:

            def forget() -> None:
                assert connecting.wait(10)
                reader.forget(source)
                forgotten.set()

            forgetting = threading.Thread(target=forget)
            forgetting.start()
            with pytest.raises(Refused, match="no session introduces this endpoint any longer"):
                reader.read(source, [ByteRange(shard, 0, 64)], time.monotonic() + 10)
            forgetting.join()
            assert not reader._idle
            assert not reader._busy
            assert bytes(
                reader.read(source, [ByteRange(shard, 0, 64)], time.monotonic() + 10).views[0]
            ) == bytes(np.arange(8))


@pytest.mark.parametrize("error", [TimeoutError(errno.ETIMEDOUT, "timed out"), TimeoutError("timed out")])
def test_a_source_that_does_not_answer_is_lost_before_the_deadline(
    monkeypatch: pytest.MonkeyPatch, error: TimeoutError
) -> None:
    def silent(address: object, timeout_s: float) -> socket.socket:
        assert timeout_s <= tcp.CONNECT_S
        raise error

    monkeypatch.setattr(tcp.socket, "create_connection", silent)
    with contextlib.closing(TcpReader()) as reader:
        # It counts as lost only when it was tried again for a while.
        with pytest.raises(ServiceLost, match="cannot be reached or died: its data port: timed out"):
            reader.read(NOWHERE, of(NOWHERE), time.monotonic() + 60)
        assert not reader._busy


def test_a_deadline_that_passes_while_a_source_is_connected_to_is_exceeded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def silent(address: object, timeout_s: float) -> socket.socket:
        time.sleep(timeout_s)
        raise TimeoutError("timed out")

    monkeypatch.setattr(tcp.socket, "create_connection", silent)
    with contextlib.closing(TcpReader()) as reader, pytest.raises(DeadlineExceeded):
        reader.read(NOWHERE, of(NOWHERE), time.monotonic() + 0.2)


def _broken_detail() -> bytes:
    """A status whose ErrorInfo cannot be parsed."""
    detail = any_pb2.Any(type_url=f"type.googleapis.com/{error_details_pb2.ErrorInfo.DESCRIPTOR.full_name}")
    detail.value = DOMAIN.encode()
    return status_pb2.Status(code=13, message="lost", details=[detail]).SerializeToString()


@pytest.mark.parametrize("sent", [b"\xff", _broken_detail()], ids=["no status", "a detail that is none"])
def test_an_error_of_a_source_that_cannot_be_read_is_an_error_of_the_transfer(sent: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(FRAME.pack(ERROR, len(sent)) + sent)
                connection.recv(1 << 16)

        answering = threading.Thread(target=answer)
        answering.start()
        source = Endpoint(f"127.0.0.1:{port}", adverts={"tcp": ADVERT.pack(port, bytes(16))})
        with (
            contextlib.closing(TcpReader()) as reader,
            pytest.raises(TransferError, match=r"127.0.0.1:\d+: sent an error that cannot be read"),
        ):
            reader.read(source, of(source), time.monotonic() + 10)
        answering.join()
