"""The memfd transport: zero-copy reads between ranks of one host. Every rank shares the file descriptor of its
arena."""

from __future__ import annotations

import os
import re
import select
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from nccl_transfer.refs.ranges import ByteRange
from nccl_transfer.refs.shards import Endpoint
from nccl_transfer.store.arena import ArenaReader
from nccl_transfer.store.store import TensorStore
from nccl_transfer.transports.base import Reader, Reading, Transport
from nccl_transfer.transports.common import read_in_place, remaining_s
from nccl_transfer.transports.memfd_source import HELLO, MAGIC, MemfdSource, peer_uid
from rlhf.errors import DeadlineExceeded, Refused, Restarted, ServiceLost, TransferError

SOCKET = re.compile(rb"rlhf-[0-9a-f]{32}")


@dataclass(frozen=True, eq=False)
class _Connection:
    """An arena of another process, and the socket that is closed when the process ends."""

    reader: ArenaReader
    epoch: int
    socket: socket.socket

    @property
    def alive(self) -> bool:
        """Whether the other process is alive. It sends nothing after its first message, so a readable socket has
        ended."""
        try:
            self.socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False


class _Watch:
    """A thread that watches sockets and calls a function when one of them is readable or has ended.

    Args:
        notify: Called in the thread, repeatedly until the socket is removed.
    """

    def __init__(self, notify: Callable[[], None]) -> None:
        self._notify = notify
        self._sockets = select.epoll()
        self._stop, self._stopped = socket.socketpair()
        self.add(self._stopped)
        self._thread = threading.Thread(target=self._run, name="arena-watch", daemon=True)
        self._thread.start()

    def add(self, connection: socket.socket) -> None:
        """Watches a socket until `remove`, which has to be called before the socket is closed."""
        self._sockets.register(connection, select.EPOLLIN)

    def remove(self, connection: socket.socket) -> None:
        self._sockets.unregister(connection)

    def close(self) -> None:
        self._stop.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._stop.close()
        self._stopped.close()
        self._sockets.close()

    def _run(self) -> None:
        while all(fd != self._stopped.fileno() for fd, _ in self._sockets.poll()):
            self._notify()


class MemfdReader(Reader):
    """Maps the arenas of ranks on the same host.

    The source takes part in the first read only: later reads succeed while it computes, and even while it is stopped.
    Reads from a source that has died raise ServiceLost. Its memory is unmapped once its end is detected and no reading
    uses it.
    """

    name = "memfd"
    maps_memory = True

    def __init__(self) -> None:
        self._connections: dict[bytes, _Connection] = {}
        self._watch: _Watch | None = None
        self._closed = False
        self._lock = threading.Lock()

    def why_not(self, source: Endpoint, host_id: str) -> str | None:
        if self.name not in source.adverts:
            return "it hands out no arena"
        if source.host_id != host_id:
            return f"it is on host {source.host_id!r}, not on {host_id!r}"
        return None

    def check_advert(self, advert: bytes) -> None:
        if not SOCKET.fullmatch(advert):
            raise ValueError(f"{advert!r} is not a valid socket name of a rank")

    def read(self, source: Endpoint, ranges: Sequence[ByteRange], deadline: float) -> Reading:
        return read_in_place(self.arena(source, deadline), ranges)

    def arena(self, source: Endpoint, deadline: float) -> ArenaReader:
        """Returns a reader of a rank's arena, mapped at the first call. Raises DeadlineExceeded, ServiceLost and
        Refused as `read` does."""
        connection = self._connection(source, deadline)
        if source.epoch not in (0, connection.epoch):
            raise Restarted(
                f"{source}: its epoch is {connection.epoch}, the rows are of epoch {source.epoch}"
            )
        return connection.reader

    def forget(self, source: Endpoint) -> None:
        forgotten = source.adverts.get(self.name)
        with self._lock:
            self._keep({name: peer for name, peer in self._connections.items() if name != forgotten})

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._keep({})
            watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    def _connection(self, source: Endpoint, deadline: float) -> _Connection:
        """Returns the connection to the source, a new one at the first read. Raises ServiceLost if it has ended."""
        with self._lock:
            known = self._connections.get(socket_of(source))
        if known is None or known.socket.fileno() < 0:  # another session has forgotten it a moment ago
            fresh = _connect(source, deadline)
            with self._lock:
                known = self._add(source, fresh)
        if not known.alive:
            raise ServiceLost(f"{source}: cannot be reached or died: its process has ended")
        return known

    def _add(self, source: Endpoint, fresh: _Connection) -> _Connection:
        """Adds and watches a connection and returns it. If another thread has added one to the source, closes `fresh`
        and returns that one. Raises Refused where the transport is closed. The caller holds the lock."""
        with ExitStack() as unless_kept:
            unless_kept.enter_context(fresh.socket)
            if self._closed:
                raise Refused(f"{source}: this end was closed")
            if socket_of(source) in self._connections:
                return self._connections[socket_of(source)]
            try:
                self._watch = self._watch or _Watch(self._drop_ended)
                self._watch.add(fresh.socket)
            except OSError as error:
                raise ServiceLost(f"{source}: its end cannot be waited for: {error.strerror}") from error
            unless_kept.pop_all()
        self._connections[socket_of(source)] = fresh
        return fresh

    def _drop_ended(self) -> None:
        """Releases the arenas of ranks that have ended; a restarted rank has a new socket name."""
        with self._lock:
            self._keep({name: peer for name, peer in self._connections.items() if peer.alive})

    def _keep(self, connections: dict[bytes, _Connection]) -> None:
        """Keeps only `connections` and closes the sockets of the others. Their arenas are unmapped with their last
        reading."""
        for name in self._connections.keys() - connections.keys():
            assert self._watch is not None, "connections are watched"
            self._watch.remove(self._connections[name].socket)
            self._connections[name].socket.close()
        self._connections = connections


