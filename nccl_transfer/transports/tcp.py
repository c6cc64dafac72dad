"""Bytes over plain TCP connections, straight from one arena into the memory of the reader."""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from nccl_transfer.arena import ByteRange
from nccl_transfer.batch import Endpoint
from nccl_transfer.store import TensorStore
from nccl_transfer.transports.base import Reading, Transport, check_epoch, persist, remaining_s
from nccl_transfer.transports.sink import MAX_PIECES, Pieces, Sink
from rlhf.errors import (
    DeadlineExceeded,
    RlhfError,
    ServiceLost,
    TransferError,
    from_status,
    to_status,
)
from rlhf.v1 import transfer_pb2 as pb

CHUNK_BYTES = 4 << 20
"""Payload of a frame; measured: one message of 4 MiB with its header is as fast as one of any size."""

MAX_REQUEST_BYTES = 64 << 20
STALL_S = 30.0
"""A reader that takes nothing, or does not finish its request, for so long is hung up on."""

ACCEPT_PAUSE_S = 0.1

_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    # A reader whose host has gone is noticed within a minute.
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 20),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 60_000),
)

_MAGIC = b"rlhftcp1"
_KEY_BYTES = 16
# Magic, key, bytes of the FetchRequest that follows.
_REQUEST = struct.Struct(f"<{len(_MAGIC)}s{_KEY_BYTES}sI")
_FRAME = struct.Struct("<II")  # kind, bytes of payload
_DATA, _END, _ERROR = 1, 2, 3


class TcpTransport(Transport):
    """Streams ranges over a connection per peer, which is kept, and takes up broken streams where they broke."""

    name = "tcp"

    def __init__(self) -> None:
        self._idle: dict[Endpoint, list[socket.socket]] = {}
        self._busy: set[socket.socket] = set()
        self._lock = threading.Lock()

    def why_not(self, source: Endpoint, host_id: str) -> str | None:
        return None if source.data_port and source.address else "it has no data port"

    def read(self, source: Endpoint, ranges: Sequence[ByteRange], deadline: float) -> Reading:
        sink = Sink(ranges)
        persist(lambda: self._stream(source, sink, deadline))
        return Reading(sink.views)

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, {}
            for connection in self._busy:
                # Its reader, in another thread, hears that and closes it.
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        for connection in (each for some in idle.values() for each in some):
            connection.close()

    def _stream(self, source: Endpoint, sink: Sink, deadline: float) -> None:
        sink.roll_back()
        request = pb.FetchRequest(epoch=source.epoch, ranges=sink.missing()).SerializeToString()
        key = bytes.fromhex(source.data_key)
        with self._connected(source, deadline) as connection:
            try:
                connection.settimeout(remaining_s(deadline, source))
                connection.sendall(_REQUEST.pack(_MAGIC, key, len(request)) + request)
                _receive(connection, source, sink, deadline)
            except TimeoutError as error:
                raise DeadlineExceeded(f"{source}: not all bytes had come by the deadline") from error
            except OSError as error:
                raise ServiceLost(f"{source}: the connection broke: {error.strerror or error}") from error

    @contextlib.contextmanager
    def _connected(self, source: Endpoint, deadline: float) -> Iterator[socket.socket]:
        """A connection, kept for later unless the block fails."""
        connection = self._pooled(source) or _connect(source, deadline)
        with self._lock:
            self._busy.add(connection)
        try:
            yield connection
        except BaseException:
            with self._lock:
                self._busy.discard(connection)
            connection.close()
            raise
        with self._lock:
            self._busy.discard(connection)
            self._idle.setdefault(source, []).append(connection)

    def _pooled(self, source: Endpoint) -> socket.socket | None:
        """A connection that is still good; those of sources that have gone are let go of."""
        with self._lock:
            for known, connections in list(self._idle.items()):
                living = [each for each in connections if _is_alive(each) or each.close()]
                self._idle[known] = living
                if not living:
                    del self._idle[known]
            idle = self._idle.get(source)
            return idle.pop() if idle else None


