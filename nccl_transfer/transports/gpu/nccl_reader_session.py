"""A communicator of the nccl transport at the reader, and its thread; see `nccl_transfer.transports.gpu.nccl`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from nccl_transfer.devices.cuda import Cuda, Event
from nccl_transfer.transports.gpu.communicator import (
    Communicator,
    CommunicatorError,
    Message,
    abort_in_background,
)
from nccl_transfer.transports.gpu.liveness import LivenessStream
from rlhf.errors import (
    RlhfError,
    TransferError,
)

T = TypeVar("T")

CAUSE_WAIT_S = 0.5
"""Seconds to wait, after a communicator failed, for the end of the liveness stream, which tells that the source
died."""


class NcclReaderSession:
    """The reader's side of a communicator with one source, and the thread that calls NCCL.

    Args:
        epoch: Communicator epoch, the number of the communicator.
        liveness: Stream of the Attach call.
        cuda: The GPU into which bytes are received.
    """

    def __init__(self, epoch: int, liveness: LivenessStream, cuda: Cuda) -> None:
        self.epoch = epoch
        self.liveness = liveness
        self._cuda = cuda
        self._writable: Event | None = None
        self._joined: Future[Communicator] | None = None
        self._worker = ThreadPoolExecutor(1, "nccl")

    @property
    def communicator(self) -> Communicator:
        """The communicator that `join` has created; `join` must have returned."""
        assert self._joined is not None
        return self._joined.result()

    def join(self, join: Callable[[], Communicator], deadline: float, where: str) -> None:
        """Creates the communicator: calls `join` in the session's thread and waits until the source has joined too.

        Raises:
            TransferError: The communicator could not be created here. Other errors as raised by `LivenessStream.wait`,
                that of a source which could not create it among them.
        """
        self._joined = self.submit(join)
        self.liveness.wait(self._joined.done, deadline, where)
        try:
            self._joined.result()
        except CommunicatorError as error:
            raise self.explain(error, where) from error

    def enter(self, receives: Sequence[Message]) -> None:
        """Enqueues receives, behind the work that is on the private stream of the GPU. Runs in the session's
        thread."""
        self._writable = self._writable or self._cuda.event()
        self._writable.record()
        self.communicator.wait(self._writable)
        self.communicator.group([], receives)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Submits `work` to the session's thread; returns its future, which never completes if NCCL blocks."""
        return self._worker.submit(work)

    def explain(self, error: CommunicatorError, where: str) -> RlhfError:
        """Returns the error to raise for a failed communicator: the error with which the liveness stream ends within
        CAUSE_WAIT_S seconds, else a TransferError with the text of `error`. Blocks for that time."""
        return self.liveness.end_cause(where, CAUSE_WAIT_S) or TransferError(f"{where}: {error}")

    def end(self, free: Callable[[], None] = lambda: None) -> None:
        """Aborts the communicator in the background and then calls `free`. Cancels the liveness stream, upon which
        the source aborts its side."""

        def free_all() -> None:
            free()
            if self._writable is not None:
                self._writable.close()

        if self._joined is not None:
            # At once, or as soon as the communicator exists.
            self._joined.add_done_callback(lambda joined: abort_in_background(joined, free_all))
        else:
            free_all()
        self.liveness.cancel()
        self._worker.shutdown(wait=False, cancel_futures=True)
