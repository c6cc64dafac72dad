"""A communicator of the nccl transport at the source, its thread, and the transaction under way; see
`nccl_transfer.transports.gpu.nccl`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from nccl_transfer.devices.cuda import Cuda, DeviceBuffer, Event
from nccl_transfer.store.device_arrays import Pin
from nccl_transfer.store.store import TensorStore
from nccl_transfer.transports.common import layout
from nccl_transfer.transports.gpu.communicator import (
    READER,
    Communicator,
    CommunicatorError,
    Message,
    abort_in_background,
)
from nccl_transfer.transports.gpu.transaction import Phase, Transaction
from rlhf.errors import Refused, TransferError, one_line
from rlhf.v1 import nccl_pb2 as pb

SEND_PAUSE_S = 1e-4
"""Pause between two polls of a send, in seconds."""

GRACE_S = 0.25
"""Seconds from the deadline of a transfer, at which the reader aborts it, to the source's own abort. If both aborted
at the deadline, the reader could report the source's abort as the cause."""


class NcclSession:
    """The source's side of a communicator with one reader: the thread that calls NCCL, and the current transaction.

    Methods are called from the event loop, except those whose docstrings say that they run in the session's thread.

    Args:
        epoch: Communicator epoch, the number of the communicator.
        cuda: The GPU on which bytes are staged.
        join: Joins the communicator; called in the session's thread.

    Attributes:
        transaction: The current or last transaction; None before the first.
        ended: Set when the session has ended.
    """

    def __init__(self, epoch: int, cuda: Cuda, join: Callable[[], Communicator]) -> None:
        self.epoch = epoch
        self.transaction: Transaction | None = None
        self.ended = asyncio.Event()
        self._cuda = cuda
        self._worker = ThreadPoolExecutor(1, "nccl-source")
        self._joined: Future[Communicator] = self._worker.submit(join)
        self._produced: Event | None = None
        self._buffer: DeviceBuffer | None = None
        self._pins: list[Pin] = []
        self._sends: list[Message] = []
        self._timer: asyncio.TimerHandle | None = None

    @property
    def nbytes(self) -> int:
        """Number of bytes that are ready to be sent."""
        return sum(message.nbytes for message in self._sends)

    async def join(self) -> None:
        """Waits until the communicator has been created or the session has ended.

        Raises:
            TransferError: The communicator could not be created.
        """
        ended = asyncio.ensure_future(self.ended.wait())
        joined = asyncio.wrap_future(self._joined)
        try:
            await asyncio.wait((joined, ended), return_when=asyncio.FIRST_COMPLETED)
            if joined.done() and (error := joined.exception()) is not None:
                raise TransferError(f"the communicator could not be created: {error}") from error
        finally:
            ended.cancel()

    def begin(self, transaction: Transaction, within_s: float) -> None:
        """Begins a transaction. If it is not finished within `within_s` + GRACE_S seconds, the session ends."""
        self.transaction = transaction
        self._timer = asyncio.get_running_loop().call_later(within_s + GRACE_S, self._expire)

    def finish(self) -> None:
        """Stops the transaction's timer and has the session's thread unpin its shards, without waiting for it. The
        communicator stays usable, and staging memory is kept for the next transaction."""
        self._stop_timer()
        if not self.ended.is_set():
            self._worker.submit(self._unpin)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _expire(self) -> None:
        """Ends the session: its transaction was not finished by its deadline."""
        logging.warning("%s was not done by its deadline, and is aborted", one_line(str(self.transaction)))
        self.end("it was not done by its deadline")

    async def run(self, work: Callable[..., None], *arguments: Any) -> None:
        """Runs `work(*arguments)` in the session's thread and waits for it.

        Raises:
            Refused: The session has ended.
            TransferError: The communicator failed, or was aborted. Other errors of `work` are passed on.
        """
        if self.ended.is_set():
            raise Refused(f"{self.transaction}: the communicator has ended")
        try:
            await asyncio.wrap_future(self._worker.submit(work, *arguments))
        except CommunicatorError as error:
            raise TransferError(f"{self.transaction}: {error}") from error

    def stage(self, store: TensorStore, items: Sequence[pb.ManifestItem]) -> None:
        """Pins the items of a manifest that are on the GPU, and copies the others from the store to the GPU. Runs in
        the session's thread. Raises OutOfSpace, CommunicatorError, or an error of `TensorStore.copy`."""
        self._joined.result()
        device = store.device
        staged = [device is None or item.range.shard not in device for item in items]
        sizes = (item.range.nbytes if is_staged else 0 for item, is_staged in zip(items, staged, strict=True))
        offsets, total = layout(sizes)
        self._reserve(total)
        self._sends = []
        for offset, item, is_staged in zip(offsets, items, staged, strict=True):
            r = item.range
            if is_staged:
                assert self._buffer is not None, "there is memory for the items that are staged"
                pointer = self._buffer.pointer + offset
                store.copy(r.shard, r.start, r.nbytes, lambda data, to=pointer: self._cuda.copy_in(to, data))
            else:
                assert device is not None, "the item is on the GPU"
                self._pins.append(pin := device.pin(r.shard, r.start, r.nbytes))
                pointer = pin.pointer + r.start
            self._sends.append(Message(READER, pointer, r.nbytes))
        self._produced = self._produced or self._cuda.event()
        self._produced.record()

    def _reserve(self, nbytes: int) -> None:
        """Allocates staging memory of at least `nbytes` bytes, unless there is some."""
        if self._buffer is not None and self._buffer.nbytes < nbytes:
            self._buffer.free()
            self._buffer = None
        if self._buffer is None and nbytes:
            self._buffer = DeviceBuffer(self._cuda, nbytes)

    def send(self) -> None:
        """Sends the items; blocks until they are sent or the session has ended. Runs in the session's thread."""
        communicator = self._joined.result()
        for event in (self._produced, *(pin.event for pin in self._pins)):
            if event is not None:
                communicator.wait(event)
        communicator.group(self._sends, [])
        while not self.ended.is_set() and not communicator.done():
            time.sleep(SEND_PAUSE_S)

    def _unpin(self) -> None:
        """Unpins the shards of the transaction, which are sent or will not be."""
        for pin in self._pins:
            pin.free()
        self._pins, self._sends = [], []

    def _free(self) -> None:
        """Unpins shards and frees memory and event, once nothing is sent from there any more."""
        self._unpin()
        if self._buffer is not None:
            self._buffer.free()
        if self._produced is not None:
            self._produced.close()
        self._buffer = self._produced = None

    def end(self, reason: str) -> None:
        """Aborts the transaction and the communicator, and frees their resources. Idempotent."""
        if self.ended.is_set():
            return
        self._stop_timer()
        self.ended.set()
        if self.transaction is not None and self.transaction.phase is not Phase.DONE:
            self.transaction.abort(reason)
        self._joined.add_done_callback(partial(abort_in_background, then=self._retire))

    def _retire(self) -> None:
        """Frees all resources, behind what the session's thread does now, and ends the thread. Called once the
        communicator is aborted."""
        self._worker.submit(self._free)
        self._worker.shutdown(wait=False)
