"""Interface of the CUDA calls that the data plane makes, so that its tests need no GPU.

A stream is an integer, the handle that CUDA gives it; torch's current stream has one too. None stands for the private
stream of a `Cuda`.
"""

from __future__ import annotations

import re
import weakref
from abc import ABC, abstractmethod
from typing import Any

import numpy as np


class Event(ABC):
    """A CUDA event that processes of a host can share."""

    @property
    @abstractmethod
    def handle(self) -> bytes:
        """IPC handle by which another process opens the event, 64 bytes."""

    @abstractmethod
    def record(self, stream: int | None = None) -> None:
        """Records all work enqueued so far on a stream."""

    @abstractmethod
    def wait(self, stream: int | None = None) -> None:
        """Makes later work on a stream wait for the work last recorded. Does not block the host."""

    @abstractmethod
    def done(self) -> bool:
        """Whether the work last recorded is complete. Does not block."""

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
    def copy(self, target: int, source: int, nbytes: int, stream: int | None = None) -> None:
        """Copies `nbytes` bytes from device address `source` to device address `target`, in the order of a stream."""

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


def check_uuid(uuid: bytes) -> None:
    """Raises ValueError where bytes cannot be the UUID of a GPU."""
    if not re.fullmatch(rb"[!-~]{1,64}", uuid):
        raise ValueError(f"{uuid[:100]!r} is no UUID of a GPU")
