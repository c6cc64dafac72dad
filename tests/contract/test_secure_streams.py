"""`tcp` and `grpc` over TLS: rows arrive as without it, and at nobody who has no certificate."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nccl_transfer.fetch import Fetcher
from nccl_transfer.refs.batch import Batch
from nccl_transfer.refs.columns import Jagged
from nccl_transfer.refs.remote_column import RemoteColumn
from nccl_transfer.refs.shards import Endpoint
from nccl_transfer.registry import create_readers
from nccl_transfer.store.store import Lease, TensorStore
from nccl_transfer.testing.transports.rows import assert_same_bits, random_array
from nccl_transfer.transports import tcp_source
from nccl_transfer.transports.tcp_source import TcpSource
from nccl_transfer.transports.tcp_wire import ADVERT, MAGIC, REQUEST
from rlhf.errors import Refused, ServiceLost
from rlhf.security import PLAINTEXT, Security, adopted
from rlhf.v1 import transfer_pb2 as pb
from settings.security import SecurityTable, load_security
from settings.strict import read_toml

MIB = 1 << 20
Values = np.ndarray | Jagged[np.ndarray]
EPOCH = 2


@pytest.fixture(scope="module")
def security(certificates: Path) -> Security:
    return load_security(certificates)


@contextlib.contextmanager
def source(security: Security) -> Iterator[tuple[TensorStore, TcpSource]]:
    """A store whose rows a data port with these credentials serves."""
    with contextlib.ExitStack() as opened:
        store = opened.enter_context(contextlib.closing(TensorStore(64 * MIB)))
        with adopted(security):
            server = opened.enter_context(contextlib.closing(TcpSource(store, "127.0.0.1")))
        store.endpoint = Endpoint(
            "127.0.0.1:1", epoch=EPOCH, service="actor", adverts={"tcp": server.advert()}
        )
        yield store, server


def key_of(server: TcpSource) -> bytes:
    return ADVERT.unpack(server.advert())[1]


def read(security: Security, *batches: Batch, within_s: float = 10.0) -> list[dict[str, object]]:
    """The rows of batches, that a process with these credentials reads over tcp."""
    with adopted(security), contextlib.closing(Fetcher("elsewhere", create_readers(["tcp"]))) as fetcher:
        rows = [fetcher.fetch(batch, time.monotonic() + within_s) for batch in batches]
        return [dict(each.values) for each in rows]


def put(store: TensorStore, **columns: Values) -> Batch:
    return store.put_batch(Batch.of(**columns), Lease("run", 1))


def test_rows_arrive_over_tls_as_they_are(security: Security) -> None:
    large = random_array("uint8", (3, 7 * MIB + 5))
    lengths = np.asarray([0, 3, 1, 0, *([7] * 1500)], np.int64)
    ragged = Jagged(np.arange(lengths.sum(), dtype=np.float32), lengths)
    with source(security) as (store, _):
        whole = put(store, large=large)
        many = put(store, ragged=ragged, number=np.arange(len(lengths)))
        picked = many.take(np.arange(0, len(lengths), 2))
        (first, second, third) = read(security, whole, many, picked)
    assert_same_bits(first["large"], large)
    assert isinstance(second["ragged"], Jagged)
    assert_same_bits(second["ragged"].values, ragged.values)
    assert_same_bits(second["number"], np.arange(len(lengths)))
    assert isinstance(third["ragged"], Jagged)
    assert third["ragged"].lengths.tolist() == lengths[::2].tolist()
    assert third["ragged"].row(1).tolist() == ragged.row(2).tolist()


def test_a_connection_with_tls_is_kept_and_used_again(
    security: Security, monkeypatch: pytest.MonkeyPatch
) -> None:
    accepted = []
    accept = tcp_source.TcpSource._accept
    monkeypatch.setattr(tcp_source.TcpSource, "_accept", lambda self: (accepted.append(1), accept(self))[1])
    with source(security) as (store, _):
        batch = put(store, x=np.arange(100))
        read(security, *([batch] * 5))
    assert len(accepted) == 1


@pytest.mark.parametrize("who", ["plaintext", "another authority", "another name"])
def test_a_reader_without_the_certificates_of_the_source_gets_nothing(
    security: Security, certificates: Path, other_certificates: Path, who: str
) -> None:
    named = SecurityTable.model_validate({**read_toml(certificates)["security"], "server_name": "elsewhere"})
    reader = {
        "plaintext": PLAINTEXT,
        "another authority": load_security(other_certificates),
        "another name": named.load(),
    }[who]
    with source(security) as (store, _), pytest.raises(ServiceLost):
        read(reader, put(store, x=np.arange(100)))


def test_a_reader_with_certificates_does_not_read_in_plaintext(security: Security) -> None:
    with source(PLAINTEXT) as (store, _), pytest.raises(ServiceLost):
        read(security, put(store, x=np.arange(100)))


def test_the_certificate_of_a_client_does_not_make_a_source(security: Security, certificates: Path) -> None:
    files = {"certificate": certificates.parent / "client.pem", "key": certificates.parent / "client.key"}
    pretender = SecurityTable.model_validate({**read_toml(certificates)["security"], **files}).load()
    with source(pretender) as (store, _), pytest.raises(ServiceLost, match="certificate"):
        read(security, put(store, x=np.arange(100)))


def test_the_key_alone_opens_nothing(security: Security, certificates: Path) -> None:
    with source(security) as (store, server):
        put(store, x=np.arange(100))
        header = struct.pack("<8s16sI", b"rlhftcp1", key_of(server), 0)
        with socket.create_connection(("127.0.0.1", server.port), 10) as plain:
            heard = answer(plain, header)
        # An alert of TLS at most.
        assert heard == b"" or (heard[0] == 21 and len(heard) == 7)
        context = ssl.create_default_context(cafile=str(certificates.parent / "ca.pem"))
        with (
            socket.create_connection(("127.0.0.1", server.port), 10) as connection,
            # TLS 1.3: the refusal reaches the client when it reads.
            context.wrap_socket(connection, server_hostname="127.0.0.1") as encrypted,
        ):
            assert answer(encrypted, header) == b""


def answer(connection: socket.socket, request: bytes) -> bytes:
    """Returns the bytes that the other side sends after a request; empty where it ends the connection."""
    try:
        connection.sendall(request)
        return connection.recv(4096)
    except OSError:
        return b""


def test_a_handshake_that_goes_no_further_is_waited_for_no_longer_than_the_stall_time(
    security: Security, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_source, "STALL_S", 0.3)
    with (
        source(security) as (_, server),
        socket.create_connection(("127.0.0.1", server.port), 10) as stranger,
    ):
        stranger.sendall(b"\x16\x03\x01\x01\x00\x01")
        begun = time.monotonic()
        assert stranger.recv(1) == b""
        assert time.monotonic() - begun < 5


def test_readers_without_a_handshake_do_not_hold_up_one_with(security: Security) -> None:
    with source(security) as (store, server), contextlib.ExitStack() as opened:
        for _ in range(40):
            stranger = opened.enter_context(socket.create_connection(("127.0.0.1", server.port), 10))
            stranger.sendall(b"\x16\x03\x01")
        (rows,) = read(security, put(store, x=np.arange(100)))
    assert_same_bits(rows["x"], np.arange(100))


def test_clients_that_connect_and_reset_do_not_hold_up_a_reader(
    security: Security, caplog: pytest.LogCaptureFixture
) -> None:
    with source(security) as (store, server):
        batch = put(store, x=np.arange(100))
        for _ in range(100):
            with socket.create_connection(("127.0.0.1", server.port), 10) as stranger:
                # The end of the connection is then a reset.
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        (rows,) = read(security, batch, within_s=4)
    assert_same_bits(rows["x"], np.arange(100))
    assert not caplog.records


def test_a_source_that_does_not_answer_a_handshake_is_waited_for_until_it_is_forgotten(
    security: Security,
) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        adopted(security),
        source(security) as (store, _),
        contextlib.closing(Fetcher("elsewhere", create_readers(["tcp"]))) as fetcher,
    ):
        assert store.endpoint
        advert = ADVERT.pack(silent.getsockname()[1], bytes(16))
        store.endpoint = endpoint = replace(store.endpoint, adverts={"tcp": advert})
        batch = put(store, x=np.zeros(4, np.uint8))

        def forget_when_connected() -> None:
            connection, _ = silent.accept()
            with connection:
                connection.recv(1)
                fetcher.forget(endpoint)

        forgetting = threading.Thread(target=forget_when_connected)
        forgetting.start()
        start = time.monotonic()
        with pytest.raises(Refused, match="no session introduces this endpoint any longer"):
            fetcher.fetch(batch, start + 40)
        assert time.monotonic() - start < 20
        forgetting.join()


def test_a_slow_reader_is_not_cut_off_while_it_receives(
    security: Security, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 MiB, a frame, take it 1.6 s."""
    monkeypatch.setattr(tcp_source, "STALL_S", 0.8)
    nbytes, at_once, pause_s = 12 * MIB, 128 << 10, 0.05
    assert security.certificates
    with source(security) as (store, server), socket.socket() as plain:
        column = put(store, x=np.zeros(nbytes, np.uint8)).columns["x"]
        assert isinstance(column, RemoteColumn)
        request = pb.FetchRequest(
            epoch=EPOCH, ranges=[pb.ByteRange(shard=column.shards[0].id, nbytes=nbytes)]
        )
        message = request.SerializeToString()
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        plain.settimeout(10)
        plain.connect(("127.0.0.1", server.port))
        received = 0
        with security.certificates.connect_tls(plain, "127.0.0.1") as reader:
            reader.do_handshake()
            reader.sendall(REQUEST.pack(MAGIC, key_of(server), len(message)) + message)
            while received < nbytes:
                wanted = received + at_once
                while received < wanted and (piece := reader.recv(wanted - received)):
                    received += len(piece)
                assert received == wanted, f"the source ended the connection after {received} bytes"
                time.sleep(pause_s)


def test_a_server_is_closed_whose_thread_has_left_already(security: Security) -> None:
    with source(security) as (_, server):
        server._stopping = True  # as by `close`, while the thread is awake for another reason
        with contextlib.suppress(BrokenPipeError):  # it was awake, and has left
            server._wake.send(b"x")
        server._thread.join(5)
