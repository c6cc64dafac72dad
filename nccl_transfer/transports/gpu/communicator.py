"""The NCCL calls of the data plane behind an interface, so that the transport and its tests do not depend on NCCL."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from nccl_transfer.transports.gpu.device import (
    INSTALL_HINT,
    CupyCuda,
    CupyEvent,
    Event,
    cupy,
    own_cuda,
    why_no_cuda,
)

UNIQUE_ID_BYTES = 128

READER, SOURCE = 0, 1
"""Ranks in a communicator of two."""


class CommunicatorError(Exception):
    """A communicator failed or was aborted, and can no longer be used. The transport converts this to an error of the
    contract."""


@dataclass(frozen=True, slots=True)
class Message:
    """Device memory to send to, or receive from, a rank of a communicator. Bytes, so any element type is supported."""

    peer: int
    pointer: int
    nbytes: int


class Communicator(ABC):
    """Ranks that send to each other, each on a private stream."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Makes later groups wait for the point that `event` recorded."""

    @abstractmethod
    def group(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Enqueues all messages as one group. The peer's group must contain the same messages in the same order. The
        first group may block until the peer enters.

        Raises:
            CommunicatorError: The communicator failed, or was aborted by another thread.
        """

    @abstractmethod
    def done(self) -> bool:
        """Whether all enqueued groups have completed.

        Raises:
            CommunicatorError: The communicator failed, or was aborted.
        """

    @abstractmethod
    def abort(self) -> None:
        """Ends all operations, also those of other threads, and frees the communicator. Idempotent."""


def abort_in_background(joined: Future[Communicator], then: Callable[[], None] = lambda: None) -> None:
    """Aborts a communicator, if it was created, then calls `then`. In a thread of its own, because NCCL's abort may
    block."""

    def run() -> None:
        if joined.exception() is None:
            joined.result().abort()
        then()

    threading.Thread(target=run, name="nccl-abort", daemon=True).start()


class Nccl(ABC):
    """The NCCL library.

    Attributes:
        version: As NCCL encodes it: 2.27.3 is 22703.
    """

    version: int

    @abstractmethod
    def unique_id(self) -> bytes:
        """Unique id of a new communicator, UNIQUE_ID_BYTES long; created by its rank 0."""

    @abstractmethod
    def join(self, unique_id: bytes, rank: int, size: int) -> Communicator:
        """Joins a communicator; returns when all ranks have joined.

        Raises:
            CommunicatorError: The other ranks did not join.
        """


def version_text(version: int) -> str:
    """Formats a version: 22703 is 2.27.3."""
    return f"{version // 10_000}.{version // 100 % 100}.{version % 100}"


def why_no_nccl() -> str | None:
    """Why this process cannot use NCCL; None if it can."""
    reason = why_no_cuda()
    if reason is None and not cupy("cuda.nccl").available:
        reason = f"cupy finds no libnccl: {INSTALL_HINT}"
    return reason


class CupyNccl(Nccl):
    """NCCL through `cupy.cuda.nccl`."""

    def __init__(self, cuda: CupyCuda) -> None:
        self._nccl = cupy("cuda.nccl")
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
    """A `cupy.cuda.nccl.NcclCommunicator` and its stream."""

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
    """NCCL on the GPU of this process."""
    cuda = own_cuda()
    assert isinstance(cuda, CupyCuda)
    return CupyNccl(cuda)
