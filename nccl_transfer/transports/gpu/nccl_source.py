"""The sending side of `nccl`: see `nccl_transfer.transports.gpu.nccl`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from nccl_transfer.store.store import TensorStore
from nccl_transfer.transports.base import check_epoch, layout
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
from nccl_transfer.transports.gpu.device import Cuda, DeviceBuffer
from nccl_transfer.transports.gpu.manifest import check_manifest
from nccl_transfer.transports.gpu.transaction import Phase, Transaction
from rlhf.errors import Refused, TransferError
from rlhf.v1 import transfer_pb2 as pb

SEND_PAUSE_S = 1e-4
"""Pause between two polls of a send."""

GRACE_S = 0.25
"""Seconds between the deadline of a transfer, at which its reader aborts it, and the source's own abort: a source that
aborted at the same moment would be blamed for the missed deadline."""


class NcclSession:
    """The source's side of a communicator with one reader: the thread that uses it, and one transaction.

    Methods are called from the event loop, except where they say that they run in the thread.
    """

    def __init__(self, epoch: int, cuda: Cuda, join: Callable[[], Communicator]) -> None:
        self.epoch = epoch
        self.transaction: Transaction | None = None
        self.ended = asyncio.Event()
        self._cuda = cuda
        self._produced = cuda.event()
        self._worker = ThreadPoolExecutor(1, "nccl-source")
        self._joined: Future[Communicator] = self._worker.submit(join)
        self._buffer: DeviceBuffer | None = None
        self._sends: list[Message] = []
        self._timer: asyncio.TimerHandle | None = None

    @property
    def nbytes(self) -> int:
        """Number of staged bytes."""
        return sum(message.nbytes for message in self._sends)

    def begin(self, transaction: Transaction, within_s: float) -> None:
        """Begins a transaction that has to end within `within_s` seconds; the session ends GRACE_S after that."""
        self.transaction = transaction
        self._timer = asyncio.get_running_loop().call_later(within_s + GRACE_S, self._expire)

    def finish(self) -> None:
        """Ends the transaction: stops its timer and frees its buffer. The communicator stays usable."""
        if self._timer is not None:
            self._timer.cancel()
        if not self.ended.is_set():
            self._worker.submit(self._free)

    def _expire(self) -> None:
        logging.warning("%s was not done by its deadline, and is aborted", self.transaction)
        self.end("it was not done by its deadline")

    async def run(self, work: Callable[..., None], *arguments: Any) -> None:
        """Runs `work` in the thread.

        Raises:
            Refused: The session has ended.
            TransferError: The communicator failed, or was aborted.
        """
        if self.ended.is_set():
            raise Refused(f"{self.transaction}: the communicator has ended")
        try:
            await asyncio.wrap_future(self._worker.submit(work, *arguments))
        except CommunicatorError as error:
            raise TransferError(f"{self.transaction}: {error}") from error

    def stage(self, store: TensorStore, items: Sequence[pb.ManifestItem]) -> None:
        """Copies the items to the GPU. Runs in the thread."""
        self._joined.result()
        offsets, total = layout(item.range.nbytes for item in items)
        self._buffer = buffer = DeviceBuffer(self._cuda, total)
        self._sends = []
        for offset, item in zip(offsets, items, strict=True):
            r, pointer = item.range, buffer.pointer + offset
            store.copy(r.shard, r.start, r.nbytes, lambda data, to=pointer: self._cuda.copy_in(to, data))
            self._sends.append(Message(READER, pointer, r.nbytes))
        self._produced.record()

    def send(self) -> None:
        """Sends the staged bytes; returns when they are sent or the session has ended. Runs in the thread."""
        communicator = self._joined.result()
        communicator.wait(self._produced)
        communicator.group(self._sends, [])
        while not self.ended.is_set() and not communicator.done():
            time.sleep(SEND_PAUSE_S)

    def _free(self) -> None:
        """Frees the staged bytes. Runs in the thread."""
        if self._buffer is not None:
            self._buffer.free()
        self._buffer, self._sends = None, []

    def end(self, reason: str) -> None:
        """Aborts the transaction and the communicator, and frees everything. Idempotent."""
        if self.ended.is_set():
            return
        self.finish()
        self.ended.set()
        if self.transaction is not None and self.transaction.phase is not Phase.DONE:
            self.transaction.abort(reason)
        self._joined.add_done_callback(abort_in_background)
        self._worker.submit(self._produced.close)
        self._worker.shutdown(wait=False)


class NcclSource:
    """The sending side of a rank. Used from the event loop; sends in a thread per reader.

    Args:
        store: Where the shards are.
        nccl, cuda: The library and the GPU that the shards are sent from.
    """

    def __init__(self, store: TensorStore, nccl: Nccl, cuda: Cuda) -> None:
        self._store = store
        self._nccl = nccl
        self._cuda = cuda
        self._sessions: dict[str, NcclSession] = {}

    async def attach(self, request: pb.AttachRequest) -> AsyncIterator[pb.AttachResponse]:
        """Answers an Attach.

        Raises:
            Refused: Wrong epoch, another NCCL version, or not a newer communicator epoch.
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
        """Answers a Prepare.

        Raises:
            Refused: Wrong epoch or communicator, another plan is running, or a shard was released.
            InvalidRequest: The manifest contradicts itself.
            TransferError: A range reaches beyond its shard.
            OutOfSpace: The GPU has too little memory to stage the bytes.
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
        """Answers a Commit once everything is sent.

        Raises:
            Refused: Another plan was prepared, or the plan was aborted.
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
        """Answers an Abort."""
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
        session = self._sessions.get(request.reader)
        if session is None or session.epoch != request.communicator_epoch:
            current = session.epoch if session is not None else "none"
            raise Refused(
                f"plan {request.plan} is for communicator {request.communicator_epoch}, current is {current}"
            )
        return session