def _is_alive(connection: socket.socket) -> bool:
    """An idle source sends nothing: readable means ended."""
    connection.setblocking(False)
    try:
        connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _connect(source: Endpoint, deadline: float) -> socket.socket:
    host = source.address.rpartition(":")[0].strip("[]")
    try:
        connection = socket.create_connection((host, source.data_port), remaining_s(deadline, source))
    except TimeoutError as error:
        raise DeadlineExceeded(f"{source}: no connection to its data port by the deadline") from error
    except OSError as error:
        raise ServiceLost(f"{source}: its data port cannot be reached: {error.strerror}") from error
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _receive(connection: socket.socket, source: Endpoint, sink: Sink, deadline: float) -> None:
    """Takes frames until the last.

    Raises:
        RlhfError: What the source said.
        TransferError: It sent more or less than was asked.
    """
    header = memoryview(bytearray(_FRAME.size))
    while True:
        _fill(connection, header, source, deadline)
        kind, nbytes = _FRAME.unpack(header)
        if kind in (_DATA, _END):
            sink.confirm()  # the source has looked again at the shards of the frame before
        if kind == _DATA:
            while nbytes:
                room = sink.room(nbytes)
                if not room:
                    raise TransferError(f"{source}: sent {nbytes} bytes more than asked")
                connection.settimeout(remaining_s(deadline, source))
                count = connection.recvmsg_into(room)[0]
                if count == 0:
                    raise ServiceLost(f"{source}: the connection ended")
                sink.advance(count)
                nbytes -= count
        elif kind == _ERROR and nbytes <= MAX_REQUEST_BYTES:
            text = memoryview(bytearray(nbytes))
            _fill(connection, text, source, deadline)
            raise from_status(status_pb2.Status.FromString(bytes(text)), str(source))
        elif kind == _END and not sink.missing():
            return
        elif kind == _END:
            raise TransferError(f"{source}: the stream ended before all bytes were sent")
        else:
            raise TransferError(f"{source}: sent a frame of kind {kind}, {nbytes} bytes long")


def _fill(connection: socket.socket, target: memoryview, source: Endpoint, deadline: float) -> None:
    filled = 0
    while filled < len(target):
        connection.settimeout(remaining_s(deadline, source))
        count = connection.recv_into(target[filled:])
        if count == 0:
            raise ServiceLost(f"{source}: the connection ended")
        filled += count


