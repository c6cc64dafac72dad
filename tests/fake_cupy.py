"""A fake of the parts of cupy that the data plane calls, for its real adapter where there is no GPU.

It has GPUs of host memory, and refuses what CUDA refuses or makes wrong in silence: each thread's current device is 0
at first, and memory, streams and events belong to the device that was current when they were made; a process cannot
open handles of its own; a wait for an event that was never recorded orders nothing.

`install()` makes it the module `cupy` of this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from contract.host_devices import HostCommunicator, HostNccl, _Block
from nccl_transfer.devices import cupy_cuda
from nccl_transfer.transports.gpu.communicator import UNIQUE_ID_BYTES, CommunicatorError, Message
from rlhf.errors import TransferError

UUIDS = ("GPU-of-others", "GPU-of-the-peer", "GPU-of-the-reader")
"""UUID of each GPU."""

INVALID_VALUE, INVALID_DEVICE, INVALID_HANDLE = 1, 101, 400


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int, why: str) -> None:
        super().__init__(f"cudaError {status}: {why}")
        self.status = status


class NcclError(RuntimeError):
    pass


_thread = threading.local()
_lock = threading.Lock()
_numbers = itertools.count(1 << 32)


def current() -> int:
    return getattr(_thread, "device", 0)


@dataclass
class _Stream:
    device: int
    is_ordered: bool = False
    done: Callable[[], bool] = lambda: True


@dataclass
class _Event:
    device: int
    block: _Block
    is_opened: bool = False

    @property
    def count(self) -> int:
        return int.from_bytes(self.block.memory[:8], "little")


blocks: dict[int, tuple[_Block, int, bool]] = {}
"""Memory by address: with its device, and whether it is another process's."""
streams: dict[int, _Stream] = {}
events: dict[int, _Event] = {}


def _own(found: Any, what: str) -> Any:
    """Returns a stream or an event. Raises CUDARuntimeError if it is not of the current device."""
    if found is None or found.device != current():
        raise CUDARuntimeError(INVALID_HANDLE, f"{what} is not of device {current()}")
    return found


def _check_memory(pointer: int, nbytes: int) -> None:
    with _lock:
        for start, (block, device, _) in blocks.items():
            if start <= pointer and pointer + nbytes <= start + block.nbytes:
                if device != current():
                    raise CUDARuntimeError(INVALID_VALUE, f"memory of device {device}, not {current()}")
                return
    raise CUDARuntimeError(INVALID_VALUE, f"{nbytes} bytes at {pointer:#x} are not in device memory")


def _new_block(nbytes: int) -> _Block:

    fd = os.memfd_create("fake-gpu", os.MFD_CLOEXEC)
    os.truncate(fd, max(nbytes, 1))
    return _Block(fd, max(nbytes, 1))


def _open(handle: bytes) -> _Block:

    if int.from_bytes(handle[:8], "little") == os.getpid():
        raise CUDARuntimeError(201, "a process cannot open a handle of its own")
    try:
        return _Block.of_handle(handle)
    except TransferError as error:
        raise CUDARuntimeError(INVALID_VALUE, str(error)) from error


