"""Memory of other processes of this host and user, read by one copy of the kernel (process_vm_readv, Linux)."""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlhf.v1 import transfer_pb2 as pb

IOV_MAX = 1024
"""Most runs of bytes that one system call reads."""
NONCE_BYTES = 16
PART_BYTES = 1 << 20
"""Bytes of a part, which is copied and verified at a time, so that it stays in the processor's cache meanwhile."""


def num_parts(nbytes: int) -> int:
    """Returns the number of parts of `nbytes` bytes."""
    return -(-nbytes // PART_BYTES)


_Iovec = ctypes.c_size_t * 2
"""struct iovec: address and size."""
_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = ctypes.c_ssize_t
_libc.process_vm_readv.argtypes = [
    ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong,
]  # fmt: skip


@dataclass(frozen=True)
class ProcessMemory:
    """Memory of a process.

    Attributes:
        pid: Id of the process, in its own PID namespace.
        nonce_address: Address of `nonce` in its memory.
        nonce: Random bytes, which tell it from a process of another namespace with the same id.
    """

    pid: int
    nonce_address: int
    nonce: bytes

    @staticmethod
    def from_proto(message: pb.ProcessMemory) -> ProcessMemory:
        return ProcessMemory(message.pid, message.nonce_address, message.nonce)

    def to_proto(self) -> pb.ProcessMemory:
        return pb.ProcessMemory(pid=self.pid, nonce_address=self.nonce_address, nonce=self.nonce)

    def why_not(self) -> str | None:
        """Returns the reason why this process cannot read the memory, or None if it can."""
        found = np.zeros(NONCE_BYTES, np.uint8)
        try:
            self.read(Runs(np.array([self.nonce_address], np.uint64), NONCE_BYTES), 0, NONCE_BYTES, found)
        except OSError as error:
            return f"process {self.pid}: {error.strerror}"
        return None if found.tobytes() == self.nonce else f"process {self.pid} of this host is not the source"

    def read(self, runs: Runs, start: int, stop: int, target: np.ndarray) -> None:
        """Copies bytes `start` to `stop` of runs to `target`, a contiguous array of as many bytes. Other threads run
        meanwhile.

        Raises:
            ProcessLookupError: The process has ended.
            OSError: The memory cannot be read: EFAULT where it was freed, EPERM or ENOSYS where the host does not allow
                it.
        """
        address = target.__array_interface__["data"][0]
        if len(runs.addresses) == 1:
            _read_memory(
                self.pid, address, _Iovec(int(runs.addresses[0]) + start, stop - start), 1, stop - start
            )
            return
        remote = runs.part(start, stop)
        for first in range(0, len(remote), IOV_MAX):
            some = remote[first : first + IOV_MAX]
            nbytes = int(some[:, 1].sum())
            _read_memory(self.pid, address, ctypes.c_void_p(some.ctypes.data), len(some), nbytes)
            address += nbytes


@dataclass(frozen=True)
class Runs:
    """Runs of contiguous bytes in the memory of a process, all of the same size, which end to end are the elements of a
    box in row-major order.

    Attributes:
        addresses: Address of each run, [runs] uint64.
        run_bytes: Size of a run in bytes.
    """

    addresses: np.ndarray
    run_bytes: int

    @staticmethod
    def of_box(address: int, shape: Sequence[int], strides: Sequence[int], item_bytes: int) -> Runs:
        """Returns the runs of a box.

        Args:
            address: Address of the first element.
            shape: Size of each axis.
            strides: Bytes from an element to the next one along each axis.
            item_bytes: Size of an element in bytes.
        """
        together, axes = _contiguous(shape, strides, item_bytes)
        addresses = np.array([address], np.uint64)
        for size, stride in axes:
            steps = np.arange(size, dtype=np.int64) * stride
            addresses = (addresses[:, None] + steps.astype(np.uint64)).reshape(-1)
        return Runs(addresses, together)

    @property
    def nbytes(self) -> int:
        """Bytes of all runs."""
        return len(self.addresses) * self.run_bytes

    def part(self, start: int, stop: int) -> np.ndarray:
        """Returns the runs of bytes `start` to `stop`, of which the first and the last may be cut: address and size of
        each, [runs, 2] uint64."""
        first, last = start // self.run_bytes, (stop - 1) // self.run_bytes
        part = np.empty((last - first + 1, 2), np.uint64)
        part[:, 0] = self.addresses[first : last + 1]
        part[:, 1] = self.run_bytes
        skipped = start - first * self.run_bytes
        part[0] += np.array([skipped, -skipped], np.int64).astype(np.uint64)
        part[-1, 1] -= np.uint64((last + 1) * self.run_bytes - stop)
        return part


def run_bytes(shape: Sequence[int], strides: Sequence[int], item_bytes: int) -> int:
    """Returns the size of the runs of a box; arguments as for `Runs.of_box`."""
    return _contiguous(shape, strides, item_bytes)[0]


def _contiguous(
    shape: Sequence[int], strides: Sequence[int], item_bytes: int
) -> tuple[int, list[tuple[int, int]]]:
    """Returns the size of the runs of a box in bytes, and the axes along which they lie: size and stride of each."""
    together = item_bytes
    axes = [(size, stride) for size, stride in zip(shape, strides, strict=True) if size != 1]
    while axes and axes[-1][1] == together:
        together *= axes.pop()[0]
    return together, axes


class OwnMemory:
    """Nonce in this process's memory, which has to stay alive while others read from it.

    Attributes:
        memory: This process's memory, as others read it.
    """

    def __init__(self) -> None:
        self._nonce = np.frombuffer(secrets.token_bytes(NONCE_BYTES), np.uint8)
        self.memory = ProcessMemory(os.getpid(), self._nonce.ctypes.data, self._nonce.tobytes())


def _read_memory(pid: int, address: int, remote: Any, num_remote: int, nbytes: int) -> None:
    """Calls process_vm_readv; raises OSError unless it has read `nbytes` bytes."""
    read = _libc.process_vm_readv(pid, _Iovec(address, nbytes), 1, remote, num_remote, 0)
    if read != nbytes:
        number = ctypes.get_errno() if read < 0 else errno.EFAULT
        raise OSError(number, os.strerror(number))
