"""Interface of the CUDA calls that the data plane uses, so that its tests need no GPU, and its implementation by
cupy."""

from __future__ import annotations

import ctypes
import functools
import importlib
import re
import threading
import uuid
import weakref
from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from rlhf.errors import OutOfSpace, RlhfError, TransferError

INSTALL_HINT = (
    "pip install 'rlhf-cluster[cu13]', or for CUDA 12 "
    "pip install 'rlhf-cluster[cu12]' --extra-index-url https://download.pytorch.org/whl/cu126"
)
"""Installs cupy and torch for a GPU, as docs/gpus.md says."""

_CUDA_ERROR_MEMORY_ALLOCATION = 2


class Event(ABC):
    """A CUDA event that processes of a host can share.

    Attributes:
        handle: IPC handle by which another process opens the event, 64 bytes.
    """

    handle: bytes

    @abstractmethod
    def record(self) -> None:
        """Records all work enqueued so far on the stream of the event's `Cuda`."""

    @abstractmethod
    def wait(self) -> None:
        """Makes later work on the stream of the event's `Cuda` wait for the work last recorded. Does not block the
        host."""

    @abstractmethod
    def close(self) -> None:
        """Destroys the event."""


class Cuda(ABC):
    """One GPU in this process: its memory, and one private CUDA stream. Addresses are integers. Thread-safe.

    Attributes:
        uuid: UUID of the GPU as NVIDIA's tools write it: "GPU-5b9a0c9e-...".
    """

    uuid: str

    @abstractmethod
    def malloc(self, nbytes: int) -> int:
        """Allocates `nbytes` bytes of device memory that other processes can open; returns their address.

        Raises:
            OutOfSpace: The device has too little free memory.
        """

    @abstractmethod
    def free(self, pointer: int) -> None:
        """Frees memory at an address that `malloc` returned."""

    @abstractmethod
    def share(self, pointer: int) -> bytes:
        """Returns the IPC handle, 64 bytes, by which other processes open memory that `malloc` allocated."""

    @abstractmethod
    def open(self, handle: bytes) -> int:
        """Opens memory of another process by its IPC handle; returns its address in this process.

        Raises:
            TransferError: The memory cannot be opened.
        """

    @abstractmethod
    def close(self, pointer: int) -> None:
        """Closes memory at an address that `open` returned."""

    @abstractmethod
    def copy_in(self, pointer: int, data: memoryview) -> None:
        """Copies `data` from the host to device address `pointer`, in stream order. `data` may change after the
        return."""

    @abstractmethod
    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copies `nbytes` bytes from device address `source` to device address `target`, in stream order."""

    @abstractmethod
    def copy_out(self, data: memoryview, pointer: int) -> None:
        """Copies from device address `pointer` into `data` on the host, in stream order; blocks until `data` is
        filled."""

    @abstractmethod
    def event(self) -> Event:
        """Creates an event that other processes can open."""

    @abstractmethod
    def open_event(self, handle: bytes) -> Event:
        """Opens an event of another process by its IPC handle."""

    @abstractmethod
    def synchronize(self) -> None:
        """Blocks until all work on the stream is complete."""


class DeviceBuffer:
    """A block of device memory, freed by `free()` or when the object is garbage-collected.

    `__cuda_array_interface__` exposes it to torch and cupy as an array [nbytes] uint8, without a copy.

    Attributes:
        nbytes: Size in bytes.
        pointer: Device address.

    Raises:
        OutOfSpace: The device has too little free memory.
    """

    def __init__(self, cuda: Cuda, nbytes: int) -> None:
        self.nbytes = nbytes
        self.pointer = cuda.malloc(max(nbytes, 1))
        self.free = weakref.finalize(self, cuda.free, self.pointer)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.pointer, False), "version": 3}


def address(data: memoryview) -> int:
    """Returns the address of the host memory of `data`; valid while `data` is referenced."""
    return np.frombuffer(data, np.uint8).ctypes.data


def cupy(module: str) -> Any:
    """Imports a module of cupy, such as "cuda.runtime", and returns it. Lazy, because few processes have a GPU.

    Raises:
        ImportError: cupy is not installed.
    """
    return importlib.import_module(f"cupy.{module}")


def check_uuid(uuid: bytes) -> None:
    """Raises ValueError where bytes cannot be the UUID of a GPU."""
    if not re.fullmatch(rb"[!-~]{1,64}", uuid):
        raise ValueError(f"{uuid[:100]!r} is no UUID of a GPU")


@functools.cache
def why_no_cuda() -> str | None:
    """Returns the reason why this process cannot use a GPU, or None if it can."""
    try:
        runtime = cupy("cuda.runtime")
    except ImportError as error:
        return f"{error}: {INSTALL_HINT}"
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        return f"no GPU: {error}"
    return None if count else "no GPU"


class CupyCuda(Cuda):
    """CUDA through `cupy.cuda.runtime`, on the device that is current at construction.

    Memory is allocated by plain cudaMalloc: a block of torch's or cupy's caching allocators cannot be shared by
    itself.
    """

    def __init__(self) -> None:
        runtime = self._runtime = cupy("cuda.runtime")
        self.number: int = runtime.getDevice()
        self.uuid = _uuid_of(self.number)
        self.stream: int = runtime.streamCreateWithFlags(runtime.streamNonBlocking)

    def use(self) -> None:
        """Makes the device current in the calling thread; CUDA has a current device per thread."""
        self._runtime.setDevice(self.number)

    def malloc(self, nbytes: int) -> int:
        self.use()
        try:
            return self._runtime.malloc(nbytes)
        except self._runtime.CUDARuntimeError as error:
            raise _memory_error(error, nbytes) from error

    def free(self, pointer: int) -> None:
        self.use()
        self._runtime.free(pointer)

    def share(self, pointer: int) -> bytes:
        self.use()
        return bytes(self._runtime.ipcGetMemHandle(pointer))

    def open(self, handle: bytes) -> int:
        self.use()
        try:
            return self._runtime.ipcOpenMemHandle(handle)
        except self._runtime.CUDARuntimeError as error:
            raise TransferError(f"memory of another process cannot be opened: {error}") from error

    def close(self, pointer: int) -> None:
        self.use()
        self._runtime.ipcCloseMemHandle(pointer)

    def copy_in(self, pointer: int, data: memoryview) -> None:
        # From pageable memory the call returns once the bytes are staged, so `data` may change.
        self._copy(pointer, address(data), len(data), self._runtime.memcpyHostToDevice)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        self._copy(target, source, nbytes, self._runtime.memcpyDeviceToDevice)

    def copy_out(self, data: memoryview, pointer: int) -> None:
        self._copy(address(data), pointer, len(data), self._runtime.memcpyDeviceToHost)
        self.synchronize()

    def event(self) -> Event:
        self.use()
        runtime = self._runtime
        pointer = runtime.eventCreateWithFlags(runtime.eventDisableTiming | runtime.eventInterprocess)
        return CupyEvent(self, pointer, bytes(runtime.ipcGetEventHandle(pointer)))

    def open_event(self, handle: bytes) -> Event:
        self.use()
        return CupyEvent(self, self._runtime.ipcOpenEventHandle(handle), handle)

    def synchronize(self) -> None:
        self.use()
        self._runtime.streamSynchronize(self.stream)

    def _copy(self, target: int, source: int, nbytes: int, kind: int) -> None:
        if nbytes:
            self.use()
            self._runtime.memcpyAsync(target, source, nbytes, kind, self.stream)


class CupyEvent(Event):
    """A CUDA event, created by this process or opened from another one."""

    def __init__(self, cuda: CupyCuda, pointer: int, handle: bytes) -> None:
        self.pointer = pointer
        self.handle = handle
        self._cuda = cuda

    def record(self) -> None:
        self._cuda.use()
        self._cuda._runtime.eventRecord(self.pointer, self._cuda.stream)

    def wait(self) -> None:
        self._cuda.use()
        self._cuda._runtime.streamWaitEvent(self._cuda.stream, self.pointer)

    def close(self) -> None:
        self._cuda.use()
        self._cuda._runtime.eventDestroy(self.pointer)


_own_lock = threading.Lock()


def own_cuda() -> Cuda:
    """Returns the only `Cuda` object of this process, for the device that was current at the first call."""
    with _own_lock:
        return _own_cuda()


@functools.cache
def _own_cuda() -> Cuda:
    return CupyCuda()


def _memory_error(error: Any, nbytes: int) -> RlhfError:
    if error.status == _CUDA_ERROR_MEMORY_ALLOCATION:
        return OutOfSpace(f"the GPU has no {nbytes} bytes left: {error}")
    return TransferError(f"the GPU gave no memory: {error}")


def _uuid_of(number: int) -> str:
    """Returns the UUID of GPU `number` from the driver; cupy returns a C string, which a zero byte truncates."""
    driver = ctypes.CDLL("libcuda.so.1")
    device, raw = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    for status in (
        driver.cuDeviceGet(ctypes.byref(device), number),
        driver.cuDeviceGetUuid_v2(raw, device),
    ):
        if status != 0:
            raise TransferError(f"the UUID of GPU {number} cannot be read: CUDA error {status}")
    return f"GPU-{uuid.UUID(bytes=bytes(raw))}"
