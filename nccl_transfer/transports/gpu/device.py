"""The CUDA calls of the data plane behind an interface, so that transports and their tests do not depend on CUDA."""

from __future__ import annotations

import ctypes
import functools
import importlib
import threading
import uuid
import weakref
from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from rlhf.errors import OutOfSpace, RlhfError, TransferError

INSTALL_HINT = "pip install 'rlhf-cluster[cu12]' or 'rlhf-cluster[cu13]'"

_CUDA_ERROR_MEMORY_ALLOCATION = 2


class Event(ABC):
    """A point in the work of a stream.

    Attributes:
        handle: Opens the event in another process of the host; 64 bytes.
    """

    handle: bytes

    @abstractmethod
    def record(self) -> None:
        """Records the point after all work enqueued on the device's stream so far."""

    @abstractmethod
    def wait(self) -> None:
        """Makes later work of the device's stream wait for the last recorded point."""

    @abstractmethod
    def close(self) -> None:
        """Destroys the event."""


class Cuda(ABC):
    """One GPU in this process: memory and one private stream. Thread-safe.

    Attributes:
        uuid: The GPU's UUID, as NVIDIA's tools write it: "GPU-5b9a0c9e-...".
    """

    uuid: str

    @abstractmethod
    def malloc(self, nbytes: int) -> int:
        """Allocates device memory that can be shared with other processes; returns its address.

        Raises:
            OutOfSpace: The device has too little free memory.
        """

    @abstractmethod
    def free(self, pointer: int) -> None:
        """Frees the result of `malloc`."""

    @abstractmethod
    def share(self, pointer: int) -> bytes:
        """Handle by which other processes open memory of `malloc`; 64 bytes."""

    @abstractmethod
    def open(self, handle: bytes) -> int:
        """Opens memory of another process; returns its address in this process.

        Raises:
            TransferError: The memory cannot be opened.
        """

    @abstractmethod
    def close(self, pointer: int) -> None:
        """Closes the result of `open`."""

    @abstractmethod
    def copy_in(self, pointer: int, data: memoryview) -> None:
        """Copies host to device, in stream order. `data` may change after the return."""

    @abstractmethod
    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copies device to device, in stream order."""

    @abstractmethod
    def copy_out(self, data: memoryview, pointer: int) -> None:
        """Copies device to host, in stream order; returns when the copy is complete."""

    @abstractmethod
    def event(self) -> Event:
        """Creates an event that other processes can open."""

    @abstractmethod
    def open_event(self, handle: bytes) -> Event:
        """Opens an event of another process."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits for all work of the stream."""


class DeviceBuffer:
    """Device memory, freed by `free` or with the last reference.

    `__cuda_array_interface__` exposes it to torch and cupy as bytes, without a copy.

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
    """Address of host memory; valid while `data` is referenced."""
    return np.frombuffer(data, np.uint8).ctypes.data


def cupy(module: str) -> Any:
    """Imports a module of cupy, such as "cuda.runtime"; lazily, because few processes have a GPU.

    Raises:
        ImportError: cupy is not installed.
    """
    return importlib.import_module(f"cupy.{module}")


@functools.cache
def why_no_cuda() -> str | None:
    """Why this process cannot use a GPU; None if it can."""
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

    Memory is from plain cudaMalloc: memory of torch's and cupy's allocators cannot be shared piece by piece.
    """

    def __init__(self) -> None:
        runtime = self._runtime = cupy("cuda.runtime")
        self.number: int = runtime.getDevice()
        self.uuid = _uuid_of(self.number)
        self.stream: int = runtime.streamCreateWithFlags(runtime.streamNonBlocking)

    def use(self) -> None:
        """Makes the device current in the calling thread; CUDA keeps it per thread."""
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
    """A CUDA event, of this process or of another."""

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
    """The GPU of this process, shared by its transports: the device that is current at the first call."""
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
    """Asks the driver: cupy returns the 16 bytes as a C string, which a zero byte truncates."""
    driver = ctypes.CDLL("libcuda.so.1")
    device, raw = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    for status in (
        driver.cuDeviceGet(ctypes.byref(device), number),
        driver.cuDeviceGetUuid_v2(raw, device),
    ):
        if status != 0:
            raise TransferError(f"the UUID of GPU {number} cannot be read: CUDA error {status}")
    return f"GPU-{uuid.UUID(bytes=bytes(raw))}"
