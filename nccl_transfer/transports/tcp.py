"""Bytes over plain TCP connections, straight from one arena into the memory of the reader."""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence

from google.rpc import status_pb2

from nccl_transfer.arena import ByteRange
from nccl_transfer.batch import Endpoint
from nccl_transfer.store import TensorStore
from nccl_transfer.transports.base import Reading, Transport, check_epoch, remaining_s
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

ATTEMPTS = 3
"""How often a broken stream is taken up, the first time included."""

CHUNK_BYTES = 4 << 20
"""Payload of a frame; measured: one message of 4 MiB with its header is as fast as one of any size."""

MAX_REQUEST_BYTES = 64 << 20
STALL_S = 30.0
"""A reader that takes nothing for so long is hung up on."""

_MAGIC = b"rlhftcp1"
_REQUEST = struct.Struct(f"<{len(_MAGIC)}sI")  # magic, bytes of the FetchRequest that follows
_FRAME = struct.Struct("<II")  # kind, bytes of payload
_DATA, _END, _ERROR = 1, 2, 3


class TcpTransport(Transport):
    """Streams ranges over a connection per peer, which is kept, and takes up broken streams where they broke."""

    name = "tcp"

    def __init__(self) -> None:
        self._idle: dict[Endpoint, list[socket.socket]] = {}
        self._lock = threading.Lock()

    def why_not(self, source: Endpoint, host_id: str) -> str | None:
        return None if source.data_port else "it has no data port"

    def read(self, source: Endpoint, ranges: Sequence[ByteRange], deadline: float) -> Reading:
        sink = Sink(ranges)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                self._stream(source, sink, deadline)
                break
            except ServiceLost:
                if attempt == ATTEMPTS:
                    raise
        return Reading(sink.views)

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, {}
        for connection in (each for some in idle.values() for each in some):
            connection.close()

    def _stream(self, source: Endpoint, sink: Sink, deadline: float) -> None:
        connection = self._connect(source, deadline)
        try:
            request = pb.FetchRequest(epoch=source.epoch, ranges=sink.missing()).SerializeToString()
            connection.settimeout(remaining_s(deadline, source))
            connection.sendall(_REQUEST.pack(_MAGIC, len(request)) + request)
            _receive(connection, source, sink, deadline)
        except TimeoutError as error:
            connection.close()
            raise DeadlineExceeded(f"{source}: not all bytes had come by the deadline") from error
        except OSError as error:
            connection.close()
            raise ServiceLost(f"{source}: the connection broke: {error.strerror or error}") from error
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self._idle.setdefault(source, []).append(connection)

    def _connect(self, source: Endpoint, deadline: float) -> socket.socket:
        with self._lock:
            idle = self._idle.get(source)
            if idle:
                return idle.pop()
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
    """Streams the shards of a store to whoever connects; one thread per connection.

    Args:
        host: Address to listen on; the port is the kernel's choice.
        frames: Cuts the answer to a request into frames; see `cut_frames`.

    Attributes:
        port: For `Endpoint.data_port`.
    """

    def __init__(
        self,
        store: TensorStore,
        host: str,
        frames: Callable[[TensorStore, pb.FetchRequest], Iterator[Pieces]] = cut_frames,
    ) -> None:
        self._store = store
        self._frames = frames
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=128)
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
                connection, _ = self._listener.accept()
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                thread = threading.Thread(
                    target=self._serve, args=(connection,), name="byte-stream", daemon=True
                )
                with self._lock:
                    self._connections[connection] = thread
                thread.start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            while (request := _read_request(connection)) is not None:
                connection.settimeout(STALL_S)
                self._answer(connection, request)
        except (OSError, ValueError):
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


def _read_request(connection: socket.socket) -> pb.FetchRequest | None:
    """The next request; None where the reader has hung up.

    Raises:
        ValueError: What came is no request.
    """
    connection.settimeout(None)
    header = connection.recv(_REQUEST.size, socket.MSG_WAITALL)
    if not header:
        return None
    connection.settimeout(STALL_S)
    if len(header) != _REQUEST.size:
        raise ValueError("a request was cut short")
    magic, nbytes = _REQUEST.unpack(header)
    if magic != _MAGIC or nbytes > MAX_REQUEST_BYTES:
        raise ValueError("not a request")
    text = bytearray(nbytes)
    filled = 0
    while filled < nbytes:
        count = connection.recv_into(memoryview(text)[filled:])
        if count == 0:
            return None
        filled += count
    return pb.FetchRequest.FromString(bytes(text))


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
