"""The source's side of the nccl transport; see `nccl_transfer.transports.gpu.nccl`."""

from __future__ import annotations

import asyncio
import logging
import struct
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from nccl_transfer.devices.cuda import Cuda, DeviceBuffer, Event
from nccl_transfer.store.device_arrays import Pin
from nccl_transfer.store.store import TensorStore
from nccl_transfer.transports.base import Handler, Source
from nccl_transfer.transports.common import check_epoch, layout
from nccl_transfer.transports.gpu.communicator import (
    READER,
    SOURCE,
    Communicator,
    CommunicatorError,
    Message,
    Nccl,
    abort_in_background,
    version_text,
)
from nccl_transfer.transports.gpu.manifest import check_manifest
from nccl_transfer.transports.gpu.transaction import Phase, Transaction
from rlhf.errors import Refused, TransferError
from rlhf.v1 import nccl_pb2 as pb

ADVERT = struct.Struct("<I")
"""Start of the advert: version of NCCL, as NCCL encodes it (22703 for 2.27.3). The UUID of the GPU follows."""

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
        logging.warning("%s was not done by its deadline, and is aborted", self.transaction)
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


class NcclSource(Source):
    """Handlers of the RPCs by which a rank sends its shards by NCCL. They run in the event loop and send in one
    thread per reader.

    Args:
        store: Store that holds the shards.
        nccl, cuda: NCCL, and the GPU on which bytes are staged.
    """

    service = "rlhf.v1.nccl_pb2:NcclService"

    def __init__(self, store: TensorStore, nccl: Nccl, cuda: Cuda) -> None:
        self._store = store
        self._nccl = nccl
        self._cuda = cuda
        self._sessions: dict[str, NcclSession] = {}

    def advert(self) -> bytes:
        return ADVERT.pack(self._nccl.version) + self._cuda.uuid.encode()

    def handlers(self) -> Mapping[str, Handler]:
        return {
            "Attach": lambda request, _: self.attach(request),
            "Prepare": lambda request, _: self.prepare(request),
            "Commit": lambda request, _: self.commit(request),
            "Abort": lambda request, _: self.abort(request),
        }

    async def attach(self, request: pb.AttachRequest) -> AsyncIterator[pb.AttachResponse]:
        """Handles the Attach RPC: creates a communicator with the reader, and ends it when the stream ends. Ends an
        earlier communicator with this reader. Its one message is sent before the communicator is complete.

        Raises:
            Refused: The request is for another epoch of the service, the reader's NCCL version differs, or its
                communicator epoch is not newer than the current one.
        """
        check_epoch(self._store, request.epoch)
        if request.nccl_version != self._nccl.version:
            here, there = version_text(self._nccl.version), version_text(request.nccl_version)
            raise Refused(f"NCCL is {here} here and {there} at the reader: versions must not be mixed")
        before = self._sessions.get(request.reader)
        if before is not None and request.communicator_epoch <= before.epoch:
            raise Refused(f"communicator {request.communicator_epoch} is not newer than {before.epoch}")
        if before is not None:
            before.end("the reader made a new communicator")
        session = NcclSession(
            request.communicator_epoch, self._cuda, lambda: self._nccl.join(request.unique_id, SOURCE, 2)
        )
        self._sessions[request.reader] = session
        try:
            yield pb.AttachResponse(nccl_version=self._nccl.version)
            await session.ended.wait()
        finally:
            session.end("the reader has gone")
            if self._sessions.get(request.reader) is session:
                del self._sessions[request.reader]

    async def prepare(self, request: pb.PrepareRequest) -> pb.PrepareResponse:
        """Handles the Prepare RPC: checks the manifest and stages its bytes on the GPU.

        Raises:
            Refused: The request is for another epoch of the service or another communicator, another plan of the
                reader is running, or a shard was released.
            InvalidRequest: The manifest is inconsistent.
            TransferError: A range reaches beyond its shard, a shard was marked corrupt, or the communicator failed.
            OutOfSpace: The GPU has too little free memory to stage the bytes.
        """
        check_epoch(self._store, request.epoch)
        session = self._session_of(request)
        if session.transaction is not None and not session.transaction.phase.over:
            raise Refused(f"{session.transaction} is under way")
        transaction = Transaction(request.plan, request.communicator_epoch)
        check_manifest(request.items, request.nbytes)
        session.begin(transaction, request.deadline_s)
        try:
            await session.run(session.stage, self._store, request.items)
            transaction.prepare()
        except BaseException as error:
            if not transaction.phase.over:
                transaction.abort(str(error))
            session.finish()
            raise
        return pb.PrepareResponse(nbytes=request.nbytes)

    async def commit(self, request: pb.CommitRequest) -> pb.CommitResponse:
        """Handles the Commit RPC: sends the staged bytes, and responds when they are sent.

        Raises:
            Refused: The plan was not prepared, or was aborted.
            TransferError: The communicator failed or was aborted.
        """
        session = self._session_of(request)
        if session.transaction is None:
            raise Refused(f"plan {request.plan} was not prepared")
        transaction = session.transaction
        transaction.commit(request.plan, request.communicator_epoch)
        nbytes = session.nbytes
        try:
            await session.run(session.send)
            transaction.finish()
        except BaseException as error:
            session.end(str(error))
            raise
        session.finish()
        return pb.CommitResponse(nbytes=nbytes)

    async def abort(self, request: pb.AbortRequest) -> pb.AbortResponse:
        """Handles the Abort RPC: ends the session of the communicator, if it exists."""
        session = self._sessions.get(request.reader)
        if session is None or session.epoch != request.communicator_epoch:
            return pb.AbortResponse(found=False)
        logging.warning("plan %s was given up by its reader: %s", request.plan, request.reason)
        session.end(request.reason)
        return pb.AbortResponse(found=True)

    def close(self) -> None:
        """Ends all communicators."""
        for session in self._sessions.values():
            session.end("the source is shutting down")

    def _session_of(self, request: pb.PrepareRequest | pb.CommitRequest) -> NcclSession:
        """Returns the session of the request's reader. Raises Refused if it is of another communicator epoch."""
        session = self._sessions.get(request.reader)
        if session is None or session.epoch != request.communicator_epoch:
            current = session.epoch if session is not None else "none"
            raise Refused(
                f"plan {request.plan} is for communicator {request.communicator_epoch}, current is {current}"
            )
        return session