def cut_frames(
    store: TensorStore, request: pb.FetchRequest, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[Pieces]:
    """The requested ranges end to end, as views of the arena. A frame counts as sent once the next one is asked
    for: then its shards are checked again, so every byte of it was read while its shard was there.

    Raises:
        Refused: The request is of another epoch, or a shard was released, if need be in the middle.
        TransferError: A range reaches beyond its shard.
    """
    check_epoch(store, request.epoch)
    pieces: Pieces = []
    shards: set[int] = set()
    room = chunk_bytes
    for wanted in request.ranges:
        start, stop = wanted.start, wanted.start + wanted.nbytes
        while start < stop:
            count = min(stop - start, room)
            pieces.append(store.view(wanted.shard, start, count))
            shards.add(wanted.shard)
            start, room = start + count, room - count
            if room == 0 or len(pieces) == MAX_PIECES - 1:
                yield pieces
                store.check(shards)
                pieces, shards, room = [], set(), chunk_bytes
    if pieces:
        yield pieces
        store.check(shards)


class ByteServer:
    """Streams the shards of a store to readers that know its key; one thread per connection.

    Args:
        host: Address to listen on; the port is the kernel's choice.
        frames: Cuts the answer to a request into frames; see `cut_frames`.

    Attributes:
        port: For `Endpoint.data_port`.
        key: For `Endpoint.data_key`: whoever may ask the rank for its endpoint may read its rows, and nobody else.
    """

    def __init__(
        self,
        store: TensorStore,
        host: str,
        frames: Callable[[TensorStore, pb.FetchRequest], Iterator[Pieces]] = cut_frames,
    ) -> None:
        self._store = store
        self._frames = frames
        self._key = secrets.token_bytes(_KEY_BYTES)
        self.key = self._key.hex()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # [::] is all addresses, those of IPv4 too, as it is to gRPC.
        both = family == socket.AF_INET6
        self._listener = socket.create_server((host, 0), family=family, backlog=128, dualstack_ipv6=both)
        self.port: int = self._listener.getsockname()[1]
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._lock = threading.Lock()
        self._stop, stopped = socket.socketpair()
        self._thread = threading.Thread(target=self._accept, args=(stopped,), name="byte-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hangs up on all readers."""
        self._stop.close()
        self._thread.join()
        with self._lock:
            connections = dict(self._connections)
        for connection, thread in connections.items():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            thread.join()

    def _accept(self, stopped: socket.socket) -> None:
        with selectors.DefaultSelector() as selector, self._listener, stopped:
            for end in (self._listener, stopped):
                selector.register(end, selectors.EVENT_READ)
            while stopped not in {key.fileobj for key, _ in selector.select()}:
                try:
                    connection, _ = self._listener.accept()
                    for level, option, value in _OPTIONS:
                        connection.setsockopt(level, option, value)
                except OSError as error:
                    # Out of descriptors, say: readers wait, and this goes on when it can.
                    logging.warning("data port %d: %s", self.port, error)
                    time.sleep(ACCEPT_PAUSE_S)
                    continue
                thread = threading.Thread(
                    target=self._serve, args=(connection,), name="byte-stream", daemon=True
                )
                with self._lock:
                    self._connections[connection] = thread
                thread.start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            while (request := _read_request(connection, self._key)) is not None:
                connection.settimeout(STALL_S)
                self._answer(connection, request)
        except (OSError, ValueError, DecodeError):
            pass  # the reader has left or stalled, or is none of ours: it sees the end of the connection
        finally:
            with self._lock:
                del self._connections[connection]
            connection.close()

    def _answer(self, connection: socket.socket, request: pb.FetchRequest) -> None:
        try:
            for pieces in self._frames(self._store, request):
                _send(connection, _DATA, pieces)
        except RlhfError as error:
            _send(connection, _ERROR, [memoryview(to_status(error, {}).SerializeToString())])
        else:
            _send(connection, _END, [])


def _read_request(connection: socket.socket, key: bytes) -> pb.FetchRequest | None:
    """The next request; None where the reader has hung up. Between requests a reader may be silent for as long as its
    host lives, within one for STALL_S.

    Raises:
        ValueError, DecodeError: What came is no request of a reader that knows the key.
    """
    connection.settimeout(None)
    first = connection.recv(1)
    if not first:
        return None
    connection.settimeout(STALL_S)
    magic, given, nbytes = _REQUEST.unpack(first + _receive_exactly(connection, _REQUEST.size - 1))
    if magic != _MAGIC or not hmac.compare_digest(given, key) or nbytes > MAX_REQUEST_BYTES:
        raise ValueError("not a request of a reader of ours")
    return pb.FetchRequest.FromString(_receive_exactly(connection, nbytes))


def _receive_exactly(connection: socket.socket, nbytes: int) -> bytes:
    data = bytearray(nbytes)
    filled = 0
    while filled < nbytes:
        count = connection.recv_into(memoryview(data)[filled:])
        if count == 0:
            raise ValueError("a request was cut short")
        filled += count
    return bytes(data)


def _send(connection: socket.socket, kind: int, pieces: Pieces) -> None:
    """One frame."""
    nbytes = sum(map(len, pieces))
    rest: list[memoryview] = [memoryview(_FRAME.pack(kind, nbytes)), *pieces]
    while rest:
        sent = connection.sendmsg(rest)
        while rest and sent >= len(rest[0]):
            sent -= len(rest.pop(0))
        if rest and sent:
            rest[0] = rest[0][sent:]