def socket_of(source: Endpoint) -> bytes:
    """Returns the name of the socket from which a rank hands out its arena, its advert; it has one."""
    return source.adverts[MemfdReader.name]


def _connect(source: Endpoint, deadline: float) -> _Connection:
    with ExitStack() as opened:
        connection = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        connection.settimeout(remaining_s(deadline, source))
        try:
            connection.connect(b"\0" + socket_of(source))
            owner = peer_uid(connection)
            if owner != os.geteuid():
                raise Refused(f"{source}: its arena belongs to user {owner}, this is {os.geteuid()}")
            reader, epoch = _receive_arena(connection, source)
        except TimeoutError as error:
            raise DeadlineExceeded(f"{source}: did not hand out its arena by the deadline") from error
        except OSError as error:
            raise ServiceLost(f"{source}: cannot be reached or died: its arena: {error.strerror}") from error
        connection.setblocking(False)
        opened.pop_all()
        return _Connection(reader, epoch, connection)


def _receive_arena(connection: socket.socket, source: Endpoint) -> tuple[ArenaReader, int]:
    """Receives the descriptor of the source's arena; returns a reader of it, and the epoch of the source. Raises
    ServiceLost if the source has ended, and TransferError if it sent no arena that is safe to map."""
    hello, fds, _, _ = socket.recv_fds(connection, HELLO.size, 1, socket.MSG_CMSG_CLOEXEC)
    if not hello:
        raise ServiceLost(f"{source}: cannot be reached or died: it ended before it handed out its arena")
    if len(hello) != HELLO.size or not hello.startswith(MAGIC) or len(fds) != 1:
        for fd in fds:
            os.close(fd)
        raise TransferError(f"{source}: handed out no arena that this side understands")
    _, epoch, nbytes, nonce = HELLO.unpack(hello)
    return ArenaReader.of_peer(fds[0], nbytes, nonce), epoch


class MemfdTransport(Transport):
    """Ranks of one host share the file descriptors of their arenas; the advert is the name of an abstract socket."""

    name = MemfdReader.name
    is_secure = True

    def source(self, store: TensorStore, host: str) -> MemfdSource:
        return MemfdSource(store)

    def reader(self) -> MemfdReader:
        return MemfdReader()
