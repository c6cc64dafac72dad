"""Transport `unix`: rows between processes of one host and user over a Unix socket (docs/transports.md). It copies what
`memfd` maps, so it is for reading, not for use.

A reader connects for each read, sends the size of a FetchRequest (4 bytes, little-endian) and the request, and receives
OK, the bytes of the ranges end to end, and OK again if their shards still exist; or, in place of an OK, FAILED and a
serialized google.rpc.Status.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from nccl_transfer.refs.ranges import ByteRange
from nccl_transfer.refs.shards import Endpoint
from nccl_transfer.store.store import TensorStore
from nccl_transfer.transports.base import Reader, Reading, Source, Transport
from nccl_transfer.transports.common import check_request, remaining_s
from rlhf.errors import (
    DeadlineExceeded,
    Refused,
    RlhfError,
    ServiceLost,
    TransferError,
    from_status,
    to_status,
)
from rlhf.v1 import transfer_pb2 as pb

NAME = re.compile(rb"rlhf-unix-[0-9a-f]{32}")
SIZE = struct.Struct("<I")
CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
OK, FAILED = b"+", b"-"
MAX_BYTES = 64 << 20
"""Largest request, and largest status, in bytes."""
STALL_S = 30.0
"""Seconds after which a source disconnects a reader that sends or takes nothing."""
MAX_READERS = 16
"""Number of readers that a source answers in parallel; further ones wait."""


class UnixSource(Source):
    """Sends the rows of a store to processes of the same user, from an abstract Unix socket with a random name.

    Args:
        store: Store that holds the shards.
    """

    def __init__(self, store: TensorStore) -> None:
        self._store = store
        self._name = f"rlhf-unix-{secrets.token_hex(16)}".encode()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(b"\0" + self._name)
        self._listener.listen()
        self._readers: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(MAX_READERS, "unix-source")
        self._thread = threading.Thread(target=self._accept, name="unix-listener", daemon=True)
        self._thread.start()

    def advert(self) -> bytes:
        return self._name

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # ends `accept`
        self._thread.join()
        self._listener.close()
        with self._lock:
            for reader in self._readers:
                disconnect(reader)
        self._pool.shutdown()

    def _accept(self) -> None:
        while True:
            try:
                reader, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self._readers.add(reader)
            self._pool.submit(self._serve, reader)

    def _serve(self, reader: socket.socket) -> None:
        with reader:
            try:
                reader.settimeout(STALL_S)
                self._answer(reader)
            except (OSError, ValueError, DecodeError):
                pass  # the reader has left, stalled, or sent no request
            finally:
                with self._lock:
                    self._readers.discard(reader)

    def _answer(self, reader: socket.socket) -> None:
        if user_of(reader) != os.geteuid():
            return
        (nbytes,) = SIZE.unpack(received(reader, SIZE.size))
        request = pb.FetchRequest.FromString(received(reader, min(nbytes, MAX_BYTES)))
        try:
            check_request(self._store, request)
            views = [self._store.view(r.shard, r.start, r.nbytes) for r in request.ranges]
            reader.sendall(OK)
            for view in views:
                reader.sendall(view)
            self._store.check(r.shard for r in request.ranges)  # else other rows may have been sent
            reader.sendall(OK)
        except RlhfError as error:
            status = to_status(error, {}).SerializeToString()
            reader.sendall(FAILED + SIZE.pack(len(status)) + status)


class UnixReader(Reader):
    """Reads from sources on this host, over a connection for each read."""

    name = "unix"

    def __init__(self) -> None:
        self._connections: set[socket.socket] = set()
        self._is_closed = False
        self._lock = threading.Lock()

    def why_not(self, source: Endpoint, host_id: str) -> str | None:
        if self.name not in source.adverts:
            return "it has no Unix socket"
        return None if source.host_id == host_id else "it is on another host"

    def check_advert(self, advert: bytes) -> None:
        if not NAME.fullmatch(advert):
            raise ValueError(f"{advert!r} is no name that a rank gives a socket")

    def read(self, source: Endpoint, ranges: Sequence[ByteRange], deadline: float) -> Reading:
        wanted = [pb.ByteRange(shard=r.shard.id, start=r.start, nbytes=r.nbytes) for r in ranges]
        request = pb.FetchRequest(epoch=source.epoch, ranges=wanted).SerializeToString()
        with self._connection(source) as connection:
            try:
                connection.settimeout(remaining_s(deadline, source))
                connection.connect(b"\0" + source.adverts[self.name])
                if user_of(connection) != os.geteuid():
                    raise Refused(f"{source}: its socket belongs to another user")
                connection.sendall(SIZE.pack(len(request)) + request)
                check_status(connection, source, deadline)
                views = [np.empty(r.nbytes, np.uint8).data for r in ranges]
                for view in views:
                    fill(connection, view, source, deadline)
                check_status(connection, source, deadline)
            except TimeoutError as error:
                raise DeadlineExceeded(f"{source}: not all bytes had come by the deadline") from error
            except OSError as error:
                raise ServiceLost(f"{source}: the connection broke: {error.strerror or error}") from error
        return Reading(views)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            for connection in self._connections:
                disconnect(connection)

    @contextlib.contextmanager
    def _connection(self, source: Endpoint) -> Iterator[socket.socket]:
        """Context manager that yields a new socket, which `close` disconnects. Raises Refused after that."""
        with socket.socket(socket.AF_UNIX) as connection:
            with self._lock:
                if self._is_closed:
                    raise Refused(f"{source}: this end was closed")
                self._connections.add(connection)
            try:
                yield connection
            finally:
                with self._lock:
                    self._connections.discard(connection)


class UnixTransport(Transport):
    """Rows over Unix sockets; the advert is the name of the socket. Rows stay on the host."""

    name = UnixReader.name
    is_secure = True

    def source(self, store: TensorStore, host: str) -> UnixSource:
        return UnixSource(store)

    def reader(self) -> UnixReader:
        return UnixReader()


unix = UnixTransport()


def check_status(connection: socket.socket, source: Endpoint, deadline: float) -> None:
    """Receives OK or FAILED. Raises the source's error, and TransferError for other bytes."""
    kind = memoryview(bytearray(1))
    fill(connection, kind, source, deadline)
    if kind == OK:
        return
    if kind != FAILED:
        raise TransferError(f"{source}: sent {bytes(kind)!r} in place of a status")
    size = memoryview(bytearray(SIZE.size))
    fill(connection, size, source, deadline)
    status = memoryview(bytearray(min(SIZE.unpack(size)[0], MAX_BYTES)))
    fill(connection, status, source, deadline)
    raise from_status(status_pb2.Status.FromString(bytes(status)), str(source))


def fill(connection: socket.socket, target: memoryview, source: Endpoint, deadline: float) -> None:
    """Receives bytes until `target` is full. Raises ServiceLost at the end of the connection, DeadlineExceeded or
    TimeoutError at the deadline."""
    while len(target):
        connection.settimeout(remaining_s(deadline, source))
        count = connection.recv_into(target)
        if not count:
            raise ServiceLost(f"{source}: the connection ended")
        target = target[count:]


def received(connection: socket.socket, nbytes: int) -> bytes:
    """Receives `nbytes` bytes. Raises ValueError at the end of the connection."""
    data = bytearray()
    while len(data) < nbytes:
        more = connection.recv(min(nbytes - len(data), 1 << 20))
        if not more:
            raise ValueError("a request was cut short")
        data += more
    return bytes(data)


def user_of(connection: socket.socket) -> int:
    """Returns the user id of the process at the other end."""
    return CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))[
        1
    ]


def disconnect(connection: socket.socket) -> None:
    """Ends a connection that another thread uses; that thread gets an error, or the end, and closes it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
