"""The tcp transport: bytes over TCP connections, from the source's arena into the reader's memory; over TLS where this
process has certificates (`rlhf.security`), and then to sources with TLS alone."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator, Sequence

from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from nccl_transfer.refs.ranges import ByteRange
from nccl_transfer.refs.shards import Endpoint
from nccl_transfer.store.store import TensorStore
from nccl_transfer.transports.base import Reader, Reading, Transport
from nccl_transfer.transports.common import remaining_s, with_retries
from nccl_transfer.transports.sink import Sink
from nccl_transfer.transports.tcp_source import TcpSource
from nccl_transfer.transports.tcp_wire import (
    ADVERT,
    DATA,
    END,
    ERROR,
    FRAME,
    MAGIC,
    MAX_REQUEST_BYTES,
    REQUEST,
    disconnect,
)
from rlhf.addresses import address_host
from rlhf.errors import DeadlineExceeded, Refused, RlhfError, ServiceLost, TransferError, from_status
from rlhf.security import current
from rlhf.v1 import transfer_pb2 as pb

CONNECT_S = 20.0
"""Maximum time, in seconds, for which a source may not answer a request to connect, before it counts as lost."""


class TcpReader(Reader):
    """Streams ranges over TCP connections that are kept between reads, and resumes broken streams where they
    broke."""

    name = "tcp"

    def __init__(self) -> None:
        self._idle: dict[Endpoint, list[socket.socket]] = {}
        self._busy: dict[object, Endpoint | None] = {}
        """Source of each connection of a read under way, or of each attempt to connect; None: it was forgotten."""
        self._lock = threading.Lock()

    def why_not(self, source: Endpoint, host_id: str) -> str | None:
        return None if self.name in source.adverts and source.address else "it has no data port"

    def check_advert(self, advert: bytes) -> None:
        if len(advert) != ADVERT.size:
            raise ValueError(f"{len(advert)} bytes, not the {ADVERT.size} of a port and a key")
        if not ADVERT.unpack(advert)[0]:
            raise ValueError("port must be above 0, given 0")

    def read(self, source: Endpoint, ranges: Sequence[ByteRange], deadline: float) -> Reading:
        sink = Sink(ranges)
        with_retries(lambda: self._stream(source, sink, deadline))
        return Reading(sink.views)

    def forget(self, source: Endpoint) -> None:
        with self._lock:
            idle = self._idle.pop(source, [])
            for connection in [each for each, known in self._busy.items() if known == source]:
                self._busy[connection] = None
                # The thread that reads from it sees its end and closes it; one that connects sees that it is unknown.
                if isinstance(connection, socket.socket):
                    disconnect(connection)
        for connection in idle:
            connection.close()

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, {}
            for connection in self._busy:
                # The thread that reads from it sees its end and closes it.
                if isinstance(connection, socket.socket):
                    disconnect(connection)
        for connection in (each for some in idle.values() for each in some):
            connection.close()

    def _stream(self, source: Endpoint, sink: Sink, deadline: float) -> None:
        sink.roll_back()
        request = pb.FetchRequest(epoch=source.epoch, ranges=sink.missing()).SerializeToString()
        port, key = _advert_of(source)
        with self._connected(source, port, deadline) as connection:
            try:
                connection.settimeout(remaining_s(deadline, source))
                connection.sendall(REQUEST.pack(MAGIC, key, len(request)) + request)
                _receive(connection, source, sink, deadline)
            except OSError as error:
                # The kernel's own timeout, which has a number, may come before the deadline.
                if isinstance(error, TimeoutError) and error.errno is None:
                    raise DeadlineExceeded(f"{source}: not all bytes arrived before the deadline") from error
                raise ServiceLost(f"{source}: the connection broke: {error.strerror or error}") from error

    @contextlib.contextmanager
    def _connected(self, source: Endpoint, port: int, deadline: float) -> Iterator[socket.socket]:
        """Context manager that yields a connection to `source`, idle or new. The connection is kept for later reads
        unless the block raises or the source is forgotten, which closes it. Raises Refused where the connection broke
        since the source was forgotten."""
        with self._lock:
            connection = self._pooled(source)
            key: object = connection or object()
            self._busy[key] = source
        try:
            if connection is None:
                connection = _connect(source, port, deadline)
                with self._lock:
                    known = self._busy[connection] = self._busy.pop(key)
                    key = connection
                if known is None:  # becomes Refused below
                    raise ServiceLost(f"{source}: the connection was not needed any longer")
                _shake_hands(connection, source, deadline)
            yield connection
        except BaseException as error:
            with self._lock:
                is_known = self._busy.pop(key) is not None
            if connection is not None:
                connection.close()
            if isinstance(error, ServiceLost) and not is_known:
                raise Refused(f"{source}: no session introduces this endpoint any longer") from error
            raise
        with self._lock:
            is_kept = self._busy.pop(connection) is not None
            if is_kept:
                self._idle.setdefault(source, []).append(connection)
        if not is_kept:
            connection.close()

    def _pooled(self, source: Endpoint) -> socket.socket | None:
        """Takes a live idle connection to `source`, or returns None. Closes all idle connections whose source has
        ended. The caller holds the lock."""
        for known, connections in list(self._idle.items()):
            living = [each for each in connections if _is_alive(each) or each.close()]
            self._idle[known] = living
            if not living:
                del self._idle[known]
        idle = self._idle.get(source)
        return idle.pop() if idle else None


def _is_alive(connection: socket.socket) -> bool:
    """Whether an idle connection is alive. Its source sends nothing, so a readable connection has ended."""
    connection.setblocking(False)
    try:
        connection.recv(1)
    except (BlockingIOError, ssl.SSLWantReadError):
        return True
    except OSError:
        return False
    return False


def _advert_of(source: Endpoint) -> tuple[int, bytes]:
    """Returns port and key of a source from its advert. Raises TransferError if it has no valid advert of this
    transport."""
    try:
        return ADVERT.unpack(source.adverts[TcpReader.name])
    except struct.error as error:
        raise TransferError(f"{source}: its advert of tcp cannot be read: {error}") from error


def _connect(source: Endpoint, port: int, deadline: float) -> socket.socket:
    """Connects to a source, without a TLS handshake yet."""
    host = address_host(source.address).strip("[]")
    certificates = current().certificates
    with _reaching(source, deadline):
        timeout_s = min(remaining_s(deadline, source), CONNECT_S)
        connection = socket.create_connection((host, port), timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection if certificates is None else certificates.connect_tls(connection, host)


def _shake_hands(connection: socket.socket, source: Endpoint, deadline: float) -> None:
    """Performs the handshake of a new connection where it has TLS."""
    if isinstance(connection, ssl.SSLSocket):
        with _reaching(source, deadline):
            connection.settimeout(remaining_s(deadline, source))
            connection.do_handshake()


@contextlib.contextmanager
def _reaching(source: Endpoint, deadline: float) -> Iterator[None]:
    """Context manager that turns errors of connecting to a source into DeadlineExceeded and ServiceLost."""
    try:
        yield
    except OSError as error:
        if isinstance(error, TimeoutError) and time.monotonic() >= deadline:
            raise DeadlineExceeded(f"{source}: no connection to its data port by the deadline") from error
        why = error.strerror or error
        raise ServiceLost(f"{source}: cannot be reached or died: its data port: {why}") from error


def _receive(connection: socket.socket, source: Endpoint, sink: Sink, deadline: float) -> None:
    """Receives the frames of an answer into the sink.

    Raises:
        RlhfError: The error that the source sent.
        TransferError: The source sent more or less than requested, or bytes that are no frame.
    """
    header = memoryview(bytearray(FRAME.size))
    while True:
        _fill(connection, header, source, deadline)
        kind, nbytes = FRAME.unpack(header)
        if kind in (DATA, END):
            sink.confirm()  # the source has checked the shards of the previous frame again
        if kind == DATA:
            while nbytes:
                room = sink.room(nbytes)
                if not room:
                    raise TransferError(f"{source}: sent {nbytes} bytes more than asked")
                connection.settimeout(remaining_s(deadline, source))
                is_tls = isinstance(connection, ssl.SSLSocket)
                count = connection.recv_into(room[0]) if is_tls else connection.recvmsg_into(room)[0]
                if count == 0:
                    raise ServiceLost(f"{source}: the connection ended")
                sink.advance(count)
                nbytes -= count
        elif kind == ERROR and nbytes <= MAX_REQUEST_BYTES:
            text = memoryview(bytearray(nbytes))
            _fill(connection, text, source, deadline)
            raise _sent_error(bytes(text), source)
        elif kind == END and not sink.missing():
            return
        elif kind == END:
            raise TransferError(f"{source}: the stream ended before all bytes were sent")
        else:
            raise TransferError(f"{source}: sent a frame of kind {kind}, {nbytes} bytes long")


def _sent_error(text: bytes, source: Endpoint) -> RlhfError:
    """Returns the error that a source sent, or TransferError where its bytes are none."""
    try:
        return from_status(status_pb2.Status.FromString(text), str(source))
    except DecodeError as error:
        return TransferError(f"{source}: sent an error that cannot be read: {error}")


def _fill(connection: socket.socket, target: memoryview, source: Endpoint, deadline: float) -> None:
    filled = 0
    while filled < len(target):
        connection.settimeout(remaining_s(deadline, source))
        count = connection.recv_into(target[filled:])
        if count == 0:
            raise ServiceLost(f"{source}: the connection ended")
        filled += count


class TcpTransport(Transport):
    """Streams of bytes over TCP; the advert is `tcp_wire.ADVERT`."""

    name = TcpReader.name
    is_secure = True

    def source(self, store: TensorStore, host: str) -> TcpSource:
        return TcpSource(store, host)

    def reader(self) -> TcpReader:
        return TcpReader()
