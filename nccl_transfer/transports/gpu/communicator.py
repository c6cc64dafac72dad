"""Interface of the NCCL calls that the data plane uses, so that its tests need no NCCL, and its implementation by
cupy."""

from __future__ import annotations

import ctypes
import importlib.metadata
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nccl_transfer.devices.cuda import Event
from nccl_transfer.devices.cupy_cuda import INSTALL_HINT, CupyCuda, CupyEvent, cupy, own_cuda, why_no_cuda

UNIQUE_ID_BYTES = 128

NCCL_WHEELS = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
"""Packages of NCCL on which torch depends, one of which may be installed; both have the library at the same path."""
LIBRARY = "nvidia/nccl/lib/libnccl.so.2"

READER, SOURCE = 0, 1
"""Ranks of the reader and the source in their communicator, which has size 2."""


class CommunicatorError(Exception):
    """A communicator failed or was aborted, and can no longer be used. The transport converts this to one of the
    errors that `Reader.read` may raise."""


@dataclass(frozen=True, slots=True)
class Message:
    """One send to, or receive from, a rank of a communicator. It transfers bytes, so any element type is supported.

    Attributes:
        peer: The other rank in the communicator.
        pointer: Address of the device memory.
        nbytes: Size in bytes.
    """

    peer: int
    pointer: int
    nbytes: int


class Communicator(ABC):
    """One rank's side of an NCCL communicator, with a CUDA stream of its own."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Makes later groups wait, on the GPU, for the work that `event` last recorded."""

    @abstractmethod
    def group(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Enqueues all sends and receives as one NCCL group. The peer must enqueue a group with the matching receives
        and sends in the same order. The first group may block until the peer has enqueued its own.

        Raises:
            CommunicatorError: The communicator failed, or was aborted by another thread.
        """

    @abstractmethod
    def done(self) -> bool:
        """Returns whether all enqueued groups have completed; does not block.

        Raises:
            CommunicatorError: The communicator failed, or was aborted.
        """

    @abstractmethod
    def abort(self) -> None:
        """Ends all operations, those of other threads included, and frees the communicator. Idempotent."""


def abort_in_background(joined: Future[Communicator], then: Callable[[], None] = lambda: None) -> None:
    """Aborts a communicator, if it was created, then calls `then`; returns at once. Runs in a new thread, because
    NCCL's abort may block.

    Args:
        joined: A future that is done; it failed if the communicator was not created.
        then: Called in the thread. Default: does nothing.
    """

    def run() -> None:
        if joined.exception() is None:
            joined.result().abort()
        then()

    threading.Thread(target=run, name="nccl-abort", daemon=True).start()


class Nccl(ABC):
    """The NCCL library in this process.

    Attributes:
        version: Version as NCCL encodes it: 22703 for 2.27.3.
    """

    version: int

    @abstractmethod
    def unique_id(self) -> bytes:
        """Creates the unique id of a new communicator, UNIQUE_ID_BYTES long. Called by its rank 0 only."""

    @abstractmethod
    def join(self, unique_id: bytes, rank: int, size: int) -> Communicator:
        """Joins a communicator of `size` ranks as `rank`. Blocks until all ranks have joined.

        Raises:
            CommunicatorError: The other ranks did not join.
        """


def version_text(version: int) -> str:
    """Formats a version of NCCL: "2.27.3" for 22703."""
    return f"{version // 10_000}.{version // 100 % 100}.{version % 100}"


def why_no_nccl() -> str | None:
    """Returns the reason why this process cannot use NCCL, or None if it can."""
    reason = why_no_cuda()
    if reason is None and not cupy_nccl().available:
        reason = f"cupy finds no libnccl: {INSTALL_HINT}"
    return reason


def cupy_nccl() -> Any:
    """Imports `cupy.cuda.nccl` with the NCCL that torch uses, and returns it. Versions have to be the same on both
    sides of a communicator, so a rank without torch, such as one of a reward service, has to load that NCCL too; cupy
    alone may find one of the system.

    Raises:
        ImportError: cupy is not installed.
    """
    for name in NCCL_WHEELS:
        try:
            path = Path(str(importlib.metadata.distribution(name).locate_file(LIBRARY)))
        except importlib.metadata.PackageNotFoundError:
            continue
        if path.exists():
            ctypes.CDLL(str(path))  # from now on, libraries that need libnccl.so.2 get this one
            break
    return cupy("cuda.nccl")


class CupyNccl(Nccl):
    """NCCL through `cupy.cuda.nccl`."""

    def __init__(self, cuda: CupyCuda) -> None:
        self._nccl = cupy_nccl()
        self._cuda = cuda
        self.version = int(self._nccl.get_version())

    def unique_id(self) -> bytes:
        return bytes(self._nccl.get_unique_id())

    def join(self, unique_id: bytes, rank: int, size: int) -> Communicator:
        self._cuda.use()
        try:
            return _CupyCommunicator(
                self._cuda, self._nccl, self._nccl.NcclCommunicator(size, unique_id, rank)
            )
        except self._nccl.NcclError as error:
            raise CommunicatorError(f"the communicator could not be made: {error}") from error


class _CupyCommunicator(Communicator):
    """A `cupy.cuda.nccl.NcclCommunicator` with its CUDA stream."""

    def __init__(self, cuda: CupyCuda, nccl: Any, communicator: Any) -> None:
        self._cuda = cuda
        self._nccl = nccl
        self._communicator = communicator
        self._stream = cupy("cuda").Stream(non_blocking=True)
        self._reached = cupy("cuda").Event(disable_timing=True)
        self._lock = threading.Lock()
        self._ended = False

    def wait(self, event: Event) -> None:
        assert isinstance(event, CupyEvent)
        self._cuda.use()
        self._cuda._runtime.streamWaitEvent(self._stream.ptr, event.pointer)

    def group(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        self._cuda.use()
        nccl, communicator, stream = self._nccl, self._communicator, self._stream.ptr
        try:
            nccl.groupStart()
            for message in sends:
                communicator.send(message.pointer, message.nbytes, nccl.NCCL_UINT8, message.peer, stream)
            for message in receives:
                communicator.recv(message.pointer, message.nbytes, nccl.NCCL_UINT8, message.peer, stream)
            nccl.groupEnd()
            self._reached.record(self._stream)
        except (nccl.NcclError, self._cuda._runtime.CUDARuntimeError) as error:
            raise CommunicatorError(f"NCCL: {error}") from error

    def done(self) -> bool:
        with self._lock:
            if self._ended:
                raise CommunicatorError("the communicator was aborted")
            self._cuda.use()
            try:
                self._communicator.check_async_error()
                return self._reached.done
            except (self._nccl.NcclError, self._cuda._runtime.CUDARuntimeError) as error:
                raise CommunicatorError(f"NCCL: {error}") from error

    def abort(self) -> None:
        with self._lock:
            if not self._ended:
                self._ended = True
                self._cuda.use()
                self._communicator.abort()


def own_nccl() -> Nccl:
    """Creates the interface to NCCL on the GPU of this process, by cupy."""
    cuda = own_cuda()
    assert isinstance(cuda, CupyCuda)
    return CupyNccl(cuda)
