"""The source's side of the nccl transport; see `nccl_transfer.transports.gpu.nccl`."""

from __future__ import annotations

import logging
import struct
from collections.abc import AsyncIterator, Mapping

from nccl_transfer.devices.cuda import Cuda
from nccl_transfer.store.store import TensorStore
from nccl_transfer.transports.base import Handler, Source
from nccl_transfer.transports.common import check_epoch
from nccl_transfer.transports.gpu.communicator import (
    SOURCE,
    Nccl,
    version_text,
)
from nccl_transfer.transports.gpu.manifest import check_manifest
from nccl_transfer.transports.gpu.nccl_session import NcclSession
from nccl_transfer.transports.gpu.transaction import Transaction
from rlhf.errors import Refused, one_line
from rlhf.v1 import nccl_pb2 as pb

ADVERT = struct.Struct("<I")
"""Start of the advert: version of NCCL, as NCCL encodes it (22703 for 2.27.3). The UUID of the GPU follows."""


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
            TransferError: The communicator could not be created here.
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
            await session.join()
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
        logging.warning(
            "plan %s was given up by its reader: %s", one_line(request.plan), one_line(request.reason)
        )
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
