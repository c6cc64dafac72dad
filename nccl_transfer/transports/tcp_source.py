"""The serving side of the tcp transport: streams the shards of a store to readers that know its key, and over TLS to
those that have a certificate too, where this process has certificates."""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import selectors
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from nccl_transfer.refs.ranges import cut_chunks
from nccl_transfer.store.store import TensorStore
from nccl_transfer.transports.base import Source
from nccl_transfer.transports.common import check_request
from nccl_transfer.transports.sink import MAX_PIECES, Pieces
from nccl_transfer.transports.tcp_wire import (
    ADVERT,
    DATA,
    END,
    ERROR,
    FRAME,
    KEY_BYTES,
    MAGIC,
    MAX_REQUEST_BYTES,
    REQUEST,
    disconnect,
)
from rlhf.errors import RlhfError, to_status
from rlhf.security import current
from rlhf.v1 import transfer_pb2 as pb

CHUNK_BYTES = 4 << 20
"""Maximum payload of a frame in bytes. Larger frames were measured to be no faster."""

STALL_S = 30.0
"""Seconds after which a reader is disconnected that receives no bytes (over TLS: fewer than MAX_ENCRYPTED), or does not
complete its handshake and request."""

MAX_STREAMS = 64
"""Maximum number of requests that are answered in parallel; further requests wait for a thread."""

MAX_STRANGERS = 256
"""Maximum number of connections that have not sent a valid key; a further one closes the oldest of them."""

ACCEPT_PAUSE_S = 0.1

MAX_JOINED = 64 << 10
"""Largest frame in bytes that is encrypted as one piece, which copies it; of others each piece is encrypted alone."""

MAX_ENCRYPTED = 256 << 10
"""Most bytes that are encrypted and sent by one call. Over TLS the time limit of a socket is that of the whole call, be
there progress or not."""

_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    # Detects within a minute that a reader's host is gone.
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 20),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 60_000),
)