class Runtime(ModuleType):
    """`cupy.cuda.runtime`."""

    CUDARuntimeError = CUDARuntimeError
    memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice = 1, 2, 3
    eventDisableTiming, eventInterprocess, streamNonBlocking = 2, 4, 1

    def getDeviceCount(self) -> int:
        return len(UUIDS)

    def getDevice(self) -> int:
        return current()

    def setDevice(self, number: int) -> None:
        if not 0 <= number < len(UUIDS):
            raise CUDARuntimeError(INVALID_DEVICE, f"there is no device {number}")
        _thread.device = number

    def malloc(self, nbytes: int) -> int:
        if nbytes > 1 << 40:
            raise CUDARuntimeError(2, "out of memory")
        block = _new_block(nbytes)
        with _lock:
            blocks[block.address] = block, current(), False
        return block.address

    def free(self, pointer: int) -> None:
        _check_memory(pointer, 1)
        with _lock:
            block, _, is_opened = blocks.pop(pointer)
        assert not is_opened, "memory of another process is closed, not freed"
        block.close()

    def ipcGetMemHandle(self, pointer: int) -> bytes:
        _check_memory(pointer, 1)
        return blocks[pointer][0].handle

    def ipcOpenMemHandle(self, handle: bytes) -> int:
        block = _open(handle)
        with _lock:
            blocks[block.address] = block, current(), True
        return block.address

    def ipcCloseMemHandle(self, pointer: int) -> None:
        _check_memory(pointer, 1)
        with _lock:
            block, _, is_opened = blocks.pop(pointer)
        assert is_opened, "own memory is freed, not closed"
        block.close()

    def memcpyAsync(self, target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        _own(streams.get(stream), "the stream")
        if kind in (1, 3):
            _check_memory(target, nbytes)
        if kind in (2, 3):
            _check_memory(source, nbytes)
        ctypes.memmove(target, source, nbytes)

    def streamCreateWithFlags(self, flags: int) -> int:
        number = next(_numbers)
        streams[number] = _Stream(current())
        return number

    def streamSynchronize(self, stream: int) -> None:
        _own(streams.get(stream), "the stream")

    def streamWaitEvent(self, stream: int, event: int) -> None:
        if events[event].count == 0:
            raise CUDARuntimeError(INVALID_VALUE, "an event that was never recorded orders nothing")
        _own(streams.get(stream), "the stream").is_ordered = True

    def eventCreateWithFlags(self, flags: int) -> int:
        number = next(_numbers)
        events[number] = _Event(current(), _new_block(8))
        return number

    def eventRecord(self, event: int, stream: int) -> None:
        _own(streams.get(stream), "the stream")
        found = _own(events.get(event), "the event")
        found.block.memory[:8] = (found.count + 1).to_bytes(8, "little")

    def eventQuery(self, event: int) -> int:
        _own(events.get(event), "the event")
        return 0

    def eventDestroy(self, event: int) -> None:
        _own(events.get(event), "the event")
        events.pop(event).block.close()

    def ipcGetEventHandle(self, event: int) -> bytes:
        return _own(events.get(event), "the event").block.handle

    def ipcOpenEventHandle(self, handle: bytes) -> int:
        number = next(_numbers)
        events[number] = _Event(current(), _open(handle), True)
        return number


@dataclass
class _Group:
    sends: list[Message] = field(default_factory=list)
    receives: list[Message] = field(default_factory=list)
    communicator: NcclCommunicator | None = None
    stream: int = 0


class NcclCommunicator:
    """`cupy.cuda.nccl.NcclCommunicator`; its constructor blocks until all ranks have come."""

    def __init__(self, size: int, unique_id: bytes, rank: int) -> None:
        self._device = current()
        with _as_nccl_errors():
            self._host = _nccl.join(unique_id, rank, size)

    def send(self, pointer: int, count: int, dtype: int, peer: int, stream: int) -> None:
        _check_memory(pointer, count)
        self._add(stream).sends.append(Message(peer, pointer, count))

    def recv(self, pointer: int, count: int, dtype: int, peer: int, stream: int) -> None:
        _check_memory(pointer, count)
        self._add(stream).receives.append(Message(peer, pointer, count))

    def _add(self, stream: int) -> _Group:
        if current() != self._device:
            raise NcclError(f"the communicator is of device {self._device}, not {current()}")
        _own(streams.get(stream), "the stream")
        group: _Group = _thread.group
        group.communicator, group.stream = self, stream
        return group

    def check_async_error(self) -> None:
        with _as_nccl_errors():
            self._host.done()

    def abort(self) -> None:
        self._host.abort()


@contextlib.contextmanager
def _as_nccl_errors() -> Iterator[None]:
    try:
        yield
    except CommunicatorError as error:
        raise NcclError(str(error)) from error


_nccl = HostNccl()


class Nccl(ModuleType):
    """`cupy.cuda.nccl`."""

    available = True
    NcclError = NcclError
    NcclCommunicator = NcclCommunicator
    NCCL_UINT8 = 1

    def get_version(self) -> int:
        return _nccl.version

    def get_unique_id(self) -> tuple[int, ...]:
        return tuple(_nccl.unique_id()[:UNIQUE_ID_BYTES])

    def groupStart(self) -> None:
        _thread.group = _Group()

    def groupEnd(self) -> None:
        group: _Group = _thread.group
        if group.communicator is None:
            return
        host, stream = group.communicator._host, streams[group.stream]
        assert isinstance(host, HostCommunicator)
        if stream.is_ordered:
            host._is_ordered = True
        stream.is_ordered = False
        with _as_nccl_errors():
            host.group(group.sends, group.receives)
        stream.done = host.done


class Stream:
    """`cupy.cuda.Stream`."""

    def __init__(self, *, non_blocking: bool) -> None:
        self.ptr = next(_numbers)
        streams[self.ptr] = _Stream(current())


class Event:
    """`cupy.cuda.Event`."""

    def __init__(self, *, disable_timing: bool) -> None:
        self._device = current()
        self._done: Callable[[], bool] = lambda: True

    def record(self, stream: Stream) -> None:
        _own(streams[stream.ptr], "the stream")
        assert self._device == current()
        self._done = streams[stream.ptr].done

    @property
    def done(self) -> bool:
        with _as_nccl_errors():
            return self._done()


def install(device: int) -> None:
    """Makes this the module `cupy` of the process, and `device` the current device of the calling thread."""
    top, cuda = ModuleType("cupy"), ModuleType("cupy.cuda")
    runtime, nccl = Runtime("cupy.cuda.runtime"), Nccl("cupy.cuda.nccl")
    top.cuda = cuda  # type: ignore[attr-defined]
    vars(cuda).update(runtime=runtime, nccl=nccl, Stream=Stream, Event=Event)
    for module in (top, cuda, runtime, nccl):
        sys.modules[module.__name__] = module
    cupy_cuda._uuid_of = lambda number: UUIDS[number]
    cupy_cuda.why_no_cuda.cache_clear()
    runtime.setDevice(device)


def remove() -> None:
    """Ends what `install` has made, for tests in one process."""
    for name in ("cupy", "cupy.cuda", "cupy.cuda.runtime", "cupy.cuda.nccl"):
        sys.modules.pop(name, None)
    cupy_cuda._uuid_of = _uuid_of
    cupy_cuda.why_no_cuda.cache_clear()


_uuid_of = cupy_cuda._uuid_of
