"""Test doubles for transports between GPUs on one GPU, of which NCCL takes one rank: communicators by which a rank
sends to itself, and a GPU that counts its bytes in use."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from nccl_transfer.devices.cuda import Cuda, Event
from nccl_transfer.transports.gpu.communicator import Communicator, CommunicatorError, Message, Nccl
from rlhf.errors import OutOfSpace

JOIN_S = 10.0


class CountedCuda(Cuda):
    """A GPU that counts what is taken of it here, and gives no more than `capacity` bytes.

    Attributes:
        cuda: The GPU itself.
        used: Bytes that were allocated and not freed.
        mallocs: Number of allocations so far.
    """

    def __init__(self, cuda: Cuda, capacity: int = 4 << 30) -> None:
        self.uuid = cuda.uuid
        self.capacity = capacity
        self.cuda = cuda
        self.mallocs = 0
        self._sizes: dict[int, int] = {}
        self._lock = threading.Lock()

    @property
    def used(self) -> int:
        with self._lock:
            return sum(self._sizes.values())

    def malloc(self, nbytes: int) -> int:
        with self._lock:
            if sum(self._sizes.values()) + nbytes > self.capacity:
                raise OutOfSpace(f"the GPU has no {nbytes} bytes left")
            self.mallocs += 1
            pointer = self.cuda.malloc(nbytes)
            self._sizes[pointer] = nbytes
            return pointer

    def free(self, pointer: int) -> None:
        with self._lock:
            self.cuda.free(pointer)
            del self._sizes[pointer]

    def share(self, pointer: int) -> bytes:
        return self.cuda.share(pointer)

    def open(self, handle: bytes) -> int:
        return self.cuda.open(handle)

    def close(self, pointer: int) -> None:
        self.cuda.close(pointer)

    def copy_in(self, pointer: int, data: memoryview) -> None:
        self.cuda.copy_in(pointer, data)

    def copy(self, target: int, source: int, nbytes: int, stream: int | None = None) -> None:
        self.cuda.copy(target, source, nbytes, stream)

    def copy_out(self, data: memoryview, pointer: int) -> None:
        self.cuda.copy_out(data, pointer)

    def event(self) -> Event:
        return self.cuda.event()

    def open_event(self, handle: bytes) -> Event:
        return self.cuda.open_event(handle)

    def synchronize(self) -> None:
        self.cuda.synchronize()


class LoopbackNccl(Nccl):
    """The two ranks of a communicator are one rank of another: what one sends, the same rank receives."""

    def __init__(self, nccl: Nccl) -> None:
        self.version = nccl.version
        self._nccl = nccl
        self._meetings: dict[bytes, _Meeting] = {}
        self._lock = threading.Lock()

    def unique_id(self) -> bytes:
        return self._nccl.unique_id()

    def join(self, unique_id: bytes, rank: int, size: int) -> Communicator:
        assert size == 2
        with self._lock:
            meeting = self._meetings.get(unique_id)
            if meeting is None:
                meeting = self._meetings[unique_id] = _Meeting()
            else:
                del self._meetings[unique_id]
                meeting.loop = _Loop(self._nccl.join(unique_id, 0, 1))
                meeting.complete.set()
        if not meeting.complete.wait(JOIN_S):
            raise CommunicatorError("the other rank did not come")
        assert meeting.loop is not None
        return meeting.loop


@dataclass
class _Meeting:
    """Of two ranks, of which the second makes the communicator of both."""

    loop: _Loop | None = None
    complete: threading.Event = field(default_factory=threading.Event)


class _Loop(Communicator):
    """Both ends: a group goes out when its sends and its receives are there."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._sends: list[Message] = []
        self._receives: list[Message] = []
        self._lock = threading.Lock()

    def wait(self, event: Event) -> None:
        self._communicator.wait(event)

    def group(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        with self._lock:
            self._sends += [Message(0, message.pointer, message.nbytes) for message in sends]
            self._receives += [Message(0, message.pointer, message.nbytes) for message in receives]
            if len(self._sends) == len(self._receives):
                self._communicator.group(self._sends, self._receives)
                self._sends, self._receives = [], []

    def done(self) -> bool:
        with self._lock:
            return not self._sends and not self._receives and self._communicator.done()

    def abort(self) -> None:
        self._communicator.abort()