def cut_frames(
    store: TensorStore, request: pb.FetchRequest, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[Pieces]:
    """Yields the frames of the answer to a request, each as a list of views of the arena; concatenated, they are the
    requested ranges. When the caller has sent a frame and asks for the next one, the shards of the frame are checked
    again, so that an error is raised if they were released while the frame was sent.

    Args:
        store: Store that holds the shards.
        request: The ranges.
        chunk_bytes: Payload of a frame in bytes; the last frame may be shorter, and so may frames of many pieces.

    Raises:
        Refused: The request is for another epoch of the service, or a shard was released, possibly between frames.
        TransferError: A range reaches beyond its shard, or a shard was marked corrupt.
    """
    check_request(store, request)
    ranges = request.ranges
    for chunk in cut_chunks((r.nbytes for r in ranges), chunk_bytes, MAX_PIECES - 1):
        yield [store.view(ranges[n].shard, ranges[n].start + start, nbytes) for n, start, nbytes in chunk]
        store.check({ranges[piece.item].shard for piece in chunk})


@dataclass(eq=False)
class _Reader:
    """A connection that waits for the header of its next request.

    Attributes:
        is_known: Whether an earlier request on the connection had the right key.
        due: Time by which the header must be complete, on the clock of `time.monotonic`, in seconds. None for a known
            reader that has not begun a request: it may be idle for as long as its host lives.
        header: The received part of the header.
    """

    connection: socket.socket
    is_known: bool = False
    due: float | None = None
    header: bytearray = field(default_factory=bytearray)


class TcpSource(Source):
    """TCP server that streams the shards of a store to readers that know its key; over TLS where this process has
    certificates, and then only to readers with a certificate of the same CA.

    One thread accepts connections and reads the headers of requests. Only a request with the right key is passed to the
    pool of threads that answer, so a client without the key uses one file descriptor and no thread, and there are at
    most MAX_STRANGERS of them.

    Args:
        store: Store that holds the shards.
        host: IP address to listen on; the kernel chooses the port.
        frames: Yields the frames of the answer to a request. Default: `cut_frames`.

    Attributes:
        port: Port, part of the advert.
    """

    def __init__(
        self,
        store: TensorStore,
        host: str,
        frames: Callable[[TensorStore, pb.FetchRequest], Iterator[Pieces]] = cut_frames,
    ) -> None:
        self._store = store
        self._frames = frames
        self._key = secrets.token_bytes(KEY_BYTES)  # clients that get the rank's advert can read its rows
        self._certificates = current().certificates
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # [::] listens on all addresses, IPv4 included, as in gRPC.
        both = family == socket.AF_INET6
        self._listener = socket.create_server((host, 0), family=family, backlog=128, dualstack_ipv6=both)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._waiting: dict[socket.socket, _Reader] = {}
        self._busy: set[socket.socket] = set()
        self._returned: deque[_Reader] = deque()
        self._lock = threading.Lock()
        self._stopping = False
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._streams = ThreadPoolExecutor(MAX_STREAMS, "byte-stream")
        self._thread = threading.Thread(target=self._listen, name="byte-server", daemon=True)
        self._thread.start()

    def advert(self) -> bytes:
        return ADVERT.pack(self.port, self._key)

    def close(self) -> None:
        """Stops listening, disconnects all readers, and waits until the threads that answer have ended."""
        self._stopping = True
        with contextlib.suppress(OSError):  # the thread has seen it already, and left
            self._wake.send(b"x")
        self._thread.join()
        with self._lock:
            for connection in self._busy:
                disconnect(connection)
        self._streams.shutdown()
        for reader in self._returned:
            reader.connection.close()
        self._wake.close()

    def _listen(self) -> None:
        with self._selector, self._listener, self._woken:
            for end in (self._listener, self._woken):
                self._selector.register(end, selectors.EVENT_READ)
            while not self._stopping:
                for key, _ in self._selector.select(self._next_due_s()):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj is self._woken:
                        self._woken.recv(4096)
                    elif key.data.connection in self._waiting:  # not dropped meanwhile
                        self._read_header(key.data)
                while self._returned:
                    self._wait_for_request(self._returned.popleft())
                self._drop_late()
            for reader in list(self._waiting.values()):
                self._drop(reader)

    def _next_due_s(self) -> float | None:
        """Returns the seconds until the first `due` of the waiting connections; None if none has one."""
        due = min((reader.due for reader in self._waiting.values() if reader.due is not None), default=None)
        return None if due is None else max(due - time.monotonic(), 0)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            # For example without free descriptors: readers wait until an accept succeeds.
            logging.warning("data port %d: %s", self.port, error)
            time.sleep(ACCEPT_PAUSE_S)
            return
        try:
            for level, option, value in _OPTIONS:
                connection.setsockopt(level, option, value)
            if self._certificates is not None:
                connection = self._certificates.accept_tls(connection)
        except OSError:
            connection.close()  # the client has left: no cause for others to wait
            return
        self._wait_for_request(_Reader(connection, due=time.monotonic() + STALL_S))
        strangers = [reader for reader in self._waiting.values() if not reader.is_known]
        if len(strangers) > MAX_STRANGERS:
            self._drop(strangers[0])

    def _wait_for_request(self, reader: _Reader) -> None:
        reader.connection.setblocking(False)
        self._waiting[reader.connection] = reader
        self._selector.register(reader.connection, selectors.EVENT_READ, reader)

    def _drop_late(self) -> None:
        """Closes the connections whose header was not complete by its time."""
        now = time.monotonic()
        for reader in [each for each in self._waiting.values() if each.due is not None and each.due <= now]:
            self._drop(reader)

    def _drop(self, reader: _Reader) -> None:
        self._unwatch(reader)
        reader.connection.close()

    def _unwatch(self, reader: _Reader) -> None:
        del self._waiting[reader.connection]
        self._selector.unregister(reader.connection)

    def _read_header(self, reader: _Reader) -> None:
        """Receives part of a header, or of the TLS handshake before it. Passes a connection whose header is complete
        and has the right key to the pool of threads; closes one that ended or sent another header."""
        try:
            while len(reader.header) < REQUEST.size:
                received = reader.connection.recv(REQUEST.size - len(reader.header))
                if not received:
                    return self._drop(reader)
                reader.header += received
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            if reader.header:
                reader.due = reader.due or time.monotonic() + STALL_S
            return None
        except OSError:
            return self._drop(reader)
        magic, given, nbytes = REQUEST.unpack(reader.header)
        if magic != MAGIC or not hmac.compare_digest(given, self._key) or nbytes > MAX_REQUEST_BYTES:
            return self._drop(reader)
        self._unwatch(reader)
        with self._lock:
            self._busy.add(reader.connection)
        self._streams.submit(self._serve, reader.connection, nbytes)
        return None

    def _serve(self, connection: socket.socket, nbytes: int) -> None:
        """Receives the `nbytes` bytes of a request after its header, and answers it. The connection then waits for
        its next request, or is closed after an error of the connection or the request."""
        is_good = False
        try:
            connection.settimeout(STALL_S)
            self._answer(connection, pb.FetchRequest.FromString(_receive_exactly(connection, nbytes)))
            is_good = True
        except (OSError, ValueError, DecodeError):
            pass  # the reader has left, stalled, or sent an invalid request: the connection ends
        finally:
            with self._lock:
                self._busy.discard(connection)
            if is_good and not self._stopping:
                self._returned.append(_Reader(connection, is_known=True))
                with contextlib.suppress(OSError):  # closed meanwhile
                    self._wake.send(b"x")
            else:
                connection.close()

    def _answer(self, connection: socket.socket, request: pb.FetchRequest) -> None:
        try:
            for pieces in self._frames(self._store, request):
                _send(connection, DATA, pieces)
        except RlhfError as error:
            _send(connection, ERROR, [memoryview(to_status(error, {}).SerializeToString())])
        else:
            _send(connection, END, [])


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
    """Sends one frame: a header with kind and size, then the pieces of the payload."""
    nbytes = sum(map(len, pieces))
    rest: list[memoryview] = [memoryview(FRAME.pack(kind, nbytes)), *pieces]
    if isinstance(connection, ssl.SSLSocket):
        for piece in rest if nbytes > MAX_JOINED else [memoryview(b"".join(rest))]:
            for start in range(0, len(piece), MAX_ENCRYPTED):
                connection.sendall(piece[start : start + MAX_ENCRYPTED])
        return
    while rest:
        sent = connection.sendmsg(rest)
        while rest and sent >= len(rest[0]):
            sent -= len(rest.pop(0))
        if rest and sent:
            rest[0] = rest[0][sent:]
