"""The reader's side of the nccl transport; see `nccl_transfer.transports.gpu.nccl`."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import grpc

from nccl_transfer.devices.cuda import Cuda, DeviceBuffer
from nccl_transfer.refs.ranges import ByteRange
from nccl_transfer.refs.shards import Endpoint
from nccl_transfer.transports.base import DeviceMemory
from nccl_transfer.transports.common import remaining_s
from nccl_transfer.transports.gpu.communicator import (
    READER,
    SOURCE,
    CommunicatorError,
    Message,
    Nccl,
)
from nccl_transfer.transports.gpu.device_read import DeviceRead
from nccl_transfer.transports.gpu.liveness import LivenessStream, wait_for_answer
from nccl_transfer.transports.gpu.manifest import manifest_item
from nccl_transfer.transports.gpu.nccl_reader_session import NcclReaderSession
from nccl_transfer.transports.gpu.peer_connection import PeerConnection
from nccl_transfer.transports.gpu.transaction import Phase, Transaction
from rlhf.errors import (
    DeadlineExceeded,
    RlhfError,
    ServiceLost,
    from_rpc_error,
)
from rlhf.v1 import nccl_pb2 as pb
from rlhf.v1.nccl_pb2_grpc import NcclServiceStub

ABORT_S = 1.0
"""Timeout of an Abort call in seconds; without it the source aborts by itself, at its own deadline."""


class NcclClient(PeerConnection[NcclServiceStub, NcclReaderSession]):
    """Reads from one source by NCCL, with at most one communicator and one transfer at a time."""

    def __init__(self, nccl: Nccl, cuda: Cuda, address: str) -> None:
        super().__init__(address, NcclServiceStub)
        self._nccl = nccl
        self._cuda = cuda
        self._reader = uuid.uuid4().hex
        self._epoch = 0  # of the newest communicator
        self._buffer: DeviceBuffer | None = None

    def receive(self, read: DeviceRead) -> None:
        """Waits for earlier transfers from the source, then reads into memory of this rank's GPU; raises as
        `NcclReader.receive` does."""
        with self._session_for(read.source, read.deadline, read.memory.free) as (session, plan):
            self._transfer(read, session, plan)

    def read(
        self,
        source: Endpoint,
        ranges: Sequence[ByteRange],
        offsets: Sequence[int],
        data: memoryview,
        deadline: float,
    ) -> None:
        """Reads into `data`, in host memory, by a buffer on this rank's GPU that is kept between reads; arguments and
        errors are those of `NcclReader.receive`."""
        with self._session_for(source, deadline) as (session, plan):
            if self._buffer is None or self._buffer.nbytes < len(data):
                self._free_buffer()
                self._buffer = DeviceBuffer(self._cuda, len(data))
            try:
                self._transfer(DeviceRead(source, ranges, self._buffer, offsets, deadline), session, plan)
            except BaseException:
                self._buffer = None  # the transfer has freed it, or will
                raise
            self._cuda.copy_out(data, self._buffer.pointer)

    @contextmanager
    def _session_for(
        self, source: Endpoint, deadline: float, free: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[NcclReaderSession, str]]:
        """Context manager that yields a session with the source and the id of a plan, while no other transfer uses the
        connection. Calls `free` where there is no session."""
        plan = uuid.uuid4().hex[:12]
        with ExitStack() as turn:
            try:
                turn.enter_context(self.turn(source, f"{source}: plan {plan}, queue", deadline))
                session = self.resources(source, f"{source}: plan {plan}, attach", deadline)
            except BaseException:
                free()
                raise
            yield session, plan

    def _free_buffer(self) -> None:
        if self._buffer is not None:
            self._buffer.free()
        self._buffer = None

    def end(self, free: Callable[[], None] = lambda: None) -> None:
        """Ends the session, if any. Frees the buffer, and calls `free` to free other memory that the session used, once
        its communicator is aborted."""
        buffer, self._buffer = self._buffer, None

        def free_all() -> None:
            free()
            if buffer is not None:
                buffer.free()

        if self._resources is not None:
            self._resources.end(free_all)
        else:
            free_all()
        self._resources = None

    def make_resources(self, source: Endpoint, where: str, deadline: float) -> NcclReaderSession:
        """Creates a communicator with the source; returns its session."""
        self._epoch += 1
        unique_id = self._nccl.unique_id()
        request = pb.AttachRequest(
            reader=self._reader,
            epoch=source.epoch,
            communicator_epoch=self._epoch,
            unique_id=unique_id,
            nccl_version=self._nccl.version,
        )
        session = NcclReaderSession(
            self._epoch, LivenessStream(self.stub.Attach(request), self.closed), self._cuda
        )
        try:
            session.liveness.first(deadline, where)
            session.join(lambda: self._nccl.join(unique_id, READER, 2), deadline, where)
        except BaseException:
            session.end()
            raise
        return session

    def _transfer(self, read: DeviceRead, session: NcclReaderSession, plan: str) -> None:
        transaction = Transaction(plan, session.epoch)
        try:
            self._prepare(read, session, transaction)
            transaction.prepare()
            transaction.commit(transaction.plan, session.epoch)
            self._commit(read, session, transaction)
            transaction.finish()
        except BaseException as error:
            was_refused = transaction.phase is Phase.IDLE and _is_answer(error)
            transaction.abort(str(error))
            if was_refused:
                read.memory.free()
            else:
                self._abort_transfer(transaction, read.memory)
            raise

    def _prepare(self, read: DeviceRead, session: NcclReaderSession, transaction: Transaction) -> None:
        left = remaining_s(read.deadline, read.source)
        request = pb.PrepareRequest(
            reader=self._reader,
            plan=transaction.plan,
            epoch=read.source.epoch,
            communicator_epoch=session.epoch,
            items=map(manifest_item, read.ranges),
            nbytes=sum(r.nbytes for r in read.ranges),
            deadline_s=left,
        )
        where = f"{read.source}: plan {transaction.plan}, prepare"
        prepared = self.stub.Prepare.future(request, timeout=left)
        wait_for_answer(prepared, session.liveness, read.deadline, where)

    def _commit(self, read: DeviceRead, session: NcclReaderSession, transaction: Transaction) -> None:
        """Makes both sides enqueue their NCCL group; blocks until the bytes have arrived and the source has confirmed.
        Raises an RlhfError where the communicator or the source failed, or the deadline passed."""
        request = pb.CommitRequest(
            reader=self._reader, plan=transaction.plan, communicator_epoch=session.epoch
        )
        where = f"{read.source}: plan {transaction.plan}, transfer"
        places = zip(read.offsets, read.ranges, strict=True)
        receives = [Message(SOURCE, read.memory.pointer + offset, r.nbytes) for offset, r in places]
        commit, communicator = self.stub.Commit.future(request), session.communicator
        entered = session.submit(partial(session.enter, receives))

        def received() -> bool:
            if commit.done():
                commit.result()  # raises if the source did not enter or failed
            if entered.done():
                entered.result()
            return entered.done() and communicator.done()

        try:
            session.liveness.wait(received, read.deadline, where)
        except CommunicatorError as error:
            raise session.explain(error, where) from error
        except grpc.RpcError as error:
            raise from_rpc_error(error, where) from error
        wait_for_answer(commit, session.liveness, read.deadline, where)

    def _abort_transfer(self, transaction: Transaction, memory: DeviceMemory) -> None:
        """Aborts the session without waiting for the source, which learns of it by the Abort call, the end of the
        liveness stream or its own deadline. Frees `memory` once the communicator is aborted."""
        request = pb.AbortRequest(
            reader=self._reader,
            plan=transaction.plan,
            communicator_epoch=transaction.communicator_epoch,
            reason=transaction.reason,
        )
        self.stub.Abort.future(request, timeout=ABORT_S)
        self.end(memory.free)


def _is_answer(error: BaseException) -> bool:
    """Returns whether the source responded with this error, so that it is alive and the communicator usable."""
    return isinstance(error, RlhfError) and not isinstance(error, (DeadlineExceeded, ServiceLost))
