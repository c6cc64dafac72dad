"""A GPU and NCCL made of the host: what `cuda_ipc` and `nccl` are tested with where there is no GPU.

Both keep the semantics that the transports rely on. Memory is shared by handle between processes of the host and
has an address; a receive blocks until its send comes; an abort ends both sides, in whatever thread they wait.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from nccl_transfer.devices.cuda import Cuda, Event, address
from nccl_transfer.transports.gpu.communicator import (
    UNIQUE_ID_BYTES,
    Communicator,
    CommunicatorError,
    Message,
    Nccl,
)
from rlhf.errors import TransferError

HANDLE_BYTES = 64
JOIN_S = 10.0
_HANDLE = struct.Struct("<QQQ")  # process, descriptor, bytes
_COUNT = struct.Struct("<Q")


class _Block:
    """Memory by descriptor, mapped here; seen by every process that maps it."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = fd
        self.nbytes = nbytes
        self.memory = mmap.mmap(fd, nbytes)
        self.address = address(memoryview(self.memory))

    def close(self) -> None:
        self.memory.close()
        os.close(self.fd)

    @property
    def handle(self) -> bytes:
        return _HANDLE.pack(os.getpid(), self.fd, self.nbytes).ljust(HANDLE_BYTES, b"\0")

    @property
    def is_open_elsewhere(self) -> bool:
        """Whether somebody has it of its handle, in this process or another."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False

    @staticmethod
    def of_handle(handle: bytes) -> _Block:
        process, fd, nbytes = _HANDLE.unpack_from(handle)
        try:
            opened = os.open(f"/proc/{process}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise TransferError(f"memory of process {process} cannot be opened: {error.strerror}") from error
        fcntl.flock(opened, fcntl.LOCK_SH)
        return _Block(opened, nbytes)


class HostCuda(Cuda):
    """A GPU whose stream does everything at once.

    Attributes:
        freed_in_use: How often memory was freed that somebody still had open, which CUDA calls undefined.
    """

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid
        self.freed_in_use = 0
        self._blocks: dict[int, _Block] = {}
        self._opened: dict[int, _Block] = {}
        self._lock = threading.Lock()

    def malloc(self, nbytes: int) -> int:
        fd = os.memfd_create("host-gpu", os.MFD_CLOEXEC)
        os.truncate(fd, nbytes)
        block = _Block(fd, nbytes)
        with self._lock:
            self._blocks[block.address] = block
        return block.address

    def free(self, pointer: int) -> None:
        with self._lock:
            block = self._blocks.pop(pointer)
            self.freed_in_use += block.is_open_elsewhere
        block.close()

    def share(self, pointer: int) -> bytes:
        return self._blocks[pointer].handle

    def open(self, handle: bytes) -> int:
        block = _Block.of_handle(handle)
        with self._lock:
            self._opened[block.address] = block
        return block.address

    def close(self, pointer: int) -> None:
        with self._lock:
            self._opened.pop(pointer).close()

    def copy_in(self, pointer: int, data: memoryview) -> None:
        if len(data):
            ctypes.memmove(pointer, address(data), len(data))

    def copy(self, target: int, source: int, nbytes: int, stream: int | None = None) -> None:
        ctypes.memmove(target, source, nbytes)

    def copy_out(self, data: memoryview, pointer: int) -> None:
        if len(data):
            ctypes.memmove(address(data), pointer, len(data))

    def event(self) -> Event:
        pointer = self.malloc(_COUNT.size)
        return HostEvent(self._blocks[pointer], lambda: self.free(pointer))

    def open_event(self, handle: bytes) -> Event:
        pointer = self.open(handle)
        return HostEvent(self._opened[pointer], lambda: self.close(pointer))

    def synchronize(self) -> None:
        pass


class HostEvent(Event):
    """A count in shared memory of how often it was recorded; a stream that does everything at once never waits."""

    def __init__(self, block: _Block, close: Callable[[], None]) -> None:
        self._block = block
        self._close = close

    @property
    def handle(self) -> bytes:
        return self._block.handle

    def record(self, stream: int | None = None) -> None:
        _COUNT.pack_into(self._block.memory, 0, self.recorded + 1)

    def wait(self, stream: int | None = None) -> None:
        assert self.recorded > 0, "an event that was never recorded orders nothing"

    def done(self) -> bool:
        return True

    @property
    def recorded(self) -> int:
        return _COUNT.unpack_from(self._block.memory)[0]

    def close(self) -> None:
        self._close()


class HostNccl(Nccl):
    """Communicators of two ranks over a unix socket, or of one rank with itself."""

    def __init__(self, version: int = 22703) -> None:
        self.version = version
        self._listeners: dict[bytes, socket.socket] = {}

    def unique_id(self) -> bytes:
        name = f"host-nccl-{secrets.token_hex(16)}".encode()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(b"\0" + name)
        listener.listen(1)
        unique_id = name.ljust(UNIQUE_ID_BYTES, b"\0")
        self._listeners[unique_id] = listener
        return unique_id

    def join(self, unique_id: bytes, rank: int, size: int) -> Communicator:
        assert size in (1, 2)
        if size == 1:
            self._listeners.pop(unique_id).close()
            return HostCommunicator(rank, None)
        try:
            if rank == 0:
                with self._listeners.pop(unique_id) as listener:
                    listener.settimeout(JOIN_S)
                    connection, _ = listener.accept()
            else:
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                connection.connect(b"\0" + unique_id.rstrip(b"\0"))
        except OSError as error:
            raise CommunicatorError(f"the other rank did not come: {error}") from error
        connection.settimeout(None)
        return HostCommunicator(rank, connection)


class HostCommunicator(Communicator):
    """One thread is the stream: it carries out group after group."""

    def __init__(self, rank: int, connection: socket.socket | None) -> None:
        self._rank = rank
        self._connection = connection
        self._stream = ThreadPoolExecutor(1, "host-nccl")
        self._groups: list[Future[None]] = []
        self._is_ordered = False
        self._aborted = False
        self._lock = threading.Lock()

    def wait(self, event: Event) -> None:
        event.wait()
        self._is_ordered = True

    def group(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        assert self._is_ordered or not sends, "on a GPU, these bytes would be sent before they are there"
        self._is_ordered = False
        if self._aborted:
            raise CommunicatorError("the communicator was aborted")
        self._groups = [group for group in self._groups if not group.done() or group.exception()]
        self._groups.append(self._stream.submit(self._carry_out, list(sends), list(receives)))

    def done(self) -> bool:
        if self._aborted:
            raise CommunicatorError("the communicator was aborted")
        for group in self._groups:
            if group.done():
                group.result()
        return all(group.done() for group in self._groups)

    def abort(self) -> None:
        with self._lock:
            if self._aborted:
                return
            self._aborted = True
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
        self._stream.submit(self._hang_up)
        self._stream.shutdown(wait=False)

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _carry_out(self, sends: list[Message], receives: list[Message]) -> None:
        if self._connection is None:
            for send, receive in zip(sends, receives, strict=True):
                assert send.nbytes == receive.nbytes
                ctypes.memmove(receive.pointer, send.pointer, send.nbytes)
            return
        try:
            for message in sends:
                self._connection.sendall(_bytes_at(message))
            for message in receives:
                _receive(self._connection, _bytes_at(message))
        except OSError as error:
            raise CommunicatorError(f"the other rank has gone: {error}") from error


def _bytes_at(message: Message) -> memoryview:
    return memoryview((ctypes.c_ubyte * message.nbytes).from_address(message.pointer)).cast("B")


def _receive(connection: socket.socket, target: memoryview) -> None:
    while len(target):
        count = connection.recv_into(target)
        if count == 0:
            raise CommunicatorError("the other rank has gone: its end is closed")
        target = target[count:]
