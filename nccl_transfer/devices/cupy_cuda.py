"""CUDA by cupy. NVIDIA's documentation of the runtime describes each call."""

from __future__ import annotations

import ctypes
import functools
import importlib
import threading
import uuid
from typing import Any

from nccl_transfer.devices.cuda import Cuda, Event, address
from rlhf.errors import OutOfSpace, RlhfError, TransferError

INSTALL_HINT = (
    "pip install 'rlhf-cluster[cu13]', or for CUDA 12 "
    "pip install 'rlhf-cluster[cu12]' --extra-index-url https://download.pytorch.org/whl/cu126"
)
"""Installs cupy and torch for a GPU, as docs/gpus.md says."""

_CUDA_ERROR_MEMORY_ALLOCATION = 2
_CUDA_ERROR_NOT_READY = 600


def cupy(module: str) -> Any:
    """Imports a module of cupy, such as "cuda.runtime", and returns it. Lazy, because few processes have a GPU.

    Raises:
        ImportError: cupy is not installed.
    """
    return importlib.import_module(f"cupy.{module}")


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

    def copy(self, target: int, source: int, nbytes: int, stream: int | None = None) -> None:
        self._copy(target, source, nbytes, self._runtime.memcpyDeviceToDevice, stream)

    def copy_out(self, data: memoryview, pointer: int) -> None:
        self._copy(address(data), pointer, len(data), self._runtime.memcpyDeviceToHost)
        self.synchronize()

    def event(self) -> Event:
        self.use()
        runtime = self._runtime
        flags = runtime.eventDisableTiming | runtime.eventInterprocess
        return CupyEvent(self, runtime.eventCreateWithFlags(flags))

    def open_event(self, handle: bytes) -> Event:
        self.use()
        return CupyEvent(self, self._runtime.ipcOpenEventHandle(handle))

    def synchronize(self) -> None:
        self.use()
        self._runtime.streamSynchronize(self.stream)

    def _copy(self, target: int, source: int, nbytes: int, kind: int, stream: int | None = None) -> None:
        if nbytes:
            self.use()
            on = self.stream if stream is None else stream
            self._runtime.memcpyAsync(target, source, nbytes, kind, on)


class CupyEvent(Event):
    """A CUDA event, created by this process or opened from another one."""

    def __init__(self, cuda: CupyCuda, pointer: int) -> None:
        self.pointer = pointer
        self._cuda = cuda
        self._runtime = cuda._runtime

    @functools.cached_property
    def handle(self) -> bytes:
        self._cuda.use()
        return bytes(self._runtime.ipcGetEventHandle(self.pointer))

    def record(self, stream: int | None = None) -> None:
        self._cuda.use()
        self._runtime.eventRecord(self.pointer, self._cuda.stream if stream is None else stream)

    def wait(self, stream: int | None = None) -> None:
        self._cuda.use()
        self._runtime.streamWaitEvent(self._cuda.stream if stream is None else stream, self.pointer)

    def done(self) -> bool:
        self._cuda.use()
        status = self._runtime.eventQuery(self.pointer)  # alone among cupy's calls, it returns errors
        if status not in (0, _CUDA_ERROR_NOT_READY):
            raise TransferError(f"work on the GPU failed: CUDA error {status}")
        return status == 0

    def close(self) -> None:
        self._cuda.use()
        self._runtime.eventDestroy(self.pointer)


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
